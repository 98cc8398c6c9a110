"""A plan for people and for scripts: tables, sentences, JSON fields and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from atoll.cli.simulate_show import amount, console, percent
from atoll.sim.bandwidth import UTILISATIONS, rate_for, utilisation
from atoll.sim.plan import BandwidthPlan, MethodPlan, PlanWish, exchanges
from atoll.sim.published import PUBLISHED_RATE_PARAMS, PUBLISHED_RATE_STEP_S, PUBLISHED_RATES_GBIT_S


def rate_text(rate_bit_s: float | None, unit_bit_s: float) -> str:
    """
    >>> [rate_text(rate, 1e9) for rate in (1982e9, 198.2e9, 0.8484e9, math.inf, None)]
    ['1,982', '198', '0.848', 'none', '']
    """
    if rate_bit_s is None:
        return ""
    if math.isinf(rate_bit_s):
        return "none"
    units = rate_bit_s / unit_bit_s
    return f"{units:.3g}" if units < 999.5 else f"{units:,.0f}"


def show_plan(plan: BandwidthPlan) -> None:
    out = console()
    wish = plan.wish
    steps = sorted({island.step_s for island in wish.islands})
    pace = f"{steps[0]:.3g} s" if len(steps) == 1 else f"{steps[0]:.3g} to {steps[-1]:.3g} s"
    out.print(
        f"{amount(wish.params)} parameters on {len(wish.islands)} sites, steps of {pace},"
        f" H = {wish.every_steps}, P = {wish.fragments}, tau = {wish.tau_steps}."
    )
    out.print(_rates(plan))
    if any(row.effective_h is not None and row.method.startswith("decoupled") for row in plan.rows) or any(
        row.goodput is not None or row.days is not None for row in plan.rows
    ):
        out.print(_outcomes(plan))
    for note in plan.notes:
        out.print(note)
    for warning in plan.warnings:
        out.print(f"Warning: {warning}.")


def _rates(plan: BandwidthPlan) -> Table:
    least = min(rate for row in plan.rows for rate in row.rates_bit_s.values())
    name, unit_bit_s = ("Gbit/s", 1e9) if least >= 1e7 else ("Mbit/s", 1e6)
    table = Table(title=f"{name} that a site's link needs, by compute utilisation", title_justify="left", box=None)
    table.add_column("method", no_wrap=True)
    for share in UTILISATIONS:
        table.add_column(f"{100 * share:g} %", justify="right")
    table.add_column(f"keeps H = {plan.wish.every_steps}", justify="right")
    for row in plan.rows:
        rates = [row.rates_bit_s[share] for share in UTILISATIONS]
        table.add_row(row.method, *(rate_text(rate, unit_bit_s) for rate in (*rates, row.keeps_h_bit_s)))
    return table


def _outcomes(plan: BandwidthPlan) -> Table:
    """Only columns of which something is known."""
    columns: list[tuple[str, Callable[[MethodPlan], str]]] = [
        ("step s", lambda row: "" if row.step_s is None else f"{row.step_s:.3g}"),
        ("used %", lambda row: "" if row.utilisation is None else percent(row.utilisation)),
        ("H", lambda row: "" if row.effective_h is None else f"{row.effective_h:.0f}"),
        ("goodput %", lambda row: "" if row.goodput is None else percent(row.goodput)),
        *([] if plan.wish.tokens is not None else [("GB/site/day", _gb_per_day)]),
        ("days", lambda row: _size(row.days)),
        ("GB/site", lambda row: _size(row.gb_per_site)),
        ("cost", lambda row: _size(row.cost)),
    ]
    table = Table(title="With these islands and links", title_justify="left", box=None)
    table.add_column("method", no_wrap=True)
    known = [(title, show) for title, show in columns if any(show(row) for row in plan.rows)]
    for title, _ in known:
        table.add_column(title, justify="right")
    for row in plan.rows:
        table.add_row(row.method, *(show(row) for _, show in known))
    return table


def _gb_per_day(row: MethodPlan) -> str:
    return _size(row.gb_per_site_day)


def _size(value: float | None) -> str:
    """
    >>> _size(1234567.0), _size(0.0123), _size(12.34), _size(0.0)
    ('1,234,567', '0.0123', '12.3', '0')
    """
    return "" if value is None else f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def plan_fields(plan: BandwidthPlan) -> dict[str, object]:
    wish = plan.wish
    fields: dict[str, object] = {
        "params": wish.params,
        "sites": len(wish.islands),
        "islands": [{key: _finite(value) for key, value in asdict(island).items()} for island in wish.islands],
        "settings": {
            "every_steps": wish.every_steps,
            "fragments": wish.fragments,
            "tau_steps": wish.tau_steps,
            "codec": wish.codec,
            "star": wish.star,
            "slice_chips": wish.slice_chips,
            "tokens": wish.tokens,
        },
        "rates_gbit_s": {
            row.method: {f"{share:g}": _gbit(rate) for share, rate in row.rates_bit_s.items()} for row in plan.rows
        },
        "keeps_h_gbit_s": {row.method: _gbit(row.keeps_h_bit_s) for row in plan.rows if row.keeps_h_bit_s is not None},
        "methods": {row.method: _row_fields(row) for row in plan.rows},
        "published_rates_gbit_s": _published(plan),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }
    return fields


def _row_fields(row: MethodPlan) -> dict[str, object]:
    elsewhere = ("method", "rates_bit_s", "keeps_h_bit_s")
    return {name: _finite(value) for name, value in asdict(row).items() if name not in elsewhere}


def _finite(value: object) -> object:
    """Infinities are no JSON; null says that there is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _gbit(rate_bit_s: float | None) -> float | None:
    return None if rate_bit_s is None or math.isinf(rate_bit_s) else float(f"{rate_bit_s / 1e9:.6g}")


def _published(plan: BandwidthPlan) -> dict[str, dict[str, float]] | None:
    """The published cells of exactly this question, where there are any."""
    cells = published_cells(plan.wish)
    return {name: {f"{share:g}": rate for share, rate in row.items()} for name, row in cells.items()} or None


def published_cells(wish: PlanWish) -> dict[str, dict[float, float]]:
    same = wish.params == PUBLISHED_RATE_PARAMS and all(
        island.step_s == PUBLISHED_RATE_STEP_S and island.delay_s == 0.0 for island in wish.islands
    )
    if not same or (wish.every_steps, wish.fragments, wish.star) != (24, 24, False):
        return {}
    return {name: row for (sites, name), row in PUBLISHED_RATES_GBIT_S.items() if sites == len(wish.islands)}


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
