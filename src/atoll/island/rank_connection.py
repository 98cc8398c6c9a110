"""Connections between the ranks of one island: what is said over them, byte by byte.

Each follower has three of them to its leader, rank 0. Over one its training thread asks at every step boundary and is
answered; over the next its background obeys orders to give or take rows; over the last it is told to send or to fetch
its own (`rank_rpc`). They are plain sockets, and not a group of `torch.distributed`: see docs/design.md.
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
"""For another rank at a step boundary, as `torch.distributed` would wait by default: it may be saving or evaluating."""

RENDEZVOUS_TIMEOUT_S = 120.0
LISTEN_BACKLOG = 1024
CONNECT_TIMEOUT_S = 10.0
CONNECTIONS_PER_RANK = 3
KEEPALIVE = ((15, "TCP_KEEPIDLE"), (5, "TCP_KEEPINTVL"), (6, "TCP_KEEPCNT"))
"""A host that is gone without a word is noticed after 45 seconds of silence."""

_GREETING = struct.Struct("<4s32sIB")
_MAGIC = b"ATLR"
_REQUEST = struct.Struct("<BBxxIq")
_REPLY = struct.Struct("<BBxxIdqqqqq")
_COMMAND = struct.Struct("<BxxxIqq")
MAX_TEXT_BYTES = 1 << 20
MAX_COMMANDS_BYTES = 1 << 28
SKIP_CHUNK_BYTES = 1 << 20


class RankRequest(IntEnum):
    """Why a follower asks. All ranks ask for the same, or the island is out of step."""

    JOIN = 1
    STEP = 2
    PAUSE = 3
    TAKE = 4
    CLOSE = 5
    FAILED = 6


REQUEST_VERBS = {
    RankRequest.JOIN: "enters",
    RankRequest.STEP: "calls step",
    RankRequest.PAUSE: "rests",
    RankRequest.TAKE: "calls take",
    RankRequest.CLOSE: "leaves",
}


class RankCommand(IntEnum):
    """What a leader orders in the background."""

    READ = 1  # give the rows of a fragment as they stand; nobody trains yet
    COPY = 2  # of the copy with this serial
    PART = 3  # of the copy for a snapshot's part
    STATE = 4  # give inner state that was taken
    VERSION = 5  # take the rows of a published version
    EDGES = 6  # of the copy with this serial: give what others encode of it, take what is encoded here
    RELAY = 7  # in the order of the fragment, give what was fetched of a version, and take what others have fetched
    WRITE_SHARD = 16  # write your own of inner state that was taken, in a thread of your own
    WRITE_STATUS = 17  # say whether you have
    LOAD_SHARD = 18  # read your own of a part that was found


RNG_ONLY = 1
"""With STATE: what is dealt out was written to disk already, or is not wanted any more."""


class RankReply(IntEnum):
    OK = 1
    MISSING = 2
    ERROR = 3
    BUSY = 4


class BoundaryStatus(NamedTuple):
    """What every rank is told at every boundary."""

    is_paused: bool = False
    progress: float = 0.0
    steps: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0


class RankConnection:
    """One connection to one rank. Whatever is wrong with it, the island is at its end."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.preemption_level = 0  # notices that the rank at the other end has got, see `Preemption.level`
        self._socket = connection
        connection.settimeout(STEP_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for value, name in KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def nonblocking_socket(self) -> socket.socket:
        """For an event loop, whose it is from now on. Others may still shut it."""
        self._socket.setblocking(False)
        return self._socket

    def disable_timeout(self) -> None:
        """For who waits for orders: there may be none for hours."""
        self._socket.settimeout(None)

    def send(self, *data: bytes | memoryview) -> None:
        try:
            for each in data:
                self._socket.sendall(each)
        except OSError as wrong:
            raise self._connection_error(wrong) from wrong

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        try:
            while view.nbytes:
                got = self._socket.recv_into(view)
                if not got:
                    raise ConnectionError("it has closed the connection")
                view = view[got:]
        except OSError as wrong:
            raise self._connection_error(wrong) from wrong

    def _connection_error(self, wrong: OSError) -> IslandBrokenError:
        who = "rank 0, which leads this island," if self.rank == 0 else f"rank {self.rank} of this island"
        if isinstance(wrong, TimeoutError):
            return IslandBrokenError(f"{who} has not come to this step within {STEP_TIMEOUT_S:.0f} s")
        return IslandBrokenError(f"{who} is gone ({wrong}); an island ends with any of its ranks")

    def shut_down(self) -> None:
        """No more is sent or received; whoever waits for it in another thread waits no longer."""
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
        """Raises what the other rank has failed with."""
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
        order, fragment, first, second = _COMMAND.unpack(self.receive(_COMMAND.size))
        return RankCommand(order), fragment, first, second

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
        """Into a tensor in host memory, whatever its strides."""
        if not tensor.numel():
            return
        if tensor.is_contiguous():
            self.receive_into(tensor_bytes(tensor))
        else:
            came = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.receive_into(tensor_bytes(came))
            tensor.copy_(came)

    def skip(self, size: int) -> None:
        """Receive so many bytes and keep none of them."""
        for begin in range(0, size, SKIP_CHUNK_BYTES):
            self.receive(min(SKIP_CHUNK_BYTES, size - begin))

    def send_json(self, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":")).encode()
        self.send(struct.pack("<I", len(data)) + data)

    def receive_json(self) -> Any:
        (size,) = struct.unpack("<I", self.receive(4))
        return json.loads(self.receive(min(size, MAX_COMMANDS_BYTES)))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def encode_failure(wrong: BaseException | type[BaseException], rank: int) -> bytes:
    """What the other ranks are told."""
    kind = wrong if isinstance(wrong, type) else type(wrong)
    text = "" if isinstance(wrong, type) else str(wrong)[:2000]
    return json.dumps({"rank": rank, "kind": kind.__name__, "text": text}).encode()


def decode_failure(text: bytes, rank: int) -> AtollError:
    """What all ranks of the island raise. What the leader was refused for is raised as such by all."""
    told = json.loads(text)
    known = getattr(errors, str(told["kind"]), None)
    if isinstance(known, type) and issubclass(known, AtollError) and told["text"]:
        return known(told["text"])
    said = f": {told['text']}" if told["text"] else ""
    return IslandBrokenError(f"rank {told.get('rank', rank)} of this island has ended with {told['kind']}{said}")


# ----------------------------------------------------------------------------------------------------------- meeting


def host_identity() -> str:
    """Equal on ranks that reach each other by loopback."""
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
    """A place for the other ranks to come to, and under which names they may find it."""
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
    """The lines to every other rank, each kind in the order of ranks. Who does not know the secret is not let in."""
    until = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    found: dict[tuple[int, int], RankConnection] = {}
    while len(found) < CONNECTIONS_PER_RANK * (size - 1):
        left = until - time.monotonic()
        if left <= 0:
            missing = sorted(
                {rank for rank in range(1, size) for which in range(CONNECTIONS_PER_RANK) if (rank, which) not in found}
            )
            raise IslandBrokenError(f"ranks {missing} of this island have not come within {RENDEZVOUS_TIMEOUT_S:.0f} s")
        listener.settimeout(left)
        with contextlib.suppress(OSError, IslandBrokenError):
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_TIMEOUT_S)
            magic, theirs, rank, which = _GREETING.unpack(_receive_exactly(connection, _GREETING.size))
            if (
                magic != _MAGIC
                or not hmac.compare_digest(theirs, secret)
                or not 0 < rank < size
                or which >= CONNECTIONS_PER_RANK
            ):
                connection.close()
                continue
            connection.sendall(b"\1")
            found[rank, which] = RankConnection(connection, rank)
    return [[found[rank, which] for rank in range(1, size)] for which in range(CONNECTIONS_PER_RANK)]


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def connect_to_leader(addresses: list[tuple[str, int]], secret: bytes, rank: int) -> list[list[RankConnection]]:
    """To the leader, by whichever of its names is reached."""
    until, problem = time.monotonic() + RENDEZVOUS_TIMEOUT_S, ""
    while time.monotonic() < until:
        for address in addresses:
            made = []
            try:
                for which in range(CONNECTIONS_PER_RANK):
                    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
                    connection.sendall(_GREETING.pack(_MAGIC, secret, rank, which))
                    _receive_exactly(connection, 1)
                    made.append(RankConnection(connection, 0))
                return [[line] for line in made]
            except OSError as wrong:
                problem = f"{address[0]}:{address[1]}: {wrong}"
                for line in made:
                    line.close()
        time.sleep(0.2)
    raise IslandBrokenError(f"rank 0, which leads this island, cannot be reached from rank {rank}: {problem}")
