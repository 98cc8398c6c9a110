"""Elastic data-parallel training with a real torchrun: a killed worker takes all back to the last checkpoint."""

from __future__ import annotations

import pytest

from atoll.chaos.faults import Target
from atoll.chaos.plan import Plan, PlannedFault, draw_plan
from atoll.chaos.scenario import load_scenario
from benchmarks.elastic import _pids, learner_kills, read_steps, summarize, train_elastic
from tests.reference.small_jobs import load_corpus, silent_view, small_settings, small_text


def test_elastic_training_gets_only_kills_of_initial_learners():
    plan = draw_plan(load_scenario("storm-heavy"), 3, 90.0)
    kills = [(fault.target.kind, fault.target.number) for fault in plan.faults if fault.fault == "kill"]
    assert {("learner", 4), ("syncer", 0)} < set(kills)
    assert [fault.target.number for fault in learner_kills(plan, 3)] == [1, 3, 3]


def test_repeated_step_counts_once_in_goodput():
    def line(at, step):
        return {"at": at, "step": step, "took_s": 1.0}

    lines = [line(1.0, 1), line(2.0, 2), line(7.0, 2), line(8.0, 3)]  # step 2 was lost; no worker stepped from 2 to 6
    result = summarize([lines, lines])
    assert result == {"wall_s": 8.0, "goodput": 3 / 8, "worst_pause_s": 5.0, "standing_s": 4.0, "steps_again": 2}
    assert summarize([[], []])["goodput"] == 0.0


@pytest.mark.long
def test_killed_worker_takes_all_workers_back_to_checkpoint(tmp_path):
    settings = small_settings(small_text(tmp_path / "text"), tokens=2 * 2 * 16 * 60, step_time_s=0.05)
    kill = PlannedFault(1, 1.0, "kill", Target("learner", 2), {"downtime": 3.0}, "schedule 1")
    cut = PlannedFault(2, 1.5, "cut", Target("link", 1), {"for": 3.0, "direction": "both"}, "schedule 2")
    plan = Plan("test", "A test.", 1, 3.0, 2, (kill, cut), 0)
    run = tmp_path / "run"
    run.mkdir()
    view, lines = silent_view()
    result = train_elastic(settings, plan, run, view, load_corpus(settings))
    assert result["finished"], (run / "ddp/torchrun.log").read_text()
    assert result["kills"] == result["planned_kills"] == 1
    assert result["loss"] < 5.6
    steps = read_steps(run / "ddp", 2)
    for worker in steps:
        assert {line["step"] for line in worker} == set(range(1, 61))
        assert {line["restart"] for line in worker} == {0, 1}
    assert result["steps_again"] > 10  # there was no checkpoint yet
    assert result["worst_pause_s"] > 0.5  # of the survivor too
    assert result["goodput"] < 0.9
    assert "worker 2 was killed" in lines.getvalue()
    assert _pids(run / "ddp", 2) == []
