"""Make a run once per test session and share it between pytest workers, for tests that only read it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """Return the folder of this name, and the result of the `make` call that filled it.

    The first worker calls `make`; the others wait. The result must be JSON. If `make` fails, the next worker calls it
    again with another folder.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result_file = base / f"{name}.json"
        if not result_file.exists():
            new = factory.mktemp(name)
            result_file.write_text(json.dumps([str(new), make(new)]))
        folder, result = json.loads(result_file.read_text())
        return Path(folder), result
