"""A hostile learner does not disturb the run: its messages are refused, ignored or counted as strikes."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    CloseConnection,
    FinishAck,
    Halt,
    LearnerDisconnected,
    MergeRound,
    OpenGrace,
    Ping,
    Pong,
    PublishAck,
    Published,
    Pull,
    Ready,
    RecordInFlight,
    Refuse,
    Report,
    Resync,
    SnapshotRequested,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.types import MAX_TOKENS_PER_STEP, RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk


@pytest.mark.parametrize(
    "body", [Pong(1), Welcome((0,), 0.0, 1.0), Pull(RoundId(0, 0, 1, 1)), Refuse(Reason("x"), 0, True)]
)
def test_a_message_that_learners_do_not_send_is_ignored(body):
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.joined(1).delivers(1.0, body)
    talk.expect()
    assert sum(talk.core.view().ignored.values()) == 1


def test_a_message_that_syncers_do_not_send_is_ignored():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(1.0, Ping(1))
    talk.expect()


@pytest.mark.parametrize(
    "reason", [Reason("a-newer-code", (7,)), Reason("state-from-peer"), Reason("state-timeout", ("x", "y"))]
)
def test_a_reason_that_we_cannot_say_is_shown_as_it_came(reason):
    """(1) A learner of a newer release says that it is ready, for a reason that this syncer has no sentence for."""
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.hello(0.0)
    talk.persisted(0.1)
    one.delivers(0.2, Ready(reason))
    assert talk.member(1).state == "live"
    assert reason.code in str(reason)


def test_learner_that_reports_endless_steps_does_not_delay_others():
    """(1) One of three reports steps of three years and answers no pull; (2) the grace of the others is as before."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    good = [talk.joined(1), talk.joined(2)]
    bad = talk.joined(3)
    windows = []
    for step in range(1, 40):
        bad.reports(step - 0.5, step, step_time_s=1e8)
        for voice in good:
            voice.reports(float(step), step)
        for voice in good:
            if 0 in voice.pulls:
                voice.contributes(step + 0.1)
                del voice.pulls[0]
                windows += [e.window_s for e in talk.of(OpenGrace)]
        talk.fires(step + 0.4)
        while any(isinstance(e, MergeRound) for e in talk.awaited):
            talk.merges_and_persists(step + 0.4)
            for voice in (*good, bad):
                voice.acknowledges(step + 0.4)
    assert windows
    assert max(windows) <= 1.0
    assert talk.fragment(0).version >= 10


def test_one_report_cannot_use_up_the_budget():
    talk = SyncerTalk(RunConfig(fragments=1, budget_tokens=10**12))
    talk.joined(1).delivers(1.0, Report(4, 2**61, 1.0))
    assert talk.core.view().stage == "running"
    assert talk.member(1).strikes == 1
    talk.voices[1].delivers(2.0, Report(4, 4 * MAX_TOKENS_PER_STEP, 1.0))
    assert talk.core.view().stage == "running"


def test_a_link_of_the_old_process_that_closes_late_does_not_close_that_of_the_new_one():
    """(1) Incarnation 1 has link 1; (2) incarnation 2 joins on its own link 1; (3) the first link is noticed closed."""
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.joined(1)
    talk.joined(1, at=1.0, incarnation=2)
    talk.handle(2.0, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    assert talk.member(1).state == "live"
    talk.handle(3.0, LearnerDisconnected(1, 2, 1, "connection reset by peer"))
    assert talk.member(1).state == "disconnected"


def test_duplicate_resync_is_harmless():
    """(1) A version arrives damaged, (2) it is sent again and acknowledged, (3) a duplicate `Resync` arrives."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.delivers(1.3, Resync(0, 0))
    assert [body.base for _, body in talk.bodies(Published)] == [None]
    one.delivers(1.4, PublishAck(0, 1))
    one.delivers(1.5, Resync(0, 0))
    talk.expect()
    talk.fires(500.0)
    assert not [e for e in talk.done if isinstance(e, CloseConnection) and e.reason.code == "member-publish-unacked"]


def test_an_acknowledgement_of_an_end_that_is_not_there_is_ignored():
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.joined(1).delivers(1.0, FinishAck(3))
    assert talk.member(1).state == "live"
    assert talk.of(Halt) == []


def test_contributions_to_invented_rounds_do_not_fill_a_snapshot():
    talk = SyncerTalk(RunConfig(fragments=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    talk.handle(1.1, SnapshotRequested())
    kept = 0
    for n in range(500):
        one.contributes(1.2, round=RoundId(0, 0, 1, 1000 + n))
        kept += len(talk.of(RecordInFlight))
    assert 0 < kept <= 16


def test_one_contribution_cannot_use_up_the_budget():
    """(1) A contribution tells of more tokens than any step has; (2) its word would count like that of a report."""
    talk = SyncerTalk(RunConfig(fragments=1, budget_tokens=10**12))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, tokens=2**61, trained=2**61)
    assert talk.codes() == ["contribution-implausible"]
    assert talk.core.view().trained == 100


def test_one_hello_cannot_use_up_the_budget():
    talk = SyncerTalk(RunConfig(fragments=1, budget_tokens=10**12))
    talk.voice(1).hello(0.0, step=1, trained=2**61)
    assert talk.codes() == ["refused-implausible"]
    assert talk.core.view().trained == 0
