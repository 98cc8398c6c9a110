"""`atoll story` and `atoll check`: the history of a run from its tapes, and whether every invariant holds over them."""

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

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, which contains tapes/.")]


def run_story(
    run: RunArgument,
    learner: Annotated[int | None, Setting("Show the story of this learner.", "ID")] = None,
    fragment: Annotated[int | None, Setting("Show the story of this fragment.", "P")] = None,
    whole_run: Annotated[
        bool, Setting("Show the story of the run: learners that joined and left, and its end.", flag="run")
    ] = False,
    since: Annotated[float | None, Setting("Start at this time, in seconds.", "SECONDS")] = None,
    until: Annotated[float | None, Setting("Stop at this time, in seconds.", "SECONDS")] = None,
    last: Annotated[int | None, Setting("Show only this many of the last lines.", "LINES", min=1)] = None,
    as_json: JsonOption = False,
) -> Result:
    """Show what happened in a run, in plain sentences.

    The story is of one learner, of one fragment or of the whole run, and comes from the tapes.
    """
    from atoll.tape.files import RunTapes
    from atoll.tape.story import build_story

    subject = _parse_subject(learner, fragment, whole_run)
    tapes = RunTapes(run)
    _check_subject_exists(tapes, subject)
    selected: Iterator[StoryLine] = (
        line
        for line in build_story(tapes.merged_entries(), subject, tapes.config)
        if (since is None or line.at >= since) and (until is None or line.at <= until)
    )
    lines = selected if last is None else iter(deque(selected, maxlen=last))
    return Result(
        lambda: {"subject": list(subject), "lines": [story_line_fields(line) for line in lines]},
        partial(_print_story, lines),
    )


def _print_story(lines: Iterator[StoryLine]) -> None:
    is_empty = True
    for line in lines:
        is_empty = False
        print(format_story_line(line))
    if is_empty:
        print_to_stderr("nothing happened in that time")


def format_story_line(line: StoryLine) -> str:
    """Return the line with its time aligned in a column."""
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


def _parse_subject(learner: int | None, fragment: int | None, whole_run: bool) -> Subject:
    if (learner is not None) + (fragment is not None) + whole_run != 1:
        raise ValueError("the story needs one subject; give exactly one of --learner 3, --fragment 7 and --run")
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
    """Return whether the syncer received messages from this learner. Its own tape may be lost."""
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
    last: Annotated[int, Setting("Number of story lines to show for a violation.", "LINES", min=1)] = 40,
    as_json: JsonOption = False,
) -> Result:
    """Check every invariant over the tapes of a run.

    Shows the story of the first violation, and exits with code 1 if there is one. Tapes that are truncated, lost or
    still being written are not a violation: the run is checked up to the first entry whose cause is missing.
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
    """Run the checkers, with a progress bar on a terminal."""
    from atoll.sim.check_tapes import check_tapes

    with reading_progress("checking", tapes) as watched:
        return check_tapes(tapes, checkers, watched)


def violation_story(tapes: RunTapes, violation: InvariantViolationError, last: int) -> list[StoryLine]:
    """Return the last lines of the story of the violation's subject, up to the entry that violates the invariant."""
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
    totals = f"{len(tapes.readers)} tapes, {verdict.entries:,} entries, {len(checkers)} checkers"
    if violation is None:
        yield f"{totals}: no violation{_unchecked_text(verdict)}"
    else:
        yield f"{totals}: a violation"
        yield f"{violation.checker}: {violation.message}"
        if (entry := violation.entry) is not None:
            yield f"found at {entry.at:.3f} s on the tape of {entry.actor}, tick {entry.tick}"
        yield f"the story of {format_subject(violation.subject or ('run', 0))}:"
        yield from map(format_story_line, lines)
    for sentence in verdict.gaps:
        yield f"incomplete: {sentence}"
    if verdict.stopped_at is not None:
        from atoll.sim.check_tapes import has_lost_cause

        lost = next(each for each in verdict.missing if has_lost_cause(verdict.stopped_at, [each]))
        yield f"checked up to {lost}"


def _unchecked_text(verdict: CheckResult) -> str:
    if verdict.stopped_at is not None:
        return f" up to {verdict.stopped_at.at:.3f} s; later entries were not checked"
    if verdict.gaps:
        return "; tapes are incomplete, so the conditions at the end of the run were not checked"
    if verdict.finished:
        return ""
    return "; the run has not finished, so the conditions at its end were not checked"
