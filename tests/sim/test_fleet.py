"""Simulated islands: contiguous segments, determinism by seed, and agreement with closed forms."""

from __future__ import annotations

import doctest
import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from atoll.sim import fleet
from atoll.sim.fleet import (
    YEAR_S,
    ExtraLearners,
    FleetConfig,
    IslandState,
    RepairDelay,
    Segment,
    SegmentEnd,
    SimIsland,
    build_islands,
    expected_max_of_gaussians,
    parse_speed_classes,
    synchronous_speed,
)

CONFIG = FleetConfig()


def segments(count: int, config: FleetConfig = CONFIG, chips: int = 600_000, seed: int = 0, **options) -> list[Segment]:
    return list(itertools.islice(SimIsland(config, chips, random.Random(seed), **options), count))


WITH_SLOWDOWNS = replace(CONFIG, slowdowns_per_hour=60.0, chip_time_sigma=0.02)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("config", [CONFIG, WITH_SLOWDOWNS, replace(CONFIG, downscale_s=0.0, restart_s=0.0)])
def test_segments_are_contiguous(config, elastic):
    found = segments(5_000, config, is_elastic=elastic)
    assert found[0].start_s == 0.0
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(found))
    assert all(segment.start_s < segment.end_s for segment in found)
    assert all(0.0 <= segment.share <= 1.0 for segment in found)
    assert all((segment.speed > 0.0) == segment.is_stepping for segment in found)


def test_history_depends_on_seed():
    assert segments(500, WITH_SLOWDOWNS, seed=3) == segments(500, WITH_SLOWDOWNS, seed=3)
    assert segments(500, WITH_SLOWDOWNS, seed=3) != segments(500, WITH_SLOWDOWNS, seed=4)


def test_additional_learner_does_not_change_other_islands():
    three = build_islands(CONFIG, 3, 300_000, seed=7)
    four = build_islands(CONFIG, 4, 400_000, seed=7)
    for before, after in zip(three, four, strict=False):
        assert list(itertools.islice(before, 200)) == list(itertools.islice(after, 200))


def test_slow_downs_do_not_change_failures():
    def failures(config: FleetConfig) -> list[float]:
        return [s.end_s for s in segments(3_000, config) if s.end_cause is SegmentEnd.FAILURE][:300]

    slow = segments(3_000, WITH_SLOWDOWNS)
    assert any(segment.end_cause is SegmentEnd.PACE for segment in slow), "no slow-down fired"
    assert failures(WITH_SLOWDOWNS) == failures(CONFIG)


def test_order_of_island_states():
    """Every failure causes a pause, and slices return only in pauses."""
    for before, after in itertools.pairwise(segments(5_000)):
        if before.end_cause is SegmentEnd.FAILURE:
            assert after.state is IslandState.DOWNSCALING
            assert after.end_s - after.start_s == pytest.approx(CONFIG.downscale_s)
        elif before.is_stepping:
            assert after.state is IslandState.UPSCALING
            assert after.share > before.share
        else:
            assert after.share == before.share


def test_failure_removes_one_slice_and_adds_idle_slices():
    slices = SimIsland(CONFIG, 600_000, random.Random(0)).slices
    moves = [
        round((after.share - before.share) * slices)
        for before, after in itertools.pairwise(segments(5_000))
        if before.end_cause is SegmentEnd.FAILURE
    ]
    assert min(moves) == -1
    assert max(moves) > 0, "no failure occurred while a slice was idle"


def test_frequent_failures_share_upscale_pauses():
    def upscales_per_failure(chips: int) -> float:
        found = segments(8_000, chips=chips)
        return sum(s.state is IslandState.UPSCALING for s in found) / sum(
            s.end_cause is SegmentEnd.FAILURE for s in found
        )

    assert upscales_per_failure(18_750) > 0.9
    assert upscales_per_failure(1_200_000) < 0.4


def test_island_of_one_slice_waits_for_repair():
    config = replace(CONFIG, mtbi_s=YEAR_S / 100.0)
    found = segments(2_000, config, chips=1_000)
    assert {segment.share for segment in found if segment.is_stepping} == {1.0}
    assert any(segment.state is IslandState.REPAIRING for segment in found)
    for before, after in itertools.pairwise(found):
        if before.state is IslandState.REPAIRING:
            assert after.state is IslandState.UPSCALING


def test_failure_rate_is_sum_over_chips():
    found = segments(20_000, is_elastic=False)
    stepping_s = sum(s.end_s - s.start_s for s in found if s.is_stepping)
    failures = sum(s.end_cause is SegmentEnd.FAILURE for s in found)
    assert stepping_s / failures == pytest.approx(YEAR_S / 600_000, rel=0.05)


def test_no_failures_give_one_infinite_segment():
    config = replace(CONFIG, mtbi_s=math.inf)
    for elastic in (True, False):
        only = segments(10, config, is_elastic=elastic)
        assert [(s.start_s, s.end_s, s.state) for s in only] == [(0.0, math.inf, IslandState.STEPPING)]


def test_segment_at_returns_segment_of_time():
    listed = segments(200)
    island = SimIsland(CONFIG, 600_000, random.Random(0))
    for segment in listed[:-1]:
        middle_s = (segment.start_s + segment.end_s) / 2.0
        assert island.segment_at(segment.start_s) == segment
        assert island.segment_at(middle_s) == segment
    fired = sum(segment.end_cause is SegmentEnd.FAILURE for segment in listed[:-2])
    assert island.failures == fired > 0
    with pytest.raises(AssertionError, match="requested after"):
        island.segment_at(0.0)


@pytest.mark.parametrize(("shape", "power"), [(1.0, 1.0), (0.7, 3.0), (2.0, 1.0), (0.6, 0.5), (1.5, 2.5)])
def test_repair_delay_has_configured_distribution(shape, power):
    delay = RepairDelay.with_mean(60.0, shape, power)
    assert delay.mean_s == pytest.approx(60.0)
    rng = random.Random(5)
    drawn = [delay.draw_s(rng) for _ in range(60_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(60.0, rel=0.03)
    # The distribution function at the scale is (1 - 1/e) ** power.
    below = sum(value <= delay.scale_s for value in drawn) / len(drawn)
    assert below == pytest.approx((1.0 - math.exp(-1.0)) ** power, abs=0.01)


def test_slowest_chip_determines_speed():
    assert expected_max_of_gaussians(1) == pytest.approx(0.0, abs=1e-6)
    assert expected_max_of_gaussians(2) == pytest.approx(1.0 / math.sqrt(math.pi), abs=1e-6)
    assert expected_max_of_gaussians(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-6)
    rng = random.Random(2)
    drawn = [max(rng.gauss(0.0, 1.0) for _ in range(500)) for _ in range(400)]
    assert expected_max_of_gaussians(500) == pytest.approx(sum(drawn) / len(drawn), abs=0.07)
    speeds = [synchronous_speed(chips, 0.01) for chips in (1, 1_000, 1_000_000)]
    assert speeds == sorted(speeds, reverse=True)
    assert synchronous_speed(1_000_000, 0.0) == 1.0


def test_slow_downs_have_configured_duration_and_speed():
    config = replace(CONFIG, mtbi_s=math.inf, slowdowns_per_hour=20.0, slowdown_mean_s=90.0, slowdown_factor=0.25)
    found = segments(4_000, config)
    slow_s = sum(s.end_s - s.start_s for s in found if s.speed == 0.25)
    assert {segment.speed for segment in found} == {1.0, 0.25}
    assert slow_s / found[-1].end_s == pytest.approx(90.0 / (90.0 + 180.0), rel=0.1)


def test_extra_learners_follow_schedule():
    extra = ExtraLearners.parse("2x0.5@3600-7200,10000-20000")
    islands = build_islands(CONFIG, 2, 1_200_000, seed=0, extras=[extra])
    assert len(islands) == 4
    found = list(islands[2])
    absent = [(s.start_s, s.end_s, s.end_cause) for s in found if s.state is IslandState.ABSENT]
    absent_spans = [(7_200.0, 10_000.0), (20_000.0, math.inf)]
    assert absent[0] == (0.0, 3_600.0, SegmentEnd.JOIN)
    assert [(start_s, end_s) for start_s, end_s, _ in absent[1:]] == absent_spans
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(found))
    joins = [after for before, after in itertools.pairwise(found) if before.end_cause is SegmentEnd.JOIN]
    assert [(s.start_s, s.share, s.speed) for s in joins] == [(3_600.0, 1.0, 0.5), (10_000.0, 1.0, 0.5)]
    assert islands[2].present_s(horizon_s=11_000.0) == 3_600.0 + 1_000.0
    assert islands[0].present_s(horizon_s=11_000.0) == 11_000.0


def test_parse_speed_classes():
    assert parse_speed_classes("1.0x4,0.82x4") == (1.0,) * 4 + (0.82,) * 4
    assert parse_speed_classes("1, 0.5") == (1.0, 0.5)


def test_chips_are_shared_evenly():
    assert [island.chips for island in build_islands(CONFIG, 3, 1_000_001, seed=0)] == [333_334, 333_334, 333_333]


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: FleetConfig(mtbi_s=0.0), "mtbi_s is 0.0; give seconds above 0"),
        (lambda: FleetConfig(slice_chips=0), "slice_chips is 0; give at least 1 chip"),
        (lambda: FleetConfig(upscale_s=-1.0), "upscale_s is -1.0; give seconds, 0 or more"),
        (lambda: FleetConfig(slowdown_factor=0.0), "slowdown_factor is 0.0; give a speed"),
        (lambda: FleetConfig(step_time_s=math.nan), "step_time_s is nan; give seconds above 0"),
        (lambda: RepairDelay(scale_s=-3.0), "repair scale_s is -3.0; give seconds above 0"),
        (lambda: RepairDelay(1.0, shape=0.0), "repair shape is 0.0; give a number from 0.1 to 20"),
        (lambda: build_islands(CONFIG, 0, 10, 0), "number of learners is 0; give 1 to 4096"),
        (lambda: build_islands(CONFIG, 8, 7, 0), "number of chips is 7; give at least one to each of the 8 learners"),
        (lambda: build_islands(CONFIG, 2, 10, 0, speeds=[1.0]), "give one for each of the 2 learners"),
        (lambda: SimIsland(CONFIG, 1, random.Random(0), windows=[(5.0, 2.0)]), "give joins before leaves"),
        (lambda: ExtraLearners.parse("four"), "write COUNT@JOIN-LEAVE, such as 4@3600-7200"),
        (lambda: parse_speed_classes("fast"), "write SPEEDxCOUNT, such as 1.0x4,0.82x4"),
    ],
)
def test_invalid_setting_raises_with_remedy(make, fix):
    with pytest.raises(ValueError, match=re.escape(fix)):
        make()


def test_doctests_pass():
    assert doctest.testmod(fleet).failed == 0
