"""A link of a learner in user space: what it sends and gets passes here, and can be held, thinned, delayed or damaged.

Needs no root. A relay is an end of TCP on both sides, so a single packet can be neither lost, doubled nor put out of
order here: TCP would hide all three from whoever reads the stream. What a network can do to a stream is to hold it, to
let it through slowly or late, to end it, and to change bytes (where checksums of 16 bits do not see it).
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
    """What has passed so far. `up` is towards the syncer."""

    connections: int
    up_bytes: int
    down_bytes: int
    corrupted_bytes: int
    delayed_chunks: int  # that waited because the link was thin or late


class Relays:
    """All relays of a run, in one thread with one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atoll-relays", daemon=True)
        self._relays: list[Relay] = []
        self._thread.start()

    def open(self, target: str, seed: int = 0, host: str = "127.0.0.1") -> Relay:
        """A relay that leads to `target` ("host:port"), on a port of its own."""
        relay = Relay(self._loop, target, seed, host)
        self._relays.append(relay)
        relay.call(relay.start())
        return relay

    def close(self) -> None:
        """Every connection ends, every port is free, the thread is gone. Closing twice is no mistake."""
        if self._loop.is_closed():
            return
        for relay in self._relays:
            relay.call(relay.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Relay:
    """One link. Everything that is set applies to bytes that arrive from then on, and to new connections."""

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
        self._corrupt_every: dict[bool, float] = {}  # bytes between two damaged ones, on average
        self._until_corruption = {True: 0.0, False: 0.0}
        self._free_at = {True: 0.0, False: 0.0}  # when the link has sent what it was given
        self._counts = [0, 0, 0, 0, 0]
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------ called by injectors

    def counts(self) -> RelayCounts:
        return RelayCounts(*self._counts)

    def cut(self, direction: str = "both", is_cut: bool = True) -> None:
        """Nothing comes through, and nobody is told. What was held arrives when it ends, as TCP would send it again."""
        for up in _directions(direction):
            self._loop.call_soon_threadsafe(self._passing[up].clear if is_cut else self._passing[up].set)

    def throttle(self, bytes_per_s: float | None) -> None:
        """For each direction, shared by all connections of the link."""
        self._loop.call_soon_threadsafe(setattr, self, "_bytes_per_s", bytes_per_s)

    def delay(self, delay_s: float) -> None:
        self._loop.call_soon_threadsafe(setattr, self, "_delay_s", delay_s)

    def corrupt(self, every_bytes: float | None, direction: str = "both") -> None:
        """One byte in so many, on average, is another one when it arrives. None: no more."""

        def begin() -> None:
            self._corrupt_every = {} if every_bytes is None else dict.fromkeys(_directions(direction), every_bytes)
            for up, every in self._corrupt_every.items():
                self._until_corruption[up] = self._rng.expovariate(1.0 / every)

        self._loop.call_soon_threadsafe(begin)

    def reset(self) -> None:
        """Break every connection as it stands."""
        self.call(self._reset())

    # ------------------------------------------------------------------------------------------ in the loop

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            for sock in self._server.sockets:
                self._loop.remove_reader(sock.fileno())  # nobody more is taken
            for _ in range(
                ACCEPT_LOOP_CYCLES
            ):  # who was just taken gets as far as `_taken`; a closed server would lose him
                await asyncio.sleep(0)
            self._server.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # an abort is carried out at the next turn

    async def _reset(self) -> None:
        for writer in list(self._ends):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._counts[0] += 1
        self._ends.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            for passing in self._passing.values():  # a handshake needs both directions
                await passing.wait()
            back, onward = await asyncio.open_connection(*self._target)
            self._ends.add(onward)
            async with asyncio.TaskGroup() as group:
                self._forward(group, reader, onward, True)
                self._forward(group, back, writer, False)
        except* (OSError, asyncio.CancelledError):
            pass  # one end is gone, so is the other; or all of it is over
        finally:
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()
                    self._ends.discard(end)
            self._tasks.discard(task)

    def _forward(
        self, group: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        """Read, wait until the link has had time for it, and let it arrive after the delay. In order."""
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
        """Return a piece as it arrives: with other bytes while the link damages them."""
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


def _directions(way: str) -> tuple[bool, ...]:
    return {"both": (True, False), "up": (True,), "down": (False,)}[way]
