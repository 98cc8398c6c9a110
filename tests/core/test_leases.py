"""Leases: the ledger always balances, leases are durable before they are sent, and samples are merged once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ledger import MAX_LEASES_PER_REPLY, MAX_UNMERGED_LEASES, LeaseLedger, SampleCursor, count_samples
from atoll.core.protocol import (
    ConnectionClosed,
    Contribution,
    Lease,
    LeaseRecord,
    LeaseRequest,
    Left,
    NoPeer,
    Persist,
    Pull,
    Ready,
    Report,
    StartTraining,
)
from atoll.core.reasons import because
from atoll.core.syncer.core import SyncerComponents
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.types import RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice

CONFIG = RunConfig(fragments=2, every_steps=1, lease_samples=10, leases_ahead=1)
PAIR = RunConfig(fragments=1, every_steps=1, quorum=2, lease_samples=10, leases_ahead=1)


def leased(talk: SyncerTalk, voice: Voice, at: float, leases: int = 0, taken: int = 0) -> list[tuple[int, int]]:
    """What a request is answered with, when the disk has written it."""
    voice.delivers(at, LeaseRequest(leases, taken))
    sent = talk.bodies(Lease)
    if talk.of(Persist):
        talk.persisted(at, "LeaseRecord")
        sent += talk.bodies(Lease)
    assert all(to == voice.id for to, _ in sent)
    return [(lease.begin, lease.end) for _, lease in sent]


def merged_into(talk: SyncerTalk, voice: Voice, at: float, step: int, fragment: int, taken: int) -> None:
    """One step of the only learner that is there, and a version with it."""
    voice.reports(at, step)
    voice.contributes(at, fragment, consumed_samples=taken)
    talk.merges_and_persists(at)


# --------------------------------------------------------------------------------------------------------------------
# The syncer


def test_a_lease_is_sent_when_it_is_durable_and_not_before():
    talk = SyncerTalk(CONFIG)
    voice = talk.joined(1)
    voice.delivers(1.0, LeaseRequest(0, 0))
    assert talk.bodies(Lease) == []
    assert talk.one(Persist).record.next_sample == 20  # type: ignore[union-attr]
    talk.persist_failed(1.1)
    assert talk.bodies(Lease) == []
    assert talk.codes() == ["leases-not-durable"]
    talk.fires(5.0)
    talk.persisted(5.0)
    assert talk.bodies(Lease) == [(1, Lease(0, 0, 10)), (1, Lease(1, 10, 20))]


def test_two_learners_never_get_the_same_samples():
    talk = SyncerTalk(CONFIG)
    first, second = talk.joined(1), talk.joined(2)
    assert leased(talk, first, 1.0) == [(0, 10), (10, 20)]
    assert leased(talk, second, 1.0) == [(20, 30), (30, 40)]
    assert leased(talk, first, 2.0, leases=2, taken=11) == [(40, 50), (50, 60)]
    assert leased(talk, second, 2.0, leases=2, taken=9) == [(60, 70)]


def test_a_syncer_that_is_killed_at_any_moment_leases_nothing_twice():
    talk = SyncerTalk(CONFIG)
    assert leased(talk, talk.joined(1), 1.0) == [(0, 10), (10, 20)]
    talk.voices[1].delivers(2.0, LeaseRequest(2, 15))  # requested, not durable
    again = talk.restarted(3.0)
    assert leased(again, again.joined(2, 3.0), 3.5) == [(20, 30), (30, 40)]

    talk.written_without_reply()  # written, and the process died before it could send it
    again = talk.restarted(3.0)
    assert leased(again, again.joined(2, 3.0), 3.5) == [(40, 50), (50, 60)]
    voice = again.voice(1, session=2)
    voice.step, voice.trained = 3, 300
    voice.hello(4.0, training=True)
    assert leased(again, voice, 4.5, leases=2, taken=15) == [(20, 30), (30, 40)]


def test_new_incarnation_gets_the_unmerged_samples_of_the_old_one():
    talk = SyncerTalk(CONFIG)
    old = talk.joined(1)
    leased(talk, old, 0.5)
    merged_into(talk, old, 1.0, 1, 0, taken=4)
    merged_into(talk, old, 2.0, 2, 1, taken=7)  # one fragment is enough
    new = talk.joined(1, 3.0, incarnation=2)
    assert talk.core.view().leases == (20, 13, 0, 7)
    assert leased(talk, new, 4.0) == [(7, 17), (17, 20), (20, 30)]


def test_returned_samples_are_leased_before_new_ones():
    talk = SyncerTalk(CONFIG)
    old, other = talk.joined(1), talk.joined(2)
    leased(talk, old, 0.5)
    old.delivers(1.0, Left("enough"))
    assert "leases-returned" not in talk.codes()
    talk.persisted(1.1)
    assert talk.codes() == ["leases-returned"]
    assert leased(talk, other, 2.0) == [(0, 10), (10, 20)]


def test_leases_return_only_when_the_end_of_their_holder_is_durable():
    """Otherwise a syncer that is started again takes the old incarnation for current, and merges what it has given
    away."""
    talk = SyncerTalk(CONFIG)
    old, other = talk.joined(1), talk.joined(2)
    leased(talk, old, 0.5)
    talk.voice(1, incarnation=2).hello(1.0)
    assert leased(talk, other, 1.1) == [(20, 30), (30, 40)]
    again = talk.restarted(2.0)  # the members record was never written
    zombie = again.voice(1, session=2)
    zombie.step, zombie.trained = 2, 200
    zombie.hello(2.1, training=True)
    assert leased(again, zombie, 2.2, leases=2, taken=20) == [(40, 50), (50, 60)]


def test_leases_return_only_when_no_open_round_holds_anything_of_their_holder():
    """The four steps in core/syncer_leases.py, up to the moment at which samples would be merged twice."""
    talk = SyncerTalk(PAIR)
    old, other = talk.joined(1), talk.joined(2)
    leased(talk, old, 0.5)
    leased(talk, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = talk.voice(1, incarnation=2)
    new.hello(1.2)
    talk.persisted(1.3)
    assert talk.core.state.lease_closing
    assert leased(talk, new, 1.4) == []  # not before its predecessor's samples are settled
    other.contributes(1.5, consumed_samples=4)
    talk.merged(1.6)
    talk.persisted(1.7, "VersionRecord")
    assert talk.one(Persist).record.pool == ()  # type: ignore[union-attr]
    talk.persisted(1.8)
    assert [lease.number for _, lease in talk.bodies(Lease)] == [0, 1, 2]
    assert [(lease.begin, lease.end) for _, lease in talk.bodies(Lease)] == [(4, 14), (14, 20), (40, 50)]


class GrantsAtOnce(DataLeases):
    def _has_unsettled_predecessor(self, learner: int) -> bool:
        return False


class Hasty(SyncerTalk):
    parts = SyncerComponents(data_leases=GrantsAtOnce)


@pytest.mark.parametrize(("kind", "merged_samples_wait"), [(SyncerTalk, False), (Hasty, True)])
def test_successor_gets_no_leases_until_its_predecessor_is_settled(kind, merged_samples_wait):
    """All four steps in core/syncer_leases.py. Without the wait samples 0 to 3, which are merged, are leased again."""
    talk = kind(PAIR)
    old, other = talk.joined(1), talk.joined(2)
    leased(talk, old, 0.5)
    leased(talk, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = talk.voice(1, incarnation=2)
    new.hello(1.2)
    talk.persisted(1.3)
    new.delivers(1.4, LeaseRequest(0, 0))
    if talk.of(Persist):
        talk.persisted(1.4)
    other.contributes(1.5, consumed_samples=4)
    talk.merged(1.6)
    talk.persisted(1.7, "VersionRecord")
    if talk.of(Persist):
        talk.persisted(1.7, "LeaseRecord")
    new.acknowledges(1.8)
    new.delivers(1.8, Ready(because("state-kept")))
    new.reports(2.0, 1)
    other.reports(2.0, 2)
    other.reports(3.0, 3)
    new.reports(3.0, 2)
    new.contributes(3.1, consumed_samples=2)
    other.contributes(3.1, consumed_samples=8)
    talk.merges_and_persists(3.2)
    assert dict(talk.disk[("version", 0)].merged_up_to)[1].incarnation == 2
    again = talk.restarted(4.0)
    waiting = {n for begin, end in again.core.state.leases.pool for n in range(begin, end)}
    assert (not waiting.isdisjoint(range(4))) is merged_samples_wait


def test_failed_merge_returns_its_samples():
    talk = SyncerTalk(PAIR)
    old, other = talk.joined(1), talk.joined(2)
    leased(talk, old, 0.5)
    leased(talk, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = talk.voice(1, incarnation=2)
    new.hello(1.2)
    talk.persisted(1.3)
    other.contributes(1.5, consumed_samples=4)
    talk.merge_failed(1.6)
    assert "leases-returned" in talk.codes()
    assert leased(talk, new, 2.0)[0] == (0, 10)


def test_restart_restores_merged_samples_from_merged_up_to():
    talk = SyncerTalk(CONFIG)
    old = talk.joined(1)
    leased(talk, old, 0.5)
    merged_into(talk, old, 1.0, 1, 0, taken=6)  # after the last record of leases
    again = talk.restarted(2.0)
    assert again.core.view().leases == (20, 0, 14, 6)
    new = again.joined(1, 3.0, incarnation=2)
    assert leased(again, new, 4.0) == [(6, 16), (16, 20), (20, 30)]


def test_restart_returns_the_leases_of_replaced_incarnations():
    talk = SyncerTalk(CONFIG)
    old = talk.joined(1)
    leased(talk, old, 0.5)
    merged_into(talk, old, 1.0, 1, 0, taken=6)
    talk.voice(1, incarnation=2).hello(2.0)
    talk.written_without_reply()
    again = talk.restarted(3.0)
    assert again.core.view().leases == (20, 14, 0, 6)


def test_a_request_that_cannot_be_is_a_strike_and_leases_nothing():
    talk = SyncerTalk(CONFIG)
    voice = talk.joined(1)
    leased(talk, voice, 0.5)
    for leases, taken in ((3, 0), (2, 21), (-1, 0)):
        voice.delivers(1.0, LeaseRequest(leases, taken))
        assert not talk.of(Persist)
        assert not talk.bodies(Lease)
    assert talk.member(1).state == "quarantined"


def test_a_request_that_comes_again_much_later_is_no_strike():
    talk = SyncerTalk(CONFIG)
    voice = talk.joined(1)
    leased(talk, voice, 0.5)
    merged_into(talk, voice, 1.0, 1, 0, taken=20)
    assert leased(talk, voice, 2.0, leases=2, taken=20) == [(20, 30), (30, 40)]
    voice.delivers(3.0, LeaseRequest(0, 0))
    talk.expect()
    assert talk.member(1).strikes == 0


def test_a_contribution_on_samples_that_were_not_leased_is_refused():
    talk = SyncerTalk(CONFIG)
    voice = talk.joined(1)
    voice.reports(1.0, 1)
    voice.contributes(1.1, consumed_samples=0)  # it has no lease at all, and trains
    assert voice.refusals[-1].reason.code == "contribution-implausible"
    leased(talk, voice, 1.2)
    voice.contributes(1.3, consumed_samples=21)
    assert voice.refusals[-1].reason.code == "contribution-implausible"
    voice.contributes(1.4, consumed_samples=20)
    assert len(voice.refusals) == 2


def test_unmerged_leases_of_a_learner_are_bounded():
    books = LeaseLedger()
    holder = books.holder((1, 1))
    while books.grant(holder, target=10**9, lease_samples=1):
        assert len(holder.intervals) <= MAX_UNMERGED_LEASES
    assert holder.total == MAX_UNMERGED_LEASES
    books.merge((1, 1), 100)
    assert books.grant(holder, 10**9, 1) == MAX_LEASES_PER_REPLY


def test_a_run_without_leases_knows_nothing_of_them():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1))
    voice = talk.joined(1)
    voice.delivers(1.0, LeaseRequest(0, 0))
    talk.expect()
    learner = LearnerTalk(RunConfig(fragments=1, every_steps=1)).trains()
    learner.receives(1.0, Lease(0, 0, 8))
    assert learner.core.state.leased_samples == 0


def test_lengths_that_make_no_sense_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="lease_samples must be a whole number of at least 0"):
        RunConfig(lease_samples=-1)
    with pytest.raises(ValueError, match="leases_ahead must be a whole number of at least 1"):
        RunConfig(leases_ahead=0)


# --------------------------------------------------------------------------------------------------------------------
# The learner


def joining() -> LearnerTalk:
    talk = LearnerTalk(RunConfig(fragments=1, every_steps=2, lease_samples=8, leases_ahead=1))
    talk.opens(0.0)
    talk.welcomed(0.0)
    talk.gets(0.0, 0, 0)
    talk.receives(0.0, NoPeer(because("peer-new-run"), True))
    return talk


def test_training_starts_with_the_first_lease():
    talk = joining()
    assert not talk.core.training
    talk.receives(1.0, Lease(0, 0, 8))
    assert talk.of(StartTraining)
    assert talk.core.training
    assert [body for _, body in talk.bodies(Ready)]


def test_lost_lease_request_is_retried():
    talk = joining()
    talk.fires(100.0)
    assert talk.bodies(LeaseRequest) == [(1, LeaseRequest(0, 0))] * 2


def test_lease_request_is_repeated_on_a_new_connection():
    talk = joining()
    talk.receives(1.0, Lease(0, 0, 8))
    talk.steps(2.0, samples=2)
    assert talk.bodies(LeaseRequest) == []  # a request is pending
    talk.handle(3.0, ConnectionClosed(1, "connection reset by peer"))
    talk.opens(4.0)
    talk.welcomed(4.1)
    assert talk.bodies(LeaseRequest) == [(1, LeaseRequest(1, 2))]


def test_leases_may_come_late_again_and_out_of_order_and_every_sample_counts_once():
    talk = joining()
    for lease in (Lease(1, 8, 16), Lease(0, 0, 8), Lease(0, 0, 8), Lease(2, 16, 24), Lease(1, 8, 16), Lease(1, 8, 16)):
        talk.receives(1.0, lease)
    assert talk.core.state.lease_count == 2
    assert talk.core.state.leased_samples == 16
    talk.steps(2.0, samples=8)
    assert talk.bodies(Report) == [(1, Report(1, 100, 1.0, 8))]
    with pytest.raises(AssertionError, match="consumed 9 samples, but only 8"):
        talk.steps(3.0, samples=9)


def test_steps_without_a_lease_are_counted_and_logged_once():
    talk = joining()
    talk.receives(1.0, Lease(0, 0, 8))
    talk.steps(2.0, samples=8)
    for at in (3.0, 4.0, 5.0):
        talk.steps(at)
    assert talk.core.state.repeated == 3
    assert talk.sentences.count(str(because("leases-exhausted", 8))) == 1
    talk.receives(6.0, Lease(1, 8, 16))
    talk.steps(7.0, samples=8)
    talk.steps(8.0)
    assert talk.sentences.count(str(because("leases-exhausted", 16))) == 1


def test_contribution_counts_the_samples_at_its_copy():
    talk = joining()
    talk.receives(1.0, Lease(0, 0, 8))
    talk.receives(1.5, Pull(RoundId(0, 0, 1, 1)))
    talk.steps(2.0, samples=3)
    assert [body.consumed_samples for _, body in talk.bodies(Contribution)] == [3]
    talk.steps(3.0, samples=3)
    talk.receives(3.5, Pull(RoundId(0, 0, 1, 1)))
    assert [body.consumed_samples for _, body in talk.bodies(Contribution)] == [3]


# --------------------------------------------------------------------------------------------------------------------
# Properties

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("grant", "merge", "close", "restart")), st.integers(1, 3), st.integers(0, 60)),
    max_size=40,
)


@given(OPERATIONS, st.integers(1, 12))
def test_lease_ledger_balances_and_every_sample_has_one_holder(operations, lease_samples):
    """Reference model: the holder of each sample in one dictionary."""
    books = LeaseLedger()
    owner: dict[int, object] = {}
    merged: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    incarnations = {1: 1, 2: 1, 3: 1}
    lines: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for what, learner, amount in operations:
        key = (learner, incarnations[learner])
        if what == "grant":
            waiting, holder = count_samples(books.pool), books.holder(key)
            before, old_next = holder.total, books.next
            books.grant(holder, before + amount, lease_samples)
            line = [n for begin, end in holder.intervals for n in range(begin, end)]
            new = line[len(line) - (holder.total - before) :]
            assert all(owner.get(n) in (None, "pool") for n in new)
            assert books.next == old_next or waiting <= len(new), "new samples while others were waiting"
            owner.update(dict.fromkeys(new, key))
            lines[learner] += new
        elif what == "merge" and key in books.holders:
            taken = min(amount, books.holders[key].total)
            books.merge(key, taken)
            merged[learner].update(lines[learner][:taken])
        elif what == "close" and key in books.holders:
            books.close(key)
            for n in lines[learner]:
                owner[n] = "merged" if n in merged[learner] else "pool"
            lines[learner] = []
            incarnations[learner] += 1
        elif what == "restart":
            record = books.record(7)
            books = LeaseLedger()
            books.restore(record)
            for each, incarnation in incarnations.items():
                books.merge((each, incarnation), len(merged[each] & set(lines[each])))
        books.check()
        assert {n for begin, end in books.pool for n in range(begin, end)} == {
            n for n, who in owner.items() if who == "pool"
        }
    everybody = [n for each in merged.values() for n in each]
    assert len(everybody) == len(set(everybody))


LEASES = st.lists(st.integers(1, 7), min_size=1, max_size=8)


@given(LEASES, st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30), st.integers(1, 10))
def test_cursor_takes_every_sample_once_and_replays_the_same(lengths, steps, keep):
    """Leases arrive in between. `fresh` is all that a tape holds of a step."""
    leases: dict[int, tuple[int, int]] = {0: (100, 100 + lengths[0])}
    line, replayed = SampleCursor(keep), SampleCursor(keep)
    seen: list[int] = []
    for count, arrives in steps:
        if arrives and len(leases) < len(lengths):
            number = len(leases)
            leases[number] = (100 * (number + 1), 100 * (number + 1) + lengths[number])
        numbers, fresh = line.next(leases, count)
        assert len(numbers) == count
        assert fresh in (0, count) or not seen
        assert replayed.replayed(leases, count, fresh) == numbers
        assert set(numbers[fresh:]) <= set(seen) | set(numbers[:fresh])
        seen += numbers[:fresh]
    assert line.taken == len(seen)
    assert seen == [n for begin, end in leases.values() for n in range(begin, end)][: len(seen)]


def test_used_up_lease_may_be_removed():
    line = SampleCursor(8)
    assert line.take({0: (0, 4), 1: (4, 8)}, 4) == (0, 1, 2, 3)
    assert line.take({1: (4, 8)}, 2) == (4, 5)


def test_limits_hold_also_where_the_pool_is_made_of_crumbs():
    books = LeaseLedger()
    books.restore(LeaseRecord(1, 1000, tuple((2 * n, 2 * n + 1) for n in range(100)), (), 900))
    holder = books.holder((1, 1))
    assert books.grant(holder, 1000, 10) == MAX_LEASES_PER_REPLY
    assert holder.total == MAX_LEASES_PER_REPLY
    books.check()
