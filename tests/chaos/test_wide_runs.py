"""Short form of the wide-area network benchmarks: no learner on a slow, long, lossy link is suspected."""

from __future__ import annotations

import os

import pytest

from atoll.chaos import netns
from benchmarks.bench_links import measure_cell
from benchmarks.wide_runs import ByteCounts, LinkParameters, ObservedRun, StepSample, paced_job, read_step_samples
from tests.reference.small_jobs import small_text


@pytest.mark.long
@pytest.mark.needs_root
def test_learners_on_slow_lossy_links_merge_and_are_not_suspected(tmp_path):
    small = paced_job(
        "decoupled",
        learners=2,
        model="100k",
        context=16,
        data=str(small_text(tmp_path / "text")),
        step_time_s=0.05,
        every_steps=8,
        fragments=4,
        codec="f32",  # 480 KB in 0.4 s: the capacity of the link
    )
    shape = LinkParameters(10e6, delay_s=0.15, loss=0.01)  # more cells: benchmarks/bench_links.py
    row = measure_cell("test", small, shape, 6.0, tmp_path / "run")
    assert row["broken"] == []
    assert set(row["delivered"]) == {1, 2}
    assert row["effective_h"] > 8  # the link is too slow for the planned H
    assert [name for name in netns.list_namespaces() if f"-{os.getpid()}-" in name] == []


class RecordedRun(ObservedRun):
    """A run with given step samples."""

    samples: tuple[StepSample, ...] = ()

    def step_samples(self, learner: int) -> list[StepSample]:
        return [sample for sample in self.samples if sample.at >= self.shaped_at]


def recorded_run(tmp_path, *samples: tuple[float, int], shaped_at: float = 0.0) -> ObservedRun:
    run = RecordedRun(tmp_path, learners=1, shaped_at=shaped_at)
    run.samples = tuple(StepSample(*sample) for sample in samples)
    return run


def test_steps_count_in_whole_periods_after_links_are_shaped(tmp_path):
    run = recorded_run(tmp_path, *((10.0 + n, n) for n in range(60)), shaped_at=15.0)
    assert run.span(skip=2) == {1: (StepSample(17.0, 7), StepSample(69.0, 59))}
    assert run.span(skip=0, whole=24) == {1: (StepSample(15.0, 5), StepSample(63.0, 53))}
    assert run.step_s(skip=0, whole=24) == 1.0


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="too few steps"):
        recorded_run(tmp_path, (1.0, 1), (2.0, 2)).step_s(skip=0, whole=24)
    with pytest.raises(RuntimeError, match="took no step"):
        recorded_run(tmp_path, (1.0, 1), shaped_at=5.0).step_s(skip=0)


def test_bytes_and_steps_cover_the_same_time(tmp_path):
    run = recorded_run(tmp_path, (10.0, 1), (20.0, 11))
    run.counts = [(9.0, [ByteCounts(0, 0)]), (11.0, [ByteCounts(200, 20)]), (19.0, [ByteCounts(1000, 20)])]
    run.counts.append((21.0, [ByteCounts(1200, 40)]))
    assert run.bytes_per_s(skip=0) == ByteCounts(100, 2)


def test_line_of_several_steps_is_split_unless_learner_waited():
    lines = [(10.0, 2), (11.0, 4), (22.0, 6), (22.5, 7)]
    found = read_step_samples([{"at": at, "step": step, "step_s": 0.5} for at, step in lines])
    assert found == [
        StepSample(10.0, 2),
        StepSample(10.5, 3),
        StepSample(11.0, 4),
        StepSample(22.0, 6),
        StepSample(22.5, 7),
    ]
