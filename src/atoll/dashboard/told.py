"""What stands beside the tapes in a run's directory: metrics, faults, logs, the configuration, the report."""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from atoll.logs import sentence_of
from atoll.store.metrics_files import MetricsReader
from atoll.tape.downsampling import KEEP, Levels

LAST_WORDS = 240
"""Letters of a log's end that are shown of a process that died."""

MOST_PIECE_BYTES = 4 * 2**20

MomentOf: TypeAlias = Callable[[int, int, int | None, float], float]
"""Of a learner, its process, a step of that and what its clock says: when it was."""


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
    """Figures over time; each at its own times, which never fall. Old ones are joined, two and two."""

    __slots__ = ("_grows", "_levels", "at", "value")

    def __init__(self, grows: bool = False, keep: int | None = KEEP) -> None:
        """`grows`: a sum since the beginning, of which the later one stands for both; of others it is the mean."""
        self.at: array[float] = array("d")
        self.value: array[float] = array("d")
        self._grows = grows
        self._levels = Levels(keep)

    def add(self, at: float, value: float) -> None:
        self.at.append(max(at, self.at[-1]) if self.at else at)
        self.value.append(value)
        for first, stop in self._levels.add():
            ones, others = self.value[first:stop:2], self.value[first + 1 : stop : 2]
            self.at[first:stop] = self.at[first + 1 : stop : 2]
            self.value[first:stop] = others if self._grows else array("d", map(_mean, ones, others))

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


def _mean(one: float, other: float) -> float:
    """Of those that are numbers."""
    if one == one and other == other:
        return (one + other) / 2
    return one if one == one else other


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

    def __init__(self, told: Told, moment_of: MomentOf | None = None, keep: int | None = KEEP) -> None:
        """`moment_of`: what tapes know of the time of a line; clocks of hosts may be wrong."""
        self._told, self._run = told, told.run
        run = told.run
        self._moment_of = moment_of
        self._keep = keep
        self._tails: dict[Path, JsonTail] = {}
        self._eval = JsonTail(run / "metrics" / "eval.jsonl")
        self._syncer = MetricsReader(run)
        self._reading: Iterator[None] | None = None  # what the last look has not come to
        self._starts: dict[tuple[int, str], tuple[int, float, float]] = {}
        self.tracks: dict[str, Track] = {}
        self.read = 0  # lines

    def look(self, until: float = math.inf) -> bool:
        """Read what is new, up to this moment of the monotonic clock. True: there is more."""
        if self._reading is None:
            self._told.look()
            if self._told.founded_at is None:
                return False
            self._reading = self._lines(self._told.founded_at)
        for _ in self._reading:
            self.read += 1
            if self.read % 64 == 0 and time.monotonic() > until:
                return True
        self._reading = None
        return False

    def _lines(self, founded_at: float) -> Iterator[None]:
        """One after the other, so that a month of them need not be read at once."""
        for path in sorted((self._run / "metrics").glob("learner-*.jsonl")):
            tail = self._tails.setdefault(path, JsonTail(path))
            for line in tail.new_lines():
                self._take_learner(line, founded_at)
                yield
        for line in self._eval.new_lines():
            if isinstance(line.get("at"), int | float):
                self._add("eval.loss", line["at"] - founded_at, line.get("loss"))
            yield
        with suppress(OSError):  # curves are worth less than the rest of the picture
            for line in self._syncer.lines():
                self._take_syncer(line)
                yield

    def _take_learner(self, line: dict[str, Any], founded_at: float) -> None:
        try:
            at, learner, start = float(line["at"]) - founded_at, int(line["learner"]), int(line["start"])
        except (KeyError, TypeError, ValueError):
            return
        if self._moment_of is not None:
            step = line.get("step")
            at = self._moment_of(learner, start, step if isinstance(step, int) else None, at)
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
            track = self.tracks[name] = Track(name.partition(".")[0] in GROWING, self._keep)
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
