"""Logs as JSON lines: every line of a real run is a record with its context fields. Text logs keep their format."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import main
from atoll.core.reasons import REASONS
from atoll.dashboard.run_files import RunFiles
from atoll.logs import (
    LOG_FIELDS,
    LOG_FORMAT_VARIABLE,
    LOG_FORMATS,
    ContextLogger,
    JsonFormatter,
    configure_logging,
    log_fields,
)
from atoll.reference.child_processes import JobFailedError
from atoll.reference.job import start_job
from tests.cli.test_train import train_with_kill
from tests.reference.small_jobs import load_corpus, silent_view, small_settings, small_text
from tests.shared_runs import make_once

ROOT = Path(__file__).resolve().parent.parent
STEP = 2 * 16  # tokens
ALWAYS = {"time", "level", "logger", "message"}
OPTIONAL = {"process", "traceback"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


def small(text, tokens):
    return [
        *("--data", str(text), "--model", "100k", "--context", "16", "--batch", "2", "--eval-tokens", "256"),
        *("--every", "8", "--fragments", "4", "--step-time", "5ms", "--tokens", str(tokens)),
    ]


def parsed(text: str) -> list[dict[str, Any]]:
    """Return every line as a record; fail with the first line that is not one."""
    found = []
    for line in text.splitlines():
        record = json.loads(line)
        assert record.keys() >= ALWAYS, line
        assert record.keys() <= ALWAYS | OPTIONAL | set(LOG_FIELDS), line
        assert datetime.fromisoformat(record["time"]).tzinfo is not None
        assert record["level"] in ("debug", "info", "warning", "error", "critical")
        found.append(record)
    return found


@pytest.fixture(scope="module")
def logs(text, tmp_path_factory):
    """Logs of a run of three learners with one kill, by name of the process."""
    folder, _ = make_once(tmp_path_factory, "finished", lambda folder: train_with_kill(text, folder / "run"))
    run = folder / "run"
    return run, {path.stem: parsed(path.read_text()) for path in (run / "logs").iterdir()}


def test_every_line_of_a_run_is_a_record_with_context_fields(logs):
    _, found = logs
    assert found.keys() == {"syncer", "learner-1", "learner-2", "learner-3"}
    (run,) = {record["run"] for record in found["syncer"] if "run" in record}
    for record in found["syncer"]:
        if record["logger"] == "atoll.syncer":
            assert (record["run"], record["epoch"], record["process"]) == (run, 1, "syncer")
        subject = re.match(r"(learner|fragment) (\d+): ", record["message"])
        if subject is not None:
            assert record[subject[1]] == int(subject[2])
            assert record["code"] in REASONS
            assert ("incarnation" if subject[1] == "learner" else "version") in record
    assert {record.get("incarnation") for record in found["syncer"] if record.get("learner") == 2} == {1, 2}
    for number in (1, 2, 3):
        own = [record for record in found[f"learner-{number}"] if record["logger"] == "atoll.learner"]
        assert own
        assert {record["learner"] for record in own} == {number}
        joined = [record for record in own if "no syncer answers" not in record["message"]]
        assert {record["run"] for record in joined} == {run}
        assert {record["incarnation"] for record in joined} == ({1, 2} if number == 2 else {1})
        assert {record["process"] for record in found[f"learner-{number}"]} == {f"learner {number}"}


def test_log_tail_of_a_process_is_text(logs):
    run, found = logs
    tail = RunFiles(run).log_tail("learner 2")
    assert tail is not None
    assert found["learner-2"][-1]["message"] in tail
    assert "{" not in tail


def test_exception_is_a_record(text, tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    settings = small_settings(text, inner="nonsense")
    with pytest.raises(JobFailedError, match=r"learner \d cannot join: learner \d: inner optimizer 'nonsense'"):
        start_job(settings, tmp_path / "run", silent_view()[0], load_corpus(settings))
    last = [parsed(path.read_text())[-1] for path in (tmp_path / "run/logs").glob("learner-*.log")]
    assert any(record["level"] == "critical" and "Traceback" in record.get("traceback", "") for record in last)


def test_default_logs_are_text(text, tmp_path):
    settings = small_settings(text, tokens=2 * 20 * STEP)
    start_job(settings, tmp_path / "run", silent_view()[0], load_corpus(settings))
    lines = (tmp_path / "run/logs/syncer.log").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} I atoll\.syncer: listening on", lines[0])


@pytest.mark.long
def test_separate_syncer_and_learner_log_json(text, tmp_path):
    run, environment = tmp_path / "run", {**os.environ, LOG_FORMAT_VARIABLE: "json"}
    command = [sys.executable, "-m", "atoll", "syncer", "--out", str(run), "--port", "0", "--learners", "1"]
    with open(tmp_path / "syncer.log", "w") as log:
        served = subprocess.Popen(
            [*command, *small(text, 60 * STEP)], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert served.stdout is not None
        address = served.stdout.readline().split()[-1].rstrip(".")
        island = [sys.executable, "-m", "atoll", "learner", "--syncer", address, "--out", str(tmp_path / "island")]
        done = subprocess.run(
            [*island, "--log-format", "json"], capture_output=True, text=True, timeout=300, check=True, env=os.environ
        )
        served.communicate(timeout=300)
    finally:
        served.kill()
        served.wait()
    assert served.returncode == 0
    of_syncer, of_learner = parsed((tmp_path / "syncer.log").read_text()), parsed(done.stderr)
    assert any("listening on" in record["message"] for record in of_syncer)
    (name,) = {record["run"] for record in of_syncer if record["logger"] == "atoll.syncer" and "run" in record}
    mine = [record for record in of_learner if record["logger"] == "atoll.learner"]
    assert {(record["run"], record["learner"], record["incarnation"]) for record in mine} == {(name, 1, 1)}


@pytest.mark.parametrize("command", [["train"], ["syncer", "--out", "x"], ["learner", "--syncer", "head:1"]])
def test_an_unknown_format_is_one_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--log-format", "xml"]) == 2
    assert "--log-format is 'xml'; give text or json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------------
# The pieces


def test_a_named_logger_keeps_levels_filters_and_handlers_of_its_base(caplog):
    base = logging.getLogger("atoll.test.base")
    log = ContextLogger(base, learner=3, run="one")
    caplog.set_level(logging.INFO, "atoll.test.base")
    base.addFilter(quiet := lambda record: "quiet" not in record.getMessage())
    try:
        log.info("said", extra=log_fields("fragment", 7, version=2))
        log.debug("below the level")
        log.info("quiet")
        log.info("of another learner", extra=log_fields("learner", 4))
    finally:
        base.removeFilter(quiet)
    first, second = caplog.records
    fields = json.loads(JsonFormatter({"process": "learner 3"}).format(first))
    names = ("run", "learner", "fragment", "version", "process", "message")
    assert [fields[name] for name in names] == ["one", 3, 7, 2, "learner 3", "said"]
    assert json.loads(JsonFormatter().format(second))["learner"] == 4, "fields of the call take precedence"


def test_a_record_of_several_lines_and_a_warning_are_one_line_each():
    stream = io.StringIO()
    before = logging.root.handlers[:], logging.root.level
    try:
        configure_logging("json", logging.INFO, stream=stream)
        logging.getLogger("atoll.test").info("one\ntwo %s", {"three": 3})
        try:
            raise OSError("a\nb")
        except OSError:
            logging.getLogger("atoll.test").exception("failed")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("look out", stacklevel=1)
    finally:
        logging.captureWarnings(False)
        logging.root.handlers[:], logging.root.level = before
    records = parsed(stream.getvalue())
    assert [record["message"].splitlines()[0] for record in records[:2]] == ["one", "failed"]
    assert "look out" in records[2]["message"]
    assert records[1]["traceback"].endswith("OSError: a\nb")


def test_docs_list_every_field():
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    section = page.split("## Logs")[1].split("\n## ")[0]
    cells = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))))
    assert cells == ALWAYS | OPTIONAL | set(LOG_FIELDS)
    assert all(f"`{each}`" in section for each in LOG_FORMATS)
