"""The local launcher: one detached supervisor process on this machine for each unit.

The state of a unit is in its directory (`atoll.launch.local_supervisor`). No other process has to run between two
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
"""Time after the notice in which the supervisor kills the remaining processes and writes its state."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class LocalLauncher:
    """Launcher of units on this machine."""

    def __init__(self) -> None:
        self._requested_devices: dict[str, int] = {}  # number of devices by unit
        self._device_ids: list[str] | None = None

    # --------------------------------------------------------------------------------------------------------- start

    def check(self, unit: Unit) -> None:
        if unit.nodes != 1:
            raise ValueError(f"{unit.name}: nodes is {unit.nodes}, but launcher local has one machine: use 1")
        if unit.options:
            raise ValueError(f"{unit.name}: launcher local has no options: remove {', '.join(unit.options)}")
        if shutil.which(unit.command[0], path=search_path(unit.environment.get("PATH"))) is None:
            raise ValueError(
                f"{unit.name}: there is no program {unit.command[0]!r} on this machine: write its path, or ./NAME if"
                f" it is in the directory of the file"
            )
        _check_directory(unit)
        self._requested_devices[unit.name] = unit.devices
        requested, available = sum(self._requested_devices.values()), self._devices() if unit.devices else None
        if available is not None and requested > len(available):
            raise ValueError(
                f"{unit.name}: the local units need {requested} devices together, and this machine has"
                f" {len(available)}: reduce devices of some units"
            )

    def render(self, unit: Unit) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in unit.redacted_environment().items()]
        if unit.devices:
            variables.append(f"{VISIBLE_DEVICES}=({unit.devices} free devices)")
        header = f"# {unit.name}, on this machine; restarts: {unit.max_restarts}, notice: {unit.notice_s:g} s"
        return "\n".join([header, f"cd {shlex.quote(str(unit.directory))}", *variables, shlex.join(unit.command)])

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
        if (state := read_state(unit.directory)) is not None:
            if not self._status(unit.directory).state.is_finished:
                self._adopt(unit, spec, state)
                return handle
            _wait_for_end(unit.directory, float(state["notice_s"]))
        environment = inherited_environment()
        environment.setdefault("OMP_NUM_THREADS", str(unit.cpus))  # avoid more threads than cores
        environment |= {**unit.environment, "PATH": search_path(unit.environment.get("PATH"))}
        devices = self._allocate_devices(unit)
        if devices:
            environment[VISIBLE_DEVICES] = ",".join(devices)
        write_json(unit.directory / SPEC_FILE, {**spec, "devices": devices})
        self._spawn_supervisor(unit, environment)
        return handle

    def _adopt(self, unit: Unit, spec: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take over a running supervisor whose handle was lost. Raise ValueError if its specification differs."""
        running_spec = json.loads((unit.directory / SPEC_FILE).read_text(encoding="utf-8"))
        if {**running_spec, **spec} != running_spec:
            supervisor = state["supervisor"]["pid"]
            raise ValueError(
                f"{unit.name} runs already with another command, under process {supervisor}: kill {supervisor}"
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
            output, errors = supervisor.communicate(timeout=SUPERVISOR_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.communicate()
            raise OSError(
                f"{unit.name}: its supervisor did not start within {SUPERVISOR_START_TIMEOUT_S:g} s"
            ) from None
        if supervisor.returncode != 0:
            raise OSError(f"{unit.name} cannot be supervised: {output.strip() or errors.strip()[-500:]}")

    # -------------------------------------------------------------------------------------------------------- status

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        return self._status(_unit_directory(handle))

    def _status(self, directory: Path) -> UnitStatus:
        record = read_state(directory)
        if record is None:
            return UnitStatus(UnitState.LOST, cause=f"{directory} has no state of the unit")
        state, restarts, cause = UnitState(record["state"]), int(record["restarts"]), str(record["cause"])
        if not state.is_finished:
            supervisor = ProcessId.from_json(record["supervisor"])
            if supervisor is None or not is_alive(supervisor):
                record = read_state(directory) or record  # it may have ended after the first read
                state, cause = UnitState(record["state"]), str(record["cause"])
                if not state.is_finished:
                    suffix = "; its command is being stopped" if is_locked(directory / LOCK_FILE) else ""
                    return UnitStatus(UnitState.FAILED, restarts, f"its supervisor was killed{suffix}")
        if record["again_at"] is not None:
            cause = f"{cause}; restarts in {max(0.0, record['again_at'] - time.time()):.0f} s"
        return UnitStatus(state, int(record["restarts"]), cause)

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return find_start_logs(_unit_directory(handle))

    # ---------------------------------------------------------------------------------------------------------- stop

    def stop(self, handle: Mapping[str, Any]) -> None:
        directory = _unit_directory(handle)
        state = read_state(directory)
        if state is None:
            return
        notice_s = float(state["notice_s"])
        supervisor = ProcessId.from_json(state["supervisor"])
        if supervisor is not None and send_signal(supervisor, signal.SIGTERM):
            until = time.monotonic() + notice_s + KILL_RESERVE_S
            while is_alive(supervisor) and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
            send_signal(supervisor, signal.SIGKILL)
        _wait_for_end(directory, notice_s)
        state = read_state(directory) or state
        if not UnitState(state["state"]).is_finished:
            stopped = {"state": "stopped", "cause": "its supervisor was killed before", "child": None, "again_at": None}
            write_json(directory / STATE_FILE, {**state, **stopped})

    # ------------------------------------------------------------------------------------------------------- devices

    def _devices(self) -> list[str] | None:
        """Return the ids of the devices of this machine; None if they cannot be determined."""
        if self._device_ids is None:
            self._device_ids = _find_devices()
        return self._device_ids

    def _allocate_devices(self, unit: Unit) -> list[str]:
        """Return the first devices that no other unit of this run uses."""
        if not unit.devices:
            return []
        used: set[str] = set()
        for path in unit.directory.parent.glob(f"*/{STATE_FILE}"):
            if path.parent != unit.directory and not self._status(path.parent).state.is_finished:
                used.update((read_state(path.parent) or {}).get("devices", []))
        devices = self._devices() or [str(number) for number in range(unit.devices + len(used))]
        free = [number for number in devices if number not in used]
        if len(free) < unit.devices:
            raise ValueError(f"{unit.name} needs {unit.devices} devices, and {len(free)} of {len(devices)} are free")
        return free[: unit.devices]


def _unit_directory(handle: Mapping[str, Any]) -> Path:
    host = socket.gethostname()
    if handle["host"] != host:
        raise OSError(f"it runs on {handle['host']}, and this is {host}: run this command there")
    return Path(handle["directory"])


def _wait_for_end(directory: Path, notice_s: float) -> None:
    """Wait until supervisor and guard have ended. The guard of a killed supervisor waits for the notice."""
    until = time.monotonic() + notice_s + KILL_RESERVE_S
    while is_locked(directory / LOCK_FILE):
        if time.monotonic() > until:
            raise OSError(f"a process of the unit in {directory} survives SIGKILL: find it with `ps axf`")
        time.sleep(POLL_INTERVAL_S)


def _check_directory(unit: Unit) -> None:
    """Raise ValueError if the unit's directory cannot be created. Create nothing."""
    parent = unit.directory
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"{unit.name}: cannot create {unit.directory}: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{unit.name}: you cannot write to {parent}: choose another directory for the run")


def _find_devices() -> list[str] | None:
    if os.environ.get(VISIBLE_DEVICES):
        return os.environ[VISIBLE_DEVICES].split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        try:
            import torch
        except ModuleNotFoundError:
            return None
        return [str(number) for number in range(torch.cuda.device_count())]
    return [str(number) for number in range(len(listed.stdout.splitlines()))] if listed.returncode == 0 else None
