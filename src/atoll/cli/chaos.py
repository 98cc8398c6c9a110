"""`atoll chaos`: real faults in a real run, by seed, and a verdict from its tapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.chaos.judge import Verdict
    from atoll.chaos.plan import Plan
    from atoll.chaos.scenario import Scenario

EXAMPLE = "atoll chaos kill-one --duration 30s"

RUNS = Path("runs")


# long: the list of options, with what each one means
def run(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A shipped name (--list), or a TOML file.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Fixes the plan, bit for bit.")] = 0,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration",
            metavar="TIME",
            help="How long the run takes without faults: 30s, 5m. [default: by the scenario]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Directory of the run. [default: the first free runs/chaos-NAME-N]"),
    ] = None,
    links: Annotated[
        str,
        typer.Option(
            "--links",
            metavar="HOW",
            help="relay: in user space; netns: network namespaces and tc, needs root; auto: netns where it works.",
        ),
    ] = "auto",
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="First train the same run without faults, once, and compare the final loss."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and end.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="The shipped scenarios.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Hurt a real run of real processes, and judge by its tapes whether it stood.

    A scenario says which faults strike what: learners and the syncer are killed or stopped, links are cut, thinned,
    delayed or damaged, disks are full, contributions are poisoned, learners come and go. The plan is drawn by the seed
    before anything runs. The verdict is in verdict.json and, for people, verdict.html; exit code 1: the run did not
    stand. docs/chaos.md tells the rest.
    """
    if show_list:
        _list(as_json)
        return
    if scenario is None:
        raise ValueError("say which scenario: atoll chaos kill-one; atoll chaos --list shows all")
    plan, loaded = _planned(scenario, seed, duration)
    if dry_run:
        _show_plan(plan, as_json)
        return
    from atoll.reference.children import processes

    processes()  # torch is loaded there while it is loaded here
    from atoll.chaos.job import LINKS, Interrupted, run_chaos
    from atoll.dashboard.terminal import LiveView

    if links not in LINKS:
        raise ValueError(f"--links {links!r}: give one of {', '.join(LINKS)}")
    if out is None:
        from atoll.cli.train import next_run

        out = next_run(RUNS, f"chaos-{loaded.name}")
    try:
        verdict = run_chaos(loaded, plan, out, LiveView(), links, baseline)
    except Interrupted as interrupted:
        _show(interrupted.verdict, out, as_json)
        raise KeyboardInterrupt from None
    _show(verdict, out, as_json)
    if verdict.failed is not None and as_json:
        complain(verdict.failed)
    if not verdict.passed:
        raise typer.Exit(ExitCode.FAILED)


def _planned(wish: str, seed: int, duration: str | None) -> tuple[Plan, Scenario]:
    from atoll.chaos.plan import draw_plan
    from atoll.chaos.scenario import check_duration, load, seconds

    loaded = load(wish)
    duration_s = loaded.run.duration_s
    if duration is not None:
        duration_s = seconds(duration, "--duration")
        check_duration(duration_s, "--duration")
    return draw_plan(loaded, seed, duration_s), loaded


def _list(as_json: bool) -> None:
    from atoll.chaos.scenario import read, shipped

    found = {name: read(text, name, f"scenario {name}").about for name, text in shipped().items()}
    if as_json:
        print_json({"scenarios": found})
        return
    width = max(map(len, found))
    for name, about in found.items():
        print(f"{name:<{width}}  {about}")


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json(plan.to_json())
        return
    print(f"{plan.scenario}, seed {plan.seed}, {plan.duration_s:g} s, {plan.learners} learners: {plan.about}")
    for fault in plan.faults:
        print(f"{fault.at_s:9.3f} s  {fault.number:>3}  {fault.sentence()}  ({fault.origin})")
    if not plan.faults:
        print("No fault is drawn: choose a longer --duration or another --seed.")
    if plan.left_out:
        print(f"{plan.left_out} more were drawn and left out: nobody was free to be struck.")


def _show(verdict: Verdict, out: Path, as_json: bool) -> None:
    if as_json:
        told = verdict.to_json()
        del told["timeline"]  # it is in the file
        print_json({**told, "directory": str(out)})
        return
    from atoll.cli.chaos_summary import summary

    for line in summary(verdict, out):
        print(line)
