"""Virtual time: a heap of things to do, in order of time and then of their scheduling."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Engine:
    """Runs callables at virtual times.

    >>> engine = Engine()
    >>> seen = []
    >>> engine.at(2.0, seen.append, "b")
    ... engine.at(1.0, seen.append, "a")
    >>> engine.run_until(5.0)
    >>> seen, engine.now
    (['a', 'b'], 2.0)
    """

    __slots__ = ("_heap", "_serial", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, when: float, what: Callable[..., Any], *args: Any) -> None:
        self._serial = serial = self._serial + 1
        heappush(self._heap, (when if when > self.now else self.now, serial, what, args))

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> None:
        """Everything that is due by `end`; between two things `stop` may end it early."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, what, args = heappop(heap)
            self.events += 1
            what(*args)
            if stop is not None and stop():
                return
