"""What Atoll costs a training loop: time per step with it against the bare loop. Figures are in benchmarks/README.md.

    python benchmarks/bench_overhead.py [--json] [--batch 8,2] [--pairs 12] [--pin]

One learner trains a GPT of 10 M parameters, unpaced, on one thread; P = H = 24, so that at every step one fragment is
copied and sent and another one fetched and adopted. The syncer is a process of its own. The learner's background
threads and the syncer share the second core (`--pin`: the learner with all its threads has one core, the syncer the
other).

Bare steps and steps with Atoll are taken in turns, a block of each, in the same process on the same model: what drifts,
drifts for both. Between blocks the background comes to rest, so that it does not work on during a bare block; the
first steps of a block are not counted, because nothing arrives in them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from atoll.core.types import Limits, RunConfig
from atoll.learner.api import Learner
from atoll.reference.models import SIZES, build_model, clip_gradients, inner_optimizer, parameter_count
from atoll.store.run_settings import RunSettings
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
WARMUP_STEPS = 3  # steps at the start of a block: the first answer arrives within tau = 2
TARGET_RATIO = 1.02

PATIENT_LIMITS = Limits(initial_wait_s=300.0, min_wait_s=300.0)
"""A learner that reports nothing during a bare block is not lost."""


def make_batches(vocabulary: int, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, drawn once, so that loading data takes no time."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(vocabulary, (batch, context + 1), generator=generator) for _ in range(16)]
    while True:
        for tokens in drawn:
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_stepper(
    model: nn.Module, data: Iterator[tuple[Tensor, Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    """The loop of `atoll train` without Atoll: forward, backward, clip, update."""
    optimizer = inner_optimizer(model)

    def step() -> Tensor:
        x, y = next(data)
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(x, y)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return optimizer, step


class StepTime(NamedTuple):
    """One step: seconds, and those in which the training thread had a processor."""

    wall_s: float
    cpu_s: float


def time_steps(step: Callable[[], object], count: int) -> list[StepTime]:
    """Every step but the first ones."""
    taken = []
    for _ in range(count + WARMUP_STEPS):
        began = time.perf_counter(), time.thread_time()
        step()
        taken.append(StepTime(time.perf_counter() - began[0], time.thread_time() - began[1]))
    return taken[WARMUP_STEPS:]


def measure(size: str, batch: int, pairs: int, block: int, pin: bool) -> dict[str, Any]:
    config = SIZES[size]
    model = build_model(config, seed=0)
    optimizer, bare = make_stepper(model, make_batches(config.vocabulary, batch, config.context))
    settings = RunSettings(RunConfig("overhead", FRAGMENTS, EVERY_STEPS, limits=PATIENT_LIMITS))
    everything = os.sched_getaffinity(0)
    if pin:
        os.sched_setaffinity(0, {min(everything)})
    try:
        with (
            run_syncer(settings, core=max(everything) if pin else None) as served,
            Learner(model, optimizer, served.address) as learner,
        ):

            def with_atoll() -> None:
                learner.step(tokens=batch * config.context, loss=bare().detach())

            while learner.stats().adopted < 2 * FRAGMENTS:  # every fragment has arrived, and has been updated once
                with_atoll()
            figures = alternate_blocks(learner, bare, with_atoll, pairs, block, served.pid)
    finally:
        os.sched_setaffinity(0, everything)
    return {"size": size, "parameters": parameter_count(model), "tokens_per_step": batch * config.context} | figures


def alternate_blocks(
    learner: Learner,
    bare: Callable[[], object],
    with_atoll: Callable[[], None],
    pairs: int,
    block: int,
    syncer_pid: int,
) -> dict[str, Any]:
    """Blocks in the order a b, b a, a b ...: neither side always comes first."""
    blocks: dict[bool, list[list[StepTime]]] = {False: [], True: []}
    boundary_s = background_s = syncer_s = 0.0
    before = learner.stats()
    for pair in range(pairs):
        for atoll in (False, True) if pair % 2 == 0 else (True, False):
            wait_until_idle(lambda: (learner.stats().bytes_up, learner.stats().bytes_down))
            at_start = learner.stats().boundary_s, time.process_time() - time.thread_time(), cpu_s(syncer_pid)
            blocks[atoll].append(time_steps(with_atoll if atoll else bare, block))
            if atoll:
                boundary_s += learner.stats().boundary_s - at_start[0]
                background_s += time.process_time() - time.thread_time() - at_start[1]
                syncer_s += cpu_s(syncer_pid) - at_start[2]
    after = learner.stats()
    steps = pairs * (block + WARMUP_STEPS)
    pairs_of_blocks = list(zip(blocks[True], blocks[False], strict=True))
    walls = [sum(t.wall_s for t in a) / sum(t.wall_s for t in b) for a, b in pairs_of_blocks]
    cpus = [sum(t.cpu_s for t in a) / sum(t.cpu_s for t in b) for a, b in pairs_of_blocks]
    bare_s, atoll_s = (spread([t.wall_s for taken in blocks[side] for t in taken]) for side in (False, True))
    return {
        "pairs": pairs,
        "block": block,
        "bare_step_s": bare_s,
        "atoll_step_s": atoll_s,
        "ratio": spread(walls),
        "ratio_of_medians": atoll_s.median / bare_s.median,
        "ratio_cpu": spread(cpus),  # of the training thread; the only one that means something on a busy machine
        "boundary_s": boundary_s / steps,  # per step, as the rest
        "lock_wait_s": (after.lock_wait_s - before.lock_wait_s) / steps,
        "background_cpu_s": background_s / steps,
        "syncer_cpu_s": syncer_s / steps,
        "adopted": (after.adopted - before.adopted) / steps,
        "contributed": (after.contributed - before.contributed) / steps,
        "bytes_up": (after.bytes_up - before.bytes_up) / steps,
        "bytes_down": (after.bytes_down - before.bytes_down) / steps,
    }


def show(rows: list[dict[str, Any]], pinned: bool) -> None:
    where = (
        "the learner has one core, the syncer the other"
        if pinned
        else ("the learner's background threads and the syncer share the second core")
    )
    print(f"time per step with Atoll against the bare loop, unpaced, one thread, P = H = {FRAGMENTS}; {where}")
    print(f"median (quartiles) of blocks in turns; wanted: a ratio of at most {TARGET_RATIO}\n")
    for row in rows:
        bare, atoll, ratio, cpu = (row[name] for name in ("bare_step_s", "atoll_step_s", "ratio", "ratio_cpu"))
        print(f"  {row['parameters']:,} parameters, {row['tokens_per_step']} tokens per step, ", end="")
        print(f"{row['pairs']} pairs of blocks of {row['block']} steps")
        print(f"    bare step           {1e3 * bare.median:9.2f} ms ({1e3 * bare.low:.2f} to {1e3 * bare.high:.2f})")
        print(f"    step with Atoll     {1e3 * atoll.median:9.2f} ms ({1e3 * atoll.low:.2f} to {1e3 * atoll.high:.2f})")
        print(f"    ratio by blocks     {ratio.median:9.4f}    ({ratio.low:.4f} to {ratio.high:.4f})")
        print(f"    ratio of medians    {row['ratio_of_medians']:9.4f}")
        print(f"    processor time      {cpu.median:9.4f}    ({cpu.low:.4f} to {cpu.high:.4f}), of the training thread")
        share = f"{100 * row['boundary_s'] / bare.median:.2f} %"
        print(f"    at step boundaries  {1e3 * row['boundary_s']:9.2f} ms ({share} of a bare step), ", end="")
        print(f"of it {1e6 * row['lock_wait_s']:.0f} us for the lock")
        print(f"    background threads  {1e3 * row['background_cpu_s']:9.2f} ms of processor time per step")
        print(f"    syncer              {1e3 * row['syncer_cpu_s']:9.2f} ms of processor time per step")
        print(f"    per step            {row['contributed']:.2f} copied, {row['adopted']:.2f} adopted, ", end="")
        print(f"{row['bytes_up'] / 1e6:.2f} MB up, {row['bytes_down'] / 1e6:.2f} MB down\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--size", default="10m", choices=sorted(SIZES), help="of the model")
    parser.add_argument("--batch", default="8", help="sequences of a step; several, separated by commas, are measured")
    parser.add_argument("--pairs", type=int, default=12, help="blocks of either kind")
    parser.add_argument("--block", type=int, default=10, help="counted steps of a block")
    parser.add_argument("--pin", action="store_true", help="all threads of the learner on one core")
    options = parser.parse_args()
    where = collect_machine()
    rows = [
        measure(options.size, int(batch), options.pairs, options.block, options.pin)
        for batch in options.batch.split(",")
    ]
    if options.json:
        print(to_json_line({"machine": where, "pinned": options.pin, "target": TARGET_RATIO, "rows": rows}))
        return 0
    print(machine_line(where))
    show(rows, options.pin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
