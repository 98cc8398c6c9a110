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
from atoll.logs import Named, RepeatLimit
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import Fenced, Store
from atoll.syncer.fragment_endpoints import Bulk, MemoryGate, guard_of
from atoll.syncer.fragment_executor import FragmentExecutor, Payload
from atoll.syncer.main import Superseded, first, http_server
from atoll.syncer.process import RECEIVING_BYTES, LinkKey
from atoll.syncer.shards.messages import (
    MOST_WORD_BYTES,
    Forget,
    FromShard,
    GoBack,
    HeadHello,
    HeldHere,
    HoldCut,
    Holds,
    KeepVersion,
    LetGo,
    LetGoCut,
    Merged,
    OpenLinks,
    ShardHello,
    TakeFragments,
    Traffic,
    heard,
    word,
)
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport.auth import Access, check_access
from atoll.transport.endpoint import Endpoint
from atoll.transport.http_client import why
from atoll.transport.listener import bound, written
from atoll.transport.tls import ClientTls, KeyFiles, ServerTls
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import MOST_MESSAGE_BYTES, FrameHead, FrameParser, Kind, WireError, as_bytes, decode_header

RETRY_S = 0.5
SAY_EVERY_S = 10.0
TRAFFIC_EVERY_S = 1.0
CONNECT_S = 15.0


class KeysUnusable(Exception):  # noqa: N818 - a state of things, which passes
    """The files of the key cannot be used as they are."""


Arrived = tuple[LearnerId, Incarnation, RoundId]


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
        self.log = Named(logging.getLogger("atoll.shard"), shard=shard)
        self.refused: Counter[str] = Counter()
        self.access = Access(token, tls, self.refused, self.log)
        self.on_proved: Callable[[asyncio.BaseTransport | None], None] = lambda transport: None
        self.gate = MemoryGate(RECEIVING_BYTES)
        self.links: set[LinkKey] = set()
        self.bytes_up = 0
        self.bytes_down = 0
        self.over = asyncio.Event()  # another process has the directory
        self.superseded = ""
        self.store = Store.open(directory / "store")
        self.keeper = FragmentExecutor(self.store, self)
        kept = self.store.settings()
        self.settings = RunSettings.from_json(kept) if kept is not None else RunSettings()
        self._syncers = tuple(syncer.split(","))
        self._place = 0
        self._token = token
        self._client_tls = client_tls
        head = self.store.head() or {"epoch": 0, "run_id": ""}
        self._epoch: int = head["epoch"]  # of the newest syncer that was ever served with this directory
        self._founded: str = head["run_id"]  # the run of which that syncer has a record
        self._connection: WebSocketConnection | None = None
        self._arrived: dict[Arrived, Payload] = {}  # told of, and not yet answered
        self._kept: Counter[tuple[FragmentId, Version]] = Counter()
        self._complaints = RepeatLimit(SAY_EVERY_S)

    @property
    def plan(self) -> FragmentPlan | None:
        return self.settings.plan

    @property
    def fragments(self) -> dict[FragmentId, SyncerFragment]:
        return self.keeper.held

    async def start(self) -> None:
        plan = self.plan
        if plan is not None:
            mine = list(range(self.shard, len(plan.fragments), self.shards))
            if set(self.store.fragments()) != set(mine):
                raise ValueError(f"{self.directory} is not that of shard {self.shard} of {self.shards}: give its own")
            await self.keeper.load(plan, self.settings, mine)
            self._size_gate(plan)

    def _size_gate(self, plan: FragmentPlan) -> None:
        self.gate.most_bytes = max([RECEIVING_BYTES, *(16 * plan.numel(p) for p in self.fragments)])

    # ---------------------------------------------------------------------------------------------------- the head

    async def run(self) -> None:
        """One link to the syncer after the other, for ever."""
        while True:
            try:
                await self._link()
            except (aiohttp.ClientError, OSError, TimeoutError, WireError, KeysUnusable) as wrong:
                self._complain(why(wrong))
            except Fenced as fenced:
                self.note_fenced(fenced)
                return
            finally:
                self._forget_link()
            self._place = (self._place + 1) % len(self._syncers)
            await asyncio.sleep(RETRY_S)

    async def _link(self) -> None:
        """One, until it ends."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token is not None else {}
        connector = aiohttp.TCPConnector(use_dns_cache=False, ssl=self._context())
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session,
            session.ws_connect(
                self._url("/v1/head"), max_msg_size=MOST_WORD_BYTES, compress=0, heartbeat=10.0
            ) as socket,
        ):
            # The heartbeat ends the connection to a syncer that does not read.
            connection = WebSocketConnection(socket, max_waiting=None)
            try:
                await self._talk(session, connection)
            finally:
                connection.cancel()
            self._complain(connection.ended)

    def _context(self) -> Any:
        """Of the files as they are now: keys may be renewed, and while only one of them is copied they do not fit."""
        try:
            return self._client_tls.context() if self._client_tls is not None else True
        except ValueError as wrong:
            raise KeysUnusable(str(wrong)) from None

    def _url(self, path: str) -> str:
        return f"http{'s' if self._client_tls is not None else ''}://{self._syncers[self._place]}{path}"

    def _complain(self, problem: str) -> None:
        if self._complaints.left_out("no syncer") is not None:
            self.log.warning("no syncer at %s (%s); dialling again and again", ",".join(self._syncers), problem)

    def _forget_link(self) -> None:
        self._connection = None
        self.links = set()
        for payload in self._arrived.values():
            payload.give_back()
        self._arrived.clear()
        for (p, version), count in self._kept.items():
            for _ in range(count):
                self.fragments[p].release(version)
        self._kept.clear()

    async def _talk(self, session: aiohttp.ClientSession, connection: WebSocketConnection) -> None:
        await self.keeper.settle()
        connection.post(word(self._hello()))
        messages = connection.messages()
        async with asyncio.timeout(CONNECT_S):
            answer = await anext(messages, None)
        if not isinstance(answer, str):
            raise WireError(f"the syncer does not want this shard: {connection.ended}", "type")
        head = heard(answer, "head")
        if type(head) is not HeadHello:
            raise WireError(f"the first word of a syncer is HeadHello, found {type(head).__name__}", "type")
        if head.epoch < self._epoch:
            raise WireError(f"it is that of epoch {head.epoch}, and one of epoch {self._epoch} was served", "type")
        await self._serve(head)
        connection.post(word(await self.keeper.on_disk(self._holds)))
        self._connection = connection
        self.log.info("connected with the syncer of epoch %d", head.epoch)
        telling = asyncio.ensure_future(self._tell_traffic())
        try:
            async for data in messages:
                if isinstance(data, str):
                    await self._hear(session, heard(data, "head"))
        finally:
            telling.cancel()

    async def _serve(self, head: HeadHello) -> None:
        """From now on an older syncer is not obeyed, whatever becomes of this process. Without that: (1) a standby
        takes over and hears what is held here, (2) this process is started again and finds the old syncer first, which
        was only frozen, (3) that one has a version merged and sent out, (4) the new one merges the same version anew.
        """
        if (head.epoch, head.run_id) != (self._epoch, self._founded):
            await self.keeper.on_disk(self.store.write_head, asdict(head))
            self._epoch, self._founded = head.epoch, head.run_id

    def _hello(self) -> ShardHello:
        run_id = self.settings.config.run_id if self.fragments else ""
        merged = any(fragment.served.version for fragment in self.fragments.values())
        founded = bool(run_id) and (merged or self._founded == run_id)
        return ShardHello(self.shard, self.shards, self.address, run_id, self.settings.founded_at, founded)

    def _holds(self) -> Holds:
        held = []
        for p, fragment in sorted(self.fragments.items()):
            _, record, _ = self.store.newest(p)
            held.append(HeldHere(p, fragment.served.version, record))
        return Holds(self.settings.founded_at, tuple(held))

    async def _hear(self, session: aiohttp.ClientSession, said: Any) -> None:
        kind = type(said)
        if kind is OpenLinks:
            self.links = set(said.links)
        elif kind is Accumulate:
            payload = self._arrived.pop((said.accepted.learner, said.accepted.incarnation, said.round), None)
            if payload is not None:  # otherwise the counts differ when it is merged, and the merge fails
                self.keeper.accumulate(said, payload)
        elif kind is Forget:
            self._drop((said.learner, said.incarnation, said.round))
        elif kind is MergeRound:
            self.keeper.merge_round(said)
        elif kind is DiscardRound:
            self.keeper.discard(said)
        elif kind is Persist:
            self.keeper.persist(said.record)
        elif kind is KeepVersion:
            if self.fragments[said.fragment].hold(said.version) is not None:
                self._kept[said.fragment, said.version] += 1
        elif kind is LetGo:
            if self._kept[said.fragment, said.version]:
                self._kept[said.fragment, said.version] -= 1
                self.fragments[said.fragment].release(said.version)
        elif kind is TakeFragments:
            await self._take(session, said)
        elif kind is HoldCut:
            self.keeper.on_disk_later(self.store.hold, said.snapshot, said.versions)
        elif kind is LetGoCut:
            self.keeper.on_disk_later(self.store.let_go, said.snapshot)
        elif kind is GoBack:
            await self._go_back(said)
        elif kind is HeadHello:
            await self._serve(said)

    async def _take(self, session: aiohttp.ClientSession, said: TakeFragments) -> None:
        settings = RunSettings.from_json(json.loads(said.settings))
        assert settings.plan is not None
        values = {p: await self._initial(session, settings.plan, p) for p in said.fragments}
        await self.keeper.found(settings, values)
        self.settings = settings
        self._size_gate(settings.plan)
        self.log.info("took %d fragments of %s", len(values), settings.config.run_id)
        self._post(await self.keeper.on_disk(self._holds))

    async def _go_back(self, said: GoBack) -> None:
        for p, version in said.versions:
            await self.keeper.go_back(p, version)
            self.log.warning("fragment %d is back at version %d: the run has ended without the next", p, version)
        self._post(await self.keeper.on_disk(self._holds))

    async def _initial(self, session: aiohttp.ClientSession, plan: FragmentPlan, p: FragmentId) -> Tensor:
        value = torch.empty(plan.numel(p))

        def accept(head: FrameHead, header: bytes) -> Any:
            if decode_header(header, {"fragment": int})["fragment"] != p:
                raise WireError(f"another fragment where {p} was asked for", "type")
            return as_bytes(value)

        parser = FrameParser(Kind.MODEL, accept)
        async with session.get(self._url(f"/v1/initial/{p}")) as answer:
            answer.raise_for_status()
            async for chunk in answer.content.iter_any():
                parser.feed(chunk)
        parser.finish()
        return value

    # ---------------------------------------------------------------------------------------------------- telling

    def tell(self, event: SyncerEvent, payload: Payload | None = None) -> None:
        """Pass an event on to the syncer. The values of a contribution wait here for its decision."""
        if self._connection is None:
            return
        if payload is not None:
            assert isinstance(event, MessageArrived) and isinstance(event.envelope.body, Contribution)
            envelope, round_id = event.envelope, event.envelope.body.round
            key = (envelope.learner, envelope.incarnation, round_id)
            for old in [k for k in self._arrived if (k[0], k[2].fragment) == (key[0], round_id.fragment)]:
                self._drop(old)
            payload.is_taken = True
            self._arrived[key] = payload
        self._post(event)  # type: ignore[arg-type]

    def _drop(self, key: Arrived) -> None:
        payload = self._arrived.pop(key, None)
        if payload is not None:
            payload.give_back()

    def _post(self, said: FromShard) -> None:
        if self._connection is not None:
            self._connection.post(word(said))

    def note_durable(self, fragment: SyncerFragment) -> None:
        if fragment.stats is not None:
            self._post(Merged(fragment.id, fragment.served.version, fragment.stats))

    def note_fenced(self, fenced: Fenced) -> None:
        self.superseded = str(fenced)
        self.over.set()

    async def _tell_traffic(self) -> None:
        while True:
            await asyncio.sleep(TRAFFIC_EVERY_S)
            self._post(Traffic(self.bytes_up, self.bytes_down))


def build_shard_app(shard: ShardProcess) -> tuple[web.Application, Bulk]:
    (shard.directory / "spool").mkdir(parents=True, exist_ok=True)
    bulk = Bulk(shard)
    app = web.Application(middlewares=[guard_of(shard)], client_max_size=MOST_MESSAGE_BYTES)
    app.router.add_put("/v1/slice", bulk.slice)
    app.router.add_put("/v1/contribution", bulk.contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", bulk.fragment)
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
    sock = bound(host, port)  # before the directory is created: a port in use must not leave one behind
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
            shard.address = advertise or written(sock)
            shard.log.info("listening on %s", shard.address)
            if on_ready is not None:
                on_ready(shard.address)
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(shard.run()), loop.create_task(shard.keeper.watch_fence())]
            if tls is not None:
                tasks.append(loop.create_task(shard.access.watch(tuple)))
            await first(stopped.wait(), shard.over.wait(), tasks[0])
            if tasks[0].done() and not tasks[0].cancelled():
                tasks[0].result()  # our bug
            if shard.superseded:
                raise Superseded(shard.superseded)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            bulk.arrivals.close()
            await shard.keeper.stop()
            shard.store.close()
