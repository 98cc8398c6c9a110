"""Difficult interleavings, each with the numbered list of events that once failed."""

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
from tests.core.harness import LearnerHarness, SyncerHarness

FIRST = RoundId(0, 0, 1, 1)
SNAPSHOT = 1_000_001


# --------------------------------------------------------------------------------------------------------------------
# Links


def test_duplicate_refusal_has_no_effect():
    """(1) The run is full and refuses, (2) the learner disconnects and dials, (3) the same refusal arrives again."""
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    full = Refuse(because("refused-full", 1024), 0, False)
    harness.receives(0.1, full)
    harness.receives(0.2, full)
    harness.expect()


@pytest.mark.parametrize(
    "body",
    [Finish((0,), 1), Refuse(because("refused-full", 3), 0, False), Refuse(because("refused-run", 1, 2), 0, True)],
)
def test_message_of_a_closed_connection_is_ignored(body):
    """(1) A message is in flight to the learner, (2) the link closes, (3) the learner dials, (4) it arrives."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.handle(1.0, ConnectionClosed(1, "connection reset by peer"))
    harness.receives(1.1, body)
    harness.expect()
    assert harness.core.training


def test_finish_before_the_welcome_does_not_stop_the_learner():
    """(1) The welcome is lost, (2) the run ends, (3) `Finish` is sent to all joining learners."""
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    harness.receives(1.0, Finish((3,), 3))
    harness.expect()


def test_learner_of_another_run_with_a_later_epoch_does_not_stop_this_syncer():
    """(1) A learner of run B, whose syncer has epoch 7, gets the address of run A by mistake, (2) it sends a hello with
    epoch 7 to the syncer of run A, which has epoch 1."""
    harness = SyncerHarness(RunConfig(fragments=1, run_id="A"))
    harness.joined(1)
    foreign = harness.add_learner(2)
    foreign.epoch = 7
    foreign.hello(1.0, run_id="B")
    assert harness.of(Halt) == []
    assert harness.codes() == ["refused-run"]


def test_duplicate_pong_is_not_measured():
    """(1) A ping is answered within 0.1 s, (2) a duplicate of the reply arrives much later."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    while not harness.core.state.pings:
        harness.fire_timers(harness.core.next_deadline())
    harness.receives(harness.now + 0.1, Pong(1))
    before = harness.core.state.round_trip.mean
    harness.receives(harness.now + 500.0, Pong(1))
    assert harness.core.state.round_trip.mean == before


# --------------------------------------------------------------------------------------------------------------------
# Rounds


@pytest.mark.parametrize("rounds_in_flight", [1, 4])
def test_limit_of_rounds_in_flight_applies_to_the_first_rounds(rounds_in_flight):
    """(1) A learner joins, (2) its first report makes several fragments due, (3) no version is published yet."""
    harness = SyncerHarness(RunConfig(fragments=6, every_steps=6, overlap_steps=2, rounds_in_flight=rounds_in_flight))
    harness.joined(1).reports(1.0, step=6)
    assert harness.core.view().rounds_in_flight == rounds_in_flight


def test_order_in_which_owned_fragments_are_named_does_not_matter():
    """(1) A syncer owns fragments 1 and 0, named in this order, (2) fragment 0 is due after one step, 1 after five."""
    harness = SyncerHarness(RunConfig(fragments=2, every_steps=8, owned_fragments=(1, 0)))
    harness.joined(1).reports(1.0, step=1)
    assert [body.round.fragment for _, body in harness.bodies(Pull)] == [0]


@pytest.mark.parametrize("steps_per_link", [5, 10])
def test_rounds_continue_if_every_connection_breaks_before_the_largest_offset(steps_per_link):
    """(1) A learner reports a few steps, (2) it disconnects and reconnects as the same incarnation, (3) and so
    on. It takes H steps on every fragment repeatedly and is connected nearly all the time."""
    harness = SyncerHarness(RunConfig(fragments=4, every_steps=24))
    one = harness.joined(1)
    for step in range(1, 200):
        one.reports(float(step), step)
        for p in list(one.pulls):
            one.contributes(step + 0.1, p)
            del one.pulls[p]
        while harness.awaited:
            harness.merges_and_persists(step + 0.2)
            one.acknowledges(step + 0.2)
        if step % steps_per_link == 0:
            harness.handle(step + 0.3, LearnerDisconnected(1, 1, one.session, "connection reset by peer"))
            one.session += 1
            one.hello(step + 0.4, training=True)
    assert min(f.version for f in harness.core.view().fragments) >= 4


@pytest.mark.parametrize("tokens", [10**200, 2**1024], ids=["square overflows", "value overflows"])
def test_counters_beyond_every_float_are_refused(tokens):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, tokens=tokens, trained=tokens)
    assert harness.codes() == ["contribution-implausible"]


def test_dropped_tokens_are_not_negative():
    """A negative count would allow tokens that were never trained."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1, dropped=-100)
    assert harness.codes() == ["contribution-implausible"]


# --------------------------------------------------------------------------------------------------------------------
# Ledgers


def test_contribution_with_lost_report_and_replaced_incarnation_keeps_the_ledger_balanced():
    """(1) The report of step 2 is lost, (2) the contribution of step 2 is accepted, (3) a new incarnation sends a
    hello, (4) the version becomes durable."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.step, one.trained = 2, 200
    one.contributes(1.1)
    harness.add_learner(1, incarnation=2).hello(1.2)
    harness.merged(1.3)
    harness.persisted(1.4, "VersionRecord")
    line = harness.core.view().ledger[0]
    assert (line.trained, line.merged, line.pending) == (200, 200, 0)


def test_late_merge_is_subtracted_from_the_drops_of_its_own_incarnation():
    """(1) Incarnation 1 contributes, (2) it is replaced by 2, (3) which leaves immediately, (4) the version becomes
    durable: its tokens are subtracted from the cause superseded, not from left."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    two = harness.add_learner(1, incarnation=2)
    two.hello(1.2)
    harness.persisted(1.2, "MembersRecord")
    two.delivers(1.3, Left("operator request"))
    harness.merged(1.4)
    harness.persisted(1.5, "VersionRecord")
    line = harness.core.view().ledger[0]
    assert all(tokens >= 0 for tokens in line.dropped.values()), line


def test_tokens_of_a_learner_that_left_are_counted_once_after_a_restart():
    """(1) A learner trains 100 tokens, which are merged, (2) it leaves, (3) the syncer is restarted."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    harness.merges_and_persists(1.2)
    one.delivers(1.3, Left("operator request"))
    harness.persisted(1.4)
    before = harness.core.view()
    after = harness.restarted().core.view()
    assert after.trained == before.trained == 100
    assert after.ledger[0].merged == before.ledger[0].merged == 100


def test_retired_tokens_include_accepted_contributions_of_a_replaced_incarnation():
    """(1) The report of step 2 is lost, (2) its contribution is accepted, (3) a new incarnation is admitted, durably,
    (4) the version is durable but not confirmed, (5) the syncer is restarted."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.step, one.trained = 2, 200
    one.contributes(1.1)
    harness.add_learner(1, incarnation=2).hello(1.2)
    harness.persisted(1.3, "MembersRecord")
    harness.merged(1.4)
    harness.written_without_reply()
    line = harness.restarted().core.view().ledger[0]
    assert all(tokens >= 0 for tokens in line.dropped.values()), line
    assert (line.trained, line.merged) == (200, 200)


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state


def test_peer_without_a_reply_is_not_chosen_again_while_there_is_another():
    """(1) Learner 1 is live but never sends its state, (2) learner 3 joins and learner 1 is chosen, (3) timeout."""
    syncer = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    for i in (1, 2):
        syncer.joined(i)
    for i in (1, 2):
        syncer.learners[i].reports(1.0, step=1)
    three = syncer.add_learner(3)
    three.hello(2.0)
    syncer.persisted(2.1)
    learner = LearnerHarness(RunConfig(fragments=1), learner=3)
    learner.opens(2.0)
    learner.welcomed(2.1, step_time_s=1.0)
    requested = []
    for _ in range(2):
        request = next(e.envelope.body for e in learner.effects if hasattr(e, "envelope"))
        three.delivers(learner.now + 0.1, request)
        for effect in syncer.effects:
            if hasattr(effect, "envelope") and effect.envelope.learner == 3:
                learner.receives(learner.now + 0.2, effect.envelope.body)
            elif hasattr(effect, "envelope") and isinstance(effect.envelope.body, ProvideState):
                requested.append(effect.envelope.learner)
        while not any(hasattr(e, "envelope") for e in learner.effects):
            learner.fire_timers(learner.core.next_deadline())
    assert requested == [1, 2]


def test_joining_learner_starts_although_its_connection_breaks_repeatedly():
    """(1) It requests optimizer state, (2) the link breaks before the timeout, (3) it is welcomed and repeats it."""
    harness = LearnerHarness(RunConfig(fragments=1, every_steps=10))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(1,), step_time_s=1.0)
    harness.published(0.1, 0, 1)
    for n in range(1, 30):
        harness.fire_timers(9.0 * n)
        harness.handle(9.0 * n, ConnectionClosed(harness.session, "connection reset by peer"))
        harness.opens(9.0 * n + 0.1)
        harness.welcomed(9.0 * n + 0.2, versions=(1,), step_time_s=1.0)
    assert harness.core.training, "three timeouts of H = 10 steps of 1 s each have passed"


def test_late_optimizer_state_is_used():
    """(1) Peer 4 is chosen, (2) it times out and peer 5 is chosen, (3) the state of peer 4 arrives."""
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.opens(0.0)
    harness.welcomed(0.0, versions=(2,), step_time_s=1.0)
    harness.published(0.1, 0, 2)
    while "state-timeout" not in harness.codes():
        harness.fire_timers(harness.core.next_deadline())
    harness.receives(harness.now + 0.1, OptimizerState(4, 1, 1, 9, (2,)))
    assert harness.core.training


# --------------------------------------------------------------------------------------------------------------------
# Snapshots


def test_snapshot_part_is_sent_only_after_it_is_saved():
    """(1) A learner begins to save its part, (2) the marker arrives again, (3) saving fails: a part sent after (2)
    would be in the snapshot without being stored."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.marker = 7
    harness.receives(0.5, Marker(7))
    harness.steps(1.0)
    harness.receives(1.1, Marker(7))
    harness.expect()
    harness.save_failed(1.2)
    assert harness.bodies(SnapshotPart)[0][1].problem == "no space left on device"


def test_contribution_overtaken_by_the_next_one_completes_the_part():
    """(1) The part of learner 1 names contribution A as outstanding, (2) A arrives, is merged and published, (3) the
    learner contributes to the next round, (4) then the part is saved and sent: it waits for nothing more."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=1, quorum=1))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    first = one.pulls[0]
    harness.handle(1.1, SnapshotRequested())
    one.contributes(1.2)
    harness.merges_and_persists(1.3)
    one.acknowledges(1.4)
    one.marker = SNAPSHOT
    one.reports(2.0, step=3)
    one.contributes(2.1)
    assert harness.of(MergeRound) != []
    one.delivers(2.2, SnapshotPart(SNAPSHOT, 2, 200, (0,), (first,)))
    assert [type(e.record).__name__ for e in harness.of(Persist)] == ["SnapshotRecord"]


# --------------------------------------------------------------------------------------------------------------------
# Silence and the end


def test_stall_right_after_a_message_excuses_silence():
    """(1) A learner reports every second until 7.0, (2) the syncer stalls from 7.1 on, (3) its next timer was due
    at 30, (4) it continues at 1,000: between 7 and 30 it received nothing because it stalled."""
    harness = SyncerHarness(RunConfig(fragments=1, quorum=2))
    one = harness.joined(1)
    for step in range(1, 8):
        one.reports(float(step), step)
    harness.handle(1_000.0, TimerFired())
    assert harness.member(1).state == "live"


def _finished(learners: int = 1) -> SyncerHarness:
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, quorum=4))
    for i in range(1, learners + 1):
        harness.joined(i)
    harness.handle(1.0, FinishRequested())
    while not harness.of(Persist):
        for fake in harness.learners.values():
            fake.reports(harness.now + 1.0, fake.step + 1)
            if harness.of(Persist):
                break
    harness.persisted(harness.now)
    return harness


def test_restarted_finished_syncer_ends_without_learners():
    """(1) The manifest is durable, (2) the syncer is killed before it sends `Finish`, (3) all learners are dead."""
    again = _finished().restarted()
    halted = [e for e in again.done if isinstance(e, Halt)]
    halted += [e for e in again.fire_timers(100_000.0) if isinstance(e, Halt)]
    assert len(halted) == 1


def test_thousand_reconnections_after_the_end_are_harmless():
    """The link works in one direction only: each hello arrives, no reply does."""
    harness = _finished()
    for session in range(2, 1_100):
        fake = harness.add_learner(1, 1, session)
        fake.received[0] = 0
        fake.hello(harness.now + 30.0, training=True)
    assert harness.bodies(Finish) != []


def test_reconnection_after_the_end_does_not_shorten_timeouts_of_others():
    """(1) `Finish` is sent to learners 1 and 2, (2) learner 2 reconnects five times within a second, (3) learner 1
    receives it again no sooner than before."""
    quiet, busy = _finished(2), _finished(2)
    times: list[list[float]] = []
    for harness in (quiet, busy):
        start = harness.now
        if harness is busy:
            for n in range(5):
                harness.learners[2].session += 1
                harness.learners[2].hello(start + 0.01 * n, training=True)
        sent: list[float] = []
        while (deadline := harness.core.next_deadline()) is not None and deadline < start + 5_000 and len(sent) < 3:
            harness.fire_timers(deadline)
            sent += [round(harness.now - start, 6) for learner, _ in harness.bodies(Finish) if learner == 1]
        times.append(sent)
    assert times[1] == times[0]


def test_timers_of_replaced_incarnations_end():
    """Every start of a learner arms a silence timer. Timers of replaced incarnations must end."""
    harness = SyncerHarness(RunConfig(fragments=1, quorum=2))
    for incarnation in range(1, 30):
        one = harness.joined(1, at=float(incarnation), incarnation=incarnation)
    for step in range(1, 300):
        one.reports(30.0 + step, step)
    armed = sum(1 for _, _, kind, key in harness.core.state.timers if (kind, key) == ("silence", 1))
    assert armed <= 2


def test_duplicate_finish_does_not_stop_twice():
    """(1) `Finish` arrives, (2) the learner has every final version and stops, (3) `Finish` arrives again."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(1.0, Finish((0,), 0))
    assert len(harness.of(Stop)) == 1
    harness.receives(1.1, Finish((0,), 0))
    assert harness.of(Stop) == []


def test_version_that_arrives_before_finish_is_adopted_before_the_stop():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.published(0.5, 0, 1, base=0)
    harness.receives(0.6, Finish((1,), 1))
    assert [type(e).__name__ for e in harness.effects if not hasattr(e, "envelope")] == ["AdoptFragment", "Stop"]
    assert harness.one(AdoptFragment).version == 1


def test_failed_record_is_retried_with_newer_changes():
    """(1) An admission cannot be written, (2) another learner sends a hello, (3) both are in the next record."""
    harness = SyncerHarness(RunConfig(fragments=1))
    harness.add_learner(1).hello(1.0)
    harness.persist_failed(1.1)
    harness.add_learner(2).hello(1.2)
    record = harness.one(Persist).record
    assert not isinstance(record, VersionRecord)
    assert [learner for learner, _ in record.incarnations] == [1, 2]  # type: ignore[union-attr]
