"""Who speaks: the key that a connection has shown, and as which learners it may speak."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Collection
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

LEARNER = "urn:atoll:learner:"
ANY = "*"
OPERATOR = "urn:atoll:operator"
OF_SYNCER = "urn:atoll:syncer"
"""What a certificate may name, as a URI among its alternative names."""

CLOCKS_S = 300.0
"""Clocks of two machines may differ by so much before a new key is refused."""

HEADER = "Atoll-Refused"
"""Of an answer: the sentence, for those who see only its head. Whoever dials a WebSocket does."""

OPERATORS_ONLY = ("/v1/control", "/v1/snapshot", "/v1/finish", "/v1/head", "/v1/initial", "/metrics")
LEARNERS_ONLY = ("/v1/model", "/v1/join", "/v1/link", "/v1/slice", "/v1/contribution", "/v1/state", "/v1/fragment")


CODES = (
    "token",
    "no-key",
    "expired",
    "revoked",
    "identity",
    "role",
    "authority",
    "tls-version",
    "handshake",
    "plain-text",
    "tls-to-plain",
    "unfinished",
)
"""Why somebody is turned away before a word is read, as it is counted. docs/security.md tells what each means."""


class IdentityMismatchError(ValueError):
    """Somebody speaks as a learner that the key does not name."""

    code = "identity"


class Rejection(NamedTuple):
    """Somebody is turned away: what is counted, what is answered, and what is said."""

    code: str
    status: int
    sentence: str


class Peer(NamedTuple):
    """One key, as its certificate says."""

    name: str
    learners: frozenset[int]
    is_any_learner: bool
    is_operator: bool
    fingerprint: str
    since: float
    until: float

    @classmethod
    def of(cls, told: dict[str, Any], raw: bytes) -> Peer:
        """`told` and `raw`: a certificate that was verified, as `SSLObject.getpeercert` gives it."""
        names = [value for part in told.get("subject", ()) for kind, value in part if kind == "commonName"]
        uris = [value for kind, value in told.get("subjectAltName", ()) if kind == "URI"]
        numbers = [uri.removeprefix(LEARNER) for uri in uris if uri.startswith(LEARNER)]
        return cls(
            names[0] if names else "a key without a name",
            frozenset(int(number) for number in numbers if number.isdecimal()),
            ANY in numbers,
            OPERATOR in uris or OF_SYNCER in uris,
            hashlib.sha256(raw).hexdigest(),
            ssl.cert_time_to_seconds(told["notBefore"]),
            ssl.cert_time_to_seconds(told["notAfter"]),
        )

    def problem(self, now: float, revoked: Collection[str]) -> Rejection | None:
        """Why this key is not good any more, or not yet."""
        if self.fingerprint in revoked:
            return Rejection("revoked", 403, f"the key of {self.name} is revoked: ask for a new one")
        if now > self.until:
            day = datetime.fromtimestamp(self.until, UTC).date()
            return Rejection(
                "expired", 403, f"the key of {self.name} expired on {day}: atoll keys renew makes a new one"
            )
        if now < self.since - CLOCKS_S:
            return Rejection("expired", 403, f"the key of {self.name} is not valid yet: is a clock wrong?")
        return None

    def off_limits(self, path: str) -> Rejection | None:
        """Why this key is not for this path."""
        if path.startswith(OPERATORS_ONLY) and not self.is_operator:
            return Rejection(
                "role", 403, f"the key of {self.name} is not one of an operator: atoll keys add --operator"
            )
        may_fetch = self.is_operator and path.startswith("/v1/fragment")
        if path.startswith(LEARNERS_ONLY) and not self.learners and not self.is_any_learner and not may_fetch:
            return Rejection("role", 403, f"the key of {self.name} names no learner: atoll keys add --learner N")
        return None

    def may_be(self, learner: int) -> bool:
        return self.is_any_learner or learner in self.learners


SPEAKER: ContextVar[Peer | None] = ContextVar("SPEAKER", default=None)
"""Whose request is being handled; None where keys are not asked for."""


def log_key(code: str) -> str:
    """For the log: one line stands for all refusals of a kind that one key brings about, whatever it sends."""
    peer = SPEAKER.get()
    return f"{code} {peer.name}" if peer is not None else code


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    """The key that this connection has shown."""
    told = transport.get_extra_info("ssl_object") if transport is not None else None
    if told is None:
        return None
    raw = told.getpeercert(True)
    return Peer.of(told.getpeercert(), raw) if raw else None


def check_speaker(learner: int) -> None:
    """Whoever speaks may do so as this learner, or `IdentityMismatchError`."""
    peer = SPEAKER.get()
    if peer is not None and not peer.may_be(learner):
        named = ", ".join(map(str, sorted(peer.learners))) or "no learner"
        raise IdentityMismatchError(f"the key of {peer.name} is for {named}, and does not speak as learner {learner}")


def own_number(wanted: int | None, taken: Collection[int]) -> int | None:
    """The learner as which whoever speaks joins: the wanted one, or one that the key names and that is not taken."""
    peer = SPEAKER.get()
    if peer is None or peer.is_any_learner:
        return wanted
    if wanted is None:
        free = sorted(each for each in peer.learners if each not in taken)
        if not free and len(peer.learners) > 1:
            raise IdentityMismatchError(
                f"all learners that the key of {peer.name} names are here: say which one this is, --learner"
            )
        return free[0] if free else min(peer.learners)  # the only one comes back as itself
    check_speaker(wanted)
    return wanted
