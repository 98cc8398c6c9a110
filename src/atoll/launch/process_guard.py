"""Stands between an engine and the command of a unit: nothing that the command has started outlives either of them.

Ranks of torchrun are sessions of their own, so a signal to a group does not reach them, and a process that dies by
SIGKILL takes nobody along. The guard adopts every orphan below it (Linux' subreaper), so it knows all of them; it is
nobody's child, so whoever kills the children of the engine's process spares it; and it sees the end of that process as
the end of a pipe. It is run by its path, in an interpreter without site-packages: it needs the standard library only.

First line in: `{"command": [...], "environment": {...}, "directory": "...", "log": "..."}`, so that no secret is on a
command line. Later ones: `{"stop_s": 30}`. Out: `{"pid": 1}`, then `{"code": 0}`, or `{"wrong": "..."}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.05
"""Between two looks at a unit that is to end: one that is just being killed may have started another."""
MOST_BYTES = 16 * 2**20
"""Of one line."""


def main() -> NoReturn:
    if os.fork():
        os._exit(0)
    os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more, and everything below is gone
        _say(_guard())
    os._exit(0)


def _guard() -> dict[str, Any]:
    """From the first order to the last process."""
    woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    received = b""
    while b"\n" not in received:
        more = os.read(0, 65_536)
        if not more or len(received) > MOST_BYTES:
            return {"wrong": "the engine has ended"}
        received += more
    first, _, received = received.partition(b"\n")
    try:
        command = _started(json.loads(first))  # kept: a Popen that is dropped waits for its process itself
    except OSError as wrong:
        return {"wrong": f"cannot be started: {wrong}"}
    with contextlib.suppress(BrokenPipeError):
        _say({"pid": command.pid})

    code: int | None = None
    inputs, kill_at, stopping, orphans = [0, woken], float("inf"), False, set[int]()
    while True:
        ended, any_left = _reaped(command.pid)
        code = ended if ended is not None else code
        if not any_left:
            return {"code": code}
        if code is not None and not stopping:
            kill_at = 0.0  # the unit is its command; what is left of it is left over
        if time.monotonic() >= kill_at:
            for one in _below():
                _send(one, signal.SIGKILL)
        elif stopping:
            for one in _orphans(command.pid) - orphans:
                _send(one, signal.SIGTERM)
                orphans.add(one)
        ready, _, _ = select.select(inputs, [], [], None if kill_at == float("inf") else LOOK_S)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        if 0 in ready:
            more = os.read(0, 65_536)
            received += more
            *lines, received = received.split(b"\n")
            for line in lines:
                kill_at = min(kill_at, time.monotonic() + float(json.loads(line)["stop_s"]))
                if not stopping:
                    # Once, and to its group alone: torchrun passes it on to its ranks, and a learner that is told
                    # twice leaves at once, without its last push.
                    stopping = True
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(command.pid, signal.SIGTERM)
            if not more:
                inputs, kill_at = [woken], 0.0


def _started(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    child = subprocess.Popen(
        job["command"],
        cwd=job["directory"],
        env=job["environment"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_as_any_command_begins,
    )
    os.close(log)
    return child


def _as_any_command_begins() -> None:
    """In the child. The guard can be killed too; then at least the command goes with it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _reaped(pid: int) -> tuple[int | None, bool]:
    """The exit code of the command, if it has just ended, and whether anything is left below."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if ended == 0:
            return code, True
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _orphans(group: int) -> set[int]:
    """Whom a signal to the command's group does not reach, and to whom nobody is left who would pass it on."""
    found = set()
    for pid in _children().get(os.getpid(), []):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != group:
                found.add(pid)
    return found


def _below() -> list[int]:
    """Children, their children and so on; parents first."""
    children, found = _children(), [os.getpid()]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Of every process of this machine that has some; those who have ended and wait for their parent left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(name))
    return children


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(words: dict[str, Any]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
