"""Relays with faults for tests only: change chosen bytes, and break connections after a number of bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from atoll.chaos.relay import Relay, Relays


class BreakingRelay(Relay):
    def __init__(self, loop: asyncio.AbstractEventLoop, target: str, seed: int, host: str) -> None:
        super().__init__(loop, target, seed, host)
        self.broken = 0  # connections that broke because of `break_after`
        self._change_down: Callable[[bytes], bytes] | None = None
        self._break_after: float | None = None
        self._carried: Counter[object] = Counter()  # bytes of each direction of each connection

    def change_down(self, transform: Callable[[bytes], bytes]) -> None:
        """Replace every chunk towards the learner by the result of `transform`."""
        self._loop.call_soon_threadsafe(setattr, self, "_change_down", transform)

    def break_after(self, bytes_each: float | None) -> None:
        """Break every connection that carries more than this many bytes in one direction, as some middleboxes do."""

        def begin() -> None:
            self._carried.clear()
            self._break_after = bytes_each

        self._loop.call_soon_threadsafe(begin)

    def transform_chunk(self, data: bytes, up: bool) -> bytes:
        if self._change_down is not None and not up:
            data = self._change_down(data)
        task = asyncio.current_task()  # one for each direction of each connection
        self._carried[task] += len(data)
        if self._break_after is not None and self._carried[task] > self._break_after:
            self.broken += 1
            raise ConnectionResetError
        return super().transform_chunk(data, up)


class BreakingRelays(Relays):
    def open(self, target: str, seed: int = 0, host: str = "127.0.0.1") -> BreakingRelay:
        relay = BreakingRelay(self._loop, target, seed, host)
        self._relays.append(relay)
        relay.call(relay.start())
        return relay


@contextmanager
def relay_to(target: str) -> Iterator[BreakingRelay]:
    """Open one relay for the duration of a with block."""
    with closing(BreakingRelays()) as relays:
        yield relays.open(target)
