"""A TCP relay in user space between a learner and the syncer, which can hold, throttle, delay or corrupt the traffic.

Needs no root. The relay ends the TCP connection on both sides, so it cannot lose, duplicate or reorder single packets:
TCP hides all three from the reader of a stream. A network can affect a stream only by holding it, by slowing it down,
by delaying it, by ending it, and by changing bytes (if the 16-bit checksum does not detect it).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from random import Random
from typing import Any, NamedTuple

CHUNK_BYTES = 4096
MAX_QUEUED_CHUNKS = 64
CALL_TIMEOUT_S = 30.0
ACCEPT_LOOP_CYCLES = 10


class RelayCounts(NamedTuple):
    """Traffic counters of a link. `up` is the direction to the syncer."""

    connections: int
    up_bytes: int
    down_bytes: int
    corrupted_bytes: int
    delayed_chunks: int  # chunks held back by `throttle` or `delay`


class Relays:
    """All relays of a run, in one thread with one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atoll-relays", daemon=True)
        self._relays: list[Relay] = []
        self._thread.start()

    def open(self, target: str, seed: int = 0, host: str = "127.0.0.1") -> Relay:
        """Open a relay to `target` ("host:port") on an unused port. The seed draws the corrupted bytes."""
        relay = Relay(self._loop, target, seed, host)
        self._relays.append(relay)
        relay.call(relay.start())
        return relay

    def close(self) -> None:
        """Close all connections and ports, and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        for relay in self._relays:
            relay.call(relay.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Relay:
    """Relay of one link. Settings apply to all bytes that arrive later, on old and new connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: str, seed: int, host: str) -> None:
        name, _, port = target.rpartition(":")
        self.address = ""
        self._loop = loop
        self._target = name, int(port)
        self._host = host
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._passing = {True: asyncio.Event(), False: asyncio.Event()}  # by direction; True is up
        for passing in self._passing.values():
            passing.set()
        self._rng = Random(f"damage/{seed}")
        self._corrupt_every: dict[bool, float] = {}  # bytes between two corrupted ones, on average
        self._until_corruption = {True: 0.0, False: 0.0}
        self._free_at = {True: 0.0, False: 0.0}  # time at which the link has sent all bytes
        self._counts = [0, 0, 0, 0, 0]
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------ called by injectors

    def counts(self) -> RelayCounts:
        return RelayCounts(*self._counts)

    def cut(self, direction: str = "both", is_cut: bool = True) -> None:
        """Hold all bytes without notifying either end. They arrive when the cut ends, as TCP would resend them."""
        for up in _directions(direction):
            self._loop.call_soon_threadsafe(self._passing[up].clear if is_cut else self._passing[up].set)

    def throttle(self, bytes_per_s: float | None) -> None:
        """Limit the rate in each direction, shared by all connections of the link. None: no limit."""
        self._loop.call_soon_threadsafe(setattr, self, "_bytes_per_s", bytes_per_s)

    def delay(self, delay_s: float) -> None:
        self._loop.call_soon_threadsafe(setattr, self, "_delay_s", delay_s)

    def corrupt(self, every_bytes: float | None, direction: str = "both") -> None:
        """Change one byte in `every_bytes`, on average. None ends it."""

        def begin() -> None:
            self._corrupt_every = {} if every_bytes is None else dict.fromkeys(_directions(direction), every_bytes)
            for up, every in self._corrupt_every.items():
                self._until_corruption[up] = self._rng.expovariate(1.0 / every)

        self._loop.call_soon_threadsafe(begin)

    def reset(self) -> None:
        """Abort all connections."""
        self.call(self._reset())

    # ------------------------------------------------------------------------------------------ in the loop

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            for sock in self._server.sockets:
                self._loop.remove_reader(sock.fileno())  # accept no more connections
            # Connections that were just accepted reach `_accept`, which a closed server would not run.
            for _ in range(ACCEPT_LOOP_CYCLES):
                await asyncio.sleep(0)
            self._server.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborts run in the next cycle of the loop

    async def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._counts[0] += 1
        self._writers.add(writer)
        server_writer: asyncio.StreamWriter | None = None
        try:
            for passing in self._passing.values():  # a handshake needs both directions
                await passing.wait()
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            self._writers.add(server_writer)
            async with asyncio.TaskGroup() as group:
                self._forward(group, reader, server_writer, True)
                self._forward(group, server_reader, writer, False)
        except* (OSError, asyncio.CancelledError):
            pass  # one end has closed, so close the other; or the relay stops
        finally:
            for each in (writer, server_writer):
                if each is not None:
                    each.transport.abort()
                    self._writers.discard(each)
            self._tasks.discard(task)

    def _forward(
        self, group: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        """Forward chunks in order, at the rate and with the delay of the link."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED_CHUNKS)
        group.create_task(self._read_chunks(queue, reader, up))
        group.create_task(self._write_chunks(queue, writer, up))

    async def _read_chunks(
        self, queue: asyncio.Queue[tuple[float, bytes]], reader: asyncio.StreamReader, up: bool
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._wait_for_capacity(len(data), up)
            if self._delay_s or self._bytes_per_s is not None:
                self._counts[4] += 1
            await queue.put((self._loop.time() + self._delay_s, data))
        await queue.put((0.0, b""))

    async def _wait_for_capacity(self, size: int, up: bool) -> None:
        if self._bytes_per_s is None:
            return
        self._free_at[up] = max(self._loop.time(), self._free_at[up]) + size / self._bytes_per_s
        await self._wait_until(self._free_at[up])

    async def _write_chunks(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, up: bool
    ) -> None:
        while True:
            due, data = await queue.get()
            await self._wait_until(due)
            await self._passing[up].wait()
            if not data:
                writer.write_eof()
                return
            data = self.transform_chunk(data, up)
            self._counts[1 if up else 2] += len(data)
            writer.write(data)
            await writer.drain()

    async def _wait_until(self, due: float) -> None:
        wait = due - self._loop.time()
        if wait > 0:
            await asyncio.sleep(wait)

    def transform_chunk(self, data: bytes, up: bool) -> bytes:
        """Return a chunk as it arrives, with corrupted bytes if the link has that fault."""
        if up not in self._corrupt_every:
            return data
        changed = bytearray(data)
        at = self._until_corruption[up]
        while at < len(changed):
            changed[int(at)] ^= 1 << self._rng.randrange(8)
            self._counts[3] += 1
            at += 1.0 + self._rng.expovariate(1.0 / self._corrupt_every[up])
        self._until_corruption[up] = at - len(changed)
        return bytes(changed)


def _directions(direction: str) -> tuple[bool, ...]:
    return {"both": (True, False), "up": (True,), "down": (False,)}[direction]
