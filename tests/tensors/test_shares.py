"""Every sharding of a model reads and adopts what the whole model would, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.tensors import optimizer_state
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan
from atoll.tensors.sharding import (
    Box,
    assign_owners,
    box_from_placements,
    copy_box,
    local_boxes,
    local_tensor,
    shard_windows,
)

SIZES = {"a": (7, 5), "b": (4,), "c": (3, 2, 5), "d": (1, 9), "e": ()}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, tuple[Any, ...]]]:
    """A mesh, and placements on it for every tensor: replicated, or cut along any dimension, also twice."""
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2), (1, 3), (3, 2)]))

    def placement(dims: int) -> Any:
        which = draw(st.integers(-1, dims - 1))
        return Replicate() if which < 0 else Shard(which)

    return mesh, {name: tuple(placement(len(sizes)) for _ in mesh) for name, sizes in SIZES.items()}


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    sizes = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from([(1,), (2,), (5,), (2, 2), (2, 3), (3, 2, 2)]))
    choice = st.one_of(st.just(Replicate()), st.integers(0, len(sizes) - 1).map(Shard))
    return sizes, mesh, tuple(draw(choice) for _ in mesh)


@given(boxes())
def test_a_rank_holds_the_box_that_torch_says(case):
    sizes, mesh, placements = case
    for coordinate in product(*map(range, mesh)):
        shape, offset = _compute_local_shape_and_global_offset(sizes, mesh, list(coordinate), placements)
        box = box_from_placements(sizes, mesh, coordinate, placements)
        assert box.shape == tuple(shape)
        if math.prod(shape):
            assert box.offset == tuple(offset)


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)])
def test_what_fsdp_cuts_after_tensor_parallelism_is_together(rows, mesh):
    """FSDP2 over tensor parallelism: placements in the order of the mesh, cuts in the other one."""
    data, model = mesh
    for place, which in product(range(data), range(model)):
        box = box_from_placements((rows, 3), mesh, (place, which), (_StridedShard(0, split_factor=model), Shard(0)))
        column = list(torch.chunk(torch.arange(rows), model))
        parts = list(torch.chunk(column[which], data)) if which < len(column) else []
        wanted = parts[place].tolist() if place < len(parts) else []
        assert list(range(box.offset[0], box.offset[0] + box.shape[0])) == wanted


def test_rows_that_are_dealt_out_in_turns_are_refused():
    with pytest.raises(ValueError, match="sharded into separate spans"):
        box_from_placements((8,), (2,), (0,), (_StridedShard(0, split_factor=2),))


# ------------------------------------------------------------------------------------------------ through real DTensors


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """This process is one rank of a job whose others are not there. Nothing is communicated."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """Named after the rank: torch keeps what it has seen of a mesh, and there this process was another rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"rank{rank}-{place}" for place in range(len(shape))))


class Whole(nn.Module):
    def __init__(self, dtypes: dict[str, torch.dtype], seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        for name, sizes in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(sizes, generator=drawn).to(dtypes[name])))


def sharded(model: nn.Module, mesh: Any, placements: dict[str, tuple[Any, ...]]) -> nn.Module:
    """The same model as this rank holds it."""
    made = nn.Module()
    for name, whole in model.named_parameters():
        where = placements[name]
        box = box_from_placements(tuple(whole.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), where)
        local = copy_box(whole.detach(), box)
        held = DTensor.from_local(local, mesh, where, run_check=False, shape=whole.shape, stride=whole.stride())
        made.register_parameter(name, nn.Parameter(held))
    return made


def flat(view: ModelView, p: int) -> Tensor:
    out = torch.full((view.numel(p),), 99.0)
    view.read(p, out)
    return out


@given(
    layouts(), st.sampled_from(["balanced", "rows"]), st.booleans(), st.sampled_from(["carry", "overwrite", "blend"])
)
def test_copy_and_adopt_through_any_sharding_are_those_of_the_whole_model(case, how, halves, adopts):
    """The leader has whole flat fragments and the others packed ones; what they hold together is the same."""
    mesh_shape, placements = case
    size = math.prod(mesh_shape)
    dtypes = {name: torch.bfloat16 if halves and place % 2 else torch.float32 for place, name in enumerate(SIZES)}
    whole = Whole(dtypes, seed=1)
    plan = make_plan(describe_tensors(whole), 3, how)
    fragments = range(len(plan.fragments))
    drawn = torch.Generator().manual_seed(2)
    published = [torch.randn(plan.numel(p), generator=drawn) for p in fragments]
    before = ModelView(whole, plan)
    read = [flat(before, p) for p in fragments]
    everybody, models, packed = [], [], []
    for rank in range(size):
        with rank_of(rank, size):
            model = sharded(whole, mesh_of(mesh_shape, rank), placements)
            assert make_plan(describe_tensors(model), 3, how) == plan
            everybody.append(local_boxes(model))
            view = ModelView(model, plan, packed=True)
            packed.append([flat(view, p) for p in fragments])
            models.append(locals_of(model, plan, everybody[rank], adopts, published, read, rank == 0))
    mine = assign_owners(everybody, plan.tensors)
    for p in fragments:
        together = torch.full((plan.numel(p),), 99.0)
        for rank in range(size):
            for window in shard_windows(plan, p, everybody[rank], mine[rank]):
                window.view(together).copy_(window.view_packed(packed[rank][p]))
        assert torch.equal(together, read[p])
    for p in fragments:
        before.adopt(p, adopts, published[p], held(before, p, read[p]), 0.25)
    for name, tensor in whole.named_parameters():
        for rank in range(size):
            box = everybody[rank].get(name)
            assert torch.equal(models[rank][name], copy_box(tensor.detach(), box)), f"{name} at rank {rank}"


def held(view: ModelView, p: int, value: Tensor) -> Tensor:
    out = torch.empty_like(value)
    view.round_to_dtype(p, value, out)
    return out


def locals_of(
    model: nn.Module,
    plan: FragmentPlan,
    boxes: dict[str, Box],
    adopts: str,
    published: list[Tensor],
    read: list[Tensor],
    leads: bool,
) -> dict[str, Tensor]:
    """What this rank holds after it has adopted: from whole fragments at the leader, from packed ones elsewhere."""
    view = ModelView(model, plan, packed=not leads)
    for p in range(len(plan.fragments)):
        value, reference = published[p], read[p]
        if not leads:
            parts = shard_windows(plan, p, boxes)
            value, reference = (torch.cat([w.view(each).reshape(-1) for w in parts]) for each in (value, reference))
        view.adopt(p, adopts, value, held(view, p, reference), 0.25)
    return {name: local_tensor(tensor).detach() for name, tensor in model.named_parameters()}


@given(layouts())
def test_inner_state_is_put_together_from_all_ranks_and_cut_again_for_others(case):
    """Taken in one shape, given to another: parameter by parameter in the layout of whole tensors."""
    mesh_shape, placements = case
    size = math.prod(mesh_shape)
    whole = Whole(dict.fromkeys(SIZES, torch.float32), seed=1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for parameter in whole.parameters():
        parameter.grad = torch.sin(parameter.detach() * 3)
    optimizer.step()
    about, tensors = optimizer_state.read(optimizer_state.pack(optimizer, whole))
    found: dict[str, Tensor] = {}
    for rank in range(size):
        with rank_of(rank, size):
            model = sharded(whole, mesh_of(mesh_shape, rank), placements)
            theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
            boxes, cut = local_boxes(model), {}
            for number, (name, is_complex) in optimizer_state.tensor_owners(about).items():
                cut[number] = optimizer_state.extract_part(tensors[number], is_complex, SIZES[name], boxes.get(name))
            optimizer_state.prepare(about, cut, theirs, model, is_local_part=True).install()
            by_cut = optimizer_state.copy_state(theirs, model)
            optimizer_state.prepare(about, tensors, theirs, model).install()
            taken = optimizer_state.copy_state(theirs, model)
            assert taken.metadata == by_cut.metadata == about
            for number, tensor in taken.tensors.items():
                assert torch.equal(tensor, by_cut.tensors[number])
                part = taken.parts.get(number)
                if part is None:
                    assert torch.equal(tensor, tensors[number])
                else:
                    found.setdefault(number, torch.full(part.sizes, 99.0))[part.box.slices] = tensor
    for number, tensor in found.items():
        assert torch.equal(tensor, tensors[number])


def test_a_plain_state_beside_a_sharded_parameter_cannot_travel():
    with rank_of(0, 2):
        mesh = mesh_of((2,), 0)
        model = sharded(Whole(dict.fromkeys(SIZES, torch.float32), 1), mesh, dict.fromkeys(SIZES, (Replicate(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(iter(model.parameters()))]["seen"] = torch.zeros(4)
        with pytest.raises(ValueError, match="seen of a is not sharded"):
            optimizer_state.copy_state(optimizer, model)
