"""Optimizers that keep state where those of torch do not: in parameter groups, or in optimizers that they wrap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ScheduleFreeLike(Optimizer):
    """Counts steps and weights in its groups, as schedule-free optimizers do."""

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
    """Finds its step size `d` by itself and keeps it in its groups, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "d_numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            denominator = 0.0
            for parameter, gradient in _gradients(group):
                state = self.state[parameter]
                seen = state.setdefault("s", torch.zeros_like(parameter))
                seen.add_(gradient, alpha=group["d"])
                group["d_numerator"] += float(gradient.abs().sum()) * group["d"] * 1e3
                denominator += float(seen.abs().sum())
            group["d"] = max(group["d"], min(group["d_numerator"] / max(denominator, 1e-12) * group["d"], 1e-2))
            for parameter, gradient in _gradients(group):
                parameter.add_(gradient, alpha=-group["lr"] * group["d"])


class LazyCounters(Optimizer):
    """Its groups get their counters at the first step, as those of Adan do: a number, and a tensor changed in place."""

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
    """Wraps another optimizer without Optimizer.__init__, so that it has no step hooks, and counts in its groups."""

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
    """Steps several optimizers and has no state of its own."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([group for each in inner for group in each.param_groups], {})
        self.state = defaultdict(dict)
        self._inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self._inner:
            each.step()


class Uncloneable(Tensor):
    """Mimics a quantized state tensor that implements no copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            raise NotImplementedError("Uncloneable has no clone")
        return super().__torch_function__(func, types, args, kwargs or {})


def make_two_optimizers(model: nn.Module) -> list[Optimizer]:
    """Momentum for matrices, AdamW for the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def _gradients(group: dict[str, Any]) -> Iterable[tuple[Tensor, Tensor]]:
    return [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
