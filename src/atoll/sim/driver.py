"""A driver of the cores in virtual time, with a network, disks and clocks that can be made to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from atoll.core.learner.core import LearnerCore
from atoll.core.messages import NO_RUN_DIRECTORY
from atoll.core.protocol import (
    Contribution,
    Dial,
    DialFailed,
    Effect,
    Envelope,
    Event,
    FragmentDamaged,
    Halt,
    Hangup,
    InnerState,
    LearnerDisconnected,
    LeaseRequest,
    LeaveWanted,
    LinkClosed,
    LinkOpened,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    MomentsFound,
    Persist,
    Persisted,
    PersistFailed,
    Pong,
    Published,
    Record,
    Report,
    SaveSnapshot,
    Send,
    SnapshotSaved,
    SnapshotSaveFailed,
    Started,
    StartTraining,
    StepTaken,
    Stop,
    StoreFenced,
    TimerFired,
    VersionRecord,
)
from atoll.core.states import Mode, Standing
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, FragmentId, Incarnation, LearnerId, RunConfig
from atoll.sim.checkers import Violation, Watch, all_checkers
from atoll.sim.draws import LinkDraw, Plan
from atoll.sim.engine import Engine
from atoll.sim.processes import Conn, Disk, Process
from atoll.tape.format import Actor, Entry

BULK = (Contribution, Published, InnerState)


class Driver:
    """Cores as processes on one engine: their links, disks, clocks and steps, as a plan has drawn them."""

    def __init__(
        self,
        plan: Plan,
        syncer: Callable[[RunConfig, int, Restored | None], SyncerCore] = SyncerCore,
        learner: Callable[[RunConfig, LearnerId, Incarnation], LearnerCore] = LearnerCore,
        on_entry: Callable[[Entry], None] | None = None,
        on_start: Callable[[Actor, Restored | None], None] | None = None,
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.rng = Random(plan.seed ^ 0x5EED)
        self.engine = Engine()
        self.watch = Watch(all_checkers(plan.config))
        self.disk = Disk()
        self.syncer: Process | None = None
        self.learners: dict[LearnerId, Process] = {}  # newest process of each id
        self.processes: list[Process] = []  # every learner process that runs, zombies included
        self.by_actor: dict[tuple[LearnerId, int], Process] = {}  # the same
        self.incarnations: Counter[LearnerId] = Counter()
        self.gone: set[LearnerId] = set()  # left for good, or died
        self.died: set[LearnerId] = set()  # of those, without a word
        self.doubled: set[LearnerId] = set()  # started a second time beside a process that lived
        self.parts: dict[LearnerId, int] = {}  # snapshot of the newest part that each has on its disk
        self.old_syncers: list[Process] = []  # cut off, and unaware that another has taken over
        self.cut_up: dict[LearnerId, float] = {}  # until when messages towards the syncer vanish
        self.cut_down: dict[LearnerId, float] = {}
        self.cut_bulk: dict[LearnerId, float] = {}  # of fragments and inner state only, in both directions
        self.disk_bad_until = 0.0
        self.disk_slow_until = 0.0
        self.merge_bad = False
        self.poison: Counter[LearnerId] = Counter()
        self.shards_away: dict[int, float] = {}  # until when
        self.shards_untold: set[int] = set()  # of those, whose loss the syncer has not heard of
        self.shard_starts: Counter[int] = Counter()  # processes of each shard that are gone
        self.healed = False
        self.faults_fired: Counter[str] = Counter()
        self.fired: Counter[tuple[Any, str]] = Counter()
        self.said: Counter[str] = Counter()
        self.pairs: Counter[tuple[Any, type]] = Counter()
        self._new_syncer = syncer
        self._new_learner = learner
        self._on_entry = on_entry
        self._on_start = on_start
        self._writing: dict[int, Record] = {}  # disk operations under way, by serial
        self._write_serial = 0
        self._since_check = 0

    # ---------------------------------------------------------------------------------------------------- processes

    def _syncer_core(self) -> SyncerCore | None:
        return self.syncer.core if self.syncer is not None else None

    def _start_syncer(self) -> None:
        if self.syncer is not None:
            return
        if self.shards_away:  # a syncer starts from what all its shards hold
            self.engine.at(self.engine.now + 0.5, self._start_syncer)
            return
        self.disk.epoch += 1
        restored = self.disk.restored(self.config.fragment_ids()) if self.disk.epoch > 1 else None
        core = self._new_syncer(self.config, self.disk.epoch, restored)
        self.syncer = Process(Actor(SYNCER, self.disk.epoch), core)
        self._began(self.syncer, restored)
        for wish in self.disk.wishes.values():
            self._run(self.syncer, wish)

    def _start_if_down(self, learner: LearnerId) -> None:
        proc = self.learners.get(learner)
        if proc is None or not proc.alive:
            self._start_learner(learner)

    def _start_learner(self, learner: LearnerId) -> None:
        if learner in self.gone:
            return
        before = self.learners.get(learner)
        least = before.core.refused_for if before is not None and before.core.refused_for is not None else 0
        self.incarnations[learner] = max(self.incarnations[learner], least) + 1
        actor = Actor(learner, self.incarnations[learner])
        proc = Process(actor, self._new_learner(self.config, learner, actor.start))
        self.learners[learner] = proc
        self.processes.append(proc)
        self.by_actor[actor] = proc
        self._began(proc, None)
        if learner in self.parts:
            self._run(proc, MomentsFound(learner, self.parts[learner]))

    def _began(self, proc: Process, restored: Restored | None) -> None:
        self.watch.started(proc.actor, restored)
        if self._on_start is not None:
            self._on_start(proc.actor, restored)
        self._run(proc, Started())

    def _count(self, core: SyncerCore | LearnerCore) -> None:
        self.fired.update(core.fired)
        self.said.update(core.said)

    def coverage(self) -> tuple[Counter[tuple[Any, str]], Counter[str]]:
        """Rows of the transition tables and reason codes, of all processes that ever ran."""
        fired, said = Counter(self.fired), Counter(self.said)
        for proc in ([self.syncer] if self.syncer is not None else []) + self.processes:
            fired.update(proc.core.fired)
            said.update(proc.core.said)
        return fired, said

    def _check_cores(self) -> None:
        if self.syncer is not None:
            self._checked(self.syncer)
        for proc in self.processes:
            self._checked(proc)

    def _checked(self, proc: Process) -> None:
        try:
            proc.core.check_invariants()
            if proc is self.syncer:
                self.said.update(proc.core.explain(f).code for f in proc.core.fragments.values())
        except AssertionError as error:
            subject = ("learner", proc.actor.learner) if proc.actor.learner else ("run", 0)
            raise Violation("core", f"{proc.actor}: {error}", None, subject) from error

    # ---------------------------------------------------------------------------------------------------- the driver

    def _deliver(self, proc: Process, event: Event) -> None:
        """An event for a process: lost if it is dead, late if it is paused."""
        if not proc.alive:
            return
        if proc.paused_until > self.engine.now:
            self.engine.at(proc.paused_until, self._deliver, proc, event)
            return
        self._run(proc, event)

    def _run(self, proc: Process, event: Event, least: float = 0.0) -> None:
        core = proc.core
        self._count_pair(proc, event)
        at = max(self.engine.now + proc.clock_s, least)
        try:
            effects: list[Effect] = core.handle(at, event)
        except AssertionError as error:
            subject = ("learner", proc.actor.learner) if proc.actor.learner else ("run", 0)
            raise Violation("core", f"{proc.actor} on {event}: {error}", None, subject) from error
        entry: Entry = tuple.__new__(Entry, (at, proc.actor, core.tick, event, tuple(effects)))
        if self._on_entry is not None:
            self._on_entry(entry)
        self.watch.observe(entry)
        for effect in effects:
            handler = _EFFECTS.get(type(effect))
            if handler is not None:
                handler(self, proc, effect)
        self._arm(proc)
        self._since_check += 1
        if self._since_check >= 64:
            self._since_check = 0
            self._checked(proc)
        if proc.stands:
            self._stand(proc, event)

    def _stand(self, proc: Process, event: Event) -> None:
        """Its training thread sleeps at a boundary, and looks up when something has come."""
        core = proc.core
        if not core.rests or core.mode is Mode.STOPPED:
            proc.stands = False
            self._begin_step(proc)
        elif (core.has_boundary_work and type(event) is not StepTaken) or core.can_answer:
            self._run(proc, StepTaken(0, 0, 0.0))

    def _count_pair(self, proc: Process, event: Event) -> None:
        """Which event met which state: a learner's own; at the syncer, of the speaker and of the fragment."""
        core = proc.core
        what: type = type(event)
        if proc.actor.learner != SYNCER:
            if type(event) is MessageArrived:
                what = type(event.envelope.body)
            self.pairs[(core.mode, what)] += 1
            return
        if type(event) is MessageArrived:
            body = event.envelope.body
            what = type(body)
            member = core.members.get(event.envelope.learner)
            self.pairs[(Standing.UNKNOWN if member is None else member.standing, what)] += 1
            fragment = body.round.fragment if type(body) is Contribution else getattr(body, "fragment", None)
        else:
            key = getattr(event, "key", None)
            fragment = key.number if key is not None and key.kind == "version" else None
            if type(event) in (MergeDone, MergeFailed):
                fragment = event.round.fragment  # type: ignore[union-attr]
            self.pairs[(core.stage, what)] += 1
        if fragment in core.fragments:
            self.pairs[(core.fragments[fragment].phase, what)] += 1

    def _arm(self, proc: Process) -> None:
        deadline = proc.core.next_deadline()
        if deadline is None:
            return
        when = max(deadline - proc.clock_s, self.engine.now)
        if proc.timer_at is None or when < proc.timer_at:
            proc.timer_at = when
            self.engine.at(when, self._timer, proc, when)

    def _timer(self, proc: Process, when: float) -> None:
        if proc.timer_at != when or not proc.alive:
            return
        if proc.paused_until > self.engine.now:
            proc.timer_at = proc.paused_until
            self.engine.at(proc.paused_until, self._timer, proc, proc.paused_until)
            return
        proc.timer_at = None
        deadline = proc.core.next_deadline()
        # Adding and subtracting a clock's offset may lose the last bit; a timer that is due within it is due.
        if deadline is not None and deadline <= self.engine.now + proc.clock_s + 1e-6:
            self._run(proc, TimerFired(), least=deadline)
        else:
            self._arm(proc)

    # ---------------------------------------------------------------------------------------------------- effects

    def _do_send(self, proc: Process, effect: Send) -> None:
        envelope = effect.envelope
        if proc.actor.learner == SYNCER:
            target = self.by_actor.get((envelope.learner, envelope.incarnation))
            conn = target.conn if target is not None else None
            if conn is None or conn.session != envelope.session or conn.syncer is not proc or not conn.open:
                return
            self._carry(conn, conn.learner, envelope, self.cut_down)
        else:
            conn = proc.conn
            if conn is not None and conn.open and conn.session == envelope.session:
                self._carry(conn, conn.syncer, self._tampered(envelope), self.cut_up)

    def _tampered(self, envelope: Envelope) -> Envelope:
        """A poisoned learner sends values or counters that no sane process sends."""
        body = envelope.body
        if not self.poison[envelope.learner] or type(body) not in (Contribution, Report, LeaseRequest):
            return envelope
        self.poison[envelope.learner] -= 1
        if isinstance(body, Report):
            return replace(envelope, body=self.rng.choice((replace(body, trained=2**61), Pong(1), body)))
        if isinstance(body, LeaseRequest):
            return replace(envelope, body=self.rng.choice((replace(body, leases=99), replace(body, taken=2**61))))
        assert isinstance(body, Contribution)
        wild = self.rng.choice(("nan", "tokens", "steps", "none"))
        if wild == "nan":
            body = replace(body, problem="values are not finite")
        elif wild == "tokens":
            body = replace(body, tokens=body.trained + 1)
        elif wild == "steps":
            body = replace(body, steps=body.copied_at + 5)
        else:
            body = replace(body, steps=0, tokens=0)
        return replace(envelope, body=body)

    def _carry(self, conn: Conn, to: Process, envelope: Envelope, cuts: dict[LearnerId, float]) -> None:
        now = self.engine.now
        link: LinkDraw = self.plan.links[envelope.learner]
        rng = self.rng
        if cuts.get(envelope.learner, 0.0) > now:
            return
        if not self.healed and link.loss and rng.random() < link.loss:
            return
        bulk = type(envelope.body) in BULK
        if bulk and self.cut_bulk.get(envelope.learner, 0.0) > now:
            return
        delay = link.delay_s * (0.5 + rng.random()) + (link.bulk_s * rng.random() if bulk else 0.0)
        lane = (to is conn.syncer, bulk)
        when = max(now + delay, conn.last.get(lane, 0.0))
        conn.last[lane] = when
        event: Event = MessageArrived(envelope)
        if type(envelope.body) is Published and not self.healed and link.loss and rng.random() < link.loss:
            event = FragmentDamaged(envelope.body.fragment, envelope.body.version, "the digest is wrong")
        shard = self._shard_behind(envelope)
        self._later(when, shard, to, event)
        if not self.healed and link.duplicates and rng.random() < link.duplicates:
            self._later(when + 3 * delay * rng.random(), shard, to, event)

    def _do_dial(self, proc: Process, effect: Dial) -> None:
        self.engine.at(self.engine.now + effect.after_s, self._dial, proc)

    def _dial(self, proc: Process) -> None:
        now = self.engine.now
        learner = proc.actor.learner
        delay = self.plan.links[learner].delay_s * (0.5 + self.rng.random())
        if self.syncer is None or max(self.cut_up.get(learner, 0.0), self.cut_down.get(learner, 0.0)) > now:
            self.engine.at(now + delay + 0.1, self._deliver, proc, DialFailed("nobody answers"))
            return
        if not proc.alive:
            return
        proc.sessions += 1
        proc.conn = Conn(proc, self.syncer, proc.sessions)
        self.engine.at(now + delay, self._deliver, proc, LinkOpened(proc.sessions))

    def _do_hangup(self, proc: Process, effect: Hangup) -> None:
        by_syncer = proc.actor.learner == SYNCER
        learner = self.by_actor.get((effect.learner, effect.incarnation)) if by_syncer else proc
        conn = learner.conn if learner is not None else None
        if conn is not None and conn.session == effect.session and (not by_syncer or conn.syncer is proc):
            self._close(conn, tell_learner=by_syncer, tell_syncer=not by_syncer, why="hung up")

    def _close(self, conn: Conn, tell_learner: bool, tell_syncer: bool, why: str) -> None:
        if not conn.open:
            return
        conn.open = False
        now = self.engine.now
        learner = conn.learner.actor.learner
        delay = self.plan.links[learner].delay_s + 0.05 * self.rng.random()
        if tell_learner:
            self.engine.at(now + delay, self._deliver, conn.learner, LinkClosed(conn.session, why))
        # A cut link tells nobody: the syncer finds out by silence.
        if tell_syncer and self.cut_up.get(learner, 0.0) <= now:
            closed = LearnerDisconnected(*conn.learner.actor, conn.session, why)
            self.engine.at(now + delay, self._deliver, conn.syncer, closed)

    def _do_merge(self, proc: Process, effect: MergeRound) -> None:
        when = self.engine.now + self.plan.merge_s * self.rng.random()
        shard = self._shard_of(effect.round.fragment)
        if self.merge_bad:
            self.merge_bad = False
            self._later(when, shard, proc, MergeFailed(effect.round, "out of memory"))
        else:
            self._later(when, shard, proc, MergeDone(effect.round))

    def _do_persist(self, proc: Process, effect: Persist) -> None:
        now = self.engine.now
        if proc is not self.syncer:
            self.engine.at(
                now + self.plan.disk_s * self.rng.random(), self._deliver, proc, StoreFenced(self.disk.epoch)
            )
            return
        if self._shard_of_record(effect.record) in self.shards_away:
            return  # it has not been told yet
        slow = 10.0 if self.disk_slow_until > now else 1.0
        self._write_serial += 1
        self._writing[self._write_serial] = effect.record
        took = self.plan.disk_s * self.rng.random() * slow
        self.engine.at(now + took, self._write, proc, self._write_serial)

    def _write(self, proc: Process, serial: int) -> None:
        """The bytes are on disk now; the process hears of it a little later, or never."""
        record = self._writing.pop(serial, None)
        if record is None:
            return
        if proc is not self.syncer:
            self._deliver(proc, StoreFenced(self.disk.epoch))
            return
        key = record.key()
        shard = self._shard_of_record(record)
        if self.disk_bad_until > self.engine.now:
            self._through(shard, proc, PersistFailed(key, "no space left on device"))
            return
        self.disk.write(record)
        self._later(self.engine.now + 0.1 * self.plan.disk_s * self.rng.random(), shard, proc, Persisted(key))

    # ---------------------------------------------------------------------------------------------------- shards

    def _shard_of(self, fragment: FragmentId) -> int | None:
        return fragment % self.plan.shards if self.plan.shards else None

    def _shard_of_record(self, record: Record) -> int | None:
        return self._shard_of(record.fragment) if isinstance(record, VersionRecord) else None

    def _shard_behind(self, envelope: Envelope) -> int | None:
        """Values travel between learner and shard."""
        body = envelope.body
        if type(body) is Contribution:
            return self._shard_of(body.round.fragment)
        return self._shard_of(body.fragment) if type(body) is Published else None

    def _later(self, when: float, shard: int | None, proc: Process, event: Event) -> None:
        """What comes by way of a shard comes if that process of it lives until then."""
        if shard not in self.shards_away:
            self.engine.at(when, self._through, shard, proc, event, self._start_of(shard))

    def _through(self, shard: int | None, proc: Process, event: Event, start: int | None = None) -> None:
        """A process that stands still hears of it later, and not at all if the shard is lost by then."""
        if start is not None and self._start_of(shard) != start:
            return
        if shard is not None and proc.paused_until > self.engine.now:
            self.engine.at(proc.paused_until, self._through, shard, proc, event, self._start_of(shard))
        else:
            self._deliver(proc, event)

    def _start_of(self, shard: int | None) -> int:
        return 0 if shard is None else self.shard_starts[shard]

    def _do_halt(self, proc: Process, effect: Halt) -> None:
        """The driver of a syncer that was superseded ends its process."""
        if proc in self.old_syncers:
            self.old_syncers.remove(proc)
            self._end_syncer(proc)

    def _do_save(self, proc: Process, effect: SaveSnapshot) -> None:
        when = self.engine.now + self.plan.disk_s * self.rng.random()
        event: Event = SnapshotSaved(effect.snapshot)
        if not self.healed and self.rng.random() < 0.05:
            event = SnapshotSaveFailed(effect.snapshot, "no space left on device")
        elif proc.actor.learner % 4 == 0:
            event = SnapshotSaveFailed(effect.snapshot, NO_RUN_DIRECTORY)
        else:
            self.parts[proc.actor.learner] = effect.snapshot
        self.engine.at(when, self._deliver, proc, event)

    def _do_start_training(self, proc: Process, effect: StartTraining) -> None:
        self._begin_step(proc)

    def _do_stop(self, proc: Process, effect: Stop) -> None:
        """An island starts its learner again when it was refused for what it was, not for what it is."""
        refused = effect.reason.code == "learner-refused"
        if refused and self.learners.get(proc.actor.learner) is proc and "finished" not in str(effect.reason):
            self.engine.at(self.engine.now + 1.0, self._start_if_stopped, proc)
        elif effect.reason.code in ("learner-drained", "learner-pushed", "learner-hurried"):
            self.gone.add(proc.actor.learner)  # nobody starts it again
            self.engine.at(self.engine.now + 1.0, self._kill_if_alive, proc)

    def _kill_if_alive(self, proc: Process) -> None:
        if proc.alive:
            self._kill_learner(proc)

    def _start_if_stopped(self, proc: Process) -> None:
        if self.learners.get(proc.actor.learner) is proc:
            self._start_learner(proc.actor.learner)

    def _begin_step(self, proc: Process) -> None:
        if not proc.alive or proc.core.mode is Mode.STOPPED:
            return
        now = self.engine.now
        took = self.plan.step_times_s[proc.actor.learner] * proc.slow
        if proc.core.rests:
            proc.stands = True
        elif proc.core.training:
            proc.stepping_since = now
            self.engine.at(now + took, self._end_step, proc)
        else:
            self.engine.at(now + took, self._begin_step, proc)  # the core made its learner wait

    def _end_step(self, proc: Process) -> None:
        if not proc.alive or proc.core.mode is Mode.STOPPED:
            return
        now = self.engine.now
        if proc.paused_until > now:
            self.engine.at(proc.paused_until, self._end_step, proc)
            return
        took = max(now - proc.stepping_since, 0.0)
        tokens, samples = self.plan.tokens[proc.actor.learner], self._samples(proc)
        self._run(proc, StepTaken(1, tokens, took, samples))
        self._heed_notice(proc)
        self._begin_step(proc)

    def _heed_notice(self, proc: Process) -> None:
        """A signal that came in the middle of a step is heard at its end."""
        if proc.is_noticed and proc.core.mode is not Mode.STOPPED:
            self._run(proc, LeaveWanted("its machine is taken away", push=True))

    def _samples(self, proc: Process) -> int:
        """Of its leases, in one step: a whole batch, or none where it has to go on with what it has had already."""
        if not self.config.lease_samples:
            return 0
        batch = self.plan.samples[proc.actor.learner]
        return batch if batch <= proc.core.state.held - proc.core.taken else 0

    def _running(self, learner: LearnerId) -> Process | None:
        proc = self.learners.get(learner)
        return proc if proc is not None and proc.alive and learner not in self.gone else None

    def _kill_learner(self, proc: Process) -> None:
        proc.alive = False
        self._count(proc.core)
        self.processes.remove(proc)
        del self.by_actor[proc.actor]
        if proc.conn is not None:
            self._close(proc.conn, tell_learner=False, tell_syncer=True, why="connection reset by peer")

    def _end_syncer(self, proc: Process) -> None:
        proc.alive = False
        self._count(proc.core)
        for learner in self.processes:
            if learner.conn is not None and learner.conn.syncer is proc:
                self._close(learner.conn, tell_learner=True, tell_syncer=False, why="connection reset by peer")


_EFFECTS: dict[type, Callable[[Driver, Process, Any], None]] = {
    Send: Driver._do_send,
    Dial: Driver._do_dial,
    Hangup: Driver._do_hangup,
    MergeRound: Driver._do_merge,
    Persist: Driver._do_persist,
    SaveSnapshot: Driver._do_save,
    StartTraining: Driver._do_start_training,
    Stop: Driver._do_stop,
    Halt: Driver._do_halt,
}
