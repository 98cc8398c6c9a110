"""Operations on the fragments of a process: accumulate, merge, make durable, serve.

One thread merges, in the order of the core's effects. Another thread writes files. Neither delays the other or the
event loop. Call everything else here in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import structs
from torch import Tensor

from atoll.core.protocol import (
    Accumulate,
    DiscardRound,
    MergeDone,
    MergeFailed,
    MergeRound,
    Persisted,
    PersistFailed,
    Record,
    RecordKey,
    SyncerEvent,
    VersionRecord,
)
from atoll.core.types import FragmentId, Incarnation, LearnerId, Version
from atoll.logs import ContextLogger
from atoll.store.fencing import HEARTBEAT_INTERVAL_S
from atoll.store.run_settings import RunSettings
from atoll.store.tensor_file import StoreDamagedError
from atoll.store.version_store import FencedError, Store
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport.auth import AccessControl

if TYPE_CHECKING:
    from atoll.syncer.fragment_endpoints import MemoryGate

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ContributionPayload:
    """The values of a contribution. Their memory is in use until they are accumulated or dropped."""

    data: Tensor
    codec: str  # codec of `data`
    norm: float
    release: Callable[[], None]
    is_taken: bool = False  # True: the code that took the payload must call `release`


class FragmentHost(Protocol):
    """The process that the fragments belong to: a syncer or a shard."""

    directory: Path
    settings: RunSettings
    gate: MemoryGate
    access: AccessControl
    refused: Counter[str]
    log: ContextLogger
    bytes_up: int
    bytes_down: int
    on_authenticated: Callable[[asyncio.BaseTransport | None], None]

    @property
    def plan(self) -> FragmentPlan | None: ...

    @property
    def fragments(self) -> Mapping[FragmentId, SyncerFragment]: ...

    @property
    def links(self) -> Container[tuple[LearnerId, Incarnation, int]]: ...

    def handle_event(self, event: SyncerEvent, payload: ContributionPayload | None = None) -> object:
        """Handle a result of the executor, or a contribution that has arrived with its values."""

    def on_durable(self, fragment: SyncerFragment) -> None:
        """Take note of a new durable version, before the event `Persisted`."""

    def on_fenced(self, fenced: FencedError) -> None:
        """Stop: another process has the store."""


class FragmentExecutor:
    def __init__(self, store: Store, host: FragmentHost) -> None:
        self.store = store
        self.fragments: dict[FragmentId, SyncerFragment] = {}
        self._host = host
        self._log = host.log
        self._loop = asyncio.get_running_loop()
        self._merge_thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-merge")
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-disk")

    # ---------------------------------------------------------------------------------------------------- from disk

    async def load(self, plan: FragmentPlan, settings: RunSettings, fragments: list[FragmentId]) -> None:
        """Load these fragments from the store."""

        def read() -> dict[FragmentId, SyncerFragment]:
            loaded = {}
            for p in fragments:
                version, _, tensors = self.store.read_newest(p)
                loaded[p] = SyncerFragment(plan, p, settings.numerics, version, tensors["published"])
                loaded[p].restore(tensors)
            return loaded

        self.fragments = await self.run_on_disk(read)

    async def create_fragments(self, settings: RunSettings, values: dict[FragmentId, Tensor]) -> None:
        """Create the fragments. When this returns, first they and then the settings are durable."""
        plan = settings.plan
        assert plan is not None

        def write() -> dict[FragmentId, SyncerFragment]:
            for p in set(self.store.fragments()) - set(values):
                self.store.delete_initial(p)  # left by an upload of another model that did not complete
            for p, value in values.items():
                self.store.write_initial(p, {"published": value})
            self.store.write_settings(settings.to_json())
            return {p: SyncerFragment(plan, p, settings.numerics, 0, value) for p, value in values.items()}

        self.fragments = await self.run_on_disk(write)

    async def rollback_pending(self) -> None:
        """Wait for running jobs, and drop merges that are not durable."""
        await self._loop.run_in_executor(self._merge_thread, int)
        await self._loop.run_in_executor(self._disk_thread, int)
        await asyncio.sleep(0)  # let the callbacks of those jobs run
        for p, fragment in self.fragments.items():
            if fragment.merged is not None:
                version, _, tensors = await self.run_on_disk(self.store.read_newest, p)
                self.fragments[p] = fragment.restore_copy(version, tensors)

    async def roll_back(self, p: FragmentId, version: Version) -> None:
        """Return to the version before the newest, which was never published."""
        _, tensors = await self.run_on_disk(self.store.roll_back, p, version)
        self.fragments[p] = self.fragments[p].restore_copy(version, tensors)

    async def run_on_disk(self, job: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._disk_thread, job, *args)

    def submit_to_disk(self, job: Callable[..., None], *args: Any) -> None:
        """Start a job that the core does not wait for. If it fails, the write that needs it fails and is reported."""
        future = self._loop.run_in_executor(self._disk_thread, job, *args)
        future.add_done_callback(lambda done: None if done.cancelled() else self._log_disk_error(done.exception()))

    def _log_disk_error(self, error: BaseException | None) -> None:
        if error is not None:
            self._log.warning("cannot write the store: %s", error)

    # ---------------------------------------------------------------------------------------------------- effects

    def accumulate(self, effect: Accumulate, payload: ContributionPayload) -> None:
        fragment = self.fragments[effect.round.fragment]
        payload.is_taken = True

        def on_done(error: BaseException | None) -> None:
            payload.release()
            self._log_sum_error(error)

        job = partial(fragment.accumulate, effect.round, effect.contribution, payload.data, payload.codec, payload.norm)
        self._submit_merge(job, on_done)

    def _log_sum_error(self, error: BaseException | None) -> None:
        """Log a failed accumulation. The merge of the round fails later, because the counts differ."""
        if error is not None:
            self._log.error("cannot accumulate a contribution: %s", error)

    def merge_round(self, effect: MergeRound) -> None:
        fragment = self.fragments[effect.round.fragment]

        def merge() -> None:
            started_at = time.monotonic()
            fragment.merge(effect.round, len(effect.contributions), effect.codec)
            assert fragment.stats is not None
            fragment.stats = structs.replace(fragment.stats, merge_s=time.monotonic() - started_at)

        self._submit_merge(merge, partial(self._on_merge_done, effect))

    def _on_merge_done(self, effect: MergeRound, error: BaseException | None) -> None:
        if error is not None:
            self._host.handle_event(MergeFailed(effect.round, f"{type(error).__name__}: {error}"))
        else:
            self._host.handle_event(MergeDone(effect.round))

    def discard(self, effect: DiscardRound) -> None:
        self._submit_merge(partial(self.fragments[effect.round.fragment].discard, effect.round), self._log_sum_error)

    def _submit_merge(self, job: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        future = self._loop.run_in_executor(self._merge_thread, job)
        future.add_done_callback(lambda done: None if done.cancelled() else then(done.exception()))

    def persist(self, record: Record) -> None:
        future = self._loop.run_in_executor(self._disk_thread, self._write, record)
        future.add_done_callback(partial(self._on_written, record.key()))

    def _write(self, record: Record) -> None:
        tensors = None
        if isinstance(record, VersionRecord):
            tensors = self.fragments[record.fragment].stored_state(record.version)
        self.store.write(record, tensors)

    def _on_written(self, key: RecordKey, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, FencedError):
            self._host.on_fenced(error)
        elif isinstance(error, OSError):
            self._host.handle_event(PersistFailed(key, error.strerror or str(error)))
        elif error is not None:
            self._log.error("cannot write a record", exc_info=error)
            self._host.handle_event(PersistFailed(key, f"{type(error).__name__}: {error}"))
        else:
            if key.kind == "version":
                fragment = self.fragments[key.number]
                fragment.mark_durable()
                self._host.on_durable(fragment)
            self._host.handle_event(Persisted(key))

    async def write_heartbeats(self) -> None:
        """Write the heartbeat of the store until a newer owner fences it.

        A takeover must be noticed also while no records are written.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await asyncio.to_thread(self.store.send_heartbeat)  # not in the disk thread, behind a long write
            except FencedError as fenced:
                self._host.on_fenced(fenced)
                return
            except (OSError, StoreDamagedError) as error:
                self._log.warning("cannot read or write the store: %s", error)

    async def stop(self) -> None:
        for thread in (self._merge_thread, self._disk_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
