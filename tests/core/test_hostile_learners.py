"""Messages of a hostile learner are refused, ignored or counted as strikes, and do not affect the run."""

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
from tests.core.harness import LearnerHarness, SyncerHarness


@pytest.mark.parametrize(
    "body", [Pong(1), Welcome((0,), 0.0, 1.0), Pull(RoundId(0, 0, 1, 1)), Refuse(Reason("x"), 0, True)]
)
def test_message_type_of_a_syncer_is_ignored_by_the_syncer(body):
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.joined(1).delivers(1.0, body)
    harness.expect()
    assert sum(harness.core.view().ignored.values()) == 1


def test_message_type_of_a_learner_is_ignored_by_the_learner():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(1.0, Ping(1))
    harness.expect()


@pytest.mark.parametrize(
    "reason", [Reason("a-newer-code", (7,)), Reason("state-from-peer"), Reason("state-timeout", ("x", "y"))]
)
def test_reason_with_unknown_code_or_arguments_is_shown_unformatted(reason):
    """(1) A learner of a newer release sends `Ready` with a reason that this syncer cannot format."""
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.hello(0.0)
    harness.persisted(0.1)
    one.delivers(0.2, Ready(reason))
    assert harness.member(1).state == "live"
    assert reason.code in str(reason)


def test_learner_that_reports_endless_steps_does_not_delay_others():
    """(1) One of three learners reports steps of three years and ignores pulls, (2) the grace of the others stays."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    good = [harness.joined(1), harness.joined(2)]
    bad = harness.joined(3)
    windows = []
    for step in range(1, 40):
        bad.reports(step - 0.5, step, step_time_s=1e8)
        for fake in good:
            fake.reports(float(step), step)
        for fake in good:
            if 0 in fake.pulls:
                fake.contributes(step + 0.1)
                del fake.pulls[0]
                windows += [e.window_s for e in harness.of(OpenGrace)]
        harness.fire_timers(step + 0.4)
        while any(isinstance(e, MergeRound) for e in harness.awaited):
            harness.merges_and_persists(step + 0.4)
            for fake in (*good, bad):
                fake.acknowledges(step + 0.4)
    assert windows
    assert max(windows) <= 1.0
    assert harness.fragment(0).version >= 10


def test_one_report_cannot_use_up_the_budget():
    harness = SyncerHarness(RunConfig(fragments=1, budget_tokens=10**12))
    harness.joined(1).delivers(1.0, Report(4, 2**61, 1.0))
    assert harness.core.view().stage == "running"
    assert harness.member(1).strikes == 1
    harness.learners[1].delivers(2.0, Report(4, 4 * MAX_TOKENS_PER_STEP, 1.0))
    assert harness.core.view().stage == "running"


def test_late_close_of_an_old_connection_does_not_close_the_new_one():
    """(1) Incarnation 1 has link 1; (2) incarnation 2 joins on its own link 1; (3) link 1 is closed late."""
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.joined(1)
    harness.joined(1, at=1.0, incarnation=2)
    harness.handle(2.0, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    assert harness.member(1).state == "live"
    harness.handle(3.0, LearnerDisconnected(1, 2, 1, "connection reset by peer"))
    assert harness.member(1).state == "disconnected"


def test_duplicate_resync_is_harmless():
    """(1) A version arrives damaged, (2) it is sent again and acknowledged, (3) a duplicate `Resync` arrives."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.delivers(1.3, Resync(0, 0))
    assert [body.base for _, body in harness.bodies(Published)] == [None]
    one.delivers(1.4, PublishAck(0, 1))
    one.delivers(1.5, Resync(0, 0))
    harness.expect()
    harness.fire_timers(500.0)
    assert not [e for e in harness.done if isinstance(e, CloseConnection) and e.reason.code == "member-publish-unacked"]


def test_finish_ack_without_finish_is_ignored():
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.joined(1).delivers(1.0, FinishAck(3))
    assert harness.member(1).state == "live"
    assert harness.of(Halt) == []


def test_contributions_to_invented_rounds_do_not_fill_a_snapshot():
    harness = SyncerHarness(RunConfig(fragments=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    harness.handle(1.1, SnapshotRequested())
    recorded = 0
    for n in range(500):
        one.contributes(1.2, round=RoundId(0, 0, 1, 1000 + n))
        recorded += len(harness.of(RecordInFlight))
    assert 0 < recorded <= 16


def test_one_contribution_cannot_use_up_the_budget():
    """A contribution has more tokens than any step could have. Its counters would count like those of a report."""
    harness = SyncerHarness(RunConfig(fragments=1, budget_tokens=10**12))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, tokens=2**61, trained=2**61)
    assert harness.codes() == ["contribution-implausible"]
    assert harness.core.view().trained == 100


def test_one_hello_cannot_use_up_the_budget():
    harness = SyncerHarness(RunConfig(fragments=1, budget_tokens=10**12))
    harness.add_learner(1).hello(0.0, step=1, trained=2**61)
    assert harness.codes() == ["refused-implausible"]
    assert harness.core.view().trained == 0
