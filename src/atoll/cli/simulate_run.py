"""A simulation: its options, the work over seeds and processes, its figures and its tapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atoll.cli.output import Task, Tell, run_all, usable_cores
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, RunConfig
from atoll.sim.decoupled import (
    MOST_EVENTS,
    MOST_TAPE_EVENTS,
    DecoupledConfig,
    DecoupledResult,
    DecoupledRun,
    Detail,
    choose_detail,
    span,
)
from atoll.sim.fleet import ExtraLearners, FleetConfig, build_islands, parse_speed_classes
from atoll.sim.goodput import BarrierConfig, Figure, GoodputResult, over_seeds, simulate
from atoll.sim.published import Method, Metric, published_percent
from atoll.tape.files import SIMULATED_NOTE, Simulated, TapeWriter, new_header, tape_path
from atoll.tape.format import Actor, Entry

ONE_JOB = ("data-parallel", "elastic")


@dataclass(frozen=True, slots=True)
class Wish:
    """One call of the command. Raises `ValueError` with the fix where it cannot be done."""

    method: Method
    learners: int
    chips: int
    days: float
    seed: int
    count: int  # of seeds
    jobs: int | None
    fleet: FleetConfig
    protocol: DecoupledConfig
    barrier: BarrierConfig | None = None
    speeds: tuple[float, ...] = ()
    extras: tuple[ExtraLearners, ...] = ()
    full: bool = False
    protocol_hours: float | None = None
    tape: Path | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.days < math.inf:
            raise ValueError(f"days is {self.days:g}; give a number above 0")
        if self.count < 1:
            raise ValueError(f"{self.count} seeds say nothing; give at least 1, and 2 for an interval")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"{self.jobs} jobs do nothing; give at least 1")
        if self.tape is not None and self.count != 1:
            raise ValueError(f"a tape is of one run, and {self.count} seeds are {self.count} runs; give --seeds 1")
        build_islands(self.fleet, self.learners, self.chips, 0, speeds=self.speeds, extras=self.extras)
        if self.method == "decoupled":
            self.protocol.run_config()
            if self.protocol.quorum > self.learners:
                raise ValueError(
                    f"quorum {self.protocol.quorum} with {self.learners} learners never merges;"
                    f" give at most {self.learners}"
                )

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.count))

    @property
    def processes(self) -> int:
        return self.jobs or usable_cores()

    def learner_steps_per_s(self) -> float:
        """Steps that all learners take together in a second without trouble."""
        speeds = sum(self.speeds) if self.speeds else float(self.learners)
        horizon_s = self.days * 86_400.0
        for extra in self.extras:
            present_s = sum(max(0.0, min(leave, horizon_s) - join) for join, leave in extra.windows)
            speeds += extra.count * extra.speed * present_s / horizon_s
        return speeds / self.fleet.step_time_s

    def settings(self) -> dict[str, object]:
        """Everything that shaped the result, for the JSON."""
        fleet, protocol = self.fleet, self.protocol
        fields: dict[str, object] = {
            "step_time_s": fleet.step_time_s,
            "mtbi_days": _finite(fleet.mtbi_s / 86_400.0),
            "slice_chips": fleet.slice_chips,
            "repair_mean_s": fleet.repair.mean_s,
            "downscale_s": fleet.downscale_s,
            "upscale_s": fleet.upscale_s,
            "upscale_delay_s": fleet.upscale_delay_s,
            "restart_s": fleet.restart_s,
            "tokens_per_chip_step": fleet.tokens_per_chip_step,
            "chip_variance": fleet.chip_time_sigma,
            "slow_downs_per_hour": fleet.slowdowns_per_hour,
            "slow_down_factor": fleet.slowdown_factor if fleet.slowdowns_per_hour else None,
            "slow_down_mean_s": fleet.slowdown_mean_s if fleet.slowdowns_per_hour else None,
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
            fields |= {
                "quorum": protocol.quorum,
                "grace": protocol.grace_margin,
                "every_steps": protocol.every_steps,
                "fragments": protocol.fragments,
                "tau_steps": protocol.overlap_steps,
                "adopt": protocol.adopt,
                "delay_s": protocol.delay_s,
                "fragment_time_s": protocol.fragment_s,
                "merge_s": protocol.merge_s,
                "disk_s": protocol.disk_s,
                "jitter": protocol.jitter,
                "lockstep": protocol.lockstep,
            }
        elif self.barrier is not None:
            fields |= {
                "every_steps": self.barrier.h_steps,
                "fragments": self.barrier.fragments if self.method == "streaming" else 1,
                "tau_steps": self.barrier.tau_steps if self.method == "streaming" else 0,
                "exchange_time_s": self.barrier.comm_s,
            }
        return fields


def _finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def read_speeds(text: str | None) -> tuple[float, ...]:
    return () if text is None else parse_speed_classes(text)


def read_extras(texts: Sequence[str] | None) -> tuple[ExtraLearners, ...]:
    return tuple(ExtraLearners.parse(text) for text in texts or ())


class SlowDowns(NamedTuple):
    """As `FleetConfig` has them."""

    per_hour: float = 0.0
    factor: float = 0.5
    mean_s: float = 60.0


def read_slow_downs(text: str | None) -> SlowDowns:
    """
    >>> read_slow_downs("0.5:0.6:120")
    SlowDowns(per_hour=0.5, factor=0.6, mean_s=120.0)
    """
    if text is None:
        return SlowDowns()
    try:
        rate, factor, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"slow-downs {text!r} are not readable; write RATE:FACTOR:SECONDS, as 0.5:0.6:120") from None
    return SlowDowns(rate, factor, seconds)


class TapesWritten(NamedTuple):
    """What is in the directory of the run now."""

    directory: str
    tapes: int
    entries: int
    size_bytes: int
    finished: bool  # the run came to its orderly end after the simulated time
    merges: int  # up to that end


class Tapes:
    """One open tape per process that is running."""

    def __init__(self, directory: Path, config: RunConfig, seed: int, note: str = SIMULATED_NOTE) -> None:
        self._directory = directory
        self._config = config
        self._seed = seed
        self._note = note
        self._writers: dict[Actor, TapeWriter] = {}
        self.finished = False
        self.merges = 0

    def start(self, actor: Actor, restored: Restored | None) -> None:
        before = self._writers.get(Actor(actor.learner, actor.start - 1))
        if before is not None and actor.learner != SYNCER:
            before.close()  # an incarnation ends before the next one starts; a syncer that was cut off may live on
        header = new_header(actor, self._config, self._seed, restored, self._note)
        self._writers[actor] = TapeWriter(tape_path(self._directory, actor), header)

    def write(self, entry: Entry) -> None:
        self._writers[entry.actor].write(entry)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def written(self) -> TapesWritten:
        writers = self._writers.values()
        return TapesWritten(
            str(self._directory),
            len(writers),
            sum(writer.tick for writer in writers),
            sum(writer.path.stat().st_size for writer in writers),
            self.finished,
            self.merges,
        )


@contextmanager
def tapes_of(directory: Path | None, config: RunConfig, seed: int) -> Iterator[Tapes | None]:
    """The tapes to write, if any; all of them are closed at the end."""
    if directory is None:
        yield None
        return
    tapes = Tapes(directory, config, seed)
    try:
        yield tapes
    finally:
        tapes.close()


def check_directory(directory: Path) -> None:
    """A tape is never overwritten, so its directory is new or empty."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give --tape a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty, and a tape is never overwritten; remove it or choose another")


class CoreRun(NamedTuple):
    """The cores on one seed, and what the fleet model says of the same hours (it has no lockstep)."""

    result: DecoupledResult
    fleet: GoodputResult | None
    tapes: TapesWritten | None
    full_step_tokens: dict[int, int]  # by learner


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the tokens went in the hours that the cores ran; trained = merged + pending + dropped."""

    trained: Figure
    merged: Figure
    pending: Figure
    dropped: Figure
    merged_share: Figure  # of trained
    pending_share: Figure
    dropped_share: Figure
    dropped_by_reason: dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures over seeds. Those that have no meaning for the method are None."""

    wish: Wish
    learners: int
    goodput: Figure
    uptime: Figure
    failures: Figure
    tokens_trained: Figure  # in the days that goodput covers
    goodput_days: float  # that goodput and uptime cover: all, except where only the cores can tell
    detail: Detail | None = None
    ledger: Ledger | None = None
    contributions_per_merge: Figure | None = None
    effective_h: Figure | None = None
    staleness_steps: Figure | None = None
    merges_per_fragment: Figure | None = None
    suspected: Figure | None = None
    core_goodput: Figure | None = None  # of the hours that the cores ran
    fleet_goodput: Figure | None = None  # of the same hours
    tapes: TapesWritten | None = None

    def published(self, metric: Metric) -> float | None:
        """The published figure as a fraction, if this is the published case."""
        wish = self.wish
        if wish.fleet != FleetConfig() or wish.speeds or wish.extras or wish.protocol.lockstep:
            return None
        percent = published_percent(wish.method, self.learners, wish.chips, metric)
        return None if percent is None else percent / 100.0


def simulate_run(wish: Wish) -> Outcome:
    """All seeds of one run, on as many processes as the user allows."""
    if wish.method != "decoupled":
        return _without_cores(wish)
    if wish.tape is not None:
        check_directory(wish.tape)
    detail = choose_detail(
        wish.protocol,
        wish.days,
        wish.learner_steps_per_s(),
        full=wish.full,
        hours=wish.protocol_hours,
        most_events=MOST_EVENTS if wish.tape is None else MOST_TAPE_EVENTS,
    )
    by_cores = detail.whole or wish.protocol.lockstep
    tasks: list[Task[CoreRun | GoodputResult]] = [partial(_run_cores, wish, detail, seed) for seed in wish.seeds]
    weights = [10.0] * wish.count
    if not by_cores:
        tasks += [partial(_run_fleet, wish, seed) for seed in wish.seeds]
        weights += [1.0] * wish.count
    results = run_all("simulating", tasks, wish.processes, weights)
    cores = [result for result in results if isinstance(result, CoreRun)]
    fleets = [result for result in results if isinstance(result, GoodputResult)]
    outcome = _outcome(wish, detail, cores, fleets)
    if wish.tape is not None:
        Simulated(cores[0].full_step_tokens, outcome_fields(outcome)).save(wish.tape)
    return outcome


def _run_fleet(wish: Wish, seed: int, tell: Tell) -> GoodputResult:
    return _fleet(wish, wish.days, seed)


def _fleet(wish: Wish, days: float, seed: int) -> GoodputResult:
    return simulate(
        wish.fleet,
        wish.method,
        wish.learners,
        wish.chips,
        days,
        seed,
        speeds=wish.speeds,
        extras=wish.extras,
        barrier=wish.barrier,
    )


def _run_cores(wish: Wish, detail: Detail, seed: int, tell: Tell) -> CoreRun:
    days = detail.hours / 24.0
    with tapes_of(wish.tape, detail.protocol.run_config(), seed) as tapes:
        run = DecoupledRun(
            wish.fleet,
            detail.protocol,
            wish.learners,
            wish.chips,
            days,
            seed,
            speeds=wish.speeds,
            extras=wish.extras,
            on_entry=None if tapes is None else tapes.write,
            on_start=None if tapes is None else tapes.start,
        )
        result = run.run(tell)
        if tapes is not None:
            tapes.finished = run.finish()
            tapes.merges = run.syncer.state.merges
    fleet = None if wish.protocol.lockstep else _fleet(wish, days, seed)
    full_step_tokens = {i: round(learner.tokens_per_step) for i, learner in run.learners.items()}
    return CoreRun(result, fleet, None if tapes is None else tapes.written(), full_step_tokens)


def _shares(values: list[float]) -> Figure:
    return over_seeds(values, least=0.0, most=1.0)


def _counts(values: list[float]) -> Figure:
    return over_seeds(values, least=0.0)


def _without_cores(wish: Wish) -> Outcome:
    """Synchronous methods by the fleet model: what they merge, and how often, holds by construction."""
    tasks: list[Task[GoodputResult]] = [partial(_run_fleet, wish, seed) for seed in wish.seeds]
    runs = run_all("simulating", tasks, wish.processes)
    learners = runs[0].learners
    exact = wish.barrier is not None
    return Outcome(
        wish=wish,
        learners=learners,
        goodput=_shares([run.goodput for run in runs]),
        uptime=_shares([run.uptime for run in runs]),
        failures=_counts([run.failures for run in runs]),
        tokens_trained=_counts([run.tokens for run in runs]),
        goodput_days=wish.days,
        contributions_per_merge=over_seeds([float(learners)] * wish.count) if exact else None,
        effective_h=over_seeds([float(wish.barrier.h_steps)] * wish.count) if wish.barrier is not None else None,
    )


def _outcome(wish: Wish, detail: Detail, cores: list[CoreRun], fleets: list[GoodputResult]) -> Outcome:
    results = [core.result for core in cores]
    same_hours = [core.fleet for core in cores if core.fleet is not None]
    fragments = len(detail.protocol.run_config().fragment_ids())

    def figure(read: Callable[[DecoupledResult], float]) -> Figure:
        return _counts([read(result) for result in results])

    reasons = sorted({why for result in results for why, _ in result.dropped_by_reason})
    ledger = Ledger(
        trained=figure(lambda r: r.tokens_trained),
        merged=figure(lambda r: r.tokens_merged),
        pending=figure(lambda r: r.tokens_pending),
        dropped=figure(lambda r: r.tokens_dropped),
        merged_share=_shares([r.tokens_merged / (r.tokens_trained or 1.0) for r in results]),
        pending_share=_shares([r.tokens_pending / (r.tokens_trained or 1.0) for r in results]),
        dropped_share=_shares([r.tokens_dropped / (r.tokens_trained or 1.0) for r in results]),
        dropped_by_reason={
            why: figure(lambda r, why=why: dict(r.dropped_by_reason).get(why, 0.0)).mean  # type: ignore[misc]
            for why in reasons
        },
    )
    core_goodput = _shares([result.goodput for result in results])
    if fleets:
        goodput, uptime = _shares([run.goodput for run in fleets]), _shares([run.uptime for run in fleets])
        failures, tokens = _counts([run.failures for run in fleets]), _counts([run.tokens for run in fleets])
    else:
        goodput, uptime = core_goodput, _shares([result.uptime for result in results])
        failures, tokens = figure(lambda r: r.failures), ledger.trained
    return Outcome(
        wish=wish,
        learners=wish.learners,
        goodput=goodput,
        uptime=uptime,
        failures=failures,
        tokens_trained=tokens,
        goodput_days=wish.days if fleets else detail.hours / 24.0,
        detail=detail,
        ledger=ledger,
        contributions_per_merge=figure(lambda r: r.contributions_per_merge),
        effective_h=figure(lambda r: r.effective_h),
        staleness_steps=figure(lambda r: r.staleness_steps),
        merges_per_fragment=figure(lambda r: r.merges / fragments),
        suspected=figure(lambda r: r.suspected),
        core_goodput=core_goodput,
        fleet_goodput=_shares([run.goodput for run in same_hours]) if same_hours else None,
        tapes=cores[0].tapes,
    )


# --------------------------------------------------------------------------------------------------------------------
# For scripts


def outcome_fields(outcome: Outcome) -> dict[str, object]:
    """The JSON object. Shares are fractions; an interval is null over one seed."""
    wish, ledger, detail = outcome.wish, outcome.ledger, outcome.detail
    fields: dict[str, object] = {
        "method": wish.method,
        "learners": outcome.learners,
        "chips": wish.chips,
        "days": wish.days,
        "seeds": list(wish.seeds),
    }
    for name in ("goodput", "uptime", "failures"):
        fields |= _with_interval(name, getattr(outcome, name))
    fields["tokens"] = {
        "trained": ledger.trained.mean if ledger else outcome.tokens_trained.mean,
        "merged": ledger.merged.mean if ledger else None,
        "pending": ledger.pending.mean if ledger else None,
        "dropped": ledger.dropped.mean if ledger else None,
    }
    fields["tokens_ci"] = {
        "trained": (ledger.trained if ledger else outcome.tokens_trained).interval(),
        "merged": ledger.merged.interval() if ledger else None,
        "pending": ledger.pending.interval() if ledger else None,
        "dropped": ledger.dropped.interval() if ledger else None,
    }
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
        "full": detail.full if detail else None,
        "fragments": (detail.protocol.sampled_fragments or detail.protocol.fragments) if detail else None,
        "steps_per_event": detail.protocol.steps_per_event if detail else None,
        "core_goodput_in_protocol_hours": outcome.core_goodput.mean if outcome.core_goodput else None,
        "fleet_goodput_in_protocol_hours": outcome.fleet_goodput.mean if outcome.fleet_goodput else None,
        "sentence": how_sentence(outcome),
    }
    fields["settings"] = wish.settings()
    tapes = outcome.tapes
    fields["tape"] = None if tapes is None else tapes._asdict()
    return fields


def _with_interval(name: str, figure: Figure | None) -> dict[str, object]:
    return {name: figure.mean if figure else None, f"{name}_ci": figure.interval() if figure else None}


def how_sentence(outcome: Outcome) -> str:
    """What was simulated how, and for how long."""
    wish, detail = outcome.wish, outcome.detail
    if detail is None:
        return f"The fleet model ran all of it; {wish.method} has no cores of its own."
    said = detail.sentence()
    if outcome.goodput is outcome.core_goodput:
        lockstep = "; the fleet model knows no lockstep, so goodput is of these hours too" if not detail.whole else ""
        return f"{said[0].upper()}{said[1:]}{lockstep}."
    return f"Goodput, uptime and failures are of all {span(24.0 * wish.days)}, by the fleet model; {said}."


def seeds_sentence(wish: Wish) -> str:
    return f"seed {wish.seed}" if wish.count == 1 else f"seeds {wish.seeds[0]} to {wish.seeds[-1]}"


def is_one_job(wish: Wish) -> bool:
    return wish.method in ONE_JOB
