"""Read, write and adopt fragments of a model, bit for bit, with any dtype, strides and shape."""

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


def make_view(model: nn.Module, fragments: int = 3, method: str = "rows") -> ModelView:
    return ModelView(model, make_plan(describe_tensors(model), fragments, method))


def make_single_view(values: Tensor) -> tuple[ModelView, nn.Parameter]:
    """Return a view of a model with one parameter in one fragment, and the parameter."""
    model = nn.Module()
    model.theta = nn.Parameter(values)
    return make_view(model, 1), model.theta


def read_fragment(view: ModelView, fragment: int = 0) -> Tensor:
    out = view.buffer(fragment).fill_(torch.nan)
    view.read(fragment, out)
    return out


def random_values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --------------------------------------------------------------------------------------------------------------------
# Reading and writing


@pytest.mark.parametrize("method", PLAN_METHODS)
def test_written_values_are_read_and_each_value_has_one_position(method):
    model = Everything()
    view = make_view(model, 4, method)
    count = 0
    for fragment in range(len(view.plan.fragments)):
        values = torch.arange(count, count + view.numel(fragment), dtype=torch.float32)  # small integers: exact in bf16
        count += view.numel(fragment)
        view.write(fragment, values)
        assert torch.equal(read_fragment(view, fragment), values)
    state = [
        value
        for name, value in model.state_dict().items()
        if name in view.plan.by_name and view.plan.by_name[name].is_synced
    ]
    stored = torch.cat([value.reshape(-1).double() for value in state])
    assert sorted(stored.tolist()) == list(range(count))
    assert model.wte.weight is model.a_head.weight


def test_unsynced_tensors_are_not_changed():
    model = Everything()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    view = make_view(model)
    for fragment in range(3):
        view.write(fragment, random_values(view.numel(fragment)))
    for name in ("base", "mask", "norm.num_batches_tracked"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert torch.equal(model.rotary, torch.ones(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype):
    plain = random_values(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    view, theta = make_single_view(plain.clone().to(memory_format=torch.channels_last))
    assert not theta.is_contiguous()
    assert torch.equal(read_fragment(view), plain.float().reshape(-1))
    value = random_values(120, 1)
    view.adopt(0, "carry", value, read_fragment(view))
    assert torch.equal(theta.detach(), value.to(dtype).reshape(2, 3, 4, 5))
    assert not theta.is_contiguous()


def test_replaced_tensors_of_a_module_are_read_and_written():
    model = nn.BatchNorm1d(2)
    view = make_view(model, 1, "balanced")
    model.running_mean = torch.tensor([5.0, 6.0])
    model.weight.data = torch.tensor([7.0, 8.0])
    assert [read_fragment(view, p).tolist() for p in range(2)] == [[0.0, 0.0, 7.0, 8.0], [5.0, 6.0, 1.0, 1.0]]
    view.write(0, torch.arange(4.0))
    view.write(1, torch.arange(4.0, 8.0))
    assert model.running_mean.tolist() == [4.0, 5.0]
    assert model.weight.tolist() == [2.0, 3.0]


def test_begin_read_copies_at_the_call():
    view, theta = make_single_view(torch.ones(4))
    out = view.buffer(0)
    finish = view.begin_read(0, out)
    with torch.no_grad():
        theta.fill_(2.0)
    finish()
    assert out.tolist() == [1.0] * 4


def test_adopt_and_write_are_not_recorded_by_autograd():
    view, theta = make_single_view(torch.ones(3))
    (theta * 2).sum().backward()
    view.adopt(0, "blend", torch.zeros(3), None, 0.5)
    assert theta.grad is not None
    assert theta.grad.tolist() == [2.0] * 3
    assert theta.requires_grad
    assert theta.is_leaf
    loss = (theta * theta).sum()
    view.write(0, torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch detects the change
        loss.backward()


@pytest.mark.parametrize(
    "flat", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]]
)
def test_flat_fragment_of_another_form_is_refused(flat):
    view, _ = make_single_view(torch.ones(4))
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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("numel", [1, 1000, ADOPT_CHUNK_NUMEL + 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_adoption_method_equals_its_formula_rounded_once(dtype, numel):
    value, reference, start = random_values(numel, 1), random_values(numel, 2), random_values(numel, 3).to(dtype)
    theta = start.to(compute_dtype(dtype))
    expected = {
        ("overwrite", 0.0): value,
        ("blend", 0.3): 0.3 * theta + (1.0 - 0.3) * value,
        ("blend", 0.0): value,
        ("blend", 1.0): theta,
        ("carry", 0.0): value + (theta - reference),
    }
    for (method, alpha), result in expected.items():
        view, parameter = make_single_view(start.clone())
        view.adopt(0, method, value, reference, alpha)
        assert has_same_bits(parameter.detach(), result.to(dtype)), method


FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20)


@given(FLOATS, st.data())
def test_carry_without_local_steps_gives_exactly_the_value(values, data):
    value = torch.tensor(values)
    start = torch.tensor(
        data.draw(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=len(values), max_size=len(values)))
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        view, theta = make_single_view(start.to(dtype, copy=True))
        view.adopt(0, "carry", value, read_fragment(view))
        assert has_same_bits(theta.detach(), value.to(dtype))  # also the sign of zero


def test_carry_preserves_f64_precision():
    view, theta = make_single_view(torch.tensor([1.0 + 1e-12], dtype=torch.float64))
    view.adopt(0, "carry", torch.tensor([2.0]), torch.tensor([1.0]))
    assert theta.item() == 2.0 + ((1.0 + 1e-12) - 1.0)


def test_0_dimensional_parameter_is_adopted():
    view, theta = make_single_view(torch.tensor(1.0))
    view.adopt(0, "carry", torch.tensor([10.0]), torch.tensor([0.5]))
    assert theta.item() == 10.5


def test_staged_value_is_adopted_like_the_flat_one():
    results = []
    for is_staged in (False, True):
        model = Everything()
        with torch.no_grad():
            model.wte.weight.fill_(0.5)
        view = make_view(model, 2)
        for fragment in range(2):
            value, reference = random_values(view.numel(fragment), 1), random_values(view.numel(fragment), 2)
            if is_staged:
                view.adopt(fragment, "carry", view.stage(fragment, value), view.stage(fragment, reference))
            else:
                view.adopt(fragment, "carry", value, reference)
        results.append(torch.cat([read_fragment(view, fragment) for fragment in range(2)]))
    assert has_same_bits(*results)


def test_unknown_method_and_missing_reference_are_refused():
    view, _ = make_single_view(torch.ones(2))
    with pytest.raises(ValueError, match="unknown method 'merge'"):
        view.adopt(0, "merge", torch.ones(2), None)
    with pytest.raises(ValueError, match="carry needs the reference"):
        view.adopt(0, "carry", torch.ones(2), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_dtype_equals_writing_and_reading(dtype):
    view, _ = make_single_view(torch.zeros(500, dtype=dtype))
    value = random_values(500)
    out = torch.empty(500)
    view.round_to_dtype(0, value, out)
    view.write(0, value)
    assert has_same_bits(out, read_fragment(view))
    assert view.is_f32_exact(0) == has_same_bits(out, value) == (dtype in (torch.float32, torch.float64))
    view.round_to_dtype(0, value, value)
    assert has_same_bits(value, out)


def test_rounding_to_bf16_weights_adds_no_delta():
    """A learner without steps since its adoption sends a delta of exactly zero."""
    view, _ = make_single_view(torch.zeros(100, dtype=torch.bfloat16))
    published, anchor = random_values(100), torch.empty(100)
    view.write(0, published)
    view.round_to_dtype(0, published, anchor)
    assert torch.count_nonzero(anchor - read_fragment(view)) == 0
    assert torch.count_nonzero(published - read_fragment(view)) > 0


# --------------------------------------------------------------------------------------------------------------------
# Models that do not fit the plan


def test_first_difference_between_model_and_plan_is_named():
    plan = make_plan(describe_tensors(nn.Linear(3, 2)), 2, "balanced")
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    for model, message in (
        (nn.Linear(3, 2, bias=False), "the plan has bias 2 float32 weight, which the model lacks"),
        (nn.Linear(4, 2), "the model has weight 2x4 float32 weight, the plan weight 2x3 float32 weight"),
        (nn.Linear(3, 2).bfloat16(), "the model has bias 2 bfloat16 weight, the plan bias 2 float32"),
        (nn.Sequential(nn.Linear(3, 2)), "the model has 0.bias 2 float32 weight, which the plan lacks"),
        (frozen, "the model has bias 2 float32 frozen"),
    ):
        with pytest.raises(ValueError, match=message):
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


def test_plan_decides_which_weights_are_embeddings():
    model = nn.Linear(3, 2)
    view = ModelView(model, make_plan(describe_tensors(model, ["weight"]), 1, "balanced"))
    assert [piece.kind for piece in view.plan.fragments[0]] == ["weight", "embedding"]


# --------------------------------------------------------------------------------------------------------------------
# CUDA


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_and_cpu_give_the_same_bits(dtype):
    value, reference, start = random_values(1000, 1), random_values(1000, 2), random_values(1000, 3).to(dtype)
    for method in ("overwrite", "blend", "carry"):
        results = []
        for device in ("cpu", "cuda"):
            view, theta = make_single_view(start.clone().to(device))
            staged = view.stage(0, value)
            view.adopt(0, method, staged, reference, 0.25)
            out = view.buffer(0)
            finish = view.begin_read(0, out)
            with torch.no_grad():
                theta.zero_()
            finish()
            results.append(out)
        assert has_same_bits(*results)
