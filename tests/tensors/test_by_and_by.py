"""Values that are encoded and decoded by and by: which bytes are final, and how far the first ones reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, Codec, ErrorFeedback, chunk_ranges
from atoll.tensors.outer_optimizer import PublishedValue, UpdateApplier
from tests.tensors.tensor_samples import random_tensor

codecs = pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
LONG = 2 * CHUNK_NUMEL + 300


@codecs
@pytest.mark.parametrize("numel", [1, 64, 300, CHUNK_NUMEL, CHUNK_NUMEL + 1, LONG])
def test_every_byte_has_one_place(coder, numel):
    counted = torch.zeros(coder.encoded_size(numel), dtype=torch.int32)
    for begin, end in chunk_ranges(0, numel):
        for first, last in coder.byte_ranges(numel, begin, end):
            counted[first:last] += 1
    assert bool((counted == 1).all())


class ReportsTooEarly(ErrorFeedback):
    """A planted bug: bytes are reported as final before they are written."""

    def encode(self, x: Tensor, out: Tensor | None = None, codec: Codec | None = None, on_progress=None) -> Tensor:
        for begin, end in chunk_ranges(0, self.numel):
            if on_progress is not None:
                on_progress(begin, end)
        return super().encode(x, out, codec)


def are_reported_bytes_final(kind: type[ErrorFeedback], coder: Codec, numel: int) -> bool:
    """Return whether all bytes are reported, and do not change after they are reported."""
    out = torch.zeros(coder.encoded_size(numel), dtype=torch.uint8)
    seen: list[tuple[int, int, Tensor]] = []

    def on_progress(begin: int, end: int) -> None:
        for first, last in coder.byte_ranges(numel, begin, end):
            seen.append((first, last, out[first:last].clone()))

    kind(coder, numel).encode(random_tensor(3, numel), out, on_progress=on_progress)
    whole = sum(last - first for first, last, _ in seen) == out.numel()
    return whole and all(torch.equal(out[first:last], then) for first, last, then in seen)


@codecs
@pytest.mark.parametrize("numel", [65, LONG])
def test_reported_bytes_are_final(coder, numel):
    assert are_reported_bytes_final(ErrorFeedback, coder, numel)


@codecs
def test_check_finds_bytes_reported_too_early(coder):
    assert not are_reported_bytes_final(ReportsTooEarly, coder, LONG)


@codecs
@given(data=st.data())
def test_update_applied_in_parts_equals_update_applied_at_once(coder, data):
    """Bytes that have not arrived are noise, and must not affect the applied values."""
    numel = data.draw(st.integers(1, 3000))
    old, update = random_tensor(1, numel), coder.encode(random_tensor(2, numel))
    whole = PublishedValue.apply(coder, old, update, torch.empty(numel))
    arriving = torch.full_like(update, 0x5A)
    out = torch.full((numel,), torch.nan)
    applying = UpdateApplier(coder, old, arriving, out)
    stops = sorted(data.draw(st.lists(st.integers(0, update.numel()), max_size=5)))
    reached = 0
    for here in [*stops, update.numel()]:
        arriving[reached:here] = update[reached:here]
        reached = here
        begin, end = applying.advance(here)
        assert begin <= end == applying.applied
        assert torch.equal(out[:end], whole[:end])
        assert bool(out[end:].isnan().all())
    assert applying.applied == numel


@codecs
def test_the_first_bytes_reach_as_far_as_they_can(coder):
    numel = LONG
    size = coder.encoded_size(numel)
    assert coder.decodable_values(numel, 0) == 0
    assert coder.decodable_values(numel, size) == numel
    for begin, end in chunk_ranges(0, numel):
        reach = max(last for _, last in coder.byte_ranges(numel, begin, end))
        assert coder.decodable_values(numel, reach) == end
        assert coder.decodable_values(numel, reach - 1) < end


def test_an_update_without_a_value_is_refused():
    with pytest.raises(ValueError, match="needs the value that it is added to"):
        UpdateApplier(CODECS[3], None, CODECS[3].encode(torch.ones(64)), torch.empty(64))
