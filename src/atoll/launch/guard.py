"""No process outlives its parent: the guard of a command, and the identity of a process.

The ranks of torchrun are in sessions of their own: a signal to a process group does not reach them, and a parent that
dies by SIGKILL leaves them running. So a command runs below a guard:

    supervisor =pipe=> guard (subreaper) => command => ranks

- The guard adopts every orphan below it (PR_SET_CHILD_SUBREAPER), so it knows all descendants of the command.
- The guard has no parent of its own (double fork): a system that kills the children of the supervisor spares it.
- The end of the pipe is the end of the supervisor. The guard then sends SIGTERM, waits for the notice, sends SIGKILL.
- A guard that is killed takes the command along (PR_SET_PDEATHSIG). Orphans of the command go to the next subreaper:
  to a supervisor that called `adopt_orphans`, which then calls `kill_descendants`.

A process that comes from a fork server cannot have PR_SET_PDEATHSIG: its parent is the fork server, which lives while
any of them lives. `exit_with_parent` waits at the end of a pipe there, as the guard does.

Not covered: supervisor and guard both killed by SIGKILL. The command ends; its descendants in other sessions do not.
Without Linux there are no subreapers, and the guard ends the process group of the command only.

The guard runs this file by its path, in an interpreter without site-packages: standard library only. First line in:
`{"command": [...], "environment": {...}, "directory": "...", "log": "...", "orphan_notice_s": 30}`, so that no secret
is on a command line. Later lines: `{"stop_s": 30}`. Out: `{"pid": 1}`, then `{"code": 0, "was_killed": false}`, or
`{"error": "..."}`.
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
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_INTERVAL_S = 0.05
"""Between two signals to a unit that is to end: a process that is being killed may have started another one."""
KILL_TIMEOUT_S = 20.0
MAX_LINE_BYTES = 16 * 2**20
_PROC = Path("/proc")
_DEAD = ("Z", "X")


# --------------------------------------------------------------------------------------------------------------------
# Identity


class ProcessId(NamedTuple):
    """One process for ever: its number is given to another process after its end, so its birth is part of it."""

    pid: int
    start_time: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time}

    @classmethod
    def from_json(cls, value: Any) -> ProcessId | None:
        return cls(int(value["pid"]), str(value["start_time"])) if value else None


def identify_process(pid: int) -> ProcessId | None:
    """Return the identity of a running process; None where there is none, or it has ended."""
    if not _PROC.joinpath("self").exists():
        said = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        state, _, born = said.strip().partition(" ")
        return ProcessId(pid, born.strip()) if born and not state.startswith(_DEAD) else None
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:8]  # births are counted from it
    except (OSError, ValueError):
        return None
    return ProcessId(pid, f"{boot}:{fields[19]}") if fields[0] not in _DEAD else None


def is_alive(process: ProcessId) -> bool:
    return identify_process(process.pid) == process


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal this process and no other; return False where it is gone.

    With a process handle (pidfd) the number cannot change hands between the check and the signal.
    """
    try:
        handle = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(process.pid, number)
            return True
        return False
    finally:
        if handle is not None:
            os.close(handle)


# --------------------------------------------------------------------------------------------------------------------
# In the supervisor


class CommandExit(NamedTuple):
    code: int
    """Below 0: the signal that ended the command."""
    was_killed: bool
    """Something was left when the notice was over."""


class GuardedCommand:
    """A command that runs from here on, and ends with this process, however that ends.

    `orphan_notice_s`: from SIGTERM to SIGKILL, if this process dies. `keep_open`: files that the guard keeps open, such
    as a lock that is to be held until the command is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: str,
        orphan_notice_s: float = 0.0,
        keep_open: Collection[int] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=keep_open
        )
        self._guard.wait()  # the first of its two forks
        self._lock = threading.Lock()
        self._send(
            {
                "command": list(command),
                "environment": dict(environment),
                "directory": str(directory),
                "log": str(directory / log),
                "orphan_notice_s": orphan_notice_s,
            }
        )
        self.pid = int(self._receive()["pid"])

    def is_running(self, timeout_s: float) -> bool:
        """Wait for the end of the command, at most so long."""
        assert self._guard.stdout is not None
        return not select.select([self._guard.stdout], [], [], timeout_s)[0]

    def wait(self) -> CommandExit:
        """Wait for the command and all its descendants to end. OSError: its guard was killed."""
        reply = self._receive()
        self._close()
        return CommandExit(int(reply["code"]), bool(reply["was_killed"]))

    def stop(self, notice_s: float) -> None:
        """Send SIGTERM now, to no process twice, and SIGKILL to what is left when the notice is over."""
        self._send({"stop_s": notice_s})

    def _receive(self) -> dict[str, Any]:
        """Return the next reply. OSError where the command cannot be started, or the guard is gone."""
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its guard was killed"}
        if "error" in reply:
            self._close()
            raise OSError(reply["error"])
        return reply

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # `wait` says what has happened
            if not self._guard.stdin.closed:
                self._guard.stdin.write(json.dumps(order).encode() + b"\n")
                self._guard.stdin.flush()

    def _close(self) -> None:
        with self._lock:
            self._guard.communicate()  # closes the pipes


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process. It then has to call `kill_descendants` now and then."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill every process below this one, and wait until none is left."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while _reap(None)[1]:
        for pid in (left := _descendants()):
            _kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"process {left[0]} does not end by SIGKILL: it waits for a disk or a device")
        time.sleep(KILL_INTERVAL_S / 10)


# --------------------------------------------------------------------------------------------------------------------
# In a process that comes from a fork server


def exit_with_parent(notice_s: float, code: int) -> None:
    """End this process when the one that started it ends: SIGTERM to itself, and after the notice an exit at once."""
    from multiprocessing import connection, parent_process  # which the guard does not need

    parent = parent_process()

    def wait() -> None:
        assert parent is not None
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(notice_s)
        os._exit(code)

    if parent is not None:
        threading.Thread(target=wait, name="atoll-parent", daemon=True).start()


# --------------------------------------------------------------------------------------------------------------------
# In the guard


def main() -> NoReturn:
    if os.fork():
        os._exit(0)
    os.setsid()
    adopt_orphans()
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and so is everything below
        _reply(_guard())
    os._exit(0)


def _guard() -> dict[str, Any]:
    """Run one command, from the first order to the end of the last process."""
    woken, waking = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    received = b""
    while b"\n" not in received:
        more = os.read(0, 65_536)
        if not more or len(received) > MAX_LINE_BYTES:
            return {"error": "its supervisor has ended"}
        received += more
    first, _, received = received.partition(b"\n")
    job = json.loads(first)
    try:
        command = _start(job)  # kept: a Popen that is dropped waits for its process itself
    except OSError as error:
        return {"error": f"cannot be started: {error}"}
    with contextlib.suppress(BrokenPipeError):
        _reply({"pid": command.pid})

    code: int | None = None
    inputs, kill_at, is_stopping, was_killed = [0, woken], float("inf"), False, False
    signalled = set[int]()
    while True:
        ended, any_left = _reap(command.pid)
        code = ended if ended is not None else code
        if not any_left:
            return {"code": code, "was_killed": was_killed}
        if code is not None and not is_stopping:
            kill_at = 0.0  # the unit is its command; other processes are left over
        if time.monotonic() >= kill_at:
            was_killed = was_killed or is_stopping
            for pid in _descendants():
                _kill(pid, signal.SIGKILL)
        elif is_stopping:
            for pid in _orphans(command.pid) - signalled:
                _kill(pid, signal.SIGTERM)
                signalled.add(pid)
        ready, _, _ = select.select(inputs, [], [], None if kill_at == float("inf") else KILL_INTERVAL_S)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        if 0 not in ready:
            continue
        more = os.read(0, 65_536)
        *lines, received = (received + more).split(b"\n")
        notices = [float(json.loads(line)["stop_s"]) for line in lines]
        if not more:
            inputs = [woken]
            notices.append(float(job["orphan_notice_s"]))
        for notice_s in notices:
            kill_at = min(kill_at, time.monotonic() + notice_s)
        if notices and not is_stopping:
            # Once, and to its group alone: torchrun passes it on to its ranks, and a learner that gets a second SIGTERM
            # leaves at once, without its last push.
            is_stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGTERM)


def _start(job: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def prepare() -> None:
        """In the child, before the command replaces it."""
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)  # the guard was killed before the line above
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return subprocess.Popen(
            job["command"],
            cwd=job["directory"],
            env=job["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        os.close(log)


def _reap(pid: int | None) -> tuple[int | None, bool]:
    """Return the exit code of this child, if it has just ended, and whether any child is left."""
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


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _orphans(group: int) -> set[int]:
    """Return the adopted processes that a signal to the command's group has not reached."""
    found = set()
    for pid in _children().get(os.getpid(), []):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != group:
                found.add(pid)
    return found


def _descendants() -> list[int]:
    """Return children, their children and so on; parents first."""
    children, found = _children(), [os.getpid()]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Return the living children of every process of this machine that has some."""
    rows: list[list[str]] = []
    if _PROC.joinpath("self").exists():
        for name in filter(str.isdigit, os.listdir(_PROC)):
            with contextlib.suppress(OSError), open(_PROC / name / "stat", encoding="utf-8", errors="replace") as file:
                rows.append([name, *file.read().rpartition(")")[2].split()[:2]])
    else:
        said = subprocess.run(["ps", "-A", "-o", "pid=,stat=,ppid="], capture_output=True, text=True).stdout
        rows = [line.split() for line in said.splitlines()]
    children: dict[int, list[int]] = {}
    for name, state, parent in rows:
        if not state.startswith(_DEAD):
            children.setdefault(int(parent), []).append(int(name))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reply(words: dict[str, Any]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
