"""Supervisor of a decoupled run on this machine: starts one syncer and M learners, and restarts them after failures.

It has no state that the run needs. If it is killed, the run can be resumed from its directory.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.dashboard.terminal import LiveView
from atoll.launch.supervisor import RestartPolicy, signal_name
from atoll.reference.child_processes import (
    EXIT_OK,
    EXIT_REFUSED,
    ChildProcess,
    JobFailedError,
    fork_server_context,
    terminate_all,
    wait_for_any,
)
from atoll.reference.evaluation import PeriodicEvaluation
from atoll.reference.job_progress import GoodputMeter, JobProgress, job_view, training_count
from atoll.reference.job_settings import JobSettings, PlannedKill
from atoll.reference.learner_main import train_learner
from atoll.reference.report import read_faults, record_fault
from atoll.store.run_settings import RunSettings
from atoll.store.snapshots import SHARDS_FOLDER
from atoll.syncer.main import serve_syncer
from atoll.syncer.shards.process import serve_shard
from atoll.transport.endpoint import parse_endpoint, send_request

POLL_INTERVAL_S = 0.25
STATUS_TIMEOUT_S = 1.0
SHUTDOWN_TIMEOUT_S = 8.0
FINAL_ADOPTION_TIMEOUT_S = 30.0  # learners have this long to adopt the final versions after the syncer has ended

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
MAX_FAILURES = 5
"""Consecutive failures without training in between after which a process is not restarted any more."""


@dataclass(slots=True)
class SupervisedProcess:
    """Child process with the state of its restarts."""

    child: ChildProcess
    restarts: RestartPolicy = field(
        default_factory=lambda: RestartPolicy(BACKOFF_FIRST_S, BACKOFF_MAX_S, MAX_FAILURES, consecutive_only=True)
    )
    start_at: float | None = 0.0  # time of the next start; None: it runs or is done
    is_done: bool = False  # the process is not started again
    planned_restart_delay_s: float | None = None  # set when a planned kill was sent
    is_draining: bool = False  # the next exit is final
    trained_since_start: bool = False


class Supervisor:
    """Supervisor of one decoupled run until it has finished.

    To inject faults, a subclass overrides the `_*_child` methods and `_inject_due`.
    """

    poll_interval_s = POLL_INTERVAL_S

    def __init__(
        self,
        settings: JobSettings,
        run: Path,
        view: LiveView,
        title: str,
        host: str = "127.0.0.1",
        evaluations: PeriodicEvaluation | None = None,
    ) -> None:
        self.settings = settings
        self.run = run
        self.host = host
        self._view = view
        self._evaluations = evaluations
        self._token = secrets.token_urlsafe(24)  # on a shared machine other users can connect to loopback
        self._port = _free_port(host)
        self._kills = _pending_kills(settings, run)
        self._status: dict[str, Any] = {}
        self._progress = JobProgress(title, settings.learners)
        self._meter = GoodputMeter(settings.learners)
        self._started_at = time.monotonic()
        self._finished_at: float | None = None
        self._context = fork_server_context()
        self._syncer = SupervisedProcess(self._syncer_child())
        self._shards = [SupervisedProcess(self._shard_child(k)) for k in range(settings.shards)]
        self._learners = {n: SupervisedProcess(self._learner_child(n)) for n in range(1, settings.learners + 1)}

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    def _syncer_child(self) -> ChildProcess:
        args = (self.settings, new_run_id(self.run), self.run, self._port, self._token, self.host)
        return ChildProcess("syncer", self.run, serve_job, args)

    def _shard_child(self, shard: int) -> ChildProcess:
        args = (shard, self.settings.shards, self.run, self.address, self._token, self.host)
        return ChildProcess(f"shard {shard}", self.run, serve_job_shard, args)

    def _learner_child(self, learner: int) -> ChildProcess:
        args = (self.settings, learner, self.address, self._token, self.run)
        return ChildProcess(f"learner {learner}", self.run, train_learner, args)

    # ---------------------------------------------------------------------------------------------------- main loop

    def train(self) -> None:
        """Run all processes until the run has finished.

        Raise `JobFailedError` if it cannot continue. Ctrl-C stops all processes in order and is raised again.
        """
        try:
            while not self._is_over():
                now = time.monotonic()
                self._start_due(now)
                wait_for_any([member.child for member in self._members()], self.poll_interval_s)
                self._reap(time.monotonic())
                self._poll_status()
                self._inject_due()
        finally:
            self._terminate()

    def _members(self) -> list[SupervisedProcess]:
        return [self._syncer, *self._shards, *self._learners.values()]

    def _is_over(self) -> bool:
        """Return whether the syncer has ended and the learners have adopted the final versions, or timed out."""
        if not self._syncer.is_done:
            return False
        running = [member for member in self._learners.values() if member.child.pid is not None]
        return not running or (
            self._finished_at is not None and time.monotonic() > self._finished_at + FINAL_ADOPTION_TIMEOUT_S
        )

    def _start_due(self, now: float) -> None:
        for member in self._members():
            if member.start_at is None or member.is_done or now < member.start_at:
                continue
            if self._syncer.is_done and member is not self._syncer:
                member.is_done = True
                continue
            member.start_at = None
            member.trained_since_start = False
            if member.child.starts:
                self._add_news(f"{member.child.name} is restarted")
            member.child.start(self._context)
            self._progress.down.pop(self._learner_number(member), None)

    def _reap(self, now: float) -> None:
        for member in self._members():
            code = member.child.poll_exit_code()
            if code is None:
                continue
            if code == EXIT_OK:
                member.is_done = True
                if member is self._syncer:
                    self._finished_at = now
                continue
            self._handle_early_exit(member, code, now)

    def _handle_early_exit(self, member: SupervisedProcess, code: int, now: float) -> None:
        child, planned_delay_s = member.child, member.planned_restart_delay_s
        if self._syncer.is_done:
            member.is_done = True  # the run has finished
            return
        if member.is_draining:
            member.is_done = True
            self._add_news(f"{child.name} has left the run")
            return
        planned, member.planned_restart_delay_s = planned_delay_s is not None, None
        record_fault(self.run, time.time(), child.name, signal_name(code), planned)
        if code == EXIT_REFUSED:
            self._give_up(member, f"{child.name} cannot join: {child.last_log_line()}")
            return
        delay_s, cause = planned_delay_s, "killed on purpose"
        if not planned:
            delay_s, cause = member.restarts.record_failure(member.trained_since_start), f"exited ({signal_name(code)})"
        if delay_s is None:
            failures = member.restarts.failures
            self._give_up(
                member, f"{child.name} failed {failures} times in a row and is not restarted: {child.last_log_line()}"
            )
            return
        member.start_at = now + delay_s
        verb = "was " if planned else ""
        self._add_news(f"{child.name} {verb}{cause}; restart in {delay_s:.3g} s; the other processes continue")
        self._progress.down[self._learner_number(member)] = f"{cause}, restart in {delay_s:.3g} s"

    def _give_up(self, member: SupervisedProcess, cause: str) -> None:
        """Stop restarting a process. The job fails if this is the syncer, a shard or the last learner."""
        member.is_done = True
        self._add_news(cause)
        self._progress.down[self._learner_number(member)] = cause
        if member is self._syncer or member in self._shards or all(each.is_done for each in self._learners.values()):
            raise JobFailedError(f"{cause} (log: {member.child.log})")

    def _learner_number(self, member: SupervisedProcess) -> int:
        return next((number for number, each in self._learners.items() if each is member), 0)

    # ---------------------------------------------------------------------------------------------------- status

    def _poll_status(self) -> None:
        status = self._request_status()
        if status is not None:
            self._status = status
            for learner in status.get("learners", ()):
                member = self._learners.get(learner.get("learner", 0))
                if member is not None and learner.get("standing") == "live" and learner.get("step", 0) > 0:
                    member.trained_since_start = True
            if training_count(status):
                for member in (self._syncer, *self._shards):
                    member.trained_since_start = True
        self._progress.elapsed_s = time.monotonic() - self._started_at
        if self._status.get("stage") == "running" and all(member.is_done for member in self._learners.values()):
            if status is not None:
                raise JobFailedError("no learner is left: all were drained; continue the run with --resume")
        elif self._status.get("stage") == "running" and not self._status.get("paused"):
            present = sum(1 for member in self._learners.values() if member.child.pid is not None)
            training = min(present, training_count(self._status))
            self._progress.goodput = self._meter.update(self._progress.elapsed_s, training)
            if self._evaluations is not None:
                self._evaluations.start_if_due(self._status["progress"])
        self._view.show(job_view(self._status, self._progress))

    def _request_status(self) -> dict[str, Any] | None:
        """Return the syncer's status, or None while no syncer replies, for example during its restart."""
        if self._syncer.child.pid is None:
            return None
        try:
            status: dict[str, Any] = send_request(self.address, self._token, "GET", "/v1/status", STATUS_TIMEOUT_S)
            return status
        except ValueError:
            return None

    def _add_news(self, event: str) -> None:
        self._progress.news.append(event)

    # ---------------------------------------------------------------------------------------------------- kills

    def _inject_due(self) -> None:
        """Send the planned kills whose progress is reached. A learner that does not train yet is killed later."""
        for kill in list(self._kills):
            member = self._learners[kill.learner]
            if self._status.get("progress", 0.0) < kill.progress:
                continue
            if member.child.pid is None or not member.trained_since_start:
                continue
            self._kills.remove(kill)
            member.planned_restart_delay_s = kill.restart_delay_s
            member.child.send(signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------------- shutdown

    def _terminate(self) -> None:
        """Stop the learners first, so that they can leave the run; then the syncer and its shards."""
        try:
            terminate_all([member.child for member in self._learners.values()], SHUTDOWN_TIMEOUT_S)
        finally:
            terminate_all([member.child for member in (self._syncer, *self._shards)], SHUTDOWN_TIMEOUT_S)
            if self._evaluations is not None:
                self._evaluations.join()


def serve_job(settings: JobSettings, run_id: str, run: Path, port: int, token: str, host: str = "127.0.0.1") -> None:
    """Run the syncer in this process until the run has finished."""
    torch.set_num_threads(1)  # the learners need the cores
    # plain_text: addresses other than loopback are those of network namespaces on this machine.
    if not serve_syncer(run, run_settings_for(settings, run_id), host=host, port=port, token=token, plain_text=True):
        raise KeyboardInterrupt  # it was stopped before the end of the run


def serve_job_shard(shard: int, shards: int, run: Path, syncer: str, token: str, host: str) -> None:
    """Run a shard in this process until it is stopped."""
    torch.set_num_threads(1)
    serve_shard(
        run / SHARDS_FOLDER / str(shard), shard, shards, parse_endpoint(syncer), host=host, token=token, plain_text=True
    )
    raise KeyboardInterrupt  # a shard runs until it is stopped


def _pending_kills(settings: JobSettings, run: Path) -> list[PlannedKill]:
    """Return the planned kills by progress, without those that happened before the run was interrupted."""
    pending = sorted(settings.kills, key=lambda kill: kill.progress)
    for fault in read_faults(run):
        done = next((kill for kill in pending if fault["planned"] and fault["who"] == f"learner {kill.learner}"), None)
        if done is not None:
            pending.remove(done)
    return pending


def run_settings_for(settings: JobSettings, run_id: str) -> RunSettings:
    """Return the settings that the syncer serves: protocol, numerics, and all settings of the job for its learners."""
    return RunSettings(settings.run_config(run_id), settings.numerics, settings.to_json(), shards=settings.shards)


def new_run_id(run: Path) -> str:
    """Return a unique run id: two runs with the same directory name are different runs."""
    return f"{run.absolute().name}-{secrets.token_hex(4)}"


def _free_port(host: str) -> int:
    """Return an unused port. A restarted syncer uses it again, because learners reconnect to it.

    It is outside of the range of ephemeral ports. Otherwise a learner that connects while the syncer is down could get
    this port as the source port of its own connection, and would connect to itself.
    """
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise JobFailedError("no port between 20000 and 32000 is free for the syncer")
