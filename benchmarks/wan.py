"""A wide network on one machine: sites that are far from each other, with links of a rate, a delay and losses.

Needs root, `ip` and /dev/net/tun, and nothing else of the kernel: no netem. A site is a network namespace whose only
way out is a TUN device; a router in user space (`wan_router`) joins the devices. All IPv4 traffic passes, so real
TCP of real programs, with its own windows, losses and congestion control, feels the links. Site 0 is this machine's own
namespace: there the syncer listens.

    with Wan(4, link=Link(up_bit_s=25e6, down_bit_s=25e6, delay_s=0.01)) as wan:
        ...                      a process that has called `enter(wan.namespace(1))` is at site 1, as `wan.address(1)`
        wan.set_link(1, Link())  and from now on its link is as fast as it goes
        wan.traffic()[1].up.bytes

A packet passes the links of both sites: between sites whose links have 10 ms each it takes 20 ms, and 40 ms there and
back. Addresses are of 198.19.0.0/16, set aside for measurements of networks; there is no other route, so nothing of a
run can leave this machine.

The router ends with its owner, however that ends, and takes devices and namespaces along. What is left where both were
killed is swept away by the next one (`netns.sweep`): names hold the process that made them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from atoll.chaos import netns
from atoll.chaos.netns import NetnsError
from atoll.chaos.netns import run_command as run_command
from benchmarks.wan_router import MTU_BYTES

MAX_SITES = 60
REPLY_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 10.0
DEFAULT_QUEUE_S = 0.1
DEVICE = "wan"
"""In every namespace but our own."""

_FIRST_NAME = 1000  # namespaces of learners (`netns`) are named from 1 on
_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Link:
    """Of one site, to all others. None: as fast as it goes."""

    up_bit_s: float | None = None  # what the site sends; bits of IP packets, with all headers
    down_bit_s: float | None = None
    delay_s: float = 0.0  # one way, the same in both
    loss: float = 0.0  # share of packets, in each direction
    queue_s: float = DEFAULT_QUEUE_S  # that a queue holds; at least 8 packets

    def __post_init__(self) -> None:
        for name in ("up_bit_s", "down_bit_s"):
            rate = getattr(self, name)
            if rate is not None and not 1e3 <= rate < float("inf"):
                raise ValueError(f"{name} is {rate}; give bits per second from 1000 on, or None for no limit")
        for name in ("delay_s", "queue_s"):
            if not 0.0 <= getattr(self, name) <= 60.0:
                raise ValueError(f"{name} is {getattr(self, name)}; give seconds from 0 to 60")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss is {self.loss}; give a share of packets, 0 or more and below 1")


def symmetric_link(rate_bit_s: float | None, delay_s: float = 0.0, loss: float = 0.0) -> Link:
    """The same in both directions."""
    return Link(rate_bit_s, rate_bit_s, delay_s, loss)


class LinkTraffic(NamedTuple):
    """In one direction of a link, since it is there."""

    packets: int  # that went over it, also those that it lost
    bytes: int  # of them
    dropped: int  # because the queue was full
    lost: int


class SiteTraffic(NamedTuple):
    """Of one site's link."""

    up: LinkTraffic
    down: LinkTraffic


class Wan:
    """`sites` of them, numbered from 1; 0 is this namespace, with a link of its own (`home`)."""

    def __init__(self, sites: int, link: Link | None = None, home: Link | None = None, seed: int = 0) -> None:
        if not 1 <= sites <= MAX_SITES:
            raise ValueError(f"{sites} sites; give 1 to {MAX_SITES}")
        self.sites = sites
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._router: subprocess.Popen[str] | None = None
        self.late_s = 0.0  # the worst that the router was, when counts were last asked for
        self._cleanup = ExitStack()
        try:
            self._net = self._allocate_network()
            self._make(seed)
            self.set_link(0, home if home is not None else Link())
            for site in range(1, sites + 1):
                self.set_link(site, link if link is not None else Link())
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Wan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Router, devices and namespaces go. Closing twice is no mistake."""
        self._cleanup.close()

    # ------------------------------------------------------------------------------------------ where sites are

    def address(self, site: int) -> str:
        return f"198.19.{self._net}.{site + 1}"

    def namespace(self, site: int) -> Path:
        """By which a process enters a site (`netns.enter`)."""
        if not 1 <= site <= self.sites:
            raise ValueError(f"there is no namespace of site {site}; sites are numbered from 1 to {self.sites}")
        return _NAMESPACES / self._name(site)

    def device(self, site: int) -> str:
        """Its name inside the site."""
        return DEVICE if site else f"at{self._owner:06x}w"

    @property
    def router_pid(self) -> int:
        assert self._router is not None
        return self._router.pid

    # ------------------------------------------------------------------------------------------ links

    def set_link(self, site: int, link: Link) -> None:
        """From now on the site's link is like this."""
        up, down = ((rate or 0.0, link.delay_s, link.loss, link.queue_s) for rate in (link.up_bit_s, link.down_bit_s))
        self._request({"shape": site, "up": up, "down": down})

    def traffic(self) -> list[SiteTraffic]:
        """By site, as the router counts."""
        counts = self._request({"counts": True})
        self.late_s = counts["late_s"]
        return [
            SiteTraffic(*(LinkTraffic(**counts["sites"][str(site)][way]) for way in ("up", "down")))
            for site in range(self.sites + 1)
        ]

    def interface(self, site: int) -> dict[str, int]:
        """What the kernel has counted at the site's device: bytes and packets that were sent and received."""
        inside = () if site == 0 else ("-n", self._name(site))
        devices = json.loads(run_command("ip", *inside, "-j", "-s", "link", "show", "dev", self.device(site)))
        seen = devices[0]["stats64"]
        return {
            f"{way}_{what}": seen[side][what]
            for way, side in (("sent", "tx"), ("received", "rx"))
            for what in ("bytes", "packets")
        }

    # ------------------------------------------------------------------------------------------ making

    def _allocate_network(self) -> int:
        """A number that no other network on this machine has: a name that is free again when its owner is gone."""
        for _ in range(200):
            net = secrets.randbelow(254) + 1
            token = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                token.bind(f"\0atoll-wan-{net}")
            except OSError:
                token.close()
                continue
            self._cleanup.callback(token.close)
            return net
        raise NetnsError("no network of 198.19.0.0/16 is free")

    def _name(self, site: int) -> str:
        return f"atoll-{self._owner}-{_FIRST_NAME + site}"

    def _make(self, seed: int) -> None:
        self._cleanup.callback(self._remove_namespaces)
        for site in range(1, self.sites + 1):
            run_command("ip", "netns", "add", self._name(site))
        router = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("wan_router.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._router = router
        self._cleanup.callback(self._end_router, router)
        places = [(str(self.namespace(n)) if n else None, self.device(n), self.address(n)) for n in self._all()]
        self._request({"sites": places, "seed": seed})  # answered when all devices are there
        for site in self._all():
            self._set_up_site(site)

    def _all(self) -> range:
        return range(self.sites + 1)

    def _set_up_site(self, site: int) -> None:
        ip = ("ip",) if site == 0 else ("ip", "-n", self._name(site))
        device = self.device(site)
        if site:
            run_command(*ip, "link", "set", "lo", "up")
        run_command(*ip, "link", "set", "dev", device, "mtu", str(MTU_BYTES), "addrgenmode", "none")
        run_command(*ip, "addr", "add", f"{self.address(site)}/24", "dev", device)
        run_command(*ip, "link", "set", "dev", device, "up")

    def _request(self, what: dict[str, Any]) -> dict[str, Any]:
        router = self._router
        if router is None or router.stdin is None or router.stdout is None or router.stdin.closed:
            raise NetnsError("the wide network is closed")
        with self._lock:
            try:
                router.stdin.write(json.dumps(what) + "\n")
                router.stdin.flush()
            except BrokenPipeError:
                raise NetnsError("the router of the wide network has ended") from None
            if not select.select([router.stdout], [], [], REPLY_TIMEOUT_S)[0]:
                raise NetnsError(f"the router of the wide network has not answered within {REPLY_TIMEOUT_S:g} s")
            line = router.stdout.readline()
        if not line:
            raise NetnsError("the router of the wide network has ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    # ------------------------------------------------------------------------------------------ the end

    def _end_router(self, router: subprocess.Popen[str]) -> None:
        assert router.stdin is not None
        assert router.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            router.stdin.close()
        try:
            router.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait()
        router.stdout.close()

    def _remove_namespaces(self) -> None:
        """Those that the router has left, because it was killed or never came to be."""
        for name in netns.list_namespaces():
            if name in {self._name(site) for site in range(1, self.sites + 1)}:
                with contextlib.suppress(NetnsError, subprocess.TimeoutExpired):
                    run_command("ip", "netns", "del", name)


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine has no wide network for us; None where it has. Tries it once, and cleans up."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        netns.remove_stale()
        with Wan(1) as tried:
            tried.traffic()
    except (NetnsError, OSError, subprocess.TimeoutExpired) as error:
        return str(error).rpartition(": ")[2]
    return None


def congestion_control() -> str:
    """By which TCP here decides how fast to send: with losses cubic gets little out of a long link, bbr most of it."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
