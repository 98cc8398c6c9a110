"""Supervisor process of one unit of the local launcher: `python -m atoll.launch.local_supervisor DIRECTORY`.

It leaves the session of the process that started it, and writes the state of the unit. Files in the directory:

    unit.json         specification: command, restarts, notice
    supervisor.json   state of the unit; replaced atomically
    supervisor.lock   locked while the supervisor or the guard runs; contains the supervisor's identity
    supervisor.log    output of the supervisor itself
    start-0001.log    output of the command, one file for each start

SIGTERM to the supervisor stops the unit. The guard of a killed supervisor ends the command (`atoll.launch.guard`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.files import LockHeldError, acquire_lock, write_text
from atoll.launch.guard import GuardedCommand, ProcessId, adopt_orphans, identify_process, is_alive, kill_descendants
from atoll.launch.launcher import UnitState, last_start_number, start_log_name
from atoll.launch.supervisor import POLL_INTERVAL_S, ExitInfo, RestartPolicy, UnitSupervisor

SPEC_FILE, STATE_FILE, LOCK_FILE, SUPERVISOR_LOG = "unit.json", "supervisor.json", "supervisor.lock", "supervisor.log"
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
DEFAULT_NOTICE_S = 30.0
LOCK_TIMEOUT_S = 2.0
"""Time to acquire the lock at the start: `atoll status` holds it for a moment."""
MAX_REASON_CHARS = 200


def read_state(directory: Path) -> dict[str, Any] | None:
    """Return the state of the unit, or None if it never had a supervisor.

    A damaged file, such as after a power failure, counts as that of a killed supervisor.
    """
    try:
        state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        UnitState(state["state"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        supervisor = None
        with suppress(OSError, ValueError, TypeError, KeyError):
            supervisor = ProcessId.from_json(json.loads((directory / LOCK_FILE).read_text(encoding="utf-8")))
        if supervisor is not None and is_alive(supervisor):
            damaged = (
                f"{directory / STATE_FILE} is damaged, and its supervisor runs: stop it with kill {supervisor.pid}"
            )
            raise OSError(damaged) from None
        notice_s = DEFAULT_NOTICE_S
        with suppress(OSError, ValueError, TypeError, KeyError):
            notice_s = float(json.loads((directory / SPEC_FILE).read_text(encoding="utf-8"))["notice_s"])
        return {
            "supervisor": None,
            "state": "running",
            "restarts": 0,
            "cause": "",
            "again_at": None,
            "notice_s": notice_s,
        }
    return state


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value) + "\n")


class LocalSupervisor:
    """Runs the command of one unit below a guard, and writes its state."""

    def __init__(self, directory: Path, spec: Mapping[str, Any], lock: int) -> None:
        self._directory, self._lock = directory, lock
        self._command: list[str] = spec["command"]
        self._constant_state = {
            "supervisor": _own_id().to_json(),
            "host": socket.gethostname(),
            "notice_s": spec["notice_s"],
            "devices": spec["devices"],
        }
        self._child: ProcessId | None = None
        self._starts = 0
        self._first_log = 1 + last_start_number(directory)
        syncer = Path(spec["syncer"]) if spec["syncer"] is not None else None
        restarts = RestartPolicy(BACKOFF_FIRST_S, BACKOFF_MAX_S, spec["restarts"])
        self._supervisor = UnitSupervisor(
            self._run_once, restarts, self.report, spec["notice_s"], syncer, spec["ends_with_syncer"]
        )

    def run(self, on_running: Callable[[], None]) -> None:
        """Run the unit until it ends with exit code 0, has no restart left, or is stopped."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._supervisor.stop())
        signal.signal(signal.SIGHUP, lambda *_: None)
        self._write(UnitState.WAITING, "is being started")
        on_running()
        state, cause = self._supervisor.run()
        if state is UnitState.FAILED:
            self._log_note(f"{cause}; it has no restart left")
            last_line = self._last_line()
            cause = f"{cause}: {last_line}" if last_line else cause
        elif cause:
            self._log_note(cause)
        self.report(state, cause, None)

    def _run_once(self, on_started: Callable[[str], None], should_end: Callable[[], bool]) -> ExitInfo:
        self._starts += 1
        notice_s = self._constant_state["notice_s"]
        log = self._log_path().name
        try:
            command = GuardedCommand(self._command, os.environ, self._directory, log, notice_s, (self._lock,))
            self._child = identify_process(command.pid)
            on_started(f"process {command.pid}")
            while command.is_running(POLL_INTERVAL_S):
                if should_end():
                    command.stop(notice_s)
                    break
            try:
                return ExitInfo.from_code(*command.wait())
            except OSError as error:
                return ExitInfo(str(error))
        finally:
            self._child = None
            kill_descendants()  # the guard, and its orphans if it was killed

    def report(self, state: UnitState, cause: str, again_at: float | None) -> None:
        """Write the state, and the next start into the log of the command."""
        if again_at is not None:
            self._log_note(f"{cause}; restarting in {again_at - time.time():.3g} s")
        try:
            self._write(state, cause, again_at)
        except OSError:  # a full disk must not end the unit
            with suppress(OSError):
                traceback.print_exc()

    def _write(self, state: UnitState, cause: str, again_at: float | None = None) -> None:
        current = {
            "child": self._child.to_json() if self._child is not None else None,
            "state": state,
            "restarts": max(0, self._starts - 1),
            "cause": cause,
            "again_at": again_at,
        }
        write_json(self._directory / STATE_FILE, {**self._constant_state, **current})

    def _log_note(self, text: str) -> None:
        """Append a line of the supervisor to the log of the command."""
        with suppress(OSError), open(self._log_path(), "ab") as log:
            log.write(f"[atoll] {text}\n".encode())

    def _log_path(self) -> Path:
        return self._directory / start_log_name(self._first_log + max(0, self._starts - 1))

    def _last_line(self) -> str:
        """Return the last line that the command printed."""
        with suppress(OSError), open(self._log_path(), "rb") as log:
            log.seek(max(0, self._log_path().stat().st_size - 8192))
            for line in reversed(log.read().decode(errors="replace").splitlines()):
                if line.strip() and not line.startswith("[atoll]"):
                    return line.strip()[:MAX_REASON_CHARS]
        return ""


def _own_id() -> ProcessId:
    own = identify_process(os.getpid())
    assert own is not None
    return own


def _acquire_lock(directory: Path) -> int:
    """Return the open lock file. Raise LockHeldError if another supervisor, or the guard of a killed one, holds it."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return acquire_lock(directory / LOCK_FILE, json.dumps(_own_id().to_json()))
        except LockHeldError:
            if time.monotonic() > until:
                raise
        time.sleep(POLL_INTERVAL_S)


def main() -> int:
    """Fork. The parent prints whether the supervisor has started. The child is the supervisor."""
    directory = Path(sys.argv[1])
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8") as replies:
            reply = replies.read()
        print(reply or "the supervisor ended at once", flush=True)
        return 0 if reply == "ready" else 1
    os.close(reader)
    try:
        lock = _acquire_lock(directory)
        supervisor = LocalSupervisor(directory, json.loads((directory / SPEC_FILE).read_text(encoding="utf-8")), lock)
    except LockHeldError:
        os.write(writer, f"{directory} has another supervisor".encode())
        return 1
    except OSError as error:
        os.write(writer, str(error).encode())
        return 1

    def on_running() -> None:
        own_log = os.open(directory / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(own_log, stream)
        os.write(writer, b"ready")
        os.close(writer)

    try:
        supervisor.run(on_running)
    except OSError as error:
        with suppress(OSError):
            os.write(writer, str(error).encode())  # fails if the parent has ended
        supervisor.report(UnitState.FAILED, f"its supervisor failed: {error}", None)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
