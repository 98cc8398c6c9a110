"""What frameworks put around an optimizer, taken off again: islands with and without them train one run.

Nothing of a framework is imported: what is wrapped is seen from its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""One optimizer, or several that each update parameters of their own, such as Muon and AdamW."""


def as_optimizer_tuple(given: Optimizers) -> tuple[Optimizer, ...]:
    return (given,) if isinstance(given, Optimizer) else tuple(given)


def unwrap_optimizers(given: Optimizers) -> tuple[Optimizer, ...]:
    """Return the optimizers that hold the state, without the wrappers of frameworks."""
    found = tuple(unwrap_optimizer(optimizer) for optimizer in as_optimizer_tuple(given))
    if not found:
        raise ValueError("the list of optimizers is empty; pass every optimizer that updates the model")
    return found


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state. Its class is compared between islands, so that no wrapper may stand for it.

    accelerate and Lightning keep theirs as `optimizer`.
    """
    inner: Any = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def check_not_accumulating(given: Optimizers) -> None:
    """Raise where accelerate is accumulating gradients: this was a micro-batch, and nothing has been learned yet."""
    gradients: list[Any] = [getattr(optimizer, "gradient_state", None) for optimizer in as_optimizer_tuple(given)]
    if any(getattr(each, "sync_gradients", True) is False for each in gradients):
        raise ValueError(
            "this was a micro-batch, of which the optimizer makes no step: tell of steps only, where "
            "accelerator.sync_gradients is True, with the tokens of all their micro-batches; or use "
            "atoll.integrations.accelerate.AcceleratedLearner, which adds them up"
        )


def was_step_skipped(given: Optimizers) -> bool:
    """Return whether no optimizer made a step: where fp16 gradients overflow, accelerate skips it."""
    return all(getattr(optimizer, "step_was_skipped", False) for optimizer in as_optimizer_tuple(given))


__all__ = [
    "Optimizers",
    "check_not_accumulating",
    "as_optimizer_tuple",
    "unwrap_optimizer",
    "unwrap_optimizers",
    "was_step_skipped",
]
