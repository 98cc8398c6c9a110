"""The syncer as a process: sockets, threads, files and tensors around `SyncerCore`.

One event loop owns the core and everything that people see. One thread merges, in the order in which the core asked;
another writes files. Whoever is slow (a disk, a learner's link) delays neither of the others.
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
    ControlRequested,
    Delivered,
    DiscardRound,
    Envelope,
    FinishRequested,
    Halt,
    Hangup,
    LearnerDisconnected,
    MergeDone,
    MergeRound,
    Persist,
    Published,
    Refuse,
    RefuseContribution,
    Resync,
    Say,
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
from atoll.core.states import Stage
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import Restored
from atoll.core.types import NOTHING, SYNCER, FragmentId, Incarnation, LearnerId, Version
from atoll.logs import WARNINGS, Named, ReasonLog
from atoll.store.run_settings import RunClock, RunSettings
from atoll.store.tensor_file import StoreDamaged
from atoll.store.version_store import CONTROLS, Fenced, Store
from atoll.syncer.controls import Wishes
from atoll.syncer.fragment_endpoints import MemoryGate
from atoll.syncer.fragment_executor import FragmentExecutor, Payload
from atoll.syncer.initial_model import INIT, warm_values
from atoll.syncer.shards.coordinator import RemoteFragment, ShardCoordinator
from atoll.syncer.shards.messages import HoldCut, LetGoCut
from atoll.syncer.status import SnapshotNews, SyncerMetrics
from atoll.tape.files import TapeKeeper, new_header
from atoll.tape.format import Actor, Entry
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.syncer_fragment import MergeStats, SyncerFragment
from atoll.transport.auth import Access
from atoll.transport.tls import ServerTls
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import encode_message

LinkKey = tuple[LearnerId, Incarnation, int]


@dataclass(slots=True, eq=False)
class SyncerLink:
    """What waits for a learner is bounded: a newer version of a fragment takes the place of an older notice.

    A learner is told of one version of a fragment at a time, and that one is kept for it. If it were told of each: (1)
    it hears of version 7, (2) when its request arrives, version 8 is the newest and 7 is gone, (3) it hears of version
    8, and so on. Where versions come faster than a request travels, it would never get any.
    """

    key: LinkKey
    connection: WebSocketConnection
    _fragments: Mapping[FragmentId, SyncerFragment | RemoteFragment]
    _told: dict[FragmentId, Version] = field(default_factory=dict)  # and kept, until it has that one or wants another
    _untold: dict[FragmentId, Envelope] = field(default_factory=dict)  # the newest version of what is in `_told`

    def post(self, envelope: Envelope) -> None:
        if self.connection.is_closing:
            return
        body, key = envelope.body, None
        if type(body) is Published:
            if body.fragment in self._told:
                self._untold[body.fragment] = envelope
                return
            key = ("published", body.fragment)
            held = self._fragments.get(body.fragment)
            if held is not None and held.hold(body.version) is not None:
                self._told[body.fragment] = body.version
        self.connection.post(partial(encode_message, envelope), key)

    def heard(self, body: Body) -> None:
        """The learner has the version that it was told of, or wants another one: it may be told of the next."""
        if type(body) is not Delivered and type(body) is not Resync:
            return
        p = body.fragment
        has = body.version if type(body) is Delivered else NOTHING
        if p not in self._told or (type(body) is Delivered and has < self._told[p]):
            return
        self._fragments[p].release(self._told.pop(p))
        envelope = self._untold.pop(p, None)
        if envelope is not None and isinstance(envelope.body, Published) and envelope.body.version > has:
            self.post(envelope)

    def abandon(self) -> None:
        self.connection.cancel()
        for p, version in self._told.items():
            self._fragments[p].release(version)
        self._told.clear()


RECEIVING_BYTES = 256 * 2**20
"""Of contributions that are being received at once, unless four of the largest fragments are more."""


class SyncerProcess:
    """Everything of one run at one syncer. Made and used within one event loop."""

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
        self.log = Named(log if log is not None else logging.getLogger("atoll.syncer"))
        self._reasons = ReasonLog(self.log)
        self.core: SyncerCore | None = None  # from the founding on
        self.plan: FragmentPlan | None = None
        self.links: dict[LinkKey, SyncerLink] = {}
        self.metrics = SyncerMetrics(directory, self.log)
        self.handed: dict[LearnerId, Incarnation] = {}  # incarnations that were given out and have not yet said hello
        self.bytes_up = 0  # of contributions that arrived whole, here and not at a shard
        self.bytes_down = 0  # of fragments that were sent from here
        self.refused: Counter[str] = Counter()  # bad messages and frames, by code
        self.merged_contributions = 0  # by this process
        self.merges_before = 0  # by its predecessors
        self.over = asyncio.Event()  # the run has ended, or this syncer has been superseded
        self.end_delivered = asyncio.Event()  # to every learner that may come back; or this syncer must stop
        self._informed: set[LearnerId] = set()  # learners whose new process was answered that the run is over
        self.halted_because = ""
        self.superseded = ""  # by whom, in words: this process must not serve any more
        self.snapshots = SnapshotNews()
        self.failed: BaseException | None = None  # our bug; what is durable is right, and another process goes on
        self.gate = MemoryGate(RECEIVING_BYTES)
        self.access = Access(token, tls, self.refused, self.log)
        self.on_proved: Callable[[asyncio.BaseTransport | None], None] = lambda transport: None
        self._loop = asyncio.get_running_loop()
        self._held = 0  # the snapshot whose versions the store holds
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.store = Store.open(directory / "store", take_over=take_over)
        kept = self.store.settings()
        if kept is not None:
            self.settings = settings.resumed(RunSettings.from_json(kept))
        self.keeper = FragmentExecutor(self.store, self)
        self._execute: Mapping[type, Callable[[Any], None]] = {
            Send: self._send,
            Say: self._say,
            Hangup: self._hang_up,
            MergeRound: self.keeper.merge_round,
            DiscardRound: self.keeper.discard,
            Persist: lambda effect: self.keeper.persist(effect.record),
            Halt: self._halt,
        }
        self.log.fields |= {"run": self.settings.config.run_id, "epoch": self.store.epoch}
        self.shards = ShardCoordinator(self, self.settings.shards) if self.settings.shards else None
        self.clock = RunClock(self.settings.founded_at)
        self._tape: TapeKeeper | None = None
        limits = self.settings.config.limits
        self.wishes = Wishes.checked(self.store.controls() or {}, self.store.directory / CONTROLS, limits)
        self._controlling = asyncio.Lock()
        self._end_received = self.store.end_received()  # learners that acknowledged the end to an earlier syncer
        self._gathered: dict[FragmentId, Tensor] = {}  # from the shards, at the end

    # ---------------------------------------------------------------------------------------------------- starting

    async def start(self) -> None:
        """Take up the run that the directory holds; without one, wait for a learner that brings a model."""
        if self.settings.plan is not None and self.shards is not None:
            self._spawn(self._restore_from(self.shards, self.settings.plan))
        elif self.settings.plan is not None:
            await self._restore(self.settings.plan)
        self._spawn(self.keeper.watch_fence())
        if self.access.tls is not None:
            self._spawn(self.access.watch(self._connections))

    async def _restore(self, plan: FragmentPlan) -> None:
        await self.keeper.load(plan, self.settings, list(range(len(plan.fragments))))
        restored = await self.keeper.on_disk(self.store.restored)
        merges = sum(fragment.served.version for fragment in self.fragments.values())
        self.log.info("the run goes on: %d merges are on disk, this is epoch %d", merges, self.store.epoch)
        self._begin(plan, restored)

    async def _restore_from(self, shards: ShardCoordinator, plan: FragmentPlan) -> None:
        """The versions are with the shards: the run goes on when all of them have said which."""
        self.log.info("the run goes on when its %d shards are here", shards.count)
        versions = await shards.records(len(plan.fragments))
        try:
            restored = replace(await self.keeper.on_disk(self.store.restored), versions=versions)
            self.log.info("the run goes on: this is epoch %d", self.store.epoch)
            self._begin(plan, restored)
        except Exception as wrong:
            self.log.critical("the run cannot be taken up: %s", wrong)
            self.failed = wrong
            self.over.set()

    async def found(self, plan: FragmentPlan, values: list[Tensor]) -> None:
        """A learner has brought the model. It is durable before anybody can join. ValueError: the run starts from a
        checkpoint of another one."""
        warm = await asyncio.to_thread(warm_values, self.directory, plan)
        values = values if warm is None else warm
        settings = replace(
            self.settings,
            config=replace(self.settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint()),
            plan=plan,
            founded_at=time.time(),
        )
        if self.shards is not None:
            await self.shards.found(settings, values)
            await self.keeper.found(settings, {})
            self.settings = settings
            self.shards.founded()
        else:
            await self.keeper.found(settings, dict(enumerate(values)))
        self.settings = settings
        self.clock = RunClock(settings.founded_at)
        of = f", with the values of {INIT}" if warm is not None else ""
        self.log.info("founded: %d parameters in %d fragments%s", plan.total_numel, len(plan.fragments), of)
        self._begin(plan, None)

    def _begin(self, plan: FragmentPlan, restored: Restored | None) -> None:
        config = self.settings.config
        actor = Actor(SYNCER, self.store.epoch)
        self._tape = TapeKeeper(self.directory, new_header(actor, config, restored=restored), self.log)
        self.plan = plan
        if self.shards is not None:
            self.shards.begin(len(plan.fragments))
        largest = max(plan.numel(p) for p in range(len(plan.fragments)))
        self.gate.most_bytes = max(RECEIVING_BYTES, 4 * 4 * largest)
        self.core = SyncerCore(config, self.store.epoch, restored)
        self.merges_before = self.core.state.merges
        self.tell(Started())
        for event in self.wishes.events():  # before anybody can join
            self.tell(event)
        if self.shards is not None:
            self.shards.tell_missing()

    # ---------------------------------------------------------------------------------------------------- the core

    def tell(self, event: SyncerEvent, payload: Payload | None = None) -> list[SyncerEffect]:
        """Have the core handle an event, and carry out its effects. A core that has failed is not called again."""
        if self._stopping or self.failed is not None:
            return []
        try:
            return self._handle(event, payload)
        except Exception as wrong:
            self.log.critical("the syncer has failed and stops; start it again on its directory", exc_info=wrong)
            self.failed = wrong
            self.over.set()
            self.end_delivered.set()
            return []

    def _handle(self, event: SyncerEvent, payload: Payload | None) -> list[SyncerEffect]:
        """Its entry is on the tape before any of its effects is carried out."""
        assert self.core is not None and self._tape is not None
        now = self.clock.now()
        if type(event) is MergeDone:
            self.merged_contributions += len(self.core.state.fragments[event.round.fragment].contributions)
        effects = self.core.handle(now, event)
        self._tape.write(Entry(now, Actor(SYNCER, self.store.epoch), self.core.state.tick, event, tuple(effects)))
        for effect in effects:
            if self.shards is not None and _is_of_a_shard(effect):
                self.shards.carry_out(effect)  # type: ignore[arg-type]
            elif type(effect) is Accumulate:
                assert payload is not None, "a contribution without its values"
                self.keeper.accumulate(effect, payload)
            else:
                carry_out = self._execute.get(type(effect))
                if carry_out is not None:
                    carry_out(effect)
        self._hold_versions(self.core)
        if self.core.state.stage is Stage.FINISHED and not self.missing_end():
            self.end_delivered.set()
        self._arm()
        return effects

    def _arm(self) -> None:
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
            self.tell(TimerFired())
        else:
            self._arm()

    # ---------------------------------------------------------------------------------------------------- effects

    def _send(self, effect: Send) -> None:
        envelope = effect.envelope
        body = envelope.body
        link = self.links.get((envelope.learner, envelope.incarnation, envelope.session))
        if link is not None:
            link.post(envelope)
        learner, incarnation = envelope.learner, envelope.incarnation
        if type(body) is RefuseContribution and body.reason.code in WARNINGS:
            p = body.round.fragment
            prefix = f"learner {learner}: contribution to fragment {p} refused: "
            self._reasons.write(body.reason, ("learner", learner), prefix, incarnation=incarnation, fragment=p)
        elif type(body) is Refuse:
            self.refused[body.reason.code] += 1
            if body.reason.code == "refused-finished":
                self._informed.add(envelope.learner)
            # About the run, not the learner: a process without a place in it could take any number of numbers.
            prefix = f"learner {learner}: refused by the run in {self.directory}: "
            self._reasons.write(body.reason, ("run", 0), prefix, learner=learner, incarnation=incarnation)
            if link is not None and body.final:
                link.connection.close(str(body.reason))
        elif type(body) is Welcome:
            self._close_older(learner, incarnation)

    def _close_older(self, learner: LearnerId, incarnation: Incarnation) -> None:
        """A process that has a successor is told so when it dials again; on its old link nobody listens to it."""
        for key, link in self.links.items():
            if key[0] == learner and key[1] < incarnation:
                link.connection.close(f"incarnation {key[1]} is replaced by {incarnation}")

    def _say(self, effect: Say) -> None:
        kind, number = effect.subject
        self.snapshots.note(effect.reason)
        named: dict[str, Any] = {}
        if kind == "fragment":
            assert self.core is not None
            named["version"] = self.core.state.fragments[number].version
        elif kind == "learner" and self.core is not None and number in self.core.state.members:
            named["incarnation"] = self.core.state.members[number].incarnation
        prefix = f"{kind} {number}: " if kind != "run" else "run: "
        self._reasons.write(effect.reason, effect.subject, prefix, **named)

    def _hang_up(self, effect: Hangup) -> None:
        link = self.links.pop((effect.learner, effect.incarnation, effect.session), None)
        if link is not None:
            link.connection.close(str(effect.reason))

    @property
    def fragments(self) -> dict[FragmentId, SyncerFragment]:
        """Those that are here: none, where there are shards."""
        return self.keeper.held

    @property
    def served(self) -> Mapping[FragmentId, SyncerFragment | RemoteFragment]:
        """All fragments, wherever they are."""
        return self.shards.fragments if self.shards is not None else self.keeper.held

    def note_durable(self, fragment: SyncerFragment) -> None:
        if fragment.stats is not None:
            self.note_merge(fragment.id, fragment.served.version, fragment.stats)

    def note_merge(self, fragment: FragmentId, version: Version, measured: MergeStats) -> None:
        self.metrics.merged(self.clock.now(), self.store.epoch, fragment, version, measured)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of values, up and down, with those of the shards."""
        if self.shards is None:
            return self.bytes_up, self.bytes_down
        there = self.shards.traffic()
        return self.bytes_up + there.bytes_up, self.bytes_down + there.bytes_down

    def _hold_versions(self, core: SyncerCore) -> None:
        """Those of a snapshot from its cut on: its parts may come later than the store keeps a version."""
        cut = core.state.cut
        if cut is not None and cut.id != self._held:
            self._held = cut.id
            self.keeper.on_disk_later(self.store.hold, cut.id, cut.versions)
            if self.shards is not None:
                self.shards.post_all(HoldCut(cut.id, cut.versions))
        elif cut is None and self._held:
            self.keeper.on_disk_later(self.store.let_go, self._held)
            if self.shards is not None:
                self.shards.post_all(LetGoCut(self._held))
            self._held = 0

    def _halt(self, effect: Halt) -> None:
        self.halted_because = str(effect.reason)
        if effect.reason.code == "superseded-epoch" and not self.superseded:  # a learner has told
            self.superseded = str(effect.reason)
        self.log.info("%s", effect.reason)
        self.over.set()

    # ---------------------------------------------------------------------------------------------------- learners

    def hand_out(self, wanted: LearnerId | None) -> tuple[LearnerId, Incarnation]:
        """An id, and an incarnation that is newer than every one that is known."""
        members = self.core.state.members if self.core is not None else {}
        learner = wanted
        if learner is None:
            learner = 1
            while learner in members or learner in self.handed:
                learner += 1
        known = members[learner].incarnation if learner in members else 0
        self.handed[learner] = max(known, self.handed.get(learner, 0)) + 1
        return learner, self.handed[learner]

    def _connections(self) -> list[WebSocketConnection]:
        return [link.connection for link in (*self.links.values(), *(self.shards or ()))]

    def present(self) -> set[LearnerId]:
        """Learners that have a link, or a number and no link yet."""
        members = self.core.state.members if self.core is not None else {}
        return {key[0] for key in self.links} | {learner for learner in self.handed if learner not in members}

    def attach(self, link: SyncerLink) -> None:
        old = self.links.pop(link.key, None)
        if old is not None:
            old.connection.close("another connection says that it is the same link")
        self.links[link.key] = link
        if self.shards is not None:
            self.shards.links_changed()

    def detach(self, link: SyncerLink, why: str) -> None:
        if self.links.get(link.key) is link:
            del self.links[link.key]
            if self.shards is not None:
                self.shards.links_changed()
            self.tell(LearnerDisconnected(*link.key, why))

    async def control(self, event: ControlRequested) -> bool:
        """An operator's wish, checked. Durable before the core hears of it; raises `OSError` when it cannot be.

        False: the run was told to end while the wish waited for its turn."""
        async with self._controlling:
            if self.core is None or self.core.state.stage is not Stage.RUNNING:
                return False
            await self._keep_wishes(self.wishes.after(event, time.time()))
            self.tell(event)
            return True

    async def _keep_wishes(self, wishes: Wishes) -> None:
        if wishes is not self.wishes:
            try:
                await self.keeper.on_disk(self.store.write_controls, wishes.kept)
            except Fenced as fenced:
                self.note_fenced(fenced)
                raise
            self.wishes = wishes

    async def finish(self) -> None:
        if self.core is None:
            return
        async with self._controlling:
            try:
                await self._keep_wishes(self.wishes.without_pause())
            except (Fenced, OSError) as wrong:
                self.log.warning("the end of the pause cannot be written down: %s", wrong)
            self.tell(FinishRequested())

    def take_snapshot(self, who: str = "") -> int | None:
        """The number of a snapshot that is being taken from now on, or is being taken already. None: not now."""
        if self.core is None or self.core.state.stage is not Stage.RUNNING:
            return None
        if self.core.state.cut is None:
            before = self.core.state.marker
            self.tell(SnapshotRequested(who))
            return self.core.state.marker if self.core.state.marker > before else None
        return self.core.state.cut.id

    # ---------------------------------------------------------------------------------------------------- showing

    @property
    def finished(self) -> bool:
        return self.core is not None and self.core.state.stage is Stage.FINISHED

    def missing_end(self) -> list[LearnerId]:
        """Return the learners that may come back and have not received the end of the run."""
        missing = self.core.shutdown.missing_end() if self.core is not None else []
        return [learner for learner in missing if learner not in self._end_received | self._informed]

    def _write_end_received(self) -> None:
        """For a syncer that is started on the finished run: it serves the end only while a learner misses it."""
        assert self.core is not None
        acknowledged = {member.id for member in self.core.state.members.values() if member.finish_acked}
        try:
            self.store.write_end_received(self._end_received | acknowledged)
        except (Fenced, OSError, StoreDamaged) as error:
            self.log.warning("cannot write which learners have received the end: %s", error)

    @property
    def is_sending(self) -> bool:
        return any(held.is_being_sent for held in self.fragments.values())

    async def gather(self) -> None:
        """For `published`: the final values, from wherever they are."""
        if self.shards is not None and self.core is not None and self.plan is not None:
            versions = {p: f.version for p, f in self.core.state.fragments.items()}
            self._gathered = await self.shards.values(self.plan, versions)

    def published(self) -> dict[str, Tensor]:
        """Return the published model by tensor name, in f32 and in the shapes of the plan."""
        assert self.plan is not None
        found: dict[str, list[tuple[int, Tensor]]] = {}
        values = {p: held.served.value for p, held in self.fragments.items()} or self._gathered
        for p, value in values.items():
            for piece, begin, end in self.plan.spans(p):
                found.setdefault(piece.tensor, []).append((piece.start, value[begin:end]))
        model = {}
        for name, pieces in found.items():
            flat = torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])])
            model[name] = flat.reshape(self.plan.by_name[name].shape)
        return model

    # ---------------------------------------------------------------------------------------------------- stopping

    def note_fenced(self, fenced: Fenced) -> None:
        self.superseded = str(fenced)
        if self.core is not None:
            self.tell(StoreFenced(fenced.epoch))
        self.over.set()
        self.end_delivered.set()

    def _spawn(self, task: Any) -> None:
        spawned = self._loop.create_task(task)
        self._background.add(spawned)
        spawned.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Leave everything so that another syncer can take up the run here. Learners dial again when it does."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._background):
            task.cancel()
        for link in list(self.links.values()):
            link.connection.close("the syncer is being stopped")
        await asyncio.gather(*(link.connection.closed() for link in list(self.links.values())), return_exceptions=True)
        self.links.clear()
        await self.keeper.stop()
        if self.finished:
            await asyncio.to_thread(self._write_end_received)
        if self._tape is not None:
            self._tape.close()
        await asyncio.to_thread(self.metrics.close)
        self.store.close()


def _is_of_a_shard(effect: SyncerEffect) -> bool:
    if type(effect) is Persist:
        return isinstance(effect.record, VersionRecord | SnapshotRecord)
    return type(effect) in (Accumulate, MergeRound, DiscardRound)
