"""Small units for tests of launchers, and a way to wait for what they do."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from atoll.launch.guard import ProcessId, identify_process, send_signal
from atoll.launch.launcher import Unit, UnitState, UnitStatus
from atoll.launch.local import LocalLauncher
from atoll.launch.local_supervisor import read_state

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


def supervisor_of(directory: Path) -> ProcessId:
    found = ProcessId.from_json((read_state(directory) or {}).get("supervisor"))
    assert found is not None
    return found


def processes_of(directory: Path) -> list[ProcessId]:
    """Everything that runs in the directory of a unit, as its commands do, whatever session it is in."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cwd").readlink() == directory:
                found.append(identify_process(int(folder.name)))
    return [one for one in found if one is not None]


def end_unit(directory: Path) -> None:
    """Kill all of it, for a test that has failed."""
    supervisor = ProcessId.from_json((read_state(directory) or {}).get("supervisor"))
    for process in [*([supervisor] if supervisor is not None else []), *processes_of(directory)]:
        send_signal(process, signal.SIGKILL)


class KeptUnit:
    """One unit of the local launcher."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.launcher = LocalLauncher()
        self.handle = self.launcher.start(unit)

    def status(self) -> UnitStatus:
        return LocalLauncher().status(self.handle)  # any launcher object may ask, not only the one that started it

    def stands(self, state: UnitState, restarts: int | None = None) -> UnitStatus:
        def look() -> UnitStatus | None:
            now = self.status()
            return now if now.state is state and restarts in (None, now.restarts) else None

        return until(look, f"{state} of {self.unit.name}")

    def said(self) -> list[str]:
        return [line for path in self.launcher.log(self.handle) for line in path.read_text().splitlines()]

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
        LocalLauncher().stop(made.handle)
    finally:
        end_unit(unit.directory)
