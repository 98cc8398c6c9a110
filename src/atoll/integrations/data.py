"""Data that goes on where it was: the place of a loader in Atoll's snapshots, and batches of leased samples.

Without leases every island has its own data, and its place is its own to keep:

    loader = StatefulDataLoader(dataset, batch_size=8, shuffle=True)
    batches = epochs(loader)
    with atoll.Learner(model, optimizer, extra_state=lambda: loader_position(loader), run_directory="runs/a") as learner:
        if learner.restored_state is not None:
            restore_position(loader, learner.restored_state)
        while not learner.finished:
            batch = next(batches)
            ...

With leases the run deals out the data, and there is no place to keep: what an island has not trained when it dies is
trained by somebody else.

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

# ------------------------------------------------------------------------------------------------------------- places


def loader_position(loader: Any) -> Any:
    """Where a loader is, as JSON knows it, for `extra_state`: of a StatefulDataLoader of torchdata, an iterable dataset
    of `datasets`, or of anything else that has `state_dict` and `load_state_dict`."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise ValueError(
            f"a {type(loader).__name__} does not know its place, and would begin anew after a restart: use"
            " torchdata's StatefulDataLoader, or let the run deal out the samples (`leased_batches`)"
        )
    return encode_state(
        {"epoch": getattr(_epoch_dataset(loader), "epoch", None), "state": loader.state_dict()}, "the place"
    )


def restore_position(loader: Any, position: Any) -> None:
    """A loader's next iterator goes on at this place. Call it before the first batch is taken."""
    found = decode_state(position)
    if found["epoch"] is not None:
        _epoch_dataset(loader).set_epoch(found["epoch"])
    loader.load_state_dict(found["state"])


def epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch, without end: the run ends the training, not the data.

    ValueError after two epochs without a batch, as of a generator, which ends once: the loop would never end. A loader
    that was restored at the end of an epoch has one.
    """
    empty = 0
    while empty < 2:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
        advance_epoch(loader)
    raise ValueError(
        f"this {type(loader).__name__} has no batch any more: give a loader that can be iterated again, such as a"
        " DataLoader, and a dataset of at least one batch"
    )


def advance_epoch(loader: Any) -> None:
    """Where the dataset numbers its epochs, as those of `datasets` do, the next one begins.

    They must be told. A place belongs to the epoch in which it was kept, and whoever iterates again without another
    number comes back to it: all later epochs would lack what was before that place.
    """
    dataset = _epoch_dataset(loader)
    if dataset is not None:
        dataset.set_epoch(dataset.epoch + 1)


def _epoch_dataset(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", loader)
    return dataset if hasattr(dataset, "set_epoch") and isinstance(getattr(dataset, "epoch", None), int) else None


def encode_state(value: Any, where: str = "the value") -> Any:
    """As JSON: plain values as they are, all else as a list with its kind. Nothing is pickled."""
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
        return [kind, [encode_state(each, f"{where}[{n}]") for n, each in enumerate(value)]]
    if isinstance(value, Mapping):
        return ["dict", [[encode_state(k, where), encode_state(v, f"{where}[{k!r}]")] for k, v in value.items()]]
    raise ValueError(f"{where} is a {type(value).__name__}, which a snapshot cannot keep: give extra_state of your own")


def decode_state(value: Any) -> Any:
    """What was `encode_state`."""
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
    raise ValueError(f"{str(value)[:80]} is no place of a loader: it was not written by loader_position")


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
    """Where the sample lies that is at this place of an epoch: a permutation of `range(size)`, without a table.

    Places are points of a grid of about sqrt(size) by sqrt(size). Each round moves a point along its row or its column
    by a number that follows from the row or column alone, which can be undone: the whole is a bijection of the grid. It
    has a few points too many; whoever lands on one goes on from there, and comes back into the range in the end.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not one of {size}")
    wide = math.isqrt(size - 1) + 1
    high = -(-size // wide)
    key = _mix_bits(_mix_bits(seed & _MASK) ^ (epoch & _MASK))
    while True:
        x, y = position % wide, position // wide
        for turn in range(0, SHUFFLE_ROUNDS, 2):
            x = (x + _mix_bits(key ^ _mix_bits((y << 8) + turn))) % wide
            y = (y + _mix_bits(key ^ _mix_bits((x << 8) + turn + 1))) % high
        position = y * wide + x
        if position < size:
            return position


def _mix_bits(bits: int) -> int:
    """Every bit of 64 depends on every other."""
    bits = (bits + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


@dataclass(eq=False)
class LeasedBatches:
    """Batches of the samples that the run gives to this island, until the run is over."""

    dataset: MapDataset
    learner: SampleSource
    batch_size: int
    seed: int
    collate: Callable[[list[Any]], Any]

    def __post_init__(self) -> None:
        if len(self.dataset) < 1 or self.batch_size < 1:
            raise ValueError(f"{len(self.dataset)} samples in batches of {self.batch_size}: both must be at least 1")

    def __len__(self) -> int:
        """Batches in as many samples as there are. It also keeps trainers from reading ahead (docs/data.md)."""
        return max(1, len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        while numbers := self.learner.take(self.batch_size):
            yield self.collate(self.read_samples(numbers))

    def sample_index(self, number: int) -> int:
        """Which sample of the dataset a number of the run means."""
        epoch, place = divmod(number, len(self.dataset))
        return shuffled_index(place, len(self.dataset), self.seed, epoch)

    def read_samples(self, numbers: tuple[int, ...]) -> list[Any]:
        indices = [self.sample_index(number) for number in numbers]
        together = getattr(self.dataset, "__getitems__", None)  # one read for all, where the dataset can
        return list(together(indices)) if together is not None else [self.dataset[index] for index in indices]


def leased_batches(
    dataset: MapDataset,
    learner: SampleSource,
    batch_size: int,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> LeasedBatches:
    """Batches by `learner.take`: number n is sample `n % N` of the order that `seed` gives to epoch `n // N`.

    All islands give the same seed and the same dataset; then every epoch has every sample once, over all of them. A
    batch is read when it is asked for and counts for the next `learner.step`, so nothing may read ahead.
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
