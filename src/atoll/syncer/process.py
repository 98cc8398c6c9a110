"""The syncer process: sockets, threads, files and tensors around `SyncerCore`.

One event loop owns the core and all status. One thread merges, in the order of the core's effects. Another thread
writes files. A slow disk or a slow link of a learner delays none of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.protocol import (
    Accumulate,
    Body,
    CloseConnection,
    ControlRequested,
    DiscardRound,
    Envelope,
    FinishRequested,
    Halt,
    LearnerDisconnected,
    LogReason,
    MergeDone,
    MergeRound,
    Persist,
    PublishAck,
    Published,
    Refuse,
    RefuseContribution,
    Resync,
    Send,
    SnapshotRecord,
    SnapshotRequested,
    Started,
    StoreFenced,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
    VersionRecord,
    Welcome,
)
from atoll.core.states import RunStage
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import NO_VERSION, SYNCER, FragmentId, Incarnation, LearnerId, Version
from atoll.logs import WARNING_REASONS, ContextLogger, ReasonLogger
from atoll.store.run_settings import RunClock, RunSettings
from atoll.store.tensor_file import StoreDamagedError
from atoll.store.version_store import CONTROLS_FILE, FencedError, Store
from atoll.syncer.controls import ControlState
from atoll.syncer.fragment_endpoints import MemoryGate
from atoll.syncer.fragment_executor import ContributionPayload, FragmentExecutor
from atoll.syncer.initial_model import INIT_FILE, load_initial_values
from atoll.syncer.shards.coordinator import RemoteFragment, ShardCoordinator
from atoll.syncer.shards.messages import PinSnapshot, UnpinSnapshot
from atoll.syncer.status import SnapshotStatuses, SyncerMetrics
from atoll.tape.files import TapeSink, new_header
from atoll.tape.format import Actor, Entry
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import MergeStats, SyncerFragment
from atoll.transport.auth import AccessControl
from atoll.transport.tls import ServerTls
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import encode_message

LinkKey = tuple[LearnerId, Incarnation, int]


@dataclass(slots=True, eq=False)
class SyncerLink:
    """Connection to one learner, with a bounded send queue: a newer version of a fragment replaces an older notice.

    A learner is notified of one version of a fragment at a time, and that version is pinned for it. If it were
    notified of each: (1) it receives the notice of version 7, (2) when its request arrives, version 8 is the newest and
    7 is deleted, (3) it receives the notice of version 8, and so on. If versions are published faster than a request
    travels, it would never get any.
    """

    key: LinkKey
    connection: WebSocketConnection
    _fragments: Mapping[FragmentId, SyncerFragment | RemoteFragment]
    # pinned until the learner acknowledges the version or requests another one
    _announced: dict[FragmentId, Version] = field(default_factory=dict)
    # the newest version of each fragment in `_announced`, to send next
    _pending: dict[FragmentId, Envelope] = field(default_factory=dict)

    def post(self, envelope: Envelope) -> None:
        if self.connection.is_closing:
            return
        body, key = envelope.body, None
        if type(body) is Published:
            if body.fragment in self._announced:
                self._pending[body.fragment] = envelope
                return
            key = ("published", body.fragment)
            fragment = self._fragments.get(body.fragment)
            if fragment is not None and fragment.pin(body.version) is not None:
                self._announced[body.fragment] = body.version
        self.connection.post(partial(encode_message, envelope), key)

    def acknowledge(self, body: Body) -> None:
        """Unpin the announced version once the learner has it or requests another, and announce the next one."""
        if type(body) is not PublishAck and type(body) is not Resync:
            return
        p = body.fragment
        has = body.version if type(body) is PublishAck else NO_VERSION
        if p not in self._announced or (type(body) is PublishAck and has < self._announced[p]):
            return
        self._fragments[p].unpin(self._announced.pop(p))
        envelope = self._pending.pop(p, None)
        if envelope is not None and isinstance(envelope.body, Published) and envelope.body.version > has:
            self.post(envelope)

    def abandon(self) -> None:
        self.connection.cancel()
        for p, version in self._announced.items():
            self._fragments[p].unpin(version)
        self._announced.clear()


MAX_RECEIVING_BYTES = 256 * 2**20
"""Limit for contributions that are being received at the same time, at least four times the largest fragment."""


class SyncerProcess:
    """Driver of the syncer's core for one run. Create and use it within one event loop."""

    def __init__(
        self,
        directory: Path,
        settings: RunSettings,
        *,
        token: str | None = None,
        tls: ServerTls | None = None,
        log: logging.Logger | None = None,
        take_over: bool = False,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self.log = ContextLogger(log if log is not None else logging.getLogger("atoll.syncer"))
        self._reasons = ReasonLogger(self.log)
        self.core: SyncerCore | None = None  # set when the run is created or restored
        self.plan: FragmentPlan | None = None
        self.links: dict[LinkKey, SyncerLink] = {}
        self.metrics = SyncerMetrics(directory, self.log)
        # learners that have an incarnation and have not sent Hello yet
        self.assigned_incarnations: dict[LearnerId, Incarnation] = {}
        self.bytes_up = 0  # complete contributions received here, without those at shards
        self.bytes_down = 0  # fragment values sent from here
        self.refused: Counter[str] = Counter()  # invalid messages and frames, by code
        self.merged_contributions = 0  # contributions merged by this process
        self.merges_before = 0  # merges by earlier syncers of this run
        self.run_ended = asyncio.Event()  # the run has ended, or this syncer has been superseded
        # The end was sent to every learner that may reconnect, or this syncer must stop.
        self.end_delivered = asyncio.Event()
        self._informed: set[LearnerId] = set()  # learners whose new process got the reply that the run is over
        self.halt_reason = ""
        self.superseded_by = ""  # message about the newer syncer: this process must not serve any more
        self.snapshots = SnapshotStatuses()
        self.failure: BaseException | None = (
            None  # internal error; durable state is intact, and another process can continue
        )
        self.gate = MemoryGate(MAX_RECEIVING_BYTES)
        self.access = AccessControl(token, tls, self.refused, self.log)
        self.on_authenticated: Callable[[asyncio.BaseTransport | None], None] = lambda transport: None
        self._loop = asyncio.get_running_loop()
        self._pinned_snapshot = 0  # the snapshot whose versions are pinned in the store
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.store = Store.open(directory / "store", is_takeover=take_over)
        stored = self.store.read_settings()
        if stored is not None:
            self.settings = settings.with_stored(RunSettings.from_json(stored))
        self.executor = FragmentExecutor(self.store, self)
        self._execute: Mapping[type, Callable[[Any], None]] = {
            Send: self._send,
            LogReason: self._log_reason,
            CloseConnection: self._close_connection,
            MergeRound: self.executor.merge_round,
            DiscardRound: self.executor.discard,
            Persist: lambda effect: self.executor.persist(effect.record),
            Halt: self._halt,
        }
        self.log.fields |= {"run": self.settings.config.run_id, "epoch": self.store.epoch}
        self.shards = ShardCoordinator(self, self.settings.shards) if self.settings.shards else None
        self.clock = RunClock(self.settings.founded_at)
        self._tape: TapeSink | None = None
        limits = self.settings.config.limits
        self.controls = ControlState.from_json(
            self.store.read_controls() or {}, self.store.directory / CONTROLS_FILE, limits
        )
        self._control_lock = asyncio.Lock()
        self._end_received = self.store.read_end_received()  # learners that acknowledged the end to an earlier syncer
        self._gathered_values: dict[FragmentId, Tensor] = {}  # final values, downloaded from the shards

    # ---------------------------------------------------------------------------------------------------- starting

    async def start(self) -> None:
        """Resume the run in the directory. Without one, wait for a learner that uploads a model."""
        if self.settings.plan is not None and self.shards is not None:
            self._spawn(self._restore_from(self.shards, self.settings.plan))
        elif self.settings.plan is not None:
            await self._restore(self.settings.plan)
        self._spawn(self.executor.write_heartbeats())
        if self.access.tls is not None:
            self._spawn(self.access.watch_keys(self._connections))

    async def _restore(self, plan: FragmentPlan) -> None:
        await self.executor.load(plan, self.settings, list(range(len(plan.fragments))))
        restored = await self.executor.run_on_disk(self.store.read_restored)
        merges = sum(fragment.served.version for fragment in self.fragments.values())
        self.log.info("resuming the run: %d merges on disk, epoch %d", merges, self.store.epoch)
        self._start_core(plan, restored)

    async def _restore_from(self, shards: ShardCoordinator, plan: FragmentPlan) -> None:
        """Resume the run after all shards have reported their versions."""
        self.log.info("waiting for %d shards to resume the run", shards.count)
        versions = await shards.records(len(plan.fragments))
        try:
            restored = replace(await self.executor.run_on_disk(self.store.read_restored), versions=versions)
            self.log.info("resuming the run: epoch %d", self.store.epoch)
            self._start_core(plan, restored)
        except Exception as error:
            self.log.critical("cannot resume the run: %s", error)
            self.failure = error
            self.run_ended.set()

    async def create_run(self, plan: FragmentPlan, values: list[Tensor]) -> None:
        """Create the run from the model that a learner uploaded. It is durable before any learner can join.

        Raises:
            ValueError: The checkpoint from which the run starts is of another model.
        """
        warm = await asyncio.to_thread(load_initial_values, self.directory, plan)
        values = values if warm is None else warm
        settings = replace(
            self.settings,
            config=replace(self.settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint()),
            plan=plan,
            founded_at=time.time(),
        )
        if self.shards is not None:
            await self.shards.create_run(settings, values)
            await self.executor.create_fragments(settings, {})
            self.settings = settings
            self.shards.announce_run()
        else:
            await self.executor.create_fragments(settings, dict(enumerate(values)))
        self.settings = settings
        self.clock = RunClock(settings.founded_at)
        source = f", with the values of {INIT_FILE}" if warm is not None else ""
        self.log.info("created the run: %d parameters in %d fragments%s", plan.total_numel, len(plan.fragments), source)
        self._start_core(plan, None)

    def _start_core(self, plan: FragmentPlan, restored: RestoredState | None) -> None:
        config = self.settings.config
        actor = Actor(SYNCER, self.store.epoch)
        self._tape = TapeSink(self.directory, new_header(actor, config, restored=restored), self.log)
        self.plan = plan
        if self.shards is not None:
            self.shards.begin(len(plan.fragments))
        largest = max(plan.numel(p) for p in range(len(plan.fragments)))
        self.gate.max_bytes = max(MAX_RECEIVING_BYTES, 4 * 4 * largest)
        self.core = SyncerCore(config, self.store.epoch, restored)
        self.merges_before = self.core.state.merges
        self.handle_event(Started())
        for event in self.controls.events():  # before any learner can join
            self.handle_event(event)
        if self.shards is not None:
            self.shards.report_missing_shards()

    # ---------------------------------------------------------------------------------------------------- the core

    def handle_event(self, event: SyncerEvent, payload: ContributionPayload | None = None) -> list[SyncerEffect]:
        """Have the core handle an event and execute its effects. A core that has failed is not called again."""
        if self._stopping or self.failure is not None:
            return []
        try:
            return self._handle(event, payload)
        except Exception as error:
            self.log.critical(
                "internal error in the syncer; stopping. Start it again with the same directory", exc_info=error
            )
            self.failure = error
            self.run_ended.set()
            self.end_delivered.set()
            return []

    def _handle(self, event: SyncerEvent, payload: ContributionPayload | None) -> list[SyncerEffect]:
        """Write the tape entry before any effect is executed."""
        assert self.core is not None and self._tape is not None
        now = self.clock.now()
        if type(event) is MergeDone:
            self.merged_contributions += len(self.core.state.fragments[event.round.fragment].contributions)
        effects = self.core.handle(now, event)
        self._tape.write(Entry(now, Actor(SYNCER, self.store.epoch), self.core.state.tick, event, tuple(effects)))
        for effect in effects:
            if self.shards is not None and _is_shard_effect(effect):
                self.shards.execute(effect)  # type: ignore[arg-type]
            elif type(effect) is Accumulate:
                assert payload is not None, "a contribution without its values"
                self.executor.accumulate(effect, payload)
            else:
                execute = self._execute.get(type(effect))
                if execute is not None:
                    execute(effect)
        self._pin_snapshot_versions(self.core)
        if self.core.state.stage is RunStage.FINISHED and not self.learners_missing_end():
            self.end_delivered.set()
        self._arm_timer()
        return effects

    def _arm_timer(self) -> None:
        assert self.core is not None
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self.clock.now()), self._on_timer)

    def _on_timer(self) -> None:
        assert self.core is not None
        self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.clock.now():
            self.handle_event(TimerFired())
        else:
            self._arm_timer()

    # ---------------------------------------------------------------------------------------------------- effects

    def _send(self, effect: Send) -> None:
        envelope = effect.envelope
        body = envelope.body
        link = self.links.get((envelope.learner, envelope.incarnation, envelope.session))
        if link is not None:
            link.post(envelope)
        learner, incarnation = envelope.learner, envelope.incarnation
        if type(body) is RefuseContribution and body.reason.code in WARNING_REASONS:
            p = body.round.fragment
            prefix = f"learner {learner}: contribution to fragment {p} refused: "
            self._reasons.write(body.reason, ("learner", learner), prefix, incarnation=incarnation, fragment=p)
        elif type(body) is Refuse:
            self.refused[body.reason.code] += 1
            if body.reason.code == "refused-finished":
                self._informed.add(envelope.learner)
            # The log limit is per run, not per learner: a process that is not in the run could use any number of ids.
            prefix = f"learner {learner}: refused by the run in {self.directory}: "
            self._reasons.write(body.reason, ("run", 0), prefix, learner=learner, incarnation=incarnation)
            if link is not None and body.final:
                link.connection.close(str(body.reason))
        elif type(body) is Welcome:
            self._close_older(learner, incarnation)

    def _close_older(self, learner: LearnerId, incarnation: Incarnation) -> None:
        """Close the links of older incarnations. Such a process gets the reason when it reconnects."""
        for key, link in self.links.items():
            if key[0] == learner and key[1] < incarnation:
                link.connection.close(f"incarnation {key[1]} is replaced by {incarnation}")

    def _log_reason(self, effect: LogReason) -> None:
        kind, number = effect.subject
        self.snapshots.record(effect.reason)
        context: dict[str, Any] = {}
        if kind == "fragment":
            assert self.core is not None
            context["version"] = self.core.state.fragments[number].version
        elif kind == "learner" and self.core is not None and number in self.core.state.members:
            context["incarnation"] = self.core.state.members[number].incarnation
        prefix = f"{kind} {number}: " if kind != "run" else "run: "
        self._reasons.write(effect.reason, effect.subject, prefix, **context)

    def _close_connection(self, effect: CloseConnection) -> None:
        link = self.links.pop((effect.learner, effect.incarnation, effect.session), None)
        if link is not None:
            link.connection.close(str(effect.reason))

    @property
    def fragments(self) -> dict[FragmentId, SyncerFragment]:
        """Fragments in this process: none in a run with shards."""
        return self.executor.fragments

    @property
    def all_fragments(self) -> Mapping[FragmentId, SyncerFragment | RemoteFragment]:
        """All fragments of the run, here or at the shards."""
        return self.shards.fragments if self.shards is not None else self.executor.fragments

    def on_durable(self, fragment: SyncerFragment) -> None:
        if fragment.stats is not None:
            self.record_merge(fragment.id, fragment.served.version, fragment.stats)

    def record_merge(self, fragment: FragmentId, version: Version, stats: MergeStats) -> None:
        self.metrics.record_merge(self.clock.now(), self.store.epoch, fragment, version, stats)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of values, received and sent, including those of the shards."""
        if self.shards is None:
            return self.bytes_up, self.bytes_down
        at_shards = self.shards.traffic()
        return self.bytes_up + at_shards.bytes_up, self.bytes_down + at_shards.bytes_down

    def _pin_snapshot_versions(self, core: SyncerCore) -> None:
        """Pin the versions of a snapshot when it starts: its parts may arrive after the store would delete them."""
        snapshot = core.state.snapshot
        if snapshot is not None and snapshot.id != self._pinned_snapshot:
            self._pinned_snapshot = snapshot.id
            self.executor.submit_to_disk(self.store.pin_snapshot, snapshot.id, snapshot.versions)
            if self.shards is not None:
                self.shards.post_all(PinSnapshot(snapshot.id, snapshot.versions))
        elif snapshot is None and self._pinned_snapshot:
            self.executor.submit_to_disk(self.store.discard_snapshot, self._pinned_snapshot)
            if self.shards is not None:
                self.shards.post_all(UnpinSnapshot(self._pinned_snapshot))
            self._pinned_snapshot = 0

    def _halt(self, effect: Halt) -> None:
        self.halt_reason = str(effect.reason)
        if effect.reason.code == "superseded-epoch" and not self.superseded_by:  # reported by a learner
            self.superseded_by = str(effect.reason)
        self.log.info("%s", effect.reason)
        self.run_ended.set()

    # ---------------------------------------------------------------------------------------------------- learners

    def assign_learner(self, requested: LearnerId | None) -> tuple[LearnerId, Incarnation]:
        """Return an id and an incarnation, which is newer than all known ones of that learner."""
        members = self.core.state.members if self.core is not None else {}
        learner = requested
        if learner is None:
            learner = 1
            while learner in members or learner in self.assigned_incarnations:
                learner += 1
        known = members[learner].incarnation if learner in members else 0
        self.assigned_incarnations[learner] = max(known, self.assigned_incarnations.get(learner, 0)) + 1
        return learner, self.assigned_incarnations[learner]

    def _connections(self) -> list[WebSocketConnection]:
        return [link.connection for link in (*self.links.values(), *(self.shards or ()))]

    def connected_learners(self) -> set[LearnerId]:
        """Return the learners that have a link, or an assigned id but no link yet."""
        members = self.core.state.members if self.core is not None else {}
        return {key[0] for key in self.links} | {
            learner for learner in self.assigned_incarnations if learner not in members
        }

    def attach(self, link: SyncerLink) -> None:
        old = self.links.pop(link.key, None)
        if old is not None:
            old.connection.close("replaced by another connection of the same session")
        self.links[link.key] = link
        if self.shards is not None:
            self.shards.links_changed()

    def detach(self, link: SyncerLink, cause: str) -> None:
        if self.links.get(link.key) is link:
            del self.links[link.key]
            if self.shards is not None:
                self.shards.links_changed()
            self.handle_event(LearnerDisconnected(*link.key, cause))

    async def apply_control(self, event: ControlRequested) -> bool:
        """Apply a checked request of an operator. It is durable before the core handles it.

        Return False if the run was asked to end while the request waited for the lock.

        Raises:
            OSError: The request cannot be written.
        """
        async with self._control_lock:
            if self.core is None or self.core.state.stage is not RunStage.RUNNING:
                return False
            await self._store_controls(self.controls.with_event(event, time.time()))
            self.handle_event(event)
            return True

    async def _store_controls(self, controls: ControlState) -> None:
        if controls is not self.controls:
            try:
                await self.executor.run_on_disk(self.store.write_controls, controls.controls)
            except FencedError as fenced:
                self.on_fenced(fenced)
                raise
            self.controls = controls

    async def finish(self) -> None:
        if self.core is None:
            return
        async with self._control_lock:
            try:
                await self._store_controls(self.controls.without_pause())
            except (FencedError, OSError) as error:
                self.log.warning("cannot write the end of the pause: %s", error)
            self.handle_event(FinishRequested())

    def take_snapshot(self, requested_by: str = "") -> int | None:
        """Return the number of the snapshot that starts now or is in progress, or None if the run is not running."""
        if self.core is None or self.core.state.stage is not RunStage.RUNNING:
            return None
        if self.core.state.snapshot is None:
            before = self.core.state.marker
            self.handle_event(SnapshotRequested(requested_by))
            return self.core.state.marker if self.core.state.marker > before else None
        return self.core.state.snapshot.id

    # ---------------------------------------------------------------------------------------------------- status

    @property
    def finished(self) -> bool:
        return self.core is not None and self.core.state.stage is RunStage.FINISHED

    def learners_missing_end(self) -> list[LearnerId]:
        """Return the learners that may reconnect and have not received the end of the run."""
        missing = self.core.shutdown.learners_without_finish() if self.core is not None else []
        return [learner for learner in missing if learner not in self._end_received | self._informed]

    def _write_end_received(self) -> None:
        """Write which learners have the end: a syncer that restarts on the finished run serves only the others."""
        assert self.core is not None
        acknowledged = {member.id for member in self.core.state.members.values() if member.finish_acked}
        try:
            self.store.write_end_received(self._end_received | acknowledged)
        except (FencedError, OSError, StoreDamagedError) as error:
            self.log.warning("cannot write which learners have received the end: %s", error)

    @property
    def is_sending(self) -> bool:
        return any(fragment.has_pins for fragment in self.fragments.values())

    async def gather_model(self) -> None:
        """Collect the final values from the shards, for `published_model`."""
        if self.shards is not None and self.core is not None and self.plan is not None:
            versions = {p: f.version for p, f in self.core.state.fragments.items()}
            self._gathered_values = await self.shards.gather_values(self.plan, versions)

    def published_model(self) -> dict[str, Tensor]:
        """Return the published model by tensor name, in f32 and in the shapes of the plan."""
        assert self.plan is not None
        found: dict[str, list[tuple[int, Tensor]]] = {}
        values = {p: fragment.served.value for p, fragment in self.fragments.items()} or self._gathered_values
        for p, value in values.items():
            for piece, begin, end in self.plan.spans(p):
                found.setdefault(piece.tensor, []).append((piece.start, value[begin:end]))
        model = {}
        for name, pieces in found.items():
            flat = torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])])
            model[name] = flat.reshape(self.plan.by_name[name].shape)
        return model

    # ---------------------------------------------------------------------------------------------------- stopping

    def on_fenced(self, fenced: FencedError) -> None:
        self.superseded_by = str(fenced)
        if self.core is not None:
            self.handle_event(StoreFenced(fenced.epoch))
        self.run_ended.set()
        self.end_delivered.set()

    def _spawn(self, task: Any) -> None:
        spawned = self._loop.create_task(task)
        self._background.add(spawned)
        spawned.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Stop in a state from which another syncer can resume the run. Learners reconnect to that one."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._background):
            task.cancel()
        for link in list(self.links.values()):
            link.connection.close("the syncer is being stopped")
        await asyncio.gather(
            *(link.connection.wait_closed() for link in list(self.links.values())), return_exceptions=True
        )
        self.links.clear()
        await self.executor.stop()
        if self.finished:
            await asyncio.to_thread(self._write_end_received)
        if self._tape is not None:
            self._tape.close()
        await asyncio.to_thread(self.metrics.close)
        self.store.close()


def _is_shard_effect(effect: SyncerEffect) -> bool:
    if type(effect) is Persist:
        return isinstance(effect.record, VersionRecord | SnapshotRecord)
    return type(effect) in (Accumulate, MergeRound, DiscardRound)
