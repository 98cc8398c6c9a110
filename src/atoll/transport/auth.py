"""Authentication of peers, and authorization by learner. A syncer requires every credential that it was started with.

| credentials | access |
|---|---|
| none | processes on this machine, in plain text |
| token | processes with the token: on this machine in plain text, on others over TLS with the syncer's certificate |
| keys | keys signed by the authority, for the learners that they name |
| keys and token | peers with both |
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from atoll.logs import LogRateLimiter
from atoll.transport.endpoint import is_loopback
from atoll.transport.tls import ClientTls, ServerTls
from atoll.transport.websocket import WebSocketConnection

LEARNER_URI_PREFIX = "urn:atoll:learner:"
ANY_LEARNER = "*"
OPERATOR_URI = "urn:atoll:operator"
SYNCER_URI = "urn:atoll:syncer"
"""URIs in the alternative names of a certificate."""

MAX_CLOCK_SKEW_S = 300.0
"""Clock difference between two machines that a new key tolerates."""

REFUSED_HEADER = "Atoll-Refused"
"""Response header with the refusal message, for clients that read only the head, such as WebSocket clients."""

OPERATOR_PATHS = ("/v1/control", "/v1/snapshot", "/v1/finish", "/v1/head", "/v1/initial", "/metrics")
LEARNER_PATHS = ("/v1/model", "/v1/join", "/v1/link", "/v1/slice", "/v1/contribution", "/v1/state", "/v1/fragment")


class IdentityMismatchError(ValueError):
    """A peer acts as a learner that its key does not name."""

    code = "identity"


class Rejection(NamedTuple):
    """A refusal: the code that is counted, the HTTP status, and the message."""

    code: str
    status: int
    message: str


class Peer(NamedTuple):
    """The identity in a certificate."""

    name: str
    learners: frozenset[int]
    is_any_learner: bool
    is_operator: bool
    fingerprint: str
    not_before: float
    not_after: float

    @classmethod
    def from_certificate(cls, fields: dict[str, Any], raw: bytes) -> Peer:
        """Read a verified certificate: `fields` and `raw` are from `SSLObject.getpeercert`."""
        names = [value for part in fields.get("subject", ()) for kind, value in part if kind == "commonName"]
        uris = [value for kind, value in fields.get("subjectAltName", ()) if kind == "URI"]
        numbers = [uri.removeprefix(LEARNER_URI_PREFIX) for uri in uris if uri.startswith(LEARNER_URI_PREFIX)]
        return cls(
            names[0] if names else "a key without a name",
            frozenset(int(number) for number in numbers if number.isdecimal()),
            ANY_LEARNER in numbers,
            OPERATOR_URI in uris or SYNCER_URI in uris,
            hashlib.sha256(raw).hexdigest(),
            ssl.cert_time_to_seconds(fields["notBefore"]),
            ssl.cert_time_to_seconds(fields["notAfter"]),
        )

    def find_problem(self, now: float, revoked: Collection[str]) -> Rejection | None:
        """Return why this key is not valid now, or None."""
        if self.fingerprint in revoked:
            return Rejection("revoked", 403, f"the key of {self.name} is revoked: ask for a new one")
        if now > self.not_after:
            day = datetime.fromtimestamp(self.not_after, UTC).date()
            return Rejection(
                "expired", 403, f"the key of {self.name} expired on {day}: atoll keys renew makes a new one"
            )
        if now < self.not_before - MAX_CLOCK_SKEW_S:
            return Rejection("expired", 403, f"the key of {self.name} is not valid yet: is a clock wrong?")
        return None

    def find_path_problem(self, path: str) -> Rejection | None:
        """Return why this key must not use this path, or None."""
        if path.startswith(OPERATOR_PATHS) and not self.is_operator:
            return Rejection(
                "role", 403, f"the key of {self.name} is not one of an operator: atoll keys add --operator"
            )
        may_download = self.is_operator and path.startswith("/v1/fragment")
        if path.startswith(LEARNER_PATHS) and not self.learners and not self.is_any_learner and not may_download:
            return Rejection("role", 403, f"the key of {self.name} names no learner: atoll keys add --learner N")
        return None

    def can_act_as(self, learner: int) -> bool:
        return self.is_any_learner or learner in self.learners


CURRENT_PEER: ContextVar[Peer | None] = ContextVar("CURRENT_PEER", default=None)
"""The peer whose request is being handled. None if keys are not required."""


def log_key(code: str) -> str:
    """Return the key for log deduplication: one per rejection code and peer key, independent of the sent data."""
    peer = CURRENT_PEER.get()
    return f"{code} {peer.name}" if peer is not None else code


def get_peer(transport: asyncio.BaseTransport | None) -> Peer | None:
    """Return the identity that this connection has authenticated, or None."""
    ssl_object = transport.get_extra_info("ssl_object") if transport is not None else None
    if ssl_object is None:
        return None
    raw = ssl_object.getpeercert(True)
    return Peer.from_certificate(ssl_object.getpeercert(), raw) if raw else None


def check_identity(learner: int) -> None:
    """Raise `IdentityMismatchError` unless the current peer may act as this learner."""
    peer = CURRENT_PEER.get()
    if peer is not None and not peer.can_act_as(learner):
        named = ", ".join(map(str, sorted(peer.learners))) or "no learner"
        raise IdentityMismatchError(f"the key of {peer.name} is for {named}, and cannot act as learner {learner}")


def choose_learner_id(requested: int | None, taken: Collection[int]) -> int | None:
    """Choose the learner id for the current peer: the requested one, or a free one that its key names."""
    peer = CURRENT_PEER.get()
    if peer is None or peer.is_any_learner:
        return requested
    if requested is None:
        free = sorted(each for each in peer.learners if each not in taken)
        if not free and len(peer.learners) > 1:
            raise IdentityMismatchError(
                f"all learners that the key of {peer.name} names are connected: choose one with --learner"
            )
        return free[0] if free else min(peer.learners)  # the only one reconnects with its own id
    check_identity(requested)
    return requested


KEY_POLL_INTERVAL_S = 1.0
"""Interval for polling the key files and for checking expired keys."""

REJECTION_LOG_INTERVAL_S = 10.0
"""Minimum time between two equal log lines: unauthenticated clients must not fill a disk."""

MIN_TOKEN_LENGTH = 8

NO_TOKEN = Rejection(
    "token", 401, "the token is missing or wrong: the learner and the syncer must be given the same one"
)
NO_KEY = Rejection(
    "no-key", 401, "this syncer requires a key, and the client sent none: give --keys DIR, or keys=... in a script"
)


def check_access(host: str, token: str | None, tls: ServerTls | None = None, plain_text: bool = False) -> None:
    """Raise ValueError if unauthenticated peers could connect or read the traffic."""
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ValueError("a token needs at least 8 characters: any client that reaches the port can try to guess it")
    if plain_text and tls is not None:
        raise ValueError("--plain-text cannot be used with keys: they require TLS")
    if is_loopback(host):
        return
    if tls is None and not plain_text:
        raise ValueError(
            f"on {host} others could read and change what is sent, and the syncer has no keys to prevent it: make them"
            f" with `atoll keys init DIR` and give --keys DIR (docs/several-hosts.md), or --host 127.0.0.1 to serve"
            f" this machine only"
        )
    if token is None and (tls is None or not tls.requires_client_keys):
        raise ValueError(
            f"without a token the syncer listens on this machine only, not on {host}: give --token, or --host 127.0.0.1"
        )


class AccessControl:
    """Authentication of requests. `refused` counts rejections by code, for status and metrics."""

    def __init__(
        self, token: str | None, tls: ServerTls | None, refused: Counter[str], log: logging.Logger | None = None
    ) -> None:
        self.tls = tls
        self.refused = refused
        self.log = log if log is not None else logging.getLogger("atoll.syncer")
        self._bearer = f"Bearer {token}".encode() if token is not None else None
        self._repeat_limit = LogRateLimiter(REJECTION_LOG_INTERVAL_S)

    @property
    def scheme(self) -> str:
        return "https" if self.tls is not None else "http"

    def client_session(self) -> aiohttp.ClientSession:
        """Return a session for requests to other processes of the run, with the token and a key of the authority."""
        headers = {"Authorization": self._bearer.decode()} if self._bearer is not None else {}
        files = self.tls.files if self.tls is not None else None
        context: bool | ssl.SSLContext = True
        if files is not None:
            context = ClientTls(files.certificate.parent).make_context()
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=headers)

    def check_request(self, request: web.Request) -> Rejection | None:
        """Check a request before its body is read, and set `CURRENT_PEER`."""
        rejection = self._find_problem(request)
        if rejection is not None:
            self.reject(rejection, str(request.remote), f"{request.method} {request.path}")
        return rejection

    def _find_problem(self, request: web.Request) -> Rejection | None:
        peer = get_peer(request.transport) if self.tls is not None and self.tls.requires_client_keys else None
        CURRENT_PEER.set(peer)
        if self.tls is not None and self.tls.requires_client_keys:
            if peer is None:
                return NO_KEY
            problem = peer.find_problem(time.time(), self.tls.revoked) or peer.find_path_problem(request.path)
            if problem is not None:
                return problem
        return None if self._has_token(request.headers.get("Authorization", "")) else NO_TOKEN

    def _has_token(self, authorization: str) -> bool:
        """Compare the token in constant time."""
        if self._bearer is None:
            return True
        return hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), self._bearer)

    def reject(self, rejection: Rejection, remote: str, subject: str, dedup_key: str = "") -> None:
        """Count and log a rejection. Repeated log lines are suppressed.

        `dedup_key` groups messages that differ, so that a peer cannot fill the log by varying them.
        """
        self.refused[rejection.code] += 1
        suppressed = self._repeat_limit.count_suppressed(dedup_key or rejection.message)
        if suppressed is None:
            return
        also = f" (and {suppressed} similar ones before)" if suppressed else ""
        self.log.warning(
            "%s from %s was refused: %s%s", subject, remote, rejection.message, also, extra={"code": rejection.code}
        )

    async def watch_keys(self, connections: Callable[[], Iterable[WebSocketConnection]]) -> None:
        """Reload renewed keys, and close the connections of keys that are no longer valid."""
        assert self.tls is not None
        while True:
            await asyncio.sleep(KEY_POLL_INTERVAL_S)
            change = self.tls.reload_if_changed()
            if change is not None:
                self.log.info("%s", change)
            now = time.time()
            for connection in connections():
                peer = get_peer(connection.transport) if self.tls.requires_client_keys else None
                problem = peer.find_problem(now, self.tls.revoked) if peer is not None else None
                if problem is not None:
                    self.reject(problem, peer.name if peer is not None else "", "a link")
                    connection.clear_queue()
                    connection.close(problem.message)
