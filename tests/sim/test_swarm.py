"""The swarm itself: clean over many seeds, the same twice, and complete in what it meets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from atoll.cli.swarm import read_seeds
from atoll.sim.scenarios import draw_scenario
from atoll.sim.swarm import SEEDS_PER_BATCH, Coverage, SeedResult, run_seed, run_seeds

KEPT = Path(__file__).parent / "kept_seeds.txt"
FIRST = 100  # of the seeds, for every run of the tests; those after them are for make test-all
SEEDS = 500
PIECES = 10


def found(result: SeedResult) -> str:
    return f"seed {result.seed}: {result.checker}: {result.message}"


def run_clean(seed: int) -> SeedResult:
    """Return the result of a seed that breaks no invariant, and in which no learner is struck that told the truth."""
    result = run_seed(seed)
    assert result.checker is None, found(result)
    if all(fault.kind != "poison" for fault in draw_scenario(seed).faults):
        struck = {
            "report-implausible",
            "contribution-implausible",
            "contribution-invalid",
            "lease-request-implausible",
        } & set(result.reason_counts)
        assert not struck, f"seed {seed}: nobody lies there, and somebody is struck: {struck}"
    return result


@pytest.mark.long
@pytest.mark.parametrize("piece", range(PIECES))
def test_no_invariant_is_broken(piece: int) -> None:
    for seed in range(FIRST + piece, SEEDS, PIECES):
        run_clean(seed)


@pytest.mark.parametrize("seed", read_seeds(KEPT))
def test_what_was_once_found_stays_mended(seed: int) -> None:
    result = run_seed(seed)
    assert result.checker is None, found(result)


def test_worlds_are_drawn_as_widely_as_promised() -> None:
    plans = [draw_scenario(seed) for seed in range(2000)]
    assert {len(plan.start_times_s) for plan in plans} == set(range(1, 17))
    spread = max(max(p.step_times_s.values()) / min(p.step_times_s.values()) for p in plans)
    assert 15 < spread <= 20
    assert {p.config.adopt for p in plans} == {"carry", "overwrite", "blend"}
    assert any(p.config.quorum == len(p.start_times_s) > 1 for p in plans)
    assert 0.5 < sum(p.config.lease_samples > 0 for p in plans) / len(plans) < 0.75


def test_one_hundred_seeds_break_nothing_and_meet_nearly_every_move_and_every_fault() -> None:
    coverage = Coverage()
    for seed in range(FIRST):
        coverage.add(run_clean(seed))
    counts = coverage.counts()
    assert counts["faults"][0] == counts["faults"][1], coverage.missing_faults()
    assert counts["moves"][0] >= 0.8 * counts["moves"][1], coverage.missing_transitions()
    assert counts["reasons"][0] >= 0.8 * counts["reasons"][1], coverage.missing_reasons()


def digest_of(seed: int) -> str:
    return run_seed(seed, digest=True).digest


def test_a_seed_gives_the_same_digest_twice_in_one_process() -> None:
    for seed in (0, 7, 42, 133):
        assert digest_of(seed) == digest_of(seed)
    assert digest_of(0) != digest_of(1)


def test_a_seed_gives_the_same_digest_in_another_process_under_another_hash_seed() -> None:
    program = "from atoll.sim.swarm import run_seed; print([run_seed(s, digest=True).digest for s in (0, 7, 42, 133)])"
    answers = []
    for hash_seed in ("0", "1", "12345"):
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        answers.append(answer.stdout)
    assert len(set(answers)) == 1, answers
    assert answers[0].strip() == str([digest_of(s) for s in (0, 7, 42, 133)])


@pytest.mark.long
def test_two_processes_find_what_one_finds() -> None:
    alone = list(run_seeds(range(40), processes=1, small=True))
    shared = list(run_seeds(range(40), processes=2, small=True))
    assert alone == shared


def test_an_endless_supply_of_seeds_is_taken_a_slice_at_a_time() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for seed in count():
            taken.append(seed)
            yield seed

    results = run_seeds(numbers(), processes=2, small=True)
    assert [next(results).seed for _ in range(3)] == [0, 1, 2]
    results.close()  # type: ignore[attr-defined]
    assert len(taken) <= 2 * SEEDS_PER_BATCH
