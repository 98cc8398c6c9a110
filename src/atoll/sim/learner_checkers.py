"""Checkers of learners: the ledger of tokens, independence of the step, joining, clocks, and leases of samples.

Those of leases watch only runs that have them. A sample's place is known from the records that the syncer made durable,
what became of it from the versions, and what a learner had from its own steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from atoll.core.ledger import HolderKey, join_intervals
from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    Envelope,
    Finish,
    Lease,
    LeaseRecord,
    LeaveRequested,
    LogReason,
    MembersRecord,
    MessageArrived,
    OptimizerState,
    PausedAck,
    ProvideState,
    Record,
    Report,
    Send,
    StartTraining,
    StepTaken,
    Stop,
    VersionRecord,
    Welcome,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, FragmentId, Interval, LearnerId, Version
from atoll.sim.checkers import Checker, DurableRecords, ignore_record, on
from atoll.tape.format import Actor, Entry

ProcessKey = tuple[LearnerId, int]
"""An `Actor`, or its learner and incarnation from a record: they are equal."""


class LedgerChecker(Checker):
    """Three books that must agree: what the learner was told (steps), what it says it settled (adoptions and
    contributions), and what the syncer made durable."""

    name = "ledger"
    invariant = "tokens trained = merged + pending + dropped with a reason, per fragment, at every moment"

    def setup(self) -> None:
        DurableRecords(self, on_durable=self._on_durable)
        self._trained: dict[ProcessKey, int] = {}
        self._merged: dict[tuple[ProcessKey, FragmentId], int] = {}  # as the learner knows it
        self._dropped: dict[tuple[ProcessKey, FragmentId], int] = {}
        self._durable: dict[
            tuple[ProcessKey, FragmentId], list[tuple[Version, int]]
        ] = {}  # not yet known to the learner
        self._known: dict[tuple[ProcessKey, FragmentId], int] = {}  # durable in a version that the learner has adopted
        self._copied: dict[tuple[ProcessKey, FragmentId], Contribution] = {}

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        who = entry.actor
        self._trained[who] = self._trained.get(who, 0) + event.tokens

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, VersionRecord):
            for a in record.contributions:
                line = self._durable.setdefault(((a.learner, a.incarnation), record.fragment), [])
                line.append((record.version, a.tokens))

    @on("sent", Contribution)
    def _on_contribution(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        who = entry.actor
        key = (who, body.round.fragment)
        subject = ("learner", envelope.learner)
        before = self._copied.get(key)
        if before is not None and before.round == body.round:
            if before != body:
                self.fail(entry, subject, f"two different answers to one pull of fragment {body.round.fragment}")
            return
        self._copied[key] = body
        settled = self._merged.get(key, 0) + self._dropped.get(key, 0)
        trained = self._trained.get(who, 0)
        if (body.trained, body.tokens, body.dropped) != (trained, trained - settled, self._dropped.get(key, 0)):
            what = (
                f"fragment {key[1]}: contributes {body.tokens} of {body.trained} tokens, "
                f"but {trained} were trained and {settled} are settled"
            )
            self.fail(entry, subject, what)

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        who = entry.actor
        key = (who, effect.fragment)
        merged = self._merged[key] = self._merged.get(key, 0) + effect.merged_tokens
        dropped = self._dropped[key] = self._dropped.get(key, 0) + effect.dropped_tokens
        trained = self._trained.get(who, 0)
        subject = ("learner", entry.actor.learner)
        if trained != merged + dropped + effect.pending_tokens or effect.pending_tokens < 0:
            what = f"{trained} trained, {merged} merged, {dropped} dropped, {effect.pending_tokens} pending"
            self.fail(entry, subject, f"fragment {effect.fragment}: {what}")
        if self.config.adopt == "carry" and dropped:
            self.fail(entry, subject, f"fragment {effect.fragment}: {dropped} tokens dropped, carry drops none")
        news = self._durable.get(key, [])
        durable = self._known.get(key, 0) + sum(tokens for version, tokens in news if version <= effect.version)
        self._known[key] = durable
        self._durable[key] = [line for line in news if line[0] > effect.version]
        if durable != merged:
            what = f"{durable} tokens of it are in version {effect.version}, the learner knows of {merged}"
            self.fail(entry, subject, f"fragment {effect.fragment}: {what}")


class IndependenceChecker(Checker):
    name = "independence"
    invariant = (
        "a learner's step times do not depend on syncer, peers or network, but for a pause that it was told of, or its"
        " own leaving"
    )

    def setup(self) -> None:
        self._last: dict[Actor, float] = {}
        self._paused: dict[Actor, bool] = {}  # told to stand still; False: told to go on, and no step since

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        self._last[entry.actor] = entry.at

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        """A learner's own time is its step; whatever else passes between two steps was spent waiting for others."""
        last = self._last.get(entry.actor)
        if not event.steps and entry.actor in self._paused:
            self._last[entry.actor] = entry.at  # at the same boundary once more: what passed was the pause
            return
        self._last[entry.actor] = entry.at
        if last is None:
            self.fail(entry, ("learner", entry.actor.learner), "a step before training was started")
            return
        waited = entry.at - last - event.steps * event.step_time_s
        if waited > 0.05 * event.steps * event.step_time_s + 0.01:
            self.fail(entry, ("learner", entry.actor.learner), f"{waited:.6g} s between two steps were not its own")
        if not self._paused.get(entry.actor, True):
            del self._paused[entry.actor]

    @on("events", LeaveRequested)
    def _on_leave_wanted(self, entry: Entry, event: LeaveRequested) -> None:
        if event.drain:
            self._paused[entry.actor] = True

    @on("sent", PausedAck)
    def _on_held(self, entry: Entry, envelope: Envelope, body: PausedAck) -> None:
        if body.paused:
            self._paused[entry.actor] = True
        else:
            self._resume(entry)

    @on("arrived", Finish)
    def _on_finish(self, entry: Entry, envelope: Envelope, body: Finish) -> None:
        self._resume(entry)  # at the end nobody stands still

    def _resume(self, entry: Entry) -> None:
        if entry.actor in self._paused and entry.actor in self._last:
            self._paused[entry.actor] = False
            self._last[entry.actor] = max(entry.at, self._last[entry.actor])


class RecoveryChecker(Checker):
    name = "recovery"
    invariant = "a learner starts from everything that was published when it was welcomed, a peer gives what is as new"

    def setup(self) -> None:
        self._welcomed: dict[Actor, tuple[Version, ...]] = {}
        self._adopted: dict[Actor, dict[FragmentId, Version]] = {}
        self._requested: dict[tuple[Actor, LearnerId], tuple[Version, ...]] = {}

    @on("arrived", Welcome)
    def _on_welcome(self, entry: Entry, envelope: Envelope, body: Welcome) -> None:
        self._welcomed.setdefault(entry.actor, body.versions)

    @on("arrived", ProvideState)
    def _on_wanted(self, entry: Entry, envelope: Envelope, body: ProvideState) -> None:
        self._requested[(entry.actor, body.target)] = body.versions

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._adopted.setdefault(entry.actor, {})[effect.fragment] = effect.version

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        held = self._adopted.get(entry.actor, {})
        for p, version in zip(self.config.fragment_ids(), self._welcomed.get(entry.actor, ()), strict=False):
            if held.get(p, -1) < version:
                what = f"training starts with version {held.get(p, -1)} of fragment {p}, {version} was published"
                self.fail(entry, ("learner", entry.actor.learner), what)

    @on("sent", OptimizerState)
    def _on_inner_state(self, entry: Entry, envelope: Envelope, body: OptimizerState) -> None:
        wanted = self._requested.get((entry.actor, body.target), ())
        if any(have < want for have, want in zip(body.versions, wanted, strict=False)):
            self.fail(
                entry, ("learner", body.target), f"learner {body.source} gives state older than what is published"
            )


class ClockChecker(Checker):
    name = "clocks"
    invariant = "a message arrives after it was sent, and nobody has seen what has not happened"

    def setup(self) -> None:
        self._ticks: dict[tuple[LearnerId, int], int] = {}

    @on("every")
    def _on_every(self, entry: Entry) -> None:
        """Seen for every entry, so it is plain: an actor is looked up as the tuple that it is."""
        actor, tick, event = entry.actor, entry.tick, entry.event
        ticks = self._ticks
        if tick != ticks.get(actor, 0) + 1:
            self._wrong(entry, f"{actor}: tick {tick} after {ticks.get(actor, 0)}")
        ticks[actor] = tick
        if type(event) is MessageArrived:
            envelope = event.envelope
            learner = actor.learner == SYNCER
            sender = (envelope.learner, envelope.incarnation) if learner else (SYNCER, envelope.epoch)
            if envelope.tick > ticks.get(sender, 0):
                what = f"a message of tick {envelope.tick} from {Actor(*sender)}, which is at {ticks.get(sender)}"
                self._wrong(entry, what)
        for effect in entry.effects:
            if type(effect) is Send and effect.envelope.tick != tick:
                self._wrong(entry, f"sent with tick {effect.envelope.tick} in entry {tick}")

    def _wrong(self, entry: Entry, what: str) -> None:
        learner = entry.actor.learner
        self.fail(entry, ("run", 0) if learner == SYNCER else ("learner", learner), what)


class StopChecker(Checker):
    name = "stopped"
    invariant = "after its stop a learner takes no step and contributes nothing"

    def setup(self) -> None:
        self._stopped: set[Actor] = set()

    @on("effects", Stop)
    def _on_stop(self, entry: Entry, effect: Stop) -> None:
        self._stopped.add(entry.actor)

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        if entry.actor in self._stopped:
            self.fail(entry, ("learner", entry.actor.learner), "a step after the stop")

    @on("sent", Contribution)
    def _on_contribution(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        if entry.actor in self._stopped:
            self.fail(entry, ("learner", entry.actor.learner), "a contribution after the stop")


class DrainChecker(Checker):
    """Its own books: steps that the learner was told of, tokens that the syncer made durable, and what was dropped."""

    name = "pushed"
    invariant = (
        "a learner that leaves after a push takes no more steps, and all of its tokens are in versions, unless "
        "its time was over"
    )

    def setup(self) -> None:
        DurableRecords(self, on_durable=self._on_durable)
        self._trained: dict[ProcessKey, int] = {}
        self._settled: dict[tuple[ProcessKey, FragmentId], int] = {}  # durable, or dropped in adopting
        self._leaving: dict[ProcessKey, bool] = {}  # it pushes; False: it was told that its time is over

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        who = entry.actor
        self._trained[who] = self._trained.get(who, 0) + event.tokens
        if event.steps and who in self._leaving:
            self.fail(entry, ("learner", who[0]), "a step after it was asked to leave")

    @on("events", LeaveRequested)
    def _on_leave_wanted(self, entry: Entry, event: LeaveRequested) -> None:
        who = entry.actor
        if event.drain:
            self._leaving.setdefault(who, True)
        elif who in self._leaving:
            self._leaving[who] = False

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, VersionRecord):
            for a in record.contributions:
                key = ((a.learner, a.incarnation), record.fragment)
                self._settled[key] = self._settled.get(key, 0) + a.tokens

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        if effect.dropped_tokens:
            key = (entry.actor, effect.fragment)
            self._settled[key] = self._settled.get(key, 0) + effect.dropped_tokens

    @on("effects", Stop)
    def _on_stop(self, entry: Entry, effect: Stop) -> None:
        """The end of the run, an operator and a syncer that refuses it may take it out before."""
        who = entry.actor
        if not self._leaving.pop(who, False) or effect.reason.code not in ("learner-drained", "learner-left"):
            return
        trained = self._trained.get(who, 0)
        for p in self.config.fragment_ids():
            settled = self._settled.get((who, p), 0)
            if settled != trained:
                what = f"fragment {p}: it leaves with {trained} tokens trained, and {settled} of them settled"
                self.fail(entry, ("learner", who[0]), what)


class LeaseRecords:
    """Durable leases, and which of their samples are in durable versions, for a checker that needs them.

    `on_leased` gets a lease that is durable, `on_merged` the samples from one count to another of an incarnation that
    are in a version for the first time. The others are those of `DurableRecords`. A run without leases has none.
    """

    def __init__(
        self,
        checker: Checker,
        *,
        on_leased: Callable[[Entry | None, HolderKey, int], None] | None = None,
        on_merged: Callable[[Entry | None, VersionRecord, HolderKey, int, int], None] | None = None,
        on_save: Callable[[Entry, Record], None] = ignore_record,
        on_durable: Callable[[Entry | None, Record], None] = ignore_record,
    ) -> None:
        self.leases_by_holder: dict[HolderKey, list[Interval]] = {}  # the leases of every incarnation, by number
        self.merged_samples: dict[HolderKey, int] = {}  # samples of that line that are in a durable version
        self._checker = checker
        self._on_leased = on_leased
        self._on_merged = on_merged
        self._on_durable_too = on_durable
        if checker.config.lease_samples:
            DurableRecords(checker, on_save=on_save, on_durable=self._on_durable, on_late=self._on_late)
            checker.start_handlers.append(self._on_start)

    def _on_start(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner == SYNCER and restored is not None and restored.leases is not None:
            self._add(None, restored.leases)

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, LeaseRecord):
            self._add(entry, record)
        elif isinstance(record, VersionRecord):
            for a in record.contributions:
                key = (a.learner, a.incarnation)
                before = self.merged_samples.get(key, 0)
                if a.consumed_samples > before:
                    self.merged_samples[key] = a.consumed_samples
                    if self._on_merged is not None:
                        self._on_merged(entry, record, key, before, a.consumed_samples)
        self._on_durable_too(entry, record)

    def _on_late(self, entry: Entry, record: Record) -> None:
        if isinstance(record, LeaseRecord):
            self._add(entry, record)

    def _add(self, entry: Entry | None, record: LeaseRecord) -> None:
        for holding in record.holdings:
            key = (holding.learner, holding.incarnation)
            line = self.leases_by_holder.setdefault(key, [])
            for place, interval in enumerate(holding.intervals, holding.first_lease):
                if place < len(line):
                    continue
                if place > len(line):
                    what = f"lease {place} of incarnation {key[1]} after {len(line)}"
                    self._checker.fail(entry, ("learner", key[0]), what)
                line.append(interval)
                if self._on_leased is not None:
                    self._on_leased(entry, key, place)


class LeaseDurabilityChecker(Checker):
    name = "lease-durable"
    invariant = "a lease is durable before it is sent"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self)

    @on("sent", Lease)
    def _on_lease(self, entry: Entry, envelope: Envelope, body: Lease) -> None:
        line = self._leases.leases_by_holder.get((envelope.learner, envelope.incarnation), [])
        if body.number >= len(line) or line[body.number] != (body.begin, body.end):
            what = f"samples {body.begin} to {body.end} were leased as number {body.number}, durable are {len(line)}"
            self.fail(entry, ("learner", envelope.learner), what)


class SingleLeaseChecker(Checker):
    name = "leased-once"
    invariant = "no sample is leased to two incarnations at the same time"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self, on_leased=self._on_leased, on_durable=self._on_durable)
        self._current: dict[int, int] = {}  # durable: incarnation of everybody who has not left
        self._serial = 0  # of the record that said so
        self._open: dict[
            HolderKey, list[tuple[int, Interval]]
        ] = {}  # not merged to their end, with their place in the line

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner == SYNCER and restored is not None and restored.members is not None:
            self._admitted(restored.members)
        super().on_process_started(actor, restored)

    def _admitted(self, record: MembersRecord) -> None:
        """Of an older one it may be heard later: that it was written shows when a syncer finds what followed it."""
        if record.serial > self._serial:
            self._serial = record.serial
            self._current = {i: inc for i, inc in record.incarnations if i not in record.left}

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._admitted(record)

    def _on_leased(self, entry: Entry | None, key: HolderKey, number: int) -> None:
        begin, end = self._leases.leases_by_holder[key][number]
        for other, leases in self._open.items():
            if self._current.get(other[0]) != other[1]:
                continue
            merged = self._leases.merged_samples.get(other, 0)
            leases[:] = [(place, lease) for place, lease in leases if place + lease[1] - lease[0] > merged]
            for place, lease in leases:
                first = max(begin, lease[0] + max(0, merged - place))
                if first < min(end, lease[1]):
                    what = f"sample {first} is leased to learner {key[0]} while learner {other[0]} has it"
                    self.fail(entry, ("learner", key[0]), f"{what}, incarnations {key[1]} and {other[1]}")
        place = sum(b - a for a, b in self._leases.leases_by_holder[key][:number])
        self._open.setdefault(key, []).append((place, (begin, end)))


class MergedSamplesChecker(Checker):
    name = "samples-once"
    invariant = "no sample is merged twice, and none that was not leased"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self, on_merged=self._on_merged)
        self._in: list[Interval] = []  # merged, in order

    def _on_merged(self, entry: Entry | None, record: VersionRecord, key: HolderKey, before: int, taken: int) -> None:
        subject = ("learner", key[0])
        place = 0
        for begin, end in self._leases.leases_by_holder.get(key, []):
            first, last = begin + max(0, before - place), begin + min(end - begin, taken - place)
            place += end - begin
            if first < last:
                self._add(entry, record, key, (first, last))
        if place < taken:
            self.fail(entry, subject, f"{taken} samples of incarnation {key[1]} are merged, {place} were leased to it")

    def _add(self, entry: Entry | None, record: VersionRecord, key: HolderKey, new: Interval) -> None:
        at = bisect_left(self._in, new)
        for other in self._in[max(0, at - 1) : at + 1]:
            if max(other[0], new[0]) < min(other[1], new[1]):
                what = f"sample {max(other[0], new[0])} is merged again, into version {record.version}"
                self.fail(entry, ("fragment", record.fragment), f"{what}, by learner {key[0]} incarnation {key[1]}")
        self._in[max(0, at - 1) : at + 1] = join_intervals([*self._in[max(0, at - 1) : at + 1], new])


class ReturnedSamplesChecker(Checker):
    name = "returned-first"
    invariant = "returned samples are leased again before new ones"
    needs_leases = True

    def setup(self) -> None:
        LeaseRecords(self, on_save=self._on_save)
        self._next = 0
        self._pool: set[Interval] = set()  # of the last record, if nothing was returned since

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        found = restored.leases if restored is not None else None
        self._next = found.next_sample if found is not None else 0
        self._pool = set()

    @on("effects", LogReason, current=True)
    def _on_say(self, entry: Entry, effect: LogReason) -> None:
        """What was leased from the pool and came back at once must not look as if it had been passed over."""
        if effect.reason.code == "leases-returned":
            self._pool = set()

    def _on_save(self, entry: Entry, record: Record) -> None:
        if not isinstance(record, LeaseRecord):
            return
        passed_over = sorted(self._pool & set(record.pool))
        if record.next_sample > self._next and passed_over:
            what = f"samples from {self._next} on were leased while {passed_over[0][0]} was waiting to be leased again"
            self.fail(entry, ("run", 0), what)
        self._next, self._pool = record.next_sample, set(record.pool)


class LeaseOwnershipChecker(Checker):
    name = "lease-held"
    invariant = "a learner trains on nothing but what was leased to it, and says how far it has come"
    needs_leases = True

    def setup(self) -> None:
        self._numbers: dict[Actor, int] = {}
        self._leased: dict[Actor, int] = {}
        self._taken: dict[Actor, int] = {}
        self._copied: dict[tuple[Actor, int], Contribution] = {}

    @on("arrived", Lease)
    def _on_lease(self, entry: Entry, envelope: Envelope, body: Lease) -> None:
        """Also one that the core drops because of its link: it is as durable, and comes again."""
        if body.number == self._numbers.get(entry.actor, 0):
            self._numbers[entry.actor] = body.number + 1
            self._leased[entry.actor] = self._leased.get(entry.actor, 0) + body.end - body.begin

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        if not self._leased.get(entry.actor):
            self.fail(entry, ("learner", entry.actor.learner), "training starts without a lease")

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        taken = self._taken[entry.actor] = self._taken.get(entry.actor, 0) + event.new_samples
        held = self._leased.get(entry.actor, 0)
        if taken > held or event.new_samples < 0:
            self.fail(entry, ("learner", entry.actor.learner), f"{taken} samples taken, {held} were leased")

    @on("sent", Report)
    def _on_report(self, entry: Entry, envelope: Envelope, body: Report) -> None:
        self._compare(entry, body.consumed_samples)

    @on("sent", Contribution)
    def _on_contribution(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        key = (entry.actor, body.round.fragment)
        before = self._copied.get(key)
        if before is None or before.round != body.round:
            self._copied[key] = body
            self._compare(entry, body.consumed_samples)

    def _compare(self, entry: Entry, told: int) -> None:
        taken = self._taken.get(entry.actor, 0)
        if told != taken:
            self.fail(entry, ("learner", entry.actor.learner), f"tells of {told} samples, and has taken {taken}")


LEARNER_CHECKERS: tuple[type[Checker], ...] = (
    LedgerChecker,
    IndependenceChecker,
    RecoveryChecker,
    ClockChecker,
    StopChecker,
    DrainChecker,
)
LEASE_CHECKERS: tuple[type[Checker], ...] = (
    LeaseDurabilityChecker,
    SingleLeaseChecker,
    MergedSamplesChecker,
    ReturnedSamplesChecker,
    LeaseOwnershipChecker,
)
