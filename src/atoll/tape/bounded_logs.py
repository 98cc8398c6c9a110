"""Bounded logs of steps, merges and metrics. The newest rows are exact; rows that are twice as old are half as dense.

    level 2        level 1        level 0
    4 entries each, 2 entries each, 1 entry each      oldest first, as in a log

When a level has more than `keep` rows, its older half is joined pairwise and becomes the newest part of the next level.
A log of n entries has at most about `keep` times log2(n / keep) rows.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

EXACT_ROWS = 2048
"""Number of exact rows. A month of steps of one second needs about 20,000 rows in total."""

TYPICAL_STEP_WINDOW = 32
"""Number of newest steps of a process whose median is its typical step time."""

Span = tuple[float, float]


class Downsampler:
    """Selection of the rows of a log that are joined. The log owns the rows."""

    __slots__ = ("_exact_rows", "_sizes", "joined")

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        """Create a downsampler for this number of exact rows, a multiple of 4; None keeps all rows exact."""
        assert keep is None or keep % 4 == 0, f"keep is {keep}; give a multiple of 4"
        self._exact_rows = keep
        self._sizes = [0]
        self.joined = 0  # number of oldest rows that represent several entries each

    def add(self) -> list[tuple[int, int]]:
        """Count a new row. Return slices of even length whose rows the log must join pairwise, in this order."""
        sizes, keep = self._sizes, self._exact_rows
        sizes[0] += 1
        if keep is None or sizes[0] <= keep:
            return []
        slices, level = [], 0
        while sizes[level] > keep:
            begin = sum(sizes[level + 1 :])
            slices.append((begin, begin + keep // 2))
            sizes[level] -= keep // 2
            if level + 1 == len(sizes):
                sizes.append(0)
            sizes[level + 1] += keep // 4
            level += 1
        self.joined = sum(sizes) - sizes[0]
        return slices

    def halve(self) -> tuple[int, int]:
        """Join as many rows as possible: return their slice. An odd row at the end is not joined."""
        rows = sum(self._sizes)
        self._sizes = [rows % 2, rows // 2]
        self.joined = rows // 2
        return 0, rows - rows % 2


def _doubles() -> array[float]:
    return array("d")


class StepLog:
    """Steps of one process, as cumulative sums. A row represents one or several steps; joining changes no sum."""

    __slots__ = ("_downsampler", "begins", "ends", "steps", "stepped_s", "stalled_s", "tokens")

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        self.begins, self.ends = _doubles(), _doubles()
        self.stepped_s = _doubles()
        self.stalled_s = _doubles()  # part of steps beyond their typical time
        self.tokens = _doubles()
        self.steps: array[int] = array("q")
        self._downsampler = Downsampler(keep)

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, begin: float, end: float, stalled_s: float, steps: int, tokens: float) -> None:
        last = len(self.ends) - 1
        self.stepped_s.append(end - begin - stalled_s + (self.stepped_s[last] if last >= 0 else 0.0))
        self.stalled_s.append(stalled_s + (self.stalled_s[last] if last >= 0 else 0.0))
        self.tokens.append(tokens + (self.tokens[last] if last >= 0 else 0.0))
        self.steps.append(steps + (self.steps[last] if last >= 0 else 0))
        self.begins.append(begin)
        self.ends.append(end)
        for first, stop in self._downsampler.add():
            self._join(first, stop)

    def halve(self) -> None:
        self._join(*self._downsampler.halve())

    def _join(self, first: int, stop: int) -> None:
        self.begins[first:stop] = self.begins[first:stop:2]
        self.steps[first:stop] = self.steps[first + 1 : stop : 2]
        for sums in (self.ends, self.stepped_s, self.stalled_s, self.tokens):
            sums[first:stop] = sums[first + 1 : stop : 2]

    def shift(self, by_s: float) -> None:
        for times in (self.begins, self.ends):
            for row in range(len(times)):
                times[row] += by_s

    # ---------------------------------------------------------------------------------------------------- sums

    def stepped_until(self, at: float) -> float:
        # An unfinished step is first work of the typical length, then a stall.
        return self._until(self.stepped_s, at, lambda row, amount: min(at - self.begins[row], amount))

    def stalled_until(self, at: float) -> float:
        return self._until(self.stalled_s, at, lambda row, amount: max(0.0, amount - (self.ends[row] - at)))

    def tokens_until(self, at: float) -> float:
        """Return the tokens of the steps that had ended."""
        return self._until(self.tokens, at)

    def steps_until(self, at: float) -> int:
        return int(self._until(self.steps, at))

    def _until(
        self, sums: array[float] | array[int], at: float, partial: Callable[[int, float], float] | None = None
    ) -> float:
        """Return a cumulative sum at this time. Joined rows are interpolated linearly.

        Args:
            partial: computes the amount of an unfinished row from its number and its full amount; None: 0.
        """
        row = bisect_right(self.ends, at)
        before = sums[row - 1] if row else 0
        if row == len(self.ends) or at <= self.begins[row]:
            return before
        amount = sums[row] - before
        if row < self._downsampler.joined:
            return before + amount * ((at - self.begins[row]) / (self.ends[row] - self.begins[row]))
        return before + partial(row, amount) if partial is not None else before

    # ---------------------------------------------------------------------------------------------------- durations

    def durations(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[tuple[float, int]]:
        """Yield the mean step time and the number of steps of each row that lies completely in the span."""
        for row in range(bisect_right(self.ends, begin), bisect_right(self.ends, end)):
            if self.begins[row] >= begin:
                yield self._each_s(row), self._count(row)

    def typical_s(self, at: float) -> float | None:
        """Return the median of the last step times before this time."""
        done = bisect_right(self.ends, at)
        return median(map(self._each_s, range(max(0, done - TYPICAL_STEP_WINDOW), done))) if done else None

    def _count(self, row: int) -> int:
        return self.steps[row] - (self.steps[row - 1] if row else 0)

    def _each_s(self, row: int) -> float:
        return (self.stepped_s[row] - (self.stepped_s[row - 1] if row else 0.0)) / max(1, self._count(row))


class MergeRow(NamedTuple):
    """Durable version, or the mean of several old versions. `alive` and `pulled` are from the sealed round."""

    at: float
    epoch: int
    fragment: int | None  # None: several fragments
    version: int
    alive: float
    pulled: float
    merged: float  # number of contributions
    contributors: tuple[tuple[int, int], ...]  # learner and incarnation
    weights: tuple[float, ...]  # share of each contributor
    steps: float  # mean steps of a contribution
    waited_s: float  # time in the grace window
    slack_s: float | None  # available for grace; None without a grace window
    merge_count: int = 1  # number of merges in this row

    def combined_with(self, other: MergeRow) -> MergeRow:
        count = self.merge_count + other.merge_count

        def mean(one: float, two: float) -> float:
            return (one * self.merge_count + two * other.merge_count) / count

        weights: dict[tuple[int, int], float] = {}
        for each in (self, other):
            for contributor, weight in zip(each.contributors, each.weights, strict=True):
                weights[contributor] = weights.get(contributor, 0.0) + weight * each.merge_count / count
        waits = [each for each in (self, other) if each.slack_s is not None]
        wait_count = sum(each.merge_count for each in waits)
        return MergeRow(
            other.at,  # both had happened by this time
            other.epoch,
            None,
            other.version,
            mean(self.alive, other.alive),
            mean(self.pulled, other.pulled),
            mean(self.merged, other.merged),
            tuple(weights),
            tuple(weights.values()),
            mean(self.steps, other.steps),
            sum(each.waited_s * each.merge_count for each in waits) / wait_count if waits else 0.0,
            sum((each.slack_s or 0.0) * each.merge_count for each in waits) / wait_count if waits else None,
            count,
        )


class MergeLog:
    """Merges of one syncer process. Their number stays exact."""

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        self.rows: list[MergeRow] = []
        self.contributions = 0  # contributions in all merges
        self._counts: array[int] = array("q")  # merges up to each row
        self._downsampler = Downsampler(keep)

    @property
    def total(self) -> int:
        return self._counts[-1] if self._counts else 0

    def add(self, merge: MergeRow) -> None:
        self._counts.append(self.total + merge.merge_count)
        self.contributions += len(merge.contributors)
        self.rows.append(merge)
        for first, stop in self._downsampler.add():
            pairs = zip(self.rows[first:stop:2], self.rows[first + 1 : stop : 2], strict=True)
            self.rows[first:stop] = [one.combined_with(other) for one, other in pairs]
            self._counts[first:stop] = self._counts[first + 1 : stop : 2]

    def until(self, at: float) -> int:
        """Return the number of merges until this time."""
        row = bisect_right(self.rows, at, key=_at)
        return self._counts[row - 1] if row else 0

    def between(self, begin: float, end: float) -> Iterator[MergeRow]:
        """Yield the merges after `begin`, up to `end`."""
        for row in range(bisect_right(self.rows, begin, key=_at), bisect_right(self.rows, end, key=_at)):
            yield self.rows[row]

    def newest(self, at: float, count: int) -> list[MergeRow]:
        """Return the last `count` merges before this time, newest first, or more if rows are joined."""
        end = bisect_right(self.rows, at, key=_at)
        if not end:
            return []
        first = bisect_left(self._counts, self._counts[end - 1] - count + 1, 0, end)
        return self.rows[first:end][::-1]


def _at(merge: MergeRow) -> float:
    return merge.at


class TimeSeries:
    """Values over time, at times that never decrease."""

    __slots__ = ("_is_cumulative", "_downsampler", "at", "value")

    def __init__(self, is_cumulative: bool = False, keep: int | None = EXACT_ROWS) -> None:
        """Create a series. Two rows of a cumulative series are joined to the later one, other rows to their mean."""
        self.at: array[float] = array("d")
        self.value: array[float] = array("d")
        self._is_cumulative = is_cumulative
        self._downsampler = Downsampler(keep)

    def add(self, at: float, value: float) -> None:
        self.at.append(max(at, self.at[-1]) if self.at else at)
        self.value.append(value)
        for first, stop in self._downsampler.add():
            ones, others = self.value[first:stop:2], self.value[first + 1 : stop : 2]
            self.at[first:stop] = self.at[first + 1 : stop : 2]
            self.value[first:stop] = others if self._is_cumulative else array("d", map(_mean, ones, others))

    def value_at(self, at: float) -> float | None:
        index = bisect_right(self.at, at)
        value = self.value[index - 1] if index else math.nan
        return None if math.isnan(value) else value

    def rate(self, begin: float, end: float) -> float | None:
        """Return the growth per second of a cumulative series."""
        last = bisect_right(self.at, end)
        first = bisect_right(self.at, begin)
        if last - first < 2:
            return None
        elapsed_s = self.at[last - 1] - self.at[first]
        return (self.value[last - 1] - self.value[first]) / elapsed_s if elapsed_s > 0 else None


def _mean(one: float, other: float) -> float:
    """Return the mean of the values that are not NaN."""
    if one == one and other == other:
        return (one + other) / 2
    return one if one == one else other
