"""Ranks that encode and decode their own rows give the same bits as one process with the whole fragment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors import row_sharding
from atoll.tensors.codecs import CODECS, Codec, ErrorFeedback, get_codec
from atoll.tensors.outer_optimizer import UpdateApplier
from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan
from atoll.tensors.row_sharding import (
    FragmentSharding,
    ShardEncoder,
    apply_rows,
    covering_ranges,
    is_sharded_by_rows,
    make_byte_layout,
    shard_fragment,
)
from atoll.tensors.sharding import Box, Boxes, shard_windows


class Case(NamedTuple):
    plan: FragmentPlan
    boxes_by_rank: tuple[Boxes, ...]


def chunk_range(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the rows of a rank, divided like `torch.chunk`: the last ranks may have fewer rows, or none."""
    each = -(-rows // ranks)
    return min(rows, rank * each), min(rows, rank * each + each)


def make_case(
    sizes: Sequence[tuple[int, ...]], ranks: int, replicas: int, replicated: set[int], method: str, fragments: int
) -> Case:
    """Return a plan and the boxes of each rank.

    Args:
        replicated: Indices of the tensors that are whole at every rank.
    """
    tensors = tuple(TensorInfo(f"t{n}", size, "float32", "weight") for n, size in enumerate(sizes))
    boxes = []
    for rank in range(ranks):
        rank_boxes = {}
        for index, info in enumerate(tensors):
            if index not in replicated:
                first, last = chunk_range(info.shape[0], ranks, rank)
                rank_boxes[info.name] = Box((first, *(0 for _ in info.shape[1:])), (last - first, *info.shape[1:]))
        boxes.append(rank_boxes)
    return Case(make_plan(tensors, fragments, method), tuple(boxes * replicas))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.tuples(st.integers(1, 70), st.integers(1, 40)) | st.tuples(st.integers(1, 900))
    sizes = draw(st.lists(size, min_size=1, max_size=5))
    replicated = draw(st.sets(st.integers(1, 5)))
    ranks, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    method, fragments = draw(st.sampled_from(["balanced", "rows"])), draw(st.integers(1, 3))
    return make_case(sizes, ranks, replicas, replicated, method, fragments)


def pack_rows(case: Case, p: int, whole: Tensor) -> list[Tensor]:
    """Return the values of each rank, packed."""
    return [
        torch.cat([window.view(whole).reshape(-1) for window in shard_windows(case.plan, p, boxes)])
        for boxes in case.boxes_by_rank
    ]


def gather_strips(share: FragmentSharding, packed: list[Tensor], rank: int) -> Tensor:
    """Return the values that a rank encodes: its own, and a few of other ranks."""
    strips = torch.full((share.encode_numel(rank),), torch.nan)
    for move in [*share.local_transfers(rank), *share.receives_at(rank)]:
        strips[move.buffer_begin : move.buffer_begin + move.numel] = packed[move.source_rank][
            move.packed_begin : move.packed_begin + move.numel
        ]
    return strips


class IslandEncoder:
    """Encoders of all ranks of an island."""

    def __init__(self, case: Case, p: int, codec: Codec) -> None:
        self.case, self.p = case, p
        self.share = shard_fragment(case.plan, p, case.boxes_by_rank)
        self.encoders = [ShardEncoder(codec, self.share.numel, strips) for strips in self.share.encode_ranges]

    def encode(self, x: Tensor, codec: Codec) -> Tensor:
        packed = pack_rows(self.case, self.p, x)
        whole = torch.zeros(codec.encoded_size(x.numel()), dtype=torch.uint8)
        written = torch.zeros(whole.numel(), dtype=torch.int32)
        for rank, encoder in enumerate(self.encoders):
            layout, data = encoder.encode(gather_strips(self.share, packed, rank), codec)
            for part in layout.parts:
                whole[part.begin : part.begin + part.size] = data[part.local_begin : part.local_begin + part.size]
                written[part.begin : part.begin + part.size] += 1
            assert layout.to_global(0, layout.size) == list(layout.parts)
            local_size = sum(end - begin for begin, end in layout.to_local(0, whole.numel()))
            assert local_size == sum(part.size for part in layout.parts)
        assert bool((written == 1).all()), "each byte must be encoded by one rank"
        return whole


@pytest.mark.parametrize("threshold_divisor", [row_sharding.MERGE_THRESHOLD_DIVISOR, 3])
@given(cases(), st.sampled_from(["f32", "bf16", "int8", "int4"]), st.lists(st.booleans(), min_size=3, max_size=3))
def test_strips_equal_the_bytes_of_the_whole_fragment_in_every_round(threshold_divisor, case, name, merged):
    """Encode several rounds with error feedback; some of them are merged.

    Few ranges of these small fragments are below the merge threshold. A divisor of 3 raises it.
    """
    codec, generator = get_codec(name), torch.Generator().manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sharding, "MERGE_THRESHOLD_DIVISOR", threshold_divisor)
        check_rounds(case, codec, generator, merged)


def check_rounds(case: Case, codec: Codec, generator: torch.Generator, merged: list[bool]) -> None:
    for p in range(len(case.plan.fragments)):
        numel = case.plan.numel(p)
        alone, ranks = ErrorFeedback(codec, numel), IslandEncoder(case, p, codec)
        for was_merged in merged:
            x = torch.randn(numel, generator=generator)
            assert torch.equal(ranks.encode(x, codec), alone.encode(x))
            alone.settle(was_merged)
            for encoder in ranks.encoders:
                encoder.settle(was_merged)


def test_codec_may_change_in_every_round():
    """The residual stays at the rank that encodes the value."""
    example = make_case([(33, 40), (700,)], 3, 1, set(), "balanced", 1)
    codec, generator = get_codec("int4"), torch.Generator().manual_seed(6)
    numel = example.plan.numel(0)
    alone, ranks = ErrorFeedback(codec, numel), IslandEncoder(example, 0, codec)
    for name in ("int4", "bf16", "int8", "int4"):
        x = torch.randn(numel, generator=generator)
        assert torch.equal(ranks.encode(x, get_codec(name)), alone.encode(x, codec=get_codec(name)))
        alone.settle(True)
        for encoder in ranks.encoders:
            encoder.settle(True)


@given(cases(), st.sampled_from(CODECS), st.booleans())
def test_rows_are_decoded_from_the_blocks_that_contain_them(case, codec, is_whole):
    generator = torch.Generator().manual_seed(7)
    for p in range(len(case.plan.fragments)):
        numel = case.plan.numel(p)
        share = shard_fragment(case.plan, p, case.boxes_by_rank)
        old, update = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
        update_codec = get_codec("f32") if is_whole else codec
        data, new = update_codec.encode(update), torch.empty(numel)
        UpdateApplier(update_codec, None if is_whole else old, data, new).advance(data.numel())
        expected, before = pack_rows(case, p, new), pack_rows(case, p, old)
        for rank in range(len(case.boxes_by_rank)):
            row_ranges = share.owned_ranges(rank)
            strips = covering_ranges(update_codec, numel, row_ranges)
            layout = make_byte_layout(update_codec, numel, strips)
            downloaded = torch.zeros(layout.size, dtype=torch.uint8)
            for part in layout.parts:
                downloaded[part.local_begin : part.local_begin + part.size] = data[part.begin : part.begin + part.size]
            out = torch.full_like(before[rank], torch.nan)
            apply_rows(update_codec, strips, layout, downloaded, row_ranges, None if is_whole else before[rank], out)
            for rows in row_ranges:
                at = slice(rows.packed_begin, rows.packed_begin + rows.end - rows.begin)
                assert torch.equal(out[at], expected[rank][at])


def test_each_rank_encodes_about_as_many_values_as_it_has():
    example = make_case([(4096, 64), (32768,), (65536,)], 4, 1, set(), "balanced", 1)
    share = shard_fragment(example.plan, 0, example.boxes_by_rank)
    for rank in range(4):
        owned = sum(
            window.packed_end - window.packed_begin
            for window in shard_windows(example.plan, 0, example.boxes_by_rank[rank])
        )
        assert abs(share.encode_numel(rank) - owned) <= 3 * row_sharding.CELL_NUMEL
        assert sum(move.numel for move in share.sends_from(rank)) <= 3 * row_sharding.CELL_NUMEL


NORMS = [(512, 64), (512,), (64, 512), (64,), (512,), (512, 64), (512,)]


def test_small_ranges_are_encoded_with_the_preceding_range():
    """Norms and biases between large tensors: otherwise every rank sends a request for each of them."""
    example, codec = make_case(NORMS, 4, 1, set(), "balanced", 1), get_codec("int8")
    ranks, numel = IslandEncoder(example, 0, codec), example.plan.numel(0)
    assert sum(len(strips) for strips in ranks.share.encode_ranges) == 3 * 4
    x = torch.randn(numel, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ranks.encode(x, codec), codec.encode(x))


@pytest.mark.parametrize("ranks", [100, 250])
def test_no_rank_encodes_the_whole_fragment_if_all_ranges_are_small(ranks):
    example, codec = make_case([(4096, 64)], ranks, 1, set(), "balanced", 1), get_codec("bf16")
    encoder, numel = IslandEncoder(example, 0, codec), example.plan.numel(0)
    assert 8 <= sum(1 for strips in encoder.share.encode_ranges if strips) < ranks, "a few ranks encode for all"
    assert (
        max(encoder.share.encode_numel(rank) for rank in range(ranks))
        <= numel // 8 + numel // ranks + row_sharding.CELL_NUMEL
    )
    x = torch.randn(numel, generator=torch.Generator().manual_seed(10))
    assert torch.equal(encoder.encode(x, codec), codec.encode(x))


@pytest.mark.parametrize(
    ("boxes", "is_in_rows"),
    [
        ({}, False),  # no tensor is sharded
        ({"t": Box((0, 0), (2, 6))}, True),
        ({"t": Box((0, 3), (4, 3))}, False),
        ({"t": Box((4, 0), (0, 0))}, True),  # it holds nothing
        ({"frozen": Box((0, 3), (4, 3))}, False),
    ],
)
def test_sharding_by_rows_requires_whole_rows(boxes, is_in_rows):
    tensors = (TensorInfo("t", (4, 6), "float32", "weight"), TensorInfo("frozen", (4, 6), "float32", "frozen", "0"))
    assert is_sharded_by_rows([boxes, boxes], tensors) is is_in_rows


def test_update_without_base_value_is_refused():
    example = make_case([(8, 8)], 2, 1, set(), "balanced", 1)
    share = shard_fragment(example.plan, 0, example.boxes_by_rank)
    strips = covering_ranges(get_codec("int4"), 64, share.owned_ranges(0))
    layout = make_byte_layout(get_codec("int4"), 64, strips)
    data = torch.zeros(layout.size, dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs the value"):
        apply_rows(get_codec("int4"), strips, layout, data, share.owned_ranges(0), None, torch.empty(32))


def test_strips_that_end_inside_a_block_give_different_bytes(monkeypatch):
    """Bug: strips end with rows, in the middle of a block."""
    example = make_case([(33, 7)], 2, 1, set(), "balanced", 1)
    codec = get_codec("int8")
    numel = example.plan.numel(0)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    assert torch.equal(IslandEncoder(example, 0, codec).encode(x, codec), codec.encode(x))
    monkeypatch.setattr(row_sharding, "CELL_NUMEL", 7)
    with pytest.raises((AssertionError, RuntimeError)):
        assert torch.equal(IslandEncoder(example, 0, codec).encode(x, codec), codec.encode(x))
