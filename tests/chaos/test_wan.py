"""The wide network: rates, delays and losses are those that were set, and nothing is left, whatever happens."""

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
LIMIT_S = 300.0
"""Of every wait: only what is lost takes so long."""

# --------------------------------------------------------------------------------------------------------------------
# One direction of a link, without packets


def shaped(rate_bit_s: float = 0.0, delay_s: float = 0.0, loss: float = 0.0, queue_s: float = 0.1) -> LinkDirection:
    made = LinkDirection("test")
    made.set_link(LinkShape(rate_bit_s, delay_s, loss, queue_s))
    return made


def test_packets_leave_one_after_the_other_at_the_rate_and_arrive_after_the_delay():
    link = shaped(rate_bit_s=8e6, delay_s=0.5)
    assert [link.enqueue(at, 1000) for at in (10.0, 10.0, 12.0)] == pytest.approx([10.501, 10.502, 12.501])


def test_a_full_queue_drops_what_comes_and_has_room_again_when_it_has_sent():
    link = shaped(rate_bit_s=8e6, queue_s=0.02)  # of 20 packets of 1000 bytes
    assert [link.enqueue(10.0, 1000) is None for _ in range(30)].count(False) == 21  # and one that it sends
    assert link.dropped == 9
    assert link.enqueue(10.5, 1000) == pytest.approx(10.501)
    assert link.counts() == {"packets": 22, "bytes": 22_000, "dropped": 9, "lost": 0}


def test_a_thin_link_has_a_queue_of_some_packets_however_short_it_is_asked_to_be():
    link = shaped(rate_bit_s=1e5, queue_s=0.0)
    assert sum(link.enqueue(10.0, MTU_BYTES) is not None for _ in range(20)) == 9


def test_losses_are_drawn_by_the_seed_and_take_their_time_on_the_link():
    def lost() -> list[bool]:
        link = shaped(rate_bit_s=8e9, loss=0.1)
        return [link.enqueue(float(n), 1000) is None for n in range(2000)]

    assert lost() == lost()
    assert 150 <= sum(lost()) <= 250
    link = shaped(rate_bit_s=8e6, loss=0.5)
    arrivals = [due for due in (link.enqueue(10.0, 1000) for _ in range(80)) if due is not None]
    assert arrivals[-1] > 10.075  # though half of them never came


def test_no_packet_overtakes_another_when_the_delay_becomes_shorter():
    link = shaped(delay_s=1.0)
    first = link.enqueue(10.0, 100)
    link.shape(LinkShape(0.0, 0.0, 0.0, 0.1))
    assert first == 11.0
    assert link.enqueue(10.1, 100) == 11.0


@pytest.mark.parametrize("wrong", [{"up_bit_s": 0.0}, {"delay_s": -0.1}, {"loss": 1.0}, {"queue_s": 100.0}])
def test_what_no_link_can_be_is_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        Link(**wrong)


# --------------------------------------------------------------------------------------------------------------------
# The network itself


def at_site(made: Wan, site: int, do: Callable[[], socket.socket]) -> socket.socket:
    """A socket of that site: only a thread of its own enters the namespace, and takes it along."""
    found: list[socket.socket] = []

    def work() -> None:
        if site:
            enter_namespace(made.namespace(site))
        found.append(do())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def datagrams(made: Wan, site: int) -> socket.socket:
    def bind() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
        sock.bind((made.address(site), 0))
        sock.settimeout(LIMIT_S)
        return sock

    return at_site(made, site, bind)


def read_all(sock: socket.socket) -> int:
    """Until nothing more comes: how many."""
    sock.settimeout(0.1)
    for count in itertools.count():
        try:
            sock.recv(2000)
        except TimeoutError:
            return count
    raise AssertionError("counting does not end")


@pytest.fixture
def made() -> Iterator[Wan]:
    with Wan(2, seed=1) as found:
        yield found
    assert_nothing_is_left(os.getpid())


def assert_nothing_is_left(owner: int) -> None:
    assert [name for name in netns.list_namespaces() if f"-{owner}-" in name] == []
    assert f"at{owner:06x}" not in run_command("ip", "-o", "link")


@pytest.mark.needs_root
def test_one_stream_fills_a_link_and_no_more(made):
    rate = 40e6
    made.set_link(1, symmetric_link(rate, delay_s=0.005))
    with socket.create_server((made.address(0), 0)) as server:
        client = at_site(made, 1, lambda: socket.create_connection(server.getsockname()[:2], timeout=LIMIT_S))
        taken, _ = server.accept()
    with client, taken:
        taken.settimeout(LIMIT_S)
        sender = threading.Thread(target=client.sendall, args=(bytes(8_000_000),))
        sender.start()
        arrived = 0
        marks: list[tuple[float, int]] = []
        while arrived < 8_000_000:
            arrived += len(taken.recv(65536))
            if arrived > 1_500_000 + 500_000 * len(marks):  # without the start, in which TCP looks for the rate
                marks.append((time.monotonic(), arrived))
        sender.join()

    def carried(first: tuple[float, int], last: tuple[float, int]) -> float:
        return 8 * (last[1] - first[1]) / (last[0] - first[0]) * MTU_BYTES / 1448

    assert carried(marks[0], marks[-1]) < 1.1 * rate
    # On a machine with other work the router is late at times, and not always.
    assert max(carried(*pair) for pair in itertools.pairwise(marks)) > 0.9 * rate
    up = made.counts()[1].up
    assert up.bytes >= 8_000_000
    assert up.lost == 0


@pytest.mark.needs_root
def test_a_packet_takes_the_delays_of_both_links(made):
    made.set_link(1, Link(delay_s=0.04))
    made.set_link(2, Link(delay_s=0.02))
    with datagrams(made, 1) as one, datagrams(made, 2) as two:
        took = [math.inf]
        while min(took) > 0.125 and len(took) < 500:  # a machine with other work is late at times, and not always
            began = time.monotonic()
            one.sendto(b"there", two.getsockname())
            _, sender = two.recvfrom(100)
            two.sendto(b"back", sender)
            one.recvfrom(100)
            took.append(time.monotonic() - began)
    assert min(took) >= 0.12
    assert min(took) <= 0.125


def passed(made: Wan) -> int:
    """Return how many packets of site 1 the router has taken, also those that its queue dropped."""
    up = made.traffic()[1].up
    return up.packets + up.dropped


@pytest.mark.needs_root
def test_links_lose_their_share_and_queues_drop_what_is_too_much(made):
    made.set_link(1, Link(loss=0.05))
    with datagrams(made, 1) as one, datagrams(made, 0) as home:
        for _ in range(20):
            for _ in range(100):
                one.sendto(b"x" * 100, home.getsockname())
            read_all(home)  # nobody is faster than the receiver reads
        assert made.counts()[1].up.lost == pytest.approx(100, abs=45)
        made.set_link(1, symmetric_link(1e6))
        for _ in range(100):
            one.sendto(b"x" * 1000, home.getsockname())  # 0.8 s of this link; its queue has 0.1
        end = time.monotonic() + LIMIT_S
        while made.interface(1)["sent_packets"] > passed(made) and time.monotonic() < end:
            read_all(home)
        assert made.counts()[1].up.dropped > 50
        assert made.interface(1)["sent_packets"] == passed(made)


@pytest.mark.needs_root
def test_a_site_has_no_way_out_but_its_link(made):
    assert run_command("ip", "-n", made.namespace(1).name, "route").split()[:3] == [
        made.address(0).rpartition(".")[0] + ".0/24",
        "dev",
        "wan",
    ]
    with pytest.raises(ValueError, match="no namespace of site 3"):
        made.namespace(3)


# --------------------------------------------------------------------------------------------------------------------
# The end

OWNER = """
import sys
from benchmarks.wan import Wan
try:
    with Wan(2) as made:
        print(made.router_pid, flush=True)
        sys.stdin.readline()
except KeyboardInterrupt:
    sys.exit(7)
"""


class Owner:
    """Another process with a wide network."""

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
        code = self.process.wait(LIMIT_S)
        assert select.select([self._router_file], [], [], LIMIT_S)[0], "the router is still there"
        os.close(self._router_file)
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            file.close()
        return code


@pytest.mark.needs_root
def test_closing_twice_is_no_mistake_and_a_closed_network_says_so():
    made = Wan(1)
    made.close()
    made.close()
    with pytest.raises(netns.NetnsError, match="is closed"):
        made.traffic()
    assert_nothing_is_left(os.getpid())


@pytest.mark.needs_root
def test_ctrl_c_removes_everything_and_leaves_no_process():
    owner = Owner()
    assert owner.end((owner.router, signal.SIGINT), (owner.process.pid, signal.SIGINT)) == 7
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_the_router_of_an_owner_that_was_killed_ends_and_cleans_up():
    owner = Owner()
    assert owner.end((owner.process.pid, signal.SIGKILL)) == -signal.SIGKILL
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_what_is_left_when_owner_and_router_were_killed_is_swept_away():
    owner = Owner()
    owner.end((owner.router, signal.SIGKILL), (owner.process.pid, signal.SIGKILL))
    assert not Path(f"/proc/{owner.process.pid}").exists()
    assert f"atoll-{owner.process.pid}-1001" in netns.remove_stale()
    assert_nothing_is_left(owner.process.pid)


@pytest.mark.needs_root
def test_a_router_that_was_killed_is_noticed():
    with Wan(1) as made:
        os.kill(made.router_pid, signal.SIGKILL)
        with pytest.raises(netns.NetnsError, match="has ended"):
            made.traffic()
    assert_nothing_is_left(os.getpid())
