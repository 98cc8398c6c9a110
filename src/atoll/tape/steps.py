"""The steps of one process, as sums up to each: exact of late, joined where they are old. Joining changes no sum."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from statistics import median

from atoll.tape.downsampling import KEEP, Levels

Span = tuple[float, float]


def _doubles() -> array[float]:
    return array("d")


class StepLog:
    """A row is a step, or several of them one after the other. Sums are those up to the end of the row."""

    __slots__ = ("_levels", "begins", "ends", "steps", "stepped_s", "stood_s", "tokens")

    def __init__(self, keep: int | None = KEEP) -> None:
        self.begins, self.ends = _doubles(), _doubles()
        self.stepped_s = _doubles()
        self.stood_s = _doubles()  # within steps, beyond what they usually take
        self.tokens = _doubles()
        self.steps: array[int] = array("q")
        self._levels = Levels(keep)

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, begin: float, end: float, stood_s: float, steps: int, tokens: float) -> None:
        last = len(self.ends) - 1
        self.stepped_s.append(end - begin - stood_s + (self.stepped_s[last] if last >= 0 else 0.0))
        self.stood_s.append(stood_s + (self.stood_s[last] if last >= 0 else 0.0))
        self.tokens.append(tokens + (self.tokens[last] if last >= 0 else 0.0))
        self.steps.append(steps + (self.steps[last] if last >= 0 else 0))
        self.begins.append(begin)
        self.ends.append(end)
        for first, stop in self._levels.add():
            self._join(first, stop)

    def halve(self) -> None:
        self._join(*self._levels.halve())

    def _join(self, first: int, stop: int) -> None:
        self.begins[first:stop] = self.begins[first:stop:2]
        self.steps[first:stop] = self.steps[first + 1 : stop : 2]
        for sums in (self.ends, self.stepped_s, self.stood_s, self.tokens):
            sums[first:stop] = sums[first + 1 : stop : 2]

    def shift(self, by_s: float) -> None:
        for times in (self.begins, self.ends):
            for place in range(len(times)):
                times[place] += by_s

    # ---------------------------------------------------------------------------------------------------- sums

    def stepped_until(self, at: float) -> float:
        done = bisect_right(self.ends, at)
        whole = self.stepped_s[done - 1] if done else 0.0
        if done == len(self.ends) or at <= self.begins[done]:
            return whole
        more = self.stepped_s[done] - whole
        if done < self._levels.joined:
            return whole + more * self._part(done, at)
        return whole + min(at - self.begins[done], more)  # first the usual work, then what was more than usual

    def stood_until(self, at: float) -> float:
        done = bisect_right(self.ends, at)
        whole = self.stood_s[done - 1] if done else 0.0
        if done == len(self.ends) or at <= self.begins[done]:
            return whole
        more = self.stood_s[done] - whole
        if done < self._levels.joined:
            return whole + more * self._part(done, at)
        return whole + max(0.0, more - (self.ends[done] - at))

    def tokens_until(self, at: float) -> float:
        """Of steps that were over; within a joined row as if each had been as long."""
        done = bisect_right(self.ends, at)
        whole = self.tokens[done - 1] if done else 0.0
        if done < self._levels.joined and at > self.begins[done]:
            whole += (self.tokens[done] - whole) * self._part(done, at)
        return whole

    def steps_until(self, at: float) -> int:
        done = bisect_right(self.ends, at)
        whole = self.steps[done - 1] if done else 0
        if done < self._levels.joined and at > self.begins[done]:
            whole += int((self.steps[done] - whole) * self._part(done, at))
        return whole

    def _part(self, row: int, at: float) -> float:
        return (at - self.begins[row]) / (self.ends[row] - self.begins[row])

    # ---------------------------------------------------------------------------------------------------- durations

    def durations(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[tuple[float, int]]:
        """Of a step, and how many took about that long: of the rows that lie wholly in a span."""
        for row in range(bisect_right(self.ends, begin), bisect_right(self.ends, end)):
            if self.begins[row] >= begin:
                yield self._each_s(row), self._count(row)

    def usual_s(self, at: float, most: int = 32) -> float | None:
        """The median of the last steps before this moment."""
        done = bisect_right(self.ends, at)
        return median(map(self._each_s, range(max(0, done - most), done))) if done else None

    def _count(self, row: int) -> int:
        return self.steps[row] - (self.steps[row - 1] if row else 0)

    def _each_s(self, row: int) -> float:
        return (self.stepped_s[row] - (self.stepped_s[row - 1] if row else 0.0)) / max(1, self._count(row))
