"""Links, disks, merges and shards that fail, as drawn by a scenario and injected by the swarm."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from msgspec.structs import replace

from atoll.core.protocol import (
    NO_RUN_DIRECTORY,
    Contribution,
    Dial,
    DialFailed,
    Envelope,
    Event,
    FragmentDamaged,
    LeaseRequest,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    OptimizerState,
    Persist,
    Persisted,
    PersistFailed,
    Pong,
    Published,
    Record,
    Report,
    SaveSnapshot,
    ShardLost,
    ShardReconnected,
    SnapshotSaved,
    SnapshotSaveFailed,
    StoreFenced,
    VersionRecord,
)
from atoll.core.types import FragmentId, LearnerId
from atoll.sim.driver import SimConnection, SimDriver, SimLinks, SimProcess, SimStore
from atoll.sim.scenarios import LinkConditions, SwarmScenario

BULK_MESSAGES = (Contribution, Published, OptimizerState)


class FaultyShards:
    """Shard processes, which own fragment p at p % shards, and the loss of a shard."""

    def __init__(self, driver: SimDriver, count: int) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.count = count
        self.unavailable_until: dict[int, float] = {}
        self._unreported_losses: set[int] = set()  # unavailable shards whose loss the syncer does not know yet
        self._restart_counts: Counter[int] = Counter()  # lost processes of each shard

    def shard_of(self, fragment: FragmentId) -> int | None:
        return fragment % self.count if self.count else None

    def shard_of_record(self, record: Record) -> int | None:
        return self.shard_of(record.fragment) if isinstance(record, VersionRecord) else None

    def shard_of_envelope(self, envelope: Envelope) -> int | None:
        """Return the shard of the fragment in a message; None for messages without a fragment."""
        body = envelope.body
        if type(body) is Contribution:
            return self.shard_of(body.round.fragment)
        return self.shard_of(body.fragment) if type(body) is Published else None

    def fragments_of(self, shard: int) -> tuple[FragmentId, ...]:
        return tuple(p for p in self.driver.config.fragment_ids() if self.shard_of(p) == shard)

    def schedule_via(self, when: float, shard: int | None, proc: SimProcess, event: Event) -> None:
        """Deliver an event through a shard, if the current process of the shard still runs at that time."""
        if shard not in self.unavailable_until:
            self.engine.schedule(when, self.deliver_via, shard, proc, event, self._restart_count(shard))

    def deliver_via(self, shard: int | None, proc: SimProcess, event: Event, start: int | None = None) -> None:
        """Deliver an event through a shard. A paused process receives it later, unless the shard is lost until then."""
        if start is not None and self._restart_count(shard) != start:
            return
        if shard is not None and proc.paused_until > self.engine.now:
            self.engine.schedule(proc.paused_until, self.deliver_via, shard, proc, event, self._restart_count(shard))
        else:
            self.driver.deliver(proc, event)

    def _restart_count(self, shard: int | None) -> int:
        return 0 if shard is None else self._restart_counts[shard]

    def lose(self, shard: int, until: float) -> None:
        self.unavailable_until[shard] = until
        self._restart_counts[shard] += 1

    def report_loss(self, shard: int, is_new: bool = False) -> None:
        syncer = self.driver.syncer
        if is_new:
            self._unreported_losses.add(shard)
        if shard not in self._unreported_losses:
            return
        if syncer is not None and syncer.paused_until > self.engine.now:
            self.engine.schedule(syncer.paused_until, self.report_loss, shard)
            return
        self._unreported_losses.discard(shard)
        if syncer is not None:
            self.driver.handle_event(syncer, ShardLost(self.fragments_of(shard), "connection reset by peer"))

    def restart(self, shard: int) -> None:
        """Reconnect a shard. A paused syncer reconnects it later: it may have open requests to the old process."""
        now = self.engine.now
        if self.unavailable_until.get(shard, now + 1.0) > now:
            return
        syncer = self.driver.syncer
        if syncer is not None and syncer.paused_until > now:
            self.engine.schedule(syncer.paused_until, self.restart, shard)
            return
        self.report_loss(shard)
        del self.unavailable_until[shard]
        if syncer is not None:
            disk, ids = self.driver.disk, self.fragments_of(shard)
            if syncer.core.state.manifest is not None:
                disk.roll_back(syncer.core.state.manifest, self.driver.config.fragment_ids())
            self.driver.handle_event(syncer, ShardReconnected(tuple((p, disk.durable_version(p)) for p in ids)))

    def recover(self, shard: int) -> None:
        self.unavailable_until[shard] = self.engine.now
        self.engine.schedule(self.engine.now, self.restart, shard)


class FaultyLinks(SimLinks):
    """Links that lose, duplicate and corrupt messages, and can be cut in one direction."""

    def __init__(self, driver: SimDriver, plan: SwarmScenario, rng: Random, shards: FaultyShards) -> None:
        super().__init__(driver, 0.0, 0.0)
        self.is_healed = False
        self.uplink_cut_until: dict[LearnerId, float] = {}  # messages to the syncer are lost until then
        self.downlink_cut_until: dict[LearnerId, float] = {}
        self.bulk_cut_until: dict[LearnerId, float] = {}  # fragments and optimizer state only, in both directions
        self.poisoned_messages: Counter[LearnerId] = Counter()
        self._plan = plan
        self._rng = rng
        self._shards = shards

    def heal(self) -> None:
        self.is_healed = True
        self.uplink_cut_until.clear()
        self.downlink_cut_until.clear()
        self.bulk_cut_until.clear()
        self.poisoned_messages.clear()

    def cut(self, cuts: dict[LearnerId, float], learner: LearnerId, duration_s: float) -> None:
        cuts[learner] = max(cuts.get(learner, 0.0), self.engine.now + duration_s)

    def transmit(self, conn: SimConnection, to: SimProcess, envelope: Envelope) -> None:
        now = self.engine.now
        up = to is conn.syncer
        if up:
            envelope = self._tamper(envelope)
        link: LinkConditions = self._plan.links[envelope.learner]
        rng = self._rng
        if (self.uplink_cut_until if up else self.downlink_cut_until).get(envelope.learner, 0.0) > now:
            return
        if not self.is_healed and link.loss_rate and rng.random() < link.loss_rate:
            return
        bulk = type(envelope.body) in BULK_MESSAGES
        if bulk and self.bulk_cut_until.get(envelope.learner, 0.0) > now:
            return
        delay = link.delay_s * (0.5 + rng.random()) + (link.bulk_delay_s * rng.random() if bulk else 0.0)
        lane = (up, bulk)
        when = max(now + delay, conn.last_arrival_s.get(lane, 0.0))
        conn.last_arrival_s[lane] = when
        event: Event = MessageArrived(envelope)
        if type(envelope.body) is Published and not self.is_healed and link.loss_rate and rng.random() < link.loss_rate:
            event = FragmentDamaged(envelope.body.fragment, envelope.body.version, "digest mismatch")
        shard = self._shards.shard_of_envelope(envelope)
        self._shards.schedule_via(when, shard, to, event)
        if not self.is_healed and link.duplicate_rate and rng.random() < link.duplicate_rate:
            self._shards.schedule_via(when + 3 * delay * rng.random(), shard, to, event)

    def _tamper(self, envelope: Envelope) -> Envelope:
        """Replace the body of a message from a poisoned learner by invalid values or counters."""
        body = envelope.body
        if not self.poisoned_messages[envelope.learner] or type(body) not in (Contribution, Report, LeaseRequest):
            return envelope
        self.poisoned_messages[envelope.learner] -= 1
        if isinstance(body, Report):
            return replace(envelope, body=self._rng.choice((replace(body, trained=2**61), Pong(1), body)))
        if isinstance(body, LeaseRequest):
            return replace(
                envelope,
                body=self._rng.choice((replace(body, received_leases=99), replace(body, consumed_samples=2**61))),
            )
        assert isinstance(body, Contribution)
        corruption = self._rng.choice(("nan", "tokens", "steps", "none"))
        if corruption == "nan":
            body = replace(body, problem="values are not finite")
        elif corruption == "tokens":
            body = replace(body, tokens=body.trained + 1)
        elif corruption == "steps":
            body = replace(body, steps=body.copied_at + 5)
        else:
            body = replace(body, steps=0, tokens=0)
        return replace(envelope, body=body)

    def dial(self, proc: SimProcess, effect: Dial) -> None:
        self.engine.schedule(self.engine.now + effect.delay_s, self._try_connect, proc)

    def _try_connect(self, proc: SimProcess) -> None:
        now = self.engine.now
        learner = proc.actor.learner
        delay = self._plan.links[learner].delay_s * (0.5 + self._rng.random())
        if (
            self.driver.syncer is None
            or max(self.uplink_cut_until.get(learner, 0.0), self.downlink_cut_until.get(learner, 0.0)) > now
        ):
            self.engine.schedule(now + delay + 0.1, self.driver.deliver, proc, DialFailed("connection refused"))
        elif proc.is_alive:
            self.engine.schedule(now + delay, self.driver.deliver, proc, self.connect(proc))

    def close_delay_s(self, conn: SimConnection) -> float:
        return self._plan.links[conn.learner.actor.learner].delay_s + 0.05 * self._rng.random()

    def close_reaches_syncer(self, conn: SimConnection) -> bool:
        """Return false for a cut uplink: the syncer detects the loss only by its timeout."""
        return self.uplink_cut_until.get(conn.learner.actor.learner, 0.0) <= self.engine.now


class FaultyStore(SimStore):
    """Disks that fail or are slow, merges that fail, and a store that another syncer may take over."""

    def __init__(self, driver: SimDriver, plan: SwarmScenario, rng: Random, shards: FaultyShards) -> None:
        super().__init__(driver, plan.merge_s, plan.disk_s)
        self.is_healed = False
        self.write_errors_until = 0.0
        self.slow_writes_until = 0.0
        self.next_merge_fails = False
        self.snapshot_parts: dict[LearnerId, int] = {}  # newest snapshot of which each learner has a part on its disk
        self._rng = rng
        self._shards = shards
        self._writing: dict[int, Record] = {}  # disk operations in progress, by serial
        self._serial = 0

    def heal(self) -> None:
        self.is_healed = True
        self.write_errors_until = self.slow_writes_until = self.engine.now
        self.next_merge_fails = False

    def merge(self, proc: SimProcess, effect: MergeRound) -> None:
        when = self.engine.now + self._merge_s * self._rng.random()
        event: Event = MergeFailed(effect.round, "out of memory") if self.next_merge_fails else MergeDone(effect.round)
        self.next_merge_fails = False
        self._shards.schedule_via(when, self._shards.shard_of(effect.round.fragment), proc, event)

    def persist(self, proc: SimProcess, effect: Persist) -> None:
        now = self.engine.now
        if proc is not self.driver.syncer:
            fenced = StoreFenced(self.disk.epoch)
            self.engine.schedule(now + self._disk_s * self._rng.random(), self.driver.deliver, proc, fenced)
            return
        if self._shards.shard_of_record(effect.record) in self._shards.unavailable_until:
            return  # the syncer does not know yet that the shard is lost
        slow = 10.0 if self.slow_writes_until > now else 1.0
        self._serial += 1
        self._writing[self._serial] = effect.record
        self.engine.schedule(now + self._disk_s * self._rng.random() * slow, self._write, proc, self._serial)

    def _write(self, proc: SimProcess, serial: int) -> None:
        """Write a record to disk. The acknowledgment reaches the process later, or never."""
        record = self._writing.pop(serial, None)
        if record is None:
            return
        if proc is not self.driver.syncer:
            self.driver.deliver(proc, StoreFenced(self.disk.epoch))
            return
        key = record.key()
        shard = self._shards.shard_of_record(record)
        if self.write_errors_until > self.engine.now:
            self._shards.deliver_via(shard, proc, PersistFailed(key, "no space left on device"))
            return
        self.disk.write(record)
        when = self.engine.now + 0.1 * self._disk_s * self._rng.random()
        self._shards.schedule_via(when, shard, proc, Persisted(key))

    def on_syncer_killed(self) -> None:
        """Handle the death of the syncer. Its pending writes may be durable, although they were not published."""
        for record in self._writing.values():
            self._maybe_write(record)
        self._writing.clear()

    def lose_shard(self, shard: int, until: float = math.inf) -> None:
        """Lose a shard. Its pending writes may be durable, and none of them is acknowledged."""
        self._shards.lose(shard, until)
        for serial, record in list(self._writing.items()):
            if self._shards.shard_of_record(record) == shard:
                del self._writing[serial]
                assert isinstance(record, VersionRecord)
                if record.round.epoch == self.disk.epoch:  # an older syncer is fenced
                    self._maybe_write(record)
        self._shards.report_loss(shard, is_new=True)
        if until < math.inf:
            self.engine.schedule(until, self._shards.restart, shard)

    def _maybe_write(self, record: Record) -> None:
        if self.write_errors_until <= self.engine.now and self._rng.random() < 0.5:
            self.disk.write(record)

    def save_part(self, proc: SimProcess, effect: SaveSnapshot) -> None:
        when = self.engine.now + self._disk_s * self._rng.random()
        event: Event = SnapshotSaved(effect.snapshot)
        if not self.is_healed and self._rng.random() < 0.05:
            event = SnapshotSaveFailed(effect.snapshot, "no space left on device")
        elif proc.actor.learner % 4 == 0:
            event = SnapshotSaveFailed(effect.snapshot, NO_RUN_DIRECTORY)
        else:
            self.snapshot_parts[proc.actor.learner] = effect.snapshot
        self.engine.schedule(when, self.driver.deliver, proc, event)
