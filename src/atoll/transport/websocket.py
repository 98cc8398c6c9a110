"""WebSocket connection for learners, syncer and shards."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from atoll.transport.wire import WireError

MAX_QUEUED_MESSAGES = 16_384
"""Queued messages for one peer. With more, it has stopped reading long ago."""

CLOSE_TIMEOUT_S = 2.0
"""Time for the last messages on a connection that is being closed."""

CLOSED_REASON = "the connection was closed"

OutgoingMessage = bytes | str | Callable[[], bytes]
"""A function is called when the message is sent, and encodes it."""


class WebSocketConnection:
    """Send messages in order, from a separate task: a slow peer delays no other, and `post` never waits.

    The connection of a peer with `max_queued` waiting messages is closed: it has stopped reading. If it does not read
    the last messages either, `task` is cancelled and `transport` aborted. The owner of a connection without `transport`
    watches `task` and closes the connection when it ends. One task of the owner reads `messages`.
    """

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
        transport: asyncio.Transport | None = None,
        max_queued: int | None = MAX_QUEUED_MESSAGES,
    ) -> None:
        self.is_closing = False
        self.end_reason = CLOSED_REASON  # valid after `messages` has ended
        self.error: BaseException | None = None  # error of sending or receiving
        self.socket = socket
        self.transport = transport
        self._max_queued = max_queued
        self._queue: OrderedDict[object, OutgoingMessage] = OrderedDict()
        self._serial = 0
        self._wake = asyncio.Event()
        self._close_frame: tuple[int, bytes] | None = None
        self.task = asyncio.get_running_loop().create_task(self._send())

    @classmethod
    async def accept(
        cls,
        request: web.Request,
        max_bytes: int,
        heartbeat_s: float | None = None,
        max_queued: int = MAX_QUEUED_MESSAGES,
    ) -> WebSocketConnection:
        """Accept the connection that a client requests. `max_bytes` is the limit of one message."""
        socket = web.WebSocketResponse(
            max_msg_size=max_bytes, compress=False, timeout=CLOSE_TIMEOUT_S, heartbeat=heartbeat_s
        )
        await socket.prepare(request)
        return cls(socket, request.transport, max_queued)

    def __len__(self) -> int:
        return len(self._queue)

    async def messages(self) -> AsyncIterator[bytes | str]:
        """Yield received messages until the connection ends. Raise WireError on an invalid one."""
        while True:
            message = await self.socket.receive()
            if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
                yield message.data
            elif isinstance(message.data, WebSocketError):  # aiohttp has closed it, with this code
                too_big = message.data.code == WSCloseCode.MESSAGE_TOO_BIG
                raise WireError(str(message.data), "size" if too_big else "type")
            elif message.type is WSMsgType.ERROR:
                self.error = self.socket.exception()
                self.end_reason = f"the connection broke: {self.error}"
                return
            elif message.type is WSMsgType.CLOSE:
                if message.extra:
                    self.end_reason = f"{CLOSED_REASON} ({message.data}): {message.extra}"
                return
            elif message.type in (WSMsgType.CLOSING, WSMsgType.CLOSED):
                return

    def post(self, message: OutgoingMessage, key: object = None) -> None:
        """Queue a message. It replaces a queued one with the same key, and goes to the end of the queue."""
        if self.is_closing:
            return
        if key is None:
            self._serial += 1
            key = self._serial
        self._queue.pop(key, None)
        self._queue[key] = message
        if self._max_queued is not None and len(self._queue) > self._max_queued:
            self.close("it does not read its messages")
        self._wake.set()

    async def _send(self) -> None:
        try:
            while self._queue or not self.is_closing:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    _, message = self._queue.popitem(last=False)
                    if isinstance(message, str):
                        await self.socket.send_str(message)
                    else:
                        await self.socket.send_bytes(message if isinstance(message, bytes) else message())
            if self._close_frame is not None:
                code, reason = self._close_frame
                await self.socket.close(code=code, message=reason)
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
            self.error = error  # the reading task notices it too

    def finish(self) -> None:
        """Send queued messages, if the peer reads them in time, and end `task`. The connection stays open."""
        if not self.is_closing:
            self.is_closing = True
            self._wake.set()
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._abort)

    def close(self, reason: str, code: int = WSCloseCode.GOING_AWAY) -> None:
        """Send queued messages, if the peer reads them in time, and close the connection."""
        if not self.is_closing:
            self._close_frame = code, close_reason(reason)
            self.finish()

    async def refuse(self, reason: str) -> None:
        """Close the connection because of an invalid message. Queued messages are dropped."""
        self.cancel()
        await self.socket.close(code=WSCloseCode.POLICY_VIOLATION, message=close_reason(reason))

    def clear_queue(self) -> None:
        """Drop all queued messages."""
        self._queue.clear()

    def cancel(self) -> None:
        """Stop sending. The connection is lost, or its owner closes it."""
        self.is_closing = True
        self.task.cancel()

    def _abort(self) -> None:
        """Abort a peer that has stopped reading. It would stay unnoticed: no bytes arrive and none are sent."""
        if not self.task.done():
            self.task.cancel()
            if self.transport is not None:
                self.transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait([self.task], timeout=2 * CLOSE_TIMEOUT_S)


def close_reason(reason: str) -> bytes:
    """Cut a reason to the size that fits into the closing frame of a WebSocket.

    >>> len(close_reason("ä" * 100))
    120
    """
    return reason.encode()[:120].decode(errors="ignore").encode()
