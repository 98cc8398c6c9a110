"""How fast the syncer merges, and what it takes of memory. Figures are kept in benchmarks/README.md.

    OMP_NUM_THREADS=1 python benchmarks/bench_merge.py [--json]

One thread. Every figure comes from a process of its own, the copies that it is compared with from the same one. Run it
alone, and compare ratios within one run.

A copy writes where it has not read, which costs the memory more than to write back what was just read: passes in place
can be faster than copies of as many bytes, so a ratio below 1 is no mistake.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.tensors import merge, outer_optimizer
from atoll.tensors.codecs import Codec, get_codec
from atoll.tensors.merge import Accumulator
from atoll.tensors.outer_optimizer import OuterOptimizer, PublishedValue
from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan
from atoll.tensors.robust_merge import make_running_sums
from atoll.tensors.settings import Numerics

MIB = 1 << 20
NUMERICS = Numerics(merge="radial", outer_lr=0.4, outer_momentum=0.9)  # the codecs are those of the table
CODECS = ("f32", "bf16", "int8", "int4")
MERGES = ("average", "clipped", "radial", "trimmed")
LEARNERS = 4  # of the rate
REPEATS = 7

# Bytes that the arithmetic must read and write per value, when e bytes hold an encoded one. The norm must be known
# before anything is added, so the encoded values are read twice.
PASSES: dict[str, tuple[str, Callable[[float], float]]] = {
    "add": (
        "per contribution: encoded read for the norm, read again to add; sums read and written",
        lambda e: 2 * e + 8,
    ),
    "result": ("sums read for their norm, read and written to scale", lambda e: 12),
    "outer": ("D read; momentum and value read and written", lambda e: 20),
    "publish": ("value read; published value read and written; update written", lambda e: 12 + e),
}


def make_fragment_plan(numel: int) -> FragmentPlan:
    """One fragment as a transformer has it: a few large matrices, some small vectors."""
    large = numel // 4 // 1024
    tensors = [TensorInfo(f"blocks.{layer}.weight", (large, 1024), "float32", "weight") for layer in range(4)]
    tensors += [TensorInfo(f"blocks.{layer}.norm", (1024,), "float32", "weight") for layer in range(4)]
    return make_plan(tensors, 1, "balanced")


def time_call(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class MergeStreaming:
    """The syncer's own parts."""

    def __init__(self, plan: FragmentPlan, coder: Codec) -> None:
        generator = torch.Generator().manual_seed(0)
        numel = plan.numel(0)
        self.coder = coder
        self.accumulator = Accumulator(plan, 0, NUMERICS.merge)
        self.outer = OuterOptimizer(plan, 0, NUMERICS, torch.randn(numel, generator=generator))
        self.published = PublishedValue(coder, self.outer.value.clone())
        self.update = torch.empty(coder.encoded_size(numel), dtype=torch.uint8)

    def add(self, data: Tensor, weight: float) -> None:
        self.accumulator.add_encoded(self.coder, data, weight)

    def finish(self) -> None:
        self.outer.step(self.accumulator.result())
        self.published.advance(self.outer.value, self.update)
        self.accumulator.reset()


class MergeBuffered:
    """The straightforward way: keep every learner's delta, then write the formulas down."""

    def __init__(self, plan: FragmentPlan, coder: Codec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plan, self.coder = plan, coder
        self.kept: list[tuple[Tensor, float]] = []
        self.value = torch.randn(plan.numel(0), generator=generator)
        self.momentum = torch.zeros_like(self.value)
        self.published = self.value.clone()

    def add(self, data: Tensor, weight: float) -> None:
        self.kept.append((self.coder.decode(data, self.plan.numel(0)), weight))

    def finish(self) -> None:
        weights = sum(w for _, w in self.kept)
        merged = torch.empty_like(self.value)
        for _, begin, end in self.plan.spans(0):
            parts = [(delta[begin:end], w) for delta, w in self.kept]
            norms = [torch.linalg.vector_norm(v) for v, _ in parts]
            direction = torch.zeros(end - begin)
            for (v, w), norm in zip(parts, norms, strict=True):
                direction += w * (v / norm)
            size = sum(w * float(norm) for (_, w), norm in zip(parts, norms, strict=True)) / weights
            merged[begin:end] = size * direction / torch.linalg.vector_norm(direction)
        self.kept.clear()
        mu, eta = NUMERICS.outer_momentum, NUMERICS.outer_lr
        self.momentum = mu * self.momentum + merged
        self.value = self.value - eta * (merged + mu * self.momentum)
        update = self.coder.encode(self.value - self.published)
        self.published = self.published + self.coder.decode(update, self.plan.numel(0))


def measure_rate(name: str, mib: int) -> dict[str, Any]:
    """Seconds of every stage of a round, and of copies that move as many bytes, best of some rounds."""
    coder, plan = get_codec(name), make_fragment_plan(mib * MIB // 4)
    numel = plan.numel(0)
    parts = MergeStreaming(plan, coder)
    generator = torch.Generator().manual_seed(1)
    sent = [coder.encode(torch.randn(numel, generator=generator)) for _ in range(LEARNERS)]

    def add_all() -> None:
        parts.accumulator.reset()
        for data in sent:
            parts.add(data, 1.0)

    add_all()
    merged = parts.accumulator.result()  # always the same buffer
    stages: dict[str, Callable[[], object]] = {
        "add": add_all,
        "result": parts.accumulator.result,
        "outer": partial(parts.outer.step, merged),
        "publish": partial(parts.published.advance, parts.outer.value, parts.update),
    }
    source, target = torch.zeros(4 * numel, dtype=torch.uint8), torch.zeros(4 * numel, dtype=torch.uint8)

    def copy(nbytes: int) -> None:
        for begin in range(0, nbytes, 4 * numel):
            count = min(4 * numel, nbytes - begin)
            target[:count].copy_(source[:count])

    best = {stage: (float("inf"), float("inf")) for stage in stages}
    encoded = coder.encoded_size(numel) / numel
    for _ in range(REPEATS):
        for stage, work in stages.items():
            moved = PASSES[stage][1](encoded) * numel * (LEARNERS if stage == "add" else 1)
            spent, copied = time_call(work), time_call(partial(copy, int(moved) // 2))  # a copy reads and writes
            best[stage] = (min(best[stage][0], spent), min(best[stage][1], copied))
    checked = min(time_call(lambda: coder.examine(sent[0], numel)) for _ in range(3))
    spent, copied = (sum(pair[place] for pair in best.values()) for place in (0, 1))
    return {
        "codec": name,
        "stages_s": {stage: {"spent": pair[0], "copies": pair[1]} for stage, pair in best.items()},
        "spent_s": spent,
        "copies_s": copied,
        "ratio": spent / copied,
        "merged_bytes_per_s": 4 * numel * LEARNERS / spent,  # f32 bytes of the deltas
        "problem_s": checked,
    }


def measure_mode(way: str, learners: int, mib: int) -> dict[str, Any]:
    """Seconds per round and memory beyond what the process had before, of one way and number of learners."""
    coder, plan = get_codec("bf16"), make_fragment_plan(mib * MIB // 4)
    data = coder.encode(torch.randn(plan.numel(0), generator=torch.Generator().manual_seed(1)))
    before = peak_mib()
    parts = MergeStreaming(plan, coder) if way == "streaming" else MergeBuffered(plan, coder)

    def one_round() -> None:
        for learner in range(learners):
            parts.add(data, 1.0 + learner)
        parts.finish()

    seconds = min(time_call(one_round) for _ in range(4))
    return {"way": way, "learners": learners, "seconds": seconds, "peak_mib": peak_mib() - before}


def measure_merge(method: str, mib: int) -> dict[str, Any]:
    """Seconds per round of one way to merge, `clipped` being the average with a norm clip."""
    coder, plan = get_codec("bf16"), make_fragment_plan(mib * MIB // 4)
    data = coder.encode(torch.randn(plan.numel(0), generator=torch.Generator().manual_seed(1)))
    sums = make_running_sums(plan, 0, "average" if method == "clipped" else method)

    def one_round() -> None:
        for learner in range(LEARNERS):
            sums.add_encoded(coder, data, 1.0 + learner, 0.5 if method == "clipped" else 1.0)
        sums.result()
        sums.reset()

    return {"merge": method, "seconds": min(time_call(one_round) for _ in range(REPEATS))}


def measure_figures(name: str, how: str, mib: int) -> dict[str, Any]:
    """Seconds per round with everything that the syncer measures at a merge, and without, turn by turn."""
    coder, plan = get_codec(name), make_fragment_plan(mib * MIB // 4)
    numel = plan.numel(0)
    generator = torch.Generator().manual_seed(1)
    sent = [coder.encode(torch.randn(numel, generator=generator)) for _ in range(LEARNERS)]
    sums = make_running_sums(plan, 0, how)
    step = OuterOptimizer(plan, 0, NUMERICS, torch.randn(numel, generator=generator))
    published = PublishedValue(coder, step.value.clone())
    update = torch.empty(coder.encoded_size(numel), dtype=torch.uint8)
    known = coder.examine(sent[0], numel)[1] if coder.has_exact_norm else None
    squares, looked_at = merge.square_norm, outer_optimizer.ERROR_SAMPLE_INTERVAL

    def one_round(measured: bool) -> None:
        for module in (merge, outer_optimizer):
            module.square_norm = squares if measured else lambda chunk: 1.0  # type: ignore[attr-defined]
        outer_optimizer.ERROR_SAMPLE_INTERVAL = looked_at if measured else numel
        for data in sent:
            sums.add_encoded(coder, data, 1.0, known_norm=known)
        step.step(sums.result())
        published.advance(step.value, update)
        if measured:
            step.momentum_norm()
        sums.reset()

    best = {True: float("inf"), False: float("inf")}
    for _ in range(2 * REPEATS):
        for measured in best:
            best[measured] = min(best[measured], time_call(partial(one_round, measured)))
    return {"codec": name, "merge": how, "seconds": best[True], "without_s": best[False]}


def run_in_child(*arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show_rates(rates: list[dict[str, Any]], mib: int) -> None:
    print(
        f"a round of {LEARNERS} contributions, a fragment of {mib} MiB in f32, radial, Nesterov; best of {REPEATS}, ms"
    )
    print("copies: torch copies of as many bytes as these passes read and write:")
    for stage, (what, _) in PASSES.items():
        print(f"  {stage:8} {what}")
    print(
        f"\n  {'codec':6}" + "".join(f"{stage + ' / copies':>20}" for stage in PASSES) + f"{'ratio':>8}{'merged':>12}"
    )
    for rate in rates:
        cells = (rate["stages_s"][stage] for stage in PASSES)
        line = "".join(f"{1e3 * cell['spent']:>11.1f} /{1e3 * cell['copies']:>7.1f}" for cell in cells)
        print(f"  {rate['codec']:6}{line}{rate['ratio']:>8.2f}{rate['merged_bytes_per_s'] / 1e9:>7.2f} GB/s")
    print("  check of one contribution before (not counted above): ", end="")
    print(", ".join(f"{rate['codec']} {1e3 * rate['problem_s']:.1f} ms" for rate in rates))


def show_modes(ways: list[dict[str, Any]], mib: int) -> None:
    print(f"\nagainst keeping all contributions until the end, bf16, a fragment of {mib} MiB in f32")
    print(f"  {'M':>4}{'streaming':>14}{'keeping':>14}{'ratio':>8}{'memory':>12}{'keeping':>12}")
    for streaming, keeping in zip(ways[::2], ways[1::2], strict=True):
        print(
            f"  {streaming['learners']:>4}{1e3 * streaming['seconds']:>11.1f} ms{1e3 * keeping['seconds']:>11.1f} ms"
            f"{keeping['seconds'] / streaming['seconds']:>8.2f}"
            f"{streaming['peak_mib']:>8.0f} MiB{keeping['peak_mib']:>8.0f} MiB"
        )


def show_merges(merges: list[dict[str, Any]], mib: int) -> None:
    print(f"\nways to merge {LEARNERS} contributions, without the outer step, bf16, a fragment of {mib} MiB in f32")
    plain = merges[0]["seconds"]
    for row in merges:
        print(f"  {row['merge']:10}{1e3 * row['seconds']:>8.1f} ms{row['seconds'] / plain:>8.2f}")


def show_figures(figures: list[dict[str, Any]], mib: int) -> None:
    print(f"\nfigures of a merge: {LEARNERS} contributions with them and without, a fragment of {mib} MiB in f32")
    for row in figures:
        ratio = row["seconds"] / row["without_s"]
        pair = f"{1e3 * row['seconds']:>8.1f} /{1e3 * row['without_s']:>7.1f} ms"
        print(f"  {row['codec']:6}{row['merge']:10}{pair}{ratio:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--mib", type=int, default=64, help="size of the fragment in f32; a quarter of it for --ways")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        kind, *rest = options.child
        if kind == "rate":
            print(json.dumps(measure_rate(rest[0], int(rest[1]))))
        elif kind == "figures":
            print(json.dumps(measure_figures(rest[0], rest[1], int(rest[2]))))
        elif kind == "merge":
            print(json.dumps(measure_merge(rest[0], int(rest[1]))))
        else:
            print(json.dumps(measure_mode(kind, int(rest[0]), int(rest[1]))))
        return 0
    small = max(options.mib // 4, 1)
    rates = [run_in_child("rate", name, options.mib) for name in CODECS]
    ways = [run_in_child(way, learners, small) for learners in (2, 8, 64) for way in ("streaming", "keeping")]
    merges = [run_in_child("merge", how, options.mib) for how in MERGES]
    figures = [
        run_in_child("figures", name, how, options.mib) for name in CODECS[1::2] for how in ("average", "radial")
    ]
    if options.json:
        found = {"mib": options.mib, "rates": rates, "ways_mib": small, "ways": ways, "merges": merges}
        found["figures"] = figures
        print(json.dumps(found, indent=2))
        return 0
    show_rates(rates, options.mib)
    show_modes(ways, small)
    show_merges(merges, options.mib)
    show_figures(figures, options.mib)
    return 0


if __name__ == "__main__":
    sys.exit(main())
