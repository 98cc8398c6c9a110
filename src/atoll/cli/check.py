"""`atoll story` and `atoll check`: what the tapes of a run say, and whether every invariant holds over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, Result, print_to_stderr, reading_progress
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.sim.check_tapes import CheckResult
    from atoll.sim.checkers import Checker, InvariantViolationError
    from atoll.tape.files import RunTapes
    from atoll.tape.format import Entry
    from atoll.tape.story import StoryLine, Subject

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, with its folder of tapes.")]


def run_story(
    run: RunArgument,
    learner: Annotated[int | None, Setting("Tell of this learner.", "ID")] = None,
    fragment: Annotated[int | None, Setting("Tell of this fragment.", "P")] = None,
    whole: Annotated[bool, Setting("Tell of the run: who came and went, and its end.", flag="run")] = False,
    since: Annotated[float | None, Setting("From this time on, in seconds.", "SECONDS")] = None,
    until: Annotated[float | None, Setting("Up to this time, in seconds.", "SECONDS")] = None,
    last: Annotated[int | None, Setting("Only the last so many lines.", "LINES", min=1)] = None,
    as_json: JsonOption = False,
) -> Result:
    """Tell what happened in a run, in plain sentences.

    Of one learner, of one fragment or of the run as a whole, from its tapes.
    """
    from atoll.tape.files import RunTapes
    from atoll.tape.story import build_story

    subject = _parse_subject(learner, fragment, whole)
    tapes = RunTapes(run)
    _check_subject_exists(tapes, subject)
    told: Iterator[StoryLine] = (
        line
        for line in build_story(tapes.merged_entries(), subject, tapes.config)
        if (since is None or line.at >= since) and (until is None or line.at <= until)
    )
    lines = told if last is None else iter(deque(told, maxlen=last))
    return Result(
        lambda: {"subject": list(subject), "lines": [story_line_fields(line) for line in lines]},
        partial(_print_story, lines),
    )


def _print_story(lines: Iterator[StoryLine]) -> None:
    silent = True
    for line in lines:
        silent = False
        print(format_story_line(line))
    if silent:
        print_to_stderr("nothing was said in that time")


def format_story_line(line: StoryLine) -> str:
    """A line with its time in a column."""
    time, _, sentence = str(line).partition("  ")
    return f"{time:>14}  {sentence}"


def story_line_fields(line: StoryLine) -> dict[str, object]:
    return {
        "at": line.at,
        "actor": str(line.actor),
        "tick": line.tick,
        "subject": list(line.subject),
        "sentence": line.sentence,
    }


def _parse_subject(learner: int | None, fragment: int | None, whole: bool) -> Subject:
    if (learner is not None) + (fragment is not None) + whole != 1:
        raise ValueError("say whose story: --learner 3, --fragment 7 or --run, one of them")
    if learner is not None:
        return ("learner", learner)
    if fragment is not None:
        return ("fragment", fragment)
    return ("run", 0)


def _check_subject_exists(tapes: RunTapes, subject: Subject) -> None:
    kind, number = subject
    fragments = tapes.config.fragment_ids()
    if kind == "fragment" and number not in fragments:
        raise ValueError(f"no fragment {number} in this run: it has {_format_ids(fragments)}")
    if kind == "learner" and number not in tapes.learners() and not _has_messages_from(tapes, number):
        raise ValueError(f"no learner {number} in this run: it has {_format_ids(tapes.learners())}")


def _has_messages_from(tapes: RunTapes, learner: int) -> bool:
    """A learner whose tape was lost still has a story on the syncer's."""
    from atoll.core.protocol import MessageArrived

    return any(
        type(entry.event) is MessageArrived and entry.event.envelope.learner == learner
        for actor, reader in tapes.readers.items()
        if actor.learner == 0
        for entry in reader
    )


def _format_ids(numbers: list[int] | tuple[int, ...]) -> str:
    """
    >>> _format_ids([1, 2, 3, 4]), _format_ids([1, 3])
    ('1 to 4', '1 and 3')
    """
    if not numbers:
        return "none"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    *front, end = map(str, numbers)
    return f"{', '.join(front)} and {end}" if front else end


def run_check(
    run: RunArgument,
    last: Annotated[int, Setting("Lines of the story of a violation.", "LINES", min=1)] = 40,
    as_json: JsonOption = False,
) -> Result:
    """Check every invariant over the tapes of a run.

    Tells the story of the first violation, and ends with exit code 1 if there is one. Tapes that are cut, lost or still
    being written are no violation: the run is judged up to the first entry that they leave without its cause.
    """
    from atoll.sim.checkers import create_checkers
    from atoll.tape.files import RunTapes

    tapes = RunTapes(run)
    checkers = create_checkers(tapes.config)
    verdict = check_with_progress(tapes, checkers)
    lines = [] if verdict.violation is None else violation_story(tapes, verdict.violation, last)
    found = tapes, checkers, verdict, lines
    code = ExitCode.OK if verdict.violation is None else ExitCode.FAILED
    return Result(partial(_verdict_fields, *found), _verdict_lines(*found), code)


def check_with_progress(tapes: RunTapes, checkers: Sequence[Checker]) -> CheckResult:
    """With a progress bar, where somebody watches."""
    from atoll.sim.check_tapes import check_tapes

    with reading_progress("checking", tapes) as watched:
        return check_tapes(tapes, checkers, watched)


def violation_story(tapes: RunTapes, violation: InvariantViolationError, last: int) -> list[StoryLine]:
    """The story of whom it concerns, up to the entry at which it was seen."""
    from atoll.tape.story import build_story

    subject = violation.subject or ("run", 0)
    return list(
        deque(build_story(_entries_until(tapes.merged_entries(), violation.entry), subject, tapes.config), maxlen=last)
    )


def _entries_until(entries: Iterator[Entry], end: Entry | None) -> Iterator[Entry]:
    for entry in entries:
        yield entry
        if end is not None and (entry.actor, entry.tick) == (end.actor, end.tick):
            return


def _verdict_fields(
    tapes: RunTapes, checkers: Sequence[Checker], verdict: CheckResult, lines: Sequence[StoryLine]
) -> dict[str, object]:
    violation = verdict.violation
    fields: dict[str, object] = {
        "tapes": len(tapes.readers),
        "entries": verdict.entries,
        "checkers": [checker.name for checker in checkers],
        "finished": verdict.finished,
        "truncated": [path.name for path in tapes.truncated_files()],
        "unstarted": [path.name for path in tapes.headerless],
        "missing": [str(missing) for missing in verdict.missing],
        "complete": not verdict.gaps,
        "incomplete": verdict.gaps,
        "judged_until": None if verdict.stopped_at is None else verdict.stopped_at.at,
        "violation": None,
    }
    if violation is not None:
        entry = violation.entry
        fields["violation"] = {
            "checker": violation.checker,
            "sentence": violation.message,
            "subject": violation.subject and list(violation.subject),
            "at": None if entry is None else entry.at,
            "actor": None if entry is None else str(entry.actor),
            "tick": None if entry is None else entry.tick,
            "story": [story_line_fields(line) for line in lines],
        }
    return fields


def _verdict_lines(
    tapes: RunTapes, checkers: Sequence[Checker], verdict: CheckResult, lines: Sequence[StoryLine]
) -> Iterator[str]:
    from atoll.tape.story import format_subject

    violation = verdict.violation
    seen = f"{len(tapes.readers)} tapes, {verdict.entries:,} entries, {len(checkers)} checkers"
    if violation is None:
        yield f"{seen}: no violation{_unchecked_text(verdict)}"
    else:
        yield f"{seen}: a violation"
        yield f"{violation.checker}: {violation.message}"
        if (entry := violation.entry) is not None:
            yield f"seen at {entry.at:.3f} s on the tape of {entry.actor}, tick {entry.tick}"
        yield f"the story of {format_subject(violation.subject or ('run', 0))}:"
        yield from map(format_story_line, lines)
    for sentence in verdict.gaps:
        yield f"incomplete: {sentence}"
    if verdict.stopped_at is not None:
        from atoll.sim.check_tapes import has_lost_cause

        lost = next(each for each in verdict.missing if has_lost_cause(verdict.stopped_at, [each]))
        yield f"judged up to {lost}"


def _unchecked_text(verdict: CheckResult) -> str:
    if verdict.stopped_at is not None:
        return f" up to {verdict.stopped_at.at:.3f} s; nothing was judged after that"
    if verdict.gaps:
        return "; tapes are incomplete, so what must hold at the end of the run was not asked"
    return "" if verdict.finished else "; the run has not finished, so what must hold at its end was not asked"
