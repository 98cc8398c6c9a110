"""`atoll simulate`: goodput, uptime and the protocol on fleets of up to millions of chips, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, print_json
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.cli.simulate_run import Wish

METHODS = ("decoupled", "data-parallel", "elastic", "diloco", "streaming")

# What each kind of run reads, beside `plot`, `as_json` and what all of them do.
_ALWAYS = {"context", "days", "seed", "seeds", "jobs", "step_time", "as_json", "table", "mixed", "plot", "method"}
_CHIPS = {"mtbi_days", "chip_variance", "slow_downs"}
_ROUNDS = {"every", "fragments", "tau"}
_LINKS = {"adopt", "delay", "fragment_time"}
_ONE_JOB = {"learners", "chips", *_CHIPS}  # learners: accepted, though one job has none
_READ = {
    "--table": _CHIPS,
    "--mixed": {*_ROUNDS, *_LINKS},
    "data-parallel": _ONE_JOB,
    "elastic": _ONE_JOB,
    "diloco": {*_ONE_JOB, "speeds", *_ROUNDS, "exchange_time"},
    "streaming": {*_ONE_JOB, "speeds", *_ROUNDS, "exchange_time"},
}


# long: the list of options, with what each one means
def run(
    context: typer.Context,
    method: Annotated[
        str,
        Setting(
            "decoupled runs the cores of the protocol; data-parallel and elastic are one job with all chips; "
            "diloco and streaming wait for the slowest learner.",
            "NAME",
        ),
    ] = "decoupled",
    learners: Annotated[int, Setting("Learners, one per island.", "M")] = 8,
    chips: Annotated[int, Setting("Chips of all learners together.", "N")] = 1_200_000,
    days: Annotated[
        float | None, Setting("Simulated days. [default: 30; 4 with --table, 1/24 with --mixed]", "DAYS")
    ] = None,
    seed: Annotated[int, Setting("First seed. A seed fixes the whole world.", "S")] = 0,
    seeds: Annotated[
        int | None,
        Setting(
            "Seeds, counted up from the first; intervals are over them. "
            "[default: 3; 5 with --table or --mixed, 1 with --tape]",
            "COUNT",
        ),
    ] = None,
    jobs: Annotated[int | None, Setting("Processes to use. [default: all cores]", "COUNT")] = None,
    table: Annotated[
        bool, Setting("Goodput and uptime of all methods and sizes, beside the published figures.")
    ] = False,
    mixed: Annotated[
        bool, Setting("The published comparison of quorum and grace on two hardware generations.")
    ] = False,
    plot: Annotated[
        Path | None,
        Setting(
            "Draw the figure of --table into FILE (.png, .svg or .pdf); without --table this run is marked in it. "
            "Needs the extra 'plot'.",
            "FILE",
        ),
    ] = None,
    tape: Annotated[
        Path | None,
        Setting(
            "Write the tapes of one decoupled run into DIR, for check, story and replay; replay can train a model "
            "on them, if they have every fragment: give --full for long ones.",
            "DIR",
        ),
    ] = None,
    full: Annotated[
        bool, Setting("Simulate every fragment and every step of the protocol, however long it takes.")
    ] = False,
    protocol_hours: Annotated[
        float | None,
        Setting(
            "Simulate the cores of the protocol for the first so many hours only; goodput and uptime still cover "
            "all days. [default: what takes some eight seconds per seed]",
            "HOURS",
        ),
    ] = None,
    quorum: Annotated[int, Setting("Contributions that a merge needs.", "K")] = 1,
    grace: Annotated[float, Setting("Share of the slack to wait for more; 0: off.", "GAMMA")] = 0.5,
    every: Annotated[int, Setting("Steps between two rounds of a fragment.", "H")] = 24,
    fragments: Annotated[int, Setting("Fragments of the model.", "P")] = 24,
    tau: Annotated[int, Setting("Steps under which one synchronisation is hidden.", "TAU")] = 2,
    adopt: Annotated[str, Setting("carry, overwrite or blend.", "HOW")] = "carry",
    delay: Annotated[float, Setting("One way, of any message between island and syncer.", "SECONDS")] = 0.05,
    fragment_time: Annotated[float, Setting("Further, to send one fragment one way.", "SECONDS")] = 0.1,
    exchange_time: Annotated[float, Setting("One exchange of diloco and streaming.", "SECONDS")] = 0.8,
    step_time: Annotated[float, Setting("One inner step at full speed.", "SECONDS")] = 1.0,
    jitter: Annotated[float, Setting("Standard deviation of a step's duration, 0 to 1.", "SHARE")] = 0.0,
    lockstep: Annotated[bool, Setting("Learners wait for a round that is tau steps late, as others do.")] = False,
    speeds: Annotated[
        str | None, Setting("Speed classes: 1.0x4,0.82x4 is four at 1 and four at 0.82.", "CLASSES")
    ] = None,
    extra: Annotated[
        list[str] | None,
        Setting(
            "Learners that come and go: 4x0.8@0-3600 is four of speed 0.8 in the first hour. Repeatable.", "WHO@WHEN"
        ),
    ] = None,
    mtbi_days: Annotated[float, Setting("Mean time between interruptions of one chip; inf: none.", "DAYS")] = 365.0,
    chip_variance: Annotated[
        float,
        Setting("Standard deviation of step time between chips, 0 to 1; an island waits for its slowest.", "SHARE"),
    ] = 0.0,
    slow_downs: Annotated[
        str | None,
        Setting("Slow-downs per learner and hour, speed during one, mean length: 0.5:0.6:120.", "RATE:FACTOR:SECONDS"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a training run on a fleet of chips that fail.

    Says how much of the chip time is useful (goodput), when somebody steps (uptime), and what the protocol makes of it:
    tokens merged, pending and dropped, contributions per merge, staleness and effective H, each with its 95 % interval
    over seeds. The same seed gives the same figures. Figures that have no meaning for a method are null in the JSON:
    one job has neither merges nor staleness, and only decoupled keeps a ledger of merged, pending and dropped tokens.
    """
    from atoll.cli.simulate_run import Wish, read_extras, read_slow_downs, read_speeds
    from atoll.cli.simulate_show import TABLE_DAYS, TABLE_SEEDS
    from atoll.sim.decoupled import DecoupledConfig
    from atoll.sim.fleet import FleetConfig
    from atoll.sim.goodput import BarrierConfig

    _check_options(context, method, table, mixed, plot)
    if every < 1:
        raise ValueError(f"--every is {every}; give at least 1 step between two rounds of a fragment")
    slow = read_slow_downs(slow_downs)
    if not mtbi_days > 0.0:
        raise ValueError(f"--mtbi-days is {mtbi_days:g}; give days above 0, or inf for chips that never fail")
    defaults = (
        (TABLE_DAYS, TABLE_SEEDS) if table else (1.0 / 24.0, 5) if mixed else (30.0, 1 if tape is not None else 3)
    )
    wish = Wish(
        method=method,  # type: ignore[arg-type]
        learners=learners,
        chips=chips,
        days=defaults[0] if days is None else days,
        seed=seed,
        count=defaults[1] if seeds is None else seeds,
        jobs=jobs,
        fleet=FleetConfig(
            mtbi_s=mtbi_days * 86_400.0,
            step_time_s=step_time,
            chip_time_sigma=chip_variance,
            slowdowns_per_hour=slow.per_hour,
            slowdown_factor=slow.factor,
            slowdown_mean_s=slow.mean_s,
        ),
        protocol=DecoupledConfig(
            fragments=fragments,
            every_steps=every,
            overlap_steps=tau,
            quorum=quorum,
            grace_margin=grace,
            adopt=adopt,
            delay_s=delay,
            fragment_s=fragment_time,
            jitter=jitter,
            lockstep=lockstep,
        ),
        barrier=BarrierConfig(every, fragments, tau, exchange_time) if method in ("diloco", "streaming") else None,
        speeds=read_speeds(speeds),
        extras=read_extras(extra),
        full=full,
        protocol_hours=protocol_hours,
        tape=tape,
    )
    _simulate(wish, table, mixed, plot, as_json)


def _simulate(wish: Wish, table: bool, mixed: bool, plot: Path | None, as_json: bool) -> None:
    from atoll.cli.simulate_run import outcome_fields, simulate_run
    from atoll.cli.simulate_show import (
        check_plot,
        compare_mixed,
        draw_plot,
        show_outcome,
        show_tables,
        simulate_cells,
        table_fields,
        wish_for_plot,
    )

    if plot is not None:
        check_plot(plot)
    if mixed:
        compare_mixed(wish, as_json)
        return
    outcome = None if table else simulate_run(wish)
    cells = simulate_cells(wish if table else wish_for_plot(wish)) if table or plot is not None else []
    if plot is not None:
        draw_plot(plot, cells, outcome)
    if as_json:
        fields = table_fields(wish, cells) if outcome is None else outcome_fields(outcome)
        print_json({**fields, "plot": None if plot is None else str(plot)})
        return
    if outcome is None:
        show_tables(wish, cells)
    else:
        show_outcome(outcome)
    if plot is not None:
        print(f"The figure is in {plot}.")


def _check_options(context: typer.Context, method: str, table: bool, mixed: bool, plot: Path | None) -> None:
    """Refuse what would be ignored: whoever gives an option believes that it matters."""
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; give one of {', '.join(METHODS)}")
    if table and mixed:
        raise ValueError("--table and --mixed are two different runs; give one of them")
    kind = "--table" if table else "--mixed" if mixed else method
    given = {name for name in context.params if _is_given(context, name)}
    if (table or mixed) and "method" in given:
        raise ValueError(f"{kind} has methods of its own; leave --method out")
    if mixed and plot is not None:
        raise ValueError("--plot draws the figure of --table, not of --mixed; leave one of them out")
    read = _READ.get(kind)
    ignored = sorted(given - _ALWAYS - read) if read is not None else sorted(given & {"exchange_time"})
    if ignored:
        flag = "--" + ignored[0].replace("_", "-")
        raise ValueError(f"{flag} means nothing to {kind}; leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
