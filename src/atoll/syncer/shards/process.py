"""A shard as a process: it holds some fragments of a run, and does with them what the syncer says.

Learners bring their contributions here and fetch published values here; the syncer decides and never sees them. What
was not durable when a link to the syncer broke is forgotten, on both sides: the syncer opens those rounds anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from msgspec.structs import asdict
from torch import Tensor

from atoll.core.protocol import (
    Accumulate,
    Contribution,
    DiscardRound,
    MergeRound,
    MessageArrived,
    Persist,
    SyncerEvent,
)
from atoll.core.types import FragmentId, Incarnation, LearnerId, RoundId, Version
from atoll.logs import ContextLogger, LogRateLimiter
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import FencedError, Store
from atoll.syncer.fragment_endpoints import FragmentEndpoints, MemoryGate, auth_middleware
from atoll.syncer.fragment_executor import ContributionPayload, FragmentExecutor
from atoll.syncer.main import SupersededError, http_server, wait_for_first
from atoll.syncer.process import MAX_RECEIVING_BYTES, LinkKey
from atoll.syncer.shards.messages import (
    MAX_SHARD_MESSAGE_BYTES,
    CreateFragments,
    DropContribution,
    MergeReport,
    OpenLinks,
    PinSnapshot,
    PinVersion,
    RollBack,
    ShardHello,
    ShardInventory,
    ShardToSyncer,
    ShardTraffic,
    StoredFragment,
    SyncerHello,
    UnpinSnapshot,
    UnpinVersion,
    decode,
    encode,
)
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport.auth import AccessControl, check_access
from atoll.transport.endpoint import Endpoint
from atoll.transport.http_client import describe_network_error
from atoll.transport.listener import bind_socket, format_address
from atoll.transport.tls import ClientTls, KeyFiles, ServerTls
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import (
    MAX_MESSAGE_BYTES,
    FrameHead,
    FrameKind,
    FrameParser,
    WireError,
    as_bytes,
    decode_header,
)

RECONNECT_DELAY_S = 0.5
LOG_INTERVAL_S = 10.0
TRAFFIC_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 15.0


class KeysUnusableError(Exception):
    """The files of the key cannot be used as they are."""


ContributionKey = tuple[LearnerId, Incarnation, RoundId]


class ShardProcess:
    """`syncer`: where it listens; several addresses, between commas, where a standby may take over."""

    def __init__(
        self,
        directory: Path,
        shard: int,
        shards: int,
        syncer: str,
        *,
        token: str | None = None,
        tls: ServerTls | None = None,
        client_tls: ClientTls | None = None,
    ) -> None:
        self.directory = directory
        self.shard = shard
        self.shards = shards
        self.address = ""  # where learners reach it
        self.log = ContextLogger(logging.getLogger("atoll.shard"), shard=shard)
        self.refused: Counter[str] = Counter()
        self.access = AccessControl(token, tls, self.refused, self.log)
        self.on_authenticated: Callable[[asyncio.BaseTransport | None], None] = lambda transport: None
        self.gate = MemoryGate(MAX_RECEIVING_BYTES)
        self.links: set[LinkKey] = set()
        self.bytes_up = 0
        self.bytes_down = 0
        self.directory_lost = asyncio.Event()  # another process has the directory
        self.superseded_by = ""
        self.store = Store.open(directory / "store")
        self.executor = FragmentExecutor(self.store, self)
        kept = self.store.read_settings()
        self.settings = RunSettings.from_json(kept) if kept is not None else RunSettings()
        self._syncers = tuple(syncer.split(","))
        self._syncer_index = 0
        self._token = token
        self._client_tls = client_tls
        head = self.store.read_last_syncer() or {"epoch": 0, "run_id": ""}
        self._epoch: int = head["epoch"]  # of the newest syncer that was ever served with this directory
        self._run_id: str = head["run_id"]  # the run of which that syncer has a record
        self._connection: WebSocketConnection | None = None
        self._pending_contributions: dict[ContributionKey, ContributionPayload] = {}  # told of, and not yet answered
        self._pinned: Counter[tuple[FragmentId, Version]] = Counter()
        self._log_limit = LogRateLimiter(LOG_INTERVAL_S)

    @property
    def plan(self) -> FragmentPlan | None:
        return self.settings.plan

    @property
    def fragments(self) -> dict[FragmentId, SyncerFragment]:
        return self.executor.fragments

    async def start(self) -> None:
        plan = self.plan
        if plan is not None:
            mine = list(range(self.shard, len(plan.fragments), self.shards))
            if set(self.store.fragments()) != set(mine):
                raise ValueError(f"{self.directory} is not that of shard {self.shard} of {self.shards}: give its own")
            await self.executor.load(plan, self.settings, mine)
            self._resize_gate(plan)

    def _resize_gate(self, plan: FragmentPlan) -> None:
        self.gate.max_bytes = max([MAX_RECEIVING_BYTES, *(16 * plan.numel(p) for p in self.fragments)])

    # ---------------------------------------------------------------------------------------------------- the head

    async def run(self) -> None:
        """One link to the syncer after the other, for ever."""
        while True:
            try:
                await self._link()
            except (aiohttp.ClientError, OSError, TimeoutError, WireError, KeysUnusableError) as wrong:
                self._log_problem(describe_network_error(wrong))
            except FencedError as fenced:
                self.on_fenced(fenced)
                return
            finally:
                self._forget_link()
            self._syncer_index = (self._syncer_index + 1) % len(self._syncers)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _link(self) -> None:
        """One, until it ends."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token is not None else {}
        connector = aiohttp.TCPConnector(use_dns_cache=False, ssl=self._context())
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session,
            session.ws_connect(
                self._url("/v1/head"), max_msg_size=MAX_SHARD_MESSAGE_BYTES, compress=0, heartbeat=10.0
            ) as socket,
        ):
            # The heartbeat ends the connection to a syncer that does not read.
            connection = WebSocketConnection(socket, max_queued=None)
            try:
                await self._run_session(session, connection)
            finally:
                connection.cancel()
            self._log_problem(connection.end_reason)

    def _context(self) -> Any:
        """Of the files as they are now: keys may be renewed, and while only one of them is copied they do not fit."""
        try:
            return self._client_tls.make_context() if self._client_tls is not None else True
        except ValueError as wrong:
            raise KeysUnusableError(str(wrong)) from None

    def _url(self, path: str) -> str:
        return f"http{'s' if self._client_tls is not None else ''}://{self._syncers[self._syncer_index]}{path}"

    def _log_problem(self, problem: str) -> None:
        if self._log_limit.count_suppressed("no syncer") is not None:
            self.log.warning("no syncer at %s (%s); dialling again and again", ",".join(self._syncers), problem)

    def _forget_link(self) -> None:
        self._connection = None
        self.links = set()
        for payload in self._pending_contributions.values():
            payload.release()
        self._pending_contributions.clear()
        for (p, version), count in self._pinned.items():
            for _ in range(count):
                self.fragments[p].unpin(version)
        self._pinned.clear()

    async def _run_session(self, session: aiohttp.ClientSession, connection: WebSocketConnection) -> None:
        await self.executor.rollback_pending()
        connection.post(encode(self._hello()))
        messages = connection.messages()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answer = await anext(messages, None)
        if not isinstance(answer, str):
            raise WireError(f"the syncer does not want this shard: {connection.end_reason}", "type")
        head = decode(answer, "syncer")
        if type(head) is not SyncerHello:
            raise WireError(f"the first word of a syncer is SyncerHello, found {type(head).__name__}", "type")
        if head.epoch < self._epoch:
            raise WireError(f"it is that of epoch {head.epoch}, and one of epoch {self._epoch} was served", "type")
        await self._accept_syncer(head)
        connection.post(encode(await self.executor.run_on_disk(self._inventory)))
        self._connection = connection
        self.log.info("connected with the syncer of epoch %d", head.epoch)
        telling = asyncio.ensure_future(self._report_traffic())
        try:
            async for data in messages:
                if isinstance(data, str):
                    await self._handle_message(session, decode(data, "syncer"))
        finally:
            telling.cancel()

    async def _accept_syncer(self, head: SyncerHello) -> None:
        """From now on an older syncer is not obeyed, whatever becomes of this process. Without that: (1) a standby
        takes over and hears what is held here, (2) this process is started again and finds the old syncer first, which
        was only frozen, (3) that one has a version merged and sent out, (4) the new one merges the same version anew.
        """
        if (head.epoch, head.run_id) != (self._epoch, self._run_id):
            await self.executor.run_on_disk(self.store.write_last_syncer, asdict(head))
            self._epoch, self._run_id = head.epoch, head.run_id

    def _hello(self) -> ShardHello:
        run_id = self.settings.config.run_id if self.fragments else ""
        merged = any(fragment.served.version for fragment in self.fragments.values())
        founded = bool(run_id) and (merged or self._run_id == run_id)
        return ShardHello(self.shard, self.shards, self.address, run_id, self.settings.founded_at, founded)

    def _inventory(self) -> ShardInventory:
        held = []
        for p, fragment in sorted(self.fragments.items()):
            _, record, _ = self.store.read_newest(p)
            held.append(StoredFragment(p, fragment.served.version, record))
        return ShardInventory(self.settings.founded_at, tuple(held))

    async def _handle_message(self, session: aiohttp.ClientSession, message: Any) -> None:
        kind = type(message)
        if kind is OpenLinks:
            self.links = set(message.links)
        elif kind is Accumulate:
            payload = self._pending_contributions.pop(
                (message.accepted.learner, message.accepted.incarnation, message.round), None
            )
            if payload is not None:  # otherwise the counts differ when it is merged, and the merge fails
                self.executor.accumulate(message, payload)
        elif kind is DropContribution:
            self._drop_contribution((message.learner, message.incarnation, message.round))
        elif kind is MergeRound:
            self.executor.merge_round(message)
        elif kind is DiscardRound:
            self.executor.discard(message)
        elif kind is Persist:
            self.executor.persist(message.record)
        elif kind is PinVersion:
            if self.fragments[message.fragment].pin(message.version) is not None:
                self._pinned[message.fragment, message.version] += 1
        elif kind is UnpinVersion:
            if self._pinned[message.fragment, message.version]:
                self._pinned[message.fragment, message.version] -= 1
                self.fragments[message.fragment].unpin(message.version)
        elif kind is CreateFragments:
            await self._create_fragments(session, message)
        elif kind is PinSnapshot:
            self.executor.submit_to_disk(self.store.pin_snapshot, message.snapshot, message.versions)
        elif kind is UnpinSnapshot:
            self.executor.submit_to_disk(self.store.discard_snapshot, message.snapshot)
        elif kind is RollBack:
            await self._roll_back(message)
        elif kind is SyncerHello:
            await self._accept_syncer(message)

    async def _create_fragments(self, session: aiohttp.ClientSession, message: CreateFragments) -> None:
        settings = RunSettings.from_json(json.loads(message.settings))
        assert settings.plan is not None
        values = {p: await self._download_initial(session, settings.plan, p) for p in message.fragments}
        await self.executor.create_fragments(settings, values)
        self.settings = settings
        self._resize_gate(settings.plan)
        self.log.info("took %d fragments of %s", len(values), settings.config.run_id)
        self._post(await self.executor.run_on_disk(self._inventory))

    async def _roll_back(self, message: RollBack) -> None:
        for p, version in message.versions:
            await self.executor.roll_back(p, version)
            self.log.warning("fragment %d is back at version %d: the run has ended without the next", p, version)
        self._post(await self.executor.run_on_disk(self._inventory))

    async def _download_initial(self, session: aiohttp.ClientSession, plan: FragmentPlan, p: FragmentId) -> Tensor:
        value = torch.empty(plan.numel(p))

        def accept(head: FrameHead, header: bytes) -> Any:
            if decode_header(header, {"fragment": int})["fragment"] != p:
                raise WireError(f"another fragment where {p} was asked for", "type")
            return as_bytes(value)

        parser = FrameParser(FrameKind.MODEL, accept)
        async with session.get(self._url(f"/v1/initial/{p}")) as answer:
            answer.raise_for_status()
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
        parser.finish()
        return value

    # ---------------------------------------------------------------------------------------------------- telling

    def handle_event(self, event: SyncerEvent, payload: ContributionPayload | None = None) -> None:
        """Pass an event on to the syncer. The values of a contribution wait here for its decision."""
        if self._connection is None:
            return
        if payload is not None:
            assert isinstance(event, MessageArrived) and isinstance(event.envelope.body, Contribution)
            envelope, round_id = event.envelope, event.envelope.body.round
            key = (envelope.learner, envelope.incarnation, round_id)
            for old in [k for k in self._pending_contributions if (k[0], k[2].fragment) == (key[0], round_id.fragment)]:
                self._drop_contribution(old)
            payload.is_taken = True
            self._pending_contributions[key] = payload
        self._post(event)  # type: ignore[arg-type]

    def _drop_contribution(self, key: ContributionKey) -> None:
        payload = self._pending_contributions.pop(key, None)
        if payload is not None:
            payload.release()

    def _post(self, message: ShardToSyncer) -> None:
        if self._connection is not None:
            self._connection.post(encode(message))

    def on_durable(self, fragment: SyncerFragment) -> None:
        if fragment.stats is not None:
            self._post(MergeReport(fragment.id, fragment.served.version, fragment.stats))

    def on_fenced(self, fenced: FencedError) -> None:
        self.superseded_by = str(fenced)
        self.directory_lost.set()

    async def _report_traffic(self) -> None:
        while True:
            await asyncio.sleep(TRAFFIC_INTERVAL_S)
            self._post(ShardTraffic(self.bytes_up, self.bytes_down))


def build_shard_app(shard: ShardProcess) -> tuple[web.Application, FragmentEndpoints]:
    (shard.directory / "spool").mkdir(parents=True, exist_ok=True)
    bulk = FragmentEndpoints(shard)
    app = web.Application(middlewares=[auth_middleware(shard)], client_max_size=MAX_MESSAGE_BYTES)
    app.router.add_put("/v1/slice", bulk.put_slice)
    app.router.add_put("/v1/contribution", bulk.put_contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", bulk.get_fragment)
    return app, bulk


def serve_shard(
    directory: Path,
    shard: int,
    shards: int,
    head: Endpoint,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    advertise: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    keys: KeyFiles | None = None,
    plain_text: bool = False,
) -> None:
    """Until a signal. `advertise`: the address at which learners reach this process, where that is another one."""
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} of {shards}; they are numbered from 0")
    tls = ServerTls(keys) if keys is not None else None
    check_access(host, token, tls, plain_text)
    sock = bind_socket(host, port)  # before the directory is created: a port in use must not leave one behind
    asyncio.run(_serve(directory, shard, shards, head, sock, token, advertise, on_ready, tls))


async def _serve(
    directory: Path,
    number: int,
    shards: int,
    head: Endpoint,
    sock: socket.socket,
    token: str | None,
    advertise: str | None,
    on_ready: Callable[[str], None] | None,
    tls: ServerTls | None,
) -> None:
    try:
        shard = ShardProcess(directory, number, shards, head.addresses, token=token, tls=tls, client_tls=head.tls)
    except BaseException:
        sock.close()
        raise
    tasks: list[asyncio.Task[None]] = []
    app, bulk = build_shard_app(shard)
    async with http_server(shard, app, sock) as (listener, stopped):
        try:
            await shard.start()
            listener.start()
            shard.address = advertise or format_address(sock)
            shard.log.info("listening on %s", shard.address)
            if on_ready is not None:
                on_ready(shard.address)
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(shard.run()), loop.create_task(shard.executor.write_heartbeats())]
            if tls is not None:
                tasks.append(loop.create_task(shard.access.watch_keys(tuple)))
            await wait_for_first(stopped.wait(), shard.directory_lost.wait(), tasks[0])
            if tasks[0].done() and not tasks[0].cancelled():
                tasks[0].result()  # our bug
            if shard.superseded_by:
                raise SupersededError(shard.superseded_by)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            bulk.partial_uploads.close()
            await shard.executor.stop()
            shard.store.close()
