"""Results of `atoll simulate` for people: tables, sentences and figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from atoll.cli.output import Task, Tell, print_json, run_all
from atoll.cli.simulate_run import Outcome, Wish, how_sentence, is_one_job, seeds_sentence
from atoll.sim.decoupled import span
from atoll.sim.goodput import TABLE_CHIPS, TABLE_ROWS, Figure, GoodputResult, TableCell, estimate, over_seeds, simulate
from atoll.sim.mixed import MIXED_ROWS, MixedResult, MixedRow, run_mixed
from atoll.sim.published import Method, Metric, published_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_WIDTH = 80
"""Tables are laid out for this; a pipe has no width of its own."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1, which says that something was found wrong."""
        raise BrokenPipeError


def console() -> Console:
    made = _Console(highlight=False, soft_wrap=False)
    return made if made.width >= LEAST_WIDTH or made.is_terminal else _Console(highlight=False, width=LEAST_WIDTH)


def interval_text(figure: Figure, show: Callable[[float], str]) -> str:
    """Both ends, with the unit of `amount` said once."""
    if figure.low is None or figure.high is None:
        return "one seed"
    low, high = show(figure.low), show(figure.high)
    if low == high:
        return low
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(unit).rstrip() if unit else low} to {high}"


def percent(share: float) -> str:
    """
    >>> percent(0.98765), percent(0.99995), percent(0.0)
    ('98.8', '99.995', '0.0')
    """
    near = min(abs(1.0 - share), abs(share))
    places = 1 if near >= 0.005 or near == 0.0 else 2 if near >= 0.0005 else 3
    return f"{100.0 * share:.{places}f}"


def amount(count: float) -> str:
    """
    >>> amount(2_930_000_000_000), amount(1_234), amount(12.4)
    ('2.93 trillion', '1,234', '12')
    """
    for size, name in ((1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            places = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:.{places}f} {name}"
    return f"{count:,.0f}"


def steps(count: float) -> str:
    return f"{count:.2f}"


Row = tuple[str, Figure | None, Callable[[float], str], str]


def show_outcome(outcome: Outcome) -> None:
    wish, detail, ledger = outcome.wish, outcome.detail, outcome.ledger
    out = console()
    out.print(_title(outcome))
    out.print()
    rows: list[Row] = [
        ("goodput: chip time in steps that counted", outcome.goodput, percent, " %"),
        ("uptime: time in which somebody steps", outcome.uptime, percent, " %"),
        ("failures of chips", outcome.failures, amount, ""),
        ("tokens trained", outcome.tokens_trained, amount, ""),
    ]
    if detail is not None and ledger is not None:
        if not detail.whole:
            out.print(_table(f"all {span(outcome.goodput_days * 24.0)}", rows, wish.count > 1))
            out.print()
            rows = [("tokens trained", ledger.trained, amount, "")]
        lost = ", ".join(ledger.dropped_by_reason)
        rows += [
            ("  merged", ledger.merged_share, percent, " %"),
            ("  pending", ledger.pending_share, percent, " %"),
            (f"  dropped{f' ({lost})' if lost else ''}", ledger.dropped_share, percent, " %"),
        ]
    rows += [
        (f"contributions per merge, of {_learners(wish, outcome)}", outcome.contributions_per_merge, steps, ""),
        ("staleness: steps from copy to adoption", outcome.staleness_steps, steps, ""),
        (f"effective H: steps per merge (H = {wish.protocol.every_steps})", outcome.effective_h, steps, ""),
    ]
    title = "" if detail is None or detail.whole else f"the protocol, first {span(detail.hours)}"
    out.print(_table(title, rows, wish.count > 1))
    out.print()
    for sentence in _sentences(outcome):
        out.print(sentence)


def _table(title: str, rows: list[Row], intervals: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=intervals or title != "")
    table.add_column(title, width=41)
    table.add_column("mean" if intervals else "", justify="right", width=13, no_wrap=True)
    if intervals:
        table.add_column("95 % interval", justify="right", width=22, no_wrap=True)
    for name, figure, show, unit in rows:
        if figure is not None:
            table.add_row(name, show(figure.mean) + unit, *([interval_text(figure, show)] if intervals else []))
    return table


def _title(outcome: Outcome) -> str:
    wish = outcome.wish
    who = "one job" if is_one_job(wish) else f"{outcome.learners} learners"
    if wish.extras:
        who += f" and {sum(extra.count for extra in wish.extras)} that come and go"
    return f"{wish.method}: {who} on {wish.chips:,} chips for {span(wish.days * 24.0)}, {seeds_sentence(wish)}"


def _learners(wish: Wish, outcome: Outcome) -> str:
    return " + ".join(str(count) for count in (outcome.learners, *(extra.count for extra in wish.extras)))


def _sentences(outcome: Outcome) -> list[str]:
    wish = outcome.wish
    said = [how_sentence(outcome)]
    detail = outcome.detail
    if detail is not None and not detail.full:
        said[-1] += " --full simulates all of it."
    if outcome.core_goodput is not None and outcome.fleet_goodput is not None:
        ours, theirs = 100.0 * outcome.core_goodput.mean, 100.0 * outcome.fleet_goodput.mean
        said.append(f"For that time the cores say {ours:.2f} % goodput and the fleet model {theirs:.2f} %.")
    if outcome.suspected is not None and outcome.suspected.mean > 0.0:
        times = f"{outcome.suspected.mean:.3g} times" + (" per seed" if wish.count > 1 else "")
        said.append(f"The syncer suspected a silent learner {times}.")
    published = outcome.published("goodput")
    if published is not None:
        uptime = outcome.published("uptime")
        also = "" if uptime is None else f", uptime {100.0 * uptime:.0f} %"
        said.append(f"Published for this case: goodput {100.0 * published:.0f} %{also}.")
    tapes = outcome.tapes
    if tapes is not None:
        size = f"{tapes.size_bytes / 1e6:.1f} MB"
        said.append(f"{tapes.tapes} tapes with {tapes.entries:,} entries ({size}) are in {tapes.directory}.")
        if tapes.finished:
            said.append(f"After that time the run was finished in order, with {tapes.merges:,} merges in all.")
        if wish.protocol.lockstep:
            said.append("In lockstep learners wait for each other, which atoll check reports as a violation.")
    return said


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
        out.print(_metric_table(metric, [cell for cell in cells if cell.metric == metric]))
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


def _metric_table(metric: Metric, cells: Sequence[TableCell]) -> Table:
    chips = sorted({cell.chips for cell in cells})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"{metric}, %", title_justify="left")
    table.add_column("", no_wrap=True)
    for count in chips:
        table.add_column(chips_label(count), justify="right", no_wrap=True)
    for method, learners in dict.fromkeys((cell.method, cell.learners) for cell in cells):
        row = {cell.chips: cell for cell in cells if (cell.method, cell.learners) == (method, learners)}
        table.add_row(row_label(method, learners), *(_cell_text(row[count]) for count in chips))
    return table


def _cell_text(cell: TableCell) -> str:
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


SHARES = ("goodput", "goodput_fast", "goodput_slow")
MEASURES = ("contributions_per_merge", "effective_h", "staleness_steps")


def compare_mixed(wish: Wish, as_json: bool) -> None:
    """Run every row on every seed and show them side by side."""
    tasks: list[Task[MixedResult]] = [partial(_run_row, wish, row, seed) for row in MIXED_ROWS for seed in wish.seeds]
    results = iter(run_all("comparing", tasks, wish.processes))
    rows = [(row, _figures([next(results) for _ in wish.seeds])) for row in MIXED_ROWS]
    if as_json:
        print_json(_mixed_fields(wish, rows))
    else:
        _show_mixed(wish, rows)


def _run_row(wish: Wish, row: MixedRow, seed: int, tell: Tell) -> MixedResult:
    return run_mixed(row, wish.protocol, wish.days * 24.0, seed, step_time_s=wish.fleet.step_time_s, on_progress=tell)


def _figures(results: list[MixedResult]) -> dict[str, Figure]:
    figures = {name: over_seeds([getattr(r, name) for r in results], least=0.0, most=1.0) for name in SHARES}
    return figures | {name: over_seeds([getattr(r, name) for r in results], least=0.0) for name in MEASURES}


def _mixed_fields(wish: Wish, rows: list[tuple[MixedRow, dict[str, Figure]]]) -> dict[str, object]:
    return {
        "days": wish.days,
        "seeds": list(wish.seeds),
        "rows": [
            {
                "quorum": row.quorum,
                "grace": row.grace,
                "lockstep": row.lockstep,
                "published_goodput": row.published_percent / 100.0,
                **{name: figure.mean for name, figure in figures.items()},
                **{f"{name}_ci": figure.interval() for name, figure in figures.items()},
            }
            for row, figures in rows
        ],
        "settings": wish.settings(),
    }


def _show_mixed(wish: Wish, rows: list[tuple[MixedRow, dict[str, Figure]]]) -> None:
    out = console()
    out.print("Eight learners, four of each of two generations, the slower 18 % behind; 10 % jitter, no failures.")
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row, _ in rows:
        table.add_column(row.label, justify="right", no_wrap=True)
    table.add_row("learners", *("wait for the round" if row.lockstep else "never wait" for row, _ in rows))
    for name, label in (
        ("goodput", "goodput, all chips, %"),
        ("goodput_fast", "  fast generation, %"),
        ("goodput_slow", "  slow generation, %"),
    ):
        table.add_row(label, *(_figure_text(figures[name].times(100.0), 1) for _, figures in rows))
    table.add_row("goodput, published, %", *(f"{row.published_percent:.0f}" for row, _ in rows))
    for name, label in (
        ("contributions_per_merge", "contributions per merge"),
        ("effective_h", "effective H, steps"),
        ("staleness_steps", "staleness, steps"),
    ):
        table.add_row(label, *(_figure_text(figures[name], 2) for _, figures in rows))
    out.print(table)
    out.print()
    out.print(
        "How goodput was defined for the published row is not said. Ours is the share of chip time spent stepping; the"
        " fast generation is the one that waits. A decoupled learner never waits, whatever the quorum: a loss at K = 8"
        " means that learners waited for the round, so that column is run in lockstep."
    )
    out.print(f"Every fragment and every step for {span(24.0 * wish.days)}, {wish.count} seeds, 95 % interval.")


def _figure_text(figure: Figure, places: int) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.{places}f}"
    return f"{figure.mean:.{places}f} ±{max(figure.high - figure.mean, figure.mean - figure.low):.{places}f}"


SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, told apart by every kind of colour vision; markers and dashes say the same once more.
_STYLES = (
    ("#000000", "s", (0, (1, 1))),
    ("#D55E00", "D", (0, (4, 1.5))),
    ("#56B4E9", "v", "-"),
    ("#009E73", "^", "-"),
    ("#0072B2", "o", "-"),
    ("#CC79A7", "P", "-"),
)
_TITLES: dict[Metric, str] = {
    "goodput": "Goodput: share of chip time in steps that counted",
    "uptime": "Uptime: share of time in which somebody steps",
}


def check_plot(path: Path) -> None:
    """Before anything is simulated: can this file be drawn?"""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"cannot draw {path}; end its name with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which comes with the extra 'plot': pip install 'atoll[plot]'")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {folder}; create it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write {path}; choose a place that you may write to")


def draw_plot(path: Path, cells: Sequence[TableCell], outcome: Outcome | None) -> None:
    """Both metrics against chips, with published points and, if there is one, the run itself."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    if path.suffix.lower() == ".svg":
        settings["svg.hashsalt"] = "atoll"  # the same figure, the same file
    with pyplot.rc_context(settings):
        figure, panels = pyplot.subplots(1, 2, figsize=(11.0, 5.2), sharex=True, sharey=True)
        for metric, panel in zip(METRICS, panels, strict=True):
            _draw_panel(panel, metric, [cell for cell in cells if cell.metric == metric], outcome)
        panels[0].set_ylabel("percent")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0.0, 0.12, 1.0, 1.0))
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)
        pyplot.close(figure)


def _never_down(cells: Sequence[TableCell], learners: int) -> bool:
    """Lines so close to 100 % that they hide each other."""
    return all(cell.ours.mean > 99.0 for cell in cells if (cell.method, cell.learners) == ("decoupled", learners))


def _draw_panel(panel: Axes, metric: Metric, cells: Sequence[TableCell], outcome: Outcome | None) -> None:
    ticks = sorted({cell.chips for cell in cells})
    rows = dict.fromkeys((cell.method, cell.learners) for cell in cells)
    for (method, learners), (colour, marker, dashes) in zip(rows, _STYLES, strict=False):
        row = [cell for cell in cells if (cell.method, cell.learners) == (method, learners)]
        chips = [cell.chips for cell in row]
        label = row_label(method, learners)
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dashes, "label": label}
        panel.plot(chips, [cell.ours.mean for cell in row], markersize=4.5, linewidth=1.6, **style)
        low, high = [cell.ours.low for cell in row], [min(cell.ours.high, 100.0) for cell in row]
        panel.fill_between(chips, low, high, color=colour, alpha=0.2, linewidth=0)
        published = {cell.chips: cell.published for cell in row if cell.published is not None}
        panel.plot(
            list(published),
            list(published.values()),
            linestyle="none",
            marker=marker,
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1.2,
        )
    panel.plot([], [], "o", markersize=11, mfc="none", mec="#555555", label="published, arXiv 2604.21428")
    panel.fill_between([], [], [], color="#555555", alpha=0.2, linewidth=0, label="95 % interval over seeds")
    if outcome is not None:
        share = outcome.goodput if metric == "goodput" else outcome.uptime
        panel.plot(
            [outcome.wish.chips], [100.0 * share.mean], "*", color="#E69F00", mec="black", ms=15, label="this run"
        )
    hidden = [str(m) for method, m in rows if method == "decoupled" and _never_down(cells, m)]
    if len(hidden) > 1:
        where: dict[str, Any] = {"xytext": (0, -16), "textcoords": "offset points"}
        panel.annotate(f"M = {', '.join(hidden)}: above 99 %", (ticks[0], 100.0), color="#555555", **where)
    panel.set_title(_TITLES[metric], fontsize=11, loc="left")
    panel.set_xscale("log")
    panel.set_xticks(ticks, [chips_label(count) for count in ticks])
    panel.minorticks_off()
    panel.set_xlabel("chips")
    panel.set_ylim(0.0, 104.0)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
