"""The mermaid diagrams of the pages as SVG, made while the site is built: nothing is fetched when it is parse_diagram.

Sequence diagrams are drawn as usual. State diagrams are drawn the same way, a column for each state and a row for each
move: every label has room, and no layout has to be searched for. Only what our pages use is understood; anything else
stops the build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import Any

ROW_HEIGHT, HEADER_HEIGHT, CHARACTER_WIDTH, MIN_GAP = 30, 34, 7.3, 120


@dataclass
class DiagramRow:
    """One row: an arrow from column to column, or with `kind` note, start or end something at one column."""

    kind: str
    source: str
    target: str
    label: str


@dataclass
class Diagram:
    columns: dict[str, str] = field(default_factory=dict)  # name in the source -> title
    rows: list[DiagramRow] = field(default_factory=list)

    def column_index(self, name: str) -> int:
        return list(self.columns).index(name)


def parse_diagram(source: str) -> Diagram:
    """The chart of one block; ValueError for a line that is not understood."""
    kind, *lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    if kind not in ("sequenceDiagram", "stateDiagram-v2"):
        raise ValueError(f"a picture of the kind {kind!r} cannot be drawn; give a sequence or a state diagram")
    chart = Diagram()
    for line in lines:
        _parse_line(chart, line)
    return chart


def _parse_line(chart: Diagram, line: str) -> None:
    if found := re.fullmatch(r"participant (\w+) as (.+)", line):
        chart.columns[found[1]] = found[2]
    elif found := re.fullmatch(r"(\w+)->>(\w+): (.+)", line):
        chart.rows.append(DiagramRow("arrow", found[1], found[2], found[3]))
    elif found := re.fullmatch(r"Note over (\w+): (.+)", line):
        chart.rows.append(DiagramRow("note", found[1], found[1], found[2]))
    elif found := re.fullmatch(r"(\w+|\[\*\]) --> (\w+|\[\*\])(?:: (.+))?", line):
        for name in (found[1], found[2]):
            if name != "[*]":
                chart.columns.setdefault(name, name)
        if found[1] == "[*]":
            chart.rows.append(DiagramRow("start", found[2], found[2], "start"))
        elif found[2] == "[*]":
            chart.rows.append(DiagramRow("end", found[1], found[1], "end"))
        else:
            chart.rows.append(DiagramRow("arrow", found[1], found[2], found[3] or ""))
    else:
        raise ValueError(f"the line {line!r} of a picture is not understood")
    for move in chart.rows[-1:]:
        if unknown := {move.source, move.target} - set(chart.columns):
            raise ValueError(f"the line {line!r} of a picture names {', '.join(sorted(unknown))}, which is no column")


def render_svg(source: str) -> str:
    chart = parse_diagram(source)
    gap = max([MIN_GAP, *(_min_gap(chart, move) for move in chart.rows)])
    titles = list(chart.columns.values())
    left = max([CHARACTER_WIDTH * len(titles[0]) / 2 + 14, *(_overhang(chart, m, gap, 0) for m in chart.rows)])
    right = max(
        [CHARACTER_WIDTH * len(titles[-1]) / 2 + 14, *(_overhang(chart, m, gap, len(titles) - 1) for m in chart.rows)]
    )
    xs = [left + gap * i for i in range(len(titles))]
    width, height = xs[-1] + right, HEADER_HEIGHT + ROW_HEIGHT * (len(chart.rows) + 1)
    parts = [f'<line x1="{x:.0f}" y1="{HEADER_HEIGHT}" x2="{x:.0f}" y2="{height}" class="life"/>' for x in xs]
    parts += [_draw_box(x, HEADER_HEIGHT / 2, title, "who") for x, title in zip(xs, titles, strict=True)]
    for number, move in enumerate(chart.rows, 1):
        parts += _draw_row(
            move,
            xs[chart.column_index(move.source)],
            xs[chart.column_index(move.target)],
            HEADER_HEIGHT + ROW_HEIGHT * number,
        )
    words = escape(
        "; ".join(f"{m.source} to {m.target}: {m.label}" for m in chart.rows if m.kind == "arrow"), quote=True
    )
    return (
        f'<div class="chart"><svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img"'
        f' aria-label="{words}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg></div>'
    )


def _min_gap(chart: Diagram, move: DiagramRow) -> float:
    """The least distance of columns at which this label has room."""
    far = abs(chart.column_index(move.source) - chart.column_index(move.target))
    if move.kind != "arrow":
        return 0
    return (CHARACTER_WIDTH * len(move.label) + (30 if far else 50)) / max(far, 1)


def _overhang(chart: Diagram, move: DiagramRow, gap: float, edge: int) -> float:
    """How far this row goes beyond the column at the edge."""
    half = CHARACTER_WIDTH * len(move.label) / 2 + 14
    inwards = gap * abs(chart.column_index(move.source) - edge)
    if move.kind == "note":
        return half - inwards
    beside = move.kind != "arrow" or move.source == move.target  # its label stands to the right
    return 2 * half + 40 - inwards if beside and edge else 0


def _draw_row(move: DiagramRow, x: float, to: float, y: float) -> list[str]:
    if move.kind == "note":
        return [_draw_box(x, y - 4, move.label, "note")]
    if move.kind in ("start", "end"):
        mark = f'<circle cx="{x:.0f}" cy="{y - 4}" r="5" class="{move.kind}"/>'
        return [mark, _draw_text(x + 12, y, move.label, "start")]
    if x == to:
        path = f'<path d="M{x:.0f} {y - 10} h26 v14 h-20" class="arrow"/>'
        return [path, _draw_arrow_head(x + 2, y + 4, 1), _draw_text(x + 32, y + 1, move.label, "start")]
    side = 1 if to < x else -1
    line = f'<line x1="{x:.0f}" y1="{y}" x2="{to + 4 * side:.0f}" y2="{y}" class="arrow"/>'
    return [line, _draw_arrow_head(to + 2 * side, y, side), _draw_text((x + to) / 2, y - 5, move.label, "middle")]


def _draw_arrow_head(x: float, y: float, side: int) -> str:
    return f'<path d="M{x:.0f} {y} l{7 * side} -4 v8 z" class="head"/>'


def _draw_box(x: float, y: float, words: str, kind: str) -> str:
    wide = CHARACTER_WIDTH * len(words) + 16
    box = f'<rect x="{x - wide / 2:.0f}" y="{y - 11:.0f}" width="{wide:.0f}" height="22" rx="4" class="{kind}"/>'
    return box + _draw_text(x, y + 4, words, "middle")


def _draw_text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'


def render_fence(source: str, language: str, css_class: str, options: Any, md: Any, **more: Any) -> str:
    """What Markdown calls for a block of the language `mermaid`."""
    return render_svg(source)
