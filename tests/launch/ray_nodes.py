"""A real Ray cluster on this machine: each node has a raylet of its own, and dies like one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

LIMIT_S = 300.0
"""Of everything that is waited for. Here it takes seconds; a machine with other things to do needs longer."""
SEEN_DEAD_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}
OBJECTS_BYTES = 80 * 2**20  # the least that Ray takes

T = TypeVar("T")


class Nodes:
    """A head without processors, and nodes with one each."""

    def __init__(self, temporary: Path) -> None:
        from ray.cluster_utils import Cluster

        self.temporary = temporary
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": OBJECTS_BYTES,
                "_system_config": SEEN_DEAD_SOON,
            },
        )
        self.address: str = self._cluster.address

    def add(self, **resources: float) -> Any:
        return self._cluster.add_node(num_cpus=1, resources=resources, object_store_memory=OBJECTS_BYTES, wait=False)

    def kill(self, node: Any) -> None:
        """As a host that loses its power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def wait(self) -> None:
        self._cluster.wait_for_nodes(LIMIT_S)

    def end(self) -> None:
        self._cluster.shutdown()


@contextmanager
def nowhere() -> Iterator[Path]:
    """A machine without a cluster, as far as Ray can see: others may have one at the same time."""
    temporary = Path(tempfile.mkdtemp(prefix="atoll-ray-", dir="/tmp"))  # paths of sockets have to be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(temporary))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", str(int(LIMIT_S)))
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            yield temporary
        finally:
            end_everything_of(temporary)
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def nodes_of_their_own() -> Iterator[Nodes]:
    before = signal.getsignal(signal.SIGTERM)
    with nowhere() as temporary:
        nodes = Nodes(temporary)
        try:
            yield nodes
        finally:
            nodes.end()
            signal.signal(signal.SIGTERM, before)  # a node takes SIGTERM for itself, for as long as its process lives


def end_everything_of(temporary: Path) -> None:
    """Processes of a cluster have its directory in their environment."""
    mark = f"RAY_TMPDIR={temporary}"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = (folder / "environ").read_text(errors="replace").split("\0")
            if mark in environ and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def until(look: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """Poll until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        threading.Event().wait(0.1)
    return seen


def lives(pid: int) -> bool:
    with suppress(OSError):
        return not re.search(r"\) Z", Path(f"/proc/{pid}/stat").read_text())
    return False


__all__ = ["LIMIT_S", "Nodes", "lives", "nodes_of_their_own", "nowhere", "until"]
