"""What TLS costs: time per step and the syncer's processor time with mutual keys against plain text.

    python benchmarks/bench_tls.py [--json] [--seconds 40] [--step-ms 50] [--size 10m]

Two runs on this machine at the same time, one with keys of a private authority on both sides, one in plain text; in
each of them one learner with a paced step, whose compute is a sleep, and P = H = 24: at every step one fragment goes up
and another one comes down. Both learners are in this process and take their blocks of steps in turns, so that what
drifts, drifts for both; the syncers are processes of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from atoll.core.types import Limits, RunConfig
from atoll.learner.api import Learner
from atoll.reference.models import SIZES, build_model, inner_optimizer, parameter_count
from atoll.store.run_settings import RunSettings
from atoll.transport.keys import Authority
from benchmarks.measurement import (
    MIB,
    collect_machine,
    cpu_s,
    machine_line,
    run_syncer,
    spread,
    to_json_line,
    wait_until_idle,
)

FRAGMENTS = EVERY_STEPS = 24
WARMUP_STEPS = 3  # steps at the start of a block: nothing arrives in them
TARGET_RATIO = 1.01

PATIENT_LIMITS = Limits(initial_wait_s=300.0, min_wait_s=300.0)
"""A learner that reports nothing during the other's block is not lost."""


class Side(NamedTuple):
    """One run."""

    learner: Learner
    syncer_pid: int


def run_block(side: Side, steps: int, step_s: float, tokens: int) -> tuple[list[float], float, int]:
    """Seconds per step, the syncer's processor time, and bytes both ways."""
    wait_until_idle(lambda: side.learner.stats()[2:4])
    before = side.learner.stats()
    syncer_s = cpu_s(side.syncer_pid)
    taken = []
    for _ in range(steps + WARMUP_STEPS):
        began = time.perf_counter()
        time.sleep(step_s)
        side.learner.step(tokens=tokens)
        taken.append(time.perf_counter() - began)
    wait_until_idle(lambda: side.learner.stats()[2:4])  # what is under way belongs to this block
    after = side.learner.stats()
    moved = after.bytes_up + after.bytes_down - before.bytes_up - before.bytes_down
    return taken[WARMUP_STEPS:], cpu_s(side.syncer_pid) - syncer_s, moved


def measure(size: str, step_s: float, seconds: float, steps: int) -> dict[str, Any]:
    config = SIZES[size]
    settings = RunSettings(RunConfig("tls", FRAGMENTS, EVERY_STEPS, limits=PATIENT_LIMITS))
    pairs = max(2, round(seconds / (2 * (steps + WARMUP_STEPS) * step_s)))
    with ExitStack() as stack:
        ring = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-keys-"))) / "keys"
        Authority.init(ring).add("one")
        sides = {}
        for name, keys in (("plain", None), ("tls", ring)):
            model = build_model(config, seed=0)
            served = stack.enter_context(run_syncer(settings, keys=keys))
            shown = ring / "one" if keys is not None else None
            learner = stack.enter_context(Learner(model, inner_optimizer(model), served.address, keys=shown))
            sides[name] = Side(learner, served.pid)
        for side in sides.values():
            while side.learner.stats().adopted < 2 * FRAGMENTS:  # every fragment has arrived, and was updated once
                run_block(side, 4, step_s, 1)
        found: dict[str, list[tuple[list[float], float, int]]] = {"plain": [], "tls": []}
        for pair in range(pairs):
            for name in ("plain", "tls") if pair % 2 == 0 else ("tls", "plain"):
                found[name].append(run_block(sides[name], steps, step_s, 1))
        parameters = parameter_count(model)
    means = {name: [sum(taken) / len(taken) for taken, _, _ in blocks] for name, blocks in found.items()}
    result: dict[str, Any] = {"size": size, "parameters": parameters, "pairs": pairs, "block": steps, "step_s": step_s}
    for name, blocks in found.items():
        count = pairs * (steps + WARMUP_STEPS)
        result[name] = {
            "step_s": spread(means[name]),
            "syncer_cpu_s": sum(cpu for _, cpu, _ in blocks) / count,  # per step
            "bytes": sum(moved for _, _, moved in blocks) / count,
        }
    result["ratio"] = spread([tls / plain for tls, plain in zip(means["tls"], means["plain"], strict=True)])
    result["syncer_cpu_ratio"] = result["tls"]["syncer_cpu_s"] / result["plain"]["syncer_cpu_s"]
    return result


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['parameters']:,} parameters, steps paced at {1e3 * result['step_s']:g} ms, P = H = {FRAGMENTS}, "
        f"{result['pairs']} pairs of blocks of {result['block']} steps\n"
    )
    for name, what in (("plain", "plain text"), ("tls", "TLS 1.3, mutual")):
        step = result[name]["step_s"]
        print(
            f"  {what:16} step {1e3 * step.median:8.3f} ms ({1e3 * step.low:.3f} to {1e3 * step.high:.3f}), "
            f"syncer {1e3 * result[name]['syncer_cpu_s']:7.2f} ms of processor time per step, "
            f"{result[name]['bytes'] / MIB:.2f} MiB moved"
        )
    ratio = result["ratio"]
    reached = "reached" if ratio.median <= TARGET_RATIO else "not reached"
    print(f"\n  step time, TLS / plain  {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})", end="")
    print(f"; wanted: {TARGET_RATIO}, {reached}")
    print(f"  syncer's processor time, TLS / plain  {result['syncer_cpu_ratio']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--size", default="10m", choices=sorted(SIZES), help="of the model")
    parser.add_argument("--seconds", type=float, default=40.0, help="of steps, both sides together")
    parser.add_argument("--step-ms", type=float, default=50.0, help="how long a step takes by itself")
    parser.add_argument("--block", type=int, default=20, help="counted steps of a block")
    options = parser.parse_args()
    where = collect_machine()
    torch.manual_seed(0)
    result = measure(options.size, options.step_ms / 1e3, options.seconds, options.block)
    if options.json:
        print(to_json_line({"machine": where, **result}))
    else:
        print(f"what TLS costs; {machine_line(where)}")
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
