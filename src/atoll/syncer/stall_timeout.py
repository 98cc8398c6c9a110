"""A limit on how long a transfer may stand still, with one timer for all of it."""

from __future__ import annotations

import asyncio
from types import TracebackType


class StandStill:
    """`TimeoutError` in the block when `moved` has not changed for `limit_s`, at the latest after twice as long.

    An `asyncio.timeout` around each piece would say it to the second, and cost a tenth of what the piece itself does.
    """

    def __init__(self, limit_s: float) -> None:
        self.moved = 0  # counted up by whoever moves something
        self._limit_s = limit_s
        self._seen = 0
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> StandStill:
        await self._timeout.__aenter__()
        self.go_on()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        await self._timeout.__aexit__(kind, wrong, trace)  # makes a TimeoutError of its own cancellation

    def pause(self) -> None:
        """What now takes its time is not the other side's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def go_on(self) -> None:
        self._seen = self.moved
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)

    def _look(self) -> None:
        if self.moved == self._seen:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self.go_on()
