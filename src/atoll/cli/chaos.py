"""`atoll chaos`: inject real faults into a real run, drawn by a seed, and evaluate the run from its tapes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, Result, print_to_stderr
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.chaos.plan import Plan
    from atoll.chaos.scenario import Scenario
    from atoll.chaos.verdict import FaultReport, Verdict

RUNS_DIRECTORY = Path("runs")


# long: the options with their help
def run(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="Name of a shipped scenario (see --list), or a TOML file.")
    ] = None,
    seed: Annotated[int, Setting("Seed of the plan. The same seed gives the same plan.", "N", min=0)] = 0,
    duration: Annotated[
        str | None, Setting("Length of the run without faults, such as 30s or 5m. [default: from the scenario]", "TIME")
    ] = None,
    out: Annotated[
        Path | None, Setting("Directory of the run. [default: first unused runs/chaos-NAME-N]", "DIR")
    ] = None,
    links: Annotated[
        str,
        Setting("relay: in user space; netns: network namespaces and tc, needs root; auto: netns if available.", "HOW"),
    ] = "auto",
    baseline: Annotated[bool, Setting("Train the same run without faults first, and compare the final loss.")] = False,
    dry_run: Annotated[bool, Setting("Print the plan and exit.")] = False,
    show_list: Annotated[bool, Setting("List the shipped scenarios and exit.", flag="list")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Inject faults into a real run, and evaluate from its tapes whether it survived.

    A scenario lists the faults: learners and the syncer are killed or stopped, links are cut, throttled, delayed or
    corrupted, disks are full, contributions are poisoned, learners join and leave. The seed determines the plan before
    the run starts. The result is in verdict.json, and as a page in verdict.html. Exit code 1: the run did not survive.
    See docs/chaos.md.
    """
    if show_list:
        from atoll.chaos.scenario import parse_scenario, shipped_scenarios

        shipped = shipped_scenarios().items()
        scenarios = {name: parse_scenario(text, name, f"scenario {name}").about for name, text in shipped}
        width = max(map(len, scenarios))
        return Result({"scenarios": scenarios}, (f"{name:<{width}}  {about}" for name, about in scenarios.items()))
    if scenario is None:
        raise ValueError("no scenario is given; name one, as in: atoll chaos kill-one (atoll chaos --list shows all)")
    plan, loaded = _draw_plan(scenario, seed, duration)
    if dry_run:
        return Result(plan.to_json, _format_plan(plan))
    from atoll.reference.child_processes import fork_server_context

    fork_server_context()  # the child loads torch while this process does
    from atoll.chaos.job import LINK_MODES, ChaosInterrupt, run_chaos
    from atoll.dashboard.terminal import LiveView

    if links not in LINK_MODES:
        raise ValueError(f"--links {links!r}: give one of {', '.join(LINK_MODES)}")
    if out is None:
        from atoll.cli.train import next_run_directory

        out = next_run_directory(RUNS_DIRECTORY, f"chaos-{loaded.name}")
    try:
        verdict = run_chaos(loaded, plan, out, LiveView(), links, baseline)
        code = ExitCode.OK if verdict.survived else ExitCode.FAILED
        if verdict.failed is not None and as_json:
            print_to_stderr(verdict.failed)
    except ChaosInterrupt as interrupted:
        verdict, code = interrupted.verdict, ExitCode.INTERRUPTED
        print_to_stderr("interrupted")
    fields = {key: value for key, value in verdict.to_json().items() if key != "timeline"}  # verdict.json has it
    return Result({**fields, "directory": str(out)}, summary_lines(verdict, out), code)


def _draw_plan(name: str, seed: int, duration: str | None) -> tuple[Plan, Scenario]:
    from atoll.chaos.plan import draw_plan
    from atoll.chaos.scenario import check_duration, load_scenario, parse_seconds

    loaded = load_scenario(name)
    duration_s = loaded.run.duration_s
    if duration is not None:
        duration_s = parse_seconds(duration, "--duration")
        check_duration(duration_s, "--duration")
    return draw_plan(loaded, seed, duration_s), loaded


def _format_plan(plan: Plan) -> Iterator[str]:
    yield f"{plan.scenario}, seed {plan.seed}, {plan.duration_s:g} s, {plan.learners} learners: {plan.about}"
    for fault in plan.faults:
        yield f"{fault.at_s:9.3f} s  {fault.number:>3}  {fault.describe()}  ({fault.origin})"
    if not plan.faults:
        yield "The plan has no fault: choose a longer --duration or another --seed."
    if plan.skipped:
        yield f"{plan.skipped} more faults were drawn and skipped: every possible target was busy with another fault."


TEXT_WIDTH = 100
_CHECK_LABELS = {True: "passed", False: "FAILED", None: "unknown"}


def summary_lines(verdict: Verdict, run: Path) -> Iterator[str]:
    yield f"{verdict.scenario}, seed {verdict.seed}: {verdict.about}"
    yield ""
    yield from _fault_lines(verdict)
    yield ""
    yield from _wrap(" ".join(_figure_sentences(verdict)))
    yield ""
    width = max(len(check.name) for check in verdict.criteria)
    for check in verdict.criteria:
        first = f"{_CHECK_LABELS[check.passed]:<8} {check.name:<{width}}  "
        yield from _wrap(check.finding, first, " " * len(first))
    yield ""
    outcome = "The run survived." if verdict.survived else "The run did NOT survive."
    yield f"{outcome} {run / 'verdict.html'} shows it, {run / 'verdict.json'} has every figure."
    targets = [fault.target.split() for fault in verdict.faults]
    learner = next((parts[-1] for parts in targets if parts[-1].isdigit() and parts[0] != "shard"), "1")
    yield f"More: atoll story {run} --learner {learner}"


def _wrap(text: str, first: str = "", rest: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, TEXT_WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _fault_lines(verdict: Verdict) -> Iterator[str]:
    begin = verdict.timeline["started_s"]
    for fault in verdict.faults:
        at = "   never" if fault.started_s is None else f"{fault.started_s - begin:6.1f} s"
        yield f"{at}  {fault.description}{_recovery_text(fault)}"


def _recovery_text(fault: FaultReport) -> str:
    if not fault.was_injected:
        return f": did not happen ({fault.failure_cause})"
    parts = []
    if fault.kill_to_step_s is not None:
        parts.append(f"trained again after {fault.kill_to_step_s:.1f} s")
    if fault.kill_to_merge_s is not None:
        parts.append(f"merged again after {fault.kill_to_merge_s:.1f} s")
    if fault.end_to_merge_s is not None:
        parts.append(f"merged again {fault.end_to_merge_s:.1f} s after its end")
    return f" [{fault.method}]" + (f": {', '.join(parts)}" if parts else "")


def _figure_sentences(verdict: Verdict) -> Iterator[str]:
    yield (
        f"Goodput was {100.0 * verdict.goodput:.1f} % over {verdict.wall_s:.0f} s"
        f" ({100.0 * verdict.goodput_up:.1f} % of the time in which learners were up),"
        f" and at least one learner trained in {100.0 * verdict.uptime:.1f} % of the time."
    )
    rest = {
        "away": sum(each.away_s for each in verdict.islands),
        "joining": sum(each.joining_s for each in verdict.islands),
        "stopped": sum(each.stopped_s for each in verdict.islands),
        "between steps": sum(each.between_s for each in verdict.islands),
    }
    parts = ", ".join(f"{seconds:.1f} s {name}" for name, seconds in rest.items() if seconds >= 0.05)
    if parts:
        yield f"The rest of the learners' time: {parts}."
    pause = verdict.worst_pause
    if pause is not None:
        during = f" during fault {', '.join(map(str, pause.during))}" if pause.during else ""
        yield (
            f"The longest gap between two steps of a learner without a fault was {1000 * pause.gap_s:.0f} ms"
            f" (learner {pause.learner}{during}); its median step takes {1000 * pause.typical_s:.0f} ms."
        )
    if verdict.merge_participation is not None:
        yield (
            f"{verdict.merges:,} merges; on average {100.0 * verdict.merge_participation:.0f} % of live learners"
            " took part in a merge."
        )
    if verdict.refused_contributions:
        counts = [
            f"{count:,} {code.removeprefix('contribution-')}" for code, count in verdict.refused_contributions.items()
        ]
        yield f"Refused contributions: {', '.join(counts)}."
    if verdict.failed_writes:
        yield f"{verdict.failed_writes:,} writes failed and were retried."
    yield f"Links: {verdict.links}."
