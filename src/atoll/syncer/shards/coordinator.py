"""The syncer's side of its shards: the processes that store, merge and serve fragments.

Fragment p belongs to shard p % n. The syncer decides as it does without shards. It has no tensors: it sends its effects
to the shard of the fragment and receives the events from there (`messages`). An unavailable shard stops its own
fragments and nothing else. Any process with the newest durable versions of these fragments can replace it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from aiohttp import WSCloseCode, web
from torch import Tensor

from atoll.core.protocol import (
    Accumulate,
    Contribution,
    DiscardRound,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    PersistFailed,
    ShardLost,
    ShardReconnected,
    SnapshotRecord,
    VersionRecord,
)
from atoll.core.types import FragmentId, Version
from atoll.store.run_settings import RunSettings
from atoll.syncer.fragment_endpoints import stream_response
from atoll.syncer.shards.messages import (
    MAX_SHARD_MESSAGE_BYTES,
    CreateFragments,
    DropContribution,
    MergeReport,
    OpenLinks,
    PinVersion,
    RollBack,
    ShardHello,
    ShardInventory,
    ShardTraffic,
    StoredFragment,
    SyncerHello,
    SyncerToShard,
    UnpinVersion,
    decode,
    encode,
    settings_to_text,
)
from atoll.tensors.plan import FragmentPlan, tensor_digest
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import (
    FragmentHeader,
    FrameKind,
    FrameParser,
    WireError,
    as_bytes,
    encode_frame_head,
    encode_header,
)

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess

MAX_QUEUED_MESSAGES = 65_536
"""Queued messages for one shard. With more, it has stopped reading long ago."""

DUPLICATE_SHARD = "replaced by another process with the same shard number"

CREATE_TIMEOUT_S = 600.0

GATHER_TIMEOUT_S = 60.0
"""Maximum wait at the end of a run for the values of an unavailable shard."""


class ShardsUnavailableError(Exception):
    """A run cannot be created, or its model collected, without all shards."""


class RemoteFragment(NamedTuple):
    """Stand-in for a `SyncerFragment` at a shard, for links that announce versions to learners."""

    shards: ShardCoordinator
    p: FragmentId

    def pin(self, version: Version) -> RemoteFragment | None:
        self.shards.post(self.p, PinVersion(self.p, version))
        return self

    def unpin(self, version: Version) -> None:
        self.shards.post(self.p, UnpinVersion(self.p, version))


@dataclass(slots=True, eq=False)
class ShardLink:
    """Connection from one shard."""

    number: int
    address: str
    connection: WebSocketConnection
    inventory: dict[FragmentId, StoredFragment] = field(default_factory=dict)
    traffic: ShardTraffic = field(default_factory=partial(ShardTraffic, 0, 0))

    def post(self, message: SyncerToShard) -> None:
        self.connection.post(encode(message))

    def close(self, cause: str) -> None:
        self.connection.clear_queue()
        self.connection.close(cause, WSCloseCode.POLICY_VIOLATION)


class ShardCoordinator:
    """Links to all shards of a run."""

    def __init__(self, syncer: SyncerProcess, count: int) -> None:
        self.syncer = syncer
        self.count = count
        self.links: dict[int, ShardLink] = {}  # shards that have sent their inventory
        self._pending_links: dict[int, ShardLink] = {}  # shards that have not sent it yet
        self.fragments: dict[FragmentId, RemoteFragment] = {}
        self._initial: dict[FragmentId, Tensor] = {}  # while the run is being created
        self._founding_at = 0.0  # `founded_at` of the current attempt to create the run
        # a snapshot, and the shards whose part of it is not durable yet
        self._pending_snapshot: tuple[SnapshotRecord, set[int]] | None = None
        self._changed = asyncio.Condition()
        self._traffic_before = ShardTraffic(0, 0)  # traffic of closed links

    def __iter__(self) -> Iterator[ShardLink]:
        return iter([*self.links.values(), *self._pending_links.values()])

    def begin(self, fragments: int) -> None:
        self.fragments = {p: RemoteFragment(self, p) for p in range(fragments)}

    def fragments_of(self, shard: int) -> tuple[FragmentId, ...]:
        plan = self.syncer.settings.plan
        return tuple(range(shard, len(plan.fragments), self.count)) if plan is not None else ()

    def addresses(self) -> list[str | None]:
        return [self.links[k].address if k in self.links else None for k in range(self.count)]

    def traffic(self) -> ShardTraffic:
        reports = [self._traffic_before, *(link.traffic for link in self.links.values())]
        return ShardTraffic(sum(each.bytes_up for each in reports), sum(each.bytes_down for each in reports))

    # ---------------------------------------------------------------------------------------------------- creation

    async def create_run(self, settings: RunSettings, values: list[Tensor]) -> None:
        """Have every shard download its initial values and make them durable."""
        missing = [k for k in range(self.count) if k not in self.links]
        if missing:
            raise ShardsUnavailableError(f"cannot create the run: {self._describe_missing()}")
        self._initial = dict(enumerate(values))
        self._founding_at = settings.founded_at
        text = settings_to_text(settings.to_json())
        try:
            for k, link in self.links.items():
                link.inventory = {}
                link.post(CreateFragments(text, tuple(range(k, len(values), self.count))))
            async with self._changed, asyncio.timeout(CREATE_TIMEOUT_S):
                await self._changed.wait_for(
                    lambda: self._has_all_fragments(len(values)) or len(self.links) < self.count
                )
            if not self._has_all_fragments(len(values)):
                raise ShardsUnavailableError("a shard disconnected while the run was created")
        except TimeoutError:
            raise ShardsUnavailableError(f"the shards did not store the model within {CREATE_TIMEOUT_S:g} s") from None
        finally:
            self._initial = {}

    def announce_run(self) -> None:
        """Announce that the syncer has the record of this run: what the shards store now belongs to it."""
        self.post_all(self._syncer_hello())

    def _has_all_fragments(self, fragments: int) -> bool:
        return {p for link in self.links.values() for p in link.inventory} == set(range(fragments))

    async def records(self, fragments: int) -> dict[FragmentId, VersionRecord]:
        """Wait for all shards, and return the records of the versions that they store."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.links) == self.count and self._has_all_fragments(fragments))
        stored = [each for link in self.links.values() for each in link.inventory.values()]
        return {each.fragment: each.record for each in stored if each.record is not None}

    async def get_initial(self, request: web.Request) -> web.StreamResponse:
        """Serve `GET /v1/initial/{fragment}` while the run is being created."""
        value = self._initial.get(int(request.match_info["fragment"][:9]))
        if value is None:
            raise web.HTTPNotFound
        header = encode_header({"fragment": int(request.match_info["fragment"])})
        head = await asyncio.to_thread(encode_frame_head, FrameKind.MODEL, 0, header, value)
        return await stream_response(request, head + header, as_bytes(value))

    async def gather_values(self, plan: FragmentPlan, versions: dict[FragmentId, Version]) -> dict[FragmentId, Tensor]:
        """Download these versions from their shards.

        Raises:
            ShardsUnavailableError: A shard stayed unavailable for too long.
        """
        try:
            async with self._changed, asyncio.timeout(GATHER_TIMEOUT_S):
                if len(self.links) < self.count:
                    self.syncer.log.warning("waiting for shards to complete the model: %s", self._describe_missing())
                await self._changed.wait_for(lambda: len(self.links) == self.count)
        except TimeoutError:
            raise ShardsUnavailableError(
                f"the run is over, but its model is not complete: {self._describe_missing()}"
            ) from None
        found = {}
        async with self.syncer.access.client_session() as session:
            for p, version in versions.items():
                value = torch.empty(plan.numel(p))
                parser = FrameParser(FrameKind.FRAGMENT, partial(lambda into, head, header: into, as_bytes(value)))
                url = f"{self.syncer.access.scheme}://{self.links[p % self.count].address}/v1/fragment/{p}/{version}"
                async with session.get(url, params={"base": "whole"}) as response:
                    response.raise_for_status()
                    async for chunk in response.content.iter_any():
                        parser.feed(chunk)
                header = FragmentHeader.decode(parser.finish().header)
                if tensor_digest(value) != header.value_digest:
                    raise WireError(f"the digest of fragment {p} differs from the published one", "digest")
                found[p] = value
        return found

    def _describe_missing(self) -> str:
        missing = [str(k) for k in range(self.count) if k not in self.links]
        return f"shard {', '.join(missing)} of {self.count} {'is' if len(missing) == 1 else 'are'} unavailable"

    # ---------------------------------------------------------------------------------------------------- links

    async def open_link(self, request: web.Request) -> web.StreamResponse:
        """Serve `GET /v1/head`: a WebSocket of text messages."""
        connection = await WebSocketConnection.accept(request, MAX_SHARD_MESSAGE_BYTES, 10.0, MAX_QUEUED_MESSAGES)
        link: ShardLink | None = None
        refusal = ""
        try:
            async for data in connection.messages():
                if not isinstance(data, str):
                    continue
                message = decode(data, "shard")
                if link is None:
                    link = self._handle_hello(message, connection)
                elif self.links.get(link.number) is link:
                    await self._handle_message(link, message)
                elif self._pending_links.get(link.number) is link:
                    await self._handle_inventory(link, message)
        except WireError as error:
            refusal = f"invalid message: {error}"
            self.syncer.refused[error.code] += 1
            await connection.refuse(str(error))
        finally:
            connection.finish()
            if link is not None:
                await self._handle_disconnect(link, refusal or connection.end_reason)
        assert isinstance(connection.socket, web.WebSocketResponse)
        return connection.socket

    def _handle_hello(self, hello: Any, connection: WebSocketConnection) -> ShardLink:
        if type(hello) is not ShardHello:
            raise WireError(f"the first message of a shard must be ShardHello, got {type(hello).__name__}", "type")
        self._check(hello)
        older = self._pending_links.get(hello.shard)
        if older is not None:
            older.close(DUPLICATE_SHARD)
        link = ShardLink(hello.shard, hello.address, connection)
        link.post(self._syncer_hello())
        self._pending_links[hello.shard] = link
        return link

    def _syncer_hello(self) -> SyncerHello:
        settings = self.syncer.settings
        return SyncerHello(self.syncer.store.epoch, settings.config.run_id if settings.plan is not None else "")

    def _check(self, hello: ShardHello) -> None:
        if hello.shards != self.count or not 0 <= hello.shard < self.count:
            raise WireError(
                f"shard {hello.shard} of {hello.shards} does not fit this run: it has {self.count}, numbered from 0",
                "type",
            )
        settings = self.syncer.settings
        if self.fragments_of(hello.shard):
            ours = (settings.config.run_id, settings.founded_at)
            is_ours = (hello.run_id, hello.founded_at) == ours
        else:
            is_ours = not hello.is_founded  # left over from a syncer that ended before it had a record of the run
        if not is_ours:
            theirs = f"run {hello.run_id!r}" if hello.run_id else "no run"
            run = f"run {settings.config.run_id!r}" if self.fragments_of(hello.shard) else "a new run without a model"
            raise WireError(
                f"shard {hello.shard} stores {theirs}, and this syncer has {run}: give the shard its own directory, or"
                " restore it from a backup",
                "type",
            )

    async def _handle_inventory(self, link: ShardLink, inventory: Any) -> None:
        """Accept the inventory of a shard. From now on no other syncer can change what the shard stores."""
        if type(inventory) is not ShardInventory:
            found = type(inventory).__name__
            raise WireError(f"the second message of a shard is ShardInventory, found {found}", "type")
        wanted = self.fragments_of(link.number)
        link.inventory = {each.fragment: each for each in inventory.fragments} if wanted else {}
        if set(link.inventory) != set(wanted):
            found = f"{len(link.inventory)} fragments, expected {len(wanted)}"
            raise WireError(f"shard {link.number} stores {found}: restore its directory from a backup", "type")
        unpublished = self._find_unpublished(link)
        if unpublished:
            link.post(RollBack(unpublished))  # the shard then sends its inventory again
            return
        older = self.links.get(link.number)
        if older is not None:
            await self._handle_disconnect(older, DUPLICATE_SHARD)
            older.close(DUPLICATE_SHARD)
        del self._pending_links[link.number]
        self.links[link.number] = link
        self.syncer.log.info("shard %d of %d connected, at %s", link.number, self.count, link.address)
        link.post(self._open_links())
        if self.syncer.core is not None:
            self.syncer.handle_event(
                ShardReconnected(tuple((p, each.version) for p, each in sorted(link.inventory.items())))
            )
        await self._notify()

    def _find_unpublished(self, link: ShardLink) -> tuple[tuple[FragmentId, Version], ...]:
        """Return what the shard must roll back: durable versions that the run ended without, with their predecessors.

        They were never published. The manifest of the run names the version before them. Any other difference means
        that the directory is not of this run.
        """
        core = self.syncer.core
        manifest = core.state.manifest if core is not None else self.syncer.store.read_manifest()
        if manifest is None:
            return ()
        final = dict(enumerate(manifest.versions))
        invalid = {
            p: each.version for p, each in link.inventory.items() if each.version not in (final[p], final[p] + 1)
        }
        if invalid and core is None:
            p, version = min(invalid.items())
            raise WireError(
                f"shard {link.number} stores version {version} of fragment {p}, and the run ended with {final[p]}:"
                " restore its directory from a backup",
                "type",
            )
        return tuple((p, final[p]) for p, each in sorted(link.inventory.items()) if each.version == final[p] + 1)

    async def _handle_message(self, link: ShardLink, message: Any) -> None:
        syncer = self.syncer
        if type(message) is ShardTraffic:
            link.traffic = message
        elif type(message) is ShardInventory:
            # the reply to CreateFragments, perhaps of an earlier attempt to create the run
            if message.founded_at == self._founding_at:
                link.inventory = {each.fragment: each for each in message.fragments}
                await self._notify()
        elif type(message) is MergeReport:
            syncer.record_merge(message.fragment, message.version, message.stats)
        elif syncer.core is None:
            raise WireError(f"{type(message).__name__} before the run was created", "type")
        elif type(message) is MessageArrived:
            self._handle_contribution(link, message)
        elif type(message) in (Persisted, PersistFailed) and message.key.kind == "snapshot":
            self._handle_part_persisted(link.number, message)
        else:
            syncer.handle_event(message)

    def _handle_contribution(self, link: ShardLink, message: MessageArrived) -> None:
        body = message.envelope.body
        if type(body) is not Contribution or body.round.fragment % self.count != link.number:
            raise WireError("a shard must only report contributions to its own fragments", "type")
        effects = self.syncer.handle_event(message)
        if not any(type(effect) is Accumulate for effect in effects):  # the core refused it
            link.post(DropContribution(message.envelope.learner, message.envelope.incarnation, body.round))

    async def _handle_disconnect(self, link: ShardLink, cause: str) -> None:
        if self._pending_links.get(link.number) is link:
            del self._pending_links[link.number]
        if self.links.get(link.number) is not link:
            return
        del self.links[link.number]
        before = self._traffic_before
        up, down = before.bytes_up + link.traffic.bytes_up, before.bytes_down + link.traffic.bytes_down
        self._traffic_before = ShardTraffic(up, down)
        self.syncer.log.warning("shard %d disconnected: %s", link.number, cause)
        if self.syncer.core is not None:
            self._fail_snapshot(f"shard {link.number} disconnected")
            self.syncer.handle_event(ShardLost(self.fragments_of(link.number), cause))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- effects

    def execute(self, effect: Accumulate | MergeRound | DiscardRound | Persist) -> None:
        record = effect.record if type(effect) is Persist else None
        if isinstance(record, SnapshotRecord):
            self._save_snapshot(record)
            return
        assert record is None or isinstance(record, VersionRecord)
        self.post(record.fragment if record is not None else effect.round.fragment, effect)  # type: ignore[union-attr]

    def post(self, p: FragmentId, message: SyncerToShard) -> None:
        """Send a message to the shard of this fragment. An unavailable shard sends its inventory when it reconnects."""
        link = self.links.get(p % self.count)
        if link is not None:
            link.post(message)

    def post_all(self, message: SyncerToShard) -> None:
        for link in self.links.values():
            link.post(message)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _save_snapshot(self, record: SnapshotRecord) -> None:
        """Make all shards save their versions. The syncer's record, written last, completes the snapshot."""
        self._pending_snapshot = (record, set(range(self.count)))
        if len(self.links) < self.count:
            self._fail_snapshot(self._describe_missing())
            return
        self.post_all(Persist(record))

    def _handle_part_persisted(self, shard: int, message: Persisted | PersistFailed) -> None:
        if self._pending_snapshot is None or self._pending_snapshot[0].key() != message.key:
            return  # an earlier snapshot, which was abandoned
        record, missing = self._pending_snapshot
        if type(message) is PersistFailed:
            self._fail_snapshot(f"shard {shard}: {message.cause}")
            return
        missing.discard(shard)
        if not missing:
            self._pending_snapshot = None
            self.syncer.executor.persist(record)

    def _fail_snapshot(self, cause: str) -> None:
        if self._pending_snapshot is not None:
            key, self._pending_snapshot = self._pending_snapshot[0].key(), None
            self.syncer.handle_event(PersistFailed(key, cause))

    def report_missing_shards(self) -> None:
        """Report to a new core the shards that disconnected between their inventory and the start of the core."""
        for shard in range(self.count):
            if shard not in self.links:
                self.syncer.handle_event(ShardLost(self.fragments_of(shard), "it disconnected while the run started"))

    def links_changed(self) -> None:
        self.post_all(self._open_links())

    def _open_links(self) -> OpenLinks:
        return OpenLinks(tuple(sorted(self.syncer.links)))
