"""Fit the unpublished parameters of the fleet to the published goodput table, once, and print every residual.

    python benchmarks/fit_goodput.py                  the fit: about a minute on one core
    python benchmarks/fit_goodput.py --quick          the same with short simulations, to see that it runs
    python benchmarks/fit_goodput.py --alternatives   the rules that were rejected, each with its own best fit

Four numbers are free: the mean of the repair delay, the seconds of a reconfiguration (scaling down, scaling up and a
restart take the same), the delay before returned slices are taken in, and the slice. An island with N / M chips is one
run that serves every cell with that ratio, so 16 cells cost 7 runs. The same seeds serve every trial, so the search
sees a smooth and repeatable surface. What counts is the worst cell, so the search minimises fourth powers of residuals.
The result is rounded to half seconds and to the better power of two: the cells are rounded to whole points themselves.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.sim.fleet import DAY_S, YEAR_S, FleetConfig, RepairDelay
from atoll.sim.goodput import TABLE_CHIPS, TABLE_ROWS, TableCell, estimate_goodput, simulate
from atoll.sim.published import PUBLISHED_CELLS, Method, Metric, PublishedCell, published_percent

# The table barely depends on the form of the repair delay (see the README beside this file), so its form is not fitted:
# a skewed delay with a long tail that is seldom shorter than a few seconds.
REPAIR_SHAPE = 0.7
REPAIR_POWER = 3.0
RIGID_OUTAGE_S = 77.0

START_VALUES = {"repair mean s": 60.0, "reconfigure s": 15.0, "upscale delay s": 25.0, "slice chips": 1_500.0}
INITIAL_STEP_SIZES = {"repair mean s": 8.0, "reconfigure s": 3.0, "upscale delay s": 10.0, "slice chips": 1_500.0}


@dataclass(frozen=True)
class IslandShares:
    """Goodput and uptime of one elastic island, as fractions."""

    goodput: float
    uptime: float


def config_of(values: Sequence[float]) -> FleetConfig:
    repair_mean_s, reconfigure_s, upscale_delay_s, slice_chips = values
    return FleetConfig(
        slice_chips=round(slice_chips),
        repair=RepairDelay.with_mean(repair_mean_s, REPAIR_SHAPE, REPAIR_POWER),
        downscale_s=reconfigure_s,
        upscale_s=reconfigure_s,
        restart_s=reconfigure_s,
        upscale_delay_s=upscale_delay_s,
    )


def rigid_shares(chips: int, outage_s: float, step_s: float) -> IslandShares:
    """The job that is not elastic, in closed form: runs of mean 1/rate, of which whole steps count, and outages."""
    rate_per_s = chips / YEAR_S
    cycle_s = 1.0 / rate_per_s + outage_s
    return IslandShares(step_s / math.expm1(rate_per_s * step_s) / cycle_s, 1.0 / rate_per_s / cycle_s)


def residuals(
    elastic: Callable[[int], IslandShares], rigid: Callable[[int], IslandShares]
) -> list[tuple[PublishedCell, float]]:
    """Ours minus published, in points, for every published cell."""
    found: list[tuple[PublishedCell, float]] = []
    for cell in PUBLISHED_CELLS:
        shares = rigid(cell.chips) if cell.method == "data-parallel" else elastic(cell.chips // cell.learners)
        # Islands are independent: no learner steps only while all of them are stalled.
        ours = shares.goodput if cell.metric == "goodput" else 1.0 - (1.0 - shares.uptime) ** cell.learners
        found.append((cell, 100.0 * ours - cell.percent))
    return found


def fit_error(found: Sequence[tuple[PublishedCell, float]]) -> float:
    return sum(difference**4 for _, difference in found)


def squared_error(found: Sequence[tuple[PublishedCell, float]]) -> float:
    return sum(difference**2 for _, difference in found)


def simulated_residuals(config: FleetConfig, failures: int, seed: int) -> list[tuple[PublishedCell, float]]:
    known: dict[int, IslandShares] = {}

    def elastic(chips: int) -> IslandShares:
        if chips not in known:
            result = simulate(config, "decoupled", 1, chips, failures * YEAR_S / chips / DAY_S, seed)
            known[chips] = IslandShares(result.goodput, result.uptime)
        return known[chips]

    outage_s = config.repair.mean_s + config.restart_s
    return residuals(elastic, lambda chips: rigid_shares(chips, outage_s, config.step_time_s))


def minimize(
    objective: Callable[[Sequence[float]], float], start: Sequence[float], first_step: Sequence[float], rounds: int
) -> tuple[float, list[float]]:
    """Nelder and Mead's simplex search: few parameters, no derivatives, nothing to tune."""
    size = len(start)
    corners = [(objective(start), list(start))]
    for place in range(size):
        corner = [value + first_step[place] * (place == other) for other, value in enumerate(start)]
        corners.append((objective(corner), corner))
    for _ in range(rounds):
        corners.sort(key=lambda pair: pair[0])
        worst = corners[-1][1]
        centre = [sum(corner[place] for _, corner in corners[:-1]) / size for place in range(size)]

        def towards(
            reach: float, centre: list[float] = centre, worst: list[float] = worst
        ) -> tuple[float, list[float]]:
            point = [middle + reach * (far - middle) for middle, far in zip(centre, worst, strict=True)]
            return objective(point), point

        mirrored = towards(-1.0)
        if mirrored[0] < corners[0][0]:
            corners[-1] = min(mirrored, towards(-2.0))
        elif mirrored[0] < corners[-2][0]:
            corners[-1] = mirrored
        else:
            inside = towards(0.5)
            if inside[0] < corners[-1][0]:
                corners[-1] = inside
            else:
                best = corners[0][1]
                shrunk = [[(a + b) / 2.0 for a, b in zip(best, corner, strict=True)] for _, corner in corners[1:]]
                corners = [corners[0], *((objective(corner), corner) for corner in shrunk)]
    return min(corners)


@dataclass(frozen=True)
class OutageRules:
    """A mechanism to compare with. The chosen one is `Rules()`, and the class Island has it."""

    name: str = "chosen: returned slices wait together, interruptions strike a stepping island only"
    pause_failures: str = "none"  # interruptions during a pause: none | absorbed | restart the pause
    returns_join_pause: bool = False  # a slice that comes back during a pause is in service after it
    free: str = "d=u, delay"  # which seconds are searched: "d=u, delay" | "d, u" | "d=u" | "d, u, delay"

    def seconds(self, point: Sequence[float]) -> tuple[float, float, float]:
        """(down, up, delay) of a point of the search."""
        match self.free:
            case "d=u, delay":
                return point[0], point[0], point[1]
            case "d, u":
                return point[0], point[1], 0.0
            case "d=u":
                return point[0], point[0], 0.0
            case _:
                return point[0], point[1], point[2]


ALTERNATIVES = (
    OutageRules(),
    OutageRules("chosen, with down and up apart", free="d, u, delay"),
    OutageRules("no delay, every return has its own pause", free="d, u"),
    OutageRules("no delay, returns in a pause are free", returns_join_pause=True, free="d, u"),
    OutageRules("no delay, returns in a pause are free, down = up", returns_join_pause=True, free="d=u"),
    OutageRules("delay, returns in a pause are free", returns_join_pause=True),
    OutageRules("chosen, but pauses are hit and absorb it", pause_failures="absorbed"),
    OutageRules("chosen, but pauses are hit and start again", pause_failures="restart"),
    OutageRules("no delay, pauses are hit and start again", "restart", returns_join_pause=True, free="d, u"),
)


def island_by_rules(rules: OutageRules, chips: int, point: Sequence[float], failures: int, seed: int) -> IslandShares:
    """A second, smaller simulation of one elastic island, with exchangeable rules and steps of 1 s."""
    down_s, up_s, delay_s = rules.seconds(point)
    rng = random.Random(f"{chips} chips, seed {seed}")
    slices = max(1, round(chips / max(1.0, point[-1])))
    slice_rate_per_s = chips / slices / YEAR_S
    # Repair and restart together are the outage that the rows that are not elastic show.
    repair = RepairDelay.with_mean(max(5.0, RIGID_OUTAGE_S - up_s), REPAIR_SHAPE, REPAIR_POWER)
    back: list[float] = []
    missing = outside = hits = 0
    now_s = useful_s = stepped_s = 0.0
    due_s = math.inf

    def strike(at_s: float) -> None:
        nonlocal missing, hits
        missing += 1
        hits += 1
        heapq.heappush(back, at_s + repair.draw_s(rng))

    while hits < failures:
        fails_s = now_s + rng.expovariate(slice_rate_per_s * max(slices - missing, 1e-9))
        while back and back[0] < min(fails_s, due_s):
            due_s = min(due_s, heapq.heappop(back) + delay_s)
            outside += 1
        pause_s = max(min(fails_s, due_s), now_s)
        run_s = pause_s - now_s if slices > missing else 0.0
        stepped_s += run_s
        fails = fails_s < due_s
        useful_s += (math.floor(run_s) if fails else run_s) * (slices - missing) / slices
        missing, outside, due_s = missing - outside, 0, math.inf
        if fails:
            strike(pause_s)
        now_s = pause_s + (down_s if fails else up_s)
        if rules.pause_failures != "none":
            at_s = pause_s
            while (at_s := at_s + rng.expovariate(slice_rate_per_s * max(slices - missing, 1e-9))) < now_s:
                strike(at_s)
                now_s = at_s + down_s if rules.pause_failures == "restart" else now_s
        while back and back[0] <= now_s:
            back_s = heapq.heappop(back)
            if rules.returns_join_pause:
                missing -= 1
            else:
                due_s = min(due_s, back_s + delay_s)
                outside += 1
    return IslandShares(useful_s / now_s, stepped_s / now_s)


def elastic_residuals(
    rules: OutageRules, point: Sequence[float], failures: int, seed: int
) -> list[tuple[PublishedCell, float]]:
    known: dict[int, IslandShares] = {}

    def elastic(chips: int) -> IslandShares:
        if chips not in known:
            known[chips] = island_by_rules(rules, chips, point, failures, seed)
        return known[chips]

    found = residuals(elastic, lambda _: IslandShares(0.0, 0.0))
    return [(cell, difference) for cell, difference in found if cell.method != "data-parallel"]


def compare(failures: int, rounds: int) -> None:
    """Each set of rules with its own best fit to the elastic cells, judged on other seeds."""
    print(
        "\nrules of the elastic island, own best fit     down    up  delay  slice |   rms    max | elastic, 2.4M chips"
    )
    kinds = {"d=u, delay": "rd", "d, u": "rr", "d=u": "r", "d, u, delay": "rrd"}
    for rules in ALTERNATIVES:
        start = [{"r": 15.0, "d": 25.0}[kind] for kind in kinds[rules.free]] + [1_500.0]
        first_step = [{"r": 4.0, "d": 10.0}[kind] for kind in kinds[rules.free]] + [1_500.0]

        def objective(point: Sequence[float], rules: OutageRules = rules) -> float:
            if min(point) < 0.0 or point[-1] < 64.0:
                return math.inf
            return fit_error(elastic_residuals(rules, point, failures, seed=1))

        _, point = minimize(objective, start, first_step, rounds)
        cells = elastic_residuals(rules, point, 4 * failures, seed=2)
        down_s, up_s, delay_s = rules.seconds(point)
        rms = math.sqrt(squared_error(cells) / len(cells))
        worst = max(abs(difference) for _, difference in cells)
        beyond = 100.0 * island_by_rules(rules, 2_400_000, point, 4 * failures, seed=2).goodput
        print(f"  {rules.name}")
        print(f"{'':42}{down_s:7.1f}{up_s:6.1f}{delay_s:7.1f}{point[-1]:7.0f} |{rms:6.2f}{worst:7.2f} |{beyond:6.1f}")


def compare_rigid() -> None:
    """The job that is not elastic: what can be hit, in closed form, and the best single number of seconds."""
    cells = [cell for cell in PUBLISHED_CELLS if cell.method == "data-parallel" and cell.metric == "goodput"]
    rules: tuple[tuple[str, Callable[[float, float], float]], ...] = (
        ("chosen: a running job is hit, 1 / (1 + rate * outage)", lambda rate, s: 1.0 / (1.0 + rate * s)),
        ("all chips are hit at all times, exp(-rate * outage)", lambda rate, s: math.exp(-rate * s)),
        (
            "chosen, and work since a checkpoint every 60 s is lost",
            lambda rate, s: 60.0 / math.expm1(60.0 * rate) / (1.0 / rate + s),
        ),
    )
    print("\nrules of the job that is not elastic                            outage s |  residuals at 150k, 600k, 1.2M")
    for name, goodput in rules:

        def errors(outage_s: float, goodput: Callable[[float, float], float] = goodput) -> list[float]:
            return [100.0 * goodput(cell.chips / YEAR_S, outage_s) - cell.percent for cell in cells]

        best_s = min((tenth / 10.0 for tenth in range(1, 2_000)), key=lambda s: sum(e * e for e in errors(s)))
        print(f"  {name:<60}{best_s:10.1f} |" + "".join(f"{error:+7.1f}" for error in errors(best_s)))


def compare_repair_forms(failures: int) -> None:
    """The same mean in other forms of the exponentiated Weibull, everything else as in the defaults."""
    print("\nform of the repair delay, same mean     shape  power |   rms    max")
    for name, shape, power in (
        ("default", REPAIR_SHAPE, REPAIR_POWER),
        ("exponential", 1.0, 1.0),
        ("long tail", 0.6, 1.0),
        ("narrow", 2.0, 1.0),
        ("narrower", 3.0, 3.0),
    ):
        config = replace(FleetConfig(), repair=RepairDelay.with_mean(FleetConfig().repair.mean_s, shape, power))
        found = simulated_residuals(config, failures, seed=2)
        rms, worst = math.sqrt(squared_error(found) / len(found)), max(abs(difference) for _, difference in found)
        print(f"  {name:<36}{shape:7.1f}{power:7.1f} |{rms:6.2f}{worst:7.2f}")


def report(title: str, found: Sequence[tuple[PublishedCell, float]]) -> None:
    rms = math.sqrt(squared_error(found) / len(found))
    worst = max(abs(difference) for _, difference in found)
    print(f"\n{title}: rms {rms:.2f}, largest {worst:.2f} points over {len(found)} published cells")
    for cell, difference in found:
        ours = cell.percent + difference
        name = f"{cell.label} {cell.metric}"
        print(f"  {name:<30}{cell.chips:>10,}  published {cell.percent:5.0f}  ours {ours:6.1f}  {difference:+5.1f}")


def goodput_table(
    rows: Sequence[tuple[Method, int]] = TABLE_ROWS,
    chips: Sequence[int] = TABLE_CHIPS,
    days: float = 2.0,
    seeds: Sequence[int] = (0, 1, 2),
) -> tuple[TableCell, ...]:
    """Goodput and uptime of every row at every number of chips, over seeds."""
    config = FleetConfig()
    cells: list[TableCell] = []
    for method, learners in rows:
        for count in chips:
            runs = [simulate(config, method, learners, count, days, seed) for seed in seeds]
            samples: tuple[tuple[Metric, list[float]], ...] = (
                ("goodput", [100.0 * run.goodput for run in runs]),
                ("uptime", [100.0 * run.uptime for run in runs]),
            )
            for metric, sample in samples:
                published = published_percent(method, learners, count, metric)
                cells.append(TableCell(method, learners, count, metric, estimate_goodput(sample), published))
    return tuple(cells)


def render_table(cells: Sequence[TableCell], metric: Metric) -> str:
    """The table as text: `ours (published, difference)`, in percent.

    The press figure of 88 % against 27 % compares with the job that is not elastic, so both one-job rows are kept.
    """
    chosen = [cell for cell in cells if cell.metric == metric]
    chips = sorted({cell.chips for cell in chosen})
    names = {"data-parallel": "one job, not elastic", "elastic": "one job, elastic"}
    lines = [f"{metric + ' %, ours (published)':<24}" + "".join(f"{_short(count):>20}" for count in chips)]
    for method, learners in dict.fromkeys((cell.method, cell.learners) for cell in chosen):
        row = {cell.chips: cell for cell in chosen if (cell.method, cell.learners) == (method, learners)}
        label = names.get(method, f"M = {learners}" if method == "decoupled" else f"{method}, M = {learners}")
        lines.append(f"{label:<24}" + "".join(f"{_cell_text(row.get(count)):>20}" for count in chips))
    return "\n".join(lines)


def _short(chips: int) -> str:
    return f"{chips / 1e6:g}M" if chips >= 1_000_000 else f"{chips / 1e3:g}k"


def _cell_text(cell: TableCell | None) -> str:
    if cell is None:
        return ""
    if cell.difference is None:
        return f"{cell.simulated.mean:.1f}"
    return f"{cell.simulated.mean:.1f} ({cell.published:.0f}, {cell.difference:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fit the fleet's unpublished parameters to the published goodput table."
    )
    parser.add_argument("--quick", action="store_true", help="short simulations: shows that the script runs")
    parser.add_argument("--alternatives", action="store_true", help="fit the rejected rules too (four minutes)")
    options = parser.parse_args()
    failures, rounds = (400, 12) if options.quick else (10_000, 60)

    def objective(values: Sequence[float]) -> float:
        if min(values) < 0.0 or values[0] < 1.0 or values[-1] < 64.0:
            return math.inf
        return fit_error(simulated_residuals(config_of(values), failures, seed=1))

    _, values = minimize(objective, list(START_VALUES.values()), list(INITIAL_STEP_SIZES.values()), rounds)
    print("fitted: " + ", ".join(f"{name} {value:.1f}" for name, value in zip(START_VALUES, values, strict=True)))
    report("as fitted, on the seeds of the search", simulated_residuals(config_of(values), failures, seed=1))
    halves = [round(2.0 * value) / 2.0 for value in values[:-1]]
    power = math.floor(math.log2(values[-1]))
    rounded = min(([*halves, 2.0**power], [*halves, 2.0 ** (power + 1)]), key=objective)
    print("\nrounded: " + ", ".join(f"{name} {value:g}" for name, value in zip(START_VALUES, rounded, strict=True)))
    same = config_of(rounded) == FleetConfig()
    print(f"the defaults of FleetConfig are {'these' if same else 'not these'}")
    report("defaults of FleetConfig, on other seeds", simulated_residuals(FleetConfig(), 4 * failures, seed=2))
    days = 0.2 if options.quick else 8.0
    cells = goodput_table(rows=TABLE_ROWS, chips=TABLE_CHIPS, days=days, seeds=(10, 11, 12))
    print(f"\nthe whole table, {days:g} days, 3 seeds")
    print(render_table(cells, "goodput"))
    print(render_table(cells, "uptime"))
    if options.alternatives:
        compare(failures, 12 if options.quick else 40)
        compare_rigid()
        compare_repair_forms(4 * failures)


if __name__ == "__main__":
    main()
