"""Quality at equal tokens on held-out text: ddp, single, diloco, streaming and decoupled, on one thread per run.

    python benchmarks/quality.py --results q.jsonl --size 100k --method ddp,diloco,decoupled --seed 0,1,2
    python benchmarks/quality.py --results q.jsonl --method decoupled --outer-lr 0.2,0.4,0.7 --outer-momentum 0,0.9
    python benchmarks/quality.py --results q.jsonl --list runs.txt --processes 2      one line of options per line
    python benchmarks/quality.py --table q.jsonl
    nice -n 19 timeout 3600 python benchmarks/quality.py ...                          in the background

An option with several values, separated by commas, means a run for each; several such options are multiplied. Runs
whose settings are in the results already are skipped, so a sweep that was stopped goes on where it was. Each run is a
process of its own; its result is one JSON line with all settings, appended when the run is over.

- ddp: the batches of all learners as one batch, one optimizer: what synchronous data parallelism computes.
- single: one learner with a batch of its own, until it has seen the same tokens.
- diloco, streaming: the cores in lockstep (`train.lockstep`), K = M; streaming adopts tau steps after the copy.
- decoupled: the cores in virtual time, each learner at its own speed; messages and merges take parts of a step.

diloco and streaming set for themselves what defines them (see `BASELINES`) unless an option says otherwise. Both finals
are measured in every run: `loss` is that of the published model, `loss_mean` that of the mean of the learners' models.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from atoll.core.syncer.core import SyncerComponents, SyncerCore
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.state import RestoredState
from atoll.core.types import Limits, RunConfig
from atoll.reference.data import Corpus, Sampler, assigned_samples
from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_LR
from atoll.reference.models import (
    SIZES,
    build_model,
    clip_gradients,
    inner_optimizer,
    lr_factor,
    parameter_count,
    set_lr,
)
from atoll.reference.tape_executor import ReplayLearner, StepInfo, TapeExecutor, initial_values, load_values
from atoll.tape.format import Actor
from atoll.tensors.plan import describe_tensors, make_plan
from atoll.tensors.settings import Numerics
from benchmarks.many_runs import read_results, run_all, setting_from_json
from tests.reference.lockstep import PATIENT_LIMITS, Lockstep, Paced, mean_of_learners

METHODS = ("ddp", "single", "diloco", "streaming", "decoupled")

TOKENS = 2_000_000
"""Of a run, where `--tokens` is 0."""


@dataclass(frozen=True)
class Setting:
    """One run. Every field is an option."""

    method: str = "decoupled"
    size: str = "100k"
    seed: int = 0
    learners: int = 4  # M
    tokens: int = 0  # of all learners together; 0: 2 M
    batch: int = 2  # windows of one learner's step
    inner: str = "adamw"
    lr: float = ADAMW_LR
    beta2: float = ADAMW_BETA2
    warmup: float = 0.05  # share of the run
    floor: float = 0.03  # the learning rate at the end, as a share
    weight_decay: float = 0.1
    clip: float = 1.0
    h: int = 24  # H, at the end of the run if it grows
    h_start: int = 0  # H at the start, growing with the square root of progress; 0: it does not grow
    p: int = 24  # P
    tau: int = 4
    k: int = 1  # quorum; lockstep methods use all learners
    grace: float = 0.9
    adopt: str = "carry"
    alpha: float = 0.5
    merge: str = "radial"
    plan: str = "balanced"
    outer: str = "nesterov"
    outer_lr: float = 0.4
    outer_momentum: float = 0.85
    outer_ramp: int = 20  # merges of a fragment in which the outer step rises from plain averaging
    up: str = "bf16"
    down: str = "bf16"
    speeds: str = "1"  # per learner, separated by colons, repeated until there are enough: 1:1:0.5:0.5
    delay: float = 0.02  # of a message, in steps
    bulk: float = 0.5  # more for a fragment, up to, in steps
    windows: int = 2048  # of the held-out text

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.size not in SIZES:
            raise ValueError(f"methods are {', '.join(METHODS)}; sizes are {', '.join(SIZES)}")

    @property
    def budget(self) -> int:
        return self.tokens or TOKENS


BASELINES: dict[str, dict[str, Any]] = {
    "diloco": {
        "p": 1, "h": 24, "tau": 0, "adopt": "overwrite", "merge": "average", "up": "f32", "down": "f32",
        "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0,
    },
    "streaming": {
        "p": 4, "h": 24, "tau": 2, "adopt": "blend", "merge": "average", "up": "f32", "down": "f32",
        "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0,
    },
}  # fmt: skip
"""What defines the published methods. Where a method does not read a field, it is left at the default."""

PROTOCOL = (
    "h h_start p tau k grace adopt alpha merge plan outer outer_lr outer_momentum outer_ramp up down speeds delay bulk"
)

UNUSED = {
    "ddp": PROTOCOL,
    "single": PROTOCOL,
    "diloco": "tau k grace adopt alpha speeds delay bulk",
    "streaming": "k grace speeds delay bulk",
    "decoupled": "",
}
"""Fields that a method does not read: two settings that differ only there are the same run."""


# --------------------------------------------------------------------------------------------------------------------
# One run


def train_step(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int], Any]
) -> Callable[[StepInfo], float]:
    def take_step(info: StepInfo) -> float:
        lr = setting.lr * lr_factor(info.progress, setting.warmup, setting.floor) * info.lr_scale
        set_lr(optimizer, max(lr, 1e-8))
        x, y = batches(info.step)
        loss: torch.Tensor = model(x, y)
        loss.backward()
        clip_gradients(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return take_step


def run_plain(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    """ddp and single: no protocol at all."""
    config = SIZES[setting.size]
    learners = setting.learners if setting.method == "ddp" else 1
    sampler = Sampler(corpus, setting.seed, config.context)
    model = build_model(config, setting.seed)
    optimizer = inner_optimizer(model, setting.inner, setting.lr, setting.beta2, setting.weight_decay)

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sampler.batch(
            assigned_samples(step, 1, 1, learners * setting.batch)
        )  # the batches of all learners in one

    take_step = train_step(setting, model, optimizer, batches)
    per_step = learners * setting.batch * config.context
    steps = setting.budget // per_step
    curve = LossCurve(setting.budget)
    for step in range(steps):
        loss = take_step(StepInfo(step, step / steps, step / steps, 1.0))
        curve.add((step + 1) * per_step, loss)
    return {
        "trained": steps * per_step,
        "steps": steps,
        "loss": evaluate(model, corpus, setting),
        "curve": curve.points,
    }


def growing_core(setting: Setting) -> type[SyncerCore]:
    """A syncer whose H grows from `h_start` to `h` with the square root of progress."""

    class GrowingRounds(Rounds):
        def _open(self, now: float, f: Any, final: bool = False, in_turn: bool = True) -> bool:
            state = self._state
            share = math.sqrt(state.progress())
            every = round(setting.h_start + (setting.h - setting.h_start) * share)
            state.config = dataclasses.replace(state.config, every_steps=max(1, every))
            return super()._open(now, f, final, in_turn)

    class Growing(SyncerCore):
        def __init__(self, config: RunConfig, epoch: int, restored: RestoredState | None = None) -> None:
            super().__init__(config, epoch, restored, SyncerComponents(rounds=GrowingRounds))

    return Growing


def run_protocol(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    """diloco, streaming, decoupled: the cores decide, the execution moves the tensors."""
    shape = SIZES[setting.size]
    founder = build_model(shape, setting.seed)
    names = ("plan", "merge", "outer", "outer_lr", "outer_momentum", "outer_ramp", "up", "down")
    chosen: dict[str, Any] = {n: getattr(setting, n) for n in names}
    numerics = Numerics(**chosen)
    plan = make_plan(describe_tensors(founder), setting.p, setting.plan)
    lockstep = setting.method != "decoupled"
    config = RunConfig(
        fragments=len(plan.fragments),
        every_steps=setting.h_start or setting.h,
        overlap_steps=max(1, setting.tau),
        quorum=setting.learners if lockstep else setting.k,
        grace_margin=setting.grace,
        adopt=setting.adopt,  # type: ignore[arg-type]
        blend_alpha=setting.alpha,
        budget_tokens=setting.budget,
        rounds_in_flight=len(plan.fragments) if lockstep else None,
        limits=PATIENT_LIMITS if lockstep else Limits(),
    )

    def make(actor: Actor) -> ReplayLearner:
        model = build_model(shape, setting.seed)
        optimizer = inner_optimizer(model, setting.inner, setting.lr, setting.beta2, setting.weight_decay)
        sampler = Sampler(corpus, setting.seed, shape.context)

        def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            return sampler.batch(assigned_samples(step, actor.learner, setting.learners, setting.batch))

        return ReplayLearner(model, optimizer, train_step(setting, model, optimizer, batches))

    execution = TapeExecutor(config, numerics, plan, initial_values(founder, plan), make)
    curve = LossCurve(setting.budget)
    execution.on_step = lambda learner, loss: curve.add(execution.tokens, loss or math.nan)
    tokens = dict.fromkeys(range(1, setting.learners + 1), setting.batch * shape.context)
    core = growing_core(setting) if setting.h_start else SyncerCore
    if lockstep:
        run = Lockstep(config, tokens, execution.apply, setting.tau, core)
        while run.syncer.state.stage.value == "running":
            run.step()
        run.finish()
        ledger, merges = run.syncer.state.ledger, run.syncer.state.merges
    else:
        cycle = itertools.cycle(float(s) for s in setting.speeds.split(":"))
        speeds = {i: next(cycle) for i in tokens}
        drawn = Paced.make_scenario(config, tokens, speeds, setting.seed, setting.delay, setting.bulk)
        driver = Paced(drawn, syncer=core, on_entry=execution.apply, on_start=execution.start_process)
        driver.run()
        syncer = driver.syncer_core()
        assert syncer is not None
        ledger, merges = syncer.state.ledger, syncer.state.merges
    result: dict[str, Any] = {"trained": execution.tokens, "merges": merges}
    result["steps"] = {str(a.learner): t.step for a, t in execution.learners.items()}
    result["merged"] = round(sum(ledger.merged(p) for p in range(config.fragments)) / config.fragments)
    result["bytes_per_token"] = (execution.bytes_up + execution.bytes_down) / execution.tokens
    result["contributions_per_merge"] = execution.contributions / max(1, merges)
    mean = mean_of_learners(execution)
    load_values(founder, plan, mean)
    result["loss_mean"] = evaluate(founder, corpus, setting)
    load_values(founder, plan, execution.published())
    result["loss"] = evaluate(founder, corpus, setting)
    result["curve"] = curve.points
    return result


class LossCurve:
    """The training loss as the mean over each of 20 parts of the run."""

    def __init__(self, budget: int, parts: int = 20) -> None:
        self.points: list[float] = []
        self._every = budget / parts
        self._sum = 0.0
        self._count = 0

    def add(self, tokens: int, loss: float) -> None:
        self._sum += loss
        self._count += 1
        if tokens >= self._every * (len(self.points) + 1):
            self.points.append(round(self._sum / self._count, 4))
            self._sum, self._count = 0.0, 0


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, setting: Setting) -> float:
    model.eval()
    total = count = 0.0
    for x, y in corpus.held_out_batches(SIZES[setting.size].context, 64, setting.windows):
        total += model(x, y).item() * x.numel()
        count += x.numel()
    model.train()
    return total / count


def run_one(setting: Setting) -> dict[str, Any]:
    torch.set_num_threads(1)
    corpus = Corpus.load()
    began = time.perf_counter()
    plain = setting.method in ("ddp", "single")
    result = run_plain(setting, corpus) if plain else run_protocol(setting, corpus)
    wall_s = time.perf_counter() - began
    model = build_model(SIZES[setting.size], 0)
    return {
        **dataclasses.asdict(setting),
        "parameters": parameter_count(model),
        **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()},
        "wall_s": round(wall_s, 1),
        "tokens_per_s": round(result["trained"] / wall_s),
        "corpus": corpus.digest,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --------------------------------------------------------------------------------------------------------------------
# Many runs


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, help="file to which each run appends one JSON line")
    made.add_argument("--list", type=Path, help="file with one line of options per run or group of runs")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--dry", action="store_true", help="say what would run")
    made.add_argument("--table", type=Path, help="print the results in this file as a markdown table")
    made.add_argument("--final", choices=("published", "mean"), default="published", help="which model the table shows")
    made.add_argument("--one", help=argparse.SUPPRESS)
    _add_settings(made)
    return made


def _add_settings(made: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(Setting):
        made.add_argument(f"--{field.name.replace('_', '-')}", help=f"default {field.default}")


def settings_of(options: argparse.Namespace) -> Iterator[Setting]:
    """The product of all values given, each with what defines its method."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Setting)}
    names = [n for n, v in given.items() if v is not None]
    kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(Setting)}
    for values in itertools.product(*(given[n].split(",") for n in names)):
        chosen = {n: kinds[n](float(v) if kinds[n] is int else v) for n, v in zip(names, values, strict=True)}
        method = chosen.get("method", Setting.method)
        setting = Setting(**{**BASELINES.get(method, {}), **chosen})
        defaults = Setting(**{"method": method, **BASELINES.get(method, {})})
        fixed = {n: getattr(defaults, n) for n in UNUSED[method].split()}
        yield dataclasses.replace(setting, **fixed, tokens=setting.budget)


def all_settings(options: argparse.Namespace) -> list[Setting]:
    if options.list is None:
        return list(dict.fromkeys(settings_of(options)))
    found: dict[Setting, None] = {}
    own = argparse.ArgumentParser()
    _add_settings(own)
    for line in options.list.read_text().splitlines():
        words = shlex.split(line, comments=True)
        if words:
            found.update(dict.fromkeys(settings_of(own.parse_args(words))))
    return list(found)


def describe_result(setting: Setting, found: dict[str, Any]) -> str:
    shown = [f"{found[k]:.4f}" if found.get(k) is not None else "-" for k in ("loss", "loss_mean")]
    return f"{describe(setting)}: loss {shown[0]} mean {shown[1]}, {found['wall_s']} s"


def describe(setting: Setting) -> str:
    """Method, size, seed, and what is not the method's default."""
    defaults = Setting(**{"method": setting.method, **BASELINES.get(setting.method, {})})
    skipped = ("method", "size", "seed", "tokens")
    other = [
        f"{f.name}={getattr(setting, f.name)}"
        for f in dataclasses.fields(Setting)
        if f.name not in skipped and getattr(setting, f.name) != getattr(defaults, f.name)
    ]
    return " ".join([setting.method, setting.size, f"{setting.tokens / 1e6:g}M", f"seed {setting.seed}", *other])


def table(path: Path, final: str) -> str:
    """Settings that differ in the seed only are one row; the gap is to ddp of the same size, tokens, batch and seed."""
    key = "loss" if final == "published" else "loss_mean"
    lines = read_results(path)
    reference: dict[tuple[Any, ...], float] = {}
    for line in lines:
        if line["method"] == "ddp" and line["loss"] is not None:
            where = _group_key(line)
            reference[where] = min(line["loss"], reference.get(where, math.inf))
    rows: dict[Setting, list[tuple[float, float | None]]] = {}
    for line in lines:
        loss = line.get(key) if line.get(key) is not None else line.get("loss")
        loss = math.nan if loss is None else loss
        best = reference.get(_group_key(line))
        gap = None if best is None else 100 * (loss / best - 1)
        rows.setdefault(dataclasses.replace(setting_from_json(Setting, line), seed=0), []).append((loss, gap))
    shown = sorted(rows.items(), key=lambda r: (r[0].size, r[0].tokens, sum(x for x, _ in r[1]) / len(r[1])))
    out = ["| size | tokens | method | differs in | seeds | loss | spread | gap to ddp % |", "|---" * 8 + "|"]
    for setting, found in shown:
        losses = [x for x, _ in found]
        gaps = [g for _, g in found if g is not None]
        mean = sum(losses) / len(losses)
        spread = max(losses) - min(losses)
        differs = describe(setting).split(" seed 0")[1].strip() or "-"
        gap_text = f"{sum(gaps) / len(gaps):+.2f}" if gaps else "-"
        out.append(
            f"| {setting.size} | {setting.tokens / 1e6:g}M | {setting.method} | {differs} | {len(found)} "
            f"| {mean:.4f} | {spread:.4f} | {gap_text} |"
        )
    return "\n".join(out)


def _group_key(line: dict[str, Any]) -> tuple[Any, ...]:
    """ddp runs that a line is compared with: the best learning rate of theirs counts."""
    return tuple(line[n] for n in ("size", "tokens", "seed", "learners", "batch"))


def main() -> int:
    options = parser().parse_args()
    if options.one is not None:
        print(json.dumps(run_one(Setting(**json.loads(options.one)))))
        return 0
    if options.table is not None:
        print(table(options.table, options.final))
        return 0
    settings = all_settings(options)
    if options.dry or options.results is None:
        for setting in settings:
            print(describe(setting))
        print(f"{len(settings)} runs; give --results FILE to run them")
        return 0
    return 1 if run_all(__file__, settings, options.results, options.processes, describe_result) else 0


if __name__ == "__main__":
    sys.exit(main())
