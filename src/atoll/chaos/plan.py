"""The plan: all faults of a run with their times, targets and options, drawn from a scenario by a seed.

The same scenario, seed and duration give the same plan, bit for bit, on any machine. The plan is drawn before the run
starts, and nothing in the run changes it. Therefore a storm plans only possible faults: it kills only learners that no
earlier fault has stopped or killed. If no target is available, the storm skips the fault, and the plan has the count.
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
"""Time between two faults of one process, in which it starts, joins and takes a step."""

MAX_FAULTS = 2000


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """Fault of a plan. Times are seconds on the plan's clock, which starts when all learners train."""

    number: int  # from 1, in order of time
    at_s: float
    fault: str
    target: Target
    options: Mapping[str, float | str]
    origin: str  # table of the scenario: "schedule 1" or "storm 2"

    @property
    def duration_s(self) -> float:
        option = FAULT_KINDS[self.fault].duration_option
        return float(self.options[option]) if option is not None else 0.0

    def describe(self) -> str:
        """Return the fault with its target and options in words.

        >>> PlannedFault(1, 2.0, "cut", Target("link", 3), {"for": 4.0, "direction": "up"}, "schedule 1").describe()
        'cut link 3 for 4 s, direction up'
        """
        parts = []
        for name, value in self.options.items():
            option = FAULT_KINDS[self.fault].option(name)
            assert option is not None
            if name == "direction" and value == "both":
                continue
            if option.kind == "seconds":
                parts.append(f"{name} {float(value):.3g} s")
            elif option.kind == "bytes_per_s":
                parts.append(f"{name} {float(value) / 1000:.3g} kB/s")
            else:
                parts.append(f"{name} {value:,.0f}" if isinstance(value, float) else f"{name} {value}")
        first = f"{self.fault} {self.target}"
        return f"{first} {', '.join(parts)}" if parts else first

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
    skipped: int  # faults of storms that had no available target
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
    """Yield the times of a Poisson process with this rate."""
    at_s = begin_s
    while True:
        at_s += rng.expovariate(per_minute / 60.0)
        if at_s >= end_s:
            return
        yield at_s


class _PlanBuilder:
    """Builder of a plan: the faults planned so far, and the targets that are still available."""

    def __init__(self, scenario: Scenario, seed: int, duration_s: float) -> None:
        self.scenario = scenario
        self.seed = seed
        self.duration_s = duration_s
        self.faults: list[PlannedFault] = []
        self.skipped = 0
        self.members: dict[int, tuple[float, float]] = {  # learner: times of its join and its leave
            number: (0.0, float("inf")) for number in range(1, scenario.run.learners + 1)
        }
        self.last_number = scenario.run.learners

    def make_rng(self, origin: str) -> Random:
        """Return the random generator of one table of the scenario. Adding a storm does not change the others."""
        return Random(f"{self.scenario.name}/{self.seed}/{origin}")

    # ------------------------------------------------------------------------------------------------ one fault

    def add(self, origin: str, at_s: float, spec: FaultSpec, number: int) -> None:
        target = Target(spec.kind, number)
        self.faults.append(PlannedFault(0, round(at_s, 3), spec.fault, target, dict(spec.options), origin))
        if spec.fault == "join":
            self.members[number] = (at_s + SETTLE_TIME_S, float("inf"))
        elif spec.fault == "leave":
            self.members[number] = (self.members[number][0], at_s)

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def present(self, kind: TargetKind, at_s: float) -> list[int]:
        if kind == "shard":
            return list(range(self.scenario.run.shards))
        return sorted(n for n, (begin, end) in self.members.items() if begin <= at_s < end)

    def available(self, kind: TargetKind, at_s: float, spec: FaultSpec) -> list[int]:
        """Return the possible targets of a fault that no other fault affects at this time."""
        if kind == "syncer":
            candidates = [0]
        elif spec.fault == "leave":
            members = self.present(kind, at_s)
            candidates = members if len(members) > 1 else []  # the last learner must not leave
        else:
            candidates = self.present(kind, at_s)
        return [n for n in candidates if not self.is_busy(Target(kind, n), spec, at_s)]

    def is_busy(self, target: Target, spec: FaultSpec, at_s: float) -> bool:
        """Return whether another fault affects the target at this time. A killed process sends no payload."""
        option = FAULT_KINDS[spec.fault].duration_option
        until_s = at_s + (float(spec.options[option]) if option is not None else 0.0) + SETTLE_TIME_S
        return any(
            overlaps(fault.target, target)
            and fault.at_s < until_s
            and at_s < fault.at_s + fault.duration_s + SETTLE_TIME_S
            for fault in self.faults
        )


def overlaps(first: Target, second: Target) -> bool:
    """Return whether the targets share a process. A learner includes its link, disk and payload."""
    if "shard" in (first.kind, second.kind):
        return first == second
    return first.number == second.number and (
        first.kind == second.kind or "learner" in (first.kind, second.kind) or "payload" in (first.kind, second.kind)
    )


def draw_plan(scenario: Scenario, seed: int, duration_s: float) -> Plan:
    """Draw the plan of a scenario.

    The schedules come first because their times are exact. The faults of the storms follow in order of time.
    """
    builder = _PlanBuilder(scenario, seed, duration_s)
    for index, scheduled in enumerate(scenario.schedule, 1):
        _draw_scheduled(builder, f"schedule {index}", scheduled.spec, scheduled.at.to_seconds(duration_s))
    arrivals: list[tuple[float, int, Storm, Random]] = []
    for index, storm in enumerate(scenario.storms, 1):
        rng = builder.make_rng(f"storm {index}")
        begin_s, end_s = storm.begin.to_seconds(duration_s), storm.end.to_seconds(duration_s)
        # a separate generator: the times must not depend on the available targets
        targets = Random(f"{rng.random()}/targets")
        for at_s in poisson_times(rng, storm.per_minute, begin_s, end_s):
            arrivals.append((at_s, index, storm, targets))
            if len(arrivals) > MAX_FAULTS:
                raise ScenarioError(
                    f"scenario {scenario.name}: more than {MAX_FAULTS} faults in {duration_s:g} s; use a lower"
                    " per_minute or a shorter --duration"
                )
    for at_s, index, storm, targets in sorted(arrivals, key=lambda each: (each[0], each[1])):
        _draw_storm_fault(builder, f"storm {index}", storm, at_s, targets)
    ordered = sorted(builder.faults, key=lambda each: (each.at_s, each.origin, each.target))
    numbered = tuple(replace(fault, number=number) for number, fault in enumerate(ordered, 1))
    run = scenario.run
    header = (scenario.name, scenario.about, seed, duration_s, run.learners)
    return Plan(*header, numbered, builder.skipped, run.shards)


def _draw_scheduled(builder: _PlanBuilder, origin: str, spec: FaultSpec, at_s: float) -> None:
    if not 0.0 <= at_s <= builder.duration_s:
        raise ScenarioError(
            f"scenario {builder.scenario.name}, [[schedule]] {origin.split()[-1]}: at is {at_s:g} s, and the run takes"
            f" {builder.duration_s:g} s; use an earlier time, a share such as 40%, or a longer --duration"
        )
    if spec.number == "new":
        builder.add(origin, at_s, spec, builder.next_number())
        return
    members = builder.present(spec.kind, at_s)
    rng = builder.make_rng(origin)
    chosen: Sequence[int]
    if spec.number == "any":
        chosen = [rng.choice(builder.available(spec.kind, at_s, spec) or members)]
    elif spec.number == "all":
        chosen = members
    elif spec.number == "all-but-one":
        spared = rng.choice(members)
        chosen = [n for n in members if n != spared]
    else:
        assert isinstance(spec.number, int)
        if spec.number and spec.kind != "shard" and spec.number not in members:
            raise ScenarioError(
                f"scenario {builder.scenario.name}, [[schedule]] {origin.split()[-1]}: learner {spec.number} is not"
                f" available at {at_s:g} s: it joins later, joined less than {SETTLE_TIME_S:g} s before, or has left"
            )
        chosen = [spec.number]
    for number in chosen:
        builder.add(origin, at_s, spec, number)


def _draw_storm_fault(builder: _PlanBuilder, origin: str, storm: Storm, at_s: float, targets: Random) -> None:
    spec = storm.spec
    if spec.number == "new":
        builder.add(origin, at_s, spec, builder.next_number())
        return
    candidates = builder.available(spec.kind, at_s, spec)
    if isinstance(spec.number, int):
        busy = builder.is_busy(Target(spec.kind, spec.number), spec, at_s)
        candidates = [] if busy else [spec.number]
    if not candidates:
        builder.skipped += 1
        return
    builder.add(origin, at_s, spec, targets.choice(candidates))
