"""Learning rates by the progress of the run, for trainers that step a scheduler.

A trainer's own schedule counts the steps of its own loop. On an island that says little: who joins in the middle would
begin with the largest rate, and nobody knows how many steps an island will have taken by the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

RateCurve = Callable[[float], float]
"""From progress, 0..1, to a factor of the optimizer's own rate."""


class ProgressSource(Protocol):
    """What of `atoll.Learner` a rate depends on."""

    @property
    def progress(self) -> float: ...

    @property
    def lr_scale(self) -> float: ...


def cosine(warmup: float = 0.0, end: float = 0.1) -> RateCurve:
    """Rises over the first `warmup` of the run and falls to `end`, as half a cosine.

    Progress stands at 0 until the first merge, so the rise begins at a tenth and not at nothing.
    """
    return _with_warmup(warmup, lambda done: end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done)))


def linear(warmup: float = 0.0, end: float = 0.1) -> RateCurve:
    """As `cosine`, and falls in a straight line."""
    return _with_warmup(warmup, lambda done: 1.0 - (1.0 - end) * done)


def _with_warmup(warmup: float, falling: RateCurve) -> RateCurve:
    if not 0.0 <= warmup < 1.0:
        raise ValueError(f"warmup is a part of the run, from 0 to below 1, got {warmup}")

    def factor(progress: float) -> float:
        if progress < warmup:
            return 0.1 + 0.9 * progress / warmup
        return falling((progress - warmup) / (1.0 - warmup))

    return factor


class ProgressSchedule(LRScheduler):
    """Each group's own rate times `curve(learner.progress)` times `learner.lr_scale`.

    A scheduler like any other for the trainer that steps it. It is made before the island has joined, with the rate of
    progress 0, and follows the learner from then on; the callbacks of this package call `follow` themselves. How often
    it is stepped does not matter. A checkpoint keeps nothing of it: the run says where it is.
    """

    def __init__(self, optimizer: Optimizer, curve: RateCurve, learner: ProgressSource | None = None) -> None:
        self.curve = curve
        self.learner = learner
        super().__init__(optimizer)

    def follow(self, learner: ProgressSource) -> None:
        """From now on; the rates are those of its progress when this returns."""
        self.learner = learner
        self.update_rates()

    def update_rates(self) -> None:
        """The rates of this moment, whether or not the trainer thinks that a step of the schedule is due."""
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
        """Whatever it was: the rates stay those of the run, also where the optimizer has just loaded others."""
        self.update_rates()


def progress_schedule(
    optimizer: Optimizer, curve: RateCurve | None = None, learner: ProgressSource | None = None
) -> ProgressSchedule:
    """A scheduler over the progress of the run; without `curve` a cosine that falls to a tenth."""
    return ProgressSchedule(optimizer, curve if curve is not None else cosine(), learner)


class StepScheduleAdapter:
    """Turns a schedule that counts steps, such as those of transformers, into one that follows the run: of its `steps`
    it stands where the progress of the run is.

    Only its warm-up goes by steps of this island too: progress stands at 0 until the first merge, and so would the
    rate. `restore` gives the scheduler its own ways back.
    """

    def __init__(self, scheduler: LambdaLR, learner: ProgressSource, steps: int, warmup_steps: int) -> None:
        self._scheduler = scheduler
        self._own = list(scheduler.lr_lambdas)
        self._learner = learner
        self._steps = steps
        self._warmup_steps = warmup_steps
        scheduler.lr_lambdas = [self._wrap(rate) for rate in self._own]
        self.update_rates()

    def _wrap(self, rate: Callable[[int], float]) -> Callable[[int], float]:
        def at(own_steps: int) -> float:
            place = max(round(self._learner.progress * self._steps), min(own_steps, self._warmup_steps))
            return rate(place) * self._learner.lr_scale

        return at

    def update_rates(self) -> None:
        made = self._scheduler
        rates = zip(made.base_lrs, made.lr_lambdas, strict=True)
        last = _set_rates(made.optimizer, [base * rate(made.last_epoch) for base, rate in rates])
        made.load_state_dict({"_last_lr": last, "lr_lambdas": [None] * len(last)})  # what `get_last_lr` returns

    def restore(self) -> None:
        self._scheduler.lr_lambdas = self._own


def _set_rates(optimizer: Optimizer, rates: list[float | Tensor]) -> list[float | Tensor]:
    """Set the rates and return copies. A rate that is a tensor stays the same object: a compiled step has its
    address."""
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
