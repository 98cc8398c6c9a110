"""Worlds without faults that make tape entries for an `Execution`: lockstep, and learners that each keep their pace.

`Lockstep` is the synchronous limit of the protocol. All learners step together, messages take no time, and a learner
stands at its step boundary until nothing is left to do there. With `overlap` a published version arrives so many steps
after its copy was made, which is Streaming DiLoCo; without, it is DiLoCo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

import torch
from torch import Tensor

from atoll.core.protocol import Envelope, FinishRequested, MessageArrived, Published, StepTaken
from atoll.core.states import LearnerMode
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import LearnerId, Limits, RunConfig
from atoll.reference.tape_executor import LearnerTensors, TapeExecutor
from atoll.sim.driver import SimConnection, SimDriver, SimLinks, SimProcess, SimStore
from atoll.sim.scenarios import LinkConditions, SwarmScenario
from atoll.sim.world import SwarmWorld
from atoll.tape.format import Entry

PATIENT = Limits(initial_wait_s=1e9, min_wait_s=1e9, max_wait_s=1e9)
"""Of a lockstep run, in which nobody is ever late."""


class LateVersions(SimLinks):
    """Messages take no time, and published versions `overlap` steps."""

    def __init__(self, driver: SimDriver, overlap: int) -> None:
        super().__init__(driver, 0.0, 0.0)
        self.overlap = overlap

    def transmit(self, conn: SimConnection, to: SimProcess, envelope: Envelope) -> None:
        late = self.overlap if type(envelope.body) is Published and self.engine.now else 0
        self.engine.schedule(self.engine.now + late, self.driver.deliver, to, MessageArrived(envelope))


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
        self._waited = 0  # seconds for versions that were on their way when the last step was taken
        self.tokens = dict(tokens)
        self.driver = driver = SimDriver(config, syncer)
        self._links = LateVersions(driver, overlap)
        SimStore(driver, 0.0, 0.0)
        driver.on_entry.append(on_entry)
        self.syncer: SyncerCore = driver.start_syncer().core
        for i in self.tokens:
            driver.start_learner(i)
        self._deliver()
        for i, proc in driver.learners.items():
            assert proc.core.state.mode is LearnerMode.TRAINING, (
                f"learner {i} is {proc.core.state.mode.value}: {proc.core.state.reason}"
            )

    def step(self) -> None:
        """Every learner takes one inner step, and stands at its boundary until nothing is left to do."""
        self.steps += 1
        self._deliver()
        for i, proc in self.driver.learners.items():
            if proc.core.training:
                self.driver.handle_event(proc, StepTaken(1, self.tokens[i], 1.0))
        self._settle()

    def finish(self, most_steps: int = 100) -> None:
        """The last merges. A fragment that was merged at the last step needs one more step to be merged again."""
        self._waited, self._links.overlap = self._links.overlap, 0
        self._deliver()
        assert self.driver.syncer is not None
        self.driver.handle_event(self.driver.syncer, FinishRequested())
        self._settle()
        for _ in range(most_steps):
            if all(proc.core.state.mode is LearnerMode.STOPPED for proc in self.driver.learners.values()):
                return
            self.step()
        raise AssertionError(f"the run does not end: {self.syncer.view()}")

    def _settle(self) -> None:
        """Steps of zero length: pulls are answered and versions adopted at the boundary at which everybody stands."""
        self._deliver()
        busy = True
        while busy:
            busy = False
            for proc in self.driver.learners.values():
                if (proc.core.state.pulls or proc.core.state.arrivals) and proc.core.training:
                    busy = bool(self.driver.handle_event(proc, StepTaken(0, 0, 0.0))) or busy
            self._deliver()

    def _deliver(self) -> None:
        now = float(self.steps + self._waited)
        self.driver.engine.run_until(now)
        self.driver.engine.now = now


class Paced(SwarmWorld):
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
    ) -> SwarmScenario:
        """`delay` of a message, `bulk` more for a fragment (up to), `merge` for the merge and for the disk (up to)."""
        rng = Random(seed)
        return SwarmScenario(
            seed=seed,
            config=config,
            step_times_s={i: 1.0 / speeds[i] for i in tokens},
            tokens_per_step=dict(tokens),
            links={i: LinkConditions(delay, bulk, 0.0, 0.0) for i in tokens},
            start_times_s={i: rng.random() for i in tokens},  # their boundaries do not fall together
            faults=(),
            fault_phase_s=0.0,
            merge_s=merge,
            disk_s=merge,
        )

    def run(self) -> None:
        """Until every learner has stopped, which needs a budget."""
        if self.config.budget_tokens is None and self.config.budget_merges is None:
            raise ValueError("a run without a budget never ends: give budget_tokens or budget_merges")
        self.links.heal()
        self.store.heal()
        self.start()
        self.engine.run_until(math.inf, self._have_stopped)
        self.checkers.finish()

    def _have_stopped(self) -> bool:
        running = [proc.core.state.mode is LearnerMode.STOPPED for proc in self.driver.learners.values()]
        return len(running) == len(self.scenario.start_times_s) and all(running)


def mean_of_learners(execution: TapeExecutor) -> list[Tensor]:
    """The mean of the models of all learners, each in its newest incarnation, as they stand."""
    newest: dict[LearnerId, LearnerTensors] = {}
    for actor, learner in sorted(execution.learners.items()):
        newest[actor.learner] = learner
    found: list[Tensor] = []
    for p in range(len(execution.plan.fragments)):
        values = [torch.empty(execution.plan.numel(p)) for _ in newest]
        for value, learner in zip(values, newest.values(), strict=True):
            learner.view.read(p, value)
        found.append(torch.stack(values).mean(0))
    return found
