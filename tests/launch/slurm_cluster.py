"""A real Slurm for a module of tests, and units for it. Tests that use it are marked `needs_slurm`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.launch.engine import Unit, UnitStanding, UnitState
from atoll.launch.slurm import SlurmEngine
from tests.launch.own_slurm import OwnSlurm

LIMIT_S = 300.0
"""Of every wait. Here it is a second or two; a machine with other things to do needs longer."""

GOODBYE = "trap 'echo goodbye; exit 0' TERM; echo begun $SLURM_RESTART_COUNT; while :; do sleep 0.1; done"


def unit(directory: Path, name: str, code: str, **more: Any) -> Unit:
    """What bash runs, in a directory of its own."""
    return Unit("run", name, ("bash", "-c", code), directory / name, **more)


def until(ready: Callable[[], object], what: str) -> None:
    end, never = time.monotonic() + LIMIT_S, threading.Event()
    while not ready():
        assert time.monotonic() < end, f"waited in vain until {what}"
        never.wait(0.05)


class Cluster:
    def __init__(self, slurm: OwnSlurm) -> None:
        self.slurm = slurm
        self.engine = SlurmEngine(slurm.conf)
        self.seen: list[UnitState] = []

    def until(self, handle: dict[str, Any], *standings: UnitStanding, printed: str = "") -> UnitState:
        """How it is as soon as it is one of these, and has printed this."""

        def ready() -> bool:
            self.slurm.hurry(handle["job"])
            self.seen.append(self.engine.status(handle))
            return self.seen[-1].standing in standings and printed in self.printed(handle)

        try:
            until(ready, f"{handle['name']} is {standings} and says {printed!r}")
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.seen[-3:]}\n{self.printed(handle)}") from None
        return self.seen[-1]

    def printed(self, handle: dict[str, Any]) -> str:
        return "".join(path.read_text() for path in self.engine.log(handle))

    def begun(self, handle: dict[str, Any], times: int = 1) -> None:
        """Its command, not only its job."""
        until(lambda: self._looked(handle) and self.printed(handle).count("begun") >= times, f"start {times}")

    def _looked(self, handle: dict[str, Any]) -> bool:
        self.slurm.hurry(handle["job"])
        return True


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    with OwnSlurm(nodes=nodes) as slurm:
        yield Cluster(slurm)


__all__ = ["GOODBYE", "Cluster", "cluster", "unit", "until"]
