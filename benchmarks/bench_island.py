"""What Atoll costs inside an island of two ranks: time per step with it against without, FSDP2 on gloo, in one run.

    python benchmarks/bench_island.py [--json] [--size 1m] [--batch 8] [--pairs 10] [--block 10] [--shape fsdp] [--pin]

Two processes train one sharded GPT on one thread each; P = H = 24, so that at every step one fragment is copied and
sent and another one fetched and adopted. Bare steps and steps with Atoll are taken in turns, a block of each, on the
same model: what drifts, drifts for both. Every block begins with a barrier, and the background comes to rest before it.
On two cores the ranks, their background and the syncer share what there is; `--pin` gives both ranks with all their
threads one core and the syncer the other, which is no part of the island.

Beside it, without a model: what one boundary costs at which nothing is due (all ranks ask, rank 0 answers), against a
gather and a broadcast of the same few bytes by gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from atoll.core.types import Limits, RunConfig
from atoll.island.rank_connection import BoundaryStatus, RankRequest
from atoll.island.topology import Ranks, rendezvous
from atoll.learner.api import Learner
from atoll.reference.models import SIZES, build_model, inner_optimizer, parameter_count
from atoll.store.run_settings import RunSettings
from benchmarks.bench_overhead import make_batches
from benchmarks.measurement import (
    collect_machine,
    cpu_s,
    machine_line,
    run_syncer,
    spread,
    to_json_line,
    wait_until_idle,
)

FRAGMENTS = EVERY_STEPS = 24
RANKS = 2
WARMUP_STEPS = 3
BOUNDARY_ROUNDS = 1000
TARGET_RATIO = 1.03

PATIENT_LIMITS = Limits(initial_wait_s=300.0, min_wait_s=300.0)
"""A learner that reports nothing during a bare block is not lost."""


def run_rank(rank: int, options: argparse.Namespace, address: str, syncer_pid: int, folder: str) -> None:
    torch.set_num_threads(1)
    if options.pin:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    config = SIZES[options.size]
    model: nn.Module = build_model(config, seed=0)
    parameters = parameter_count(model)
    if options.shape == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = inner_optimizer(model) if options.shape == "ddp" else torch.optim.AdamW(model.parameters())
    data = make_batches(config.vocabulary, options.batch, config.context)

    def bare() -> torch.Tensor:
        x, y = next(data)
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    boundary = measure_boundaries(rendezvous(model), rank)
    with Learner(model, optimizer, address) as learner:

        def with_atoll() -> None:
            learner.step(tokens=options.batch * config.context, loss=bare())

        while learner.stats().adopted < 2 * FRAGMENTS:  # the same on all ranks: they adopt at the same steps
            with_atoll()
        figures = alternate_blocks(learner, bare, with_atoll, options.pairs, options.block, syncer_pid)
        stats = learner.stats()
    per_parameter = torch.tensor([stats.host_bytes / stats.parameters, stats.device_bytes / stats.parameters])
    memory = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_gather(memory, per_parameter)
    if rank == 0:
        figures |= {"host_bytes_per_parameter": [round(float(each[0]), 2) for each in memory]}
        figures |= {"device_bytes_per_parameter": [round(float(each[1]), 2) for each in memory]}
        header = {"shape": options.shape, "size": options.size, "parameters": parameters, "target": TARGET_RATIO}
        Path(folder, "figures.json").write_text(
            to_json_line(header | {"tokens_per_step": RANKS * options.batch * config.context} | boundary | figures)
        )
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may abort an interpreter that ends (docs/islands.md)


def measure_boundaries(ranks: Ranks | None, rank: int) -> dict[str, Any]:
    """Seconds of one boundary, over the lines of an island and by gloo."""
    assert ranks is not None
    lines = ranks.control

    def ours() -> None:
        if rank == 0:
            for line in lines:
                line.receive_request()
            for line in lines:
                line.send_reply(BoundaryStatus(), b"")
        else:
            lines[0].send_request(RankRequest.STEP, 1)
            lines[0].receive_reply()

    group = dist.new_group(backend="gloo")
    small, large = torch.zeros(2, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    into = [torch.zeros_like(small) for _ in range(RANKS)] if rank == 0 else None

    def gloo() -> None:
        dist.gather(small, into, 0, group=group)
        dist.broadcast(large, 0, group=group)

    found = {name: time_rounds(each) for name, each in (("boundary_us", ours), ("gloo_us", gloo))}
    dist.destroy_process_group(group)
    ranks.close()
    return found


def time_rounds(once: Callable[[], None]) -> float:
    for _ in range(100):
        once()
    began = time.perf_counter()
    for _ in range(BOUNDARY_ROUNDS):
        once()
    return (time.perf_counter() - began) / BOUNDARY_ROUNDS * 1e6


def alternate_blocks(
    learner: Learner,
    bare: Callable[[], object],
    with_atoll: Callable[[], None],
    pairs: int,
    block: int,
    syncer_pid: int,
) -> dict[str, Any]:
    """Blocks in the order a b, b a, a b ...: neither side always comes first."""
    walls: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[float]] = {False: [], True: []}
    cpus: dict[bool, float] = {False: 0.0, True: 0.0}
    syncer_s = 0.0
    before = learner.stats()
    for pair in range(pairs):
        for atoll in (False, True) if pair % 2 == 0 else (True, False):
            wait_until_idle(lambda: (learner.stats().bytes_up, learner.stats().bytes_down))
            dist.barrier()
            taken, at_start, theirs = [], time.process_time(), cpu_s(syncer_pid)
            for _ in range(block + WARMUP_STEPS):
                began = time.perf_counter()
                (with_atoll if atoll else bare)()
                taken.append(time.perf_counter() - began)
            cpus[atoll] += time.process_time() - at_start
            syncer_s += cpu_s(syncer_pid) - theirs if atoll else 0.0
            walls[atoll].append(sum(taken[WARMUP_STEPS:]))
            steps[atoll] += taken[WARMUP_STEPS:]
    after = learner.stats()
    count = pairs * (block + WARMUP_STEPS)
    bare_s, atoll_s = spread(steps[False]), spread(steps[True])
    return {
        "pairs": pairs,
        "block": block,
        "bare_step_s": bare_s,
        "atoll_step_s": atoll_s,
        "ratio": spread([a / b for a, b in zip(walls[True], walls[False], strict=True)]),
        "ratio_of_medians": atoll_s.median / bare_s.median,
        "rank_cpu_s": (cpus[True] - cpus[False]) / count,  # of rank 0, all its threads, more than in bare steps
        "syncer_cpu_s": syncer_s / count,
        "boundary_s": (after.boundary_s - before.boundary_s) / count,
        "rank_wait_s": (after.rank_wait_s - before.rank_wait_s) / count,
        "adopted": (after.adopted - before.adopted) / count,
        "contributed": (after.contributed - before.contributed) / count,
    }


def show(figures: dict[str, Any]) -> None:
    bare, atoll, ratio = figures["bare_step_s"], figures["atoll_step_s"], figures["ratio"]
    print(f"an island of {RANKS} ranks, {figures['shape']} on gloo, one thread each, P = H = {FRAGMENTS}; ", end="")
    print(f"{figures['parameters']:,} parameters, {figures['tokens_per_step']} tokens per step")
    print(f"{figures['pairs']} pairs of blocks of {figures['block']} steps in turns; wanted: at most {TARGET_RATIO}\n")
    print(f"  bare step           {1e3 * bare['median']:9.2f} ms ({1e3 * bare['low']:.2f} to {1e3 * bare['high']:.2f})")
    print(f"  step with Atoll     {1e3 * atoll['median']:9.2f} ms ", end="")
    print(f"({1e3 * atoll['low']:.2f} to {1e3 * atoll['high']:.2f})")
    print(f"  ratio by blocks     {ratio['median']:9.4f}    ({ratio['low']:.4f} to {ratio['high']:.4f})")
    print(f"  ratio of medians    {figures['ratio_of_medians']:9.4f}")
    print(f"  at step boundaries  {1e3 * figures['boundary_s']:9.2f} ms of rank 0, beside the wait for the other rank")
    print(f"  processor time      {1e3 * figures['rank_cpu_s']:9.2f} ms per step more at rank 0, ", end="")
    print(f"{1e3 * figures['syncer_cpu_s']:.2f} ms at the syncer")
    print(f"  per step            {figures['contributed']:.2f} copied, {figures['adopted']:.2f} adopted")
    print(f"  a boundary at which nothing is due: {figures['boundary_us']:.0f} us; ", end="")
    print(f"a gather and a broadcast by gloo: {figures['gloo_us']:.0f} us")
    print(f"  host memory         {figures['host_bytes_per_parameter']} bytes per parameter of each rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--size", default="1m", choices=sorted(SIZES), help="of the model")
    parser.add_argument("--shape", default="fsdp", choices=("fsdp", "ddp"))
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step of each rank")
    parser.add_argument("--pairs", type=int, default=10, help="blocks of either kind")
    parser.add_argument("--block", type=int, default=10, help="counted steps of a block")
    parser.add_argument("--pin", action="store_true", help="both ranks on one core, the syncer on the other")
    options = parser.parse_args()
    where = collect_machine()
    settings = RunSettings(RunConfig("island", FRAGMENTS, EVERY_STEPS, limits=PATIENT_LIMITS))
    core = max(os.sched_getaffinity(0)) if options.pin else None
    with run_syncer(settings, core=core) as served, tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        start_processes(run_rank, (options, served.address, served.pid, folder), nprocs=RANKS, start_method="spawn")
        figures = json.loads(Path(folder, "figures.json").read_text())
    if options.json:
        print(to_json_line({"machine": where} | figures))
        return 0
    print(machine_line(where))
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
