"""Render the mermaid diagrams of the pages as SVG when the site is built, so that readers load no scripts.

State diagrams are drawn like sequence diagrams, with a column for each state and a row for each transition. This needs
no layout algorithm and has room for every label. Only the syntax that our pages use is supported; other lines stop the
build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import Any

ROW_HEIGHT, HEADER_HEIGHT, CHARACTER_WIDTH, MIN_GAP = 30, 34, 7.3, 120


@dataclass
class DiagramRow:
    """One row: an arrow between two columns, or a note, start or end mark at one column (`kind`)."""

    kind: str
    source: str
    target: str
    label: str


@dataclass
class Diagram:
    columns: dict[str, str] = field(default_factory=dict)  # title by name in the source
    rows: list[DiagramRow] = field(default_factory=list)

    def column_index(self, name: str) -> int:
        return list(self.columns).index(name)


def parse_diagram(source: str) -> Diagram:
    """Parse the source of one diagram. Raise `ValueError` for an unsupported line."""
    kind, *lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    if kind not in ("sequenceDiagram", "stateDiagram-v2"):
        raise ValueError(f"diagrams of kind {kind!r} are not supported; use a sequence or a state diagram")
    diagram = Diagram()
    for line in lines:
        _parse_line(diagram, line)
    return diagram


def _parse_line(diagram: Diagram, line: str) -> None:
    if found := re.fullmatch(r"participant (\w+) as (.+)", line):
        diagram.columns[found[1]] = found[2]
    elif found := re.fullmatch(r"(\w+)->>(\w+): (.+)", line):
        diagram.rows.append(DiagramRow("arrow", found[1], found[2], found[3]))
    elif found := re.fullmatch(r"Note over (\w+): (.+)", line):
        diagram.rows.append(DiagramRow("note", found[1], found[1], found[2]))
    elif found := re.fullmatch(r"(\w+|\[\*\]) --> (\w+|\[\*\])(?:: (.+))?", line):
        for name in (found[1], found[2]):
            if name != "[*]":
                diagram.columns.setdefault(name, name)
        if found[1] == "[*]":
            diagram.rows.append(DiagramRow("start", found[2], found[2], "start"))
        elif found[2] == "[*]":
            diagram.rows.append(DiagramRow("end", found[1], found[1], "end"))
        else:
            diagram.rows.append(DiagramRow("arrow", found[1], found[2], found[3] or ""))
    else:
        raise ValueError(f"the line {line!r} of a diagram is not supported")
    for row in diagram.rows[-1:]:
        if unknown := {row.source, row.target} - set(diagram.columns):
            names = ", ".join(sorted(unknown))
            raise ValueError(f"the line {line!r} of a diagram names {names}, which is not a column")


def render_svg(source: str) -> str:
    diagram = parse_diagram(source)
    gap = max([MIN_GAP, *(_min_gap(diagram, row) for row in diagram.rows)])
    titles = list(diagram.columns.values())
    left = max([CHARACTER_WIDTH * len(titles[0]) / 2 + 14, *(_overhang(diagram, m, gap, 0) for m in diagram.rows)])
    last = len(titles) - 1
    right = max([CHARACTER_WIDTH * len(titles[-1]) / 2 + 14, *(_overhang(diagram, m, gap, last) for m in diagram.rows)])
    xs = [left + gap * i for i in range(len(titles))]
    width, height = xs[-1] + right, HEADER_HEIGHT + ROW_HEIGHT * (len(diagram.rows) + 1)
    parts = [f'<line x1="{x:.0f}" y1="{HEADER_HEIGHT}" x2="{x:.0f}" y2="{height}" class="life"/>' for x in xs]
    parts += [_draw_box(x, HEADER_HEIGHT / 2, title, "who") for x, title in zip(xs, titles, strict=True)]
    for number, row in enumerate(diagram.rows, 1):
        parts += _draw_row(
            row,
            xs[diagram.column_index(row.source)],
            xs[diagram.column_index(row.target)],
            HEADER_HEIGHT + ROW_HEIGHT * number,
        )
    label = escape(
        "; ".join(f"{m.source} to {m.target}: {m.label}" for m in diagram.rows if m.kind == "arrow"), quote=True
    )
    return (
        f'<div class="chart"><svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img"'
        f' aria-label="{label}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg></div>'
    )


def _min_gap(diagram: Diagram, row: DiagramRow) -> float:
    """Return the minimum distance of columns for the label of this row."""
    columns = abs(diagram.column_index(row.source) - diagram.column_index(row.target))
    if row.kind != "arrow":
        return 0
    return (CHARACTER_WIDTH * len(row.label) + (30 if columns else 50)) / max(columns, 1)


def _overhang(diagram: Diagram, row: DiagramRow, gap: float, edge: int) -> float:
    """Return how far this row extends beyond the column at the edge."""
    half = CHARACTER_WIDTH * len(row.label) / 2 + 14
    inwards = gap * abs(diagram.column_index(row.source) - edge)
    if row.kind == "note":
        return half - inwards
    is_label_right = row.kind != "arrow" or row.source == row.target
    return 2 * half + 40 - inwards if is_label_right and edge else 0


def _draw_row(row: DiagramRow, x: float, to: float, y: float) -> list[str]:
    if row.kind == "note":
        return [_draw_box(x, y - 4, row.label, "note")]
    if row.kind in ("start", "end"):
        mark = f'<circle cx="{x:.0f}" cy="{y - 4}" r="5" class="{row.kind}"/>'
        return [mark, _draw_text(x + 12, y, row.label, "start")]
    if x == to:
        path = f'<path d="M{x:.0f} {y - 10} h26 v14 h-20" class="arrow"/>'
        return [path, _draw_arrow_head(x + 2, y + 4, 1), _draw_text(x + 32, y + 1, row.label, "start")]
    side = 1 if to < x else -1
    line = f'<line x1="{x:.0f}" y1="{y}" x2="{to + 4 * side:.0f}" y2="{y}" class="arrow"/>'
    return [line, _draw_arrow_head(to + 2 * side, y, side), _draw_text((x + to) / 2, y - 5, row.label, "middle")]


def _draw_arrow_head(x: float, y: float, side: int) -> str:
    return f'<path d="M{x:.0f} {y} l{7 * side} -4 v8 z" class="head"/>'


def _draw_box(x: float, y: float, text: str, kind: str) -> str:
    width = CHARACTER_WIDTH * len(text) + 16
    box = f'<rect x="{x - width / 2:.0f}" y="{y - 11:.0f}" width="{width:.0f}" height="22" rx="4" class="{kind}"/>'
    return box + _draw_text(x, y + 4, text, "middle")


def _draw_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def render_fence(source: str, language: str, css_class: str, options: Any, md: Any, **more: Any) -> str:
    """Render a fenced block of the language `mermaid`. Markdown calls this."""
    return render_svg(source)
