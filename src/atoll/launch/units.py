"""The units of a run: what the file of `atoll up` means, in the words of engines."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from atoll.launch.engine import BY_PLACE, Unit
from atoll.launch.islands_file import SHARD, SYNCER, IslandsFile, IslandTable, SyncerTable
from atoll.learner.environment import JOIN_TIMEOUT_S, KEYS, LEARNER, NOTICE_S, RUN_DIRECTORY, TOKEN
from atoll.learner.environment import SYNCER as SYNCER_TOLD
from atoll.transport.endpoint import PLAIN

UNITS = "units"
"""Folder of the run's directory: a directory for each unit, in which it runs and its engine keeps what it prints."""

FLEET = "fleet"
"""Folder of the run's directory: what `atoll up` knows of the units, the token that it made."""

TOKEN_FILE = "token"
JOIN_S = 3600
"""An island that nobody lets in for so long has failed: without it, one whose run is over would wait for ever."""

ANY = "0.0.0.0"
ATOLL = (sys.executable, "-m", "atoll")


class Placed(NamedTuple):
    """A unit, and the engine that keeps it going."""

    engine: str
    unit: Unit


def units_of(file: IslandsFile, token: str | None) -> list[Placed]:
    """The syncer, its shards, and the islands in the order of the file."""
    shards = [_shard(file, token, k) for k in range(file.syncer.shards)]
    return [_syncer(file, token), *shards, *(_island(file, token, island) for island in file.islands)]


def token_of(file: IslandsFile, make: bool) -> str | None:
    """What the file says; without a word about access one is made, once. `make` False: for those who only look. Whoever
    makes one is alone with the run."""
    given = file.syncer.token_file
    if given is not None:
        token = given.read_text(encoding="utf-8").strip()
        if len(token) < 8:
            raise ValueError(f"{given} holds no token: put at least 8 letters into it")
        return token
    if file.syncer.keys is not None:
        return None
    kept = file.directory / FLEET / TOKEN_FILE
    if not kept.exists():
        if not make:
            return "made-by-atoll-up"
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Named when it is whole: a token that was cut off would lock everybody out of a run that goes on.
        part = kept.with_name(f".{TOKEN_FILE}-{os.getpid()}")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(secrets.token_urlsafe(24) + "\n")
        part.replace(kept)
    return kept.read_text(encoding="utf-8").strip()


def stays_here(file: IslandsFile) -> str | None:
    """A sentence, where units may come to machines from which the address of the syncer leads nowhere."""
    engines = sorted({file.syncer.engine, *(island.engine for island in file.islands)} & BY_PLACE)
    if not engines or not file.syncer.is_of_one_machine:
        return None
    return (
        f"syncer.address is {file.syncer.address}, which every machine takes for itself: what {' and '.join(engines)}"
        f" puts on another machine than the syncer will not find it"
    )


def notice_from_env(notice_s: float) -> float:
    """A learner leaves a little before its engine loses patience."""
    return round(max(0.8 * notice_s, notice_s - 2.0), 3)


def _dialled(file: IslandsFile) -> tuple[str, int]:
    """Host and port of the first address."""
    host, _, port = file.syncer.dialled[0].rpartition(":")
    return host, int(port)


def _listens_on(file: IslandsFile) -> str:
    """This machine only, where that is all that islands dial."""
    hosts = {each.rpartition(":")[0] for each in file.syncer.dialled}
    return hosts.pop().strip("[]") if len(hosts) == 1 and file.syncer.is_of_one_machine else ANY


def _has(arguments: tuple[str, ...], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in arguments)


def _secrets(of: SyncerTable | IslandTable, name: str) -> dict[str, str]:
    """From the environment of whoever calls."""
    missing = [variable for variable in of.secrets if variable not in os.environ]
    if missing:
        raise ValueError(f"{name}: secrets has {', '.join(missing)}, which is not set here: export it, and call again")
    return {variable: os.environ[variable] for variable in of.secrets}


def _syncer(file: IslandsFile, token: str | None) -> Placed:
    table = file.syncer
    command = [*ATOLL, "syncer", "--out", str(file.directory), "--or-resume"]
    if not _has(table.arguments, "--host"):
        command += ["--host", _listens_on(file)]
    if not _has(table.arguments, "--port"):
        command += ["--port", str(_dialled(file)[1])]
    if table.address.startswith(PLAIN) and not _has(table.arguments, "--plain-text"):
        command.append("--plain-text")
    if table.keys is not None:
        command += ["--keys", str(_key(table.keys, SYNCER))]
    if table.shards:
        command += ["--shards", str(table.shards)]
    return _kept(file, SYNCER, (*command, *table.arguments), token)


def _shard(file: IslandsFile, token: str | None, k: int) -> Placed:
    """Whatever `arguments` say of the syncer: learners are told where a shard is by the shard itself."""
    table, name = file.syncer, f"{SHARD}{k}"
    host, port = _dialled(file)
    port += 1 + k
    command = [*ATOLL, "shard", "--syncer", table.address, "--shard", str(k)]
    command += ["--shards", str(table.shards), "--out", str(file.directory / "shards" / str(k))]
    command += ["--host", _listens_on(file), "--port", str(port), "--advertise", f"{host}:{port}"]
    if table.address.startswith(PLAIN) or _has(table.arguments, "--plain-text"):
        command.append("--plain-text")
    if table.keys is not None:
        command += ["--keys", str(_key(table.keys, SYNCER))]
    return _kept(file, name, tuple(command), token)


def _kept(file: IslandsFile, name: str, command: tuple[str, ...], token: str | None) -> Placed:
    """A unit of ours: the syncer or a shard."""
    table = file.syncer
    secret = _secrets(table, SYNCER) | ({TOKEN: token} if token is not None else {})
    unit = Unit(
        run=file.run,
        name=name,
        command=command,
        directory=file.directory / UNITS / name,
        environment={"PYTHONUNBUFFERED": "1", **table.environment, **secret},
        secret=frozenset(secret),
        cpus=table.cpus,
        site=table.site,
        restarts=table.restarts,
        notice_s=table.notice_s,
        options=table.options,
    )
    return Placed(table.engine, unit)


def _island(file: IslandsFile, token: str | None, island: IslandTable) -> Placed:
    environment = {
        SYNCER_TOLD: file.syncer.address,
        LEARNER: str(island.number),
        RUN_DIRECTORY: str(file.directory),
        NOTICE_S: f"{notice_from_env(island.notice_s):g}",
        JOIN_TIMEOUT_S: str(JOIN_S),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/islands.md: ranks that are started again would wait for ever
        "PYTHONUNBUFFERED": "1",
        **island.environment,
    }
    secret = _secrets(island, island.name) | ({TOKEN: token} if token is not None else {})
    if file.syncer.keys is not None:
        environment[KEYS] = str(_key(file.syncer.keys, island.name, island.table))
    unit = Unit(
        run=file.run,
        name=island.name,
        command=island.command,
        directory=file.directory / UNITS / island.name,
        environment=environment | secret,
        secret=frozenset(secret),
        nodes=island.nodes,
        cpus=island.cpus,
        devices=island.devices,
        site=island.site,
        restarts=island.restarts,
        notice_s=island.notice_s,
        options=island.options,
    )
    return Placed(island.engine, unit)


def _key(keys: Path, *names: str) -> Path:
    for name in names:
        if (keys / name).is_dir():
            return keys / name
    raise ValueError(f"{keys} has no key for {names[0]}: make one with atoll keys add {keys} {names[0]}")


__all__ = ["FLEET", "JOIN_S", "UNITS", "Placed", "notice_from_env", "stays_here", "token_of", "units_of"]
