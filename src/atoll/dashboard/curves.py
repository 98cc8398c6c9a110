"""Curves: every metric of a run over time or tokens, downsampled for a chart."""

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
"""Number of evenly spaced samples of a metric that is computed and not recorded."""


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
"""Group, label and unit of each merge metric in metrics/syncer.jsonl."""

MERGE_SERIES: dict[str, tuple[str, str, str, Callable[[MergeRow], float | None]]] = {
    "merges.contributions": ("merges", "merged", "learners", lambda m: m.merged),
    "merges.pulled": ("merges", "pulled", "learners", lambda m: m.pulled),
    "merges.alive": ("merges", "alive", "learners", lambda m: m.alive),
    "merges.steps": ("effective-h", "steps since the last merge", "steps", lambda m: m.steps),
    "grace.used": ("grace", "grace used", "s", lambda m: m.waited_s if m.slack_s is not None else None),
    "grace.slack": ("grace", "slack", "s", lambda m: m.slack_s),
}


def list_series(history: RunHistory) -> list[Series]:
    """Return all series that this run has data for."""
    found = [Series("goodput", "goodput", "goodput of all islands", "share")]
    found.append(Series("throughput", "throughput", "all islands", "tokens/s"))
    learners = history.learners()
    found += [Series(f"throughput.learner.{n}", "throughput", f"learner {n}", "tokens/s") for n in learners]
    for name, (group, label, unit, _) in MERGE_SERIES.items():
        found.append(Series(name, group, label, unit))
    known = history.metrics.series
    if any(f"loss.learner.{n}" in known for n in learners):
        found.append(Series("loss", "loss", "mean of the islands", "nats"))
    if _published_loss(history).x:
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
    history: RunHistory,
    name: str,
    x: str = "time",
    begin: float | None = None,
    end: float | None = None,
    points: int = 600,
) -> Curve:
    """Return one series of `list_series` as a curve of at most `points` points.

    Args:
        name: name of the series. Raise KeyError if the run has no such series.
        x: "time" (seconds on the run's clock) or "tokens" (trained by the whole run).
        begin: start of the interval on the run's clock, by default the start of the run.
        end: end of the interval, by default the newest entry.
    """
    begin = history.started_at if begin is None else max(begin, history.started_at)
    end = history.newest_at if end is None else min(end, history.newest_at)
    found = downsample(_full_curve(history, name, begin, end), points)
    if x == "time":
        return found
    return Curve([history.tokens_until(at) for at in found.x], found.y)


def _full_curve(history: RunHistory, name: str, begin: float, end: float) -> Curve:
    if name in MERGE_SERIES:
        value_of = MERGE_SERIES[name][3]
        merges = sorted(history.merges(begin, end), key=lambda merge: merge.at)
        return _curve((m.at, value_of(m)) for m in merges)
    if name == "goodput":
        return _sample_on_grid(begin, end, history.goodput)
    if name == "throughput":
        return _throughput(history, None, begin, end)
    found = re.fullmatch(r"throughput\.learner\.([0-9]{1,9})", name)
    if found is not None:
        return _throughput(history, int(found[1]), begin, end)
    if name in ("bytes_up", "bytes_down"):
        return _bytes(history, name, begin, end)
    if name == "loss.published":
        return _published_loss(history)
    if name == "loss":
        return _sample_on_grid(begin, end, lambda at: _mean_loss(history, at))
    series = history.metrics.series[name]
    return _slice_series(series, begin, end)


def _slice_series(series: TimeSeries, begin: float, end: float) -> Curve:
    first, last = bisect_left(series.at, begin), bisect_right(series.at, end)
    pairs = zip(series.at[first:last], series.value[first:last], strict=True)
    return _curve((at, value if value == value else None) for at, value in pairs)


def _grid_times(begin: float, end: float) -> Iterator[float]:
    if end > begin:
        for index in range(GRID_POINTS + 1):
            yield begin + (end - begin) * index / GRID_POINTS


def _sample_on_grid(begin: float, end: float, value_at: Callable[[float], float | None]) -> Curve:
    return _curve((at, value_at(at)) for at in _grid_times(begin, end))


def _curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Return the points as a curve, without unknown values."""
    pairs = [(at, value) for at, value in points if value is not None]
    return Curve([at for at, _ in pairs], [value for _, value in pairs])


def _throughput(history: RunHistory, learner: int | None, begin: float, end: float) -> Curve:
    span_s = max(history.rate_window_s(end), (end - begin) / GRID_POINTS)

    def tokens(at: float) -> float:
        return history.tokens_until(at) if learner is None else history.progress(learner, at)[1]

    first = history.started_at

    def rate(at: float) -> float | None:
        since = max(at - span_s, first)
        return (tokens(at) - tokens(since)) / (at - since) if at > since else None

    return _sample_on_grid(begin, end, rate)


def _bytes(history: RunHistory, name: str, begin: float, end: float) -> Curve:
    span_s = max(history.rate_window_s(end), 2 * (end - begin) / GRID_POINTS)

    return _sample_on_grid(begin, end, lambda at: history.rate(name, at, span_s))


def _mean_loss(history: RunHistory, at: float) -> float | None:
    losses = [history.metrics.value("loss", learner, at) for learner in history.learners()]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known else None


def _published_loss(history: RunHistory) -> Curve:
    """Return the loss of the published model.

    It is measured before and after the run, and during the run where the job writes `eval` lines.
    """
    report = history.files.report
    series = history.metrics.series.get("eval.loss")
    at = list(series.at) if series is not None else []
    loss = list(series.value) if series is not None else []
    since = history.training_started_at
    if report is not None and since is not None:
        before, after = report.get("eval_loss_before"), report.get("eval_loss")
        if isinstance(before, float):
            at, loss = [since, *at], [before, *loss]
        if isinstance(after, float):
            at, loss = [*at, history.ended_at], [*loss, after]
    return Curve(at, loss)


def downsample(curve: Curve, points: int) -> Curve:
    """Return the curve with at most `points` points, each the mean of consecutive points."""
    count = len(curve.x)
    if count <= points:
        return Curve(list(curve.x), list(curve.y))
    x, y = [], []
    for index in range(points):
        first, last = index * count // points, (index + 1) * count // points
        x.append(sum(curve.x[first:last]) / (last - first))
        y.append(sum(curve.y[first:last]) / (last - first))
    return Curve(x, y)


def to_csv(history: RunHistory, names: Sequence[str], x: str) -> str:
    """Return all points of these series as CSV, one point per line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["series", x, "value"])
    for name in names:
        found = compute_curve(history, name, x, points=1_000_000)
        digits = "{:.3f}" if x == "time" else "{:.0f}"
        rows = zip(found.x, found.y, strict=True)
        writer.writerows((name, digits.format(at), f"{value:.6g}") for at, value in rows)
    return out.getvalue()
