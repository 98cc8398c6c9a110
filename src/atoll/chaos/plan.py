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

from atoll.chaos.faults import FAULT_KINDS, Target, TargetKind
from atoll.chaos.scenario import FaultSpec, Scenario, ScenarioError, Storm

FORMAT = 1

SETTLE_TIME_S = 6.0
"""After a process was struck: it starts, joins and takes a step before it is struck again."""

MAX_FAULTS = 2000


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. Times are seconds since all learners train."""

    number: int  # from 1, in the order of time
    at_s: float
    fault: str
    target: Target
    options: Mapping[str, float | str]
    origin: str  # "schedule 1" or "storm 2": where the scenario asks for it

    @property
    def duration_s(self) -> float:
        option = FAULT_KINDS[self.fault].duration_option
        return float(self.options[option]) if option is not None else 0.0

    def describe(self) -> str:
        """
        >>> PlannedFault(1, 2.0, "cut", Target("link", 3), {"for": 4.0, "direction": "up"}, "schedule 1").describe()
        'cut link 3 for 4 s, direction up'
        """
        told = []
        for name, value in self.options.items():
            option = FAULT_KINDS[self.fault].option(name)
            assert option is not None
            if name == "direction" and value == "both":
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
    faults: tuple[PlannedFault, ...]
    skipped: int  # arrivals of storms that found nobody to strike
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
            "skipped": self.skipped,
        }

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"


def poisson_times(rng: Random, per_minute: float, begin_s: float, end_s: float) -> Iterator[float]:
    """Times of a Poisson process: gaps are exponential, and nothing remembers the last one."""
    at_s = begin_s
    while True:
        at_s += rng.expovariate(per_minute / 60.0)
        if at_s >= end_s:
            return
        yield at_s


class _PlanBuilder:
    """Who is struck when, so far."""

    def __init__(self, scenario: Scenario, seed: int, duration_s: float) -> None:
        self.scenario = scenario
        self.seed = seed
        self.duration_s = duration_s
        self.faults: list[PlannedFault] = []
        self.skipped = 0
        self.members: dict[int, tuple[float, float]] = {  # learner: from when to when it is there
            number: (0.0, float("inf")) for number in range(1, scenario.run.learners + 1)
        }
        self.last_number = scenario.run.learners

    def make_rng(self, origin: str) -> Random:
        """Each table has its own: one more storm leaves the others as they were."""
        return Random(f"{self.scenario.name}/{self.seed}/{origin}")

    # ------------------------------------------------------------------------------------------------ one fault

    def add(self, origin: str, at_s: float, what: FaultSpec, number: int) -> None:
        target = Target(what.kind, number)
        self.faults.append(PlannedFault(0, round(at_s, 3), what.fault, target, dict(what.options), origin))
        if what.fault == "join":
            self.members[number] = (at_s + SETTLE_TIME_S, float("inf"))
        elif what.fault == "leave":
            self.members[number] = (self.members[number][0], at_s)

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def present(self, kind: TargetKind, at_s: float) -> list[int]:
        if kind == "shard":
            return list(range(self.scenario.run.shards))
        return sorted(n for n, (begin, end) in self.members.items() if begin <= at_s < end)

    def available(self, kind: TargetKind, at_s: float, what: FaultSpec) -> list[int]:
        """Numbers that a fault could strike now, and that nothing strikes already."""
        if kind == "syncer":
            candidates = [0]
        elif what.fault == "leave":
            there = self.present(kind, at_s)
            candidates = there if len(there) > 1 else []
        else:
            candidates = self.present(kind, at_s)
        return [n for n in candidates if not self.is_busy(Target(kind, n), what, at_s)]

    def is_busy(self, target: Target, what: FaultSpec, at_s: float) -> bool:
        """A process is struck by one thing at a time, and so is a link or a disk; what is dead has no payload."""
        option = FAULT_KINDS[what.fault].duration_option
        until_s = at_s + (float(what.options[option]) if option is not None else 0.0) + SETTLE_TIME_S
        return any(
            overlaps(fault.target, target)
            and fault.at_s < until_s
            and at_s < fault.at_s + fault.duration_s + SETTLE_TIME_S
            for fault in self.faults
        )


def overlaps(one: Target, other: Target) -> bool:
    """Whatever strikes a learner's process strikes everything of that learner."""
    if "shard" in (one.kind, other.kind):
        return one == other
    return one.number == other.number and (
        one.kind == other.kind or "learner" in (one.kind, other.kind) or "payload" in (one.kind, other.kind)
    )


def draw_plan(scenario: Scenario, seed: int, duration_s: float) -> Plan:
    """All schedules first, as they are exact; then the storms, in the order of time."""
    drawing = _PlanBuilder(scenario, seed, duration_s)
    for index, scheduled in enumerate(scenario.schedule, 1):
        _draw_scheduled(drawing, f"schedule {index}", scheduled.spec, scheduled.at.to_seconds(duration_s))
    waiting: list[tuple[float, int, Storm, Random]] = []
    for index, storm in enumerate(scenario.storms, 1):
        draw = drawing.make_rng(f"storm {index}")
        begin_s, end_s = storm.begin.to_seconds(duration_s), storm.end.to_seconds(duration_s)
        targets = Random(f"{draw.random()}/targets")  # of its own: who is free must not move the times
        for at_s in poisson_times(draw, storm.per_minute, begin_s, end_s):
            waiting.append((at_s, index, storm, targets))
            if len(waiting) > MAX_FAULTS:
                raise ScenarioError(
                    f"scenario {scenario.name}: more than {MAX_FAULTS} faults in {duration_s:g} s; give a lower"
                    " per_minute or a shorter --duration"
                )
    for at_s, index, storm, targets in sorted(waiting, key=lambda each: (each[0], each[1])):
        _draw_storm_fault(drawing, f"storm {index}", storm, at_s, targets)
    ordered = sorted(drawing.faults, key=lambda each: (each.at_s, each.origin, each.target))
    numbered = tuple(replace(fault, number=number) for number, fault in enumerate(ordered, 1))
    run = scenario.run
    about = (scenario.name, scenario.about, seed, duration_s, run.learners)
    return Plan(*about, numbered, drawing.skipped, run.shards)


def _draw_scheduled(drawing: _PlanBuilder, origin: str, what: FaultSpec, at_s: float) -> None:
    if not 0.0 <= at_s <= drawing.duration_s:
        raise ScenarioError(
            f"scenario {drawing.scenario.name}, [[schedule]] {origin.split()[-1]}: at is {at_s:g} s, and the run takes"
            f" {drawing.duration_s:g} s; give an earlier time, a share such as 40%, or a longer --duration"
        )
    if what.number == "new":
        drawing.add(origin, at_s, what, drawing.next_number())
        return
    there = drawing.present(what.kind, at_s)
    draw = drawing.make_rng(origin)
    chosen: Sequence[int]
    if what.number == "any":
        chosen = [draw.choice(drawing.available(what.kind, at_s, what) or there)]
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
                f" there at {at_s:g} s; it joins later, settles for {SETTLE_TIME_S:g} s after it joined, or has left"
            )
        chosen = [what.number]
    for number in chosen:
        drawing.add(origin, at_s, what, number)


def _draw_storm_fault(drawing: _PlanBuilder, origin: str, storm: Storm, at_s: float, targets: Random) -> None:
    what = storm.spec
    if what.number == "new":
        drawing.add(origin, at_s, what, drawing.next_number())
        return
    free = drawing.available(what.kind, at_s, what)
    if isinstance(what.number, int):
        busy = drawing.is_busy(Target(what.kind, what.number), what, at_s)
        free = [] if busy else [what.number]
    if not free:
        drawing.skipped += 1
        return
    drawing.add(origin, at_s, what, targets.choice(free))
