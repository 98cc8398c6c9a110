"""The port of a syncer: connections are taken, and have to show in time who they are.

A connection is **unproven** until its first request has been let in. Before that it may cost little: its first byte is
waited for with nothing but a socket, its handshake has an end, and there are only so many of them. Whoever opens more
loses the oldest of the address that has the most, so a stranger who opens thousands competes with itself.

Those that are silent and those that speak are counted apart. A learner speaks as soon as it is connected; in one pool
it would lose its place, between two words of its handshake, to a neighbour at its own address who opens thousands and
says nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from atoll.transport.auth import REFUSED_HEADER, AccessControl, Rejection
from atoll.transport.tls import TLS_ALERT_HANDLER, find_tls_problem

HANDSHAKE_TIMEOUT_S = 15.0
"""From the first byte to the end of the handshake; also until the first byte."""

AUTHENTICATION_TIMEOUT_S = 30.0
"""Until the first request is let in."""

MAX_PENDING = 256
"""Of either kind: that have said nothing yet, and that have not said enough."""

BACKLOG = 512
MAX_ACCEPTS_PER_ITERATION = 16
"""Connections that are taken before everything else has its turn, far fewer than there is room for. Accepting gives no
turn by itself while somebody waits at the port: (1) a learner connects and speaks, (2) a stranger fills the backlog
behind it, (3) all are taken in one go, and the learner, the oldest by then, is dropped before anybody has listened to
it. Whoever connects faster than is accepted would even stop the whole loop."""

LINGER_S = 1.0
"""For a last word to be read: a socket that is closed with something unread in it takes back what was sent."""

PENDING_POLL_INTERVAL_S = 0.5
ACCEPT_RETRY_S = 0.5
"""When the system has no more files for us."""

TLS_HANDSHAKE_BYTE = 0x16
"""The first byte of everything that speaks TLS, and no letter of a method of HTTP."""

PLAIN_TEXT_ON_TLS_PORT = Rejection(
    "plain-text", 400, "this port speaks TLS, and plain text came: give --keys DIR or --ca FILE, or write https://"
)
TLS_ON_PLAIN_TEXT_PORT = Rejection("tls-to-plain", 400, "TLS came, and this syncer has no keys: it speaks plain text")
NOT_TLS = Rejection("handshake", 400, "what came is not TLS")
TOO_MANY_PENDING = Rejection("unfinished", 408, "too many connections have not said who they are")
AUTHENTICATION_TIMED_OUT = Rejection("unfinished", 408, "it has not said in time who it is")

ConnectionKey = tuple[Any, Any]


class PendingConnection(NamedTuple):
    address: str
    task: asyncio.Task[None]
    authenticated: asyncio.Event


PendingPool = dict[ConnectionKey, PendingConnection]
"""In the order in which they came."""


class Listener:
    """`make` gives the protocol of a new connection, as `web.AppRunner.server` does."""

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], access: AccessControl
    ) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._access = access
        self._silent: PendingPool = {}
        self._speaking: PendingPool = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self) -> None:
        tasks = [each.task for each in (*self._silent.values(), *self._speaking.values())]
        if self._accepting is not None:
            tasks.append(self._accepting)
            self._accepting.cancel()
            await asyncio.sleep(0)  # one that was only just taken begins: it closes its own socket
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    def mark_authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """The first request on this connection was let in. It is as good as any other from now on."""
        found = self._speaking.pop(_key(transport), None) if transport is not None else None
        if found is not None:
            found.authenticated.set()

    # ------------------------------------------------------------------------------------------------------- taking

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for taken in itertools.count(1):
            if taken % MAX_ACCEPTS_PER_ITERATION == 0:
                await asyncio.sleep(0)
            try:
                sock, where = await loop.sock_accept(self._sock)
            except OSError as wrong:
                self._access.log.error("no connection can be taken: %s", wrong)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authenticated = asyncio.Event()
            key = (sock.getsockname(), where)
            task = loop.create_task(self._handle_connection(sock, key, authenticated))
            self._admit(self._silent, key, PendingConnection(where[0], task, authenticated))

    def _admit(self, pool: PendingPool, key: ConnectionKey, connection: PendingConnection) -> None:
        if len(pool) >= MAX_PENDING:
            most, _ = Counter(each.address for each in pool.values()).most_common(1)[0]
            oldest = next(key for key, each in pool.items() if each.address == most)
            pool.pop(oldest).task.cancel()
            self._access.reject(TOO_MANY_PENDING, most, "a connection")
        pool[key] = connection

    async def _handle_connection(self, sock: socket.socket, key: ConnectionKey, authenticated: asyncio.Event) -> None:
        """One connection, until it has shown who it is."""
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    first = await _peek_first_byte(sock)
                if first is None:
                    return
                self._admit(self._speaking, key, self._silent.pop(key))
                transport = await self._hand_over(sock, first, key[1][0])
                while transport is not None and not authenticated.is_set() and not transport.is_closing():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PENDING_POLL_INTERVAL_S):
                            await authenticated.wait()
        except TimeoutError:
            self._access.reject(AUTHENTICATION_TIMED_OUT, key[1][0], "a connection")
        except (ConnectionError, OSError):
            pass  # it is gone, and had said nothing yet
        finally:
            for pool in (self._silent, self._speaking):
                if (
                    key in pool and pool[key].authenticated is authenticated
                ):  # not one that came later from the same port
                    del pool[key]
            if transport is None:
                sock.close()
            elif not authenticated.is_set() and isinstance(transport, asyncio.WriteTransport):
                transport.abort()

    async def _hand_over(self, sock: socket.socket, first: int, remote: str) -> asyncio.BaseTransport | None:
        """To the protocol of the requests; None where it was rejected."""
        tls = self._access.tls
        if tls is None:
            if first == TLS_HANDSHAKE_BYTE:
                await self._reject(sock, TLS_ON_PLAIN_TEXT_PORT, remote)
                return None
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(self._make_protocol, sock)
            return transport
        if first != TLS_HANDSHAKE_BYTE:
            await self._reject(sock, PLAIN_TEXT_ON_TLS_PORT if chr(first).isupper() else NOT_TLS, remote)
            return None
        return await self._tls_handshake(sock, tls.context, remote)

    async def _tls_handshake(
        self, sock: socket.socket, context: ssl.SSLContext, remote: str
    ) -> asyncio.BaseTransport | None:
        alerts: list[bytes] = []
        token = TLS_ALERT_HANDLER.set(alerts.append)
        spare = sock.dup()  # asyncio closes the other one at once
        try:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(
                self._make_protocol, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
            return transport
        except ssl.SSLError as wrong:
            self._access.reject(_classify_tls_error(wrong), remote, "a handshake")
            await _send_and_drain(spare, b"".join(alerts))
        except ConnectionAbortedError:  # by asyncio, as it took too long
            self._access.reject(AUTHENTICATION_TIMED_OUT, remote, "a handshake")
        except (ConnectionError, OSError) as wrong:
            broken = Rejection("handshake", 400, f"it broke off{': ' if str(wrong) else ''}{wrong}")
            self._access.reject(broken, remote, "a handshake")
        finally:
            TLS_ALERT_HANDLER.reset(token)
            spare.close()
        return None

    async def _reject(self, sock: socket.socket, rejection: Rejection, remote: str) -> None:
        self._access.reject(rejection, remote, "a connection")
        body = json.dumps({"error": rejection.message}).encode()
        head = f"HTTP/1.1 {rejection.status} Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        said = f"{head}{REFUSED_HEADER}: {rejection.message}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        await _send_and_drain(sock, b"" if rejection is NOT_TLS else said)


def bind_socket(host: str, port: int, listen: bool = False) -> socket.socket:
    """Return a socket that is bound to this address.

    `listen`: reserve the port at once. Two sockets with SO_REUSEADDR may be bound to one port until one of them
    listens.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is not a port; give a number from 0 to 65535 (0: a free port)")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror}; give another --host") from None
    family, kind, _, _, where = found[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
        if listen:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    return sock


def format_address(sock: socket.socket) -> str:
    """Where it listens, as an address is written."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if sock.family is socket.AF_INET6 else f"{host}:{port}"


def _key(transport: asyncio.BaseTransport) -> ConnectionKey:
    return transport.get_extra_info("sockname"), transport.get_extra_info("peername")


def _classify_tls_error(wrong: ssl.SSLError) -> Rejection:
    """Of a handshake that failed on this side."""
    reason = wrong.reason or ""
    if isinstance(wrong, ssl.SSLCertVerificationError):
        return Rejection(
            "authority", 403, f"its key is not of an authority that is trusted here: {wrong.verify_message}"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE", "WRONG_SSL_VERSION"):
        return Rejection("tls-version", 400, "it does not speak TLS 1.3")
    if "ALERT" in reason:
        return Rejection("handshake", 400, f"it hung up: {find_tls_problem(wrong) or reason.lower().replace('_', ' ')}")
    return Rejection("handshake", 400, f"its handshake is wrong: {reason.lower().replace('_', ' ') or wrong}")


async def _peek_first_byte(sock: socket.socket) -> int | None:
    """Without taking it; None when it is closed."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
        first = sock.recv(1, socket.MSG_PEEK)
    finally:
        loop.remove_reader(sock)
    return first[0] if first else None


async def _send_and_drain(sock: socket.socket, said: bytes) -> None:
    """Sent, and what comes meanwhile is thrown away."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LINGER_S):
            if said:
                await loop.sock_sendall(sock, said)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 65536):
                pass
    except (OSError, TimeoutError):
        return
