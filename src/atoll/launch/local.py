"""This machine as a launcher: a supervisor process for each unit, which goes on when whoever started it has gone.

All that is known of a unit is in its directory (`atoll.launch.local_supervisor`), so nothing has to run between two
commands.
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
from atoll.launch.guard import ProcessId, is_alive, send_signal
from atoll.launch.launcher import Unit, UnitState, UnitStatus, find_start_logs, inherited_environment, search_path
from atoll.launch.local_supervisor import LOCK_FILE, SPEC_FILE, STATE_FILE, read_state, write_json
from atoll.launch.supervisor import POLL_INTERVAL_S

SUPERVISOR_START_TIMEOUT_S = 60.0
KILL_RESERVE_S = 15.0
"""For the supervisor, after the notice: it kills what is left and writes that down."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class LocalLauncher:
    def __init__(self) -> None:
        self._requested_devices: dict[str, int] = {}  # devices, by unit
        self._device_ids: list[str] | None = None

    # ------------------------------------------------------------------------------------------------------ starting

    def check(self, unit: Unit) -> None:
        if unit.nodes != 1:
            raise ValueError(f"{unit.name}: nodes is {unit.nodes}, and launcher local has this machine only: give 1")
        if unit.options:
            raise ValueError(f"{unit.name}: launcher local has no options; leave {', '.join(unit.options)} out")
        if shutil.which(unit.command[0], path=search_path(unit.environment.get("PATH"))) is None:
            raise ValueError(
                f"{unit.name}: there is no program {unit.command[0]!r} on this machine: write its path, or ./NAME if"
                f" it is beside the file"
            )
        _check_directory(unit)
        self._requested_devices[unit.name] = unit.devices
        wanted, there = sum(self._requested_devices.values()), self._devices() if unit.devices else None
        if there is not None and wanted > len(there):
            raise ValueError(
                f"{unit.name}: the local units want {wanted} devices together, and this machine has {len(there)}:"
                f" give some of them fewer"
            )

    def render(self, unit: Unit) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in unit.redacted_environment().items()]
        if unit.devices:
            words.append(f"{VISIBLE_DEVICES}=({unit.devices} that are free)")
        kept = f"# {unit.name}, on this machine; restarts: {unit.max_restarts}, notice: {unit.notice_s:g} s"
        return "\n".join([kept, f"cd {shlex.quote(str(unit.directory))}", *words, shlex.join(unit.command)])

    def start(self, unit: Unit) -> dict[str, Any]:
        unit.directory.mkdir(parents=True, exist_ok=True)
        handle = {"directory": str(unit.directory), "host": socket.gethostname(), "notice_s": unit.notice_s}
        spec = {
            "command": list(unit.command),
            "restarts": unit.max_restarts,
            "notice_s": unit.notice_s,
            "syncer": str(unit.syncer_directory) if unit.syncer_directory is not None else None,
            "ends_with_syncer": unit.ends_with_syncer,
        }
        if (told := read_state(unit.directory)) is not None:
            if not self._status(unit.directory).state.is_finished:
                self._adopt(unit, spec, told)
                return handle
            _wait_for_end(unit.directory, float(told["notice_s"]))
        environment = inherited_environment()
        environment.setdefault("OMP_NUM_THREADS", str(unit.cpus))  # more threads than cores slow each other down
        environment |= {**unit.environment, "PATH": search_path(unit.environment.get("PATH"))}
        devices = self._allocate_devices(unit)
        if devices:
            environment[VISIBLE_DEVICES] = ",".join(devices)
        write_json(unit.directory / SPEC_FILE, {**spec, "devices": devices})
        self._spawn_supervisor(unit, environment)
        return handle

    def _adopt(self, unit: Unit, spec: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """Whoever started it was killed before that was written down: it is this very unit, unless it has changed."""
        kept = json.loads((unit.directory / SPEC_FILE).read_text(encoding="utf-8"))
        if {**kept, **spec} != kept:
            supervisor = told["supervisor"]["pid"]
            raise ValueError(
                f"{unit.name} is kept already, as another command, by process {supervisor}: kill {supervisor}"
            )

    def _spawn_supervisor(self, unit: Unit, environment: dict[str, str]) -> None:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "atoll.launch.local_supervisor", str(unit.directory)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, error = supervisor.communicate(timeout=SUPERVISOR_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.communicate()
            raise OSError(
                f"{unit.name}: its supervisor did not start within {SUPERVISOR_START_TIMEOUT_S:g} s"
            ) from None
        if supervisor.returncode != 0:
            raise OSError(f"{unit.name} cannot be kept: {said.strip() or error.strip()[-500:]}")

    # ------------------------------------------------------------------------------------------------------- looking

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        return self._status(_unit_directory(handle))

    def _status(self, directory: Path) -> UnitStatus:
        told = read_state(directory)
        if told is None:
            return UnitStatus(UnitState.LOST, cause=f"nothing is known of it in {directory}")
        state, restarts, cause = UnitState(told["state"]), int(told["restarts"]), str(told["cause"])
        if not state.is_finished:
            supervisor = ProcessId.from_json(told["supervisor"])
            if supervisor is None or not is_alive(supervisor):
                told = read_state(directory) or told  # it may have ended between the two looks
                state, cause = UnitState(told["state"]), str(told["cause"])
                if not state.is_finished:
                    also = "; its command is being ended" if is_locked(directory / LOCK_FILE) else ""
                    return UnitStatus(UnitState.FAILED, restarts, f"its supervisor was killed{also}")
        if told["again_at"] is not None:
            cause = f"{cause}; starts again in {max(0.0, told['again_at'] - time.time()):.0f} s"
        return UnitStatus(state, int(told["restarts"]), cause)

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return find_start_logs(_unit_directory(handle))

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop(self, handle: Mapping[str, Any]) -> None:
        directory = _unit_directory(handle)
        told = read_state(directory)
        if told is None:
            return
        notice_s = float(told["notice_s"])
        supervisor = ProcessId.from_json(told["supervisor"])
        if supervisor is not None and send_signal(supervisor, signal.SIGTERM):
            until = time.monotonic() + notice_s + KILL_RESERVE_S
            while is_alive(supervisor) and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
            send_signal(supervisor, signal.SIGKILL)
        _wait_for_end(directory, notice_s)
        told = read_state(directory) or told
        if not UnitState(told["state"]).is_finished:
            stopped = {"state": "stopped", "cause": "its supervisor was killed before", "child": None, "again_at": None}
            write_json(directory / STATE_FILE, {**told, **stopped})

    # ------------------------------------------------------------------------------------------------------- devices

    def _devices(self) -> list[str] | None:
        """Their numbers; None where nobody can tell."""
        if self._device_ids is None:
            self._device_ids = _find_devices()
        return self._device_ids

    def _allocate_devices(self, unit: Unit) -> list[str]:
        """Those with the lowest numbers that no other unit of this run has."""
        if not unit.devices:
            return []
        taken: set[str] = set()
        for path in unit.directory.parent.glob(f"*/{STATE_FILE}"):
            if path.parent != unit.directory and not self._status(path.parent).state.is_finished:
                taken.update((read_state(path.parent) or {}).get("devices", []))
        there = self._devices() or [str(number) for number in range(unit.devices + len(taken))]
        free = [number for number in there if number not in taken]
        if len(free) < unit.devices:
            raise ValueError(f"{unit.name} wants {unit.devices} devices, and {len(free)} of {len(there)} are free")
        return free[: unit.devices]


def _unit_directory(handle: Mapping[str, Any]) -> Path:
    host = socket.gethostname()
    if handle["host"] != host:
        raise OSError(f"it is kept on {handle['host']}, and this is {host}: ask there")
    return Path(handle["directory"])


def _wait_for_end(directory: Path, notice_s: float) -> None:
    """Wait until neither supervisor nor guard is left. The guard of a killed supervisor waits for the notice."""
    until = time.monotonic() + notice_s + KILL_RESERVE_S
    while is_locked(directory / LOCK_FILE):
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


def _find_devices() -> list[str] | None:
    if os.environ.get(VISIBLE_DEVICES):
        return os.environ[VISIBLE_DEVICES].split(",")
    try:
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        try:
            import torch
        except ModuleNotFoundError:
            return None
        return [str(number) for number in range(torch.cuda.device_count())]
    return [str(number) for number in range(len(said.stdout.splitlines()))] if said.returncode == 0 else None
