"""Run every checker over the tapes of a real run, for `atoll check`, `atoll report` and `atoll chaos`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from atoll.core.protocol import Halt
from atoll.core.types import SYNCER
from atoll.sim.checkers import Checker, CheckerDispatcher, InvariantViolationError
from atoll.tape.files import RunTapes
from atoll.tape.format import Actor, Entry
from atoll.tape.ordering import MissingCause

EntryWrapper = Callable[[Iterable[Entry]], Iterator[Entry]]
"""Entries pass through it on their way to the checkers: a progress bar, perhaps."""


class CheckResult(NamedTuple):
    """What the checkers found. `finished`: the run came to its end, so its last checks were made too.

    `incomplete` says what the tapes lack. Checking ends where an entry depends on that: `stopped` is the first entry
    that the checkers did not see.
    """

    entries: int
    finished: bool
    missing: list[MissingCause]
    violation: InvariantViolationError | None
    gaps: list[str]
    stopped_at: Entry | None = None


def check_tapes(tapes: RunTapes, checkers: Sequence[Checker], watched: EntryWrapper = iter) -> CheckResult:
    """Show every entry to every checker, in an order in which causes come first.

    An entry whose cause is on no tape ends it: the sender's tape was cut, lost or is still being written, and what its
    sender did unseen would look like a violation, here or at any later entry.
    """
    watch = CheckerDispatcher(checkers)
    missing: list[MissingCause] = []
    stopped: Entry | None = None
    newest: dict[Actor, int] = {}
    finished = False
    violation: InvariantViolationError | None = None
    try:
        for entry in watched(tapes.merged_entries(missing.append)):
            if has_lost_cause(entry, missing):
                stopped = entry
                break
            newest[entry.actor] = entry.tick
            if entry.tick == 1:
                watch.on_process_started(entry.actor, tapes.readers[entry.actor].header.restored)
            watch.observe(entry)
            if entry.actor.learner == SYNCER and any(
                type(effect) is Halt and effect.reason.code == "finish-done" for effect in entry.effects
            ):
                finished = True
        incomplete = _find_gaps(tapes, missing, newest)
        if finished and not incomplete:
            watch.finish()
    except InvariantViolationError as found:
        violation = found
        incomplete = _find_gaps(tapes, missing, newest)
    return CheckResult(sum(newest.values()), finished, missing, violation, incomplete, stopped)


def has_lost_cause(entry: Entry, missing: Sequence[MissingCause]) -> bool:
    return any((lost.actor, lost.tick) == (entry.actor, entry.tick) and not lost.circular for lost in missing)


def _find_gaps(tapes: RunTapes, missing: Sequence[MissingCause], newest: Mapping[Actor, int]) -> list[str]:
    """What the tapes lack: what their files show, and what other tapes have received of them."""
    told = tapes.describe_gaps()
    for lost in missing:
        if lost.circular:
            continue
        if lost.cause in tapes.readers:
            sentence = f"the tape of {lost.cause} ends at tick {newest.get(lost.cause, 0)}"
        else:
            sentence = f"there is no tape of {lost.cause}"
        if sentence not in told:
            told.append(sentence)
    return told
