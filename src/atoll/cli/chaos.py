"""`atoll chaos`: real faults in a real run, by seed, and a verdict from its tapes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, Result, complain
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.chaos.judge import FaultReport, Verdict
    from atoll.chaos.plan import Plan
    from atoll.chaos.scenario import Scenario

RUNS = Path("runs")


# long: the list of options, with what each one means
def run(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A shipped name (--list), or a TOML file.")
    ] = None,
    seed: Annotated[int, Setting("Fixes the plan, bit for bit.", "N", min=0)] = 0,
    duration: Annotated[
        str | None, Setting("Length of the run without faults: 30s, 5m. [default: by the scenario]", "TIME")
    ] = None,
    out: Annotated[Path | None, Setting("Directory of the run. [default: first free runs/chaos-NAME-N]", "DIR")] = None,
    links: Annotated[
        str, Setting("relay: user space; netns: namespaces and tc, as root; auto: netns if it works.", "HOW")
    ] = "auto",
    baseline: Annotated[bool, Setting("First train the same run without faults, and compare the final loss.")] = False,
    dry_run: Annotated[bool, Setting("Print the plan and end.")] = False,
    show_list: Annotated[bool, Setting("The shipped scenarios.", flag="list")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Hurt a real run of real processes, and judge by its tapes whether it stood.

    A scenario says which faults strike what: learners and the syncer are killed or stopped, links are cut, thinned,
    delayed or damaged, disks are full, contributions are poisoned, learners come and go. The plan is drawn by the seed
    before anything runs. The verdict is in verdict.json and, for people, verdict.html; exit code 1: the run did not
    stand. docs/chaos.md tells the rest.
    """
    if show_list:
        from atoll.chaos.scenario import read, shipped

        found = {name: read(text, name, f"scenario {name}").about for name, text in shipped().items()}
        width = max(map(len, found))
        return Result({"scenarios": found}, (f"{name:<{width}}  {about}" for name, about in found.items()))
    if scenario is None:
        raise ValueError("say which scenario: atoll chaos kill-one; atoll chaos --list shows all")
    plan, loaded = _planned(scenario, seed, duration)
    if dry_run:
        return Result(plan.to_json, _plan_lines(plan))
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
        code = ExitCode.OK if verdict.passed else ExitCode.FAILED
        if verdict.failed is not None and as_json:
            complain(verdict.failed)
    except Interrupted as interrupted:
        verdict, code = interrupted.verdict, ExitCode.INTERRUPTED
        complain("interrupted")
    fields = {key: value for key, value in verdict.to_json().items() if key != "timeline"}  # it is in the file
    return Result({**fields, "directory": str(out)}, summary(verdict, out), code)


def _planned(wish: str, seed: int, duration: str | None) -> tuple[Plan, Scenario]:
    from atoll.chaos.plan import draw_plan
    from atoll.chaos.scenario import check_duration, load, seconds

    loaded = load(wish)
    duration_s = loaded.run.duration_s
    if duration is not None:
        duration_s = seconds(duration, "--duration")
        check_duration(duration_s, "--duration")
    return draw_plan(loaded, seed, duration_s), loaded


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.scenario}, seed {plan.seed}, {plan.duration_s:g} s, {plan.learners} learners: {plan.about}"
    for fault in plan.faults:
        yield f"{fault.at_s:9.3f} s  {fault.number:>3}  {fault.sentence()}  ({fault.origin})"
    if not plan.faults:
        yield "No fault is drawn: choose a longer --duration or another --seed."
    if plan.left_out:
        yield f"{plan.left_out} more were drawn and left out: nobody was free to be struck."


WIDTH = 100
_MARKS = {True: "passed", False: "FAILED", None: "unknown"}


def summary(verdict: Verdict, run: Path) -> Iterator[str]:
    yield f"{verdict.scenario}, seed {verdict.seed}: {verdict.about}"
    yield ""
    yield from _faults(verdict)
    yield ""
    yield from _wrapped(" ".join(_figures(verdict)))
    yield ""
    width = max(len(check.name) for check in verdict.checks)
    for check in verdict.checks:
        first = f"{_MARKS[check.passed]:<8} {check.name:<{width}}  "
        yield from _wrapped(check.sentence, first, " " * len(first))
    yield ""
    judged = "The run survived." if verdict.passed else "The run did NOT survive."
    yield f"{judged} {run / 'verdict.html'} shows it, {run / 'verdict.json'} holds every figure."
    targets = [fault.target.split() for fault in verdict.faults]
    struck = next((words[-1] for words in targets if words[-1].isdigit() and words[0] != "shard"), "1")
    yield f"More: atoll story {run} --learner {struck}"


def _wrapped(text: str, first: str = "", rest: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _faults(verdict: Verdict) -> Iterator[str]:
    begin = verdict.timeline["began_s"]
    for fault in verdict.faults:
        at = "   never" if fault.began_s is None else f"{fault.began_s - begin:6.1f} s"
        yield f"{at}  {fault.sentence}{_after(fault)}"


def _after(fault: FaultReport) -> str:
    if not fault.fired:
        return f": did not happen ({fault.why_not})"
    told = []
    if fault.back_training_s is not None:
        told.append(f"trained again after {fault.back_training_s:.1f} s")
    if fault.back_merged_s is not None:
        told.append(f"merged again after {fault.back_merged_s:.1f} s")
    if fault.healed_merged_s is not None:
        told.append(f"merged again {fault.healed_merged_s:.1f} s after its end")
    return f" [{fault.how}]" + (f": {', '.join(told)}" if told else "")


def _figures(verdict: Verdict) -> Iterator[str]:
    yield (
        f"Goodput was {100.0 * verdict.goodput:.1f} % over {verdict.wall_s:.0f} s"
        f" ({100.0 * verdict.goodput_up:.1f} % of the time in which learners were up),"
        f" and somebody trained in {100.0 * verdict.uptime:.1f} % of the time."
    )
    rest = {
        "away": sum(each.away_s for each in verdict.islands),
        "joining": sum(each.joining_s for each in verdict.islands),
        "stopped": sum(each.stopped_s for each in verdict.islands),
        "between steps": sum(each.between_s for each in verdict.islands),
    }
    told = ", ".join(f"{seconds:.1f} s {name}" for name, seconds in rest.items() if seconds >= 0.05)
    if told:
        yield f"The rest of the islands' time: {told}."
    pause = verdict.worst_pause
    if pause is not None:
        during = f" during fault {', '.join(map(str, pause.during))}" if pause.during else ""
        yield (
            f"The longest gap between two steps of a learner that was not itself struck was {1000 * pause.gap_s:.0f} ms"
            f" (learner {pause.learner}{during}); its usual step takes {1000 * pause.usual_s:.0f} ms."
        )
    if verdict.merged_of_alive is not None:
        yield f"{verdict.merges:,} merges took {100.0 * verdict.merged_of_alive:.0f} % of the learners alive."
    if verdict.refused_contributions:
        whys = [
            f"{count:,} {why.removeprefix('contribution-')}" for why, count in verdict.refused_contributions.items()
        ]
        yield f"Contributions that were refused: {', '.join(whys)}."
    if verdict.failed_writes:
        yield f"{verdict.failed_writes:,} writes failed and were made again."
    yield f"Links: {verdict.links}."
