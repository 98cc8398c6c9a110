"""A command behind a guard leaves nothing behind, whoever is killed."""

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


def told(path: Path) -> int:
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


def test_who_holds_the_command_is_killed_and_everything_goes(tmp_path, pids):
    with holder("guarded", tmp_path) as held:
        pids += [told(tmp_path / "parent"), told(tmp_path / "child")]
        assert all(map(lives, pids))
        held.kill()
        held.wait(LIMIT_S)
        until(lambda: not any(map(lives, pids)), "all are gone")


def test_without_a_guard_they_would_live_on(tmp_path, pids):
    with holder("plain", tmp_path) as held:
        pids += [told(tmp_path / "parent"), told(tmp_path / "child")]
        held.kill()
        held.wait(LIMIT_S)
        assert all(map(lives, pids))


def test_a_command_that_is_killed_takes_its_children_along(tmp_path, pids):
    command = GuardedCommand(["sh", "-c", PARENT_AND_CHILD], os.environ, tmp_path, "log")
    parent, child = told(tmp_path / "parent"), told(tmp_path / "child")
    pids.append(child)
    os.kill(parent, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert not lives(child)


def test_a_child_that_leaves_slowly_is_waited_for_until_the_notice_is_over(tmp_path, pids):
    slow = 'trap "touch bye; exit 0" TERM; echo $$ > child; while :; do sleep 0.05; done'
    command = GuardedCommand(["sh", "-c", f"setsid sh -c '{slow}'"], os.environ, tmp_path, "log")
    pids.append(told(tmp_path / "child"))
    command.stop(LIMIT_S)
    assert command.wait().code == -signal.SIGTERM, "the shell around it has no trap"
    assert not lives(pids[0])
    assert (tmp_path / "bye").exists()


# As torchrun does: the child is in a session of its own, and is told by its parent.
PASSES_IT_ON = """
import signal, subprocess, sys, threading
if sys.argv[1:] == ["below"]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])
    again = signal.sigtimedwait([signal.SIGTERM], 1.5)
    print("told once" if again is None else "told twice", flush=True)
    sys.exit(0)
child = subprocess.Popen([sys.executable, __file__, "below"], start_new_session=True)
def pass_it_on(*_):
    threading.Event().wait(0.3)
    child.send_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, pass_it_on)
child.wait()
"""


def test_who_passes_a_signal_on_is_the_only_one_to_tell(tmp_path):
    (tmp_path / "passes.py").write_text(PASSES_IT_ON)
    command = GuardedCommand([sys.executable, "passes.py"], os.environ, tmp_path, "log")
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text(), "it is ready")
    command.stop(LIMIT_S)
    assert command.wait().code == 0
    assert (tmp_path / "log").read_text() == "ready\ntold once\n"


def test_what_a_command_prints_and_is_told_goes_where_it_should(tmp_path):
    command = GuardedCommand(["sh", "-c", "echo $WORD; pwd >&2; exit 3"], {"WORD": "hello"}, tmp_path / "new", "log")
    assert command.wait().code == 3
    assert (tmp_path / "new" / "log").read_text() == f"hello\n{tmp_path / 'new'}\n"


def test_what_cannot_be_started_says_why(tmp_path):
    with pytest.raises(OSError, match="No such file or directory: 'no-such-program'"):
        GuardedCommand(["no-such-program"], {}, tmp_path, "log").wait()
