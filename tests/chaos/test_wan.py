"""The wide-area network: rates, delays and losses are as configured, and close removes everything."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.chaos import netns
from atoll.chaos.netns import enter_namespace, run_command
from benchmarks.wan import Link, Wan, symmetric_link
from benchmarks.wan_router import MTU_BYTES, LinkDirection, LinkShape

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0
"""Timeout of every wait; only lost data takes that long."""

# --------------------------------------------------------------------------------------------------------------------
# One direction of a link, without packets


def make_link(rate_bit_s: float = 0.0, delay_s: float = 0.0, loss: float = 0.0, queue_s: float = 0.1) -> LinkDirection:
    link = LinkDirection("test")
    link.set_shape(LinkShape(rate_bit_s, delay_s, loss, queue_s))
    return link


def test_packets_leave_at_the_rate_and_arrive_after_the_delay():
    link = make_link(rate_bit_s=8e6, delay_s=0.5)
    assert [link.enqueue(at, 1000) for at in (10.0, 10.0, 12.0)] == pytest.approx([10.501, 10.502, 12.501])


def test_full_queue_drops_packets_until_it_has_sent():
    link = make_link(rate_bit_s=8e6, queue_s=0.02)  # 20 packets of 1000 bytes
    assert [link.enqueue(10.0, 1000) is None for _ in range(30)].count(False) == 21  # and the one on the link
    assert link.dropped == 9
    assert link.enqueue(10.5, 1000) == pytest.approx(10.501)
    assert link.counts() == {"packets": 22, "bytes": 22_000, "dropped": 9, "lost": 0}


def test_slow_link_has_a_minimum_queue():
    link = make_link(rate_bit_s=1e5, queue_s=0.0)
    assert sum(link.enqueue(10.0, MTU_BYTES) is not None for _ in range(20)) == 9


def test_lost_packets_are_drawn_by_the_seed_and_use_bandwidth():
    def lost() -> list[bool]:
        link = make_link(rate_bit_s=8e9, loss=0.1)
        return [link.enqueue(float(n), 1000) is None for n in range(2000)]

    assert lost() == lost()
    assert 150 <= sum(lost()) <= 250
    link = make_link(rate_bit_s=8e6, loss=0.5)
    arrivals = [due for due in (link.enqueue(10.0, 1000) for _ in range(80)) if due is not None]
    assert arrivals[-1] > 10.075  # although half of them were lost


def test_shorter_delay_does_not_reorder_packets():
    link = make_link(delay_s=1.0)
    first = link.enqueue(10.0, 100)
    link.set_shape(LinkShape(0.0, 0.0, 0.0, 0.1))
    assert first == 11.0
    assert link.enqueue(10.1, 100) == 11.0


@pytest.mark.parametrize("options", [{"up_bit_s": 0.0}, {"delay_s": -0.1}, {"loss": 1.0}, {"queue_s": 100.0}])
def test_invalid_link_is_refused(options):
    with pytest.raises(ValueError, match="give"):
        Link(**options)


# --------------------------------------------------------------------------------------------------------------------
# The network itself


def at_site(wan: Wan, site: int, do: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket of that site, wan by a thread that enters the namespace."""
    sockets: list[socket.socket] = []

    def work() -> None:
        if site:
            enter_namespace(wan.namespace(site))
        sockets.append(do())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return sockets[0]


def datagrams(wan: Wan, site: int) -> socket.socket:
    def bind() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
        sock.bind((wan.address(site), 0))
        sock.settimeout(TIMEOUT_S)
        return sock

    return at_site(wan, site, bind)


def read_all(sock: socket.socket) -> int:
    """Receive all waiting packets; return their number."""
    sock.settimeout(0.1)
    for count in itertools.count():
        try:
            sock.recv(2000)
        except TimeoutError:
            return count
    raise AssertionError("counting does not end")


@pytest.fixture
def wan() -> Iterator[Wan]:
    with Wan(2, seed=1) as network:
        yield network
    assert_nothing_is_left(os.getpid())


def assert_nothing_is_left(owner: int) -> None:
    assert [name for name in netns.list_namespaces() if f"-{owner}-" in name] == []
    assert f"at{owner:06x}" not in run_command("ip", "-o", "link")


@pytest.mark.needs_root
def test_one_stream_uses_the_whole_rate_of_a_link(wan):
    rate = 40e6
    wan.set_link(1, symmetric_link(rate, delay_s=0.005))
    with socket.create_server((wan.address(0), 0)) as server:
        client = at_site(wan, 1, lambda: socket.create_connection(server.getsockname()[:2], timeout=TIMEOUT_S))
        accepted, _ = server.accept()
    with client, accepted:
        accepted.settimeout(TIMEOUT_S)
        sender = threading.Thread(target=client.sendall, args=(bytes(8_000_000),))
        sender.start()
        arrived = 0
        marks: list[tuple[float, int]] = []
        while arrived < 8_000_000:
            arrived += len(accepted.recv(65536))
            if arrived > 1_500_000 + 500_000 * len(marks):  # without the slow start of TCP
                marks.append((time.monotonic(), arrived))
        sender.join()

    def carried(first: tuple[float, int], last: tuple[float, int]) -> float:
        return 8 * (last[1] - first[1]) / (last[0] - first[0]) * MTU_BYTES / 1448

    assert carried(marks[0], marks[-1]) < 1.1 * rate
    # On a busy machine the router is sometimes late.
    assert max(carried(*pair) for pair in itertools.pairwise(marks)) > 0.9 * rate
    up = wan.traffic()[1].up
    assert up.bytes >= 8_000_000
    assert up.lost == 0


@pytest.mark.needs_root
def test_packet_has_the_delays_of_both_links(wan):
    wan.set_link(1, Link(delay_s=0.04))
    wan.set_link(2, Link(delay_s=0.02))
    with datagrams(wan, 1) as one, datagrams(wan, 2) as two:
        durations = [math.inf]
        while min(durations) > 0.125 and len(durations) < 500:  # a busy machine is sometimes late
            started_at = time.monotonic()
            one.sendto(b"there", two.getsockname())
            _, sender = two.recvfrom(100)
            two.sendto(b"back", sender)
            one.recvfrom(100)
            durations.append(time.monotonic() - started_at)
    assert min(durations) >= 0.12
    assert min(durations) <= 0.125


def passed(wan: Wan) -> int:
    """Return how many packets of site 1 the router has received, including dropped ones."""
    up = wan.traffic()[1].up
    return up.packets + up.dropped


@pytest.mark.needs_root
def test_links_lose_their_share_and_full_queues_drop(wan):
    wan.set_link(1, Link(loss=0.05))
    with datagrams(wan, 1) as one, datagrams(wan, 0) as home:
        for _ in range(20):
            for _ in range(100):
                one.sendto(b"x" * 100, home.getsockname())
            read_all(home)  # send no faster than the receiver reads
        assert wan.traffic()[1].up.lost == pytest.approx(100, abs=45)
        wan.set_link(1, symmetric_link(1e6))
        for _ in range(100):
            one.sendto(b"x" * 1000, home.getsockname())  # 0.8 s of this link; its queue has 0.1
        end = time.monotonic() + TIMEOUT_S
        while wan.interface(1)["sent_packets"] > passed(wan) and time.monotonic() < end:
            read_all(home)
        assert wan.traffic()[1].up.dropped > 50
        assert wan.interface(1)["sent_packets"] == passed(wan)


@pytest.mark.needs_root
def test_site_has_no_route_but_its_link(wan):
    assert run_command("ip", "-n", wan.namespace(1).name, "route").split()[:3] == [
        wan.address(0).rpartition(".")[0] + ".0/24",
        "dev",
        "wan",
    ]
    with pytest.raises(ValueError, match="no namespace of site 3"):
        wan.namespace(3)


# --------------------------------------------------------------------------------------------------------------------
# Cleanup

OWNER = """
import sys
from benchmarks.wan import Wan
try:
    with Wan(2) as wan:
        print(wan.router_pid, flush=True)
        sys.stdin.readline()
except KeyboardInterrupt:
    sys.exit(7)
"""


class Owner:
    """Another process that owns a wide-area network."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.router = int(self.process.stdout.readline())
        self._router_file = os.pidfd_open(self.router)

    def end(self, *signals: tuple[int, signal.Signals]) -> int:
        for pid, number in signals:
            os.kill(pid, number)
        code = self.process.wait(TIMEOUT_S)
        assert select.select([self._router_file], [], [], TIMEOUT_S)[0], "the router is still there"
        os.close(self._router_file)
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            file.close()
        return code


@pytest.mark.needs_root
def test_second_close_is_ignored_and_closed_network_raises():
    wan = Wan(1)
    wan.close()
    wan.close()
    with pytest.raises(netns.NetnsError, match="is closed"):
        wan.traffic()
    assert_nothing_is_left(os.getpid())


@pytest.mark.needs_root
def test_ctrl_c_removes_all_namespaces_and_processes():
    owner = Owner()
    assert owner.end((owner.router, signal.SIGINT), (owner.process.pid, signal.SIGINT)) == 7
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_router_cleans_up_after_its_owner_is_killed():
    owner = Owner()
    assert owner.end((owner.process.pid, signal.SIGKILL)) == -signal.SIGKILL
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_stale_namespaces_are_removed_after_owner_and_router_are_killed():
    owner = Owner()
    owner.end((owner.router, signal.SIGKILL), (owner.process.pid, signal.SIGKILL))
    assert not Path(f"/proc/{owner.process.pid}").exists()
    assert f"atoll-{owner.process.pid}-1001" in netns.remove_stale()
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_killed_router_raises():
    with Wan(1) as wan:
        os.kill(wan.router_pid, signal.SIGKILL)
        with pytest.raises(netns.NetnsError, match="has ended"):
            wan.traffic()
    assert_nothing_is_left(os.getpid())
