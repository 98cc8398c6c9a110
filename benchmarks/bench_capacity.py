"""How many learners one syncer serves: rounds and messages per second, its processor and its memory.

    python benchmarks/bench_capacity.py [--json] [--learners 2,8,16,32,64] [--pace 0.2,0.05] [--seconds 5]

The syncer is the real one, in a process of its own. The learners are light: real cores, real connections, real messages
and fragments, no training; all of them share one other process. They take steps at the given pace; P = H = 24, so at
the pace s a syncer that keeps up has 1 / s rounds per second, with contributions of nearly all. One that does not keep
up seals its rounds with the first contribution (K = 1, and no slack is left to wait for more). Whose processor is full
says who limits: either process has one event loop.

A message is a control message, a contribution or a fragment, in either direction.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import get_codec
from benchmarks.light_learner import SimulatedLearner, even_plan
from benchmarks.measurement import (
    SyncerProcess,
    collect_machine,
    cpu_s,
    machine_line,
    resident_mib,
    run_syncer,
    to_json_line,
)

FRAGMENTS = EVERY_STEPS = 24


class CapacityCounts(NamedTuple):
    """What has happened up to a moment."""

    at_s: float
    merges: int
    merged: float  # contributions
    control: int  # messages over the links
    bulk: int  # contributions and fragments
    bulk_bytes: int
    steps: int
    syncer_cpu_s: float
    learners_cpu_s: float


async def read_counts(served: SyncerProcess, learners: list[SimulatedLearner]) -> CapacityCounts:
    status = await learners[0].link.request("GET", "/v1/status")
    return CapacityCounts(
        time.monotonic(),
        status["merges"],
        status["merges"] * status["contributions_per_merge"],
        sum(each.sent + each.received for each in learners),
        sum(each.uploaded + each.downloaded for each in learners),
        sum(each.link.bytes_up + each.link.bytes_down for each in learners),
        sum(each.core.state.step for each in learners),
        cpu_s(served.pid),
        time.process_time(),
    )


async def measure(
    served: SyncerProcess, settings: RunSettings, count: int, kib: int, pace_s: float, seconds: float
) -> dict[str, Any]:
    numel = kib * 1024 // 4
    plan = even_plan(FRAGMENTS, numel)
    payload = get_codec(settings.numerics.upload_codecs[0]).encode(
        1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    )
    learners = [SimulatedLearner(served.address, n + 1, settings, plan, payload) for n in range(count)]
    empty_mib = resident_mib(served.pid)
    tasks = []
    try:
        for each in learners:
            await each.link.start()
        await learners[0].provide_model()
        await asyncio.gather(*(each.join() for each in learners))
        await asyncio.gather(*(each.training.wait() for each in learners))
        tasks += [asyncio.ensure_future(each.train(pace_s)) for each in learners]
        await asyncio.sleep(max(3.0, EVERY_STEPS * pace_s))
        before = await read_counts(served, learners)
        await asyncio.sleep(seconds)
        after = await read_counts(served, learners)
        memory_mib = resident_mib(served.pid)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.leave() for each in learners), return_exceptions=True)
    spent = after.at_s - before.at_s
    return {
        "learners": count,
        "pace_s": pace_s,
        "seconds": spent,
        "steps_per_s": (after.steps - before.steps) / spent / count,  # of one learner
        "rounds_per_s": (after.merges - before.merges) / spent,
        "contributions_per_merge": (after.merged - before.merged) / max(1, after.merges - before.merges),
        "control_per_s": (after.control - before.control) / spent,
        "bulk_per_s": (after.bulk - before.bulk) / spent,
        "bulk_mb_per_s": (after.bulk_bytes - before.bulk_bytes) / spent / 1e6,
        "syncer_cpu": (after.syncer_cpu_s - before.syncer_cpu_s) / spent,
        "learners_cpu": (after.learners_cpu_s - before.learners_cpu_s) / spent,
        "syncer_mib": memory_mib,
        "syncer_empty_mib": empty_mib,
        "failed_transfers": sum(each.failed for each in learners),
    }


def show(rows: list[dict[str, Any]], kib: int) -> None:
    print(f"one syncer, light learners in one other process, fragments of {kib} KiB in f32, P = H = {FRAGMENTS}\n")
    print(
        f"  {'pace':>8}{'M':>5}{'steps/s':>9}{'rounds/s':>10}{'per merge':>11}{'control/s':>11}{'bulk/s':>8}{'MB/s':>8}"
        f"{'syncer':>9}{'learners':>10}{'memory':>11}{'failed':>8}"
    )
    for row in rows:
        print(
            f"  {1e3 * row['pace_s']:>5.4g} ms{row['learners']:>5}{row['steps_per_s']:>9.1f}"
            f"{row['rounds_per_s']:>10.1f}{row['contributions_per_merge']:>11.1f}{row['control_per_s']:>11.0f}{row['bulk_per_s']:>8.0f}"
            f"{row['bulk_mb_per_s']:>8.1f}{100 * row['syncer_cpu']:>7.0f} %{100 * row['learners_cpu']:>8.0f} %"
            f"{row['syncer_mib']:>7.0f} MiB{row['failed_transfers']:>8}"
        )
    print("\n  syncer, learners: share of one core that either process uses; steps/s: of one learner")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--learners", default="2,8,16,32,64", help="how many, separated by commas")
    parser.add_argument("--pace", default="0.2,0.05", help="seconds of a step, separated by commas")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--kib", type=int, default=64, help="size of a fragment in f32")
    parser.add_argument("--profile", help="write a profile of the syncer's event loop to this file (last row)")
    options = parser.parse_args()
    where, rows = collect_machine(), []
    for pace_s in map(float, options.pace.split(",")):
        for count in map(int, options.learners.split(",")):
            settings = RunSettings(RunConfig("capacity", FRAGMENTS, EVERY_STEPS))
            with run_syncer(settings, profile=options.profile) as served:
                rows.append(asyncio.run(measure(served, settings, count, options.kib, pace_s, options.seconds)))
    if options.json:
        print(to_json_line({"machine": where, "kib": options.kib, "rows": rows}))
        return 0
    print(machine_line(where))
    show(rows, options.kib)
    return 0


if __name__ == "__main__":
    sys.exit(main())
