"""Encode and decode chunk by chunk: which bytes are final, and how many values a prefix of the bytes decodes to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, Codec, ErrorFeedback, chunk_ranges
from atoll.tensors.outer_optimizer import PublishedValue, UpdateApplier
from tests.tensors.tensor_samples import random_tensor

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
LONG = 2 * CHUNK_NUMEL + 300


@codecs
@pytest.mark.parametrize("numel", [1, 64, 300, CHUNK_NUMEL, CHUNK_NUMEL + 1, LONG])
def test_each_encoded_byte_belongs_to_one_chunk(codec, numel):
    counted = torch.zeros(codec.encoded_size(numel), dtype=torch.int32)
    for begin, end in chunk_ranges(0, numel):
        for first, last in codec.byte_ranges(numel, begin, end):
            counted[first:last] += 1
    assert bool((counted == 1).all())


class ReportsTooEarly(ErrorFeedback):
    """Bug: reports bytes as final before they are written."""

    def encode(self, x: Tensor, out: Tensor | None = None, codec: Codec | None = None, on_progress=None) -> Tensor:
        for begin, end in chunk_ranges(0, self.numel):
            if on_progress is not None:
                on_progress(begin, end)
        return super().encode(x, out, codec)


def are_reported_bytes_final(kind: type[ErrorFeedback], codec: Codec, numel: int) -> bool:
    """Return whether all bytes are reported, and none changes after its report."""
    out = torch.zeros(codec.encoded_size(numel), dtype=torch.uint8)
    reported: list[tuple[int, int, Tensor]] = []

    def on_progress(begin: int, end: int) -> None:
        for first, last in codec.byte_ranges(numel, begin, end):
            reported.append((first, last, out[first:last].clone()))

    kind(codec, numel).encode(random_tensor(3, numel), out, on_progress=on_progress)
    is_complete = sum(last - first for first, last, _ in reported) == out.numel()
    return is_complete and all(torch.equal(out[first:last], data) for first, last, data in reported)


@codecs
@pytest.mark.parametrize("numel", [65, LONG])
def test_reported_bytes_are_final(codec, numel):
    assert are_reported_bytes_final(ErrorFeedback, codec, numel)


@codecs
def test_check_finds_bytes_reported_too_early(codec):
    assert not are_reported_bytes_final(ReportsTooEarly, codec, LONG)


@codecs
@given(data=st.data())
def test_update_applied_in_parts_equals_update_applied_at_once(codec, data):
    """Bytes that have not arrived yet are noise. They must not affect the applied values."""
    numel = data.draw(st.integers(1, 3000))
    old, update = random_tensor(1, numel), codec.encode(random_tensor(2, numel))
    expected = PublishedValue.apply(codec, old, update, torch.empty(numel))
    buffer = torch.full_like(update, 0x5A)
    out = torch.full((numel,), torch.nan)
    applier = UpdateApplier(codec, old, buffer, out)
    stops = sorted(data.draw(st.lists(st.integers(0, update.numel()), max_size=5)))
    received = 0
    for stop in [*stops, update.numel()]:
        buffer[received:stop] = update[received:stop]
        received = stop
        begin, end = applier.advance(stop)
        assert begin <= end == applier.applied
        assert torch.equal(out[:end], expected[:end])
        assert bool(out[end:].isnan().all())
    assert applier.applied == numel


@codecs
def test_decodable_values_counts_all_values_of_a_prefix(codec):
    numel = LONG
    size = codec.encoded_size(numel)
    assert codec.decodable_values(numel, 0) == 0
    assert codec.decodable_values(numel, size) == numel
    for begin, end in chunk_ranges(0, numel):
        needed_bytes = max(last for _, last in codec.byte_ranges(numel, begin, end))
        assert codec.decodable_values(numel, needed_bytes) == end
        assert codec.decodable_values(numel, needed_bytes - 1) < end


def test_update_without_base_value_is_refused():
    with pytest.raises(ValueError, match="needs the value that it is added to"):
        UpdateApplier(CODECS[3], None, CODECS[3].encode(torch.ones(64)), torch.empty(64))
