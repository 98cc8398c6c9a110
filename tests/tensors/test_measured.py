"""Figures of a merge against the direct computation, with all contributions at hand, in f64."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, get_codec
from atoll.tensors.merge import Accumulator, mean_cosine
from atoll.tensors.outer_optimizer import ERROR_SAMPLE_INTERVAL, OuterOptimizer, PublishedValue
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import make_running_sums
from atoll.tensors.settings import Numerics
from tests.tensors.tensor_samples import add_contribution, make_single_fragment_plan, random_tensor

seeds = st.integers(0, 2**32 - 1)
weights = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)

WEIGHT = make_single_fragment_plan(("weight", 50))
WEIGHTS = make_single_fragment_plan(("weight", 60), ("weight", 30))
MIXED = make_single_fragment_plan(("weight", 130), ("buffer", 7), ("embedding", 41), ("weight", 70))


def drawn(seed: int, count: int, numel: int, shared: float = 1.0) -> list[Tensor]:
    """Deltas of different length that agree in part."""
    common = random_tensor(seed, numel)
    return [(0.5 + place) * (shared * common + random_tensor(seed + 1 + place, numel)) for place in range(count)]


def direct(deltas: list[Tensor], factors: list[float]) -> float:
    """The mean over pairs, each pair looked at by itself."""
    total = found = 0.0
    for i, j in combinations(range(len(deltas)), 2):
        a, b = deltas[i].double(), deltas[j].double()
        share = factors[i] * factors[j]
        found += share * float(torch.dot(a, b) / (a.norm() * b.norm()))
        total += share
    return found / total


def directly(plan: FragmentPlan, how: str, deltas: list[Tensor], weights: list[float]) -> float:
    """Over runs by the number of their values: averaged pieces in a row are one run, a radial piece is one."""
    runs: list[tuple[bool, int, int]] = []
    for piece, begin, end in plan.spans(0):
        radial = how == "radial" and piece.kind == "weight"
        if runs and not radial and not runs[-1][0]:
            runs[-1] = (False, runs[-1][1], end)
        else:
            runs.append((radial, begin, end))
    found = 0.0
    for radial, begin, end in runs:
        parts = [delta[begin:end] for delta in deltas]
        factors = [w * (1.0 if radial else float(v.double().norm())) for v, w in zip(parts, weights, strict=True)]
        found += (end - begin) * direct(parts, factors)
    return found / plan.numel(0)


def added(plan: FragmentPlan, how: str, deltas: list[Tensor], weights: list[float]) -> Accumulator:
    sums = Accumulator(plan, 0, how)
    for delta, weight in zip(deltas, weights, strict=True):
        add_contribution(sums, delta, weight)
    sums.result()
    return sums


@pytest.mark.parametrize("how", ["average", "radial"])
@pytest.mark.parametrize("plan", [WEIGHT, WEIGHTS, MIXED], ids=["weight", "weights", "mixed"])
@given(seeds, weights, st.floats(-1.0, 2.0))
def test_the_mean_cosine_is_that_of_all_pairs(how, plan, seed, weights, shared):
    deltas = drawn(seed, len(weights), plan.numel(0), shared)
    found = added(plan, how, deltas, weights).cosine
    assert found == pytest.approx(directly(plan, how, deltas, weights), abs=3e-4)


def test_the_comparison_sees_a_formula_that_forgets_the_weights():
    deltas, given_weights = drawn(3, 3, 50), [1.0, 5.0, 25.0]
    right = directly(WEIGHT, "average", deltas, given_weights)
    assert abs(directly(WEIGHT, "average", deltas, [1.0] * 3) - right) > 1e-3


def test_equal_norms_and_weights_give_the_plain_mean():
    deltas = [delta / delta.norm() for delta in drawn(0, 4, 50)]
    pairs = [float(torch.dot(a, b)) for a, b in combinations(deltas, 2)]
    assert added(WEIGHT, "average", deltas, [7.0] * 4).cosine == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


@pytest.mark.parametrize("how", ["average", "radial"])
def test_known_angles(how):
    one = random_tensor(0, 50)
    assert added(WEIGHT, how, [one, 3 * one, one], [1.0, 2.0, 3.0]).cosine == pytest.approx(1.0, abs=1e-5)
    assert added(WEIGHT, how, [one, -one], [1.0, 1.0]).cosine == pytest.approx(-1.0, abs=1e-5)
    assert added(WEIGHT, how, [one], [1.0]).cosine is None
    assert added(WEIGHT, how, [torch.zeros(50), torch.zeros(50)], [1.0, 1.0]).cosine is None
    assert added(WEIGHT, how, [one, torch.zeros(50)], [1.0, 1.0]).cosine is None
    assert mean_cosine(0.0, 0.0, 0.0) is None


@pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
@pytest.mark.parametrize("how", ["average", "radial", "trimmed"])
def test_norms_are_those_of_what_arrived(coder, how):
    numel = MIXED.numel(0)
    sent = [coder.encode(delta) for delta in drawn(1, 3, numel)]
    values = [coder.decode(data, numel).double() for data in sent]
    sums = make_running_sums(MIXED, 0, how)
    for data in sent:
        sums.add_encoded(coder, data, 2.0, scale=0.5)
    merged = sums.result().double()
    assert sums.norms == pytest.approx([float(v.norm()) for v in values], rel=1e-5)
    assert sums.merged_norm == pytest.approx(float(merged.norm()), rel=1e-5)
    if how != "trimmed":
        assert sums.cosine == pytest.approx(directly(MIXED, how, [0.5 * v for v in values], [2.0] * 3), abs=1e-5)
    else:
        assert sums.cosine is None
    sums.reset()
    assert sums.norms == []


@pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
@pytest.mark.parametrize("how", ["average", "trimmed"])
def test_a_norm_that_is_known_is_believed_where_it_is_exact(coder, how):
    """Only codecs that say so tell it: the bound of the others is none."""
    data = coder.encode(random_tensor(5, 3000))
    exact = float(coder.decode(data, 3000).double().norm())
    told = coder.examine(data, 3000)[1]
    assert (told == pytest.approx(exact, rel=1e-5)) == coder.has_exact_norm
    sums = make_running_sums(make_single_fragment_plan(("weight", 3000)), 0, how)
    sums.add_encoded(coder, data, 1.0, known_norm=told if coder.has_exact_norm else None)
    sums.result()
    assert sums.norms == pytest.approx([exact], rel=1e-5)


def test_sizes_that_f32_cannot_square_are_measured():
    deltas = [1e19 * random_tensor(0, 50), 1e19 * random_tensor(1, 50)]
    sums = added(WEIGHT, "average", deltas, [1.0, 1.0])
    assert sums.norms == pytest.approx([float(d.double().norm()) for d in deltas], rel=1e-5)
    assert sums.cosine == pytest.approx(directly(WEIGHT, "average", deltas, [1.0, 1.0]), abs=1e-5)


@pytest.mark.parametrize(("outer", "name"), [("nesterov", "momentum_buffer"), ("adam", "exp_avg")])
def test_the_norm_of_the_momentum(outer, name):
    numel = 2 * CHUNK_NUMEL + 100
    step = OuterOptimizer(
        make_single_fragment_plan(("weight", numel)), 0, Numerics(outer=outer, outer_momentum=0.9), torch.zeros(numel)
    )
    assert step.momentum_norm() is None
    for seed in range(3):
        step.step(random_tensor(seed, numel))
    kept = [value.double() for key, value in step.state_dict().items() if key.endswith(name)]
    assert step.momentum_norm() == pytest.approx(math.sqrt(sum(float(v.square().sum()) for v in kept)), rel=1e-5)


def test_without_momentum_there_is_no_norm_of_it():
    step = OuterOptimizer(WEIGHT, 0, Numerics(outer="sgd"), torch.zeros(50))
    step.step(random_tensor(0, 50))
    assert step.momentum_norm() is None


@pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
@pytest.mark.parametrize("numel", [300, (ERROR_SAMPLE_INTERVAL + 1) * CHUNK_NUMEL + 10])
def test_the_published_step_and_what_rounding_left_out_of_it(coder, numel):
    old, precise = random_tensor(0, numel), random_tensor(1, numel)
    published = PublishedValue(coder, old.clone())
    published.advance(precise)
    step, left = (published.value - old).double(), (precise - published.value).double()
    assert published.step_norm == pytest.approx(float(step.norm()), rel=1e-4)
    assert published.quantization_error == pytest.approx(float(left.norm() / step.norm()), rel=0.02, abs=1e-7)
    assert (published.quantization_error == 0.0) == (coder is get_codec("f32"))
    still = PublishedValue(coder, old.clone())
    still.advance(old)
    assert (still.step_norm, still.quantization_error) == (0.0, 0.0)
