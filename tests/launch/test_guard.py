"""A guarded command leaves no process behind, whichever process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.launch.guard import GuardedCommand
from tests.launch.ray_nodes import LIMIT_S, lives, until

# Like torchrun: a child in a session of its own, which outlives its parent.
PARENT_AND_CHILD = "setsid sleep 1000 & echo $! > child; echo $$ > parent; wait"

HOLDER = """
import os, subprocess, sys
from pathlib import Path
from atoll.launch.guard import GuardedCommand
command, directory = ["sh", "-c", sys.argv[1]], Path.cwd()
if sys.argv[2] == "guarded":
    GuardedCommand(command, os.environ, directory, "log").wait()
else:
    subprocess.Popen(command, cwd=directory).wait()
"""


def read_pid(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text().strip(), f"{path.name} tells its number"))


@pytest.fixture
def pids(tmp_path) -> Iterator[list[int]]:
    """Filled by a test with processes that must not outlive it."""
    found: list[int] = []
    yield found
    for pid in filter(lives, found):
        os.kill(pid, signal.SIGKILL)


def holder(how: str, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", HOLDER, PARENT_AND_CHILD, how], cwd=directory)


def test_killed_guard_takes_command_and_children_along(tmp_path, pids):
    with holder("guarded", tmp_path) as held:
        pids += [read_pid(tmp_path / "parent"), read_pid(tmp_path / "child")]
        assert all(map(lives, pids))
        held.kill()
        held.wait(LIMIT_S)
        until(lambda: not any(map(lives, pids)), "all are gone")


def test_without_guard_children_outlive_killed_parent(tmp_path, pids):
    with holder("plain", tmp_path) as held:
        pids += [read_pid(tmp_path / "parent"), read_pid(tmp_path / "child")]
        held.kill()
        held.wait(LIMIT_S)
        assert all(map(lives, pids))


def test_killed_command_takes_its_children_along(tmp_path, pids):
    command = GuardedCommand(["sh", "-c", PARENT_AND_CHILD], os.environ, tmp_path, "log")
    parent, child = read_pid(tmp_path / "parent"), read_pid(tmp_path / "child")
    pids.append(child)
    os.kill(parent, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert not lives(child)


def test_slow_child_is_waited_for_until_notice_is_over(tmp_path, pids):
    slow = 'trap "touch bye; exit 0" TERM; echo $$ > child; while :; do sleep 0.05; done'
    command = GuardedCommand(["sh", "-c", f"setsid sh -c '{slow}'"], os.environ, tmp_path, "log")
    pids.append(read_pid(tmp_path / "child"))
    command.stop(LIMIT_S)
    assert command.wait().code == -signal.SIGTERM, "the shell around it has no trap"
    assert not lives(pids[0])
    assert (tmp_path / "bye").exists()


# As torchrun does: the child is in a session of its own, and gets its signal from its parent.
PASSES_IT_ON = """
import signal, subprocess, sys, threading
if sys.argv[1:] == ["below"]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])
    again = signal.sigtimedwait([signal.SIGTERM], 1.5)
    print("signaled once" if again is None else "signaled twice", flush=True)
    sys.exit(0)
child = subprocess.Popen([sys.executable, __file__, "below"], start_new_session=True)
def pass_it_on(*_):
    threading.Event().wait(0.3)
    child.send_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, pass_it_on)
child.wait()
"""


def test_parent_that_forwards_signals_is_the_only_one_signaled(tmp_path):
    (tmp_path / "passes.py").write_text(PASSES_IT_ON)
    command = GuardedCommand([sys.executable, "passes.py"], os.environ, tmp_path, "log")
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text(), "it is ready")
    command.stop(LIMIT_S)
    assert command.wait().code == 0
    assert (tmp_path / "log").read_text() == "ready\nsignaled once\n"


def test_output_and_environment_of_command_reach_their_places(tmp_path):
    command = GuardedCommand(["sh", "-c", "echo $WORD; pwd >&2; exit 3"], {"WORD": "hello"}, tmp_path / "new", "log")
    assert command.wait().code == 3
    assert (tmp_path / "new" / "log").read_text() == f"hello\n{tmp_path / 'new'}\n"


def test_command_that_cannot_start_says_why(tmp_path):
    with pytest.raises(OSError, match="No such file or directory: 'no-such-program'"):
        GuardedCommand(["no-such-program"], {}, tmp_path, "log").wait()
