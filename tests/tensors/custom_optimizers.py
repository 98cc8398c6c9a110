"""Optimizers with state outside of `Optimizer.state`: in parameter groups, or in wrapped optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ScheduleFreeLike(Optimizer):
    """Stores step and weight counters in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        counters = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, {"lr": lr, "beta": beta} | counters)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"] * min(1.0, (group["k"] + 1) / 4)
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            group["k"] += 1
            for parameter, gradient in _gradients(group):
                state = self.state[parameter]
                z = state.setdefault("z", parameter.clone())
                parameter.lerp_(z, share)
                parameter.add_(gradient, alpha=lr * (group["beta"] * (1 - share) - 1))
                z.sub_(gradient, alpha=lr)


class ProdigyLike(Optimizer):
    """Estimates its step size `d` and stores it in its groups, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "d_numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            denominator = 0.0
            for parameter, gradient in _gradients(group):
                state = self.state[parameter]
                gradient_sum = state.setdefault("s", torch.zeros_like(parameter))
                gradient_sum.add_(gradient, alpha=group["d"])
                group["d_numerator"] += float(gradient.abs().sum()) * group["d"] * 1e3
                denominator += float(gradient_sum.abs().sum())
            group["d"] = max(group["d"], min(group["d_numerator"] / max(denominator, 1e-12) * group["d"], 1e-2))
            for parameter, gradient in _gradients(group):
                parameter.add_(gradient, alpha=-group["lr"] * group["d"])


class LazyCounters(Optimizer):
    """Adds counters to its groups at the first step, as Adan does: a number, and a tensor changed in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("seen", torch.zeros(())).add_(1)
            for parameter, gradient in _gradients(group):
                parameter.add_(gradient, alpha=-group["lr"] / float(group["step"] + group["seen"]))


class WrappingOptimizer(Optimizer):
    """Wraps another optimizer and counts steps in its groups. Has no step hooks: Optimizer.__init__ is not called."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter, _ in _gradients(group):
                parameter.mul_(1 - 0.1 / group["k"])


class ChainedOptimizers(Optimizer):
    """Steps several optimizers. Its own state is empty."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.state = defaultdict(dict)
        self._optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


class Uncloneable(Tensor):
    """Tensor type without `clone`, like some quantized state tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            raise NotImplementedError("Uncloneable has no clone")
        return super().__torch_function__(func, types, args, kwargs or {})


def make_two_optimizers(model: nn.Module) -> list[Optimizer]:
    """Return SGD with momentum for matrices and AdamW for the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def _gradients(group: dict[str, Any]) -> Iterable[tuple[Tensor, Tensor]]:
    return [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
