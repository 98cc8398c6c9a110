"""The Ray launcher: units as placement groups and actors of a Ray cluster, which detects lost nodes.

A unit does not depend on the process that started it. `ray_supervisor` runs in the cluster and restarts the unit.
`ray_driver` is the child process through which this process sends requests to the cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from atoll.files import write_text
from atoll.launch.launcher import Unit, UnitState, UnitStatus, find_start_logs

OPTIONS = ("address", "namespace", "resources", "runtime_env", "strategy")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
NAMESPACE = "atoll"
LOCAL_ADDRESS = "local"
UNKNOWN_CAUSE = "the Ray cluster has no such unit"
CONNECT_TIMEOUT_S = 5.0
DRIVER_EXIT_TIMEOUT_S = 10.0
STOP_POLL_INTERVAL_S = 0.2
STOP_RESERVE_S = 60.0
"""Added to the preemption notice, for a supervisor that waits for lost nodes."""
LOCAL_START_TIMEOUT_S = 120.0
LOCAL_OBJECT_STORE_BYTES = 100_000_000
"""Size of the object store of a cluster that Atoll starts. Atoll stores nothing there."""


class RayLauncher:
    """Options of a unit: `address`, `namespace`, `resources` per node, `strategy`, `runtime_env`."""

    def __init__(self) -> None:
        self._drivers: dict[str, _RayDriver] = {}
        self._lock = threading.Lock()

    def check(self, unit: Unit) -> None:
        if find_spec("ray") is None:
            raise ValueError("Ray is not installed here: pip install 'atoll[ray]'")
        _check_options(unit)
        configured = _configured_address(unit)
        if configured == LOCAL_ADDRESS:
            return
        address = _address(configured)
        if not _is_listening(address):
            raise ValueError(
                f"no Ray cluster answers at {address}: start it with `ray start --head`, or name another one by "
                "`address` in the options of the unit or by RAY_ADDRESS"
            )

    def render(self, unit: Unit) -> str:
        _check_options(unit)
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in node_resources(unit).items()) or "nothing"
        lines = [
            f"Ray cluster      {_configured_address(unit) or 'of this machine'}",
            f"namespace        {unit.options.get('namespace', NAMESPACE)}",
            f"supervisor       {_actor(unit)}: detached, on the head node, restarted by Ray",
            f"placement group  {placement_strategy(unit)}, {unit.nodes} x ({bundle})",
            f"command          {shlex.join(unit.command)}",
            f"restarts         {unit.max_restarts}",
            f"notice           {unit.notice_s:g} s",
            f"directory        {unit.directory}",
        ]
        if unit.options.get("runtime_env"):
            lines.append(f"runtime_env      {json.dumps(unit.options['runtime_env'], sort_keys=True)}")
        lines += [f"environment      {name}={value}" for name, value in unit.redacted_environment().items()]
        text = "\n".join(lines) + "\n"
        for name in unit.secret_names:  # the command may contain it too
            hidden = unit.environment.get(name)
            text = text.replace(hidden, "(secret)") if hidden else text
        return text

    def start(self, unit: Unit) -> dict[str, Any]:
        self.check(unit)
        configured = _configured_address(unit)
        address = _local_cluster() if configured == LOCAL_ADDRESS else _address(configured)
        handle = {
            "address": address,
            "namespace": unit.options.get("namespace", NAMESPACE),
            "actor": _actor(unit),
            "directory": str(unit.directory),
            "notice_s": unit.notice_s,
        }
        self._driver(address).request("start", **_name(handle), unit=unit.to_json())
        return handle

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        try:
            state = self._driver(handle["address"]).request("status", **_name(handle))
            gone = UNKNOWN_CAUSE
        except ValueError as error:
            state, gone = {}, str(error)
        if not state:  # the unit has ended, or the cluster was stopped
            state = read_last_state(Path(handle["directory"]))
            if state.get("state") not in FINAL_STATES:
                if gone is not UNKNOWN_CAUSE and not _refuses_connections(handle["address"]):
                    raise ValueError(gone)  # an unreachable cluster may still run
                state |= {"state": UnitState.LOST.value, "cause": gone}
        return UnitStatus(UnitState(state["state"]), max(int(state.get("starts", 0)) - 1, 0), str(state["cause"]))

    def stop(self, handle: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + float(handle["notice_s"]) + STOP_RESERVE_S
        # If the cluster was stopped, all its units have ended. Requests are short, so that other threads are not
        # blocked.
        while not _refuses_connections(handle["address"]) and self._driver(handle["address"]).request(
            "stop", **_name(handle), kill=time.monotonic() > deadline
        ):
            time.sleep(STOP_POLL_INTERVAL_S)
        state = read_last_state(Path(handle["directory"]))
        if state and state["state"] not in FINAL_STATES:
            write_last_state(Path(handle["directory"]), state | {"state": "stopped", "cause": "its supervisor is lost"})

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        return find_start_logs(Path(handle["directory"]))

    def _driver(self, address: str) -> _RayDriver:
        if not _is_listening(address):  # a driver would wait for a minute and then exit
            raise ValueError(f"no Ray cluster answers at {address}")
        with self._lock:
            driver = self._drivers.get(address)
            if driver is None or not driver.is_alive:
                driver = self._drivers[address] = _RayDriver(address)
            return driver


class _RayDriver:
    """Child process that is connected to the cluster. It ends when its stdin closes, so it ends with this process."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - output of Ray, open while the process runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atoll.launch.ray_driver", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            start_new_session=True,  # Ctrl-C must not reach the child
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
        self._end = weakref.finalize(self, _end, self._process, self._output)
        self._read_reply()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                self._process.stdin.flush()
            return self._read_reply()

    def _read_reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._output.seek(0)
            output = self._output.read().decode(errors="replace").strip()
            raise ValueError(f"cannot connect to the Ray cluster: {output[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["ok"]


def _end(process: subprocess.Popen[str], output: IO[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
        process.communicate(timeout=DRIVER_EXIT_TIMEOUT_S)  # its input ends
    process.kill()
    process.wait()
    output.close()


def _name(handle: Mapping[str, Any]) -> dict[str, str]:
    return {"actor": handle["actor"], "namespace": handle["namespace"]}


def _actor(unit: Unit) -> str:
    """Return the actor name: unique for run, unit and directory."""
    return f"{unit.run}.{unit.name}.{hashlib.sha256(str(unit.directory).encode()).hexdigest()[:8]}"


def node_resources(unit: Unit) -> dict[str, float]:
    """Return the resources that the unit needs on each node."""
    needs = {"CPU": unit.cpus, "GPU": unit.devices, **unit.options.get("resources", {})}
    return {name: amount for name, amount in needs.items() if amount}


def placement_strategy(unit: Unit) -> str:
    """Return the placement strategy. By default the parts of a unit with several nodes are on different nodes."""
    return str(unit.options.get("strategy", "PACK" if unit.nodes == 1 else "STRICT_SPREAD"))


def _check_options(unit: Unit) -> None:
    unknown = sorted(set(unit.options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"{unit.name}: the Ray launcher has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
    if placement_strategy(unit) not in STRATEGIES:
        raise ValueError(f"{unit.name}: strategy {placement_strategy(unit)!r} is none of {', '.join(STRATEGIES)}")
    resources = unit.options.get("resources", {})
    if not isinstance(resources, Mapping) or not all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and amount > 0 for amount in resources.values()
    ):
        raise ValueError(f"{unit.name}: resources are names with amounts above 0, as {{island = 1}}")
    reserved = sorted({"CPU", "GPU", "memory"} & set(resources))
    if reserved:
        raise ValueError(f"{unit.name}: {reserved[0]} is not a custom resource; use cpus and devices of the unit")
    if not isinstance(unit.options.get("runtime_env", {}), Mapping):
        raise ValueError(f"{unit.name}: runtime_env is a table, as {{working_dir = '/shared/job'}}")
    for name in ("address", "namespace"):
        if not isinstance(unit.options.get(name, ""), str):
            raise ValueError(f"{unit.name}: {name} must be a string")
    if unit.nodes < 1 or unit.cpus < 0 or unit.devices < 0 or not unit.command:
        raise ValueError(f"{unit.name}: a unit has a command and at least one node; cpus and devices are not below 0")


# --------------------------------------------------------------------------------------------------------------------
# The address of the cluster


def _configured_address(unit: Unit) -> str:
    """Return the configured address; empty for the cluster of this machine."""
    address = str(unit.options.get("address") or os.environ.get("RAY_ADDRESS", ""))
    return "" if address == "auto" else address


def _address(configured: str) -> str:
    address = configured or _find_local_address()
    if not address:
        raise ValueError(
            "no Ray cluster runs on this machine: start one with `ray start --head`, name one by `address` in the "
            "options of the unit or by RAY_ADDRESS, or let Atoll start one here with address = 'local'"
        )
    if not re.fullmatch(r"(?:ray://)?(?:[^:/\s]+|\[[^]]+\]):\d+", address):
        raise ValueError(f"{address!r} is not the address of a Ray cluster; use one such as head:6379")
    return address


def _find_local_address() -> str:
    """Return the address that `ray start` wrote, or an empty string."""
    path = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _is_listening(address: str) -> bool:
    try:
        return not _refuses_connections(address)
    except ValueError:
        return False


def _refuses_connections(address: str) -> bool:
    """Return whether the host is up and nothing listens. Raise ValueError if that cannot be determined."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError as error:
        raise ValueError(f"the Ray cluster at {address} cannot be reached: {error}") from None


def _local_cluster() -> str:
    """Return the address of the cluster of this machine. Start one if none runs; `ray stop` ends it."""
    address = _find_local_address()
    if address and _is_listening(address):
        return address
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
    command += [
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--object-store-memory={LOCAL_OBJECT_STORE_BYTES}",
    ]
    with socket.socket() as probe:  # the default port of Ray's client may be in use
        probe.bind(("", 0))
        command.append(f"--ray-client-server-port={probe.getsockname()[1]}")
    with tempfile.TemporaryFile() as output:  # not a pipe: the started daemons would keep a pipe open
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            timeout=LOCAL_START_TIMEOUT_S,
            check=False,
        )
        address = _find_local_address()
        if result.returncode or not address:
            output.seek(0)
            raise ValueError(f"`ray start --head` has failed: {output.read().decode(errors='replace')[-2000:]}")
    return address


# --------------------------------------------------------------------------------------------------------------------
# The state file in the directory of a unit


RAY_STATE_FILE = "ray.json"
"""The last state of the unit. It is read when the supervisor has exited."""
FINAL_STATES = ("ended", "failed", "stopped")
"""States after which there is no supervisor."""


def read_last_state(directory: Path) -> dict[str, Any]:
    """Return the last state that the supervisor wrote; empty if there is none."""
    try:
        state: dict[str, Any] = json.loads((directory / RAY_STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state


def write_last_state(directory: Path, state: Mapping[str, Any]) -> None:
    write_text(directory / RAY_STATE_FILE, json.dumps(state), durable=False)
