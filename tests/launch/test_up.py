"""`atoll up`, `down`, `status` and `logs` as people use them: real processes, one file, this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.launch.fleet import Fleet
from atoll.launch.guard import ProcessId, is_alive, send_signal
from atoll.launch.islands_file import IslandsFile
from atoll.launch.local_supervisor import read_state
from tests.launch.local_units import PATIENCE_S, end_unit, processes_of, until
from tests.test_examples import free_port

HERE = 'command = ["python", "-c", "import signal; print(\'here\', flush=True); signal.pause()"]'
TINY = Path(__file__).with_name("tiny_island.py")


class Yard:
    """A folder with a file for `atoll up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "islands.toml"
        self.run = folder / "runs" / "islands"
        self.port = free_port()
        self._children: list[subprocess.Popen[str]] = []

    def write(self, islands: str, syncer: str = "") -> None:
        self.file.write_text(f'[syncer]\naddress = "127.0.0.1:{self.port}"\n{syncer}\n{islands}\n')

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "atoll", words[0], str(self.file), *words[1:]]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd="/"
        )
        self._children.append(child)
        return child

    def atoll(self, *words: str, code: int = 0) -> str:
        """What it says, on whichever stream."""
        child = self.start(*words)
        out, err = child.communicate(timeout=2 * PATIENCE_S)
        assert child.returncode == code, f"{words}: {child.returncode}\n{out}\n{err}"
        return out + err

    def up(self, *words: str) -> dict[str, Any]:
        """The exit code says how everybody is, which is for others to look at."""
        child = self.start("up", "--detach", "--json", *words)
        out, err = child.communicate(timeout=2 * PATIENCE_S)
        assert child.returncode in (0, 1), out + err
        found: dict[str, Any] = json.loads(out)
        return found

    def states(self) -> dict[str, str]:
        statuses = Fleet(IslandsFile.load(self.file)).statuses()
        return {status.name: status.state for status in statuses}

    def child(self, unit: str) -> ProcessId | None:
        return ProcessId.from_json((read_state(self.run / "units" / unit) or {}).get("child"))

    def said(self, unit: str) -> list[str]:
        return [
            line
            for path in sorted((self.run / "units" / unit).glob("start-*.log"))
            for line in path.read_text().splitlines()
        ]

    def says(self, unit: str, words: str, times: int = 1) -> None:
        def look() -> bool:
            return sum(words in line for line in self.said(unit)) >= times

        until(look, f"{words} of {unit}")

    def end(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        if self.file.exists() and (self.run / "fleet").exists():
            for known in Fleet(IslandsFile.load(self.file)).read_units().values():
                end_unit(Path(known.handle["directory"]))


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.end()


@pytest.mark.long
def test_a_second_up_starts_only_what_is_new_or_has_failed(yard):
    fails = '[islands.c]\ncommand = ["python", "-c", "raise SystemExit(4)"]\nrestarts = 0\n'
    yard.write(f"[islands.a]\n{HERE}\n{fails}")
    assert yard.up()["started"] == ["syncer", "a", "c"]
    yard.says("a", "here")
    until(lambda: yard.states()["c"] == "failed")
    before = yard.child("a")

    yard.write(f"[islands.a]\n{HERE}\n{fails}\n[islands.b]\n{HERE}\n")
    found = yard.up()
    assert found["started"] == ["c", "b"]
    assert yard.child("a") == before
    until(lambda: yard.states()["c"] == "failed")
    assert [path.name for path in sorted((yard.run / "units/c").glob("start-*"))] == [
        "start-0001.log",
        "start-0002.log",
    ]

    yard.write(f"[islands.a]\n{HERE}\ncpus = 2\n[islands.b]\n{HERE}\nnumber = 3\n")
    said = yard.atoll("up", "-d", "a", "b", "syncer", code=1)
    assert "a: is running as before, but cpus changed: run atoll down, then atoll up" in said
    assert "b: is running: unchanged" in said
    assert (
        "units with problems: c; show their output: atoll logs" in said
    )  # it is not in the file any more, and has failed
    assert yard.child("a") == before
    assert yard.said("a") == ["here"]

    assert "c: is failed, but no longer in the file: run atoll down to remove it" in said
    assert "c: stopped" in yard.atoll("down", "c")
    assert list(yard.states()) == ["syncer", "a", "b"]


def test_ctrl_c_detaches_and_kills_no_unit(yard):
    yard.write(f"[islands.a]\n{HERE}\n")
    child = yard.start("up")
    assert child.stdout is not None
    while "a: running" not in (line := child.stdout.readline()):
        assert line, child.communicate()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert f"detached; the run continues: atoll status {yard.file}" in err
    yard.says("a", "here")
    assert yard.states() == {"syncer": "running", "a": "running"}
    assert "a: running" in yard.atoll("status")


def test_down_stops_everything_and_up_goes_on(yard):
    yard.write(f"[islands.a]\n{HERE}\n[islands.b]\n{HERE}\n")
    yard.up()
    yard.says("a", "here")
    assert yard.atoll("down", "a").splitlines() == ["a: stopped"]
    assert yard.states() == {"syncer": "running", "a": "stopped", "b": "running"}
    yard.says("syncer", "The syncer listens on")
    said = yard.atoll("down").splitlines()
    assert set(said[:2]) == {"a: stopped", "b: stopped"}
    assert said[2] == "syncer: stopped"
    for unit in ("syncer", "a", "b"):
        assert processes_of(yard.run / "units" / unit) == []
    assert yard.atoll("down").splitlines()[2] == "syncer: stopped"  # twice is once
    yard.atoll("status")
    assert yard.up()["started"] == ["syncer", "a", "b"]
    yard.says("syncer", "The syncer listens on", times=2)  # with the directory that it has founded before


@pytest.mark.long
def test_logs_are_followed_over_restarts(yard):
    yard.write(f"[islands.a]\n{HERE}\n[islands.longer]\n{HERE}\n")
    yard.up()
    yard.says("a", "here")
    child = yard.start("logs", "a", "-f")
    assert child.stdout is not None
    assert child.stdout.readline() == "a | here\n"
    killed = until(lambda: yard.child("a"))
    send_signal(killed, signal.SIGKILL)
    assert child.stdout.readline() == "a | [atoll] killed by SIGKILL; restarting in 1 s\n"
    assert child.stdout.readline() == "a | here\n"
    yard.atoll("down", "a")
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out, err) == (0, "", "")
    yard.says("longer", "here")
    assert yard.atoll("logs", "a", "longer", "--tail", "1") == "a      | here\nlonger | here\n"
    assert "has no unit lomger: did you mean longer?" in yard.atoll("logs", "lomger", code=2)


def test_a_dry_run_starts_nothing_and_shows_no_secret(yard):
    (yard.folder / "secret").write_text("a very secret token")
    yard.write(f"[islands.a]\n{HERE}\n", 'token_file = "secret"')
    said = yard.atoll("up", "--dry-run")
    assert "a very secret token" not in said
    assert "ATOLL_TOKEN='(secret)'" in said
    assert "--or-resume" in said
    found = json.loads(yard.atoll("up", "--dry-run", "--json", "a"))
    assert [unit["name"] for unit in found["units"]] == ["a"]
    assert "a very secret token" not in json.dumps(found)
    assert not yard.run.exists()


def test_no_file_that_others_can_read_has_the_token(yard):
    yard.write(f"[islands.a]\n{HERE}\n")
    yard.up()
    yard.says("a", "here")
    token = (yard.run / "fleet/token").read_text().strip()
    holders = [path for path in yard.run.rglob("*") if path.is_file() and token in path.read_text(errors="replace")]
    assert yard.run / "fleet/token" in holders
    assert [path for path in holders if path.stat().st_mode & 0o077] == []
    known = until(lambda: yard.child("a"))
    assert token not in Path(f"/proc/{known.pid}/cmdline").read_text()
    assert f"ATOLL_TOKEN={token}" in Path(f"/proc/{known.pid}/environ").read_text().split("\0")


def test_secret_of_the_caller_reaches_its_unit_alone(yard, monkeypatch):
    shows = "import os, signal; print(len(os.environ['MY_KEY']), flush=True); signal.pause()"
    yard.write(f'[islands.a]\ncommand = ["python", "-c", "{shows}"]\nsecrets = ["MY_KEY"]\n')
    said = yard.atoll("up", "--dry-run", code=2)
    assert "a: secrets has MY_KEY, which is not set here: export it and retry" in said
    monkeypatch.setenv("MY_KEY", "seventeen letters")
    assert "MY_KEY='(secret)'" in yard.atoll("up", "--dry-run", "a")
    yard.up()
    yard.says("a", "17")
    holders = [path for path in yard.run.rglob("*") if path.is_file() and "seventeen letters" in path.read_text()]
    assert holders == []


def test_invalid_unit_starts_nothing(yard):
    yard.write(f'[islands.a]\n{HERE}\n[islands.b]\ncommand = "no-such-program"\n[islands.c]\n{HERE}\nnodes = 2\n')
    said = yard.atoll("up", code=2)
    assert "b: there is no program 'no-such-program'" in said
    assert "c: nodes is 2" in said
    assert not yard.run.exists()


def test_missing_launcher_starts_no_unit_of_the_file(yard):
    yard.write(f'[islands.a]\n{HERE}\n[islands.b]\n{HERE}\nlauncher = "kubernetes"\n')
    said = yard.atoll("up", code=2)
    assert "islands.b.launcher is 'kubernetes': Atoll has no launcher for kubernetes" in said
    assert not yard.run.exists()


def test_unwritable_directory_is_named(yard):
    yard.write(f"[islands.a]\n{HERE}\n")
    yard.file.write_text('directory = "/proc/run"\n' + yard.file.read_text())
    said = yard.atoll("up", code=2)
    assert "/proc" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_unreachable_launcher_does_not_lose_units(yard):
    yard.write(f"[islands.a]\n{HERE}\n")
    yard.up()
    yard.says("a", "here")
    path = yard.run / "fleet/units.json"
    path.write_text(path.read_text().replace(f'"host": "{os.uname().nodename}"', '"host": "elsewhere"', 1))
    said = yard.atoll("status", code=1)
    assert "syncer: unknown (no status: it runs on elsewhere" in said
    assert "a: running" in said
    said = yard.atoll("up", "-d", code=1)
    assert re.search(r"^syncer: no status: .*unchanged; if it is lost for good: ", said, re.MULTILINE)
    assert "syncer: cannot be stopped: it runs on elsewhere" in yard.atoll("down", code=1)
    path.write_text(path.read_text().replace("elsewhere", os.uname().nodename))
    assert yard.states() == {"syncer": "running", "a": "stopped"}


def test_concurrent_changes_of_a_run_are_refused(yard):
    yard.write(f"[islands.a]\n{HERE}\n")
    with Fleet(IslandsFile.load(yard.file)).lock("atoll down"):
        said = yard.atoll("up", code=2)
    assert f"atoll down (process {os.getpid()} on {os.uname().nodename}) is changing this run" in said
    assert yard.states() == {"syncer": "not started", "a": "not started"}
    assert not (yard.run / "fleet/token").exists()  # the other may be making one
    yard.up()
    assert yard.states()["a"] in ("running", "waiting")


@pytest.mark.long
def test_failed_island_sets_the_exit_code(yard):
    yard.write('[islands.a]\ncommand = ["python", "-c", "raise SystemExit(\'out of luck\')"]\nrestarts = 0\n')
    said = yard.atoll("up", code=1)
    assert "a: failed (exit code 1: out of luck)" in said
    assert f"units with problems: a; show their output: atoll logs {yard.file} a" in said
    assert "a: failed" in yard.atoll("status", code=1)
    found = json.loads(yard.atoll("status", "--json", code=1))
    assert found["well"] is False
    assert found["units"][1]["name"] == "a"
    assert found["units"][1]["state"] == "failed"


@pytest.mark.long
def test_an_island_that_a_plain_kill_has_made_leave_comes_back_with_up(yard):
    leaves = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('here', flush=True); signal.pause()"
    yard.write(f'[islands.a]\ncommand = ["python", "-c", "{leaves}"]\n')
    yard.up()
    yard.says("a", "here")
    send_signal(until(lambda: yard.child("a")), signal.SIGTERM)
    until(lambda: yard.states()["a"] == "ended")
    assert yard.up()["started"] == ["a"]
    yard.says("a", "here", times=2)


@pytest.mark.long
def test_an_island_and_the_syncer_are_killed_and_the_run_ends_with_one_model(yard):
    """The fragments are in a process of their own, which ends with the syncer."""
    islands = "".join(f'[islands.{name}]\ncommand = ["python", "{TINY}"]\n' for name in "ab")
    sizes = '"--fragments", "2", "--every", "4", "--quorum", "2", "--tokens", "500k"'
    yard.write(islands, f"shards = 1\narguments = [{sizes}]")
    child = yard.start("up")
    yard.says("a", "step 100")
    yard.says("b", "step 100")
    killed = until(lambda: yard.child("b"))
    send_signal(killed, signal.SIGKILL)
    at = len(yard.said("a"))
    yard.says("b", "incarnation 2")
    until(lambda: len(yard.said("a")) > at, "the others train on")
    syncer = until(lambda: yard.child("syncer"))
    send_signal(syncer, signal.SIGKILL)
    yard.says("syncer", "The syncer listens on", times=2)
    (yard.run / "GO").touch()
    out, err = child.communicate(timeout=3 * PATIENCE_S)
    assert child.returncode == 0, out + err
    assert "b: running, restarts: 1" in out
    assert "syncer: running, restarts: 1" in out
    assert "has ended." in out
    digests = [line for name in "ab" for line in yard.said(name) if line.startswith("digest ")]
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert {unit: how for unit, how in yard.states().items() if unit != "shard-0"} == {
        "syncer": "ended",
        "a": "ended",
        "b": "ended",
    }
    assert yard.states()["shard-0"] in ("ended", "stopped")  # by itself, or by who follows
    assert not is_alive(killed)

    assert yard.up()["started"] == []
    (yard.run / "fleet/units.json").unlink()
    assert "a: the run is over: not started" in yard.atoll("up", "-d")
