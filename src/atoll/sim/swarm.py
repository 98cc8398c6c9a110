"""Swarm: many simulated worlds, one per seed, in parallel, with their violations and coverage."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from signal import SIG_BLOCK, SIG_IGN, SIG_SETMASK, SIG_UNBLOCK, SIGINT, pthread_sigmask, signal
from typing import Any, NamedTuple

from atoll.core.learner.core import LearnerCore
from atoll.core.reasons import REASONS
from atoll.core.states import TRANSITION_TABLES
from atoll.core.syncer.core import SyncerCore
from atoll.sim.checkers import InvariantViolationError
from atoll.sim.driver import LearnerFactory, SyncerFactory
from atoll.sim.scenarios import FAULT_KINDS, draw_scenario
from atoll.sim.world import SwarmWorld
from atoll.tape.format import Entry

SEEDS_PER_BATCH = 2_000
"""Seeds that are submitted to the worker processes at a time."""


class SeedResult(NamedTuple):
    """Result of one world, small enough to send between processes."""

    seed: int
    events: int
    merges: int
    checker: str | None  # checker that failed; None if none failed
    message: str
    subject: tuple[str, int] | None
    transition_counts: dict[tuple[str, str], int]
    reason_counts: dict[str, int]
    fault_counts: dict[str, int]
    state_event_counts: dict[tuple[str, str], int]
    digest: str = ""  # digest of all entries, if requested


def run_seed(
    seed: int,
    small: bool = False,
    syncer: SyncerFactory = SyncerCore,
    learner: LearnerFactory = LearnerCore,
    on_entry: Callable[[Entry], None] | None = None,
    digest: bool = False,
) -> SeedResult:
    """Run one world.

    Args:
        small: draw a scenario with few learners.
        syncer: creates syncer cores.
        learner: creates learner cores.
        on_entry: receives every entry; not with `digest`.
        digest: compute a digest of all entries, which must be equal in every run of a seed.
    """
    sha = sha256()
    if digest:
        assert on_entry is None

        def on_entry(entry: Entry) -> None:
            sha.update(repr(entry).encode())

    world = SwarmWorld(draw_scenario(seed, small), syncer, learner, on_entry)
    checker, sentence, subject = None, "", None
    try:
        world.run()
    except InvariantViolationError as violation:
        checker, sentence, subject = violation.checker, violation.message, violation.subject
    transitions, reasons = world.coverage()
    sha.update(repr((checker, world.engine.events)).encode())
    return SeedResult(
        seed,
        world.engine.events,
        sum(r.version for r in world.disk.versions.values()),
        checker,
        sentence,
        subject,
        {(_state_name(state), trigger): n for (state, trigger), n in transitions.items()},
        dict(reasons),
        dict(world.fault_counts),
        {(_state_name(state), event.__name__): n for (state, event), n in world.state_event_counts.items()},
        sha.hexdigest()[:16] if digest else "",
    )


def _state_name(state: object) -> str:
    return f"{type(state).__name__.lower()} {state.value}"  # type: ignore[attr-defined]


def record_seed(seed: int, small: bool = False) -> tuple[SeedResult, list[Entry]]:
    """Run a seed and return all its entries."""
    entries: list[Entry] = []
    return run_seed(seed, small, on_entry=entries.append), entries


@dataclass
class Coverage:
    """Transitions, reason codes and faults that occurred in a swarm."""

    transition_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reason_counts: Counter[str] = field(default_factory=Counter)
    fault_counts: Counter[str] = field(default_factory=Counter)
    state_event_counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by state and event

    def add(self, result: SeedResult) -> None:
        self.transition_counts.update(result.transition_counts)
        self.reason_counts.update(result.reason_counts)
        self.fault_counts.update(result.fault_counts)
        self.state_event_counts.update(result.state_event_counts)

    def missing_transitions(self) -> list[str]:
        every = {(_state_name(state), trigger) for table in TRANSITION_TABLES.values() for state, trigger in table}
        return sorted(f"{state}, {trigger}" for state, trigger in every - set(self.transition_counts))

    def missing_reasons(self) -> list[str]:
        return sorted(set(REASONS) - set(self.reason_counts))

    def missing_faults(self) -> list[str]:
        return sorted(set(FAULT_KINDS) - set(self.fault_counts))

    def counts(self) -> dict[str, tuple[int, int]]:
        moves = sum(len(table) for table in TRANSITION_TABLES.values())
        return {
            "moves": (moves - len(self.missing_transitions()), moves),
            "reasons": (len(REASONS) - len(self.missing_reasons()), len(REASONS)),
            "faults": (len(FAULT_KINDS) - len(self.missing_faults()), len(FAULT_KINDS)),
        }


def run_seeds(seeds: Iterable[int], processes: int, small: bool = False, digest: bool = False) -> Iterator[SeedResult]:
    """Run seeds in parallel and yield their results in the order of the seeds."""
    run_one = partial(run_seed, small=small, digest=digest)
    if processes <= 1:
        yield from map(run_one, seeds)
        return
    numbers = iter(seeds)
    with process_pool(processes) as pool:
        # `map` submits all seeds before it yields a result, so seeds are submitted in batches. The next batch is
        # submitted before the results of the current one are read, so no process is idle.
        ahead = _submit_batch(pool, run_one, numbers)
        while ahead is not None:
            results, ahead = ahead, _submit_batch(pool, run_one, numbers)
            yield from results


def _submit_batch(
    pool: ProcessPoolExecutor, run_one: Callable[[int], SeedResult], numbers: Iterator[int]
) -> Iterator[SeedResult] | None:
    batch = list(islice(numbers, SEEDS_PER_BATCH))
    return pool.map(run_one, batch, chunksize=8) if batch else None


@contextmanager
def process_pool(
    processes: int, initializer: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Create an executor whose processes have called `initializer(*arguments)`.

    The initializer and its arguments are inherited through fork, so they need not be picklable. After Ctrl-C or an
    error the context manager terminates the processes and does not wait for pending work.
    """
    context = multiprocessing.get_context("fork")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_initialize_worker, initargs=(initializer, arguments)
    )
    try:
        with warnings.catch_warnings():
            # The processes only compute, so they need no lock that another thread may hold during the fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The first task forks. An interrupt during a fork would be lost in its hooks, so SIGINT is blocked.
            mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
            try:
                pool.submit(_warm_up)
            finally:
                pthread_sigmask(SIG_SETMASK, mask)
            yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _warm_up() -> None:
    """Do nothing: the first task starts the processes."""


def _initialize_worker(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent handles it and ends this one
    pthread_sigmask(SIG_UNBLOCK, {SIGINT})  # restore the mask from before the fork
    if initializer is not None:
        initializer(*arguments)
