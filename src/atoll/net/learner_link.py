"""A learner's connections to the syncer: one for control, others for bulk, all dialled by the learner.

Runs in the learner's background loop. It knows nothing of the protocol beyond who carries what: an envelope with values
beside it goes by HTTP, everything else by the WebSocket, so a report never waits behind a fragment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
import torch
from aiohttp import WSMsgType
from torch import Tensor

from atoll.core.protocol import Envelope
from atoll.net.wire import (
    CODEC_NUMBERS,
    MOST_MESSAGE_BYTES,
    FragmentHeader,
    FrameHead,
    FrameParser,
    Kind,
    WireError,
    as_bytes,
    decode_message,
    encode_message,
    frame_head,
    parse_json,
)

CHUNK_BYTES = 2**20
CONNECT_S = 15.0
SILENT_S = 60.0
MOST_ERROR_BYTES = 64 * 1024


class Refusal(Exception):  # noqa: N818 - an answer, not an accident
    """The syncer has answered, and the answer is no."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Fetched(NamedTuple):
    """A fragment's bytes as they came. `base` None: the whole value."""

    header: FragmentHeader
    data: Tensor


class LearnerLink:
    """`on_message`, `on_opened`, `on_closed` and `on_failed` are called in the loop, in the order of what happened."""

    def __init__(
        self,
        address: str,
        token: str | None,
        log: logging.Logger,
        on_message: Callable[[Envelope], None],
        on_opened: Callable[[int], None],
        on_closed: Callable[[int, str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.address = address
        self.bytes_up = 0
        self.bytes_down = 0
        self._log = log
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._on_message = on_message
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._on_failed = on_failed
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._outgoing: asyncio.Queue[bytes | str | None] = asyncio.Queue()
        self._number = 0  # of the newest link
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(
            self.url(""), connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False
        )

    def url(self, path: str) -> str:
        return f"http://{self.address}{path}"

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Until it is done; a task that nobody holds may vanish."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------------------------------------------- control

    def dial(self, after_s: float) -> None:
        self.keep(asyncio.ensure_future(self._dial(after_s)))

    async def _dial(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        assert self._session is not None
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await self._session.ws_connect(
                    "/v1/link", max_msg_size=MOST_MESSAGE_BYTES, compress=0, autoping=True
                )
        except aiohttp.WSServerHandshakeError as wrong:
            self._on_failed(f"the syncer at {self.address} answered {wrong.status}")
            return
        except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
            self._on_failed(_why(wrong))
            return
        self._number += 1
        number = self._number
        self._socket = socket
        self._outgoing = asyncio.Queue()
        writer = asyncio.ensure_future(self._write(socket, self._outgoing))
        self._on_opened(number)
        why = "the syncer closed the connection"
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    self._on_message(decode_message(message.data, "syncer"))
                elif message.type is WSMsgType.ERROR:
                    why = f"the connection broke: {_why(socket.exception())}"
        except WireError as wrong:
            why = f"what the syncer sent cannot be read: {wrong}"
        finally:
            writer.cancel()
            if self._socket is socket:
                self._socket = None
            await socket.close()
        if socket.close_code is not None and socket.close_code >= 1000 and why.startswith("the syncer closed"):
            why = f"{why} ({socket.close_code})"
        self._on_closed(number, why)

    async def _write(
        self, socket: aiohttp.ClientWebSocketResponse, outgoing: asyncio.Queue[bytes | str | None]
    ) -> None:
        try:
            while (data := await outgoing.get()) is not None:
                if isinstance(data, str):
                    await socket.send_str(data)
                else:
                    await socket.send_bytes(data)
        except (ConnectionError, RuntimeError, aiohttp.ClientError):
            return  # the reading side notices the same
        await socket.close()

    def post(self, envelope: Envelope) -> None:
        if self._socket is not None and envelope.session == self._number:
            self._outgoing.put_nowait(encode_message(envelope))

    def post_metrics(self, text: str) -> None:
        if self._socket is not None and self._outgoing.qsize() < 100:
            self._outgoing.put_nowait(text)

    def hang_up(self, number: int) -> None:
        """What was posted before is still sent."""
        if self._socket is not None and number == self._number:
            self._outgoing.put_nowait(None)
            self._socket = None

    async def flushed(self, within_s: float) -> None:
        """Until everything that was posted is with the system, or the time is over."""
        try:
            async with asyncio.timeout(within_s):
                while self._socket is not None and not self._outgoing.empty():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._log.warning("the last words did not reach the syncer within %g s", within_s)

    # ---------------------------------------------------------------------------------------------------- asking

    async def ask(self, method: str, path: str, **what: Any) -> Any:
        assert self._session is not None
        async with self._session.request(method, path, **what) as answer:
            await _check(answer)
            return parse_json(await answer.read()) if answer.status != 204 else None

    async def found(self, plan: bytes, values: Callable[[], AsyncIterator[Tensor]]) -> None:
        """Bring the model: the plan, then the values of one fragment after the other."""

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield frame_head(Kind.MODEL, 0, b"{}", plan) + b"{}"
            yield plan
            p = 0
            async for value in values():
                header = b'{"fragment":%d}' % p
                yield frame_head(Kind.MODEL, 0, header, value) + header
                async for chunk in _chunks(as_bytes(value)):
                    yield chunk
                p += 1

        await self.ask("PUT", "/v1/model", data=body())

    # ---------------------------------------------------------------------------------------------------- bulk

    async def put(self, path: str, kind: Kind, codec: int, envelope: Envelope, payload: Any) -> None:
        header = encode_message(envelope)
        view = as_bytes(payload)
        head = await asyncio.get_running_loop().run_in_executor(None, frame_head, kind, codec, header, view)

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield head + header
            async for chunk in _chunks(view):
                yield chunk

        size = len(head) + len(header) + view.nbytes
        await self.ask("PUT", path, data=body(), headers={"Content-Length": str(size)})
        self.bytes_up += size

    async def fragment(self, fragment: int, version: int, base: int | None, sizes: dict[int, int]) -> Fetched:
        """`sizes`: what an update may have, by the number of its codec; under -1 what a whole value has."""
        assert self._session is not None
        found: list[Tensor] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            said = FragmentHeader.decode(header)
            if (said.fragment, said.version) != (fragment, version) or said.base not in (None, base):
                raise WireError(f"fragment {said.fragment} at version {said.version} was not asked for", "type")
            whole = said.base is None and head.codec == CODEC_NUMBERS["f32"]
            if head.payload_bytes != sizes.get(-1 if whole else head.codec) or whole != (said.base is None):
                raise WireError(f"fragment {fragment} in {head.payload_bytes} bytes of codec {head.codec}", "size")
            found.append(torch.empty(head.payload_bytes, dtype=torch.uint8))
            return as_bytes(found[0])

        path = f"/v1/fragment/{fragment}/{version}"
        parser = FrameParser(Kind.FRAGMENT, accept)
        async with self._session.get(path, params={"base": "whole" if base is None else str(base)}) as answer:
            await _check(answer)
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self.bytes_down += len(chunk)
        frame = parser.finish()
        return Fetched(FragmentHeader.decode(frame.header), found[0])

    async def inner_state(self, learner: int, incarnation: int, most_bytes: int) -> bytes:
        assert self._session is not None
        found: list[bytearray] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            if head.payload_bytes > most_bytes:
                raise WireError(f"inner state of {head.payload_bytes} bytes, the limit is {most_bytes}", "size")
            found.append(bytearray(head.payload_bytes))
            return memoryview(found[0])

        parser = FrameParser(Kind.INNER_STATE, accept)
        async with self._session.get(f"/v1/state/{learner}/{incarnation}") as answer:
            await _check(answer)
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self.bytes_down += len(chunk)
        parser.finish()
        return bytes(found[0])


async def _chunks(view: memoryview) -> AsyncIterator[memoryview]:
    for begin in range(0, view.nbytes, CHUNK_BYTES):
        yield view[begin : begin + CHUNK_BYTES]


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    text = await answer.content.read(MOST_ERROR_BYTES)
    try:
        sentence = str(parse_json(text)["error"])
    except (WireError, KeyError, TypeError):
        sentence = f"{answer.status} {answer.reason}"
    raise Refusal(answer.status, sentence)


def _why(wrong: BaseException | None) -> str:
    return str(wrong) or type(wrong).__name__
