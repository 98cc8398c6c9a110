"""What a launcher does for a run: it keeps units running, reports their state, and returns what they printed.

A unit is a process of a run that is kept running: the syncer, a shard, an island. A launcher receives units and nothing
else, so it needs to know neither the file in which they are named nor the protocol that they speak.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

SYNCER = "syncer"
SHARD_PREFIX = "shard-"


def is_island(name: str) -> bool:
    """Return whether the unit of this name is an island: neither the syncer nor a shard."""
    return name != SYNCER and not name.startswith(SHARD_PREFIX)


@dataclass(frozen=True)
class Unit:
    """One command, started again when it fails."""

    run: str
    """Name of the run: letters, digits and dashes."""
    name: str
    """Unique within the run: "syncer", "shard-1", the name of an island."""
    command: tuple[str, ...]
    directory: Path
    """Where it keeps its files and where the launcher puts what it prints; absolute. Next to those of other units."""
    launcher: str = "local"
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of that of the launcher, with the values of secrets."""
    secret_names: frozenset[str] = frozenset()
    """Variables that must not be printed or put on a command line."""
    nodes: int = 1
    cpus: int = 1
    """Per node."""
    devices: int = 0
    """Accelerators per node."""
    site: str | None = None
    max_restarts: int = 100
    """How often it is started again after a failure; one that ends well is not."""
    notice_s: float = 30.0
    """From SIGTERM to SIGKILL: in this time it says goodbye, and an island sends what is not merged yet."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's own: a partition, an image, resources. A launcher refuses those that it does not know."""

    @property
    def syncer_directory(self) -> Path | None:
        """Directory of the unit of the run's syncer; None for the syncer itself."""
        return None if self.name == SYNCER else self.directory.parent / SYNCER

    @property
    def ends_with_syncer(self) -> bool:
        return self.name.startswith(SHARD_PREFIX)

    def redacted_environment(self) -> dict[str, str]:
        """Return the environment by name, without the values of secrets."""
        return {
            name: "(secret)" if name in self.secret_names else self.environment[name]
            for name in sorted(self.environment)
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"directory": str(self.directory), "secret_names": sorted(self.secret_names)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Unit:
        command, secret = tuple(value["command"]), frozenset(value["secret_names"])
        return cls(**{**value, "command": command, "directory": Path(value["directory"]), "secret_names": secret})


class UnitState(StrEnum):
    """State of a unit, as its launcher knows it."""

    WAITING = "waiting"  # for a place in the queue, or to be started again
    RUNNING = "running"
    ENDED = "ended"  # with exit code 0
    FAILED = "failed"  # and has no restart left
    STOPPED = "stopped"  # on request
    LOST = "lost"  # the launcher does not know it
    NOT_STARTED = "not started"  # no launcher has it
    UNKNOWN = "unknown"  # its launcher does not answer

    @property
    def is_active(self) -> bool:
        """Return whether it runs, or will run again by itself."""
        return self in (UnitState.WAITING, UnitState.RUNNING)

    @property
    def is_finished(self) -> bool:
        return self in (UnitState.ENDED, UnitState.FAILED, UnitState.STOPPED, UnitState.LOST)


@dataclass(frozen=True)
class UnitStatus:
    state: UnitState
    restarts: int = 0
    cause: str = ""
    """In words: what it waits for, how it has failed, where it runs."""


class Launcher(Protocol):
    """A handle is what a launcher needs to find a unit again, as JSON; it is kept in the run's directory."""

    def check(self, unit: Unit) -> None:
        """ValueError with what to do, where this launcher cannot run the unit. Starts nothing."""

    def render(self, unit: Unit) -> str:
        """What would be submitted, for people to read; without secrets."""

    def start(self, unit: Unit) -> dict[str, Any]:
        """Returns as soon as the launcher has it. It goes on when this process ends."""

    def status(self, handle: Mapping[str, Any]) -> UnitStatus: ...

    def stop(self, handle: Mapping[str, Any]) -> None:
        """SIGTERM, and SIGKILL after the unit's notice. Returns when nothing of it is left; it may be called twice."""

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        """What it has printed, one file for each time it was started or for each node, oldest first."""


@runtime_checkable
class ArrayLauncher(Protocol):
    """A launcher that takes units which ask for the same in one submission."""

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """Handles in the order of the units."""


# --------------------------------------------------------------------------------------------------------------------
# What all launchers do alike


def search_path(path: str | None = None) -> str:
    """Return PATH for a unit: programs of the environment in which Atoll runs first, even if it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), path or os.environ.get("PATH", os.defpath)])


def inherited_environment(excluded: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of this process for a unit, without these variables and those of another run."""
    kept = {name: value for name, value in os.environ.items() if name[:6] != "ATOLL_" and name not in excluded}
    return kept | {"PATH": search_path()}


_START_LOG = re.compile(r"start-(\d+)(?:-node-(\d+))?\.log")


def start_log_name(start: int, node: int = 0, nodes: int = 1) -> str:
    """Return the name of the file for what one start of a unit prints.

    >>> start_log_name(3), start_log_name(3, 1, 2)
    ('start-0003.log', 'start-0003-node-1.log')
    """
    return f"start-{start:04}.log" if nodes == 1 else f"start-{start:04}-node-{node}.log"


def find_start_logs(directory: Path, after: int = 0) -> list[Path]:
    """Return the logs of the starts with a higher number than `after`, oldest first."""
    found = [(match, path) for path in directory.glob("start-*") if (match := _START_LOG.fullmatch(path.name))]
    numbered = sorted((int(match[1]), int(match[2] or 0), path) for match, path in found)
    return [path for start, _, path in numbered if start > after]


def last_start_number(directory: Path) -> int:
    """Return the number of the last start that has a log; 0 if there is none."""
    logs = find_start_logs(directory)
    match = _START_LOG.fullmatch(logs[-1].name) if logs else None
    return int(match[1]) if match else 0


# --------------------------------------------------------------------------------------------------------------------
# Launchers by name. One is imported when it is needed: Slurm needs no Ray


LAUNCHERS = {
    "local": ("atoll.launch.local", "LocalLauncher"),
    "ray": ("atoll.launch.ray_cluster", "RayLauncher"),
    "slurm": ("atoll.launch.slurm", "SlurmLauncher"),
}

EXAMPLE_FILES = {"kubernetes": "examples/kubernetes.yaml", "skypilot": "examples/skypilot.yaml"}
"""Systems for which Atoll has an example file instead of a launcher."""

REMOTE_LAUNCHERS = frozenset({"ray", "slurm"})
"""They choose the machine: it may be another one than this."""

_EXTRAS = {"ray": "ray"}


def check_launcher_name(name: str) -> None:
    """ValueError with the nearest name, or with the example file of a system that has no launcher."""
    if name in EXAMPLE_FILES:
        raise ValueError(
            f"Atoll has no launcher for {name}: adapt {EXAMPLE_FILES[name]}, and start it with the tools of {name}"
            " (docs/kubernetes.md)"
        )
    if name not in LAUNCHERS:
        near = difflib.get_close_matches(name, LAUNCHERS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no launcher {name!r}: there are {', '.join(LAUNCHERS)}{meant}")


def load_launcher(name: str) -> Launcher:
    """ValueError where there is no such launcher, or what it needs is not installed."""
    check_launcher_name(name)
    module, of_class = LAUNCHERS[name]
    try:
        made = getattr(import_module(module), of_class)()
    except ModuleNotFoundError as missing:
        needed = (missing.name or "").partition(".")[0]
        if needed not in _EXTRAS:
            raise
        extra = f"pip install 'atoll[{_EXTRAS[needed]}]'"
        raise ValueError(f"launcher {name} needs {needed}, which is not installed: {extra}") from None
    return cast(Launcher, made)
