"""What a process does with the fragments that it holds: add up, merge, make durable, serve.

One thread merges, in the order in which the core asked; another writes files. Whoever is slow delays neither the other
nor the event loop, in which everything else here is called.
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
    """The values of a contribution. Their memory counts as held until they are added to the sums, or not wanted."""

    data: Tensor
    codec: str  # the codec that they are in
    norm: float
    release: Callable[[], None]
    is_taken: bool = False  # whoever takes it gives the memory back


class FragmentHost(Protocol):
    """The process whose fragments they are: a syncer, or a shard of one."""

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
        """Take up these fragments as the store has them."""

        def read() -> dict[FragmentId, SyncerFragment]:
            held = {}
            for p in fragments:
                version, _, kept = self.store.read_newest(p)
                held[p] = SyncerFragment(plan, p, settings.numerics, version, kept["published"])
                held[p].restore(kept)
            return held

        self.fragments = await self.run_on_disk(read)

    async def create_fragments(self, settings: RunSettings, values: dict[FragmentId, Tensor]) -> None:
        """New fragments. They are durable, and the settings after them, when this returns."""
        plan = settings.plan
        assert plan is not None

        def write() -> dict[FragmentId, SyncerFragment]:
            for p in set(self.store.fragments()) - set(values):
                self.store.delete_initial(p)  # somebody else's model came half-way
            for p, value in values.items():
                self.store.write_initial(p, {"published": value})
            self.store.write_settings(settings.to_json())
            return {p: SyncerFragment(plan, p, settings.numerics, 0, value) for p, value in values.items()}

        self.fragments = await self.run_on_disk(write)

    async def rollback_pending(self) -> None:
        """Whatever was begun has ended, and what was merged and not made durable is as if it had never been."""
        await self._loop.run_in_executor(self._merge_thread, int)
        await self._loop.run_in_executor(self._disk_thread, int)
        await asyncio.sleep(0)  # and what came of it was told
        for p, held in self.fragments.items():
            if held.merged is not None:
                version, _, kept = await self.run_on_disk(self.store.read_newest, p)
                self.fragments[p] = held.restore_copy(version, kept)

    async def roll_back(self, p: FragmentId, version: Version) -> None:
        """To the version before the newest, which nobody has seen."""
        _, kept = await self.run_on_disk(self.store.roll_back, p, version)
        self.fragments[p] = self.fragments[p].restore_copy(version, kept)

    async def run_on_disk(self, job: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._disk_thread, job, *args)

    def submit_to_disk(self, job: Callable[..., None], *args: Any) -> None:
        """What the core does not wait for. Should it fail, the write that needs it fails too, and says so."""
        future = self._loop.run_in_executor(self._disk_thread, job, *args)
        future.add_done_callback(lambda done: None if done.cancelled() else self._log_disk_error(done.exception()))

    def _log_disk_error(self, wrong: BaseException | None) -> None:
        if wrong is not None:
            self._log.warning("the store cannot be written: %s", wrong)

    # ---------------------------------------------------------------------------------------------------- effects

    def accumulate(self, effect: Accumulate, payload: ContributionPayload) -> None:
        held = self.fragments[effect.round.fragment]
        payload.is_taken = True

        def added(wrong: BaseException | None) -> None:
            payload.release()
            self._log_sum_error(wrong)

        job = partial(held.accumulate, effect.round, effect.contribution, payload.data, payload.codec, payload.norm)
        self._submit_merge(job, added)

    def _log_sum_error(self, wrong: BaseException | None) -> None:
        """A sum that failed shows when the round is merged: the counts differ, and the merge fails."""
        if wrong is not None:
            self._log.error("a contribution could not be added: %s", wrong)

    def merge_round(self, effect: MergeRound) -> None:
        held = self.fragments[effect.round.fragment]

        def merge() -> None:
            began = time.monotonic()
            held.merge(effect.round, len(effect.contributions), effect.codec)
            assert held.stats is not None
            held.stats = structs.replace(held.stats, merge_s=time.monotonic() - began)

        self._submit_merge(merge, partial(self._on_merge_done, effect))

    def _on_merge_done(self, effect: MergeRound, wrong: BaseException | None) -> None:
        if wrong is not None:
            self._host.handle_event(MergeFailed(effect.round, f"{type(wrong).__name__}: {wrong}"))
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
        wrong = done.exception()
        if isinstance(wrong, FencedError):
            self._host.on_fenced(wrong)
        elif isinstance(wrong, OSError):
            self._host.handle_event(PersistFailed(key, wrong.strerror or str(wrong)))
        elif wrong is not None:
            self._log.error("a record could not be written", exc_info=wrong)
            self._host.handle_event(PersistFailed(key, f"{type(wrong).__name__}: {wrong}"))
        else:
            if key.kind == "version":
                held = self.fragments[key.number]
                held.mark_durable()
                self._host.on_durable(held)
            self._host.handle_event(Persisted(key))

    async def write_heartbeats(self) -> None:
        """Write the heartbeat of the store for ever. Another process that takes over must be noticed also while nothing
        is written."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await asyncio.to_thread(self.store.send_heartbeat)  # not behind a version that is being written
            except FencedError as fenced:
                self._host.on_fenced(fenced)
                return
            except (OSError, StoreDamagedError) as error:
                self._log.warning("the store cannot be read or written: %s", error)

    async def stop(self) -> None:
        for thread in (self._merge_thread, self._disk_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
