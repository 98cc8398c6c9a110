"""A learner's connections to the syncer: one for control, others for bulk, all dialled by the learner.

Runs in the learner's background loop. It knows nothing of the protocol beyond who carries what: an envelope with values
beside it goes by HTTP, everything else by the WebSocket, so a report never waits behind a fragment.

Values are paced, sent in slices where they are large, and resumed from where they broke off. Whatever was fetched of a
fragment is kept while its version is wanted, also over another link; what arrived of a contribution is kept by the
syncer, which says what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import aiohttp
from torch import Tensor

from atoll.core.protocol import (
    ConnectionClosed,
    ConnectionOpened,
    Contribution,
    DialFailed,
    Envelope,
    LinkMeasured,
    MessageArrived,
)
from atoll.core.types import FragmentId, RoundId, Version
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import Numerics
from atoll.transport.auth import REFUSED_HEADER
from atoll.transport.buffers import CHUNK_BYTES, MAX_INLINE_BYTES, READ_AHEAD_BYTES, BufferPool, Spans, StreamingBuffer
from atoll.transport.endpoint import parse_address
from atoll.transport.pacing import DEFAULT_STREAMS, FIRST_SLICE_BYTES, LinkMeter, TransferDirection
from atoll.transport.tls import ClientTls, FileStamps, find_tls_problem
from atoll.transport.websocket import CLOSE_TIMEOUT_S, WebSocketConnection
from atoll.transport.wire import (
    CODEC_NUMBERS,
    MAX_MESSAGE_BYTES,
    FragmentHeader,
    FrameHead,
    FrameKind,
    FrameParser,
    SliceHeader,
    WireError,
    as_bytes,
    decode_message,
    encode_frame_head,
    encode_message,
    encode_streamed_frame_head,
    parse_json,
)

CONNECT_TIMEOUT_S = 15.0
TLS_CLOSE_S = 0.1
"""Connections with TLS say goodbye to each other, and aiohttp does not tell when they have."""

READ_TIMEOUT_S = 60.0
MAX_ERROR_BYTES = 64 * 1024
MAX_RESPONSE_BYTES = 64 * 2**20


T = TypeVar("T")


class SyncerRefusedError(Exception):
    """The syncer has answered, and the answer is no."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # where the bytes were wrong: one of `wire.CODES`


class LinkClosedError(OSError):
    """The link of a transfer has ended before it."""


LinkEvent: TypeAlias = ConnectionOpened | ConnectionClosed | DialFailed | MessageArrived | LinkMeasured


class LinkOwner(Protocol):
    def handle_link_event(self, event: LinkEvent) -> None:
        """Handle an event of the link, in the loop. Events come in the order in which they happened."""


class LearnerLink:
    def __init__(
        self, address: str, token: str | None, log: logging.Logger, owner: LinkOwner, tls: ClientTls | None = None
    ) -> None:
        self.owner = owner
        self.address = address  # all of them, as they were given
        self._addresses = tuple(address.split(","))
        self._address_index = 0  # of the one that is asked
        self.bytes_up = 0
        self.bytes_down = 0
        self.log = log
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._session: aiohttp.ClientSession | None = None
        self._connection: WebSocketConnection | None = None  # of the newest link, until it is hung up
        self._closed = asyncio.Event()  # of the newest link
        self._link_number = 0  # of the newest link
        self._tls = tls
        self._keys: FileStamps = ()  # the files of the keys that are in use

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        context: bool | ssl.SSLContext = True
        if self._tls is not None:
            self._keys, context = self._tls.stamp(), self._tls.make_context()
        # A name is looked up at every dial: whoever it leads to may have moved meanwhile.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, use_dns_cache=False, ssl=context)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=self._headers,
            auto_decompress=False,
            read_bufsize=READ_AHEAD_BYTES,
        )

    def url(self, path: str, at: str | None = None) -> str:
        """At the syncer, or at this address of one of its shards."""
        return f"http{'s' if self._tls is not None else ''}://{at or self.current_address}{path}"

    @property
    def has_token(self) -> bool:
        return bool(self._headers)

    @property
    def current_address(self) -> str:
        """The address that is asked now."""
        return self._addresses[self._address_index]

    def rotate_address(self) -> None:
        """Nobody answers here: the next address is asked, where there is one. Another syncer may have taken over."""
        self._address_index = (self._address_index + 1) % len(self._addresses)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            if self._tls is not None:
                await asyncio.sleep(TLS_CLOSE_S)

    async def renew_keys(self) -> None:
        """Before a dial: files that have changed are used from now on, those that cannot be used are not."""
        if self._tls is None or self._tls.stamp() == self._keys:
            return
        old = self._session
        try:
            await self.start()
        except (OSError, ValueError) as error:
            self.log.warning("the keys have changed and cannot be used, those before stay in use: %s", error)
            return
        self.log.info("the keys have changed: dialling with the new ones")
        if old is not None:
            await old.close()

    # ---------------------------------------------------------------------------------------------------- control

    async def dial(self, after_s: float) -> None:
        """One link, from the first try to its end. Only here it is closed; others ask for it."""
        await asyncio.sleep(after_s)
        socket = await self._connect()
        if socket is None:
            return
        self._link_number += 1
        number = self._link_number
        closed = self._closed = asyncio.Event()
        connection = self._connection = WebSocketConnection(socket)
        reading = asyncio.ensure_future(self._read(connection))
        try:
            self.owner.handle_link_event(ConnectionOpened(number))
            await asyncio.wait((reading, connection.task), return_when=asyncio.FIRST_COMPLETED)
            broken = (
                f"the connection broke: {describe_network_error(connection.error)}"
                if connection.error is not None
                else ""
            )
        finally:
            connection.cancel()
            if self._connection is connection:
                self._connection = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await socket.close()
            await asyncio.wait((reading,), timeout=CLOSE_TIMEOUT_S)
            closed.set()
            reading.cancel()
        why_closed = broken or (reading.result() if reading.done() else "it was given up")
        self.owner.handle_link_event(ConnectionClosed(number, why_closed))

    async def while_open(self, transfer: Coroutine[Any, Any, T]) -> T:
        """A transfer that ends with the link to which it belongs: nobody wants what comes later.

        Without it a syncer that stands still, and whose work another one has taken over, would hold what is under way
        until a silent connection is given up: a minute or two in which its fragment stands still with it.
        """
        closed = self._closed
        work, end = asyncio.ensure_future(transfer), asyncio.ensure_future(closed.wait())
        try:
            await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise LinkClosedError("the link was closed meanwhile")
            return work.result()
        finally:
            end.cancel()
            work.cancel()
            await asyncio.wait((work,))

    async def _connect(self) -> aiohttp.ClientWebSocketResponse | None:
        """At the first of the addresses that answers, beginning with the one that answered last."""
        await self.renew_keys()
        assert self._session is not None
        problem = ""
        for _ in self._addresses:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await self._session.ws_connect(
                        self.url("/v1/link"), max_msg_size=MAX_MESSAGE_BYTES, compress=0, autoping=True
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = describe_network_error(error)
            self.rotate_address()
        self.owner.handle_link_event(DialFailed(problem))
        return None

    async def _read(self, connection: WebSocketConnection) -> str:
        """Until the link ends; why it did."""
        try:
            async for data in connection.messages():
                if isinstance(data, bytes):
                    self.owner.handle_link_event(MessageArrived(decode_message(data, "syncer")))
        except WireError as error:
            return f"what the syncer sent cannot be read: {error}"
        return connection.end_reason

    def post(self, envelope: Envelope) -> None:
        if self._connection is not None and envelope.session == self._link_number:
            self._connection.post(encode_message(envelope))

    def post_metrics(self, text: str) -> None:
        if self._connection is not None and len(self._connection) < 100:
            self._connection.post(text)

    def disconnect(self, number: int) -> asyncio.Event | None:
        """What was posted before is still sent, if the system takes it in time. The event is set at the end of it."""
        if self._connection is None or number != self._link_number:
            return None
        self._connection.finish()
        self._connection = None
        self.rotate_address()  # whoever is hung up on did not answer
        return self._closed

    async def close_gracefully(self, timeout_s: float) -> None:
        """Hang up, and wait until what was posted is with the syncer, or the time is over."""
        closed = self.disconnect(self._link_number)
        if closed is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await closed.wait()
        except TimeoutError:
            self.log.warning("the last words did not reach the syncer within %g s", timeout_s)

    # ---------------------------------------------------------------------------------------------------- asking

    async def request(self, method: str, path: str, at: str | None = None, **options: Any) -> Any:
        assert self._session is not None
        async with self._session.request(method, self.url(path, at), **options) as answer:
            await _raise_for_status(answer)
            return parse_json(await _read_body(answer), MAX_RESPONSE_BYTES) if answer.status != 204 else None

    async def upload_model(self, plan: bytes, values: Callable[[], AsyncIterator[Tensor | ChunkedPayload]]) -> None:
        """Bring the model: the plan, then the values of one fragment after the other."""

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}"
            yield plan
            p = 0
            async for value in values():
                header = b'{"fragment":%d}' % p
                if isinstance(value, ChunkedPayload):
                    yield await value.head(FrameKind.MODEL, header) + header
                    async for piece in value.pieces():
                        yield piece
                else:
                    yield encode_frame_head(FrameKind.MODEL, 0, header, value) + header
                    async for chunk in _chunks(as_bytes(value)):
                        yield chunk
                p += 1

        await self.request("PUT", "/v1/model", data=body())

    @contextlib.asynccontextmanager
    async def get(
        self, path: str, params: dict[str, str] | None = None, at: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is good, to be read."""
        assert self._session is not None
        async with self._session.get(self.url(path, at), params=params) as answer:
            await _raise_for_status(answer)
            yield answer

    async def download_optimizer_state(
        self, learner: int, incarnation: int, max_bytes: int, allocate: Callable[[int], memoryview]
    ) -> None:
        """Into memory that `allocate` gives for so many bytes."""

        def accept(head: FrameHead, header: bytes) -> Any:
            if head.payload_bytes > max_bytes:
                raise WireError(f"inner state of {head.payload_bytes} bytes, the limit is {max_bytes}", "size")
            return allocate(head.payload_bytes)

        parser = FrameParser(FrameKind.OPTIMIZER_STATE, accept)
        async with self.get(f"/v1/state/{learner}/{incarnation}") as answer:
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self.bytes_down += len(chunk)
        parser.finish()


async def _chunks(view: memoryview) -> AsyncIterator[memoryview]:
    for begin in range(0, view.nbytes, CHUNK_BYTES):
        yield view[begin : begin + CHUNK_BYTES]


async def _read_body(answer: aiohttp.ClientResponse) -> bytearray:
    gathered = bytearray()
    async for chunk in answer.content.iter_any():
        gathered += chunk
        if len(gathered) > MAX_RESPONSE_BYTES:
            raise WireError(f"an answer of more than {MAX_RESPONSE_BYTES} bytes", "size")
    return gathered


async def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    text = await answer.content.read(MAX_ERROR_BYTES)
    try:
        told = parse_json(text)
        sentence, code = str(told["error"]), str(told.get("code", ""))
    except (WireError, KeyError, TypeError, AttributeError):
        sentence, code = f"{answer.status} {answer.reason}", ""
    raise SyncerRefusedError(answer.status, sentence, code)


def describe_network_error(error: BaseException | None) -> str:
    problem = find_tls_problem(error)
    if problem is not None:
        return problem
    if isinstance(error, aiohttp.WSServerHandshakeError):
        said = error.headers.get(REFUSED_HEADER) if error.headers is not None else None
        return f"the syncer answered {error.status}{f': {said}' if said else ''}"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error  # aiohttp puts its settings for TLS into the sentence, which nobody asked for
    return str(error) or type(error).__name__


# --------------------------------------------------------------------------------------------------------------------
# Payloads that are never in one place: the ranks of an island show them to their leader piece by piece
#
# The digest of a frame stands before its payload, so they are shown twice: once for the digest, once to be sent.


MAX_QUEUED_PIECES = 2
"""Pieces that wait to be sent. Whoever shows more waits."""


@runtime_checkable
class ChunkedModel(Protocol):
    """A model whose fragments are shown like that."""

    def stream_fragment(self, fragment: int, take: Callable[[Tensor], None]) -> None: ...


class ChunkedPayload:
    """One payload of `size` bytes. `show` calls what it is given with every piece, in order, in the computing thread;
    a piece is good until that returns."""

    def __init__(self, size: int, produce: Callable[[Callable[[Tensor], None]], None], compute: Executor) -> None:
        self.size = size
        self._produce = produce
        self._compute = compute

    async def head(self, kind: FrameKind, header: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compute, encode_streamed_frame_head, kind, header, self.size, self._produce
        )

    async def pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        shown: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_QUEUED_PIECES)
        is_wanted = True

        def put(piece: bytes | None) -> None:
            asyncio.run_coroutine_threadsafe(shown.put(piece), loop).result()

        def take(piece: Tensor) -> None:
            if is_wanted:  # else the ranks show the rest in vain: they cannot be stopped in the middle
                put(bytes(as_bytes(piece)))

        def work() -> None:
            try:
                self._produce(take)
            finally:
                if is_wanted:
                    put(None)

        working = loop.run_in_executor(self._compute, work)
        try:
            while (piece := await shown.get()) is not None:
                yield piece
            await working
        finally:
            is_wanted = False
            while not shown.empty():
                shown.get_nowait()


MAX_SINGLE_REQUEST_BYTES = FIRST_SLICE_BYTES
"""What is not larger travels in one request."""

MAX_ATTEMPTS = 3
RETRY_DELAY_S = 0.5


class DownloadedFragment(NamedTuple):
    """A fragment's bytes as they came. `base` None: the whole value."""

    header: FragmentHeader
    codec: int
    data: Tensor


class FragmentDownload:
    """What is here of one version of one fragment."""

    def __init__(self, version: Version, base: Version | None) -> None:
        self.requested = (version, base)
        self.header: FragmentHeader | None = None  # of the first slice
        self.codec = 0
        self.data: Tensor | None = None
        self.missing = Spans()
        self.arrived = Spans()
        self.address: str | None = None
        self.is_stale = False  # other bytes are served by now

    def size(self) -> int:
        return self.header.total_bytes if self.header is not None else 0

    def slice_buffer(self, head: FrameHead, said: FragmentHeader, buffers: BufferPool) -> Any:
        """For the bytes of one slice, which is what was asked for."""
        if self.data is None:
            self.data = buffers.acquire(said.total_bytes)
            self.codec = head.codec
        return as_bytes(self.data)[said.begin : said.begin + head.payload_bytes]

    def add_slice(self, head: FrameHead, said: FragmentHeader) -> None:
        """One slice is here, and sound."""
        if self.header is None:
            self.header = said
            self.missing.add(head.payload_bytes, said.total_bytes)
        self.arrived.add(said.begin, said.begin + head.payload_bytes)

    def result(self) -> DownloadedFragment:
        assert self.header is not None and self.data is not None
        return DownloadedFragment(self.header, self.codec, self.data)


class FragmentClient:
    def __init__(self, link: LearnerLink, bytes_per_s: float | None, streams: int = DEFAULT_STREAMS) -> None:
        self._link = link
        self._buffers = BufferPool()
        self._downloads: dict[FragmentId, FragmentDownload] = {}
        self._started_rounds: dict[FragmentId, RoundId] = {}  # contributions of which the syncer may have a part
        self.shards = 0  # of the run; 0: the syncer has all fragments
        self._shard_addresses: list[str | None] = []  # of the shards, as the syncer told last
        self.up = TransferDirection(bytes_per_s, "up", streams)
        self.down = TransferDirection(bytes_per_s, "down", streams)
        self._meters: dict[str, LinkMeter] = {}  # of the ways whose codec is not named

    def attach_meters(self, numerics: Numerics, largest: int) -> None:
        """Measure the ways whose codec is not named. `largest`: values of the largest fragment."""
        ways = ((self.up, numerics.up), (self.down, numerics.down))
        measured = [direction for direction, wish in ways if wish == "auto"]
        self._meters = {each.name: LinkMeter(each, largest, self._link.owner.handle_link_event) for each in measured}

    def share_rate(self, ranks: int) -> None:
        """So many processes send and fetch over what was given to one."""
        for limiter in (self.up.limiter, self.down.limiter):
            if limiter.bytes_per_s is not None:
                limiter.bytes_per_s /= ranks

    def measure(self, way: str, size: Callable[[], int]) -> AbstractContextManager[None]:
        meter = self._meters.get(way)
        return meter.transfer(size) if meter is not None else nullcontext()

    async def shard_address(self, fragment: FragmentId) -> str | None:
        """Where the fragment is; None: at the syncer."""
        if not self.shards:
            return None
        if not self._shard_addresses:
            told = await self._link.request("GET", "/v1/shards")
            places = told.get("shards") if isinstance(told, dict) else None
            if not isinstance(places, list) or len(places) != self.shards:
                raise WireError("where the shards are cannot be read", "type")
            self._shard_addresses = [parse_address(each) if isinstance(each, str) else None for each in places]
        found = self._shard_addresses[fragment % self.shards]
        if found is None:
            self._shard_addresses = []
            raise ConnectionError(f"shard {fragment % self.shards}, which has it, is away")
        return found

    # ---------------------------------------------------------------------------------------------------- down

    async def download(
        self,
        fragment: FragmentId,
        version: Version,
        base: Version | None,
        sizes: dict[int, int],
        on_bytes: Callable[[DownloadedFragment, int], None] = lambda fetched, first_bytes: None,
    ) -> DownloadedFragment:
        """`sizes`: what an update may have, by the number of its codec; under -1 what a whole value has. `on_bytes`
        hears how many bytes are here, counted from the first to the first that is missing."""
        under_way = self._downloads.get(fragment)
        if under_way is None or under_way.requested != (version, base):
            under_way = self._downloads[fragment] = FragmentDownload(version, base)
        try:
            under_way.address = await self.shard_address(fragment)

            async def move(begin: int, end: int) -> None:
                await self.download_slice(fragment, under_way, sizes, begin, end)
                on_bytes(under_way.result(), under_way.arrived.contiguous_bytes())

            with self.measure("down", under_way.size):
                if under_way.header is None:
                    await move(0, MAX_SINGLE_REQUEST_BYTES)
                if under_way.missing:
                    await self.down.transfer(under_way.missing, move)
        except (SyncerRefusedError, WireError):
            self._downloads.pop(fragment, None)
            raise
        except (aiohttp.ClientError, OSError):
            self._shard_addresses = []  # a shard may be somewhere else by now
            raise
        self._downloads.pop(fragment, None)
        return under_way.result()

    async def download_slice(
        self, fragment: FragmentId, download: FragmentDownload, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        """Bytes that are damaged on their way are asked for once more."""
        try:
            await self._download_slice_once(fragment, download, sizes, begin, end)
        except WireError as wrong:
            if wrong.code != "digest":
                raise
            self._link.log.info("bytes %d to %d of fragment %d came damaged: %s", begin, end, fragment, wrong)
            await self._download_slice_once(fragment, download, sizes, begin, end)

    async def _download_slice_once(
        self, fragment: FragmentId, download: FragmentDownload, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        version, base = download.requested

        def accept(head: FrameHead, header: bytes) -> Any:
            said = FragmentHeader.decode(header)
            if (said.fragment, said.version, said.begin) != (fragment, version, begin) or said.base not in (None, base):
                raise WireError(f"fragment {said.fragment} at version {said.version} was not asked for", "type")
            self._check_unchanged(fragment, download, head, said)
            whole = said.base is None and head.codec == CODEC_NUMBERS["f32"]
            if said.total_bytes != sizes.get(-1 if whole else head.codec) or whole != (said.base is None):
                raise WireError(f"fragment {fragment} in {said.total_bytes} bytes of codec {head.codec}", "size")
            if head.payload_bytes != min(end, said.total_bytes) - begin:
                raise WireError(f"{head.payload_bytes} bytes where {begin} to {end} were asked for", "size")
            return download.slice_buffer(head, said, self._buffers)

        parser = FrameParser(FrameKind.FRAGMENT, accept)
        asked = {"base": "whole" if base is None else str(base), "begin": str(begin), "end": str(end)}
        async with self._link.get(f"/v1/fragment/{fragment}/{version}", asked, download.address) as answer:
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self._link.bytes_down += len(chunk)
                self.down.moved_bytes += len(chunk)
                await self.down.limiter.acquire(len(chunk))
        frame = parser.finish()
        download.add_slice(frame.head, FragmentHeader.decode(frame.header))

    def _check_unchanged(
        self, fragment: FragmentId, download: FragmentDownload, head: FrameHead, said: FragmentHeader
    ) -> None:
        """A syncer that has started again serves the value where it served an update."""
        first = download.header
        if first is not None and (head.codec, said) != (download.codec, first._replace(begin=said.begin)):
            self._downloads.pop(fragment, None)
            download.is_stale = True
            raise ConnectionError("the syncer serves other bytes of this version now")

    def release_buffer(self, data: Tensor) -> None:
        """The bytes were decoded; their memory is used again."""
        self._buffers.release(data)

    def forget_shard_addresses(self) -> None:
        """A shard may be somewhere else by now."""
        self._shard_addresses = []

    # ---------------------------------------------------------------------------------------------------- up

    async def upload_contribution(self, codec: int, envelope: Envelope, buffer: StreamingBuffer) -> None:
        """Its bytes may still be written: what is large is sent while they are."""
        body = envelope.body
        assert isinstance(body, Contribution)
        header = encode_message(envelope)
        place = await self.shard_address(body.round.fragment)
        try:
            if buffer.size <= MAX_SINGLE_REQUEST_BYTES:
                view = as_bytes(await buffer.wait_until_complete())
                with self.measure("up", lambda: view.nbytes):
                    await self.put_frame("/v1/contribution", FrameKind.CONTRIBUTION, codec, header, view, place)
            else:
                with self.measure("up", lambda: buffer.size):
                    await self._upload_slices(codec, header, envelope, body.round, buffer, place)
        except (aiohttp.ClientError, OSError):
            self._shard_addresses = []
            raise

    async def _upload_slices(
        self,
        codec: int,
        header: bytes,
        envelope: Envelope,
        round_id: RoundId,
        growing: StreamingBuffer,
        place: str | None,
    ) -> None:
        is_new = self._started_rounds.get(round_id.fragment) != round_id
        self._started_rounds[round_id.fragment] = round_id
        sender = envelope.learner, envelope.incarnation, envelope.session

        async def move(begin: int, end: int) -> None:
            assert growing.data is not None
            view, about = as_bytes(growing.data), SliceHeader(*sender, round_id, begin, growing.size)
            await self.put_frame("/v1/slice", FrameKind.SLICE, 0, about.encode(), view[begin:end], place)

        for attempt in range(MAX_ATTEMPTS):
            try:
                if is_new and attempt == 0:
                    await self.up.transfer(growing.missing, move, growing)
                else:
                    await growing.wait_until_complete()
                    missing = await self.commit_contribution(codec, header, place)
                    if not missing:
                        return
                    await self.up.transfer(missing, move)
            except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError) as wrong:
                is_damaged = isinstance(wrong, SyncerRefusedError) and wrong.code == "digest"
                if (isinstance(wrong, SyncerRefusedError) and not is_damaged) or attempt == MAX_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        missing = await self.commit_contribution(codec, header, place)
        if missing:
            raise ConnectionError(f"{missing.bytes} bytes of it are missing")

    async def commit_contribution(self, codec: int, header: bytes, place: str | None) -> Spans:
        """That all of it is there. What the syncer misses; nothing: it has the contribution."""
        whole = encode_frame_head(FrameKind.CONTRIBUTION, codec, header, b"") + header
        told = await self._link.request("PUT", "/v1/contribution", place, data=whole)
        try:
            return Spans((int(begin), int(end)) for begin, end in told["missing"]) if told is not None else Spans()
        except (KeyError, TypeError, ValueError):
            raise WireError("what the syncer misses cannot be read", "type") from None

    async def put_frame(
        self, path: str, kind: FrameKind, codec: int, header: bytes, view: memoryview, place: str | None = None
    ) -> None:
        """One frame."""
        if view.nbytes <= MAX_INLINE_BYTES:
            whole = encode_frame_head(kind, codec, header, view) + header + bytes(view)
            await self.up.limiter.acquire(len(whole))
            await self._link.request("PUT", path, place, data=whole)
            self._link.bytes_up += len(whole)
            return
        head = await asyncio.get_running_loop().run_in_executor(None, encode_frame_head, kind, codec, header, view)
        limiter = self.up.limiter

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield head + header
            for begin in range(0, view.nbytes, limiter.piece_bytes):
                piece = view[begin : begin + limiter.piece_bytes]
                await limiter.acquire(piece.nbytes)
                self.up.moved_bytes += piece.nbytes
                yield piece

        size = len(head) + len(header) + view.nbytes
        await self._link.request("PUT", path, place, data=body(), headers={"Content-Length": str(size)})
        self._link.bytes_up += size


def fragment_sizes(numel: int, downs: tuple[str, ...]) -> dict[int, int]:
    """What an update of a fragment may have, by the number of its codec; under -1 what a whole value has."""
    return {CODEC_NUMBERS[down]: get_codec(down).encoded_size(numel) for down in downs} | {-1: 4 * numel}
