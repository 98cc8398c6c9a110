"""`report.json`: what a training job came to, the same fields for every method. docs/report.md says what each means.

A decoupled run is told by its tapes, a baseline by what its processes wrote at their end; both by their metrics, by the
faults that the job saw, and by the evaluation of the model that is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from atoll.train.job_settings import JobSettings
from atoll.train.loop import read_metrics
from atoll.train.tape_figures import Island, TapeFigures, read_figures

REPORT = "report.json"
FAULTS = "faults.jsonl"

FORMAT = 1


class Judged(NamedTuple):
    """The final model on held-out text, beside the model that the run began with."""

    loss: float
    tokens: int
    loss_before: float
    digest: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Tokens:
    trained: int
    merged: int
    pending: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Bytes:
    up: int
    down: int
    per_token: float


@dataclass(frozen=True, slots=True)
class Fault:
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
    away_s: float
    waited_s: float
    bytes_up: int
    bytes_down: int
    inner_state: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Paced:
    step_time_s: float
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """See docs/report.md; a test keeps that page and these fields equal."""

    format: int
    method: str
    learners: int
    seed: int
    paced: Paced | None
    wall_s: float
    goodput: float
    uptime: float
    steps: int
    tokens: Tokens
    rounds: int
    contributions_per_merge: float | None
    effective_h: float | None
    bytes: Bytes
    parameters: int
    eval_loss: float
    eval_loss_before: float
    eval_tokens: int
    final_digest: str
    faults: tuple[Fault, ...]
    islands: tuple[IslandReport, ...]

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = asdict(self)
        return told

    def save(self, run: Path) -> Path:
        path = run / REPORT
        half = path.with_name(f".{REPORT}.half")
        half.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        half.replace(path)
        return path


# --------------------------------------------------------------------------------------------------------------------
# Faults as the job writes them down


def note_fault(run: Path, at: float, who: str, what: str, planned: bool) -> None:
    """`at`: seconds of the Unix epoch. Written at once: the job itself may end before its report."""
    with open(run / FAULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"at": at, "who": who, "what": what, "planned": planned}) + "\n")


def read_faults(run: Path) -> list[dict[str, Any]]:
    try:
        lines = (run / FAULTS).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


# --------------------------------------------------------------------------------------------------------------------
# The decoupled run


def decoupled_report(run: Path, settings: JobSettings, judged: Judged, founded_at: float) -> Report:
    """`founded_at`: when the clock of the tapes began, in seconds of the Unix epoch."""
    figures = read_figures(run)
    ledger = figures.ledger
    islands = tuple(_island_of_tape(run, figures, island) for island in figures.islands)
    up, down = sum(island.bytes_up for island in islands), sum(island.bytes_down for island in islands)
    learners = max(settings.learners, len(figures.islands))
    return Report(
        **_shared(settings, judged),
        learners=learners,
        wall_s=figures.wall_s,
        goodput=figures.goodput(learners),
        uptime=min(1.0, figures.stepping_s / max(figures.wall_s, 1e-9)),
        steps=sum(island.steps for island in islands),
        tokens=Tokens(ledger.trained, ledger.merged, ledger.pending, ledger.dropped),
        rounds=figures.merges,
        contributions_per_merge=figures.contributions / figures.merges if figures.merges else None,
        effective_h=figures.effective_h(),
        bytes=Bytes(up, down, (up + down) / max(ledger.trained, 1)),
        faults=tuple(_fault(figures, each, founded_at) for each in read_faults(run)),
        islands=islands,
    )


def _shared(settings: JobSettings, judged: Judged) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": settings.method,
        "seed": settings.seed,
        "paced": Paced(settings.step_time_s, settings.speeds) if settings.paced else None,
        "parameters": judged.parameters,
        "eval_loss": judged.loss,
        "eval_loss_before": judged.loss_before,
        "eval_tokens": judged.tokens,
        "final_digest": judged.digest,
    }


def _island_of_tape(run: Path, figures: TapeFigures, island: Island) -> IslandReport:
    lines = read_metrics(run, island.learner)
    newest = {line["start"]: line for line in lines}  # the last line of every incarnation
    present_s = island.present_s()
    return IslandReport(
        learner=island.learner,
        starts=len(island.lives),
        steps=island.steps,
        tokens=island.tokens,
        step_s=island.median_step_s(),
        tokens_per_s=island.tokens / present_s if present_s else 0.0,
        loss=_last_loss(lines),
        away_s=max(0.0, figures.wall_s - present_s),
        waited_s=0.0,
        bytes_up=sum(line.get("bytes_up", 0) for line in newest.values()),
        bytes_down=sum(line.get("bytes_down", 0) for line in newest.values()),
        inner_state=tuple(life.moments for life in island.lives),
    )


def _last_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return next((line["loss"] for line in reversed(lines) if "loss" in line), None)


def _fault(figures: TapeFigures, noted: Mapping[str, Any], founded_at: float) -> Fault:
    at = noted["at"] - founded_at
    struck = next((i for i in figures.islands if noted["who"] == f"learner {i.learner}"), None)
    lives = struck.return_after(at) if struck is not None else None
    before = during = away_s = None
    if lives is not None:
        others = [island for island in figures.islands if island is not struck]
        gone, back = lives[0].ended, lives[1].began
        away_s = back - gone
        before = _middle_step_s(others, (gone - max(away_s, 1.0), gone))
        during = _middle_step_s(others, (gone, back))
    return Fault(
        at_s=at - figures.began,
        who=noted["who"],
        what=noted["what"],
        planned=noted["planned"],
        away_s=away_s,
        came_back_with=None if lives is None else lives[1].moments,
        others_step_s_before=before,
        others_step_s_during=during,
    )


def _middle_step_s(islands: Sequence[Island], span: tuple[float, float]) -> float | None:
    found = [step_s for step_s in (island.median_step_s(span) for island in islands) if step_s is not None]
    return median(found) if found else None


# --------------------------------------------------------------------------------------------------------------------
# Baselines


def baseline_report(run: Path, settings: JobSettings, judged: Judged) -> Report:
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
    return Report(
        **_shared(settings, judged),
        learners=settings.learners,
        wall_s=wall_s,
        goodput=min(1.0, sum(useful) / max(settings.learners * wall_s, 1e-9)),
        uptime=min(1.0, max(useful) / max(wall_s, 1e-9)),
        steps=sum(end["steps"] for end in ends.values()),
        tokens=Tokens(tokens, tokens, 0, 0),
        rounds=rounds,
        contributions_per_merge=float(settings.learners) if rounds else None,
        effective_h=ends[1]["steps"] * ends[1]["fragments"] / rounds if rounds else None,
        bytes=Bytes(sent, sent, 2 * sent / max(tokens, 1)),
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
        away_s=0.0,
        waited_s=end["waited_s"],
        bytes_up=end["sent_bytes"],
        bytes_down=end["sent_bytes"],
        inner_state=(),
    )
