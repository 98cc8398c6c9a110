"""Training under the failures of a million chips: held-out loss with them and without, at equal tokens.

    python benchmarks/million_chips.py --results m.jsonl --seeds 0,1,2 --processes 2
    python benchmarks/million_chips.py --quick                 a few seconds: does it work?
    python benchmarks/million_chips.py --table m.jsonl         what the results say

For each seed two runs are simulated with every step and every fragment (`atoll simulate --full --tape`), one of chips
that fail once a year and one of chips that never do, and on both tapes the same model is trained for the same number of
tokens (`atoll replay DIR --model ... --tokens ...`), on the same samples. Each run is a process of its own and appends
one JSON line; runs that are in the results already are skipped. The protocol's settings are those of `atoll train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from atoll.cli.simulate_run import SimulateOptions, simulate_seeds
from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_LR, ADAMW_NUMERICS, JobSettings
from atoll.reference.loop import model_config
from atoll.reference.simulated_training import SimulatedTrainingResult, fit_plan, train_simulated
from atoll.sim.decoupled import DecoupledConfig
from atoll.sim.fleet import FleetConfig
from atoll.tape.files import RunTapes
from benchmarks.many_runs import read_results, run_all, setting_from_json

DEFAULT_SETTINGS = JobSettings()
MIN_GOODPUT = 0.6
"""Tapes are so long that the tokens are on them at this goodput; at 1.2 M chips and 4 learners it is about 0.8."""

SPARE_TAPE_S = 60.0


@dataclass(frozen=True)
class Setting:
    """One run. Every field but the first two is an option."""

    mtbi_days: float | None = 365.0  # of one chip; None: it never fails
    seed: int = 0  # of the chips, of the model and of its data
    chips: int = 1_200_000
    learners: int = 4  # M
    model: str = "100k"
    context: int = 64
    batch: int = 2  # windows of a step of an island with all its slices
    tokens: int = 2_000_000  # of all learners together
    every: int = DEFAULT_SETTINGS.every_steps  # H
    fragments: int = DEFAULT_SETTINGS.fragments  # P
    tau: int = DEFAULT_SETTINGS.overlap_steps
    quorum: int = DEFAULT_SETTINGS.quorum  # K
    grace: float = DEFAULT_SETTINGS.grace_margin
    eval_tokens: int = 131_072  # of the held-out text

    @property
    def days(self) -> float:
        """Of the simulated run, at steps of one second."""
        steps = self.tokens / (self.learners * self.batch * self.context)
        return (steps / (1.0 if self.mtbi_days is None else MIN_GOODPUT) + SPARE_TAPE_S) / 86_400.0

    def simulate_command(self) -> str:
        mtbi = "inf" if self.mtbi_days is None else f"{self.mtbi_days:g}"
        return (
            f"atoll simulate --learners {self.learners} --chips {self.chips} --mtbi-days {mtbi} --seed {self.seed}"
            f" --days {self.days!r} --every {self.every} --fragments {self.fragments} --tau {self.tau}"
            f" --quorum {self.quorum} --grace {self.grace:g} --full --tape DIR"
        )

    def replay_command(self) -> str:
        return (
            f"atoll replay DIR --model {self.model} --context {self.context} --batch {self.batch}"
            f" --tokens {self.tokens} --seed {self.seed} --eval-tokens {self.eval_tokens} --inner adamw"
        )

    def job(self) -> JobSettings:
        settings = JobSettings(
            learners=self.learners,
            model=self.model,
            context=self.context,
            batch=self.batch,
            tokens=self.tokens,
            seed=self.seed,
            eval_tokens=self.eval_tokens,
            inner="adamw",
            lr=ADAMW_LR,
            beta2=ADAMW_BETA2,
            numerics=ADAMW_NUMERICS,
        )
        model_config(settings)  # refuses an unknown model before anything is simulated
        return fit_plan(settings, self.fragments)

    def simulate_options(self, tape: Path) -> SimulateOptions:
        mtbi_s = math.inf if self.mtbi_days is None else self.mtbi_days * 86_400.0
        return SimulateOptions(
            method="decoupled",
            learners=self.learners,
            chips=self.chips,
            requested_days=self.days,
            seed=self.seed,
            requested_seed_count=1,
            jobs=1,
            fleet=FleetConfig(mtbi_s=mtbi_s),
            protocol=DecoupledConfig(
                fragments=self.fragments,
                every_steps=self.every,
                overlap_steps=self.tau,
                quorum=self.quorum,
                grace_margin=self.grace,
            ),
            full=True,
            tape=tape,
        )


QUICK_OPTIONS: dict[str, Any] = {
    "chips": 2_400_000, "context": 16, "batch": 1, "tokens": 4_800, "every": 8, "fragments": 8, "eval_tokens": 2_048,
}  # fmt: skip
"""Of `--quick`: so few steps that nothing is learned, and more chips, so that some fail on the way."""


def run_one(setting: Setting) -> dict[str, Any]:
    torch.set_num_threads(1)
    job = setting.job()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="million-chips-") as folder:
        outcome = simulate_seeds(setting.simulate_options(Path(folder) / "run"))
        simulated_in_s = time.perf_counter() - began
        trained = train_simulated(RunTapes(Path(folder) / "run"), job)
    _check_all_tokens(setting, trained)
    return {
        **dataclasses.asdict(setting),
        "goodput": outcome.goodput.mean,
        "failures": outcome.failures.mean,
        "simulated_h": 24.0 * setting.days,
        "loss": trained.loss,
        "loss_before": trained.loss_before,
        "trained": trained.tokens,
        "trained_after_s": trained.simulated_s,
        "steps": {str(learner): one.steps for learner, one in trained.learners.items()},
        "merges": trained.merges,
        "contributions_per_merge": trained.contributions_per_merge,
        "parameters": trained.parameters,
        "plan": trained.plan,
        "digest": trained.digest,
        "commands": [setting.simulate_command(), setting.replay_command()],
        "simulated_in_s": round(simulated_in_s, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _check_all_tokens(setting: Setting, trained: SimulatedTrainingResult) -> None:
    """At unequal tokens the two losses say nothing about failures."""
    if trained.ended_by != "tokens":
        raise ValueError(
            f"the tapes of seed {setting.seed} are over after {trained.tokens:,} of {setting.tokens:,} tokens: goodput"
            f" is below {MIN_GOODPUT:g}; take fewer chips"
        )


def describe_result(setting: Setting, found: dict[str, Any]) -> str:
    kind = "no failures" if setting.mtbi_days is None else f"{found['failures']:.0f} failures"
    return (
        f"seed {setting.seed}, {kind}: goodput {100 * found['goodput']:.1f} %, {found['trained']:,} tokens,"
        f" {found['contributions_per_merge']:.2f} contributions per merge, loss {found['loss']:.4f},"
        f" {found['wall_s']} s"
    )


def table(lines: list[dict[str, Any]]) -> str:
    """Pairs of runs that differ in nothing but failures; a run whose other half is missing is left out."""
    pairs: dict[Setting, dict[int, dict[bool, dict[str, Any]]]] = {}
    for line in lines:
        setting = setting_from_json(Setting, line)
        group = pairs.setdefault(dataclasses.replace(setting, mtbi_days=None, seed=0), {})
        group.setdefault(setting.seed, {})[setting.mtbi_days is not None] = line
    out: list[str] = []
    for group_setting, by_seed in pairs.items():
        both = {seed: found for seed, found in sorted(by_seed.items()) if len(found) == 2}
        if both:
            out += _one_table(group_setting, both)
    return "\n".join(out)


def _one_table(setting: Setting, both: dict[int, dict[bool, dict[str, Any]]]) -> list[str]:
    out = [
        f"{setting.chips:,} chips, {setting.learners} learners, model {setting.model}, {setting.tokens:,} tokens,"
        f" P = {setting.fragments}, H = {setting.every}, tau = {setting.tau}, gamma = {setting.grace:g}",
        "",
        "| seed | failures | goodput % | tokens | contributions per merge | loss | difference % |",
        "|---" * 7 + "|",
    ]
    differences: list[float] = []
    for seed, found in both.items():
        differences.append(100.0 * (found[True]["loss"] / found[False]["loss"] - 1.0))
        for fails in (False, True):
            line = found[fails]
            out.append(
                f"| {seed} | {line['failures']:.0f} | {100 * line['goodput']:.1f} | {line['trained']:,}"
                f" | {line['contributions_per_merge']:.2f} | {line['loss']:.4f}"
                f" | {f'{differences[-1]:+.2f}' if fails else '-'} |"
            )
    mean = statistics.mean(differences)
    least, most = min(differences), max(differences)
    without = statistics.mean(found[False]["loss"] for found in both.values())
    with_failures = statistics.mean(found[True]["loss"] for found in both.values())
    out += [
        "",
        f"Mean of {len(both)} seeds: loss {without:.4f} without failures, {with_failures:.4f} with them:"
        f" {mean:+.2f} % ({least:+.2f} to {most:+.2f}).",
    ]
    return out


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, help="file to which each run appends one JSON line")
    made.add_argument("--seeds", default="0", help="separated by commas")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--quick", action="store_true", help="two tiny runs in this process, nothing written")
    made.add_argument("--table", type=Path, help="print what the results in this file say")
    made.add_argument("--one", help=argparse.SUPPRESS)
    for field in dataclasses.fields(Setting):
        if field.name not in ("mtbi_days", "seed"):
            made.add_argument(
                f"--{field.name.replace('_', '-')}", type=type(field.default), help=f"default {field.default}"
            )
    return made


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """With failures and without, one seed after the other."""
    names = [field.name for field in dataclasses.fields(Setting) if field.name not in ("mtbi_days", "seed")]
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chosen = {**(QUICK_OPTIONS if options.quick else {}), **chosen}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    return [Setting(mtbi_days=mtbi, seed=seed, **chosen) for seed in seeds for mtbi in (None, Setting.mtbi_days)]


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.one is not None:
        print(json.dumps(run_one(Setting(**json.loads(options.one)))))
        return 0
    if options.table is not None:
        print(table(read_results(options.table)))
        return 0
    settings = settings_of(options)
    if options.quick:
        lines = []
        for setting in settings:
            lines.append(run_one(setting))
            print(describe_result(setting, lines[-1]), flush=True)
        print(table(lines))
        return 0
    if options.results is None:
        for setting in settings:
            print(f"{setting.simulate_command()} && {setting.replay_command()}")
        print(f"{len(settings)} runs; give --results FILE to run them, or --quick")
        return 0
    failed = run_all(__file__, settings, options.results, options.processes, describe_result)
    wanted = set(settings)
    print(table([line for line in read_results(options.results) if setting_from_json(Setting, line) in wanted]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
