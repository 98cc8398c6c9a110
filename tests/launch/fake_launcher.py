"""Launchers that start nothing and answer as a test wants; `use_fakes` makes files of `atoll up` know them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atoll.launch import launcher as launchers
from atoll.launch.launcher import Unit, UnitState, UnitStatus


class FakeLauncher:
    name = "fake"
    submitted: ClassVar[list[tuple[str, ...]]] = []
    """Names of units, one tuple for each submission."""
    states: ClassVar[dict[str, UnitState]] = {}
    """RUNNING unless the test sets another state."""
    asked: ClassVar[list[str]] = []
    silent: ClassVar[list[str]] = []
    """Units for which it does not answer; each fails once."""
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
            self.states[unit.name] = UnitState.RUNNING
        for do in self.on_start:
            do()

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        self._hear(handle)
        return UnitStatus(self.states.get(handle["name"], UnitState.RUNNING))

    def stop(self, handle: Mapping[str, Any]) -> None:
        self._hear(handle)
        self.states[handle["name"]] = UnitState.STOPPED

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return [self.folder / f"{handle['name']}.log"]

    def _hear(self, handle: Mapping[str, Any]) -> None:
        self.asked.append(handle["name"])
        if handle["name"] in self.silent:
            self.silent.remove(handle["name"])
            raise ConnectionError("no answer")


class FakeArrayLauncher(FakeLauncher):
    name = "arrays"

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        self._submit(units)
        return [{"name": unit.name} for unit in units]


def use_fake_launchers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for made in (FakeLauncher, FakeArrayLauncher):
        monkeypatch.setitem(launchers.LAUNCHERS, made.name, (__name__, made.__name__))
    for name in ("submitted", "asked", "silent", "on_start"):
        monkeypatch.setattr(FakeLauncher, name, [])
    monkeypatch.setattr(FakeLauncher, "states", {})
    monkeypatch.setattr(FakeLauncher, "folder", folder)
