"""Where a learner's threads meet its core: events go in under a lock, effects come out as actions and as work for the
background."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from torch import nn

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    AdoptFragment,
    CopyFragment,
    Effect,
    InnerState,
    LearnerEvent,
    SaveSnapshot,
    Send,
    StartTraining,
    StepTaken,
    Stop,
)
from atoll.core.states import Mode
from atoll.errors import LearnerRefused
from atoll.learner.background import Background
from atoll.learner.boundary import Action, Adopt, Copy, End, Give, Save, Solo, Start, StepBoundary
from atoll.learner.preemption import LEFT, Notice
from atoll.learner.signals import Interrupts
from atoll.logs import Named
from atoll.store.learner_parts import set_rng
from atoll.tape.format import Actor, Entry
from atoll.tensors.robust_merge import unfit_in_model
from atoll.transport.run_clock import RunClock


class CoreDriver:
    """What `Learner` does with its core. It makes what is named here."""

    log: Named
    _actions: deque[Action]
    _adopted: int
    _background: Background
    _began: float
    _boundary: StepBoundary | None
    _came: bool
    _clock: RunClock
    _contributed: int
    _core: LearnerCore | None
    _drained: bool
    _finished: bool
    _interrupts: Interrupts
    _is_whole: bool
    _model: nn.Module
    _island: Solo
    _last_end: float
    _lock: threading.RLock
    _news: threading.Condition
    _notice: Notice
    _progress: float
    _restored_state: Any
    _stop: Stop | None
    _warmup_steps: int

    def _carry_out(self, actions: list[Action]) -> bool:
        """What has to be done before the next step. True when it said that training starts or ends."""
        assert self._boundary is not None
        turned = False
        if actions:
            self._boundary.before()
        for action in actions:
            match action:
                case Copy():
                    self._boundary.copy(action)
                    self._contributed += 1
                case Adopt():
                    self._boundary.adopt(action)
                    self._adopted += 1
                case Give():
                    self._boundary.give(action)
                case Save():
                    self._boundary.save(action)
                case Start():
                    self._begin(action)
                    turned = True
                case End():
                    self._ended(action.effect)
                    turned = True
        return turned

    def _with_state(self, action: Action) -> Action:
        """What training starts with is decided before all ranks are told that it does."""
        if type(action) is not Start:
            return action
        assert self._boundary is not None and self._core is not None
        saved, given = self._background.take_saved(), self._background.take_inner_state()
        return Start(action.effect, self._boundary.starting(action.effect, given, saved, self._core.id, self.log))

    def _begin(self, start: Start) -> None:
        assert start.inner is not None and self._boundary is not None
        self._warmup_steps = start.inner.warmup_steps
        if start.inner.prepared is not None:
            start.inner.prepared.install()
        if start.inner.part is not None:
            set_rng(start.inner.part.rng_of(0))
            self._restored_state = start.inner.restored
        came = f": {start.inner.prepared}" if start.inner.prepared is not None else ""
        self.log.info("training starts: %s%s", start.effect.moments, came)

    def _ended(self, stop: Stop) -> None:
        assert self._boundary is not None and self._core is not None
        self._stop = stop
        self.log.info("%s", stop.reason)
        if stop.reason.code == "learner-finished":
            self._boundary.write_anchors()
            self._finished = True
        elif stop.reason.code in LEFT:
            self._finished = self._drained = True
            self._notice.say_left(self._core)
        elif self._began:
            unfit = unfit_in_model(self._model) if "refused-quarantined" in self._core.said else ""
            raise LearnerRefused(f"{stop.reason}{unfit and f'; the model of this process holds {unfit}'}")

    def _heed_notice(self) -> list[Action]:
        """With the lock held, at a step boundary."""
        assert self._core is not None
        self._notice.hear_of(self._island.noticed)
        return [action for wish in self._notice.wishes(self._core) for action in self._handle(wish)]

    # ---------------------------------------------------------------------------------------------------- the core

    def _tell(self, event: LearnerEvent) -> None:
        """An event from the background thread. What it asks of the training thread waits for the next boundary."""
        with self._news:
            self._actions.extend(self._handle(event))
            self._news.notify_all()

    def _handle(self, event: LearnerEvent, at: float | None = None) -> list[Action]:
        """With the lock held. Effects go to the background in the order of the events, whoever told of them."""
        with self._interrupts:
            return self._handled(event, at)

    def _handled(self, event: LearnerEvent, at: float | None) -> list[Action]:
        assert self._core is not None and self._boundary is not None
        moment = at if at is not None else time.monotonic()
        now = self._clock.at(moment)
        self._is_whole = False  # whatever is raised in between leaves the core ahead of its tape
        effects = self._core.handle(now, event)
        actor = Actor(self._core.id, self._core.incarnation)
        entry = Entry(now, actor, self._core.tick, event, tuple(effects))
        actions = [action for effect in effects if (action := self._action(effect)) is not None]
        if any(type(action) is Start for action in actions):
            self._last_end = moment  # the first step begins here
            self._progress = self._core.progress
        elif type(event) is StepTaken:
            self._progress = self._core.progress
        self._came = self._came or type(event) is not StepTaken
        self._background.post(entry, effects)
        self._is_whole = True
        return actions

    def _due_in(self) -> float | None:
        """Seconds until the core wants to be told of the time."""
        with self._lock:
            deadline = self._core.next_deadline() if self._core is not None else None
        return deadline - self._clock.now() if deadline is not None else None

    def _is_joining(self) -> bool:
        with self._lock:
            return self._core is not None and self._core.mode is Mode.JOINING

    def _action(self, effect: Effect) -> Action | None:
        assert self._boundary is not None
        match effect:
            case CopyFragment():
                fragment = self._boundary.fragments[effect.round.fragment]
                return Copy(effect, fragment.will_copy(effect.round, effect.codec))
            case AdoptFragment():
                value, reference = self._boundary.fragments[effect.fragment].will_adopt(effect.merged_copy)
                return Adopt(effect, value, reference)
            case SaveSnapshot():
                assert self._core is not None and self._core.part is not None
                taken = self._background.expect_part(self._core.part)
                return Save(effect, taken) if taken is not None else None
            case StartTraining():
                return Start(effect)
            case Stop():
                return End(effect)
            case Send() if type(effect.envelope.body) is InnerState:
                return Give(effect.envelope, self._background.expect_state(effect.envelope))
        return None
