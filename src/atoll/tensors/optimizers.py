"""Unwrap optimizers that frameworks have wrapped, so that learners with and without a framework train in one run.

No framework is imported: wrappers are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""One optimizer, or several that update disjoint parameters, such as Muon and AdamW."""


def as_optimizer_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def unwrap_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return the optimizers that hold the state, without the wrappers of frameworks."""
    unwrapped = tuple(unwrap_optimizer(optimizer) for optimizer in as_optimizer_tuple(optimizers))
    if not unwrapped:
        raise ValueError("the list of optimizers is empty; pass every optimizer that updates the model")
    return unwrapped


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: its class is compared between learners, so wrappers must not matter.

    The wrappers of accelerate and Lightning have it as `optimizer`.
    """
    inner: Any = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def check_not_accumulating(optimizers: Optimizers) -> None:
    """Raise ValueError if accelerate accumulates gradients: after a micro-batch the optimizer has made no step."""
    gradients: list[Any] = [getattr(optimizer, "gradient_state", None) for optimizer in as_optimizer_tuple(optimizers)]
    if any(getattr(each, "sync_gradients", True) is False for each in gradients):
        raise ValueError(
            "this was a micro-batch of a gradient accumulation, without an optimizer step: call step only if "
            "accelerator.sync_gradients is True, with the tokens of all micro-batches; or use "
            "atoll.integrations.accelerate.AcceleratedLearner, which adds them up"
        )


def was_step_skipped(optimizers: Optimizers) -> bool:
    """Return whether no optimizer made a step: accelerate skips steps in which fp16 gradients overflow."""
    return all(getattr(optimizer, "step_was_skipped", False) for optimizer in as_optimizer_tuple(optimizers))


__all__ = [
    "Optimizers",
    "check_not_accumulating",
    "as_optimizer_tuple",
    "unwrap_optimizer",
    "unwrap_optimizers",
    "was_step_skipped",
]
