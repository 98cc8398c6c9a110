"""Fragments of shard processes: what a lost shard affects, what waits for it, and what continues."""

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
from tests.core.harness import FakeLearner, SyncerHarness

TWO = RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2)
"""Fragment 0 is due after one step, fragment 1 after two. Each has its own shard in these tests."""


def pulling(config: RunConfig = TWO) -> tuple[SyncerHarness, FakeLearner]:
    """Return a run in which fragment 0 has an open round."""
    harness = SyncerHarness(config)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    assert harness.fragment(0).phase == "pulling"
    return harness, one


def saving(config: RunConfig = TWO) -> tuple[SyncerHarness, FakeLearner]:
    """Return a run in which fragment 0 is merged and its version is being written."""
    harness, one = pulling(config)
    one.contributes(1.1)
    harness.merged(1.2)
    assert harness.one(Persist).record.key() == RecordKey("version", 0, 1)
    return harness, one


# --------------------------------------------------------------------------------------------------------------------
# Loss


def test_round_ends_with_its_shard_and_every_learner_keeps_its_progress():
    harness, _ = pulling()
    harness.shard_lost(1.1, 0)
    harness.expect(
        DiscardRound(RoundId(0, 0, 1, 1), because("shard-round-lost", 0, 1)),
        LogReason(("fragment", 0), because("shard-lost", "connection reset by peer")),
    )
    assert harness.fragment(0).phase == "idle"
    assert harness.fragment(0).reason == "its shard is unavailable: connection reset by peer"
    assert harness.core.state.ledger.fragment_totals(0).pending == 100


@pytest.mark.parametrize("phase", ["pulling", "grace", "merging"])
def test_unmerged_round_ends_with_its_shard_in_every_phase(phase):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, overlap_steps=2, grace_margin=0.5))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.5)
    harness.merged(1.5)
    harness.persisted(1.75)
    one.acknowledges(2.0)
    two.acknowledges(2.0)  # from now on there is slack for a grace window
    two.reports(2.5, step=2)
    one.reports(3.0, step=3)
    if phase != "pulling":
        one.contributes(3.25)
    if phase == "merging":
        two.contributes(3.3)
    assert harness.fragment(0).phase == phase
    harness.shard_lost(3.4, 0)
    assert harness.codes() == ["shard-round-lost", "shard-lost"]
    assert harness.fragment(0).phase == "idle"
    assert harness.fire_timers(9.0) == []


def test_no_round_of_a_lost_shard_opens_when_another_one_ends():
    """(1) The shard of 0 and 1 is lost, (2) the round of 0 ends, (3) the round of 1, which is due, must not open."""
    harness, one = pulling(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    one.reports(2.0, step=2)
    assert harness.fragment(1).phase == "idle"
    harness.shard_lost(2.1, 0, 1)
    assert harness.bodies(Pull) == []
    assert harness.core.view().rounds_in_flight == 0


def test_round_of_another_shard_opens_after_a_shard_loss():
    harness, one = pulling(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    one.reports(2.0, step=2)
    harness.shard_lost(2.1, 0)
    assert harness.bodies(Pull) == [(1, Pull(RoundId(1, 0, 1, 1)))]


def test_other_fragments_continue_while_a_shard_is_unavailable():
    harness, one = pulling()
    harness.shard_lost(1.1, 0)
    for step in range(2, 12):
        one.reports(step, step=step)
        if harness.fragment(1).phase == "pulling":
            one.contributes(step + 0.1, fragment=1)
            harness.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.3)
    assert harness.fragment(1).version >= 4
    assert harness.fragment(0).version == 0


def test_version_with_unknown_durability_does_not_count_as_in_flight():
    harness, one = saving(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=1))
    harness.shard_lost(1.3, 0)
    assert harness.fragment(0).phase == "merging"
    one.reports(2.0, step=2)
    assert harness.bodies(Pull) == [(1, Pull(RoundId(1, 0, 1, 1)))]


def test_repeated_shard_loss_is_logged_once():
    harness, _ = pulling()
    harness.shard_lost(1.1, 0)
    harness.shard_lost(1.2, 0)
    harness.expect()


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
    harness, _ = saving()
    harness.shard_lost(1.3, 0)
    harness.handle(1.4, late)
    harness.expect()
    assert harness.core.view().ignored == {"shard-unavailable": 1}
    harness.shard_reconnected(2.0, (0, 1))
    assert harness.fragment(0).version == 1


def test_failed_write_is_not_retried_while_its_shard_is_unavailable():
    harness, _ = saving()
    harness.persist_failed(1.3)
    harness.shard_lost(1.4, 0)
    assert [effect for effect in harness.fire_timers(500.0) if isinstance(effect, Persist)] == []
    harness.shard_reconnected(500.0, (0, 0))
    assert "its shard has reconnected without version 1, which was merged but not durable" in harness.sentences
    assert harness.fragment(0).version == 0


def test_unexpected_reply_of_a_driver_for_an_old_process_is_detected():
    """After `ShardReconnected` stale replies are errors: a version that is merged again has the key of the lost one."""
    harness, _ = saving()
    harness.shard_lost(1.3, 0)
    harness.shard_reconnected(1.4, (0, 0))
    with pytest.raises(AssertionError, match="unexpected"):
        harness.handle(1.5, Persisted(RecordKey("version", 0, 1)))


# --------------------------------------------------------------------------------------------------------------------
# Reconnection


def test_version_that_was_durable_at_the_loss_is_published_on_reconnection():
    harness, _ = saving()
    harness.shard_lost(1.3, 0)
    harness.shard_reconnected(9.0, (0, 1))
    assert (
        "its shard has reconnected with version 1, which was already merged when the shard was lost"
        in harness.sentences
    )
    [(learner, published)] = harness.bodies(Published)
    assert (learner, published.version, published.base) == (1, 1, 0)
    assert published.merged_up_to is not None
    assert published.merged_up_to.copied_at == 1
    assert harness.core.state.ledger.fragment_totals(0).merged == 100
    assert harness.core.view().merges == 1


def test_shard_outage_adds_no_link_measurements():
    harness, one = saving()
    harness.shard_lost(1.3, 0)
    harness.shard_reconnected(500.0, (0, 1))
    one.acknowledges(500.1)
    assert harness.core.state.members[1].sync_time.count == 0


def test_version_that_was_not_durable_is_merged_again():
    harness, one = saving()
    harness.shard_lost(1.3, 0)
    harness.shard_reconnected(1.4, (0, 0))
    assert harness.of(DiscardRound) == [DiscardRound(RoundId(0, 0, 1, 1), because("shard-version-lost", 1))]
    assert harness.core.state.ledger.fragment_totals(0).merged == 0
    one.reports(2.0, step=2)
    assert RoundId(0, 0, 1, 2) in [pull.round for _, pull in harness.bodies(Pull)]
    one.contributes(2.1)
    harness.merges_and_persists(2.2)
    assert harness.fragment(0).version == 1
    assert harness.core.state.ledger.fragment_totals(0).merged == 200


@pytest.mark.parametrize("version", [0, 2])
def test_shard_with_another_version_stays_unavailable(version):
    harness, _ = saving()
    harness.persisted(1.3)
    harness.shard_lost(1.4, 0)
    harness.shard_reconnected(1.5, (0, version))
    sentence = f"its shard has reconnected with version {version}, the newest is 1;"
    assert harness.fragment(0).reason == f"{sentence} check that its directory belongs to this run"
    assert harness.bodies(Published) == []
    harness.shard_reconnected(1.6, (0, 1))
    assert [published.version for _, published in harness.bodies(Published)] == [1]


def test_reconnection_of_an_available_shard_changes_nothing():
    harness, _ = pulling()
    harness.shard_reconnected(1.1, (0, 0), (1, 0))
    harness.expect()
    assert harness.core.view().ignored == {"shard-was-available": 2}


def test_version_recovered_from_a_shard_can_end_the_run():
    harness, _ = saving(RunConfig(fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2, budget_merges=1))
    harness.shard_lost(1.3, 0)
    harness.shard_reconnected(1.4, (0, 1))
    assert "finish-budget" in harness.codes()


# --------------------------------------------------------------------------------------------------------------------
# Unacked versions


def test_unacked_version_is_sent_again_when_its_shard_reconnects():
    harness, _ = saving()
    harness.persisted(1.3)
    assert [p.version for _, p in harness.bodies(Published)] == [1]
    harness.shard_lost(1.4, 0)
    assert harness.fire_timers(20.0) == [], "the learner is not blamed for the outage"
    harness.shard_reconnected(20.0, (0, 1))
    assert [(p.version, p.base) for _, p in harness.bodies(Published)] == [(1, None)]


def test_unacked_version_is_retried_after_its_shard_reconnects():
    harness, one = saving()
    harness.persisted(1.3)
    harness.shard_lost(1.4, 0)
    harness.shard_reconnected(2.0, (0, 1))
    one.reports(2.1, step=2)
    done = [e for e in harness.fire_timers(1000.0) if isinstance(e, CloseConnection)]
    assert [close.reason.code for close in done][:1] == ["member-publish-unacked"]


def test_ack_of_a_retransmission_is_not_measured():
    harness, one = saving()
    harness.persisted(1.3)
    measured = harness.core.state.members[1].ack_time.count
    harness.shard_lost(1.4, 0)
    harness.shard_reconnected(2.0, (0, 1))
    one.acknowledges(2.001)
    assert harness.core.state.members[1].ack_time.count == measured


def test_joining_learner_gets_fragments_of_a_shard_when_it_reconnects():
    harness, _ = pulling()
    harness.shard_lost(1.1, 0)
    two = harness.add_learner(2)
    two.hello(2.0)
    harness.persisted(2.0)
    assert [(to, p.fragment) for to, p in harness.bodies(Published)] == [(2, 1)]
    harness.shard_reconnected(3.0, (0, 0))
    assert [(to, p.fragment, p.version) for to, p in harness.bodies(Published)] == [(2, 0, 0)]
    two.acknowledges(3.1)
    two.delivers(3.2, Ready(because("state-kept")))
    assert harness.member(2).state == "live"


def test_resync_of_an_unavailable_shard_is_answered_when_it_reconnects():
    harness, one = saving()
    harness.persisted(1.3)
    harness.shard_lost(1.4, 0)
    one.delivers(1.5, Resync(0, 0))
    harness.expect()
    harness.shard_reconnected(1.6, (0, 1))
    assert [(p.version, p.base) for _, p in harness.bodies(Published)] == [(1, None)]


# --------------------------------------------------------------------------------------------------------------------
# Snapshots, leases, the pause


def test_snapshot_does_not_wait_for_contributions_to_an_unavailable_shard():
    harness, one = pulling()
    harness.handle(1.1, SnapshotRequested())
    marker = harness.core.state.marker
    one.marker = marker
    one.delivers(1.2, SnapshotPart(marker, 1, 100, (0, 0), (RoundId(0, 0, 1, 1),)))
    assert harness.of(Persist) == []
    harness.shard_lost(1.3, 0)
    [saved] = [effect.record for effect in harness.of(Persist)]
    assert isinstance(saved, SnapshotRecord)
    assert [learner for learner, _ in saved.parts] == [1]
    assert saved.left_out == ()


def test_leases_of_an_ended_incarnation_wait_for_its_shard():
    """Samples in a version with unknown durability are neither merged nor free: the next incarnation waits."""
    config = RunConfig(fragments=2, every_steps=2, grace_margin=0.0, lease_samples=4, leases_ahead=1)
    harness = SyncerHarness(config)
    one = harness.add_learner(1)
    one.hello(0.0)
    harness.persisted(0.0)
    one.acknowledges(0.1)
    one.delivers(0.2, LeaseRequest(0, 0))
    harness.persisted(0.3)
    one.delivers(0.4, Ready(because("peer-new-run")))
    one.consumed_samples = 3
    one.reports(1.0, step=1)
    one.contributes(1.1, consumed_samples=3)
    harness.merged(1.2)
    harness.shard_lost(1.3, 0)
    again = harness.add_learner(1, 2)
    again.hello(2.0)
    harness.persisted(2.1)
    again.delivers(2.2, LeaseRequest(0, 0))
    assert "leases-returned" not in harness.core.state.reason_counts
    harness.shard_reconnected(3.0, (0, 1))
    assert "5 samples of incarnation 1 are in no version; they are leased again before new samples" in harness.sentences
    harness.persisted(3.1)
    assert again.leases[0].begin == 3


def test_reconnected_shard_opens_no_round_while_paused():
    harness, one = pulling()
    harness.core.state.paused = True
    harness.shard_lost(1.1, 0)
    one.reports(2.0, step=2)
    one.reports(3.0, step=3)
    harness.shard_reconnected(3.1, (0, 0))
    assert harness.bodies(Pull) == []
    harness.core.state.paused = False


# --------------------------------------------------------------------------------------------------------------------
# The end


QUICK = RunConfig(
    fragments=2, every_steps=2, grace_margin=0.0, rounds_in_flight=2, limits=Limits(initial_wait_s=1.0, max_wait_s=20.0)
)


def finishes(harness: SyncerHarness, one: FakeLearner, at: float) -> None:
    """Finish the run: merge the other fragment once more and let all timers of the end fire."""
    harness.handle(at, FinishRequested())
    one.reports(at + 1, step=one.step + 1)
    one.reports(at + 2, step=one.step + 1)
    one.contributes(at + 2.1, fragment=1)
    harness.merged(at + 2.2)
    harness.persisted(at + 2.3, "VersionRecord")
    one.acknowledges(at + 2.4)
    harness.fire_timers(at + 40.0)


def test_run_ends_without_a_lost_shard():
    harness, one = pulling(QUICK)
    harness.shard_lost(1.1, 0)
    finishes(harness, one, 2.0)
    assert "no last merge of fragment 0: its shard is unavailable: connection reset by peer" in harness.sentences
    assert harness.core.state.stage.value == "sealing"
    harness.persisted(42.0)
    assert harness.bodies(Finish) == [(1, Finish((0, 1), 1))]
    one.delivers(42.1, FinishAck(1))
    harness.one(Halt)


def test_shard_that_reconnects_in_time_has_its_last_merge():
    harness, one = pulling(QUICK)
    harness.shard_lost(1.1, 0)
    harness.handle(2.0, FinishRequested())
    one.reports(3.0, step=2)
    one.reports(4.0, step=3)
    harness.shard_reconnected(4.1, (0, 0))
    assert [pull.round.fragment for _, pull in harness.bodies(Pull)] == [0]
    assert harness.core.state.fragments[0].round_is_final


def test_end_does_not_wait_for_a_version_with_unknown_durability():
    harness, one = saving(QUICK)
    harness.shard_lost(1.3, 0)
    finishes(harness, one, 2.0)
    assert harness.core.state.stage.value == "sealing"
    assert harness.core.state.manifest is not None
    assert harness.core.state.manifest.versions == (0, 1)


def test_shard_may_recover_a_version_until_the_manifest_is_written():
    harness, one = saving(QUICK)
    harness.shard_lost(1.3, 0)
    harness.handle(2.0, FinishRequested())
    one.contributes(2.1, fragment=1)
    harness.fire_timers(30.0)
    assert "no last merge of fragment 0: its shard is unavailable: connection reset by peer" in harness.sentences
    harness.shard_reconnected(30.0, (0, 1))
    assert harness.fragment(0).version == 1
    harness.merges_and_persists(30.1)
    assert harness.core.state.manifest is not None
    assert harness.core.state.manifest.versions == (1, 1)


def test_version_missing_from_the_manifest_is_not_adopted():
    harness, one = saving(QUICK)
    harness.shard_lost(1.3, 0)
    finishes(harness, one, 2.0)
    harness.persisted(42.0)
    harness.shard_reconnected(43.0, (0, 1))
    assert harness.codes() == ["shard-version-mismatch"]
    assert harness.fragment(0).version == 0
    harness.shard_reconnected(44.0, (0, 0))
    assert harness.codes() == ["shard-reconnected", "shard-version-lost"]
    assert harness.fragment(0).phase == "idle"


def test_skipped_final_is_logged_once():
    harness, one = saving(QUICK)
    harness.persisted(1.3)
    one.acknowledges(1.4)
    harness.handle(2.0, FinishRequested())
    one.reports(3.0, step=2)
    one.reports(4.0, step=3)
    one.contributes(4.1)
    harness.merged(4.2)
    harness.shard_lost(4.3, 0)
    harness.fire_timers(60.0)
    harness.shard_reconnected(60.0, (0, 1))
    harness.shard_lost(61.0, 0)
    harness.shard_reconnected(62.0, (0, 1))
    harness.fire_timers(300.0)
    assert len([s for s in harness.sentences if s.startswith("no last merge of fragment 0")]) == 1


def test_learners_get_final_versions_when_a_shard_reconnects_after_the_end():
    harness, one = saving(QUICK)
    harness.persisted(1.3)
    harness.shard_lost(1.4, 0)
    one.received[0] = 0  # version 1 has not arrived
    finishes(harness, one, 2.0)
    harness.persisted(42.0)
    assert harness.bodies(Finish) == [(1, Finish((1, 1), 2))]
    harness.shard_reconnected(43.0, (0, 1))
    assert [(p.fragment, p.version, p.base) for _, p in harness.bodies(Published)] == [(0, 1, None)]


# --------------------------------------------------------------------------------------------------------------------
# Story


def test_stories_of_run_and_fragment_contain_the_shard_loss():
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
