"""Robust merges: one outlier cannot move the result. The same checks fail for merges that are not robust."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, get_codec
from atoll.tensors.merge import Accumulator, norm
from atoll.tensors.robust_merge import MIN_ROUNDS, OUTLIER_FACTOR, NormTracker, TrimmedMean, make_running_sums
from tests.tensors.tensor_samples import add_contribution, make_single_fragment_plan, random_tensor

PLAN = make_single_fragment_plan(("weight", 60), ("embedding", 37))
NUMEL = 97

seeds = st.integers(0, 2**32 - 1)
outliers = st.floats(-1e18, 1e18, allow_nan=False)


def trimmed_mean(deltas: list[Tensor]) -> Tensor:
    sums = TrimmedMean(deltas[0].numel())
    for delta in deltas:
        add_contribution(sums, delta, 1.0)
    return sums.result().clone()


def is_within_range(merged: Tensor, others: list[Tensor]) -> bool:
    """Return whether each value is between the minimum and maximum of the others, up to rounding."""
    low, high = torch.stack(others).amin(0), torch.stack(others).amax(0)
    tolerance = 1e-6 * torch.maximum(low.abs(), high.abs())
    return bool(((merged >= low - tolerance) & (merged <= high + tolerance)).all())


@given(seeds, st.integers(3, 8), outliers, st.integers(0, 7))
def test_one_outlier_cannot_move_the_trimmed_mean_beyond_the_others(seed, learners, value, position):
    others = [random_tensor(seed + n, NUMEL) for n in range(learners - 1)]
    deltas = list(others)
    deltas.insert(position % learners, torch.full((NUMEL,), value))
    assert is_within_range(trimmed_mean(deltas), others)


def test_outlier_moves_the_average_and_a_mean_that_subtracts_extremes():
    others = [random_tensor(n, NUMEL) for n in range(3)]
    outlier = torch.full((NUMEL,), 1e9)
    average = Accumulator(PLAN, 0, "average")
    for delta in (*others, outlier):
        add_contribution(average, delta, 1.0)
    assert not is_within_range(average.result(), others)
    stacked = torch.stack([*others, outlier])  # in f32: cancellation leaves nothing of the others
    subtracting = (stacked.sum(0) - stacked.amin(0) - stacked.amax(0)) / 2
    assert not is_within_range(subtracting, others)


@given(seeds, st.integers(1, 9))
def test_trimmed_mean_equals_that_of_sorted_values(seed, learners):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(learners)]
    ordered = torch.stack(deltas).double().sort(0).values
    expected = ordered[1:-1].mean(0) if learners > 2 else ordered.mean(0)
    assert torch.allclose(trimmed_mean(deltas).double(), expected, rtol=1e-5, atol=1e-6)


@given(seeds, st.permutations(range(5)))
def test_order_of_arrival_changes_only_rounding(seed, order):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(5)]
    assert torch.allclose(trimmed_mean(deltas), trimmed_mean([deltas[n] for n in order]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [codec.name for codec in CODECS])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_encoded_and_decoded_contributions_are_merged_equally(name, scale):
    numel = CHUNK_NUMEL + 333
    codec = get_codec(name)
    deltas = [random_tensor(n, numel) for n in range(4)]
    encoded, decoded = TrimmedMean(numel), TrimmedMean(numel)
    for delta in deltas:
        data = codec.encode(delta)
        encoded.add_encoded(codec, data, 1.0, scale)
        add_contribution(decoded, codec.decode(data, numel), 1.0, scale)
    assert torch.equal(encoded.result(), decoded.result())
    with pytest.raises(ValueError, match="flat bytes in"):
        encoded.add_encoded(codec, data[:-1], 1.0)


def test_memory_does_not_grow_with_the_number_of_learners():
    sums = TrimmedMean(NUMEL)
    buffers = [sums._low.data_ptr(), sums._high.data_ptr(), sums._between.data_ptr()]
    for round_number in range(3):
        for n in range(50):
            add_contribution(sums, random_tensor(n + round_number, NUMEL), 1.0)
        sums.result()
        assert [sums._low.data_ptr(), sums._high.data_ptr(), sums._between.data_ptr()] == buffers
        sums.reset()
    with pytest.raises(ValueError, match="the round has no contributions"):
        sums.result()


# --------------------------------------------------------------------------------------------------------------------
# The typical norm


def make_calibrated_tracker(size: float = 1.0) -> NormTracker:
    tracker = NormTracker()
    for _ in range(MIN_ROUNDS):
        tracker.record_round([size] * 4)
    return tracker


@pytest.mark.parametrize("method", ["average", "radial", "trimmed"])
@given(seed=seeds, factor=st.floats(1.0, 1e6))
def test_clipped_contribution_is_merged_like_a_scaled_one(method, seed, factor):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(4)]
    sizes = [NormTracker().normalized_norm(norm(delta), 9) for delta in deltas]
    tracker = make_calibrated_tracker(sizes[0])
    clip = 2.0
    huge = deltas[3] * factor
    scale = tracker.clip_factor(tracker.normalized_norm(norm(huge), 9), clip)
    assert scale * norm(huge) <= clip * tracker.typical_norm * 3 * (1 + 1e-6)
    clipped, expected = make_running_sums(PLAN, 0, method), make_running_sums(PLAN, 0, method)
    for sums, last, last_scale in ((clipped, huge, scale), (expected, huge * scale, 1.0)):
        for delta in deltas[:3]:
            sums.add_encoded(get_codec("f32"), get_codec("f32").encode(delta), 1.0)
        sums.add_encoded(get_codec("f32"), get_codec("f32").encode(last), 1.0, last_scale)
    assert torch.allclose(clipped.result(), expected.result(), rtol=1e-4, atol=1e-5)


def test_outliers_and_clipping_need_calibration_and_clipping_is_off_by_default():
    tracker = NormTracker()
    for _ in range(MIN_ROUNDS - 1):
        tracker.record_round([1.0])
        assert tracker.find_problem(1e9) is None
        assert tracker.clip_factor(1e9, 3.0) == 1.0
    tracker.record_round([1.0])
    assert tracker.find_problem(1e9) is not None
    assert tracker.clip_factor(1e9, 3.0) == pytest.approx(3e-9)
    assert tracker.clip_factor(1e9, 0.0) == 1.0


def test_outlier_is_a_hundred_times_the_typical_norm():
    tracker = make_calibrated_tracker(0.5)
    assert tracker.find_problem(0.5 * OUTLIER_FACTOR) is None
    assert "300 times the typical norm" in str(tracker.find_problem(0.5 * OUTLIER_FACTOR * 3))


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(1e3, 1e15))
def test_one_outlier_of_four_does_not_change_the_typical_norm(honest, outlier):
    with_outlier, without_outlier = NormTracker(), NormTracker()
    for _ in range(20):
        with_outlier.record_round([*honest, outlier])
        without_outlier.record_round(honest)
    assert min(honest) <= with_outlier.typical_norm <= max(honest)
    assert with_outlier.find_problem(outlier) is not None


def test_contribution_of_many_steps_is_not_an_outlier():
    """After a long disconnection: a hundred times the steps in one direction give a hundred times the norm."""
    tracker = make_calibrated_tracker(NormTracker().normalized_norm(1.0, 24))
    assert tracker.find_problem(tracker.normalized_norm(100.0, 2400)) is None


def test_typical_norm_is_restored_from_stored_state():
    tracker, restored = make_calibrated_tracker(0.25), NormTracker()
    restored.load_state_tensor(tracker.state_tensor())
    assert (restored.typical_norm, restored.rounds) == (tracker.typical_norm, tracker.rounds)


@pytest.mark.parametrize("name", [codec.name for codec in CODECS])
def test_norm_from_examine_is_an_upper_bound_in_proportion_to_the_norm(name):
    codec = get_codec(name)
    delta = random_tensor(1, 5000)
    data = codec.encode(delta)
    problem, bound = codec.examine(data, 5000)
    assert problem is None
    exact = norm(codec.decode(data, 5000))
    assert exact * (1 - 1e-5) <= bound <= 5 * exact
    _, tenfold = codec.examine(codec.encode(delta * 10), 5000)
    assert tenfold == pytest.approx(10 * bound, rel=0.02)
    assert codec.examine(data[:-1], 5000)[0] is not None
    assert codec.examine(codec.encode(delta * math.nan), 5000)[0] is not None


def test_buffers_are_compared_by_their_norm_and_not_clipped():
    tracker = NormTracker(of_buffers=True)
    for _ in range(MIN_ROUNDS):
        tracker.record_round([1.0])
    assert tracker.normalized_norm(8.0, 4) == 8.0
    assert tracker.clip_factor(8.0, 2.0) == 1.0
    assert tracker.find_problem(8.0) is None
    assert str(tracker.find_problem(2 * OUTLIER_FACTOR)).startswith("wild: 200 times")


def test_buffers_may_have_any_finite_values():
    """A mask of -1e30 has squares that f32 cannot sum. In parameters, such a value is refused."""
    for value, of_buffers, of_parameters in ((-1e30, True, False), (1.0, True, True), (math.inf, False, False)):
        data = get_codec("f32").encode(torch.full((4,), value))
        assert (NormTracker(of_buffers=True).examine(get_codec("f32"), data, 4)[0] is None) is of_buffers
        assert (NormTracker().examine(get_codec("f32"), data, 4)[0] is None) is of_parameters
