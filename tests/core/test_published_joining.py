"""One test per sentence of the protocol: joining, leaving, coming back; one syncer or several; clocks."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk

MODEL = ("embedding 32x8 f32", "head 8x32 f32")


# --------------------------------------------------------------------------------------------------------------------
# Hello and welcome


def test_a_join_is_hello_then_welcome_with_the_versions_then_the_fragments():
    talk = SyncerTalk(RunConfig(fragments=2, fingerprint=MODEL))
    one = talk.voice(1)
    one.hello(1.0)
    talk.expect(
        _says("learner", 1, "member-admitting", 1),
        Persist(MembersRecord(1, incarnations=((1, 1),), left=(), retired_tokens=0)),
    )
    talk.persisted(1.1)
    talk.expect(
        talk.to(1, Welcome((0, 0), 0.0, 0.0)),
        _says("learner", 1, "member-joining", 1),
        talk.to(1, Published(0, 0, None, None, 0.0)),
        talk.to(1, Published(1, 0, None, None, 0.0)),
    )
    assert talk.member(1).state == "joining"


def _says(kind: str, number: int, code: str, *args: Scalar) -> LogReason:
    return LogReason((kind, number), because(code, *args))


def test_hello_has_the_identity_the_fingerprint_and_received_versions():
    config = RunConfig(run_id="night", fragments=2, fingerprint=MODEL)
    talk = LearnerTalk(config, learner=3, incarnation=5)
    talk.expect(Dial(0.0, 1))
    talk.opens(0.1)
    talk.expect(talk.sends(Hello("night", MODEL, (NO_VERSION, NO_VERSION), 0, 0, False)))
    envelope = talk.of(Send)[0].envelope
    assert (envelope.learner, envelope.incarnation, envelope.session) == (3, 5, 1)
    assert envelope.epoch == 0, "no epoch known yet"


def test_an_admission_is_durable_before_the_welcome():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.hello(1.0)
    one.hello(2.0)
    assert talk.bodies(Welcome) == []
    talk.persist_failed(3.0)
    assert talk.codes() == ["admission-failed"]
    assert talk.bodies(Welcome) == []
    talk.fires(60.0)
    talk.persisted(60.1)
    assert [learner for learner, _ in talk.bodies(Welcome)] == [1]


def test_hello_during_a_write_waits_for_the_next_record():
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.voice(1).hello(1.0)
    talk.voice(2).hello(1.0)
    talk.persisted(1.1)
    assert [learner for learner, _ in talk.bodies(Welcome)] == [1]
    assert talk.one(Persist).record == MembersRecord(2, ((1, 1), (2, 1)), left=(), retired_tokens=0)
    talk.persisted(1.2)
    assert [learner for learner, _ in talk.bodies(Welcome)] == [2]


def test_lost_welcome_is_repeated_after_the_next_hello():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.hello(1.0)
    talk.persisted(1.1)
    one.hello(5.0, received=(NO_VERSION,))
    assert [learner for learner, _ in talk.bodies(Welcome)] == [1]
    assert [learner for learner, _ in talk.bodies(Published)] == [1]


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
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, fingerprint=MODEL))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    before = talk.core.view()._replace(ignored={})
    two = talk.voice(2)
    two.hello(1.5, fingerprint=theirs)
    talk.expect(talk.to(2, Refuse(because("refused-fingerprint", difference), 0, True)))
    assert talk.core.view()._replace(ignored={}) == before
    one.contributes(1.6)
    assert talk.one(MergeRound).contributions[0].learner == 1


def test_another_number_of_fragments_is_another_model():
    talk = SyncerTalk(RunConfig(fragments=2))
    one = talk.voice(1)
    one.hello(1.0, received=(0,))
    talk.expect(talk.to(1, Refuse(because("refused-fingerprint", "1 fragments where the run has 2"), 0, True)))


def test_a_learner_of_another_run_is_refused():
    talk = SyncerTalk(RunConfig(run_id="night", fragments=1))
    talk.voice(1).hello(1.0, run_id="day")
    talk.expect(talk.to(1, Refuse(because("refused-run", "night", "day"), 0, True)))


@pytest.mark.parametrize("learner", [0, -1])
def test_learners_are_numbered_from_1(learner):
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.voice(learner).hello(1.0)
    talk.expect(talk.to(learner, Refuse(because("refused-id", learner), 0, True)))


def test_finally_refused_learner_stops_with_the_reason():
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.1)
    talk.receives(0.2, Refuse(because("refused-run", "night", "day"), 0, True))
    talk.expect(
        Stop(because("learner-refused", "different run: this syncer serves 'night', the learner was started for 'day'"))
    )
    assert not talk.core.training


# --------------------------------------------------------------------------------------------------------------------
# Incarnations


def test_every_start_is_a_new_incarnation_and_answers_of_an_older_one_are_ignored():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    old = talk.joined(1)
    old.reports(1.0, step=1)
    new = talk.voice(1, incarnation=2)
    new.hello(2.0)
    assert talk.codes()[0] == "member-superseded"
    old.contributes(2.1)
    talk.expect()
    old.reports(2.2, step=2)
    talk.expect()
    assert talk.core.view().ignored == {"stale-incarnation": 2}


def test_hello_of_an_older_incarnation_is_refused_with_the_current_one():
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.joined(1, incarnation=3)
    old = talk.voice(1, incarnation=2)
    old.hello(2.0)
    talk.expect(talk.to(1, Refuse(because("refused-incarnation", 2, 3), 3, True)))


def test_a_refused_incarnation_remembers_which_one_is_current_so_that_its_driver_can_take_a_higher_one():
    talk = LearnerTalk(RunConfig(fragments=1), incarnation=2)
    talk.opens(0.1)
    talk.receives(0.2, Refuse(because("refused-incarnation", 2, 7), 7, True))
    assert talk.one(Stop).reason.code == "learner-refused"
    assert talk.core.state.refused_incarnation == 7


def test_contribution_of_a_replaced_incarnation_stays_in_its_round():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=2))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(1.0, step=1)
    two.reports(1.0, step=1)
    one.contributes(1.1)
    talk.voice(1, incarnation=2).hello(1.2)
    two.contributes(1.3)
    assert [(a.learner, a.incarnation) for a in talk.one(MergeRound).contributions] == [(1, 1), (2, 1)]
    talk.merged(1.4)
    talk.persisted(1.5, "VersionRecord")
    line = talk.core.view().ledger[0]
    assert (line.merged, sum(line.dropped.values())) == (200, 0)


def test_tokens_of_a_replaced_incarnation_that_were_not_merged_are_dropped_with_the_reason():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=9))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    talk.voice(1, incarnation=2).hello(1.2)
    line = talk.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending) == (100, 0, 0)
    assert line.dropped == {"superseded": 100}


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state from a peer


def _with_a_peer() -> SyncerTalk:
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.acknowledges(1.3)
    return talk


def test_optimizer_state_comes_from_a_peer_with_at_least_the_same_versions():
    talk = _with_a_peer()
    two = talk.voice(2)
    two.hello(2.0)
    talk.persisted(2.1)
    two.delivers(2.2, StateRequest(()))
    talk.expect(
        _says("learner", 2, "peer-chosen", 1, 2),
        talk.to(2, PeerChosen(1)),
        talk.to(1, ProvideState(2, 1, (1,))),
    )
    state = OptimizerState(1, 2, 1, step=3, versions=(1,))
    talk.voices[1].delivers(3.0, state)
    talk.expect(talk.to(2, state))


def test_peer_trains_on_and_sends_its_state_once_it_has_adopted_those_versions():
    peer = LearnerTalk(RunConfig(fragments=1)).trains()
    peer.receives(0.5, ProvideState(2, 1, (1,)))
    peer.expect()
    peer.steps(1.0)
    assert peer.bodies(OptimizerState) == [], "version 1 is not here yet"
    peer.gets(1.5, 0, 1, base=0)
    peer.steps(2.0)
    peer.expect(
        peer.sends(Report(2, 200, 1.0)),
        AdoptFragment(0, 1, "carry", False, 0, 0, 200),
        peer.sends(OptimizerState(1, 2, 1, step=2, versions=(1,))),
    )


def test_the_peer_that_lags_least_behind_is_chosen_then_the_lowest_id():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    for voice in (one, two, three):
        voice.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    three.acknowledges(1.3)
    two.acknowledges(1.3)
    four = talk.voice(4)
    four.hello(2.0)
    talk.persisted(2.1)
    four.delivers(2.2, StateRequest(()))
    assert talk.bodies(PeerChosen) == [(4, PeerChosen(2))]
    four.delivers(2.3, StateRequest((2,)))
    assert talk.bodies(PeerChosen) == [(4, PeerChosen(3))]


def test_updates_that_arrive_while_joining_are_buffered_and_replayed():
    talk = LearnerTalk(RunConfig(fragments=2))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4, 6), step_time_s=1.0)
    assert talk.bodies(StateRequest) == [(1, StateRequest(()))]
    talk.gets(0.2, 0, 4)
    talk.gets(0.3, 1, 6)
    talk.gets(0.4, 0, 5, base=4)
    talk.expect(talk.sends(PublishAck(0, 5)))
    assert not talk.core.training
    talk.receives(0.5, PeerChosen(3))
    talk.receives(2.0, OptimizerState(3, 1, 1, step=90, versions=(5, 6)))
    talk.expect(
        AdoptFragment(0, 5, "overwrite", False, 0, 0, 0),
        AdoptFragment(1, 6, "overwrite", False, 0, 0, 0),
        StartTraining(because("state-from-peer", 3), 0),
        talk.sends(Ready(because("state-from-peer", 3))),
    )
    assert talk.core.training


def test_training_starts_only_when_every_fragment_is_here():
    talk = LearnerTalk(RunConfig(fragments=2))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4, 6))
    talk.receives(0.2, OptimizerState(3, 1, 1, step=90, versions=(4, 6)))
    talk.gets(0.3, 0, 4)
    assert talk.of(StartTraining) == []
    talk.gets(0.4, 1, 5)
    assert talk.of(StartTraining) == [], "version 6 was published when we were welcomed"
    talk.gets(0.5, 1, 6)
    assert talk.one(StartTraining).warmup_steps == 0


def test_learner_without_a_peer_starts_with_fresh_optimizer_state_and_warm_up():
    talk = LearnerTalk(RunConfig(fragments=1, warmup_steps=50))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4,))
    talk.gets(0.2, 0, 4)
    talk.receives(0.3, NoPeer(because("peer-none"), False))
    moments = because("state-fresh", 50, "no healthy learner can send optimizer state")
    talk.expect(
        AdoptFragment(0, 4, "overwrite", False, 0, 0, 0),
        StartTraining(moments, 50),
        talk.sends(Ready(moments)),
    )
    assert (
        talk.core.view().reason
        == "fresh optimizer state, 50 warm-up steps: no healthy learner can send optimizer state"
    )


@pytest.mark.parametrize("answer", [NoPeer(because("peer-none"), False), NoPeer(because("peer-new-run"), True)])
def test_learner_without_a_peer_starts_from_its_saved_part(answer):
    talk = LearnerTalk(RunConfig(fragments=1, warmup_steps=50))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4,))
    talk.gets(0.2, 0, 4)
    talk.handle(0.3, SavedStateFound(2, 1_000_004))
    assert talk.of(StartTraining) == [], "a peer's are newer: they are waited for"
    talk.receives(0.4, answer)
    moments = because("state-from-snapshot", 2, 1_000_004)
    talk.expect(
        AdoptFragment(0, 4, "overwrite", False, 0, 0, 0),
        StartTraining(moments, 0),
        talk.sends(Ready(moments)),
    )
    assert talk.core.view().reason == "optimizer state that learner 2 saved in snapshot 1000004"


def test_a_peer_goes_before_a_saved_part():
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    talk.welcomed(0.1, versions=(4,))
    talk.gets(0.2, 0, 4)
    talk.handle(0.3, SavedStateFound(1, 1_000_004))
    talk.receives(0.4, OptimizerState(3, 1, 1, step=90, versions=(4,)))
    assert talk.one(StartTraining) == StartTraining(because("state-from-peer", 3), 0)


def test_new_run_has_no_optimizer_state_and_no_warm_up():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.hello(1.0)
    talk.persisted(1.0)
    one.delivers(1.1, StateRequest(()))
    talk.expect(talk.to(1, NoPeer(because("peer-new-run"), True)))


def test_no_peer_is_sent_to_a_single_learner_after_the_first_merge():
    talk = _with_a_peer()
    talk.handle(1.5, LearnerDisconnected(1, 1, 1, "power"))
    two = talk.voice(2)
    two.hello(2.0)
    talk.persisted(2.1)
    two.delivers(2.2, StateRequest(()))
    talk.expect(talk.to(2, NoPeer(because("peer-none"), False)))


def test_next_peer_is_tried_after_h_steps_of_the_run():
    talk = LearnerTalk(RunConfig(fragments=1, every_steps=10))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(4,), step_time_s=2.0)
    talk.receives(0.1, PeerChosen(3))
    talk.fires(19.9)
    assert talk.bodies(StateRequest) == []
    talk.fires(20.0)
    assert talk.bodies(StateRequest) == [(1, StateRequest((3,)))]
    assert talk.codes() == ["state-timeout"]


def test_next_peer_is_tried_immediately_after_a_rejection():
    talk = LearnerTalk(RunConfig(fragments=1, warmup_steps=50, limits=Limits(max_state_peers=2)))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(4,), step_time_s=2.0)
    talk.gets(0.1, 0, 4)
    talk.receives(0.1, PeerChosen(3))
    talk.handle(0.2, StateRejected(3, "out of memory"))
    assert talk.codes() == ["state-rejected"]
    assert talk.bodies(StateRequest) == [(1, StateRequest((3,)))]
    talk.receives(0.3, PeerChosen(5))
    talk.handle(
        0.4, StateRejected(3, "out of memory")
    )  # a second answer of the first peer: the other one is waited for
    talk.expect()
    talk.handle(0.5, StateRejected(5, "the optimizer state is of SGD"))
    moments = because("state-fresh", 50, "requested optimizer state from 2 learners, received none")
    assert talk.one(StartTraining) == StartTraining(moments, 50)
    talk.handle(0.6, StateRejected(6, "too late"))
    talk.expect()


def test_rejected_state_is_followed_by_saved_state():
    talk = LearnerTalk(RunConfig(fragments=1, limits=Limits(max_state_peers=1)))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(4,))
    talk.gets(0.1, 0, 4)
    talk.handle(0.2, SavedStateFound(1, 1_000_004))
    talk.handle(0.3, StateRejected(3, "out of memory"))
    assert talk.one(StartTraining) == StartTraining(because("state-from-snapshot", 1, 1_000_004), 0)


def test_next_peer_is_tried_after_the_welcome_if_state_is_rejected_while_disconnected():
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(4,))
    talk.receives(0.1, PeerChosen(3))
    talk.handle(0.2, ConnectionClosed(1, "power"))
    talk.handle(0.3, StateRejected(3, "out of memory"))
    assert talk.bodies(StateRequest) == []
    talk.opens(0.4)
    talk.welcomed(0.5, versions=(4,))
    assert talk.bodies(StateRequest) == [(1, StateRequest((3,)))]


def test_joining_learner_is_neither_pulled_nor_counted():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    talk.voice(1).hello(0.0)
    talk.persisted(0.1)
    assert talk.core.view().alive == 0
    assert talk.fragment(0).reason == "0 of 1 learners have taken 1 steps since the last round"


# --------------------------------------------------------------------------------------------------------------------
# Leaving, silence, coming back


def test_leaving_learner_sends_left_and_is_not_awaited():
    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.handle(1.0, LeaveRequested("the operator said so"))
    learner.expect(learner.sends(Left("the operator said so")), Stop(because("learner-left", "the operator said so")))

    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=1))
    one, two = talk.joined(1), talk.joined(2)
    one.reports(0.5, step=1)
    one.contributes(0.6)
    talk.merges_and_persists(0.7)
    two.reports(1.8, step=2)
    one.reports(2.0, step=3)
    assert len(talk.bodies(Pull)) == 2
    one.delivers(2.2, Left("the operator said so"))
    assert talk.member(1).state == "left"
    assert talk.fragment(0).waiting_for == (2,)
    two.contributes(2.3)
    assert [a.learner for a in talk.one(MergeRound).contributions] == [2]


def test_a_learner_that_has_left_is_not_waited_for_after_a_restart_and_may_start_again():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.delivers(1.1, Left("the operator said so"))
    talk.persisted(1.2)
    again = talk.restarted()
    assert again.member(1).state == "left"
    assert again.core.view().ledger[0].dropped == {"before-restart": 100}
    again.voice(1, session=2).hello(2.0, training=True)
    again.expect()
    again.joined(1, at=3.0, incarnation=2)
    assert again.member(1).state == "live"


def test_silent_learner_is_suspected_then_disconnected_and_a_message_recovers_it():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=99))
    one, two = talk.joined(1), talk.joined(2)
    for step in range(1, 8):
        one.reports(float(step), step)
        two.reports(float(step), step)
    now = 7.0
    while talk.member(1).state == "live":
        now += 1.0
        two.reports(now, int(now))
        assert now < 600, "silence is not noticed; the story is printed above"
    assert talk.member(1).state == "suspect"
    assert talk.core.view().alive == 1
    one.reports(now + 0.5, step=8)
    assert talk.codes()[0] == "member-recovered"
    assert talk.member(1).state == "live"
    while talk.member(1).state != "disconnected":
        now += 1.0
        two.reports(now, int(now))
        assert now < 20_000, "a lost learner is never given up; the story is printed above"
    assert talk.one(CloseConnection).reason.code == "member-timed-out"


def test_rounds_do_not_wait_for_a_suspected_learner():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=99, quorum=2))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    for step in range(1, 6):
        for voice in (three, two, one):
            voice.reports(float(step), step)
    assert set(talk.fragment(0).waiting_for) == {1, 2, 3}
    now = 6.0
    while talk.member(2).state == "live":
        three.reports(now, int(now))
        one.reports(now, int(now))
        now += 1.0
        assert now < 600
    assert 2 not in talk.fragment(0).waiting_for


def test_learner_reconnects_and_keeps_its_progress():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.steps(1.0)
    talk.handle(1.5, ConnectionClosed(1, "connection reset by peer"))
    assert talk.one(Dial).attempt == 1
    talk.steps(2.0)
    talk.opens(2.5)
    talk.expect(talk.sends(Hello("run", (), (0,), 2, 200, True)))
    talk.welcomed(2.6)
    talk.expect(_says("learner", 1, "connection-up"))
    talk.steps(3.0)
    talk.expect(talk.sends(Report(3, 300, 1.0)))


def test_a_learner_that_resumes_gets_what_it_missed():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one, two = talk.joined(1), talk.joined(2)
    talk.handle(0.5, LearnerDisconnected(2, 1, 1, "connection reset by peer"))
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    assert [learner for learner, _ in talk.bodies(Published)] == [1], "nothing is sent into a closed link"
    two.session = 2
    two.hello(2.0, training=True)
    talk.expect(
        _says("learner", 2, "member-resumed", 1),
        talk.to(2, Welcome((1,), 0.0, 1.0)),
        talk.to(2, Published(0, 1, 0, None, 0.0)),
    )


def test_messages_of_an_older_link_are_dropped():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.joined(1)
    one.session = 2
    one.hello(1.0, training=True)
    one.delivers(1.1, Report(5, 500, 1.0), session=1)
    talk.expect()
    assert talk.member(1).step == 0
    talk.handle(1.2, LearnerDisconnected(1, 1, 1, "the old link"))
    assert talk.member(1).state == "live", "the end of a link that was replaced is no loss"

    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    learner.handle(1.0, ConnectionClosed(1, "reset"))
    learner.opens(2.0)
    learner.welcomed(2.1)
    learner.gets(2.2, 0, 1, base=0)
    assert learner.of(Send) != []
    learner.receives(2.3, Pull(RoundId(0, 1, 1, 1)), session=1)
    learner.steps(3.0)
    assert learner.bodies(Contribution) == []


def test_joining_or_dying_never_changes_any_other_learners_steps():
    """The other learner receives no message about a join, a loss or a fresh start."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=99))
    talk.joined(1)
    told: list[int] = []
    for event in ("join", "loss", "again"):
        if event == "loss":
            talk.handle(2.0, LearnerDisconnected(2, 1, 1, "power"))
        else:
            talk.joined(2, at=1.0 if event == "join" else 3.0, incarnation=1 if event == "join" else 2)
        told += [effect.envelope.learner for effect in talk.of(Send)]
    assert 1 not in told


def test_suspected_learner_that_recovers_in_time_is_still_in_the_round():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=99, quorum=2))
    one, two, three = (talk.joined(i) for i in (1, 2, 3))
    for step in range(1, 6):
        for voice in (three, two, one):
            voice.reports(float(step), step)
    assert {voice.id for voice in (one, two, three) if 0 in voice.pulls} == {1, 2, 3}
    three.contributes(5.1)
    now = 6.0
    while talk.member(2).state == "live":
        three.reports(now, int(now))
        one.reports(now, int(now))
        now += 1.0
        assert now < 600
    assert talk.fragment(0).phase == "pulling"
    two.contributes(now)
    assert [effect.contribution.learner for effect in talk.of(Accumulate)] == [2]
    assert talk.one(MergeRound).round == two.pulls[0]


def test_an_envelope_of_a_stranger_is_ignored():
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.joined(1)
    talk.handle(1.0, MessageArrived(Envelope(9, 1, 1, 1, 1, 0, 0, Report(5, 500, 1.0))))
    talk.expect()
    assert talk.core.view().trained == 0
