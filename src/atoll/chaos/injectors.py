"""Injectors: each begins a fault, keeps it up, ends it, and records evidence that it really happened.

Evidence never comes from the injector itself. A kill has happened when the process is gone, a stop when the kernel
reports the process as stopped, a cut when no byte has passed, damage when bytes were changed, a full disk when the
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
from atoll.chaos.in_process import Orders
from atoll.chaos.netns import Namespaces
from atoll.chaos.plan import Planned
from atoll.chaos.relay import Relay
from atoll.reference.supervisor import SupervisedProcess


class World(Protocol):
    """The run, as far as an injector needs it."""

    run: Path
    namespaces: Namespaces | None

    def member(self, target: Target) -> SupervisedProcess | None:
        """Return the process that a fault targets, or the owner of the link, disk or payload; None if there is none."""

    def is_training(self, target: Target) -> bool:
        """Return whether the process runs and has taken steps or, at the syncer and its shards, merged."""

    def is_connected(self, number: int) -> bool: ...

    def relay(self, learner: int) -> Relay | None: ...

    def disk(self, number: int) -> Disk: ...

    def orders(self, number: int) -> Orders: ...

    def add_learner(self, number: int) -> None: ...

    def has_failed_write(self) -> bool:
        """Return whether a version waits at the syncer because its disk refused it."""


class Injector(ABC):
    """One fault. `begin` is called once, when `is_ready`; `keep` at every poll until `end`."""

    how = ""  # the means, for the verdict
    why_not = "it was done, and nothing shows that it happened"  # reason if it was never seen

    def __init__(self, planned: Planned, world: World) -> None:
        self.planned = planned
        self.world = world
        self.target = planned.target
        self.number = planned.target.number
        self.seen = False  # there is evidence that it happened

    def is_ready(self) -> bool:
        """Return whether the target is there."""
        return self.world.is_training(self.target)

    @abstractmethod
    def begin(self) -> None: ...

    def keep(self) -> None:  # noqa: B027 - some have nothing to keep up
        """Called while the fault lasts, and for faults without a length until it was seen."""

    def end(self) -> None:  # noqa: B027 - some leave nothing behind
        """Undo the fault. Called exactly once after `begin`, also when the run is interrupted."""

    def is_met(self) -> bool:
        """Return whether the target has met the fault. A fault that has a length does not end before."""
        return self.seen

    def seconds(self, option: str) -> float:
        return float(self.planned.options[option])

    def process(self) -> SupervisedProcess:
        member = self.world.member(self.target)
        assert member is not None, f"{self.target} was there when the fault was ready"
        return member


# --------------------------------------------------------------------------------------------------------------------
# Processes


class KillFault(Injector):
    how = "SIGKILL"

    def begin(self) -> None:
        member = self.process()
        self._pid = member.child.pid
        member.away_s = self.seconds("away")
        member.child.send(signal.SIGKILL)

    def keep(self) -> None:
        member = self.world.member(self.target)
        self.seen = self.seen or (member is not None and member.child.pid != self._pid)

    def is_met(self) -> bool:
        """A process is gone at once; `seen` is set by the next one."""
        return True


class StopFault(Injector):
    how = "SIGSTOP"

    def begin(self) -> None:
        child = self.process().child
        self._pid = child.pid
        child.send(signal.SIGSTOP)

    def keep(self) -> None:
        self.seen = self.seen or (self._pid is not None and process_state(self._pid) == "T")

    def end(self) -> None:
        member = self.world.member(self.target)
        if member is not None and member.child.pid == self._pid:  # its number may belong to another process by now
            member.child.send(signal.SIGCONT)


class JoinFault(Injector):
    how = "a new process"

    def is_ready(self) -> bool:
        return self.world.member(self.target) is None

    def begin(self) -> None:
        self.world.add_learner(self.number)

    def keep(self) -> None:
        self.seen = self.seen or self.world.is_training(self.target)


class LeaveFault(Injector):
    how = "SIGTERM, and never started again"

    def begin(self) -> None:
        member = self.process()
        member.leaves = True
        member.child.send(signal.SIGTERM)

    def keep(self) -> None:
        member = self.world.member(self.target)
        self.seen = self.seen or (member is not None and member.done)


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
    """Cut, flap, thin, delay and damage: in the kernel if the run has namespaces, otherwise in the relay.

    Damage is always made by a relay: TCP of the kernel would notice, drop the packet and send it again. A delay is,
    where the kernel has no `netem`.
    """

    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        kernel = world.namespaces
        in_kernel = kernel is not None and (kernel.has_netem if planned.fault == "delay" else planned.fault != "damage")
        self._kernel = kernel if in_kernel else None
        self._is_cut = planned.fault in ("cut", "flap")
        self._way = str(planned.options.get("way", "both"))
        self._passed: tuple[int, int] | None = None  # bytes, at the last poll of a cut
        self._polls = 0  # in a row that found the same count
        self._toggle_at = float("inf")
        self.how = "network namespace, tc" if in_kernel else "relay"

    def is_ready(self) -> bool:
        return self.world.is_training(self.target) and self.world.is_connected(self.number)

    def begin(self) -> None:
        relay = self.world.relay(self.number)
        assert self._kernel is not None or relay is not None, f"no relay leads to the link of learner {self.number}"
        self._before = self._count(relay) if relay is not None else 0
        self._set(True)
        if self.planned.fault == "flap":
            self._toggle_at = time.monotonic() + self.seconds("period")
        if self._kernel is not None:
            shape = " ".join(self._kernel.shape(self.number))
            self.seen = any(queue in shape for queue in ("blackhole", "tbf", "netem"))

    def _set(self, on: bool) -> None:
        kernel, relay, fault = self._kernel, self.world.relay(self.number), self.planned.fault
        if kernel is not None:
            if not on:
                kernel.heal(self.number)
            elif fault == "thin":
                kernel.thin(self.number, self.seconds("rate"))
            elif fault == "delay":
                kernel.delay(self.number, self.seconds("delay"))
            else:
                kernel.cut(self.number, self._way)
        elif relay is not None:
            if fault == "thin":
                relay.thin(self.seconds("rate") if on else None)
            elif fault == "delay":
                relay.delay(self.seconds("delay") if on else 0.0)
            elif fault == "damage":
                relay.damage(self.seconds("every") if on else None, self._way)
            else:
                relay.cut(self._way, on=on)

    def keep(self) -> None:
        relay = self.world.relay(self.number)
        if self._kernel is None and relay is not None and not self.seen:
            if self.planned.fault not in ("cut", "flap"):
                self.seen = self._count(relay) > self._before
            elif self._is_cut:
                self.seen = self._stands_still(relay)
        if time.monotonic() >= self._toggle_at:
            self._toggle_at += self.seconds("period")
            self._is_cut = not self._is_cut
            self._set(self._is_cut)

    def _count(self, relay: Relay) -> int:
        """Return a count that rises when the fault has met something."""
        counts = relay.counts()
        return counts.damaged_bytes if self.planned.fault == "damage" else counts.slowed_pieces

    def _stands_still(self, relay: Relay) -> bool:
        """Return whether two polls in a row found the same count: bytes in flight at the cut have arrived by then."""
        counts = relay.counts()
        passed = (counts.up_bytes if self._way != "down" else 0, counts.down_bytes if self._way != "up" else 0)
        self._polls = self._polls + 1 if passed == self._passed else 0
        self._passed = passed
        return self._polls >= 2

    def end(self) -> None:
        self._set(False)


# --------------------------------------------------------------------------------------------------------------------
# Disks


class DiskFault(Injector):
    """A disk that is full or read-only. At the syncer it lasts until a write of a version has failed."""

    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        self._has_failed_write = False
        self._is_full = planned.fault == "full"
        if not self._is_full:
            self.why_not = "root may write everywhere, and nothing can be mounted here"

    def begin(self) -> None:
        disk = self.world.disk(self.number)
        self.how = disk.how_full if self._is_full else disk.how_protected
        if not self._is_full:
            self.seen = disk.protect()
        self.keep()

    def keep(self) -> None:
        if self._is_full:
            member = self.world.member(self.target)
            pid = member.child.pid if member is not None else None
            self.seen = self.world.disk(self.number).fill(pid) or self.seen

    def end(self) -> None:
        disk = self.world.disk(self.number)
        disk.empty() if self._is_full else disk.unprotect()

    def is_met(self) -> bool:
        self._has_failed_write = self._has_failed_write or self.world.has_failed_write()
        return self.seen and (self.number != 0 or self._has_failed_write)


# --------------------------------------------------------------------------------------------------------------------
# In the process: slow disks and payloads


class SlowFault(Injector):
    how = "in the process, at fsync"

    def begin(self) -> None:
        self.world.orders(self.number).give(slow={"fault": self.planned.number, "wait_s": self.seconds("wait")})

    def keep(self) -> None:
        self.seen = self.seen or self.world.orders(self.number).done(self.planned.number) > 0

    def end(self) -> None:
        self.world.orders(self.number).give(slow=None)
        self.keep()


class PoisonFault(Injector):
    how = "in the process, as it encodes a contribution"

    def is_ready(self) -> bool:
        """One after the other: a process has one order at a time."""
        return super().is_ready() and "poison" not in self.world.orders(self.number).read()

    def begin(self) -> None:
        order = {"fault": self.planned.number, "how": self.planned.fault, "count": self.seconds("count")}
        if "factor" in self.planned.options:
            order["factor"] = self.seconds("factor")
        self.world.orders(self.number).give(poison=order)

    def keep(self) -> None:
        self.seen = self.world.orders(self.number).done(self.planned.number) >= self.seconds("count")

    def end(self) -> None:
        self.keep()
        self.world.orders(self.number).give(poison=None)


INJECTORS: dict[str, type[Injector]] = {
    "kill": KillFault,
    "stop": StopFault,
    "join": JoinFault,
    "leave": LeaveFault,
    **dict.fromkeys(("cut", "thin", "delay", "flap", "damage"), LinkFault),
    **dict.fromkeys(("full", "read-only"), DiskFault),
    "slow": SlowFault,
    **dict.fromkeys(("nan", "infinity", "wild"), PoisonFault),
}
