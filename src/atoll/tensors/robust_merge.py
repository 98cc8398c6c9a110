"""Merges that one wild contribution cannot spoil, and what counts as wild.

    trimmed     per coordinate the mean of what lies between the smallest and the largest value; no weights
    norm-clip   a contribution that is larger than c times the usual is scaled down to that, then merged as otherwise
    wild        one that is WILD times larger than the usual is refused, whatever the merge is

The **size** of a contribution is its norm over the square root of its steps: one that comes late has more steps in it,
and is no wilder for that. Of int8 and int4 the norm is the bound that their scales give; it is compared only with
others of its kind. The **usual** size of a fragment is a moving average over rounds of the median of each round.
Buffers are contributed as values: their size is the norm alone, and they are never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from atoll.tensors.codecs import Codec, Scratch, aligned, chunks
from atoll.tensors.merge import Accumulator, BufferMean, norm, squares
from atoll.tensors.plan import FragmentPlan, named_tensors
from atoll.tensors.sharding import local_of

WILD = 100.0
LEAST_ROUNDS = 4
"""Merged before anything is judged: while the learning rate rises, sizes rise by more than tenfold."""

MAX_NAMED = 3
"""Tensors that one sentence names."""

_SHARE = 1.0 / 8.0  # of a new round in the moving average


class RunningSums(Protocol):
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


def sums_of(plan: FragmentPlan, p: int, how: str) -> RunningSums:
    if how == "trimmed":
        return Trimmed(plan.numel(p))
    return BufferMean(plan.numel(p)) if plan.holds_buffers(p) else Accumulator(plan, p, how)


class NormTracker:
    """Of the contributions to one fragment. It outlives the process beside the outer optimizer's state.

    >>> usual = NormTracker()
    >>> for _ in range(LEAST_ROUNDS):
    ...     usual.note([1.0, 1.0, 50.0])
    >>> usual.scale(8.0, 4.0), usual.scale(3.0, 4.0)
    (0.5, 1.0)
    """

    def __init__(self, of_buffers: bool = False) -> None:
        self._of_buffers = of_buffers
        self.rounds = 0
        self.size = 0.0

    def examine(self, by: Codec, data: Tensor, numel: int) -> tuple[str | None, float]:
        """Return `Codec.examine` of a contribution. Buffers may be any finite numbers, such as a mask of -1e30: they
        are not squared and summed in f32."""
        if not self._of_buffers:
            return by.examine(data, numel)
        found = float(torch.linalg.vector_norm(by.decode(data, numel).double()))
        if not math.isfinite(found):
            return f"not finite: {numel} values of buffers hold NaN or inf", 0.0
        return None, found

    def size_of(self, norm: float, steps: int) -> float:
        """Return the size of a contribution with this norm."""
        return norm if self._of_buffers else norm / math.sqrt(max(1, steps))

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
        if not clip or self._of_buffers or not self.is_known or size <= clip * self.size:
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


class Unfit(NamedTuple):
    """Values of one tensor that cannot be merged. `largest` is the largest magnitude among the finite ones."""

    tensor: str
    kind: str  # parameter or buffer
    values: int
    nan: int
    infinite: int
    largest: float

    @classmethod
    def of(cls, tensor: str, kind: str, values: Tensor) -> Unfit:
        finite = torch.isfinite(values)
        nan = int(torch.isnan(values).sum())
        infinite = values.numel() - int(finite.sum()) - nan
        largest = values.abs()[finite].max() if nan + infinite < values.numel() else 0.0
        return cls(tensor, "buffer" if kind == "buffer" else "parameter", values.numel(), nan, infinite, float(largest))

    def plus(self, more: Unfit) -> Unfit:
        """Of more values of the same tensor."""
        sums = self.values + more.values, self.nan + more.nan, self.infinite + more.infinite
        return Unfit(self.tensor, self.kind, *sums, max(self.largest, more.largest))

    def __str__(self) -> str:
        found = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        return f"{self.tensor!r} ({self.kind}): {' and '.join(found)} of {self.values} values"


def unfit_in_fragment(plan: FragmentPlan, p: int, by: Codec, data: Tensor) -> str:
    """Name the tensors of encoded values that `Codec.examine` refuses."""
    numel, data = plan.numel(p), aligned(data)
    scratch = Scratch(numel)
    counted: dict[str, Unfit] = {}
    for piece, first, last in plan.spans(p):
        for begin, end in chunks(first // by.block * by.block, last):
            values = scratch.values[: min(-(-end // by.block) * by.block, numel) - begin]
            by.read(data, numel, begin, values, scratch)
            found = Unfit.of(piece.tensor, piece.kind, values[max(first - begin, 0) : end - begin])
            counted[piece.tensor] = counted[piece.tensor].plus(found) if piece.tensor in counted else found
    named = _named(counted.values())
    if not named:
        worst = max(counted.values(), key=lambda each: each.largest)
        return f"{worst.tensor!r} ({worst.kind}): values up to {worst.largest:.3g}, too large to sum their squares"
    return named + (f"; counted in blocks of {by.block} values, as {by.name} encodes them" if by.block > 1 else "")


def unfit_in_model(model: nn.Module) -> str:
    """Name the tensors that hold NaN or infinity in this process; empty where all values are finite."""
    named = named_tensors(model).items()
    kinds = {name: "parameter" if isinstance(held, nn.Parameter) else "buffer" for name, held in named}
    return _named(Unfit.of(name, kinds[name], local_of(held).detach()) for name, held in named)


def _named(counted: Iterable[Unfit]) -> str:
    found = [str(each) for each in counted if each.nan or each.infinite]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


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

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, size: float | None = None
    ) -> None:
        codec.check_size(data, self.numel)
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
            # Within the bounds also after rounding: equal values have themselves as their mean.
            torch.clamp(self._between.div_(self.count - 2), self._low, self._high, out=self._between)
        self.merged_norm = norm(self._between)
        return self._between
