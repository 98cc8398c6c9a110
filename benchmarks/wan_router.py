"""The router of a wide network on one machine: a process of its own between TUN devices, one per site.

A packet that a site sends passes two links: up its own, then down that of the site it is for. Each direction of a link
has a rate, a delay, a share of packets that it loses, and a queue that drops what comes when it is full. When a packet
leaves a link is computed from when it came, never from when this process got round to it, so that being late now and
then changes neither rates nor the sum of delays; how late it was is counted.

    python benchmarks/wan_router.py        `benchmarks/wan.py` writes its commands to standard input

It runs before all ordinary processes, as a link does that has a machine of its own. Niceness would not do: where the
kernel groups processes by session it counts within a session only, and on a busy machine packets were half a second
late.

It ends when standard input does, that is with its owner, however that ends; its devices go with it, and it removes the
namespaces. It ignores Ctrl-C, which is for the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from atoll.chaos.netns import enter_namespace, run_command

MTU_BYTES = 1500
MIN_QUEUE_PACKETS = 8
MAX_BUFFERED_BYTES = 64 * 2**20
"""On their way in one direction of a link without a rate: nothing else bounds them."""

READ_BATCH_PACKETS = 64
READ_BUFFER_BYTES = 65536

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # in the header of IPv4


class LinkShape(NamedTuple):
    """One direction of a link. A rate of 0 is none: as fast as it goes."""

    rate_bit_s: float
    delay_s: float
    loss: float
    queue_s: float


class LinkDirection:
    """What passes one link in one direction."""

    def __init__(self, seed: str) -> None:
        self.packets = 0  # that went over it, also those that it lost
        self.bytes = 0
        self.dropped = 0  # because its queue was full
        self.lost = 0
        self._draw = Random(seed).random
        self._free_at = 0.0  # it has sent all that it was given
        self._last_due = 0.0
        self._held = 0
        self.set_shape(LinkShape(0.0, 0.0, 0.0, 0.0))

    def set_shape(self, shape: LinkShape) -> None:
        """What is in the queue already leaves at the old rate."""
        self._rate, self._delay_s, self._loss, queue_s = shape
        self._queue_s = max(queue_s, MIN_QUEUE_PACKETS * 8 * MTU_BYTES / self._rate) if self._rate else 0.0
        self._free_at = min(self._free_at, time.monotonic() + self._queue_s)

    def enqueue(self, at: float, size: int) -> float | None:
        """A packet comes to this link. When it arrives at the other end; None: never."""
        leaves_at = at
        if self._rate:
            begins_at = self._free_at if self._free_at > at else at
            if begins_at - at > self._queue_s:
                self.dropped += 1
                return None
            leaves_at = self._free_at = begins_at + 8 * size / self._rate
        elif self._held > MAX_BUFFERED_BYTES:
            self.dropped += 1
            return None
        self.packets += 1
        self.bytes += size
        if self._loss and self._draw() < self._loss:
            self.lost += 1
            return None
        due = leaves_at + self._delay_s
        if due < self._last_due:  # the delay has become shorter: packets do not overtake each other
            due = self._last_due
        self._last_due = due
        self._held += size
        return due

    def dequeue(self, size: int) -> None:
        self._held -= size

    def counts(self) -> dict[str, int]:
        return {"packets": self.packets, "bytes": self.bytes, "dropped": self.dropped, "lost": self.lost}


class Site:
    def __init__(self, number: int, file: int, seed: int) -> None:
        self.number = number
        self.file = file
        self.up = LinkDirection(f"wan/{seed}/{number}/up")
        self.down = LinkDirection(f"wan/{seed}/{number}/down")


class Router:
    """Forwards packets between sites, and executes commands of the owner from standard input."""

    def __init__(self, sites: Mapping[bytes, Site]) -> None:
        self._by_address = dict(sites)
        self._by_file = {site.file: site for site in sites.values()}
        self._by_number = {site.number: site for site in sites.values()}
        self._on_the_way: list[tuple[float, int, bool, Site, Site, bytes]] = []
        self._serial = itertools.count()
        self._input = b""
        self._worst_late_s = 0.0

    def route(self) -> None:
        """Until standard input ends."""
        files = [0, *self._by_file]
        while True:
            wait_s = max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None
            for file in select.select(files, [], [], wait_s)[0]:  # in microseconds; epoll waits in milliseconds
                if file:
                    self._read(self._by_file[file])
                elif not self._read_command():
                    return
            self._forward(time.monotonic())

    def _read(self, site: Site) -> None:
        for _ in range(READ_BATCH_PACKETS):
            try:
                packet = os.read(site.file, READ_BUFFER_BYTES)
            except OSError:  # nothing more is there, or the device is down
                return
            target = self._by_address.get(packet[_DESTINATION]) if packet[0] >> 4 == 4 else None
            if target is None or target is site:
                continue
            due = site.up.enqueue(time.monotonic(), len(packet))
            if due is not None:
                heapq.heappush(self._on_the_way, (due, next(self._serial), True, site, target, packet))

    def _forward(self, now: float) -> None:
        on_the_way = self._on_the_way
        while on_the_way and on_the_way[0][0] <= now:
            due, _, is_up, source, target, packet = heapq.heappop(on_the_way)
            if is_up:
                source.up.dequeue(len(packet))
                arrives = target.down.enqueue(due, len(packet))
                if arrives is not None:
                    heapq.heappush(on_the_way, (arrives, next(self._serial), False, source, target, packet))
                continue
            target.down.dequeue(len(packet))
            if now - due > self._worst_late_s:
                self._worst_late_s = now - due
            with contextlib.suppress(OSError):  # the device is down
                os.write(target.file, packet)

    # ------------------------------------------------------------------------------------------ commands of the owner

    def _read_command(self) -> bool:
        data = os.read(0, READ_BUFFER_BYTES)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._execute(json.loads(line))
        return bool(data)

    def _execute(self, command: dict[str, Any]) -> None:
        if "shape" in command:
            site = self._by_number[command["shape"]]
            site.up.set_shape(LinkShape(*command["up"]))
            site.down.set_shape(LinkShape(*command["down"]))
            _reply({})
            return
        links = {n: {"up": site.up.counts(), "down": site.down.counts()} for n, site in self._by_number.items()}
        _reply({"late_s": self._worst_late_s, "sites": links})
        self._worst_late_s = 0.0


def _reply(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def open_tun(device: str) -> int:
    """A device in the namespace that this thread is in, for as long as the file is open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):  # one by one: what follows is for the router
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    setup = json.loads(line)
    home = Path(f"/proc/{os.getpid()}/ns/net")
    with open(home, "rb") as at_home:
        sites = {}
        for number, (namespace, device, address) in enumerate(setup["sites"]):
            if namespace is not None:
                enter_namespace(Path(namespace))
            sites[socket.inet_aton(address)] = Site(number, open_tun(device), setup["seed"])
            enter_namespace(Path(f"/proc/self/fd/{at_home.fileno()}"))
    with contextlib.suppress(OSError):  # not allowed: then it is late more often, and says so
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here refers to itself, and a collection makes packets late
    _reply({"ready": os.getpid()})
    try:
        Router(sites).route()
    finally:
        for namespace, _, _ in setup["sites"]:
            if namespace is not None:
                with contextlib.suppress(Exception):  # the owner has done it
                    run_command("ip", "netns", "del", Path(namespace).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
