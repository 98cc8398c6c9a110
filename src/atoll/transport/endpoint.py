"""Where a syncer is, as people write it: `head:7400`, `[::1]:7400`, `https://head:7400`, several between commas."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import NamedTuple

from atoll.transport.tls import ClientTls

PLAIN, SAFE = "http://", "https://"


class Place(NamedTuple):
    """`addresses`: host:port, several between commas. `tls` None: plain text."""

    addresses: str
    tls: ClientTls | None
    is_plain_by_name: bool  # somebody has written http://, and means it

    def check(self) -> None:
        """ValueError where secrets would travel in plain text to another machine, or the keys cannot be used."""
        if self.tls is not None:
            self.tls.context()
            return
        for each in self.addresses.split(","):
            if not self.is_plain_by_name and not is_loopback(each.rpartition(":")[0]):
                raise ValueError(
                    f"{each} is another machine, and in plain text everybody on the way could read the token and the"
                    f" model: give the keys of this island (--keys DIR, keys=...) or the authority of the syncer"
                    f" (--ca FILE, ca=...), docs/several-hosts.md shows how. Where nobody else is on the network,"
                    f" {PLAIN}{each} is plain text"
                )


def place(syncer: str, keys: Path | None = None, ca: Path | None = None) -> Place:
    """What was written, read. Keys, an authority or https:// make it TLS."""
    if not isinstance(syncer, str):
        raise ValueError(f"syncer is {syncer!r}; give host:port, such as head:7400 or [::1]:7400")
    given = [each.strip() for each in syncer.split(",") if each.strip()]
    safe, plain = (any(each.startswith(scheme) for each in given) for scheme in (SAFE, PLAIN))
    if plain and (safe or keys is not None or ca is not None):
        raise ValueError(f"{syncer!r} is {PLAIN}, which is plain text, and keys are for TLS: write {SAFE}, or neither")
    bare = ",".join(each.removeprefix(SAFE).removeprefix(PLAIN).rstrip("/") for each in given)
    is_tls = safe or keys is not None or ca is not None
    return Place(addresses(bare), ClientTls(keys, ca) if is_tls else None, plain)


def addresses(syncer: str) -> str:
    """`host:port`, or several of them between commas: the syncer and its standbys, asked in turn."""
    found = [address(each.strip()) for each in syncer.split(",") if each.strip()]
    if not found:
        raise ValueError("syncer is empty; give host:port, such as head:7400, or several, as head:7400,other:7400")
    return ",".join(dict.fromkeys(found))


def address(syncer: str) -> str:
    """`host:port`, checked. An IPv6 address is written in brackets."""
    host, colon, port = syncer.rpartition(":")
    brackets = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not brackets):
        raise ValueError(f"syncer is {syncer!r}; give host:port, such as head:7400 or [::1]:7400")
    return syncer


def is_loopback(host: str) -> bool:
    """Does this name or address never leave the machine?

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("0.0.0.0"), is_loopback("head")
    (True, True, False, False)
    """
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
