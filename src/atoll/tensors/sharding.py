"""Find this rank's part of each tensor, and the position of that part in a flat fragment.

Plans describe whole tensors, so that islands with any number of ranks share one. A rank holds a box of each tensor:
the whole tensor if it is replicated, else the shard that follows from the mesh and the placements of its DTensor. A
flat fragment has one of two layouts: whole, as it is sent between islands, or packed, with the rows of one rank only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from atoll.tensors.plan import FragmentPlan, Piece, TensorInfo, named_tensors


class Box(NamedTuple):
    """Part of a tensor: its offset and size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


Boxes: TypeAlias = Mapping[str, Box]
"""Boxes of one rank by tensor name. Tensors without an entry are replicated."""

Span: TypeAlias = tuple[int, int]


# ------------------------------------------------------------------------------------------------------------- tensors


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing torch.distributed.tensor: most models have none."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the memory of the tensor."""
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def local_box(tensor: Tensor) -> Box | None:
    """Return the box of this process's part; None for the whole tensor."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    sizes, coordinate = tuple(sharded.shape), sharded.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Box((0,) * len(sizes), (0,) * len(sizes))
    box = box_from_placements(sizes, tuple(sharded.device_mesh.shape), tuple(coordinate), sharded.placements)
    local = tuple(local_tensor(tensor).shape)
    if box.shape != local:  # FSDP over tensor parallelism, where a size is not a multiple of the ranks
        raise ValueError(f"by its placements this rank has {box.shape} of {sizes}, but its local tensor is {local}")
    return None if box.shape == sizes else box


def box_from_placements(
    sizes: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Box:
    """Return the box of a tensor of these sizes for a rank at these mesh coordinates. Raise ValueError if it is none.

    The dimensions of the mesh cut one after the other, into pieces like those of `torch.chunk`. If FSDP cuts a tensor
    that tensor parallelism has cut before, the placement has a split factor, and the order is reversed.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError("the tensor is a partial sum over ranks and has no local value; redistribute it first")
    offset, shape = [0] * len(sizes), list(sizes)
    for dim, length in enumerate(sizes):
        spans = [(0, length)]
        for size, index, factor in _cuts(dim, mesh, coordinate, placements):
            cut = [_chunk(_chunk(spans, factor, each), size, index) for each in range(factor)]
            spans = _merge_adjacent(span for spans in cut for span in spans)
        if len(spans) > 1:
            raise ValueError(
                f"dimension {dim} is sharded into separate spans, {spans[:3]}: give each rank contiguous rows"
            )
        offset[dim], shape[dim] = (spans[0][0], spans[0][1] - spans[0][0]) if spans else (length, 0)
    return Box(tuple(offset), tuple(shape))


def _cuts(
    dim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[tuple[int, int, int]]:
    """Return the splits of a dimension in order: number of pieces, index of this rank's piece, and split factor."""
    cuts = [
        (size, index, int(getattr(placement, "split_factor", 1)))
        for size, index, placement in zip(mesh, coordinate, placements, strict=True)
        if getattr(placement, "dim", None) == dim
    ]
    first = cuts[0] if cuts else None
    if first is not None and first[2] > 1 and first[2] == math.prod(size for size, _, _ in cuts[1:]):
        return [*cuts[1:], (first[0], first[1], 1)]  # the first mesh dimension is split last
    return cuts


def _chunk(spans: list[Span], pieces: int, index: int) -> list[Span]:
    """Return piece `index` of the rows of all these spans together."""
    total = sum(end - begin for begin, end in spans)
    size = -(-total // pieces)
    first, last = min(total, index * size), min(total, index * size + size)
    result, passed = [], 0
    for begin, end in spans:
        low, high = max(first - passed, 0), min(last - passed, end - begin)
        if low < high:
            result.append((begin + low, begin + high))
        passed += end - begin
    return result


def _merge_adjacent(spans: Iterable[Span]) -> list[Span]:
    result: list[Span] = []
    for begin, end in spans:
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def local_boxes(model: nn.Module) -> dict[str, Box]:
    """Return the boxes of all tensors of a model that this process holds in part."""
    result = {}
    for name, tensor in named_tensors(model).items():
        try:
            box = local_box(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if box is not None:
            result[name] = box
    return result


# ----------------------------------------------------------------------------------------------------------- fragments


class ShardWindow(NamedTuple):
    """Position of a rank's part of one piece."""

    piece: Piece
    begin: int  # range of the piece in the whole flat fragment
    end: int
    shape: tuple[int, ...]  # shape of the piece
    slices: tuple[slice, ...]  # position of the part in the piece
    local_rows: slice  # rows of the part in the rank's local tensor
    packed_begin: int  # range of the part in the rank's packed fragment
    packed_end: int

    def view(self, whole: Tensor) -> Tensor:
        """Return the view of the part in a whole flat fragment."""
        return whole[self.begin : self.end].view(self.shape)[self.slices]

    def view_packed(self, packed: Tensor) -> Tensor:
        return packed[self.packed_begin : self.packed_end].view(self.part_shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.slices)


def shard_windows(
    plan: FragmentPlan, fragment: int, boxes: Boxes, names: frozenset[str] | None = None
) -> list[ShardWindow]:
    """Return the window of a rank with these boxes in each piece of a fragment. Windows may be empty.

    Args:
        names: Return windows of these tensors only. The packed layout is still that of all tensors.
    """
    result, first = [], 0
    for piece, begin, end in plan.spans(fragment):
        sizes = plan.by_name[piece.tensor].shape or (1,)
        box = boxes.get(piece.tensor) or Box((0,) * len(sizes), sizes)
        low = max(piece.start, box.offset[0])
        high = max(low, min(piece.stop, box.offset[0] + box.shape[0]))
        if math.prod(box.shape[1:]) == 0:
            high = low
        slices = (slice(low - piece.start, high - piece.start), *box.slices[1:])
        shape = (piece.stop - piece.start, *sizes[1:])
        if high == low:
            slices = tuple(slice(0, 0) for _ in slices)
        last = first + math.prod(each.stop - each.start for each in slices)
        rows = slice(low - box.offset[0], high - box.offset[0]) if high > low else slice(0, 0)
        if names is None or piece.tensor in names:
            result.append(ShardWindow(piece, begin, end, shape, slices, rows, first, last))
        first = last
    return result


def assign_owners(rank_boxes: Sequence[Boxes], tensors: Iterable[TensorInfo]) -> list[frozenset[str]]:
    """Return for each rank the tensors whose part it sends: the first of several ranks with the same part sends it.

    Raise ValueError if the parts do not cover a tensor.
    """
    mine: list[set[str]] = [set() for _ in rank_boxes]
    for info in tensors:
        if not info.is_synced:
            continue
        seen: dict[Box, int] = {}
        for rank, boxes in enumerate(rank_boxes):
            box = boxes.get(info.name) or Box((0,) * len(info.shape), info.shape)
            if math.prod(box.shape) and box not in seen:
                seen[box] = rank
                mine[rank].add(info.name)
        if sum(box.numel for box in seen) != math.prod(info.shape):
            raise ValueError(f"the shards of {info.name} on the ranks of this island do not cover the tensor")
    return [frozenset(names) for names in mine]


def copy_box(whole: Tensor, box: Box | None) -> Tensor:
    """Return a copy of a rank's part of a tensor."""
    part = whole if box is None else whole[box.slices]
    return part.clone(memory_format=torch.contiguous_format)


def shard_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is sharded like `like`, from this rank's part of it."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    spec: Any = like
    result: Tensor = DTensor.from_local(
        local, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
    )
    return result
