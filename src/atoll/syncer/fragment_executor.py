"""What a process does with the fragments that it holds: add up, merge, make durable, serve.

One thread merges, in the order in which the core asked; another writes files. Whoever is slow delays neither the other
nor the event loop, in which everything else here is called.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

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
from atoll.core.types import FragmentId, Version
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import Fenced, Store
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import SyncerFragment

T = TypeVar("T")


class Payload:
    """The values of a contribution. Their memory counts as held until they are added to the sums, or not wanted."""

    def __init__(self, data: Tensor, up: str, norm: float, give_back: Callable[[], None]) -> None:
        self.data = data
        self.up = up  # the codec that they are in
        self.norm = norm
        self.give_back = give_back
        self.is_taken = False  # whoever takes it gives the memory back


class FragmentExecutor:
    """`tell` hears what came of it; `on_durable` is called before `tell` when a version is, `on_fenced` instead of it
    when another process has the store."""

    def __init__(
        self,
        store: Store,
        log: logging.Logger,
        tell: Callable[[SyncerEvent], None],
        on_durable: Callable[[SyncerFragment], None],
        on_fenced: Callable[[Fenced], None],
    ) -> None:
        self.store = store
        self.held: dict[FragmentId, SyncerFragment] = {}
        self._log = log
        self._tell = tell
        self._on_durable = on_durable
        self._on_fenced = on_fenced
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
            self._tell(MergeFailed(effect.round, f"{type(wrong).__name__}: {wrong}"))
        else:
            self._tell(MergeDone(effect.round))

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
            self._on_fenced(wrong)
        elif isinstance(wrong, OSError):
            self._tell(PersistFailed(key, wrong.strerror or str(wrong)))
        elif wrong is not None:
            self._log.error("a record could not be written", exc_info=wrong)
            self._tell(PersistFailed(key, f"{type(wrong).__name__}: {wrong}"))
        else:
            if key.kind == "version":
                held = self.held[key.number]
                held.now_durable()
                self._on_durable(held)
            self._tell(Persisted(key))

    async def stop(self) -> None:
        for thread in (self._merge_thread, self._disk_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
