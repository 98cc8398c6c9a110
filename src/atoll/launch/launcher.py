"""The interface of launchers: start units, restart them, report their state, return their logs.

A unit is one supervised process of a run: the syncer, a shard or an island. A launcher receives only units. It depends
neither on the islands file nor on the protocol.
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
    """Command that a launcher runs, and restarts when it fails."""

    run: str
    """Name of the run: letters, digits and dashes."""
    name: str
    """Name that is unique within the run: "syncer", "shard-1" or the name of an island."""
    command: tuple[str, ...]
    directory: Path
    """Absolute working directory, next to those of the other units. The launcher writes the logs into it."""
    launcher: str = "local"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the environment of the launcher, with the values of secrets."""
    secret_names: frozenset[str] = frozenset()
    """Variables that must not be printed or put on a command line."""
    nodes: int = 1
    cpus: int = 1
    """CPUs per node."""
    devices: int = 0
    """Accelerators per node."""
    site: str | None = None
    max_restarts: int = 100
    """Maximum number of restarts after failures. Exit code 0 is not a failure."""
    notice_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL. In this time an island uploads its unmerged work."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Launcher-specific options, such as a partition, an image or resources. A launcher refuses unknown ones."""

    @property
    def syncer_directory(self) -> Path | None:
        """Directory of the syncer's unit; None for the syncer itself."""
        return None if self.name == SYNCER else self.directory.parent / SYNCER

    @property
    def ends_with_syncer(self) -> bool:
        """True for a shard: it is restarted until its syncer has ended."""
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
    """State of a unit according to its launcher."""

    WAITING = "waiting"  # in the queue, or before a restart
    RUNNING = "running"
    ENDED = "ended"  # with exit code 0
    FAILED = "failed"  # no restart left
    STOPPED = "stopped"  # on request
    LOST = "lost"  # the launcher does not know the unit
    NOT_STARTED = "not started"  # no launcher has received the unit
    UNKNOWN = "unknown"  # the launcher does not reply

    @property
    def is_active(self) -> bool:
        """Return whether the unit runs, or will run without a new `start`."""
        return self in (UnitState.WAITING, UnitState.RUNNING)

    @property
    def is_finished(self) -> bool:
        return self in (UnitState.ENDED, UnitState.FAILED, UnitState.STOPPED, UnitState.LOST)


@dataclass(frozen=True)
class UnitStatus:
    state: UnitState
    restarts: int = 0
    cause: str = ""
    """Human-readable detail: the awaited resource, the failure or the node."""


class Launcher(Protocol):
    """System that runs units.

    `start` returns a handle: the JSON object that identifies the unit in later calls. `atoll up` stores it in the
    run's directory.
    """

    def check(self, unit: Unit) -> None:
        """Raise ValueError if this launcher cannot run the unit. Start nothing."""

    def render(self, unit: Unit) -> str:
        """Return a human-readable form of the submission, without secrets."""

    def start(self, unit: Unit) -> dict[str, Any]:
        """Submit the unit and return its handle. The unit continues when this process ends."""

    def status(self, handle: Mapping[str, Any]) -> UnitStatus: ...

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Send SIGTERM, and SIGKILL after the unit's notice. Return when no process is left. Idempotent."""

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        """Return the log files, one for each start and node, oldest first."""


@runtime_checkable
class ArrayLauncher(Protocol):
    """A launcher that can submit several units with equal resources at once."""

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """Submit the units and return their handles in the same order."""


# --------------------------------------------------------------------------------------------------------------------
# Helpers of all launchers


def search_path(path: str | None = None) -> str:
    """Return PATH for a unit. The programs of this Python environment come first, even if it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), path or os.environ.get("PATH", os.defpath)])


def inherited_environment(excluded: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of this process for a unit, without `excluded` and the ATOLL_ variables of another run."""
    inherited = {name: value for name, value in os.environ.items() if name[:6] != "ATOLL_" and name not in excluded}
    return inherited | {"PATH": search_path()}


_START_LOG = re.compile(r"start-(\d+)(?:-node-(\d+))?\.log")


def start_log_name(start: int, node: int = 0, nodes: int = 1) -> str:
    """Return the name of the log file of one start of a unit.

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
# Launchers by name. They are imported on demand: Slurm needs no Ray


LAUNCHERS = {
    "local": ("atoll.launch.local", "LocalLauncher"),
    "ray": ("atoll.launch.ray_cluster", "RayLauncher"),
    "slurm": ("atoll.launch.slurm", "SlurmLauncher"),
}

EXAMPLE_FILES = {"kubernetes": "examples/kubernetes.yaml", "skypilot": "examples/skypilot.yaml"}
"""Systems for which Atoll has an example file instead of a launcher."""

REMOTE_LAUNCHERS = frozenset({"ray", "slurm"})
"""Launchers that choose the machine of a unit: it may not be this one."""

_EXTRAS = {"ray": "ray"}


def check_launcher_name(name: str) -> None:
    """Raise ValueError if there is no launcher of this name."""
    if name in EXAMPLE_FILES:
        raise ValueError(
            f"Atoll has no launcher for {name}: adapt {EXAMPLE_FILES[name]}, then start it with the tools of {name}"
            " (docs/kubernetes.md)"
        )
    if name not in LAUNCHERS:
        similar = difflib.get_close_matches(name, LAUNCHERS, 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"there is no launcher {name!r}: there are {', '.join(LAUNCHERS)}{hint}")


def load_launcher(name: str) -> Launcher:
    """Return a new launcher. Raise ValueError if the name is unknown or a required package is not installed."""
    check_launcher_name(name)
    module, class_name = LAUNCHERS[name]
    try:
        launcher = getattr(import_module(module), class_name)()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        command = f"pip install 'atoll[{_EXTRAS[package]}]'"
        raise ValueError(f"launcher {name} needs {package}, which is not installed: {command}") from None
    return cast(Launcher, launcher)
