"""The import contracts detect violations: each gets a planted import, in a copy of the package with empty modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLS / "lint-imports", "--no-cache", "--no-logo"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PACKAGES = (
    "core tape sim tensors transport store syncer learner island checkpoint reference chaos dashboard launch"
    " integrations cli"
)


@pytest.fixture
def project(tmp_path):
    """Return a copy of the package with empty subpackages and our contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("", *PACKAGES.split()):
        (tmp_path / "src/atoll" / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / "src/atoll" / package / "__init__.py").write_text("")
    for module in ("__main__", "errors", "files", "logs"):
        (tmp_path / "src/atoll" / f"{module}.py").write_text("")
    return tmp_path


def test_empty_packages_keep_every_contract(project):
    done = lint_imports(project)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("place", "planted", "contract"),
    [
        ("core/planted.py", "import atoll.sim", "Imports point one way"),
        ("core/planted.py", "import numpy", "core needs nothing but the standard library and msgspec"),
        ("sim/planted.py", "import atoll.cli", "Imports point one way"),
        ("sim/planted.py", "def f():\n    import torch", "sim has no tensors"),
        ("sim/planted.py", "import socket", "sim has no tensors"),
        ("sim/planted.py", "from time import monotonic", "sim has no tensors"),
        ("tensors/planted.py", "import atoll.sim", "Imports point one way"),
        ("tensors/planted.py", "import asyncio", "tensors has no sockets"),
        ("tensors/planted.py", "import threading", "tensors has no sockets"),
        ("transport/planted.py", "import atoll.store", "Imports point one way"),
        ("learner/planted.py", "import atoll.reference", "Imports point one way"),
        ("island/planted.py", "import atoll.learner", "Imports point one way"),
        ("syncer/planted.py", "import atoll.learner", "a syncer process loads no code of the learner"),
        ("syncer/planted.py", "import atoll.island", "a syncer process loads no code of the learner"),
        ("learner/planted.py", "import atoll.syncer", "a learner process loads no code of the syncer"),
        ("tape/planted.py", "import atoll.transport", "Imports point one way"),
        ("attic.py", "", "Imports point one way"),  # a module without a layer
    ],
)
def test_a_planted_import_breaks_its_contract(project, place, planted, contract):
    for package in {Path(place).parent.name} - {"", "."}:
        (project / "src/atoll" / package).mkdir(exist_ok=True)
        (project / "src/atoll" / package / "__init__.py").touch()
    (project / "src/atoll" / place).write_text(planted + "\n")
    done = lint_imports(project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if contract in line and line.endswith("BROKEN")], done.stdout


def ruff_codes(place: str, text: str) -> set[str]:
    done = subprocess.run(
        [TOOLS / "ruff", "check", "--no-cache", "--output-format=concise", "--stdin-filename", place, "-"],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return {line.split()[1] for line in done.stdout.splitlines() if line.startswith(place)}


@pytest.mark.parametrize(
    "module", ["time", "random", "socket", "threading", "asyncio", "os", "datetime", "logging", "io"]
)
def test_core_may_not_reach_outside(module):
    text = f"import {module}\n\nx = {module}.x\n"
    assert ruff_codes("src/atoll/core/planted.py", text) == {"TID251"}
    assert ruff_codes("src/atoll/planted.py", text) == set()


def test_unseeded_random_generator_is_refused():
    place = "src/atoll/sim/planted.py"
    assert ruff_codes(place, "import random\n\nx = random.random()\n") == {"TID251"}
    assert ruff_codes(place, "import random\n\nx = random.Random(7).random()\n") == set()
