"""Decoupled run of a fleet: the real protocol cores on islands of simulated chips.

Two options make a simulation faster. Fragments are independent, so a long run may simulate a sample of the P fragments
(`sampled_fragments`): each is pulled, merged and adopted exactly as in a full run, and represents the others. A core
may receive several steps in one event if nothing is due between them (`steps_per_event`). With all fragments and
single steps the simulation runs the full protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    AdoptFragment,
    CopyFragment,
    Event,
    FinishRequested,
    LeaveRequested,
    MergeRound,
    MessageArrived,
    Published,
    Pull,
    StartTraining,
    StepTaken,
)
from atoll.core.settings import check_settings, same_setting, setting
from atoll.core.states import LearnerMode
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, AdoptMode, LearnerId, Limits, RunConfig
from atoll.sim.driver import SimDriver, SimLinks, SimProcess, SimStore
from atoll.sim.fleet import ExtraLearners, FleetConfig, IslandState, Segment, SimIsland, build_islands
from atoll.tape.format import Actor, Entry

_LOCKSTEP_LIMITS = Limits(initial_wait_s=86_400.0, min_wait_s=86_400.0, max_wait_s=86_400.0)
"""Limits of a lockstep run, without timeouts. A learner that waits for others sends nothing. With normal timeouts it
would be marked as lost, no round would reach its quorum, and no learner would step again."""


@dataclass(frozen=True, slots=True)
class DecoupledConfig:
    """Settings of the protocol on the fleet."""

    fragments: int = same_setting(RunConfig, "fragments")
    every_steps: int = same_setting(RunConfig, "every_steps")
    overlap_steps: int = same_setting(RunConfig, "overlap_steps")
    quorum: int = same_setting(RunConfig, "quorum")
    grace_margin: float = same_setting(RunConfig, "grace_margin", 0.5)
    adopt: AdoptMode = same_setting(RunConfig, "adopt")
    delay_s: float = setting(0.05, "One-way delay of a message.", "SECONDS", flag="delay", min=0)
    fragment_s: float = setting(
        0.1, "Additional one-way time to send one fragment.", "SECONDS", flag="fragment_time", min=0
    )
    merge_s: float = setting(0.02, min=0)
    disk_s: float = setting(0.02, min=0)
    jitter: float = setting(0.0, "Standard deviation of the step time, as a share of it.", "SHARE", min=0, below=1)
    lockstep: bool = setting(False, "Make a learner wait when a round is tau steps late.")
    sampled_fragments: int | None = None  # None: all of them
    steps_per_event: int = 1

    def __post_init__(self) -> None:
        check_settings(self)
        if self.sampled_fragments is not None and not 1 <= self.sampled_fragments <= self.fragments:
            raise ValueError(f"sampled_fragments must be in 1..{self.fragments}, got {self.sampled_fragments}")
        if not 1 <= self.steps_per_event <= self.every_steps:
            raise ValueError(f"steps_per_event must be in 1..{self.every_steps}, got {self.steps_per_event}")
        if (self.lockstep or self.jitter) and self.steps_per_event != 1:
            raise ValueError("lockstep and jitter need steps_per_event = 1, because every step is different")

    def run_config(self) -> RunConfig:
        """Return the config of the run. Sampled fragments are spread evenly over the offsets."""
        owned = None
        if self.sampled_fragments is not None and self.sampled_fragments < self.fragments:
            owned = tuple(i * self.fragments // self.sampled_fragments for i in range(self.sampled_fragments))
        return RunConfig(
            run_id="simulated",
            fragments=self.fragments,
            every_steps=self.every_steps,
            overlap_steps=self.overlap_steps,
            quorum=self.quorum,
            grace_margin=self.grace_margin,
            adopt=self.adopt,
            owned_fragments=owned,
            limits=_LOCKSTEP_LIMITS if self.lockstep else Limits(),
        )


@dataclass(frozen=True, slots=True)
class DecoupledResult:
    """Result of one run. Token counts are means over the sampled fragments; shares are fractions."""

    goodput: float
    uptime: float
    throughput: float
    tokens_trained: float
    tokens_merged: float
    tokens_pending: float
    tokens_dropped: float
    merges: int
    contributions_per_merge: float
    effective_h: float
    staleness_steps: float
    steps: int
    failures: int
    suspected: int
    events: int
    goodput_by_learner: tuple[float, ...]
    dropped_by_reason: tuple[tuple[str, float], ...]


_PROGRESS_REPORTS = 100
"""Number of progress reports of a run."""


@dataclass(slots=True, eq=False)
class FleetLearner:
    """A learner on its island, with its process and the current step."""

    island: SimIsland
    tokens_per_step: float
    jitter: Random
    segment: Segment
    proc: SimProcess | None = None  # None while the island is absent
    remaining_steps: float = 1.0  # remaining share of the current step
    step_started_at: float = 0.0  # when the current step, or its first attempt, started
    steps: int = 0
    useful_chip_s: float = 0.0
    is_waiting: bool = False
    copied: dict[int, int] = field(default_factory=dict)  # local step of the last copy of each fragment
    next_boundary: tuple[float, int, float] | None = None  # time of the first boundary, steps, step time

    @property
    def is_training(self) -> bool:
        return self.proc is not None and self.proc.core.training


class DecoupledRun:
    """Islands, learners and one syncer in virtual time. `on_entry` and `on_start` may write tapes."""

    def __init__(
        self,
        fleet: FleetConfig,
        protocol: DecoupledConfig,
        learners: int,
        chips: int,
        days: float,
        seed: int,
        *,
        speeds: Sequence[float] = (),
        extras: Sequence[ExtraLearners] = (),
        on_entry: Callable[[Entry], None] | None = None,
        on_start: Callable[[Actor, RestoredState | None], None] | None = None,
    ) -> None:
        if not 0.0 < days < math.inf:
            raise ValueError(f"days is {days}; give a number above 0")
        if protocol.quorum > learners:
            raise ValueError(f"quorum {protocol.quorum} with {learners} learners never merges; give at most {learners}")
        self.fleet = fleet
        self.protocol = protocol
        self.config = protocol.run_config()
        self.horizon_s = days * 86_400.0
        islands = build_islands(fleet, learners, chips, seed, speeds=speeds, extras=extras)
        if len(islands) > self.config.limits.max_learners:
            limit = self.config.limits.max_learners
            raise ValueError(f"{len(islands)} learners, but a syncer serves {limit} learners at most; give fewer")
        self.learners = {
            index + 1: FleetLearner(
                island,
                fleet.tokens_per_chip_step * island.chips,
                Random(f"jitter {index} of seed {seed}"),
                next(island),
            )
            for index, island in enumerate(islands)
        }
        self.driver = driver = SimDriver(self.config)
        self.engine = driver.engine
        SimLinks(driver, protocol.delay_s, protocol.delay_s + protocol.fragment_s)
        self._store = SimStore(driver, protocol.merge_s, protocol.disk_s)
        driver.handlers[MergeRound] = self._on_merge
        driver.handlers[StartTraining] = self._on_start_training
        driver.handlers[AdoptFragment] = self._on_adopt
        if protocol.lockstep:
            driver.handlers[CopyFragment] = self._on_copy
        driver.after_event.append(self._on_arrival)
        if on_entry is not None:
            driver.on_entry.append(on_entry)
        if on_start is not None:
            driver.on_start.append(on_start)
        self._step_time_s = fleet.step_time_s
        self._jitter = protocol.jitter
        self._steps_per_event = protocol.steps_per_event
        self.contributions = 0
        self.merges = 0
        self.stale_steps = 0
        self.stale_count = 0
        self.stepping_learners = 0  # learners that are in a step now
        self.up_s = 0.0
        self._up_since = 0.0

    def run(self, on_progress: Callable[[float], None] | None = None) -> DecoupledResult:
        """Simulate up to the horizon. `on_progress` receives the completed share periodically."""
        self.driver.start_syncer()
        for number, learner in self.learners.items():
            self._enter(number, learner)
        reports = 1 if on_progress is None else _PROGRESS_REPORTS
        for report in range(1, reports + 1):
            self.engine.run_until(self.horizon_s * report / reports)
            if on_progress is not None:
                on_progress(report / reports)
        self._change_stepping(self.horizon_s, 0)
        return self._result(self.syncer)

    @property
    def syncer(self) -> SyncerCore:
        assert self.driver.syncer is not None, "call run() first"
        core: SyncerCore = self.driver.syncer.core
        return core

    def finish(self) -> bool:
        """Finish the run in an orderly way after the horizon.

        Return False if the syncer has not ended the run within one more day.
        """
        assert self.driver.syncer is not None
        state = self.syncer.state
        self.driver.handle_event(self.driver.syncer, FinishRequested())
        self.engine.run_until(self.horizon_s + 86_400.0, stop=lambda: state.halted)
        return state.halted

    # ---------------------------------------------------------------------------------------------------- islands

    def _enter(self, number: LearnerId, learner: FleetLearner) -> None:
        """Start the current segment of an island."""
        segment = learner.segment
        if segment.state is IslandState.ABSENT:
            if learner.proc is not None:
                self.driver.handle_event(learner.proc, LeaveRequested("the schedule removes its chips"))
                self.driver.kill(learner.proc)
                learner.proc = None
        elif learner.proc is None:
            learner.remaining_steps = 1.0
            learner.is_waiting = False
            learner.copied.clear()
            learner.proc = self.driver.start_learner(number)
        if segment.is_stepping and learner.is_training:
            if learner.is_waiting:
                self._resume(learner)
            else:
                self._start_stepping(learner)
        self.engine.schedule(segment.end_s, self._leave, number, learner, segment)

    def _leave(self, number: LearnerId, learner: FleetLearner, segment: Segment) -> None:
        if segment.is_stepping and learner.is_training and not learner.is_waiting:
            self._change_stepping(self.engine.now, -1)
            if segment.loses_step:
                learner.remaining_steps = 1.0
        learner.next_boundary = None
        learner.segment = next(learner.island)
        self._enter(number, learner)

    # ---------------------------------------------------------------------------------------------------- steps

    def _start_stepping(self, learner: FleetLearner) -> None:
        self._change_stepping(self.engine.now, +1)
        self._plan_step(learner)

    def _plan_step(self, learner: FleetLearner) -> None:
        """Schedule the next boundary, or store the progress of the step if the segment ends first."""
        segment = learner.segment
        now = self.engine.now
        left = learner.remaining_steps
        step_s = self._step_time_s / segment.speed
        if self._jitter and left == 1.0:
            step_s *= max(0.1, 1.0 + learner.jitter.gauss(0.0, self._jitter))
        room = (segment.end_s - now) / step_s - left  # steps after the current one
        if room < 0.0:
            if not segment.loses_step:
                learner.remaining_steps = -room
            return
        steps = self._steps_per_event
        if room < steps - 1:
            steps = 1 + int(room)
        first_s = now + left * step_s
        planned = learner.next_boundary = (first_s, steps, step_s)
        self.engine.schedule(first_s + (steps - 1) * step_s, self._boundary, learner, planned)

    def _shorten_batch(self, learner: FleetLearner) -> None:
        """End the batch of steps at the next boundary, which must answer a message that has arrived."""
        if learner.next_boundary is None or learner.next_boundary[1] == 1:
            return
        first_s, steps, step_s = learner.next_boundary
        started = max(0, math.ceil((self.engine.now - first_s) / step_s - 1e-9))
        if started + 1 < steps:
            planned = learner.next_boundary = (first_s, started + 1, step_s)
            self.engine.schedule(first_s + started * step_s, self._boundary, learner, planned)

    def _boundary(self, learner: FleetLearner, planned: tuple[float, int, float]) -> None:
        if (
            learner.next_boundary is not planned
            or learner.proc is None
            or learner.proc.core.state.mode is LearnerMode.STOPPED
        ):
            return
        _, steps, step_s = planned
        share = learner.segment.share
        learner.next_boundary = None
        learner.remaining_steps = 1.0
        learner.steps += steps
        # Goodput is chip time spent on steps; a step that jitter made longer is still one step of work for all chips.
        learner.useful_chip_s += steps * step_s * share * learner.island.chips
        # The learner measures from boundary to boundary, so a pause of its island counts as part of the delayed step.
        step_time_s = (self.engine.now - learner.step_started_at) / steps
        learner.step_started_at = self.engine.now
        tokens = round(steps * learner.tokens_per_step * share) or 1
        self.driver.handle_event(learner.proc, StepTaken(steps, tokens, step_time_s))
        if self.protocol.lockstep and self._must_wait(learner):
            learner.is_waiting = True
            self._change_stepping(self.engine.now, -1)
        else:
            self._plan_step(learner)

    def _must_wait(self, learner: FleetLearner) -> bool:
        """Return whether a learner must wait in lockstep, where every learner takes part in every round.

        The next round is due H steps after the last copy of a fragment, and no learner is more than tau steps ahead of
        it. One of these steps ends at the boundary that answers the pull.
        """
        assert learner.proc is not None
        core: LearnerCore = learner.proc.core
        if core.state.pulls:
            return False  # the next boundary answers them, so the learner must reach it
        due = self.protocol.every_steps + self.protocol.overlap_steps - 1
        return any(core.state.step - learner.copied.get(p, 0) >= due for p in core.state.fragments)

    def _resume(self, learner: FleetLearner) -> None:
        if learner.is_waiting and learner.segment.is_stepping and not self._must_wait(learner):
            learner.is_waiting = False
            learner.step_started_at = self.engine.now  # waiting for other learners is not part of the step
            self._start_stepping(learner)

    def _change_stepping(self, now: float, change: int) -> None:
        if self.stepping_learners > 0:
            self.up_s += now - self._up_since
        self._up_since = now
        self.stepping_learners += change

    # ---------------------------------------------------------------------------------------------------- effects

    def _on_merge(self, proc: SimProcess, effect: MergeRound) -> None:
        self.merges += 1
        self.contributions += len(effect.contributions)
        self._store.merge(proc, effect)

    def _on_copy(self, proc: SimProcess, effect: CopyFragment) -> None:
        self.learners[proc.actor.learner].copied[effect.round.fragment] = effect.copied_at

    def _on_adopt(self, proc: SimProcess, effect: AdoptFragment) -> None:
        merged = proc.core.state.merged_up_to[effect.fragment] if effect.merged_copy else None
        if merged is not None:
            self.stale_steps += proc.core.state.step - merged.copied_at
            self.stale_count += 1

    def _on_start_training(self, proc: SimProcess, effect: StartTraining) -> None:
        learner = self.learners[proc.actor.learner]
        learner.step_started_at = self.engine.now
        if learner.segment.is_stepping:
            self._start_stepping(learner)

    def _on_arrival(self, proc: SimProcess, event: Event) -> None:
        """Handle a message at the island. Its host receives messages also while its chips are paused."""
        if type(event) is MessageArrived and proc.actor.learner != SYNCER:
            learner = self.learners[proc.actor.learner]
            if type(event.envelope.body) in (Pull, Published):
                self._shorten_batch(learner)
            if learner.is_waiting:
                self._resume(learner)

    # ---------------------------------------------------------------------------------------------------- the result

    def _result(self, syncer: SyncerCore) -> DecoupledResult:
        lines = [syncer.state.ledger.fragment_totals(p) for p in syncer.state.fragments]
        count = len(lines)
        present = [learner.island.present_s(self.horizon_s) for learner in self.learners.values()]
        chip_s = sum(s * learner.island.chips for s, learner in zip(present, self.learners.values(), strict=True))
        steps = sum(learner.steps for learner in self.learners.values())
        tokens = sum(line.trained for line in lines) / count
        nominal = self.fleet.tokens_per_chip_step * chip_s / self.fleet.step_time_s
        mean_steps = steps * self.horizon_s / max(sum(present), 1e-9)  # steps of a learner that is present all the time
        merges = max(self.merges, 1)
        dropped: dict[str, float] = {}
        for line in lines:
            for cause, tokens_lost in line.dropped.items():
                dropped[cause] = dropped.get(cause, 0.0) + tokens_lost / count
        return DecoupledResult(
            goodput=sum(learner.useful_chip_s for learner in self.learners.values()) / chip_s,
            uptime=self.up_s / self.horizon_s,
            throughput=tokens / nominal,
            tokens_trained=tokens,
            tokens_merged=sum(line.merged for line in lines) / count,
            tokens_pending=sum(line.pending for line in lines) / count,
            tokens_dropped=sum(dropped.values(), 0.0),
            merges=self.merges,
            contributions_per_merge=self.contributions / merges,
            effective_h=mean_steps * count / merges,
            staleness_steps=self.stale_steps / max(self.stale_count, 1),
            steps=steps,
            failures=sum(learner.island.failures for learner in self.learners.values()),
            suspected=syncer.state.reason_counts.get("member-suspected", 0),
            events=self.engine.events,
            goodput_by_learner=tuple(
                learner.useful_chip_s / max(s * learner.island.chips, 1e-9)
                for s, learner in zip(present, self.learners.values(), strict=True)
            ),
            dropped_by_reason=tuple(sorted(dropped.items())),
        )


def coarsen(protocol: DecoupledConfig) -> DecoupledConfig:
    """Return the same protocol with coarser events: one sampled fragment, and H / 8 steps per event.

    With jitter every step is different. A learner with a single fragment would also send too little during a pause, so
    the syncer would suspect it. With jitter this function therefore samples an eighth of the fragments. Lockstep needs
    all fragments, because a learner waits for each of them.
    """
    if protocol.lockstep:
        return replace(protocol, sampled_fragments=None, steps_per_event=1)
    if protocol.jitter:
        return replace(protocol, sampled_fragments=max(1, protocol.fragments // 8), steps_per_event=1)
    return replace(protocol, sampled_fragments=1, steps_per_event=max(1, protocol.every_steps // 8))


# --------------------------------------------------------------------------------------------------------------------
# Choose the level of detail. Simulate a short run completely, and only the beginning of a long run
#
# The fleet model (`goodput.simulate`) is cheap and covers the whole run. The protocol cores are expensive, but their
# results (contributions per merge, staleness, effective H) converge within hours.

MAX_FULL_DETAIL_EVENTS = 300_000
"""Limit for a simulation with every fragment and every step; about 2 s of processor time."""

MAX_EVENTS = 1_200_000
"""Limit for a simulation; about 8 s of processor time per seed."""

MAX_TAPE_EVENTS = 400_000
"""Limit for a simulation that writes tapes; about 80 MB."""


def format_hours(hours: float) -> str:
    """Return a duration as text.

    >>> format_hours(720.0), format_hours(36.0), format_hours(1.0), format_hours(0.5)
    ('30 days', '36 hours', '1 hour', '30 minutes')
    """
    size, unit = (24.0, "day") if hours >= 48.0 else (1.0, "hour") if hours >= 1.0 else (1.0 / 60.0, "minute")
    count = f"{hours / size:.3g}"
    return f"{count} {unit}" if count == "1" else f"{count} {unit}s"


@dataclass(frozen=True, slots=True)
class SimulationDetail:
    """Level of detail and length of a simulation of the protocol cores."""

    protocol: DecoupledConfig
    hours: float  # simulated time, from the start of the run
    covers_run: bool  # simulates the whole run
    is_full: bool  # simulates every fragment and every step

    def description(self) -> str:
        """Return a sentence about the simulated time and the level of detail."""
        detail = "with every fragment and every step"
        if not self.is_full:
            count = self.protocol.sampled_fragments or self.protocol.fragments
            detail = f"with {count} of {self.protocol.fragments} fragments"
            if self.protocol.steps_per_event > 1:
                detail += f" and up to {self.protocol.steps_per_event} steps per event"
        part = "all" if self.covers_run else "the first"
        return f"the protocol cores ran {part} {format_hours(self.hours)} {detail}"


def events_per_step(protocol: DecoupledConfig) -> float:
    """Return the events per step of one learner: its boundary, its report and its share of the rounds."""
    fragments = protocol.fragments if protocol.sampled_fragments is None else protocol.sampled_fragments
    return 2.0 / protocol.steps_per_event + 5.0 * fragments / protocol.every_steps


def choose_detail(
    protocol: DecoupledConfig,
    days: float,
    learner_steps_per_s: float,
    *,
    full: bool = False,
    hours: float | None = None,
    max_events: int = MAX_EVENTS,
) -> SimulationDetail:
    """Choose the level of detail and the length of a simulation.

    Args:
        learner_steps_per_s: steps per second, summed over all learners.
        full: simulate every fragment and every step, without a limit on events.
        hours: simulated time; None for as much of the run as `max_events` allow.
        max_events: limit on the events of the simulation.
    """
    if hours is not None and not 0.0 < hours < math.inf:
        raise ValueError(f"the protocol hours are {hours}; give a number above 0")
    all_hours = days * 24.0
    hours_to_run = all_hours if hours is None else min(hours, all_hours)
    steps = hours_to_run * 3_600.0 * learner_steps_per_s
    if not full and steps * events_per_step(protocol) > MAX_FULL_DETAIL_EVENTS:
        protocol = coarsen(protocol)
    if hours is None and not full:
        affordable = max_events / events_per_step(protocol) / learner_steps_per_s / 3_600.0
        if affordable < hours_to_run:
            hours_to_run = math.floor(affordable) if affordable >= 10.0 else affordable
    sampled = protocol.sampled_fragments is not None and protocol.sampled_fragments < protocol.fragments
    return SimulationDetail(
        protocol,
        hours_to_run,
        covers_run=hours_to_run >= all_hours,
        is_full=not sampled and protocol.steps_per_event == 1,
    )
