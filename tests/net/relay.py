"""A wide network in front of a syncer: delay, a cap on bytes, black holes, resets and bytes that change on the way.

Runs in a thread of the test. Connections are taken on a port of its own and led on; nothing of it needs root.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

PIECE_BYTES = 4096

Alter = Callable[[bytes], bytes]


class Counts(NamedTuple):
    """What has passed so far. `up` is towards the syncer."""

    connections: int
    up_bytes: int
    down_bytes: int


class Relay:
    """Leads to `target` ("host:port"). `bytes_per_s` is for each direction, shared by all connections of the link."""

    def __init__(self, target: str, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.alter_down: Alter | None = None  # called with every piece on its way to a learner
        self.address = ""
        self._counts = [0, 0, 0]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._passing = asyncio.Event()
        self._passing.set()
        self._over = asyncio.Event()
        self._free_at = {True: 0.0, False: 0.0}  # when the link has sent what it was given, by direction
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Relay:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------ called by the test

    def counts(self) -> Counts:
        return Counts(*self._counts)

    def black_hole(self, on: bool = True) -> None:
        """Nothing comes through, and nobody is told. What was swallowed arrives when it ends, as with TCP."""
        self._loop.call_soon_threadsafe(self._passing.clear if on else self._passing.set)

    def reset(self) -> None:
        """Break every connection as it stands."""
        self._call(self._reset())

    # ------------------------------------------------------------------------------------------ in the loop

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        assert self._server is not None
        self._over.set()
        self._server.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._counts[0] += 1
        self._writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            await self._passing.wait()
            back, onward = await asyncio.open_connection(*self._target)
            self._writers.add(onward)
            async with asyncio.TaskGroup() as group:
                self._lead(group, reader, onward, True)
                self._lead(group, back, writer, False)
        except* (OSError, asyncio.CancelledError):
            pass  # one end is gone, so is the other; or all of it is over
        finally:
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)
            self._tasks.discard(task)

    def _lead(
        self, group: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        """Read, wait until the link has had time for it, and let it arrive after the delay. In order."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        group.create_task(self._depart(queue, reader, up))
        group.create_task(self._arrive(queue, writer, up))

    async def _depart(self, queue: asyncio.Queue[tuple[float, bytes]], reader: asyncio.StreamReader, up: bool) -> None:
        while data := await reader.read(PIECE_BYTES):
            await queue.put((await self._sent_at(len(data), up) + self.delay_s, data))
        await queue.put((0.0, b""))

    async def _sent_at(self, size: int, up: bool) -> float:
        now = self._loop.time()
        if self.bytes_per_s is None:
            return now
        start = max(now, self._free_at[up])
        self._free_at[up] = start + size / self.bytes_per_s
        await self._wait_until(self._free_at[up])
        return self._loop.time()

    async def _arrive(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, up: bool) -> None:
        while True:
            due, data = await queue.get()
            await self._wait_until(due)
            await self._passing.wait()
            if not data:
                writer.write_eof()
                return
            if not up and self.alter_down is not None:
                data = self.alter_down(data)
            self._counts[1 if up else 2] += len(data)
            writer.write(data)
            await writer.drain()

    async def _wait_until(self, due: float) -> None:
        wait = due - self._loop.time()
        if wait > 0:
            try:
                await asyncio.wait_for(self._over.wait(), wait)
            except TimeoutError:
                return
