"""Model, data and runs that are small enough to be trained in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.types import RunConfig
from atoll.reference.models import GPT, GPTConfig, build_model, inner_optimizer
from atoll.reference.tape_executor import ReplayLearner, StepInfo, TapeExecutor, initial_values
from atoll.tape.format import Actor
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan
from atoll.tensors.settings import Numerics
from tests.reference.lockstep import PATIENT_LIMITS

SHAPE = GPTConfig(layers=2, heads=2, width=16, context=8, vocabulary=32)
LR = 1e-2
TOKENS = 16

EXACT = Numerics(merge="average", outer="nesterov", outer_lr=0.7, outer_momentum=0.9, up="f32", down="f32")
"""Numerics without rounding in transit."""


def batch(learner: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the random batch of a learner's step, the same in every call."""
    generator = torch.Generator().manual_seed(1000 * learner + step)
    window = torch.randint(0, SHAPE.vocabulary, (2, SHAPE.context + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


def new_model() -> GPT:
    return build_model(SHAPE, seed=7)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return inner_optimizer(model, "adamw", LR)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, learner: int, step: int) -> float:
    """Take one inner step and return its loss. `step` counts from 0."""
    x, y = batch(learner, step)
    loss: Tensor = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_learner(actor: Actor, data_source: Callable[[int], int] = lambda learner: learner) -> ReplayLearner:
    """Make a learner that trains on the data of learner `data_source(number)`."""
    model = new_model()
    optimizer = new_optimizer(model)

    def take_step(info: StepInfo) -> float:
        return train_step(model, optimizer, data_source(actor.learner), info.step)

    return ReplayLearner(model, optimizer, take_step)


def tiny_plan(fragments: int, method: str = "balanced") -> FragmentPlan:
    return make_plan(describe_tensors(new_model()), fragments, method)


def lockstep_config(plan: FragmentPlan, learners: int, every: int, **changes: Any) -> RunConfig:
    fragments = len(plan.fragments)
    return RunConfig(
        fragments=fragments,
        every_steps=every,
        quorum=learners,
        rounds_in_flight=fragments,
        limits=PATIENT_LIMITS,
        **changes,
    )


def make_executor(
    config: RunConfig,
    numerics: Numerics,
    plan: FragmentPlan,
    executor_type: type[TapeExecutor] = TapeExecutor,
    make: Callable[[Actor], ReplayLearner] = make_learner,
    **options: Any,
) -> TapeExecutor:
    return executor_type(config, numerics, plan, initial_values(new_model(), plan), make, **options)


def tokens_by_learner(learners: int) -> Mapping[int, int]:
    return dict.fromkeys(range(1, learners + 1), TOKENS)


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are equal bit by bit, including the sign of zeros."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[n].view(torch.int32), theirs[n].view(torch.int32)) for n in ours
    )


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max((ours[n] - theirs[n]).abs().max().item() for n in ours)
