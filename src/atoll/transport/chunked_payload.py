"""Payloads that are never in one place: an island's ranks show them to their leader piece by piece.

The digest of a frame stands before its payload, so they are shown twice: once to be added up, once to be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Protocol, runtime_checkable

from torch import Tensor

from atoll.transport.wire import Kind, as_bytes, flowing_head

AHEAD = 2
"""Pieces that wait to be sent. Whoever shows more waits."""


@runtime_checkable
class Flowing(Protocol):
    """A model whose fragments are shown like that."""

    def flow(self, fragment: int, take: Callable[[Tensor], None]) -> None: ...


class Flow:
    """One payload of `size` bytes. `show` calls what it is given with every piece, in order, in the computing thread;
    a piece is good until that returns."""

    def __init__(self, size: int, show: Callable[[Callable[[Tensor], None]], None], compute: Executor) -> None:
        self.size = size
        self._show = show
        self._compute = compute

    async def head(self, kind: Kind, header: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute, flowing_head, kind, header, self.size, self._show)

    async def pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        shown: asyncio.Queue[bytes | None] = asyncio.Queue(AHEAD)
        is_wanted = True

        def put(piece: bytes | None) -> None:
            asyncio.run_coroutine_threadsafe(shown.put(piece), loop).result()

        def take(piece: Tensor) -> None:
            if is_wanted:  # else the ranks show the rest in vain: they cannot be stopped in the middle
                put(bytes(as_bytes(piece)))

        def work() -> None:
            try:
                self._show(take)
            finally:
                if is_wanted:
                    put(None)

        working = loop.run_in_executor(self._compute, work)
        try:
            while (piece := await shown.get()) is not None:
                yield piece
            await working
        finally:
            is_wanted = False
            while not shown.empty():
                shown.get_nowait()


__all__ = ["Flow", "Flowing"]
