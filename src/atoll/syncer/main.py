"""A syncer from its start to its end: bind, serve, write the final model, leave cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from atoll.store.fencing import TAKEOVER_TIMEOUT_S, HeartbeatWatcher, TakeoverDecision
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import FencedError
from atoll.syncer.fragment_executor import FragmentHost
from atoll.syncer.http_api import build_app
from atoll.syncer.process import SyncerProcess
from atoll.transport.auth import check_access
from atoll.transport.buffers import READ_AHEAD_BYTES
from atoll.transport.endpoint import SyncerAddress, remove_address_file, write_address_file
from atoll.transport.listener import Listener, bind_socket, format_address
from atoll.transport.tls import KeyFiles, ServerTls

TAKEOVER_POLL_INTERVAL_S = 0.25
MAX_LINGER_S = 60.0
LINGER_S = 1.0
"""After the end: for the last acknowledgements that are on their way, and as long as final values are downloaded."""


class SupersededError(Exception):
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

    `take_over`: also from a syncer that holds the directory and stands still. Raises `SupersededError` when somebody took
    over from this one. `keys`: TLS with them, and without them only this machine is served, unless `plain_text` says
    that nobody else is on the network. `sock`: from `bound`, in place of `host` and `port`.
    """
    tls = ServerTls(keys) if keys is not None else None
    check_access(host, token, tls, plain_text)
    # Bind before the store is opened: a process without its address must neither raise the epoch, which would only end
    # another syncer, nor leave a new directory behind.
    sock = sock if sock is not None else bind_socket(host, port)
    return asyncio.run(_serve(directory, settings, sock, token, on_ready, on_finished, take_over, tls, serve_end_s))


def wait_to_take_over(
    directory: Path, take_over_s: float = TAKEOVER_TIMEOUT_S, on_wait: Callable[[], None] | None = None
) -> TakeoverDecision | None:
    """Return when it is time; None when the run has come to its end meanwhile."""
    store = directory / "store"
    watcher = HeartbeatWatcher(store, take_over_s)
    while not (store / "manifest.json").exists():
        turn = watcher.poll()
        if turn is not None:
            return turn
        if on_wait is not None:
            on_wait()
            on_wait = None
        time.sleep(TAKEOVER_POLL_INTERVAL_S)
    return None


async def _serve(
    directory: Path,
    settings: RunSettings,
    sock: socket.socket,
    token: str | None,
    on_ready: Callable[[str], None] | None,
    on_finished: Callable[[SyncerProcess], None] | None,
    take_over: bool,
    tls: ServerTls | None,
    serve_end_s: float,
) -> bool:
    try:
        syncer = SyncerProcess(directory, settings, token=token, tls=tls, take_over=take_over)
    except BaseException as error:
        sock.close()
        if isinstance(error, FencedError):
            raise SupersededError(str(error)) from None
        raise
    async with http_server(syncer, build_app(syncer), sock) as (listener, stopped):
        try:
            await syncer.start()
            listener.start()
            address = format_address(sock)
            _write_address_file(syncer, SyncerAddress(address, token, syncer.store.epoch, tls.files if tls else None))
            syncer.log.info("listening on %s%s", address, _describe_access(token, tls))
            if on_ready is not None:
                on_ready(address)
            began, was_over = time.monotonic(), serve_end_s > 0 and syncer.store.read_manifest() is not None
            # Only the end is left to serve: shards that hold the final values are not waited for any longer than that.
            only_end = [asyncio.sleep(serve_end_s)] if was_over and on_finished is None else []
            await wait_for_first(stopped.wait(), syncer.run_ended.wait(), *only_end)
            _raise_failure(syncer)
            if syncer.finished and on_finished is not None:
                await syncer.gather_model()
                await asyncio.to_thread(on_finished, syncer)
            if syncer.finished:
                await _serve_end(syncer, stopped, serve_end_s - (time.monotonic() - began if was_over else 0.0))
                _raise_failure(syncer)
            return syncer.finished
        finally:
            remove_address_file(directory, syncer.store.epoch)
            await syncer.stop()


@contextlib.asynccontextmanager
async def http_server(
    host: FragmentHost, app: web.Application, sock: socket.socket
) -> AsyncIterator[tuple[Listener, asyncio.Event]]:
    """Set up the application of a syncer or shard. `Listener.start` opens its port; the event is set by SIGINT and
    SIGTERM."""
    unheard = logging.getLogger(f"{host.log.name}.http")
    unheard.setLevel(logging.CRITICAL)  # of aiohttp: whoever sends what is no HTTP would fill the log with tracebacks
    runner = web.AppRunner(app, access_log=None, logger=unheard, shutdown_timeout=2.0, read_bufsize=READ_AHEAD_BYTES)
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: whoever runs us there ends us otherwise
            # Not `loop.add_signal_handler`: the loop hears of a signal through a pipe, which is full when threads have
            # much to tell a busy loop, and then the signal is lost.
            signals[number] = signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    try:
        await runner.setup()
        assert runner.server is not None
        listener = Listener(sock, runner.server, host.access)
        host.on_authenticated = listener.mark_authenticated
        try:
            yield listener, stopped
        finally:
            await listener.stop()
    finally:
        sock.close()
        await runner.cleanup()
        for number, handler in signals.items():
            signal.signal(number, handler)


def _raise_failure(syncer: SyncerProcess) -> None:
    if syncer.failure is not None:
        raise RuntimeError(f"the syncer has failed: {syncer.failure}") from syncer.failure
    if syncer.superseded_by:
        raise SupersededError(syncer.superseded_by)


async def _serve_end(syncer: SyncerProcess, stopped: asyncio.Event, serve_end_s: float) -> None:
    """Serve the end to learners that come back; then finish what is being sent."""
    if (missing := syncer.learners_missing_end()) and serve_end_s > 0 and not stopped.is_set():
        syncer.log.warning(
            "the run is over, and learners that did not receive its end may come back: %s; serving the end for up to"
            " %g s (--serve-end); Ctrl-C stops it",
            ", ".join(map(str, missing)),
            serve_end_s,
        )
        await wait_for_first(stopped.wait(), syncer.end_delivered.wait(), asyncio.sleep(serve_end_s))
    sent, until = None, time.monotonic() + MAX_LINGER_S
    while not stopped.is_set() and (syncer.is_sending or sent != syncer.traffic) and time.monotonic() < until:
        sent = syncer.traffic
        await wait_for_first(stopped.wait(), asyncio.sleep(LINGER_S))


def _describe_access(token: str | None, tls: ServerTls | None) -> str:
    if tls is not None:
        return ", TLS, for those who have a key" if tls.requires_client_keys else ", TLS, for those who have the token"
    return "" if token else ", this machine only: no token was given"


def _write_address_file(syncer: SyncerProcess, reachable: SyncerAddress) -> None:
    try:
        write_address_file(syncer.directory, reachable)
    except OSError as error:
        syncer.log.warning("commands on this machine will not find this syncer: %s", error)


async def wait_for_first(*waits: object) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
