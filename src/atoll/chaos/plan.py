"""The plan: every fault of a run with its time, target and options, drawn from a scenario by a seed.

The same scenario, seed and duration give the same plan, bit for bit, on any machine: it is drawn before anything runs,
and nothing that happens in the run changes it. So a storm must not ask for what cannot happen: it does not kill a
learner that an earlier fault of the plan keeps away, but another one, and where nobody is free it leaves the fault out
and the plan says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from atoll.chaos.faults import KINDS, Target, TargetKind
from atoll.chaos.scenario import Scenario, ScenarioError, Storm, Wanted

FORMAT = 1

SETTLE_S = 6.0
"""After a process was struck: it starts, joins and takes a step before it is struck again."""

MOST_FAULTS = 2000


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault. Times are seconds since all learners train."""

    number: int  # from 1, in the order of time
    at_s: float
    fault: str
    target: Target
    options: Mapping[str, float | str]
    origin: str  # "schedule 1" or "storm 2": where the scenario asks for it

    @property
    def lasts_s(self) -> float:
        option = KINDS[self.fault].lasts
        return float(self.options[option]) if option is not None else 0.0

    def sentence(self) -> str:
        """
        >>> Planned(1, 2.0, "cut", Target("link", 3), {"for": 4.0, "way": "up"}, "schedule 1").sentence()
        'cut link 3 for 4 s, way up'
        """
        told = []
        for name, value in self.options.items():
            option = KINDS[self.fault].option(name)
            assert option is not None
            if name == "way" and value == "both":
                continue
            if option.kind == "seconds":
                told.append(f"{name} {float(value):.3g} s")
            elif option.kind == "bytes_per_s":
                told.append(f"{name} {float(value) / 1000:.3g} kB/s")
            else:
                told.append(f"{name} {value:,.0f}" if isinstance(value, float) else f"{name} {value}")
        first = f"{self.fault} {self.target}"
        return f"{first} {', '.join(told)}" if told else first

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "target": str(self.target)}


@dataclass(frozen=True, slots=True)
class Plan:
    scenario: str
    about: str
    seed: int
    duration_s: float
    learners: int
    faults: tuple[Planned, ...]
    left_out: int  # arrivals of storms that found nobody to strike
    shards: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "scenario": self.scenario,
            "about": self.about,
            "seed": self.seed,
            "duration_s": self.duration_s,
            "learners": self.learners,
            **({"shards": self.shards} if self.shards else {}),
            "faults": [fault.to_json() for fault in self.faults],
            "left_out": self.left_out,
        }

    def text(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"


def arrivals(draw: Random, per_minute: float, begin_s: float, end_s: float) -> Iterator[float]:
    """Times of a Poisson process: gaps are exponential, and nothing remembers the last one."""
    at_s = begin_s
    while True:
        at_s += draw.expovariate(per_minute / 60.0)
        if at_s >= end_s:
            return
        yield at_s


class _Drawing:
    """Who is struck when, so far."""

    def __init__(self, scenario: Scenario, seed: int, duration_s: float) -> None:
        self.scenario = scenario
        self.seed = seed
        self.duration_s = duration_s
        self.faults: list[Planned] = []
        self.left_out = 0
        self.members: dict[int, tuple[float, float]] = {  # learner: from when to when it is there
            number: (0.0, float("inf")) for number in range(1, scenario.run.learners + 1)
        }
        self.newest = scenario.run.learners

    def generator(self, origin: str) -> Random:
        """Each table has its own: one more storm leaves the others as they were."""
        return Random(f"{self.scenario.name}/{self.seed}/{origin}")

    # ------------------------------------------------------------------------------------------------ one fault

    def add(self, origin: str, at_s: float, what: Wanted, number: int) -> None:
        target = Target(what.kind, number)
        self.faults.append(Planned(0, round(at_s, 3), what.fault, target, dict(what.options), origin))
        if what.fault == "join":
            self.members[number] = (at_s + SETTLE_S, float("inf"))
        elif what.fault == "leave":
            self.members[number] = (self.members[number][0], at_s)

    def join(self) -> int:
        self.newest += 1
        return self.newest

    def there(self, kind: TargetKind, at_s: float) -> list[int]:
        if kind == "shard":
            return list(range(self.scenario.run.shards))
        return sorted(n for n, (begin, end) in self.members.items() if begin <= at_s < end)

    def free(self, kind: TargetKind, at_s: float, what: Wanted) -> list[int]:
        """Numbers that a fault could strike now, and that nothing strikes already."""
        if kind == "syncer":
            candidates = [0]
        elif what.fault == "leave":
            there = self.there(kind, at_s)
            candidates = there if len(there) > 1 else []
        else:
            candidates = self.there(kind, at_s)
        return [n for n in candidates if not self.is_busy(Target(kind, n), what, at_s)]

    def is_busy(self, target: Target, what: Wanted, at_s: float) -> bool:
        """A process is struck by one thing at a time, and so is a link or a disk; what is dead has no payload."""
        option = KINDS[what.fault].lasts
        until_s = at_s + (float(what.options[option]) if option is not None else 0.0) + SETTLE_S
        return any(
            touches(fault.target, target) and fault.at_s < until_s and at_s < fault.at_s + fault.lasts_s + SETTLE_S
            for fault in self.faults
        )


def touches(one: Target, other: Target) -> bool:
    """Whatever strikes a learner's process strikes everything of that learner."""
    if "shard" in (one.kind, other.kind):
        return one == other
    return one.number == other.number and (
        one.kind == other.kind or "learner" in (one.kind, other.kind) or "payload" in (one.kind, other.kind)
    )


def draw_plan(scenario: Scenario, seed: int, duration_s: float) -> Plan:
    """All schedules first, as they are exact; then the storms, in the order of time."""
    drawing = _Drawing(scenario, seed, duration_s)
    for index, scheduled in enumerate(scenario.schedule, 1):
        _draw_scheduled(drawing, f"schedule {index}", scheduled.what, scheduled.at.seconds(duration_s))
    waiting: list[tuple[float, int, Storm, Random]] = []
    for index, storm in enumerate(scenario.storms, 1):
        draw = drawing.generator(f"storm {index}")
        begin_s, end_s = storm.begin.seconds(duration_s), storm.end.seconds(duration_s)
        targets = Random(f"{draw.random()}/targets")  # of its own: who is free must not move the times
        for at_s in arrivals(draw, storm.per_minute, begin_s, end_s):
            waiting.append((at_s, index, storm, targets))
            if len(waiting) > MOST_FAULTS:
                raise ScenarioError(
                    f"scenario {scenario.name}: more than {MOST_FAULTS} faults in {duration_s:g} s; give a lower"
                    " per_minute or a shorter --duration"
                )
    for at_s, index, storm, targets in sorted(waiting, key=lambda each: (each[0], each[1])):
        _draw_of_storm(drawing, f"storm {index}", storm, at_s, targets)
    ordered = sorted(drawing.faults, key=lambda each: (each.at_s, each.origin, each.target))
    numbered = tuple(replace(fault, number=number) for number, fault in enumerate(ordered, 1))
    run = scenario.run
    about = (scenario.name, scenario.about, seed, duration_s, run.learners)
    return Plan(*about, numbered, drawing.left_out, run.shards)


def _draw_scheduled(drawing: _Drawing, origin: str, what: Wanted, at_s: float) -> None:
    if not 0.0 <= at_s <= drawing.duration_s:
        raise ScenarioError(
            f"scenario {drawing.scenario.name}, [[schedule]] {origin.split()[-1]}: at is {at_s:g} s, and the run takes"
            f" {drawing.duration_s:g} s; give an earlier time, a share such as 40%, or a longer --duration"
        )
    if what.number == "new":
        drawing.add(origin, at_s, what, drawing.join())
        return
    there = drawing.there(what.kind, at_s)
    draw = drawing.generator(origin)
    chosen: Sequence[int]
    if what.number == "any":
        chosen = [draw.choice(drawing.free(what.kind, at_s, what) or there)]
    elif what.number == "all":
        chosen = there
    elif what.number == "all-but-one":
        spared = draw.choice(there)
        chosen = [n for n in there if n != spared]
    else:
        assert isinstance(what.number, int)
        if what.number and what.kind != "shard" and what.number not in there:
            raise ScenarioError(
                f"scenario {drawing.scenario.name}, [[schedule]] {origin.split()[-1]}: learner {what.number} is not"
                f" there at {at_s:g} s; it joins later, settles for {SETTLE_S:g} s after it joined, or has left"
            )
        chosen = [what.number]
    for number in chosen:
        drawing.add(origin, at_s, what, number)


def _draw_of_storm(drawing: _Drawing, origin: str, storm: Storm, at_s: float, targets: Random) -> None:
    what = storm.what
    if what.number == "new":
        drawing.add(origin, at_s, what, drawing.join())
        return
    free = drawing.free(what.kind, at_s, what)
    if isinstance(what.number, int):
        busy = drawing.is_busy(Target(what.kind, what.number), what, at_s)
        free = [] if busy else [what.number]
    if not free:
        drawing.left_out += 1
        return
    drawing.add(origin, at_s, what, targets.choice(free))
