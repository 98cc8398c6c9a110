"""A learner's connections to the syncer: one for control messages, others for values. The learner opens all of them.

They run in the learner's background loop. An envelope with values is sent by HTTP, everything else by the WebSocket, so
a report never waits behind a fragment.

Values are paced, sent in slices if they are large, and resumed after a lost connection. A partial download of a
fragment is kept while its version is wanted, also over another link. The syncer keeps the partial upload of a
contribution, and reports what is missing.
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
from atoll.transport.buffers import (
    CHUNK_BYTES,
    MAX_INLINE_BYTES,
    READ_AHEAD_BYTES,
    ByteBufferPool,
    Spans,
    StreamingBuffer,
)
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
"""Time for the closing handshake of TLS connections: aiohttp does not report its end."""

READ_TIMEOUT_S = 60.0
MAX_ERROR_BYTES = 64 * 1024
MAX_RESPONSE_BYTES = 64 * 2**20


T = TypeVar("T")


class SyncerRefusedError(Exception):
    """The syncer refused the request."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # one of `wire.CODES` if the syncer refused invalid bytes


class LinkClosedError(OSError):
    """The link closed before the transfer was complete."""


LinkEvent: TypeAlias = ConnectionOpened | ConnectionClosed | DialFailed | MessageArrived | LinkMeasured


class LinkOwner(Protocol):
    def handle_link_event(self, event: LinkEvent) -> None:
        """Handle an event of the link, in the event loop and in order."""


class LearnerLink:
    """Connections of one learner to its syncer, or to one of several addresses with a standby."""

    def __init__(
        self, address: str, token: str | None, log: logging.Logger, owner: LinkOwner, tls: ClientTls | None = None
    ) -> None:
        self.owner = owner
        self.address = address  # all addresses, between commas
        self._addresses = tuple(address.split(","))
        self._address_index = 0  # index of the current address
        self.bytes_up = 0
        self.bytes_down = 0
        self.log = log
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._session: aiohttp.ClientSession | None = None
        self._connection: WebSocketConnection | None = None  # connection of the newest link, until it is closed
        self._closed = asyncio.Event()  # set when the newest link is closed
        self._link_number = 0  # number of the newest link
        self._tls = tls
        self._keys: FileStamps = ()  # the files of the keys that are in use

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        context: bool | ssl.SSLContext = True
        if self._tls is not None:
            self._keys, context = self._tls.stamp(), self._tls.make_context()
        # No DNS cache: the syncer may have moved to another machine.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, use_dns_cache=False, ssl=context)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=self._headers,
            auto_decompress=False,
            read_bufsize=READ_AHEAD_BYTES,
        )

    def url(self, path: str, at: str | None = None) -> str:
        """Return the URL of a path at the syncer, or at this address of a shard."""
        return f"http{'s' if self._tls is not None else ''}://{at or self.current_address}{path}"

    @property
    def has_token(self) -> bool:
        return bool(self._headers)

    @property
    def current_address(self) -> str:
        """The address of the next connection."""
        return self._addresses[self._address_index]

    def rotate_address(self) -> None:
        """Use the next address, because a standby may have taken over from the one that does not answer."""
        self._address_index = (self._address_index + 1) % len(self._addresses)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            if self._tls is not None:
                await asyncio.sleep(TLS_CLOSE_S)

    async def renew_keys(self) -> None:
        """Reload changed key files before a connection. Unusable files are ignored."""
        if self._tls is None or self._tls.stamp() == self._keys:
            return
        old = self._session
        try:
            await self.start()
        except (OSError, ValueError) as error:
            self.log.warning("the key files have changed and cannot be used (%s); the previous keys stay in use", error)
            return
        self.log.info("the key files have changed; connecting with the new keys")
        if old is not None:
            await old.close()

    # ---------------------------------------------------------------------------------------------------- control

    async def dial(self, after_s: float) -> None:
        """Run one link from the first attempt to its end. Only this method closes it."""
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
        cause = broken or (reading.result() if reading.done() else "it was abandoned")
        self.owner.handle_link_event(ConnectionClosed(number, cause))

    async def while_open(self, transfer: Coroutine[Any, Any, T]) -> T:
        """Run a transfer, and cancel it when its link closes: later results would not be used.

        A syncer may stall after another one has taken over. Without this method, transfers to the stalled syncer would
        block their fragments until the silent connection times out, which takes a minute or two.
        """
        closed = self._closed
        work, end = asyncio.ensure_future(transfer), asyncio.ensure_future(closed.wait())
        try:
            await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise LinkClosedError("the link closed during the transfer")
            return work.result()
        finally:
            end.cancel()
            work.cancel()
            await asyncio.wait((work,))

    async def _connect(self) -> aiohttp.ClientWebSocketResponse | None:
        """Connect to the first address that answers, beginning with the one that answered last."""
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
        """Read messages until the link ends, and return the reason."""
        try:
            async for data in connection.messages():
                if isinstance(data, bytes):
                    self.owner.handle_link_event(MessageArrived(decode_message(data, "syncer")))
        except WireError as error:
            return f"invalid message from the syncer: {error}"
        return connection.end_reason

    def post(self, envelope: Envelope) -> None:
        if self._connection is not None and envelope.session == self._link_number:
            self._connection.post(encode_message(envelope))

    def post_metrics(self, text: str) -> None:
        if self._connection is not None and len(self._connection) < 100:
            self._connection.post(text)

    def disconnect(self, number: int) -> asyncio.Event | None:
        """Close the link after sending queued messages, if the system takes them in time. The event marks the end."""
        if self._connection is None or number != self._link_number:
            return None
        self._connection.finish()
        self._connection = None
        self.rotate_address()  # the caller disconnects because this address did not answer
        return self._closed

    async def close_gracefully(self, timeout_s: float) -> None:
        """Close the link, and wait up to `timeout_s` until queued messages have reached the syncer."""
        closed = self.disconnect(self._link_number)
        if closed is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await closed.wait()
        except TimeoutError:
            self.log.warning("the last messages did not reach the syncer within %g s", timeout_s)

    # ---------------------------------------------------------------------------------------------------- requests

    async def request(self, method: str, path: str, at: str | None = None, **options: Any) -> Any:
        assert self._session is not None
        async with self._session.request(method, self.url(path, at), **options) as answer:
            await _raise_for_status(answer)
            return parse_json(await _read_body(answer), MAX_RESPONSE_BYTES) if answer.status != 204 else None

    async def upload_model(self, plan: bytes, values: Callable[[], AsyncIterator[Tensor | ChunkedPayload]]) -> None:
        """Upload the model: the plan, then the values of each fragment in order."""

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
        """Yield the response to a GET request, or raise `SyncerRefusedError`."""
        assert self._session is not None
        async with self._session.get(self.url(path, at), params=params) as response:
            await _raise_for_status(response)
            yield response

    async def download_optimizer_state(
        self, learner: int, incarnation: int, max_bytes: int, allocate: Callable[[int], memoryview]
    ) -> None:
        """Download a peer's optimizer state into memory that `allocate` returns for its size."""

        def accept(head: FrameHead, header: bytes) -> Any:
            if head.payload_bytes > max_bytes:
                raise WireError(
                    f"optimizer state of {head.payload_bytes} bytes exceeds the limit of {max_bytes} bytes", "size"
                )
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
            raise WireError(f"a response of more than {MAX_RESPONSE_BYTES} bytes", "size")
    return gathered


async def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    text = await answer.content.read(MAX_ERROR_BYTES)
    try:
        fields = parse_json(text)
        message, code = str(fields["error"]), str(fields.get("code", ""))
    except (WireError, KeyError, TypeError, AttributeError):
        message, code = f"{answer.status} {answer.reason}", ""
    raise SyncerRefusedError(answer.status, message, code)


def describe_network_error(error: BaseException | None) -> str:
    """Describe a network error for the log, with the message of the syncer if it sent one."""
    problem = find_tls_problem(error)
    if problem is not None:
        return problem
    if isinstance(error, aiohttp.WSServerHandshakeError):
        message = error.headers.get(REFUSED_HEADER) if error.headers is not None else None
        return f"the syncer answered {error.status}{f': {message}' if message else ''}"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error  # without aiohttp's TLS settings, which it puts into the message
    return str(error) or type(error).__name__


# --------------------------------------------------------------------------------------------------------------------
# Payloads that no process has as a whole: the ranks of a learner send them to their leader piece by piece
#
# The digest of a frame precedes its payload, so they are produced twice: for the digest, and for sending.


MAX_QUEUED_PIECES = 2
"""Pieces that wait to be sent. The producer blocks when the queue is full."""


@runtime_checkable
class ChunkedModel(Protocol):
    """A model whose fragments are produced in pieces."""

    def stream_fragment(self, fragment: int, take: Callable[[Tensor], None]) -> None: ...


class ChunkedPayload:
    """Payload of `size` bytes. `produce` calls its argument with every piece, in order, in the compute thread.

    A piece is valid until that call returns.
    """

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
            if is_wanted:  # otherwise discard the rest: the ranks cannot be stopped in the middle
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
"""Larger values are sent in slices."""

MAX_ATTEMPTS = 3
RETRY_DELAY_S = 0.5


class DownloadedFragment(NamedTuple):
    """A received fragment: the whole value if `base` is None, otherwise an update."""

    header: FragmentHeader
    codec: int
    data: Tensor


class FragmentDownload:
    """The received part of one version of one fragment."""

    def __init__(self, version: Version, base: Version | None) -> None:
        self.requested = (version, base)
        self.header: FragmentHeader | None = None  # header of the first slice
        self.codec = 0
        self.data: Tensor | None = None
        self.missing = Spans()
        self.arrived = Spans()
        self.address: str | None = None
        self.is_stale = False  # the syncer serves other bytes now

    def size(self) -> int:
        return self.header.total_bytes if self.header is not None else 0

    def slice_buffer(self, head: FrameHead, fields: FragmentHeader, buffers: ByteBufferPool) -> Any:
        """Return memory for the bytes of one slice. Its header has been checked against the request."""
        if self.data is None:
            self.data = buffers.acquire(fields.total_bytes)
            self.codec = head.codec
        return as_bytes(self.data)[fields.begin : fields.begin + head.payload_bytes]

    def add_slice(self, head: FrameHead, fields: FragmentHeader) -> None:
        """Mark one slice as received. Its digest has been verified."""
        if self.header is None:
            self.header = fields
            self.missing.add(head.payload_bytes, fields.total_bytes)
        self.arrived.add(fields.begin, fields.begin + head.payload_bytes)

    def result(self) -> DownloadedFragment:
        assert self.header is not None and self.data is not None
        return DownloadedFragment(self.header, self.codec, self.data)


class FragmentClient:
    def __init__(self, link: LearnerLink, bytes_per_s: float | None, streams: int = DEFAULT_STREAMS) -> None:
        self._link = link
        self._buffers = ByteBufferPool()
        self._downloads: dict[FragmentId, FragmentDownload] = {}
        self._started_rounds: dict[FragmentId, RoundId] = {}  # contributions that the syncer may have in part
        self.shards = 0  # number of shards in the run; 0: the syncer has all fragments
        self._shard_addresses: list[str | None] = []  # as reported by the syncer; empty: unknown
        self.up = TransferDirection(bytes_per_s, "up", streams)
        self.down = TransferDirection(bytes_per_s, "down", streams)
        self._meters: dict[str, LinkMeter] = {}  # only for directions with an automatic codec

    def attach_meters(self, numerics: Numerics, largest: int) -> None:
        """Measure the directions with an automatic codec. `largest`: number of values of the largest fragment."""
        directions = ((self.up, numerics.up), (self.down, numerics.down))
        measured = [direction for direction, codec in directions if codec == "auto"]
        self._meters = {each.name: LinkMeter(each, largest, self._link.owner.handle_link_event) for each in measured}

    def share_rate(self, ranks: int) -> None:
        """Divide the bandwidth limit of the learner between its ranks, which all transfer values."""
        for limiter in (self.up.limiter, self.down.limiter):
            if limiter.bytes_per_s is not None:
                limiter.bytes_per_s /= ranks

    def measure(self, direction: str, size: Callable[[], int]) -> AbstractContextManager[None]:
        meter = self._meters.get(direction)
        return meter.transfer(size) if meter is not None else nullcontext()

    async def shard_address(self, fragment: FragmentId) -> str | None:
        """Return the address of the fragment's shard, or None if the syncer serves it."""
        if not self.shards:
            return None
        if not self._shard_addresses:
            reply = await self._link.request("GET", "/v1/shards")
            addresses = reply.get("shards") if isinstance(reply, dict) else None
            if not isinstance(addresses, list) or len(addresses) != self.shards:
                raise WireError("the syncer's list of shards is invalid", "type")
            self._shard_addresses = [parse_address(each) if isinstance(each, str) else None for each in addresses]
        found = self._shard_addresses[fragment % self.shards]
        if found is None:
            self._shard_addresses = []
            raise ConnectionError(f"shard {fragment % self.shards}, which has the fragment, is unavailable")
        return found

    # ---------------------------------------------------------------------------------------------------- download

    async def download(
        self,
        fragment: FragmentId,
        version: Version,
        base: Version | None,
        sizes: dict[int, int],
        on_bytes: Callable[[DownloadedFragment, int], None] = lambda fetched, first_bytes: None,
    ) -> DownloadedFragment:
        """Download one version of a fragment, and continue an earlier attempt if there is one.

        Args:
            sizes: Allowed sizes, from `fragment_sizes`.
            on_bytes: Called with the number of bytes up to the first missing one.
        """
        download = self._downloads.get(fragment)
        if download is None or download.requested != (version, base):
            download = self._downloads[fragment] = FragmentDownload(version, base)
        try:
            download.address = await self.shard_address(fragment)

            async def move(begin: int, end: int) -> None:
                await self.download_slice(fragment, download, sizes, begin, end)
                on_bytes(download.result(), download.arrived.contiguous_bytes())

            with self.measure("down", download.size):
                if download.header is None:
                    await move(0, MAX_SINGLE_REQUEST_BYTES)
                if download.missing:
                    await self.down.transfer(download.missing, move)
        except (SyncerRefusedError, WireError):
            self._downloads.pop(fragment, None)
            raise
        except (aiohttp.ClientError, OSError):
            self._shard_addresses = []  # the shard may have another address now
            raise
        self._downloads.pop(fragment, None)
        return download.result()

    async def download_slice(
        self, fragment: FragmentId, download: FragmentDownload, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        """Download one slice. If its bytes were damaged in transit, download it once more."""
        try:
            await self._download_slice_once(fragment, download, sizes, begin, end)
        except WireError as error:
            if error.code != "digest":
                raise
            self._link.log.info("bytes %d to %d of fragment %d were damaged: %s", begin, end, fragment, error)
            await self._download_slice_once(fragment, download, sizes, begin, end)

    async def _download_slice_once(
        self, fragment: FragmentId, download: FragmentDownload, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        version, base = download.requested

        def accept(head: FrameHead, header: bytes) -> Any:
            fields = FragmentHeader.decode(header)
            if (fields.fragment, fields.version, fields.begin) != (fragment, version, begin) or fields.base not in (
                None,
                base,
            ):
                raise WireError(f"fragment {fields.fragment} at version {fields.version} was not requested", "type")
            self._check_unchanged(fragment, download, head, fields)
            whole = fields.base is None and head.codec == CODEC_NUMBERS["f32"]
            if fields.total_bytes != sizes.get(-1 if whole else head.codec) or whole != (fields.base is None):
                raise WireError(f"fragment {fragment} in {fields.total_bytes} bytes of codec {head.codec}", "size")
            if head.payload_bytes != min(end, fields.total_bytes) - begin:
                raise WireError(f"{head.payload_bytes} bytes where {begin} to {end} were requested", "size")
            return download.slice_buffer(head, fields, self._buffers)

        parser = FrameParser(FrameKind.FRAGMENT, accept)
        params = {"base": "whole" if base is None else str(base), "begin": str(begin), "end": str(end)}
        async with self._link.get(f"/v1/fragment/{fragment}/{version}", params, download.address) as answer:
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self._link.bytes_down += len(chunk)
                self.down.moved_bytes += len(chunk)
                await self.down.limiter.acquire(len(chunk))
        frame = parser.finish()
        download.add_slice(frame.head, FragmentHeader.decode(frame.header))

    def _check_unchanged(
        self, fragment: FragmentId, download: FragmentDownload, head: FrameHead, fields: FragmentHeader
    ) -> None:
        """Check that the syncer serves the same bytes. After a restart it serves the value, not an update."""
        first = download.header
        if first is not None and (head.codec, fields) != (download.codec, first._replace(begin=fields.begin)):
            self._downloads.pop(fragment, None)
            download.is_stale = True
            raise ConnectionError("the syncer serves other bytes of this version now")

    def release_buffer(self, data: Tensor) -> None:
        """Release the memory of a download after its bytes were decoded."""
        self._buffers.release(data)

    def forget_shard_addresses(self) -> None:
        """Request the addresses again before the next transfer: a shard may have moved."""
        self._shard_addresses = []

    # ---------------------------------------------------------------------------------------------------- upload

    async def upload_contribution(self, codec: int, envelope: Envelope, buffer: StreamingBuffer) -> None:
        """Upload a contribution. A large one is sent while its bytes are still being written."""
        body = envelope.body
        assert isinstance(body, Contribution)
        header = encode_message(envelope)
        address = await self.shard_address(body.round.fragment)
        try:
            if buffer.size <= MAX_SINGLE_REQUEST_BYTES:
                view = as_bytes(await buffer.wait_until_complete())
                with self.measure("up", lambda: view.nbytes):
                    await self.put_frame("/v1/contribution", FrameKind.CONTRIBUTION, codec, header, view, address)
            else:
                with self.measure("up", lambda: buffer.size):
                    await self._upload_slices(codec, header, envelope, body.round, buffer, address)
        except (aiohttp.ClientError, OSError):
            self._shard_addresses = []
            raise

    async def _upload_slices(
        self,
        codec: int,
        header: bytes,
        envelope: Envelope,
        round_id: RoundId,
        buffer: StreamingBuffer,
        address: str | None,
    ) -> None:
        is_new = self._started_rounds.get(round_id.fragment) != round_id
        self._started_rounds[round_id.fragment] = round_id
        sender = envelope.learner, envelope.incarnation, envelope.session

        async def move(begin: int, end: int) -> None:
            assert buffer.data is not None
            view, fields = as_bytes(buffer.data), SliceHeader(*sender, round_id, begin, buffer.size)
            await self.put_frame("/v1/slice", FrameKind.SLICE, 0, fields.encode(), view[begin:end], address)

        for attempt in range(MAX_ATTEMPTS):
            try:
                if is_new and attempt == 0:
                    await self.up.transfer(buffer.missing, move, buffer)
                else:
                    await buffer.wait_until_complete()
                    missing = await self.commit_contribution(codec, header, address)
                    if not missing:
                        return
                    await self.up.transfer(missing, move)
            except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError) as error:
                is_damaged = isinstance(error, SyncerRefusedError) and error.code == "digest"
                if (isinstance(error, SyncerRefusedError) and not is_damaged) or attempt == MAX_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        missing = await self.commit_contribution(codec, header, address)
        if missing:
            raise ConnectionError(f"the syncer still misses {missing.bytes} bytes of the contribution")

    async def commit_contribution(self, codec: int, header: bytes, address: str | None) -> Spans:
        """Declare an upload complete. Return the missing ranges: none if the syncer has accepted the contribution."""
        frame = encode_frame_head(FrameKind.CONTRIBUTION, codec, header, b"") + header
        reply = await self._link.request("PUT", "/v1/contribution", address, data=frame)
        try:
            return Spans((int(begin), int(end)) for begin, end in reply["missing"]) if reply is not None else Spans()
        except (KeyError, TypeError, ValueError):
            raise WireError("the syncer's list of missing ranges is invalid", "type") from None

    async def put_frame(
        self, path: str, kind: FrameKind, codec: int, header: bytes, view: memoryview, address: str | None = None
    ) -> None:
        """Send one frame."""
        if view.nbytes <= MAX_INLINE_BYTES:
            whole = encode_frame_head(kind, codec, header, view) + header + bytes(view)
            await self.up.limiter.acquire(len(whole))
            await self._link.request("PUT", path, address, data=whole)
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
        await self._link.request("PUT", path, address, data=body(), headers={"Content-Length": str(size)})
        self._link.bytes_up += size


def fragment_sizes(numel: int, downs: tuple[str, ...]) -> dict[int, int]:
    """Return the allowed sizes of a fragment's updates by codec number, and of its whole value under -1."""
    return {CODEC_NUMBERS[down]: get_codec(down).encoded_size(numel) for down in downs} | {-1: 4 * numel}
