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
    InnerState,
    LearnerEffect,
    LearnerEvent,
    MessageArrived,
    SaveSnapshot,
    Send,
    StartTraining,
    StepTaken,
    Stop,
)
from atoll.core.states import Mode
from atoll.core.types import Version
from atoll.island.boundary import Action, Adopt, CopyAction, End, Give, Given, Save, Start, StepBoundary, state_key
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.island.stats import LearnerStatus
from atoll.learner.part_writer import PartKeeper
from atoll.learner.preemption import Interrupts, Notice
from atoll.store.run_settings import RunClock
from atoll.tape.files import TapeKeeper
from atoll.tape.format import Actor, Entry
from atoll.tensors import optimizer_state

MOST_POSTED = 256
"""Events in the outbox. Beyond it the background thread is behind with writing and sending."""

MOST_UNTOLD = 256
"""Boundaries in a row at which the core may be busy with a message: on a crowded machine the background may stand still
in the middle of one. Steps are told together at the next boundary, and only then copied and adopted."""


class Untold(NamedTuple):
    """Steps that the core has not been told of yet."""

    steps: int
    tokens: int
    samples: int


NOTHING_UNTOLD = Untold(0, 0, 0)


@dataclass(eq=False)
class LearnerDriver:
    """Owns the core of one incarnation, its lock, clock, tape and outbox.

    `tell` and `receive_version` take events from any thread. `wait_for_start`, `step` and `rest` are step boundaries:
    the training thread calls them and carries out the actions that they return. The background thread carries out the
    effects that `next_effects` returns. `lock` also guards the fragments; it is held for microseconds.
    """

    core: LearnerCore
    boundary: StepBoundary
    _clock: RunClock
    _tape: TapeKeeper
    _parts: PartKeeper
    _interrupts: Interrupts
    _notice: Notice
    _status: LearnerStatus
    _log: logging.Logger
    lock: threading.RLock = field(default_factory=threading.RLock)  # has an owner: see `release_lock`
    untold: Untold = NOTHING_UNTOLD
    _actions: deque[Action] = field(default_factory=deque)  # of events that the background told of; for a boundary
    _outbox: deque[tuple[Entry, list[LearnerEffect]]] = field(default_factory=deque)
    _states: dict[tuple[int, int], Future[optimizer_state.Taken]] = field(default_factory=dict)  # promised
    _inner_state: Given | None = None  # of a peer, to start from
    _is_whole: bool = True  # the newest event is on its way to the tape
    _came: bool = False  # something that the core was told of, since the training thread last looked
    _last_end: float = 0.0  # of the previous boundary, on the monotonic clock

    def __post_init__(self) -> None:
        self._news = threading.Condition(self.lock)  # actions for the training thread, while it joins or rests

    # ------------------------------------------------------------------------------------------------ from any thread

    def tell(self, event: LearnerEvent) -> None:
        """Handle an event. What it asks of the training thread waits for the next boundary."""
        with self._news:
            self._actions.extend(self._handle(event))
            self._news.notify_all()

    def receive_version(
        self, envelope: Envelope, fragment: FragmentTensors, version: Version, value: Buffer | None
    ) -> bool:
        """Handle a publish message. `value`: of a new version that all ranks have; it becomes the fragment's if the
        core accepts the message. Return whether it did."""
        with self._news:
            is_accepted = value is not None and self.core.hears(envelope)
            if value is not None and is_accepted:
                fragment.arrived(version, value)
            self._actions.extend(self._handle(MessageArrived(envelope)))
            self._news.notify_all()
            return is_accepted

    def due_in(self) -> float | None:
        """Seconds until the core wants to be told of the time."""
        with self.lock:
            deadline = self.core.next_deadline()
        return deadline - self._clock.now() if deadline is not None else None

    def is_joining(self) -> bool:
        with self.lock:
            return self.core.state.mode is Mode.JOINING

    # ------------------------------------------------------------------------------------------ in the training thread

    def wait_for_start(self, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions before the first step, and whether the run is paused. If there are no actions, call
        `before_wait` and wait up to 0.2 s."""
        with self._news:
            if not self._actions:
                before_wait()
                self._news.wait(0.2)
            return [self._with_state(action) for action in self._take_actions()], self.core.state.rests

    def step(self, tokens: int, samples: int, begin: float, noticed: int) -> tuple[float | None, list[Action], bool]:
        """Return how long this call waited for the lock, the actions of this boundary, and whether the learner rests.

        If the background thread is busy, return None and no actions: the core is told at the next boundary. `noticed`
        is the highest `Notice.level` of the other ranks.
        """
        before = self.untold
        self.untold = untold = Untold(before.steps + 1, before.tokens + tokens, before.samples + samples)
        leaves = self._notice.came or noticed
        if len(self._outbox) > MOST_POSTED and untold.steps <= MOST_UNTOLD and not leaves:
            return None, [], False  # steps of microseconds: several are told at once, or it would never catch up
        waited_s = 0.0
        if not self.lock.acquire(blocking=False):
            # The background has it, and waits for its turn on this machine, perhaps. This thread does not wait.
            if untold.steps <= MOST_UNTOLD and not leaves:
                return None, [], False
            self.lock.acquire()
            waited_s = time.monotonic() - begin
        try:
            actions = self._take_actions()
            if self.core.training:
                step_time_s = max(0.0, begin - self._last_end) / untold.steps
                event = StepTaken(untold.steps, untold.tokens, step_time_s, untold.samples)
                actions += self._handle(event, at=begin)
            self.untold = NOTHING_UNTOLD
            actions += self._heed_notice(noticed)
            # Copying and adopting are this learner's own work; only what it waited for the lock is somebody else's.
            self._last_end = begin + waited_s
            return waited_s, actions, self.core.state.rests
        finally:
            self.lock.release()

    def rest(self, noticed: int, before_wait: Callable[[], None]) -> tuple[list[Action], bool]:
        """Return the actions that are due while the learner rests, and whether it still rests. If no event has arrived,
        call `before_wait` and wait up to 0.2 s."""
        core = self.core
        with self._news:
            if core.state.rests and not self._came and not core.leaving.can_answer():
                before_wait()
                self._news.wait(0.2)
            came, self._came = self._came, False
            actions = self._take_actions()
            due = (came and core.has_boundary_work) or core.leaving.can_answer()
            if core.training and (due or not core.state.rests):
                self._last_end = time.monotonic()  # the next step begins here
                actions += self._handle(StepTaken(0, 0, 0.0), at=self._last_end)
            actions += self._heed_notice(noticed)
            return actions, core.state.rests

    def end_steps(self, noticed: int) -> None:
        """Tell the core of the last steps and of a notice, after the loop. `rest` returns the actions."""
        with self._news:
            now, (steps, tokens, samples) = time.monotonic(), self.untold
            self.untold = NOTHING_UNTOLD
            if steps:
                took_s = max(0.0, now - self._last_end) / steps
                self._actions += self._handle(StepTaken(steps, tokens, took_s, samples), at=now)
            self._actions += self._heed_notice(noticed)

    def release_lock(self) -> None:
        """Release the lock where an interrupt has left it locked."""
        with contextlib.suppress(RuntimeError):  # until it is not ours any more
            while True:
                self.lock.release()

    def is_whole(self) -> bool:
        """Return whether every event of the core is on its way to the tape."""
        with self.lock:
            return self._is_whole

    def close(self) -> None:
        """Close the tape and drop what was not sent, after the background thread has detached or stopped."""
        self._outbox.clear()
        self._states.clear()
        self._inner_state = None
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

    def take_promised_state(self, envelope: Envelope) -> Future[optimizer_state.Taken]:
        """Return the copy of inner state that this message announces, which a step boundary makes."""
        return self._states.pop(state_key(envelope))

    def keep_inner_state(self, given: Given) -> None:
        """Keep a peer's inner state, before the core is told of it: training starts from the first one."""
        if self._inner_state is None:
            self._inner_state = given

    # --------------------------------------------------------------------------------------------- with the lock held

    def _handle(self, event: LearnerEvent, at: float | None = None) -> list[Action]:
        """Effects go to the background in the order of the events, whoever told of them."""
        with self._interrupts:
            moment = at if at is not None else time.monotonic()
            now = self._clock.at(moment)
            self._is_whole = False  # whatever is raised in between leaves the core ahead of its tape
            effects = self.core.handle(now, event)
            actor = Actor(self.core.state.id, self.core.state.incarnation)
            entry = Entry(now, actor, self.core.state.tick, event, tuple(effects))
            actions = [action for effect in effects if (action := self._action(effect)) is not None]
            starts = any(type(action) is Start for action in actions)
            if starts:
                self._last_end = moment  # the first step begins here
            if starts or type(event) is StepTaken:
                self._status.progress = self.core.state.progress
            self._came = self._came or type(event) is not StepTaken
            self._outbox.append((entry, effects))
            self._is_whole = True
            return actions

    def _take_actions(self) -> list[Action]:
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _action(self, effect: Effect) -> Action | None:
        match effect:
            case CopyFragment():
                fragment = self.boundary.fragments[effect.round.fragment]
                return CopyAction(effect, fragment.will_copy(effect.round, effect.codec))
            case AdoptFragment():
                value, reference = self.boundary.fragments[effect.fragment].will_adopt(effect.merged_copy)
                return Adopt(effect, value, reference)
            case SaveSnapshot():
                assert self.core.state.part is not None
                taken = self._parts.expect(self.core.state.part)
                return Save(effect, taken) if taken is not None else None
            case StartTraining():
                return Start(effect)
            case Stop():
                return End(effect)
            case Send() if type(effect.envelope.body) is InnerState:
                return Give(effect.envelope, self._states.setdefault(state_key(effect.envelope), Future()))
        return None

    def _with_state(self, action: Action) -> Action:
        """What training starts with is decided before all ranks are told that it does."""
        if type(action) is not Start:
            return action
        given, self._inner_state = self._inner_state, None
        saved = self._parts.take_saved()
        return Start(action.effect, self.boundary.starting(action.effect, given, saved, self.core.state.id, self._log))

    def _heed_notice(self, noticed: int) -> list[Action]:
        """Tell the core of a notice, at a step boundary."""
        self._notice.hear_of(noticed)
        return [action for wish in self._notice.wishes(self.core) for action in self._handle(wish)]
