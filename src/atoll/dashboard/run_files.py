"""The files beside the tapes in a run's directory: metrics, faults, logs, the configuration, the report."""

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
"""Letters of a log's end that are shown of a process that died."""

MAX_READ_BYTES = 4 * 2**20

TimeResolver: TypeAlias = Callable[[int, int, int | None, float], float]
"""Of a learner, its process, a step of that and what its clock says: when it was."""


class FaultEntry(NamedTuple):
    at: float  # on the run's clock
    process: str
    cause: str
    planned: bool


class JsonTail:
    """A growing file of JSON lines, read on from where the last read ended. Lines that are not JSON are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                with open(self.path, "rb") as file:
                    file.seek(self._offset)
                    piece = file.read(MAX_READ_BYTES)
            except OSError:
                return
            if not piece:
                return
            self._offset += len(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # a full disk has cut it
                if isinstance(found, dict):
                    yield found


COUNTER_METRICS = ("bytes_up", "bytes_down", "boundary_s", "waited_s")
"""Figures of a learner's lines that are sums since its process began."""

GAUGE_METRICS = ("loss", "tokens_per_s")


class RunFiles:
    """The files that are written once or seldom."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.founded_at: float | None = None
        self.config: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        self.faults: list[FaultEntry] = []
        self._faults = JsonTail(run / "faults.jsonl")
        self.refresh()

    def refresh(self) -> None:
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

    def log_tail(self, who: str) -> str | None:
        """The end of a process's log: `learner 3` wrote logs/learner-3.log."""
        log = self.run / "logs" / f"{who.replace(' ', '-')}.log"
        lines = read_tail(log, 4 * LOG_TAIL_CHARS).decode(errors="replace").strip().splitlines()
        return " / ".join(map(extract_message, lines[-2:]))[-LOG_TAIL_CHARS:] or None


class MetricsHistory:
    """metrics/learner-3.jsonl of every learner, eval.jsonl and syncer.jsonl beside them, on the run's clock."""

    def __init__(self, files: RunFiles, moment_of: TimeResolver | None = None, keep: int | None = EXACT_ROWS) -> None:
        """`moment_of`: what tapes know of the time of a line; clocks of hosts may be wrong."""
        self._files, self._run = files, files.run
        run = files.run
        self._moment_of = moment_of
        self._keep = keep
        self._tails: dict[Path, JsonTail] = {}
        self._eval = JsonTail(run / "metrics" / "eval.jsonl")
        self._syncer = MetricsReader(run)
        self._pending_lines: Iterator[None] | None = None  # what the last look has not come to
        self._starts: dict[tuple[int, str], tuple[int, float, float]] = {}
        self.series: dict[str, TimeSeries] = {}
        self.lines_read = 0  # lines

    def read_new(self, until: float = math.inf) -> bool:
        """Read what is new, up to this moment of the monotonic clock. True: there is more."""
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
        """One after the other, so that a month of them need not be read at once."""
        for path in sorted((self._run / "metrics").glob("learner-*.jsonl")):
            tail = self._tails.setdefault(path, JsonTail(path))
            for line in tail.new_lines():
                self._add_learner_line(line, founded_at)
                yield
        for line in self._eval.new_lines():
            if isinstance(line.get("at"), int | float):
                self._add("eval.loss", line["at"] - founded_at, line.get("loss"))
            yield
        with suppress(OSError):  # curves are worth less than the rest of the picture
            for line in self._syncer.read_lines():
                self._add_syncer_line(line)
                yield

    def _add_learner_line(self, line: dict[str, Any], founded_at: float) -> None:
        try:
            at, learner, start = float(line["at"]) - founded_at, int(line["learner"]), int(line["start"])
        except (KeyError, TypeError, ValueError):
            return
        if self._moment_of is not None:
            step = line.get("step")
            at = self._moment_of(learner, start, step if isinstance(step, int) else None, at)
        self._add_learner(learner, start, at, line)

    def _add_learner(self, learner: int, start: int, at: float, line: dict[str, Any]) -> None:
        for name in GAUGE_METRICS:
            self._add(f"{name}.learner.{learner}", at, line.get(name))
        for name in COUNTER_METRICS:
            value = line.get(name)
            if isinstance(value, int | float):
                self._add(f"{name}.learner.{learner}", at, self._sum((learner, name), start, value))

    def _add_syncer_line(self, line: dict[str, Any]) -> None:
        """What the syncer measures itself, and what learners without files here have files it."""
        at, kind = line.get("at"), line.get("kind")
        if not isinstance(at, int | float):
            return
        if kind == "learner" and type(line.get("learner")) is int:
            learner, start = line["learner"], line.get("incarnation", 1)
            if self._run.joinpath("metrics", f"learner-{learner}.jsonl").exists():
                return  # it wrote its own, with more in it
            self._add_learner(learner, start, at, line)
        elif kind == "merge":
            for name, value in line.items():
                if name not in ("at", "wall", "kind", "fragment", "version") and isinstance(value, int | float):
                    self._add(f"merge.{name}", at, value)
            for learner, norm in (line.get("norms") or {}).items():
                self._add(f"norm.learner.{learner}", at, norm)

    def _sum(self, key: tuple[int, str], start: int, value: float) -> float:
        """Over all processes of a learner, each of which counts from nothing."""
        known, before, newest = self._starts.get(key, (start, 0.0, 0.0))
        if known != start:
            before += newest
        self._starts[key] = start, before, value
        return before + value

    def _add(self, name: str, at: float, value: Any) -> None:
        """What is no number leaves a gap: the figure of before must not stand for it."""
        if value is None and name not in self.series:
            return
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = TimeSeries(name.partition(".")[0] in COUNTER_METRICS, self._keep)
        fine = isinstance(value, int | float) and math.isfinite(value)
        series.add(at, float(value) if fine else math.nan)

    def is_nan(self, name: str, learner: int, at: float) -> bool:
        """There was a figure, and the newest word of it is no number."""
        series = self.series.get(f"{name}.learner.{learner}")
        return series is not None and bisect_right(series.at, at) > 0 and series.value_at(at) is None

    def value(self, name: str, learner: int, at: float) -> float | None:
        series = self.series.get(f"{name}.learner.{learner}")
        return series.value_at(at) if series is not None else None

    def rate(self, name: str, learner: int, begin: float, end: float) -> float | None:
        series = self.series.get(f"{name}.learner.{learner}")
        return series.rate(begin, end) if series is not None else None


def read_tail(path: Path, size: int) -> bytes:
    """Return the last bytes of a file, at most so many; none where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except OSError:
        return b""


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """None where it is missing, half written or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
