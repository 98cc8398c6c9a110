"""Style, types and import rules, as in `make check`.

As tests they run in parallel with the others: `mypy` alone takes most of a minute on one core.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TYPED = [name for name in ("src", "tests", "benchmarks", "examples", "site_parts") if (ROOT / name).is_dir()]


@pytest.mark.parametrize(
    "command",
    [["mypy", *TYPED], ["ruff", "check", "."], ["ruff", "format", "--check", "."], ["lint-imports", "--no-logo"]],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_repository_passes(command: list[str]) -> None:
    tool = Path(sys.executable).with_name(command[0])
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
