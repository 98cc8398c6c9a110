"""What is left of a unit in its directory: what it has printed, and the last word of its keeper."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.files import write_text

LAST_WORD = "ray.json"
"""How the unit is, for those who ask when its keeper is gone."""
FINAL = ("ended", "failed", "stopped")
"""Standings after which there is no keeper."""


def log_name(number: int, node: int, nodes: int) -> str:
    """
    >>> log_name(3, 0, 1), log_name(3, 1, 2)
    ('start-0003.log', 'start-0003-node-1.log')
    """
    return f"start-{number:04}.log" if nodes == 1 else f"start-{number:04}-node-{node}.log"


def logs_in(directory: Path) -> list[Path]:
    """Oldest first."""
    found = [(re.fullmatch(r"start-(\d+)(?:-node-(\d+))?\.log", path.name), path) for path in directory.glob("*.log")]
    numbered = [(int(match[1]), int(match[2] or 0), path) for match, path in found if match]
    return [path for _, _, path in sorted(numbered)]


def next_number(directory: Path) -> int:
    logs = logs_in(directory)
    return int(logs[-1].name.split("-")[1].split(".")[0]) + 1 if logs else 1


def last_word(directory: Path) -> dict[str, Any]:
    """What the keeper told last; empty if it never was."""
    try:
        told: dict[str, Any] = json.loads((directory / LAST_WORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told


def write_last_word(directory: Path, told: Mapping[str, Any]) -> None:
    write_text(directory / LAST_WORD, json.dumps(told), durable=False)


__all__ = ["FINAL", "last_word", "log_name", "logs_in", "next_number", "write_last_word"]
