"""Replay: run a new core on the recorded events and compare its effects with the recorded effects.

The core is deterministic. A difference means that other code wrote the tape, or that the core used an input that is not
on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import Effect, Event
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import SYNCER
from atoll.tape.format import Actor, Entry, Header, TapeError, canonical


class ReplayableCore(Protocol):
    """Interface of the learner core and the syncer core."""

    def handle(self, now: float, event: Any) -> Sequence[Effect]: ...


class ReplayMismatchError(Exception):
    """Difference at the first entry whose effects differ. `derived` is None if the core raised `raised`."""

    def __init__(self, entry: Entry, derived: tuple[Effect, ...] | None, raised: str = "") -> None:
        self.actor: Actor = entry.actor
        self.tick: int = entry.tick
        self.at: float = entry.at
        self.event: Event = entry.event
        self.recorded: tuple[Effect, ...] = entry.effects
        self.derived = derived
        self.raised = raised
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        prefix = f"{self.actor}, tick {self.tick} at {self.at:.3f} s, {canonical(self.event)}"
        if self.derived is None:
            return f"{prefix}: {len(self.recorded)} effects are recorded, the replay raised {self.raised}"
        index = self.first_difference()
        recorded, derived = _format_effect(self.recorded, index), _format_effect(self.derived, index)
        return f"{prefix}: effect {index + 1} is recorded as {recorded}, derived as {derived}"

    def first_difference(self) -> int:
        """Return the index of the first effect that differs."""
        both = zip(self.recorded, self.derived or (), strict=False)
        for index, (recorded, derived) in enumerate(both):
            if canonical(recorded) != canonical(derived):
                return index
        return min(len(self.recorded), len(self.derived or ()))


def _format_effect(effects: Sequence[Effect], index: int) -> str:
    return canonical(effects[index]) if index < len(effects) else "nothing"


def create_core(header: Header) -> ReplayableCore:
    """Create a core in its state at the start of the tape."""
    actor = header.actor
    try:
        if actor.learner == SYNCER:
            return SyncerCore(header.config, actor.generation, header.restored)
        return LearnerCore(header.config, actor.learner, actor.generation)
    except (AssertionError, LookupError, ValueError) as error:
        raise TapeError(f"cannot create the core of {actor} from this header: {error!r}") from error


def replay(header: Header, entries: Iterable[Entry], make: Callable[[Header], ReplayableCore] = create_core) -> int:
    """Replay all entries and return their number. Raise ReplayMismatchError at the first difference.

    Args:
        make: creates the core; a test may pass a core with a planted bug.
    """
    core = make(header)
    count = 0
    for entry in entries:
        count += 1
        try:
            derived = tuple(core.handle(entry.at, entry.event))
        except Exception as error:  # the recorded core did not raise any exception
            raise ReplayMismatchError(entry, None, repr(error)) from error
        if canonical(derived) != canonical(entry.effects):
            raise ReplayMismatchError(entry, derived)
    return count
