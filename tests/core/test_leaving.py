"""Draining: unscheduled rounds for a learner that leaves, without long delays for others."""

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
from tests.core.harness import TOKENS, FakeLearner, LearnerHarness, SyncerHarness

RARE = RunConfig(fragments=2, every_steps=1000, grace_margin=0.0)
DRAIN = LeaveRequested("its machine is preempted", drain=True)


def leaving(fake: FakeLearner, at: float, *unmerged: int) -> None:
    fake.delivers(at, DrainRequest(fake.step, fake.trained, unmerged))


def pulled(harness: SyncerHarness) -> list[tuple[int, int]]:
    """Return the pulled learners and fragments of the last event."""
    return [(learner, body.round.fragment) for learner, body in harness.bodies(Pull)]


# --------------------------------------------------------------------------------------------------------------------
# At the syncer


def test_single_draining_learner_is_pulled_until_everything_is_merged():
    harness = SyncerHarness(RARE)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    assert pulled(harness) == [(1, 0)]
    one.reports(2.0, step=2)
    leaving(one, 2.1, 0, 1)
    assert pulled(harness) == [(1, 1)], "the other round is open already"
    one.contributes(2.2, 0, copied_at=1, steps=1, tokens=TOKENS, trained=TOKENS)
    harness.merges_and_persists(2.3)
    assert (1, 0) in pulled(harness), "its second step is not merged"
    one.contributes(2.4, 0)
    harness.merges_and_persists(2.5)
    assert pulled(harness) == []
    one.contributes(2.6, 1)
    harness.merges_and_persists(2.7)
    assert [line.pending for line in harness.core.view().ledger] == [0, 0]
    assert harness.core.state.draining == {}


def test_unscheduled_round_needs_the_quorum_and_pulls_others_with_a_step():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1000, grace_margin=0.0, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    leaving(one, 1.1, 0)
    assert pulled(harness) == [], "no other learner has new steps"
    two.reports(1.5, step=1)
    assert pulled(harness) == [(1, 0), (2, 0)]
    two.contributes(1.6)
    assert harness.of(MergeRound) == []
    one.contributes(1.7)
    assert [a.learner for a in harness.one(MergeRound).contributions] == [1, 2]


def test_two_draining_learners_are_in_the_same_merges():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1000, grace_margin=0.0, quorum=2))
    fakes = [harness.joined(learner) for learner in (1, 2)]
    for fake in fakes:
        fake.reports(1.0, step=1)
    for fake in fakes:
        leaving(fake, 2.0, 0)
    for fake in fakes:
        fake.contributes(2.1)
    assert len(harness.one(MergeRound).contributions) == 2
    harness.merges_and_persists(2.2)
    assert harness.core.state.draining == {}


def test_draining_learner_that_never_contributes_delays_others_only_briefly():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, grace_margin=0.0))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    leaving(one, 1.1, 0)
    merges, at = 0, 1.2
    for step in range(2, 60):
        if 0 in two.pulls and two.pulls[0].base == harness.core.state.fragments[0].version:
            two.contributes(at, 0)
        harness.fire_timers(at + 100.0)
        while any(isinstance(effect, MergeRound) for effect in harness.awaited):
            harness.merges_and_persists(at + 100.1)
            merges += 1
            two.acknowledges(at + 100.2)
        at += 101.0
        leaving(one, at, 0)
        two.reports(at, step=step)
    assert harness.core.state.members[1].drain_rounds[0] > MAX_DRAIN_ROUNDS, "it is still pulled with the others"
    assert merges > MAX_DRAIN_ROUNDS
    two.contributes(at + 1.0)
    assert harness.of(MergeRound), "the draining learner is no longer awaited"


def test_stale_or_duplicate_drain_request_changes_nothing():
    harness = SyncerHarness(RARE)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.delivers(2.0, DrainRequest(1, TOKENS, (1, 7, -3)), tick=90)
    assert pulled(harness) == [(1, 1)]
    one.delivers(2.1, DrainRequest(1, TOKENS, (0, 1)), tick=89)
    assert list(harness.core.state.members[1].unmerged) == [1]
    assert harness.core.state.ignored["stale-drain-request"] == 1
    harness.add_learner(9).delivers(2.2, DrainRequest(1, TOKENS, (0,)))
    assert pulled(harness) == []


def test_impossible_counters_are_a_strike():
    harness = SyncerHarness(RARE)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.delivers(2.0, DrainRequest(1, 2**61, (0,)))
    assert harness.member(1).strikes == 1
    assert not harness.core.state.members[1].is_draining


def test_last_rounds_include_a_draining_learner():
    """A draining learner takes no more steps, so the last rounds open without one."""
    harness = SyncerHarness(RARE)
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.acknowledges(1.3)
    one.reports(2.0, step=2)
    leaving(one, 2.1, 0, 1)
    for p in (0, 1):
        one.contributes(2.2, p)
    harness.handle(2.3, FinishRequested())
    one.acknowledges(2.4)
    while any(isinstance(effect, MergeRound) for effect in harness.awaited):
        harness.merges_and_persists(2.5)
    assert [line.pending for line in harness.core.view().ledger] == [0, 0]


def test_draining_learner_is_the_last_choice_as_a_peer():
    harness = SyncerHarness(RARE)
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    leaving(one, 1.1, 0, 1)
    three = harness.add_learner(3)
    three.hello(2.0)
    harness.persisted(2.0)
    three.delivers(2.1, StateRequest(()))
    assert harness.bodies(PeerChosen) == [(3, PeerChosen(2))]


# --------------------------------------------------------------------------------------------------------------------
# At the learner


def test_learner_without_unmerged_work_leaves_immediately():
    harness = LearnerHarness(RARE)
    harness.opens(0.0)
    harness.handle(0.1, DRAIN)
    assert harness.one(Stop).reason.code == "learner-left", "it has not joined yet"
    harness = LearnerHarness(RARE).trains()
    harness.handle(1.0, DRAIN)
    assert harness.one(Stop).reason.code == "learner-drained"
    assert [body for _, body in harness.bodies(Left)] == [Left("its machine is preempted")]


def test_pull_on_a_future_version_is_answered_after_its_adoption_while_draining():
    """`has_boundary_work` becomes true: nothing else would wake the driver."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    harness.receives(1.1, Pull(RoundId(0, 0, 1, 1)))
    harness.steps(2.0)
    harness.steps(3.0)
    harness.handle(3.0, DRAIN)
    harness.receives(3.1, Pull(RoundId(0, 1, 1, 1)))
    harness.published(3.2, 0, 1)
    assert not harness.core.leaving.can_answer()
    harness.steps(3.3, steps=0, tokens=0, step_time_s=0.0)
    assert harness.core.leaving.can_answer()
    harness.steps(3.4, steps=0, tokens=0, step_time_s=0.0)
    assert [body.tokens for _, body in harness.bodies(Contribution)] == [3 * TOKENS]
    assert not harness.core.leaving.can_answer()


@pytest.mark.parametrize("drains_first", [True, False])
def test_finish_takes_precedence_over_draining(drains_first):
    """The learner takes no more steps, waits for the final versions and stops as finished."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    finish = Finish((1,), 1)
    if drains_first:
        harness.handle(1.1, DRAIN)
        harness.receives(1.2, finish)
    else:
        harness.receives(1.1, finish)
        harness.handle(1.2, DRAIN)
    assert harness.core.state.is_standing_by
    harness.published(1.3, 0, 1)
    assert harness.one(Stop).reason.code == "learner-finished"


def test_joining_learner_leaves_immediately():
    harness = LearnerHarness(RARE)
    harness.opens(0.0)
    harness.welcomed(0.1)
    harness.receives(0.2, NoPeer(because("peer-new-run"), True))
    harness.handle(0.3, DRAIN)
    assert harness.one(Stop).reason.code == "learner-left"
