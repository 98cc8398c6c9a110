"""A shard from its start to its end: bind, serve learners, obey the syncer, leave cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from atoll.syncer.auth_middleware import guard_of
from atoll.syncer.fragment_endpoints import Bulk
from atoll.syncer.main import Superseded, bound, first, stop_on_signals, written
from atoll.syncer.shards.process import ShardProcess
from atoll.transport.auth import check_access
from atoll.transport.buffers import READ_BYTES
from atoll.transport.endpoint import Endpoint
from atoll.transport.listener import Listener
from atoll.transport.tls import KeyFiles, ServerTls
from atoll.transport.wire import MOST_MESSAGE_BYTES


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
    asyncio.run(_serve(directory, shard, shards, head, host, port, token, advertise, on_ready, tls))


async def _serve(
    directory: Path,
    number: int,
    shards: int,
    head: Endpoint,
    host: str,
    port: int,
    token: str | None,
    advertise: str | None,
    on_ready: Callable[[str], None] | None,
    tls: ServerTls | None,
) -> None:
    stopped = asyncio.Event()
    sock = bound(host, port)  # before the directory is created: a port in use must not leave one behind
    try:
        shard = ShardProcess(directory, number, shards, head.addresses, token=token, tls=tls, client_tls=head.tls)
    except BaseException:
        sock.close()
        raise
    unheard = logging.getLogger("atoll.shard.http")
    unheard.setLevel(logging.CRITICAL)  # of aiohttp, as in `serving`
    app, bulk = build_shard_app(shard)
    runner = web.AppRunner(app, access_log=None, logger=unheard, shutdown_timeout=2.0, read_bufsize=READ_BYTES)
    signals = stop_on_signals(stopped)
    listener: Listener | None = None
    tasks: list[asyncio.Task[None]] = []
    try:
        await shard.start()
        await runner.setup()
        assert runner.server is not None
        listener = Listener(sock, runner.server, shard.access)
        shard.on_proved = listener.proved
        listener.start()
        shard.address = advertise or written(sock)
        shard.log.info("listening on %s", shard.address)
        if on_ready is not None:
            on_ready(shard.address)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(shard.run()), loop.create_task(shard.watch_fence())]
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
        await shard.stop()
        if listener is not None:
            await listener.stop()
        sock.close()
        await runner.cleanup()
        for each, handler in signals.items():
            with contextlib.suppress(ValueError):
                signal.signal(each, handler)
