"""Many worlds, one seed each, on all cores; what they found and what they never reached."""

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
"""Seeds that are given to the processes at a time."""


class SeedResult(NamedTuple):
    """One world's outcome, small enough to travel between processes."""

    seed: int
    events: int
    merges: int
    checker: str | None  # the checker that failed, None if none did
    message: str
    subject: tuple[str, int] | None
    transition_counts: dict[tuple[str, str], int]
    reason_counts: dict[str, int]
    fault_counts: dict[str, int]
    state_event_counts: dict[tuple[str, str], int]
    digest: str = ""  # of everything that happened, where it was asked for


def run_seed(
    seed: int,
    small: bool = False,
    syncer: SyncerFactory = SyncerCore,
    learner: LearnerFactory = LearnerCore,
    on_entry: Callable[[Entry], None] | None = None,
    digest: bool = False,
) -> SeedResult:
    """One world. `digest` is of every entry, in order: two runs of one seed must agree to the last bit."""
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
    fired, said = world.coverage()
    sha.update(repr((checker, world.engine.events)).encode())
    return SeedResult(
        seed,
        world.engine.events,
        sum(r.version for r in world.disk.versions.values()),
        checker,
        sentence,
        subject,
        {(_state_name(state), trigger): n for (state, trigger), n in fired.items()},
        dict(said),
        dict(world.fault_counts),
        {(_state_name(state), event.__name__): n for (state, event), n in world.state_event_counts.items()},
        sha.hexdigest()[:16] if digest else "",
    )


def _state_name(state: object) -> str:
    return f"{type(state).__name__.lower()} {state.value}"  # type: ignore[attr-defined]


def record_seed(seed: int, small: bool = False) -> tuple[SeedResult, list[Entry]]:
    """Run a seed again and keep everything that happened."""
    entries: list[Entry] = []
    return run_seed(seed, small, on_entry=entries.append), entries


@dataclass
class Coverage:
    """Which rows of the transition tables, which sentences and which faults the swarm has met."""

    transition_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reason_counts: Counter[str] = field(default_factory=Counter)
    fault_counts: Counter[str] = field(default_factory=Counter)
    state_event_counts: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # of a state and the event that met it

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
    """Results in the order of the seeds, whichever process is faster."""
    run_one = partial(run_seed, small=small, digest=digest)
    if processes <= 1:
        yield from map(run_one, seeds)
        return
    numbers = iter(seeds)
    with process_pool(processes) as pool:
        # An executor submits all that it is given before it yields anything, so it is given a slice at a time; the
        # next slice is submitted before the results of this one are taken, and no process waits for another.
        ahead = _submit_batch(pool, run_one, numbers)
        while ahead is not None:
            results, ahead = ahead, _submit_batch(pool, run_one, numbers)
            yield from results


def _submit_batch(
    pool: ProcessPoolExecutor, run_one: Callable[[int], SeedResult], numbers: Iterator[int]
) -> Iterator[SeedResult] | None:
    piece = list(islice(numbers, SEEDS_PER_BATCH))
    return pool.map(run_one, piece, chunksize=8) if piece else None


@contextmanager
def process_pool(
    processes: int, initializer: Callable[..., None] | None = None, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes have called `first(*given)`, which is inherited and need not be picklable.

    Whoever leaves early, by Ctrl-C or an error, does not wait for what is still being computed.
    """
    context = multiprocessing.get_context("fork")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_initialize_worker, initargs=(initializer, given)
    )
    try:
        with warnings.catch_warnings():
            # They compute and touch no lock that a thread of ours may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The first task forks. An interrupt that came in the middle of a fork would be lost in its hooks: it waits.
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
    """The first task."""


def _initialize_worker(first: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent answers it and ends us
    pthread_sigmask(SIG_UNBLOCK, {SIGINT})  # as it was before the fork
    if first is not None:
        first(*given)
