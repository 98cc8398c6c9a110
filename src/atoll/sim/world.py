"""World of the swarm: real cores with simulated network, disks and clocks, all determined by one seed.

The world injects faults while checkers run. Then it heals everything and checks that rounds complete, that all learners
end with the published versions and that the token ledger balances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from msgspec import structs

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    Contribution,
    ControlRequested,
    Envelope,
    Event,
    FinishRequested,
    Halt,
    Hello,
    LeaveRequested,
    MergeDone,
    MergeFailed,
    MessageArrived,
    SavedStateFound,
    SnapshotRequested,
    Stop,
    StoreFenced,
)
from atoll.core.states import LearnerMode, MemberState, RunStage
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState, SyncerState
from atoll.core.types import SYNCER, ControlKind, FragmentId, LearnerId
from atoll.sim.checkers import CheckerDispatcher, InvariantViolationError, create_checkers
from atoll.sim.driver import LearnerFactory, SimDriver, SimProcess, StepSimulator, SyncerFactory, core_violation
from atoll.sim.faults import FaultyLinks, FaultyShards, FaultyStore
from atoll.sim.scenarios import SwarmFault, SwarmScenario
from atoll.tape.format import Actor, Entry

RECOVERY_TIMEOUT_S = 3000.0
"""Virtual seconds after healing until the run must have recovered; many times the sum of all timeouts."""

ProcessFaultHandler = Callable[[SwarmFault, SimProcess], bool | None]
WorldFaultHandler = Callable[[SwarmFault], bool | None]
"""Injectors of faults. They return False for a fault that is not possible now, which is not counted."""


class SwarmWorld:
    """Run of a scenario: faults, healing, the end."""

    def __init__(
        self,
        plan: SwarmScenario,
        syncer: SyncerFactory = SyncerCore,
        learner: LearnerFactory = LearnerCore,
        on_entry: Callable[[Entry], None] | None = None,
        on_start: Callable[[Actor, RestoredState | None], None] | None = None,
    ) -> None:
        self.scenario = plan
        self.config = plan.config
        self.rng = Random(plan.seed ^ 0x5EED)
        self.driver = driver = SimDriver(plan.config, syncer, learner)
        self.engine = driver.engine
        self.disk = driver.disk
        self.checkers = CheckerDispatcher(create_checkers(plan.config))
        self.shards = FaultyShards(driver, plan.shards)
        self.links = FaultyLinks(driver, plan, self.rng, self.shards)
        self.store = FaultyStore(driver, plan, self.rng, self.shards)
        driver.handlers[Stop] = self._on_stop
        driver.handlers[Halt] = self._on_halt
        driver.before_event.append(self._count_state_event)
        driver.on_entry += [self.checkers.observe] if on_entry is None else [on_entry, self.checkers.observe]
        driver.after_event.append(self._check_periodically)
        self.steps = StepSimulator(driver, plan.step_times_s, plan.tokens_per_step, plan.samples_per_step)
        driver.on_start += (
            [self.checkers.on_process_started] if on_start is None else [self.checkers.on_process_started, on_start]
        )
        driver.on_end.append(lambda proc: _add_counts(proc, self.transition_counts, self.reason_counts))
        self.departed: set[LearnerId] = set()  # learners that left or crashed for good
        self.crashed: set[LearnerId] = set()  # departed learners that crashed
        self.duplicated: set[LearnerId] = set()  # learners with two processes
        self.superseded_syncers: list[SimProcess] = []  # syncers that do not know of their successor
        self.fault_counts: Counter[str] = Counter()
        self.transition_counts: Counter[tuple[Any, str]] = Counter()
        self.reason_counts: Counter[str] = Counter()
        self.state_event_counts: Counter[tuple[Any, type]] = Counter()
        self._target_versions: dict[FragmentId, int] = {}
        self._events_since_check = 0
        self._learner_faults: dict[str, ProcessFaultHandler] = {  # faults that need a running learner
            "kill learner": self._fault_kill_learner,
            "pause learner": self._fault_pause,
            "second start": self._fault_second_start,
            "reset link": self._fault_reset,
            "leave": self._fault_leave,
            "preempt": self._fault_preempt,
            "die": self._fault_die,
            "slow down": self._fault_slow_down,
            "drain": self._fault_drain,
        }
        self._syncer_faults: dict[str, ProcessFaultHandler] = {  # need a running syncer
            "kill syncer": self._fault_kill_syncer,
            "second syncer": self._fault_second_syncer,
            "pause syncer": self._fault_pause,
            "invalid hello": self._fault_invalid_hello,
            "snapshot": lambda fault, proc: driver.deliver(proc, SnapshotRequested()),
            "lose shard": self._fault_lose_shard,
        }
        self._other_faults: dict[str, WorldFaultHandler] = {  # links, disks, clocks and requests by operators
            "cut both ways": self._cut_both,
            "cut uplink": lambda fault: self.links.cut(self.links.uplink_cut_until, fault.learner, fault.duration_s),
            "cut downlink": lambda fault: self.links.cut(
                self.links.downlink_cut_until, fault.learner, fault.duration_s
            ),
            # The connection for fragments hangs while control messages pass: a live learner without contributions.
            "cut bulk": lambda fault: self.links.cut(self.links.bulk_cut_until, fault.learner, fault.duration_s),
            "fail disk": self._fault_fail_disk,
            "slow disk": self._fault_slow_disk,
            "fail merge": self._fault_fail_merge,
            "jump clock": self._fault_jump_clock,
            "poison": self._fault_poison,
            "join": self._fault_join,
            "pause run": self._fault_pause_run,
            "quorum": lambda fault: self._control("quorum", int(fault.magnitude)),
            "grace": lambda fault: self._control("grace", fault.magnitude),
        }

    # ---------------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Inject the faults, heal everything and end the run. Raise InvariantViolationError at a violation."""
        self.start()
        for fault in self.scenario.faults:
            self.engine.schedule(fault.at_s, self._inject, fault)
        self.engine.run_until(self.scenario.fault_phase_s)
        self._heal()
        self._run_until("rounds complete", self._rounds_complete)
        self._run_until("the leases of crashed learners return", self._crashed_are_settled)
        self._run_until("drained learners leave", self._drained_have_left)
        if self.scenario.shards:
            self._run_without_shard()
        if self.scenario.ends_paused:
            self._control("pause")
        self.engine.schedule(self.engine.now + (2.0 if self.scenario.ends_paused else 0.0), self._request_finish)
        if self.scenario.shard_lost_at_end is not None:
            self._finish_without_shard(self.scenario.shard_lost_at_end)
        self._run_until("all learners end with the published versions", self._all_stopped)
        for proc in self._processes():
            self._check(proc)
        self.checkers.finish()

    def _run_without_shard(self) -> None:
        """Check that the fragments of other shards continue without a shard, and its own fragments after its return."""
        shard = self.rng.randrange(self.scenario.shards)
        own_fragments = self.shards.fragments_of(shard)
        self._set_target_versions()
        self.store.lose_shard(shard)
        waiting = {p: self._target_versions.pop(p) for p in own_fragments}
        self._run_until("rounds of other shards complete", self._versions_reached, self._lacks_quorum)
        self._target_versions.update(waiting)
        self.shards.recover(shard)
        self._run_until("rounds complete after a shard returns", self._rounds_complete)

    def _finish_without_shard(self, shard: int) -> None:
        """Lose a shard during or just before the last merges, and recover it after the end."""
        self.engine.run_until(self.engine.now + self.rng.choice((0.0, 2.0, 4.0)) * self.rng.random())
        self.store.lose_shard(shard)
        self._run_until("the run ends without a shard", self._is_over)
        self.shards.recover(shard)

    def _is_over(self) -> bool:
        core = self.syncer_core()
        return core is not None and core.state.stage is RunStage.FINISHED

    def _run_until(self, condition: str, done: Callable[[], bool], unless: Callable[[], bool] | None = None) -> None:
        end = self.engine.now + RECOVERY_TIMEOUT_S
        self.engine.run_until(end, done)
        if not done() and not (unless is not None and unless()):
            stuck = self._describe_stuck()
            raise InvariantViolationError(
                "liveness", f"{condition}: not within {RECOVERY_TIMEOUT_S:g} s; {stuck[1]}", None, stuck[0]
            )

    def _rounds_complete(self) -> bool:
        core = self.syncer_core()
        if core is not None and core.state.stage is not RunStage.RUNNING:
            return True
        return self._versions_reached() and all(
            proc.core.state.mode is LearnerMode.TRAINING
            for i, proc in self.driver.learners.items()
            if i not in self.departed
        )

    def _lacks_quorum(self) -> bool:
        """Return whether too few learners are live: joining learners wait for the fragments of the shard."""
        core = self.syncer_core()
        return core is not None and len(core.state.live) < core.state.config.quorum

    def _while_running(self, done: Callable[[SyncerState], bool]) -> bool:
        """Return whether the condition holds at the running syncer, or the run has left its running stage."""
        core = self.syncer_core()
        return core is not None and (core.state.stage is not RunStage.RUNNING or done(core.state))

    def _versions_reached(self) -> bool:
        return self._while_running(lambda s: all(s.fragments[p].version >= v for p, v in self._target_versions.items()))

    def _crashed_are_settled(self) -> bool:
        """Return whether no crashed learner has leased samples or an open token account."""
        return self._while_running(
            lambda s: (
                self.crashed.isdisjoint(s.ledger.accounts)
                and self.crashed.isdisjoint(key[0] for key in s.leases.holders)
            )
        )

    def _drained_have_left(self) -> bool:
        return self._while_running(
            lambda s: all(not m.drained_by or m.state is MemberState.DISCONNECTED for m in s.members.values())
        )

    def _all_stopped(self) -> bool:
        staying = (proc for i, proc in self.driver.learners.items() if i not in self.departed)
        return self._is_over() and all(proc.core.state.mode is LearnerMode.STOPPED for proc in staying)

    def _describe_stuck(self) -> tuple[tuple[str, int] | None, str]:
        core = self.syncer_core()
        if core is None:
            return None, "the syncer does not run"
        for i, proc in self.driver.learners.items():
            if i not in self.departed and proc.core.state.mode not in (LearnerMode.TRAINING, LearnerMode.STOPPED):
                return ("learner", i), f"learner {i} is {proc.core.state.mode.value}, link {proc.core.state.link.value}"
        for f in core.state.fragments.values():
            if core.state.stage is RunStage.FINISHING and not f.final:
                return ("fragment", f.id), f"fragment {f.id} is {f.phase.value}, not final: {core.explain(f)}"
        for p, f in core.state.fragments.items():
            if core.state.stage is RunStage.RUNNING and f.version < self._target_versions.get(p, 0):
                return ("fragment", p), f"fragment {p} is {f.phase.value} at version {f.version}: {core.explain(f)}"
        if not self._crashed_are_settled():
            return (
                None,
                f"some of the crashed learners {sorted(self.crashed)} have leased samples or an open token account",
            )
        for i, proc in self.driver.learners.items():
            if i not in self.departed and proc.core.state.mode is not LearnerMode.STOPPED:
                return ("learner", i), f"learner {i} is {proc.core.state.mode.value}, link {proc.core.state.link.value}"
        return None, f"the run is {core.state.stage.value}"

    def _heal(self) -> None:
        self.links.heal()
        self.store.heal()
        now = self.engine.now
        for shard in self.shards.unavailable_until:
            self.shards.recover(shard)
        for proc in self._processes():
            proc.paused_until = min(proc.paused_until, now)
            proc.slowdown_factor = 1.0
        if self.driver.syncer is None:
            self.engine.schedule(now + self.rng.random(), self._start_syncer)
        if "pause" in self.disk.controls and not self._control("resume"):
            self.disk.controls["pause"] = ControlRequested("resume", None, "the operator")
        for learner in self.scenario.start_times_s:
            self._revive(learner)
        for learner in list(self.driver.learners):
            self._revive(learner)
        self._set_target_versions()

    def _set_target_versions(self) -> None:
        """Require two more merges of every fragment."""
        self._target_versions = {p: self.disk.durable_version(p) + 2 for p in self.config.fragment_ids()}

    def _revive(self, learner: LearnerId) -> None:
        proc = self.driver.learners.get(learner)
        if learner in self.departed:
            return
        if proc is None or not proc.is_alive:
            self.engine.schedule(self.engine.now + self.rng.random(), self._start_if_down, learner)

    def _request_finish(self) -> None:
        if self.driver.syncer is not None:
            if "pause" in self.disk.controls:
                self.disk.controls["pause"] = ControlRequested("resume", None, "the end")
            self.driver.handle_event(self.driver.syncer, FinishRequested())

    # ---------------------------------------------------------------------------------------------------- processes

    def start(self) -> None:
        self._start_syncer()
        for learner, at in self.scenario.start_times_s.items():
            self.engine.schedule(at, self._start_learner, learner)

    def syncer_core(self) -> SyncerCore | None:
        return self.driver.syncer.core if self.driver.syncer is not None else None

    def _start_syncer(self) -> None:
        if self.driver.syncer is not None:
            return
        if self.shards.unavailable_until:  # a syncer starts from the versions of all its shards
            self.engine.schedule(self.engine.now + 0.5, self._start_syncer)
            return
        self.driver.start_syncer()

    def _start_if_down(self, learner: LearnerId) -> None:
        proc = self.driver.learners.get(learner)
        if proc is None or not proc.is_alive:
            self._start_learner(learner)

    def _start_learner(self, learner: LearnerId) -> None:
        if learner in self.departed:
            return
        proc = self.driver.start_learner(learner)
        if learner in self.store.snapshot_parts:
            self.driver.handle_event(proc, SavedStateFound(learner, self.store.snapshot_parts[learner]))

    def _running_process(self, learner: LearnerId) -> SimProcess | None:
        proc = self.driver.learners.get(learner)
        return proc if proc is not None and proc.is_alive and learner not in self.departed else None

    def _on_stop(self, proc: SimProcess, effect: Stop) -> None:
        """Restart a learner that was refused for its old incarnation, but not one that is finished or has left."""
        learner = proc.actor.learner
        refused = effect.reason.code == "learner-refused"
        if refused and self.driver.learners.get(learner) is proc and "finished" not in str(effect.reason):
            self.engine.schedule(self.engine.now + 1.0, self._start_if_stopped, proc)
        elif effect.reason.code in ("learner-left-on-request", "learner-drained", "learner-left-early"):
            self.departed.add(learner)  # it is not restarted
            self.engine.schedule(self.engine.now + 1.0, self._kill_if_alive, proc)

    def _kill_if_alive(self, proc: SimProcess) -> None:
        if proc.is_alive:
            self.driver.kill(proc)

    def _start_if_stopped(self, proc: SimProcess) -> None:
        if self.driver.learners.get(proc.actor.learner) is proc:
            self._start_learner(proc.actor.learner)

    def _on_halt(self, proc: SimProcess, effect: Halt) -> None:
        """End the process of a superseded syncer."""
        if proc in self.superseded_syncers:
            self.superseded_syncers.remove(proc)
            self.driver.kill(proc)

    # ---------------------------------------------------------------------------------------------------- observers

    def _processes(self) -> list[SimProcess]:
        return ([self.driver.syncer] if self.driver.syncer is not None else []) + self.driver.processes

    def coverage(self) -> tuple[Counter[tuple[Any, str]], Counter[str]]:
        """Return the counts of transitions and reason codes of all processes that ever ran."""
        transitions, reasons = Counter(self.transition_counts), Counter(self.reason_counts)
        for proc in self._processes():
            _add_counts(proc, transitions, reasons)
        return transitions, reasons

    def _check_periodically(self, proc: SimProcess, event: Event) -> None:
        self._events_since_check += 1
        if self._events_since_check >= 64:
            self._events_since_check = 0
            self._check(proc)

    def _check(self, proc: SimProcess) -> None:
        try:
            proc.core.check_invariants()
            if proc is self.driver.syncer:
                self.reason_counts.update(proc.core.explain(f).code for f in proc.core.state.fragments.values())
        except AssertionError as error:
            raise core_violation(proc, f"{proc.actor}: {error}") from error

    def _count_state_event(self, proc: SimProcess, event: Event) -> None:
        """Count pairs of state and event: of the learner, or at the syncer of the sender and the fragment."""
        core = proc.core
        what: type = type(event)
        if proc.actor.learner != SYNCER:
            if type(event) is MessageArrived:
                what = type(event.envelope.body)
            self.state_event_counts[(core.state.mode, what)] += 1
            return
        if type(event) is MessageArrived:
            body = event.envelope.body
            what = type(body)
            member = core.state.members.get(event.envelope.learner)
            self.state_event_counts[(MemberState.UNKNOWN if member is None else member.state, what)] += 1
            fragment = body.round.fragment if type(body) is Contribution else getattr(body, "fragment", None)
        else:
            key = getattr(event, "key", None)
            fragment = key.number if key is not None and key.kind == "version" else None
            if type(event) in (MergeDone, MergeFailed):
                fragment = event.round.fragment  # type: ignore[union-attr]
            self.state_event_counts[(core.state.stage, what)] += 1
        if fragment in core.state.fragments:
            self.state_event_counts[(core.state.fragments[fragment].phase, what)] += 1

    # ---------------------------------------------------------------------------------------------------- operators

    def _control(self, kind: ControlKind, value: float | None = None) -> bool:
        """Store a request by an operator, then send it to the core. A syncer that starts later receives it again."""
        now = self.engine.now
        if self.driver.syncer is None or max(self.store.write_errors_until, self.driver.syncer.paused_until) > now:
            return False
        event = ControlRequested(kind, value, "the operator")
        if kind != "drain":
            self.disk.controls["pause" if kind == "resume" else kind] = event
        self.driver.handle_event(self.driver.syncer, event)
        return True

    def _fault_pause_run(self, fault: SwarmFault) -> bool:
        if not self._control("pause"):
            return False
        self.engine.schedule(self.engine.now + fault.duration_s, self._resume_run)
        return True

    def _resume_run(self) -> None:
        request = self.disk.controls.get("pause")
        if not self.links.is_healed and request is not None and request.kind == "pause" and not self._control("resume"):
            self.engine.schedule(self.engine.now + 1.0, self._resume_run)  # no syncer accepts the request yet

    def _fault_drain(self, fault: SwarmFault, proc: SimProcess) -> bool:
        core = self.syncer_core()
        if core is None or fault.learner not in core.state.members:
            return False
        return self._control("drain", fault.learner)

    # ---------------------------------------------------------------------------------------------------- faults

    def _inject(self, fault: SwarmFault) -> None:
        proc = self._running_process(fault.learner) if fault.kind in self._learner_faults else self.driver.syncer
        on_process = self._learner_faults.get(fault.kind) or self._syncer_faults.get(fault.kind)
        if on_process is None:
            is_injected = self._other_faults[fault.kind](fault)
        else:
            is_injected = on_process(fault, proc) if proc is not None else False
        if is_injected is not False:
            self.fault_counts[fault.kind] += 1

    def _fault_kill_learner(self, fault: SwarmFault, proc: SimProcess) -> None:
        self.driver.kill(proc)
        self.engine.schedule(self.engine.now + fault.duration_s, self._start_if_down, fault.learner)

    def _fault_pause(self, fault: SwarmFault, proc: SimProcess) -> None:
        proc.paused_until = max(proc.paused_until, self.engine.now + fault.duration_s)

    def _fault_second_start(self, fault: SwarmFault, proc: SimProcess) -> None:
        """Start the same learner elsewhere while its old process continues."""
        self._start_learner(fault.learner)
        self.duplicated.add(fault.learner)

    def _fault_reset(self, fault: SwarmFault, proc: SimProcess) -> bool:
        if proc.connection is None or not proc.connection.is_open:
            return False
        self.links.close(proc.connection, notify_learner=True, notify_syncer=True, cause="connection reset by peer")
        return True

    def _cut_both(self, fault: SwarmFault) -> None:
        self.links.cut(self.links.uplink_cut_until, fault.learner, fault.duration_s)
        self.links.cut(self.links.downlink_cut_until, fault.learner, fault.duration_s)

    def _fault_kill_syncer(self, fault: SwarmFault, proc: SimProcess) -> None:
        self.driver.kill(proc)
        self.store.on_syncer_killed()
        self.engine.schedule(self.engine.now + fault.duration_s, self._start_syncer)

    def _fault_second_syncer(self, fault: SwarmFault, proc: SimProcess) -> bool:
        """Let a standby take over the store while the old syncer continues with its connected learners."""
        if self.shards.unavailable_until:  # it starts from the versions of all shards
            return False
        # A syncer without writes detects the takeover because its driver polls the epoch of the store.
        self.superseded_syncers.append(proc)
        self.driver.start_syncer()
        self.engine.schedule(
            self.engine.now + 10 * self.rng.random(), self.driver.deliver, proc, StoreFenced(self.disk.epoch)
        )
        return True

    def _fault_invalid_hello(self, fault: SwarmFault, proc: SimProcess) -> None:
        """Send a hello with an unknown run, another model or an invalid learner id."""
        learner = len(self.scenario.start_times_s) + 7
        hello = Hello(self.config.run_id, self.config.fingerprint, (-1,) * len(self.config.fragment_ids()), 0, 0, False)
        if fault.magnitude > 5:
            hello = structs.replace(hello, fingerprint=("embedding 8x8 f32", "head 9x9 f32"))
        elif fault.duration_s > 1:
            hello = structs.replace(hello, run_id="another")
        else:
            learner = -3
        self.driver.handle_event(proc, MessageArrived(Envelope(learner, 1, 1, 0, 0, 0, 0, hello)))

    def _fault_fail_disk(self, fault: SwarmFault) -> None:
        self.store.write_errors_until = max(self.store.write_errors_until, self.engine.now + fault.duration_s)

    def _fault_slow_disk(self, fault: SwarmFault) -> None:
        self.store.slow_writes_until = max(self.store.slow_writes_until, self.engine.now + fault.duration_s)

    def _fault_jump_clock(self, fault: SwarmFault) -> bool:
        proc = self.driver.syncer if fault.duration_s < 1.0 else self._running_process(fault.learner)
        if proc is None:
            return False
        proc.clock_s += fault.magnitude
        proc.step_started_at -= fault.magnitude  # a learner measures its steps with the clock that jumped
        proc.timer_at = None
        self.driver.arm_timer(proc)
        return True

    def _fault_poison(self, fault: SwarmFault) -> None:
        self.links.poisoned_messages[fault.learner] += int(fault.magnitude)

    def _fault_join(self, fault: SwarmFault) -> bool:
        if fault.learner in self.driver.learners:
            return False
        self._start_learner(fault.learner)
        return True

    def _fault_leave(self, fault: SwarmFault, proc: SimProcess) -> None:
        self.departed.add(fault.learner)
        self.driver.handle_event(proc, LeaveRequested("requested by the operator"))
        self.driver.kill(proc)
        if fault.magnitude > 5:
            self.engine.schedule(self.engine.now + fault.duration_s, self._return_learner, fault.learner)

    def _fault_preempt(self, fault: SwarmFault, proc: SimProcess) -> bool:
        """Preempt a learner after a notice of `duration_s`. It may return on another machine."""
        if proc.is_preempted or proc.core.state.mode is not LearnerMode.TRAINING:
            return False
        proc.is_preempted = True
        if proc.is_waiting_at_boundary:
            self.steps.handle_preemption(proc)
        self.engine.schedule(self.engine.now + fault.duration_s, self._finish_preemption, proc, fault.magnitude > 5)
        return True

    def _finish_preemption(self, proc: SimProcess, comes_back: bool) -> None:
        learner = proc.actor.learner
        if proc.is_alive:
            if proc.core.state.mode is not LearnerMode.STOPPED:
                self.driver.handle_event(proc, LeaveRequested("the preemption notice has expired"))
            self.driver.kill(proc)
            if self.driver.learners.get(learner) is proc:
                self.departed.add(learner)
        if comes_back and learner in self.departed and self.driver.learners.get(learner) is proc:
            self._return_learner(learner)

    def _fault_die(self, fault: SwarmFault, proc: SimProcess) -> bool:
        """Crash a learner permanently: with a reset connection, or with its host, which closes no connection."""
        if fault.learner in self.duplicated:  # an older process of it may still run
            return False
        if fault.magnitude > 5:
            self._cut_both(replace(fault, duration_s=self.scenario.fault_phase_s))
        self.departed.add(fault.learner)
        self.crashed.add(fault.learner)
        self.driver.kill(proc)
        return True

    def _return_learner(self, learner: LearnerId) -> None:
        self.departed.discard(learner)
        self._start_if_down(learner)

    def _fault_lose_shard(self, fault: SwarmFault, proc: SimProcess) -> bool:
        if fault.learner in self.shards.unavailable_until:
            return False
        self.store.lose_shard(fault.learner, self.engine.now + fault.duration_s)
        return True

    def _fault_fail_merge(self, fault: SwarmFault) -> None:
        self.store.next_merge_fails = True

    def _fault_slow_down(self, fault: SwarmFault, proc: SimProcess) -> None:
        proc.slowdown_factor = fault.magnitude


def _add_counts(proc: SimProcess, transitions: Counter[tuple[Any, str]], reasons: Counter[str]) -> None:
    transitions.update(proc.core.state.transition_counts)
    reasons.update(proc.core.state.reason_counts)
