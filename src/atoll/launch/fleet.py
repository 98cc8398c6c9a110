"""The units of one run and the launchers that keep them: what `atoll up`, `down`, `status` and `logs` do.

What is known between two commands is `fleet/units.json` in the run's directory: for each unit its launcher, the handle
by which that launcher finds it again, and what it was started as. It is written after each start, so that no unit is
lost.
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
"""Units that are stopped at the same time: each may take its whole notice."""

POLL_INTERVAL_S, REMOTE_POLL_INTERVAL_S = 1.0, 5.0
"""Between two looks at the units, on this machine and elsewhere."""

SYNCER_EXIT_TIMEOUT_S = 120.0
"""For the syncer, from the end of the last island to its own: it writes the model."""

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

NotifyUnit = Callable[[str, str], None]  # a unit, and what happens to it


class UnitRecord(NamedTuple):
    launcher: str
    handle: Mapping[str, Any]
    spec: Mapping[str, Any]
    """What it was started as, without secrets."""


class UnitReport(NamedTuple):
    name: str
    launcher: str
    state: UnitState = UnitState.NOT_STARTED
    restarts: int = 0
    cause: str = ""
    """In words; of a launcher that does not answer, the problem."""

    @property
    def is_problem(self) -> bool:
        return self.state in (UnitState.FAILED, UnitState.LOST, UnitState.UNKNOWN)


class Fleet:
    def __init__(self, file: IslandsFile) -> None:
        self.file = file
        self.folder = file.directory / FLEET_FOLDER
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, name: str) -> Launcher:
        if name not in self._launchers:
            self._launchers[name] = load_launcher(name)
        return self._launchers[name]

    # ------------------------------------------------------------------------------------------------------- looking

    def read_units(self) -> dict[str, UnitRecord]:
        try:
            told = json.loads((self.folder / UNITS_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise ValueError(
                f"{self.folder / UNITS_FILE} cannot be read: it is damaged; bring it back from a copy"
            ) from None
        if told.get("format") != FORMAT:
            raise ValueError(f"{self.folder / UNITS_FILE} was written by another version of Atoll: use that one")
        return {name: UnitRecord(**fields) for name, fields in told["units"].items()}

    def statuses(self, requested: Sequence[str] = ()) -> list[UnitReport]:
        """Return the status of these units, or else of all: those of the file, then those that left the file."""
        known = self.read_units()
        return [self._status(name, known) for name in self.names(requested)]

    def _status(self, name: str, known: Mapping[str, UnitRecord]) -> UnitReport:
        """Return the status of a unit. A launcher that does not answer says nothing about the unit."""
        if name not in known:
            return UnitReport(name, self._launchers_by_unit().get(name, ""))
        of = known[name]
        try:
            status = self.launcher(of.launcher).status(of.handle)
        except Exception as error:
            return UnitReport(name, of.launcher, UnitState.UNKNOWN, cause=f"cannot be asked: {_error_text(error)}")
        return UnitReport(name, of.launcher, status.state, status.restarts, status.cause)

    def logs(self, name: str) -> list[Path]:
        known = self.read_units().get(name)
        return self.launcher(known.launcher).log(known.handle) if known is not None else []

    def names(self, requested: Sequence[str]) -> list[str]:
        """ValueError for a name that no unit has; all of them where none is wanted."""
        listed = self._launchers_by_unit()
        there = [*listed, *(name for name in self.read_units() if name not in listed)]
        for name in requested:
            if name not in there:
                near = difflib.get_close_matches(name, there, 1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}"
                raise ValueError(f"{self.file.path} has no unit {name}: {meant}")
        return [name for name in there if not requested or name in requested]

    def _launchers_by_unit(self) -> dict[str, str]:
        """Return the launchers of the units of the file, by name."""
        ours = [SYNCER, *(f"{SHARD_PREFIX}{k}" for k in range(self.file.syncer.shards))]
        islands = {island.unit.name: island.unit.launcher for island in self.file.islands}
        return dict.fromkeys(ours, self.file.syncer.unit.launcher) | islands

    def is_finished(self) -> bool:
        """As the store on a disk that this machine can see says; the model of a run with shards is gathered later."""
        model = not self.file.syncer.shards or (self.file.directory / "model.safetensors").exists()
        return model and self._has_manifest()

    def _has_manifest(self) -> bool:
        """Nothing is left for islands to do."""
        return (self.file.directory / "store" / "manifest.json").exists()

    # ------------------------------------------------------------------------------------------------------ starting

    def check(self, units: Sequence[Unit]) -> None:
        """Raise ValueError with all problems, before anything is started."""
        problems: list[str] = []
        for unit in units:
            try:
                self.launcher(unit.launcher).check(unit)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))

    def up(self, units: Sequence[Unit], notify: NotifyUnit) -> list[str]:
        """Start what is new, has failed or has left a run that goes on; returns the names of those. A second call
        starts nothing."""
        started: list[str] = []
        with self.lock("atoll up"):
            known = self.read_units()
            before = {name: self._status(name, known) for name in known}
            is_over = self.is_finished() or (SYNCER in before and before[SYNCER].state == UnitState.ENDED)
            wanted: list[Unit] = []
            for unit in units:
                if unit.name in known:
                    left = self._skip_reason(unit, known[unit.name].spec, before[unit.name], is_over)
                else:
                    left = "the run is over: not started" if is_over else None
                if left is not None:
                    notify(unit.name, left)
                else:
                    wanted.append(unit)
            for together in self._group_arrays(wanted):
                with _defer_signals():  # a unit that runs and is not written down is lost
                    for unit, handle in zip(together, self._start(together), strict=True):
                        known[unit.name] = UnitRecord(unit.launcher, handle, _describe_unit(unit))
                    self._write_units(known)
                for unit in together:
                    started.append(unit.name)
                    notify(
                        unit.name, "started again" if unit.name in before else f"started by launcher {unit.launcher}"
                    )
            for name in set(before).difference(self._launchers_by_unit()):
                notify(name, f"is {before[name].state}, and not in the file any more: down it to forget it")
        return started

    def _group_arrays(self, wanted: Sequence[Unit]) -> list[list[Unit]]:
        """Group what is submitted at once: islands of one table, if the launcher takes that; otherwise each alone."""
        tables = {island.unit.name: island.table_name for island in self.file.islands}
        made: list[list[Unit]] = []
        before: str | None = None
        for unit in wanted:
            table = tables.get(unit.name)
            if table is not None and table == before and isinstance(self.launcher(unit.launcher), ArrayLauncher):
                made[-1].append(unit)
            else:
                made.append([unit])
            before = table
        return made

    def _start(self, together: Sequence[Unit]) -> list[dict[str, Any]]:
        of_all = self.launcher(together[0].launcher)
        if len(together) > 1 and isinstance(of_all, ArrayLauncher):
            return of_all.start_array(together)
        return [of_all.start(unit) for unit in together]

    def _skip_reason(self, unit: Unit, spec: Mapping[str, Any], status: UnitReport, is_over: bool) -> str | None:
        """Return why a unit that was started before is not started again; None: it is."""
        state = status.state
        if state == UnitState.UNKNOWN:
            return f"{status.cause}; left alone; {self._forget_hint(status.name)}"
        if state.is_active:
            changed = _changes(spec, _describe_unit(unit))
            if changed:
                return f"is {state} as it was, and {', '.join(changed)} changed: down it first, then up"
            return f"is {state}: left alone"
        if state == UnitState.ENDED:
            has_done_all = is_over or (is_island(unit.name) and self._has_manifest())
            return "has ended: left alone" if has_done_all else None
        return f"{state}, and the run is over: left alone" if is_over else None

    # ------------------------------------------------------------------------------------------------------ stopping

    def down(self, requested: Sequence[str], notify: NotifyUnit) -> bool:
        """Islands first, so that they can send what is not merged yet; then the syncer. False: something is left."""
        names = self.names(requested)
        with self.lock("atoll down"):
            known = self.read_units()
            islands = [name for name in names if is_island(name)]
            others = [name for name in names if name not in islands]
            # A shard that is stopped before its syncer would be waited for; the syncer is first.
            stopped = [self._stop_all(each, known, notify) for each in (islands, others[:1], others[1:])]
            strays = set(names).difference(self._launchers_by_unit())
            if all(stopped) and strays:  # of those nobody will ask again
                self._write_units({name: unit for name, unit in known.items() if name not in strays})
            return all(stopped)

    def forget(self, requested: Sequence[str], notify: NotifyUnit) -> bool:
        """Units that no launcher answers for are not known any more. False: some launcher does, and they are kept."""
        with self.lock("atoll down"):
            known = self.read_units()
            is_done = True
            for name in requested:
                state, cause = (status := self._status(name, known)).state, status.cause
                if state.is_active:
                    notify(name, f"is {state}, and its launcher answers: atoll down {self.file.path} {name}")
                    is_done = False
                elif name not in known:
                    notify(name, "was not started")
                else:
                    is_unknown = state == UnitState.UNKNOWN
                    may = "; if it still runs there, end it there before it is started again" if is_unknown else ""
                    notify(name, f"forgotten: {cause or state}{may}")
                    del known[name]
                    self._write_units(known)
            return is_done

    def _forget_hint(self, name: str) -> str:
        return f"if that is gone for good: atoll down {self.file.path} {name} --forget"

    def _stop_all(self, names: Sequence[str], known: Mapping[str, UnitRecord], notify: NotifyUnit) -> bool:
        wanted = []
        for name in names:
            state = self._status(name, known).state
            if name not in known:
                notify(name, "was not started")
            elif state in (UnitState.ENDED, UnitState.LOST):
                notify(name, f"is {state}")
            else:
                wanted.append(name)

        def stop(name: str) -> bool:
            try:
                self.launcher(known[name].launcher).stop(known[name].handle)
            except Exception as error:
                notify(name, f"cannot be stopped: {_error_text(error)}; {self._forget_hint(name)}")
                return False
            notify(name, "stopped")
            return True

        if not wanted:
            return True
        with ThreadPoolExecutor(min(MAX_PARALLEL_STOPS, len(wanted))) as pool:
            return all(list(pool.map(stop, wanted)))

    # ----------------------------------------------------------------------------------------------------- following

    def follow(self, show: Callable[[list[UnitReport]], None]) -> list[UnitReport]:
        """Wait until all islands have ended; return the last status of all units."""
        ended_with: dict[str, int] | None = None  # restarts of each, when the syncer was seen to have ended
        last_island: float | None = None
        while True:
            statuses = self.statuses()
            show(statuses)
            now = time.monotonic()
            if any(each.name == SYNCER and each.state == UnitState.ENDED for each in statuses):
                if ended_with is None:
                    ended_with = {each.name: each.restarts for each in statuses}
                self._stop_late(statuses, ended_with)
            there = [each for each in statuses if each.state != UnitState.NOT_STARTED]
            islands = [each for each in there if is_island(each.name)]
            if all(each.state.is_finished for each in islands or there):
                last_island = last_island if last_island is not None else now
                has_ended = any(each.state == UnitState.ENDED for each in islands)
                if (
                    not has_ended
                    or all(each.state.is_finished for each in there)
                    or now - last_island > SYNCER_EXIT_TIMEOUT_S
                ):
                    return statuses
            is_near = all(each.launcher == "local" for each in there)
            time.sleep(POLL_INTERVAL_S if is_near else REMOTE_POLL_INTERVAL_S)

    def _stop_late(self, statuses: Sequence[UnitReport], ended_with: Mapping[str, int]) -> None:
        """Stop what would wait for a syncer that has ended: shards, and islands that are started only now."""
        known = self.read_units()
        for name, by_engine, state, restarts, _ in statuses:
            is_late = state == UnitState.WAITING or restarts > ended_with.get(name, 0) or not is_island(name)
            if state.is_active and name != SYNCER and is_late:
                # Another process may hold the lock, or the launcher may not answer now: there is a next look.
                with suppress(ValueError, OSError), self.lock("atoll up"):
                    self.launcher(by_engine).stop(known[name].handle)

    # ------------------------------------------------------------------------------------------------- what it keeps

    def _write_units(self, known: Mapping[str, UnitRecord]) -> None:
        told = {"format": FORMAT, "units": {name: unit._asdict() for name, unit in known.items()}}
        write_text(self.folder / UNITS_FILE, json.dumps(told, indent=2) + "\n", mode=0o600)

    @contextmanager
    def lock(self, owner: str) -> Iterator[None]:
        """Hold the lock of the run: one process at a time changes it. ValueError names the one that does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = acquire_lock(self.folder / LOCK_FILE, f"{owner} (process {os.getpid()} on {socket.gethostname()})")
        except LockHeldError as error:
            owner = error.owner or "another process"
            raise ValueError(f"{owner} is changing this run: wait until it is done") from None
        try:
            yield
        finally:
            os.close(lock)


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _describe_unit(unit: Unit) -> dict[str, Any]:
    """Return what the unit is started as, in JSON and without secrets: `up` says which of it has changed."""
    shown = {name: value for name, value in unit.environment.items() if name not in unit.secret_names}
    told = unit.to_json() | {"environment": shown, "secrets": sorted(unit.secret_names)}
    again: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return {key: value for key, value in again.items() if key not in ("run", "name", "directory", "secret_names")}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        {"notice_s": "notice", "max_restarts": "restarts"}.get(key, key) for key in now if before.get(key) != now[key]
    ]


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Ctrl-C, a terminal that is closed and a plain kill do after the block what they would have done in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in DEFERRED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for one in came[:1]:
            signal.raise_signal(one)


# --------------------------------------------------------------------------------------------------------------------
# What the units of a run have printed, line by line, also over restarts


CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""


class FleetLogs:
    """Lines as pairs of a unit and a text. `tail`: so many of each unit the first time."""

    def __init__(self, fleet: Fleet, units: Sequence[str], tail: int | None = None) -> None:
        self.fleet = fleet
        self.units = units
        self.problems: dict[str, str] = {}  # by unit: why it cannot be read
        self._tail = tail
        self._files: dict[tuple[str, Path], _LogFile] = {}
        self._has_read = False

    def read_new(self) -> Iterator[tuple[str, str]]:
        """Return what was printed since the last call."""
        for unit in self.units:
            lines = self._lines(unit)
            if not self._has_read and self._tail is not None:
                lines = iter(deque(lines, maxlen=self._tail))
            yield from ((unit, text) for text in lines)
        self._has_read = True

    def read_unfinished(self) -> Iterator[tuple[str, str]]:
        """Return what was printed without an end of the line."""
        for (unit, _), file in self._files.items():
            if file.unfinished:
                yield unit, file.unfinished.decode(errors="replace")
                file.unfinished = b""

    def _lines(self, unit: str) -> Iterator[str]:
        try:
            paths = self.fleet.logs(unit)
        except Exception as error:  # a launcher that cannot be asked has its own kinds
            self.problems[unit] = _error_text(error)
            return
        self.problems.pop(unit, None)
        for path in paths:
            yield from self._files.setdefault((unit, path), _LogFile(path)).lines()


class _LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.unfinished = b""  # a line without its end

    def lines(self) -> Iterator[str]:
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # it was truncated
                self.offset, self.unfinished = 0, b""
            if size == self.offset:
                return
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *whole, self.unfinished = (self.unfinished + chunk).split(b"\n")
                    if len(self.unfinished) > MAX_LINE_BYTES:
                        whole, self.unfinished = [*whole, self.unfinished], b""
                    for line in whole:
                        yield line.decode(errors="replace").rstrip("\r")
        except FileNotFoundError:
            return
