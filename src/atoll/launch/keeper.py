"""The process that keeps one unit of the local engine running: `python -m atoll.launch.keeper DIRECTORY`.

It leaves the session of the process that started it, and writes down how the unit is. In the directory:

    unit.json         what to keep: command, restarts, notice
    keeper.json       how it is; replaced as a whole
    keeper.lock       locked while the keeper, or the guard of its command, lives; holds the identity of the keeper
    keeper.log        what the keeper itself has printed, where something is wrong with it
    start-0001.log    what the command has printed, one file for each start

SIGTERM to the keeper ends the unit. The guard of a keeper that was killed ends the command (`atoll.launch.guard`).
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

from atoll.files import LockHeldError, take_lock, write_text
from atoll.launch.engine import UnitStanding, last_start, start_log
from atoll.launch.guard import GuardedCommand, ProcessId, adopt_orphans, is_alive, kill_descendants, process_id
from atoll.launch.supervisor import POLL_INTERVAL_S, ExitInfo, Restarts, UnitSupervisor

SPEC, STATE, LOCK, OWN_LOG = "unit.json", "keeper.json", "keeper.lock", "keeper.log"
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
DEFAULT_NOTICE_S = 30.0
LOCK_TIMEOUT_S = 2.0
"""For the lock of a keeper that starts: `atoll status` holds it for a moment."""
MAX_REASON_CHARS = 200


def read_state(directory: Path) -> dict[str, Any] | None:
    """Return the state of the unit; None where no keeper ever was.

    A damaged file, as a power cut leaves it, is that of a killed keeper.
    """
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        UnitStanding(state["standing"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        keeper = None
        with suppress(OSError, ValueError, TypeError, KeyError):
            keeper = ProcessId.from_json(json.loads((directory / LOCK).read_text(encoding="utf-8")))
        if keeper is not None and is_alive(keeper):
            damaged = f"{directory / STATE} is damaged, and its keeper lives: end that by kill {keeper.pid}"
            raise OSError(damaged) from None
        notice_s = DEFAULT_NOTICE_S
        with suppress(OSError, ValueError, TypeError, KeyError):
            notice_s = float(json.loads((directory / SPEC).read_text(encoding="utf-8"))["notice_s"])
        return {"keeper": None, "standing": "running", "restarts": 0, "why": "", "again_at": None, "notice_s": notice_s}
    return state


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value) + "\n")


class Keeper:
    """Spawns the command of one unit below a guard, and reports about it."""

    def __init__(self, directory: Path, spec: Mapping[str, Any], lock: int) -> None:
        self._directory, self._lock = directory, lock
        self._command: list[str] = spec["command"]
        self._fixed = {
            "keeper": _own_id().to_json(),
            "host": socket.gethostname(),
            "notice_s": spec["notice_s"],
            "devices": spec["devices"],
        }
        self._child: ProcessId | None = None
        self._starts = 0
        self._first_log = 1 + last_start(directory)
        syncer = Path(spec["syncer"]) if spec["syncer"] is not None else None
        restarts = Restarts(BACKOFF_FIRST_S, BACKOFF_MAX_S, spec["restarts"])
        self._supervisor = UnitSupervisor(
            self._run_once, restarts, self.report, spec["notice_s"], syncer, spec["ends_with_syncer"]
        )

    def keep(self, on_kept: Callable[[], None]) -> None:
        """Keep the unit running until it has ended well, has failed too often, or is stopped."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._supervisor.stop())
        signal.signal(signal.SIGHUP, lambda *_: None)
        self._write(UnitStanding.WAITING, "is being started")
        on_kept()
        standing, why = self._supervisor.run()
        if standing is UnitStanding.FAILED:
            self._note(f"{why}; it has no restart left")
            last = self._last_line()
            why = f"{why}: {last}" if last else why
        elif why:
            self._note(why)
        self.report(standing, why, None)

    def _run_once(self, started: Callable[[str], None], should_end: Callable[[], bool]) -> ExitInfo:
        self._starts += 1
        notice_s = self._fixed["notice_s"]
        log = self._log().name
        try:
            command = GuardedCommand(self._command, os.environ, self._directory, log, notice_s, (self._lock,))
            self._child = process_id(command.pid)
            started(f"process {command.pid}")
            while command.is_running(POLL_INTERVAL_S):
                if should_end():
                    command.stop(notice_s)
                    break
            try:
                return ExitInfo.of_code(*command.wait())
            except OSError as error:
                return ExitInfo(str(error))
        finally:
            self._child = None
            kill_descendants()  # the guard, and what it has left behind if it was killed

    def report(self, standing: UnitStanding, why: str, again_at: float | None) -> None:
        if again_at is not None:
            self._note(f"{why}; starting it again in {again_at - time.time():.3g} s")
        try:
            self._write(standing, why, again_at)
        except OSError:  # a full disk must not end the unit
            with suppress(OSError):
                traceback.print_exc()

    def _write(self, standing: UnitStanding, why: str, again_at: float | None = None) -> None:
        state = {
            "child": self._child.to_json() if self._child is not None else None,
            "standing": standing,
            "restarts": max(0, self._starts - 1),
            "why": why,
            "again_at": again_at,
        }
        write_json(self._directory / STATE, {**self._fixed, **state})

    def _note(self, words: str) -> None:
        """Write a line of the keeper into the log of the command."""
        with suppress(OSError), open(self._log(), "ab") as log:
            log.write(f"[atoll] {words}\n".encode())

    def _log(self) -> Path:
        return self._directory / start_log(self._first_log + max(0, self._starts - 1))

    def _last_line(self) -> str:
        """Return the last line that the command has printed."""
        with suppress(OSError), open(self._log(), "rb") as log:
            log.seek(max(0, self._log().stat().st_size - 8192))
            for line in reversed(log.read().decode(errors="replace").splitlines()):
                if line.strip() and not line.startswith("[atoll]"):
                    return line.strip()[:MAX_REASON_CHARS]
        return ""


def _own_id() -> ProcessId:
    own = process_id(os.getpid())
    assert own is not None
    return own


def _take_lock(directory: Path) -> int:
    """Return the open lock file. LockHeldError: another keeper, or the guard of a killed one, has it."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return take_lock(directory / LOCK, json.dumps(_own_id().to_json()))
        except LockHeldError:
            if time.monotonic() > until:
                raise
        time.sleep(POLL_INTERVAL_S)


def main() -> int:
    """Say on stdout whether the unit is kept, in the first process; be the keeper in the second one."""
    directory = Path(sys.argv[1])
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8") as replies:
            reply = replies.read()
        print(reply or "the keeper ended at once", flush=True)
        return 0 if reply == "kept" else 1
    os.close(reader)
    try:
        lock = _take_lock(directory)
        keeper = Keeper(directory, json.loads((directory / SPEC).read_text(encoding="utf-8")), lock)
    except LockHeldError:
        os.write(writer, f"{directory} is kept by another keeper".encode())
        return 1
    except OSError as error:
        os.write(writer, str(error).encode())
        return 1

    def on_kept() -> None:
        own_log = os.open(directory / OWN_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(own_log, stream)
        os.write(writer, b"kept")
        os.close(writer)

    try:
        keeper.keep(on_kept)
    except OSError as error:
        with suppress(OSError):
            os.write(writer, str(error).encode())  # if it is still read
        keeper.report(UnitStanding.FAILED, f"its keeper cannot go on: {error}", None)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
