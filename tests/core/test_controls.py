"""Operator controls at the cores: pause, resume, drain, quorum and grace margin."""

from __future__ import annotations

import pytest

from atoll.core.policy import find_control_problem
from atoll.core.protocol import (
    CloseConnection,
    ControlRequested,
    Drain,
    Finish,
    FinishRequested,
    LearnerDisconnected,
    Left,
    OpenGrace,
    PausedAck,
    Persist,
    Ping,
    Pull,
    SetPaused,
    SnapshotPart,
    SnapshotRequested,
    Started,
    Stop,
)
from atoll.core.reasons import because
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import ControlKind, Limits, RunConfig
from tests.core.harness import LearnerHarness, SyncerHarness

SMALL = RunConfig(fragments=1, every_steps=2, grace_margin=0.0)


def request(harness: SyncerHarness, at: float, control: ControlKind, value: float | None = None) -> None:
    harness.handle(at, ControlRequested(control, value, "ada"))


def paused(learners: int = 2, config: RunConfig = SMALL) -> SyncerHarness:
    """Return a paused run: every learner has merged its first step and acknowledged the pause."""
    harness = SyncerHarness(config)
    for learner in range(1, learners + 1):
        harness.joined(learner)
    for fake in harness.learners.values():
        fake.reports(1.0, step=1)
    for fake in harness.learners.values():
        if fake.pulls and harness.fragment(0).phase in ("pulling", "grace"):
            fake.contributes(1.1)
    harness.merges_and_persists(1.2)
    for fake in harness.learners.values():
        fake.acknowledges(1.3)
    request(harness, 1.5, "pause")
    for fake in harness.learners.values():
        fake.delivers(1.6, PausedAck(1, True))
    return harness


# --------------------------------------------------------------------------------------------------------------------
# The syncer


def test_due_round_opens_only_after_resume():
    harness = paused()
    harness.learners[1].reports(3.0, step=4)
    assert harness.bodies(Pull) == []
    assert harness.fragment(0).reason == "the run is paused"
    assert harness.member(1).reason == "paused with the run"
    assert harness.core.view().paused
    request(harness, 4.0, "resume")
    assert harness.bodies(SetPaused) == [(1, SetPaused(2, False)), (2, SetPaused(2, False))]
    assert [learner for learner, _ in harness.bodies(Pull)] == [1]
    assert "resumed by ada" in harness.sentences


def test_repeated_pause_request_is_logged_once():
    harness = paused()
    request(harness, 2.0, "pause")
    harness.expect()
    request(harness, 3.0, "resume")
    request(harness, 3.01, "resume")
    harness.expect()


def test_unanswered_control_request_is_retried_and_then_closes_the_connection():
    harness = SyncerHarness(SMALL)
    harness.joined(1)
    request(harness, 1.0, "pause")
    sent = [*harness.bodies(SetPaused), *_bodies(harness.fire_timers(600.0), SetPaused)]
    assert sent == [(1, SetPaused(1, True))] * SMALL.limits.max_publish_attempts
    assert harness.of(CloseConnection)[0].reason == because(
        "member-control-unacked", "SetPaused", SMALL.limits.max_publish_attempts
    )


def _bodies(effects: list[object], kind: type) -> list[tuple[int, object]]:
    sent = [effect.envelope for effect in effects if hasattr(effect, "envelope")]
    return [(envelope.learner, envelope.body) for envelope in sent if type(envelope.body) is kind]


def test_ack_of_an_older_pause_does_not_ack_the_newest():
    """(1) Paused, (2) resumed before any reply, (3) the reply to 1 arrives: 2 must still be sent."""
    harness = SyncerHarness(SMALL)
    one = harness.joined(1)
    request(harness, 1.0, "pause")
    request(harness, 1.1, "resume")
    one.delivers(1.2, PausedAck(1, True))
    harness.fire_timers(30.0)
    assert (1, SetPaused(2, False)) in harness.bodies(SetPaused)
    one.delivers(30.0, PausedAck(2, False))
    assert _bodies(harness.fire_timers(200.0), SetPaused) == []


def test_paused_run_suspects_no_learner_and_measures_no_gap():
    config = RunConfig(fragments=1, every_steps=2, limits=Limits(initial_wait_s=5.0))
    harness = paused(config=config)
    one = harness.learners[1]
    for step in range(2, 12):
        one.reports(1.6 + 0.1 * step, step=step, step_time_s=0.1)
    limit = harness.core.membership.silence_limit(harness.core.state.members[1])
    high = harness.core.state.members[1].message_gap.high()
    at = 4.0
    for _ in range(20):
        at += 4.0
        one.delivers(at, Ping(1))
        harness.learners[2].delivers(at, Ping(1))
        harness.fire_timers(at)
    assert harness.member(1).state == "live"
    assert limit == 5.0
    assert harness.core.state.members[1].message_gap.high() == high
    request(harness, at, "resume")
    one.delivers(at + 0.01, PausedAck(2, False))
    one.reports(at + 0.11, step=12, step_time_s=0.1)
    assert harness.core.state.members[1].message_gap.high() < 4.0


def test_joining_and_returning_learners_receive_the_pause_and_its_end():
    harness = paused()
    three = harness.add_learner(3)
    three.hello(5.0)
    harness.persisted(5.0)
    assert harness.bodies(SetPaused) == [(3, SetPaused(1, True))]
    harness.handle(6.0, LearnerDisconnected(1, 1, 1, "reset"))
    request(harness, 7.0, "resume")
    assert [learner for learner, _ in harness.bodies(SetPaused)] == [2, 3]
    one = harness.learners[1]
    one.session = 2
    one.hello(7.01, training=True)
    assert harness.bodies(SetPaused) == [(1, SetPaused(2, False))]


def test_run_that_was_never_paused_sends_no_pause():
    harness = SyncerHarness(SMALL)
    harness.joined(1)
    assert not any("SetPaused" in line for line in harness.story)


def test_snapshot_of_a_paused_run_is_complete():
    harness = paused()
    harness.handle(2.0, SnapshotRequested())
    for fake in harness.learners.values():
        fake.marker = harness.core.state.marker
        fake.delivers(2.1, SnapshotPart(harness.core.state.marker, fake.step, fake.trained, (1,), ()))
    assert [type(e.record).__name__ for e in harness.of(Persist)] == ["SnapshotRecord"]


def test_finish_ends_the_pause():
    harness = paused()
    harness.handle(5.0, FinishRequested())
    assert harness.bodies(SetPaused) == [(1, SetPaused(2, False)), (2, SetPaused(2, False))]
    assert "no longer paused: the run ends" in harness.sentences
    assert not harness.core.view().paused
    request(harness, 5.01, "pause")
    harness.expect()


def test_changed_quorum_applies_to_rounds_without_quorum():
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=2, overlap_steps=2, grace_margin=0.5, quorum=2))
    fakes = [harness.joined(learner) for learner in (1, 2, 3)]
    for fake in fakes:
        fake.reports(1.0, step=1)
    for fake in fakes[:2]:
        fake.contributes(1.1)
    harness.awaited.clear()
    assert harness.fragment(0).phase in ("grace", "merging")
    for fake in fakes:
        fake.reports(2.0, step=2)
    fakes[0].contributes(2.1, fragment=1)
    request(harness, 3.0, "quorum", 3)
    assert harness.core.view().quorum == 3
    assert harness.fragment(1).phase == "pulling"
    fakes[1].contributes(3.1, fragment=1)
    assert harness.of(OpenGrace) == []
    request(harness, 3.2, "quorum", 1)
    assert [effect.round.fragment for effect in harness.of(OpenGrace)] == [1]


def test_changed_grace_margin_applies_to_the_next_window():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, overlap_steps=4, grace_margin=0.5))
    one, two = harness.joined(1), harness.joined(2)
    for at in (1.0, 4.0, 7.0):
        request(harness, at, "grace", 0.0 if at == 7.0 else 0.5)
        one.reports(at, step=int(at))
        two.reports(at, step=int(at))
        one.contributes(at + 0.1)
        window = harness.one(OpenGrace)
        if window.window_s:
            two.contributes(at + 0.2)
        harness.merges_and_persists(at + 0.3)
        one.acknowledges(at + 0.4)
        two.acknowledges(at + 0.4)
    assert "quorum 1; the grace window is off" in harness.sentences
    assert window.window_s == 0.0


def test_drain_is_sent_until_the_learner_leaves_and_it_may_return():
    harness = paused()
    request(harness, 2.0, "resume")
    request(harness, 3.0, "drain", 2)
    assert harness.bodies(Drain) == [(2, Drain("drained by ada"))]
    assert _bodies(harness.fire_timers(3.5), Drain) == [(2, Drain("drained by ada"))]
    harness.learners[2].delivers(4.0, Left("drained by ada"))
    assert harness.member(2).state == "left"
    harness.persisted(4.1)
    again = harness.joined(2, 10.0, incarnation=2)
    assert again.welcome is not None
    assert harness.member(2).state == "live"
    assert _bodies(harness.fire_timers(40.0), Drain) == []


def test_drain_applies_to_learners_that_reconnect_or_restart():
    harness = paused()
    harness.handle(2.0, LearnerDisconnected(2, 1, 1, "reset"))
    request(harness, 3.0, "drain", 2)
    assert harness.bodies(Drain) == []
    harness.add_learner(2, incarnation=2).hello(4.0)
    harness.persisted(4.0)
    assert harness.bodies(Drain) == [(2, Drain("drained by ada"))]


@pytest.mark.parametrize("learner", [3, 7])
def test_drain_of_non_member_changes_nothing(learner):
    harness = paused(3)
    harness.learners[3].delivers(2.0, Left("its loop ended"))
    request(harness, 3.0, "drain", learner)
    harness.expect()


def test_restarted_syncer_receives_controls_before_learners_join():
    harness = paused().restarted(10.0)
    request(harness, 10.0, "pause")
    one = harness.add_learner(1, 1, 2)
    one.received, one.step, one.trained = {0: 1}, 1, 100
    one.hello(11.0, training=True)
    assert harness.bodies(SetPaused) == [(1, SetPaused(1, True))]


def test_invalid_control_request_does_not_reach_the_core():
    core = SyncerCore(SMALL, epoch=1)
    core.handle(0.0, Started())
    with pytest.raises(AssertionError, match="the quorum is a whole number from 1 to 1024, got 0"):
        core.handle(1.0, ControlRequested("quorum", 0, "ada"))


@pytest.mark.parametrize(
    ("control", "value", "problem"),
    [
        ("pause", None, None),
        ("resume", None, None),
        ("pause", 1, "pause takes no value"),
        ("quorum", 1, None),
        ("quorum", 1024, None),
        ("quorum", 1025, "from 1 to 1024"),
        ("quorum", True, "from 1 to 1024"),
        ("grace", 0, None),
        ("grace", 0.99, None),
        ("grace", 1, "to below 1"),
        ("grace", float("nan"), "to below 1"),
        ("drain", 1, None),
        ("drain", 0, "the number of a learner"),
        ("stop", None, "unknown control 'stop'"),
    ],
)
def test_find_control_problem(control, value, problem):
    found = find_control_problem(control, value, Limits())
    assert (found is None) if problem is None else problem in (found or "")


# --------------------------------------------------------------------------------------------------------------------
# The learner


def test_paused_learner_pings_often_enough_and_measures_no_gap():
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(initial_wait_s=8.0))).trains()
    for n in range(8):
        harness.receives(0.5 * n, SetPaused(n + 1, False))
    harness.receives(4.0, SetPaused(9, True))
    high = harness.core.state.message_gap.high()
    harness.fire_timers(6.1)
    assert [type(effect.envelope.body).__name__ for effect in harness.effects] == ["Ping"]
    harness.receives(100.0, SetPaused(10, False))
    assert harness.core.state.message_gap.high() == high
    assert not harness.core.state.paused


def test_learner_that_joins_a_paused_run_starts_paused():
    harness = LearnerHarness(SMALL)
    harness.opens(0.0)
    harness.welcomed(0.1)
    harness.receives(0.2, SetPaused(1, True))
    assert harness.core.state.paused
    harness.published(0.3, 0, 0)
    assert harness.core.has_boundary_work


def test_learner_that_is_drained_before_it_trains_leaves():
    harness = LearnerHarness(SMALL)
    harness.opens(0.0)
    harness.welcomed(0.1)
    harness.receives(0.2, Drain("drained by ada"))
    reason = because("learner-left-on-request", "drained by ada")
    harness.expect(harness.sends(Left("drained by ada")), Stop(reason))


def test_finishing_run_is_not_paused():
    harness = LearnerHarness(SMALL).trains()
    harness.receives(1.0, SetPaused(1, True))
    harness.steps(1.5)
    harness.receives(2.0, Finish((1,), 1))
    assert not harness.core.state.paused
    assert harness.core.training
    harness.receives(2.5, SetPaused(2, True))
    harness.expect(harness.sends(PausedAck(2, False)))
