"""How fast the cores and the simulator are. Run by `make bench-core`; figures are kept in benchmarks/README.md.

Rates on a busy machine are low and say nothing: run it alone, and compare ratios within one run.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import Event
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import SYNCER
from atoll.sim.decoupled import DecoupledConfig, DecoupledRun, coarsen
from atoll.sim.fleet import FleetConfig
from atoll.sim.swarm import run_seed, run_seeds
from atoll.tape.format import Entry

LEARNERS = 16


def time_call(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def core_rate() -> tuple[float, int]:
    """Events per second through `handle` alone: a recorded run of 16 learners, P = H = 24, is shown to fresh cores."""
    entries: list[Entry] = []
    config = DecoupledConfig()
    DecoupledRun(FleetConfig(), config, LEARNERS, 2_400_000, 600 / 86_400, seed=0, on_entry=entries.append).run()
    run_config = config.run_config()

    def fresh() -> list[tuple[Callable[[float, Event], object], float, Event]]:
        cores: dict[object, SyncerCore | LearnerCore] = {}
        for entry in entries:
            if entry.actor not in cores:
                if entry.actor.learner == SYNCER:
                    cores[entry.actor] = SyncerCore(run_config, entry.actor.generation)
                else:
                    cores[entry.actor] = LearnerCore(run_config, entry.actor.learner, entry.actor.generation)
        return [(cores[e.actor].handle, e.at, e.event) for e in entries]  # type: ignore[misc]

    best = float("inf")
    for _ in range(5):
        calls = fresh()

        def replay(calls: list[tuple[Callable[[float, Event], object], float, Event]] = calls) -> None:
            for handle, at, event in calls:
                handle(at, event)

        best = min(best, time_call(replay))
    return len(entries) / best, len(entries)


def simulate_day(chips: int, learners: int = LEARNERS, days: float = 1.0) -> tuple[float, int]:
    run = DecoupledRun(FleetConfig(), coarsen(DecoupledConfig()), learners, chips, days, seed=0)
    return time_call(run.run), run.engine.events


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rate, events = core_rate()
    print(f"core: {rate:,.0f} events/s through handle ({events:,} events of {LEARNERS} learners, P = H = 24)")

    seeds = 300
    alone = time_call(lambda: [run_seed(seed, small=True) for seed in range(seeds)])
    print(f"swarm: {seeds / alone:.0f} seeds/s on one core, small worlds")
    shared = time_call(lambda: list(run_seeds(range(seeds), processes=2, small=True)))
    print(f"sweep: two processes are {alone / shared:.2f} times as fast as one")

    before = peak_mb()
    simulate_day(24_000, days=0.1)
    small = peak_mb()
    simulate_day(24_000_000, days=0.1)
    large = peak_mb()
    print(f"memory: {before:.0f} MB before, {small:.0f} MB after 24 thousand chips, {large:.0f} MB after 24 million")

    seconds, events = simulate_day(2_400_000)
    print(
        f"simulator: one day of {LEARNERS} learners, 2.4 million chips, 1 s steps in {seconds:.1f} s "
        f"({events:,} events, {events / seconds:,.0f} per second)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
