"""Transfers end with their link: a stalled syncer blocks nothing after a takeover."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web

from atoll.core.protocol import ConnectionOpened
from atoll.transport.http_client import FragmentClient, LearnerLink, LinkClosedError, LinkEvent


class StalledSyncer:
    """Syncer that opens links and never replies to requests for fragments."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.links: list[web.WebSocketResponse] = []

    async def link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.links.append(socket)
        async for _ in socket:
            pass
        return socket

    async def fragment(self, request: web.Request) -> web.Response:
        self.requested.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


class Owner:
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def handle_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, ConnectionOpened):
            self.opened.set()


async def run_during_download(scene: Any) -> None:
    syncer, owner = StalledSyncer(), Owner()
    app = web.Application()
    app.router.add_get("/v1/link", syncer.link)
    app.router.add_get("/v1/fragment/0/1", syncer.fragment)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    log = logging.getLogger("test")
    link = LearnerLink(f"{host}:{port}", None, log, owner)
    await link.start()
    dialing = asyncio.ensure_future(link.dial(0.0))
    try:
        await owner.opened.wait()
        download = asyncio.ensure_future(link.while_open(FragmentClient(link, None).download(0, 1, None, {-1: 4})))
        await syncer.requested.wait()
        await scene(syncer, link, download)
    finally:
        await link.close()
        dialing.cancel()
        await runner.cleanup()


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(run_during_download(scene), 30.0))


def test_download_ends_with_its_link():
    async def scene(syncer, link, download):
        link.disconnect(1)
        with pytest.raises(LinkClosedError):
            await download
        await syncer.cancelled.wait()  # the connection is closed and its request cancelled

    run(scene)


def test_cancelled_caller_cancels_transfer():
    async def scene(syncer, link, download):
        download.cancel()
        with pytest.raises(asyncio.CancelledError):
            await download
        await syncer.cancelled.wait()

    run(scene)


def test_result_or_error_of_transfer_is_returned():
    async def scene(syncer, link, download):
        async def fine() -> int:
            return 7

        async def fails() -> int:
            raise ValueError("failed")

        assert await link.while_open(fine()) == 7
        with pytest.raises(ValueError, match="failed"):
            await link.while_open(fails())
        download.cancel()

    run(scene)
