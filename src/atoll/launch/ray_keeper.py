"""What is in the Ray cluster for a unit: one keeper, and under it a hand on each of its nodes.

The keeper is detached: it belongs to no process outside the cluster. It takes no resources and sits on the head node,
so that the death of any other node is something it sees, not something it dies of. The placement group and the hands
are its own: Ray ends them with it, and a hand ends its command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atoll.launch.engine import Standing
from atoll.launch.guarded import GuardedCommand
from atoll.launch.ray_files import last_word, log_name, next_number, write_last_word
from atoll.launch.supervisor import LEFT_EARLY, Backoff, has_ended

LOOK_S = 0.25
LOOK_AT_RUN_S = 2.0
"""At files that may be on a disk far away."""
FULL_DISK_S = 900.0
"""For the last word to be written: those who ask meanwhile are told."""
OVER = "the run is over: its syncer has ended"
KILL_WAIT_S = 30.0
"""Beyond the notice, for a node that answers no more."""
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.5, 30.0
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
    syncer: str | None
    """Directory of the run's syncer; None for the syncer itself."""
    ends_with_syncer: bool

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class How(NamedTuple):
    """How one start has ended."""

    wrong: str = ""
    """Empty: well."""
    is_failure: bool = False
    """Of the command. A node that is lost is none: it says nothing about what ran there."""


class Hand:
    """On a node: runs the command once, and again when it is told to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: GuardedCommand | None = None
        self._stop_s: float | None = None

    def where(self) -> tuple[str, int]:
        """The address of this node, and a port that is free there."""
        address: str = ray.util.get_node_ip_address()
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
        self._starts, self._failures = int(before.get("starts", 0)), int(before.get("failures", 0))
        self._looked_at_run_s = 0.0
        self._told: dict[str, Any] = {}
        self._is_written = False
        self._tell(Standing.WAITING, "its keeper is there")
        threading.Thread(target=self._live, name="keeper", daemon=True).start()

    def standing(self) -> dict[str, Any]:
        return dict(self._told)

    def keeps(self) -> dict[str, Any]:
        """For those who would start the same: whether this is it, and whether it stays."""
        digest, is_stopping = self._kept.digest(), self._stopping.is_set()
        return {"digest": digest, "is_stopping": is_stopping, "standing": self._told["standing"]}

    def stop(self) -> None:
        self._stopping.set()

    # ----------------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            standing, why = self._keep()
        except Exception as wrong:
            standing, why = Standing.FAILED, f"its keeper failed: {type(wrong).__name__}: {_first_line(wrong)}"
        self._free()
        deadline = time.monotonic() + FULL_DISK_S
        while not self._tell(standing, why) and time.monotonic() < deadline:
            time.sleep(LOOK_AT_RUN_S)
        # Only now: whoever finds no keeper reads the last word. Ray does not start an actor again that was killed so.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _keep(self) -> tuple[Standing, str]:
        _remove_groups(self._kept.group)  # of this keeper's life before, if Ray has started it again
        backoff, restarts, how = Backoff(BACKOFF_FIRST_S, BACKOFF_MOST_S), self._kept.restarts, How()
        while True:
            if self._is_over():  # nobody would let it in
                return Standing.STOPPED, f"{OVER} ({how.wrong})" if how.wrong else OVER
            if self._failures > restarts:
                return Standing.FAILED, f"{how.wrong}, and of {restarts} restarts none is left"
            began = time.monotonic()
            how = self._once()
            if self._stopping.is_set():
                return Standing.STOPPED, how.wrong or "ended with exit code 0 when it was told to stop"
            if not how.wrong and self._kept.ends_with_syncer and not self._is_over():
                how = How(LEFT_EARLY, is_failure=True)
            if not how.wrong:
                return Standing.ENDED, "exit code 0"
            self._failures += how.is_failure
            ran_s = time.monotonic() - began
            self._tell(Standing.WAITING, how.wrong)
            self._stopping.wait(backoff.failed(ran_s))

    def _is_over(self, seldom: bool = False) -> bool:
        """Whether the run is, as far as this node can see. `seldom`: asked again and again, it looks now and then."""
        now_s = time.monotonic()
        if self._kept.syncer is None or (seldom and now_s - self._looked_at_run_s < LOOK_AT_RUN_S):
            return False
        self._looked_at_run_s = now_s
        return has_ended(Path(self._kept.syncer))

    def _once(self) -> How:
        """One start on all nodes."""
        places = self._placed()
        if isinstance(places, str):
            return How(places)
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
            if self._is_over(seldom=True):
                return "it waited for its place"
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

    def _watched(self, running: list[Any]) -> How:
        """Until all nodes have ended, well or not. If one has failed, or somebody wants it so, all are told to stop."""
        wrong: list[How] = []
        waiting, leaves, deadline = list(running), False, float("inf")
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=LOOK_S)
            for run in ended:
                how = _how_it_ended(run, f" of node {running.index(run)}" if len(running) > 1 else "")
                wrong += [how] if how.wrong else []
            leaves = leaves or bool(wrong) or self._stopping.is_set()
            leaves = leaves or (self._kept.ends_with_syncer and self._is_over(seldom=True))
            if leaves and deadline == float("inf"):
                deadline = time.monotonic() + self._kept.notice_s + KILL_WAIT_S
                for hand in self._hands:
                    hand.stop.remote(self._kept.notice_s)
            if time.monotonic() > deadline:
                wrong.append(How("a node does not answer"))
                break
        if leaves:
            self._let_go()  # the next start has new ones: of those that are there some may be lost
        # A command that misses the other node may fail before Ray has seen that the node is lost.
        return min(wrong, key=lambda how: how.is_failure, default=How())

    def _let_go(self) -> None:
        for hand in self._hands:
            ray.kill(hand)
        self._hands = []

    def _free(self) -> None:
        self._let_go()
        with contextlib.suppress(RayError):
            _remove_groups(self._kept.group)

    def _tell(self, standing: Standing, why: str) -> bool:
        """False: it is not written down. A full disk does not take the unit along."""
        told = {"standing": standing.value, "why": why, "starts": self._starts, "failures": self._failures}
        if told != self._told or not self._is_written:
            self._told = told
            try:
                write_last_word(self._directory, told)
                self._is_written = True
            except OSError:
                self._is_written = False
        return self._is_written


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


def _how_it_ended(run: Any, of_node: str) -> How:
    try:
        code = ray.get(run, timeout=KILL_WAIT_S)
    except RayError:  # Ray's own words name actors and sockets, and not whether the process or the node was first
        return How(f"its process{of_node} is lost")
    if code == 0:
        return How()
    words = code if isinstance(code, str) else f"exit code {code}" if code > 0 else f"ended by signal {-code}"
    return How(words + of_node, is_failure=True)


def _first_line(wrong: BaseException) -> str:
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return lines[0] if lines else type(wrong).__name__


__all__ = ["Hand", "Keeper", "Kept"]
