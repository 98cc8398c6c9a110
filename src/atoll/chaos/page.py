"""The verdict on one page of HTML: no script, nothing from elsewhere, light and dark, fit to be sent to somebody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.chaos.faults import Target
from atoll.chaos.judge import FaultReport, Verdict
from atoll.dashboard.page_style import STATES, STYLE

PAGE = "verdict.html"

WIDTH = 960
LEFT = 92
RIGHT = 16
LANE = 26
TOP = 34
CHART = 120
MOST_TICKS = 4000
"""Rounds that are drawn one by one; of more every n-th."""


def page(verdict: Verdict) -> str:
    title = f"atoll chaos: {verdict.scenario}, seed {verdict.seed}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        *_head(verdict),
        *_cards(verdict),
        *_checks(verdict),
        *_timeline(verdict),
        *_faults(verdict),
        *_islands(verdict),
        *_books(verdict),
        "<footer>Everything here is measured from the tapes of the run; docs/chaos.md says what each figure means."
        "</footer></body></html>",
    ]
    return "\n".join(parts) + "\n"


def save_page(verdict: Verdict, run: Path) -> Path:
    path = run / PAGE
    path.write_text(page(verdict), encoding="utf-8")
    return path


# --------------------------------------------------------------------------------------------------------------------
# Words and figures


def _head(verdict: Verdict) -> Iterator[str]:
    word, kind = ("stood", "good") if verdict.passed else ("did not stand", "bad")
    yield f"<h1>{escape(verdict.scenario)} <span class='verdict {kind}'>{word}</span></h1>"
    yield f"<p>{escape(verdict.about)}</p>"
    yield (
        f"<p class='soft'>Seed {verdict.seed}, {verdict.learners} learners, planned for {verdict.duration_s:g} s"
        f" without faults, {verdict.wall_s:.0f} s with them; links: {escape(verdict.links)}.</p>"
    )


def _cards(verdict: Verdict) -> Iterator[str]:
    pause = verdict.worst_pause
    back = [fault.back_training_s for fault in verdict.faults if fault.back_training_s is not None]
    loss = verdict.loss
    cards = [
        (_percent(verdict.goodput), "goodput: islands' time in steps"),
        (_percent(verdict.goodput_up), "of the time in which they were up"),
        (_percent(verdict.uptime), "uptime: somebody trained"),
        (_percent(verdict.merged_of_alive), "of the living are in a merge"),
        (
            _seconds(pause.gap_s) if pause else "–",
            f"worst pause; a step takes {_seconds(pause.usual_s if pause else None)}",
        ),
        (_seconds(max(back, default=None)), "longest way back to training"),
        (f"{sum(f.fired for f in verdict.faults)} of {len(verdict.faults)}", "faults happened"),
        (f"{verdict.merges:,}", "merges"),
        (
            "–" if loss.final is None else f"{loss.final:.3f}",
            "final loss" if loss.without_faults is None else f"final loss; {loss.without_faults:.3f} without faults",
        ),
    ]
    yield "<div class='cards'>"
    for figure, words in cards:
        yield f"<div class='card'><b>{figure}</b><span>{escape(words)}</span></div>"
    yield "</div>"


_MARKS = {True: ("good", "kept"), False: ("bad", "broken"), None: ("unknown", "not judged")}


def _checks(verdict: Verdict) -> Iterator[str]:
    yield "<h2>What was asked</h2><div class='wide'><table>"
    yield "<tr><th>line</th><th></th><th>found</th><th>why there</th></tr>"
    for check in verdict.checks:
        kind, word = _MARKS[check.passed]
        yield (
            f"<tr><td>{escape(check.name)}</td><td class='{kind}'>{word}</td>"
            f"<td class='what'>{escape(check.sentence)}</td><td class='why'>{escape(check.because)}</td></tr>"
        )
    yield "</table></div>"


def _faults(verdict: Verdict) -> Iterator[str]:
    begin = verdict.timeline["began_s"]
    yield "<h2>Faults</h2><div class='wide'><table><tr><th class='n'>no.</th><th class='n'>planned</th>"
    yield "<th class='n'>at</th><th>what</th><th>by</th><th class='n'>trains again</th>"
    yield "<th class='n'>merged again</th></tr>"
    for fault in verdict.faults:
        at = "–" if fault.began_s is None else f"{fault.began_s - begin:.1f} s"
        by = escape(fault.how) if fault.fired else f"<span class='bad'>did not happen: {escape(fault.why_not)}</span>"
        yield (
            f"<tr><td class='n'>{fault.number}</td><td class='n'>{fault.planned_s - begin:.1f} s</td>"
            f"<td class='n'>{at}</td><td class='what'>{escape(fault.sentence)}</td><td class='why'>{by}</td>"
            f"<td class='n'>{_later(fault.back_training_s)}</td><td class='n'>{_later(_merged_again(fault))}</td></tr>"
        )
    yield "</table></div><p class='soft'>Times are since the first learner trained. Trains again, merged again: after"
    yield " the kill; for faults that go on for a while after their end.</p>"


def _merged_again(fault: FaultReport) -> float | None:
    return fault.back_merged_s if fault.back_merged_s is not None else fault.healed_merged_s


def _islands(verdict: Verdict) -> Iterator[str]:
    yield "<h2>Where the islands' time went</h2><div class='wide'><table><tr><th>island</th>"
    for name in ("allotted", "stepping", "stopped", "away", "joining", "between steps", "goodput"):
        yield f"<th class='n'>{name}</th>"
    yield "</tr>"
    for each in verdict.islands:
        times = (each.allocated_s, each.stepping_s, each.stopped_s, each.away_s, each.joining_s, each.between_s)
        cells = "".join(f"<td class='n'>{time_s:.1f} s</td>" for time_s in times)
        yield f"<tr><td>learner {each.learner}</td>{cells}<td class='n'>{_percent(each.goodput)}</td></tr>"
    yield "</table></div>"


def _books(verdict: Verdict) -> Iterator[str]:
    ledger = verdict.ledger
    yield "<h2>Where the tokens went</h2><div class='wide'><table>"
    rows = [
        ("trained, as the syncer was told", ledger["trained"]),
        ("merged into the model", ledger["merged"]),
        ("pending: trained while the last merges were made", ledger["pending"]),
        *((f"dropped: {why}", lost) for why, lost in ledger["dropped"].items()),
        ("trained and never told: the process died first", ledger["never_told"]),
    ]
    for words, count in rows:
        yield f"<tr><td>{escape(words)}</td><td class='n'>{count:,}</td></tr>"
    yield "</table></div>"


# --------------------------------------------------------------------------------------------------------------------
# The timeline


class _Scale:
    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, max(end, begin + 1e-9)

    def __call__(self, at: float) -> float:
        share = (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)


def _timeline(verdict: Verdict) -> Iterator[str]:
    told = verdict.timeline
    if not told["bands"]:
        return
    scale = _Scale(told["began_s"], told["ended_s"])
    lanes = {"syncer": 0, **{f"learner {band['learner']}": n for n, band in enumerate(told["bands"], 1)}}
    chart_top = TOP + LANE * len(lanes) + 26
    height = chart_top + CHART + 30
    yield "<h2>What happened</h2><div class='wide'>"
    yield f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='timeline of the run'>"
    yield from _axis(scale, height - 14, chart_top)
    yield from _syncer_lane(told, scale)
    for number, band in enumerate(told["bands"], 1):
        yield from _band(band, scale, _lane_top(number))
    for fault in verdict.faults:
        yield from _fault_mark(fault, lanes, scale)
    yield from _chart(told["rounds"], scale, chart_top)
    yield "</svg></div><div class='legend'>"
    used = {state for band in told["bands"] for _, _, state in band["states"]}
    for state, meaning in STATES.items():
        if state in used:
            yield f"<span><i style='background:var(--{state})'></i>{state}: {escape(meaning)}</span>"
    yield "<span>ticks on the syncer's lane are merges; a red frame is a fault, with its number</span></div>"
    yield "<div class='legend'>"
    for name, meaning in (
        ("alive", "live learners"),
        ("asked", "of those, asked"),
        ("merged", "of those, in the merge"),
    ):
        yield f"<span><i style='background:var(--{name})'></i>{name}: {meaning}, at each merge</span>"
    yield "</div>"


def _lane_top(number: int) -> int:
    return TOP + LANE * number


def _axis(scale: _Scale, bottom: int, chart_top: int) -> Iterator[str]:
    length = scale.end - scale.begin
    every = next((step for step in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600) if length / step <= 14), 7200)
    at = 0
    while at <= length:
        x = scale(scale.begin + at)
        yield f"<line x1='{x}' x2='{x}' y1='{TOP - 4}' y2='{chart_top + CHART}' stroke='var(--line)' stroke-width='1'/>"
        yield f"<text class='soft' x='{x}' y='{bottom}' text-anchor='middle'>{at} s</text>"
        at += every


def _syncer_lane(told: Mapping[str, Any], scale: _Scale) -> Iterator[str]:
    top = _lane_top(0)
    yield f"<text x='0' y='{top + 15}'>syncer</text>"
    for begin, end in told["syncers"]:
        x, width = scale(begin), max(1.0, scale(end) - scale(begin))
        size = f"width='{width:.2f}' height='{LANE - 6}'"
        yield f"<rect x='{x}' y='{top}' {size} fill='var(--card)' stroke='var(--line)'/>"
    rounds = told["rounds"]
    ticks = "".join(f"M{scale(each[0])} {top + 2}v{LANE - 10}" for each in rounds[:: 1 + len(rounds) // MOST_TICKS])
    if ticks:
        yield f"<path d='{ticks}' stroke='var(--soft)' stroke-width='1' opacity='0.7'/>"


def _band(band: Mapping[str, Any], scale: _Scale, top: int) -> Iterator[str]:
    yield f"<text x='0' y='{top + 15}'>learner {band['learner']}</text>"
    for begin, end, state in band["states"]:
        x, width = scale(begin), scale(end) - scale(begin)
        tip = f"<title>{state}, {begin - scale.begin:.1f} to {end - scale.begin:.1f} s</title>"
        rect = f"<rect x='{x}' y='{top}' width='{max(width, 0.5):.2f}' height='{LANE - 6}' fill='var(--{state})'>"
        yield f"{rect}{tip}</rect>"


def _fault_mark(fault: FaultReport, lanes: Mapping[str, int], scale: _Scale) -> Iterator[str]:
    if fault.began_s is None:
        return
    words = fault.target.split()
    is_syncers = words[-1] == "syncer" or words[0] == "shard"  # a shard is a part of it, and has no lane of its own
    lane = lanes.get("syncer" if is_syncers else Target("learner", int(words[-1])).strikes_process)
    if lane is None:
        return
    top = _lane_top(lane)
    x = scale(fault.began_s)
    width = max(3.0, scale(fault.ended_s if fault.ended_s is not None else fault.began_s) - x)
    tip = f"<title>fault {fault.number}: {escape(fault.sentence)}</title>"
    yield (
        f"<rect x='{x}' y='{top - 2}' width='{width:.2f}' height='{LANE - 2}' fill='none' stroke='var(--mark)'"
        f" stroke-width='1.6' stroke-dasharray='{'none' if fault.fired else '3 2'}'>{tip}</rect>"
    )
    yield f"<line x1='{x}' x2='{x}' y1='24' y2='{top - 2}' stroke='var(--mark)' stroke-width='0.8' opacity='0.5'/>"
    yield f"<text class='mark' x='{x}' y='{11 + 11 * (fault.number % 2)}' text-anchor='middle'>{fault.number}</text>"


def _chart(rounds: Sequence[Sequence[float]], scale: _Scale, top: int) -> Iterator[str]:
    if not rounds:
        return
    most = max(1, *(int(each[1]) for each in rounds), *(int(each[2]) for each in rounds))

    def y(value: float) -> float:
        return round(top + CHART - value / most * (CHART - 8), 2)

    for value in range(most + 1):
        if most <= 10 or value % (1 + most // 8) == 0:
            yield f"<text class='soft' x='{LEFT - 8}' y='{y(value) + 4}' text-anchor='end'>{value}</text>"
            yield f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(value)}' y2='{y(value)}' stroke='var(--line)'/>"
    for place, name in ((3, "merged"), (2, "asked"), (1, "alive")):
        shift = {1: -2.2, 2: 0.0, 3: 2.2}[place]  # where all are equal all three are to be seen
        path = f"M{scale(rounds[0][0])} {y(rounds[0][place]) + shift:.2f}"
        for before, after in pairwise(rounds):
            if after[place] != before[place]:
                path += f"H{scale(after[0])}V{y(after[place]) + shift:.2f}"
        path += f"H{scale(rounds[-1][0])}"
        yield f"<path d='{path}' fill='none' stroke='var(--{name})' stroke-width='1.6'><title>{name}</title></path>"


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100.0 * share:.1f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000.0 * value:.0f} ms" if value < 1.0 else f"{value:.1f} s"


def _later(value: float | None) -> str:
    return "" if value is None else f"after {value:.1f} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
