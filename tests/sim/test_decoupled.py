"""Protocol cores on a simulated fleet: agreement with the fleet model, and checkers without violations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.sim.checkers import CheckerDispatcher, InvariantViolationError, create_checkers
from atoll.sim.decoupled import DecoupledConfig, DecoupledRun, choose_detail, coarsen, events_per_step
from atoll.sim.fleet import ExtraLearners, FleetConfig, RepairDelay
from atoll.sim.goodput import BarrierConfig, estimate_over_seeds, simulate

HOUR = 1.0 / 24.0
SMALL = DecoupledConfig(fragments=4, every_steps=4)
FREQUENT_FAILURES = FleetConfig(mtbi_s=0.2 * 86_400.0)  # islands of one slice that often fail


def checked_run(fleet, protocol, learners, chips, days, seed=0, **options):
    """Return a run with all checkers, and their dispatcher."""
    watch = CheckerDispatcher(create_checkers(protocol.run_config()))
    run = DecoupledRun(
        fleet,
        protocol,
        learners,
        chips,
        days,
        seed,
        on_entry=watch.observe,
        on_start=watch.on_process_started,
        **options,
    )
    return run, watch


@pytest.mark.parametrize(
    ("learners", "chips", "hours", "protocol"),
    [
        (8, 1_200_000, 3.0, coarsen(DecoupledConfig())),
        (8, 1_200_000, 0.5, DecoupledConfig()),
        (4, 150_000, 3.0, coarsen(DecoupledConfig())),
        (16, 2_400_000, 1.0, coarsen(DecoupledConfig())),
        (2, 300_000, 1.0, coarsen(DecoupledConfig(jitter=0.1))),
    ],
)
def test_cores_match_fleet_goodput(learners, chips, hours, protocol):
    fleet = FleetConfig()
    by_cores = DecoupledRun(fleet, protocol, learners, chips, hours * HOUR, 7).run()
    by_fleet = simulate(fleet, "decoupled", learners, chips, hours * HOUR, 7)
    assert by_cores.goodput == pytest.approx(by_fleet.goodput, abs=0.002)
    assert by_cores.uptime == pytest.approx(by_fleet.uptime, abs=0.002)
    assert by_cores.failures == by_fleet.failures > 0


def test_cores_match_fleet_with_slow_chips_and_slow_downs():
    fleet = FleetConfig(slowdowns_per_hour=30.0, slowdown_factor=0.3, slowdown_mean_s=40.0, chip_time_sigma=0.05)
    speeds = (1.0, 1.0, 0.7, 0.7)
    by_cores = DecoupledRun(fleet, coarsen(DecoupledConfig()), 4, 400_000, HOUR, 3, speeds=speeds).run()
    by_fleet = simulate(fleet, "decoupled", 4, 400_000, HOUR, 3, speeds=speeds)
    assert by_cores.goodput == pytest.approx(by_fleet.goodput, abs=0.002)
    assert by_cores.throughput == pytest.approx(by_fleet.throughput, rel=0.005)
    assert by_cores.throughput < 0.7 * by_cores.goodput


@pytest.mark.long
def test_coarse_simulation_matches_full_simulation():
    fleet, full = FleetConfig(), DecoupledConfig()
    slow = DecoupledRun(fleet, full, 8, 1_200_000, HOUR, 0).run()
    fast = DecoupledRun(fleet, coarsen(full), 8, 1_200_000, 4 * HOUR, 0).run()
    assert fast.contributions_per_merge == pytest.approx(slow.contributions_per_merge, rel=0.1)
    assert fast.effective_h == pytest.approx(slow.effective_h, rel=0.03)
    assert fast.staleness_steps == pytest.approx(slow.staleness_steps, rel=0.1)
    assert fast.events < slow.events / 1.5


def test_sampled_fragment_has_same_effective_h():
    """With one fragment a learner sends little in a pause, so it is suspected; its old steps must not count again."""
    alone, together = (
        DecoupledRun(
            FleetConfig(), replace(DecoupledConfig(jitter=0.1), sampled_fragments=count), 8, 1_200_000, 0.5 * HOUR, 0
        ).run()
        for count in (1, 8)
    )
    assert alone.suspected > 20
    assert alone.effective_h == pytest.approx(together.effective_h, rel=0.02)


def test_run_is_deterministic_with_and_without_progress():
    def run(seed, on_progress=None):
        return DecoupledRun(FleetConfig(), coarsen(DecoupledConfig(jitter=0.05)), 4, 600_000, 0.01, seed).run(
            on_progress
        )

    shares: list[float] = []
    assert run(1) == run(1, shares.append)
    assert run(1) != run(2)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_ledger_balances_with_extra_learners():
    extras = [ExtraLearners(2, ((100.0, 400.0), (500.0, 600.0)), speed=0.5)]
    run, watch = checked_run(FleetConfig(), SMALL, 3, 300_000, 900.0 / 86_400.0, extras=extras)
    result = run.run()
    accounted = result.tokens_merged + result.tokens_pending + result.tokens_dropped
    assert result.tokens_trained == pytest.approx(accounted)
    assert result.tokens_dropped > 0
    assert [cause for cause, _ in result.dropped_by_reason] == ["left"]
    assert list(run.driver.incarnations.values()) == [1, 1, 1, 2, 2]
    assert run.finish()
    watch.finish()


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_overwritten_tokens_are_dropped_with_reason(adopt):
    result = DecoupledRun(FleetConfig(), replace(SMALL, adopt=adopt), 4, 400_000, 0.01, 0).run()
    assert 0 < dict(result.dropped_by_reason)["overwritten-on-adopt"] < result.tokens_trained
    assert result.tokens_trained == pytest.approx(
        result.tokens_merged + result.tokens_pending + result.tokens_dropped, abs=1.0
    )


@pytest.mark.parametrize(
    ("fleet", "protocol"),
    [
        (FleetConfig(), DecoupledConfig()),
        (FleetConfig(), replace(coarsen(DecoupledConfig()), quorum=3)),
        (FleetConfig(slowdowns_per_hour=60.0), DecoupledConfig(jitter=0.2, grace_margin=0.0, delay_s=0.4)),
        (FREQUENT_FAILURES, SMALL),
    ],
)
def test_checkers_find_no_violation_in_simulated_run(fleet, protocol):
    chips = 4 * 1024 if fleet is FREQUENT_FAILURES else 800_000
    run, watch = checked_run(fleet, protocol, 4, chips, 0.01)
    result = run.run()
    assert result.merges > 0
    assert result.failures > 0
    assert run.finish()
    watch.finish()
    run.syncer.check_invariants()


def test_learner_resumes_after_timeout():
    fleet = replace(FREQUENT_FAILURES, repair=RepairDelay.with_mean(600.0))
    run, _ = checked_run(fleet, SMALL, 4, 4 * 1024, 0.2)
    run.run()
    assert run.syncer.state.reason_counts["member-timed-out"] > 0
    assert run.syncer.state.reason_counts["member-resumed"] > 0
    assert set(run.driver.incarnations.values()) == {1}


def test_lockstep_violates_independence():
    protocol = DecoupledConfig(quorum=4, grace_margin=0.0, lockstep=True)
    run, _ = checked_run(FleetConfig(mtbi_s=math.inf), protocol, 4, 4, 0.01, speeds=(1.0, 1.0, 1.0, 0.5))
    with pytest.raises(InvariantViolationError, match="independence"):
        run.run()


@pytest.mark.long
def test_lockstep_goodput_matches_streaming():
    """Two independent models of waiting, cores in lockstep and barriers, agree."""
    fleet, protocol = FleetConfig(), DecoupledConfig(quorum=8, grace_margin=0.0, lockstep=True)
    for chips in (150_000, 1_200_000):
        waiting = DecoupledRun(fleet, protocol, 8, chips, HOUR, 0).run()
        gated = simulate(fleet, "streaming", 8, chips, HOUR, 0, barrier=BarrierConfig())
        assert waiting.goodput == pytest.approx(gated.goodput, abs=0.02)
        assert waiting.contributions_per_merge == pytest.approx(8.0)


def test_invalid_run_raises_with_remedy():
    with pytest.raises(ValueError, match="give at most 4"):
        DecoupledRun(FleetConfig(), DecoupledConfig(quorum=5), 4, 4, 1.0, 0)
    with pytest.raises(ValueError, match="1024 learners at most"):
        DecoupledRun(FleetConfig(), DecoupledConfig(), 1_025, 1_025, 1.0, 0)
    with pytest.raises(ValueError, match="above 0"):
        DecoupledRun(FleetConfig(), DecoupledConfig(), 4, 4, 0.0, 0)
    with pytest.raises(ValueError, match="every step is different"):
        DecoupledConfig(jitter=0.1, steps_per_event=2)


# --------------------------------------------------------------------------------------------------------------------
# Level of detail


def test_detail_is_full_only_for_short_run():
    short = choose_detail(DecoupledConfig(), 0.02, 4.0)
    assert (short.is_full, short.covers_run) == (True, True)
    assert "every fragment and every step" in short.description()
    long = choose_detail(DecoupledConfig(), 30.0, 8.0)
    assert (long.is_full, long.covers_run) == (False, False)
    assert "1 of 24 fragments" in long.description()
    assert long.hours == math.floor(long.hours) < 72.0
    middle = choose_detail(DecoupledConfig(), 0.5, 8.0)
    assert (middle.is_full, middle.covers_run) == (False, True)


def test_options_override_detail():
    forced = choose_detail(DecoupledConfig(), 30.0, 8.0, full=True)
    assert (forced.is_full, forced.covers_run, forced.hours) == (True, True, 720.0)
    limited = choose_detail(DecoupledConfig(), 30.0, 8.0, hours=100.0)
    assert (limited.is_full, limited.covers_run, limited.hours) == (False, False, 100.0)
    with pytest.raises(ValueError, match="above 0"):
        choose_detail(DecoupledConfig(), 30.0, 8.0, hours=0.0)


@pytest.mark.parametrize(
    "protocol", [DecoupledConfig(), coarsen(DecoupledConfig()), coarsen(DecoupledConfig(jitter=0.1))]
)
def test_events_per_step_predicts_event_count(protocol):
    result = DecoupledRun(FleetConfig(), protocol, 8, 150_000, 0.25 * HOUR, 0).run()
    assert result.events == pytest.approx(result.steps * events_per_step(protocol), rel=0.35)


def test_lockstep_simulates_all_fragments():
    detail = choose_detail(DecoupledConfig(lockstep=True), 30.0, 8.0)
    assert detail.is_full
    assert detail.protocol.run_config().owned_fragments is None


# --------------------------------------------------------------------------------------------------------------------
# Estimates over seeds


def test_interval_respects_bounds():
    figure = estimate_over_seeds([0.999, 1.0, 1.0], lower=0.0, upper=1.0)
    assert figure.low is not None
    assert figure.high == 1.0
    assert figure.low < figure.mean < figure.high
    assert figure.scaled(100.0).high == 100.0


def test_single_seed_has_no_interval():
    assert estimate_over_seeds([0.5]).interval() is None
    assert estimate_over_seeds([0.5]).scaled(2.0).mean == 1.0
