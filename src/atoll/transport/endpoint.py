"""Addresses of syncers: `head:7400`, `[::1]:7400`, `https://head:7400`, or several between commas."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from atoll.files import write_text
from atoll.transport.tls import ClientTls, KeyFiles, find_tls_problem

HTTP_SCHEME, HTTPS_SCHEME = "http://", "https://"


class Endpoint(NamedTuple):
    """Addresses of a syncer (host:port, separated by commas), and TLS settings; `tls` is None for plain text."""

    addresses: str
    tls: ClientTls | None
    is_plain_text_explicit: bool  # the address begins with http://

    def check(self) -> None:
        """Raise ValueError if secrets would be sent to another machine in plain text, or if the keys are unusable."""
        if self.tls is not None:
            self.tls.make_context()
            return
        for each in self.addresses.split(","):
            if not self.is_plain_text_explicit and not is_loopback(each.rpartition(":")[0]):
                raise ValueError(
                    f"{each} is another machine, and in plain text others on the network could read the token and the"
                    f" model: give the keys of this island (--keys DIR, keys=...) or the authority of the syncer"
                    f" (--ca FILE, ca=...), docs/several-hosts.md shows how. On a trusted network,"
                    f" {HTTP_SCHEME}{each} is plain text"
                )


def parse_endpoint(syncer: str, keys: Path | None = None, ca: Path | None = None) -> Endpoint:
    """Parse an address as written by the operator. Keys, an authority or https:// mean TLS."""
    if not isinstance(syncer, str):
        raise ValueError(f"syncer is {syncer!r}; give host:port, such as head:7400 or [::1]:7400")
    parts = [each.strip() for each in syncer.split(",") if each.strip()]
    safe, plain = (any(each.startswith(scheme) for each in parts) for scheme in (HTTPS_SCHEME, HTTP_SCHEME))
    if plain and (safe or keys is not None or ca is not None):
        raise ValueError(
            f"{syncer!r} is {HTTP_SCHEME}, which is plain text, and keys are for TLS: write {HTTPS_SCHEME}, or neither"
        )
    bare = ",".join(each.removeprefix(HTTPS_SCHEME).removeprefix(HTTP_SCHEME).rstrip("/") for each in parts)
    is_tls = safe or keys is not None or ca is not None
    return Endpoint(parse_addresses(bare), ClientTls(keys, ca) if is_tls else None, plain)


def parse_addresses(syncer: str) -> str:
    """Check one or several `host:port`, separated by commas: the syncer and its standbys, tried in this order."""
    found = [parse_address(each.strip()) for each in syncer.split(",") if each.strip()]
    if not found:
        raise ValueError("syncer is empty; give host:port, such as head:7400, or several, as head:7400,other:7400")
    return ",".join(dict.fromkeys(found))


def parse_address(syncer: str) -> str:
    """Check `host:port`. An IPv6 address is in brackets."""
    host, colon, port = syncer.rpartition(":")
    brackets = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not brackets):
        raise ValueError(f"syncer is {syncer!r}; give host:port, such as head:7400 or [::1]:7400")
    return syncer


def is_loopback(host: str) -> bool:
    """Return whether this name or address never leaves the machine.

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


# --------------------------------------------------------------------------------------------------------------------
# How a command on this machine reaches the syncer of a run: `syncer.json` in the run's directory while it runs
#
# The file has the token and the path of the syncer's key, so only its owner may read it (mode 0600). A syncer
# deletes it when it stops cleanly. The file of a killed syncer stays until the next one replaces it, and its address
# does not answer.


ADDRESS_FILE = "syncer.json"
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses to listen on, and those to connect to in their place."""

NO_PROXY = urllib.request.ProxyHandler({})
"""Connect to syncers directly, as learners do: a proxy in the environment is for the web."""

MAX_RESPONSE_BYTES = 64 * 2**20


class SyncerAddress(NamedTuple):
    address: str
    token: str | None
    epoch: int
    keys: KeyFiles | None = None  # the syncer's own

    @property
    def tls(self) -> ClientTls | None:
        """Trust exactly the syncer's own key, which the caller can read."""
        return ClientTls(pinned=self.keys) if self.keys is not None else None


class RequestRefusedError(ValueError):
    """The syncer refused the request. The message is that of the syncer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(ValueError):
    """No syncer answers at this address."""


class TlsVerificationError(NoAnswerError):
    """Failure to verify the key of the other side. A retry would not help."""


def write_address_file(directory: Path, address: SyncerAddress) -> None:
    host, _, port = address.address.rpartition(":")
    written = address._replace(address=f"{WILDCARD_HOSTS.get(host, host)}:{port}")
    path = directory / ADDRESS_FILE
    keys = [str(path.absolute()) for path in written.keys[:2] if path is not None] if written.keys is not None else None
    text = json.dumps(written._asdict() | {"keys": keys}) + "\n"
    # Not durable: the file is useless after the syncer's machine has stopped.
    write_text(path, text, durable=False, mode=0o600)


def remove_address_file(directory: Path, epoch: int) -> None:
    """Delete the address file of the syncer of this epoch, but not that of a successor."""
    with suppress(OSError, ValueError):
        found = read_address_file(directory)
        if found is not None and found.epoch == epoch:
            (directory / ADDRESS_FILE).unlink(missing_ok=True)


def read_address_file(directory: Path) -> SyncerAddress | None:
    """Return the address of the newest syncer of this directory. It may have stopped."""
    path = directory / ADDRESS_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        address, token, epoch, keys = raw["address"], raw["token"], raw["epoch"], raw.get("keys")
        if not isinstance(address, str) or not isinstance(epoch, int) or not isinstance(token, str | None):
            raise TypeError
        return SyncerAddress(address, token, epoch, KeyFiles(*map(Path, keys)) if keys is not None else None)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not what a syncer writes: remove it, and give --syncer HOST:PORT") from None


def send_request(
    address: str,
    token: str | None,
    method: str,
    path: str,
    timeout_s: float,
    body: Any = None,
    tls: ClientTls | None = None,
) -> Any:
    """Send one request and return the JSON of the response, or None.

    Raises:
        RequestRefusedError: The syncer refused it.
        NoAnswerError: No syncer answers.
    """
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http{'s' if tls is not None else ''}://{address}{path}", data, method=method)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    handlers: list[urllib.request.BaseHandler] = [NO_PROXY]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls.make_context()))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            text = response.read(MAX_RESPONSE_BYTES)
        return json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        raise RequestRefusedError(error.code, error_message(error)) from None
    except (OSError, ValueError) as error:
        problem = find_tls_problem(error)
        if problem is not None:
            raise TlsVerificationError(f"no secure connection to the syncer at {address}: {problem}") from None
        raise NoAnswerError(f"no syncer answers at {address} ({getattr(error, 'reason', error)})") from None


def error_message(error: urllib.error.HTTPError) -> str:
    try:
        fields = json.loads(error.read(65536))
        return str(fields["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
