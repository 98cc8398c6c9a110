"""One test per sentence of the protocol: durable before published, restarts of the syncer, consistent snapshots."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk

FIRST = RoundId(0, 0, 1, 1)
MARK = MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0)
SNAPSHOT = 1_000_001


def one_round(merged: bool = True) -> SyncerTalk:
    """One learner, the first round sealed, or merged and being written."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    if merged:
        talk.merged(1.2)
    return talk


# --------------------------------------------------------------------------------------------------------------------
# Durable before published


def test_a_version_is_durable_before_any_learner_sees_it():
    talk = one_round()
    assert [type(effect) for effect in talk.effects] == [Persist]
    assert talk.fragment(0).version == 0
    talk.fires(1.9)
    assert talk.bodies(Published) == []
    talk.persisted(2.0)
    assert talk.bodies(Published) == [(1, Published(0, 1, 0, MARK, 0.0))]


def test_full_disk_publishes_nothing_and_retries_the_merged_version():
    talk = one_round()
    for attempt in range(4):
        talk.persist_failed(talk.now + 0.1)
        assert talk.codes() == ["persist-failed"]
        assert talk.bodies(Published) == []
        assert talk.fragment(0).phase == "merging"
        talk.voices[1].reports(talk.now + 0.1, step=2 + attempt)
        while not talk.of(Persist):
            talk.fires(talk.core.next_deadline())
    talk.persisted(talk.now + 0.1)
    assert [body.version for _, body in talk.bodies(Published)] == [1]


def test_successful_write_retries_all_failed_versions():
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=1, rounds_in_flight=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    for fragment in (0, 1):
        one.contributes(1.1, fragment)
        talk.merged(1.2)

    def asked() -> list[int]:
        return [effect.record.key().number for effect in talk.awaited if type(effect) is Persist]

    for _ in range(6):  # until both wait for long
        assert sorted(asked()) == [0, 1]
        talk.persist_failed(talk.now)
        talk.persist_failed(talk.now)
        while len(asked()) < 2:
            talk.fires(talk.core.next_deadline())
    talk.persist_failed(talk.now)
    (left,) = asked()
    talk.persisted(talk.now)
    assert asked() == [1 - left], "it waits although the disk has space"
    until = talk.now + 60.0
    while (due := talk.core.next_deadline()) is not None and due < until:
        talk.fires(due)
        assert asked() == [1 - left], "it is requested twice"


def test_version_record_has_contributions_and_merged_up_to_of_all_learners():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.acknowledges(1.2)
    two.reports(2.0, step=2)
    assert set(two.pulls) == {0}
    two.contributes(2.1)
    talk.merged(2.2)
    record = talk.one(Persist).record
    assert record.round == RoundId(0, 1, 1, 1)  # type: ignore[union-attr]
    assert record.merged_up_to == ((1, MARK), (2, MergedUpTo(1, 1, 2, 200, 0)))  # type: ignore[union-attr]
    assert record.merged_tokens == 300  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------------------------
# The syncer can be killed at any instant and restarted on its directory


def test_kill_between_durable_and_published_loses_no_version_and_no_merged_up_to():
    talk = one_round()
    talk.written_without_reply()
    again = talk.restarted()
    assert again.fragment(0).version == 1
    assert again.core.view().merges == 1
    one = again.voice(1, session=2)
    one.step, one.trained = 3, 300
    one.hello(5.0, training=True, received=(0,))
    again.expect(
        LogReason(("learner", 1), because("member-resumed", 1)),
        again.to(1, Welcome((1,), 0.0, 0.0)),
        again.to(1, Published(0, 1, 0, MARK, 0.0)),
    )


def test_no_contribution_is_merged_twice_across_a_restart():
    """(1) The copy of step 1 is durable in version 1, (2) the syncer dies before it says so, (3) the learner sends the
    same copy to its successor, which refuses it, (4) and `merged_up_to` shows the learner that it is merged."""
    talk = one_round()
    talk.written_without_reply()
    again = talk.restarted()
    one = again.voice(1, session=2)
    one.step, one.trained = 2, 200
    one.hello(5.0, training=True, received=(0,))
    one.delivers(5.1, Contribution(FIRST, 1, 1, 100, 100, 0))
    again.expect(again.to(1, RefuseContribution(FIRST, because("contribution-no-round", 0))))

    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.receives(0.5, Pull(FIRST))
    learner.steps(1.0)
    learner.handle(1.5, ConnectionClosed(1, "connection reset by peer"))
    learner.epoch = 2
    learner.opens(2.0)
    learner.welcomed(2.1, versions=(1,))
    learner.receives(2.2, RefuseContribution(FIRST, because("contribution-no-round", 0)))
    learner.gets(2.3, 0, 1, MARK, base=0)
    learner.steps(3.0)
    assert learner.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 100, 0, 100)


def test_kill_before_durable_leaves_the_progress_with_the_learners():
    talk = one_round()
    again = talk.restarted()
    assert again.fragment(0).version == 0
    one = again.voice(1, session=2)
    one.received[0] = 0
    one.step, one.trained = 3, 300
    one.hello(5.0, training=True)
    one.reports(6.0, step=4)
    assert one.pulls[0] == RoundId(0, 0, 2, 1)
    one.contributes(6.1)
    assert again.one(MergeRound).contributions[0].tokens == 400


def test_a_contribution_that_claims_more_than_is_left_after_a_restart_is_refused():
    talk = one_round()
    talk.written_without_reply()
    again = talk.restarted()
    one = again.voice(1, session=2)
    one.received[0] = 1
    one.step, one.trained = 1, 100
    one.hello(5.0, training=True)
    one.reports(6.0, step=2)
    one.contributes(6.1, steps=2, tokens=200)
    assert again.codes() == ["contribution-implausible"]


def test_ledgers_survive_a_restart():
    talk = one_round()
    talk.persisted(1.3)
    before = talk.core.view().ledger
    again = talk.restarted()
    assert again.core.view().ledger == before
    assert again.core.view().trained == 100


def test_tokens_of_replaced_incarnations_survive_a_restart():
    talk = one_round()
    talk.persisted(1.3)
    talk.voices[1].reports(2.0, step=3)
    talk.voice(1, incarnation=2).hello(3.0)
    talk.persisted(3.1)
    assert talk.core.view().trained == 300
    again = talk.restarted()
    line = again.core.view().ledger[0]
    assert (again.core.view().trained, line.merged, line.pending) == (300, 100, 0)
    assert line.dropped == {"before-restart": 200}


def test_an_incarnation_that_was_replaced_is_refused_also_after_a_restart():
    talk = one_round()
    talk.persisted(1.3)
    talk.voice(1, incarnation=2).hello(3.0)
    talk.persisted(3.1)
    again = talk.restarted()
    again.voice(1, incarnation=1, session=2).hello(5.0, training=True)
    assert again.codes() == ["refused-incarnation"]


def test_learners_train_on_meanwhile_and_an_old_pull_is_not_answered_to_the_new_syncer():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    talk.steps(1.0)
    talk.epoch = 2
    talk.opens(1.5)
    talk.expect(talk.sends(Hello("run", (), (0,), 1, 100, True)))
    talk.welcomed(1.6)
    talk.steps(2.0)
    talk.expect(talk.sends(Report(2, 200, 1.0)))


def test_rounds_of_different_epochs_are_distinguished():
    talk = one_round()
    again = talk.restarted()
    one = again.voice(1, session=2)
    one.received[0] = 0
    one.step, one.trained = 1, 100
    one.hello(5.0, training=True)
    one.reports(6.0, step=2)
    one.delivers(6.1, Contribution(FIRST, 1, 1, 100, 100, 0))
    again.expect(again.to(1, RefuseContribution(FIRST, because("contribution-stale-round", 1, 1, 0))))


# --------------------------------------------------------------------------------------------------------------------
# Consistent snapshot of the whole run


def two_learners(every_merges: int = 0) -> SyncerTalk:
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=2, snapshot_every_merges=every_merges))
    for i in (1, 2):
        talk.joined(i)
    for i in (1, 2):
        talk.voices[i].reports(1.0, step=1)
    return talk


def test_requested_snapshot_puts_its_marker_on_every_message():
    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    talk.expect(
        LogReason(("run", 0), because("snapshot-started", SNAPSHOT, 2)),
        talk.to(1, Marker(SNAPSHOT)),
        talk.to(2, Marker(SNAPSHOT)),
    )
    assert talk.core.state.marker == SNAPSHOT


def test_syncer_starts_a_snapshot_after_snapshot_every_merges():
    talk = two_learners(every_merges=1)
    talk.voices[1].contributes(1.2)
    talk.voices[2].contributes(1.2)
    talk.merges_and_persists(1.3)
    assert talk.bodies(Marker) == [(1, Marker(SNAPSHOT)), (2, Marker(SNAPSHOT))]


def test_a_learner_saves_at_the_step_boundary_before_it_adopts_or_sends_anything_newer():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    talk.receives(1.5, Pull(FIRST))
    talk.marker = 7
    talk.gets(1.6, 0, 1, base=0)
    assert talk.of(SaveSnapshot) == []
    talk.steps(2.0)
    assert [type(e).__name__ for e in talk.effects][:1] == ["SaveSnapshot"]
    assert talk.one(SaveSnapshot) == SaveSnapshot(7, 2)
    assert talk.one(AdoptFragment).version == 1
    talk.saved(2.1)
    talk.expect(talk.sends(SnapshotPart(7, 2, 200, (0,), ())))


def test_messages_before_the_cut_do_not_carry_the_marker():
    """A copy that is sent again between the marker and the cut was made before the cut: it is in flight."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.steps(1.0)
    talk.marker = 7
    talk.receives(1.5, Marker(7))
    talk.receives(1.6, Pull(FIRST))
    assert [e.envelope.marker for e in talk.effects] == [0]
    talk.steps(2.0)
    assert {e.envelope.marker for e in talk.effects if not isinstance(e, SaveSnapshot)} == {7}


def test_a_contribution_that_was_sent_before_its_learners_cut_and_arrives_after_ours_is_recorded():
    talk = two_learners()
    one, two = talk.voices[1], talk.voices[2]
    talk.handle(1.5, SnapshotRequested())
    one.contributes(1.6)  # its envelope does not carry the marker yet
    assert talk.effects[0] == RecordInFlight(SNAPSHOT, 1, FIRST)
    one.marker = two.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), (FIRST,)))
    two.contributes(2.1)  # made after its cut
    assert talk.of(RecordInFlight) == []
    part = SnapshotPart(SNAPSHOT, 2, 200, (0,), ())
    two.delivers(2.2, part)
    first = SnapshotPart(SNAPSHOT, 2, 200, (0,), (FIRST,))
    talk.expect(Persist(SnapshotRecord(SNAPSHOT, (0,), ((1, first), (2, part)), ((1, FIRST),), ())))
    talk.persisted(2.3, "SnapshotRecord")
    assert talk.codes() == ["snapshot-durable"]


def test_a_part_waits_for_the_contributions_that_were_outstanding_at_its_cut():
    """Bulk data may be overtaken: the part arrives before the contribution that was sent before it."""
    talk = two_learners()
    one, two = talk.voices[1], talk.voices[2]
    talk.handle(1.5, SnapshotRequested())
    late = one.envelope(one.contribution())
    two.marker = SNAPSHOT
    two.delivers(1.8, SnapshotPart(SNAPSHOT, 1, 100, (0,), ()))
    one.marker = SNAPSHOT
    one.delivers(1.9, SnapshotPart(SNAPSHOT, 1, 100, (0,), (FIRST,)))
    assert talk.of(Persist) == [], "its contribution is still on its way"
    one.delivers(2.0, late.body, marker=0)
    assert talk.one(Persist).record.in_flight == ((1, FIRST),)  # type: ignore[union-attr]


def test_a_lost_learner_is_left_out_of_the_snapshot():
    talk = two_learners()
    one = talk.voices[1]
    talk.handle(1.5, SnapshotRequested())
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    talk.handle(2.1, LearnerDisconnected(2, 1, 1, "power"))
    assert "snapshot-left-out" in talk.codes()
    assert talk.one(Persist).record.left_out == (2,)  # type: ignore[union-attr]


def test_a_learner_whose_part_does_not_arrive_in_time_is_left_out():
    talk = two_learners()
    one = talk.voices[1]
    talk.handle(1.5, SnapshotRequested())
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    now, step = 2.0, 2
    while not talk.of(Persist):
        now, step = now + 1.0, step + 1
        for voice in talk.voices.values():
            voice.reports(now, step)
            if talk.of(Persist):
                break
        assert now < 700, "the snapshot waits for ever; the story is printed above"
    assert "snapshot-left-out" in talk.codes()
    assert talk.one(Persist).record.left_out == (2,)  # type: ignore[union-attr]


def test_the_marker_is_sent_again_to_a_learner_that_has_not_answered_and_a_saved_part_is_sent_again():
    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    one, two = talk.voices[1], talk.voices[2]
    one.marker = SNAPSHOT
    one.delivers(2.0, SnapshotPart(SNAPSHOT, 2, 200, (0,), ()))
    now, step = 2.0, 2
    while not talk.bodies(Marker):
        now, step = now + 1.0, step + 1
        two.reports(now, step)
        assert now < 700, "a lost marker is never made good; the story is printed above"
    assert talk.bodies(Marker) == [(2, Marker(SNAPSHOT))]

    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.saved(1.1)
    learner.receives(5.0, Marker(7))
    learner.expect(learner.sends(SnapshotPart(7, 1, 100, (0,), ())))


def test_learner_that_cannot_save_its_part_is_left_out():
    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.save_failed(1.1, "no space left on device")
    part = SnapshotPart(7, 1, 100, (0,), (), "no space left on device")
    learner.expect(
        LogReason(("learner", 1), because("snapshot-part-failed", "no space left on device")), learner.sends(part)
    )

    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    talk.voices[1].delivers(2.0, structs.replace(part, snapshot=SNAPSHOT))
    (said,) = [effect.reason for effect in talk.effects if isinstance(effect, LogReason)]
    why = "the learner could not save its part: no space left on device"
    assert said == because("snapshot-left-out", 1, SNAPSHOT, why)


def test_learners_without_run_directory_have_snapshots_with_their_counters():
    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.marker = 7
    learner.receives(0.5, Marker(7))
    learner.steps(1.0)
    learner.save_failed(1.1, "no run directory")
    part = SnapshotPart(7, 1, 100, (0,), (), "no run directory")
    learner.expect(learner.sends(part))  # and nothing is logged

    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    part = structs.replace(part, snapshot=SNAPSHOT)
    talk.voices[1].delivers(2.0, part)
    talk.expect()
    talk.voices[2].delivers(2.0, part)
    talk.expect(Persist(SnapshotRecord(SNAPSHOT, (0,), ((1, part), (2, part)), (), ())))


def test_snapshot_without_learners_is_abandoned():
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.handle(1.0, SnapshotRequested())
    assert talk.codes() == ["snapshot-started", "snapshot-abandoned"]


def test_one_snapshot_at_a_time():
    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    talk.handle(1.6, SnapshotRequested())
    talk.expect(LogReason(("run", 0), because("snapshot-in-progress")))


def test_snapshot_that_cannot_be_written_is_abandoned():
    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    for voice in talk.voices.values():
        voice.delivers(2.0, SnapshotPart(SNAPSHOT, 1, 100, (0,), ()))
    talk.persist_failed(2.1)
    assert talk.codes() == ["snapshot-abandoned"]
    talk.handle(3.0, SnapshotRequested())
    assert talk.bodies(Marker) == [(1, Marker(SNAPSHOT + 1)), (2, Marker(SNAPSHOT + 1))]


@pytest.mark.parametrize("snapshot", [SNAPSHOT - 1, SNAPSHOT + 1])
def test_a_part_of_another_snapshot_is_ignored(snapshot):
    talk = two_learners()
    talk.handle(1.5, SnapshotRequested())
    talk.voices[1].delivers(2.0, SnapshotPart(snapshot, 1, 100, (0,), ()))
    talk.expect()
    assert talk.core.view().ignored == {"snapshot-part-unexpected": 1}


def test_snapshots_of_a_restarted_syncer_have_higher_numbers():
    talk = one_round()
    again = talk.restarted()
    assert again.core.state.marker > SNAPSHOT
