"""Table of all kinds of faults, with their targets and options.

The scenario reader and the plan use this table, `docs/chaos.md` describes it, and `injectors` injects the faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetKind = Literal["learner", "syncer", "shard", "link", "disk", "payload"]
DIRECTIONS = ("both", "up", "down")


@dataclass(frozen=True, slots=True)
class FaultOption:
    """Option of a fault. `kind` is the type of its value; a `word` is one of `choices`."""

    name: str
    kind: Literal["seconds", "bytes_per_s", "count", "word"]
    default: float | str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    targets: tuple[TargetKind, ...]
    options: tuple[FaultOption, ...] = ()

    def option(self, name: str) -> FaultOption | None:
        return next((each for each in self.options if each.name == name), None)

    @property
    def duration_option(self) -> str | None:
        """Name of the option with the duration of the fault; None for a fault without a duration."""
        return next((each.name for each in self.options if each.name in ("for", "downtime")), None)


def _duration(seconds: float) -> FaultOption:
    return FaultOption("for", "seconds", seconds)


_DIRECTION = FaultOption("direction", "word", "both", DIRECTIONS)
_COUNT = FaultOption("count", "count", 3)  # contributions
_PROCESSES: tuple[TargetKind, ...] = ("learner", "syncer", "shard")

FAULT_KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        # SIGKILL; restarted after `downtime`
        FaultKind("kill", _PROCESSES, (FaultOption("downtime", "seconds", 3.0),)),
        FaultKind("stop", _PROCESSES, (_duration(3.0),)),  # SIGSTOP, and SIGCONT after `for`
        FaultKind("join", ("learner",)),  # a new learner, with an unused number
        FaultKind("leave", ("learner",)),  # SIGTERM: the learner leaves for good
        FaultKind("cut", ("link",), (_duration(4.0), _DIRECTION)),  # drops all bytes; neither end is notified
        # in each direction
        FaultKind("throttle", ("link",), (_duration(8.0), FaultOption("rate", "bytes_per_s", 50_000.0))),
        FaultKind("delay", ("link",), (_duration(8.0), FaultOption("delay", "seconds", 0.2))),  # in each direction
        FaultKind("flap", ("link",), (_duration(6.0), FaultOption("period", "seconds", 0.5))),  # cut, restored, ...
        # changes on average one byte in `every` bytes
        FaultKind("corrupt", ("link",), (_duration(4.0), FaultOption("every", "count", 20_000), _DIRECTION)),
        FaultKind("full", ("disk",), (_duration(4.0),)),
        FaultKind("read-only", ("disk",), (_duration(4.0),)),
        FaultKind("slow", ("disk",), (_duration(6.0), FaultOption("wait", "seconds", 0.3))),  # added to every fsync
        FaultKind("nan", ("payload",), (_COUNT,)),
        FaultKind("infinity", ("payload",), (_COUNT,)),
        FaultKind("wild", ("payload",), (_COUNT, FaultOption("factor", "count", 1_000_000))),  # finite but too large
    )
}

TARGET_GROUPS = ("all", "all-but-one")
"""Targets that select several learners or shards. The seed draws the one that `all-but-one` leaves out."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """Target of one fault. `number` is the number of a learner, 0 for the syncer, or the number of a shard, from 0.

    >>> str(Target("link", 3)), str(Target("disk", 0)), str(Target("syncer", 0)), str(Target("shard", 0))
    ('link 3', 'disk syncer', 'syncer', 'shard 0')
    """

    kind: TargetKind
    number: int

    def __str__(self) -> str:
        if self.kind == "syncer":
            return "syncer"
        if self.kind == "shard":
            return f"shard {self.number}"
        return f"{self.kind} {self.number or 'syncer'}"

    @property
    def affected_process(self) -> str:
        """Name of the process whose steps or merges the fault may delay directly."""
        if self.kind == "shard":
            return str(self)
        return f"learner {self.number}" if self.number else "syncer"
