"""Links in the kernel: a network namespace per learner, joined to this machine's by a pair of virtual interfaces.

Needs root, `ip` and `tc`. A cut is a queue that swallows everything (`blackhole`), a thin link a token bucket (`tbf`),
a late one `netem`, which not every kernel has. Addresses are of 198.18.0.0/15, which is set aside for measurements of
networks and leads nowhere else; a namespace has no other route, so nothing of a run can leave this machine.

What is left by a tool that was killed is found by its name, which holds the process that made it, and swept away by the
next one.
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
    """A command of the system said no."""


def run_command(*words: str) -> str:
    """One command, without a shell. Raises with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise NetnsError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def command_succeeds(*words: str) -> bool:
    """Run one command; return whether it succeeded."""
    try:
        run_command(*words)
    except (NetnsError, OSError, subprocess.TimeoutExpired):
        return False
    return True


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine has no namespaces for us; None where it has. Tries it once, and cleans up."""
    if os.geteuid() != 0:
        return "not root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no command {command}"
    remove_stale()
    try:
        with closing(Namespaces()) as tried:
            tried.add(1)
            tried.throttle(1, 1e6)
            tried.cut(1, "both")
    except (NetnsError, OSError, subprocess.TimeoutExpired) as wrong:
        return str(wrong).rpartition(": ")[2]
    return None


class Namespaces:
    """The links of one run. `address` is where the syncer listens; every namespace has a route to it and no other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._links: dict[int, str] = {}  # learner: name of the namespace
        self._is_closed = False
        self.has_netem = False
        self._net, self.address = self._take_address()

    def _take_address(self) -> tuple[int, str]:
        """One that no other run on this machine has."""
        for tries in range(ADDRESS_TRIES):
            net = secrets.randbelow(250) + 2
            address = f"198.18.{net}.1"
            try:
                run_command("ip", "addr", "add", f"{address}/32", "dev", "lo", "label", f"lo:at{self._owner:06x}")
            except NetnsError as wrong:
                if "File exists" not in str(wrong) or tries + 1 == ADDRESS_TRIES:
                    raise
                continue
            return net, address
        raise AssertionError("the last try returns or raises")

    def add(self, learner: int) -> Path:
        """A namespace for this learner: the file by which a process enters it."""
        if len(self._links) >= MAX_LINKS:
            raise NetnsError(f"{MAX_LINKS} links are as many as there are; use --links relay")
        index = len(self._links) + 1
        name = f"atoll-{self._owner}-{learner}"
        here, there = self._ends(learner)
        ours, theirs = (f"198.18.{self._net}.{4 * index + n}" for n in (1, 2))
        run_command("ip", "netns", "add", name)
        self._links[learner] = name
        run_command("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run_command("ip", "addr", "add", f"{ours}/30", "dev", here)
        run_command("ip", "link", "set", here, "up")
        run_command("ip", "-n", name, "addr", "add", f"{theirs}/30", "dev", there)
        run_command("ip", "-n", name, "link", "set", "lo", "up")
        run_command("ip", "-n", name, "link", "set", there, "up")
        run_command("ip", "-n", name, "route", "add", f"{self.address}/32", "via", ours)
        if index == 1:
            self.has_netem = command_succeeds("tc", "qdisc", "replace", "dev", here, "root", "netem", "delay", "1ms")
            self.restore(learner)
        return _FOLDER / name

    def _ends(self, learner: int) -> tuple[str, str]:
        """Names of interfaces have at most 15 letters."""
        return f"at{self._owner:06x}h{learner}", f"at{self._owner:06x}n{learner}"

    # ------------------------------------------------------------------------------------------ faults

    def cut(self, learner: int, direction: str) -> None:
        self._shape(learner, direction, "blackhole")

    def throttle(self, learner: int, bytes_per_s: float) -> None:
        burst = max(2000, round(bytes_per_s / 20))
        rate = ("tbf", "rate", f"{round(8 * bytes_per_s)}bit", "burst", str(burst), "latency", "400ms")
        self._shape(learner, "both", *rate)

    def delay(self, learner: int, delay_s: float) -> None:
        self._shape(learner, "both", "netem", "delay", f"{round(1e6 * delay_s)}us")

    def restore(self, learner: int) -> None:
        """As it was: without a queue of ours. Whoever heals a link that is whole does no harm."""
        here, there = self._ends(learner)
        command_succeeds("tc", "qdisc", "del", "dev", here, "root")
        command_succeeds("tc", "-n", self._links[learner], "qdisc", "del", "dev", there, "root")

    def _shape(self, learner: int, direction: str, *what: str) -> None:
        """What leaves the namespace goes up, what leaves this side goes down."""
        here, there = self._ends(learner)
        if direction in ("both", "up"):
            run_command("tc", "-n", self._links[learner], "qdisc", "replace", "dev", there, "root", *what)
        if direction in ("both", "down"):
            run_command("tc", "qdisc", "replace", "dev", here, "root", *what)

    def shape(self, learner: int) -> tuple[str, str]:
        """The queues of a link as the kernel tells them: up and down."""
        here, there = self._ends(learner)
        up = run_command("tc", "-n", self._links[learner], "qdisc", "show", "dev", there, "root")
        down = run_command("tc", "qdisc", "show", "dev", here, "root")
        return up.strip(), down.strip()

    # ------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Everything goes: with an interface its peer and its queues. Closing twice is no mistake."""
        if self._is_closed:
            return
        self._is_closed = True
        for learner, name in self._links.items():
            command_succeeds("ip", "link", "del", self._ends(learner)[0])
            command_succeeds("ip", "netns", "del", name)
        self._links.clear()
        command_succeeds("ip", "addr", "del", f"{self.address}/32", "dev", "lo")


def enter_namespace(namespace: Path) -> None:
    """This thread, and all that it starts from now on, is in the namespace."""
    with open(namespace, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))


def list_namespaces() -> list[str]:
    """Namespaces of runs of this tool, of whichever process."""
    try:
        return sorted(name for name in os.listdir(_FOLDER) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def remove_stale() -> list[str]:
    """Remove what was left by processes that are gone. What it removed."""
    swept = []
    for name in list_namespaces():
        found = _NAME.fullmatch(name)
        assert found is not None
        if not Path(f"/proc/{found[1]}").exists():
            command_succeeds("ip", "link", "del", f"at{int(found[1]):06x}h{found[2]}")
            command_succeeds("ip", "netns", "del", name)
            swept.append(name)
    for owner, address in list_addresses():
        if not Path(f"/proc/{owner}").exists():
            command_succeeds("ip", "addr", "del", address, "dev", "lo")
            swept.append(address)
    return swept


def list_addresses() -> list[tuple[int, str]]:
    """Addresses of runs of this tool on the loopback interface: the process that made each, and the address."""
    found = []
    for line in run_command("ip", "-o", "-4", "addr", "show", "dev", "lo").splitlines():
        label = _LABEL.search(line)
        address = _ADDRESS.search(line)
        if label is not None and address is not None:
            found.append((int(label[1], 16), address[1]))
    return found
