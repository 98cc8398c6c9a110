"""The port itself: who waits at it is heard, however many knock beside it. One event loop, no other process."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from atoll.net import listening
from atoll.net.access import Access
from atoll.net.listening import MOST_UNPROVEN, Listener
from atoll.net.serving import bound
from tests.net.runs import LIMIT_S

KNOCKS = listening.BACKLOG - 2


class Door(asyncio.Protocol):
    """Lets in whoever says a word, answers it and hangs up."""

    def __init__(self, proved: Callable[[asyncio.BaseTransport], None]) -> None:
        self.proved = proved

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.proved(self.transport)
        self.transport.write(b"come in")
        self.transport.close()


def knocked(stack: ExitStack, place: tuple[str, int], said: bytes = b"") -> socket.socket:
    sock = stack.enter_context(socket.create_connection(place, timeout=LIMIT_S))
    sock.sendall(said)
    return sock


def heard_first_of_many() -> tuple[bytes, Counter[str]]:
    """Somebody speaks, then so many knock and say nothing that the port is full of them; only now it is opened."""

    async def opened() -> tuple[bytes, Counter[str]]:
        refused: Counter[str] = Counter()
        sock = bound("127.0.0.1", 0)
        sock.listen(listening.BACKLOG)
        listener = Listener(sock, lambda: Door(listener.proved), Access(None, None, refused))
        with ExitStack() as stack:
            honest = knocked(stack, sock.getsockname(), b"let me in")
            for _ in range(KNOCKS):
                knocked(stack, sock.getsockname())
            honest.setblocking(False)
            listener.start()
            try:
                async with asyncio.timeout(LIMIT_S):
                    answer = await asyncio.get_running_loop().sock_recv(honest, 100)
                    while refused["unfinished"] < KNOCKS - MOST_UNPROVEN:
                        turn = asyncio.Event()
                        asyncio.get_running_loop().call_later(0.01, turn.set)
                        await turn.wait()
                return answer, refused
            finally:
                await listener.stop()

    return asyncio.run(opened())


def test_who_speaks_is_heard_although_more_than_there_is_room_for_come_after_it():
    answer, refused = heard_first_of_many()
    assert answer == b"come in"
    assert refused == {"unfinished": KNOCKS - MOST_UNPROVEN}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that nobody closes
def test_if_all_were_taken_at_once_it_would_be_dropped_unheard(monkeypatch):
    monkeypatch.setattr(listening, "AT_ONCE", 10**9)
    with pytest.raises(ConnectionResetError):
        heard_first_of_many()
