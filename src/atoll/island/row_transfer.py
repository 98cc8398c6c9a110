"""Fragments of an island whose ranks send and fetch their own rows.

`RankRowTransfer` is what every rank does: it brings the bytes of its strips to the syncer in slices, and fetches those that
hold its rows. `RowTransferCoordinator` is the leader's: it asks all ranks for that, says the words for which the syncer waits, and
has a version checked when everybody has its rows. Bytes, digests and retries are those of the wire: the syncer does not
know how many processes an island has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from msgspec.structs import astuple

from atoll.core.protocol import Contribution, Envelope
from atoll.core.types import FragmentId, RoundId, Version
from atoll.errors import IslandBrokenError
from atoll.island.fragments import Buffer, CopyUnavailableError, PulledCopy, RowFragment
from atoll.island.rank_rpc import RankRpcClient
from atoll.tensors.codecs import CODECS
from atoll.tensors.row_sharding import ByteLayout, EncodeRange, RowRange, covering_ranges, make_byte_layout
from atoll.transport.buffers import BufferPool, Spans
from atoll.transport.http_client import (
    MAX_ATTEMPTS,
    RETRY_DELAY_S,
    FragmentClient,
    FragmentDownload,
    LearnerLink,
    SyncerRefusedError,
    fragment_sizes,
)
from atoll.transport.wire import (
    CODEC_NUMBERS,
    FragmentHeader,
    FrameHead,
    FrameKind,
    SliceHeader,
    WireError,
    as_bytes,
    encode_message,
)

if TYPE_CHECKING:
    from atoll.island.leader import Leader

RANK_UNREACHABLE_TIMEOUT_S = 120.0
"""For so long a rank has brought and got nothing, while rank 0 has: it has lost its own way to the syncer."""

MAX_CONCURRENT_PARTS = 8
"""Parts of one slice that travel at once: rows are cut as tensors are, and a part may be small."""


class SendRowsRequest(NamedTuple):
    """What a rank has to know to bring its strips. `address`: where the fragment is; `missing`: bytes of the whole."""

    fragment: FragmentId
    generation: int
    serial: int
    learner: int
    incarnation: int
    session: int
    round: tuple[int, ...]
    size: int
    address: str
    missing: list[list[int]]


class FetchRowsRequest(NamedTuple):
    """What it has to know to fetch its rows."""

    fragment: FragmentId
    generation: int  # of incarnations
    version: Version
    base: Version | None
    downs: tuple[str, ...]
    address: str


class RowFetching(FragmentDownload):
    """What is here of this rank's rows. The first slice is one byte: its header says in what the rows are."""

    def __init__(self, version: Version, base: Version | None, numel: int, stretches: Sequence[RowRange]) -> None:
        super().__init__(version, base)
        self._numel = numel
        self._ranges = stretches
        self.strips: list[EncodeRange] = []
        self.layout = ByteLayout(0, (), ())

    def memory(self, head: FrameHead, said: FragmentHeader, buffers: BufferPool) -> Any:
        if self.header is None:
            return bytearray(head.payload_bytes)
        if self.data is None:
            self.data = buffers.acquire(self.layout.size)
        ((own, end),) = self.layout.to_local(said.begin, said.begin + head.payload_bytes)
        return as_bytes(self.data)[own:end]

    def came(self, head: FrameHead, said: FragmentHeader) -> None:
        if self.header is None:
            by = CODECS[head.codec]
            self.header, self.codec = said, head.codec
            self.strips = covering_ranges(by, self._numel, self._ranges)
            self.layout = make_byte_layout(by, self._numel, self.strips)
            for part in self.layout.parts:
                self.missing.add(part.local_begin, part.local_begin + part.size)


class RankRowTransfer:
    """At one rank. `fragments`: those of an incarnation, which this rank may yet have to hear of, so it may wait;
    `hold`: the rows of a version that is here."""

    def __init__(
        self,
        link: LearnerLink,
        bulk: FragmentClient,
        compute: ThreadPoolExecutor,
        fragments: Callable[[int], Sequence[RowFragment]],
        retain: Callable[[FragmentId, Version], Buffer | None],
    ) -> None:
        self.link = link
        self.bulk = bulk
        self.compute = compute
        self._fragments = fragments
        self._retain = retain
        self._fetching: dict[FragmentId, RowFetching] = {}
        self._under_way = 0

    async def handle(self, method: str, arguments: dict[str, Any]) -> Any:
        """As the leader asks another rank for it."""
        if not self._under_way:
            await self.link.renew_keys()  # no link is dialled here, at which that would be done
        self._under_way += 1
        try:
            if method == "send":
                return await self.send(SendRowsRequest(**arguments))
            return await self.fetch(FetchRowsRequest(**arguments))
        finally:
            self._under_way -= 1

    async def _fragment(self, p: FragmentId, generation: int) -> RowFragment:
        fragments = await asyncio.get_running_loop().run_in_executor(None, self._fragments, generation)
        return fragments[p]

    async def send(self, what: SendRowsRequest) -> dict[str, int]:
        """How many bytes it was."""
        fragment = await self._fragment(what.fragment, what.generation)
        strips = await asyncio.shield(asyncio.wrap_future(fragment.strips(what.serial)))
        laid, data = strips
        view, round_id = as_bytes(data), RoundId(*what.round)
        missing = Spans()
        for begin, end in what.missing:
            for own in laid.to_local(begin, end):
                missing.add(*own)

        async def put(begin: int, own: int, size: int) -> None:
            header = SliceHeader(what.learner, what.incarnation, what.session, round_id, begin, what.size)
            await self.bulk.put_frame(
                "/v1/slice", FrameKind.SLICE, 0, header.encode(), view[own : own + size], what.address
            )

        async def move(begin: int, end: int) -> None:
            await _run_limited([lambda part=part: put(*part) for part in laid.to_global(begin, end)])  # type: ignore[misc]

        moved = missing.bytes
        await self.bulk.up.transfer(missing, move)
        return {"moved": moved}

    async def fetch(self, what: FetchRowsRequest) -> dict[str, Any]:
        """Its rows are in the fragment when this returns; the digest is that of the whole value."""
        fragment = await self._fragment(what.fragment, what.generation)
        digest = fragment.fetched_digest(what.version)
        return {"digest": digest, "moved": 0} if digest is not None else await self._fetch(fragment, what)

    async def _fetch(self, fragment: RowFragment, what: FetchRowsRequest) -> dict[str, Any]:
        p, asked = what.fragment, (what.version, what.base)
        under_way = self._fetching.get(p)
        if under_way is None or under_way.requested != asked or under_way.is_stale:
            under_way = self._fetching[p] = RowFetching(*asked, fragment.share.numel, fragment.ranges)
        under_way.address = what.address
        fetching = under_way
        sizes = fragment_sizes(fragment.share.numel, fragment.tensors.allowed_codecs(what.downs))

        async def get(begin: int, own: int, size: int) -> None:
            await self.bulk.download_slice(p, fetching, sizes, begin, begin + size)

        async def move(begin: int, end: int) -> None:
            parts = fetching.layout.to_global(begin, end)
            await _run_limited([lambda part=part: get(*part) for part in parts])  # type: ignore[misc]

        try:
            if under_way.header is None:
                await get(0, 0, 1)
            moved = under_way.missing.bytes
            await self.bulk.down.transfer(under_way.missing, move)
        except (SyncerRefusedError, WireError):
            self._fetching.pop(p, None)
            raise
        self._fetching.pop(p, None)
        return {"digest": await self._decode(fragment, fetching, what.version), "moved": moved}

    async def _decode(self, fragment: RowFragment, came: RowFetching, version: Version) -> str:
        header, data = came.header, came.data
        assert header is not None and data is not None
        base = self._retain(fragment.p, header.base) if header.base is not None else None
        if header.base is not None and base is None:
            raise WireError(f"an update to version {header.base}, which is not here", "type")
        made = came.codec, came.strips, came.layout, data, base, version, header.value_digest
        decoding = self.compute.submit(fragment.decode, *made)
        decoding.add_done_callback(lambda _: fragment.buffers.release(base))
        await asyncio.wrap_future(decoding)
        self.bulk.release_buffer(data)
        return header.value_digest


async def _run_limited(jobs: list[Callable[[], Any]]) -> None:
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    tasks = [asyncio.ensure_future(work()) for _ in range(min(MAX_CONCURRENT_PARTS, len(jobs)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RowTransferCoordinator:
    """At the leader. `work`: its own rows."""

    def __init__(self, leader: Leader, rank_rpc: RankRpcClient, work: RankRowTransfer) -> None:
        self._leader = leader
        self._rank_rpc = rank_rpc
        self._work = work
        self._link, self._bulk, self._compute = work.link, work.bulk, work.compute
        self._started: dict[FragmentId, RoundId] = {}  # contributions of which the syncer may have a part
        self._lost_since: dict[int, float] = {}  # ranks whose transfers fail, and not rank 0's

    async def contribute(
        self, fragment: RowFragment, copied: PulledCopy, envelope: Envelope, body: Contribution, resources: ExitStack
    ) -> None:
        """All ranks encode and bring their strips; the word that says so is the leader's. `held`: what is let go when
        they are encoded."""
        encoding = self._compute.submit(self._encode, fragment, copied)
        encoding.add_done_callback(lambda _: resources.close())
        await asyncio.wrap_future(encoding)
        number, header = CODEC_NUMBERS[copied.codec.name], encode_message(envelope)
        of = copied.codec.encoded_size(fragment.share.numel)
        about = fragment.p, self._leader.generation, copied.serial
        said = (*about, envelope.learner, envelope.incarnation, envelope.session)
        missing = Spans([(0, of)]) if self._started.get(fragment.p) != body.round else None
        self._started[fragment.p] = body.round
        for attempt in range(MAX_ATTEMPTS):
            try:
                at = await self._shard_address(fragment.p)
                if missing is None:  # some of it may be there
                    missing = await self._bulk.commit_contribution(number, header, at)
                if missing:
                    spans = [list(span) for span in missing]
                    sending = SendRowsRequest(*said, astuple(body.round), of, at, spans)
                    with self._bulk.measure("up", lambda: of):
                        await self._call_ranks(fragment, "send", sending._asdict(), self._work.send(sending), "up")
                    missing = await self._bulk.commit_contribution(number, header, at)
                if not missing:
                    return
            except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError) as wrong:
                is_damaged = isinstance(wrong, SyncerRefusedError) and wrong.code == "digest"
                if (isinstance(wrong, SyncerRefusedError) and not is_damaged) or attempt == MAX_ATTEMPTS - 1:
                    raise
                missing = None
                self._bulk.forget_shard_addresses()
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        raise ConnectionError(f"{missing.bytes if missing else 0} bytes of it are missing")

    async def fetch(
        self, fragment: RowFragment, version: Version, base: Version | None, downs: tuple[str, ...]
    ) -> tuple[Buffer | None]:
        """The leader's rows, when every rank has its own; None: together they are not what was published."""
        getting = FetchRowsRequest(
            fragment.p, self._leader.generation, version, base, downs, await self._shard_address(fragment.p)
        )
        try:
            answers: list[Any] = []
            with self._bulk.measure("down", lambda: sum(answer["moved"] for answer in answers)):
                answers += await self._call_ranks(
                    fragment, "fetch", getting._asdict(), self._work.fetch(getting), "down"
                )
        except (aiohttp.ClientError, OSError):
            self._bulk.forget_shard_addresses()  # a shard may be somewhere else by now
            raise
        digests = {answer["digest"] for answer in answers}
        if len(digests) != 1:
            raise WireError(f"ranks were told of different values: {sorted(digests)}", "digest")
        passing = self._compute.submit(self._relay_version, fragment, version, digests.pop())
        try:
            return (await asyncio.shield(asyncio.wrap_future(passing)),)
        except asyncio.CancelledError:
            passing.add_done_callback(
                lambda done: fragment.buffers.release(done.result()) if not done.exception() else None
            )
            raise

    def _encode(self, fragment: RowFragment, copied: PulledCopy) -> None:
        """In the computing thread: all ranks encode their strips, this one too."""
        if fragment.is_encoded(copied.serial):
            return
        try:
            prepared = fragment.prepare_copy(copied)
            taken = self._leader.exchange_edges(fragment.p, copied.serial, prepared.outgoing, copied.codec)
            fragment.encode_strips(prepared, taken, copied.codec)
        except BaseException as error:
            fragment.abort_encoding(copied.serial, error)
            if isinstance(error, CancelledError):  # the training thread never made the copy
                raise CopyUnavailableError from None
            raise

    def _relay_version(self, fragment: RowFragment, version: Version, digest: str) -> Buffer | None:
        """In the computing thread: every rank has its rows of the version when this returns, or none of them has."""
        value = fragment.pop_fetched(version)
        if value is None:
            return None
        is_right = False
        try:
            is_right = self._leader.relay_version(fragment.p, version, value.tensor, digest)
        finally:
            if not is_right:
                fragment.buffers.release(value)
        return value if is_right else None

    async def _shard_address(self, p: FragmentId) -> str:
        return await self._bulk.shard_address(p) or self._link.current_address

    async def _call_ranks(
        self, fragment: RowFragment, word: str, what: dict[str, Any], own: Any, way: str
    ) -> list[Any]:
        """Of the ranks that have something to do. What they have moved counts for the island."""
        ranks = {stretch.rank for stretch in fragment.share.row_ranges}
        if word == "send":
            ranks = {rank for rank, strips in enumerate(fragment.share.encode_ranges) if strips}
        asked = [asyncio.ensure_future(self._rank_rpc.call(rank, word, what)) for rank in sorted(ranks) if rank]
        mine = [asyncio.ensure_future(own)] if 0 in ranks else []
        if not mine:
            own.close()
        try:
            # All come to their end: what one of them has to bring again is no reason for the others to begin anew.
            ended = await asyncio.gather(*mine, *asked, return_exceptions=True)
        finally:
            for each in (*mine, *asked):
                each.cancel()
        if mine and not isinstance(ended[0], BaseException):
            self._check_reachability(dict(zip((rank for rank in sorted(ranks) if rank), ended[1:], strict=True)))
        found: list[Any] = []
        for each in ended:
            if isinstance(each, BaseException):
                raise each
            found.append(each)
        theirs = found[len(mine) :]
        moved = sum(answer["moved"] for answer in theirs)
        if way == "up":
            self._bulk.up.moved_bytes_by_other_ranks += moved
            self._link.bytes_up += moved
        else:
            self._bulk.down.moved_bytes_by_other_ranks += moved
            self._link.bytes_down += moved
        return found

    def _check_reachability(self, theirs: dict[int, Any]) -> None:
        """Rank 0 has done its own. An island of which one rank never can would train on, and take part in nothing."""
        now = time.monotonic()
        for rank, ended in theirs.items():
            if not isinstance(ended, ConnectionError):
                self._lost_since.pop(rank, None)
            elif now - self._lost_since.setdefault(rank, now) > RANK_UNREACHABLE_TIMEOUT_S:
                raise IslandBrokenError(
                    f"{ended}; it has not reached the syncer for {RANK_UNREACHABLE_TIMEOUT_S:.0f} s, and rank 0 has: start the island"
                    " again, and rank 0 will send and fetch for it"
                )
