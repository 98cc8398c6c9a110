"""Small units for tests of engines, and a way to wait for what they do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from atoll.launch.engine import Standing, Status, Unit
from atoll.launch.local import LocalEngine
from atoll.launch.processes import kill

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


class Kept:
    """One unit of the local engine."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine = LocalEngine()
        self.handle = self.engine.start(unit)

    def status(self) -> Status:
        return LocalEngine().status(self.handle)  # by whoever asks, not only by who has started it

    def stands(self, standing: Standing, restarts: int | None = None) -> Status:
        def look() -> Status | None:
            now = self.status()
            return now if now.standing is standing and restarts in (None, now.restarts) else None

        return until(look, f"{standing} of {self.unit.name}")

    def said(self) -> list[str]:
        return [line for path in self.engine.log(self.handle) for line in path.read_text().splitlines()]

    def says(self, words: str) -> None:
        until(lambda: any(words in line for line in self.said()), words)


@contextmanager
def kept(folder: Path, code: str, **fields: object) -> Iterator[Kept]:
    """Nothing of it is left behind."""
    given = {"run": "test", "name": "a", "command": python(code), "directory": folder / "units" / "a", **fields}
    unit = Unit(**given)  # type: ignore[arg-type]
    try:
        made = Kept(unit)
        yield made
        LocalEngine().stop(made.handle)
    finally:
        kill(str(unit.directory))
