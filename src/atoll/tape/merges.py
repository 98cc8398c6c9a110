"""The merges of one syncer's process: of late each for itself, joined where they are old. Their number stays exact."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from atoll.tape.downsampling import KEEP, Levels


class Merge(NamedTuple):
    """One durable version, or several of the past as one, with means. `alive` and `asked` are of the sealed round."""

    at: float
    epoch: int
    fragment: int | None  # None: of several
    version: int
    alive: float
    asked: float
    merged: float  # contributions
    contributors: tuple[tuple[int, int], ...]  # learner and incarnation
    weights: tuple[float, ...]  # of each, as shares of the whole
    steps: float  # of a contributor
    waited_s: float  # of the grace window
    slack_s: float | None  # that there was for it; None where none was opened
    stands_for: int = 1  # so many merges

    def with_next(self, other: Merge) -> Merge:
        count = self.stands_for + other.stands_for

        def mean(one: float, two: float) -> float:
            return (one * self.stands_for + two * other.stands_for) / count

        weights: dict[tuple[int, int], float] = {}
        for each in (self, other):
            for who, weight in zip(each.contributors, each.weights, strict=True):
                weights[who] = weights.get(who, 0.0) + weight * each.stands_for / count
        waits = [each for each in (self, other) if each.slack_s is not None]
        whole = sum(each.stands_for for each in waits)
        return Merge(
            other.at,  # that it had happened by then is true of both
            other.epoch,
            None,
            other.version,
            mean(self.alive, other.alive),
            mean(self.asked, other.asked),
            mean(self.merged, other.merged),
            tuple(weights),
            tuple(weights.values()),
            mean(self.steps, other.steps),
            sum(each.waited_s * each.stands_for for each in waits) / whole if waits else 0.0,
            sum((each.slack_s or 0.0) * each.stands_for for each in waits) / whole if waits else None,
            count,
        )


class MergeLog:
    def __init__(self, keep: int | None = KEEP) -> None:
        self.rows: list[Merge] = []
        self.contributions = 0  # in all of them
        self._counts: array[int] = array("q")  # merges up to each row
        self._levels = Levels(keep)

    @property
    def total(self) -> int:
        return self._counts[-1] if self._counts else 0

    def add(self, merge: Merge) -> None:
        self._counts.append(self.total + merge.stands_for)
        self.contributions += len(merge.contributors)
        self.rows.append(merge)
        for first, stop in self._levels.add():
            pairs = zip(self.rows[first:stop:2], self.rows[first + 1 : stop : 2], strict=True)
            self.rows[first:stop] = [one.with_next(other) for one, other in pairs]
            self._counts[first:stop] = self._counts[first + 1 : stop : 2]

    def until(self, at: float) -> int:
        """So many had been made by then."""
        row = bisect_right(self.rows, at, key=_at)
        return self._counts[row - 1] if row else 0

    def between(self, begin: float, end: float) -> Iterator[Merge]:
        """After `begin`, up to `end`."""
        for row in range(bisect_right(self.rows, begin, key=_at), bisect_right(self.rows, end, key=_at)):
            yield self.rows[row]

    def newest(self, at: float, count: int) -> list[Merge]:
        """The last so many before this moment, newest first; where they are joined, some more."""
        end = bisect_right(self.rows, at, key=_at)
        if not end:
            return []
        first = bisect_left(self._counts, self._counts[end - 1] - count + 1, 0, end)
        return self.rows[first:end][::-1]


def _at(merge: Merge) -> float:
    return merge.at
