"""Build the units of a run, with their commands and environments, from the islands file of `atoll up`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from atoll.files import write_text
from atoll.launch.islands_file import IslandsFile, IslandTable
from atoll.launch.launcher import REMOTE_LAUNCHERS, SHARD_PREFIX, SYNCER, Unit
from atoll.learner.environment import JOIN_TIMEOUT_S, KEYS, LEARNER, NOTICE_S, RUN_DIRECTORY, TOKEN
from atoll.learner.environment import SYNCER as SYNCER_ADDRESS
from atoll.transport.endpoint import HTTP_SCHEME

FLEET_FOLDER = "fleet"
"""Folder of the run's directory with the records of the units and the token that `atoll up` created."""

TOKEN_FILE = "token"
ISLAND_JOIN_TIMEOUT_S = 3600
"""Join timeout of an island. Without it, an island that starts after the end of its run would wait forever."""

ANY_HOST = "0.0.0.0"
ATOLL_COMMAND = (sys.executable, "-m", "atoll")


def build_units(file: IslandsFile, token: str | None) -> list[Unit]:
    """Return the syncer, its shards, and the islands in the order of the file."""
    shards = [_shard(file, token, k) for k in range(file.syncer.shards)]
    return [_syncer(file, token), *shards, *(_island(file, token, island) for island in file.islands)]


def load_token(file: IslandsFile, create: bool) -> str | None:
    """Return the token of the run, or None if it uses keys.

    If the file configures neither, a token is generated once and stored in the run's directory.

    Args:
        create: Write a missing token. The caller then holds the lock of the run. False returns a placeholder instead.
    """
    token_file = file.syncer.token_file
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
        if len(token) < 8:
            raise ValueError(f"{token_file} contains no token: write at least 8 characters into it")
        return token
    if file.syncer.keys is not None:
        return None
    stored = file.directory / FLEET_FOLDER / TOKEN_FILE
    if not stored.exists():
        if not create:
            return "made-by-atoll-up"
        stored.parent.mkdir(parents=True, exist_ok=True)
        # Atomic: with a truncated token no learner could join the running run any more.
        write_text(stored, secrets.token_urlsafe(24) + "\n", mode=0o600)
    return stored.read_text(encoding="utf-8").strip()


def find_address_warning(file: IslandsFile) -> str | None:
    """Return a warning if units may run on machines that cannot reach the syncer's address."""
    launchers = sorted(
        {file.syncer.unit.launcher, *(island.unit.launcher for island in file.islands)} & REMOTE_LAUNCHERS
    )
    if not launchers or not file.syncer.is_loopback_only:
        return None
    return (
        f"syncer.address is {file.syncer.address}, which is a loopback address: units that {' and '.join(launchers)}"
        f" starts on another machine cannot reach the syncer; set an address of the syncer's machine"
    )


def learner_notice_s(notice_s: float) -> float:
    """Return the notice of a learner: slightly shorter than that of its launcher."""
    return round(max(0.8 * notice_s, notice_s - 2.0), 3)


def _syncer_endpoint(file: IslandsFile) -> tuple[str, int]:
    """Return host and port of the first address."""
    host, _, port = file.syncer.endpoints[0].rpartition(":")
    return host, int(port)


def _listen_host(file: IslandsFile) -> str:
    """Return the loopback host if all endpoints are on it; otherwise all interfaces."""
    hosts = {each.rpartition(":")[0] for each in file.syncer.endpoints}
    return hosts.pop().strip("[]") if len(hosts) == 1 and file.syncer.is_loopback_only else ANY_HOST


def _has_option(arguments: tuple[str, ...], option: str) -> bool:
    return any(argument.partition("=")[0] == option for argument in arguments)


def _syncer(file: IslandsFile, token: str | None) -> Unit:
    table = file.syncer
    command = [*ATOLL_COMMAND, "syncer", "--out", str(file.directory), "--or-resume"]
    if not _has_option(table.arguments, "--host"):
        command += ["--host", _listen_host(file)]
    if not _has_option(table.arguments, "--port"):
        command += ["--port", str(_syncer_endpoint(file)[1])]
    if table.address.startswith(HTTP_SCHEME) and not _has_option(table.arguments, "--plain-text"):
        command.append("--plain-text")
    if table.keys is not None:
        command += ["--keys", str(_key_directory(table.keys, SYNCER))]
    if table.shards:
        command += ["--shards", str(table.shards)]
    return _with_environment(replace(table.unit, command=(*command, *table.arguments)), {}, token)


def _shard(file: IslandsFile, token: str | None, k: int) -> Unit:
    """Return the unit of shard `k`. It advertises its own address, whatever `arguments` set for the syncer."""
    table, name = file.syncer, f"{SHARD_PREFIX}{k}"
    host, port = _syncer_endpoint(file)
    port += 1 + k
    command = [*ATOLL_COMMAND, "shard", "--syncer", table.address, "--shard", str(k)]
    command += ["--shards", str(table.shards), "--out", str(file.directory / "shards" / str(k))]
    command += ["--host", _listen_host(file), "--port", str(port), "--advertise", f"{host}:{port}"]
    if table.address.startswith(HTTP_SCHEME) or _has_option(table.arguments, "--plain-text"):
        command.append("--plain-text")
    if table.keys is not None:
        command += ["--keys", str(_key_directory(table.keys, SYNCER))]
    unit = replace(table.unit, name=name, command=tuple(command), directory=table.unit.directory.with_name(name))
    return _with_environment(unit, {}, token)


def _island(file: IslandsFile, token: str | None, island: IslandTable) -> Unit:
    environment = {
        SYNCER_ADDRESS: file.syncer.address,
        LEARNER: str(island.number),
        RUN_DIRECTORY: str(file.directory),
        NOTICE_S: f"{learner_notice_s(island.unit.notice_s):g}",
        JOIN_TIMEOUT_S: str(ISLAND_JOIN_TIMEOUT_S),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/islands.md: restarted ranks would wait forever
    }
    if file.syncer.keys is not None:
        environment[KEYS] = str(_key_directory(file.syncer.keys, island.unit.name, island.table_name))
    return _with_environment(island.unit, environment, token)


def _with_environment(unit: Unit, environment: Mapping[str, str], token: str | None) -> Unit:
    """Return the unit with its full environment. The values of secrets come from the environment of this process."""
    if missing := sorted(unit.secret_names.difference(os.environ)):
        names = ", ".join(missing)
        raise ValueError(f"{unit.name}: secrets has {names}, which is not set here: export it and retry")
    secret = {name: os.environ[name] for name in unit.secret_names} | ({TOKEN: token} if token is not None else {})
    variables = {"PYTHONUNBUFFERED": "1", **environment, **unit.environment, **secret}
    return replace(unit, environment=variables, secret_names=frozenset(secret))


def _key_directory(keys: Path, *names: str) -> Path:
    for name in names:
        if (keys / name).is_dir():
            return keys / name
    raise ValueError(f"{keys} has no key for {names[0]}: create one with atoll keys add {keys} {names[0]}")
