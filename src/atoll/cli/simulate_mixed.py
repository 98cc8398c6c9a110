"""The published comparison of quorum and grace on two generations of hardware, in a table."""

from __future__ import annotations

from functools import partial

from rich.table import Table

from atoll.cli.output import print_json
from atoll.cli.processes import Task, Tell, run_all
from atoll.cli.simulate_show import console
from atoll.cli.simulate_wish import Wish
from atoll.sim.decoupled import span
from atoll.sim.goodput import Figure, over_seeds
from atoll.sim.mixed import MIXED_ROWS, MixedResult, MixedRow, run_mixed

SHARES = ("goodput", "goodput_fast", "goodput_slow")
MEASURES = ("contributions_per_merge", "effective_h", "staleness_steps")


def compare_mixed(wish: Wish, as_json: bool) -> None:
    """Run every row on every seed and show them side by side."""
    tasks: list[Task[MixedResult]] = [partial(_run, wish, row, seed) for row in MIXED_ROWS for seed in wish.seeds]
    results = iter(run_all("comparing", tasks, wish.processes))
    rows = [(row, _figures([next(results) for _ in wish.seeds])) for row in MIXED_ROWS]
    if as_json:
        print_json(_fields(wish, rows))
    else:
        _show(wish, rows)


def _run(wish: Wish, row: MixedRow, seed: int, tell: Tell) -> MixedResult:
    return run_mixed(row, wish.protocol, wish.days * 24.0, seed, step_time_s=wish.fleet.step_time_s, on_progress=tell)


def _figures(results: list[MixedResult]) -> dict[str, Figure]:
    figures = {name: over_seeds([getattr(r, name) for r in results], least=0.0, most=1.0) for name in SHARES}
    return figures | {name: over_seeds([getattr(r, name) for r in results], least=0.0) for name in MEASURES}


def _fields(wish: Wish, rows: list[tuple[MixedRow, dict[str, Figure]]]) -> dict[str, object]:
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


def _show(wish: Wish, rows: list[tuple[MixedRow, dict[str, Figure]]]) -> None:
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
        table.add_row(label, *(_text(figures[name].times(100.0), 1) for _, figures in rows))
    table.add_row("goodput, published, %", *(f"{row.published_percent:.0f}" for row, _ in rows))
    for name, label in (
        ("contributions_per_merge", "contributions per merge"),
        ("effective_h", "effective H, steps"),
        ("staleness_steps", "staleness, steps"),
    ):
        table.add_row(label, *(_text(figures[name], 2) for _, figures in rows))
    out.print(table)
    out.print()
    out.print(
        "How goodput was defined for the published row is not said. Ours is the share of chip time spent stepping; the"
        " fast generation is the one that waits. A decoupled learner never waits, whatever the quorum: a loss at K = 8"
        " means that learners waited for the round, so that column is run in lockstep."
    )
    out.print(f"Every fragment and every step for {span(24.0 * wish.days)}, {wish.count} seeds, 95 % interval.")


def _text(figure: Figure, places: int) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.{places}f}"
    return f"{figure.mean:.{places}f} ±{max(figure.high - figure.mean, figure.mean - figure.low):.{places}f}"
