"""The streaming merge against the formulas over all contributions, in f64."""

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


def expected(plan: FragmentPlan, how: str, deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Both means as they are written down, with all contributions at hand."""
    v = torch.stack(deltas).double()
    w = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
    merged = torch.empty(v.shape[1], dtype=torch.float64)
    for piece, begin, end in plan.spans(0):
        part = v[:, begin:end]
        if how == "radial" and piece.kind == "weight":
            sizes = part.norm(dim=1, keepdim=True)
            direction = (w * part / sizes).sum(0)
            merged[begin:end] = (w * sizes).sum() / w.sum() * direction / direction.norm()
        else:
            merged[begin:end] = (w * part).sum(0) / w.sum()
    return merged


def merged(accumulator: Accumulator, deltas: list[Tensor], weights: list[float]) -> Tensor:
    for delta, weight in zip(deltas, weights, strict=True):
        add_contribution(accumulator, delta.clone(), weight)
    assert accumulator.count == len(deltas)
    return accumulator.result().clone()


def agrees(accumulator: Accumulator, plan: FragmentPlan, how: str, seed: int, weights: list[float]) -> bool:
    """Within f32 accuracy: of the largest value of the piece, as sums of values of both signs cancel."""
    deltas = [random_tensor(seed + place, plan.numel(0)) for place in range(len(weights))]
    want = expected(plan, how, deltas, weights)
    got = merged(accumulator, deltas, weights).double()
    return all(
        bool(((got - want)[begin:end].abs() <= 4e-6 * max(d[begin:end].abs().max() for d in deltas)).all())
        for _, begin, end in plan.spans(0)
    )


@pytest.mark.parametrize("how", ["average", "radial"])
@pytest.mark.parametrize(
    "plan", [MIXED, WEIGHT, make_single_fragment_plan(("embedding", 20))], ids=["mixed", "weight", "embedding"]
)
@given(seeds, weights)
def test_the_streamed_mean_is_that_of_the_formula(how, plan, seed, weights):
    assert agrees(Accumulator(plan, 0, how), plan, how, seed, weights)


class NoBars(Accumulator):
    """A bug, as the formula is printed in the paper: sizes are left out, the mean of unit vectors comes out."""

    def _direction_factor(self, run, w, size, scale):
        factor = super()._direction_factor(run, w, size, scale)
        run.weighted_norms += w - w * size
        return factor


class NotUnit(Accumulator):
    """A bug: the direction is that of the plain mean, so that large contributions decide it."""

    def _direction_factor(self, run, w, size, scale):
        super()._direction_factor(run, w, size, scale)
        return w


class Unweighted(Accumulator):
    """A bug: every learner counts the same."""

    def _relative_weight(self, weight):
        super()._relative_weight(weight)
        return 1.0


class OneNorm(Accumulator):
    """A bug: one norm for all weights of the fragment that lie side by side."""

    def __init__(self, plan, p, how):
        super().__init__(plan, p, how)
        last = self._runs[-2]
        self._runs[-3].end = last.end
        self._runs.remove(last)


@pytest.mark.parametrize("planted", [NoBars, NotUnit, Unweighted, OneNorm])
def test_the_formula_tells_a_planted_bug(planted):
    weights = [1.0, 2.0, 5.0]
    assert agrees(Accumulator(MIXED, 0, "radial"), MIXED, "radial", 0, weights)
    assert not agrees(planted(MIXED, 0, "radial"), MIXED, "radial", 0, weights)


@given(seeds, st.floats(1e-6, 1e15))
def test_one_contribution_is_its_own_mean(seed, weight):
    delta = random_tensor(seed, MIXED.numel(0))
    delta[::5] = -0.0
    assert has_same_bits(merged(Accumulator(MIXED, 0, "average"), [delta], [weight]), delta)
    assert torch.allclose(merged(Accumulator(MIXED, 0, "radial"), [delta], [weight]), delta, rtol=1e-6, atol=1e-6)


@given(seeds, st.integers(1, 9), st.floats(1e-6, 1e15))
def test_equal_weights_give_exactly_the_sum_over_m(seed, learners, weight):
    deltas = [random_tensor(seed + place, WEIGHT.numel(0)) for place in range(learners)]
    total = deltas[0].numpy()
    for delta in deltas[1:]:
        total = total + delta.numpy()
    got = merged(Accumulator(WEIGHT, 0, "average"), deltas, [weight] * learners)
    assert has_same_bits(got, torch.from_numpy(total / total.dtype.type(learners)))


def test_directions_that_cancel_give_zero():
    v = random_tensor(0, 50)
    got = merged(Accumulator(WEIGHT, 0, "radial"), [v, -3.0 * v], [2.0, 2.0])
    assert torch.equal(got, torch.zeros(50))
    # Three directions at 120 degrees cancel but for rounding, which must not be blown up to full size.
    star = [torch.zeros(50) for _ in range(3)]
    for turn, delta in enumerate(star):
        delta[0], delta[1] = math.cos(turn * 2.0 * math.pi / 3.0), math.sin(turn * 2.0 * math.pi / 3.0)
    assert torch.equal(merged(Accumulator(WEIGHT, 0, "radial"), star, [1.0] * 3), torch.zeros(50))


def test_the_radial_mean_of_orthogonal_deltas_keeps_their_size():
    """The point of it: a plain mean of M orthogonal deltas shrinks by the square root of M."""
    deltas = [torch.zeros(50) for _ in range(16)]
    for place, delta in enumerate(deltas):
        delta[place] = 2.0
    assert norm(merged(Accumulator(WEIGHT, 0, "radial"), deltas, [1.0] * 16)) == pytest.approx(2.0, rel=1e-6)
    assert norm(merged(Accumulator(WEIGHT, 0, "average"), deltas, [1.0] * 16)) == pytest.approx(0.5, rel=1e-6)


def test_a_delta_of_zero_has_size_but_no_direction():
    v = random_tensor(0, 50)
    got = merged(Accumulator(WEIGHT, 0, "radial"), [torch.zeros(50), v], [1.0, 1.0])
    assert torch.allclose(got, v / 2.0, rtol=1e-6)
    assert torch.equal(merged(Accumulator(WEIGHT, 0, "radial"), [torch.zeros(50)] * 2, [1.0, 1.0]), torch.zeros(50))


@pytest.mark.parametrize("size", [1e-25, 1e-30, 1e18, 1e25])
def test_sizes_whose_squares_leave_f32_are_merged_all_the_same(size):
    deltas = [random_tensor(place, 50) * size for place in range(3)]
    want = expected(WEIGHT, "radial", deltas, [1.0, 2.0, 3.0])
    got = merged(Accumulator(WEIGHT, 0, "radial"), deltas, [1.0, 2.0, 3.0]).double()
    assert torch.allclose(got / size, want / size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["average", "radial"])
def test_extreme_weights_and_tiny_deltas_stay_finite(how):
    deltas = [random_tensor(0, 50), random_tensor(1, 50) * 1e-44, random_tensor(2, 50) * 1e-38]
    got = merged(Accumulator(WEIGHT, 0, how), deltas, [1e-3, 1e20, 1.0])
    assert bool(got.isfinite().all())


LONG = make_single_fragment_plan(
    ("weight", 2 * CHUNK_NUMEL + 333),
    ("buffer", 77),
    ("weight", 900),
    ("embedding", CHUNK_NUMEL + 65),
    ("weight", CHUNK_NUMEL),
)


@pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
@pytest.mark.parametrize("plan", [MIXED, LONG], ids=["short", "long"])
@pytest.mark.parametrize("how", ["average", "radial"])
@pytest.mark.parametrize("offset", [0, 1])
def test_encoded_contributions_give_the_bits_of_decoded_ones(coder: Codec, plan, how, offset):
    """A replay may decode first, and memory may begin anywhere: neither may show in the result."""
    numel = plan.numel(0)
    decoded, encoded = Accumulator(plan, 0, how), Accumulator(plan, 0, how)
    for turn, weight in enumerate([3.0, 1.0, 2.5]):
        room = torch.empty(coder.encoded_size(numel) + offset, dtype=torch.uint8)[offset:]
        data = coder.encode(random_tensor(turn, numel), room)
        add_contribution(decoded, torch.cat([torch.zeros(offset), coder.decode(data, numel)])[offset:], weight)
        encoded.add_encoded(coder, data, weight)
    assert has_same_bits(decoded.result(), encoded.result())


@pytest.mark.parametrize("how", ["average", "radial"])
def test_a_reset_forgets_everything(how):
    used, fresh = Accumulator(MIXED, 0, how), Accumulator(MIXED, 0, how)
    numel = MIXED.numel(0)
    merged(used, [torch.full((numel,), math.nan), random_tensor(0, numel)], [7.0, 3.0])
    used.reset()
    assert used.count == 0
    deltas = [random_tensor(1, numel), random_tensor(2, numel)]
    assert has_same_bits(merged(used, deltas, [2.0, 3.0]), merged(fresh, deltas, [2.0, 3.0]))


def tensor_bytes(holder: object) -> int:
    """Of all tensors that an object holds, also through the objects and lists in it."""
    if isinstance(holder, Tensor):
        return holder.untyped_storage().nbytes()
    if isinstance(holder, list | tuple):
        return sum(map(tensor_bytes, holder))
    names = [*getattr(holder, "__dict__", ()), *getattr(type(holder), "__slots__", ())]
    return sum(tensor_bytes(getattr(holder, name)) for name in names)


def test_memory_does_not_depend_on_the_number_of_contributions():
    numel = LONG.numel(0)
    accumulator = Accumulator(LONG, 0, "radial")
    coder = get_codec("int4")
    data = coder.encode(random_tensor(0, numel))
    sizes = []
    for _ in range(64):
        accumulator.add_encoded(coder, data, 1.0)
        sizes.append(tensor_bytes(accumulator))
    assert set(sizes) == {sizes[0]}
    assert 4 * numel <= sizes[0] <= 4 * numel + 16 * CHUNK_NUMEL


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="average, radial"):
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


def mean_of(values: list[Tensor], weights: list[float]) -> Tensor:
    sums = make_running_sums(make_single_fragment_plan(("buffer", values[0].numel())), 0, "radial")
    for value, weight in zip(values, weights, strict=True):
        sums.add_encoded(get_codec("f32"), get_codec("f32").encode(value), weight, scale=0.5)
    return sums.result().clone()


@given(seeds, st.lists(st.floats(1.0, 1e6), min_size=1, max_size=6))
def test_buffers_are_their_weighted_mean_and_never_scaled(seed, weights):
    values = [random_tensor(seed + n, 40, spread=3.0) for n in range(len(weights))]
    wanted = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert torch.allclose(mean_of(values, weights).double(), torch.as_tensor(wanted), rtol=1e-4, atol=1e-3)


@given(seeds, st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6))
def test_a_mean_of_variances_is_not_negative(seed, weights):
    values = [random_tensor(seed + n, 40, spread=30.0).abs() for n in range(len(weights))]
    assert bool((mean_of(values, weights) >= 0.0).all())


@given(seeds, st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6))
def test_buffers_that_are_equal_everywhere_stay_as_they_are(seed, weights):
    """A constant, such as a mask of -3e38 or a table of frequencies, does not drift from merge to merge."""
    value = torch.cat([random_tensor(seed, 40, spread=30.0), torch.tensor([-3e38, 0.0])])
    assert has_same_bits(mean_of([value] * len(weights), weights), value)
    trimmed = make_running_sums(make_single_fragment_plan(("buffer", 42)), 0, "trimmed")
    for weight in weights:
        trimmed.add_encoded(get_codec("f32"), get_codec("f32").encode(value), weight)
    assert torch.equal(trimmed.result(), value)
