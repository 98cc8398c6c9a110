"""What the syncer measures at merges and what learners tell of themselves: kept, and written down for curves.

docs/metrics.md describes the lines. Nothing here decides anything.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from atoll.core.types import FragmentId, Incarnation, LearnerId, Version
from atoll.store.metrics_files import MetricsWriter
from atoll.tensors.syncer_fragment import MergeStats

LEARNER_EVERY_S = 0.9
"""Between two lines of one learner, which tells about once a second."""

MOST_LISTED = 64
"""Contributions of one merge that its line lists. Their number is always told."""


class SyncerMetrics:
    """One per syncer, used in its event loop. `at` is the run's clock."""

    def __init__(self, run: Path, log: logging.Logger) -> None:
        self._writer = MetricsWriter(run, log)
        self._told: dict[LearnerId, dict[str, Any]] = {}
        self._written_at: dict[LearnerId, float] = {}
        self.newest: dict[FragmentId, MergeStats] = {}  # of versions that this process has made durable
        self.merge_s = 0.0  # in the merge thread, all of them
        self.merged_at: float | None = None  # the newest one; unix time

    def of(self, learner: LearnerId) -> dict[str, Any]:
        """What it told last."""
        return self._told.get(learner, {})

    def told(self, at: float, learner: LearnerId, incarnation: Incarnation, figures: dict[str, Any]) -> None:
        self._told[learner] = figures
        before = self._written_at.get(learner)
        if before is not None and at < before + LEARNER_EVERY_S:
            return
        self._written_at[learner] = at
        self._write("learner", learner, at, {"incarnation": incarnation, **figures})

    def merged(self, at: float, epoch: int, fragment: FragmentId, version: Version, measured: MergeStats) -> None:
        """A version is durable."""
        self.newest[fragment] = measured
        self.merge_s += measured.merge_s
        self.merged_at = time.time()
        listed = {str(accepted.learner): accepted for accepted in measured.contributions[:MOST_LISTED]}
        total = math.fsum(accepted.weight for accepted in measured.contributions)
        told: dict[str, Any] = {
            "version": version,
            "epoch": epoch,
            "contributions": len(measured.contributions),
            "weights": {who: _short(accepted.weight / total) for who, accepted in listed.items()},
            "norms": dict(zip(listed, map(_short, measured.norms), strict=False)),
        }
        if any(scale < 1.0 for scale in measured.scales):
            told["scales"] = dict(zip(listed, map(_short, measured.scales), strict=False))
        told |= {
            "delta_norm": _short(measured.merged_norm),
            "cosine": _short(measured.cosine),
            "momentum_norm": _short(measured.momentum_norm),
            "step_norm": _short(measured.step_norm),
            "quantisation_error": _short(measured.left_out),
            "merge_s": _short(measured.merge_s),
        }
        self._write("merge", fragment, at, told)

    def _write(self, kind: str, number: int, at: float, told: dict[str, Any]) -> None:
        subject = "fragment" if kind == "merge" else "learner"
        self._writer.write({"kind": kind, subject: number, "at": round(at, 3), "wall": round(time.time(), 3), **told})

    def close(self) -> None:
        self._writer.close()


def _short(value: float | None) -> float | None:
    """Six digits: enough for any curve. What is not finite is nothing, as JSON has no word for it."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
