"""Process guard: end all descendants of a command together with its supervisor. Also: identity of a process.

Each rank of torchrun has its own session. A signal to the process group of torchrun does not reach it, and it continues
when its parent dies by SIGKILL. Therefore a command runs below a guard:

    supervisor =pipe=> guard (subreaper) => command => ranks

- The guard adopts every orphan below it (PR_SET_CHILD_SUBREAPER), so it knows all descendants of the command.
- The guard is detached from the supervisor (double fork): a system that kills the supervisor's children does not kill
it.
- The pipe closes when the supervisor ends. The guard then sends SIGTERM, waits for the notice, and sends SIGKILL.
- When the guard is killed, the kernel kills the command (PR_SET_PDEATHSIG). Orphans of the command go to the next
  subreaper: a supervisor that called `adopt_orphans`. It then calls `kill_descendants`.

PR_SET_PDEATHSIG does not work for a process from a fork server: its parent is the fork server, which outlives the
supervisor. `exit_with_parent` waits for the end of a pipe there, as the guard does.

Not covered: supervisor and guard both killed by SIGKILL. The command ends; descendants in other sessions do not.
Only Linux has subreapers. On other systems the guard ends only the process group of the command.

The guard runs this file by its path, in an interpreter without site-packages: use only the standard library. Its first
input line is `{"command": [...], "environment": {...}, "directory": "...", "log": "...", "orphan_notice_s": 30}`. So
secrets are not on a command line. Later lines are `{"stop_s": 30}`. It prints `{"pid": 1}`, then
`{"code": 0, "was_killed": false}`, or `{"error": "..."}`.
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
"""Interval between two rounds of signals: a process may start another one before it dies."""
KILL_TIMEOUT_S = 20.0
MAX_LINE_BYTES = 16 * 2**20
_PROC = Path("/proc")
_DEAD = ("Z", "X")


# --------------------------------------------------------------------------------------------------------------------
# Identity


class ProcessId(NamedTuple):
    """Identity of one process. It includes the start time because the kernel reuses process ids."""

    pid: int
    start_time: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time}

    @classmethod
    def from_json(cls, value: Any) -> ProcessId | None:
        return cls(int(value["pid"]), str(value["start_time"])) if value else None


def identify_process(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None if it does not exist or has ended."""
    if not _PROC.joinpath("self").exists():
        output = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        state, _, start_time = output.strip().partition(" ")
        return ProcessId(pid, start_time.strip()) if start_time and not state.startswith(_DEAD) else None
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:8]  # start times are relative to the boot
    except (OSError, ValueError):
        return None
    return ProcessId(pid, f"{boot}:{fields[19]}") if fields[0] not in _DEAD else None


def is_alive(process: ProcessId) -> bool:
    return identify_process(process.pid) == process


def send_signal(process: ProcessId, number: int) -> bool:
    """Send a signal to this process and no other. Return False if it has ended.

    With a pidfd the kernel cannot reuse the process id between the check and the signal.
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
    """Exit code of the command; negative for a signal."""
    was_killed: bool
    """True if a process was left after the notice."""


class GuardedCommand:
    """A running command that ends when this process ends, even by SIGKILL.

    Args:
        log: Name of the log file in `directory`.
        orphan_notice_s: Seconds from SIGTERM to SIGKILL if this process dies.
        keep_open: File descriptors that the guard keeps open, such as a lock that covers the lifetime of the command.
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
        self._guard.wait()  # the first process of the double fork
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
        """Wait up to `timeout_s` for the end of the command. Return False if it has ended."""
        assert self._guard.stdout is not None
        return not select.select([self._guard.stdout], [], [], timeout_s)[0]

    def wait(self) -> CommandExit:
        """Wait for the command and all its descendants to end. Raise OSError if the guard was killed."""
        reply = self._receive()
        self._close()
        return CommandExit(int(reply["code"]), bool(reply["was_killed"]))

    def stop(self, notice_s: float) -> None:
        """Send SIGTERM once to each process now, and SIGKILL to the remaining ones after the notice."""
        self._send({"stop_s": notice_s})

    def _receive(self) -> dict[str, Any]:
        """Return the next reply. Raise OSError if the command cannot be started or the guard has ended."""
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its guard was killed"}
        if "error" in reply:
            self._close()
            raise OSError(reply["error"])
        return reply

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # `wait` raises the error
            if not self._guard.stdin.closed:
                self._guard.stdin.write(json.dumps(order).encode() + b"\n")
                self._guard.stdin.flush()

    def _close(self) -> None:
        with self._lock:
            self._guard.communicate()  # closes the pipes


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants. It must then call `kill_descendants` regularly."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill all descendants of this process, and wait until none is left."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while _reap(None)[1]:
        for pid in (left := _descendants()):
            _kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"process {left[0]} survives SIGKILL: it is blocked on a disk or a device")
        time.sleep(KILL_INTERVAL_S / 10)


# --------------------------------------------------------------------------------------------------------------------
# In a process that comes from a fork server


def exit_with_parent(notice_s: float, code: int) -> None:
    """End this process when its parent ends: send it SIGTERM, and exit with `code` after the notice."""
    from multiprocessing import connection, parent_process  # not loaded in the guard

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
    with contextlib.suppress(BrokenPipeError):  # the supervisor has ended, and so have all descendants
        _reply(_guard())
    os._exit(0)


def _guard() -> dict[str, Any]:
    """Run one command until its last descendant has ended. Return the last reply."""
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_reader, False)
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
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
        command = _start(job)  # keep a reference: the destructor of Popen would reap the process
    except OSError as error:
        return {"error": f"cannot be started: {error}"}
    with contextlib.suppress(BrokenPipeError):
        _reply({"pid": command.pid})

    code: int | None = None
    inputs, kill_at, is_stopping, was_killed = [0, wakeup_reader], float("inf"), False, False
    signalled = set[int]()
    while True:
        ended, any_left = _reap(command.pid)
        code = ended if ended is not None else code
        if not any_left:
            return {"code": code, "was_killed": was_killed}
        if code is not None and not is_stopping:
            kill_at = 0.0  # the command has ended: kill its remaining descendants
        if time.monotonic() >= kill_at:
            was_killed = was_killed or is_stopping
            for pid in _descendants():
                _kill(pid, signal.SIGKILL)
        elif is_stopping:
            for pid in _orphans(command.pid) - signalled:
                _kill(pid, signal.SIGTERM)
                signalled.add(pid)
        ready, _, _ = select.select(inputs, [], [], None if kill_at == float("inf") else KILL_INTERVAL_S)
        if wakeup_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup_reader, 4096)
        if 0 not in ready:
            continue
        more = os.read(0, 65_536)
        *lines, received = (received + more).split(b"\n")
        notices = [float(json.loads(line)["stop_s"]) for line in lines]
        if not more:
            inputs = [wakeup_reader]
            notices.append(float(job["orphan_notice_s"]))
        for notice_s in notices:
            kill_at = min(kill_at, time.monotonic() + notice_s)
        if notices and not is_stopping:
            # Send it once, and only to the process group: torchrun forwards the signal to its ranks. A learner that
            # receives a second SIGTERM exits at once, without its last upload.
            is_stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGTERM)


def _start(job: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def prepare() -> None:
        """Reset signals and bind the child to the guard, before `exec`."""
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
    """Reap ended children. Return the exit code of child `pid` if it was among them, and whether any child is left."""
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
    """Return the adopted processes outside of the command's process group."""
    found = set()
    for pid in _children().get(os.getpid(), []):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != group:
                found.add(pid)
    return found


def _descendants() -> list[int]:
    """Return all descendants of this process, parents first."""
    children, found = _children(), [os.getpid()]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Return the running children of each process of this machine."""
    rows: list[list[str]] = []
    if _PROC.joinpath("self").exists():
        for name in filter(str.isdigit, os.listdir(_PROC)):
            with contextlib.suppress(OSError), open(_PROC / name / "stat", encoding="utf-8", errors="replace") as file:
                rows.append([name, *file.read().rpartition(")")[2].split()[:2]])
    else:
        output = subprocess.run(["ps", "-A", "-o", "pid=,stat=,ppid="], capture_output=True, text=True).stdout
        rows = [line.split() for line in output.splitlines()]
    children: dict[int, list[int]] = {}
    for name, state, parent in rows:
        if not state.startswith(_DEAD):
            children.setdefault(int(parent), []).append(int(name))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reply(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
