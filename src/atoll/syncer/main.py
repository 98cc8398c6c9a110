"""A syncer from its start to its end: bind, serve, write the final model, leave cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from atoll.store.fencing import TAKE_OVER_S, TakeoverDecision, Watcher
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import Fenced
from atoll.syncer.http_api import build_app
from atoll.syncer.process import SyncerProcess
from atoll.transport.auth import check_access
from atoll.transport.buffers import READ_BYTES
from atoll.transport.endpoint import SyncerAddress, remove_address_file, write_address_file
from atoll.transport.listener import BACKLOG, Listener
from atoll.transport.tls import KeyFiles, ServerTls

LOOK_EVERY_S = 0.25
MAX_LINGER_S = 60.0
LINGER_S = 1.0
"""After the end: for the last acknowledgements that are on their way, and as long as final values are downloaded."""


class Superseded(Exception):  # noqa: N818 - a fact about this process, not an error in anything
    """Another syncer has taken over. Nothing that this one wrote since counts, and it must not be started again."""


def serve_syncer(
    directory: Path,
    settings: RunSettings,
    host: str = "127.0.0.1",
    port: int = 7400,
    token: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_finished: Callable[[SyncerProcess], None] | None = None,
    take_over: bool = False,
    keys: KeyFiles | None = None,
    plain_text: bool = False,
    serve_end_s: float = 0.0,
    sock: socket.socket | None = None,
) -> bool:
    """Serve one run until it is over; True when it is. SIGINT and SIGTERM stop it so that it can go on later.

    `on_finished` is called as soon as the run is over. After that the end is served for up to `serve_end_s`, while
    learners are missing that may come back and have not received it.

    `take_over`: also from a syncer that holds the directory and stands still. Raises `Superseded` when somebody took
    over from this one. `keys`: TLS with them, and without them only this machine is served, unless `plain_text` says
    that nobody else is on the network. `sock`: from `bound`, in place of `host` and `port`.
    """
    tls = ServerTls(keys) if keys is not None else None
    check_access(host, token, tls, plain_text)
    return asyncio.run(
        _serve(directory, settings, host, port, token, on_ready, on_finished, take_over, tls, serve_end_s, sock)
    )


def wait_to_take_over(
    directory: Path, take_over_s: float = TAKE_OVER_S, on_wait: Callable[[], None] | None = None
) -> TakeoverDecision | None:
    """Return when it is time; None when the run has come to its end meanwhile."""
    store = directory / "store"
    watcher = Watcher(store, take_over_s)
    while not (store / "manifest.json").exists():
        turn = watcher.poll()
        if turn is not None:
            return turn
        if on_wait is not None:
            on_wait()
            on_wait = None
        time.sleep(LOOK_EVERY_S)
    return None


async def _serve(
    directory: Path,
    settings: RunSettings,
    host: str,
    port: int,
    token: str | None,
    on_ready: Callable[[str], None] | None,
    on_finished: Callable[[SyncerProcess], None] | None,
    take_over: bool,
    tls: ServerTls | None,
    serve_end_s: float,
    sock: socket.socket | None,
) -> bool:
    log = logging.getLogger("atoll.syncer")
    stopped = asyncio.Event()
    if take_over:
        # Bind before the epoch is raised: without its address this process would only have ended the other one.
        sock = bound(host, port)
    try:
        syncer = SyncerProcess(directory, settings, token=token, tls=tls, log=log, take_over=take_over)
    except BaseException as wrong:
        if sock is not None:
            sock.close()
        if isinstance(wrong, Fenced):
            raise Superseded(str(wrong)) from None
        raise
    log = syncer.log  # which names the run
    unheard = logging.getLogger("atoll.syncer.http")
    unheard.setLevel(logging.CRITICAL)  # of aiohttp: whoever sends what is no HTTP would fill the log with tracebacks
    runner = web.AppRunner(
        build_app(syncer), access_log=None, logger=unheard, shutdown_timeout=2.0, read_bufsize=READ_BYTES
    )
    signals = stop_on_signals(stopped)
    listener: Listener | None = None
    try:
        await syncer.start()
        await runner.setup()
        sock = sock if sock is not None else bound(host, port)
        assert runner.server is not None
        listener = Listener(sock, runner.server, syncer.access)
        syncer.on_proved = listener.proved
        listener.start()
        address = written(sock)
        _tell_where(directory, SyncerAddress(address, token, syncer.store.epoch, tls.files if tls else None), log)
        log.info("listening on %s%s", address, _how(token, tls))
        if on_ready is not None:
            on_ready(address)
        began, was_over = time.monotonic(), serve_end_s > 0 and syncer.store.manifest() is not None
        # Only the end is left to serve: shards that hold the final values are not waited for any longer than that.
        only_end = [asyncio.sleep(serve_end_s)] if was_over and on_finished is None else []
        await first(stopped.wait(), syncer.over.wait(), *only_end)
        _check(syncer)
        if syncer.finished and on_finished is not None:
            await syncer.gather()
            await asyncio.to_thread(on_finished, syncer)
        if syncer.finished:
            await _serve_end(syncer, stopped, serve_end_s - (time.monotonic() - began if was_over else 0.0))
            _check(syncer)
        return syncer.finished
    finally:
        remove_address_file(directory, syncer.store.epoch)
        await syncer.stop()
        if listener is not None:
            await listener.stop()
        if sock is not None:
            sock.close()
        await runner.cleanup()
        for number, handler in signals.items():
            signal.signal(number, handler)


def _check(syncer: SyncerProcess) -> None:
    if syncer.failed is not None:
        raise RuntimeError(f"the syncer has failed: {syncer.failed}") from syncer.failed
    if syncer.superseded:
        raise Superseded(syncer.superseded)


async def _serve_end(syncer: SyncerProcess, stopped: asyncio.Event, serve_end_s: float) -> None:
    """Serve the end to learners that come back; then finish what is being sent."""
    if (missing := syncer.missing_end()) and serve_end_s > 0 and not stopped.is_set():
        syncer.log.warning(
            "the run is over, and learners that did not receive its end may come back: %s; serving the end for up to"
            " %g s (--serve-end); Ctrl-C stops it",
            ", ".join(map(str, missing)),
            serve_end_s,
        )
        await first(stopped.wait(), syncer.end_delivered.wait(), asyncio.sleep(serve_end_s))
    sent, until = None, time.monotonic() + MAX_LINGER_S
    while not stopped.is_set() and (syncer.is_sending or sent != syncer.traffic) and time.monotonic() < until:
        sent = syncer.traffic
        await first(stopped.wait(), asyncio.sleep(LINGER_S))


def _how(token: str | None, tls: ServerTls | None) -> str:
    if tls is not None:
        return ", TLS, for those who have a key" if tls.asks_for_keys else ", TLS, for those who have the token"
    return "" if token else ", this machine only: no token was given"


def _tell_where(directory: Path, reachable: SyncerAddress, log: logging.Logger) -> None:
    try:
        write_address_file(directory, reachable)
    except OSError as wrong:
        log.warning("commands on this machine will not find this syncer: %s", wrong)


def stop_on_signals(stopped: asyncio.Event) -> dict[signal.Signals, Any]:
    """The handlers that were there before. Not `loop.add_signal_handler`: the loop hears of a signal through a pipe,
    which is full when threads have much to tell a busy loop, and then the signal is lost."""
    loop = asyncio.get_running_loop()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: whoever runs us there ends us otherwise
            before[number] = signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    return before


def bound(host: str, port: int, listens: bool = False) -> socket.socket:
    """Return a socket that is bound to this address.

    `listens`: reserve the port at once. Two sockets with SO_REUSEADDR may be bound to one port until one of them
    listens.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is not a port; give a number from 0 to 65535 (0: a free port)")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror}; give another --host") from None
    family, kind, _, _, where = found[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
        if listens:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    return sock


def written(sock: socket.socket) -> str:
    """Where it listens, as an address is written."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if sock.family is socket.AF_INET6 else f"{host}:{port}"


async def first(*waits: object) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
