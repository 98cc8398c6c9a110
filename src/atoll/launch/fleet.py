"""Start, stop, inspect and follow the units of one run, for `atoll up`, `down`, `status` and `logs`.

`fleet/units.json` in the run's directory is the state between two commands. It has for each unit its launcher, the
handle for that launcher, and the specification with which the unit was started. It is written after each start, so that
no unit is lost.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from atoll.files import LockHeldError, acquire_lock, write_text
from atoll.launch.islands_file import IslandsFile
from atoll.launch.launcher import (
    SHARD_PREFIX,
    SYNCER,
    ArrayLauncher,
    Launcher,
    Unit,
    UnitState,
    is_island,
    load_launcher,
)
from atoll.launch.units import FLEET_FOLDER

UNITS_FILE, LOCK_FILE = "units.json", "lock"
FORMAT = 1
MAX_PARALLEL_STOPS = 32
"""Number of units that are stopped in parallel: each may take its full notice."""

POLL_INTERVAL_S, REMOTE_POLL_INTERVAL_S = 1.0, 5.0
"""Intervals between two polls of the units, for local and for remote launchers."""

SYNCER_EXIT_TIMEOUT_S = 120.0
"""Time that the syncer has after the last island to write the model and exit."""

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

NotifyUnit = Callable[[str, str], None]  # name of a unit, message


class UnitRecord(NamedTuple):
    launcher: str
    handle: Mapping[str, Any]
    spec: Mapping[str, Any]
    """Specification with which the unit was started, without secrets."""


class UnitReport(NamedTuple):
    name: str
    launcher: str
    state: UnitState = UnitState.NOT_STARTED
    restarts: int = 0
    cause: str = ""
    """Human-readable detail; if the launcher does not reply, the error."""

    @property
    def is_problem(self) -> bool:
        return self.state in (UnitState.FAILED, UnitState.LOST, UnitState.UNKNOWN)


class Fleet:
    """The units of one run, across all launchers."""

    def __init__(self, file: IslandsFile) -> None:
        self.file = file
        self.folder = file.directory / FLEET_FOLDER
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, name: str) -> Launcher:
        if name not in self._launchers:
            self._launchers[name] = load_launcher(name)
        return self._launchers[name]

    # -------------------------------------------------------------------------------------------------------- status

    def read_units(self) -> dict[str, UnitRecord]:
        """Return the records of all units that were started."""
        try:
            content = json.loads((self.folder / UNITS_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise ValueError(
                f"{self.folder / UNITS_FILE} cannot be read: it is damaged; restore it from a backup"
            ) from None
        if content.get("format") != FORMAT:
            raise ValueError(f"{self.folder / UNITS_FILE} was written by another version of Atoll: use that version")
        return {name: UnitRecord(**fields) for name, fields in content["units"].items()}

    def statuses(self, requested: Sequence[str] = ()) -> list[UnitReport]:
        """Return the status of the requested units, or of all units.

        Units of the file come first, then those that were removed from it.
        """
        known = self.read_units()
        return [self._status(name, known) for name in self.names(requested)]

    def _status(self, name: str, known: Mapping[str, UnitRecord]) -> UnitReport:
        """Return the status of a unit; UNKNOWN if its launcher does not reply."""
        if name not in known:
            return UnitReport(name, self._launchers_by_unit().get(name, ""))
        record = known[name]
        try:
            status = self.launcher(record.launcher).status(record.handle)
        except Exception as error:
            return UnitReport(name, record.launcher, UnitState.UNKNOWN, cause=f"no status: {_error_text(error)}")
        return UnitReport(name, record.launcher, status.state, status.restarts, status.cause)

    def logs(self, name: str) -> list[Path]:
        """Return the log files of a unit, oldest first."""
        record = self.read_units().get(name)
        return self.launcher(record.launcher).log(record.handle) if record is not None else []

    def names(self, requested: Sequence[str]) -> list[str]:
        """Return the requested names, or all names if none is requested. Raise ValueError for an unknown one."""
        listed = self._launchers_by_unit()
        existing = [*listed, *(name for name in self.read_units() if name not in listed)]
        for name in requested:
            if name not in existing:
                similar = difflib.get_close_matches(name, existing, 1)
                hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(existing)}"
                raise ValueError(f"{self.file.path} has no unit {name}: {hint}")
        return [name for name in existing if not requested or name in requested]

    def _launchers_by_unit(self) -> dict[str, str]:
        """Return the launcher of each unit of the file, by name."""
        syncer_and_shards = [SYNCER, *(f"{SHARD_PREFIX}{k}" for k in range(self.file.syncer.shards))]
        islands = {island.unit.name: island.unit.launcher for island in self.file.islands}
        return dict.fromkeys(syncer_and_shards, self.file.syncer.unit.launcher) | islands

    def is_finished(self) -> bool:
        """Return whether the run is over, from the store if it is on a disk of this machine.

        The model of a run with shards is gathered after the manifest is written.
        """
        model = not self.file.syncer.shards or (self.file.directory / "model.safetensors").exists()
        return model and self._has_manifest()

    def _has_manifest(self) -> bool:
        """Return whether the final manifest exists: islands have finished their work."""
        return (self.file.directory / "store" / "manifest.json").exists()

    # --------------------------------------------------------------------------------------------------------- start

    def check(self, units: Sequence[Unit]) -> None:
        """Raise ValueError with the problems of all units. Start nothing."""
        problems: list[str] = []
        for unit in units:
            try:
                self.launcher(unit.launcher).check(unit)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))

    def up(self, units: Sequence[Unit], notify: NotifyUnit) -> list[str]:
        """Start units that are new, have failed, or have exited from an unfinished run. Return their names.
        Idempotent."""
        started: list[str] = []
        with self.lock("atoll up"):
            known = self.read_units()
            before = {name: self._status(name, known) for name in known}
            is_over = self.is_finished() or (SYNCER in before and before[SYNCER].state == UnitState.ENDED)
            pending: list[Unit] = []
            for unit in units:
                if unit.name in known:
                    skip_reason = self._skip_reason(unit, known[unit.name].spec, before[unit.name], is_over)
                else:
                    skip_reason = "the run is over: not started" if is_over else None
                if skip_reason is not None:
                    notify(unit.name, skip_reason)
                else:
                    pending.append(unit)
            for group in self._group_arrays(pending):
                with _defer_signals():  # a running unit without a record is lost
                    for unit, handle in zip(group, self._start(group), strict=True):
                        known[unit.name] = UnitRecord(unit.launcher, handle, _describe_unit(unit))
                    self._write_units(known)
                for unit in group:
                    started.append(unit.name)
                    notify(unit.name, "restarted" if unit.name in before else f"started by launcher {unit.launcher}")
            for name in set(before).difference(self._launchers_by_unit()):
                notify(name, f"is {before[name].state}, but no longer in the file: run atoll down to remove it")
        return started

    def _group_arrays(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Group the islands of one table if their launcher is an `ArrayLauncher`. Other units are alone in a group."""
        tables = {island.unit.name: island.table_name for island in self.file.islands}
        groups: list[list[Unit]] = []
        before: str | None = None
        for unit in units:
            table = tables.get(unit.name)
            if table is not None and table == before and isinstance(self.launcher(unit.launcher), ArrayLauncher):
                groups[-1].append(unit)
            else:
                groups.append([unit])
            before = table
        return groups

    def _start(self, group: Sequence[Unit]) -> list[dict[str, Any]]:
        launcher = self.launcher(group[0].launcher)
        if len(group) > 1 and isinstance(launcher, ArrayLauncher):
            return launcher.start_array(group)
        return [launcher.start(unit) for unit in group]

    def _skip_reason(self, unit: Unit, spec: Mapping[str, Any], status: UnitReport, is_over: bool) -> str | None:
        """Return why `up` does not restart a unit that was started before; None to restart it."""
        state = status.state
        if state == UnitState.UNKNOWN:
            return f"{status.cause}; unchanged; {self._forget_hint(status.name)}"
        if state.is_active:
            changed = _changes(spec, _describe_unit(unit))
            if changed:
                return f"is {state} as before, but {', '.join(changed)} changed: run atoll down, then atoll up"
            return f"is {state}: unchanged"
        if state == UnitState.ENDED:
            is_complete = is_over or (is_island(unit.name) and self._has_manifest())
            return "has ended: unchanged" if is_complete else None
        return f"{state}, and the run is over: unchanged" if is_over else None

    # ---------------------------------------------------------------------------------------------------------- stop

    def down(self, requested: Sequence[str], notify: NotifyUnit) -> bool:
        """Stop units: islands first, so that they can upload unmerged work. Return whether all are stopped."""
        names = self.names(requested)
        with self.lock("atoll down"):
            known = self.read_units()
            islands = [name for name in names if is_island(name)]
            others = [name for name in names if name not in islands]
            # The syncer before its shards: it would wait for a stopped shard.
            stopped = [self._stop_all(each, known, notify) for each in (islands, others[:1], others[1:])]
            removed = set(names).difference(self._launchers_by_unit())
            if all(stopped) and removed:
                self._write_units({name: unit for name, unit in known.items() if name not in removed})
            return all(stopped)

    def forget(self, requested: Sequence[str], notify: NotifyUnit) -> bool:
        """Delete the records of units whose launcher does not reply. Return False if a unit is still active."""
        with self.lock("atoll down"):
            known = self.read_units()
            is_done = True
            for name in requested:
                state, cause = (status := self._status(name, known)).state, status.cause
                if state.is_active:
                    notify(name, f"is {state}, and its launcher replies: run atoll down {self.file.path} {name}")
                    is_done = False
                elif name not in known:
                    notify(name, "was not started")
                else:
                    is_unknown = state == UnitState.UNKNOWN
                    hint = "; if it still runs there, stop it there before you start it again" if is_unknown else ""
                    notify(name, f"forgotten: {cause or state}{hint}")
                    del known[name]
                    self._write_units(known)
            return is_done

    def _forget_hint(self, name: str) -> str:
        return f"if it is lost for good: atoll down {self.file.path} {name} --forget"

    def _stop_all(self, names: Sequence[str], known: Mapping[str, UnitRecord], notify: NotifyUnit) -> bool:
        running = []
        for name in names:
            state = self._status(name, known).state
            if name not in known:
                notify(name, "was not started")
            elif state in (UnitState.ENDED, UnitState.LOST):
                notify(name, f"is {state}")
            else:
                running.append(name)

        def stop(name: str) -> bool:
            try:
                self.launcher(known[name].launcher).stop(known[name].handle)
            except Exception as error:
                notify(name, f"cannot be stopped: {_error_text(error)}; {self._forget_hint(name)}")
                return False
            notify(name, "stopped")
            return True

        if not running:
            return True
        with ThreadPoolExecutor(min(MAX_PARALLEL_STOPS, len(running))) as pool:
            return all(list(pool.map(stop, running)))

    # -------------------------------------------------------------------------------------------------------- follow

    def follow(self, show: Callable[[list[UnitReport]], None]) -> list[UnitReport]:
        """Wait until all islands have ended; return the last status of all units."""
        restarts_at_end: dict[str, int] | None = None  # by unit, when the syncer had ended
        islands_ended_at: float | None = None
        while True:
            statuses = self.statuses()
            show(statuses)
            now = time.monotonic()
            if any(each.name == SYNCER and each.state == UnitState.ENDED for each in statuses):
                if restarts_at_end is None:
                    restarts_at_end = {each.name: each.restarts for each in statuses}
                self._stop_late(statuses, restarts_at_end)
            started = [each for each in statuses if each.state != UnitState.NOT_STARTED]
            islands = [each for each in started if is_island(each.name)]
            if all(each.state.is_finished for each in islands or started):
                islands_ended_at = islands_ended_at if islands_ended_at is not None else now
                has_ended = any(each.state == UnitState.ENDED for each in islands)
                if (
                    not has_ended
                    or all(each.state.is_finished for each in started)
                    or now - islands_ended_at > SYNCER_EXIT_TIMEOUT_S
                ):
                    return statuses
            is_local = all(each.launcher == "local" for each in started)
            time.sleep(POLL_INTERVAL_S if is_local else REMOTE_POLL_INTERVAL_S)

    def _stop_late(self, statuses: Sequence[UnitReport], restarts_at_end: Mapping[str, int]) -> None:
        """Stop units that would wait for a syncer that has ended: shards, and islands that restarted after its end."""
        known = self.read_units()
        for name, launcher, state, restarts, _ in statuses:
            is_late = state == UnitState.WAITING or restarts > restarts_at_end.get(name, 0) or not is_island(name)
            if state.is_active and name != SYNCER and is_late:
                # The next poll retries if another process holds the lock, or the launcher does not reply now.
                with suppress(ValueError, OSError), self.lock("atoll up"):
                    self.launcher(launcher).stop(known[name].handle)

    # --------------------------------------------------------------------------------------------------------- state

    def _write_units(self, known: Mapping[str, UnitRecord]) -> None:
        content = {"format": FORMAT, "units": {name: unit._asdict() for name, unit in known.items()}}
        write_text(self.folder / UNITS_FILE, json.dumps(content, indent=2) + "\n", mode=0o600)

    @contextmanager
    def lock(self, owner: str) -> Iterator[None]:
        """Hold the lock of the run: only one process changes it at a time. Raise ValueError with the current owner."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = acquire_lock(self.folder / LOCK_FILE, f"{owner} (process {os.getpid()} on {socket.gethostname()})")
        except LockHeldError as error:
            owner = error.owner or "another process"
            raise ValueError(f"{owner} is changing this run: wait until it has ended") from None
        try:
            yield
        finally:
            os.close(lock)


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _describe_unit(unit: Unit) -> dict[str, Any]:
    """Return the specification of the unit as JSON, without secrets: `up` compares it to find changes."""
    public = {name: value for name, value in unit.environment.items() if name not in unit.secret_names}
    fields = unit.to_json() | {"environment": public, "secrets": sorted(unit.secret_names)}
    spec: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return {key: value for key, value in spec.items() if key not in ("run", "name", "directory", "secret_names")}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        {"notice_s": "notice", "max_restarts": "restarts"}.get(key, key) for key in now if before.get(key) != now[key]
    ]


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer SIGINT, SIGHUP and SIGTERM until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in DEFERRED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for first in received[:1]:
            signal.raise_signal(first)


# --------------------------------------------------------------------------------------------------------------------
# Log lines of the units of a run, across restarts


CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""Maximum line length: a longer line is split."""


class FleetLogs:
    """Log lines of several units, as pairs of unit name and text.

    Args:
        tail: Number of last lines of each unit in the first call of `read_new`; None for all.
    """

    def __init__(self, fleet: Fleet, units: Sequence[str], tail: int | None = None) -> None:
        self.fleet = fleet
        self.units = units
        self.problems: dict[str, str] = {}  # error by unit whose log cannot be read
        self._tail = tail
        self._files: dict[tuple[str, Path], _LogFile] = {}
        self._has_read = False

    def read_new(self) -> Iterator[tuple[str, str]]:
        """Return the lines that were written since the last call."""
        for unit in self.units:
            lines = self._lines(unit)
            if not self._has_read and self._tail is not None:
                lines = iter(deque(lines, maxlen=self._tail))
            yield from ((unit, text) for text in lines)
        self._has_read = True

    def read_unfinished(self) -> Iterator[tuple[str, str]]:
        """Return last lines without a line end."""
        for (unit, _), file in self._files.items():
            if file.unfinished:
                yield unit, file.unfinished.decode(errors="replace")
                file.unfinished = b""

    def _lines(self, unit: str) -> Iterator[str]:
        try:
            paths = self.fleet.logs(unit)
        except Exception as error:  # each launcher raises its own exceptions
            self.problems[unit] = _error_text(error)
            return
        self.problems.pop(unit, None)
        for path in paths:
            yield from self._files.setdefault((unit, path), _LogFile(path)).lines()


class _LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.unfinished = b""  # last line, without its end

    def lines(self) -> Iterator[str]:
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # truncated
                self.offset, self.unfinished = 0, b""
            if size == self.offset:
                return
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *complete, self.unfinished = (self.unfinished + chunk).split(b"\n")
                    if len(self.unfinished) > MAX_LINE_BYTES:
                        complete, self.unfinished = [*complete, self.unfinished], b""
                    for line in complete:
                        yield line.decode(errors="replace").rstrip("\r")
        except FileNotFoundError:
            return
