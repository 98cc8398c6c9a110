"""Tests of the harness: it distinguishes types, and a failure prints its story."""

from __future__ import annotations

import pytest

from atoll.core.protocol import Ping, Pong, Pull, Report
from atoll.core.types import RoundId, RunConfig
from tests.core.harness import LearnerHarness, SyncerHarness

PULL = Pull(RoundId(0, 0, 1, 1))


def test_effects_of_different_types_with_equal_fields_are_different():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.joined(1)
    one.delivers(1.0, Ping(1))
    harness.expect(harness.to(1, Pong(1)))
    with pytest.raises(AssertionError, match="other effects than expected"):
        harness.expect(harness.to(1, Ping(1)))


@pytest.mark.parametrize("learner", [1, 2])
def test_missing_extra_and_different_effects_are_detected(learner):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    harness.joined(2)
    one.reports(1.0, step=1)
    pull = harness.to(1, PULL)
    harness.expect(pull)
    for effects in ([], [pull, pull], [harness.to(2, PULL)], [harness.to(1, Pull(RoundId(0, 0, 1, 2)))]):
        with pytest.raises(AssertionError, match="other effects than expected"):
            harness.expect(*effects)


def test_failure_output_contains_the_story(capsys):
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, PULL)
    harness.steps(1.0)
    with pytest.raises(AssertionError):
        harness.expect(harness.sends(Report(2, 100, 1.0)))
    printed = capsys.readouterr().out
    assert printed.splitlines() == harness.story
    assert '"Pull"' in printed
    assert '-> ["CopyFragment"' in printed


def test_unexpected_reply_is_detected():
    harness = SyncerHarness(RunConfig(fragments=1))
    with pytest.raises(AssertionError, match=r"no MergeRound with .* waits for a reply"):
        harness.merged(1.0)
