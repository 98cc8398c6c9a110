"""Checkers of merges: quorum, once, current, weights, versions, durability, grace."""

from __future__ import annotations

import math

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    Contribution,
    DiscardRound,
    Envelope,
    Finish,
    ManifestRecord,
    MembersRecord,
    MergeRound,
    OpenGrace,
    Persist,
    Persisted,
    Published,
    Pull,
    Record,
    RecordKey,
    Report,
    ShardBack,
    VersionRecord,
    Welcome,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, Accepted, FragmentId, LearnerId, RoundId, RunConfig, Version
from atoll.sim.checkers import Checker
from atoll.sim.checkers_of_controls import InForce
from atoll.tape.format import Actor, Entry


class Quorum(InForce):
    name = "quorum"
    sentence = "no merge with fewer than K contributions"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects = {OpenGrace: self._on_quorum, MergeRound: self._on_merge, Persist: self._on_persist}
        self._wanted: dict[tuple[Actor, FragmentId], int] = {}  # K when a round had its quorum; it may change later

    def _on_quorum(self, entry: Entry, effect: OpenGrace) -> None:
        self._wanted[(entry.actor, effect.round.fragment)] = self.in_force(entry).quorum

    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._count(entry, effect.round.fragment, len(effect.contributions))

    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        if isinstance(effect.record, VersionRecord):
            self._count(entry, effect.record.fragment, len(effect.record.contributions))

    def _count(self, entry: Entry, fragment: FragmentId, count: int) -> None:
        quorum = self._wanted.get((entry.actor, fragment), self.in_force(entry).quorum)
        if count < quorum:
            self.fail(entry, ("fragment", fragment), f"{count} contributions, the quorum is {quorum}")


class Durable(Checker):
    """Keeps what is durable, for checkers that need to know. Not a checker of its own."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.versions: dict[FragmentId, Version] = dict.fromkeys(config.fragment_ids(), 0)
        self.saving: dict[tuple[Actor, RecordKey], Record] = {}
        self.effects = {Persist: self._on_persist_effect, DiscardRound: self._on_discard_effect}
        self.events = {Persisted: self._on_persisted_event, ShardBack: self._on_shard_back_event}

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner != SYNCER:
            return
        written = list(self.saving.values())
        for p, record in (restored.versions if restored is not None else {}).items():
            if record.version > self.versions[p]:
                # Durable, but the process died before it heard of it.
                self.versions[p] = record.version
                self.now_durable(None, record)
        if restored is not None and restored.members is not None:
            for record_ in written:
                if isinstance(record_, MembersRecord) and record_.serial <= restored.members.serial:
                    self.now_durable(None, record_)

    def _on_persist_effect(self, entry: Entry, effect: Persist) -> None:
        self.saving[(entry.actor, effect.record.key())] = effect.record
        if self.is_current(entry):
            self.on_save(entry, effect.record)

    def on_save(self, entry: Entry, record: Record) -> None:
        """For subclasses: the syncer that owns the store wants this written."""

    def _on_persisted_event(self, entry: Entry, event: Persisted) -> None:
        record = self.saving.pop((entry.actor, event.key), None)
        if record is None:
            self.fail(entry, ("run", 0), f"{event.key} became durable without being asked for")
            return
        self._found_durable(entry, record)

    def _on_shard_back_event(self, entry: Entry, event: ShardBack) -> None:
        """What it was writing when it was lost is durable if it says so. All else it says was durable before."""
        for key in event.records():
            record = self.saving.pop((entry.actor, key), None)
            if record is not None:
                self._found_durable(entry, record)

    def _on_discard_effect(self, entry: Entry, effect: DiscardRound) -> None:
        self.saving.pop((entry.actor, effect.key()), None)

    def _found_durable(self, entry: Entry, record: Record) -> None:
        if not self.is_current(entry):
            self.late_durable(entry, record)
            return
        if isinstance(record, VersionRecord):
            self.versions[record.fragment] = record.version
        self.now_durable(entry, record)

    def now_durable(self, entry: Entry | None, record: Record) -> None:
        """For subclasses: the store has it."""

    def late_durable(self, entry: Entry, record: Record) -> None:
        """For subclasses: an old syncer hears of what was written before the store changed hands."""


class Once(Durable):
    name = "once"
    sentence = "a learner is at most once in a merge, and no step of it is ever merged twice into a fragment"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects[MergeRound] = self._on_merge
        self._last: dict[tuple[LearnerId, int, FragmentId], Accepted] = {}

    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        learners = [a.learner for a in effect.contributions]
        if len(set(learners)) != len(learners):
            self.fail(entry, ("fragment", effect.round.fragment), f"learners {learners} are not all different")

    def now_durable(self, entry: Entry | None, record: Record) -> None:
        if not isinstance(record, VersionRecord):
            return
        for a in record.contributions:
            key = (a.learner, a.incarnation, record.fragment)
            last = self._last.get(key)
            if last is not None and (
                a.copied_at - a.steps < last.copied_at or a.trained - a.tokens - a.dropped + last.dropped < last.trained
            ):
                what = f"steps up to {last.copied_at} are merged, and again {a.steps} up to {a.copied_at}"
                self.fail(entry, ("learner", a.learner), what)
            self._last[key] = a


class Current(Durable):
    name = "current"
    sentence = (
        "every contribution is of the current incarnation and of the version that the merge replaces, and none that is"
        " lost comes back"
    )

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects[Accumulate] = self._on_accumulate
        self.effects[MergeRound] = self._on_merge
        self.sent = {Welcome: self._on_welcome}
        self._newest: dict[LearnerId, int] = {}
        self._lost: set[tuple[LearnerId, int]] = set()

    def on_save(self, entry: Entry, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._newest.update(record.incarnations)
            self._lost.update(key for key in record.incarnations if key[0] in record.lost)

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner != SYNCER:
            return
        self._lost = set()  # of what was not durable nobody knows
        if restored is not None and restored.members is not None:
            self._newest = dict(restored.members.incarnations)
            self._lost = {key for key in restored.members.incarnations if key[0] in restored.members.lost}

    def _on_welcome(self, entry: Entry, envelope: Envelope) -> None:
        if self.is_current(entry) and (envelope.learner, envelope.incarnation) in self._lost:
            what = f"incarnation {envelope.incarnation} was given up, and is welcomed"
            self.fail(entry, ("learner", envelope.learner), what)

    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        if not self.is_current(entry):
            return
        a = effect.accepted
        newest = self._newest.get(a.learner)
        if (a.learner, a.incarnation) in self._lost:
            self.fail(entry, ("learner", a.learner), f"incarnation {a.incarnation} was given up, and was accepted")
        if a.incarnation != newest:
            what = f"incarnation {a.incarnation} of learner {a.learner} was accepted, {newest} is current"
            self.fail(entry, ("learner", a.learner), what)
        self._based(entry, effect.round)

    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        if self.is_current(entry):
            self._based(entry, effect.round)

    def _based(self, entry: Entry, round_id: RoundId) -> None:
        durable = self.versions[round_id.fragment]
        if round_id.base != durable:
            self.fail(entry, ("fragment", round_id.fragment), f"based on version {round_id.base}, {durable} is newest")


class Weights(Checker):
    name = "weights"
    sentence = "weights are finite, positive and made of the contribution's own counters"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sent = {Contribution: self._on_sent}
        self.effects = {
            Accumulate: self._on_accumulate,
            MergeRound: self._on_merge,
            DiscardRound: self._on_discard,
        }
        self._sent: dict[tuple[LearnerId, int, FragmentId], Contribution] = {}
        self._accumulated: dict[RoundId, dict[LearnerId, Accepted]] = {}

    def _on_sent(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Contribution)
        self._sent[(envelope.learner, envelope.incarnation, body.round.fragment)] = body

    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        a = effect.accepted
        subject = ("learner", a.learner)
        if not (math.isfinite(a.weight) and a.weight > 0):
            self.fail(entry, subject, f"weight {a.weight} of learner {a.learner}")
        body = self._sent.get((a.learner, a.incarnation, effect.round.fragment))
        if body is not None and body.round == effect.round:
            expected = body.tokens * body.tokens / body.steps
            if a.weight != expected:
                self.fail(entry, subject, f"weight {a.weight} of learner {a.learner}, its counters give {expected}")
        self._accumulated.setdefault(effect.round, {})[a.learner] = a

    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        summed = self._accumulated.pop(effect.round, {})
        if {a.learner: a for a in effect.contributions} != summed:
            self.fail(entry, ("fragment", effect.round.fragment), "the merge is not of what was accumulated")

    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        self._accumulated.pop(effect.round, None)


class Versions(Durable):
    name = "versions"
    sentence = "versions of a fragment rise by one and never fall, at learners and across restarts"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects[AdoptFragment] = self._on_adopt
        self._adopted: dict[tuple[Actor, FragmentId], Version] = {}

    def on_save(self, entry: Entry, record: Record) -> None:
        if isinstance(record, VersionRecord) and record.version != self.versions[record.fragment] + 1:
            what = f"version {record.version} after {self.versions[record.fragment]}"
            self.fail(entry, ("fragment", record.fragment), what)

    def started(self, actor: Actor, restored: Restored | None) -> None:
        if actor.learner == SYNCER:
            found = {p: r.version for p, r in restored.versions.items()} if restored is not None else {}
            for p, version in self.versions.items():
                if found.get(p, 0) < version:
                    self.fail(
                        None, ("fragment", p), f"version {version} was durable, a restart found {found.get(p, 0)}"
                    )
        super().started(actor, restored)

    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        key = (entry.actor, effect.fragment)
        before = self._adopted.get(key, -1)
        if effect.version <= before:
            subject = ("learner", entry.actor.learner)
            self.fail(entry, subject, f"fragment {effect.fragment}: adopted version {effect.version} after {before}")
        if effect.version > self.versions[effect.fragment]:
            self.fail(entry, ("fragment", effect.fragment), f"adopted version {effect.version}, which is not durable")
        self._adopted[key] = effect.version


class DurableFirst(Durable):
    name = "durable-first"
    sentence = "nothing is published, welcomed or finished before it is durable"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sent = {Published: self._on_published, Welcome: self._on_welcome, Finish: self._on_finish}
        self._admitted: dict[Actor, dict[LearnerId, int]] = {}  # as each syncer has made it durable
        self._manifest = False

    def now_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, MembersRecord) and self.syncer is not None:
            self._admitted[self.syncer] = dict(record.incarnations)
        elif isinstance(record, ManifestRecord):
            self._manifest = True

    def late_durable(self, entry: Entry, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._admitted[entry.actor] = dict(record.incarnations)

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER and restored is not None:
            if restored.members is not None:
                self._admitted[actor] = dict(restored.members.incarnations)
            self._manifest = restored.manifest is not None

    def _on_published(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Published)
        if body.version > self.versions[body.fragment]:
            what = f"version {body.version} was published, {self.versions[body.fragment]} is durable"
            self.fail(entry, ("fragment", body.fragment), what)

    def _on_welcome(self, entry: Entry, envelope: Envelope) -> None:
        if self._admitted.get(entry.actor, {}).get(envelope.learner) != envelope.incarnation:
            what = f"incarnation {envelope.incarnation} was welcomed before its admission was durable"
            self.fail(entry, ("learner", envelope.learner), what)

    def _on_finish(self, entry: Entry, envelope: Envelope) -> None:
        if not self._manifest:
            self.fail(entry, ("run", 0), "the end was announced before the manifest was durable")


class GraceBound(InForce):
    name = "grace"
    sentence = (
        "grace never exceeds min(gamma * max(slack, 0), longest step awaited), or twice what one still needs who "
        "missed the last merge, and is over when it is over"
    )

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects = {
            OpenGrace: self._on_open,
            MergeRound: self._on_merge,
            DiscardRound: self._on_closed,
            Accumulate: self._on_accumulate,
        }
        self.sent = {Pull: self._on_pull}
        self.arrived = {Report: self._on_report}
        self.every_of_syncers = self._on_every
        self._until: dict[RoundId, float] = {}
        self._due: dict[RoundId, float] = {}
        self._now = 0.0
        self._longest_step_s = 0.0
        self._asked: dict[RoundId, set[LearnerId]] = {}  # those whose contribution is not in yet
        self._missed: dict[FragmentId, set[LearnerId]] = {}  # by the last merge

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._until.clear()
            self._due.clear()
            self._asked.clear()
            self._missed.clear()
            self._now = 0.0

    def _on_report(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Report)
        self._longest_step_s = max(self._longest_step_s, body.step_time_s)

    def _on_every(self, entry: Entry) -> None:
        if not self.is_current(entry):
            return
        for round_id, until in self._due.items():
            what = f"the grace window was over at {until:.6g} s and the round was still open at {self._now:.6g} s"
            self.fail(entry, ("fragment", round_id.fragment), what)
        self._now = max(self._now, entry.at)
        if self._until:
            self._due = {r: until for r, until in self._until.items() if until <= self._now}

    def _on_open(self, entry: Entry, effect: OpenGrace) -> None:
        if not self.is_current(entry):
            return
        gamma, lasts_s = self.in_force(entry).grace_margin, effect.quorum_s + effect.sync_s
        slack, ripe_s = self.config.overlap_steps * effect.step_s - lasts_s, self.config.every_steps * effect.step_s
        if lasts_s > effect.step_s and slack < effect.step_s:
            slack = max(slack, ripe_s - lasts_s)
        bound = min(gamma * max(slack, 0.0), effect.awaited_s)
        if effect.missed_s > bound:
            bound = min(gamma * max(ripe_s - lasts_s, 0.0), 2 * effect.missed_s)
            if self._missed.get(effect.round.fragment, set()).isdisjoint(self._asked.get(effect.round, ())):
                self.fail(entry, ("fragment", effect.round.fragment), "it waits for who missed a merge, and nobody did")
        subject = ("fragment", effect.round.fragment)
        if effect.window_s > bound * (1 + 1e-9) or effect.window_s < 0:
            self.fail(entry, subject, f"grace window of {effect.window_s:.6g} s, the bound is {bound:.6g} s")
        longest_s = max(effect.step_s, effect.awaited_s)
        if longest_s > self._longest_step_s * (1 + 1e-9):
            told = f"step time {longest_s:.6g} s, the longest told was {self._longest_step_s:.6g} s"
            self.fail(entry, subject, told)
        self._until[effect.round] = self._now + effect.window_s
        if effect.window_s == 0.0:
            self._due[effect.round] = self._now

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Pull)
        if self.is_current(entry):
            self._asked.setdefault(body.round, set()).add(envelope.learner)

    def _on_accumulate(self, entry: Entry, effect: Accumulate) -> None:
        self._asked.get(effect.round, set()).discard(effect.accepted.learner)
        until = self._until.get(effect.round)
        if until is not None and self._now >= until:
            self.fail(entry, ("fragment", effect.round.fragment), "a contribution was accepted after the grace window")

    def _on_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._missed[effect.round.fragment] = self._asked.get(effect.round, set())
        self._on_closed(entry, effect)

    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        self._asked.pop(effect.round, None)
        self._until.pop(effect.round, None)
        self._due.pop(effect.round, None)


ROUND_CHECKERS: tuple[type[Checker], ...] = (Quorum, Once, Current, Weights, Versions, DurableFirst, GraceBound)
