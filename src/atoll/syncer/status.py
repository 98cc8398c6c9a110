"""What the syncer shows of a run: the core's own view, what learners tell of themselves, and the metrics that it writes
(docs/metrics.md describes their lines). Nothing here decides anything."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.reasons import Reason
from atoll.core.types import FragmentId, Incarnation, LearnerId, Version
from atoll.store.metrics_files import MetricsWriter
from atoll.tensors.syncer_fragment import MergeStats

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess


def build_status(syncer: SyncerProcess) -> dict[str, Any]:
    """For the live view and for scripts; every count is the core's."""
    shared = {
        "run": syncer.settings.config.run_id,
        "epoch": syncer.store.epoch,
        "founded": syncer.core is not None,
        "wall_s": syncer.clock.now() if syncer.core is not None else 0.0,
        "bytes": dict(zip(("up", "down"), syncer.traffic, strict=True)),
        "refused": dict(syncer.refused),
        "halted": syncer.halt_reason,
    }
    if syncer.core is None:
        return shared | {"stage": "waiting for a model", "progress": 0.0, "merges": 0, "trained": 0, "learners": []}
    view = syncer.core.view()
    learners = [
        syncer.metrics.learner_metrics(member.learner)
        | {
            "learner": member.learner,
            "incarnation": member.incarnation,
            "standing": member.state,
            "step": member.step,
            "strikes": member.strikes,
            "reason": member.reason,
            "link": "up" if any(key[0] == member.learner for key in syncer.links) else "down",
        }
        for member in view.members
    ]
    here = syncer.merged_contributions, max(1, view.merges - syncer.merges_before)
    return shared | {
        "stage": view.stage,
        "progress": view.progress,
        "merges": view.merges,
        "trained": view.trained,
        "alive": view.alive,
        "asked": view.asked,
        "merged": view.merged,
        "paused": view.paused,
        "quorum": view.quorum,
        "grace": view.grace_margin,
        "rounds_in_flight": view.rounds_in_flight,
        "flight_limit": view.flight_limit,
        "step_s": view.step_s,
        "quorum_s": view.quorum_s,
        "sync_s": view.sync_s,
        "contributions_per_merge": here[0] / here[1],
        "fragments": [fragment._asdict() for fragment in view.fragments],
        "learners": learners,
        "ledger": [line._asdict() for line in view.ledger],
        "leases": view.leases._asdict(),
        "ignored": view.ignored,
    }


LEARNER_METRICS = (
    "loss",
    "step",
    "tokens",
    "tokens_per_s",
    "step_s",
    "boundary_s",
    "bytes_up",
    "bytes_down",
    "goodput",
)
"""What a learner may tell of itself. Anything else that it sends is not shown; the step that is shown is the core's."""


MAX_LISTED_SNAPSHOTS = 64

SNAPSHOT_STATES = {
    "snapshot-started": "being taken",
    "snapshot-requested": "being taken",
    "snapshot-durable": "durable",
    "snapshot-abandoned": "abandoned",
}
"""By the reason code of the core."""


class SnapshotStatuses:
    """What became of the newest snapshots, for those who asked for one: the state, and the last sentence about it;
    `left_out` are sentences too."""

    def __init__(self) -> None:
        self._statuses: dict[int, dict[str, Any]] = {}

    def record(self, reason: Reason) -> None:
        if reason.code == "snapshot-left-out":
            found = self._statuses.get(_expect_int(reason.args[1]))
            if found is not None:
                found["left_out"].append(str(reason))
        if reason.code not in SNAPSHOT_STATES:
            return
        number = _expect_int(reason.args[0])
        known = self._statuses.setdefault(number, {"snapshot": number, "left_out": []})
        known |= {"state": SNAPSHOT_STATES[reason.code], "said": str(reason)}
        while len(self._statuses) > MAX_LISTED_SNAPSHOTS:
            del self._statuses[next(iter(self._statuses))]

    def get(self, number: int) -> dict[str, Any] | None:
        return self._statuses.get(number)


def _expect_int(value: object) -> int:
    assert isinstance(value, int)
    return value


LEARNER_LINE_INTERVAL_S = 0.9
"""Between two lines of one learner, which tells about once a second."""

MAX_LISTED_CONTRIBUTIONS = 64
"""Contributions of one merge that its line lists. Their number is always told."""


class SyncerMetrics:
    """One per syncer, used in its event loop. `at` is the run's clock."""

    def __init__(self, run: Path, log: logging.Logger) -> None:
        self._writer = MetricsWriter(run, log)
        self._reported: dict[LearnerId, dict[str, Any]] = {}
        self._written_at: dict[LearnerId, float] = {}
        self.newest_merges: dict[FragmentId, MergeStats] = {}  # of versions that this process has made durable
        self.merge_s = 0.0  # in the merge thread, all of them
        self.merged_at: float | None = None  # the newest one; unix time

    def learner_metrics(self, learner: LearnerId) -> dict[str, Any]:
        """What it told last."""
        return self._reported.get(learner, {})

    def record_learner(self, at: float, learner: LearnerId, incarnation: Incarnation, figures: dict[str, Any]) -> None:
        self._reported[learner] = figures
        before = self._written_at.get(learner)
        if before is not None and at < before + LEARNER_LINE_INTERVAL_S:
            return
        self._written_at[learner] = at
        self._write("learner", learner, at, {"incarnation": incarnation, **figures})

    def record_merge(self, at: float, epoch: int, fragment: FragmentId, version: Version, stats: MergeStats) -> None:
        """A version is durable."""
        self.newest_merges[fragment] = stats
        self.merge_s += stats.merge_s
        self.merged_at = time.time()
        listed = {str(accepted.learner): accepted for accepted in stats.contributions[:MAX_LISTED_CONTRIBUTIONS]}
        total = math.fsum(accepted.weight for accepted in stats.contributions)
        told: dict[str, Any] = {
            "version": version,
            "epoch": epoch,
            "contributions": len(stats.contributions),
            "weights": {who: _round_significant(accepted.weight / total) for who, accepted in listed.items()},
            "norms": dict(zip(listed, map(_round_significant, stats.norms), strict=False)),
        }
        if any(scale < 1.0 for scale in stats.clip_factors):
            told["scales"] = dict(zip(listed, map(_round_significant, stats.clip_factors), strict=False))
        told |= {
            "delta_norm": _round_significant(stats.merged_norm),
            "cosine": _round_significant(stats.cosine),
            "momentum_norm": _round_significant(stats.momentum_norm),
            "step_norm": _round_significant(stats.step_norm),
            "quantisation_error": _round_significant(stats.quantization_error),
            "merge_s": _round_significant(stats.merge_s),
        }
        self._write("merge", fragment, at, told)

    def _write(self, kind: str, number: int, at: float, told: dict[str, Any]) -> None:
        subject = "fragment" if kind == "merge" else "learner"
        self._writer.write({"kind": kind, subject: number, "at": round(at, 3), "wall": round(time.time(), 3), **told})

    def close(self) -> None:
        self._writer.close()


def _round_significant(value: float | None) -> float | None:
    """Six digits: enough for any curve. What is not finite is nothing, as JSON has no word for it."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
