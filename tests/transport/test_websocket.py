from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

from atoll.transport import websocket
from atoll.transport.websocket import CLOSED_REASON, WebSocketConnection
from atoll.transport.wire import WireError

LIMIT_S = 30.0
LIMIT_BYTES = 2**16

Test = Callable[[web.WebSocketResponse, asyncio.Transport, ClientWebSocketResponse], Coroutine[Any, Any, None]]


def run_with_connection(test: Test) -> None:
    """Run the test with both ends of a real connection. The end of the server sends."""

    async def run_test() -> None:
        ends: asyncio.Future[tuple[web.WebSocketResponse, asyncio.Transport]]
        ends, over = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def serve(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(timeout=5.0, max_msg_size=LIMIT_BYTES)
            await socket.prepare(request)
            assert request.transport is not None
            ends.set_result((socket, request.transport))
            await over.wait()
            return socket

        app = web.Application()
        app.router.add_get("/", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with ClientSession() as session, session.ws_connect(f"http://{host}:{port}/") as peer:
                socket, transport = await ends
                await test(socket, transport, peer)
                over.set()
        finally:
            over.set()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run_test(), LIMIT_S))


async def receive_all(peer: ClientWebSocketResponse) -> list[object]:
    """Return all messages until the connection ends, followed by its close code and reason."""
    found: list[object] = []
    while True:
        message = await peer.receive()
        if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            found.append(message.data)
        elif message.type is WSMsgType.CLOSE:
            return [*found, (message.data, message.extra)]
        else:
            return [*found, message.type]


def test_messages_arrive_in_order_before_the_close_frame():
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        connection.post("a", key="k")
        connection.post(lambda: b"b")
        connection.post("c", key="k")  # replaces the first
        connection.close("that was all")
        connection.post("too late")
        assert await receive_all(peer) == [b"b", "c", (1001, "that was all")]
        await connection.wait_closed()
        assert connection.task.done()

    run_with_connection(test)


def test_discarded_messages_are_not_sent():
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        connection.post("a")
        connection.clear_queue()
        connection.close("not yours", 1008)
        assert await receive_all(peer) == [(1008, "not yours")]

    run_with_connection(test)


def test_finish_sends_queue_and_keeps_connection_open():
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        connection.post("a")
        connection.finish()
        await connection.task
        await socket.send_str("by hand")
        assert [(await peer.receive()).data for _ in range(2)] == ["a", "by hand"]

    run_with_connection(test)


def test_error_of_a_broken_connection_ends_the_task():
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        transport.abort()
        while not connection.task.done():
            connection.post("a")
            await asyncio.wait([connection.task], timeout=0.01)
        assert connection.error is not None

    run_with_connection(test)


@pytest.mark.parametrize("with_transport", [True, False])
def test_peer_that_does_not_read_is_disconnected(monkeypatch, with_transport):
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT_S", 0.05)

    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport if with_transport else None, max_queued=100)
        while not connection.is_closing:
            connection.post(bytes(2**20))
            await asyncio.wait([connection.task], timeout=0.0)  # the peer reads nothing
        assert len(connection) == 101
        await asyncio.wait([connection.task])
        assert connection.task.cancelled()
        assert transport.is_closing() == with_transport

    run_with_connection(test)


@pytest.mark.parametrize(("reason", "ended"), [(b"", CLOSED_REASON), (b"enough", f"{CLOSED_REASON} (1008): enough")])
def test_messages_end_with_close_frame_and_reason(reason, ended):
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        await peer.send_str("a")
        await peer.send_bytes(b"b")
        closing = asyncio.ensure_future(peer.close(code=1008, message=reason))
        assert [data async for data in connection.messages()] == ["a", b"b"]
        assert connection.end_reason == ended
        connection.cancel()
        await closing

    run_with_connection(test)


def test_message_that_is_too_large_is_an_error_of_the_peer():
    async def test(socket, transport, peer):
        connection = WebSocketConnection(socket, transport)
        sending = asyncio.ensure_future(peer.send_bytes(bytes(LIMIT_BYTES + 1)))
        with pytest.raises(WireError) as found:
            async for _ in connection.messages():
                pass
        assert found.value.code == "size"
        connection.cancel()
        await sending

    run_with_connection(test)
