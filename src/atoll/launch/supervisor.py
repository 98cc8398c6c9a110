"""Restart policy and supervisor loop of all supervised processes.

`RestartPolicy` counts the failures of one process. It computes the backoff before each restart, and decides when to
give up. `UnitSupervisor` supervises one unit of a launcher: `launch.local_supervisor` runs a command below a guard,
`launch.ray_supervisor` does the same on the nodes of a Ray cluster. `reference.supervisor` supervises processes of a
job, which come from a fork server (`reference.child_processes`).
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
"""Runtime after which the count of consecutive failures restarts."""
POLL_INTERVAL_S = 0.1
RUN_POLL_INTERVAL_S = 1.0
"""Interval between two reads of the state of the syncer's unit, which may be on a remote disk."""

EARLY_EXIT_CAUSE = "it has left, and its run continues"
"""Cause for a shard that exits with code 0 before its syncer, although its supervisor has not stopped it."""

_ENDED = '"state": "ended"'
STATE_FILES = (("supervisor.json", _ENDED), ("ray.json", _ENDED), ("slurm/state", "state=ended\n"))
"""State file of each launcher in the unit's directory, with the text that marks the unit as ended."""


def unit_has_ended(directory: Path) -> bool:
    """Return whether the unit in this directory has ended with exit code 0, under any launcher.

    A learner and its syncer may run under different launchers.
    """
    for name, marker in STATE_FILES:
        with contextlib.suppress(OSError):
            if marker in (directory / name).read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def signal_name(code: int) -> str:
    """Return the name of the signal behind a negative exit code, or the exit code.

    >>> signal_name(-9), signal_name(1)
    ('SIGKILL', 'exit code 1')
    """
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


class RestartPolicy:
    """Exponential backoff and failure limit of one process.

    The delay doubles with each failure in a row.

    Args:
        first_delay_s: Delay after the first failure in a row.
        max_delay_s: Upper bound of the delay.
        max_failures: Number of failures that are followed by a restart.
        consecutive_only: `max_failures` counts failures in a row, not all failures.
        failures: Failures before this object was created.

    >>> policy = RestartPolicy(1.0, 60.0, max_failures=8)
    >>> [policy.record_failure(was_healthy=False) for _ in range(7)]
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    >>> policy.record_failure(was_healthy=True), policy.record_failure(was_healthy=True)
    (1.0, None)
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
        self._max_failures, self._consecutive_only = max_failures, consecutive_only
        self._consecutive_failures = 0
        self.failures = failures
        """Number of failures that is compared with `max_failures`."""

    def record_failure(self, was_healthy: bool, is_counted: bool = True) -> float | None:
        """Return the delay before the next start, or None to give up.

        Args:
            was_healthy: The process ran for at least HEALTHY_RUNTIME_S.
            is_counted: False for a failure that the process did not cause, such as a lost node.
        """
        self._consecutive_failures = 1 if was_healthy else self._consecutive_failures + 1
        self.failures = self._consecutive_failures if self._consecutive_only else self.failures + is_counted
        if self.failures > self._max_failures:
            return None
        return float(min(self._first_s * 2.0 ** min(self._consecutive_failures - 1, 10), self._max_s))


class ExitInfo(NamedTuple):
    """Result of one start of a unit."""

    cause: str = ""
    """Cause of the failure; empty for exit code 0."""
    is_failure: bool = True
    """False if the cause is not the command, such as a lost node."""
    was_killed: bool = False
    """True if the unit did not end within its notice."""

    @classmethod
    def from_code(cls, code: int, was_killed: bool = False) -> ExitInfo:
        name = signal_name(code)
        return cls("" if code == 0 else f"killed by {name}" if code < 0 else name, was_killed=was_killed)


RunOnce = Callable[[Callable[[str], None], Callable[[], bool]], ExitInfo]
"""Function `(on_started, should_end)` that runs a unit once. It raises OSError if the unit cannot be started.

It calls `on_started` with a description of the process. It polls `should_end`: when that returns True, it sends SIGTERM
to the unit, and SIGKILL after the notice.
"""


class UnitSupervisor:
    """Loop that runs one unit until it ends with exit code 0, has no restart left or is stopped.

    Args:
        run_once: Runs the unit once.
        restarts: Backoff and failure limit.
        report: Receives the state, the cause and the time of the next start.
        notice_s: Seconds from SIGTERM to SIGKILL.
        syncer_directory: Directory of the syncer's unit; None for the syncer itself.
        ends_with_syncer: Exit code 0 before the end of the syncer is a failure.
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
        """Request the end of the unit. Safe in a signal handler and in any thread."""
        self._is_stopping = True

    def is_stopping(self) -> bool:
        return self._is_stopping

    def is_run_over(self, max_age_s: float = 0.0) -> bool:
        """Return whether the syncer has ended with exit code 0: a unit that starts now would wait for it forever.

        Args:
            max_age_s: Reuse a result that is not older.
        """
        now = time.monotonic()
        if now - self._checked_run_at >= max_age_s:
            self._is_run_over = self._syncer is not None and unit_has_ended(self._syncer)
            self._checked_run_at = now
        return self._is_run_over

    def run(self) -> tuple[UnitState, str]:
        while True:
            started_at = time.monotonic()
            try:
                exited = self._run_once(self._report_started, self._should_end)
            except OSError as error:
                exited = ExitInfo(f"cannot be started: {error}")
            late = f"did not end within {self._notice_s:g} s and was killed" if exited.was_killed else ""
            if self.is_stopping():
                return UnitState.STOPPED, late or ("" if exited.is_failure else exited.cause)
            is_over = self.is_run_over()
            if is_over and self._ends_with_syncer:
                return UnitState.ENDED, late or "the run is over"
            if not exited.cause and not self._ends_with_syncer:
                return UnitState.ENDED, ""
            cause = exited.cause or EARLY_EXIT_CAUSE
            if is_over:
                return UnitState.STOPPED, f"the run is over: its syncer has ended ({cause})"
            was_healthy = time.monotonic() - started_at >= HEALTHY_RUNTIME_S
            delay_s = self._restarts.record_failure(was_healthy, exited.is_failure)
            if delay_s is None:
                count = self._restarts.failures - 1
                return UnitState.FAILED, f"{cause} after {count} restarts" if count else cause
            self._report(UnitState.WAITING, cause, time.time() + delay_s)
            until = time.monotonic() + delay_s
            while (left_s := until - time.monotonic()) > 0.0:
                if self.is_stopping():
                    return UnitState.STOPPED, "while it waited for its restart"
                time.sleep(min(left_s, POLL_INTERVAL_S))

    def _report_started(self, description: str) -> None:
        self._report(UnitState.RUNNING, description, None)

    def _should_end(self) -> bool:
        return self.is_stopping() or (self._ends_with_syncer and self.is_run_over(RUN_POLL_INTERVAL_S))
