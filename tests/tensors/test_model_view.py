"""Fragments of a model: read, written and adopted to the last bit, whatever dtype, strides and shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.tensors.model_view import ADOPT_CHUNK_NUMEL, ModelView
from atoll.tensors.plan import PLAN_METHODS, describe_tensors, make_plan
from tests.tensors.test_plan import Everything

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def cut(model: nn.Module, fragments: int = 3, how: str = "rows") -> ModelView:
    return ModelView(model, make_plan(describe_tensors(model), fragments, how))


def one(values: Tensor) -> tuple[ModelView, nn.Parameter]:
    """A model of one parameter in one fragment."""
    model = nn.Module()
    model.theta = nn.Parameter(values)
    return cut(model, 1), model.theta


def read(view: ModelView, fragment: int = 0) -> Tensor:
    out = view.buffer(fragment).fill_(torch.nan)
    view.read(fragment, out)
    return out


def draw(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --------------------------------------------------------------------------------------------------------------------
# Reading and writing


@pytest.mark.parametrize("how", PLAN_METHODS)
def test_what_is_written_is_read_and_every_number_has_its_place(how):
    model = Everything()
    view = cut(model, 4, how)
    at = 0
    for fragment in range(len(view.plan.fragments)):
        values = torch.arange(at, at + view.numel(fragment), dtype=torch.float32)  # small whole numbers: exact in bf16
        at += view.numel(fragment)
        view.write(fragment, values)
        assert torch.equal(read(view, fragment), values)
    state = [
        value
        for name, value in model.state_dict().items()
        if name in view.plan.by_name and view.plan.by_name[name].is_synced
    ]
    numbers = torch.cat([value.reshape(-1).double() for value in state])
    assert sorted(numbers.tolist()) == list(range(at))
    assert model.wte.weight is model.a_head.weight


def test_what_does_not_travel_is_left_alone():
    model = Everything()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    view = cut(model)
    for fragment in range(3):
        view.write(fragment, draw(view.numel(fragment)))
    for name in ("base", "mask", "norm.num_batches_tracked"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert torch.equal(model.rotary, torch.ones(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype):
    plain = draw(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    view, theta = one(plain.clone().to(memory_format=torch.channels_last))
    assert not theta.is_contiguous()
    assert torch.equal(read(view), plain.float().reshape(-1))
    value = draw(120, 1)
    view.adopt(0, "carry", value, read(view))
    assert torch.equal(theta.detach(), value.to(dtype).reshape(2, 3, 4, 5))
    assert not theta.is_contiguous()


def test_a_module_may_put_new_tensors_in_the_place_of_its_own():
    model = nn.BatchNorm1d(2)
    view = cut(model, 1, "balanced")
    model.running_mean = torch.tensor([5.0, 6.0])
    model.weight.data = torch.tensor([7.0, 8.0])
    assert [read(view, p).tolist() for p in range(2)] == [[0.0, 0.0, 7.0, 8.0], [5.0, 6.0, 1.0, 1.0]]
    view.write(0, torch.arange(4.0))
    view.write(1, torch.arange(4.0, 8.0))
    assert model.running_mean.tolist() == [4.0, 5.0]
    assert model.weight.tolist() == [2.0, 3.0]


def test_a_copy_is_taken_at_the_call():
    view, theta = one(torch.ones(4))
    out = view.buffer(0)
    done = view.begin_read(0, out)
    with torch.no_grad():
        theta.fill_(2.0)
    done()
    assert out.tolist() == [1.0] * 4


def test_gradients_and_the_graph_stay_out_of_it():
    view, theta = one(torch.ones(3))
    (theta * 2).sum().backward()
    view.adopt(0, "blend", torch.zeros(3), None, 0.5)
    assert theta.grad is not None
    assert theta.grad.tolist() == [2.0] * 3
    assert theta.requires_grad
    assert theta.is_leaf
    loss = (theta * theta).sum()
    view.write(0, torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch sees that it was changed
        loss.backward()


@pytest.mark.parametrize(
    "flat", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]]
)
def test_a_flat_fragment_of_another_form_is_refused(flat):
    view, _ = one(torch.ones(4))
    for use in (
        view.read,
        view.write,
        lambda p, x: view.round_to_dtype(p, x, x),
        lambda p, x: view.adopt(p, "carry", x, x),
    ):
        with pytest.raises(ValueError, match="fragment 0 is a flat f32 tensor of 4 elements"):
            use(0, flat)


# --------------------------------------------------------------------------------------------------------------------
# Adopting


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("numel", [1, 1000, ADOPT_CHUNK_NUMEL + 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_adopt_is_its_formula_rounded_once(dtype, numel):
    value, reference, start = draw(numel, 1), draw(numel, 2), draw(numel, 3).to(dtype)
    theta = start.to(wide(dtype))
    expected = {
        ("overwrite", 0.0): value,
        ("blend", 0.3): 0.3 * theta + (1.0 - 0.3) * value,
        ("blend", 0.0): value,
        ("blend", 1.0): theta,
        ("carry", 0.0): value + (theta - reference),
    }
    for (how, alpha), result in expected.items():
        view, held = one(start.clone())
        view.adopt(0, how, value, reference, alpha)
        assert same_bits(held.detach(), result.to(dtype)), how


FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20)


@given(FLOATS, st.data())
def test_carry_of_nothing_is_exactly_the_value(values, data):
    value = torch.tensor(values)
    start = torch.tensor(
        data.draw(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=len(values), max_size=len(values)))
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        view, theta = one(start.to(dtype, copy=True))
        view.adopt(0, "carry", value, read(view))
        assert same_bits(theta.detach(), value.to(dtype))  # the sign of zero, too


def test_carry_keeps_of_f64_what_f32_cannot_hold():
    view, theta = one(torch.tensor([1.0 + 1e-12], dtype=torch.float64))
    view.adopt(0, "carry", torch.tensor([2.0]), torch.tensor([1.0]))
    assert theta.item() == 2.0 + ((1.0 + 1e-12) - 1.0)


def test_a_0_dimensional_parameter_is_adopted():
    view, theta = one(torch.tensor(1.0))
    view.adopt(0, "carry", torch.tensor([10.0]), torch.tensor([0.5]))
    assert theta.item() == 10.5


def test_a_staged_value_is_adopted_as_the_flat_one():
    results = []
    for staged in (False, True):
        model = Everything()
        with torch.no_grad():
            model.wte.weight.fill_(0.5)
        view = cut(model, 2)
        for fragment in range(2):
            value, reference = draw(view.numel(fragment), 1), draw(view.numel(fragment), 2)
            if staged:
                view.adopt(fragment, "carry", view.stage(fragment, value), view.stage(fragment, reference))
            else:
                view.adopt(fragment, "carry", value, reference)
        results.append(torch.cat([read(view, fragment) for fragment in range(2)]))
    assert same_bits(*results)


def test_unknown_or_incomplete_ways_to_adopt_are_refused():
    view, _ = one(torch.ones(2))
    with pytest.raises(ValueError, match="unknown method 'merge'"):
        view.adopt(0, "merge", torch.ones(2), None)
    with pytest.raises(ValueError, match="carry needs the reference"):
        view.adopt(0, "carry", torch.ones(2), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_held_is_what_a_written_value_reads_as(dtype):
    view, _ = one(torch.zeros(500, dtype=dtype))
    value = draw(500)
    out = torch.empty(500)
    view.round_to_dtype(0, value, out)
    view.write(0, value)
    assert same_bits(out, read(view))
    assert view.is_f32_exact(0) == same_bits(out, value) == (dtype in (torch.float32, torch.float64))
    view.round_to_dtype(0, value, value)
    assert same_bits(value, out)


def test_rounding_to_bf16_weights_is_nobodys_training():
    """A learner that took no step since it adopted sends a delta of exactly zero."""
    view, _ = one(torch.zeros(100, dtype=torch.bfloat16))
    published, anchor = draw(100), torch.empty(100)
    view.write(0, published)
    view.round_to_dtype(0, published, anchor)
    assert torch.count_nonzero(anchor - read(view)) == 0
    assert torch.count_nonzero(published - read(view)) > 0


# --------------------------------------------------------------------------------------------------------------------
# The model must be the one of the plan


def test_the_first_difference_between_model_and_plan_is_named():
    plan = make_plan(describe_tensors(nn.Linear(3, 2)), 2, "balanced")
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    for model, sentence in (
        (nn.Linear(3, 2, bias=False), "the plan has bias 2 float32 weight, which the model lacks"),
        (nn.Linear(4, 2), "the model has weight 2x4 float32 weight, the plan weight 2x3 float32 weight"),
        (nn.Linear(3, 2).bfloat16(), "the model has bias 2 bfloat16 weight, the plan bias 2 float32"),
        (nn.Sequential(nn.Linear(3, 2)), "the model has 0.bias 2 float32 weight, which the plan lacks"),
        (frozen, "the model has bias 2 float32 frozen"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ModelView(model, plan)


def test_frozen_weights_of_another_checkpoint_are_refused():
    def model(fill: float) -> nn.Module:
        base = nn.Linear(2, 2).requires_grad_(False)
        nn.init.constant_(base.weight, fill)
        nn.init.zeros_(base.bias)
        return nn.Sequential(base, nn.Linear(2, 2))

    plan = make_plan(describe_tensors(model(1.0)), 2, "balanced")
    ModelView(model(1.0), plan)
    with pytest.raises(ValueError, match=r"0\.weight 2x2 float32 frozen"):
        ModelView(model(2.0), plan)


def test_which_weights_are_embeddings_is_for_the_plan_to_say():
    model = nn.Linear(3, 2)
    view = ModelView(model, make_plan(describe_tensors(model, ["weight"]), 1, "balanced"))
    assert [piece.kind for piece in view.plan.fragments[0]] == ["weight", "embedding"]


# --------------------------------------------------------------------------------------------------------------------
# CUDA


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_gives_the_same_bits_as_the_cpu(dtype):
    value, reference, start = draw(1000, 1), draw(1000, 2), draw(1000, 3).to(dtype)
    for how in ("overwrite", "blend", "carry"):
        results = []
        for device in ("cpu", "cuda"):
            view, theta = one(start.clone().to(device))
            staged = view.stage(0, value)
            view.adopt(0, how, staged, reference, 0.25)
            out = view.buffer(0)
            done = view.begin_read(0, out)
            with torch.no_grad():
                theta.zero_()
            done()
            results.append(out)
        assert same_bits(*results)
