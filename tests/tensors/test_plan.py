"""Fragment plans: deterministic, balanced, complete, and safe to parse."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from atoll.tensors.plan import PLAN_METHODS, FragmentPlan, TensorInfo, describe_tensors, make_plan, make_stable_plan
from tests.tensors.test_settings import JSON


def weights(*shapes: tuple[int, ...]) -> list[TensorInfo]:
    return [TensorInfo(f"t{index:03}", shape, "float32", "weight") for index, shape in enumerate(shapes)]


def sizes(plan: FragmentPlan) -> list[int]:
    return [plan.numel(fragment) for fragment in range(len(plan.fragments))]


def kinds(model: nn.Module, *patterns: str) -> dict[str, str]:
    return {info.name: info.kind for info in describe_tensors(model, patterns)}


SHAPES = st.lists(st.lists(st.integers(1, 12), max_size=3).map(tuple), min_size=1, max_size=30)


# --------------------------------------------------------------------------------------------------------------------
# Synchronized tensors


class Everything(nn.Module):
    """Model with a tensor of each kind: tied, frozen, scalar, empty, and several buffers."""

    a_head: nn.Linear
    wte: nn.Embedding
    rotary: torch.Tensor

    def __init__(self, head_first: bool = False) -> None:
        super().__init__()
        embed = nn.Embedding(10, 4)
        head = nn.Linear(4, 10, bias=False)
        head.weight = embed.weight
        modules = [("a_head", head), ("wte", embed)]
        for name, module in modules if head_first else reversed(modules):
            self.add_module(name, module)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.base = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.register_buffer("kept", torch.ones(5, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("rotary", torch.ones(5), persistent=False)
        self.register_buffer("nothing", None)


def test_synchronized_tensors_and_their_kinds():
    assert kinds(Everything()) == {
        "a_head.weight": "embedding",
        "base": "frozen",
        "empty": "weight",
        "kept": "buffer",
        "norm.bias": "weight",
        "norm.running_mean": "buffer",
        "norm.running_var": "buffer",
        "norm.weight": "weight",
        "scale": "weight",
    }
    plan = make_plan(describe_tensors(Everything()), 4, "balanced")
    planned = {piece.tensor: piece.numel for pieces in plan.fragments for piece in pieces}
    assert "base" not in planned
    assert "empty" not in planned
    assert planned["scale"] == 1
    assert plan.total_numel == sum(planned.values()) == 40 + 5 + 4 * 4 + 1


@pytest.mark.parametrize("method", PLAN_METHODS)
@pytest.mark.parametrize("fragments", [1, 2, 3, 24])
def test_buffers_are_in_separate_fragments(method, fragments):
    plan = make_stable_plan(describe_tensors(Everything()), fragments, method)
    kinds_of = [{piece.kind == "buffer" for piece in pieces} for pieces in plan.fragments]
    assert [{plan.holds_buffers(p)} for p in range(len(plan.fragments))] == kinds_of
    buffer_fragments = sum({True} == has_buffers for has_buffers in kinds_of)
    assert 1 <= buffer_fragments < len(plan.fragments) <= max(2, fragments)
    assert plan.fingerprint()[-1] == f"plan {method} {len(plan.fragments)} buffers {buffer_fragments}"
    assert make_stable_plan(describe_tensors(Everything()), len(plan.fragments), method) == plan
    p = len(plan.fragments) - 1
    assert (plan.allowed_codecs(0, ("int4",)), plan.allowed_codecs(p, ("int4",))) == (("int4",), ("f32",))


def test_buffers_get_fragments_in_proportion_to_their_size():
    tensors = [*weights((30, 10), (30, 10)), *(TensorInfo(f"b{n}", (100,), "float32", "buffer") for n in range(4))]
    plan = make_plan(tensors, 10, "rows")
    assert sum(plan.holds_buffers(p) for p in range(10)) == 4
    assert plan.imbalance == 1.0


def test_model_with_only_buffers_has_a_plan():
    plan = make_plan([TensorInfo(f"b{n}", (2,), "float32", "buffer") for n in range(4)], 3, "balanced")
    assert [plan.holds_buffers(p) for p in range(3)] == [True] * 3


def test_mixed_fragments_are_refused_with_advice():
    plan = make_plan(describe_tensors(Everything()), 2, "balanced")
    raw = plan.to_json()
    raw["fragments"] = [sorted(raw["fragments"][0] + raw["fragments"][1])]
    mixed = FragmentPlan.from_json(raw)  # plans of earlier versions can still be exported
    with pytest.raises(ValueError, match=r"fragment 0 holds parameters and buffers: .* \(atoll syncer --init\)"):
        mixed.holds_buffers(0)


def test_name_of_a_tied_weight_does_not_depend_on_registration_order():
    assert describe_tensors(Everything(head_first=True)) == describe_tensors(Everything(head_first=False))


def test_plan_does_not_depend_on_registration_order():
    layers = [("one", nn.Linear(3, 4)), ("two", nn.Linear(4, 5)), ("three", nn.Embedding(7, 3))]
    orders = [describe_tensors(nn.Sequential(OrderedDict(order))) for order in itertools.permutations(layers)]
    for method in PLAN_METHODS:
        assert len({make_plan(tensors, 3, method).fragments for tensors in orders}) == 1


@given(SHAPES, st.integers(1, 30), st.sampled_from(PLAN_METHODS), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_tensor_order(shapes, fragments, method, random):
    tensors = weights(*shapes)
    plan = make_plan(tensors, fragments, method)
    random.shuffle(tensors)
    assert make_plan(tensors, fragments, method) == plan


def test_embedding_patterns_match_any_name_of_a_tied_weight():
    model = nn.ModuleDict({"head": nn.Linear(2, 3), "tok": nn.Linear(2, 3), "bag": nn.EmbeddingBag(2, 2)})
    model["tok"].weight = model["head"].weight
    assert kinds(model)["head.weight"] == "weight"
    assert kinds(model)["bag.weight"] == "embedding"
    assert kinds(model, "tok.w*")["head.weight"] == "embedding"
    assert kinds(model, "TOK*")["head.weight"] == "weight"


def test_digest_of_frozen_tensors_depends_only_on_values():
    def frozen(values: torch.Tensor) -> TensorInfo:
        model = nn.Linear(1, 1)
        model.base = nn.Parameter(values, requires_grad=False)
        return {info.name: info for info in describe_tensors(model)}["base"]

    one = torch.arange(6.0).reshape(2, 3)
    assert frozen(one) == frozen(one.clone()) == frozen(one.t().contiguous().t())  # strides do not matter
    assert len(frozen(one).digest) == 32
    assert frozen(one).digest != frozen(one + 1).digest
    assert str(frozen(one)).endswith(f"base 2x3 float32 frozen {frozen(one).digest}")
    for values in (
        torch.tensor(3),
        torch.tensor([True]),
        torch.tensor(1j),
        torch.zeros(0),
        torch.ones(2, dtype=torch.half),
    ):
        assert len(frozen(values).digest) == 32


def test_wrappers_do_not_change_names():
    """torch.compile and activation checkpointing wrap modules under names like these."""
    plain, wrapped, inner = nn.Sequential(nn.Linear(2, 2)), nn.Module(), nn.Module()
    wrapped._orig_mod = nn.Sequential(inner)
    inner._checkpoint_wrapped_module = plain[0]
    assert describe_tensors(wrapped) == describe_tensors(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fingerprint_contains_the_dtype(dtype):
    model = nn.Linear(2, 3).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert make_plan(describe_tensors(model), 1, "balanced").fingerprint() == (
        f"bias 3 {name} weight",
        f"weight 3x2 {name} weight",
        "plan balanced 1",
    )


def test_models_that_cannot_be_synchronized_are_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.data)
    shared = nn.Sequential(first, second)
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("wide", torch.ones(1).expand(4))
    for model, message in (
        (frozen, "this model has nothing to synchronize"),
        (nn.Identity(), "this model has nothing to synchronize"),
        (nn.Linear(2, 2, device="meta"), "not a dense tensor"),
        (nn.LazyLinear(3), "run the model once"),
        (shared, r"0\.weight and 1\.weight are two tensors in one memory"),
        (expanded, "wide is an expanded tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            describe_tensors(model)


# --------------------------------------------------------------------------------------------------------------------
# Balance


def test_balanced_assigns_tensors_by_size_to_the_smallest_fragment():
    plan = make_plan(weights((7,), (6,), (5,), (4,), (3,)), 2, "balanced")
    assert [[piece.numel for piece in pieces] for pieces in plan.fragments] == [[7, 4, 3], [6, 5]]
    assert plan.imbalance == pytest.approx(14 / 12.5)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3))
def test_balanced_is_at_most_four_thirds_of_the_optimum(numels, fragments):
    plan = make_plan(weights(*((numel,) for numel in numels)), fragments, "balanced")
    best = min(
        max(sum(numel for numel, at in zip(numels, assigned, strict=True) if at == p) for p in range(fragments))
        for assigned in itertools.product(range(fragments), repeat=len(numels))
    )
    assert max(sizes(plan)) * 3 <= best * 4


@given(SHAPES, st.integers(1, 40))
def test_balanced_exceeds_the_mean_by_less_than_one_tensor(shapes, fragments):
    plan = make_plan(weights(*shapes), fragments, "balanced")
    count, largest = len(plan.fragments), max(math.prod(shape) for shape in shapes)
    assert count == min(fragments, len(shapes))
    assert max(sizes(plan)) <= plan.total_numel / count + largest * (1 - 1 / count) + 1e-9


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 20)), min_size=1, max_size=20), st.integers(1, 12))
def test_rows_are_within_a_tenth_of_the_mean_if_rows_are_small(shapes, fragments):
    mean = sum(math.prod(shape) for shape in shapes) / fragments
    assume(all(columns <= mean / 10 for _, columns in shapes))
    plan = make_plan(weights(*shapes), fragments, "rows")
    assert max(sizes(plan)) <= 1.1 * mean


@given(SHAPES, st.integers(1, 40))
def test_rows_exceed_the_mean_by_at_most_one_row(shapes, fragments):
    tensors = weights(*shapes)
    plan = make_plan(tensors, fragments, "rows")
    row = max(tensor.numel // tensor.rows for tensor in tensors)
    mean = plan.total_numel / fragments
    assert max(sizes(plan)) <= max(1.1 * mean, mean + row)


def test_rows_cut_only_tensors_that_are_too_large():
    even = make_plan(weights((8, 4), (8, 4), (8, 4)), 3, "rows")
    assert [len(pieces) for pieces in even.fragments] == [1, 1, 1]
    cut = make_plan(weights((100, 4), (10, 4)), 4, "rows")
    assert cut.imbalance <= 1.1
    assert sum(piece.tensor == "t001" for pieces in cut.fragments for piece in pieces) == 1


def test_adjacent_rows_in_one_fragment_are_one_piece():
    plan = make_plan(weights((100, 3)), 1, "rows")
    assert plan.fragments == ((("t000", "weight", 0, 100, 300),),)


def test_layers_are_strided_and_other_tensors_balance():
    tensors = [
        TensorInfo(f"blocks.{layer}.{part}.weight", (4, 4), "float32", "weight")
        for layer in range(12)
        for part in ("attn", "mlp.experts.7")
    ]
    tensors += [TensorInfo("wte.weight", (64,), "float32", "embedding"), TensorInfo("norm", (4,), "float32", "weight")]
    plan = make_plan(tensors, 5, "layers")
    for fragment, pieces in enumerate(plan.fragments):
        layers = {int(piece.tensor.split(".")[1]) for piece in pieces if piece.tensor.startswith("blocks")}
        assert layers == set(range(fragment, 12, 5))
    assert sizes(plan) == [96, 96, 128, 68, 64]
    fragment_of = {piece.tensor: fragment for fragment, pieces in enumerate(plan.fragments) for piece in pieces}
    assert (fragment_of["wte.weight"], fragment_of["norm"]) == (2, 3)


def test_two_stacks_with_missing_layers_leave_no_fragment_empty():
    names = [*(f"encoder.{layer}.w" for layer in (0, 8, 16)), *(f"decoder.{layer}.w" for layer in (0, 8)), "head"]
    plan = make_plan([TensorInfo(name, (2,), "float32", "weight") for name in names], 8, "layers")
    assert sizes(plan) == [2] * 6


@pytest.mark.parametrize("method", PLAN_METHODS)
def test_plan_has_no_more_fragments_than_pieces(method):
    plan = make_plan(weights((), (1, 2)), 24, method)
    assert sorted(sizes(plan)) == [1, 2]


def test_model_with_one_value_has_a_plan():
    for method in PLAN_METHODS:
        assert make_plan(weights(()), 24, method).fragments == ((("t000", "weight", 0, 1, 1),),)


@pytest.mark.parametrize(("fragments", "method"), [(0, "balanced"), (5000, "rows"), (2, "even")])
def test_impossible_plans_are_refused(fragments, method):
    with pytest.raises(ValueError, match="fragment"):
        make_plan(weights((2,)), fragments, method)


# --------------------------------------------------------------------------------------------------------------------
# The stored plan


@given(SHAPES, st.integers(1, 30), st.sampled_from(PLAN_METHODS))
def test_each_row_is_in_one_fragment_and_json_round_trip_restores_the_plan(shapes, fragments, method):
    tensors = weights(*shapes)
    plan = make_plan(tensors, fragments, method)
    rows = sorted(
        (piece.tensor, row) for pieces in plan.fragments for piece in pieces for row in range(piece.start, piece.stop)
    )
    assert rows == sorted((tensor.name, row) for tensor in tensors for row in range(tensor.rows))
    assert FragmentPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for fragment in range(len(plan.fragments)):
        ends = [0, *(end for _, _, end in plan.spans(fragment))]
        assert [begin for _, begin, _ in plan.spans(fragment)] == ends[:-1]
        assert ends[-1] == plan.numel(fragment) > 0


VALID = make_plan(describe_tensors(Everything()), 3, "rows").to_json()


@given(JSON, st.data())
def test_arbitrary_json_raises_only_value_error(value, data):
    """Parse an arbitrary value, and a valid plan in which one element is replaced by it."""
    raw = copy.deepcopy(VALID)
    at, key = raw, data.draw(st.sampled_from([*raw]))
    while isinstance(at[key], list) and at[key] and data.draw(st.booleans()):
        at, key = at[key], data.draw(st.integers(0, len(at[key]) - 1))
    at[key] = value
    for each in (value, raw):
        try:
            plan = FragmentPlan.from_json(each)
        except ValueError:
            continue
        assert FragmentPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("how",), "even", "unknown fragment plan 'even'"),
        (("tensors", 0, 1), [10, -4], "shape of a_head.weight"),
        (("tensors", 0, 1), [2**60], "shape of a_head.weight"),
        (("tensors", 0, 1), [True, 4], "shape of a_head.weight"),
        (("tensors", 0, 2), "int64", "only tensors of float16"),
        (("tensors", 0, 3), "bias", "kind"),
        (("tensors", 1, 4), "", "digest of base"),
        (("tensors", 1, 0), "a_head.weight", "not sorted"),
        (("fragments", 0), [], "empty"),
        (("fragments", 0, 0), [99, 0, 1], "do not exist"),
        (("fragments",), [], "rows of"),
    ],
)
def test_inconsistent_plan_is_refused(path, value, message):
    raw = copy.deepcopy(VALID)
    at = raw
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        FragmentPlan.from_json(raw)


def test_plan_with_a_frozen_tensor_in_a_fragment_is_refused():
    tensors = [["base", [2], "int64", "frozen", "0" * 32], ["w", [4], "float32", "weight", ""]]
    with pytest.raises(ValueError, match="base is frozen"):
        FragmentPlan.from_json({"how": "rows", "tensors": tensors, "fragments": [[[0, 0, 2], [1, 0, 4]]]})


def test_plan_with_missing_or_duplicate_rows_is_refused():
    tensors = [["w", [4, 2], "float32", "weight", ""]]
    for pieces in ([[0, 0, 3]], [[0, 0, 2], [0, 1, 4]], [[0, 0, 4], [0, 0, 4]], [[0, 1, 4]]):
        with pytest.raises(ValueError, match=r"of w|sorted"):
            FragmentPlan.from_json({"how": "rows", "tensors": tensors, "fragments": [pieces]})


def test_plan_with_too_many_values_is_refused():
    tensors = [["w", [2**47, 8], "float32", "weight", ""]]
    with pytest.raises(ValueError, match="the maximum is"):
        FragmentPlan.from_json({"how": "rows", "tensors": tensors, "fragments": [[[0, 0, 2**47]]]})
