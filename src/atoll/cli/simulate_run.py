"""Run a simulation over seeds and processes, and print its figures as text, JSON, plots and tapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from atoll.cli.figures import check_plot, draw_figure, format_amount, format_percent, make_console
from atoll.cli.output import ReportProgress, Result, Task, run_tasks, usable_cores
from atoll.core.settings import setting
from atoll.sim.decoupled import (
    MAX_EVENTS,
    MAX_TAPE_EVENTS,
    DecoupledConfig,
    DecoupledResult,
    DecoupledRun,
    SimulationDetail,
    choose_detail,
    format_hours,
)
from atoll.sim.fleet import DAY_S, ExtraLearners, FleetConfig, build_islands, parse_speed_classes
from atoll.sim.goodput import (
    TABLE_CHIPS,
    TABLE_ROWS,
    BarrierConfig,
    GoodputResult,
    MeanEstimate,
    TableCell,
    estimate_goodput,
    estimate_over_seeds,
    simulate,
)
from atoll.sim.mixed_hardware import MIXED_ROWS, MixedResult, MixedRow, run_mixed
from atoll.sim.published import Method, Metric, published_percent
from atoll.tape.files import SimulatedTapeWriter, SimulationRecord, TapeTotals, require_empty_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SINGLE_JOB_METHODS = ("data-parallel", "elastic")


TABLE_DAYS = 4.0
TABLE_SEEDS = 5
"""Default days and seeds of --table. They give intervals well below one percentage point."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options of one call of the command."""

    method: Method = setting(
        "decoupled",
        "decoupled runs the cores of the protocol; data-parallel and elastic are one job on all chips; diloco and"
        " streaming wait for the slowest learner.",
        "NAME",
    )
    learners: int = setting(8, "Number of learners.", "M")
    chips: int = setting(1_200_000, "Total number of chips of all learners.", "N")
    requested_days: float | None = setting(
        None, "Simulated days.", "DAYS", flag="days", default_text="30; 4 with --table, 1/24 with --mixed"
    )
    seed: int = setting(0, "First seed. The same seed gives the same simulation.", "S")
    requested_seed_count: int | None = setting(
        None,
        "Number of seeds from the first one on. Intervals are over seeds.",
        "COUNT",
        flag="seeds",
        default_text="3; 5 with --table or --mixed, 1 with --tape",
    )
    jobs: int | None = setting(None, "Number of processes.", "COUNT", default_text="all cores")
    table: bool = setting(False, "Show goodput and uptime of all methods and sizes next to the published figures.")
    mixed: bool = setting(False, "Run the published comparison of quorum and grace on two hardware generations.")
    plot: Path | None = setting(
        None,
        "Plot the figure of --table to FILE (.png, .svg or .pdf). Without --table this run is marked in it. Needs the"
        " extra 'plot'.",
        "FILE",
    )
    tape: Path | None = setting(
        None,
        "Write the tapes of one decoupled run to DIR, for check, story and replay. Replay can train a model on them if"
        " they have every fragment: give --full for long runs.",
        "DIR",
    )
    full: bool = setting(False, "Simulate every fragment and every step of the protocol, even if it takes long.")
    protocol_hours: float | None = setting(
        None,
        "Simulate the cores of the protocol for this many hours only; goodput and uptime still cover all days.",
        "HOURS",
        default_text="as many as take about 8 s per seed",
    )
    protocol: DecoupledConfig = field(default_factory=DecoupledConfig)
    exchange_time: float = setting(0.8, "Duration of one exchange of diloco and streaming.", "SECONDS")
    fleet: FleetConfig = field(default_factory=FleetConfig)
    speeds: tuple[float, ...] = setting(
        (),
        "Speed classes: 1.0x4,0.82x4 is four learners at speed 1 and four at 0.82.",
        "CLASSES",
        parse=parse_speed_classes,
    )
    extras: tuple[ExtraLearners, ...] = setting(
        (),
        "Learners that join and leave: 4x0.8@0-3600 is four of speed 0.8 in the first hour. Repeatable.",
        "WHO@WHEN",
        flag="extra",
        parse=ExtraLearners.parse,
        repeated=True,
    )

    def check(self) -> None:
        """Raise `ValueError` for options that cannot be simulated."""
        if not 0.0 < self.days < math.inf:
            raise ValueError(f"days is {self.days:g}; give a number above 0")
        if self.seed_count < 1:
            raise ValueError(f"seeds is {self.seed_count}; give at least 1, or 2 for an interval")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs is {self.jobs}; give at least 1")
        if self.tape is not None and self.seed_count != 1:
            raise ValueError(
                f"--tape records one run, and {self.seed_count} seeds are {self.seed_count} runs; give --seeds 1"
            )
        self.barrier()
        build_islands(self.fleet, self.learners, self.chips, 0, speeds=self.speeds, extras=self.extras)
        if self.method == "decoupled":
            self.protocol.run_config()
            if self.protocol.quorum > self.learners:
                raise ValueError(
                    f"quorum {self.protocol.quorum} with {self.learners} learners never merges;"
                    f" give at most {self.learners}"
                )

    @property
    def days(self) -> float:
        default = TABLE_DAYS if self.table else 1.0 / 24.0 if self.mixed else 30.0
        return default if self.requested_days is None else self.requested_days

    @property
    def seed_count(self) -> int:
        default = TABLE_SEEDS if self.table or self.mixed else 3 if self.tape is None else 1
        return default if self.requested_seed_count is None else self.requested_seed_count

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.seed_count))

    @property
    def processes(self) -> int:
        return self.jobs or usable_cores()

    def barrier(self) -> BarrierConfig | None:
        protocol = self.protocol
        if self.method not in ("diloco", "streaming"):
            return None
        return BarrierConfig(protocol.every_steps, protocol.fragments, protocol.overlap_steps, self.exchange_time)

    def learner_steps_per_s(self) -> float:
        """Return the total steps per second of all learners without failures."""
        speeds = sum(self.speeds) if self.speeds else float(self.learners)
        horizon_s = self.days * DAY_S
        for extra in self.extras:
            present_s = sum(max(0.0, min(leave, horizon_s) - join) for join, leave in extra.windows)
            speeds += extra.count * extra.speed * present_s / horizon_s
        return speeds / self.fleet.step_time_s

    def settings(self) -> dict[str, object]:
        """Return all settings that influence the result, for the JSON."""
        fleet, protocol, barrier = asdict(self.fleet), asdict(self.protocol), self.barrier()
        has_slowdowns = fleet["slowdowns_per_hour"] > 0.0
        fields = {name: fleet[name] for name in _FLEET_FIELDS} | {
            "mtbi_days": _finite(self.fleet.mtbi_s / DAY_S),
            "repair_mean_s": self.fleet.repair.mean_s,
            "chip_variance": fleet["chip_time_sigma"],
            "slow_downs_per_hour": fleet["slowdowns_per_hour"],
            "slow_down_factor": fleet["slowdown_factor"] if has_slowdowns else None,
            "slow_down_mean_s": fleet["slowdown_mean_s"] if has_slowdowns else None,
            "speeds": list(self.speeds) or None,
            "extra": [
                {
                    "count": extra.count,
                    "speed": extra.speed,
                    "windows_s": [[_finite(s) for s in window] for window in extra.windows],
                }
                for extra in self.extras
            ],
        }
        if self.method == "decoupled":
            fields |= {name: protocol[name] for name in _PROTOCOL_FIELDS}
            fields |= {"grace": protocol["grace_margin"], "tau_steps": protocol["overlap_steps"]}
            fields["fragment_time_s"] = protocol["fragment_s"]
        elif barrier is not None:
            fields |= {
                "every_steps": barrier.every_steps,
                "fragments": barrier.fragments if self.method == "streaming" else 1,
                "tau_steps": barrier.tau_steps if self.method == "streaming" else 0,
                "exchange_time_s": barrier.exchange_s,
            }
        return fields


_FLEET_FIELDS = (
    *("step_time_s", "slice_chips", "downscale_s", "upscale_s", "upscale_delay_s", "restart_s"),
    "tokens_per_chip_step",
)
_PROTOCOL_FIELDS = (
    *("quorum", "every_steps", "fragments", "adopt", "delay_s", "merge_s", "disk_s", "jitter", "lockstep"),
)


def _finite(value: float) -> float | None:
    """Replace infinities, which are not JSON, by None."""
    return value if math.isfinite(value) else None


def read_slow_downs(text: str) -> dict[str, Any]:
    """Parse --slow-downs into fields of `FleetConfig`.

    >>> read_slow_downs("0.5:0.6:120")
    {'slowdowns_per_hour': 0.5, 'slowdown_factor': 0.6, 'slowdown_mean_s': 120.0}
    """
    try:
        rate, factor, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"cannot parse slow-downs {text!r}; write RATE:FACTOR:SECONDS, such as 0.5:0.6:120") from None
    return {"slowdowns_per_hour": rate, "slowdown_factor": factor, "slowdown_mean_s": seconds}


class CoreRun(NamedTuple):
    """Result of the cores for one seed, and of the fleet model for the same hours. The fleet model has no lockstep."""

    result: DecoupledResult
    fleet: GoodputResult | None
    tapes: TapeTotals | None
    full_step_tokens: dict[int, int]  # by learner


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Token ledger of the hours that the cores ran: trained = merged + pending + dropped."""

    trained: MeanEstimate
    merged: MeanEstimate
    pending: MeanEstimate
    dropped: MeanEstimate
    merged_share: MeanEstimate  # share of the trained tokens
    pending_share: MeanEstimate
    dropped_share: MeanEstimate
    dropped_by_reason: dict[str, float]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures over all seeds. Those that do not exist for the method are None."""

    options: SimulateOptions
    learners: int
    goodput: MeanEstimate
    uptime: MeanEstimate
    failures: MeanEstimate
    tokens_trained: MeanEstimate  # in the days that goodput covers
    goodput_days: float  # days of goodput and uptime: all, unless only the cores can simulate them
    detail: SimulationDetail | None = None
    ledger: TokenFigures | None = None
    contributions_per_merge: MeanEstimate | None = None
    effective_h: MeanEstimate | None = None
    staleness_steps: MeanEstimate | None = None
    merges_per_fragment: MeanEstimate | None = None
    suspected: MeanEstimate | None = None
    core_goodput: MeanEstimate | None = None  # for the hours that the cores ran
    fleet_goodput: MeanEstimate | None = None  # for the same hours
    tapes: TapeTotals | None = None

    def published(self, metric: Metric) -> float | None:
        """Return the published figure as a fraction, or None if this case was not published."""
        options = self.options
        if options.fleet != FleetConfig() or options.speeds or options.extras or options.protocol.lockstep:
            return None
        percent = published_percent(options.method, self.learners, options.chips, metric)
        return None if percent is None else percent / 100.0


def simulate_seeds(options: SimulateOptions) -> SimulationResult:
    """Simulate one run over all seeds, in several processes."""
    options.check()
    if options.method != "decoupled":
        return _simulate_synchronous(options)
    if options.tape is not None:
        require_empty_directory(options.tape)
    detail = choose_detail(
        options.protocol,
        options.days,
        options.learner_steps_per_s(),
        full=options.full,
        hours=options.protocol_hours,
        max_events=MAX_EVENTS if options.tape is None else MAX_TAPE_EVENTS,
    )
    is_by_cores = detail.covers_run or options.protocol.lockstep
    tasks: list[Task[CoreRun | GoodputResult]] = [partial(_run_cores, options, detail, seed) for seed in options.seeds]
    weights = [10.0] * options.seed_count
    if not is_by_cores:
        tasks += [partial(_run_fleet, options, seed) for seed in options.seeds]
        weights += [1.0] * options.seed_count
    results = run_tasks("simulating", tasks, options.processes, weights)
    cores = [result for result in results if isinstance(result, CoreRun)]
    fleets = [result for result in results if isinstance(result, GoodputResult)]
    outcome = _combine_results(options, detail, cores, fleets)
    if options.tape is not None:
        SimulationRecord(cores[0].full_step_tokens, result_fields(outcome)).save(options.tape)
    return outcome


def _run_fleet(options: SimulateOptions, seed: int, report: ReportProgress) -> GoodputResult:
    return _simulate_fleet(options, options.days, seed)


def _simulate_fleet(options: SimulateOptions, days: float, seed: int) -> GoodputResult:
    return simulate(
        options.fleet,
        options.method,
        options.learners,
        options.chips,
        days,
        seed,
        speeds=options.speeds,
        extras=options.extras,
        barrier=options.barrier(),
    )


def _run_cores(options: SimulateOptions, detail: SimulationDetail, seed: int, report: ReportProgress) -> CoreRun:
    days = detail.hours / 24.0
    config = detail.protocol.run_config()
    with nullcontext() if options.tape is None else SimulatedTapeWriter(options.tape, config, seed) as tapes:
        run = DecoupledRun(
            options.fleet,
            detail.protocol,
            options.learners,
            options.chips,
            days,
            seed,
            speeds=options.speeds,
            extras=options.extras,
            on_entry=None if tapes is None else tapes.write,
            on_start=None if tapes is None else tapes.start_tape,
        )
        result = run.run(report)
        if tapes is not None:
            tapes.finished = run.finish()
            tapes.merges = run.syncer.state.merges
    fleet = None if options.protocol.lockstep else _simulate_fleet(options, days, seed)
    full_step_tokens = {i: round(learner.tokens_per_step) for i, learner in run.learners.items()}
    return CoreRun(result, fleet, None if tapes is None else tapes.totals(), full_step_tokens)


def _share_figure(values: list[float]) -> MeanEstimate:
    return estimate_over_seeds(values, lower=0.0, upper=1.0)


def _count_figure(values: list[float]) -> MeanEstimate:
    return estimate_over_seeds(values, lower=0.0)


def _simulate_synchronous(options: SimulateOptions) -> SimulationResult:
    """Simulate a synchronous method with the fleet model. Its contributions per merge and effective H are fixed."""
    tasks: list[Task[GoodputResult]] = [partial(_run_fleet, options, seed) for seed in options.seeds]
    runs = run_tasks("simulating", tasks, options.processes)
    learners = runs[0].learners
    barrier = options.barrier()
    return SimulationResult(
        options=options,
        learners=learners,
        goodput=_share_figure([run.goodput for run in runs]),
        uptime=_share_figure([run.uptime for run in runs]),
        failures=_count_figure([run.failures for run in runs]),
        tokens_trained=_count_figure([run.tokens for run in runs]),
        goodput_days=options.days,
        contributions_per_merge=estimate_over_seeds([float(learners)] * options.seed_count)
        if barrier is not None
        else None,
        effective_h=estimate_over_seeds([float(barrier.every_steps)] * options.seed_count)
        if barrier is not None
        else None,
    )


def _combine_results(
    options: SimulateOptions, detail: SimulationDetail, cores: list[CoreRun], fleets: list[GoodputResult]
) -> SimulationResult:
    results = [core.result for core in cores]
    same_hours = [core.fleet for core in cores if core.fleet is not None]
    fragments = len(detail.protocol.run_config().fragment_ids())

    def figure(read: Callable[[DecoupledResult], float]) -> MeanEstimate:
        return _count_figure([read(result) for result in results])

    reasons = sorted({reason for result in results for reason, _ in result.dropped_by_reason})
    ledger = TokenFigures(
        trained=figure(lambda r: r.tokens_trained),
        merged=figure(lambda r: r.tokens_merged),
        pending=figure(lambda r: r.tokens_pending),
        dropped=figure(lambda r: r.tokens_dropped),
        merged_share=_share_figure([r.tokens_merged / (r.tokens_trained or 1.0) for r in results]),
        pending_share=_share_figure([r.tokens_pending / (r.tokens_trained or 1.0) for r in results]),
        dropped_share=_share_figure([r.tokens_dropped / (r.tokens_trained or 1.0) for r in results]),
        dropped_by_reason={
            reason: figure(lambda r, reason=reason: dict(r.dropped_by_reason).get(reason, 0.0)).mean  # type: ignore[misc]
            for reason in reasons
        },
    )
    core_goodput = _share_figure([result.goodput for result in results])
    if fleets:
        goodput, uptime = _share_figure([run.goodput for run in fleets]), _share_figure([run.uptime for run in fleets])
        failures, tokens = (
            _count_figure([run.failures for run in fleets]),
            _count_figure([run.tokens for run in fleets]),
        )
    else:
        goodput, uptime = core_goodput, _share_figure([result.uptime for result in results])
        failures, tokens = figure(lambda r: r.failures), ledger.trained
    return SimulationResult(
        options=options,
        learners=options.learners,
        goodput=goodput,
        uptime=uptime,
        failures=failures,
        tokens_trained=tokens,
        goodput_days=options.days if fleets else detail.hours / 24.0,
        detail=detail,
        ledger=ledger,
        contributions_per_merge=figure(lambda r: r.contributions_per_merge),
        effective_h=figure(lambda r: r.effective_h),
        staleness_steps=figure(lambda r: r.staleness_steps),
        merges_per_fragment=figure(lambda r: r.merges / fragments),
        suspected=figure(lambda r: r.suspected),
        core_goodput=core_goodput,
        fleet_goodput=_share_figure([run.goodput for run in same_hours]) if same_hours else None,
        tapes=cores[0].tapes,
    )


# --------------------------------------------------------------------------------------------------------------------
# JSON output


def result_fields(outcome: SimulationResult) -> dict[str, object]:
    """Return the fields of the JSON output. Shares are fractions; intervals over one seed are null."""
    options, ledger, detail = outcome.options, outcome.ledger, outcome.detail
    fields: dict[str, object] = {
        "method": options.method,
        "learners": outcome.learners,
        "chips": options.chips,
        "days": options.days,
        "seeds": list(options.seeds),
    }
    for name in ("goodput", "uptime", "failures"):
        fields |= _with_interval(name, getattr(outcome, name))
    parts = {part: getattr(ledger, part, None) for part in ("trained", "merged", "pending", "dropped")}
    parts["trained"] = parts["trained"] or outcome.tokens_trained
    fields["tokens"] = {part: figure and figure.mean for part, figure in parts.items()}
    fields["tokens_ci"] = {part: figure and figure.interval() for part, figure in parts.items()}
    fields["tokens_dropped_by_reason"] = ledger.dropped_by_reason if ledger else None
    fields["tokens_trained_in_goodput_days"] = outcome.tokens_trained.mean
    for name in ("contributions_per_merge", "effective_h", "staleness_steps", "merges_per_fragment", "suspected"):
        fields |= _with_interval(name, getattr(outcome, name))
    published = {"goodput": outcome.published("goodput"), "uptime": outcome.published("uptime")}
    fields["published"] = published if any(value is not None for value in published.values()) else None
    fields["simulated"] = {
        "goodput_days": outcome.goodput_days,
        "goodput_by": "cores" if detail is not None and outcome.goodput is outcome.core_goodput else "fleet",
        "protocol_hours": detail.hours if detail else None,
        "full": detail.is_full if detail else None,
        "fragments": (detail.protocol.sampled_fragments or detail.protocol.fragments) if detail else None,
        "steps_per_event": detail.protocol.steps_per_event if detail else None,
        "core_goodput_in_protocol_hours": outcome.core_goodput.mean if outcome.core_goodput else None,
        "fleet_goodput_in_protocol_hours": outcome.fleet_goodput.mean if outcome.fleet_goodput else None,
        "sentence": describe_method(outcome),
    }
    fields["settings"] = options.settings()
    tapes = outcome.tapes
    fields["tape"] = None if tapes is None else tapes._asdict()
    return fields


def _with_interval(name: str, figure: MeanEstimate | None) -> dict[str, object]:
    return {name: figure.mean if figure else None, f"{name}_ci": figure.interval() if figure else None}


def describe_method(outcome: SimulationResult) -> str:
    """Return sentences about which model simulated which figures, and for how long."""
    options, detail = outcome.options, outcome.detail
    if detail is None:
        return f"The fleet model simulated all figures; the method {options.method} has no cores."
    sentence = detail.description()
    if outcome.goodput is outcome.core_goodput:
        lockstep = (
            "; the fleet model has no lockstep, so goodput is for these hours, too" if not detail.covers_run else ""
        )
        return f"{sentence[0].upper()}{sentence[1:]}{lockstep}."
    hours = format_hours(24.0 * options.days)
    return f"Goodput, uptime and failures are for all {hours}, from the fleet model; {sentence}."


def format_seeds(options: SimulateOptions) -> str:
    return f"seed {options.seed}" if options.seed_count == 1 else f"seeds {options.seeds[0]} to {options.seeds[-1]}"


# --------------------------------------------------------------------------------------------------------------------
# Text output


def run_simulation(options: SimulateOptions) -> Result:
    """Simulate a run, the table, or the comparison of mixed hardware, as the options say."""
    options.check()
    plot = options.plot
    if plot is not None:
        check_plot(plot)
    if options.mixed:
        return compare_mixed(options)
    outcome = None if options.table else simulate_seeds(options)
    cells = (
        simulate_cells(options if options.table else options_for_plot(options))
        if options.table or plot is not None
        else []
    )
    if plot is not None:
        draw_plot(plot, cells, outcome)
    fields = table_fields(options, cells) if outcome is None else result_fields(outcome)

    def text() -> None:
        if outcome is None:
            show_tables(options, cells)
        else:
            show_result(outcome)
        if plot is not None:
            print(f"The figure is in {plot}.")

    return Result({**fields, "plot": None if plot is None else str(plot)}, text)


def format_interval(figure: MeanEstimate, show: Callable[[float], str]) -> str:
    """Return both ends of an interval, with the unit of `format_amount` only once."""
    if figure.low is None or figure.high is None:
        return "one seed"
    low, high = show(figure.low), show(figure.high)
    if low == high:
        return low
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(unit).rstrip() if unit else low} to {high}"


def format_steps(count: float) -> str:
    return f"{count:.2f}"


FigureRow = tuple[str, MeanEstimate | None, Callable[[float], str], str]


def show_result(outcome: SimulationResult) -> None:
    options, detail, ledger = outcome.options, outcome.detail, outcome.ledger
    out = make_console()
    out.print(_result_title(outcome))
    out.print()
    rows: list[FigureRow] = [
        ("goodput: chip time in steps that counted", outcome.goodput, format_percent, " %"),
        ("uptime: time in which a learner steps", outcome.uptime, format_percent, " %"),
        ("failures of chips", outcome.failures, format_amount, ""),
        ("tokens trained", outcome.tokens_trained, format_amount, ""),
    ]
    if detail is not None and ledger is not None:
        if not detail.covers_run:
            out.print(_figure_table(f"all {format_hours(outcome.goodput_days * 24.0)}", rows, options.seed_count > 1))
            out.print()
            rows = [("tokens trained", ledger.trained, format_amount, "")]
        lost = ", ".join(ledger.dropped_by_reason)
        rows += [
            ("  merged", ledger.merged_share, format_percent, " %"),
            ("  pending", ledger.pending_share, format_percent, " %"),
            (f"  dropped{f' ({lost})' if lost else ''}", ledger.dropped_share, format_percent, " %"),
        ]
    rows += [
        (
            f"contributions per merge, of {_format_learners(options, outcome)}",
            outcome.contributions_per_merge,
            format_steps,
            "",
        ),
        ("staleness: steps from copy to adoption", outcome.staleness_steps, format_steps, ""),
        (f"effective H: steps per merge (H = {options.protocol.every_steps})", outcome.effective_h, format_steps, ""),
    ]
    title = "" if detail is None or detail.covers_run else f"the protocol, first {format_hours(detail.hours)}"
    out.print(_figure_table(title, rows, options.seed_count > 1))
    out.print()
    for sentence in _result_sentences(outcome):
        out.print(sentence)


def _figure_table(title: str, rows: list[FigureRow], intervals: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=intervals or title != "")
    table.add_column(title, width=41)
    table.add_column("mean" if intervals else "", justify="right", width=13, no_wrap=True)
    if intervals:
        table.add_column("95 % interval", justify="right", width=22, no_wrap=True)
    for name, figure, show, unit in rows:
        if figure is not None:
            table.add_row(name, show(figure.mean) + unit, *([format_interval(figure, show)] if intervals else []))
    return table


def _result_title(outcome: SimulationResult) -> str:
    options = outcome.options
    learners = "one job" if options.method in SINGLE_JOB_METHODS else f"{outcome.learners} learners"
    if options.extras:
        learners += f" and {sum(extra.count for extra in options.extras)} that join and leave"
    hours = format_hours(options.days * 24.0)
    return f"{options.method}: {learners} on {options.chips:,} chips for {hours}, {format_seeds(options)}"


def _format_learners(options: SimulateOptions, outcome: SimulationResult) -> str:
    return " + ".join(str(count) for count in (outcome.learners, *(extra.count for extra in options.extras)))


def _result_sentences(outcome: SimulationResult) -> list[str]:
    options = outcome.options
    sentences = [describe_method(outcome)]
    detail = outcome.detail
    if detail is not None and not detail.is_full:
        sentences[-1] += " --full simulates all of it."
    if outcome.core_goodput is not None and outcome.fleet_goodput is not None:
        ours, theirs = 100.0 * outcome.core_goodput.mean, 100.0 * outcome.fleet_goodput.mean
        sentences.append(f"For that time goodput is {ours:.2f} % by the cores and {theirs:.2f} % by the fleet model.")
    if outcome.suspected is not None and outcome.suspected.mean > 0.0:
        times = f"{outcome.suspected.mean:.3g} times" + (" per seed" if options.seed_count > 1 else "")
        sentences.append(f"The syncer suspected a silent learner {times}.")
    published = outcome.published("goodput")
    if published is not None:
        uptime = outcome.published("uptime")
        also = "" if uptime is None else f", uptime {100.0 * uptime:.0f} %"
        sentences.append(f"Published for this case: goodput {100.0 * published:.0f} %{also}.")
    tapes = outcome.tapes
    if tapes is not None:
        size = f"{tapes.size_bytes / 1e6:.1f} MB"
        sentences.append(f"{tapes.tapes} tapes with {tapes.entries:,} entries ({size}) are in {tapes.directory}.")
        if tapes.finished:
            sentences.append(f"After that time the run was finished regularly, with {tapes.merges:,} merges in total.")
        if options.protocol.lockstep:
            sentences.append("In lockstep learners wait for each other, which atoll check reports as a violation.")
    return sentences


METRICS: tuple[Metric, ...] = ("goodput", "uptime")


def simulate_cells(
    options: SimulateOptions, rows: Sequence[tuple[Method, int]] = TABLE_ROWS, chips: Sequence[int] = TABLE_CHIPS
) -> list[TableCell]:
    """Simulate every row at every number of chips with the fleet model."""
    if options.seed_count < 2:
        raise ValueError("a table over one seed has no intervals; give --seeds 2 or more")
    # Start with the largest, so that the processes finish at about the same time.
    table = [(row, count) for count in sorted(chips, reverse=True) for row in rows]
    tasks: list[Task[GoodputResult]] = [
        partial(_simulate_cell, options, row, count, seed) for row, count in table for seed in options.seeds
    ]
    results = iter(run_tasks("simulating the table", tasks, options.processes))
    runs = {key: [next(results) for _ in options.seeds] for key in table}
    return [
        TableCell(
            method,
            learners,
            count,
            metric,
            estimate_goodput(100.0 * getattr(run, metric) for run in runs[((method, learners), count)]),
            published_percent(method, learners, count, metric),
        )
        for metric in METRICS
        for method, learners in rows
        for count in chips
    ]


def options_for_plot(options: SimulateOptions) -> SimulateOptions:
    """Return the options of the table in which one run is marked: the same fleet, for the days and seeds of a table."""
    return replace(
        options, requested_days=TABLE_DAYS, requested_seed_count=TABLE_SEEDS, tape=None, speeds=(), extras=()
    )


def _simulate_cell(
    options: SimulateOptions, row: tuple[Method, int], chips: int, seed: int, report: ReportProgress
) -> GoodputResult:
    method, learners = row
    return simulate(options.fleet, method, learners, chips, options.days, seed)


def row_label(method: Method, learners: int) -> str:
    names = {"data-parallel": "one job, not elastic", "elastic": "one job, elastic"}
    return names.get(method, f"M = {learners}")


def chips_label(chips: int) -> str:
    return f"{chips / 1e6:g}M" if chips >= 1_000_000 else f"{chips / 1e3:g}k"


def show_tables(options: SimulateOptions, cells: Sequence[TableCell]) -> None:
    out = make_console()
    for metric in METRICS:
        out.print(_metric_table(metric, [cell for cell in cells if cell.metric == metric]))
        out.print()
    hours = format_hours(24.0 * options.days)
    largest = max((abs(cell.difference) for cell in cells if cell.difference is not None), default=0.0)
    out.print(
        "Published cells have a second line: the published figure, and our figure minus it. The others are predictions."
        f" Largest difference {largest:.1f} points. Each cell: {hours}, {options.seed_count} seeds,"
        " 95 % interval over them."
    )
    out.print(
        "The press figure of 88 % against 27 % compares M = 8 with the non-elastic job at 1.2M chips. The elastic job"
        " has 58 %."
    )


def _metric_table(metric: Metric, cells: Sequence[TableCell]) -> Table:
    chips = sorted({cell.chips for cell in cells})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"{metric}, %", title_justify="left")
    table.add_column("", no_wrap=True)
    for count in chips:
        table.add_column(chips_label(count), justify="right", no_wrap=True)
    for method, learners in dict.fromkeys((cell.method, cell.learners) for cell in cells):
        row = {cell.chips: cell for cell in cells if (cell.method, cell.learners) == (method, learners)}
        table.add_row(row_label(method, learners), *(_cell_text(row[count]) for count in chips))
    return table


def _cell_text(cell: TableCell) -> str:
    ours = f"{cell.simulated.mean:.1f} ±{cell.simulated.high - cell.simulated.mean:.1f}"
    if cell.difference is None:
        return ours
    difference = round(cell.difference, 1) + 0.0  # avoid -0.0
    return f"{ours}\n{cell.published:.0f} {difference:+.1f}"


def table_fields(options: SimulateOptions, cells: Sequence[TableCell]) -> dict[str, object]:
    """Return the fields of the JSON output, in percent. Intervals are over seeds."""
    return {
        "days": options.days,
        "seeds": list(options.seeds),
        "cells": [
            {
                "metric": cell.metric,
                "method": cell.method,
                "learners": cell.learners,
                "chips": cell.chips,
                "percent": cell.simulated.mean,
                "percent_ci": [cell.simulated.low, cell.simulated.high],
                "published_percent": cell.published,
                "difference": cell.difference,
            }
            for cell in cells
        ],
        "settings": options.settings(),
    }


MIXED_SHARES = ("goodput", "goodput_fast", "goodput_slow")
MIXED_MEASURES = ("contributions_per_merge", "effective_h", "staleness_steps")


def compare_mixed(options: SimulateOptions) -> Result:
    """Simulate every row for every seed, and show the rows as columns of one table."""
    tasks: list[Task[MixedResult]] = [
        partial(_run_row, options, row, seed) for row in MIXED_ROWS for seed in options.seeds
    ]
    results = iter(run_tasks("comparing", tasks, options.processes))
    rows = [(row, _average_results([next(results) for _ in options.seeds])) for row in MIXED_ROWS]
    return Result(partial(_mixed_fields, options, rows), partial(_show_mixed, options, rows))


def _run_row(options: SimulateOptions, row: MixedRow, seed: int, report: ReportProgress) -> MixedResult:
    return run_mixed(
        row, options.protocol, options.days * 24.0, seed, step_time_s=options.fleet.step_time_s, on_progress=report
    )


def _average_results(results: list[MixedResult]) -> dict[str, MeanEstimate]:
    figures = {
        name: estimate_over_seeds([getattr(r, name) for r in results], lower=0.0, upper=1.0) for name in MIXED_SHARES
    }
    return figures | {
        name: estimate_over_seeds([getattr(r, name) for r in results], lower=0.0) for name in MIXED_MEASURES
    }


def _mixed_fields(options: SimulateOptions, rows: list[tuple[MixedRow, dict[str, MeanEstimate]]]) -> dict[str, object]:
    return {
        "days": options.days,
        "seeds": list(options.seeds),
        "rows": [
            {
                "quorum": row.quorum,
                "grace": row.grace,
                "lockstep": row.lockstep,
                "published_goodput": row.published_percent / 100.0,
                **{name: figure.mean for name, figure in figures.items()},
                **{f"{name}_ci": figure.interval() for name, figure in figures.items()},
            }
            for row, figures in rows
        ],
        "settings": options.settings(),
    }


def _show_mixed(options: SimulateOptions, rows: list[tuple[MixedRow, dict[str, MeanEstimate]]]) -> None:
    out = make_console()
    out.print(
        "Eight learners, four of each of two generations; the older one is 18 % slower; 10 % jitter, no failures."
    )
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row, _ in rows:
        table.add_column(row.label, justify="right", no_wrap=True)
    table.add_row("learners", *("wait for the round" if row.lockstep else "never wait" for row, _ in rows))
    for name, label in (
        ("goodput", "goodput, all chips, %"),
        ("goodput_fast", "  fast generation, %"),
        ("goodput_slow", "  slow generation, %"),
    ):
        table.add_row(label, *(_figure_text(figures[name].scaled(100.0), 1) for _, figures in rows))
    table.add_row("goodput, published, %", *(f"{row.published_percent:.0f}" for row, _ in rows))
    for name, label in (
        ("contributions_per_merge", "contributions per merge"),
        ("effective_h", "effective H, steps"),
        ("staleness_steps", "staleness, steps"),
    ):
        table.add_row(label, *(_figure_text(figures[name], 2) for _, figures in rows))
    out.print(table)
    out.print()
    out.print(
        "The paper does not define goodput for the published row. Ours is the share of chip time spent in steps; the"
        " fast generation is the one that waits. A decoupled learner never waits, whatever the quorum is. A loss at K ="
        " 8 means that learners waited for the round, so that column is simulated in lockstep."
    )
    out.print(
        f"Every fragment and every step for {format_hours(24.0 * options.days)}, {options.seed_count} seeds,"
        " 95 % interval."
    )


def _figure_text(figure: MeanEstimate, decimals: int) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.{decimals}f}"
    return f"{figure.mean:.{decimals}f} ±{max(figure.high - figure.mean, figure.mean - figure.low):.{decimals}f}"


# Okabe and Ito's colors, which people with color blindness can distinguish. Markers and dashes repeat the distinction.
_STYLES = (
    ("#000000", "s", (0, (1, 1))),
    ("#D55E00", "D", (0, (4, 1.5))),
    ("#56B4E9", "v", "-"),
    ("#009E73", "^", "-"),
    ("#0072B2", "o", "-"),
    ("#CC79A7", "P", "-"),
)
_TITLES: dict[Metric, str] = {
    "goodput": "Goodput: share of chip time in steps that counted",
    "uptime": "Uptime: share of time in which a learner steps",
}


def draw_plot(path: Path, cells: Sequence[TableCell], outcome: SimulationResult | None) -> None:
    """Plot both metrics over the number of chips, with the published points and, if given, the run itself."""
    with draw_figure(path, ncols=2, figsize=(11.0, 5.2), sharex=True, sharey=True) as (figure, panels):
        for metric, panel in zip(METRICS, panels, strict=True):
            _draw_panel(panel, metric, [cell for cell in cells if cell.metric == metric], outcome)
        panels[0].set_ylabel("percent")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0.0, 0.12, 1.0, 1.0))


def _is_near_100(cells: Sequence[TableCell], learners: int) -> bool:
    """Return whether this line is above 99 %. Such lines overlap."""
    return all(cell.simulated.mean > 99.0 for cell in cells if (cell.method, cell.learners) == ("decoupled", learners))


def _draw_panel(panel: Axes, metric: Metric, cells: Sequence[TableCell], outcome: SimulationResult | None) -> None:
    ticks = sorted({cell.chips for cell in cells})
    rows = dict.fromkeys((cell.method, cell.learners) for cell in cells)
    for (method, learners), (colour, marker, dashes) in zip(rows, _STYLES, strict=False):
        row = [cell for cell in cells if (cell.method, cell.learners) == (method, learners)]
        chips = [cell.chips for cell in row]
        label = row_label(method, learners)
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dashes, "label": label}
        panel.plot(chips, [cell.simulated.mean for cell in row], markersize=4.5, linewidth=1.6, **style)
        low, high = [cell.simulated.low for cell in row], [min(cell.simulated.high, 100.0) for cell in row]
        panel.fill_between(chips, low, high, color=colour, alpha=0.2, linewidth=0)
        published = {cell.chips: cell.published for cell in row if cell.published is not None}
        panel.plot(
            list(published),
            list(published.values()),
            linestyle="none",
            marker=marker,
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1.2,
        )
    panel.plot([], [], "o", markersize=11, mfc="none", mec="#555555", label="published, arXiv 2604.21428")
    panel.fill_between([], [], [], color="#555555", alpha=0.2, linewidth=0, label="95 % interval over seeds")
    if outcome is not None:
        share = outcome.goodput if metric == "goodput" else outcome.uptime
        panel.plot(
            [outcome.options.chips], [100.0 * share.mean], "*", color="#E69F00", mec="black", ms=15, label="this run"
        )
    hidden = [str(m) for method, m in rows if method == "decoupled" and _is_near_100(cells, m)]
    if len(hidden) > 1:
        offset: dict[str, Any] = {"xytext": (0, -16), "textcoords": "offset points"}
        panel.annotate(f"M = {', '.join(hidden)}: above 99 %", (ticks[0], 100.0), color="#555555", **offset)
    panel.set_title(_TITLES[metric], fontsize=11, loc="left")
    panel.set_xscale("log")
    panel.set_xticks(ticks, [chips_label(count) for count in ticks])
    panel.minorticks_off()
    panel.set_xlabel("chips")
    panel.set_ylim(0.0, 104.0)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
