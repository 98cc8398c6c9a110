"""What a learner chooses by itself: the codec of its contributions, from what its link was measured to carry."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk

CONFIG = RunConfig(fragments=4, every_steps=8, overlap_steps=2)  # a fragment has two steps
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
def test_a_faster_link_never_gets_a_coarser_codec(now, one, other, values, step_s):
    slow, fast = sorted((one, other))
    assert coarseness(chosen(now, fast, values, step_s)) <= coarseness(chosen(now, slow, values, step_s))


@given(codecs, rates, sizes, sizes, steps_s)
def test_a_larger_fragment_never_gets_a_finer_codec(now, rate, one, other, step_s):
    small, large = sorted((one, other))
    assert coarseness(chosen(now, rate, small, step_s)) <= coarseness(chosen(now, rate, large, step_s))


@given(codecs, rates, sizes, steps_s)
def test_codec_stays_at_the_same_rate(now, rate, values, step_s):
    found = chosen(now, rate, values, step_s)
    assert chosen(found, rate, values, step_s) == found


@given(codecs, rates, sizes, steps_s, st.lists(st.floats(CODEC_HEADROOM + 0.01, 1.0), max_size=20))
def test_a_link_that_is_now_a_little_slower_and_now_a_little_faster_does_not_go_to_and_fro(
    now, rate, values, step_s, factors
):
    ways = set()
    for factor in factors:
        found = chosen(now, rate * factor, values, step_s)
        ways.add(coarseness(found) - coarseness(now) > 0 if found != now else None)
        now = found
    assert not {True, False} <= ways


@given(codecs, rates, sizes, steps_s)
def test_no_codec_is_coarser_than_it_has_to_be(now, rate, values, step_s):
    found = chosen(now, rate, values, step_s)
    if coarseness(found) > coarseness(now):
        finer = CODECS[coarseness(found) - 1]
        assert values * CODEC_BITS[finer] / 8 / rate > max(2 * step_s, MIN_CODEC_TIME_S)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1e9, "bf16"), (4.1e6, "bf16"), (3.9e6, "int8"), (2.1e6, "int8"), (1.9e6, "int4"), (1.0, "int4")],
)
def test_a_fragment_has_to_be_through_in_its_two_steps(rate, expected):
    assert chosen("bf16", rate) == expected


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1.0, "int4"), (2.8e6, "int4"), (3.0e6, "int8"), (5.6e6, "int8"), (5.8e6, "bf16"), (1e9, "bf16")],
)
def test_and_a_link_that_gets_faster_gets_its_codec_back_with_room_to_spare(rate, expected):
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


def test_steps_of_milliseconds_do_not_make_a_link_thin():
    """8 MB in a fifth of a second last as long as forty of these steps and are still fast enough."""
    assert chosen("bf16", 40e6, step_s=0.005) == "bf16"
    assert chosen("bf16", 20e6, step_s=0.005) == "int8"


@given(st.permutations([1e5, 2e5, 1e8]))
def test_a_machine_that_was_busy_twice_is_no_thin_link(seen):
    assert choose_contribution_codec(CONFIG, "bf16", seen, LARGE, 1.0).codec == "bf16"


def test_bits_are_those_of_the_plan():
    assert {codec: WIRE_BITS[codec] for codec in CODECS} == CODEC_BITS


# --------------------------------------------------------------------------------------------------------------------
# The learner


def measures(talk: LearnerTalk, at: float, rate: float, times: int = CODEC_RATE_SAMPLES) -> list[LogReason]:
    said: list[LogReason] = []
    for number in range(times):
        talk.handle(at + number / 100, LinkMeasured("up", round(rate), 1.0, LARGE))
        said += talk.of(LogReason)
    return said


def test_next_copy_uses_the_chosen_codec_and_an_existing_copy_keeps_its_codec():
    talk = LearnerTalk(CONFIG).trains()
    first, second = RoundId(0, 0, 1, 1), RoundId(1, 0, 1, 1)
    talk.receives(0.5, Pull(first))
    talk.steps(1.0)
    assert talk.one(CopyFragment) == CopyFragment(first, 1, None)
    (said,) = measures(talk, 1.1, 3e6)
    assert said == LogReason(
        ("learner", 1), Reason("contribution-codec-coarser", ("int8", "bf16", 3.0, LARGE * 2 / 3e6, 2.0))
    )
    assert str(said.reason) == (
        "contributions are now sent in int8, not in bf16: at 3 MB/s a fragment takes 2.67 s in bf16; available: 2 s"
    )
    talk.receives(1.5, Pull(first))
    assert [body.round for _, body in talk.bodies(Contribution)] == [first], "the same bytes once more"
    assert talk.of(CopyFragment) == []
    talk.receives(1.6, Pull(second))
    talk.steps(2.0)
    assert talk.one(CopyFragment) == CopyFragment(second, 2, "int8")


def test_codec_choice_restarts_measurements_and_logs_the_return():
    talk = LearnerTalk(CONFIG).trains()
    talk.steps(1.0)
    assert len(measures(talk, 1.1, 1e6)) == 1
    assert talk.core.state.codec == "int4"
    assert measures(talk, 1.2, 1e9, CODEC_RATE_SAMPLES - 1) == []
    (said,) = measures(talk, 1.3, 1e9, 1)
    assert (said.reason.code, said.reason.args[:2]) == ("contribution-codec-finer", ("bf16", "int4"))
    assert talk.core.state.codec == "bf16"


def test_joining_learner_chooses_no_codec():
    talk = LearnerTalk(CONFIG)
    assert measures(talk, 0.1, 1.0) == []
    assert talk.core.state.codec is None


def test_download_time_is_sent_from_the_third_measurement_on():
    talk = LearnerTalk(CONFIG).trains()
    for rate, expected in ((1e6, []), (2e6, []), (1e6, [4.0]), (1e6, [4.0]), (1e6, [8.0])):
        talk.handle(1.0, LinkMeasured("down", round(rate), 1.0, LARGE))
        assert [body.seconds for _, body in talk.bodies(DownloadTime)] == expected
    talk.handle(2.0, LinkMeasured("down", 1000, 1.0, 1000))
    assert talk.bodies(DownloadTime) == [], "small fragments say nothing"
    assert talk.core.state.codec is None, "what comes down does not change what goes up"


# --------------------------------------------------------------------------------------------------------------------
# The syncer


@given(codecs, st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 1e9), steps_s)
def test_a_minority_does_not_make_updates_coarser(now, honest, wild, step_s):
    """However thin the others say that their links are."""
    alone = choose_update_codec(CONFIG, now, honest, step_s).codec
    slowest = choose_update_codec(CONFIG, now, [max(honest)], step_s).codec
    with_others = choose_update_codec(CONFIG, now, honest + [wild] * (len(honest) - 1), step_s).codec
    assert coarseness(with_others) <= max(coarseness(slowest), coarseness(alone))


def test_update_codec_follows_the_median_link():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1, overlap_steps=2, grace_margin=0.0))
    voices = [talk.joined(learner) for learner in (1, 2, 3)]

    def merged(at: float, step: int) -> MergeRound:
        for voice in voices:
            voice.reports(at, step)
        for voice in voices:
            voice.contributes(at + 0.1)
            if talk.of(MergeRound):
                break
        sealed = talk.one(MergeRound)
        told.extend(talk.of(LogReason))
        talk.merges_and_persists(at + 0.2)
        for voice in voices:
            voice.acknowledges(at + 0.3)
        return sealed

    told: list[LogReason] = []
    assert merged(1.0, 1).codec is None
    voices[0].delivers(1.5, DownloadTime(1e9))
    for wrong in (float("nan"), float("inf"), -1.0, 0.0):
        voices[1].delivers(1.5, DownloadTime(wrong))
    assert merged(2.0, 2).codec is None, "one of three"
    voices[1].delivers(2.5, DownloadTime(1.9))
    assert merged(3.0, 3).codec == "int8"
    voices[1].delivers(3.5, DownloadTime(3.0))
    assert merged(4.0, 4).codec == "int4"
    voices[1].delivers(4.5, DownloadTime(0.1))
    assert merged(5.0, 5).codec == "bf16"
    codes = [say.reason.code for say in told if say.subject == ("run", 0)]
    assert codes == ["update-codec-coarser", "update-codec-coarser", "update-codec-finer"]
    assert "updates are now sent in int8, not in bf16: for the median learner a fragment takes 1.9 s" in str(
        told[0].reason
    )
