"""All outputs agree on the times of a run: report.json, the dashboard, `atoll watch` and the chaos verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from atoll.chaos.plan import Plan
from atoll.chaos.verdict import RunOutcome, evaluate_run
from atoll.cli.main import main
from atoll.core.protocol import StepTaken
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.view import view_at
from atoll.reference.job_settings import JobSettings
from atoll.reference.report import ModelEvaluation, decoupled_report
from atoll.tape.timeline import read_timeline
from tests.tiny_run import STEP_S, TinyRun

STOPPED_S, AWAY_S = 30.0, 20.0
JOINED_AT, LEFT_AT, END = 200.0, 260.0, 400.0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Learner 1 is stopped, learner 2 killed, learner 4 joins and is drained, then the run ends."""
    tiny = TinyRun().run_until(40.5)
    tiny.suspend(1, STOPPED_S)
    tiny.run_until(100.0)
    tiny.kill(2)
    tiny.run_until(100.0 + AWAY_S)
    tiny.start(2)
    tiny.run_until(JOINED_AT)
    tiny.start(4)
    tiny.run_until(LEFT_AT)
    tiny.request_control("drain", 4, "mira@head")
    tiny.run_until(END)
    tiny.finish()
    saved = tiny.run_until(END + 60.0).save(tmp_path_factory.mktemp("run") / "run")
    (saved / "config.json").write_text(json.dumps({"learners": 3}), encoding="utf-8")
    return saved


@pytest.fixture(scope="module")
def history(run):
    found = RunHistory(run)
    while found.update():
        pass
    return found


def test_outputs_agree_on_goodput_and_uptime(run, history, capsys):
    report = decoupled_report(run, JobSettings(learners=3), ModelEvaluation(2.0, 1, 5.0, "", 1), 0.0)
    verdict = evaluate_run(run, Plan("tiny", "A test.", 7, 60.0, 3, (), 0), {}, RunOutcome("relays"), 0.0)
    shown = view_at(history)
    assert main(["watch", str(run), "--json"]) == 0
    watched = json.loads(capsys.readouterr().out)
    for name in ("goodput", "uptime"):
        expected = getattr(report, name)
        assert getattr(verdict, name) == expected
        assert shown["headline"][name] == watched["headline"][name] == expected
    assert verdict.wall_s == report.wall_s
    islands = {each["learner"]: each["goodput"] for each in shown["islands"]}
    assert islands == {each.learner: each.goodput for each in report.islands}
    assert islands == {each.learner: each.goodput for each in verdict.islands}


def test_late_learner_is_allocated_from_its_join(history):
    late = history.reported_time_shares(4, END)
    assert late is not None
    assert late.allocated_s == pytest.approx(LEFT_AT - JOINED_AT, abs=3.0)
    assert late.goodput > 0.9


def test_stopped_time_reduces_goodput(history):
    shares = history.reported_time_shares(1, END)
    assert shares.stopped_s == pytest.approx(STOPPED_S, abs=STEP_S)  # minus the rest of the current step
    lost_s = STOPPED_S + AWAY_S
    known = sum(history.reported_time_shares(n, END).allocated_s for n in (1, 2, 3, 4))
    assert history.goodput(END) == pytest.approx(1.0 - lost_s / known, abs=0.01)
    split = view_at(history, END)["islands"][0]["time_split"]
    assert split["paused"] == shares.stopped_s
    assert sum(split.values()) == pytest.approx(shares.allocated_s)
    assert history.goodput(60.0) < 0.9, "also during the run"


def test_missing_expected_learner_reduces_goodput(run):
    timeline = read_timeline(run)
    with_three = timeline.goodput()
    timeline.expected_learners = 8  # 1 to 4 came
    with_eight = timeline.goodput()
    assert with_three is not None
    assert with_eight is not None
    assert with_eight < 0.55 * with_three


def test_permanently_slow_steps_are_not_stalls(tmp_path):
    """Steps of six times the old length count as stalls only until they are typical."""
    timeline = read_timeline(run_with_steps(tmp_path, [0.5] * 200 + [3.0] * 200))
    shares = timeline.time_shares(1)
    assert shares is not None
    assert 0.0 < shares.stopped_s <= 32 * 2.5
    assert shares.in_steps_s + shares.stopped_s == pytest.approx(700.0, abs=1.0)


def run_with_steps(where: Path, times_s: list[float]) -> Path:
    """Save the run of one learner with these step times."""
    tiny = TinyRun(learners=1, quorum=1).run_until(len(times_s) * STEP_S + 1.0)
    ends, at = [], 1.0
    for step_s in times_s:
        at += step_s
        ends.append(at)
    entries, number = [], 0
    for entry in tiny.entries:
        if entry.actor.learner != 1:
            continue
        if isinstance(entry.event, StepTaken):
            step_time_s = times_s[min(number, len(times_s) - 1)]
            entry = entry._replace(event=structs.replace(entry.event, step_time_s=step_time_s))
            number += 1
        entries.append(entry._replace(at=1.0 if not number else ends[min(number, len(ends)) - 1]))
    tiny.entries = entries
    tiny.headers = {actor: header for actor, header in tiny.headers.items() if actor.learner == 1}
    return tiny.save(where)
