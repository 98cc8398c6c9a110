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
from atoll.logs import Named
from atoll.store.fencing import HEARTBEAT_INTERVAL_S
from atoll.store.run_settings import RunSettings
from atoll.store.tensor_file import StoreDamaged
from atoll.store.version_store import Fenced, Store
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport.auth import Access

if TYPE_CHECKING:
    from atoll.syncer.fragment_endpoints import MemoryGate

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Payload:
    """The values of a contribution. Their memory counts as held until they are added to the sums, or not wanted."""

    data: Tensor
    up: str  # the codec that they are in
    norm: float
    give_back: Callable[[], None]
    is_taken: bool = False  # whoever takes it gives the memory back


class FragmentHost(Protocol):
    """The process whose fragments they are: a syncer, or a shard of one."""

    directory: Path
    settings: RunSettings
    gate: MemoryGate
    access: Access
    refused: Counter[str]
    log: Named
    bytes_up: int
    bytes_down: int
    on_proved: Callable[[asyncio.BaseTransport | None], None]

    @property
    def plan(self) -> FragmentPlan | None: ...

    @property
    def fragments(self) -> Mapping[FragmentId, SyncerFragment]: ...

    @property
    def links(self) -> Container[tuple[LearnerId, Incarnation, int]]: ...

    def tell(self, event: SyncerEvent, payload: Payload | None = None) -> object:
        """Handle a result of the executor, or a contribution that has arrived with its values."""

    def note_durable(self, fragment: SyncerFragment) -> None:
        """Take note of a new durable version, before the event `Persisted`."""

    def note_fenced(self, fenced: Fenced) -> None:
        """Stop: another process has the store."""


class FragmentExecutor:
    def __init__(self, store: Store, host: FragmentHost) -> None:
        self.store = store
        self.held: dict[FragmentId, SyncerFragment] = {}
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
                version, _, kept = self.store.newest(p)
                held[p] = SyncerFragment(plan, p, settings.numerics, version, kept["published"])
                held[p].restore(kept)
            return held

        self.held = await self.on_disk(read)

    async def found(self, settings: RunSettings, values: dict[FragmentId, Tensor]) -> None:
        """New fragments. They are durable, and the settings after them, when this returns."""
        plan = settings.plan
        assert plan is not None

        def write() -> dict[FragmentId, SyncerFragment]:
            for p in set(self.store.fragments()) - set(values):
                self.store.forget_initial(p)  # somebody else's model came half-way
            for p, value in values.items():
                self.store.write_initial(p, {"published": value})
            self.store.write_settings(settings.to_json())
            return {p: SyncerFragment(plan, p, settings.numerics, 0, value) for p, value in values.items()}

        self.held = await self.on_disk(write)

    async def settle(self) -> None:
        """Whatever was begun has ended, and what was merged and not made durable is as if it had never been."""
        await self._loop.run_in_executor(self._merge_thread, int)
        await self._loop.run_in_executor(self._disk_thread, int)
        await asyncio.sleep(0)  # and what came of it was told
        for p, held in self.held.items():
            if held.next is not None:
                version, _, kept = await self.on_disk(self.store.newest, p)
                self.held[p] = held.restored(version, kept)

    async def go_back(self, p: FragmentId, version: Version) -> None:
        """To the version before the newest, which nobody has seen."""
        _, kept = await self.on_disk(self.store.go_back, p, version)
        self.held[p] = self.held[p].restored(version, kept)

    async def on_disk(self, job: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._disk_thread, job, *args)

    def on_disk_later(self, job: Callable[..., None], *args: Any) -> None:
        """What the core does not wait for. Should it fail, the write that needs it fails too, and says so."""
        future = self._loop.run_in_executor(self._disk_thread, job, *args)
        future.add_done_callback(lambda done: None if done.cancelled() else self._report_disk(done.exception()))

    def _report_disk(self, wrong: BaseException | None) -> None:
        if wrong is not None:
            self._log.warning("the store cannot be written: %s", wrong)

    # ---------------------------------------------------------------------------------------------------- effects

    def accumulate(self, effect: Accumulate, payload: Payload) -> None:
        held = self.held[effect.round.fragment]
        payload.is_taken = True

        def added(wrong: BaseException | None) -> None:
            payload.give_back()
            self._report_trouble(wrong)

        job = partial(held.accumulate, effect.round, effect.accepted, payload.data, payload.up, payload.norm)
        self._merge(job, added)

    def _report_trouble(self, wrong: BaseException | None) -> None:
        """A sum that failed shows when the round is merged: the counts differ, and the merge fails."""
        if wrong is not None:
            self._log.error("a contribution could not be added: %s", wrong)

    def merge_round(self, effect: MergeRound) -> None:
        held = self.held[effect.round.fragment]

        def merge() -> None:
            began = time.monotonic()
            held.merge(effect.round, len(effect.contributions), effect.codec)
            assert held.stats is not None
            held.stats = structs.replace(held.stats, merge_s=time.monotonic() - began)

        self._merge(merge, partial(self._merge_ended, effect))

    def _merge_ended(self, effect: MergeRound, wrong: BaseException | None) -> None:
        if wrong is not None:
            self._host.tell(MergeFailed(effect.round, f"{type(wrong).__name__}: {wrong}"))
        else:
            self._host.tell(MergeDone(effect.round))

    def discard(self, effect: DiscardRound) -> None:
        self._merge(partial(self.held[effect.round.fragment].discard, effect.round), self._report_trouble)

    def _merge(self, job: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        future = self._loop.run_in_executor(self._merge_thread, job)
        future.add_done_callback(lambda done: None if done.cancelled() else then(done.exception()))

    def persist(self, record: Record) -> None:
        future = self._loop.run_in_executor(self._disk_thread, self._write, record)
        future.add_done_callback(partial(self._written, record.key()))

    def _write(self, record: Record) -> None:
        tensors = None
        if isinstance(record, VersionRecord):
            tensors = self.held[record.fragment].stored_state(record.version)
        self.store.write(record, tensors)

    def _written(self, key: RecordKey, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        wrong = done.exception()
        if isinstance(wrong, Fenced):
            self._host.note_fenced(wrong)
        elif isinstance(wrong, OSError):
            self._host.tell(PersistFailed(key, wrong.strerror or str(wrong)))
        elif wrong is not None:
            self._log.error("a record could not be written", exc_info=wrong)
            self._host.tell(PersistFailed(key, f"{type(wrong).__name__}: {wrong}"))
        else:
            if key.kind == "version":
                held = self.held[key.number]
                held.now_durable()
                self._host.note_durable(held)
            self._host.tell(Persisted(key))

    async def watch_fence(self) -> None:
        """Write the heartbeat of the store for ever. Another process that takes over must be noticed also while nothing
        is written."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await asyncio.to_thread(self.store.beat)  # not behind a version that is being written
            except Fenced as fenced:
                self._host.note_fenced(fenced)
                return
            except (OSError, StoreDamaged) as error:
                self._log.warning("the store cannot be read or written: %s", error)

    async def stop(self) -> None:
        for thread in (self._merge_thread, self._disk_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
