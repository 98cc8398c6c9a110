"""HTTP endpoints for values at a syncer and at a shard: authentication, upload of contributions, download of fragments.

A large contribution is uploaded in slices (`PUT /v1/slice`), several at once and in any order. Then
`PUT /v1/contribution` without a payload says what it is and that it is complete. After a lost connection, the reply to
the same request lists the missing ranges. A fragment can be downloaded from any byte to any other.

A contribution is assembled in memory while the gate has room, and in an unnamed file otherwise. A learner on a slow
link needs minutes for what others send in seconds, and neither delays the other. A learner has at most one upload per
fragment: while it leaves, and at the end of a run, it uploads all fragments at once. Idle uploads are deleted.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from aiohttp import web
from msgspec.structs import replace
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope, MessageArrived
from atoll.core.types import MAX_TOKENS, Incarnation, LearnerId, RoundId
from atoll.syncer.fragment_executor import ContributionPayload, FragmentHost
from atoll.tensors.codecs import Codec, get_codec
from atoll.tensors.robust_merge import find_nonfinite_in_fragment
from atoll.transport.auth import REFUSED_HEADER, IdentityMismatchError, Rejection, check_identity, log_key
from atoll.transport.buffers import CHUNK_BYTES, MAX_INLINE_BYTES, ByteBufferPool, Span, Spans
from atoll.transport.wire import (
    CODEC_NUMBERS,
    FragmentHeader,
    Frame,
    FrameHead,
    FrameKind,
    FrameParser,
    SliceHeader,
    WireError,
    as_bytes,
    decode_message,
    encode_frame_head,
)

UPLOAD_IDLE_TIMEOUT_S = 120.0


class UploadKey(NamedTuple):
    learner: LearnerId
    incarnation: Incarnation
    round: RoundId


@dataclass(slots=True, eq=False)
class SliceWrite:
    """Request that uploads one slice.

    A later request for the same bytes replaces it: the earlier connection has been given up by its sender.
    """

    upload: PartialUpload
    begin: int
    end: int
    is_wanted: bool = True

    @property
    def memory(self) -> memoryview:
        return as_bytes(self.upload.data)[self.begin : self.end]


@dataclass(slots=True, eq=False)
class PartialUpload:
    data: Tensor
    reserved_bytes: int  # reserved at the gate; 0 if the data is in a file
    missing: Spans
    writes: set[SliceWrite] = field(default_factory=set)
    last_used_at: float = field(default_factory=time.monotonic)


class PartialUploads:
    """Contributions that arrive in slices and are not complete yet."""

    def __init__(self, folder: Path, buffers: ByteBufferPool, gate: MemoryGate) -> None:
        self._folder = folder
        self._buffers = buffers
        self._gate = gate
        self._uploads: dict[UploadKey, PartialUpload] = {}  # oldest upload first
        self._sweep: asyncio.TimerHandle | None = None

    def missing(self, key: UploadKey, size: int) -> list[Span]:
        upload = self._find_upload(key, size)
        return list(upload.missing) if upload is not None else [(0, size)]

    def begin_slice(self, key: UploadKey, begin: int, end: int, size: int) -> SliceWrite | None:
        """Return memory for one slice, or None if the slice is here already.

        Raises:
            OSError: Not enough memory or disk space.
        """
        upload = self._find_upload(key, size)
        if upload is None:
            upload = self._start_upload(key, size)
        if not upload.missing.contains(begin, end):
            return None
        for other in list(upload.writes):
            if other.begin < end and begin < other.end:
                self.abandon_slice(other)
        write = SliceWrite(upload, begin, end)
        upload.writes.add(write)
        return write

    def finish_slice(self, write: SliceWrite) -> None:
        """Mark the bytes of this slice as received. Their checksum has been verified."""
        write.upload.missing.remove(write.begin, write.end)
        self.abandon_slice(write)

    def abandon_slice(self, write: SliceWrite) -> None:
        write.is_wanted = False
        write.upload.writes.discard(write)
        write.upload.last_used_at = time.monotonic()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(UPLOAD_IDLE_TIMEOUT_S, self._forget_idle)

    def _find_upload(self, key: UploadKey, size: int) -> PartialUpload | None:
        """Find the upload and check its size. The codec of a contribution, and so its size, cannot change."""
        upload = self._uploads.get(key)
        if upload is not None and upload.data.numel() != size:
            expected = upload.data.numel()
            raise WireError(f"contribution of {size} bytes, but its first slice announced {expected}", "size")
        return upload

    def take_complete(self, key: UploadKey, size: int) -> PartialUpload | None:
        """Return a complete upload, which the caller must `release`, or None if it is not complete."""
        upload = self._find_upload(key, size)
        if upload is None or upload.missing:
            return None
        return self._uploads.pop(key)

    def release(self, upload: PartialUpload) -> None:
        if upload.reserved_bytes:
            self._buffers.release(upload.data)
            self._gate.release(upload.reserved_bytes)
            upload.reserved_bytes = 0

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for key in list(self._uploads):
            self._forget(key)

    def _start_upload(self, key: UploadKey, size: int) -> PartialUpload:
        """Start an upload. Older rounds of the fragment and older incarnations will not continue: delete theirs."""
        for old in [k for k in self._uploads if k.learner == key.learner]:
            if old.round.fragment == key.round.fragment or old.incarnation != key.incarnation:
                self._forget(old)
        is_reserved = self._gate.try_acquire(size)
        data = self._buffers.acquire(size) if is_reserved else self._allocate_file(size)
        upload = self._uploads[key] = PartialUpload(data, size if is_reserved else 0, Spans([(0, size)]))
        return upload

    def _allocate_file(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not SIGBUS later
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _forget(self, key: UploadKey) -> None:
        upload = self._uploads.pop(key)
        for write in list(upload.writes):
            self.abandon_slice(write)
        self.release(upload)

    def _forget_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for key, upload in list(self._uploads.items()):
            if not upload.writes and now - upload.last_used_at >= UPLOAD_IDLE_TIMEOUT_S:
                self._forget(key)
        if self._uploads:
            self._sweep = asyncio.get_running_loop().call_later(UPLOAD_IDLE_TIMEOUT_S, self._forget_idle)


# --------------------------------------------------------------------------------------------------------------------
# A limit on the bytes that are being received at the same time: more than that waits in the network, not in memory


class MemoryGate:
    """First-in, first-out. A single piece larger than the limit passes when nothing else is reserved."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> None:
        if self.try_acquire(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size)  # it was granted at the moment of the cancellation
            elif (size, future) in self._waiting:
                self._waiting.remove((size, future))
                self.release(0)  # the next request in the queue may fit
            raise

    def try_acquire(self, size: int) -> bool:
        """Reserve the bytes if that is possible without waiting."""
        free = not self._waiting and self._fits(size)
        if free:
            self.used_bytes += size
        return free

    def release(self, size: int) -> None:
        self.used_bytes -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            size, future = self._waiting.popleft()
            if not future.done():  # a cancelled request may still be in the queue
                self.used_bytes += size
                future.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + size <= self.max_bytes


STALL_TIMEOUT_S = 60.0
"""Maximum time without progress of an upload, or of a reader of a download. Both use memory that others wait for."""

MAX_DIGITS = 18

T = TypeVar("T")


class NoLinkError(Exception):
    """The link that a request belongs to is closed."""


class ReceivedContribution(NamedTuple):
    """A contribution that has arrived completely. `data` is None if it came in slices."""

    envelope: Envelope
    numel: int
    codec: Codec
    data: Tensor | None


class FragmentEndpoints:
    """Request handlers that a syncer and its shards share."""

    def __init__(self, syncer: FragmentHost) -> None:
        self.syncer = syncer
        self._buffers = ByteBufferPool()
        self.partial_uploads = PartialUploads(syncer.directory / "spool", self._buffers, syncer.gate)

    # ---------------------------------------------------------------------------------------------------- upload

    async def put_contribution(self, request: web.Request) -> web.StreamResponse:
        """Receive a contribution, or the request that completes one uploaded in slices."""
        found: list[ReceivedContribution] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            envelope, numel, codec = self._check_contribution(head, header)
            data = self._buffers.acquire(head.payload_bytes) if head.payload_bytes else None
            found.append(ReceivedContribution(envelope, numel, codec, data))
            return as_bytes(data) if data is not None else b""

        def release() -> None:
            frames.release()
            while found:
                data = found.pop().data
                if data is not None:
                    self._buffers.release(data)

        frames = FrameReader(request, self.syncer.gate)
        is_taken = False
        try:
            await frames.read_frame(FrameKind.CONTRIBUTION, accept)
            await frames.expect_end()
            received = found[0]
            if received.data is None:
                return await self._assemble(received)
            is_taken = await self._deliver(received, received.data, release)
            return web.Response(status=204)
        finally:
            if not is_taken:
                release()

    async def _assemble(self, received: ReceivedContribution) -> web.StreamResponse:
        body = received.envelope.body
        assert isinstance(body, Contribution)
        key = UploadKey(received.envelope.learner, received.envelope.incarnation, body.round)
        size = received.codec.encoded_size(received.numel)
        upload = self.partial_uploads.take_complete(key, size)
        if upload is None:
            return web.json_response({"missing": self.partial_uploads.missing(key, size)}, status=202)
        is_taken = False
        try:
            is_taken = await self._deliver(received, upload.data, lambda: self.partial_uploads.release(upload))
            return web.Response(status=204)
        finally:
            if not is_taken:
                self.partial_uploads.release(upload)

    async def _deliver(self, received: ReceivedContribution, data: Tensor, release: Callable[[], None]) -> bool:
        """Check the values before the core handles the contribution: a bad one must be refused with its reason."""
        syncer, envelope = self.syncer, received.envelope
        assert isinstance(envelope.body, Contribution)
        p = envelope.body.round.fragment
        tracker = syncer.fragments[p].norm_tracker
        problem, norm = await compute_in_thread(data.numel(), tracker.examine, received.codec, data, received.numel)
        syncer.bytes_up += data.numel()
        if problem is None:
            problem = tracker.find_problem(tracker.normalized_norm(norm, envelope.body.steps))
        else:
            assert syncer.plan is not None
            location = await compute_in_thread(
                data.numel(), find_nonfinite_in_fragment, syncer.plan, p, received.codec, data
            )
            problem = f"not finite: {location}"
        envelope = replace(envelope, body=replace(envelope.body, problem=problem))
        payload = ContributionPayload(data, received.codec.name, norm, release)
        syncer.handle_event(MessageArrived(envelope), payload)
        return payload.is_taken

    def _check_contribution(self, head: FrameHead, header: bytes) -> tuple[Envelope, int, Codec]:
        envelope = decode_message(header, "learner")
        body = envelope.body
        if type(body) is not Contribution:
            raise WireError(f"expected a Contribution, found {type(body).__name__}", "type")
        self.check_link(envelope.learner, envelope.incarnation, envelope.session)
        numel, allowed = self._get_fragment_traits(body.round.fragment)
        codecs = {CODEC_NUMBERS[name]: name for name in allowed}
        if head.codec not in codecs:
            raise WireError(f"codec {head.codec}, the run's contributions are {' or '.join(allowed)}", "codec")
        codec = get_codec(codecs[head.codec])
        size = codec.encoded_size(numel)
        if head.payload_bytes not in (0, size):
            raise WireError(f"{head.payload_bytes} bytes, fragment {body.round.fragment} has {size}", "size")
        if body.problem is not None or not 0 <= body.trained <= MAX_TOKENS:
            raise WireError("a learner must not set `problem`, and `trained` must be in its range", "type")
        return envelope, numel, codec

    def _get_fragment_traits(self, p: int) -> tuple[int, tuple[str, ...]]:
        """Return the size of a fragment and the codecs of contributions to it."""
        plan = self.syncer.plan
        if plan is None or not 0 <= p < len(plan.fragments):
            raise WireError(f"there is no fragment {p}", "type")
        return plan.numel(p), plan.allowed_codecs(p, self.syncer.settings.numerics.upload_codecs)

    def check_link(self, learner: int, incarnation: int, session: int) -> None:
        check_identity(learner)
        if (learner, incarnation, session) not in self.syncer.links:
            raise NoLinkError

    async def put_slice(self, request: web.Request) -> web.StreamResponse:
        writes: list[SliceWrite | None] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            fields = SliceHeader.decode(header)
            self.check_link(fields.learner, fields.incarnation, fields.session)
            numel, allowed = self._get_fragment_traits(fields.round.fragment)
            sizes = [get_codec(name).encoded_size(numel) for name in allowed]
            end = fields.begin + head.payload_bytes
            if fields.total_bytes not in sizes or not fields.begin < end <= fields.total_bytes:
                has = " or ".join(map(str, sizes))
                raise WireError(
                    f"got bytes {fields.begin} to {end} of {fields.total_bytes}; the fragment has {has} bytes", "size"
                )
            key = UploadKey(fields.learner, fields.incarnation, fields.round)
            write = self.partial_uploads.begin_slice(key, fields.begin, end, fields.total_bytes)
            writes.append(write)
            return write.memory if write is not None else bytearray(head.payload_bytes)

        try:
            frames = FrameReader(request)
            await frames.read_frame(
                FrameKind.SLICE, accept, lambda: not writes or writes[0] is None or writes[0].is_wanted
            )
            await frames.expect_end()
            if writes[0] is not None:
                self.partial_uploads.finish_slice(writes[0])
            return web.Response(status=204)
        except ConnectionError:
            raise
        except OSError as error:
            self.syncer.log.warning("not enough memory or disk space for a contribution: %s", error)
            return error_response(
                507, f"the syncer has not enough memory or disk space for the contribution: {error.strerror}"
            )
        finally:
            if writes and writes[0] is not None:
                self.partial_uploads.abandon_slice(writes[0])

    # ---------------------------------------------------------------------------------------------------- download

    async def get_fragment(self, request: web.Request) -> web.StreamResponse:
        syncer = self.syncer
        p, version = parse_path_numbers(request, "fragment", "version")
        fragment, requested_base = syncer.fragments.get(p), request.query.get("base", "whole")
        if fragment is None:
            return error_response(404, "there is no such fragment")
        served = fragment.pin(version)
        if served is None:
            newest = fragment.served.version
            return error_response(410, f"version {version} is not served any more, the newest is {newest}")
        try:
            if served.update is not None and requested_base == str(served.base):
                payload, base, number = served.update, served.base, CODEC_NUMBERS[served.codec]
            else:
                payload, base, number = served.value, None, CODEC_NUMBERS["f32"]
            source = as_bytes(payload)
            begin, end = _parse_range(request, source.nbytes)
            view = source[begin:end]
            start = fragment.frame_headers.get((served.version, base, begin, end))
            if start is None:
                header = FragmentHeader(fragment.id, served.version, base, served.value_digest, begin, source.nbytes)
                encoded = header.encode()
                head = await compute_in_thread(
                    view.nbytes, encode_frame_head, FrameKind.FRAGMENT, number, encoded, view
                )
                start = head + encoded
                if view.nbytes == source.nbytes:  # all learners download the same bytes: compute the digest once
                    fragment.frame_headers[served.version, base, begin, end] = start
            response = await stream_response(request, start, view)
            syncer.bytes_down += view.nbytes
            return response
        finally:
            fragment.unpin(version)


class StallTimeout:
    """Raise `TimeoutError` in the block when `progress` has not changed for `limit_s`, at the latest after twice that.

    An `asyncio.timeout` around each chunk would be exact, but costs a tenth of what the chunk itself costs.
    """

    def __init__(self, limit_s: float) -> None:
        self.progress = 0  # the caller counts it up with every chunk
        self._limit_s = limit_s
        self._seen = 0
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> StallTimeout:
        await self._timeout.__aenter__()
        self.resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        await self._timeout.__aexit__(kind, error, trace)  # turns its own cancellation into a TimeoutError

    def pause(self) -> None:
        """Stop the clock: from here on the delay is not the peer's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        self._seen = self.progress
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check_progress)

    def _check_progress(self) -> None:
        if self.progress == self._seen:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self.resume()


class FrameReader:
    """Read the frames of one request body. A body that stalls for too long is given up.

    With a gate, the bytes of a payload are reserved there before more than its first chunk is read.
    """

    def __init__(self, request: web.Request, gate: MemoryGate | None = None) -> None:
        self._chunks: AsyncIterator[bytes] = request.content.iter_any()
        self._rest = b""
        self._gate = gate
        self._acquired_bytes = 0

    async def _next_chunk(self) -> bytes | None:
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        return await anext(self._chunks, None)

    async def read_frame(
        self, kind: FrameKind, accept: Callable[[FrameHead, bytes], Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> Frame:
        """Read one frame. `is_wanted` is checked before every write into the memory that `accept` returned."""
        parser = FrameParser(kind, accept, several=True)
        async with StallTimeout(STALL_TIMEOUT_S) as timeout:
            while not parser.is_done:
                chunk = await self._next_chunk()
                if chunk is None:
                    break
                if not is_wanted():
                    raise NoLinkError
                parser.feed(chunk)
                timeout.progress += 1
                if parser.accepted_bytes and self._gate is not None and not self._acquired_bytes:
                    timeout.pause()
                    await self._gate.acquire(parser.accepted_bytes)
                    timeout.resume()
                    self._acquired_bytes = parser.accepted_bytes
        frame = parser.finish()
        self._rest = parser.rest
        return frame

    def release(self) -> None:
        if self._gate is not None:
            self._gate.release(self._acquired_bytes)
            self._acquired_bytes = 0

    async def expect_end(self) -> None:
        async with asyncio.timeout(STALL_TIMEOUT_S):
            if await self._next_chunk() is not None:
                raise WireError("more bytes than frames", "trailing")


def _parse_range(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the requested range. Without parameters that is everything."""
    found = []
    for name, default in (("begin", 0), ("end", size)):
        text = request.query.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise WireError(f"{name} is a whole number, found {text[:40]!r}", "type")
        found.append(min(int(text), size) if text is not None else default)
    begin, end = found
    if begin >= end:
        raise WireError(f"bytes {begin} to {end} of {size}: the range is empty", "size")
    return begin, end


def error_response(status: int, message: str, code: str = "") -> web.Response:
    text = json.dumps({"error": message} | ({"code": code} if code else {}))
    return web.Response(status=status, text=text, content_type="application/json")


def parse_path_numbers(request: web.Request, one: str, other: str) -> tuple[int, int]:
    """Parse two numbers of the path. Numbers longer than any that is assigned are not found."""
    texts = request.match_info[one], request.match_info[other]
    if max(map(len, texts)) > MAX_DIGITS:
        raise web.HTTPNotFound
    return int(texts[0]), int(texts[1])


async def compute_in_thread(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call the function in another thread, or here if it processes only a few bytes."""
    if size <= MAX_INLINE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def stream_response(request: web.Request, start: bytes, payload: memoryview) -> web.StreamResponse:
    """Send a response in chunks: a slow reader delays only itself. A reader that stalls is disconnected."""
    if payload.nbytes <= MAX_INLINE_BYTES:
        return web.Response(body=start + bytes(payload), content_type="application/octet-stream")
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = len(start) + payload.nbytes
    try:
        async with StallTimeout(STALL_TIMEOUT_S) as timeout:
            await response.prepare(request)
            await response.write(start)
            for begin in range(0, payload.nbytes, CHUNK_BYTES):
                await response.write(payload[begin : begin + CHUNK_BYTES])
                timeout.progress += 1
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
    return response


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def auth_middleware(host: FragmentHost) -> Any:
    """Return a middleware that checks every request. It counts refused requests and closes their connections."""

    @web.middleware
    async def check_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        rejection = host.access.check_request(request)
        if rejection is not None:
            response = error_response(rejection.status, rejection.message)
            response.headers[REFUSED_HEADER] = rejection.message
            response.force_close()  # a client can show another key only on another connection
            return response
        host.on_authenticated(request.transport)
        try:
            return await handler(request)
        except WireError as error:
            rejection = Rejection(error.code, 400, str(error))
            host.access.reject(rejection, str(request.remote), f"{request.method} {request.path}", log_key(error.code))
            return error_response(400, str(error), error.code)
        except IdentityMismatchError as error:
            rejection = Rejection(error.code, 403, str(error))
            host.access.reject(rejection, str(request.remote), request.path, log_key(error.code))
            return error_response(403, str(error), error.code)
        except NoLinkError:
            return error_response(409, "the link of this request is closed")
        except ConnectionError as error:
            host.log.info("%s %s from %s: connection lost: %s", request.method, request.path, request.remote, error)
            return error_response(400, "connection lost")  # not received: the client is gone
        except web.HTTPException:
            raise
        except TimeoutError:
            host.refused["silent"] += 1
            return error_response(408, f"no bytes received for {STALL_TIMEOUT_S:g} s")
        except Exception:
            host.log.exception("%s %s has failed", request.method, request.path)
            return error_response(500, "internal error of the syncer: see its log")

    return check_request
