"""How many tokens a batch trains on: the weight of an island in merges follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

NOT_A_LABEL = -100
"""What transformers and torch's cross entropy leave out of the loss."""


def tokens_of(batch: Any) -> int:
    """Of a batch with labels those that are in the loss; else what the attention mask shows; else all input ids.

    A batch without any of these names (pictures, rows of a table) counts its samples. At least 1: a step was taken.
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        for name, counted in (("labels", _in_the_loss), ("attention_mask", _shown), ("input_ids", Tensor.numel)):
            value = batch[name] if name in batch else None  # noqa: SIM401 - a BatchEncoding has no typed `get`
            if isinstance(value, Tensor) and value.dim() > 1:
                return max(1, counted(value))
        return _samples(list(batch.values()))
    if isinstance(batch, Tensor):
        return max(1, batch.numel() if not batch.is_floating_point() and batch.dim() > 1 else len(batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        first = next((part for part in batch if isinstance(part, Tensor)), None)
        return tokens_of(first) if first is not None else max(1, len(batch))
    return 1


def _in_the_loss(labels: Tensor) -> int:
    return int((labels != NOT_A_LABEL).sum())


def _shown(mask: Tensor) -> int:
    return int(mask.sum())


def _samples(values: list[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0), default=1)


__all__ = ["NOT_A_LABEL", "tokens_of"]
