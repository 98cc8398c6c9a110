"""Jobs that take a second: a little text, a tiny model, real processes."""

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

# A test process has one fork server, which loads what its first user asks for. Whichever test is first, it has to load
# what the processes of tests/learner/runs.py need too, or each of those would load it again.
child_processes.PRELOADED_MODULES = (*child_processes.PRELOADED_MODULES, "tests.learner.runs")

LIMIT_S = 300.0
"""Of every wait. It only ends a test that hangs."""

WORDS = ("island", "learner", "syncer", "fragment", "anchor", "report", "round", "quorum", "merge", "publish", "adopt")


def small_text(folder: Path, documents: int = 40, words: int = 400) -> Path:
    """A folder of text, the same every time."""
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
        "inner": "adamw",  # Muon turns in bf16, which makes a last bit a large one: too coarse for a reference
        "lr": 3e-3,
    }
    return JobSettings(**{**values, **changes})


def silent_view() -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView(stream, interval_s=0.0), stream


def corpus_of(settings: JobSettings) -> Corpus:
    return Corpus.load(settings.data)


def processes_of(run: Path) -> list[int]:
    """Processes that write into this run's logs, by what the system says of them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/fd/2").startswith(str(run / "logs")):
                found.append(int(pid))
        except OSError:  # it ended, or is not ours
            continue
    return sorted(found)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds. Fails at once where the process ends before."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{what}: waited in vain"
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue


def until(
    process: subprocess.Popen[str], run: Path, what: str, condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Wait until the status of the syncer of this run meets the condition, and return that status."""
    status: dict[str, Any] = {}

    def is_met() -> bool:
        nonlocal status
        found = read_address_file(run) if run.is_dir() else None
        try:
            status = send_request(found.address, found.token, "GET", "/v1/status", 5.0) if found is not None else {}
        except ValueError:
            status = {}
        return bool(status.get("learners") and condition(status))

    wait_for(process, is_met, what)
    return status
