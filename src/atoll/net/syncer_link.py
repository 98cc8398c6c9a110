"""A learner's control connection, seen from the syncer: messages go out in order and wait for no other learner."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from aiohttp import WSCloseCode, web

from atoll.core.protocol import Envelope, Published
from atoll.core.types import Incarnation, LearnerId
from atoll.net.wire import encode_message

MOST_WAITING = 16_384
"""Messages that wait for one learner. It has stopped reading long before."""

CLOSING_S = 2.0
"""For the last words on a link that is being closed."""


class SyncerLink:
    """What waits for a learner is bounded: a newer version of a fragment takes the place of an older notice."""

    def __init__(
        self,
        key: tuple[LearnerId, Incarnation, int],
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None = None,
    ) -> None:
        self.key = key
        self._socket = socket
        self._transport = transport
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
            place: object = ("published", body.fragment)
            self._waiting.pop(place, None)  # the newest goes to the end of the queue
        else:
            self._serial += 1
            place = self._serial
        self._waiting[place] = envelope
        if len(self._waiting) > MOST_WAITING:
            self.close("it does not read what is sent to it")
        self._wake.set()

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
            if self._transport is not None:
                self._transport.abort()

    async def closed(self) -> None:
        await asyncio.wait([self._task], timeout=2 * CLOSING_S)

    def abandon(self) -> None:
        self._task.cancel()


def as_last_words(why: str) -> bytes:
    """What fits into the frame that closes a WebSocket."""
    return why.encode()[:120].decode(errors="ignore").encode()
