"""A learner's control connection, seen from the syncer: messages go out in order and wait for no other learner."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from aiohttp import WSCloseCode, web

from atoll.core.protocol import Body, Delivered, Envelope, Published, Resync
from atoll.core.types import NOTHING, FragmentId, Incarnation, LearnerId, Version
from atoll.transport.wire import encode_message

MOST_WAITING = 16_384
"""Messages that wait for one learner. It has stopped reading long before."""

CLOSING_S = 2.0
"""For the last words on a link that is being closed."""


class Served(Protocol):
    """A fragment whose versions can be kept for a learner that was told of them."""

    def hold(self, version: Version) -> object | None: ...

    def release(self, version: Version) -> None: ...


class SyncerLink:
    """What waits for a learner is bounded: a newer version of a fragment takes the place of an older notice.

    A learner is told of one version of a fragment at a time, and that one is kept for it. If it were told of each: (1)
    it hears of version 7, (2) when its request arrives, version 8 is the newest and 7 is gone, (3) it hears of version
    8, and so on. Where versions come faster than a request travels, it would never get any.
    """

    def __init__(
        self,
        key: tuple[LearnerId, Incarnation, int],
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        fragments: Mapping[FragmentId, Served],
    ) -> None:
        self.key = key
        self._socket = socket
        self.transport = transport
        self._fragments = fragments
        self._told: dict[FragmentId, Version] = {}  # and kept, until the learner has it or wants another
        self._untold: dict[FragmentId, Envelope] = {}  # the newest version of a fragment that is in `_told`
        self._waiting: OrderedDict[object, Envelope] = OrderedDict()
        self._serial = 0
        self._wake = asyncio.Event()
        self._why: str | None = None
        self._task = asyncio.get_running_loop().create_task(self._write())

    def post(self, envelope: Envelope) -> None:
        if self._why is not None:
            return
        body = envelope.body
        if type(body) is Published:
            if body.fragment in self._told:
                self._untold[body.fragment] = envelope
                return
            place: object = ("published", body.fragment)
            self._waiting.pop(place, None)  # the newest goes to the end of the queue
            held = self._fragments.get(body.fragment)
            if held is not None and held.hold(body.version) is not None:
                self._told[body.fragment] = body.version
        else:
            self._serial += 1
            place = self._serial
        self._waiting[place] = envelope
        if len(self._waiting) > MOST_WAITING:
            self.close("it does not read what is sent to it")
        self._wake.set()

    def heard(self, body: Body) -> None:
        """The learner has the version that it was told of, or wants another one: it may be told of the next."""
        if type(body) is not Delivered and type(body) is not Resync:
            return
        p = body.fragment
        has = body.version if type(body) is Delivered else NOTHING
        if p not in self._told or (type(body) is Delivered and has < self._told[p]):
            return
        self._fragments[p].release(self._told.pop(p))
        envelope = self._untold.pop(p, None)
        if envelope is not None and isinstance(envelope.body, Published) and envelope.body.version > has:
            self.post(envelope)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    _, envelope = self._waiting.popitem(last=False)
                    await self._socket.send_bytes(encode_message(envelope))
                if self._why is not None:
                    break
            await self._socket.close(code=WSCloseCode.GOING_AWAY, message=as_last_words(self._why))
        except (ConnectionError, RuntimeError):
            return  # the reading side notices the same, and says so

    def close(self, why: str) -> None:
        """What waits is still sent, if the learner reads it."""
        if self._why is None:
            self._why = why
            self._wake.set()
            asyncio.get_running_loop().call_later(CLOSING_S, self._cut)

    def _cut(self) -> None:
        """It has not read for all that time. Without this nobody would ever notice: nothing comes, nothing goes."""
        if not self._task.done():
            self._task.cancel()
            if self.transport is not None:
                self.transport.abort()

    async def closed(self) -> None:
        await asyncio.wait([self._task], timeout=2 * CLOSING_S)

    def abandon(self) -> None:
        self._task.cancel()
        self._why = self._why or "it is gone"
        for p, version in self._told.items():
            self._fragments[p].release(version)
        self._told.clear()


def as_last_words(why: str) -> bytes:
    """What fits into the frame that closes a WebSocket."""
    return why.encode()[:120].decode(errors="ignore").encode()
