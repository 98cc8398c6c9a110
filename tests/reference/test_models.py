"""The reference models: the same bits from the same seed, causal, and able to learn."""

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
def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before(config):
    one = build_model(config, 3).state_dict()
    torch.randn(5)
    two = build_model(config, 3).state_dict()
    assert all(torch.equal(one[n], two[n]) for n in one)
    other = build_model(config, 4).state_dict()
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_building_and_training_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    model = build_model(EXPERTS, 1)
    model(tokens(), tokens()).backward()
    inner_optimizer(model).step()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("size", "least", "most"), [("100k", 8e4, 1.3e5), ("1m", 9e5, 1.2e6), ("5m", 4.5e6, 5.5e6)])
def test_a_size_has_about_as_many_parameters_as_its_name_says(size, least, most):
    model = build_model(SIZES[size], 0)
    assert least < parameter_count(model) < most
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_no_token_sees_a_later_one(config):
    model = build_model(config, 0).eval()
    x = tokens()
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_a_fresh_model_knows_nothing():
    loss = build_model(SIZES["100k"], 0).eval()(tokens(), tokens(1)).item()
    assert abs(loss - math.log(256)) < 0.1


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied = build_model(DENSE, 0)
    assert tied.head.weight is tied.embedding.weight
    untied = build_model(GPTConfig(layers=1, heads=2, width=16, context=8, tie=False), 0)
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_every_optimizer_learns_a_batch_by_heart(config, name):
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


def test_every_expert_gets_a_gradient_and_only_training_counts_the_balance():
    model = build_model(EXPERTS, 0)
    x = torch.randint(0, 256, (32, 8), generator=torch.Generator().manual_seed(5))
    training = model(x, x)
    training.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(x, x) < training


def test_muon_and_adamw_together_have_one_state_that_can_travel():
    """The joining learner's optimizer goes on exactly as the giver's."""
    giver, taker = build_model(DENSE, 0), build_model(DENSE, 0)
    ours, theirs = inner_optimizer(giver, "muon", 1e-2), inner_optimizer(taker, "muon", 1e-2)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model(tokens(seed), tokens(seed + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(giver, ours, 0)
    taker.load_state_dict(giver.state_dict())
    optimizer_state.unpack(optimizer_state.pack(ours, giver), theirs, taker)
    step(giver, ours, 2)
    step(taker, theirs, 2)
    assert all(torch.equal(a, b) for a, b in zip(giver.parameters(), taker.parameters(), strict=True))


def test_muon_and_adamw_together_go_on_after_load_state_dict():
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


def test_the_schedule_rises_then_falls_to_the_floor():
    values = [lr_factor(i / 100, warmup=0.1, floor=0.2) for i in range(101)]
    assert values[0] == 0.0
    assert max(values) == values[10] == 1.0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(0.2)
    assert lr_factor(7.0, floor=0.2) == pytest.approx(0.2)


def test_nonsense_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        GPTConfig(layers=1, heads=4, width=10, context=8)
    with pytest.raises(ValueError, match="experts_per_token 2 exceeds experts 1"):
        GPTConfig(layers=1, heads=1, width=8, context=8, experts=1)
    with pytest.raises(ValueError, match="choose adamw, muon or sgd"):
        inner_optimizer(build_model(DENSE, 0), "adagrad")
