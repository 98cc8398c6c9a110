"""How many tokens a batch trains on: the weight of an island in merges follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

NOT_A_LABEL = -100
"""What transformers and torch's cross entropy leave out of the loss."""


def tokens_of(batch: Any) -> int:
    """Labels that are not -100; of a batch without them what the attention mask shows; else all input ids.

    A batch without any of these names (pictures, rows of a table) counts its samples. At least 1: a step was taken.
    Labels and masks count where they speak of tokens: whole numbers, and not a number of each class or for each head.
    """
    return int(count_of(batch))


def count_of(batch: Any) -> int | Tensor:
    """As `tokens_of`. On an accelerator it is a number there, which nobody has waited for yet."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        for name, counted in (("labels", _labelled), ("attention_mask", _shown), ("input_ids", _all)):
            value = batch[name] if name in batch else None  # noqa: SIM401 - a BatchEncoding has no typed `get`
            found = counted(value) if isinstance(value, Tensor) and value.dim() > 1 else None
            if found is not None:
                return found.clamp(min=1) if isinstance(found, Tensor) else max(1, found)
        return _samples(list(batch.values()))
    if isinstance(batch, Tensor):
        return max(1, batch.numel() if not batch.is_floating_point() and batch.dim() > 1 else len(batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        first = next((part for part in batch if isinstance(part, Tensor)), None)
        return count_of(first) if first is not None else max(1, len(batch))
    return 1


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _labelled(labels: Tensor) -> int | Tensor | None:
    return _number((labels != NOT_A_LABEL).sum()) if _is_whole(labels) else None


def _shown(mask: Tensor) -> int | Tensor | None:
    """Not of a mask that is added to scores, 0 and minus infinity, nor of one for each pair of tokens."""
    tells = mask.dim() == 2 and (_is_whole(mask) or mask.dtype is torch.bool)
    return _number((mask != 0).sum()) if tells else None


def _all(ids: Tensor) -> int:
    return ids.numel()


def _number(count: Tensor) -> int | Tensor:
    return int(count) if count.device.type == "cpu" else count


def _samples(values: list[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0), default=1)


class TokenCount:
    """Tokens of the batches since the last step. To read a number waits for the device: once a step is enough."""

    def __init__(self, tokens: Callable[[Any], int] = tokens_of) -> None:
        self._of = count_of if tokens is tokens_of else tokens
        self._counts: list[int | Tensor] = []

    def add(self, batch: Any, shared: int = 1) -> None:
        """`shared`: by so many ranks that read the same batch, each of which adds it."""
        count = self._of(batch)
        if shared > 1:
            count = (count // shared).clamp(min=1) if isinstance(count, Tensor) else max(1, count // shared)
        self._counts.append(count)

    def take(self) -> int:
        """What there is, and from now on nothing."""
        counts, self._counts = self._counts, []
        return total(counts)

    def forget(self) -> None:
        self._counts = []


def total(counts: Sequence[SupportsIndex]) -> int:
    """Those on a device are added up there, and read once."""
    there = [count for count in counts if isinstance(count, Tensor)]
    return sum(int(count) for count in counts if not isinstance(count, Tensor)) + int(sum(there))


__all__ = ["NOT_A_LABEL", "TokenCount", "count_of", "tokens_of", "total"]
