"""Many worlds, one seed each, on all cores; what they found and what they never reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from atoll.core.learner import LearnerCore
from atoll.core.reasons import REASONS
from atoll.core.syncer import SyncerCore
from atoll.core.tables import TABLES
from atoll.core.tape import Entry
from atoll.sim.checkers import Violation
from atoll.sim.draws import FAULTS, draw
from atoll.sim.forks import forks
from atoll.sim.world import World


class SeedResult(NamedTuple):
    """One world's outcome, small enough to travel between processes."""

    seed: int
    events: int
    virtual_s: float
    merges: int
    checker: str | None  # the checker that failed, None if none did
    sentence: str
    subject: tuple[str, int] | None
    fired: dict[tuple[str, str], int]
    said: dict[str, int]
    faults: dict[str, int]
    pairs: dict[tuple[str, str], int]


def run_seed(
    seed: int,
    small: bool = False,
    syncer: type[SyncerCore] = SyncerCore,
    learner: type[LearnerCore] = LearnerCore,
    on_entry: Callable[[Entry], None] | None = None,
) -> SeedResult:
    world = World(draw(seed, small), syncer, learner, on_entry)
    checker, sentence, subject = None, "", None
    try:
        world.run()
    except Violation as violation:
        checker, sentence, subject = violation.checker, violation.sentence, violation.subject
    fired, said = world.coverage()
    return SeedResult(
        seed,
        world.engine.events,
        world.engine.now,
        sum(r.version for r in world.disk.versions.values()),
        checker,
        sentence,
        subject,
        {(_place(state), trigger): n for (state, trigger), n in fired.items()},
        dict(said),
        dict(world.faults_fired),
        {(_place(state), event.__name__): n for (state, event), n in world.pairs.items()},
    )


def _place(state: object) -> str:
    return f"{type(state).__name__.lower()} {state.value}"  # type: ignore[attr-defined]


def digest_of(seed: int, small: bool = False) -> str:
    """Of every entry of a world, in order: two runs of one seed must agree to the last bit."""
    sha = sha256()

    def add(entry: Entry) -> None:
        sha.update(repr(entry).encode())

    result = run_seed(seed, small, on_entry=add)
    sha.update(repr((result.checker, result.events)).encode())
    return sha.hexdigest()[:16]


def story_entries(seed: int, small: bool = False) -> tuple[SeedResult, list[Entry]]:
    """Run a seed again and keep everything that happened."""
    entries: list[Entry] = []
    return run_seed(seed, small, on_entry=entries.append), entries


@dataclass
class Coverage:
    """Which rows of the transition tables, which sentences and which faults the swarm has met."""

    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)  # of a state and the event that met it

    def add(self, result: SeedResult) -> None:
        self.fired.update(result.fired)
        self.said.update(result.said)
        self.faults.update(result.faults)
        self.pairs.update(result.pairs)

    def missing_moves(self) -> list[str]:
        every = {(_place(state), trigger) for table in TABLES.values() for state, trigger in table}
        return sorted(f"{state}, {trigger}" for state, trigger in every - set(self.fired))

    def missing_reasons(self) -> list[str]:
        return sorted(set(REASONS) - set(self.said))

    def missing_faults(self) -> list[str]:
        return sorted(set(FAULTS) - set(self.faults))

    def counts(self) -> dict[str, tuple[int, int]]:
        moves = sum(len(table) for table in TABLES.values())
        return {
            "moves": (moves - len(self.missing_moves()), moves),
            "reasons": (len(REASONS) - len(self.missing_reasons()), len(REASONS)),
            "faults": (len(FAULTS) - len(self.missing_faults()), len(FAULTS)),
        }


def _run_one(task: tuple[int, bool]) -> SeedResult:
    seed, small = task
    return run_seed(seed, small)


def sweep(seeds: Iterable[int], processes: int, small: bool = False) -> Iterator[SeedResult]:
    """Results in the order of the seeds, whichever process is faster."""
    tasks = ((seed, small) for seed in seeds)
    if processes <= 1:
        yield from map(_run_one, tasks)
        return
    with forks(processes) as pool:
        yield from pool.map(_run_one, tasks, chunksize=8)
