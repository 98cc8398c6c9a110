"""One test per sentence of the protocol: what a learner does in a step, and what the syncer does in a round."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice

FIRST = RoundId(fragment=0, base=0, epoch=1, attempt=1)


# --------------------------------------------------------------------------------------------------------------------
# What a learner does, every inner step, without ever waiting


def test_every_inner_step_counts_for_every_fragment():
    talk = LearnerTalk(RunConfig(fragments=3)).trains()
    talk.steps(1.0, tokens=128)
    talk.steps(2.0, tokens=64)
    assert [(line.trained, line.pending) for line in talk.core.view().ledger] == [(192, 192)] * 3


def test_a_report_has_the_local_step_the_counters_and_the_step_time_and_no_tensors():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0, tokens=128, step_time_s=0.9)
    talk.expect(talk.sends(Report(1, 128, 0.9)))


def test_pull_is_answered_with_the_fragment_at_the_step_boundary():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    talk.receives(1.5, Pull(FIRST))
    talk.expect()
    talk.steps(2.0)
    talk.expect(
        talk.sends(Report(2, 200, 1.0)),
        CopyFragment(FIRST, copied_at=2),
        talk.sends(Contribution(FIRST, copied_at=2, steps=2, tokens=200, trained=200, dropped=0)),
    )


def test_a_pull_that_is_repeated_is_answered_with_the_same_copy():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.steps(1.0)
    talk.steps(2.0)
    talk.receives(2.5, Pull(FIRST))
    talk.expect(talk.sends(Contribution(FIRST, copied_at=1, steps=1, tokens=100, trained=100, dropped=0)))


def test_a_pull_on_a_version_that_has_not_arrived_waits_for_that_version():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    ahead = RoundId(0, 1, 1, 1)
    talk.receives(0.5, Pull(ahead))
    talk.steps(1.0)
    assert talk.of(CopyFragment) == []
    talk.gets(1.5, 0, 1, base=0)
    talk.steps(2.0)
    assert talk.of(CopyFragment) == [], "adopted at this boundary, the next step is the first on it"
    talk.steps(3.0)
    assert talk.one(CopyFragment).round == ahead


def test_a_pull_on_a_version_that_is_history_is_not_answered():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.gets(0.5, 0, 1, base=0)
    talk.steps(1.0)
    talk.receives(1.5, Pull(FIRST))
    talk.steps(2.0)
    assert talk.of(CopyFragment) == []
    assert talk.core.view().pulls == ()


def test_every_published_fragment_that_has_arrived_is_adopted_at_the_step_boundary():
    talk = LearnerTalk(RunConfig(fragments=2)).trains()
    talk.gets(0.5, 1, 1, base=0)
    talk.expect(talk.sends(PublishAck(1, 1)))
    talk.gets(0.6, 0, 1, base=0)
    talk.steps(1.0)
    talk.expect(
        talk.sends(Report(1, 100, 1.0)),
        AdoptFragment(1, 1, "carry", False, 0, 0, 100),
        AdoptFragment(0, 1, "carry", False, 0, 0, 100),
    )


def test_a_short_stall_needs_nothing_pending_updates_are_adopted_at_the_next_step_boundary():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    for version in (1, 2, 3):
        talk.gets(2.0 + version, 0, version, base=version - 1)
    talk.steps(60.0, step_time_s=59.0)
    assert talk.one(AdoptFragment).version == 3


def test_learner_stops_on_finish_and_not_by_its_own_budget():
    talk = LearnerTalk(RunConfig(fragments=1, budget_tokens=100, budget_merges=1)).trains()
    talk.steps(1.0, tokens=1_000)
    assert talk.core.training, "the budget is global, never local"


def test_steps_do_not_depend_on_the_syncer():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    for step in range(1, 5):
        talk.steps(float(step))
        assert talk.of(Send) == []
        assert talk.of(Stop) == []
        assert talk.core.training
    assert talk.line().pending == 400


# --------------------------------------------------------------------------------------------------------------------
# What the syncer does: opening a round


def test_a_round_takes_a_fragment_from_v_to_v_plus_1_and_then_it_is_idle():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    talk.expect(talk.to(1, Pull(FIRST)))
    one.contributes(1.5)
    accepted = AcceptedContribution(1, 1, 1, 1, 100, 100, 0, 10_000.0)
    talk.expect(
        Accumulate(FIRST, accepted),
        OpenGrace(FIRST, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, because("grace-unmeasured", 1)),
        MergeRound(FIRST, (accepted,), because("sealed-all", 1)),
    )
    talk.merged(1.6)
    mark = MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0)
    talk.expect(Persist(VersionRecord(0, 1, FIRST, (accepted,), ((1, mark),), merged_tokens=100)))
    talk.persisted(1.7)
    talk.expect(talk.to(1, Published(0, 1, 0, mark, 0.0)))
    assert (talk.fragment(0).phase, talk.fragment(0).version) == ("idle", 1)


def test_a_round_opens_when_k_live_learners_have_taken_h_steps_since_its_last_opening():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    _run_first_round(talk, one, two, three)
    one.reports(10.0, step=7)
    two.reports(10.0, step=4)
    three.reports(10.0, step=4)
    assert talk.bodies(Pull) == [], "one of three has taken H steps, the quorum is two"
    assert talk.fragment(0).reason == "1 of 2 learners have taken 4 steps since the last round"
    two.reports(11.0, step=5)
    assert talk.bodies(Pull) == [(i, Pull(RoundId(0, 1, 1, 1))) for i in (1, 2, 3)]


def _run_first_round(talk: SyncerTalk, *voices: Voice) -> None:
    """The report that makes it due opens it; the others are within their second step then."""
    for voice in voices:
        voice.reports(1.0, step=1)
    for voice in voices:
        if 0 in voice.pulls:
            voice.contributes(1.5)
    talk.merges_and_persists(1.6)
    for voice in voices:
        voice.acknowledges(1.7)


@pytest.mark.parametrize(("fragments", "every_steps"), [(4, 4), (4, 8), (3, 6), (8, 4), (24, 24)])
def test_the_first_round_of_a_fragment_waits_for_its_offset_which_is_spread_evenly_over_h(fragments, every_steps):
    talk = SyncerTalk(RunConfig(fragments=fragments, every_steps=every_steps, overlap_steps=fragments))
    one = talk.joined(1)
    opened: dict[int, int] = {}
    for step in range(1, every_steps + 1):
        one.reports(float(step), step)
        for _, pull in talk.bodies(Pull):
            opened.setdefault(pull.round.fragment, step)
    assert opened == {p: 1 + p * every_steps // fragments for p in range(fragments)}


def test_ripeness_is_counted_in_steps_and_not_in_messages():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=3))
    one = talk.joined(1)
    _run_first_round(talk, one)
    for at in range(20):
        one.reports(2.0 + at, step=3)
        assert talk.bodies(Pull) == []
    one.reports(30.0, step=4)
    assert len(talk.bodies(Pull)) == 1


def test_a_step_that_was_under_way_when_the_round_opened_does_not_count_as_taken_since():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=1))
    one, two = talk.joined(1), talk.joined(2)
    two.reports(0.9, step=1)
    two.contributes(0.95)
    talk.merges_and_persists(1.0)
    one.reports(1.1, step=2)
    assert talk.bodies(Pull) == [], "its first step was under way when the round opened: one step was taken since"
    one.reports(2.1, step=3)
    assert [learner for learner, _ in talk.bodies(Pull)] == [1]


def test_exactly_the_live_learners_with_a_step_on_the_fragment_are_pulled():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    talk.voice(4).hello(0.0)  # admitted, still joining
    talk.persisted(0.0)
    _run_first_round(talk, one)
    three.reports(2.0, step=1)
    two.reports(2.0, step=2)
    one.reports(3.0, step=5)
    assert [learner for learner, _ in talk.bodies(Pull)] == [1, 2], "the first step of 3 was under way at the opening"


def test_there_is_at_most_one_round_per_fragment():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1, rounds_in_flight=4))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    assert len(talk.bodies(Pull)) == 1
    for step in range(2, 6):
        one.reports(float(step), step)
        assert talk.bodies(Pull) == []


def test_there_are_at_most_tau_rounds_in_flight():
    talk = SyncerTalk(RunConfig(fragments=6, every_steps=6, overlap_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=6)
    assert [pull.round.fragment for _, pull in talk.bodies(Pull)] == [0, 1]
    one.contributes(1.5, fragment=1)
    talk.merges_and_persists(1.6)
    assert [pull.round.fragment for _, pull in talk.bodies(Pull)] == [2], "a place is free"
    assert talk.fragment(3).reason == "due; 2 rounds in flight, the limit is 2"


# --------------------------------------------------------------------------------------------------------------------
# Pulling, grace and the seal


def test_pulling_ends_when_k_valid_contributions_are_in():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=2))
    voices = [talk.joined(i) for i in (1, 2, 3)]
    for voice in voices:
        voice.reports(1.0, step=1)
    voices[0].contributes(1.2)
    assert talk.fragment(0).phase == "pulling"
    voices[1].contributes(1.3, problem="values are not finite")
    assert talk.fragment(0).phase == "pulling", "an unfit contribution does not count"
    assert talk.core.view().asked == 2, "the third reported after the opening"


def test_a_learner_is_in_a_merge_at_most_once():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    again = MessageArrived(one.envelope(one.contribution()))
    talk.handle(1.2, again)
    talk.handle(1.3, again)
    talk.expect()
    assert talk.core.view().ignored == {"duplicate-contribution": 1}
    two.contributes(1.4)
    assert [a.learner for a in talk.one(MergeRound).contributions] == [1, 2]


def test_grace_is_zero_until_all_three_averages_are_known():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, overlap_steps=4))
    one, two = talk.joined(1), talk.joined(2)
    two.reports(1.0, step=1)
    _, asked = _asked(talk)
    assert asked == [2]
    two.contributes(1.5)
    assert talk.one(OpenGrace).reason == because("grace-unmeasured", 1)
    assert talk.one(OpenGrace).window_s == 0.0
    talk.merges_and_persists(2.0)
    assert one.step == 0, "no other learner was pulled"


def _asked(talk: SyncerTalk) -> tuple[RoundId | None, list[int]]:
    pulls = talk.bodies(Pull)
    return (pulls[0][1].round if pulls else None), [learner for learner, _ in pulls]


def _measured(tau: int, gamma: float, quorum_s: float = 0.5) -> SyncerTalk:
    """Two learners and one round done: xi_step = 1.0, xi_sync = 0.5; the second round is open since 10.0."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, overlap_steps=tau, grace_margin=gamma))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    one.contributes(1.0 + quorum_s)
    talk.merged(1.0 + quorum_s)
    talk.persisted(1.25 + quorum_s)
    one.acknowledges(1.5 + quorum_s)
    two.acknowledges(1.5 + quorum_s)
    view = talk.core.view()
    assert (view.step_s, view.quorum_s, view.sync_s) == pytest.approx((1.0, quorum_s, 0.5))
    two.reports(9.5, step=2)
    one.reports(10.0, step=3)
    assert _asked(talk)[1] == [1, 2]
    return talk


def test_the_grace_window_is_gamma_times_the_slack():
    """Eq. 3: slack = 2 * 1.0 - (0.5 + 0.5) = 1.0; grace = min(0.5 * 1.0, 1.0) = 0.5."""
    talk = _measured(tau=2, gamma=0.5)
    talk.voices[1].contributes(10.25)
    grace = talk.one(OpenGrace)
    assert (grace.window_s, grace.step_s, grace.quorum_s, grace.sync_s) == pytest.approx((0.5, 1.0, 0.5, 0.5))
    assert str(grace.reason) == "quorum 1 of 1; waiting 0.5 s more, slack 1 s"
    assert talk.of(MergeRound) == []


def test_the_grace_window_never_exceeds_one_step():
    """slack = 8 * 1.0 - 1.0 = 7.0; grace = min(0.5 * 7.0, 1.0) = 1.0."""
    talk = _measured(tau=8, gamma=0.5)
    talk.voices[1].contributes(10.25)
    assert talk.one(OpenGrace).window_s == pytest.approx(1.0)


def test_grace_window_is_long_enough_for_the_slowest_awaited_learner():
    """slack = 8 * 1.0 - 1.0 = 7.0; xi_awaited = 1 + (5 - 1) / 8 = 1.5; grace = min(0.5 * 7.0, 1.5) = 1.5."""
    talk = _measured(tau=8, gamma=0.5)
    talk.voices[2].reports(10.1, step=3, step_time_s=5.0)
    assert talk.core.view().step_s == pytest.approx(1.0), "the lower median is not moved"
    talk.voices[1].contributes(10.25)
    grace = talk.one(OpenGrace)
    assert (grace.step_s, grace.awaited_s, grace.window_s) == pytest.approx((1.0, 1.5, 1.5))


def test_there_is_no_grace_without_slack():
    """slack = H * 1.0 - (1.6 + 0.5) < 0: such a round lasts until its fragment is due again."""
    talk = _measured(tau=1, gamma=0.5, quorum_s=1.6)
    talk.voices[1].contributes(10.25)
    grace = talk.one(OpenGrace)
    assert (grace.window_s, grace.reason.code) == (0.0, "grace-no-slack")
    assert [a.learner for a in talk.one(MergeRound).contributions] == [1], "sealed at once"


def test_a_margin_of_zero_turns_the_grace_window_off():
    talk = _measured(tau=8, gamma=0.0)
    talk.voices[1].contributes(10.25)
    assert talk.one(OpenGrace).reason == because("grace-off", 1)
    assert talk.of(MergeRound) != []


def test_grace_ends_when_its_window_has_passed():
    talk = _measured(tau=8, gamma=0.5)
    talk.voices[1].contributes(10.25)
    assert talk.core.next_deadline() == pytest.approx(11.25)
    talk.handle(11.0, TimerFired())
    assert talk.of(MergeRound) == []
    talk.fires(11.25)
    merge = talk.one(MergeRound)
    assert merge.reason == because("sealed-grace-expired", 1, 2)
    assert [a.learner for a in merge.contributions] == [1]


def test_grace_ends_when_all_pulled_learners_have_contributed():
    talk = _measured(tau=8, gamma=0.5)
    talk.voices[1].contributes(10.25)
    talk.voices[2].contributes(10.5)
    merge = talk.one(MergeRound)
    assert merge.reason == because("sealed-all", 2)
    assert [a.learner for a in merge.contributions] == [1, 2]


def test_grace_ends_when_no_learner_is_left_to_wait_for():
    talk = _measured(tau=8, gamma=0.5)
    talk.voices[1].contributes(10.25)
    talk.handle(10.5, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    assert [a.learner for a in talk.one(MergeRound).contributions] == [1]


def test_a_contribution_after_the_seal_is_refused_and_the_learner_keeps_its_progress():
    talk = _measured(tau=8, gamma=0.5)
    one, two = talk.voices[1], talk.voices[2]
    one.contributes(10.25)
    talk.fires(11.25)
    two.contributes(11.5)
    talk.expect(talk.to(2, RefuseContribution(two.pulls[0], because("contribution-late"))))
    talk.merges_and_persists(11.6)
    assert two.marks[0] is None, "nothing of it is merged"

    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.receives(0.5, Pull(FIRST))
    learner.steps(1.0)
    learner.receives(1.5, RefuseContribution(FIRST, because("contribution-late")))
    learner.expect()
    learner.gets(1.6, 0, 1, base=0)
    learner.steps(2.0)
    assert learner.one(AdoptFragment) == AdoptFragment(0, 1, "carry", False, 0, 0, 200)


def test_a_contribution_after_the_round_is_refused_with_a_reason():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one, two = talk.joined(1), talk.joined(2)
    _run_first_round(talk, one)
    two.pulls[0] = FIRST
    two.step, two.trained = 1, 100
    two.contributes(2.0)
    talk.expect(talk.to(2, RefuseContribution(FIRST, because("contribution-no-round", 0))))
    two.marks.clear()
    one.reports(3.0, step=3)
    two.contributes(3.1)
    talk.expect(talk.to(2, RefuseContribution(FIRST, because("contribution-stale-round", 1, 1, 0))))


def test_contribution_without_a_pull_is_refused():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=2))
    voices = [talk.joined(i) for i in (1, 2, 3)]
    for voice in voices:
        voice.reports(1.0, step=1)
    voices[2].pulls[0] = FIRST
    voices[2].contributes(1.5)
    talk.expect(talk.to(3, RefuseContribution(FIRST, because("contribution-not-pulled", 3))))


# --------------------------------------------------------------------------------------------------------------------
# Weight


def test_the_weight_is_quantity_times_quality():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=4, trained=1_000)
    one.contributes(1.5)
    assert talk.one(Accumulate).contribution.weight == 1_000 * (1_000 / 4) == contribution_weight(1_000, 4)


@pytest.mark.parametrize("counters", [{"steps": 0}, {"tokens": 0}, {"steps": 0, "tokens": 0}])
def test_no_steps_no_contribution(counters):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=4)
    one.contributes(1.5, **counters)
    talk.expect(talk.to(1, RefuseContribution(FIRST, because("contribution-no-steps"))))
    assert talk.member(1).strikes == 0, "nothing to merge is no offence"


def test_learner_answers_a_pull_after_its_first_step_on_the_fragment():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    assert talk.of(Send) == []
    talk.steps(1.0)
    assert talk.one(CopyFragment).copied_at == 1


# --------------------------------------------------------------------------------------------------------------------
# Abandoning


def test_a_round_without_quorum_at_its_deadline_is_abandoned_and_nothing_is_merged():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.5)
    while not talk.of(DiscardRound):
        for voice in (one, two):  # both are alive; the answer of the second is lost each time
            voice.reports(talk.now + 1.0, voice.step + 1)
            if talk.of(DiscardRound):
                break
        assert talk.now < 1_000, "the round was never abandoned; the story is printed above"
    assert talk.one(DiscardRound).round == FIRST
    assert talk.one(DiscardRound).reason.code == "round-abandoned"
    assert (talk.fragment(0).version, talk.disk.get(("version", 0))) == (0, None)
    assert talk.core.view().ledger[0].merged == 0


def test_abandoned_round_is_due_again_as_a_new_attempt():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    talk.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    talk.handle(1.3, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    assert talk.core.view().rounds_in_flight == 0
    for voice in (one, two):
        voice.session = 2
        voice.step += 1
        voice.trained += 100
        voice.hello(2.0, training=True)
    one.reports(3.0, step=3)
    assert _asked(talk) == (RoundId(0, 0, 1, 2), [1, 2])


def test_round_is_abandoned_when_no_pulled_learner_is_left():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.1)
    talk.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    assert talk.one(DiscardRound).reason == because("round-quorum-lost", 1, 2)


def test_the_answer_to_an_attempt_that_was_abandoned_is_refused():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    late = one.contribution()
    talk.handle(1.2, LearnerDisconnected(1, 1, 1, "connection reset by peer"))
    one.session = 2
    one.hello(1.5, training=True)
    one.delivers(1.6, late)
    talk.expect(talk.to(1, RefuseContribution(FIRST, because("contribution-no-round", 0))))
    one.reports(2.0, step=2)
    assert one.pulls[0] == RoundId(0, 0, 1, 2)
    one.delivers(2.1, late)
    assert talk.codes() == ["contribution-stale-round"]


def test_a_merge_that_fails_leaves_every_learner_its_progress():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.2)
    talk.merge_failed(1.3, "out of memory")
    assert talk.one(DiscardRound).reason == because("merge-failed", "out of memory")
    assert talk.core.view().ledger[0].pending == 100
    one.reports(2.0, step=2)
    assert one.pulls[0].attempt == 2
    one.contributes(2.1)
    assert talk.one(Accumulate).contribution.steps == 2
    assert talk.one(MergeRound).contributions[0].tokens == 200


def test_reconnected_learner_is_pulled_again_for_the_open_round():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    voices = [talk.joined(i) for i in (1, 2, 3)]
    for at, voice in enumerate(voices):
        voice.reports(1.0, step=1 + at)
    talk.fires(1.0)
    round_id, asked = voices[0].pulls[0], {i for i, v in talk.voices.items() if 0 in v.pulls}
    assert asked == {1, 2, 3}
    talk.handle(1.2, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    voices[1].session = 2
    voices[1].hello(1.4, training=True)
    assert [body.round for _, body in talk.bodies(Pull)] == [round_id]


def test_learner_is_pulled_after_its_first_full_step_while_a_round_waits():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4, quorum=2))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    assert _asked(talk)[1] == [1, 2]
    three.reports(1.5, step=2)
    assert [learner for learner, _ in talk.bodies(Pull)] == [3]
    while not talk.of(LogReason):
        talk.fires(talk.core.next_deadline())
        assert talk.now < 1_000
    assert [learner for learner, _ in talk.bodies(Pull)] == [1, 2, 3]
    assert [effect.reason.code for effect in talk.of(LogReason)] == ["round-pull-retried"]
