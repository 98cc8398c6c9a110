"""Fast simulation of goodput and uptime of a fleet, by method, without the protocol.

Goodput is the share of allocated chip time in steps that counted. Missing slices, pauses, waits for others and steps
lost to failures reduce it; slow chips do not. Uptime is the share of time in which at least one learner steps.

| method | islands | waits |
|---|---|---|
| `data-parallel` | one job with all chips, not elastic | for the slice that failed |
| `elastic` | one job with all chips, elastic | never |
| `decoupled` | M, elastic | never |
| `diloco` | M, elastic | for all islands, every H steps, and for the exchange after it |
| `streaming` | M, elastic | the same with every fragment, but up to tau steps later |

Chips of an island that waits at a barrier are under load and fail at the same rate as during steps.

    >>> result = simulate(FleetConfig(), "decoupled", learners=8, chips=1_200_000, days=1.0, seed=0)
    >>> 0.85 < result.goodput < 0.91
    True
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from atoll.sim.fleet import DAY_S, ExtraLearners, FleetConfig, SimIsland, build_islands
from atoll.sim.published import PUBLISHED_ROWS, Method, Metric


@dataclass(frozen=True, slots=True)
class BarrierConfig:
    """Exchange schedule of synchronous methods. The defaults are H and P of Atoll and a published exchange time."""

    every_steps: int = 24  # steps between two rounds of the same fragment
    fragments: int = 24  # fragments of `streaming`; `diloco` exchanges the whole model
    tau_steps: int = 2  # steps of `streaming` that overlap with an exchange
    exchange_s: float = 0.8  # time of one exchange; `diloco` waits for it

    def __post_init__(self) -> None:
        if self.every_steps < 1 or not 1 <= self.fragments <= self.every_steps:
            raise ValueError(f"H is {self.every_steps} and fragments {self.fragments}; give 1 <= fragments <= H")
        if self.tau_steps < 1:
            raise ValueError(
                f"tau_steps is {self.tau_steps}; give at least 1, or use the method diloco, which does not overlap"
            )
        if not 0.0 <= self.exchange_s < math.inf:
            raise ValueError(f"exchange_s is {self.exchange_s}; give seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """Result of one simulated run. Shares are fractions, 0 to 1."""

    method: Method
    learners: int
    chips: int
    days: float
    seed: int
    goodput: float
    uptime: float
    throughput: float  # share of the tokens of all allocated chips at speed 1
    tokens: float
    steps: int  # inner steps that counted, summed over learners
    failures: int


@dataclass(frozen=True, slots=True)
class GoodputEstimate:
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def simulate(
    config: FleetConfig,
    method: Method,
    learners: int,
    chips: int,
    days: float,
    seed: int,
    *,
    speeds: Sequence[float] = (),
    extras: Sequence[ExtraLearners] = (),
    barrier: BarrierConfig | None = None,
) -> GoodputResult:
    """Simulate one run of one method. `data-parallel` and `elastic` are one job and ignore `learners`."""
    if not 0.0 < days < math.inf:
        raise ValueError(f"days is {days}; give a number above 0")
    one_job = method in ("data-parallel", "elastic")
    is_synchronous = method in ("diloco", "streaming")
    if extras and (one_job or is_synchronous):
        raise ValueError(f"the method {method} does not support extra learners; use the method decoupled")
    learners = 1 if one_job else learners
    islands = build_islands(
        config,
        learners,
        chips,
        seed,
        elastic=method != "data-parallel",
        speeds=() if one_job else speeds,
        extras=extras,
    )
    horizon_s = days * DAY_S
    meters = [_Meter(island) for island in islands]
    if is_synchronous:
        barrier = barrier or BarrierConfig()
        diloco = method == "diloco"
        interval_steps = barrier.every_steps if diloco else max(1, barrier.every_steps // barrier.fragments)
        run = _BarrierRun(meters, horizon_s, interval_steps, 0 if diloco else barrier.tau_steps, barrier.exchange_s)
        up_s = run.run()
    else:
        up_s = _run_without_barriers(meters, horizon_s)
    allocated_chip_s = sum(island.chips * island.present_s(horizon_s) for island in islands)
    tokens = config.tokens_per_chip_step * sum(meter.chip_steps for meter in meters)
    nominal_tokens = config.tokens_per_chip_step * allocated_chip_s / config.step_time_s
    return GoodputResult(
        method=method,
        learners=learners,
        chips=chips,
        days=days,
        seed=seed,
        goodput=sum(meter.useful_chip_s for meter in meters) / allocated_chip_s,
        uptime=up_s / horizon_s,
        throughput=tokens / nominal_tokens if nominal_tokens > 0.0 else 0.0,
        tokens=tokens,
        steps=round(sum(meter.steps for meter in meters)),
        failures=sum(island.failures for island in islands),
    )


class _Meter:
    """Counter of the useful work of one island."""

    def __init__(self, island: SimIsland) -> None:
        self.island = island
        self.useful_chip_s = 0.0
        self.chip_steps = 0.0  # steps times chips, proportional to tokens
        self.steps = 0.0
        self._step_time_s = island.config.step_time_s

    def record(self, seconds: float, share: float, speed: float, lost_steps: float = 0.0) -> None:
        """Count an interval of steps, of which the last `lost_steps` are lost."""
        steps = seconds * speed / self._step_time_s - lost_steps
        chips = share * self.island.chips
        self.useful_chip_s += steps * self._step_time_s / speed * chips
        self.chip_steps += steps * chips
        self.steps += steps


def _run_without_barriers(meters: list[_Meter], horizon_s: float) -> float:
    """Let every island step whenever it can. Return the seconds in which at least one island stepped."""
    # Islands are processed by the start of their next segment. Intervals of steps thus arrive sorted by start, and one
    # number, the end of the covered time, is enough to compute their union.
    queue = [(0.0, index) for index in range(len(meters))]
    partial_steps = [0.0] * len(meters)  # completed fraction of the current step of each island
    up_s = covered_s = 0.0
    while queue:
        _, index = heapq.heappop(queue)
        meter = meters[index]
        segment = next(meter.island)
        end_s = min(segment.end_s, horizon_s)
        if segment.is_stepping:
            seconds = end_s - segment.start_s
            progress = partial_steps[index] + seconds * segment.speed / meter.island.config.step_time_s
            partial_steps[index] = progress - math.floor(progress)
            if segment.loses_step and segment.end_s <= horizon_s:
                meter.record(seconds, segment.share, segment.speed, lost_steps=partial_steps[index])
                partial_steps[index] = 0.0
            else:
                meter.record(seconds, segment.share, segment.speed)
            up_s += max(0.0, end_s - max(segment.start_s, covered_s))
            covered_s = max(covered_s, end_s)
        if segment.end_s < horizon_s:
            heapq.heappush(queue, (segment.end_s, index))
    return up_s


class _Union:
    """Length of a union of intervals that arrive roughly in order."""

    def __init__(self) -> None:
        self.length_s = 0.0
        self._pending: list[tuple[float, float]] = []
        self._covered_s = 0.0

    def add(self, start_s: float, end_s: float) -> None:
        heapq.heappush(self._pending, (start_s, end_s))

    def settle(self, safe_s: float) -> None:
        """Count all intervals before `safe_s`. No later interval may start before it."""
        while self._pending and self._pending[0][0] < safe_s:
            start_s, end_s = heapq.heappop(self._pending)
            if end_s > safe_s:
                heapq.heappush(self._pending, (safe_s, end_s))
                end_s = safe_s
            self.length_s += max(0.0, end_s - max(start_s, self._covered_s))
            self._covered_s = max(self._covered_s, end_s)

    def jump(self, seconds: float, length_s: float) -> None:
        """Advance by `seconds` of which `length_s` are covered. The pending intervals are shifted too."""
        self.length_s += length_s
        self._covered_s += seconds
        self._pending = [(start_s + seconds, end_s + seconds) for start_s, end_s in self._pending]


class _BarrierRun:
    """Run of islands with barriers.

    No island may pass step n * interval + tau before all islands have taken step n * interval and exchanged. Between
    two failures every period of `interval` steps soon takes the same time on every island. The simulation then skips
    whole periods until the next change of any island. This is exact, and the cost grows with failures, not with steps.
    """

    def __init__(
        self, meters: list[_Meter], horizon_s: float, interval_steps: int, tau_steps: int, exchange_s: float
    ) -> None:
        self._meters = meters
        self._horizon_s = horizon_s
        self._interval_steps = interval_steps
        self._tau_steps = tau_steps
        self._exchange_s = exchange_s
        # A gate can open only at step n * interval + tau, so this is the largest chunk of steps between two checks.
        self._chunk_steps = math.gcd(interval_steps, tau_steps) if tau_steps else interval_steps
        self._finish_s = [0.0] * len(meters)
        self._gates_s: deque[float] = deque()  # ends of the exchanges that no island has needed yet, oldest first
        self._union = _Union()
        self._step = 0

    def run(self) -> float:
        """Run to the horizon. Return the seconds in which at least one island stepped."""
        calm_periods = 0  # consecutive periods of equal length on all islands
        min_calm_periods = (
            self._tau_steps // self._interval_steps + 2
        )  # until every gate in the queue is from a calm period
        length_s = 0.0
        while min(self._finish_s) < self._horizon_s:
            before_s, up_before_s, length_before_s = list(self._finish_s), self._union.length_s, length_s
            for _ in range(self._interval_steps // self._chunk_steps):
                self._take_chunk()
            self._union.settle(min(min(self._finish_s), self._horizon_s))
            lengths_s = [after - before for after, before in zip(self._finish_s, before_s, strict=True)]
            length_s = max(lengths_s)
            is_calm = length_s - min(lengths_s) < 1e-6 and abs(length_s - length_before_s) < 1e-6
            calm_periods = calm_periods + 1 if is_calm else 0
            if calm_periods > min_calm_periods:
                self._jump(length_s, self._union.length_s - up_before_s)
        self._union.settle(self._horizon_s)
        return self._union.length_s

    def _take_chunk(self) -> None:
        passed = self._step - self._tau_steps
        gate_s = self._gates_s.popleft() if passed > 0 and passed % self._interval_steps == 0 else 0.0
        for index, meter in enumerate(self._meters):
            self._finish_s[index] = self._step_on(meter, max(self._finish_s[index], gate_s), self._chunk_steps)
        self._step += self._chunk_steps
        if self._step % self._interval_steps == 0:
            self._gates_s.append(max(self._finish_s) + self._exchange_s)

    def _step_on(self, meter: _Meter, now_s: float, steps: int) -> float:
        """Take `steps` from `now_s` on. Return when they are done, or a time after the horizon."""
        step_time_s = meter.island.config.step_time_s
        left_steps = float(steps)
        while now_s < self._horizon_s:
            segment = meter.island.segment_at(now_s)
            if not segment.is_stepping:
                now_s = segment.end_s
                continue
            done_s = now_s + left_steps * step_time_s / segment.speed
            end_s = min(done_s, segment.end_s, self._horizon_s)
            self._union.add(now_s, end_s)
            left_steps = max(0.0, left_steps - (end_s - now_s) * segment.speed / step_time_s)
            lost_steps = 0.0
            if end_s < done_s and end_s == segment.end_s and segment.loses_step:
                lost_steps = math.ceil(left_steps - 1e-9) - left_steps
                left_steps += lost_steps
            meter.record(end_s - now_s, segment.share, segment.speed, lost_steps)
            now_s = end_s
            if end_s == done_s:
                break
        return now_s

    def _jump(self, length_s: float, up_s: float) -> None:
        """Repeat the last period until an island changes or the horizon is reached."""
        segments = [
            meter.island.segment_at(finish_s) for meter, finish_s in zip(self._meters, self._finish_s, strict=True)
        ]
        if not all(segment.is_stepping for segment in segments):
            return
        # An island that is ahead starts its next steps later than its finish, so two periods stay as a margin.
        ends_s = [min(segment.end_s, self._horizon_s) for segment in segments]
        room_s = min(end_s - finish_s for end_s, finish_s in zip(ends_s, self._finish_s, strict=True))
        periods = math.floor(room_s / length_s) - 2
        if periods < 1:
            return
        seconds = periods * length_s
        steps = periods * self._interval_steps
        for index, (meter, segment) in enumerate(zip(self._meters, segments, strict=True)):
            meter.record(steps * meter.island.config.step_time_s / segment.speed, segment.share, segment.speed)
            self._finish_s[index] += seconds
        self._gates_s = deque(gate_s + seconds for gate_s in self._gates_s)
        self._union.jump(seconds, periods * up_s)
        self._step += steps


# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def _t_quantile(degrees_of_freedom: int) -> float:
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    # Cornish-Fisher expansion z + (z^3 + z) / 4v, correct to three decimals above 30 degrees of freedom.
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4.0 * degrees_of_freedom)


def mean_ci(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean and the 95 % confidence interval, mean +- t(n - 1) * s / sqrt(n), of at least two values.

    >>> mean_ci([1.0, 2.0, 3.0])[0]
    2.0
    """
    sample = list(values)
    if len(sample) < 2:
        raise ValueError(f"a confidence interval over {len(sample)} runs is undefined; run at least 2 seeds")
    mean = fmean(sample)
    half_width = _t_quantile(len(sample) - 1) * stdev(sample) / math.sqrt(len(sample))
    return mean, mean - half_width, mean + half_width


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over seeds and, from two seeds on, its 95 % confidence interval."""

    mean: float
    low: float | None
    high: float | None

    def interval(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]

    def scaled(self, factor: float) -> MeanEstimate:
        """Return the estimate in another unit."""
        if self.low is None or self.high is None:
            return MeanEstimate(self.mean * factor, None, None)
        return MeanEstimate(self.mean * factor, self.low * factor, self.high * factor)


def estimate_over_seeds(values: Iterable[float], lower: float = -math.inf, upper: float = math.inf) -> MeanEstimate:
    """Estimate the mean of a quantity that lies between `lower` and `upper`, and clamp the confidence interval to them.

    >>> estimate_over_seeds([0.87, 0.88, 0.89]).mean, estimate_over_seeds([0.88]).low
    (0.88, None)
    """
    sample = list(values)
    if len(sample) < 2:
        return MeanEstimate(fmean(sample), None, None)
    mean, low, high = mean_ci(sample)
    return MeanEstimate(mean, min(max(low, lower), mean), max(min(high, upper), mean))


def estimate_goodput(values: Iterable[float]) -> GoodputEstimate:
    """Return the mean of the values with its confidence interval, see `mean_ci`."""
    return GoodputEstimate(*mean_ci(values))


@dataclass(frozen=True, slots=True)
class TableCell:
    """Cell of the goodput or uptime table, in percent, with the published value if there is one."""

    method: Method
    learners: int
    chips: int
    metric: Metric
    simulated: GoodputEstimate
    published: float | None

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.simulated.mean - self.published


TABLE_CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
TABLE_ROWS: tuple[tuple[Method, int], ...] = (
    *PUBLISHED_ROWS[:2],
    ("decoupled", 2),
    ("decoupled", 4),
    ("decoupled", 8),
    ("decoupled", 16),
)
