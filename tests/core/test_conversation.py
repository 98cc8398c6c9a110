"""The helper of the other tests: it tells types apart, and a failure comes with its story."""

from __future__ import annotations

import pytest

from atoll.core.protocol import Ping, Pong, Pull, Report
from atoll.core.types import RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk

PULL = Pull(RoundId(0, 0, 1, 1))


def test_effects_of_different_types_with_equal_fields_are_different():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.joined(1)
    one.delivers(1.0, Ping(1))
    talk.expect(talk.to(1, Pong(1)))
    with pytest.raises(AssertionError, match="other effects than expected"):
        talk.expect(talk.to(1, Ping(1)))


@pytest.mark.parametrize("learner", [1, 2])
def test_too_few_too_many_and_other_effects_are_noticed(learner):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    talk.joined(2)
    one.reports(1.0, step=1)
    pull = talk.to(1, PULL)
    talk.expect(pull)
    for wrong in ([], [pull, pull], [talk.to(2, PULL)], [talk.to(1, Pull(RoundId(0, 0, 1, 2)))]):
        with pytest.raises(AssertionError, match="other effects than expected"):
            talk.expect(*wrong)


def test_failure_output_contains_the_story(capsys):
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, PULL)
    talk.steps(1.0)
    with pytest.raises(AssertionError):
        talk.expect(talk.sends(Report(2, 100, 1.0)))
    told = capsys.readouterr().out
    assert told.splitlines() == talk.story
    assert '"Pull"' in told
    assert '-> ["CopyFragment"' in told


def test_unexpected_reply_is_detected():
    talk = SyncerTalk(RunConfig(fragments=1))
    with pytest.raises(AssertionError, match=r"no MergeRound of .* waits for an answer"):
        talk.merged(1.0)
