"""`report.json`: what a training job came to, the same fields for every method. docs/report.md says what each means.

A decoupled run is told by its tapes, a baseline by what its processes wrote at their end; both by their metrics, by the
faults that the job saw, and by the evaluation of the model that is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from atoll.dashboard.run_files import JsonTail
from atoll.files import write_text
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import read_metrics
from atoll.tape.bounded_logs import Span
from atoll.tape.learner_processes import LearnerProcess, median_step_s
from atoll.tape.syncer_tenures import mean_ledger_line
from atoll.tape.timeline import RunTimeline, read_timeline

REPORT = "report.json"
FAULTS = "faults.jsonl"

FORMAT = 1


class ModelEvaluation(NamedTuple):
    """The final model on held-out text, beside the model that the run began with."""

    loss: float
    tokens: int
    loss_before: float
    digest: str
    parameters: int


@dataclass(frozen=True, slots=True)
class TokenTotals:
    trained: int
    merged: int
    pending: int
    dropped: int


@dataclass(frozen=True, slots=True)
class ByteTotals:
    up: int
    down: int
    per_token: float


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """Something that ended a process, on purpose or not, and what became of it."""

    at_s: float | None
    who: str
    what: str
    planned: bool
    away_s: float | None
    came_back_with: str | None
    others_step_s_before: float | None
    others_step_s_during: float | None


@dataclass(frozen=True, slots=True)
class IslandReport:
    learner: int
    starts: int
    steps: int
    tokens: int
    step_s: float | None
    tokens_per_s: float
    loss: float | None
    goodput: float
    away_s: float
    waited_s: float
    bytes_up: int
    bytes_down: int
    inner_state: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PaceSettings:
    step_time_s: float
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JobReport:
    """See docs/report.md; a test keeps that page and these fields equal."""

    format: int
    method: str
    learners: int
    seed: int
    paced: PaceSettings | None
    wall_s: float
    goodput: float
    uptime: float
    steps: int
    tokens: TokenTotals
    rounds: int
    contributions_per_merge: float | None
    effective_h: float | None
    bytes: ByteTotals
    parameters: int
    eval_loss: float
    eval_loss_before: float
    eval_tokens: int
    final_digest: str
    faults: tuple[ProcessFault, ...]
    islands: tuple[IslandReport, ...]

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = asdict(self)
        return told

    def save(self, run: Path) -> Path:
        path = run / REPORT
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        return path


# --------------------------------------------------------------------------------------------------------------------
# Faults as the job writes them down


def record_fault(run: Path, at: float, who: str, what: str, planned: bool) -> None:
    """`at`: seconds of the Unix epoch. Written at once: the job itself may end before its report."""
    with open(run / FAULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"at": at, "who": who, "what": what, "planned": planned}) + "\n")


def read_faults(run: Path) -> list[dict[str, Any]]:
    return list(JsonTail(run / FAULTS).new_lines())


# --------------------------------------------------------------------------------------------------------------------
# The decoupled run


def decoupled_report(run: Path, settings: JobSettings, judged: ModelEvaluation, founded_at: float) -> JobReport:
    """`founded_at`: when the clock of the tapes began, in seconds of the Unix epoch."""
    timeline = read_timeline(run, learners=settings.learners)
    assert timeline.current_tenure is not None, "a run without a syncer has no model either"
    ledger = mean_ledger_line(timeline.current_tenure.ledger_lines())
    islands = tuple(_island_of_tape(run, timeline, learner) for learner in sorted(timeline.processes))
    up, down = sum(island.bytes_up for island in islands), sum(island.bytes_down for island in islands)
    merges = timeline.merges_until(float("inf"))
    contributions = sum(tenure.merges.contributions for tenure in timeline.tenures)
    return JobReport(
        **_shared_fields(settings, judged),
        learners=max(settings.learners, len(islands)),
        wall_s=timeline.wall_s(),
        goodput=timeline.goodput() or 0.0,
        uptime=timeline.uptime() or 0.0,
        steps=sum(island.steps for island in islands),
        tokens=TokenTotals(ledger.trained, ledger.merged, ledger.pending, sum(ledger.dropped.values())),
        rounds=merges,
        contributions_per_merge=contributions / merges if merges else None,
        effective_h=timeline.effective_h(),
        bytes=ByteTotals(up, down, (up + down) / max(ledger.trained, 1)),
        faults=tuple(_process_fault(timeline, each, founded_at) for each in read_faults(run)),
        islands=islands,
    )


def _shared_fields(settings: JobSettings, judged: ModelEvaluation) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": settings.method,
        "seed": settings.seed,
        "paced": PaceSettings(settings.step_time_s, settings.speeds) if settings.is_paced else None,
        "parameters": judged.parameters,
        "eval_loss": judged.loss,
        "eval_loss_before": judged.loss_before,
        "eval_tokens": judged.tokens,
        "final_digest": judged.digest,
    }


def _island_of_tape(run: Path, timeline: RunTimeline, learner: int) -> IslandReport:
    lines = read_metrics(run, learner)
    newest = {line["start"]: line for line in lines}  # the last line of every incarnation
    processes = [process for process in timeline.processes[learner] if process.training_started_at is not None]
    present_s = sum(process.present_s for process in processes)
    tokens = sum(process.tokens for process in processes)
    shares = timeline.time_shares(learner)
    return IslandReport(
        learner=learner,
        starts=len(processes),
        steps=sum(process.steps for process in processes),
        tokens=tokens,
        step_s=median_step_s(processes),
        tokens_per_s=tokens / present_s if present_s else 0.0,
        loss=_last_loss(lines),
        goodput=shares.goodput if shares is not None else 0.0,
        away_s=shares.away_s if shares is not None else 0.0,
        waited_s=0.0,
        bytes_up=sum(line.get("bytes_up", 0) for line in newest.values()),
        bytes_down=sum(line.get("bytes_down", 0) for line in newest.values()),
        inner_state=tuple(process.optimizer_state_source for process in processes),
    )


def _last_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return next((line["loss"] for line in reversed(lines) if "loss" in line), None)


def _process_fault(timeline: RunTimeline, noted: Mapping[str, Any], founded_at: float) -> ProcessFault:
    at = noted["at"] - founded_at
    struck = next((n for n in timeline.processes if noted["who"] == f"learner {n}"), None)
    processes = _find_restart(timeline.processes[struck], at) if struck is not None else None
    before = during = away_s = None
    if processes is not None:
        gone, back = processes
        assert back.training_started_at is not None
        last = gone.log.ends[-1] if gone.steps else gone.joined_at
        away_s = back.training_started_at - last
        others = [processes for learner, processes in timeline.processes.items() if learner != struck]
        before = _others_step_s(others, (last - max(away_s, 1.0), last))
        during = _others_step_s(others, (last, back.training_started_at))
    return ProcessFault(
        at_s=at - (timeline.training_started_at or 0.0),
        who=noted["who"],
        what=noted["what"],
        planned=noted["planned"],
        away_s=away_s,
        came_back_with=None if processes is None else processes[1].optimizer_state_source,
        others_step_s_before=before,
        others_step_s_during=during,
    )


def _find_restart(processes: Sequence[LearnerProcess], at: float) -> tuple[LearnerProcess, LearnerProcess] | None:
    """The process that ended around this moment, and the one that followed."""
    trained = [process for process in processes if process.training_started_at is not None]
    for before, after in pairwise(trained):
        if before.joined_at <= at <= after.joined_at:
            return before, after
    return None


def _others_step_s(islands: Sequence[Sequence[LearnerProcess]], span: Span) -> float | None:
    found = [step_s for step_s in (median_step_s(processes, span) for processes in islands) if step_s is not None]
    return median(found) if found else None


# --------------------------------------------------------------------------------------------------------------------
# Baselines


def baseline_report(run: Path, settings: JobSettings, judged: ModelEvaluation) -> JobReport:
    """All processes of a baseline took the same steps, and everything that was trained is in the model."""
    lines = {learner: read_metrics(run, learner) for learner in range(1, settings.learners + 1)}
    ends: dict[int, dict[str, Any]] = {}
    for learner, told in lines.items():
        if not told or "end" not in told[-1]:
            raise ValueError(
                f"learner {learner} did not come to its end: {run} holds no whole run of {settings.method}"
            )
        ends[learner] = told[-1]["end"]
    wall_s = max(end["ended_at"] for end in ends.values()) - min(end["began_at"] for end in ends.values())
    useful = [end["useful_s"] for end in ends.values()]
    tokens = sum(end["tokens"] for end in ends.values())
    sent = sum(end["sent_bytes"] for end in ends.values())
    rounds = ends[1]["rounds"]
    return JobReport(
        **_shared_fields(settings, judged),
        learners=settings.learners,
        wall_s=wall_s,
        goodput=min(1.0, sum(useful) / max(settings.learners * wall_s, 1e-9)),
        uptime=min(1.0, max(useful) / max(wall_s, 1e-9)),
        steps=sum(end["steps"] for end in ends.values()),
        tokens=TokenTotals(tokens, tokens, 0, 0),
        rounds=rounds,
        contributions_per_merge=float(settings.learners) if rounds else None,
        effective_h=ends[1]["steps"] * ends[1]["fragments"] / rounds if rounds else None,
        bytes=ByteTotals(sent, sent, 2 * sent / max(tokens, 1)),
        faults=(),
        islands=tuple(_island_of_end(learner, ends[learner], lines[learner]) for learner in ends),
    )


def _island_of_end(learner: int, end: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> IslandReport:
    return IslandReport(
        learner=learner,
        starts=1,
        steps=end["steps"],
        tokens=end["tokens"],
        step_s=median(line["step_s"] for line in lines if "step_s" in line),
        tokens_per_s=end["tokens"] / max(end["ended_at"] - end["began_at"], 1e-9),
        loss=_last_loss(lines),
        goodput=min(1.0, end["useful_s"] / max(end["ended_at"] - end["began_at"], 1e-9)),
        away_s=0.0,
        waited_s=end["waited_s"],
        bytes_up=end["sent_bytes"],
        bytes_down=end["sent_bytes"],
        inner_state=(),
    )
