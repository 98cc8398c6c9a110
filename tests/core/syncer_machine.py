"""State machine of a syncer: valid, stale, duplicate and hostile events in any order."""

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
from tests.core.harness import FakeLearner, SyncerHarness
from tests.core.machine import EXTREME, FRAGMENTS, INVALID_MESSAGES, LEARNERS, MAX_STORY_LINES, Machine, check_view


class QuietSyncer(SyncerHarness):
    def _write(self, line: str) -> None:
        self.story.append(line)


class SyncerMachine(Machine):
    harness: QuietSyncer
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
        self.harness = self.kind(self.config)
        self.received_envelopes: list[Envelope] = []
        self.versions = dict.fromkeys(range(fragments), 0)
        self.trained = 0
        self.leased: dict[tuple[int, int], list[int]] = {}  # samples leased to every incarnation, in order
        self.starts: dict[tuple[int, int], list[int]] = {}  # index of the first sample of each lease in `leased`
        self.merged: dict[int, tuple[int, int]] = {}  # incarnation that contributed each merged sample
        self.unavailable: set[int] = set()  # fragments whose shard is lost
        self.stored: dict[int, VersionRecord] = {}  # durable versions of lost shards that the syncer does not know of
        self.is_started = True
        for learner in range(1, learners + 1):
            self.joins_fully(self.harness.add_learner(learner))

    def handle(self, event: Any) -> list[Any]:
        if isinstance(event, MessageArrived):
            self.received_envelopes.append(event.envelope)
        try:
            done = self.harness.handle(self.now, event)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.harness.story[-MAX_STORY_LINES:]])) from error
        for effect in done:
            self._check_effect(effect)
        return done

    def _check_effect(self, effect: Any) -> None:
        if isinstance(effect, MergeRound):
            learners = [a.learner for a in effect.contributions]
            self.check(len(learners) >= self.config.quorum, "a merge below the quorum")
            self.check(len(set(learners)) == len(learners), "a learner twice in a merge")
            weights = [a.weight for a in effect.contributions]
            self.check(all(math.isfinite(w) and w > 0 for w in weights), f"weights {weights}")
        elif isinstance(effect, Persist):
            keys = [e.record.key() for e in self.harness.awaited if isinstance(e, Persist)]
            self.check(len(set(keys)) == len(keys), f"{effect.record.key()} is requested twice")
            if isinstance(effect.record, VersionRecord):
                p = effect.record.fragment
                self.check(effect.record.version == self.versions[p] + 1, f"version {effect.record.version} of {p}")
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Published):
            body = effect.envelope.body
            self.check(body.fragment not in self.unavailable, f"{body} of an unavailable shard")
            self.check(body.version <= self.versions[body.fragment], f"{body} is not durable")
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Lease):
            self._check_lease((effect.envelope.learner, effect.envelope.incarnation), effect.envelope.body)

    def _check_lease(self, key: tuple[int, int], lease: Lease) -> None:
        record = self.harness.disk.get(("leases", 0))
        holdings = [h for h in record.holdings if (h.learner, h.incarnation) == key]  # type: ignore[union-attr]
        durable = dict(enumerate(holdings[0].intervals, holdings[0].first_lease)) if holdings else {}
        self.check(durable.get(lease.number) == (lease.begin, lease.end), f"{lease} of {key} is not durable")
        leased, starts = self.leased.setdefault(key, []), self.starts.setdefault(key, [])
        samples = list(range(lease.begin, lease.end))
        if lease.number < len(starts):
            begin = starts[lease.number]
            self.check(
                leased[begin : begin + len(samples)] == samples, f"lease {lease.number} of {key} has other samples"
            )
        else:
            self.check(lease.number == len(starts), f"lease {lease.number} of {key} after {len(starts)}")
            starts.append(len(leased))
            leased += samples

    @invariant()
    def state_is_consistent(self):
        if not self.is_started:
            return
        view = check_view(self.harness.core)
        for f in view.fragments:
            self.check(f.version == self.versions[f.fragment], f"fragment {f.fragment} is at version {f.version}")
        self.check(view.rounds_in_flight == sum(f.phase != "idle" for f in view.fragments), "rounds in flight")
        self.check(view.merges == sum(self.versions.values()), "merges")
        self.check(view.trained >= self.trained, "tokens trained have become fewer")
        self.trained = view.trained
        if view.stage != "superseded":
            busy = sum(f.phase == "merging" for f in view.fragments)
            open_ = sum(isinstance(e, MergeRound) or isinstance(e.record, VersionRecord) for e in self.harness.awaited)
            self.check(open_ <= busy, f"{open_} merges and writes in progress, {busy} fragments merging")

    def fake(self, learner: int) -> FakeLearner:
        return self.harness.learners.get(learner) or self.harness.add_learner(learner)

    def delivers(self, learner: int, body: Any, **other: Any) -> None:
        self.handle(MessageArrived(self.fake(learner).envelope(body, **other)))

    # ------------------------------------------------------------------------------------------------ merges and disk

    @precondition(lambda self: any(isinstance(e, MergeRound) for e in self.harness.awaited))
    @rule(works=st.sampled_from([True, True, True, False]))
    def merge_ends(self, works):
        round_id = self.harness.take(MergeRound).round
        self.handle(MergeDone(round_id) if works else MergeFailed(round_id, "out of memory"))

    @precondition(lambda self: any(isinstance(e, Persist) for e in self.harness.awaited))
    @rule(which=st.integers(0, 5), works=st.sampled_from([True, True, True, False]))
    def write_ends(self, which, works):
        writes = [e for e in self.harness.awaited if isinstance(e, Persist)]
        self._end_write(writes[which % len(writes)], works)

    def _end_write(self, effect: Persist, works: bool = True) -> None:
        self.harness.awaited.remove(effect)
        record = effect.record
        if not works:
            self.handle(PersistFailed(record.key(), "no space left on device"))
            return
        self._write(record)
        self.handle(Persisted(record.key()))

    def _write(self, record: Record) -> None:
        self.harness._write_record(record)
        if isinstance(record, VersionRecord) and self.harness.core.view().stage != "superseded":
            self.versions[record.fragment] = record.version
            for a in record.contributions:
                key = (a.learner, a.incarnation)
                for sample in self.leased.get(key, [])[: a.consumed_samples]:
                    owner = self.merged.setdefault(sample, key)
                    self.check(owner == key, f"sample {sample} is merged by {owner} and by {key}")

    @rule(chance=st.integers(0, 15), stored=st.booleans())
    def syncer_is_killed_and_starts_again(self, chance, stored):
        """Kill the syncer sometimes. Pending writes have reached the disk or have not."""
        if chance:
            return
        for effect in [e for e in self.harness.awaited if isinstance(e, Persist)] if stored else []:
            self._write(effect.record)
        for p in sorted(self.unavailable):
            self._restore_version(p, self.harness.disk.get(("manifest", 0)))
        self.unavailable.clear()
        before, self.harness = self.harness, self.harness.restarted(self.now)
        for learner, old in before.learners.items():
            fake = self.harness.add_learner(learner, old.incarnation, old.session + 1)
            fake.step, fake.trained, fake.received, fake.merged_up_to = (
                old.step,
                old.trained,
                old.received,
                old.merged_up_to,
            )
            fake.leases, fake.consumed_samples = old.leases, old.consumed_samples
        self.now = 0.0
        self.trained = 0

    def _restore_version(self, p: int, manifest: object) -> None:
        """Restore a durable version of a shard, unless there is a manifest, which does not name it."""
        record = self.stored.pop(p, None)
        if record is not None and manifest is None:
            self._write(record)

    @rule(chance=st.integers(0, 3), parity=st.integers(0, 1), stored=st.booleans())
    def shard_is_lost(self, chance, parity, stored):
        """Lose the even or the odd fragments. Pending writes have reached the disk or have not."""
        lost = tuple(p for p in self.versions if p % 2 == parity and p not in self.unavailable)
        if chance or not lost:
            return
        for effect in list(self.harness.awaited):
            record = effect.record if isinstance(effect, Persist) else None
            if isinstance(effect, MergeRound) and effect.round.fragment in lost:
                self.harness.awaited.remove(effect)
            elif isinstance(record, VersionRecord) and record.fragment in lost:
                self.harness.awaited.remove(effect)
                if stored:
                    self.stored[record.fragment] = record
        self.unavailable.update(lost)
        self.handle(ShardLost(lost, "connection reset by peer"))

    @rule(parity=st.integers(0, 1))
    def shard_reconnects(self, parity):
        found = sorted(p for p in self.unavailable if p % 2 == parity)
        if found:
            for p in found:
                self._restore_version(p, self.harness.core.state.manifest)
            self.unavailable.difference_update(found)
            self.handle(ShardReconnected(tuple((p, self.versions[p]) for p in found)))

    @rule(chance=st.integers(0, 40))
    def another_syncer_owns_the_store(self, chance):
        if chance == 0:
            self.handle(StoreFenced(self.harness.epoch + 1))

    # ------------------------------------------------------------------------------------------------ members

    def hello_body(self, fake: FakeLearner, training: bool) -> Hello:
        received = tuple(fake.received.values())
        config = self.config
        return Hello(
            config.run_id,
            config.fingerprint,
            received,
            fake.step,
            fake.trained,
            training and NO_VERSION not in received,
        )

    def joins_fully(self, fake: FakeLearner) -> None:
        """Join, as far as writes succeed."""
        self.delivers(fake.id, self.hello_body(fake, False))
        for effect in [e for e in self.harness.awaited if isinstance(e, Persist)]:
            self._end_write(effect)
        self.acknowledges_all(fake)
        self.requests_leases(fake)
        for effect in [e for e in self.harness.awaited if isinstance(e, Persist)]:
            self._end_write(effect)
        self.delivers(fake.id, Ready(because("state-kept")))

    def requests_leases(self, fake: FakeLearner) -> None:
        if self.config.lease_samples:
            self.delivers(fake.id, LeaseRequest(len(fake.leases), fake.consumed_samples))

    def acknowledges_all(self, fake: FakeLearner) -> None:
        for p, version in list(fake.received.items()):
            self.delivers(fake.id, PublishAck(p, version))

    @rule(learner=LEARNERS, older=st.sampled_from([False, False, True]))
    def restarts(self, learner, older):
        old = self.fake(learner)
        fake = self.harness.add_learner(learner, max(old.incarnation + (-1 if older else 1), 1), 1)
        self.joins_fully(fake)

    @rule(learner=LEARNERS, training=st.booleans())
    def reconnects(self, learner, training):
        fake = self.fake(learner)
        fake.session += 1
        self.delivers(learner, self.hello_body(fake, training))

    @rule(learner=LEARNERS, training=st.booleans())
    def repeats_hello(self, learner, training):
        fake = self.fake(learner)
        self.delivers(learner, self.hello_body(fake, training))

    @rule(learner=LEARNERS, stale=st.booleans())
    def disconnected(self, learner, stale):
        fake = self.fake(learner)
        self.handle(LearnerDisconnected(learner, fake.incarnation, fake.session - stale, "reset"))

    @rule(learner=LEARNERS, chance=st.integers(0, 8))
    def leaves(self, learner, chance):
        if chance == 0:
            self.delivers(learner, Left("operator request"))

    # ------------------------------------------------------------------------------------------------ training

    @rule(learner=LEARNERS, steps=st.integers(1, 5), tokens=st.integers(0, 200))
    def reports(self, learner, steps, tokens):
        fake = self.fake(learner)
        fake.step += steps
        fake.trained += tokens
        self.takes(fake, steps)
        self.delivers(learner, Report(fake.step, fake.trained, 1.0, fake.consumed_samples))

    def takes(self, fake: FakeLearner, samples: int) -> None:
        fake.consumed_samples = min(
            fake.consumed_samples + samples, sum(lease.end - lease.begin for lease in fake.leases)
        )

    @rule(learner=LEARNERS)
    def sends_lease_request(self, learner):
        self.requests_leases(self.fake(learner))

    @rule(seconds=st.sampled_from([0.1, 1.0]), rounds=st.integers(1, 3))
    def undisturbed_seconds(self, seconds, rounds):
        """Make all learners train, contribute and acknowledge; merges and writes take no time."""
        for _ in range(rounds):
            self.now += seconds
            for fake in list(self.harness.learners.values()):
                fake.step, fake.trained = fake.step + 1, fake.trained + 10
                self.takes(fake, 3)
                self.requests_leases(fake)
                self.delivers(fake.id, Report(fake.step, fake.trained, seconds, fake.consumed_samples))
            self.all_learners_contribute()
            self.all_work_ends()
            for fake in list(self.harness.learners.values()):
                self.acknowledges_all(fake)

    def all_learners_contribute(self) -> None:
        for learner, fake in list(self.harness.learners.items()):
            for fragment in list(fake.pulls):
                self.delivers(learner, fake.contribution(fragment))

    def all_work_ends(self) -> None:
        while self.harness.awaited:
            effect = self.harness.awaited[0]
            if isinstance(effect, MergeRound):
                self.handle(MergeDone(self.harness.take(MergeRound).round))
            else:
                self._end_write(effect)

    @rule(learner=LEARNERS, fragment=FRAGMENTS)
    def contributes(self, learner, fragment):
        fake = self.fake(learner)
        if fragment in fake.pulls:
            self.delivers(learner, fake.contribution(fragment))

    @rule()
    def contributions_of_all(self):
        self.all_learners_contribute()

    @rule(learner=LEARNERS)
    def acknowledges(self, learner):
        self.acknowledges_all(self.fake(learner))

    # ------------------------------------------------------------------------------------------------ invalid messages

    @rule(learner=LEARNERS, body=INVALID_MESSAGES)
    def sends_invalid_message(self, learner, body):
        self.delivers(learner, body)

    @rule(
        learner=LEARNERS, fragment=FRAGMENTS, field=st.sampled_from(Contribution.__struct_fields__[1:6]), value=EXTREME
    )
    def contributes_invalid_counters(self, learner, fragment, field, value):
        fake = self.fake(learner)
        if fragment in fake.pulls:
            self.delivers(learner, structs.replace(fake.contribution(fragment), **{field: value}))

    @rule(
        learner=st.integers(-1, 5), run=st.sampled_from(["run", "other"]), fingerprint=st.sampled_from([(), ("other",)])
    )
    def unknown_learner_sends_hello(self, learner, run, fingerprint):
        body = Hello(run, fingerprint, (NO_VERSION,) * self.config.fragments, 0, 0, False)
        self.handle(MessageArrived(Envelope(learner, 9, 1, 0, 1, 0, 0, body)))
        if learner in self.harness.learners and (run, fingerprint) == ("run", ()):
            self.harness.learners[learner].incarnation = max(self.harness.learners[learner].incarnation, 9)
            self.harness.learners[learner].session = 1

    # ---------------------------------------------------------------------------------- state, snapshots, the end

    @rule(learner=LEARNERS, tried=st.lists(LEARNERS, max_size=2))
    def requests_state(self, learner, tried):
        self.delivers(learner, StateRequest(tuple(tried)))

    @rule(learner=LEARNERS, to=LEARNERS)
    def sends_state(self, learner, to):
        versions = tuple(self.versions.values())
        self.delivers(learner, OptimizerState(learner, to, self.fake(to).incarnation, 1, versions))

    @rule(learner=LEARNERS, lag=st.sampled_from([0, 0, 0, 1, -1]), outstanding=st.booleans(), bad=st.booleans())
    def saves_its_part(self, learner, lag, outstanding, bad):
        fake = self.fake(learner)
        rounds = tuple(fake.pulls.values()) if outstanding else ()
        snapshot = self.harness.core.state.marker + lag
        fake.marker = snapshot
        versions = tuple(fake.received.values())
        part = SnapshotPart(snapshot, fake.step, fake.trained, versions, rounds, "disk" if bad else None)
        self.delivers(learner, part)

    @rule()
    def all_learners_save_their_parts(self):
        for fake in list(self.harness.learners.values()):
            fake.marker = self.harness.core.state.marker
            received = tuple(fake.received.values())
            self.delivers(fake.id, SnapshotPart(fake.marker, fake.step, fake.trained, received, ()))

    @rule(which=st.integers(0, 50))
    def message_arrives_again(self, which):
        if self.received_envelopes:
            self.handle(MessageArrived(self.received_envelopes[-1 - which % len(self.received_envelopes)]))

    @rule()
    def snapshot_is_requested(self):
        self.handle(SnapshotRequested())

    @rule(chance=st.integers(0, 10))
    def finish_is_requested(self, chance):
        if chance == 0:
            self.handle(FinishRequested())
