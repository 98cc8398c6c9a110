"""`atoll simulate`: simulate goodput, uptime and the protocol on fleets of up to millions of chips."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from atoll.cli.options import DataclassOptions, is_given, option_flag
from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting

# Names of the options that each kind of run uses.
_COMMON_OPTIONS = {
    *(
        "method",
        "requested_days",
        "seed",
        "requested_seed_count",
        "jobs",
        "step_time_s",
        "table",
        "mixed",
        "plot",
        "as_json",
    ),
}
_CHIP_OPTIONS = {"mtbi_s", "chip_time_sigma", "slow_downs"}
_ROUND_OPTIONS = {"every_steps", "fragments", "overlap_steps"}
_LINK_OPTIONS = {"adopt", "delay_s", "fragment_s"}
# `learners` is accepted for these methods, although a single job has no learners
_SINGLE_JOB_OPTIONS = {"learners", "chips", *_CHIP_OPTIONS}
_OPTIONS_BY_KIND = {
    "--table": _CHIP_OPTIONS,
    "--mixed": {*_ROUND_OPTIONS, *_LINK_OPTIONS},
    "data-parallel": _SINGLE_JOB_OPTIONS,
    "elastic": _SINGLE_JOB_OPTIONS,
    "diloco": {*_SINGLE_JOB_OPTIONS, "speeds", *_ROUND_OPTIONS, "exchange_time"},
    "streaming": {*_SINGLE_JOB_OPTIONS, "speeds", *_ROUND_OPTIONS, "exchange_time"},
}


def run(
    context: typer.Context,
    options: Annotated[Any, DataclassOptions("atoll.cli.simulate_run:SimulateOptions")],
    slow_downs: Annotated[
        str | None,
        Setting("Slowdowns per learner and hour, speed factor, mean duration: 0.5:0.6:120.", "RATE:FACTOR:SECONDS"),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Simulate a training run on a fleet of chips that fail.

    Shows the useful share of chip time (goodput), the share of time in which at least one learner steps (uptime), and
    the result of the protocol: tokens merged, pending and dropped, contributions per merge, staleness and effective H,
    each with its 95 % interval over seeds. The same seed gives the same figures. Figures that do not exist for a method
    are null in the JSON: one job has neither merges nor staleness, and only decoupled has a ledger of tokens.
    """
    from dataclasses import replace

    from atoll.cli.simulate_run import read_slow_downs, run_simulation

    _check_options(context, options)
    if slow_downs is not None:
        options = replace(options, fleet=replace(options.fleet, **read_slow_downs(slow_downs)))
    return run_simulation(options)


def _check_options(context: typer.Context, options: Any) -> None:
    """Raise `ValueError` for an option that would be ignored."""
    from atoll.sim.published import Method

    methods = get_args(Method)
    if options.method not in methods:
        raise ValueError(f"unknown method {options.method!r}; give one of {', '.join(methods)}")
    if options.table and options.mixed:
        raise ValueError("--table and --mixed are different simulations; give only one of them")
    kind = "--table" if options.table else "--mixed" if options.mixed else options.method
    given = {name for name in context.params if is_given(context, name)}
    if (options.table or options.mixed) and "method" in given:
        raise ValueError(f"{kind} has its own methods; omit --method")
    if options.mixed and options.plot is not None:
        raise ValueError("--plot draws the figure of --table, not of --mixed; omit one of them")
    read = _OPTIONS_BY_KIND.get(kind)
    ignored = sorted(given & {"exchange_time"} if read is None else given - _COMMON_OPTIONS - read)
    if ignored:
        raise ValueError(f"{option_flag(context, ignored[0])} has no effect with {kind}; omit it")
