"""Tests of `atoll watch`: the view in a terminal, in a log and as JSON."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from atoll.cli.main import main
from atoll.dashboard.terminal import STATE_STYLES
from tests.tiny_run import TinyRun, eventful_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


def test_watch_shows_finished_run_once(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["watch", str(run)]) == 0
    output = capsys.readouterr().out
    assert "finished" in output
    assert "trained" in output
    assert output.count("left") >= 3


def test_watch_marks_past_time(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["watch", str(run), "--at", "13"]) == 0
    output = capsys.readouterr().out
    assert "past; fragments and ledger from 0." in output, "samples are half a second apart"
    line = next(line for line in output.splitlines() if line.startswith("2 "))
    assert "lost" in line
    assert STATE_STYLES["gone"][1] in line, "a state has a letter too, for readers who do not see its color"


def test_watch_marks_unavailable_fragments_with_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    tiny = TinyRun().run_until(10.5)
    tiny.disconnect_shard(0, 2)
    assert main(["watch", str(tiny.run_until(20.0).save(tmp_path)), "--at", "19"]) == 0
    lines = capsys.readouterr().out.splitlines()
    letters = next(line.split()[-1] for line in lines if line.startswith("fragments"))
    assert (letters[0], letters[2]) == ("×", "×")
    assert letters[1] != "×"
    assert "× 2 of 3: its shard is unavailable: connection reset by peer" in "\n".join(lines)


def test_watch_json_is_the_view_of_the_page(run, capsys):
    assert main(["watch", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stage"] == "finished"
    assert len(shown["islands"]) == 3


def test_rules_are_read_from_file(tmp_path, capsys):
    tiny = TinyRun().run_until(10.0)
    tiny.kill(2)
    run = tiny.run_until(60.0).save(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    for limit_s, found in ((30.0, ["learner-down"]), (90.0, [])):
        rules.write_text(f"down_s = {limit_s}\n")
        assert main(["watch", str(run), "--json", "--rules", str(rules)]) == 0
        assert [each["rule"] for each in json.loads(capsys.readouterr().out)["alerts"]] == found
    rules.write_text("gone = 3\n")
    assert main(["watch", str(run), "--rules", str(rules)]) == 2
    assert "unknown rule 'gone'" in capsys.readouterr().err


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_watch_fits_terminal_width(run, width):
    """Run in a pseudo-terminal: no line is wider than the terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": width, "LINES": "40", "TERM": "xterm"}
    command = [sys.executable, "-m", "atoll", "watch", str(run), "--once"]
    done = subprocess.run(command, stdin=theirs, stdout=subprocess.PIPE, env=environment, timeout=300, check=True)
    os.close(ours)
    os.close(theirs)
    lines = done.stdout.decode().splitlines()
    assert max(map(len, lines)) <= int(width)


def test_watch_refuses_folder_without_run(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) != 0
    assert "not a run directory" in capsys.readouterr().err
