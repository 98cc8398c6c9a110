"""Bytes in memory: buffers that are used again, ranges of missing bytes, buffers that grow while they are sent.

Buffers are used again because a fresh one costs a page fault every 4 KiB. For 64 MiB that is 44 ms, where receiving
them takes 25. The system's allocator keeps small pieces at hand by itself, but gives everything beyond 32 MiB back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

CHUNK_BYTES = 2**18
"""Sent at a time, and what the loop reads at a time. In such pieces copies and digests stay in the second cache."""

READ_AHEAD_BYTES = 2**18
"""That a connection reads ahead; it stops at twice as many. With less it would stop after every piece."""

MAX_INLINE_BYTES = 2**15
"""Up to here a pass over the bytes is cheaper than handing them to another thread, and a copy than two sends."""


class BufferPool:
    """Flat bytes by size. Used in one thread.

    `max_bytes` are kept for the next one, and a single buffer whatever its size; what was given back first goes first.
    A buffer that is never given back costs nothing but its place here.
    """

    def __init__(self, max_bytes: int = 64 * 2**20, min_bytes: int = 2**20) -> None:
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes  # smaller ones are left to the allocator
        self.pooled_bytes = 0
        self._pooled: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        """So many bytes, whatever they hold."""
        for place in range(len(self._pooled) - 1, -1, -1):
            if self._pooled[place].numel() == size:
                self.pooled_bytes -= size
                return self._pooled.pop(place)
        return torch.empty(size, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        """Nobody reads or writes it any more."""
        if buffer.numel() < self.min_bytes:
            return
        assert not any(buffer is kept for kept in self._pooled), "a buffer was given back twice"
        self._pooled.append(buffer)
        self.pooled_bytes += buffer.numel()
        while self.pooled_bytes > self.max_bytes and len(self._pooled) > 1:
            self.pooled_bytes -= self._pooled.pop(0).numel()


# --------------------------------------------------------------------------------------------------------------------
# Byte ranges: which bytes of a whole are missing. Half-open, apart from each other and in order


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
        """Whatever was there of it already stays."""
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
        """How far they reach from 0 on without a gap."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0

    def contains(self, begin: int, end: int) -> bool:
        """All of it."""
        return any(b <= begin and end <= e for b, e in self._spans)

    def take(self, max_bytes: int, min_bytes: int = 1) -> Span | None:
        """At most so many bytes of the first that has at least so many; they are removed."""
        for begin, end in self._spans:
            if end - begin >= min_bytes:
                end = min(end, begin + max_bytes)
                self.remove(begin, end)
                return begin, end
        return None


# --------------------------------------------------------------------------------------------------------------------
# Buffers that another thread is still writing, and that the event loop sends meanwhile


class ByteSink(Protocol):
    """Whom the thread that writes tells of it."""

    size: int

    def set_buffer(self, data: Tensor) -> None: ...

    def mark_written(self, spans: list[Span]) -> None: ...


class StreamingBuffer:
    """`missing` are the bytes that are written and not sent: whoever takes some of them sends them.

    Made in the event loop. The thread that writes calls `begins`, `written` and `ended`; everything else is the loop's.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = Spans()
        self.data: Tensor | None = None  # from the first bytes on
        self.is_complete = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @classmethod
    def from_complete(cls, data: Tensor) -> StreamingBuffer:
        """All of it is there."""
        growing = cls(data.numel())
        growing.set_buffer(data)
        growing.missing.add(0, growing.size)
        growing.is_complete = True
        return growing

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
        """Everybody who waits wakes up, and later ones wait for the next news."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._error is not None:
            self._changed.set()

    async def wait_for_more(self) -> None:
        """Returns when there is news; raises what has gone error."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def wait_until_complete(self) -> Tensor:
        while not self.is_complete:
            await self.wait_for_more()
        assert self.data is not None
        return self.data
