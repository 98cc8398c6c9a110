"""Difficult interleavings, each with the numbered list of events that fails."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    AdoptFragment,
    ConnectionClosed,
    Finish,
    FinishRequested,
    Halt,
    LearnerDisconnected,
    Left,
    Marker,
    MergeRound,
    OptimizerState,
    Persist,
    Pong,
    ProvideState,
    Pull,
    Refuse,
    SnapshotPart,
    SnapshotRequested,
    Stop,
    TimerFired,
    VersionRecord,
)
from atoll.core.reasons import because
from atoll.core.types import RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk

FIRST = RoundId(0, 0, 1, 1)
SNAPSHOT = 1_000_001


# --------------------------------------------------------------------------------------------------------------------
# Links


def test_a_refusal_that_arrives_twice_is_one_refusal():
    """(1) The run is full and says so, (2) the learner hangs up and dials, (3) the same refusal arrives once more."""
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    full = Refuse(because("refused-full", 1024), 0, False)
    talk.receives(0.1, full)
    talk.receives(0.2, full)
    talk.expect()


@pytest.mark.parametrize(
    "body",
    [Finish((0,), 1), Refuse(because("refused-full", 3), 0, False), Refuse(because("refused-run", 1, 2), 0, True)],
)
def test_message_of_a_closed_connection_is_ignored(body):
    """(1) Something is on its way to the learner, (2) the link closes, (3) the learner dials, (4) it arrives."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.handle(1.0, ConnectionClosed(1, "connection reset by peer"))
    talk.receives(1.1, body)
    talk.expect()
    assert talk.core.training


def test_the_end_that_arrives_before_any_welcome_is_not_the_end_of_the_process():
    """(1) The welcome is lost, (2) the run ends, (3) `Finish` is sent to all joining learners."""
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    talk.receives(1.0, Finish((3,), 3))
    talk.expect()


def test_a_learner_of_another_run_with_a_later_epoch_does_not_stop_this_syncer():
    """(1) A learner of run B, which has met epoch 7 of its own syncer, is given the address of run A by mistake, (2) it
    says hello with epoch 7 to the syncer of run A, which is in epoch 1."""
    talk = SyncerTalk(RunConfig(fragments=1, run_id="A"))
    talk.joined(1)
    stranger = talk.voice(2)
    stranger.epoch = 7
    stranger.hello(1.0, run_id="B")
    assert talk.of(Halt) == []
    assert talk.codes() == ["refused-run"]


def test_duplicate_pong_is_not_measured():
    """(1) A ping is answered within 0.1 s, (2) much later the answer arrives once more."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    while not talk.core.state.pings:
        talk.fires(talk.core.next_deadline())
    talk.receives(talk.now + 0.1, Pong(1))
    before = talk.core.state.round_trip.mean
    talk.receives(talk.now + 500.0, Pong(1))
    assert talk.core.state.round_trip.mean == before


# --------------------------------------------------------------------------------------------------------------------
# Rounds


@pytest.mark.parametrize("rounds_in_flight", [1, 4])
def test_the_limit_of_rounds_in_flight_holds_from_the_first_round_on(rounds_in_flight):
    """(1) A learner joins, (2) its first report makes several fragments due, (3) nothing was ever published."""
    talk = SyncerTalk(RunConfig(fragments=6, every_steps=6, overlap_steps=2, rounds_in_flight=rounds_in_flight))
    talk.joined(1).reports(1.0, step=6)
    assert talk.core.view().rounds_in_flight == rounds_in_flight


def test_the_order_in_which_owned_fragments_are_named_does_not_matter():
    """(1) A syncer owns fragments 1 and 0, named in this order, (2) fragment 0 is due after one step, 1 after five."""
    talk = SyncerTalk(RunConfig(fragments=2, every_steps=8, owned_fragments=(1, 0)))
    talk.joined(1).reports(1.0, step=1)
    assert [body.round.fragment for _, body in talk.bodies(Pull)] == [0]


@pytest.mark.parametrize("steps_per_link", [5, 10])
def test_rounds_go_on_although_every_link_breaks_before_the_largest_offset(steps_per_link):
    """(1) A learner reports a few steps, (2) its link breaks and it is back, as the same incarnation, (3) again.
    It has H steps on every fragment again and again, and is connected nearly all the time."""
    talk = SyncerTalk(RunConfig(fragments=4, every_steps=24))
    one = talk.joined(1)
    for step in range(1, 200):
        one.reports(float(step), step)
        for p in list(one.pulls):
            one.contributes(step + 0.1, p)
            del one.pulls[p]
        while talk.awaited:
            talk.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.2)
        if step % steps_per_link == 0:
            talk.handle(step + 0.3, LearnerDisconnected(1, 1, one.session, "connection reset by peer"))
            one.session += 1
            one.hello(step + 0.4, training=True)
    assert min(f.version for f in talk.core.view().fragments) >= 4


@pytest.mark.parametrize("tokens", [10**200, 2**1024], ids=["its square is", "it is"])
def test_counters_beyond_every_float_are_refused(tokens):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, tokens=tokens, trained=tokens)
    assert talk.codes() == ["contribution-implausible"]


def test_dropped_tokens_are_not_negative():
    """A negative count would make room for tokens that were never trained."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, dropped=-100)
    assert talk.codes() == ["contribution-implausible"]


# --------------------------------------------------------------------------------------------------------------------
# Ledgers


def test_contribution_with_lost_report_and_replaced_incarnation_keeps_the_ledger_balanced():
    """(1) The report of step 2 is lost, (2) the contribution of step 2 is accepted, (3) a new incarnation says hello,
    (4) the version becomes durable."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.step, one.trained = 2, 200
    one.contributes(1.1)
    talk.voice(1, incarnation=2).hello(1.2)
    talk.merged(1.3)
    talk.persisted(1.4, "VersionRecord")
    line = talk.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending) == (200, 200, 0)


def test_a_late_merge_is_booked_where_its_own_incarnation_was_written_off():
    """(1) Incarnation 1 contributes, (2) it is replaced by 2, (3) which leaves at once, (4) the version is durable: the
    tokens come back from those that were replaced, not from those that left."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    two = talk.voice(1, incarnation=2)
    two.hello(1.2)
    talk.persisted(1.2, "MembersRecord")
    two.delivers(1.3, Left("the operator said so"))
    talk.merged(1.4)
    talk.persisted(1.5, "VersionRecord")
    line = talk.core.view().ledger[0]
    assert all(tokens >= 0 for tokens in line.dropped.values()), line


def test_tokens_of_a_learner_that_left_are_counted_once_after_a_restart():
    """(1) A learner trains 100 tokens, which are merged, (2) it leaves, (3) the syncer is restarted."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    talk.merges_and_persists(1.2)
    one.delivers(1.3, Left("the operator said so"))
    talk.persisted(1.4)
    before = talk.core.view()
    after = talk.restarted().core.view()
    assert after.trained == before.trained == 100
    assert after.ledger[0].merged == before.ledger[0].merged == 100


def test_the_tokens_of_a_contribution_are_in_the_retired_ones_when_its_incarnation_is_replaced_and_the_syncer_dies():
    """(1) The report of step 2 is lost, (2) its contribution is accepted, (3) a new incarnation is admitted, durably,
    (4) the version is durable and durability_unknown, (5) the syncer is restarted."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.step, one.trained = 2, 200
    one.contributes(1.1)
    talk.voice(1, incarnation=2).hello(1.2)
    talk.persisted(1.3, "MembersRecord")
    talk.merged(1.4)
    talk.written_without_reply()
    line = talk.restarted().core.view().ledger[0]
    assert all(tokens >= 0 for tokens in line.dropped.values()), line
    assert (line.trained, line.merged) == (200, 200)


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state


def test_peer_without_a_reply_is_not_chosen_again_while_there_is_another():
    """(1) Learner 1 is live and never gives its state, (2) learner 3 joins and learner 1 is chosen, (3) time is up."""
    syncer = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    for i in (1, 2):
        syncer.joined(i)
    for i in (1, 2):
        syncer.voices[i].reports(1.0, step=1)
    three = syncer.voice(3)
    three.hello(2.0)
    syncer.persisted(2.1)
    learner = LearnerTalk(RunConfig(fragments=1), learner=3)
    learner.opens(2.0)
    learner.welcomed(2.1, step_time_s=1.0)
    asked = []
    for _ in range(2):
        request = next(e.envelope.body for e in learner.effects if hasattr(e, "envelope"))
        three.delivers(learner.now + 0.1, request)
        for effect in syncer.effects:
            if hasattr(effect, "envelope") and effect.envelope.learner == 3:
                learner.receives(learner.now + 0.2, effect.envelope.body)
            elif hasattr(effect, "envelope") and isinstance(effect.envelope.body, ProvideState):
                asked.append(effect.envelope.learner)
        while not any(hasattr(e, "envelope") for e in learner.effects):
            learner.fires(learner.core.next_deadline())
    assert asked == [1, 2]


def test_a_joining_learner_whose_link_breaks_again_and_again_starts_all_the_same():
    """(1) It requests optimizer state, (2) the link breaks before the timeout, (3) it is welcomed and repeats it."""
    talk = LearnerTalk(RunConfig(fragments=1, every_steps=10))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(1,), step_time_s=1.0)
    talk.gets(0.1, 0, 1)
    for n in range(1, 30):
        talk.fires(9.0 * n)
        talk.handle(9.0 * n, ConnectionClosed(talk.session, "connection reset by peer"))
        talk.opens(9.0 * n + 0.1)
        talk.welcomed(9.0 * n + 0.2, versions=(1,), step_time_s=1.0)
    assert talk.core.training, "three peers and H = 10 steps of 1 s each are over long ago"


def test_late_optimizer_state_is_used():
    """(1) Peer 4 is chosen, (2) it is late and peer 5 is chosen, (3) the state of 4 arrives."""
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.opens(0.0)
    talk.welcomed(0.0, versions=(2,), step_time_s=1.0)
    talk.gets(0.1, 0, 2)
    while "state-timeout" not in talk.codes():
        talk.fires(talk.core.next_deadline())
    talk.receives(talk.now + 0.1, OptimizerState(4, 1, 1, 9, (2,)))
    assert talk.core.training


# --------------------------------------------------------------------------------------------------------------------
# Snapshots


def test_a_part_is_not_sent_before_it_is_saved():
    """(1) A learner begins to save its part, (2) the marker arrives once more, (3) saving fails: a part that was sent
    after (2) would be in the snapshot and exist nowhere."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.marker = 7
    talk.receives(0.5, Marker(7))
    talk.steps(1.0)
    talk.receives(1.1, Marker(7))
    talk.expect()
    talk.save_failed(1.2)
    assert talk.bodies(SnapshotPart)[0][1].problem == "no space left on device"


def test_a_contribution_that_is_overtaken_by_the_next_one_still_completes_the_part():
    """(1) The part of learner 1 names contribution A as outstanding, (2) A arrives, is merged and published, (3) the
    next round is contributed to, (4) only then is the part saved and sent: all that it waits for has arrived."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=1, quorum=1))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    first = one.pulls[0]
    talk.handle(1.1, SnapshotRequested())
    one.contributes(1.2)
    talk.merges_and_persists(1.3)
    one.acknowledges(1.4)
    one.marker = SNAPSHOT
    one.reports(2.0, step=3)
    one.contributes(2.1)
    assert talk.of(MergeRound) != []
    one.delivers(2.2, SnapshotPart(SNAPSHOT, 2, 200, (0,), (first,)))
    assert [type(e.record).__name__ for e in talk.of(Persist)] == ["SnapshotRecord"]


# --------------------------------------------------------------------------------------------------------------------
# Silence and the end


def test_stall_right_after_a_message_excuses_silence():
    """(1) A learner reports every second until 7.0, (2) the syncer stalls from 7.1 on, (3) its next timer was due
    at 30, (4) it goes on at 1,000: between 7 and 30 it received nothing because it stalled."""
    talk = SyncerTalk(RunConfig(fragments=1, quorum=2))
    one = talk.joined(1)
    for step in range(1, 8):
        one.reports(float(step), step)
    talk.handle(1_000.0, TimerFired())
    assert talk.member(1).state == "live"


def _finished(learners: int = 1) -> SyncerTalk:
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, quorum=4))
    for i in range(1, learners + 1):
        talk.joined(i)
    talk.handle(1.0, FinishRequested())
    while not talk.of(Persist):
        for voice in talk.voices.values():
            voice.reports(talk.now + 1.0, voice.step + 1)
            if talk.of(Persist):
                break
    talk.persisted(talk.now)
    return talk


def test_restarted_finished_syncer_ends_without_learners():
    """(1) The manifest is durable, (2) the syncer is killed before it sends `Finish`, (3) all learners are dead."""
    again = _finished().restarted()
    halted = [e for e in again.done if isinstance(e, Halt)]
    halted += [e for e in again.fires(100_000.0) if isinstance(e, Halt)]
    assert len(halted) == 1


def test_thousand_reconnections_after_the_end_are_harmless():
    """A link that works in one direction only: each hello arrives, no answer does."""
    talk = _finished()
    for session in range(2, 1_100):
        voice = talk.voice(1, 1, session)
        voice.received[0] = 0
        voice.hello(talk.now + 30.0, training=True)
    assert talk.bodies(Finish) != []


def test_reconnection_after_the_end_does_not_shorten_timeouts_of_others():
    """(1) `Finish` is sent to learners 1 and 2, (2) learner 2 comes back five times within a second, (3) learner 1 is
    sent it again no sooner than before."""
    quiet, busy = _finished(2), _finished(2)
    times: list[list[float]] = []
    for talk in (quiet, busy):
        start = talk.now
        if talk is busy:
            for n in range(5):
                talk.voices[2].session += 1
                talk.voices[2].hello(start + 0.01 * n, training=True)
        told: list[float] = []
        while (deadline := talk.core.next_deadline()) is not None and deadline < start + 5_000 and len(told) < 3:
            talk.fires(deadline)
            told += [round(talk.now - start, 6) for learner, _ in talk.bodies(Finish) if learner == 1]
        times.append(told)
    assert times[1] == times[0]


def test_timers_of_replaced_incarnations_end():
    """Every start of a learner arms a timer for its silence; those of its predecessors must not go on for ever."""
    talk = SyncerTalk(RunConfig(fragments=1, quorum=2))
    for incarnation in range(1, 30):
        one = talk.joined(1, at=float(incarnation), incarnation=incarnation)
    for step in range(1, 300):
        one.reports(30.0 + step, step)
    armed = sum(1 for _, _, kind, key in talk.core.state.timers if (kind, key) == ("silence", 1))
    assert armed <= 2


def test_a_request_to_finish_is_not_a_reason_to_stop_twice():
    """(1) The end arrives, (2) the learner has every final version and stops, (3) the end arrives again."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(1.0, Finish((0,), 0))
    assert len(talk.of(Stop)) == 1
    talk.receives(1.1, Finish((0,), 0))
    assert talk.of(Stop) == []


def test_a_version_that_arrives_with_the_end_is_adopted_before_the_stop():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.gets(0.5, 0, 1, base=0)
    talk.receives(0.6, Finish((1,), 1))
    assert [type(e).__name__ for e in talk.effects if not hasattr(e, "envelope")] == ["AdoptFragment", "Stop"]
    assert talk.one(AdoptFragment).version == 1


def test_failed_record_is_retried_with_newer_changes():
    """(1) An admission cannot be written, (2) another learner says hello, (3) both are in the next record."""
    talk = SyncerTalk(RunConfig(fragments=1))
    talk.voice(1).hello(1.0)
    talk.persist_failed(1.1)
    talk.voice(2).hello(1.2)
    record = talk.one(Persist).record
    assert not isinstance(record, VersionRecord)
    assert [learner for learner, _ in record.incarnations] == [1, 2]  # type: ignore[union-attr]
