"""Server in its own thread, so that a test can drive a browser against it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from aiohttp import web

from atoll.dashboard.server import DashboardServer, RunFeed

T = TypeVar("T")


class ThreadedServer:
    """Context manager that starts and stops a server. Subclasses define the application."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server", daemon=True)
        self._runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.call(self._cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self) -> None:
        """Listen, also again after `close` on the same port."""
        self.call(self._listen())

    def close(self) -> None:
        """Close all connections and stop listening."""
        self.call(self._close())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=300)

    async def _cancel_tasks(self) -> None:
        """Cancel all tasks and close all transports, which would otherwise report a closed loop during a later test."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        transports: Any = getattr(self._loop, "_transports", {})
        for transport in list(transports.values()):  # accepted while the server was closing
            transport.abort()
        await self._run_loop_once()

    async def _listen(self) -> None:
        self._runner = web.AppRunner(self.app(), shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        if self._runner is None:
            return
        server = self._runner.server
        transports = [each.transport for each in server.connections] if server is not None else []
        await self._runner.cleanup()
        self._runner = None
        for transport in transports:
            if transport is not None:
                transport.abort()  # with unsent bytes it would wait for a browser that no longer reads
        await self._run_loop_once()

    async def _run_loop_once(self) -> None:
        """Wait for the next iteration of the loop, in which sockets are closed."""
        is_done = self._loop.create_future()
        self._loop.call_soon(is_done.set_result, None)
        await is_done


class RealDashboard(ThreadedServer):
    """Server of `atoll dash`."""

    def __init__(self, *runs: Path, token: str | None = None) -> None:
        super().__init__()
        self.runs = runs
        self.token = token

    def app(self) -> web.Application:
        return DashboardServer([RunFeed(run) for run in self.runs], self.token).app()
