"""Swarm: no violation over many seeds, deterministic results, and coverage."""

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

STORED_SEEDS = Path(__file__).parent / "kept_seeds.txt"
FIRST = 100  # seeds of every test run; make test-all runs the later seeds too
SEEDS = 500
PARTS = 10


def describe(result: SeedResult) -> str:
    return f"seed {result.seed}: {result.checker}: {result.message}"


def run_clean(seed: int) -> SeedResult:
    """Return the result of a seed without violations, and without quarantines of correct learners."""
    result = run_seed(seed)
    assert result.checker is None, describe(result)
    if all(fault.kind != "poison" for fault in draw_scenario(seed).faults):
        quarantined = {
            "report-implausible",
            "contribution-implausible",
            "contribution-invalid",
            "lease-request-implausible",
        } & set(result.reason_counts)
        assert not quarantined, f"seed {seed}: correct learners were refused: {quarantined}"
    return result


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_seeds_have_no_violation(part: int) -> None:
    for seed in range(FIRST + part, SEEDS, PARTS):
        run_clean(seed)


@pytest.mark.parametrize("seed", read_seeds(STORED_SEEDS))
def test_seed_of_fixed_bug_has_no_violation(seed: int) -> None:
    result = run_seed(seed)
    assert result.checker is None, describe(result)


def test_scenarios_cover_parameter_ranges() -> None:
    plans = [draw_scenario(seed) for seed in range(2000)]
    assert {len(plan.start_times_s) for plan in plans} == set(range(1, 17))
    spread = max(max(p.step_times_s.values()) / min(p.step_times_s.values()) for p in plans)
    assert 15 < spread <= 20
    assert {p.config.adopt for p in plans} == {"carry", "overwrite", "blend"}
    assert any(p.config.quorum == len(p.start_times_s) > 1 for p in plans)
    assert 0.5 < sum(p.config.lease_samples > 0 for p in plans) / len(plans) < 0.75


def test_first_seeds_cover_transitions_reasons_and_faults() -> None:
    coverage = Coverage()
    for seed in range(FIRST):
        coverage.add(run_clean(seed))
    counts = coverage.counts()
    assert counts["faults"][0] == counts["faults"][1], coverage.missing_faults()
    assert counts["moves"][0] >= 0.8 * counts["moves"][1], coverage.missing_transitions()
    assert counts["reasons"][0] >= 0.8 * counts["reasons"][1], coverage.missing_reasons()


def compute_digest(seed: int) -> str:
    return run_seed(seed, digest=True).digest


def test_digest_is_deterministic() -> None:
    for seed in (0, 7, 42, 133):
        assert compute_digest(seed) == compute_digest(seed)
    assert compute_digest(0) != compute_digest(1)


def test_digest_does_not_depend_on_hash_seed() -> None:
    program = "from atoll.sim.swarm import run_seed; print([run_seed(s, digest=True).digest for s in (0, 7, 42, 133)])"
    outputs = []
    for hash_seed in ("0", "1", "12345"):
        process = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        outputs.append(process.stdout)
    assert len(set(outputs)) == 1, outputs
    assert outputs[0].strip() == str([compute_digest(s) for s in (0, 7, 42, 133)])


@pytest.mark.long
def test_parallel_results_match_serial_results() -> None:
    alone = list(run_seeds(range(40), processes=1, small=True))
    shared = list(run_seeds(range(40), processes=2, small=True))
    assert alone == shared


def test_seeds_are_read_in_batches() -> None:
    requested: list[int] = []

    def numbers() -> Iterator[int]:
        for seed in count():
            requested.append(seed)
            yield seed

    results = run_seeds(numbers(), processes=2, small=True)
    assert [next(results).seed for _ in range(3)] == [0, 1, 2]
    results.close()  # type: ignore[attr-defined]
    assert len(requested) <= 2 * SEEDS_PER_BATCH
