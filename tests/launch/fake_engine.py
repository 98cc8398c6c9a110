"""Engines that start nothing and answer as a test wants; `use_fakes` makes files of `atoll up` know them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atoll.launch import engine as engines
from atoll.launch.engine import Unit, UnitStanding, UnitState


class FakeEngine:
    name = "fake"
    submitted: ClassVar[list[tuple[str, ...]]] = []
    """Names of units, one tuple for each submission."""
    standings: ClassVar[dict[str, UnitStanding]] = {}
    """RUNNING where nothing is said."""
    asked: ClassVar[list[str]] = []
    silent: ClassVar[list[str]] = []
    """Units for which it does not answer; each is heard once."""
    on_start: ClassVar[list[Callable[[], object]]] = []
    folder: ClassVar[Path] = Path()

    def check(self, unit: Unit) -> None:
        pass

    def render(self, unit: Unit) -> str:
        return unit.name

    def start(self, unit: Unit) -> dict[str, Any]:
        self._submit([unit])
        return {"name": unit.name}

    def _submit(self, units: Sequence[Unit]) -> None:
        self.submitted.append(tuple(unit.name for unit in units))
        for unit in units:
            self.standings[unit.name] = UnitStanding.RUNNING
        for do in self.on_start:
            do()

    def status(self, handle: Mapping[str, Any]) -> UnitState:
        self._hear(handle)
        return UnitState(self.standings.get(handle["name"], UnitStanding.RUNNING))

    def stop(self, handle: Mapping[str, Any]) -> None:
        self._hear(handle)
        self.standings[handle["name"]] = UnitStanding.STOPPED

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return [self.folder / f"{handle['name']}.log"]

    def _hear(self, handle: Mapping[str, Any]) -> None:
        self.asked.append(handle["name"])
        if handle["name"] in self.silent:
            self.silent.remove(handle["name"])
            raise ConnectionError("nobody answers")


class FakeArrayEngine(FakeEngine):
    name = "arrays"

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        self._submit(units)
        return [{"name": unit.name} for unit in units]


def use_fakes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for made in (FakeEngine, FakeArrayEngine):
        monkeypatch.setitem(engines.ENGINES, made.name, (__name__, made.__name__))
    for name in ("submitted", "asked", "silent", "on_start"):
        monkeypatch.setattr(FakeEngine, name, [])
    monkeypatch.setattr(FakeEngine, "standings", {})
    monkeypatch.setattr(FakeEngine, "folder", folder)
