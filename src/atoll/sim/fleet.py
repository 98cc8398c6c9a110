"""Simulated islands: when a learner steps, with how many of its slices, and at which speed.

Chips are not objects. A million exponential clocks with a mean of one year are equivalent to one clock with a million
events per year. It does not matter which chip fails, because its whole slice is lost. So the cost of an island does not
depend on its number of chips.

These rules apply to every row of the goodput table:

1. An interruption hits a slice that is in service while its island steps. Chips do not fail while their island
   reconfigures or while their slice is idle: the published mean time is one between interruptions of a job.
2. The slice comes back after an exponentiated-Weibull delay.
3. An **elastic** island pauses for `downscale_s` and continues without the slice. A returned slice stays idle until the
   island reconfigures, which takes `upscale_s`. That happens at most `upscale_delay_s` after the first return, or
   earlier at another interruption. The set of slices is fixed when a reconfiguration begins.
4. An island that is **not elastic** waits for the slice and then restarts for `restart_s`.
5. The current step is lost at an interruption. A planned reconfiguration loses no step.

Because of rule 3 each failure costs less when failures are frequent: many returns share one pause. The defaults of
`FleetConfig` are fitted to the published goodput table. `benchmarks/README.md` has the residuals and the rules that
were tried and rejected.

    >>> import random
    >>> island = SimIsland(FleetConfig(), chips=150_000, rng=random.Random(0))
    >>> first = next(island)
    >>> first.state, first.share, first.end_cause
    (<IslandState.STEPPING: 'stepping'>, 1.0, <SegmentEnd.FAILURE: 'failure'>)
    >>> island.segment_at(first.end_s + 1.0).state
    <IslandState.DOWNSCALING: 'downscaling'>
"""

from __future__ import annotations

import enum
import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from atoll.core.settings import setting

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
MAX_LEARNERS = 4_096


class IslandState(enum.Enum):
    """State of an island. Only STEPPING makes progress."""

    STEPPING = "stepping"
    DOWNSCALING = "downscaling"  # elastic: reconfigures without a failed slice
    UPSCALING = "upscaling"  # elastic: reconfigures with returned slices
    REPAIRING = "repairing"  # waits until a slice is repaired
    RESTARTING = "restarting"  # not elastic: the job starts with all slices
    ABSENT = "absent"  # the schedule gives the island no chips


class SegmentEnd(enum.Enum):
    """Cause of the end of a segment."""

    FAILURE = "failure"  # a chip failed; the current step is lost
    RETURN = "return"  # returned slices are added
    READY = "ready"  # a pause has ended
    PACE = "pace"  # a slow-down starts or ends
    JOIN = "join"
    LEAVE = "leave"  # the schedule removes the chips; the current step is lost


class Segment(NamedTuple):
    """Interval `start_s <= t < end_s` in which the state of an island does not change."""

    start_s: float
    end_s: float
    state: IslandState
    share: float  # share of slices in service, 0 to 1; a step has tokens in proportion
    speed: float  # steps per nominal step time: speed class, slowest chip, slow-downs; 0 unless stepping
    end_cause: SegmentEnd

    @property
    def is_stepping(self) -> bool:
        return self.state is IslandState.STEPPING

    @property
    def pace(self) -> float:
        """Tokens per second, as a fraction of an island with all its slices at speed 1."""
        return self.share * self.speed

    @property
    def loses_step(self) -> bool:
        """Return whether the step at the end of the segment is lost."""
        return self.end_cause is SegmentEnd.FAILURE or self.end_cause is SegmentEnd.LEAVE


@dataclass(frozen=True, slots=True)
class RepairDelay:
    """Exponentiated-Weibull delay: P(delay <= x) = (1 - exp(-(x / scale_s) ** shape)) ** power.

    A `shape` below 1 gives a long tail. A `power` above 1 makes very short repairs rare. With both 1 it is exponential.
    """

    scale_s: float
    shape: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        require(0.0 < self.scale_s < math.inf, "repair scale_s", self.scale_s, "give seconds above 0")
        require(0.1 <= self.shape <= 20.0, "repair shape", self.shape, "give a number from 0.1 to 20")
        require(0.1 <= self.power <= 20.0, "repair power", self.power, "give a number from 0.1 to 20")

    @classmethod
    def with_mean(cls, mean_s: float, shape: float = 1.0, power: float = 1.0) -> RepairDelay:
        """Create a delay with this mean: `RepairDelay.with_mean(62.5, shape=0.7, power=3.0)`."""
        require(0.0 < mean_s < math.inf, "repair mean_s", mean_s, "give seconds above 0")
        return cls(mean_s / cls(1.0, shape, power).mean_s, shape, power)

    @property
    def mean_s(self) -> float:
        """Mean: scale * power * Gamma(1 + 1/shape) * sum over j of (-1)^j C(power - 1, j) (j + 1)^-(1 + 1/shape)."""
        return self.scale_s * _unit_repair_mean(self.shape, self.power)

    def draw_s(self, rng: random.Random) -> float:
        return float(self.scale_s * (-math.log1p(-(rng.random() ** (1.0 / self.power)))) ** (1.0 / self.shape))


@lru_cache(maxsize=64)
def _unit_repair_mean(shape: float, power: float) -> float:
    order = 1.0 + 1.0 / shape
    total, binomial = 0.0, 1.0
    for j in range(20_000):
        term = binomial * (j + 1.0) ** -order
        total += term
        binomial *= -(power - 1.0 - j) / (j + 1.0)
        if binomial == 0.0:  # the series is finite for an integer power
            break
    return power * math.gamma(order) * total


def parse_mtbi(text: str) -> float:
    """Return seconds for a number of days.

    >>> parse_mtbi("0.5"), parse_mtbi("inf")
    (43200.0, inf)
    """
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not days > 0.0:
        raise ValueError(f"--mtbi-days is {text}; give days above 0, or inf for chips that never fail")
    return days * DAY_S


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Chips, slices, failures and slow-downs. The defaults down to `step_time_s` are fitted to the published table."""

    # published
    mtbi_s: float = setting(
        YEAR_S,
        "Mean time between interruptions of one chip; inf for none.",
        "DAYS",
        flag="mtbi_days",
        parse=parse_mtbi,
        show=lambda seconds: f"{seconds / DAY_S:g}",
    )
    slice_chips: int = 2_048
    repair: RepairDelay = field(default_factory=lambda: RepairDelay.with_mean(62.5, shape=0.7, power=3.0))
    downscale_s: float = 14.5
    upscale_s: float = 14.5
    upscale_delay_s: float = 31.0
    restart_s: float = 14.5  # restart time of a job that is not elastic, after the slice is repaired
    step_time_s: float = setting(1.0, "Time of one inner step at full speed.", "SECONDS", flag="step_time")
    tokens_per_chip_step: float = 16.0
    chip_time_sigma: float = setting(
        0.0,
        "Standard deviation of the step time between chips, 0 to 1; an island waits for its slowest chip.",
        "SHARE",
        flag="chip_variance",
    )
    slowdowns_per_hour: float = 0.0  # per island
    slowdown_factor: float = 0.5  # speed during a slow-down
    slowdown_mean_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.mtbi_s > 0.0, "mtbi_s", self.mtbi_s, "give seconds above 0, or math.inf for no failures")
        require(self.slice_chips >= 1, "slice_chips", self.slice_chips, "give at least 1 chip")
        require(0.0 < self.step_time_s < math.inf, "step_time_s", self.step_time_s, "give seconds above 0")
        for name in ("downscale_s", "upscale_s", "upscale_delay_s", "restart_s"):
            value = getattr(self, name)
            require(0.0 <= value < math.inf, name, value, "give seconds, 0 or more")
        for name in ("tokens_per_chip_step", "slowdowns_per_hour"):
            value = getattr(self, name)
            require(0.0 <= value < math.inf, name, value, "give a number, 0 or more")
        require(0.0 <= self.chip_time_sigma <= 1.0, "chip_time_sigma", self.chip_time_sigma, "give a fraction, 0 to 1")
        require(0.0 < self.slowdown_factor <= 1.0, "slowdown_factor", self.slowdown_factor, "give a speed, 0 < x <= 1")
        require(0.0 < self.slowdown_mean_s < math.inf, "slowdown_mean_s", self.slowdown_mean_s, "give seconds above 0")


def require(is_valid: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError with the name, the value and the remedy, unless the value is valid."""
    if not is_valid:
        raise ValueError(f"{name} is {value}; {remedy}")


@lru_cache(maxsize=1_024)
def expected_max_of_gaussians(count: int) -> float:
    """Return the expected maximum of `count` standard normal draws.

    It is the integral of 1 - F^n above 0 minus the integral of F^n below 0.

    >>> round(expected_max_of_gaussians(1_000_000), 2)
    4.86
    """
    require(count >= 1, "count", count, "give at least 1")
    width, total = 0.005, 0.0
    for i in range(2_400):  # 12 standard deviations to either side
        x = (i + 0.5) * width
        tail = 0.5 * math.erfc(x / math.sqrt(2.0))
        total -= math.expm1(count * math.log1p(-tail))
        total -= tail**count
    return total * width


def synchronous_speed(chips: int, chip_time_sigma: float) -> float:
    """Return the speed of chips that wait for the slowest one at every step: 1 / (1 + sigma * E[max of n])."""
    return 1.0 / (1.0 + chip_time_sigma * expected_max_of_gaussians(chips)) if chip_time_sigma > 0.0 else 1.0


class SimIsland:
    """The chips of one learner, as an iterator of contiguous segments from time 0. Equal seeds give equal segments.

    The last segment has no end if there are no failures or if no window follows.
    Failures, repairs and slow-downs have separate generators, so enabling one of them does not change the others.

    Args:
        windows: (join_s, leave_s) intervals in which the island has chips. It starts with all slices at each join.
    """

    def __init__(
        self,
        config: FleetConfig,
        chips: int,
        rng: random.Random,
        *,
        is_elastic: bool = True,
        speed: float = 1.0,
        windows: Sequence[tuple[float, float]] = ((0.0, math.inf),),
    ) -> None:
        require(chips >= 1, "chips of an island", chips, "give every learner at least one chip")
        require(0.0 < speed < math.inf, "speed of an island", speed, "give a number above 0, 1 for nominal")
        last_s = 0.0
        for join_s, leave_s in windows:
            require(
                last_s <= join_s < leave_s, "window", (join_s, leave_s), "give joins before leaves, in rising order"
            )
            last_s = leave_s
        self.config = config
        self.chips = chips
        self.is_elastic = is_elastic
        # Slices have equal size and cover all chips. A smaller island is one slice.
        self.slices = max(1, round(chips / config.slice_chips))
        self.windows = tuple(windows)
        self.full_speed = speed * synchronous_speed(chips, config.chip_time_sigma)
        self._failure_rng = random.Random(rng.getrandbits(64))
        self._repair_rng = random.Random(rng.getrandbits(64))
        self._slowdown_rng = random.Random(rng.getrandbits(64))
        self._segments = self._apply_schedule()
        self._current: Segment | None = None
        self.failures = 0  # interruptions before the current segment

    def __iter__(self) -> Iterator[Segment]:
        return self

    def __next__(self) -> Segment:
        segment = next(self._segments)
        if self._current is not None and self._current.end_cause is SegmentEnd.FAILURE:
            self.failures += 1
        self._current = segment
        return segment

    def segment_at(self, now_s: float) -> Segment:
        """Return the segment at `now_s`, which must not be before the previous segment that was returned."""
        segment = self._current if self._current is not None else next(self)
        assert now_s >= segment.start_s, f"segment at {now_s} s requested after {segment}"
        while segment.end_s <= now_s:
            segment = next(self)
        return segment

    def present_s(self, horizon_s: float) -> float:
        """Return the time before `horizon_s` in which the schedule gives the island chips."""
        return sum(max(0.0, min(leave_s, horizon_s) - join_s) for join_s, leave_s in self.windows)

    # Three generators of contiguous segments, each applied to the previous one: failures, slow-downs, the schedule.

    def _apply_schedule(self) -> Iterator[Segment]:
        now_s = 0.0
        for join_s, leave_s in self.windows:
            if join_s > now_s:
                yield Segment(now_s, join_s, IslandState.ABSENT, 0.0, 0.0, SegmentEnd.JOIN)
            segments = self._fail_elastic(join_s) if self.is_elastic else self._fail_rigid(join_s)
            if self.config.slowdowns_per_hour > 0.0:
                segments = self._apply_slowdowns(segments, join_s)
            for segment in segments:
                if segment.end_s >= leave_s:
                    if segment.start_s < leave_s:
                        yield segment._replace(end_s=leave_s, end_cause=SegmentEnd.LEAVE)
                    break
                yield segment
            now_s = leave_s
        if now_s < math.inf:
            yield Segment(now_s, math.inf, IslandState.ABSENT, 0.0, 0.0, SegmentEnd.LEAVE)

    def _apply_slowdowns(self, segments: Iterator[Segment], join_s: float) -> Iterator[Segment]:
        config, rng = self.config, self._slowdown_rng
        rate_per_s = config.slowdowns_per_hour / 3_600.0
        slow_begin_s = join_s + rng.expovariate(rate_per_s)
        slow_end_s = slow_begin_s + rng.expovariate(1.0 / config.slowdown_mean_s)
        for segment in segments:
            now_s = segment.start_s
            while now_s < segment.end_s:
                while slow_end_s <= now_s:
                    slow_begin_s = slow_end_s + rng.expovariate(rate_per_s)
                    slow_end_s = slow_begin_s + rng.expovariate(1.0 / config.slowdown_mean_s)
                is_slow = slow_begin_s <= now_s
                change_s = slow_end_s if is_slow else slow_begin_s
                if not segment.is_stepping or (not is_slow and change_s >= segment.end_s):
                    yield segment._replace(start_s=now_s)
                    break
                speed = segment.speed * config.slowdown_factor if is_slow else segment.speed
                if change_s >= segment.end_s:
                    yield segment._replace(start_s=now_s, speed=speed)
                    break
                yield segment._replace(start_s=now_s, end_s=change_s, speed=speed, end_cause=SegmentEnd.PACE)
                now_s = change_s

    def _draw_time_to_failure_s(self, in_service: int) -> float:
        rate_per_s = in_service * (self.chips / self.slices) / self.config.mtbi_s
        return self._failure_rng.expovariate(rate_per_s) if rate_per_s > 0.0 else math.inf

    def _fail_rigid(self, now_s: float) -> Iterator[Segment]:
        config = self.config
        while True:
            failed_s = now_s + self._draw_time_to_failure_s(self.slices)
            yield Segment(now_s, failed_s, IslandState.STEPPING, 1.0, self.full_speed, SegmentEnd.FAILURE)
            if failed_s == math.inf:
                return
            repaired_s = failed_s + config.repair.draw_s(self._repair_rng)
            yield Segment(failed_s, repaired_s, IslandState.REPAIRING, 0.0, 0.0, SegmentEnd.RETURN)
            now_s = repaired_s + config.restart_s
            if now_s > repaired_s:
                yield Segment(repaired_s, now_s, IslandState.RESTARTING, 1.0, 0.0, SegmentEnd.READY)

    def _fail_elastic(self, now_s: float) -> Iterator[Segment]:
        config = self.config
        in_service = self.slices
        repair_ends: list[float] = []  # heap of the times at which failed slices return
        idle = 0  # returned slices that are not yet in service
        upscale_s = math.inf  # latest time of the next upscale
        while True:
            # Slices that returned during a pause are idle, see rule 3.
            while repair_ends and repair_ends[0] <= now_s:
                repaired_s = heapq.heappop(repair_ends)
                idle += 1
                upscale_s = min(upscale_s, repaired_s + config.upscale_delay_s)
            if in_service == 0:
                if idle == 0:
                    repaired_s = repair_ends[0]
                    yield Segment(now_s, repaired_s, IslandState.REPAIRING, 0.0, 0.0, SegmentEnd.RETURN)
                    now_s = repaired_s
                    continue
                upscale_s = now_s  # no slice is in service, so upscale at once
                failed_s = math.inf
            else:
                failed_s = now_s + self._draw_time_to_failure_s(in_service)
                while repair_ends and repair_ends[0] < min(failed_s, upscale_s):
                    repaired_s = heapq.heappop(repair_ends)
                    idle += 1
                    upscale_s = min(upscale_s, repaired_s + config.upscale_delay_s)
            is_failure = failed_s < upscale_s
            pause_s = failed_s if is_failure else max(upscale_s, now_s)
            if pause_s > now_s:
                end_cause = SegmentEnd.FAILURE if is_failure else SegmentEnd.RETURN
                share = in_service / self.slices
                yield Segment(now_s, pause_s, IslandState.STEPPING, share, self.full_speed, end_cause)
                if pause_s == math.inf:
                    return
            in_service += idle - is_failure
            idle, upscale_s = 0, math.inf
            if is_failure:
                heapq.heappush(repair_ends, pause_s + config.repair.draw_s(self._repair_rng))
            now_s = pause_s + (config.downscale_s if is_failure else config.upscale_s)
            if now_s > pause_s:
                state = IslandState.DOWNSCALING if is_failure else IslandState.UPSCALING
                yield Segment(pause_s, now_s, state, in_service / self.slices, 0.0, SegmentEnd.READY)


@dataclass(frozen=True, slots=True)
class ExtraLearners:
    """Additional learners that join and leave by a schedule."""

    count: int
    windows: tuple[tuple[float, float], ...]  # (join_s, leave_s), in increasing order
    speed: float = 1.0
    chips: int | None = None  # chips of each learner; None: as many as a permanent learner

    def __post_init__(self) -> None:
        require(1 <= self.count <= MAX_LEARNERS, "count of extra learners", self.count, f"give 1 to {MAX_LEARNERS}")
        require(
            len(self.windows) >= 1, "windows of extra learners", self.windows, "give at least one (join_s, leave_s)"
        )

    @classmethod
    def parse(cls, text: str) -> ExtraLearners:
        """Parse count, speed if not 1, and windows in seconds: `4@3600-7200` or `4x0.8@0-3600,7200-9000`."""
        try:
            group, _, schedule = text.partition("@")
            count, _, speed = group.partition("x")
            pairs = [window.partition("-") for window in schedule.split(",")]
            windows = tuple((float(join), float(leave)) for join, _, leave in pairs)
            return cls(int(count), windows, float(speed) if speed else 1.0)
        except ValueError as error:
            raise ValueError(
                f"cannot parse the extra learners '{text}'; write COUNT@JOIN-LEAVE, such as 4@3600-7200"
            ) from error


def parse_speed_classes(text: str) -> tuple[float, ...]:
    """Return the speed of every learner from classes: `1.0x4,0.82x4` is four learners at 1 and four at 0.82."""
    speeds: list[float] = []
    for part in text.split(","):
        speed, _, count = part.strip().partition("x")
        try:
            speeds.extend([float(speed)] * (int(count) if count else 1))
        except ValueError as error:
            raise ValueError(
                f"cannot parse the speed class '{part}'; write SPEEDxCOUNT, such as 1.0x4,0.82x4"
            ) from error
        require(len(speeds) <= MAX_LEARNERS, "number of learners", len(speeds), f"give at most {MAX_LEARNERS}")
    return tuple(speeds)


def build_islands(
    config: FleetConfig,
    learners: int,
    chips: int,
    seed: int,
    *,
    elastic: bool = True,
    speeds: Sequence[float] = (),
    extras: Sequence[ExtraLearners] = (),
) -> list[SimIsland]:
    """Create the islands of a fleet: `learners` islands that share `chips` evenly, then the extra ones.

    The history of an island depends only on the seed and its index, so adding a learner does not change the others.
    """
    require(1 <= learners <= MAX_LEARNERS, "number of learners", learners, f"give 1 to {MAX_LEARNERS}")
    require(chips >= learners, "number of chips", chips, f"give at least one to each of the {learners} learners")
    require(
        len(speeds) in (0, learners), "number of speeds", len(speeds), f"give one for each of the {learners} learners"
    )
    each_chips, rest = divmod(chips, learners)
    islands = [
        SimIsland(
            config,
            each_chips + (index < rest),
            random.Random(f"island {index} of seed {seed}"),
            is_elastic=elastic,
            speed=speeds[index] if speeds else 1.0,
        )
        for index in range(learners)
    ]
    for extra in extras:
        for _ in range(extra.count):
            rng = random.Random(f"island {len(islands)} of seed {seed}")
            extra_chips = extra.chips if extra.chips is not None else each_chips
            islands.append(
                SimIsland(config, extra_chips, rng, is_elastic=elastic, speed=extra.speed, windows=extra.windows)
            )
    return islands
