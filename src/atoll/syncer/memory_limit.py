"""A bound on the bytes that are being received at once. Whoever comes too late waits in the network, not in memory."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryGate:
    """First come, first served; a single piece larger than the bound passes when nothing else is held."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        if self.take_now(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # its turn came at the moment it was cancelled
            elif (size, turn) in self._waiting:
                self._waiting.remove((size, turn))
                self.give(0)  # whoever stood behind it may fit
            raise

    def take_now(self, size: int) -> bool:
        """Without waiting, where that can be."""
        free = not self._waiting and self._fits(size)
        if free:
            self.held_bytes += size
        return free

    def give(self, size: int) -> None:
        self.held_bytes -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():  # cancelled, and not yet gone from the queue
                self.held_bytes += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + size <= self.most_bytes
