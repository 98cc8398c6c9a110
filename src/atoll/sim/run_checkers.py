"""Checkers of the whole run: snapshots, the end, bounds, and one reply to every request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    ConnectionOpened,
    Contribution,
    Dial,
    DialFailed,
    DiscardRound,
    Effect,
    Envelope,
    Event,
    LogReason,
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
    Send,
    ShardLost,
    ShardReconnected,
    SnapshotRecord,
    SnapshotSaved,
    SnapshotSaveFailed,
    Stop,
    StoreFenced,
    VersionRecord,
    Welcome,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import FragmentId, LearnerId, RoundId, Version
from atoll.sim.checkers import Checker, DurableRecords, on
from atoll.tape.format import Actor, Entry


class SnapshotChecker(Checker):
    name = "snapshot"
    invariant = "a snapshot is a consistent cut: it has no state after the cut, and all contributions in flight"

    def setup(self) -> None:
        self._adopted: dict[Actor, dict[FragmentId, Version]] = {}
        self._newest_cut = 0  # newest snapshot whose marker was sent
        # Entry and adopted versions at the learner's cut.
        self._saved: dict[tuple[int, LearnerId], tuple[Entry, dict[FragmentId, Version]]] = {}
        self._arrived_since: list[Envelope] = []  # contributions that the syncer handled after its cut

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self._newest_cut = 0
        self._arrived_since.clear()

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._adopted.setdefault(entry.actor, {})[effect.fragment] = effect.version

    @on("sent", Marker, current=True)
    def _on_marker(self, entry: Entry, envelope: Envelope, body: Marker) -> None:
        if body.snapshot > self._newest_cut:
            self._newest_cut = body.snapshot
            self._arrived_since.clear()

    @on("effects", SaveSnapshot)
    def _on_save(self, entry: Entry, effect: SaveSnapshot) -> None:
        self._saved[(effect.snapshot, entry.actor.learner)] = (entry, dict(self._adopted.get(entry.actor, {})))

    @on("arrived", Contribution, current=True)
    def _on_arrived(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        """Record a contribution that the syncer answered. It drops contributions from stale connections."""
        if self._newest_cut and any(_replies_to(effect, envelope.learner, body.round) for effect in entry.effects):
            self._arrived_since.append(envelope)

    @on("effects", Persist, current=True)
    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        record = effect.record
        if not isinstance(record, SnapshotRecord):
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
                self.fail(entry, subject, f"snapshot {record.snapshot}: the part differs from the saved one")
            for envelope in self._arrived_since:
                body = envelope.body
                assert isinstance(body, Contribution)
                from_cut = (envelope.learner, envelope.incarnation) == cut.actor and envelope.tick < cut.tick
                if from_cut and (learner, body.round) not in record.in_flight:
                    what = f"snapshot {record.snapshot} misses the contribution to {body.round} that was in flight"
                    self.fail(entry, subject, what)
        self._saved = {key: value for key, value in self._saved.items() if key[0] > record.snapshot}


def _replies_to(effect: Effect, learner: LearnerId, round_id: RoundId) -> bool:
    if isinstance(effect, Accumulate):
        return effect.contribution.learner == learner and effect.round == round_id
    if isinstance(effect, Send) and isinstance(effect.envelope.body, RefuseContribution):
        return effect.envelope.learner == learner and effect.envelope.body.round == round_id
    return False


_REQUEST_KEYS: dict[type, Callable[[Any], object]] = {
    Persist: lambda effect: effect.record.key(),
    MergeRound: lambda effect: effect.round,
    Dial: lambda effect: "dial",
    SaveSnapshot: lambda effect: RecordKey("part", effect.snapshot, 0),
}
_REPLY_KEYS: dict[type, Callable[[Any], object]] = {
    Persisted: lambda event: event.key,
    PersistFailed: lambda event: event.key,
    MergeDone: lambda event: event.round,
    MergeFailed: lambda event: event.round,
    ConnectionOpened: lambda event: "dial",
    DialFailed: lambda event: "dial",
    SnapshotSaved: lambda event: RecordKey("part", event.snapshot, 0),
    SnapshotSaveFailed: lambda event: RecordKey("part", event.snapshot, 0),
}
"""Keys that relate a request effect to its reply event, by type."""


class SingleReplyChecker(Checker):
    name = "one-reply"
    invariant = "every request effect has exactly one reply event"

    def setup(self) -> None:
        self._open: dict[tuple[Actor, object], int] = {}

    @on("effects", *_REQUEST_KEYS)
    def _on_request(self, entry: Entry, effect: Effect) -> None:
        what = _REQUEST_KEYS[type(effect)](effect)
        if type(entry.event) is ShardLost and _belongs_to(what, entry.event.fragments):
            return  # from a timer that was due before the loss: no process can reply
        key = (entry.actor, what)
        self._open[key] = self._open.get(key, 0) + 1
        if self._open[key] > 1:
            self.fail(entry, None, f"{entry.actor} requested {what} twice without a reply in between")

    @on("events", *_REPLY_KEYS)
    def _on_reply(self, entry: Entry, event: Event) -> None:
        what = _REPLY_KEYS[type(event)](event)
        key = (entry.actor, what)
        if self._open.get(key, 0) != 1:
            self.fail(entry, None, f"{entry.actor} received a reply for {what} without a request")
        del self._open[key]

    @on("events", StoreFenced)
    def _on_fenced(self, entry: Entry, event: StoreFenced) -> None:
        """Forget all pending writes of a fenced syncer, which get no reply. A pending merge still gets its reply."""
        self._forget(entry.actor, lambda what: type(what) is RecordKey)

    @on("events", ShardLost)
    def _on_lost(self, entry: Entry, event: ShardLost) -> None:
        """Forget the pending requests to a lost shard, which cannot reply."""
        self._forget(entry.actor, lambda what: _belongs_to(what, event.fragments))

    def _forget(self, actor: Actor, is_over: Callable[[object], bool]) -> None:
        for key in [key for key in self._open if key[0] == actor and is_over(key[1])]:
            del self._open[key]


def _belongs_to(what: object, fragments: tuple[FragmentId, ...]) -> bool:
    """Return whether a request key is a write or a merge of one of these fragments."""
    if type(what) is RecordKey:
        return what.kind == "version" and what.number in fragments
    return type(what) is RoundId and what.fragment in fragments


class BoundsChecker(Checker):
    name = "bounds"
    invariant = "the numbers of open rounds, pulls and retransmissions are bounded"

    def setup(self) -> None:
        self._retries: dict[FragmentId, int] = {}
        self._open: dict[FragmentId, RoundId] = {}
        self._pulls: dict[FragmentId, dict[tuple[LearnerId, int, int], int]] = {}
        self._published: dict[tuple[LearnerId, FragmentId], tuple[tuple[int, int, Version], int]] = {}

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self.setup()

    @on("effects", LogReason, current=True)
    def _on_log_reason(self, entry: Entry, effect: LogReason) -> None:
        if effect.reason.code != "round-pull-retried":
            return
        p = effect.subject[1]
        self._retries[p] = self._retries.get(p, 0) + 1
        if self._retries[p] >= self.config.limits.max_pull_attempts:
            self.fail(entry, effect.subject, f"{self._retries[p]} pull retries in one round")

    @on("sent", Pull, current=True)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        p = body.round.fragment
        before = self._open.get(p)
        if before is not None and before != body.round:
            self.fail(entry, ("fragment", p), f"{body.round} was opened while {before} is open")
        self._open[p] = body.round
        pulls = self._pulls.setdefault(p, {})
        key = (envelope.learner, envelope.incarnation, envelope.session)
        pulls[key] = pulls.get(key, 0) + 1
        if pulls[key] > self.config.limits.max_pull_attempts + 1:
            self.fail(entry, ("fragment", p), f"learner {envelope.learner} was pulled {pulls[key]} times")

    @on("sent", Published, current=True)
    def _on_published(self, entry: Entry, envelope: Envelope, body: Published) -> None:
        key = (envelope.learner, body.fragment)
        what = (envelope.incarnation, envelope.session, body.version)
        before, count = self._published.get(key, (what, 0))
        count = count + 1 if before == what else 1
        self._published[key] = (what, count)
        # Twice the attempts, because a learner may also request the full value after an update that it could not apply.
        if count > 2 * self.config.limits.max_publish_attempts + 1:
            sentence = f"version {body.version} of fragment {body.fragment} was sent {count} times"
            self.fail(entry, ("learner", envelope.learner), sentence)

    @on("events", ShardReconnected, current=True)
    def _on_shard_back(self, entry: Entry, event: ShardReconnected) -> None:
        """Reset the counts of a shard, whose pending sends may be lost."""
        back = {p for p, _ in event.versions}
        self._published = {key: sent for key, sent in self._published.items() if key[1] not in back}

    @on("sent", Welcome, current=True)
    def _on_welcome(self, entry: Entry, envelope: Envelope, body: Welcome) -> None:
        """Reset the pulls of a session, because each welcome repeats them. Hellos limit the number of welcomes."""
        for pulls in self._pulls.values():
            pulls.pop((envelope.learner, envelope.incarnation, envelope.session), None)

    @on("effects", MergeRound, DiscardRound, current=True)
    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        self._open.pop(effect.round.fragment, None)
        self._retries.pop(effect.round.fragment, None)
        self._pulls.pop(effect.round.fragment, None)


class RoundCompletionChecker(Checker):
    """Check liveness as far as tapes show it. The swarm itself checks that rounds complete after healing."""

    name = "rounds-end"
    invariant = "a round is merged or abandoned within the time limit of its pull attempts"

    def setup(self) -> None:
        self._opened: dict[FragmentId, float] = {}
        self._previous_s = 0.0
        limits = self.config.limits
        # Twice the limit, because the process may be stalled meanwhile.
        self._max_open_s = 2 * limits.max_wait_s * 2.0**limits.max_pull_attempts

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self.setup()

    @on("every", current=True)
    def _on_every(self, entry: Entry) -> None:
        """Check the age of open rounds at the previous entry: a stalled process cannot abandon rounds."""
        if not self._opened:
            return
        for fragment, opened_s in self._opened.items():
            if self._previous_s - opened_s > self._max_open_s:
                what = (
                    f"a round was open for {self._previous_s - opened_s:.6g} s, the limit is {self._max_open_s:.6g} s"
                )
                self.fail(entry, ("fragment", fragment), what)
        self._previous_s = max(self._previous_s, entry.at)

    @on("sent", Pull, current=True)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        self._previous_s = max(self._previous_s, entry.at)
        self._opened.setdefault(body.round.fragment, self._previous_s)

    @on("effects", MergeRound, DiscardRound, current=True)
    def _on_closed(self, entry: Entry, effect: MergeRound | DiscardRound) -> None:
        self._opened.pop(effect.round.fragment, None)


class RunEndChecker(Checker):
    name = "run-end"
    invariant = "the run ends after a last merge of every fragment, and all learners end with the final versions"

    def setup(self) -> None:
        self._records = DurableRecords(self, on_save=self._on_save, on_durable=self._on_durable)
        self._ending = False
        self._opened: set[RoundId] = set()  # rounds that were opened after the budget was reached
        self._seen: set[RoundId] = set()
        self._final: set[FragmentId] = set()
        self._manifest: tuple[Version, ...] | None = None
        self._adopted: dict[Actor, dict[FragmentId, Version]] = {}

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        self._ending = False
        self._opened.clear()
        self._seen.clear()
        self._final.clear()
        if restored is not None and restored.manifest is not None:
            self._manifest = restored.manifest.versions

    @on("effects", LogReason, current=True)
    def _on_log_reason(self, entry: Entry, effect: LogReason) -> None:
        if effect.reason.code in ("finish-budget", "finish-requested"):
            self._ending = True
        elif effect.reason.code == "final-skipped":
            self._final.add(effect.subject[1])

    @on("sent", Pull, current=True)
    def _on_pull(self, entry: Entry, envelope: Envelope, body: Pull) -> None:
        if body.round not in self._seen:
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
                    entry, ("fragment", missing[0]), f"the run ended without a last merge of fragment {missing[0]}"
                )
            if record.versions != tuple(self._records.versions.values()):
                self.fail(entry, ("run", 0), "the manifest does not name the newest durable versions")
            self._manifest = record.versions

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._adopted.setdefault(entry.actor, {})[effect.fragment] = effect.version

    @on("effects", Stop)
    def _on_stop(self, entry: Entry, effect: Stop) -> None:
        if effect.reason.code != "learner-finished":
            return
        adopted = tuple(self._adopted.get(entry.actor, {}).get(p, -1) for p in self.config.fragment_ids())
        if adopted != self._manifest:
            what = f"ended with versions {adopted}, the final versions are {self._manifest}"
            self.fail(entry, ("learner", entry.actor.learner), what)


RUN_CHECKERS: tuple[type[Checker], ...] = (
    SnapshotChecker,
    SingleReplyChecker,
    BoundsChecker,
    RoundCompletionChecker,
    RunEndChecker,
)
