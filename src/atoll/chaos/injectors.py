"""Injectors: each starts a fault, maintains it, ends it, and looks for evidence that it happened.

The evidence is independent of the injection. A kill has happened when the process has exited, a stop when the kernel
reports the process as stopped, a cut when no byte passes, corruption when bytes were changed, a full disk when the
kernel refuses a byte.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from atoll.chaos.disks import Disk
from atoll.chaos.faults import Target
from atoll.chaos.in_process import FaultCommands
from atoll.chaos.netns import Namespaces
from atoll.chaos.plan import PlannedFault
from atoll.chaos.relay import Relay
from atoll.reference.supervisor import SupervisedProcess


class InjectorContext(Protocol):
    """Interface of a run for its injectors."""

    run: Path
    namespaces: Namespaces | None

    def member(self, target: Target) -> SupervisedProcess | None:
        """Return the process that a fault targets, or that owns the link, disk or payload; None if there is none."""

    def is_training(self, target: Target) -> bool:
        """Return whether the process runs and has taken steps or, at the syncer and its shards, merged."""

    def is_connected(self, number: int) -> bool: ...

    def relay(self, learner: int) -> Relay | None: ...

    def disk(self, number: int) -> Disk: ...

    def fault_commands(self, number: int) -> FaultCommands: ...

    def add_learner(self, number: int) -> None: ...

    def has_failed_write(self) -> bool:
        """Return whether the syncer has a version that its disk refused to store."""


class Injector(ABC):
    """Injector of one fault. `begin` is called once, when `is_ready` returns True; `poll` regularly until `end`."""

    method = ""  # how the fault is injected, for the verdict
    failure_cause = "injected, but there is no evidence that it happened"  # used if `was_observed` stays False

    def __init__(self, planned: PlannedFault, context: InjectorContext) -> None:
        self.planned = planned
        self.context = context
        self.target = planned.target
        self.number = planned.target.number
        self.was_observed = False  # there is evidence that the fault happened

    def is_ready(self) -> bool:
        """Return whether the target runs and trains, so that the fault can begin."""
        return self.context.is_training(self.target)

    @abstractmethod
    def begin(self) -> None: ...

    def poll(self) -> None:  # noqa: B027 - some faults need no maintenance
        """Maintain the fault and look for evidence. Called until the fault ends, or until it is observed."""

    def end(self) -> None:  # noqa: B027 - some faults need no undoing
        """Undo the fault. Called exactly once after `begin`, even if the run is interrupted."""

    def has_taken_effect(self) -> bool:
        """Return whether the fault has affected its target. A fault with a duration does not end before that."""
        return self.was_observed

    def option_value(self, option: str) -> float:
        return float(self.planned.options[option])

    def target_process(self) -> SupervisedProcess:
        member = self.context.member(self.target)
        assert member is not None, f"{self.target} existed when the fault was ready"
        return member


# --------------------------------------------------------------------------------------------------------------------
# Processes


class KillFault(Injector):
    method = "SIGKILL"

    def begin(self) -> None:
        member = self.target_process()
        self._pid = member.child.pid
        member.planned_restart_delay_s = self.option_value("downtime")
        member.child.send(signal.SIGKILL)

    def poll(self) -> None:
        member = self.context.member(self.target)
        self.was_observed = self.was_observed or (member is not None and member.child.pid != self._pid)

    def has_taken_effect(self) -> bool:
        """Return True: the process exits at once. `was_observed` is set when its successor runs."""
        return True


class StopFault(Injector):
    method = "SIGSTOP"

    def begin(self) -> None:
        child = self.target_process().child
        self._pid = child.pid
        child.send(signal.SIGSTOP)

    def poll(self) -> None:
        self.was_observed = self.was_observed or (self._pid is not None and process_state(self._pid) == "T")

    def end(self) -> None:
        member = self.context.member(self.target)
        if member is not None and member.child.pid == self._pid:  # the pid may belong to another process by now
            member.child.send(signal.SIGCONT)


class JoinFault(Injector):
    method = "a new process"

    def is_ready(self) -> bool:
        return self.context.member(self.target) is None

    def begin(self) -> None:
        self.context.add_learner(self.number)

    def poll(self) -> None:
        self.was_observed = self.was_observed or self.context.is_training(self.target)


class LeaveFault(Injector):
    method = "SIGTERM, not restarted"

    def begin(self) -> None:
        member = self.target_process()
        member.is_draining = True
        member.child.send(signal.SIGTERM)

    def poll(self) -> None:
        member = self.context.member(self.target)
        self.was_observed = self.was_observed or (member is not None and member.is_done)


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process: R, S, T for stopped; empty if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


# --------------------------------------------------------------------------------------------------------------------
# Links


class LinkFault(Injector):
    """Cut, flap, throttle, delay and corrupt links: in the kernel if the run has namespaces, otherwise in the relay.

    Corruption always uses a relay: the kernel's TCP would detect it, drop the packet and send it again. A delay uses a
    relay if the kernel has no `netem`.
    """

    def __init__(self, planned: PlannedFault, context: InjectorContext) -> None:
        super().__init__(planned, context)
        kernel = context.namespaces
        in_kernel = kernel is not None and (
            kernel.has_netem if planned.fault == "delay" else planned.fault != "corrupt"
        )
        self._kernel = kernel if in_kernel else None
        self._is_cut = planned.fault in ("cut", "flap")
        self._direction = str(planned.options.get("direction", "both"))
        self._last_count: tuple[int, int] | None = None  # bytes, at the last poll of a cut
        self._polls = 0  # in a row that found the same count
        self._toggle_at = float("inf")
        self.method = "network namespace, tc" if in_kernel else "relay"

    def is_ready(self) -> bool:
        return self.context.is_training(self.target) and self.context.is_connected(self.number)

    def begin(self) -> None:
        relay = self.context.relay(self.number)
        assert self._kernel is not None or relay is not None, f"the link of learner {self.number} has no relay"
        self._before = self._count(relay) if relay is not None else 0
        self._set(True)
        if self.planned.fault == "flap":
            self._toggle_at = time.monotonic() + self.option_value("period")
        if self._kernel is not None:
            queues = " ".join(self._kernel.queues(self.number))
            self.was_observed = any(kind in queues for kind in ("blackhole", "tbf", "netem"))

    def _set(self, on: bool) -> None:
        kernel, relay, fault = self._kernel, self.context.relay(self.number), self.planned.fault
        if kernel is not None:
            if not on:
                kernel.restore(self.number)
            elif fault == "throttle":
                kernel.throttle(self.number, self.option_value("rate"))
            elif fault == "delay":
                kernel.delay(self.number, self.option_value("delay"))
            else:
                kernel.cut(self.number, self._direction)
        elif relay is not None:
            if fault == "throttle":
                relay.throttle(self.option_value("rate") if on else None)
            elif fault == "delay":
                relay.delay(self.option_value("delay") if on else 0.0)
            elif fault == "corrupt":
                relay.corrupt(self.option_value("every") if on else None, self._direction)
            else:
                relay.cut(self._direction, is_cut=on)

    def poll(self) -> None:
        relay = self.context.relay(self.number)
        if self._kernel is None and relay is not None and not self.was_observed:
            if self.planned.fault not in ("cut", "flap"):
                self.was_observed = self._count(relay) > self._before
            elif self._is_cut:
                self.was_observed = self._has_no_traffic(relay)
        if time.monotonic() >= self._toggle_at:
            self._toggle_at += self.option_value("period")
            self._is_cut = not self._is_cut
            self._set(self._is_cut)

    def _count(self, relay: Relay) -> int:
        """Return a counter that increases when the fault affects traffic."""
        counts = relay.counts()
        return counts.corrupted_bytes if self.planned.fault == "corrupt" else counts.delayed_chunks

    def _has_no_traffic(self, relay: Relay) -> bool:
        """Return whether two polls in a row found the same count: bytes in flight at the cut have arrived by then."""
        counts = relay.counts()
        passed = (
            counts.up_bytes if self._direction != "down" else 0,
            counts.down_bytes if self._direction != "up" else 0,
        )
        self._polls = self._polls + 1 if passed == self._last_count else 0
        self._last_count = passed
        return self._polls >= 2

    def end(self) -> None:
        self._set(False)


# --------------------------------------------------------------------------------------------------------------------
# Disks


class DiskFault(Injector):
    """A full or read-only disk. At the syncer the fault lasts until a write of a version has failed."""

    def __init__(self, planned: PlannedFault, context: InjectorContext) -> None:
        super().__init__(planned, context)
        self._has_failed_write = False
        self._is_full = planned.fault == "full"
        if not self._is_full:
            self.failure_cause = "root ignores permissions, and this machine allows no mounts"

    def begin(self) -> None:
        disk = self.context.disk(self.number)
        self.method = disk.full_method if self._is_full else disk.read_only_method
        if not self._is_full:
            self.was_observed = disk.make_read_only()
        self.poll()

    def poll(self) -> None:
        if self._is_full:
            member = self.context.member(self.target)
            pid = member.child.pid if member is not None else None
            self.was_observed = self.context.disk(self.number).fill(pid) or self.was_observed

    def end(self) -> None:
        disk = self.context.disk(self.number)
        disk.free() if self._is_full else disk.make_writable()

    def has_taken_effect(self) -> bool:
        self._has_failed_write = self._has_failed_write or self.context.has_failed_write()
        return self.was_observed and (self.number != 0 or self._has_failed_write)


# --------------------------------------------------------------------------------------------------------------------
# Inside the process: slow disks and payloads


class SlowFault(Injector):
    method = "in the process, at fsync"

    def begin(self) -> None:
        self.context.fault_commands(self.number).write(
            slow={"fault": self.planned.number, "wait_s": self.option_value("wait")}
        )

    def poll(self) -> None:
        self.was_observed = (
            self.was_observed or self.context.fault_commands(self.number).count_done(self.planned.number) > 0
        )

    def end(self) -> None:
        self.context.fault_commands(self.number).write(slow=None)
        self.poll()


class PoisonFault(Injector):
    method = "in the process, when it encodes a contribution"

    def is_ready(self) -> bool:
        """Return whether the learner trains and has no other poison command: a process has one at a time."""
        return super().is_ready() and "poison" not in self.context.fault_commands(self.number).read()

    def begin(self) -> None:
        command = {"fault": self.planned.number, "kind": self.planned.fault, "count": self.option_value("count")}
        if "factor" in self.planned.options:
            command["factor"] = self.option_value("factor")
        self.context.fault_commands(self.number).write(poison=command)

    def poll(self) -> None:
        self.was_observed = self.context.fault_commands(self.number).count_done(
            self.planned.number
        ) >= self.option_value("count")

    def end(self) -> None:
        self.poll()
        self.context.fault_commands(self.number).write(poison=None)


INJECTORS: dict[str, type[Injector]] = {
    "kill": KillFault,
    "stop": StopFault,
    "join": JoinFault,
    "leave": LeaveFault,
    **dict.fromkeys(("cut", "throttle", "delay", "flap", "corrupt"), LinkFault),
    **dict.fromkeys(("full", "read-only"), DiskFault),
    "slow": SlowFault,
    **dict.fromkeys(("nan", "infinity", "wild"), PoisonFault),
}
