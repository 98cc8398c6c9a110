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
    Contribution,
    Dial,
    DialFailed,
    Effect,
    Envelope,
    FragmentDamaged,
    Hangup,
    InnerState,
    LearnerEvent,
    LinkClosed,
    MessageArrived,
    NoPeer,
    Published,
    RefuseContribution,
    SaveSnapshot,
    Say,
    Send,
    StateRejected,
    TimerFired,
    Welcome,
)
from atoll.core.types import FragmentId, RoundId, Version
from atoll.errors import AtollError, BackgroundFailed, IslandBroken, SyncerUnreachable
from atoll.island.boundary import cause_of
from atoll.island.fragments import Buffer, Copied, CopyGone, FragmentTensors, RowFragment, ValueInWork
from atoll.island.leader import Leader
from atoll.island.rank_connection import RankConnection
from atoll.island.rank_rpc import RankRpcClient, obey
from atoll.island.row_transfer import RowTraffic, RowWork
from atoll.island.stats import LearnerStats
from atoll.learner.driver import LearnerDriver
from atoll.learner.join import RETRY_S, SAY_EVERY_S, JoinClient
from atoll.learner.part_writer import PartKeeper
from atoll.logs import WARNINGS, ReasonLog, RepeatLimit, about
from atoll.store.optimizer_state_files import StateFile, packed
from atoll.store.run_settings import RunSettings
from atoll.tensors import optimizer_state
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.transport.buffers import StreamingBuffer
from atoll.transport.endpoint import Endpoint
from atoll.transport.http_client import (
    FetchedFragment,
    LearnerBulk,
    LearnerLink,
    LinkClosedError,
    LinkEvent,
    Refusal,
    fragment_sizes,
    why,
)
from atoll.transport.pacing import DEFAULT_STREAMS
from atoll.transport.wire import CODEC_NUMBERS, Kind, WireError, encode_message, max_state_bytes

T = TypeVar("T")
FETCH_TRIES = 3
FETCHES = UPLOADS = 4
"""At once: more would only share the link, and all of them would come late. One who leaves is asked for everything."""

SMALL_BYTES = 2**18
"""A contribution of less does not count: on a long way it waits for its answer, and many have to be in flight."""


class FragmentTraffic:
    """Contributions up and published versions down, in the loop of a learner's background thread."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._link, self._bulk, self._compute = background.link, background.bulk, background.compute
        self._log = background.log
        self._noticed: dict[FragmentId, Envelope] = {}  # newest notice of each fragment that is being fetched
        self._fetching: set[FragmentId] = set()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._places_up = asyncio.Semaphore(UPLOADS)
        self._uploads: dict[FragmentId, tuple[RoundId, asyncio.Task[None]]] = {}
        self.rows: RowTraffic | None = None  # in an island whose ranks send and fetch their own

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
        self._uploads[body.round.fragment] = (body.round, self._background.spawn(self._contribute(envelope, body)))

    async def _contribute(self, envelope: Envelope, body: Contribution) -> None:
        driver, fragment = self._background.driver, self._background.fragments[body.round.fragment]
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
            self._background.spawn(self._fetch(body.fragment))

    async def _fetch(self, p: FragmentId) -> None:
        try:
            while p in self._noticed:
                envelope = self._noticed.pop(p)
                assert isinstance(envelope.body, Published)
                await self._fetch_one(p, envelope, envelope.body)
        finally:
            self._fetching.discard(p)

    async def _fetch_one(self, p: FragmentId, envelope: Envelope, body: Published) -> None:
        driver, fragments = self._background.driver, self._background.fragments
        if driver is None:
            return
        if not 0 <= p < len(fragments):
            self._log.warning("the syncer tells of fragment %d, which this model does not have", p)
            return
        fragment = fragments[p]
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
        driver = self._background.driver
        if driver is None or not driver.receive_version(envelope, fragment, body.version, value):
            fragment.release(value)
        self._background.drain()

    async def _fetch_whole(self, fragment: FragmentTensors, base: Buffer | None, body: Published) -> Buffer | None:
        """Return the value when all ranks have their rows of it; None if there is none, as the core has been told."""
        p, arriving = fragment.p, _Arriving(fragment, base, self._compute)
        sizes = fragment_sizes(fragment.numel, fragment.tensors.codecs(self._background.settings.numerics.downs))
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
            self._bulk.give_back(fetched.data)
            return arriving.taken() if value is not None else None
        finally:
            arriving.end()

    async def _fetch_rows(self, fragment: RowFragment, body: Published) -> Buffer | None:
        """Return rank 0's rows when all ranks have theirs; None if there are none, as the core has been told."""
        rows, downs = self.rows, self._background.settings.numerics.downs
        assert rows is not None
        found = await self._tried(body, lambda: rows.fetch(fragment, body.version, body.base, downs))
        if found == (None,):
            self._refuse(body)
        return found[0] if found is not None else None

    def _refuse(self, body: Published) -> None:
        problem = "the value is not the one that was published"
        self._background.tell(FragmentDamaged(body.fragment, body.version, problem))

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
        self._background.tell(FragmentDamaged(p, body.version, problem))
        return None

    async def fetch_final(self, fragment: FragmentTensors, version: int) -> Buffer | None:
        """The whole value, when the run is over. All ranks have their rows when this returns; None: they are not those
        that were published."""
        downs = self._background.settings.numerics.downs
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


@dataclass(eq=False)
class _Arriving:
    """The value of one version, put together by the computing thread in the order in which its bytes come in."""

    _fragment: FragmentTensors
    _base: Buffer | None
    _compute: ThreadPoolExecutor
    _fetched: FetchedFragment | None = None
    _work: ValueInWork | None = None
    _newest: Future[None] | None = None

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


METRICS_EVERY_S = 1.0


class Away(NamedTuple):
    """The time since which no syncer has answered."""

    since: float  # on the monotonic clock
    date: str
    problem: str  # the newest


class Background:
    """Made by the training thread, which calls the methods of the first section; the others run in the loop."""

    _loop: asyncio.AbstractEventLoop  # from `start` to `stop`

    def __init__(
        self,
        place: Endpoint,
        token: str | None,
        log: logging.Logger,
        max_rate: float | None = None,
        streams: int = DEFAULT_STREAMS,
        away_timeout_s: float = math.inf,
    ) -> None:
        """`max_rate`: bytes per second of values, each way."""
        self._place = place
        self._away_timeout_s = away_timeout_s
        self._away: Away | None = None
        self.log = log
        self._reasons = ReasonLog(log)
        self.last_loss: float | Tensor | None = None
        self.is_founded = False
        self.syncer_directory = ""  # of the run, at the syncer
        self.while_waiting: Callable[[], None] | None = None  # about once a second, in the training thread
        self.link = LearnerLink(place.addresses, token, log, self, place.tls)
        self.bulk = LearnerBulk(self.link, max_rate, streams)
        self._join_client = JoinClient(self.link, log)
        self._thread = threading.Thread(target=self._run, name="atoll-background", daemon=True)
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="atoll-codec")
        self._traffic = FragmentTraffic(self)
        self._execute: dict[type[Effect], Callable[[Any], object]] = {
            Send: self._send,
            Dial: lambda effect: self.spawn(self.link.dial(effect.after_s)),
            Hangup: lambda effect: self.link.hang_up(effect.session),
            Say: self._say,
            AdoptFragment: self._settle,
            SaveSnapshot: self._save_part,
        }
        self._drain_due = False
        self._error: BaseException | None = None
        self.driver: LearnerDriver | None = None
        self.fragments: list[FragmentTensors] = []
        self.settings = RunSettings()
        self._run_directory: Path | None = None
        self._parts: PartKeeper | None = None  # of this incarnation
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = (0.0, 0)  # when metrics were sent last, and the tokens then
        self._complaints = RepeatLimit(SAY_EVERY_S)
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
            self._failed(wrong)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], timeout=1.0).done:
            if not self._thread.is_alive():
                work.close()
                raise BackgroundFailed("the background of this learner has ended") from self._error
            if self.while_waiting is not None:
                try:
                    self.while_waiting()
                except BaseException:
                    future.cancel()
                    raise
        return future.result()

    def check(self) -> None:
        if isinstance(self._error, IslandBroken):
            raise IslandBroken(str(self._error)) from self._error
        if self._error is not None:
            raise BackgroundFailed(f"the background of this learner has failed: {self._error}") from self._error

    def check_away(self) -> None:
        """Raise `SyncerUnreachable` when no syncer has answered for `away_timeout_s`."""
        away = self._away
        if away is not None and time.monotonic() - away.since >= self._away_timeout_s:
            raise SyncerUnreachable(
                f"no syncer has answered at {self.link.address} since {away.date} ({away.problem}), which is longer"
                f" than away_timeout_s = {self._away_timeout_s:g}: its machine is down, or the run is over. The model"
                " is as the last step left it. Start the syncer again with `atoll syncer --resume` on its directory,"
                " which also serves the end of a finished run, and then this script; or set a longer away_timeout_s"
            )

    def fetch_settings(self, wanted: int | None, join_by: float | None) -> RunSettings:
        """Return what the run is. Wait for a syncer that is not there yet, and log that."""
        found = self._wait_for(self._join_client.settings(wanted, join_by))
        self.settings, self.is_founded, self.syncer_directory = found
        self.bulk.shards = self.settings.shards
        return self.settings

    def found(self, plan: FragmentPlan, view: ModelView, join_by: float | None) -> None:
        """Bring this learner's model. If another one was faster, that one's is the run's: ask for the settings."""
        self._wait_for(self._join_client.found(plan, view, self.compute, join_by))

    def ask_for_number(self, wanted: int | None, join_by: float | None) -> tuple[int, int]:
        return self._wait_for(self._join_client.number(wanted, join_by))

    def fetch_final(self, fragments: list[FragmentTensors], join_by: float | None) -> None:
        """The published values of a run that is over, for a learner that came too late to take part."""
        self._wait_for(self._join_client.final(fragments, join_by, self._traffic.fetch_final))

    def attach(
        self, driver: LearnerDriver, parts: PartKeeper, run: Path | None, stats: Callable[[], LearnerStats]
    ) -> None:
        """One incarnation begins."""
        self._run_directory = run
        self._wait_for(self._begin(driver, parts, stats))

    # In an island whose ranks send and fetch their own rows.

    @property
    def address(self) -> str:
        """Where the syncer answers."""
        return self.link.asked

    @property
    def has_token(self) -> bool:
        return self.link.has_token

    def lead(self, leader: Leader, hands: RankRpcClient, ranks: int) -> None:
        """At rank 0. What a link may carry is for all of them together."""
        self.bulk.share_rate(ranks)
        work = RowWork(self.link, self.bulk, self.compute, self._own_rows, self._hold_version)
        self._wait_for(hands.open())
        self._traffic.rows = RowTraffic(leader, hands, work)

    def obey(
        self,
        line: RankConnection,
        rows: Callable[[int], Sequence[RowFragment]],
        hold: Callable[[FragmentId, Version], Buffer | None],
        ranks: int,
    ) -> None:
        """At another rank, until the leader hangs up."""
        self.bulk.share_rate(ranks)
        work = RowWork(self.link, self.bulk, self.compute, rows, hold)
        self._loop.call_soon_threadsafe(lambda: self.spawn(obey(line, work.carry_out)))

    def try_reach(self, address: str) -> None:
        """Raises where this process may not speak to the syncer."""
        self._wait_for(self._join_client.reach(address))

    def _own_rows(self, generation: int) -> list[RowFragment]:
        return [fragment.rows for fragment in self.fragments if fragment.rows is not None]

    def _hold_version(self, p: FragmentId, version: Version) -> Buffer | None:
        driver = self.driver
        if driver is None:  # it leaves
            return None
        with driver.lock:
            return self.fragments[p].hold_newest(version)

    def detach(self) -> None:
        """One incarnation ends without having trained. Nothing of it may be heard by the next."""
        self._wait_for(self._leave_off(None))

    def kick(self) -> None:
        if not self._drain_due and not self._stopping:
            self._drain_due = True
            self._loop.call_soon_threadsafe(self.drain)

    def stop(self, last_words_s: float | None) -> None:
        """Close everything; with time for last words, what was posted is sent first."""
        if self._stopping or self._thread.ident is None:
            return
        for fragment in self.fragments:
            fragment.abandon()
        if not self._thread.is_alive():  # it has failed; what it left is cleared away all the same
            self._thread = threading.Thread(target=self._run, name="atoll-background", daemon=True)
            self._thread.start()
        try:
            self._wait_for(self._end(last_words_s))
        finally:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self.compute.shutdown()

    async def _end(self, last_words_s: float | None) -> None:
        await self._leave_off(last_words_s)
        await self.link.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.to_thread(self.compute.shutdown)
        await self._loop.shutdown_default_executor()

    # ---------------------------------------------------------------------------------------------------- the core

    async def _begin(self, driver: LearnerDriver, parts: PartKeeper, stats: Callable[[], LearnerStats]) -> None:
        self.driver = driver
        self.fragments = driver.boundary.fragments
        self._parts = parts
        self._told_at = (time.monotonic(), 0)
        self.bulk.attach_meters(self.settings.numerics, max(fragment.whole_numel for fragment in self.fragments))
        self.spawn(self._tell_metrics(stats))

    async def _leave_off(self, last_words_s: float | None) -> None:
        """What was posted is said and written down; whatever comes after is nobody's."""
        self.drain()
        self.driver = None
        if last_words_s is not None:
            await self.link.say_goodbye(last_words_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._parts is not None:
            await self._parts.close()
            self._parts = None
        self._traffic.end()

    def tell(self, event: LearnerEvent) -> None:
        """Tell the core of an event and carry out its effects. Called in the loop."""
        if self.driver is None:
            return
        try:
            self.driver.tell(event)
        except BaseException as wrong:  # our bug: the training thread raises it at its next step
            self._failed(wrong)
            return
        self.drain()

    def drain(self) -> None:
        """Carry out the effects of all events so far."""
        self._drain_due = False
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
            self._failed(wrong)

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
            self.tell(TimerFired())
        else:
            self._arm()

    def _failed(self, wrong: BaseException) -> None:
        if self._error is None and not self._stopping:
            if isinstance(wrong, IslandBroken):
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
                self._failed(wrong)

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
            self._traffic.contribute(envelope, body)
        elif type(body) is InnerState:
            assert self.driver is not None
            self.spawn(self._give_state(self.driver, envelope, body))
        else:
            self.link.post(envelope)

    def _say(self, effect: Say) -> None:
        self._reasons.write(effect.reason, effect.subject)
        if effect.reason.code == "state-late":
            self.spawn(self._seek())  # before the last peer has failed too

    def _settle(self, effect: AdoptFragment) -> None:
        future = self.compute.submit(self.fragments[effect.fragment].settle, effect.merged_copy)
        future.add_done_callback(lambda done: self._failed(error) if (error := done.exception()) is not None else None)

    def _save_part(self, effect: SaveSnapshot) -> None:
        assert self._parts is not None
        self.spawn(self._parts.save(effect))

    # ---------------------------------------------------------------------------------------------------- sending

    async def _give_state(self, driver: LearnerDriver, envelope: Envelope, body: InnerState) -> None:
        """Send inner state, or the answer that there is none to give: the other learner does not wait for it then."""
        try:
            taken = await asyncio.wrap_future(driver.take_promised_state(envelope))
            file = await self._loop.run_in_executor(self.compute, packed, taken, self._run_directory)
        except AtollError:  # the island is broken
            raise
        except Exception as error:
            cause = cause_of(error)
            self.log.warning("cannot give inner state to learner %d: %s; training goes on", body.to, cause)
            file = packed(optimizer_state.refusal(cause), None)
        try:
            await self.bulk.put("/v1/state", Kind.INNER_STATE, 0, encode_message(envelope), file.view)
        except (Refusal, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.log.warning("inner state for learner %d did not arrive: %s", body.to, why(error))

    async def _tell_metrics(self, get_stats: Callable[[], LearnerStats]) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            if self.driver is None:
                return
            stats = get_stats()
            now, (then, before) = time.monotonic(), self._told_at
            self._told_at = (now, stats.tokens)
            told = metrics_of(stats, self.last_loss, (stats.tokens - before) / (now - then) if now > then else 0.0)
            self.link.post_metrics(json.dumps(told))

    # ---------------------------------------------------------------------------------------------------- hearing

    def handle_link_event(self, event: LinkEvent) -> None:
        """Handle what happens on the link and to it; `LearnerLink` calls this."""
        if isinstance(event, MessageArrived):
            self._on_message(event.envelope)
            return
        if isinstance(event, LinkClosed | DialFailed):
            if self._away is None:
                self._away = Away(time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S"), event.why)
            self._away = self._away._replace(problem=event.why)
        if isinstance(event, DialFailed) and self._complaints.left_out(event.why) is not None:
            limit = f", for up to {self._away_timeout_s:g} s" if self._away_timeout_s < math.inf else ""
            said = "cannot reach syncer at %s since %s (%s); retrying%s"
            self.log.warning(said, self.link.address, self._away and self._away.date, event.why, limit)
        self.tell(event)

    def _on_message(self, envelope: Envelope) -> None:
        body = envelope.body
        if self.driver is None:
            return  # it says goodbye
        if type(body) is Welcome:
            self._away = None
        if type(body) is Published:
            self._traffic.notice(envelope, body)
        elif type(body) is InnerState:
            self.spawn(self._fetch_state(envelope))
        elif type(body) is NoPeer:
            self.spawn(self._seek(envelope))
        else:
            if type(body) is RefuseContribution and body.reason.code in WARNINGS:
                p = body.round.fragment
                prefix = f"the syncer refused the contribution to fragment {p}: "
                self._reasons.write(body.reason, ("fragment", p), prefix)
            self.tell(MessageArrived(envelope))

    async def _seek(self, no_peer: Envelope | None = None) -> None:
        """Inner state on disk, for a learner to which nobody gives any. The core hears of it first."""
        driver, parts = self.driver, self._parts
        if driver is None or parts is None:
            return
        if driver.is_joining():
            await asyncio.shield(parts.seek(driver.boundary))
        if no_peer is not None:
            self.tell(MessageArrived(no_peer))

    async def _fetch_state(self, envelope: Envelope) -> None:
        most = max_state_bytes(sum(fragment.whole_numel for fragment in self.fragments))
        files: list[StateFile] = []

        def room(size: int) -> memoryview:
            files.append(StateFile(size, self._run_directory))
            return files[0].view

        try:
            await self.link.inner_state(envelope.learner, envelope.incarnation, most, room)
        except (Refusal, WireError, aiohttp.ClientError, OSError, TimeoutError) as wrong:
            self.log.warning("a peer's inner state could not be fetched: %s", why(wrong))  # another peer is asked
            return
        driver = self.driver
        if driver is None or not driver.is_joining():
            self.tell(MessageArrived(envelope))
            return
        assert isinstance(envelope.body, InnerState)
        try:
            given = await asyncio.to_thread(driver.boundary.prepare_given, files[0])
        except Exception as error:
            await self._seek()  # before the last peer has failed too
            self.tell(StateRejected(envelope.body.giver, cause_of(error)))
            return
        driver.keep_inner_state(given)
        self.tell(MessageArrived(envelope))


def metrics_of(stats: LearnerStats, loss: float | Tensor | None, tokens_per_s: float) -> dict[str, Any]:
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
