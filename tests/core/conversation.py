"""Tests as conversations: tell a core what happened and when, and compare what it does about it.

Every event and effect is printed as it happens, and pytest shows that when a test fails: every failure has its story.
Effects are compared in their encoded form, because named tuples of different types with equal fields are equal.

    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    talk.expect(talk.to(1, Pull(RoundId(0, 0, 1, 1))))
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
"""Per step, where a test does not say otherwise."""


def form(effect: Any) -> str:
    """What two effects are compared by. The clock of an envelope counts calls; it has tests of its own."""
    if isinstance(effect, Send):
        return encode(Send(structs.replace(effect.envelope, tick=0, seen_tick=0)))
    return encode(effect)


class Talk:
    """A core, the time, and the story so far."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.now = 0.0
        self.effects: list[Any] = []  # effects of the last event
        self.done: list[Any] = []  # and about everything
        self.story: list[str] = []
        self.sentences: list[str] = []  # every reason that was ever given
        self.awaited: list[Any] = []  # effects that want an answer and have none yet

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

    def fires(self, until: float) -> list[Any]:
        """Let every timer fire that is due by `until`, each at its own time; all that was done about them."""
        done: list[Any] = []
        for _ in range(10_000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > until:
                break
            done += self.handle(deadline, TimerFired())
        else:
            raise AssertionError(f"timers fire for ever at {self.core.next_deadline()}")
        self.now = until
        self.effects = done
        return done

    # ---------------------------------------------------------------------------------------------------- comparing

    def expect(self, *effects: Any) -> None:
        """Assert that the last event led to exactly these effects, in this order."""
        got, wanted = [form(e) for e in self.effects], [form(e) for e in effects]
        if got != wanted:
            lines = [f"  got      {line}" for line in got] + [f"  expected {line}" for line in wanted]
            raise AssertionError("\n".join(["other effects than expected, the story is printed above:", *lines]))

    def of(self, kind: type[T]) -> list[T]:
        """Effects of one type among what was done last."""
        return [effect for effect in self.effects if type(effect) is kind]

    def one(self, kind: type[T]) -> T:
        found = self.of(kind)
        assert len(found) == 1, f"{len(found)} effects {kind.__name__}, one was expected; the story is printed above"
        return found[0]

    def bodies(self, kind: type[T]) -> list[tuple[LearnerId, T]]:
        """Bodies of one type among what was sent last, each with the learner's end of its link."""
        sent = [effect.envelope for effect in self.of(Send)]
        return [(envelope.learner, envelope.body) for envelope in sent if type(envelope.body) is kind]

    def codes(self) -> list[str]:
        """Codes of all reasons in what was done last, also of those inside messages."""
        return [reason.code for effect in self.effects for reason in _reasons(effect)]


def _reasons(value: Any) -> Iterable[Reason]:
    if isinstance(value, Reason):
        yield value
    elif isinstance(value, tuple | Value):
        for inner in structs.astuple(value) if isinstance(value, Value) else value:
            yield from _reasons(inner)


# --------------------------------------------------------------------------------------------------------------------
# With the syncer


class SyncerTalk(Talk):
    """The test speaks for the learners, the merge thread and the disk."""

    core_type = SyncerCore
    parts = SyncerComponents()

    def __init__(self, config: RunConfig, epoch: int = 1, restored: RestoredState | None = None) -> None:
        super().__init__(self.core_type(config, epoch, restored, self.parts))
        self.config = config
        self.epoch = epoch
        self.voices: dict[LearnerId, Voice] = {}
        self.disk: dict[tuple[str, int], Record] = {}  # what would survive a kill
        for record in _records(restored):
            self._write_record(record)
        self.handle(0.0, Started())

    def restarted(self: Self, at: float = 0.0) -> Self:
        """The process was killed; another one starts on the same directory."""
        versions = {r.fragment: r for (kind, _), r in self.disk.items() if kind == "version"}  # type: ignore[union-attr]
        others = [self.disk.get((kind, 0)) for kind in ("members", "manifest", "leases")]
        talk = type(self)(self.config, self.epoch + 1, RestoredState(versions, *others))  # type: ignore[arg-type]
        talk.now = at
        return talk

    def voice(self, learner: LearnerId, incarnation: int = 1, session: int = 1) -> Voice:
        self.voices[learner] = Voice(self, learner, incarnation, session)
        return self.voices[learner]

    def joined(self, learner: LearnerId, at: float = 0.0, incarnation: int = 1) -> Voice:
        """Join a learner: it has sent a hello, received every fragment, and is ready."""
        voice = self.voice(learner, incarnation)
        voice.hello(at)
        if voice.welcome is None:
            self.persisted(at)
        voice.acknowledges(at)
        voice.delivers(at, StateRequest(()))
        voice.delivers(at, Ready(because("peer-new-run")))
        return voice

    def on_effect(self, effect: Any) -> None:
        if isinstance(effect, Send) and effect.envelope.learner in self.voices:
            self.voices[effect.envelope.learner].receives(effect.envelope)

    def to(self, learner: LearnerId, body: Body) -> Send:
        """The message as this syncer would send it to the learner now."""
        voice = self.voices[learner]
        marker = self.core.state.marker
        return Send(Envelope(learner, voice.incarnation, voice.session, self.epoch, 0, 0, marker, body))

    # ------------------------------------------------------------------------------------------- merge thread and disk

    def take(self, kind: type[T], *words: object) -> T:
        """The oldest effect of this type that waits for its answer, of all or of those that name these things."""
        for effect in self.awaited:
            if type(effect) is kind and all(str(word) in encode(effect) for word in words):
                self.awaited.remove(effect)
                return effect
        raise AssertionError(f"no {kind.__name__} of {words} waits for an answer; the story is printed above")

    def merged(self, at: float) -> list[Any]:
        return self.handle(at, MergeDone(self.take(MergeRound).round))

    def merge_failed(self, at: float, why: str = "out of memory") -> list[Any]:
        return self.handle(at, MergeFailed(self.take(MergeRound).round, why))

    def persisted(self, at: float, *words: object) -> list[Any]:
        record = self.take(Persist, *words).record
        self._write_record(record)
        return self.handle(at, Persisted(record.key()))

    def persist_failed(self, at: float, why: str = "no space left on device") -> list[Any]:
        return self.handle(at, PersistFailed(self.take(Persist).record.key(), why))

    def written_without_reply(self) -> None:
        """Write the oldest record without a reply, as if the process died in between."""
        self._write_record(self.take(Persist).record)

    def shard_lost(self, at: float, *fragments: FragmentId, why: str = "connection reset by peer") -> list[Any]:
        """Drop the pending effects of a lost shard: they get no reply."""
        for effect in list(self.awaited):
            if _fragment_of(effect) in fragments:
                self.awaited.remove(effect)
        return self.handle(at, ShardLost(fragments, why))

    def shard_back(self, at: float, *held: tuple[FragmentId, Version]) -> list[Any]:
        return self.handle(at, ShardReconnected(held))

    def merges_and_persists(self, at: float) -> list[Any]:
        """The oldest sealed round becomes a version."""
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
    """What a shard would do; None if it is the syncer's own work."""
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


class Voice:
    """A learner's process on one link, as far as the syncer can tell."""

    def __init__(self, talk: SyncerTalk, learner: LearnerId, incarnation: int, session: int) -> None:
        self.talk = talk
        self.id = learner
        self.incarnation = incarnation
        self.session = session
        self.epoch = talk.epoch
        self.tick = 0
        self.marker = 0
        self.step = 0
        self.trained = 0
        self.received: dict[FragmentId, Version] = dict.fromkeys(talk.config.fragment_ids(), NO_VERSION)
        self.marks: dict[FragmentId, MergedUpTo | None] = {}
        self.pulls: dict[FragmentId, RoundId] = {}
        self.welcome: Welcome | None = None
        self.refusals: list[RefuseContribution] = []
        self.leases: list[Lease] = []
        self.taken = 0

    def receives(self, envelope: Envelope) -> None:
        body = envelope.body
        if (envelope.incarnation, envelope.session) != (self.incarnation, self.session):
            return
        if isinstance(body, Welcome):
            self.welcome = body
        elif isinstance(body, Published):
            self.received[body.fragment] = body.version
            self.marks[body.fragment] = body.merged_up_to
        elif isinstance(body, Pull):
            self.pulls[body.round.fragment] = body.round
        elif isinstance(body, RefuseContribution):
            self.refusals.append(body)
        elif isinstance(body, Lease) and body.number == len(self.leases):
            self.leases.append(body)

    def envelope(self, body: Body, **other: Any) -> Envelope:
        self.tick += 1
        plain = Envelope(self.id, self.incarnation, self.session, self.epoch, self.tick, 0, self.marker, body)
        return structs.replace(plain, **other)

    def delivers(self, at: float, body: Body, **other: Any) -> list[Any]:
        """A message arrives. `other` replaces fields of its envelope."""
        return self.talk.handle(at, MessageArrived(self.envelope(body, **other)))

    def hello(self, at: float, training: bool = False, **other: Any) -> list[Any]:
        config = self.talk.config
        body = Hello(
            config.run_id, config.fingerprint, tuple(self.received.values()), self.step, self.trained, training
        )
        return self.delivers(at, structs.replace(body, **other))

    def acknowledges(self, at: float) -> list[Any]:
        """Every version that has arrived."""
        done: list[Any] = []
        for p, version in list(self.received.items()):
            if version != NO_VERSION:
                done += self.delivers(at, PublishAck(p, version))
        self.talk.effects = done
        return done

    def reports(self, at: float, step: int, trained: int | None = None, step_time_s: float = 1.0) -> list[Any]:
        self.step = step
        self.trained = step * TOKENS if trained is None else trained
        return self.delivers(at, Report(self.step, self.trained, step_time_s, self.taken))

    def contributes(self, at: float, fragment: FragmentId = 0, **other: Any) -> list[Any]:
        """An honest answer to the newest pull of the fragment; `other` replaces fields of it."""
        body = self.contribution(fragment)
        return self.delivers(at, structs.replace(body, **other))

    def contribution(self, fragment: FragmentId = 0) -> Contribution:
        mark = self.marks.get(fragment)
        ours = mark is not None and mark.incarnation == self.incarnation
        from_step, settled = (mark.copied_at, mark.trained) if ours and mark is not None else (0, 0)
        steps, tokens = self.step - from_step, self.trained - settled
        return Contribution(self.pulls[fragment], self.step, steps, tokens, self.trained, 0, None, self.taken)


# --------------------------------------------------------------------------------------------------------------------
# With a learner


class LearnerTalk(Talk):
    """The test speaks for the syncer, the network and the training loop."""

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
        """A message of the syncer arrives. `other` replaces fields of its envelope."""
        self.tick += 1
        core = self.core
        plain = Envelope(
            core.state.id, core.state.incarnation, self.session, self.epoch, self.tick, 0, self.marker, body
        )
        return self.handle(at, MessageArrived(structs.replace(plain, **other)))

    def welcomed(self, at: float, versions: tuple[Version, ...] | None = None, step_time_s: float = 0.0) -> list[Any]:
        versions = versions if versions is not None else (0,) * len(self.config.fragment_ids())
        return self.receives(at, Welcome(versions, 0.0, step_time_s))

    def gets(
        self,
        at: float,
        fragment: FragmentId,
        version: Version,
        mark: MergedUpTo | None = None,
        base: Version | None = None,
    ) -> list[Any]:
        """A published version arrives."""
        return self.receives(at, Published(fragment, version, base, mark, 0.0))

    def trains(self, at: float = 0.0) -> LearnerTalk:
        """Connected and training, on version 0 of every fragment, in a new run."""
        self.opens(at)
        self.welcomed(at)
        for p in self.config.fragment_ids():
            self.gets(at, p, 0)
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

    def save_failed(self, at: float, why: str = "no space left on device") -> list[Any]:
        effect = next(e for e in self.awaited if isinstance(e, SaveSnapshot))
        self.awaited.remove(effect)
        return self.handle(at, SnapshotSaveFailed(effect.snapshot, why))

    def sends(self, body: Body) -> Send:
        """The message as this learner would send it now."""
        state = self.core.state
        return Send(Envelope(state.id, state.incarnation, state.session, state.epoch, 0, 0, state.marker, body))

    def line(self, p: FragmentId = 0) -> Any:
        return self.core.view().ledger[p]
