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
from tests.core.harness import FakeLearner, LearnerHarness, SyncerHarness

CONFIG = RunConfig(fragments=2, every_steps=1, lease_samples=10, leases_ahead=1)
PAIR = RunConfig(fragments=1, every_steps=1, quorum=2, lease_samples=10, leases_ahead=1)


def leased(
    harness: SyncerHarness, fake: FakeLearner, at: float, leases: int = 0, consumed: int = 0
) -> list[tuple[int, int]]:
    """Send a lease request and return the leases of the reply, after the write."""
    fake.delivers(at, LeaseRequest(leases, consumed))
    sent = harness.bodies(Lease)
    if harness.of(Persist):
        harness.persisted(at, "LeaseRecord")
        sent += harness.bodies(Lease)
    assert all(to == fake.id for to, _ in sent)
    return [(lease.begin, lease.end) for _, lease in sent]


def merged_into(harness: SyncerHarness, fake: FakeLearner, at: float, step: int, fragment: int, consumed: int) -> None:
    """Take one step with the only learner and merge it."""
    fake.reports(at, step)
    fake.contributes(at, fragment, consumed_samples=consumed)
    harness.merges_and_persists(at)


# --------------------------------------------------------------------------------------------------------------------
# The syncer


def test_lease_is_sent_only_when_it_is_durable():
    harness = SyncerHarness(CONFIG)
    fake = harness.joined(1)
    fake.delivers(1.0, LeaseRequest(0, 0))
    assert harness.bodies(Lease) == []
    assert harness.one(Persist).record.next_sample == 20  # type: ignore[union-attr]
    harness.persist_failed(1.1)
    assert harness.bodies(Lease) == []
    assert harness.codes() == ["leases-not-durable"]
    harness.fire_timers(5.0)
    harness.persisted(5.0)
    assert harness.bodies(Lease) == [(1, Lease(0, 0, 10)), (1, Lease(1, 10, 20))]


def test_two_learners_never_get_the_same_samples():
    harness = SyncerHarness(CONFIG)
    first, second = harness.joined(1), harness.joined(2)
    assert leased(harness, first, 1.0) == [(0, 10), (10, 20)]
    assert leased(harness, second, 1.0) == [(20, 30), (30, 40)]
    assert leased(harness, first, 2.0, leases=2, consumed=11) == [(40, 50), (50, 60)]
    assert leased(harness, second, 2.0, leases=2, consumed=9) == [(60, 70)]


def test_killed_syncer_leases_no_sample_twice():
    harness = SyncerHarness(CONFIG)
    assert leased(harness, harness.joined(1), 1.0) == [(0, 10), (10, 20)]
    harness.learners[1].delivers(2.0, LeaseRequest(2, 15))  # requested, not durable
    again = harness.restarted(3.0)
    assert leased(again, again.joined(2, 3.0), 3.5) == [(20, 30), (30, 40)]

    harness.written_without_reply()  # written, but the process died before sending it
    again = harness.restarted(3.0)
    assert leased(again, again.joined(2, 3.0), 3.5) == [(40, 50), (50, 60)]
    fake = again.add_learner(1, session=2)
    fake.step, fake.trained = 3, 300
    fake.hello(4.0, training=True)
    assert leased(again, fake, 4.5, leases=2, consumed=15) == [(20, 30), (30, 40)]


def test_new_incarnation_gets_the_unmerged_samples_of_the_old_one():
    harness = SyncerHarness(CONFIG)
    old = harness.joined(1)
    leased(harness, old, 0.5)
    merged_into(harness, old, 1.0, 1, 0, consumed=4)
    merged_into(harness, old, 2.0, 2, 1, consumed=7)  # one fragment is enough
    new = harness.joined(1, 3.0, incarnation=2)
    assert harness.core.view().leases == (20, 13, 0, 7)
    assert leased(harness, new, 4.0) == [(7, 17), (17, 20), (20, 30)]


def test_returned_samples_are_leased_before_new_ones():
    harness = SyncerHarness(CONFIG)
    old, other = harness.joined(1), harness.joined(2)
    leased(harness, old, 0.5)
    old.delivers(1.0, Left("enough"))
    assert "leases-returned" not in harness.codes()
    harness.persisted(1.1)
    assert harness.codes() == ["leases-returned"]
    assert leased(harness, other, 2.0) == [(0, 10), (10, 20)]


def test_leases_return_only_when_the_end_of_their_holder_is_durable():
    """Otherwise a restarted syncer would treat the old incarnation as current and merge samples that it has leased to
    another learner."""
    harness = SyncerHarness(CONFIG)
    old, other = harness.joined(1), harness.joined(2)
    leased(harness, old, 0.5)
    harness.add_learner(1, incarnation=2).hello(1.0)
    assert leased(harness, other, 1.1) == [(20, 30), (30, 40)]
    again = harness.restarted(2.0)  # the members record was never written
    zombie = again.add_learner(1, session=2)
    zombie.step, zombie.trained = 2, 200
    zombie.hello(2.1, training=True)
    assert leased(again, zombie, 2.2, leases=2, consumed=20) == [(40, 50), (50, 60)]


def test_leases_return_only_when_no_open_round_has_a_contribution_of_their_holder():
    """The interleaving in core/syncer/data_leases.py, up to the point at which samples would be merged twice."""
    harness = SyncerHarness(PAIR)
    old, other = harness.joined(1), harness.joined(2)
    leased(harness, old, 0.5)
    leased(harness, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = harness.add_learner(1, incarnation=2)
    new.hello(1.2)
    harness.persisted(1.3)
    assert harness.core.state.lease_closing
    assert leased(harness, new, 1.4) == []  # not before the samples of its predecessor are settled
    other.contributes(1.5, consumed_samples=4)
    harness.merged(1.6)
    harness.persisted(1.7, "VersionRecord")
    assert harness.one(Persist).record.pool == ()  # type: ignore[union-attr]
    harness.persisted(1.8)
    assert [lease.number for _, lease in harness.bodies(Lease)] == [0, 1, 2]
    assert [(lease.begin, lease.end) for _, lease in harness.bodies(Lease)] == [(4, 14), (14, 20), (40, 50)]


class GrantsAtOnce(DataLeases):
    def _has_unsettled_predecessor(self, learner: int) -> bool:
        return False


class HarnessWithoutWait(SyncerHarness):
    parts = SyncerComponents(data_leases=GrantsAtOnce)


@pytest.mark.parametrize(("kind", "is_leased_again"), [(SyncerHarness, False), (HarnessWithoutWait, True)])
def test_successor_gets_no_leases_until_its_predecessor_is_settled(kind, is_leased_again):
    """The whole interleaving in core/syncer/data_leases.py. Without the wait merged samples would be leased again."""
    harness = kind(PAIR)
    old, other = harness.joined(1), harness.joined(2)
    leased(harness, old, 0.5)
    leased(harness, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = harness.add_learner(1, incarnation=2)
    new.hello(1.2)
    harness.persisted(1.3)
    new.delivers(1.4, LeaseRequest(0, 0))
    if harness.of(Persist):
        harness.persisted(1.4)
    other.contributes(1.5, consumed_samples=4)
    harness.merged(1.6)
    harness.persisted(1.7, "VersionRecord")
    if harness.of(Persist):
        harness.persisted(1.7, "LeaseRecord")
    new.acknowledges(1.8)
    new.delivers(1.8, Ready(because("state-kept")))
    new.reports(2.0, 1)
    other.reports(2.0, 2)
    other.reports(3.0, 3)
    new.reports(3.0, 2)
    new.contributes(3.1, consumed_samples=2)
    other.contributes(3.1, consumed_samples=8)
    harness.merges_and_persists(3.2)
    assert dict(harness.disk[("version", 0)].merged_up_to)[1].incarnation == 2
    again = harness.restarted(4.0)
    pool = {n for begin, end in again.core.state.leases.pool for n in range(begin, end)}
    assert (not pool.isdisjoint(range(4))) is is_leased_again


def test_failed_merge_returns_its_samples():
    harness = SyncerHarness(PAIR)
    old, other = harness.joined(1), harness.joined(2)
    leased(harness, old, 0.5)
    leased(harness, other, 0.5)
    old.reports(1.0, 1)
    other.reports(1.0, 1)
    old.contributes(1.1, consumed_samples=4)
    new = harness.add_learner(1, incarnation=2)
    new.hello(1.2)
    harness.persisted(1.3)
    other.contributes(1.5, consumed_samples=4)
    harness.merge_failed(1.6)
    assert "leases-returned" in harness.codes()
    assert leased(harness, new, 2.0)[0] == (0, 10)


def test_restart_restores_merged_samples_from_merged_up_to():
    harness = SyncerHarness(CONFIG)
    old = harness.joined(1)
    leased(harness, old, 0.5)
    merged_into(harness, old, 1.0, 1, 0, consumed=6)  # after the last lease record
    again = harness.restarted(2.0)
    assert again.core.view().leases == (20, 0, 14, 6)
    new = again.joined(1, 3.0, incarnation=2)
    assert leased(again, new, 4.0) == [(6, 16), (16, 20), (20, 30)]


def test_restart_returns_the_leases_of_replaced_incarnations():
    harness = SyncerHarness(CONFIG)
    old = harness.joined(1)
    leased(harness, old, 0.5)
    merged_into(harness, old, 1.0, 1, 0, consumed=6)
    harness.add_learner(1, incarnation=2).hello(2.0)
    harness.written_without_reply()
    again = harness.restarted(3.0)
    assert again.core.view().leases == (20, 14, 0, 6)


def test_invalid_lease_request_is_a_strike_and_leases_nothing():
    harness = SyncerHarness(CONFIG)
    fake = harness.joined(1)
    leased(harness, fake, 0.5)
    for leases, consumed in ((3, 0), (2, 21), (-1, 0)):
        fake.delivers(1.0, LeaseRequest(leases, consumed))
        assert not harness.of(Persist)
        assert not harness.bodies(Lease)
    assert harness.member(1).state == "quarantined"


def test_late_duplicate_of_a_lease_request_is_not_a_strike():
    harness = SyncerHarness(CONFIG)
    fake = harness.joined(1)
    leased(harness, fake, 0.5)
    merged_into(harness, fake, 1.0, 1, 0, consumed=20)
    assert leased(harness, fake, 2.0, leases=2, consumed=20) == [(20, 30), (30, 40)]
    fake.delivers(3.0, LeaseRequest(0, 0))
    harness.expect()
    assert harness.member(1).strikes == 0


def test_contribution_on_samples_that_were_not_leased_is_refused():
    harness = SyncerHarness(CONFIG)
    fake = harness.joined(1)
    fake.reports(1.0, 1)
    fake.contributes(1.1, consumed_samples=0)  # it trains without a lease
    assert fake.refusals[-1].reason.code == "contribution-implausible"
    leased(harness, fake, 1.2)
    fake.contributes(1.3, consumed_samples=21)
    assert fake.refusals[-1].reason.code == "contribution-implausible"
    fake.contributes(1.4, consumed_samples=20)
    assert len(fake.refusals) == 2


def test_unmerged_leases_of_a_learner_are_bounded():
    ledger = LeaseLedger()
    holder = ledger.holder((1, 1))
    while ledger.grant(holder, target=10**9, lease_samples=1):
        assert len(holder.intervals) <= MAX_UNMERGED_LEASES
    assert holder.total == MAX_UNMERGED_LEASES
    ledger.merge((1, 1), 100)
    assert ledger.grant(holder, 10**9, 1) == MAX_LEASES_PER_REPLY


def test_run_without_leases_ignores_lease_messages():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1))
    fake = harness.joined(1)
    fake.delivers(1.0, LeaseRequest(0, 0))
    harness.expect()
    learner = LearnerHarness(RunConfig(fragments=1, every_steps=1)).trains()
    learner.receives(1.0, Lease(0, 0, 8))
    assert learner.core.state.leased_samples == 0


def test_invalid_lease_settings_are_refused():
    with pytest.raises(ValueError, match="lease_samples must be a whole number of at least 0"):
        RunConfig(lease_samples=-1)
    with pytest.raises(ValueError, match="leases_ahead must be a whole number of at least 1"):
        RunConfig(leases_ahead=0)


# --------------------------------------------------------------------------------------------------------------------
# The learner


def joining() -> LearnerHarness:
    harness = LearnerHarness(RunConfig(fragments=1, every_steps=2, lease_samples=8, leases_ahead=1))
    harness.opens(0.0)
    harness.welcomed(0.0)
    harness.published(0.0, 0, 0)
    harness.receives(0.0, NoPeer(because("peer-new-run"), True))
    return harness


def test_training_starts_with_the_first_lease():
    harness = joining()
    assert not harness.core.training
    harness.receives(1.0, Lease(0, 0, 8))
    assert harness.of(StartTraining)
    assert harness.core.training
    assert [body for _, body in harness.bodies(Ready)]


def test_lost_lease_request_is_retried():
    harness = joining()
    harness.fire_timers(100.0)
    assert harness.bodies(LeaseRequest) == [(1, LeaseRequest(0, 0))] * 2


def test_lease_request_is_repeated_on_a_new_connection():
    harness = joining()
    harness.receives(1.0, Lease(0, 0, 8))
    harness.steps(2.0, samples=2)
    assert harness.bodies(LeaseRequest) == []  # a request is pending
    harness.handle(3.0, ConnectionClosed(1, "connection reset by peer"))
    harness.opens(4.0)
    harness.welcomed(4.1)
    assert harness.bodies(LeaseRequest) == [(1, LeaseRequest(1, 2))]


def test_late_duplicate_and_reordered_leases_count_once():
    harness = joining()
    for lease in (Lease(1, 8, 16), Lease(0, 0, 8), Lease(0, 0, 8), Lease(2, 16, 24), Lease(1, 8, 16), Lease(1, 8, 16)):
        harness.receives(1.0, lease)
    assert harness.core.state.lease_count == 2
    assert harness.core.state.leased_samples == 16
    harness.steps(2.0, samples=8)
    assert harness.bodies(Report) == [(1, Report(1, 100, 1.0, 8))]
    with pytest.raises(AssertionError, match="consumed 9 samples, but only 8"):
        harness.steps(3.0, samples=9)


def test_steps_without_a_lease_are_counted_and_logged_once():
    harness = joining()
    harness.receives(1.0, Lease(0, 0, 8))
    harness.steps(2.0, samples=8)
    for at in (3.0, 4.0, 5.0):
        harness.steps(at)
    assert harness.core.state.repeated == 3
    assert harness.sentences.count(str(because("leases-exhausted", 8))) == 1
    harness.receives(6.0, Lease(1, 8, 16))
    harness.steps(7.0, samples=8)
    harness.steps(8.0)
    assert harness.sentences.count(str(because("leases-exhausted", 16))) == 1


def test_contribution_counts_the_samples_at_its_copy():
    harness = joining()
    harness.receives(1.0, Lease(0, 0, 8))
    harness.receives(1.5, Pull(RoundId(0, 0, 1, 1)))
    harness.steps(2.0, samples=3)
    assert [body.consumed_samples for _, body in harness.bodies(Contribution)] == [3]
    harness.steps(3.0, samples=3)
    harness.receives(3.5, Pull(RoundId(0, 0, 1, 1)))
    assert [body.consumed_samples for _, body in harness.bodies(Contribution)] == [3]


# --------------------------------------------------------------------------------------------------------------------
# Properties

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("grant", "merge", "close", "restart")), st.integers(1, 3), st.integers(0, 60)),
    max_size=40,
)


@given(OPERATIONS, st.integers(1, 12))
def test_lease_ledger_balances_and_every_sample_has_one_holder(operations, lease_samples):
    """Compare with a reference model: one dictionary with the holder of each sample."""
    ledger = LeaseLedger()
    owner: dict[int, object] = {}
    merged: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    incarnations = {1: 1, 2: 1, 3: 1}
    lines: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for action, learner, amount in operations:
        key = (learner, incarnations[learner])
        if action == "grant":
            waiting, holder = count_samples(ledger.pool), ledger.holder(key)
            before, old_next = holder.total, ledger.next
            ledger.grant(holder, before + amount, lease_samples)
            line = [n for begin, end in holder.intervals for n in range(begin, end)]
            new = line[len(line) - (holder.total - before) :]
            assert all(owner.get(n) in (None, "pool") for n in new)
            assert ledger.next == old_next or waiting <= len(new), "new samples were leased before the pool was empty"
            owner.update(dict.fromkeys(new, key))
            lines[learner] += new
        elif action == "merge" and key in ledger.holders:
            consumed = min(amount, ledger.holders[key].total)
            ledger.merge(key, consumed)
            merged[learner].update(lines[learner][:consumed])
        elif action == "close" and key in ledger.holders:
            ledger.close(key)
            for n in lines[learner]:
                owner[n] = "merged" if n in merged[learner] else "pool"
            lines[learner] = []
            incarnations[learner] += 1
        elif action == "restart":
            record = ledger.record(7)
            ledger = LeaseLedger()
            ledger.restore(record)
            for each, incarnation in incarnations.items():
                ledger.merge((each, incarnation), len(merged[each] & set(lines[each])))
        ledger.check()
        assert {n for begin, end in ledger.pool for n in range(begin, end)} == {
            n for n, holder in owner.items() if holder == "pool"
        }
    all_merged = [n for each in merged.values() for n in each]
    assert len(all_merged) == len(set(all_merged))


LEASES = st.lists(st.integers(1, 7), min_size=1, max_size=8)


@given(LEASES, st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30), st.integers(1, 10))
def test_cursor_takes_every_sample_once_and_replays_the_same(lengths, steps, max_recent):
    """Leases arrive between steps. The tape records only `fresh` of each step."""
    leases: dict[int, tuple[int, int]] = {0: (100, 100 + lengths[0])}
    cursor, replayed = SampleCursor(max_recent), SampleCursor(max_recent)
    seen: list[int] = []
    for count, arrives in steps:
        if arrives and len(leases) < len(lengths):
            number = len(leases)
            leases[number] = (100 * (number + 1), 100 * (number + 1) + lengths[number])
        numbers, fresh = cursor.next(leases, count)
        assert len(numbers) == count
        assert fresh in (0, count) or not seen
        assert replayed.replayed(leases, count, fresh) == numbers
        assert set(numbers[fresh:]) <= set(seen) | set(numbers[:fresh])
        seen += numbers[:fresh]
    assert cursor.consumed == len(seen)
    assert seen == [n for begin, end in leases.values() for n in range(begin, end)][: len(seen)]


def test_used_up_lease_may_be_removed():
    cursor = SampleCursor(8)
    assert cursor.take({0: (0, 4), 1: (4, 8)}, 4) == (0, 1, 2, 3)
    assert cursor.take({1: (4, 8)}, 2) == (4, 5)


def test_lease_limits_hold_with_a_fragmented_pool():
    ledger = LeaseLedger()
    ledger.restore(LeaseRecord(1, 1000, tuple((2 * n, 2 * n + 1) for n in range(100)), (), 900))
    holder = ledger.holder((1, 1))
    assert ledger.grant(holder, 1000, 10) == MAX_LEASES_PER_REPLY
    assert holder.total == MAX_LEASES_PER_REPLY
    ledger.check()
