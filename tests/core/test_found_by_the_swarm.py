"""Bugs that swarm seeds found, each as its order of events: a seed does not reproduce it once the draws change."""

from __future__ import annotations

from atoll.core.protocol import (
    AdoptFragment,
    CloseConnection,
    ConnectionClosed,
    Contribution,
    CopyFragment,
    Marker,
    MergeRound,
    Ping,
    Pull,
    SaveSnapshot,
    Send,
)
from atoll.core.types import MergedUpTo, RoundId, RunConfig
from tests.core.harness import LearnerHarness, SyncerHarness

FIRST = RoundId(0, 0, 1, 1)
SECOND = RoundId(0, 0, 1, 2)


def test_timeout_measured_too_short_grows_until_the_reply_arrives():
    """(1) A stopped clock has measured replies of 0 s, (2) steps of the learner take 3 s, (3) every round would be
    abandoned before its contribution, (4) and no longer reply time would ever be measured."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)

    def answers(at: float) -> None:
        if 0 in one.pulls:
            one.contributes(at)
            del one.pulls[0]
            if harness.of(MergeRound):
                harness.merges_and_persists(at)
                one.acknowledges(at)

    for step in range(1, 9):
        one.reports(0.001 * step, step, step_time_s=0.0)
        answers(0.001 * step)
    before = harness.fragment(0).version
    for step in range(9, 49):
        at = 3.0 * (step - 8)
        for tenth in range(1, 30):  # messages keep arriving, so the learner is not silent
            harness.fire_timers(at - 3.0 + 0.1 * tenth)
            one.delivers(at - 3.0 + 0.1 * tenth, Ping(tenth))
        answers(at)
        one.reports(at, step, step_time_s=3.0)
    assert harness.fragment(0).version > before + 2


def test_late_pull_does_not_replace_a_newer_one():
    """(1) Attempt 1 is pulled, the pull is delayed; (2) attempt 2 is pulled, answered and merged; (3) the old pull
    arrives; (4) the published `merged_up_to` names the copy of attempt 2, which must still be there."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(SECOND))
    harness.steps(1.0)
    assert [e.round for e in harness.of(CopyFragment)] == [SECOND]
    harness.receives(1.5, Pull(FIRST))
    harness.steps(2.0)
    assert harness.of(CopyFragment) == []
    harness.published(2.5, 0, 1, base=0, merged_up_to=MergedUpTo(1, 0, 1, 100, 0))
    harness.steps(3.0)
    adopted = harness.one(AdoptFragment)
    assert (adopted.merged_copy, adopted.merged_tokens, adopted.pending_tokens) == (True, 100, 200)


def test_pull_is_not_answered_while_disconnected():
    """(1) A pull arrives, (2) the link breaks, (3) a step ends: a copy made now would never be sent."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    harness.steps(1.0)
    assert harness.of(CopyFragment) == []
    assert harness.core.training


def test_copy_sent_again_between_marker_and_cut_has_the_old_marker():
    """(1) A copy is sent and lost, (2) the marker is seen, (3) the pull and the copy are sent again, (4) the
    learner cuts: the copy is older than the cut, and must be recorded as in flight."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.steps(1.0)
    harness.marker = 7
    harness.receives(1.1, Marker(7))
    harness.receives(1.2, Pull(FIRST))
    again = harness.one(Send).envelope
    assert isinstance(again.body, Contribution)
    assert again.marker < 7
    harness.steps(2.0)
    assert harness.one(SaveSnapshot).snapshot == 7
    assert all(send.envelope.marker == 7 for send in harness.of(Send))


def test_quarantined_learner_is_refused_immediately():
    """Otherwise it pings for minutes before it reconnects and receives the reason."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    for n in range(harness.core.state.limits.max_strikes):
        one.contributes(1.1 + n, problem="values are not finite")
    assert [e.learner for e in harness.of(CloseConnection)] == [1]


def test_timer_that_rounds_down_to_now_does_not_fire_forever():
    """(1) 0.1 + 0.2 is not 0.3, (2) a timer armed for `last_seen_at + limit` is due before the limit has passed."""
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    at = 1.0
    for n in range(200):
        at += 0.1 + n * 1e-9
        harness.receives(at, Marker(0))
        deadline = harness.core.next_deadline()
        assert deadline is not None
        harness.fire_timers(deadline)
        later = harness.core.next_deadline()
        assert later is None or later > deadline
        at = max(at, deadline)
