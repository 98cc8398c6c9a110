"""Tests of each rule of the protocol: durable before published, restarts of the syncer, consistent snapshots."""

from __future__ import annotations

import pytest
from msgspec import structs

from atoll.core.protocol import (
    AdoptFragment,
    ConnectionClosed,
    Contribution,
    Hello,
    LearnerDisconnected,
    LogReason,
    Marker,
    MergeRound,
    Persist,
    Published,
    Pull,
    RecordInFlight,
    RefuseContribution,
    Report,
    SaveSnapshot,
    SnapshotPart,
    SnapshotRecord,
    SnapshotRequested,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.types import MergedUpTo, RoundId, RunConfig
from tests.core.harness import LearnerHarness, SyncerHarness

FIRST = RoundId(0, 0, 1, 1)
MERGED_UP_TO = MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0)
SNAPSHOT = 1_000_001


def one_round(merged: bool = True) -> SyncerHarness:
    """Return a run with one learner whose first round is sealed, or merged and being written."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    if merged:
        harness.merged(1.2)
    return harness


# --------------------------------------------------------------------------------------------------------------------
# Durable before published


def test_version_is_durable_before_it_is_published():
    harness = one_round()
    assert [type(effect) for effect in harness.effects] == [Persist]
    assert harness.fragment(0).version == 0
    harness.fire_timers(1.9)
    assert harness.bodies(Published) == []
    harness.persisted(2.0)
    assert harness.bodies(Published) == [(1, Published(0, 1, 0, MERGED_UP_TO, 0.0))]


def test_full_disk_publishes_nothing_and_retries_the_merged_version():
    harness = one_round()
    for attempt in range(4):
        harness.persist_failed(harness.now + 0.1)
        assert harness.codes() == ["persist-failed"]
        assert harness.bodies(Published) == []
        assert harness.fragment(0).phase == "merging"
        harness.learners[1].reports(harness.now + 0.1, step=2 + attempt)
        while not harness.of(Persist):
            harness.fire_timers(harness.core.next_deadline())
    harness.persisted(harness.now + 0.1)
    assert [body.version for _, body in harness.bodies(Published)] == [1]


def test_successful_write_retries_all_failed_versions():
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=1, rounds_in_flight=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    for fragment in (0, 1):
        one.contributes(1.1, fragment)
        harness.merged(1.2)

    def requested() -> list[int]:
        return [effect.record.key().number for effect in harness.awaited if type(effect) is Persist]

    for _ in range(6):  # until both backoffs are long
        assert sorted(requested()) == [0, 1]
        harness.persist_failed(harness.now)
        harness.persist_failed(harness.now)
        while len(requested()) < 2:
            harness.fire_timers(harness.core.next_deadline())
    harness.persist_failed(harness.now)
    (left,) = requested()
    harness.persisted(harness.now)
    assert requested() == [1 - left], "the other record waits although the disk has space"
    until = harness.now + 60.0
    while (due := harness.core.next_deadline()) is not None and due < until:
        harness.fire_timers(due)
        assert requested() == [1 - left], "it is requested twice"


def test_version_record_has_contributions_and_merged_up_to_of_all_learners():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.acknowledges(1.2)
    two.reports(2.0, step=2)
    assert set(two.pulls) == {0}
    two.contributes(2.1)
    harness.merged(2.2)
    record = harness.one(Persist).record
    assert record.round == RoundId(0, 1, 1, 1)  # type: ignore[union-attr]
    assert record.merged_up_to == ((1, MERGED_UP_TO), (2, MergedUpTo(1, 1, 2, 200, 0)))  # type: ignore[union-attr]
    assert record.merged_tokens == 300  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------------------------
# The syncer can be killed at any time and restarted on its directory


def test_kill_between_durable_and_published_loses_no_version_and_no_merged_up_to():
    harness = one_round()
    harness.written_without_reply()
    again = harness.restarted()
    assert again.fragment(0).version == 1
    assert again.core.view().merges == 1
    one = again.add_learner(1, session=2)
    one.step, one.trained = 3, 300
    one.hello(5.0, training=True, received=(0,))
    again.expect(
        LogReason(("learner", 1), because("member-resumed", 1)),
        again.to(1, Welcome((1,), 0.0, 0.0)),
        again.to(1, Published(0, 1, 0, MERGED_UP_TO, 0.0)),
    )


def test_no_contribution_is_merged_twice_across_a_restart():
    """(1) The copy of step 1 is durable in version 1, (2) the syncer dies before it publishes it, (3) the learner sends
    the same copy to its successor, which refuses it, (4) and `merged_up_to` shows the learner that it is merged."""
    harness = one_round()
    harness.written_without_reply()
    again = harness.restarted()
    one = again.add_learner(1, session=2)
    one.step, one.trained = 2, 200
    one.hello(5.0, training=True, received=(0,))
    one.delivers(5.1, Contribution(FIRST, 1, 1, 100, 100, 0))
    again.expect(again.to(1, RefuseContribution(FIRST, because("contribution-no-round", 0))))

    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.receives(0.5, Pull(FIRST))
    learner.steps(1.0)
    learner.handle(1.5, ConnectionClosed(1, "connection reset by peer"))
    learner.epoch = 2
    learner.opens(2.0)
    learner.welcomed(2.1, versions=(1,))
    learner.receives(2.2, RefuseContribution(FIRST, because("contribution-no-round", 0)))
    learner.published(2.3, 0, 1, MERGED_UP_TO, base=0)
    learner.steps(3.0)
    assert learner.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 100, 0, 100)


def test_kill_before_durable_leaves_the_progress_with_the_learners():
    harness = one_round()
    again = harness.restarted()
    assert again.fragment(0).version == 0
    one = again.add_learner(1, session=2)
    one.received[0] = 0
    one.step, one.trained = 3, 300
    one.hello(5.0, training=True)
    one.reports(6.0, step=4)
    assert one.pulls[0] == RoundId(0, 0, 2, 1)
    one.contributes(6.1)
    assert again.one(MergeRound).contributions[0].tokens == 400


def test_contribution_with_already_merged_tokens_is_refused_after_a_restart():
    harness = one_round()
    harness.written_without_reply()
    again = harness.restarted()
    one = again.add_learner(1, session=2)
    one.received[0] = 1
    one.step, one.trained = 1, 100
    one.hello(5.0, training=True)
    one.reports(6.0, step=2)
    one.contributes(6.1, steps=2, tokens=200)
    assert again.codes() == ["contribution-implausible"]


def test_ledgers_survive_a_restart():
    harness = one_round()
    harness.persisted(1.3)
    before = harness.core.view().ledger
    again = harness.restarted()
    assert again.core.view().ledger == before
    assert again.core.view().trained == 100


def test_tokens_of_replaced_incarnations_survive_a_restart():
    harness = one_round()
    harness.persisted(1.3)
    harness.learners[1].reports(2.0, step=3)
    harness.add_learner(1, incarnation=2).hello(3.0)
    harness.persisted(3.1)
    assert harness.core.view().trained == 300
    again = harness.restarted()
    line = again.core.view().ledger[0]
    assert (again.core.view().trained, line.merged, line.pending) == (300, 100, 0)
    assert line.dropped == {"before-restart": 200}


def test_replaced_incarnation_is_refused_after_a_restart():
    harness = one_round()
    harness.persisted(1.3)
    harness.add_learner(1, incarnation=2).hello(3.0)
    harness.persisted(3.1)
    again = harness.restarted()
    again.add_learner(1, incarnation=1, session=2).hello(5.0, training=True)
    assert again.codes() == ["refused-incarnation"]


def test_learner_trains_while_disconnected_and_drops_pulls_of_the_old_syncer():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    harness.steps(1.0)
    harness.epoch = 2
    harness.opens(1.5)
    harness.expect(harness.sends(Hello("run", (), (0,), 1, 100, True)))
    harness.welcomed(1.6)
    harness.steps(2.0)
    harness.expect(harness.sends(Report(2, 200, 1.0)))


def test_rounds_of_different_epochs_are_distinguished():
    harness = one_round()
    again = harness.restarted()
    one = again.add_learner(1, session=2)
    one.received[0] = 0
    one.step, one.trained = 1, 100
    one.hello(5.0, training=True)
    one.reports(6.0, step=2)
    one.delivers(6.1, Contribution(FIRST, 1, 1, 100, 100, 0))
    again.expect(again.to(1, RefuseContribution(FIRST, because("contribution-stale-round", 1, 1, 0))))


# --------------------------------------------------------------------------------------------------------------------
# Consistent snapshot of the whole run


def two_learners(every_merges: int = 0) -> SyncerHarness:
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=2, snapshot_every_merges=every_merges))
    for i in (1, 2):
        harness.joined(i)
    for i in (1, 2):
        harness.learners[i].reports(1.0, step=1)
    return harness


def test_requested_snapshot_puts_its_marker_on_every_message():
    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    harness.expect(
        LogReason(("run", 0), because("snapshot-started", SNAPSHOT, 2)),
        harness.to(1, Marker(SNAPSHOT)),
        harness.to(2, Marker(SNAPSHOT)),
    )
    assert harness.core.state.marker == SNAPSHOT


def test_syncer_starts_a_snapshot_after_snapshot_every_merges():
    harness = two_learners(every_merges=1)
    harness.learners[1].contributes(1.2)
    harness.learners[2].contributes(1.2)
    harness.merges_and_persists(1.3)
    assert harness.bodies(Marker) == [(1, Marker(SNAPSHOT)), (2, Marker(SNAPSHOT))]


def test_learner_saves_at_the_step_boundary_before_it_adopts_or_sends_anything_newer():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    harness.receives(1.5, Pull(FIRST))
    harness.marker = 7
    harness.published(1.6, 0, 1, base=0)
    assert harness.of(SaveSnapshot) == []
    harness.steps(2.0)
    assert [type(e).__name__ for e in harness.effects][:1] == ["SaveSnapshot"]
    assert harness.one(SaveSnapshot) == SaveSnapshot(7, 2)
    assert harness.one(AdoptFragment).version == 1
    harness.saved(2.1)
    harness.expect(harness.sends(SnapshotPart(7, 2, 200, (0,), ())))


def test_messages_before_the_cut_do_not_carry_the_marker():
    """A copy that is sent again between the marker and the cut is older than the cut, so it is in flight."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.steps(1.0)
    harness.marker = 7
    harness.receives(1.5, Marker(7))
    harness.receives(1.6, Pull(FIRST))
    assert [e.envelope.marker for e in harness.effects] == [0]
    harness.steps(2.0)
    assert {e.envelope.marker for e in harness.effects if not isinstance(e, SaveSnapshot)} == {7}


def test_contribution_sent_before_the_learner_cut_and_received_after_the_syncer_cut_is_recorded():
    harness = two_learners()
    one, two = harness.learners[1], harness.learners[2]
    harness.handle(1.5, SnapshotRequested())
    one.contributes(1.6)  # its envelope does not carry the marker yet
    assert harness.effects[0] == RecordInFlight(SNAPSHOT, 1, FIRST)
    one.marker = two.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), (FIRST,)))
    two.contributes(2.1)  # made after its cut
    assert harness.of(RecordInFlight) == []
    part = SnapshotPart(SNAPSHOT, 2, 200, (0,), ())
    two.delivers(2.2, part)
    first = SnapshotPart(SNAPSHOT, 2, 200, (0,), (FIRST,))
    harness.expect(Persist(SnapshotRecord(SNAPSHOT, (0,), ((1, first), (2, part)), ((1, FIRST),), ())))
    harness.persisted(2.3, "SnapshotRecord")
    assert harness.codes() == ["snapshot-durable"]


def test_snapshot_part_waits_for_contributions_outstanding_at_its_cut():
    """Control messages overtake bulk data: the part arrives before an earlier contribution."""
    harness = two_learners()
    one, two = harness.learners[1], harness.learners[2]
    harness.handle(1.5, SnapshotRequested())
    late = one.envelope(one.contribution())
    two.marker = SNAPSHOT
    two.delivers(1.8, SnapshotPart(SNAPSHOT, 1, 100, (0,), ()))
    one.marker = SNAPSHOT
    one.delivers(1.9, SnapshotPart(SNAPSHOT, 1, 100, (0,), (FIRST,)))
    assert harness.of(Persist) == [], "its contribution is still in flight"
    one.delivers(2.0, late.body, marker=0)
    assert harness.one(Persist).record.in_flight == ((1, FIRST),)  # type: ignore[union-attr]


def test_lost_learner_is_left_out_of_the_snapshot():
    harness = two_learners()
    one = harness.learners[1]
    harness.handle(1.5, SnapshotRequested())
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    harness.handle(2.1, LearnerDisconnected(2, 1, 1, "power"))
    assert "snapshot-left-out" in harness.codes()
    assert harness.one(Persist).record.left_out == (2,)  # type: ignore[union-attr]


def test_learner_whose_part_does_not_arrive_in_time_is_left_out():
    harness = two_learners()
    one = harness.learners[1]
    harness.handle(1.5, SnapshotRequested())
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    now, step = 2.0, 2
    while not harness.of(Persist):
        now, step = now + 1.0, step + 1
        for fake in harness.learners.values():
            fake.reports(now, step)
            if harness.of(Persist):
                break
        assert now < 700, "the snapshot waits forever; the story is printed above"
    assert "snapshot-left-out" in harness.codes()
    assert harness.one(Persist).record.left_out == (2,)  # type: ignore[union-attr]


def test_lost_marker_and_lost_part_are_sent_again():
    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    one, two = harness.learners[1], harness.learners[2]
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    now, step = 2.0, 2
    while not harness.bodies(Marker):
        now, step = now + 1.0, step + 1
        two.reports(now, step)
        assert now < 700, "a lost marker is never sent again; the story is printed above"
    assert harness.bodies(Marker) == [(2, Marker(SNAPSHOT))]

    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.saved(1.1)
    learner.receives(5.0, Marker(7))
    learner.expect(learner.sends(SnapshotPart(7, 1, 100, (0,), ())))


def test_learner_that_cannot_save_its_part_is_left_out():
    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.save_failed(1.1, "no space left on device")
    part = SnapshotPart(7, 1, 100, (0,), (), "no space left on device")
    learner.expect(
        LogReason(("learner", 1), because("snapshot-part-failed", "no space left on device")), learner.sends(part)
    )

    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    harness.learners[1].delivers(2.0, structs.replace(part, snapshot=SNAPSHOT))
    (logged,) = [effect.reason for effect in harness.effects if isinstance(effect, LogReason)]
    cause = "the learner could not save its part: no space left on device"
    assert logged == because("snapshot-left-out", 1, SNAPSHOT, cause)


def test_learners_without_run_directory_have_snapshots_with_their_counters():
    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.save_failed(1.1, "no run directory")
    part = SnapshotPart(7, 1, 100, (0,), (), "no run directory")
    learner.expect(learner.sends(part))  # without a log line

    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    part = structs.replace(part, snapshot=SNAPSHOT)
    harness.learners[1].delivers(2.0, part)
    harness.expect()
    harness.learners[2].delivers(2.0, part)
    harness.expect(Persist(SnapshotRecord(SNAPSHOT, (0,), ((1, part), (2, part)), (), ())))


def test_snapshot_without_learners_is_abandoned():
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.handle(1.0, SnapshotRequested())
    assert harness.codes() == ["snapshot-started", "snapshot-abandoned"]


def test_one_snapshot_at_a_time():
    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    harness.handle(1.6, SnapshotRequested())
    harness.expect(LogReason(("run", 0), because("snapshot-in-progress")))


def test_snapshot_that_cannot_be_written_is_abandoned():
    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    for fake in harness.learners.values():
        fake.delivers(2.0, SnapshotPart(SNAPSHOT, 1, 100, (0,), ()))
    harness.persist_failed(2.1)
    assert harness.codes() == ["snapshot-abandoned"]
    harness.handle(3.0, SnapshotRequested())
    assert harness.bodies(Marker) == [(1, Marker(SNAPSHOT + 1)), (2, Marker(SNAPSHOT + 1))]


@pytest.mark.parametrize("snapshot", [SNAPSHOT - 1, SNAPSHOT + 1])
def test_part_of_another_snapshot_is_ignored(snapshot):
    harness = two_learners()
    harness.handle(1.5, SnapshotRequested())
    harness.learners[1].delivers(2.0, SnapshotPart(snapshot, 1, 100, (0,), ()))
    harness.expect()
    assert harness.core.view().ignored == {"snapshot-part-unexpected": 1}


def test_snapshots_of_a_restarted_syncer_have_higher_numbers():
    harness = one_round()
    again = harness.restarted()
    assert again.core.state.marker > SNAPSHOT
