"""A run that several tests only read is made once for all worker processes of a test session."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """Return an own folder for this name, and what `make` returned when it filled that folder.

    The first worker that comes here calls `make`, the others wait for it. The result has to be what JSON can hold. A
    `make` that fails is called again by the next worker, in another folder.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = base / f"{name}.json"
        if not kept.exists():
            new = factory.mktemp(name)
            kept.write_text(json.dumps([str(new), make(new)]))
        folder, made = json.loads(kept.read_text())
        return Path(folder), made
