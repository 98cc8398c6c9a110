"""Child processes of a job: started by a fork server, stopped by pid, and ended together with the job.

`import torch` takes seconds. The fork server imports it once, so a learner that is restarted is ready at once.
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
"""Modules that the fork server imports.

The last two are otherwise imported by the first batch and the first optimizer step, two seconds in every child.
"""

LOG_FOLDER = "logs"

EXIT_OK, EXIT_ERROR, EXIT_REFUSED, EXIT_STOPPED = 0, 1, 2, 130
"""Exit codes of a child: success; unexpected error; invalid request, a restart would not help; stopped by a signal."""

ORPHAN_GRACE_S = 10.0


class JobFailedError(Exception):
    """Raised when the job cannot continue. Its directory contains what was trained until then."""


def fork_server_context() -> ForkServerContext:
    """Return the context that starts children. The first call starts the fork server, which imports torch meanwhile."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED_MODULES))
    forkserver.ensure_running()
    return context


class ChildProcess:
    """Named child process that can be started again after it has exited. All its starts append to one log."""

    def __init__(self, name: str, run: Path, target: Callable[..., object], args: Sequence[Any]) -> None:
        self.name = name
        self.log = run / LOG_FOLDER / f"{name.replace(' ', '-')}.log"
        self.starts = 0
        self.process: BaseProcess | None = None
        self._target = target
        self._args = tuple(args)

    def start(self, context: ForkServerContext) -> None:
        assert self.process is None, f"{self.name} is already running"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        log_format = os.environ.get(LOG_FORMAT_VARIABLE, "text")
        process = context.Process(
            target=_run_child, args=(self.name, str(self.log), log_format, self._target, self._args), name=self.name
        )
        process.start()
        self.process = process  # only after start(): a process that failed to start cannot be joined

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def poll_exit_code(self) -> int | None:
        """Return the exit code once, or None if the process runs or was never started. -n means signal n."""
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
        """Wait until the process exits. Kill it after the timeout."""
        if self.process is None:
            return
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self.process = None

    def last_log_line(self) -> str:
        """Return the message of the last line of the log that is not empty."""
        lines = [line.strip() for line in read_tail(self.log, 4096).decode("utf-8", "replace").splitlines()]
        return next((extract_message(line) for line in reversed(lines) if line), "")


def terminate_all(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Stop all children in parallel: SIGTERM, then SIGKILL after the timeout, or at once on a second Ctrl-C."""
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
    """Wait until one of the children exits, or for the timeout."""
    sentinels = [child.process.sentinel for child in children if child.process is not None]
    if sentinels:
        multiprocessing.connection.wait(sentinels, timeout_s)
    else:
        threading.Event().wait(timeout_s)


@contextlib.contextmanager
def sigterm_as_interrupt(is_handled: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM inside the block. Outside of the main thread this does nothing.

    Args:
        is_handled: called on SIGTERM. True means that the caller handles this signal itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if is_handled is None or not is_handled():
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# --------------------------------------------------------------------------------------------------------------------
# In the child


def _run_child(name: str, log: str, log_format: str, target: Callable[..., object], args: Sequence[Any]) -> NoReturn:
    os.setpgid(0, 0)  # Ctrl-C in the terminal must reach the job only, which then stops its children in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    _redirect_output(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 writes all stacks into the log
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
    if code in (EXIT_OK, EXIT_STOPPED):  # otherwise the error must stay the last line of the log
        logging.getLogger("atoll").info("process exits; CPU time %.1f s", time.process_time())
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: that of gloo holds the interpreter lock while it joins threads that may wait for this lock.
    os._exit(code)


def _log_failure(log_format: str, message: str) -> None:
    """Write the traceback, then the message, as the last lines of the log."""
    if log_format == "json":
        logging.getLogger("atoll").critical("%s", message, exc_info=True)
        return
    traceback.print_exc()
    if message:
        print(message, file=sys.stderr)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, once, so that the process leaves its `with` blocks in order."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _redirect_output(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
