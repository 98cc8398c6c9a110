"""Fragments of an island whose ranks transfer their own rows.

`RankRowTransfer` runs at every rank. It uploads the bytes of its strips to the syncer in slices, and downloads those
that contain its rows. `RowTransferCoordinator` runs at the leader. It sends requests to all ranks, commits the
contribution at the syncer, and verifies a version when every rank has its rows. Bytes, digests and retries are those of
the wire: the syncer does not know how many processes an island has.
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
from atoll.transport.buffers import ByteBufferPool, Spans
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
"""Time after which a rank has lost its route to the syncer: its transfers fail, and those of rank 0 succeed."""

MAX_CONCURRENT_PARTS = 8
"""Maximum number of concurrent parts of one slice. A part ends at the end of a tensor, so it may be small."""


class SendRowsRequest(NamedTuple):
    """Request to upload strips. `address`: endpoint of the fragment; `missing`: missing bytes of the whole."""

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
    """Request to download rows."""

    fragment: FragmentId
    generation: int  # number of the incarnation at the leader
    version: Version
    base: Version | None
    downs: tuple[str, ...]
    address: str


class RowDownload(FragmentDownload):
    """Download of this rank's rows. The first slice is one byte; its header contains the codec of the rows."""

    def __init__(self, version: Version, base: Version | None, numel: int, row_ranges: Sequence[RowRange]) -> None:
        super().__init__(version, base)
        self._numel = numel
        self._ranges = row_ranges
        self.strips: list[EncodeRange] = []
        self.layout = ByteLayout(0, (), ())

    def slice_buffer(self, head: FrameHead, fields: FragmentHeader, buffers: ByteBufferPool) -> Any:
        if self.header is None:
            return bytearray(head.payload_bytes)
        if self.data is None:
            self.data = buffers.acquire(self.layout.size)
        ((own, end),) = self.layout.to_local(fields.begin, fields.begin + head.payload_bytes)
        return as_bytes(self.data)[own:end]

    def add_slice(self, head: FrameHead, fields: FragmentHeader) -> None:
        if self.header is None:
            by = CODECS[head.codec]
            self.header, self.codec = fields, head.codec
            self.strips = covering_ranges(by, self._numel, self._ranges)
            self.layout = make_byte_layout(by, self._numel, self.strips)
            for part in self.layout.parts:
                self.missing.add(part.local_begin, part.local_begin + part.size)


class RankRowTransfer:
    """Row transfer at one rank.

    `fragments` returns those of an incarnation, and may wait for it to begin. `retain` returns the rows of a version.
    """

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
        self._fetching: dict[FragmentId, RowDownload] = {}
        self._active_requests = 0

    async def handle(self, method: str, arguments: dict[str, Any]) -> Any:
        """Handle a request of the leader."""
        if not self._active_requests:
            await self.link.renew_keys()  # other transfers do this when they open a connection
        self._active_requests += 1
        try:
            if method == "send":
                return await self.send(SendRowsRequest(**arguments))
            return await self.fetch(FetchRowsRequest(**arguments))
        finally:
            self._active_requests -= 1

    async def _fragment(self, p: FragmentId, generation: int) -> RowFragment:
        fragments = await asyncio.get_running_loop().run_in_executor(None, self._fragments, generation)
        return fragments[p]

    async def send(self, request: SendRowsRequest) -> dict[str, int]:
        """Upload the missing strips. Return the number of bytes."""
        fragment = await self._fragment(request.fragment, request.generation)
        strips = await asyncio.shield(asyncio.wrap_future(fragment.strips(request.serial)))
        layout, data = strips
        view, round_id = as_bytes(data), RoundId(*request.round)
        missing = Spans()
        for begin, end in request.missing:
            for own in layout.to_local(begin, end):
                missing.add(*own)

        async def put(begin: int, own: int, size: int) -> None:
            header = SliceHeader(request.learner, request.incarnation, request.session, round_id, begin, request.size)
            await self.bulk.put_frame(
                "/v1/slice", FrameKind.SLICE, 0, header.encode(), view[own : own + size], request.address
            )

        async def move(begin: int, end: int) -> None:
            await _run_limited([lambda part=part: put(*part) for part in layout.to_global(begin, end)])  # type: ignore[misc]

        moved = missing.bytes
        await self.bulk.up.transfer(missing, move)
        return {"moved": moved}

    async def fetch(self, request: FetchRowsRequest) -> dict[str, Any]:
        """Download this rank's rows into the fragment. The digest in the result is that of the whole value."""
        fragment = await self._fragment(request.fragment, request.generation)
        digest = fragment.fetched_digest(request.version)
        return {"digest": digest, "moved": 0} if digest is not None else await self._fetch(fragment, request)

    async def _fetch(self, fragment: RowFragment, request: FetchRowsRequest) -> dict[str, Any]:
        p, versions = request.fragment, (request.version, request.base)
        download = self._fetching.get(p)
        if download is None or download.requested != versions or download.is_stale:
            download = self._fetching[p] = RowDownload(*versions, fragment.share.numel, fragment.ranges)
        download.address = request.address
        fetching = download
        sizes = fragment_sizes(fragment.share.numel, fragment.tensors.allowed_codecs(request.downs))

        async def get(begin: int, own: int, size: int) -> None:
            await self.bulk.download_slice(p, fetching, sizes, begin, begin + size)

        async def move(begin: int, end: int) -> None:
            parts = fetching.layout.to_global(begin, end)
            await _run_limited([lambda part=part: get(*part) for part in parts])  # type: ignore[misc]

        try:
            if download.header is None:
                await get(0, 0, 1)
            moved = download.missing.bytes
            await self.bulk.down.transfer(download.missing, move)
        except (SyncerRefusedError, WireError):
            self._fetching.pop(p, None)
            raise
        self._fetching.pop(p, None)
        return {"digest": await self._decode(fragment, fetching, request.version), "moved": moved}

    async def _decode(self, fragment: RowFragment, download: RowDownload, version: Version) -> str:
        header, data = download.header, download.data
        assert header is not None and data is not None
        base = self._retain(fragment.p, header.base) if header.base is not None else None
        if header.base is not None and base is None:
            raise WireError(f"an update to version {header.base}, which this rank does not have", "type")
        arguments = download.codec, download.strips, download.layout, data, base, version, header.value_digest
        decoding = self.compute.submit(fragment.decode, *arguments)
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
    """Row transfer of all ranks, at the leader. `work`: the row transfer of the leader itself."""

    def __init__(self, leader: Leader, rank_rpc: RankRpcClient, work: RankRowTransfer) -> None:
        self._leader = leader
        self._rank_rpc = rank_rpc
        self._local_transfer = work
        self._link, self._bulk, self._compute = work.link, work.bulk, work.compute
        self._started: dict[FragmentId, RoundId] = {}  # contributions that the syncer may have in part
        self._lost_since: dict[int, float] = {}  # ranks whose transfers fail while those of rank 0 succeed

    async def contribute(
        self, fragment: RowFragment, copied: PulledCopy, envelope: Envelope, body: Contribution, resources: ExitStack
    ) -> None:
        """Let all ranks encode and upload their strips, and commit the contribution. Close `resources` once encoded."""
        encoding = self._compute.submit(self._encode, fragment, copied)
        encoding.add_done_callback(lambda _: resources.close())
        await asyncio.wrap_future(encoding)
        number, header = CODEC_NUMBERS[copied.codec.name], encode_message(envelope)
        size = copied.codec.encoded_size(fragment.share.numel)
        copy_id = fragment.p, self._leader.generation, copied.serial
        common = (*copy_id, envelope.learner, envelope.incarnation, envelope.session)
        missing = Spans([(0, size)]) if self._started.get(fragment.p) != body.round else None
        self._started[fragment.p] = body.round
        for attempt in range(MAX_ATTEMPTS):
            try:
                address = await self._shard_address(fragment.p)
                if missing is None:  # the syncer may have a part of it
                    missing = await self._bulk.commit_contribution(number, header, address)
                if missing:
                    spans = [list(span) for span in missing]
                    sending = SendRowsRequest(*common, astuple(body.round), size, address, spans)
                    with self._bulk.measure("up", lambda: size):
                        await self._call_ranks(
                            fragment, "send", sending._asdict(), self._local_transfer.send(sending), "up"
                        )
                    missing = await self._bulk.commit_contribution(number, header, address)
                if not missing:
                    return
            except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError) as error:
                is_damaged = isinstance(error, SyncerRefusedError) and error.code == "digest"
                if (isinstance(error, SyncerRefusedError) and not is_damaged) or attempt == MAX_ATTEMPTS - 1:
                    raise
                missing = None
                self._bulk.forget_shard_addresses()
                await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        raise ConnectionError(f"the syncer lacks {missing.bytes if missing else 0} bytes of fragment {fragment.p}")

    async def fetch(
        self, fragment: RowFragment, version: Version, base: Version | None, downs: tuple[str, ...]
    ) -> tuple[Buffer | None]:
        """Return the leader's rows when every rank has its own. (None,): the whole value differs from the published
        value."""
        request = FetchRowsRequest(
            fragment.p, self._leader.generation, version, base, downs, await self._shard_address(fragment.p)
        )
        try:
            results: list[Any] = []
            with self._bulk.measure("down", lambda: sum(result["moved"] for result in results)):
                results += await self._call_ranks(
                    fragment, "fetch", request._asdict(), self._local_transfer.fetch(request), "down"
                )
        except (aiohttp.ClientError, OSError):
            self._bulk.forget_shard_addresses()  # a shard may have another address by now
            raise
        digests = {result["digest"] for result in results}
        if len(digests) != 1:
            raise WireError(f"ranks received different digests of one version: {sorted(digests)}", "digest")
        relaying = self._compute.submit(self._relay_version, fragment, version, digests.pop())
        try:
            return (await asyncio.shield(asyncio.wrap_future(relaying)),)
        except asyncio.CancelledError:
            relaying.add_done_callback(
                lambda done: fragment.buffers.release(done.result()) if not done.exception() else None
            )
            raise

    def _encode(self, fragment: RowFragment, copied: PulledCopy) -> None:
        """Let all ranks encode their strips, and encode this rank's. Runs in the codec thread."""
        if fragment.is_encoded(copied.serial):
            return
        try:
            prepared = fragment.prepare_copy(copied)
            incoming = self._leader.exchange_edges(fragment.p, copied.serial, prepared.outgoing, copied.codec)
            fragment.encode_strips(prepared, incoming, copied.codec)
        except BaseException as error:
            fragment.abort_encoding(copied.serial, error)
            if isinstance(error, CancelledError):  # the training thread never made the copy
                raise CopyUnavailableError from None
            raise

    def _relay_version(self, fragment: RowFragment, version: Version, digest: str) -> Buffer | None:
        """Send each rank its rows. If the digest does not match, no rank keeps them. Runs in the codec thread."""
        value = fragment.pop_fetched(version)
        if value is None:
            return None
        is_valid = False
        try:
            is_valid = self._leader.relay_version(fragment.p, version, value.tensor, digest)
        finally:
            if not is_valid:
                fragment.buffers.release(value)
        return value if is_valid else None

    async def _shard_address(self, p: FragmentId) -> str:
        return await self._bulk.shard_address(p) or self._link.current_address

    async def _call_ranks(
        self, fragment: RowFragment, method: str, arguments: dict[str, Any], own: Any, direction: str
    ) -> list[Any]:
        """Call all ranks that have rows to transfer, and count their bytes for the island. Return their results."""
        ranks = {row_range.rank for row_range in fragment.share.row_ranges}
        if method == "send":
            ranks = {rank for rank, strips in enumerate(fragment.share.encode_ranges) if strips}
        calls = [asyncio.ensure_future(self._rank_rpc.call(rank, method, arguments)) for rank in sorted(ranks) if rank]
        mine = [asyncio.ensure_future(own)] if 0 in ranks else []
        if not mine:
            own.close()
        try:
            # Wait for all: the error of one rank must not restart the transfers of the others.
            ended = await asyncio.gather(*mine, *calls, return_exceptions=True)
        finally:
            for each in (*mine, *calls):
                each.cancel()
        if mine and not isinstance(ended[0], BaseException):
            self._check_reachability(dict(zip((rank for rank in sorted(ranks) if rank), ended[1:], strict=True)))
        results: list[Any] = []
        for each in ended:
            if isinstance(each, BaseException):
                raise each
            results.append(each)
        theirs = results[len(mine) :]
        moved = sum(result["moved"] for result in theirs)
        if direction == "up":
            self._bulk.up.moved_bytes_by_other_ranks += moved
            self._link.bytes_up += moved
        else:
            self._bulk.down.moved_bytes_by_other_ranks += moved
            self._link.bytes_down += moved
        return results

    def _check_reachability(self, theirs: dict[int, Any]) -> None:
        """Raise IslandBrokenError if a rank fails for long while rank 0 succeeds: this island could never merge."""
        now = time.monotonic()
        for rank, ended in theirs.items():
            if not isinstance(ended, ConnectionError):
                self._lost_since.pop(rank, None)
            elif now - self._lost_since.setdefault(rank, now) > RANK_UNREACHABLE_TIMEOUT_S:
                raise IslandBrokenError(
                    f"{ended}; it has not reached the syncer for {RANK_UNREACHABLE_TIMEOUT_S:.0f} s, and rank 0 has:"
                    " restart the island, and rank 0 will transfer the rows of all ranks"
                )
