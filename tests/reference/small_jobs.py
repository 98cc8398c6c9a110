"""Jobs that take a second: a small text, a tiny model, real processes."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from atoll.dashboard.terminal import LiveView
from atoll.reference import child_processes
from atoll.reference.data import Corpus
from atoll.reference.job_settings import JobSettings
from atoll.transport.endpoint import read_address_file, send_request

# A test process has one fork server, which imports the modules of its first user. Whichever test is first, the fork
# server must also import the modules of tests/learner/runs.py, or each process of those tests imports them again.
child_processes.PRELOADED_MODULES = (*child_processes.PRELOADED_MODULES, "tests.learner.runs")

LIMIT_S = 300.0
"""Timeout of every wait. It only ends a test that hangs."""

WORDS = ("island", "learner", "syncer", "fragment", "anchor", "report", "round", "quorum", "merge", "publish", "adopt")


def small_text(folder: Path, documents: int = 40, words: int = 400) -> Path:
    """Write a folder of text files, the same in every call."""
    folder.mkdir()
    draw = Random(7)
    for number in range(documents):
        text = " ".join(draw.choice(WORDS) for _ in range(words))
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


def small_settings(data: Path, **changes: Any) -> JobSettings:
    values: dict[str, Any] = {
        "learners": 2,
        "model": "100k",
        "context": 16,
        "batch": 2,
        "tokens": 2 * 2 * 16 * 40,
        "eval_tokens": 256,
        "data": str(data),
        "every_steps": 8,
        "fragments": 4,
        "inner": "adamw",  # Muon amplifies rounding differences too much for a comparison with a reference
        "lr": 3e-3,
    }
    return JobSettings(**{**values, **changes})


def silent_view() -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView(stream, interval_s=0.0), stream


def load_corpus(settings: JobSettings) -> Corpus:
    return Corpus.load(settings.data)


def find_processes(run: Path) -> list[int]:
    """Return the pids of the processes whose stderr is a log of this run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/fd/2").startswith(str(run / "logs")):
                found.append(int(pid))
        except OSError:  # it has exited, or belongs to another user
            continue
    return sorted(found)


def wait_until(process: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
    """Wait until the condition is true. Fail at once if the process exits before."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"timeout: {what}"
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue


def wait_for_status(
    process: subprocess.Popen[str], run: Path, what: str, condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Wait until the status of this run's syncer meets the condition, and return that status."""
    status: dict[str, Any] = {}

    def is_met() -> bool:
        nonlocal status
        found = read_address_file(run) if run.is_dir() else None
        try:
            status = send_request(found.address, found.token, "GET", "/v1/status", 5.0) if found is not None else {}
        except ValueError:
            status = {}
        return bool(status.get("learners") and condition(status))

    wait_until(process, is_met, what)
    return status
