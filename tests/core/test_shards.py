"""Fragments that other processes hold: what is lost with a shard, what waits for it, and what does not."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    CloseConnection,
    DiscardRound,
    Finish,
    FinishAck,
    FinishRequested,
    Halt,
    LeaseRequest,
    LogReason,
    MergeDone,
    MergeFailed,
    Persist,
    Persisted,
    PersistFailed,
    Published,
    Pull,
    Ready,
    RecordKey,
    Resync,
    ShardLost,
    ShardReconnected,
    SnapshotPart,
    SnapshotRecord,
    SnapshotRequested,
    Started,
    SyncerEvent,
)
from atoll.core.reasons import because
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import Limits, RoundId, RunConfig
from atoll.tape.format import Actor, Entry
from atoll.tape.story import build_story
from tests.core.conversation import SyncerTalk, Voice

TWO = RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2)
"""Fragment 0 is due after one step, fragment 1 after two. Each has its own shard in these tests."""


def pulling(config: RunConfig = TWO) -> tuple[SyncerTalk, Voice]:
    """Fragment 0 has an open round."""
    talk = SyncerTalk(config)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    assert talk.fragment(0).phase == "pulling"
    return talk, one


def saving(config: RunConfig = TWO) -> tuple[SyncerTalk, Voice]:
    """Fragment 0 is merged, and its version is being written."""
    talk, one = pulling(config)
    one.contributes(1.1)
    talk.merged(1.2)
    assert talk.one(Persist).record.key() == RecordKey("version", 0, 1)
    return talk, one


# --------------------------------------------------------------------------------------------------------------------
# Lost


def test_a_round_ends_with_its_shard_and_every_learner_keeps_its_progress():
    talk, _ = pulling()
    talk.shard_lost(1.1, 0)
    talk.expect(
        DiscardRound(RoundId(0, 0, 1, 1), because("shard-round-lost", 0, 1)),
        LogReason(("fragment", 0), because("shard-lost", "connection reset by peer")),
    )
    assert talk.fragment(0).phase == "idle"
    assert talk.fragment(0).reason == "its shard is unavailable: connection reset by peer"
    assert talk.core.state.ledger.line(0).pending == 100


@pytest.mark.parametrize("phase", ["pulling", "grace", "merging"])
def test_a_round_that_is_not_merged_ends_in_whatever_phase_it_is(phase):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, overlap_steps=2, grace_margin=0.5))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.5)
    talk.merged(1.5)
    talk.persisted(1.75)
    one.acknowledges(2.0)
    two.acknowledges(2.0)  # from here on there is slack to wait in
    two.reports(2.5, step=2)
    one.reports(3.0, step=3)
    if phase != "pulling":
        one.contributes(3.25)
    if phase == "merging":
        two.contributes(3.3)
    assert talk.fragment(0).phase == phase
    talk.shard_lost(3.4, 0)
    assert talk.codes() == ["shard-round-lost", "shard-lost"]
    assert talk.fragment(0).phase == "idle"
    assert talk.fires(9.0) == []


def test_the_place_of_a_round_that_was_lost_goes_to_no_fragment_of_the_same_shard():
    """(1) The shard of 0 and 1 is lost, (2) the round of 0 ends, (3) the round of 1, which is due, must not open."""
    talk, one = pulling(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    one.reports(2.0, step=2)
    assert talk.fragment(1).phase == "idle"
    talk.shard_lost(2.1, 0, 1)
    assert talk.bodies(Pull) == []
    assert talk.core.view().rounds_in_flight == 0


def test_another_shard_goes_in_its_place():
    talk, one = pulling(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    one.reports(2.0, step=2)
    talk.shard_lost(2.1, 0)
    assert talk.bodies(Pull) == [(1, Pull(RoundId(1, 0, 1, 1)))]


def test_other_fragments_continue_while_a_shard_is_unavailable():
    talk, one = pulling()
    talk.shard_lost(1.1, 0)
    for step in range(2, 12):
        one.reports(step, step=step)
        if talk.fragment(1).phase == "pulling":
            one.contributes(step + 0.1, fragment=1)
            talk.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.3)
    assert talk.fragment(1).version >= 4
    assert talk.fragment(0).version == 0


def test_a_version_that_only_a_shard_knows_of_takes_nobodys_place():
    talk, one = saving(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    talk.shard_lost(1.3, 0)
    assert talk.fragment(0).phase == "merging"
    one.reports(2.0, step=2)
    assert talk.bodies(Pull) == [(1, Pull(RoundId(1, 0, 1, 1)))]


def test_repeated_shard_loss_is_logged_once():
    talk, _ = pulling()
    talk.shard_lost(1.1, 0)
    talk.shard_lost(1.2, 0)
    talk.expect()


@pytest.mark.parametrize(
    "late",
    [
        MergeDone(RoundId(0, 0, 1, 1)),
        MergeFailed(RoundId(0, 0, 1, 1), "out of memory"),
        Persisted(RecordKey("version", 0, 1)),
        PersistFailed(RecordKey("version", 0, 1), "no space left on device"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_unavailable_shard_are_ignored(late):
    talk, _ = saving()
    talk.shard_lost(1.3, 0)
    talk.handle(1.4, late)
    talk.expect()
    assert talk.core.view().ignored == {"shard-unavailable": 1}
    talk.shard_back(2.0, (0, 1))
    assert talk.fragment(0).version == 1


def test_failed_write_is_not_retried_while_its_shard_is_unavailable():
    talk, _ = saving()
    talk.persist_failed(1.3)
    talk.shard_lost(1.4, 0)
    assert [effect for effect in talk.fires(500.0) if isinstance(effect, Persist)] == []
    talk.shard_back(500.0, (0, 0))
    assert "its shard has reconnected without version 1, which was merged but not durable" in talk.sentences
    assert talk.fragment(0).version == 0


def test_unexpected_reply_of_a_driver_for_an_old_process_is_detected():
    """After `ShardBack` the contract holds again: the key of a version that is merged anew is that of the lost one."""
    talk, _ = saving()
    talk.shard_lost(1.3, 0)
    talk.shard_back(1.4, (0, 0))
    with pytest.raises(AssertionError, match="unexpected"):
        talk.handle(1.5, Persisted(RecordKey("version", 0, 1)))


# --------------------------------------------------------------------------------------------------------------------
# Back


def test_version_that_was_durable_at_the_loss_is_published_on_reconnection():
    talk, _ = saving()
    talk.shard_lost(1.3, 0)
    talk.shard_back(9.0, (0, 1))
    assert (
        "its shard has reconnected with version 1, which was already merged when the shard was lost" in talk.sentences
    )
    [(learner, published)] = talk.bodies(Published)
    assert (learner, published.version, published.base) == (1, 1, 0)
    assert published.merged_up_to is not None
    assert published.merged_up_to.copied_at == 1
    assert talk.core.state.ledger.line(0).merged == 100
    assert talk.core.view().merges == 1


def test_shard_outage_adds_no_link_measurements():
    talk, one = saving()
    talk.shard_lost(1.3, 0)
    talk.shard_back(500.0, (0, 1))
    one.acknowledges(500.1)
    assert talk.core.state.members[1].sync_time.count == 0


def test_a_version_that_was_not_durable_is_merged_anew():
    talk, one = saving()
    talk.shard_lost(1.3, 0)
    talk.shard_back(1.4, (0, 0))
    assert talk.of(DiscardRound) == [DiscardRound(RoundId(0, 0, 1, 1), because("shard-version-lost", 1))]
    assert talk.core.state.ledger.line(0).merged == 0
    one.reports(2.0, step=2)
    assert RoundId(0, 0, 1, 2) in [pull.round for _, pull in talk.bodies(Pull)]
    one.contributes(2.1)
    talk.merges_and_persists(2.2)
    assert talk.fragment(0).version == 1
    assert talk.core.state.ledger.line(0).merged == 200


@pytest.mark.parametrize("version", [0, 2])
def test_shard_with_another_version_stays_unavailable(version):
    talk, _ = saving()
    talk.persisted(1.3)
    talk.shard_lost(1.4, 0)
    talk.shard_back(1.5, (0, version))
    sentence = f"its shard has reconnected with version {version}, the newest is 1;"
    assert talk.fragment(0).reason == f"{sentence} check that its directory belongs to this run"
    assert talk.bodies(Published) == []
    talk.shard_back(1.6, (0, 1))
    assert [published.version for _, published in talk.bodies(Published)] == [1]


def test_reconnection_of_an_available_shard_changes_nothing():
    talk, _ = pulling()
    talk.shard_back(1.1, (0, 0), (1, 0))
    talk.expect()
    assert talk.core.view().ignored == {"shard-was-available": 2}


def test_version_recovered_from_a_shard_can_end_the_run():
    talk, _ = saving(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2, budget_merges=1))
    talk.shard_lost(1.3, 0)
    talk.shard_back(1.4, (0, 1))
    assert "finish-budget" in talk.codes()


# --------------------------------------------------------------------------------------------------------------------
# What learners are owed


def test_unacked_version_is_sent_again_when_its_shard_reconnects():
    talk, _ = saving()
    talk.persisted(1.3)
    assert [p.version for _, p in talk.bodies(Published)] == [1]
    talk.shard_lost(1.4, 0)
    assert talk.fires(20.0) == [], "it is not the learner's fault"
    talk.shard_back(20.0, (0, 1))
    assert [(p.version, p.base) for _, p in talk.bodies(Published)] == [(1, None)]


def test_after_that_it_is_sent_until_it_is_acknowledged_as_ever():
    talk, one = saving()
    talk.persisted(1.3)
    talk.shard_lost(1.4, 0)
    talk.shard_back(2.0, (0, 1))
    one.reports(2.1, step=2)
    done = [e for e in talk.fires(1000.0) if isinstance(e, CloseConnection)]
    assert [hangup.reason.code for hangup in done][:1] == ["member-publish-unacked"]


def test_ack_of_a_retransmission_is_no_sample():
    talk, one = saving()
    talk.persisted(1.3)
    measured = talk.core.state.members[1].ack_time.count
    talk.shard_lost(1.4, 0)
    talk.shard_back(2.0, (0, 1))
    one.acknowledges(2.001)
    assert talk.core.state.members[1].ack_time.count == measured


def test_joining_learner_gets_fragments_of_a_shard_when_it_reconnects():
    talk, _ = pulling()
    talk.shard_lost(1.1, 0)
    two = talk.voice(2)
    two.hello(2.0)
    talk.persisted(2.0)
    assert [(to, p.fragment) for to, p in talk.bodies(Published)] == [(2, 1)]
    talk.shard_back(3.0, (0, 0))
    assert [(to, p.fragment, p.version) for to, p in talk.bodies(Published)] == [(2, 0, 0)]
    two.acknowledges(3.1)
    two.delivers(3.2, Ready(because("state-kept")))
    assert talk.member(2).state == "live"


def test_resync_of_an_unavailable_shard_is_answered_when_it_reconnects():
    talk, one = saving()
    talk.persisted(1.3)
    talk.shard_lost(1.4, 0)
    one.delivers(1.5, Resync(0, 0))
    talk.expect()
    talk.shard_back(1.6, (0, 1))
    assert [(p.version, p.base) for _, p in talk.bodies(Published)] == [(1, None)]


# --------------------------------------------------------------------------------------------------------------------
# Snapshots, leases, the pause


def test_snapshot_does_not_wait_for_contributions_to_an_unavailable_shard():
    talk, one = pulling()
    talk.handle(1.1, SnapshotRequested())
    marker = talk.core.state.marker
    one.marker = marker
    one.delivers(1.2, SnapshotPart(marker, 1, 100, (0, 0), (RoundId(0, 0, 1, 1),)))
    assert talk.of(Persist) == []
    talk.shard_lost(1.3, 0)
    [saved] = [effect.record for effect in talk.of(Persist)]
    assert isinstance(saved, SnapshotRecord)
    assert [learner for learner, _ in saved.parts] == [1]
    assert saved.left_out == ()


def test_leases_of_an_ended_incarnation_wait_for_its_shard():
    """What is in a version that may be durable is neither merged nor free: its successor gets no lease before."""
    config = RunConfig(fragments=2, every_steps=2, grace_margin=0.0, lease_samples=4, leases_ahead=1)
    talk = SyncerTalk(config)
    one = talk.voice(1)
    one.hello(0.0)
    talk.persisted(0.0)
    one.acknowledges(0.1)
    one.delivers(0.2, LeaseRequest(0, 0))
    talk.persisted(0.3)
    one.delivers(0.4, Ready(because("peer-new-run")))
    one.taken = 3
    one.reports(1.0, step=1)
    one.contributes(1.1, consumed_samples=3)
    talk.merged(1.2)
    talk.shard_lost(1.3, 0)
    again = talk.voice(1, 2)
    again.hello(2.0)
    talk.persisted(2.1)
    again.delivers(2.2, LeaseRequest(0, 0))
    assert "leases-returned" not in talk.core.state.reason_counts
    talk.shard_back(3.0, (0, 1))
    assert "5 samples of incarnation 1 are in no version; they are leased again before new samples" in talk.sentences
    talk.persisted(3.1)
    assert again.leases[0].begin == 3


def test_reconnected_shard_opens_no_round_while_paused():
    talk, one = pulling()
    talk.core.state.paused = True
    talk.shard_lost(1.1, 0)
    one.reports(2.0, step=2)
    one.reports(3.0, step=3)
    talk.shard_back(3.1, (0, 0))
    assert talk.bodies(Pull) == []
    talk.core.state.paused = False


# --------------------------------------------------------------------------------------------------------------------
# The end


QUICK = RunConfig(
    fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2, limits=Limits(initial_wait_s=1.0, max_wait_s=20.0)
)


def finishes(talk: SyncerTalk, one: Voice, at: float) -> None:
    """The other fragment has its last merge, and every timer that the end may wait for has passed."""
    talk.handle(at, FinishRequested())
    one.reports(at + 1, step=one.step + 1)
    one.reports(at + 2, step=one.step + 1)
    one.contributes(at + 2.1, fragment=1)
    talk.merged(at + 2.2)
    talk.persisted(at + 2.3, "VersionRecord")
    one.acknowledges(at + 2.4)
    talk.fires(at + 40.0)


def test_run_ends_without_a_lost_shard():
    talk, one = pulling(QUICK)
    talk.shard_lost(1.1, 0)
    finishes(talk, one, 2.0)
    assert "no last merge of fragment 0: its shard is unavailable: connection reset by peer" in talk.sentences
    assert talk.core.state.stage.value == "sealing"
    talk.persisted(42.0)
    assert talk.bodies(Finish) == [(1, Finish((0, 1), 1))]
    one.delivers(42.1, FinishAck(1))
    talk.one(Halt)


def test_shard_that_reconnects_in_time_has_its_last_merge():
    talk, one = pulling(QUICK)
    talk.shard_lost(1.1, 0)
    talk.handle(2.0, FinishRequested())
    one.reports(3.0, step=2)
    one.reports(4.0, step=3)
    talk.shard_back(4.1, (0, 0))
    assert [pull.round.fragment for _, pull in talk.bodies(Pull)] == [0]
    assert talk.core.state.fragments[0].round_is_final


def test_end_does_not_wait_for_a_version_with_unknown_durability():
    talk, one = saving(QUICK)
    talk.shard_lost(1.3, 0)
    finishes(talk, one, 2.0)
    assert talk.core.state.stage.value == "sealing"
    assert talk.core.state.manifest is not None
    assert talk.core.state.manifest.versions == (0, 1)


def test_shard_may_recover_a_version_until_the_manifest_is_written():
    talk, one = saving(QUICK)
    talk.shard_lost(1.3, 0)
    talk.handle(2.0, FinishRequested())
    one.contributes(2.1, fragment=1)
    talk.fires(30.0)
    assert "no last merge of fragment 0: its shard is unavailable: connection reset by peer" in talk.sentences
    talk.shard_back(30.0, (0, 1))
    assert talk.fragment(0).version == 1
    talk.merges_and_persists(30.1)
    assert talk.core.state.manifest is not None
    assert talk.core.state.manifest.versions == (1, 1)


def test_a_version_that_the_manifest_does_not_name_is_of_no_run():
    talk, one = saving(QUICK)
    talk.shard_lost(1.3, 0)
    finishes(talk, one, 2.0)
    talk.persisted(42.0)
    talk.shard_back(43.0, (0, 1))
    assert talk.codes() == ["shard-version-mismatch"]
    assert talk.fragment(0).version == 0
    talk.shard_back(44.0, (0, 0))
    assert talk.codes() == ["shard-reconnected", "shard-version-lost"]
    assert talk.fragment(0).phase == "idle"


def test_skipped_final_is_logged_once():
    talk, one = saving(QUICK)
    talk.persisted(1.3)
    one.acknowledges(1.4)
    talk.handle(2.0, FinishRequested())
    one.reports(3.0, step=2)
    one.reports(4.0, step=3)
    one.contributes(4.1)
    talk.merged(4.2)
    talk.shard_lost(4.3, 0)
    talk.fires(60.0)
    talk.shard_back(60.0, (0, 1))
    talk.shard_lost(61.0, 0)
    talk.shard_back(62.0, (0, 1))
    talk.fires(300.0)
    assert len([s for s in talk.sentences if s.startswith("no last merge of fragment 0")]) == 1


def test_learners_get_final_versions_when_a_shard_reconnects_after_the_end():
    talk, one = saving(QUICK)
    talk.persisted(1.3)
    talk.shard_lost(1.4, 0)
    one.received[0] = 0  # version 1 has not arrived
    finishes(talk, one, 2.0)
    talk.persisted(42.0)
    assert talk.bodies(Finish) == [(1, Finish((1, 1), 2))]
    talk.shard_back(43.0, (0, 1))
    assert [(p.fragment, p.version, p.base) for _, p in talk.bodies(Published)] == [(0, 1, None)]


# --------------------------------------------------------------------------------------------------------------------
# Its story


def test_the_story_of_the_run_tells_of_a_shard_and_that_of_a_fragment_of_what_became_of_it():
    core = SyncerCore(TWO, epoch=1)
    events: tuple[SyncerEvent, ...] = (
        Started(),
        ShardLost((0, 1), "connection reset by peer"),
        ShardReconnected(((0, 0),)),
    )
    entries = [Entry(at, Actor(0, 1), at + 1, event, tuple(core.handle(at, event))) for at, event in enumerate(events)]
    assert [line.sentence for line in build_story(entries, ("run", 0))][1:] == [
        "the shard of fragments 0, 1 is unavailable: connection reset by peer",
        "the shard of fragment 0 is back",
    ]
    assert [line.sentence for line in build_story(entries, ("fragment", 0))][1:] == [
        "its shard is unavailable: connection reset by peer",
        "its shard has reconnected with version 0",
    ]
