"""Honest learners beside hostile peers: are their steps as short as without them? Figures are in benchmarks/README.md.

    python benchmarks/bench_hostile.py [--quick] [--json] [--only half-open,slow-loris] [--block 4] [--repeats 3]

A syncer with keys and a token and three learners, each a process of its own. Steps are real steps of a small GPT,
paced, so that two cores suffice for all. For each kind of docs/security.md blocks take turns:

- quiet: no other client is connected
- attacked: the hostile, a process of their own, come to the syncer at a pace that is bounded and printed
- beside: the same hostile at the same pace come to another syncer, which has nothing to do with the learners

A ratio is that of two neighbouring blocks. What `beside` has above `quiet` is the price of sharing two cores with the
hostile and with whom they keep busy; what `attacked` has above `beside` comes by way of the learners' own syncer.
`unshared` are the attacked blocks by the quiet ones once more, without the time in which the training thread was ready
and waited for a processor: the ratio for learners with a machine of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.core.types import Limits, RunConfig
from atoll.learner.api import Learner
from atoll.reference.models import SIZES, build_model, inner_optimizer
from atoll.store.run_settings import RunSettings
from atoll.tensors.plan import describe_tensors, make_plan
from atoll.transport.keys import Authority
from benchmarks.bench_unequal import IslandProcess, TimedStep, run_together
from benchmarks.hostile import ATTACKS, AttackProcess, AttackTarget
from benchmarks.measurement import (
    Spread,
    SyncerProcess,
    collect_machine,
    cpu_s,
    machine_line,
    resident_mib,
    run_syncer,
    spread,
    stop_process,
    to_json_line,
)
from tests.transport.recorder import Recorder

FRAGMENTS = EVERY_STEPS = 24
TARGET_RATIO = 1.02
TOKEN = "a token for the time of a measurement"
RECORDED_STEPS = 30
ATTACKER_NUMBER = 99  # the learner that means harm, with a key of its own
MIN_STEPS = 300
"""Visits, or as many as are there at once, before the first step that counts: more than a port has room for."""

PATIENT_LIMITS = Limits(initial_wait_s=60.0, min_wait_s=60.0)
"""Learners stand still for a moment between two blocks, and are not lost."""

PHASES = ("quiet", "attacked", "beside")


class Testbed(NamedTuple):
    """All who take part. `other`: the syncer that has nothing to do with the learners."""

    attacked: SyncerProcess
    other: SyncerProcess
    islands: list[IslandProcess]
    targets: dict[str, AttackTarget]  # by phase


class MeasuredBlock(NamedTuple):
    steps: list[TimedStep]
    syncer_cpu: float  # cores
    hostile_cpu: float  # cores
    resident_mib: float  # of the syncer, in the end
    attempts_per_s: float  # visits that were begun
    outcomes: Counter[str]
    merges_per_s: float


# --------------------------------------------------------------------------------------------------------------------
# The scene


@contextlib.contextmanager
def open_testbed(size: str, learners: int, step_s: float) -> Iterator[Testbed]:
    settings = RunSettings(RunConfig("hostile", FRAGMENTS, EVERY_STEPS, limits=PATIENT_LIMITS))
    plan = make_plan(describe_tensors(build_model(SIZES[size], seed=0)), FRAGMENTS, settings.numerics.plan)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-keys-")))
        ring = Authority.init(folder / "keys")
        for number in range(1, learners + 1):
            ring.add(f"island-{number}", (number,))
        ring.add("bad", (ATTACKER_NUMBER,))
        Authority.init(folder / "others").add("one")
        served, other = (stack.enter_context(run_syncer(settings, keys=folder / "keys", token=TOKEN)) for _ in range(2))
        keys = [folder / "keys" / f"island-{number}" for number in range(1, learners + 1)]
        records = record_session(other, size, keys[0])
        prey = {
            phase: AttackTarget(
                to.address,
                TOKEN,
                settings,
                plan,
                folder / "keys" / "authority.pem",
                folder / "keys" / "bad",
                ATTACKER_NUMBER,
                1,
                folder / "others" / "one",
                records,
            )
            for phase, to in (("attacked", served), ("beside", other))
        }
        islands = []
        for number, key in enumerate(keys, 1):
            island = IslandProcess(served.address, number, 1.0, size, step_s, str(key), TOKEN)
            stack.callback(stop_process, island.process)
            islands.append(island)
        for island in islands:
            assert island.read() == "ready"
        yield Testbed(served, other, islands, prey)


def record_session(to: SyncerProcess, size: str, keys: Path) -> tuple[bytes, ...]:
    """What a learner sends in a few steps, by connection. It brings the other syncer its model, too."""
    model = build_model(SIZES[size], seed=0)
    with Recorder(to.address) as recorder:
        with Learner(model, inner_optimizer(model), recorder.address, TOKEN, keys=keys, learner=1) as learner:
            for _ in range(RECORDED_STEPS):
                learner.step(tokens=1)
                time.sleep(0.02)  # so that something is asked for
        return tuple(bytes(record) for record in recorder.sent if record)


# --------------------------------------------------------------------------------------------------------------------
# The measurement


def run_block(scene: Testbed, phase: str, name: str, block_s: float) -> MeasuredBlock:
    """Steps of all learners for so long, with the hostile where the phase says."""
    if phase == "quiet":
        return measure_block(scene, None, block_s)
    attack = ATTACKS[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.hostile"])
    with AttackProcess(context, scene.targets[phase], name, attack.attempts_per_s, attack.max_concurrent) as storm:
        while storm.tally().begun < min(attack.max_concurrent, MIN_STEPS):
            time.sleep(0.05)
        return measure_block(scene, storm, block_s)


def measure_block(scene: Testbed, storm: AttackProcess | None, block_s: float) -> MeasuredBlock:
    def used() -> tuple[float, float]:
        return cpu_s(scene.attacked.pid), cpu_s(storm.pid) if storm is not None else 0.0

    merges, before = scene.attacked.status()["merges"], used()
    begun = storm.tally().begun if storm is not None else 0
    began = time.monotonic()
    measured = run_together(scene.islands, block_s)
    after, wall_s = used(), time.monotonic() - began
    tally = storm.tally() if storm is not None else None
    return MeasuredBlock(
        steps=[step for each in measured.values() for step in each["steps"]],
        syncer_cpu=(after[0] - before[0]) / wall_s,
        hostile_cpu=(after[1] - before[1]) / wall_s,
        resident_mib=resident_mib(scene.attacked.pid),
        attempts_per_s=(tally.begun - begun) / wall_s if tally is not None else 0.0,
        outcomes=tally.ends if tally is not None else Counter(),
        merges_per_s=(scene.attacked.status()["merges"] - merges) / wall_s,
    )


def ratios(blocks: list[MeasuredBlock], quiet: list[MeasuredBlock], of: Callable[[TimedStep], float]) -> dict[str, Any]:
    """Of medians, pair by pair of neighbours, and of the worst in a hundred, of all together."""

    def median(block: MeasuredBlock) -> float:
        return statistics.median(map(of, block.steps))

    def p99(blocks: list[MeasuredBlock]) -> float:
        return statistics.quantiles((of(step) for each in blocks for step in each.steps), n=100, method="inclusive")[98]

    return {
        "median": spread([median(one) / median(two) for one, two in zip(blocks, quiet, strict=True)]),
        "p99": p99(blocks) / p99(quiet),
    }


def measure(scene: Testbed, name: str, repeats: int, block_s: float) -> dict[str, Any]:
    found: dict[str, list[MeasuredBlock]] = {phase: [] for phase in PHASES}
    for repeat in range(repeats):
        for phase in PHASES if repeat % 2 == 0 else reversed(PHASES):
            if sys.stderr.isatty():
                print(f"\r\x1b[K  {name}: {phase}, {repeat + 1} of {repeats}", end="\r", file=sys.stderr, flush=True)
            found[phase].append(run_block(scene, phase, name, block_s))
    quiet, ends = found["quiet"], Counter[str]()
    result: dict[str, Any] = {"attack": name, "steps": sum(len(each.steps) for each in quiet)}
    for phase, blocks in found.items():
        result[phase] = {
            "step_s": spread([step.step_s for each in blocks for step in each.steps]),
            "work_s": spread([step.work_s for each in blocks for step in each.steps]),
            "syncer_cpu": statistics.mean(each.syncer_cpu for each in blocks),
            "hostile_cpu": statistics.mean(each.hostile_cpu for each in blocks),
            "per_s": statistics.mean(each.attempts_per_s for each in blocks),
            "merges_per_s": statistics.mean(each.merges_per_s for each in blocks),
        }
    result["ratios"] = {
        "attacked": ratios(found["attacked"], quiet, lambda step: step.step_s),
        "beside": ratios(found["beside"], quiet, lambda step: step.step_s),
        "unshared": ratios(found["attacked"], quiet, lambda step: step.unshared_s),
    }
    for each in found["attacked"]:
        ends.update(each.outcomes)
    result["ends"] = dict(ends.most_common())
    min_mib = min(each.resident_mib for each in quiet)
    result["grown_mib"] = max(each.resident_mib for each in found["attacked"]) - min_mib
    return result


# --------------------------------------------------------------------------------------------------------------------
# What is shown


def show(result: dict[str, Any]) -> None:
    attacked, quiet = result["attacked"], result["quiet"]
    medians = "".join(f"{each['median'].median:>9.4f}" for each in result["ratios"].values())
    worst = "".join(f"{each['p99']:>9.3f}" for each in result["ratios"].values())
    print(
        f"  {result['attack']:19}{attacked['per_s']:>5.0f}/s{medians} {worst}{result['grown_mib']:>+7.0f}"
        f"{100 * quiet['syncer_cpu']:>7.0f}{100 * attacked['syncer_cpu']:>4.0f}{100 * attacked['hostile_cpu']:>7.0f}"
        f"{quiet['merges_per_s']:>7.1f}{attacked['merges_per_s']:>5.1f}"
        f"  {', '.join(f'{end} {count}' for end, count in result['ends'].items()) or 'all still wait'}",
        flush=True,
    )


TABLE_HEAD = (
    f"  {'':19}{'':7}{'median step':>27} {'p99 step':>27}{'MiB':>7}{'syncer, %':>11}{'they':>7}{'merges/s':>12}\n"
    f"  {'':19}{'visits':>7}{'attacked':>9}{'beside':>9}{'unshared':>9} {'attacked':>9}{'beside':>9}{'unshared':>9}"
    f"{'more':>7}{'quiet':>7}{'att':>4}{'%':>7}{'quiet':>7}{'att':>5}  what became of them"
)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Of the worst attack by either measure, as it was, and without what sharing the processors with it costs."""

    def of(row: dict[str, Any], how: str, which: str) -> float:
        found = row["ratios"][how][which]
        return float(found.median if isinstance(found, Spread) else found)

    lines = []
    for which in ("median", "p99"):
        for how, words in (("attacked", "as measured"), ("unshared", "without waits for a processor")):
            worst = max(rows, key=lambda row, how=how, which=which: of(row, how, which))  # type: ignore[misc]
            most = of(worst, how, which)
            reached = "reached" if most <= TARGET_RATIO else "not reached"
            beside = f"; the same load on another syncer: {of(worst, 'beside', which):.4f}" if how == "attacked" else ""
            lines.append(
                f"  {which} step under attack by without, {words}: at most {most:.4f} ({worst['attack']}{beside});"
                f" wanted: {TARGET_RATIO}, {reached}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="one short block of each kind: a minute and a half")
    parser.add_argument("--only", default=",".join(ATTACKS), help="kinds of attack, with commas between them")
    parser.add_argument("--size", default="100k", choices=sorted(SIZES), help="of the model")
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.1, help="least seconds of a step")
    parser.add_argument("--block", type=float, default=4.0, help="seconds of a block")
    parser.add_argument("--repeats", type=int, default=3, help="blocks of each kind")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    block_s, repeats = (2.0, 1) if options.quick else (options.block, options.repeats)
    where = collect_machine()
    rows = []
    with open_testbed(options.size, options.learners, options.step) as set_up:
        run_together(set_up.islands, block_s)  # until rounds are under way
        if not options.json:
            print(f"honest learners beside hostile peers; {machine_line(where)}")
            print(f"{options.learners} learners, GPT {options.size}, steps of {1e3 * options.step:g} ms, ", end="")
            print(f"{repeats} blocks of {block_s:g} s of each kind; ratios to quiet blocks\n")
            print(TABLE_HEAD)
        for name in names:
            rows.append(measure(set_up, name, repeats, block_s))
            if not options.json:
                show(rows[-1])
    if options.json:
        print(
            to_json_line(
                {"machine": where, "target": TARGET_RATIO, "block_s": block_s, "repeats": repeats, "attacks": rows}
            )
        )
        return 0
    print(f"\n{verdict(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
