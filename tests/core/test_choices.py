"""Choice of codecs from the measured bandwidth of the learners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.policy import (
    CODEC_BITS,
    CODEC_HEADROOM,
    CODEC_RATE_SAMPLES,
    CODECS,
    MIN_CODEC_TIME_S,
    MIN_MEASURED_BYTES,
    choose_contribution_codec,
    choose_update_codec,
)
from atoll.core.protocol import (
    Contribution,
    CopyFragment,
    DownloadTime,
    LinkMeasured,
    LogReason,
    MergeRound,
    Pull,
)
from atoll.core.reasons import Reason
from atoll.core.types import RoundId, RunConfig
from atoll.sim.bandwidth import WIRE_BITS
from tests.core.harness import LearnerHarness, SyncerHarness

CONFIG = RunConfig(fragments=4, every_steps=8, overlap_steps=2)  # each fragment has two steps of transfer time
LARGE = 4_000_000  # values: 8 MB in bf16

rates = st.floats(3, 10).map(lambda power: 10.0**power)
codecs = st.sampled_from(CODECS)
sizes = st.integers(MIN_MEASURED_BYTES // 2, 10**9)
steps_s = st.floats(-5, 3).map(lambda power: 10.0**power)


def coarseness(codec: str) -> int:
    return CODECS.index(codec)


def chosen(now: str, rate: float, values: int = LARGE, step_s: float = 1.0, config: RunConfig = CONFIG) -> str:
    return choose_contribution_codec(config, now, (rate,) * CODEC_RATE_SAMPLES, values, step_s).codec


# --------------------------------------------------------------------------------------------------------------------
# The choice


@given(codecs, rates, rates, sizes, steps_s)
def test_faster_link_never_gets_a_coarser_codec(now, one, other, values, step_s):
    slow, fast = sorted((one, other))
    assert coarseness(chosen(now, fast, values, step_s)) <= coarseness(chosen(now, slow, values, step_s))


@given(codecs, rates, sizes, sizes, steps_s)
def test_larger_fragment_never_gets_a_finer_codec(now, rate, one, other, step_s):
    small, large = sorted((one, other))
    assert coarseness(chosen(now, rate, small, step_s)) <= coarseness(chosen(now, rate, large, step_s))


@given(codecs, rates, sizes, steps_s)
def test_codec_stays_at_the_same_rate(now, rate, values, step_s):
    found = chosen(now, rate, values, step_s)
    assert chosen(found, rate, values, step_s) == found


@given(codecs, rates, sizes, steps_s, st.lists(st.floats(CODEC_HEADROOM + 0.01, 1.0), max_size=20))
def test_codec_does_not_oscillate_with_small_rate_changes(now, rate, values, step_s, factors):
    directions = set()
    for factor in factors:
        found = chosen(now, rate * factor, values, step_s)
        directions.add(coarseness(found) - coarseness(now) > 0 if found != now else None)
        now = found
    assert not {True, False} <= directions


@given(codecs, rates, sizes, steps_s)
def test_no_codec_is_coarser_than_necessary(now, rate, values, step_s):
    found = chosen(now, rate, values, step_s)
    if coarseness(found) > coarseness(now):
        finer = CODECS[coarseness(found) - 1]
        assert values * CODEC_BITS[finer] / 8 / rate > max(2 * step_s, MIN_CODEC_TIME_S)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1e9, "bf16"), (4.1e6, "bf16"), (3.9e6, "int8"), (2.1e6, "int8"), (1.9e6, "int4"), (1.0, "int4")],
)
def test_codec_is_coarse_enough_to_send_a_fragment_in_its_two_steps(rate, expected):
    assert chosen("bf16", rate) == expected


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1.0, "int4"), (2.8e6, "int4"), (3.0e6, "int8"), (5.6e6, "int8"), (5.8e6, "bf16"), (1e9, "bf16")],
)
def test_finer_codec_returns_only_with_headroom(rate, expected):
    assert chosen("int4", rate) == expected


def test_many_fragments_leave_each_of_them_less_time():
    many = RunConfig(fragments=16, every_steps=8, overlap_steps=2)  # one every half step
    assert chosen("bf16", 9e6) == "bf16"
    assert chosen("bf16", 9e6, config=many) == "int8"


@given(codecs, rates, steps_s)
def test_codec_stays_for_small_fragments(now, rate, step_s):
    assert chosen(now, rate, MIN_MEASURED_BYTES // 2 - 1, step_s) == now


@given(codecs, st.lists(rates, max_size=CODEC_RATE_SAMPLES - 1), sizes, steps_s)
def test_codec_stays_without_measurements(now, few, values, step_s):
    assert choose_contribution_codec(CONFIG, now, few, values, step_s) == (now, None)
    assert choose_contribution_codec(CONFIG, now, (1.0,) * CODEC_RATE_SAMPLES, values, 0.0) == (now, None)


def test_codec_stays_for_steps_of_milliseconds():
    """8 MB in 0.2 s take as long as forty of these steps, which is still fast enough."""
    assert chosen("bf16", 40e6, step_s=0.005) == "bf16"
    assert chosen("bf16", 20e6, step_s=0.005) == "int8"


@given(st.permutations([1e5, 2e5, 1e8]))
def test_two_slow_measurements_of_three_do_not_change_the_codec(seen):
    assert choose_contribution_codec(CONFIG, "bf16", seen, LARGE, 1.0).codec == "bf16"


def test_codec_bits_match_the_bandwidth_model():
    assert {codec: WIRE_BITS[codec] for codec in CODECS} == CODEC_BITS


# --------------------------------------------------------------------------------------------------------------------
# The learner


def measures(harness: LearnerHarness, at: float, rate: float, times: int = CODEC_RATE_SAMPLES) -> list[LogReason]:
    logged: list[LogReason] = []
    for number in range(times):
        harness.handle(at + number / 100, LinkMeasured("up", round(rate), 1.0, LARGE))
        logged += harness.of(LogReason)
    return logged


def test_next_copy_uses_the_chosen_codec_and_an_existing_copy_keeps_its_codec():
    harness = LearnerHarness(CONFIG).trains()
    first, second = RoundId(0, 0, 1, 1), RoundId(1, 0, 1, 1)
    harness.receives(0.5, Pull(first))
    harness.steps(1.0)
    assert harness.one(CopyFragment) == CopyFragment(first, 1, None)
    (logged,) = measures(harness, 1.1, 3e6)
    assert logged == LogReason(
        ("learner", 1), Reason("contribution-codec-coarser", ("int8", "bf16", 3.0, LARGE * 2 / 3e6, 2.0))
    )
    assert str(logged.reason) == (
        "contributions are now sent in int8, not in bf16: at 3 MB/s a fragment takes 2.67 s in bf16; available: 2 s"
    )
    harness.receives(1.5, Pull(first))
    assert [body.round for _, body in harness.bodies(Contribution)] == [first], "the same copy is sent again"
    assert harness.of(CopyFragment) == []
    harness.receives(1.6, Pull(second))
    harness.steps(2.0)
    assert harness.one(CopyFragment) == CopyFragment(second, 2, "int8")


def test_codec_choice_restarts_measurements_and_logs_the_return():
    harness = LearnerHarness(CONFIG).trains()
    harness.steps(1.0)
    assert len(measures(harness, 1.1, 1e6)) == 1
    assert harness.core.state.codec == "int4"
    assert measures(harness, 1.2, 1e9, CODEC_RATE_SAMPLES - 1) == []
    (logged,) = measures(harness, 1.3, 1e9, 1)
    assert (logged.reason.code, logged.reason.args[:2]) == ("contribution-codec-finer", ("bf16", "int4"))
    assert harness.core.state.codec == "bf16"


def test_joining_learner_chooses_no_codec():
    harness = LearnerHarness(CONFIG)
    assert measures(harness, 0.1, 1.0) == []
    assert harness.core.state.codec is None


def test_download_time_is_sent_from_the_third_measurement_on():
    harness = LearnerHarness(CONFIG).trains()
    for rate, expected in ((1e6, []), (2e6, []), (1e6, [4.0]), (1e6, [4.0]), (1e6, [8.0])):
        harness.handle(1.0, LinkMeasured("down", round(rate), 1.0, LARGE))
        assert [body.seconds for _, body in harness.bodies(DownloadTime)] == expected
    harness.handle(2.0, LinkMeasured("down", 1000, 1.0, 1000))
    assert harness.bodies(DownloadTime) == [], "small fragments are not measured"
    assert harness.core.state.codec is None, "the download rate does not change the upload codec"


# --------------------------------------------------------------------------------------------------------------------
# The syncer


@given(codecs, st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 1e9), steps_s)
def test_minority_does_not_make_updates_coarser(now, honest, wild, step_s):
    """Honest learners are the majority; the others report any download time."""
    alone = choose_update_codec(CONFIG, now, honest, step_s).codec
    slowest = choose_update_codec(CONFIG, now, [max(honest)], step_s).codec
    with_others = choose_update_codec(CONFIG, now, honest + [wild] * (len(honest) - 1), step_s).codec
    assert coarseness(with_others) <= max(coarseness(slowest), coarseness(alone))


def test_update_codec_follows_the_median_link():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1, overlap_steps=2, grace_margin=0.0))
    fakes = [harness.joined(learner) for learner in (1, 2, 3)]

    def merged(at: float, step: int) -> MergeRound:
        for fake in fakes:
            fake.reports(at, step)
        for fake in fakes:
            fake.contributes(at + 0.1)
            if harness.of(MergeRound):
                break
        sealed = harness.one(MergeRound)
        logged.extend(harness.of(LogReason))
        harness.merges_and_persists(at + 0.2)
        for fake in fakes:
            fake.acknowledges(at + 0.3)
        return sealed

    logged: list[LogReason] = []
    assert merged(1.0, 1).codec is None
    fakes[0].delivers(1.5, DownloadTime(1e9))
    for invalid in (float("nan"), float("inf"), -1.0, 0.0):
        fakes[1].delivers(1.5, DownloadTime(invalid))
    assert merged(2.0, 2).codec is None, "one of three learners is slow"
    fakes[1].delivers(2.5, DownloadTime(1.9))
    assert merged(3.0, 3).codec == "int8"
    fakes[1].delivers(3.5, DownloadTime(3.0))
    assert merged(4.0, 4).codec == "int4"
    fakes[1].delivers(4.5, DownloadTime(0.1))
    assert merged(5.0, 5).codec == "bf16"
    codes = [each.reason.code for each in logged if each.subject == ("run", 0)]
    assert codes == ["update-codec-coarser", "update-codec-coarser", "update-codec-finer"]
    assert "updates are now sent in int8, not in bf16: for the median learner a fragment takes 1.9 s" in str(
        logged[0].reason
    )
