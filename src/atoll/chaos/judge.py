"""The verdict: what the tapes say about a run under fault, held against what its scenario expects.

docs/chaos.md says what every field means; a test keeps that page and these fields equal.
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
from atoll.chaos.plan import Plan, Planned
from atoll.chaos.scenario import EXPECTABLE, Expectation
from atoll.core.ledger import Line
from atoll.files import write_text
from atoll.reference.report import read_faults
from atoll.sim.check_tapes import check_tapes
from atoll.sim.checkers import all_checkers
from atoll.tape.bounded_logs import Span
from atoll.tape.files import RunTapes
from atoll.tape.syncer_tenures import mean_line
from atoll.tape.time_shares import TimeShares
from atoll.tape.timeline import Band, RunTimeline, read_timeline

FORMAT = 1
VERDICT = "verdict.json"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict. `passed` None: it could not be judged, and `sentence` says why."""

    name: str
    passed: bool | None
    sentence: str
    because: str = ""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """One planned fault: what was planned and what became of it. Times are seconds on the run's clock."""

    number: int
    fault: str
    target: str
    sentence: str
    planned_s: float
    fired: bool
    began_s: float | None
    ended_s: float | None
    how: str
    why_not: str
    back_training_s: float | None
    back_merged_s: float | None
    healed_merged_s: float | None


@dataclass(frozen=True, slots=True)
class Worst:
    learner: int
    at_s: float
    gap_s: float
    usual_s: float
    during: tuple[int, ...]  # numbers of the faults that were going on


@dataclass(frozen=True, slots=True)
class Loss:
    final: float | None
    before: float | None
    without_faults: float | None
    source: str  # where the loss without faults is from


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that is known of a run under fault."""

    format: int
    scenario: str
    about: str
    seed: int
    duration_s: float
    learners: int
    links: str
    passed: bool
    interrupted: bool
    failed: str | None
    checks: tuple[Check, ...]
    wall_s: float
    goodput: float
    goodput_up: float
    uptime: float
    merged_of_alive: float | None
    worst_pause: Worst | None
    islands: tuple[TimeShares, ...]
    faults: tuple[FaultReport, ...]
    merges: int
    refused_contributions: dict[str, int]
    failed_writes: int
    unplanned_ends: tuple[str, ...]
    ledger: dict[str, Any]
    invariants: dict[str, Any]
    loss: Loss
    timeline: dict[str, Any] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = asdict(self)
        for shares, island in zip(self.islands, told["islands"], strict=True):
            island["goodput"] = shares.goodput
        return told

    def save(self, run: Path) -> Path:
        path = run / VERDICT
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        return path


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run came to its end, as the tool knows it."""

    links: str
    interrupted: bool = False
    failed: str | None = None
    loss: Loss = Loss(None, None, None, "")


def judge(
    run: Path, plan: Plan, expect: Mapping[str, Expectation], ending: Ending, founded_at: float | None
) -> Verdict:
    """`founded_at`: when the clock of the tapes began, in seconds of the Unix epoch; None: the run never began."""
    has_begun = founded_at is not None
    timeline = read_timeline(run, keep=None, learners=plan.learners) if has_begun else RunTimeline()
    evidence = _Evidence(run, plan, timeline, founded_at or 0.0)
    faults = tuple(map(evidence.fault, plan.faults))
    islands = evidence.islands()
    pause = evidence.worst_pause(faults)
    merges = evidence.merges
    shares = [len(m.contributors) / m.alive for m in merges if m.alive]
    invariants = _invariants(run) if has_begun else {"entries": 0, "violation": None, "judged_until": None}
    on_tapes = sum(process.tokens for processes in timeline.processes.values() for process in processes)
    ledger = _ledger(timeline.tenure.lines() if timeline.tenure is not None else [], on_tapes)
    unplanned = _unplanned(run, plan)
    refused: Counter[str] = Counter()
    for tenure in timeline.tenures:
        refused.update(tenure.refused)
    up_s = sum(each.up_s for each in islands)
    goodput, uptime = timeline.goodput() or 0.0, timeline.uptime() or 0.0
    goodput_up = sum(each.in_steps_s for each in islands) / up_s if up_s > 0.0 else 0.0
    merged_of_alive = sum(shares) / len(shares) if shares else None
    figures: dict[str, float | None] = {
        "goodput": goodput,
        "goodput_up": goodput_up,
        "uptime": uptime,
        "merged_of_alive": merged_of_alive,
        "worst_pause_s": pause.gap_s if pause is not None else None,
        "back_training_s": _worst_of(faults, "back_training_s"),
        "back_merged_s": _worst_of(faults, "back_merged_s"),
        "loss_within": _loss_above(ending.loss),
    }
    checks = [
        _ended(ending, invariants),
        _fired(faults),
        _no_unplanned_end(unplanned),
        _balance(ledger),
        _holds(invariants),
        _learned(ending.loss),
        *(_expected(line, figures, faults, ending) for line in expect.values()),
    ]
    return Verdict(
        format=FORMAT,
        scenario=plan.scenario,
        about=plan.about,
        seed=plan.seed,
        duration_s=plan.duration_s,
        learners=plan.learners,
        links=ending.links,
        passed=not any(check.passed is False for check in checks),
        interrupted=ending.interrupted,
        failed=ending.failed,
        checks=tuple(checks),
        wall_s=timeline.wall_s(),
        goodput=goodput,
        goodput_up=goodput_up,
        uptime=uptime,
        merged_of_alive=merged_of_alive,
        worst_pause=pause,
        islands=islands,
        faults=faults,
        merges=len(merges),
        refused_contributions=dict(refused),
        failed_writes=sum(tenure.failed_writes for tenure in timeline.tenures),
        unplanned_ends=tuple(unplanned),
        ledger=ledger,
        invariants=invariants,
        loss=ending.loss,
        timeline=evidence.timeline_of_page(),
    )


class _Evidence:
    """The faults of a run on the clock of its tapes, and what the tapes say about them."""

    def __init__(self, run: Path, plan: Plan, timeline: RunTimeline, founded_at: float) -> None:
        began, self._records = read_fault_log(run)
        self._founded_at = founded_at
        self._began = began - founded_at if began is not None else None
        self._plan, self._timeline = plan, timeline
        self.merges = sorted(timeline.merges(), key=lambda merge: merge.at)
        since = timeline.trains_since or 0.0
        self._span = since, max(since, timeline.ended)

    def fault(self, planned: Planned) -> FaultReport:
        record = self._records.get(planned.number)
        began = self._on_tape(record.began_at) if record is not None else None
        ended = self._on_tape(record.ended_at) if record is not None else None
        training_s, merged_s = self._return_after(planned, began) if began is not None else (None, None)
        return FaultReport(
            number=planned.number,
            fault=planned.fault,
            target=str(planned.target),
            sentence=planned.sentence(),
            planned_s=planned.at_s if self._began is None else self._began + planned.at_s,
            fired=record is not None and record.fired,
            began_s=began,
            ended_s=ended,
            how=record.how if record is not None else "",
            why_not=record.why_not if record is not None else "the run ended before its time came",
            back_training_s=training_s,
            back_merged_s=merged_s,
            healed_merged_s=self._merged_after_end(planned, ended) if ended is not None else None,
        )

    def _on_tape(self, at: float | None) -> float | None:
        return at - self._founded_at if at is not None else None

    def _next_merge(self, target: Target, after: float, number: int = 0) -> float | None:
        """Return the first merge after this moment: of a fragment of the target if it is a shard, else one with
        learner `number` if that is given."""
        for merge in self.merges:
            if merge.at <= after:
                continue
            if target.kind == "shard":
                found = merge.fragment is not None and merge.fragment % self._plan.shards == target.number
            else:
                found = not number or any(who == number for who, _ in merge.contributors)
            if found:
                return merge.at
        return None

    def _return_after(self, planned: Planned, began: float) -> tuple[float | None, float | None]:
        """Seconds from a kill until its target trains again, and until it is merged again."""
        if planned.fault != "kill":
            return None, None
        target, training, merged = planned.target, None, None
        if target.kind == "learner":
            processes = self._timeline.processes.get(target.number, ())
            next_one = next((p for p in processes if p.began is not None and p.first > began), None)
            if next_one is not None and next_one.steps:
                training = next_one.log.ends[0]
                who = target.number, next_one.incarnation
                merged = next((merge.at for merge in self.merges if who in merge.contributors), None)
        elif target.kind == "shard":
            merged = self._next_merge(target, began + planned.lasts_s)
        else:
            merged = next((merge.at for merge in self.merges if merge.at > began and merge.epoch > 1), None)
            restarted = [each.first for each in self._timeline.tenures if each.first is not None and each.first > began]
            merged = merged if merged is not None and restarted and merged >= restarted[0] else None
        training_s = training - began if training is not None else None
        return training_s, merged - began if merged is not None else None

    def _merged_after_end(self, planned: Planned, ended: float) -> float | None:
        """Seconds from the end of a fault to the next merge by its target, or with it if that is a learner."""
        if planned.fault == "kill" or not planned.lasts_s:
            return None
        merged = self._next_merge(planned.target, ended, planned.target.number)
        return merged - ended if merged is not None else None

    def _learners(self) -> list[int]:
        return sorted({*range(1, self._plan.learners + 1), *self._timeline.processes})

    def _stops(self, learner: int) -> list[Span]:
        """When the process of a learner was stopped by SIGSTOP."""
        spans = []
        for planned in self._plan.faults:
            record = self._records.get(planned.number)
            if planned.fault != "stop" or planned.target != Target("learner", learner) or record is None:
                continue
            began, ended = self._on_tape(record.began_at), self._on_tape(record.ended_at)
            if began is not None:
                spans.append((began, max(began, ended if ended is not None else self._span[1])))
        return spans

    def islands(self) -> tuple[TimeShares, ...]:
        found = [self._timeline.split(learner, stops=self._stops(learner)) for learner in self._learners()]
        return tuple(each for each in found if each is not None)

    def worst_pause(self, faults: Sequence[FaultReport]) -> Worst | None:
        gap = self._timeline.longest_gap({learner: self._stops(learner) for learner in self._timeline.processes})
        if gap is None:
            return None
        during = tuple(
            fault.number
            for fault in faults
            if fault.began_s is not None
            and fault.began_s <= gap.at + gap.gap_s
            and (fault.ended_s if fault.ended_s is not None else fault.began_s) >= gap.at
        )
        return Worst(*gap, during)

    def timeline_of_page(self) -> dict[str, Any]:
        began, ended = self._span
        bands = []
        for learner in self._learners():
            begin = (self._timeline.span_of(learner) or self._span)[0]
            states = self._timeline.bands(learner, begin, ended, self._stops(learner))
            first = states[0].begin if states else ended
            if begin < first:
                states.insert(0, Band(begin, first, "gone"))
            bands.append({"learner": learner, "states": [list(state) for state in states]})
        return {
            "began_s": began,
            "ended_s": ended,
            "bands": bands,
            "syncers": [[each.first, each.last] for each in self._timeline.tenures if each.first is not None],
            "rounds": [[m.at, m.alive, m.asked, len(m.contributors)] for m in self.merges],
        }


# --------------------------------------------------------------------------------------------------------------------
# Figures


def _worst_of(faults: Sequence[FaultReport], name: str) -> float | None:
    return max((getattr(fault, name) for fault in faults if getattr(fault, name) is not None), default=None)


def _ledger(lines: Sequence[Line], on_tapes: int) -> dict[str, Any]:
    """The syncer's ledger, and the tokens that the learners' own tapes hold."""
    mean = mean_line(lines)
    return {
        "balanced": all(line.balanced() for line in lines) and mean.trained <= on_tapes,
        "trained": mean.trained,
        "merged": mean.merged,
        "pending": mean.pending,
        "dropped": dict(sorted(mean.dropped.items())),
        "on_learners_tapes": on_tapes,
        "never_told": on_tapes - mean.trained,  # steps of processes that died before they could report them
    }


def _invariants(run: Path) -> dict[str, Any]:
    tapes = RunTapes(run)
    checkers = all_checkers(tapes.config)
    found = check_tapes(tapes, checkers)
    return {
        "checkers": len(checkers),
        "tapes": len(tapes.readers),
        "entries": found.entries,
        "finished": found.finished,
        "violation": None if found.violation is None else str(found.violation),
        "judged_until": None if found.stopped is None else found.stopped.at,
        "incomplete": found.incomplete,
    }


def _unplanned(run: Path, plan: Plan) -> list[str]:
    """Processes that ended although nothing was to end them. A learner that is quarantined for poison has to."""
    poisoned = {f"learner {f.target.number}" for f in plan.faults if f.target.kind == "payload"}
    return [
        f"{fault['who']} ended by {fault['what']}"
        for fault in read_faults(run)
        if not fault["planned"] and fault["who"] not in poisoned
    ]


def _loss_above(loss: Loss) -> float | None:
    return None if loss.final is None or loss.without_faults is None else loss.final / loss.without_faults - 1.0


# --------------------------------------------------------------------------------------------------------------------
# Lines of the verdict


def _ended(ending: Ending, invariants: Mapping[str, Any]) -> Check:
    if ending.interrupted:
        return Check("ended", False, "the run was interrupted")
    if ending.failed is not None:
        return Check("ended", False, f"the run failed: {ending.failed}")
    if not invariants.get("finished"):
        return Check("ended", False, "no syncer has said that the run is finished")
    return Check("ended", True, "the run came to its end, and every learner that was there has the final model")


def _fired(faults: Sequence[FaultReport]) -> Check:
    missed = [fault for fault in faults if not fault.fired]
    if missed:
        first = missed[0]
        told = f"{len(missed)} of {len(faults)} faults did not happen; the first is {first.number}, {first.sentence}"
        return Check("faults", False, f"{told}: {first.why_not}")
    if not faults:
        return Check(
            "faults", False, "the plan has no fault: nothing was shown; choose a longer duration or another seed"
        )
    return Check("faults", True, f"all {len(faults)} faults happened" if len(faults) > 1 else "the fault happened")


def _no_unplanned_end(ends: Sequence[str]) -> Check:
    if ends:
        return Check("unplanned ends", False, f"{len(ends)} processes ended unasked; the first: {ends[0]}")
    return Check("unplanned ends", True, "no process ended that was not to end")


def _balance(ledger: Mapping[str, Any]) -> Check:
    dropped = sum(ledger["dropped"].values())
    sums = (
        f"trained {ledger['trained']:,} = merged {ledger['merged']:,} + pending {ledger['pending']:,}"
        f" + dropped {dropped:,} tokens"
    )
    if ledger["trained"] > ledger["on_learners_tapes"]:
        more = ledger["trained"] - ledger["on_learners_tapes"]
        return Check("ledger", False, f"the syncer counts {more:,} tokens that are on no learner's tape")
    if not ledger["balanced"]:
        return Check("ledger", False, f"the token ledger does not balance: {sums}")
    return Check("ledger", True, sums)


def _holds(invariants: Mapping[str, Any]) -> Check:
    if invariants["violation"] is not None:
        return Check("invariants", False, str(invariants["violation"]))
    if not invariants["entries"]:
        return Check("invariants", None, "there are no tapes")
    if invariants["judged_until"] is not None:
        gap = (invariants["incomplete"] or ["a tape is incomplete"])[0]
        return Check("invariants", False, f"judged only up to {invariants['judged_until']:.1f} s: {gap}")
    told = f"{invariants['checkers']} checkers over {invariants['entries']:,} entries: no violation"
    return Check("invariants", True, told)


def _learned(loss: Loss) -> Check:
    if loss.final is None or loss.before is None:
        return Check("learned", None, "there is no final model to be judged")
    told = f"the loss on held-out text fell from {loss.before:.3f} to {loss.final:.3f}"
    if loss.final < loss.before:
        return Check("learned", True, told)
    return Check(
        "learned", False, f"the model is worse than at the start: loss {loss.final:.3f} after {loss.before:.3f}"
    )


def _expected(
    line: Expectation, figures: Mapping[str, float | None], faults: Sequence[FaultReport], ending: Ending
) -> Check:
    value, (side, name) = figures[line.figure], EXPECTABLE[line.figure]
    if line.figure.startswith("back_"):
        waiting = [f for f in faults if f.fault == "kill" and f.fired and getattr(f, line.figure) is None]
        waiting = [f for f in waiting if f.target.startswith("learner") or line.figure == "back_merged_s"]
        if waiting:
            return Check(name, False, f"after fault {waiting[0].number} ({waiting[0].sentence}): never", line.because)
    if value is None:
        why = "no figure: nothing of that kind happened"
        if line.figure == "loss_within":
            why = (
                "no loss without faults to compare with: add --baseline" if ending.loss.final is not None else "no loss"
            )
        return Check(name, None, why, line.because)
    good = value >= line.bound if side == "at_least" else value <= line.bound
    return Check(name, good, _held(line, value, ending), line.because)


def _held(line: Expectation, value: float, ending: Ending) -> str:
    side = "at least" if EXPECTABLE[line.figure][0] == "at_least" else "at most"
    if line.figure.endswith("_s"):
        return f"{value:.2f} s, {side} {line.bound:g} s"
    if line.figure == "loss_within":
        loss = ending.loss
        return (
            f"{loss.final:.3f} against {loss.without_faults:.3f} without faults: {100.0 * value:+.2f} %,"
            f" {side} +{100.0 * line.bound:g} %"
        )
    return f"{100.0 * value:.1f} %, {side} {100.0 * line.bound:g} %"
