"""Links in the kernel: one network namespace per learner, connected by a pair of virtual interfaces.

Needs root, `ip` and `tc`. A cut uses the queueing discipline `blackhole`, which drops everything, a slow link the token
bucket `tbf`, and a delay `netem`, which not every kernel has. Addresses are from 198.18.0.0/15, which is reserved for
network benchmarks and not routed. A namespace has no other route, so no packet of a run leaves this machine.

Names contain the pid of the process that created them. If that process was killed, the next run finds its namespaces
and addresses by these names, and removes them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import secrets
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

COMMAND_TIMEOUT_S = 20.0
MAX_LINKS = 60
ADDRESS_TRIES = 20

_NAME = re.compile(r"atoll-(\d+)-(\d+)")
_LABEL = re.compile(r"\blo:at([0-9a-f]{6})\b")
_ADDRESS = re.compile(r"\binet (198\.18\.\d+\.\d+/32)\b")
_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")


class NetnsError(RuntimeError):
    """A system command failed."""


def run_command(*arguments: str) -> str:
    """Run one command without a shell and return its output. The error contains its stderr."""
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if result.returncode:
        raise NetnsError(f"{' '.join(arguments)}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return result.stdout


def command_succeeds(*arguments: str) -> bool:
    """Run one command. Return whether it succeeded."""
    try:
        run_command(*arguments)
    except (NetnsError, OSError, subprocess.TimeoutExpired):
        return False
    return True


@functools.cache
def unavailable_reason() -> str | None:
    """Return why network namespaces are not available here, or None if they are. This creates one and removes it."""
    if os.geteuid() != 0:
        return "not root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command} is missing"
    remove_stale()
    try:
        with closing(Namespaces()) as trial:
            trial.add(1)
            trial.throttle(1, 1e6)
            trial.cut(1, "both")
    except (NetnsError, OSError, subprocess.TimeoutExpired) as error:
        return str(error).rpartition(": ")[2]
    return None


class Namespaces:
    """The links of one run. The syncer listens on `address`; every namespace has a route to it and no other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._links: dict[int, str] = {}  # learner: name of the namespace
        self._is_closed = False
        self.has_netem = False
        self._net, self.address = self._take_address()

    def _take_address(self) -> tuple[int, str]:
        """Add an address to the loopback interface that no other run on this machine uses."""
        for tries in range(ADDRESS_TRIES):
            net = secrets.randbelow(250) + 2
            address = f"198.18.{net}.1"
            try:
                run_command("ip", "addr", "add", f"{address}/32", "dev", "lo", "label", f"lo:at{self._owner:06x}")
            except NetnsError as error:
                if "File exists" not in str(error) or tries + 1 == ADDRESS_TRIES:
                    raise
                continue
            return net, address
        raise AssertionError("the last try returns or raises")

    def add(self, learner: int) -> Path:
        """Create a namespace for this learner. Return its file, the argument of `enter_namespace`."""
        if len(self._links) >= MAX_LINKS:
            raise NetnsError(f"more than {MAX_LINKS} links with network namespaces; use --links relay")
        index = len(self._links) + 1
        name = f"atoll-{self._owner}-{learner}"
        outer, inner = self._interfaces(learner)
        outer_address, inner_address = (f"198.18.{self._net}.{4 * index + n}" for n in (1, 2))
        run_command("ip", "netns", "add", name)
        self._links[learner] = name
        run_command("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        run_command("ip", "addr", "add", f"{outer_address}/30", "dev", outer)
        run_command("ip", "link", "set", outer, "up")
        run_command("ip", "-n", name, "addr", "add", f"{inner_address}/30", "dev", inner)
        run_command("ip", "-n", name, "link", "set", "lo", "up")
        run_command("ip", "-n", name, "link", "set", inner, "up")
        run_command("ip", "-n", name, "route", "add", f"{self.address}/32", "via", outer_address)
        if index == 1:
            self.has_netem = command_succeeds("tc", "qdisc", "replace", "dev", outer, "root", "netem", "delay", "1ms")
            self.restore(learner)
        return _FOLDER / name

    def _interfaces(self, learner: int) -> tuple[str, str]:
        """Return the interface names outside and inside the namespace: at most 15 characters each."""
        return f"at{self._owner:06x}h{learner}", f"at{self._owner:06x}n{learner}"

    # ------------------------------------------------------------------------------------------ faults

    def cut(self, learner: int, direction: str) -> None:
        self._set_queue(learner, direction, "blackhole")

    def throttle(self, learner: int, bytes_per_s: float) -> None:
        burst = max(2000, round(bytes_per_s / 20))
        rate = ("tbf", "rate", f"{round(8 * bytes_per_s)}bit", "burst", str(burst), "latency", "400ms")
        self._set_queue(learner, "both", *rate)

    def delay(self, learner: int, delay_s: float) -> None:
        self._set_queue(learner, "both", "netem", "delay", f"{round(1e6 * delay_s)}us")

    def restore(self, learner: int) -> None:
        """Remove the fault of a link. Has no effect on a link without a fault."""
        outer, inner = self._interfaces(learner)
        command_succeeds("tc", "qdisc", "del", "dev", outer, "root")
        command_succeeds("tc", "-n", self._links[learner], "qdisc", "del", "dev", inner, "root")

    def _set_queue(self, learner: int, direction: str, *queue: str) -> None:
        """Replace the queue of the inner interface for "up", of the outer one for "down"."""
        outer, inner = self._interfaces(learner)
        if direction in ("both", "up"):
            run_command("tc", "-n", self._links[learner], "qdisc", "replace", "dev", inner, "root", *queue)
        if direction in ("both", "down"):
            run_command("tc", "qdisc", "replace", "dev", outer, "root", *queue)

    def queues(self, learner: int) -> tuple[str, str]:
        """Return the queues of a link, up and down, as `tc` prints them."""
        outer, inner = self._interfaces(learner)
        up = run_command("tc", "-n", self._links[learner], "qdisc", "show", "dev", inner, "root")
        down = run_command("tc", "qdisc", "show", "dev", outer, "root")
        return up.strip(), down.strip()

    # ------------------------------------------------------------------------------------------ cleanup

    def close(self) -> None:
        """Remove all namespaces, interfaces and the address. May be called twice.

        Deleting an interface deletes its peer and its queues.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for learner, name in self._links.items():
            command_succeeds("ip", "link", "del", self._interfaces(learner)[0])
            command_succeeds("ip", "netns", "del", name)
        self._links.clear()
        command_succeeds("ip", "addr", "del", f"{self.address}/32", "dev", "lo")


def enter_namespace(namespace: Path) -> None:
    """Move this thread, and the processes and threads that it starts later, into the namespace."""
    with open(namespace, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))


def list_namespaces() -> list[str]:
    """Return the names of the namespaces of all runs of `atoll chaos` on this machine."""
    try:
        return sorted(name for name in os.listdir(_FOLDER) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def remove_stale() -> list[str]:
    """Remove the namespaces and addresses of processes that have exited, and return them."""
    removed = []
    for name in list_namespaces():
        found = _NAME.fullmatch(name)
        assert found is not None
        if not Path(f"/proc/{found[1]}").exists():
            command_succeeds("ip", "link", "del", f"at{int(found[1]):06x}h{found[2]}")
            command_succeeds("ip", "netns", "del", name)
            removed.append(name)
    for owner, address in list_addresses():
        if not Path(f"/proc/{owner}").exists():
            command_succeeds("ip", "addr", "del", address, "dev", "lo")
            removed.append(address)
    return removed


def list_addresses() -> list[tuple[int, str]]:
    """Return the loopback addresses of all runs of `atoll chaos`: pid of the owner, and the address."""
    found = []
    for line in run_command("ip", "-o", "-4", "addr", "show", "dev", "lo").splitlines():
        label = _LABEL.search(line)
        address = _ADDRESS.search(line)
        if label is not None and address is not None:
            found.append((int(label[1], 16), address[1]))
    return found
