"""What the syncer reports about a run: the state of the core, metrics from learners, and the metric files.

docs/metrics.md describes the lines of those files. Nothing here makes a decision.
"""

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
    """Build the JSON status for `atoll status`, the dashboard and scripts. Every count is the core's."""
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
    counts = syncer.merged_contributions, max(1, view.merges - syncer.merges_before)
    return shared | {
        "stage": view.stage,
        "progress": view.progress,
        "merges": view.merges,
        "trained": view.trained,
        "alive": view.alive,
        "pulled": view.pulled,
        "merged": view.merged,
        "paused": view.paused,
        "quorum": view.quorum,
        "grace": view.grace_margin,
        "rounds_in_flight": view.rounds_in_flight,
        "flight_limit": view.flight_limit,
        "step_s": view.step_s,
        "quorum_s": view.quorum_s,
        "sync_s": view.sync_s,
        "contributions_per_merge": counts[0] / counts[1],
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
"""Metrics that a learner may report. Others are dropped. The displayed step is the core's, not this one."""


MAX_LISTED_SNAPSHOTS = 64

SNAPSHOT_STATES = {
    "snapshot-started": "being taken",
    "snapshot-requested": "being taken",
    "snapshot-durable": "durable",
    "snapshot-abandoned": "abandoned",
}
"""State of a snapshot, by reason code of the core."""


class SnapshotStatuses:
    """Status of the newest snapshots: state, last message, and messages about parts that were left out."""

    def __init__(self) -> None:
        self._statuses: dict[int, dict[str, Any]] = {}

    def record(self, reason: Reason) -> None:
        if reason.code == "snapshot-left-out":
            status = self._statuses.get(_expect_int(reason.args[1]))
            if status is not None:
                status["left_out"].append(str(reason))
        if reason.code not in SNAPSHOT_STATES:
            return
        number = _expect_int(reason.args[0])
        status = self._statuses.setdefault(number, {"snapshot": number, "left_out": []})
        status |= {"state": SNAPSHOT_STATES[reason.code], "said": str(reason)}
        while len(self._statuses) > MAX_LISTED_SNAPSHOTS:
            del self._statuses[next(iter(self._statuses))]

    def get(self, number: int) -> dict[str, Any] | None:
        return self._statuses.get(number)


def _expect_int(value: object) -> int:
    assert isinstance(value, int)
    return value


LEARNER_LINE_INTERVAL_S = 0.9
"""Minimum time between two metrics records of one learner, which reports about once per second."""

MAX_LISTED_CONTRIBUTIONS = 64
"""Maximum number of contributions that the metrics record of a merge lists. Their total count is always recorded."""


class SyncerMetrics:
    """Metrics of one syncer, used in its event loop. `at` is in seconds of the run's clock."""

    def __init__(self, run: Path, log: logging.Logger) -> None:
        self._writer = MetricsWriter(run, log)
        self._reported: dict[LearnerId, dict[str, Any]] = {}
        self._written_at: dict[LearnerId, float] = {}
        self.newest_merges: dict[FragmentId, MergeStats] = {}  # only versions that this process has made durable
        self.merge_s = 0.0  # total time of all merges in the merge thread
        self.merged_at: float | None = None  # newest merge, Unix time

    def learner_metrics(self, learner: LearnerId) -> dict[str, Any]:
        """Return the newest metrics that the learner has reported."""
        return self._reported.get(learner, {})

    def record_learner(self, at: float, learner: LearnerId, incarnation: Incarnation, figures: dict[str, Any]) -> None:
        self._reported[learner] = figures
        before = self._written_at.get(learner)
        if before is not None and at < before + LEARNER_LINE_INTERVAL_S:
            return
        self._written_at[learner] = at
        self._write("learner", learner, at, {"incarnation": incarnation, **figures})

    def record_merge(self, at: float, epoch: int, fragment: FragmentId, version: Version, stats: MergeStats) -> None:
        """Record the merge of a version that is now durable."""
        self.newest_merges[fragment] = stats
        self.merge_s += stats.merge_s
        self.merged_at = time.time()
        listed = {str(accepted.learner): accepted for accepted in stats.contributions[:MAX_LISTED_CONTRIBUTIONS]}
        total = math.fsum(accepted.weight for accepted in stats.contributions)
        line: dict[str, Any] = {
            "version": version,
            "epoch": epoch,
            "contributions": len(stats.contributions),
            "weights": {learner: _round_significant(accepted.weight / total) for learner, accepted in listed.items()},
            "norms": dict(zip(listed, map(_round_significant, stats.norms), strict=False)),
        }
        if any(scale < 1.0 for scale in stats.clip_factors):
            line["scales"] = dict(zip(listed, map(_round_significant, stats.clip_factors), strict=False))
        line |= {
            "delta_norm": _round_significant(stats.merged_norm),
            "cosine": _round_significant(stats.cosine),
            "momentum_norm": _round_significant(stats.momentum_norm),
            "step_norm": _round_significant(stats.step_norm),
            "quantisation_error": _round_significant(stats.quantization_error),
            "merge_s": _round_significant(stats.merge_s),
        }
        self._write("merge", fragment, at, line)

    def _write(self, kind: str, number: int, at: float, line: dict[str, Any]) -> None:
        subject = "fragment" if kind == "merge" else "learner"
        self._writer.write({"kind": kind, subject: number, "at": round(at, 3), "wall": round(time.time(), 3), **line})

    def close(self) -> None:
        self._writer.close()


def _round_significant(value: float | None) -> float | None:
    """Round to six significant digits. Return None for values that are not finite: JSON cannot represent them."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
