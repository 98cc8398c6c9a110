"""The listener: a speaking connection is accepted during a flood of silent ones. One event loop, no other process."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from atoll.transport import listener
from atoll.transport.auth import AccessControl
from atoll.transport.listener import MAX_PENDING, Listener, bind_socket
from tests.learner.runs import LIMIT_S

CLIENTS = listener.BACKLOG - 2
FIRST, REST = b"let me", b" in\n"


class GreetingProtocol(asyncio.Protocol):
    """Authenticate a client that sends the whole request, reply, and close the connection."""

    def __init__(self, mark_authenticated: Callable[[asyncio.BaseTransport], None], has_spoken: asyncio.Event) -> None:
        self.mark_authenticated = mark_authenticated
        self.has_spoken = has_spoken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.has_spoken.set()
        if data.endswith(b"\n"):
            self.mark_authenticated(self.transport)
            self.transport.write(b"come in")
            self.transport.close()


class Port:
    """A listener that is not open yet, and connections to it from one address."""

    def __init__(self, stack: ExitStack) -> None:
        self.refused: Counter[str] = Counter()
        self.has_spoken = asyncio.Event()
        self._stack = stack
        self._sock = bind_socket("127.0.0.1", 0)
        self._sock.listen(listener.BACKLOG)
        self.listener = Listener(
            self._sock,
            lambda: GreetingProtocol(self.listener.mark_authenticated, self.has_spoken),
            AccessControl(None, None, self.refused),
        )

    def connect(self) -> socket.socket:
        sock = self._stack.enter_context(socket.create_connection(self._sock.getsockname(), timeout=LIMIT_S))
        sock.setblocking(False)
        return sock

    async def all_but_a_few_are_dropped(self) -> None:
        while self.refused["unfinished"] < CLIENTS - MAX_PENDING:
            timer = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, timer.set)
            await timer.wait()


def run_scene(scene: Callable[[Port], Awaitable[None]], planted: Callable[[Port], None] = lambda _: None) -> None:
    async def test() -> None:
        with ExitStack() as stack:
            port = Port(stack)
            planted(port)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await scene(port)
            finally:
                await port.listener.stop()

    asyncio.run(test())


async def speak_before_many(port: Port) -> None:
    """One client speaks, then silent ones fill the backlog, and only then the listener starts."""
    honest = port.connect()
    honest.sendall(FIRST + REST)
    for _ in range(CLIENTS):
        port.connect()
    port.listener.start()
    assert await asyncio.get_running_loop().sock_recv(honest, 100) == b"come in"
    await port.all_but_a_few_are_dropped()


async def speak_slowly_among_many(port: Port) -> None:
    """One client has sent a part of its request when many silent ones connect from the same address."""
    port.listener.start()
    honest = port.connect()
    honest.sendall(FIRST)
    await port.has_spoken.wait()
    for _ in range(CLIENTS):
        port.connect()
    await port.all_but_a_few_are_dropped()
    honest.sendall(REST)
    assert await asyncio.get_running_loop().sock_recv(honest, 100) == b"come in"


def test_speaking_connection_survives_flood():
    run_scene(speak_before_many)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that are not closed
def test_without_accept_limit_flood_drops_speaking_connection(monkeypatch):
    monkeypatch.setattr(listener, "MAX_ACCEPTS_PER_ITERATION", 10**9)
    with pytest.raises(ConnectionResetError):
        run_scene(speak_before_many)


def test_silent_connections_do_not_displace_speaking_one():
    run_scene(speak_slowly_among_many)


def test_with_one_pool_silent_connections_displace_speaking_one():
    def use_one_pool(port: Port) -> None:
        port.listener._with_first_byte = port.listener._without_first_byte

    with pytest.raises((ConnectionError, AssertionError)):
        run_scene(speak_slowly_among_many, use_one_pool)
