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
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice

LIMIT_S = 100.0
CONFIG = RunConfig(
    fragments=1, every_steps=1, lease_samples=10, leases_ahead=1, limits=Limits(lost_after_s=LIMIT_S, max_wait_s=60.0)
)


def _leased(talk: SyncerTalk, voice: Voice, at: float) -> None:
    voice.delivers(at, LeaseRequest(len(voice.leases), voice.taken))
    if talk.of(Persist):
        talk.persisted(at, "LeaseRecord")


def _two_with_leases() -> SyncerTalk:
    """Learner 1 has merged 4 of its 20 samples, of 3 steps 2, and its link is closed at 10 s."""
    talk = SyncerTalk(CONFIG)
    one, two = talk.joined(1), talk.joined(2)
    _leased(talk, one, 0.5)
    _leased(talk, two, 0.5)
    one.reports(1.0, step=1)
    one.reports(2.0, step=2)
    one.contributes(2.1, consumed_samples=4)
    talk.merges_and_persists(2.2)
    one.acknowledges(2.3)
    two.acknowledges(2.3)
    one.reports(3.0, step=3)
    talk.handle(10.0, LearnerDisconnected(1, 1, 1, "the host is gone"))
    return talk


def _awake(talk: SyncerTalk, until: float) -> None:
    """Time passes, and learner 2 speaks all the while."""
    now = talk.now
    while now < until:
        now = min(now + 5.0, until)
        talk.fires(now)
        talk.voices[2].delivers(now, LeaseRequest(2, 0))
        if talk.member(1).state == "lost":
            return


def _given_up() -> SyncerTalk:
    talk = _two_with_leases()
    _awake(talk, 10.0 + LIMIT_S)
    assert talk.member(1).state == "lost"
    return talk


def _sums(talk: SyncerTalk) -> tuple[int, int, int, int]:
    return tuple(talk.core.view().leases)


def test_learner_that_is_disconnected_for_too_long_is_lost():
    talk = _given_up()
    assert "disconnected for 100 s, the limit is 100 s; incarnation 1 is lost for good" in talk.sentences
    record = next(e.record for e in talk.awaited if isinstance(e, Persist))
    assert record == MembersRecord(3, ((1, 1), (2, 1)), left=(1,), retired_tokens=300, lost=(1,))
    line = talk.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending, line.dropped) == (300, 200, 0, {"lost": 100})


def test_its_samples_are_leased_again_once_its_loss_is_durable_and_not_before():
    talk = _given_up()
    assert _sums(talk) == (40, 0, 36, 4)
    talk.persist_failed(talk.now)
    assert _sums(talk) == (40, 0, 36, 4)
    talk.fires(talk.now + 5.0)
    talk.persisted(talk.now, "MembersRecord")
    assert "16 samples of incarnation 1 are in no version; they are leased again before new samples" in talk.sentences
    assert _sums(talk) == (40, 16, 20, 4)
    two = talk.voices[2]
    two.delivers(talk.now, LeaseRequest(2, 20))
    talk.persisted(talk.now, "LeaseRecord")
    assert (talk.bodies(Lease)[0][1].begin, talk.bodies(Lease)[0][1].end) == (4, 14)


def test_learner_that_returns_in_time_continues_as_the_same_incarnation():
    talk = _two_with_leases()
    _awake(talk, 9.0 + LIMIT_S)
    one = talk.voices[1]
    one.session = 2
    one.hello(talk.now, training=True)
    assert [learner for learner, _ in talk.bodies(Welcome)] == [1]
    one.acknowledges(talk.now)
    _awake(talk, talk.now + 10.0)  # beyond the moment at which it would have been given up
    assert talk.member(1).state != "lost"
    assert talk.core.view().ledger[0].pending == 100


def test_disconnected_time_restarts_after_every_return():
    talk = _two_with_leases()
    one = talk.voices[1]
    for session in (2, 3, 4):
        _awake(talk, talk.now + 0.9 * LIMIT_S)
        one.session = session
        one.hello(talk.now, training=True)
        assert [learner for learner, _ in talk.bodies(Welcome)] == [1]
        talk.handle(talk.now, LearnerDisconnected(1, 1, session, "the host is gone"))
    _awake(talk, talk.now + 0.9 * LIMIT_S)
    assert talk.member(1).state == "disconnected"
    _awake(talk, talk.now + 0.2 * LIMIT_S)
    assert talk.member(1).state == "lost"


def test_lost_incarnation_is_refused_and_a_new_one_is_admitted():
    talk = _given_up()
    one = talk.voices[1]
    one.session = 2
    one.hello(talk.now, training=True)
    talk.expect()  # its loss is not durable yet: a syncer that is killed now would know nothing of it
    talk.persisted(talk.now, "MembersRecord")
    one.hello(talk.now, training=True)
    talk.expect(talk.to(1, Refuse(because("refused-lost", 1), 1, True)))
    talk.joined(1, at=talk.now + 1.0, incarnation=2)
    assert talk.member(1).state == "live"
    assert talk.core.view().ledger[0].dropped == {"lost": 100}


def test_learner_refused_as_lost_stops_and_knows_the_current_incarnation():
    talk = LearnerTalk(CONFIG)
    talk.opens(1.0)
    talk.receives(1.1, Refuse(because("refused-lost", 1), 1, True))
    assert talk.core.state.refused_incarnation == 1
    assert "restart the learner to join again" in str(talk.one(Stop).reason)


def test_restarted_syncer_knows_lost_learners():
    talk = _given_up()
    talk.persisted(talk.now, "MembersRecord")
    again = talk.restarted()
    assert again.member(1).state == "lost"
    assert _sums(again) == (40, 16, 20, 4)
    again.voice(1, session=2).hello(1.0, training=True)
    assert [body.reason.code for _, body in again.bodies(Refuse)] == ["refused-lost"]


def test_a_syncer_that_starts_again_counts_absences_from_there():
    talk = _two_with_leases()
    again = talk.restarted()
    again.joined(2, at=1.0, incarnation=2)
    _awake(again, 0.9 * LIMIT_S)
    assert again.member(1).state == "disconnected"
    _awake(again, 1.2 * LIMIT_S)
    assert again.member(1).state == "lost"


def test_stall_of_the_syncer_does_not_count_as_absence():
    talk = _two_with_leases()
    talk.handle(11.0 + LIMIT_S, LearnerDisconnected(9, 1, 1, "no timer fired for a hundred seconds"))
    assert "syncer-stalled" in talk.codes()
    assert talk.member(1).state == "disconnected"


def test_a_quarantined_learner_that_never_starts_again_is_lost_too():
    talk = SyncerTalk(CONFIG)
    one, _ = talk.joined(1), talk.joined(2)
    _leased(talk, one, 0.5)
    for serial in range(3):
        one.delivers(1.0 + serial, LeaseRequest(99, 0))
    assert talk.member(1).state == "quarantined"
    _awake(talk, 10.0 + LIMIT_S)
    assert talk.member(1).state == "lost"
    talk.persisted(talk.now, "MembersRecord")
    assert (talk.core.view().leases.pool, talk.core.view().leases.is_balanced()) == (20, True)


@pytest.mark.parametrize("lost", [False, True])
def test_neither_an_absent_nor_a_lost_learner_keeps_the_run_from_ending(lost):
    talk = _given_up() if lost else _two_with_leases()
    if lost:
        talk.persisted(talk.now, "MembersRecord")
    two = talk.voices[2]
    two.reports(talk.now, step=two.step + 1)
    talk.handle(talk.now, FinishRequested())
    for _ in range(20):
        if 0 in two.pulls:
            two.contributes(talk.now)
            del two.pulls[0]
        if any(isinstance(effect, MergeRound) for effect in talk.awaited):
            talk.merged(talk.now)
        while any(isinstance(effect, Persist) for effect in talk.awaited):
            talk.persisted(talk.now)
        two.acknowledges(talk.now)
        if any(isinstance(effect, Halt) for effect in talk.done):
            break
        talk.fires(talk.now + 30.0)
    assert talk.core.view().stage == "finished"
    assert any(isinstance(effect, Halt) for effect in talk.done)
    leases = talk.core.view().leases
    assert leases.is_balanced()
    assert (leases.pool > 0) is lost, "its samples are in the ledger, held or in the pool"
    assert all(line.is_balanced() for line in talk.core.view().ledger)


def test_ledger_distinguishes_lost_from_left_learners():
    history = DataHistory(CONFIG)
    history._durable(MembersRecord(1, ((1, 1), (2, 1)), (1, 2), 0, (2,)))
    history._durable(MembersRecord(2, ((1, 1), (2, 2)), (1,), 0, ()))
    assert [history.exit_cause(key) for key in ((1, 1), (2, 1), (2, 2))] == ["left", "lost", ""]
