"""Everything that can happen to a syncer, in any order: honest, stale, doubled or hostile."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec import structs

from atoll.core.protocol import (
    Contribution,
    Envelope,
    FinishRequested,
    Hello,
    LearnerDisconnected,
    Lease,
    LeaseRequest,
    Left,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    OptimizerState,
    Persist,
    Persisted,
    PersistFailed,
    PublishAck,
    Published,
    Ready,
    Record,
    Report,
    Send,
    ShardLost,
    ShardReconnected,
    SnapshotPart,
    SnapshotRequested,
    StateRequest,
    StoreFenced,
    VersionRecord,
)
from atoll.core.reasons import because
from atoll.core.types import NO_VERSION, Limits, RunConfig
from tests.core.conversation import SyncerTalk, Voice
from tests.core.machine import FRAGMENTS, LEARNERS, NONSENSE, STORY, WILD, Machine, look


class QuietSyncer(SyncerTalk):
    def _write(self, line: str) -> None:
        self.story.append(line)


class SyncerMachine(Machine):
    talk: QuietSyncer
    kind = QuietSyncer

    @initialize(
        fragments=st.integers(1, 3),
        every=st.integers(1, 4),
        quorum=st.integers(1, 2),
        gamma=st.sampled_from([0.0, 0.5, 0.9]),
        snapshots=st.sampled_from([0, 0, 2]),
        budget=st.sampled_from([None, None, 4]),
        learners=st.integers(1, 3),
        leases=st.sampled_from([0, 4, 9]),
    )
    def begin(self, fragments, every, quorum, gamma, snapshots, budget, learners, leases):
        self.config = RunConfig(
            fragments=fragments,
            every_steps=every,
            quorum=quorum,
            grace_margin=gamma,
            snapshot_every_merges=snapshots,
            budget_merges=budget,
            lease_samples=leases,
            leases_ahead=1,
            limits=Limits(initial_wait_s=5.0, max_wait_s=60.0, max_learners=3),
        )
        self.talk = self.kind(self.config)
        self.heard: list[Envelope] = []
        self.versions = dict.fromkeys(range(fragments), 0)
        self.trained = 0
        self.lines: dict[tuple[int, int], list[int]] = {}  # samples leased to every incarnation, in order
        self.starts: dict[tuple[int, int], list[int]] = {}  # where each of its leases begins in that
        self.merged: dict[int, tuple[int, int]] = {}  # by sample: who had it
        self.away: set[int] = set()  # fragments whose shard is lost
        self.kept: dict[int, VersionRecord] = {}  # of those, what it had made durable and nobody has heard of
        self.begun = True
        for learner in range(1, learners + 1):
            self.joins_all_the_way(self.talk.voice(learner))

    def happens(self, event: Any) -> list[Any]:
        if isinstance(event, MessageArrived):
            self.heard.append(event.envelope)
        try:
            done = self.talk.handle(self.now, event)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.talk.story[-STORY:]])) from error
        for effect in done:
            self._look_at(effect)
        return done

    def _look_at(self, effect: Any) -> None:
        if isinstance(effect, MergeRound):
            learners = [a.learner for a in effect.contributions]
            self.checked(len(learners) >= self.config.quorum, "a merge below the quorum")
            self.checked(len(set(learners)) == len(learners), "a learner twice in a merge")
            weights = [a.weight for a in effect.contributions]
            self.checked(all(math.isfinite(w) and w > 0 for w in weights), f"weights {weights}")
        elif isinstance(effect, Persist):
            keys = [e.record.key() for e in self.talk.awaited if isinstance(e, Persist)]
            self.checked(len(set(keys)) == len(keys), f"asked twice for {effect.record.key()}")
            if isinstance(effect.record, VersionRecord):
                p = effect.record.fragment
                self.checked(effect.record.version == self.versions[p] + 1, f"version {effect.record.version} of {p}")
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Published):
            body = effect.envelope.body
            self.checked(body.fragment not in self.away, f"{body} of a shard that is away")
            self.checked(body.version <= self.versions[body.fragment], f"{body} is not durable")
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Lease):
            self._leased((effect.envelope.learner, effect.envelope.incarnation), effect.envelope.body)

    def _leased(self, key: tuple[int, int], lease: Lease) -> None:
        record = self.talk.disk.get(("leases", 0))
        held = [h for h in record.holdings if (h.learner, h.incarnation) == key]  # type: ignore[union-attr]
        durable = dict(enumerate(held[0].intervals, held[0].first_lease)) if held else {}
        self.checked(durable.get(lease.number) == (lease.begin, lease.end), f"{lease} of {key} is not durable")
        line, starts = self.lines.setdefault(key, []), self.starts.setdefault(key, [])
        samples = list(range(lease.begin, lease.end))
        if lease.number < len(starts):
            begin = starts[lease.number]
            self.checked(line[begin : begin + len(samples)] == samples, f"lease {lease.number} of {key} is another one")
        else:
            self.checked(lease.number == len(starts), f"lease {lease.number} of {key} after {len(starts)}")
            starts.append(len(line))
            line += samples

    @invariant()
    def it_makes_sense(self):
        if not self.begun:
            return
        view = look(self.talk.core)
        for f in view.fragments:
            self.checked(f.version == self.versions[f.fragment], f"fragment {f.fragment} is at version {f.version}")
        self.checked(view.rounds_in_flight == sum(f.phase != "idle" for f in view.fragments), "rounds in flight")
        self.checked(view.merges == sum(self.versions.values()), "merges")
        self.checked(view.trained >= self.trained, "tokens trained have become fewer")
        self.trained = view.trained
        if view.stage != "superseded":
            busy = sum(f.phase == "merging" for f in view.fragments)
            open_ = sum(isinstance(e, MergeRound) or isinstance(e.record, VersionRecord) for e in self.talk.awaited)
            self.checked(open_ <= busy, f"{open_} merges and writes under way, {busy} fragments merging")

    def voice(self, learner: int) -> Voice:
        return self.talk.voices.get(learner) or self.talk.voice(learner)

    def delivers(self, learner: int, body: Any, **other: Any) -> None:
        self.happens(MessageArrived(self.voice(learner).envelope(body, **other)))

    # ------------------------------------------------------------------------------------------------ merges and disk

    @precondition(lambda self: any(isinstance(e, MergeRound) for e in self.talk.awaited))
    @rule(works=st.sampled_from([True, True, True, False]))
    def a_merge_ends(self, works):
        round_id = self.talk.take(MergeRound).round
        self.happens(MergeDone(round_id) if works else MergeFailed(round_id, "out of memory"))

    @precondition(lambda self: any(isinstance(e, Persist) for e in self.talk.awaited))
    @rule(which=st.integers(0, 5), works=st.sampled_from([True, True, True, False]))
    def a_write_ends(self, which, works):
        writes = [e for e in self.talk.awaited if isinstance(e, Persist)]
        self._end_write(writes[which % len(writes)], works)

    def _end_write(self, effect: Persist, works: bool = True) -> None:
        self.talk.awaited.remove(effect)
        record = effect.record
        if not works:
            self.happens(PersistFailed(record.key(), "no space left on device"))
            return
        self._write(record)
        self.happens(Persisted(record.key()))

    def _write(self, record: Record) -> None:
        self.talk._write_record(record)
        if isinstance(record, VersionRecord) and self.talk.core.view().stage != "superseded":
            self.versions[record.fragment] = record.version
            for a in record.contributions:
                key = (a.learner, a.incarnation)
                for sample in self.lines.get(key, [])[: a.consumed_samples]:
                    owner = self.merged.setdefault(sample, key)
                    self.checked(owner == key, f"sample {sample} is merged by {owner} and by {key}")

    @rule(chance=st.integers(0, 15), kept=st.booleans())
    def the_syncer_is_killed_and_starts_again(self, chance, kept):
        """Now and then. What was being written has reached the disk or has not."""
        if chance:
            return
        for effect in [e for e in self.talk.awaited if isinstance(e, Persist)] if kept else []:
            self._write(effect.record)
        for p in sorted(self.away):
            self._find_kept(p, self.talk.disk.get(("manifest", 0)))
        self.away.clear()
        before, self.talk = self.talk, self.talk.restarted(self.now)
        for learner, old in before.voices.items():
            voice = self.talk.voice(learner, old.incarnation, old.session + 1)
            voice.step, voice.trained, voice.received, voice.marks = old.step, old.trained, old.received, old.marks
            voice.leases, voice.taken = old.leases, old.taken
        self.now = 0.0
        self.trained = 0

    def _find_kept(self, p: int, manifest: object) -> None:
        """What a manifest does not name is of no run."""
        record = self.kept.pop(p, None)
        if record is not None and manifest is None:
            self._write(record)

    @rule(chance=st.integers(0, 3), parity=st.integers(0, 1), kept=st.booleans())
    def a_shard_is_lost(self, chance, parity, kept):
        """The even fragments or the odd ones. What it was writing has reached its disk or has not."""
        lost = tuple(p for p in self.versions if p % 2 == parity and p not in self.away)
        if chance or not lost:
            return
        for effect in list(self.talk.awaited):
            record = effect.record if isinstance(effect, Persist) else None
            if isinstance(effect, MergeRound) and effect.round.fragment in lost:
                self.talk.awaited.remove(effect)
            elif isinstance(record, VersionRecord) and record.fragment in lost:
                self.talk.awaited.remove(effect)
                if kept:
                    self.kept[record.fragment] = record
        self.away.update(lost)
        self.happens(ShardLost(lost, "connection reset by peer"))

    @rule(parity=st.integers(0, 1))
    def a_shard_is_back(self, parity):
        found = sorted(p for p in self.away if p % 2 == parity)
        if found:
            for p in found:
                self._find_kept(p, self.talk.core.state.manifest)
            self.away.difference_update(found)
            self.happens(ShardReconnected(tuple((p, self.versions[p]) for p in found)))

    @rule(chance=st.integers(0, 40))
    def another_syncer_owns_the_store(self, chance):
        if chance == 0:
            self.happens(StoreFenced(self.talk.epoch + 1))

    # ------------------------------------------------------------------------------------------------ members

    def hello_body(self, voice: Voice, training: bool) -> Hello:
        held = tuple(voice.received.values())
        config = self.config
        return Hello(
            config.run_id, config.fingerprint, held, voice.step, voice.trained, training and NO_VERSION not in held
        )

    def joins_all_the_way(self, voice: Voice) -> None:
        """As far as the disk lets it."""
        self.delivers(voice.id, self.hello_body(voice, False))
        for effect in [e for e in self.talk.awaited if isinstance(e, Persist)]:
            self._end_write(effect)
        self.acknowledges_all(voice)
        self.wants_leases(voice)
        for effect in [e for e in self.talk.awaited if isinstance(e, Persist)]:
            self._end_write(effect)
        self.delivers(voice.id, Ready(because("state-kept")))

    def wants_leases(self, voice: Voice) -> None:
        if self.config.lease_samples:
            self.delivers(voice.id, LeaseRequest(len(voice.leases), voice.taken))

    def acknowledges_all(self, voice: Voice) -> None:
        for p, version in list(voice.received.items()):
            self.delivers(voice.id, PublishAck(p, version))

    @rule(learner=LEARNERS, older=st.sampled_from([False, False, True]))
    def starts_again(self, learner, older):
        old = self.voice(learner)
        voice = self.talk.voice(learner, max(old.incarnation + (-1 if older else 1), 1), 1)
        self.joins_all_the_way(voice)

    @rule(learner=LEARNERS, training=st.booleans())
    def dials_again(self, learner, training):
        voice = self.voice(learner)
        voice.session += 1
        self.delivers(learner, self.hello_body(voice, training))

    @rule(learner=LEARNERS, training=st.booleans())
    def says_hello_once_more(self, learner, training):
        voice = self.voice(learner)
        self.delivers(learner, self.hello_body(voice, training))

    @rule(learner=LEARNERS, stale=st.booleans())
    def disconnected(self, learner, stale):
        voice = self.voice(learner)
        self.happens(LearnerDisconnected(learner, voice.incarnation, voice.session - stale, "reset"))

    @rule(learner=LEARNERS, chance=st.integers(0, 8))
    def leaves(self, learner, chance):
        if chance == 0:
            self.delivers(learner, Left("the operator said so"))

    # ------------------------------------------------------------------------------------------------ training

    @rule(learner=LEARNERS, steps=st.integers(1, 5), tokens=st.integers(0, 200))
    def reports(self, learner, steps, tokens):
        voice = self.voice(learner)
        voice.step += steps
        voice.trained += tokens
        self.takes(voice, steps)
        self.delivers(learner, Report(voice.step, voice.trained, 1.0, voice.taken))

    def takes(self, voice: Voice, samples: int) -> None:
        voice.taken = min(voice.taken + samples, sum(lease.end - lease.begin for lease in voice.leases))

    @rule(learner=LEARNERS)
    def asks_for_leases(self, learner):
        self.wants_leases(self.voice(learner))

    @rule(seconds=st.sampled_from([0.1, 1.0]), rounds=st.integers(1, 3))
    def some_good_seconds(self, seconds, rounds):
        """All learners train, contribute and acknowledge; merge thread and disk take no time."""
        for _ in range(rounds):
            self.now += seconds
            for voice in list(self.talk.voices.values()):
                voice.step, voice.trained = voice.step + 1, voice.trained + 10
                self.takes(voice, 3)
                self.wants_leases(voice)
                self.delivers(voice.id, Report(voice.step, voice.trained, seconds, voice.taken))
            self.everybody_answers()
            self.all_work_ends()
            for voice in list(self.talk.voices.values()):
                self.acknowledges_all(voice)

    def everybody_answers(self) -> None:
        for learner, voice in list(self.talk.voices.items()):
            for fragment in list(voice.pulls):
                self.delivers(learner, voice.contribution(fragment))

    def all_work_ends(self) -> None:
        while self.talk.awaited:
            effect = self.talk.awaited[0]
            if isinstance(effect, MergeRound):
                self.happens(MergeDone(self.talk.take(MergeRound).round))
            else:
                self._end_write(effect)

    @rule(learner=LEARNERS, fragment=FRAGMENTS)
    def contributes(self, learner, fragment):
        voice = self.voice(learner)
        if fragment in voice.pulls:
            self.delivers(learner, voice.contribution(fragment))

    @rule()
    def everybody_contributes(self):
        self.everybody_answers()

    @rule(learner=LEARNERS)
    def acknowledges(self, learner):
        self.acknowledges_all(self.voice(learner))

    # ------------------------------------------------------------------------------------------------ nonsense

    @rule(learner=LEARNERS, body=NONSENSE)
    def says_nonsense(self, learner, body):
        self.delivers(learner, body)

    @rule(learner=LEARNERS, fragment=FRAGMENTS, field=st.sampled_from(Contribution.__struct_fields__[1:6]), value=WILD)
    def contributes_nonsense(self, learner, fragment, field, value):
        voice = self.voice(learner)
        if fragment in voice.pulls:
            self.delivers(learner, structs.replace(voice.contribution(fragment), **{field: value}))

    @rule(learner=st.integers(-1, 5), run=st.sampled_from(["run", "other"]), print_=st.sampled_from([(), ("other",)]))
    def a_stranger_says_hello(self, learner, run, print_):
        body = Hello(run, print_, (NO_VERSION,) * self.config.fragments, 0, 0, False)
        self.happens(MessageArrived(Envelope(learner, 9, 1, 0, 1, 0, 0, body)))
        if learner in self.talk.voices and (run, print_) == ("run", ()):
            self.talk.voices[learner].incarnation = max(self.talk.voices[learner].incarnation, 9)
            self.talk.voices[learner].session = 1

    # ------------------------------------------------------------------------------------------------ the rest

    @rule(learner=LEARNERS, tried=st.lists(LEARNERS, max_size=2))
    def asks_for_state(self, learner, tried):
        self.delivers(learner, StateRequest(tuple(tried)))

    @rule(learner=LEARNERS, to=LEARNERS)
    def gives_state(self, learner, to):
        versions = tuple(self.versions.values())
        self.delivers(learner, OptimizerState(learner, to, self.voice(to).incarnation, 1, versions))

    @rule(learner=LEARNERS, lag=st.sampled_from([0, 0, 0, 1, -1]), outstanding=st.booleans(), bad=st.booleans())
    def saves_its_part(self, learner, lag, outstanding, bad):
        voice = self.voice(learner)
        rounds = tuple(voice.pulls.values()) if outstanding else ()
        snapshot = self.talk.core.state.marker + lag
        voice.marker = snapshot
        versions = tuple(voice.received.values())
        part = SnapshotPart(snapshot, voice.step, voice.trained, versions, rounds, "disk" if bad else None)
        self.delivers(learner, part)

    @rule()
    def everybody_saves_its_part(self):
        for voice in list(self.talk.voices.values()):
            voice.marker = self.talk.core.state.marker
            held = tuple(voice.received.values())
            self.delivers(voice.id, SnapshotPart(voice.marker, voice.step, voice.trained, held, ()))

    @rule(which=st.integers(0, 50))
    def a_message_arrives_again(self, which):
        if self.heard:
            self.happens(MessageArrived(self.heard[-1 - which % len(self.heard)]))

    @rule()
    def a_snapshot_is_wanted(self):
        self.happens(SnapshotRequested())

    @rule(chance=st.integers(0, 10))
    def the_end_is_wanted(self, chance):
        if chance == 0:
            self.happens(FinishRequested())
