"""Worlds without faults that make tape entries for a `TapeExecutor`: learners in lockstep or with different speeds.

`Lockstep` is the synchronous limit of the protocol. All learners step together, messages have no latency, and a learner
stays at its step boundary until it has nothing left to do there. With `overlap` a published version arrives that many
steps after its copy was made, which is Streaming DiLoCo. Without overlap it is DiLoCo.
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

PATIENT_LIMITS = Limits(initial_wait_s=1e9, min_wait_s=1e9, max_wait_s=1e9)
"""Limits of a lockstep run, in which no learner is ever late."""


class LateVersions(SimLinks):
    """Links without latency, except that published versions take `overlap` steps."""

    def __init__(self, driver: SimDriver, overlap: int) -> None:
        super().__init__(driver, 0.0, 0.0)
        self.overlap = overlap

    def transmit(self, conn: SimConnection, to: SimProcess, envelope: Envelope) -> None:
        latency = self.overlap if type(envelope.body) is Published and self.engine.now else 0
        self.engine.schedule(self.engine.now + latency, self.driver.deliver, to, MessageArrived(envelope))


class Lockstep:
    """Cores that take every step together. One step is one second of simulated time."""

    def __init__(
        self,
        config: RunConfig,
        tokens: Mapping[LearnerId, int],
        on_entry: Callable[[Entry], None],
        overlap: int = 0,
        syncer: type[SyncerCore] = SyncerCore,
    ) -> None:
        self.steps = 0
        self._waited = 0  # seconds added by finish() for versions that are still in flight
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
        """Take one inner step of every learner, and settle everything at its boundary."""
        self.steps += 1
        self._deliver()
        for i, proc in self.driver.learners.items():
            if proc.core.training:
                self.driver.handle_event(proc, StepTaken(1, self.tokens[i], 1.0))
        self._settle()

    def finish(self, max_steps: int = 100) -> None:
        """Make the last merges. A fragment that was merged at the last step needs one more step."""
        self._waited, self._links.overlap = self._links.overlap, 0
        self._deliver()
        assert self.driver.syncer is not None
        self.driver.handle_event(self.driver.syncer, FinishRequested())
        self._settle()
        for _ in range(max_steps):
            if all(proc.core.state.mode is LearnerMode.STOPPED for proc in self.driver.learners.values()):
                return
            self.step()
        raise AssertionError(f"the run does not end: {self.syncer.view()}")

    def _settle(self) -> None:
        """Handle pulls and adopt versions at the common step boundary, by steps of zero length."""
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
    """World of learners with different speeds, on links that never fail. Times are in steps of a learner of speed 1."""

    @staticmethod
    def make_scenario(
        config: RunConfig,
        tokens: Mapping[LearnerId, int],
        speeds: Mapping[LearnerId, float],
        seed: int = 0,
        delay: float = 0.02,
        bulk: float = 0.5,
        merge: float = 0.1,
    ) -> SwarmScenario:
        """Return a scenario with random start times.

        Args:
            delay: latency of a message.
            bulk: maximum additional time of a fragment.
            merge: maximum time of a merge, and of a write to disk.
        """
        rng = Random(seed)
        return SwarmScenario(
            seed=seed,
            config=config,
            step_times_s={i: 1.0 / speeds[i] for i in tokens},
            tokens_per_step=dict(tokens),
            links={i: LinkConditions(delay, bulk, 0.0, 0.0) for i in tokens},
            start_times_s={i: rng.random() for i in tokens},  # step boundaries at different times
            faults=(),
            fault_phase_s=0.0,
            merge_s=merge,
            disk_s=merge,
        )

    def run(self) -> None:
        """Run until every learner has stopped. This needs a budget."""
        if self.config.budget_tokens is None and self.config.budget_merges is None:
            raise ValueError("a run without a budget never ends; give budget_tokens or budget_merges")
        self.links.heal()
        self.store.heal()
        self.start()
        self.engine.run_until(math.inf, self._have_stopped)
        self.checkers.finish()

    def _have_stopped(self) -> bool:
        stopped = [proc.core.state.mode is LearnerMode.STOPPED for proc in self.driver.learners.values()]
        return len(stopped) == len(self.scenario.start_times_s) and all(stopped)


def mean_of_learners(executor: TapeExecutor) -> list[Tensor]:
    """Return the mean of the current models of all learners, by fragment."""
    newest: dict[LearnerId, LearnerTensors] = {}  # newest incarnation of each learner
    for actor, learner in sorted(executor.learners.items()):
        newest[actor.learner] = learner
    means: list[Tensor] = []
    for p in range(len(executor.plan.fragments)):
        values = [torch.empty(executor.plan.numel(p)) for _ in newest]
        for value, learner in zip(values, newest.values(), strict=True):
            learner.view.read(p, value)
        means.append(torch.stack(values).mean(0))
    return means
