"""The heartbeat of a syncer: `alive` in its store, written anew every second, for a standby that waits to take over.

On one machine the lock says whether a syncer is there, and goes away with its process. It does not say that the process
hangs, and between machines that share a directory it may say nothing at all. A standby therefore watches whether the
heartbeat changes. It counts by its own clock: no two machines need to have the same time.

A heartbeat is no permission. A standby that has waited long enough takes the next epoch, and from then on the store and
the learners refuse every syncer with an older one (`version_store`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from atoll.files import is_locked

HEARTBEAT_FILE = "alive"
LOCK_FILE = "lock"
HEARTBEAT_INTERVAL_S = 1.0
TAKEOVER_TIMEOUT_S = 15.0
"""Without a change of the heartbeat. A busy disk may delay one for seconds; taking over from a syncer that lives costs
its open rounds."""

REMOTE_HEARTBEAT_WAIT_S = 3 * HEARTBEAT_INTERVAL_S
"""How long a start watches the heartbeat of another machine before it takes that syncer for gone."""


class Heartbeat(NamedTuple):
    """`machine`: name and boot of the machine, so that a lock can be believed exactly there."""

    machine: str
    pid: int
    epoch: int
    serial: int

    @property
    def host(self) -> str:
        return self.machine.partition("/")[0]


@cache
def machine_id() -> str:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}"


def write_heartbeat(store: Path, epoch: int, serial: int) -> None:
    """In place and without fsync: a full disk does not stop it, and it need not survive the machine. Opened anew each
    time, so that a network file system hands it on."""
    text = f"{machine_id()} {os.getpid()} {epoch} {serial}"
    file = os.open(store / HEARTBEAT_FILE, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, text.ljust(200).encode() + b"\n", 0)
    finally:
        os.close(file)


def read_heartbeat(store: Path) -> Heartbeat | None:
    """Return None where there is none, or it is half-written."""
    try:
        machine, pid, epoch, serial = (store / HEARTBEAT_FILE).read_text(encoding="utf-8", errors="replace").split()
        return Heartbeat(machine, int(pid), int(epoch), int(serial))
    except (OSError, ValueError):
        return None


def remove_heartbeat(store: Path, epoch: int) -> None:
    """Remove our own at an orderly end. That of a successor stays."""
    heartbeat = read_heartbeat(store)
    if heartbeat is not None and heartbeat.epoch == epoch:
        with suppress(OSError):
            (store / HEARTBEAT_FILE).unlink(missing_ok=True)


class TakeoverDecision(NamedTuple):
    """It is time to take over. `is_forced`: from a syncer that may still run, and is fenced."""

    reason: str
    is_forced: bool


class HeartbeatWatcher:
    """Decides for a standby when it takes over."""

    def __init__(self, store: Path, takeover_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._takeover_timeout_s = takeover_timeout_s
        self._clock = clock
        self._last_heartbeat: Heartbeat | None = None
        self._last_change_at = clock()

    def poll(self) -> TakeoverDecision | None:
        heartbeat, now = read_heartbeat(self._store), self._clock()
        unlocked = not is_locked(self._store / LOCK_FILE)
        if heartbeat is not None and heartbeat != self._last_heartbeat:
            self._last_heartbeat, self._last_change_at = heartbeat, now
        if unlocked and (heartbeat is None or heartbeat.machine == machine_id()):
            return TakeoverDecision("no syncer is there", False)
        if now - self._last_change_at >= self._takeover_timeout_s:
            whose = (
                f"the syncer of epoch {self._last_heartbeat.epoch} on {self._last_heartbeat.host}"
                if self._last_heartbeat
                else "the syncer"
            )
            return TakeoverDecision(f"{whose} has shown no sign of life for {self._takeover_timeout_s:g} s", True)
        return None


def find_remote_syncer(store: Path) -> Heartbeat | None:
    """Return the heartbeat of a syncer on another machine, if it changes now. A lock says nothing of other machines."""
    first = read_heartbeat(store)
    if first is None or first.machine == machine_id():
        return None
    until = time.monotonic() + REMOTE_HEARTBEAT_WAIT_S
    while time.monotonic() < until:
        time.sleep(HEARTBEAT_INTERVAL_S / 4)
        heartbeat = read_heartbeat(store)
        if heartbeat is not None and heartbeat != first:
            return heartbeat
    return None
