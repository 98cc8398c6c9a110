"""A hostile world in virtual time: real cores, unreal network, disks and clocks, all drawn by one seed.

The world breaks things while checkers watch, then heals everything and demands that rounds complete, that everybody
ends with the published versions and that the ledger balances.
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
"""Virtual seconds after healing within which everything must have come right; many times what the limits add up to."""

ProcessFaultHandler = Callable[[SwarmFault, SimProcess], bool | None]
WorldFaultHandler = Callable[[SwarmFault], bool | None]
"""How a fault is injected. False: it could not be, and is not counted."""


class SwarmWorld:
    """A plan, carried out: faults, healing, the end."""

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
        self.departed: set[LearnerId] = set()  # left for good, or died
        self.crashed: set[LearnerId] = set()  # of those, without a word
        self.duplicated: set[LearnerId] = set()  # started a second time beside a process that lived
        self.superseded_syncers: list[SimProcess] = []  # cut off, and unaware that another has taken over
        self.fault_counts: Counter[str] = Counter()
        self.transition_counts: Counter[tuple[Any, str]] = Counter()
        self.reason_counts: Counter[str] = Counter()
        self.state_event_counts: Counter[tuple[Any, type]] = Counter()
        self._target_versions: dict[FragmentId, int] = {}
        self._events_since_check = 0
        self._learner_faults: dict[str, ProcessFaultHandler] = {  # of a learner that runs
            "kill learner": self._fault_kill_learner,
            "pause learner": self._fault_pause,
            "second start": self._fault_second_start,
            "reset link": self._fault_reset,
            "leave": self._fault_leave,
            "notice": self._fault_preempt,
            "die": self._fault_die,
            "slow down": self._fault_slow_down,
            "drain": self._fault_drain,
        }
        self._syncer_faults: dict[str, ProcessFaultHandler] = {  # of a syncer that runs
            "kill syncer": self._fault_kill_syncer,
            "second syncer": self._fault_second_syncer,
            "pause syncer": self._fault_pause,
            "stranger": self._fault_invalid_hello,
            "snapshot": lambda fault, proc: driver.deliver(proc, SnapshotRequested()),
            "lose shard": self._fault_lose_shard,
        }
        self._other_faults: dict[str, WorldFaultHandler] = {  # of links, disks and clocks, or asked for by operators
            "cut both ways": self._cut_both,
            "cut upwards": lambda fault: self.links.cut(self.links.uplink_cut_until, fault.learner, fault.duration_s),
            "cut downwards": lambda fault: self.links.cut(
                self.links.downlink_cut_until, fault.learner, fault.duration_s
            ),
            # The connection for fragments hangs while control messages pass: alive, and yet nothing comes of it.
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

    # ---------------------------------------------------------------------------------------------------- the story

    def run(self) -> None:
        """Faults, then healing, then the end. Raises InvariantViolationError."""
        self.start()
        for fault in self.scenario.faults:
            self.engine.schedule(fault.at_s, self._inject, fault)
        self.engine.run_until(self.scenario.fault_phase_s)
        self._heal()
        self._run_until("rounds complete", self._rounds_complete)
        self._run_until("what the dead had leased returns", self._crashed_are_settled)
        self._run_until("who was asked to leave has left", self._drained_have_left)
        if self.scenario.shards:
            self._run_without_shard()
        if self.scenario.ends_paused:
            self._control("pause")
        self.engine.schedule(self.engine.now + (2.0 if self.scenario.ends_paused else 0.0), self._request_finish)
        if self.scenario.shard_lost_at_end is not None:
            self._finish_without_shard(self.scenario.shard_lost_at_end)
        self._run_until("everybody ends with the published versions", self._all_stopped)
        for proc in self._processes():
            self._check(proc)
        self.checkers.finish()

    def _run_without_shard(self) -> None:
        """All else is well: the fragments of the other shards go on, and its own when it is back."""
        shard = self.rng.randrange(self.scenario.shards)
        mine = self.shards.fragments_of(shard)
        self._set_target_versions()
        self.store.lose_shard(shard)
        waiting = {p: self._target_versions.pop(p) for p in mine}
        self._run_until("rounds of other shards complete", self._versions_reached, self._lacks_quorum)
        self._target_versions.update(waiting)
        self.shards.recover(shard)
        self._run_until("rounds complete when a shard is back", self._rounds_complete)

    def _finish_without_shard(self, shard: int) -> None:
        """It is lost while the last merges are under way, or just before, and is back when all is over."""
        self.engine.run_until(self.engine.now + self.rng.choice((0.0, 2.0, 4.0)) * self.rng.random())
        self.store.lose_shard(shard)
        self._run_until("the run ends without a shard", self._is_over)
        self.shards.recover(shard)

    def _is_over(self) -> bool:
        core = self.syncer_core()
        return core is not None and core.state.stage is RunStage.FINISHED

    def _run_until(self, what: str, done: Callable[[], bool], unless: Callable[[], bool] | None = None) -> None:
        end = self.engine.now + RECOVERY_TIMEOUT_S
        self.engine.run_until(end, done)
        if not done() and not (unless is not None and unless()):
            stuck = self._describe_stuck()
            raise InvariantViolationError(
                "liveness", f"{what}: not within {RECOVERY_TIMEOUT_S:g} s; {stuck[1]}", None, stuck[0]
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
        """Whoever joins wants every fragment, and waits for a shard that is away."""
        core = self.syncer_core()
        return core is not None and len(core.state.live) < core.state.config.quorum

    def _while_running(self, done: Callable[[SyncerState], bool]) -> bool:
        """Return whether this holds at the syncer that runs, or whether the run is past it."""
        core = self.syncer_core()
        return core is not None and (core.state.stage is not RunStage.RUNNING or done(core.state))

    def _versions_reached(self) -> bool:
        return self._while_running(lambda s: all(s.fragments[p].version >= v for p, v in self._target_versions.items()))

    def _crashed_are_settled(self) -> bool:
        """Return whether no learner that died for good holds samples or has an open account."""
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
            return None, f"some of {sorted(self.crashed)}, who died for good, hold samples or an open account"
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
        """From here on every fragment has to be merged twice."""
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
        if self.shards.unavailable_until:  # a syncer starts from what all its shards hold
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
        """An island starts its learner again when it was refused for what it was, not for what it is."""
        learner = proc.actor.learner
        refused = effect.reason.code == "learner-refused"
        if refused and self.driver.learners.get(learner) is proc and "finished" not in str(effect.reason):
            self.engine.schedule(self.engine.now + 1.0, self._start_if_stopped, proc)
        elif effect.reason.code in ("learner-left-on-request", "learner-drained", "learner-left-early"):
            self.departed.add(learner)  # nobody starts it again
            self.engine.schedule(self.engine.now + 1.0, self._kill_if_alive, proc)

    def _kill_if_alive(self, proc: SimProcess) -> None:
        if proc.is_alive:
            self.driver.kill(proc)

    def _start_if_stopped(self, proc: SimProcess) -> None:
        if self.driver.learners.get(proc.actor.learner) is proc:
            self._start_learner(proc.actor.learner)

    def _on_halt(self, proc: SimProcess, effect: Halt) -> None:
        """The driver of a syncer that was superseded ends its process."""
        if proc in self.superseded_syncers:
            self.superseded_syncers.remove(proc)
            self.driver.kill(proc)

    # ---------------------------------------------------------------------------------------------------- observers

    def _processes(self) -> list[SimProcess]:
        return ([self.driver.syncer] if self.driver.syncer is not None else []) + self.driver.processes

    def coverage(self) -> tuple[Counter[tuple[Any, str]], Counter[str]]:
        """Rows of the transition tables and reason codes, of all processes that ever ran."""
        fired, said = Counter(self.transition_counts), Counter(self.reason_counts)
        for proc in self._processes():
            _add_counts(proc, fired, said)
        return fired, said

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
        """Which event met which state: a learner's own; at the syncer, of the speaker and of the fragment."""
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

    def _control(self, what: ControlKind, value: float | None = None) -> bool:
        """Durable first, then the core is told; a syncer that starts later is told again."""
        now = self.engine.now
        if self.driver.syncer is None or max(self.store.write_errors_until, self.driver.syncer.paused_until) > now:
            return False
        event = ControlRequested(what, value, "the operator")
        if what != "drain":
            self.disk.controls["pause" if what == "resume" else what] = event
        self.driver.handle_event(self.driver.syncer, event)
        return True

    def _fault_pause_run(self, fault: SwarmFault) -> bool:
        if not self._control("pause"):
            return False
        self.engine.schedule(self.engine.now + fault.duration_s, self._resume_run)
        return True

    def _resume_run(self) -> None:
        wish = self.disk.controls.get("pause")
        if not self.links.is_healed and wish is not None and wish.kind == "pause" and not self._control("resume"):
            self.engine.schedule(self.engine.now + 1.0, self._resume_run)  # nobody takes the wish yet

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
            fired = self._other_faults[fault.kind](fault)
        else:
            fired = on_process(fault, proc) if proc is not None else False
        if fired is not False:
            self.fault_counts[fault.kind] += 1

    def _fault_kill_learner(self, fault: SwarmFault, proc: SimProcess) -> None:
        self.driver.kill(proc)
        self.engine.schedule(self.engine.now + fault.duration_s, self._start_if_down, fault.learner)

    def _fault_pause(self, fault: SwarmFault, proc: SimProcess) -> None:
        proc.paused_until = max(proc.paused_until, self.engine.now + fault.duration_s)

    def _fault_second_start(self, fault: SwarmFault, proc: SimProcess) -> None:
        """The same learner is started elsewhere while the old process goes on, unaware."""
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
        """A standby takes the store over while the old syncer lives on with the learners that are connected to it."""
        if self.shards.unavailable_until:  # it starts from what all shards hold
            return False
        # Whoever writes nothing finds out by looking: a driver reads the store's epoch every few seconds.
        self.superseded_syncers.append(proc)
        self.driver.start_syncer()
        self.engine.schedule(
            self.engine.now + 10 * self.rng.random(), self.driver.deliver, proc, StoreFenced(self.disk.epoch)
        )
        return True

    def _fault_invalid_hello(self, fault: SwarmFault, proc: SimProcess) -> None:
        """Somebody who does not belong here says hello."""
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
        self.driver.handle_event(proc, LeaveRequested("the operator said so"))
        self.driver.kill(proc)
        if fault.magnitude > 5:
            self.engine.schedule(self.engine.now + fault.duration_s, self._return_learner, fault.learner)

    def _fault_preempt(self, fault: SwarmFault, proc: SimProcess) -> bool:
        """Its machine is taken away, and it is told so many seconds before. Perhaps it is given another one."""
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
                self.driver.handle_event(proc, LeaveRequested("the notice is over"))
            self.driver.kill(proc)
            if self.driver.learners.get(learner) is proc:
                self.departed.add(learner)
        if comes_back and learner in self.departed and self.driver.learners.get(learner) is proc:
            self._return_learner(learner)

    def _fault_die(self, fault: SwarmFault, proc: SimProcess) -> bool:
        """For good: with a reset link, or with its whole host, which tells nobody."""
        if fault.learner in self.duplicated:  # an older process of it may live on
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


def _add_counts(proc: SimProcess, fired: Counter[tuple[Any, str]], said: Counter[str]) -> None:
    fired.update(proc.core.state.transition_counts)
    said.update(proc.core.state.reason_counts)
