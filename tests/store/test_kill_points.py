"""The short form of benchmarks/kill_points.py: killed at file operations of the write path, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.store.test_version_store import ROOT

EVERY = 11
"""Of some 570 points; not a divisor of the number of operations that a version takes, so all of them are met."""


def outcomes(store: str, power: bool) -> list[dict[str, Any]]:
    program = (
        "import json, torch; torch.set_num_threads(1);"
        "from benchmarks.kill_points import kill_everywhere; from tests.store.store_samples import *;"
        f"print(json.dumps([o._asdict() for o in kill_everywhere({store}, {EVERY}, {power})]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("power", [pytest.param(False, marks=pytest.mark.long), True], ids=["killed", "power cut"])
def test_killed_at_a_file_operation_nothing_is_lost_or_damaged(power):
    found = outcomes("Store", power)
    assert [outcome for outcome in found if outcome["problem"]] == []
    assert len(found) > 40
    assert {"open", "write", "half a write", "fsync", "link", "unlink"} <= {outcome["operation"] for outcome in found}


@pytest.mark.parametrize(
    ("store", "power"), [pytest.param("InPlaceStore", False, marks=pytest.mark.long), ("NameFirstStore", True)]
)
def test_a_store_that_is_careless_is_caught(store, power):
    assert [outcome for outcome in outcomes(store, power) if outcome["problem"]]
