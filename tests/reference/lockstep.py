"""Worlds without faults that make tape entries for an `Execution`: lockstep, and learners that each keep their pace.

`Lockstep` is the synchronous limit of the protocol. All learners step together, messages take no time, and a learner
stands at its step boundary until nothing is left to do there. With `overlap` a published version arrives so many steps
after its copy was made, which is Streaming DiLoCo; without, it is DiLoCo.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    Dial,
    Envelope,
    Event,
    FinishRequested,
    LinkOpened,
    MergeDone,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    Published,
    Send,
    Started,
    StepTaken,
)
from atoll.core.states import Mode
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import SYNCER, LearnerId, Limits, RunConfig
from atoll.sim.draws import LinkDraw, Plan
from atoll.sim.driver import Driver
from atoll.tape.format import Actor, Entry

PATIENT = Limits(first_wait_s=1e9, least_wait_s=1e9, most_wait_s=1e9)
"""Of a lockstep run, in which nobody is ever late."""


class Lockstep:
    """Cores that take every step together. One step is one second of their time."""

    def __init__(
        self,
        config: RunConfig,
        tokens: Mapping[LearnerId, int],
        on_entry: Callable[[Entry], None],
        overlap: int = 0,
        syncer: type[SyncerCore] = SyncerCore,
    ) -> None:
        self.steps = 0
        self.overlap = overlap
        self.tokens = dict(tokens)
        self.syncer = syncer(config, 1)
        self.learners = {i: LearnerCore(config, i, 1) for i in tokens}
        self._on_entry = on_entry
        self._queue: deque[tuple[LearnerId, Event]] = deque()
        self._late: deque[tuple[int, LearnerId, Event]] = deque()  # published versions and the step they arrive in
        self._queue.append((SYNCER, Started()))
        self._queue.extend((i, Started()) for i in self.learners)
        self._deliver()
        for i, core in self.learners.items():
            assert core.mode is Mode.TRAINING, f"learner {i} is {core.mode.value}: {core.reason}"

    def step(self) -> None:
        """Every learner takes one inner step, and stands at its boundary until nothing is left to do."""
        self.steps += 1
        while self._late and self._late[0][0] <= self.steps:
            _, to, event = self._late.popleft()
            self._queue.append((to, event))
        self._deliver()
        for i, core in self.learners.items():
            if core.training:
                self._tell(i, StepTaken(1, self.tokens[i], 1.0))
        self._settle()

    def finish(self, most_steps: int = 100) -> None:
        """The last merges. A fragment that was merged at the last step needs one more step to be merged again."""
        self.overlap = 0
        self._queue.extend((to, event) for _, to, event in self._late)
        self._late.clear()
        self._queue.append((SYNCER, FinishRequested()))
        self._deliver()
        self._settle()
        for _ in range(most_steps):
            if all(core.mode is Mode.STOPPED for core in self.learners.values()):
                return
            self.step()
        raise AssertionError(f"the run does not end: {self.syncer.view()}")

    def _settle(self) -> None:
        """Steps of zero length: pulls are answered and versions adopted at the boundary at which everybody stands."""
        self._deliver()
        busy = True
        while busy:
            busy = False
            for i, core in self.learners.items():
                if (core.pulls or core.arrivals) and core.training:
                    busy = bool(self._tell(i, StepTaken(0, 0, 0.0))) or busy
            self._deliver()

    def _deliver(self) -> None:
        while self._queue:
            to, event = self._queue.popleft()
            self._tell(to, event)

    def _tell(self, to: LearnerId, event: Event) -> tuple[Any, ...]:
        core: Any = self.learners[to] if to != SYNCER else self.syncer
        effects = tuple(core.handle(float(self.steps), event))
        self._on_entry(Entry(float(self.steps), Actor(to, 1), core.tick, event, effects))
        for effect in effects:
            if type(effect) is Send:
                self._carry(to, effect.envelope)
            elif type(effect) is Dial:
                self._queue.append((to, LinkOpened(1)))
            elif type(effect) is MergeRound:
                self._queue.append((to, MergeDone(effect.round)))
            elif type(effect) is Persist:
                self._queue.append((to, Persisted(effect.record.key())))
        return effects

    def _carry(self, sender: LearnerId, envelope: Envelope) -> None:
        event = MessageArrived(envelope)
        if sender != SYNCER:
            self._queue.append((SYNCER, event))
        elif type(envelope.body) is Published and self.overlap and self.steps:
            self._late.append((self.steps + self.overlap, envelope.learner, event))
        else:
            self._queue.append((envelope.learner, event))


class Paced(Driver):
    """Learners that never wait, on links that never fail. Times are in steps of a learner of speed 1."""

    @staticmethod
    def drawn(
        config: RunConfig,
        tokens: Mapping[LearnerId, int],
        speeds: Mapping[LearnerId, float],
        seed: int = 0,
        delay: float = 0.02,
        bulk: float = 0.5,
        merge: float = 0.1,
    ) -> Plan:
        """`delay` of a message, `bulk` more for a fragment (up to), `merge` for the merge and for the disk (up to)."""
        rng = Random(seed)
        return Plan(
            seed=seed,
            config=config,
            step_times_s={i: 1.0 / speeds[i] for i in tokens},
            tokens=dict(tokens),
            links={i: LinkDraw(delay, bulk, 0.0, 0.0) for i in tokens},
            starts_s={i: rng.random() for i in tokens},  # their boundaries do not fall together
            faults=(),
            faulty_s=0.0,
            merge_s=merge,
            disk_s=merge,
        )

    def run(self) -> None:
        """Until every learner has stopped, which needs a budget."""
        if self.config.budget_tokens is None and self.config.budget_merges is None:
            raise ValueError("a run without a budget never ends: give budget_tokens or budget_merges")
        self.healed = True  # nothing is lost
        self._start_syncer()
        for learner, at in self.plan.starts_s.items():
            self.engine.at(at, self._start_learner, learner)
        self.engine.run_until(math.inf, self._all_stopped)
        self.watch.finish()

    def _all_stopped(self) -> bool:
        running = [proc.core.mode is Mode.STOPPED for proc in self.learners.values()]
        return len(running) == len(self.plan.starts_s) and all(running)
