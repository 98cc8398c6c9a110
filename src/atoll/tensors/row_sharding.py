"""Who of an island's ranks encodes and decodes which values of a fragment, where each rank holds whole rows.

A rank's rows of a tensor are a stretch of the flat fragment then, without a gap. Codecs work in blocks that know
nothing of rows, so what a rank encodes are strips: its stretches, cut where blocks begin. The few values beyond its own
rows that end the last block of a strip come from the ranks that hold them. All strips together are the bytes that one
rank would have made of the whole fragment. What a rank decodes is the blocks in which its rows are; those at either end
it shares with its neighbours, and both fetch them.
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
"""Values; a multiple of every codec's block, so that strips stay the same where the codec is chosen anew."""

ALIGNMENT_BYTES = 8
"""Bytes: every strip begins at a multiple, so that its numbers can be viewed as such."""

MAX_MERGE_THRESHOLD = 2**14
MERGE_THRESHOLD_DIVISOR = 64
FOREIGN_SHARE_DIVISOR = 8


def merge_threshold(numel: int) -> int:
    """Values of a fragment for which a request is not worth its cost. A shorter stretch is encoded with the one before
    it, and what lies between two stretches is fetched with both. It is a small part of the fragment, whose whole no
    rank shall hold."""
    return min(MAX_MERGE_THRESHOLD, numel // MERGE_THRESHOLD_DIVISOR)


class RowRange(NamedTuple):
    """Values in a row of a flat fragment, which one rank gives. `replicas` hold the same: rank, and where."""

    begin: int
    end: int
    rank: int
    packed_begin: int  # in the packed fragment of the rank
    replicas: tuple[tuple[int, int], ...]


class EncodeRange(NamedTuple):
    """Whole blocks of a flat fragment; `at`: where they begin in the row of all strips of a rank."""

    begin: int
    end: int
    buffer_begin: int


class RowTransfer(NamedTuple):
    """From the packed rows of one rank into the strips of another, or of the same."""

    source_rank: int
    packed_begin: int
    target_rank: int
    buffer_begin: int
    numel: int


class FragmentSharding(NamedTuple):
    """One fragment over all ranks."""

    numel: int
    row_ranges: tuple[RowRange, ...]  # in the order of the fragment, all of it
    encode_ranges: tuple[tuple[EncodeRange, ...], ...]  # by rank
    transfers: tuple[RowTransfer, ...]  # in the order of the fragment

    def sends_from(self, rank: int) -> list[RowTransfer]:
        """To other ranks."""
        return [move for move in self.transfers if move.source_rank == rank != move.target_rank]

    def receives_at(self, rank: int) -> list[RowTransfer]:
        """From other ranks."""
        return [move for move in self.transfers if move.target_rank == rank != move.source_rank]

    def local_transfers(self, rank: int) -> list[RowTransfer]:
        return [move for move in self.transfers if move.target_rank == rank == move.source_rank]

    def owned_ranges(self, rank: int) -> list[RowRange]:
        return [stretch for stretch in self.row_ranges if stretch.rank == rank]

    def encode_numel(self, rank: int) -> int:
        return sum(strip.end - strip.begin for strip in self.encode_ranges[rank])


def is_sharded_by_rows(rank_boxes: Sequence[Boxes], tensors: Iterable[TensorInfo]) -> bool:
    """Is anything dealt out, and has every rank whole rows of all that travels?"""
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
    """Of ranks that hold the same rows the first one gives them, as `sharding.assign_owners` says."""
    numel = plan.numel(fragment)
    stretches = _stretches(plan, fragment, rank_boxes)
    covered = 0
    for stretch in stretches:
        assert stretch.begin == covered, f"values {covered} to {stretch.begin} of fragment {fragment} are nobody's"
        covered = stretch.end
    assert covered == numel, f"values from {covered} on of fragment {fragment} are nobody's"
    return FragmentSharding(numel, tuple(stretches), *_strips(stretches, numel, len(rank_boxes)))


def _stretches(plan: FragmentPlan, fragment: int, everybody: Sequence[Boxes]) -> list[RowRange]:
    made: list[RowRange] = []
    for windows_of_piece in zip(*(shard_windows(plan, fragment, boxes) for boxes in everybody), strict=True):
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, window in enumerate(windows_of_piece):
            count = window.last - window.first
            if count:
                row = (window.end - window.begin) // window.shape[0]
                begin = window.begin + window.where[0].start * row
                found.setdefault((begin, begin + count), []).append((rank, window.first))
        for (begin, end), holders in sorted(found.items()):
            (rank, first), *others = holders
            made.append(RowRange(begin, end, rank, first, tuple(others)))
    return made


def _strips(
    stretches: Sequence[RowRange], numel: int, ranks: int
) -> tuple[tuple[tuple[EncodeRange, ...], ...], tuple[RowTransfer, ...]]:
    """A cell is encoded by the rank that gives its first value, or, where that is of a slight stretch, by the rank of
    the strip before it. With many ranks all stretches may be slight: no strip takes in more than an eighth of the
    fragment."""
    strips: list[list[EncodeRange]] = [[] for _ in range(ranks)]
    moves: list[RowTransfer] = []
    newest: tuple[int, EncodeRange] | None = None
    foreign = 0  # values of others that the newest strip has taken in
    for stretch in stretches:
        begin, end = (min(numel, -(-each // CELL_NUMEL) * CELL_NUMEL) for each in (stretch.begin, stretch.end))
        head = min(begin, stretch.end)
        if stretch.begin < head:  # the end of a cell that began before
            assert newest is not None
            taker, strip = newest
            count = head - stretch.begin
            moves.append(
                RowTransfer(
                    stretch.rank, stretch.packed_begin, taker, strip.buffer_begin + stretch.begin - strip.begin, count
                )
            )
        if begin >= end:
            continue
        count = stretch.end - stretch.begin
        is_slight = count < merge_threshold(numel) and foreign + count <= numel // FOREIGN_SHARE_DIVISOR
        rank = newest[0] if newest is not None and is_slight else stretch.rank
        foreign = foreign + count if rank != stretch.rank else 0
        mine = strips[rank]
        if mine and mine[-1].end == begin:
            mine[-1] = mine[-1]._replace(end=end)
        else:
            mine.append(EncodeRange(begin, end, mine[-1].buffer_begin + mine[-1].end - mine[-1].begin if mine else 0))
        newest = rank, mine[-1]
        if head < stretch.end:
            at, first = mine[-1].buffer_begin + head - mine[-1].begin, stretch.packed_begin + head - stretch.begin
            moves.append(RowTransfer(stretch.rank, first, rank, at, stretch.end - head))
    return tuple(tuple(each) for each in strips), tuple(moves)


# --------------------------------------------------------------------------------------------------------------- bytes


class BytePart(NamedTuple):
    """Bytes in a row of a whole encoded fragment, and where a rank has them among its own."""

    begin: int  # in the whole
    local_begin: int
    size: int


class ByteLayout(NamedTuple):
    """The bytes of some strips, as a rank has them: one strip after the other, each encoded as if it were alone."""

    size: int
    starts: tuple[int, ...]  # of the strips
    parts: tuple[BytePart, ...]

    def to_global(self, begin: int, end: int) -> list[BytePart]:
        """What a range of the rank's own bytes is of the whole. Between strips there is nothing."""
        found = []
        for part in self.parts:
            low, high = max(begin, part.local_begin), min(end, part.local_begin + part.size)
            if low < high:
                found.append(BytePart(part.begin + low - part.local_begin, low, high - low))
        return found

    def to_local(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Which of the rank's own bytes are in a range of the whole."""
        found = []
        for part in self.parts:
            low, high = max(begin, part.begin), min(end, part.begin + part.size)
            if low < high:
                found.append((part.local_begin + low - part.begin, part.local_begin + high - part.begin))
        return found


def make_byte_layout(by: Codec, numel: int, strips: Sequence[EncodeRange]) -> ByteLayout:
    size = 0
    starts: list[int] = []
    parts: list[BytePart] = []
    for strip in strips:
        count = strip.end - strip.begin
        starts.append(size)
        alone = by.byte_ranges(count, 0, count)
        for (begin, end), (own, _) in zip(by.byte_ranges(numel, strip.begin, strip.end), alone, strict=True):
            if begin < end:
                parts.append(BytePart(begin, size + own, end - begin))
        size += -(-by.encoded_size(count) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return ByteLayout(size, tuple(starts), tuple(parts))


class ShardEncoder:
    """Encodes the strips of one fragment at one rank, each with its own error feedback."""

    def __init__(self, up: Codec, numel: int, strips: Sequence[EncodeRange]) -> None:
        self._numel = numel
        self._strips = strips
        self._feedbacks = [ErrorFeedback(up, strip.end - strip.begin) for strip in strips]

    @property
    def host_bytes(self) -> int:
        return sum(2 * feedback.residual.nbytes for feedback in self._feedbacks)

    def encode(self, x: Tensor, by: Codec) -> tuple[ByteLayout, Tensor]:
        """`x`: the values of all strips, one after the other."""
        laid = make_byte_layout(by, self._numel, self._strips)
        data = torch.empty(laid.size, dtype=torch.uint8)
        for strip, start, feedback in zip(self._strips, laid.starts, self._feedbacks, strict=True):
            count = strip.end - strip.begin
            feedback.encode(
                x[strip.buffer_begin : strip.buffer_begin + count], data[start : start + by.encoded_size(count)], by
            )
        return laid, data

    def settle(self, sent: bool) -> None:
        for feedback in self._feedbacks:
            feedback.settle(sent)


def covering_ranges(by: Codec, numel: int, stretches: Sequence[RowRange]) -> list[EncodeRange]:
    """The blocks in which these values are, stretches that are near each other in one strip."""
    made: list[EncodeRange] = []
    for stretch in stretches:
        begin = stretch.begin // by.block_size * by.block_size
        end = min(numel, -(-stretch.end // by.block_size) * by.block_size)
        if made and begin <= made[-1].end + merge_threshold(numel):
            made[-1] = made[-1]._replace(end=max(end, made[-1].end))
        else:
            made.append(EncodeRange(begin, end, 0))
    return made


def apply_rows(
    by: Codec,
    strips: Sequence[EncodeRange],
    laid: ByteLayout,
    data: Tensor,
    stretches: Sequence[RowRange],
    old: Tensor | None,
    out: Tensor,
) -> None:
    """Into the packed `out` the values of these stretches: what came, added to `old`, as
    `outer_optimizer.UpdateApplier` does it.

    `old` None: they are the values themselves.
    """  # fmt: skip
    if old is None and not by.is_lossless:
        raise ValueError(f"an update in {by.name} needs the value that it is added to")
    scratch = Scratch(max((strip.end - strip.begin for strip in strips), default=0))
    for strip, start in zip(strips, laid.starts, strict=True):
        count = strip.end - strip.begin
        encoded = data[start : start + by.encoded_size(count)]
        for begin in range(0, count, CHUNK_NUMEL):
            came = scratch.values[: min(CHUNK_NUMEL, count - begin)]
            by.decode_chunk(encoded, count, begin, came, scratch)
            for low, high, first in _within(stretches, strip.begin + begin, strip.begin + begin + came.numel()):
                part, at = came[low:high], slice(first, first + high - low)
                if old is None or by.is_lossless:
                    out[at].copy_(part)
                else:
                    torch.add(old[at], part, out=out[at])


def _within(stretches: Sequence[RowRange], begin: int, end: int) -> Iterable[tuple[int, int, int]]:
    """What of these stretches is in a range: from where to where, counted from its begin, and where in the rows."""
    for stretch in stretches:
        low, high = max(begin, stretch.begin), min(end, stretch.end)
        if low < high:
            yield low - begin, high - begin, stretch.packed_begin + low - stretch.begin
