"""A learner that is disconnected for too long is lost for good, and its samples are leased again."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    FinishRequested,
    Halt,
    LearnerDisconnected,
    Lease,
    LeaseRequest,
    MembersRecord,
    MergeRound,
    Persist,
    Refuse,
    Stop,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.types import Limits, RunConfig
from atoll.tape.samples import DataHistory
from tests.core.harness import FakeLearner, LearnerHarness, SyncerHarness

LIMIT_S = 100.0
CONFIG = RunConfig(
    fragments=1, every_steps=1, lease_samples=10, leases_ahead=1, limits=Limits(lost_after_s=LIMIT_S, max_wait_s=60.0)
)


def _leased(harness: SyncerHarness, fake: FakeLearner, at: float) -> None:
    fake.delivers(at, LeaseRequest(len(fake.leases), fake.consumed_samples))
    if harness.of(Persist):
        harness.persisted(at, "LeaseRecord")


def _two_with_leases() -> SyncerHarness:
    """Return a run in which learner 1 has merged 4 of its 20 samples and 2 of 3 steps, and disconnects at 10 s."""
    harness = SyncerHarness(CONFIG)
    one, two = harness.joined(1), harness.joined(2)
    _leased(harness, one, 0.5)
    _leased(harness, two, 0.5)
    one.reports(1.0, step=1)
    one.reports(2.0, step=2)
    one.contributes(2.1, consumed_samples=4)
    harness.merges_and_persists(2.2)
    one.acknowledges(2.3)
    two.acknowledges(2.3)
    one.reports(3.0, step=3)
    harness.handle(10.0, LearnerDisconnected(1, 1, 1, "the host is gone"))
    return harness


def _advance(harness: SyncerHarness, until: float) -> None:
    """Advance the time while learner 2 keeps sending messages."""
    now = harness.now
    while now < until:
        now = min(now + 5.0, until)
        harness.fire_timers(now)
        harness.learners[2].delivers(now, LeaseRequest(2, 0))
        if harness.member(1).state == "lost":
            return


def _with_lost_learner() -> SyncerHarness:
    harness = _two_with_leases()
    _advance(harness, 10.0 + LIMIT_S)
    assert harness.member(1).state == "lost"
    return harness


def _lease_totals(harness: SyncerHarness) -> tuple[int, int, int, int]:
    return tuple(harness.core.view().leases)


def test_learner_that_is_disconnected_for_too_long_is_lost():
    harness = _with_lost_learner()
    assert "disconnected for 100 s, the limit is 100 s; incarnation 1 is lost for good" in harness.sentences
    record = next(e.record for e in harness.awaited if isinstance(e, Persist))
    assert record == MembersRecord(3, ((1, 1), (2, 1)), left=(1,), retired_tokens=300, lost=(1,))
    line = harness.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending, line.dropped) == (300, 200, 0, {"lost": 100})


def test_samples_of_a_lost_learner_are_leased_again_only_when_its_loss_is_durable():
    harness = _with_lost_learner()
    assert _lease_totals(harness) == (40, 0, 36, 4)
    harness.persist_failed(harness.now)
    assert _lease_totals(harness) == (40, 0, 36, 4)
    harness.fire_timers(harness.now + 5.0)
    harness.persisted(harness.now, "MembersRecord")
    assert (
        "16 samples of incarnation 1 are in no version; they are leased again before new samples" in harness.sentences
    )
    assert _lease_totals(harness) == (40, 16, 20, 4)
    two = harness.learners[2]
    two.delivers(harness.now, LeaseRequest(2, 20))
    harness.persisted(harness.now, "LeaseRecord")
    assert (harness.bodies(Lease)[0][1].begin, harness.bodies(Lease)[0][1].end) == (4, 14)


def test_learner_that_returns_in_time_continues_as_the_same_incarnation():
    harness = _two_with_leases()
    _advance(harness, 9.0 + LIMIT_S)
    one = harness.learners[1]
    one.session = 2
    one.hello(harness.now, training=True)
    assert [learner for learner, _ in harness.bodies(Welcome)] == [1]
    one.acknowledges(harness.now)
    _advance(harness, harness.now + 10.0)  # beyond the time at which it would have been lost
    assert harness.member(1).state != "lost"
    assert harness.core.view().ledger[0].pending == 100


def test_disconnected_time_restarts_after_every_return():
    harness = _two_with_leases()
    one = harness.learners[1]
    for session in (2, 3, 4):
        _advance(harness, harness.now + 0.9 * LIMIT_S)
        one.session = session
        one.hello(harness.now, training=True)
        assert [learner for learner, _ in harness.bodies(Welcome)] == [1]
        harness.handle(harness.now, LearnerDisconnected(1, 1, session, "the host is gone"))
    _advance(harness, harness.now + 0.9 * LIMIT_S)
    assert harness.member(1).state == "disconnected"
    _advance(harness, harness.now + 0.2 * LIMIT_S)
    assert harness.member(1).state == "lost"


def test_lost_incarnation_is_refused_and_a_new_one_is_admitted():
    harness = _with_lost_learner()
    one = harness.learners[1]
    one.session = 2
    one.hello(harness.now, training=True)
    harness.expect()  # its loss is not durable yet: a restarted syncer would not know of it
    harness.persisted(harness.now, "MembersRecord")
    one.hello(harness.now, training=True)
    harness.expect(harness.to(1, Refuse(because("refused-lost", 1), 1, True)))
    harness.joined(1, at=harness.now + 1.0, incarnation=2)
    assert harness.member(1).state == "live"
    assert harness.core.view().ledger[0].dropped == {"lost": 100}


def test_learner_refused_as_lost_stops_and_knows_the_current_incarnation():
    harness = LearnerHarness(CONFIG)
    harness.opens(1.0)
    harness.receives(1.1, Refuse(because("refused-lost", 1), 1, True))
    assert harness.core.state.refused_incarnation == 1
    assert "restart the learner to join again" in str(harness.one(Stop).reason)


def test_restarted_syncer_knows_lost_learners():
    harness = _with_lost_learner()
    harness.persisted(harness.now, "MembersRecord")
    again = harness.restarted()
    assert again.member(1).state == "lost"
    assert _lease_totals(again) == (40, 16, 20, 4)
    again.add_learner(1, session=2).hello(1.0, training=True)
    assert [body.reason.code for _, body in again.bodies(Refuse)] == ["refused-lost"]


def test_restarted_syncer_restarts_disconnected_times():
    harness = _two_with_leases()
    again = harness.restarted()
    again.joined(2, at=1.0, incarnation=2)
    _advance(again, 0.9 * LIMIT_S)
    assert again.member(1).state == "disconnected"
    _advance(again, 1.2 * LIMIT_S)
    assert again.member(1).state == "lost"


def test_stall_of_the_syncer_does_not_count_as_absence():
    harness = _two_with_leases()
    harness.handle(11.0 + LIMIT_S, LearnerDisconnected(9, 1, 1, "no timer fired for 100 s"))
    assert "syncer-stalled" in harness.codes()
    assert harness.member(1).state == "disconnected"


def test_quarantined_learner_that_never_restarts_is_lost():
    harness = SyncerHarness(CONFIG)
    one, _ = harness.joined(1), harness.joined(2)
    _leased(harness, one, 0.5)
    for serial in range(3):
        one.delivers(1.0 + serial, LeaseRequest(99, 0))
    assert harness.member(1).state == "quarantined"
    _advance(harness, 10.0 + LIMIT_S)
    assert harness.member(1).state == "lost"
    harness.persisted(harness.now, "MembersRecord")
    assert (harness.core.view().leases.pool, harness.core.view().leases.is_balanced()) == (20, True)


@pytest.mark.parametrize("lost", [False, True])
def test_run_ends_with_disconnected_or_lost_learners(lost):
    harness = _with_lost_learner() if lost else _two_with_leases()
    if lost:
        harness.persisted(harness.now, "MembersRecord")
    two = harness.learners[2]
    two.reports(harness.now, step=two.step + 1)
    harness.handle(harness.now, FinishRequested())
    for _ in range(20):
        if 0 in two.pulls:
            two.contributes(harness.now)
            del two.pulls[0]
        if any(isinstance(effect, MergeRound) for effect in harness.awaited):
            harness.merged(harness.now)
        while any(isinstance(effect, Persist) for effect in harness.awaited):
            harness.persisted(harness.now)
        two.acknowledges(harness.now)
        if any(isinstance(effect, Halt) for effect in harness.done):
            break
        harness.fire_timers(harness.now + 30.0)
    assert harness.core.view().stage == "finished"
    assert any(isinstance(effect, Halt) for effect in harness.done)
    leases = harness.core.view().leases
    assert leases.is_balanced()
    assert (leases.pool > 0) is lost, "unmerged samples of a lost learner are in the pool"
    assert all(line.is_balanced() for line in harness.core.view().ledger)


def test_ledger_distinguishes_lost_from_left_learners():
    history = DataHistory(CONFIG)
    history._durable(MembersRecord(1, ((1, 1), (2, 1)), (1, 2), 0, (2,)))
    history._durable(MembersRecord(2, ((1, 1), (2, 2)), (1,), 0, ()))
    assert [history.exit_cause(key) for key in ((1, 1), (2, 1), (2, 2))] == ["left", "lost", ""]
