"""Values of fragments between a learner and whoever has them, in the background: contributions up, versions down.

What is large is in several stages at once: bytes are sent while later ones are still encoded, and added to the value
while later ones still arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import aiohttp

from atoll.core.protocol import Contribution, Envelope, FragmentDamaged, LearnerEvent, Published
from atoll.core.types import FragmentId, RoundId
from atoll.island.fragments import Buffer, Copied, CopyGone, FragmentTensors, RowFragment, ValueInWork
from atoll.island.row_transfer import RowTraffic
from atoll.learner.driver import LearnerDriver
from atoll.learner.join import RETRY_S
from atoll.logs import about
from atoll.transport.buffers import StreamingBuffer
from atoll.transport.http_client import (
    FetchedFragment,
    LearnerBulk,
    LearnerLink,
    LinkClosedError,
    Refusal,
    fragment_sizes,
    why,
)
from atoll.transport.wire import CODEC_NUMBERS, WireError

T = TypeVar("T")
FETCH_TRIES = 3
FETCHES = UPLOADS = 4
"""At once: more would only share the link, and all of them would come late. One who leaves is asked for everything."""

SMALL_BYTES = 2**18
"""A contribution of less does not count: on a long way it waits for its answer, and many have to be in flight."""


class FragmentTraffic:
    """Of one learner. `spawn` starts a task, `tell` tells the core of an event, `drain` carries out what it wants."""

    def __init__(
        self,
        link: LearnerLink,
        bulk: LearnerBulk,
        compute: ThreadPoolExecutor,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tell: Callable[[LearnerEvent], None],
        drain: Callable[[], None],
    ) -> None:
        self._link = link
        self._bulk = bulk
        self._compute = compute
        self._spawn = spawn
        self._tell = tell
        self._drain = drain
        self._log = link.log
        self._driver: LearnerDriver | None = None
        self._fragments: list[FragmentTensors] = []
        self._downs: tuple[str, ...] = ()
        self._noticed: dict[FragmentId, Envelope] = {}  # newest notice of each fragment that is being fetched
        self._fetching: set[FragmentId] = set()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._places_up = asyncio.Semaphore(UPLOADS)
        self._uploads: dict[FragmentId, tuple[RoundId, asyncio.Task[None]]] = {}
        self.rows: RowTraffic | None = None  # in an island whose ranks send and fetch their own

    def begin(self, driver: LearnerDriver, fragments: list[FragmentTensors], downs: tuple[str, ...]) -> None:
        """One incarnation of it."""
        self._driver, self._fragments, self._downs = driver, fragments, downs

    def detach(self) -> None:
        """Stop telling the core of events."""
        self._driver = None

    def end(self) -> None:
        """Its tasks are over, or cancelled."""
        self._noticed.clear()
        self._uploads.clear()

    # ---------------------------------------------------------------------------------------------------- up

    def contribute(self, envelope: Envelope, body: Contribution) -> None:
        round_id, upload = self._uploads.get(body.round.fragment, (None, None))
        if upload is not None and not upload.done():
            if round_id == body.round:
                return  # asked once more, and on its way: on a thin link a new start would never come to its end
            upload.cancel()  # a newer copy of the same fragment; nobody wants the older one
        self._uploads[body.round.fragment] = (body.round, self._spawn(self._contribute(envelope, body)))

    async def _contribute(self, envelope: Envelope, body: Contribution) -> None:
        driver, fragment = self._driver, self._fragments[body.round.fragment]
        if driver is None:
            return
        with driver.lock:
            copied = fragment.hold_copy()
        if copied is None:
            return
        if copied.round != body.round:
            fragment.release(copied.buffer, copied.anchor)
            return
        named = about("fragment", fragment.p, version=body.round.base)
        with ExitStack() as held:
            held.callback(fragment.release, copied.buffer, copied.anchor)
            try:
                await self._link.while_open(self._bring(fragment, copied, envelope, body, held))
            except CopyGone:
                return
            except Refusal as refusal:
                self._log.info("the contribution to fragment %d was not taken: %s", fragment.p, refusal, extra=named)
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                # It is asked for again.
                said = "the contribution to fragment %d did not arrive: %s"
                self._log.info(said, fragment.p, why(wrong), extra=named)

    async def _bring(
        self, fragment: FragmentTensors, copied: Copied, envelope: Envelope, body: Contribution, held: ExitStack
    ) -> None:
        """`held`: what is let go when this ends, or when the computing thread has encoded it."""
        size = copied.codec.size(fragment.whole_numel)
        async with self._places_up if size > SMALL_BYTES else nullcontext():
            if fragment.rows is not None:
                assert self.rows is not None
                await self.rows.contribute(fragment.rows, copied, envelope, body, held.pop_all())
            else:
                await self._encode_and_send(fragment, copied, envelope, StreamingBuffer(size), held.pop_all())

    async def _encode_and_send(
        self, fragment: FragmentTensors, copied: Copied, envelope: Envelope, growing: StreamingBuffer, held: ExitStack
    ) -> None:
        def encoded(done: Future[None]) -> None:
            held.close()
            wrong = None if done.cancelled() else done.exception()
            is_gone = done.cancelled() or isinstance(wrong, CancelledError)  # the training thread never made the copy
            growing.ended(CopyGone() if is_gone else wrong)

        self._compute.submit(fragment.encode, copied, growing).add_done_callback(encoded)
        await self._bulk.contribute(CODEC_NUMBERS[copied.codec.name], envelope, growing)

    # ---------------------------------------------------------------------------------------------------- down

    def notice(self, envelope: Envelope, body: Published) -> None:
        """One fetch per fragment at a time; what is noticed meanwhile takes the place of what was noticed before."""
        self._noticed[body.fragment] = envelope
        if body.fragment not in self._fetching:
            self._fetching.add(body.fragment)
            self._spawn(self._fetch(body.fragment))

    async def _fetch(self, p: FragmentId) -> None:
        try:
            while p in self._noticed:
                envelope = self._noticed.pop(p)
                assert isinstance(envelope.body, Published)
                await self._fetch_one(p, envelope, envelope.body)
        finally:
            self._fetching.discard(p)

    async def _fetch_one(self, p: FragmentId, envelope: Envelope, body: Published) -> None:
        driver = self._driver
        if driver is None:
            return
        if not 0 <= p < len(self._fragments):
            self._log.warning("the syncer tells of fragment %d, which this model does not have", p)
            return
        fragment = self._fragments[p]
        with driver.lock:
            known = body.version <= fragment.newest_version
            base = fragment.hold_newest(body.base) if body.base is not None else None
        if known or (body.base is not None and base is None):
            fragment.release(base)
            self._deliver(envelope, fragment, body)  # the core acknowledges what it has, or requests the whole value
            return
        if fragment.rows is not None:
            fragment.release(base)
            value = await self._fetch_rows(fragment.rows, body)
        else:
            value = await self._fetch_whole(fragment, base, body)
        if value is not None:
            self._deliver(envelope, fragment, body, value)

    def _deliver(
        self, envelope: Envelope, fragment: FragmentTensors, body: Published, value: Buffer | None = None
    ) -> None:
        """Give the core a publish message: the only way by which one reaches it. `value`: all ranks have their rows of
        it; None if there was nothing to fetch."""
        is_kept = self._driver is not None and self._driver.receive_version(envelope, fragment, body.version, value)
        if not is_kept:
            fragment.release(value)
        self._drain()

    async def _fetch_whole(self, fragment: FragmentTensors, base: Buffer | None, body: Published) -> Buffer | None:
        """Return the value when all ranks have their rows of it; None if there is none, as the core has been told."""
        p, arriving = fragment.p, _Arriving(fragment, base, self._compute)
        sizes = fragment_sizes(fragment.numel, fragment.tensors.codecs(self._downs))
        try:
            fetched = await self._tried(
                body, lambda: self._bulk.fetch(p, body.version, body.base, sizes, arriving.on_bytes)
            )
            if fetched is None:
                return None
            value = await arriving.whole(fetched)
            if value is None:
                self._refuse(body)
            else:
                await asyncio.get_running_loop().run_in_executor(self._compute, fragment.share, body.version, value)
            self._bulk.give_back(fetched)
            return arriving.taken() if value is not None else None
        finally:
            arriving.end()

    async def _fetch_rows(self, fragment: RowFragment, body: Published) -> Buffer | None:
        """Return rank 0's rows when all ranks have theirs; None if there are none, as the core has been told."""
        rows, downs = self.rows, self._downs
        assert rows is not None
        found = await self._tried(body, lambda: rows.fetch(fragment, body.version, body.base, downs))
        if found == (None,):
            self._refuse(body)
        return found[0] if found is not None else None

    def _refuse(self, body: Published) -> None:
        self._tell(FragmentDamaged(body.fragment, body.version, "the value is not the one that was published"))

    async def _tried(self, body: Published, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Every notice is answered: a version that cannot be had is told to the core, which asks for another one."""
        p, problem = body.fragment, ""
        for attempt in range(FETCH_TRIES):
            try:
                async with self._fetches:
                    if p in self._noticed:
                        return None  # a newer one
                    return await self._link.while_open(fetch())
            except LinkClosedError:
                return None  # everything that is missing is told of on the next one
            except (Refusal, WireError) as wrong:
                problem = str(wrong)
                break
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                problem = why(wrong)
                named = about("fragment", p, version=body.version)
                self._log.info("fragment %d at version %d did not arrive: %s", p, body.version, problem, extra=named)
                await asyncio.sleep(RETRY_S * 2**attempt)
        self._tell(FragmentDamaged(p, body.version, problem))
        return None

    async def fetch_final(self, fragment: FragmentTensors, version: int, downs: tuple[str, ...]) -> Buffer | None:
        """The whole value, when the run is over."""
        if fragment.rows is not None:
            assert self.rows is not None
            (value,) = await self.rows.fetch(fragment.rows, version, None, downs)
            return value
        sizes = fragment_sizes(fragment.numel, fragment.tensors.codecs(downs))
        fetched = await self._bulk.fetch(fragment.p, version, None, sizes)
        work = fragment.decode_whole(fetched.data)
        if work.digest() != fetched.header.value_digest:
            return None
        fragment.share(version, work.buffer)
        return work.buffer


class _Arriving:
    """The value of one version, put together by the computing thread in the order in which its bytes come in."""

    def __init__(self, fragment: FragmentTensors, base: Buffer | None, compute: ThreadPoolExecutor) -> None:
        self._fragment = fragment
        self._base = base
        self._compute = compute
        self._fetched: FetchedFragment | None = None
        self._work: ValueInWork | None = None
        self._newest: Future[None] | None = None

    def on_bytes(self, fetched: FetchedFragment, first_bytes: int) -> None:
        self._newest = self._compute.submit(self._go_on, fetched, first_bytes)

    async def whole(self, fetched: FetchedFragment) -> Buffer | None:
        """All its bytes are here; None: they make another value than the one that was published."""
        self.on_bytes(fetched, fetched.header.of)
        assert self._newest is not None
        await asyncio.wrap_future(self._newest)  # those before it have ended: there is one thread
        assert self._work is not None
        return self._work.buffer if self._work.digest() == fetched.header.value_digest else None

    def taken(self) -> Buffer:
        """It is somebody else's now."""
        assert self._work is not None
        work, self._work = self._work, None
        return work.buffer

    def end(self) -> None:
        """After what the computing thread still does with it."""
        self._compute.submit(self._release, self._base)

    # In the computing thread: a buffer that is new takes its time.

    def _go_on(self, fetched: FetchedFragment, first_bytes: int) -> None:
        if self._fetched is None or fetched.data is not self._fetched.data:
            self._release()  # the syncer had started again, and serves other bytes
            base = self._base if fetched.header.base is not None else None
            self._fetched, self._work = fetched, self._fragment.begin_value(base, fetched.data, fetched.codec)
        assert self._work is not None
        self._work.go_on(first_bytes)

    def _release(self, *others: Buffer | None) -> None:
        work, self._work = self._work, None
        self._fragment.release(work.buffer if work is not None else None, *others)
