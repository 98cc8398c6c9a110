"""Scenarios: small TOML files with the faults of a run, their times or rates, and the expected results.

about = "One learner is killed and comes back."

[run]                       # of the job; every key has a default
learners = 4

[[schedule]]                # at an exact time
fault = "kill"
target = "learner any"
at = "40%"                  # of the duration, or seconds: "12s"
downtime = "3s"

[[storm]]                   # a Poisson process
fault = "cut"
target = "link any"
per_minute = 4.0

[expect.goodput]            # a criterion of the verdict
at_least = 0.6
reason = "..."

Unknown keys and invalid values are refused. The error names the file, the key and the allowed values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from atoll.chaos.faults import FAULT_KINDS, TARGET_GROUPS, FaultKind, TargetKind
from atoll.core.settings import check_settings, declared_settings, same_setting
from atoll.reference.job_settings import ADAMW_NUMERICS, JobSettings

DEFAULT_DURATION_S = 60.0
MAX_DURATION_S = 7 * 24 * 3600.0
MAX_PER_MINUTE = 600.0
STORM_SPAN = (0.1, 0.85)
"""Default start and end of a storm, as shares of the duration. Its faults end before the verdict."""


class ScenarioError(ValueError):
    """The scenario is invalid. The message names the file, the table, the key and the allowed values."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in the run: seconds from its start, or a share of its duration."""

    value: float
    is_share: bool

    def to_seconds(self, duration_s: float) -> float:
        return self.value * duration_s if self.is_share else self.value


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """Fault of one table. `number` is a learner or shard, 0 for the syncer, or a word such as `any`."""

    fault: str
    kind: TargetKind
    number: int | str
    options: Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    spec: FaultSpec
    at: Moment


@dataclass(frozen=True, slots=True)
class Storm:
    spec: FaultSpec
    per_minute: float  # total of all targets
    begin: Moment
    end: Moment


@dataclass(frozen=True, slots=True)
class Expectation:
    """Bound of one figure of the verdict, with the reason for it."""

    figure: str
    bound: float
    reason: str


@dataclass(frozen=True, slots=True)
class RunTable:
    """Settings of the job under fault. The defaults let two cores run four learners."""

    learners: int = same_setting(JobSettings, "learners", 4)
    duration_s: float = DEFAULT_DURATION_S
    step_time_s: float = same_setting(JobSettings, "step_time_s", 0.1)
    model: str = same_setting(JobSettings, "model", "100k")
    batch: int = same_setting(JobSettings, "batch", 4)
    context: int = same_setting(JobSettings, "context", 64)
    fragments: int = same_setting(JobSettings, "fragments", 8)
    every_steps: int = same_setting(JobSettings, "every_steps", 16)
    overlap_steps: int = same_setting(JobSettings, "overlap_steps", 4)
    quorum: int = same_setting(JobSettings, "quorum")
    shards: int = same_setting(JobSettings, "shards")
    eval_tokens: int = same_setting(JobSettings, "eval_tokens", 16_384)
    seed: int = same_setting(JobSettings, "seed")
    data: str | None = same_setting(JobSettings, "data")

    def __post_init__(self) -> None:
        check_settings(self)

    def settings(self, duration_s: float) -> JobSettings:
        """Return the settings of the job, with the tokens that all learners train in that time without faults."""
        steps = max(1, round(duration_s / self.step_time_s))
        return JobSettings(
            tokens=self.learners * steps * self.batch * self.context,
            inner="adamw",
            lr=3e-3,
            numerics=ADAMW_NUMERICS,
            **{each.name: each.default for each in declared_settings(self)},
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    run: RunTable
    schedule: tuple[ScheduledFault, ...] = ()
    storms: tuple[Storm, ...] = ()
    expect: Mapping[str, Expectation] = field(default_factory=dict)


EXPECTABLE_FIGURES: dict[str, tuple[str, str]] = {
    "goodput": ("at_least", "goodput"),  # share of the learners' time in steps
    "goodput_up": ("at_least", "goodput while up"),  # the same, while they were up
    "uptime": ("at_least", "uptime"),  # share of the time with at least one learner in a step
    # mean share of the live learners that took part in a merge
    "merge_participation": ("at_least", "merge participation"),
    "worst_pause_s": ("at_most", "worst pause"),  # longest gap between two steps of a learner without a fault
    "kill_to_step_s": ("at_most", "kill to step"),  # longest time from a kill to the next process's first step
    "kill_to_merge_s": ("at_most", "kill to merge"),  # the same, to its first merged contribution
    "loss_within": ("at_most", "loss"),  # final loss relative to the run without faults, minus 1
}
"""Figures that a scenario can bound: kind of bound, and name in the verdict."""


# --------------------------------------------------------------------------------------------------------------------
# Files


def shipped_scenarios() -> dict[str, str]:
    """Return the text of the scenarios that Atoll ships, by name."""
    folder = resources.files("atoll.chaos") / "scenarios"
    found = {
        each.name.removesuffix(".toml"): each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith(".toml")
    }
    return dict(sorted(found.items()))


def load_scenario(name_or_path: str) -> Scenario:
    """Load a shipped scenario by its name, or a scenario file by its path."""
    names = shipped_scenarios()
    if name_or_path in names:
        return parse_scenario(names[name_or_path], name_or_path, f"scenario {name_or_path}")
    path = Path(name_or_path)
    if not path.is_file():
        hint = "" if path.suffix == ".toml" or "/" in name_or_path else f"; shipped are {', '.join(names)}"
        raise ScenarioError(f"there is no scenario {name_or_path!r}, neither as a shipped name nor as a file{hint}")
    return parse_scenario(path.read_text(encoding="utf-8"), path.stem, str(path))


# --------------------------------------------------------------------------------------------------------------------
# Parsing


def parse_scenario(text: str, name: str, source: str) -> Scenario:
    """Parse the TOML text of a scenario. Error messages start with `source`."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{source}: not TOML: {error}") from None
    _check_keys(raw, ("about", "run", "schedule", "storm", "expect"), source, "the file")
    about = raw.get("about")
    if not isinstance(about, str) or not about.strip():
        raise ScenarioError(f"{source}: about is missing; add one sentence that describes the scenario")
    run = _run(_table(raw, "run", source), source)
    schedule_tables, storm_tables = _tables(raw, "schedule", source), _tables(raw, "storm", source)
    joining = sum(each.get("fault") == "join" for each in schedule_tables)  # new learners can be targets too
    numbers = TargetCounts(run.learners + joining, run.shards)
    schedule = tuple(
        _scheduled(each, numbers, f"{source}, [[schedule]] {n}") for n, each in enumerate(schedule_tables, 1)
    )
    storms = tuple(_storm(each, numbers, f"{source}, [[storm]] {n}") for n, each in enumerate(storm_tables, 1))
    if not schedule and not storms:
        raise ScenarioError(f"{source}: the scenario has no fault; add a [[schedule]] or a [[storm]]")
    scenario = Scenario(name, about.strip(), run, schedule, storms, _expect(_table(raw, "expect", source), source))
    try:
        run.settings(run.duration_s)
    except ValueError as error:
        raise ScenarioError(f"{source}, [run]: {error}") from None
    return scenario


def _run(raw: Mapping[str, Any], source: str) -> RunTable:
    place = f"{source}, [run]"
    names = {each.name.removesuffix("_s"): each.name for each in fields(RunTable)}  # times have their unit in the value
    _check_keys(raw, tuple(names), place, "the table")
    values: dict[str, Any] = {names[key]: value for key, value in raw.items()}
    for key in {"duration", "step_time"} & {*raw}:
        values[names[key]] = parse_seconds(raw[key], f"{place}: {key}")
    try:
        run = RunTable(**values)
    except ValueError as error:
        raise ScenarioError(f"{place}: {error}") from None
    check_duration(run.duration_s, f"{place}: duration")
    if run.step_time_s <= 0.0:
        raise ScenarioError(f"{place}: step_time is 0; use a time such as 80ms (the verdict needs paced steps)")
    return run


def check_duration(duration_s: float, place: str) -> None:
    if not 1.0 <= duration_s <= MAX_DURATION_S:
        raise ScenarioError(f"{place} is {duration_s:g} s; use a time from 1s to 168h")


class TargetCounts(NamedTuple):
    """Number of possible targets."""

    learners: int  # from 1
    shards: int  # from 0


def _scheduled(raw: Mapping[str, Any], numbers: TargetCounts, place: str) -> ScheduledFault:
    spec = _fault_spec(raw, ("at",), numbers, place)
    if "at" not in raw:
        raise ScenarioError(f'{place}: at is missing; use a share such as "40%", or a time such as "12s"')
    return ScheduledFault(spec, parse_moment(raw["at"], f"{place}: at"))


def _storm(raw: Mapping[str, Any], numbers: TargetCounts, place: str) -> Storm:
    spec = _fault_spec(raw, ("per_minute", "from", "until"), numbers, place)
    if spec.number in TARGET_GROUPS:
        raise ScenarioError(f"{place}: a storm has one target at a time; use a number or any, not {spec.number}")
    rate = raw.get("per_minute")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0.0 < rate <= MAX_PER_MINUTE:
        raise ScenarioError(f"{place}: per_minute is {rate!r}; use a number above 0, at most {MAX_PER_MINUTE:g}")
    begin = parse_moment(raw["from"], f"{place}: from") if "from" in raw else Moment(STORM_SPAN[0], True)
    end = parse_moment(raw["until"], f"{place}: until") if "until" in raw else Moment(STORM_SPAN[1], True)
    return Storm(spec, float(rate), begin, end)


def _fault_spec(raw: Mapping[str, Any], more: tuple[str, ...], numbers: TargetCounts, place: str) -> FaultSpec:
    fault = raw.get("fault")
    if fault not in FAULT_KINDS:
        raise ScenarioError(f"{place}: fault is {fault!r}; use one of {', '.join(FAULT_KINDS)}")
    kind = FAULT_KINDS[fault]
    options_of_kind = tuple(option.name for option in kind.options)
    _check_keys(raw, ("fault", "target", *more, *options_of_kind), place, f"a {fault} here")
    options: dict[str, float | str] = {}
    for option in kind.options:
        value = raw.get(option.name, option.default)
        key = f"{place}: {option.name}"
        if option.name not in raw:
            options[option.name] = option.default
        elif option.kind == "seconds":
            options[option.name] = parse_seconds(value, key)
        elif option.kind == "bytes_per_s":
            options[option.name] = parse_rate(value, key)
        elif option.kind == "count":
            options[option.name] = float(_parse_count(value, option.name, place))
        elif value not in option.choices:
            raise ScenarioError(f"{key} is {value!r}; use one of {', '.join(option.choices)}")
        else:
            options[option.name] = str(value)
    target_kind, number = _target(raw.get("target"), kind, numbers, place)
    if target_kind == "shard" and not numbers.shards:
        raise ScenarioError(f"{place}: target is {raw.get('target')!r}, and the run has no shards; set shards in [run]")
    if target_kind == "link" and numbers.shards:
        raise ScenarioError(
            f"{place}: target is {raw.get('target')!r}; with shards a learner has a link to each of them, and only the"
            " link to the syncer can be faulted; use link faults in a run without shards"
        )
    return FaultSpec(fault, target_kind, number, options)


def _target(raw: object, kind: FaultKind, numbers: TargetCounts, place: str) -> tuple[TargetKind, int | str]:
    allowed = _format_targets(kind)
    if kind.name == "join":
        if raw not in (None, "learner new"):
            raise ScenarioError(f"{place}: target is {raw!r}; a learner that joins is new; omit target")
        return "learner", "new"
    words = raw.split() if isinstance(raw, str) else []
    if words == ["syncer"] and "syncer" in kind.targets:
        return "syncer", 0
    if len(words) == 2:
        found = next((each for each in kind.targets if each == words[0] and each != "syncer"), None)
        if found is not None:
            if words[1] == "syncer" and found == "disk":
                return found, 0
            if words[1] == "any" or (words[1] in TARGET_GROUPS and found != "payload"):
                return found, words[1]
            if words[1].isdigit():
                first, last = (0, numbers.shards - 1) if found == "shard" else (1, numbers.learners)
                if not first <= int(words[1]) <= last and (found != "shard" or numbers.shards):
                    name = "shards" if found == "shard" else "learners"
                    raise ScenarioError(f"{place}: target is {raw!r}; {name} are {first} to {last}")
                return found, int(words[1])
    raise ScenarioError(f"{place}: target is {raw!r}; a {kind.name} has the target {allowed}")


def _format_targets(kind: FaultKind) -> str:
    parts = []
    for each in kind.targets:
        if each == "syncer":
            parts.append('"syncer"')
        elif each == "disk":
            parts.append('"disk syncer", "disk 2" or "disk any"')
        else:
            several = "" if each == "payload" else f', "{each} all", "{each} all-but-one"'
            parts.append(f'"{each} 2", "{each} any"{several}')
    return " or ".join(parts)


def _expect(raw: Mapping[str, Any], source: str) -> dict[str, Expectation]:
    _check_keys(raw, tuple(EXPECTABLE_FIGURES), f"{source}, [expect]", "the table")
    found = {}
    for figure, bounds in raw.items():
        place = f"{source}, [expect.{figure}]"
        side = EXPECTABLE_FIGURES[figure][0]
        if not isinstance(bounds, Mapping):
            raise ScenarioError(f'{place} is {bounds!r}; use {{ {side} = 0.5, reason = "why" }}')
        _check_keys(bounds, (side, "reason"), place, "the table")
        bound, reason = bounds.get(side), bounds.get("reason")
        if not isinstance(bound, int | float) or isinstance(bound, bool) or bound < 0:
            raise ScenarioError(f"{place}: {side} is {bound!r}; use a number of 0 or more")
        if not isinstance(reason, str) or not reason.strip():
            raise ScenarioError(f"{place}: reason is missing; add a sentence that explains the bound")
        found[figure] = Expectation(figure, float(bound), reason.strip())
    return found


# --------------------------------------------------------------------------------------------------------------------
# Values


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_TIMES = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|MB)/s")
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6}


def parse_seconds(raw: object, place: str) -> float:
    """Parse a time. Error messages start with `place`, here and in the functions below.

    >>> parse_seconds("5m", ""), parse_seconds("80ms", ""), parse_seconds(2, "")
    (300.0, 0.08, 2.0)
    """
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 <= raw < float("inf"):
        return float(raw)
    found = _TIME.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is None:
        raise ScenarioError(f"{place} is {raw!r}; use a time such as 80ms, 12s, 5m or 1h")
    return float(found[1]) * _TIMES[found[2]]


def parse_moment(raw: object, place: str) -> Moment:
    """Parse a time, or a share of the duration.

    >>> parse_moment("40%", ""), parse_moment("12s", "")
    (Moment(value=0.4, is_share=True), Moment(value=12.0, is_share=False))
    """
    found = _SHARE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is not None and float(found[1]) <= 100.0:
        return Moment(float(found[1]) / 100.0, True)
    try:
        if found is None:
            return Moment(parse_seconds(raw, place), False)
    except ScenarioError:
        pass
    raise ScenarioError(f'{place} is {raw!r}; use a share of the duration such as "40%", or a time such as "12s"')


def parse_rate(raw: object, place: str) -> float:
    """Parse a rate in bytes per second.

    >>> parse_rate("50 kB/s", "")
    50000.0
    """
    found = _BYTES.fullmatch(raw.strip()) if isinstance(raw, str) else None
    rate = float(found[1]) * _SIZES[found[2]] if found is not None else 0.0
    if rate < 1.0:
        raise ScenarioError(f'{place} is {raw!r}; use bytes per second, such as "50 kB/s"')
    return rate


def _parse_count(raw: object, key: str, place: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 1:
        raise ScenarioError(f"{place}: {key} is {raw!r}; use a whole number of at least 1")
    return raw


def _check_keys(raw: Mapping[str, Any], allowed: tuple[str, ...], place: str, what: str) -> None:
    for key in raw:
        if key not in allowed:
            raise ScenarioError(f"{place}: unknown key {key!r}; {what} has {', '.join(allowed)}")


def _table(raw: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    found = raw.get(key, {})
    if not isinstance(found, Mapping):
        raise ScenarioError(f"{source}: {key} is {found!r}; write a table [{key}]")
    return found


def _tables(raw: Mapping[str, Any], key: str, source: str) -> list[Mapping[str, Any]]:
    found = raw.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ScenarioError(f"{source}: {key} must be tables, each under its own [[{key}]]")
    return found
