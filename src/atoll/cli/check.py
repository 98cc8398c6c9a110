"""`atoll check`: every invariant checker over the tapes of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, print_json
from atoll.cli.progress import reading
from atoll.cli.story import RunArgument, as_fields, indented

if TYPE_CHECKING:
    from atoll.sim.check_tapes import CheckResult
    from atoll.sim.checkers import Checker, Violation
    from atoll.tape.files import RunTapes
    from atoll.tape.format import Entry
    from atoll.tape.story import StoryLine

EXAMPLE = "atoll check runs/first"


def run(
    run: RunArgument,
    last: Annotated[
        int, typer.Option("--last", metavar="LINES", min=1, help="Lines of the story of a violation.")
    ] = 40,
    as_json: JsonOption = False,
) -> None:
    """Check every invariant over the tapes of a run.

    Tells the story of the first violation, and ends with exit code 1 if there is one. Tapes that are cut, lost or still
    being written are no violation: the run is judged up to the first entry that they leave without its cause.
    """
    from atoll.sim.checkers import all_checkers
    from atoll.tape.files import RunTapes

    tapes = RunTapes(run)
    checkers = all_checkers(tapes.config)
    verdict = judge(tapes, checkers)
    lines = [] if verdict.violation is None else story_of(tapes, verdict.violation, last)
    if as_json:
        print_json(_fields(tapes, checkers, verdict, lines))
    else:
        _show(tapes, checkers, verdict, lines)
    if verdict.violation is not None:
        raise typer.Exit(ExitCode.FAILED)


def judge(tapes: RunTapes, checkers: Sequence[Checker]) -> CheckResult:
    """With a progress bar, where somebody watches."""
    from atoll.sim.check_tapes import check_tapes

    with reading("checking", tapes) as watched:
        return check_tapes(tapes, checkers, watched)


def story_of(tapes: RunTapes, violation: Violation, last: int) -> list[StoryLine]:
    """The story of whom it concerns, up to the entry at which it was seen."""
    from atoll.tape.story import story

    subject = violation.subject or ("run", 0)
    return list(deque(story(_up_to(tapes.merged(), violation.entry), subject, tapes.config), maxlen=last))


def _up_to(entries: Iterator[Entry], end: Entry | None) -> Iterator[Entry]:
    for entry in entries:
        yield entry
        if end is not None and (entry.actor, entry.tick) == (end.actor, end.tick):
            return


def _fields(
    tapes: RunTapes, checkers: Sequence[Checker], verdict: CheckResult, lines: Sequence[StoryLine]
) -> dict[str, object]:
    violation = verdict.violation
    fields: dict[str, object] = {
        "tapes": len(tapes.readers),
        "entries": verdict.entries,
        "checkers": [checker.name for checker in checkers],
        "finished": verdict.finished,
        "truncated": [path.name for path in tapes.truncated()],
        "unstarted": [path.name for path in tapes.unstarted],
        "missing": [str(missing) for missing in verdict.missing],
        "complete": not verdict.incomplete,
        "incomplete": verdict.incomplete,
        "judged_until": None if verdict.stopped is None else verdict.stopped.at,
        "violation": None,
    }
    if violation is not None:
        entry = violation.entry
        fields["violation"] = {
            "checker": violation.checker,
            "sentence": violation.sentence,
            "subject": violation.subject and list(violation.subject),
            "at": None if entry is None else entry.at,
            "actor": None if entry is None else str(entry.actor),
            "tick": None if entry is None else entry.tick,
            "story": [as_fields(line) for line in lines],
        }
    return fields


def _show(tapes: RunTapes, checkers: Sequence[Checker], verdict: CheckResult, lines: Sequence[StoryLine]) -> None:
    from atoll.tape.story import shown

    violation = verdict.violation
    seen = f"{len(tapes.readers)} tapes, {verdict.entries:,} entries, {len(checkers)} checkers"
    if violation is None:
        print(f"{seen}: no violation{_unasked(verdict)}")
        _show_incomplete(verdict)
        return
    print(f"{seen}: a violation")
    print(f"{violation.checker}: {violation.sentence}")
    if violation.entry is not None:
        print(f"seen at {violation.entry.at:.3f} s on the tape of {violation.entry.actor}, tick {violation.entry.tick}")
    print(f"the story of {shown(violation.subject or ('run', 0))}:")
    for line in lines:
        print(indented(line))
    _show_incomplete(verdict)


def _unasked(verdict: CheckResult) -> str:
    if verdict.stopped is not None:
        return f" up to {verdict.stopped.at:.3f} s; nothing was judged after that"
    if verdict.incomplete:
        return "; tapes are incomplete, so what must hold at the end of the run was not asked"
    return "" if verdict.finished else "; the run has not finished, so what must hold at its end was not asked"


def _show_incomplete(verdict: CheckResult) -> None:
    for sentence in verdict.incomplete:
        print(f"incomplete: {sentence}")
    if verdict.stopped is not None:
        from atoll.sim.check_tapes import has_lost_cause

        lost = next(each for each in verdict.missing if has_lost_cause(verdict.stopped, [each]))
        print(f"judged up to {lost}")
