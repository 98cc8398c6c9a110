"""The relay: each thing that it can do to a link is measured at both ends, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from atoll.chaos.relay import Relay, Relays

LIMIT_S = 300.0
"""Of a wait for bytes that arrive: only a relay that lost them takes so long."""


class Echo:
    """Sends back what it gets, until told to swallow it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.got = bytearray()
        self.arrived = threading.Condition()
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(taken,), name="echo", daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with taken:
            try:
                while data := taken.recv(65536):
                    with self.arrived:
                        self.got += data
                        self.arrived.notify_all()
                    taken.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self.socket.close()

    def wait_for(self, count: int, timeout_s: float = LIMIT_S) -> bool:
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.got) >= count, timeout_s)


@pytest.fixture
def echo():
    served = Echo()
    yield served
    served.close()


@pytest.fixture
def relay(echo):
    with contextlib.closing(Relays()) as relays:
        yield relays.open(echo.address, seed=3)


def dialled(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def received(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = link.recv(count - len(data))
        assert piece, f"the link ended after {len(data)} of {count} bytes"
        data += piece
    return data


def is_silent(link: socket.socket, for_s: float = 0.3) -> bool:
    link.settimeout(for_s)
    try:
        return link.recv(1) == b"never"
    except TimeoutError:
        return True
    finally:
        link.settimeout(LIMIT_S)


def test_what_is_sent_arrives_as_it_is(relay):
    with dialled(relay) as link:
        sent = bytes(range(256)) * 1000
        threading.Thread(target=link.sendall, args=(sent,)).start()
        assert received(link, len(sent)) == sent
    counts = relay.counts()
    assert (counts.up_bytes, counts.down_bytes, counts.corrupted_bytes) == (len(sent), len(sent), 0)


@pytest.mark.parametrize("direction", ["both", "up", "down"])
def test_a_cut_holds_its_direction_and_only_that(relay, echo, direction):
    with dialled(relay) as link:
        link.sendall(b"a")
        assert received(link, 1) == b"a"
        relay.cut(direction)
        link.sendall(b"b")
        assert echo.wait_for(2) if direction == "down" else not echo.wait_for(2, 0.3)
        assert is_silent(link)
        relay.cut(direction, is_cut=False)
        assert received(link, 1) == b"b"  # it was held, not lost


def test_a_new_connection_waits_while_the_link_is_cut(relay, echo):
    relay.cut("down")
    with dialled(relay) as link:
        link.sendall(b"a")
        assert not echo.wait_for(1, 0.3)  # a handshake needs both directions
        relay.cut("down", is_cut=False)
        assert received(link, 1) == b"a"


def test_a_thin_link_carries_so_many_bytes_per_second(relay, echo):
    relay.throttle(40_000)
    with dialled(relay) as link:
        began = time.monotonic()
        threading.Thread(target=link.sendall, args=(bytes(20_000),)).start()
        assert echo.wait_for(20_000)
        took_s = time.monotonic() - began
    assert took_s >= 0.4
    slowed = relay.counts().delayed_chunks
    assert slowed >= 5
    relay.throttle(None)
    with dialled(relay) as link:
        link.sendall(bytes(20_000))
        received(link, 20_000)
    assert relay.counts().delayed_chunks == slowed


def test_a_late_link_is_late_in_each_direction(relay):
    with dialled(relay) as link:
        link.sendall(b"a")
        received(link, 1)
        relay.delay(0.2)
        began = time.monotonic()
        link.sendall(b"b")
        received(link, 1)
        assert time.monotonic() - began >= 0.4


def test_damage_changes_about_as_many_bytes_as_asked(relay, echo):
    relay.corrupt(1000, "up")
    with dialled(relay) as link:
        sent = bytes(200_000)
        threading.Thread(target=link.sendall, args=(sent,)).start()
        back = received(link, len(sent))
    wrong = sum(byte != 0 for byte in echo.got)
    assert 100 <= wrong <= 320
    assert relay.counts().corrupted_bytes == wrong
    assert back == bytes(echo.got)  # on the way back nothing was changed
    assert all(bin(byte).count("1") <= 1 for byte in echo.got)
    relay.corrupt(None)
    with dialled(relay) as link:
        link.sendall(sent[:5000])
        assert received(link, 5000) == sent[:5000]


def test_damage_is_drawn_by_the_seed(echo):
    def damaged() -> bytes:
        echo.got.clear()
        with contextlib.closing(Relays()) as relays:
            relay = relays.open(echo.address, seed=9)
            relay.corrupt(100, "up")
            with dialled(relay) as link:
                link.sendall(bytes(3000))
                received(link, 3000)
        return bytes(echo.got)

    assert damaged() == damaged() != bytes(3000)


def test_a_reset_ends_connections_and_new_ones_work(relay):
    with dialled(relay) as link:
        link.sendall(b"a")
        received(link, 1)
        relay.reset()
        with pytest.raises((ConnectionError, AssertionError)):
            received(link, 1)
    with dialled(relay) as link:
        link.sendall(b"b")
        assert received(link, 1) == b"b"


def test_nobody_behind_it_ends_the_connection(echo):
    echo.close()
    with contextlib.closing(Relays()) as relays, dialled(relays.open(echo.address)) as link:  # noqa: SIM117
        with pytest.raises((ConnectionError, AssertionError)):
            received(link, 1)


def test_nothing_is_left_of_it(echo):
    before = {thread.name for thread in threading.enumerate()}
    relays = Relays()
    relay = relays.open(echo.address)
    with dialled(relay) as link:
        relay.cut("both")
        link.sendall(b"a")
        relays.close()
        relays.close()
        left = {thread.name for thread in threading.enumerate()} - before
        assert left <= {"echo"}, "the other end may not have noticed yet; of the relay nothing is left"
        with pytest.raises(ConnectionError):
            dialled(relay)
        with pytest.raises((ConnectionError, AssertionError)):
            received(link, 1)
