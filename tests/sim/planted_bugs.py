"""Protocol bugs, planted one at a time. Each is a small, plausible mistake and names the checker that must find it."""

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
    checkers: tuple[str, ...]  # any of these may be the first to see it
    syncer: SyncerComponents = field(default_factory=SyncerComponents)
    learner: LearnerComponents = field(default_factory=LearnerComponents)
    first_seed: int = 0  # where the search starts: a seed that shows the bug
    syncer_core: type[SyncerCore] = SyncerCore
    learner_core: type[LearnerCore] = LearnerCore

    def new_syncer(self, config: RunConfig, epoch: int, restored: RestoredState | None) -> SyncerCore:
        return self.syncer_core(config, epoch, restored, self.syncer)

    def new_learner(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> LearnerCore:
        return self.learner_core(config, learner, incarnation, self.learner)


class Unchecked(SyncerCore):
    def check_invariants(self) -> None:
        """Switched off: the observer must find it, not the core's own self-test."""


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

    def _accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
        return structs.replace(super()._accepted(member, body), incarnation=self.speaker)

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
    """A full disk is taken for a success."""

    def _on_version_not_saved(self, now: float, f: Fragment, why: str) -> None:
        self.on_version_saved(now, f)


class MergesTwiceAfterRestart(SyncerState):
    """Reads the last but one version of its directory."""

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
    """Takes a refused contribution for settled."""

    def on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        super().on_refused_contribution(now, envelope, body)
        copy = self._state.copies.pop(body.round.fragment, None)
        if copy is not None:
            self._state.settled[body.round.fragment] = copy.trained
            self._state.base_step[body.round.fragment] = copy.step


class ForgetsPullDeadline(Rounds):
    def on_pull_timer(self, now: float, fragment: int) -> None:
        """A lost answer is waited for until the end of time."""


class ForgetsGraceDeadline(Rounds):
    def on_grace_timer(self, now: float, fragment: int) -> None:
        """The window never closes by itself."""


class GraceBeyondBound(Rounds):
    def _enter_grace(self, now: float, f: Fragment) -> None:
        super()._enter_grace(now, f)
        opened = self._state.effects[-1]
        assert isinstance(opened, OpenGrace)
        self._state.effects[-1] = structs.replace(opened, window_s=2 * opened.window_s)
        f.grace_until = now + 2 * opened.window_s
        self._state.arm_timer(f.grace_until, "grace", f.id)


class WaitsForWhoMissedNothing(Rounds):
    """Every round waits as long as it may, as if somebody had missed the one before."""

    def _enter_grace(self, now: float, f: Fragment) -> None:
        f.missed_last_merge = dict(f.pulled)
        super()._enter_grace(now, f)

    def _expected_answer_s(self, now: float, f: Fragment, member: Member) -> float:
        return self._state.config.grace_margin * (self._state.config.every_steps * self._state.step_s()) / 2


class WeighsByStaleCounters(Rounds):
    """Uses what the learner last reported instead of what the contribution says."""

    def _accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
        steps = max(1, member.step - self._state.baseline(self._state.fragments[body.round.fragment], member))
        return structs.replace(super()._accepted(member, body), weight=body.tokens * body.tokens / steps)


class AdoptsOlderVersion(LearnerRounds):
    def record_arrival(self, body: Published) -> bool:
        if body.version < self._state.received.get(body.fragment, -1) and self._state.step:
            p = body.fragment
            pending = self._state.trained - self._state.settled[p]
            self._state.effects.append(AdoptFragment(p, body.version, self._state.config.adopt, False, 0, 0, pending))
        return super().record_arrival(body)


class MissesInFlight(Snapshots):
    def record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None:
        """What is under way at the cut is not written down."""


class CutsAfterAdopting(LearnerRounds):
    """Saves its part at the end of the step boundary: what was published after the cut is already in it."""

    def save_part(self) -> None:
        if self._state.arrivals:
            self.adopt_arrived()
        super().save_part()


class CountsDuplicates(Rounds):
    """A contribution that arrives twice is merged twice: a list where a mapping belongs."""

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
    """Stands still while its link is down."""

    @property
    def training(self) -> bool:
        return super().training and self.state.link is ConnectionState.UP


class IgnoresItsMark(LearnerRounds):
    """Takes merged work for unmerged and sends it once more."""

    def _was_merged(self, p: int, copy: ContributionCopy | None) -> bool:
        return False


class CopiesAnewForOldRound(LearnerRounds):
    """Answers a repeated pull with a new copy: nobody can tell which one was merged."""

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


class DeadLearnerBlocksEnd(Shutdown):
    def check_end(self, now: float) -> None:
        if self._state.stage is RunStage.FINISHING and len(self._state.live) < len(self._state.members):
            return
        super().check_end(now)


class AsksForEver(Rounds):
    def on_pull_timer(self, now: float, fragment: int) -> None:
        f = self._state.fragments[fragment]
        if f.phase is RoundPhase.PULLING and now >= f.next_pull_at:
            f.pull_attempts = 1
        super().on_pull_timer(now, fragment)


class StartsTooEarly(Joining):
    def on_welcome(self, now: float, envelope: Envelope, body: Welcome) -> None:
        super().on_welcome(now, envelope, structs.replace(body, versions=tuple(-1 for _ in body.versions)))


class GivesOldState(Joining):
    def send_state(self, now: float) -> None:
        self._state.state_transfers = {
            to: g._replace(wanted=structs.replace(g.wanted, versions=tuple(-1 for _ in g.wanted.versions)))
            for to, g in self._state.state_transfers.items()
        }
        super().send_state(now)


class ContributesAfterStop(LearnerShutdown):
    """Answers a last pull although its training has ended."""

    def check_final(self) -> None:
        copies = dict(self._state.copies)
        super().check_final()
        if self._state.mode is LearnerMode.STOPPED:
            for copy in copies.values():
                self._rounds.send_copy(copy)


class TicksTwice(Connection):
    """Counts a message that it sends as an event of its own: clocks run ahead of the tape."""

    def _greet(self, now: float) -> None:
        self._state.tick += 1
        super()._greet(now)
        self._state.tick -= 1


class StopsWithoutFinalVersions(LearnerShutdown):
    def has_final_versions(self) -> bool:
        return True


class NeverDialsAgain(Connection):
    """Gives a link up and never dials again."""

    def _redial(self) -> None:
        """Forgotten."""


class AsksTheDiskTwice(Rounds):
    """Asks the disk again without waiting for its answer."""

    def _save_version(self, f: Fragment) -> None:
        super()._save_version(f)
        super()._save_version(f)

    def on_persisted(self, now: float, key: RecordKey) -> bool:
        return self._state.fragments[key.number].version < key.version and super().on_persisted(now, key)


class ContributesSettledTokens(LearnerRounds):
    """Off by a few tokens."""

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


class ReturnsLeasesOfTheAbsent(Membership):
    """Takes a broken link for the end of its learner."""

    def _gone(self, now: float, member: Member, reason: Reason) -> None:
        key = (member.id, member.incarnation)
        super()._gone(now, member, reason)
        state = self._state
        if key in state.leases.holders and key not in state.lease_closing:
            state.log("learner", key[0], "leases-returned", state.leases.close(key), key[1])


class ReturnsLeasesBeforeTheEndIsDurable(DataLeases):
    def close(self, member: Member, serial: int) -> None:
        super().close(member, 0)
        self.settle()


class ReturnsWhatARoundHolds(DataLeases):
    def _is_contributing(self, key: HolderKey) -> bool:
        return False


class WelcomesTheLost(Membership):
    """One that was given up goes on as what it was."""

    def _find_hello_refusal(self, envelope: Envelope, body: Hello, member: Member | None) -> Reason | None:
        refusal = super()._find_hello_refusal(envelope, body, member)
        if refusal is None or refusal.code != "refused-lost":
            return refusal
        assert member is not None
        member.state = MemberState.DISCONNECTED
        self._state.ledger.open(member.id, member.incarnation)
        return None


class NeverGivesUp(Membership):
    def _give_up(self, now: float, member: Member, away_s: float) -> None:
        """What it holds, it holds for ever."""


class ForgetsWhoIsLost(SyncerState):
    """After a restart takes the lost for those who have left, and answers them nothing."""

    def _restore(self, restored: RestoredState) -> None:
        members = structs.replace(restored.members, lost=()) if restored.members is not None else None
        super()._restore(replace(restored, members=members))


class ForgetsMarksOfLeases(SyncerState):
    """After a restart takes the last record of leases for all that there is to know."""

    def _restore_leases(self, record: LeaseRecord) -> None:
        self.leases_serial = record.serial
        self.leases.restore(record)
        for key in list(self.leases.holders):
            if key[0] not in self.members or self.members[key[0]].incarnation != key[1]:
                self.leases.close(key)


class NewSamplesFirst(SyncerState):
    class Books(LeaseLedger):
        def _cut(self, samples: int) -> Interval:
            self.next += samples
            return self.next - samples, self.next

    def __init__(self, config: RunConfig, epoch: int, restored: RestoredState | None = None) -> None:
        super().__init__(config, epoch, restored)
        books = self.Books()
        books.__dict__.update(self.leases.__dict__)
        self.leases = books


class CountsLeasesTwice(LearnerLeases):
    """A lease that comes again is taken for another one."""

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
        """Heard, and forgotten."""
        self._state.send(PausedAck(body.serial, body.paused))


class KeepsItsQuorum(Controls):
    def _change_quorum(self, now: float, quorum: int, who: str) -> None:
        super()._change_quorum(now, min(quorum, self._state.config.quorum), who)


class KeepsItsGrace(Rounds):
    def __init__(self, state: SyncerState, *neighbours: Any) -> None:
        super().__init__(state, *neighbours)
        self.first = state.config

    def _enter_grace(self, now: float, f: Fragment) -> None:
        changed, self._state.config = (
            self._state.config,
            replace(self._state.config, grace_margin=self.first.grace_margin),
        )
        super()._enter_grace(now, f)
        self._state.config = changed


class TellsOnce(Controls):
    """Of a pause, of its end and of a wish to leave; and if it is lost, it is lost."""

    def on_timer(self, now: float, learner: int) -> None:
        """Not again."""


class TellsNobodyWhoReturns(Controls):
    def resend_request(self, now: float, member: Member) -> None:
        """What it was told before its link broke it has heard, most likely."""


class KeepsRoundsOfALostShard(Rounds):
    """A round goes on when its shard is back, with contributions that were lost with it."""

    def abandon(self, now: float, f: Fragment, reason: Reason, what: str = "") -> None:
        if reason.code != "shard-round-lost":
            super().abandon(now, f, reason, what)


class AsksAShardThatIsAway(Delivery):
    """Sends what nobody can fetch."""

    def owe(self, now: float, member: Member, f: Fragment) -> None:
        away, f.unavailable = f.unavailable, False
        super().owe(now, member, f)
        f.unavailable = away


class TakesAllForDurable(SyncerShards):
    """Whatever a shard had merged it has written, most likely."""

    def _take_back(self, now: float, f: Fragment, version: int) -> None:
        super()._take_back(now, f, f.version + 1 if f.id in self._state.durability_unknown else version)


class TakesAllForLost(SyncerShards):
    """Whatever a shard was writing is gone, most likely."""

    def on_back(self, now: float, event: ShardReconnected) -> None:
        held = tuple((p, min(version, self._state.fragments[p].version)) for p, version in event.versions)
        super().on_back(now, ShardReconnected(held))


class ForgetsWhatALostShardOwes(SyncerShards):
    def on_lost(self, now: float, event: ShardLost) -> None:
        super().on_lost(now, event)
        for member in self._state.members.values():
            for p in event.fragments:
                member.unacked.pop(p, None)


class WaitsForALostShard(Rounds):
    """The fragment that is ripe first goes first, there or not."""

    def _oldest_idle_fragment(self) -> Fragment | None:
        idle = (
            f
            for f in self._state.by_opening.values()
            if f.phase is RoundPhase.IDLE and f.id not in self._state.retrying
        )
        return next(idle, None)


class KeepsThePlaceOfALostShard(SyncerState):
    def occupied_slots(self) -> int:
        return self.in_flight


class LostShardBlocksEnd(Shutdown):
    def skip_final(self, f: Fragment, why: str) -> None:
        if not f.unavailable:
            super().skip_final(f, why)


class LeavesTooEarly(Departure):
    """Takes what it has sent for merged."""

    def unmerged(self) -> tuple[int, ...]:
        return tuple(p for p in super().unmerged() if p not in self._state.copies)


class StepsAfterTheNotice(LearnerState):
    @property
    def rests(self) -> bool:
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
        "take a failed write for done",
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
    PlantedBug("wait for who missed nothing", ("grace",), syncer=SyncerComponents(rounds=WaitsForWhoMissedNothing)),
    PlantedBug("weight from stale counters", ("weights",), syncer=SyncerComponents(rounds=WeighsByStaleCounters)),
    PlantedBug(
        "adopt an older version", ("versions",), learner=LearnerComponents(rounds=AdoptsOlderVersion), first_seed=24
    ),
    PlantedBug(
        "snapshot misses an in-flight message", ("snapshot",), syncer=SyncerComponents(snapshots=MissesInFlight)
    ),
    PlantedBug("snapshot after adopting", ("snapshot",), learner=LearnerComponents(rounds=CutsAfterAdopting)),
    PlantedBug("a learner twice in a merge", ("once",), syncer=SyncerComponents(rounds=CountsDuplicates)),
    PlantedBug("learner waits for the syncer", ("independence",), learner_core=WaitsForTheSyncer, first_seed=11),
    PlantedBug("merged work is sent again", ("ledger", "once"), learner=LearnerComponents(rounds=IgnoresItsMark)),
    PlantedBug("new copy for an old round", ("ledger",), learner=LearnerComponents(rounds=CopiesAnewForOldRound)),
    PlantedBug("end without the last merge", ("the-end",), syncer=SyncerComponents(rounds=EndsWithoutLastMerge)),
    PlantedBug(
        "a dead learner blocks the end",
        ("liveness",),
        syncer=SyncerComponents(shutdown=DeadLearnerBlocksEnd),
        first_seed=9,
    ),
    PlantedBug("ask without bound", ("bounds",), syncer=SyncerComponents(rounds=AsksForEver), first_seed=35),
    PlantedBug("start before everything arrived", ("recovery",), learner=LearnerComponents(joining=StartsTooEarly)),
    PlantedBug("give old inner state", ("recovery",), learner=LearnerComponents(joining=GivesOldState), first_seed=12),
    PlantedBug("step after the stop", ("stopped",), learner=LearnerComponents(shutdown=ContributesAfterStop)),
    PlantedBug("message from the future", ("clocks",), learner=LearnerComponents(connection=TicksTwice)),
    PlantedBug(
        "stop without the final versions", ("the-end",), learner=LearnerComponents(shutdown=StopsWithoutFinalVersions)
    ),
    PlantedBug("never dial again", ("liveness",), learner=LearnerComponents(connection=NeverDialsAgain), first_seed=1),
    PlantedBug("ask the disk twice", ("one-answer",), syncer=SyncerComponents(rounds=AsksTheDiskTwice)),
    PlantedBug(
        "contribute settled tokens again", ("ledger",), learner=LearnerComponents(rounds=ContributesSettledTokens)
    ),
    PlantedBug(
        "lease before it is durable", ("lease-durable",), syncer=SyncerComponents(data_leases=LeasesBeforeDurable)
    ),
    PlantedBug(
        "return the leases of the absent",
        ("leased-once",),
        syncer=SyncerComponents(membership=ReturnsLeasesOfTheAbsent),
        first_seed=18,
    ),
    PlantedBug(
        "return leases too early",
        ("leased-once",),
        syncer=SyncerComponents(data_leases=ReturnsLeasesBeforeTheEndIsDurable),
        first_seed=20,
    ),
    PlantedBug(
        "return what a round still holds",
        ("samples-once",),
        syncer=SyncerComponents(data_leases=ReturnsWhatARoundHolds),
    ),
    PlantedBug(
        "welcome one that was given up",
        ("current",),
        syncer=SyncerComponents(membership=WelcomesTheLost),
        first_seed=36,
    ),
    PlantedBug("never give up", ("liveness",), syncer=SyncerComponents(membership=NeverGivesUp), first_seed=22),
    PlantedBug("forget who is lost", ("liveness",), syncer=SyncerComponents(state=ForgetsWhoIsLost), first_seed=558),
    PlantedBug(
        "forget marks of leases", ("samples-once",), syncer=SyncerComponents(state=ForgetsMarksOfLeases), first_seed=36
    ),
    PlantedBug("lease new samples first", ("returned-first",), syncer=SyncerComponents(state=NewSamplesFirst)),
    PlantedBug(
        "count a lease twice", ("lease-held",), learner=LearnerComponents(data_leases=CountsLeasesTwice), first_seed=19
    ),
    PlantedBug("start without a lease", ("lease-held",), learner=LearnerComponents(joining=StartsWithoutLease)),
    PlantedBug(
        "open a round while paused", ("paused",), syncer=SyncerComponents(rounds=OpensWhilePaused), first_seed=22
    ),
    PlantedBug(
        "take steps while paused", ("paused",), learner=LearnerComponents(connection=StepsWhilePaused), first_seed=20
    ),
    PlantedBug(
        "keep the quorum of before", ("quorum",), syncer=SyncerComponents(controls=KeepsItsQuorum), first_seed=29
    ),
    PlantedBug(
        "keep the grace margin of before", ("grace",), syncer=SyncerComponents(rounds=KeepsItsGrace), first_seed=50
    ),
    PlantedBug("tell of a wish once", ("liveness",), syncer=SyncerComponents(controls=TellsOnce), first_seed=965),
    PlantedBug(
        "tell nobody who returns",
        ("liveness",),
        syncer=SyncerComponents(controls=TellsNobodyWhoReturns),
        first_seed=118,
    ),
    PlantedBug(
        "go on with a round that was lost",
        ("shards",),
        syncer=SyncerComponents(rounds=KeepsRoundsOfALostShard),
        syncer_core=Unchecked,
        first_seed=5,
    ),
    PlantedBug(
        "ask a shard that is away", ("shards",), syncer=SyncerComponents(delivery=AsksAShardThatIsAway), first_seed=36
    ),
    PlantedBug(
        "take what a shard forgot for durable",
        ("durable-first", "versions"),
        syncer=SyncerComponents(shards=TakesAllForDurable),
        first_seed=13,
    ),
    PlantedBug(
        "take what a shard kept for lost",
        ("versions", "current"),
        syncer=SyncerComponents(shards=TakesAllForLost),
        first_seed=8,
    ),
    PlantedBug(
        "forget what a lost shard owes",
        ("liveness",),
        syncer=SyncerComponents(shards=ForgetsWhatALostShardOwes),
        first_seed=5,
    ),
    PlantedBug(
        "wait for a lost shard", ("liveness",), syncer=SyncerComponents(rounds=WaitsForALostShard), first_seed=1
    ),
    PlantedBug(
        "keep the place of a lost shard",
        ("liveness",),
        syncer=SyncerComponents(state=KeepsThePlaceOfALostShard),
        first_seed=23,
    ),
    PlantedBug(
        "a lost shard blocks the end",
        ("liveness",),
        syncer=SyncerComponents(shutdown=LostShardBlocksEnd),
        first_seed=17,
    ),
    PlantedBug(
        "leave before it is merged", ("pushed",), learner=LearnerComponents(leaving=LeavesTooEarly), first_seed=27
    ),
    PlantedBug(
        "go on after the notice", ("pushed",), learner=LearnerComponents(state=StepsAfterTheNotice), first_seed=3
    ),
)
