"""Who may speak to a syncer, and as which learners. Everything that was set up is asked for.

| set up | who is let in |
|---|---|
| nothing | this machine, in plain text |
| a token | whoever has it: from this machine in plain text, from others over TLS with the syncer's certificate |
| keys | whoever shows one that the authority has signed, as the learners that it names |
| keys and a token | whoever has both |
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
"""What a certificate may name, as a URI among its alternative names."""

MAX_CLOCK_SKEW_S = 300.0
"""Clocks of two machines may differ by so much before a new key is refused."""

REFUSED_HEADER = "Atoll-Refused"
"""Of an answer: the sentence, for those who see only its head. Whoever dials a WebSocket does."""

OPERATOR_PATHS = ("/v1/control", "/v1/snapshot", "/v1/finish", "/v1/head", "/v1/initial", "/metrics")
LEARNER_PATHS = ("/v1/model", "/v1/join", "/v1/link", "/v1/slice", "/v1/contribution", "/v1/state", "/v1/fragment")


class IdentityMismatchError(ValueError):
    """Somebody speaks as a learner that the key does not name."""

    code = "identity"


class Rejection(NamedTuple):
    """Somebody is turned away: what is counted, what is answered, and what is said."""

    code: str
    status: int
    message: str


class Peer(NamedTuple):
    """One key, as its certificate says."""

    name: str
    learners: frozenset[int]
    is_any_learner: bool
    is_operator: bool
    fingerprint: str
    not_before: float
    not_after: float

    @classmethod
    def from_certificate(cls, told: dict[str, Any], raw: bytes) -> Peer:
        """`told` and `raw`: a certificate that was verified, as `SSLObject.getpeercert` gives it."""
        names = [value for part in told.get("subject", ()) for kind, value in part if kind == "commonName"]
        uris = [value for kind, value in told.get("subjectAltName", ()) if kind == "URI"]
        numbers = [uri.removeprefix(LEARNER_URI_PREFIX) for uri in uris if uri.startswith(LEARNER_URI_PREFIX)]
        return cls(
            names[0] if names else "a key without a name",
            frozenset(int(number) for number in numbers if number.isdecimal()),
            ANY_LEARNER in numbers,
            OPERATOR_URI in uris or SYNCER_URI in uris,
            hashlib.sha256(raw).hexdigest(),
            ssl.cert_time_to_seconds(told["notBefore"]),
            ssl.cert_time_to_seconds(told["notAfter"]),
        )

    def find_problem(self, now: float, revoked: Collection[str]) -> Rejection | None:
        """Why this key is not good any more, or not yet."""
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
        """Why this key is not for this path."""
        if path.startswith(OPERATOR_PATHS) and not self.is_operator:
            return Rejection(
                "role", 403, f"the key of {self.name} is not one of an operator: atoll keys add --operator"
            )
        may_fetch = self.is_operator and path.startswith("/v1/fragment")
        if path.startswith(LEARNER_PATHS) and not self.learners and not self.is_any_learner and not may_fetch:
            return Rejection("role", 403, f"the key of {self.name} names no learner: atoll keys add --learner N")
        return None

    def can_act_as(self, learner: int) -> bool:
        return self.is_any_learner or learner in self.learners


CURRENT_PEER: ContextVar[Peer | None] = ContextVar("CURRENT_PEER", default=None)
"""Whose request is being handled; None where keys are not asked for."""


def log_key(code: str) -> str:
    """For the log: one line stands for all refusals of a kind that one key brings about, whatever it sends."""
    peer = CURRENT_PEER.get()
    return f"{code} {peer.name}" if peer is not None else code


def get_peer(transport: asyncio.BaseTransport | None) -> Peer | None:
    """The key that this connection has shown."""
    told = transport.get_extra_info("ssl_object") if transport is not None else None
    if told is None:
        return None
    raw = told.getpeercert(True)
    return Peer.from_certificate(told.getpeercert(), raw) if raw else None


def check_identity(learner: int) -> None:
    """Whoever speaks may do so as this learner, or `IdentityMismatchError`."""
    peer = CURRENT_PEER.get()
    if peer is not None and not peer.can_act_as(learner):
        named = ", ".join(map(str, sorted(peer.learners))) or "no learner"
        raise IdentityMismatchError(f"the key of {peer.name} is for {named}, and does not speak as learner {learner}")


def choose_learner_id(wanted: int | None, taken: Collection[int]) -> int | None:
    """The learner as which whoever speaks joins: the wanted one, or one that the key names and that is not taken."""
    peer = CURRENT_PEER.get()
    if peer is None or peer.is_any_learner:
        return wanted
    if wanted is None:
        free = sorted(each for each in peer.learners if each not in taken)
        if not free and len(peer.learners) > 1:
            raise IdentityMismatchError(
                f"all learners that the key of {peer.name} names are here: say which one this is, --learner"
            )
        return free[0] if free else min(peer.learners)  # the only one comes back as itself
    check_identity(wanted)
    return wanted


KEY_POLL_INTERVAL_S = 1.0
"""At the files of the keys, and for keys that have expired."""

REJECTION_LOG_INTERVAL_S = 10.0
"""Between two lines of the log that would say the same: strangers must not fill a disk."""

MIN_TOKEN_LENGTH = 8

NO_TOKEN = Rejection(
    "token", 401, "the token is missing or wrong: the learner and the syncer must be given the same one"
)
NO_KEY = Rejection(
    "no-key", 401, "this syncer asks for a key, and none was shown: give --keys DIR, keys=... in a script"
)


def check_access(host: str, token: str | None, tls: ServerTls | None = None, plain_text: bool = False) -> None:
    """ValueError where strangers could speak, or listen."""
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ValueError("a token needs at least 8 letters: everybody who can reach the port may try")
    if plain_text and tls is not None:
        raise ValueError("--plain-text means nothing with keys: what they protect is not plain")
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
    """`refused` counts by code, for status and metrics."""

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
        """To ask another process of the same run: it has the same token, and a key of the same authority."""
        headers = {"Authorization": self._bearer.decode()} if self._bearer is not None else {}
        files = self.tls.files if self.tls is not None else None
        context: bool | ssl.SSLContext = True
        if files is not None:
            context = ClientTls(files.certificate.parent).make_context()
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=headers)

    def check_request(self, request: web.Request) -> Rejection | None:
        """Of a request, before anything of it is read. From here on `CURRENT_PEER` is known."""
        found = self._find_problem(request)
        if found is not None:
            self.reject(found, str(request.remote), f"{request.method} {request.path}")
        return found

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
        """Compared in constant time, whatever is sent."""
        if self._bearer is None:
            return True
        return hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), self._bearer)

    def reject(self, rejection: Rejection, remote: str, subject: str, dedup_key: str = "") -> None:
        """Counted, and said; the hundredth in a second is counted only. `dedup_key`: stands for all sentences that count as
        the same line, where a peer could make each of them another one."""
        self.refused[rejection.code] += 1
        left_out = self._repeat_limit.count_suppressed(dedup_key or rejection.message)
        if left_out is None:
            return
        also = f" (and {left_out} like it before)" if left_out else ""
        self.log.warning(
            "%s from %s was refused: %s%s", subject, remote, rejection.message, also, extra={"code": rejection.code}
        )

    async def watch_keys(self, connections: Callable[[], Iterable[WebSocketConnection]]) -> None:
        """Use keys that are renewed, and close the connections of keys that are no longer good."""
        assert self.tls is not None
        while True:
            await asyncio.sleep(KEY_POLL_INTERVAL_S)
            told = self.tls.reload_if_changed()
            if told is not None:
                self.log.info("%s", told)
            now = time.time()
            for connection in connections():
                peer = get_peer(connection.transport) if self.tls.requires_client_keys else None
                problem = peer.find_problem(now, self.tls.revoked) if peer is not None else None
                if problem is not None:
                    self.reject(problem, peer.name if peer is not None else "", "a link")
                    connection.clear_queue()
                    connection.close(problem.message)
