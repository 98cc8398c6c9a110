"""Tests of the metrics of a learner: a full disk does not stop training, and incomplete lines are not read."""

from __future__ import annotations

import json
import resource

from atoll.reference.loop import InnerStep, LearnerMetricsWriter, metrics_path, newest_metrics, read_metrics

STEP = InnerStep(2.0, 32, 0.01, 0.02, 0.05)
LIMIT = 1000


def test_metrics_lines_on_a_full_disk_are_lost_and_training_continues(tmp_path):
    """RLIMIT_FSIZE simulates the full disk: one line is cut at the limit, and later writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LearnerMetricsWriter(tmp_path, 3, start=1) as metrics:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            for _ in range(20):
                metrics.record_step(STEP)
                metrics.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert metrics_path(tmp_path, 3).stat().st_size == LIMIT  # the last line is incomplete
        before = read_metrics(tmp_path, 3)
        newest = newest_metrics(tmp_path, 3)
        metrics.record_step(STEP)
    lines = read_metrics(tmp_path, 3)
    assert newest == before[-1]
    assert lines[:-1] == before
    assert lines[-1]["step"] == 21
    assert newest_metrics(tmp_path, 3) == lines[-1]


def test_incomplete_metrics_line_is_not_read(tmp_path):
    with LearnerMetricsWriter(tmp_path, 1, start=1) as metrics:
        metrics.record_step(STEP)
    with open(metrics_path(tmp_path, 1), "ab") as file:
        file.write(json.dumps({"step": 2}).encode()[:-3])
    assert [line["step"] for line in read_metrics(tmp_path, 1)] == [1]
    found = newest_metrics(tmp_path, 1)
    assert found is not None
    assert found["step"] == 1
