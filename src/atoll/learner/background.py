"""The background thread of a learner: its connections, encoding and decoding, and its tape.

The training thread waits for this thread only while it joins. A lost connection is logged and dialed again. Any other
failure is a bug in Atoll, and `check` raises it in the training thread.

Transfers of large values are pipelined: bytes of a contribution are sent while later ones are still encoded, and bytes
of a version are decoded while later ones still arrive.
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
"""Maximum number of concurrent transfers. More of them would share the bandwidth, and all would finish late. A draining
learner uploads all of its fragments."""

SMALL_UPLOAD_BYTES = 2**18
"""Smaller uploads bypass the semaphore: on high-latency links they are latency-bound and must be pipelined."""


class FragmentTransfer:
    """Uploads of contributions and downloads of published versions, in the loop of a learner's background thread."""

    def __init__(self, background: BackgroundThread) -> None:
        self._background = background
        self._link, self._bulk, self._compute = background.link, background.bulk, background.compute
        self._log = background.log
        self._newest_published: dict[FragmentId, Envelope] = {}  # newest message of each fragment to download
        self._downloading: set[FragmentId] = set()
        self._download_slots = asyncio.Semaphore(MAX_CONCURRENT_DOWNLOADS)
        self._upload_slots = asyncio.Semaphore(MAX_CONCURRENT_UPLOADS)
        self._uploads: dict[FragmentId, tuple[RoundId, asyncio.Task[None]]] = {}
        self.row_transfer: RowTransferCoordinator | None = None  # set if each rank transfers its own rows

    def clear(self) -> None:
        """Forget all transfers. Their tasks have ended or were cancelled."""
        self._newest_published.clear()
        self._uploads.clear()

    # ---------------------------------------------------------------------------------------------------- up

    def contribute(self, envelope: Envelope, body: Contribution) -> None:
        round_id, upload = self._uploads.get(body.round.fragment, (None, None))
        if upload is not None and not upload.done():
            if round_id == body.round:
                return  # a repeated request does not restart the upload: on a slow link it would never finish
            upload.cancel()  # a newer copy of the same fragment replaces the older one
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
        log_extra = log_fields("fragment", fragment.p, version=body.round.base)
        with ExitStack() as resources:
            resources.callback(fragment.release, copied.buffer, copied.anchor)
            try:
                await self._link.while_open(self._upload(fragment, copied, envelope, body, resources))
            except CopyUnavailableError:
                return
            except SyncerRefusedError as refusal:
                self._log.info("syncer refused contribution to fragment %d: %s", fragment.p, refusal, extra=log_extra)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                # The syncer requests it again.
                message = "cannot upload contribution to fragment %d: %s"
                self._log.info(message, fragment.p, describe_network_error(error), extra=log_extra)

    async def _upload(
        self,
        fragment: FragmentTensors,
        copied: PulledCopy,
        envelope: Envelope,
        body: Contribution,
        resources: ExitStack,
    ) -> None:
        """Upload one contribution. Close `resources` when this ends, or when the codec thread has encoded the copy."""
        size = copied.codec.encoded_size(fragment.whole_numel)
        async with self._upload_slots if size > SMALL_UPLOAD_BYTES else nullcontext():
            if fragment.rows is not None:
                assert self.row_transfer is not None
                await self.row_transfer.contribute(fragment.rows, copied, envelope, body, resources.pop_all())
            else:
                await self._encode_and_send(fragment, copied, envelope, StreamingBuffer(size), resources.pop_all())

    async def _encode_and_send(
        self,
        fragment: FragmentTensors,
        copied: PulledCopy,
        envelope: Envelope,
        stream: StreamingBuffer,
        resources: ExitStack,
    ) -> None:
        def on_encoded(done: Future[None]) -> None:
            resources.close()
            error = None if done.cancelled() else done.exception()
            is_missing = done.cancelled() or isinstance(error, CancelledError)  # the copy was never made
            stream.finish(CopyUnavailableError() if is_missing else error)

        self._compute.submit(fragment.encode, copied, stream).add_done_callback(on_encoded)
        await self._bulk.upload_contribution(CODEC_NUMBERS[copied.codec.name], envelope, stream)

    # ---------------------------------------------------------------------------------------------------- down

    def handle_published(self, envelope: Envelope, body: Published) -> None:
        """Download a version, one per fragment at a time. A newer version replaces one whose download has not begun."""
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
            self._log.warning("syncer published fragment %d, which this model does not have", p)
            return
        fragment = fragments[p]
        with driver.lock:
            is_known = body.version <= fragment.newest_version
            base = fragment.retain_newest(body.base) if body.base is not None else None
        if is_known or (body.base is not None and base is None):
            fragment.release(base)
            self._deliver(envelope, fragment, body)  # the core acknowledges what it has, or requests the full value
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
        """Pass a publish message to the core. This is the only path of publish messages to the core.

        Args:
            value: the new value, if all ranks have their rows of it; None if there was nothing to download.
        """
        driver = self._background.driver
        if driver is None or not driver.receive_version(envelope, fragment, body.version, value):
            fragment.release(value)
        self._background.execute_effects()

    async def _download_whole(self, fragment: FragmentTensors, base: Buffer | None, body: Published) -> Buffer | None:
        """Return the value when all ranks have their rows. Return None after a failure, which the core has received."""
        p, incoming = fragment.p, _IncomingDownload(fragment, base, self._compute)
        sizes = fragment_sizes(
            fragment.numel, fragment.tensors.allowed_codecs(self._background.settings.numerics.download_codecs)
        )
        try:
            downloaded = await self._retry_download(
                body, lambda: self._bulk.download(p, body.version, body.base, sizes, incoming.on_bytes)
            )
            if downloaded is None:
                return None
            value = await incoming.finish(downloaded)
            if value is None:
                self._report_damaged(body)
            else:
                await asyncio.get_running_loop().run_in_executor(
                    self._compute, fragment.scatter_version, body.version, value
                )
            self._bulk.release_buffer(downloaded.data)
            return incoming.detach_buffer() if value is not None else None
        finally:
            incoming.close()

    async def _download_rows(self, fragment: RowFragment, body: Published) -> Buffer | None:
        """Return rank 0's rows when all ranks have theirs. Return None after a failure, which the core has received."""
        rows, codecs = self.row_transfer, self._background.settings.numerics.download_codecs
        assert rows is not None
        result = await self._retry_download(body, lambda: rows.fetch(fragment, body.version, body.base, codecs))
        if result == (None,):
            self._report_damaged(body)
        return result[0] if result is not None else None

    def _report_damaged(self, body: Published) -> None:
        problem = "the downloaded value differs from the published one"
        self._background.handle_event(FragmentDamaged(body.fragment, body.version, problem))

    async def _retry_download(self, body: Published, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Download with retries. If all attempts fail, report it to the core, which requests another version."""
        p, problem = body.fragment, ""
        for attempt in range(DOWNLOAD_ATTEMPTS):
            try:
                async with self._download_slots:
                    if p in self._newest_published:
                        return None  # a newer version replaces this one
                    return await self._link.while_open(fetch())
            except LinkClosedError:
                return None  # the next connection announces everything that is missing
            except (SyncerRefusedError, WireError) as error:
                problem = str(error)
                break
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = describe_network_error(error)
                log_extra = log_fields("fragment", p, version=body.version)
                self._log.info("cannot download fragment %d version %d: %s", p, body.version, problem, extra=log_extra)
                await asyncio.sleep(RETRY_INTERVAL_S * 2**attempt)
        self._background.handle_event(FragmentDamaged(p, body.version, problem))
        return None

    async def download_final(self, fragment: FragmentTensors, version: int) -> Buffer | None:
        """Download a fragment of the final model. All ranks have their rows when this returns.

        Return None if the value differs from the published one.
        """
        codecs = self._background.settings.numerics.download_codecs
        if fragment.rows is not None:
            assert self.row_transfer is not None
            (value,) = await self.row_transfer.fetch(fragment.rows, version, None, codecs)
            return value
        sizes = fragment_sizes(fragment.numel, fragment.tensors.allowed_codecs(codecs))
        downloaded = await self._bulk.download(fragment.p, version, None, sizes)
        incoming = fragment.decode_whole(downloaded.data)
        if incoming.digest() != downloaded.header.value_digest:
            return None
        fragment.scatter_version(version, incoming.buffer)
        return incoming.buffer


@dataclass(eq=False)
class _IncomingDownload:
    """Value of a version during its download. The codec thread decodes its bytes in the order in which they arrive."""

    _fragment: FragmentTensors
    _base: Buffer | None
    _compute: ThreadPoolExecutor
    _downloaded: DownloadedFragment | None = None
    _incoming: IncomingValue | None = None
    _newest_task: Future[None] | None = None

    def on_bytes(self, downloaded: DownloadedFragment, first_bytes: int) -> None:
        """Decode up to `first_bytes`, in the codec thread."""
        self._newest_task = self._compute.submit(self._advance, downloaded, first_bytes)

    async def finish(self, downloaded: DownloadedFragment) -> Buffer | None:
        """Return the value when all its bytes are decoded. Return None if it differs from the published value."""
        self.on_bytes(downloaded, downloaded.header.total_bytes)
        assert self._newest_task is not None
        await asyncio.wrap_future(self._newest_task)  # earlier tasks have ended too: there is one thread
        assert self._incoming is not None
        return self._incoming.buffer if self._incoming.digest() == downloaded.header.value_digest else None

    def detach_buffer(self) -> Buffer:
        """Return the buffer. From now on the caller releases it."""
        assert self._incoming is not None
        incoming, self._incoming = self._incoming, None
        return incoming.buffer

    def close(self) -> None:
        """Release the buffers after the tasks that still use them."""
        self._compute.submit(self._release, self._base)

    # In the codec thread: allocating a new buffer takes long.

    def _advance(self, downloaded: DownloadedFragment, first_bytes: int) -> None:
        if self._downloaded is None or downloaded.data is not self._downloaded.data:
            self._release()  # the syncer was restarted and serves other bytes
            base = self._base if downloaded.header.base is not None else None
            self._incoming = self._fragment.begin_value(base, downloaded.data, downloaded.codec)
            self._downloaded = downloaded
        assert self._incoming is not None
        self._incoming.advance(first_bytes)

    def _release(self, *others: Buffer | None) -> None:
        incoming, self._incoming = self._incoming, None
        self._fragment.release(incoming.buffer if incoming is not None else None, *others)


METRICS_INTERVAL_S = 1.0


class Disconnection(NamedTuple):
    """Period in which no syncer answers."""

    since: float  # on the monotonic clock
    date: str
    problem: str  # newest error


class BackgroundThread:
    """Background thread of a learner.

    The training thread creates it and calls the methods of the first section. The others run in its event loop.
    """

    _loop: asyncio.AbstractEventLoop  # from `start` to `stop`

    def __init__(
        self,
        endpoint: Endpoint,
        token: str | None,
        log: logging.Logger,
        max_rate: float | None = None,
        streams: int = DEFAULT_STREAMS,
        disconnect_timeout_s: float = math.inf,
    ) -> None:
        """Create the thread without starting it. `max_rate`: limit for tensors in bytes/s, in each direction."""
        self._endpoint = endpoint
        self._disconnect_timeout_s = disconnect_timeout_s
        self._disconnected: Disconnection | None = None
        self.log = log
        self._reasons = ReasonLogger(log)
        self.last_loss: float | Tensor | None = None
        self.is_founded = False
        self.syncer_directory = ""  # run directory of the syncer
        self.on_wait: Callable[[], None] | None = None  # called about once a second in the training thread
        self.link = LearnerLink(endpoint.addresses, token, log, self, endpoint.tls)
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
        self._last_metrics = (0.0, 0)  # time of the newest metrics, and the tokens in them
        self._dial_warnings = LogRateLimiter(LOG_INTERVAL_S)
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio drops tasks to which there is no reference
        self._stopping = False

    # ------------------------------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        assert not self._stopping and not self._thread.is_alive(), "a background thread starts once"
        self._endpoint.check()
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._wait_for(self.link.start())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._fail(error)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], timeout=1.0).done:
            if not self._thread.is_alive():
                work.close()
                raise BackgroundFailedError("the background thread of this learner has ended") from self._error
            if self.on_wait is not None:
                try:
                    self.on_wait()
                except BaseException:
                    future.cancel()
                    raise
        return future.result()

    def check(self) -> None:
        """Raise the error with which this thread has failed, if any."""
        if isinstance(self._error, IslandBrokenError):
            raise IslandBrokenError(str(self._error)) from self._error
        if self._error is not None:
            raise BackgroundFailedError(f"the background thread of this learner failed: {self._error}") from self._error

    def check_disconnected(self) -> None:
        """Raise `SyncerUnreachableError` when no syncer has answered for `disconnect_timeout_s`."""
        disconnected = self._disconnected
        if disconnected is not None and time.monotonic() - disconnected.since >= self._disconnect_timeout_s:
            raise SyncerUnreachableError(
                f"no syncer has answered at {self.link.address} since {disconnected.date} ({disconnected.problem}),"
                f" longer than disconnect_timeout_s = {self._disconnect_timeout_s:g}: its machine is down, or the run"
                " is over. The model holds the weights of the last step. Restart the syncer with `atoll syncer"
                " --resume` on its directory, which also serves the end of a finished run, and then this script; or"
                " set a longer disconnect_timeout_s"
            )

    def fetch_settings(self, requested: int | None, join_by: float | None) -> RunSettings:
        """Return the settings of the run. Wait for a syncer that does not answer yet, and log that."""
        found = self._wait_for(self._join_client.fetch_settings(requested, join_by))
        self.settings, self.is_founded, self.syncer_directory = found
        self.bulk.shards = self.settings.shards
        return self.settings

    def upload_model(self, plan: FragmentPlan, view: ModelView, join_by: float | None) -> None:
        """Upload this learner's model. If another learner was faster, the run uses its model: fetch the settings."""
        self._wait_for(self._join_client.upload_model(plan, view, self.compute, join_by))

    def request_number(self, requested: int | None, join_by: float | None) -> tuple[int, int]:
        return self._wait_for(self._join_client.request_number(requested, join_by))

    def download_final(self, fragments: list[FragmentTensors], join_by: float | None) -> None:
        """Download the final model of a finished run, for a learner that joins after its end."""
        self._wait_for(self._join_client.download_final(fragments, join_by, self._fragment_transfer.download_final))

    def attach(
        self, driver: LearnerDriver, parts: PartWriter, run: Path | None, stats: Callable[[], LearnerStats]
    ) -> None:
        """Begin one incarnation."""
        self._run_directory = run
        self._wait_for(self._begin_incarnation(driver, parts, stats))

    # Used if each rank of an island transfers its own rows.

    @property
    def syncer_address(self) -> str:
        """Address at which the syncer answers."""
        return self.link.current_address

    @property
    def has_token(self) -> bool:
        return self.link.has_token

    def start_row_transfer(self, leader: Leader, rank_rpc: RankRpcClient, ranks: int) -> None:
        """Start the transfer of rows by all ranks, at rank 0. The bandwidth limit is shared by all ranks."""
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
        """Serve row transfers at another rank until the leader closes the connection."""
        self.bulk.share_rate(ranks)
        work = RankRowTransfer(self.link, self.bulk, self.compute, rows, retain)
        self._loop.call_soon_threadsafe(lambda: self.spawn(serve_rank_rpc(connection, work.handle)))

    def check_reachable(self, address: str) -> None:
        """Raise an error if this process cannot reach the syncer, or is refused by it."""
        self._wait_for(self._join_client.check_reachable(address))

    def _own_rows(self, generation: int) -> list[RowFragment]:
        return [fragment.rows for fragment in self.fragments if fragment.rows is not None]

    def _retain_version(self, p: FragmentId, version: Version) -> Buffer | None:
        driver = self.driver
        if driver is None:  # the learner leaves
            return None
        with driver.lock:
            return self.fragments[p].retain_newest(version)

    def detach(self) -> None:
        """End one incarnation that has not trained. The next incarnation receives none of its messages."""
        self._wait_for(self._end_incarnation(None))

    def wake(self) -> None:
        if not self._wake_scheduled and not self._stopping:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self.execute_effects)

    def stop(self, goodbye_timeout_s: float | None) -> None:
        """Close everything. With `goodbye_timeout_s`, send queued messages first."""
        if self._stopping or self._thread.ident is None:
            return
        for fragment in self.fragments:
            fragment.cancel_copy()
        if not self._thread.is_alive():  # an error has stopped the loop: run it again to close connections and tasks
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
        """Send and record what is queued. Later events are dropped."""
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
        """Let the core handle an event, and execute its effects. Called in the loop."""
        if self.driver is None:
            return
        try:
            self.driver.handle_event(event)
        except BaseException as error:  # our bug: the training thread raises it at its next step
            self._fail(error)
            return
        self.execute_effects()

    def execute_effects(self) -> None:
        """Execute the effects of all events so far."""
        self._wake_scheduled = False
        driver = self.driver
        if driver is None:
            return
        try:
            while (effects := driver.next_effects()) is not None:
                for effect in effects:
                    execute = self._execute.get(type(effect))
                    if execute is not None:
                        execute(effect)
            self._arm()
        except Exception as error:  # our bug: the training thread raises it at its next step
            self._fail(error)

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

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._stopping:
            if isinstance(error, IslandBrokenError):
                self.log.warning("%s", error)
            else:
                self.log.error("the background thread of this learner failed", exc_info=error)
            self._error = error

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._fail(error)

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
            self.spawn(self._find_saved_state())  # before the last peer has replied: reading from disk takes long

    def _settle(self, effect: AdoptFragment) -> None:
        future = self.compute.submit(self.fragments[effect.fragment].settle, effect.merged_copy)
        future.add_done_callback(lambda done: self._fail(error) if (error := done.exception()) is not None else None)

    def _save_part(self, effect: SaveSnapshot) -> None:
        assert self._part_writer is not None
        self.spawn(self._part_writer.save(effect))

    # ---------------------------------------------------------------------------------------------------- sending

    async def _send_state(self, driver: LearnerDriver, envelope: Envelope, body: OptimizerState) -> None:
        """Send optimizer state, or a refusal, so that the other learner does not wait for it."""
        try:
            copied = await asyncio.wrap_future(driver.pop_promised_state(envelope))
            file = await self._loop.run_in_executor(self.compute, pack_to_file, copied, self._run_directory)
        except AtollError:  # the island is broken
            raise
        except Exception as error:
            cause = summarize_error(error)
            self.log.warning("cannot send optimizer state to learner %d: %s; training continues", body.target, cause)
            file = pack_to_file(optimizer_state.make_refusal(cause), None)
        try:
            await self.bulk.put_frame("/v1/state", FrameKind.OPTIMIZER_STATE, 0, encode_message(envelope), file.view)
        except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.log.warning(
                "cannot upload optimizer state for learner %d: %s", body.target, describe_network_error(error)
            )

    async def _send_metrics(self, get_stats: Callable[[], LearnerStats]) -> None:
        while True:
            await asyncio.sleep(METRICS_INTERVAL_S)
            if self.driver is None:
                return
            stats = get_stats()
            now, (last_time, last_tokens) = time.monotonic(), self._last_metrics
            self._last_metrics = (now, stats.tokens)
            tokens_per_s = (stats.tokens - last_tokens) / (now - last_time) if now > last_time else 0.0
            self.link.post_metrics(json.dumps(make_metrics(stats, self.last_loss, tokens_per_s)))

    # ---------------------------------------------------------------------------------------------------- receiving

    def handle_link_event(self, event: LinkEvent) -> None:
        """Handle an event of the link. `LearnerLink` calls this."""
        if isinstance(event, MessageArrived):
            self._on_message(event.envelope)
            return
        if isinstance(event, ConnectionClosed | DialFailed):
            if self._disconnected is None:
                self._disconnected = Disconnection(time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S"), event.cause)
            self._disconnected = self._disconnected._replace(problem=event.cause)
        if isinstance(event, DialFailed) and self._dial_warnings.count_suppressed(event.cause) is not None:
            limit = f", for up to {self._disconnect_timeout_s:g} s" if self._disconnect_timeout_s < math.inf else ""
            message = "cannot reach syncer at %s since %s (%s); retrying%s"
            self.log.warning(
                message, self.link.address, self._disconnected and self._disconnected.date, event.cause, limit
            )
        self.handle_event(event)

    def _on_message(self, envelope: Envelope) -> None:
        body = envelope.body
        if self.driver is None:
            return  # the learner leaves
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
                prefix = f"syncer refused contribution to fragment {p}: "
                self._reasons.write(body.reason, ("fragment", p), prefix)
            self.handle_event(MessageArrived(envelope))

    async def _find_saved_state(self, no_peer: Envelope | None = None) -> None:
        """Search the disk for saved optimizer state, if no peer has any. The core handles `no_peer` afterwards."""
        driver, parts = self.driver, self._part_writer
        if driver is None or parts is None:
            return
        if driver.is_joining():
            await asyncio.shield(parts.find_saved_state(driver.boundary))
        if no_peer is not None:
            self.handle_event(MessageArrived(no_peer))

    async def _download_state(self, envelope: Envelope) -> None:
        max_bytes = max_state_bytes(sum(fragment.whole_numel for fragment in self.fragments))
        files: list[StateFile] = []

        def allocate(size: int) -> memoryview:
            files.append(StateFile(size, self._run_directory))
            return files[0].view

        try:
            await self.link.download_optimizer_state(envelope.learner, envelope.incarnation, max_bytes, allocate)
        except (SyncerRefusedError, WireError, aiohttp.ClientError, OSError, TimeoutError) as error:
            self.log.warning(
                "cannot download a peer's optimizer state: %s", describe_network_error(error)
            )  # the core requests it from another peer
            return
        driver = self.driver
        if driver is None or not driver.is_joining():
            self.handle_event(MessageArrived(envelope))
            return
        assert isinstance(envelope.body, OptimizerState)
        try:
            state = await asyncio.to_thread(driver.boundary.prepare_received_state, files[0])
        except Exception as error:
            await self._find_saved_state()  # before the core handles the failure of what may be the last peer
            self.handle_event(StateRejected(envelope.body.source, summarize_error(error)))
            return
        driver.store_peer_state(state)
        self.handle_event(MessageArrived(envelope))


def make_metrics(stats: LearnerStats, loss: float | Tensor | None, tokens_per_s: float) -> dict[str, Any]:
    """Return the metrics that a learner sends to the syncer once a second."""
    metrics: dict[str, Any] = {
        "step": stats.steps,
        "tokens": stats.tokens,
        "tokens_per_s": round(tokens_per_s, 3),
        "boundary_s": round(stats.boundary_s, 6),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
    }
    if loss is not None:
        value = float(loss)
        metrics["loss"] = value if value == value and abs(value) != float("inf") else None
    return metrics
