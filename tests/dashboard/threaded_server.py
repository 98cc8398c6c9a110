"""A server in a thread of its own, so that a test can drive a browser against it."""

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
    """`with` starts and ends it. Subclasses say what is served."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served", daemon=True)
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
        self.call(self._quiet())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self) -> None:
        """Also after `close`, on the same port: the server is back."""
        self.call(self._listen())

    def close(self) -> None:
        """Everybody is cut off and nobody is answered."""
        self.call(self._close())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=300)

    async def _quiet(self) -> None:
        """Nothing is left that would complain of a closed loop, in the middle of some later test."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        left: Any = getattr(self._loop, "_transports", {})
        for transport in list(left.values()):  # taken while the server was being closed: nobody else knows of it
            transport.abort()
        await self._turn()

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
                transport.abort()  # one with unsent bytes would otherwise wait for a browser that no longer reads
        await self._turn()

    async def _turn(self) -> None:
        """Sockets are closed in the loop's next turn."""
        turned = self._loop.create_future()
        self._loop.call_soon(turned.set_result, None)
        await turned


class RealDashboard(ThreadedServer):
    """What `atoll dash` serves."""

    def __init__(self, *runs: Path, token: str | None = None) -> None:
        super().__init__()
        self.runs = runs
        self.token = token

    def app(self) -> web.Application:
        return DashboardServer([RunFeed(run) for run in self.runs], self.token).app()
