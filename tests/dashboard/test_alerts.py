"""Every rule fires when it should, says so in words, and can be switched off."""

from __future__ import annotations

import json
import os
import time

import pytest

from atoll.dashboard.alerts import AlertRules, evaluate_alerts
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.view import view_at
from tests.tiny_run import TinyRun


def pictured(run, rules=None):
    found = RunHistory(run, rules)
    while found.update():
        pass
    return found


def rules_of(picture, at=None):
    return {(each["rule"], each["subject"]) for each in view_at(picture, at)["alerts"]}


def test_a_healthy_run_raises_nothing(tmp_path):
    picture = pictured(TinyRun().run_until(60.0).save(tmp_path))
    assert rules_of(picture) == set()
    assert rules_of(picture, 30.0) == set()


def test_an_island_that_stays_away(tmp_path):
    run = TinyRun().run_until(10.0)
    run.kill(2)
    picture = pictured(run.run_until(200.0).save(tmp_path))
    assert rules_of(picture) == {("learner-down", "learner 2")}
    assert rules_of(picture, 20.0) == set(), "not yet for long"
    assert rules_of(pictured(tmp_path, AlertRules(down_s=0.0))) == set(), "switched off"


def test_no_merge_for_long(tmp_path):
    """All learners but one are dead, and the quorum is two."""
    run = TinyRun().run_until(10.0)
    run.kill(2)
    run.kill(3)
    picture = pictured(run.run_until(100.0).save(tmp_path), AlertRules(down_s=0.0))
    assert rules_of(picture) == {("no-merge", "the run")}
    assert "no merge for" in view_at(picture)["alerts"][0]["text"]
    assert rules_of(picture, 12.0) == set()


def test_fragments_that_are_away_with_their_shard(tmp_path):
    run = TinyRun().run_until(10.5)
    run.disconnect_shard(0, 2)
    run.run_until(100.0)
    run.reconnect_shard(0, 2)
    picture = pictured(run.run_until(120.0).save(tmp_path))
    shown = view_at(picture, 99.0)
    assert [each["unavailable"] for each in shown["fragments"]] == [True, False, True]
    assert shown["fragments"][0]["reason"] == "its shard is unavailable: connection reset by peer"
    assert shown["fragments"][1]["age_s"] < 10.0, "the others go on"
    assert rules_of(picture, 99.0) == {("shard-unavailable", "fragment 0")}
    (alert,) = shown["alerts"]
    assert alert["text"].startswith("no merge of fragments 0, 2 for 8")
    assert alert["text"].endswith("its shard is unavailable: connection reset by peer")
    assert rules_of(picture, 60.0) == set(), "not yet for long"
    assert rules_of(picture) == set(), "it is back"
    assert [each["unavailable"] for each in view_at(picture)["fragments"]] == [False] * 3
    assert rules_of(pictured(tmp_path, AlertRules(shard_unavailable_s=0.0)), 99.0) == set(), "switched off"


def test_an_island_that_trains_without_a_link(tmp_path):
    run = TinyRun().run_until(10.0)
    run.kill(0)
    run.run_until(300.0)
    picture = pictured(run.save(tmp_path))
    assert {rule for rule, _ in rules_of(picture)} >= {"learner-disconnected"}


def test_a_loss_that_jumps(tmp_path):
    picture = pictured(TinyRun().run_until(120.0).save(tmp_path))
    for at, loss in ((10.0, 2.0), (40.0, 1.9), (100.0, 3.1)):
        picture.metrics._add("loss.learner.3", at, loss)
    assert rules_of(picture) == {("loss-spike", "learner 3")}
    assert rules_of(picture, 90.0) == set()


def test_books_that_do_not_balance(tmp_path):
    picture = pictured(TinyRun().run_until(20.0).save(tmp_path))
    sample = picture.sample_at(None)
    wrong = sample.view.ledger[0]._replace(merged=sample.view.ledger[0].merged + 1)
    broken = sample._replace(view=sample.view._replace(ledger=(wrong, *sample.view.ledger[1:])))
    assert [each.rule for each in evaluate_alerts(picture, 20.0, broken, [], False)] == ["ledger"]
    assert evaluate_alerts(picture, 20.0, sample, [], False) == []


def test_a_run_that_is_written_no_more(tmp_path):
    run = TinyRun().run_until(20.0).save(tmp_path)
    (run / "store").mkdir()
    (run / "store" / "run.json").write_text(json.dumps({"value": {"founded_at": 1.0e9}}))  # a clock that is years off
    assert rules_of(pictured(run)) == set(), "its tapes were written just now"
    for tape in (run / "tapes").iterdir():
        os.utime(tape, (2.0e9 - 1e6, time.time() - 1e6))
    picture = pictured(run)
    assert rules_of(picture) == {("stale", "syncer")}
    assert view_at(picture)["age_s"] == pytest.approx(1e6, abs=60.0)
    with open(next((run / "tapes").glob("syncer-*")), "ab") as file:
        file.write(another_line_of(run))
    while picture.update():
        pass
    assert rules_of(picture) == set(), "it has grown, whatever anybody's clock says"


def another_line_of(run):
    longer = TinyRun().run_until(21.0).save(run / "longer")
    name = "tapes/syncer-e1.tape"
    return (longer / name).read_bytes()[(run / name).stat().st_size :]


def test_rules_come_from_a_file(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text("down_s = 30\nloss_spike = 2.5\n")
    assert AlertRules.load(file) == AlertRules(down_s=30.0, loss_spike=2.5)
    for text, said in (
        ("gone = 3", "no rule 'gone'"),
        ("down_s = 'x'", "down_s is 'x'"),
        ("down_s = -1", "number from 0"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            AlertRules.load(file)
