"""The verdict: what the tapes say about a run under fault, held against what its scenario expects.

docs/chaos.md says what every field means; a test keeps that page and these fields equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.chaos.checking import judge as check_tapes
from atoll.chaos.facts import Facts, nothing, read_facts, worst_pause
from atoll.chaos.faults import Target
from atoll.chaos.plan import Plan, Planned
from atoll.chaos.scenario import EXPECTABLE, Expectation
from atoll.chaos.struck import Struck, read_log
from atoll.files import write_text
from atoll.reference.report import read_faults
from atoll.sim.checkers import all_checkers
from atoll.tape.files import RunTapes
from atoll.tape.merges import Merge
from atoll.tape.steps import Span
from atoll.tape.time_shares import Shares, states_of

FORMAT = 1
VERDICT = "verdict.json"

ALWAYS = (
    "ended",
    "faults",
    "unplanned ends",
    "ledger",
    "invariants",
    "learned",
)
"""What is asked of every run under fault, whatever its scenario expects."""


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
    islands: tuple[Shares, ...]
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
    facts = read_facts(run) if founded_at is not None else nothing()
    facts.books.asked_for = plan.learners
    clock = _Clock(run, founded_at or 0.0)
    faults = tuple(_fault(planned, clock, facts, plan.shards) for planned in plan.faults)
    span = (facts.began, facts.ended)
    islands = _islands(plan, facts, clock, span)
    pause = _worst(facts, plan, clock, faults)
    merged_of_alive = facts.merged_of_alive()
    invariants = _invariants(run) if founded_at is not None else {"entries": 0, "violation": None, "judged_until": None}
    ledger = _books(facts)
    unplanned = _unplanned(run, plan)
    goodput = facts.books.goodput() or 0.0
    up_s = sum(each.up_s for each in islands)
    goodput_up = sum(each.in_steps_s for each in islands) / up_s if up_s > 0.0 else 0.0
    uptime = facts.books.uptime() or 0.0
    figures = {
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
        wall_s=facts.books.wall_s(),
        goodput=goodput,
        goodput_up=goodput_up,
        uptime=uptime,
        merged_of_alive=merged_of_alive,
        worst_pause=pause,
        islands=islands,
        faults=faults,
        merges=len(facts.merges),
        refused_contributions=facts.refused,
        failed_writes=facts.failed_writes,
        unplanned_ends=tuple(unplanned),
        ledger=ledger,
        invariants=invariants,
        loss=ending.loss,
        timeline=_timeline(plan, facts, clock, span),
    )


class _Clock:
    """The faults of a run on the clock of its tapes."""

    def __init__(self, run: Path, founded_at: float) -> None:
        began, struck = read_log(run)
        self._founded_at = founded_at
        self.began = began - founded_at if began is not None else None
        self._struck = struck

    def struck(self, number: int) -> Struck | None:
        return self._struck.get(number)

    def on_tape(self, at: float | None) -> float | None:
        return at - self._founded_at if at is not None else None

    def span(self, planned: Planned, until: float) -> Span | None:
        """In which it went on; None where it never began."""
        struck = self.struck(planned.number)
        if struck is None or struck.began_at is None:
            return None
        began = struck.began_at - self._founded_at
        ended = struck.ended_at - self._founded_at if struck.ended_at is not None else until
        return began, max(began, ended)


# --------------------------------------------------------------------------------------------------------------------
# Figures


def _of_shard(target: Target, shards: int, facts: Facts) -> list[Merge]:
    """Merges of the fragments that it holds."""
    return [merge for merge in facts.merges if merge.fragment is not None and merge.fragment % shards == target.number]


def _fault(planned: Planned, clock: _Clock, facts: Facts, shards: int) -> FaultReport:
    struck = clock.struck(planned.number)
    began = clock.on_tape(struck.began_at) if struck is not None else None
    training_s = merged_s = None
    if planned.fault == "kill" and began is not None and planned.target.kind == "learner":
        life = facts.next_life(planned.target.number, began)
        if life is not None and life.step_ends:
            training_s = life.step_ends[0] - began
            merged = facts.first_merged(planned.target.number, life.incarnation)
            merged_s = merged - began if merged is not None else None
    elif planned.fault == "kill" and began is not None and planned.target.kind == "shard":
        back = began + planned.lasts_s
        merged = next((merge.at for merge in _of_shard(planned.target, shards, facts) if merge.at > back), None)
        merged_s = merged - began if merged is not None else None
    elif planned.fault == "kill" and began is not None:
        at = began
        merged = next((merge.at for merge in facts.merges if merge.at > at and merge.epoch > 1), None)
        after = [each.first for each in facts.syncers if each.first > at]
        merged_s = merged - began if merged is not None and after and merged >= after[0] else None
    healed = clock.on_tape(struck.ended_at) if struck is not None else None
    return FaultReport(
        number=planned.number,
        fault=planned.fault,
        target=str(planned.target),
        sentence=planned.sentence(),
        planned_s=planned.at_s if clock.began is None else clock.began + planned.at_s,
        fired=struck is not None and struck.fired,
        began_s=began,
        ended_s=healed,
        how=struck.how if struck is not None else "",
        why_not=struck.why_not if struck is not None else "the run ended before its time came",
        back_training_s=training_s,
        back_merged_s=merged_s,
        healed_merged_s=_healed(planned, healed, facts, shards),
    )


def _healed(planned: Planned, healed: float | None, facts: Facts, shards: int) -> float | None:
    """From the end of a fault to the next merge that has what it struck: the syncer merges, or the shard does, or the
    learner is in it."""
    if healed is None or planned.fault == "kill" or not planned.lasts_s:
        return None
    if planned.target.kind == "shard":
        found = next((merge.at for merge in _of_shard(planned.target, shards, facts) if merge.at > healed), None)
        return found - healed if found is not None else None
    number = planned.target.number
    after = (m for m in facts.merges if m.at > healed)
    found = next((m.at for m in after if not number or any(who == number for who, _ in m.contributors)), None)
    return found - healed if found is not None else None


def _worst_of(faults: Sequence[FaultReport], name: str) -> float | None:
    found = [getattr(fault, name) for fault in faults if getattr(fault, name) is not None]
    return max(found, default=None)


def _stops(plan: Plan, learner: int, clock: _Clock, until: float) -> list[Span]:
    spans = [
        clock.span(planned, until)
        for planned in plan.faults
        if planned.fault == "stop" and planned.target.kind == "learner" and planned.target.number == learner
    ]
    return [span for span in spans if span is not None]


def _learners(plan: Plan, facts: Facts) -> list[int]:
    return sorted({*range(1, plan.learners + 1), *facts.lives})


def _islands(plan: Plan, facts: Facts, clock: _Clock, span: Span) -> tuple[Shares, ...]:
    stops = {learner: _stops(plan, learner, clock, span[1]) for learner in _learners(plan, facts)}
    found = [facts.books.split(learner, stops=each) for learner, each in stops.items()]
    return tuple(each for each in found if each is not None)


def _worst(facts: Facts, plan: Plan, clock: _Clock, faults: Sequence[FaultReport]) -> Worst | None:
    excused = {learner: _stops(plan, learner, clock, facts.ended) for learner in facts.lives}
    pause = worst_pause(facts, excused)
    if pause is None:
        return None
    during = tuple(
        fault.number
        for fault in faults
        if fault.began_s is not None
        and fault.began_s <= pause.at + pause.gap_s
        and (fault.ended_s if fault.ended_s is not None else fault.began_s) >= pause.at
    )
    return Worst(pause.learner, pause.at, pause.gap_s, pause.usual_s, during)


def _books(facts: Facts) -> dict[str, Any]:
    """The syncer's books, and what the learners' own tapes say that they trained."""
    lines = facts.ledger
    count = max(1, len(lines))
    dropped: dict[str, float] = {}
    for line in lines:
        for why, lost in line.dropped.items():
            dropped[why] = dropped.get(why, 0.0) + lost / count
    trained = lines[0].trained if lines else 0
    return {
        "balanced": all(line.balanced() for line in lines) and trained <= facts.tokens,
        "trained": trained,
        "merged": round(sum(line.merged for line in lines) / count),
        "pending": round(sum(line.pending for line in lines) / count),
        "dropped": {why: round(lost) for why, lost in sorted(dropped.items())},
        "on_learners_tapes": facts.tokens,
        "never_told": facts.tokens - trained,  # steps of processes that died before they could report them
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


POISONS = ("nan", "infinity", "wild")


def _unplanned(run: Path, plan: Plan) -> list[str]:
    """Processes that ended although nothing was to end them. A learner that is quarantined for poison has to."""
    poisoned = {f"learner {f.target.number}" for f in plan.faults if f.fault in POISONS}
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
    books = (
        f"trained {ledger['trained']:,} = merged {ledger['merged']:,} + pending {ledger['pending']:,}"
        f" + dropped {dropped:,} tokens"
    )
    if ledger["trained"] > ledger["on_learners_tapes"]:
        more = ledger["trained"] - ledger["on_learners_tapes"]
        return Check("ledger", False, f"the syncer counts {more:,} tokens that are on no learner's tape")
    if not ledger["balanced"]:
        return Check("ledger", False, f"the books do not balance: {books}")
    return Check("ledger", True, books)


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


_WORDS = {
    "goodput": "goodput",
    "goodput_up": "goodput while up",
    "uptime": "uptime",
    "merged_of_alive": "merged of alive",
    "worst_pause_s": "worst pause",
    "back_training_s": "back to training",
    "back_merged_s": "back in a merge",
    "loss_within": "loss",
}


def _expected(
    line: Expectation, figures: Mapping[str, float | None], faults: Sequence[FaultReport], ending: Ending
) -> Check:
    value, side = figures[line.figure], EXPECTABLE[line.figure][0]
    name = _WORDS[line.figure]
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


# --------------------------------------------------------------------------------------------------------------------
# The timeline, for the page


def _timeline(plan: Plan, facts: Facts, clock: _Clock, span: Span) -> dict[str, Any]:
    bands = []
    for learner in _learners(plan, facts):
        begin, end = facts.books.span_of(learner) or span
        left_at = end if end < span[1] else None
        stops = _stops(plan, learner, clock, span[1])
        states = states_of(facts.lives.get(learner, []), (begin, span[1]), stops, left_at)
        bands.append({"learner": learner, "states": [[b, e, state] for (b, e), state in states]})
    return {
        "began_s": span[0],
        "ended_s": span[1],
        "bands": bands,
        "syncers": [[each.first, each.last] for each in facts.syncers],
        "rounds": [[m.at, m.alive, m.asked, len(m.contributors)] for m in facts.merges],
        "words": [[word.at, word.sentence] for word in facts.words],
    }
