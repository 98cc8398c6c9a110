"""The rank of a learner that runs the protocol: the only rank, or rank 0 of several. It joins, steps, pauses and leaves
in the training thread, and executes the actions of each step boundary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.core.learner.core import LearnerCore
from atoll.core.ledger import SampleCursor, StepSamples
from atoll.core.protocol import LeaveRequested, Started, Stop
from atoll.errors import AtollError, JoinTimeoutError, LearnerRefusedError
from atoll.island.boundary import (
    DRAINED_REASONS,
    Action,
    AdoptAction,
    CopyAction,
    CopyStateAction,
    SavePartAction,
    SingleRankIsland,
    StartAction,
    StepBoundary,
    StopAction,
)
from atoll.island.fragments import FragmentTensors, plan_for_run
from atoll.island.rank_connection import BoundaryStatus, RankRequest
from atoll.island.stats import LearnerStats, LearnerStatus
from atoll.learner.background import BackgroundThread
from atoll.learner.driver import NO_PENDING_STEPS, LearnerDriver
from atoll.learner.part_writer import PartWriter
from atoll.learner.preemption import DeferredSignals, Preemption
from atoll.logs import ContextLogger
from atoll.store.learner_parts import set_rng_states
from atoll.store.run_settings import RunClock, new_run_advice
from atoll.tape.files import TapeSink, new_header, tape_path
from atoll.tape.format import Actor
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import get_codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import find_nonfinite_in_model

MAX_REJOINS = 5
FOREIGN_RUN_REFUSALS = frozenset({"refused-run", "refused-fingerprint"})


@dataclass(eq=False)
class LeadingRank:
    """Rank that runs the protocol. Only `stats` may be called outside of the training thread.

    Replace `island` before `join` if there are several ranks.
    """

    _model: nn.Module
    _optimizers: Optimizers
    _background: BackgroundThread
    _status: LearnerStatus
    _signals: DeferredSignals
    _preemption: Preemption
    _log: ContextLogger
    learner: int | None  # requested number
    run_directory: Path | None
    join_timeout_s: float | None
    extra_state: Callable[[], Any] | None
    island: SingleRankIsland = field(default_factory=SingleRankIsland)
    driver: LearnerDriver | None = None  # driver of the newest incarnation
    _join_by: float | None = None  # deadline on the monotonic clock
    _clock: RunClock = field(default_factory=lambda: RunClock(time.time()))
    _boundary: StepBoundary | None = None
    _stop: Stop | None = None
    _sample_cursor: SampleCursor | None = None
    _fresh_samples: int = 0  # samples taken for the current step
    _is_repeating: bool = False  # the current step repeats samples because no lease is left
    _repeated_steps: int = 0
    _training_started_at: float = 0.0
    _boundary_s: float = 0.0
    _lock_wait_s: float = 0.0
    _adopted: int = 0
    _contributed: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether this rank is or was a learner of the run, so that steps can be reported."""
        return self.driver is not None

    @property
    def steps(self) -> int:
        return self.driver.core.state.step + self.driver.pending.steps if self.driver is not None else 0

    @property
    def fragments(self) -> Sequence[FragmentTensors]:
        return self._boundary.fragments if self._boundary is not None else []

    def stats(self) -> LearnerStats:
        """Return the counters of this rank. May be called from any thread."""
        fragments = self.fragments
        driver, link = self.driver, self._background.link
        core, pending = (driver.core, driver.pending) if driver is not None else (None, NO_PENDING_STEPS)
        return LearnerStats(
            steps=core.state.step + pending.steps if core is not None else 0,
            tokens=core.state.trained + pending.tokens if core is not None else 0,
            bytes_up=link.bytes_up,
            bytes_down=link.bytes_down,
            boundary_s=self._boundary_s,
            lock_wait_s=self._lock_wait_s,
            training_s=time.monotonic() - self._training_started_at if self._training_started_at else 0.0,
            adopted=self._adopted,
            contributed=self._contributed,
            link=core.state.link.value if core is not None else "down",
            samples=core.state.consumed_samples + pending.samples if core is not None else 0,
            repeated_steps=self._repeated_steps,
            paused_s=self._status.paused_s,
            rank_wait_s=self.island.waited_s,
            host_bytes=sum(fragment.host_bytes for fragment in fragments),
            device_bytes=max((fragment.device_bytes for fragment in fragments), default=0),
            parameters=fragments[0].parameters if fragments else 0,
            transfer_mode=self.island.transfer_mode,
            unmerged_tokens=core.leaving.unmerged_tokens() if core is not None else 0,
        )

    # ---------------------------------------------------------------------------------------------------- joining

    def join(self) -> None:
        if self.join_timeout_s is not None:
            self._join_by = time.monotonic() + self.join_timeout_s
        self._background.start()
        self._background.on_wait = lambda: self.island.broadcast([])
        self._join()
        self._background.on_wait = None

    def _join(self) -> None:
        settings = self._background.fetch_settings(self.learner, self._join_by)
        self.island.broadcast([["settings", settings.to_json()]])
        plan = plan_for_run(self._model, settings)
        view = self.island.make_view(self._model, plan)
        optimizer_state.named_optimized_parameters(
            self._optimizers, self._model
        )  # raises for another model's optimizer
        while not self._background.is_founded:
            self._background.upload_model(plan, view, self._join_by)
            settings = self._background.fetch_settings(self.learner, self._join_by)
        self._status.settings = settings
        self._clock = RunClock(settings.founded_at)
        for _ in range(MAX_REJOINS):
            if self._start(plan, view):
                return
        raise LearnerRefusedError(
            f"refused {MAX_REJOINS} times as learner {self.learner}: {self.run_directory} contains tapes"
            " of other processes with these numbers, or the syncer has marked them as lost;"
            " pass another number, or another run directory"
        )

    def _start(self, plan: FragmentPlan, view: ModelView) -> bool:
        """Start one incarnation, up to its first step. Return False if its number is used and another one is needed."""
        settings = self._status.settings
        learner, incarnation = self._background.request_number(self.learner, self._join_by)
        self.learner = learner
        self._log.fields |= {"run": settings.config.run_id, "learner": learner, "incarnation": incarnation}
        actor = Actor(learner, incarnation)
        if self.run_directory is not None and tape_path(self.run_directory, actor).exists():
            return False  # used by an earlier process: it and the syncer were killed before the syncer admitted it
        config = replace(settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
        codec = get_codec(settings.numerics.upload_codecs[0])
        fragments = [self.island.make_fragment(view, p, codec) for p in range(len(plan.fragments))]
        self._sample_cursor = SampleCursor(config.lease_samples) if config.lease_samples else None
        self._status.identity = (learner, incarnation)
        boundary_args = self._model, self._optimizers, fragments, config.blend_alpha, self.extra_state
        self._boundary = boundary = self.island.make_boundary(*boundary_args, settings.config.warmup_steps)
        self.island.broadcast([["attach", learner, incarnation, self.island.generation, config.blend_alpha]])
        tape = TapeSink(self.run_directory, new_header(actor, config), self._log)
        parts = PartWriter(self.run_directory, config, learner, incarnation, self._background.handle_event, self._log)
        driver_args = LearnerCore(config, learner, incarnation), boundary, self._clock, tape, parts
        self.driver = driver = LearnerDriver(*driver_args, self._signals, self._preemption, self._status, self._log)
        self._background.attach(driver, parts, self.run_directory, self.stats)
        driver.handle_event(Started())
        self._background.wake()
        is_paused = self._wait_for_start(driver)
        if self._stop is not None:
            return self._handle_join_refused(driver, self._stop)
        self._training_started_at = time.monotonic()
        if is_paused:
            self._wait_while_paused(driver)
        return True

    def _wait_for_start(self, driver: LearnerDriver) -> bool:
        """Execute actions until training starts or ends. Return whether the run is paused then."""

        def before_wait() -> None:
            if self._join_by is not None and time.monotonic() >= self._join_by:
                raise JoinTimeoutError(f"could not join within join_timeout_s: {driver.core.state.reason}")
            self._background.check()

        while True:
            actions, is_paused = driver.wait_for_start(before_wait)
            self.island.gather_requests(RankRequest.JOIN)
            actions = self.island.broadcast_actions(actions, BoundaryStatus(is_paused=is_paused))
            if actions and self._execute(driver, actions):
                return is_paused

    def _handle_join_refused(self, driver: LearnerDriver, stop: Stop) -> bool:
        core = driver.core
        if self._status.finished:
            return True  # the run ended during the join, and the final versions were adopted
        self._background.detach()
        driver.close()
        if core.state.refused_incarnation is not None and "refused-incarnation" not in core.state.reason_counts:
            # The syncer has marked this incarnation as lost: join with a new number. An incarnation that was replaced
            # must not take a new number: it would evict the process that was started after it.
            self._stop = None
            return False
        if "refused-finished" not in core.state.reason_counts:
            self.driver = None  # it never was a learner of this run
            if self.run_directory is not None and not FOREIGN_RUN_REFUSALS.isdisjoint(core.state.reason_counts):
                # The directory must not contain a tape of another model or run.
                tape_path(self.run_directory, Actor(core.state.id, core.state.incarnation)).unlink(missing_ok=True)
            is_other_model = "refused-fingerprint" in core.state.reason_counts
            hint = f"; {new_run_advice(self._background.syncer_directory)}" if is_other_model else ""
            raise LearnerRefusedError(f"{stop.reason}{hint}")
        self._log.info("the run is over; downloading the final model")
        self._background.download_final(driver.boundary.fragments, self._join_by)
        self.island.broadcast([["final", [fragment.newest_version for fragment in driver.boundary.fragments]]])
        driver.boundary.write_anchors()
        self._status.finished = True
        return True

    # ---------------------------------------------------------------------------------------------------- training

    def take(self, requested: int) -> tuple[int, ...]:
        driver = self.driver
        assert driver is not None and self._sample_cursor is not None
        config, count = driver.core.state.config, self.island.gather_requests(RankRequest.TAKE, requested)
        if count > config.lease_samples * config.leases_ahead:
            raise ValueError(
                f"a step of {count} samples needs more than the {config.leases_ahead} leases of {config.lease_samples}"
                f" samples that a learner may hold: take fewer, or start a new run with `atoll syncer --batch {count}`"
            )
        if self._is_repeating and driver.pending.steps:
            # Several steps are reported to the core together, with their new samples first.
            taken = StepSamples(self._sample_cursor.repeat(count), 0)
        else:
            taken = self._sample_cursor.next(driver.core.state.leases, count)
        self._fresh_samples += taken.fresh
        self._is_repeating = taken.fresh < count
        self._repeated_steps += self._is_repeating
        return self.island.scatter_samples(taken.numbers)

    def step(self, tokens: int, loss: float | Tensor | None) -> None:
        """Count a step and execute the actions that are due, as the leader of the ranks or as the only rank."""
        driver = self.driver
        assert driver is not None
        self._check_background()
        self._background.last_loss = loss
        tokens = self.island.gather_requests(RankRequest.STEP, tokens)
        samples, self._fresh_samples = self._fresh_samples, 0
        begin = time.monotonic()
        waited_s, actions, is_paused = driver.step(tokens, samples, begin, self.island.preemption_level)
        try:
            self._execute(driver, self.island.broadcast_actions(actions, self._boundary_status(driver, is_paused)))
        finally:
            self._background.wake()  # not earlier: it would take the GIL between the copies
        self._boundary_s += time.monotonic() - begin
        if waited_s is not None:
            self._lock_wait_s += waited_s
        if is_paused and not self._status.finished:
            self._wait_while_paused(driver)

    def _boundary_status(self, driver: LearnerDriver, is_paused: bool) -> BoundaryStatus:
        """Return the status that the other ranks of this island receive at every boundary."""
        core, link = driver.core, self._background.link
        counters = core.state.step, core.state.trained, link.bytes_up, link.bytes_down, core.state.consumed_samples
        return BoundaryStatus(is_paused, self._status.progress, *counters)

    def _execute(self, driver: LearnerDriver, actions: list[Action]) -> bool:
        """Execute the actions before the next step. Return True if one of them starts or ends training."""
        boundary, has_changed_mode = driver.boundary, False
        if actions:
            boundary.prepare_actions()
        for action in actions:
            match action:
                case CopyAction():
                    boundary.fragments[action.effect.round.fragment].copy(action.copied)
                    self._contributed += 1
                case AdoptAction():
                    boundary.adopt(action)
                    self._adopted += 1
                case CopyStateAction():
                    boundary.copy_state(action)
                case SavePartAction():
                    boundary.save_part(action)
                case StartAction():
                    self._start_training(action)
                    has_changed_mode = True
                case StopAction():
                    self._stop_training(driver, action.effect)
                    has_changed_mode = True
        return has_changed_mode

    def _start_training(self, start: StartAction) -> None:
        assert start.initial is not None
        self._status.warmup_steps = start.initial.warmup_steps
        if start.initial.prepared is not None:
            start.initial.prepared.install()
        if start.initial.part is not None:
            set_rng_states(start.initial.part.rng_states(0))
            self._status.restored_state = start.initial.restored
        state = f": {start.initial.prepared}" if start.initial.prepared is not None else ""
        self._log.info("training starts: %s%s", start.effect.state_source, state)

    def _stop_training(self, driver: LearnerDriver, stop: Stop) -> None:
        self._stop = stop
        self._log.info("%s", stop.reason)
        if stop.reason.code == "learner-finished":
            driver.boundary.write_anchors()
            self._status.finished = True
        elif stop.reason.code in DRAINED_REASONS:
            self._status.finished = self._status.drained = True
            self._preemption.log_unmerged(driver.core)
        elif self._training_started_at:
            problem = (
                find_nonfinite_in_model(self._model) if "refused-quarantined" in driver.core.state.reason_counts else ""
            )
            raise LearnerRefusedError(f"{stop.reason}{problem and f'; the model of this process holds {problem}'}")

    def _wait_while_paused(self, driver: LearnerDriver) -> None:
        """Wait at this boundary until the run is resumed or ends, or this learner may leave.

        Messages that arrive meanwhile are handled as at any boundary: the learner replies, adopts, and saves its part.
        """
        paused_at, is_paused = time.monotonic(), True
        try:
            while is_paused and not self._status.finished:
                actions, is_paused = driver.poll_while_paused(self.island.preemption_level, self._check_background)
                self.island.gather_requests(RankRequest.PAUSE)
                try:
                    self._execute(
                        driver, self.island.broadcast_actions(actions, self._boundary_status(driver, is_paused))
                    )
                finally:
                    self._background.wake()
        finally:
            self._status.paused_s += time.monotonic() - paused_at

    def _check_background(self) -> None:
        self._background.check()
        self._background.check_disconnected()

    # ---------------------------------------------------------------------------------------------------- leaving

    def close(self, error: BaseException | type[BaseException] | None) -> None:
        """Leave the run, unless it is over. All threads are stopped, even after an error."""
        self._log_memory()
        close_error: BaseException | None = None
        if error is None:
            try:
                self.island.gather_requests(RankRequest.CLOSE)
                if self._needs_drain():
                    self.island.pause_ranks()
                    self._drain_after_loop()
                    self.island.gather_requests(RankRequest.CLOSE)
            except (AtollError, KeyboardInterrupt) as caught:
                close_error = error = caught
        if error is not None:
            self.island.fail(error)
        driver, status = self.driver, self._status
        try:
            if driver is not None:
                driver.release_lock()
                self._send_leave(driver, error)
            if status.finished and not status.drained and error is None and self._boundary is not None:
                self._boundary.prepare_actions()
                self._boundary.write_anchors()  # a loop that checks `finished` after its step took one step too many
        finally:
            self._background.on_wait = None
            try:
                self._background.stop(self._preemption.goodbye_timeout_s())
            finally:
                if driver is not None:
                    driver.close()
            if error is None:
                self.island.close()
        if close_error is not None and not (status.finished and isinstance(close_error, AtollError)):
            raise close_error

    def _send_leave(self, driver: LearnerDriver, error: BaseException | type[BaseException] | None) -> None:
        can_send = self._background.driver is driver and driver.is_tape_consistent()
        if can_send and not self._status.finished and self._stop is None:
            kind = error if error is None or isinstance(error, type) else type(error)
            cause = "its loop ended" if kind is None else f"its loop ended with {kind.__name__}"
            driver.handle_event(LeaveRequested(cause))

    def _needs_drain(self) -> bool:
        """Return whether the loop ended after a preemption notice, but before a boundary at which it was drained."""
        has_notice = self._preemption.is_received or self.island.preemption_level
        is_training = self.driver is not None and self.driver.core.training
        return bool(has_notice and is_training and self._training_started_at and not self._status.finished)

    def _drain_after_loop(self) -> None:
        assert self.driver is not None
        self.driver.flush_steps(self.island.preemption_level)
        self._wait_while_paused(self.driver)

    def _log_memory(self) -> None:
        stats = self.stats()
        if stats.parameters:
            host, device = stats.host_bytes / stats.parameters, stats.device_bytes / stats.parameters
            self._log.info("Atoll's memory per parameter: %.1f bytes on the host, %.1f on the device", host, device)
