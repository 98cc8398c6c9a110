"""One test per sentence of the protocol: the budget is global, and the end is orderly."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice


def serve(talk: SyncerTalk, at: float) -> None:
    """All learners answer every pull; merge thread and disk take no time."""
    for voice in talk.voices.values():
        for p in sorted(voice.pulls):
            voice.contributes(at, p)
            del voice.pulls[p]
    while any(type(e).__name__ == "MergeRound" for e in talk.awaited):
        talk.merged(at)
        talk.persisted(at, "VersionRecord")
        for voice in talk.voices.values():
            voice.acknowledges(at)


def trained(talk: SyncerTalk, *voices: Voice, until: float) -> None:
    for step in range(1, int(until) + 1):
        for voice in voices:
            voice.reports(float(step), step)
            serve(talk, float(step))


def to_the_manifest(talk: SyncerTalk, *voices: Voice, at: float) -> float:
    """Train on until the manifest is being written."""
    for _ in range(1_000):
        if any(isinstance(e, Persist) and isinstance(e.record, ManifestRecord) for e in talk.awaited):
            return at
        at += 1.0
        for voice in voices:
            voice.reports(at, voice.step + 1)
            serve(talk, at)
        talk.fires(at)
    raise AssertionError("the run does not end; the story is printed above")


@pytest.mark.parametrize(
    ("budget", "reason"),
    [({"budget_merges": 3}, "3 merges"), ({"budget_tokens": 700}, "700 tokens")],
)
def test_the_budget_is_global_in_merges_or_tokens(budget, reason):
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=4, **budget))
    one, two = talk.joined(1), talk.joined(2)
    trained(talk, one, two, until=20)
    assert f"the budget is used up ({reason}); merging every fragment once more" in talk.sentences
    assert talk.core.view().progress == 1.0


def test_progress_is_the_larger_share_of_the_two_budgets():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=50, budget_merges=10, budget_tokens=1_000))
    one = talk.joined(1)
    one.reports(1.0, step=4)
    assert talk.core.view().progress == pytest.approx(0.4)
    serve(talk, 1.1)
    assert talk.core.view().progress == pytest.approx(0.4)
    one.reports(2.0, step=5, trained=400)
    assert talk.core.view().progress == pytest.approx(0.4)


def test_at_the_end_every_fragment_is_merged_once_more():
    talk = SyncerTalk(RunConfig(fragments=3, every_steps=30, overlap_steps=1))
    one = talk.joined(1)
    trained(talk, one, until=2)
    one.reports(3.0, step=3)
    talk.handle(3.5, FinishRequested())
    assert {pull.round.fragment for _, pull in talk.bodies(Pull)} == {0, 1, 2}, "all at once: no later rounds follow"
    before = [f.version for f in talk.core.view().fragments]
    at = to_the_manifest(talk, one, at=3.6)
    after = [f.version for f in talk.core.view().fragments]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]
    assert at < 30


def test_a_round_that_is_open_when_the_budget_is_reached_is_followed_by_the_last_one():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    assert set(one.pulls) == {0}
    talk.handle(1.1, FinishRequested())
    assert talk.bodies(Pull) == []
    one.reports(2.0, step=2)
    serve(talk, 2.1)
    assert talk.fragment(0).version == 1
    to_the_manifest(talk, one, at=2.2)
    assert talk.fragment(0).version == 2


def ended() -> tuple[SyncerTalk, float]:
    """Two learners; the manifest is being written."""
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=4))
    one, two = talk.joined(1), talk.joined(2)
    trained(talk, one, two, until=3)
    talk.handle(3.5, FinishRequested())
    at = to_the_manifest(talk, one, two, at=4.0)
    return talk, at


def test_final_manifest_is_durable_before_finish_is_sent():
    talk, at = ended()
    assert talk.core.view().stage == "sealing"
    talk.persist_failed(at + 0.1)
    assert talk.codes() == ["finish-manifest-failed"]
    assert talk.bodies(Finish) == []
    while not talk.of(Persist):
        talk.fires(talk.core.next_deadline())
    view = talk.core.view()
    versions = tuple(f.version for f in view.fragments)
    assert talk.one(Persist).record == ManifestRecord(versions, view.merges, view.trained)
    talk.persisted(talk.now)
    assert talk.bodies(Finish) == [(i, Finish(versions, view.merges)) for i in (1, 2)]


def test_the_end_is_acknowledged_and_then_the_syncer_has_nothing_more_to_do():
    talk, at = ended()
    talk.persisted(at)
    talk.voices[1].delivers(at + 0.1, FinishAck(5))
    assert talk.of(Halt) == []
    talk.voices[2].delivers(at + 0.2, FinishAck(5))
    talk.expect(Halt(because("finish-done", 2, 2)))


def test_a_dead_learner_never_blocks_the_end():
    """It dies before the last merges: they go on without it, or are given up, and the run ends."""
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=4, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    trained(talk, one, two, until=3)
    talk.handle(3.5, LearnerDisconnected(2, 1, 1, "power"))
    talk.handle(3.6, FinishRequested())
    at = to_the_manifest(talk, one, at=4.0)
    assert at < 2_000
    talk.persisted(at)
    one.delivers(at + 0.1, FinishAck(0))
    talk.expect(Halt(because("finish-done", 1, 2)))


def test_a_learner_that_dies_after_the_last_merge_is_left_behind():
    talk, at = ended()
    talk.persisted(at)
    talk.voices[1].delivers(at + 0.1, FinishAck(0))
    talk.handle(at + 0.2, LearnerDisconnected(2, 1, 1, "power"))
    assert talk.one(Halt).reason == because("finish-done", 1, 2)


def test_run_ends_without_any_live_learner():
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=4))
    one = talk.joined(1)
    trained(talk, one, until=3)
    talk.handle(3.5, LearnerDisconnected(1, 1, 1, "power"))
    talk.handle(3.6, FinishRequested())
    talk.fires(5_000.0)
    assert talk.codes().count("final-skipped") == 2
    talk.persisted(5_000.0)
    assert talk.one(Halt).reason == because("finish-done", 0, 1)


def test_a_learner_that_comes_back_after_the_end_gets_the_final_versions():
    talk, at = ended()
    talk.handle(at, LearnerDisconnected(2, 1, 1, "power"))
    talk.persisted(at + 0.1)
    two = talk.voices[2]
    two.session = 2
    two.hello(at + 0.2, training=True)
    assert [type(e.envelope.body) for e in talk.effects if hasattr(e, "envelope")] == [Welcome, Finish]


def test_a_new_learner_is_refused_when_the_run_is_over():
    talk, at = ended()
    talk.persisted(at)
    three = talk.voice(3)
    three.hello(at + 0.1)
    talk.expect(talk.to(3, Refuse(because("refused-finished"), 0, True)))


def test_a_learner_stops_once_every_final_version_is_adopted():
    talk = LearnerTalk(RunConfig(fragments=2)).trains()
    talk.receives(0.2, Pull(RoundId(0, 0, 1, 1)))
    talk.steps(1.0)
    talk.receives(1.5, Finish((1, 0), 1))
    talk.expect()
    assert talk.core.training, "it trains on until the last version is here"
    talk.steps(2.0)
    mark = MergedUpTo(1, 0, 1, 100, 0)
    talk.gets(2.5, 0, 1, mark, base=0)
    talk.expect(
        talk.sends(PublishAck(0, 1)),
        AdoptFragment(0, 1, "carry", True, 100, 0, 100),
        talk.sends(FinishAck(1)),
        Stop(because("learner-finished")),
    )
    assert not talk.core.training
    talk.receives(3.0, Finish((1, 0), 1))
    talk.expect(talk.sends(FinishAck(1)))


def test_a_learner_that_joins_at_the_very_end_takes_no_step():
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4,))
    talk.receives(0.2, Finish((4,), 4))
    assert not talk.core.training
    talk.gets(0.3, 0, 4)
    assert talk.one(Stop).reason == because("learner-finished")


def test_a_restart_after_the_manifest_is_still_finished():
    talk, _ = ended()
    talk.written_without_reply()
    again = talk.restarted()
    assert again.core.view().stage == "finished"
    one = again.voice(1, session=2)
    one.received = dict(enumerate(f.version for f in again.core.view().fragments))
    one.hello(1.0, training=True)
    assert [type(e.envelope.body) for e in again.effects if hasattr(e, "envelope")] == [Welcome, Finish]
    one.delivers(1.1, FinishAck(0))
    assert again.one(Halt).reason == because("finish-done", 1, 2)


def test_a_restart_before_the_manifest_finds_the_budget_reached_and_ends_again():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, budget_merges=1))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    assert talk.core.view().stage == "finishing"
    again = talk.restarted()
    assert again.core.view().stage == "finishing"
    assert again.codes() == ["finish-budget"]


def test_a_snapshot_that_is_being_taken_is_abandoned_when_the_run_ends():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    talk.joined(1)
    talk.handle(1.0, SnapshotRequested())
    talk.handle(1.1, FinishRequested())
    assert "snapshot-abandoned" in talk.codes()
    talk.handle(1.2, SnapshotRequested())
    talk.expect()


def test_finishing_twice_is_finishing_once():
    talk, at = ended()
    talk.handle(at, FinishRequested())
    talk.expect()
    talk.handle(at, Started())
    talk.expect()


def test_last_round_of_a_fragment_is_retried_and_then_skipped():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    serve(talk, 1.1)
    one.reports(2.0, step=3)
    talk.handle(2.1, FinishRequested())
    skipped: list[str] = []
    discarded = 0
    at = 3.0
    while not skipped:
        one.reports(at, int(at))
        discarded += len(talk.of(DiscardRound))
        skipped = [str(e.reason) for e in talk.of(LogReason) if e.reason.code == "final-skipped"]
        at += 1.0
        assert at < 2_000
    assert discarded == talk.config.limits.max_final_attempts
    assert talk.core.view().stage == "sealing"
    assert talk.bodies(Published) == []
