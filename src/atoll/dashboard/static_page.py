"""Building blocks of HTML pages in one file: text, tables and SVG, without script or external resources.

`atoll report --html` and the verdict of `atoll chaos` use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from atoll.dashboard.terminal import format_duration, state_label

WIDTH = 960
LEFT_MARGIN = 92
RIGHT_MARGIN = 16
LANE_HEIGHT = 26
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
MAX_MERGES = 4000
"""Maximum number of merges that a timeline draws. If there are more, it draws every n-th."""

STATES = {
    "training": "in steps, connected to the syncer",
    "alone": "in steps, without a connection to the syncer",
    "suspected": "no message to the syncer for longer than expected",
    "stopped": "process does not run, for example after SIGSTOP",
    "recovering": "downloads the model and a peer's optimizer state",
    "paused": "paused by an operator",
    "gone": "no process, or a starting one",
    "left": "left for good",
    "quarantined": "refused after invalid messages",
}
"""Meaning of each state of a learner; `state_label` gives its name."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6775; --line: #d5dbe3; --paper: #ffffff; --card: #f5f7fa;
  --good: #14713c; --bad: #b3261e; --unknown: #7a5b00; --mark: #b3261e;
  --training: #3f9d6b; --alone: #d9a520; --stopped: #8b5fbf; --gone: #d9635b;
  --suspected: #e0c04a; --recovering: #4a86c8; --paused: #8b5fbf; --left: #a7b0bb; --quarantined: #6b2f5b;
  --alive: #14713c; --pulled: #2f6fb3; --merged: #b3561e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #a3adba; --line: #39424e; --paper: #14181d;
  --card: #1d232a; --good: #6cc993; --bad: #ff8a80; --unknown: #e0b94d; --mark: #ff8a80;
  --training: #2f7d54; --alone: #a87e12; --stopped: #7a52a8; --gone: #a8443d;
  --suspected: #a3862a; --recovering: #36699f; --paused: #7a52a8; --left: #55606c; --quarantined: #8a4a78;
  --alive: #6cc993; --pulled: #7db4ee; --merged: #f0a06a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px 20px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); } .unknown { color: var(--unknown); }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 4px; color: var(--paper); font-weight: 600; }
.verdict.good { background: var(--good); color: var(--paper); }
.verdict.bad { background: var(--bad); color: var(--paper); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(150px, 22%), 1fr)); gap: 10px;
  margin: 16px 0; }
.card { background: var(--card); border-radius: 6px; padding: 10px 12px; }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.why { color: var(--soft); min-width: 110px; } td.what { min-width: 190px; }
svg { display: block; width: 100%; min-width: 700px; height: auto; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; } svg text.soft { fill: var(--soft); }
svg text.mark { fill: var(--mark); font-size: 11px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin: 6px 0 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
footer { margin-top: 32px; color: var(--soft); font-size: 13px; }
.run { margin-top: 8px; } dl { columns: 3 240px; column-gap: 24px; font-size: 13px; margin: 0; }
dl div { display: flex; gap: 10px; justify-content: space-between; break-inside: avoid; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; text-align: right; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 8px 24px; }
.pair svg { min-width: 0; } h3 { font-size: 14px; margin: 14px 0 2px; }
.split { display: flex; height: 12px; border-radius: 3px; overflow: hidden; min-width: 160px; }
.split span { display: block; }
@media print { body { max-width: none; } .wide { overflow: visible; } }
"""


class Html(str):
    """Text that is already HTML. All other text is escaped."""


def document(title: str, parts: Iterable[str], footer: str) -> str:
    """Return a whole HTML document with the common style."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        *parts,
        f"<footer>{escape(footer)}</footer></body></html>",
    ]
    return "\n".join(lines) + "\n"


def badge(text: str, kind: str) -> str:
    return f"<span class='verdict {kind}'>{escape(text)}</span>"


def cards(figures: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a row of cards from pairs of value and label."""
    yield "<div class='cards'>"
    for value, label in figures:
        yield f"<div class='card'><b>{escape(value)}</b><span>{escape(label)}</span></div>"
    yield "</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table.

    Args:
        columns: headings; empty for a table without headings.
        kinds: CSS class of each column; "n" right-aligns numbers.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        parts = []
        for number, cell in enumerate(cells):
            kind = f" class='{kinds[number]}'" if number < len(kinds) and kinds[number] else ""
            parts.append(f"<{tag}{kind}>{cell if isinstance(cell, Html) else escape(cell)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    yield "<div class='wide'><table>"
    if columns:
        yield line(columns, "th")
    for row in rows:
        yield line(row, "td")
    yield "</table></div>"


def time_axis(length_s: float, x: Callable[[float], float], text_y: float, max_ticks: int) -> Iterator[str]:
    """Yield the labels of a time axis from 0 to `length_s`."""
    for at in _ticks(length_s, max_ticks):
        yield f"<text class='soft' x='{x(at)}' y='{text_y}' text-anchor='middle'>{format_duration(at)}</text>"


def _ticks(length_s: float, max_ticks: int) -> range:
    interval = next((step for step in TICKS_S if length_s / step <= max_ticks), 0)
    interval = interval or 86400 * math.ceil(length_s / (86400 * max_ticks))
    return range(0, math.floor(length_s) + 1, interval)


class Lanes:
    """Timeline drawing: one lane with the syncer's processes and merges, and one lane of states per learner."""

    def __init__(
        self,
        span: tuple[float, float],
        syncers: Sequence[tuple[float, float]],
        merges: Sequence[float],
        bands: Mapping[int, Sequence[tuple[float, float, str]]],
        top: int = 0,
    ) -> None:
        """Lay out the lanes.

        Args:
            span: begin and end of the timeline.
            syncers: begin and end of each syncer process.
            bands: begin, end and state of every span, by learner.
            top: height of the space above the lanes.
        """
        self.begin, self.length_s = span[0], max(span[1] - span[0], 1e-9)
        self._syncers, self._merges, self._bands = syncers, merges, bands
        names = ["syncer", *(f"learner {learner}" for learner in bands)]
        self._tops = {name: top + LANE_HEIGHT * number for number, name in enumerate(names)}
        self.bottom = top + LANE_HEIGHT * len(names)

    def x(self, at: float) -> float:
        """Return the horizontal position of a time."""
        share = min(max(at - self.begin, 0.0), self.length_s) / self.length_s
        return round(LEFT_MARGIN + share * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN), 2)

    def lane_top(self, subject: str) -> int | None:
        """Return the top of the lane of "syncer" or "learner N", or None if there is none."""
        return self._tops.get(subject)

    def axis(self, top: int, bottom: int) -> Iterator[str]:
        """Yield vertical grid lines from `top` to `bottom`, with time labels below them."""
        for at in _ticks(self.length_s, 12):
            x = self.x(self.begin + at)
            yield f"<line x1='{x}' x2='{x}' y1='{top}' y2='{bottom}' stroke='var(--line)'/>"
        yield from time_axis(self.length_s, lambda at: self.x(self.begin + at), bottom + 16, 12)

    def draw(self) -> Iterator[str]:
        """Yield the lanes as SVG."""
        for name, top in self._tops.items():
            yield f"<text x='0' y='{top + 15}'>{name}</text>"
        top = self._tops["syncer"]
        for begin, end in self._syncers:
            yield f"<rect {self._size(begin, end, top)} fill='var(--card)' stroke='var(--line)'/>"
        shown = self._merges[:: 1 + len(self._merges) // MAX_MERGES]
        ticks = "".join(f"M{self.x(at)} {top + 2}v{LANE_HEIGHT - 10}" for at in shown)
        if ticks:
            yield f"<path d='{ticks}' stroke='var(--soft)' stroke-width='1' opacity='0.7'/>"
        for learner, bands in self._bands.items():
            for begin, end, state in bands:
                tip = f"<title>{state_label(state)}, {self._time(begin)} to {self._time(end)}</title>"
                size = self._size(begin, end, self._tops[f"learner {learner}"])
                yield f"<rect {size} fill='var(--{state})'>{tip}</rect>"

    def _size(self, begin: float, end: float, top: int) -> str:
        width = max(self.x(end) - self.x(begin), 0.6)
        return f"x='{self.x(begin)}' y='{top}' width='{width:.2f}' height='{LANE_HEIGHT - 6}'"

    def _time(self, at: float) -> str:
        return f"{at - self.begin:.1f} s" if self.length_s < 120.0 else format_duration(at - self.begin)

    def legend(self, marks: str) -> Iterator[str]:
        """Yield the legend of the states that occur; `marks` explains the marks on the lanes."""
        used = {state for bands in self._bands.values() for _, _, state in bands}
        texts = {state: f"{state_label(state)}: {meaning}" for state, meaning in STATES.items() if state in used}
        yield from legend(texts, marks)


def legend(texts: Mapping[str, str], more: str = "") -> Iterator[str]:
    """Yield a legend from texts by color name of the style, followed by `more`."""
    yield "<div class='legend'>"
    for colour, text in texts.items():
        yield f"<span><i style='background:var(--{colour})'></i>{escape(text)}</span>"
    if more:
        yield f"<span>{escape(more)}</span>"
    yield "</div>"
