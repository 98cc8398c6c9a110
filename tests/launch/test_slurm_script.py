"""The job script alone, run by bash as a node of Slurm would run it: signals, exit codes, what it asks of Slurm. These
run on every machine; what stands for Slurm is a script that writes down what it was asked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.launch.launcher import Unit, UnitState
from atoll.launch.slurm import SlurmLauncher, _prepare, _script, _unit_home
from tests.launch.slurm_cluster import GOODBYE, unit, until

SCONTROL = """#!/bin/bash
echo "$*" >>"$FAKE/asked"
case "$1 $2" in
    "show job")
        cat "$FAKE/job" 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; } ;;
esac
"""

JOB = "JobId=7 JobName=run.left JobState={state} Reason={reason} Restarts={restarts} NodeList=n1\n"
RUNS = JOB.format(state="RUNNING", reason="None", restarts=0)


class Node:
    """Where the script runs: a directory, and a fake Slurm with scripted replies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs = directory / "programs"
        self.programs.mkdir()
        (self.programs / "scontrol").write_text(SCONTROL)
        (self.programs / "scontrol").chmod(0o755)
        self.started: list[subprocess.Popen[bytes]] = []
        self.says(RUNS)

    def says(self, job: str) -> None:
        (self.directory / "job").write_text(job)

    def prepare(self, unit: Unit, plant: Callable[[str], str] | None = None) -> Path:
        """The unit's files; `plant` puts a bug into the script."""
        _prepare(unit)
        text = _script([unit])
        planted = plant(text) if plant is not None else text
        assert plant is None or planted != text, "the line in which the bug is planted has changed"
        script = _unit_home(unit) / "job.sh"
        script.write_text(planted)
        return script

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "FAKE": str(self.directory), "SLURM_JOB_ID": "7", **more}

    def run(self, unit: Unit, plant: Callable[[str], str] | None = None, **more: str) -> subprocess.Popen[bytes]:
        script = (
            self.prepare(unit, plant) if not (_unit_home(unit) / "job.sh").exists() else _unit_home(unit) / "job.sh"
        )
        child = subprocess.Popen(["bash", str(script)], env=self.environment(**more), start_new_session=True)
        self.started.append(child)
        return child

    def asked(self, what: str) -> int:
        kept = self.directory / "asked"
        return kept.read_text().splitlines().count(what) if kept.exists() else 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for child in made.started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def noted(unit: Unit) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (_unit_home(unit) / "state").read_text().splitlines())


def printed(unit: Unit, start: int = 1) -> str:
    path = _unit_home(unit) / f"start-{start}.log"
    return path.read_text() if path.exists() else ""


def begun(unit: Unit) -> None:
    until(lambda: "begun" in printed(unit), "the command has begun")


def handle(unit: Unit, job: str = "7") -> dict[str, Any]:
    return {"job": job, "name": "run.left", "home": str(_unit_home(unit)), "notice_s": unit.notice_s, "starts": 0}


def test_a_command_that_ends_well_ends_the_unit(node, tmp_path):
    one = unit(tmp_path, "left", 'echo "$WORDS|$KEY"; pwd')
    one = replace(
        one, environment={"WORDS": "two  words 'and' $HOME\nmore", "KEY": "k"}, secret_names=frozenset({"KEY"})
    )
    assert node.run(one).wait(300) == 0
    assert f"two  words 'and' $HOME\nmore|k\n{one.directory}\n" in printed(one)
    assert (noted(one)["state"], noted(one)["cause"]) == ("ended", "left with exit code 0")
    assert node.asked("requeue 7") == 0


def test_a_command_that_fails_is_queued_again_until_no_restart_is_left(node, tmp_path):
    one = unit(tmp_path, "left", "exit 3", max_restarts=1)
    assert node.run(one).wait(300) == 0  # of the script; the job is queued again
    assert noted(one)["state"] == "waiting"
    assert noted(one)["cause"] == "left with exit code 3 (failure 1, restarts 1)"
    assert node.asked("requeue 7") == 1
    node.says(JOB.format(state="RUNNING", reason="None", restarts=1))
    assert node.run(one, SLURM_RESTART_COUNT="1").wait(300) == 3
    assert noted(one)["state"] == "failed"
    assert noted(one)["cause"] == "left with exit code 3, and all 1 restarts are used"
    assert node.asked("requeue 7") == 1
    assert printed(one, 2), "each start has a file of its own"


def leave_after_signal(
    node: Node, one: Unit, times: int = 1, plant: Callable[[str], str] | None = None
) -> dict[str, str]:
    child = node.run(one, plant)
    begun(one)
    for _ in range(times):
        child.send_signal(signal.SIGTERM)
    child.wait(300)
    return noted(one)


@pytest.mark.parametrize("times", [1, 200])
def test_the_exit_code_is_that_of_the_command_however_often_it_is_signaled(node, tmp_path, times):
    code = "count=0; trap 'count=$((count + 1))' TERM; echo begun; until [ $count -gt 0 ]; do sleep 0.1; done; sleep 1"
    one = unit(tmp_path, "left", f"{code}; echo signaled $count; exit 42")
    assert leave_after_signal(node, one, times)["cause"] == "preempted or out of time; left with exit code 42"
    assert "signaled 1\n" in printed(one), "it is signaled once"
    assert node.asked("requeue 7") == 1


def test_planted_wait_that_a_signal_interrupts_is_caught(node, tmp_path):
    one = unit(tmp_path, "left", GOODBYE)

    def plant(script: str) -> str:
        waits = """    trap 'is_leaving=yes; forward_signal "$child"' TERM; wait "$child"; code=$?; while false; do"""
        script = script.replace('    wait "$child"\n    code=$?\n', "")
        return script.replace('    while kill -0 "$child" 2>/dev/null; do', waits)

    assert leave_after_signal(node, one, plant=plant)["cause"] == "preempted or out of time; left with exit code 143"


def test_one_that_left_with_0_within_the_notice_is_not_reported_as_killed(node, tmp_path):
    """Nor is its notice waited for."""
    one = unit(tmp_path, "left", GOODBYE, notice_s=3000.0)
    for _ in range(3):
        assert leave_after_signal(node, one)["cause"] == "preempted or out of time; left with exit code 0"
        (_unit_home(one) / "start-1.log").unlink()
        (_unit_home(one) / "state").write_text("starts=0\nfailures=0\n")


def test_one_that_does_not_leave_is_killed_after_its_notice(node, tmp_path):
    one = unit(tmp_path, "left", "trap '' TERM; echo begun; while :; do sleep 0.1; done", notice_s=1.0)
    assert leave_after_signal(node, one)["cause"] == "preempted or out of time; left with exit code 137"
    assert "still there after 1 s: killed" in printed(one)


ORPHAN = "setsid bash -c 'trap \"echo orphan left; exit\" TERM; echo $$ >orphan; while :; do sleep 0.1; done' & "


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_of_a_command_that_has_left_stays_behind(node, tmp_path, leaves):
    """As ranks do whose torchrun was killed: they have sessions of their own."""
    code = ORPHAN if leaves else ORPHAN.replace('trap "echo orphan left; exit" TERM', 'trap "" TERM')
    one = unit(tmp_path, "left", f"{code} until [ -s orphan ]; do sleep 0.1; done", notice_s=1.0)
    assert node.run(one).wait(300) == 0
    pid = (one.directory / "orphan").read_text().strip()
    assert not Path("/proc", pid).exists() or "State:\tZ" in Path("/proc", pid, "status").read_text()
    assert ("orphan left" in printed(one)) == leaves


def plant_no_mark(script: str) -> str:
    return script.replace('[ -e "$here/stopped" ]', "false")


@pytest.mark.parametrize("planted", [False, True])
def test_one_that_is_stopped_is_not_queued_again(node, tmp_path, planted):
    one = unit(tmp_path, "left", GOODBYE)
    child = node.run(one, plant_no_mark if planted else None)
    begun(one)
    (_unit_home(one) / "stopped").touch()
    child.send_signal(signal.SIGTERM)
    assert child.wait(300) == 0
    assert (noted(one)["state"] == "stopped") != planted
    assert (node.asked("requeue 7") == 0) != planted


@pytest.mark.parametrize(
    ("job", "state", "cause"),
    [
        (JOB.format(state="COMPLETING", reason="None", restarts=1), "waiting", "requeued by Slurm"),
        (JOB.format(state="COMPLETING", reason="None", restarts=0), "stopped", "cancelled"),
    ],
)
def test_slurm_that_ends_the_job_itself_is_not_asked_to_queue_it(node, tmp_path, job, state, cause):
    one = unit(tmp_path, "left", GOODBYE)
    child = node.run(one)
    begun(one)
    node.says(job)
    child.send_signal(signal.SIGTERM)
    assert child.wait(300) == 0
    assert (noted(one)["state"], noted(one)["cause"]) == (state, f"{cause}; left with exit code 0")
    assert node.asked("requeue 7") == 0


def test_a_signal_that_only_the_command_has_seen_is_no_failure(node, tmp_path):
    """Slurm signals one process after the other: the command may have left before the script is found."""
    one = unit(
        tmp_path,
        "left",
        'echo "$GONE" >"$FAKE/job"; exit 9',
        environment={"GONE": JOB.format(state="COMPLETING", reason="None", restarts=1)},
    )
    assert node.run(one).wait(300) == 0
    assert (noted(one)["state"], noted(one)["failures"]) == ("waiting", "0")


def plant_no_look(script: str) -> str:
    """The file takes its new name also where it could not be written."""
    return script.replace('>"$here/state.new" &&', '>"$here/state.new";')


@pytest.mark.parametrize("planted", [False, True])
def test_a_full_disk_forgets_no_failure(node, tmp_path, planted):
    one = unit(tmp_path, "left", "cp -P full slurm/state.new; exit 3", max_restarts=1)
    node.prepare(one, plant_no_look if planted else None)
    (one.directory / "full").symlink_to("/dev/full")
    child = node.run(one)
    until(lambda: child.poll() is not None or "is the disk full?" in printed(one), "it cannot be written down")
    assert (child.poll() is not None) == planted
    if planted:
        assert os.readlink(_unit_home(one) / "state") == "/dev/full", "what was known is lost"
        return
    assert (noted(one)["state"], noted(one)["failures"]) == ("running", "0"), "of before, and whole"
    assert node.asked("requeue 7") == 0, "a failure that is not counted would be for ever"
    (_unit_home(one) / "state.new").unlink()
    assert child.wait(300) == 0
    assert (noted(one)["state"], noted(one)["failures"]) == ("waiting", "1")
    assert node.asked("requeue 7") == 1


@pytest.mark.parametrize("state", ["", "state=waiting\ncause=left", "state=waiting\nstarts=2\nfailures="])
def test_a_state_that_is_not_whole_is_not_believed(node, tmp_path, state):
    one = unit(tmp_path, "left", "exit 3", max_restarts=2)
    node.prepare(one)
    (_unit_home(one) / "start-1.log").write_text("of the first start\n")
    (_unit_home(one) / "start-2.log").write_text("of the second\n")
    (_unit_home(one) / "state").write_text(state)
    node.says(JOB.format(state="RUNNING", reason="None", restarts=2))
    assert node.run(one, SLURM_RESTART_COUNT="2").wait(300) == 3
    assert noted(one)["cause"] == "left with exit code 3, and all 2 restarts are used"
    assert printed(one, 3), "logs of before are kept"
    (_unit_home(one) / "state").write_text(state)
    assert _prepare(one) == 3


@pytest.mark.parametrize("kept", ["slurm/state", "supervisor.json", "ray.json"])
def test_an_island_whose_run_is_over_is_not_queued_again(node, tmp_path, kept):
    one = unit(tmp_path, "left", "exit 3")
    syncer = tmp_path / "syncer" / kept
    syncer.parent.mkdir(parents=True)
    syncer.write_text("state=running\n")
    node.run(one).wait(300)
    assert node.asked("requeue 7") == 1
    syncer.write_text('state=ended\n{"state": "ended"}\n')
    node.run(one).wait(300)
    assert noted(one)["state"] == "stopped"
    assert noted(one)["cause"].startswith("the run is over")
    assert node.asked("requeue 7") == 1


def test_a_shard_ends_with_its_syncer(node, tmp_path):
    one = unit(tmp_path, "shard-0", GOODBYE)
    child = node.run(one)
    begun(one)
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer" / "supervisor.json").write_text('{"state": "ended"}')
    assert child.wait(300) == 0
    assert noted(one)["cause"] == "the run is over: its syncer has ended; left with exit code 0"


def test_shard_that_was_stopped_by_a_signal_is_restarted(node, tmp_path):
    assert node.run(unit(tmp_path, "shard-0", "exit 0")).wait(300) == 0
    assert node.asked("requeue 7") == 1, "the run goes on, and cannot without it"


def test_one_task_of_an_array_speaks_of_itself_alone(node, tmp_path):
    """Slurm gives the number of the array to one of its tasks as well; what is asked for that is done to all."""
    one = unit(tmp_path, "left", "exit 3")
    node.prepare(one)
    script = (_unit_home(one) / "job.sh").read_text()
    (_unit_home(one) / "job.sh").write_text(script.replace("homes=(", "homes=(other "))
    assert node.run(one, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1").wait(300) == 0
    assert (node.asked("requeue 7_1"), node.asked("show job -o 7_1")) == (1, 1)
    assert node.asked("requeue 7") + node.asked("show job -o 7") == 0
    assert noted(one)["job"] == "7_1"


def test_what_the_script_wrote_down_is_the_status_when_slurm_has_forgotten_the_job(node, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", node.environment()["PATH"])
    monkeypatch.setenv("FAKE", str(tmp_path))
    launcher, one = SlurmLauncher(), unit(tmp_path, "left", "exit 0")
    assert node.run(one).wait(300) == 0
    (tmp_path / "job").unlink()
    found = launcher.status(handle(one))
    assert (found.state, found.restarts, found.cause) == (UnitState.ENDED, 0, "left with exit code 0")
    assert [path.name for path in launcher.log(handle(one))] == ["start-1.log"]
    other = launcher.status(handle(one, job="8"))  # the words are those of job 7
    assert (other.state, other.cause) == (UnitState.LOST, "Slurm does not know job 8 any more")
    node.says(RUNS.replace("run.left", "another-job"))
    assert launcher.status(handle(one)).state is UnitState.ENDED, "the number is another's by now"


def test_words_for_what_a_job_waits_for(node, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", node.environment()["PATH"])
    monkeypatch.setenv("FAKE", str(tmp_path))
    one = unit(tmp_path, "left", "exit 0")
    for reason, words in (
        ("Resources", "is waiting for free nodes"),
        ("Priority", "is waiting for jobs with a higher priority"),
        ("Licenses", "is waiting for Licenses"),
    ):
        node.says(JOB.format(state="PENDING", reason=reason, restarts=2))
        found = SlurmLauncher().status(handle(one))
        assert (found.state, found.restarts, found.cause) == (UnitState.WAITING, 2, f"job 7 {words}")
    for job_state, state in (("OUT_OF_MEMORY", UnitState.FAILED), ("CANCELLED", UnitState.STOPPED)):
        node.says(JOB.format(state=job_state, reason="None", restarts=0))
        assert SlurmLauncher().status(handle(one)).state is state
