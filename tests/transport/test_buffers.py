"""Memory for what is received: used again, bounded, never handed out twice."""

import pytest
import torch

from atoll.transport.buffers import ByteBuffers


def test_a_buffer_that_was_given_back_is_taken_again():
    buffers = ByteBuffers(most_bytes=100, least_bytes=1)
    first = buffers.take(40)
    assert first.dtype == torch.uint8
    assert first.shape == (40,)
    buffers.give(first)
    assert buffers.take(40) is first
    assert buffers.take(40) is not first


def test_another_size_is_another_buffer():
    buffers = ByteBuffers(most_bytes=100, least_bytes=1)
    buffers.give(buffers.take(40))
    assert buffers.take(41).numel() == 41
    assert buffers.kept_bytes == 40


def test_what_is_kept_is_bounded_and_the_oldest_goes_first():
    buffers = ByteBuffers(most_bytes=100, least_bytes=1)
    taken = [buffers.take(40) for _ in range(3)]
    for buffer in taken:
        buffers.give(buffer)
    assert buffers.kept_bytes == 80
    assert buffers.take(40) is taken[2]
    assert buffers.take(40) is taken[1]
    assert buffers.kept_bytes == 0


def test_a_single_buffer_is_kept_however_large_it_is():
    buffers = ByteBuffers(most_bytes=100, least_bytes=1)
    large = buffers.take(1000)
    buffers.give(large)
    assert buffers.take(1000) is large


def test_small_ones_are_left_to_the_allocator():
    buffers = ByteBuffers(most_bytes=100, least_bytes=10)
    buffers.give(buffers.take(9))
    assert buffers.kept_bytes == 0


def test_giving_back_twice_is_our_mistake():
    buffers = ByteBuffers(most_bytes=100, least_bytes=1)
    buffer = buffers.take(40)
    buffers.give(buffer)
    with pytest.raises(AssertionError, match="twice"):
        buffers.give(buffer)
