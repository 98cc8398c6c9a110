"""The driver of a learner's core. All threads pass events to it under one lock. Effects become actions of the training
thread and work of the background thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    AdoptFragment,
    CopyFragment,
    Effect,
    Envelope,
    LearnerEffect,
    LearnerEvent,
    MessageArrived,
    OptimizerState,
    SaveSnapshot,
    Send,
    StartTraining,
    StepTaken,
    Stop,
)
from atoll.core.states import LearnerMode
from atoll.core.types import Version
from atoll.island.boundary import (
    Action,
    AdoptAction,
    CopyAction,
    CopyStateAction,
    ReceivedState,
    SavePartAction,
    StartAction,
    StepBoundary,
    StopAction,
    state_key,
)
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.island.stats import LearnerStatus
from atoll.learner.part_writer import PartWriter
from atoll.learner.preemption import DeferredSignals, Preemption
from atoll.store.run_settings import RunClock
from atoll.tape.files import TapeSink
from atoll.tape.format import Actor, Entry
from atoll.tensors import optimizer_state

MAX_OUTBOX_EVENTS = 256
"""Number of events in the outbox above which steps are batched, so that the background thread can catch up."""

MAX_PENDING_BOUNDARIES = 256
"""Maximum number of consecutive boundaries that do not wait for the lock of the core. On a busy machine the background
thread may be descheduled while it holds the lock. Its steps are reported together at the next boundary."""


class PendingSteps(NamedTuple):
    """Steps that were not reported to the core yet."""

    steps: int
    tokens: int
    samples: int


NO_PENDING_STEPS = PendingSteps(0, 0, 0)


@dataclass(eq=False)
class LearnerDriver:
    """Owner of the core of one incarnation, with its lock, clock, tape and outbox.

    `handle_event` and `receive_version` take events from any thread. `wait_for_start`, `step` and `poll_while_paused`
    are step boundaries: the training thread calls them and executes the actions that they return. The background thread
    executes the effects that `next_effects` returns. `lock` also guards the fragments. It is held for microseconds.
    """

    core: LearnerCore
    boundary: StepBoundary
    _clock: RunClock
    _tape: TapeSink
    _part_writer: PartWriter
    _signals: DeferredSignals
    _preemption: Preemption
    _status: LearnerStatus
    _log: logging.Logger
    lock: threading.RLock = field(default_factory=threading.RLock)  # has an owner: see `release_lock`
    pending: PendingSteps = NO_PENDING_STEPS
    _actions: deque[Action] = field(default_factory=deque)  # for the next boundary
    _outbox: deque[tuple[Entry, list[LearnerEffect]]] = field(default_factory=deque)
    _promised_states: dict[tuple[int, int], Future[optimizer_state.OptimizerStateCopy]] = field(default_factory=dict)
    _peer_state: ReceivedState | None = None  # a peer's optimizer state, to start from
    _tape_consistent: bool = True  # the newest event is in the outbox
    _has_new_event: bool = False  # an event was handled since the last poll of the training thread
    _prev_boundary_at: float = 0.0  # time of the previous boundary, on the monotonic clock

    def __post_init__(self) -> None:
        # Signals new actions to the training thread while it joins or is paused.
        self._changed = threading.Condition(self.lock)

    # ------------------------------------------------------------------------------------------------ from any thread

    def handle_event(self, event: LearnerEvent) -> None:
        """Handle an event. Its actions for the training thread wait for the next boundary."""
        with self._changed:
            self._actions.extend(self._handle(event))
            self._changed.notify_all()

    def receive_version(
        self, envelope: Envelope, fragment: FragmentTensors, version: Version, value: Buffer | None
    ) -> bool:
        """Handle a publish message. Return whether the core accepts it.

        Args:
            value: the value of a new version, of which all ranks have their rows. If the core accepts the message, the
                fragment takes the value over.
        """
        with self._changed:
            is_accepted = value is not None and self.core.is_current(envelope)
            if value is not None and is_accepted:
                fragment.set_newest(version, value)
            self._actions.extend(self._handle(MessageArrived(envelope)))
            self._changed.notify_all()
            return is_accepted

    def due_in(self) -> float | None:
        """Return the seconds until the next deadline of the core."""
        with self.lock:
            deadline = self.core.next_deadline()
        return deadline - self._clock.now() if deadline is not None else None

    def is_joining(self) -> bool:
        with self.lock:
            return self.core.state.mode is LearnerMode.JOINING

    # ------------------------------------------------------------------------------------------ in the training thread

    def wait_for_start(self, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions before the first step, and whether the run is paused.

        If there are no actions, call `before_wait` and wait up to 0.2 s.
        """
        with self._changed:
            if not self._actions:
                before_wait()
                self._changed.wait(0.2)
            return [self._with_initial_state(action) for action in self._pop_actions()], self.core.state.is_standing_by

    def step(self, tokens: int, samples: int, begin: float, rank_level: int) -> tuple[float | None, list[Action], bool]:
        """Report a step. Return the seconds of waiting for the lock, the actions, and whether the learner is paused.

        If the background thread is busy, return None and no actions, and report the step at the next boundary.
        `rank_level` is the highest `Preemption.level` of the other ranks.
        """
        before = self.pending
        self.pending = pending = PendingSteps(before.steps + 1, before.tokens + tokens, before.samples + samples)
        is_leaving = self._preemption.is_received or rank_level
        if len(self._outbox) > MAX_OUTBOX_EVENTS and pending.steps <= MAX_PENDING_BOUNDARIES and not is_leaving:
            return None, [], False  # very short steps: report several at once
        waited_s = 0.0
        if not self.lock.acquire(blocking=False):
            # The background thread has the lock and may be descheduled. The training thread does not wait for it.
            if pending.steps <= MAX_PENDING_BOUNDARIES and not is_leaving:
                return None, [], False
            self.lock.acquire()
            waited_s = time.monotonic() - begin
        try:
            actions = self._pop_actions()
            if self.core.training:
                step_time_s = max(0.0, begin - self._prev_boundary_at) / pending.steps
                event = StepTaken(pending.steps, pending.tokens, step_time_s, pending.samples)
                actions += self._handle(event, at=begin)
            self.pending = NO_PENDING_STEPS
            actions += self._handle_preemption(rank_level)
            # Copying and adopting count as this learner's step time; waiting for the lock does not.
            self._prev_boundary_at = begin + waited_s
            return waited_s, actions, self.core.state.is_standing_by
        finally:
            self.lock.release()

    def poll_while_paused(self, rank_level: int, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions that are due while the learner is paused, and whether it is still paused.

        If no event has arrived, call `before_wait` and wait up to 0.2 s.
        """
        core = self.core
        with self._changed:
            if core.state.is_standing_by and not self._has_new_event and not core.leaving.can_answer():
                before_wait()
                self._changed.wait(0.2)
            has_news, self._has_new_event = self._has_new_event, False
            actions = self._pop_actions()
            is_due = (has_news and core.has_boundary_work) or core.leaving.can_answer()
            if core.training and (is_due or not core.state.is_standing_by):
                self._prev_boundary_at = time.monotonic()  # the next step begins here
                actions += self._handle(StepTaken(0, 0, 0.0), at=self._prev_boundary_at)
            actions += self._handle_preemption(rank_level)
            return actions, core.state.is_standing_by

    def flush_steps(self, rank_level: int) -> None:
        """Report the last steps and a preemption after the loop. `poll_while_paused` returns the actions."""
        with self._changed:
            now, (steps, tokens, samples) = time.monotonic(), self.pending
            self.pending = NO_PENDING_STEPS
            if steps:
                step_time_s = max(0.0, now - self._prev_boundary_at) / steps
                self._actions += self._handle(StepTaken(steps, tokens, step_time_s, samples), at=now)
            self._actions += self._handle_preemption(rank_level)

    def release_lock(self) -> None:
        """Release the lock after an interrupt that has left it locked."""
        with contextlib.suppress(RuntimeError):  # raised when this thread does not have it any more
            while True:
                self.lock.release()

    def is_tape_consistent(self) -> bool:
        """Return whether every event of the core is in the outbox or on the tape."""
        with self.lock:
            return self._tape_consistent

    def close(self) -> None:
        """Close the tape and drop what was not sent. The background thread must have detached or stopped."""
        self._outbox.clear()
        self._promised_states.clear()
        self._peer_state = None
        self._tape.close()

    # ---------------------------------------------------------------------------------------- in the background thread

    def next_effects(self) -> list[LearnerEffect] | None:
        """Write the oldest event to the tape and return its effects, or None if the outbox is empty.

        The tape is written first, so that it contains the cause of every effect that other processes observe.
        """
        if not self._outbox:
            return None
        entry, effects = self._outbox.popleft()
        self._tape.write(entry)
        return effects

    def pop_promised_state(self, envelope: Envelope) -> Future[optimizer_state.OptimizerStateCopy]:
        """Return the copy of optimizer state that this message announces. A step boundary makes it."""
        return self._promised_states.pop(state_key(envelope))

    def store_peer_state(self, state: ReceivedState) -> None:
        """Store a peer's optimizer state before the core handles its arrival. Training starts from the first one."""
        if self._peer_state is None:
            self._peer_state = state

    # --------------------------------------------------------------------------------------------- with the lock held

    def _handle(self, event: LearnerEvent, at: float | None = None) -> list[Action]:
        """Handle an event. Effects reach the background thread in the order of the events of all threads."""
        with self._signals:
            moment = at if at is not None else time.monotonic()
            now = self._clock.from_monotonic(moment)
            self._tape_consistent = False  # an exception below leaves the core ahead of its tape
            effects = self.core.handle(now, event)
            actor = Actor(self.core.state.id, self.core.state.incarnation)
            entry = Entry(now, actor, self.core.state.tick, event, tuple(effects))
            actions = [action for effect in effects if (action := self._make_action(effect)) is not None]
            starts = any(type(action) is StartAction for action in actions)
            if starts:
                self._prev_boundary_at = moment  # the first step begins here
            if starts or type(event) is StepTaken:
                self._status.progress = self.core.state.progress
            self._has_new_event = self._has_new_event or type(event) is not StepTaken
            self._outbox.append((entry, effects))
            self._tape_consistent = True
            return actions

    def _pop_actions(self) -> list[Action]:
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _make_action(self, effect: Effect) -> Action | None:
        match effect:
            case CopyFragment():
                fragment = self.boundary.fragments[effect.round.fragment]
                return CopyAction(effect, fragment.prepare_copy(effect.round, effect.codec))
            case AdoptFragment():
                value, reference = self.boundary.fragments[effect.fragment].prepare_adoption(effect.merged_copy)
                return AdoptAction(effect, value, reference)
            case SaveSnapshot():
                assert self.core.state.part is not None
                copied = self._part_writer.begin_part(self.core.state.part)
                return SavePartAction(effect, copied) if copied is not None else None
            case StartTraining():
                return StartAction(effect)
            case Stop():
                return StopAction(effect)
            case Send() if type(effect.envelope.body) is OptimizerState:
                return CopyStateAction(
                    effect.envelope, self._promised_states.setdefault(state_key(effect.envelope), Future())
                )
        return None

    def _with_initial_state(self, action: Action) -> Action:
        """Add the initial state to a StartAction: it is chosen before the action is broadcast to all ranks."""
        if type(action) is not StartAction:
            return action
        received, self._peer_state = self._peer_state, None
        saved = self._part_writer.pop_saved_state()
        initial = self.boundary.make_initial_state(action.effect, received, saved, self.core.state.id, self._log)
        return StartAction(action.effect, initial)

    def _handle_preemption(self, rank_level: int) -> list[Action]:
        """Pass a preemption to the core, at a step boundary."""
        self._preemption.merge_rank_level(rank_level)
        return [action for event in self._preemption.leave_requests(self.core) for action in self._handle(event)]
