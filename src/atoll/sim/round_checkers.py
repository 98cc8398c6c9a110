"""Checkers of the syncer: merges, requests by operators, and shards."""

from __future__ import annotations

import math

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    Contribution,
    ControlRequested,
    DiscardRound,
    DrainRequest,
    Envelope,
    Finish,
    Left,
    LogReason,
    ManifestRecord,
    MembersRecord,
    MergeRound,
    OpenGrace,
    PausedAck,
    Persist,
    Published,
    Pull,
    Record,
    Report,
    ShardLost,
    ShardReconnected,
    StepTaken,
    VersionRecord,
    Welcome,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, AcceptedContribution, FragmentId, LearnerId, RoundId, Version
from atoll.sim.checkers import Checker, DurableRecords, EffectiveSettings, on
from atoll.tape.format import Actor, Entry


class QuorumChecker(Checker):
    name = "quorum"
    invariant = "no merge with fewer than K contributions"

    def setup(self) -> None:
        self._settings = EffectiveSettings(self)
        self._required: dict[
            tuple[Actor, FragmentId], int
        ] = {}  # K when a round reached its quorum; an operator may change it later

    @on("effects", OpenGrace)
    def _on_quorum(self, entry: Entry, effect: OpenGrace) -> None:
        self._required[(entry.actor, effect.round.fragment)] = self._settings.effective_config(entry).quorum

    @on("effects", MergeRound)
    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._count(entry, effect.round.fragment, len(effect.contributions))

    @on("effects", Persist)
    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        if isinstance(effect.record, VersionRecord):
            self._count(entry, effect.record.fragment, len(effect.record.contributions))

    def _count(self, entry: Entry, fragment: FragmentId, count: int) -> None:
        quorum = self._required.get((entry.actor, fragment), self._settings.effective_config(entry).quorum)
        if count < quorum:
            self.fail(entry, ("fragment", fragment), f"{count} contributions, the quorum is {quorum}")


class MergedOnceChecker(Checker):
    name = "merged-once"
    invariant = "a merge has at most one contribution of a learner, and no step is merged twice into a fragment"

    def setup(self) -> None:
        DurableRecords(self, on_durable=self._on_durable)
        self._last: dict[tuple[LearnerId, int, FragmentId], AcceptedContribution] = {}

    @on("effects", MergeRound)
    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        learners = [a.learner for a in effect.contributions]
        if len(set(learners)) != len(learners):
            self.fail(entry, ("fragment", effect.round.fragment), f"learners {learners} are not all different")

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if not isinstance(record, VersionRecord):
            return
        for a in record.contributions:
            key = (a.learner, a.incarnation, record.fragment)
            last = self._last.get(key)
            if last is not None and (
                a.copied_at - a.steps < last.copied_at or a.trained - a.tokens - a.dropped + last.dropped < last.trained
            ):
                problem = f"steps up to {last.copied_at} are merged, and again {a.steps} steps up to {a.copied_at}"
                self.fail(entry, ("learner", a.learner), problem)
            self._last[key] = a


class CurrentIncarnationChecker(Checker):
    name = "current"
    invariant = (
        "every contribution is from the current incarnation and based on the version that the merge replaces, and no"
        " lost incarnation returns"
    )

    def setup(self) -> None:
        self._records = DurableRecords(self, on_save=self._on_save)
        self._newest: dict[LearnerId, int] = {}
        self._lost: set[tuple[LearnerId, int]] = set()

    def _on_save(self, entry: Entry, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._newest.update(record.incarnations)
            self._lost.update(key for key in record.incarnations if key[0] in record.lost)

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self._lost = set()  # a record that was not durable is unknown after a restart
        if restored is not None and restored.members is not None:
            self._newest = dict(restored.members.incarnations)
            self._lost = {key for key in restored.members.incarnations if key[0] in restored.members.lost}

    @on("sent", Welcome, current=True)
    def _on_welcome(self, entry: Entry, envelope: Envelope, body: Welcome) -> None:
        if (envelope.learner, envelope.incarnation) in self._lost:
            problem = f"incarnation {envelope.incarnation} is lost, but was welcomed"
            self.fail(entry, ("learner", envelope.learner), problem)

    @on("effects", Accumulate, current=True)
    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        a = effect.contribution
        newest = self._newest.get(a.learner)
        if (a.learner, a.incarnation) in self._lost:
            self.fail(
                entry, ("learner", a.learner), f"incarnation {a.incarnation} is lost, but its contribution was accepted"
            )
        if a.incarnation != newest:
            problem = f"incarnation {a.incarnation} of learner {a.learner} was accepted, {newest} is current"
            self.fail(entry, ("learner", a.learner), problem)
        self._check_base(entry, effect.round)

    @on("effects", MergeRound, current=True)
    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._check_base(entry, effect.round)

    def _check_base(self, entry: Entry, round_id: RoundId) -> None:
        durable = self._records.versions[round_id.fragment]
        if round_id.base != durable:
            self.fail(entry, ("fragment", round_id.fragment), f"based on version {round_id.base}, {durable} is newest")


class WeightChecker(Checker):
    name = "weights"
    invariant = "weights are finite, positive and computed from the counters of the contribution"

    def setup(self) -> None:
        self._sent: dict[tuple[LearnerId, int, FragmentId], Contribution] = {}
        self._accumulated: dict[RoundId, dict[LearnerId, AcceptedContribution]] = {}

    @on("sent", Contribution)
    def _on_sent(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        self._sent[(envelope.learner, envelope.incarnation, body.round.fragment)] = body

    @on("effects", Accumulate)
    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        a = effect.contribution
        subject = ("learner", a.learner)
        if not (math.isfinite(a.weight) and a.weight > 0):
            self.fail(entry, subject, f"weight {a.weight} of learner {a.learner}")
        body = self._sent.get((a.learner, a.incarnation, effect.round.fragment))
        if body is not None and body.round == effect.round:
            expected = body.tokens * body.tokens / body.steps
            if a.weight != expected:
                self.fail(entry, subject, f"weight {a.weight} of learner {a.learner}, its counters give {expected}")
        self._accumulated.setdefault(effect.round, {})[a.learner] = a

    @on("effects", MergeRound)
    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        accumulated = self._accumulated.pop(effect.round, {})
        if {a.learner: a for a in effect.contributions} != accumulated:
            self.fail(
                entry, ("fragment", effect.round.fragment), "the merge does not have the accumulated contributions"
            )

    @on("effects", DiscardRound)
    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        self._accumulated.pop(effect.round, None)


class VersionOrderChecker(Checker):
    name = "versions"
    invariant = "versions of a fragment increase by one and never decrease, at learners and across restarts"

    def setup(self) -> None:
        self._records = DurableRecords(self, on_save=self._on_save)
        self._adopted: dict[tuple[Actor, FragmentId], Version] = {}

    def _on_save(self, entry: Entry, record: Record) -> None:
        if isinstance(record, VersionRecord) and record.version != self._records.versions[record.fragment] + 1:
            problem = f"version {record.version} after {self._records.versions[record.fragment]}"
            self.fail(entry, ("fragment", record.fragment), problem)

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner == SYNCER:
            loaded = {p: r.version for p, r in restored.versions.items()} if restored is not None else {}
            for p, version in self._records.versions.items():
                if loaded.get(p, 0) < version:
                    problem = f"version {version} was durable, but a restart loaded {loaded.get(p, 0)}"
                    self.fail(None, ("fragment", p), problem)
        super().on_process_started(actor, restored)

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        key = (entry.actor, effect.fragment)
        before = self._adopted.get(key, -1)
        if effect.version <= before:
            subject = ("learner", entry.actor.learner)
            self.fail(entry, subject, f"fragment {effect.fragment}: adopted version {effect.version} after {before}")
        if effect.version > self._records.versions[effect.fragment]:
            self.fail(entry, ("fragment", effect.fragment), f"adopted version {effect.version}, which is not durable")
        self._adopted[key] = effect.version


class DurabilityChecker(Checker):
    name = "durable-first"
    invariant = "a version, an admission and the end of the run are durable before they are sent"

    def setup(self) -> None:
        self._records = DurableRecords(self, on_durable=self._on_durable, on_late=self._on_late)
        self._admitted: dict[Actor, dict[LearnerId, int]] = {}  # durable admissions, by syncer
        self._manifest = False

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, MembersRecord) and self.syncer is not None:
            self._admitted[self.syncer] = dict(record.incarnations)
        elif isinstance(record, ManifestRecord):
            self._manifest = True

    def _on_late(self, entry: Entry, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._admitted[entry.actor] = dict(record.incarnations)

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        if restored is not None and self.syncer is not None:
            if restored.members is not None:
                self._admitted[self.syncer] = dict(restored.members.incarnations)
            self._manifest = restored.manifest is not None

    @on("sent", Published)
    def _on_published(self, entry: Entry, envelope: Envelope, body: Published) -> None:
        if body.version > self._records.versions[body.fragment]:
            problem = f"version {body.version} was published, {self._records.versions[body.fragment]} is durable"
            self.fail(entry, ("fragment", body.fragment), problem)

    @on("sent", Welcome)
    def _on_welcome(self, entry: Entry, envelope: Envelope, body: Welcome) -> None:
        if self._admitted.get(entry.actor, {}).get(envelope.learner) != envelope.incarnation:
            problem = f"incarnation {envelope.incarnation} was welcomed before its admission was durable"
            self.fail(entry, ("learner", envelope.learner), problem)

    @on("sent", Finish)
    def _on_finish(self, entry: Entry, envelope: Envelope, body: Finish) -> None:
        if not self._manifest:
            self.fail(entry, ("run", 0), "the end was announced before the manifest was durable")


class GraceWindowChecker(Checker):
    name = "grace"
    invariant = (
        "the grace window is at most min(gamma * max(slack, 0), longest awaited step), or twice the expected wait for "
        "a learner that missed the last merge, and no round stays open after it"
    )

    def setup(self) -> None:
        self._settings = EffectiveSettings(self)
        self._until: dict[RoundId, float] = {}
        self._due: dict[RoundId, float] = {}
        self._now = 0.0
        self._longest_step_s = 0.0
        self._pulled: dict[RoundId, set[LearnerId]] = {}  # learners whose contribution has not arrived
        self._missed: dict[FragmentId, set[LearnerId]] = {}  # learners that missed the last merge

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self._until.clear()
        self._due.clear()
        self._pulled.clear()
        self._missed.clear()
        self._now = 0.0

    @on("arrived", Report)
    def _on_report(self, entry: Entry, envelope: Envelope, body: Report) -> None:
        self._longest_step_s = max(self._longest_step_s, body.step_time_s)

    @on("every", current=True)
    def _on_every(self, entry: Entry) -> None:
        for round_id, until in self._due.items():
            problem = f"the grace window ended at {until:.6g} s, but the round was open at {self._now:.6g} s"
            self.fail(entry, ("fragment", round_id.fragment), problem)
        self._now = max(self._now, entry.at)
        if self._until:
            self._due = {r: until for r, until in self._until.items() if until <= self._now}

    @on("effects", OpenGrace, current=True)
    def _on_open(self, entry: Entry, effect: OpenGrace) -> None:
        gamma, round_s = self._settings.effective_config(entry).grace_margin, effect.quorum_s + effect.sync_s
        slack, period_s = self.config.overlap_steps * effect.step_s - round_s, self.config.every_steps * effect.step_s
        if round_s > effect.step_s and slack < effect.step_s:
            slack = max(slack, period_s - round_s)
        bound = min(gamma * max(slack, 0.0), effect.awaited_s)
        if effect.late_s > bound:
            bound = min(gamma * max(period_s - round_s, 0.0), 2 * effect.late_s)
            if self._missed.get(effect.round.fragment, set()).isdisjoint(self._pulled.get(effect.round, ())):
                self.fail(
                    entry,
                    ("fragment", effect.round.fragment),
                    "it waits for a learner that missed a merge, but none did",
                )
        subject = ("fragment", effect.round.fragment)
        if effect.window_s > bound * (1 + 1e-9) or effect.window_s < 0:
            self.fail(entry, subject, f"grace window of {effect.window_s:.6g} s, the bound is {bound:.6g} s")
        longest_s = max(effect.step_s, effect.awaited_s)
        if longest_s > self._longest_step_s * (1 + 1e-9):
            problem = f"step time {longest_s:.6g} s, the longest reported was {self._longest_step_s:.6g} s"
            self.fail(entry, subject, problem)
        self._until[effect.round] = self._now + effect.window_s
        if effect.window_s == 0.0:
            self._due[effect.round] = self._now

    @on("sent", Pull, current=True)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        self._pulled.setdefault(body.round, set()).add(envelope.learner)

    @on("effects", Accumulate)
    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        self._pulled.get(effect.round, set()).discard(effect.contribution.learner)
        until = self._until.get(effect.round)
        if until is not None and self._now >= until:
            self.fail(entry, ("fragment", effect.round.fragment), "a contribution was accepted after the grace window")

    @on("effects", MergeRound)
    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._missed[effect.round.fragment] = self._pulled.get(effect.round, set())
        self._on_closed(entry, effect)

    @on("effects", DiscardRound)
    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        self._pulled.pop(effect.round, None)
        self._until.pop(effect.round, None)
        self._due.pop(effect.round, None)


class PauseChecker(Checker):
    name = "paused"
    invariant = (
        "a paused run opens rounds only for draining learners, and a paused learner takes no step after the current one"
    )

    def setup(self) -> None:
        self._draining: dict[
            tuple[Actor, LearnerId], tuple[FragmentId, ...]
        ] = {}  # fragments that they named, by syncer
        self._since: dict[Actor, int] = {}  # paused syncers: tick of the request
        self._ending: set[Actor] = set()  # syncers that are finishing the run
        self._newest: dict[tuple[Actor, FragmentId], RoundId] = {}
        self._steps_since_pause: dict[Actor, int] = {}  # paused learners: steps since the pause

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        if restored is not None and restored.manifest is not None and self.syncer is not None:
            self._ending.add(self.syncer)

    @on("events", ControlRequested)
    def _on_control(self, entry: Entry, event: ControlRequested) -> None:
        if event.kind == "pause" and entry.actor not in self._ending:
            self._since.setdefault(entry.actor, entry.tick)
        elif event.kind == "resume":
            self._since.pop(entry.actor, None)

    @on("effects", LogReason)
    def _on_log_reason(self, entry: Entry, effect: LogReason) -> None:
        if entry.actor.learner == SYNCER and effect.reason.code in ("finish-budget", "finish-requested"):
            self._ending.add(entry.actor)
            self._since.pop(entry.actor, None)

    @on("sent", Pull)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        """Check a pull. Retries are allowed. Timers that were due before the pause request were handled before it."""
        key = (entry.actor, body.round.fragment)
        opened, self._newest[key] = self._newest.get(key) != body.round, body.round
        if opened and entry.tick > self._since.get(entry.actor, entry.tick) and not self._is_named(entry, body):
            self.fail(entry, ("fragment", body.round.fragment), f"{body.round} was opened while the run is paused")

    @on("arrived", DrainRequest)
    def _on_drain_request(self, entry: Entry, envelope: Envelope, body: DrainRequest) -> None:
        self._draining[(entry.actor, envelope.learner)] = body.unmerged

    @on("arrived", Left)
    def _on_left(self, entry: Entry, envelope: Envelope, body: Left) -> None:
        self._draining.pop((entry.actor, envelope.learner), None)

    def _is_named(self, entry: Entry, body: Pull) -> bool:
        return any(
            actor == entry.actor and body.round.fragment in named for (actor, _), named in self._draining.items()
        )

    @on("sent", PausedAck)
    def _on_paused_ack(self, entry: Entry, envelope: Envelope, body: PausedAck) -> None:
        if body.paused:
            self._steps_since_pause.setdefault(entry.actor, 0)
        else:
            self._steps_since_pause.pop(entry.actor, None)

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        if event.steps and entry.actor in self._steps_since_pause:
            self._steps_since_pause[entry.actor] += 1
            if self._steps_since_pause[entry.actor] > 1:
                self.fail(entry, ("learner", entry.actor.learner), "a step while the run is paused")


class LostShardChecker(Checker):
    name = "shards"
    invariant = (
        "contributions that were lost with a shard are in no version, and no request goes to an unavailable shard"
    )

    def setup(self) -> None:
        self._open: dict[FragmentId, RoundId] = {}  # rounds with contributions that are in no record yet
        self._lost: dict[
            FragmentId, tuple[RoundId, int]
        ] = {}  # newest round that was lost with its shard, and the tick of the loss
        self._unavailable_since: dict[FragmentId, int] = {}

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self.setup()

    @on("events", ShardLost, current=True)
    def _on_lost(self, entry: Entry, event: ShardLost) -> None:
        for p in event.fragments:
            self._unavailable_since.setdefault(p, entry.tick)
            if p in self._open:
                self._lost[p] = self._open.pop(p), entry.tick

    @on("events", ShardReconnected, current=True)
    def _on_back(self, entry: Entry, event: ShardReconnected) -> None:
        for p, _ in event.versions:
            self._unavailable_since.pop(p, None)

    @on("effects", Accumulate, MergeRound, current=True)
    def _on_work(self, entry: Entry, effect: Accumulate | MergeRound) -> None:
        self._require_available(entry, effect.round.fragment, f"{type(effect).__name__} of {effect.round}")
        self._require_not_lost(entry, effect.round)
        self._open[effect.round.fragment] = effect.round

    @on("effects", DiscardRound, current=True)
    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        if self._open.get(effect.round.fragment) == effect.round:
            del self._open[effect.round.fragment]

    @on("effects", Persist, current=True)
    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        record = effect.record
        if isinstance(record, VersionRecord):
            self._require_available(entry, record.fragment, f"writing version {record.version}")
            self._require_not_lost(entry, record.round)
            self._open.pop(record.fragment, None)

    @on("sent", Pull, current=True)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        self._require_available(entry, body.round.fragment, f"a contribution to {body.round}")

    @on("sent", Published, current=True)
    def _on_published(self, entry: Entry, envelope: Envelope, body: Published) -> None:
        self._require_available(entry, body.fragment, f"sending version {body.version} to learner {envelope.learner}")

    def _require_available(self, entry: Entry, fragment: FragmentId, problem: str) -> None:
        """Fail if a shard is unavailable. Timers that were due before the loss ran before it, in the same entry."""
        if entry.tick > self._unavailable_since.get(fragment, entry.tick):
            self.fail(entry, ("fragment", fragment), f"{problem} was requested from an unavailable shard")

    def _require_not_lost(self, entry: Entry, round_id: RoundId) -> None:
        lost, tick = self._lost.get(round_id.fragment, (None, entry.tick))
        if lost == round_id and entry.tick > tick:
            self.fail(entry, ("fragment", round_id.fragment), f"{round_id} was lost with its shard, but continues")


ROUND_CHECKERS: tuple[type[Checker], ...] = (
    QuorumChecker,
    MergedOnceChecker,
    CurrentIncarnationChecker,
    WeightChecker,
    VersionOrderChecker,
    DurabilityChecker,
    GraceWindowChecker,
)
SYNCER_CHECKERS: tuple[type[Checker], ...] = (PauseChecker, LostShardChecker)
