"""What the leader's loop asks of the other ranks while a fragment travels, and how they answer.

One line to each of them, over which questions and answers cross: a transfer takes seconds, and several are under way.
A message is its size and a JSON array: `[number, word, arguments]` as a question, `[number, answer]` or
`[number, null, kind, sentence]` as an answer. A newer question about the same fragment ends the older one.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from atoll.errors import IslandBroken
from atoll.island.fragments import CopyGone
from atoll.island.rank_connection import RankConnection
from atoll.transport.http_client import Refusal, why
from atoll.transport.wire import WireError

MOST_BYTES = 1 << 26
_SIZE = struct.Struct("<I")

LOST, REFUSED, DAMAGED, GONE = "lost", "refused", "damaged", "gone"
"""What became of a transfer: the connection broke; the syncer said no; its bytes were wrong; nobody has the copy."""


class RankRpcClient:
    """At the leader: the other ranks by their numbers. Everything is called in the loop, `open` first."""

    def __init__(self, lines: list[RankConnection]) -> None:
        self._lines = lines
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._number = 0
        self._reading: list[asyncio.Task[None]] = []
        self._gone: dict[int, str] = {}

    async def open(self) -> None:
        for line in self._lines:
            reader, self._writers[line.rank] = await asyncio.open_connection(sock=line.connection, limit=MOST_BYTES)
            self._reading.append(asyncio.ensure_future(self._read(line.rank, reader)))

    async def ask(self, rank: int, word: str, what: dict[str, Any]) -> Any:
        if rank in self._gone:
            raise IslandBroken(self._gone[rank])
        self._number += 1
        key = rank, self._number
        self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._writers[rank].write(_message([self._number, word, what]))
            return await self._asked[key]
        finally:
            del self._asked[key]

    async def _read(self, rank: int, reader: asyncio.StreamReader) -> None:
        problem = "it has closed the connection"
        try:
            while True:
                number, answer, *wrong = await _next(reader)
                asked = self._asked.get((rank, number))
                if asked is None or asked.done():
                    continue  # nobody waits for it any more
                if wrong:
                    asked.set_exception(_raised(rank, *wrong))
                else:
                    asked.set_result(answer)
        except (OSError, asyncio.IncompleteReadError, ValueError) as found:
            problem = str(found) or problem
        self._gone[rank] = f"rank {rank} of this island is gone ({problem}); an island ends with any of its ranks"
        for (asked_of, _), asked in self._asked.items():
            if asked_of == rank and not asked.done():
                asked.set_exception(IslandBroken(self._gone[rank]))


def _raised(rank: int, kind: str, sentence: str) -> Exception:
    sentence = f"rank {rank}: {sentence}"
    match kind:
        case "refused":
            return Refusal(0, sentence)
        case "damaged":
            return WireError(sentence, "digest")
        case "gone":
            return CopyGone(sentence)
        case "lost":
            return ConnectionError(sentence)
    return IslandBroken(sentence)


async def obey(line: RankConnection, carry_out: Callable[[str, dict[str, Any]], Coroutine[Any, Any, Any]]) -> None:
    """At another rank, until the leader hangs up: every question is carried out, and answered."""
    reader, writer = await asyncio.open_connection(sock=line.connection, limit=MOST_BYTES)
    under_way: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def answer(number: int, word: str, what: dict[str, Any]) -> None:
        try:
            said = [number, await carry_out(word, what)]
        except asyncio.CancelledError:
            said = [number, None, LOST, "something newer was asked"]
        except Exception as wrong:
            said = [number, None, *_told(wrong)]
        writer.write(_message(said))

    try:
        while True:
            number, word, what = await _next(reader)
            key = word, int(what["fragment"])
            older = under_way.pop(key, None)
            if older is not None:
                older.cancel()
                await asyncio.wait([older])
            under_way[key] = asyncio.ensure_future(answer(number, word, what))
    except (OSError, asyncio.IncompleteReadError):
        return  # the training thread hears of it at its next step
    finally:
        for task in under_way.values():
            task.cancel()
        await asyncio.gather(*under_way.values(), return_exceptions=True)
        writer.close()


def _told(wrong: Exception) -> tuple[str, str]:
    match wrong:
        case CopyGone():
            return GONE, str(wrong)
        case Refusal(code="digest"):
            return LOST, str(wrong)  # its bytes were damaged on their way, and are brought again
        case Refusal():
            return REFUSED, str(wrong)
        case WireError():
            return DAMAGED, str(wrong)
        case aiohttp.ClientError() | OSError() | TimeoutError():
            return LOST, why(wrong)
    return "broken", f"{type(wrong).__name__}: {wrong}"


def _message(said: list[Any]) -> bytes:
    data = json.dumps(said, separators=(",", ":")).encode()
    return _SIZE.pack(len(data)) + data


async def _next(reader: asyncio.StreamReader) -> list[Any]:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if size > MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    found: list[Any] = json.loads(await reader.readexactly(size))
    return found
