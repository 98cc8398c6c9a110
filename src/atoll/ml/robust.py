"""Merges that one wild contribution cannot spoil, and what counts as wild.

    trimmed     per coordinate the mean of what lies between the smallest and the largest value; no weights
    norm-clip   a contribution that is larger than c times the usual is scaled down to that, then merged as otherwise
    wild        one that is WILD times larger than the usual is refused, whatever the merge is

The **size** of a contribution is its norm over the square root of its steps: one that comes late has more steps in it,
and is no wilder for that. Of int8 and int4 the norm is the bound that their scales give; it is compared only with
others of its kind. The **usual** size of a fragment is a moving average over rounds of the median of each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from atoll.ml.codecs import Codec, Scratch, aligned, chunks
from atoll.ml.merge import Accumulator, norm, squares
from atoll.ml.plan import FragmentPlan

WILD = 100.0
LEAST_ROUNDS = 4
"""Merged before anything is judged: while the learning rate rises, sizes rise by more than tenfold."""

_SHARE = 1.0 / 8.0  # of a new round in the moving average


class Sums(Protocol):
    """What one round of one fragment is merged with."""

    count: int
    norms: list[float]  # |v| of the contributions as they came
    merged_norm: float  # |D| of the last result
    cosine: float | None  # mean over pairs of contributions; None: of one alone, or not known

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, size: float | None = None
    ) -> None: ...

    def result(self) -> Tensor: ...

    def reset(self) -> None: ...


def sums_of(plan: FragmentPlan, p: int, how: str) -> Sums:
    return Trimmed(plan.numel(p)) if how == "trimmed" else Accumulator(plan, p, how)


class UsualSize:
    """Of the contributions to one fragment. It outlives the process beside the outer optimizer's state.

    >>> usual = UsualSize()
    >>> for _ in range(LEAST_ROUNDS):
    ...     usual.note([1.0, 1.0, 50.0])
    >>> usual.scale(8.0, 4.0), usual.scale(3.0, 4.0)
    (0.5, 1.0)
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.size = 0.0

    def note(self, sizes: Sequence[float]) -> None:
        """A round was merged with contributions of these sizes."""
        if not sizes:
            return
        middle = median(sizes)
        self.size = middle if not self.rounds else self.size + _SHARE * (middle - self.size)
        self.rounds += 1

    @property
    def is_known(self) -> bool:
        return self.rounds >= LEAST_ROUNDS and self.size > 0.0

    def scale(self, size: float, clip: float) -> float:
        """By which a contribution is multiplied; `clip` 0: as it is."""
        if not clip or not self.is_known or size <= clip * self.size:
            return 1.0
        return clip * self.size / size

    def problem(self, size: float) -> str | None:
        """Why a contribution of this size is refused."""
        if not self.is_known or size <= WILD * self.size:
            return None
        times = size / self.size
        return f"wild: {times:.0f} times the usual size ({size:.3g} against {self.size:.3g}, norm over root of steps)"

    def state(self) -> Tensor:
        return torch.tensor([self.size, float(self.rounds)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        self.size, self.rounds = float(state[0]), int(state[1])


def size_of(norm: float, steps: int) -> float:
    return norm / math.sqrt(max(1, steps))


class Trimmed:
    """Per coordinate: the mean without the smallest and the largest value; of two their mean, of one itself.

    Takes three f32 per value, whatever the number of contributions: the smallest, the largest, and the sum of those in
    between. A new value either lies between the two and joins the sum, or takes the place of one of them, which joins
    instead: in both cases the sum grows by the new value, held between the two. Nothing is ever subtracted, so a value
    of 1e18 leaves no rounding behind. Weights would have to be kept with both: all contributions count alike.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._low = torch.empty(numel)
        self._high = torch.empty(numel)
        self._between = torch.empty(numel)
        self._scratch: Scratch | None = None
        self.count = 0
        self.norms: list[float] = []
        self.merged_norm = 0.0
        self.cosine: float | None = None  # the middle of sorted values is no sum: it says nothing of pairs

    def reset(self) -> None:
        self.count = 0
        self.norms = []

    def add(self, delta: Tensor, weight: float, scale: float = 1.0) -> None:
        for begin, end in chunks(0, self.numel):
            self._take(begin, delta[begin:end] * scale if scale != 1.0 else delta[begin:end])
        self.norms.append(norm(delta))
        self.count += 1

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, size: float | None = None
    ) -> None:
        if data.numel() != codec.size(self.numel):
            raise ValueError(
                f"{self.numel} values are {codec.size(self.numel)} bytes in {codec.name}, got {data.numel()}"
            )
        data = aligned(data)
        if self._scratch is None:
            self._scratch = Scratch(self.numel)
        square = 0.0
        for begin, end in chunks(0, self.numel):
            values = self._scratch.values[: end - begin]
            codec.read(data, self.numel, begin, values, self._scratch)
            if size is None:
                square += squares(values)
            if scale != 1.0:
                values.mul_(scale)
            self._take(begin, values)
        self.norms.append(size if size is not None else math.sqrt(square))
        self.count += 1

    def _take(self, begin: int, v: Tensor) -> None:
        place = slice(begin, begin + v.numel())
        low, high, between = self._low[place], self._high[place], self._between[place]
        if self.count == 0:
            low.copy_(v)
            high.copy_(v)
            between.zero_()
            return
        if self.count > 1:
            between.add_(torch.clamp(v, low, high))
        torch.minimum(low, v, out=low)
        torch.maximum(high, v, out=high)

    def result(self) -> Tensor:
        if not self.count:
            raise ValueError("nothing was added to this round; there is no mean of no contributions")
        if self.count < 3:
            self._between.copy_(self._low).lerp_(self._high, 0.5)
        else:
            self._between.div_(self.count - 2)
        self.merged_norm = norm(self._between)
        return self._between
