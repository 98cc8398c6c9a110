"""accelerate: `atoll.Learner` takes what `accelerator.prepare` returns; here is what is left to do.

Where gradients are accumulated a loop comes by once for every micro-batch, and a step is taken once for all of them.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch import Tensor, nn

from atoll.integrations.batches import sum_counts
from atoll.learner.api import Learner
from atoll.tensors.optimizers import Optimizers, was_step_skipped


class AcceleratedLearner(Learner):
    """A `Learner` that is told of micro-batches: their tokens are added up until accelerate lets the optimizer step.

        batches = epochs(loader)  # from atoll.integrations.data
        with AcceleratedLearner(accelerator, model, optimizer) as learner:
            while not learner.finished:
                batch = next(batches)
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                learner.step(tokens=count_tokens_on_device(batch), loss=loss)

    `model` and `optimizer` are the prepared ones. Numbers that are on a device (`atoll.integrations.batches.count_tokens_on_device`)
    are read once a step: to read one waits for everything before it. A step that was left out because gradients
    overflowed (fp16) is none.
    """

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Optimizers, *where: Any, **settings: Any) -> None:
        super().__init__(model, optimizer, *where, **settings)
        self._accelerator = accelerator
        self._prepared = optimizer
        self._counts: list[SupportsIndex] = []
        self._losses: list[float | Tensor] = []

    def __enter__(self) -> AcceleratedLearner:
        super().__enter__()
        return self

    def step(self, tokens: SupportsIndex, loss: float | Tensor | None = None) -> None:
        """One micro-batch has been trained on. The loss that is shown is the mean of those of a step."""
        self._counts.append(tokens)
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if not self._accelerator.sync_gradients:
            return
        counts, losses = self._counts, self._losses
        self._counts, self._losses = [], []
        if not was_step_skipped(self._prepared):
            super().step(sum_counts(counts), sum(losses) / len(losses) if losses else None)


__all__ = ["AcceleratedLearner"]
