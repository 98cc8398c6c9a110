"""Bandwidth limits and parallel connections for values. Control messages are never delayed here."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from atoll.core import policy
from atoll.core.protocol import LinkMeasured
from atoll.transport.buffers import CHUNK_BYTES, Spans, StreamingBuffer

MAX_BURST_S = 0.05
"""How far a paced direction may be ahead of its rate after an idle time."""

MIN_PIECE_BYTES = 4096
DEFAULT_STREAMS, MAX_STREAMS = 4, 16
"""Connections for one large value. A single one carries at most one TCP window per round trip."""

MIN_SLICE_BYTES, FIRST_SLICE_BYTES, MAX_SLICE_BYTES = 2**20, 4 * 2**20, 16 * 2**20
TARGET_SLICE_S = 1.0
"""Target time of a slice on one connection: the most that a lost connection costs."""


def check_streams(streams: int | None) -> int:
    """Return the number of connections; None is the default."""
    if streams is None:
        return DEFAULT_STREAMS
    if type(streams) is not int or not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"streams is {streams!r}; give a number of connections from 1 to {MAX_STREAMS}")
    return streams


class RateLimiter:
    """Limit of bytes per second. None: no limit."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._due = 0.0  # time at which all bytes so far have been sent at the limit

    @property
    def piece_bytes(self) -> int:
        """Bytes to send at a time, so that a rate-limited transfer has no bursts."""
        if self.bytes_per_s is None:
            return CHUNK_BYTES
        return max(MIN_PIECE_BYTES, min(CHUNK_BYTES, int(self.bytes_per_s * MAX_BURST_S / 2)))

    def reserve(self, size: int) -> float:
        """Count these bytes as sent now, and return the time to wait before sending more."""
        if self.bytes_per_s is None:
            return 0.0
        now = self._clock()
        self._due = max(self._due, now - MAX_BURST_S) + size / self.bytes_per_s
        return max(0.0, self._due - now)

    async def acquire(self, size: int) -> None:
        wait_s = self.reserve(size)
        if wait_s > 0:
            await asyncio.sleep(wait_s)


class TransferDirection:
    """Transfers of fragments in one direction, for one learner, and their measured rate."""

    def __init__(self, bytes_per_s: float | None, name: str, streams: int = DEFAULT_STREAMS) -> None:
        self.name = name
        self.limiter = RateLimiter(bytes_per_s)
        self.streams = streams
        self.moved_bytes = 0
        self.moved_bytes_by_other_ranks = 0  # bytes of the other ranks of this learner, which transfer their own rows
        self.idle_s = 0.0  # time in which transfers only waited for bytes that were not written yet
        self._active = 0
        self._waiting = 0
        self._idle_since: float | None = None
        self._bytes_per_s = 0.0  # rate of the newest large transfer; 0 before the first

    def slice_bytes(self) -> int:
        if not self._bytes_per_s:
            return FIRST_SLICE_BYTES
        return int(min(max(self._bytes_per_s / self.streams * TARGET_SLICE_S, MIN_SLICE_BYTES), MAX_SLICE_BYTES))

    @contextmanager
    def _busy(self, active: int = 0, waiting: int = 0) -> Iterator[None]:
        self._count(active, waiting)
        try:
            yield
        finally:
            self._count(-active, -waiting)

    def _count(self, active: int, waiting: int) -> None:
        self._active += active
        self._waiting += waiting
        is_idle = self._waiting > 0 and self._active == 0
        if is_idle and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not is_idle and self._idle_since is not None:
            self.idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    async def transfer(
        self, missing: Spans, move: Callable[[int, int], Awaitable[None]], buffer: StreamingBuffer | None = None
    ) -> None:
        """Transfer every missing span in slices, over several connections. A failed slice is added to `missing` again.

        With `buffer`, more bytes are still being written, and `missing` belongs to the buffer. Slices have full size
        until all bytes are written. The measured throughput excludes the time without bytes to send.
        """
        slice_bytes = self.slice_bytes()
        started_at, moved, idle_s = time.monotonic(), self.moved_bytes, self.idle_s

        async def work() -> None:
            while True:
                is_complete = buffer is None or buffer.is_complete
                span = missing.take(slice_bytes, 1 if is_complete else slice_bytes)
                if span is not None:
                    try:
                        with self._busy(active=1):
                            await move(*span)
                    except BaseException:
                        missing.add(*span)
                        raise
                elif buffer is not None and not is_complete:
                    with self._busy(waiting=1):
                        await buffer.wait_for_more()
                else:
                    return

        tasks = [asyncio.ensure_future(work()) for _ in range(self.streams)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        seconds = time.monotonic() - started_at - (self.idle_s - idle_s)
        if self.moved_bytes - moved >= policy.MIN_MEASURED_BYTES and seconds > 0:
            self._bytes_per_s = (self.moved_bytes - moved) / seconds


# --------------------------------------------------------------------------------------------------------------------
# Rates of links as operators write them


_RATE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(bit|bit/s|b/s)", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(text: str) -> float:
    """Parse a rate and return bytes per second.

    >>> parse_rate("2gbit")
    250000000.0
    >>> parse_rate("10 MB/s")
    10000000.0
    """
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    rate = float(found[1]) * _PREFIX[found[2].lower()] if found else 0.0
    if found is None or not 0 < rate < math.inf:
        raise ValueError(f"a rate is a number with a unit, as 2gbit, 500mbit or 10MB/s; got {text!r}")
    return rate if found[3].lower() == "b/s" else rate / 8


# --------------------------------------------------------------------------------------------------------------------
# Measured throughput of a link, in each direction, from the transfers that happen anyway
#
# Several transfers may share the link, so the bytes of all of them count, from the start of the first. Another
# fragment in flight slows each of them down, but not the link.


MIN_CANCELLED_SAMPLE_BYTES = 2**20
"""Minimum bytes of a cancelled transfer for a measurement: about the smallest measured fragment in the coarsest
codec."""


class LinkMeter:
    """Meter of one direction. `largest`: number of values of the largest fragment."""

    def __init__(
        self,
        direction: TransferDirection,
        largest: int,
        on_measured: Callable[[LinkMeasured], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direction = direction
        self._values = largest
        self._on_measured = on_measured
        self._clock = clock
        self._active_transfers = 0
        self._started_at = 0.0
        self._moved_before = 0
        self._idle_before = 0.0

    @property
    def is_measurable(self) -> bool:
        return self._values * policy.CODEC_BITS[policy.CODECS[0]] / 8 >= policy.MIN_MEASURED_BYTES

    @contextmanager
    def transfer(self, size: Callable[[], int]) -> Iterator[None]:
        """Measure one transfer. `size` is called at its end and returns its bytes."""
        if not self.is_measurable:
            yield
            return
        if not self._active_transfers:
            self._restart()
        self._active_transfers += 1
        try:
            yield
        except asyncio.CancelledError:
            # On a very slow link every transfer is cancelled: a newer copy is requested first. Bytes in socket buffers
            # count as sent here, which makes the link look faster than it is, never slower.
            self._record(MIN_CANCELLED_SAMPLE_BYTES)
            raise
        except BaseException:
            self._restart()  # a broken link says nothing about its rate
            raise
        else:
            # A transfer that ends shortly after another one has too few bytes of its own for a measurement.
            self._record(size())
        finally:
            self._active_transfers -= 1

    def _restart(self) -> None:
        self._started_at, self._moved_before, self._idle_before = (
            self._clock(),
            self._direction.moved_bytes + self._direction.moved_bytes_by_other_ranks,
            self._direction.idle_s,
        )

    def _record(self, min_bytes: int) -> None:
        moved = self._direction.moved_bytes + self._direction.moved_bytes_by_other_ranks - self._moved_before
        seconds = self._clock() - self._started_at - (self._direction.idle_s - self._idle_before)
        if moved >= min_bytes and seconds > 0:
            self._restart()
            self._on_measured(LinkMeasured(self._direction.name, moved, seconds, self._values))
