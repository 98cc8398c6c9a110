"""Who may speak to a syncer: whoever has what was asked for. Everything that was set up is asked for.

| set up | who is let in |
|---|---|
| nothing | this machine, in plain text |
| a token | whoever has it: from this machine in plain text, from others over TLS with the syncer's certificate |
| keys | whoever shows one that the authority has signed, as the learners that it names |
| keys and a token | whoever has both |
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable

import aiohttp
from aiohttp import web

from atoll.logs import RepeatLimit
from atoll.transport.endpoint import is_loopback
from atoll.transport.identity import SPEAKER, Rejection, peer_of
from atoll.transport.tls import ClientTls, ServerTls
from atoll.transport.websocket import WebSocketConnection

LOOK_EVERY_S = 1.0
"""At the files of the keys, and for keys that have expired."""

QUIET_S = 10.0
"""Between two lines of the log that would say the same: strangers must not fill a disk."""

LEAST_TOKEN = 8

NO_TOKEN = Rejection(
    "token", 401, "the token is missing or wrong: the learner and the syncer must be given the same one"
)
NO_KEY = Rejection(
    "no-key", 401, "this syncer asks for a key, and none was shown: give --keys DIR, keys=... in a script"
)


def check_access(host: str, token: str | None, tls: ServerTls | None = None, plain_text: bool = False) -> None:
    """ValueError where strangers could speak, or listen."""
    if token is not None and len(token) < LEAST_TOKEN:
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
    if token is None and (tls is None or not tls.asks_for_keys):
        raise ValueError(
            f"without a token the syncer listens on this machine only, not on {host}: give --token, or --host 127.0.0.1"
        )


class Access:
    """`refused` counts by code, for status and metrics."""

    def __init__(
        self, token: str | None, tls: ServerTls | None, refused: Counter[str], log: logging.Logger | None = None
    ) -> None:
        self.tls = tls
        self.refused = refused
        self.log = log if log is not None else logging.getLogger("atoll.syncer")
        self._bearer = f"Bearer {token}".encode() if token is not None else None
        self._repeats = RepeatLimit(QUIET_S)

    @property
    def scheme(self) -> str:
        return "https" if self.tls is not None else "http"

    def client(self) -> aiohttp.ClientSession:
        """To ask another process of the same run: it has the same token, and a key of the same authority."""
        headers = {"Authorization": self._bearer.decode()} if self._bearer is not None else {}
        files = self.tls.files if self.tls is not None else None
        context: bool | ssl.SSLContext = True
        if files is not None:
            context = ClientTls(files.certificate.parent).context()
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=headers)

    def refusal(self, request: web.Request) -> Rejection | None:
        """Of a request, before anything of it is read. From here on `SPEAKER` is known."""
        found = self._problem(request)
        if found is not None:
            self.reject(found, str(request.remote), f"{request.method} {request.path}")
        return found

    def _problem(self, request: web.Request) -> Rejection | None:
        peer = peer_of(request.transport) if self.tls is not None and self.tls.asks_for_keys else None
        SPEAKER.set(peer)
        if self.tls is not None and self.tls.asks_for_keys:
            if peer is None:
                return NO_KEY
            problem = peer.problem(time.time(), self.tls.revoked) or peer.off_limits(request.path)
            if problem is not None:
                return problem
        return None if self._has_token(request.headers.get("Authorization", "")) else NO_TOKEN

    def _has_token(self, authorization: str) -> bool:
        """Compared in constant time, whatever is sent."""
        if self._bearer is None:
            return True
        return hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), self._bearer)

    def reject(self, turned: Rejection, who: str, what: str, alike: str = "") -> None:
        """Counted, and said; the hundredth in a second is counted only. `alike`: stands for all sentences that count as
        the same line, where a peer could make each of them another one."""
        self.refused[turned.code] += 1
        left_out = self._repeats.left_out(alike or turned.sentence)
        if left_out is None:
            return
        also = f" (and {left_out} like it before)" if left_out else ""
        self.log.warning("%s from %s was refused: %s%s", what, who, turned.sentence, also, extra={"code": turned.code})

    async def watch(self, connections: Callable[[], Iterable[WebSocketConnection]]) -> None:
        """Use keys that are renewed, and close the connections of keys that are no longer good."""
        assert self.tls is not None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            told = self.tls.look()
            if told is not None:
                self.log.info("%s", told)
            now = time.time()
            for connection in connections():
                peer = peer_of(connection.transport) if self.tls.asks_for_keys else None
                problem = peer.problem(now, self.tls.revoked) if peer is not None else None
                if problem is not None:
                    self.reject(problem, peer.name if peer is not None else "", "a link")
                    connection.discard()
                    connection.close(problem.sentence)
