"""How far a job is, for the terminal: from the syncer's status and from what the job knows of its own processes.

A baseline has no syncer; the job makes a status in the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from atoll.tape.timeline import STATE_LABELS


@dataclass(slots=True)
class JobProgress:
    """What the job adds to the status: its own processes, its clock, and the last thing that happened."""

    title: str
    learners: int
    elapsed_s: float = 0.0
    goodput: float | None = None
    down: dict[int, str] = field(default_factory=dict)  # learners whose process is not there, and why
    news: list[str] = field(default_factory=list)  # sentences, newest last


class GoodputMeter:
    """Goodput so far: learners that train, over learners that there should be, since the first of them trained."""

    def __init__(self, learners: int) -> None:
        self._learners = learners
        self._since: float | None = None
        self._last = 0.0
        self._trained_s = 0.0
        self._training = 0

    def update(self, now: float, training: int) -> float | None:
        """`training` learners train now; those of the call before did so until now."""
        if self._since is None:
            if not training:
                return None
            self._since = self._last = now
        self._trained_s += self._training * (now - self._last)
        self._last, self._training = now, min(training, self._learners)
        allotted_s = self._learners * (now - self._since)
        return self._trained_s / allotted_s if allotted_s > 0 else None


def training_count(status: Mapping[str, Any]) -> int:
    return sum(1 for each in status.get("learners", ()) if each.get("standing") in ("live", "suspect"))


def job_view(status: Mapping[str, Any], job: JobProgress) -> dict[str, Any]:
    """Return what `LiveView` shows, in the shapes of docs/dash.md as far as a status has them."""
    found: Sequence[Mapping[str, Any]] = status.get("learners", ())
    members = {int(each.get("learner", 0)): each for each in found}
    count = max([job.learners, *members])  # learners beyond the planned ones may have come by themselves
    islands = [_island(number, members.get(number), job.down.get(number)) for number in range(1, count + 1)]
    losses = [each["loss"] for each in islands if each["loss"] is not None and each["state"] == "training"]
    rates = [each["tokens_per_s"] for each in islands if each["tokens_per_s"] is not None]
    progress = min(1.0, status.get("progress", 0.0))
    return {
        "title": job.title,
        "at": job.elapsed_s,
        "stage": status.get("stage", "starting"),
        "paused": bool(status.get("paused")),
        "progress": progress,
        "headline": {
            "loss": fmean(losses) if losses else None,
            "tokens_per_s": sum(rates) if rates else None,
            "goodput": job.goodput,
            "alive": status.get("alive"),
            "pulled": status.get("asked"),
            "merged": status.get("merged"),
            "merges": status.get("merges"),
            "quorum": status.get("quorum"),
            "remaining_s": job.elapsed_s * (1.0 - progress) / progress if progress > 0.02 else None,
        },
        "islands": islands,
        "news": job.news,
    }


def _island(learner: int, member: Mapping[str, Any] | None, down: str | None) -> dict[str, Any]:
    known = member if member is not None else {}
    starts = known.get("incarnation", 1)
    notes = [f"link {known['link']}" if known.get("link") else "", f"start {starts}" if starts > 1 else ""]
    return {
        "learner": learner,
        "state": "gone" if down is not None else STATE_LABELS.get(known.get("standing", ""), "starting"),
        "step": known.get("step", 0),
        "tokens_per_s": known.get("tokens_per_s") if down is None else None,
        "loss": known.get("loss") if down is None else None,
        "note": ", ".join(note for note in notes if note) if down is None else down,
    }
