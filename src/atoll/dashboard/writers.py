"""The curves of a run in other people's formats: TensorBoard, Weights & Biases, CSV.

Every curve is one of the page's (`curves.catalogue`). A point has its time and the tokens that the run had trained by
then; tokens are the step of formats that have one.
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
"""Curves without points of their own, and throughput: they are taken at even distances."""

LATE_SERIES = "loss.published"
"""Its first point is known at the end, from the report."""

EVEN_POINTS = 600
NO_LIMIT = 10_000_000  # points: none is thinned out
POLL_INTERVAL_S = 2.0
REPORT_TIMEOUT_S = 20.0
"""After the end of a run that is followed: its model is still being judged."""


class Point(NamedTuple):
    at: float  # on the run's clock
    wall: float  # unix time; of a simulated run the run's clock
    tokens: int
    value: float


class Writer(Protocol):
    """Where curves go. Points of one name come in the order of time, but for one that is known late."""

    def write(self, name: str, points: Sequence[Point]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Exporter:
    """Gives writers what they have not got yet."""

    def __init__(self, picture: RunHistory, writers: Sequence[Writer]) -> None:
        self.points = 0
        self.names: set[str] = set()
        self._picture = picture
        self._writers = writers
        self._done: dict[str, float] = {}  # by name: the time of the newest point
        self._late: set[float] = set()  # times of points of LATE
        self._spacing_s = 1.0

    def export(self) -> None:
        """All that is new in the picture."""
        picture = self._picture
        self._spacing_s = max(self._spacing_s, (picture.newest_at - picture.started_at) / EVEN_POINTS)
        for series in list_series(picture):
            points = self._new(series.name)
            if not points:
                continue
            self.names.add(series.name)
            self.points += len(points)
            for writer in self._writers:
                writer.write(series.name, points)
        for writer in self._writers:
            writer.flush()

    def _new(self, name: str) -> list[Point]:
        picture = self._picture
        done = self._done.get(name)
        count = NO_LIMIT
        is_even = name in EVENLY_SAMPLED or name.startswith("throughput")
        if is_even:
            span_s = picture.newest_at - (done if done is not None else picture.started_at)
            count = math.floor(span_s / self._spacing_s)
            if not count:
                return []
        found = compute_curve(picture, name, begin=done, points=count)
        wall0 = picture.wall0 or 0.0
        points = [
            Point(at, wall0 + at, round(picture.tokens_until(at)), value)
            for at, value in zip(found.x, found.y, strict=True)
            if (at not in self._late if name == LATE_SERIES else done is None or at > done)
        ]
        if name == LATE_SERIES:
            self._late.update(point.at for point in points)
        elif points:
            self._done[name] = picture.newest_at if is_even else points[-1].at
        return points


def export(
    picture: RunHistory,
    writers: Sequence[Writer],
    follow: bool = False,
    on_poll: Callable[[Exporter], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Exporter:
    """Everything there is; with `follow` until the run is over. Writers are closed in any case."""
    exporter = Exporter(picture, writers)
    over_at: float | None = None
    try:
        while True:
            while picture.update():
                pass
            exporter.export()
            if on_poll is not None:
                on_poll(exporter)
            if not follow:
                return exporter
            if over_at is None and is_finished(picture):
                over_at = time.monotonic()
            if over_at is not None and _has_report(picture, over_at):
                return exporter
            wait(POLL_INTERVAL_S)
    finally:
        for writer in writers:
            writer.close()


def is_finished(picture: RunHistory) -> bool:
    return picture.simulated or picture.is_finished


def _has_report(picture: RunHistory, over_at: float) -> bool:
    """Only runs of `atoll train` get a report: whoever was started with `atoll syncer` never does."""
    return picture.files.report is not None or picture.simulated or time.monotonic() > over_at + REPORT_TIMEOUT_S


def create_empty_folder(folder: Path, option: str) -> Path:
    """Curves are not added to others: every point would be there twice."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{option}: {folder} is not empty; remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tag(name: str) -> str:
    """
    >>> _tag("loss.learner.3"), _tag("goodput")
    ('loss/learner.3', 'goodput')
    """
    return name.replace(".", "/", 1)


class CsvWriter:
    """One file per curve: at, wall, tokens, value."""

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
    """An event file, by TensorBoard's own writer: it is loaded in a fifth of the time that torch's takes."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as missing:
            raise ValueError(f"--tensorboard needs {missing.name}: pip install 'atoll[tensorboard]'") from None
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
"""Nothing leaves the machine, whatever this user's settings are. `wandb sync` sends it, should somebody want that."""


class WandbWriter:
    """An offline run below `folder`/wandb."""

    def __init__(self, folder: Path, run: Path, config: dict[str, Any] | None) -> None:
        os.environ.update(OFFLINE_ENVIRONMENT)  # read when it is imported
        try:
            import wandb
        except ImportError as missing:
            raise ValueError(f"--wandb needs {missing.name}: pip install 'atoll[wandb]'") from None
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
        """It writes by itself."""

    def close(self) -> None:
        self._run.finish()
