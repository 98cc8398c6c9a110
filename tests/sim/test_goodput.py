"""Goodput: closed forms, the published cells, and an independent computation."""

from __future__ import annotations

import doctest
import itertools
import math
import re
import tracemalloc
from dataclasses import replace

import pytest

from atoll.sim import goodput
from atoll.sim.fleet import YEAR_S, ExtraLearners, FleetConfig, SimIsland, build_islands
from atoll.sim.goodput import (
    BarrierConfig,
    TableCell,
    estimate_goodput,
    mean_ci,
    simulate,
)
from atoll.sim.published import PUBLISHED_CELLS, PUBLISHED_CHIPS, PUBLISHED_ROWS, published_percent
from benchmarks.fit_goodput import OutageRules, goodput_table, island_by_rules, render_table

CONFIG = FleetConfig()
CALM = replace(CONFIG, mtbi_s=math.inf)


@pytest.mark.parametrize("chips", [150_000, 600_000, 1_200_000, 2_400_000])
def test_rigid_job_matches_renewal_process(chips):
    """Uptime is 1 / (1 + rate * outage); goodput loses half a step per failure on top."""
    rate_per_s = chips / YEAR_S
    outage_s = CONFIG.repair.mean_s + CONFIG.restart_s
    runs = [simulate(CONFIG, "data-parallel", 1, chips, days=2e6 / chips, seed=seed) for seed in range(4)]
    up, low, high = mean_ci(run.uptime for run in runs)
    assert up == pytest.approx(1.0 / (1.0 + rate_per_s * outage_s), abs=0.02), (low, high)
    lost = rate_per_s * up * CONFIG.step_time_s / 2.0
    assert mean_ci(run.goodput for run in runs)[0] == pytest.approx(up - lost, abs=0.002)


def test_elastic_island_matches_second_simulation():
    point = (CONFIG.downscale_s, CONFIG.upscale_delay_s, float(CONFIG.slice_chips))
    for chips in (75_000, 1_200_000):
        theirs = island_by_rules(OutageRules(), chips, point, failures=8_000, seed=4)
        ours = simulate(CONFIG, "decoupled", 1, chips, days=8_000 * YEAR_S / chips / 86_400.0, seed=4)
        assert ours.goodput == pytest.approx(theirs.goodput, abs=0.012)
        assert ours.uptime == pytest.approx(theirs.uptime, abs=0.012)


@pytest.fixture(scope="module")
def published_table() -> dict[tuple[str, int, int, str], TableCell]:
    cells = goodput_table(rows=PUBLISHED_ROWS, chips=PUBLISHED_CHIPS, days=5.0, seeds=(0, 1, 2, 3))
    return {(cell.method, cell.learners, cell.chips, cell.metric): cell for cell in cells}


@pytest.mark.parametrize("cell", PUBLISHED_CELLS, ids=lambda c: f"{c.label} {c.metric} {c.chips}")
def test_model_matches_published_cell_within_three_points(cell, published_table):
    ours = published_table[cell.method, cell.learners, cell.chips, cell.metric]
    assert ours.published == cell.percent
    assert abs(ours.difference) <= 3.0, ours


def test_mean_residual_is_below_one_and_a_half_points(published_table):
    squares = [cell.difference**2 for cell in published_table.values() if cell.difference is not None]
    assert len(squares) == len(PUBLISHED_CELLS) == 16
    assert math.sqrt(sum(squares) / len(squares)) < 1.5


@pytest.mark.parametrize(("learners", "chips"), [(1, 150_000), (2, 600_000), (4, 150_000)])
def test_goodput_depends_on_chips_per_learner(learners, chips):
    """goodput(M, N) = goodput(kM, kN)."""
    small = mean_ci(simulate(CONFIG, "decoupled", learners, chips, 6.0, seed).goodput for seed in range(3))[0]
    large = mean_ci(simulate(CONFIG, "decoupled", 4 * learners, 4 * chips, 3.0, seed).goodput for seed in range(3))[0]
    assert small == pytest.approx(large, abs=0.015)


def test_result_depends_on_seed():
    for method in ("decoupled", "data-parallel", "elastic", "diloco", "streaming"):
        first, again, other = (simulate(CONFIG, method, 4, 600_000, 0.2, seed) for seed in (1, 1, 2))
        assert first == again != other
        assert first.failures > 0


def test_goodput_order_of_methods():
    runs = {
        method: simulate(CONFIG, method, 8, 1_200_000, 1.0, seed=0)
        for method in ("decoupled", "data-parallel", "elastic", "diloco", "streaming")
    }
    assert runs["data-parallel"].goodput < runs["elastic"].goodput < runs["decoupled"].goodput
    assert runs["diloco"].goodput < runs["decoupled"].goodput - 0.1
    assert runs["streaming"].goodput < runs["decoupled"].goodput - 0.1
    assert runs["elastic"].learners == runs["data-parallel"].learners == 1
    assert all(0.0 < run.goodput <= run.uptime <= 1.0 for run in runs.values())


def simulated_goodput(island: SimIsland, horizon_s: float, *, ignore_missing_slices: bool) -> float:
    useful_s = 0.0
    for segment in itertools.takewhile(lambda segment: segment.start_s < horizon_s, island):
        if segment.is_stepping:
            share = 1.0 if ignore_missing_slices else segment.share
            useful_s += (min(segment.end_s, horizon_s) - segment.start_s) * share
    return useful_s / horizon_s


def test_missing_slices_reduce_goodput():
    """With slices of a quarter of the island the two results differ by much more than a lost step."""
    config = replace(CONFIG, slice_chips=50_000)
    (one,) = build_islands(config, 1, 200_000, seed=0)
    (two,) = build_islands(config, 1, 200_000, seed=0)
    horizon_s = 10 * 86_400.0
    ours = simulate(config, "decoupled", 1, 200_000, 10.0, seed=0).goodput
    correct = simulated_goodput(one, horizon_s, ignore_missing_slices=False)
    incorrect = simulated_goodput(two, horizon_s, ignore_missing_slices=True)
    assert ours == pytest.approx(correct, abs=0.005)
    assert incorrect - ours > 0.05


def test_uptime_counts_time_with_any_step():
    """The downtime of two independent islands is the square of the downtime of one."""
    one = mean_ci(simulate(CONFIG, "decoupled", 1, 300_000, 10.0, seed).uptime for seed in range(3))[0]
    two = mean_ci(simulate(CONFIG, "decoupled", 2, 600_000, 10.0, seed).uptime for seed in range(3))[0]
    assert two == pytest.approx(1.0 - (1.0 - one) ** 2, abs=0.005)


def test_slow_chips_reduce_tokens_not_goodput():
    plain = simulate(CONFIG, "decoupled", 4, 600_000, 2.0, seed=0)
    slowed = simulate(replace(CONFIG, slowdowns_per_hour=30.0), "decoupled", 4, 600_000, 2.0, seed=0)
    uneven = simulate(replace(CONFIG, chip_time_sigma=0.02), "decoupled", 4, 600_000, 2.0, seed=0)
    for troubled in (slowed, uneven):
        assert troubled.tokens < 0.97 * plain.tokens
        assert troubled.goodput == pytest.approx(plain.goodput, abs=0.01)
    assert plain.throughput == pytest.approx(plain.goodput)


def test_slow_hardware_delays_only_synchronous_methods():
    speeds = (1.0,) * 4 + (0.82,) * 4
    free = simulate(CALM, "decoupled", 8, 80_000, 1.0, seed=0, speeds=speeds)
    waiting = simulate(CALM, "diloco", 8, 80_000, 1.0, seed=0, speeds=speeds, barrier=BarrierConfig(exchange_s=0.0))
    late = simulate(CALM, "streaming", 8, 80_000, 1.0, seed=0, speeds=speeds)
    assert free.goodput == pytest.approx(1.0)
    # The fast half steps 0.82 of the time.
    assert waiting.goodput == pytest.approx(0.91, abs=0.002)
    assert late.goodput == pytest.approx(0.91, abs=0.002)
    assert free.throughput == pytest.approx(0.91, abs=0.001)
    assert waiting.throughput == pytest.approx(0.82, abs=0.002)


def test_exchange_delays_diloco_but_not_streaming():
    barrier = BarrierConfig(every_steps=24, fragments=24, tau_steps=2, exchange_s=1.2)
    diloco = simulate(CALM, "diloco", 4, 1_000, 1.0, seed=0, barrier=barrier)
    streaming = simulate(CALM, "streaming", 4, 1_000, 1.0, seed=0, barrier=barrier)
    assert diloco.goodput == pytest.approx(24.0 / 25.2, abs=0.001)
    assert diloco.uptime == pytest.approx(24.0 / 25.2, abs=0.001)
    assert streaming.goodput == streaming.uptime == pytest.approx(1.0)
    too_slow = simulate(CALM, "streaming", 4, 1_000, 1.0, seed=0, barrier=replace(barrier, exchange_s=5.0))
    # The third step after a barrier needs its exchange: tau + 1 steps in the time of the exchange and one step.
    assert too_slow.goodput == pytest.approx(3.0 / (5.0 + 1.0), abs=0.001)


def test_tau_hides_short_delays():
    """Short slow-downs of one learner do not delay the others if tau is large enough."""
    config = replace(CALM, slowdowns_per_hour=6.0, slowdown_mean_s=2.0, slowdown_factor=0.5)
    barrier = BarrierConfig(every_steps=24, fragments=24, tau_steps=1, exchange_s=0.0)
    tight = simulate(config, "streaming", 8, 8_000, 1.0, seed=0, barrier=barrier)
    loose = simulate(config, "streaming", 8, 8_000, 1.0, seed=0, barrier=replace(barrier, tau_steps=12))
    assert loose.goodput > tight.goodput
    assert loose.tokens > tight.tokens


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_single_learner_never_waits(method):
    barrier = BarrierConfig(exchange_s=0.0)
    alone = simulate(CONFIG, method, 1, 300_000, 2.0, seed=5, barrier=barrier)
    elastic = simulate(CONFIG, "elastic", 1, 300_000, 2.0, seed=5)
    assert alone.goodput == pytest.approx(elastic.goodput, abs=2e-4)
    assert alone.uptime == pytest.approx(elastic.uptime, abs=1e-6)
    assert alone.failures == elastic.failures > 0


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_skipping_calm_periods_is_exact(method, monkeypatch):
    def run() -> goodput.GoodputResult:
        return simulate(CONFIG, method, 4, 60_000, 0.5, seed=2, speeds=(1.0, 1.0, 0.9, 0.8))

    skipped = run()
    jumps = []
    monkeypatch.setattr(goodput._BarrierRun, "_jump", lambda *_: jumps.append(1))
    stepped = run()
    assert jumps, "the run had no calm period"
    assert skipped.goodput == pytest.approx(stepped.goodput, abs=1e-6)
    assert skipped.uptime == pytest.approx(stepped.uptime, abs=1e-6)
    assert skipped.tokens == pytest.approx(stepped.tokens, rel=1e-6)
    assert abs(skipped.steps - stepped.steps) <= 4


def test_extra_learners_count_while_present():
    plain = simulate(CONFIG, "decoupled", 4, 600_000, 1.0, seed=0)
    extras = [ExtraLearners(count=4, windows=((0.0, 43_200.0),))]
    more = simulate(CONFIG, "decoupled", 4, 600_000, 1.0, seed=0, extras=extras)
    assert more.tokens / plain.tokens == pytest.approx(1.5, rel=0.02)
    assert more.goodput == pytest.approx(plain.goodput, abs=0.01)


def test_failure_count_matches_chip_hours():
    result = simulate(CONFIG, "decoupled", 16, 2_400_000, 1.0, seed=0)
    expected = 2_400_000 / YEAR_S * 86_400.0 * result.uptime
    assert 0.8 * expected < result.failures < expected


def test_memory_does_not_depend_on_chips():
    def peak_bytes(chips: int) -> int:
        tracemalloc.start()
        try:
            result = simulate(CONFIG, "decoupled", 4, chips, days=2_000 * YEAR_S / chips / 86_400.0, seed=0)
            assert result.failures > 100
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(40_000_000) < peak_bytes(40_000) + 50_000


def test_mean_ci():
    mean, low, high = mean_ci([10.0, 12.0, 14.0])
    assert mean == 12.0
    assert high - mean == pytest.approx(4.303 * 2.0 / math.sqrt(3.0))
    assert mean - low == pytest.approx(high - mean)
    many = estimate_goodput([0.0, 1.0] * 200)
    assert many.high - many.mean == pytest.approx(1.966 * 0.50063 / 20.0, rel=1e-3)
    with pytest.raises(ValueError, match="run at least 2 seeds"):
        mean_ci([1.0])


def test_table_shows_published_cells():
    cells = goodput_table(rows=[("elastic", 1), ("decoupled", 2)], chips=(150_000,), days=0.2, seeds=(0, 1))
    text = render_table(cells, "goodput")
    elastic, two = text.splitlines()[1:]
    assert text.splitlines()[0].split() == ["goodput", "%,", "ours", "(published)", "150k"]
    assert "(88, " in elastic
    assert two.startswith("M = 2")
    assert "(" not in two
    assert published_percent("elastic", 1, 1_200_000, "uptime") == 59.0
    assert published_percent("decoupled", 2, 1_200_000) is None


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: simulate(CONFIG, "decoupled", 1, 1_000, 0.0, 0), "days is 0.0; give a number above 0"),
        (lambda: BarrierConfig(fragments=0), "give 1 <= fragments <= H"),
        (lambda: BarrierConfig(tau_steps=0), "use the method diloco"),
        (lambda: BarrierConfig(exchange_s=-1.0), "give seconds, 0 or more"),
        (
            lambda: simulate(CONFIG, "diloco", 2, 10, 1.0, 0, extras=[ExtraLearners(1, ((0.0, 1.0),))]),
            "use the method decoupled",
        ),
    ],
)
def test_invalid_setting_raises_with_remedy(make, fix):
    with pytest.raises(ValueError, match=re.escape(fix)):
        make()


def test_doctests_pass():
    assert doctest.testmod(goodput).failed == 0
