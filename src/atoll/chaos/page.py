"""The verdict as one self-contained HTML page: no script, no external resources, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from atoll.chaos.faults import Target
from atoll.chaos.verdict import FaultReport, Verdict
from atoll.dashboard.static_page import (
    LANE_HEIGHT,
    LEFT_MARGIN,
    RIGHT_MARGIN,
    WIDTH,
    Html,
    Lanes,
    badge,
    cards,
    document,
    legend,
    table,
)
from atoll.dashboard.terminal import format_percent

PAGE_FILE = "verdict.html"

TOP = 34
CHART = 120


def render_page(verdict: Verdict) -> str:
    parts = [
        *_head(verdict),
        *_cards(verdict),
        *_checks(verdict),
        *_timeline(verdict),
        *_faults(verdict),
        *_islands(verdict),
        *_tokens(verdict),
    ]
    footer = "All figures are measured from the tapes of the run. docs/chaos.md explains each of them."
    return document(f"atoll chaos: {verdict.scenario}, seed {verdict.seed}", parts, footer)


def save_page(verdict: Verdict, run: Path) -> Path:
    path = run / PAGE_FILE
    path.write_text(render_page(verdict), encoding="utf-8")
    return path


# --------------------------------------------------------------------------------------------------------------------
# Summary and tables


def _head(verdict: Verdict) -> Iterator[str]:
    outcome = badge("survived", "good") if verdict.survived else badge("did not survive", "bad")
    yield f"<h1>{escape(verdict.scenario)} {outcome}</h1>"
    yield f"<p>{escape(verdict.about)}</p>"
    yield (
        f"<p class='soft'>Seed {verdict.seed}, {verdict.learners} learners. Planned for {verdict.duration_s:g} s"
        f" without faults; took {verdict.wall_s:.0f} s with them. Links: {escape(verdict.links)}.</p>"
    )


def _cards(verdict: Verdict) -> Iterator[str]:
    pause = verdict.worst_pause
    recoveries = [fault.kill_to_step_s for fault in verdict.faults if fault.kill_to_step_s is not None]
    loss = verdict.loss
    yield from cards(
        [
            (format_percent(verdict.goodput), "goodput: share of the learners' time in steps"),
            (format_percent(verdict.goodput_up), "goodput while the learners were up"),
            (format_percent(verdict.uptime), "uptime: at least one learner trained"),
            (format_percent(verdict.merge_participation), "of live learners took part in a merge, on average"),
            (
                _seconds(pause.gap_s if pause else None),
                f"longest gap between steps; a step takes {_seconds(pause.typical_s if pause else None)}",
            ),
            (_seconds(max(recoveries, default=None)), "longest time from a kill to the next step"),
            (f"{sum(f.was_injected for f in verdict.faults)} of {len(verdict.faults)}", "faults were injected"),
            (f"{verdict.merges:,}", "merges"),
            (
                "-" if loss.final is None else f"{loss.final:.3f}",
                "final loss" if loss.baseline is None else f"final loss; {loss.baseline:.3f} without faults",
            ),
        ]
    )


_MARKS = {True: ("good", "passed"), False: ("bad", "failed"), None: ("unknown", "not evaluated")}


def _checks(verdict: Verdict) -> Iterator[str]:
    rows = []
    for check in verdict.criteria:
        kind, label = _MARKS[check.passed]
        rows.append((check.name, Html(f"<span class='{kind}'>{label}</span>"), check.finding, check.reason))
    yield "<h2>Criteria</h2>"
    yield from table(("criterion", "", "found", "reason"), rows, ("", "", "what", "why"))


def _faults(verdict: Verdict) -> Iterator[str]:
    started_s = verdict.timeline["started_s"]
    rows = []
    for fault in verdict.faults:
        not_injected = Html(f"<span class='bad'>did not happen: {escape(fault.failure_cause)}</span>")
        merged_s = fault.kill_to_merge_s if fault.kill_to_merge_s is not None else fault.end_to_merge_s
        rows.append(
            (
                str(fault.number),
                f"{fault.planned_s - started_s:.1f} s",
                "-" if fault.started_s is None else f"{fault.started_s - started_s:.1f} s",
                fault.description,
                fault.method if fault.was_injected else not_injected,
                _format_delay(fault.kill_to_step_s),
                _format_delay(merged_s),
            )
        )
    yield "<h2>Faults</h2>"
    columns = ("no.", "planned", "injected", "fault", "method", "next step", "next merge")
    yield from table(columns, rows, ("n", "n", "n", "what", "why", "n", "n"))
    yield "<p class='soft'>Times count from the first step of a learner. Next step and next merge count from the kill,"
    yield " or from the end of a fault with a duration.</p>"


def _islands(verdict: Verdict) -> Iterator[str]:
    rows = []
    for each in verdict.islands:
        times = (each.allocated_s, each.stepping_s, each.stopped_s, each.away_s, each.joining_s, each.between_s)
        rows.append((f"learner {each.learner}", *(f"{time_s:.1f} s" for time_s in times), format_percent(each.goodput)))
    yield "<h2>Time of each learner</h2>"
    columns = ("learner", "allocated", "stepping", "stopped", "away", "joining", "between steps", "goodput")
    yield from table(columns, rows, ("", *"nnnnnnn"))


def _tokens(verdict: Verdict) -> Iterator[str]:
    ledger = verdict.ledger
    counts = {
        "trained, as reported to the syncer": ledger["trained"],
        "merged into the model": ledger["merged"],
        "pending: trained during the last merges": ledger["pending"],
        **{f"dropped: {cause}": tokens for cause, tokens in ledger["dropped"].items()},
        "trained but not reported: the process exited first": ledger["unreported"],
    }
    yield "<h2>Tokens</h2>"
    yield from table((), ((label, f"{count:,}") for label, count in counts.items()), ("", "n"))


# --------------------------------------------------------------------------------------------------------------------
# Timeline


def _timeline(verdict: Verdict) -> Iterator[str]:
    timeline = verdict.timeline
    if not timeline["bands"]:
        return
    rounds = timeline["rounds"]
    bands = {band["learner"]: band["states"] for band in timeline["bands"]}
    span = timeline["started_s"], timeline["ended_s"]
    lanes = Lanes(span, timeline["syncers"], [each[0] for each in rounds], bands, TOP)
    chart_top = lanes.bottom + 26
    height = chart_top + CHART + 30
    yield "<h2>Timeline</h2><div class='wide'>"
    yield f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='timeline of the run'>"
    yield from lanes.axis(TOP - 4, chart_top + CHART)
    yield from lanes.draw()
    for fault in verdict.faults:
        yield from _fault_mark(fault, lanes)
    yield from _chart(rounds, lanes, chart_top)
    yield "</svg></div>"
    yield from lanes.legend("ticks in the syncer's lane are merges; a red frame with a number is a fault")
    yield from legend(
        {
            "alive": "alive: live learners at each merge",
            "pulled": "pulled: learners pulled for each merge",
            "merged": "merged: learners in each merge",
        }
    )


def _fault_mark(fault: FaultReport, lanes: Lanes) -> Iterator[str]:
    if fault.started_s is None:
        return
    parts = fault.target.split()
    is_syncer = parts[-1] == "syncer" or parts[0] == "shard"  # shards have no lane; they are drawn in the syncer's
    top = lanes.lane_top("syncer" if is_syncer else Target("learner", int(parts[-1])).affected_process)
    if top is None:
        return
    x = lanes.x(fault.started_s)
    width = max(3.0, lanes.x(fault.ended_s if fault.ended_s is not None else fault.started_s) - x)
    tip = f"<title>fault {fault.number}: {escape(fault.description)}</title>"
    yield (
        f"<rect x='{x}' y='{top - 2}' width='{width:.2f}' height='{LANE_HEIGHT - 2}' fill='none' stroke='var(--mark)'"
        f" stroke-width='1.6' stroke-dasharray='{'none' if fault.was_injected else '3 2'}'>{tip}</rect>"
    )
    yield f"<line x1='{x}' x2='{x}' y1='24' y2='{top - 2}' stroke='var(--mark)' stroke-width='0.8' opacity='0.5'/>"
    yield f"<text class='mark' x='{x}' y='{11 + 11 * (fault.number % 2)}' text-anchor='middle'>{fault.number}</text>"


def _chart(rounds: Sequence[Sequence[float]], lanes: Lanes, top: int) -> Iterator[str]:
    if not rounds:
        return
    highest = max(1, *(int(each[1]) for each in rounds), *(int(each[2]) for each in rounds))

    def y(value: float) -> float:
        return round(top + CHART - value / highest * (CHART - 8), 2)

    for value in range(highest + 1):
        if highest <= 10 or value % (1 + highest // 8) == 0:
            yield f"<text class='soft' x='{LEFT_MARGIN - 8}' y='{y(value) + 4}' text-anchor='end'>{value}</text>"
            right = WIDTH - RIGHT_MARGIN
            yield f"<line x1='{LEFT_MARGIN}' x2='{right}' y1='{y(value)}' y2='{y(value)}' stroke='var(--line)'/>"
    for column, name in ((3, "merged"), (2, "pulled"), (1, "alive")):
        shift = {1: -2.2, 2: 0.0, 3: 2.2}[column]  # equal values stay visible side by side
        path = f"M{lanes.x(rounds[0][0])} {y(rounds[0][column]) + shift:.2f}"
        for steps_before, after in pairwise(rounds):
            if after[column] != steps_before[column]:
                path += f"H{lanes.x(after[0])}V{y(after[column]) + shift:.2f}"
        path += f"H{lanes.x(rounds[-1][0])}"
        yield f"<path d='{path}' fill='none' stroke='var(--{name})' stroke-width='1.6'><title>{name}</title></path>"


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000.0 * value:.0f} ms" if value < 1.0 else f"{value:.1f} s"


def _format_delay(value: float | None) -> str:
    return "" if value is None else f"after {value:.1f} s"
