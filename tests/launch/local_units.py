"""Small units for tests of engines, and a way to wait for what they do."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from atoll.launch.engine import Unit, UnitStanding, UnitState
from atoll.launch.guard import ProcessId, process_id, send_signal
from atoll.launch.keeper import read_state
from atoll.launch.local import LocalEngine

PATIENCE_S = 300.0
T = TypeVar("T")


def until(look: Callable[[], T | None], about: str = "") -> T:
    """What `look` sees as soon as it sees something. The machine may have other things to do."""
    end = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (found := look()):
        assert time.monotonic() < end, f"waited in vain: {about or look}"
        pause.wait(0.05)
    return found


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def keeper_of(directory: Path) -> ProcessId:
    found = ProcessId.from_json((read_state(directory) or {}).get("keeper"))
    assert found is not None
    return found


def processes_of(directory: Path) -> list[ProcessId]:
    """Everything that runs in the directory of a unit, as its commands do, whatever session it is in."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cwd").readlink() == directory:
                found.append(process_id(int(folder.name)))
    return [one for one in found if one is not None]


def end_unit(directory: Path) -> None:
    """Kill all of it, for a test that has failed."""
    keeper = ProcessId.from_json((read_state(directory) or {}).get("keeper"))
    for process in [*([keeper] if keeper is not None else []), *processes_of(directory)]:
        send_signal(process, signal.SIGKILL)


class KeptUnit:
    """One unit of the local engine."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine = LocalEngine()
        self.handle = self.engine.start(unit)

    def status(self) -> UnitState:
        return LocalEngine().status(self.handle)  # by whoever asks, not only by who has started it

    def stands(self, standing: UnitStanding, restarts: int | None = None) -> UnitState:
        def look() -> UnitState | None:
            now = self.status()
            return now if now.standing is standing and restarts in (None, now.restarts) else None

        return until(look, f"{standing} of {self.unit.name}")

    def said(self) -> list[str]:
        return [line for path in self.engine.log(self.handle) for line in path.read_text().splitlines()]

    def says(self, words: str) -> None:
        until(lambda: any(words in line for line in self.said()), words)


@contextmanager
def kept(folder: Path, code: str, **fields: object) -> Iterator[KeptUnit]:
    """Nothing of it is left behind."""
    given = {"run": "test", "name": "a", "command": python(code), "directory": folder / "units" / "a", **fields}
    unit = Unit(**given)  # type: ignore[arg-type]
    try:
        made = KeptUnit(unit)
        yield made
        LocalEngine().stop(made.handle)
    finally:
        end_unit(unit.directory)
