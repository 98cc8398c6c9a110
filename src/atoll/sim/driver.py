"""Driver of the cores in virtual time: processes with their clocks and timers, and the execution of effects.

A world is a driver with its components. `SimLinks`, `SimStore` and `StepSimulator` execute effects without faults, in a
fixed time. The swarm replaces them by components that fail; the fleet simulator has its own steps. Checkers, tapes and
counters are observers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    Contribution,
    ControlRequested,
    Dial,
    DialFailed,
    Effect,
    Envelope,
    Event,
    LearnerDisconnected,
    LeaseRecord,
    LeaveRequested,
    ManifestRecord,
    MembersRecord,
    MergeDone,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    Published,
    Record,
    SaveSnapshot,
    Send,
    SnapshotSaved,
    Started,
    StartTraining,
    StepTaken,
    TimerFired,
    VersionRecord,
)
from atoll.core.states import LearnerMode
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, FragmentId, Incarnation, LearnerId, RunConfig, Version
from atoll.sim.checkers import InvariantViolationError
from atoll.tape.format import Actor, Entry

SyncerFactory = Callable[[RunConfig, int, RestoredState | None], SyncerCore]
LearnerFactory = Callable[[RunConfig, LearnerId, Incarnation], LearnerCore]


class SimEngine:
    """Virtual time: runs callables in the order of their time, then in the order in which they were scheduled.

    >>> engine = SimEngine()
    >>> seen = []
    >>> engine.schedule(2.0, seen.append, "b")
    >>> engine.schedule(1.0, seen.append, "a")
    >>> engine.run_until(5.0)
    >>> seen, engine.now
    (['a', 'b'], 2.0)
    """

    __slots__ = ("_heap", "_serial", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._serial = 0

    def schedule(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        self._serial = serial = self._serial + 1
        heappush(self._heap, (when if when > self.now else self.now, serial, callback, args))

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> None:
        """Run all callables that are due by `end`. Return early when `stop` returns true after a callable."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, callback, args = heappop(heap)
            self.events += 1
            callback(*args)
            if stop is not None and stop():
                return


@dataclass(slots=True, eq=False)
class SimProcess:
    """A running core with its own clock."""

    actor: Actor
    core: Any
    clock_s: float = 0.0  # added to virtual time
    is_alive: bool = True
    paused_until: float = 0.0
    timer_at: float | None = None  # virtual time of the scheduled timer
    sessions: int = 0
    connection: SimConnection | None = None
    step_started_at: float = 0.0
    slowdown_factor: float = 1.0
    is_waiting_at_boundary: bool = False  # waits at a step boundary, because the run is paused or the learner drains
    is_preempted: bool = False  # its machine will be taken away soon


@dataclass(slots=True, eq=False)
class SimConnection:
    """Connection between one learner process and one syncer process."""

    learner: SimProcess
    syncer: SimProcess
    session: int
    is_open: bool = True
    last_arrival_s: dict[tuple[bool, bool], float] = field(default_factory=dict)  # by direction and lane


class SimDisk:
    """Durable state, which survives a crash of the syncer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.versions: dict[FragmentId, VersionRecord] = {}
        self.members: MembersRecord | None = None
        self.manifest: ManifestRecord | None = None
        self.leases: LeaseRecord | None = None
        self.controls: dict[str, ControlRequested] = {}  # requests by operators, by setting
        # Version before the newest, of each fragment.
        self._previous_versions: dict[FragmentId, VersionRecord | None] = {}

    def write(self, record: Record) -> None:
        if isinstance(record, VersionRecord):
            self._previous_versions[record.fragment] = self.versions.get(record.fragment)
            self.versions[record.fragment] = record
        elif isinstance(record, MembersRecord):
            self.members = record
        elif isinstance(record, ManifestRecord):
            self.manifest = record
        elif isinstance(record, LeaseRecord):
            self.leases = record

    def durable_version(self, fragment: FragmentId) -> Version:
        return self.versions[fragment].version if fragment in self.versions else 0

    def roll_back(self, manifest: ManifestRecord, ids: tuple[FragmentId, ...]) -> None:
        """Drop versions that the manifest does not name. No process knew that they were durable when the run ended."""
        for p, final in zip(ids, manifest.versions, strict=True):
            if self.durable_version(p) > final:
                before = self._previous_versions.get(p)
                assert (before.version if before is not None else 0) == final, f"fragment {p} cannot go back to {final}"
                if before is None:
                    del self.versions[p]
                else:
                    self.versions[p] = before

    def load(self, ids: tuple[FragmentId, ...]) -> RestoredState:
        if self.manifest is not None:
            self.roll_back(self.manifest, ids)
        return RestoredState(dict(self.versions), self.members, self.manifest, self.leases)


class SimDriver:
    """Cores as processes on one engine. Components register their handlers of effects in `handlers`.

    `before_event` and `after_event` receive every event with its process, and `on_entry` its tape entry. `on_start` and
    `on_end` receive the start and the end of processes.
    """

    def __init__(
        self,
        config: RunConfig,
        syncer: SyncerFactory = SyncerCore,
        learner: LearnerFactory = LearnerCore,
        *,
        clocks_s: Mapping[int, float] | None = None,
    ) -> None:
        self.config = config
        self.engine = SimEngine()
        self.disk = SimDisk()
        self.syncer: SimProcess | None = None
        self.learners: dict[LearnerId, SimProcess] = {}  # newest process of each id
        self.processes: list[SimProcess] = []  # running learner processes, including superseded ones
        self.processes_by_actor: dict[tuple[LearnerId, int], SimProcess] = {}  # the same processes by actor
        self.incarnations: Counter[LearnerId] = Counter()
        self.handlers: dict[type, Callable[[SimProcess, Any], None]] = {}
        self.before_event: list[Callable[[SimProcess, Event], None]] = []
        self.on_entry: list[Callable[[Entry], None]] = []
        self.after_event: list[Callable[[SimProcess, Event], None]] = []
        self.on_start: list[Callable[[Actor, RestoredState | None], None]] = []
        self.on_end: list[Callable[[SimProcess], None]] = []
        self._new_syncer = syncer
        self._new_learner = learner
        self._clocks_s = clocks_s or {}

    # ---------------------------------------------------------------------------------------------------- processes

    def start_syncer(self) -> SimProcess:
        """Start a syncer from the durable state. An older syncer may still run; it is fenced."""
        disk = self.disk
        disk.epoch += 1
        restored = disk.load(self.config.fragment_ids()) if disk.epoch > 1 else None
        core = self._new_syncer(self.config, disk.epoch, restored)
        proc = self.syncer = SimProcess(Actor(SYNCER, disk.epoch), core, self._clocks_s.get(SYNCER, 0.0))
        self._start_process(proc, restored)
        for control in disk.controls.values():
            self.handle_event(proc, control)
        return proc

    def start_learner(self, learner: LearnerId) -> SimProcess:
        """Start the next incarnation of a learner. Older processes may still run."""
        before = self.learners.get(learner)
        refused = before.core.state.refused_incarnation if before is not None else None
        self.incarnations[learner] = max(self.incarnations[learner], refused or 0) + 1
        actor = Actor(learner, self.incarnations[learner])
        core = self._new_learner(self.config, learner, actor.generation)
        proc = SimProcess(actor, core, self._clocks_s.get(learner, 0.0))
        self.learners[learner] = proc
        self.processes.append(proc)
        self.processes_by_actor[actor] = proc
        self._start_process(proc, None)
        return proc

    def _start_process(self, proc: SimProcess, restored: RestoredState | None) -> None:
        for on_start in self.on_start:
            on_start(proc.actor, restored)
        self.handle_event(proc, Started())

    def kill(self, proc: SimProcess) -> None:
        proc.is_alive = False
        if proc is self.syncer:
            self.syncer = None
        if proc.actor.learner != SYNCER:
            self.processes.remove(proc)
            del self.processes_by_actor[proc.actor]
        for on_end in self.on_end:
            on_end(proc)

    # ---------------------------------------------------------------------------------------------------- events

    def deliver(self, proc: SimProcess, event: Event) -> None:
        """Deliver an event to a process. Drop it if the process is dead, and delay it if the process is paused."""
        if not proc.is_alive:
            return
        if proc.paused_until > self.engine.now:
            self.engine.schedule(proc.paused_until, self.deliver, proc, event)
            return
        self.handle_event(proc, event)

    def handle_event(self, proc: SimProcess, event: Event, not_before: float = 0.0) -> list[Effect]:
        """Let a core handle an event and execute its effects. The time is that of its clock, at least `not_before`."""
        core = proc.core
        for before in self.before_event:
            before(proc, event)
        at = self.engine.now + proc.clock_s
        if at < not_before:
            at = not_before
        try:
            effects: list[Effect] = core.handle(at, event)
        except AssertionError as error:
            raise core_violation(proc, f"{proc.actor} on {event}: {error}") from error
        if self.on_entry:
            entry: Entry = tuple.__new__(Entry, (at, proc.actor, core.state.tick, event, tuple(effects)))
            for on_entry in self.on_entry:
                on_entry(entry)
        for effect in effects:
            handler = self.handlers.get(type(effect))
            if handler is not None:
                handler(proc, effect)
        self.arm_timer(proc)
        for after in self.after_event:
            after(proc, event)
        return effects

    def arm_timer(self, proc: SimProcess) -> None:
        deadline = proc.core.next_deadline()
        if deadline is None:
            return
        when = deadline - proc.clock_s
        if when < self.engine.now:
            when = self.engine.now
        if proc.timer_at is None or when < proc.timer_at:
            proc.timer_at = when
            self.engine.schedule(when, self._on_timer, proc, when)

    def _on_timer(self, proc: SimProcess, when: float) -> None:
        if proc.timer_at != when or not proc.is_alive:
            return
        if proc.paused_until > self.engine.now:
            proc.timer_at = proc.paused_until
            self.engine.schedule(proc.paused_until, self._on_timer, proc, proc.paused_until)
            return
        proc.timer_at = None
        deadline = proc.core.next_deadline()
        # Adding and subtracting a clock offset may lose the last bit, so the comparison needs a tolerance.
        if deadline is not None and deadline <= self.engine.now + proc.clock_s + 1e-6:
            self.handle_event(proc, TimerFired(), not_before=deadline)
        else:
            self.arm_timer(proc)


def core_violation(proc: SimProcess, sentence: str) -> InvariantViolationError:
    """Return the violation for a failed assertion of a core."""
    return InvariantViolationError(
        "core", sentence, None, ("learner", proc.actor.learner) if proc.actor.learner else ("run", 0)
    )


class SimLinks:
    """Connections that never fail, with a fixed delay for messages and another for fragments."""

    def __init__(self, driver: SimDriver, delay_s: float, fragment_s: float) -> None:
        self.driver = driver
        self.engine = driver.engine
        self._delay_s = delay_s
        self._fragment_s = fragment_s
        driver.handlers.update({Send: self.send, Dial: self.dial, CloseConnection: self.close_session})
        driver.on_end.append(self.close_connections)

    def send(self, proc: SimProcess, effect: Send) -> None:
        envelope = effect.envelope
        if proc.actor.learner == SYNCER:
            target = self.driver.processes_by_actor.get((envelope.learner, envelope.incarnation))
            conn = target.connection if target is not None else None
            if conn is not None and conn.session == envelope.session and conn.syncer is proc and conn.is_open:
                self.transmit(conn, conn.learner, envelope)
        else:
            conn = proc.connection
            if conn is not None and conn.is_open and conn.session == envelope.session:
                self.transmit(conn, conn.syncer, envelope)

    def transmit(self, conn: SimConnection, to: SimProcess, envelope: Envelope) -> None:
        kind = type(envelope.body)
        transfer_s = self._fragment_s if kind is Contribution or kind is Published else self._delay_s
        self.engine.schedule(self.engine.now + transfer_s, self.driver.deliver, to, MessageArrived(envelope))

    def dial(self, proc: SimProcess, effect: Dial) -> None:
        self.engine.schedule(self.engine.now + effect.delay_s + self._delay_s, self._finish_dial, proc)

    def _finish_dial(self, proc: SimProcess) -> None:
        if proc.is_alive:
            connected = self.connect(proc)
            self.driver.deliver(proc, DialFailed("connection refused") if connected is None else connected)

    def connect(self, proc: SimProcess) -> ConnectionOpened | None:
        if self.driver.syncer is None:
            return None
        proc.sessions += 1
        proc.connection = SimConnection(proc, self.driver.syncer, proc.sessions)
        return ConnectionOpened(proc.sessions)

    def close_session(self, proc: SimProcess, effect: CloseConnection) -> None:
        by_syncer = proc.actor.learner == SYNCER
        learner = self.driver.processes_by_actor.get((effect.learner, effect.incarnation)) if by_syncer else proc
        conn = learner.connection if learner is not None else None
        if conn is not None and conn.session == effect.session and (not by_syncer or conn.syncer is proc):
            self.close(conn, notify_learner=by_syncer, notify_syncer=not by_syncer, cause="closed by peer")

    def close_connections(self, proc: SimProcess) -> None:
        """Close the connections of a process that has ended, and notify the other ends."""
        if proc.actor.learner != SYNCER:
            if proc.connection is not None:
                self.close(proc.connection, notify_learner=False, notify_syncer=True, cause="connection reset by peer")
            return
        for learner in self.driver.processes:
            if learner.connection is not None and learner.connection.syncer is proc:
                self.close(
                    learner.connection, notify_learner=True, notify_syncer=False, cause="connection reset by peer"
                )

    def close(self, conn: SimConnection, notify_learner: bool, notify_syncer: bool, cause: str) -> None:
        if not conn.is_open:
            return
        conn.is_open = False
        when = self.engine.now + self.close_delay_s(conn)
        if notify_learner:
            self.engine.schedule(when, self.driver.deliver, conn.learner, ConnectionClosed(conn.session, cause))
        if notify_syncer and self.close_reaches_syncer(conn):
            closed = LearnerDisconnected(*conn.learner.actor, conn.session, cause)
            self.engine.schedule(when, self.driver.deliver, conn.syncer, closed)

    def close_delay_s(self, conn: SimConnection) -> float:
        return self._delay_s

    def close_reaches_syncer(self, conn: SimConnection) -> bool:
        return True


class SimStore:
    """Merges and writes that never fail, with a fixed duration each."""

    def __init__(self, driver: SimDriver, merge_s: float, disk_s: float) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.disk = driver.disk
        self._merge_s = merge_s
        self._disk_s = disk_s
        driver.handlers.update({MergeRound: self.merge, Persist: self.persist, SaveSnapshot: self.save_part})

    def merge(self, proc: SimProcess, effect: MergeRound) -> None:
        self.engine.schedule(self.engine.now + self._merge_s, self.driver.deliver, proc, MergeDone(effect.round))

    def persist(self, proc: SimProcess, effect: Persist) -> None:
        self.engine.schedule(self.engine.now + self._disk_s, self._finish_write, proc, effect.record)

    def _finish_write(self, proc: SimProcess, record: Record) -> None:
        if proc is self.driver.syncer:
            self.disk.write(record)
            self.driver.deliver(proc, Persisted(record.key()))

    def save_part(self, proc: SimProcess, effect: SaveSnapshot) -> None:
        self.engine.schedule(self.engine.now + self._disk_s, self.driver.deliver, proc, SnapshotSaved(effect.snapshot))


class StepSimulator:
    """Simulated training threads, which take steps while the core allows it.

    Args:
        step_s: step time, by learner.
        tokens: tokens of a step, by learner.
        samples: leased samples of a step, by learner, in a run with leases.
    """

    def __init__(
        self,
        driver: SimDriver,
        step_s: Mapping[LearnerId, float],
        tokens: Mapping[LearnerId, int],
        samples: Mapping[LearnerId, int],
    ) -> None:
        self.driver = driver
        self.engine = driver.engine
        self._step_s = step_s
        self._tokens = tokens
        self._samples = samples
        driver.handlers[StartTraining] = self._start
        driver.after_event.append(self._wake_at_boundary)

    def _start(self, proc: SimProcess, effect: StartTraining) -> None:
        self._start_step(proc)

    def _start_step(self, proc: SimProcess) -> None:
        if not proc.is_alive or proc.core.state.mode is LearnerMode.STOPPED:
            return
        now = self.engine.now
        step_s = self._step_s[proc.actor.learner] * proc.slowdown_factor
        if proc.core.state.is_standing_by:
            proc.is_waiting_at_boundary = True
        elif proc.core.training:
            proc.step_started_at = now
            self.engine.schedule(now + step_s, self._finish_step, proc)
        else:
            self.engine.schedule(now + step_s, self._start_step, proc)  # the core makes its learner wait

    def _finish_step(self, proc: SimProcess) -> None:
        if not proc.is_alive or proc.core.state.mode is LearnerMode.STOPPED:
            return
        now = self.engine.now
        if proc.paused_until > now:
            self.engine.schedule(proc.paused_until, self._finish_step, proc)
            return
        step_s = max(now - proc.step_started_at, 0.0)
        self.driver.handle_event(
            proc, StepTaken(1, self._tokens[proc.actor.learner], step_s, self._leased_samples(proc))
        )
        self.handle_preemption(proc)
        self._start_step(proc)

    def _leased_samples(self, proc: SimProcess) -> int:
        """Return the new leased samples of one step: a full batch, or 0 if the step must reuse old samples."""
        if not self.driver.config.lease_samples:
            return 0
        batch = self._samples[proc.actor.learner]
        return batch if batch <= proc.core.state.leased_samples - proc.core.state.consumed_samples else 0

    def handle_preemption(self, proc: SimProcess) -> None:
        """Deliver a preemption signal that arrived during a step, at the end of the step."""
        if proc.is_preempted and proc.core.state.mode is not LearnerMode.STOPPED:
            self.driver.handle_event(proc, LeaveRequested("its machine will be taken away", drain=True))

    def _wake_at_boundary(self, proc: SimProcess, event: Event) -> None:
        """Wake a training thread that waits at a boundary, after an event."""
        if not proc.is_waiting_at_boundary:
            return
        core = proc.core
        if not core.state.is_standing_by or core.state.mode is LearnerMode.STOPPED:
            proc.is_waiting_at_boundary = False
            self._start_step(proc)
        elif (core.has_boundary_work and type(event) is not StepTaken) or core.leaving.can_answer():
            self.driver.handle_event(proc, StepTaken(0, 0, 0.0))
