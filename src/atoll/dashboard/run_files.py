"""Files next to the tapes in a run directory: metrics, faults, logs, the configuration, the report."""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from atoll.logs import extract_message
from atoll.store.metrics_files import MetricsReader
from atoll.tape.bounded_logs import EXACT_ROWS, TimeSeries

LOG_TAIL_CHARS = 240
"""Number of characters shown from the end of the log of an exited process."""

MAX_READ_BYTES = 4 * 2**20

TimeResolver: TypeAlias = Callable[[int, int, int | None, float], float]
"""Function of learner, incarnation, step and recorded time that returns the time on the run's clock."""


class FaultEntry(NamedTuple):
    """Exit of a process that the supervisor observed or injected."""

    at: float  # on the run's clock
    process: str
    cause: str
    planned: bool


class JsonTail:
    """Reader of a growing file of JSON lines. It continues where the last read ended and skips invalid lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._partial_line = b""

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were appended since the last call."""
        while True:
            try:
                with open(self.path, "rb") as file:
                    file.seek(self._offset)
                    chunk = file.read(MAX_READ_BYTES)
            except OSError:
                return
            if not chunk:
                return
            self._offset += len(chunk)
            *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # truncated when the disk was full
                if isinstance(found, dict):
                    yield found


COUNTER_METRICS = ("bytes_up", "bytes_down", "boundary_s", "waited_s")
"""Metrics of a learner that are totals since its process started."""

GAUGE_METRICS = ("loss", "tokens_per_s")


class RunFiles:
    """Files of a run that are written once or rarely."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.founded_at: float | None = None  # unix time at 0 on the run's clock
        self.config: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        self.faults: list[FaultEntry] = []
        self._faults = JsonTail(run / "faults.jsonl")
        self.refresh()

    def refresh(self) -> None:
        """Read the files that exist by now and new lines of faults.jsonl."""
        if self.founded_at is None:
            stored = _read_json_object(self.run / "store" / "run.json")
            value = stored.get("value") if stored else None
            founded_at = value.get("founded_at") if isinstance(value, dict) else None
            if isinstance(founded_at, int | float):
                self.founded_at = float(founded_at)
        if self.config is None:
            self.config = _read_json_object(self.run / "config.json")
        if self.report is None:
            self.report = _read_json_object(self.run / "report.json")
        if self.founded_at is not None:
            for line in self._faults.new_lines():
                try:
                    at = float(line["at"]) - self.founded_at
                    fault = FaultEntry(at, str(line["who"]), str(line["what"]), bool(line.get("planned")))
                except (KeyError, TypeError, ValueError):
                    continue
                self.faults.append(fault)

    def log_tail(self, process: str) -> str | None:
        """Return the end of the log of a process: of `learner 3`, that of logs/learner-3.log."""
        log = self.run / "logs" / f"{process.replace(' ', '-')}.log"
        lines = read_tail(log, 4 * LOG_TAIL_CHARS).decode(errors="replace").strip().splitlines()
        return " / ".join(map(extract_message, lines[-2:]))[-LOG_TAIL_CHARS:] or None


class MetricsHistory:
    """Time series of metrics/learner-N.jsonl, eval.jsonl and syncer.jsonl, on the run's clock."""

    def __init__(
        self, files: RunFiles, resolve_time: TimeResolver | None = None, keep: int | None = EXACT_ROWS
    ) -> None:
        """Prepare to read the metrics of a run.

        Args:
            resolve_time: corrects the time of a line from the tapes, because clocks of hosts differ.
            keep: number of exact points per series, as in `RunTimeline`.
        """
        self._files, self._run = files, files.run
        run = files.run
        self._resolve_time = resolve_time
        self._keep = keep
        self._tails: dict[Path, JsonTail] = {}
        self._eval = JsonTail(run / "metrics" / "eval.jsonl")
        self._syncer = MetricsReader(run)
        self._pending_lines: Iterator[None] | None = None  # lines that the last call has not read for lack of time
        self._starts: dict[tuple[int, str], tuple[int, float, float]] = {}
        self.series: dict[str, TimeSeries] = {}
        self.lines_read = 0

    def read_new(self, until: float = math.inf) -> bool:
        """Read new lines until this time of the monotonic clock. Return whether more remain."""
        if self._pending_lines is None:
            self._files.refresh()
            if self._files.founded_at is None:
                return False
            self._pending_lines = self._lines(self._files.founded_at)
        for _ in self._pending_lines:
            self.lines_read += 1
            if self.lines_read % 64 == 0 and time.monotonic() > until:
                return True
        self._pending_lines = None
        return False

    def _lines(self, founded_at: float) -> Iterator[None]:
        """Add new lines one at a time, so that a month of metrics is not read in one call."""
        for path in sorted((self._run / "metrics").glob("learner-*.jsonl")):
            tail = self._tails.setdefault(path, JsonTail(path))
            for line in tail.new_lines():
                self._add_learner_line(line, founded_at)
                yield
        for line in self._eval.new_lines():
            if isinstance(line.get("at"), int | float):
                self._add("eval.loss", line["at"] - founded_at, line.get("loss"))
            yield
        with suppress(OSError):  # curves matter less than the other parts of the view
            for line in self._syncer.read_lines():
                self._add_syncer_line(line)
                yield

    def _add_learner_line(self, line: dict[str, Any], founded_at: float) -> None:
        try:
            at, learner, start = float(line["at"]) - founded_at, int(line["learner"]), int(line["start"])
        except (KeyError, TypeError, ValueError):
            return
        if self._resolve_time is not None:
            step = line.get("step")
            at = self._resolve_time(learner, start, step if isinstance(step, int) else None, at)
        self._add_learner(learner, start, at, line)

    def _add_learner(self, learner: int, start: int, at: float, line: dict[str, Any]) -> None:
        for name in GAUGE_METRICS:
            self._add(f"{name}.learner.{learner}", at, line.get(name))
        for name in COUNTER_METRICS:
            value = line.get(name)
            if isinstance(value, int | float):
                self._add(f"{name}.learner.{learner}", at, self._sum((learner, name), start, value))

    def _add_syncer_line(self, line: dict[str, Any]) -> None:
        """Add a metric of the syncer, or of a learner on another host, which reports to the syncer."""
        at, kind = line.get("at"), line.get("kind")
        if not isinstance(at, int | float):
            return
        if kind == "learner" and type(line.get("learner")) is int:
            learner, start = line["learner"], line.get("incarnation", 1)
            if self._run.joinpath("metrics", f"learner-{learner}.jsonl").exists():
                return  # its own file has more metrics
            self._add_learner(learner, start, at, line)
        elif kind == "merge":
            for name, value in line.items():
                if name not in ("at", "wall", "kind", "fragment", "version") and isinstance(value, int | float):
                    self._add(f"merge.{name}", at, value)
            for learner, norm in (line.get("norms") or {}).items():
                self._add(f"norm.learner.{learner}", at, norm)

    def _sum(self, key: tuple[int, str], start: int, value: float) -> float:
        """Return the total over all processes of a learner. Each process counts from zero."""
        current, before, newest = self._starts.get(key, (start, 0.0, 0.0))
        if current != start:
            before += newest
        self._starts[key] = start, before, value
        return before + value

    def _add(self, name: str, at: float, value: Any) -> None:
        """Add a point. A value that is not a number becomes a gap, so that the previous value is not shown for that
        time."""
        if value is None and name not in self.series:
            return
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = TimeSeries(name.partition(".")[0] in COUNTER_METRICS, self._keep)
        is_finite = isinstance(value, int | float) and math.isfinite(value)
        series.add(at, float(value) if is_finite else math.nan)

    def is_nan(self, name: str, learner: int, at: float) -> bool:
        """Return whether the metric was measured by that time and its newest value is not a number."""
        series = self.series.get(f"{name}.learner.{learner}")
        return series is not None and bisect_right(series.at, at) > 0 and series.value_at(at) is None

    def value(self, name: str, learner: int, at: float) -> float | None:
        """Return the newest value of a learner's metric at a time on the run's clock."""
        series = self.series.get(f"{name}.learner.{learner}")
        return series.value_at(at) if series is not None else None

    def rate(self, name: str, learner: int, begin: float, end: float) -> float | None:
        """Return the growth per second of a learner's counter between two times."""
        series = self.series.get(f"{name}.learner.{learner}")
        return series.rate(begin, end) if series is not None else None


def read_tail(path: Path, size: int) -> bytes:
    """Return at most the last `size` bytes of a file, or none if it is unreadable."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except OSError:
        return b""


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, incomplete or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
