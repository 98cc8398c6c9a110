"""The goodput and uptime tables, beside the published cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.table import Table

from atoll.cli.processes import Task, Tell, run_all
from atoll.cli.simulate_show import console
from atoll.cli.simulate_wish import Wish
from atoll.sim.decoupled import span
from atoll.sim.goodput import TABLE_CHIPS, TABLE_ROWS, GoodputResult, TableCell, estimate, simulate
from atoll.sim.published import Method, Metric, published_percent

TABLE_DAYS = 4.0
TABLE_SEEDS = 5
"""Together enough for intervals well below a point."""

METRICS: tuple[Metric, ...] = ("goodput", "uptime")


def simulate_cells(
    wish: Wish, rows: Sequence[tuple[Method, int]] = TABLE_ROWS, chips: Sequence[int] = TABLE_CHIPS
) -> list[TableCell]:
    """Every row at every number of chips, by the fleet model."""
    if wish.count < 2:
        raise ValueError("a table over one seed has no intervals; give --seeds 2 or more")
    # The largest first, so that no process is left alone with one at the end.
    places = [(row, count) for count in sorted(chips, reverse=True) for row in rows]
    tasks: list[Task[GoodputResult]] = [
        partial(_simulate_cell, wish, row, count, seed) for row, count in places for seed in wish.seeds
    ]
    results = iter(run_all("simulating the table", tasks, wish.processes))
    runs = {place: [next(results) for _ in wish.seeds] for place in places}
    return [
        TableCell(
            method,
            learners,
            count,
            metric,
            estimate(100.0 * getattr(run, metric) for run in runs[((method, learners), count)]),
            published_percent(method, learners, count, metric),
        )
        for metric in METRICS
        for method, learners in rows
        for count in chips
    ]


def wish_for_plot(wish: Wish) -> Wish:
    """The table around one run: the same chips and seeds' beginning, as long as a table needs."""
    return replace(wish, days=TABLE_DAYS, count=TABLE_SEEDS, tape=None, speeds=(), extras=())


def _simulate_cell(wish: Wish, row: tuple[Method, int], chips: int, seed: int, tell: Tell) -> GoodputResult:
    method, learners = row
    return simulate(wish.fleet, method, learners, chips, wish.days, seed)


def row_label(method: Method, learners: int) -> str:
    names = {"data-parallel": "one job, not elastic", "elastic": "one job, elastic"}
    return names.get(method, f"M = {learners}")


def chips_label(chips: int) -> str:
    return f"{chips / 1e6:g}M" if chips >= 1_000_000 else f"{chips / 1e3:g}k"


def show_tables(wish: Wish, cells: Sequence[TableCell]) -> None:
    out = console()
    for metric in METRICS:
        out.print(_table(metric, [cell for cell in cells if cell.metric == metric]))
        out.print()
    worst = max((abs(cell.difference) for cell in cells if cell.difference is not None), default=0.0)
    out.print(
        "Published cells have a second line: the published figure, and ours less published. The others are predictions."
        f" Largest difference {worst:.1f} points. Each cell: {span(24.0 * wish.days)}, {wish.count} seeds,"
        " 95 % interval over them."
    )
    out.print(
        "The press figure of 88 % against 27 % is M = 8 against the job that is not elastic, at 1.2M chips; against the"
        " elastic job it is 88 % against 58 %."
    )


def _table(metric: Metric, cells: Sequence[TableCell]) -> Table:
    chips = sorted({cell.chips for cell in cells})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"{metric}, %", title_justify="left")
    table.add_column("", no_wrap=True)
    for count in chips:
        table.add_column(chips_label(count), justify="right", no_wrap=True)
    for method, learners in dict.fromkeys((cell.method, cell.learners) for cell in cells):
        row = {cell.chips: cell for cell in cells if (cell.method, cell.learners) == (method, learners)}
        table.add_row(row_label(method, learners), *(_text(row[count]) for count in chips))
    return table


def _text(cell: TableCell) -> str:
    ours = f"{cell.ours.mean:.1f} ±{cell.ours.high - cell.ours.mean:.1f}"
    if cell.difference is None:
        return ours
    difference = round(cell.difference, 1) + 0.0  # never -0.0
    return f"{ours}\n{cell.published:.0f} {difference:+.1f}"


def table_fields(wish: Wish, cells: Sequence[TableCell]) -> dict[str, object]:
    """In percent, as published; an interval is over seeds."""
    return {
        "days": wish.days,
        "seeds": list(wish.seeds),
        "cells": [
            {
                "metric": cell.metric,
                "method": cell.method,
                "learners": cell.learners,
                "chips": cell.chips,
                "percent": cell.ours.mean,
                "percent_ci": [cell.ours.low, cell.ours.high],
                "published_percent": cell.published,
                "difference": cell.difference,
            }
            for cell in cells
        ],
        "settings": wish.settings(),
    }
