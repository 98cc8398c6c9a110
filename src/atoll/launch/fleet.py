"""The units of one run and the engines that keep them: what `atoll up`, `down`, `status` and `logs` do.

What is known between two commands is `fleet/units.json` in the run's directory: for each unit its engine, the handle by
which that engine finds it again, and what it was started as. It is written after each start, so that no unit is lost.
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

from atoll.files import LockHeldError, take_lock, write_text
from atoll.launch.engine import SHARD, SYNCER, Engine, TakesArrays, Unit, UnitStanding, UnitState, engine, is_island
from atoll.launch.islands_file import IslandsFile
from atoll.launch.units import FLEET

KNOWN, LOCK = "units.json", "lock"
FORMAT = 1
AT_ONCE = 32
"""Units that are stopped at the same time: each may take its whole notice."""

LOOK_S, LOOK_FAR_S = 1.0, 5.0
"""How often units are looked at, on this machine and elsewhere."""

LAST_WORDS_S = 120.0
"""For the syncer, from the end of the last island to its own: it writes the model."""

HELD_BACK = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
NOT_STARTED = "not started"

Say = Callable[[str, str], None]  # a unit, and what happens to it


class UnitRecord(NamedTuple):
    engine: str
    handle: Mapping[str, Any]
    told: Mapping[str, Any]
    """What it was started as, without secrets."""


class Look(NamedTuple):
    """How a unit is. `status` None: it was never started, or its engine cannot be asked; `problem` says which."""

    name: str
    engine: str
    status: UnitState | None
    problem: str = ""

    @property
    def standing(self) -> str:
        if self.status is not None:
            return self.status.standing.value
        return "unknown" if self.problem else NOT_STARTED

    @property
    def why(self) -> str:
        return self.status.why if self.status is not None else self.problem

    @property
    def is_over(self) -> bool:
        return self.status is not None and self.status.standing.is_over

    @property
    def is_wrong(self) -> bool:
        return bool(self.problem) or self.standing in (UnitStanding.FAILED.value, UnitStanding.GONE.value)

    @property
    def is_island(self) -> bool:
        return is_island(self.name)

    def to_json(self) -> dict[str, Any]:
        restarts = self.status.restarts if self.status is not None else 0
        return {
            "name": self.name,
            "engine": self.engine,
            "standing": self.standing,
            "restarts": restarts,
            "why": self.why,
        }


class Fleet:
    def __init__(self, file: IslandsFile) -> None:
        self.file = file
        self.folder = file.directory / FLEET
        self._engines: dict[str, Engine] = {}

    def engine(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines[name] = engine(name)
        return self._engines[name]

    # ------------------------------------------------------------------------------------------------------- looking

    def known(self) -> dict[str, UnitRecord]:
        try:
            told = json.loads((self.folder / KNOWN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise ValueError(
                f"{self.folder / KNOWN} cannot be read: it is damaged; bring it back from a copy"
            ) from None
        if told.get("format") != FORMAT:
            raise ValueError(f"{self.folder / KNOWN} was written by another version of Atoll: use that one")
        return {name: UnitRecord(**fields) for name, fields in told["units"].items()}

    def looks(self, wanted: Sequence[str] = ()) -> list[Look]:
        """Of the units of the file in its order, and then of those that were started and are not in it any more; only
        of those that are wanted, where some are."""
        known = self.known()
        engines = {island.unit.name: island.unit.engine for island in self.file.islands}
        return [
            self.look(name, known[name])
            if name in known
            else Look(name, engines.get(name, self.file.syncer.unit.engine), None)
            for name in self._all_names()
            if not wanted or name in wanted
        ]

    def look(self, name: str, known: UnitRecord) -> Look:
        """An engine that does not answer says nothing about the unit."""
        try:
            return Look(name, known.engine, self.engine(known.engine).status(known.handle))
        except Exception as wrong:
            return Look(name, known.engine, None, f"cannot be asked: {str(wrong) or type(wrong).__name__}")

    def logs(self, name: str) -> list[Path]:
        known = self.known().get(name)
        return self.engine(known.engine).log(known.handle) if known is not None else []

    def names(self, wanted: Sequence[str]) -> list[str]:
        """ValueError for a name that no unit has; all of them where none is wanted."""
        there = self._all_names()
        for name in wanted:
            if name not in there:
                near = difflib.get_close_matches(name, there, 1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}"
                raise ValueError(f"{self.file.path} has no unit {name}: {meant}")
        return [name for name in there if not wanted or name in wanted]

    def _all_names(self) -> list[str]:
        listed = self._listed()
        return [*listed, *(name for name in self.known() if name not in listed)]

    def _listed(self) -> list[str]:
        shards = [f"{SHARD}{k}" for k in range(self.file.syncer.shards)]
        return [SYNCER, *shards, *(island.unit.name for island in self.file.islands)]

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
                self.engine(unit.engine).check(unit)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))

    def up(self, units: Sequence[Unit], say: Say) -> list[str]:
        """Start what is new, has failed or has left a run that goes on; returns the names of those. A second call
        starts nothing."""
        started: list[str] = []
        with self.alone("atoll up"):
            known = self.known()
            looks = {name: self.look(name, known[name]) for name in known}
            is_over = self.is_finished() or (SYNCER in looks and looks[SYNCER].standing == UnitStanding.ENDED.value)
            wanted: list[Unit] = []
            for unit in units:
                left = self._left_alone(unit, known.get(unit.name), looks.get(unit.name), is_over)
                if left is not None:
                    say(unit.name, left)
                else:
                    wanted.append(unit)
            for together in self._arrays(wanted):
                with _uninterrupted():  # a unit that runs and is not written down is lost
                    for unit, handle in zip(together, self._start(together), strict=True):
                        known[unit.name] = UnitRecord(unit.engine, handle, _told(unit))
                    self._write(known)
                for unit in together:
                    started.append(unit.name)
                    say(unit.name, "started again" if unit.name in looks else f"started by engine {unit.engine}")
            for name in set(looks).difference(self._listed()):
                say(name, f"is {looks[name].standing}, and not in the file any more: down it to forget it")
        return started

    def _arrays(self, wanted: Sequence[Unit]) -> list[list[Unit]]:
        """Group what is submitted at once: islands of one table, where the engine takes that; otherwise each alone."""
        tables = {island.unit.name: island.table for island in self.file.islands}
        made: list[list[Unit]] = []
        before: str | None = None
        for unit in wanted:
            table = tables.get(unit.name)
            if table is not None and table == before and isinstance(self.engine(unit.engine), TakesArrays):
                made[-1].append(unit)
            else:
                made.append([unit])
            before = table
        return made

    def _start(self, together: Sequence[Unit]) -> list[dict[str, Any]]:
        of_all = self.engine(together[0].engine)
        if len(together) > 1 and isinstance(of_all, TakesArrays):
            return of_all.start_array(together)
        return [of_all.start(unit) for unit in together]

    def _left_alone(self, unit: Unit, known: UnitRecord | None, look: Look | None, is_over: bool) -> str | None:
        """Why a unit is not started; None: it is."""
        if look is None or known is None:
            return "the run is over: not started" if is_over else None
        if look.problem:
            return f"{look.problem}; left alone; {self._or_forget(look.name)}"
        if look.standing in (UnitStanding.RUNNING.value, UnitStanding.WAITING.value):
            changed = _changes(known.told, _told(unit))
            if changed:
                return f"is {look.standing} as it was, and {', '.join(changed)} changed: down it first, then up"
            return f"is {look.standing}: left alone"
        if look.standing == UnitStanding.ENDED.value:
            has_done_all = is_over or (look.is_island and self._has_manifest())
            return "has ended: left alone" if has_done_all else None
        return f"{look.standing}, and the run is over: left alone" if is_over else None

    # ------------------------------------------------------------------------------------------------------ stopping

    def down(self, wanted: Sequence[str], say: Say) -> bool:
        """Islands first, so that they can send what is not merged yet; then the syncer. False: something is left."""
        names = self.names(wanted)
        with self.alone("atoll down"):
            known = self.known()
            islands = [name for name in names if is_island(name)]
            others = [name for name in names if name not in islands]
            # A shard that is stopped before its syncer would be waited for; the syncer is first.
            stopped = [self._stop_all(each, known, say) for each in (islands, others[:1], others[1:])]
            strays = set(names).difference(self._listed())
            if all(stopped) and strays:  # of those nobody will ask again
                self._write({name: unit for name, unit in known.items() if name not in strays})
            return all(stopped)

    def forget(self, wanted: Sequence[str], say: Say) -> bool:
        """Units that no engine answers for are not known any more. False: some engine does, and they are kept."""
        with self.alone("atoll down"):
            known = self.known()
            is_done = True
            for name in wanted:
                look = self.look(name, known[name]) if name in known else Look(name, "", None)
                if look.status is not None and not look.is_over:
                    say(name, f"is {look.standing}, and its engine answers: atoll down {self.file.path} {name}")
                    is_done = False
                elif name not in known:
                    say(name, "was not started")
                else:
                    may = "; if it still runs there, end it there before it is started again" if look.problem else ""
                    say(name, f"forgotten: {look.why or look.standing}{may}")
                    del known[name]
                    self._write(known)
            return is_done

    def _or_forget(self, name: str) -> str:
        return f"if that is gone for good: atoll down {self.file.path} {name} --forget"

    def _stop_all(self, names: Sequence[str], known: Mapping[str, UnitRecord], say: Say) -> bool:
        looks = [self.look(name, known[name]) if name in known else Look(name, "", None) for name in names]
        wanted = []
        for look in looks:
            if look.name not in known:
                say(look.name, "was not started")
            elif look.standing in (UnitStanding.ENDED.value, UnitStanding.GONE.value):
                say(look.name, f"is {look.standing}")
            else:
                wanted.append(look.name)

        def stop(name: str) -> bool:
            try:
                self.engine(known[name].engine).stop(known[name].handle)
            except Exception as wrong:
                say(name, f"cannot be stopped: {str(wrong) or type(wrong).__name__}; {self._or_forget(name)}")
                return False
            say(name, "stopped")
            return True

        if not wanted:
            return True
        with ThreadPoolExecutor(min(AT_ONCE, len(wanted))) as pool:
            return all(list(pool.map(stop, wanted)))

    # ----------------------------------------------------------------------------------------------------- following

    def follow(self, show: Callable[[list[Look]], None]) -> list[Look]:
        """Until all islands have ended; returns how everybody is then."""
        ended_with: dict[str, int] | None = None  # restarts of each, when the syncer was seen to have ended
        last_island: float | None = None
        while True:
            looks = self.looks()
            show(looks)
            now = time.monotonic()
            by_name = {look.name: look for look in looks}
            if by_name[SYNCER].standing == UnitStanding.ENDED.value:
                if ended_with is None:
                    ended_with = {look.name: look.status.restarts for look in looks if look.status is not None}
                self._stop_those_who_wait(looks, ended_with)
            there = [look for look in looks if look.standing != NOT_STARTED]
            islands = [look for look in there if look.is_island]
            if all(look.is_over for look in islands or there):
                last_island = last_island if last_island is not None else now
                has_ended = any(look.standing == UnitStanding.ENDED.value for look in islands)
                others = [look for look in there if not look.is_island]
                if not has_ended or all(look.is_over for look in others) or now - last_island > LAST_WORDS_S:
                    return looks
            time.sleep(LOOK_S if all(look.engine == "local" for look in there) else LOOK_FAR_S)

    def _stop_those_who_wait(self, looks: Sequence[Look], ended_with: Mapping[str, int]) -> None:
        """For a syncer that has ended well: shards, and islands that would only now be started, or were since."""
        known = self.known()
        for look in looks:
            if look.is_over or look.status is None or look.name == SYNCER:
                continue
            is_late = look.status.standing is UnitStanding.WAITING or look.status.restarts > ended_with.get(
                look.name, 0
            )
            if is_late or not look.is_island:
                # Somebody else is at it, or its engine does not answer now; there is a next look.
                with suppress(ValueError, OSError), self.alone("atoll up"):
                    self.engine(look.engine).stop(known[look.name].handle)

    # ------------------------------------------------------------------------------------------------- what it keeps

    def _write(self, known: Mapping[str, UnitRecord]) -> None:
        told = {"format": FORMAT, "units": {name: unit._asdict() for name, unit in known.items()}}
        write_text(self.folder / KNOWN, json.dumps(told, indent=2) + "\n", mode=0o600)

    @contextmanager
    def alone(self, who: str) -> Iterator[None]:
        """Hold the lock of the run: one process at a time changes it. ValueError names the one that does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(self.folder / LOCK, f"{who} (process {os.getpid()} on {socket.gethostname()})")
        except LockHeldError as error:
            owner = error.owner or "another process"
            raise ValueError(f"{owner} is changing this run: wait until it is done") from None
        try:
            yield
        finally:
            os.close(lock)


def _told(unit: Unit) -> dict[str, Any]:
    """Return what the unit is started as, in JSON and without secrets: `up` says which of it has changed."""
    shown = {name: value for name, value in unit.environment.items() if name not in unit.secret}
    told = unit.to_json() | {"environment": shown, "secrets": sorted(unit.secret)}
    again: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return {key: value for key, value in again.items() if key not in ("run", "name", "directory", "secret")}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [{"notice_s": "notice"}.get(key, key) for key in now if before.get(key) != now[key]]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C, a terminal that is closed and a plain kill do after the block what they would have done in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in HELD_BACK}
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
MOST_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""


class PrintedLine(NamedTuple):
    unit: str
    text: str


class FleetLogs:
    """`new` gives what has come since it was called last. `tail`: of each unit so many lines the first time."""

    def __init__(self, fleet: Fleet, units: Sequence[str], tail: int | None = None) -> None:
        self.fleet = fleet
        self.units = units
        self.problems: dict[str, str] = {}  # by unit: why it cannot be read
        self._tail = tail
        self._files: dict[tuple[str, Path], _File] = {}
        self._has_begun = False

    def new(self) -> Iterator[PrintedLine]:
        for unit in self.units:
            lines = self._lines(unit)
            if not self._has_begun and self._tail is not None:
                lines = iter(deque(lines, maxlen=self._tail))
            for text in lines:
                yield PrintedLine(unit, text)
        self._has_begun = True

    def rest(self) -> Iterator[PrintedLine]:
        """What was printed without an end of the line."""
        for (unit, _), file in self._files.items():
            if file.begun:
                yield PrintedLine(unit, file.begun.decode(errors="replace"))
                file.begun = b""

    def _lines(self, unit: str) -> Iterator[str]:
        try:
            paths = self.fleet.logs(unit)
        except Exception as wrong:  # an engine that cannot be asked has its own kinds
            self.problems[unit] = str(wrong) or type(wrong).__name__
            return
        self.problems.pop(unit, None)
        for path in paths:
            yield from self._files.setdefault((unit, path), _File(path)).lines()


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.begun = b""  # a line without its end

    def lines(self) -> Iterator[str]:
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # somebody has emptied it
                self.offset, self.begun = 0, b""
            if size == self.offset:
                return
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                while chunk := file.read(CHUNK_BYTES):
                    self.offset += len(chunk)
                    *whole, self.begun = (self.begun + chunk).split(b"\n")
                    if len(self.begun) > MOST_LINE_BYTES:
                        whole, self.begun = [*whole, self.begun], b""
                    for line in whole:
                        yield line.decode(errors="replace").rstrip("\r")
        except FileNotFoundError:
            return
