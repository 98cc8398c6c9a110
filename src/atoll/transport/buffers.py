"""Memory for what is received, used again: a fresh buffer costs a page fault every 4 KiB.

For 64 MiB that is 44 ms, where receiving them takes 25. The system's allocator keeps small pieces at hand by itself,
but gives everything beyond 32 MiB back at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 2**18
"""Sent at a time, and what the loop reads at a time. In such pieces copies and digests stay in the second cache."""

READ_BYTES = 2**18
"""That a connection reads ahead; it stops at twice as many. With less it would stop after every piece."""

SMALL_BYTES = 2**15
"""Up to here a pass over the bytes is cheaper than handing them to another thread, and a copy than two sends."""


class ByteBuffers:
    """Flat bytes by size. Used in one thread.

    `most_bytes` are kept for the next one, and a single buffer whatever its size; what was given back first goes first.
    A buffer that is never given back costs nothing but its place here.
    """

    def __init__(self, most_bytes: int = 64 * 2**20, least_bytes: int = 2**20) -> None:
        self.most_bytes = most_bytes
        self.least_bytes = least_bytes  # smaller ones are left to the allocator
        self.kept_bytes = 0
        self._kept: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """So many bytes, whatever they hold."""
        for place in range(len(self._kept) - 1, -1, -1):
            if self._kept[place].numel() == size:
                self.kept_bytes -= size
                return self._kept.pop(place)
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Nobody reads or writes it any more."""
        if buffer.numel() < self.least_bytes:
            return
        assert not any(buffer is kept for kept in self._kept), "a buffer was given back twice"
        self._kept.append(buffer)
        self.kept_bytes += buffer.numel()
        while self.kept_bytes > self.most_bytes and len(self._kept) > 1:
            self.kept_bytes -= self._kept.pop(0).numel()
