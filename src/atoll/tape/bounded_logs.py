"""Bounded logs of steps, merges and metrics: the newest rows are exact, and rows twice as old are half as dense.

    level 2        level 1        level 0
    4 entries each, 2 entries each, 1 entry each      oldest first, as the rows of a log lie

When a level has more than `keep` rows, its older half is joined pairwise and becomes the newest part of the next level.
So a log of n entries has at most about `keep` times log2(n / keep) rows.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

EXACT_ROWS = 2048
"""Rows of a level. A month of steps of one second are some 20,000 rows."""

TYPICAL_STEP_WINDOW = 32
"""Of a process, of which the median says what is usual."""

Span = tuple[float, float]


class Downsampler:
    """Says which rows of a log to join, and where exact rows begin. The log owns the rows."""

    __slots__ = ("_exact_rows", "_sizes", "joined")

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        """`keep`: a multiple of 4; None keeps everything."""
        assert keep is None or keep % 4 == 0, f"{keep} rows cannot be halved twice"
        self._exact_rows = keep
        self._sizes = [0]
        self.joined = 0  # number of rows at the beginning that stand for more than one entry each

    def add(self) -> list[tuple[int, int]]:
        """Count a new row. Return slices of even length whose rows to join pairwise, one after the other."""
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
        """Return the slice that joins as many rows as possible; an odd row at the end stays."""
        rows = sum(self._sizes)
        self._sizes = [rows % 2, rows // 2]
        self.joined = rows // 2
        return 0, rows - rows % 2


def _doubles() -> array[float]:
    return array("d")


class StepLog:
    """The steps of one process, as sums up to each row. A row is a step or several: joining changes no sum."""

    __slots__ = ("_downsampler", "begins", "ends", "steps", "stepped_s", "stalled_s", "tokens")

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        self.begins, self.ends = _doubles(), _doubles()
        self.stepped_s = _doubles()
        self.stalled_s = _doubles()  # within steps, beyond what they usually take
        self.tokens = _doubles()
        self.steps: array[int] = array("q")
        self._downsampler = Downsampler(keep)

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, begin: float, end: float, stood_s: float, steps: int, tokens: float) -> None:
        last = len(self.ends) - 1
        self.stepped_s.append(end - begin - stood_s + (self.stepped_s[last] if last >= 0 else 0.0))
        self.stalled_s.append(stood_s + (self.stalled_s[last] if last >= 0 else 0.0))
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
            for place in range(len(times)):
                times[place] += by_s

    # ---------------------------------------------------------------------------------------------------- sums

    def stepped_until(self, at: float) -> float:
        # Of a step under way: first the usual work, then what was more than usual.
        return self._until(self.stepped_s, at, lambda row, whole: min(at - self.begins[row], whole))

    def stalled_until(self, at: float) -> float:
        return self._until(self.stalled_s, at, lambda row, whole: max(0.0, whole - (self.ends[row] - at)))

    def tokens_until(self, at: float) -> float:
        """Return the tokens of steps that had ended."""
        return self._until(self.tokens, at)

    def steps_until(self, at: float) -> int:
        return int(self._until(self.steps, at))

    def _until(
        self, sums: array[float] | array[int], at: float, of_row: Callable[[int, float], float] | None = None
    ) -> float:
        """Return a sum up to this moment; within a joined row, as if its steps had been equally long.

        `of_row`: the part of a row under way, by its number and its whole amount; None: nothing before it has ended.
        """
        row = bisect_right(self.ends, at)
        before = sums[row - 1] if row else 0
        if row == len(self.ends) or at <= self.begins[row]:
            return before
        whole = sums[row] - before
        if row < self._downsampler.joined:
            return before + whole * ((at - self.begins[row]) / (self.ends[row] - self.begins[row]))
        return before + of_row(row, whole) if of_row is not None else before

    # ---------------------------------------------------------------------------------------------------- durations

    def durations(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[tuple[float, int]]:
        """Yield step times and how many steps took about that long, for rows that lie wholly in the span."""
        for row in range(bisect_right(self.ends, begin), bisect_right(self.ends, end)):
            if self.begins[row] >= begin:
                yield self._each_s(row), self._count(row)

    def usual_s(self, at: float) -> float | None:
        """Return the median of the last steps before this moment."""
        done = bisect_right(self.ends, at)
        return median(map(self._each_s, range(max(0, done - TYPICAL_STEP_WINDOW), done))) if done else None

    def _count(self, row: int) -> int:
        return self.steps[row] - (self.steps[row - 1] if row else 0)

    def _each_s(self, row: int) -> float:
        return (self.stepped_s[row] - (self.stepped_s[row - 1] if row else 0.0)) / max(1, self._count(row))


class MergeRow(NamedTuple):
    """One durable version, or several old ones as their mean. `alive` and `asked` are of the sealed round."""

    at: float
    epoch: int
    fragment: int | None  # None: of several
    version: int
    alive: float
    pulled: float
    merged: float  # contributions
    contributors: tuple[tuple[int, int], ...]  # learner and incarnation
    weights: tuple[float, ...]  # of each, as shares of the whole
    steps: float  # of a contributor
    waited_s: float  # of the grace window
    slack_s: float | None  # that there was for it; None where none was opened
    merge_count: int = 1  # so many merges

    def combined_with(self, other: MergeRow) -> MergeRow:
        count = self.merge_count + other.merge_count

        def mean(one: float, two: float) -> float:
            return (one * self.merge_count + two * other.merge_count) / count

        weights: dict[tuple[int, int], float] = {}
        for each in (self, other):
            for who, weight in zip(each.contributors, each.weights, strict=True):
                weights[who] = weights.get(who, 0.0) + weight * each.merge_count / count
        waits = [each for each in (self, other) if each.slack_s is not None]
        whole = sum(each.merge_count for each in waits)
        return MergeRow(
            other.at,  # that it had happened by then is true of both
            other.epoch,
            None,
            other.version,
            mean(self.alive, other.alive),
            mean(self.pulled, other.pulled),
            mean(self.merged, other.merged),
            tuple(weights),
            tuple(weights.values()),
            mean(self.steps, other.steps),
            sum(each.waited_s * each.merge_count for each in waits) / whole if waits else 0.0,
            sum((each.slack_s or 0.0) * each.merge_count for each in waits) / whole if waits else None,
            count,
        )


class MergeLog:
    """The merges of one syncer process. Their number stays exact."""

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        self.rows: list[MergeRow] = []
        self.contributions = 0  # in all of them
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
        """Return the number of merges by then."""
        row = bisect_right(self.rows, at, key=_at)
        return self._counts[row - 1] if row else 0

    def between(self, begin: float, end: float) -> Iterator[MergeRow]:
        """After `begin`, up to `end`."""
        for row in range(bisect_right(self.rows, begin, key=_at), bisect_right(self.rows, end, key=_at)):
            yield self.rows[row]

    def newest(self, at: float, count: int) -> list[MergeRow]:
        """Return the last `count` merges before this moment, newest first; more where they are joined."""
        end = bisect_right(self.rows, at, key=_at)
        if not end:
            return []
        first = bisect_left(self._counts, self._counts[end - 1] - count + 1, 0, end)
        return self.rows[first:end][::-1]


def _at(merge: MergeRow) -> float:
    return merge.at


class TimeSeries:
    """Values over time, at times that never fall."""

    __slots__ = ("_is_cumulative", "_downsampler", "at", "value")

    def __init__(self, is_cumulative: bool = False, keep: int | None = EXACT_ROWS) -> None:
        """`grows`: values are a running sum, of which the later of two rows stands for both; else the mean does."""
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
        found = self.value[index - 1] if index else math.nan
        return found if found == found else None

    def rate(self, begin: float, end: float) -> float | None:
        """Return the growth per second of a running sum."""
        last = bisect_right(self.at, end)
        first = bisect_right(self.at, begin)
        if last - first < 2:
            return None
        took_s = self.at[last - 1] - self.at[first]
        return (self.value[last - 1] - self.value[first]) / took_s if took_s > 0 else None


def _mean(one: float, other: float) -> float:
    """Return the mean of those that are numbers."""
    if one == one and other == other:
        return (one + other) / 2
    return one if one == one else other
