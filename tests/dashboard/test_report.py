"""Tests of `atoll report --html`: one self-contained page, for one run or for several."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from atoll.cli.main import main
from atoll.dashboard.report_page import ReportedRun, render_report
from atoll.dashboard.run_history import RunHistory
from atoll.sim.check_tapes import CheckResult
from atoll.sim.checkers import InvariantViolationError
from tests.tiny_run import TinyRun, eventful_run

VOID = frozenset({"meta", "line", "rect", "path", "circle", "br"})


class Parsed(HTMLParser):
    """Parser that checks that every tag is closed in order, and collects tags and text."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    saved = TinyRun(learners=2).run_until(30.0).save(tmp_path_factory.mktemp("other") / "second")
    (saved / "config.json").write_text(json.dumps({"learners": 2, "data": "<script>alert(1)</script>"}))
    return saved


def test_report_of_one_run_is_self_contained(run, tmp_path, capsys):
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--html", str(file)]) == 0
    text = file.read_text()
    parsed = Parsed(text)
    assert not re.search(r"https?://|src=|@import|url\(", text), "no external resource"
    assert "script" not in parsed.tags
    for word in ("All protocol invariants hold", "restarted: incarnation 2", "Timeline", "Curves", "training"):
        assert word in parsed.text, word
    assert "invariants" in capsys.readouterr().out


def test_report_compares_runs_and_escapes_hostile_text(run, other, tmp_path, capsys):
    file = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--html", str(file), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["runs"]) == {"first", "second"}
    assert figures["runs"]["first"]["state"] == "finished"
    assert figures["runs"]["second"]["state"] == "running"
    parsed = Parsed(file.read_text())
    assert "2 runs compared" in parsed.text
    assert "<script>alert(1)</script>" in parsed.text
    assert "script" not in parsed.tags


def test_report_defines_every_color(run):
    history = RunHistory(run)
    while history.update():
        pass
    text = render_report([ReportedRun("first", history, None)])
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"training", "gone", "line"} <= used <= set(re.findall(r"--(\w+):", text))


def test_report_shows_violated_invariant(run):
    history = RunHistory(run)
    while history.update():
        pass
    violation = InvariantViolationError("exactly-once", "version 3 has a contribution of version 2", None, None)
    text = render_report([ReportedRun("first", history, CheckResult(100, True, [], violation, []))])
    words = Parsed(text).text
    assert "invariant violated: exactly-once: version 3 has a contribution of version 2" in words
    assert "invariants hold" not in words


def test_report_names_equal_runs_by_path(run, tmp_path, capsys):
    again = eventful_run().save(tmp_path / "first")
    assert main(["report", str(run), str(again), "--no-check", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {str(run), str(again)}


def test_report_fails_if_file_is_not_writable(run, tmp_path, capsys):
    assert main(["report", str(run), "--no-check", "--html", str(tmp_path / "no" / "such.html")]) != 0
    assert "no" in capsys.readouterr().err
