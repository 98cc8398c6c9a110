"""The HTTP endpoints of values, at a syncer and at a shard: who may use them, contributions up, fragments down.

A large contribution comes in slices (`PUT /v1/slice`, several at once, in any order), and then in a word that says what
it is and that all of it is there (`PUT /v1/contribution` without a payload). Where a connection is lost, the same word
is answered with what is missing. A fragment is served from any byte to any other.

A contribution is put together in memory while the gate has room for it, and in a file without a name otherwise: a
learner on a thin link takes minutes for what others send in seconds, and neither waits for the other. A learner has at
most one of each fragment here: while it leaves, and at the end of a run, it is asked for all of them at once. What
nobody goes on with is forgotten after a while.
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
from atoll.core.types import MOST_TOKENS, Incarnation, LearnerId, RoundId
from atoll.syncer.fragment_executor import FragmentHost, Payload
from atoll.tensors.codecs import Codec, codec
from atoll.tensors.robust_merge import unfit_in_fragment
from atoll.transport.auth import HEADER, IdentityMismatchError, Rejection, check_speaker, log_key
from atoll.transport.buffers import CHUNK_BYTES, SMALL_BYTES, ByteBuffers, Span, Spans
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

IDLE_S = 120.0


class ArrivalKey(NamedTuple):
    learner: LearnerId
    incarnation: Incarnation
    round: RoundId


@dataclass(slots=True, eq=False)
class Claim:
    """One request that brings one slice. Whoever brings the same bytes later takes its place: the earlier one belongs
    to a connection that its sender has given up."""

    arrival: Arrival
    begin: int
    end: int
    is_wanted: bool = True

    @property
    def memory(self) -> memoryview:
        return as_bytes(self.arrival.data)[self.begin : self.end]


@dataclass(slots=True, eq=False)
class Arrival:
    data: Tensor
    held_bytes: int  # of the gate; 0: it is in a file
    missing: Spans
    claims: set[Claim] = field(default_factory=set)
    touched: float = field(default_factory=time.monotonic)


class Arrivals:
    def __init__(self, folder: Path, buffers: ByteBuffers, gate: MemoryGate) -> None:
        self._folder = folder
        self._buffers = buffers
        self._gate = gate
        self._begun: dict[ArrivalKey, Arrival] = {}  # the one that was begun first, first
        self._sweep: asyncio.TimerHandle | None = None

    def missing(self, key: ArrivalKey, size: int) -> list[Span]:
        arrival = self._of_size(key, size)
        return list(arrival.missing) if arrival is not None else [(0, size)]

    def claim(self, key: ArrivalKey, begin: int, end: int, size: int) -> Claim | None:
        """Memory for one slice; None if it is here already. Raises `OSError` where there is no room at all."""
        arrival = self._of_size(key, size)
        if arrival is None:
            arrival = self._begin(key, size)
        if not arrival.missing.holds(begin, end):
            return None
        for other in list(arrival.claims):
            if other.begin < end and begin < other.end:
                self.give_up(other)
        claim = Claim(arrival, begin, end)
        arrival.claims.add(claim)
        return claim

    def arrived(self, claim: Claim) -> None:
        """All its bytes are in and right."""
        claim.arrival.missing.remove(claim.begin, claim.end)
        self.give_up(claim)

    def give_up(self, claim: Claim) -> None:
        claim.is_wanted = False
        claim.arrival.claims.discard(claim)
        claim.arrival.touched = time.monotonic()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._forget_idle)

    def _of_size(self, key: ArrivalKey, size: int) -> Arrival | None:
        """A learner may choose the codec of a contribution, once: its slices are of one size, and so is the whole."""
        arrival = self._begun.get(key)
        if arrival is not None and arrival.data.numel() != size:
            begun = arrival.data.numel()
            raise WireError(f"{size} bytes of a contribution that was begun with {begun}", "size")
        return arrival

    def take(self, key: ArrivalKey, size: int) -> Arrival | None:
        """It is complete and belongs to whoever asks now, who has to `give_back`. None: it is not complete."""
        arrival = self._of_size(key, size)
        if arrival is None or arrival.missing:
            return None
        return self._begun.pop(key)

    def give_back(self, arrival: Arrival) -> None:
        if arrival.held_bytes:
            self._buffers.give(arrival.data)
            self._gate.give(arrival.held_bytes)
            arrival.held_bytes = 0

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for key in list(self._begun):
            self._forget(key)

    def _begin(self, key: ArrivalKey, size: int) -> Arrival:
        """A learner has one copy of a fragment: an older round of it, or of an older incarnation, never comes."""
        for old in [k for k in self._begun if k.learner == key.learner]:
            if old.round.fragment == key.round.fragment or old.incarnation != key.incarnation:
                self._forget(old)
        is_held = self._gate.take_now(size)
        data = self._buffers.take(size) if is_held else self._in_file(size)
        arrival = self._begun[key] = Arrival(data, size if is_held else 0, Spans([(0, size)]))
        return arrival

    def _in_file(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, and not by a signal later
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _forget(self, key: ArrivalKey) -> None:
        arrival = self._begun.pop(key)
        for claim in list(arrival.claims):
            self.give_up(claim)
        self.give_back(arrival)

    def _forget_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for key, arrival in list(self._begun.items()):
            if not arrival.claims and now - arrival.touched >= IDLE_S:
                self._forget(key)
        if self._begun:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._forget_idle)


# --------------------------------------------------------------------------------------------------------------------
# A bound on the bytes that are being received at once: what exceeds it waits in the network, not in memory


class MemoryGate:
    """First come, first served; a single piece larger than the bound passes when nothing else is held."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        if self.take_now(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # its turn came at the moment it was cancelled
            elif (size, turn) in self._waiting:
                self._waiting.remove((size, turn))
                self.give(0)  # whoever stood behind it may fit
            raise

    def take_now(self, size: int) -> bool:
        """Without waiting, where that can be."""
        free = not self._waiting and self._fits(size)
        if free:
            self.held_bytes += size
        return free

    def give(self, size: int) -> None:
        self.held_bytes -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():  # cancelled, and not yet gone from the queue
                self.held_bytes += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + size <= self.most_bytes


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


class Bulk:
    def __init__(self, syncer: FragmentHost) -> None:
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
            sent = await stream(request, start, view)
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
        parser = FrameParser(kind, accept, several=True)
        async with StandStill(SILENT_S) as still:
            while not parser.done:
                chunk = await self._more()
                if chunk is None:
                    break
                if not is_wanted():
                    raise NoLinkError
                parser.feed(chunk)
                still.moved += 1
                if parser.accepted_bytes and self._gate is not None and not self._taken:
                    still.pause()
                    await self._gate.take(parser.accepted_bytes)
                    still.go_on()
                    self._taken = parser.accepted_bytes
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


async def stream(request: web.Request, start: bytes, payload: memoryview) -> web.StreamResponse:
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


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard_of(host: FragmentHost) -> Any:
    """A middleware: whatever is wrong with a request closes that connection and is counted."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        turned = host.access.refusal(request)
        if turned is not None:
            answer = error_response(turned.status, turned.sentence)
            answer.headers[HEADER] = turned.sentence
            answer.force_close()  # another key is shown on another connection
            return answer
        host.on_proved(request.transport)
        try:
            return await handler(request)
        except WireError as error:
            turned = Rejection(error.code, 400, str(error))
            host.access.reject(turned, str(request.remote), f"{request.method} {request.path}", log_key(error.code))
            return error_response(400, str(error), error.code)
        except IdentityMismatchError as error:
            turned = Rejection(error.code, 403, str(error))
            host.access.reject(turned, str(request.remote), request.path, log_key(error.code))
            return error_response(403, str(error), error.code)
        except NoLinkError:
            return error_response(409, "the link that this belongs to is closed")
        except ConnectionError as error:
            host.log.info("%s %s from %s broke off: %s", request.method, request.path, request.remote, error)
            return error_response(400, "it broke off")  # nobody reads it
        except web.HTTPException:
            raise
        except TimeoutError:
            host.refused["silent"] += 1
            return error_response(408, f"nothing came for {SILENT_S:g} s")
        except Exception:
            host.log.exception("%s %s has failed", request.method, request.path)
            return error_response(500, "the syncer has failed on this request; its log says how")

    return guard
