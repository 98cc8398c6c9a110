"""Elastic data-parallel training under the same kills: torchrun starts all workers again from the last checkpoint.

What the usual answer to a dead worker costs, measured on the same model, data, pace and machine. It is given two things
for free: the dead worker's machine is back at once, and time that a step spends waiting for others counts as useful.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.chaos.plan import Plan, PlannedFault
from atoll.dashboard.terminal import LiveView
from atoll.reference.data import Corpus
from atoll.reference.job import evaluate_run
from atoll.reference.job_settings import JobSettings
from atoll.store.run_settings import CONFIG_FILE
from benchmarks.elastic_worker import CHECKPOINT_INTERVAL_S, pid_path, steps_path

WORKER = Path(__file__).with_name("elastic_worker.py")
DDP_FOLDER = "ddp"
LOG = "torchrun.log"
POLL_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 10.0
EXIT_TIMEOUT_S = 20.0
SPARE_RESTARTS = 3
START_TIMEOUT_S = 180.0
MAX_SLOWDOWN = 8.0


def train_elastic(
    settings: JobSettings, plan: Plan, run: Path, view: LiveView, corpus: Corpus, interpreter: str = sys.executable
) -> dict[str, Any]:
    """Train the whole budget while killing workers by the plan; return the figures, even of an unfinished run."""
    folder = run / DDP_FOLDER
    folder.mkdir()
    settings = replace(settings, method="ddp", speeds=())
    settings.save(folder / CONFIG_FILE)
    kills = learner_kills(plan, settings.learners)
    same = "the same kill" if len(kills) == 1 else f"the same {len(kills)} kills"
    view.print_line(f"Now elastic data-parallel training under {same}.")
    with _torchrun(settings, folder, len(kills) + SPARE_RESTARTS, interpreter) as job:
        fired = _watch(job, settings, plan, kills, folder, view)
        code = job.poll()
    loss = evaluate_run(folder, corpus).loss if code == 0 else None
    found = summarize(read_steps(folder, settings.learners))
    return {
        "method": "ddp",
        "about": (
            f"torchrun with restarts, a checkpoint every {CHECKPOINT_INTERVAL_S:g} s."
            " The dead worker's machine is back at once,"
            " and waiting for others inside of a step counts as useful."
        ),
        "finished": code == 0,
        "kills": fired,
        "planned_kills": len(kills),
        "loss": loss,
        **found,
    }


def learner_kills(plan: Plan, learners: int) -> list[PlannedFault]:
    """Return the faults that a method without syncer and links can have: kills of learners present from the start."""
    kills = [fault for fault in plan.faults if fault.fault == "kill" and fault.target.kind == "learner"]
    return [fault for fault in kills if fault.target.number <= learners]


@contextlib.contextmanager
def _torchrun(
    settings: JobSettings, folder: Path, restarts: int, interpreter: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent and its workers, in a group of their own. None of them is left, whatever happens."""
    words = [interpreter, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    words += ["--nproc-per-node", str(settings.learners), "--max-restarts", str(restarts)]
    words += ["--monitor-interval", "0.1", str(WORKER), str(folder), str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(folder / LOG, "wb") as log:
        job = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        for pid in _pids(folder, settings.learners):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # of an agent that had to be killed


def _watch(
    job: subprocess.Popen[bytes],
    settings: JobSettings,
    plan: Plan,
    kills: Sequence[PlannedFault],
    folder: Path,
    view: LiveView,
) -> int:
    """Kill workers by the plan until the job ends; return the number of kills."""
    waiting = list(kills)
    began = time.monotonic()
    logged_at = began
    started: float | None = None
    killed_pids: dict[int, int] = {}  # rank: the process that was killed
    while job.poll() is None:
        time.sleep(POLL_INTERVAL_S)
        now = time.monotonic()
        if now - began > START_TIMEOUT_S + MAX_SLOWDOWN * plan.duration_s:
            view.print_line(f"ddp: not finished in time; stopped after {now - began:.0f} s ({folder / LOG})")
            break
        newest = [_last_step(folder, rank) for rank in range(settings.learners)]
        if started is None and all(line is not None for line in newest):
            started = now
        if now - logged_at >= PROGRESS_INTERVAL_S and newest[0] is not None:
            logged_at = now
            view.print_line(f"ddp: step {newest[0]['step']:,}, start {newest[0]['restart'] + 1}")
        if started is None or not waiting or now - started < waiting[0].at_s:
            continue
        rank = waiting[0].target.number - 1
        line = newest[rank]
        if line is None or killed_pids.get(rank) == line["pid"] or not _all_stepping(newest):
            continue  # the group is being started again
        waiting.pop(0)
        killed_pids[rank] = line["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(line["pid"], signal.SIGKILL)
        view.print_line(f"ddp: worker {rank + 1} was killed")
    return len(kills) - len(waiting)


def _all_stepping(newest: Sequence[dict[str, Any] | None]) -> bool:
    """All workers are of the same start, and have stepped in it."""
    return len({line["restart"] if line is not None else -1 for line in newest}) == 1 and newest[0] is not None


def _pids(folder: Path, workers: int) -> list[int]:
    """Return the pids of running workers. The command line is checked, as a pid may belong to another process."""
    found = []
    for rank in range(workers):
        try:
            pid = int(pid_path(folder, rank).read_text())
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if str(folder).encode() in arguments:
            found.append(pid)
    return found


def _last_step(folder: Path, rank: int, tail_bytes: int = 1024) -> dict[str, Any] | None:
    try:
        with open(steps_path(folder, rank), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    found: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return found


def read_steps(folder: Path, workers: int) -> list[list[dict[str, Any]]]:
    found = []
    for rank in range(workers):
        try:
            lines = steps_path(folder, rank).read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            lines = []
        found.append([json.loads(line) for line in lines])
    return found


def summarize(steps: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """From every step of every worker: a step that was taken again is useful once.

    >>> one = {"at": 1.0, "step": 1, "took_s": 1.0}
    >>> again = {"at": 4.0, "step": 1, "took_s": 1.0}
    >>> summarize([[one, again]])["goodput"], summarize([[one, again]])["worst_pause_s"]
    (0.25, 3.0)
    """
    every = [line for lines in steps for line in lines]
    if not every:
        return {"wall_s": 0.0, "goodput": 0.0, "worst_pause_s": 0.0, "standing_s": 0.0, "steps_again": 0}
    begin = min(line["at"] - line["took_s"] for line in every)
    wall_s = max(line["at"] for line in every) - begin
    useful_s = 0.0
    again = 0
    worst_s = 0.0
    for lines in steps:
        last = {line["step"]: line for line in lines}  # the execution that counts
        useful_s += sum(line["took_s"] for line in last.values())
        again += len(lines) - len(last)
        ends = [line["at"] for line in lines]
        worst_s = max([worst_s, *(after - before for before, after in pairwise(ends))])
    reached, stepping_s = begin, 0.0
    for line in sorted(every, key=lambda each: float(each["at"] - each["took_s"])):
        first, end = max(line["at"] - line["took_s"], reached), line["at"]
        if end > first:
            stepping_s += end - first
            reached = end
    return {
        "wall_s": wall_s,
        "goodput": min(1.0, useful_s / (len(steps) * wall_s)),
        "worst_pause_s": worst_s,
        "standing_s": wall_s - stepping_s,
        "steps_again": again,
    }
