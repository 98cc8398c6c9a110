"""Connections between the ranks of one island, and their wire format.

Each follower has three connections to its leader, rank 0. On the control connection its training thread sends a request
at every step boundary and receives a reply. On the bulk connection its background thread receives commands to send or
receive rows. On the rows connection it receives requests to transfer its own rows (`rank_rpc`). The connections are
plain sockets, and not a process group of `torch.distributed`: see docs/design.md.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll import errors
from atoll.errors import AtollError, IslandBrokenError

STEP_TIMEOUT_S = 1800.0
"""Timeout for another rank at a step boundary, the default of `torch.distributed`: it may be saving or evaluating."""

RENDEZVOUS_TIMEOUT_S = 120.0
LISTEN_BACKLOG = 1024
CONNECT_TIMEOUT_S = 10.0
CONNECTIONS_PER_RANK = 3
KEEPALIVE = ((15, "TCP_KEEPIDLE"), (5, "TCP_KEEPINTVL"), (6, "TCP_KEEPCNT"))
"""A lost host is detected after 45 seconds without a packet."""

_GREETING = struct.Struct("<4s32sIB")
_MAGIC = b"ATLR"
_REQUEST = struct.Struct("<BBxxIq")
_REPLY = struct.Struct("<BBxxIdqqqqq")
_COMMAND = struct.Struct("<BxxxIqq")
MAX_TEXT_BYTES = 1 << 20
MAX_COMMANDS_BYTES = 1 << 28
SKIP_CHUNK_BYTES = 1 << 20


class RankRequest(IntEnum):
    """Request of a follower. All ranks send the same request, or the island is out of step."""

    JOIN = 1
    STEP = 2
    PAUSE = 3
    TAKE = 4
    CLOSE = 5
    FAILED = 6


REQUEST_VERBS = {
    RankRequest.JOIN: "enters",
    RankRequest.STEP: "calls step",
    RankRequest.PAUSE: "pauses",
    RankRequest.TAKE: "calls take",
    RankRequest.CLOSE: "leaves",
}


class RankCommand(IntEnum):
    """Command of the leader to the background thread of a follower."""

    READ = 1  # send the current rows of a fragment; training has not begun
    COPY = 2  # send the rows of the copy with this serial
    PART = 3  # send the rows of the copy for a snapshot's part
    STATE = 4  # send staged optimizer state
    VERSION = 5  # receive the rows of a published version
    EDGES = 6  # exchange values of the copy with this serial, so that each block is at the rank that encodes it
    RELAY = 7  # send fetched rows of a version and receive replicated ones, in the order of the fragment
    WRITE_SHARD = 16  # write this rank's shards of staged optimizer state, in another thread
    WRITE_STATUS = 17  # report whether they are written
    LOAD_SHARD = 18  # read this rank's shards of a part that was found


RNG_ONLY = 1
"""Argument of STATE: send only the states of random generators. The shards are on disk already, or not needed."""


class RankReply(IntEnum):
    OK = 1
    MISSING = 2
    ERROR = 3
    BUSY = 4


class BoundaryStatus(NamedTuple):
    """Status that every rank receives at every boundary."""

    is_paused: bool = False
    progress: float = 0.0
    steps: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0


class RankConnection:
    """Connection to one rank. Any error of it ends the island."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.preemption_level = 0  # level of the rank at the other end, see `Preemption.level`
        self._socket = connection
        connection.settimeout(STEP_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for value, name in KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def nonblocking_socket(self) -> socket.socket:
        """Socket for an event loop, which owns it from now on. Other threads may still shut it down."""
        self._socket.setblocking(False)
        return self._socket

    def disable_timeout(self) -> None:
        """Wait for commands without a timeout: there may be none for hours."""
        self._socket.settimeout(None)

    def send(self, *data: bytes | memoryview) -> None:
        try:
            for each in data:
                self._socket.sendall(each)
        except OSError as error:
            raise self._connection_error(error) from error

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        try:
            while view.nbytes:
                received = self._socket.recv_into(view)
                if not received:
                    raise ConnectionError("it has closed the connection")
                view = view[received:]
        except OSError as error:
            raise self._connection_error(error) from error

    def _connection_error(self, error: OSError) -> IslandBrokenError:
        peer = "rank 0, which leads this island," if self.rank == 0 else f"rank {self.rank} of this island"
        if isinstance(error, TimeoutError):
            return IslandBrokenError(f"{peer} has not reached this step within {STEP_TIMEOUT_S:.0f} s")
        return IslandBrokenError(f"{peer} is lost ({error}); an island ends when one of its ranks ends")

    def shut_down(self) -> None:
        """Stop sending and receiving, and wake the threads that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def shut_down_writes(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.shut_down()
        self._socket.close()

    # -------------------------------------------------------------------------------------------------- step boundaries

    def send_request(self, kind: RankRequest, value: int = 0, text: bytes = b"", preemption_level: int = 0) -> None:
        self.send(_REQUEST.pack(kind, preemption_level, len(text), value) + text)

    def receive_request(self) -> tuple[RankRequest, int]:
        """Receive a request. Raise the error with which the other rank has failed."""
        kind, self.preemption_level, size, value = _REQUEST.unpack(self.receive(_REQUEST.size))
        text = self.receive(min(size, MAX_TEXT_BYTES))
        if kind == RankRequest.FAILED:
            raise decode_failure(text, self.rank)
        return RankRequest(kind), value

    def send_reply(self, status: BoundaryStatus, commands: bytes) -> None:
        self.send(_REPLY.pack(0, status.is_paused, len(commands), *status[1:]) + commands)

    def send_failure(self, text: bytes) -> None:
        self.send(_REPLY.pack(RankRequest.FAILED, 0, len(text), *BoundaryStatus()[1:]) + text)

    def receive_reply(self) -> tuple[BoundaryStatus, list[Any]]:
        failed, paused, size, *rest = _REPLY.unpack(self.receive(_REPLY.size))
        text = self.receive(min(size, MAX_COMMANDS_BYTES))
        if failed:
            raise decode_failure(text, self.rank)
        return BoundaryStatus(bool(paused), *rest), json.loads(text) if text else []

    # ------------------------------------------------------------------------------------------------ in the background

    def send_command(self, command: RankCommand, fragment: int, first: int, second: int = 0) -> None:
        self.send(_COMMAND.pack(command, fragment, first, second))

    def receive_command(self) -> tuple[RankCommand, int, int, int]:
        command, fragment, first, second = _COMMAND.unpack(self.receive(_COMMAND.size))
        return RankCommand(command), fragment, first, second

    def send_result(self, status: RankReply, text: str = "") -> None:
        data = text.encode()[:MAX_TEXT_BYTES]
        self.send(struct.pack("<BI", status, len(data)) + data)

    def receive_result(self) -> tuple[RankReply, str]:
        status, size = struct.unpack("<BI", self.receive(5))
        return RankReply(status), self.receive(min(size, MAX_TEXT_BYTES)).decode()

    # -------------------------------------------------------------------------------------------------- tensors

    def send_tensor(self, tensor: Tensor) -> None:
        if tensor.numel():
            self.send(tensor_bytes(tensor.detach().cpu().contiguous()))

    def receive_tensor(self, tensor: Tensor) -> None:
        """Receive into a tensor in host memory, which may be strided."""
        if not tensor.numel():
            return
        if tensor.is_contiguous():
            self.receive_into(tensor_bytes(tensor))
        else:
            contiguous = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.receive_into(tensor_bytes(contiguous))
            tensor.copy_(contiguous)

    def skip(self, size: int) -> None:
        """Receive and drop this number of bytes."""
        for begin in range(0, size, SKIP_CHUNK_BYTES):
            self.receive(min(SKIP_CHUNK_BYTES, size - begin))

    def send_json(self, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":")).encode()
        self.send(struct.pack("<I", len(data)) + data)

    def receive_json(self) -> Any:
        (size,) = struct.unpack("<I", self.receive(4))
        return json.loads(self.receive(min(size, MAX_COMMANDS_BYTES)))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def encode_failure(error: BaseException | type[BaseException], rank: int) -> bytes:
    """Encode the error of a rank for the other ranks."""
    kind = error if isinstance(error, type) else type(error)
    text = "" if isinstance(error, type) else str(error)[:2000]
    return json.dumps({"rank": rank, "kind": kind.__name__, "text": text}).encode()


def decode_failure(text: bytes, rank: int) -> AtollError:
    """Return the error that all ranks of the island raise. An AtollError of the leader keeps its type."""
    failure = json.loads(text)
    known = getattr(errors, str(failure["kind"]), None)
    if isinstance(known, type) and issubclass(known, AtollError) and failure["text"]:
        return known(failure["text"])
    detail = f": {failure['text']}" if failure["text"] else ""
    return IslandBrokenError(
        f"rank {failure.get('rank', rank)} of this island has ended with {failure['kind']}{detail}"
    )


# ------------------------------------------------------------------------------------------------------- rendezvous


def host_identity() -> str:
    """Return a text that is equal on ranks that reach each other by loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {_network_namespace()}"


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def open_listener(is_one_host: bool) -> tuple[socket.socket, list[tuple[str, int]]]:
    """Open a listener for the other ranks. Return it with the addresses at which they may reach it."""
    if is_one_host:
        listener = socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=LISTEN_BACKLOG)
    else:
        listener = socket.create_server(("", 0), backlog=LISTEN_BACKLOG)
    port = listener.getsockname()[1]
    if is_one_host:
        return listener, [("127.0.0.1", port)]
    names = [os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()]
    with contextlib.suppress(OSError):
        names += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    return listener, [(name, port) for name in dict.fromkeys(names) if name and name != "localhost"]


def accept_ranks(listener: socket.socket, secret: bytes, size: int) -> list[list[RankConnection]]:
    """Return the connections to every other rank, by kind in the order of ranks. Reject peers without the secret."""
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    found: dict[tuple[int, int], RankConnection] = {}
    while len(found) < CONNECTIONS_PER_RANK * (size - 1):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            missing = sorted(
                {rank for rank in range(1, size) for kind in range(CONNECTIONS_PER_RANK) if (rank, kind) not in found}
            )
            raise IslandBrokenError(
                f"ranks {missing} of this island have not connected in {RENDEZVOUS_TIMEOUT_S:.0f} s"
            )
        listener.settimeout(remaining_s)
        with contextlib.suppress(OSError, IslandBrokenError):
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_TIMEOUT_S)
            magic, theirs, rank, kind = _GREETING.unpack(_receive_exactly(connection, _GREETING.size))
            if (
                magic != _MAGIC
                or not hmac.compare_digest(theirs, secret)
                or not 0 < rank < size
                or kind >= CONNECTIONS_PER_RANK
            ):
                connection.close()
                continue
            connection.sendall(b"\1")
            found[rank, kind] = RankConnection(connection, rank)
    return [[found[rank, kind] for rank in range(1, size)] for kind in range(CONNECTIONS_PER_RANK)]


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def connect_to_leader(addresses: list[tuple[str, int]], secret: bytes, rank: int) -> list[list[RankConnection]]:
    """Connect to the leader by the first of its addresses that is reachable."""
    deadline, problem = time.monotonic() + RENDEZVOUS_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        for address in addresses:
            connections = []
            try:
                for kind in range(CONNECTIONS_PER_RANK):
                    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
                    connection.sendall(_GREETING.pack(_MAGIC, secret, rank, kind))
                    _receive_exactly(connection, 1)
                    connections.append(RankConnection(connection, 0))
                return [[each] for each in connections]
            except OSError as error:
                problem = f"{address[0]}:{address[1]}: {error}"
                for each in connections:
                    each.close()
        time.sleep(0.2)
    raise IslandBrokenError(f"rank 0, which leads this island, cannot be reached from rank {rank}: {problem}")
