"""The files of `examples` for `atoll up`, as they are but for the port and the budget."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.launch.fleet import Fleet
from atoll.launch.guard import ProcessId, send_signal
from atoll.launch.islands_file import IslandsFile
from atoll.launch.local_supervisor import read_state
from atoll.launch.units import build_units
from tests.launch.local_units import end_unit, until
from tests.test_examples import EXAMPLES, differing, free_port, saved

LIMIT_S = 600.0


class Copied:
    """The examples in another folder, so that nothing is written beside those of the repository."""

    def __init__(self, folder: Path, name: str, tokens: str, without: str | None = None) -> None:
        for path in EXAMPLES.glob("*.py"):
            shutil.copy(path, folder)
        text = (EXAMPLES / name).read_text()
        text, ports = re.subn(r'(address = "127\.0\.0\.1:)\d+"', rf'\g<1>{free_port()}"', text)
        text, budgets = re.subn(r'"--tokens", "\w+"', f'"--tokens", "{tokens}"', text)
        assert (ports, budgets) == (1, 1)
        if without is not None:
            text, tables = re.subn(rf"\[islands\.{without}\][^[]*", "", text)
            assert tables == 1
        self.file = folder / name
        self.file.write_text(text)
        self.units = IslandsFile.load(self.file).directory / "units"

    def up(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "atoll", "up", str(self.file)]
        return subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def said(self, unit: str) -> list[str]:
        logs = sorted((self.units / unit).glob("start-*.log"))
        return [line for path in logs for line in path.read_text(errors="replace").splitlines()]

    def losses(self, *units: str) -> set[str]:
        return {line for unit in units for line in self.said(unit) if line.startswith("held-out loss ")}

    def end(self) -> None:
        for folder in self.units.glob("*"):
            end_unit(folder)


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[list[Copied]]:
    made: list[Copied] = []
    yield made
    for each in made:
        each.end()


@pytest.mark.parametrize("name", ["islands.toml", "mixed.toml"])
def test_the_files_are_what_atoll_up_takes(name):
    file = IslandsFile.load(EXAMPLES / name)
    Fleet(file).check(build_units(file, "a token"))
    assert {island.unit.launcher for island in file.islands} == {"local"}
    assert all(str(EXAMPLES) in " ".join(island.unit.command) for island in file.islands), "from whichever directory"


@pytest.mark.long
def test_one_rank_beside_two_from_one_command(tmp_path, clean):
    run = Copied(tmp_path, "mixed.toml", "30k", without="sharded")
    clean.append(run)
    child = run.up()
    said, _ = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 0, said
    assert len(run.losses("alone", "copied")) == 1, said
    assert any("ranks: 2" in line for line in run.said("copied"))
    assert differing(saved(run.units / "alone/model.pt"), saved(run.units / "copied/model.pt")) == []


@pytest.mark.long
def test_islands_of_three_shapes_from_one_command_and_one_is_killed(tmp_path, clean):
    run = Copied(tmp_path, "mixed.toml", "1M")
    clean.append(run)
    child = run.up()
    until(lambda: any("step 50 of" in line for line in run.said("sharded")))
    torchrun = until(lambda: ProcessId.from_json((read_state(run.units / "sharded") or {}).get("child")))
    send_signal(torchrun, signal.SIGKILL)
    said, _ = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 0, said
    assert "sharded: running, restarts: 1" in said
    assert any("incarnation 2, ranks: 2" in line for line in run.said("sharded"))
    assert len(run.losses("alone", "sharded", "copied")) == 1, said
    models = [saved(run.units / name / "model.pt") for name in ("alone", "sharded", "copied")]
    assert differing(models[0], models[1]) == differing(models[0], models[2]) == []


@pytest.mark.long
@pytest.mark.needs_ray
def test_the_ray_example_waits_for_a_syncer_that_does_not_answer_at_once(tmp_path):
    """The syncer is stopped when the example asks it, as long as the example has not noticed."""
    command = [sys.executable, str(EXAMPLES / "ray_islands.py"), "--run", "run"]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **piped) as example:
        assert example.stdout is not None
        said, syncer = [], 0
        for line in example.stdout:
            said.append(line)
            if "the node of sharded is killed" in line:
                syncer = int((tmp_path / "run/store/lock").read_text())
                os.kill(syncer, signal.SIGSTOP)
            if "; retrying" in line:
                os.kill(syncer, signal.SIGCONT)
    assert example.returncode == 0, "".join(said)
    assert any("; retrying" in line for line in said), "".join(said)
