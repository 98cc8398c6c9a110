"""Tests of each rule of the protocol: joining, leaving and reconnecting."""

from __future__ import annotations

import pytest

from atoll.core.codec import Scalar
from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    CloseConnection,
    ConnectionClosed,
    Contribution,
    Dial,
    Envelope,
    Hello,
    LearnerDisconnected,
    LeaveRequested,
    Left,
    LogReason,
    MembersRecord,
    MergeRound,
    MessageArrived,
    NoPeer,
    OptimizerState,
    PeerChosen,
    Persist,
    ProvideState,
    PublishAck,
    Published,
    Pull,
    Ready,
    Refuse,
    Report,
    SavedStateFound,
    Send,
    StartTraining,
    StateRejected,
    StateRequest,
    Stop,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.types import NO_VERSION, Limits, RoundId, RunConfig
from tests.core.harness import LearnerHarness, SyncerHarness

MODEL = ("embedding 32x8 f32", "head 8x32 f32")


# --------------------------------------------------------------------------------------------------------------------
# Hello and welcome


def test_join_is_hello_then_welcome_with_versions_then_fragments():
    harness = SyncerHarness(RunConfig(fragments=2, fingerprint=MODEL))
    one = harness.add_learner(1)
    one.hello(1.0)
    harness.expect(
        _logged("learner", 1, "member-admitting", 1),
        Persist(MembersRecord(1, incarnations=((1, 1),), left=(), retired_tokens=0)),
    )
    harness.persisted(1.1)
    harness.expect(
        harness.to(1, Welcome((0, 0), 0.0, 0.0)),
        _logged("learner", 1, "member-joining", 1),
        harness.to(1, Published(0, 0, None, None, 0.0)),
        harness.to(1, Published(1, 0, None, None, 0.0)),
    )
    assert harness.member(1).state == "joining"


def _logged(kind: str, number: int, code: str, *args: Scalar) -> LogReason:
    return LogReason((kind, number), because(code, *args))


def test_hello_has_the_identity_the_fingerprint_and_received_versions():
    config = RunConfig(run_id="night", fragments=2, fingerprint=MODEL)
    harness = LearnerHarness(config, learner=3, incarnation=5)
    harness.expect(Dial(0.0, 1))
    harness.opens(0.1)
    harness.expect(harness.sends(Hello("night", MODEL, (NO_VERSION, NO_VERSION), 0, 0, False)))
    envelope = harness.of(Send)[0].envelope
    assert (envelope.learner, envelope.incarnation, envelope.session) == (3, 5, 1)
    assert envelope.epoch == 0, "no epoch known yet"


def test_admission_is_durable_before_the_welcome():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.hello(1.0)
    one.hello(2.0)
    assert harness.bodies(Welcome) == []
    harness.persist_failed(3.0)
    assert harness.codes() == ["admission-failed"]
    assert harness.bodies(Welcome) == []
    harness.fire_timers(60.0)
    harness.persisted(60.1)
    assert [learner for learner, _ in harness.bodies(Welcome)] == [1]


def test_hello_during_a_write_waits_for_the_next_record():
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.add_learner(1).hello(1.0)
    harness.add_learner(2).hello(1.0)
    harness.persisted(1.1)
    assert [learner for learner, _ in harness.bodies(Welcome)] == [1]
    assert harness.one(Persist).record == MembersRecord(2, ((1, 1), (2, 1)), left=(), retired_tokens=0)
    harness.persisted(1.2)
    assert [learner for learner, _ in harness.bodies(Welcome)] == [2]


def test_lost_welcome_is_repeated_after_the_next_hello():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.hello(1.0)
    harness.persisted(1.1)
    one.hello(5.0, received=(NO_VERSION,))
    assert [learner for learner, _ in harness.bodies(Welcome)] == [1]
    assert [learner for learner, _ in harness.bodies(Published)] == [1]


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (("embedding 32x8 f32", "head 8x64 f32"), "'head', 8x64 at the learner and 8x32 in the run"),
        (("embedding 32x8 f32",), "'head' (8x32 f32), which only the run has"),
        ((*MODEL, "bias 8 f32"), "'bias' (8 f32), which the run does not have"),
        (
            ("embedding 32x8 bf16", "head 1x1 f32"),
            "'embedding', bf16 at the learner and f32 in the run; 2 tensors differ",
        ),
        ((*MODEL, "plan balanced 2"), "the fragment plan, 'balanced 2' at the learner and None in the run"),
        ((*MODEL, "a 8 f32", "plan balanced 2"), "'a' (8 f32), which the run does not have"),
    ],
)
def test_fingerprint_mismatch_is_refused_with_the_first_differing_tensor(theirs, difference):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, fingerprint=MODEL))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    before = harness.core.view()._replace(ignored={})
    two = harness.add_learner(2)
    two.hello(1.5, fingerprint=theirs)
    harness.expect(harness.to(2, Refuse(because("refused-fingerprint", difference), 0, True)))
    assert harness.core.view()._replace(ignored={}) == before
    one.contributes(1.6)
    assert harness.one(MergeRound).contributions[0].learner == 1


def test_another_number_of_fragments_is_another_model():
    harness = SyncerHarness(RunConfig(fragments=2))
    one = harness.add_learner(1)
    one.hello(1.0, received=(0,))
    harness.expect(harness.to(1, Refuse(because("refused-fingerprint", "1 fragments where the run has 2"), 0, True)))


def test_learner_of_another_run_is_refused():
    harness = SyncerHarness(RunConfig(run_id="night", fragments=1))
    harness.add_learner(1).hello(1.0, run_id="day")
    harness.expect(harness.to(1, Refuse(because("refused-run", "night", "day"), 0, True)))


@pytest.mark.parametrize("learner", [0, -1])
def test_learners_are_numbered_from_1(learner):
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.add_learner(learner).hello(1.0)
    harness.expect(harness.to(learner, Refuse(because("refused-id", learner), 0, True)))


def test_permanently_refused_learner_stops_with_the_reason():
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.1)
    harness.receives(0.2, Refuse(because("refused-run", "night", "day"), 0, True))
    harness.expect(
        Stop(because("learner-refused", "different run: this syncer serves 'night', the learner was started for 'day'"))
    )
    assert not harness.core.training


# --------------------------------------------------------------------------------------------------------------------
# Incarnations


def test_messages_of_a_replaced_incarnation_are_ignored():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    old = harness.joined(1)
    old.reports(1.0, step=1)
    new = harness.add_learner(1, incarnation=2)
    new.hello(2.0)
    assert harness.codes()[0] == "member-superseded"
    old.contributes(2.1)
    harness.expect()
    old.reports(2.2, step=2)
    harness.expect()
    assert harness.core.view().ignored == {"stale-incarnation": 2}


def test_hello_of_an_older_incarnation_is_refused_with_the_current_one():
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.joined(1, incarnation=3)
    old = harness.add_learner(1, incarnation=2)
    old.hello(2.0)
    harness.expect(harness.to(1, Refuse(because("refused-incarnation", 2, 3), 3, True)))


def test_refused_incarnation_stores_the_current_one_for_its_driver():
    harness = LearnerHarness(RunConfig(fragments=1), incarnation=2)
    harness.opens(0.1)
    harness.receives(0.2, Refuse(because("refused-incarnation", 2, 7), 7, True))
    assert harness.one(Stop).reason.code == "learner-refused"
    assert harness.core.state.refused_incarnation == 7


def test_contribution_of_a_replaced_incarnation_stays_in_its_round():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=2))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.1)
    harness.add_learner(1, incarnation=2).hello(1.2)
    two.contributes(1.3)
    assert [(a.learner, a.incarnation) for a in harness.one(MergeRound).contributions] == [(1, 1), (2, 1)]
    harness.merged(1.4)
    harness.persisted(1.5, "VersionRecord")
    line = harness.core.view().ledger[0]
    assert (line.merged, sum(line.dropped.values())) == (200, 0)


def test_tokens_of_a_replaced_incarnation_that_were_not_merged_are_dropped_with_the_reason():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=9))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    harness.add_learner(1, incarnation=2).hello(1.2)
    line = harness.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending) == (100, 0, 0)
    assert line.dropped == {"superseded": 100}


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state from a peer


def _with_a_peer() -> SyncerHarness:
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.acknowledges(1.3)
    return harness


def test_optimizer_state_comes_from_a_peer_with_at_least_the_same_versions():
    harness = _with_a_peer()
    two = harness.add_learner(2)
    two.hello(2.0)
    harness.persisted(2.1)
    two.delivers(2.2, StateRequest(()))
    harness.expect(
        _logged("learner", 2, "peer-chosen", 1, 2),
        harness.to(2, PeerChosen(1)),
        harness.to(1, ProvideState(2, 1, (1,))),
    )
    state = OptimizerState(1, 2, 1, step=3, versions=(1,))
    harness.learners[1].delivers(3.0, state)
    harness.expect(harness.to(2, state))


def test_peer_trains_on_and_sends_its_state_once_it_has_adopted_those_versions():
    peer = LearnerHarness(RunConfig(fragments=1)).trains()
    peer.receives(0.5, ProvideState(2, 1, (1,)))
    peer.expect()
    peer.steps(1.0)
    assert peer.bodies(OptimizerState) == [], "version 1 has not arrived yet"
    peer.published(1.5, 0, 1, base=0)
    peer.steps(2.0)
    peer.expect(
        peer.sends(Report(2, 200, 1.0)),
        AdoptFragment(0, 1, "carry", False, 0, 0, 200),
        peer.sends(OptimizerState(1, 2, 1, step=2, versions=(1,))),
    )


def test_most_recent_peer_is_chosen_then_the_lowest_id():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    for fake in (one, two, three):
        fake.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    three.acknowledges(1.3)
    two.acknowledges(1.3)
    four = harness.add_learner(4)
    four.hello(2.0)
    harness.persisted(2.1)
    four.delivers(2.2, StateRequest(()))
    assert harness.bodies(PeerChosen) == [(4, PeerChosen(2))]
    four.delivers(2.3, StateRequest((2,)))
    assert harness.bodies(PeerChosen) == [(4, PeerChosen(3))]


def test_updates_that_arrive_while_joining_are_buffered_and_replayed():
    harness = LearnerHarness(RunConfig(fragments=2))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4, 6), step_time_s=1.0)
    assert harness.bodies(StateRequest) == [(1, StateRequest(()))]
    harness.published(0.2, 0, 4)
    harness.published(0.3, 1, 6)
    harness.published(0.4, 0, 5, base=4)
    harness.expect(harness.sends(PublishAck(0, 5)))
    assert not harness.core.training
    harness.receives(0.5, PeerChosen(3))
    harness.receives(2.0, OptimizerState(3, 1, 1, step=90, versions=(5, 6)))
    harness.expect(
        AdoptFragment(0, 5, "overwrite", False, 0, 0, 0),
        AdoptFragment(1, 6, "overwrite", False, 0, 0, 0),
        StartTraining(because("state-from-peer", 3), 0),
        harness.sends(Ready(because("state-from-peer", 3))),
    )
    assert harness.core.training


def test_training_starts_only_when_every_fragment_is_here():
    harness = LearnerHarness(RunConfig(fragments=2))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4, 6))
    harness.receives(0.2, OptimizerState(3, 1, 1, step=90, versions=(4, 6)))
    harness.published(0.3, 0, 4)
    assert harness.of(StartTraining) == []
    harness.published(0.4, 1, 5)
    assert harness.of(StartTraining) == [], "version 6 was published before the welcome"
    harness.published(0.5, 1, 6)
    assert harness.one(StartTraining).warmup_steps == 0


def test_learner_without_a_peer_starts_with_fresh_optimizer_state_and_warm_up():
    harness = LearnerHarness(RunConfig(fragments=1, warmup_steps=50))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4,))
    harness.published(0.2, 0, 4)
    harness.receives(0.3, NoPeer(because("peer-none"), False))
    moments = because("state-fresh", 50, "no healthy learner can send optimizer state")
    harness.expect(
        AdoptFragment(0, 4, "overwrite", False, 0, 0, 0),
        StartTraining(moments, 50),
        harness.sends(Ready(moments)),
    )
    assert (
        harness.core.view().reason
        == "fresh optimizer state, 50 warm-up steps: no healthy learner can send optimizer state"
    )


@pytest.mark.parametrize("answer", [NoPeer(because("peer-none"), False), NoPeer(because("peer-new-run"), True)])
def test_learner_without_a_peer_starts_from_its_saved_part(answer):
    harness = LearnerHarness(RunConfig(fragments=1, warmup_steps=50))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4,))
    harness.published(0.2, 0, 4)
    harness.handle(0.3, SavedStateFound(2, 1_000_004))
    assert harness.of(StartTraining) == [], "the state of a peer is newer, so the learner waits for it"
    harness.receives(0.4, answer)
    moments = because("state-from-snapshot", 2, 1_000_004)
    harness.expect(
        AdoptFragment(0, 4, "overwrite", False, 0, 0, 0),
        StartTraining(moments, 0),
        harness.sends(Ready(moments)),
    )
    assert harness.core.view().reason == "optimizer state that learner 2 saved in snapshot 1000004"


def test_state_of_a_peer_is_preferred_to_a_saved_part():
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    harness.welcomed(0.1, versions=(4,))
    harness.published(0.2, 0, 4)
    harness.handle(0.3, SavedStateFound(1, 1_000_004))
    harness.receives(0.4, OptimizerState(3, 1, 1, step=90, versions=(4,)))
    assert harness.one(StartTraining) == StartTraining(because("state-from-peer", 3), 0)


def test_new_run_has_no_optimizer_state_and_no_warm_up():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.hello(1.0)
    harness.persisted(1.0)
    one.delivers(1.1, StateRequest(()))
    harness.expect(harness.to(1, NoPeer(because("peer-new-run"), True)))


def test_no_peer_is_sent_to_a_single_learner_after_the_first_merge():
    harness = _with_a_peer()
    harness.handle(1.5, LearnerDisconnected(1, 1, 1, "power"))
    two = harness.add_learner(2)
    two.hello(2.0)
    harness.persisted(2.1)
    two.delivers(2.2, StateRequest(()))
    harness.expect(harness.to(2, NoPeer(because("peer-none"), False)))


def test_next_peer_is_tried_after_h_steps_of_the_run():
    harness = LearnerHarness(RunConfig(fragments=1, every_steps=10))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(4,), step_time_s=2.0)
    harness.receives(0.1, PeerChosen(3))
    harness.fire_timers(19.9)
    assert harness.bodies(StateRequest) == []
    harness.fire_timers(20.0)
    assert harness.bodies(StateRequest) == [(1, StateRequest((3,)))]
    assert harness.codes() == ["state-timeout"]


def test_next_peer_is_tried_immediately_after_a_rejection():
    harness = LearnerHarness(RunConfig(fragments=1, warmup_steps=50, limits=Limits(max_state_peers=2)))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(4,), step_time_s=2.0)
    harness.published(0.1, 0, 4)
    harness.receives(0.1, PeerChosen(3))
    harness.handle(0.2, StateRejected(3, "out of memory"))
    assert harness.codes() == ["state-rejected"]
    assert harness.bodies(StateRequest) == [(1, StateRequest((3,)))]
    harness.receives(0.3, PeerChosen(5))
    harness.handle(
        0.4, StateRejected(3, "out of memory")
    )  # a duplicate reply of the first peer: the second one is still awaited
    harness.expect()
    harness.handle(0.5, StateRejected(5, "the optimizer state is of SGD"))
    moments = because("state-fresh", 50, "requested optimizer state from 2 learners, received none")
    assert harness.one(StartTraining) == StartTraining(moments, 50)
    harness.handle(0.6, StateRejected(6, "too late"))
    harness.expect()


def test_rejected_state_is_followed_by_saved_state():
    harness = LearnerHarness(RunConfig(fragments=1, limits=Limits(max_state_peers=1)))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(4,))
    harness.published(0.1, 0, 4)
    harness.handle(0.2, SavedStateFound(1, 1_000_004))
    harness.handle(0.3, StateRejected(3, "out of memory"))
    assert harness.one(StartTraining) == StartTraining(because("state-from-snapshot", 1, 1_000_004), 0)


def test_next_peer_is_tried_after_the_welcome_if_state_is_rejected_while_disconnected():
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(4,))
    harness.receives(0.1, PeerChosen(3))
    harness.handle(0.2, ConnectionClosed(1, "power"))
    harness.handle(0.3, StateRejected(3, "out of memory"))
    assert harness.bodies(StateRequest) == []
    harness.opens(0.4)
    harness.welcomed(0.5, versions=(4,))
    assert harness.bodies(StateRequest) == [(1, StateRequest((3,)))]


def test_joining_learner_is_neither_pulled_nor_counted():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    harness.add_learner(1).hello(0.0)
    harness.persisted(0.1)
    assert harness.core.view().alive == 0
    assert harness.fragment(0).reason == "0 of 1 learners have taken 1 steps since the last round"


# --------------------------------------------------------------------------------------------------------------------
# Leaving, silence, reconnecting


def test_leaving_learner_sends_left_and_is_not_awaited():
    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.handle(1.0, LeaveRequested("operator request"))
    learner.expect(learner.sends(Left("operator request")), Stop(because("learner-left", "operator request")))

    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=1))
    one, two = harness.joined(1), harness.joined(2)
    one.reports(0.5, step=1)
    one.contributes(0.6)
    harness.merges_and_persists(0.7)
    two.reports(1.8, step=2)
    one.reports(2.0, step=3)
    assert len(harness.bodies(Pull)) == 2
    one.delivers(2.2, Left("operator request"))
    assert harness.member(1).state == "left"
    assert harness.fragment(0).waiting_for == (2,)
    two.contributes(2.3)
    assert [a.learner for a in harness.one(MergeRound).contributions] == [2]


def test_left_learner_is_not_awaited_after_a_restart_and_may_join_again():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.delivers(1.1, Left("operator request"))
    harness.persisted(1.2)
    again = harness.restarted()
    assert again.member(1).state == "left"
    assert again.core.view().ledger[0].dropped == {"before-restart": 100}
    again.add_learner(1, session=2).hello(2.0, training=True)
    again.expect()
    again.joined(1, at=3.0, incarnation=2)
    assert again.member(1).state == "live"


def test_silent_learner_is_suspected_then_disconnected_and_a_message_recovers_it():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=99))
    one, two = harness.joined(1), harness.joined(2)
    for step in range(1, 8):
        one.reports(float(step), step)
        two.reports(float(step), step)
    now = 7.0
    while harness.member(1).state == "live":
        now += 1.0
        two.reports(now, int(now))
        assert now < 600, "silence is not detected; the story is printed above"
    assert harness.member(1).state == "suspect"
    assert harness.core.view().alive == 1
    one.reports(now + 0.5, step=8)
    assert harness.codes()[0] == "member-recovered"
    assert harness.member(1).state == "live"
    while harness.member(1).state != "disconnected":
        now += 1.0
        two.reports(now, int(now))
        assert now < 20_000, "a silent learner is never disconnected; the story is printed above"
    assert harness.one(CloseConnection).reason.code == "member-timed-out"


def test_rounds_do_not_wait_for_a_suspected_learner():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=99, quorum=2))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    for step in range(1, 6):
        for fake in (three, two, one):
            fake.reports(float(step), step)
    assert set(harness.fragment(0).waiting_for) == {1, 2, 3}
    now = 6.0
    while harness.member(2).state == "live":
        three.reports(now, int(now))
        one.reports(now, int(now))
        now += 1.0
        assert now < 600
    assert 2 not in harness.fragment(0).waiting_for


def test_learner_reconnects_and_keeps_its_progress():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.steps(1.0)
    harness.handle(1.5, ConnectionClosed(1, "connection reset by peer"))
    assert harness.one(Dial).attempt == 1
    harness.steps(2.0)
    harness.opens(2.5)
    harness.expect(harness.sends(Hello("run", (), (0,), 2, 200, True)))
    harness.welcomed(2.6)
    harness.expect(_logged("learner", 1, "connection-up"))
    harness.steps(3.0)
    harness.expect(harness.sends(Report(3, 300, 1.0)))


def test_learner_that_resumes_gets_what_it_missed():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one, two = harness.joined(1), harness.joined(2)
    harness.handle(0.5, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    assert [learner for learner, _ in harness.bodies(Published)] == [1], "nothing is sent into a closed link"
    two.session = 2
    two.hello(2.0, training=True)
    harness.expect(
        _logged("learner", 2, "member-resumed", 1),
        harness.to(2, Welcome((1,), 0.0, 1.0)),
        harness.to(2, Published(0, 1, 0, None, 0.0)),
    )


def test_messages_of_an_older_connection_are_dropped():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.joined(1)
    one.session = 2
    one.hello(1.0, training=True)
    one.delivers(1.1, Report(5, 500, 1.0), session=1)
    harness.expect()
    assert harness.member(1).step == 0
    harness.handle(1.2, LearnerDisconnected(1, 1, 1, "the old link"))
    assert harness.member(1).state == "live", "closing a replaced connection is no loss"

    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    learner.handle(1.0, ConnectionClosed(1, "reset"))
    learner.opens(2.0)
    learner.welcomed(2.1)
    learner.published(2.2, 0, 1, base=0)
    assert learner.of(Send) != []
    learner.receives(2.3, Pull(RoundId(0, 1, 1, 1)), session=1)
    learner.steps(3.0)
    assert learner.bodies(Contribution) == []


def test_join_or_loss_sends_no_message_to_other_learners():
    """The other learner receives no message about a join, a loss or a fresh start."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=99))
    harness.joined(1)
    recipients: list[int] = []
    for event in ("join", "loss", "again"):
        if event == "loss":
            harness.handle(2.0, LearnerDisconnected(2, 1, 1, "power"))
        else:
            harness.joined(2, at=1.0 if event == "join" else 3.0, incarnation=1 if event == "join" else 2)
        recipients += [effect.envelope.learner for effect in harness.of(Send)]
    assert 1 not in recipients


def test_suspected_learner_that_recovers_in_time_is_still_in_the_round():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=99, quorum=2))
    one, two, three = (harness.joined(i) for i in (1, 2, 3))
    for step in range(1, 6):
        for fake in (three, two, one):
            fake.reports(float(step), step)
    assert {fake.id for fake in (one, two, three) if 0 in fake.pulls} == {1, 2, 3}
    three.contributes(5.1)
    now = 6.0
    while harness.member(2).state == "live":
        three.reports(now, int(now))
        one.reports(now, int(now))
        now += 1.0
        assert now < 600
    assert harness.fragment(0).phase == "pulling"
    two.contributes(now)
    assert [effect.contribution.learner for effect in harness.of(Accumulate)] == [2]
    assert harness.one(MergeRound).round == two.pulls[0]


def test_message_of_an_unknown_learner_is_ignored():
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.joined(1)
    harness.handle(1.0, MessageArrived(Envelope(9, 1, 1, 1, 1, 0, 0, Report(5, 500, 1.0))))
    harness.expect()
    assert harness.core.view().trained == 0
