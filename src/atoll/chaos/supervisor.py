"""Supervisor of a run under fault: the supervisor of `atoll train`, extended to inject the faults of a plan."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.chaos import disks, netns
from atoll.chaos.disks import Disk
from atoll.chaos.fault_log import FaultLog, FaultRecord
from atoll.chaos.faults import Target
from atoll.chaos.in_process import FaultCommands, run_faulty_learner, run_faulty_syncer
from atoll.chaos.injectors import INJECTORS, Injector
from atoll.chaos.netns import Namespaces
from atoll.chaos.plan import Plan, PlannedFault, overlaps
from atoll.chaos.relay import Relay, Relays
from atoll.core.reasons import REASONS
from atoll.dashboard.terminal import LiveView
from atoll.reference.child_processes import ChildProcess, JobFailedError
from atoll.reference.job_settings import JobSettings
from atoll.reference.supervisor import SupervisedProcess, Supervisor, new_run_id
from atoll.store.snapshots import STORE_FOLDER

POLL_INTERVAL_S = 0.1
MAX_CLOCK_STEP_S = 0.5
"""Maximum gap between two polls that the plan's clock counts. Without this limit, all faults that became due while this
process was stalled would begin at once, against the plan."""

STATUS_INTERVAL_S = 0.2
READY_TIMEOUT_S = 120.0
"""Time that a fault waits until its target runs, trains or is connected. After that it is recorded as missed."""

OBSERVE_TIMEOUT_S = 30.0
"""Time until a fault without a duration, such as poison, must be observed. A fault with a duration is prolonged by up
to this time until it has affected its target."""

PERSIST_FAILED_TEXT = REASONS["persist-failed"].partition("}")[2].partition("(")[0]

ISLANDS = "islands"

RELAY_ONLY_FAULTS = frozenset({"corrupt"})


@dataclass(slots=True)
class ActiveFault:
    """A fault that has begun."""

    injector: Injector
    started_at: float  # of the Unix epoch
    planned_end: float  # on the monotonic clock
    ended_at: float | None = None  # of the Unix epoch; polled after that until it is observed


class ChaosSupervisor(Supervisor):
    """Trains a decoupled job and injects the faults of a plan.

    `links` is "netns" or "relay". A run that takes longer than `limit_s` fails.
    """

    poll_interval_s = POLL_INTERVAL_S

    def __init__(
        self, settings: JobSettings, run: Path, view: LiveView, title: str, plan: Plan, links: str, limit_s: float
    ) -> None:
        self.plan = plan
        self.namespaces: Namespaces | None = None
        self._cleanup = ExitStack()
        self._log = FaultLog(run)
        self._limit_s = limit_s
        self._waiting: list[PlannedFault] = list(plan.faults)
        self._active: list[ActiveFault] = []
        self._clock_started_at: float | None = None  # zero of the plan's clock, on the monotonic clock
        self._last_poll_at = time.monotonic()
        self._relays = Relays()
        self._cleanup.callback(self._relays.close)
        self._relay_by_learner: dict[int, Relay] = {}
        self._disks: dict[int, Disk] = {}
        self._namespace_paths: dict[int, Path] = {}
        try:
            self.namespaces = self._make_namespaces() if links == "netns" else None
            host = self.namespaces.address if self.namespaces is not None else "127.0.0.1"
            self._make_disks(run)
            super().__init__(settings, run, view, title, host)
            self._poller = StatusPoller(self)
        except BaseException:
            self._cleanup.close()
            raise

    # ------------------------------------------------------------------------------------------ setup

    def _make_namespaces(self) -> Namespaces:
        netns.remove_stale()
        namespaces = Namespaces()
        self._cleanup.callback(namespaces.close)
        return namespaces

    def _make_disks(self, run: Path) -> None:
        """Create a separate disk for each process with a planned disk fault, before the process starts."""
        disks.remove_stale()
        for number in sorted({fault.target.number for fault in self.plan.faults if fault.target.kind == "disk"}):
            folder = run / STORE_FOLDER if number == 0 else run / ISLANDS / f"learner-{number}"
            self._disks[number] = Disk(folder)
            self._cleanup.callback(self._disks[number].close)

    def _needs_relay(self, learner: int) -> bool:
        """Return whether the learner needs a relay. If not it has none: a relay hides kernel faults from both ends."""
        if self.namespaces is None:
            return True
        relay_faults = RELAY_ONLY_FAULTS if self.namespaces.has_netem else RELAY_ONLY_FAULTS | {"delay"}
        return any(fault.fault in relay_faults and fault.target.number == learner for fault in self.plan.faults)

    def _syncer_child(self) -> ChildProcess:
        args = (
            self.fault_commands(0),
            self.host,
            self.settings,
            new_run_id(self.run),
            self.run,
            self._port,
            self._token,
        )
        return ChildProcess("syncer", self.run, run_faulty_syncer, args)

    def _learner_child(self, learner: int) -> ChildProcess:
        if self.namespaces is not None:
            self._namespace_paths[learner] = self.namespaces.add(learner)
        if self._needs_relay(learner):
            seed = 1000 * self.plan.seed + learner
            self._relay_by_learner[learner] = self._relays.open(self.address, seed, self.host)
        address = self._relay_by_learner[learner].address if learner in self._relay_by_learner else self.address
        directory = self.run / ISLANDS / f"learner-{learner}" if learner in self._disks else self.run
        commands, net = self.fault_commands(learner), self._namespace_paths.get(learner)
        args = (commands, net, self.settings, learner, address, self._token, directory)
        return ChildProcess(f"learner {learner}", self.run, run_faulty_learner, args)

    # ------------------------------------------------------------------------------------------ context of injectors

    def member(self, target: Target) -> SupervisedProcess | None:
        if target.kind == "shard":
            return self._shards[target.number]
        return self._syncer if target.number == 0 else self._learners.get(target.number)

    def is_training(self, target: Target) -> bool:
        member = self.member(target)
        return (
            member is not None
            and member.child.pid is not None
            and member.trained_since_start
            and not member.is_draining
        )

    def is_connected(self, number: int) -> bool:
        status = next((each for each in self._status.get("learners", ()) if each.get("learner") == number), None)
        return status is not None and status.get("link") == "up"

    def relay(self, learner: int) -> Relay | None:
        return self._relay_by_learner.get(learner)

    def disk(self, number: int) -> Disk:
        return self._disks[number]

    def fault_commands(self, number: int) -> FaultCommands:
        return FaultCommands(self.run, f"learner-{number}" if number else "syncer")

    def add_learner(self, number: int) -> None:
        self._learners[number] = SupervisedProcess(self._learner_child(number))
        self._progress.learners = max(self._progress.learners, number)

    def has_failed_write(self) -> bool:
        if self.settings.shards:
            return True  # versions are on the disks of the shards, which have no faults
        return any(PERSIST_FAILED_TEXT in fragment["reason"] for fragment in self._status.get("fragments", ()))

    # ------------------------------------------------------------------------------------------ faults

    def _inject_due(self) -> None:
        now = time.monotonic()
        if now - self._started_at > self._limit_s:
            raise JobFailedError(f"the run has not ended within {self._limit_s:.0f} s")
        if self._clock_started_at is None:
            learners = [Target("learner", number) for number in range(1, self.settings.learners + 1)]
            if not all(self.is_training(learner) for learner in learners):
                return
            self._clock_started_at = self._last_poll_at = now
            self._log.record_start(time.time())
            self._add_news(f"all learners train; {_format_planned(len(self._waiting))}")
        self._clock_started_at += max(0.0, now - self._last_poll_at - MAX_CLOCK_STEP_S)
        self._last_poll_at = now
        self._poll_and_end(now)
        for planned in list(self._waiting):
            late_s = now - self._clock_started_at - planned.at_s
            if late_s < 0.0:
                break  # faults are in order of time
            injector = INJECTORS[planned.fault](planned, self)
            if injector.is_ready() and not self._is_prolonged(planned.target, now):
                self._waiting.remove(planned)
                self._begin(injector)
            elif late_s > READY_TIMEOUT_S:
                self._waiting.remove(planned)
                self._record_missed(planned, f"{planned.target} was not ready within {READY_TIMEOUT_S:.0f} s")

    def _is_prolonged(self, target: Target, now: float) -> bool:
        """Return whether a fault of an overlapping target is prolonged."""
        return any(
            active.injector.planned.duration_s > 0.0
            and active.ended_at is None
            and now >= active.planned_end
            and overlaps(active.injector.target, target)
            for active in self._active
        )

    def _begin(self, injector: Injector) -> None:
        planned = injector.planned
        active = ActiveFault(injector, time.time(), time.monotonic() + planned.duration_s)
        self._active.append(active)  # first: an interrupt between these lines must end the fault too
        self._record_fault(active, None)
        injector.begin()
        self._add_news(f"fault {planned.number}: {planned.describe()}")

    def _poll_and_end(self, now: float) -> None:
        for active in list(self._active):
            injector = active.injector
            injector.poll()
            has_duration = injector.planned.duration_s > 0.0
            is_over, is_late = now >= active.planned_end, now >= active.planned_end + OBSERVE_TIMEOUT_S
            if has_duration and active.ended_at is None and is_over and (injector.has_taken_effect() or is_late):
                self._end_fault(active)
            if (injector.was_observed and (active.ended_at is not None or not has_duration)) or is_late:
                self._finish(active)

    def _end_fault(self, active: ActiveFault) -> None:
        active.ended_at = time.time()
        active.injector.end()
        if active.injector.planned.fault != "kill":
            self._add_news(f"fault {active.injector.planned.number} has ended: {active.injector.planned.target}")

    def _finish(self, active: ActiveFault) -> None:
        if active.ended_at is None:
            active.ended_at = time.time()
            active.injector.poll()  # the fault may have begun just before an interrupt
            active.injector.end()
        self._active.remove(active)
        self._record_fault(active, active.ended_at)

    def _record_fault(self, active: ActiveFault, ended_at: float | None) -> None:
        injector = active.injector
        cause = "" if injector.was_observed else injector.failure_cause
        record = FaultRecord(
            injector.planned.number, injector.was_observed, active.started_at, ended_at, injector.method, cause
        )
        self._log.record_fault(record)

    def _record_missed(self, planned: PlannedFault, cause: str) -> None:
        self._add_news(f"fault {planned.number} ({planned.describe()}) did not happen: {cause}")
        self._log.record_fault(FaultRecord(planned.number, False, None, None, "", cause))

    # ------------------------------------------------------------------------------------------ status, end

    def _request_status(self) -> dict[str, Any] | None:
        """Return the newest status of the poller. A request here would block while the syncer is stopped."""
        return self._poller.pop_newest()

    def request_status(self) -> dict[str, Any] | None:
        """Request the status from the syncer; called by the poller thread."""
        return super()._request_status()

    def train(self) -> None:
        self._poller.start()
        super().train()

    def _terminate(self) -> None:
        """End all faults, then all processes. A stopped process must continue first, or it could not leave in order."""
        with self._cleanup:  # removes links, disks and relays at the end
            self._cleanup.callback(self._collect_files)
            try:
                self._poller.stop()
                for active in list(self._active):
                    self._finish(active)
                for planned in self._waiting:
                    self._record_missed(planned, "the run ended before this fault was due")
            finally:
                super()._terminate()

    def _collect_files(self) -> None:
        """Copy the files from the separate disks of learners into the run's directory.

        Runs before the disks are unmounted: exit callbacks run in reverse order.
        """
        for number in self._disks:
            directory = self.run / ISLANDS / f"learner-{number}"
            if number:
                for path in sorted(directory.rglob("*")):
                    if path.is_file() and not path.name.startswith("."):
                        copy = self.run / path.relative_to(directory)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, copy)


def _format_planned(faults: int) -> str:
    return "1 fault is planned" if faults == 1 else f"{faults} faults are planned"


class StatusPoller:
    """Thread that requests the syncer's status at a fixed interval."""

    def __init__(self, supervisor: ChaosSupervisor) -> None:
        self._supervisor = supervisor
        self._newest: dict[str, Any] | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="atoll-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pop_newest(self) -> dict[str, Any] | None:
        """Return the newest status, once; None if none has arrived since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def _poll(self) -> None:
        while not self._is_stopping.wait(STATUS_INTERVAL_S):
            status = self._supervisor.request_status()
            if status is not None:
                self._newest = status
