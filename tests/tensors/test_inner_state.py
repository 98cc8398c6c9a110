"""The state of an inner optimizer travels by name: the next steps are the giver's, to the last bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from atoll.tensors.optimizer_state import (
    check_has_state,
    copy_state,
    pack,
    pack_copy,
    prepare,
    read,
    track_counters,
    unpack,
)
from tests.tensors.custom_optimizers import (
    ChainedOptimizers,
    LazyCounters,
    ProdigyLike,
    ScheduleFreeLike,
    Uncloneable,
    WrappingOptimizer,
    make_two_optimizers,
)

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adam fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}


class Model(nn.Module):
    """With a tied, a frozen and a scalar parameter, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.base = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.embed(tokens) + self.base))) * self.scale


def built(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def groups(model: nn.Module, turned: bool = False) -> list[dict[str, Any]]:
    """Two groups; `turned` has them, and what is in them, in another order."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    large = [parameter for parameter in trained if parameter.dim() > 1]
    small = [parameter for parameter in trained if parameter.dim() <= 1]
    made: list[dict[str, Any]] = [{"params": large, "weight_decay": 0.1}, {"params": small}]
    return [{**group, "params": group["params"][::-1]} for group in reversed(made)] if turned else made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_bit_identical(name, dtype):
    giver = built().to(dtype)
    given_optimizer = OPTIMIZERS[name](groups(giver))
    train(giver, given_optimizer, range(5))
    data = pack(given_optimizer, giver)

    joiner = built(1).to(dtype)
    joined = OPTIMIZERS[name](groups(joiner, turned=True))
    train(joiner, joined, range(90, 93))  # it had a state of its own, which must be gone
    joiner.load_state_dict(giver.state_dict())
    unpack(data, joined, joiner)
    assert equal(giver, joiner)
    train(giver, given_optimizer, range(5, 10))
    train(joiner, joined, range(5, 10))
    assert equal(giver, joiner)


def test_a_fresh_optimizer_takes_it_too_and_shares_nothing():
    giver, joiner = built(), built()
    optimizer, joined = torch.optim.AdamW(giver.parameters()), torch.optim.AdamW(joiner.parameters())
    train(giver, optimizer, range(3))
    joiner.load_state_dict(giver.state_dict())
    data = pack(optimizer, giver)
    unpack(bytearray(data), joined, joiner)
    train(giver, optimizer, range(3, 5))
    assert pack(joined, joiner) == data
    train(joiner, joined, range(3, 5))
    assert equal(giver, joiner)


def test_what_the_giver_has_no_state_for_has_none_here():
    giver, joiner = built(), built()
    fresh, joined = torch.optim.Adam(giver.parameters()), torch.optim.Adam(joiner.parameters())
    train(joiner, joined, range(3))
    unpack(pack(fresh, giver), joined, joiner)
    assert not joined.state


def test_what_was_taken_does_not_move_with_the_training():
    model = built()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    taken, then = copy_state(optimizer, model), pack(optimizer, model)
    train(model, optimizer, range(2, 4))
    assert pack_copy(taken) == then != pack(optimizer, model)


def test_settings_of_groups_do_not_travel():
    model = built()
    giver, joined = torch.optim.Adam(model.parameters(), lr=0.5), torch.optim.Adam(model.parameters(), lr=0.25)
    unpack(pack(giver, model), joined, model)
    assert joined.param_groups[0]["lr"] == 0.25


# --------------------------------------------------------------------------------------------------------------------
# Counters in parameter groups

COUNTING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "schedule-free": ScheduleFreeLike,
    "prodigy": ProdigyLike,
    "adan": LazyCounters,
    "without hooks": lambda groups: WrappingOptimizer(torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_counters_in_param_groups_travel(name):
    """The joiner's next steps are the giver's. With fresh counters the first one is many times as large."""
    giver, joiner, fresh = built(), built(1), built(1)
    given_optimizer = COUNTING[name](groups(giver))
    joined, alone = COUNTING[name](groups(joiner, turned=True)), COUNTING[name](groups(fresh))
    for optimizer in (given_optimizer, joined, alone):
        track_counters(optimizer)
    train(giver, given_optimizer, range(8))
    data = pack(given_optimizer, giver)
    for model in (joiner, fresh):
        model.load_state_dict(giver.state_dict())
    unpack(data, joined, joiner)
    assert pack(joined, joiner) == data, "a joiner gives on what it got, before its own first step too"
    train(giver, given_optimizer, range(8, 12))
    train(joiner, joined, range(8, 12))
    train(fresh, alone, range(8, 12))
    assert equal(giver, joiner)
    assert not equal(giver, fresh), "the counters matter"


def test_what_schedulers_and_loops_change_between_steps_does_not_travel():
    giver, joiner = built(), built()
    optimizers = [torch.optim.SGD(groups(model), lr=0.1, momentum=0.9) for model in (giver, joiner)]
    track_counters(optimizers[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=1.0, total_steps=9)
    for step in range(5):
        train(giver, optimizers[0], range(step, step + 1))
        schedule.step()
        optimizers[0].param_groups[0]["weight_decay"] = 0.5 + step
    before = copy.deepcopy(optimizers[1].state_dict()["param_groups"])
    unpack(pack(optimizers[0], giver), optimizers[1], joiner)
    assert optimizers[1].state_dict()["param_groups"] == before


def test_the_mode_of_weights_travels_with_them():
    """The published weights are those for training: the joiner must not turn them into such a second time."""
    giver, joiner = built(), built()
    optimizer, joined = ScheduleFreeLike(groups(giver)), ScheduleFreeLike(groups(joiner))
    optimizer.train()
    unpack(pack(optimizer, giver), joined, joiner)
    assert [group["train_mode"] for group in joined.param_groups] == [True, True]


def test_a_counter_that_is_a_tensor_stays_the_same_tensor():
    giver, joiner = built(), built()
    optimizer, joined = LazyCounters(groups(giver)), LazyCounters(groups(joiner))
    track_counters(optimizer)
    train(giver, optimizer, range(3))
    train(joiner, joined, range(1))
    held = joined.param_groups[0]["seen"]
    unpack(pack(optimizer, giver), joined, joiner)
    assert joined.param_groups[0]["seen"] is held
    assert float(held) == 3.0


def test_what_came_is_counted():
    model = built()
    optimizer = ScheduleFreeLike(groups(model))
    track_counters(optimizer)
    train(model, optimizer, range(2))
    prepared = prepare(*read(pack(optimizer, model)), optimizer, model)
    assert str(prepared) == "4 state tensors and 8 counters"  # k, weight_sum, lr_max and train_mode of two groups


# --------------------------------------------------------------------------------------------------------------------
# Several optimizers


def test_the_state_of_a_list_of_optimizers_travels():
    giver, joiner = built(), built(1)
    given_optimizers, joined = make_two_optimizers(giver), make_two_optimizers(joiner)[::-1]

    def train_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            train(model, ChainedOptimizers(*optimizers), range(step, step + 1))

    train_all(giver, given_optimizers, range(4))
    joiner.load_state_dict(giver.state_dict())
    unpack(pack(given_optimizers, giver), joined, joiner)
    train_all(giver, given_optimizers, range(4, 8))
    train_all(joiner, joined, range(4, 8))
    assert equal(giver, joiner)


def test_a_list_of_optimizers_that_divide_the_parameters_differently_is_refused_by_name():
    model, other = built(), built()
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    names = dict(other.named_parameters())
    most = [parameter for name, parameter in names.items() if name != "inner.weight" and parameter.requires_grad]
    swapped = [sgd([names["inner.weight"]], lr=0.1, momentum=0.9), adamw(most)]
    optimizers = make_two_optimizers(model)
    with pytest.raises(ValueError, match=r"embed.weight differs: .*'optimizer': 'SGD'.*'optimizer': 'AdamW'"):
        unpack(pack(optimizers, model), swapped, other)
    with pytest.raises(ValueError, match=r"is of AdamW\+SGD, the optimizer here is AdamW;"):
        unpack(pack(optimizers, model), adamw(model.parameters()), model)
    with pytest.raises(ValueError, match=r"two optimizers update inner.weight; leave it in one of them"):
        pack([*optimizers, sgd([model.inner.weight], lr=0.1)], model)


def test_a_wrapper_whose_state_cannot_be_found_is_named_with_the_fix():
    model = built()
    wrapper = ChainedOptimizers(*make_two_optimizers(model))
    train(model, wrapper, range(2))
    with pytest.raises(ValueError, match=r"ChainedOptimizers holds no optimizer state .* pass the list of optimizers"):
        check_has_state(wrapper, copy_state(wrapper, model))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, plain, range(2))
    check_has_state(plain, copy_state(plain, model))  # SGD without momentum keeps none


def test_moments_keep_their_own_dtype():
    """Some optimizers keep f32 moments of bf16 weights; loading must not round them to the weights' dtype."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"exp_avg": torch.randn(parameter.shape), "step": torch.tensor(3.0)}
    joined = torch.optim.Adam(model.parameters())
    unpack(pack(optimizer, model), joined, model)
    for parameter in model.parameters():
        assert joined.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(joined.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_any_plain_value_travels():
    model = nn.Linear(2, 1, bias=False)
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    held: dict[str, Any] = {
        "none": None,
        "flag": True,
        "count": 3,
        "rate": float("inf"),
        "mode": "fast",
        "history": [torch.ones(2), (1, torch.zeros(()))],
        "nested": {"a": {"b": torch.arange(3)}},
        "waves": torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
    }

    class Own(torch.optim.SGD):
        pass

    giver, joined = (Own(model.parameters(), lr=0.1) for _ in range(2))
    giver.state[model.wave] = dict(held)
    unpack(pack(giver, model), joined, model)
    got = joined.state[model.wave]
    assert list(got) == sorted(held)
    for key in ("none", "flag", "count", "rate", "mode"):
        assert got[key] == held[key]
        assert type(got[key]) is type(held[key])
    assert got["history"][0].tolist() == [1.0, 1.0]
    assert type(got["history"][1]) is tuple
    assert got["nested"]["a"]["b"].tolist() == [0, 1, 2]
    assert torch.equal(got["waves"], held["waves"])


# --------------------------------------------------------------------------------------------------------------------
# What is refused


def refused(sentence: str, data: bytes, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=sentence):
        unpack(data, optimizer, model)
    assert str(optimizer.state_dict()) == str(before)


def test_a_setup_that_differs_is_refused_by_name():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    data = pack(optimizer, model)
    part = [parameter for name, parameter in model.named_parameters() if name != "scale"]
    wider = built()
    wider.inner = nn.Linear(5, 6)
    for sentence, other, its_model in (
        ("of AdamW, the optimizer here is Adam;", torch.optim.Adam(model.parameters()), model),
        ("has 'scale', which the optimizer here does not update", torch.optim.AdamW(part), model),
        ("inner.bias differs: .*'shape': \\[5\\].*'shape': \\[6\\]", torch.optim.AdamW(wider.parameters()), wider),
        ("base differs: .*amsgrad", torch.optim.AdamW(model.parameters(), amsgrad=True), model),
    ):
        refused(sentence, data, other, its_model)
    refused("lacks 'scale'", pack(torch.optim.AdamW(part), model), optimizer, model)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no parameter of the model"):
        pack(torch.optim.SGD(built().parameters(), lr=0.1), built())


def test_state_that_cannot_travel_is_refused():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in (object(), {1: 2}, torch.ones(2).to_sparse(), torch.ones(2).as_subclass(Uncloneable)):
        optimizer.state[model.weight] = {"odd": value}
        with pytest.raises(ValueError, match="odd of weight is"):
            copy_state(optimizer, model)


def rewritten(data: bytes, change) -> bytes:
    """The same state after `change(about, tensors)`."""
    length = int.from_bytes(data[:8], "little")
    about, tensors = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["atoll"]), load(data)
    change(about, tensors)
    return save(tensors, {"atoll": json.dumps(about)})


def counters(**values: Any) -> dict[str, Any]:
    """Of one of the two parameters of a group."""
    return {"of": ["bias"], "values": values}


def whole_group(**values: Any) -> dict[str, Any]:
    return {"of": ["bias", "weight"], "values": values}


@pytest.fixture
def trained():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, pack(optimizer, model)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda about, tensors: about.update(format=2), "format 2"),
        (lambda about, tensors: about.update(state=[]), "no list of parameters"),
        (lambda about, tensors: about.update(refused="no memory"), "the peer has no state to provide: no memory"),
        (lambda about, tensors: about.update(counters=[7]), "the counters of the optimizer state cannot be read"),
        (lambda about, tensors: about.update(counters=[counters(lr=1.0)]), "1.0 as the counter 'lr'"),
        (lambda about, tensors: about.update(counters=[counters(params=1)]), "1 as the counter 'params'"),
        (lambda about, tensors: about.update(counters=[counters(k="x")]), "x as the counter 'k'"),
        (
            lambda about, tensors: about.update(counters=[whole_group(k={"scalar": 1, "dtype": "load"})]),
            "a counter of dtype 'load'",
        ),
        (
            lambda about, tensors: about.update(counters=[counters(k=3)]),
            "weight has other counters in the optimizer state",
        ),
        (lambda about, tensors: about["state"].update(other={}), "'other', which is no parameter"),
        (lambda about, tensors: about["state"]["bias"].update(exp_avg=[1]), "exp_avg of bias is nothing"),
        (lambda about, tensors: about["state"]["bias"].update(exp_avg={"tensor": "99"}), "exp_avg of bias is nothing"),
        (
            lambda about, tensors: about["state"]["bias"].update(exp_avg={"complex": "2"}),
            "exp_avg of bias is not complex",
        ),
        (lambda about, tensors: tensors.update({"0": torch.ones(3)}), r"exp_avg of bias has shape \(3,\)"),
        (lambda about, tensors: tensors.update({"0": torch.ones(())}), r"exp_avg of bias has shape \(\)"),
        (lambda about, tensors: tensors.update({"2": torch.ones(2)}), r"step of bias has shape \(2,\)"),
        (lambda about, tensors: tensors.update({"0": torch.ones(2, dtype=torch.int64)}), "exp_avg of bias has dtype"),
    ],
)
def test_state_that_lies_is_refused(trained, change, sentence):
    model, optimizer, data = trained
    changed = rewritten(data, change)
    refused(sentence, changed, optimizer, model)
    refused(sentence, changed, torch.optim.Adam(model.parameters()), model)


@given(st.data())
def test_hostile_bytes_are_a_value_error(data):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    valid = bytearray(pack(optimizer, model))
    for _ in range(data.draw(st.integers(0, 4))):
        valid[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(valid[: data.draw(st.integers(0, len(valid)))])
    for raw in (data.draw(st.binary(max_size=40)), cut, bytes(valid)):
        try:
            unpack(raw, optimizer, model)
        except ValueError:
            continue


def test_deep_nesting_is_a_value_error(trained):
    model, optimizer, _ = trained
    deep = b'{"__metadata__":{"atoll":"' + b"[" * 100_000 + b'"}}'
    refused("no safetensors file", len(deep).to_bytes(8, "little") + deep, optimizer, model)
