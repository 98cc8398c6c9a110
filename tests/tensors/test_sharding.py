"""Sharded models: reading and adopting give the same bits as for the whole model."""

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
    """Draw a mesh, and placements of each tensor: replicated, or sharded along any dimension, also twice."""
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2), (1, 3), (3, 2)]))

    def placement(dims: int) -> Any:
        dim = draw(st.integers(-1, dims - 1))
        return Replicate() if dim < 0 else Shard(dim)

    return mesh, {name: tuple(placement(len(sizes)) for _ in mesh) for name, sizes in SIZES.items()}


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    sizes = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from([(1,), (2,), (5,), (2, 2), (2, 3), (3, 2, 2)]))
    choice = st.one_of(st.just(Replicate()), st.integers(0, len(sizes) - 1).map(Shard))
    return sizes, mesh, tuple(draw(choice) for _ in mesh)


@given(boxes())
def test_box_of_a_rank_equals_that_of_torch(case):
    sizes, mesh, placements = case
    for coordinate in product(*map(range, mesh)):
        shape, offset = _compute_local_shape_and_global_offset(sizes, mesh, list(coordinate), placements)
        box = box_from_placements(sizes, mesh, coordinate, placements)
        assert box.shape == tuple(shape)
        if math.prod(shape):
            assert box.offset == tuple(offset)


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)])
def test_fsdp_over_tensor_parallelism_gives_contiguous_rows(rows, mesh):
    """FSDP2 over tensor parallelism: placements are in mesh order, but sharding is applied in reverse order."""
    data, model = mesh
    for data_rank, model_rank in product(range(data), range(model)):
        box = box_from_placements(
            (rows, 3), mesh, (data_rank, model_rank), (_StridedShard(0, split_factor=model), Shard(0))
        )
        column = list(torch.chunk(torch.arange(rows), model))
        parts = list(torch.chunk(column[model_rank], data)) if model_rank < len(column) else []
        expected = parts[data_rank].tolist() if data_rank < len(parts) else []
        assert list(range(box.offset[0], box.offset[0] + box.shape[0])) == expected


def test_interleaved_rows_are_refused():
    with pytest.raises(ValueError, match="sharded into separate spans"):
        box_from_placements((8,), (2,), (0,), (_StridedShard(0, split_factor=2),))


# ------------------------------------------------------------------------------------------------ with real DTensors


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of a job without other ranks. Nothing is communicated."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """Return a mesh whose dimension names contain the rank. Torch caches meshes by name, with this process's rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"rank{rank}-{dim}" for dim in range(len(shape))))


class UnshardedModel(nn.Module):
    def __init__(self, dtypes: dict[str, torch.dtype], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, sizes in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(sizes, generator=generator).to(dtypes[name])))


def shard_model(model: nn.Module, mesh: Any, placements: dict[str, tuple[Any, ...]]) -> nn.Module:
    """Return the part of the model at this rank, as DTensors."""
    model_shard = nn.Module()
    for name, whole in model.named_parameters():
        placement = placements[name]
        box = box_from_placements(tuple(whole.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), placement)
        local = copy_box(whole.detach(), box)
        tensor = DTensor.from_local(local, mesh, placement, run_check=False, shape=whole.shape, stride=whole.stride())
        model_shard.register_parameter(name, nn.Parameter(tensor))
    return model_shard


def read_fragment(view: ModelView, p: int) -> Tensor:
    out = torch.full((view.numel(p),), 99.0)
    view.read(p, out)
    return out


@given(
    layouts(), st.sampled_from(["balanced", "rows"]), st.booleans(), st.sampled_from(["carry", "overwrite", "blend"])
)
def test_read_and_adopt_of_sharded_and_whole_models_give_the_same_bits(case, method, use_bf16, adopt_method):
    """The leader has whole flat fragments, other ranks have packed ones. Together they equal the whole model."""
    mesh_shape, placements = case
    size = math.prod(mesh_shape)
    dtypes = {name: torch.bfloat16 if use_bf16 and index % 2 else torch.float32 for index, name in enumerate(SIZES)}
    whole = UnshardedModel(dtypes, seed=1)
    plan = make_plan(describe_tensors(whole), 3, method)
    fragments = range(len(plan.fragments))
    generator = torch.Generator().manual_seed(2)
    published = [torch.randn(plan.numel(p), generator=generator) for p in fragments]
    before = ModelView(whole, plan)
    read = [read_fragment(before, p) for p in fragments]
    boxes_by_rank, models, packed = [], [], []
    for rank in range(size):
        with fake_rank(rank, size):
            model = shard_model(whole, make_mesh(mesh_shape, rank), placements)
            assert make_plan(describe_tensors(model), 3, method) == plan
            boxes_by_rank.append(local_boxes(model))
            view = ModelView(model, plan, packed=True)
            packed.append([read_fragment(view, p) for p in fragments])
            models.append(adopt_at_rank(model, plan, boxes_by_rank[rank], adopt_method, published, read, rank == 0))
    owned = assign_owners(boxes_by_rank, plan.tensors)
    for p in fragments:
        combined = torch.full((plan.numel(p),), 99.0)
        for rank in range(size):
            for window in shard_windows(plan, p, boxes_by_rank[rank], owned[rank]):
                window.view(combined).copy_(window.view_packed(packed[rank][p]))
        assert torch.equal(combined, read[p])
    for p in fragments:
        before.adopt(p, adopt_method, published[p], round_to_dtype(before, p, read[p]), 0.25)
    for name, tensor in whole.named_parameters():
        for rank in range(size):
            box = boxes_by_rank[rank].get(name)
            assert torch.equal(models[rank][name], copy_box(tensor.detach(), box)), f"{name} at rank {rank}"


def round_to_dtype(view: ModelView, p: int, value: Tensor) -> Tensor:
    out = torch.empty_like(value)
    view.round_to_dtype(p, value, out)
    return out


def adopt_at_rank(
    model: nn.Module,
    plan: FragmentPlan,
    boxes: dict[str, Box],
    adopt_method: str,
    published: list[Tensor],
    read: list[Tensor],
    is_leader: bool,
) -> dict[str, Tensor]:
    """Return the local tensors of this rank after adoption: of whole fragments at the leader, else of packed ones."""
    view = ModelView(model, plan, packed=not is_leader)
    for p in range(len(plan.fragments)):
        value, reference = published[p], read[p]
        if not is_leader:
            parts = shard_windows(plan, p, boxes)
            value, reference = (torch.cat([w.view(each).reshape(-1) for w in parts]) for each in (value, reference))
        view.adopt(p, adopt_method, value, round_to_dtype(view, p, reference), 0.25)
    return {name: local_tensor(tensor).detach() for name, tensor in model.named_parameters()}


@given(layouts())
def test_optimizer_state_is_gathered_from_all_ranks_and_resharded(case):
    """State tensors are exchanged in the shape of whole tensors, whatever the shardings of source and target."""
    mesh_shape, placements = case
    size = math.prod(mesh_shape)
    whole = UnshardedModel(dict.fromkeys(SIZES, torch.float32), seed=1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for parameter in whole.parameters():
        parameter.grad = torch.sin(parameter.detach() * 3)
    optimizer.step()
    metadata, tensors = optimizer_state.read(optimizer_state.pack(optimizer, whole))
    gathered: dict[str, Tensor] = {}
    for rank in range(size):
        with fake_rank(rank, size):
            model = shard_model(whole, make_mesh(mesh_shape, rank), placements)
            optimizer_at_rank = torch.optim.AdamW(model.parameters(), lr=0.1)
            boxes, parts = local_boxes(model), {}
            for number, (name, is_complex) in optimizer_state.tensor_owners(metadata).items():
                parts[number] = optimizer_state.extract_part(tensors[number], is_complex, SIZES[name], boxes.get(name))
            optimizer_state.prepare(metadata, parts, optimizer_at_rank, model, is_local_part=True).install()
            copied_from_parts = optimizer_state.copy_state(optimizer_at_rank, model)
            optimizer_state.prepare(metadata, tensors, optimizer_at_rank, model).install()
            copied = optimizer_state.copy_state(optimizer_at_rank, model)
            assert copied.metadata == copied_from_parts.metadata == metadata
            for number, tensor in copied.tensors.items():
                assert torch.equal(tensor, copied_from_parts.tensors[number])
                part = copied.parts.get(number)
                if part is None:
                    assert torch.equal(tensor, tensors[number])
                else:
                    gathered.setdefault(number, torch.full(part.sizes, 99.0))[part.box.slices] = tensor
    for number, tensor in gathered.items():
        assert torch.equal(tensor, tensors[number])


def test_unsharded_state_of_a_sharded_parameter_is_refused():
    with fake_rank(0, 2):
        mesh = make_mesh((2,), 0)
        model = shard_model(
            UnshardedModel(dict.fromkeys(SIZES, torch.float32), 1), mesh, dict.fromkeys(SIZES, (Replicate(),))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(iter(model.parameters()))]["seen"] = torch.zeros(4)
        with pytest.raises(ValueError, match="seen of a is not sharded"):
            optimizer_state.copy_state(optimizer, model)
