"""Encoded optimizer state: a joiner that takes it makes the same steps as its source, bit for bit."""

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
    """Model with a tied, a frozen and a scalar parameter, and one that never gets a gradient."""

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


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def make_groups(model: nn.Module, is_reversed: bool = False) -> list[dict[str, Any]]:
    """Return two parameter groups; `is_reversed` reverses the groups and the parameters in them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    large = [parameter for parameter in trained if parameter.dim() > 1]
    small = [parameter for parameter in trained if parameter.dim() <= 1]
    both: list[dict[str, Any]] = [{"params": large, "weight_decay": 0.1}, {"params": small}]
    return [{**group, "params": group["params"][::-1]} for group in reversed(both)] if is_reversed else both


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()


def have_equal_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_next_steps_are_bit_identical(name, dtype):
    source = make_model().to(dtype)
    source_optimizer = OPTIMIZERS[name](make_groups(source))
    train(source, source_optimizer, range(5))
    data = pack(source_optimizer, source)

    joiner = make_model(1).to(dtype)
    joiner_optimizer = OPTIMIZERS[name](make_groups(joiner, is_reversed=True))
    train(joiner, joiner_optimizer, range(90, 93))  # its previous state must be replaced
    joiner.load_state_dict(source.state_dict())
    unpack(data, joiner_optimizer, joiner)
    assert have_equal_weights(source, joiner)
    train(source, source_optimizer, range(5, 10))
    train(joiner, joiner_optimizer, range(5, 10))
    assert have_equal_weights(source, joiner)


def test_fresh_optimizer_takes_copies_of_the_state():
    source, joiner = make_model(), make_model()
    optimizer, joiner_optimizer = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(joiner.parameters())
    train(source, optimizer, range(3))
    joiner.load_state_dict(source.state_dict())
    data = pack(optimizer, source)
    unpack(bytearray(data), joiner_optimizer, joiner)
    train(source, optimizer, range(3, 5))
    assert pack(joiner_optimizer, joiner) == data
    train(joiner, joiner_optimizer, range(3, 5))
    assert have_equal_weights(source, joiner)


def test_empty_state_of_the_source_clears_that_of_the_joiner():
    source, joiner = make_model(), make_model()
    fresh, joiner_optimizer = torch.optim.Adam(source.parameters()), torch.optim.Adam(joiner.parameters())
    train(joiner, joiner_optimizer, range(3))
    unpack(pack(fresh, source), joiner_optimizer, joiner)
    assert not joiner_optimizer.state


def test_copied_state_does_not_change_during_training():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    copied, packed = copy_state(optimizer, model), pack(optimizer, model)
    train(model, optimizer, range(2, 4))
    assert pack_copy(copied) == packed != pack(optimizer, model)


def test_settings_of_parameter_groups_are_not_sent():
    model = make_model()
    source, joiner_optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.5),
        torch.optim.Adam(model.parameters(), lr=0.25),
    )
    unpack(pack(source, model), joiner_optimizer, model)
    assert joiner_optimizer.param_groups[0]["lr"] == 0.25


# --------------------------------------------------------------------------------------------------------------------
# Counters in parameter groups

COUNTING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "schedule-free": ScheduleFreeLike,
    "prodigy": ProdigyLike,
    "adan": LazyCounters,
    "without hooks": lambda groups: WrappingOptimizer(torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_counters_in_parameter_groups_are_sent(name):
    """The joiner's next steps equal the source's. With fresh counters, the first one is many times as large."""
    source, joiner, fresh = make_model(), make_model(1), make_model(1)
    source_optimizer = COUNTING[name](make_groups(source))
    joiner_optimizer, alone = COUNTING[name](make_groups(joiner, is_reversed=True)), COUNTING[name](make_groups(fresh))
    for optimizer in (source_optimizer, joiner_optimizer, alone):
        track_counters(optimizer)
    train(source, source_optimizer, range(8))
    data = pack(source_optimizer, source)
    for model in (joiner, fresh):
        model.load_state_dict(source.state_dict())
    unpack(data, joiner_optimizer, joiner)
    assert pack(joiner_optimizer, joiner) == data, "a joiner can send the state before its first step"
    train(source, source_optimizer, range(8, 12))
    train(joiner, joiner_optimizer, range(8, 12))
    train(fresh, alone, range(8, 12))
    assert have_equal_weights(source, joiner)
    assert not have_equal_weights(source, fresh), "the counters matter"


def test_values_changed_between_steps_are_not_sent():
    source, joiner = make_model(), make_model()
    optimizers = [torch.optim.SGD(make_groups(model), lr=0.1, momentum=0.9) for model in (source, joiner)]
    track_counters(optimizers[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=1.0, total_steps=9)
    for step in range(5):
        train(source, optimizers[0], range(step, step + 1))
        schedule.step()
        optimizers[0].param_groups[0]["weight_decay"] = 0.5 + step
    before = copy.deepcopy(optimizers[1].state_dict()["param_groups"])
    unpack(pack(optimizers[0], source), optimizers[1], joiner)
    assert optimizers[1].state_dict()["param_groups"] == before


def test_train_mode_is_sent_with_the_weights():
    """Published weights are in training mode already: the joiner must not convert them again."""
    source, joiner = make_model(), make_model()
    optimizer, joiner_optimizer = ScheduleFreeLike(make_groups(source)), ScheduleFreeLike(make_groups(joiner))
    optimizer.train()
    unpack(pack(optimizer, source), joiner_optimizer, joiner)
    assert [group["train_mode"] for group in joiner_optimizer.param_groups] == [True, True]


def test_tensor_counter_is_updated_in_place():
    source, joiner = make_model(), make_model()
    optimizer, joiner_optimizer = LazyCounters(make_groups(source)), LazyCounters(make_groups(joiner))
    track_counters(optimizer)
    train(source, optimizer, range(3))
    train(joiner, joiner_optimizer, range(1))
    counter = joiner_optimizer.param_groups[0]["seen"]
    unpack(pack(optimizer, source), joiner_optimizer, joiner)
    assert joiner_optimizer.param_groups[0]["seen"] is counter
    assert float(counter) == 3.0


def test_prepared_state_lists_tensors_and_counters():
    model = make_model()
    optimizer = ScheduleFreeLike(make_groups(model))
    track_counters(optimizer)
    train(model, optimizer, range(2))
    prepared = prepare(*read(pack(optimizer, model)), optimizer, model)
    assert str(prepared) == "4 state tensors and 8 counters"  # k, weight_sum, lr_max and train_mode of two groups


# --------------------------------------------------------------------------------------------------------------------
# Several optimizers


def test_state_of_a_list_of_optimizers_is_sent():
    source, joiner = make_model(), make_model(1)
    source_optimizers, joiner_optimizer = make_two_optimizers(source), make_two_optimizers(joiner)[::-1]

    def train_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            train(model, ChainedOptimizers(*optimizers), range(step, step + 1))

    train_all(source, source_optimizers, range(4))
    joiner.load_state_dict(source.state_dict())
    unpack(pack(source_optimizers, source), joiner_optimizer, joiner)
    train_all(source, source_optimizers, range(4, 8))
    train_all(joiner, joiner_optimizer, range(4, 8))
    assert have_equal_weights(source, joiner)


def test_optimizers_that_divide_the_parameters_differently_are_refused_by_name():
    model, other = make_model(), make_model()
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    names = dict(other.named_parameters())
    others = [parameter for name, parameter in names.items() if name != "inner.weight" and parameter.requires_grad]
    swapped = [sgd([names["inner.weight"]], lr=0.1, momentum=0.9), adamw(others)]
    optimizers = make_two_optimizers(model)
    with pytest.raises(ValueError, match=r"embed.weight differs: .*'optimizer': 'SGD'.*'optimizer': 'AdamW'"):
        unpack(pack(optimizers, model), swapped, other)
    with pytest.raises(ValueError, match=r"is of AdamW\+SGD, the optimizer here is AdamW;"):
        unpack(pack(optimizers, model), adamw(model.parameters()), model)
    with pytest.raises(ValueError, match=r"two optimizers update inner.weight; leave it in one of them"):
        pack([*optimizers, sgd([model.inner.weight], lr=0.1)], model)


def test_wrapper_without_state_is_refused_with_advice():
    model = make_model()
    wrapper = ChainedOptimizers(*make_two_optimizers(model))
    train(model, wrapper, range(2))
    with pytest.raises(ValueError, match=r"ChainedOptimizers holds no optimizer state .* pass the list of optimizers"):
        check_has_state(wrapper, copy_state(wrapper, model))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, plain, range(2))
    check_has_state(plain, copy_state(plain, model))  # SGD without momentum has no state


def test_moments_keep_their_dtype():
    """Some optimizers have f32 moments of bf16 weights. Loading must not round them to the weights' dtype."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"exp_avg": torch.randn(parameter.shape), "step": torch.tensor(3.0)}
    joiner_optimizer = torch.optim.Adam(model.parameters())
    unpack(pack(optimizer, model), joiner_optimizer, model)
    for parameter in model.parameters():
        assert joiner_optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(joiner_optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_state_values_of_any_supported_type_are_sent():
    model = nn.Linear(2, 1, bias=False)
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    values: dict[str, Any] = {
        "none": None,
        "flag": True,
        "count": 3,
        "rate": float("inf"),
        "mode": "fast",
        "history": [torch.ones(2), (1, torch.zeros(()))],
        "nested": {"a": {"b": torch.arange(3)}},
        "waves": torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
    }

    class CustomSGD(torch.optim.SGD):
        pass

    source, joiner_optimizer = (CustomSGD(model.parameters(), lr=0.1) for _ in range(2))
    source.state[model.wave] = dict(values)
    unpack(pack(source, model), joiner_optimizer, model)
    received = joiner_optimizer.state[model.wave]
    assert list(received) == sorted(values)
    for key in ("none", "flag", "count", "rate", "mode"):
        assert received[key] == values[key]
        assert type(received[key]) is type(values[key])
    assert received["history"][0].tolist() == [1.0, 1.0]
    assert type(received["history"][1]) is tuple
    assert received["nested"]["a"]["b"].tolist() == [0, 1, 2]
    assert torch.equal(received["waves"], values["waves"])


# --------------------------------------------------------------------------------------------------------------------
# Refused state


def assert_refused(message: str, data: bytes, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        unpack(data, optimizer, model)
    assert str(optimizer.state_dict()) == str(before)


def test_state_of_a_different_setup_is_refused_by_name():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    data = pack(optimizer, model)
    part = [parameter for name, parameter in model.named_parameters() if name != "scale"]
    wider = make_model()
    wider.inner = nn.Linear(5, 6)
    for message, other, its_model in (
        ("of AdamW, the optimizer here is Adam;", torch.optim.Adam(model.parameters()), model),
        ("has 'scale', which the local optimizer does not update", torch.optim.AdamW(part), model),
        ("inner.bias differs: .*'shape': \\[5\\].*'shape': \\[6\\]", torch.optim.AdamW(wider.parameters()), wider),
        ("base differs: .*amsgrad", torch.optim.AdamW(model.parameters(), amsgrad=True), model),
    ):
        assert_refused(message, data, other, its_model)
    assert_refused("lacks 'scale'", pack(torch.optim.AdamW(part), model), optimizer, model)


def test_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no parameter of the model"):
        pack(torch.optim.SGD(make_model().parameters(), lr=0.1), make_model())


def test_state_that_cannot_be_encoded_is_refused():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in (object(), {1: 2}, torch.ones(2).to_sparse(), torch.ones(2).as_subclass(Uncloneable)):
        optimizer.state[model.weight] = {"odd": value}
        with pytest.raises(ValueError, match="odd of weight is"):
            copy_state(optimizer, model)


def rewrite_metadata(data: bytes, change) -> bytes:
    """Return the encoded state after `change(metadata, tensors)`."""
    length = int.from_bytes(data[:8], "little")
    metadata, tensors = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["atoll"]), load(data)
    change(metadata, tensors)
    return save(tensors, {"atoll": json.dumps(metadata)})


def make_counters(**values: Any) -> dict[str, Any]:
    """Return counters of one of the two parameters of a group."""
    return {"of": ["bias"], "values": values}


def make_group_counters(**values: Any) -> dict[str, Any]:
    return {"of": ["bias", "weight"], "values": values}


@pytest.fixture
def trained():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, pack(optimizer, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata, tensors: metadata.update(format=2), "format 2"),
        (lambda metadata, tensors: metadata.update(state=[]), "lacks the list of parameters"),
        (lambda metadata, tensors: metadata.update(refused="no memory"), "the peer has no state to provide: no memory"),
        (lambda metadata, tensors: metadata.update(counters=[7]), "the counters of the optimizer state cannot be read"),
        (lambda metadata, tensors: metadata.update(counters=[make_counters(lr=1.0)]), "1.0 as the counter 'lr'"),
        (lambda metadata, tensors: metadata.update(counters=[make_counters(params=1)]), "1 as the counter 'params'"),
        (lambda metadata, tensors: metadata.update(counters=[make_counters(k="x")]), "x as the counter 'k'"),
        (
            lambda metadata, tensors: metadata.update(counters=[make_group_counters(k={"scalar": 1, "dtype": "load"})]),
            "a counter of dtype 'load'",
        ),
        (
            lambda metadata, tensors: metadata.update(counters=[make_counters(k=3)]),
            "weight has other counters in the optimizer state",
        ),
        (lambda metadata, tensors: metadata["state"].update(other={}), "'other', which is not a parameter"),
        (lambda metadata, tensors: metadata["state"]["bias"].update(exp_avg=[1]), "exp_avg of bias is nothing"),
        (
            lambda metadata, tensors: metadata["state"]["bias"].update(exp_avg={"tensor": "99"}),
            "exp_avg of bias is nothing",
        ),
        (
            lambda metadata, tensors: metadata["state"]["bias"].update(exp_avg={"complex": "2"}),
            "exp_avg of bias is not complex",
        ),
        (lambda metadata, tensors: tensors.update({"0": torch.ones(3)}), r"exp_avg of bias has shape \(3,\)"),
        (lambda metadata, tensors: tensors.update({"0": torch.ones(())}), r"exp_avg of bias has shape \(\)"),
        (lambda metadata, tensors: tensors.update({"2": torch.ones(2)}), r"step of bias has shape \(2,\)"),
        (
            lambda metadata, tensors: tensors.update({"0": torch.ones(2, dtype=torch.int64)}),
            "exp_avg of bias has dtype",
        ),
    ],
)
def test_inconsistent_state_is_refused(trained, change, message):
    model, optimizer, data = trained
    changed = rewrite_metadata(data, change)
    assert_refused(message, changed, optimizer, model)
    assert_refused(message, changed, torch.optim.Adam(model.parameters()), model)


@given(st.data())
def test_arbitrary_bytes_raise_only_value_error(data):
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


def test_deeply_nested_metadata_raises_value_error(trained):
    model, optimizer, _ = trained
    deep = b'{"__metadata__":{"atoll":"' + b"[" * 100_000 + b'"}}'
    assert_refused("not a safetensors file", len(deep).to_bytes(8, "little") + deep, optimizer, model)
