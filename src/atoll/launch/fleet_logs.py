"""What the units of a run have printed, line by line, also over restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.launch.fleet import Fleet

CHUNK_BYTES = 1 << 20
MOST_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""


class Line(NamedTuple):
    unit: str
    text: str


class FleetLogs:
    """`new` gives what has come since it was called last. `tail`: of each unit so many lines the first time."""

    def __init__(self, fleet: Fleet, units: Sequence[str], tail: int | None = None) -> None:
        self.fleet = fleet
        self.units = units
        self.problems: dict[str, str] = {}  # by unit: why it cannot be read
        self._tail = tail
        self._files: dict[tuple[str, Path], _File] = {}
        self._has_begun = False

    def new(self) -> Iterator[Line]:
        for unit in self.units:
            lines = self._lines(unit)
            if not self._has_begun and self._tail is not None:
                lines = iter(deque(lines, maxlen=self._tail))
            for text in lines:
                yield Line(unit, text)
        self._has_begun = True

    def rest(self) -> Iterator[Line]:
        """What was printed without an end of the line."""
        for (unit, _), file in self._files.items():
            if file.begun:
                yield Line(unit, file.begun.decode(errors="replace"))
                file.begun = b""

    def _lines(self, unit: str) -> Iterator[str]:
        try:
            paths = self.fleet.logs(unit)
        except Exception as wrong:  # an engine that cannot be asked has its own kinds
            self.problems[unit] = str(wrong) or type(wrong).__name__
            return
        self.problems.pop(unit, None)
        for path in paths:
            yield from self._files.setdefault((unit, path), _File(path)).lines()


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.begun = b""  # a line without its end

    def lines(self) -> Iterator[str]:
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # somebody has emptied it
                self.offset, self.begun = 0, b""
            if size == self.offset:
                return
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *whole, self.begun = (self.begun + chunk).split(b"\n")
                    if len(self.begun) > MOST_LINE_BYTES:
                        whole, self.begun = [*whole, self.begun], b""
                    for line in whole:
                        yield line.decode(errors="replace").rstrip("\r")
        except FileNotFoundError:
            return


__all__ = ["FleetLogs", "Line"]
