"""Protocol bugs, planted one at a time. Each is a small, plausible mistake and names the checker that must find it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.core.data_leases import Key, LeaseBooks
from atoll.core.learner.core import LearnerCore
from atoll.core.learner.state import Copy
from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    Envelope,
    Held,
    Hello,
    Hold,
    Lease,
    LeaseRecord,
    MergeRound,
    OpenGrace,
    Persisted,
    Published,
    Pull,
    RefuseContribution,
    ShardBack,
    ShardLost,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode, Phase, Stage, Standing
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import Fragment, Member, Restored
from atoll.core.types import Accepted, Interval, RoundId, RunConfig


@dataclass(frozen=True)
class Planted:
    name: str
    checkers: tuple[str, ...]  # any of these may be the first to see it
    syncer: type[SyncerCore] = SyncerCore
    learner: type[LearnerCore] = LearnerCore
    first_seed: int = 0  # where the search starts: a seed that shows the bug


class MergesBelowQuorum(SyncerCore):
    def _has_quorum(self, f: Fragment) -> bool:
        return len(f.contributions) >= 1

    def check_invariants(self) -> None:
        """Switched off: the observer must find it, not the core's own self-test."""


class AcceptsOldIncarnation(SyncerCore):
    def _is_current(self, member: Member, envelope: Envelope) -> bool:
        return True

    def _accepted(self, member: Member, body: Contribution) -> Accepted:
        return super()._accepted(member, body)._replace(incarnation=self._speaker)

    def _refusal(self, f: Fragment, member: Member, body: Contribution) -> Reason | None:
        refusal = super()._refusal(f, member, body)
        if refusal is not None and refusal.code == "contribution-not-asked":
            f.asked[member.id] = self.now
            return None
        return refusal

    def _heard(self, now: float, member: Member, envelope: Envelope) -> None:
        self._speaker = envelope.incarnation
        super()._heard(now, member, envelope)


class PublishesBeforeDurable(SyncerCore):
    def _save_version(self, f: Fragment) -> None:
        super()._save_version(f)
        f.version += 1
        self._publish(self.now, f)
        f.version -= 1


class ForgetsFailedWrite(SyncerCore):
    """A full disk is taken for a success."""

    def _version_not_saved(self, now: float, f: Fragment, why: str) -> None:
        self._version_saved(now, f)


class MergesTwiceAfterRestart(SyncerCore):
    """Reads the last but one version of its directory."""

    def _restore(self, restored: Restored) -> None:
        super()._restore(restored)
        for f in self.fragments.values():
            if f.version > 0:
                f.version -= 1
                self.merges -= 1


class WelcomesBeforeDurable(SyncerCore):
    def _save_members(self, now: float) -> None:
        super()._save_members(now)
        for member in list(self.members.values()):
            if member.standing is Standing.ADMITTING and member.hello is not None:
                self._stand(member, "admitted")
                self._welcome(now, member, member.hello)


class LosesRefusedContribution(LearnerCore):
    """Takes a refused contribution for settled."""

    def _on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        super()._on_refused_contribution(now, envelope, body)
        copy = self.copies.pop(body.round.fragment, None)
        if copy is not None:
            self.settled[body.round.fragment] = copy.trained
            self.base_step[body.round.fragment] = copy.step


class ForgetsPullDeadline(SyncerCore):
    def _on_pull_timer(self, now: float, fragment: int) -> None:
        """A lost answer is waited for until the end of time."""


class ForgetsGraceDeadline(SyncerCore):
    def _on_grace_timer(self, now: float, fragment: int) -> None:
        """The window never closes by itself."""


class GraceBeyondBound(SyncerCore):
    def _enter_grace(self, now: float, f: Fragment) -> None:
        super()._enter_grace(now, f)
        opened = self._out[-1]
        assert isinstance(opened, OpenGrace)
        self._out[-1] = opened._replace(window_s=2 * opened.window_s)
        f.grace_until = now + 2 * opened.window_s
        self._arm(f.grace_until, "grace", f.id)


class WaitsForWhoMissedNothing(SyncerCore):
    """Every round waits as long as it may, as if somebody had missed the one before."""

    def _enter_grace(self, now: float, f: Fragment) -> None:
        f.missed = dict(f.asked)
        super()._enter_grace(now, f)

    def _still_needs(self, now: float, f: Fragment, member: Member) -> float:
        return self.config.grace_margin * (self.config.every_steps * self._step_s()) / 2


class WeighsByStaleCounters(SyncerCore):
    """Uses what the learner last reported instead of what the contribution says."""

    def _accepted(self, member: Member, body: Contribution) -> Accepted:
        steps = max(1, member.step - self._baseline(self.fragments[body.round.fragment], member))
        return super()._accepted(member, body)._replace(weight=body.tokens * body.tokens / steps)


class AdoptsOlderVersion(LearnerCore):
    def _on_published(self, now: float, envelope: Envelope, body: Published) -> None:
        if body.version < self.received.get(body.fragment, -1) and self.step:
            p = body.fragment
            pending = self.trained - self.settled[p]
            self._out.append(AdoptFragment(p, body.version, self.config.adopt, False, 0, 0, pending))
        super()._on_published(now, envelope, body)


class MissesInFlight(SyncerCore):
    def _record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None:
        """What is under way at the cut is not written down."""


class CutsAfterAdopting(LearnerCore):
    """Saves its part at the end of the step boundary: what was published after the cut is already in it."""

    def _save_part(self) -> None:
        if self.arrivals:
            self._adopt_arrived()
        super()._save_part()


class CountsDuplicates(SyncerCore):
    """A contribution that arrives twice is merged twice: a list where a mapping belongs."""

    def __init__(self, config: RunConfig, epoch: int, restored: Restored | None = None) -> None:
        super().__init__(config, epoch, restored)
        self.twice: dict[RoundId, Accepted] = {}

    def _is_duplicate(self, f: Fragment, member: Member, body: Contribution) -> bool:
        if super()._is_duplicate(f, member, body):
            self.twice[body.round] = f.contributions[member.id]
        return False

    def _seal(self, now: float, f: Fragment, reason: Reason) -> None:
        super()._seal(now, f, reason)
        merge = self._out[-1]
        assert isinstance(merge, MergeRound)
        if merge.round in self.twice:
            self._out[-1] = merge._replace(contributions=(*merge.contributions, self.twice[merge.round]))


class WaitsForTheSyncer(LearnerCore):
    """Stands still while its link is down."""

    @property
    def training(self) -> bool:
        return super().training and self.link is Link.UP


class IgnoresItsMark(LearnerCore):
    """Takes merged work for unmerged and sends it once more."""

    def _was_merged(self, p: int, copy: Copy | None) -> bool:
        return False


class CopiesAnewForOldRound(LearnerCore):
    """Answers a repeated pull with a new copy: nobody can tell which one was merged."""

    def _on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        copy = self.copies.get(body.round.fragment)
        if copy is not None and copy.round == body.round:
            del self.copies[body.round.fragment]
        super()._on_pull(now, envelope, body)


class EndsWithoutLastMerge(SyncerCore):
    def _open_final(self, now: float) -> None:
        for f in self.fragments.values():
            if f.phase is Phase.IDLE:
                f.final = True
        self._check_end(now)


class DeadLearnerBlocksEnd(SyncerCore):
    def _check_end(self, now: float) -> None:
        if self.stage is Stage.FINISHING and len(self.live) < len(self.members):
            return
        super()._check_end(now)


class AsksForEver(SyncerCore):
    def _on_pull_timer(self, now: float, fragment: int) -> None:
        f = self.fragments[fragment]
        if f.phase is Phase.PULLING and now >= f.pull_again_at:
            f.pull_tries = 1
        super()._on_pull_timer(now, fragment)


class StartsTooEarly(LearnerCore):
    def _on_welcome(self, now: float, envelope: Envelope, body: Welcome) -> None:
        super()._on_welcome(now, envelope, body._replace(versions=tuple(-1 for _ in body.versions)))


class GivesOldState(LearnerCore):
    def _give_state(self, now: float) -> None:
        self.giving = {
            to: g._replace(wanted=g.wanted._replace(versions=tuple(-1 for _ in g.wanted.versions)))
            for to, g in self.giving.items()
        }
        super()._give_state(now)


class ContributesAfterStop(LearnerCore):
    """Answers a last pull although its training has ended."""

    def _check_final(self) -> None:
        copies = dict(self.copies)
        super()._check_final()
        if self.mode is Mode.STOPPED:
            for copy in copies.values():
                self._send_copy(copy)


class TicksTwice(LearnerCore):
    """Counts a message that it sends as an event of its own: clocks run ahead of the tape."""

    def _greet(self, now: float) -> None:
        self.tick += 1
        super()._greet(now)
        self.tick -= 1


class StopsWithoutFinalVersions(LearnerCore):
    def _final_here(self) -> bool:
        return True


class NeverDialsAgain(LearnerCore):
    """Gives a link up and never dials again."""

    def _redial(self) -> None:
        """Forgotten."""


class AsksTheDiskTwice(SyncerCore):
    """Asks the disk again without waiting for its answer."""

    def _save_version(self, f: Fragment) -> None:
        super()._save_version(f)
        super()._save_version(f)

    def _on_persisted(self, now: float, event: Persisted) -> None:
        if event.key.kind == "version" and self.fragments[event.key.number].version >= event.key.version:
            return
        super()._on_persisted(now, event)


class ContributesSettledTokens(LearnerCore):
    """Off by a few tokens."""

    def _contribute(self, p: int, round_id: RoundId) -> None:
        self.settled[p] -= min(self.settled[p], 8)
        super()._contribute(p, round_id)


class LeasesBeforeDurable(SyncerCore):
    def _save_leases(self) -> None:
        super()._save_leases()
        for (learner, incarnation), holder in self.leases.holders.items():
            member = self.members[learner]
            if self._may_lease(member, incarnation):
                self._send_leases(member, holder, max(holder.durable, holder.first), holder.count)


class ReturnsLeasesOfTheAbsent(SyncerCore):
    """Takes a broken link for the end of its learner."""

    def _gone(self, now: float, member: Member, reason: Reason) -> None:
        key = (member.id, member.incarnation)
        super()._gone(now, member, reason)
        if key in self.leases.holders and key not in self.lease_closing:
            self._return_leases(key)


class ReturnsLeasesBeforeTheEndIsDurable(SyncerCore):
    def _close_leases(self, member: Member, serial: int) -> None:
        super()._close_leases(member, 0)
        self._settle_leases()


class ReturnsWhatARoundHolds(SyncerCore):
    def _is_contributing(self, key: Key) -> bool:
        return False


class WelcomesTheLost(SyncerCore):
    """One that was given up goes on as what it was."""

    def _hello_refusal(self, envelope: Envelope, body: Hello, member: Member | None) -> Reason | None:
        refusal = super()._hello_refusal(envelope, body, member)
        if refusal is None or refusal.code != "refused-lost":
            return refusal
        assert member is not None
        member.standing = Standing.AWAY
        self.ledger.open(member.id, member.incarnation)
        return None


class NeverGivesUp(SyncerCore):
    def _give_up(self, now: float, member: Member, away_s: float) -> None:
        """What it holds, it holds for ever."""


class ForgetsWhoIsLost(SyncerCore):
    """After a restart takes the lost for those who have left, and answers them nothing."""

    def _restore(self, restored: Restored) -> None:
        members = restored.members._replace(lost=()) if restored.members is not None else None
        super()._restore(replace(restored, members=members))


class ForgetsMarksOfLeases(SyncerCore):
    """After a restart takes the last record of leases for all that there is to know."""

    def _restore_leases(self, record: LeaseRecord) -> None:
        self.leases_serial = record.serial
        self.leases.restore(record)
        for key in list(self.leases.holders):
            if key[0] not in self.members or self.members[key[0]].incarnation != key[1]:
                self.leases.close(key)


class NewSamplesFirst(SyncerCore):
    class Books(LeaseBooks):
        def _cut(self, samples: int) -> Interval:
            self.next += samples
            return self.next - samples, self.next

    def __init__(self, config: RunConfig, epoch: int, restored: Restored | None = None) -> None:
        super().__init__(config, epoch, restored)
        books = self.Books()
        books.__dict__.update(self.leases.__dict__)
        self.leases = books


class CountsLeasesTwice(LearnerCore):
    """A lease that comes again is taken for another one."""

    def _on_lease(self, now: float, envelope: Envelope, body: Lease) -> None:
        if body.number < self.lease_count:
            self.held += body.end - body.begin
        super()._on_lease(now, envelope, body)


class StartsWithoutLease(LearnerCore):
    def _check_ready(self, now: float) -> None:
        self.lease_samples = 0
        super()._check_ready(now)
        self.lease_samples = self.config.lease_samples


class OpensWhilePaused(SyncerCore):
    def _open_ripe(self, now: float) -> None:
        paused, self.paused = self.paused, False
        super()._open_ripe(now)
        self.paused = paused


class StepsWhilePaused(LearnerCore):
    def _on_hold(self, now: float, envelope: Envelope, body: Hold) -> None:
        """Heard, and forgotten."""
        self._send(Held(body.serial, body.paused))


class KeepsItsQuorum(SyncerCore):
    def _change_quorum(self, now: float, quorum: int, who: str) -> None:
        super()._change_quorum(now, min(quorum, self.config.quorum), who)


class KeepsItsGrace(SyncerCore):
    def __init__(self, config: RunConfig, epoch: int, restored: Restored | None = None) -> None:
        super().__init__(config, epoch, restored)
        self.first = config

    def _enter_grace(self, now: float, f: Fragment) -> None:
        changed, self.config = self.config, replace(self.config, grace_margin=self.first.grace_margin)
        super()._enter_grace(now, f)
        self.config = changed


class TellsOnce(SyncerCore):
    """Of a pause, of its end and of a wish to leave; and if it is lost, it is lost."""

    def _on_control_timer(self, now: float, learner: int) -> None:
        """Not again."""


class TellsNobodyWhoReturns(SyncerCore):
    def _tell_wish_anew(self, now: float, member: Member) -> None:
        """What it was told before its link broke it has heard, most likely."""


class KeepsRoundsOfALostShard(SyncerCore):
    """A round goes on when its shard is back, with contributions that were lost with it."""

    def _abandon(self, now: float, f: Fragment, reason: Reason, what: str = "") -> None:
        if reason.code != "shard-round-lost":
            super()._abandon(now, f, reason, what)

    def check_invariants(self) -> None:
        """Switched off: the observer must find it, not the core's own self-test."""


class AsksAShardThatIsAway(SyncerCore):
    """Sends what nobody can fetch."""

    def _owe(self, now: float, member: Member, f: Fragment) -> None:
        away, f.away = f.away, False
        super()._owe(now, member, f)
        f.away = away


class TakesAllForDurable(SyncerCore):
    """Whatever a shard had merged it has written, most likely."""

    def _take_back(self, now: float, f: Fragment, version: int) -> None:
        super()._take_back(now, f, f.version + 1 if f.id in self.unheard else version)


class TakesAllForLost(SyncerCore):
    """Whatever a shard was writing is gone, most likely."""

    def _on_shard_back(self, now: float, event: ShardBack) -> None:
        held = tuple((p, min(version, self.fragments[p].version)) for p, version in event.held)
        super()._on_shard_back(now, ShardBack(held))


class ForgetsWhatALostShardOwes(SyncerCore):
    def _on_shard_lost(self, now: float, event: ShardLost) -> None:
        super()._on_shard_lost(now, event)
        for member in self.members.values():
            for p in event.fragments:
                member.owed.pop(p, None)


class WaitsForALostShard(SyncerCore):
    """The fragment that is ripe first goes first, there or not."""

    def _front(self) -> Fragment | None:
        idle = (f for f in self.by_opening.values() if f.phase is Phase.IDLE and f.id not in self.retrying)
        return next(idle, None)


class KeepsThePlaceOfALostShard(SyncerCore):
    def _places_taken(self) -> int:
        return self.in_flight


class LostShardBlocksEnd(SyncerCore):
    def _skip_final(self, f: Fragment, why: str) -> None:
        if not f.away:
            super()._skip_final(f, why)


class LeavesTooEarly(LearnerCore):
    """Takes what it has sent for merged."""

    def unmerged(self) -> tuple[int, ...]:
        return tuple(p for p in super().unmerged() if p not in self.copies)


class StepsAfterTheNotice(LearnerCore):
    @property
    def rests(self) -> bool:
        return self.paused


PLANTED: tuple[Planted, ...] = (
    Planted("merge below quorum", ("quorum",), syncer=MergesBelowQuorum, first_seed=2),
    Planted("accept an old incarnation", ("current",), syncer=AcceptsOldIncarnation, first_seed=137),
    Planted("publish before durable", ("durable-first",), syncer=PublishesBeforeDurable),
    Planted("take a failed write for done", ("versions", "durable-first"), syncer=ForgetsFailedWrite, first_seed=42),
    Planted("merge twice after a restart", ("versions", "current"), syncer=MergesTwiceAfterRestart, first_seed=14),
    Planted("welcome before the admission is durable", ("durable-first",), syncer=WelcomesBeforeDurable),
    Planted("lose a refused contribution", ("ledger",), learner=LosesRefusedContribution),
    Planted("forget the pull deadline", ("rounds-end", "liveness"), syncer=ForgetsPullDeadline, first_seed=5),
    Planted("forget the grace deadline", ("grace",), syncer=ForgetsGraceDeadline),
    Planted("grace beyond its bound", ("grace",), syncer=GraceBeyondBound),
    Planted("wait for who missed nothing", ("grace",), syncer=WaitsForWhoMissedNothing),
    Planted("weight from stale counters", ("weights",), syncer=WeighsByStaleCounters),
    Planted("adopt an older version", ("versions",), learner=AdoptsOlderVersion, first_seed=24),
    Planted("snapshot misses an in-flight message", ("snapshot",), syncer=MissesInFlight),
    Planted("snapshot after adopting", ("snapshot",), learner=CutsAfterAdopting),
    Planted("a learner twice in a merge", ("once",), syncer=CountsDuplicates),
    Planted("learner waits for the syncer", ("independence",), learner=WaitsForTheSyncer, first_seed=11),
    Planted("merged work is sent again", ("ledger", "once"), learner=IgnoresItsMark),
    Planted("new copy for an old round", ("ledger",), learner=CopiesAnewForOldRound),
    Planted("end without the last merge", ("the-end",), syncer=EndsWithoutLastMerge),
    Planted("a dead learner blocks the end", ("liveness",), syncer=DeadLearnerBlocksEnd, first_seed=3),
    Planted("ask without bound", ("bounds",), syncer=AsksForEver, first_seed=35),
    Planted("start before everything arrived", ("recovery",), learner=StartsTooEarly),
    Planted("give old inner state", ("recovery",), learner=GivesOldState, first_seed=12),
    Planted("step after the stop", ("stopped",), learner=ContributesAfterStop),
    Planted("message from the future", ("clocks",), learner=TicksTwice),
    Planted("stop without the final versions", ("the-end",), learner=StopsWithoutFinalVersions),
    Planted("never dial again", ("liveness",), learner=NeverDialsAgain, first_seed=1),
    Planted("ask the disk twice", ("one-answer",), syncer=AsksTheDiskTwice),
    Planted("contribute settled tokens again", ("ledger",), learner=ContributesSettledTokens),
    Planted("lease before it is durable", ("lease-durable",), syncer=LeasesBeforeDurable),
    Planted("return the leases of the absent", ("leased-once",), syncer=ReturnsLeasesOfTheAbsent, first_seed=18),
    Planted("return leases too early", ("leased-once",), syncer=ReturnsLeasesBeforeTheEndIsDurable, first_seed=20),
    Planted("return what a round still holds", ("samples-once",), syncer=ReturnsWhatARoundHolds),
    Planted("welcome one that was given up", ("current",), syncer=WelcomesTheLost, first_seed=36),
    Planted("never give up", ("liveness",), syncer=NeverGivesUp, first_seed=20),
    Planted("forget who is lost", ("liveness",), syncer=ForgetsWhoIsLost, first_seed=558),
    Planted("forget marks of leases", ("samples-once",), syncer=ForgetsMarksOfLeases, first_seed=36),
    Planted("lease new samples first", ("returned-first",), syncer=NewSamplesFirst),
    Planted("count a lease twice", ("lease-held",), learner=CountsLeasesTwice, first_seed=19),
    Planted("start without a lease", ("lease-held",), learner=StartsWithoutLease),
    Planted("open a round while paused", ("paused",), syncer=OpensWhilePaused, first_seed=22),
    Planted("take steps while paused", ("paused",), learner=StepsWhilePaused, first_seed=20),
    Planted("keep the quorum of before", ("quorum",), syncer=KeepsItsQuorum, first_seed=29),
    Planted("keep the grace margin of before", ("grace",), syncer=KeepsItsGrace, first_seed=50),
    Planted("tell of a wish once", ("liveness",), syncer=TellsOnce, first_seed=965),
    Planted("tell nobody who returns", ("liveness",), syncer=TellsNobodyWhoReturns, first_seed=118),
    Planted("go on with a round that was lost", ("shards",), syncer=KeepsRoundsOfALostShard, first_seed=5),
    Planted("ask a shard that is away", ("shards",), syncer=AsksAShardThatIsAway, first_seed=36),
    Planted(
        "take what a shard forgot for durable", ("durable-first", "versions"), syncer=TakesAllForDurable, first_seed=13
    ),
    Planted("take what a shard kept for lost", ("versions", "current"), syncer=TakesAllForLost, first_seed=8),
    Planted("forget what a lost shard owes", ("liveness",), syncer=ForgetsWhatALostShardOwes, first_seed=5),
    Planted("wait for a lost shard", ("liveness",), syncer=WaitsForALostShard, first_seed=1),
    Planted("keep the place of a lost shard", ("liveness",), syncer=KeepsThePlaceOfALostShard, first_seed=23),
    Planted("a lost shard blocks the end", ("liveness",), syncer=LostShardBlocksEnd, first_seed=17),
    Planted("leave before it is merged", ("pushed",), learner=LeavesTooEarly, first_seed=27),
    Planted("go on after the notice", ("pushed",), learner=StepsAfterTheNotice, first_seed=3),
)
