"""This machine as an engine: a keeper process for each unit, which goes on when whoever started it has gone.

All that is known of a unit is in its directory (`atoll.launch.keeper`), so nothing has to run between two commands.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.files import is_locked
from atoll.launch.engine import Unit, UnitStanding, UnitState, inherited_environment, search_path, start_logs
from atoll.launch.guard import ProcessId, is_alive, send_signal
from atoll.launch.keeper import LOCK, SPEC, STATE, read_state, write_json
from atoll.launch.supervisor import POLL_INTERVAL_S

START_S = 60.0
RESERVE_S = 15.0
"""For the keeper, after the notice: it kills what is left and writes that down."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalEngine:
    def __init__(self) -> None:
        self._asked: dict[str, int] = {}  # devices, by unit
        self._there: list[str] | None = None

    # ------------------------------------------------------------------------------------------------------ starting

    def check(self, unit: Unit) -> None:
        if unit.nodes != 1:
            raise ValueError(f"{unit.name}: nodes is {unit.nodes}, and engine local has this machine only: give 1")
        if unit.options:
            raise ValueError(f"{unit.name}: engine local has no options; leave {', '.join(unit.options)} out")
        if shutil.which(unit.command[0], path=search_path(unit.environment.get("PATH"))) is None:
            raise ValueError(
                f"{unit.name}: there is no program {unit.command[0]!r} on this machine: write its path, or ./NAME if"
                f" it is beside the file"
            )
        _check_directory(unit)
        self._asked[unit.name] = unit.devices
        wanted, there = sum(self._asked.values()), self._devices() if unit.devices else None
        if there is not None and wanted > len(there):
            raise ValueError(
                f"{unit.name}: the local units want {wanted} devices together, and this machine has {len(there)}:"
                f" give some of them fewer"
            )

    def render(self, unit: Unit) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in unit.shown_environment().items()]
        if unit.devices:
            words.append(f"{VISIBLE}=({unit.devices} that are free)")
        kept = f"# {unit.name}, on this machine; restarts: {unit.restarts}, notice: {unit.notice_s:g} s"
        return "\n".join([kept, f"cd {shlex.quote(str(unit.directory))}", *words, shlex.join(unit.command)])

    def start(self, unit: Unit) -> dict[str, Any]:
        unit.directory.mkdir(parents=True, exist_ok=True)
        handle = {"directory": str(unit.directory), "host": socket.gethostname(), "notice_s": unit.notice_s}
        spec = {
            "command": list(unit.command),
            "restarts": unit.restarts,
            "notice_s": unit.notice_s,
            "syncer": str(unit.syncer) if unit.syncer is not None else None,
            "ends_with_syncer": unit.ends_with_syncer,
        }
        if (told := read_state(unit.directory)) is not None:
            if not self._status(unit.directory).standing.is_over:
                self._adopt(unit, spec, told)
                return handle
            _wait_for_end(unit.directory, float(told["notice_s"]))
        environment = inherited_environment()
        environment.setdefault("OMP_NUM_THREADS", str(unit.cpus))  # more threads than cores slow each other down
        environment |= {**unit.environment, "PATH": search_path(unit.environment.get("PATH"))}
        devices = self._take(unit)
        if devices:
            environment[VISIBLE] = ",".join(devices)
        write_json(unit.directory / SPEC, {**spec, "devices": devices})
        self._keep(unit, environment)
        return handle

    def _adopt(self, unit: Unit, spec: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """Whoever started it was killed before that was written down: it is this very unit, unless it has changed."""
        kept = json.loads((unit.directory / SPEC).read_text(encoding="utf-8"))
        if {**kept, **spec} != kept:
            keeper = told["keeper"]["pid"]
            raise ValueError(f"{unit.name} is kept already, as another command, by process {keeper}: kill {keeper}")

    def _keep(self, unit: Unit, environment: dict[str, str]) -> None:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "atoll.launch.keeper", str(unit.directory)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, wrong = keeper.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.communicate()
            raise OSError(f"{unit.name}: its keeper did not start within {START_S:g} s") from None
        if keeper.returncode != 0:
            raise OSError(f"{unit.name} cannot be kept: {said.strip() or wrong.strip()[-500:]}")

    # ------------------------------------------------------------------------------------------------------- looking

    def status(self, handle: Mapping[str, Any]) -> UnitState:
        return self._status(_here(handle))

    def _status(self, directory: Path) -> UnitState:
        told = read_state(directory)
        if told is None:
            return UnitState(UnitStanding.GONE, why=f"nothing is known of it in {directory}")
        standing, restarts, why = UnitStanding(told["standing"]), int(told["restarts"]), str(told["why"])
        if not standing.is_over:
            keeper = ProcessId.from_json(told["keeper"])
            if keeper is None or not is_alive(keeper):
                told = read_state(directory) or told  # it may have ended between the two looks
                standing, why = UnitStanding(told["standing"]), str(told["why"])
                if not standing.is_over:
                    also = "; its command is being ended" if is_locked(directory / LOCK) else ""
                    return UnitState(UnitStanding.FAILED, restarts, f"its keeper was killed{also}")
        if told["again_at"] is not None:
            why = f"{why}; starts again in {max(0.0, told['again_at'] - time.time()):.0f} s"
        return UnitState(standing, int(told["restarts"]), why)

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return start_logs(_here(handle))

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop(self, handle: Mapping[str, Any]) -> None:
        directory = _here(handle)
        told = read_state(directory)
        if told is None:
            return
        notice_s = float(told["notice_s"])
        keeper = ProcessId.from_json(told["keeper"])
        if keeper is not None and send_signal(keeper, signal.SIGTERM):
            until = time.monotonic() + notice_s + RESERVE_S
            while is_alive(keeper) and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
            send_signal(keeper, signal.SIGKILL)
        _wait_for_end(directory, notice_s)
        told = read_state(directory) or told
        if not UnitStanding(told["standing"]).is_over:
            stopped = {"standing": "stopped", "why": "its keeper was killed before", "child": None, "again_at": None}
            write_json(directory / STATE, {**told, **stopped})

    # ------------------------------------------------------------------------------------------------------- devices

    def _devices(self) -> list[str] | None:
        """Their numbers; None where nobody can tell."""
        if self._there is None:
            self._there = _devices_there()
        return self._there

    def _take(self, unit: Unit) -> list[str]:
        """Those with the lowest numbers that no other unit of this run has."""
        if not unit.devices:
            return []
        taken: set[str] = set()
        for path in unit.directory.parent.glob(f"*/{STATE}"):
            if path.parent != unit.directory and not self._status(path.parent).standing.is_over:
                taken.update((read_state(path.parent) or {}).get("devices", []))
        there = self._devices() or [str(number) for number in range(unit.devices + len(taken))]
        free = [number for number in there if number not in taken]
        if len(free) < unit.devices:
            raise ValueError(f"{unit.name} wants {unit.devices} devices, and {len(free)} of {len(there)} are free")
        return free[: unit.devices]


def _here(handle: Mapping[str, Any]) -> Path:
    host = socket.gethostname()
    if handle["host"] != host:
        raise OSError(f"it is kept on {handle['host']}, and this is {host}: ask there")
    return Path(handle["directory"])


def _wait_for_end(directory: Path, notice_s: float) -> None:
    """Wait until neither keeper nor guard is left. The guard of a killed keeper gives the command its notice."""
    until = time.monotonic() + notice_s + RESERVE_S
    while is_locked(directory / LOCK):
        if time.monotonic() > until:
            raise OSError(f"a process of the unit in {directory} does not end by SIGKILL: see `ps axf`")
        time.sleep(POLL_INTERVAL_S)


def _check_directory(unit: Unit) -> None:
    """Nothing is made: the nearest directory that is there has to take it."""
    found = unit.directory
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise ValueError(f"{unit.name}: {found} is no directory, and {unit.directory} is to be in it")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(f"{unit.name}: {found} cannot be written by you: choose another directory for the run")


def _devices_there() -> list[str] | None:
    if os.environ.get(VISIBLE):
        return os.environ[VISIBLE].split(",")
    try:
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        try:
            import torch
        except ModuleNotFoundError:
            return None
        return [str(number) for number in range(torch.cuda.device_count())]
    return [str(number) for number in range(len(said.stdout.splitlines()))] if said.returncode == 0 else None
