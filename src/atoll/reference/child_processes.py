"""The processes of a job: started from one that has torch loaded, ended by their ids, and gone when the job is gone.

`import torch` takes seconds; the fork server pays for it once, and a learner that is started again is there at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from atoll.dashboard.run_files import read_tail
from atoll.launch.guard import exit_with_parent
from atoll.logs import LOG_FORMAT_VARIABLE, configure_logging, extract_message

PRELOADED_MODULES: tuple[str, ...] = (
    "atoll.reference.supervisor",
    "atoll.reference.baselines",
    "numpy.random",
    "torch._dynamo",
)
"""The last two are loaded by the first batch and the first optimizer: two seconds in every child, where not here."""

LOG_FOLDER = "logs"

EXIT_OK, EXIT_ERROR, EXIT_REFUSED, EXIT_STOPPED = 0, 1, 2, 130
"""Exit codes of a child: done; a mistake of ours, or of the machine; what it was asked cannot be done; was told to."""

ORPHAN_GRACE_S = 10.0


class JobFailedError(Exception):
    """The job cannot go on. What it has trained is in its directory."""


def fork_server_context() -> ForkServerContext:
    """Where children come from. The first call starts the fork server, which loads torch in the background."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED_MODULES))
    forkserver.ensure_running()
    return context


class ChildProcess:
    """One process at a time under one name, with a log that all of them share."""

    def __init__(self, name: str, run: Path, target: Callable[..., object], args: Sequence[Any]) -> None:
        self.name = name
        self.log = run / LOG_FOLDER / f"{name.replace(' ', '-')}.log"
        self.starts = 0
        self.process: BaseProcess | None = None
        self._target = target
        self._args = tuple(args)

    def start(self, context: ForkServerContext) -> None:
        assert self.process is None, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        log_format = os.environ.get(LOG_FORMAT_VARIABLE, "text")
        process = context.Process(
            target=_run_child, args=(self.name, str(self.log), log_format, self._target, self._args), name=self.name
        )
        process.start()
        self.process = process  # not before: one that could not be started cannot be ended either

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def poll_exit_code(self) -> int | None:
        """The exit code, once; None while it runs or where nothing runs. Below 0: the signal that ended it."""
        if self.process is None or self.process.exitcode is None:
            return None
        code = self.process.exitcode
        self.process.join()
        self.process.close()
        self.process = None
        return code

    def send(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is not None and self.process is not None and self.process.exitcode is None:
            os.kill(pid, number)

    def join(self, timeout_s: float) -> None:
        """Wait for its end, then make it end."""
        if self.process is None:
            return
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self.process = None

    def last_log_line(self) -> str:
        """The last line of its log that says something."""
        lines = [line.strip() for line in read_tail(self.log, 4096).decode("utf-8", "replace").splitlines()]
        return next((extract_message(line) for line in reversed(lines) if line), "")


def terminate_all(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """End all of them, side by side. Whoever asks a second time, by Ctrl-C, does not want to wait."""
    try:
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            child.join(timeout_s)
    except KeyboardInterrupt:
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.join(timeout_s)
        raise


def wait_for_any(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Until one of them ends, or the time is over."""
    sentinels = [child.process.sentinel for child in children if child.process is not None]
    if sentinels:
        multiprocessing.connection.wait(sentinels, timeout_s)
    else:
        threading.Event().wait(timeout_s)


@contextlib.contextmanager
def sigterm_as_interrupt(is_handled: Callable[[], bool] | None = None) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: in order. Only the main thread may say so. `is_handled`: another does
    what has to be done about this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if is_handled is None or not is_handled():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------------------------------------------------
# In the child


def _run_child(name: str, log: str, log_format: str, target: Callable[..., object], args: Sequence[Any]) -> NoReturn:
    os.setpgid(0, 0)  # Ctrl-C in the terminal is for the job, which then ends its processes in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    _redirect_output(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where does it hang? kill -USR1 writes it into the log
    configure_logging(log_format, logging.INFO, "%(asctime)s %(levelname).1s %(name)s: %(message)s", process=name)
    exit_with_parent(ORPHAN_GRACE_S, EXIT_ERROR)
    code = EXIT_ERROR
    try:
        target(*args)
        code = EXIT_OK
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    except ValueError as error:
        _log_failure(log_format, f"{name}: {error}")
        code = EXIT_REFUSED
    except BaseException as error:
        _log_failure(log_format, "" if log_format == "text" else f"{type(error).__name__}: {error}")
    if code in (EXIT_OK, EXIT_STOPPED):  # otherwise the log ends with what went wrong
        logging.getLogger("atoll").info("ends after %.1f s on the processor", time.process_time())
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors: that of gloo joins threads which may want the lock of the interpreter that it holds.
    os._exit(code)


def _log_failure(log_format: str, sentence: str) -> None:
    """As the last lines of the log."""
    if log_format == "json":
        logging.getLogger("atoll").critical("%s", sentence, exc_info=True)
        return
    traceback.print_exc()
    if sentence:
        print(sentence, file=sys.stderr)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C would: whatever the process is in, it leaves its `with` blocks in order. Once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _redirect_output(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
