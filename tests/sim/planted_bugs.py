"""Planted protocol bugs. Each is a small, plausible mistake with the names of the checkers that must find it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from atoll.core.learner.connection import Connection
from atoll.core.learner.core import LearnerComponents, LearnerCore
from atoll.core.learner.joining import Joining
from atoll.core.learner.leaving import Departure, LearnerShutdown
from atoll.core.learner.rounds import LearnerLeases, LearnerRounds
from atoll.core.learner.state import ContributionCopy, LearnerState
from atoll.core.ledger import HolderKey, LeaseLedger
from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    Envelope,
    Hello,
    Lease,
    LeaseRecord,
    MergeRound,
    OpenGrace,
    PausedAck,
    Published,
    Pull,
    RecordKey,
    RefuseContribution,
    SetPaused,
    ShardLost,
    ShardReconnected,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import ConnectionState, LearnerMode, MemberState, RoundPhase, RunStage
from atoll.core.syncer.controls import Controls
from atoll.core.syncer.core import SyncerComponents, SyncerCore
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.membership import Membership
from atoll.core.syncer.rounds import Delivery, Rounds
from atoll.core.syncer.shards import SyncerShards
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import Fragment, Member, RestoredState, SyncerState
from atoll.core.types import AcceptedContribution, Incarnation, Interval, LearnerId, RoundId, RunConfig


@dataclass(frozen=True)
class PlantedBug:
    name: str
    checkers: tuple[str, ...]  # any of these may find it first
    syncer: SyncerComponents = field(default_factory=SyncerComponents)
    learner: LearnerComponents = field(default_factory=LearnerComponents)
    first_seed: int = 0  # first seed of the search, which shows the bug
    syncer_core: type[SyncerCore] = SyncerCore
    learner_core: type[LearnerCore] = LearnerCore

    def new_syncer(self, config: RunConfig, epoch: int, restored: RestoredState | None) -> SyncerCore:
        return self.syncer_core(config, epoch, restored, self.syncer)

    def new_learner(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> LearnerCore:
        return self.learner_core(config, learner, incarnation, self.learner)


class Unchecked(SyncerCore):
    def check_invariants(self) -> None:
        """Do nothing, so that a checker must find the bug and not the core itself."""


class MergesBelowQuorum(Rounds):
    def _has_quorum(self, f: Fragment) -> bool:
        return len(f.contributions) >= 1


class AcceptsOldIncarnation(Membership):
    def _is_current(self, member: Member, envelope: Envelope) -> bool:
        return True

    def record_message(self, now: float, member: Member, envelope: Envelope) -> None:
        assert isinstance(self._rounds, MergesOldIncarnation)
        self._rounds.speaker = envelope.incarnation
        super().record_message(now, member, envelope)


class MergesOldIncarnation(Rounds):
    speaker = 0

    def _to_accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
        return structs.replace(super()._to_accepted(member, body), incarnation=self.speaker)

    def _refusal(self, f: Fragment, member: Member, body: Contribution) -> Reason | None:
        refusal = super()._refusal(f, member, body)
        if refusal is not None and refusal.code == "contribution-not-pulled":
            f.pulled[member.id] = self._state.now
            return None
        return refusal


class PublishesBeforeDurable(Rounds):
    def _save_version(self, f: Fragment) -> None:
        super()._save_version(f)
        f.version += 1
        self._delivery.publish(self._state.now, f)
        f.version -= 1


class ForgetsFailedWrite(Rounds):
    """Treats a failed write as a success."""

    def _on_version_not_saved(self, now: float, f: Fragment, why: str) -> None:
        self.on_version_saved(now, f)


class MergesTwiceAfterRestart(SyncerState):
    """Restores the version before the newest one."""

    def _restore(self, restored: RestoredState) -> None:
        super()._restore(restored)
        for f in self.fragments.values():
            if f.version > 0:
                f.version -= 1
                self.merges -= 1


class WelcomesBeforeDurable(Membership):
    def _save(self, now: float) -> None:
        super()._save(now)
        for member in list(self._state.members.values()):
            if member.state is MemberState.ADMITTING and member.hello is not None:
                self._state.transition_member(member, "admitted")
                self._welcome(now, member, member.hello)


class LosesRefusedContribution(LearnerRounds):
    """Treats a refused contribution as merged."""

    def on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        super().on_refused_contribution(now, envelope, body)
        copy = self._state.copies.pop(body.round.fragment, None)
        if copy is not None:
            self._state.settled[body.round.fragment] = copy.trained
            self._state.base_step[body.round.fragment] = copy.step


class ForgetsPullDeadline(Rounds):
    def on_pull_timer(self, now: float, fragment: int) -> None:
        """Do nothing: a lost contribution is never pulled again."""


class ForgetsGraceDeadline(Rounds):
    def on_grace_timer(self, now: float, fragment: int) -> None:
        """Do nothing: the grace window never closes."""


class GraceBeyondBound(Rounds):
    def _enter_grace(self, now: float, f: Fragment) -> None:
        super()._enter_grace(now, f)
        opened = self._state.effects[-1]
        assert isinstance(opened, OpenGrace)
        self._state.effects[-1] = structs.replace(opened, window_s=2 * opened.window_s)
        f.grace_until = now + 2 * opened.window_s
        self._state.arm_timer(f.grace_until, "grace", f.id)


class WaitsForLearnersThatMissedNothing(Rounds):
    """Waits in every round as if a learner had missed the last merge."""

    def _enter_grace(self, now: float, f: Fragment) -> None:
        f.missed_last_merge = dict(f.pulled)
        super()._enter_grace(now, f)

    def _expected_answer_s(self, now: float, f: Fragment, member: Member) -> float:
        return self._state.config.grace_margin * (self._state.config.every_steps * self._state.step_s()) / 2


class WeighsByStaleCounters(Rounds):
    """Uses the counters of the last report instead of those of the contribution."""

    def _to_accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
        steps = max(1, member.step - self._state.baseline(self._state.fragments[body.round.fragment], member))
        return structs.replace(super()._to_accepted(member, body), weight=body.tokens * body.tokens / steps)


class AdoptsOlderVersion(LearnerRounds):
    def record_arrival(self, body: Published) -> bool:
        if body.version < self._state.received.get(body.fragment, -1) and self._state.step:
            p = body.fragment
            pending = self._state.trained - self._state.settled[p]
            self._state.effects.append(AdoptFragment(p, body.version, self._state.config.adopt, False, 0, 0, pending))
        return super().record_arrival(body)


class MissesInFlight(Snapshots):
    def record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None:
        """Do nothing: contributions in flight at the cut are not recorded."""


class CutsAfterAdopting(LearnerRounds):
    """Saves its part at the end of the step boundary, including versions that were published after the cut."""

    def save_part(self) -> None:
        if self._state.arrivals:
            self.adopt_arrived()
        super().save_part()


class CountsDuplicates(Rounds):
    """Merges a duplicated contribution twice."""

    def __init__(self, state: SyncerState, *neighbours: Any) -> None:
        super().__init__(state, *neighbours)
        self.twice: dict[RoundId, AcceptedContribution] = {}

    def _is_duplicate(self, f: Fragment, member: Member, body: Contribution) -> bool:
        if super()._is_duplicate(f, member, body):
            self.twice[body.round] = f.contributions[member.id]
        return False

    def _seal(self, now: float, f: Fragment, reason: Reason) -> None:
        super()._seal(now, f, reason)
        merge = self._state.effects[-1]
        assert isinstance(merge, MergeRound)
        if merge.round in self.twice:
            self._state.effects[-1] = structs.replace(
                merge, contributions=(*merge.contributions, self.twice[merge.round])
            )


class WaitsForTheSyncer(LearnerCore):
    """Waits while its connection is down."""

    @property
    def training(self) -> bool:
        return super().training and self.state.link is ConnectionState.UP


class IgnoresMergedUpTo(LearnerRounds):
    """Treats merged steps as unmerged and contributes them again."""

    def _was_merged(self, p: int, copy: ContributionCopy | None) -> bool:
        return False


class CopiesAnewForOldRound(LearnerRounds):
    """Answers a repeated pull with a new copy, so it is unknown which copy was merged."""

    def on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        copy = self._state.copies.get(body.round.fragment)
        if copy is not None and copy.round == body.round:
            del self._state.copies[body.round.fragment]
        super().on_pull(now, envelope, body)


class EndsWithoutLastMerge(Rounds):
    def _open_final(self, now: float) -> None:
        for f in self._state.fragments.values():
            if f.phase is RoundPhase.IDLE:
                f.final = True
        self._shutdown.check_end(now)


class CrashedLearnerBlocksEnd(Shutdown):
    def check_end(self, now: float) -> None:
        if self._state.stage is RunStage.FINISHING and len(self._state.live) < len(self._state.members):
            return
        super().check_end(now)


class PullsForever(Rounds):
    def on_pull_timer(self, now: float, fragment: int) -> None:
        f = self._state.fragments[fragment]
        if f.phase is RoundPhase.PULLING and now >= f.next_pull_at:
            f.pull_attempts = 1
        super().on_pull_timer(now, fragment)


class StartsTooEarly(Joining):
    def on_welcome(self, now: float, envelope: Envelope, body: Welcome) -> None:
        super().on_welcome(now, envelope, structs.replace(body, versions=tuple(-1 for _ in body.versions)))


class SendsOldState(Joining):
    def send_state(self, now: float) -> None:
        self._state.state_transfers = {
            to: transfer._replace(
                request=structs.replace(transfer.request, versions=(-1,) * len(transfer.request.versions))
            )
            for to, transfer in self._state.state_transfers.items()
        }
        super().send_state(now)


class ContributesAfterStop(LearnerShutdown):
    """Answers a pull after the end of training."""

    def check_final(self) -> None:
        copies = dict(self._state.copies)
        super().check_final()
        if self._state.mode is LearnerMode.STOPPED:
            for copy in copies.values():
                self._rounds.send_copy(copy)


class TicksTwice(Connection):
    """Counts a message that it sends as an event, so its ticks are ahead of the tape."""

    def _send_hello(self, now: float) -> None:
        self._state.tick += 1
        super()._send_hello(now)
        self._state.tick -= 1


class StopsWithoutFinalVersions(LearnerShutdown):
    def has_final_versions(self) -> bool:
        return True


class NeverReconnects(Connection):
    """Never reconnects after a lost connection."""

    def _redial(self) -> None:
        """Do nothing."""


class WritesTwice(Rounds):
    """Requests the same write twice without waiting for the reply."""

    def _save_version(self, f: Fragment) -> None:
        super()._save_version(f)
        super()._save_version(f)

    def on_persisted(self, now: float, key: RecordKey) -> bool:
        return self._state.fragments[key.number].version < key.version and super().on_persisted(now, key)


class ContributesSettledTokens(LearnerRounds):
    """Contributes a few settled tokens again."""

    def _contribute(self, p: int, round_id: RoundId) -> None:
        self._state.settled[p] -= min(self._state.settled[p], 8)
        super()._contribute(p, round_id)


class LeasesBeforeDurable(DataLeases):
    def _save(self) -> None:
        super()._save()
        for (learner, incarnation), holder in self._state.leases.holders.items():
            member = self._state.members[learner]
            if self._may_lease(member, incarnation):
                self._send_leases(member, holder, max(holder.durable, holder.first), holder.count)


class ReturnsLeasesOfDisconnected(Membership):
    """Treats a lost connection as the end of the learner."""

    def _disconnect(self, now: float, member: Member, reason: Reason) -> None:
        key = (member.id, member.incarnation)
        super()._disconnect(now, member, reason)
        state = self._state
        if key in state.leases.holders and key not in state.lease_closing:
            state.log("learner", key[0], "leases-returned", state.leases.close(key), key[1])


class ReturnsLeasesBeforeDurable(DataLeases):
    def close(self, member: Member, serial: int) -> None:
        super().close(member, 0)
        self.settle()


class ReturnsSamplesOfOpenRound(DataLeases):
    def _is_contributing(self, key: HolderKey) -> bool:
        return False


class WelcomesLostIncarnation(Membership):
    """Lets a lost incarnation continue."""

    def _find_hello_refusal(self, envelope: Envelope, body: Hello, member: Member | None) -> Reason | None:
        refusal = super()._find_hello_refusal(envelope, body, member)
        if refusal is None or refusal.code != "refused-lost":
            return refusal
        assert member is not None
        member.state = MemberState.DISCONNECTED
        self._state.ledger.open(member.id, member.incarnation)
        return None


class NeverMarksLost(Membership):
    def _expire(self, now: float, member: Member, disconnected_s: float) -> None:
        """Do nothing: a lost learner keeps its leases forever."""


class ForgetsLostLearners(SyncerState):
    """Treats lost learners as left learners after a restart, so they get no reply."""

    def _restore(self, restored: RestoredState) -> None:
        members = structs.replace(restored.members, lost=()) if restored.members is not None else None
        super()._restore(replace(restored, members=members))


class ForgetsMergedSamples(SyncerState):
    """Restores only the last record of leases after a restart, without the merged samples of the versions."""

    def _restore_leases(self, record: LeaseRecord) -> None:
        self.leases_serial = record.serial
        self.leases.restore(record)
        for key in list(self.leases.holders):
            if key[0] not in self.members or self.members[key[0]].incarnation != key[1]:
                self.leases.close(key)


class NewSamplesFirst(SyncerState):
    class NewestFirstLedger(LeaseLedger):
        def _cut(self, samples: int) -> Interval:
            self.next += samples
            return self.next - samples, self.next

    def __init__(self, config: RunConfig, epoch: int, restored: RestoredState | None = None) -> None:
        super().__init__(config, epoch, restored)
        leases = self.NewestFirstLedger()
        leases.__dict__.update(self.leases.__dict__)
        self.leases = leases


class CountsLeasesTwice(LearnerLeases):
    """Counts a repeated lease as a new one."""

    def add(self, now: float, body: Lease) -> bool:
        if body.number < self._state.lease_count:
            self._state.leased_samples += body.end - body.begin
        return super().add(now, body)


class StartsWithoutLease(Joining):
    def check_ready(self, now: float) -> None:
        self._state.lease_samples = 0
        super().check_ready(now)
        self._state.lease_samples = self._state.config.lease_samples


class OpensWhilePaused(Rounds):
    def open_due_rounds(self, now: float) -> None:
        paused, self._state.paused = self._state.paused, False
        super().open_due_rounds(now)
        self._state.paused = paused


class StepsWhilePaused(Connection):
    def on_set_paused(self, now: float, envelope: Envelope, body: SetPaused) -> None:
        """Acknowledge a pause without pausing."""
        self._state.send(PausedAck(body.serial, body.paused))


class KeepsOldQuorum(Controls):
    def _change_quorum(self, now: float, quorum: int, who: str) -> None:
        super()._change_quorum(now, min(quorum, self._state.config.quorum), who)


class KeepsOldGrace(Rounds):
    def __init__(self, state: SyncerState, *neighbours: Any) -> None:
        super().__init__(state, *neighbours)
        self.initial_config = state.config

    def _enter_grace(self, now: float, f: Fragment) -> None:
        current, self._state.config = (
            self._state.config,
            replace(self._state.config, grace_margin=self.initial_config.grace_margin),
        )
        super()._enter_grace(now, f)
        self._state.config = current


class SendsRequestsOnce(Controls):
    """Sends the requests of operators only once, so a lost message is never repeated."""

    def on_timer(self, now: float, learner: int) -> None:
        """Do nothing."""


class SendsNoRequestAfterReconnect(Controls):
    def resend_request(self, now: float, member: Member) -> None:
        """Do nothing: a request that was sent before the disconnection counts as received."""


class KeepsRoundsOfLostShard(Rounds):
    """Continues a round after the return of its shard, with contributions that were lost."""

    def abandon(self, now: float, f: Fragment, reason: Reason, what: str = "") -> None:
        if reason.code != "shard-round-lost":
            super().abandon(now, f, reason, what)


class SendsFromUnavailableShard(Delivery):
    """Sends a version of an unavailable shard."""

    def deliver(self, now: float, member: Member, f: Fragment) -> None:
        unavailable, f.unavailable = f.unavailable, False
        super().deliver(now, member, f)
        f.unavailable = unavailable


class TreatsAllAsDurable(SyncerShards):
    """Treats all versions that a lost shard had merged as durable."""

    def _reconnect(self, now: float, f: Fragment, version: int) -> None:
        super()._reconnect(now, f, f.version + 1 if f.id in self._state.durability_unknown else version)


class TreatsAllAsLost(SyncerShards):
    """Treats all versions that a lost shard was writing as lost."""

    def on_back(self, now: float, event: ShardReconnected) -> None:
        versions = tuple((p, min(version, self._state.fragments[p].version)) for p, version in event.versions)
        super().on_back(now, ShardReconnected(versions))


class ForgetsUnackedOfLostShard(SyncerShards):
    def on_lost(self, now: float, event: ShardLost) -> None:
        super().on_lost(now, event)
        for member in self._state.members.values():
            for p in event.fragments:
                member.unacked.pop(p, None)


class WaitsForLostShard(Rounds):
    """Opens the fragment that is due first, also if its shard is unavailable."""

    def _oldest_idle_fragment(self) -> Fragment | None:
        idle = (
            f
            for f in self._state.by_opening.values()
            if f.phase is RoundPhase.IDLE and f.id not in self._state.retrying
        )
        return next(idle, None)


class KeepsSlotOfLostShard(SyncerState):
    def occupied_slots(self) -> int:
        return self.in_flight


class LostShardBlocksEnd(Shutdown):
    def skip_final(self, f: Fragment, why: str) -> None:
        if not f.unavailable:
            super().skip_final(f, why)


class LeavesBeforeMerge(Departure):
    """Treats sent contributions as merged."""

    def unmerged(self) -> tuple[int, ...]:
        return tuple(p for p in super().unmerged() if p not in self._state.copies)


class StepsAfterDrainRequest(LearnerState):
    @property
    def is_standing_by(self) -> bool:
        return self.paused


PLANTED_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "merge below quorum",
        ("quorum",),
        syncer=SyncerComponents(rounds=MergesBelowQuorum),
        syncer_core=Unchecked,
        first_seed=2,
    ),
    PlantedBug(
        "accept an old incarnation",
        ("current",),
        syncer=SyncerComponents(membership=AcceptsOldIncarnation, rounds=MergesOldIncarnation),
        first_seed=137,
    ),
    PlantedBug("publish before durable", ("durable-first",), syncer=SyncerComponents(rounds=PublishesBeforeDurable)),
    PlantedBug(
        "treat a failed write as done",
        ("versions", "durable-first"),
        syncer=SyncerComponents(rounds=ForgetsFailedWrite),
        first_seed=42,
    ),
    PlantedBug(
        "merge twice after a restart",
        ("versions", "current"),
        syncer=SyncerComponents(state=MergesTwiceAfterRestart),
        first_seed=14,
    ),
    PlantedBug(
        "welcome before the admission is durable",
        ("durable-first",),
        syncer=SyncerComponents(membership=WelcomesBeforeDurable),
    ),
    PlantedBug("lose a refused contribution", ("ledger",), learner=LearnerComponents(rounds=LosesRefusedContribution)),
    PlantedBug(
        "forget the pull deadline",
        ("rounds-end", "liveness"),
        syncer=SyncerComponents(rounds=ForgetsPullDeadline),
        first_seed=31,
    ),
    PlantedBug("forget the grace deadline", ("grace",), syncer=SyncerComponents(rounds=ForgetsGraceDeadline)),
    PlantedBug("grace beyond its bound", ("grace",), syncer=SyncerComponents(rounds=GraceBeyondBound)),
    PlantedBug(
        "wait for learners that missed no merge",
        ("grace",),
        syncer=SyncerComponents(rounds=WaitsForLearnersThatMissedNothing),
    ),
    PlantedBug("weight from stale counters", ("weights",), syncer=SyncerComponents(rounds=WeighsByStaleCounters)),
    PlantedBug(
        "adopt an older version", ("versions",), learner=LearnerComponents(rounds=AdoptsOlderVersion), first_seed=24
    ),
    PlantedBug(
        "snapshot misses an in-flight message", ("snapshot",), syncer=SyncerComponents(snapshots=MissesInFlight)
    ),
    PlantedBug("snapshot after adopting", ("snapshot",), learner=LearnerComponents(rounds=CutsAfterAdopting)),
    PlantedBug("merge a learner twice", ("merged-once",), syncer=SyncerComponents(rounds=CountsDuplicates)),
    PlantedBug("learner waits for the syncer", ("independence",), learner_core=WaitsForTheSyncer, first_seed=11),
    PlantedBug(
        "contribute merged work again", ("ledger", "merged-once"), learner=LearnerComponents(rounds=IgnoresMergedUpTo)
    ),
    PlantedBug("new copy for an old round", ("ledger",), learner=LearnerComponents(rounds=CopiesAnewForOldRound)),
    PlantedBug("end without the last merge", ("run-end",), syncer=SyncerComponents(rounds=EndsWithoutLastMerge)),
    PlantedBug(
        "a crashed learner blocks the end",
        ("liveness",),
        syncer=SyncerComponents(shutdown=CrashedLearnerBlocksEnd),
        first_seed=9,
    ),
    PlantedBug("pull without limit", ("bounds",), syncer=SyncerComponents(rounds=PullsForever), first_seed=35),
    PlantedBug(
        "start before all versions have arrived", ("recovery",), learner=LearnerComponents(joining=StartsTooEarly)
    ),
    PlantedBug(
        "send old optimizer state", ("recovery",), learner=LearnerComponents(joining=SendsOldState), first_seed=12
    ),
    PlantedBug("step after the stop", ("stopped",), learner=LearnerComponents(shutdown=ContributesAfterStop)),
    PlantedBug("message with a future tick", ("clocks",), learner=LearnerComponents(connection=TicksTwice)),
    PlantedBug(
        "stop without the final versions", ("run-end",), learner=LearnerComponents(shutdown=StopsWithoutFinalVersions)
    ),
    PlantedBug("never reconnect", ("liveness",), learner=LearnerComponents(connection=NeverReconnects), first_seed=1),
    PlantedBug("request a write twice", ("one-reply",), syncer=SyncerComponents(rounds=WritesTwice)),
    PlantedBug(
        "contribute settled tokens again", ("ledger",), learner=LearnerComponents(rounds=ContributesSettledTokens)
    ),
    PlantedBug(
        "lease before it is durable", ("lease-durable",), syncer=SyncerComponents(data_leases=LeasesBeforeDurable)
    ),
    PlantedBug(
        "return the leases of disconnected learners",
        ("leased-once",),
        syncer=SyncerComponents(membership=ReturnsLeasesOfDisconnected),
        first_seed=18,
    ),
    PlantedBug(
        "return leases too early",
        ("leased-once",),
        syncer=SyncerComponents(data_leases=ReturnsLeasesBeforeDurable),
        first_seed=20,
    ),
    PlantedBug(
        "return samples of an open round",
        ("samples-once",),
        syncer=SyncerComponents(data_leases=ReturnsSamplesOfOpenRound),
    ),
    PlantedBug(
        "welcome a lost incarnation",
        ("current",),
        syncer=SyncerComponents(membership=WelcomesLostIncarnation),
        first_seed=36,
    ),
    PlantedBug(
        "never mark learners as lost", ("liveness",), syncer=SyncerComponents(membership=NeverMarksLost), first_seed=22
    ),
    PlantedBug(
        "forget lost learners", ("liveness",), syncer=SyncerComponents(state=ForgetsLostLearners), first_seed=558
    ),
    PlantedBug(
        "forget merged samples", ("samples-once",), syncer=SyncerComponents(state=ForgetsMergedSamples), first_seed=36
    ),
    PlantedBug("lease new samples first", ("returned-first",), syncer=SyncerComponents(state=NewSamplesFirst)),
    PlantedBug(
        "count a lease twice", ("lease-owned",), learner=LearnerComponents(data_leases=CountsLeasesTwice), first_seed=19
    ),
    PlantedBug("start without a lease", ("lease-owned",), learner=LearnerComponents(joining=StartsWithoutLease)),
    PlantedBug(
        "open a round while paused", ("paused",), syncer=SyncerComponents(rounds=OpensWhilePaused), first_seed=22
    ),
    PlantedBug(
        "take steps while paused", ("paused",), learner=LearnerComponents(connection=StepsWhilePaused), first_seed=20
    ),
    PlantedBug("keep the old quorum", ("quorum",), syncer=SyncerComponents(controls=KeepsOldQuorum), first_seed=29),
    PlantedBug("keep the old grace margin", ("grace",), syncer=SyncerComponents(rounds=KeepsOldGrace), first_seed=50),
    PlantedBug(
        "send a request once", ("liveness",), syncer=SyncerComponents(controls=SendsRequestsOnce), first_seed=965
    ),
    PlantedBug(
        "send no request after a reconnection",
        ("liveness",),
        syncer=SyncerComponents(controls=SendsNoRequestAfterReconnect),
        first_seed=118,
    ),
    PlantedBug(
        "continue a lost round",
        ("shards",),
        syncer=SyncerComponents(rounds=KeepsRoundsOfLostShard),
        syncer_core=Unchecked,
        first_seed=5,
    ),
    PlantedBug(
        "send from an unavailable shard",
        ("shards",),
        syncer=SyncerComponents(delivery=SendsFromUnavailableShard),
        first_seed=36,
    ),
    PlantedBug(
        "treat lost versions as durable",
        ("durable-first", "versions"),
        syncer=SyncerComponents(shards=TreatsAllAsDurable),
        first_seed=13,
    ),
    PlantedBug(
        "treat durable versions as lost",
        ("versions", "current"),
        syncer=SyncerComponents(shards=TreatsAllAsLost),
        first_seed=8,
    ),
    PlantedBug(
        "forget unacked versions of a lost shard",
        ("liveness",),
        syncer=SyncerComponents(shards=ForgetsUnackedOfLostShard),
        first_seed=5,
    ),
    PlantedBug("wait for a lost shard", ("liveness",), syncer=SyncerComponents(rounds=WaitsForLostShard), first_seed=1),
    PlantedBug(
        "keep the slot of a lost shard",
        ("liveness",),
        syncer=SyncerComponents(state=KeepsSlotOfLostShard),
        first_seed=23,
    ),
    PlantedBug(
        "a lost shard blocks the end",
        ("liveness",),
        syncer=SyncerComponents(shutdown=LostShardBlocksEnd),
        first_seed=17,
    ),
    PlantedBug(
        "leave before the merge", ("drained",), learner=LearnerComponents(leaving=LeavesBeforeMerge), first_seed=27
    ),
    PlantedBug(
        "step after the drain request",
        ("drained",),
        learner=LearnerComponents(state=StepsAfterDrainRequest),
        first_seed=3,
    ),
)
