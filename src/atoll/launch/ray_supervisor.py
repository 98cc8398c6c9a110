"""Actors of one unit in the Ray cluster: one supervisor, and a runner on each node.

The supervisor is detached: it does not depend on a process outside the cluster. It uses no resources and runs on the
head node, so it survives the loss of any other node. It owns the placement group and the runners: Ray ends them with
the supervisor, and the guard of a runner ends its command.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atoll.launch.guard import CommandExit, GuardedCommand
from atoll.launch.launcher import Unit, UnitState, inherited_environment, last_start_number, start_log_name
from atoll.launch.ray_cluster import node_resources, placement_strategy, read_last_state, write_last_state
from atoll.launch.supervisor import RUN_POLL_INTERVAL_S, ExitInfo, RestartPolicy, UnitSupervisor

POLL_INTERVAL_S = 0.25
WRITE_INTERVAL_S = 2.0
DISK_FULL_TIMEOUT_S = 900.0
"""Limit for writing the final state on a full disk. Meanwhile the supervisor still replies."""
RUN_OVER_CAUSE = "the run is over: its syncer has ended"
KILL_TIMEOUT_S = 30.0
"""Added to the preemption notice, for a node that no longer replies."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0
RAY_VARIABLES = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_RAYLET_PID")
"""Variables that Ray sets for its own processes. The user's command must not inherit them."""


class NodeRunner:
    """Runs the command on one node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: GuardedCommand | None = None
        self._stop_s: float | None = None

    def endpoint(self) -> tuple[str, int]:
        """Return the address of this node, and a free port."""
        address: str = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, log: str
    ) -> CommandExit | str:
        """Return how the command has ended, or why it could not be started."""
        try:
            with self._lock:
                whole = inherited_environment(RAY_VARIABLES) | dict(environment)
                self._running = GuardedCommand(command, whole, directory, log)
                if self._stop_s is not None:
                    self._running.stop(self._stop_s)
            return self._running.wait()
        except OSError as error:
            return str(error)

    def stop(self, notice_s: float) -> None:
        with self._lock:
            self._stop_s = notice_s
            if self._running is not None:
                self._running.stop(notice_s)


class RaySupervisor:
    """Actor that runs one unit until it ends, has no restart left or is stopped, then frees its resources."""

    def __init__(self, unit: Unit, group: str) -> None:
        self._unit, self._group_name = unit, group
        unit.directory.mkdir(parents=True, exist_ok=True)
        self._runners: list[Any] = []
        self._group: PlacementGroup | None = None
        before = read_last_state(unit.directory)
        self._starts = int(before.get("starts", 0))
        self._restarts = RestartPolicy(
            BACKOFF_FIRST_S, BACKOFF_MAX_S, unit.max_restarts, failures=int(before.get("failures", 0))
        )
        self._supervisor = UnitSupervisor(
            self._run_once, self._restarts, self._report, unit.notice_s, unit.syncer_directory, unit.ends_with_syncer
        )
        self._state: dict[str, Any] = {}
        self._is_written = False
        self._report(UnitState.WAITING, "its supervisor has started")
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def compare(self, unit: Unit) -> dict[str, Any]:
        """Return whether this is a supervisor of the same unit, and whether it stays."""
        is_stopping = self._supervisor.is_stopping()
        return {"is_same": unit == self._unit, "is_stopping": is_stopping, "state": self._state["state"]}

    def stop(self) -> None:
        self._supervisor.stop()

    # ----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            _remove_groups(self._group_name)  # of a previous process, if Ray has restarted this supervisor
            if self._supervisor.is_run_over():
                state, cause = UnitState.STOPPED, RUN_OVER_CAUSE
            else:
                state, cause = self._supervisor.run()
        except Exception as error:
            state, cause = UnitState.FAILED, f"its supervisor failed: {type(error).__name__}: {_first_line(error)}"
        self._stop_runners()
        with contextlib.suppress(RayError):
            _remove_groups(self._group_name)
        deadline = time.monotonic() + DISK_FULL_TIMEOUT_S
        while not self._report(state, cause) and time.monotonic() < deadline:
            time.sleep(WRITE_INTERVAL_S)
        # Last, because a client without a supervisor reads this state. Ray does not restart an actor killed this way.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _run_once(self, on_started: Callable[[str], None], should_end: Callable[[], bool]) -> ExitInfo:
        """Start the command on all nodes, and wait for its end."""
        addresses = self._place_runners(should_end)
        if isinstance(addresses, str):
            return ExitInfo(addresses, is_failure=False)
        self._starts += 1
        start = last_start_number(self._unit.directory) + 1
        (address, port), *_ = addresses
        on_started("on " + ", ".join(place for place, _ in addresses))
        running = [
            runner.run.remote(
                self._unit.command,
                dict(self._unit.environment) | node_variables(node, self._unit.nodes, address, port),
                self._unit.directory,
                start_log_name(start, node, self._unit.nodes),
            )
            for node, runner in enumerate(self._runners)
        ]
        return self._watch(running, should_end)

    def _place_runners(self, should_end: Callable[[], bool]) -> list[tuple[str, int]] | str:
        """Return the addresses of runners on all nodes, or the cause of a failure. Report missing resources
        meanwhile."""
        unit, lost = self._unit, bool(self._starts)
        needs = node_resources(unit)
        if self._group is None:
            bundles = [needs or {"CPU": 0.001}] * unit.nodes
            self._group = placement_group(bundles, strategy=placement_strategy(unit), name=self._group_name)
        if not self._runners:
            self._runners = [self._runner(node) for node in range(unit.nodes)]
        requests = [runner.endpoint.remote() for runner in self._runners]
        while not should_end():
            if self._supervisor.is_run_over(RUN_POLL_INTERVAL_S):
                return "it waited for resources"
            ready, _ = ray.wait(requests, num_returns=len(requests), timeout=POLL_INTERVAL_S)
            try:
                for answer in ready:
                    ray.get(answer)
                if len(ready) == len(requests):
                    return list(ray.get(requests))
            except RayError as error:
                self._stop_runners()
                return f"its process on a node could not be started: {_first_line(error)}"
            if missing := _missing_resources(self._group, needs, unit.nodes):
                self._report(UnitState.WAITING, f"its node is lost; {missing}" if lost else missing)
        return "it was stopped before it started"

    def _runner(self, node: int) -> Any:
        unit, group = self._unit, self._group
        assert group is not None
        runner: Any = ray.remote(NodeRunner)
        return runner.options(
            num_cpus=unit.cpus,
            num_gpus=unit.devices,
            resources=unit.options.get("resources") or None,
            runtime_env=unit.options.get("runtime_env") or None,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
        ).remote()

    def _watch(self, running: list[Any], should_end: Callable[[], bool]) -> ExitInfo:
        """Wait until all nodes have ended. If one has failed, or the unit is to end, all of them are stopped."""
        failed: list[ExitInfo] = []
        waiting, leaves, deadline = list(running), False, float("inf")
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
            for run in ended:
                info = _exit_info(run, f" of node {running.index(run)}" if len(running) > 1 else "")
                failed += [info] if info.cause else []
            leaves = leaves or bool(failed) or should_end()
            if leaves and deadline == float("inf"):
                deadline = time.monotonic() + self._unit.notice_s + KILL_TIMEOUT_S
                for runner in self._runners:
                    runner.stop.remote(self._unit.notice_s)
            if time.monotonic() > deadline:
                failed.append(ExitInfo("a node does not reply", is_failure=False))
                break
        if leaves:
            self._stop_runners()  # the next start creates new runners: some of these may be lost
        # The command on another node may fail before Ray has detected that a node is lost.
        return min(failed, key=lambda info: info.is_failure, default=ExitInfo())

    def _stop_runners(self) -> None:
        for runner in self._runners:
            ray.kill(runner)
        self._runners = []

    def _report(self, state: UnitState, cause: str, again_at: float | None = None) -> bool:
        """Store the state and return whether it was written. A full disk must not end the unit."""
        failures = self._restarts.failures
        current = {"state": state, "cause": cause, "starts": self._starts, "failures": failures}
        if current != self._state or not self._is_written:
            self._state = current
            try:
                write_last_state(self._unit.directory, current)
                self._is_written = True
            except OSError:
                self._is_written = False
        return self._is_written


# --------------------------------------------------------------------------------------------------------------------


def node_variables(node: int, nodes: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of a command on several nodes. torchrun reads PET_ variables as arguments."""
    if nodes == 1:
        return {}
    values = {"NNODES": str(nodes), "NODE_RANK": str(node), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return values | {f"PET_{name}": value for name, value in values.items()}


def _missing_resources(group: PlacementGroup, needs: Mapping[str, float], nodes: int) -> str:
    """Return the missing resources of the group; empty if it is placed."""
    found = placement_group_table(group)
    if found.get("state") == "CREATED":
        return ""
    needed = ", ".join(f"{amount:g} {name}" for name, amount in needs.items()) or "any resources"
    count = "no node" if nodes == 1 else f"no {nodes} nodes"
    if found.get("stats", {}).get("scheduling_state") == "NO_RESOURCES":
        return f"{count} with {needed} free yet"
    return f"{count} with {needed} yet"


def _remove_groups(name: str) -> None:
    for found in placement_group_table().values():
        if found["name"] == name and found["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(found["placement_group_id"])))


def _exit_info(run: Any, of_node: str) -> ExitInfo:
    try:
        ended: CommandExit | str = ray.get(run, timeout=KILL_TIMEOUT_S)
    except RayError:  # Ray's message does not say whether the process or the node failed first
        return ExitInfo(f"its process{of_node} is lost", is_failure=False)
    info = ExitInfo(ended) if isinstance(ended, str) else ExitInfo.from_code(*ended)
    return info._replace(cause=info.cause + of_node) if info.cause else info


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
