"""Report of a training job, `report.json`, with the same fields for every method. docs/report.md describes the fields.

The report of a decoupled run comes from its tapes, that of a baseline from the summaries of its processes. Both also
use the metrics, the recorded faults and the evaluation of the final model.
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
    """Held-out evaluation of the initial and the final model."""

    loss: float
    tokens: int
    loss_before: float  # of the initial model
    digest: str  # of the final model
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
    """Early exit of a process, planned or not, and its effects."""

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
    """Report of a job. docs/report.md describes the fields, and a test compares that page with this class."""

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
        data: dict[str, Any] = asdict(self)
        return data

    def save(self, run: Path) -> Path:
        """Write `report.json` and return its path."""
        path = run / REPORT
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        return path


# --------------------------------------------------------------------------------------------------------------------
# Fault records


def record_fault(run: Path, at: float, who: str, what: str, planned: bool) -> None:
    """Append a fault to `faults.jsonl` at once, because the job may be killed before its report.

    Args:
        at: Unix time.
        who: name of the process, such as "learner 2".
        what: signal or exit code.
    """
    with open(run / FAULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"at": at, "who": who, "what": what, "planned": planned}) + "\n")


def read_faults(run: Path) -> list[dict[str, Any]]:
    return list(JsonTail(run / FAULTS).new_lines())


# --------------------------------------------------------------------------------------------------------------------
# The decoupled run


def decoupled_report(run: Path, settings: JobSettings, evaluation: ModelEvaluation, founded_at: float) -> JobReport:
    """Return the report of a decoupled run.

    Args:
        founded_at: Unix time at time 0 of the tapes.
    """
    timeline = read_timeline(run, learners=settings.learners)
    assert timeline.current_tenure is not None, "the tapes have no syncer, although the run has a model"
    ledger = mean_ledger_line(timeline.current_tenure.ledger_lines())
    islands = tuple(_learner_report(run, timeline, learner) for learner in sorted(timeline.processes))
    up, down = sum(island.bytes_up for island in islands), sum(island.bytes_down for island in islands)
    merges = timeline.merges_until(float("inf"))
    contributions = sum(tenure.merges.contributions for tenure in timeline.tenures)
    return JobReport(
        **_shared_fields(settings, evaluation),
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


def _shared_fields(settings: JobSettings, evaluation: ModelEvaluation) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": settings.method,
        "seed": settings.seed,
        "paced": PaceSettings(settings.step_time_s, settings.speeds) if settings.is_paced else None,
        "parameters": evaluation.parameters,
        "eval_loss": evaluation.loss,
        "eval_loss_before": evaluation.loss_before,
        "eval_tokens": evaluation.tokens,
        "final_digest": evaluation.digest,
    }


def _learner_report(run: Path, timeline: RunTimeline, learner: int) -> IslandReport:
    lines = read_metrics(run, learner)
    newest = {line["start"]: line for line in lines}  # last line of every incarnation
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


def _process_fault(timeline: RunTimeline, record: Mapping[str, Any], founded_at: float) -> ProcessFault:
    at = record["at"] - founded_at
    failed = next((n for n in timeline.processes if record["who"] == f"learner {n}"), None)
    processes = _find_restart(timeline.processes[failed], at) if failed is not None else None
    steps_before = during = away_s = None
    if processes is not None:
        exited, restarted = processes
        assert restarted.training_started_at is not None
        last = exited.log.ends[-1] if exited.steps else exited.joined_at
        away_s = restarted.training_started_at - last
        others = [processes for learner, processes in timeline.processes.items() if learner != failed]
        steps_before = _others_step_s(others, (last - max(away_s, 1.0), last))
        during = _others_step_s(others, (last, restarted.training_started_at))
    return ProcessFault(
        at_s=at - (timeline.training_started_at or 0.0),
        who=record["who"],
        what=record["what"],
        planned=record["planned"],
        away_s=away_s,
        came_back_with=None if processes is None else processes[1].optimizer_state_source,
        others_step_s_before=steps_before,
        others_step_s_during=during,
    )


def _find_restart(processes: Sequence[LearnerProcess], at: float) -> tuple[LearnerProcess, LearnerProcess] | None:
    """Return the process that exited at this time and its successor, or None if there is no successor."""
    trained = [process for process in processes if process.training_started_at is not None]
    for before, after in pairwise(trained):
        if before.joined_at <= at <= after.joined_at:
            return before, after
    return None


def _others_step_s(learners: Sequence[Sequence[LearnerProcess]], span: Span) -> float | None:
    medians = [step_s for step_s in (median_step_s(processes, span) for processes in learners) if step_s is not None]
    return median(medians) if medians else None


# --------------------------------------------------------------------------------------------------------------------
# Baselines


def baseline_report(run: Path, settings: JobSettings, evaluation: ModelEvaluation) -> JobReport:
    """Return the report of a baseline. All learners took the same steps, and all trained tokens are merged."""
    lines = {learner: read_metrics(run, learner) for learner in range(1, settings.learners + 1)}
    ends: dict[int, dict[str, Any]] = {}
    for learner, metrics in lines.items():
        if not metrics or "end" not in metrics[-1]:
            raise ValueError(f"the metrics of learner {learner} in {run} are incomplete; start the run again")
        ends[learner] = metrics[-1]["end"]
    wall_s = max(end["ended_at"] for end in ends.values()) - min(end["began_at"] for end in ends.values())
    useful = [end["useful_s"] for end in ends.values()]
    tokens = sum(end["tokens"] for end in ends.values())
    sent = sum(end["sent_bytes"] for end in ends.values())
    rounds = ends[1]["rounds"]
    return JobReport(
        **_shared_fields(settings, evaluation),
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
        islands=tuple(_baseline_learner_report(learner, ends[learner], lines[learner]) for learner in ends),
    )


def _baseline_learner_report(learner: int, end: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> IslandReport:
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
