"""Tests of the reference models: the same bits from the same seed, causal attention, and convergence."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.reference.models import (
    SIZES,
    GPTConfig,
    build_model,
    clip_gradients,
    inner_optimizer,
    lr_factor,
    parameter_count,
    set_lr,
)
from atoll.tensors import optimizer_state

DENSE = GPTConfig(layers=2, heads=2, width=16, context=8)
EXPERTS = GPTConfig(layers=2, heads=2, width=16, context=8, experts=4, mlp_ratio=2)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (4, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_same_seed_gives_the_same_bits_whatever_the_global_generator_did(config):
    one = build_model(config, 3).state_dict()
    torch.randn(5)
    two = build_model(config, 3).state_dict()
    assert all(torch.equal(one[n], two[n]) for n in one)
    other = build_model(config, 4).state_dict()
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_building_and_training_do_not_use_the_global_generator():
    before = torch.random.get_rng_state()
    model = build_model(EXPERTS, 1)
    model(tokens(), tokens()).backward()
    inner_optimizer(model).step()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("size", "minimum", "maximum"), [("100k", 8e4, 1.3e5), ("1m", 9e5, 1.2e6), ("5m", 4.5e6, 5.5e6)]
)
def test_size_has_about_the_parameters_of_its_name(size, minimum, maximum):
    model = build_model(SIZES[size], 0)
    assert minimum < parameter_count(model) < maximum
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_output_does_not_depend_on_later_tokens(config):
    model = build_model(config, 0).eval()
    x = tokens()
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_loss_of_a_fresh_model_is_that_of_uniform_probabilities():
    loss = build_model(SIZES["100k"], 0).eval()(tokens(), tokens(1)).item()
    assert abs(loss - math.log(256)) < 0.1


def test_tied_head_shares_the_weight_of_the_embedding():
    tied = build_model(DENSE, 0)
    assert tied.head.weight is tied.embedding.weight
    untied = build_model(GPTConfig(layers=1, heads=2, width=16, context=8, tie=False), 0)
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_every_optimizer_overfits_one_batch(config, name):
    model = build_model(config, 0)
    optimizer = inner_optimizer(model, name, lr=0.5 if name == "sgd" else 1e-2, weight_decay=0.0)
    x, y = tokens(), tokens(1)
    losses = []
    for _ in range(60):
        loss = model(x, y)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_every_expert_gets_a_gradient_and_evaluation_omits_the_balance_loss():
    model = build_model(EXPERTS, 0)
    x = torch.randint(0, 256, (32, 8), generator=torch.Generator().manual_seed(5))
    training = model(x, x)
    training.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(x, x) < training


def test_combined_optimizer_state_can_be_sent_to_a_joining_learner():
    """The receiver's optimizer continues exactly as that of the source."""
    source, receiver = build_model(DENSE, 0), build_model(DENSE, 0)
    source_optimizer = inner_optimizer(source, "muon", 1e-2)
    receiver_optimizer = inner_optimizer(receiver, "muon", 1e-2)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model(tokens(seed), tokens(seed + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(source, source_optimizer, 0)
    receiver.load_state_dict(source.state_dict())
    optimizer_state.unpack(optimizer_state.pack(source_optimizer, source), receiver_optimizer, receiver)
    step(source, source_optimizer, 2)
    step(receiver, receiver_optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), receiver.parameters(), strict=True))


def test_combined_optimizer_continues_after_load_state_dict():
    model = build_model(DENSE, 0)
    optimizer = inner_optimizer(model, "muon", 1e-2)
    model(tokens(), tokens(1)).backward()
    optimizer.step()
    again = inner_optimizer(model, "muon", 1e-2)
    again.load_state_dict(optimizer.state_dict())
    again.step()
    set_lr(again, 0.0)
    before = [p.clone() for p in model.parameters()]
    again.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_learning_rate_rises_then_falls_to_the_floor():
    values = [lr_factor(i / 100, warmup=0.1, floor=0.2) for i in range(101)]
    assert values[0] == 0.0
    assert max(values) == values[10] == 1.0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(0.2)
    assert lr_factor(7.0, floor=0.2) == pytest.approx(0.2)


def test_invalid_model_and_optimizer_are_refused_with_the_cause():
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        GPTConfig(layers=1, heads=4, width=10, context=8)
    with pytest.raises(ValueError, match="experts_per_token 2 exceeds experts 1"):
        GPTConfig(layers=1, heads=1, width=8, context=8, experts=1)
    with pytest.raises(ValueError, match="give --inner adamw, muon or sgd"):
        inner_optimizer(build_model(DENSE, 0), "adagrad")
