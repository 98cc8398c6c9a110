"""The listening port of a syncer. A new connection must authenticate in time.

A connection is **pending** until its first request is accepted. A pending connection must be cheap: until its first
byte it is only a socket, its handshake has a timeout, and the number of pending connections is limited. Beyond the
limit, the oldest connection of the address with the most pending connections is closed. So a client that opens
thousands of connections displaces only its own.

Pending connections with and without a first byte are counted separately. A learner sends its first byte as soon as it
is connected. With one pool, a process at the same address that opens thousands of connections and sends nothing would
displace the learner during its handshake.
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
"""Timeout for the first byte, and then for the handshake."""

AUTHENTICATION_TIMEOUT_S = 30.0
"""Timeout for the first accepted request."""

MAX_PENDING = 256
"""Limit of pending connections: for those without a first byte, and for those with one."""

BACKLOG = 512
MAX_ACCEPTS_PER_ITERATION = 16
"""Connections that are accepted before other tasks run, far fewer than the limit. `sock_accept` does not yield while
connections wait at the port: (1) a learner connects and sends its first bytes, (2) another client fills the backlog
after it, (3) all are accepted without a pause, and the learner, now the oldest, is closed before its bytes are read.
A client that connects faster than the syncer accepts would even block the whole event loop."""

LINGER_S = 1.0
"""Time for the client to read the last message: closing a socket with unread input also discards sent bytes."""

PENDING_POLL_INTERVAL_S = 0.5
ACCEPT_RETRY_S = 0.5
"""Wait after an error of accept, for example when the process has no free file descriptors."""

TLS_HANDSHAKE_BYTE = 0x16
"""First byte of every TLS connection. No HTTP method begins with it."""

PLAIN_TEXT_ON_TLS_PORT = Rejection(
    "plain-text",
    400,
    "this port requires TLS, and the client sent plain text: give --keys DIR or --ca FILE, or write https://",
)
TLS_ON_PLAIN_TEXT_PORT = Rejection(
    "tls-to-plain", 400, "the client started TLS, but this syncer has no keys and accepts plain text only"
)
NOT_TLS = Rejection("handshake", 400, "the first byte is not that of a TLS handshake")
TOO_MANY_PENDING = Rejection("unfinished", 408, "too many connections without authentication")
AUTHENTICATION_TIMED_OUT = Rejection("unfinished", 408, "authentication timed out")

ConnectionKey = tuple[Any, Any]


class PendingConnection(NamedTuple):
    address: str
    task: asyncio.Task[None]
    authenticated: asyncio.Event


PendingPool = dict[ConnectionKey, PendingConnection]
"""Pending connections, oldest first."""


class Listener:
    """Accept connections. `make_protocol` creates the protocol of a new one, as `web.AppRunner.server` does."""

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], access: AccessControl
    ) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._access = access
        self._without_first_byte: PendingPool = {}
        self._with_first_byte: PendingPool = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self) -> None:
        tasks = [each.task for each in (*self._without_first_byte.values(), *self._with_first_byte.values())]
        if self._accepting is not None:
            tasks.append(self._accepting)
            self._accepting.cancel()
            await asyncio.sleep(0)  # let the task of a connection that was just accepted start: it closes its socket
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    def mark_authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """End the pending state of a connection: its first request was accepted."""
        pending = self._with_first_byte.pop(_key(transport), None) if transport is not None else None
        if pending is not None:
            pending.authenticated.set()

    # ------------------------------------------------------------------------------------------------------- accepting

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for count in itertools.count(1):
            if count % MAX_ACCEPTS_PER_ITERATION == 0:
                await asyncio.sleep(0)
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                self._access.log.error("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authenticated = asyncio.Event()
            key = (sock.getsockname(), address)
            task = loop.create_task(self._handle_connection(sock, key, authenticated))
            self._admit(self._without_first_byte, key, PendingConnection(address[0], task, authenticated))

    def _admit(self, pool: PendingPool, key: ConnectionKey, connection: PendingConnection) -> None:
        if len(pool) >= MAX_PENDING:
            address, _ = Counter(each.address for each in pool.values()).most_common(1)[0]
            oldest = next(key for key, each in pool.items() if each.address == address)
            pool.pop(oldest).task.cancel()
            self._access.reject(TOO_MANY_PENDING, address, "a connection")
        pool[key] = connection

    async def _handle_connection(self, sock: socket.socket, key: ConnectionKey, authenticated: asyncio.Event) -> None:
        """Handle one connection until it is authenticated."""
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    first = await _peek_first_byte(sock)
                if first is None:
                    return
                self._admit(self._with_first_byte, key, self._without_first_byte.pop(key))
                transport = await self._connect_protocol(sock, first, key[1][0])
                while transport is not None and not authenticated.is_set() and not transport.is_closing():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PENDING_POLL_INTERVAL_S):
                            await authenticated.wait()
        except TimeoutError:
            self._access.reject(AUTHENTICATION_TIMED_OUT, key[1][0], "a connection")
        except (ConnectionError, OSError):
            pass  # the client disconnected
        finally:
            for pool in (self._without_first_byte, self._with_first_byte):
                # a later connection from the same port has the same key
                if key in pool and pool[key].authenticated is authenticated:
                    del pool[key]
            if transport is None:
                sock.close()
            elif not authenticated.is_set() and isinstance(transport, asyncio.WriteTransport):
                transport.abort()

    async def _connect_protocol(self, sock: socket.socket, first: int, remote: str) -> asyncio.BaseTransport | None:
        """Connect the socket to the HTTP protocol. Return None if the connection was rejected."""
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
        spare = sock.dup()  # to send the TLS alert: asyncio closes `sock` as soon as the handshake fails
        try:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(
                self._make_protocol, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
            return transport
        except ssl.SSLError as error:
            self._access.reject(_classify_tls_error(error), remote, "a handshake")
            await _send_and_drain(spare, b"".join(alerts))
        except ConnectionAbortedError:  # asyncio raises this after the timeout of the handshake
            self._access.reject(AUTHENTICATION_TIMED_OUT, remote, "a handshake")
        except (ConnectionError, OSError) as error:
            rejection = Rejection("handshake", 400, f"connection lost{': ' if str(error) else ''}{error}")
            self._access.reject(rejection, remote, "a handshake")
        finally:
            TLS_ALERT_HANDLER.reset(token)
            spare.close()
        return None

    async def _reject(self, sock: socket.socket, rejection: Rejection, remote: str) -> None:
        self._access.reject(rejection, remote, "a connection")
        body = json.dumps({"error": rejection.message}).encode()
        head = f"HTTP/1.1 {rejection.status} Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reply = f"{head}{REFUSED_HEADER}: {rejection.message}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        await _send_and_drain(sock, b"" if rejection is NOT_TLS else reply)


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
    family, kind, _, _, address = found[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        if listen:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    return sock


def format_address(sock: socket.socket) -> str:
    """Return the address of a listening socket as `host:port`."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if sock.family is socket.AF_INET6 else f"{host}:{port}"


def _key(transport: asyncio.BaseTransport) -> ConnectionKey:
    return transport.get_extra_info("sockname"), transport.get_extra_info("peername")


def _classify_tls_error(error: ssl.SSLError) -> Rejection:
    """Return the rejection for a handshake that failed on this side."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Rejection(
            "authority", 403, f"its key is not signed by an authority that is trusted here: {error.verify_message}"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE", "WRONG_SSL_VERSION"):
        return Rejection("tls-version", 400, "it does not support TLS 1.3")
    if "ALERT" in reason:
        return Rejection(
            "handshake", 400, f"it closed the connection: {find_tls_problem(error) or reason.lower().replace('_', ' ')}"
        )
    return Rejection("handshake", 400, f"its handshake is invalid: {reason.lower().replace('_', ' ') or error}")


async def _peek_first_byte(sock: socket.socket) -> int | None:
    """Return the first byte without consuming it, or None if the connection is closed."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
        first = sock.recv(1, socket.MSG_PEEK)
    finally:
        loop.remove_reader(sock)
    return first[0] if first else None


async def _send_and_drain(sock: socket.socket, data: bytes) -> None:
    """Send the data, and discard input until the client closes the connection."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LINGER_S):
            if data:
                await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 65536):
                pass
    except (OSError, TimeoutError):
        return
