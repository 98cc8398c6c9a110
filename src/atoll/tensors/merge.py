"""Merge the contributions to one round: running weighted sums, in memory that does not grow with their number.

v is a learner's delta, signed as a gradient (old minus new), w its weight.

    average              sum(w v) / sum(w)
    radial-directional   (sum(w |v|) / sum(w)) * unit(sum(w unit(v))),  |.| per piece; zero if the directions cancel

Embeddings are always averaged. A piece is a tensor, or the rows of one that lie in this fragment: a tensor that the
plan cuts has one norm per part. For buffers v is the value itself, and `BufferMean` computes the mean.

The agreement of learners follows from the same sums, without storing contributions. Both merges compute s = sum(f u)
with u = unit(v). f is w |v| in an average and w in a radial merge. As |s|^2 = sum(f^2) + sum over pairs of
2 f_i f_j cos(v_i, v_j),

    mean cosine = (|s|^2 - sum(f^2)) / (sum(f)^2 - sum(f^2)),  each pair counted f_i f_j times
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.tensors.codecs import Codec, Scratch, chunk_ranges, ensure_aligned
from atoll.tensors.plan import FragmentPlan

CANCELLATION_TOLERANCE = 1e-6
"""Directions cancel if |sum(w unit(v))| is at most this share of sum(w): the remainder is rounding noise."""

_EXACT_NORMS = (1e-12, 1e18)  # range in which f32 can hold the squares; other norms are recomputed in f64
_EXACT_SQUARES = (1e-24, 1e36)
_MAX_FACTOR = 1e38  # largest w / |v| that f32 can hold; the direction of a piece with a smaller norm is ignored


@dataclass(slots=True)
class MergeRange:
    """Values [begin, end) of the fragment with the same merge: one radial piece, or consecutive averaged pieces."""

    begin: int
    end: int
    is_radial: bool
    weighted_norms: float = 0.0  # sum(w |v|); radial only
    factors: float = 0.0  # sum(f)
    squared_factors: float = 0.0  # sum(f^2)


def _plan_ranges(plan: FragmentPlan, p: int, method: str) -> list[MergeRange]:
    ranges: list[MergeRange] = []
    for piece, begin, end in plan.spans(p):
        radial = method == "radial" and piece.kind == "weight"
        if ranges and not radial and not ranges[-1].is_radial:
            ranges[-1].end = end
        else:
            ranges.append(MergeRange(begin, end, radial))
    return ranges


def norm(v: Tensor) -> float:
    """Return |v|, also for values whose squares f32 cannot hold."""
    return math.sqrt(sum(_exact_square_norm(v[begin:end]) for begin, end in chunk_ranges(0, v.numel())))


def mean_cosine(sum_norm: float, factors: float, squared_factors: float) -> float | None:
    """Return the mean cosine over pairs of contributions (formula above); None if there is no pair.

    >>> mean_cosine(2.0, 2.0, 2.0), mean_cosine(0.0, 2.0, 2.0), mean_cosine(5.0, 5.0, 25.0)
    (1.0, -1.0, None)
    """
    pairs = factors * factors - squared_factors
    if not pairs > 1e-4 * factors * factors:  # one contribution dominates: the result would be rounding noise
        return None
    return max(-1.0, min(1.0, (sum_norm * sum_norm - squared_factors) / pairs))


def _exact_square_norm(chunk: Tensor) -> float:
    length = float(torch.linalg.vector_norm(chunk))
    if not _EXACT_NORMS[0] < length < _EXACT_NORMS[1]:
        length = float(torch.linalg.vector_norm(chunk.double()))
    return length * length


def square_norm(chunk: Tensor) -> float:
    """Return |chunk|^2 for statistics: a third faster than `_exact_square_norm`, but too inexact for merges."""
    square = float(torch.dot(chunk, chunk))
    return square if _EXACT_SQUARES[0] < square < _EXACT_SQUARES[1] else _exact_square_norm(chunk)


class Accumulator:
    """Running sums of one round of one fragment at the syncer.

    Memory is one f32 per value and one chunk, for any number of contributions. Each contribution costs one pass for
    the norms and one for the sum. Contributions must be finite, because one NaN spoils the sums: call `Codec.examine`
    first.
    """

    def __init__(self, plan: FragmentPlan, p: int, method: str) -> None:
        if method not in ("average", "radial"):
            raise ValueError(f"unknown merge method {method!r}; give average or radial")
        self.numel = plan.numel(p)
        self._sums = torch.empty(self.numel)
        self._ranges = _plan_ranges(plan, p, method)
        self._scratch: Scratch | None = None
        self.merged_norm = 0.0  # |D| of the last result
        self.cosine: float | None = None  # mean over pairs of contributions, of the last result
        self.reset()

    def reset(self) -> None:
        """Start a new round in the same memory."""
        self.count = 0
        self.norms: list[float] = []  # |v| of the contributions, in the order of arrival
        self._first_weight = 1.0
        self._weights = 0.0  # sum(w), relative to the first
        for merge_range in self._ranges:
            merge_range.weighted_norms = merge_range.factors = merge_range.squared_factors = 0.0

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, known_norm: float | None = None
    ) -> None:
        """Add one encoded contribution, without a decoded copy of it.

        A long radial range is decoded twice, chunk by chunk: once for its norm and once for the sum. Compared with a
        decoded copy that is read twice, this is a fifth faster for bf16. int8 and int4 cost more to decode: they are a
        tenth and a fifth slower, but save the memory.

        Args:
            weight: Finite and positive.
            scale: Clipping factor.
            known_norm: Exact norm of the contribution, if it is known.
        """
        codec.check_size(data, self.numel)
        data = ensure_aligned(data)
        w, total = self._relative_weight(weight), 0.0
        known = known_norm if len(self._ranges) == 1 else None  # the norm of all ranges together
        for merge_range in self._ranges:
            parts = list(chunk_ranges(merge_range.begin, merge_range.end))
            v, factor, square = None, w * scale, 0.0
            if merge_range.is_radial:
                for begin, end in parts:
                    v = self._decode(codec, data, begin, end)
                    square += _exact_square_norm(v)
                factor = self._add_direction(merge_range, w, math.sqrt(square), scale)
            for begin, end in parts:
                if v is None or len(parts) > 1:
                    v = self._decode(codec, data, begin, end)
                if not merge_range.is_radial and known is None:
                    square += square_norm(v)  # v is in the cache
                self._add_scaled(begin, v, factor)
            exact = math.sqrt(square) if merge_range.is_radial or known is None else known
            total += self._record_agreement(merge_range, w, exact, scale)
        self._record_contribution(w, total)

    def result(self) -> Tensor:
        """Return the merged delta D. The next contribution overwrites it: use it, then call `reset`."""
        if not self.count:
            raise ValueError("the round has no contributions; call add_encoded before result")
        total, cosines, numel = 0.0, 0.0, 0
        for merge_range in self._ranges:
            part = self._sums[merge_range.begin : merge_range.end]
            if not merge_range.is_radial:
                square = self._divide_by_weights(merge_range)
                length = math.sqrt(square) * self._weights
            else:
                length = norm(part)
                if length <= CANCELLATION_TOLERANCE * self._weights:
                    part.zero_()
                    square = 0.0
                else:
                    part.mul_(merge_range.weighted_norms / self._weights / length)
                    square = (merge_range.weighted_norms / self._weights) ** 2
            total += square
            cosine = mean_cosine(length, merge_range.factors, merge_range.squared_factors)
            if cosine is not None:
                cosines += cosine * part.numel()
                numel += part.numel()
        self.merged_norm = math.sqrt(total)
        self.cosine = cosines / numel if numel else None
        return self._sums

    def _divide_by_weights(self, merge_range: MergeRange) -> float:
        """Divide the sums of a range by the sum of the weights and return the squared norm of the result."""
        square = 0.0
        for begin, end in chunk_ranges(merge_range.begin, merge_range.end):
            part = self._sums[begin:end]
            if self._weights != 1.0:
                part.div_(self._weights)
            square += square_norm(part)
        return square

    def _relative_weight(self, weight: float) -> float:
        """Return the weight relative to the first one: equal weights are exactly 1.0, and their sum is the count."""
        if not (math.isfinite(weight) and weight > 0.0):
            raise ValueError(f"a weight must be finite and positive, this is {weight}")
        if not self.count:
            self._first_weight = weight
        return weight / self._first_weight

    def _record_contribution(self, w: float, square: float) -> None:
        self._weights += w
        self.norms.append(math.sqrt(square))
        self.count += 1

    def _record_agreement(self, merge_range: MergeRange, w: float, length: float, scale: float) -> float:
        """Add one contribution to the sums for the mean cosine of a range (formula above), and return |v|^2."""
        f = w * length * scale if not merge_range.is_radial else w * (length > 0.0)
        merge_range.factors += f
        merge_range.squared_factors += f * f
        return length * length

    def _add_direction(self, merge_range: MergeRange, w: float, length: float, scale: float) -> float:
        """Record the norm of one contribution to a radial range. Return the factor of its values: w / |v|."""
        merge_range.weighted_norms += w * length * scale
        factor = w / length if length else math.inf
        return factor if factor <= _MAX_FACTOR else 0.0

    def _add_scaled(self, begin: int, v: Tensor, factor: float) -> None:
        target = self._sums[begin : begin + v.numel()]
        if self.count:
            target.add_(v, alpha=factor)
        else:  # overwrite the sums of the last round: this saves a pass that sets them to zero
            torch.mul(v, factor, out=target)

    def _decode(self, codec: Codec, data: Tensor, begin: int, end: int) -> Tensor:
        """Return values [begin, end), at most one chunk. The next call overwrites them."""
        if codec.is_lossless:
            return data.view(torch.float32)[begin:end]
        if self._scratch is None:
            self._scratch = Scratch(self.numel)
        first = begin // codec.block_size * codec.block_size
        last = min(-(-end // codec.block_size) * codec.block_size, self.numel)
        out = self._scratch.values[: last - first]
        codec.decode_chunk(data, self.numel, first, out, self._scratch)
        return out[begin - first : end - first]


class BufferMean:
    """Weighted mean of buffers, which are contributed as values. Memory is one f32 per value.

    The mean moves towards each value by the share of its weight: m <- m + (v - m) w / sum(w). The mean of equal values
    is exactly that value, so constants do not drift from merge to merge. The mean of non-negative values is
    non-negative: v - m is at least -m, rounded or not, and so is any share of it. Operations are not fused, because
    fused ones give other bits on other processors.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._mean = torch.empty(numel)
        self._weights = 0.0
        self.merged_norm = 0.0
        self.cosine: float | None = None  # always None: values have no direction
        self.reset()

    def reset(self) -> None:
        """Start a new round in the same memory."""
        self.count = 0
        self.norms: list[float] = []

    def add_encoded(
        self, codec: Codec, data: Tensor, weight: float, scale: float = 1.0, known_norm: float | None = None
    ) -> None:
        """Add the values of one learner. `scale` is ignored: a scaled variance would not be a variance."""
        if not (math.isfinite(weight) and weight > 0.0):
            raise ValueError(f"a weight must be finite and positive, this is {weight}")
        values = codec.decode(data, self.numel)
        self.norms.append(known_norm if known_norm is not None else norm(values))
        if not self.count:
            self._mean.copy_(values)
            self._weights = weight
        else:
            self._weights += weight
            self._mean.add_(values.sub_(self._mean).mul_(weight / self._weights))
        self.count += 1

    def result(self) -> Tensor:
        """Return the mean. The next `add_encoded` overwrites it: use it, then call `reset`."""
        if not self.count:
            raise ValueError("the round has no contributions; call add_encoded before result")
        self.merged_norm = norm(self._mean)
        return self._mean
