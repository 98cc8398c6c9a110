"""Compute utilisation against the rate of a link, for all methods of a plan. Matplotlib comes with the extra `plot`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from atoll.cli.plan_show import published_cells
from atoll.cli.simulate_show import amount
from atoll.sim.bandwidth import rate_for, utilisation
from atoll.sim.plan import PlanWish, exchanges

# Okabe and Ito's colours, told apart by every kind of colour vision; dashes say the same once more.
_STYLES: tuple[tuple[str, Any], ...] = (
    ("#000000", (0, (1, 1))),
    ("#D55E00", (0, (4, 1.5))),
    ("#E69F00", (0, (6, 1, 1, 1))),
    ("#56B4E9", "-"),
    ("#009E73", "-"),
    ("#0072B2", "-"),
    ("#CC79A7", "-"),
)
_POINTS = 300


def draw_plan(path: Path, wish: PlanWish) -> None:
    """One curve for each method, published points where this is the published question, and the plan's own links."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    if path.suffix.lower() == ".svg":
        settings["svg.hashsalt"] = "atoll"  # the same figure, the same file
    methods = exchanges(wish)
    low = min(rate_for(exchange, load, 0.2) for exchange, load in methods.values())
    wanted = [rate_for(exchange, load, 0.99) for exchange, load in methods.values()]
    high = 2.0 * max((rate for rate in wanted if not math.isinf(rate)), default=1e12)
    rates = [low * (high / low) ** (point / (_POINTS - 1)) for point in range(_POINTS)]
    published = published_cells(wish)
    with pyplot.rc_context(settings):
        figure, panel = pyplot.subplots(figsize=(9.0, 5.2))
        for (name, (exchange, load)), (colour, dashes) in zip(methods.items(), _STYLES, strict=True):
            shares = [100.0 * utilisation(exchange, load, rate) for rate in rates]
            panel.plot(
                [rate / 1e9 for rate in rates], shares, color=colour, linestyle=dashes, linewidth=1.7, label=name
            )
            cells = published.get(name, {})
            panel.plot(list(cells.values()), [100.0 * u for u in cells], "o", ms=9, mfc="none", mec=colour, mew=1.2)
        if published:
            panel.plot([], [], "o", ms=9, mfc="none", mec="#555555", label="published, arXiv 2604.21428")
        if wish.thinnest_bit_s is not None:
            panel.axvline(wish.thinnest_bit_s / 1e9, color="#555555", linewidth=0.9, label="the thinnest link planned")
        panel.set_xscale("log")
        panel.set_xlabel("Gbit/s of a site's link, each direction")
        panel.set_ylabel("compute utilisation, %")
        panel.set_ylim(0.0, 104.0)
        title = (
            f"{amount(wish.params)} parameters on {len(wish.islands)} sites; decoupled as the published table counts"
        )
        panel.set_title(title, fontsize=11, loc="left")
        panel.grid(axis="y", color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        figure.legend(loc="lower center", ncols=3, frameon=False, fontsize=9)
        figure.tight_layout(rect=(0.0, 0.15, 1.0, 1.0))
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)
        pyplot.close(figure)
