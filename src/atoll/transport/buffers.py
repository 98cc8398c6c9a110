"""Memory buffers: a pool, ranges of missing bytes, and buffers that are sent while they are being written.

Buffers are pooled because a new one costs a page fault every 4 KiB. For 64 MiB that is 44 ms, and receiving them takes
25 ms. The system's allocator reuses small pieces, but returns everything beyond 32 MiB to the system.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

CHUNK_BYTES = 2**18
"""Bytes per write, and per read of the loop. With this size, copies and digests stay in the L2 cache."""

READ_AHEAD_BYTES = 2**18
"""Bytes that a connection reads ahead. It pauses at twice as many. With less it would pause after every chunk."""

MAX_INLINE_BYTES = 2**15
"""Up to this size, processing bytes here is cheaper than in another thread, and one copy cheaper than two sends."""


class ByteBufferPool:
    """Pool of byte buffers by size. Use it in one thread.

    Up to `max_bytes` are kept, and at least one buffer of any size. The oldest are dropped first. A buffer that is not
    released is simply not reused.
    """

    def __init__(self, max_bytes: int = 64 * 2**20, min_bytes: int = 2**20) -> None:
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes  # smaller buffers are not pooled
        self.pooled_bytes = 0
        self._pooled: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        """Return a buffer of this size with undefined content."""
        for index in range(len(self._pooled) - 1, -1, -1):
            if self._pooled[index].numel() == size:
                self.pooled_bytes -= size
                return self._pooled.pop(index)
        return torch.empty(size, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. The caller must no longer use it."""
        if buffer.numel() < self.min_bytes:
            return
        assert not any(buffer is pooled for pooled in self._pooled), "the buffer is already in the pool"
        self._pooled.append(buffer)
        self.pooled_bytes += buffer.numel()
        while self.pooled_bytes > self.max_bytes and len(self._pooled) > 1:
            self.pooled_bytes -= self._pooled.pop(0).numel()


# --------------------------------------------------------------------------------------------------------------------
# Byte ranges, for example the missing bytes of a transfer: half-open, disjoint and sorted


Span: TypeAlias = tuple[int, int]


class Spans:
    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        for begin, end in spans:
            self.add(begin, end)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    def add(self, begin: int, end: int) -> None:
        """Add a range. It may overlap existing ones."""
        if begin >= end:
            return
        apart = []
        for b, e in self._spans:
            if e < begin or end < b:
                apart.append((b, e))
            else:
                begin, end = min(b, begin), max(e, end)
        self._spans = sorted([*apart, (begin, end)])

    def remove(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        left = []
        for b, e in self._spans:
            left += [(x, y) for x, y in ((b, min(e, begin)), (max(b, end), e)) if x < y]
        self._spans = left

    def contiguous_bytes(self) -> int:
        """Return how many bytes from 0 on are covered without a gap."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0

    def contains(self, begin: int, end: int) -> bool:
        """Return whether the whole range is covered."""
        return any(b <= begin and end <= e for b, e in self._spans)

    def take(self, max_bytes: int, min_bytes: int = 1) -> Span | None:
        """Remove and return up to `max_bytes` of the first range that has at least `min_bytes`."""
        for begin, end in self._spans:
            if end - begin >= min_bytes:
                end = min(end, begin + max_bytes)
                self.remove(begin, end)
                return begin, end
        return None


# --------------------------------------------------------------------------------------------------------------------
# Buffers that the event loop sends while another thread is still writing them


class ByteSink(Protocol):
    """Receiver of progress from the writing thread."""

    size: int

    def set_buffer(self, data: Tensor) -> None: ...

    def mark_written(self, spans: list[Span]) -> None: ...


class StreamingBuffer:
    """A buffer that is sent while it is being written. `missing` has the bytes that are written but not sent yet.

    Create it in the event loop. The writing thread calls `set_buffer`, `mark_written` and `finish`. Use everything else
    in the loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = Spans()
        self.data: Tensor | None = None  # set before the first bytes
        self.is_complete = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @classmethod
    def from_complete(cls, data: Tensor) -> StreamingBuffer:
        """Wrap data that is complete."""
        buffer = cls(data.numel())
        buffer.set_buffer(data)
        buffer.missing.add(0, buffer.size)
        buffer.is_complete = True
        return buffer

    def set_buffer(self, data: Tensor) -> None:
        self.data = data

    def mark_written(self, spans: list[Span]) -> None:
        self._loop.call_soon_threadsafe(self._add, spans)

    def finish(self, error: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._finish, error)

    def _add(self, spans: list[Span]) -> None:
        for begin, end in spans:
            self.missing.add(begin, end)
        self._notify()

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self.is_complete = error is None
        self._notify()

    def _notify(self) -> None:
        """Wake all current waiters. Later waiters wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._error is not None:
            self._changed.set()

    async def wait_for_more(self) -> None:
        """Wait for more bytes or the end. Raise the error of the writer."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def wait_until_complete(self) -> Tensor:
        while not self.is_complete:
            await self.wait_for_more()
        assert self.data is not None
        return self.data
