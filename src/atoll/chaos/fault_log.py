"""What became of every planned fault, written down as it happens: `chaos/struck.jsonl` in the run's directory.

The tool itself may be interrupted or killed; what it had done by then is in the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.chaos.in_process import FOLDER

STRUCK = "struck.jsonl"
PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault as it was done. Times are seconds of the Unix epoch."""

    number: int
    fired: bool
    began_at: float | None
    ended_at: float | None
    how: str
    why_not: str = ""


class FaultLog:
    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / STRUCK
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, line: dict[str, Any]) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def began(self, at: float) -> None:
        """All learners train: the plan's clock starts."""
        self.write({"began": at})

    def struck(self, what: FaultRecord) -> None:
        self.write(asdict(what))


def read_fault_log(run: Path) -> tuple[float | None, dict[int, FaultRecord]]:
    """When the plan's clock started, and the newest word on every fault."""
    began: float | None = None
    found: dict[int, FaultRecord] = {}
    try:
        lines = (run / FOLDER / STRUCK).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return None, {}
    for line in lines:
        told = json.loads(line)
        if "began" in told:
            began = told["began"]
        else:
            struck = FaultRecord(**told)
            found[struck.number] = struck
    return began, found
