"""Policies of the cores, which are pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.policy import (
    Estimate,
    backoff_s,
    budget_progress,
    budget_reason,
    compute_grace_window,
    lower_median,
    max_rounds_in_flight,
    retry_timeout,
)
from atoll.core.reasons import because
from atoll.core.types import Limits, RunConfig, contribution_weight, is_positive

seconds = st.floats(0, 1e6, allow_nan=False)
samples = st.lists(seconds, max_size=30)


def measured(*values: float) -> Estimate:
    estimate = Estimate()
    for value in values:
        estimate.add(value)
    return estimate


# --------------------------------------------------------------------------------------------------------------------
# Moving averages


def test_first_sample_sets_the_mean_and_half_of_it_the_deviation():
    estimate = measured(4.0)
    assert (estimate.count, estimate.mean, estimate.deviation, estimate.high()) == (1, 4.0, 2.0, 12.0)


def test_later_samples_move_the_mean_by_an_eighth_and_the_deviation_by_a_quarter():
    estimate = measured(4.0, 12.0)
    assert (estimate.mean, estimate.deviation) == (5.0, 3.5)


@given(st.lists(seconds, min_size=1, max_size=50))
def test_mean_stays_between_the_samples(values):
    estimate = measured(*values)
    assert min(values) - 1e-6 <= estimate.mean <= max(values) + 1e-6
    assert estimate.deviation >= 0
    assert estimate.high() >= estimate.mean


@given(seconds, st.integers(100, 200))
def test_estimate_converges_to_a_constant(value, count):
    estimate = measured(*[value] * count)
    assert estimate.mean == pytest.approx(value)
    assert estimate.high() == pytest.approx(value, rel=1e-6, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------------
# Timeouts


@given(samples, st.floats(0.1, 100))
def test_retry_timeout_is_within_the_limits(values, factor):
    limits = Limits(initial_wait_s=5.0, min_wait_s=0.5, max_wait_s=50.0)
    wait = retry_timeout(measured(*values), factor, limits)
    assert 0.5 <= wait <= 50.0
    if not values:
        assert wait == 5.0


@given(st.integers(0, 10**6), st.integers(-(10**6), 10**6))
def test_backoff_is_between_its_bounds_with_25_percent_jitter(attempts, spread):
    limits = Limits()
    wait = backoff_s(attempts, spread, limits)
    assert limits.initial_backoff_s <= wait < limits.max_backoff_s * 1.25


@given(st.integers(0, 40), st.integers(0, 1000))
def test_backoff_doubles_until_it_is_capped(attempts, spread):
    limits = Limits()
    base = min(0.5 * 2**attempts, 30.0)
    assert base <= backoff_s(attempts, spread, limits) < base * 1.25


def test_backoff_differs_by_learner():
    waits = {backoff_s(3, learner, Limits()) for learner in range(1, 33)}
    assert len(waits) == 32


# --------------------------------------------------------------------------------------------------------------------
# Grace


def test_eq_3_worked_out_by_hand():
    """slack = 3 * 2.0 - (1.0 + 2.0) = 3.0; grace = min(0.5 * 3.0, 2.0) = 1.5."""
    config = RunConfig(overlap_steps=3, grace_margin=0.5)
    grace = compute_grace_window(config, 1, 2.0, 0.0, [], measured(1.0), measured(2.0))
    assert grace.window_s == 1.5
    assert str(grace.reason) == "quorum 1 of 1; waiting 1.5 s more, slack 3 s"


@pytest.mark.parametrize(("awaited_s", "window_s"), [(0.0, 2.0), (1.5, 2.0), (4.0, 4.0), (1e9, 9.0)])
def test_grace_is_capped_by_the_longest_awaited_step_and_by_the_slack(awaited_s, window_s):
    grace = compute_grace_window(RunConfig(overlap_steps=10), 1, 2.0, awaited_s, [], measured(1.0), measured(1.0))
    assert grace.window_s == window_s


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_grace_is_zero_until_all_three_averages_are_known(missing):
    step_s = 0.0 if missing == 0 else 1.0
    quorum, sync = (Estimate() if missing == place else measured(0.1) for place in (1, 2))
    grace = compute_grace_window(RunConfig(overlap_steps=10), 3, step_s, 0.0, [], quorum, sync)
    assert grace == (0.0, because("grace-unmeasured", 3), 0.0)


@given(
    st.integers(1, 20),
    st.floats(0, 0.999),
    seconds,
    seconds,
    st.lists(seconds, max_size=3),
    st.lists(seconds, min_size=1, max_size=5),
    st.lists(seconds, min_size=1, max_size=5),
)
def test_grace_is_never_negative_and_never_exceeds_its_bound(tau, gamma, step_s, awaited_s, missed, quorums, syncs):
    config = RunConfig(overlap_steps=tau, grace_margin=gamma)
    quorum, sync = measured(*quorums), measured(*syncs)
    window, _, late_s = compute_grace_window(config, 1, step_s, awaited_s, missed, quorum, sync)
    lasts_s = quorum.mean + sync.mean
    slack, due_slack = tau * step_s - lasts_s, config.every_steps * step_s - lasts_s
    bound = min(
        gamma * max(slack if slack >= step_s or lasts_s <= step_s else max(slack, due_slack), 0.0),
        max(step_s, awaited_s),
    )
    if late_s:
        assert late_s in missed
        assert window >= late_s > bound
        bound = min(gamma * due_slack, 2 * late_s)
    assert 0 <= window <= min(bound, config.limits.max_wait_s) * (1 + 1e-12)


def test_round_longer_than_tau_steps_may_last_until_its_fragment_is_due():
    """slack = 24 * 1.0 - 5.0 = 19.0; grace = min(0.5 * 19.0, 1.0) = 1.0. Eq. 3 would merge one contribution."""
    config = RunConfig(every_steps=24, overlap_steps=2)
    assert compute_grace_window(config, 1, 1.0, 0.0, [], measured(3.0), measured(2.0)).window_s == 1.0
    assert compute_grace_window(config, 1, 1.0, 0.0, [], measured(20.0), measured(3.2)).window_s == pytest.approx(0.4)
    assert compute_grace_window(config, 1, 1.0, 0.0, [], measured(20.0), measured(4.0)).reason.code == "grace-no-slack"


@pytest.mark.parametrize(
    ("missed", "window_s", "code"),
    [
        ([], 0.75, "grace-waiting"),
        ([0.5], 0.75, "grace-waiting"),  # its contribution arrives within the usual window
        ([4.0], 8.0, "grace-extended"),
        ([4.0, 5.0], 10.0, "grace-extended"),
        ([4.0, 11.0], 11.75, "grace-extended"),  # 0.5 * (24 - 0.5) = 11.75
        ([4.0, 12.0], 8.0, "grace-extended"),  # the second learner takes too long
        ([12.0], 0.75, "grace-waiting"),
        ([-1.0], 0.75, "grace-waiting"),  # its contribution is overdue
    ],
)
def test_grace_waits_for_learners_that_missed_the_last_merge_until_the_fragment_is_due(missed, window_s, code):
    config = RunConfig(every_steps=24, overlap_steps=2)
    grace = compute_grace_window(config, 1, 1.0, 0.0, missed, measured(0.25), measured(0.25))
    assert (grace.window_s, grace.reason.code) == (window_s, code)


def test_lower_median_is_not_moved_by_a_minority():
    assert lower_median([]) == 0.0
    assert lower_median([1.0, 1.1, 1.2, 1e8]) == 1.1
    assert lower_median([2.0]) == 2.0


# --------------------------------------------------------------------------------------------------------------------
# Rounds in flight


def test_tau_rounds_are_in_flight_without_measurements():
    assert max_rounds_in_flight(RunConfig(overlap_steps=3), 0.0, Estimate(), Estimate()) == 3


def test_more_rounds_are_in_flight_if_a_round_takes_longer_than_tau_steps():
    """A round lasts (4 + 5) / 1 + 1 = 10 steps; 24 fragments in 24 steps open one round per step: ten are open."""
    assert max_rounds_in_flight(RunConfig(overlap_steps=2), 1.0, measured(4.0), measured(5.0)) == 10


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 40)),
    samples,
    samples,
)
def test_limit_is_at_least_1_and_at_most_the_number_of_fragments(fragments, every, tau, limit_setting, steps, others):
    config = RunConfig(fragments=fragments, every_steps=every, overlap_steps=tau, rounds_in_flight=limit_setting)
    limit = max_rounds_in_flight(config, measured(*steps).mean, measured(*others), measured(*others))
    assert 1 <= limit <= fragments
    if limit_setting is not None:
        assert limit == min(limit_setting, fragments)
    else:
        assert limit >= min(tau, fragments)


# --------------------------------------------------------------------------------------------------------------------
# Budget


@given(
    st.one_of(st.none(), st.integers(1, 1000)),
    st.one_of(st.none(), st.integers(1, 10**6)),
    st.integers(0, 2000),
    st.integers(0, 2 * 10**6),
)
def test_budget_is_reached_exactly_when_all_of_it_is_used(budget_merges, budget_tokens, merges, trained):
    config = RunConfig(budget_merges=budget_merges, budget_tokens=budget_tokens)
    progress = budget_progress(config, merges, trained)
    assert 0 <= progress <= 1
    assert (budget_reason(config, merges, trained) is not None) == (progress == 1.0)


def test_run_without_a_budget_has_no_end():
    assert budget_progress(RunConfig(), 10**9, 10**15) == 0.0
    assert budget_reason(RunConfig(), 10**9, 10**15) is None


# --------------------------------------------------------------------------------------------------------------------
# Weight


@given(st.integers(1, 10**12), st.integers(1, 10**9))
def test_contribution_weight_is_finite_and_positive(tokens, steps):
    weight = contribution_weight(tokens, steps)
    assert is_positive(weight)
    assert weight == pytest.approx(tokens * (tokens / steps))


@given(st.integers(1, 10**6), st.integers(1, 10**3), st.integers(2, 10))
def test_twice_the_tokens_in_twice_the_steps_weigh_twice(tokens, steps, times):
    assert contribution_weight(times * tokens, times * steps) == pytest.approx(
        times * contribution_weight(tokens, steps)
    )


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_is_positive(weight):
    assert not is_positive(weight)
