"""The streaming merge against its formulas over all contributions, in f64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, Codec, get_codec
from atoll.tensors.merge import Accumulator, norm
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import make_running_sums
from tests.tensors.tensor_samples import add_contribution, has_same_bits, make_single_fragment_plan, random_tensor

seeds = st.integers(0, 2**32 - 1)
weights = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=8)


MIXED = make_single_fragment_plan(
    ("weight", 130), ("buffer", 7), ("embedding", 41), ("weight", 3), ("weight", 70), ("buffer", 1)
)
WEIGHT = make_single_fragment_plan(("weight", 50))


def expected_merge(plan: FragmentPlan, method: str, deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Return the mean by its formula, from all contributions at once."""
    v = torch.stack(deltas).double()
    w = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
    merged = torch.empty(v.shape[1], dtype=torch.float64)
    for piece, begin, end in plan.spans(0):
        part = v[:, begin:end]
        if method == "radial" and piece.kind == "weight":
            sizes = part.norm(dim=1, keepdim=True)
            direction = (w * part / sizes).sum(0)
            merged[begin:end] = (w * sizes).sum() / w.sum() * direction / direction.norm()
        else:
            merged[begin:end] = (w * part).sum(0) / w.sum()
    return merged


def merge(accumulator: Accumulator, deltas: list[Tensor], weights: list[float]) -> Tensor:
    for delta, weight in zip(deltas, weights, strict=True):
        add_contribution(accumulator, delta.clone(), weight)
    assert accumulator.count == len(deltas)
    return accumulator.result().clone()


def is_close(accumulator: Accumulator, plan: FragmentPlan, method: str, seed: int, weights: list[float]) -> bool:
    """Compare with the formula, in f32 accuracy relative to the largest value of each piece: sums may cancel."""
    deltas = [random_tensor(seed + index, plan.numel(0)) for index in range(len(weights))]
    expected = expected_merge(plan, method, deltas, weights)
    actual = merge(accumulator, deltas, weights).double()
    return all(
        bool(((actual - expected)[begin:end].abs() <= 4e-6 * max(d[begin:end].abs().max() for d in deltas)).all())
        for _, begin, end in plan.spans(0)
    )


@pytest.mark.parametrize("method", ["average", "radial"])
@pytest.mark.parametrize(
    "plan", [MIXED, WEIGHT, make_single_fragment_plan(("embedding", 20))], ids=["mixed", "weight", "embedding"]
)
@given(seeds, weights)
def test_streaming_merge_equals_the_formula(method, plan, seed, weights):
    assert is_close(Accumulator(plan, 0, method), plan, method, seed, weights)


class IgnoresSizes(Accumulator):
    """Bug: the mean of unit vectors, without sizes, as the paper prints the formula."""

    def _add_direction(self, run, w, size, scale):
        factor = super()._add_direction(run, w, size, scale)
        run.weighted_norms += w - w * size
        return factor


class IgnoresNormalization(Accumulator):
    """Bug: the direction of the plain mean, which large contributions dominate."""

    def _add_direction(self, run, w, size, scale):
        super()._add_direction(run, w, size, scale)
        return w


class IgnoresWeights(Accumulator):
    """Bug: all contributions have the same weight."""

    def _relative_weight(self, weight):
        super()._relative_weight(weight)
        return 1.0


class JoinsRuns(Accumulator):
    """Bug: one norm for adjacent weights of the fragment."""

    def __init__(self, plan, p, method):
        super().__init__(plan, p, method)
        last = self._ranges[-2]
        self._ranges[-3].end = last.end
        self._ranges.remove(last)


@pytest.mark.parametrize("buggy_class", [IgnoresSizes, IgnoresNormalization, IgnoresWeights, JoinsRuns])
def test_formula_check_finds_injected_bugs(buggy_class):
    weights = [1.0, 2.0, 5.0]
    assert is_close(Accumulator(MIXED, 0, "radial"), MIXED, "radial", 0, weights)
    assert not is_close(buggy_class(MIXED, 0, "radial"), MIXED, "radial", 0, weights)


@given(seeds, st.floats(1e-6, 1e15))
def test_merge_of_one_contribution_is_that_contribution(seed, weight):
    delta = random_tensor(seed, MIXED.numel(0))
    delta[::5] = -0.0
    assert has_same_bits(merge(Accumulator(MIXED, 0, "average"), [delta], [weight]), delta)
    assert torch.allclose(merge(Accumulator(MIXED, 0, "radial"), [delta], [weight]), delta, rtol=1e-6, atol=1e-6)


@given(seeds, st.integers(1, 9), st.floats(1e-6, 1e15))
def test_equal_weights_give_exactly_the_sum_divided_by_m(seed, learners, weight):
    deltas = [random_tensor(seed + index, WEIGHT.numel(0)) for index in range(learners)]
    total = deltas[0].numpy()
    for delta in deltas[1:]:
        total = total + delta.numpy()
    result = merge(Accumulator(WEIGHT, 0, "average"), deltas, [weight] * learners)
    assert has_same_bits(result, torch.from_numpy(total / total.dtype.type(learners)))


def test_radial_merge_of_canceling_directions_is_zero():
    v = random_tensor(0, 50)
    result = merge(Accumulator(WEIGHT, 0, "radial"), [v, -3.0 * v], [2.0, 2.0])
    assert torch.equal(result, torch.zeros(50))
    # Three directions at 120 degrees cancel except for rounding, which must not be scaled up.
    star = [torch.zeros(50) for _ in range(3)]
    for index, delta in enumerate(star):
        delta[0], delta[1] = math.cos(index * 2.0 * math.pi / 3.0), math.sin(index * 2.0 * math.pi / 3.0)
    assert torch.equal(merge(Accumulator(WEIGHT, 0, "radial"), star, [1.0] * 3), torch.zeros(50))


def test_radial_merge_of_orthogonal_deltas_keeps_their_norm():
    """The plain mean of M orthogonal deltas shrinks by the square root of M."""
    deltas = [torch.zeros(50) for _ in range(16)]
    for index, delta in enumerate(deltas):
        delta[index] = 2.0
    assert norm(merge(Accumulator(WEIGHT, 0, "radial"), deltas, [1.0] * 16)) == pytest.approx(2.0, rel=1e-6)
    assert norm(merge(Accumulator(WEIGHT, 0, "average"), deltas, [1.0] * 16)) == pytest.approx(0.5, rel=1e-6)


def test_zero_delta_counts_for_the_size_but_not_for_the_direction():
    v = random_tensor(0, 50)
    result = merge(Accumulator(WEIGHT, 0, "radial"), [torch.zeros(50), v], [1.0, 1.0])
    assert torch.allclose(result, v / 2.0, rtol=1e-6)
    assert torch.equal(merge(Accumulator(WEIGHT, 0, "radial"), [torch.zeros(50)] * 2, [1.0, 1.0]), torch.zeros(50))


@pytest.mark.parametrize("size", [1e-25, 1e-30, 1e18, 1e25])
def test_deltas_whose_squares_overflow_f32_are_merged(size):
    deltas = [random_tensor(index, 50) * size for index in range(3)]
    expected = expected_merge(WEIGHT, "radial", deltas, [1.0, 2.0, 3.0])
    result = merge(Accumulator(WEIGHT, 0, "radial"), deltas, [1.0, 2.0, 3.0]).double()
    assert torch.allclose(result / size, expected / size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["average", "radial"])
def test_extreme_weights_and_tiny_deltas_stay_finite(method):
    deltas = [random_tensor(0, 50), random_tensor(1, 50) * 1e-44, random_tensor(2, 50) * 1e-38]
    result = merge(Accumulator(WEIGHT, 0, method), deltas, [1e-3, 1e20, 1.0])
    assert bool(result.isfinite().all())


LONG = make_single_fragment_plan(
    ("weight", 2 * CHUNK_NUMEL + 333),
    ("buffer", 77),
    ("weight", 900),
    ("embedding", CHUNK_NUMEL + 65),
    ("weight", CHUNK_NUMEL),
)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("plan", [MIXED, LONG], ids=["short", "long"])
@pytest.mark.parametrize("method", ["average", "radial"])
@pytest.mark.parametrize("offset", [0, 1])
def test_encoded_and_decoded_contributions_give_the_same_bits(codec: Codec, plan, method, offset):
    """A replay may decode first, and a buffer may be unaligned. Neither changes the result."""
    numel = plan.numel(0)
    decoded, encoded = Accumulator(plan, 0, method), Accumulator(plan, 0, method)
    for index, weight in enumerate([3.0, 1.0, 2.5]):
        buffer = torch.empty(codec.encoded_size(numel) + offset, dtype=torch.uint8)[offset:]
        data = codec.encode(random_tensor(index, numel), buffer)
        add_contribution(decoded, torch.cat([torch.zeros(offset), codec.decode(data, numel)])[offset:], weight)
        encoded.add_encoded(codec, data, weight)
    assert has_same_bits(decoded.result(), encoded.result())


@pytest.mark.parametrize("method", ["average", "radial"])
def test_reset_clears_all_sums(method):
    used, fresh = Accumulator(MIXED, 0, method), Accumulator(MIXED, 0, method)
    numel = MIXED.numel(0)
    merge(used, [torch.full((numel,), math.nan), random_tensor(0, numel)], [7.0, 3.0])
    used.reset()
    assert used.count == 0
    deltas = [random_tensor(1, numel), random_tensor(2, numel)]
    assert has_same_bits(merge(used, deltas, [2.0, 3.0]), merge(fresh, deltas, [2.0, 3.0]))


def tensor_bytes(holder: object) -> int:
    """Return the bytes of all tensors in an object, including its attributes and lists, recursively."""
    if isinstance(holder, Tensor):
        return holder.untyped_storage().nbytes()
    if isinstance(holder, list | tuple):
        return sum(map(tensor_bytes, holder))
    names = [*getattr(holder, "__dict__", ()), *getattr(type(holder), "__slots__", ())]
    return sum(tensor_bytes(getattr(holder, name)) for name in names)


def test_memory_does_not_depend_on_the_number_of_contributions():
    numel = LONG.numel(0)
    accumulator = Accumulator(LONG, 0, "radial")
    codec = get_codec("int4")
    data = codec.encode(random_tensor(0, numel))
    sizes = []
    for _ in range(64):
        accumulator.add_encoded(codec, data, 1.0)
        sizes.append(tensor_bytes(accumulator))
    assert set(sizes) == {sizes[0]}
    assert 4 * numel <= sizes[0] <= 4 * numel + 16 * CHUNK_NUMEL


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="average or radial"):
        Accumulator(WEIGHT, 0, "median")
    accumulator = Accumulator(WEIGHT, 0, "radial")
    with pytest.raises(ValueError, match="the round has no contributions"):
        accumulator.result()
    with pytest.raises(ValueError, match="50 values are 200 flat bytes in f32"):
        add_contribution(accumulator, torch.zeros(51), 1.0)
    with pytest.raises(ValueError, match="100 flat bytes in bf16"):
        accumulator.add_encoded(get_codec("bf16"), torch.zeros(99, dtype=torch.uint8), 1.0)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite and positive"):
            add_contribution(accumulator, torch.zeros(50), weight)
    assert accumulator.count == 0


# --------------------------------------------------------------------------------------------------------------------
# Buffers


def merge_buffers(values: list[Tensor], weights: list[float]) -> Tensor:
    sums = make_running_sums(make_single_fragment_plan(("buffer", values[0].numel())), 0, "radial")
    for value, weight in zip(values, weights, strict=True):
        sums.add_encoded(get_codec("f32"), get_codec("f32").encode(value), weight, scale=0.5)
    return sums.result().clone()


@given(seeds, st.lists(st.floats(1.0, 1e6), min_size=1, max_size=6))
def test_merged_buffers_are_the_weighted_mean_and_not_scaled(seed, weights):
    values = [random_tensor(seed + n, 40, spread=3.0) for n in range(len(weights))]
    expected = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert torch.allclose(merge_buffers(values, weights).double(), torch.as_tensor(expected), rtol=1e-4, atol=1e-3)


@given(seeds, st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6))
def test_merged_variances_are_not_negative(seed, weights):
    values = [random_tensor(seed + n, 40, spread=30.0).abs() for n in range(len(weights))]
    assert bool((merge_buffers(values, weights) >= 0.0).all())


@given(seeds, st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6))
def test_equal_buffers_are_merged_unchanged(seed, weights):
    """Constants, such as a mask of -3e38 or a table of frequencies, must not drift over merges."""
    value = torch.cat([random_tensor(seed, 40, spread=30.0), torch.tensor([-3e38, 0.0])])
    assert has_same_bits(merge_buffers([value] * len(weights), weights), value)
    trimmed = make_running_sums(make_single_fragment_plan(("buffer", 42)), 0, "trimmed")
    for weight in weights:
        trimmed.add_encoded(get_codec("f32"), get_codec("f32").encode(value), weight)
    assert torch.equal(trimmed.result(), value)
