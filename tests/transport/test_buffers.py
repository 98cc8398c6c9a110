"""Buffer pool: buffers are reused, bounded, and never returned twice."""

import pytest
import torch

from atoll.transport.buffers import ByteBufferPool


def test_released_buffer_is_reused():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=1)
    first = buffers.acquire(40)
    assert first.dtype == torch.uint8
    assert first.shape == (40,)
    buffers.release(first)
    assert buffers.acquire(40) is first
    assert buffers.acquire(40) is not first


def test_other_size_gets_another_buffer():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=1)
    buffers.release(buffers.acquire(40))
    assert buffers.acquire(41).numel() == 41
    assert buffers.pooled_bytes == 40


def test_pool_is_bounded_and_drops_oldest():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=1)
    acquired = [buffers.acquire(40) for _ in range(3)]
    for buffer in acquired:
        buffers.release(buffer)
    assert buffers.pooled_bytes == 80
    assert buffers.acquire(40) is acquired[2]
    assert buffers.acquire(40) is acquired[1]
    assert buffers.pooled_bytes == 0


def test_one_buffer_above_the_limit_is_kept():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=1)
    large = buffers.acquire(1000)
    buffers.release(large)
    assert buffers.acquire(1000) is large


def test_small_buffers_are_not_pooled():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=10)
    buffers.release(buffers.acquire(9))
    assert buffers.pooled_bytes == 0


def test_releasing_twice_is_an_assertion():
    buffers = ByteBufferPool(max_bytes=100, min_bytes=1)
    buffer = buffers.acquire(40)
    buffers.release(buffer)
    with pytest.raises(AssertionError, match="already in the pool"):
        buffers.release(buffer)
