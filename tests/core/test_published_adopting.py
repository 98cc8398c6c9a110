"""Tests of each rule of the protocol: adopting a version, and its effect on the counters."""

from __future__ import annotations

import pytest
from msgspec.structs import astuple

from atoll.core.ledger import LedgerLine
from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    CopyFragment,
    FragmentDamaged,
    PublishAck,
    Published,
    Pull,
    Resync,
    StepTaken,
)
from atoll.core.types import AdoptMode, MergedUpTo, RoundId, RunConfig
from tests.core.harness import LearnerHarness

FIRST = RoundId(0, 0, 1, 1)


def copied_at_step_2(adopt: AdoptMode) -> LearnerHarness:
    """Return a learner with 200 tokens in its copy and 100 tokens after it."""
    harness = LearnerHarness(RunConfig(fragments=1, adopt=adopt)).trains()
    harness.steps(1.0)
    harness.receives(1.5, Pull(FIRST))
    harness.steps(2.0)
    assert harness.one(CopyFragment).copied_at == 2
    harness.steps(3.0)
    return harness


MERGED = MergedUpTo(incarnation=1, base=0, copied_at=2, trained=200, dropped=0)


# --------------------------------------------------------------------------------------------------------------------
# carry: no token is dropped


def test_carry_keeps_exactly_the_steps_that_are_not_yet_merged():
    harness = copied_at_step_2("carry")
    harness.published(3.5, 0, 1, MERGED, base=0)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 200, 0, 200)
    assert harness.totals() == LedgerLine(400, 200, 200, {})
    harness.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    harness.steps(5.0)
    again = Contribution(RoundId(0, 1, 1, 1), copied_at=5, steps=3, tokens=300, trained=500, dropped=0)
    assert harness.bodies(Contribution) == [(1, again)]


def test_carry_keeps_everything_when_the_learner_was_not_merged():
    harness = copied_at_step_2("carry")
    harness.published(3.5, 0, 1, None, base=0)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 1, "carry", False, 0, 0, 400)
    harness.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    harness.steps(5.0)
    assert astuple(harness.bodies(Contribution)[0][1])[1:5] == (5, 5, 500, 500)


def test_later_version_settles_the_copy_if_its_own_version_was_missed():
    """Version 1, with its copy, never arrives. Version 3 arrives in full, with the same `merged_up_to`."""
    harness = copied_at_step_2("carry")
    harness.published(3.5, 0, 3, MERGED)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 3, "carry", True, 200, 0, 200)


def test_merged_up_to_of_an_earlier_merge_does_not_settle_the_current_copy():
    harness = copied_at_step_2("carry")
    harness.published(3.5, 0, 1, MERGED, base=0)
    harness.steps(4.0)
    harness.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    harness.steps(5.0)
    harness.published(5.5, 0, 2, MERGED, base=1)
    harness.steps(6.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 2, "carry", False, 0, 0, 400)


def test_merged_up_to_of_an_older_incarnation_does_not_settle_the_copy():
    harness = LearnerHarness(RunConfig(fragments=1), incarnation=2).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.steps(1.0)
    harness.steps(2.0)
    harness.published(2.5, 0, 1, MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0), base=0)
    harness.steps(3.0)
    assert harness.one(AdoptFragment).merged_copy is False


def test_copy_that_was_refused_is_not_settled_and_the_next_one_has_all_of_it():
    harness = copied_at_step_2("carry")
    harness.receives(3.5, Pull(RoundId(0, 0, 1, 2)))
    harness.steps(4.0)
    assert harness.bodies(Contribution)[0][1].tokens == 400
    harness.published(4.5, 0, 1, MergedUpTo(1, 0, 4, 400, 0), base=0)
    harness.steps(5.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 400, 0, 100)


# --------------------------------------------------------------------------------------------------------------------
# overwrite and blend: the counters are reset


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_steps_taken_since_the_copy_are_lost(adopt):
    harness = copied_at_step_2(adopt)
    harness.published(3.5, 0, 1, MERGED, base=0)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 1, adopt, True, 200, 200, 0)
    assert harness.totals() == LedgerLine(400, 200, 0, {"overwritten-on-adopt": 200})


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_all_steps_of_a_refused_learner_are_lost(adopt):
    harness = copied_at_step_2(adopt)
    harness.published(3.5, 0, 1, None, base=0)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 1, adopt, False, 0, 400, 0)


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_dropped_tokens_are_part_of_the_next_contribution(adopt):
    harness = copied_at_step_2(adopt)
    harness.published(3.5, 0, 1, MERGED, base=0)
    harness.steps(4.0)
    harness.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    harness.steps(5.0)
    again = Contribution(RoundId(0, 1, 1, 1), copied_at=5, steps=1, tokens=100, trained=500, dropped=200)
    assert harness.bodies(Contribution) == [(1, again)]


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_missed_version_counts_as_merged_with_overwrite_and_blend(adopt):
    harness = copied_at_step_2(adopt)
    harness.published(3.5, 0, 3, MERGED)
    harness.steps(4.0)
    assert harness.one(AdoptFragment) == AdoptFragment(0, 3, adopt, True, 200, 200, 0)


@pytest.mark.parametrize("adopt", ["carry", "overwrite", "blend"])
def test_first_version_is_adopted_by_overwriting(adopt):
    harness = LearnerHarness(RunConfig(fragments=1, adopt=adopt)).trains()
    assert harness.one(AdoptFragment) == AdoptFragment(0, 0, "overwrite", False, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------------
# The anchor is the published version


def test_anchor_is_the_newest_received_version():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.published(0.5, 0, 2)
    harness.published(0.6, 0, 1, base=0)
    harness.expect(harness.sends(PublishAck(0, 2)))
    harness.steps(1.0)
    assert harness.one(AdoptFragment).version == 2
    harness.published(1.5, 0, 2)
    harness.expect(harness.sends(PublishAck(0, 2)))
    harness.steps(2.0)
    assert harness.of(AdoptFragment) == [], "no version is adopted twice"


def test_update_with_another_base_is_answered_with_resync():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Published(0, 3, 2, None, 0.0))
    harness.expect(harness.sends(Resync(0, received_version=0)))
    harness.published(0.6, 0, 3)
    harness.expect(harness.sends(PublishAck(0, 3)))


def test_damaged_fragment_is_requested_as_a_whole():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.handle(0.5, FragmentDamaged(0, 1, "digest mismatch"))
    assert harness.codes() == ["fragment-damaged"]
    assert harness.bodies(Resync) == [(1, Resync(0, received_version=0))]
    harness.published(0.6, 0, 1)
    harness.handle(0.7, FragmentDamaged(0, 1, "digest mismatch"))
    assert harness.bodies(Resync) == [], "the version has arrived already"
    harness.handle(0.8, FragmentDamaged(9, 1, "digest mismatch"))
    assert harness.bodies(Resync) == [], "no fragment of this model"


def test_fragment_that_is_not_of_this_model_is_ignored():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.published(0.5, 7, 3)
    harness.expect()


def test_several_steps_may_be_reported_at_once():
    harness = LearnerHarness(RunConfig(fragments=1)).trains()
    harness.receives(0.5, Pull(FIRST))
    harness.handle(5.0, StepTaken(5, 640, 1.0))
    assert astuple(harness.bodies(Contribution)[0][1])[1:5] == (5, 5, 640, 640)
