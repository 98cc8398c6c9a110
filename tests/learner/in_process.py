"""Learners in the process of the test."""

from __future__ import annotations

from typing import Any

from atoll.learner.api import Learner
from atoll.learner.driver import LearnerDriver
from atoll.learner.leading_rank import LeadingRank
from tests.learner.runs import LIMIT_S, Run
from tests.learner.small_models import BATCH, Work

STEPS = 20_000  # far more than needed


def learner_of(run: Run, job: Work, number: int | None, address: str = "", **settings: Any) -> Learner:
    """Return a learner in this process, which is not entered yet."""
    defaults: dict[str, Any] = {"run_directory": run.directory, "join_timeout_s": LIMIT_S}
    return Learner(job.model, job.optimizer, address or run.address, run.token, learner=number, **(defaults | settings))


def train(learner: Learner, job: Work, steps: int = STEPS) -> int:
    """Train until the run ends or this many steps are taken. Return the number of steps."""
    for number in range(steps):
        if learner.finished:
            return number
        learner.step(tokens=BATCH, loss=job.step(number))
    return steps


def leading_rank(learner: Learner) -> LeadingRank:
    """Return the part of a learner of one rank that runs the protocol."""
    assert isinstance(learner._rank, LeadingRank)
    return learner._rank


def driver_of(learner: Learner) -> LearnerDriver:
    """Return the driver of a learner that has joined."""
    driver = leading_rank(learner).driver
    assert driver is not None
    return driver
