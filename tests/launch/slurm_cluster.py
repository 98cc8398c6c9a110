"""A real Slurm for a module of tests, and units for it. Tests that use it are marked `needs_slurm`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.launch.launcher import Unit, UnitState, UnitStatus
from atoll.launch.slurm import SlurmLauncher
from tests.launch.local_slurm import LocalSlurm

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
    def __init__(self, slurm: LocalSlurm) -> None:
        self.slurm = slurm
        self.launcher = SlurmLauncher(slurm.conf)
        self.seen: list[UnitStatus] = []

    def until(self, handle: dict[str, Any], *states: UnitState, printed: str = "") -> UnitStatus:
        """How it is as soon as it is one of these, and has printed this."""

        def ready() -> bool:
            self.slurm.hurry(handle["job"])
            self.seen.append(self.launcher.status(handle))
            return self.seen[-1].state in states and printed in self.printed(handle)

        try:
            until(ready, f"{handle['name']} is {states} and says {printed!r}")
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.seen[-3:]}\n{self.printed(handle)}") from None
        return self.seen[-1]

    def printed(self, handle: dict[str, Any]) -> str:
        return "".join(path.read_text() for path in self.launcher.log(handle))

    def begun(self, handle: dict[str, Any], times: int = 1) -> None:
        """Its command, not only its job."""
        until(lambda: self._looked(handle) and self.printed(handle).count("begun") >= times, f"start {times}")

    def _looked(self, handle: dict[str, Any]) -> bool:
        self.slurm.hurry(handle["job"])
        return True


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    with LocalSlurm(nodes=nodes) as slurm:
        yield Cluster(slurm)


__all__ = ["GOODBYE", "Cluster", "cluster", "unit", "until"]
