"""Alert rules: each raises an alert when it should, with a readable text, and can be disabled."""

from __future__ import annotations

import json
import os
import time

import pytest

from atoll.dashboard.alerts import AlertRules, evaluate_alerts
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.view import view_at
from tests.tiny_run import TinyRun


def read_history(run, rules=None):
    found = RunHistory(run, rules)
    while found.update():
        pass
    return found


def rules_of(history, at=None):
    return {(each["rule"], each["subject"]) for each in view_at(history, at)["alerts"]}


def test_healthy_run_raises_no_alert(tmp_path):
    history = read_history(TinyRun().run_until(60.0).save(tmp_path))
    assert rules_of(history) == set()
    assert rules_of(history, 30.0) == set()


def test_lost_learner_raises_learner_down(tmp_path):
    run = TinyRun().run_until(10.0)
    run.kill(2)
    history = read_history(run.run_until(200.0).save(tmp_path))
    assert rules_of(history) == {("learner-down", "learner 2")}
    assert rules_of(history, 20.0) == set(), "below the limit"
    assert rules_of(read_history(tmp_path, AlertRules(down_s=0.0))) == set(), "disabled"


def test_missing_merges_raise_no_merge(tmp_path):
    """All learners but one are dead, and the quorum is two."""
    run = TinyRun().run_until(10.0)
    run.kill(2)
    run.kill(3)
    history = read_history(run.run_until(100.0).save(tmp_path), AlertRules(down_s=0.0))
    assert rules_of(history) == {("no-merge", "the run")}
    assert "no merge for" in view_at(history)["alerts"][0]["text"]
    assert rules_of(history, 12.0) == set()


def test_unavailable_shard_raises_one_alert_for_its_fragments(tmp_path):
    run = TinyRun().run_until(10.5)
    run.disconnect_shard(0, 2)
    run.run_until(100.0)
    run.reconnect_shard(0, 2)
    history = read_history(run.run_until(120.0).save(tmp_path))
    shown = view_at(history, 99.0)
    assert [each["unavailable"] for each in shown["fragments"]] == [True, False, True]
    assert shown["fragments"][0]["reason"] == "its shard is unavailable: connection reset by peer"
    assert shown["fragments"][1]["age_s"] < 10.0, "the other fragments are merged"
    assert rules_of(history, 99.0) == {("shard-unavailable", "fragment 0")}
    (alert,) = shown["alerts"]
    assert alert["text"].startswith("no merge of fragments 0, 2 for 8")
    assert alert["text"].endswith("its shard is unavailable: connection reset by peer")
    assert rules_of(history, 60.0) == set(), "below the limit"
    assert rules_of(history) == set(), "the shard is available again"
    assert [each["unavailable"] for each in view_at(history)["fragments"]] == [False] * 3
    assert rules_of(read_history(tmp_path, AlertRules(shard_unavailable_s=0.0)), 99.0) == set(), "disabled"


def test_learner_without_connection_raises_learner_disconnected(tmp_path):
    run = TinyRun().run_until(10.0)
    run.kill(0)
    run.run_until(300.0)
    history = read_history(run.save(tmp_path))
    assert {rule for rule, _ in rules_of(history)} >= {"learner-disconnected"}


def test_rising_loss_raises_loss_spike(tmp_path):
    history = read_history(TinyRun().run_until(120.0).save(tmp_path))
    for at, loss in ((10.0, 2.0), (40.0, 1.9), (100.0, 3.1)):
        history.metrics._add("loss.learner.3", at, loss)
    assert rules_of(history) == {("loss-spike", "learner 3")}
    assert rules_of(history, 90.0) == set()


def test_unbalanced_ledger_raises_ledger(tmp_path):
    history = read_history(TinyRun().run_until(20.0).save(tmp_path))
    sample = history.sample_at(None)
    row = sample.view.ledger[0]._replace(merged=sample.view.ledger[0].merged + 1)
    unbalanced = sample._replace(view=sample.view._replace(ledger=(row, *sample.view.ledger[1:])))
    assert [each.rule for each in evaluate_alerts(history, 20.0, unbalanced, [], False)] == ["ledger"]
    assert evaluate_alerts(history, 20.0, sample, [], False) == []


def test_tapes_without_growth_raise_stale(tmp_path):
    run = TinyRun().run_until(20.0).save(tmp_path)
    (run / "store").mkdir()
    (run / "store" / "run.json").write_text(
        json.dumps({"value": {"founded_at": 1.0e9}})
    )  # a wall clock that is off by years
    assert rules_of(read_history(run)) == set(), "its tapes were written just now"
    for tape in (run / "tapes").iterdir():
        os.utime(tape, (2.0e9 - 1e6, time.time() - 1e6))
    history = read_history(run)
    assert rules_of(history) == {("stale", "syncer")}
    assert view_at(history)["age_s"] == pytest.approx(1e6, abs=60.0)
    with open(next((run / "tapes").glob("syncer-*")), "ab") as file:
        file.write(next_tape_line(run))
    while history.update():
        pass
    assert rules_of(history) == set(), "the tape has grown, whatever the clock of a host is"


def next_tape_line(run):
    longer = TinyRun().run_until(21.0).save(run / "longer")
    name = "tapes/syncer-e1.tape"
    return (longer / name).read_bytes()[(run / name).stat().st_size :]


def test_rules_are_read_from_file(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text("down_s = 30\nloss_spike = 2.5\n")
    assert AlertRules.load(file) == AlertRules(down_s=30.0, loss_spike=2.5)
    for text, message in (
        ("gone = 3", "unknown rule 'gone'"),
        ("down_s = 'x'", "down_s is 'x'"),
        ("down_s = -1", "at least 0"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            AlertRules.load(file)
