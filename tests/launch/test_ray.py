"""Units in a real Ray cluster of several nodes: real processes, real signals, nodes that are killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.launch.launcher import Unit, UnitState, UnitStatus
from atoll.launch.ray_cluster import RayLauncher
from tests.launch.ray_nodes import LIMIT_S, Nodes, lives, nodes_of_their_own, nowhere, until

pytestmark = pytest.mark.needs_ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head, and a node each with a resource named left and right."""
    with nodes_of_their_own() as found:
        found.add(left=1)
        found.add(right=1)
        found.wait()
        yield found


@pytest.fixture(scope="module")
def launcher() -> RayLauncher:
    return RayLauncher()


def unit(cluster: Nodes, directory: Path, script: str, **changes: Any) -> Unit:
    """A script of the shell."""
    options = {"address": cluster.address} | changes.pop("options", {})
    return replace(Unit("try", "one", ("sh", "-c", script), directory, notice_s=20.0, options=options), **changes)


class Started:
    """A unit, and those who want to know how it is."""

    def __init__(self, launcher: RayLauncher, unit: Unit) -> None:
        self.launcher, self.directory = launcher, unit.directory
        self.handle: Mapping[str, Any] = json.loads(json.dumps(launcher.start(unit)))

    def status(self) -> UnitStatus:
        return self.launcher.status(self.handle)

    def until(self, state: UnitState, cause: str = "") -> UnitStatus:
        found: list[UnitStatus] = []

        def look() -> list[UnitStatus]:
            found.append(self.status())
            return found[-1:] if found[-1].state is state and cause in found[-1].cause else []

        try:
            return until(look, f"{state} {cause}")[0]
        except AssertionError as late:
            raise AssertionError(f"{late}; it was {found[-1]}, and printed {self.said()}") from None

    def said(self) -> list[str]:
        """One text for each start."""
        return [path.read_text() for path in self.launcher.log(self.handle)]

    def pid(self, start: int = 1) -> int:
        """That a command has printed as its first line, in its start of this number."""
        return int(until(lambda: (self.said()[start - 1 : start] or [""])[0].partition("\n")[0], "its pid"))

    def stop(self) -> UnitStatus:
        self.launcher.stop(self.handle)
        return self.status()


PRINT_AND_WAIT = "echo $$; exec sleep 1000"


# --------------------------------------------------------------------------------------------------------------------
# Beginning and ending


def test_a_command_ends_well_and_leaves_nothing_but_what_it_printed(nodes, launcher, tmp_path):
    script = 'echo "$GREETING from $(pwd)"; echo also this >&2'
    started = Started(launcher, unit(nodes, tmp_path, script, environment={"GREETING": "hello"}))
    assert started.until(UnitState.ENDED) == UnitStatus(UnitState.ENDED, 0, "")
    assert started.said() == [f"hello from {tmp_path}\nalso this\n"]
    assert [path.name for path in launcher.log(started.handle)] == ["start-0001.log"]
    assert started.stop().state is UnitState.ENDED, "it had ended before it was stopped"
    again = Started(launcher, unit(nodes, tmp_path, "echo again"))  # in the places that the first one has freed
    again.until(UnitState.ENDED)
    assert again.said()[1:] == ["again\n"]


@pytest.mark.long
def test_a_command_that_fails_is_started_again(nodes, launcher, tmp_path):
    started = Started(launcher, unit(nodes, tmp_path, "test -e been-here || { touch been-here; exit 3; }; echo better"))
    assert started.until(UnitState.ENDED).restarts == 1
    assert started.said() == ["", "better\n"]


@pytest.mark.long
def test_a_command_that_fails_too_often_has_failed(nodes, launcher, tmp_path):
    started = Started(launcher, unit(nodes, tmp_path, "echo no; exit 7", max_restarts=1))
    assert started.until(UnitState.FAILED) == UnitStatus(UnitState.FAILED, 1, "exit code 7 after 1 restarts")
    assert started.said() == ["no\n", "no\n"]


@pytest.mark.long
def test_a_command_that_does_not_exist_says_so(nodes, launcher, tmp_path):
    started = Started(launcher, unit(nodes, tmp_path, "", command=("no-such-program",), max_restarts=0))
    assert "No such file or directory: 'no-such-program'" in started.until(UnitState.FAILED).cause


@pytest.mark.long
def test_a_failed_write_takes_no_unit_along_and_one_that_has_ended_can_be_started_again(nodes, launcher, tmp_path):
    (tmp_path / "ray.json").mkdir()  # no file can be renamed to the name of a directory
    started = Started(launcher, unit(nodes, tmp_path, "echo first"))
    assert started.until(UnitState.ENDED).cause == ""
    assert (tmp_path / "ray.json").is_dir(), "its supervisor lives, and has not written it down"
    (tmp_path / "ray.json").rmdir()
    again = Started(launcher, unit(nodes, tmp_path, "echo again"))
    until(lambda: again.said()[1:] == ["again\n"], "the second one runs, once the first one's supervisor is gone")
    again.until(UnitState.ENDED)


@pytest.mark.long
def test_what_is_started_again_after_the_end_of_the_run_is_not_started(nodes, launcher, tmp_path):
    """It would wait for a syncer for an hour. A shard ends with the syncer, and has no end of its own."""
    nowhere = {"options": {"resources": {"nowhere": 1}}}
    waits = Started(launcher, unit(nodes, tmp_path / "waits", "echo", name="waits", **nowhere))
    shard = Started(launcher, unit(nodes, tmp_path / "shard-0", PRINT_AND_WAIT, name="shard-0"))
    shard.pid()
    waits.until(UnitState.WAITING, "nowhere")
    ends = """mkdir ../syncer; echo '{"state": "ended"}' >../syncer/ray.json; exit 3"""
    fails = Started(launcher, unit(nodes, tmp_path / "fails", ends, name="fails"))
    over = "the run is over: its syncer has ended"
    assert fails.until(UnitState.STOPPED) == UnitStatus(UnitState.STOPPED, 0, f"{over} (exit code 3)")
    assert shard.until(UnitState.ENDED).cause == "the run is over"
    assert waits.until(UnitState.STOPPED).cause == f"{over} (it waited for resources)"


@pytest.mark.long
def test_a_shard_that_leaves_a_run_that_goes_on_is_brought_back(nodes, launcher, tmp_path):
    script = "test -e been-here || { touch been-here; exit 0; }; "
    script += "trap 'exit 0' TERM; echo $$; while :; do sleep 0.1; done"
    shard = Started(launcher, unit(nodes, tmp_path, script, name="shard-0"))
    shard.pid(2)
    assert shard.stop() == UnitStatus(UnitState.STOPPED, 1, "")


# A grand-child in a session of its own, as ranks of torchrun are; it says goodbye.
STOPS_SLOWLY = """
import os, signal, subprocess, sys
if sys.argv[1:] == ["below"]:
    def bye(*_):
        print("goodbye", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, bye)
    print(os.getpid(), flush=True)
    signal.pause()
subprocess.Popen([sys.executable, __file__, "below"], start_new_session=True).wait()
"""


@pytest.mark.long
def test_stopping_reaches_grand_children_and_may_be_done_twice(nodes, launcher, tmp_path):
    (tmp_path / "slow.py").write_text(STOPS_SLOWLY)
    command = (sys.executable, str(tmp_path / "slow.py"))
    started = Started(launcher, unit(nodes, tmp_path, "", command=command))
    pid = started.pid()
    assert lives(pid)
    assert started.stop() == UnitStatus(UnitState.STOPPED, 0, "")
    assert not lives(pid)
    assert started.said() == [f"{pid}\ngoodbye\n"]
    assert started.stop() == UnitStatus(UnitState.STOPPED, 0, "")


@pytest.mark.long
def test_one_that_does_not_stop_is_killed_when_the_notice_is_over(nodes, launcher, tmp_path):
    script = "trap '' TERM; echo $$; while :; do sleep 1; done"
    started = Started(launcher, unit(nodes, tmp_path, script, notice_s=0.5))
    pid = started.pid()
    assert started.stop().cause == "did not end within 0.5 s and was killed"
    assert not lives(pid)


# --------------------------------------------------------------------------------------------------------------------
# What dies, and what does not


CALLER = """
import json, sys
from pathlib import Path
from atoll.launch.launcher import Unit
from atoll.launch.ray_cluster import RayLauncher
address, directory, script = sys.argv[1:]
unit = Unit("try", "one", ("sh", "-c", script), Path(directory), options={"address": address})
print(json.dumps(RayLauncher().start(unit)))
"""


@pytest.mark.long
def test_it_goes_on_when_the_caller_ends_and_others_find_it(nodes, launcher, tmp_path):
    command = [sys.executable, "-c", CALLER, nodes.address, str(tmp_path), PRINT_AND_WAIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stderr == ""
    handle = json.loads(done.stdout)
    until(lambda: launcher.status(handle).state is UnitState.RUNNING, "runs")
    again = Started(launcher, replace(unit(nodes, tmp_path, PRINT_AND_WAIT), notice_s=30.0))
    assert again.handle["actor"] == handle["actor"], "who starts it twice has it once"
    pid = again.pid()
    assert len(again.said()) == 1
    with pytest.raises(ValueError, match="already runs with other settings: stop it with echo") as refused:
        launcher.start(unit(nodes, tmp_path, "echo something else"))
    assert RayLauncher().status(handle).state is UnitState.RUNNING
    found = str(refused.value).partition("stop it with ")[2].rpartition(", or start")[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(found, shell=True, env=os.environ | {"PATH": path}, timeout=LIMIT_S, check=True)
    again.until(UnitState.STOPPED)
    assert not lives(pid)
    assert again.status().state is UnitState.STOPPED


@pytest.mark.long
def test_where_there_is_no_cluster_one_is_started_and_outlives_its_caller(launcher, tmp_path):
    with nowhere() as temporary:
        command = [sys.executable, "-c", CALLER, "local", str(tmp_path), "echo here"]
        handles = [
            json.loads(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout)
            for _ in range(2)
        ]
        assert handles[0] == handles[1], "the second time it was there"
        assert len(list((temporary / "ray").glob("session_2*"))) == 1
        until(lambda: launcher.status(handles[0]).state is UnitState.ENDED, "ends well")


@pytest.mark.parametrize("killed", ["NodeRunner", pytest.param("RayKeeper", marks=pytest.mark.long)])
def test_a_process_of_ray_that_is_killed_takes_the_command_along_and_both_come_back(nodes, launcher, tmp_path, killed):
    script = "echo $$; setsid sleep 1000 & echo $! ; wait"
    started = Started(launcher, unit(nodes, tmp_path, script, max_restarts=0))  # which are for what the command does
    first = started.pid()
    below = int(until(lambda: started.said()[0].split()[1:], "its child")[0])
    for victim in processes_titled(f"ray::{killed}"):
        os.kill(victim, signal.SIGKILL)
    until(lambda: not lives(first) and not lives(below), "gone")
    assert started.pid(2) != first
    assert started.until(UnitState.RUNNING).restarts == 1
    assert started.stop().state is UnitState.STOPPED


def processes_titled(title: str) -> list[int]:
    """Of the cluster of this test: another one on this machine is not ours."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}\0" in (folder / "environ").read_text(errors="replace")
            if mine and (folder / "cmdline").read_text(errors="replace").startswith(title):
                found.append(int(folder.name))
        except OSError:
            continue
    assert found, f"no process is titled {title}"
    return found


@pytest.mark.long
def test_a_node_that_is_killed_takes_only_its_own_unit_down_and_it_comes_back_on_another(nodes, launcher, tmp_path):
    lost_node = nodes.add(spare=1)
    nodes.wait()
    spare, left = ({"options": {"resources": {name: 1}}, "restarts": 0} for name in ("spare", "left"))
    lost = Started(launcher, unit(nodes, tmp_path / "lost", PRINT_AND_WAIT, name="lost", **spare))
    kept = Started(launcher, unit(nodes, tmp_path / "kept", PRINT_AND_WAIT, name="kept", **left))
    pids = [lost.pid(), kept.pid()]
    nodes.kill(lost_node)
    until(lambda: not lives(pids[0]), "gone with its node")
    lost.until(UnitState.WAITING, "its node is lost; no node with 1 CPU, 1 spare yet")
    assert lives(pids[1])
    nodes.add(spare=1)
    assert lost.pid(2) != pids[0]
    assert lost.until(UnitState.RUNNING).restarts == 1
    assert kept.status().restarts == 0
    assert lives(pids[1])
    assert [one.stop().state for one in (lost, kept)] == [UnitState.STOPPED] * 2


@pytest.mark.long
def test_a_unit_of_two_nodes_begins_and_fails_and_ends_as_one(nodes, launcher, tmp_path):
    script = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT $PET_NODE_RANK"; test -e failed && exit 0;'
    script += "test $NODE_RANK = 0 && touch begun && exec sleep 1000; until test -e begun; do sleep 0.1; done;"
    script += "touch failed; exit 5"
    started = Started(launcher, unit(nodes, tmp_path, script, nodes=2))
    assert started.until(UnitState.ENDED).restarts == 1
    names = [f"start-000{number}-node-{node}.log" for number in (1, 2) for node in (0, 1)]
    assert [path.name for path in launcher.log(started.handle)] == names
    found = [re.fullmatch(r"(\d) of 2 at ([\d.]+:\d+) (\d)\n", said) for said in started.said()]
    assert [(found[1], found[3]) for found in found if found] == [("0", "0"), ("1", "1")] * 2
    assert len({found[2] for found in found[:2] if found}) == 1


@pytest.mark.long
def test_a_command_that_fails_because_its_other_node_is_lost_has_not_failed(nodes, launcher, tmp_path):
    script = "test -e again && exit 0; "
    script += "test $NODE_RANK = 0 && { until test -e begun; do sleep 0.1; done; exit 1; }; "
    script += "trap 'echo signaled' TERM; touch begun; while :; do sleep 0.1; done"
    started = Started(launcher, unit(nodes, tmp_path, script, nodes=2, max_restarts=0))
    until(lambda: "signaled" in "".join(started.said()), "the first node has failed, and the second one is signaled")
    (tmp_path / "again").touch()
    for runner in processes_titled("ray::NodeRunner"):
        os.kill(runner, signal.SIGKILL)
    assert started.until(UnitState.ENDED).restarts == 1


def test_torchrun_takes_its_arguments_from_node_variables(monkeypatch):
    from torch.distributed.run import parse_args

    from atoll.launch.ray_supervisor import node_variables

    assert node_variables(0, 1, "10.0.0.1", 29500) == {}, "an island on one node meets by itself"
    for name, value in node_variables(1, 2, "10.0.0.1", 29500).items():
        monkeypatch.setenv(name, value)
    parsed = parse_args(["train.py"])
    assert (parsed.nnodes, parsed.node_rank) == ("2", 1)
    assert (parsed.master_addr, parsed.master_port) == ("10.0.0.1", 29500)


def test_unit_without_resources_waits_and_names_them(nodes, launcher, tmp_path):
    started = Started(launcher, unit(nodes, tmp_path, "echo", cpus=64, devices=2, options={"resources": {"left": 1}}))
    started.until(UnitState.WAITING, "no node with 64 CPU, 2 GPU, 1 left yet")
    assert started.stop() == UnitStatus(UnitState.STOPPED, 0, "it was stopped before it started")
    assert started.said() == []


# --------------------------------------------------------------------------------------------------------------------
# Secrets


SECRET = "a-secret-of-the-run-5512"
SHOWS_ITS_DIGEST = """
import hashlib, os, signal
print(hashlib.sha256(os.environ["ATOLL_TOKEN"].encode()).hexdigest(), flush=True)
signal.pause()
"""


def places_of(word: str, nodes: Nodes) -> list[str]:
    """Return the places in the cluster that show the secret: actor table, command lines, files of Ray."""
    from ray._raylet import GcsClientOptions, GlobalStateAccessor  # type: ignore[attr-defined]

    accessor = GlobalStateAccessor(GcsClientOptions.create(nodes.address, None, True, False))
    assert accessor.connect()
    found = accessor.get_actor_table(None, None)  # from which `ray list actors` is made
    assert any(b"RaySupervisor" in actor for actor in found)
    found = ["actors"] if any(word.encode() in actor for actor in found) else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += ["command lines"] if int(path.parent.name) != os.getpid() and word in path.read_text() else []
        except (OSError, UnicodeDecodeError):
            continue
    files = [path for path in nodes.temporary.rglob("*") if path.is_file()]
    assert any(path.name.startswith("worker-") for path in files)
    return found + [path.name for path in files if word.encode() in path.read_bytes()]


@pytest.mark.long
def test_only_the_command_sees_a_secret(nodes, launcher, tmp_path):
    visible = "a-word-for-everybody-7731"
    asked = unit(
        nodes,
        tmp_path,
        "",
        command=(sys.executable, "-c", SHOWS_ITS_DIGEST, visible),
        environment={"ATOLL_TOKEN": SECRET, "ATOLL_LEARNER": "1"},
        secret_names=frozenset({"ATOLL_TOKEN"}),
        options={"runtime_env": {"env_vars": {"VISIBLE": visible}}},
    )
    shown = launcher.render(replace(asked, command=("curl", f"--token={SECRET}")))
    assert SECRET not in shown
    assert "ATOLL_TOKEN=(secret)" in shown
    assert "ATOLL_LEARNER=1" in shown
    started = Started(launcher, asked)
    digest = until(lambda: started.said() and started.said()[0].strip(), "its digest")
    assert digest == hashlib.sha256(SECRET.encode()).hexdigest()
    assert SECRET not in json.dumps(started.handle)
    assert places_of(SECRET, nodes) == []
    assert {"actors", "command lines"} <= set(places_of(visible, nodes)), "the search finds what is there"
    started.stop()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text()]


# --------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "big"}, "no option 'partition'; it has address, namespace, resources, runtime_env, strategy"),
        ({"strategy": "SCATTER"}, "strategy 'SCATTER' is none of PACK, SPREAD"),
        ({"resources": {"left": 0}}, "amounts above 0"),
        ({"resources": {"GPU": 1}}, "use cpus and devices"),
        ({"runtime_env": "job"}, "runtime_env is a table"),
        ({"address": "head"}, "they look like head:6379"),
        ({"address": "127.0.0.1:9"}, "no Ray cluster answers at 127.0.0.1:9: start it with `ray start --head`"),
    ],
)
def test_impossible_unit_is_refused_with_the_fix(tmp_path, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        RayLauncher().check(Unit("try", "one", ("true",), tmp_path, options=options))


def test_without_a_cluster_it_says_how_to_have_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"no Ray cluster runs on this machine: start one with `ray start --head`"):
        RayLauncher().check(Unit("try", "one", ("true",), tmp_path))


def test_without_ray_it_names_the_extra(tmp_path):
    script = "import sys; sys.modules['ray'] = None\n"
    script += "from pathlib import Path\nfrom atoll.launch.launcher import Unit\n"
    script += "from atoll.launch.ray_cluster import RayLauncher\n"
    script += "RayLauncher().check(Unit('try', 'one', ('true',), Path('/')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "ValueError: Ray is not installed here: pip install 'atoll[ray]'" in done.stderr


def test_unit_of_stopped_cluster_is_lost(tmp_path):
    handle = {"address": "127.0.0.1:9", "namespace": "atoll", "actor": "x", "directory": str(tmp_path), "notice_s": 1.0}
    assert RayLauncher().status(handle) == UnitStatus(UnitState.LOST, 0, "no Ray cluster answers at 127.0.0.1:9")
    RayLauncher().stop(handle)


def test_unreachable_cluster_is_an_error_and_no_loss(tmp_path):
    handle = {"address": "no-such-host.invalid:9", "namespace": "atoll", "actor": "x", "directory": str(tmp_path)}
    for ask in (RayLauncher().status, RayLauncher().stop):
        with pytest.raises(ValueError, match=r"no-such-host\.invalid:9 cannot be reached"):
            ask(handle | {"notice_s": 1.0})
