"""Tests of each rule of the protocol: the global budget and the end of the run."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    AdoptFragment,
    DiscardRound,
    Finish,
    FinishAck,
    FinishRequested,
    Halt,
    LearnerDisconnected,
    LogReason,
    ManifestRecord,
    Persist,
    PublishAck,
    Published,
    Pull,
    Refuse,
    SnapshotRequested,
    Started,
    Stop,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.types import MergedUpTo, RoundId, RunConfig
from tests.core.harness import FakeLearner, LearnerHarness, SyncerHarness


def serve(harness: SyncerHarness, at: float) -> None:
    """Make all learners contribute to every pull; merges and writes take no time."""
    for fake in harness.learners.values():
        for p in sorted(fake.pulls):
            fake.contributes(at, p)
            del fake.pulls[p]
    while any(type(e).__name__ == "MergeRound" for e in harness.awaited):
        harness.merged(at)
        harness.persisted(at, "VersionRecord")
        for fake in harness.learners.values():
            fake.acknowledges(at)


def trained(harness: SyncerHarness, *fakes: FakeLearner, until: float) -> None:
    for step in range(1, int(until) + 1):
        for fake in fakes:
            fake.reports(float(step), step)
            serve(harness, float(step))


def to_the_manifest(harness: SyncerHarness, *fakes: FakeLearner, at: float) -> float:
    """Continue training until the manifest is being written."""
    for _ in range(1_000):
        if any(isinstance(e, Persist) and isinstance(e.record, ManifestRecord) for e in harness.awaited):
            return at
        at += 1.0
        for fake in fakes:
            fake.reports(at, fake.step + 1)
            serve(harness, at)
        harness.fire_timers(at)
    raise AssertionError("the run does not end; the story is printed above")


@pytest.mark.parametrize(
    ("budget", "reason"),
    [({"budget_merges": 3}, "3 merges"), ({"budget_tokens": 700}, "700 tokens")],
)
def test_budget_is_global_in_merges_or_tokens(budget, reason):
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=4, **budget))
    one, two = harness.joined(1), harness.joined(2)
    trained(harness, one, two, until=20)
    assert f"the budget is used up ({reason}); merging every fragment once more" in harness.sentences
    assert harness.core.view().progress == 1.0


def test_progress_is_the_larger_share_of_the_two_budgets():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=50, budget_merges=10, budget_tokens=1_000))
    one = harness.joined(1)
    one.reports(1.0, step=4)
    assert harness.core.view().progress == pytest.approx(0.4)
    serve(harness, 1.1)
    assert harness.core.view().progress == pytest.approx(0.4)
    one.reports(2.0, step=5, trained=400)
    assert harness.core.view().progress == pytest.approx(0.4)


def test_every_fragment_is_merged_once_more_at_the_end():
    harness = SyncerHarness(RunConfig(fragments=3, every_steps=30, overlap_steps=1))
    one = harness.joined(1)
    trained(harness, one, until=2)
    one.reports(3.0, step=3)
    harness.handle(3.5, FinishRequested())
    assert {pull.round.fragment for _, pull in harness.bodies(Pull)} == {0, 1, 2}, "all last rounds open at once"
    before = [f.version for f in harness.core.view().fragments]
    at = to_the_manifest(harness, one, at=3.6)
    after = [f.version for f in harness.core.view().fragments]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]
    assert at < 30


def test_round_open_at_the_end_of_the_budget_is_followed_by_a_last_round():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    assert set(one.pulls) == {0}
    harness.handle(1.1, FinishRequested())
    assert harness.bodies(Pull) == []
    one.reports(2.0, step=2)
    serve(harness, 2.1)
    assert harness.fragment(0).version == 1
    to_the_manifest(harness, one, at=2.2)
    assert harness.fragment(0).version == 2


def ended() -> tuple[SyncerHarness, float]:
    """Return a run with two learners whose manifest is being written."""
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=4))
    one, two = harness.joined(1), harness.joined(2)
    trained(harness, one, two, until=3)
    harness.handle(3.5, FinishRequested())
    at = to_the_manifest(harness, one, two, at=4.0)
    return harness, at


def test_final_manifest_is_durable_before_finish_is_sent():
    harness, at = ended()
    assert harness.core.view().stage == "sealing"
    harness.persist_failed(at + 0.1)
    assert harness.codes() == ["finish-manifest-failed"]
    assert harness.bodies(Finish) == []
    while not harness.of(Persist):
        harness.fire_timers(harness.core.next_deadline())
    view = harness.core.view()
    versions = tuple(f.version for f in view.fragments)
    assert harness.one(Persist).record == ManifestRecord(versions, view.merges, view.trained)
    harness.persisted(harness.now)
    assert harness.bodies(Finish) == [(i, Finish(versions, view.merges)) for i in (1, 2)]


def test_syncer_halts_when_all_learners_acknowledged_the_finish():
    harness, at = ended()
    harness.persisted(at)
    harness.learners[1].delivers(at + 0.1, FinishAck(5))
    assert harness.of(Halt) == []
    harness.learners[2].delivers(at + 0.2, FinishAck(5))
    harness.expect(Halt(because("finish-done", 2, 2)))


def test_dead_learner_never_blocks_the_end():
    """The learner dies before the last merges. They continue without it or are skipped, and the run ends."""
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=4, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    trained(harness, one, two, until=3)
    harness.handle(3.5, LearnerDisconnected(2, 1, 1, "power"))
    harness.handle(3.6, FinishRequested())
    at = to_the_manifest(harness, one, at=4.0)
    assert at < 2_000
    harness.persisted(at)
    one.delivers(at + 0.1, FinishAck(0))
    harness.expect(Halt(because("finish-done", 1, 2)))


def test_learner_that_dies_after_the_last_merge_is_left_behind():
    harness, at = ended()
    harness.persisted(at)
    harness.learners[1].delivers(at + 0.1, FinishAck(0))
    harness.handle(at + 0.2, LearnerDisconnected(2, 1, 1, "power"))
    assert harness.one(Halt).reason == because("finish-done", 1, 2)


def test_run_ends_without_any_live_learner():
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=4))
    one = harness.joined(1)
    trained(harness, one, until=3)
    harness.handle(3.5, LearnerDisconnected(1, 1, 1, "power"))
    harness.handle(3.6, FinishRequested())
    harness.fire_timers(5_000.0)
    assert harness.codes().count("final-skipped") == 2
    harness.persisted(5_000.0)
    assert harness.one(Halt).reason == because("finish-done", 0, 1)


def test_learner_that_reconnects_after_the_end_gets_the_final_versions():
    harness, at = ended()
    harness.handle(at, LearnerDisconnected(2, 1, 1, "power"))
    harness.persisted(at + 0.1)
    two = harness.learners[2]
    two.session = 2
    two.hello(at + 0.2, training=True)
    assert [type(e.envelope.body) for e in harness.effects if hasattr(e, "envelope")] == [Welcome, Finish]


def test_new_learner_is_refused_when_the_run_is_over():
    harness, at = ended()
    harness.persisted(at)
    three = harness.add_learner(3)
    three.hello(at + 0.1)
    harness.expect(harness.to(3, Refuse(because("refused-finished"), 0, True)))


def test_learner_stops_once_every_final_version_is_adopted():
    harness = LearnerHarness(RunConfig(fragments=2)).trains()
    harness.receives(0.2, Pull(RoundId(0, 0, 1, 1)))
    harness.steps(1.0)
    harness.receives(1.5, Finish((1, 0), 1))
    harness.expect()
    assert harness.core.training, "it trains until the last version arrives"
    harness.steps(2.0)
    merged_up_to = MergedUpTo(1, 0, 1, 100, 0)
    harness.published(2.5, 0, 1, merged_up_to, base=0)
    harness.expect(
        harness.sends(PublishAck(0, 1)),
        AdoptFragment(0, 1, "carry", True, 100, 0, 100),
        harness.sends(FinishAck(1)),
        Stop(because("learner-finished")),
    )
    assert not harness.core.training
    harness.receives(3.0, Finish((1, 0), 1))
    harness.expect(harness.sends(FinishAck(1)))


def test_learner_that_joins_at_the_end_takes_no_step():
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4,))
    harness.receives(0.2, Finish((4,), 4))
    assert not harness.core.training
    harness.published(0.3, 0, 4)
    assert harness.one(Stop).reason == because("learner-finished")


def test_syncer_restarted_after_the_manifest_is_finished():
    harness, _ = ended()
    harness.written_without_reply()
    again = harness.restarted()
    assert again.core.view().stage == "finished"
    one = again.add_learner(1, session=2)
    one.received = dict(enumerate(f.version for f in again.core.view().fragments))
    one.hello(1.0, training=True)
    assert [type(e.envelope.body) for e in again.effects if hasattr(e, "envelope")] == [Welcome, Finish]
    one.delivers(1.1, FinishAck(0))
    assert again.one(Halt).reason == because("finish-done", 1, 2)


def test_syncer_restarted_before_the_manifest_finishes_again():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, budget_merges=1))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    assert harness.core.view().stage == "finishing"
    again = harness.restarted()
    assert again.core.view().stage == "finishing"
    assert again.codes() == ["finish-budget"]


def test_open_snapshot_is_abandoned_when_the_run_ends():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    harness.joined(1)
    harness.handle(1.0, SnapshotRequested())
    harness.handle(1.1, FinishRequested())
    assert "snapshot-abandoned" in harness.codes()
    harness.handle(1.2, SnapshotRequested())
    harness.expect()


def test_duplicate_finish_request_has_no_effect():
    harness, at = ended()
    harness.handle(at, FinishRequested())
    harness.expect()
    harness.handle(at, Started())
    harness.expect()


def test_last_round_of_a_fragment_is_retried_and_then_skipped():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    serve(harness, 1.1)
    one.reports(2.0, step=3)
    harness.handle(2.1, FinishRequested())
    skipped: list[str] = []
    discarded = 0
    at = 3.0
    while not skipped:
        one.reports(at, int(at))
        discarded += len(harness.of(DiscardRound))
        skipped = [str(e.reason) for e in harness.of(LogReason) if e.reason.code == "final-skipped"]
        at += 1.0
        assert at < 2_000
    assert discarded == harness.config.limits.max_final_attempts
    assert harness.core.view().stage == "sealing"
    assert harness.bodies(Published) == []
