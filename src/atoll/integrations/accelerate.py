"""accelerate: a learner for gradient accumulation.

`atoll.Learner` takes what `accelerator.prepare` returns. With gradient accumulation a loop calls `step` once for every
micro-batch, and the optimizer steps once for all of them.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch import Tensor, nn

from atoll.integrations.batches import sum_counts
from atoll.learner.api import Learner
from atoll.tensors.optimizers import Optimizers, was_step_skipped


class AcceleratedLearner(Learner):
    """A `Learner` whose `step` is called for every micro-batch. It adds up their tokens until the optimizer steps.

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

    `model` and `optimizer` are the prepared ones. Counts on a device
    (`atoll.integrations.batches.count_tokens_on_device`) are read once a step, because reading one waits for the
    device. A step that was skipped because gradients overflowed (fp16) is not reported.
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
        """Count a micro-batch, and report the step after the last one. The loss of a step is the mean of theirs."""
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
