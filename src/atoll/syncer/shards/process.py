"""A shard process: it stores some fragments of a run and executes the effects that the syncer sends for them.

Learners upload contributions here and download published values from here. The syncer makes all decisions and never
receives the values. When a link to the syncer breaks, both sides drop what was not durable: the syncer opens those
rounds again.
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
    """The key files cannot be used in their current state."""


ContributionKey = tuple[LearnerId, Incarnation, RoundId]


class ShardProcess:
    """State of one shard. `syncer`: its address, or several between commas if a standby may take over."""

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
        self.address = ""  # address for learners
        self.log = ContextLogger(logging.getLogger("atoll.shard"), shard=shard)
        self.refused: Counter[str] = Counter()
        self.access = AccessControl(token, tls, self.refused, self.log)
        self.on_authenticated: Callable[[asyncio.BaseTransport | None], None] = lambda transport: None
        self.gate = MemoryGate(MAX_RECEIVING_BYTES)
        self.links: set[LinkKey] = set()
        self.bytes_up = 0
        self.bytes_down = 0
        self.directory_lost = asyncio.Event()  # set when another process has taken the directory
        self.superseded_by = ""
        self.store = Store.open(directory / "store")
        self.executor = FragmentExecutor(self.store, self)
        stored = self.store.read_settings()
        self.settings = RunSettings.from_json(stored) if stored is not None else RunSettings()
        self._syncers = tuple(syncer.split(","))
        self._syncer_index = 0
        self._token = token
        self._client_tls = client_tls
        last = self.store.read_last_syncer() or {"epoch": 0, "run_id": ""}
        self._epoch: int = last["epoch"]  # epoch of the newest syncer that has used this directory
        self._run_id: str = last["run_id"]  # the run for which that syncer has a record
        self._connection: WebSocketConnection | None = None
        # announced to the syncer, without a decision yet
        self._pending_contributions: dict[ContributionKey, ContributionPayload] = {}
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
                raise ValueError(
                    f"{self.directory} does not belong to shard {self.shard} of {self.shards}: use its own directory"
                )
            await self.executor.load(plan, self.settings, mine)
            self._resize_gate(plan)

    def _resize_gate(self, plan: FragmentPlan) -> None:
        self.gate.max_bytes = max([MAX_RECEIVING_BYTES, *(16 * plan.numel(p) for p in self.fragments)])

    # ---------------------------------------------------------------------------------------------------- syncer link

    async def run(self) -> None:
        """Link to the syncer, and link again whenever the link ends."""
        while True:
            try:
                await self._link()
            except (aiohttp.ClientError, OSError, TimeoutError, WireError, KeysUnusableError) as error:
                self._log_problem(describe_network_error(error))
            except FencedError as fenced:
                self.on_fenced(fenced)
                return
            finally:
                self._forget_link()
            self._syncer_index = (self._syncer_index + 1) % len(self._syncers)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _link(self) -> None:
        """Run one link until it ends."""
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
        """Build a TLS context from the current files. While renewed keys are being copied, the files do not match."""
        try:
            return self._client_tls.make_context() if self._client_tls is not None else True
        except ValueError as error:
            raise KeysUnusableError(str(error)) from None

    def _url(self, path: str) -> str:
        return f"http{'s' if self._client_tls is not None else ''}://{self._syncers[self._syncer_index]}{path}"

    def _log_problem(self, problem: str) -> None:
        if self._log_limit.count_suppressed("no syncer") is not None:
            self.log.warning("cannot reach a syncer at %s (%s); retrying", ",".join(self._syncers), problem)

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
            reply = await anext(messages, None)
        if not isinstance(reply, str):
            raise WireError(f"the syncer refused this shard: {connection.end_reason}", "type")
        hello = decode(reply, "syncer")
        if type(hello) is not SyncerHello:
            raise WireError(f"the first message of a syncer is SyncerHello, found {type(hello).__name__}", "type")
        if hello.epoch < self._epoch:
            raise WireError(
                f"the syncer is of epoch {hello.epoch}, and this shard has served epoch {self._epoch}", "type"
            )
        await self._accept_syncer(hello)
        connection.post(encode(await self.executor.run_on_disk(self._inventory)))
        self._connection = connection
        self.log.info("connected to the syncer of epoch %d", hello.epoch)
        traffic_task = asyncio.ensure_future(self._report_traffic())
        try:
            async for data in messages:
                if isinstance(data, str):
                    await self._handle_message(session, decode(data, "syncer"))
        finally:
            traffic_task.cancel()

    async def _accept_syncer(self, hello: SyncerHello) -> None:
        """Write down the newest syncer, so that an older one is refused even after a restart of this process.

        Without that: (1) a standby takes over and receives the inventory of this shard, (2) this process restarts and
        first connects to the old syncer, which was only frozen, (3) the old syncer has a version merged and published,
        (4) the new one merges the same version again.
        """
        if (hello.epoch, hello.run_id) != (self._epoch, self._run_id):
            await self.executor.run_on_disk(self.store.write_last_syncer, asdict(hello))
            self._epoch, self._run_id = hello.epoch, hello.run_id

    def _hello(self) -> ShardHello:
        run_id = self.settings.config.run_id if self.fragments else ""
        merged = any(fragment.served.version for fragment in self.fragments.values())
        is_founded = bool(run_id) and (merged or self._run_id == run_id)
        return ShardHello(self.shard, self.shards, self.address, run_id, self.settings.founded_at, is_founded)

    def _inventory(self) -> ShardInventory:
        stored = []
        for p, fragment in sorted(self.fragments.items()):
            _, record, _ = self.store.read_newest(p)
            stored.append(StoredFragment(p, fragment.served.version, record))
        return ShardInventory(self.settings.founded_at, tuple(stored))

    async def _handle_message(self, session: aiohttp.ClientSession, message: Any) -> None:
        kind = type(message)
        if kind is OpenLinks:
            self.links = set(message.links)
        elif kind is Accumulate:
            payload = self._pending_contributions.pop(
                (message.contribution.learner, message.contribution.incarnation, message.round), None
            )
            if payload is not None:  # without it the merge fails later, because the counts differ
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
        self.log.info("created %d fragments of %s", len(values), settings.config.run_id)
        self._post(await self.executor.run_on_disk(self._inventory))

    async def _roll_back(self, message: RollBack) -> None:
        for p, version in message.versions:
            await self.executor.roll_back(p, version)
            self.log.warning("fragment %d rolled back to version %d: the run ended without the next one", p, version)
        self._post(await self.executor.run_on_disk(self._inventory))

    async def _download_initial(self, session: aiohttp.ClientSession, plan: FragmentPlan, p: FragmentId) -> Tensor:
        value = torch.empty(plan.numel(p))

        def accept(head: FrameHead, header: bytes) -> Any:
            if decode_header(header, {"fragment": int})["fragment"] != p:
                raise WireError(f"expected fragment {p}, found another one", "type")
            return as_bytes(value)

        parser = FrameParser(FrameKind.MODEL, accept)
        async with session.get(self._url(f"/v1/initial/{p}")) as response:
            response.raise_for_status()
            async for chunk in response.content.iter_any():
                parser.feed(chunk)
        parser.finish()
        return value

    # ---------------------------------------------------------------------------------------------------- events

    def handle_event(self, event: SyncerEvent, payload: ContributionPayload | None = None) -> None:
        """Forward an event to the syncer. The values of a contribution stay here until the syncer has decided."""
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
    """Build the HTTP application of one shard, and return its endpoints too."""
    (shard.directory / "spool").mkdir(parents=True, exist_ok=True)
    endpoints = FragmentEndpoints(shard)
    app = web.Application(middlewares=[auth_middleware(shard)], client_max_size=MAX_MESSAGE_BYTES)
    app.router.add_put("/v1/slice", endpoints.put_slice)
    app.router.add_put("/v1/contribution", endpoints.put_contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", endpoints.get_fragment)
    return app, endpoints


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
    """Serve a shard until SIGINT or SIGTERM.

    Args:
        head: Endpoint of the syncer.
        advertise: Address at which learners reach this process, if it differs from the address of the socket.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} of {shards} does not exist: shards are numbered from 0")
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
    app, endpoints = build_shard_app(shard)
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
                tasks[0].result()  # raises the error: the task ends only after an internal error
            if shard.superseded_by:
                raise SupersededError(shard.superseded_by)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            endpoints.partial_uploads.close()
            await shard.executor.stop()
            shard.store.close()
