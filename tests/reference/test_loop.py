"""What an island writes down about itself: a disk that is full does not end its training."""

from __future__ import annotations

import json
import resource

from atoll.reference.loop import InnerStep, LearnerMetricsWriter, metrics_path, newest_metrics, read_metrics

STEP = InnerStep(2.0, 32, 0.01, 0.02, 0.05)
LIMIT = 1000


def test_lines_that_do_not_fit_are_left_out_and_training_goes_on(tmp_path):
    """A limit on the size of files stands for the full disk: the line that meets it is cut, the next ones fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LearnerMetricsWriter(tmp_path, 3, start=1) as metrics:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            for _ in range(20):
                metrics.record_step(STEP)
                metrics.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert metrics_path(tmp_path, 3).stat().st_size == LIMIT  # it was full, in the middle of a line
        before = read_metrics(tmp_path, 3)
        newest = newest_metrics(tmp_path, 3)
        metrics.record_step(STEP)
    lines = read_metrics(tmp_path, 3)
    assert newest == before[-1]
    assert lines[:-1] == before
    assert lines[-1]["step"] == 21
    assert newest_metrics(tmp_path, 3) == lines[-1]


def test_a_line_that_is_still_being_written_is_not_read(tmp_path):
    with LearnerMetricsWriter(tmp_path, 1, start=1) as metrics:
        metrics.record_step(STEP)
    with open(metrics_path(tmp_path, 1), "ab") as file:
        file.write(json.dumps({"step": 2}).encode()[:-3])
    assert [line["step"] for line in read_metrics(tmp_path, 1)] == [1]
    found = newest_metrics(tmp_path, 1)
    assert found is not None
    assert found["step"] == 1
