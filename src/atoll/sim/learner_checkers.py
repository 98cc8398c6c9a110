"""Checkers of learners: token ledger, independent steps, joining, clocks, and leases of samples.

The lease checkers need a run with leases. Durable records show which samples were leased, durable versions show which
samples were merged, and the steps of a learner show which samples it consumed.
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
"""Learner and incarnation, from an `Actor` or from a record. Both compare equal."""


class LedgerChecker(Checker):
    """Compare three token counts: the steps of the learner, the tokens that the learner reports as settled in adoptions
    and contributions, and the durable versions of the syncer."""

    name = "ledger"
    invariant = "tokens trained = merged + pending + dropped with a reason, per fragment, at every moment"

    def setup(self) -> None:
        DurableRecords(self, on_durable=self._on_durable)
        self._trained: dict[ProcessKey, int] = {}
        self._merged: dict[tuple[ProcessKey, FragmentId], int] = {}  # merged tokens, as far as the learner knows
        self._dropped: dict[tuple[ProcessKey, FragmentId], int] = {}
        # Tokens in durable versions that the learner has not adopted yet.
        self._durable: dict[tuple[ProcessKey, FragmentId], list[tuple[Version, int]]] = {}
        self._known: dict[
            tuple[ProcessKey, FragmentId], int
        ] = {}  # tokens in durable versions that the learner has adopted
        self._copied: dict[tuple[ProcessKey, FragmentId], Contribution] = {}

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        actor = entry.actor
        self._trained[actor] = self._trained.get(actor, 0) + event.tokens

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, VersionRecord):
            for a in record.contributions:
                line = self._durable.setdefault(((a.learner, a.incarnation), record.fragment), [])
                line.append((record.version, a.tokens))

    @on("sent", Contribution)
    def _on_contribution(self, entry: Entry, envelope: Envelope, body: Contribution) -> None:
        actor = entry.actor
        key = (actor, body.round.fragment)
        subject = ("learner", envelope.learner)
        before = self._copied.get(key)
        if before is not None and before.round == body.round:
            if before != body:
                self.fail(entry, subject, f"two different answers to one pull of fragment {body.round.fragment}")
            return
        self._copied[key] = body
        settled = self._merged.get(key, 0) + self._dropped.get(key, 0)
        trained = self._trained.get(actor, 0)
        if (body.trained, body.tokens, body.dropped) != (trained, trained - settled, self._dropped.get(key, 0)):
            problem = (
                f"fragment {key[1]}: contributes {body.tokens} of {body.trained} tokens, "
                f"but {trained} were trained and {settled} are settled"
            )
            self.fail(entry, subject, problem)

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        actor = entry.actor
        key = (actor, effect.fragment)
        merged = self._merged[key] = self._merged.get(key, 0) + effect.merged_tokens
        dropped = self._dropped[key] = self._dropped.get(key, 0) + effect.dropped_tokens
        trained = self._trained.get(actor, 0)
        subject = ("learner", entry.actor.learner)
        if trained != merged + dropped + effect.pending_tokens or effect.pending_tokens < 0:
            problem = f"{trained} trained, {merged} merged, {dropped} dropped, {effect.pending_tokens} pending"
            self.fail(entry, subject, f"fragment {effect.fragment}: {problem}")
        if self.config.adopt == "carry" and dropped:
            self.fail(
                entry,
                subject,
                f"fragment {effect.fragment}: {dropped} tokens dropped, but adopt mode carry must not drop tokens",
            )
        unadopted = self._durable.get(key, [])
        durable = self._known.get(key, 0) + sum(tokens for version, tokens in unadopted if version <= effect.version)
        self._known[key] = durable
        self._durable[key] = [each for each in unadopted if each[0] > effect.version]
        if durable != merged:
            problem = f"{durable} tokens are in version {effect.version}, but the learner counts {merged} as merged"
            self.fail(entry, subject, f"fragment {effect.fragment}: {problem}")


class IndependenceChecker(Checker):
    name = "independence"
    invariant = (
        "the step times of a learner do not depend on syncer, peers or network, except in a pause or while it drains"
    )

    def setup(self) -> None:
        self._last: dict[Actor, float] = {}
        self._paused: dict[Actor, bool] = {}  # True: paused; False: resumed, but no step taken yet

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        self._last[entry.actor] = entry.at

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        """Compare the time between two steps with the step time. Any other time was spent waiting for others."""
        last = self._last.get(entry.actor)
        if not event.steps and entry.actor in self._paused:
            self._last[entry.actor] = entry.at  # still at the same boundary: the time since the last entry was a pause
            return
        self._last[entry.actor] = entry.at
        if last is None:
            self.fail(entry, ("learner", entry.actor.learner), "a step before the start of training")
            return
        waited = entry.at - last - event.steps * event.step_time_s
        if waited > 0.05 * event.steps * event.step_time_s + 0.01:
            self.fail(entry, ("learner", entry.actor.learner), f"{waited:.6g} s between two steps were not step time")
        if not self._paused.get(entry.actor, True):
            del self._paused[entry.actor]

    @on("events", LeaveRequested)
    def _on_leave_requested(self, entry: Entry, event: LeaveRequested) -> None:
        if event.drain:
            self._paused[entry.actor] = True

    @on("sent", PausedAck)
    def _on_paused_ack(self, entry: Entry, envelope: Envelope, body: PausedAck) -> None:
        if body.paused:
            self._paused[entry.actor] = True
        else:
            self._resume(entry)

    @on("arrived", Finish)
    def _on_finish(self, entry: Entry, envelope: Envelope, body: Finish) -> None:
        self._resume(entry)  # the end of the run ends a pause

    def _resume(self, entry: Entry) -> None:
        if entry.actor in self._paused and entry.actor in self._last:
            self._paused[entry.actor] = False
            self._last[entry.actor] = max(entry.at, self._last[entry.actor])


class RecoveryChecker(Checker):
    name = "recovery"
    invariant = (
        "a learner starts from all versions that were published at its welcome, and a peer sends state that is as new"
    )

    def setup(self) -> None:
        self._welcomed: dict[Actor, tuple[Version, ...]] = {}
        self._adopted: dict[Actor, dict[FragmentId, Version]] = {}
        self._requested: dict[tuple[Actor, LearnerId], tuple[Version, ...]] = {}

    @on("arrived", Welcome)
    def _on_welcome(self, entry: Entry, envelope: Envelope, body: Welcome) -> None:
        self._welcomed.setdefault(entry.actor, body.versions)

    @on("arrived", ProvideState)
    def _on_provide_state(self, entry: Entry, envelope: Envelope, body: ProvideState) -> None:
        self._requested[(entry.actor, body.target)] = body.versions

    @on("effects", AdoptFragment)
    def _on_adopt(self, entry: Entry, effect: AdoptFragment) -> None:
        self._adopted.setdefault(entry.actor, {})[effect.fragment] = effect.version

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        adopted = self._adopted.get(entry.actor, {})
        for p, version in zip(self.config.fragment_ids(), self._welcomed.get(entry.actor, ()), strict=False):
            if adopted.get(p, -1) < version:
                problem = (
                    f"training starts with version {adopted.get(p, -1)} of fragment {p}, but {version} was published"
                )
                self.fail(entry, ("learner", entry.actor.learner), problem)

    @on("sent", OptimizerState)
    def _on_optimizer_state(self, entry: Entry, envelope: Envelope, body: OptimizerState) -> None:
        requested = self._requested.get((entry.actor, body.target), ())
        if any(sent < required for sent, required in zip(body.versions, requested, strict=False)):
            problem = f"learner {body.source} sends optimizer state that is older than requested"
            self.fail(entry, ("learner", body.target), problem)


class ClockChecker(Checker):
    name = "clocks"
    invariant = "a message arrives after it was sent, and no process receives a tick that has not happened"

    def setup(self) -> None:
        self._ticks: dict[tuple[LearnerId, int], int] = {}

    @on("every")
    def _on_every(self, entry: Entry) -> None:
        """Check the ticks of an entry. This handler runs for every entry, so it avoids creating objects."""
        actor, tick, event = entry.actor, entry.tick, entry.event
        ticks = self._ticks
        if tick != ticks.get(actor, 0) + 1:
            self._fail(entry, f"{actor}: tick {tick} after {ticks.get(actor, 0)}")
        ticks[actor] = tick
        if type(event) is MessageArrived:
            envelope = event.envelope
            learner = actor.learner == SYNCER
            sender = (envelope.learner, envelope.incarnation) if learner else (SYNCER, envelope.epoch)
            if envelope.tick > ticks.get(sender, 0):
                problem = (
                    f"a message of tick {envelope.tick} from {Actor(*sender)}, which is at tick {ticks.get(sender)}"
                )
                self._fail(entry, problem)
        for effect in entry.effects:
            if type(effect) is Send and effect.envelope.tick != tick:
                self._fail(entry, f"sent with tick {effect.envelope.tick} in entry {tick}")

    def _fail(self, entry: Entry, problem: str) -> None:
        learner = entry.actor.learner
        self.fail(entry, ("run", 0) if learner == SYNCER else ("learner", learner), problem)


class StopChecker(Checker):
    name = "stopped"
    invariant = "a stopped learner takes no step and sends no contribution"

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
    """Compare the trained tokens of a draining learner with its durable and its dropped tokens."""

    name = "drained"
    invariant = (
        "a draining learner takes no more steps, and leaves when all its tokens are in versions, unless its time is up"
    )

    def setup(self) -> None:
        DurableRecords(self, on_durable=self._on_durable)
        self._trained: dict[ProcessKey, int] = {}
        self._settled: dict[tuple[ProcessKey, FragmentId], int] = {}  # durable, or dropped at an adoption
        self._leaving: dict[ProcessKey, bool] = {}  # True: drains; False: its time is up

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        actor = entry.actor
        self._trained[actor] = self._trained.get(actor, 0) + event.tokens
        if event.steps and actor in self._leaving:
            self.fail(entry, ("learner", actor[0]), "a step after its drain request")

    @on("events", LeaveRequested)
    def _on_leave_requested(self, entry: Entry, event: LeaveRequested) -> None:
        actor = entry.actor
        if event.drain:
            self._leaving.setdefault(actor, True)
        elif actor in self._leaving:
            self._leaving[actor] = False

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
        """Check the tokens of a drained learner. A stop by the run, an operator or a refusal is exempt."""
        actor = entry.actor
        if not self._leaving.pop(actor, False) or effect.reason.code not in ("learner-drained", "learner-left"):
            return
        trained = self._trained.get(actor, 0)
        for p in self.config.fragment_ids():
            settled = self._settled.get((actor, p), 0)
            if settled != trained:
                problem = f"fragment {p}: it left with {trained} tokens trained, but only {settled} settled"
                self.fail(entry, ("learner", actor[0]), problem)


class LeaseRecords:
    """Durable leases, and their samples in durable versions, for a checker that needs them.

    A run without leases has none.

    Args:
        on_leased: receives each durable lease: its holder and number.
        on_merged: receives the samples, from one count to another, that a version of an incarnation contains first.
        on_save: see `DurableRecords`.
        on_durable: see `DurableRecords`.
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
        self.leases_by_holder: dict[HolderKey, list[Interval]] = {}  # leases of each incarnation, by number
        self.merged_samples: dict[HolderKey, int] = {}  # samples in durable versions
        self._checker = checker
        self._on_leased = on_leased
        self._on_merged = on_merged
        self._forward_durable = on_durable
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
        self._forward_durable(entry, record)

    def _on_late(self, entry: Entry, record: Record) -> None:
        if isinstance(record, LeaseRecord):
            self._add(entry, record)

    def _add(self, entry: Entry | None, record: LeaseRecord) -> None:
        for holding in record.holdings:
            key = (holding.learner, holding.incarnation)
            leases = self.leases_by_holder.setdefault(key, [])
            for number, interval in enumerate(holding.intervals, holding.first_lease):
                if number < len(leases):
                    continue
                if number > len(leases):
                    problem = f"lease {number} of incarnation {key[1]} after {len(leases)} leases"
                    self._checker.fail(entry, ("learner", key[0]), problem)
                leases.append(interval)
                if self._on_leased is not None:
                    self._on_leased(entry, key, number)


class LeaseDurabilityChecker(Checker):
    name = "lease-durable"
    invariant = "a lease is durable before it is sent"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self)

    @on("sent", Lease)
    def _on_lease(self, entry: Entry, envelope: Envelope, body: Lease) -> None:
        leases = self._leases.leases_by_holder.get((envelope.learner, envelope.incarnation), [])
        if body.number >= len(leases) or leases[body.number] != (body.begin, body.end):
            problem = f"lease {body.number} of samples {body.begin} to {body.end} was sent, {len(leases)} are durable"
            self.fail(entry, ("learner", envelope.learner), problem)


class SingleLeaseChecker(Checker):
    name = "leased-once"
    invariant = "no sample is leased to two incarnations at the same time"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self, on_leased=self._on_leased, on_durable=self._on_durable)
        self._current: dict[int, int] = {}  # durable incarnation of each learner that has not left
        self._serial = 0  # serial of the newest members record
        # Leases with samples that are not merged, each with the offset of its first sample among those of its holder.
        self._open: dict[HolderKey, list[tuple[int, Interval]]] = {}

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner == SYNCER and restored is not None and restored.members is not None:
            self._update_members(restored.members)
        super().on_process_started(actor, restored)

    def _update_members(self, record: MembersRecord) -> None:
        """Update the members. An older record may become durable later: a restart may reveal the newer one first."""
        if record.serial > self._serial:
            self._serial = record.serial
            self._current = {i: inc for i, inc in record.incarnations if i not in record.left}

    def _on_durable(self, entry: Entry | None, record: Record) -> None:
        if isinstance(record, MembersRecord):
            self._update_members(record)

    def _on_leased(self, entry: Entry | None, key: HolderKey, number: int) -> None:
        begin, end = self._leases.leases_by_holder[key][number]
        for other, leases in self._open.items():
            if self._current.get(other[0]) != other[1]:
                continue
            merged = self._leases.merged_samples.get(other, 0)
            leases[:] = [(offset, lease) for offset, lease in leases if offset + lease[1] - lease[0] > merged]
            for offset, lease in leases:
                first = max(begin, lease[0] + max(0, merged - offset))
                if first < min(end, lease[1]):
                    problem = f"sample {first} is leased to learner {key[0]} while it is leased to learner {other[0]}"
                    self.fail(entry, ("learner", key[0]), f"{problem}, incarnations {key[1]} and {other[1]}")
        offset = sum(b - a for a, b in self._leases.leases_by_holder[key][:number])
        self._open.setdefault(key, []).append((offset, (begin, end)))


class MergedSamplesChecker(Checker):
    name = "samples-once"
    invariant = "no sample is merged twice, and only leased samples are merged"
    needs_leases = True

    def setup(self) -> None:
        self._leases = LeaseRecords(self, on_merged=self._on_merged)
        self._merged: list[Interval] = []  # merged samples, in order

    def _on_merged(
        self, entry: Entry | None, record: VersionRecord, key: HolderKey, before: int, consumed: int
    ) -> None:
        subject = ("learner", key[0])
        offset = 0
        for begin, end in self._leases.leases_by_holder.get(key, []):
            first, last = begin + max(0, before - offset), begin + min(end - begin, consumed - offset)
            offset += end - begin
            if first < last:
                self._add(entry, record, key, (first, last))
        if offset < consumed:
            problem = f"{consumed} samples of incarnation {key[1]} are merged, {offset} were leased to it"
            self.fail(entry, subject, problem)

    def _add(self, entry: Entry | None, record: VersionRecord, key: HolderKey, new: Interval) -> None:
        at = bisect_left(self._merged, new)
        for other in self._merged[max(0, at - 1) : at + 1]:
            if max(other[0], new[0]) < min(other[1], new[1]):
                problem = f"sample {max(other[0], new[0])} is merged again, into version {record.version}"
                self.fail(entry, ("fragment", record.fragment), f"{problem}, by learner {key[0]} incarnation {key[1]}")
        self._merged[max(0, at - 1) : at + 1] = join_intervals([*self._merged[max(0, at - 1) : at + 1], new])


class ReturnedSamplesChecker(Checker):
    name = "returned-first"
    invariant = "returned samples are leased again before new ones"
    needs_leases = True

    def setup(self) -> None:
        LeaseRecords(self, on_save=self._on_save)
        self._next = 0
        self._pool: set[Interval] = set()  # pool of the last record; empty after later returns

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        leases = restored.leases if restored is not None else None
        self._next = leases.next_sample if leases is not None else 0
        self._pool = set()

    @on("effects", LogReason, current=True)
    def _on_log_reason(self, entry: Entry, effect: LogReason) -> None:
        """Reset the pool after a return. Samples that were leased and returned at once were not passed over."""
        if effect.reason.code == "leases-returned":
            self._pool = set()

    def _on_save(self, entry: Entry, record: Record) -> None:
        if not isinstance(record, LeaseRecord):
            return
        passed_over = sorted(self._pool & set(record.pool))
        if record.next_sample > self._next and passed_over:
            problem = f"samples from {self._next} on were leased while sample {passed_over[0][0]} was in the pool"
            self.fail(entry, ("run", 0), problem)
        self._next, self._pool = record.next_sample, set(record.pool)


class LeaseOwnershipChecker(Checker):
    name = "lease-owned"
    invariant = "a learner trains only on samples that are leased to it, and reports how many it has consumed"
    needs_leases = True

    def setup(self) -> None:
        self._numbers: dict[Actor, int] = {}
        self._leased: dict[Actor, int] = {}
        self._consumed: dict[Actor, int] = {}
        self._copied: dict[tuple[Actor, int], Contribution] = {}

    @on("arrived", Lease)
    def _on_lease(self, entry: Entry, envelope: Envelope, body: Lease) -> None:
        """Count a lease, also one that the core drops because of a stale connection: it is durable and sent again."""
        if body.number == self._numbers.get(entry.actor, 0):
            self._numbers[entry.actor] = body.number + 1
            self._leased[entry.actor] = self._leased.get(entry.actor, 0) + body.end - body.begin

    @on("effects", StartTraining)
    def _on_start(self, entry: Entry, effect: StartTraining) -> None:
        if not self._leased.get(entry.actor):
            self.fail(entry, ("learner", entry.actor.learner), "training starts without a lease")

    @on("events", StepTaken)
    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        consumed = self._consumed[entry.actor] = self._consumed.get(entry.actor, 0) + event.new_samples
        leased = self._leased.get(entry.actor, 0)
        if consumed > leased or event.new_samples < 0:
            self.fail(entry, ("learner", entry.actor.learner), f"{consumed} samples consumed, {leased} were leased")

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

    def _compare(self, entry: Entry, reported: int) -> None:
        consumed = self._consumed.get(entry.actor, 0)
        if reported != consumed:
            self.fail(entry, ("learner", entry.actor.learner), f"{reported} samples reported, {consumed} consumed")


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
