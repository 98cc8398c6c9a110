"""Parse and validate the islands file of `atoll up`: the launchers, machines and arguments of the units of a run.

    run = "first"                          # default: the name of the file
    directory = "runs/first"               # relative to the file; default: runs/RUN

    [syncer]
    address = "head:7400"                  # address to which islands connect
    keys = "keys"                          # made with atoll keys; not needed if all islands are on this machine
    arguments = ["--quorum", "2"]          # for atoll syncer

    [defaults]                             # for all islands
    notice = "30s"

    [islands.near]
    command = "python train.py"

    [islands.far]
    launcher = "slurm"
    command = ["torchrun", "--nproc-per-node", "8", "train.py"]
    devices = 8
    count = 2                              # far-1 and far-2

Unknown keys and invalid values are errors. One message reports all of them, each with the key and the allowed values.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.launch.launcher import SYNCER, Unit, check_launcher_name, is_island
from atoll.transport.endpoint import is_loopback, parse_endpoint

UNITS_FOLDER = "units"
"""Folder of the run's directory with one working directory per unit. Launchers write logs there."""

DEFAULT_ADDRESS = "127.0.0.1:7400"
MAX_UNITS = 10_000
MAX_NOTICE_S = 24 * 3600.0
RESERVED_OPTIONS = ("--out", "--resume", "--or-resume", "--standby", "--token", "--keys", "--shards")
"""Options of `atoll syncer` that this file sets by other keys."""
RESERVED_VARIABLES = frozenset({"ATOLL_SYNCER", "ATOLL_TOKEN", "ATOLL_KEYS", "ATOLL_LEARNER", "ATOLL_RUN_DIRECTORY"})

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True)
class SyncerTable:
    unit: Unit
    """Unit without a command. Its secrets have no values yet: these come from the environment of `atoll up`."""
    address: str
    """Address to which islands connect; several are separated by commas."""
    shards: int
    keys: Path | None
    token_file: Path | None
    arguments: tuple[str, ...]

    @property
    def endpoints(self) -> list[str]:
        """Each address as HOST:PORT."""
        return parse_endpoint(self.address, self.keys).addresses.split(",")

    @property
    def is_loopback_only(self) -> bool:
        """Return whether all addresses of the syncer are loopback addresses."""
        return all(is_loopback(each.rpartition(":")[0]) for each in self.endpoints)


@dataclass(frozen=True)
class IslandTable:
    unit: Unit
    """Unit whose secrets have no values yet."""
    table_name: str
    """Name of the table in the file. One table may define several islands."""
    number: int


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
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        return _TableReader(path, raw).read_file()


class _TableReader:
    """Reader that collects all problems of a file, so that one message reports them together."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path, self.raw = path, raw
        self.base_directory = path.absolute().parent
        self.problems: dict[str, None] = {}  # without duplicates: each island repeats the defaults
        self.run = self.read_key(raw, "run", "", _name, path.stem)
        self.directory = (
            self.base_directory / self.read_key(raw, "directory", "", _text, f"runs/{self.run}")
        ).resolve()

    def read_file(self) -> IslandsFile:
        self.check_keys(self.raw, ("run", "directory", "syncer", "defaults", "islands"), "")
        syncer = self.read_syncer(self.get_table("syncer"))
        islands = self.read_islands(self.get_table("islands"), self.get_table("defaults"), syncer.unit.launcher)
        if self.problems:
            count = len(self.problems)
            prefix = f"{count} problems: " if count > 1 else ""
            raise ValueError(f"{self.path}: {prefix}{'; '.join(self.problems)}")
        return IslandsFile(self.path, self.run, self.directory, syncer, islands)

    # ------------------------------------------------------------------------------------------------------- tables

    def read_syncer(self, raw: Mapping[str, Any]) -> SyncerTable:
        prefix = "syncer."
        self.check_keys(raw, SYNCER_KEYS, prefix)
        keys = self.read_key(raw, "keys", prefix, self.resolve_path, None)
        token_file = self.read_key(raw, "token_file", prefix, self.resolve_path, None)
        if keys is not None and not keys.is_dir():
            self.add_problem(f"{prefix}keys is {keys}, which is not a directory: create it with atoll keys init {keys}")
        if token_file is not None and not token_file.is_file():
            self.add_problem(f"{prefix}token_file is {token_file}, which is not a file: write the token into it")
        address = self.read_key(raw, "address", prefix, _addresses, DEFAULT_ADDRESS)
        try:
            parse_endpoint(address, keys).check() if keys is None else parse_endpoint(address, keys)
        except ValueError as error:
            self.add_problem(f"{prefix}address: {error}")
        if isinstance(raw.get("options"), list | str):
            self.add_problem(
                f"{prefix}options is the table of launcher options: write options of atoll syncer in arguments"
            )
            raw = {key: value for key, value in raw.items() if key != "options"}
        arguments = self.read_key(raw, "arguments", prefix, _arguments, ())
        for argument in arguments:
            if argument.partition("=")[0] in RESERVED_OPTIONS:
                self.add_problem(f"{prefix}arguments has {argument}: remove it, atoll up sets it")
        shards = self.read_key(raw, "shards", prefix, _integer_reader(0), 0)
        return SyncerTable(self.read_unit(raw, prefix, SYNCER, ()), address, shards, keys, token_file, arguments)

    def read_islands(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], launcher: str
    ) -> tuple[IslandTable, ...]:
        self.check_keys(defaults, DEFAULTS_KEYS, "defaults.")
        if not raw:
            self.add_problem('it has no island: add a table [islands.NAME] with a line command = "..."')
        islands = [
            island for table, own in raw.items() for island in self.read_island_table(table, own, defaults, launcher)
        ]
        numbers: dict[int, str] = {}
        names: dict[str, str] = {}
        for island in islands:
            name, number = island.unit.name, island.number
            if number and (other := numbers.setdefault(number, name)) != name:
                self.add_problem(f"{name} and {other} both have number {number}: use different numbers, or remove them")
            if (other := names.setdefault(name, island.table_name)) != island.table_name:
                self.add_problem(f"islands.{island.table_name} and islands.{other} both define an island {name}")
        free = (number for number in itertools.count(1) if number not in numbers)
        return tuple(island if island.number else replace(island, number=next(free)) for island in islands)

    def read_island_table(self, table: str, own: Any, defaults: Mapping[str, Any], launcher: str) -> list[IslandTable]:
        """Return the islands of one table. Their number is 0 if the table has none."""
        if not isinstance(own, dict):
            self.add_problem(f"islands.{table} is not a table: begin it with a line [islands.{table}]")
            return []
        prefix = f"islands.{table}."
        self.check_keys(own, ISLAND_KEYS, prefix)
        default_launcher = defaults.get("launcher", launcher)
        if own.get("launcher", default_launcher) != default_launcher:
            # The default options belong to the default launcher.
            defaults = {key: value for key, value in defaults.items() if key != "options"}
        raw = {"launcher": launcher, **defaults, **own}
        for key, default_value in defaults.items():
            if isinstance(default_value, dict) and isinstance(own.get(key), dict):
                raw[key] = {**default_value, **own[key]}
            elif key == "secrets" and isinstance(default_value, list) and isinstance(own.get(key), list):
                raw[key] = [*default_value, *own[key]]

        def read(key: str, parse: Callable[[Any], Any], default: Any) -> Any:
            return self.read_key(raw, key, prefix if key in own else "defaults.", parse, default)

        count, number = read("count", _integer_reader(1), None), read("number", _integer_reader(1), 0)
        if count is not None and count > MAX_UNITS:
            self.add_problem(f"{prefix}count is {count}: one file may have at most {MAX_UNITS} islands")
            count = 1
        names = [table] if count is None else [f"{table}-{k}" for k in range(1, count + 1)]
        self.check_name(table, names[-1])
        command = read("command", _arguments, ())
        if "command" not in raw:
            self.add_problem(f'islands.{table} has no command: add a line such as command = "python train.py"')
        command = self.resolve_command(command + read("arguments", _arguments, ()))
        return [
            IslandTable(self.read_unit(raw, prefix, name, command, own), table, number + k if number else 0)
            for k, name in enumerate(names)
        ]

    def read_unit(
        self,
        raw: Mapping[str, Any],
        prefix: str,
        name: str,
        command: tuple[str, ...],
        own: Mapping[str, Any] | None = None,
    ) -> Unit:
        """Return the unit of a table. Error messages attribute a key that is not in `own` to the defaults."""
        fields: dict[str, Any] = {}
        for key, (field, read) in UNIT_KEYS.items():
            value = self.read_key(raw, key, prefix if own is None or key in own else "defaults.", read, None)
            if value is not None:
                fields[field] = value
        unit = Unit(self.run, name, command, self.directory / UNITS_FOLDER / name, **fields)
        for variable in unit.secret_names.intersection(unit.environment):
            self.add_problem(f"{prefix}secrets and environment both have {variable}: remove it from environment")
        return unit

    # --------------------------------------------------------------------------------------------------------- keys

    def add_problem(self, message: str) -> None:
        self.problems[message] = None

    def check_name(self, table: str, name: str) -> None:
        """Check the longest name of the islands of a table: that of the last one."""
        try:
            if not is_island(_name(name)):
                raise ValueError(f"the name {name} is reserved for the syncer and its shards: choose another one")
        except ValueError as error:
            self.add_problem(f"islands.{table}: {error}")

    def check_keys(self, raw: Mapping[str, Any], keys: tuple[str, ...], prefix: str) -> None:
        for key in raw:
            if key not in keys:
                similar = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(keys)}"
                self.add_problem(f"{prefix}{key} is not known: {hint}")

    def get_table(self, key: str) -> Mapping[str, Any]:
        found = self.raw.get(key, {})
        if isinstance(found, dict):
            return found
        self.add_problem(f"{key} is {found!r}: write it as a table, [{key}]")
        return {}

    def read_key(self, raw: Mapping[str, Any], key: str, prefix: str, read: Callable[[Any], Any], default: Any) -> Any:
        if key not in raw:
            return default
        try:
            return read(raw[key])
        except ValueError as error:
            self.add_problem(f"{prefix}{key} {error}")
            return default

    def resolve_path(self, value: Any) -> Path:
        return (self.base_directory / Path(_text(value)).expanduser()).resolve()

    def resolve_command(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Make paths relative to this file absolute: each unit runs in its own directory."""

        def absolute(argument: str) -> str:
            is_relative = argument.startswith(("./", "../"))
            if not is_relative and not argument.startswith(("-", "/")) and ("." in argument or "/" in argument):
                is_relative = (self.base_directory / argument).is_file()
            return str((self.base_directory / argument).resolve()) if is_relative else argument

        return tuple(map(absolute, command))


# --------------------------------------------------------------------------------------------------------------------
# Values. `read_key` puts the key before each error message


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"is {value!r}: write a string in quotes")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"is {value!r}: use at most 40 letters, digits and dashes")
    return value


def _launcher(value: Any) -> str:
    try:
        check_launcher_name(_text(value))
    except ValueError as error:
        raise ValueError(f"is {value!r}: {error}") from None
    return str(value)


def _integer_reader(minimum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"is {value!r}: write an integer of at least {minimum}")
        return value

    return read


def _arguments(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            arguments = tuple(shlex.split(value))
        except ValueError as error:
            raise ValueError(f"is {value!r}: {error}; write it as a list of strings") from None
    elif isinstance(value, list) and all(isinstance(argument, str | int | float) for argument in value):
        arguments = tuple(map(str, value))
    else:
        raise ValueError(f"is {value!r}: write a string, or a list of strings")
    if not arguments or not arguments[0] or any("\0" in argument for argument in arguments):
        raise ValueError("is empty: write a command or arguments")
    return arguments


def _addresses(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return _text(value)


def _notice(value: Any) -> float:
    match = _DURATION.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 < seconds <= MAX_NOTICE_S:
        raise ValueError(f'is {value!r}: write a time of at most a day, such as "30s", "2m" or a number of seconds')
    return seconds


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f'is {value!r}: write a table such as {{ NAME = "value" }}')
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name) or not isinstance(text, str | int | float) or "\0" in str(text):
            raise ValueError(f"has {name} = {text!r}: write a name of letters and digits, and a string")
        if name in RESERVED_VARIABLES:
            raise ValueError(f"has {name}: remove it, atoll up sets it")
    return {name: str(text).lower() if isinstance(text, bool) else str(text) for name, text in value.items()}


def _variables(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and _VARIABLE.fullmatch(name) for name in value):
        raise ValueError(f'is {value!r}: write a list of variable names such as ["WANDB_API_KEY"]')
    for name in value:
        if name in RESERVED_VARIABLES:
            raise ValueError(f"has {name}: remove it, atoll up sets it")
    return frozenset(value)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'is {value!r}: write a table such as {{ partition = "long" }}')
    return dict(value)


UNIT_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "launcher": ("launcher", _launcher),
    "nodes": ("nodes", _integer_reader(1)),
    "cpus": ("cpus", _integer_reader(1)),
    "devices": ("devices", _integer_reader(0)),
    "site": ("site", _text),
    "restarts": ("max_restarts", _integer_reader(0)),
    "notice": ("notice_s", _notice),
    "environment": ("environment", _environment),
    "secrets": ("secret_names", _variables),
    "options": ("options", _table),
}
"""Keys of a unit, with the field of `Unit` and the parser of the value."""
SYNCER_KEYS = (
    *("address", "shards", "keys", "token_file", "arguments"),
    *(key for key in UNIT_KEYS if key not in ("nodes", "devices")),
)
DEFAULTS_KEYS = ("command", "arguments", *UNIT_KEYS)
ISLAND_KEYS = (*DEFAULTS_KEYS, "number", "count")
