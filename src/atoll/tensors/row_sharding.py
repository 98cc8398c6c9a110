"""Assign the values of a fragment to the ranks of an island that encode and decode them, if each rank has whole rows.

The rows of a tensor at one rank are a contiguous row range of the flat fragment. Blocks of codecs are not aligned with
rows, so a rank encodes strips (`EncodeRange`): its row ranges, cut at block boundaries. The few values of other ranks
that complete the last block of a strip are sent by these ranks. All strips together are the bytes that a single rank
would encode. A rank decodes the blocks that contain its rows. Neighbors share a block at a boundary, and both download
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, Codec, ErrorFeedback, Scratch
from atoll.tensors.plan import FragmentPlan, TensorInfo
from atoll.tensors.sharding import Boxes, shard_windows

CELL_NUMEL = 256
"""Granularity of strips in values: a multiple of every codec's block, so that a change of codec does not move them."""

ALIGNMENT_BYTES = 8
"""Alignment of every strip in a rank's bytes, so that its numbers can be viewed as such."""

MAX_MERGE_THRESHOLD = 2**14
MERGE_THRESHOLD_DIVISOR = 64
FOREIGN_SHARE_DIVISOR = 8


def merge_threshold(numel: int) -> int:
    """Return the number of values below which a separate request costs more than it saves.

    A shorter row range is encoded together with the one before it. A shorter gap between two row ranges is downloaded
    along with them. The threshold is a small share of the fragment, because no rank should hold all of it.
    """
    return min(MAX_MERGE_THRESHOLD, numel // MERGE_THRESHOLD_DIVISOR)


class RowRange(NamedTuple):
    """Contiguous values of a flat fragment that one rank sends. `replicas`: other ranks with them, and their offset."""

    begin: int
    end: int
    rank: int
    packed_begin: int  # offset in the packed fragment of the rank
    replicas: tuple[tuple[int, int], ...]


class EncodeRange(NamedTuple):
    """Whole blocks of a flat fragment. `buffer_begin` is their offset in the buffer of all strips of a rank."""

    begin: int
    end: int
    buffer_begin: int


class RowTransfer(NamedTuple):
    """Copy from the packed rows of one rank into the strips of another rank, or of the same rank."""

    source_rank: int
    packed_begin: int
    target_rank: int
    buffer_begin: int
    numel: int


class FragmentSharding(NamedTuple):
    """Distribution of one fragment over all ranks."""

    numel: int
    row_ranges: tuple[RowRange, ...]  # ranges that cover the fragment, in order
    encode_ranges: tuple[tuple[EncodeRange, ...], ...]  # by rank
    transfers: tuple[RowTransfer, ...]  # in the order of the fragment

    def sends_from(self, rank: int) -> list[RowTransfer]:
        """Return the transfers from this rank to other ranks."""
        return [move for move in self.transfers if move.source_rank == rank != move.target_rank]

    def receives_at(self, rank: int) -> list[RowTransfer]:
        """Return the transfers from other ranks to this rank."""
        return [move for move in self.transfers if move.target_rank == rank != move.source_rank]

    def local_transfers(self, rank: int) -> list[RowTransfer]:
        return [move for move in self.transfers if move.target_rank == rank == move.source_rank]

    def owned_ranges(self, rank: int) -> list[RowRange]:
        return [row_range for row_range in self.row_ranges if row_range.rank == rank]

    def encode_numel(self, rank: int) -> int:
        return sum(strip.end - strip.begin for strip in self.encode_ranges[rank])


def is_sharded_by_rows(rank_boxes: Sequence[Boxes], tensors: Iterable[TensorInfo]) -> bool:
    """Return whether any tensor is sharded, and every rank has whole rows of all synchronized tensors."""
    sharded = False
    for info in tensors:
        for boxes in rank_boxes:
            box = boxes.get(info.name) if info.is_synced else None
            if box is not None:
                sharded = True
                if math.prod(box.shape) and box.shape[1:] != info.shape[1:]:
                    return False
    return sharded


def shard_fragment(plan: FragmentPlan, fragment: int, rank_boxes: Sequence[Boxes]) -> FragmentSharding:
    """Distribute a fragment. The first of the ranks with the same rows sends them, as in `sharding.assign_owners`."""
    numel = plan.numel(fragment)
    row_ranges = _find_row_ranges(plan, fragment, rank_boxes)
    covered = 0
    for row_range in row_ranges:
        assert row_range.begin == covered, (
            f"values {covered} to {row_range.begin} of fragment {fragment} belong to no rank"
        )
        covered = row_range.end
    assert covered == numel, f"values from {covered} on of fragment {fragment} belong to no rank"
    return FragmentSharding(numel, tuple(row_ranges), *_assign_encode_ranges(row_ranges, numel, len(rank_boxes)))


def _find_row_ranges(plan: FragmentPlan, fragment: int, rank_boxes: Sequence[Boxes]) -> list[RowRange]:
    result: list[RowRange] = []
    for windows_of_piece in zip(*(shard_windows(plan, fragment, boxes) for boxes in rank_boxes), strict=True):
        holders: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, window in enumerate(windows_of_piece):
            count = window.packed_end - window.packed_begin
            if count:
                row = (window.end - window.begin) // window.shape[0]
                begin = window.begin + window.slices[0].start * row
                holders.setdefault((begin, begin + count), []).append((rank, window.packed_begin))
        for (begin, end), replicas in sorted(holders.items()):
            (rank, first), *others = replicas
            result.append(RowRange(begin, end, rank, first, tuple(others)))
    return result


def _assign_encode_ranges(
    row_ranges: Sequence[RowRange], numel: int, ranks: int
) -> tuple[tuple[tuple[EncodeRange, ...], ...], tuple[RowTransfer, ...]]:
    """Assign each cell to a rank that encodes it, and return the strips of each rank and the transfers.

    It is the rank that sends the first value of the cell. If that value is in a small row range, it is the rank of the
    strip before. With many ranks all row ranges may be small, so no strip includes more than an eighth of the fragment
    from other ranks.
    """
    strips: list[list[EncodeRange]] = [[] for _ in range(ranks)]
    moves: list[RowTransfer] = []
    newest: tuple[int, EncodeRange] | None = None
    foreign = 0  # values from other ranks in the newest strip
    for row_range in row_ranges:
        begin, end = (min(numel, -(-each // CELL_NUMEL) * CELL_NUMEL) for each in (row_range.begin, row_range.end))
        head = min(begin, row_range.end)
        if row_range.begin < head:  # the end of a cell that began in the previous range
            assert newest is not None
            encoder, strip = newest
            count = head - row_range.begin
            moves.append(
                RowTransfer(
                    row_range.rank,
                    row_range.packed_begin,
                    encoder,
                    strip.buffer_begin + row_range.begin - strip.begin,
                    count,
                )
            )
        if begin >= end:
            continue
        count = row_range.end - row_range.begin
        is_small = count < merge_threshold(numel) and foreign + count <= numel // FOREIGN_SHARE_DIVISOR
        rank = newest[0] if newest is not None and is_small else row_range.rank
        foreign = foreign + count if rank != row_range.rank else 0
        mine = strips[rank]
        if mine and mine[-1].end == begin:
            mine[-1] = mine[-1]._replace(end=end)
        else:
            mine.append(EncodeRange(begin, end, mine[-1].buffer_begin + mine[-1].end - mine[-1].begin if mine else 0))
        newest = rank, mine[-1]
        if head < row_range.end:
            at, first = mine[-1].buffer_begin + head - mine[-1].begin, row_range.packed_begin + head - row_range.begin
            moves.append(RowTransfer(row_range.rank, first, rank, at, row_range.end - head))
    return tuple(tuple(each) for each in strips), tuple(moves)


# --------------------------------------------------------------------------------------------------------------- bytes


class BytePart(NamedTuple):
    """Contiguous bytes of a whole encoded fragment, and their offset in a rank's own bytes."""

    begin: int  # offset in the whole fragment
    local_begin: int
    size: int


class ByteLayout(NamedTuple):
    """Layout of a rank's encoded strips: one after the other, each encoded separately."""

    size: int
    starts: tuple[int, ...]  # offset of each strip
    parts: tuple[BytePart, ...]

    def to_global(self, begin: int, end: int) -> list[BytePart]:
        """Map a range of the rank's own bytes to the whole fragment. The padding between strips is omitted."""
        ranges = []
        for part in self.parts:
            low, high = max(begin, part.local_begin), min(end, part.local_begin + part.size)
            if low < high:
                ranges.append(BytePart(part.begin + low - part.local_begin, low, high - low))
        return ranges

    def to_local(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Map a range of the whole fragment to ranges of the rank's own bytes."""
        ranges = []
        for part in self.parts:
            low, high = max(begin, part.begin), min(end, part.begin + part.size)
            if low < high:
                ranges.append((part.local_begin + low - part.begin, part.local_begin + high - part.begin))
        return ranges


def make_byte_layout(codec: Codec, numel: int, strips: Sequence[EncodeRange]) -> ByteLayout:
    size = 0
    starts: list[int] = []
    parts: list[BytePart] = []
    for strip in strips:
        count = strip.end - strip.begin
        starts.append(size)
        own_ranges = codec.byte_ranges(count, 0, count)
        for (begin, end), (own, _) in zip(codec.byte_ranges(numel, strip.begin, strip.end), own_ranges, strict=True):
            if begin < end:
                parts.append(BytePart(begin, size + own, end - begin))
        size += -(-codec.encoded_size(count) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return ByteLayout(size, tuple(starts), tuple(parts))


class ShardEncoder:
    """Encode the strips of one fragment at one rank, each with its own error feedback."""

    def __init__(self, codec: Codec, numel: int, strips: Sequence[EncodeRange]) -> None:
        self._numel = numel
        self._strips = strips
        self._feedbacks = [ErrorFeedback(codec, strip.end - strip.begin) for strip in strips]

    @property
    def host_bytes(self) -> int:
        return sum(2 * feedback.residual.nbytes for feedback in self._feedbacks)

    def encode(self, x: Tensor, codec: Codec) -> tuple[ByteLayout, Tensor]:
        """Encode `x`, the concatenated values of all strips."""
        layout = make_byte_layout(codec, self._numel, self._strips)
        data = torch.empty(layout.size, dtype=torch.uint8)
        for strip, start, feedback in zip(self._strips, layout.starts, self._feedbacks, strict=True):
            count = strip.end - strip.begin
            feedback.encode(
                x[strip.buffer_begin : strip.buffer_begin + count],
                data[start : start + codec.encoded_size(count)],
                codec,
            )
        return layout, data

    def settle(self, sent: bool) -> None:
        for feedback in self._feedbacks:
            feedback.settle(sent)


def covering_ranges(codec: Codec, numel: int, row_ranges: Sequence[RowRange]) -> list[EncodeRange]:
    """Return the blocks that contain these values. Row ranges with a small gap share one range."""
    result: list[EncodeRange] = []
    for row_range in row_ranges:
        begin = row_range.begin // codec.block_size * codec.block_size
        end = min(numel, -(-row_range.end // codec.block_size) * codec.block_size)
        if result and begin <= result[-1].end + merge_threshold(numel):
            result[-1] = result[-1]._replace(end=max(end, result[-1].end))
        else:
            result.append(EncodeRange(begin, end, 0))
    return result


def apply_rows(
    codec: Codec,
    strips: Sequence[EncodeRange],
    layout: ByteLayout,
    data: Tensor,
    row_ranges: Sequence[RowRange],
    old: Tensor | None,
    out: Tensor,
) -> None:
    """Apply a downloaded update to the packed values of these row ranges, like `outer_optimizer.UpdateApplier`.

    Args:
        data: The encoded strips.
        old: Packed values before the update; None if the update is the values themselves.
        out: Packed values after the update.
    """
    if old is None and not codec.is_lossless:
        raise ValueError(f"an update in {codec.name} needs the value that it is added to")
    scratch = Scratch(max((strip.end - strip.begin for strip in strips), default=0))
    for strip, start in zip(strips, layout.starts, strict=True):
        count = strip.end - strip.begin
        encoded = data[start : start + codec.encoded_size(count)]
        for begin in range(0, count, CHUNK_NUMEL):
            decoded = scratch.values[: min(CHUNK_NUMEL, count - begin)]
            codec.decode_chunk(encoded, count, begin, decoded, scratch)
            for low, high, first in _within(row_ranges, strip.begin + begin, strip.begin + begin + decoded.numel()):
                part, at = decoded[low:high], slice(first, first + high - low)
                if old is None or codec.is_lossless:
                    out[at].copy_(part)
                else:
                    torch.add(old[at], part, out=out[at])


def _within(row_ranges: Sequence[RowRange], begin: int, end: int) -> Iterable[tuple[int, int, int]]:
    """Yield the overlap of each row range with [begin, end): begin and end relative to `begin`, and packed offset."""
    for row_range in row_ranges:
        low, high = max(begin, row_range.begin), min(end, row_range.end)
        if low < high:
            yield low - begin, high - begin, row_range.packed_begin + low - row_range.begin
