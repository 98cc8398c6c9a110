"""Progress of a job for the terminal, from the syncer's status and the state of the job's own processes.

A baseline has no syncer. Its job makes a status with the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from atoll.tape.timeline import STATE_LABELS


@dataclass(slots=True)
class JobProgress:
    """Facts that the job adds to the status: its own processes, its clock and its events."""

    title: str
    learners: int
    elapsed_s: float = 0.0
    goodput: float | None = None
    down: dict[int, str] = field(default_factory=dict)  # cause, by learner whose process does not run
    news: list[str] = field(default_factory=list)  # events as sentences, newest last


class GoodputMeter:
    """Goodput so far: time that learners trained over time of all planned learners, since the first one trained."""

    def __init__(self, learners: int) -> None:
        self._learners = learners
        self._started_at: float | None = None
        self._last = 0.0
        self._trained_s = 0.0
        self._training = 0

    def update(self, now: float, training: int) -> float | None:
        """Return the goodput until `now`, or None before the first learner trains.

        Args:
            training: number of learners that train from now on. The number of the previous call counts until now.
        """
        if self._started_at is None:
            if not training:
                return None
            self._started_at = self._last = now
        self._trained_s += self._training * (now - self._last)
        self._last, self._training = now, min(training, self._learners)
        allocated_s = self._learners * (now - self._started_at)
        return self._trained_s / allocated_s if allocated_s > 0 else None


def training_count(status: Mapping[str, Any]) -> int:
    """Return the number of learners that train, including those without a recent message."""
    return sum(1 for each in status.get("learners", ()) if each.get("standing") in ("live", "suspect"))


def job_view(status: Mapping[str, Any], job: JobProgress) -> dict[str, Any]:
    """Return the input of `LiveView`: the fields of docs/dash.md that a status has."""
    learners: Sequence[Mapping[str, Any]] = status.get("learners", ())
    members = {int(each.get("learner", 0)): each for each in learners}
    count = max([job.learners, *members])  # more learners than planned may have joined
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
            "pulled": status.get("pulled"),
            "merged": status.get("merged"),
            "merges": status.get("merges"),
            "quorum": status.get("quorum"),
            "remaining_s": job.elapsed_s * (1.0 - progress) / progress if progress > 0.02 else None,
        },
        "islands": islands,
        "news": job.news,
    }


def _island(learner: int, member: Mapping[str, Any] | None, down: str | None) -> dict[str, Any]:
    member = member if member is not None else {}
    starts = member.get("incarnation", 1)
    notes = [f"link {member['link']}" if member.get("link") else "", f"start {starts}" if starts > 1 else ""]
    return {
        "learner": learner,
        "state": "gone" if down is not None else STATE_LABELS.get(member.get("standing", ""), "starting"),
        "step": member.get("step", 0),
        "tokens_per_s": member.get("tokens_per_s") if down is None else None,
        "loss": member.get("loss") if down is None else None,
        "note": ", ".join(note for note in notes if note) if down is None else down,
    }
