"""Processes that somebody else has started: which one it is, whether it is there, and how it is told to end.

The number of a process is given to another one when it is gone. With the moment of its birth it is one process for
ever, and nothing here signals a number without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MARK = "ATOLL_KEPT_IN"
"""In the environment of a unit's processes, and so of whatever they start, in whichever session."""

LOOK_S = 0.1
_PROC = Path("/proc")
_GONE = ("Z", "X")  # dead, whoever has to take note of it


class Process(NamedTuple):
    pid: int
    born: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "born": self.born}

    @classmethod
    def from_json(cls, told: Any) -> Process | None:
        return cls(int(told["pid"]), str(told["born"])) if told else None


def process(pid: int) -> Process | None:
    """None: there is none, or it has ended."""
    if not _PROC.joinpath("self").exists():
        said = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        state, _, born = said.strip().partition(" ")
        return Process(pid, born.strip()) if born and not state.startswith(_GONE) else None
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return Process(pid, f"{_boot()}:{fields[19]}") if fields[0] not in _GONE else None


def is_alive(known: Process) -> bool:
    return process(known.pid) == known


def tell(known: Process, number: int) -> bool:
    """Signal it; False where it is gone. The number cannot change hands between the look and the signal where the
    system has handles for processes."""
    try:
        handle = os.pidfd_open(known.pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return False
    try:
        if not is_alive(known):
            return False
        with suppress(ProcessLookupError):
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(known.pid, number)
            return True
        return False
    finally:
        if handle is not None:
            os.close(handle)


def marked(mark: str) -> list[Process]:
    """Everything that a unit has started and that is still there, also in sessions of its own, as ranks of torchrun
    are. Where there is no /proc nobody is found."""
    word = f"{MARK}={mark}".encode()
    found: list[Process | None] = []
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if word in (folder / "environ").read_bytes().split(b"\0"):
                found.append(process(int(folder.name)))
    return [one for one in found if one is not None]


def orphans(left: Collection[Process], group: int) -> list[Process]:
    """Those whom a SIGTERM to this process group has not reached, and to whom nobody is left who would pass it on. A
    learner that is told twice leaves at once, and what it has not sent is lost."""
    numbers = {one.pid for one in left}
    found = []
    for one in left:
        with suppress(OSError, ValueError):
            parent = int((_PROC / str(one.pid) / "stat").read_text().rpartition(")")[2].split()[1])
            if parent not in numbers and os.getpgid(one.pid) != group:
                found.append(one)
    return found


def end(mark: str, notice_s: float, also: Sequence[Process] = ()) -> int:
    """Nothing of a unit whose keeper was killed is left afterwards. Returns how many had to be killed.

    The death of the keeper was the SIGTERM for its command; who goes on after half of the notice has not heard it.
    """
    now = time.monotonic()
    words = [now + notice_s / 2 if sys.platform == "linux" else now]
    while time.monotonic() < now + notice_s:
        left = {*marked(mark), *filter(is_alive, also)}
        if not left:
            return 0
        if words and time.monotonic() >= words[0]:
            words.clear()
            for one in left:
                tell(one, signal.SIGTERM)
        time.sleep(LOOK_S)
    return kill(mark, also)


def kill(mark: str, also: Sequence[Process] = (), within_s: float = 20.0) -> int:
    """Again and again, because a process may have started another one meanwhile."""
    killed: set[Process] = set()
    until = time.monotonic() + within_s
    while left := [*marked(mark), *filter(is_alive, also)]:
        killed.update(left)
        for one in left:
            tell(one, signal.SIGKILL)
        if time.monotonic() > until:
            raise OSError(f"process {left[0].pid} does not end, not even by SIGKILL: it waits for a disk or a device")
        time.sleep(LOOK_S / 10)
    return len(killed)


def _boot() -> str:
    """Moments of birth are counted from it."""
    global _booted
    if not _booted:
        with suppress(OSError):
            _booted = (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:8]
    return _booted


_booted = ""

__all__ = ["MARK", "Process", "end", "is_alive", "kill", "marked", "orphans", "process", "tell"]
