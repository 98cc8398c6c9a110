"""What ranks encode and decode of their own rows is what one process makes of the whole fragment, to the last bit."""

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
    everybody: tuple[Boxes, ...]


def dealt(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """As `torch.chunk` does it: the last ones may have fewer, or none."""
    each = -(-rows // ranks)
    return min(rows, rank * each), min(rows, rank * each + each)


def case(
    sizes: Sequence[tuple[int, ...]], ranks: int, replicas: int, whole: set[int], how: str, fragments: int
) -> Case:
    """`whole`: the tensors that every rank has all of."""
    tensors = tuple(TensorInfo(f"t{n}", size, "float32", "weight") for n, size in enumerate(sizes))
    boxes = []
    for rank in range(ranks):
        held = {}
        for place, info in enumerate(tensors):
            if place not in whole:
                first, last = dealt(info.shape[0], ranks, rank)
                held[info.name] = Box((first, *(0 for _ in info.shape[1:])), (last - first, *info.shape[1:]))
        boxes.append(held)
    return Case(make_plan(tensors, fragments, how), tuple(boxes * replicas))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.tuples(st.integers(1, 70), st.integers(1, 40)) | st.tuples(st.integers(1, 900))
    sizes = draw(st.lists(size, min_size=1, max_size=5))
    whole = draw(st.sets(st.integers(1, 5)))
    ranks, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    return case(sizes, ranks, replicas, whole, draw(st.sampled_from(["balanced", "rows"])), draw(st.integers(1, 3)))


def rows_of(case: Case, p: int, whole: Tensor) -> list[Tensor]:
    """What every rank holds of it, packed."""
    return [
        torch.cat([window.view(whole).reshape(-1) for window in shard_windows(case.plan, p, boxes)])
        for boxes in case.everybody
    ]


def strips_of(share: FragmentSharding, packed: list[Tensor], rank: int) -> Tensor:
    """What a rank encodes: its own values, and the few of others."""
    made = torch.full((share.encode_numel(rank),), torch.nan)
    for move in [*share.local_transfers(rank), *share.receives_at(rank)]:
        made[move.buffer_begin : move.buffer_begin + move.numel] = packed[move.source_rank][
            move.packed_begin : move.packed_begin + move.numel
        ]
    return made


class Sender:
    """All ranks of an island."""

    def __init__(self, case: Case, p: int, by: Codec) -> None:
        self.case, self.p = case, p
        self.share = shard_fragment(case.plan, p, case.everybody)
        self.coders = [ShardEncoder(by, self.share.numel, strips) for strips in self.share.encode_ranges]

    def encode(self, x: Tensor, by: Codec) -> Tensor:
        packed = rows_of(self.case, self.p, x)
        whole = torch.zeros(by.encoded_size(x.numel()), dtype=torch.uint8)
        written = torch.zeros(whole.numel(), dtype=torch.int32)
        for rank, coder in enumerate(self.coders):
            laid, data = coder.encode(strips_of(self.share, packed, rank), by)
            for part in laid.parts:
                whole[part.begin : part.begin + part.size] = data[part.local_begin : part.local_begin + part.size]
                written[part.begin : part.begin + part.size] += 1
            assert laid.to_global(0, laid.size) == list(laid.parts)
            assert sum(end - begin for begin, end in laid.to_local(0, whole.numel())) == sum(p.size for p in laid.parts)
        assert bool((written == 1).all()), "every byte is one rank's"
        return whole


@pytest.mark.parametrize("slight_part", [row_sharding.MERGE_THRESHOLD_DIVISOR, 3])
@given(cases(), st.sampled_from(["f32", "bf16", "int8", "int4"]), st.lists(st.booleans(), min_size=3, max_size=3))
def test_strips_are_the_bytes_of_the_whole_fragment_round_after_round(slight_part, case, name, merged):
    """With error feedback, whatever of it was merged. In fragments as small as these hardly a stretch is slight, so a
    third of one is, too."""
    by, drawn = get_codec(name), torch.Generator().manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sharding, "MERGE_THRESHOLD_DIVISOR", slight_part)
        round_after_round(case, by, drawn, merged)


def round_after_round(case: Case, by: Codec, drawn: torch.Generator, merged: list[bool]) -> None:
    for p in range(len(case.plan.fragments)):
        numel = case.plan.numel(p)
        alone, ranks = ErrorFeedback(by, numel), Sender(case, p, by)
        for was_merged in merged:
            x = torch.randn(numel, generator=drawn)
            assert torch.equal(ranks.encode(x, by), alone.encode(x))
            alone.settle(was_merged)
            for coder in ranks.coders:
                coder.settle(was_merged)


def test_the_codec_may_be_another_one_in_every_round():
    """As the link allows: what rounding left out stays with the rank that encodes the value."""
    made = case([(33, 40), (700,)], 3, 1, set(), "balanced", 1)
    by, drawn = get_codec("int4"), torch.Generator().manual_seed(6)
    numel = made.plan.numel(0)
    alone, ranks = ErrorFeedback(by, numel), Sender(made, 0, by)
    for name in ("int4", "bf16", "int8", "int4"):
        x = torch.randn(numel, generator=drawn)
        assert torch.equal(ranks.encode(x, get_codec(name)), alone.encode(x, codec=get_codec(name)))
        alone.settle(True)
        for coder in ranks.coders:
            coder.settle(True)


@given(cases(), st.sampled_from(CODECS), st.booleans())
def test_rows_are_decoded_from_the_blocks_that_hold_them(case, by, is_whole):
    drawn = torch.Generator().manual_seed(7)
    for p in range(len(case.plan.fragments)):
        numel = case.plan.numel(p)
        share = shard_fragment(case.plan, p, case.everybody)
        old, update = torch.randn(numel, generator=drawn), torch.randn(numel, generator=drawn)
        used = get_codec("f32") if is_whole else by
        data, new = used.encode(update), torch.empty(numel)
        UpdateApplier(used, None if is_whole else old, data, new).advance(data.numel())
        wanted, before = rows_of(case, p, new), rows_of(case, p, old)
        for rank in range(len(case.everybody)):
            stretches = share.owned_ranges(rank)
            strips = covering_ranges(used, numel, stretches)
            laid = make_byte_layout(used, numel, strips)
            fetched = torch.zeros(laid.size, dtype=torch.uint8)
            for part in laid.parts:
                fetched[part.local_begin : part.local_begin + part.size] = data[part.begin : part.begin + part.size]
            out = torch.full_like(before[rank], torch.nan)
            apply_rows(used, strips, laid, fetched, stretches, None if is_whole else before[rank], out)
            for stretch in stretches:
                at = slice(stretch.packed_begin, stretch.packed_begin + stretch.end - stretch.begin)
                assert torch.equal(out[at], wanted[rank][at])


def test_a_rank_encodes_about_as_much_as_it_holds():
    made = case([(4096, 64), (32768,), (65536,)], 4, 1, set(), "balanced", 1)
    share = shard_fragment(made.plan, 0, made.everybody)
    for rank in range(4):
        held = sum(
            window.packed_end - window.packed_begin for window in shard_windows(made.plan, 0, made.everybody[rank])
        )
        assert abs(share.encode_numel(rank) - held) <= 3 * row_sharding.CELL_NUMEL
        assert sum(move.numel for move in share.sends_from(rank)) <= 3 * row_sharding.CELL_NUMEL


NORMS = [(512, 64), (512,), (64, 512), (64,), (512,), (512, 64), (512,)]


def test_slight_stretches_are_encoded_with_what_is_before_them():
    """Norms and biases between large tensors: they would be a request each, of each rank."""
    made, by = case(NORMS, 4, 1, set(), "balanced", 1), get_codec("int8")
    ranks, numel = Sender(made, 0, by), made.plan.numel(0)
    assert sum(len(strips) for strips in ranks.share.encode_ranges) == 3 * 4
    x = torch.randn(numel, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ranks.encode(x, by), by.encode(x))


@pytest.mark.parametrize("ranks", [100, 250])
def test_where_all_stretches_are_slight_no_rank_gets_the_whole_fragment(ranks):
    made, by = case([(4096, 64)], ranks, 1, set(), "balanced", 1), get_codec("bf16")
    sender, numel = Sender(made, 0, by), made.plan.numel(0)
    assert 8 <= sum(1 for strips in sender.share.encode_ranges if strips) < ranks, "a few encode for all"
    assert (
        max(sender.share.encode_numel(rank) for rank in range(ranks))
        <= numel // 8 + numel // ranks + row_sharding.CELL_NUMEL
    )
    x = torch.randn(numel, generator=torch.Generator().manual_seed(10))
    assert torch.equal(sender.encode(x, by), by.encode(x))


@pytest.mark.parametrize(
    ("boxes", "is_in_rows"),
    [
        ({}, False),  # nothing is dealt out
        ({"t": Box((0, 0), (2, 6))}, True),
        ({"t": Box((0, 3), (4, 3))}, False),
        ({"t": Box((4, 0), (0, 0))}, True),  # it holds nothing
        ({"frozen": Box((0, 3), (4, 3))}, False),
    ],
)
def test_only_whole_rows_are_sent_by_who_holds_them(boxes, is_in_rows):
    tensors = (TensorInfo("t", (4, 6), "float32", "weight"), TensorInfo("frozen", (4, 6), "float32", "frozen", "0"))
    assert is_sharded_by_rows([boxes, boxes], tensors) is is_in_rows


def test_an_update_without_the_value_before_is_refused():
    made = case([(8, 8)], 2, 1, set(), "balanced", 1)
    share = shard_fragment(made.plan, 0, made.everybody)
    strips = covering_ranges(get_codec("int4"), 64, share.owned_ranges(0))
    laid = make_byte_layout(get_codec("int4"), 64, strips)
    data = torch.zeros(laid.size, dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs the value"):
        apply_rows(get_codec("int4"), strips, laid, data, share.owned_ranges(0), None, torch.empty(32))


def test_values_that_stay_with_their_rank_would_make_other_bytes(monkeypatch):
    """The planted bug: strips that end where rows do, in the middle of a block."""
    made = case([(33, 7)], 2, 1, set(), "balanced", 1)
    by = get_codec("int8")
    numel = made.plan.numel(0)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    assert torch.equal(Sender(made, 0, by).encode(x, by), by.encode(x))
    monkeypatch.setattr(row_sharding, "CELL_NUMEL", 7)
    with pytest.raises((AssertionError, RuntimeError)):
        assert torch.equal(Sender(made, 0, by).encode(x, by), by.encode(x))
