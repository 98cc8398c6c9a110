"""One wild learner of several cannot move the result; each property is shown to fail for a merge that lacks it."""

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
wild = st.floats(-1e18, 1e18, allow_nan=False)


def trimmed(deltas: list[Tensor]) -> Tensor:
    sums = TrimmedMean(deltas[0].numel())
    for delta in deltas:
        add_contribution(sums, delta, 1.0)
    return sums.result().clone()


def within(found: Tensor, others: list[Tensor]) -> bool:
    """Nothing outside of the range of the others, up to a rounding of the mean."""
    low, high = torch.stack(others).amin(0), torch.stack(others).amax(0)
    room = 1e-6 * torch.maximum(low.abs(), high.abs())
    return bool(((found >= low - room) & (found <= high + room)).all())


@given(seeds, st.integers(3, 8), wild, st.integers(0, 7))
def test_one_wild_learner_cannot_move_the_trimmed_mean_beyond_the_others(seed, learners, value, place):
    others = [random_tensor(seed + n, NUMEL) for n in range(learners - 1)]
    deltas = list(others)
    deltas.insert(place % learners, torch.full((NUMEL,), value))
    assert within(trimmed(deltas), others)


def test_the_same_property_fails_for_the_average_and_for_one_that_subtracts():
    others = [random_tensor(n, NUMEL) for n in range(3)]
    far = torch.full((NUMEL,), 1e9)
    average = Accumulator(PLAN, 0, "average")
    for delta in (*others, far):
        add_contribution(average, delta, 1.0)
    assert not within(average.result(), others)
    stacked = torch.stack([*others, far])  # in f32, as somebody might write it
    subtracting = (stacked.sum(0) - stacked.amin(0) - stacked.amax(0)) / 2
    assert not within(subtracting, others), "cancellation leaves nothing of the others"


@given(seeds, st.integers(1, 9))
def test_the_trimmed_mean_is_that_of_the_sorted_values(seed, learners):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(learners)]
    ordered = torch.stack(deltas).double().sort(0).values
    wanted = ordered[1:-1].mean(0) if learners > 2 else ordered.mean(0)
    assert torch.allclose(trimmed(deltas).double(), wanted, rtol=1e-5, atol=1e-6)


@given(seeds, st.permutations(range(5)))
def test_the_order_of_arrival_changes_nothing_but_rounding(seed, order):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(5)]
    assert torch.allclose(trimmed(deltas), trimmed([deltas[n] for n in order]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [each.name for each in CODECS])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_what_came_encoded_is_merged_as_it_decodes(name, scale):
    numel = CHUNK_NUMEL + 333
    coder = get_codec(name)
    deltas = [random_tensor(n, numel) for n in range(4)]
    encoded, decoded = TrimmedMean(numel), TrimmedMean(numel)
    for delta in deltas:
        data = coder.encode(delta)
        encoded.add_encoded(coder, data, 1.0, scale)
        add_contribution(decoded, coder.decode(data, numel), 1.0, scale)
    assert torch.equal(encoded.result(), decoded.result())
    with pytest.raises(ValueError, match="flat bytes in"):
        encoded.add_encoded(coder, data[:-1], 1.0)


def test_memory_does_not_grow_with_learners():
    sums = TrimmedMean(NUMEL)
    held = [sums._low.data_ptr(), sums._high.data_ptr(), sums._between.data_ptr()]
    for round_number in range(3):
        for n in range(50):
            add_contribution(sums, random_tensor(n + round_number, NUMEL), 1.0)
        sums.result()
        assert [sums._low.data_ptr(), sums._high.data_ptr(), sums._between.data_ptr()] == held
        sums.reset()
    with pytest.raises(ValueError, match="the round has no contributions"):
        sums.result()


# --------------------------------------------------------------------------------------------------------------------
# The usual size


def known(size: float = 1.0) -> NormTracker:
    usual = NormTracker()
    for _ in range(MIN_ROUNDS):
        usual.record_round([size] * 4)
    return usual


@pytest.mark.parametrize("how", ["average", "radial", "trimmed"])
@given(seed=seeds, factor=st.floats(1.0, 1e6))
def test_a_clipped_contribution_counts_like_one_of_the_size_that_it_was_clipped_to(how, seed, factor):
    deltas = [random_tensor(seed + n, NUMEL) for n in range(4)]
    sizes = [NormTracker().normalized_norm(norm(delta), 9) for delta in deltas]
    usual = known(sizes[0])
    clip = 2.0
    huge = deltas[3] * factor
    scale = usual.clip_factor(usual.normalized_norm(norm(huge), 9), clip)
    assert scale * norm(huge) <= clip * usual.typical_norm * 3 * (1 + 1e-6)
    clipped, wanted = make_running_sums(PLAN, 0, how), make_running_sums(PLAN, 0, how)
    for sums, last, by in ((clipped, huge, scale), (wanted, huge * scale, 1.0)):
        for delta in deltas[:3]:
            sums.add_encoded(get_codec("f32"), get_codec("f32").encode(delta), 1.0)
        sums.add_encoded(get_codec("f32"), get_codec("f32").encode(last), 1.0, by)
    assert torch.allclose(clipped.result(), wanted.result(), rtol=1e-4, atol=1e-5)


def test_nothing_is_judged_before_a_few_rounds_and_nothing_clipped_without_being_asked():
    usual = NormTracker()
    for _ in range(MIN_ROUNDS - 1):
        usual.record_round([1.0])
        assert usual.find_problem(1e9) is None
        assert usual.clip_factor(1e9, 3.0) == 1.0
    usual.record_round([1.0])
    assert usual.find_problem(1e9) is not None
    assert usual.clip_factor(1e9, 3.0) == pytest.approx(3e-9)
    assert usual.clip_factor(1e9, 0.0) == 1.0


def test_wild_is_a_hundred_times_the_usual_and_says_so():
    usual = known(0.5)
    assert usual.find_problem(0.5 * OUTLIER_FACTOR) is None
    sentence = usual.find_problem(0.5 * OUTLIER_FACTOR * 3)
    assert sentence is not None
    assert "300 times the usual size" in sentence


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(1e3, 1e15))
def test_one_wild_learner_of_four_does_not_change_what_is_usual(honest, far):
    with_it, without = NormTracker(), NormTracker()
    for _ in range(20):
        with_it.record_round([*honest, far])
        without.record_round(honest)
    assert min(honest) <= with_it.typical_norm <= max(honest)
    assert with_it.find_problem(far) is not None


def test_a_learner_that_was_long_away_is_not_wild():
    """A hundred times the steps in one direction: a hundred times the norm."""
    usual = known(NormTracker().normalized_norm(1.0, 24))
    assert usual.find_problem(usual.normalized_norm(100.0, 2400)) is None


def test_the_usual_size_outlives_the_process():
    usual, again = known(0.25), NormTracker()
    again.load_state_tensor(usual.state_tensor())
    assert (again.typical_norm, again.rounds) == (usual.typical_norm, usual.rounds)


@pytest.mark.parametrize("name", [each.name for each in CODECS])
def test_the_norm_that_is_told_is_at_least_the_norm_and_grows_with_it(name):
    coder = get_codec(name)
    delta = random_tensor(1, 5000)
    data = coder.encode(delta)
    problem, told = coder.examine(data, 5000)
    assert problem is None
    real = norm(coder.decode(data, 5000))
    assert real * (1 - 1e-5) <= told <= 5 * real
    _, tenfold = coder.examine(coder.encode(delta * 10), 5000)
    assert tenfold == pytest.approx(10 * told, rel=0.02)
    assert coder.examine(data[:-1], 5000)[0] is not None
    assert coder.examine(coder.encode(delta * math.nan), 5000)[0] is not None


def test_buffers_are_compared_by_their_norm_and_never_clipped():
    usual = NormTracker(of_buffers=True)
    for _ in range(MIN_ROUNDS):
        usual.record_round([1.0])
    assert usual.normalized_norm(8.0, 4) == 8.0
    assert usual.clip_factor(8.0, 2.0) == 1.0
    assert usual.find_problem(8.0) is None
    assert str(usual.find_problem(2 * OUTLIER_FACTOR)).startswith("wild: 200 times")


def test_buffers_may_hold_any_finite_numbers():
    """A mask of -1e30 has squares that f32 cannot sum; of parameters such a number is refused."""
    for value, of_buffers, of_parameters in ((-1e30, True, False), (1.0, True, True), (math.inf, False, False)):
        data = get_codec("f32").encode(torch.full((4,), value))
        assert (NormTracker(of_buffers=True).examine(get_codec("f32"), data, 4)[0] is None) is of_buffers
        assert (NormTracker().examine(get_codec("f32"), data, 4)[0] is None) is of_parameters
