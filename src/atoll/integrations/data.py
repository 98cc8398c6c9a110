"""Data that resumes at its position: the position of a loader in Atoll's snapshots, and batches of leased samples.

Without leases every learner has its own data, and stores its own position:

    loader = StatefulDataLoader(dataset, batch_size=8, shuffle=True)
    batches = epochs(loader)
    with atoll.Learner(
        model, optimizer, extra_state=lambda: loader_position(loader), run_directory="runs/a"
    ) as learner:
        if learner.restored_state is not None:
            restore_position(loader, learner.restored_state)
        while not learner.finished:
            batch = next(batches)
            ...

With leases the run assigns the samples, and there is no position to store. Samples that a learner has not trained when
it dies are leased to another learner.

    for batch in leased_batches(dataset, learner, batch_size=8): ...
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate

# ---------------------------------------------------------------------------------------------------------- positions


def loader_position(loader: Any) -> Any:
    """Return the position of a loader as JSON, for `extra_state`.

    The loader is a StatefulDataLoader of torchdata, an iterable dataset of `datasets`, or any object that has
    `state_dict` and `load_state_dict`.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise ValueError(
            f"a {type(loader).__name__} cannot save its position, and would restart from the beginning: use torchdata's"
            " StatefulDataLoader, or let the run assign the samples (`leased_batches`)"
        )
    return encode_state(
        {"epoch": getattr(_epoch_dataset(loader), "epoch", None), "state": loader.state_dict()}, "the position"
    )


def restore_position(loader: Any, position: Any) -> None:
    """Let a loader's next iterator resume at this position. Call it before the first batch."""
    stored = decode_state(position)
    if stored["epoch"] is not None:
        _epoch_dataset(loader).set_epoch(stored["epoch"])
    loader.load_state_dict(stored["state"])


def epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch, without end: the run ends the training, not the data.

    Raise ValueError after two epochs without a batch, as from a generator: the loop would never end. One empty epoch is
    normal for a loader that was restored at the end of an epoch.
    """
    empty = 0
    while empty < 2:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
        advance_epoch(loader)
    raise ValueError(
        f"this {type(loader).__name__} has no more batches: pass a loader that can be iterated again, such as a"
        " DataLoader, and a dataset of at least one batch"
    )


def advance_epoch(loader: Any) -> None:
    """Begin the next epoch of a dataset that numbers its epochs, as those of `datasets` do.

    A stored position belongs to the epoch in which it was stored. Without a new number each later iteration would
    return to it, and would lack the samples before that position.
    """
    dataset = _epoch_dataset(loader)
    if dataset is not None:
        dataset.set_epoch(dataset.epoch + 1)


def _epoch_dataset(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", loader)
    return dataset if hasattr(dataset, "set_epoch") and isinstance(getattr(dataset, "epoch", None), int) else None


def encode_state(value: Any, path: str = "the value") -> Any:
    """Encode a value as JSON: plain values directly, others as a list that begins with their kind. Nothing is
    pickled."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape), _to_base85(data)]
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, numpy.ndarray) else "number"
        return [kind, value.dtype.str, list(value.shape), _to_base85(value.tobytes())]
    if isinstance(value, bytes | bytearray):
        return ["bytes", _to_base85(bytes(value))]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [encode_state(each, f"{path}[{n}]") for n, each in enumerate(value)]]
    if isinstance(value, Mapping):
        return ["dict", [[encode_state(k, path), encode_state(v, f"{path}[{k!r}]")] for k, v in value.items()]]
    raise ValueError(f"{path} is a {type(value).__name__}, which a snapshot cannot store: pass your own extra_state")


def decode_state(value: Any) -> Any:
    """Return the value that `encode_state` has encoded."""
    if not isinstance(value, list):
        return value
    match value:
        case ["float", str(text)]:
            return float(text)
        case ["tensor", str(dtype), list(shape), str(text)]:
            data = bytearray(base64.b85decode(text))
            flat = torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0)
            return flat.to(getattr(torch, dtype)).reshape(shape)
        case ["array" | "number" as kind, str(dtype), list(shape), str(text)]:
            array = numpy.frombuffer(base64.b85decode(text), dtype=dtype).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case ["bytes", str(text)]:
            return base64.b85decode(text)
        case ["list", list(parts)]:
            return [decode_state(each) for each in parts]
        case ["tuple", list(parts)]:
            return tuple(decode_state(each) for each in parts)
        case ["dict", list(pairs)]:
            return {decode_state(key): decode_state(each) for key, each in pairs}
    raise ValueError(f"{str(value)[:80]} is not the position of a loader: pass a value from loader_position")


def _to_base85(data: bytes) -> str:
    return base64.b85encode(data).decode("ascii")


# ------------------------------------------------------------------------------------------------------------- leases

SHUFFLE_ROUNDS = 8
_MASK = (1 << 64) - 1


class SampleSource(Protocol):
    """An `atoll.Learner`, or a callback that has one."""

    def take(self, count: int) -> tuple[int, ...]: ...


class MapDataset(Protocol):
    """A dataset of known length whose samples have numbers, such as those of torch and of `datasets`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def shuffled_index(position: int, size: int, seed: int, epoch: int) -> int:
    """Return the index of the sample at this position of an epoch: a permutation of `range(size)`, without a table.

    Positions are points of a grid of about sqrt(size) by sqrt(size). Each round shifts a point along its row or column
    by a number that depends only on the row or column. This can be inverted, so the result is a bijection of the grid.
    A point outside of the range is shuffled again until it is inside (cycle walking).
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not in the range from 0 to {size - 1}")
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    key = _mix_bits(_mix_bits(seed & _MASK) ^ (epoch & _MASK))
    while True:
        x, y = position % columns, position // columns
        for shuffle_round in range(0, SHUFFLE_ROUNDS, 2):
            x = (x + _mix_bits(key ^ _mix_bits((y << 8) + shuffle_round))) % columns
            y = (y + _mix_bits(key ^ _mix_bits((x << 8) + shuffle_round + 1))) % rows
        position = y * columns + x
        if position < size:
            return position


def _mix_bits(bits: int) -> int:
    """Mix 64 bits, so that every bit depends on every other."""
    bits = (bits + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


@dataclass(eq=False)
class LeasedBatches:
    """Batches of the samples that the run leases to this learner, until the run is over."""

    dataset: MapDataset
    learner: SampleSource
    batch_size: int
    seed: int
    collate: Callable[[list[Any]], Any]

    def __post_init__(self) -> None:
        if len(self.dataset) < 1 or self.batch_size < 1:
            raise ValueError(f"{len(self.dataset)} samples in batches of {self.batch_size}: both must be at least 1")

    def __len__(self) -> int:
        """Return the batches of one epoch. A length also prevents trainers from reading ahead (docs/data.md)."""
        return max(1, len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        while numbers := self.learner.take(self.batch_size):
            yield self.collate(self.read_samples(numbers))

    def sample_index(self, number: int) -> int:
        """Return the index in the dataset of a sample number of the run."""
        epoch, position = divmod(number, len(self.dataset))
        return shuffled_index(position, len(self.dataset), self.seed, epoch)

    def read_samples(self, numbers: tuple[int, ...]) -> list[Any]:
        indices = [self.sample_index(number) for number in numbers]
        read_many = getattr(self.dataset, "__getitems__", None)  # one read for all samples, if the dataset has it
        return list(read_many(indices)) if read_many is not None else [self.dataset[index] for index in indices]


def leased_batches(
    dataset: MapDataset,
    learner: SampleSource,
    batch_size: int,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> LeasedBatches:
    """Return batches by `learner.take`: number n is sample `n % N` of the order that `seed` gives to epoch `n // N`.

    All learners must use the same seed and the same dataset. Then every epoch has every sample once, over all learners.
    A batch is read on demand and counts for the next `learner.step`, so nothing may read ahead.
    """
    return LeasedBatches(dataset, learner, batch_size, seed, collate)


__all__ = [
    "LeasedBatches",
    "MapDataset",
    "SampleSource",
    "epochs",
    "restore_position",
    "leased_batches",
    "advance_epoch",
    "loader_position",
    "decode_state",
    "shuffled_index",
    "encode_state",
]
