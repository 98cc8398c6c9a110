"""The process that keeps one unit of the local engine going: `python -m atoll.launch.keeper DIRECTORY`.

It leaves whoever has started it, starts the command, starts it again when it fails, and writes down how things are. In
the directory:

    unit.json         what to keep: command, restarts, notice
    keeper.json       how it is; replaced as a whole
    keeper.lock       held while the keeper lives
    keeper.log        its own words, where something is wrong with the keeper itself
    start-0001.log    what the command has printed, one file for each start

SIGTERM to the keeper ends the unit. A keeper that is killed takes the command along with a SIGTERM, where the system
can do that, and the engine finds what is left by its mark.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.files import write_text
from atoll.launch.engine import Standing
from atoll.launch.processes import LOOK_S, MARK, Process, kill, marked, orphans, process, tell
from atoll.launch.supervisor import LEFT_EARLY, Backoff, has_ended

SPEC, STATE, LOCK, OWN_LOG = "unit.json", "keeper.json", "keeper.lock", "keeper.log"
LOGS = "start-*.log"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
USUAL_NOTICE_S = 30.0
TICK_S = 1.0
MOST_WORDS = 200
OVER = "the run is over"
_PR_SET_PDEATHSIG = 1


def read_state(directory: Path) -> dict[str, Any] | None:
    """None: nobody has kept anything here. A damaged one, as a power cut leaves it, is that of a killed keeper."""
    try:
        told: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        Standing(told["standing"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        if _is_kept(directory):
            raise OSError(
                f"{directory / STATE} is damaged, and its keeper lives: end that, it is the process that"
                f" pgrep -f 'engines.keeper {directory}' names"
            ) from None
        return _state(Standing.RUNNING, notice_s=_notice_s(directory))
    return told


def _is_kept(directory: Path) -> bool:
    with suppress(FileNotFoundError), open(directory / LOCK, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _notice_s(directory: Path) -> float:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads((directory / SPEC).read_text(encoding="utf-8"))["notice_s"])
    return USUAL_NOTICE_S


def _state(
    standing: Standing,
    why: str = "",
    keeper: Process | None = None,
    child: Process | None = None,
    restarts: int = 0,
    again_at: float | None = None,
    notice_s: float = 0.0,
    devices: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        "keeper": keeper.to_json() if keeper is not None else None,
        "host": socket.gethostname(),
        "child": child.to_json() if child is not None else None,
        "standing": standing.value,
        "restarts": restarts,
        "why": why,
        "again_at": again_at,
        "notice_s": notice_s,
        "devices": list(devices),
    }


def _how(code: int) -> str:
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"


def write_whole(path: Path, told: dict[str, Any]) -> None:
    write_text(path, json.dumps(told) + "\n")


class Keeper:
    def __init__(self, directory: Path, spec: dict[str, Any]) -> None:
        self.directory = directory
        self.command: list[str] = spec["command"]
        self.restarts: int = spec["restarts"]
        self.notice_s: float = spec["notice_s"]
        self.syncer = Path(spec["syncer"]) if spec["syncer"] is not None else None
        self.ends_with_syncer: bool = spec["ends_with_syncer"]
        self.devices: list[str] = spec["devices"]
        self.restarted = 0
        self.is_stopping = False
        self.child: subprocess.Popen[bytes] | None = None
        self.own = process(os.getpid())
        self._log_number = max((int(path.stem.partition("-")[2]) for path in directory.glob(LOGS)), default=0)
        self._woken, self._wake = os.pipe()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    # ------------------------------------------------------------------------------------------------------- its life

    def keep(self, on_kept: Callable[[], None]) -> None:
        """Until the command has ended well, has failed too often, or is not wanted any more."""
        self._listen()
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.say(Standing.WAITING, "is being started", must=True)
        on_kept()
        while True:
            began = time.monotonic()
            standing, why = self._start_and_wait()
            if standing is not Standing.FAILED:
                self.say(standing, why)
                return
            if self._is_over():
                self.note(f"{why}; {OVER}, it is not started again")
                self.say(Standing.STOPPED, f"the run is over: its syncer has ended ({why})")
                return
            if self.restarted >= self.restarts:
                self.note(f"{why}; it has no restart left")
                self.say(Standing.FAILED, self._last_words(why))
                return
            pause = backoff.failed(ran_s=time.monotonic() - began)
            self.note(f"{why}; starting it again in {pause:g} s")
            self.say(Standing.WAITING, why, again_at=time.time() + pause)
            if self._rest(pause):
                self.say(Standing.STOPPED, "while it waited to be started again")
                return
            self.restarted += 1

    def _start_and_wait(self) -> tuple[Standing, str]:
        """How it has ended, and why."""
        try:
            self.child = self._start()
        except OSError as wrong:
            return Standing.FAILED, f"it cannot be started: {wrong}"
        self.say(Standing.RUNNING, f"process {self.child.pid}")
        while self.child.poll() is None:
            if self.is_stopping:
                return Standing.STOPPED, self._stop()
            if self.ends_with_syncer and self._is_over():
                return Standing.ENDED, self._stop() or OVER
            self._wait(TICK_S)
        kill(str(self.directory))  # ranks whose torchrun was killed would train on beside the next ones
        code = self.child.returncode
        if self.is_stopping:
            return Standing.STOPPED, _how(code) if code else ""
        if code == 0 and self.ends_with_syncer and not self._is_over():
            return Standing.FAILED, LEFT_EARLY
        return (Standing.FAILED, _how(code)) if code else (Standing.ENDED, "")

    def _start(self) -> subprocess.Popen[bytes]:
        self._log_number += 1
        with open(self._log(), "ab") as log:
            return subprocess.Popen(
                self.command,
                cwd=self.directory,
                env={**os.environ, MARK: str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._in_child,
            )

    def _in_child(self) -> None:
        """Whatever kills the keeper ends the command."""
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def _stop(self) -> str:
        """SIGTERM to all of its process group, once: torchrun passes it on to ranks, which are in other sessions."""
        assert self.child is not None
        alone: set[Process] = set()
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGTERM)
        until = time.monotonic() + self.notice_s
        while time.monotonic() < until:
            if self.child.poll() is not None:
                left = set(marked(str(self.directory)))
                if not left:
                    break
                for one in set(orphans(left, self.child.pid)) - alone:
                    tell(one, signal.SIGTERM)
                    alone.add(one)
            self._wait(LOOK_S)
        killed = kill(str(self.directory))
        if self.child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        if not killed:
            return ""
        self.note(late := f"did not end within {self.notice_s:g} s, and was killed")
        return late

    # ----------------------------------------------------------------------------------------------- what it hears

    def _listen(self) -> None:
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

        def stop(*_: object) -> None:
            self.is_stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        for number in (
            signal.SIGCHLD,
            signal.SIGHUP,
        ):  # a handler is not inherited by the command; an ignored signal is
            signal.signal(number, lambda *_: None)

    def _wait(self, seconds: float) -> None:
        """Until a signal, or so long."""
        select.select([self._woken], [], [], seconds)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _rest(self, seconds: float) -> bool:
        """True: it was told to stop."""
        until = time.monotonic() + seconds
        while not self.is_stopping and (left := until - time.monotonic()) > 0:
            self._wait(left)
        return self.is_stopping

    def _is_over(self) -> bool:
        """The syncer of a run that is over has ended well, and whoever joins now would wait for ever."""
        return self.syncer is not None and has_ended(self.syncer)

    # ------------------------------------------------------------------------------------------------ what it says

    def say(self, standing: Standing, why: str, again_at: float | None = None, must: bool = False) -> None:
        child = process(self.child.pid) if self.child is not None and self.child.returncode is None else None
        told = _state(
            standing, why, self.own, child, self.restarted, again_at, notice_s=self.notice_s, devices=self.devices
        )
        try:
            write_whole(self.directory / STATE, told)
        except OSError:
            if must:
                raise
            with suppress(OSError):  # a full disk must not take the unit along
                traceback.print_exc()

    def note(self, words: str) -> None:
        """Beside what the command has printed, for those who read that."""
        with suppress(OSError), open(self._log(), "ab") as log:
            log.write(f"[atoll] {words}\n".encode())

    def _log(self) -> Path:
        return self.directory / f"start-{self._log_number:04}.log"

    def _last_words(self, why: str) -> str:
        after = f" after {self.restarted} restarts" if self.restarted else ""
        last = ""
        with suppress(OSError), open(self._log(), "rb") as log:
            log.seek(max(0, self._log().stat().st_size - 8192))
            lines = log.read().decode(errors="replace").splitlines()
            last = next((line for line in reversed(lines) if line.strip() and not line.startswith("[atoll]")), "")
        return f"{why}{after}" + (f": {last.strip()[:MOST_WORDS]}" if last else "")


def main() -> int:
    """The first process says on stdout whether the unit is kept, and ends; the second one is the keeper."""
    directory = Path(sys.argv[1])
    heard, told = os.pipe()
    if os.fork():
        os.close(told)
        with open(heard, encoding="utf-8") as words:
            said = words.read()
        print(said or "the keeper ended at once", flush=True)
        return 0 if said == "kept" else 1
    os.close(heard)
    try:
        lock = os.open(directory / LOCK, os.O_WRONLY | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        spec = json.loads((directory / SPEC).read_text(encoding="utf-8"))
        keeper = Keeper(directory, spec)
    except BlockingIOError:
        os.write(told, f"{directory} is kept by another keeper".encode())
        return 1
    except OSError as wrong:
        os.write(told, str(wrong).encode())
        return 1

    def on_kept() -> None:
        own_log = os.open(directory / OWN_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(own_log, stream)
        os.write(told, b"kept")
        os.close(told)

    try:
        keeper.keep(on_kept)
    except OSError as wrong:
        with suppress(OSError):
            os.write(told, str(wrong).encode())  # if it is still listened to
        keeper.say(Standing.FAILED, f"its keeper cannot go on: {wrong}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
