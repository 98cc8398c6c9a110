"""Bytes that another thread is still writing, for those who send them in the event loop as soon as they are there."""

from __future__ import annotations

import asyncio
from typing import Protocol

from torch import Tensor

from atoll.transport.byte_ranges import Span, Spans


class Told(Protocol):
    """Whom the thread that writes tells of it."""

    size: int

    def begins(self, data: Tensor) -> None: ...

    def written(self, spans: list[Span]) -> None: ...


class Growing:
    """`missing` are the bytes that are written and not sent: whoever takes some of them sends them.

    Made in the event loop. The thread that writes calls `begins`, `written` and `ended`; everything else is the loop's.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = Spans()
        self.data: Tensor | None = None  # from the first bytes on
        self.is_whole = False
        self._wrong: BaseException | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @classmethod
    def grown(cls, data: Tensor) -> Growing:
        """All of it is there."""
        growing = cls(data.numel())
        growing.begins(data)
        growing._add([(0, growing.size)])
        growing._end(None)
        return growing

    def begins(self, data: Tensor) -> None:
        self.data = data

    def written(self, spans: list[Span]) -> None:
        self._loop.call_soon_threadsafe(self._add, spans)

    def ended(self, wrong: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._end, wrong)

    def _add(self, spans: list[Span]) -> None:
        for begin, end in spans:
            self.missing.add(begin, end)
        self._tell()

    def _end(self, wrong: BaseException | None) -> None:
        self._wrong = wrong
        self.is_whole = wrong is None
        self._tell()

    def _tell(self) -> None:
        """Everybody who waits wakes up, and later ones wait for the next news."""
        self._news.set()
        self._news = asyncio.Event()
        if self._wrong is not None:
            self._news.set()

    async def more(self) -> None:
        """Returns when there is news; raises what has gone wrong."""
        await self._news.wait()
        if self._wrong is not None:
            raise self._wrong

    async def whole(self) -> Tensor:
        while not self.is_whole:
            await self.more()
        assert self.data is not None
        return self.data


__all__ = ["Growing", "Told"]
