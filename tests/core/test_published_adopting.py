"""One test per sentence of the protocol: adopting, and what it does to the counters."""

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
from tests.core.conversation import LearnerTalk

FIRST = RoundId(0, 0, 1, 1)


def copied_at_step_2(adopt: AdoptMode) -> LearnerTalk:
    """Two steps, a copy, and one more step: 200 tokens are in the copy, 100 came after it."""
    talk = LearnerTalk(RunConfig(fragments=1, adopt=adopt)).trains()
    talk.steps(1.0)
    talk.receives(1.5, Pull(FIRST))
    talk.steps(2.0)
    assert talk.one(CopyFragment).copied_at == 2
    talk.steps(3.0)
    return talk


IN = MergedUpTo(incarnation=1, base=0, copied_at=2, trained=200, dropped=0)


# --------------------------------------------------------------------------------------------------------------------
# carry: no token is ever thrown away


def test_carry_keeps_exactly_the_steps_that_are_not_yet_merged():
    talk = copied_at_step_2("carry")
    talk.gets(3.5, 0, 1, IN, base=0)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 200, 0, 200)
    assert talk.line() == LedgerLine(400, 200, 200, {})
    talk.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    talk.steps(5.0)
    again = Contribution(RoundId(0, 1, 1, 1), copied_at=5, steps=3, tokens=300, trained=500, dropped=0)
    assert talk.bodies(Contribution) == [(1, again)]


def test_carry_keeps_everything_when_the_learner_was_not_merged():
    talk = copied_at_step_2("carry")
    talk.gets(3.5, 0, 1, None, base=0)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 1, "carry", False, 0, 0, 400)
    talk.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    talk.steps(5.0)
    assert astuple(talk.bodies(Contribution)[0][1])[1:5] == (5, 5, 500, 500)


def test_a_learner_that_missed_the_version_into_which_it_was_merged_learns_it_from_a_later_one():
    """Version 1, with its copy in it, never arrives; version 3 does, as a whole value, with the same `merged_up_to`."""
    talk = copied_at_step_2("carry")
    talk.gets(3.5, 0, 3, IN)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 3, "carry", True, 200, 0, 200)


def test_merged_up_to_of_an_earlier_merge_does_not_settle_the_current_copy():
    talk = copied_at_step_2("carry")
    talk.gets(3.5, 0, 1, IN, base=0)
    talk.steps(4.0)
    talk.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    talk.steps(5.0)
    talk.gets(5.5, 0, 2, IN, base=1)
    talk.steps(6.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 2, "carry", False, 0, 0, 400)


def test_merged_up_to_of_an_older_incarnation_does_not_settle_the_copy():
    talk = LearnerTalk(RunConfig(fragments=1), incarnation=2).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.steps(1.0)
    talk.steps(2.0)
    talk.gets(2.5, 0, 1, MergedUpTo(incarnation=1, base=0, copied_at=1, trained=100, dropped=0), base=0)
    talk.steps(3.0)
    assert talk.one(AdoptFragment).merged_copy is False


def test_a_copy_that_was_refused_is_not_settled_and_the_next_one_has_all_of_it():
    talk = copied_at_step_2("carry")
    talk.receives(3.5, Pull(RoundId(0, 0, 1, 2)))
    talk.steps(4.0)
    assert talk.bodies(Contribution)[0][1].tokens == 400
    talk.gets(4.5, 0, 1, MergedUpTo(1, 0, 4, 400, 0), base=0)
    talk.steps(5.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 1, "carry", True, 400, 0, 100)


# --------------------------------------------------------------------------------------------------------------------
# overwrite and blend: the counters start anew


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_steps_taken_since_the_copy_are_lost(adopt):
    talk = copied_at_step_2(adopt)
    talk.gets(3.5, 0, 1, IN, base=0)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 1, adopt, True, 200, 200, 0)
    assert talk.line() == LedgerLine(400, 200, 0, {"overwritten-on-adopt": 200})


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_all_steps_of_a_refused_learner_are_lost(adopt):
    talk = copied_at_step_2(adopt)
    talk.gets(3.5, 0, 1, None, base=0)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 1, adopt, False, 0, 400, 0)


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_dropped_tokens_are_part_of_the_next_contribution(adopt):
    talk = copied_at_step_2(adopt)
    talk.gets(3.5, 0, 1, IN, base=0)
    talk.steps(4.0)
    talk.receives(4.5, Pull(RoundId(0, 1, 1, 1)))
    talk.steps(5.0)
    again = Contribution(RoundId(0, 1, 1, 1), copied_at=5, steps=1, tokens=100, trained=500, dropped=200)
    assert talk.bodies(Contribution) == [(1, again)]


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_a_missed_version_counts_as_merged_also_when_adopting_starts_anew(adopt):
    talk = copied_at_step_2(adopt)
    talk.gets(3.5, 0, 3, IN)
    talk.steps(4.0)
    assert talk.one(AdoptFragment) == AdoptFragment(0, 3, adopt, True, 200, 200, 0)


@pytest.mark.parametrize("adopt", ["carry", "overwrite", "blend"])
def test_before_the_first_step_there_is_nothing_of_our_own_to_keep(adopt):
    talk = LearnerTalk(RunConfig(fragments=1, adopt=adopt)).trains()
    assert talk.one(AdoptFragment) == AdoptFragment(0, 0, "overwrite", False, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------------
# The anchor is exactly what was published


def test_the_anchor_is_the_newest_version_that_arrived_and_no_older_one_replaces_it():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.gets(0.5, 0, 2)
    talk.gets(0.6, 0, 1, base=0)
    talk.expect(talk.sends(PublishAck(0, 2)))
    talk.steps(1.0)
    assert talk.one(AdoptFragment).version == 2
    talk.gets(1.5, 0, 2)
    talk.expect(talk.sends(PublishAck(0, 2)))
    talk.steps(2.0)
    assert talk.of(AdoptFragment) == [], "nothing is adopted twice"


def test_update_with_another_base_is_answered_with_resync():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Published(0, 3, 2, None, 0.0))
    talk.expect(talk.sends(Resync(0, received_version=0)))
    talk.gets(0.6, 0, 3)
    talk.expect(talk.sends(PublishAck(0, 3)))


def test_damaged_fragment_is_requested_as_a_whole():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.handle(0.5, FragmentDamaged(0, 1, "wrong digest"))
    assert talk.codes() == ["fragment-damaged"]
    assert talk.bodies(Resync) == [(1, Resync(0, received_version=0))]
    talk.gets(0.6, 0, 1)
    talk.handle(0.7, FragmentDamaged(0, 1, "wrong digest"))
    assert talk.bodies(Resync) == [], "it is here already"
    talk.handle(0.8, FragmentDamaged(9, 1, "wrong digest"))
    assert talk.bodies(Resync) == [], "no fragment of this model"


def test_a_fragment_that_is_not_of_this_model_is_ignored():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.gets(0.5, 7, 3)
    talk.expect()


def test_several_steps_may_be_reported_at_once():
    talk = LearnerTalk(RunConfig(fragments=1)).trains()
    talk.receives(0.5, Pull(FIRST))
    talk.handle(5.0, StepTaken(5, 640, 1.0))
    assert astuple(talk.bodies(Contribution)[0][1])[1:5] == (5, 5, 640, 640)
