"""Tests of each rule of the protocol: steps of a learner and rounds of the syncer."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    ConnectionClosed,
    Contribution,
    CopyFragment,
    DiscardRound,
    LearnerDisconnected,
    LogReason,
    MergeRound,
    MessageArrived,
    OpenGrace,
    Persist,
    PublishAck,
    Published,
    Pull,
    RefuseContribution,
    Report,
    Send,
    Stop,
    TimerFired,
    VersionRecord,
)
from atoll.core.reasons import because
from atoll.core.types import AcceptedContribution, MergedUpTo, RoundId, RunConfig, contribution_weight
from tests.core.harness import FakeLearner, LearnerHarness, SyncerHarness

FIRST = RoundId(fragment=0, base=0, epoch=1, attempt=1)


# --------------------------------------------------------------------------------------------------------------------
# Inner steps of a learner, which never wait


def test_every_inner_step_counts_for_every_fragment():
    harness = LearnerHarness(RunConfig(fragments=3)).trains()
    harness.steps(1.0, tokens=128)
    harness.steps(2.0, tokens=64)
    assert [(line.trained, line.pending) for line in harness.core.view().ledger] == [(192, 192)] * 3


def test_report_has_step_counters_and_step_time_but_no_tensors():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0, tokens=128, step_time_s=0.9)
    harness.expect(harness.sends(Report(1, 128, 0.9)))


def test_pull_is_answered_with_the_fragment_at_the_step_boundary():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    harness.receives(1.5, Pull(FIRST))
    harness.expect()
    harness.steps(2.0)
    harness.expect(
        harness.sends(Report(2, 200, 1.0)),
        CopyFragment(FIRST, copied_at=2),
        harness.sends(Contribution(FIRST, copied_at=2, steps=2, tokens=200, trained=200, dropped=0)),
    )


def test_repeated_pull_is_answered_with_the_same_copy():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.steps(1.0)
    harness.steps(2.0)
    harness.receives(2.5, Pull(FIRST))
    harness.expect(harness.sends(Contribution(FIRST, copied_at=1, steps=1, tokens=100, trained=100, dropped=0)))


def test_pull_on_a_future_version_waits_for_that_version():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    ahead = RoundId(0, 1, 1, 1)
    harness.receives(0.5, Pull(ahead))
    harness.steps(1.0)
    assert harness.of(CopyFragment) == []
    harness.published(1.5, 0, 1, base=0)
    harness.steps(2.0)
    assert harness.of(CopyFragment) == [], "the version is adopted at this boundary; the next step is the first on it"
    harness.steps(3.0)
    assert harness.one(CopyFragment).round == ahead


def test_pull_on_an_old_version_is_not_answered():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.published(0.5, 0, 1, base=0)
    harness.steps(1.0)
    harness.receives(1.5, Pull(FIRST))
    harness.steps(2.0)
    assert harness.of(CopyFragment) == []
    assert harness.core.view().pulls == ()


def test_every_published_fragment_that_has_arrived_is_adopted_at_the_step_boundary():
    harness = LearnerHarness(RunConfig(fragments=2)).trains()
    harness.published(0.5, 1, 1, base=0)
    harness.expect(harness.sends(PublishAck(1, 1)))
    harness.published(0.6, 0, 1, base=0)
    harness.steps(1.0)
    harness.expect(
        harness.sends(Report(1, 100, 1.0)),
        AdoptFragment(1, 1, "carry", False, 0, 0, 100),
        AdoptFragment(0, 1, "carry", False, 0, 0, 100),
    )


def test_pending_updates_are_adopted_at_the_first_step_boundary_after_a_stall():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    for version in (1, 2, 3):
        harness.published(2.0 + version, 0, version, base=version - 1)
    harness.steps(60.0, step_time_s=59.0)
    assert harness.one(AdoptFragment).version == 3


def test_learner_stops_on_finish_and_not_by_its_own_budget():
    harness = LearnerHarness(RunConfig(fragments=1, budget_tokens=100, budget_merges=1)).trains()
    harness.steps(1.0, tokens=1_000)
    assert harness.core.training, "the budget is global, never local"


def test_learner_steps_do_not_depend_on_the_syncer():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    for step in range(1, 5):
        harness.steps(float(step))
        assert harness.of(Send) == []
        assert harness.of(Stop) == []
        assert harness.core.training
    assert harness.totals().pending == 400


# --------------------------------------------------------------------------------------------------------------------
# Opening a round


def test_round_takes_a_fragment_from_v_to_v_plus_1_and_then_it_is_idle():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    harness.expect(harness.to(1, Pull(FIRST)))
    one.contributes(1.5)
    accepted = AcceptedContribution(1, 1, 1, 1, 100, 100, 0, 10_000.0)
    harness.expect(
        Accumulate(FIRST, accepted),
        OpenGrace(FIRST, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, because("grace-unmeasured", 1)),
        MergeRound(FIRST, (accepted,), because("sealed-all", 1)),
    )
    harness.merged(1.6)
    merged_up_to = MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0)
    harness.expect(Persist(VersionRecord(0, 1, FIRST, (accepted,), ((1, merged_up_to),), merged_tokens=100)))
    harness.persisted(1.7)
    harness.expect(harness.to(1, Published(0, 1, 0, merged_up_to, 0.0)))
    assert (harness.fragment(0).phase, harness.fragment(0).version) == ("idle", 1)


def test_round_opens_when_k_live_learners_have_taken_h_steps_since_its_last_opening():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    _run_first_round(harness, one, two, three)
    one.reports(10.0, step=7)
    two.reports(10.0, step=4)
    three.reports(10.0, step=4)
    assert harness.bodies(Pull) == [], "one of three has taken H steps, the quorum is two"
    assert harness.fragment(0).reason == "1 of 2 learners have taken 4 steps since the last round"
    two.reports(11.0, step=5)
    assert harness.bodies(Pull) == [(i, Pull(RoundId(0, 1, 1, 1))) for i in (1, 2, 3)]


def _run_first_round(harness: SyncerHarness, *fakes: FakeLearner) -> None:
    """Run the first round. One report opens it; the other learners are in their second step then."""
    for fake in fakes:
        fake.reports(1.0, step=1)
    for fake in fakes:
        if 0 in fake.pulls:
            fake.contributes(1.5)
    harness.merges_and_persists(1.6)
    for fake in fakes:
        fake.acknowledges(1.7)


@pytest.mark.parametrize(("fragments", "every_steps"), [(4, 4), (4, 8), (3, 6), (8, 4), (24, 24)])
def test_first_round_of_a_fragment_waits_for_its_offset(fragments, every_steps):
    harness = SyncerHarness(RunConfig(fragments=fragments, every_steps=every_steps, overlap_steps=fragments))
    one = harness.joined(1)
    opened: dict[int, int] = {}
    for step in range(1, every_steps + 1):
        one.reports(float(step), step)
        for _, pull in harness.bodies(Pull):
            opened.setdefault(pull.round.fragment, step)
    assert opened == {p: 1 + p * every_steps // fragments for p in range(fragments)}


def test_due_rounds_depend_on_steps_and_not_on_messages():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=3))
    one = harness.joined(1)
    _run_first_round(harness, one)
    for at in range(20):
        one.reports(2.0 + at, step=3)
        assert harness.bodies(Pull) == []
    one.reports(30.0, step=4)
    assert len(harness.bodies(Pull)) == 1


def test_step_in_progress_at_the_opening_does_not_count():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=1))
    one, two = harness.joined(1), harness.joined(2)
    two.reports(0.9, step=1)
    two.contributes(0.95)
    harness.merges_and_persists(1.0)
    one.reports(1.1, step=2)
    assert harness.bodies(Pull) == [], "its first step was in progress at the opening, so only one step counts"
    one.reports(2.1, step=3)
    assert [learner for learner, _ in harness.bodies(Pull)] == [1]


def test_exactly_the_live_learners_with_a_step_on_the_fragment_are_pulled():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    harness.add_learner(4).hello(0.0)  # admitted, still joining
    harness.persisted(0.0)
    _run_first_round(harness, one)
    three.reports(2.0, step=1)
    two.reports(2.0, step=2)
    one.reports(3.0, step=5)
    assert [learner for learner, _ in harness.bodies(Pull)] == [1, 2], (
        "the first step of learner 3 was in progress at the opening"
    )


def test_there_is_at_most_one_round_per_fragment():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1, rounds_in_flight=4))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    assert len(harness.bodies(Pull)) == 1
    for step in range(2, 6):
        one.reports(float(step), step)
        assert harness.bodies(Pull) == []


def test_there_are_at_most_tau_rounds_in_flight():
    harness = SyncerHarness(RunConfig(fragments=6, every_steps=6, overlap_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=6)
    assert [pull.round.fragment for _, pull in harness.bodies(Pull)] == [0, 1]
    one.contributes(1.5, fragment=1)
    harness.merges_and_persists(1.6)
    assert [pull.round.fragment for _, pull in harness.bodies(Pull)] == [2], "one round fewer is in flight"
    assert harness.fragment(3).reason == "due; 2 rounds in flight, the limit is 2"


# --------------------------------------------------------------------------------------------------------------------
# Pulling, grace and the seal


def test_pulling_ends_when_k_valid_contributions_are_in():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=2))
    fakes = [harness.joined(i) for i in (1, 2, 3)]
    for fake in fakes:
        fake.reports(1.0, step=1)
    fakes[0].contributes(1.2)
    assert harness.fragment(0).phase == "pulling"
    fakes[1].contributes(1.3, problem="values are not finite")
    assert harness.fragment(0).phase == "pulling", "an invalid contribution does not count"
    assert harness.core.view().pulled == 2, "the third reported after the opening"


def test_learner_is_in_a_merge_at_most_once():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    again = MessageArrived(one.envelope(one.contribution()))
    harness.handle(1.2, again)
    harness.handle(1.3, again)
    harness.expect()
    assert harness.core.view().ignored == {"duplicate-contribution": 1}
    two.contributes(1.4)
    assert [a.learner for a in harness.one(MergeRound).contributions] == [1, 2]


def test_grace_is_zero_until_all_three_averages_are_known():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, overlap_steps=4))
    one, two = harness.joined(1), harness.joined(2)
    two.reports(1.0, step=1)
    _, pulled = _pulled(harness)
    assert pulled == [2]
    two.contributes(1.5)
    assert harness.one(OpenGrace).reason == because("grace-unmeasured", 1)
    assert harness.one(OpenGrace).window_s == 0.0
    harness.merges_and_persists(2.0)
    assert one.step == 0, "no other learner was pulled"


def _pulled(harness: SyncerHarness) -> tuple[RoundId | None, list[int]]:
    pulls = harness.bodies(Pull)
    return (pulls[0][1].round if pulls else None), [learner for learner, _ in pulls]


def _measured(tau: int, gamma: float, quorum_s: float = 0.5) -> SyncerHarness:
    """Return a run with two learners after one round: xi_step = 1.0 and xi_sync = 0.5; round 2 is open since 10.0."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, overlap_steps=tau, grace_margin=gamma))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.0 + quorum_s)
    harness.merged(1.0 + quorum_s)
    harness.persisted(1.25 + quorum_s)
    one.acknowledges(1.5 + quorum_s)
    two.acknowledges(1.5 + quorum_s)
    view = harness.core.view()
    assert (view.step_s, view.quorum_s, view.sync_s) == pytest.approx((1.0, quorum_s, 0.5))
    two.reports(9.5, step=2)
    one.reports(10.0, step=3)
    assert _pulled(harness)[1] == [1, 2]
    return harness


def test_grace_window_is_gamma_times_the_slack():
    """Eq. 3: slack = 2 * 1.0 - (0.5 + 0.5) = 1.0; grace = min(0.5 * 1.0, 1.0) = 0.5."""
    harness = _measured(tau=2, gamma=0.5)
    harness.learners[1].contributes(10.25)
    grace = harness.one(OpenGrace)
    assert (grace.window_s, grace.step_s, grace.quorum_s, grace.sync_s) == pytest.approx((0.5, 1.0, 0.5, 0.5))
    assert str(grace.reason) == "quorum 1 of 1; waiting 0.5 s more, slack 1 s"
    assert harness.of(MergeRound) == []


def test_grace_window_never_exceeds_one_step():
    """slack = 8 * 1.0 - 1.0 = 7.0; grace = min(0.5 * 7.0, 1.0) = 1.0."""
    harness = _measured(tau=8, gamma=0.5)
    harness.learners[1].contributes(10.25)
    assert harness.one(OpenGrace).window_s == pytest.approx(1.0)


def test_grace_window_is_long_enough_for_the_slowest_awaited_learner():
    """slack = 8 * 1.0 - 1.0 = 7.0; xi_awaited = 1 + (5 - 1) / 8 = 1.5; grace = min(0.5 * 7.0, 1.5) = 1.5."""
    harness = _measured(tau=8, gamma=0.5)
    harness.learners[2].reports(10.1, step=3, step_time_s=5.0)
    assert harness.core.view().step_s == pytest.approx(1.0), "the lower median is not moved"
    harness.learners[1].contributes(10.25)
    grace = harness.one(OpenGrace)
    assert (grace.step_s, grace.awaited_s, grace.window_s) == pytest.approx((1.0, 1.5, 1.5))


def test_grace_window_is_zero_without_slack():
    """slack = H * 1.0 - (1.6 + 0.5) < 0: such a round would last until its fragment is due again."""
    harness = _measured(tau=1, gamma=0.5, quorum_s=1.6)
    harness.learners[1].contributes(10.25)
    grace = harness.one(OpenGrace)
    assert (grace.window_s, grace.reason.code) == (0.0, "grace-no-slack")
    assert [a.learner for a in harness.one(MergeRound).contributions] == [1], "sealed immediately"


def test_zero_margin_turns_the_grace_window_off():
    harness = _measured(tau=8, gamma=0.0)
    harness.learners[1].contributes(10.25)
    assert harness.one(OpenGrace).reason == because("grace-off", 1)
    assert harness.of(MergeRound) != []


def test_grace_ends_when_its_window_has_passed():
    harness = _measured(tau=8, gamma=0.5)
    harness.learners[1].contributes(10.25)
    assert harness.core.next_deadline() == pytest.approx(11.25)
    harness.handle(11.0, TimerFired())
    assert harness.of(MergeRound) == []
    harness.fire_timers(11.25)
    merge = harness.one(MergeRound)
    assert merge.reason == because("sealed-grace-expired", 1, 2)
    assert [a.learner for a in merge.contributions] == [1]


def test_grace_ends_when_all_pulled_learners_have_contributed():
    harness = _measured(tau=8, gamma=0.5)
    harness.learners[1].contributes(10.25)
    harness.learners[2].contributes(10.5)
    merge = harness.one(MergeRound)
    assert merge.reason == because("sealed-all", 2)
    assert [a.learner for a in merge.contributions] == [1, 2]


def test_grace_ends_when_no_learner_is_left_to_wait_for():
    harness = _measured(tau=8, gamma=0.5)
    harness.learners[1].contributes(10.25)
    harness.handle(10.5, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    assert [a.learner for a in harness.one(MergeRound).contributions] == [1]


def test_contribution_after_the_seal_is_refused_and_the_learner_keeps_its_progress():
    harness = _measured(tau=8, gamma=0.5)
    one, two = harness.learners[1], harness.learners[2]
    one.contributes(10.25)
    harness.fire_timers(11.25)
    two.contributes(11.5)
    harness.expect(harness.to(2, RefuseContribution(two.pulls[0], because("contribution-late"))))
    harness.merges_and_persists(11.6)
    assert two.merged_up_to[0] is None, "the late contribution is not merged"

    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.receives(0.5, Pull(FIRST))
    learner.steps(1.0)
    learner.receives(1.5, RefuseContribution(FIRST, because("contribution-late")))
    learner.expect()
    learner.published(1.6, 0, 1, base=0)
    learner.steps(2.0)
    assert learner.one(AdoptFragment) == AdoptFragment(0, 1, "carry", False, 0, 0, 200)


def test_contribution_after_the_round_is_refused_with_a_reason():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one, two = harness.joined(1), harness.joined(2)
    _run_first_round(harness, one)
    two.pulls[0] = FIRST
    two.step, two.trained = 1, 100
    two.contributes(2.0)
    harness.expect(harness.to(2, RefuseContribution(FIRST, because("contribution-no-round", 0))))
    two.merged_up_to.clear()
    one.reports(3.0, step=3)
    two.contributes(3.1)
    harness.expect(harness.to(2, RefuseContribution(FIRST, because("contribution-stale-round", 1, 1, 0))))


def test_contribution_without_a_pull_is_refused():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=2))
    fakes = [harness.joined(i) for i in (1, 2, 3)]
    for fake in fakes:
        fake.reports(1.0, step=1)
    fakes[2].pulls[0] = FIRST
    fakes[2].contributes(1.5)
    harness.expect(harness.to(3, RefuseContribution(FIRST, because("contribution-not-pulled", 3))))


# --------------------------------------------------------------------------------------------------------------------
# Weight


def test_contribution_weight_is_tokens_times_tokens_per_step():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=4, trained=1_000)
    one.contributes(1.5)
    assert harness.one(Accumulate).contribution.weight == 1_000 * (1_000 / 4) == contribution_weight(1_000, 4)


@pytest.mark.parametrize("counters", [{"steps": 0}, {"tokens": 0}, {"steps": 0, "tokens": 0}])
def test_contribution_without_steps_or_tokens_is_refused(counters):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=4)
    one.contributes(1.5, **counters)
    harness.expect(harness.to(1, RefuseContribution(FIRST, because("contribution-no-steps"))))
    assert harness.member(1).strikes == 0, "an empty contribution is not a strike"


def test_learner_answers_a_pull_after_its_first_step_on_the_fragment():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    assert harness.of(Send) == []
    harness.steps(1.0)
    assert harness.one(CopyFragment).copied_at == 1


# --------------------------------------------------------------------------------------------------------------------
# Abandoning


def test_round_without_quorum_at_its_deadline_is_abandoned_and_nothing_is_merged():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.5)
    while not harness.of(DiscardRound):
        for fake in (one, two):  # both are live; each contribution of the second is lost
            fake.reports(harness.now + 1.0, fake.step + 1)
            if harness.of(DiscardRound):
                break
        assert harness.now < 1_000, "the round was never abandoned; the story is printed above"
    assert harness.one(DiscardRound).round == FIRST
    assert harness.one(DiscardRound).reason.code == "round-abandoned"
    assert (harness.fragment(0).version, harness.disk.get(("version", 0))) == (0, None)
    assert harness.core.view().ledger[0].merged == 0


def test_abandoned_round_is_due_again_as_a_new_attempt():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    harness.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    harness.handle(1.3, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    assert harness.core.view().rounds_in_flight == 0
    for fake in (one, two):
        fake.session = 2
        fake.step += 1
        fake.trained += 100
        fake.hello(2.0, training=True)
    one.reports(3.0, step=3)
    assert _pulled(harness) == (RoundId(0, 0, 1, 2), [1, 2])


def test_round_is_abandoned_when_no_pulled_learner_is_left():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.1)
    harness.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    assert harness.one(DiscardRound).reason == because("round-quorum-lost", 1, 2)


def test_contribution_to_an_abandoned_attempt_is_refused():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    late = one.contribution()
    harness.handle(1.2, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    one.session = 2
    one.hello(1.5, training=True)
    one.delivers(1.6, late)
    harness.expect(harness.to(1, RefuseContribution(FIRST, because("contribution-no-round", 0))))
    one.reports(2.0, step=2)
    assert one.pulls[0] == RoundId(0, 0, 1, 2)
    one.delivers(2.1, late)
    assert harness.codes() == ["contribution-stale-round"]


def test_learners_keep_their_progress_after_a_failed_merge():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.2)
    harness.merge_failed(1.3, "out of memory")
    assert harness.one(DiscardRound).reason == because("merge-failed", "out of memory")
    assert harness.core.view().ledger[0].pending == 100
    one.reports(2.0, step=2)
    assert one.pulls[0].attempt == 2
    one.contributes(2.1)
    assert harness.one(Accumulate).contribution.steps == 2
    assert harness.one(MergeRound).contributions[0].tokens == 200


def test_reconnected_learner_is_pulled_again_for_the_open_round():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    fakes = [harness.joined(i) for i in (1, 2, 3)]
    for at, fake in enumerate(fakes):
        fake.reports(1.0, step=1 + at)
    harness.fire_timers(1.0)
    round_id, pulled = fakes[0].pulls[0], {i for i, v in harness.learners.items() if 0 in v.pulls}
    assert pulled == {1, 2, 3}
    harness.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    fakes[1].session = 2
    fakes[1].hello(1.4, training=True)
    assert [body.round for _, body in harness.bodies(Pull)] == [round_id]


def test_learner_is_pulled_after_its_first_full_step_while_a_round_waits():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    assert _pulled(harness)[1] == [1, 2]
    three.reports(1.5, step=2)
    assert [learner for learner, _ in harness.bodies(Pull)] == [3]
    while not harness.of(LogReason):
        harness.fire_timers(harness.core.next_deadline())
        assert harness.now < 1_000
    assert [learner for learner, _ in harness.bodies(Pull)] == [1, 2, 3]
    assert [effect.reason.code for effect in harness.of(LogReason)] == ["round-pull-retried"]
