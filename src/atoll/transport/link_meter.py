"""What a learner's link carries, each way, measured where values are sent and fetched anyway.

Several may be on their way at once and share the link, so it is the bytes of all of them that count, from the moment
at which the first began. A fragment more on its way makes each of them slower, and the link no thinner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.core import policy
from atoll.core.protocol import LinkMeasured
from atoll.transport.pacing import Direction

LEAST_BYTES = 2**20
"""Of a transfer that was broken off: the least that says something. The smallest fragment that is measured has about as
much in the coarsest codec."""


class LinkMeter:
    """`largest`: values of the largest fragment."""

    def __init__(
        self,
        direction: Direction,
        largest: int,
        tell: Callable[[LinkMeasured], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direction = direction
        self._values = largest
        self._tell = tell
        self._clock = clock
        self._under_way = 0
        self._began = 0.0
        self._moved_before = 0
        self._idle_before = 0.0

    @property
    def is_telling(self) -> bool:
        return self._values * policy.CODEC_BITS[policy.CODECS[0]] / 8 >= policy.TELLING_BYTES

    @contextmanager
    def transfer(self, size: Callable[[], int]) -> Iterator[None]:
        """Around one transfer. `size`: its bytes, as they are known at its end."""
        if not self.is_telling:
            yield
            return
        if not self._under_way:
            self._begin()
        self._under_way += 1
        try:
            yield
        except asyncio.CancelledError:
            # On a very thin link nothing ever comes to its end: a newer copy is asked for first. What sockets hold
            # counts as carried here, which makes the link look better than it is, never worse.
            self._end(LEAST_BYTES)
            raise
        except BaseException:
            self._begin()  # a link that broke tells nothing of its rate
            raise
        else:
            # What shares the end of another one's time has too few bytes of its own to be measured by.
            self._end(size())
        finally:
            self._under_way -= 1

    def _begin(self) -> None:
        self._began, self._moved_before, self._idle_before = (
            self._clock(),
            self._direction.moved + self._direction.moved_elsewhere,
            self._direction.idle_s,
        )

    def _end(self, least: int) -> None:
        moved = self._direction.moved + self._direction.moved_elsewhere - self._moved_before
        seconds = self._clock() - self._began - (self._direction.idle_s - self._idle_before)
        if moved >= least and seconds > 0:
            self._begin()
            self._tell(LinkMeasured(self._direction.way, moved, seconds, self._values))
