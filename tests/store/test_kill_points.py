"""Short form of benchmarks/kill_points.py: kills at file operations of the write path lose nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.store.test_version_store import ROOT

INTERVAL = 11
"""Test every 11th of some 570 points. It is no divisor of the operations per version, so each operation is tested."""


def kill_outcomes(store: str, power: bool) -> list[dict[str, Any]]:
    program = (
        "import json, torch; torch.set_num_threads(1);"
        "from benchmarks.kill_points import kill_everywhere; from tests.store.store_samples import *;"
        f"print(json.dumps([o._asdict() for o in kill_everywhere({store}, {INTERVAL}, {power})]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("power", [pytest.param(False, marks=pytest.mark.long), True], ids=["killed", "power cut"])
def test_kill_at_any_file_operation_loses_and_damages_nothing(power):
    outcomes = kill_outcomes("Store", power)
    assert [outcome for outcome in outcomes if outcome["problem"]] == []
    assert len(outcomes) > 40
    assert {"open", "write", "half a write", "fsync", "link", "unlink"} <= {
        outcome["operation"] for outcome in outcomes
    }


@pytest.mark.parametrize(
    ("store", "power"), [pytest.param("InPlaceStore", False, marks=pytest.mark.long), ("NameFirstStore", True)]
)
def test_kill_points_find_injected_store_bugs(store, power):
    assert [outcome for outcome in kill_outcomes(store, power) if outcome["problem"]]
