"""The outer step against its formula and against torch, and the published value at syncer and learner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, get_codec
from atoll.tensors.outer_optimizer import (
    PARTICIPATION_WINDOW,
    VECTOR_LANES,
    OuterOptimizer,
    PublishedValue,
    outer_state_names,
    supported_outer_optimizers,
)
from atoll.tensors.settings import Numerics
from tests.tensors.tensor_samples import has_same_bits, make_single_fragment_plan, random_tensor

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 4 * VECTOR_LANES)
rates = st.floats(0.01, 1.5)
momenta = st.sampled_from([0.0, 0.5, 0.9, 0.99])
MIXED = make_single_fragment_plan(("weight", 200), ("embedding", 30), ("weight", 128), ("weight", 1))
PLAIN = Numerics(outer_lr=1.0, outer_momentum=0.0)


def run_steps(numerics: Numerics, seed: int, numel: int, steps: int) -> Tensor:
    outer = OuterOptimizer(make_single_fragment_plan(("weight", numel)), 0, numerics, random_tensor(seed, numel))
    for step in range(steps):
        outer.step(random_tensor(seed + 1 + step, numel))
    return outer.value


@given(seeds, sizes, rates, momenta, st.integers(1, 6))
def test_nesterov_step_equals_the_formula(seed, numel, rate, mu, steps):
    """b <- mu b + D; Theta <- Theta - eta (D + mu b). Torch fuses products and sums, so the last bits may differ."""
    theta, b = random_tensor(seed, numel).double(), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        delta = random_tensor(seed + 1 + step, numel).double()
        b = mu * b + delta
        theta = theta - rate * (delta + mu * b)
    result = run_steps(Numerics(outer="nesterov", outer_lr=rate, outer_momentum=mu), seed, numel, steps)
    assert torch.allclose(result.double(), theta, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("outer", ["nesterov", "sgd"])
@given(seeds, sizes, rates, momenta, st.integers(1, 4))
def test_sgd_gives_the_same_bits_as_torch(outer, seed, numel, rate, mu, steps):
    """The size does not matter, although the fused kernel steps many tensors as one."""
    parameter = nn.Parameter(random_tensor(seed, numel))
    plain = torch.optim.SGD([parameter], lr=rate, momentum=mu, nesterov=outer == "nesterov" and mu > 0.0, fused=False)
    for step in range(steps):
        parameter.grad = random_tensor(seed + 1 + step, numel)
        plain.step()
    result = run_steps(Numerics(outer=outer, outer_lr=rate, outer_momentum=mu), seed, numel, steps)
    assert has_same_bits(result, parameter.detach())


@pytest.mark.parametrize("outer", ["nesterov", "sgd"])
def test_ramp_starts_near_plain_averaging_and_ends_at_the_settings(outer):
    """eta_n = 1 + (0.5 - 1) n / 4 and mu_n = 0.8 n / 4, up to n = 4, computed here in f64."""
    numerics = Numerics(outer=outer, outer_lr=0.5, outer_momentum=0.8, outer_ramp=4)
    ramped = OuterOptimizer(make_single_fragment_plan(("weight", 8)), 0, numerics, random_tensor(0, 8))
    theta, buffer = random_tensor(0, 8).double(), torch.zeros(8, dtype=torch.float64)
    for step, (eta, mu) in enumerate([(0.875, 0.2), (0.75, 0.4), (0.625, 0.6), (0.5, 0.8), (0.5, 0.8)]):
        delta = random_tensor(1 + step, 8)
        ramped.step(delta)
        buffer = mu * buffer + delta.double()
        theta -= eta * (delta.double() + mu * buffer if outer == "nesterov" else buffer)
        assert torch.allclose(ramped.value.double(), theta, rtol=1e-5, atol=1e-6)


def test_ramp_continues_from_stored_state():
    numerics = Numerics(outer_lr=0.5, outer_momentum=0.8, outer_ramp=6)
    numel = MIXED.numel(0)
    first, without_state = (OuterOptimizer(MIXED, 0, numerics, random_tensor(0, numel)) for _ in range(2))
    for step in range(3):
        first.step(random_tensor(1 + step, numel))
    stored = load(save({"value": first.value, **first.state_dict()}))
    second = OuterOptimizer(MIXED, 0, numerics, stored.pop("value").clone())
    second.load_state_dict(stored)
    without_state.value.copy_(first.value)
    without_state.load_state_dict({**stored, "steps": torch.tensor(0)})
    for outer in (first, second, without_state):
        outer.step(random_tensor(9, numel))
    assert has_same_bits(first.value, second.value)
    assert not has_same_bits(first.value, without_state.value), "the step count has no effect: this test proves nothing"
    with pytest.raises(ValueError, match="steps has shape nothing"):
        second.load_state_dict({name: tensor for name, tensor in stored.items() if name != "steps"})


def outer_steps(merges: list[dict[int, float]], numerics: Numerics = PLAIN) -> list[float]:
    """Return the distance that each merge of D = 1 moves a weight."""
    outer = OuterOptimizer(make_single_fragment_plan(("weight", 1)), 0, numerics, torch.zeros(1))
    distances = []
    for rates in merges:
        before = outer.value.item()
        outer.step(torch.ones(1), rates)
        distances.append(before - outer.value.item())
    return distances


def test_outer_step_is_smaller_if_learners_are_missing():
    """The step is in proportion to the usual tokens per step of the learners: 100 of 400, 300 of 400."""
    delta = torch.ones(MIXED.numel(0))
    both = {1: 100.0, 2: 300.0}
    for rates, target in ((both, 1.0), ({1: 100.0}, 0.25), ({2: 300.0}, 0.75), ({}, 1.0), (both | {3: 500.0}, 1.0)):
        outer = OuterOptimizer(MIXED, 0, PLAIN, torch.zeros(MIXED.numel(0)))
        outer.step(torch.zeros(MIXED.numel(0)), both)
        outer.step(delta, rates)
        assert torch.equal(outer.value, torch.full_like(delta, -target))
    assert bool((delta == 1.0).all()), "the delta is not changed"


def test_outer_step_is_full_with_all_learners_present_when_tokens_per_step_vary():
    rates = torch.rand((40, 3), generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 96 + 48
    merges = [
        dict(zip((3, 1, 2) if step % 2 else (1, 2, 3), row, strict=True)) for step, row in enumerate(rates.tolist())
    ]
    assert outer_steps(merges) == [1.0] * 40


def test_one_report_of_a_million_tokens_does_not_shrink_outer_steps():
    usual, outlier = {1: 1000.0, 2: 1000.0}, {1: 1e6, 2: 1000.0}
    assert outer_steps([usual] * 3 + [outlier] + [usual] * 20) == [1.0] * 24
    assert outer_steps([outlier] + [usual] * 20) == [1.0] * 21, "also as the first report"
    assert outer_steps([usual] * 3 + [outlier, {2: 1000.0}])[-1] == 0.5, "also while that learner is missing"


def test_learner_that_left_is_forgotten_after_a_window_of_merges():
    steps = outer_steps([{1: 100.0, 2: 100.0}] * 3 + [{1: 100.0}] * (PARTICIPATION_WINDOW + 1))
    assert steps[3 : 2 + PARTICIPATION_WINDOW] == [0.5] * (PARTICIPATION_WINDOW - 1)
    assert steps[2 + PARTICIPATION_WINDOW :] == [1.0] * 2


def test_outer_breadth_can_be_disabled():
    assert outer_steps([{1: 100.0, 2: 300.0}, {1: 100.0}], Numerics(outer_breadth=False)) == [1.0, 1.0]


def test_breadth_is_restored_from_the_stored_state():
    numerics = Numerics(outer_momentum=0.5)
    numel = MIXED.numel(0)
    first = OuterOptimizer(MIXED, 0, numerics, random_tensor(0, numel))
    for step in range(PARTICIPATION_WINDOW + 3):
        first.step(random_tensor(step, numel), {1: 400.0 + step, 7: 100.0 / 3} if step % 3 else {1: 400.0 + step})
    stored = load(save({"value": first.value, **first.state_dict()}))
    value = stored.pop("value")
    second, without_state = (OuterOptimizer(MIXED, 0, numerics, value.clone()) for _ in range(2))
    second.load_state_dict(stored)
    without_state.load_state_dict(
        {**stored, "breadth": torch.tensor(400.0, dtype=torch.float64)}
    )  # as earlier versions stored it
    for step in range(PARTICIPATION_WINDOW):
        for outer in (first, second, without_state):
            outer.step(random_tensor(99 + step, numel), {1: 50.0})
    assert has_same_bits(first.value, second.value)
    assert not has_same_bits(first.value, without_state.value), "stored merges have no effect: this test proves nothing"


def test_adam_step_equals_that_of_torch():
    parameter = nn.Parameter(random_tensor(0, 100))
    plain = torch.optim.Adam([parameter], lr=0.1, betas=(0.8, 0.999))
    for step in range(5):
        parameter.grad = random_tensor(1 + step, 100)
        plain.step()
    result = run_steps(Numerics(outer="adam", outer_lr=0.1, outer_momentum=0.8), 0, 100, 5)
    assert torch.allclose(result, parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("outer", supported_outer_optimizers())
def test_result_does_not_depend_on_the_layout_of_the_fragment(outer):
    """The same tensors in another plan get the same bits."""
    numerics = Numerics(outer=outer, outer_lr=0.1)
    whole = OuterOptimizer(make_single_fragment_plan(("weight", 300)), 0, numerics, random_tensor(0, 300))
    cuts = [37, 128, 135]
    parts = [
        OuterOptimizer(make_single_fragment_plan(("weight", len(v))), 0, numerics, v.clone())
        for v in torch.split(random_tensor(0, 300), cuts)
    ]
    for step in range(4):
        delta = random_tensor(1 + step, 300)
        whole.step(delta)
        for part, cut in zip(parts, torch.split(delta, cuts), strict=True):
            part.step(cut)
    assert has_same_bits(whole.value, torch.cat([part.value for part in parts]))


def test_rate_of_one_without_momentum_subtracts_the_delta_exactly():
    result = run_steps(Numerics(outer_lr=1.0, outer_momentum=0.0), 0, 100, 1)
    assert has_same_bits(result, random_tensor(0, 100) - random_tensor(1, 100))


@pytest.mark.parametrize("name", supported_outer_optimizers())
def test_buffers_are_replaced_by_the_merged_values_without_state(name):
    outer = OuterOptimizer(
        make_single_fragment_plan(("buffer", 3)), 0, Numerics(outer=name, outer_lr=0.1), torch.ones(3)
    )
    for rates in ({1: 100.0, 2: 300.0}, {1: 100.0}):
        outer.step(random_tensor(1, 3), rates)
        assert has_same_bits(outer.value, random_tensor(1, 3))
    assert outer.state_dict() == {}
    outer.load_state_dict({})


def test_value_is_updated_in_place_and_the_delta_is_not_changed():
    value, delta = random_tensor(0, 100), random_tensor(1, 100)
    outer = OuterOptimizer(make_single_fragment_plan(("weight", 100)), 0, Numerics(), value)
    before = value.clone()
    outer.step(delta)
    assert outer.value.data_ptr() == value.data_ptr()
    assert not (value == before).any()
    assert has_same_bits(delta, random_tensor(1, 100))


@pytest.mark.parametrize("outer", supported_outer_optimizers())
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_steps_after_restoring_the_state_are_bit_identical(outer, momentum, before):
    numerics = Numerics(outer=outer, outer_lr=0.1, outer_momentum=momentum)
    numel = MIXED.numel(0)
    first = OuterOptimizer(MIXED, 0, numerics, random_tensor(0, numel))
    for step in range(before):
        first.step(random_tensor(1 + step, numel))
    stored = load(save({"value": first.value, **first.state_dict()}))  # as in a file
    second = OuterOptimizer(MIXED, 0, numerics, stored.pop("value").clone())
    second.step(random_tensor(99, numel))  # its state must be replaced
    second.value.copy_(first.value)
    second.load_state_dict(stored)
    for tensor in stored.values():
        tensor.zero_()  # the optimizer must have copied them
    for step in range(3):
        first.step(random_tensor(50 + step, numel))
        second.step(random_tensor(50 + step, numel))
    assert has_same_bits(first.value, second.value)
    assert bool(first.value.isfinite().all())


def test_state_of_another_run_is_refused():
    outer = OuterOptimizer(MIXED, 0, Numerics(outer_momentum=0.9), random_tensor(0, MIXED.numel(0)))
    outer.step(random_tensor(1, MIXED.numel(0)))
    state = dict(outer.state_dict())
    name = min(state)
    with pytest.raises(ValueError, match="does not fit"):
        outer.load_state_dict({name: state[name]})
    with pytest.raises(ValueError, match="does not fit"):
        outer.load_state_dict({**state, name: state[name][1:]})
    with pytest.raises(ValueError, match="does not fit"):
        outer.load_state_dict({**state, "0.step": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="does not fit"):
        OuterOptimizer(MIXED, 0, Numerics(outer="adam"), random_tensor(0, MIXED.numel(0))).load_state_dict(state)


@pytest.mark.parametrize("outer", ["LBFGS", "SparseAdam", "Muon", "Adafactor"])
def test_unsupported_optimizer_error_lists_supported_ones(outer):
    with pytest.raises(ValueError, match=f"{outer} cannot step flat fragments .*nesterov, sgd, adam, .*AdamW"):
        OuterOptimizer(make_single_fragment_plan(("weight", 3)), 0, Numerics(outer=outer), torch.zeros(3))


@pytest.mark.parametrize("outer", ["Nope", "Optimizer", "lr_scheduler"])
def test_unknown_optimizer_error_lists_supported_ones(outer):
    with pytest.raises(ValueError, match=f"no optimizer '{outer}'; give one of nesterov, sgd, adam, .*AdamW"):
        outer_state_names(outer, 0.9)


def test_common_optimizers_of_torch_are_supported():
    assert {"nesterov", "sgd", "adam", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"} <= set(
        supported_outer_optimizers()
    )


def test_invalid_sizes_are_refused():
    plan = make_single_fragment_plan(("weight", 3))
    with pytest.raises(ValueError, match="3 values"):
        OuterOptimizer(plan, 0, Numerics(), torch.zeros(4))
    with pytest.raises(ValueError, match="3 f32 values"):
        OuterOptimizer(plan, 0, Numerics(), torch.zeros(3)).step(torch.zeros(2))
    with pytest.raises(ValueError, match="3 f32 values"):
        PublishedValue(get_codec("bf16"), torch.zeros(3)).advance(torch.zeros(2))
    with pytest.raises(ValueError, match="3 f32 values"):
        PublishedValue.apply(get_codec("bf16"), torch.zeros(3), torch.zeros(6, dtype=torch.uint8), torch.zeros(2))
    with pytest.raises(ValueError, match="6 flat bytes"):
        PublishedValue.apply(get_codec("bf16"), torch.zeros(3), torch.zeros(5, dtype=torch.uint8), torch.zeros(3))


# --- published -----------------------------------------------------------------------------------------------------

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def check_learners_follow(codec, seed: int, numel: int, rounds: int) -> tuple[PublishedValue, Tensor]:
    """Change a precise value at random, and check that learners which apply the updates have the published bits.

    One learner applies updates in place, the other one between two buffers.
    """
    precise = random_tensor(seed, numel)
    published = PublishedValue(codec, precise.clone())
    in_place, other = precise.clone(), precise.clone()
    for step in range(rounds):
        precise += random_tensor(seed + 1 + step, numel) * 0.1
        update = published.advance(precise)
        assert update.numel() == codec.encoded_size(numel)
        assert codec.examine(update, numel)[0] is None
        PublishedValue.apply(codec, in_place, update, in_place)
        other = PublishedValue.apply(codec, other, update, torch.empty(numel))
        assert has_same_bits(in_place, published.value)
        assert has_same_bits(other, published.value)
    return published, precise


@codecs
@given(seeds, st.integers(1, 700), st.integers(1, 5))
def test_learners_have_the_published_bits(codec, seed, numel, rounds):
    check_learners_follow(codec, seed, numel, rounds)


@codecs
def test_learners_have_the_published_bits_of_long_fragments(codec):
    check_learners_follow(codec, 0, 2 * CHUNK_NUMEL + 333, 2)


@codecs
def test_rounding_error_of_an_update_is_sent_later(codec):
    """While the precise value does not change, updates move the published value to it."""
    published, precise = check_learners_follow(codec, 0, 500, 3)
    first = float((published.value - precise).abs().max())
    for _ in range(12):
        published.advance(precise)
    assert float((published.value - precise).abs().max()) <= min(first, 1e-6)


def test_f32_publishes_the_precise_value():
    published, precise = check_learners_follow(get_codec("f32"), 0, 500, 3)
    assert has_same_bits(published.value, precise)
    assert published.value.data_ptr() != precise.data_ptr()


@codecs
@pytest.mark.parametrize("offset", [0, 1])
def test_update_can_be_written_into_a_buffer(codec, offset):
    buffer = torch.zeros(codec.encoded_size(300) + offset, dtype=torch.uint8)
    out = buffer[offset:]
    assert PublishedValue(codec, random_tensor(0, 300)).advance(random_tensor(1, 300), out) is out
    assert torch.equal(out, PublishedValue(codec, random_tensor(0, 300)).advance(random_tensor(1, 300)))
