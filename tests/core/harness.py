"""Test harness of the cores: send events with their times, and compare the effects.

Every event and effect is printed when it is handled, so pytest shows the whole story of a failed test.
Effects are compared in their encoded form, which includes the type.

    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    harness.expect(harness.to(1, Pull(RoundId(0, 0, 1, 1))))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from msgspec import structs

from atoll.core.codec import Value
from atoll.core.learner.core import LearnerComponents, LearnerCore
from atoll.core.protocol import (
    Body,
    ConnectionOpened,
    Contribution,
    Envelope,
    Event,
    Hello,
    Lease,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    NoPeer,
    Persist,
    Persisted,
    PersistFailed,
    PublishAck,
    Published,
    Pull,
    Ready,
    Record,
    RefuseContribution,
    Report,
    SaveSnapshot,
    Send,
    ShardLost,
    ShardReconnected,
    SnapshotSaved,
    SnapshotSaveFailed,
    Started,
    StateRequest,
    StepTaken,
    TimerFired,
    VersionRecord,
    Welcome,
)
from atoll.core.reasons import Reason, because
from atoll.core.syncer.core import SyncerComponents, SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import NO_VERSION, FragmentId, LearnerId, MergedUpTo, RoundId, RunConfig, Version
from atoll.tape.format import encode

T = TypeVar("T")

TOKENS = 100
"""Tokens of one step, by default."""


def comparable(effect: Any) -> str:
    """Return the comparable form of an effect, without the vector clock of its envelope."""
    if isinstance(effect, Send):
        return encode(Send(structs.replace(effect.envelope, tick=0, seen_tick=0)))
    return encode(effect)


class Harness:
    """A core, its clock, and the events and effects so far."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.now = 0.0
        self.effects: list[Any] = []  # effects of the last event
        self.done: list[Any] = []  # effects of all events
        self.story: list[str] = []
        self.sentences: list[str] = []  # reasons of all effects
        self.awaited: list[Any] = []  # effects without a reply so far

    def handle(self, at: float, event: Event) -> list[Any]:
        self.now = at
        self._write(f"{at:>10.3f}  {encode(event)}")
        self.effects = self.core.handle(at, event)
        self.done += self.effects
        for effect in self.effects:
            self._write(f"{'':>10}    -> {encode(effect)}")
            if isinstance(effect, MergeRound | Persist | SaveSnapshot):
                self.awaited.append(effect)
            self.sentences += [str(reason) for reason in _reasons(effect)]
            self.on_effect(effect)
        self.core.check_invariants()
        return self.effects

    def on_effect(self, effect: Any) -> None:
        """Process an effect; subclasses override it."""

    def _write(self, line: str) -> None:
        self.story.append(line)
        print(line)

    def fire_timers(self, until: float) -> list[Any]:
        """Fire every timer that is due by `until`, each at its own time. Return all effects."""
        done: list[Any] = []
        for _ in range(10_000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > until:
                break
            done += self.handle(deadline, TimerFired())
        else:
            raise AssertionError(f"timers fire forever at {self.core.next_deadline()}")
        self.now = until
        self.effects = done
        return done

    # ---------------------------------------------------------------------------------------------------- comparing

    def expect(self, *effects: Any) -> None:
        """Assert that the last event led to exactly these effects, in this order."""
        actual, expected = [comparable(e) for e in self.effects], [comparable(e) for e in effects]
        if actual != expected:
            lines = [f"  got      {line}" for line in actual] + [f"  expected {line}" for line in expected]
            raise AssertionError("\n".join(["other effects than expected; the story is printed above:", *lines]))

    def of(self, kind: type[T]) -> list[T]:
        """Return the effects of this type among those of the last event."""
        return [effect for effect in self.effects if type(effect) is kind]

    def one(self, kind: type[T]) -> T:
        found = self.of(kind)
        assert len(found) == 1, f"{len(found)} effects {kind.__name__}, one was expected; the story is printed above"
        return found[0]

    def bodies(self, kind: type[T]) -> list[tuple[LearnerId, T]]:
        """Return the messages of this type that the last event sent, each with its learner."""
        sent = [effect.envelope for effect in self.of(Send)]
        return [(envelope.learner, envelope.body) for envelope in sent if type(envelope.body) is kind]

    def codes(self) -> list[str]:
        """Return the codes of all reasons in the last effects, including those inside messages."""
        return [reason.code for effect in self.effects for reason in _reasons(effect)]


def _reasons(value: Any) -> Iterable[Reason]:
    if isinstance(value, Reason):
        yield value
    elif isinstance(value, tuple | Value):
        for inner in structs.astuple(value) if isinstance(value, Value) else value:
            yield from _reasons(inner)


# --------------------------------------------------------------------------------------------------------------------
# Syncer


class SyncerHarness(Harness):
    """A syncer core. The test plays the learners, the merge thread and the disk."""

    core_type = SyncerCore
    parts = SyncerComponents()

    def __init__(self, config: RunConfig, epoch: int = 1, restored: RestoredState | None = None) -> None:
        super().__init__(self.core_type(config, epoch, restored, self.parts))
        self.config = config
        self.epoch = epoch
        self.learners: dict[LearnerId, FakeLearner] = {}
        self.disk: dict[tuple[str, int], Record] = {}  # records that survive a kill
        for record in _records(restored):
            self._write_record(record)
        self.handle(0.0, Started())

    def restarted(self: Self, at: float = 0.0) -> Self:
        """Return a new syncer on the same disk, as after a kill."""
        versions = {r.fragment: r for (kind, _), r in self.disk.items() if kind == "version"}  # type: ignore[union-attr]
        others = [self.disk.get((kind, 0)) for kind in ("members", "manifest", "leases")]
        harness = type(self)(self.config, self.epoch + 1, RestoredState(versions, *others))  # type: ignore[arg-type]
        harness.now = at
        return harness

    def add_learner(self, learner: LearnerId, incarnation: int = 1, session: int = 1) -> FakeLearner:
        self.learners[learner] = FakeLearner(self, learner, incarnation, session)
        return self.learners[learner]

    def joined(self, learner: LearnerId, at: float = 0.0, incarnation: int = 1) -> FakeLearner:
        """Join a learner: it has sent a hello, received every fragment, and is ready."""
        fake = self.add_learner(learner, incarnation)
        fake.hello(at)
        if fake.welcome is None:
            self.persisted(at)
        fake.acknowledges(at)
        fake.delivers(at, StateRequest(()))
        fake.delivers(at, Ready(because("peer-new-run")))
        return fake

    def on_effect(self, effect: Any) -> None:
        if isinstance(effect, Send) and effect.envelope.learner in self.learners:
            self.learners[effect.envelope.learner].receives(effect.envelope)

    def to(self, learner: LearnerId, body: Body) -> Send:
        """Return the message as this syncer would send it to the learner now."""
        fake = self.learners[learner]
        marker = self.core.state.marker
        return Send(Envelope(learner, fake.incarnation, fake.session, self.epoch, 0, 0, marker, body))

    # ------------------------------------------------------------------------------------------- merge thread and disk

    def take(self, kind: type[T], *parts: object) -> T:
        """Remove and return the oldest effect of this type without a reply whose encoding contains all `parts`."""
        for effect in self.awaited:
            if type(effect) is kind and all(str(part) in encode(effect) for part in parts):
                self.awaited.remove(effect)
                return effect
        raise AssertionError(f"no {kind.__name__} with {parts} waits for a reply; the story is printed above")

    def merged(self, at: float) -> list[Any]:
        return self.handle(at, MergeDone(self.take(MergeRound).round))

    def merge_failed(self, at: float, cause: str = "out of memory") -> list[Any]:
        return self.handle(at, MergeFailed(self.take(MergeRound).round, cause))

    def persisted(self, at: float, *parts: object) -> list[Any]:
        record = self.take(Persist, *parts).record
        self._write_record(record)
        return self.handle(at, Persisted(record.key()))

    def persist_failed(self, at: float, cause: str = "no space left on device") -> list[Any]:
        return self.handle(at, PersistFailed(self.take(Persist).record.key(), cause))

    def written_without_reply(self) -> None:
        """Write the oldest record without a reply, as if the process died in between."""
        self._write_record(self.take(Persist).record)

    def shard_lost(self, at: float, *fragments: FragmentId, cause: str = "connection reset by peer") -> list[Any]:
        """Drop the pending effects of a lost shard: they get no reply."""
        for effect in list(self.awaited):
            if _fragment_of(effect) in fragments:
                self.awaited.remove(effect)
        return self.handle(at, ShardLost(fragments, cause))

    def shard_reconnected(self, at: float, *versions: tuple[FragmentId, Version]) -> list[Any]:
        return self.handle(at, ShardReconnected(versions))

    def merges_and_persists(self, at: float) -> list[Any]:
        """Merge the oldest sealed round and write its version."""
        self.merged(at)
        return self.persisted(at)

    def _write_record(self, record: Record) -> None:
        key = record.key()
        self.disk[(key.kind, key.number if key.kind == "version" else 0)] = record

    def fragment(self, p: FragmentId) -> Any:
        return self.core.view().fragments[p]

    def member(self, learner: LearnerId) -> Any:
        return next(m for m in self.core.view().members if m.learner == learner)


def _fragment_of(effect: Any) -> FragmentId | None:
    """Return the fragment whose shard executes this effect, or None if the syncer itself does."""
    if isinstance(effect, MergeRound):
        return effect.round.fragment
    record = effect.record if isinstance(effect, Persist) else None
    return record.fragment if isinstance(record, VersionRecord) else None


def _records(restored: RestoredState | None) -> Iterable[Record]:
    if restored is not None:
        yield from restored.versions.values()
        if restored.members is not None:
            yield restored.members
        if restored.manifest is not None:
            yield restored.manifest
        if restored.leases is not None:
            yield restored.leases


class FakeLearner:
    """A simulated learner process on one connection to the syncer."""

    def __init__(self, harness: SyncerHarness, learner: LearnerId, incarnation: int, session: int) -> None:
        self.harness = harness
        self.id = learner
        self.incarnation = incarnation
        self.session = session
        self.epoch = harness.epoch
        self.tick = 0
        self.marker = 0
        self.step = 0
        self.trained = 0
        self.received: dict[FragmentId, Version] = dict.fromkeys(harness.config.fragment_ids(), NO_VERSION)
        self.merged_up_to: dict[FragmentId, MergedUpTo | None] = {}
        self.pulls: dict[FragmentId, RoundId] = {}
        self.welcome: Welcome | None = None
        self.refusals: list[RefuseContribution] = []
        self.leases: list[Lease] = []
        self.consumed_samples = 0

    def receives(self, envelope: Envelope) -> None:
        body = envelope.body
        if (envelope.incarnation, envelope.session) != (self.incarnation, self.session):
            return
        if isinstance(body, Welcome):
            self.welcome = body
        elif isinstance(body, Published):
            self.received[body.fragment] = body.version
            self.merged_up_to[body.fragment] = body.merged_up_to
        elif isinstance(body, Pull):
            self.pulls[body.round.fragment] = body.round
        elif isinstance(body, RefuseContribution):
            self.refusals.append(body)
        elif isinstance(body, Lease) and body.number == len(self.leases):
            self.leases.append(body)

    def envelope(self, body: Body, **other: Any) -> Envelope:
        self.tick += 1
        envelope = Envelope(self.id, self.incarnation, self.session, self.epoch, self.tick, 0, self.marker, body)
        return structs.replace(envelope, **other)

    def delivers(self, at: float, body: Body, **other: Any) -> list[Any]:
        """Deliver a message to the syncer. `other` replaces fields of its envelope."""
        return self.harness.handle(at, MessageArrived(self.envelope(body, **other)))

    def hello(self, at: float, training: bool = False, **other: Any) -> list[Any]:
        config = self.harness.config
        body = Hello(
            config.run_id, config.fingerprint, tuple(self.received.values()), self.step, self.trained, training
        )
        return self.delivers(at, structs.replace(body, **other))

    def acknowledges(self, at: float) -> list[Any]:
        """Acknowledge every received version."""
        done: list[Any] = []
        for p, version in list(self.received.items()):
            if version != NO_VERSION:
                done += self.delivers(at, PublishAck(p, version))
        self.harness.effects = done
        return done

    def reports(self, at: float, step: int, trained: int | None = None, step_time_s: float = 1.0) -> list[Any]:
        self.step = step
        self.trained = step * TOKENS if trained is None else trained
        return self.delivers(at, Report(self.step, self.trained, step_time_s, self.consumed_samples))

    def contributes(self, at: float, fragment: FragmentId = 0, **other: Any) -> list[Any]:
        """Send a valid contribution to the newest pull of the fragment. `other` replaces its fields."""
        body = self.contribution(fragment)
        return self.delivers(at, structs.replace(body, **other))

    def contribution(self, fragment: FragmentId = 0) -> Contribution:
        merged_up_to = self.merged_up_to.get(fragment)
        is_own = merged_up_to is not None and merged_up_to.incarnation == self.incarnation
        from_step, settled = (
            (merged_up_to.copied_at, merged_up_to.trained) if is_own and merged_up_to is not None else (0, 0)
        )
        steps, tokens = self.step - from_step, self.trained - settled
        return Contribution(
            self.pulls[fragment], self.step, steps, tokens, self.trained, 0, None, self.consumed_samples
        )


# --------------------------------------------------------------------------------------------------------------------
# Learner


class LearnerHarness(Harness):
    """A learner core. The test plays the syncer, the network and the training loop."""

    core_type = LearnerCore
    parts = LearnerComponents()

    def __init__(self, config: RunConfig, learner: LearnerId = 1, incarnation: int = 1) -> None:
        super().__init__(self.core_type(config, learner, incarnation, self.parts))
        self.config = config
        self.session = 0
        self.epoch = 1
        self.tick = 0
        self.marker = 0
        self.handle(0.0, Started())

    def opens(self, at: float) -> list[Any]:
        self.session += 1
        return self.handle(at, ConnectionOpened(self.session))

    def receives(self, at: float, body: Body, **other: Any) -> list[Any]:
        """Deliver a message of the syncer. `other` replaces fields of its envelope."""
        self.tick += 1
        core = self.core
        envelope = Envelope(
            core.state.id, core.state.incarnation, self.session, self.epoch, self.tick, 0, self.marker, body
        )
        return self.handle(at, MessageArrived(structs.replace(envelope, **other)))

    def welcomed(self, at: float, versions: tuple[Version, ...] | None = None, step_time_s: float = 0.0) -> list[Any]:
        versions = versions if versions is not None else (0,) * len(self.config.fragment_ids())
        return self.receives(at, Welcome(versions, 0.0, step_time_s))

    def published(
        self,
        at: float,
        fragment: FragmentId,
        version: Version,
        merged_up_to: MergedUpTo | None = None,
        base: Version | None = None,
    ) -> list[Any]:
        """Deliver a published version."""
        return self.receives(at, Published(fragment, version, base, merged_up_to, 0.0))

    def trains(self, at: float = 0.0) -> LearnerHarness:
        """Connect and start training on version 0 of every fragment in a new run."""
        self.opens(at)
        self.welcomed(at)
        for p in self.config.fragment_ids():
            self.published(at, p, 0)
        self.receives(at, NoPeer(because("peer-new-run"), True))
        assert self.core.training, "the story is printed above"
        return self

    def steps(
        self, at: float, steps: int = 1, tokens: int | None = None, step_time_s: float = 1.0, samples: int = 0
    ) -> list[Any]:
        return self.handle(at, StepTaken(steps, steps * TOKENS if tokens is None else tokens, step_time_s, samples))

    def saved(self, at: float) -> list[Any]:
        effect = next(e for e in self.awaited if isinstance(e, SaveSnapshot))
        self.awaited.remove(effect)
        return self.handle(at, SnapshotSaved(effect.snapshot))

    def save_failed(self, at: float, cause: str = "no space left on device") -> list[Any]:
        effect = next(e for e in self.awaited if isinstance(e, SaveSnapshot))
        self.awaited.remove(effect)
        return self.handle(at, SnapshotSaveFailed(effect.snapshot, cause))

    def sends(self, body: Body) -> Send:
        """Return the message as this learner would send it now."""
        state = self.core.state
        return Send(Envelope(state.id, state.incarnation, state.session, state.epoch, 0, 0, state.marker, body))

    def totals(self, p: FragmentId = 0) -> Any:
        return self.core.view().ledger[p]
