"""What seeds found, each as the order of events behind it: a seed draws another world when the draws change."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk

FIRST = RoundId(0, 0, 1, 1)
SECOND = RoundId(0, 0, 1, 2)


def test_patience_that_was_measured_too_short_grows_until_the_answer_comes():
    """(1) A clock that stood still has measured answers within no time at all, (2) the learner's steps last 3 s, (3)
    every round would be abandoned before its answer, (4) and no longer answer ever be measured."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)

    def answers(at: float) -> None:
        if 0 in one.pulls:
            one.contributes(at)
            del one.pulls[0]
            if talk.of(MergeRound):
                talk.merges_and_persists(at)
                one.acknowledges(at)

    for step in range(1, 9):
        one.reports(0.001 * step, step, step_time_s=0.0)
        answers(0.001 * step)
    before = talk.fragment(0).version
    for step in range(9, 49):
        at = 3.0 * (step - 8)
        for tenth in range(1, 30):  # messages arrive all the time: this is not about silence
            talk.fires(at - 3.0 + 0.1 * tenth)
            one.delivers(at - 3.0 + 0.1 * tenth, Ping(tenth))
        answers(at)
        one.reports(at, step, step_time_s=3.0)
    assert talk.fragment(0).version > before + 2


def test_late_pull_does_not_replace_a_newer_one():
    """(1) Attempt 1 is pulled, the pull is delayed; (2) attempt 2 is pulled, answered and merged; (3) the old pull
    arrives; (4) the published `merged_up_to` names the copy of attempt 2, which must still be there."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(SECOND))
    talk.steps(1.0)
    assert [e.round for e in talk.of(CopyFragment)] == [SECOND]
    talk.receives(1.5, Pull(FIRST))
    talk.steps(2.0)
    assert talk.of(CopyFragment) == []
    talk.gets(2.5, 0, 1, base=0, mark=MergedUpTo(1, 0, 1, 100, 0))
    talk.steps(3.0)
    adopted = talk.one(AdoptFragment)
    assert (adopted.merged_copy, adopted.merged_tokens, adopted.pending_tokens) == (True, 100, 200)


def test_a_pull_is_not_answered_while_the_link_is_down():
    """(1) A pull arrives, (2) the link breaks, (3) a step ends: a copy now would be kept and never be seen."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.handle(0.6, ConnectionClosed(1, "connection reset by peer"))
    talk.steps(1.0)
    assert talk.of(CopyFragment) == []
    assert talk.core.training


def test_a_copy_that_is_sent_again_between_marker_and_cut_has_the_old_colour():
    """(1) A copy is sent and lost, (2) the marker is seen, (3) the pull comes again and the copy is sent again, (4) the
    learner cuts: the copy is older than the cut, and must be recorded as in flight."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.steps(1.0)
    talk.marker = 7
    talk.receives(1.1, Marker(7))
    talk.receives(1.2, Pull(FIRST))
    again = talk.one(Send).envelope
    assert isinstance(again.body, Contribution)
    assert again.marker < 7
    talk.steps(2.0)
    assert talk.one(SaveSnapshot).snapshot == 7
    assert all(send.envelope.marker == 7 for send in talk.of(Send))


def test_quarantined_learner_is_refused_immediately():
    """Otherwise it pings for minutes before it reconnects and receives the reason."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    for n in range(talk.core.state.limits.max_strikes):
        one.contributes(1.1 + n, problem="values are not finite")
    assert [e.learner for e in talk.of(CloseConnection)] == [1]


def test_a_timer_for_a_moment_that_rounds_down_to_now_does_not_fire_for_ever():
    """(1) 0.1 + 0.2 is not 0.3, (2) a timer armed for `last_seen_at + limit` is due before the limit has passed."""
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    at = 1.0
    for n in range(200):
        at += 0.1 + n * 1e-9
        talk.receives(at, Marker(0))
        deadline = talk.core.next_deadline()
        assert deadline is not None
        talk.fires(deadline)
        later = talk.core.next_deadline()
        assert later is None or later > deadline
        at = max(at, deadline)
