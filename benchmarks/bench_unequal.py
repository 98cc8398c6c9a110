"""Fast learners beside slow ones: is their step as short as alone? Figures are kept in benchmarks/README.md.

    python benchmarks/bench_unequal.py [--json] [--speeds 1,1,0.5,0.5] [--step 0.2] [--pairs 6]

Four learners with `atoll.Learner` and a syncer, each a process of its own. Steps are real steps of a small GPT, paced:
at speed 1 a step takes at least `--step` seconds, at speed 0.5 twice as long, so that two cores suffice for all.

Blocks take turns: one fast learner alone, with the bare loop (same steps, same pace, no Atoll, an idle machine);
then all of them together with Atoll. A ratio is the mean step of one block by that of its neighbour, of the same
process. The time of a step includes what Atoll does at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from atoll.core.types import Limits, RunConfig
from atoll.learner.api import Learner
from atoll.reference.models import SIZES, build_model
from atoll.store.run_settings import RunSettings
from benchmarks.bench_overhead import make_batches, make_stepper
from benchmarks.measurement import (
    Spread,
    SyncerProcess,
    collect_machine,
    machine_line,
    run_syncer,
    spread,
    start_python,
    stop_process,
    to_json_line,
)

FRAGMENTS = EVERY_STEPS = 24
BATCH = 8
WARMUP_STEPS = 2  # steps at the start of a block
TARGET_RATIO = 1.02

PATIENT_LIMITS = Limits(initial_wait_s=300.0, min_wait_s=300.0)
"""Learners that report nothing while another one is alone are not lost."""

# --------------------------------------------------------------------------------------------------------------------
# One learner


class TimedStep(NamedTuple):
    """Seconds of one step, of its work, and of the step had the thread never waited for a processor."""

    step_s: float
    work_s: float
    unshared_s: float


def run_queue_wait_s() -> float:
    """For a processor, this thread so far, as Linux counts it."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def run_paced_step(step: Callable[[], object], on_end: Callable[[], object], min_s: float) -> TimedStep:
    """A step whose work takes at least so long, with what is done at its end."""
    waited, began = run_queue_wait_s(), time.perf_counter()
    step()
    work_s = time.perf_counter() - began
    waited_in_work = run_queue_wait_s() - waited
    if work_s < min_s:
        time.sleep(min_s - work_s)
    on_end()
    step_s = time.perf_counter() - began
    rest_s = step_s - max(work_s, min_s) - (run_queue_wait_s() - waited - waited_in_work)
    return TimedStep(step_s, work_s, max(work_s - waited_in_work, min_s) + rest_s)


def run_learner(address: str, number: int, size: str, min_s: float, keys: str, token: str) -> None:
    """In the child: a line comes for each block, `alone SECONDS` or `together SECONDS`; the answer is a line."""
    config = SIZES[size]
    model = build_model(config, seed=0)
    optimizer, step = make_stepper(model, make_batches(config.vocabulary, BATCH, config.context))
    island = Path(keys) if keys else None
    with Learner(model, optimizer, address, token or None, keys=island, learner=number) as learner:
        boundary = partial(learner.step, tokens=BATCH * config.context)
        print("ready", flush=True)
        for line in sys.stdin:
            how, seconds = line.split()
            taken = []
            until = time.monotonic() + float(seconds)
            while time.monotonic() < until:
                taken.append(run_paced_step(step, boundary if how == "together" else lambda: None, min_s))
            stats = learner.stats()
            reply = {"steps": taken, "contributed": stats.contributed, "boundary_s": stats.boundary_s}
            print(json.dumps(reply), flush=True)


class IslandProcess:
    """One learner's process, seen from here. `keys` and `token` where the syncer asks for them."""

    def __init__(
        self, address: str, number: int, speed: float, size: str, step_s: float, keys: str = "", token: str = ""
    ) -> None:
        self.speed = speed
        self.number = number
        self.process: subprocess.Popen[str] = start_python(
            __file__, "--child", address, str(number), size, str(step_s / speed), keys, token
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"learner {self.number} has ended; its words are above")
        return line

    def begin(self, how: str, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{how} {seconds}\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self.read())
        reply["steps"] = [TimedStep(*each) for each in reply["steps"][WARMUP_STEPS:]]
        return reply


# --------------------------------------------------------------------------------------------------------------------
# The measurement


def mean_step_s(reply: dict[str, Any]) -> float:
    taken: list[float] = [each.step_s for each in reply["steps"]]
    return sum(taken) / len(taken)


def measure(speeds: list[float], size: str, step_s: float, pairs: int, block_s: float) -> dict[str, Any]:
    settings = RunSettings(RunConfig("unequal", FRAGMENTS, EVERY_STEPS, limits=PATIENT_LIMITS))
    with run_syncer(settings) as served:
        islands = [IslandProcess(served.address, n + 1, speed, size, step_s) for n, speed in enumerate(speeds)]
        try:
            for island in islands:
                assert island.read() == "ready"
            return alternate_blocks(served, islands, pairs, block_s)
        finally:
            for island in islands:
                stop_process(island.process)


def alternate_blocks(served: SyncerProcess, islands: list[IslandProcess], pairs: int, block_s: float) -> dict[str, Any]:
    fast = [island for island in islands if island.speed == max(each.speed for each in islands)]
    run_together(islands, block_s)  # until rounds are under way
    ratios, alone_s = [], []
    all_s: dict[int, list[float]] = {island.number: [] for island in islands}
    work_s: dict[int, list[float]] = {island.number: [] for island in islands}
    merges = served.status()["merges"]
    for pair in range(pairs):
        one = fast[pair % len(fast)]
        one.begin("alone", block_s)
        alone = one.result()
        reply = run_together(islands, block_s)
        alone_s += [taken.step_s for taken in alone["steps"]]
        ratios.append(mean_step_s(reply[one.number]) / mean_step_s(alone))
        for number, each in reply.items():
            all_s[number] += [taken.step_s for taken in each["steps"]]
            work_s[number] += [taken.work_s for taken in each["steps"]]
    status = served.status()
    return {
        "pairs": pairs,
        "block_s": block_s,
        "alone_step_s": spread(alone_s),
        "ratio": spread(ratios),
        "learners": [
            {
                "learner": island.number,
                "speed": island.speed,
                "step_s": spread(all_s[island.number]),
                "mean_step_s": sum(all_s[island.number]) / len(all_s[island.number]),
                "work_s": spread(work_s[island.number]),
            }
            for island in islands
        ],
        "mean_alone_s": sum(alone_s) / len(alone_s),
        "rounds_per_s": (status["merges"] - merges) / (pairs * block_s),
        "contributions_per_merge": status["contributions_per_merge"],
    }


def run_together(islands: list[IslandProcess], seconds: float) -> dict[int, dict[str, Any]]:
    for island in islands:
        island.begin("together", seconds)
    return {island.number: island.result() for island in islands}


def show(found: dict[str, Any], size: str) -> None:
    alone, ratio = found["alone_step_s"], found["ratio"]
    print(f"learners of unequal speed, GPT {size}, paced steps, P = H = {FRAGMENTS}; ", end="")
    print(f"{found['pairs']} pairs of blocks of {found['block_s']:g} s; median (quartiles)\n")
    print(f"  {'':22}{'step, ms':>28}{'mean':>10}{'of it work, ms':>26}")
    print(f"  {'fast, alone, bare':22}{format_ms(alone):>28}{1e3 * found['mean_alone_s']:>10.2f}")
    for row in found["learners"]:
        name = f"learner {row['learner']}, speed {row['speed']:g}"
        step, work = format_ms(row["step_s"]), format_ms(row["work_s"])
        print(f"  {name:22}{step:>28}{1e3 * row['mean_step_s']:>10.2f}{work:>26}")
    print(f"\n  a fast learner beside all others by alone: {ratio.median:.4f} ", end="")
    print(f"({ratio.low:.4f} to {ratio.high:.4f}), wanted: at most {TARGET_RATIO}")
    print(f"  {found['rounds_per_s']:.2f} rounds per second, ", end="")
    print(f"{found['contributions_per_merge']:.2f} contributions per merge")


def format_ms(value: Spread) -> str:
    return f"{1e3 * value.median:.2f} ({1e3 * value.low:.2f} to {1e3 * value.high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--speeds", default="1,1,0.5,0.5", help="one per learner")
    parser.add_argument("--step", type=float, default=0.2, help="least seconds of a step at speed 1")
    parser.add_argument("--size", default="1m", choices=sorted(SIZES), help="of the model")
    parser.add_argument("--pairs", type=int, default=6, help="blocks of either kind")
    parser.add_argument("--block", type=float, default=6.0, help="seconds of a block")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(1)
        address, number, size, least_s, keys, token = options.child
        run_learner(address, int(number), size, float(least_s), keys, token)
        return 0
    where = collect_machine()
    speeds = [float(speed) for speed in options.speeds.split(",")]
    found = measure(speeds, options.size, options.step, options.pairs, options.block)
    if options.json:
        print(to_json_line({"machine": where, "target": TARGET_RATIO, "size": options.size} | found))
        return 0
    print(machine_line(where))
    show(found, options.size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
