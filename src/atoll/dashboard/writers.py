"""Export of the curves of a run to TensorBoard, Weights & Biases and CSV.

The curves are those of the dashboard page (`curves.list_series`). A point has its time and the tokens that the run had
trained by then. Formats with a step use the tokens as the step.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from atoll.dashboard.curves import compute_curve, list_series
from atoll.dashboard.run_history import RunHistory

EVENLY_SAMPLED = ("goodput", "loss", "bytes_up", "bytes_down")
"""Curves that are computed and not recorded. They, and throughput, are sampled at even intervals."""

LATE_SERIES = "loss.published"
"""Series whose first point comes from the report at the end of the run."""

EVEN_POINTS = 600
NO_LIMIT = 10_000_000  # points; disables downsampling
POLL_INTERVAL_S = 2.0
REPORT_TIMEOUT_S = 20.0
"""Maximum wait for the report after the end of a followed run: the evaluation of its model takes a while."""


class Point(NamedTuple):
    """Value of a curve at one time."""

    at: float  # on the run's clock
    wall: float  # unix time; for a simulated run, time on the run's clock
    tokens: int
    value: float


class Writer(Protocol):
    """Destination of curves. Points of one name arrive in time order, except those of LATE_SERIES."""

    def write(self, name: str, points: Sequence[Point]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Exporter:
    """Sends new points of all curves to writers."""

    def __init__(self, history: RunHistory, writers: Sequence[Writer]) -> None:
        self.points = 0
        self.names: set[str] = set()
        self._history = history
        self._writers = writers
        self._exported_until: dict[str, float] = {}  # time of the newest exported point, by name
        self._late: set[float] = set()  # times of exported points of LATE_SERIES
        self._spacing_s = 1.0

    def export(self) -> None:
        """Send all points that are new since the last call."""
        history = self._history
        self._spacing_s = max(self._spacing_s, (history.newest_at - history.started_at) / EVEN_POINTS)
        for series in list_series(history):
            points = self._new_points(series.name)
            if not points:
                continue
            self.names.add(series.name)
            self.points += len(points)
            for writer in self._writers:
                writer.write(series.name, points)
        for writer in self._writers:
            writer.flush()

    def _new_points(self, name: str) -> list[Point]:
        history = self._history
        exported_until = self._exported_until.get(name)
        count = NO_LIMIT
        is_even = name in EVENLY_SAMPLED or name.startswith("throughput")
        if is_even:
            span_s = history.newest_at - (exported_until if exported_until is not None else history.started_at)
            count = math.floor(span_s / self._spacing_s)
            if not count:
                return []
        found = compute_curve(history, name, begin=exported_until, points=count)
        wall0 = history.wall0 or 0.0
        points = [
            Point(at, wall0 + at, round(history.tokens_until(at)), value)
            for at, value in zip(found.x, found.y, strict=True)
            if (at not in self._late if name == LATE_SERIES else exported_until is None or at > exported_until)
        ]
        if name == LATE_SERIES:
            self._late.update(point.at for point in points)
        elif points:
            self._exported_until[name] = history.newest_at if is_even else points[-1].at
        return points


def export(
    history: RunHistory,
    writers: Sequence[Writer],
    follow: bool = False,
    on_poll: Callable[[Exporter], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Exporter:
    """Export all curves of a run and close the writers.

    Args:
        follow: whether to continue until the run has ended.
        on_poll: called after every export.
        wait: sleeps between two exports; tests replace it.
    """
    exporter = Exporter(history, writers)
    finished_at: float | None = None
    try:
        while True:
            while history.update():
                pass
            exporter.export()
            if on_poll is not None:
                on_poll(exporter)
            if not follow:
                return exporter
            if finished_at is None and is_finished(history):
                finished_at = time.monotonic()
            if finished_at is not None and _has_report(history, finished_at):
                return exporter
            wait(POLL_INTERVAL_S)
    finally:
        for writer in writers:
            writer.close()


def is_finished(history: RunHistory) -> bool:
    """Return whether the run has ended. A simulated run always has."""
    return history.simulated or history.is_finished


def _has_report(history: RunHistory, finished_at: float) -> bool:
    """Return whether the report exists or is no longer expected. Only `atoll train` writes one, not `atoll syncer`."""
    return history.files.report is not None or history.simulated or time.monotonic() > finished_at + REPORT_TIMEOUT_S


def create_empty_folder(folder: Path, option: str) -> Path:
    """Create the folder. Raise ValueError if it has files: a second export would duplicate every point."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{option}: {folder} is not empty; remove it or give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tag(name: str) -> str:
    """Return the tag of a series in TensorBoard and Weights & Biases.

    >>> _tag("loss.learner.3"), _tag("goodput")
    ('loss/learner.3', 'goodput')
    """
    return name.replace(".", "/", 1)


class CsvWriter:
    """Writes one CSV file per curve with the columns at, wall, tokens, value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, name: str, points: Sequence[Point]) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = open(self._folder / f"{name}.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115
            csv.writer(file, lineterminator="\n").writerow(Point._fields)
        rows = ((f"{p.at:.3f}", f"{p.wall:.3f}", p.tokens, f"{p.value:.9g}") for p in points)
        csv.writer(file, lineterminator="\n").writerows(rows)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TensorBoardWriter:
    """Writes an event file with TensorBoard's own writer, which imports five times as fast as the writer of torch."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ValueError(f"--tensorboard needs {error.name}: pip install 'atoll[tensorboard]'") from None
        self._event, self._summary = Event, Summary
        self._file = EventFileWriter(str(folder))

    def write(self, name: str, points: Sequence[Point]) -> None:
        for point in points:
            value = self._summary.Value(tag=_tag(name), simple_value=point.value)
            event = self._event(wall_time=point.wall, step=point.tokens, summary=self._summary(value=[value]))
            self._file.add_event(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


OFFLINE_ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "OTEL_SDK_DISABLED": "true",
}
"""Environment in which wandb sends nothing, whatever the user's settings are. `wandb sync` uploads the run later."""


class WandbWriter:
    """Writes an offline run in `folder`/wandb."""

    def __init__(self, folder: Path, run: Path, config: dict[str, Any] | None) -> None:
        os.environ.update(OFFLINE_ENVIRONMENT)  # wandb reads them when it is imported
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb needs {error.name}: pip install 'atoll[wandb]'") from None
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run = wandb.init(
            mode="offline", dir=str(folder), project="atoll", name=run.absolute().name, config=config, settings=settings
        )
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="tokens")

    def write(self, name: str, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({_tag(name): point.value, "tokens": point.tokens, "at": point.at})

    def flush(self) -> None:
        """Do nothing: wandb flushes its file."""

    def close(self) -> None:
        self._run.finish()
