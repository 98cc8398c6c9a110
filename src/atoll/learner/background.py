"""The background thread of a learner: its connections, its encoding and decoding, its tape.

Nothing here is waited for by the training thread, except while it joins. Whatever goes wrong here is either a lost
link, which is said and dialled again, or our bug, which `check` raises in the training thread.

Values of fragments, contributions up and versions down, are in several stages at once where they are large: bytes are
sent while later ones are still encoded, and added to the value while later ones still arrive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
from torch import Tensor

from atoll.core.protocol import (
    AdoptFragment,
    CloseConnection,
    ConnectionClosed,
    Contribution,
    Dial,
    DialFailed,
    Effect,
    Envelope,
    FragmentDamaged,
    LearnerEvent,
    LogReason,
    MessageArrived,
    NoPeer,
    OptimizerState,
    Published,
    RefuseContribution,
    SaveSnapshot,
    Send,
    StateRejected,
    TimerFired,
    Welcome,
)
from atoll.core.types import FragmentId, RoundId, Version
from atoll.errors import AtollError, BackgroundFailedError, IslandBrokenError, SyncerUnreachableError
from atoll.island.boundary import summarize_error
from atoll.island.fragments import Buffer, CopyUnavailableError, FragmentTensors, IncomingValue, PulledCopy, RowFragment
from atoll.island.leader import Leader
from atoll.island.rank_connection import RankConnection
from atoll.island.rank_rpc import RankRpcClient, serve_rank_rpc
from atoll.island.row_transfer import RankRowTransfer, RowTransferCoordinator
from atoll.island.stats import LearnerStats
from atoll.learner.driver import LearnerDriver
from atoll.learner.join import LOG_INTERVAL_S, RETRY_INTERVAL_S, JoinClient
from atoll.learner.part_writer import PartWriter
from atoll.logs import WARNING_REASONS, LogRateLimiter, ReasonLogger, log_fields
from atoll.store.optimizer_state_files import StateFile, pack_to_file
from atoll.store.run_settings import RunSettings
from atoll.tensors import optimizer_state
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.transport.buffers import StreamingBuffer
from atoll.transport.endpoint import Endpoint
from atoll.transport.http_client import (
    DownloadedFragment,
    FragmentClient,
    LearnerLink,
    LinkClosedError,
    LinkEvent,
    SyncerRefusedError,
    describe_network_error,
    fragment_sizes,
)
from atoll.transport.pacing import DEFAULT_STREAMS
from atoll.transport.wire import CODEC_NUMBERS, FrameKind, WireError, encode_message, max_state_bytes

T = TypeVar("T")
DOWNLOAD_ATTEMPTS = 3
MAX_CONCURRENT_DOWNLOADS = MAX_CONCURRENT_UPLOADS = 4
"""At once: more would only share the link, and all of them would come late. One who leaves is asked for everything."""

SMALL_UPLOAD_BYTES = 2**18
"""A contribution of less does not count: on a long way it waits for its answer, and many have to be in flight."""


class FragmentTransfer:
    """Contributions up and published versions down, in the loop of a learner's background thread."""

    def __init__(self, background: BackgroundThread) -> None:
        self._background = background
        self._link, self._bulk, self._compute = background.link, background.bulk, background.compute
        self._log = background.log
        self._newest_published: dict[FragmentId, Envelope] = {}  # newest notice of each fragment that is being fetched
        self._downloading: set[FragmentId] = set()
        self._download_slots = asyncio.Semaphore(MAX_CONCURRENT_DOWNLOADS)
        self._upload_slots = asyncio.Semaphore(MAX_CONCURRENT_UPLOADS)
        self._uploads: dict[FragmentId, tuple[RoundId, asyncio.Task[None]]] = {}
        self.row_transfer: RowTransferCoordinator | None = None  # in an island whose ranks send and fetch their own

    def clear(self) -> None:
        """Its tasks are over, or cancelled."""
        self._newest_published.clear()
        self._uploads.clear()

    # ---------------------------------------------------------------------------------------------------- up

    def contribute(self, envelope: Envelope, body: Contribution) -> None:
        round_id, upload = self._uploads.get(body.round.fragment, (None, None))
        if upload is not None and not upload.done():
            if round_id == body.round:
                return  # asked once more, and on its way: on a thin link a new start would never come to its end
            upload.cancel()  # a newer copy of the same fragment; nobody wants the older one
        self._uploads[body.round.fragment] = (body.round, self._background.spawn(self._contribute(envelope, body)))

    async def _contribute(self, envelope: Envelope, body: Contribution) -> None:
        driver, fragment = self._background.driver, self._background.fragments[body.round.fragment]
        if driver is None:
            return
        with driver.lock:
            copied = fragment.retain_copy()
        if copied is None:
            return
        if copied.round != body.round:
            fragment.release(copied.buffer, copied.anchor)
            return
        named = log_fields("fragment", fragment.p, version=body.round.base)
        with ExitStack() as held:
            held.callback(fragment.release, copied.buffer, copied.anchor)
            try:
                await self._link.while_open(self._upload(fragment, copied, envelope, body, held))
            except CopyUnavailableError:
                return
            except SyncerRefusedError as refusal:
                self._log.info("the contribution to fragment %d was not taken: %s", fragment.p, refusal, extra=named)
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                # It is asked for again.
                said = "the contribution to fragment %d did not arrive: %s"
                self._log.info(said, fragment.p, describe_network_error(wrong), extra=named)

    async def _upload(
        self, fragment: FragmentTensors, copied: PulledCopy, envelope: Envelope, body: Contribution, held: ExitStack
    ) -> None:
        """`held`: what is let go when this ends, or when the computing thread has encoded it."""
        size = copied.codec.encoded_size(fragment.whole_numel)
        async with self._upload_slots if size > SMALL_UPLOAD_BYTES else nullcontext():
            if fragment.rows is not None:
                assert self.row_transfer is not None
                await self.row_transfer.contribute(fragment.rows, copied, envelope, body, held.pop_all())
            else:
                await self._encode_and_send(fragment, copied, envelope, StreamingBuffer(size), held.pop_all())

    async def _encode_and_send(
        self,
        fragment: FragmentTensors,
        copied: PulledCopy,
        envelope: Envelope,
        growing: StreamingBuffer,
        held: ExitStack,
    ) -> None:
        def encoded(done: Future[None]) -> None:
            held.close()
            wrong = None if done.cancelled() else done.exception()
            is_gone = done.cancelled() or isinstance(wrong, CancelledError)  # the training thread never made the copy
            growing.finish(CopyUnavailableError() if is_gone else wrong)

        self._compute.submit(fragment.encode, copied, growing).add_done_callback(encoded)
        await self._bulk.upload_contribution(CODEC_NUMBERS[copied.codec.name], envelope, growing)

    # ---------------------------------------------------------------------------------------------------- down

    def handle_published(self, envelope: Envelope, body: Published) -> None:
        """One fetch per fragment at a time; what is noticed meanwhile takes the place of what was noticed before."""
        self._newest_published[body.fragment] = envelope
        if body.fragment not in self._downloading:
            self._downloading.add(body.fragment)
            self._background.spawn(self._download(body.fragment))

    async def _download(self, p: FragmentId) -> None:
        try:
            while p in self._newest_published:
                envelope = self._newest_published.pop(p)
                assert isinstance(envelope.body, Published)
                await self._download_version(p, envelope, envelope.body)
        finally:
            self._downloading.discard(p)

    async def _download_version(self, p: FragmentId, envelope: Envelope, body: Published) -> None:
        driver, fragments = self._background.driver, self._background.fragments
        if driver is None:
            return
        if not 0 <= p < len(fragments):
            self._log.warning("the syncer tells of fragment %d, which this model does not have", p)
            return
        fragment = fragments[p]
        with driver.lock:
            known = body.version <= fragment.newest_version
            base = fragment.retain_newest(body.base) if body.base is not None else None
        if known or (body.base is not None and base is None):
            fragment.release(base)
            self._deliver(envelope, fragment, body)  # the core acknowledges what it has, or requests the whole value
            return
        if fragment.rows is not None:
            fragment.release(base)
            value = await self._download_rows(fragment.rows, body)
        else:
            value = await self._download_whole(fragment, base, body)
        if value is not None:
            self._deliver(envelope, fragment, body, value)

    def _deliver(
        self, envelope: Envelope, fragment: FragmentTensors, body: Published, value: Buffer | None = None
    ) -> None:
        """Give the core a publish message: the only way by which one reaches it. `value`: all ranks have their rows of
        it; None if there was nothing to fetch."""
        driver = self._background.driver
        if driver is None or not driver.receive_version(envelope, fragment, body.version, value):
            fragment.release(value)
        self._background.execute_effects()

    async def _download_whole(self, fragment: FragmentTensors, base: Buffer | None, body: Published) -> Buffer | None:
        """Return the value when all ranks have their rows of it; None if there is none, as the core has been told."""
        p, arriving = fragment.p, _IncomingDownload(fragment, base, self._compute)
        sizes = fragment_sizes(
            fragment.numel, fragment.tensors.allowed_codecs(self._background.settings.numerics.download_codecs)
        )
        try:
            fetched = await self._retry_download(
                body, lambda: self._bulk.download(p, body.version, body.base, sizes, arriving.on_bytes)
            )
            if fetched is None:
                return None
            value = await arriving.whole(fetched)
            if value is None:
                self._refuse(body)
            else:
                await asyncio.get_running_loop().run_in_executor(
                    self._compute, fragment.scatter_version, body.version, value
                )
            self._bulk.release_buffer(fetched.data)
            return arriving.taken() if value is not None else None
        finally:
            arriving.end()

    async def _download_rows(self, fragment: RowFragment, body: Published) -> Buffer | None:
        """Return rank 0's rows when all ranks have theirs; None if there are none, as the core has been told."""
        rows, downs = self.row_transfer, self._background.settings.numerics.download_codecs
        assert rows is not None
        found = await self._retry_download(body, lambda: rows.fetch(fragment, body.version, body.base, downs))
        if found == (None,):
            self._refuse(body)
        return found[0] if found is not None else None

    def _refuse(self, body: Published) -> None:
        problem = "the value is not the one that was published"
        self._background.handle_event(FragmentDamaged(body.fragment, body.version, problem))

    async def _retry_download(self, body: Published, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Every notice is answered: a version that cannot be had is told to the core, which asks for another one."""
        p, problem = body.fragment, ""
        for attempt in range(DOWNLOAD_ATTEMPTS):
            try:
                async with self._download_slots:
                    if p in self._newest_published:
                        return None  # a newer one
                    return await self._link.while_open(fetch())
            except LinkClosedError:
                return None  # everything that is missing is told of on the next one
            except (SyncerRefusedError, WireError) as wrong:
                problem = str(wrong)
                break
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                problem = describe_network_error(wrong)
                named = log_fields("fragment", p, version=body.version)
                self._log.info("fragment %d at version %d did not arrive: %s", p, body.version, problem, extra=named)
                await asyncio.sleep(RETRY_INTERVAL_S * 2**attempt)
        self._background.handle_event(FragmentDamaged(p, body.version, problem))
        return None

    async def download_final(self, fragment: FragmentTensors, version: int) -> Buffer | None:
        """The whole value, when the run is over. All ranks have their rows when this returns; None: they are not those
        that were published."""
        downs = self._background.settings.numerics.download_codecs
        if fragment.rows is not None:
            assert self.row_transfer is not None
            (value,) = await self.row_transfer.fetch(fragment.rows, version, None, downs)
            return value
        sizes = fragment_sizes(fragment.numel, fragment.tensors.allowed_codecs(downs))
        fetched = await self._bulk.download(fragment.p, version, None, sizes)
        work = fragment.decode_whole(fetched.data)
        if work.digest() != fetched.header.value_digest:
            return None
        fragment.scatter_version(version, work.buffer)
        return work.buffer


@dataclass(eq=False)
class _IncomingDownload:
    """The value of one version, put together by the computing thread in the order in which its bytes come in."""

    _fragment: FragmentTensors
    _base: Buffer | None
    _compute: ThreadPoolExecutor
    _fetched: DownloadedFragment | None = None
    _work: IncomingValue | None = None
    _newest: Future[None] | None = None

    def on_bytes(self, fetched: DownloadedFragment, first_bytes: int) -> None:
        self._newest = self._compute.submit(self._advance, fetched, first_bytes)

    async def whole(self, fetched: DownloadedFragment) -> Buffer | None:
        """All its bytes are here; None: they make another value than the one that was published."""
        self.on_bytes(fetched, fetched.header.total_bytes)
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

    def _advance(self, fetched: DownloadedFragment, first_bytes: int) -> None:
        if self._fetched is None or fetched.data is not self._fetched.data:
            self._release()  # the syncer had started again, and serves other bytes
            base = self._base if fetched.header.base is not None else None
            self._fetched, self._work = fetched, self._fragment.begin_value(base, fetched.data, fetched.codec)
        assert self._work is not None
        self._work.advance(first_bytes)

    def _release(self, *others: Buffer | None) -> None:
        work, self._work = self._work, None
        self._fragment.release(work.buffer if work is not None else None, *others)


METRICS_INTERVAL_S = 1.0


class Disconnection(NamedTuple):
    """The time since which no syncer has answered."""

    since: float  # on the monotonic clock
    date: str
    problem: str  # the newest


class BackgroundThread:
    """Made by the training thread, which calls the methods of the first section; the others run in the loop."""

    _loop: asyncio.AbstractEventLoop  # from `start` to `stop`

    def __init__(
        self,
        place: Endpoint,
        token: str | None,
        log: logging.Logger,
        max_rate: float | None = None,
        streams: int = DEFAULT_STREAMS,
        disconnect_timeout_s: float = math.inf,
    ) -> None:
        """`max_rate`: bytes per second of values, each way."""
        self._place = place
        self._disconnect_timeout_s = disconnect_timeout_s
        self._disconnected: Disconnection | None = None
        self.log = log
        self._reasons = ReasonLogger(log)
        self.last_loss: float | Tensor | None = None
        self.is_founded = False
        self.syncer_directory = ""  # of the run, at the syncer
        self.while_waiting: Callable[[], None] | None = None  # about once a second, in the training thread
        self.link = LearnerLink(place.addresses, token, log, self, place.tls)
        self.bulk = FragmentClient(self.link, max_rate, streams)
        self._join_client = JoinClient(self.link, log)
        self._thread = threading.Thread(target=self._run, name="atoll-background", daemon=True)
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="atoll-codec")
        self._fragment_transfer = FragmentTransfer(self)
        self._execute: dict[type[Effect], Callable[[Any], object]] = {
            Send: self._send,
            Dial: lambda effect: self.spawn(self.link.dial(effect.delay_s)),
            CloseConnection: lambda effect: self.link.disconnect(effect.session),
            LogReason: self._log_reason,
            AdoptFragment: self._settle,
            SaveSnapshot: self._save_part,
        }
        self._wake_scheduled = False
        self._error: BaseException | None = None
        self.driver: LearnerDriver | None = None
        self.fragments: list[FragmentTensors] = []
        self.settings = RunSettings()
        self._run_directory: Path | None = None
        self._part_writer: PartWriter | None = None  # of this incarnation
        self._timer: asyncio.TimerHandle | None = None
        self._last_metrics = (0.0, 0)  # when metrics were sent last, and the tokens then
        self._dial_warnings = LogRateLimiter(LOG_INTERVAL_S)
        self._tasks: set[asyncio.Task[None]] = set()  # a task that nobody holds may vanish
        self._stopping = False

    # ------------------------------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        assert not self._stopping and not self._thread.is_alive(), "a background starts once"
        self._place.check()
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._wait_for(self.link.start())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as wrong:
            self._fail(wrong)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], timeout=1.0).done:
            if not self._thread.is_alive():
                work.close()
                raise BackgroundFailedError("the background of this learner has ended") from self._error
            if self.while_waiting is not None:
                try:
                    self.while_waiting()
                except BaseException:
                    future.cancel()
                    raise
        return future.result()

    def check(self) -> None:
        if isinstance(self._error, IslandBrokenError):
            raise IslandBrokenError(str(self._error)) from self._error
        if self._error is not None:
            raise BackgroundFailedError(f"the background of this learner has failed: {self._error}") from self._error

    def check_disconnected(self) -> None:
        """Raise `SyncerUnreachableError` when no syncer has answered for `disconnect_timeout_s`."""
        away = self._disconnected
        if away is not None and time.monotonic() - away.since >= self._disconnect_timeout_s:
            raise SyncerUnreachableError(
                f"no syncer has answered at {self.link.address} since {away.date} ({away.problem}), which is longer"
                f" than disconnect_timeout_s = {self._disconnect_timeout_s:g}: its machine is down, or the run is over. The model"
                " is as the last step left it. Start the syncer again with `atoll syncer --resume` on its directory,"
                " which also serves the end of a finished run, and then this script; or set a longer disconnect_timeout_s"
            )

    def fetch_settings(self, wanted: int | None, join_by: float | None) -> RunSettings:
        """Return what the run is. Wait for a syncer that is not there yet, and log that."""
        found = self._wait_for(self._join_client.fetch_settings(wanted, join_by))
        self.settings, self.is_founded, self.syncer_directory = found
        self.bulk.shards = self.settings.shards
        return self.settings

    def upload_model(self, plan: FragmentPlan, view: ModelView, join_by: float | None) -> None:
        """Bring this learner's model. If another one was faster, that one's is the run's: ask for the settings."""
        self._wait_for(self._join_client.upload_model(plan, view, self.compute, join_by))

    def request_number(self, wanted: int | None, join_by: float | None) -> tuple[int, int]:
        return self._wait_for(self._join_client.request_number(wanted, join_by))

    def download_final(self, fragments: list[FragmentTensors], join_by: float | None) -> None:
        """The published values of a run that is over, for a learner that came too late to take part."""
        self._wait_for(self._join_client.download_final(fragments, join_by, self._fragment_transfer.download_final))

    def attach(
        self, driver: LearnerDriver, parts: PartWriter, run: Path | None, stats: Callable[[], LearnerStats]
    ) -> None:
        """One incarnation begins."""
        self._run_directory = run
        self._wait_for(self._begin_incarnation(driver, parts, stats))

    # In an island whose ranks send and fetch their own rows.

    @property
    def syncer_address(self) -> str:
        """Where the syncer answers."""
        return self.link.current_address

    @property
    def has_token(self) -> bool:
        return self.link.has_token

    def start_row_transfer(self, leader: Leader, rank_rpc: RankRpcClient, ranks: int) -> None:
        """At rank 0. What a link may carry is for all of them together."""
        self.bulk.share_rate(ranks)
        work = RankRowTransfer(self.link, self.bulk, self.compute, self._own_rows, self._retain_version)
        self._wait_for(rank_rpc.open())
        self._fragment_transfer.row_transfer = RowTransferCoordinator(leader, rank_rpc, work)

    def serve_rows(
        self,
        connection: RankConnection,
        rows: Callable[[int], Sequence[RowFragment]],
        retain: Callable[[FragmentId, Version], Buffer | None],
        ranks: int,
    ) -> None:
        """At another rank, until the leader hangs up."""
        self.bulk.share_rate(ranks)
        work = RankRowTransfer(self.link, self.bulk, self.compute, rows, retain)
        self._loop.call_soon_threadsafe(lambda: self.spawn(serve_rank_rpc(connection, work.handle)))

    def check_reachable(self, address: str) -> None:
        """Raises where this process may not speak to the syncer."""
        self._wait_for(self._join_client.check_reachable(address))

    def _own_rows(self, generation: int) -> list[RowFragment]:
        return [fragment.rows for fragment in self.fragments if fragment.rows is not None]

    def _retain_version(self, p: FragmentId, version: Version) -> Buffer | None:
        driver = self.driver
        if driver is None:  # it leaves
            return None
        with driver.lock:
            return self.fragments[p].retain_newest(version)

    def detach(self) -> None:
        """One incarnation ends without having trained. Nothing of it may be heard by the next."""
        self._wait_for(self._end_incarnation(None))

    def wake(self) -> None:
        if not self._wake_scheduled and not self._stopping:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self.execute_effects)

    def stop(self, goodbye_timeout_s: float | None) -> None:
        """Close everything; with time for last words, what was posted is sent first."""
        if self._stopping or self._thread.ident is None:
            return
        for fragment in self.fragments:
            fragment.cancel_copy()
        if not self._thread.is_alive():  # it has failed; what it left is cleared away all the same
            self._thread = threading.Thread(target=self._run, name="atoll-background", daemon=True)
            self._thread.start()
        try:
            self._wait_for(self._end(goodbye_timeout_s))
        finally:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self.compute.shutdown()

    async def _end(self, goodbye_timeout_s: float | None) -> None:
        await self._end_incarnation(goodbye_timeout_s)
        await self.link.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.to_thread(self.compute.shutdown)
        await self._loop.shutdown_default_executor()

    # ---------------------------------------------------------------------------------------------------- the core

    async def _begin_incarnation(
        self, driver: LearnerDriver, parts: PartWriter, stats: Callable[[], LearnerStats]
    ) -> None:
        self.driver = driver
        self.fragments = driver.boundary.fragments
        self._part_writer = parts
        self._last_metrics = (time.monotonic(), 0)
        self.bulk.attach_meters(self.settings.numerics, max(fragment.whole_numel for fragment in self.fragments))
        self.spawn(self._send_metrics(stats))

    async def _end_incarnation(self, goodbye_timeout_s: float | None) -> None:
        """What was posted is said and written down; whatever comes after is nobody's."""
        self.execute_effects()
        self.driver = None
        if goodbye_timeout_s is not None:
            await self.link.close_gracefully(goodbye_timeout_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._part_writer is not None:
            await self._part_writer.close()
            self._part_writer = None
        self._fragment_transfer.clear()

    def handle_event(self, event: LearnerEvent) -> None:
        """Tell the core of an event and carry out its effects. Called in the loop."""
        if self.driver is None:
            return
        try:
            self.driver.handle_event(event)
        except BaseException as wrong:  # our bug: the training thread raises it at its next step
            self._fail(wrong)
            return
        self.execute_effects()

    def execute_effects(self) -> None:
        """Carry out the effects of all events so far."""
        self._wake_scheduled = False
        driver = self.driver
        if driver is None:
            return
        try:
            while (effects := driver.next_effects()) is not None:
                for effect in effects:
                    carry_out = self._execute.get(type(effect))
                    if carry_out is not None:
                        carry_out(effect)
            self._arm()
        except Exception as wrong:  # our bug: the training thread raises it at its next step
            self._fail(wrong)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.driver.due_in() if self.driver is not None else None
        if due_s is not None:
            self._timer = self._loop.call_later(max(0.0, due_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        due_s = self.driver.due_in() if self.driver is not None else None
        if due_s is not None and due_s <= 0:
            self.handle_event(TimerFired())
        else:
            self._arm()

    def _fail(self, wrong: BaseException) -> None:
        if self._error is None and not self._stopping:
            if isinstance(wrong, IslandBrokenError):
                self.log.warning("%s", wrong)
            else:
                self.log.error("the background of this learner has failed", exc_info=wrong)
            self._error = wrong

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as wrong:
                self._fail(wrong)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    # ---------------------------------------------------------------------------------------------------- effects

    def _send(self, effect: Send) -> None:
        envelope = effect.envelope
        body = envelope.body
        if type(body) is Contribution:
            self._fragment_transfer.contribute(envelope, body)
        elif type(body) is OptimizerState:
            assert self.driver is not None
            self.spawn(self._send_state(self.driver, envelope, body))
        else:
            self.link.post(envelope)

    def _log_reason(self, effect: LogReason) -> None:
        self._reasons.write(effect.reason, effect.subject)
        if effect.reason.code == "state-timeout":
            self.spawn(self._find_saved_state())  # before the last peer has failed too

    def _settle(self, effect: AdoptFragment) -> None:
        future = self.compute.submit(self.fragments[effect.fragment].settle, effect.merged_copy)
        future.add_done_callback(lambda done: self._fail(error) if (error := done.exception()) is not None else None)

    def _save_part(self, effect: SaveSnapshot) -> None:
        assert self._part_writer is not None
        self.spawn(self._part_writer.save(effect))

    # ---------------------------------------------------------------------------------------------------- sending

    async def _send_state(self, driver: LearnerDriver, envelope: Envelope, body: OptimizerState) -> None:
        """Send inner state, or the answer that there is none to give: the other learner does not wait for it then."""
        try:
            taken = await asyncio.wrap_future(driver.pop_promised_state(envelope))
            file = await self._loop.run_in_executor(self.compute, pack_to_file, taken, self._run_directory)
        except AtollError:  # the island is broken
            raise
        except Exception as error:
            cause = summarize_error(error)
            self.log.warning("cannot give inner state to learner %d: %s; training goes on", body.target, cause)
            file = pack_to_file(optimizer_state.make_refusal(cause), None)
        try:
            await self.bulk.put_frame("/v1/state", FrameKind.OPTIMIZER_STATE, 0, encode_message(envelope), file.view)
        except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.log.warning(
                "inner state for learner %d did not arrive: %s", body.target, describe_network_error(error)
            )

    async def _send_metrics(self, get_stats: Callable[[], LearnerStats]) -> None:
        while True:
            await asyncio.sleep(METRICS_INTERVAL_S)
            if self.driver is None:
                return
            stats = get_stats()
            now, (then, before) = time.monotonic(), self._last_metrics
            self._last_metrics = (now, stats.tokens)
            told = make_metrics(stats, self.last_loss, (stats.tokens - before) / (now - then) if now > then else 0.0)
            self.link.post_metrics(json.dumps(told))

    # ---------------------------------------------------------------------------------------------------- hearing

    def handle_link_event(self, event: LinkEvent) -> None:
        """Handle what happens on the link and to it; `LearnerLink` calls this."""
        if isinstance(event, MessageArrived):
            self._on_message(event.envelope)
            return
        if isinstance(event, ConnectionClosed | DialFailed):
            if self._disconnected is None:
                self._disconnected = Disconnection(time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S"), event.cause)
            self._disconnected = self._disconnected._replace(problem=event.cause)
        if isinstance(event, DialFailed) and self._dial_warnings.count_suppressed(event.cause) is not None:
            limit = f", for up to {self._disconnect_timeout_s:g} s" if self._disconnect_timeout_s < math.inf else ""
            said = "cannot reach syncer at %s since %s (%s); retrying%s"
            self.log.warning(
                said, self.link.address, self._disconnected and self._disconnected.date, event.cause, limit
            )
        self.handle_event(event)

    def _on_message(self, envelope: Envelope) -> None:
        body = envelope.body
        if self.driver is None:
            return  # it says goodbye
        if type(body) is Welcome:
            self._disconnected = None
        if type(body) is Published:
            self._fragment_transfer.handle_published(envelope, body)
        elif type(body) is OptimizerState:
            self.spawn(self._download_state(envelope))
        elif type(body) is NoPeer:
            self.spawn(self._find_saved_state(envelope))
        else:
            if type(body) is RefuseContribution and body.reason.code in WARNING_REASONS:
                p = body.round.fragment
                prefix = f"the syncer refused the contribution to fragment {p}: "
                self._reasons.write(body.reason, ("fragment", p), prefix)
            self.handle_event(MessageArrived(envelope))

    async def _find_saved_state(self, no_peer: Envelope | None = None) -> None:
        """Inner state on disk, for a learner to which nobody gives any. The core hears of it first."""
        driver, parts = self.driver, self._part_writer
        if driver is None or parts is None:
            return
        if driver.is_joining():
            await asyncio.shield(parts.find_saved_state(driver.boundary))
        if no_peer is not None:
            self.handle_event(MessageArrived(no_peer))

    async def _download_state(self, envelope: Envelope) -> None:
        most = max_state_bytes(sum(fragment.whole_numel for fragment in self.fragments))
        files: list[StateFile] = []

        def room(size: int) -> memoryview:
            files.append(StateFile(size, self._run_directory))
            return files[0].view

        try:
            await self.link.download_optimizer_state(envelope.learner, envelope.incarnation, most, room)
        except (SyncerRefusedError, WireError, aiohttp.ClientError, OSError, TimeoutError) as wrong:
            self.log.warning(
                "a peer's inner state could not be fetched: %s", describe_network_error(wrong)
            )  # another peer is asked
            return
        driver = self.driver
        if driver is None or not driver.is_joining():
            self.handle_event(MessageArrived(envelope))
            return
        assert isinstance(envelope.body, OptimizerState)
        try:
            given = await asyncio.to_thread(driver.boundary.prepare_received_state, files[0])
        except Exception as error:
            await self._find_saved_state()  # before the last peer has failed too
            self.handle_event(StateRejected(envelope.body.source, summarize_error(error)))
            return
        driver.store_peer_state(given)
        self.handle_event(MessageArrived(envelope))


def make_metrics(stats: LearnerStats, loss: float | Tensor | None, tokens_per_s: float) -> dict[str, Any]:
    """What the syncer is told once a second."""
    told: dict[str, Any] = {
        "step": stats.steps,
        "tokens": stats.tokens,
        "tokens_per_s": round(tokens_per_s, 3),
        "boundary_s": round(stats.boundary_s, 6),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
    }
    if loss is not None:
        value = float(loss)
        told["loss"] = value if value == value and abs(value) != float("inf") else None
    return told
