"""Learning-rate schedules by the progress of the run, for trainers that step a scheduler.

A trainer's own schedule counts the steps of its own loop. That does not fit a learner: one that joins in the middle
would begin with the largest rate, and the number of steps that a learner will take is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

RateCurve = Callable[[float], float]
"""Function from progress, 0..1, to a factor of the optimizer's own rate."""


class ProgressSource(Protocol):
    """Properties of `atoll.Learner` on which a rate depends."""

    @property
    def progress(self) -> float: ...

    @property
    def lr_scale(self) -> float: ...


def cosine(warmup: float = 0.0, end: float = 0.1) -> RateCurve:
    """Return a curve that rises over the first `warmup` of the run and falls to `end`, as half a cosine.

    Progress is 0 until the first merge, so the rise begins at a tenth and not at zero.
    """
    return _with_warmup(warmup, lambda done: end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done)))


def linear(warmup: float = 0.0, end: float = 0.1) -> RateCurve:
    """Return a curve as `cosine` does, with a linear fall."""
    return _with_warmup(warmup, lambda done: 1.0 - (1.0 - end) * done)


def _with_warmup(warmup: float, falling: RateCurve) -> RateCurve:
    if not 0.0 <= warmup < 1.0:
        raise ValueError(f"warmup is a share of the run, from 0 to below 1; got {warmup}")

    def factor(progress: float) -> float:
        if progress < warmup:
            return 0.1 + 0.9 * progress / warmup
        return falling((progress - warmup) / (1.0 - warmup))

    return factor


class ProgressSchedule(LRScheduler):
    """Scheduler that sets each group's own rate times `curve(learner.progress)` times `learner.lr_scale`.

    It is made before the learner has joined, with the learning rate for progress 0, and follows the learner from then
    on. The callbacks of this package call `follow`. How often the trainer steps it does not matter. Its checkpoint
    state is empty: the run determines the progress.
    """

    def __init__(self, optimizer: Optimizer, curve: RateCurve, learner: ProgressSource | None = None) -> None:
        self.curve = curve
        self.learner = learner
        super().__init__(optimizer)

    def follow(self, learner: ProgressSource) -> None:
        """Follow this learner, and set the rates for its progress."""
        self.learner = learner
        self.update_rates()

    def update_rates(self) -> None:
        """Set the rates for the current progress, also when no step of the schedule is due."""
        self._last_lr = _set_rates(self.optimizer, self.get_lr())

    def get_lr(self) -> list[float | Tensor]:
        if self.learner is None:
            factor = self.curve(0.0)
        else:
            factor = self.curve(self.learner.progress) * self.learner.lr_scale
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state and set the run's rates again: the optimizer may have just loaded others."""
        self.update_rates()


def progress_schedule(
    optimizer: Optimizer, curve: RateCurve | None = None, learner: ProgressSource | None = None
) -> ProgressSchedule:
    """Return a scheduler over the progress of the run. The default curve is a cosine that falls to a tenth."""
    return ProgressSchedule(optimizer, curve if curve is not None else cosine(), learner)


class StepScheduleAdapter:
    """Adapter that makes a schedule of steps, such as those of transformers, follow the run's progress.

    Progress 0..1 is mapped to 0..`steps`. Its warmup counts steps of this learner too: progress is 0 until the first
    merge, and the rate would stay at 0. `restore` gives the scheduler its own functions back.
    """

    def __init__(self, scheduler: LambdaLR, learner: ProgressSource, steps: int, warmup_steps: int) -> None:
        self._scheduler = scheduler
        self._original_functions = list(scheduler.lr_lambdas)
        self._learner = learner
        self._steps = steps
        self._warmup_steps = warmup_steps
        scheduler.lr_lambdas = [self._wrap(rate) for rate in self._original_functions]
        self.update_rates()

    def _wrap(self, rate: Callable[[int], float]) -> Callable[[int], float]:
        def factor(own_steps: int) -> float:
            step = max(round(self._learner.progress * self._steps), min(own_steps, self._warmup_steps))
            return rate(step) * self._learner.lr_scale

        return factor

    def update_rates(self) -> None:
        scheduler = self._scheduler
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        last = _set_rates(scheduler.optimizer, [base * rate(scheduler.last_epoch) for base, rate in rates])
        scheduler.load_state_dict({"_last_lr": last, "lr_lambdas": [None] * len(last)})  # what `get_last_lr` returns

    def restore(self) -> None:
        self._scheduler.lr_lambdas = self._original_functions


def _set_rates(optimizer: Optimizer, rates: list[float | Tensor]) -> list[float | Tensor]:
    """Set the rates and return copies. A tensor rate stays the same object: a compiled step has its address."""
    groups = optimizer.param_groups
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]


__all__ = [
    "ProgressSource",
    "StepScheduleAdapter",
    "ProgressSchedule",
    "RateCurve",
    "progress_schedule",
    "cosine",
    "linear",
]
