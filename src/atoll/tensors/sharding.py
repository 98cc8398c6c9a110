"""Which part of each tensor a rank of an island holds, and where that part is in a flat fragment.

Plans speak of whole tensors, so that islands of any shape share one. A rank holds a box of each: all of it where it is
replicated, else what the mesh and the placements of its DTensor say. A flat fragment is laid out in one of two ways:
whole, as it travels between islands, or packed, with the rows of one rank only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from atoll.tensors.plan import FragmentPlan, Piece, TensorInfo, named_tensors


class Box(NamedTuple):
    """Part of a tensor: where it begins in each dimension, and its sizes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


Boxes: TypeAlias = Mapping[str, Box]
"""By the names of tensors. One that is not here is held whole."""

Span: TypeAlias = tuple[int, int]


# ------------------------------------------------------------------------------------------------------------- tensors


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor, told without loading what makes them: most models have none."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """What of it is in this process. It shares the memory of the tensor."""
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def local_box(tensor: Tensor) -> Box | None:
    """The part that is in this process; None: all of it."""
    if not is_sharded(tensor):
        return None
    held: Any = tensor
    sizes, coordinate = tuple(held.shape), held.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Box((0,) * len(sizes), (0,) * len(sizes))
    box = box_from_placements(sizes, tuple(held.device_mesh.shape), tuple(coordinate), held.placements)
    local = tuple(local_tensor(tensor).shape)
    if box.shape != local:  # FSDP over tensor parallelism, where a size is not a multiple of the ranks
        raise ValueError(f"by its placements this rank has {box.shape} of {sizes}, and it holds {local}")
    return None if box.shape == sizes else box


def box_from_placements(
    sizes: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Box:
    """What a rank at a place of a mesh holds of a tensor of these sizes. Raises ValueError where that is no box.

    Dimensions of the mesh cut one after the other, in pieces as `torch.chunk` makes them. Where FSDP has cut what
    tensor parallelism had cut before, the placement says so by its split factor: the order is the other way round.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError("a tensor that is a sum over ranks has no value of its own; redistribute it first")
    offset, shape = [0] * len(sizes), list(sizes)
    for dim, length in enumerate(sizes):
        spans = [(0, length)]
        for size, which, factor in _cuts(dim, mesh, coordinate, placements):
            cut = [_chunk(_chunk(spans, factor, each), size, which) for each in range(factor)]
            spans = _joined(span for spans in cut for span in spans)
        if len(spans) > 1:
            raise ValueError(
                f"dimension {dim} is dealt out in turns, {spans[:3]}: give each rank rows that are together"
            )
        offset[dim], shape[dim] = (spans[0][0], spans[0][1] - spans[0][0]) if spans else (length, 0)
    return Box(tuple(offset), tuple(shape))


def _cuts(
    dim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[tuple[int, int, int]]:
    """How a dimension is cut, in order: into how many, which of them, and over how many parts in turns."""
    cuts = [
        (size, which, int(getattr(placement, "split_factor", 1)))
        for size, which, placement in zip(mesh, coordinate, placements, strict=True)
        if getattr(placement, "dim", None) == dim
    ]
    first = cuts[0] if cuts else None
    if first is not None and first[2] > 1 and first[2] == math.prod(size for size, _, _ in cuts[1:]):
        return [*cuts[1:], (first[0], first[1], 1)]  # cut last
    return cuts


def _chunk(spans: list[Span], pieces: int, which: int) -> list[Span]:
    """Piece `which` of all rows of these spans together."""
    total = sum(end - begin for begin, end in spans)
    size = -(-total // pieces)
    first, last = min(total, which * size), min(total, which * size + size)
    made, passed = [], 0
    for begin, end in spans:
        low, high = max(first - passed, 0), min(last - passed, end - begin)
        if low < high:
            made.append((begin + low, begin + high))
        passed += end - begin
    return made


def _joined(spans: Iterable[Span]) -> list[Span]:
    made: list[Span] = []
    for begin, end in spans:
        if made and made[-1][1] == begin:
            made[-1] = (made[-1][0], end)
        else:
            made.append((begin, end))
    return made


def local_boxes(model: nn.Module) -> dict[str, Box]:
    """Of all tensors of a model that this process holds in part."""
    made = {}
    for name, tensor in named_tensors(model).items():
        try:
            box = local_box(tensor)
        except ValueError as wrong:
            raise ValueError(f"{name}: {wrong}") from None
        if box is not None:
            made[name] = box
    return made


# ----------------------------------------------------------------------------------------------------------- fragments


class ShardWindow(NamedTuple):
    """Where a rank's part of one piece is."""

    piece: Piece
    begin: int  # of the piece, in the whole flat fragment
    end: int
    shape: tuple[int, ...]  # of the piece
    slices: tuple[slice, ...]  # of the part, in the piece
    local_rows: slice  # of the part, in what the rank holds of the tensor
    packed_begin: int  # of the part, in the packed fragment of the rank
    packed_end: int

    def view(self, whole: Tensor) -> Tensor:
        """The part, in a whole flat fragment whose memory it shares."""
        return whole[self.begin : self.end].view(self.shape)[self.slices]

    def view_packed(self, packed: Tensor) -> Tensor:
        return packed[self.packed_begin : self.packed_end].view(self.part_shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.slices)


def shard_windows(
    plan: FragmentPlan, fragment: int, boxes: Boxes, names: frozenset[str] | None = None
) -> list[ShardWindow]:
    """Of every piece of a fragment what a rank with these boxes holds, also where that is nothing.

    `names`: only of these tensors. The packed layout is that of all.
    """
    made, first = [], 0
    for piece, begin, end in plan.spans(fragment):
        sizes = plan.by_name[piece.tensor].shape or (1,)
        box = boxes.get(piece.tensor) or Box((0,) * len(sizes), sizes)
        low = max(piece.start, box.offset[0])
        high = max(low, min(piece.stop, box.offset[0] + box.shape[0]))
        if math.prod(box.shape[1:]) == 0:
            high = low
        where = (slice(low - piece.start, high - piece.start), *box.slices[1:])
        shape = (piece.stop - piece.start, *sizes[1:])
        if high == low:
            where = tuple(slice(0, 0) for _ in where)
        last = first + math.prod(each.stop - each.start for each in where)
        rows = slice(low - box.offset[0], high - box.offset[0]) if high > low else slice(0, 0)
        if names is None or piece.tensor in names:
            made.append(ShardWindow(piece, begin, end, shape, where, rows, first, last))
        first = last
    return made


def assign_owners(rank_boxes: Sequence[Boxes], tensors: Iterable[TensorInfo]) -> list[frozenset[str]]:
    """By rank, the tensors of which it gives its part: of ranks that hold the same, the first one does.

    Raises ValueError where a part of a tensor is nobody's.
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
            raise ValueError(f"the parts of {info.name} that the ranks of this island hold do not make the whole of it")
    return [frozenset(names) for names in mine]


def copy_box(whole: Tensor, box: Box | None) -> Tensor:
    """A rank's part of a tensor, in memory of its own."""
    part = whole if box is None else whole[box.slices]
    return part.clone(memory_format=torch.contiguous_format)


def shard_like(local: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a tensor that lies as `like` does."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    spec: Any = like
    made: Tensor = DTensor.from_local(
        local, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
    )
    return made
