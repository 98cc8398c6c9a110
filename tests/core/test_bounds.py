"""Tests that reach every bound. Reaching one is always a visible event."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from atoll.core.learner.joining import MAX_STATE_TRANSFERS
from atoll.core.policy import backoff_s
from atoll.core.protocol import (
    CloseConnection,
    Dial,
    DialFailed,
    DiscardRound,
    Finish,
    FinishRequested,
    Halt,
    Hello,
    LearnerDisconnected,
    LogReason,
    OptimizerState,
    PeerChosen,
    Persist,
    Ping,
    Pong,
    ProvideState,
    Published,
    Pull,
    Ready,
    Refuse,
    Report,
    SnapshotRequested,
    StartTraining,
    StateRequest,
    TimerFired,
)
from atoll.core.reasons import because
from atoll.core.types import Limits, RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice

COVERED = {
    "initial_wait_s": "test_before_anything_is_measured_a_timeout_is_first_wait_s",
    "min_wait_s": "test_no_derived_timeout_is_shorter_than_least_wait_s",
    "max_wait_s": "test_no_derived_timeout_is_longer_than_most_wait_s",
    "stall_threshold_s": "test_timer_later_than_stall_threshold_s_means_that_the_syncer_stalled",
    "max_pull_attempts": "test_pull_tries_askings_and_then_the_round_is_abandoned",
    "max_publish_attempts": "test_connection_is_closed_after_max_publish_attempts",
    "max_hello_attempts": "test_connection_is_closed_after_max_hello_attempts",
    "max_ping_attempts": "test_ping_tries_unanswered_pings_and_then_the_link_is_dropped",
    "max_state_peers": "test_learner_starts_with_fresh_optimizer_state_after_max_state_peers",
    "max_final_attempts": "test_final_tries_attempts_at_the_last_round_and_then_it_is_skipped",
    "max_finish_attempts": "test_finish_tries_sendings_of_the_manifest_and_then_a_learner_is_left_behind",
    "max_strikes": "test_strikes_bad_contributions_and_then_a_learner_is_quarantined",
    "lost_after_s": "test_learner_is_lost_after_lost_after_s",
    "initial_backoff_s": "test_the_first_redial_waits_backoff_first_s_and_its_spread",
    "max_backoff_s": "test_redials_wait_at_most_backoff_most_s_and_its_spread",
    "max_learners": "test_hello_beyond_max_learners_is_refused_and_retried",
    "max_steps_per_report": "test_more_than_most_steps_per_report_is_a_strike",
}


def test_every_limit_has_a_test_that_reaches_it():
    assert set(COVERED) == {f.name for f in dataclasses.fields(Limits)}
    assert set(COVERED.values()) <= set(globals())


def keep_reporting(talk: SyncerTalk, until, *voices: Voice, most_s: float = 5_000.0) -> float:
    """Report every second, so that no learner is suspected, until the condition holds."""
    at = talk.now
    while True:
        at += 1.0
        for voice in voices:
            voice.reports(at, voice.step + 1)
            if until():
                return at
        assert at < most_s, "it did not happen; the story is printed above"


@pytest.mark.parametrize("lost_after_s", [21600.0, 7.0])
def test_learner_is_lost_after_lost_after_s(lost_after_s):
    talk = SyncerTalk(RunConfig(fragments=1, limits=Limits(lost_after_s=lost_after_s)))
    one = talk.joined(1)
    talk.handle(1.0, LearnerDisconnected(one.id, 1, 1, "the host is gone"))
    talk.fires(0.99 + lost_after_s)
    assert talk.member(1).state == "disconnected"
    talk.fires(1.0 + lost_after_s)
    assert talk.member(1).state == "lost"


# --------------------------------------------------------------------------------------------------------------------
# Waiting


@pytest.mark.parametrize("initial_wait_s", [30.0, 7.0])
def test_before_anything_is_measured_a_timeout_is_first_wait_s(initial_wait_s):
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(initial_wait_s=initial_wait_s)))
    talk.opens(0.0)
    assert talk.core.next_deadline() == initial_wait_s
    syncer = SyncerTalk(RunConfig(fragments=1, limits=Limits(initial_wait_s=initial_wait_s)))
    syncer.voice(1).hello(0.0)
    syncer.persisted(0.0)
    assert syncer.core.next_deadline() == initial_wait_s


@pytest.mark.parametrize("min_wait_s", [0.25, 2.0])
def test_no_derived_timeout_is_shorter_than_least_wait_s(min_wait_s):
    """A run with steps of a microsecond, and a learner that is sent a message every microsecond."""
    limits = Limits(min_wait_s=min_wait_s)
    talk = LearnerTalk(RunConfig(fragments=1, every_steps=1, limits=limits))
    talk.opens(0.0)
    talk.welcomed(0.0, step_time_s=1e-6)
    assert talk.core.next_deadline() == pytest.approx(min_wait_s), "for the optimizer state of a peer"
    learner = LearnerTalk(RunConfig(fragments=1, limits=limits)).trains()
    for n in range(1, 50):
        learner.receives(n * 1e-6, Pong(0))
    learner.handle(learner.core.next_deadline(), TimerFired())
    assert learner.core.next_deadline() - learner.core.state.now >= min_wait_s


@pytest.mark.parametrize("max_wait_s", [600.0, 45.0])
def test_no_derived_timeout_is_longer_than_most_wait_s(max_wait_s):
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(max_wait_s=max_wait_s)))
    talk.opens(0.0)
    talk.welcomed(0.0, step_time_s=1e6)
    talk.receives(0.1, PeerChosen(2))
    while talk.codes() != ["state-timeout"]:
        talk.fires(talk.core.next_deadline())
        talk.receives(talk.now + 0.01, Pong(0)) if talk.bodies(Ping) else None
        assert talk.now <= max_wait_s + 1.0
    assert talk.now == pytest.approx(max_wait_s)


@pytest.mark.parametrize("max_wait_s", [600.0, 100.0])
def test_joining_learner_is_disconnected_after_max_wait_s_of_silence(max_wait_s):
    talk = SyncerTalk(RunConfig(fragments=1, limits=Limits(max_wait_s=max_wait_s, max_publish_attempts=50)))
    one = talk.voice(1)
    one.hello(0.0)
    talk.persisted(0.0)
    one.acknowledges(0.0)
    while not talk.of(CloseConnection):
        talk.fires(talk.core.next_deadline())
        assert talk.now <= max_wait_s + 1.0
    assert talk.one(CloseConnection).reason == because("member-timed-out", max_wait_s)


@pytest.mark.parametrize("stall_threshold_s", [2.0, 20.0])
def test_timer_later_than_stall_threshold_s_means_that_the_syncer_stalled(stall_threshold_s):
    for late_s, excused in ((stall_threshold_s, False), (stall_threshold_s + 0.01, True)):
        talk = SyncerTalk(RunConfig(fragments=1, quorum=2, limits=Limits(stall_threshold_s=stall_threshold_s)))
        talk.joined(1)
        talk.handle(talk.core.next_deadline() + late_s, TimerFired())
        assert ("syncer-stalled" in talk.codes()) is excused


# --------------------------------------------------------------------------------------------------------------------
# Rounds


@pytest.mark.parametrize("tries", [1, 3])
def test_pull_tries_askings_and_then_the_round_is_abandoned(tries):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=10_000, limits=Limits(max_pull_attempts=tries)))
    one = talk.joined(1)
    asked: list[RoundId] = []

    def abandoned() -> bool:
        asked.extend(body.round for _, body in talk.bodies(Pull) if body.round.attempt == 1)
        return bool(talk.of(DiscardRound))

    keep_reporting(talk, abandoned, one)
    assert asked == [RoundId(0, 0, 1, 1)] * tries
    assert talk.one(DiscardRound).reason.code == "round-abandoned"


def test_steps_until_an_abandoned_round_is_due_double_up_to_h():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=8, quorum=1))
    one = talk.joined(1)
    opened: list[int] = []
    at = 0.0
    for session in range(2, 9):
        step = one.step
        while not talk.bodies(Pull):
            at += 1.0
            one.reports(at, one.step + 1)
        opened.append(one.step - step)
        talk.handle(at + 0.1, LearnerDisconnected(1, 1, one.session, "the link flaps"))
        assert talk.codes()[-1] == "round-quorum-lost"
        one.session = session
        one.hello(at + 0.2, training=True)
    assert opened == [1, 1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize("rounds_in_flight", [1, 3])
def test_rounds_in_flight_bounds_the_open_rounds_once_a_version_is_published(rounds_in_flight):
    config = RunConfig(fragments=6, every_steps=6, overlap_steps=1, rounds_in_flight=rounds_in_flight)
    talk = SyncerTalk(config)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.reports(10.0, step=10)
    assert talk.core.view().rounds_in_flight == rounds_in_flight
    assert len(talk.bodies(Pull)) == rounds_in_flight


def test_unacked_versions_are_bounded_by_the_number_of_fragments():
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=1, limits=Limits(initial_wait_s=500.0)))
    one, two = talk.joined(1), talk.joined(2)
    for step in range(1, 12):
        one.reports(float(step), step)
        two.reports(float(step), step)
        for p in list(one.pulls):
            one.contributes(step + 0.1, p)
            del one.pulls[p]
        while any(not isinstance(e, Persist) for e in talk.awaited):
            talk.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.2)
    assert talk.core.view().merges > 6
    assert talk.member(2).unacked == 2


# --------------------------------------------------------------------------------------------------------------------
# Links


@pytest.mark.parametrize("tries", [1, 5])
def test_connection_is_closed_after_max_publish_attempts(tries):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=10_000, quorum=2, limits=Limits(max_publish_attempts=tries)))
    one = talk.voice(1)
    one.hello(0.0)
    talk.persisted(0.0)
    sent = len(talk.bodies(Published))
    one.delivers(0.1, Ready(because("peer-new-run")))

    def dropped() -> bool:
        nonlocal sent
        sent += len(talk.bodies(Published))
        return bool(talk.of(CloseConnection))

    keep_reporting(talk, dropped, one)
    assert sent == tries
    assert talk.one(CloseConnection).reason == because("member-publish-unacked", 0, 0, tries)
    assert talk.member(1).state == "disconnected"


@pytest.mark.parametrize("tries", [1, 4])
def test_connection_is_closed_after_max_hello_attempts(tries):
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(max_hello_attempts=tries)))
    talk.opens(0.0)
    said = len(talk.bodies(Hello))
    while not talk.of(CloseConnection):
        talk.fires(talk.core.next_deadline())
        said += len(talk.bodies(Hello))
    assert said == tries
    assert talk.one(CloseConnection).reason == because("hello-unanswered", tries)
    assert talk.one(Dial).attempt == 2


@pytest.mark.parametrize("tries", [1, 3])
def test_ping_tries_unanswered_pings_and_then_the_link_is_dropped(tries):
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(max_ping_attempts=tries))).trains()
    pings: list[int] = []
    while not talk.of(CloseConnection):
        talk.fires(talk.core.next_deadline())
        pings += [body.serial for _, body in talk.bodies(Ping)]
        assert talk.core.training
    assert len(pings) == tries
    assert talk.one(CloseConnection).reason == because("ping-unanswered", tries)
    assert talk.of(Dial) != []


def test_one_answered_ping_keeps_the_link():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    for _ in range(50):
        talk.fires(talk.core.next_deadline())
        assert talk.of(CloseConnection) == []
        for _, ping in talk.bodies(Ping):
            talk.receives(talk.now + 0.1, Pong(ping.serial))


def test_the_first_redial_waits_backoff_first_s_and_its_spread():
    limits = Limits(initial_backoff_s=4.0)
    talk = LearnerTalk(RunConfig(fragments=1, limits=limits))
    talk.handle(0.1, DialFailed("nobody answers"))
    assert 4.0 <= talk.one(Dial).delay_s / 2.0 <= 5.0, "doubled once: the first dialing counts"
    persist = SyncerTalk(RunConfig(fragments=1, limits=limits))
    persist.voice(1).hello(0.0)
    persist.persist_failed(0.0)
    assert 4.0 <= persist.core.next_deadline() <= 5.0


@pytest.mark.parametrize("most_s", [30.0, 3.0])
def test_redials_wait_at_most_backoff_most_s_and_its_spread(most_s):
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(max_backoff_s=most_s)), learner=5)
    waits: list[float] = []
    for n in range(2_000):
        talk.core.handle(float(n), DialFailed("nobody answers"))
        waits.append(backoff_s(n + 1, 5, talk.config.limits))
    assert max(waits) <= most_s * 1.25
    talk.handle(3_000.0, DialFailed("nobody answers"))
    assert most_s <= talk.one(Dial).delay_s <= most_s * 1.25


def test_a_disk_that_stays_full_is_tried_at_most_every_backoff_most_s():
    limits = Limits(max_backoff_s=3.0)
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=10_000, limits=limits))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merged(1.2)
    failed: list[float] = []
    for _ in range(12):
        failed.append(talk.now)
        talk.persist_failed(talk.now)
        keep_reporting(talk, lambda: bool(talk.of(Persist)), one)
    gaps = [later - earlier for earlier, later in pairwise(failed)]
    assert gaps[0] <= 1.5, "the first time it is tried again soon"
    assert 3.0 <= min(gaps[-3:]) <= max(gaps) <= 3.0 * 1.25 + 1.0


# --------------------------------------------------------------------------------------------------------------------
# Members


def test_hello_beyond_max_learners_is_refused_and_retried():
    talk = SyncerTalk(RunConfig(fragments=1, limits=Limits(max_learners=2)))
    talk.joined(1)
    talk.joined(2)
    talk.voice(3).hello(1.0)
    talk.expect(talk.to(3, Refuse(because("refused-full", 2), 0, False)))
    talk.voice(2, incarnation=2).hello(2.0)
    assert "member-admitting" in talk.codes(), "a learner of the run may always come back"

    learner = LearnerTalk(RunConfig(fragments=1), learner=3)
    learner.opens(0.0)
    learner.receives(0.1, Refuse(because("refused-full", 2), 0, False))
    assert [type(e) for e in learner.effects] == [LogReason, CloseConnection, Dial]
    assert learner.core.state.mode.value == "new"


@pytest.mark.parametrize("strikes", [1, 3])
def test_strikes_bad_contributions_and_then_a_learner_is_quarantined(strikes):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=10_000, quorum=2, limits=Limits(max_strikes=strikes)))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    for n in range(strikes):
        assert talk.member(1).state == "live"
        one.contributes(1.1 + n / 10, problem="values are not finite")
        assert talk.member(1).strikes == n + 1
    assert talk.codes()[:2] == ["contribution-invalid", "member-quarantined"]
    assert talk.member(1).state == "quarantined"
    one.contributes(2.0)
    talk.expect()
    one.hello(2.1, training=True)
    assert talk.codes() == ["refused-quarantined"]
    talk.joined(1, at=3.0, incarnation=2)
    assert (talk.member(1).state, talk.member(1).strikes) == ("live", 0)


@pytest.mark.parametrize(
    "wild",
    [
        {"tokens": 201},
        {"steps": 3},
        {"steps": 1, "tokens": 200, "dropped": 1},
        {"trained": 50},
        {"copied_at": 0},
        {"steps": -1},
        {"tokens": -5},
    ],
)
def test_counters_that_cannot_be_are_refused(wild):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=10_000))
    one = talk.joined(1)
    one.reports(1.0, step=2)
    one.contributes(1.1, **wild)
    assert talk.codes() in (["contribution-implausible"], ["contribution-no-steps"])


@pytest.mark.parametrize("most", [1_000_000, 50])
def test_more_than_most_steps_per_report_is_a_strike(most):
    talk = SyncerTalk(RunConfig(fragments=1, limits=Limits(max_steps_per_report=most)))
    one = talk.joined(1)
    one.delivers(1.0, Report(most + 1, 100, 1.0))
    talk.expect()
    assert (talk.member(1).strikes, talk.member(1).step) == (1, 0)
    one.reports(2.0, step=most)
    assert talk.member(1).step == most


@pytest.mark.parametrize(
    "body",
    [Report(1, -1, 1.0), Report(1, 100, -1.0), Report(1, 100, float("nan")), Report(1, 100, float("inf"))],
)
def test_a_report_of_nonsense_is_a_strike_and_changes_nothing(body):
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.joined(1)
    one.delivers(1.0, body)
    view = talk.core.view()
    assert (talk.member(1).strikes, talk.member(1).step, view.trained, view.step_s) == (1, 0, 0, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state


@pytest.mark.parametrize("peers", [1, 3])
def test_learner_starts_with_fresh_optimizer_state_after_max_state_peers(peers):
    talk = LearnerTalk(RunConfig(fragments=1, warmup_steps=9, limits=Limits(max_state_peers=peers)))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(4,), step_time_s=1.0)
    tried = [body.tried_peers for _, body in talk.bodies(StateRequest)]
    talk.gets(0.1, 0, 4)
    for peer in range(2, 20):
        talk.receives(talk.now + 0.1, PeerChosen(peer))
        while not talk.bodies(StateRequest) and not talk.of(StartTraining):
            talk.fires(talk.core.next_deadline())
        tried += [body.tried_peers for _, body in talk.bodies(StateRequest)]
        if talk.of(StartTraining):
            break
    assert tried == [tuple(range(2, 2 + n)) for n in range(peers)]
    assert talk.one(StartTraining).warmup_steps == 9
    assert str(talk.one(StartTraining).state_source).endswith(
        f"requested optimizer state from {peers} learners, received none"
    )


def test_state_transfer_beyond_the_maximum_replaces_the_oldest():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    for to in range(2, 2 + MAX_STATE_TRANSFERS + 1):
        talk.receives(0.1, ProvideState(to, 1, (0,)))
    assert talk.core.state.ignored == {"too-many-state-transfers": 1}
    talk.steps(1.0)
    assert [body.target for _, body in talk.bodies(OptimizerState)] == list(range(3, 3 + MAX_STATE_TRANSFERS))


@pytest.mark.parametrize(("steps_s", "is_given"), [(0.4, True), (1.2, False)])
def test_peer_keeps_a_state_transfer_for_the_timeout_of_the_joining_learner(steps_s, is_given):
    """H steps of the run, at least `min_wait_s`; its own steps may be quicker, and its link slower than H of them."""
    limits = Limits(min_wait_s=4.0)
    talk = LearnerTalk(RunConfig(fragments=1, every_steps=5, limits=limits)).trains()
    talk.steps(0.4, step_time_s=0.4)
    talk.receives(0.5, ProvideState(2, 1, (9,)))
    for step in range(1, 8):
        talk.steps(0.5 + step * steps_s / 2, step_time_s=0.4)
    talk.gets(0.5 + 8 * steps_s / 2, 0, 9)
    talk.steps(0.5 + 9 * steps_s / 2, step_time_s=0.4)
    assert bool(talk.bodies(OptimizerState)) is is_given


# --------------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("tries", [1, 2])
def test_final_tries_attempts_at_the_last_round_and_then_it_is_skipped(tries):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, limits=Limits(max_final_attempts=tries)))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.acknowledges(1.2)
    one.reports(2.0, step=3)
    talk.handle(2.1, FinishRequested())
    discarded: list[RoundId] = []

    def skipped() -> bool:
        discarded.extend(effect.round for effect in talk.of(DiscardRound))
        return "final-skipped" in talk.codes()

    keep_reporting(talk, skipped, one)
    assert discarded == [RoundId(0, 1, 1, attempt) for attempt in range(1, tries + 1)]


@pytest.mark.parametrize("tries", [1, 5])
def test_finish_tries_sendings_of_the_manifest_and_then_a_learner_is_left_behind(tries):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2, limits=Limits(max_finish_attempts=tries)))
    one = talk.joined(1)
    talk.handle(1.0, FinishRequested())
    keep_reporting(talk, lambda: bool(talk.of(Persist)), one)
    talk.persisted(talk.now)
    sent = len(talk.bodies(Finish))

    def halted() -> bool:
        nonlocal sent
        sent += len(talk.bodies(Finish))
        return bool(talk.of(Halt))

    keep_reporting(talk, halted, one, most_s=20_000)
    assert sent == tries
    assert talk.one(CloseConnection).reason == because("finish-unacked", 1)
    assert talk.one(Halt).reason == because("finish-done", 0, 1)


def test_the_wait_for_the_parts_of_a_snapshot_is_at_most_most_wait_s():
    talk = SyncerTalk(RunConfig(fragments=1, quorum=2, limits=Limits(max_wait_s=40.0)))
    one = talk.joined(1)
    talk.handle(1.0, SnapshotRequested())
    at = keep_reporting(talk, lambda: "snapshot-left-out" in talk.codes(), one)
    assert at <= 42.0
    assert (
        talk.codes() == ["snapshot-learner-disconnected", "snapshot-left-out", "snapshot-abandoned"]
        or "snapshot-abandoned" in talk.codes()
    )
