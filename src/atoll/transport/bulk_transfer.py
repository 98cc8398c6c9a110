"""Values between a learner and its syncer: paced, in slices where they are large, and on from where they broke off.

Whatever was fetched of a fragment is kept while its version is wanted, also over another link; what arrived of a
contribution is kept by the syncer, which says what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import aiohttp
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope, LearnerEvent
from atoll.core.types import FragmentId, RoundId, Version
from atoll.tensors.codecs import codec
from atoll.tensors.settings import Numerics
from atoll.transport.buffers import SMALL_BYTES, ByteBuffers, Spans, StreamingBuffer
from atoll.transport.endpoint import address
from atoll.transport.http_client import LearnerLink, Refusal
from atoll.transport.pacing import DEFAULT_STREAMS, FIRST_SLICE, Direction, LinkMeter
from atoll.transport.wire import (
    CODEC_NUMBERS,
    FragmentHeader,
    FrameHead,
    FrameParser,
    Kind,
    SliceHeader,
    WireError,
    as_bytes,
    encode_message,
    frame_head,
)

WHOLE_BYTES = FIRST_SLICE
"""What is not larger travels in one request."""

TRIES = 3
RETRY_S = 0.5


class FetchedFragment(NamedTuple):
    """A fragment's bytes as they came. `base` None: the whole value."""

    header: FragmentHeader
    codec: int
    data: Tensor


class Fetching:
    """What is here of one version of one fragment."""

    def __init__(self, version: Version, base: Version | None) -> None:
        self.asked = (version, base)
        self.header: FragmentHeader | None = None  # of the first slice
        self.codec = 0
        self.data: Tensor | None = None
        self.missing = Spans()
        self.arrived = Spans()
        self.place: str | None = None
        self.is_stale = False  # other bytes are served by now

    def size(self) -> int:
        return self.header.of if self.header is not None else 0

    def memory(self, head: FrameHead, said: FragmentHeader, buffers: ByteBuffers) -> Any:
        """For the bytes of one slice, which is what was asked for."""
        if self.data is None:
            self.data = buffers.take(said.of)
            self.codec = head.codec
        return as_bytes(self.data)[said.begin : said.begin + head.payload_bytes]

    def came(self, head: FrameHead, said: FragmentHeader) -> None:
        """One slice is here, and sound."""
        if self.header is None:
            self.header = said
            self.missing.add(head.payload_bytes, said.of)
        self.arrived.add(said.begin, said.begin + head.payload_bytes)

    def fetched(self) -> FetchedFragment:
        assert self.header is not None and self.data is not None
        return FetchedFragment(self.header, self.codec, self.data)


class LearnerBulk:
    def __init__(self, link: LearnerLink, bytes_per_s: float | None, streams: int = DEFAULT_STREAMS) -> None:
        self._link = link
        self._buffers = ByteBuffers()
        self._fetching: dict[FragmentId, Fetching] = {}
        self._begun: dict[FragmentId, RoundId] = {}  # contributions of which the syncer may have a part
        self.shards = 0  # of the run; 0: the syncer has all fragments
        self._places: list[str | None] = []  # of the shards, as the syncer told last
        self.up = Direction(bytes_per_s, "up", streams)
        self.down = Direction(bytes_per_s, "down", streams)
        self._meters: dict[str, LinkMeter] = {}  # of the ways whose codec is not named

    def tell_of(self, tell: Callable[[LearnerEvent], None], numerics: Numerics, largest: int) -> None:
        """What is measured here is told from now on. `largest`: values of the largest fragment."""
        self._meters = {}
        for direction, wish in ((self.up, numerics.up), (self.down, numerics.down)):
            if wish == "auto":
                self._meters[direction.way] = LinkMeter(direction, largest, tell)

    def share_rate(self, ranks: int) -> None:
        """So many processes send and fetch over what was given to one."""
        for pace in (self.up.pace, self.down.pace):
            if pace.bytes_per_s is not None:
                pace.bytes_per_s /= ranks

    def measured(self, way: str, size: Callable[[], int]) -> AbstractContextManager[None]:
        meter = self._meters.get(way)
        return meter.transfer(size) if meter is not None else nullcontext()

    async def place(self, fragment: FragmentId) -> str | None:
        """Where the fragment is; None: at the syncer."""
        if not self.shards:
            return None
        if not self._places:
            told = await self._link.ask("GET", "/v1/shards")
            places = told.get("shards") if isinstance(told, dict) else None
            if not isinstance(places, list) or len(places) != self.shards:
                raise WireError("where the shards are cannot be read", "type")
            self._places = [address(each) if isinstance(each, str) else None for each in places]
        found = self._places[fragment % self.shards]
        if found is None:
            self._places = []
            raise ConnectionError(f"shard {fragment % self.shards}, which has it, is away")
        return found

    # ---------------------------------------------------------------------------------------------------- down

    async def fetch(
        self,
        fragment: FragmentId,
        version: Version,
        base: Version | None,
        sizes: dict[int, int],
        on_bytes: Callable[[FetchedFragment, int], None] = lambda fetched, first_bytes: None,
    ) -> FetchedFragment:
        """`sizes`: what an update may have, by the number of its codec; under -1 what a whole value has. `on_bytes`
        hears how many bytes are here, counted from the first to the first that is missing."""
        under_way = self._fetching.get(fragment)
        if under_way is None or under_way.asked != (version, base):
            under_way = self._fetching[fragment] = Fetching(version, base)
        try:
            under_way.place = await self.place(fragment)

            async def move(begin: int, end: int) -> None:
                await self.fetch_slice(fragment, under_way, sizes, begin, end)
                on_bytes(under_way.fetched(), under_way.arrived.first())

            with self.measured("down", under_way.size):
                if under_way.header is None:
                    await move(0, WHOLE_BYTES)
                if under_way.missing:
                    await self.down.carry(under_way.missing, move)
        except (Refusal, WireError):
            self._fetching.pop(fragment, None)
            raise
        except (aiohttp.ClientError, OSError):
            self._places = []  # a shard may be somewhere else by now
            raise
        self._fetching.pop(fragment, None)
        return under_way.fetched()

    async def fetch_slice(
        self, fragment: FragmentId, under_way: Fetching, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        """Bytes that are damaged on their way are asked for once more."""
        try:
            await self._fetch_slice_once(fragment, under_way, sizes, begin, end)
        except WireError as wrong:
            if wrong.code != "digest":
                raise
            self._link.log.info("bytes %d to %d of fragment %d came damaged: %s", begin, end, fragment, wrong)
            await self._fetch_slice_once(fragment, under_way, sizes, begin, end)

    async def _fetch_slice_once(
        self, fragment: FragmentId, under_way: Fetching, sizes: dict[int, int], begin: int, end: int
    ) -> None:
        version, base = under_way.asked

        def accept(head: FrameHead, header: bytes) -> Any:
            said = FragmentHeader.decode(header)
            if (said.fragment, said.version, said.begin) != (fragment, version, begin) or said.base not in (None, base):
                raise WireError(f"fragment {said.fragment} at version {said.version} was not asked for", "type")
            self._check_same(fragment, under_way, head, said)
            whole = said.base is None and head.codec == CODEC_NUMBERS["f32"]
            if said.of != sizes.get(-1 if whole else head.codec) or whole != (said.base is None):
                raise WireError(f"fragment {fragment} in {said.of} bytes of codec {head.codec}", "size")
            if head.payload_bytes != min(end, said.of) - begin:
                raise WireError(f"{head.payload_bytes} bytes where {begin} to {end} were asked for", "size")
            return under_way.memory(head, said, self._buffers)

        parser = FrameParser(Kind.FRAGMENT, accept)
        asked = {"base": "whole" if base is None else str(base), "begin": str(begin), "end": str(end)}
        async with self._link.get(f"/v1/fragment/{fragment}/{version}", asked, under_way.place) as answer:
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
                self._link.bytes_down += len(chunk)
                self.down.moved += len(chunk)
                await self.down.pace.take(len(chunk))
        frame = parser.finish()
        under_way.came(frame.head, FragmentHeader.decode(frame.header))

    def _check_same(self, fragment: FragmentId, under_way: Fetching, head: FrameHead, said: FragmentHeader) -> None:
        """A syncer that has started again serves the value where it served an update."""
        first = under_way.header
        if first is not None and (head.codec, said) != (under_way.codec, first._replace(begin=said.begin)):
            self._fetching.pop(fragment, None)
            under_way.is_stale = True
            raise ConnectionError("the syncer serves other bytes of this version now")

    def give_back(self, fetched: FetchedFragment) -> None:
        """Its bytes were decoded; their memory is used again."""
        self._buffers.give(fetched.data)

    def give_back_bytes(self, data: Tensor) -> None:
        self._buffers.give(data)

    def forget_places(self) -> None:
        """A shard may be somewhere else by now."""
        self._places = []

    # ---------------------------------------------------------------------------------------------------- up

    async def contribute(self, codec: int, envelope: Envelope, growing: StreamingBuffer) -> None:
        """Its bytes may still be written: what is large is sent while they are."""
        body = envelope.body
        assert isinstance(body, Contribution)
        header = encode_message(envelope)
        place = await self.place(body.round.fragment)
        try:
            if growing.size <= WHOLE_BYTES:
                view = as_bytes(await growing.whole())
                with self.measured("up", lambda: view.nbytes):
                    await self.put("/v1/contribution", Kind.CONTRIBUTION, codec, header, view, place)
            else:
                with self.measured("up", lambda: growing.size):
                    await self._contribute_slices(codec, envelope, body, header, growing, place)
        except (aiohttp.ClientError, OSError):
            self._places = []
            raise

    async def _contribute_slices(
        self,
        codec: int,
        envelope: Envelope,
        body: Contribution,
        header: bytes,
        growing: StreamingBuffer,
        place: str | None,
    ) -> None:
        is_new = self._begun.get(body.round.fragment) != body.round
        self._begun[body.round.fragment] = body.round

        async def move(begin: int, end: int) -> None:
            assert growing.data is not None
            await self._put_slice(envelope, as_bytes(growing.data), begin, end, place)

        for attempt in range(TRIES):
            try:
                if is_new and attempt == 0:
                    await self.up.carry(growing.missing, move, growing)
                else:
                    await growing.whole()
                    missing = await self.say_contributed(codec, header, place)
                    if not missing:
                        return
                    await self.up.carry(missing, move)
            except (Refusal, aiohttp.ClientError, OSError, TimeoutError) as wrong:
                is_damaged = isinstance(wrong, Refusal) and wrong.code == "digest"
                if (isinstance(wrong, Refusal) and not is_damaged) or attempt == TRIES - 1:
                    raise
                await asyncio.sleep(RETRY_S * 2**attempt)
        missing = await self.say_contributed(codec, header, place)
        if missing:
            raise ConnectionError(f"{missing.bytes} bytes of it are missing")

    async def say_contributed(self, codec: int, header: bytes, place: str | None) -> Spans:
        """That all of it is there. What the syncer misses; nothing: it has the contribution."""
        whole = frame_head(Kind.CONTRIBUTION, codec, header, b"") + header
        told = await self._link.ask("PUT", "/v1/contribution", place, data=whole)
        try:
            return Spans((int(begin), int(end)) for begin, end in told["missing"]) if told is not None else Spans()
        except (KeyError, TypeError, ValueError):
            raise WireError("what the syncer misses cannot be read", "type") from None

    async def _put_slice(self, envelope: Envelope, view: memoryview, begin: int, end: int, place: str | None) -> None:
        body = envelope.body
        assert isinstance(body, Contribution)
        learner, incarnation, session = envelope.learner, envelope.incarnation, envelope.session
        header = SliceHeader(learner, incarnation, session, body.round, begin, view.nbytes)
        await self.put("/v1/slice", Kind.SLICE, 0, header.encode(), view[begin:end], place)

    async def put(
        self, path: str, kind: Kind, codec: int, header: bytes, view: memoryview, place: str | None = None
    ) -> None:
        """One frame."""
        if view.nbytes <= SMALL_BYTES:
            whole = frame_head(kind, codec, header, view) + header + bytes(view)
            await self.up.pace.take(len(whole))
            await self._link.ask("PUT", path, place, data=whole)
            self._link.bytes_up += len(whole)
            return
        head = await asyncio.get_running_loop().run_in_executor(None, frame_head, kind, codec, header, view)
        pace = self.up.pace

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield head + header
            for begin in range(0, view.nbytes, pace.piece_bytes):
                piece = view[begin : begin + pace.piece_bytes]
                await pace.take(piece.nbytes)
                self.up.moved += piece.nbytes
                yield piece

        size = len(head) + len(header) + view.nbytes
        await self._link.ask("PUT", path, place, data=body(), headers={"Content-Length": str(size)})
        self._link.bytes_up += size


def fragment_sizes(numel: int, downs: tuple[str, ...]) -> dict[int, int]:
    """What an update of a fragment may have, by the number of its codec; under -1 what a whole value has."""
    return {CODEC_NUMBERS[down]: codec(down).size(numel) for down in downs} | {-1: 4 * numel}
