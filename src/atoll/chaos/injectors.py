"""Faults as they are done: each begins, is kept up, ends, and says by what it is known that it really happened.

An injector never believes itself. A kill has happened when the process is gone, a stop when the kernel says that it
stands, a cut when no byte has passed, damage when bytes were changed, a full disk when the kernel refuses a byte.
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
from atoll.chaos.relay import Counts, Relay
from atoll.reference.supervisor import SupervisedProcess


class World(Protocol):
    """What an injector needs of the run."""

    run: Path
    namespaces: Namespaces | None

    def member(self, target: Target) -> SupervisedProcess | None:
        """The process that it strikes, or whose link, disk or payload; None where there is none of that number."""

    def is_training(self, target: Target) -> bool:
        """Its process is there and has taken steps, or is the syncer or a shard of it and merges."""

    def is_connected(self, number: int) -> bool: ...

    def relay(self, learner: int) -> Relay | None: ...

    def disk(self, number: int) -> Disk: ...

    def orders(self, number: int) -> Orders: ...

    def add_learner(self, number: int) -> None: ...

    def has_failed_write(self) -> bool:
        """Return whether a version waits at the syncer because its disk refused it."""


class Injector(ABC):
    """One fault. `begin` is called once, when `is_ready`; `keep` at every look until `end`."""

    how = ""  # by which means, for the verdict
    why_not = "it was done, and nothing shows that it happened"  # where it was never seen

    def __init__(self, planned: Planned, world: World) -> None:
        self.planned = planned
        self.world = world
        self.target = planned.target
        self.number = planned.target.number
        self.seen = False  # that it happened

    def is_ready(self) -> bool:
        """There is something to strike."""
        return self.world.is_training(self.target)

    @abstractmethod
    def begin(self) -> None: ...

    def keep(self) -> None:  # noqa: B027 - some have nothing to keep up
        """While it lasts, and for faults without a length until it was seen."""

    def end(self) -> None:  # noqa: B027 - some leave nothing behind
        """Everything as it was. Called exactly once after `begin`, also when the run is interrupted."""

    def is_met(self) -> bool:
        """Return whether the target has met the fault. A fault that has a length does not end before."""
        return self.seen

    def seconds(self, option: str) -> float:
        return float(self.planned.options[option])


# --------------------------------------------------------------------------------------------------------------------
# Processes


class Kill(Injector):
    how = "SIGKILL"

    def begin(self) -> None:
        member = self.world.member(self.target)
        assert member is not None
        self._pid = member.child.pid
        member.away_s = self.seconds("away")
        member.child.send(signal.SIGKILL)

    def keep(self) -> None:
        member = self.world.member(self.target)
        if member is not None and member.child.pid != self._pid:
            self.seen = True

    def is_met(self) -> bool:
        """A process is gone at once; `seen` is that of the next one."""
        return True


class Stop(Injector):
    how = "SIGSTOP"

    def begin(self) -> None:
        member = self.world.member(self.target)
        assert member is not None
        self._pid = member.child.pid
        member.child.send(signal.SIGSTOP)

    def keep(self) -> None:
        if self._pid is not None and state_of(self._pid) == "T":
            self.seen = True

    def end(self) -> None:
        member = self.world.member(self.target)
        if member is not None and member.child.pid == self._pid:  # the same: its number may be another's by now
            member.child.send(signal.SIGCONT)


class Join(Injector):
    how = "a new process"

    def is_ready(self) -> bool:
        return self.world.member(self.target) is None

    def begin(self) -> None:
        self.world.add_learner(self.number)

    def keep(self) -> None:
        self.seen = self.seen or self.world.is_training(self.target)


class Leave(Injector):
    how = "SIGTERM, and never started again"

    def begin(self) -> None:
        member = self.world.member(self.target)
        assert member is not None
        member.leaves = True
        member.child.send(signal.SIGTERM)

    def keep(self) -> None:
        member = self.world.member(self.target)
        self.seen = self.seen or (member is not None and member.done)


def state_of(pid: int) -> str:
    """The letter that the kernel has for a process: R, S, T for stopped; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


# --------------------------------------------------------------------------------------------------------------------
# Links


class LinkFault(Injector):
    """In the kernel where the run has namespaces, in the relay otherwise."""

    in_kernel = True

    def is_ready(self) -> bool:
        return self.world.is_training(self.target) and self.world.is_connected(self.number)

    @property
    def _kernel(self) -> Namespaces | None:
        return self.world.namespaces if self.in_kernel else None

    def begin(self) -> None:
        kernel, relay = self._kernel, self.world.relay(self.number)
        if kernel is not None:
            self.how = "network namespace, tc"
            self.shape(kernel)
            self.seen = self.is_shaped(kernel)
        else:
            assert relay is not None, f"no relay leads to the link of learner {self.number}"
            self.how = "relay"
            self._before = self.count(relay.counts())
            self.bend(relay)

    def keep(self) -> None:
        relay = self.world.relay(self.number)
        if self._kernel is None and relay is not None and self.count(relay.counts()) > self._before:
            self.seen = True

    def end(self) -> None:
        kernel, relay = self._kernel, self.world.relay(self.number)
        if kernel is not None:
            kernel.heal(self.number)
        elif relay is not None:
            self.straighten(relay)

    @abstractmethod
    def shape(self, kernel: Namespaces) -> None: ...

    def is_shaped(self, kernel: Namespaces) -> bool:
        return any(word in " ".join(kernel.shape(self.number)) for word in ("blackhole", "tbf", "netem"))

    def count(self, counts: Counts) -> int:
        """Return what rises in the relay when the fault has met something."""
        return counts.slowed_pieces

    @abstractmethod
    def bend(self, relay: Relay) -> None: ...

    @abstractmethod
    def straighten(self, relay: Relay) -> None: ...


class Cut(LinkFault):
    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        self._way = str(planned.options.get("way", "both"))
        self._passed: tuple[int, int] | None = None
        self._looks = 0

    def shape(self, kernel: Namespaces) -> None:
        kernel.cut(self.number, self._way)

    def bend(self, relay: Relay) -> None:
        relay.cut(self._way)

    def keep(self) -> None:
        """Seen when two looks in a row find the same count: what was on its way at the cut has arrived by then."""
        relay = self.world.relay(self.number)
        if self._kernel is not None or relay is None or self.seen:
            return
        counts = relay.counts()
        passed = (counts.up_bytes if self._way != "down" else 0, counts.down_bytes if self._way != "up" else 0)
        self._looks = self._looks + 1 if passed == self._passed else 0
        self._passed = passed
        self.seen = self._looks >= 2

    def straighten(self, relay: Relay) -> None:
        relay.cut("both", on=False)


class Flap(Cut):
    """Cut and whole in turn; whoever is on the link never knows how long it will stand."""

    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        self._is_cut = True
        self._turn_at = 0.0

    def begin(self) -> None:
        super().begin()
        self._turn_at = time.monotonic() + self.seconds("period")

    def keep(self) -> None:
        """Both states are to be seen: that nothing passes, and that it turns."""
        if self._is_cut:
            super().keep()
        if time.monotonic() >= self._turn_at:
            self._turn_at += self.seconds("period")
            self._turn()

    def _turn(self) -> None:
        self._is_cut = not self._is_cut
        kernel, relay = self._kernel, self.world.relay(self.number)
        if kernel is not None:
            if self._is_cut:
                kernel.cut(self.number, "both")
            else:
                kernel.heal(self.number)
        elif relay is not None:
            relay.cut("both", on=self._is_cut)


class Thin(LinkFault):
    def shape(self, kernel: Namespaces) -> None:
        kernel.thin(self.number, self.seconds("rate"))

    def bend(self, relay: Relay) -> None:
        relay.thin(self.seconds("rate"))

    def straighten(self, relay: Relay) -> None:
        relay.thin(None)


class Delay(LinkFault):
    """Where the kernel has no `netem`, learners whose link is to be late dial through a relay."""

    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        self.in_kernel = world.namespaces is not None and world.namespaces.has_netem

    def shape(self, kernel: Namespaces) -> None:
        kernel.delay(self.number, self.seconds("delay"))

    def bend(self, relay: Relay) -> None:
        relay.delay(self.seconds("delay"))

    def straighten(self, relay: Relay) -> None:
        relay.delay(0.0)


class Damage(LinkFault):
    """Always in the relay: TCP of the kernel would notice, throw the packet away and send it again."""

    in_kernel = False

    def shape(self, kernel: Namespaces) -> None:
        raise AssertionError("damage is made by a relay")

    def count(self, counts: Counts) -> int:
        return counts.damaged_bytes

    def bend(self, relay: Relay) -> None:
        relay.damage(self.seconds("every"), str(self.planned.options["way"]))

    def straighten(self, relay: Relay) -> None:
        relay.damage(None)


# --------------------------------------------------------------------------------------------------------------------
# Disks


class DiskFault(Injector):
    """Lasts until the syncer has failed to write a version, where its disk is struck: it may write rarely."""

    def __init__(self, planned: Planned, world: World) -> None:
        super().__init__(planned, world)
        self._has_failed_write = False

    def is_met(self) -> bool:
        self._has_failed_write = self._has_failed_write or self.world.has_failed_write()
        return self.seen and (self.number != 0 or self._has_failed_write)


class Full(DiskFault):
    def begin(self) -> None:
        self.how = self.world.disk(self.number).how_full
        self.keep()

    def keep(self) -> None:
        member = self.world.member(self.target)
        pid = member.child.pid if member is not None else None
        self.seen = self.world.disk(self.number).fill(pid) or self.seen

    def end(self) -> None:
        self.world.disk(self.number).empty()


class ReadOnly(DiskFault):
    why_not = "root may write everywhere, and nothing can be mounted here"

    def begin(self) -> None:
        disk = self.world.disk(self.number)
        self.how = disk.how_protected
        self.seen = disk.protect()

    def end(self) -> None:
        self.world.disk(self.number).unprotect()


class Slow(Injector):
    how = "in the process, at fsync"

    def begin(self) -> None:
        self.world.orders(self.number).give(slow={"fault": self.planned.number, "wait_s": self.seconds("wait")})

    def keep(self) -> None:
        self.seen = self.seen or self.world.orders(self.number).done(self.planned.number) > 0

    def end(self) -> None:
        self.world.orders(self.number).give(slow=None)
        self.keep()


# --------------------------------------------------------------------------------------------------------------------
# Payloads


class Poison(Injector):
    how = "in the process, as it encodes a contribution"

    def is_ready(self) -> bool:
        """One poison after the other: a process has one order at a time."""
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
    "kill": Kill,
    "stop": Stop,
    "join": Join,
    "leave": Leave,
    "cut": Cut,
    "thin": Thin,
    "delay": Delay,
    "flap": Flap,
    "damage": Damage,
    "full": Full,
    "read-only": ReadOnly,
    "slow": Slow,
    "nan": Poison,
    "infinity": Poison,
    "wild": Poison,
}
