"""The published comparison on mixed hardware: what waiting costs, and what each quorum merges."""

from __future__ import annotations

import pytest

from atoll.sim.decoupled import DecoupledConfig
from atoll.sim.mixed_hardware import LEARNER_SPEEDS, MIXED_ROWS, run_mixed


@pytest.fixture(scope="module")
def results():
    return {(row.quorum, row.grace): run_mixed(row, DecoupledConfig(), hours=0.4, seed=0) for row in MIXED_ROWS}


def test_the_rows_are_the_published_ones():
    assert [(row.label, row.published_percent) for row in MIXED_ROWS] == [
        ("K = 8, grace off", 84.0),
        ("K = 1, grace off", 100.0),
        ("K = 1, grace on", 100.0),
    ]
    assert LEARNER_SPEEDS == (1.0,) * 4 + (0.82,) * 4


@pytest.mark.long
def test_learners_that_wait_for_the_slow_generation_lose_what_was_published(results):
    waiting = results[(8, False)]
    assert 0.81 < waiting.goodput_fast < 0.86
    assert 0.96 < waiting.goodput_slow <= 1.0
    assert waiting.goodput == pytest.approx((waiting.goodput_fast + waiting.goodput_slow) / 2)


def test_learners_that_never_wait_lose_nothing(results):
    for row in ((1, False), (1, True)):
        assert results[row].goodput > 0.995
        assert results[row].goodput_fast > 0.995


def test_grace_brings_back_the_contributions_that_a_small_quorum_gives_away(results):
    assert results[(8, False)].contributions_per_merge == pytest.approx(8.0)
    assert results[(1, False)].contributions_per_merge == pytest.approx(1.0)
    assert 5.5 < results[(1, True)].contributions_per_merge < 8.0


def test_the_fast_generation_sets_the_pace_when_nobody_waits(results):
    """A learner of mean speed takes 0.91 * 24 steps between two merges, one that waits a little more than H."""
    assert 20.5 < results[(1, False)].effective_h < 22.5
    assert 24.0 < results[(8, False)].effective_h < 26.5
    assert results[(1, False)].staleness_steps == pytest.approx(1.0, abs=0.1)
    assert 1.0 <= results[(1, True)].staleness_steps < 2.0
