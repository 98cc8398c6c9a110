"""What became of every planned fault, written down as it happens: `chaos/faults.jsonl` in the run's directory.

The tool itself may be interrupted or killed; what it had done by then is in the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.chaos.in_process import CHAOS_FOLDER

FAULTS_FILE = "faults.jsonl"
PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault as it was done. Times are seconds of the Unix epoch."""

    number: int
    was_injected: bool
    started_at: float | None
    ended_at: float | None
    method: str
    failure_cause: str = ""


class FaultLog:
    def __init__(self, run: Path) -> None:
        self._path = run / CHAOS_FOLDER / FAULTS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, line: dict[str, Any]) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def record_start(self, at: float) -> None:
        """All learners train: the plan's clock starts."""
        self.write({"plan_started_at": at})

    def record_fault(self, what: FaultRecord) -> None:
        self.write(asdict(what))


def read_fault_log(run: Path) -> tuple[float | None, dict[int, FaultRecord]]:
    """When the plan's clock started, and the newest word on every fault."""
    began: float | None = None
    found: dict[int, FaultRecord] = {}
    try:
        lines = (run / CHAOS_FOLDER / FAULTS_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return None, {}
    for line in lines:
        told = json.loads(line)
        if "plan_started_at" in told:
            began = told["plan_started_at"]
        else:
            struck = FaultRecord(**told)
            found[struck.number] = struck
    return began, found
