"""Statistics of a merge against their direct computation from all contributions, in f64."""

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


def draw_deltas(seed: int, count: int, numel: int, shared_share: float = 1.0) -> list[Tensor]:
    """Return deltas of different norms that have a common part; `shared_share` is its weight."""
    common = random_tensor(seed, numel)
    return [(0.5 + index) * (shared_share * common + random_tensor(seed + 1 + index, numel)) for index in range(count)]


def mean_pair_cosine(deltas: list[Tensor], factors: list[float]) -> float:
    """Return the weighted mean of the cosines of all pairs."""
    total = weighted = 0.0
    for i, j in combinations(range(len(deltas)), 2):
        a, b = deltas[i].double(), deltas[j].double()
        share = factors[i] * factors[j]
        weighted += share * float(torch.dot(a, b) / (a.norm() * b.norm()))
        total += share
    return weighted / total


def expected_cosine(plan: FragmentPlan, method: str, deltas: list[Tensor], weights: list[float]) -> float:
    """Return the mean over runs, weighted by size. Adjacent averaged pieces are one run, a radial piece is one run."""
    runs: list[tuple[bool, int, int]] = []
    for piece, begin, end in plan.spans(0):
        is_radial = method == "radial" and piece.kind == "weight"
        if runs and not is_radial and not runs[-1][0]:
            runs[-1] = (False, runs[-1][1], end)
        else:
            runs.append((is_radial, begin, end))
    total = 0.0
    for is_radial, begin, end in runs:
        parts = [delta[begin:end] for delta in deltas]
        factors = [w * (1.0 if is_radial else float(v.double().norm())) for v, w in zip(parts, weights, strict=True)]
        total += (end - begin) * mean_pair_cosine(parts, factors)
    return total / plan.numel(0)


def accumulate(plan: FragmentPlan, method: str, deltas: list[Tensor], weights: list[float]) -> Accumulator:
    sums = Accumulator(plan, 0, method)
    for delta, weight in zip(deltas, weights, strict=True):
        add_contribution(sums, delta, weight)
    sums.result()
    return sums


@pytest.mark.parametrize("method", ["average", "radial"])
@pytest.mark.parametrize("plan", [WEIGHT, WEIGHTS, MIXED], ids=["weight", "weights", "mixed"])
@given(seeds, weights, st.floats(-1.0, 2.0))
def test_cosine_is_the_mean_over_all_pairs(method, plan, seed, weights, shared_share):
    deltas = draw_deltas(seed, len(weights), plan.numel(0), shared_share)
    cosine = accumulate(plan, method, deltas, weights).cosine
    assert cosine == pytest.approx(expected_cosine(plan, method, deltas, weights), abs=3e-4)


def test_cosine_check_depends_on_the_weights():
    deltas, weights = draw_deltas(3, 3, 50), [1.0, 5.0, 25.0]
    weighted = expected_cosine(WEIGHT, "average", deltas, weights)
    assert abs(expected_cosine(WEIGHT, "average", deltas, [1.0] * 3) - weighted) > 1e-3


def test_cosine_of_equal_norms_and_weights_is_the_plain_mean():
    deltas = [delta / delta.norm() for delta in draw_deltas(0, 4, 50)]
    pairs = [float(torch.dot(a, b)) for a, b in combinations(deltas, 2)]
    assert accumulate(WEIGHT, "average", deltas, [7.0] * 4).cosine == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


@pytest.mark.parametrize("method", ["average", "radial"])
def test_cosine_of_known_angles(method):
    one = random_tensor(0, 50)
    assert accumulate(WEIGHT, method, [one, 3 * one, one], [1.0, 2.0, 3.0]).cosine == pytest.approx(1.0, abs=1e-5)
    assert accumulate(WEIGHT, method, [one, -one], [1.0, 1.0]).cosine == pytest.approx(-1.0, abs=1e-5)
    assert accumulate(WEIGHT, method, [one], [1.0]).cosine is None
    assert accumulate(WEIGHT, method, [torch.zeros(50), torch.zeros(50)], [1.0, 1.0]).cosine is None
    assert accumulate(WEIGHT, method, [one, torch.zeros(50)], [1.0, 1.0]).cosine is None
    assert mean_cosine(0.0, 0.0, 0.0) is None


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("method", ["average", "radial", "trimmed"])
def test_norms_are_those_of_decoded_contributions(codec, method):
    numel = MIXED.numel(0)
    sent = [codec.encode(delta) for delta in draw_deltas(1, 3, numel)]
    values = [codec.decode(data, numel).double() for data in sent]
    sums = make_running_sums(MIXED, 0, method)
    for data in sent:
        sums.add_encoded(codec, data, 2.0, scale=0.5)
    merged = sums.result().double()
    assert sums.norms == pytest.approx([float(v.norm()) for v in values], rel=1e-5)
    assert sums.merged_norm == pytest.approx(float(merged.norm()), rel=1e-5)
    if method != "trimmed":
        assert sums.cosine == pytest.approx(
            expected_cosine(MIXED, method, [0.5 * v for v in values], [2.0] * 3), abs=1e-5
        )
    else:
        assert sums.cosine is None
    sums.reset()
    assert sums.norms == []


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("method", ["average", "trimmed"])
def test_known_norm_is_used_for_codecs_with_exact_norm(codec, method):
    data = codec.encode(random_tensor(5, 3000))
    exact = float(codec.decode(data, 3000).double().norm())
    reported = codec.examine(data, 3000)[1]
    assert (reported == pytest.approx(exact, rel=1e-5)) == codec.has_exact_norm
    sums = make_running_sums(make_single_fragment_plan(("weight", 3000)), 0, method)
    sums.add_encoded(codec, data, 1.0, known_norm=reported if codec.has_exact_norm else None)
    sums.result()
    assert sums.norms == pytest.approx([exact], rel=1e-5)


def test_norms_whose_squares_overflow_f32_are_measured():
    deltas = [1e19 * random_tensor(0, 50), 1e19 * random_tensor(1, 50)]
    sums = accumulate(WEIGHT, "average", deltas, [1.0, 1.0])
    assert sums.norms == pytest.approx([float(d.double().norm()) for d in deltas], rel=1e-5)
    assert sums.cosine == pytest.approx(expected_cosine(WEIGHT, "average", deltas, [1.0, 1.0]), abs=1e-5)


@pytest.mark.parametrize(("outer", "name"), [("nesterov", "momentum_buffer"), ("adam", "exp_avg")])
def test_momentum_norm(outer, name):
    numel = 2 * CHUNK_NUMEL + 100
    step = OuterOptimizer(
        make_single_fragment_plan(("weight", numel)), 0, Numerics(outer=outer, outer_momentum=0.9), torch.zeros(numel)
    )
    assert step.momentum_norm() is None
    for seed in range(3):
        step.step(random_tensor(seed, numel))
    momenta = [value.double() for key, value in step.state_dict().items() if key.endswith(name)]
    assert step.momentum_norm() == pytest.approx(math.sqrt(sum(float(v.square().sum()) for v in momenta)), rel=1e-5)


def test_momentum_norm_is_none_without_momentum():
    step = OuterOptimizer(WEIGHT, 0, Numerics(outer="sgd"), torch.zeros(50))
    step.step(random_tensor(0, 50))
    assert step.momentum_norm() is None


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("numel", [300, (ERROR_SAMPLE_INTERVAL + 1) * CHUNK_NUMEL + 10])
def test_step_norm_and_quantization_error_of_published_value(codec, numel):
    old, precise = random_tensor(0, numel), random_tensor(1, numel)
    published = PublishedValue(codec, old.clone())
    published.advance(precise)
    step, residual = (published.value - old).double(), (precise - published.value).double()
    assert published.step_norm == pytest.approx(float(step.norm()), rel=1e-4)
    assert published.quantization_error == pytest.approx(float(residual.norm() / step.norm()), rel=0.02, abs=1e-7)
    assert (published.quantization_error == 0.0) == (codec is get_codec("f32"))
    unchanged = PublishedValue(codec, old.clone())
    unchanged.advance(old)
    assert (unchanged.step_norm, unchanged.quantization_error) == (0.0, 0.0)
