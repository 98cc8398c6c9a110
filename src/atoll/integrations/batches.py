"""How many tokens a batch trains on: the weight of an island in merges follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""What transformers and torch's cross entropy leave out of the loss."""


def count_tokens(batch: Any) -> int:
    """Labels that are not -100; of a batch without them what the attention mask shows; else all input ids.

    A batch without any of these names (pictures, rows of a table) counts its samples. At least 1: a step was taken.
    Labels and masks count where they speak of tokens: whole numbers, and not a number of each class or for each head.
    """
    return int(count_tokens_on_device(batch))


def count_tokens_on_device(batch: Any) -> int | Tensor:
    """As `count_tokens`. On an accelerator it is a number there, which nobody has waited for yet."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        for name, counted in (
            ("labels", _count_labels),
            ("attention_mask", _count_attended),
            ("input_ids", _count_ids),
        ):
            value = batch[name] if name in batch else None  # noqa: SIM401 - a BatchEncoding has no typed `get`
            found = counted(value) if isinstance(value, Tensor) and value.dim() > 1 else None
            if found is not None:
                return found.clamp(min=1) if isinstance(found, Tensor) else max(1, found)
        return _count_samples(list(batch.values()))
    if isinstance(batch, Tensor):
        return max(1, batch.numel() if not batch.is_floating_point() and batch.dim() > 1 else len(batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        first = next((part for part in batch if isinstance(part, Tensor)), None)
        return count_tokens_on_device(first) if first is not None else max(1, len(batch))
    return 1


def _is_integral(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _count_labels(labels: Tensor) -> int | Tensor | None:
    return _read_on_host((labels != IGNORE_INDEX).sum()) if _is_integral(labels) else None


def _count_attended(mask: Tensor) -> int | Tensor | None:
    """Not of a mask that is added to scores, 0 and minus infinity, nor of one for each pair of tokens."""
    tells = mask.dim() == 2 and (_is_integral(mask) or mask.dtype is torch.bool)
    return _read_on_host((mask != 0).sum()) if tells else None


def _count_ids(ids: Tensor) -> int:
    return ids.numel()


def _read_on_host(count: Tensor) -> int | Tensor:
    return int(count) if count.device.type == "cpu" else count


def _count_samples(values: list[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0), default=1)


class TokenCounter:
    """Tokens of the batches since the last step. To read a number waits for the device: once a step is enough."""

    def __init__(self, tokens: Callable[[Any], int] = count_tokens) -> None:
        self._of = count_tokens_on_device if tokens is count_tokens else tokens
        self._counts: list[int | Tensor] = []

    def add(self, batch: Any, shared: int = 1) -> None:
        """`shared`: by so many ranks that read the same batch, each of which adds it."""
        count = self._of(batch)
        if shared > 1:
            count = (count // shared).clamp(min=1) if isinstance(count, Tensor) else max(1, count // shared)
        self._counts.append(count)

    def pop_total(self) -> int:
        """What there is, and from now on nothing."""
        counts, self._counts = self._counts, []
        return sum_counts(counts)

    def reset(self) -> None:
        self._counts = []


def sum_counts(counts: Sequence[SupportsIndex]) -> int:
    """Those on a device are added up there, and read once."""
    there = [count for count in counts if isinstance(count, Tensor)]
    return sum(int(count) for count in counts if not isinstance(count, Tensor)) + int(sum(there))


__all__ = ["IGNORE_INDEX", "TokenCounter", "count_tokens_on_device", "count_tokens", "sum_counts"]
