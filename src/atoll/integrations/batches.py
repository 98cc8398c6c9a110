"""Number of tokens in a batch, which is the weight of a learner in merges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label that transformers and torch's cross entropy ignore."""


def count_tokens(batch: Any) -> int:
    """Count the labels that are not -100, or else the tokens in the attention mask, or else all input ids.

    For a batch without these names (pictures, rows of a table) count its samples. Return at least 1. Labels and masks
    are used only if they have one integer per token, and not one value for each class or head.
    """
    return int(count_tokens_on_device(batch))


def count_tokens_on_device(batch: Any) -> int | Tensor:
    """Count as `count_tokens` does, but return a tensor on the device for a batch there, without waiting for it."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        for name, counted in (
            ("labels", _count_labels),
            ("attention_mask", _count_mask),
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


def _count_mask(mask: Tensor) -> int | Tensor | None:
    """Count a 2-dimensional mask of tokens. Return None for other masks: of pairs of tokens, or added to the scores."""
    is_token_mask = mask.dim() == 2 and (_is_integral(mask) or mask.dtype is torch.bool)
    return _read_on_host((mask != 0).sum()) if is_token_mask else None


def _count_ids(ids: Tensor) -> int:
    return ids.numel()


def _read_on_host(count: Tensor) -> int | Tensor:
    return int(count) if count.device.type == "cpu" else count


def _count_samples(values: list[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0), default=1)


class TokenCounter:
    """Counter of the tokens since the last step. It reads counts once a step, because reading waits for the device."""

    def __init__(self, tokens: Callable[[Any], int] = count_tokens) -> None:
        self._count_batch = count_tokens_on_device if tokens is count_tokens else tokens
        self._counts: list[int | Tensor] = []

    def add(self, batch: Any, shared: int = 1) -> None:
        """Count a batch. `shared`: number of ranks that read the same batch and that all add it."""
        count = self._count_batch(batch)
        if shared > 1:
            count = (count // shared).clamp(min=1) if isinstance(count, Tensor) else max(1, count // shared)
        self._counts.append(count)

    def pop_total(self) -> int:
        """Return the total and reset it."""
        counts, self._counts = self._counts, []
        return sum_counts(counts)

    def reset(self) -> None:
        self._counts = []


def sum_counts(counts: Sequence[SupportsIndex]) -> int:
    """Return the sum. Counts on a device are added up there, and read once."""
    on_device = [count for count in counts if isinstance(count, Tensor)]
    return sum(int(count) for count in counts if not isinstance(count, Tensor)) + int(sum(on_device))


__all__ = ["IGNORE_INDEX", "TokenCounter", "count_tokens_on_device", "count_tokens", "sum_counts"]
