"""The verdict: the figures of a run under fault, from its tapes, compared with the expectations of its scenario.

docs/chaos.md explains every field. A test compares that page with these fields.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.chaos.fault_log import read_fault_log
from atoll.chaos.faults import Target
from atoll.chaos.plan import Plan, PlannedFault
from atoll.chaos.scenario import EXPECTABLE_FIGURES, Expectation
from atoll.core.ledger import LedgerLine
from atoll.files import write_text
from atoll.reference.report import read_faults
from atoll.sim.check_tapes import check_tapes
from atoll.sim.checkers import create_checkers
from atoll.tape.bounded_logs import Span
from atoll.tape.files import RunTapes
from atoll.tape.syncer_tenures import mean_ledger_line
from atoll.tape.time_shares import TimeShares
from atoll.tape.timeline import RunTimeline, StateSpan, read_timeline

FORMAT = 1
VERDICT = "verdict.json"


@dataclass(frozen=True, slots=True)
class Criterion:
    """Criterion of the verdict. `passed` is None if it could not be evaluated; `finding` has the reason."""

    name: str
    passed: bool | None
    finding: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """Report of a planned fault and its effects. Times are seconds on the run's clock."""

    number: int
    fault: str
    target: str
    description: str
    planned_s: float
    was_injected: bool
    started_s: float | None
    ended_s: float | None
    method: str
    failure_cause: str
    kill_to_step_s: float | None
    kill_to_merge_s: float | None
    end_to_merge_s: float | None


@dataclass(frozen=True, slots=True)
class WorstPause:
    learner: int
    at_s: float
    gap_s: float
    typical_s: float
    during: tuple[int, ...]  # numbers of the active faults


@dataclass(frozen=True, slots=True)
class Loss:
    final: float | None
    initial: float | None
    baseline: float | None
    source: str  # directory of the baseline


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that was measured in a run under fault."""

    format: int
    scenario: str
    about: str
    seed: int
    duration_s: float
    learners: int
    links: str
    survived: bool
    interrupted: bool
    failed: str | None
    criteria: tuple[Criterion, ...]
    wall_s: float
    goodput: float
    goodput_up: float
    uptime: float
    merge_participation: float | None
    worst_pause: WorstPause | None
    islands: tuple[TimeShares, ...]
    faults: tuple[FaultReport, ...]
    merges: int
    refused_contributions: dict[str, int]
    failed_writes: int
    unplanned_exits: tuple[str, ...]
    ledger: dict[str, Any]
    invariants: dict[str, Any]
    loss: Loss
    timeline: dict[str, Any] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = asdict(self)
        for shares, island in zip(self.islands, fields["islands"], strict=True):
            island["goodput"] = shares.goodput
        return fields

    def save(self, run: Path) -> Path:
        path = run / VERDICT
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        return path


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """End of the run and its loss: the part of the verdict that is not on the tapes."""

    links: str
    interrupted: bool = False
    failed: str | None = None
    loss: Loss = Loss(None, None, None, "")


def evaluate_run(
    run: Path, plan: Plan, expectations: Mapping[str, Expectation], outcome: RunOutcome, epoch_at: float | None
) -> Verdict:
    """Evaluate a run from its tapes.

    `epoch_at` is the start of the tapes' clock in seconds of the Unix epoch, or None if the run did not start.
    """
    has_started = epoch_at is not None
    timeline = read_timeline(run, keep=None, learners=plan.learners) if has_started else RunTimeline()
    evidence = _Evidence(run, plan, timeline, epoch_at or 0.0)
    faults = tuple(map(evidence.report_fault, plan.faults))
    islands = evidence.islands()
    pause = evidence.worst_pause(faults)
    merges = evidence.merges
    shares = [len(m.contributors) / m.alive for m in merges if m.alive]
    invariants = _invariants(run) if has_started else {"entries": 0, "violation": None, "evaluated_until_s": None}
    on_tapes = sum(process.tokens for processes in timeline.processes.values() for process in processes)
    ledger = _ledger(timeline.current_tenure.ledger_lines() if timeline.current_tenure is not None else [], on_tapes)
    unplanned = _unplanned_exits(run, plan)
    refused: Counter[str] = Counter()
    for tenure in timeline.tenures:
        refused.update(tenure.refused_counts)
    up_s = sum(each.up_s for each in islands)
    goodput, uptime = timeline.goodput() or 0.0, timeline.uptime() or 0.0
    goodput_up = sum(each.in_steps_s for each in islands) / up_s if up_s > 0.0 else 0.0
    merge_participation = sum(shares) / len(shares) if shares else None
    figures: dict[str, float | None] = {
        "goodput": goodput,
        "goodput_up": goodput_up,
        "uptime": uptime,
        "merge_participation": merge_participation,
        "worst_pause_s": pause.gap_s if pause is not None else None,
        "kill_to_step_s": _max_recovery(faults, "kill_to_step_s"),
        "kill_to_merge_s": _max_recovery(faults, "kill_to_merge_s"),
        "loss_within": _loss_above(outcome.loss),
    }
    checks = [
        _check_ended(outcome, invariants),
        _check_injected(faults),
        _check_exits(unplanned),
        _check_ledger(ledger),
        _check_invariants(invariants),
        _check_loss_decreased(outcome.loss),
        *(_check_expectation(each, figures, faults, outcome) for each in expectations.values()),
    ]
    return Verdict(
        format=FORMAT,
        scenario=plan.scenario,
        about=plan.about,
        seed=plan.seed,
        duration_s=plan.duration_s,
        learners=plan.learners,
        links=outcome.links,
        survived=not any(check.passed is False for check in checks),
        interrupted=outcome.interrupted,
        failed=outcome.failed,
        criteria=tuple(checks),
        wall_s=timeline.wall_s(),
        goodput=goodput,
        goodput_up=goodput_up,
        uptime=uptime,
        merge_participation=merge_participation,
        worst_pause=pause,
        islands=islands,
        faults=faults,
        merges=len(merges),
        refused_contributions=dict(refused),
        failed_writes=sum(tenure.failed_writes for tenure in timeline.tenures),
        unplanned_exits=tuple(unplanned),
        ledger=ledger,
        invariants=invariants,
        loss=outcome.loss,
        timeline=evidence.page_timeline(),
    )


class _Evidence:
    """The faults of a run on the clock of its tapes, and their effects on the tapes."""

    def __init__(self, run: Path, plan: Plan, timeline: RunTimeline, epoch_at: float) -> None:
        plan_started_at, self._records = read_fault_log(run)
        self._epoch_at = epoch_at
        self._plan_started_s = plan_started_at - epoch_at if plan_started_at is not None else None
        self._plan, self._timeline = plan, timeline
        self.merges = sorted(timeline.merges(), key=lambda merge: merge.at)
        since = timeline.training_started_at or 0.0
        self._span = since, max(since, timeline.ended_at)

    def report_fault(self, planned: PlannedFault) -> FaultReport:
        record = self._records.get(planned.number)
        started_s = self._on_tape(record.started_at) if record is not None else None
        ended_s = self._on_tape(record.ended_at) if record is not None else None
        step_s, merge_s = self._recovery_times(planned, started_s) if started_s is not None else (None, None)
        return FaultReport(
            number=planned.number,
            fault=planned.fault,
            target=str(planned.target),
            description=planned.describe(),
            planned_s=planned.at_s if self._plan_started_s is None else self._plan_started_s + planned.at_s,
            was_injected=record is not None and record.was_injected,
            started_s=started_s,
            ended_s=ended_s,
            method=record.method if record is not None else "",
            failure_cause=record.failure_cause if record is not None else "the run ended before this fault was due",
            kill_to_step_s=step_s,
            kill_to_merge_s=merge_s,
            end_to_merge_s=self._end_to_merge_s(planned, ended_s) if ended_s is not None else None,
        )

    def _on_tape(self, at: float | None) -> float | None:
        return at - self._epoch_at if at is not None else None

    def _next_merge(self, target: Target, after: float, number: int = 0) -> float | None:
        """Return the time of the first merge after `after`.

        For a shard, only merges of its fragments count. If `number` is given, only merges with that learner count.
        """
        for merge in self.merges:
            if merge.at <= after:
                continue
            if target.kind == "shard":
                found = merge.fragment is not None and merge.fragment % self._plan.shards == target.number
            else:
                found = not number or any(learner == number for learner, _ in merge.contributors)
            if found:
                return merge.at
        return None

    def _recovery_times(self, planned: PlannedFault, started_s: float) -> tuple[float | None, float | None]:
        """Return the seconds from a kill to the next step of its target, and to its next merge."""
        if planned.fault != "kill":
            return None, None
        target, step_at, merge_at = planned.target, None, None
        if target.kind == "learner":
            processes = self._timeline.processes.get(target.number, ())
            successor = next(
                (p for p in processes if p.training_started_at is not None and p.first_entry_at > started_s), None
            )
            if successor is not None and successor.steps:
                step_at = successor.log.ends[0]
                contributor = target.number, successor.incarnation
                merge_at = next((merge.at for merge in self.merges if contributor in merge.contributors), None)
        elif target.kind == "shard":
            merge_at = self._next_merge(target, started_s + planned.duration_s)
        else:
            merge_at = next((merge.at for merge in self.merges if merge.at > started_s and merge.epoch > 1), None)
            restarts = [
                each.first_entry_at
                for each in self._timeline.tenures
                if each.first_entry_at is not None and each.first_entry_at > started_s
            ]
            merge_at = merge_at if merge_at is not None and restarts and merge_at >= restarts[0] else None
        step_s = step_at - started_s if step_at is not None else None
        return step_s, merge_at - started_s if merge_at is not None else None

    def _end_to_merge_s(self, planned: PlannedFault, ended_s: float) -> float | None:
        """Return the seconds from the end of a fault to the next merge by its target, or with it if a learner."""
        if planned.fault == "kill" or not planned.duration_s:
            return None
        merge_at = self._next_merge(planned.target, ended_s, planned.target.number)
        return merge_at - ended_s if merge_at is not None else None

    def _learners(self) -> list[int]:
        return sorted({*range(1, self._plan.learners + 1), *self._timeline.processes})

    def _stops(self, learner: int) -> list[Span]:
        """Return the times in which SIGSTOP had stopped the learner's process."""
        spans = []
        for planned in self._plan.faults:
            record = self._records.get(planned.number)
            if planned.fault != "stop" or planned.target != Target("learner", learner) or record is None:
                continue
            started_s, ended_s = self._on_tape(record.started_at), self._on_tape(record.ended_at)
            if started_s is not None:
                spans.append((started_s, max(started_s, ended_s if ended_s is not None else self._span[1])))
        return spans

    def islands(self) -> tuple[TimeShares, ...]:
        shares = [self._timeline.time_shares(learner, stops=self._stops(learner)) for learner in self._learners()]
        return tuple(each for each in shares if each is not None)

    def worst_pause(self, faults: Sequence[FaultReport]) -> WorstPause | None:
        gap = self._timeline.longest_gap({learner: self._stops(learner) for learner in self._timeline.processes})
        if gap is None:
            return None
        during = tuple(
            fault.number
            for fault in faults
            if fault.started_s is not None
            and fault.started_s <= gap.at + gap.gap_s
            and (fault.ended_s if fault.ended_s is not None else fault.started_s) >= gap.at
        )
        return WorstPause(*gap, during)

    def page_timeline(self) -> dict[str, Any]:
        started_s, ended_s = self._span
        bands = []
        for learner in self._learners():
            begin = (self._timeline.allocated_span(learner) or self._span)[0]
            states = self._timeline.state_spans(learner, begin, ended_s, self._stops(learner))
            first = states[0].begin if states else ended_s
            if begin < first:
                states.insert(0, StateSpan(begin, first, "gone"))
            bands.append({"learner": learner, "states": [list(state) for state in states]})
        return {
            "started_s": started_s,
            "ended_s": ended_s,
            "bands": bands,
            "syncers": [
                [each.first_entry_at, each.last_entry_at]
                for each in self._timeline.tenures
                if each.first_entry_at is not None
            ],
            "rounds": [[m.at, m.alive, m.pulled, len(m.contributors)] for m in self.merges],
        }


# --------------------------------------------------------------------------------------------------------------------
# Figures


def _max_recovery(faults: Sequence[FaultReport], name: str) -> float | None:
    return max((getattr(fault, name) for fault in faults if getattr(fault, name) is not None), default=None)


def _ledger(lines: Sequence[LedgerLine], on_tapes: int) -> dict[str, Any]:
    """Return the syncer's ledger with the token count of the learners' tapes."""
    mean = mean_ledger_line(lines)
    return {
        "balanced": all(line.is_balanced() for line in lines) and mean.trained <= on_tapes,
        "trained": mean.trained,
        "merged": mean.merged,
        "pending": mean.pending,
        "dropped": dict(sorted(mean.dropped.items())),
        "on_learners_tapes": on_tapes,
        "unreported": on_tapes - mean.trained,  # steps of processes that exited before they reported them
    }


def _invariants(run: Path) -> dict[str, Any]:
    tapes = RunTapes(run)
    checkers = create_checkers(tapes.config)
    found = check_tapes(tapes, checkers)
    return {
        "checkers": len(checkers),
        "tapes": len(tapes.readers),
        "entries": found.entries,
        "finished": found.finished,
        "violation": None if found.violation is None else str(found.violation),
        "evaluated_until_s": None if found.stopped_at is None else found.stopped_at.at,
        "incomplete": found.gaps,
    }


def _unplanned_exits(run: Path, plan: Plan) -> list[str]:
    """Return the exits of processes that no fault explains. A poisoned learner exits when it is quarantined."""
    poisoned = {f"learner {f.target.number}" for f in plan.faults if f.target.kind == "payload"}
    return [
        f"{fault['who']} ended by {fault['what']}"
        for fault in read_faults(run)
        if not fault["planned"] and fault["who"] not in poisoned
    ]


def _loss_above(loss: Loss) -> float | None:
    return None if loss.final is None or loss.baseline is None else loss.final / loss.baseline - 1.0


# --------------------------------------------------------------------------------------------------------------------
# Criteria


def _check_ended(outcome: RunOutcome, invariants: Mapping[str, Any]) -> Criterion:
    if outcome.interrupted:
        return Criterion("ended", False, "the run was interrupted")
    if outcome.failed is not None:
        return Criterion("ended", False, f"the run failed: {outcome.failed}")
    if not invariants.get("finished"):
        return Criterion("ended", False, "the syncer has not finished the run")
    return Criterion("ended", True, "the run ended, and every connected learner has the final model")


def _check_injected(faults: Sequence[FaultReport]) -> Criterion:
    missed = [fault for fault in faults if not fault.was_injected]
    if missed:
        first = missed[0]
        finding = f"{len(missed)} of {len(faults)} faults did not happen; the first is {first.number}"
        return Criterion("faults", False, f"{finding}, {first.description}: {first.failure_cause}")
    if not faults:
        return Criterion("faults", False, "the plan has no fault; use a longer duration or another seed")
    return Criterion("faults", True, f"all {len(faults)} faults happened" if len(faults) > 1 else "the fault happened")


def _check_exits(exits: Sequence[str]) -> Criterion:
    if exits:
        return Criterion("unplanned ends", False, f"{len(exits)} processes exited unplanned; the first: {exits[0]}")
    return Criterion("unplanned ends", True, "no process exited unplanned")


def _check_ledger(ledger: Mapping[str, Any]) -> Criterion:
    dropped = sum(ledger["dropped"].values())
    sums = (
        f"trained {ledger['trained']:,} = merged {ledger['merged']:,} + pending {ledger['pending']:,}"
        f" + dropped {dropped:,} tokens"
    )
    if ledger["trained"] > ledger["on_learners_tapes"]:
        excess = ledger["trained"] - ledger["on_learners_tapes"]
        return Criterion("ledger", False, f"the syncer counts {excess:,} tokens that are on no learner's tape")
    if not ledger["balanced"]:
        return Criterion("ledger", False, f"the token ledger does not balance: {sums}")
    return Criterion("ledger", True, sums)


def _check_invariants(invariants: Mapping[str, Any]) -> Criterion:
    if invariants["violation"] is not None:
        return Criterion("invariants", False, str(invariants["violation"]))
    if not invariants["entries"]:
        return Criterion("invariants", None, "there are no tapes")
    if invariants["evaluated_until_s"] is not None:
        gap = (invariants["incomplete"] or ["a tape is incomplete"])[0]
        return Criterion("invariants", False, f"evaluated only up to {invariants['evaluated_until_s']:.1f} s: {gap}")
    finding = f"{invariants['checkers']} checkers over {invariants['entries']:,} entries: no violation"
    return Criterion("invariants", True, finding)


def _check_loss_decreased(loss: Loss) -> Criterion:
    if loss.final is None or loss.initial is None:
        return Criterion("learned", None, "there is no final model to evaluate")
    finding = f"the loss on held-out text fell from {loss.initial:.3f} to {loss.final:.3f}"
    if loss.final < loss.initial:
        return Criterion("learned", True, finding)
    return Criterion(
        "learned", False, f"the model is worse than at the start: loss {loss.final:.3f} after {loss.initial:.3f}"
    )


def _check_expectation(
    expectation: Expectation, figures: Mapping[str, float | None], faults: Sequence[FaultReport], outcome: RunOutcome
) -> Criterion:
    value, (side, name) = figures[expectation.figure], EXPECTABLE_FIGURES[expectation.figure]
    if expectation.figure.startswith("kill_to_"):
        pending = [f for f in faults if f.fault == "kill" and f.was_injected and getattr(f, expectation.figure) is None]
        pending = [f for f in pending if f.target.startswith("learner") or expectation.figure == "kill_to_merge_s"]
        if pending:
            return Criterion(
                name, False, f"after fault {pending[0].number} ({pending[0].description}): never", expectation.reason
            )
    if value is None:
        finding = "no value: nothing of this kind happened"
        if expectation.figure == "loss_within":
            has_loss = outcome.loss.final is not None
            finding = "no loss without faults to compare with; use --baseline" if has_loss else "no loss"
        return Criterion(name, None, finding, expectation.reason)
    passed = value >= expectation.bound if side == "at_least" else value <= expectation.bound
    return Criterion(name, passed, _describe_bound(expectation, value, outcome), expectation.reason)


def _describe_bound(expectation: Expectation, value: float, outcome: RunOutcome) -> str:
    side = "at least" if EXPECTABLE_FIGURES[expectation.figure][0] == "at_least" else "at most"
    if expectation.figure.endswith("_s"):
        return f"{value:.2f} s, {side} {expectation.bound:g} s"
    if expectation.figure == "loss_within":
        loss = outcome.loss
        return (
            f"{loss.final:.3f} against {loss.baseline:.3f} without faults: {100.0 * value:+.2f} %,"
            f" {side} +{100.0 * expectation.bound:g} %"
        )
    return f"{100.0 * value:.1f} %, {side} {100.0 * expectation.bound:g} %"
