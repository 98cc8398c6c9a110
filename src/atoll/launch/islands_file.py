"""The file of `atoll up`: where the syncer and the islands of a run are, and what they are told.

    run = "first"                          # without it: the name of the file
    directory = "runs/first"               # relative to the file; without it: runs/RUN

    [syncer]
    address = "head:7400"                  # what islands dial: this machine, as others call it
    keys = "keys"                          # of atoll keys; not needed where all islands are on this machine
    arguments = ["--quorum", "2"]          # of atoll syncer

    [defaults]                             # of all islands
    notice = "30s"

    [islands.near]
    command = "python train.py"

    [islands.far]
    engine = "slurm"
    command = ["torchrun", "--nproc-per-node", "8", "train.py"]
    devices = 8
    count = 2                              # far-1 and far-2

Everything that is not understood is refused, with the file, the key and what is allowed; all of it at once.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.launch.engine import check_name
from atoll.transport.endpoint import is_loopback, place

SYNCER = "syncer"
SHARD = "shard-"
MOST_UNITS = 10_000
MOST_NOTICE_S = 24 * 3600.0

TOP = ("run", "directory", "syncer", "defaults", "islands")
OF_SYNCER = (
    *("engine", "address", "shards", "keys", "token_file", "arguments"),
    *("cpus", "site", "restarts", "notice", "environment", "secrets", "options"),
)
OF_DEFAULTS = (
    *("engine", "command", "arguments", "nodes", "cpus", "devices", "site", "restarts", "notice"),
    *("environment", "secrets", "options"),
)
OF_ISLAND = (*OF_DEFAULTS, "number", "count")
GIVEN = ("--out", "--resume", "--or-resume", "--standby", "--token", "--keys", "--shards")
"""Options of `atoll syncer` that have keys of their own here."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True)
class SyncerTable:
    engine: str = "local"
    address: str = "127.0.0.1:7400"
    """As islands dial it; several between commas."""
    shards: int = 0
    keys: Path | None = None
    token_file: Path | None = None
    arguments: tuple[str, ...] = ()
    cpus: int = 1
    site: str | None = None
    restarts: int = 100
    notice_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Variables that are taken from whoever calls `atoll up`, and shown to nobody."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dialled(self) -> list[str]:
        """HOST:PORT of each address."""
        return place(self.address, self.keys).addresses.split(",")

    @property
    def is_of_one_machine(self) -> bool:
        """What islands dial never leaves the machine that they are on."""
        return all(is_loopback(each.rpartition(":")[0]) for each in self.dialled)


@dataclass(frozen=True)
class IslandTable:
    name: str
    table: str
    """Its name in the file; several islands may be of one table."""
    engine: str
    command: tuple[str, ...]
    number: int
    nodes: int = 1
    cpus: int = 1
    devices: int = 0
    site: str | None = None
    restarts: int = 100
    notice_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class IslandsFile:
    path: Path
    run: str
    directory: Path
    syncer: SyncerTable
    islands: tuple[IslandTable, ...]

    @classmethod
    def load(cls, path: Path) -> IslandsFile:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
            raise ValueError(f"{path} is not TOML: {wrong}") from None
        return _TableReader(path).file(raw)


class _TableReader:
    """Collects what is wrong, so that people repair a file once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beside = path.absolute().parent
        self.problems: list[str] = []

    def file(self, raw: Mapping[str, Any]) -> IslandsFile:
        self.known(raw, TOP, "")
        run = self.take(raw, "run", "", _name, self.path.stem)
        directory = self.beside / self.take(raw, "directory", "", _text, f"runs/{run}")
        syncer = self.syncer(self.table(raw, "syncer"))
        islands = self.islands(self.table(raw, "islands"), self.table(raw, "defaults"), syncer)
        if self.problems:
            count = len(self.problems)
            several = f"{count} things are wrong: " if count > 1 else ""
            raise ValueError(f"{self.path}: {several}{'; '.join(self.problems)}")
        return IslandsFile(self.path, run, directory.resolve(), syncer, islands)

    # ------------------------------------------------------------------------------------------------------- tables

    def syncer(self, raw: Mapping[str, Any]) -> SyncerTable:
        where = "syncer."
        self.known(raw, OF_SYNCER, where)
        plain = SyncerTable()
        keys = self.take(raw, "keys", where, self.beside_path, None)
        token_file = self.take(raw, "token_file", where, self.beside_path, None)
        if keys is not None and not keys.is_dir():
            self.problems.append(f"{where}keys is {keys}, which is no directory: make it with atoll keys init {keys}")
        if token_file is not None and not token_file.is_file():
            self.problems.append(f"{where}token_file is {token_file}, which is no file: put the token in it")
        address = self.take(raw, "address", where, _addresses, plain.address)
        try:
            place(address, keys).check() if keys is None else place(address, keys)
        except ValueError as wrong:
            self.problems.append(f"{where}address: {wrong}")
        if isinstance(raw.get("options"), list | str):
            self.problems.append(f"{where}options are those of the engine, a table; of atoll syncer it is arguments")
            raw = {key: value for key, value in raw.items() if key != "options"}
        arguments = self.take(raw, "arguments", where, _words, ())
        for word in arguments:
            if word.partition("=")[0] in GIVEN:
                self.problems.append(f"{where}arguments has {word}: atoll up gives that by itself, leave it out")
        self.check_secrets(raw, where)
        return SyncerTable(
            engine=self.take(raw, "engine", where, _engine, plain.engine),
            address=address,
            shards=self.take(raw, "shards", where, _at_least(0), plain.shards),
            keys=keys,
            token_file=token_file,
            arguments=arguments,
            cpus=self.take(raw, "cpus", where, _at_least(1), plain.cpus),
            site=self.take(raw, "site", where, _text, None),
            restarts=self.take(raw, "restarts", where, _at_least(0), plain.restarts),
            notice_s=self.take(raw, "notice", where, _notice, plain.notice_s),
            environment=self.take(raw, "environment", where, _environment, {}),
            secrets=self.take(raw, "secrets", where, _variables, ()),
            options=self.take(raw, "options", where, _table, {}),
        )

    def islands(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], syncer: SyncerTable
    ) -> tuple[IslandTable, ...]:
        self.known(defaults, OF_DEFAULTS, "defaults.")
        made: list[IslandTable] = []
        numbers: dict[int, str] = {}
        if not raw:
            self.problems.append('it names no island: begin one with [islands.NAME] and a line command = "..."')
        wanted: list[tuple[IslandTable, int | None]] = []
        for name, own in raw.items():
            where = f"islands.{name}."
            if not isinstance(own, dict):
                self.problems.append(f"islands.{name} is no table: begin it with a line [islands.{name}]")
                continue
            wanted += self.alike(name, own, defaults, syncer, where)
        for island, number in wanted:
            if number is not None and (other := numbers.setdefault(number, island.name)) != island.name:
                self.problems.append(
                    f"{island.name} and {other} have number {number} both: give each its own, or leave them out"
                )
        names: dict[str, str] = {}
        free = 1
        for island, number in wanted:
            if (other := names.setdefault(island.name, island.table)) != island.table:
                self.problems.append(f"islands.{island.table} and islands.{other} both make an island {island.name}")
            if number is None:
                while free in numbers:
                    free += 1
                numbers[free] = island.name
            made.append(_numbered(island, number if number is not None else free))
        return tuple(made)

    def alike(
        self, name: str, own: Mapping[str, Any], defaults: Mapping[str, Any], syncer: SyncerTable, where: str
    ) -> list[tuple[IslandTable, int | None]]:
        """The islands of one table, and the number that it wants for each."""
        self.known(own, OF_ISLAND, where)
        usual = defaults.get("engine", syncer.engine)
        if own.get("engine", usual) != usual:
            defaults = {key: value for key, value in defaults.items() if key != "options"}  # another engine's
        raw = {**defaults, **own}
        for key in ("environment", "options"):
            if isinstance(defaults.get(key), dict) and isinstance(own.get(key), dict):
                raw[key] = {**defaults[key], **own[key]}
        if isinstance(defaults.get("secrets"), list) and isinstance(own.get("secrets"), list):
            raw["secrets"] = [*defaults["secrets"], *own["secrets"]]
        self.check_secrets(raw, where)

        def take(key: str, read: Callable[[Any], Any], default: Any) -> Any:
            return self.take(raw, key, where if key in own else "defaults.", read, default)

        count = take("count", _at_least(1), None)
        number = take("number", _at_least(1), None)
        if count is not None and count > MOST_UNITS:
            self.problems.append(f"{where}count is {count}: at most {MOST_UNITS} islands are in one file")
            count = 1
        self.check_name(name, name if count is None else f"{name}-{count}")
        engine = take("engine", _engine, syncer.engine)
        command = take("command", _words, ())
        if not command and "command" not in raw:
            self.problems.append(f'islands.{name} has no command: say what it runs, as command = "python train.py"')
        command += take("arguments", _words, ())
        made = IslandTable(
            name=name,
            table=name,
            engine=engine,
            command=self.beside_words(command),
            number=0,
            nodes=take("nodes", _at_least(1), 1),
            cpus=take("cpus", _at_least(1), 1),
            devices=take("devices", _at_least(0), 0),
            site=take("site", _text, None),
            restarts=take("restarts", _at_least(0), 100),
            notice_s=take("notice", _notice, 30.0),
            environment=take("environment", _environment, {}),
            secrets=take("secrets", _variables, ()),
            options=take("options", _table, {}),
        )
        if count is None:
            return [(made, number)]
        return [
            (_named(made, f"{name}-{place}"), number + place - 1 if number is not None else None)
            for place in range(1, count + 1)
        ]

    # ------------------------------------------------------------------------------------------------------- checks

    def check_name(self, table: str, name: str) -> None:
        """`name`: of the last island that the table makes."""
        try:
            _name(name)
            if name == SYNCER or name.startswith(SHARD):
                raise ValueError(f"the name {name} belongs to the syncer and its shards: choose another")
        except ValueError as wrong:
            self.problems.append(f"islands.{table}: {wrong}")

    def check_secrets(self, raw: Mapping[str, Any], where: str) -> None:
        environment, secrets = raw.get("environment"), raw.get("secrets")
        if not isinstance(environment, dict) or not isinstance(secrets, list):
            return
        for name in environment:
            if name in secrets:
                self.problems.append(f"{where}secrets has {name}, and so has environment: leave it out of environment")

    # --------------------------------------------------------------------------------------------------------- keys

    def known(self, raw: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
        for key in raw:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
                self.problems.append(f"{where}{key} is not known: {meant}")

    def table(self, raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = raw.get(key, {})
        if isinstance(found, dict):
            return found
        self.problems.append(f"{key} is {found!r}: write it as a table, [{key}]")
        return {}

    def take(self, raw: Mapping[str, Any], key: str, where: str, read: Callable[[Any], Any], default: Any) -> Any:
        if key not in raw:
            return default
        try:
            return read(raw[key])
        except ValueError as wrong:
            problem = f"{where}{key} {wrong}"
            if problem not in self.problems:  # one of the defaults is met with each island
                self.problems.append(problem)
            return default

    def beside_path(self, value: Any) -> Path:
        return (self.beside / Path(_text(value)).expanduser()).resolve()

    def beside_words(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Units run in directories of their own: a word that names a file beside this one is told in full."""

        def told(word: str) -> str:
            if word.startswith(("./", "../")):
                return str((self.beside / word).resolve())
            looks_so = not word.startswith(("-", "/")) and ("." in word or "/" in word)
            return str((self.beside / word).resolve()) if looks_so and (self.beside / word).is_file() else word

        return tuple(map(told, command))


def _named(island: IslandTable, name: str) -> IslandTable:
    return IslandTable(**{**vars(island), "name": name})


def _numbered(island: IslandTable, number: int) -> IslandTable:
    return IslandTable(**{**vars(island), "number": number})


# --------------------------------------------------------------------------------------------------------------------
# Values. Each says what is wrong as the end of a sentence that begins with the key.


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"is {value!r}: write a text between quotes")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"is {value!r}: a name has letters, digits and dashes in it, at most 40")
    return value


def _engine(value: Any) -> str:
    try:
        check_name(_text(value))
    except ValueError as wrong:
        raise ValueError(f"is {value!r}: {wrong}") from None
    return str(value)


def _at_least(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"is {value!r}: write a whole number of at least {least}")
        return value

    return read


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            words = tuple(shlex.split(value))
        except ValueError as wrong:
            raise ValueError(f"is {value!r}: {wrong}; write it as a list of words") from None
    elif isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        words = tuple(map(str, value))
    else:
        raise ValueError(f"is {value!r}: write one text, or a list of words")
    if not words or not words[0] or any("\0" in word for word in words):
        raise ValueError("is empty: write what is to be run")
    return words


def _addresses(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return _text(value)


def _notice(value: Any) -> float:
    found = _DURATION.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    seconds = float(found[1]) * _SECONDS[found[2]] if found else -1.0
    if not 0 < seconds <= MOST_NOTICE_S:
        raise ValueError(f'is {value!r}: write a time, as "30s", "2m" or a number of seconds, at most a day')
    return seconds


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f'is {value!r}: write a table, as {{ NAME = "value" }}')
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name) or not isinstance(text, str | int | float) or "\0" in str(text):
            raise ValueError(f"has {name} = {text!r}: write a name of letters and digits, and a text")
        if name in TOLD:
            raise ValueError(f"has {name}: atoll up sets that by itself, leave it out")
    return {name: str(text).lower() if isinstance(text, bool) else str(text) for name, text in value.items()}


def _variables(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and _VARIABLE.fullmatch(name) for name in value):
        raise ValueError(f'is {value!r}: write a list of names of variables, as ["WANDB_API_KEY"]')
    for name in value:
        if name in TOLD:
            raise ValueError(f"has {name}: atoll up sets that by itself, leave it out")
    return tuple(dict.fromkeys(value))


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'is {value!r}: write a table, as {{ partition = "long" }}')
    return dict(value)


TOLD = frozenset({"ATOLL_SYNCER", "ATOLL_TOKEN", "ATOLL_KEYS", "ATOLL_LEARNER", "ATOLL_RUN_DIRECTORY"})

__all__ = ["SHARD", "SYNCER", "IslandTable", "IslandsFile", "SyncerTable"]
