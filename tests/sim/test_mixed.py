"""Published comparison on mixed hardware: goodput and contributions per merge of each row."""

from __future__ import annotations

import pytest

from atoll.sim.decoupled import DecoupledConfig
from atoll.sim.mixed_hardware import LEARNER_SPEEDS, MIXED_ROWS, run_mixed


@pytest.fixture(scope="module")
def results():
    return {(row.quorum, row.grace): run_mixed(row, DecoupledConfig(), hours=0.4, seed=0) for row in MIXED_ROWS}


def test_rows_match_published_table():
    assert [(row.label, row.published_percent) for row in MIXED_ROWS] == [
        ("K = 8, grace off", 84.0),
        ("K = 1, grace off", 100.0),
        ("K = 1, grace on", 100.0),
    ]
    assert LEARNER_SPEEDS == (1.0,) * 4 + (0.82,) * 4


@pytest.mark.long
def test_lockstep_loses_published_goodput(results):
    waiting = results[(8, False)]
    assert 0.81 < waiting.goodput_fast < 0.86
    assert 0.96 < waiting.goodput_slow <= 1.0
    assert waiting.goodput == pytest.approx((waiting.goodput_fast + waiting.goodput_slow) / 2)


def test_decoupled_learners_lose_no_goodput(results):
    for row in ((1, False), (1, True)):
        assert results[row].goodput > 0.995
        assert results[row].goodput_fast > 0.995


def test_grace_increases_contributions_per_merge(results):
    assert results[(8, False)].contributions_per_merge == pytest.approx(8.0)
    assert results[(1, False)].contributions_per_merge == pytest.approx(1.0)
    assert 5.5 < results[(1, True)].contributions_per_merge < 8.0


def test_fast_generation_determines_effective_h(results):
    """A learner of mean speed takes 0.91 * 24 steps between two merges; in lockstep it takes slightly more than H."""
    assert 20.5 < results[(1, False)].effective_h < 22.5
    assert 24.0 < results[(8, False)].effective_h < 26.5
    assert results[(1, False)].staleness_steps == pytest.approx(1.0, abs=0.1)
    assert 1.0 <= results[(1, True)].staleness_steps < 2.0
