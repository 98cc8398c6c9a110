"""The sign of life of a syncer: `alive` in its store, written anew every second, for who waits to take over.

On one machine the lock says whether a syncer is there, and goes away with its process. It does not say that the process
stands still, and between machines that share a directory it may say nothing at all. A standby therefore watches whether
the sign changes. It counts by its own clock: no two machines need to have the same time.

A sign is no permission. Who has waited long enough takes the next epoch, and from then on the store and the learners
refuse whoever has an older one (`store`), whatever that one believes.
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

ALIVE = "alive"
LOCK = "lock"
BEAT_EVERY_S = 1.0
TAKE_OVER_S = 15.0
"""Without a change of the sign. A busy disk may delay one for seconds; taking over from a syncer that lives costs its
open rounds."""

ELSEWHERE_S = 3 * BEAT_EVERY_S
"""How long a start looks at a sign of another machine before it believes that nobody is there."""


class Sign(NamedTuple):
    """`machine`: name and boot of the machine, so that a lock can be believed exactly there."""

    machine: str
    pid: int
    epoch: int
    serial: int

    @property
    def host(self) -> str:
        return self.machine.partition("/")[0]


@cache
def this_machine() -> str:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}"


def write_sign(store: Path, epoch: int, serial: int) -> None:
    """In place and without fsync: a full disk does not stop it, and it need not survive the machine. Opened anew each
    time, so that a network file system hands it on."""
    text = f"{this_machine()} {os.getpid()} {epoch} {serial}"
    file = os.open(store / ALIVE, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, text.ljust(200).encode() + b"\n", 0)
    finally:
        os.close(file)


def read_sign(store: Path) -> Sign | None:
    """None: there is none, or it is half-written."""
    try:
        machine, pid, epoch, serial = (store / ALIVE).read_text(encoding="utf-8", errors="replace").split()
        return Sign(machine, int(pid), int(epoch), int(serial))
    except (OSError, ValueError):
        return None


def remove_sign(store: Path, epoch: int) -> None:
    """At an orderly end. The sign of a successor stays."""
    sign = read_sign(store)
    if sign is not None and sign.epoch == epoch:
        with suppress(OSError):
            (store / ALIVE).unlink(missing_ok=True)


class Turn(NamedTuple):
    """It is time to take over. `by_force`: from one that may still be there, and is fenced."""

    reason: str
    by_force: bool


class Watcher:
    """Of a standby: is it time to take over?"""

    def __init__(self, store: Path, take_over_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._take_over_s = take_over_s
        self._clock = clock
        self._seen: Sign | None = None
        self._since = clock()

    def look(self) -> Turn | None:
        sign, now = read_sign(self._store), self._clock()
        unlocked = not is_locked(self._store / LOCK)
        if sign is not None and sign != self._seen:
            self._seen, self._since = sign, now
        if unlocked and (sign is None or sign.machine == this_machine()):
            return Turn("no syncer is there", False)
        if now - self._since >= self._take_over_s:
            whose = f"the syncer of epoch {self._seen.epoch} on {self._seen.host}" if self._seen else "the syncer"
            return Turn(f"{whose} has shown no sign of life for {self._take_over_s:g} s", True)
        return None


def lives_elsewhere(store: Path) -> Sign | None:
    """The sign of a syncer on another machine, if it changes while we look. A lock says nothing of other machines."""
    first = read_sign(store)
    if first is None or first.machine == this_machine():
        return None
    until = time.monotonic() + ELSEWHERE_S
    while time.monotonic() < until:
        time.sleep(BEAT_EVERY_S / 4)
        sign = read_sign(store)
        if sign is not None and sign != first:
            return sign
    return None
