"""The relay: every fault is measured at both ends, and close removes everything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from atoll.chaos.relay import Relay, Relays

ARRIVAL_TIMEOUT_S = 300.0
"""Timeout for bytes that must arrive."""


class Echo:
    """A server that returns all bytes that it receives."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.received = bytearray()
        self.arrived = threading.Condition()
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="echo", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    with self.arrived:
                        self.received += data
                        self.arrived.notify_all()
                    connection.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self.socket.close()

    def wait_for(self, count: int, timeout_s: float = ARRIVAL_TIMEOUT_S) -> bool:
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.received) >= count, timeout_s)


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def relay(echo):
    with contextlib.closing(Relays()) as relays:
        yield relays.open(echo.address, seed=3)


def connect(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ARRIVAL_TIMEOUT_S)


def receive(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = link.recv(count - len(data))
        assert chunk, f"the link ended after {len(data)} of {count} bytes"
        data += chunk
    return data


def is_silent(link: socket.socket, for_s: float = 0.3) -> bool:
    link.settimeout(for_s)
    try:
        return link.recv(1) == b"never"
    except TimeoutError:
        return True
    finally:
        link.settimeout(ARRIVAL_TIMEOUT_S)


def test_relay_forwards_bytes_unchanged(relay):
    with connect(relay) as link:
        sent = bytes(range(256)) * 1000
        threading.Thread(target=link.sendall, args=(sent,)).start()
        assert receive(link, len(sent)) == sent
    counts = relay.counts()
    assert (counts.up_bytes, counts.down_bytes, counts.corrupted_bytes) == (len(sent), len(sent), 0)


@pytest.mark.parametrize("direction", ["both", "up", "down"])
def test_cut_holds_only_its_direction(relay, echo, direction):
    with connect(relay) as link:
        link.sendall(b"a")
        assert receive(link, 1) == b"a"
        relay.cut(direction)
        link.sendall(b"b")
        assert echo.wait_for(2) if direction == "down" else not echo.wait_for(2, 0.3)
        assert is_silent(link)
        relay.cut(direction, is_cut=False)
        assert receive(link, 1) == b"b"  # it was held, not lost


def test_new_connection_waits_while_the_link_is_cut(relay, echo):
    relay.cut("down")
    with connect(relay) as link:
        link.sendall(b"a")
        assert not echo.wait_for(1, 0.3)  # a handshake needs both directions
        relay.cut("down", is_cut=False)
        assert receive(link, 1) == b"a"


def test_throttle_limits_bytes_per_second(relay, echo):
    relay.throttle(40_000)
    with connect(relay) as link:
        started_at = time.monotonic()
        threading.Thread(target=link.sendall, args=(bytes(20_000),)).start()
        assert echo.wait_for(20_000)
        took_s = time.monotonic() - started_at
    assert took_s >= 0.4
    delayed = relay.counts().delayed_chunks
    assert delayed >= 5
    relay.throttle(None)
    with connect(relay) as link:
        link.sendall(bytes(20_000))
        receive(link, 20_000)
    assert relay.counts().delayed_chunks == delayed


def test_delay_applies_to_each_direction(relay):
    with connect(relay) as link:
        link.sendall(b"a")
        receive(link, 1)
        relay.delay(0.2)
        started_at = time.monotonic()
        link.sendall(b"b")
        receive(link, 1)
        assert time.monotonic() - started_at >= 0.4


def test_corruption_changes_about_the_requested_share_of_bytes(relay, echo):
    relay.corrupt(1000, "up")
    with connect(relay) as link:
        sent = bytes(200_000)
        threading.Thread(target=link.sendall, args=(sent,)).start()
        back = receive(link, len(sent))
    changed = sum(byte != 0 for byte in echo.received)
    assert 100 <= changed <= 320
    assert relay.counts().corrupted_bytes == changed
    assert back == bytes(echo.received)  # the other direction is unchanged
    assert all(bin(byte).count("1") <= 1 for byte in echo.received)
    relay.corrupt(None)
    with connect(relay) as link:
        link.sendall(sent[:5000])
        assert receive(link, 5000) == sent[:5000]


def test_corruption_is_drawn_by_the_seed(echo):
    def corrupted() -> bytes:
        echo.received.clear()
        with contextlib.closing(Relays()) as relays:
            relay = relays.open(echo.address, seed=9)
            relay.corrupt(100, "up")
            with connect(relay) as link:
                link.sendall(bytes(3000))
                receive(link, 3000)
        return bytes(echo.received)

    assert corrupted() == corrupted() != bytes(3000)


def test_reset_aborts_connections_and_new_ones_work(relay):
    with connect(relay) as link:
        link.sendall(b"a")
        receive(link, 1)
        relay.reset()
        with pytest.raises((ConnectionError, AssertionError)):
            receive(link, 1)
    with connect(relay) as link:
        link.sendall(b"b")
        assert receive(link, 1) == b"b"


def test_relay_without_server_closes_the_connection(echo):
    echo.close()
    with contextlib.closing(Relays()) as relays, connect(relays.open(echo.address)) as link:  # noqa: SIM117
        with pytest.raises((ConnectionError, AssertionError)):
            receive(link, 1)


def test_close_leaves_no_thread_and_no_connection(echo):
    before = {thread.name for thread in threading.enumerate()}
    relays = Relays()
    relay = relays.open(echo.address)
    with connect(relay) as link:
        relay.cut("both")
        link.sendall(b"a")
        relays.close()
        relays.close()
        left = {thread.name for thread in threading.enumerate()} - before
        assert left <= {"echo"}, "the server thread may still run, the relay's threads may not"
        with pytest.raises(ConnectionError):
            connect(relay)
        with pytest.raises((ConnectionError, AssertionError)):
            receive(link, 1)
