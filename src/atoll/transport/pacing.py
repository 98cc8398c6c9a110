"""How fast values may go, and over how many connections at once. Control messages are never held up here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from atoll.core import policy
from atoll.core.protocol import StreamsChanged
from atoll.transport.buffers import CHUNK_BYTES
from atoll.transport.byte_ranges import Spans
from atoll.transport.streaming_buffer import Growing

BURST_S = 0.05
"""That a paced direction may be ahead of its rate after it stood still."""

LEAST_PIECE = 4096
MOST_STREAMS = 16
BETTER = 1.2
"""Twice the streams have to carry so much more. Less is noise, and every stream costs both sides memory."""

SAME = 0.95
PATIENCE = 16
"""Transfers between two looks at whether another number of streams would do better."""

LEAST_SLICE, FIRST_SLICE, MOST_SLICE = 2**20, 4 * 2**20, 16 * 2**20
SLICE_S = 1.0
"""What a stream carries in this time is sent as one slice: what a lost connection costs at most."""


def check_streams(streams: int) -> int:
    """What somebody wants instead of what would be chosen."""
    if type(streams) is not int or not 1 <= streams <= MOST_STREAMS:
        raise ValueError(f"streams is {streams!r}; give a number of connections from 1 to {MOST_STREAMS}")
    return streams


class Pace:
    """A bound on bytes per second; None: as fast as it goes."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._due = 0.0  # everything that was let through so far would have taken until then

    @property
    def piece_bytes(self) -> int:
        """To be let through at a time, so that what is paced flows instead of coming in bursts."""
        if self.bytes_per_s is None:
            return CHUNK_BYTES
        return max(LEAST_PIECE, min(CHUNK_BYTES, int(self.bytes_per_s * BURST_S / 2)))

    def let_through(self, size: int) -> float:
        """These bytes go now. How long to wait before the next ones."""
        if self.bytes_per_s is None:
            return 0.0
        now = self._clock()
        self._due = max(self._due, now - BURST_S) + size / self.bytes_per_s
        return max(0.0, self._due - now)

    async def take(self, size: int) -> None:
        wait_s = self.let_through(size)
        if wait_s > 0:
            await asyncio.sleep(wait_s)


class Streams:
    """How many connections carry one large payload: as many as were seen to carry more than half of them do.

    One connection carries at most a window per round trip. On a long link that is little, and another one carries as
    much again; on a short one it only shares what there is. So it is tried: twice as many now and then, kept where they
    carry more, and half as many, kept where they carry as much.
    """

    def __init__(self, way: str, fixed: int | None = None) -> None:
        """`fixed`: so many, whatever they carry."""
        self.width = 1 if fixed is None else fixed
        self.bytes_per_s = 0.0  # of all streams together, in the newest transfer that told something
        self.on_change: Callable[[StreamsChanged], None] = lambda changed: None
        self._way = way
        self._is_fixed = fixed is not None
        self._wait = 0  # transfers until the next look
        self._tried: tuple[int, float] | None = None  # the width before this one, and what it carried
        self._up = True  # the next look is at more

    def slice_bytes(self) -> int:
        if not self.bytes_per_s:
            return FIRST_SLICE
        return int(min(max(self.bytes_per_s / self.width * SLICE_S, LEAST_SLICE), MOST_SLICE))

    def note(self, moved: int, seconds: float) -> None:
        """A transfer has ended that used all of `width`."""
        if moved < policy.TELLING_BYTES or seconds <= 0:
            return
        self.bytes_per_s = moved / seconds
        if self._is_fixed:
            return
        if self._tried is not None:
            self._judge(*self._tried)
        elif self._wait > 0:
            self._wait -= 1
        else:
            self._try_another()

    def _try_another(self) -> None:
        other = self.width * 2 if self._up or self.width == 1 else self.width // 2
        self._up = not self._up
        if other <= MOST_STREAMS:
            self._tried = self.width, self.bytes_per_s
            self.width = other

    def _judge(self, before: int, carried: float) -> None:
        self._tried = None
        now, width = self.bytes_per_s, self.width
        wanted = BETTER if width > before else SAME
        if now >= wanted * carried:
            self.on_change(StreamsChanged(self._way, before, width, carried, now))
            if width > before:
                self._up = True
                self._try_another()  # perhaps even more
                return
        else:
            self.width = before
            self.bytes_per_s = carried
        self._wait = PATIENCE


class Direction:
    """Values that go one way, of one learner."""

    def __init__(self, bytes_per_s: float | None, way: str, streams: int | None = None) -> None:
        """`streams`: as many always; None: as many as are good."""
        self.way = way
        self.pace = Pace(bytes_per_s)
        self.streams = Streams(way, streams)
        self.moved = 0
        self.moved_elsewhere = 0  # by the other ranks of this island, which send and fetch their own rows
        self.idle_s = 0.0  # while somebody waited for bytes that were not written yet, and nobody moved any
        self._moving = 0
        self._waiting = 0
        self._idle_since: float | None = None

    @contextmanager
    def _busy(self, moving: int = 0, waiting: int = 0) -> Iterator[None]:
        self._count(moving, waiting)
        try:
            yield
        finally:
            self._count(-moving, -waiting)

    def _count(self, moving: int, waiting: int) -> None:
        self._moving += moving
        self._waiting += waiting
        is_idle = self._waiting > 0 and self._moving == 0
        if is_idle and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not is_idle and self._idle_since is not None:
            self.idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    async def carry(
        self, missing: Spans, move: Callable[[int, int], Awaitable[None]], growing: Growing | None = None
    ) -> None:
        """Move every missing span in slices, over as many streams as are good. What fails is missing again.

        `growing`: more of it is being written, and `missing` is its own. Slices are whole until all is written: what
        is waited for meanwhile is in none of the measurements of the link.
        """
        slice_bytes = self.streams.slice_bytes()
        width = self.streams.width
        size = missing.bytes if growing is None else growing.size
        is_full = size >= 2 * width * slice_bytes  # otherwise some streams have nothing to do
        began, moved, idle_s = time.monotonic(), self.moved, self.idle_s

        async def work() -> None:
            while True:
                is_whole = growing is None or growing.is_whole
                span = missing.take(slice_bytes, 1 if is_whole else slice_bytes)
                if span is not None:
                    try:
                        with self._busy(moving=1):
                            await move(*span)
                    except BaseException:
                        missing.add(*span)
                        raise
                elif growing is not None and not is_whole:
                    with self._busy(waiting=1):
                        await growing.more()
                else:
                    return

        tasks = [asyncio.ensure_future(work()) for _ in range(width)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for wrong in ended:
            if isinstance(wrong, BaseException) and not isinstance(wrong, asyncio.CancelledError):
                raise wrong
        if is_full or width == 1:
            self.streams.note(self.moved - moved, time.monotonic() - began - (self.idle_s - idle_s))
