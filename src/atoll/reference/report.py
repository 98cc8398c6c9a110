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

from atoll.files import write_text
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import read_metrics
from atoll.tape.learner_processes import Life
from atoll.tape.steps import Span
from atoll.tape.syncer_tenures import mean_line
from atoll.tape.timeline import Books, read_books

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
    goodput: float
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
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
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
    books = read_books(run)
    books.asked_for = settings.learners
    assert books.reign is not None, "a run without a syncer has no model either"
    ledger = mean_line(books.reign.lines())
    dropped = sum(ledger.dropped.values())
    islands = tuple(_island_of_tape(run, books, learner) for learner in sorted(books.lives))
    up, down = sum(island.bytes_up for island in islands), sum(island.bytes_down for island in islands)
    merges = sum(reign.merges.total for reign in books.reigns)
    contributions = sum(reign.merges.contributions for reign in books.reigns)
    return Report(
        **_shared(settings, judged),
        learners=max(settings.learners, len(islands)),
        wall_s=books.wall_s(),
        goodput=books.goodput() or 0.0,
        uptime=books.uptime() or 0.0,
        steps=sum(island.steps for island in islands),
        tokens=Tokens(ledger.trained, ledger.merged, ledger.pending, dropped),
        rounds=merges,
        contributions_per_merge=contributions / merges if merges else None,
        effective_h=effective_h(books),
        bytes=Bytes(up, down, (up + down) / max(ledger.trained, 1)),
        faults=tuple(_fault(books, each, founded_at) for each in read_faults(run)),
        islands=islands,
    )


def effective_h(books: Books) -> float | None:
    """Steps that a learner takes between two merges of a fragment, if it is there all the time."""
    lives = [life for each in books.lives.values() for life in each]
    present_s = sum(map(_present_s, lives))
    merges = sum(reign.merges.total for reign in books.reigns)
    if not merges or not present_s or books.reign is None:
        return None
    steps = sum(life.steps for life in lives) * books.wall_s() / present_s
    return steps * len(books.reign.core.config.fragment_ids()) / merges


def _present_s(life: Life) -> float:
    """From the moment at which it might train to its last step."""
    return life.log.ends[-1] - life.began if life.began is not None and life.steps else 0.0


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


def _island_of_tape(run: Path, books: Books, learner: int) -> IslandReport:
    lines = read_metrics(run, learner)
    newest = {line["start"]: line for line in lines}  # the last line of every incarnation
    lives = [life for life in books.lives[learner] if life.began is not None]
    present_s = sum(map(_present_s, lives))
    tokens = sum(life.tokens for life in lives)
    shares = books.split(learner)
    return IslandReport(
        learner=learner,
        starts=len(lives),
        steps=sum(life.steps for life in lives),
        tokens=tokens,
        step_s=middle_step_s(lives),
        tokens_per_s=tokens / present_s if present_s else 0.0,
        loss=_last_loss(lines),
        goodput=shares.goodput if shares is not None else 0.0,
        away_s=shares.away_s if shares is not None else 0.0,
        waited_s=0.0,
        bytes_up=sum(line.get("bytes_up", 0) for line in newest.values()),
        bytes_down=sum(line.get("bytes_down", 0) for line in newest.values()),
        inner_state=tuple(life.moments for life in lives),
    )


def middle_step_s(lives: Sequence[Life], within: Span = (float("-inf"), float("inf"))) -> float | None:
    """The median step, of those that lie wholly in a span of time."""
    times = sorted(each for life in lives for each in life.log.durations(*within))
    rest = sum(count for _, count in times) / 2
    for step_s, count in times:
        rest -= count
        if rest <= 0:
            return step_s
    return None


def _last_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return next((line["loss"] for line in reversed(lines) if "loss" in line), None)


def _fault(books: Books, noted: Mapping[str, Any], founded_at: float) -> Fault:
    at = noted["at"] - founded_at
    struck = next((n for n in books.lives if noted["who"] == f"learner {n}"), None)
    lives = _return_after(books.lives[struck], at) if struck is not None else None
    before = during = away_s = None
    if lives is not None:
        gone, back = lives
        assert back.began is not None
        last = gone.log.ends[-1] if gone.steps else gone.joined
        away_s = back.began - last
        others = [lives for learner, lives in books.lives.items() if learner != struck]
        before = _others_step_s(others, (last - max(away_s, 1.0), last))
        during = _others_step_s(others, (last, back.began))
    return Fault(
        at_s=at - (books.trains_since() or 0.0),
        who=noted["who"],
        what=noted["what"],
        planned=noted["planned"],
        away_s=away_s,
        came_back_with=None if lives is None else lives[1].moments,
        others_step_s_before=before,
        others_step_s_during=during,
    )


def _return_after(lives: Sequence[Life], at: float) -> tuple[Life, Life] | None:
    """The life that ended around this moment, and the one that followed."""
    trained = [life for life in lives if life.began is not None]
    for before, after in pairwise(trained):
        if before.joined <= at <= after.joined:
            return before, after
    return None


def _others_step_s(islands: Sequence[Sequence[Life]], span: Span) -> float | None:
    found = [step_s for step_s in (middle_step_s(lives, span) for lives in islands) if step_s is not None]
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
        goodput=min(1.0, end["useful_s"] / max(end["ended_at"] - end["began_at"], 1e-9)),
        away_s=0.0,
        waited_s=end["waited_s"],
        bytes_up=end["sent_bytes"],
        bytes_down=end["sent_bytes"],
        inner_state=(),
    )
