"""`atoll simulate`: goodput, uptime and the protocol on fleets of up to millions of chips, on a virtual clock."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from atoll.cli.options import OptionsOf, flag_of, is_given
from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting

# Names of the options that each kind of run reads.
_ALWAYS = {
    *("method", "given_days", "seed", "given_count", "jobs", "step_time_s", "table", "mixed", "plot", "as_json"),
}
_CHIPS = {"mtbi_s", "chip_time_sigma", "slow_downs"}
_ROUNDS = {"every_steps", "fragments", "overlap_steps"}
_LINKS = {"adopt", "delay_s", "fragment_s"}
_ONE_JOB = {"learners", "chips", *_CHIPS}  # learners: accepted, though one job has none
_READ = {
    "--table": _CHIPS,
    "--mixed": {*_ROUNDS, *_LINKS},
    "data-parallel": _ONE_JOB,
    "elastic": _ONE_JOB,
    "diloco": {*_ONE_JOB, "speeds", *_ROUNDS, "exchange_time"},
    "streaming": {*_ONE_JOB, "speeds", *_ROUNDS, "exchange_time"},
}


def run(
    context: typer.Context,
    options: Annotated[Any, OptionsOf("atoll.cli.simulate_run:SimulateOptions")],
    slow_downs: Annotated[
        str | None,
        Setting("Slow-downs per learner and hour, speed during one, mean length: 0.5:0.6:120.", "RATE:FACTOR:SECONDS"),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Simulate a training run on a fleet of chips that fail.

    Says how much of the chip time is useful (goodput), when somebody steps (uptime), and what the protocol makes of it:
    tokens merged, pending and dropped, contributions per merge, staleness and effective H, each with its 95 % interval
    over seeds. The same seed gives the same figures. Figures that have no meaning for a method are null in the JSON:
    one job has neither merges nor staleness, and only decoupled keeps a ledger of merged, pending and dropped tokens.
    """
    from dataclasses import replace

    from atoll.cli.simulate_run import SimulateOptions, read_slow_downs, run_simulation

    wish: SimulateOptions = options
    _check_options(context, wish)
    if slow_downs is not None:
        wish = replace(wish, fleet=replace(wish.fleet, **read_slow_downs(slow_downs)))
    return run_simulation(wish)


def _check_options(context: typer.Context, wish: Any) -> None:
    """Refuse an option that would be ignored."""
    from atoll.sim.published import Method

    methods = get_args(Method)
    if wish.method not in methods:
        raise ValueError(f"there is no method {wish.method!r}; give one of {', '.join(methods)}")
    if wish.table and wish.mixed:
        raise ValueError("--table and --mixed are two different runs; give one of them")
    kind = "--table" if wish.table else "--mixed" if wish.mixed else wish.method
    given = {name for name in context.params if is_given(context, name)}
    if (wish.table or wish.mixed) and "method" in given:
        raise ValueError(f"{kind} has methods of its own; leave --method out")
    if wish.mixed and wish.plot is not None:
        raise ValueError("--plot draws the figure of --table, not of --mixed; leave one of them out")
    read = _READ.get(kind)
    ignored = sorted(given & {"exchange_time"} if read is None else given - _ALWAYS - read)
    if ignored:
        raise ValueError(f"{flag_of(context, ignored[0])} means nothing to {kind}; leave it out")
