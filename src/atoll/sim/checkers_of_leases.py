"""Checkers of leases: durable first, nobody else's, merged once, returned ones first, and nothing but what is held.

They watch only runs that have leases. A sample's place is known from the records that the syncer made durable, what
became of it from the versions, and what a learner had from its own steps.
"""

from __future__ import annotations

from bisect import bisect_left

from atoll.core.data_leases import Key, joined
from atoll.core.protocol import (
    Contribution,
    Envelope,
    Lease,
    LeaseRecord,
    MembersRecord,
    Record,
    Report,
    Say,
    StartTraining,
    StepTaken,
    VersionRecord,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, Interval, RunConfig
from atoll.sim.checkers import Checker
from atoll.sim.checkers_of_rounds import Durable
from atoll.tape.format import Actor, Entry


class Leases(Durable):
    """Keeps what is durable of leases, for checkers that need to know. Not a checker of its own."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.lines: dict[Key, list[Interval]] = {}  # the leases of every incarnation, by number
        self.merged: dict[Key, int] = {}  # samples of that line that are in a durable version
        if not config.lease_samples:
            self.effects = {}
            self.events = {}

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER and restored is not None and restored.leases is not None:
            self._found(None, restored.leases)

    def now_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, LeaseRecord):
            self._found(entry, record)
        elif isinstance(record, VersionRecord):
            for a in record.contributions:
                key = (a.learner, a.incarnation)
                before = self.merged.get(key, 0)
                if a.taken > before:
                    self.merged[key] = a.taken
                    self.now_merged(entry, record, key, before, a.taken)

    def late_durable(self, entry: Entry, record: Record) -> None:
        if isinstance(record, LeaseRecord):
            self._found(entry, record)

    def _found(self, entry: Entry | None, record: LeaseRecord) -> None:
        for holding in record.holdings:
            key = (holding.learner, holding.incarnation)
            line = self.lines.setdefault(key, [])
            for place, interval in enumerate(holding.intervals, holding.first):
                if place < len(line):
                    continue
                if place > len(line):
                    self.fail(entry, ("learner", key[0]), f"lease {place} of incarnation {key[1]} after {len(line)}")
                line.append(interval)
                self.now_leased(entry, key, place)

    def now_leased(self, entry: Entry | None, key: Key, number: int) -> None:
        """For subclasses: this lease is durable."""

    def now_merged(self, entry: Entry | None, record: VersionRecord, key: Key, before: int, taken: int) -> None:
        """For subclasses: the samples of this line from `before` to `taken` are in a version for the first time."""


class LeaseDurable(Leases):
    name = "lease-durable"
    sentence = "a lease is durable before it is sent"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if config.lease_samples:
            self.sent = {Lease: self._on_lease}

    def _on_lease(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Lease)
        line = self.lines.get((envelope.learner, envelope.incarnation), [])
        if body.number >= len(line) or line[body.number] != (body.begin, body.end):
            what = f"samples {body.begin} to {body.end} were leased as number {body.number}, durable are {len(line)}"
            self.fail(entry, ("learner", envelope.learner), what)


class LeasedOnce(Leases):
    name = "leased-once"
    sentence = "no sample is leased to two incarnations at the same time"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._current: dict[int, int] = {}  # durable: incarnation of everybody who has not left
        self._serial = 0  # of the record that said so
        self._open: dict[Key, list[tuple[int, Interval]]] = {}  # not merged to their end, with their place in the line

    def started(self, actor: Actor, restored: Restored | None) -> None:
        if actor.learner == SYNCER and restored is not None and restored.members is not None:
            self._admitted(restored.members)
        super().started(actor, restored)

    def _admitted(self, record: MembersRecord) -> None:
        """Of an older one it may be heard later: that it was written shows when a syncer finds what followed it."""
        if record.serial > self._serial:
            self._serial = record.serial
            self._current = {i: inc for i, inc in record.incarnations if i not in record.left}

    def now_durable(self, entry: Entry | None, record: Record) -> None:
        super().now_durable(entry, record)
        if isinstance(record, MembersRecord):
            self._admitted(record)

    def now_leased(self, entry: Entry | None, key: Key, number: int) -> None:
        begin, end = self.lines[key][number]
        for other, leases in self._open.items():
            if self._current.get(other[0]) != other[1]:
                continue
            merged = self.merged.get(other, 0)
            leases[:] = [(place, lease) for place, lease in leases if place + lease[1] - lease[0] > merged]
            for place, lease in leases:
                first = max(begin, lease[0] + max(0, merged - place))
                if first < min(end, lease[1]):
                    what = f"sample {first} is leased to learner {key[0]} while learner {other[0]} has it"
                    self.fail(entry, ("learner", key[0]), f"{what}, incarnations {key[1]} and {other[1]}")
        place = sum(b - a for a, b in self.lines[key][:number])
        self._open.setdefault(key, []).append((place, (begin, end)))


class SamplesOnce(Leases):
    name = "samples-once"
    sentence = "no sample is merged twice, and none that was not leased"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._in: list[Interval] = []  # merged, in order

    def now_merged(self, entry: Entry | None, record: VersionRecord, key: Key, before: int, taken: int) -> None:
        subject = ("learner", key[0])
        place = 0
        for begin, end in self.lines.get(key, []):
            first, last = begin + max(0, before - place), begin + min(end - begin, taken - place)
            place += end - begin
            if first < last:
                self._add(entry, record, key, (first, last))
        if place < taken:
            self.fail(entry, subject, f"{taken} samples of incarnation {key[1]} are merged, {place} were leased to it")

    def _add(self, entry: Entry | None, record: VersionRecord, key: Key, new: Interval) -> None:
        at = bisect_left(self._in, new)
        for other in self._in[max(0, at - 1) : at + 1]:
            if max(other[0], new[0]) < min(other[1], new[1]):
                what = f"sample {max(other[0], new[0])} is merged again, into version {record.version}"
                self.fail(entry, ("fragment", record.fragment), f"{what}, by learner {key[0]} incarnation {key[1]}")
        self._in[max(0, at - 1) : at + 1] = joined([*self._in[max(0, at - 1) : at + 1], new])


class ReturnedFirst(Leases):
    name = "returned-first"
    sentence = "returned samples are leased again before new ones"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._next = 0
        self._pool: set[Interval] = set()  # of the last record, if nothing was returned since
        if config.lease_samples:
            self.effects[Say] = self._on_say

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            found = restored.leases if restored is not None else None
            self._next = found.next if found is not None else 0
            self._pool = set()

    def _on_say(self, entry: Entry, effect: Say) -> None:
        """What was leased from the pool and came back at once must not look as if it had been passed over."""
        if effect.reason.code == "leases-returned" and self.is_current(entry):
            self._pool = set()

    def on_save(self, entry: Entry, record: Record) -> None:
        if not isinstance(record, LeaseRecord):
            return
        passed_over = sorted(self._pool & set(record.pool))
        if record.next > self._next and passed_over:
            what = f"samples from {self._next} on were leased while {passed_over[0][0]} was waiting to be leased again"
            self.fail(entry, ("run", 0), what)
        self._next, self._pool = record.next, set(record.pool)


class LeaseHeld(Checker):
    name = "lease-held"
    sentence = "a learner trains on nothing but what was leased to it, and says how far it has come"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        if config.lease_samples:
            self.arrived = {Lease: self._on_lease}
            self.events = {StepTaken: self._on_step}
            self.effects = {StartTraining: self._on_start}
            self.sent = {Report: self._on_told, Contribution: self._on_contribution}
        self._numbers: dict[Actor, int] = {}
        self._held: dict[Actor, int] = {}
        self._taken: dict[Actor, int] = {}
        self._copied: dict[tuple[Actor, int], Contribution] = {}

    def _on_lease(self, entry: Entry, envelope: Envelope) -> None:
        """Also one that the core drops because of its link: it is as durable, and comes again."""
        body = envelope.body
        assert isinstance(body, Lease)
        if body.number == self._numbers.get(entry.actor, 0):
            self._numbers[entry.actor] = body.number + 1
            self._held[entry.actor] = self._held.get(entry.actor, 0) + body.end - body.begin

    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        if not self._held.get(entry.actor):
            self.fail(entry, ("learner", entry.actor.learner), "training starts without a lease")

    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        taken = self._taken[entry.actor] = self._taken.get(entry.actor, 0) + event.samples
        held = self._held.get(entry.actor, 0)
        if taken > held or event.samples < 0:
            self.fail(entry, ("learner", entry.actor.learner), f"{taken} samples taken, {held} were leased")

    def _on_told(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Report)
        self._compare(entry, body.taken)

    def _on_contribution(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Contribution)
        key = (entry.actor, body.round.fragment)
        before = self._copied.get(key)
        if before is None or before.round != body.round:
            self._copied[key] = body
            self._compare(entry, body.taken)

    def _compare(self, entry: Entry, told: int) -> None:
        taken = self._taken.get(entry.actor, 0)
        if told != taken:
            self.fail(entry, ("learner", entry.actor.learner), f"tells of {told} samples, and has taken {taken}")


LEASE_CHECKERS: tuple[type[Checker], ...] = (LeaseDurable, LeasedOnce, SamplesOnce, ReturnedFirst, LeaseHeld)
