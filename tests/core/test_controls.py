"""What operators ask of a run, as the cores take it."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk

SMALL = RunConfig(fragments=1, every_steps=2, grace_margin=0.0)


def wants(talk: SyncerTalk, at: float, what: ControlKind, value: float | None = None) -> None:
    talk.handle(at, ControlRequested(what, value, "ada"))


def paused(learners: int = 2, config: RunConfig = SMALL) -> SyncerTalk:
    """Every learner has taken its first step, been merged, and knows of the pause that came after."""
    talk = SyncerTalk(config)
    for learner in range(1, learners + 1):
        talk.joined(learner)
    for voice in talk.voices.values():
        voice.reports(1.0, step=1)
    for voice in talk.voices.values():
        if voice.pulls and talk.fragment(0).phase in ("pulling", "grace"):
            voice.contributes(1.1)
    talk.merges_and_persists(1.2)
    for voice in talk.voices.values():
        voice.acknowledges(1.3)
    wants(talk, 1.5, "pause")
    for voice in talk.voices.values():
        voice.delivers(1.6, PausedAck(1, True))
    return talk


# --------------------------------------------------------------------------------------------------------------------
# The syncer


def test_due_round_opens_only_after_resume():
    talk = paused()
    talk.voices[1].reports(3.0, step=4)
    assert talk.bodies(Pull) == []
    assert talk.fragment(0).reason == "the run is paused"
    assert talk.member(1).reason == "paused with the run"
    assert talk.core.view().paused
    wants(talk, 4.0, "resume")
    assert talk.bodies(SetPaused) == [(1, SetPaused(2, False)), (2, SetPaused(2, False))]
    assert [learner for learner, _ in talk.bodies(Pull)] == [1]
    assert "resumed by ada" in talk.sentences


def test_repeated_pause_request_is_logged_once():
    talk = paused()
    wants(talk, 2.0, "pause")
    talk.expect()
    wants(talk, 3.0, "resume")
    wants(talk, 3.01, "resume")
    talk.expect()


def test_unanswered_control_request_is_retried_and_then_closes_the_connection():
    talk = SyncerTalk(SMALL)
    talk.joined(1)
    wants(talk, 1.0, "pause")
    told = [*talk.bodies(SetPaused), *_bodies(talk.fires(600.0), SetPaused)]
    assert told == [(1, SetPaused(1, True))] * SMALL.limits.max_publish_attempts
    assert talk.of(CloseConnection)[0].reason == because(
        "member-control-unacked", "SetPaused", SMALL.limits.max_publish_attempts
    )


def _bodies(effects: list[object], kind: type) -> list[tuple[int, object]]:
    sent = [effect.envelope for effect in effects if hasattr(effect, "envelope")]
    return [(envelope.learner, envelope.body) for envelope in sent if type(envelope.body) is kind]


def test_ack_of_an_older_pause_does_not_ack_the_newest():
    """(1) Paused, (2) resumed before any reply, (3) the reply to 1 arrives: 2 must still be sent."""
    talk = SyncerTalk(SMALL)
    one = talk.joined(1)
    wants(talk, 1.0, "pause")
    wants(talk, 1.1, "resume")
    one.delivers(1.2, PausedAck(1, True))
    talk.fires(30.0)
    assert (1, SetPaused(2, False)) in talk.bodies(SetPaused)
    one.delivers(30.0, PausedAck(2, False))
    assert _bodies(talk.fires(200.0), SetPaused) == []


def test_paused_run_suspects_no_learner_and_measures_no_gap():
    config = RunConfig(fragments=1, every_steps=2, limits=Limits(initial_wait_s=5.0))
    talk = paused(config=config)
    one = talk.voices[1]
    for step in range(2, 12):
        one.reports(1.6 + 0.1 * step, step=step, step_time_s=0.1)
    limit = talk.core.membership.silence_limit(talk.core.state.members[1])
    high = talk.core.state.members[1].message_gap.high()
    at = 4.0
    for _ in range(20):
        at += 4.0
        one.delivers(at, Ping(1))
        talk.voices[2].delivers(at, Ping(1))
        talk.fires(at)
    assert talk.member(1).state == "live"
    assert limit == 5.0
    assert talk.core.state.members[1].message_gap.high() == high
    wants(talk, at, "resume")
    one.delivers(at + 0.01, PausedAck(2, False))
    one.reports(at + 0.11, step=12, step_time_s=0.1)
    assert talk.core.state.members[1].message_gap.high() < 4.0


def test_joining_and_returning_learners_receive_the_pause_and_its_end():
    talk = paused()
    three = talk.voice(3)
    three.hello(5.0)
    talk.persisted(5.0)
    assert talk.bodies(SetPaused) == [(3, SetPaused(1, True))]
    talk.handle(6.0, LearnerDisconnected(1, 1, 1, "reset"))
    wants(talk, 7.0, "resume")
    assert [learner for learner, _ in talk.bodies(SetPaused)] == [2, 3]
    one = talk.voices[1]
    one.session = 2
    one.hello(7.01, training=True)
    assert talk.bodies(SetPaused) == [(1, SetPaused(2, False))]


def test_run_that_was_never_paused_sends_no_pause():
    talk = SyncerTalk(SMALL)
    talk.joined(1)
    assert not any("SetPaused" in line for line in talk.story)


def test_a_snapshot_of_a_paused_run_is_complete():
    talk = paused()
    talk.handle(2.0, SnapshotRequested())
    for voice in talk.voices.values():
        voice.marker = talk.core.state.marker
        voice.delivers(2.1, SnapshotPart(talk.core.state.marker, voice.step, voice.trained, (1,), ()))
    assert [type(e.record).__name__ for e in talk.of(Persist)] == ["SnapshotRecord"]


def test_the_end_lifts_the_pause():
    talk = paused()
    talk.handle(5.0, FinishRequested())
    assert talk.bodies(SetPaused) == [(1, SetPaused(2, False)), (2, SetPaused(2, False))]
    assert "no longer paused: the run ends" in talk.sentences
    assert not talk.core.view().paused
    wants(talk, 5.01, "pause")
    talk.expect()


def test_changed_quorum_applies_to_rounds_without_quorum():
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=2, overlap_steps=2, grace_margin=0.5, quorum=2))
    voices = [talk.joined(learner) for learner in (1, 2, 3)]
    for voice in voices:
        voice.reports(1.0, step=1)
    for voice in voices[:2]:
        voice.contributes(1.1)
    talk.awaited.clear()
    assert talk.fragment(0).phase in ("grace", "merging")
    for voice in voices:
        voice.reports(2.0, step=2)
    voices[0].contributes(2.1, fragment=1)
    wants(talk, 3.0, "quorum", 3)
    assert talk.core.view().quorum == 3
    assert talk.fragment(1).phase == "pulling"
    voices[1].contributes(3.1, fragment=1)
    assert talk.of(OpenGrace) == []
    wants(talk, 3.2, "quorum", 1)
    assert [effect.round.fragment for effect in talk.of(OpenGrace)] == [1]


def test_the_grace_margin_in_force_makes_the_window():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, overlap_steps=4, grace_margin=0.5))
    one, two = talk.joined(1), talk.joined(2)
    for at in (1.0, 4.0, 7.0):
        wants(talk, at, "grace", 0.0 if at == 7.0 else 0.5)
        one.reports(at, step=int(at))
        two.reports(at, step=int(at))
        one.contributes(at + 0.1)
        window = talk.one(OpenGrace)
        if window.window_s:
            two.contributes(at + 0.2)
        talk.merges_and_persists(at + 0.3)
        one.acknowledges(at + 0.4)
        two.acknowledges(at + 0.4)
    assert "quorum 1; the grace window is off" in talk.sentences
    assert window.window_s == 0.0


def test_drain_is_sent_until_the_learner_leaves_and_it_may_return():
    talk = paused()
    wants(talk, 2.0, "resume")
    wants(talk, 3.0, "drain", 2)
    assert talk.bodies(Drain) == [(2, Drain("drained by ada"))]
    assert _bodies(talk.fires(3.5), Drain) == [(2, Drain("drained by ada"))]
    talk.voices[2].delivers(4.0, Left("drained by ada"))
    assert talk.member(2).state == "left"
    talk.persisted(4.1)
    again = talk.joined(2, 10.0, incarnation=2)
    assert again.welcome is not None
    assert talk.member(2).state == "live"
    assert _bodies(talk.fires(40.0), Drain) == []


def test_drain_applies_to_learners_that_reconnect_or_restart():
    talk = paused()
    talk.handle(2.0, LearnerDisconnected(2, 1, 1, "reset"))
    wants(talk, 3.0, "drain", 2)
    assert talk.bodies(Drain) == []
    talk.voice(2, incarnation=2).hello(4.0)
    talk.persisted(4.0)
    assert talk.bodies(Drain) == [(2, Drain("drained by ada"))]


@pytest.mark.parametrize("learner", [3, 7])
def test_drain_of_non_member_changes_nothing(learner):
    talk = paused(3)
    talk.voices[3].delivers(2.0, Left("its loop ended"))
    wants(talk, 3.0, "drain", learner)
    talk.expect()


def test_restarted_syncer_receives_controls_before_learners_join():
    talk = paused().restarted(10.0)
    wants(talk, 10.0, "pause")
    one = talk.voice(1, 1, 2)
    one.received, one.step, one.trained = {0: 1}, 1, 100
    one.hello(11.0, training=True)
    assert talk.bodies(SetPaused) == [(1, SetPaused(1, True))]


def test_invalid_control_request_does_not_reach_the_core():
    core = SyncerCore(SMALL, epoch=1)
    core.handle(0.0, Started())
    with pytest.raises(AssertionError, match="the quorum is a whole number from 1 to 1024, got 0"):
        core.handle(1.0, ControlRequested("quorum", 0, "ada"))


@pytest.mark.parametrize(
    ("what", "value", "complaint"),
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
        ("stop", None, "there is no control 'stop'"),
    ],
)
def test_find_control_problem(what, value, complaint):
    found = find_control_problem(what, value, Limits())
    assert (found is None) if complaint is None else complaint in (found or "")


# --------------------------------------------------------------------------------------------------------------------
# The learner


def test_paused_learner_pings_often_enough_and_measures_no_gap():
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(initial_wait_s=8.0))).trains()
    for n in range(8):
        talk.receives(0.5 * n, SetPaused(n + 1, False))
    talk.receives(4.0, SetPaused(9, True))
    high = talk.core.state.message_gap.high()
    talk.fires(6.1)
    assert [type(effect.envelope.body).__name__ for effect in talk.effects] == ["Ping"]
    talk.receives(100.0, SetPaused(10, False))
    assert talk.core.state.message_gap.high() == high
    assert not talk.core.state.paused


def test_learner_that_joins_a_paused_run_starts_paused():
    talk = LearnerTalk(SMALL)
    talk.opens(0.0)
    talk.welcomed(0.1)
    talk.receives(0.2, SetPaused(1, True))
    assert talk.core.state.paused
    talk.gets(0.3, 0, 0)
    assert talk.core.has_boundary_work


def test_a_learner_that_is_drained_before_it_trains_leaves():
    talk = LearnerTalk(SMALL)
    talk.opens(0.0)
    talk.welcomed(0.1)
    talk.receives(0.2, Drain("drained by ada"))
    reason = because("learner-left-on-request", "drained by ada")
    talk.expect(talk.sends(Left("drained by ada")), Stop(reason))


def test_finishing_run_is_not_paused():
    talk = LearnerTalk(SMALL).trains()
    talk.receives(1.0, SetPaused(1, True))
    talk.steps(1.5)
    talk.receives(2.0, Finish((1,), 1))
    assert not talk.core.state.paused
    assert talk.core.training
    talk.receives(2.5, SetPaused(2, True))
    talk.expect(talk.sends(PausedAck(2, False)))
