"""Log of the injected faults, `chaos/faults.jsonl` in the run's directory.

Every line is written at once, so the log is complete even if `atoll chaos` itself is interrupted or killed.
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
    """Fault as it was injected. Times are seconds of the Unix epoch."""

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
        """Record that all learners train and the plan's clock has started."""
        self.write({"plan_started_at": at})

    def record_fault(self, fault: FaultRecord) -> None:
        self.write(asdict(fault))


def read_fault_log(run: Path) -> tuple[float | None, dict[int, FaultRecord]]:
    """Return when the plan's clock started, and the newest record of every fault by number."""
    started_at: float | None = None
    records: dict[int, FaultRecord] = {}
    try:
        lines = (run / CHAOS_FOLDER / FAULTS_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return None, {}
    for line in lines:
        fields = json.loads(line)
        if "plan_started_at" in fields:
            started_at = fields["plan_started_at"]
        else:
            record = FaultRecord(**fields)
            records[record.number] = record
    return started_at, records
