"""The heartbeat of a syncer: the file `alive` in its store, rewritten every second, which a standby watches.

On one machine the lock shows whether a syncer runs, and is released when its process exits. It does not show that the
process hangs, and between machines that share a directory it may not work. A standby therefore watches whether the
heartbeat changes. It measures the time with its own clock, so clocks of machines may differ.

A heartbeat gives no write permission. After its timeout a standby takes the next epoch. From then on the store and the
learners refuse every syncer with an older epoch (`version_store`).
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
"""Time without a change of the heartbeat. A busy disk may delay a heartbeat by seconds. Taking over from a running
syncer costs its open rounds."""

REMOTE_HEARTBEAT_WAIT_S = 3 * HEARTBEAT_INTERVAL_S
"""Time for which a start watches the heartbeat of another machine before it assumes that this syncer has exited."""


class Heartbeat(NamedTuple):
    """Content of the heartbeat file. `machine` is the host name and boot id: locks are reliable within one machine."""

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
    """Write the heartbeat in place and without fsync: this works on a full disk, and it need not be durable.

    Open the file each time, so that a network file system propagates it.
    """
    text = f"{machine_id()} {os.getpid()} {epoch} {serial}"
    file = os.open(store / HEARTBEAT_FILE, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, text.ljust(200).encode() + b"\n", 0)
    finally:
        os.close(file)


def read_heartbeat(store: Path) -> Heartbeat | None:
    """Return the heartbeat; None if there is none or it is partly written."""
    try:
        machine, pid, epoch, serial = (store / HEARTBEAT_FILE).read_text(encoding="utf-8", errors="replace").split()
        return Heartbeat(machine, int(pid), int(epoch), int(serial))
    except (OSError, ValueError):
        return None


def remove_heartbeat(store: Path, epoch: int) -> None:
    """Remove the heartbeat of this epoch at a normal exit. Do not remove that of a successor."""
    heartbeat = read_heartbeat(store)
    if heartbeat is not None and heartbeat.epoch == epoch:
        with suppress(OSError):
            (store / HEARTBEAT_FILE).unlink(missing_ok=True)


class TakeoverDecision(NamedTuple):
    """Decision to take over. `is_forced`: the other syncer may still run, and must be fenced."""

    reason: str
    is_forced: bool


class HeartbeatWatcher:
    """Watch the heartbeat of the active syncer, and decide when the standby takes over."""

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
            return TakeoverDecision(f"{whose} has sent no heartbeat for {self._takeover_timeout_s:g} s", True)
        return None


def find_remote_syncer(store: Path) -> Heartbeat | None:
    """Return the heartbeat of a running syncer on another machine, for which the lock may not work; else None."""
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
