"""Tests that reach every limit of `Limits`; reaching one is always a visible event."""

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
from tests.core.harness import FakeLearner, LearnerHarness, SyncerHarness

COVERED = {
    "initial_wait_s": "test_timeout_without_measurements_is_initial_wait_s",
    "min_wait_s": "test_no_derived_timeout_is_shorter_than_min_wait_s",
    "max_wait_s": "test_no_derived_timeout_is_longer_than_max_wait_s",
    "stall_threshold_s": "test_timer_later_than_stall_threshold_s_means_that_the_syncer_stalled",
    "max_pull_attempts": "test_round_is_abandoned_after_max_pull_attempts",
    "max_publish_attempts": "test_connection_is_closed_after_max_publish_attempts",
    "max_hello_attempts": "test_connection_is_closed_after_max_hello_attempts",
    "max_ping_attempts": "test_connection_is_closed_after_max_ping_attempts",
    "max_state_peers": "test_learner_starts_with_fresh_optimizer_state_after_max_state_peers",
    "max_final_attempts": "test_last_round_is_skipped_after_max_final_attempts",
    "max_finish_attempts": "test_run_ends_without_a_learner_after_max_finish_attempts",
    "max_strikes": "test_learner_is_quarantined_after_max_strikes",
    "lost_after_s": "test_learner_is_lost_after_lost_after_s",
    "initial_backoff_s": "test_first_redial_waits_initial_backoff_s_and_its_jitter",
    "max_backoff_s": "test_redial_delay_is_at_most_max_backoff_s_and_its_jitter",
    "max_learners": "test_hello_beyond_max_learners_is_refused_and_retried",
    "max_steps_per_report": "test_more_than_max_steps_per_report_is_a_strike",
}


def test_every_limit_has_a_test_that_reaches_it():
    assert set(COVERED) == {f.name for f in dataclasses.fields(Limits)}
    assert set(COVERED.values()) <= set(globals())


def keep_reporting(harness: SyncerHarness, until, *fakes: FakeLearner, max_s: float = 5_000.0) -> float:
    """Report every second, so that no learner is suspected, until the condition holds."""
    at = harness.now
    while True:
        at += 1.0
        for fake in fakes:
            fake.reports(at, fake.step + 1)
            if until():
                return at
        assert at < max_s, "the condition never held; the story is printed above"


@pytest.mark.parametrize("lost_after_s", [21600.0, 7.0])
def test_learner_is_lost_after_lost_after_s(lost_after_s):
    harness = SyncerHarness(RunConfig(fragments=1, limits=Limits(lost_after_s=lost_after_s)))
    one = harness.joined(1)
    harness.handle(1.0, LearnerDisconnected(one.id, 1, 1, "the host is gone"))
    harness.fire_timers(0.99 + lost_after_s)
    assert harness.member(1).state == "disconnected"
    harness.fire_timers(1.0 + lost_after_s)
    assert harness.member(1).state == "lost"


# --------------------------------------------------------------------------------------------------------------------
# Timeouts


@pytest.mark.parametrize("initial_wait_s", [30.0, 7.0])
def test_timeout_without_measurements_is_initial_wait_s(initial_wait_s):
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(initial_wait_s=initial_wait_s)))
    harness.opens(0.0)
    assert harness.core.next_deadline() == initial_wait_s
    syncer = SyncerHarness(RunConfig(fragments=1, limits=Limits(initial_wait_s=initial_wait_s)))
    syncer.add_learner(1).hello(0.0)
    syncer.persisted(0.0)
    assert syncer.core.next_deadline() == initial_wait_s


@pytest.mark.parametrize("min_wait_s", [0.25, 2.0])
def test_no_derived_timeout_is_shorter_than_min_wait_s(min_wait_s):
    """Steps take 1 us, and a learner receives a message every microsecond."""
    limits = Limits(min_wait_s=min_wait_s)
    harness = LearnerHarness(RunConfig(fragments=1, every_steps=1, limits=limits))
    harness.opens(0.0)
    harness.welcomed(0.0, step_time_s=1e-6)
    assert harness.core.next_deadline() == pytest.approx(min_wait_s), "for the optimizer state of a peer"
    learner = LearnerHarness(RunConfig(fragments=1, limits=limits)).trains()
    for n in range(1, 50):
        learner.receives(n * 1e-6, Pong(0))
    learner.handle(learner.core.next_deadline(), TimerFired())
    assert learner.core.next_deadline() - learner.core.state.now >= min_wait_s


@pytest.mark.parametrize("max_wait_s", [600.0, 45.0])
def test_no_derived_timeout_is_longer_than_max_wait_s(max_wait_s):
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(max_wait_s=max_wait_s)))
    harness.opens(0.0)
    harness.welcomed(0.0, step_time_s=1e6)
    harness.receives(0.1, PeerChosen(2))
    while harness.codes() != ["state-timeout"]:
        harness.fire_timers(harness.core.next_deadline())
        harness.receives(harness.now + 0.01, Pong(0)) if harness.bodies(Ping) else None
        assert harness.now <= max_wait_s + 1.0
    assert harness.now == pytest.approx(max_wait_s)


@pytest.mark.parametrize("max_wait_s", [600.0, 100.0])
def test_joining_learner_is_disconnected_after_max_wait_s_of_silence(max_wait_s):
    harness = SyncerHarness(RunConfig(fragments=1, limits=Limits(max_wait_s=max_wait_s, max_publish_attempts=50)))
    one = harness.add_learner(1)
    one.hello(0.0)
    harness.persisted(0.0)
    one.acknowledges(0.0)
    while not harness.of(CloseConnection):
        harness.fire_timers(harness.core.next_deadline())
        assert harness.now <= max_wait_s + 1.0
    assert harness.one(CloseConnection).reason == because("member-timed-out", max_wait_s)


@pytest.mark.parametrize("stall_threshold_s", [2.0, 20.0])
def test_timer_later_than_stall_threshold_s_means_that_the_syncer_stalled(stall_threshold_s):
    for late_s, excused in ((stall_threshold_s, False), (stall_threshold_s + 0.01, True)):
        harness = SyncerHarness(RunConfig(fragments=1, quorum=2, limits=Limits(stall_threshold_s=stall_threshold_s)))
        harness.joined(1)
        harness.handle(harness.core.next_deadline() + late_s, TimerFired())
        assert ("syncer-stalled" in harness.codes()) is excused


# --------------------------------------------------------------------------------------------------------------------
# Rounds


@pytest.mark.parametrize("attempts", [1, 3])
def test_round_is_abandoned_after_max_pull_attempts(attempts):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=10_000, limits=Limits(max_pull_attempts=attempts)))
    one = harness.joined(1)
    pulls: list[RoundId] = []

    def abandoned() -> bool:
        pulls.extend(body.round for _, body in harness.bodies(Pull) if body.round.attempt == 1)
        return bool(harness.of(DiscardRound))

    keep_reporting(harness, abandoned, one)
    assert pulls == [RoundId(0, 0, 1, 1)] * attempts
    assert harness.one(DiscardRound).reason.code == "round-abandoned"


def test_steps_until_an_abandoned_round_is_due_double_up_to_h():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=8, quorum=1))
    one = harness.joined(1)
    opened: list[int] = []
    at = 0.0
    for session in range(2, 9):
        step = one.step
        while not harness.bodies(Pull):
            at += 1.0
            one.reports(at, one.step + 1)
        opened.append(one.step - step)
        harness.handle(at + 0.1, LearnerDisconnected(1, 1, one.session, "the link flaps"))
        assert harness.codes()[-1] == "round-quorum-lost"
        one.session = session
        one.hello(at + 0.2, training=True)
    assert opened == [1, 1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize("rounds_in_flight", [1, 3])
def test_rounds_in_flight_bounds_the_open_rounds_once_a_version_is_published(rounds_in_flight):
    config = RunConfig(fragments=6, every_steps=6, overlap_steps=1, rounds_in_flight=rounds_in_flight)
    harness = SyncerHarness(config)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.reports(10.0, step=10)
    assert harness.core.view().rounds_in_flight == rounds_in_flight
    assert len(harness.bodies(Pull)) == rounds_in_flight


def test_unacked_versions_are_bounded_by_the_number_of_fragments():
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=1, limits=Limits(initial_wait_s=500.0)))
    one, two = harness.joined(1), harness.joined(2)
    for step in range(1, 12):
        one.reports(float(step), step)
        two.reports(float(step), step)
        for p in list(one.pulls):
            one.contributes(step + 0.1, p)
            del one.pulls[p]
        while any(not isinstance(e, Persist) for e in harness.awaited):
            harness.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.2)
    assert harness.core.view().merges > 6
    assert harness.member(2).unacked == 2


# --------------------------------------------------------------------------------------------------------------------
# Links


@pytest.mark.parametrize("attempts", [1, 5])
def test_connection_is_closed_after_max_publish_attempts(attempts):
    harness = SyncerHarness(
        RunConfig(fragments=1, every_steps=10_000, quorum=2, limits=Limits(max_publish_attempts=attempts))
    )
    one = harness.add_learner(1)
    one.hello(0.0)
    harness.persisted(0.0)
    sent = len(harness.bodies(Published))
    one.delivers(0.1, Ready(because("peer-new-run")))

    def dropped() -> bool:
        nonlocal sent
        sent += len(harness.bodies(Published))
        return bool(harness.of(CloseConnection))

    keep_reporting(harness, dropped, one)
    assert sent == attempts
    assert harness.one(CloseConnection).reason == because("member-publish-unacked", 0, 0, attempts)
    assert harness.member(1).state == "disconnected"


@pytest.mark.parametrize("attempts", [1, 4])
def test_connection_is_closed_after_max_hello_attempts(attempts):
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(max_hello_attempts=attempts)))
    harness.opens(0.0)
    sent = len(harness.bodies(Hello))
    while not harness.of(CloseConnection):
        harness.fire_timers(harness.core.next_deadline())
        sent += len(harness.bodies(Hello))
    assert sent == attempts
    assert harness.one(CloseConnection).reason == because("hello-unanswered", attempts)
    assert harness.one(Dial).attempt == 2


@pytest.mark.parametrize("attempts", [1, 3])
def test_connection_is_closed_after_max_ping_attempts(attempts):
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(max_ping_attempts=attempts))).trains()
    pings: list[int] = []
    while not harness.of(CloseConnection):
        harness.fire_timers(harness.core.next_deadline())
        pings += [body.serial for _, body in harness.bodies(Ping)]
        assert harness.core.training
    assert len(pings) == attempts
    assert harness.one(CloseConnection).reason == because("ping-unanswered", attempts)
    assert harness.of(Dial) != []


def test_one_answered_ping_keeps_the_link():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    for _ in range(50):
        harness.fire_timers(harness.core.next_deadline())
        assert harness.of(CloseConnection) == []
        for _, ping in harness.bodies(Ping):
            harness.receives(harness.now + 0.1, Pong(ping.serial))


def test_first_redial_waits_initial_backoff_s_and_its_jitter():
    limits = Limits(initial_backoff_s=4.0)
    harness = LearnerHarness(RunConfig(fragments=1, limits=limits))
    harness.handle(0.1, DialFailed("connection refused"))
    assert 4.0 <= harness.one(Dial).delay_s / 2.0 <= 5.0, "doubled once: the first dial counts"
    persist = SyncerHarness(RunConfig(fragments=1, limits=limits))
    persist.add_learner(1).hello(0.0)
    persist.persist_failed(0.0)
    assert 4.0 <= persist.core.next_deadline() <= 5.0


@pytest.mark.parametrize("max_s", [30.0, 3.0])
def test_redial_delay_is_at_most_max_backoff_s_and_its_jitter(max_s):
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(max_backoff_s=max_s)), learner=5)
    waits: list[float] = []
    for n in range(2_000):
        harness.core.handle(float(n), DialFailed("connection refused"))
        waits.append(backoff_s(n + 1, 5, harness.config.limits))
    assert max(waits) <= max_s * 1.25
    harness.handle(3_000.0, DialFailed("connection refused"))
    assert max_s <= harness.one(Dial).delay_s <= max_s * 1.25


def test_full_disk_is_retried_at_most_every_max_backoff_s():
    limits = Limits(max_backoff_s=3.0)
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=10_000, limits=limits))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merged(1.2)
    failed: list[float] = []
    for _ in range(12):
        failed.append(harness.now)
        harness.persist_failed(harness.now)
        keep_reporting(harness, lambda: bool(harness.of(Persist)), one)
    gaps = [later - earlier for earlier, later in pairwise(failed)]
    assert gaps[0] <= 1.5, "the first retry is early"
    assert 3.0 <= min(gaps[-3:]) <= max(gaps) <= 3.0 * 1.25 + 1.0


# --------------------------------------------------------------------------------------------------------------------
# Members


def test_hello_beyond_max_learners_is_refused_and_retried():
    harness = SyncerHarness(RunConfig(fragments=1, limits=Limits(max_learners=2)))
    harness.joined(1)
    harness.joined(2)
    harness.add_learner(3).hello(1.0)
    harness.expect(harness.to(3, Refuse(because("refused-full", 2), 0, False)))
    harness.add_learner(2, incarnation=2).hello(2.0)
    assert "member-admitting" in harness.codes(), "a learner of the run may always reconnect"

    learner = LearnerHarness(RunConfig(fragments=1), learner=3)
    learner.opens(0.0)
    learner.receives(0.1, Refuse(because("refused-full", 2), 0, False))
    assert [type(e) for e in learner.effects] == [LogReason, CloseConnection, Dial]
    assert learner.core.state.mode.value == "new"


@pytest.mark.parametrize("strikes", [1, 3])
def test_learner_is_quarantined_after_max_strikes(strikes):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=10_000, quorum=2, limits=Limits(max_strikes=strikes)))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    for n in range(strikes):
        assert harness.member(1).state == "live"
        one.contributes(1.1 + n / 10, problem="values are not finite")
        assert harness.member(1).strikes == n + 1
    assert harness.codes()[:2] == ["contribution-invalid", "member-quarantined"]
    assert harness.member(1).state == "quarantined"
    one.contributes(2.0)
    harness.expect()
    one.hello(2.1, training=True)
    assert harness.codes() == ["refused-quarantined"]
    harness.joined(1, at=3.0, incarnation=2)
    assert (harness.member(1).state, harness.member(1).strikes) == ("live", 0)


@pytest.mark.parametrize(
    "counters",
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
def test_impossible_counters_are_refused(counters):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=10_000))
    one = harness.joined(1)
    one.reports(1.0, step=2)
    one.contributes(1.1, **counters)
    assert harness.codes() in (["contribution-implausible"], ["contribution-no-steps"])


@pytest.mark.parametrize("limit", [1_000_000, 50])
def test_more_than_max_steps_per_report_is_a_strike(limit):
    harness = SyncerHarness(RunConfig(fragments=1, limits=Limits(max_steps_per_report=limit)))
    one = harness.joined(1)
    one.delivers(1.0, Report(limit + 1, 100, 1.0))
    harness.expect()
    assert (harness.member(1).strikes, harness.member(1).step) == (1, 0)
    one.reports(2.0, step=limit)
    assert harness.member(1).step == limit


@pytest.mark.parametrize(
    "body",
    [Report(1, -1, 1.0), Report(1, 100, -1.0), Report(1, 100, float("nan")), Report(1, 100, float("inf"))],
)
def test_invalid_report_is_a_strike_and_changes_nothing(body):
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.joined(1)
    one.delivers(1.0, body)
    view = harness.core.view()
    assert (harness.member(1).strikes, harness.member(1).step, view.trained, view.step_s) == (1, 0, 0, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state


@pytest.mark.parametrize("peers", [1, 3])
def test_learner_starts_with_fresh_optimizer_state_after_max_state_peers(peers):
    harness = LearnerHarness(RunConfig(fragments=1, warmup_steps=9, limits=Limits(max_state_peers=peers)))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(4,), step_time_s=1.0)
    tried = [body.tried_peers for _, body in harness.bodies(StateRequest)]
    harness.published(0.1, 0, 4)
    for peer in range(2, 20):
        harness.receives(harness.now + 0.1, PeerChosen(peer))
        while not harness.bodies(StateRequest) and not harness.of(StartTraining):
            harness.fire_timers(harness.core.next_deadline())
        tried += [body.tried_peers for _, body in harness.bodies(StateRequest)]
        if harness.of(StartTraining):
            break
    assert tried == [tuple(range(2, 2 + n)) for n in range(peers)]
    assert harness.one(StartTraining).warmup_steps == 9
    assert str(harness.one(StartTraining).state_source).endswith(
        f"requested optimizer state from {peers} learners, received none"
    )


def test_state_transfer_beyond_the_maximum_replaces_the_oldest():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    for to in range(2, 2 + MAX_STATE_TRANSFERS + 1):
        harness.receives(0.1, ProvideState(to, 1, (0,)))
    assert harness.core.state.ignored == {"too-many-state-transfers": 1}
    harness.steps(1.0)
    assert [body.target for _, body in harness.bodies(OptimizerState)] == list(range(3, 3 + MAX_STATE_TRANSFERS))


@pytest.mark.parametrize(("steps_s", "is_sent"), [(0.4, True), (1.2, False)])
def test_peer_keeps_a_state_transfer_for_the_timeout_of_the_joining_learner(steps_s, is_sent):
    """The timeout is H steps of the run, at least `min_wait_s`, although steps of the peer may be shorter."""
    limits = Limits(min_wait_s=4.0)
    harness = LearnerHarness(RunConfig(fragments=1, every_steps=5, limits=limits)).trains()
    harness.steps(0.4, step_time_s=0.4)
    harness.receives(0.5, ProvideState(2, 1, (9,)))
    for step in range(1, 8):
        harness.steps(0.5 + step * steps_s / 2, step_time_s=0.4)
    harness.published(0.5 + 8 * steps_s / 2, 0, 9)
    harness.steps(0.5 + 9 * steps_s / 2, step_time_s=0.4)
    assert bool(harness.bodies(OptimizerState)) is is_sent


# --------------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("attempts", [1, 2])
def test_last_round_is_skipped_after_max_final_attempts(attempts):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, limits=Limits(max_final_attempts=attempts)))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.acknowledges(1.2)
    one.reports(2.0, step=3)
    harness.handle(2.1, FinishRequested())
    discarded: list[RoundId] = []

    def skipped() -> bool:
        discarded.extend(effect.round for effect in harness.of(DiscardRound))
        return "final-skipped" in harness.codes()

    keep_reporting(harness, skipped, one)
    assert discarded == [RoundId(0, 1, 1, attempt) for attempt in range(1, attempts + 1)]


@pytest.mark.parametrize("attempts", [1, 5])
def test_run_ends_without_a_learner_after_max_finish_attempts(attempts):
    harness = SyncerHarness(
        RunConfig(fragments=1, every_steps=4, quorum=2, limits=Limits(max_finish_attempts=attempts))
    )
    one = harness.joined(1)
    harness.handle(1.0, FinishRequested())
    keep_reporting(harness, lambda: bool(harness.of(Persist)), one)
    harness.persisted(harness.now)
    sent = len(harness.bodies(Finish))

    def halted() -> bool:
        nonlocal sent
        sent += len(harness.bodies(Finish))
        return bool(harness.of(Halt))

    keep_reporting(harness, halted, one, max_s=20_000)
    assert sent == attempts
    assert harness.one(CloseConnection).reason == because("finish-unacked", 1)
    assert harness.one(Halt).reason == because("finish-done", 0, 1)


def test_wait_for_snapshot_parts_is_at_most_max_wait_s():
    harness = SyncerHarness(RunConfig(fragments=1, quorum=2, limits=Limits(max_wait_s=40.0)))
    one = harness.joined(1)
    harness.handle(1.0, SnapshotRequested())
    at = keep_reporting(harness, lambda: "snapshot-left-out" in harness.codes(), one)
    assert at <= 42.0
    assert (
        harness.codes() == ["snapshot-learner-disconnected", "snapshot-left-out", "snapshot-abandoned"]
        or "snapshot-abandoned" in harness.codes()
    )
