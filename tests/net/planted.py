"""Bugs and faults that are planted in a child process, by name. Each is a small change of the real code."""

from __future__ import annotations

from pathlib import Path


def plant(name: str, directory: Path) -> None:
    if name:
        PLANTS[name](directory)


PLANTS: dict = {}
