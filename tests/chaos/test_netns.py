"""Network namespaces: link faults are measured through the link, and close removes everything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from atoll.chaos import netns
from atoll.chaos.netns import Namespaces, enter_namespace, run_command

pytestmark = pytest.mark.needs_root


ARRIVAL_TIMEOUT_S, SILENCE_S = 300.0, 0.4
"""Timeouts for bytes that must arrive, and for bytes that must not."""


class Connection:
    """A client in the namespace of learner 1 and a server on this side, with a connection between them."""

    def __init__(self, links: Namespaces) -> None:
        self.links = links
        self.server = socket.create_server((links.address, 0))
        self.namespace = links.add(1)
        self.connected: list[socket.socket] = []
        thread = threading.Thread(target=self._connect)  # only this thread enters the namespace
        thread.start()
        self.accepted, _ = self.server.accept()
        thread.join()
        (self.client,) = self.connected
        for end in (self.client, self.accepted):
            end.settimeout(ARRIVAL_TIMEOUT_S)

    def _connect(self) -> None:
        enter_namespace(self.namespace)
        self.connected.append(socket.create_connection(self.server.getsockname()[:2], timeout=ARRIVAL_TIMEOUT_S))

    def passes(self, up: bool, for_s: float = ARRIVAL_TIMEOUT_S) -> bool:
        """Return whether a byte from one end arrives at the other within this time."""
        sender, receiver = (self.client, self.accepted) if up else (self.accepted, self.client)
        sender.sendall(b"x")
        receiver.settimeout(for_s)
        try:
            return receiver.recv(16) != b""
        except TimeoutError:
            return False
        finally:
            receiver.settimeout(ARRIVAL_TIMEOUT_S)

    def close(self) -> None:
        for each in (self.client, self.accepted, self.server):
            each.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    with closing(Namespaces()) as links:
        opened = Connection(links)
        yield opened
        opened.close()
    assert_nothing_is_left(os.getpid())


def assert_nothing_is_left(owner: int) -> None:
    assert [name for name in netns.list_namespaces() if f"-{owner}-" in name] == []
    assert [address for pid, address in netns.list_addresses() if pid == owner] == []
    assert f"at{owner:06x}" not in run_command("ip", "-o", "link")


def test_namespace_reaches_only_the_syncer_address(connection):
    assert connection.passes(True)
    assert connection.passes(False)
    routes = run_command("ip", "-n", connection.namespace.name, "route")
    assert "default" not in routes


@pytest.mark.parametrize(
    ("direction", "up", "down"), [("both", False, False), ("up", False, True), ("down", True, False)]
)
def test_cut_drops_packets_of_its_direction_only(connection, direction, up, down):
    connection.links.cut(1, direction)
    assert ("blackhole" in connection.links.queues(1)[0], "blackhole" in connection.links.queues(1)[1]) == (
        not up,
        not down,
    )
    if direction == "both":
        assert not connection.passes(True, SILENCE_S)
        assert not connection.passes(False, SILENCE_S)
    else:
        assert connection.passes(up)  # the byte arrives although its ACK does not
        assert not connection.passes(not up, SILENCE_S)
    connection.links.restore(1)
    assert (connection.accepted if not up else connection.client).recv(16)  # TCP resends it


def test_throttled_link_limits_rate(connection):
    connection.links.throttle(1, 50_000)
    started_at = time.monotonic()
    threading.Thread(target=connection.client.sendall, args=(bytes(40_000),)).start()
    received = 0
    while received < 40_000:
        received += len(connection.accepted.recv(65536))
    assert time.monotonic() - started_at > 0.5
    connection.links.restore(1)
    assert "tbf" not in " ".join(connection.links.queues(1))


def test_delayed_link_adds_latency(connection):
    if not connection.links.has_netem:
        pytest.skip("this kernel has no netem; delays use a relay")
    connection.links.delay(1, 0.15)
    started_at = time.monotonic()
    assert connection.passes(True)
    assert time.monotonic() - started_at >= 0.15


def test_namespaces_are_removed_after_second_close_and_error():
    links = Namespaces()
    links.add(1)
    links.add(7)
    links.cut(7, "both")
    assert len([name for name in netns.list_namespaces() if f"-{os.getpid()}-" in name]) == 2
    links.close()
    links.close()
    assert_nothing_is_left(os.getpid())
    with pytest.raises(netns.NetnsError, match="File exists"), closing(Namespaces()) as links:
        links.add(1).with_name(links.add(1).name)  # the second one cannot be links
    assert_nothing_is_left(os.getpid())


def test_namespaces_of_killed_process_are_removed():
    text = "from atoll.chaos.netns import Namespaces; m = Namespaces(); m.add(3); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "ready\n"
        assert f"atoll-{tool.pid}-3" in netns.list_namespaces()
        assert f"atoll-{tool.pid}-3" not in netns.remove_stale()  # its owner runs
        tool.kill()
    assert Path(f"/proc/{tool.pid}").exists() is False
    assert f"atoll-{tool.pid}-3" in netns.remove_stale()
    assert_nothing_is_left(tool.pid)
