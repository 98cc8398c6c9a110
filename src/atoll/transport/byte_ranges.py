"""Which bytes of a whole are still missing: half-open ranges, apart from each other and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


class Spans:
    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        for begin, end in spans:
            self.add(begin, end)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    def add(self, begin: int, end: int) -> None:
        """Whatever was there of it already stays."""
        if begin >= end:
            return
        apart = []
        for b, e in self._spans:
            if e < begin or end < b:
                apart.append((b, e))
            else:
                begin, end = min(b, begin), max(e, end)
        self._spans = sorted([*apart, (begin, end)])

    def remove(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        left = []
        for b, e in self._spans:
            left += [(x, y) for x, y in ((b, min(e, begin)), (max(b, end), e)) if x < y]
        self._spans = left

    def first(self) -> int:
        """How far they reach from 0 on without a gap."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0

    def holds(self, begin: int, end: int) -> bool:
        """All of it."""
        return any(b <= begin and end <= e for b, e in self._spans)

    def take(self, most: int, least: int = 1) -> Span | None:
        """At most so many bytes of the first that has at least so many; they are removed."""
        for begin, end in self._spans:
            if end - begin >= least:
                end = min(end, begin + most)
                self.remove(begin, end)
                return begin, end
        return None
