"""Values at the syncer's door: contributions whole or in slices, fragments whole or a part of them.

A large contribution comes in slices (`PUT /v1/slice`, several at once, in any order), and then in a word that says what
it is and that all of it is there (`PUT /v1/contribution` without a payload). Where a connection is lost, the same word
is answered with what is missing. A fragment is served from any byte to any other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Container, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from aiohttp import web
from msgspec.structs import replace
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope, MessageArrived
from atoll.core.types import MOST_TOKENS, FragmentId, Incarnation, LearnerId
from atoll.logs import Named
from atoll.store.run_settings import RunSettings
from atoll.syncer.fragment_executor import Payload
from atoll.syncer.partial_uploads import ArrivalKey, Arrivals, Claim, MemoryGate
from atoll.tensors.codecs import Codec, codec
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import unfit_in_fragment
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport.buffers import CHUNK_BYTES, SMALL_BYTES, ByteBuffers
from atoll.transport.identity import check_speaker
from atoll.transport.wire import (
    CODEC_NUMBERS,
    FragmentHeader,
    Frame,
    FrameHead,
    FrameParser,
    Kind,
    SliceHeader,
    WireError,
    as_bytes,
    decode_message,
    frame_head,
)

SILENT_S = 60.0
"""An upload from which nothing comes for so long is given up, and a reader that does not take a chunk: both hold memory
that others wait for."""

MOST_DIGITS = 18

T = TypeVar("T")


class NoLinkError(Exception):
    """What belongs to a link that is closed is of no use to anybody."""


class Brought(NamedTuple):
    """A contribution whose bytes are all here. `data` None: they came in slices."""

    envelope: Envelope
    numel: int
    up: Codec
    data: Tensor | None


class Host(Protocol):
    """The process whose fragments they are: a syncer, or a shard of one."""

    directory: Path
    settings: RunSettings
    gate: MemoryGate
    log: Named
    bytes_up: int
    bytes_down: int

    @property
    def plan(self) -> FragmentPlan | None: ...

    @property
    def fragments(self) -> Mapping[FragmentId, SyncerFragment]: ...

    @property
    def links(self) -> Container[tuple[LearnerId, Incarnation, int]]: ...

    def tell(self, event: MessageArrived, payload: Payload | None = None) -> None: ...


class Bulk:
    def __init__(self, syncer: Host) -> None:
        self.syncer = syncer
        self._buffers = ByteBuffers()
        self.arrivals = Arrivals(syncer.directory / "spool", self._buffers, syncer.gate)

    # ---------------------------------------------------------------------------------------------------- up

    async def contribution(self, request: web.Request) -> web.StreamResponse:
        """The contribution itself, or the word that its slices are all there."""
        found: list[Brought] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            envelope, numel, up = self._check_contribution(head, header)
            data = self._buffers.take(head.payload_bytes) if head.payload_bytes else None
            found.append(Brought(envelope, numel, up, data))
            return as_bytes(data) if data is not None else b""

        def give_back() -> None:
            frames.give_back()
            while found:
                data = found.pop().data
                if data is not None:
                    self._buffers.give(data)

        frames = Frames(request, self.syncer.gate)
        is_taken = False
        try:
            await frames.next(Kind.CONTRIBUTION, accept)
            await frames.end()
            brought = found[0]
            if brought.data is None:
                return await self._put_together(brought)
            is_taken = await self._take(brought, brought.data, give_back)
            return web.Response(status=204)
        finally:
            if not is_taken:
                give_back()

    async def _put_together(self, brought: Brought) -> web.StreamResponse:
        body = brought.envelope.body
        assert isinstance(body, Contribution)
        key = ArrivalKey(brought.envelope.learner, brought.envelope.incarnation, body.round)
        size = brought.up.size(brought.numel)
        arrival = self.arrivals.take(key, size)
        if arrival is None:
            return web.json_response({"missing": self.arrivals.missing(key, size)}, status=202)
        is_taken = False
        try:
            is_taken = await self._take(brought, arrival.data, lambda: self.arrivals.give_back(arrival))
            return web.Response(status=204)
        finally:
            if not is_taken:
                self.arrivals.give_back(arrival)

    async def _take(self, brought: Brought, data: Tensor, give_back: Callable[[], None]) -> bool:
        """Values are checked before the core hears of them: a bad one must be refused with its reason."""
        syncer, envelope = self.syncer, brought.envelope
        assert isinstance(envelope.body, Contribution)
        p = envelope.body.round.fragment
        usual = syncer.fragments[p].usual
        problem, norm = await computed(data.numel(), usual.examine, brought.up, data, brought.numel)
        syncer.bytes_up += data.numel()
        if problem is None:
            problem = usual.problem(usual.size_of(norm, envelope.body.steps))
        else:
            assert syncer.plan is not None
            named = await computed(data.numel(), unfit_in_fragment, syncer.plan, p, brought.up, data)
            problem = f"not finite: {named}"
        envelope = replace(envelope, body=replace(envelope.body, problem=problem))
        payload = Payload(data, brought.up.name, norm, give_back)
        syncer.tell(MessageArrived(envelope), payload)
        return payload.is_taken

    def _check_contribution(self, head: FrameHead, header: bytes) -> tuple[Envelope, int, Codec]:
        envelope = decode_message(header, "learner")
        body = envelope.body
        if type(body) is not Contribution:
            raise WireError(f"a contribution was due, found {type(body).__name__}", "type")
        self.check_link(envelope.learner, envelope.incarnation, envelope.session)
        numel, allowed = self._traits_of(body.round.fragment)
        ups = {CODEC_NUMBERS[up]: up for up in allowed}
        if head.codec not in ups:
            raise WireError(f"codec {head.codec}, the run's contributions are {' or '.join(allowed)}", "codec")
        up = codec(ups[head.codec])
        size = up.size(numel)
        if head.payload_bytes not in (0, size):
            raise WireError(f"{head.payload_bytes} bytes, fragment {body.round.fragment} has {size}", "size")
        if body.problem is not None or not 0 <= body.trained <= MOST_TOKENS:
            raise WireError("a learner does not say this of its own contribution", "type")
        return envelope, numel, up

    def _traits_of(self, p: int) -> tuple[int, tuple[str, ...]]:
        """Return the size of a fragment and the codecs of contributions to it."""
        plan = self.syncer.plan
        if plan is None or not 0 <= p < len(plan.fragments):
            raise WireError(f"there is no fragment {p}", "type")
        return plan.numel(p), plan.codecs(p, self.syncer.settings.numerics.ups)

    def check_link(self, learner: int, incarnation: int, session: int) -> None:
        check_speaker(learner)
        if (learner, incarnation, session) not in self.syncer.links:
            raise NoLinkError

    async def slice(self, request: web.Request) -> web.StreamResponse:
        claims: list[Claim | None] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            said = SliceHeader.decode(header)
            self.check_link(said.learner, said.incarnation, said.session)
            numel, allowed = self._traits_of(said.round.fragment)
            sizes = [codec(up).size(numel) for up in allowed]
            end = said.begin + head.payload_bytes
            if said.of not in sizes or not said.begin < end <= said.of:
                has = " or ".join(map(str, sizes))
                raise WireError(f"bytes {said.begin} to {end} of {said.of}, the fragment has {has}", "size")
            key = ArrivalKey(said.learner, said.incarnation, said.round)
            claim = self.arrivals.claim(key, said.begin, end, said.of)
            claims.append(claim)
            return claim.memory if claim is not None else bytearray(head.payload_bytes)

        try:
            frames = Frames(request)
            await frames.next(Kind.SLICE, accept, lambda: not claims or claims[0] is None or claims[0].is_wanted)
            await frames.end()
            if claims[0] is not None:
                self.arrivals.arrived(claims[0])
            return web.Response(status=204)
        except ConnectionError:
            raise
        except OSError as error:
            self.syncer.log.warning("a contribution cannot be put together: %s", error)
            return error_response(507, f"the syncer has no room for it: {error.strerror}")
        finally:
            if claims and claims[0] is not None:
                self.arrivals.give_up(claims[0])

    # ---------------------------------------------------------------------------------------------------- down

    async def fragment(self, request: web.Request) -> web.StreamResponse:
        syncer = self.syncer
        p, version = numbers(request, "fragment", "version")
        held, wanted = syncer.fragments.get(p), request.query.get("base", "whole")
        if held is None:
            return error_response(404, "there is no such fragment")
        served = held.hold(version)
        if served is None:
            return error_response(410, f"version {version} is not served any more, the newest is {held.served.version}")
        try:
            if served.update is not None and wanted == str(served.base):
                payload, base, number = served.update, served.base, CODEC_NUMBERS[served.codec]
            else:
                payload, base, number = served.value, None, CODEC_NUMBERS["f32"]
            whole = as_bytes(payload)
            begin, end = _place(request, whole.nbytes)
            view = whole[begin:end]
            start = held.frame_heads.get((served.version, base, begin, end))
            if start is None:
                header = FragmentHeader(held.id, served.version, base, served.value_digest, begin, whole.nbytes)
                encoded = header.encode()
                head = await computed(view.nbytes, frame_head, Kind.FRAGMENT, number, encoded, view)
                start = head + encoded
                if view.nbytes == whole.nbytes:  # all learners fetch the same bytes: the digest is computed once
                    held.frame_heads[served.version, base, begin, end] = start
            sent = await _stream(request, start, view)
            syncer.bytes_down += view.nbytes
            return sent
        finally:
            held.release(version)


class StandStill:
    """`TimeoutError` in the block when `moved` has not changed for `limit_s`, at the latest after twice as long.

    An `asyncio.timeout` around each piece would say it to the second, and cost a tenth of what the piece itself does.
    """

    def __init__(self, limit_s: float) -> None:
        self.moved = 0  # counted up by whoever moves something
        self._limit_s = limit_s
        self._seen = 0
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> StandStill:
        await self._timeout.__aenter__()
        self.go_on()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        await self._timeout.__aexit__(kind, error, trace)  # makes a TimeoutError of its own cancellation

    def pause(self) -> None:
        """What now takes its time is not the other side's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def go_on(self) -> None:
        self._seen = self.moved
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)

    def _look(self) -> None:
        if self.moved == self._seen:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self.go_on()


class Frames:
    """The frames of one request's body. A body that stands still for too long is given up.

    With a gate, the bytes of a payload are asked for there before more than its first piece is read.
    """

    def __init__(self, request: web.Request, gate: MemoryGate | None = None) -> None:
        self._chunks: AsyncIterator[bytes] = request.content.iter_any()
        self._rest = b""
        self._gate = gate
        self._taken = 0

    async def _more(self) -> bytes | None:
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        return await anext(self._chunks, None)

    async def next(
        self, kind: Kind, accept: Callable[[FrameHead, bytes], Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> Frame:
        """`is_wanted` is asked before every write into the memory that `accept` gave."""
        wanted = 0

        def noting(head: FrameHead, header: bytes) -> Any:
            nonlocal wanted
            memory = accept(head, header)
            wanted = head.payload_bytes
            return memory

        parser = FrameParser(kind, noting, several=True)
        async with StandStill(SILENT_S) as still:
            while not parser.done:
                chunk = await self._more()
                if chunk is None:
                    break
                if not is_wanted():
                    raise NoLinkError
                parser.feed(chunk)
                still.moved += 1
                if wanted and self._gate is not None and not self._taken:
                    still.pause()
                    await self._gate.take(wanted)
                    still.go_on()
                    self._taken = wanted
        frame = parser.finish()
        self._rest = parser.rest
        return frame

    def give_back(self) -> None:
        if self._gate is not None:
            self._gate.give(self._taken)
            self._taken = 0

    async def end(self) -> None:
        async with asyncio.timeout(SILENT_S):
            if await self._more() is not None:
                raise WireError("more bytes than frames", "trailing")


def _place(request: web.Request, size: int) -> tuple[int, int]:
    """From where to where; everything unless the request says otherwise."""
    found = []
    for name, usual in (("begin", 0), ("end", size)):
        text = request.query.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
            raise WireError(f"{name} is a whole number, found {text[:40]!r}", "type")
        found.append(min(int(text), size) if text is not None else usual)
    begin, end = found
    if begin >= end:
        raise WireError(f"bytes {begin} to {end} of {size}: there are none", "size")
    return begin, end


def error_response(status: int, sentence: str, code: str = "") -> web.Response:
    text = json.dumps({"error": sentence} | ({"code": code} if code else {}))
    return web.Response(status=status, text=text, content_type="application/json")


def numbers(request: web.Request, one: str, other: str) -> tuple[int, int]:
    """Two numbers of the path. Longer ones than any that was ever given out are nothing that is here."""
    texts = request.match_info[one], request.match_info[other]
    if max(map(len, texts)) > MOST_DIGITS:
        raise web.HTTPNotFound
    return int(texts[0]), int(texts[1])


async def computed(size: int, pass_over: Callable[..., T], *args: Any) -> T:
    """In another thread, unless there are few bytes to pass over."""
    if size <= SMALL_BYTES:
        return pass_over(*args)
    return await asyncio.get_running_loop().run_in_executor(None, pass_over, *args)


async def _stream(request: web.Request, start: bytes, payload: memoryview) -> web.StreamResponse:
    """In pieces, so that a slow reader costs nothing but its own time; one that does not read at all is cut off."""
    if payload.nbytes <= SMALL_BYTES:
        return web.Response(body=start + bytes(payload), content_type="application/octet-stream")
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = len(start) + payload.nbytes
    try:
        async with StandStill(SILENT_S) as still:
            await response.prepare(request)
            await response.write(start)
            for begin in range(0, payload.nbytes, CHUNK_BYTES):
                await response.write(payload[begin : begin + CHUNK_BYTES])
                still.moved += 1
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
    return response
