"""Draining: unscheduled rounds for a learner that leaves, without delays for the others."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    Contribution,
    DrainRequest,
    Finish,
    FinishRequested,
    LeaveRequested,
    Left,
    MergeRound,
    NoPeer,
    PeerChosen,
    Pull,
    StateRequest,
    Stop,
)
from atoll.core.reasons import because
from atoll.core.syncer.rounds import MAX_DRAIN_ROUNDS
from atoll.core.types import RoundId, RunConfig
from tests.core.conversation import TOKENS, LearnerTalk, SyncerTalk, Voice

RARE = RunConfig(fragments=2, every_steps=1000, grace_margin=0.0)
PUSH = LeaveRequested("its machine is taken away", drain=True)


def leaving(voice: Voice, at: float, *unmerged: int) -> None:
    voice.delivers(at, DrainRequest(voice.step, voice.trained, unmerged))


def pulled(talk: SyncerTalk) -> list[tuple[int, int]]:
    """Return the pulled learners and fragments of the last event."""
    return [(learner, body.round.fragment) for learner, body in talk.bodies(Pull)]


# --------------------------------------------------------------------------------------------------------------------
# At the syncer


def test_single_draining_learner_is_pulled_until_everything_is_merged():
    talk = SyncerTalk(RARE)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    assert pulled(talk) == [(1, 0)]
    one.reports(2.0, step=2)
    leaving(one, 2.1, 0, 1)
    assert pulled(talk) == [(1, 1)], "the other round is open already"
    one.contributes(2.2, 0, copied_at=1, steps=1, tokens=TOKENS, trained=TOKENS)
    talk.merges_and_persists(2.3)
    assert (1, 0) in pulled(talk), "its second step is in no version"
    one.contributes(2.4, 0)
    talk.merges_and_persists(2.5)
    assert pulled(talk) == []
    one.contributes(2.6, 1)
    talk.merges_and_persists(2.7)
    assert [line.pending for line in talk.core.view().ledger] == [0, 0]
    assert talk.core.state.draining == {}


def test_unscheduled_round_needs_the_quorum_and_pulls_others_with_a_step():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1000, grace_margin=0.0, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    leaving(one, 1.1, 0)
    assert pulled(talk) == [], "no other learner has new steps"
    two.reports(1.5, step=1)
    assert pulled(talk) == [(1, 0), (2, 0)]
    two.contributes(1.6)
    assert talk.of(MergeRound) == []
    one.contributes(1.7)
    assert [a.learner for a in talk.one(MergeRound).contributions] == [1, 2]


def test_two_draining_learners_are_in_the_same_merges():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1000, grace_margin=0.0, quorum=2))
    voices = [talk.joined(learner) for learner in (1, 2)]
    for voice in voices:
        voice.reports(1.0, step=1)
    for voice in voices:
        leaving(voice, 2.0, 0)
    for voice in voices:
        voice.contributes(2.1)
    assert len(talk.one(MergeRound).contributions) == 2
    talk.merges_and_persists(2.2)
    assert talk.core.state.draining == {}


def test_draining_learner_that_never_contributes_delays_others_only_briefly():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, grace_margin=0.0))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    leaving(one, 1.1, 0)
    merges, at = 0, 1.2
    for step in range(2, 60):
        if 0 in two.pulls and two.pulls[0].base == talk.core.state.fragments[0].version:
            two.contributes(at, 0)
        talk.fires(at + 100.0)
        while any(isinstance(effect, MergeRound) for effect in talk.awaited):
            talk.merges_and_persists(at + 100.1)
            merges += 1
            two.acknowledges(at + 100.2)
        at += 101.0
        leaving(one, at, 0)
        two.reports(at, step=step)
    assert talk.core.state.members[1].drain_rounds[0] > MAX_DRAIN_ROUNDS, "it is still pulled with the others"
    assert merges > MAX_DRAIN_ROUNDS
    two.contributes(at + 1.0)
    assert talk.of(MergeRound), "and is not waited for any more"


def test_stale_or_duplicate_drain_request_changes_nothing():
    talk = SyncerTalk(RARE)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.delivers(2.0, DrainRequest(1, TOKENS, (1, 7, -3)), tick=90)
    assert pulled(talk) == [(1, 1)]
    one.delivers(2.1, DrainRequest(1, TOKENS, (0, 1)), tick=89)
    assert list(talk.core.state.members[1].unmerged) == [1]
    assert talk.core.state.ignored["stale-drain-request"] == 1
    talk.voice(9).delivers(2.2, DrainRequest(1, TOKENS, (0,)))
    assert pulled(talk) == []


def test_impossible_counters_are_a_strike():
    talk = SyncerTalk(RARE)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.delivers(2.0, DrainRequest(1, 2**61, (0,)))
    assert talk.member(1).strikes == 1
    assert not talk.core.state.members[1].is_draining


def test_at_the_end_of_a_run_the_last_rounds_take_it_in():
    """It takes no step that would make them due."""
    talk = SyncerTalk(RARE)
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.acknowledges(1.3)
    one.reports(2.0, step=2)
    leaving(one, 2.1, 0, 1)
    for p in (0, 1):
        one.contributes(2.2, p)
    talk.handle(2.3, FinishRequested())
    one.acknowledges(2.4)
    while any(isinstance(effect, MergeRound) for effect in talk.awaited):
        talk.merges_and_persists(2.5)
    assert [line.pending for line in talk.core.view().ledger] == [0, 0]


def test_draining_learner_is_the_last_choice_as_a_peer():
    talk = SyncerTalk(RARE)
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    leaving(one, 1.1, 0, 1)
    three = talk.voice(3)
    three.hello(2.0)
    talk.persisted(2.0)
    three.delivers(2.1, StateRequest(()))
    assert talk.bodies(PeerChosen) == [(3, PeerChosen(2))]


# --------------------------------------------------------------------------------------------------------------------
# At the learner


def test_learner_without_unmerged_work_leaves_immediately():
    talk = LearnerTalk(RARE)
    talk.opens(0.0)
    talk.handle(0.1, PUSH)
    assert talk.one(Stop).reason.code == "learner-left", "it has not even joined"
    talk = LearnerTalk(RARE).trains()
    talk.handle(1.0, PUSH)
    assert talk.one(Stop).reason.code == "learner-drained"
    assert [body for _, body in talk.bodies(Left)] == [Left("its machine is taken away")]


def test_a_pull_that_waits_for_its_version_is_answered_when_that_is_adopted():
    """`has_boundary_work` becomes true: nothing else would wake the driver."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    talk.receives(1.1, Pull(RoundId(0, 0, 1, 1)))
    talk.steps(2.0)
    talk.steps(3.0)
    talk.handle(3.0, PUSH)
    talk.receives(3.1, Pull(RoundId(0, 1, 1, 1)))
    talk.gets(3.2, 0, 1)
    assert not talk.core.leaving.can_answer()
    talk.steps(3.3, steps=0, tokens=0, step_time_s=0.0)
    assert talk.core.leaving.can_answer()
    talk.steps(3.4, steps=0, tokens=0, step_time_s=0.0)
    assert [body.tokens for _, body in talk.bodies(Contribution)] == [3 * TOKENS]
    assert not talk.core.leaving.can_answer()


@pytest.mark.parametrize("pushes_first", [True, False])
def test_the_end_of_the_run_comes_first(pushes_first):
    """It waits for the final versions, takes no step meanwhile, and is finished then."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    finish = Finish((1,), 1)
    if pushes_first:
        talk.handle(1.1, PUSH)
        talk.receives(1.2, finish)
    else:
        talk.receives(1.1, finish)
        talk.handle(1.2, PUSH)
    assert talk.core.state.is_standing_by
    talk.gets(1.3, 0, 1)
    assert talk.one(Stop).reason.code == "learner-finished"


def test_joining_learner_leaves_immediately():
    talk = LearnerTalk(RARE)
    talk.opens(0.0)
    talk.welcomed(0.1)
    talk.receives(0.2, NoPeer(because("peer-new-run"), True))
    talk.handle(0.3, PUSH)
    assert talk.one(Stop).reason.code == "learner-left"
