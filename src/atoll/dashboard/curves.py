"""Curves: every figure of a run over time or tokens, thinned out to what a picture can show."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from atoll.dashboard.run_history import RunHistory
from atoll.tape.bounded_logs import MergeRow, TimeSeries

GRID_POINTS = 600
"""Moments at which figures are taken that have none of their own."""


class Series(NamedTuple):
    name: str
    group: str
    label: str
    unit: str


class Curve(NamedTuple):
    x: Sequence[float]
    y: Sequence[float]


MERGE_METRICS: dict[str, tuple[str, str, str]] = {
    "delta_norm": ("norms", "merged delta", ""),
    "step_norm": ("norms", "published step", ""),
    "momentum_norm": ("momentum", "outer momentum", ""),
    "cosine": ("cosine", "between learners' deltas", ""),
    "quantisation_error": ("quantisation", "of the published update", "share"),
}
"""Of metrics/syncer.jsonl, by their names there."""

MERGE_SERIES: dict[str, tuple[str, str, str, Callable[[MergeRow], float | None]]] = {
    "merges.contributions": ("merges", "merged", "learners", lambda m: m.merged),
    "merges.pulled": ("merges", "pulled", "learners", lambda m: m.pulled),
    "merges.alive": ("merges", "alive", "learners", lambda m: m.alive),
    "merges.steps": ("effective-h", "steps since the last merge", "steps", lambda m: m.steps),
    "grace.used": ("grace", "grace used", "s", lambda m: m.waited_s if m.slack_s is not None else None),
    "grace.slack": ("grace", "slack", "s", lambda m: m.slack_s),
}


def list_series(picture: RunHistory) -> list[Series]:
    """What there is of this run."""
    found = [Series("goodput", "goodput", "goodput of all islands", "share")]
    found.append(Series("throughput", "throughput", "all islands", "tokens/s"))
    learners = picture.learners()
    found += [Series(f"throughput.learner.{n}", "throughput", f"learner {n}", "tokens/s") for n in learners]
    for name, (group, label, unit, _) in MERGE_SERIES.items():
        found.append(Series(name, group, label, unit))
    known = picture.metrics.series
    if any(f"loss.learner.{n}" in known for n in learners):
        found.append(Series("loss", "loss", "mean of the islands", "nats"))
    if _published_loss(picture).x:
        found.append(Series("loss.published", "loss", "published model, held-out text", "nats"))
    found += [
        Series(f"loss.learner.{n}", "loss", f"learner {n}", "nats") for n in learners if f"loss.learner.{n}" in known
    ]
    for name, label in (("bytes_up", "up"), ("bytes_down", "down")):
        if any(f"{name}.learner.{n}" in known for n in learners):
            found.append(Series(name, "bytes", label, "bytes/s"))
    for name, (group, label, unit) in MERGE_METRICS.items():
        if f"merge.{name}" in known:
            found.append(Series(f"merge.{name}", group, label, unit))
    for n in learners:
        if f"norm.learner.{n}" in known:
            found.append(Series(f"norm.learner.{n}", "norms", f"learner {n}'s delta", ""))
    return found


def compute_curve(
    picture: RunHistory,
    name: str,
    x: str = "time",
    begin: float | None = None,
    end: float | None = None,
    points: int = 600,
) -> Curve:
    """One of the catalogue; KeyError where there is none of this name. `x` is time or tokens."""
    begin = picture.started_at if begin is None else max(begin, picture.started_at)
    end = picture.newest_at if end is None else min(end, picture.newest_at)
    found = downsample(_full_curve(picture, name, begin, end), points)
    if x == "time":
        return found
    return Curve([picture.tokens_until(at) for at in found.x], found.y)


def _full_curve(picture: RunHistory, name: str, begin: float, end: float) -> Curve:
    if name in MERGE_SERIES:
        figure = MERGE_SERIES[name][3]
        merges = sorted(picture.merges(begin, end), key=lambda merge: merge.at)
        return _curve((m.at, figure(m)) for m in merges)
    if name == "goodput":
        return _sample_on_grid(begin, end, picture.goodput)
    if name == "throughput":
        return _throughput(picture, None, begin, end)
    found = re.fullmatch(r"throughput\.learner\.([0-9]{1,9})", name)
    if found is not None:
        return _throughput(picture, int(found[1]), begin, end)
    if name in ("bytes_up", "bytes_down"):
        return _bytes(picture, name, begin, end)
    if name == "loss.published":
        return _published_loss(picture)
    if name == "loss":
        return _sample_on_grid(begin, end, lambda at: _mean_loss(picture, at))
    series = picture.metrics.series[name]
    return _slice_series(series, begin, end)


def _slice_series(series: TimeSeries, begin: float, end: float) -> Curve:
    first, last = bisect_left(series.at, begin), bisect_right(series.at, end)
    pairs = zip(series.at[first:last], series.value[first:last], strict=True)
    return _curve((at, value if value == value else None) for at, value in pairs)


def _grid_times(begin: float, end: float) -> Iterator[float]:
    if end > begin:
        for index in range(GRID_POINTS + 1):
            yield begin + (end - begin) * index / GRID_POINTS


def _sample_on_grid(begin: float, end: float, figure: Callable[[float], float | None]) -> Curve:
    return _curve((at, figure(at)) for at in _grid_times(begin, end))


def _curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Without those of which nothing is known."""
    pairs = [(at, value) for at, value in points if value is not None]
    return Curve([at for at, _ in pairs], [value for _, value in pairs])


def _throughput(picture: RunHistory, learner: int | None, begin: float, end: float) -> Curve:
    span_s = max(picture.rate_window_s(end), (end - begin) / GRID_POINTS)

    def done(at: float) -> float:
        return picture.tokens_until(at) if learner is None else picture.progress(learner, at)[1]

    first = picture.started_at

    def rate(at: float) -> float | None:
        since = max(at - span_s, first)
        return (done(at) - done(since)) / (at - since) if at > since else None

    return _sample_on_grid(begin, end, rate)


def _bytes(picture: RunHistory, name: str, begin: float, end: float) -> Curve:
    span_s = max(picture.rate_window_s(end), 2 * (end - begin) / GRID_POINTS)

    return _sample_on_grid(begin, end, lambda at: picture.rate(name, at, span_s))


def _mean_loss(picture: RunHistory, at: float) -> float | None:
    losses = [picture.metrics.value("loss", learner, at) for learner in picture.learners()]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known else None


def _published_loss(picture: RunHistory) -> Curve:
    """Measured before the run and after it; in between by `eval` lines where the job evaluates on the way."""
    report = picture.files.report
    series = picture.metrics.series.get("eval.loss")
    at = list(series.at) if series is not None else []
    loss = list(series.value) if series is not None else []
    since = picture.training_started_at
    if report is not None and since is not None:
        before, after = report.get("eval_loss_before"), report.get("eval_loss")
        if isinstance(before, float):
            at, loss = [since, *at], [before, *loss]
        if isinstance(after, float):
            at, loss = [*at, picture.ended_at], [*loss, after]
    return Curve(at, loss)


def downsample(found: Curve, points: int) -> Curve:
    """At most so many points: means of neighbours."""
    count = len(found.x)
    if count <= points:
        return Curve(list(found.x), list(found.y))
    x, y = [], []
    for index in range(points):
        first, last = index * count // points, (index + 1) * count // points
        x.append(sum(found.x[first:last]) / (last - first))
        y.append(sum(found.y[first:last]) / (last - first))
    return Curve(x, y)


def to_csv(picture: RunHistory, names: Sequence[str], x: str) -> str:
    """All points of some curves, one per line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["series", x, "value"])
    for name in names:
        found = compute_curve(picture, name, x, points=1_000_000)
        digits = "{:.3f}" if x == "time" else "{:.0f}"
        rows = zip(found.x, found.y, strict=True)
        writer.writerows((name, digits.format(at), f"{value:.6g}") for at, value in rows)
    return out.getvalue()
