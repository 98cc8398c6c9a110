"""Units in a real Slurm: submitted, requeued, signaled, stopped. The daemons are started for this module."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.launch.launcher import UnitState
from atoll.launch.slurm import SlurmLauncher
from tests.launch.local_slurm import LocalSlurm
from tests.launch.slurm_cluster import GOODBYE, Cluster, cluster, unit

ENDED, FAILED, RUNNING, STOPPED, WAITING = (
    UnitState.ENDED,
    UnitState.FAILED,
    UnitState.RUNNING,
    UnitState.STOPPED,
    UnitState.WAITING,
)
ENDS_THE_SECOND_TIME = f"if [ $SLURM_RESTART_COUNT ]; then echo back; exit 0; fi; {GOODBYE}"


@pytest.fixture(scope="module")
def slurm_nodes() -> Iterator[Cluster]:
    with cluster(nodes=2) as made:
        yield made


# --------------------------------------------------------------------------------------------------------------------
# What is refused, on every machine


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partion": "long"}, "has no option partion; it has account"),
        ({"time": ["1:00"]}, "time is ['1:00']: use a string in one line"),
        ({"account": "me\n#SBATCH --uid=0"}, "use a string in one line"),
        ({"exclusive": "no"}, "exclusive must be true or false"),
        ({"sbatch": "--licenses=a"}, "use a list of options"),
        ({"sbatch": ["licenses"]}, "use a list of options"),
        ({"sbatch": ["--job-name=mine"]}, "remove it, the launcher sets this option"),
        ({"sbatch": ["--licenses=a\nrm -r /"]}, "use a list of options"),
    ],
)
def test_options_that_it_does_not_know_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match="left") as refused:
        SlurmLauncher().render(unit(tmp_path, "left", "exit 0", options=options))
    assert words in str(refused.value)


def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    one = unit(tmp_path, "left", "exit 0")
    with pytest.raises(ValueError, match="sbatch was not found: run this command on a login node"):
        SlurmLauncher().start(one)
    with pytest.raises(ConnectionError, match="scontrol was not found"):
        SlurmLauncher().status({"job": "1", "name": "run.left", "home": str(tmp_path), "starts": 0})
    assert not one.directory.exists()


def test_what_would_be_submitted_is_shown_without_secrets(tmp_path):
    one = unit(
        tmp_path,
        "left",
        "exit 0",
        environment={"ATOLL_LEARNER": "2", "ATOLL_TOKEN": "hush-hush"},
        secret_names=frozenset({"ATOLL_TOKEN"}),
        nodes=2,
        cpus=8,
        devices=4,
        notice_s=60.0,
        options={"partition": "long", "time": "4:00:00", "exclusive": True, "sbatch": ["--mail-type=FAIL"]},
    )
    shown = SlurmLauncher().render(one)
    for line in (
        "--job-name=run.left",
        "--requeue",
        "--open-mode=append",
        "--nodes=2",
        "--cpus-per-task=8",
        "--gres=gpu:4",
        "--signal=B:TERM@75",
        "--partition=long",
        "--time=4:00:00",
        "--exclusive",
        "--mail-type=FAIL",
    ):
        assert f"\n#SBATCH {line}\n" in shown
    assert "export ATOLL_LEARNER=2" in shown
    assert "for its owner only: ATOLL_TOKEN" in shown
    assert "hush" not in shown


def test_what_is_submitted_is_not_interrupted_by_what_the_terminal_sends(tmp_path, monkeypatch):
    """Ctrl-C goes to all processes of its session."""
    program(tmp_path, "squeue", "")
    program(tmp_path, "sbatch", f"cut -d ' ' -f 6 /proc/$$/stat >{tmp_path}/session; echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert SlurmLauncher().start(unit(tmp_path, "left", "exit 0"))["job"] == "7"
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


def test_a_directory_that_sbatch_cannot_take_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sbatch does not accept quotes"):
        SlurmLauncher().render(unit(tmp_path / 'so-called "run"', "left", "exit 0"))


def test_units_that_ask_for_different_things_are_no_array(tmp_path, monkeypatch):
    """Also on a machine without Slurm: what is wrong with the units is reported before a missing sbatch."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="right needs other resources than left"):
        SlurmLauncher().start_array([unit(tmp_path, "left", "exit 0"), unit(tmp_path, "right", "exit 0", cpus=2)])


# --------------------------------------------------------------------------------------------------------------------
# In a real Slurm


def program(directory: Path, name: str, code: str) -> None:
    (directory / name).write_text(f"#!/bin/bash\n{code}\n")
    (directory / name).chmod(0o755)


KILLED = "kill -KILL $$"
LATE = "echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.mark.parametrize("end", [KILLED, LATE])
def test_a_job_whose_number_was_never_stored_is_found_in_the_queue(slurm_nodes, tmp_path, monkeypatch, end):
    program(tmp_path, "sbatch", f'{shutil.which("sbatch")} "$@" >/dev/null; {end}')
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", GOODBYE))
    left, right = (unit(tmp_path, name, GOODBYE) for name in ("one", "two"))
    array = slurm_nodes.launcher.start_array([left, right])
    monkeypatch.setenv("PATH", path)
    assert slurm_nodes.launcher.start(unit(tmp_path, "left", GOODBYE)) == handle
    assert slurm_nodes.launcher.start_array([left, right]) == array
    assert [slurm_nodes.launcher.start(right), slurm_nodes.launcher.start(left)] == array[::-1], (
        "each is a unit of its own"
    )
    jobs = slurm_nodes.slurm.run("squeue", "--noheader", "--array", "--format=%i").split()
    assert sorted(jobs) == sorted(each["job"] for each in (handle, *array))
    for each in (handle, *array):
        slurm_nodes.launcher.stop(each)


def test_a_job_that_comes_late_into_the_queue_is_not_submitted_twice(slurm_nodes, tmp_path, monkeypatch):
    program(tmp_path, "sbatch", KILLED)
    one = unit(tmp_path, "left", GOODBYE)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        words = "sbatch was killed by signal 9; run.left is not in the queue now; start it again"
        with pytest.raises(ConnectionError, match=words):
            slurm_nodes.launcher.start(one)
    late = slurm_nodes.slurm.run("sbatch", "--parsable", str(one.directory / "slurm" / "job.sh")).strip()
    with pytest.raises(ValueError, match=f"left already runs as job {late} .* has other settings"):
        slurm_nodes.launcher.start(unit(tmp_path, "left", "exit 0"))
    handle = slurm_nodes.launcher.start(one)
    assert handle["job"] == late
    slurm_nodes.begun(handle)
    slurm_nodes.launcher.stop(handle)
    assert slurm_nodes.launcher.status(handle).state is STOPPED


def test_a_directory_may_have_any_name(slurm_nodes, tmp_path):
    directory = tmp_path / "it's 100%j of #1"
    handle = slurm_nodes.launcher.start(unit(directory, "left", "pwd"))
    slurm_nodes.until(handle, ENDED)
    assert f"{directory}/left\n" in slurm_nodes.printed(handle)
    assert (directory / "left" / "slurm" / "slurm.log").exists()


def test_one_that_ends_well_and_keeps_its_secrets(slurm_nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_TOKEN", "hush-of-the-submitter")
    secret = frozenset({"ATOLL_TOKEN"})
    code = "echo $ATOLL_LEARNER $ATOLL_TOKEN; pwd; echo $MASTER_ADDR $PET_NNODES $PET_NODE_RANK"
    one = unit(
        tmp_path, "left", code, environment={"ATOLL_LEARNER": "2", "ATOLL_TOKEN": "hush-hush"}, secret_names=secret
    )
    handle = slurm_nodes.launcher.start(one)
    found = slurm_nodes.until(handle, ENDED)
    assert (found.restarts, found.cause) == (0, "left with exit code 0")
    assert f"2 hush-hush\n{one.directory}\n127.0.0.1 1 0\n" in slurm_nodes.printed(handle)
    kept = one.directory / "slurm"
    assert stat.S_IMODE((kept / "secrets").stat().st_mode) == 0o600
    shown = slurm_nodes.slurm.run("scontrol", "show", "job", "--details", handle["job"])
    script = slurm_nodes.slurm.run("scontrol", "write", "batch_script", handle["job"], "-")
    assert "run.left" in shown
    assert "homes=" in script
    assert "hush" not in shown + script + repr(handle)
    saved = [path for path in slurm_nodes.slurm.directory.glob("state/**/environment") if b"PATH=" in path.read_bytes()]
    assert not [path for path in saved if b"hush" in path.read_bytes()]
    others = [path for path in kept.iterdir() if path.name != "secrets" and not path.name.startswith("start-")]
    assert not [path for path in others if b"hush" in path.read_bytes()]


def test_one_that_fails_is_requeued_and_then_has_failed(slurm_nodes, tmp_path):
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", "echo begun; exit 3", max_restarts=1))
    slurm_nodes.seen.clear()
    found = slurm_nodes.until(handle, FAILED)
    assert (found.restarts, found.cause) == (1, "left with exit code 3, and all 1 restarts are used")
    assert any("before: left with exit code 3 (failure 1, restarts 1)" in status.cause for status in slurm_nodes.seen)
    assert [path.name for path in slurm_nodes.launcher.log(handle)] == ["start-1.log", "start-2.log"]
    again = slurm_nodes.launcher.start(unit(tmp_path, "left", "exit 0"))
    slurm_nodes.until(again, ENDED)
    assert [path.name for path in slurm_nodes.launcher.log(again)] == ["start-3.log"], (
        "those of before are another job's"
    )


def test_one_that_slurm_requeues_says_goodbye_and_comes_back(slurm_nodes, tmp_path):
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", ENDS_THE_SECOND_TIME))
    slurm_nodes.begun(handle)
    with pytest.raises(ValueError, match=f"left already runs as job {handle['job']}"):
        slurm_nodes.launcher.start(unit(tmp_path, "left", "exit 0"))
    assert slurm_nodes.launcher.start(unit(tmp_path, "left", ENDS_THE_SECOND_TIME)) == handle, (
        "it is not submitted twice"
    )
    slurm_nodes.slurm.run("scontrol", "requeue", handle["job"])
    found = slurm_nodes.until(handle, ENDED)
    assert found.restarts == 1
    first, second = [path.read_text() for path in slurm_nodes.launcher.log(handle)]
    assert "goodbye\n" in first
    assert "waiting: requeued by Slurm; left with exit code 0" in first
    assert "back\n" in second


def test_one_whose_time_is_over_requeues_itself(slurm_nodes, tmp_path):
    """Slurm gives this signal before the time limit, and before preemption if configured."""
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", ENDS_THE_SECOND_TIME))
    slurm_nodes.begun(handle)
    slurm_nodes.slurm.run("scancel", "--signal", "TERM", "--batch", handle["job"])
    found = slurm_nodes.until(handle, ENDED)
    assert found.restarts == 1
    assert "goodbye\n" in slurm_nodes.printed(handle)
    assert "waiting: preempted or out of time; left with exit code 0" in slurm_nodes.printed(handle)


def test_one_that_is_stopped_leaves_and_stays_away(slurm_nodes, tmp_path):
    slow = "trap 'sleep 1; echo goodbye; exit 0' TERM; echo begun $$; while :; do sleep 0.1; done"
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", slow))
    slurm_nodes.begun(handle)
    slurm_nodes.launcher.stop(handle)
    found = slurm_nodes.launcher.status(handle)
    assert (found.state, found.restarts, found.cause) == (STOPPED, 0, "left with exit code 0")
    assert "goodbye\n" in slurm_nodes.printed(handle)
    slurm_nodes.launcher.stop(handle)
    assert slurm_nodes.launcher.status(handle) == found


def test_one_that_waits_is_stopped_too(slurm_nodes, tmp_path):
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", "echo begun", options={"sbatch": ["--hold"]}))
    assert (
        slurm_nodes.until(handle, WAITING).cause
        == f"job {handle['job']} is waiting for its release by the user (scontrol release)"
    )
    slurm_nodes.launcher.stop(handle)
    assert slurm_nodes.launcher.status(handle).state is STOPPED
    assert slurm_nodes.printed(handle) == ""


def test_a_task_that_waits_is_stopped_alone(slurm_nodes, tmp_path):
    held = {"options": {"sbatch": ["--hold"]}}
    left, right = slurm_nodes.launcher.start_array(
        [unit(tmp_path, name, "echo begun", **held) for name in ("left", "right")]
    )
    slurm_nodes.until(left, WAITING)
    slurm_nodes.launcher.stop(left)  # Slurm forgets a task that never ran at once
    assert slurm_nodes.launcher.status(left).state is STOPPED
    assert slurm_nodes.launcher.status(right).state is WAITING
    slurm_nodes.launcher.stop(right)
    assert slurm_nodes.launcher.status(right).state is STOPPED


def test_one_that_does_not_leave_is_killed_after_its_notice(slurm_nodes, tmp_path):
    deaf = "trap '' TERM; echo begun; echo $$ >pid; while :; do sleep 0.1; done"
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", deaf, notice_s=1.0))
    slurm_nodes.begun(handle)
    slurm_nodes.launcher.stop(handle)
    assert slurm_nodes.launcher.status(handle).cause == "left with exit code 137"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "left" / "pid").read_text()), 0)


def test_cancelled_unit_is_not_requeued(slurm_nodes, tmp_path):
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", GOODBYE))
    slurm_nodes.begun(handle)
    slurm_nodes.slurm.run("scancel", handle["job"])
    found = slurm_nodes.until(handle, STOPPED)
    assert found.restarts == 0
    assert found.cause.startswith("cancelled")
    assert "goodbye\n" in slurm_nodes.printed(handle)


def test_islands_of_one_array_are_units_of_their_own(slurm_nodes, tmp_path):
    left, right = slurm_nodes.launcher.start_array(
        [
            unit(tmp_path, "left", ENDS_THE_SECOND_TIME, environment={"ATOLL_LEARNER": "1"}),
            unit(tmp_path, "right", f"pwd; echo $ATOLL_LEARNER; {GOODBYE}", environment={"ATOLL_LEARNER": "2"}),
        ]
    )
    assert left["job"].partition("_")[0] == right["job"].partition("_")[0]
    slurm_nodes.begun(left)
    slurm_nodes.begun(right)
    slurm_nodes.slurm.run("scontrol", "requeue", left["job"])
    assert slurm_nodes.until(left, ENDED).restarts == 1
    assert slurm_nodes.launcher.status(right).state is RUNNING
    assert f"{tmp_path}/right\n2\nbegun" in slurm_nodes.printed(right)
    again = slurm_nodes.launcher.start(unit(tmp_path, "left", GOODBYE))
    assert "_" not in again["job"], "who comes back alone is a job of its own"
    slurm_nodes.begun(again)
    slurm_nodes.launcher.stop(right)
    assert slurm_nodes.launcher.status(right).state is STOPPED
    assert slurm_nodes.launcher.status(again).state is RUNNING
    slurm_nodes.launcher.stop(again)


def test_a_task_that_fails_requeues_itself_and_not_its_array(slurm_nodes, tmp_path):
    """Also the one that Slurm gives the number of the array."""
    fails = f"if [ $SLURM_JOB_ID = $SLURM_ARRAY_JOB_ID ] && [ ! $SLURM_RESTART_COUNT ]; then exit 3; fi; {GOODBYE}"
    handles = slurm_nodes.launcher.start_array([unit(tmp_path, name, fails) for name in ("one", "two", "three")])
    for handle in handles:
        slurm_nodes.begun(handle)
    assert sorted(slurm_nodes.until(handle, RUNNING).restarts for handle in handles) == [0, 0, 1]
    for handle in handles:
        slurm_nodes.launcher.stop(handle)


def test_all_nodes_of_an_island_meet_and_are_signaled(slurm_nodes, tmp_path):
    meet = "echo rank $NODE_RANK of $NNODES at $MASTER_ADDR $([ $MASTER_PORT = $PET_MASTER_PORT ] && echo same)"
    again = "if [ $SLURM_RESTART_COUNT ]; then exit 0; fi"
    goodbye = GOODBYE.replace("goodbye", "goodbye $NODE_RANK")
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", f"{meet}; {again}; {goodbye}", nodes=2))
    slurm_nodes.begun(handle, times=2)
    slurm_nodes.slurm.run("scancel", "--signal", "TERM", "--batch", handle["job"])
    slurm_nodes.until(handle, ENDED)
    said = slurm_nodes.printed(handle)
    for node in (0, 1):
        assert f"{node}: rank {node} of 2 at 127.0.0.1 same" in said
        assert f"{node}: goodbye {node}" in said


def test_a_node_that_fails_takes_its_island_along(slurm_nodes, tmp_path):
    code = f"if [ $NODE_RANK = 1 ]; then exit 5; fi; {GOODBYE}"
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", code, nodes=2, max_restarts=0))
    assert slurm_nodes.until(handle, FAILED).cause == "left with exit code 5, and all 0 restarts are used"


def test_refusal_of_sbatch_is_quoted(slurm_nodes, tmp_path):
    with pytest.raises(ValueError, match=r"sbatch refused the job: .*partition"):
        slurm_nodes.launcher.start(unit(tmp_path, "left", "exit 0", options={"partition": "nowhere"}))


def test_unreachable_controller_does_not_lose_the_unit(slurm_nodes, tmp_path):
    handle = slurm_nodes.launcher.start(unit(tmp_path, "left", GOODBYE))
    slurm_nodes.begun(handle)
    impatient = tmp_path / "slurm.conf"  # commands of Slurm try for ten seconds otherwise
    impatient.write_text(slurm_nodes.slurm.conf.read_text() + "MessageTimeout=2\n")
    slurm_nodes.slurm.stop_controller()
    with pytest.raises(ConnectionError, match="cannot reach Slurm: "):
        slurm_nodes.launcher.status({**handle, "conf": str(impatient)})
    slurm_nodes.slurm.start_controller()
    assert slurm_nodes.until(handle, RUNNING).restarts == 0
    slurm_nodes.launcher.stop(handle)
    assert slurm_nodes.launcher.status(handle).state is STOPPED
    assert slurm_nodes.printed(handle).count("begun") == 1, "it went on"


@pytest.mark.long
@pytest.mark.needs_slurm
def test_the_example_shows_an_island_that_is_requeued_and_comes_back(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "slurm_islands.py"
    command = [sys.executable, str(example), "--node", "node1", "--run", "run", "--merges", "50", "--within", "240"]
    with LocalSlurm(cpus=8) as slurm:
        environment = {**os.environ, "SLURM_CONF": str(slurm.conf)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=290, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:3] for line in done.stdout.split("\n\n")[-1].splitlines()] == ["yes"] * 4, done.stdout


def test_unknown_job_has_no_status(slurm_nodes, tmp_path):
    handle = {"job": "99999", "name": "run.left", "home": str(Path(tmp_path)), "notice_s": 1.0, "starts": 0}
    assert slurm_nodes.launcher.status(handle).state is UnitState.LOST
    slurm_nodes.launcher.stop(handle)
