"""One simulated run over seeds: the work, its figures, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from atoll.cli.processes import Task, Tell, run_all
from atoll.cli.simulate_tape import TapesWritten, check_directory, tapes_of
from atoll.cli.simulate_wish import ONE_JOB, Wish
from atoll.sim.decoupled import (
    MOST_EVENTS,
    MOST_TAPE_EVENTS,
    DecoupledResult,
    DecoupledRun,
    Detail,
    choose_detail,
    span,
)
from atoll.sim.fleet import FleetConfig
from atoll.sim.goodput import Figure, GoodputResult, over_seeds, simulate
from atoll.sim.published import Metric, published_percent
from atoll.tape.files import Simulated


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
