"""Robust merging: merges that one outlier cannot spoil, and detection of outliers.

    trimmed     per coordinate the mean without the smallest and the largest value; no weights
    norm-clip   a contribution with more than c times the typical norm is scaled down to that, then merged as usual
    outlier     a contribution with more than OUTLIER_FACTOR times the typical norm is refused, with any merge

All norms above are **normalized**: divided by the square root of the contribution's steps. A late contribution contains
more steps, which does not make it an outlier. In int8 and int4 the norm is the upper bound from the scales, which is
compared with bounds of the same codec. The **typical** norm of a fragment is a moving average over rounds of the median
of each round. Buffers are contributed as values: their norm is not divided, and they are never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from atoll.tensors.codecs import Codec, Scratch, chunk_ranges, ensure_aligned
from atoll.tensors.merge import Accumulator, BufferMean, norm, square_norm
from atoll.tensors.plan import FragmentPlan, named_tensors
from atoll.tensors.sharding import local_tensor

OUTLIER_FACTOR = 100.0
MIN_ROUNDS = 4
"""Merged rounds before outliers are detected: norms grow more than tenfold while the learning rate warms up."""

MAX_NAMED_TENSORS = 3
"""Tensors that one error message names."""

_SHARE = 1.0 / 8.0  # weight of a new round in the moving average


class RunningSums(Protocol):
    """Running sums of one round of one fragment."""

    count: int
    norms: list[float]  # |v| of the contributions, in the order of arrival
    merged_norm: float  # |D| of the last result
    cosine: float | None  # mean over pairs of contributions; None for a single one, or if unknown

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, known_norm: float | None = None
    ) -> None: ...

    def result(self) -> Tensor: ...

    def reset(self) -> None: ...


def make_running_sums(plan: FragmentPlan, p: int, method: str) -> RunningSums:
    if method == "trimmed":
        return TrimmedMean(plan.numel(p))
    return BufferMean(plan.numel(p)) if plan.holds_buffers(p) else Accumulator(plan, p, method)


class NormTracker:
    """Typical norm of the contributions to one fragment. Stored along with the outer optimizer's state.

    >>> tracker = NormTracker()
    >>> for _ in range(MIN_ROUNDS):
    ...     tracker.record_round([1.0, 1.0, 50.0])
    >>> tracker.clip_factor(8.0, 4.0), tracker.clip_factor(3.0, 4.0)
    (0.5, 1.0)
    """

    def __init__(self, of_buffers: bool = False) -> None:
        self._is_for_buffers = of_buffers
        self.rounds = 0
        self.typical_norm = 0.0

    def examine(self, codec: Codec, data: Tensor, numel: int) -> tuple[str | None, float]:
        """Check a contribution and return its norm, like `Codec.examine`.

        Buffers may have any finite values, such as a mask of -1e30, whose squares f32 cannot hold: use f64.
        """
        if not self._is_for_buffers:
            return codec.examine(data, numel)
        norm = float(torch.linalg.vector_norm(codec.decode(data, numel).double()))
        if not math.isfinite(norm):
            return f"not finite: {numel} values of buffers hold NaN or inf", 0.0
        return None, norm

    def normalized_norm(self, norm: float, steps: int) -> float:
        """Return norm / sqrt(steps), or the norm itself for buffers."""
        return norm if self._is_for_buffers else norm / math.sqrt(max(1, steps))

    def record_round(self, normalized_norms: Sequence[float]) -> None:
        """Update the typical norm with the normalized norms of the contributions to a merged round."""
        if not normalized_norms:
            return
        round_median = median(normalized_norms)
        old = self.typical_norm
        self.typical_norm = old + _SHARE * (round_median - old) if self.rounds else round_median
        self.rounds += 1

    @property
    def is_calibrated(self) -> bool:
        return self.rounds >= MIN_ROUNDS and self.typical_norm > 0.0

    def clip_factor(self, normalized_norm: float, clip: float) -> float:
        """Return the clipping factor for a contribution of this normalized norm; 1 if `clip` is 0."""
        if not clip or self._is_for_buffers or not self.is_calibrated or normalized_norm <= clip * self.typical_norm:
            return 1.0
        return clip * self.typical_norm / normalized_norm

    def find_problem(self, normalized_norm: float) -> str | None:
        """Return the reason to refuse a contribution of this normalized norm, or None."""
        if not self.is_calibrated or normalized_norm <= OUTLIER_FACTOR * self.typical_norm:
            return None
        ratio = normalized_norm / self.typical_norm
        comparison = f"{normalized_norm:.3g}, typical {self.typical_norm:.3g}; norm / sqrt(steps)"
        return f"wild: {ratio:.0f} times the typical norm ({comparison})"

    def state_tensor(self) -> Tensor:
        return torch.tensor([self.typical_norm, float(self.rounds)], dtype=torch.float64)

    def load_state_tensor(self, state: Tensor) -> None:
        self.typical_norm, self.rounds = float(state[0]), int(state[1])


class NonFiniteCounts(NamedTuple):
    """Non-finite values of one tensor. `max_finite` is the largest magnitude of its finite values."""

    tensor: str
    kind: str  # parameter or buffer
    numel: int
    nan_count: int
    inf_count: int
    max_finite: float

    @classmethod
    def from_tensor(cls, tensor: str, kind: str, values: Tensor) -> NonFiniteCounts:
        finite = torch.isfinite(values)
        nan = int(torch.isnan(values).sum())
        infinite = values.numel() - int(finite.sum()) - nan
        largest = values.abs()[finite].max() if nan + infinite < values.numel() else 0.0
        return cls(tensor, "buffer" if kind == "buffer" else "parameter", values.numel(), nan, infinite, float(largest))

    def combine(self, more: NonFiniteCounts) -> NonFiniteCounts:
        """Return the counts of both parts of the same tensor."""
        sums = self.numel + more.numel, self.nan_count + more.nan_count, self.inf_count + more.inf_count
        return NonFiniteCounts(self.tensor, self.kind, *sums, max(self.max_finite, more.max_finite))

    def __str__(self) -> str:
        counts = [f"{count} {what}" for count, what in ((self.nan_count, "NaN"), (self.inf_count, "infinite")) if count]
        return f"{self.tensor!r} ({self.kind}): {' and '.join(counts)} of {self.numel} values"


def find_nonfinite_in_fragment(plan: FragmentPlan, p: int, codec: Codec, data: Tensor) -> str:
    """Name the tensors of encoded values that `Codec.examine` refuses."""
    numel, data = plan.numel(p), ensure_aligned(data)
    scratch = Scratch(numel)
    counted: dict[str, NonFiniteCounts] = {}
    for piece, first, last in plan.spans(p):
        for begin, end in chunk_ranges(first // codec.block_size * codec.block_size, last):
            values = scratch.values[: min(-(-end // codec.block_size) * codec.block_size, numel) - begin]
            codec.decode_chunk(data, numel, begin, values, scratch)
            counts = NonFiniteCounts.from_tensor(piece.tensor, piece.kind, values[max(first - begin, 0) : end - begin])
            counted[piece.tensor] = counted[piece.tensor].combine(counts) if piece.tensor in counted else counts
    named = _list_names(counted.values())
    if not named:
        worst = max(counted.values(), key=lambda each: each.max_finite)
        return f"{worst.tensor!r} ({worst.kind}): values up to {worst.max_finite:.3g}, too large to sum their squares"
    return named + (
        f"; counted in blocks of {codec.block_size} values, as {codec.name} encodes them"
        if codec.block_size > 1
        else ""
    )


def find_nonfinite_in_model(model: nn.Module) -> str:
    """Name the tensors with NaN or infinity in this process; empty if all values are finite."""
    named = named_tensors(model).items()
    kinds = {name: "parameter" if isinstance(tensor, nn.Parameter) else "buffer" for name, tensor in named}
    return _list_names(
        NonFiniteCounts.from_tensor(name, kinds[name], local_tensor(tensor).detach()) for name, tensor in named
    )


def _list_names(counted: Iterable[NonFiniteCounts]) -> str:
    names = [str(each) for each in counted if each.nan_count or each.inf_count]
    more = f" and {len(names) - MAX_NAMED_TENSORS} more" if len(names) > MAX_NAMED_TENSORS else ""
    return ", ".join(names[:MAX_NAMED_TENSORS]) + more


class TrimmedMean:
    """Mean per coordinate without the smallest and the largest value; the plain mean of one or two contributions.

    Memory is three f32 per value for any number of contributions: the smallest value, the largest, and the sum of the
    others. A new value is added to the sum if it lies between the two. Otherwise it replaces one of them,
    and the replaced value is added. In both cases the sum grows by the new value, clamped to the old range. Nothing is
    subtracted, so a value of 1e18 leaves no rounding error. Contributions have equal weights: different weights would
    have to be stored with both extremes.
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
        self.cosine: float | None = None  # always None: it does not follow from a trimmed mean

    def reset(self) -> None:
        self.count = 0
        self.norms = []

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, known_norm: float | None = None
    ) -> None:
        codec.check_size(data, self.numel)
        data = ensure_aligned(data)
        if self._scratch is None:
            self._scratch = Scratch(self.numel)
        square = 0.0
        for begin, end in chunk_ranges(0, self.numel):
            values = self._scratch.values[: end - begin]
            codec.decode_chunk(data, self.numel, begin, values, self._scratch)
            if known_norm is None:
                square += square_norm(values)
            if scale != 1.0:
                values.mul_(scale)
            self._add(begin, values)
        self.norms.append(known_norm if known_norm is not None else math.sqrt(square))
        self.count += 1

    def _add(self, begin: int, v: Tensor) -> None:
        chunk = slice(begin, begin + v.numel())
        low, high, between = self._low[chunk], self._high[chunk], self._between[chunk]
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
            raise ValueError("the round has no contributions; call add_encoded before result")
        if self.count < 3:
            self._between.copy_(self._low).lerp_(self._high, 0.5)
        else:
            # Clamp after rounding: the mean of equal values must be that value.
            torch.clamp(self._between.div_(self.count - 2), self._low, self._high, out=self._between)
        self.merged_norm = norm(self._between)
        return self._between
