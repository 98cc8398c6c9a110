"""What is in the Ray cluster for a unit: one keeper, and under it a hand on each of its nodes.

The keeper is detached: it belongs to no process outside the cluster. It takes no resources and sits on the head node,
so that the death of any other node is something it sees, not something it dies of. The placement group and the hands
are its own: Ray ends them with it, and a hand ends its command.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atoll.engines.engine import Standing
from atoll.engines.guarded import GuardedCommand
from atoll.engines.ray_files import last_word, log_name, next_number, write_last_word

LOOK_S = 0.25
KILL_WAIT_S = 30.0
"""Beyond the notice, for a node that answers no more."""
BACKOFF_FIRST_S, BACKOFF_MOST_S, HEALTHY_S = 0.5, 30.0, 120.0
OF_RAY_ITSELF = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_RAYLET_PID")
"""Variables that Ray sets for a process of its own; a command of the user is none."""


@dataclass(frozen=True)
class Kept:
    """What a keeper has to know of its unit."""

    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    nodes: int
    cpus: int
    devices: int
    resources: Mapping[str, float]
    strategy: str
    runtime_env: Mapping[str, Any] | None
    restarts: int
    notice_s: float
    group: str


class Hand:
    """On a node: runs the command once, and again when it is told to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: GuardedCommand | None = None
        self._stop_s: float | None = None

    def where(self) -> tuple[str, int]:
        """The address of this node, and a port that is free there."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]

    def run(self, command: Sequence[str], environment: Mapping[str, str], directory: str, log: str) -> int | str:
        """Its exit code, or why it has none."""
        try:
            with self._lock:
                self._running = GuardedCommand(command, environment_here() | dict(environment), Path(directory), log)
                if self._stop_s is not None:
                    self._running.stop(self._stop_s)
            return self._running.wait()
        except OSError as wrong:
            return str(wrong)

    def stop(self, notice_s: float) -> None:
        with self._lock:
            self._stop_s = notice_s
            if self._running is not None:
                self._running.stop(notice_s)


class Keeper:
    """Keeps one unit going until it ends well, fails for good, or is told to stop; then frees all that it had."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._directory = Path(kept.directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._stopping = threading.Event()
        self._hands: list[Any] = []
        self._group: PlacementGroup | None = None
        before = last_word(self._directory)
        self._starts = int(before.get("starts", 0))
        self._told: dict[str, Any] = {}
        self._tell(Standing.WAITING, "its keeper is there")
        threading.Thread(target=self._live, name="keeper", daemon=True).start()

    def standing(self) -> dict[str, Any]:
        return dict(self._told)

    def stop(self) -> None:
        self._stopping.set()

    # ----------------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            standing, why = self._keep()
        except Exception as wrong:
            standing, why = Standing.FAILED, f"its keeper failed: {type(wrong).__name__}: {_first_line(wrong)}"
        self._free()
        self._tell(standing, why)
        # Only now: whoever finds no keeper reads the last word. Ray does not start an actor again that was killed so.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _keep(self) -> tuple[Standing, str]:
        _remove_groups(self._kept.group)  # of this keeper's life before, if Ray has started it again
        backoff_s = BACKOFF_FIRST_S
        while True:
            if self._starts > self._kept.restarts:
                return Standing.FAILED, f"{self._told['why']}; started {self._starts} times, no restart is left"
            began = time.monotonic()
            went_wrong = self._once()
            if self._stopping.is_set():
                return Standing.STOPPED, went_wrong or "ended with exit code 0 when it was told to stop"
            if not went_wrong:
                return Standing.ENDED, "exit code 0"
            backoff_s = BACKOFF_FIRST_S if time.monotonic() - began > HEALTHY_S else backoff_s
            self._tell(Standing.WAITING, went_wrong)
            self._stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    def _once(self) -> str:
        """One start on all nodes. Empty if it has ended well, otherwise what was wrong with it."""
        places = self._placed()
        if isinstance(places, str):
            return places
        self._starts += 1
        number = next_number(self._directory)
        (address, port), *_ = places
        self._tell(Standing.RUNNING, "on " + ", ".join(place for place, _ in places))
        running = [
            hand.run.remote(
                self._kept.command,
                dict(self._kept.environment) | node_variables(node, self._kept.nodes, address, port),
                self._kept.directory,
                log_name(number, node, self._kept.nodes),
            )
            for node, hand in enumerate(self._hands)
        ]
        return self._watched(running)

    def _placed(self) -> list[tuple[str, int]] | str:
        """Hands on all nodes, and where they are. As long as that takes, it is told what is missing."""
        kept, lost = self._kept, bool(self._starts)
        needs = {"CPU": kept.cpus, "GPU": kept.devices, **kept.resources}
        if self._group is None:
            bundle = {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}
            self._group = placement_group([bundle] * kept.nodes, strategy=kept.strategy, name=kept.group)
        if not self._hands:
            self._hands = [self._hand(node) for node in range(kept.nodes)]
        asked = [hand.where.remote() for hand in self._hands]
        while not self._stopping.is_set():
            answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)
            try:
                for answer in answered:
                    ray.get(answer)
                if len(answered) == len(asked):
                    return list(ray.get(asked))
            except RayError as wrong:
                self._let_go()
                return f"its process on a node could not be started: {_first_line(wrong)}"
            if missing := _missing(self._group, needs, kept.nodes):
                self._tell(Standing.WAITING, f"its node is lost; {missing}" if lost else missing)
        return "it had not begun when it was told to stop"

    def _hand(self, node: int) -> Any:
        kept, group = self._kept, self._group
        assert group is not None
        hand: Any = ray.remote(Hand)
        return hand.options(
            num_cpus=kept.cpus,
            num_gpus=kept.devices,
            resources=dict(kept.resources) or None,
            runtime_env=dict(kept.runtime_env) if kept.runtime_env else None,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
        ).remote()

    def _watched(self, running: list[Any]) -> str:
        """Until all nodes have ended, well or not. If one has failed, or somebody wants it so, all are told to stop."""
        wrong, waiting, deadline = "", list(running), float("inf")
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=LOOK_S)
            for run in ended:
                node = running.index(run)
                wrong = wrong or _what_was_wrong(run, f" of node {node}" if len(running) > 1 else "")
            if (wrong or self._stopping.is_set()) and deadline == float("inf"):
                deadline = time.monotonic() + self._kept.notice_s + KILL_WAIT_S
                for hand in self._hands:
                    hand.stop.remote(self._kept.notice_s)
            if time.monotonic() > deadline:
                wrong = wrong or "a node does not answer"
                break
        if wrong or self._stopping.is_set():
            self._let_go()  # the next start has new ones: of those that are there some may be lost
        return wrong

    def _let_go(self) -> None:
        for hand in self._hands:
            ray.kill(hand)
        self._hands = []

    def _free(self) -> None:
        self._let_go()
        with contextlib.suppress(RayError):
            _remove_groups(self._kept.group)

    def _tell(self, standing: Standing, why: str) -> None:
        told = {"standing": standing.value, "why": why, "starts": self._starts}
        if told != self._told:
            self._told = told
            write_last_word(self._directory, told)


# --------------------------------------------------------------------------------------------------------------------


def environment_here() -> dict[str, str]:
    """Of this process, less what Ray has set for itself and what another run was told. Programs of the environment in
    which Atoll runs come first."""
    own = {name: value for name, value in os.environ.items() if name not in OF_RAY_ITSELF and name[:6] != "ATOLL_"}
    return own | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}


def node_variables(node: int, nodes: int, address: str, port: int) -> dict[str, str]:
    """For a command on several nodes. torchrun reads those that begin with PET_ as if they were its arguments."""
    if nodes == 1:
        return {}
    values = {"NNODES": str(nodes), "NODE_RANK": str(node), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return values | {f"PET_{name}": value for name, value in values.items()}


def _missing(group: PlacementGroup, needs: Mapping[str, float], nodes: int) -> str:
    """What the group waits for; empty if it has its places."""
    found = placement_group_table(group)
    if found.get("state") == "CREATED":
        return ""
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount) or "any resources"
    count = "no node" if nodes == 1 else f"no {nodes} nodes"
    if found.get("stats", {}).get("scheduling_state") == "NO_RESOURCES":
        return f"{count} with {wanted} free yet"
    return f"{count} with {wanted} yet"


def _remove_groups(name: str) -> None:
    for found in placement_group_table().values():
        if found["name"] == name and found["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(found["placement_group_id"])))


def _what_was_wrong(run: Any, of_node: str) -> str:
    try:
        code = ray.get(run, timeout=KILL_WAIT_S)
    except RayError:  # Ray's own words name actors and sockets, and not whether the process or the node was first
        return f"its process{of_node} is lost"
    if isinstance(code, str):
        return code + of_node
    return "" if code == 0 else (f"exit code {code}" if code > 0 else f"ended by signal {-code}") + of_node


def _first_line(wrong: BaseException) -> str:
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return lines[0] if lines else type(wrong).__name__


__all__ = ["Hand", "Keeper", "Kept"]
