"""Replay: hand the recorded events to a fresh core and compare what it does with what was recorded.

The core is deterministic, so any difference means that the tape was made by other code, or that something leaked into
the core that is not on the tape. Both are worth stopping for.
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
    """What both roles offer."""

    def handle(self, now: float, event: Any) -> Sequence[Effect]: ...


class ReplayMismatchError(Exception):
    """The first entry whose effects come out otherwise. `derived` is None where the core raised; `raised` says what."""

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
        where = f"{self.actor}, tick {self.tick} at {self.at:.3f} s, {canonical(self.event)}"
        if self.derived is None:
            return f"{where}: {len(self.recorded)} effects are recorded, the replay raised {self.raised}"
        place = self.first_difference()
        recorded, derived = _shown(self.recorded, place), _shown(self.derived, place)
        return f"{where}: effect {place + 1} is recorded as {recorded}, derived as {derived}"

    def first_difference(self) -> int:
        """Index of the first effect that differs."""
        both = zip(self.recorded, self.derived or (), strict=False)
        for place, (recorded, derived) in enumerate(both):
            if canonical(recorded) != canonical(derived):
                return place
        return min(len(self.recorded), len(self.derived or ()))


def _shown(effects: Sequence[Effect], place: int) -> str:
    return canonical(effects[place]) if place < len(effects) else "nothing"


def create_core(header: Header) -> ReplayableCore:
    """The core as it was when its tape began."""
    actor = header.actor
    try:
        if actor.learner == SYNCER:
            return SyncerCore(header.config, actor.generation, header.restored)
        return LearnerCore(header.config, actor.learner, actor.generation)
    except (AssertionError, LookupError, ValueError) as error:
        raise TapeError(f"no core of {actor} can be made from this header: {error!r}") from error


def replay(header: Header, entries: Iterable[Entry], make: Callable[[Header], ReplayableCore] = create_core) -> int:
    """Derive every effect anew; the number of entries, or ReplayMismatchError at the first difference.

    `make` is for cores that were made otherwise, such as those with a planted bug.
    """
    core = make(header)
    count = 0
    for entry in entries:
        count += 1
        try:
            derived = tuple(core.handle(entry.at, entry.event))
        except Exception as raised:  # whatever it is, the recorded core did not raise it
            raise ReplayMismatchError(entry, None, repr(raised)) from raised
        if canonical(derived) != canonical(entry.effects):
            raise ReplayMismatchError(entry, derived)
    return count
