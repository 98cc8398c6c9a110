"""Checkers of the whole run: snapshots, the end, bounds, and that every question gets one answer."""

from __future__ import annotations

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    Contribution,
    Dial,
    DialFailed,
    DiscardRound,
    Effect,
    Envelope,
    LinkOpened,
    ManifestRecord,
    Marker,
    MergeDone,
    MergeFailed,
    MergeRound,
    Persist,
    Persisted,
    PersistFailed,
    Published,
    Pull,
    Record,
    RecordKey,
    RefuseContribution,
    SaveSnapshot,
    Say,
    Send,
    ShardBack,
    ShardLost,
    SnapshotRecord,
    SnapshotSaved,
    SnapshotSaveFailed,
    Stop,
    StoreFenced,
    VersionRecord,
    Welcome,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, FragmentId, LearnerId, RoundId, RunConfig, Version
from atoll.sim.checkers import Checker, DurableRecords
from atoll.tape.format import Actor, Entry


class SnapshotCut(Checker):
    name = "snapshot"
    sentence = "a snapshot is a consistent cut: nothing in it is newer than the cut, nothing in flight is missing"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects = {SaveSnapshot: self._on_save, Persist: self._on_persist, AdoptFragment: self._on_adopt}
        self.sent = {Marker: self._on_marker}
        self.arrived = {Contribution: self._on_arrived}
        self._held: dict[Actor, dict[FragmentId, Version]] = {}
        self._newest_cut = 0  # the snapshot whose marker the syncer has sent
        self._saved: dict[tuple[int, LearnerId], tuple[Entry, dict[FragmentId, Version]]] = {}  # at the learner's cut
        self._arrived_since: list[Envelope] = []  # contributions that were taken up after the syncer's cut

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._newest_cut = 0
            self._arrived_since.clear()

    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._held.setdefault(entry.actor, {})[effect.fragment] = effect.version

    def _on_marker(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Marker)
        if self.is_current(entry) and body.snapshot > self._newest_cut:
            self._newest_cut = body.snapshot
            self._arrived_since.clear()

    def _on_save(self, entry: Entry, effect: SaveSnapshot) -> None:
        self._saved[(effect.snapshot, entry.actor.learner)] = (entry, dict(self._held.get(entry.actor, {})))

    def _on_arrived(self, entry: Entry, envelope: Envelope) -> None:
        """Only what the syncer took for the word of a current learner counts; stale links are dropped at the door."""
        body = envelope.body
        assert isinstance(body, Contribution)
        if (
            self._newest_cut
            and self.is_current(entry)
            and any(_answers(effect, envelope.learner, body.round) for effect in entry.effects)
        ):
            self._arrived_since.append(envelope)

    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        record = effect.record
        if not isinstance(record, SnapshotRecord) or not self.is_current(entry):
            return
        ids = self.config.fragment_ids()
        for learner, part in record.parts:
            subject = ("learner", learner)
            if (record.snapshot, learner) not in self._saved:
                self.fail(entry, subject, f"snapshot {record.snapshot} has a part that was never saved")
            cut, saved = self._saved[(record.snapshot, learner)]
            for p, ours in zip(ids, record.versions, strict=True):
                if saved.get(p, -1) > ours:
                    what = f"fragment {p} at version {saved[p]} in the part, {ours} at the cut"
                    self.fail(entry, subject, f"snapshot {record.snapshot}: {what}")
            if tuple(saved.get(p, -1) for p in ids) != part.versions:
                self.fail(entry, subject, f"snapshot {record.snapshot}: the part is not what was saved")
            for envelope in self._arrived_since:
                body = envelope.body
                assert isinstance(body, Contribution)
                from_cut = (envelope.learner, envelope.incarnation) == cut.actor and envelope.tick < cut.tick
                if from_cut and (learner, body.round) not in record.in_flight:
                    what = f"snapshot {record.snapshot} misses the contribution to {body.round} that was in flight"
                    self.fail(entry, subject, what)
        self._saved = {key: value for key, value in self._saved.items() if key[0] > record.snapshot}


def _answers(effect: Effect, learner: LearnerId, round_id: RoundId) -> bool:
    if isinstance(effect, Accumulate):
        return effect.accepted.learner == learner and effect.round == round_id
    if isinstance(effect, Send) and isinstance(effect.envelope.body, RefuseContribution):
        return effect.envelope.learner == learner and effect.envelope.body.round == round_id
    return False


class OneAnswer(Checker):
    name = "one-answer"
    sentence = "every effect that is waited for is answered by exactly one event"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.effects = {
            Persist: self._ask_persist,
            MergeRound: self._ask_merge,
            Dial: self._ask_dial,
            SaveSnapshot: self._ask_save,
        }
        self.events = {
            Persisted: self._answer_persist,
            PersistFailed: self._answer_persist,
            StoreFenced: self._answer_fenced,
            ShardLost: self._answer_lost,
            MergeDone: self._answer_merge,
            MergeFailed: self._answer_merge,
            LinkOpened: self._answer_dial,
            DialFailed: self._answer_dial,
            SnapshotSaved: self._answer_save,
            SnapshotSaveFailed: self._answer_save,
        }
        self._open: dict[tuple[Actor, object], int] = {}

    def _ask(self, entry: Entry, what: object) -> None:
        if type(entry.event) is ShardLost and _is_of(what, entry.event.fragments):
            return  # by a timer that was due before the loss: nobody is there to answer
        key = (entry.actor, what)
        self._open[key] = self._open.get(key, 0) + 1
        if self._open[key] > 1:
            self.fail(entry, None, f"{entry.actor} asks twice for {what} without an answer in between")

    def _answer(self, entry: Entry, what: object) -> None:
        key = (entry.actor, what)
        if self._open.get(key, 0) != 1:
            self.fail(entry, None, f"{entry.actor} got an answer for {what} that it had not asked")
        del self._open[key]

    def _ask_persist(self, entry: Entry, effect: Persist) -> None:
        self._ask(entry, effect.record.key())

    def _answer_persist(self, entry: Entry, event: Persisted | PersistFailed) -> None:
        self._answer(entry, event.key)

    def _answer_fenced(self, entry: Entry, event: StoreFenced) -> None:
        """Whatever else is being written is refused in the same way; a syncer that was told once writes no more.

        A merge is no write: it may be under way, and is answered.
        """
        over = [key for key in self._open if key[0] == entry.actor and type(key[1]) is RecordKey]
        for key in over:
            del self._open[key]

    def _answer_lost(self, entry: Entry, event: ShardLost) -> None:
        """A shard that is away answers nothing; what came of it, it says when it is back."""
        for actor, what in list(self._open):
            if actor == entry.actor and _is_of(what, event.fragments):
                del self._open[(actor, what)]

    def _ask_merge(self, entry: Entry, effect: MergeRound) -> None:
        self._ask(entry, effect.round)

    def _answer_merge(self, entry: Entry, event: MergeDone | MergeFailed) -> None:
        self._answer(entry, event.round)

    def _ask_dial(self, entry: Entry, effect: Dial) -> None:
        self._ask(entry, "dial")

    def _answer_dial(self, entry: Entry, event: LinkOpened | DialFailed) -> None:
        self._answer(entry, "dial")

    def _ask_save(self, entry: Entry, effect: SaveSnapshot) -> None:
        self._ask(entry, RecordKey("part", effect.snapshot, 0))

    def _answer_save(self, entry: Entry, event: SnapshotSaved | SnapshotSaveFailed) -> None:
        self._answer(entry, RecordKey("part", event.snapshot, 0))


def _is_of(what: object, fragments: tuple[FragmentId, ...]) -> bool:
    """A write or a merge of one of them."""
    if type(what) is RecordKey:
        return what.kind == "version" and what.number in fragments
    return type(what) is RoundId and what.fragment in fragments


class Bounds(Checker):
    name = "bounds"
    sentence = "rounds, askings and sendings are bounded"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sent = {Pull: self._on_pull, Published: self._on_published, Welcome: self._on_welcome}
        self.effects = {MergeRound: self._on_closed, DiscardRound: self._on_closed, Say: self._on_say}
        self.events = {ShardBack: self._on_shard_back}
        self._asked_again: dict[FragmentId, int] = {}
        self._open: dict[FragmentId, RoundId] = {}
        self._pulls: dict[FragmentId, dict[tuple[LearnerId, int, int], int]] = {}
        self._published: dict[tuple[LearnerId, FragmentId], tuple[tuple[int, int, Version], int]] = {}

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._open.clear()
            self._pulls.clear()
            self._published.clear()
            self._asked_again.clear()

    def _on_say(self, entry: Entry, effect: Say) -> None:
        if effect.reason.code != "round-asked-again" or not self.is_current(entry):
            return
        p = effect.subject[1]
        self._asked_again[p] = self._asked_again.get(p, 0) + 1
        if self._asked_again[p] >= self.config.limits.pull_tries:
            self.fail(entry, effect.subject, f"asked again {self._asked_again[p]} times in one round")

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Pull)
        if not self.is_current(entry):
            return
        p = body.round.fragment
        before = self._open.get(p)
        if before is not None and before != body.round:
            self.fail(entry, ("fragment", p), f"{body.round} was opened while {before} is open")
        self._open[p] = body.round
        asked = self._pulls.setdefault(p, {})
        key = (envelope.learner, envelope.incarnation, envelope.session)
        asked[key] = asked.get(key, 0) + 1
        if asked[key] > self.config.limits.pull_tries + 1:
            self.fail(entry, ("fragment", p), f"learner {envelope.learner} was asked {asked[key]} times")

    def _on_published(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Published)
        if not self.is_current(entry):
            return
        key = (envelope.learner, body.fragment)
        what = (envelope.incarnation, envelope.session, body.version)
        before, count = self._published.get(key, (what, 0))
        count = count + 1 if before == what else 1
        self._published[key] = (what, count)
        # Twice the tries: a learner may also ask for the whole value after an update that it could not use.
        if count > 2 * self.config.limits.publish_tries + 1:
            sentence = f"version {body.version} of fragment {body.fragment} was sent {count} times"
            self.fail(entry, ("learner", envelope.learner), sentence)

    def _on_shard_back(self, entry: Entry, event: ShardBack) -> None:
        """What it was to send may never have left it: it is sent as if for the first time."""
        if self.is_current(entry):
            back = {p for p, _ in event.held}
            self._published = {key: sent for key, sent in self._published.items() if key[1] not in back}

    def _on_welcome(self, entry: Entry, envelope: Envelope) -> None:
        """Each welcome says again what is wanted; how many there are is bounded by the learner's hellos."""
        if self.is_current(entry):
            for asked in self._pulls.values():
                asked.pop((envelope.learner, envelope.incarnation, envelope.session), None)

    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        if not self.is_current(entry):
            return
        self._open.pop(effect.round.fragment, None)
        self._asked_again.pop(effect.round.fragment, None)
        self._pulls.pop(effect.round.fragment, None)


class RoundsEnd(Checker):
    """What tapes can show of liveness. Whether rounds complete once everything is healed, the swarm demands itself."""

    name = "rounds-end"
    sentence = "a round that was opened is merged or abandoned within the time that its askings may take"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sent = {Pull: self._on_pull}
        self.effects = {MergeRound: self._on_closed, DiscardRound: self._on_closed}
        self.every_of_syncers = self._on_every
        self._opened: dict[FragmentId, float] = {}
        self._previous_s = 0.0
        limits = config.limits
        self._most_s = 2 * limits.most_wait_s * 2.0**limits.pull_tries  # twice: its process may stand still meanwhile

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._opened.clear()
            self._previous_s = 0.0

    def _on_every(self, entry: Entry) -> None:
        """Judged by the time of the entry before: a process that stood still could not abandon anything."""
        if not self._opened or not self.is_current(entry):
            return
        for fragment, opened_s in self._opened.items():
            if self._previous_s - opened_s > self._most_s:
                what = f"a round is open for {self._previous_s - opened_s:.6g} s, the limit is {self._most_s:.6g} s"
                self.fail(entry, ("fragment", fragment), what)
        self._previous_s = max(self._previous_s, entry.at)

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Pull)
        if self.is_current(entry):
            self._previous_s = max(self._previous_s, entry.at)
            self._opened.setdefault(body.round.fragment, self._previous_s)

    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        if self.is_current(entry):
            self._opened.pop(effect.round.fragment, None)


class TheEnd(Checker):
    name = "the-end"
    sentence = "the end comes after a last merge of every fragment, and everybody ends with the final versions"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._records = DurableRecords(self, on_save=self._on_save, on_durable=self._on_durable)
        self.effects[Say] = self._on_say
        self.sent = {Pull: self._on_pull}
        self.effects[AdoptFragment] = self._on_adopt
        self.effects[Stop] = self._on_stop
        self._ending = False
        self._opened: set[RoundId] = set()  # rounds that were opened after the budget was reached
        self._seen: set[RoundId] = set()
        self._final: set[FragmentId] = set()
        self._manifest: tuple[Version, ...] | None = None
        self._held: dict[Actor, dict[FragmentId, Version]] = {}

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._ending = False
            self._opened.clear()
            self._seen.clear()
            self._final.clear()
            if restored is not None and restored.manifest is not None:
                self._manifest = restored.manifest.versions

    def _on_say(self, entry: Entry, effect: Say) -> None:
        if not self.is_current(entry):
            return
        if effect.reason.code in ("finish-budget", "finish-asked"):
            self._ending = True
        elif effect.reason.code == "final-skipped":
            self._final.add(effect.subject[1])

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Pull)
        if self.is_current(entry) and body.round not in self._seen:
            self._seen.add(body.round)
            if self._ending:
                self._opened.add(body.round)

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, VersionRecord) and record.round in self._opened:
            self._final.add(record.fragment)

    def _on_save(self, entry: Entry, record: Record) -> None:
        if isinstance(record, ManifestRecord):
            missing = sorted(set(self.config.fragment_ids()) - self._final)
            if missing:
                self.fail(
                    entry, ("fragment", missing[0]), f"the run ends without a last merge of fragment {missing[0]}"
                )
            if record.versions != tuple(self._records.versions.values()):
                self.fail(entry, ("run", 0), "the manifest does not name the newest durable versions")
            self._manifest = record.versions

    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._held.setdefault(entry.actor, {})[effect.fragment] = effect.version

    def _on_stop(self, entry: Entry, effect: Stop) -> None:
        if effect.reason.code != "learner-finished":
            return
        held = tuple(self._held.get(entry.actor, {}).get(p, -1) for p in self.config.fragment_ids())
        if held != self._manifest:
            what = f"ends with versions {held}, the final ones are {self._manifest}"
            self.fail(entry, ("learner", entry.actor.learner), what)


RUN_CHECKERS: tuple[type[Checker], ...] = (SnapshotCut, OneAnswer, Bounds, RoundsEnd, TheEnd)
