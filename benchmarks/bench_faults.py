"""Training under faults: what survivors, the merges and the loss feel of it, in real runs with real kills.

    python benchmarks/bench_faults.py pair                    2 learners, 85 kills an hour, 10 minutes
    python benchmarks/bench_faults.py thirty-two              32 learners, 125 kills an hour, 10 minutes
    python benchmarks/bench_faults.py ten-syncer-kills        step time and loss against the same run undisturbed
    python benchmarks/bench_faults.py storm-heavy --seeds 0,1,2 --duration 3m
    python benchmarks/bench_faults.py kill-one --duration 30s --ddp   then elastic data-parallel training, killed alike
    python benchmarks/bench_faults.py FILE.toml --json

Each is a scenario of `atoll chaos`: shipped, or a file in benchmarks/faults. A seed draws the plan of the faults and is
that of the run too: model, data. Scenarios with a line for the loss are trained without faults first.
Everything is measured from tapes. The run's directories stay in `--out`, with a page (verdict.html) for each.

Steps are paced, so that two cores carry the islands; the step time below is the mean time from one step's end to the
next one's of one process; where a scenario stops processes (SIGSTOP), that time is in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.chaos.job import run_chaos
from atoll.chaos.plan import draw_plan
from atoll.chaos.scenario import Scenario, load_scenario, parse_seconds
from atoll.chaos.verdict import Verdict
from atoll.dashboard.terminal import LiveView
from atoll.reference.data import Corpus
from atoll.reference.job_settings import JobSettings
from atoll.store.run_settings import CONFIG_FILE
from atoll.tape.timeline import read_timeline
from benchmarks.elastic import train_elastic
from benchmarks.measurement import collect_machine, machine_line, to_json_line

SCENARIOS = Path(__file__).resolve().parent / "faults"


def find_scenario(name_or_path: str) -> Scenario:
    ours = SCENARIOS / f"{name_or_path}.toml"
    return load_scenario(str(ours) if ours.is_file() else name_or_path)


def step_time_s(run: Path) -> float:
    """Mean from one step's end to the next one's, without the first second of a process: it is settling."""
    gaps = [
        after - before
        for processes in read_timeline(run, keep=None).processes.values()
        for process in processes
        for before, after in pairwise(process.log.ends)
        if process.training_started_at is not None and before > process.training_started_at + 1.0
    ]
    return statistics.fmean(gaps)


def measure(scenario: Scenario, seed: int, duration_s: float, out: Path, links: str, ddp: bool) -> dict[str, Any]:
    scenario = replace(scenario, run=replace(scenario.run, seed=seed))
    plan = draw_plan(scenario, seed, duration_s)
    run = out / f"{scenario.name}-{seed}"
    compared = "loss_within" in scenario.expect
    verdict = run_chaos(scenario, plan, run, LiveView(), links, baseline=compared)
    row = figures(verdict)
    row["step_time_s"] = step_time_s(run)
    if verdict.loss.source:
        row["step_time_undisturbed_s"] = step_time_s(Path(verdict.loss.source))
    if ddp:
        settings = JobSettings.load(run / CONFIG_FILE)
        row["ddp"] = train_elastic(settings, plan, run, LiveView(), Corpus.load(settings.data))
    return row


def figures(verdict: Verdict) -> dict[str, Any]:
    kills = [fault for fault in verdict.faults if fault.fault == "kill" and fault.was_injected]
    back = [fault.kill_to_step_s for fault in kills if fault.kill_to_step_s is not None]
    merged = [fault.kill_to_merge_s for fault in kills if fault.kill_to_merge_s is not None]
    pause = verdict.worst_pause
    loss = verdict.loss
    return {
        "scenario": verdict.scenario,
        "seed": verdict.seed,
        "stood": verdict.survived,
        "broken": [f"{check.name}: {check.finding}" for check in verdict.criteria if check.passed is False],
        "learners": verdict.learners,
        "wall_s": verdict.wall_s,
        "faults": sum(fault.was_injected for fault in verdict.faults),
        "faults_per_hour": 3600.0 * sum(fault.was_injected for fault in verdict.faults) / verdict.wall_s,
        "worst_pause_s": pause.gap_s if pause is not None else None,
        "usual_step_s": pause.typical_s if pause is not None else None,
        "goodput": verdict.goodput,
        "goodput_up": verdict.goodput_up,
        "merge_participation": verdict.merge_participation,
        "kill_to_step_s": statistics.median(back) if back else None,
        "kill_to_merge_s": statistics.median(merged) if merged else None,
        "loss": loss.final,
        "loss_without_faults": loss.baseline,
    }


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['scenario']}, seed {row['seed']}: {'stood' if row['stood'] else 'DID NOT STAND'};"
            f" {row['learners']} learners, {row['faults']} faults in {row['wall_s']:.0f} s,"
            f" {row['faults_per_hour']:.0f} an hour"
        )
        for line in row["broken"]:
            print(f"  broken: {line}")
        print(
            f"  survivors' worst pause {1e3 * row['worst_pause_s']:.0f} ms,"
            f" a step takes {1e3 * row['usual_step_s']:.0f} ms;"
            f" goodput {row['goodput']:.1%}, {row['goodput_up']:.1%} of the time in which learners were up;"
            f" {row['merge_participation']:.1%} of the living in a merge"
        )
        if row["kill_to_merge_s"] is not None:
            training = f"{row['kill_to_step_s']:.1f} s" if row["kill_to_step_s"] is not None else "-"
            print(f"  median after a kill: {training} to a step, {row['kill_to_merge_s']:.1f} s to a merge")
        if row["loss_without_faults"] is not None:
            share = row["loss"] / row["loss_without_faults"] - 1.0
            slower = row["step_time_s"] / row["step_time_undisturbed_s"] - 1.0
            print(
                f"  loss {row['loss']:.4f} against {row['loss_without_faults']:.4f} without faults ({share:+.2%});"
                f" step time {1e3 * row['step_time_s']:.2f} against {1e3 * row['step_time_undisturbed_s']:.2f} ms"
                f" ({slower:+.2%})"
            )
        if "ddp" in row:
            other = row["ddp"]
            loss = f"loss {other['loss']:.4f}" if other["loss"] is not None else "it did not reach its end"
            print(
                f"  elastic data-parallel training, kills: {other['kills']} of {other['planned_kills']};"
                f" goodput {other['goodput']:.1%} over {other['wall_s']:.0f} s,"
                f" worst pause {other['worst_pause_s']:.1f} s,"
                f" no worker in a step for {other['standing_s']:.0f} s, {other['steps_again']:,} steps repeated, {loss}"
            )
    shares = [r["loss"] / r["loss_without_faults"] - 1.0 for r in rows if r["loss_without_faults"] is not None]
    if len(shares) > 1:
        print(f"  loss over {len(shares)} seeds: {statistics.fmean(shares):+.2%} on average")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", help="pair, thirty-two, ten-syncer-kills, a shipped name or a file")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--duration", help="of the run without faults, such as 3m")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="where the runs are kept")
    parser.add_argument("--links", default="relay", help="relay, netns or auto, as for atoll chaos")
    parser.add_argument("--ddp", action="store_true", help="then the same kills under elastic data-parallel training")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    where = collect_machine()
    scenario = find_scenario(options.scenario)
    duration_s = parse_seconds(options.duration, "--duration") if options.duration else scenario.run.duration_s
    seeds = map(int, options.seeds.split(","))
    rows = [measure(scenario, seed, duration_s, options.out, options.links, options.ddp) for seed in seeds]
    if options.json:
        print(to_json_line({"machine": where, "rows": rows}))
    else:
        print(machine_line(where))
        show(rows)
    return 0 if all(row["stood"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
