"""Requests of the leader's event loop to the other ranks while a fragment is transferred, and their replies.

There is one connection to each rank. Requests and replies are interleaved: a transfer takes seconds, and several run at
once. A message is its size and a JSON array: `[number, method, arguments]` as a request, `[number, result]` or
`[number, null, kind, text]` as a reply. A newer request for the same fragment cancels the older one.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from atoll.errors import IslandBrokenError
from atoll.island.fragments import CopyUnavailableError
from atoll.island.rank_connection import RankConnection
from atoll.transport.http_client import SyncerRefusedError, describe_network_error
from atoll.transport.wire import WireError

MAX_MESSAGE_BYTES = 1 << 26
_SIZE = struct.Struct("<I")

LOST, REFUSED, DAMAGED, GONE = "lost", "refused", "damaged", "gone"
"""Errors of a transfer: the connection was lost; the syncer refused; the bytes were damaged; a rank lacks the copy."""


class RankRpcClient:
    """Client at the leader for the other ranks. All methods are called in the loop, `open` first."""

    def __init__(self, connections: list[RankConnection]) -> None:
        self._connections = connections
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pending_calls: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._last_call = 0
        self._readers: list[asyncio.Task[None]] = []
        self._lost_ranks: dict[int, str] = {}

    async def open(self) -> None:
        for connection in self._connections:
            reader, self._writers[connection.rank] = await asyncio.open_connection(
                sock=connection.nonblocking_socket, limit=MAX_MESSAGE_BYTES
            )
            self._readers.append(asyncio.ensure_future(self._read(connection.rank, reader)))

    async def call(self, rank: int, method: str, arguments: dict[str, Any]) -> Any:
        if rank in self._lost_ranks:
            raise IslandBrokenError(self._lost_ranks[rank])
        self._last_call += 1
        key = rank, self._last_call
        self._pending_calls[key] = asyncio.get_running_loop().create_future()
        try:
            self._writers[rank].write(_encode_message([self._last_call, method, arguments]))
            return await self._pending_calls[key]
        finally:
            del self._pending_calls[key]

    async def _read(self, rank: int, reader: asyncio.StreamReader) -> None:
        problem = "it has closed the connection"
        try:
            while True:
                number, result, *error = await _read_message(reader)
                pending = self._pending_calls.get((rank, number))
                if pending is None or pending.done():
                    continue  # the call was cancelled
                if error:
                    pending.set_exception(_decode_error(rank, *error))
                else:
                    pending.set_result(result)
        except (OSError, asyncio.IncompleteReadError, ValueError) as caught:
            problem = str(caught) or problem
        self._lost_ranks[rank] = (
            f"rank {rank} of this island is lost ({problem}); an island ends when one of its ranks ends"
        )
        for (target, _), pending in self._pending_calls.items():
            if target == rank and not pending.done():
                pending.set_exception(IslandBrokenError(self._lost_ranks[rank]))


def _decode_error(rank: int, kind: str, text: str) -> Exception:
    text = f"rank {rank}: {text}"
    match kind:
        case "refused":
            return SyncerRefusedError(0, text)
        case "damaged":
            return WireError(text, "digest")
        case "gone":
            return CopyUnavailableError(text)
        case "lost":
            return ConnectionError(text)
    return IslandBrokenError(text)


async def serve_rank_rpc(
    connection: RankConnection, handle: Callable[[str, dict[str, Any]], Coroutine[Any, Any, Any]]
) -> None:
    """Handle requests at another rank until the leader closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection.nonblocking_socket, limit=MAX_MESSAGE_BYTES)
    running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def reply(number: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            message = [number, await handle(method, arguments)]
        except asyncio.CancelledError:
            message = [number, None, LOST, "replaced by a newer request"]
        except Exception as error:
            message = [number, None, *_encode_error(error)]
        writer.write(_encode_message(message))

    try:
        while True:
            number, method, arguments = await _read_message(reader)
            key = method, int(arguments["fragment"])
            older = running.pop(key, None)
            if older is not None:
                older.cancel()
                await asyncio.wait([older])
            running[key] = asyncio.ensure_future(reply(number, method, arguments))
    except (OSError, asyncio.IncompleteReadError):
        return  # the training thread raises it at its next step
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        writer.close()


def _encode_error(error: Exception) -> tuple[str, str]:
    match error:
        case CopyUnavailableError():
            return GONE, str(error)
        case SyncerRefusedError(code="digest"):
            return LOST, str(error)  # the bytes were damaged in transit, and are sent again
        case SyncerRefusedError():
            return REFUSED, str(error)
        case WireError():
            return DAMAGED, str(error)
        case aiohttp.ClientError() | OSError() | TimeoutError():
            return LOST, describe_network_error(error)
    return "broken", f"{type(error).__name__}: {error}"


def _encode_message(message: list[Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return _SIZE.pack(len(data)) + data


async def _read_message(reader: asyncio.StreamReader) -> list[Any]:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
    message: list[Any] = json.loads(await reader.readexactly(size))
    return message
