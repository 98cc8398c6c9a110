"""The faults that can be asked for: what each strikes, its options, and what it does, in words.

The scenario reader, the plan, `docs/chaos.md` and the page all read this table; injectors are in `injectors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetKind = Literal["learner", "syncer", "shard", "link", "disk", "payload"]
WAYS = ("both", "up", "down")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting of a fault. `kind` says how it is written: a time, a rate of bytes, a count, or one of some words."""

    name: str
    kind: Literal["seconds", "bytes_per_s", "count", "word"]
    default: float | str
    meaning: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    targets: tuple[TargetKind, ...]
    sentence: str
    options: tuple[Option, ...] = ()

    def option(self, name: str) -> Option | None:
        return next((each for each in self.options if each.name == name), None)

    @property
    def lasts(self) -> str | None:
        """The option that says how long it goes on; None: it is done at once."""
        return next((each.name for each in self.options if each.name in ("for", "away")), None)


def _for(seconds: float) -> Option:
    return Option("for", "seconds", seconds, "how long it goes on")


def _count(meaning: str) -> Option:
    return Option("count", "count", 3, meaning)


_WAY = Option("way", "word", "both", "up is towards the syncer", WAYS)
_AWAY = Option("away", "seconds", 3.0, "until it is started again")
_RATE = Option("rate", "bytes_per_s", 50_000.0, "bytes per second, as in 50 kB/s")
_EVERY = Option("every", "count", 20_000, "bytes between two damaged ones, on average")
_FACTOR = Option("factor", "count", 1_000_000, "by which they are too large")
_PROCESSES: tuple[TargetKind, ...] = ("learner", "syncer", "shard")

KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill", _PROCESSES, "SIGKILL; the supervisor starts it again after `away`", (_AWAY,)),
        FaultKind("stop", _PROCESSES, "SIGSTOP, and SIGCONT after `for`", (_for(3.0),)),
        FaultKind("join", ("learner",), "a new learner comes, with a number that nobody had"),
        FaultKind("leave", ("learner",), "SIGTERM: the learner says goodbye and never comes back"),
        FaultKind("cut", ("link",), "nothing comes through, and nobody is told", (_for(4.0), _WAY)),
        FaultKind("thin", ("link",), "at most `rate` bytes per second in each direction", (_for(8.0), _RATE)),
        FaultKind(
            "delay",
            ("link",),
            "everything arrives later by `delay`",
            (_for(8.0), Option("delay", "seconds", 0.2, "in each direction")),
        ),
        FaultKind(
            "flap",
            ("link",),
            "cut and whole in turn, each for `period`",
            (_for(6.0), Option("period", "seconds", 0.5, "of one state")),
        ),
        FaultKind(
            "damage",
            ("link",),
            "one byte in about `every` bytes is another one when it arrives",
            (_for(4.0), _EVERY, _WAY),
        ),
        FaultKind("full", ("disk",), "no byte more fits", (_for(4.0),)),
        FaultKind("read-only", ("disk",), "nothing can be written", (_for(4.0),)),
        FaultKind(
            "slow",
            ("disk",),
            "every fsync takes `wait` longer",
            (_for(6.0), Option("wait", "seconds", 0.3, "added to each fsync")),
        ),
        FaultKind("nan", ("payload",), "contributions hold NaN", (_count("contributions that do"),)),
        FaultKind("infinity", ("payload",), "contributions hold infinities", (_count("contributions that do"),)),
        FaultKind(
            "wild",
            ("payload",),
            "contributions are finite and `factor` times too large",
            (_count("contributions that are"), _FACTOR),
        ),
    )
}

SEVERAL = ("all", "all-but-one")
"""Words that stand for several numbers of learners or shards. The seed draws the one that `all-but-one` spares."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What one fault strikes. `number` is a learner's, and 0 the syncer; shards have numbers of their own, from 0.

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
    def strikes_process(self) -> str:
        """The process whose steps or merges it may hurt directly."""
        if self.kind == "shard":
            return str(self)
        return f"learner {self.number}" if self.number else "syncer"
