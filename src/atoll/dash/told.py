"""What stands beside the tapes in a run's directory: metrics, faults, logs, the configuration, the report."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from atoll.net.logs import sentence_of
from atoll.net.metrics_files import MetricsReader

LAST_WORDS = 240
"""Letters of a log's end that are shown of a process that died."""

MOST_PIECE_BYTES = 4 * 2**20


class Fault(NamedTuple):
    at: float  # on the run's clock
    who: str
    what: str
    planned: bool


class JsonTail:
    """A growing file of JSON lines, read on from where the last look ended. Lines that are none are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                with open(self.path, "rb") as file:
                    file.seek(self._offset)
                    piece = file.read(MOST_PIECE_BYTES)
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


class Track:
    """Figures over time; each at its own times, which only rise."""

    __slots__ = ("at", "value")

    def __init__(self) -> None:
        self.at: array[float] = array("d")
        self.value: array[float] = array("d")

    def add(self, at: float, value: float) -> None:
        if not self.at or at >= self.at[-1]:
            self.at.append(at)
            self.value.append(value)

    def before(self, at: float) -> float | None:
        index = bisect_right(self.at, at)
        found = self.value[index - 1] if index else math.nan
        return found if found == found else None

    def rate(self, begin: float, end: float) -> float | None:
        """Of a sum that grows."""
        last = bisect_right(self.at, end)
        first = bisect_right(self.at, begin)
        if last - first < 2:
            return None
        took_s = self.at[last - 1] - self.at[first]
        return (self.value[last - 1] - self.value[first]) / took_s if took_s > 0 else None


GROWING = ("bytes_up", "bytes_down", "boundary_s", "waited_s")
"""Figures of a learner's lines that are sums since its process began."""

NOW = ("loss", "tokens_per_s")


class Told:
    """The files that are written once or seldom."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.founded_at: float | None = None
        self.config: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        self.faults: list[Fault] = []
        self._faults = JsonTail(run / "faults.jsonl")
        self.look()

    def look(self) -> None:
        if self.founded_at is None:
            stored = _read(self.run / "store" / "run.json")
            value = stored.get("value") if stored else None
            founded_at = value.get("founded_at") if isinstance(value, dict) else None
            if isinstance(founded_at, int | float):
                self.founded_at = float(founded_at)
        if self.config is None:
            self.config = _read(self.run / "config.json")
        if self.report is None:
            self.report = _read(self.run / "report.json")
        if self.founded_at is not None:
            for line in self._faults.new_lines():
                try:
                    at = float(line["at"]) - self.founded_at
                    fault = Fault(at, str(line["who"]), str(line["what"]), bool(line.get("planned")))
                except (KeyError, TypeError, ValueError):
                    continue
                self.faults.append(fault)

    def last_words(self, who: str) -> str | None:
        """The end of a process's log: `learner 3` wrote logs/learner-3.log."""
        try:
            with open(self.run / "logs" / f"{who.replace(' ', '-')}.log", "rb") as file:
                file.seek(max(0, file.seek(0, 2) - 4 * LAST_WORDS))
                data = file.read(4 * LAST_WORDS)
        except OSError:
            return None
        lines = data.decode(errors="replace").strip().splitlines()
        return " / ".join(map(sentence_of, lines[-2:]))[-LAST_WORDS:] or None


class Lines:
    """metrics/learner-3.jsonl of every learner, eval.jsonl and syncer.jsonl beside them, on the run's clock."""

    def __init__(self, told: Told) -> None:
        self._told, self._run = told, told.run
        run = told.run
        self._tails: dict[Path, JsonTail] = {}
        self._eval = JsonTail(run / "metrics" / "eval.jsonl")
        self._syncer = MetricsReader(run)
        self._starts: dict[tuple[int, str], tuple[int, float, float]] = {}
        self.tracks: dict[str, Track] = {}

    def look(self) -> bool:
        """Read what is new; False: nothing."""
        if self._told.founded_at is None:
            self._told.look()
            if self._told.founded_at is None:
                return False
        found = False
        for path in sorted((self._run / "metrics").glob("learner-*.jsonl")):
            tail = self._tails.setdefault(path, JsonTail(path))
            for line in tail.new_lines():
                found = True
                self._take_learner(line, self._told.founded_at)
        for line in self._eval.new_lines():
            found = True
            if isinstance(line.get("at"), int | float):
                self._add("eval.loss", line["at"] - self._told.founded_at, line.get("loss"))
        with suppress(OSError):  # curves are worth less than the rest of the picture
            for line in self._syncer.lines():
                found = True
                self._take_syncer(line)
        return found

    def _take_learner(self, line: dict[str, Any], founded_at: float) -> None:
        try:
            at, learner, start = float(line["at"]) - founded_at, int(line["learner"]), int(line["start"])
        except (KeyError, TypeError, ValueError):
            return
        self._add_learner(learner, start, at, line)

    def _add_learner(self, learner: int, start: int, at: float, line: dict[str, Any]) -> None:
        for name in NOW:
            self._add(f"{name}.learner.{learner}", at, line.get(name))
        for name in GROWING:
            value = line.get(name)
            if isinstance(value, int | float):
                self._add(f"{name}.learner.{learner}", at, self._sum((learner, name), start, value))

    def _take_syncer(self, line: dict[str, Any]) -> None:
        """What the syncer measures itself, and what learners without files here have told it."""
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
        if value is None and name not in self.tracks:
            return
        track = self.tracks.get(name)
        if track is None:
            track = self.tracks[name] = Track()
        fine = isinstance(value, int | float) and math.isfinite(value)
        track.add(at, float(value) if fine else math.nan)

    def is_lost(self, name: str, learner: int, at: float) -> bool:
        """There was a figure, and the newest word of it is no number."""
        track = self.tracks.get(f"{name}.learner.{learner}")
        return track is not None and bisect_right(track.at, at) > 0 and track.before(at) is None

    def value(self, name: str, learner: int, at: float) -> float | None:
        track = self.tracks.get(f"{name}.learner.{learner}")
        return track.before(at) if track is not None else None

    def rate(self, name: str, learner: int, begin: float, end: float) -> float | None:
        track = self.tracks.get(f"{name}.learner.{learner}")
        return track.rate(begin, end) if track is not None else None


def _read(path: Path) -> dict[str, Any] | None:
    """None where it is missing, half written or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
