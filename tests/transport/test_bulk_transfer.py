"""Transfers end with their link: a stalled syncer blocks nothing after a takeover."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web

from atoll.core.protocol import ConnectionOpened
from atoll.transport.http_client import FragmentClient, LearnerLink, LinkClosedError, LinkEvent


class Standing:
    """A syncer that opens links, takes requests for fragments, and never answers those."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()
        self.links: list[web.WebSocketResponse] = []

    async def link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.links.append(socket)
        async for _ in socket:
            pass
        return socket

    async def fragment(self, request: web.Request) -> web.Response:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError


class Owner:
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def handle_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, ConnectionOpened):
            self.opened.set()


async def with_a_fetch_under_way(then: Any) -> None:
    standing, owner = Standing(), Owner()
    app = web.Application()
    app.router.add_get("/v1/link", standing.link)
    app.router.add_get("/v1/fragment/0/1", standing.fragment)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    log = logging.getLogger("test")
    link = LearnerLink(f"{host}:{port}", None, log, owner)
    await link.start()
    dialled = asyncio.ensure_future(link.dial(0.0))
    try:
        await owner.opened.wait()
        fetch = asyncio.ensure_future(link.while_open(FragmentClient(link, None).download(0, 1, None, {-1: 4})))
        await standing.asked.wait()
        await then(standing, link, fetch)
    finally:
        await link.close()
        dialled.cancel()
        await runner.cleanup()


def run(then: Any) -> None:
    asyncio.run(asyncio.wait_for(with_a_fetch_under_way(then), 30.0))


def test_download_ends_with_its_link():
    async def then(standing, link, fetch):
        link.disconnect(1)
        with pytest.raises(LinkClosedError):
            await fetch
        await standing.given_up.wait()  # the connection is closed, and nothing of it is left

    run(then)


def test_cancelled_caller_cancels_transfer():
    async def then(standing, link, fetch):
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await standing.given_up.wait()

    run(then)


def test_result_or_error_of_transfer_is_returned():
    async def then(standing, link, fetch):
        async def fine() -> int:
            return 7

        async def wrong() -> int:
            raise ValueError("wrong")

        assert await link.while_open(fine()) == 7
        with pytest.raises(ValueError, match="wrong"):
            await link.while_open(wrong())
        fetch.cancel()

    run(then)
