"""Every planted bug is found by one of its checkers within 1,000 seeds."""

from __future__ import annotations

import pytest

from atoll.core.types import RunConfig
from atoll.sim.checkers import create_checkers
from atoll.sim.swarm import run_seed
from tests.sim.planted_bugs import PLANTED_BUGS, PlantedBug

MAX_SEEDS = 1000


@pytest.mark.parametrize("planted", PLANTED_BUGS, ids=[p.name for p in PLANTED_BUGS])
def test_checker_finds_planted_bug(planted: PlantedBug) -> None:
    others: dict[str, int] = {}
    for seed in range(planted.first_seed, planted.first_seed + MAX_SEEDS):
        result = run_seed(seed, syncer=planted.new_syncer, learner=planted.new_learner)
        if result.checker in planted.checkers:
            return
        if result.checker is not None:
            others.setdefault(result.checker, seed)
    pytest.fail(f"'{planted.name}' was not found by {planted.checkers} in {MAX_SEEDS} seeds; others found: {others}")


def test_every_checker_has_a_planted_bug() -> None:
    caught = {name for planted in PLANTED_BUGS for name in planted.checkers}
    names = {checker.name for checker in create_checkers(RunConfig())} | {"liveness"}
    assert names - caught == set()


def test_planted_bugs_have_unique_names() -> None:
    assert len(PLANTED_BUGS) >= 15
    assert len({planted.name for planted in PLANTED_BUGS}) == len(PLANTED_BUGS)
