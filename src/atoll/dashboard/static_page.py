"""Parts of pages that are one file and can be sent: text, tables and SVG, no script, nothing from elsewhere.

`atoll report --html` and the verdict of `atoll chaos` are made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from atoll.dashboard.terminal import format_duration

WIDTH = 960
LEFT_MARGIN = 92
RIGHT_MARGIN = 16
LANE_HEIGHT = 26
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
MAX_MERGES = 4000
"""Merges that a timeline draws one by one; of more it draws every n-th."""

STATES = {
    "training": "in steps, with a link to the syncer",
    "alone": "in steps, without a link",
    "suspected": "in steps, but silent for the syncer",
    "stopped": "its process stands still (SIGSTOP)",
    "recovering": "fetches the model and a peer's inner state",
    "paused": "an operator paused the run",
    "gone": "no process, or one that is only starting",
    "left": "left for good, or done",
    "quarantined": "what it sent was refused",
}

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
    """Text that is HTML already; any other text is escaped."""


def document(title: str, parts: Iterable[str], footer: str) -> str:
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        *parts,
        f"<footer>{escape(footer)}</footer></body></html>",
    ]
    return "\n".join(lines) + "\n"


def badge(words: str, kind: str) -> str:
    return f"<span class='verdict {kind}'>{escape(words)}</span>"


def cards(figures: Iterable[tuple[str, str]]) -> Iterator[str]:
    """`figures`: each with the words below it."""
    yield "<div class='cards'>"
    for value, words in figures:
        yield f"<div class='card'><b>{escape(value)}</b><span>{escape(words)}</span></div>"
    yield "</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> Iterator[str]:
    """`columns`: headings, none for a table without. `kinds`: the class of each column of the style; "n": a number."""

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
    """Times below a drawing, from 0 to `length_s`."""
    for at in _ticks(length_s, max_ticks):
        yield f"<text class='soft' x='{x(at)}' y='{text_y}' text-anchor='middle'>{format_duration(at)}</text>"


def _ticks(length_s: float, max_ticks: int) -> range:
    every = next((step for step in TICKS_S if length_s / step <= max_ticks), 0)
    every = every or 86400 * math.ceil(length_s / (86400 * max_ticks))
    return range(0, math.floor(length_s) + 1, every)


class Lanes:
    """A timeline: a lane of the syncer's processes with their merges, and a lane of states for every learner."""

    def __init__(
        self,
        span: tuple[float, float],
        syncers: Sequence[tuple[float, float]],
        merges: Sequence[float],
        bands: Mapping[int, Sequence[tuple[float, float, str]]],
        top: int = 0,
    ) -> None:
        """`top`: height of the room above the lanes."""
        self.begin, self.length_s = span[0], max(span[1] - span[0], 1e-9)
        self._syncers, self._merges, self._bands = syncers, merges, bands
        names = ["syncer", *(f"learner {learner}" for learner in bands)]
        self._tops = {name: top + LANE_HEIGHT * number for number, name in enumerate(names)}
        self.bottom = top + LANE_HEIGHT * len(names)

    def x(self, at: float) -> float:
        share = min(max(at - self.begin, 0.0), self.length_s) / self.length_s
        return round(LEFT_MARGIN + share * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN), 2)

    def lane_top(self, who: str) -> int | None:
        return self._tops.get(who)

    def axis(self, top: int, bottom: int) -> Iterator[str]:
        """Lines of time from `top` to `bottom`, with the times below them."""
        for at in _ticks(self.length_s, 12):
            x = self.x(self.begin + at)
            yield f"<line x1='{x}' x2='{x}' y1='{top}' y2='{bottom}' stroke='var(--line)'/>"
        yield from time_axis(self.length_s, lambda at: self.x(self.begin + at), bottom + 16, 12)

    def draw(self) -> Iterator[str]:
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
                tip = f"<title>{state}, {self._moment(begin)} to {self._moment(end)}</title>"
                size = self._size(begin, end, self._tops[f"learner {learner}"])
                yield f"<rect {size} fill='var(--{state})'>{tip}</rect>"

    def _size(self, begin: float, end: float, top: int) -> str:
        width = max(self.x(end) - self.x(begin), 0.6)
        return f"x='{self.x(begin)}' y='{top}' width='{width:.2f}' height='{LANE_HEIGHT - 6}'"

    def _moment(self, at: float) -> str:
        return f"{at - self.begin:.1f} s" if self.length_s < 120.0 else format_duration(at - self.begin)

    def legend(self, marks: str) -> Iterator[str]:
        """The states that occur, and what `marks` on the lanes mean."""
        used = {state for bands in self._bands.values() for _, _, state in bands}
        yield from legend({state: f"{state}: {meaning}" for state, meaning in STATES.items() if state in used}, marks)


def legend(words: Mapping[str, str], more: str = "") -> Iterator[str]:
    """`words`: by the name of a colour of the style."""
    yield "<div class='legend'>"
    for colour, text in words.items():
        yield f"<span><i style='background:var(--{colour})'></i>{escape(text)}</span>"
    if more:
        yield f"<span>{escape(more)}</span>"
    yield "</div>"
