"""`atoll plan`: what islands, links and a budget come to, before money is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.output import JsonOption, print_json

EXAMPLE = "atoll plan --params 5e9 --step-time 1s --sites 8 --rate 2gbit"


# long: the list of options, with what each one means
def run(
    params: Annotated[str, typer.Option("--params", metavar="N", help="Parameters of the model: 5e9, 5B, 300M.")],
    sites: Annotated[
        int | None, typer.Option("--sites", metavar="D", help="Sites that are alike, one island each.")
    ] = None,
    step_time: Annotated[
        str | None, typer.Option("--step-time", metavar="TIME", help="Of one inner step of an island: 1s, 800ms.")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(
            "--flops",
            metavar="FLOP/S",
            help="Instead of --step-time: peak of one chip, as 400T; needs --chips and --tokens-per-step.",
        ),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option("--mfu", metavar="SHARE", help="Of --flops, what is used. [default: 0.4]")
    ] = None,
    tokens_per_step: Annotated[
        str | None, typer.Option("--tokens-per-step", metavar="N", help="Of one island: 500k.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N", help="The budget, of all islands: 1T. For days, bytes and cost."),
    ] = None,
    chips: Annotated[str | None, typer.Option("--chips", metavar="N", help="Of one island. For goodput.")] = None,
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of one chip: 365d, 5y. For goodput."),
    ] = None,
    slice_chips: Annotated[
        int, typer.Option("--slice-chips", metavar="N", help="Chips that are out together when one of them fails.")
    ] = 2_048,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help="Of a site's link, each direction: 2gbit, 500mbit."),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="Of a link, one way, half of what ping shows: 20ms.")
    ] = None,
    price: Annotated[
        str | None, typer.Option("--price", metavar="PRICE", help="Of what a site sends: 0.05/GB.")
    ] = None,
    island: Annotated[
        list[str] | None,
        typer.Option(
            "--island",
            metavar="KEY=VALUE,...",
            help="One island, or `count` of them, where they differ: name, count, chips, step-time, flops, mfu, "
            "tokens-per-step, mtbf, rate, delay, price. The rest is as the options say. Repeatable.",
        ),
    ] = None,
    islands: Annotated[
        Path | None,
        typer.Option("--islands", metavar="FILE", help="The same as TOML: a table [[island]] for each, the same keys."),
    ] = None,
    every: Annotated[int, typer.Option("--every", metavar="H", help="Steps between two rounds of a fragment.")] = 24,
    fragments: Annotated[int, typer.Option("--fragments", metavar="P", help="Fragments of the model.")] = 24,
    tau: Annotated[
        int, typer.Option("--tau", metavar="TAU", help="Steps under which one synchronisation is hidden.")
    ] = 2,
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            metavar="NAME",
            help="f32, bf16, int8 or int4: of DiLoCo and Streaming DiLoCo, and of the warnings about links.",
        ),
    ] = "bf16",
    star: Annotated[
        bool,
        typer.Option(
            "--star", help="One syncer elsewhere, instead of a part of it at each site: other bytes per link."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw utilisation against rate into FILE (.png, .svg or .pdf). Needs the extra 'plot'.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a run will need and cost, before it is paid for.

    Prints the rate that each site's link needs for a compute utilisation of 50 to 99 %, for data-parallel training,
    DiLoCo, Streaming DiLoCo and decoupled with each codec. With --rate also what comes of these links, with --chips and
    --mtbf the goodput, with --tokens and --tokens-per-step days and bytes, and with --price the bill. Warns where a
    link cannot carry the plan, and where it leaves what was measured. docs/plan.md explains the model.

    Alike sites:     atoll plan --params 5e9 --step-time 1s --sites 8 --rate 2gbit --delay 20ms

    From FLOP/s:     atoll plan --params 12B --sites 4 --chips 256 --flops 400T --mfu 0.4 --tokens-per-step 1M
    --tokens 1T --rate 5gbit --price 0.05/GB --mtbf 365d

    Unequal sites:   atoll plan --params 1B --step-time 1s --rate 1gbit --island name=north,count=2
    --island name=south,step-time=1.4s,rate=200mbit
    """
    from atoll.cli.plan_islands import read_islands
    from atoll.cli.plan_show import plan_fields, show_plan
    from atoll.cli.plan_units import read_amount
    from atoll.sim.plan import PlanWish, make_plan

    size = read_amount("--params", params)
    shared = {
        "step_time": step_time,
        "flops": flops,
        "mfu": None if mfu is None else str(mfu),
        "tokens_per_step": tokens_per_step,
        "chips": chips,
        "mtbf": mtbf,
        "rate": rate,
        "delay": delay,
        "price": price,
    }
    said = {key: text for key, text in shared.items() if text is not None}
    if slice_chips < 1:
        raise ValueError(f"--slice-chips is {slice_chips}; give at least 1")
    wish = PlanWish(
        params=size,
        islands=read_islands(size, sites, said, island or [], islands),
        tokens=None if tokens is None else read_amount("--tokens", tokens),
        every_steps=every,
        fragments=fragments,
        tau_steps=tau,
        codec=codec,
        star=star,
        slice_chips=slice_chips,
    )
    if plot is not None:
        from atoll.cli.plan_plot import draw_plan
        from atoll.cli.simulate_plot import check_plot

        check_plot(plot)
        draw_plan(plot, wish)
    made = make_plan(wish)
    if as_json:
        print_json({**plan_fields(made), "plot": None if plot is None else str(plot)})
        return
    show_plan(made)
    if plot is not None:
        print(f"The figure is in {plot}.")
