"""`atoll report`: one page that stands by itself, for a run or for several."""

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
    """Every tag is closed in order; words and tags are kept."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
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
        self.words += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    saved = TinyRun(learners=2).run_until(30.0).save(tmp_path_factory.mktemp("other") / "second")
    (saved / "config.json").write_text(json.dumps({"learners": 2, "data": "<script>alert(1)</script>"}))
    return saved


def test_a_page_of_one_run_stands_by_itself(run, tmp_path, capsys):
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--html", str(file)]) == 0
    text = file.read_text()
    parsed = Parsed(text)
    assert not re.search(r"https?://|src=|@import|url\(", text), "nothing from elsewhere"
    assert "script" not in parsed.tags
    for word in ("Every invariant of the protocol holds", "restarted: incarnation 2", "Timeline", "Curves", "training"):
        assert word in parsed.words, word
    assert "invariants" in capsys.readouterr().out


def test_several_runs_are_compared_and_hostile_words_stay_words(run, other, tmp_path, capsys):
    file = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--html", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["runs"]) == {"first", "second"}
    assert told["runs"]["first"]["state"] == "finished"
    assert told["runs"]["second"]["state"] == "running"
    parsed = Parsed(file.read_text())
    assert "2 runs compared" in parsed.words
    assert "<script>alert(1)</script>" in parsed.words
    assert "script" not in parsed.tags


def test_every_colour_of_the_page_is_defined(run):
    picture = RunHistory(run)
    while picture.update():
        pass
    text = render_report([ReportedRun("first", picture, None)])
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"training", "gone", "line"} <= used <= set(re.findall(r"--(\w+):", text))


def test_a_violated_invariant_stands_on_the_page(run):
    picture = RunHistory(run)
    while picture.update():
        pass
    violation = InvariantViolationError("exactly-once", "version 3 has a contribution of version 2", None, None)
    text = render_report([ReportedRun("first", picture, CheckResult(100, True, [], violation, []))])
    words = Parsed(text).words
    assert "is violated: exactly-once: version 3 has a contribution of version 2" in words
    assert "holds over" not in words


def test_same_names_are_told_apart_by_their_paths(run, tmp_path, capsys):
    again = eventful_run().save(tmp_path / "first")
    assert main(["report", str(run), str(again), "--no-check", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {str(run), str(again)}


def test_a_page_that_cannot_be_written_is_told(run, tmp_path, capsys):
    assert main(["report", str(run), "--no-check", "--html", str(tmp_path / "no" / "such.html")]) != 0
    assert "no" in capsys.readouterr().err
