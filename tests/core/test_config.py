"""Invalid settings are refused with a message that names the fix."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from atoll.core.types import Limits, RunConfig

WHOLE = "{} must be a whole number of at least 1, got {}"


@pytest.mark.parametrize("name", ["fragments", "every_steps", "overlap_steps", "quorum"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_counts_are_whole_numbers_of_at_least_1(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared below)
        RunConfig(**{name: value})
    assert str(caught.value) == WHOLE.format(name, repr(value))


@pytest.mark.parametrize("name", ["budget_tokens", "budget_merges", "rounds_in_flight"])
@pytest.mark.parametrize("value", [0, -1, 2.5, False])
def test_optional_counts_are_none_or_at_least_1(name, value):
    assert getattr(RunConfig(), name) is None
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RunConfig(**{name: value})
    assert str(caught.value) == WHOLE.format(name, repr(value))


GRACE = "give a number from 0 up to, not with, 1: 0 turns the grace window off"

CASES: list[tuple[dict, str]] = [
    ({"quorum": 3, "limits": Limits(max_learners=2)}, "quorum 3 is above limits.max_learners, 2; use a smaller quorum"),
    (
        {"grace_margin": 1.0},
        f"grace_margin is 1.0; {GRACE}",
    ),
    (
        {"grace_margin": -0.1},
        f"grace_margin is -0.1; {GRACE}",
    ),
    (
        {"grace_margin": float("nan")},
        f"grace_margin is nan; {GRACE}",
    ),
    ({"adopt": "replace"}, "adopt is 'replace'; give one of carry, overwrite or blend"),
    ({"blend_alpha": 1.1}, "blend_alpha is 1.1; give a number from 0 to 1"),
    ({"blend_alpha": -0.1}, "blend_alpha is -0.1; give a number from 0 to 1"),
    ({"blend_alpha": float("nan")}, "blend_alpha is nan; give a number from 0 to 1"),
    ({"owned_fragments": ()}, "owned_fragments must name at least one fragment, each once"),
    ({"owned_fragments": (1, 1)}, "owned_fragments must name at least one fragment, each once"),
    ({"fragments": 4, "owned_fragments": (4,)}, "owned_fragments names a fragment outside 0..3"),
    ({"fragments": 4, "owned_fragments": (0, -1)}, "owned_fragments names a fragment outside 0..3"),
]


@pytest.mark.parametrize(("settings", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_invalid_setting_is_refused_with_its_message(settings, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RunConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "limits",
    [
        {"min_wait_s": 0.0},
        {"min_wait_s": -1.0},
        {"min_wait_s": 31.0},
        {"initial_wait_s": 0.1},
        {"initial_wait_s": 601.0},
        {"max_wait_s": 29.0},
    ],
)
def test_wait_limits_are_ordered(limits):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Limits(**limits)
    assert str(caught.value) == "limits need 0 < min_wait_s <= initial_wait_s <= max_wait_s"


@pytest.mark.parametrize(
    "name",
    [
        "max_pull_attempts",
        "max_publish_attempts",
        "max_hello_attempts",
        "max_ping_attempts",
        "max_final_attempts",
        "max_finish_attempts",
    ],
)
@pytest.mark.parametrize("value", [0, -3])
def test_max_attempts_are_at_least_1(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Limits(**{name: value})
    assert str(caught.value) == f"limits.{name} must be at least 1: with 0 attempts nothing is ever sent"


def test_defaults_are_those_of_the_protocol_page():
    config = RunConfig()
    assert (config.fragments, config.every_steps, config.overlap_steps) == (24, 24, 2)
    assert (config.quorum, config.grace_margin) == (1, 0.5)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().quorum = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().max_strikes = 2  # type: ignore[misc]


def test_syncer_owns_all_fragments_by_default():
    assert RunConfig(fragments=3).fragment_ids() == (0, 1, 2)
    assert RunConfig(fragments=3, owned_fragments=(0, 2)).fragment_ids() == (0, 2)


@pytest.mark.parametrize("every_steps", [1, 2, 5, 24, 100])
@pytest.mark.parametrize("fragments", [1, 2, 5, 24])
def test_offsets_are_in_1_to_h_rise_and_are_spread_evenly(fragments, every_steps):
    config = RunConfig(fragments=fragments, every_steps=every_steps)
    offsets = [config.offset_steps(p) for p in range(fragments)]
    assert offsets == sorted(offsets)
    assert offsets[0] == 1
    assert offsets[-1] <= every_steps
    gaps = {later - earlier for earlier, later in pairwise(offsets)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1, "every gap is H / P, rounded down or up"
