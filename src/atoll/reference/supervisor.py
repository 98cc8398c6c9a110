"""The processes of a decoupled run on this machine: one syncer, M learners, started again when they end too early.

Nothing that the run needs is in this process. It can be killed, and the run goes on from the directory later.
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
"""In a row, without training in between. A process that fails more often will fail again."""


@dataclass(slots=True)
class SupervisedProcess:
    """A process that is kept alive."""

    child: ChildProcess
    restarts: RestartPolicy = field(
        default_factory=lambda: RestartPolicy(BACKOFF_FIRST_S, BACKOFF_MAX_S, MAX_FAILURES, consecutive_only=True)
    )
    start_at: float | None = 0.0  # when to start it next; None: it runs, or is done
    is_done: bool = False
    planned_restart_delay_s: float | None = None  # after the next end, because that one was planned
    is_draining: bool = False  # its next end is for good
    trained_since_start: bool = False


class Supervisor:
    """Keeps one decoupled run going until it is over.

    Whoever wants to hurt the run says in a subclass what the children are, and strikes in `_inject_due`.
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
        self._token = secrets.token_urlsafe(24)  # on a shared machine loopback alone keeps nobody out
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

    # ---------------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Until the run is over. Raises `JobFailedError`; Ctrl-C ends all processes in order and passes on."""
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
        """The syncer ends when the run does; learners then still adopt what was published last."""
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
                self._add_news(f"{member.child.name} is started again")
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
        child, away_s = member.child, member.planned_restart_delay_s
        if self._syncer.is_done:
            member.is_done = True  # the run is over without it
            return
        if member.is_draining:
            member.is_done = True
            self._add_news(f"{child.name} has left for good")
            return
        planned, member.planned_restart_delay_s = away_s is not None, None
        record_fault(self.run, time.time(), child.name, signal_name(code), planned)
        if code == EXIT_REFUSED:
            self._give_up(member, f"{child.name} cannot take part: {child.last_log_line()}")
            return
        delay_s, why = away_s, "killed on purpose"
        if not planned:
            delay_s, why = member.restarts.record_failure(member.trained_since_start), f"ended by {signal_name(code)}"
        if delay_s is None:
            times = member.restarts.failures
            self._give_up(member, f"{child.name} ended {times} times in a row: {child.last_log_line()}")
            return
        member.start_at = now + delay_s
        self._add_news(f"{child.name} was {why}; it starts again in {delay_s:.3g} s, the others train on")
        self._progress.down[self._learner_number(member)] = f"{why}, starts again in {delay_s:.3g} s"

    def _give_up(self, member: SupervisedProcess, sentence: str) -> None:
        """Without one learner the run goes on; without the syncer or the last learner it cannot."""
        member.is_done = True
        self._add_news(sentence)
        self._progress.down[self._learner_number(member)] = sentence
        if member is self._syncer or member in self._shards or all(each.is_done for each in self._learners.values()):
            raise JobFailedError(f"{sentence} (log: {member.child.log})")

    def _learner_number(self, member: SupervisedProcess) -> int:
        return next((number for number, each in self._learners.items() if each is member), 0)

    # ---------------------------------------------------------------------------------------------------- looking

    def _poll_status(self) -> None:
        status = self._request_status()
        if status is not None:
            self._status = status
            for told in status.get("learners", ()):
                member = self._learners.get(told.get("learner", 0))
                if member is not None and told.get("standing") == "live" and told.get("step", 0) > 0:
                    member.trained_since_start = True
            if training_count(status):
                for member in (self._syncer, *self._shards):
                    member.trained_since_start = True
        self._progress.elapsed_s = time.monotonic() - self._started_at
        if self._status.get("stage") == "running" and all(member.is_done for member in self._learners.values()):
            if status is not None:
                raise JobFailedError("no island is left that trains: all were asked to leave; go on with --resume")
        elif self._status.get("stage") == "running" and not self._status.get("paused"):
            present = sum(1 for member in self._learners.values() if member.child.pid is not None)
            training = min(present, training_count(self._status))
            self._progress.goodput = self._meter.update(self._progress.elapsed_s, training)
            if self._evaluations is not None:
                self._evaluations.start_if_due(self._status["progress"])
        self._view.show(job_view(self._status, self._progress))

    def _request_status(self) -> dict[str, Any] | None:
        """The syncer's status; None while it is not there, which is no reason to worry."""
        if self._syncer.child.pid is None:
            return None
        try:
            status: dict[str, Any] = send_request(self.address, self._token, "GET", "/v1/status", STATUS_TIMEOUT_S)
            return status
        except ValueError:
            return None

    def _add_news(self, sentence: str) -> None:
        self._progress.news.append(sentence)

    # ---------------------------------------------------------------------------------------------------- kills

    def _inject_due(self) -> None:
        """A learner is killed once it trains: there is nothing to see in the death of one that never began."""
        for kill in list(self._kills):
            member = self._learners[kill.learner]
            if self._status.get("progress", 0.0) < kill.progress:
                continue
            if member.child.pid is None or not member.trained_since_start:
                continue
            self._kills.remove(kill)
            member.planned_restart_delay_s = kill.restart_delay_s
            member.child.send(signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------------- the end

    def _terminate(self) -> None:
        """Learners first, so that they can say goodbye; then the syncer."""
        try:
            terminate_all([member.child for member in self._learners.values()], SHUTDOWN_TIMEOUT_S)
        finally:
            terminate_all([member.child for member in (self._syncer, *self._shards)], SHUTDOWN_TIMEOUT_S)
            if self._evaluations is not None:
                self._evaluations.join()


def serve_job(settings: JobSettings, run_id: str, run: Path, port: int, token: str, host: str = "127.0.0.1") -> None:
    """In the syncer's process, until the run is over."""
    torch.set_num_threads(1)  # the cores belong to the learners
    # Another address than the loopback one is that of network namespaces, which are on this machine too.
    if not serve_syncer(run, run_settings_for(settings, run_id), host=host, port=port, token=token, plain_text=True):
        raise KeyboardInterrupt  # it was told to stop


def serve_job_shard(shard: int, shards: int, run: Path, syncer: str, token: str, host: str) -> None:
    """In a shard's process, until it is told to stop."""
    torch.set_num_threads(1)
    serve_shard(
        run / SHARDS_FOLDER / str(shard), shard, shards, parse_endpoint(syncer), host=host, token=token, plain_text=True
    )
    raise KeyboardInterrupt  # it was told to stop


def _pending_kills(settings: JobSettings, run: Path) -> list[PlannedKill]:
    """In the order of the run, without those that happened before it was interrupted."""
    left = sorted(settings.kills, key=lambda kill: kill.progress)
    for fault in read_faults(run):
        done = next((kill for kill in left if fault["planned"] and fault["who"] == f"learner {kill.learner}"), None)
        if done is not None:
            left.remove(done)
    return left


def run_settings_for(settings: JobSettings, run_id: str) -> RunSettings:
    """The run that a syncer serves: protocol and numerics of the job, and for its learners the whole of it."""
    told = settings.to_json()
    return RunSettings(settings.run_config(run_id), settings.numerics, told, shards=settings.shards)


def new_run_id(run: Path) -> str:
    """Two runs of one name are not the same run."""
    return f"{run.absolute().name}-{secrets.token_hex(4)}"


def _free_port(host: str) -> int:
    """A port that nobody listens on now. The syncer keeps it when it is started again: learners dial it.

    Not one that the system gives to outgoing connections: a learner that dials while the syncer is away could get that
    very port for its own end, and would talk to itself.
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
