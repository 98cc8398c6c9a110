"""What the leader's loop asks of the other ranks while a fragment travels, and how they answer.

One line to each of them, over which questions and answers cross: a transfer takes seconds, and several are under way.
A message is its size and a JSON array: `[number, method, arguments]` as a question, `[number, answer]` or
`[number, null, kind, sentence]` as an answer. A newer question about the same fragment ends the older one.
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
"""What became of a transfer: the connection broke; the syncer said no; its bytes were wrong; nobody has the copy."""


class RankRpcClient:
    """At the leader: the other ranks by their numbers. Everything is called in the loop, `open` first."""

    def __init__(self, lines: list[RankConnection]) -> None:
        self._lines = lines
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pending_calls: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._last_call = 0
        self._readers: list[asyncio.Task[None]] = []
        self._lost_ranks: dict[int, str] = {}

    async def open(self) -> None:
        for line in self._lines:
            reader, self._writers[line.rank] = await asyncio.open_connection(
                sock=line.nonblocking_socket, limit=MAX_MESSAGE_BYTES
            )
            self._readers.append(asyncio.ensure_future(self._read(line.rank, reader)))

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
                number, answer, *wrong = await _read_message(reader)
                asked = self._pending_calls.get((rank, number))
                if asked is None or asked.done():
                    continue  # nobody waits for it any more
                if wrong:
                    asked.set_exception(_decode_error(rank, *wrong))
                else:
                    asked.set_result(answer)
        except (OSError, asyncio.IncompleteReadError, ValueError) as found:
            problem = str(found) or problem
        self._lost_ranks[rank] = f"rank {rank} of this island is gone ({problem}); an island ends with any of its ranks"
        for (asked_of, _), asked in self._pending_calls.items():
            if asked_of == rank and not asked.done():
                asked.set_exception(IslandBrokenError(self._lost_ranks[rank]))


def _decode_error(rank: int, kind: str, sentence: str) -> Exception:
    sentence = f"rank {rank}: {sentence}"
    match kind:
        case "refused":
            return SyncerRefusedError(0, sentence)
        case "damaged":
            return WireError(sentence, "digest")
        case "gone":
            return CopyUnavailableError(sentence)
        case "lost":
            return ConnectionError(sentence)
    return IslandBrokenError(sentence)


async def serve_rank_rpc(
    connection: RankConnection, handle: Callable[[str, dict[str, Any]], Coroutine[Any, Any, Any]]
) -> None:
    """At another rank, until the leader hangs up: every question is carried out, and answered."""
    reader, writer = await asyncio.open_connection(sock=connection.nonblocking_socket, limit=MAX_MESSAGE_BYTES)
    under_way: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def answer(number: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            said = [number, await handle(method, arguments)]
        except asyncio.CancelledError:
            said = [number, None, LOST, "something newer was asked"]
        except Exception as wrong:
            said = [number, None, *_encode_error(wrong)]
        writer.write(_encode_message(said))

    try:
        while True:
            number, method, arguments = await _read_message(reader)
            key = method, int(arguments["fragment"])
            older = under_way.pop(key, None)
            if older is not None:
                older.cancel()
                await asyncio.wait([older])
            under_way[key] = asyncio.ensure_future(answer(number, method, arguments))
    except (OSError, asyncio.IncompleteReadError):
        return  # the training thread hears of it at its next step
    finally:
        for task in under_way.values():
            task.cancel()
        await asyncio.gather(*under_way.values(), return_exceptions=True)
        writer.close()


def _encode_error(wrong: Exception) -> tuple[str, str]:
    match wrong:
        case CopyUnavailableError():
            return GONE, str(wrong)
        case SyncerRefusedError(code="digest"):
            return LOST, str(wrong)  # its bytes were damaged on their way, and are brought again
        case SyncerRefusedError():
            return REFUSED, str(wrong)
        case WireError():
            return DAMAGED, str(wrong)
        case aiohttp.ClientError() | OSError() | TimeoutError():
            return LOST, describe_network_error(wrong)
    return "broken", f"{type(wrong).__name__}: {wrong}"


def _encode_message(said: list[Any]) -> bytes:
    data = json.dumps(said, separators=(",", ":")).encode()
    return _SIZE.pack(len(data)) + data


async def _read_message(reader: asyncio.StreamReader) -> list[Any]:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    found: list[Any] = json.loads(await reader.readexactly(size))
    return found
