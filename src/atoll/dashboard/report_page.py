"""`atoll report --html`: one run, or a comparison of several, as one HTML file that can be sent to others.

The file has no script and loads nothing: metrics, timeline and curves are text and SVG.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from atoll.dashboard.curves import Curve, compute_curve, list_series
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.static_page import WIDTH, Html, Lanes, badge, cards, document, table, time_axis
from atoll.dashboard.terminal import format_duration, format_number, format_percent, state_label
from atoll.dashboard.view import timeline, view_at
from atoll.sim.check_tapes import CheckResult

CHART_HEIGHT = 170
CHART_POINTS = 300
MAX_MARKS = 200

LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#7f7f7f")
"""Colors that color-blind readers can distinguish. Further lines repeat them, dashed."""

CHARTS = (
    ("loss", "Loss", "nats per token"),
    ("throughput", "Throughput", "tokens/s"),
    ("goodput", "Goodput", "cumulative share of the islands' time spent in steps"),
    ("merges", "Merges", "learners alive, pulled and merged"),
    ("norms", "Norms", "deltas and published step"),
    ("cosine", "Cosine", "between learners' deltas"),
)


class ReportedRun(NamedTuple):
    """A run and the result of checking it."""

    name: str
    history: RunHistory
    verdict: CheckResult | None  # result of the checkers, None if they did not run


def render_report(runs: Sequence[ReportedRun]) -> str:
    """Return the HTML document for one run, or for a comparison of several."""
    parts: list[str] = []
    if len(runs) > 1:
        parts += [f"<h1>{len(runs)} runs compared</h1>", *_comparison(runs), *_charts(runs)]
    for run in runs:
        parts += _run(run, alone=len(runs) == 1)
    footer = "All values come from the tapes and metrics of the run. docs/report.md explains each of them."
    return document("atoll report: " + ", ".join(run.name for run in runs), parts, footer)


def summary_figures(run: ReportedRun) -> dict[str, str]:
    """Return the headline metrics of a run as text, by name."""
    shown = view_at(run.history)
    head, report = shown["headline"], run.history.files.report or {}
    loss = report.get("eval_loss")
    return {
        "state": shown["stage"],
        "held-out loss": f"{loss:.4f}" if loss is not None else "-",
        "training loss": f"{head['loss']:.4f}" if head["loss"] is not None else "-",
        "tokens": f"{head['tokens']:,}",
        "time": format_duration(shown["to"] - shown["from"]),
        "islands": str(head["learners"]),
        "goodput": format_percent(report.get("goodput", head["goodput"])),
        "uptime": format_percent(report.get("uptime", head["uptime"])),
        "merges": f"{head['merges']:,}",
        "merged of pulled": _merged_of_pulled(run.history),
        "invariants": verdict_label(run.verdict),
        "ledger": _ledger_label(shown["ledger"]),
    }


def _ledger_label(ledger: dict[str, Any] | None) -> str:
    if ledger is None:
        return "-"
    return "balanced" if ledger["balanced"] else "out of balance"


def verdict_label(verdict: CheckResult | None) -> str:
    if verdict is None:
        return "not checked"
    if verdict.violation is not None:
        return "violated"
    return "hold" if not verdict.gaps else "hold, tapes incomplete"


def _merged_of_pulled(history: RunHistory) -> str:
    merges = list(history.merges(history.started_at - 1.0, history.newest_at))
    if not merges:
        return "-"
    pulled = sum(m.pulled for m in merges)
    return f"{sum(len(m.contributors) for m in merges) / len(merges):.2f} of {pulled / len(merges):.2f}"


# --------------------------------------------------------------------------------------------------------------------
# Sections of the page


def _comparison(runs: Sequence[ReportedRun]) -> Iterator[str]:
    summaries = [summary_figures(run) for run in runs]
    kinds = ("", *("n" for _ in runs))
    yield from table(
        ("", *(run.name for run in runs)), ((name, *(s[name] for s in summaries)) for name in summaries[0]), kinds
    )
    configs = [_flat(run.history.files.config or {}) for run in runs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    differ = [n for n in names if len({config.get(n) for config in configs}) > 1]
    if differ:
        yield "<h2>Settings that differ</h2>"
        yield from table((), ((name, *(config.get(name, "-") for config in configs)) for name in differ), kinds)


def _run(run: ReportedRun, alone: bool) -> Iterator[str]:
    shown = view_at(run.history)
    stage = shown["stage"]
    level = "h1" if alone else "h2"
    label = badge(stage, "good" if stage == "finished" else "unknown")
    yield f"<section class='run'><{level}>{escape(run.name)} {label}</{level}>"
    yield from cards((value, name) for name, value in summary_figures(run).items())
    yield from _verdict(run.verdict)
    yield from _timeline(run.history)
    if alone:
        yield from _charts([run])
    yield from _islands(shown)
    yield from _faults(run.history)
    yield from _tokens(shown["ledger"])
    yield from _config(run.history)
    yield "</section>"


def _verdict(verdict: CheckResult | None) -> Iterator[str]:
    if verdict is None:
        return
    yield "<h2>Invariants</h2>"
    if verdict.violation is not None:
        yield f"<p class='bad'>Protocol invariant violated: {escape(str(verdict.violation))}</p>"
    else:
        yield f"<p class='good'>All protocol invariants hold over {verdict.entries:,} entries.</p>"
    for gap in verdict.gaps[:20]:
        yield f"<p class='soft'>{escape(gap)}</p>"


def _islands(shown: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            f"learner {each['learner']}",
            str(each["incarnation"] or "-"),
            f"{each['tokens']:,}",
            f"{each['step']:,}",
            format_percent(each["weight"]),
            format_percent(each["goodput"]),
            Html(_split(each["time_split"]) + (" (derived)" if each["derived"] else "")),
        )
        for each in shown["islands"]
    ]
    yield "<h2>Islands</h2>"
    columns = ("island", "incarnations", "tokens", "step", "weight", "goodput", "time split")
    yield from table(columns, rows, ("", *"nnnnn"))


_SPLIT_COLORS = {
    "stepping": "training",
    "waiting": "alone",
    "copying": "pulled",
    "recovering": "recovering",
    "paused": "paused",
    "gone": "gone",
}


def _split(split: dict[str, float] | None) -> str:
    if not split or not sum(split.values()):
        return "-"
    total = sum(split.values())
    shares = ((name, 100 * part / total) for name, part in split.items())
    text = escape(", ".join(f"{state_label(name)} {percent:.1f} %" for name, percent in shares if percent > 0.05))
    bars = "".join(
        f"<span style='width:{100 * part / total:.3f}%;background:var(--{_SPLIT_COLORS[name]})'></span>"
        for name, part in split.items()
        if part > 0
    )
    return f"<div class='split' role='img' aria-label='{text}'>{bars}</div><span class='soft'>{text}</span>"


def _faults(history: RunHistory) -> Iterator[str]:
    marks = [mark for mark in timeline(history, None, None, 1000)["marks"] if mark["kind"] != "left"]
    if not marks:
        return
    yield "<h2>Events</h2>"
    yield from table(
        ("time", "subject", "event"),
        (
            (format_duration(m["at"] - history.started_at), m["subject"], f"{m['kind']}: {m['text']}")
            for m in marks[:MAX_MARKS]
        ),
        ("n",),
    )
    if len(marks) > MAX_MARKS:
        yield f"<p class='soft'>and {len(marks) - MAX_MARKS:,} more</p>"


def _tokens(ledger: dict[str, Any] | None) -> Iterator[str]:
    if ledger is None:
        return
    counts = {"trained": ledger["trained"], "merged into the model": ledger["merged"], "pending": ledger["pending"]}
    counts |= {f"dropped: {reason}": count for reason, count in ledger["dropped"].items()}
    yield "<h2>Token ledger</h2>"
    yield from table((), ((name, f"{count:,}") for name, count in counts.items()), ("", "n"))


def _config(history: RunHistory) -> Iterator[str]:
    config = _flat(history.files.config or {})
    if not config:
        return
    yield "<h2>Configuration</h2><dl>"
    for name, value in config.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return found


# --------------------------------------------------------------------------------------------------------------------
# Drawings


def _timeline(history: RunHistory) -> Iterator[str]:
    drawn = timeline(history, None, None, 800)
    if not drawn["islands"]:
        return
    lanes = Lanes(
        (drawn["from"], drawn["to"]),
        [(begin, end) for begin, end, state in drawn["syncer"] if state == "up"],
        [each["at"] for each in drawn["rounds"]],
        {each["learner"]: each["bands"] for each in drawn["islands"]},
        top=2,
    )
    height = lanes.bottom + 32
    yield "<h2>Timeline</h2><div class='wide'>"
    yield f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='state of every island over time'>"
    yield from lanes.axis(0, height - 18)
    yield from lanes.draw()
    for mark in drawn["marks"]:
        if mark["kind"] in ("killed", "failed", "quarantined", "syncer-restarted"):
            top = lanes.lane_top(mark["subject"] if lanes.lane_top(mark["subject"]) is not None else "syncer") or 0
            tip = f"<title>{escape(mark['kind'])}: {escape(mark['text'])}</title>"
            at = f"x='{lanes.x(mark['at'])}' y='{top + 13}'"
            yield f"<text class='mark' {at} text-anchor='middle'>✕{tip}</text>"
    yield "</svg></div>"
    yield from lanes.legend("tick on the syncer's lane: merge; ✕: a process exited or was quarantined")


def _charts(runs: Sequence[ReportedRun]) -> Iterator[str]:
    drawn = [chart for group, title, unit in CHARTS if (chart := _chart(runs, group, title, unit))]
    if drawn:
        yield "<h2>Curves</h2><div class='pair'>"
        yield from drawn
        yield "</div>"


def _chart(runs: Sequence[ReportedRun], group: str, title: str, unit: str) -> str:
    """Draw all series of one group. Of several runs, draw only the series that describe a whole run."""
    lines: list[tuple[str, Curve, str]] = []
    for run in runs:
        found = [each for each in list_series(run.history) if each.group == group]
        if len(runs) > 1:
            found = [each for each in found if ".learner." not in each.name] or found[:1]
        for each in found[:12]:
            points = compute_curve(run.history, each.name, points=CHART_POINTS)
            if len(points.x) > 1:
                label = each.label if len(runs) == 1 else f"{run.name}: {each.label}"
                since = run.history.started_at
                lines.append((label, Curve([at - since for at in points.x], points.y), each.name))
    if not lines:
        return ""
    width, left = 460, 46
    span = max(line.x[-1] for _, line, _ in lines) or 1.0
    low, high = _value_range([value for _, line, _ in lines for value in line.y])

    def x(at: float) -> float:
        return round(left + at / span * (width - left - 8), 2)

    def y(value: float) -> float:
        return round(8 + (high - min(max(value, low), high)) / (high - low) * (CHART_HEIGHT - 34), 2)

    parts = [f"<div><h3>{escape(title)} <span class='soft'>{escape(unit)}</span></h3>"]
    parts.append(f"<svg viewBox='0 0 {width} {CHART_HEIGHT}' role='img' aria-label='{escape(title)} over time'>")
    parts += time_axis(span, x, CHART_HEIGHT - 6, 5)
    for value in (low, (low + high) / 2, high):
        parts.append(f"<line x1='{left}' x2='{width - 8}' y1='{y(value)}' y2='{y(value)}' stroke='var(--line)'/>")
        parts.append(
            f"<text class='soft' x='{left - 6}' y='{y(value) + 4}' text-anchor='end'>{format_number(value)}</text>"
        )
    for number, (label, line, name) in enumerate(lines):
        colour, dash = LINE_COLORS[number % len(LINE_COLORS)], "4 3" if number >= len(LINE_COLORS) else "none"
        if name == "loss.published":
            for at, value in zip(line.x, line.y, strict=True):
                tip = f"<title>{escape(label)}: {format_number(value)}</title>"
                parts.append(f"<circle cx='{x(at)}' cy='{y(value)}' r='3.5' fill='{colour}'>{tip}</circle>")
            continue
        path = " ".join(f"{x(at)},{y(value)}" for at, value in zip(line.x, line.y, strict=True))
        tip = f"<title>{escape(label)}</title>"
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.4'"
            f" stroke-dasharray='{dash}'>{tip}</polyline>"
        )
    parts.append("</svg><div class='legend'>")
    for number, (label, _, _) in enumerate(lines):
        parts.append(f"<span><i style='background:{LINE_COLORS[number % len(LINE_COLORS)]}'></i>{escape(label)}</span>")
    parts.append("</div></div>")
    return "".join(parts)


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and largest value without the outer 1 % on each side. The range is never empty."""
    ordered = sorted(values)
    cut = len(ordered) // 100
    low, high = ordered[cut], ordered[-1 - cut]
    return (low, high) if high > low else (low - 0.5, low + 0.5)
