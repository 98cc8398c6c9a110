"""The goodput and uptime tables as a figure. Matplotlib comes with the extra `plot`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.simulate_run import Outcome
from atoll.cli.simulate_table import METRICS, chips_label, row_label
from atoll.sim.goodput import TableCell
from atoll.sim.published import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
