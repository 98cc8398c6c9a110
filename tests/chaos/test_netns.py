"""Network namespaces: what the kernel does to a link is measured through it, and nothing is left, whatever happens."""

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


LIMIT_S, SILENT_S = 300.0, 0.4
"""Of a wait for what arrives, and for what must not."""


class Inside:
    """A client in the namespace of learner 1 and a server on this side, with a connection between them."""

    def __init__(self, made: Namespaces) -> None:
        self.made = made
        self.server = socket.create_server((made.address, 0))
        self.namespace = made.add(1)
        self.dialled: list[socket.socket] = []
        thread = threading.Thread(target=self._dial)  # only this thread enters the namespace, and takes it along
        thread.start()
        self.taken, _ = self.server.accept()
        thread.join()
        (self.client,) = self.dialled
        for end in (self.client, self.taken):
            end.settimeout(LIMIT_S)

    def _dial(self) -> None:
        enter_namespace(self.namespace)
        self.dialled.append(socket.create_connection(self.server.getsockname()[:2], timeout=LIMIT_S))

    def passes(self, up: bool, for_s: float = LIMIT_S) -> bool:
        """Return whether what one end sends arrives at the other, waiting for so long."""
        sender, receiver = (self.client, self.taken) if up else (self.taken, self.client)
        sender.sendall(b"x")
        receiver.settimeout(for_s)
        try:
            return receiver.recv(16) != b""
        except TimeoutError:
            return False
        finally:
            receiver.settimeout(LIMIT_S)

    def close(self) -> None:
        for each in (self.client, self.taken, self.server):
            each.close()


@pytest.fixture
def inside() -> Iterator[Inside]:
    with closing(Namespaces()) as made:
        found = Inside(made)
        yield found
        found.close()
    assert_nothing_is_left(os.getpid())


def assert_nothing_is_left(owner: int) -> None:
    assert [name for name in netns.list_namespaces() if f"-{owner}-" in name] == []
    assert [address for maker, address in netns.list_addresses() if maker == owner] == []
    assert f"at{owner:06x}" not in run_command("ip", "-o", "link")


def test_a_namespace_reaches_the_syncers_address_and_nothing_else(inside):
    assert inside.passes(True)
    assert inside.passes(False)
    routes = run_command("ip", "-n", inside.namespace.name, "route")
    assert "default" not in routes


@pytest.mark.parametrize(
    ("direction", "up", "down"), [("both", False, False), ("up", False, True), ("down", True, False)]
)
def test_a_cut_swallows_its_direction(inside, direction, up, down):
    inside.made.cut(1, direction)
    assert ("blackhole" in inside.made.shape(1)[0], "blackhole" in inside.made.shape(1)[1]) == (not up, not down)
    if direction == "both":
        assert not inside.passes(True, SILENT_S)
        assert not inside.passes(False, SILENT_S)
    else:
        assert inside.passes(up)  # TCP is not told that it arrived, but it does
        assert not inside.passes(not up, SILENT_S)
    inside.made.restore(1)
    assert (inside.taken if not up else inside.client).recv(16)  # TCP sends it again


def test_a_thin_link_takes_its_time(inside):
    inside.made.throttle(1, 50_000)
    began = time.monotonic()
    threading.Thread(target=inside.client.sendall, args=(bytes(40_000),)).start()
    got = 0
    while got < 40_000:
        got += len(inside.taken.recv(65536))
    assert time.monotonic() - began > 0.5
    inside.made.restore(1)
    assert "tbf" not in " ".join(inside.made.shape(1))


def test_a_late_link_where_the_kernel_can(inside):
    if not inside.made.has_netem:
        pytest.skip("this kernel has no netem; a relay makes links late")
    inside.made.delay(1, 0.15)
    began = time.monotonic()
    assert inside.passes(True)
    assert time.monotonic() - began >= 0.15


def test_closing_twice_and_an_error_inside_leave_nothing():
    made = Namespaces()
    made.add(1)
    made.add(7)
    made.cut(7, "both")
    assert len([name for name in netns.list_namespaces() if f"-{os.getpid()}-" in name]) == 2
    made.close()
    made.close()
    assert_nothing_is_left(os.getpid())
    with pytest.raises(netns.NetnsError, match="File exists"), closing(Namespaces()) as made:
        made.add(1).with_name(made.add(1).name)  # the second one cannot be made
    assert_nothing_is_left(os.getpid())


def test_what_a_killed_tool_has_left_is_swept_away():
    text = "from atoll.chaos.netns import Namespaces; m = Namespaces(); m.add(3); print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "there\n"
        assert f"atoll-{tool.pid}-3" in netns.list_namespaces()
        assert f"atoll-{tool.pid}-3" not in netns.remove_stale()  # it lives
        tool.kill()
    assert Path(f"/proc/{tool.pid}").exists() is False
    assert f"atoll-{tool.pid}-3" in netns.remove_stale()
    assert_nothing_is_left(tool.pid)
