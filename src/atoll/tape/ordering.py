"""Causal order over the tapes of a run.

Clocks of different machines disagree, so the order by time may show effects before their causes. Three facts are
certain: the entries of one process are ordered, a message is sent before it arrives (`Envelope.tick` is the entry of
the sender), and a syncer loads only records that an earlier syncer requested to write.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from atoll.core.protocol import MessageArrived, Persist, RecordKey
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER
from atoll.tape.format import Actor, Entry, Header


class MissingCause(NamedTuple):
    """Entry whose cause is missing on all tapes: a tape was lost, or ends before its process did."""

    actor: Actor
    tick: int
    cause: Actor
    cause_tick: int | None  # None: restored records that no earlier syncer on tape wrote
    circular: bool = False  # the tapes contradict each other: the cause waits for this entry

    def __str__(self) -> str:
        if self.circular:
            return f"{self.actor}, tick {self.tick} and {self.cause}, tick {self.cause_tick} wait for each other"
        if self.cause_tick is None:
            return f"{self.actor} started from records that are on no tape of an earlier syncer"
        cause = f"{self.cause}, tick {self.cause_tick}"
        return f"{self.actor}, tick {self.tick}: the message was sent by {cause}, which is on no tape"


def find_sender(entry: Entry) -> tuple[Actor, int] | None:
    """Return the actor and tick of the entry that sent a message; None for other events.

    The receiver determines the sender, because messages travel only between learner and syncer.
    """
    event = entry.event
    if type(event) is not MessageArrived:
        return None
    envelope = event.envelope
    if entry.actor.learner == SYNCER:
        return Actor(envelope.learner, envelope.incarnation), envelope.tick
    return Actor(SYNCER, envelope.epoch), envelope.tick


def merge_tapes(
    tapes: Iterable[tuple[Header, Iterable[Entry]]], report: Callable[[MissingCause], None] | None = None
) -> Iterator[Entry]:
    """Yield all entries in causal order. Independent entries are ordered by time, then by actor.

    The merge holds one entry of each tape in memory. It reports an entry whose cause is on no tape and yields it at its
    own time.
    """
    return _CausalMerge(tapes, report).run()


class _CausalMerge:
    """Heap of the next entry of each tape. Entries whose cause was not emitted yet wait outside the heap.

    A syncer starts after its predecessor has ended, so its first entry waits for the end of the earlier tapes. But a
    superseded predecessor may still run and receive a message that its successor caused. Then all tapes wait, and the
    successor goes first.
    """

    def __init__(
        self, tapes: Iterable[tuple[Header, Iterable[Entry]]], report: Callable[[MissingCause], None] | None
    ) -> None:
        self.report = report
        self.tapes: dict[Actor, Iterator[Entry]] = {}  # tapes that are not read to the end
        self.emitted: dict[Actor, int] = {}  # newest emitted tick
        self.ready: list[tuple[float, Actor, Entry]] = []
        self.waiting: dict[
            Actor, list[tuple[int, Entry]]
        ] = {}  # by actor of the cause: tick of the cause, waiting entry
        self.starting: dict[Actor, Entry] = {}  # first entries of syncers that wait for earlier tapes to end
        self.restored: dict[Actor, list[RecordKey]] = {}
        self.written: dict[tuple[str, int], tuple[int, int]] = {}  # newest requested record of each slot
        for header, entries in tapes:
            assert header.actor not in self.tapes, f"two tapes of {header.actor}"
            self.tapes[header.actor] = iter(entries)
            self.emitted[header.actor] = 0
            self.restored[header.actor] = _restored_keys(header.restored)

    def run(self) -> Iterator[Entry]:
        for actor in sorted(self.tapes):
            self._advance(actor)
        while self.ready or self._release_stuck():
            _, actor, entry = heapq.heappop(self.ready)
            yield entry
            self.emitted[actor] = entry.tick
            for effect in entry.effects:
                if type(effect) is Persist:
                    slot, age = _slot_and_age(effect.record.key())
                    self.written[slot] = max(self.written.get(slot, age), age)
            self._release(actor, entry.tick)
            self._advance(actor)

    def _advance(self, actor: Actor) -> None:
        """Read the next entry of a tape. Add it to the heap, or to the waiting entries."""
        entry = next(self.tapes[actor], None)
        if entry is None:
            del self.tapes[actor]
            self._release(actor, None)
            for syncer in sorted(self.starting):
                if not self._has_predecessor(syncer):
                    self._start(syncer)
            return
        if actor.learner == SYNCER and entry.tick == 1:
            self.starting[actor] = entry
            if not self._has_predecessor(actor):
                self._start(actor)
            return
        cause = find_sender(entry)
        if cause is None or self.emitted.get(cause[0], 0) >= cause[1]:
            self._make_ready(entry)
        elif cause[0] in self.tapes:
            self.waiting.setdefault(cause[0], []).append((cause[1], entry))
        else:
            self._make_ready(entry, cause)

    def _make_ready(
        self, entry: Entry, missing: tuple[Actor, int | None] | None = None, circular: bool = False
    ) -> None:
        if missing is not None and self.report is not None:
            self.report(MissingCause(entry.actor, entry.tick, *missing, circular))
        heapq.heappush(self.ready, (entry.at, entry.actor, entry))

    def _release(self, cause: Actor, tick: int | None) -> None:
        """Release the entries that waited for this tick. At the end of a tape (None) release and report all of them."""
        waiting = self.waiting.pop(cause, None)
        if waiting is None:
            return
        later = []
        for needed, entry in waiting:
            if tick is None:
                self._make_ready(entry, (cause, needed))
            elif needed <= tick:
                self._make_ready(entry)
            else:
                later.append((needed, entry))
        if later:
            self.waiting[cause] = later

    def _has_predecessor(self, syncer: Actor) -> bool:
        return any(other.learner == SYNCER and other.generation < syncer.generation for other in self.tapes)

    def _could_restore(self, syncer: Actor) -> bool:
        """Return whether emitted entries requested all records that a syncer restored."""
        required = map(_slot_and_age, self.restored[syncer])
        return all(slot in self.written and age <= self.written[slot] for slot, age in required)

    def _start(self, syncer: Actor) -> None:
        missing = None if self._could_restore(syncer) else (Actor(SYNCER, syncer.generation - 1), None)
        self._make_ready(self.starting.pop(syncer), missing)

    def _release_stuck(self) -> bool:
        """Resolve a state in which all tapes wait: start the next syncer, or report and release the earliest entry."""
        waiting = [(entry.at, entry.actor, cause) for cause, entries in self.waiting.items() for _, entry in entries]
        if self.starting and (self._could_restore(min(self.starting)) or not waiting):
            self._start(min(self.starting))
        elif waiting:
            _, actor, cause = min(waiting)
            entries = self.waiting.pop(cause)
            for needed, entry in entries:
                if entry.actor == actor:
                    self._make_ready(entry, (cause, needed), circular=True)
            later = [(needed, entry) for needed, entry in entries if entry.actor != actor]
            if later:
                self.waiting[cause] = later
        return bool(self.ready)


def _restored_keys(restored: RestoredState | None) -> list[RecordKey]:
    if restored is None:
        return []
    records = [*restored.versions.values(), restored.members, restored.manifest, restored.leases]
    return [record.key() for record in records if record is not None]


def _slot_and_age(key: RecordKey) -> tuple[tuple[str, int], tuple[int, int]]:
    """Return the slot and the age of a record. Records of one slot replace each other."""
    if key.kind == "version":
        return (key.kind, key.number), (key.version, 0)
    return (key.kind, 0), (key.number, key.version)
