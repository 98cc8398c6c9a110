"""One rule for every process that is kept running: when it is started again, how long it waits, when to give up.

`RestartPolicy` counts the exits of one process and decides. `UnitSupervisor` keeps one unit of a launcher running:
`launch.local_supervisor` runs a command below a guard, `launch.ray_supervisor` the same on the nodes of a Ray cluster.
`reference.supervisor` keeps the processes of a job running, which come from a fork server
(`reference.child_processes`).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from atoll.launch.launcher import UnitState

HEALTHY_RUNTIME_S = 120.0
"""A command that ran this long failed for a new reason: its failures in a row are counted from one again."""
POLL_INTERVAL_S = 0.1
RUN_POLL_INTERVAL_S = 1.0
"""Between two looks at the files of the syncer's unit, which may be on a remote disk."""

EARLY_EXIT_CAUSE = "it left, and its run goes on"
"""Why exit code 0 is a failure of a unit that ends with its syncer: something other than its supervisor stopped it."""

_ENDED = '"state": "ended"'
STATE_FILES = (("supervisor.json", _ENDED), ("ray.json", _ENDED), ("slurm/state", "state=ended\n"))
"""Where each launcher writes how a unit is, in the directory of that unit."""


def unit_has_ended(directory: Path) -> bool:
    """Return whether the unit of this directory has ended well, whichever launcher ran it.

    A learner and its syncer may run on different launchers.
    """
    for name, words in STATE_FILES:
        with contextlib.suppress(OSError):
            if words in (directory / name).read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def signal_name(code: int) -> str:
    """
    >>> signal_name(-9), signal_name(1)
    ('SIGKILL', 'exit code 1')
    """
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


class RestartPolicy:
    """The failures of one process: the delay before each restart, and when to give up.

    The delay doubles with each failure in a row. `max_failures` counts all failures, or those in a row.

    >>> restarts = Restarts(1.0, 60.0, max_failures=8)
    >>> [restarts.failed(was_healthy=False) for _ in range(7)], restarts.failed(True), restarts.failed(True)
    ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0], 1.0, None)
    """

    def __init__(
        self,
        first_delay_s: float,
        max_delay_s: float,
        max_failures: int,
        consecutive_only: bool = False,
        failures: int = 0,
    ) -> None:
        self._first_s, self._max_s = first_delay_s, max_delay_s
        self._max_failures, self._counts_in_a_row = max_failures, consecutive_only
        self._in_a_row = 0
        self.failures = failures
        """As `max_failures` counts them."""

    def record_failure(self, was_healthy: bool, is_counted: bool = True) -> float | None:
        """Return the delay before the next start, or None to give up. `counts` False: not a failure of the process."""
        self._in_a_row = 1 if was_healthy else self._in_a_row + 1
        self.failures = self._in_a_row if self._counts_in_a_row else self.failures + is_counted
        if self.failures > self._max_failures:
            return None
        return float(min(self._first_s * 2.0 ** min(self._in_a_row - 1, 10), self._max_s))


class ExitInfo(NamedTuple):
    """How one start of a unit has ended."""

    cause: str = ""
    """Empty: with exit code 0."""
    is_failure: bool = True
    """Of the command. A lost node is none: it says nothing about the command that ran there."""
    was_killed: bool = False
    """It did not end within its notice."""

    @classmethod
    def from_code(cls, code: int, was_killed: bool = False) -> ExitInfo:
        name = signal_name(code)
        return cls("" if code == 0 else f"killed by {name}" if code < 0 else name, was_killed=was_killed)


RunOnce = Callable[[Callable[[str], None], Callable[[], bool]], ExitInfo]
"""Runs a unit once; OSError where it cannot be started. Calls the first argument with a description of the process,
and the second one again and again: once it is true, the unit gets SIGTERM, and SIGKILL when its notice is over."""


class UnitSupervisor:
    """Keeps one unit running until it ends well, fails for good or is stopped.

    `report` takes the state, the cause and the time of the next start. `syncer_directory` is the directory of the
    syncer's unit, None for the syncer itself.
    """

    def __init__(
        self,
        run_once: RunOnce,
        restarts: RestartPolicy,
        report: Callable[[UnitState, str, float | None], object],
        notice_s: float,
        syncer_directory: Path | None,
        ends_with_syncer: bool,
    ) -> None:
        self._run_once, self._restarts, self._report = run_once, restarts, report
        self._notice_s, self._syncer, self._ends_with_syncer = notice_s, syncer_directory, ends_with_syncer
        self._is_run_over, self._checked_run_at = False, float("-inf")
        self._is_stopping = False

    def stop(self) -> None:
        """End the unit soon. May be called from a signal handler and from any thread."""
        self._is_stopping = True

    def is_stopping(self) -> bool:
        return self._is_stopping

    def is_run_over(self, max_age_s: float = 0.0) -> bool:
        """Return whether the syncer has ended well: a unit that starts now would wait for it for ever."""
        now = time.monotonic()
        if now - self._checked_run_at >= max_age_s:
            self._is_run_over = self._syncer is not None and unit_has_ended(self._syncer)
            self._checked_run_at = now
        return self._is_run_over

    def run(self) -> tuple[UnitState, str]:
        while True:
            began = time.monotonic()
            try:
                ended = self._run_once(self._started, self._should_end)
            except OSError as error:
                ended = ExitInfo(f"it cannot be started: {error}")
            late = f"did not end within {self._notice_s:g} s, and was killed" if ended.was_killed else ""
            if self.is_stopping():
                return UnitState.STOPPED, late or ("" if ended.is_failure else ended.cause)
            is_over = self.is_run_over()
            if is_over and self._ends_with_syncer:
                return UnitState.ENDED, late or "the run is over"
            if not ended.cause and not self._ends_with_syncer:
                return UnitState.ENDED, ""
            cause = ended.cause or EARLY_EXIT_CAUSE
            if is_over:
                return UnitState.STOPPED, f"the run is over: its syncer has ended ({cause})"
            was_healthy = time.monotonic() - began >= HEALTHY_RUNTIME_S
            delay_s = self._restarts.record_failure(was_healthy, ended.is_failure)
            if delay_s is None:
                count = self._restarts.failures - 1
                return UnitState.FAILED, f"{cause} after {count} restarts" if count else cause
            self._report(UnitState.WAITING, cause, time.time() + delay_s)
            until = time.monotonic() + delay_s
            while (left_s := until - time.monotonic()) > 0.0:
                if self.is_stopping():
                    return UnitState.STOPPED, "while it waited to be started again"
                time.sleep(min(left_s, POLL_INTERVAL_S))

    def _started(self, description: str) -> None:
        self._report(UnitState.RUNNING, description, None)

    def _should_end(self) -> bool:
        return self.is_stopping() or (self._ends_with_syncer and self.is_run_over(RUN_POLL_INTERVAL_S))
