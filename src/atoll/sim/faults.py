"""Links, disks, merges and shards that fail, as a plan has drawn them and as the swarm's faults say."""

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
    InnerState,
    LeaseRequest,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    PersistFailed,
    Pong,
    Published,
    Record,
    Report,
    SaveSnapshot,
    ShardBack,
    ShardLost,
    SnapshotSaved,
    SnapshotSaveFailed,
    StoreFenced,
    VersionRecord,
)
from atoll.core.types import FragmentId, LearnerId
from atoll.sim.draws import LinkDraw, SwarmPlan
from atoll.sim.driver import Conn, Driver, Links, SimProcess, SimStore

BULK = (Contribution, Published, InnerState)


class FaultyShards:
    """Processes that hold the fragments, p at p % shards, and what is lost with one of them."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.count = count
        self.away: dict[int, float] = {}  # until when
        self._untold: set[int] = set()  # of those, whose loss the syncer has not heard of
        self._starts: Counter[int] = Counter()  # processes of each shard that are gone

    def of(self, fragment: FragmentId) -> int | None:
        return fragment % self.count if self.count else None

    def of_record(self, record: Record) -> int | None:
        return self.of(record.fragment) if isinstance(record, VersionRecord) else None

    def behind(self, envelope: Envelope) -> int | None:
        """Values travel between learner and shard."""
        body = envelope.body
        if type(body) is Contribution:
            return self.of(body.round.fragment)
        return self.of(body.fragment) if type(body) is Published else None

    def fragments_of(self, shard: int) -> tuple[FragmentId, ...]:
        return tuple(p for p in self.driver.config.fragment_ids() if self.of(p) == shard)

    def later(self, when: float, shard: int | None, proc: SimProcess, event: Event) -> None:
        """Deliver an event by way of a shard, if that process of it lives until then."""
        if shard not in self.away:
            self.engine.at(when, self.through, shard, proc, event, self._start_of(shard))

    def through(self, shard: int | None, proc: SimProcess, event: Event, start: int | None = None) -> None:
        """A paused process hears of it later, and not at all if the shard is lost by then."""
        if start is not None and self._start_of(shard) != start:
            return
        if shard is not None and proc.paused_until > self.engine.now:
            self.engine.at(proc.paused_until, self.through, shard, proc, event, self._start_of(shard))
        else:
            self.driver.deliver(proc, event)

    def _start_of(self, shard: int | None) -> int:
        return 0 if shard is None else self._starts[shard]

    def lose(self, shard: int, until: float) -> None:
        self.away[shard] = until
        self._starts[shard] += 1

    def tell_lost(self, shard: int, is_new: bool = False) -> None:
        syncer = self.driver.syncer
        if is_new:
            self._untold.add(shard)
        if shard not in self._untold:
            return
        if syncer is not None and syncer.paused_until > self.engine.now:
            self.engine.at(syncer.paused_until, self.tell_lost, shard)
            return
        self._untold.discard(shard)
        if syncer is not None:
            self.driver.run(syncer, ShardLost(self.fragments_of(shard), "connection reset by peer"))

    def start(self, shard: int) -> None:
        """A paused syncer takes no shard back: until then it may still ask what the old process should do."""
        now = self.engine.now
        if self.away.get(shard, now + 1.0) > now:
            return
        syncer = self.driver.syncer
        if syncer is not None and syncer.paused_until > now:
            self.engine.at(syncer.paused_until, self.start, shard)
            return
        self.tell_lost(shard)
        del self.away[shard]
        if syncer is not None:
            disk, ids = self.driver.disk, self.fragments_of(shard)
            if syncer.core.state.manifest is not None:
                disk.go_back(syncer.core.state.manifest, self.driver.config.fragment_ids())
            self.driver.run(syncer, ShardBack(tuple((p, disk.version(p)) for p in ids)))

    def find(self, shard: int) -> None:
        self.away[shard] = self.engine.now
        self.engine.at(self.engine.now, self.start, shard)


class FaultyLinks(Links):
    """Links that lose, duplicate and damage messages, and can be cut in one direction."""

    def __init__(self, driver: Driver, plan: SwarmPlan, rng: Random, shards: FaultyShards) -> None:
        super().__init__(driver, 0.0, 0.0)
        self.healed = False
        self.cut_up: dict[LearnerId, float] = {}  # until when messages towards the syncer vanish
        self.cut_down: dict[LearnerId, float] = {}
        self.cut_bulk: dict[LearnerId, float] = {}  # of fragments and inner state only, in both directions
        self.poison: Counter[LearnerId] = Counter()
        self._plan = plan
        self._rng = rng
        self._shards = shards

    def heal(self) -> None:
        self.healed = True
        self.cut_up.clear()
        self.cut_down.clear()
        self.cut_bulk.clear()
        self.poison.clear()

    def cut(self, cuts: dict[LearnerId, float], learner: LearnerId, lasts_s: float) -> None:
        cuts[learner] = max(cuts.get(learner, 0.0), self.engine.now + lasts_s)

    def carry(self, conn: Conn, to: SimProcess, envelope: Envelope) -> None:
        now = self.engine.now
        up = to is conn.syncer
        if up:
            envelope = self._tampered(envelope)
        link: LinkDraw = self._plan.links[envelope.learner]
        rng = self._rng
        if (self.cut_up if up else self.cut_down).get(envelope.learner, 0.0) > now:
            return
        if not self.healed and link.loss and rng.random() < link.loss:
            return
        bulk = type(envelope.body) in BULK
        if bulk and self.cut_bulk.get(envelope.learner, 0.0) > now:
            return
        delay = link.delay_s * (0.5 + rng.random()) + (link.bulk_s * rng.random() if bulk else 0.0)
        lane = (up, bulk)
        when = max(now + delay, conn.last.get(lane, 0.0))
        conn.last[lane] = when
        event: Event = MessageArrived(envelope)
        if type(envelope.body) is Published and not self.healed and link.loss and rng.random() < link.loss:
            event = FragmentDamaged(envelope.body.fragment, envelope.body.version, "the digest is wrong")
        shard = self._shards.behind(envelope)
        self._shards.later(when, shard, to, event)
        if not self.healed and link.duplicates and rng.random() < link.duplicates:
            self._shards.later(when + 3 * delay * rng.random(), shard, to, event)

    def _tampered(self, envelope: Envelope) -> Envelope:
        """A poisoned learner sends values or counters that no sane process sends."""
        body = envelope.body
        if not self.poison[envelope.learner] or type(body) not in (Contribution, Report, LeaseRequest):
            return envelope
        self.poison[envelope.learner] -= 1
        if isinstance(body, Report):
            return replace(envelope, body=self._rng.choice((replace(body, trained=2**61), Pong(1), body)))
        if isinstance(body, LeaseRequest):
            return replace(envelope, body=self._rng.choice((replace(body, leases=99), replace(body, taken=2**61))))
        assert isinstance(body, Contribution)
        wild = self._rng.choice(("nan", "tokens", "steps", "none"))
        if wild == "nan":
            body = replace(body, problem="values are not finite")
        elif wild == "tokens":
            body = replace(body, tokens=body.trained + 1)
        elif wild == "steps":
            body = replace(body, steps=body.copied_at + 5)
        else:
            body = replace(body, steps=0, tokens=0)
        return replace(envelope, body=body)

    def dial(self, proc: SimProcess, effect: Dial) -> None:
        self.engine.at(self.engine.now + effect.after_s, self._try, proc)

    def _try(self, proc: SimProcess) -> None:
        now = self.engine.now
        learner = proc.actor.learner
        delay = self._plan.links[learner].delay_s * (0.5 + self._rng.random())
        if self.driver.syncer is None or max(self.cut_up.get(learner, 0.0), self.cut_down.get(learner, 0.0)) > now:
            self.engine.at(now + delay + 0.1, self.driver.deliver, proc, DialFailed("nobody answers"))
        elif proc.alive:
            self.engine.at(now + delay, self.driver.deliver, proc, self.connect(proc))

    def closing_s(self, conn: Conn) -> float:
        return self._plan.links[conn.learner.actor.learner].delay_s + 0.05 * self._rng.random()

    def reaches_syncer(self, conn: Conn) -> bool:
        """A cut link tells nobody: the syncer finds out by silence."""
        return self.cut_up.get(conn.learner.actor.learner, 0.0) <= self.engine.now


class FaultyStore(SimStore):
    """Disks that fail and are slow, merges that fail, and a store that another syncer may take over."""

    def __init__(self, driver: Driver, plan: SwarmPlan, rng: Random, shards: FaultyShards) -> None:
        super().__init__(driver, plan.merge_s, plan.disk_s)
        self.healed = False
        self.bad_until = 0.0
        self.slow_until = 0.0
        self.merge_bad = False
        self.parts: dict[LearnerId, int] = {}  # snapshot of the newest part that each has on its disk
        self._rng = rng
        self._shards = shards
        self._writing: dict[int, Record] = {}  # disk operations under way, by serial
        self._serial = 0

    def heal(self) -> None:
        self.healed = True
        self.bad_until = self.slow_until = self.engine.now
        self.merge_bad = False

    def merge(self, proc: SimProcess, effect: MergeRound) -> None:
        when = self.engine.now + self._merge_s * self._rng.random()
        event: Event = MergeFailed(effect.round, "out of memory") if self.merge_bad else MergeDone(effect.round)
        self.merge_bad = False
        self._shards.later(when, self._shards.of(effect.round.fragment), proc, event)

    def persist(self, proc: SimProcess, effect: Persist) -> None:
        now = self.engine.now
        if proc is not self.driver.syncer:
            fenced = StoreFenced(self.disk.epoch)
            self.engine.at(now + self._disk_s * self._rng.random(), self.driver.deliver, proc, fenced)
            return
        if self._shards.of_record(effect.record) in self._shards.away:
            return  # it has not been told yet
        slow = 10.0 if self.slow_until > now else 1.0
        self._serial += 1
        self._writing[self._serial] = effect.record
        self.engine.at(now + self._disk_s * self._rng.random() * slow, self._write, proc, self._serial)

    def _write(self, proc: SimProcess, serial: int) -> None:
        """The bytes are on disk now; the process hears of it a little later, or never."""
        record = self._writing.pop(serial, None)
        if record is None:
            return
        if proc is not self.driver.syncer:
            self.driver.deliver(proc, StoreFenced(self.disk.epoch))
            return
        key = record.key()
        shard = self._shards.of_record(record)
        if self.bad_until > self.engine.now:
            self._shards.through(shard, proc, PersistFailed(key, "no space left on device"))
            return
        self.disk.write(record)
        when = self.engine.now + 0.1 * self._disk_s * self._rng.random()
        self._shards.later(when, shard, proc, Persisted(key))

    def cut_off(self) -> None:
        """The syncer dies. What it was writing has reached the disk or not: it may be durable and not published."""
        for record in self._writing.values():
            self._perhaps_write(record)
        self._writing.clear()

    def lose_shard(self, shard: int, until: float = math.inf) -> None:
        """What it was writing has reached its disk or not, and no answer comes."""
        self._shards.lose(shard, until)
        for serial, record in list(self._writing.items()):
            if self._shards.of_record(record) == shard:
                del self._writing[serial]
                assert isinstance(record, VersionRecord)
                if record.round.epoch == self.disk.epoch:  # an older syncer is fenced
                    self._perhaps_write(record)
        self._shards.tell_lost(shard, is_new=True)
        if until < math.inf:
            self.engine.at(until, self._shards.start, shard)

    def _perhaps_write(self, record: Record) -> None:
        if self.bad_until <= self.engine.now and self._rng.random() < 0.5:
            self.disk.write(record)

    def save_part(self, proc: SimProcess, effect: SaveSnapshot) -> None:
        when = self.engine.now + self._disk_s * self._rng.random()
        event: Event = SnapshotSaved(effect.snapshot)
        if not self.healed and self._rng.random() < 0.05:
            event = SnapshotSaveFailed(effect.snapshot, "no space left on device")
        elif proc.actor.learner % 4 == 0:
            event = SnapshotSaveFailed(effect.snapshot, NO_RUN_DIRECTORY)
        else:
            self.parts[proc.actor.learner] = effect.snapshot
        self.engine.at(when, self.driver.deliver, proc, event)
