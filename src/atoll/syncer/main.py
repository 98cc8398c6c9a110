"""Run a syncer: bind, serve, write the final model, and stop cleanly on a signal."""

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
"""Minimum time after the end, for acknowledgements in flight. It is extended while final values are downloaded."""


class SupersededError(Exception):
    """Another syncer has taken over. Writes of this one since then do not count, and it must not be restarted."""


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
    """Serve one run until it is over.

    SIGINT and SIGTERM stop the syncer so that the run can be resumed later.

    Args:
        on_finished: Called as soon as the run is over.
        take_over: Take over from a syncer that owns the directory and has stalled.
        keys: Keys for TLS. Without them only this machine is served, except with `plain_text`.
        plain_text: Serve other machines without TLS. Use it only on a trusted network.
        serve_end_s: After the end, serve for up to this time while learners that may reconnect have not received it.
        sock: Socket from `bind_socket`, in place of `host` and `port`.

    Returns:
        True if the run is over.

    Raises:
        SupersededError: Another syncer took over from this one.
    """
    tls = ServerTls(keys) if keys is not None else None
    check_access(host, token, tls, plain_text)
    # Bind before the store is opened. A process without its address must not raise the epoch, which would only stop
    # another syncer, and must not leave a new directory behind.
    sock = sock if sock is not None else bind_socket(host, port)
    return asyncio.run(_serve(directory, settings, sock, token, on_ready, on_finished, take_over, tls, serve_end_s))


def wait_to_take_over(
    directory: Path, take_over_s: float = TAKEOVER_TIMEOUT_S, on_wait: Callable[[], None] | None = None
) -> TakeoverDecision | None:
    """Wait until this process should take over the run. Return None if the run ends meanwhile."""
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
            # Only the end is left to serve: do not wait longer than that for shards that store the final values.
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
    """Set up the application of a syncer or shard.

    `Listener.start` opens the port. SIGINT and SIGTERM set the event.
    """
    http_log = logging.getLogger(f"{host.log.name}.http")
    http_log.setLevel(logging.CRITICAL)  # clients that do not speak HTTP would fill the log with aiohttp tracebacks
    runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=2.0, read_bufsize=READ_AHEAD_BYTES)
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(
            ValueError
        ):  # signals need the main thread; in another thread the caller stops the syncer itself
            # Not `loop.add_signal_handler`: it wakes the loop through a pipe. The pipe is full when threads send many
            # wake-ups to a busy loop, and then the signal is lost.
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
    """Serve the end to learners that reconnect, then finish the transfers in flight."""
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
        return ", TLS, for clients with a key" if tls.requires_client_keys else ", TLS, for clients with the token"
    return "" if token else ", this machine only: no token was given"


def _write_address_file(syncer: SyncerProcess, address: SyncerAddress) -> None:
    try:
        write_address_file(syncer.directory, address)
    except OSError as error:
        syncer.log.warning(
            "cannot write the address file (%s); commands on this machine will not find this syncer", error
        )


async def wait_for_first(*waits: object) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
