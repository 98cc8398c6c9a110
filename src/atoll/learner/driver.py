"""The driver of a learner's core: events of all threads go in under one lock, effects come out as actions of the
training thread and as work of the background thread."""

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
"""Events in the outbox. Beyond it the background thread is behind with writing and sending."""

MAX_PENDING_BOUNDARIES = 256
"""Boundaries in a row at which the core may be busy with a message: on a crowded machine the background may stand still
in the middle of one. Steps are told together at the next boundary, and only then copied and adopted."""


class PendingSteps(NamedTuple):
    """Steps that the core has not been told of yet."""

    steps: int
    tokens: int
    samples: int


NO_PENDING_STEPS = PendingSteps(0, 0, 0)


@dataclass(eq=False)
class LearnerDriver:
    """Owns the core of one incarnation, its lock, clock, tape and outbox.

    `handle_event` and `receive_version` take events from any thread. `wait_for_start`, `step` and `poll_while_paused` are step boundaries:
    the training thread calls them and carries out the actions that they return. The background thread carries out the
    effects that `next_effects` returns. `lock` also guards the fragments; it is held for microseconds.
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
    _actions: deque[Action] = field(default_factory=deque)  # of events that the background told of; for a boundary
    _outbox: deque[tuple[Entry, list[LearnerEffect]]] = field(default_factory=deque)
    _promised_states: dict[tuple[int, int], Future[optimizer_state.OptimizerStateCopy]] = field(
        default_factory=dict
    )  # promised
    _peer_state: ReceivedState | None = None  # of a peer, to start from
    _tape_consistent: bool = True  # the newest event is on its way to the tape
    _has_news: bool = False  # something that the core was told of, since the training thread last looked
    _prev_boundary_at: float = 0.0  # of the previous boundary, on the monotonic clock

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self.lock)  # actions for the training thread, while it joins or rests

    # ------------------------------------------------------------------------------------------------ from any thread

    def handle_event(self, event: LearnerEvent) -> None:
        """Handle an event. What it asks of the training thread waits for the next boundary."""
        with self._changed:
            self._actions.extend(self._handle(event))
            self._changed.notify_all()

    def receive_version(
        self, envelope: Envelope, fragment: FragmentTensors, version: Version, value: Buffer | None
    ) -> bool:
        """Handle a publish message. `value`: of a new version that all ranks have; it becomes the fragment's if the
        core accepts the message. Return whether it did."""
        with self._changed:
            is_accepted = value is not None and self.core.hears(envelope)
            if value is not None and is_accepted:
                fragment.set_newest(version, value)
            self._actions.extend(self._handle(MessageArrived(envelope)))
            self._changed.notify_all()
            return is_accepted

    def due_in(self) -> float | None:
        """Seconds until the core wants to be told of the time."""
        with self.lock:
            deadline = self.core.next_deadline()
        return deadline - self._clock.now() if deadline is not None else None

    def is_joining(self) -> bool:
        with self.lock:
            return self.core.state.mode is LearnerMode.JOINING

    # ------------------------------------------------------------------------------------------ in the training thread

    def wait_for_start(self, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions before the first step, and whether the run is paused. If there are no actions, call
        `before_wait` and wait up to 0.2 s."""
        with self._changed:
            if not self._actions:
                before_wait()
                self._changed.wait(0.2)
            return [self._with_initial_state(action) for action in self._pop_actions()], self.core.state.is_standing_by

    def step(self, tokens: int, samples: int, begin: float, rank_level: int) -> tuple[float | None, list[Action], bool]:
        """Return how long this call waited for the lock, the actions of this boundary, and whether the learner rests.

        If the background thread is busy, return None and no actions: the core is told at the next boundary. `rank_level`
        is the highest `Preemption.level` of the other ranks.
        """
        before = self.pending
        self.pending = pending = PendingSteps(before.steps + 1, before.tokens + tokens, before.samples + samples)
        leaves = self._preemption.is_received or rank_level
        if len(self._outbox) > MAX_OUTBOX_EVENTS and pending.steps <= MAX_PENDING_BOUNDARIES and not leaves:
            return None, [], False  # steps of microseconds: several are told at once, or it would never catch up
        waited_s = 0.0
        if not self.lock.acquire(blocking=False):
            # The background has it, and waits for its turn on this machine, perhaps. This thread does not wait.
            if pending.steps <= MAX_PENDING_BOUNDARIES and not leaves:
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
            # Copying and adopting are this learner's own work; only what it waited for the lock is somebody else's.
            self._prev_boundary_at = begin + waited_s
            return waited_s, actions, self.core.state.is_standing_by
        finally:
            self.lock.release()

    def poll_while_paused(self, rank_level: int, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions that are due while the learner rests, and whether it still rests. If no event has arrived,
        call `before_wait` and wait up to 0.2 s."""
        core = self.core
        with self._changed:
            if core.state.is_standing_by and not self._has_news and not core.leaving.can_answer():
                before_wait()
                self._changed.wait(0.2)
            came, self._has_news = self._has_news, False
            actions = self._pop_actions()
            due = (came and core.has_boundary_work) or core.leaving.can_answer()
            if core.training and (due or not core.state.is_standing_by):
                self._prev_boundary_at = time.monotonic()  # the next step begins here
                actions += self._handle(StepTaken(0, 0, 0.0), at=self._prev_boundary_at)
            actions += self._handle_preemption(rank_level)
            return actions, core.state.is_standing_by

    def flush_steps(self, rank_level: int) -> None:
        """Tell the core of the last steps and of a notice, after the loop. `poll_while_paused` returns the actions."""
        with self._changed:
            now, (steps, tokens, samples) = time.monotonic(), self.pending
            self.pending = NO_PENDING_STEPS
            if steps:
                took_s = max(0.0, now - self._prev_boundary_at) / steps
                self._actions += self._handle(StepTaken(steps, tokens, took_s, samples), at=now)
            self._actions += self._handle_preemption(rank_level)

    def release_lock(self) -> None:
        """Release the lock where an interrupt has left it locked."""
        with contextlib.suppress(RuntimeError):  # until it is not ours any more
            while True:
                self.lock.release()

    def is_tape_consistent(self) -> bool:
        """Return whether every event of the core is on its way to the tape."""
        with self.lock:
            return self._tape_consistent

    def close(self) -> None:
        """Close the tape and drop what was not sent, after the background thread has detached or stopped."""
        self._outbox.clear()
        self._promised_states.clear()
        self._peer_state = None
        self._tape.close()

    # ---------------------------------------------------------------------------------------- in the background thread

    def next_effects(self) -> list[LearnerEffect] | None:
        """Write the oldest event to the tape and return its effects, or None if the outbox is empty. The tape comes
        first: what others see has its cause on the tape."""
        if not self._outbox:
            return None
        entry, effects = self._outbox.popleft()
        self._tape.write(entry)
        return effects

    def pop_promised_state(self, envelope: Envelope) -> Future[optimizer_state.OptimizerStateCopy]:
        """Return the copy of inner state that this message announces, which a step boundary makes."""
        return self._promised_states.pop(state_key(envelope))

    def store_peer_state(self, given: ReceivedState) -> None:
        """Keep a peer's inner state, before the core is told of it: training starts from the first one."""
        if self._peer_state is None:
            self._peer_state = given

    # --------------------------------------------------------------------------------------------- with the lock held

    def _handle(self, event: LearnerEvent, at: float | None = None) -> list[Action]:
        """Effects go to the background in the order of the events, whoever told of them."""
        with self._signals:
            moment = at if at is not None else time.monotonic()
            now = self._clock.from_monotonic(moment)
            self._tape_consistent = False  # whatever is raised in between leaves the core ahead of its tape
            effects = self.core.handle(now, event)
            actor = Actor(self.core.state.id, self.core.state.incarnation)
            entry = Entry(now, actor, self.core.state.tick, event, tuple(effects))
            actions = [action for effect in effects if (action := self._make_action(effect)) is not None]
            starts = any(type(action) is StartAction for action in actions)
            if starts:
                self._prev_boundary_at = moment  # the first step begins here
            if starts or type(event) is StepTaken:
                self._status.progress = self.core.state.progress
            self._has_news = self._has_news or type(event) is not StepTaken
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
                taken = self._part_writer.begin_part(self.core.state.part)
                return SavePartAction(effect, taken) if taken is not None else None
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
        """What training starts with is decided before all ranks are told that it does."""
        if type(action) is not StartAction:
            return action
        given, self._peer_state = self._peer_state, None
        saved = self._part_writer.pop_saved_state()
        return StartAction(
            action.effect, self.boundary.make_initial_state(action.effect, given, saved, self.core.state.id, self._log)
        )

    def _handle_preemption(self, rank_level: int) -> list[Action]:
        """Tell the core of a notice, at a step boundary."""
        self._preemption.merge_rank_level(rank_level)
        return [action for wish in self._preemption.leave_requests(self.core) for action in self._handle(wish)]
