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
from atoll.launch.supervisor import Restarts, signal_name
from atoll.reference.children import FINE, REFUSED, Child, JobFailed, end_all, processes, wait_for_any
from atoll.reference.evaluation import Evaluations
from atoll.reference.island import train_island
from atoll.reference.job_progress import GoodputMeter, JobProgress, job_view, training_count
from atoll.reference.job_settings import JobSettings, Kill
from atoll.reference.report import note_fault, read_faults
from atoll.store.run_settings import RunSettings
from atoll.store.snapshots import SHARDS
from atoll.syncer.main import serve_syncer
from atoll.syncer.shards.process import serve_shard
from atoll.transport.endpoint import ask, place

LOOK_S = 0.25
STATUS_WAIT_S = 1.0
END_WAIT_S = 8.0
LAST_WORDS_S = 30.0  # learners have this long to adopt the final versions after the syncer has ended

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
MAX_FAILURES = 5
"""In a row, without training in between. A process that fails more often will fail again."""


@dataclass(slots=True)
class SupervisedProcess:
    """A process that is kept alive."""

    child: Child
    restarts: Restarts = field(
        default_factory=lambda: Restarts(BACKOFF_FIRST_S, BACKOFF_MAX_S, MAX_FAILURES, in_a_row=True)
    )
    start_at: float | None = 0.0  # when to start it next; None: it runs, or is done
    done: bool = False
    away_s: float | None = None  # after the next end, because that one was planned
    leaves: bool = False  # its next end is for good
    trained_since_start: bool = False


class Supervisor:
    """Keeps one decoupled run going until it is over.

    Whoever wants to hurt the run says in a subclass what the children are, and strikes in `_strike_due`.
    """

    look_s = LOOK_S

    def __init__(
        self,
        settings: JobSettings,
        run: Path,
        view: LiveView,
        title: str,
        host: str = "127.0.0.1",
        evaluations: Evaluations | None = None,
    ) -> None:
        self.settings = settings
        self.run = run
        self.host = host
        self._view = view
        self._evaluations = evaluations
        self._token = secrets.token_urlsafe(24)  # on a shared machine loopback alone keeps nobody out
        self._port = _free_port(host)
        self._kills = _kills_left(settings, run)
        self._status: dict[str, Any] = {}
        self._progress = JobProgress(title, settings.learners)
        self._meter = GoodputMeter(settings.learners)
        self._began = time.monotonic()
        self._over_at: float | None = None
        self._context = processes()
        self._syncer = SupervisedProcess(self._syncer_child())
        self._shards = [SupervisedProcess(self._shard_child(k)) for k in range(settings.shards)]
        self._learners = {n: SupervisedProcess(self._learner_child(n)) for n in range(1, settings.learners + 1)}

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    def _syncer_child(self) -> Child:
        args = (self.settings, new_run_id(self.run), self.run, self._port, self._token, self.host)
        return Child("syncer", self.run, serve_job, args)

    def _shard_child(self, shard: int) -> Child:
        args = (shard, self.settings.shards, self.run, self.address, self._token, self.host)
        return Child(f"shard {shard}", self.run, serve_job_shard, args)

    def _learner_child(self, learner: int) -> Child:
        args = (self.settings, learner, self.address, self._token, self.run)
        return Child(f"learner {learner}", self.run, train_island, args)

    # ---------------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Until the run is over. Raises `JobFailed`; Ctrl-C ends all processes in order and passes on."""
        try:
            while not self._is_over():
                now = time.monotonic()
                self._start_due(now)
                wait_for_any([member.child for member in self._members()], self.look_s)
                self._reap(time.monotonic())
                self._look()
                self._strike_due()
        finally:
            self._end()

    def _members(self) -> list[SupervisedProcess]:
        return [self._syncer, *self._shards, *self._learners.values()]

    def _is_over(self) -> bool:
        """The syncer ends when the run does; learners then still adopt what was published last."""
        if not self._syncer.done:
            return False
        running = [member for member in self._learners.values() if member.child.pid is not None]
        return not running or (self._over_at is not None and time.monotonic() > self._over_at + LAST_WORDS_S)

    def _start_due(self, now: float) -> None:
        for member in self._members():
            if member.start_at is None or member.done or now < member.start_at:
                continue
            if self._syncer.done and member is not self._syncer:
                member.done = True
                continue
            member.start_at = None
            member.trained_since_start = False
            if member.child.starts:
                self._tell(f"{member.child.name} is started again")
            member.child.start(self._context)
            self._progress.down.pop(self._number(member), None)

    def _reap(self, now: float) -> None:
        for member in self._members():
            code = member.child.ended()
            if code is None:
                continue
            if code == FINE:
                member.done = True
                if member is self._syncer:
                    self._over_at = now
                continue
            self._ended_early(member, code, now)

    def _ended_early(self, member: SupervisedProcess, code: int, now: float) -> None:
        child, away_s = member.child, member.away_s
        if self._syncer.done:
            member.done = True  # the run is over without it
            return
        if member.leaves:
            member.done = True
            self._tell(f"{child.name} has left for good")
            return
        planned, member.away_s = away_s is not None, None
        note_fault(self.run, time.time(), child.name, signal_name(code), planned)
        if code == REFUSED:
            self._give_up(member, f"{child.name} cannot take part: {child.last_words()}")
            return
        delay_s, why = away_s, "killed on purpose"
        if not planned:
            delay_s, why = member.restarts.failed(member.trained_since_start), f"ended by {signal_name(code)}"
        if delay_s is None:
            times = member.restarts.failures
            self._give_up(member, f"{child.name} ended {times} times in a row: {child.last_words()}")
            return
        member.start_at = now + delay_s
        self._tell(f"{child.name} was {why}; it starts again in {delay_s:.3g} s, the others train on")
        self._progress.down[self._number(member)] = f"{why}, starts again in {delay_s:.3g} s"

    def _give_up(self, member: SupervisedProcess, sentence: str) -> None:
        """Without one learner the run goes on; without the syncer or the last learner it cannot."""
        member.done = True
        self._tell(sentence)
        self._progress.down[self._number(member)] = sentence
        if member is self._syncer or member in self._shards or all(each.done for each in self._learners.values()):
            raise JobFailed(f"{sentence} (log: {member.child.log})")

    def _number(self, member: SupervisedProcess) -> int:
        return next((number for number, each in self._learners.items() if each is member), 0)

    # ---------------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        status = self._ask()
        if status is not None:
            self._status = status
            for told in status.get("learners", ()):
                member = self._learners.get(told.get("learner", 0))
                if member is not None and told.get("standing") == "live" and told.get("step", 0) > 0:
                    member.trained_since_start = True
            if training_count(status):
                for member in (self._syncer, *self._shards):
                    member.trained_since_start = True
        self._progress.elapsed_s = time.monotonic() - self._began
        if self._status.get("stage") == "running" and all(member.done for member in self._learners.values()):
            if status is not None:
                raise JobFailed("no island is left that trains: all were asked to leave; go on with --resume")
        elif self._status.get("stage") == "running" and not self._status.get("paused"):
            present = sum(1 for member in self._learners.values() if member.child.pid is not None)
            training = min(present, training_count(self._status))
            self._progress.goodput = self._meter.look(self._progress.elapsed_s, training)
            if self._evaluations is not None:
                self._evaluations.look(self._status["progress"])
        self._view.show(job_view(self._status, self._progress))

    def _ask(self) -> dict[str, Any] | None:
        """The syncer's status; None while it is not there, which is no reason to worry."""
        if self._syncer.child.pid is None:
            return None
        try:
            status: dict[str, Any] = ask(self.address, self._token, "GET", "/v1/status", STATUS_WAIT_S)
            return status
        except ValueError:
            return None

    def _tell(self, sentence: str) -> None:
        self._progress.news.append(sentence)

    # ---------------------------------------------------------------------------------------------------- kills

    def _strike_due(self) -> None:
        """A learner is killed once it trains: there is nothing to see in the death of one that never began."""
        for kill in list(self._kills):
            member = self._learners[kill.learner]
            if self._status.get("progress", 0.0) < kill.progress:
                continue
            if member.child.pid is None or not member.trained_since_start:
                continue
            self._kills.remove(kill)
            member.away_s = kill.away_s
            member.child.send(signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------------- the end

    def _end(self) -> None:
        """Learners first, so that they can say goodbye; then the syncer."""
        try:
            end_all([member.child for member in self._learners.values()], END_WAIT_S)
        finally:
            end_all([member.child for member in (self._syncer, *self._shards)], END_WAIT_S)
            if self._evaluations is not None:
                self._evaluations.end()


def serve_job(settings: JobSettings, run_id: str, run: Path, port: int, token: str, host: str = "127.0.0.1") -> None:
    """In the syncer's process, until the run is over."""
    torch.set_num_threads(1)  # the cores belong to the learners
    # Another address than the loopback one is that of network namespaces, which are on this machine too.
    if not serve_syncer(run, run_of(settings, run_id), host=host, port=port, token=token, plain_text=True):
        raise KeyboardInterrupt  # it was told to stop


def serve_job_shard(shard: int, shards: int, run: Path, head: str, token: str, host: str) -> None:
    """In a shard's process, until it is told to stop."""
    torch.set_num_threads(1)
    serve_shard(run / SHARDS / str(shard), shard, shards, place(head), host=host, token=token, plain_text=True)
    raise KeyboardInterrupt  # it was told to stop


def _kills_left(settings: JobSettings, run: Path) -> list[Kill]:
    """In the order of the run, without those that happened before it was interrupted."""
    left = sorted(settings.kills, key=lambda kill: kill.progress)
    for fault in read_faults(run):
        done = next((kill for kill in left if fault["planned"] and fault["who"] == f"learner {kill.learner}"), None)
        if done is not None:
            left.remove(done)
    return left


def run_of(settings: JobSettings, run_id: str) -> RunSettings:
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
    raise JobFailed("no port between 20000 and 32000 is free for the syncer")
