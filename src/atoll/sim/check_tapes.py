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
"""Wrapper around the stream of entries, for example a progress bar."""


class CheckResult(NamedTuple):
    """Result of the checkers.

    `finished`: the run ended and its tapes are complete, so the final checks ran too. `gaps`: what the tapes lack, as
    sentences. Checking stops at the first entry that depends on a gap. `stopped_at` is that entry.
    """

    entries: int
    finished: bool
    missing: list[MissingCause]
    violation: InvariantViolationError | None
    gaps: list[str]
    stopped_at: Entry | None = None


def check_tapes(tapes: RunTapes, checkers: Sequence[Checker], watched: EntryWrapper = iter) -> CheckResult:
    """Run every checker over every entry of a run, in causal order.

    Stop at an entry whose cause is on no tape: the tape of its sender was truncated, lost or is still being written.
    The missing actions of the sender would look like a violation, here or at any later entry.

    Args:
        watched: wraps the stream of entries, for example in a progress bar.
    """
    watch = CheckerDispatcher(checkers)
    missing: list[MissingCause] = []
    stopped_at: Entry | None = None
    newest: dict[Actor, int] = {}
    finished = False
    violation: InvariantViolationError | None = None
    try:
        for entry in watched(tapes.merged_entries(missing.append)):
            if has_lost_cause(entry, missing):
                stopped_at = entry
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
    except InvariantViolationError as error:
        violation = error
        incomplete = _find_gaps(tapes, missing, newest)
    return CheckResult(sum(newest.values()), finished, missing, violation, incomplete, stopped_at)


def has_lost_cause(entry: Entry, missing: Sequence[MissingCause]) -> bool:
    return any((lost.actor, lost.tick) == (entry.actor, entry.tick) and not lost.circular for lost in missing)


def _find_gaps(tapes: RunTapes, missing: Sequence[MissingCause], newest: Mapping[Actor, int]) -> list[str]:
    """Return what the tapes lack, from their files and from messages on other tapes."""
    gaps = tapes.describe_gaps()
    for lost in missing:
        if lost.circular:
            continue
        if lost.cause in tapes.readers:
            sentence = f"the tape of {lost.cause} ends at tick {newest.get(lost.cause, 0)}"
        else:
            sentence = f"there is no tape of {lost.cause}"
        if sentence not in gaps:
            gaps.append(sentence)
    return gaps
