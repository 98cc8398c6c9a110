"""What an engine does for a run: it keeps units going, says how they are, and gives what they printed.

A unit is anything of a run that has to be kept alive: the syncer, a shard, an island. An engine is given units and
nothing else, so it needs to know neither the file in which they were named nor the protocol that they speak.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable


@dataclass(frozen=True)
class Unit:
    """One command, started again when it fails."""

    run: str
    """Name of the run: letters, digits and dashes."""
    name: str
    """Within the run, and unique there: "syncer", "shard-1", the name of an island."""
    command: tuple[str, ...]
    directory: Path
    """Where it keeps its files and where the engine puts what it prints; absolute."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of that of the engine. Names with secrets in them are in `secret`."""
    secret: frozenset[str] = frozenset()
    """Variables that nobody may print or put on a command line."""
    nodes: int = 1
    cpus: int = 1
    """Per node."""
    devices: int = 0
    """Accelerators per node."""
    site: str | None = None
    restarts: int = 100
    """How often it is started again after it has failed; one that ends well is not."""
    notice_s: float = 30.0
    """From SIGTERM to SIGKILL: in this time it says goodbye, and an island sends what is not merged yet."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own: a partition, an image, resources. An engine refuses those that it does not know."""


class UnitStanding(Enum):
    """How a unit is, as its engine knows it."""

    WAITING = "waiting"  # for a place in the queue, or to be started again
    RUNNING = "running"
    ENDED = "ended"  # with exit code 0
    FAILED = "failed"  # and has no restart left
    STOPPED = "stopped"  # somebody wanted it so
    GONE = "gone"  # the engine does not know it


@dataclass(frozen=True)
class UnitState:
    standing: UnitStanding
    restarts: int = 0
    why: str = ""
    """In words: what it waits for, how it has failed, where it runs."""


class Engine(Protocol):
    """A handle is what an engine needs to find a unit again, as JSON; it is kept in the run's directory."""

    name: str

    def check(self, unit: Unit) -> None:
        """ValueError with what to do, where this engine cannot run the unit. Starts nothing."""

    def render(self, unit: Unit) -> str:
        """What would be submitted, for people to read; without secrets."""

    def start(self, unit: Unit) -> dict[str, Any]:
        """Returns as soon as the engine has it. It goes on when this process ends."""

    def status(self, handle: Mapping[str, Any]) -> UnitState: ...

    def stop(self, handle: Mapping[str, Any]) -> None:
        """SIGTERM, and SIGKILL after the unit's notice. Returns when nothing of it is left; it may be called twice."""

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        """What it has printed, one file for each time it was started or for each node, oldest first."""


@runtime_checkable
class TakesArrays(Protocol):
    """An engine that takes units which ask for the same in one submission."""

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """Handles in the order of the units."""


# --------------------------------------------------------------------------------------------------------------------
# Engines by name. One is imported when it is needed: Slurm needs no Ray


ENGINES = {
    "local": ("atoll.launch.local", "LocalEngine"),
    "ray": ("atoll.launch.ray_cluster", "RayEngine"),
    "slurm": ("atoll.launch.slurm", "SlurmEngine"),
}

EXAMPLES = {"kubernetes": "examples/kubernetes.yaml", "skypilot": "examples/skypilot.yaml"}
"""Systems for which Atoll has an example file instead of an engine."""

BY_PLACE = frozenset({"ray", "slurm"})
"""They choose the machine: it may be another one than this."""

_EXTRAS = {"ray": "ray"}


def check_name(name: str) -> None:
    """ValueError with the nearest name, or with the example file of a system that has no engine."""
    if name in EXAMPLES:
        raise ValueError(
            f"Atoll has no engine for {name}: adapt {EXAMPLES[name]}, and start it with the tools of {name}"
            " (docs/kubernetes.md)"
        )
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no engine {name!r}: there are {', '.join(ENGINES)}{meant}")


def engine(name: str) -> Engine:
    """ValueError where there is no such engine, or what it needs is not installed."""
    check_name(name)
    module, of_class = ENGINES[name]
    try:
        made = getattr(import_module(module), of_class)()
    except ModuleNotFoundError as missing:
        needed = (missing.name or "").partition(".")[0]
        if needed not in _EXTRAS:
            raise
        extra = f"pip install 'atoll[{_EXTRAS[needed]}]'"
        raise ValueError(f"engine {name} needs {needed}, which is not installed: {extra}") from None
    return cast(Engine, made)
