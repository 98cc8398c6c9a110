"""What frameworks put around an optimizer, taken off again: islands with and without them train one run.

Nothing of a framework is imported: what is wrapped is seen from its attributes.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state. Its class is compared between islands, so that no wrapper may stand for it.

    accelerate and Lightning keep theirs as `optimizer`.
    """
    inner: Any = getattr(optimizer, "optimizer", None)
    return plain_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def check_whole_step(optimizer: Optimizer) -> None:
    """Raise where accelerate is accumulating gradients: this was a micro-batch, and nothing has been learned yet."""
    gradients: Any = getattr(optimizer, "gradient_state", None)
    if gradients is not None and getattr(gradients, "sync_gradients", True) is False:
        raise ValueError(
            "this was a micro-batch, of which the optimizer makes no step: tell of steps only, where "
            "accelerator.sync_gradients is True, with the tokens of all their micro-batches; or use "
            "atoll.integrations.accelerate.AcceleratedLearner, which adds them up"
        )


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step was none: with fp16 gradients may overflow, and accelerate leaves the step out."""
    return bool(getattr(optimizer, "step_was_skipped", False))


__all__ = ["check_whole_step", "plain_optimizer", "was_skipped"]
