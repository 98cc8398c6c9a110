"""Rounds and delivery: a fragment goes from version v to v + 1, or nothing happens at all; every connected learner then
receives the newest version, or loses its link."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.policy import CODECS, backoff_s, choose_update_codec, compute_grace_window, max_rounds_in_flight
from atoll.core.protocol import (
    Accumulate,
    Contribution,
    DiscardRound,
    DownloadTime,
    Envelope,
    MergeDone,
    MergeFailed,
    MergeRound,
    OpenGrace,
    Persist,
    PersistFailed,
    PublishAck,
    Published,
    Pull,
    RecordKey,
    RefuseContribution,
    Resync,
    VersionRecord,
)
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RoundPhase, RunStage
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import CONNECTED, Fragment, LearnerFault, Member, SyncerState, UnackedPublish
from atoll.core.types import (
    AcceptedContribution,
    FragmentId,
    LearnerId,
    MergedUpTo,
    RoundId,
    contribution_weight,
    is_positive,
)


class Delivery:
    """Send the newest version of each fragment until the learner acknowledges it."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def publish(self, now: float, f: Fragment) -> None:
        for m in self._state.members.values():
            if m.state in CONNECTED:
                self.owe(now, m, f)

    def owe(self, now: float, member: Member, f: Fragment) -> None:
        """Send the newest version of a fragment to a learner that does not hold it.

        A newer version replaces an older one that is still owed, so what is owed to a learner is bounded by P.
        """
        held = self._state.received_version(member, f.id)
        if held >= f.version:
            return
        owed = member.unacked.get(f.id)
        if f.unavailable:
            member.unacked[f.id] = UnackedPublish(f.version, now, 0)
            return
        tries = max(1, owed.tries) if owed is not None and owed.version != f.version else 1
        member.unacked[f.id] = UnackedPublish(f.version, now, tries)
        self._send_version(member, f, base=held if held == f.version - 1 and held >= 0 and owed is None else None)
        self._watch_delivery(now, member)

    def _watch_delivery(self, now: float, member: Member) -> None:
        state = self._state
        if not member.publish_timer_armed:
            member.publish_timer_armed = True
            state.arm_timer(now + state.ack_timeout(member), "publish", member.id)

    def _send_version(self, member: Member, f: Fragment, base: int | None) -> None:
        state = self._state
        state.send(member, Published(f.id, f.version, base, f.merged_up_to.get(member.id), state.progress()))

    def on_timer(self, now: float, learner: LearnerId) -> LearnerFault | None:
        state = self._state
        member = state.members.get(learner)
        if member is None or not member.publish_timer_armed:
            return None
        member.publish_timer_armed = False
        wait = state.ack_timeout(member)
        for p, owed in list(member.unacked.items()):
            if state.fragments[p].unavailable or now < owed.sent_at + wait * 2.0 ** (owed.tries - 1):
                continue
            if owed.tries >= state.limits.max_publish_attempts:
                member.ack_time.add(now - owed.sent_at)  # at least: see the same in `Rounds.on_pull_timer`
                reason = Reason("member-publish-unacked", (owed.version, p, owed.tries))
                return LearnerFault(member, reason, closes_connection=True)
            member.unacked[p] = UnackedPublish(owed.version, now, owed.tries + 1)
            self._send_version(member, state.fragments[p], base=None)
        sent = [owed for p, owed in member.unacked.items() if not state.fragments[p].unavailable]
        if sent:
            member.publish_timer_armed = True
            due = min(o.sent_at + wait * 2.0 ** (o.tries - 1) for o in sent)
            state.arm_timer(max(due, now + state.limits.min_wait_s), "publish", member.id)
        return None

    def on_publish_ack(self, now: float, member: Member, envelope: Envelope, body: PublishAck) -> None:
        state = self._state
        f = state.fragments.get(body.fragment)
        if f is None or body.version > f.version:
            state.ignore("ack-of-unpublished-version")
            return
        news = body.version > state.received_version(member, f.id)
        if news:
            member.received[f.id] = body.version
        owed = member.unacked.get(f.id)
        if owed is None or owed.version > body.version:
            return
        del member.unacked[f.id]
        if news and owed.tries == 1:
            # A version that was sent twice says nothing about the time of either sending.
            member.ack_time.add(now - owed.sent_at)
            newest = body.version == f.version and owed.sent_at == f.published_at
            if newest and not state.was_disconnected_since(member.id, f.published_at):
                member.sync_time.add(now - f.published_at + f.merge_s)

    def on_resync(self, now: float, member: Member, envelope: Envelope, body: Resync) -> LearnerFault | None:
        state = self._state
        f = state.fragments.get(body.fragment)
        if f is None or body.received_version >= f.version or state.received_version(member, f.id) >= f.version:
            state.ignore("resync-not-needed")
            return None
        owed = member.unacked.get(f.id)
        tries = 2 if owed is None else owed.tries + 1
        if f.unavailable:
            member.unacked.setdefault(f.id, UnackedPublish(f.version, now, 1))  # sent again when its shard is back
            return None
        if tries > state.limits.max_publish_attempts:
            reason = Reason("member-publish-unacked", (f.version, f.id, tries - 1))
            return LearnerFault(member, reason, closes_connection=True)
        member.unacked[f.id] = UnackedPublish(f.version, now, tries)
        self._send_version(member, f, base=None)
        self._watch_delivery(now, member)
        return None

    def send_unacked(self, now: float, f: Fragment) -> None:
        """Send a fragment whose shard is back to every learner that waits for it."""
        for member in self._state.members.values():
            owed = member.unacked.get(f.id)
            if owed is not None:
                # One that was sent before counts as sent twice: its acknowledgement may be of either.
                member.unacked[f.id] = UnackedPublish(f.version, now, 2 if owed.tries else 1)
                self._send_version(member, f, base=None)
                self._watch_delivery(now, member)


MAX_DRAIN_ROUNDS = 8
"""Rounds of one fragment that are opened out of turn for one leaver, and wait for it. Two are enough where nothing is
lost: the copy that was on its way, and what came after it. One that names fragments and gives nothing holds up nobody
for longer."""


class DrainingLearners:
    """Track which work of leaving learners is in no version yet.

    A leaver takes no more steps, so its fragments would be ripe only by the steps of others, and in a run of its own
    never. A round is opened at once for every fragment of which it names something, as at the end of a run, with
    everybody who has anything to give; the quorum is what it always is, and the round waits for the leaver as long as
    asking goes on.
    """

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def record(self, member: Member, named: tuple[FragmentId, ...]) -> None:
        """Record the fragments of which a leaving learner names unmerged work, except those that are merged already."""
        state = self._state
        fragments = (state.fragments[p] for p in named if p in state.fragments)
        member.unmerged = {f.id: None for f in fragments if not self._holds(f, member)}
        if not member.is_draining:
            member.is_draining = True
            state.log("learner", member.id, "member-draining", len(member.unmerged))
        if member.unmerged:
            state.draining[member.id] = member
        else:
            state.draining.pop(member.id, None)

    def _holds(self, f: Fragment, member: Member) -> bool:
        """A durable version has all that it ever told of."""
        mark, account = f.merged_up_to.get(member.id), self._state.ledger.accounts[member.id]
        return mark is not None and mark.incarnation == member.incarnation and mark.trained >= account.trained

    def needs_round(self, f: Fragment) -> bool:
        """A round has to be opened for a leaver that has unmerged work of this fragment."""
        return not f.unavailable and any(self._pushes(f, m) < MAX_DRAIN_ROUNDS for m in self._draining_with(f))

    def is_awaited(self, f: Fragment) -> bool:
        """The open round still waits for a leaver."""
        return any(
            m.id in f.pulled and m.id not in f.contributions and self._pushes(f, m) <= MAX_DRAIN_ROUNDS
            for m in self._draining_with(f)
        )

    def _draining_with(self, f: Fragment) -> list[Member]:
        return [m for m in self._state.draining.values() if f.id in m.unmerged and m.state is MemberState.LIVE]

    def _pushes(self, f: Fragment, member: Member) -> int:
        return member.drain_rounds.get(f.id, 0)

    def on_version(self, f: Fragment) -> None:
        """A version of it is durable. What a leaver had trained after its copy is still to be merged."""
        state = self._state
        for member in list(state.draining.values()):
            if f.id in member.unmerged and self._holds(f, member):
                del member.unmerged[f.id]
                if not member.unmerged:
                    del state.draining[member.id]


@dataclass(eq=False)
class Rounds:
    """Open, seal and merge the rounds of all fragments."""

    _state: SyncerState
    _delivery: Delivery
    _leases: DataLeases
    _snapshots: Snapshots
    _draining: DrainingLearners
    _shutdown: Shutdown

    # ---------------------------------------------------------------------------------------------------- opening

    def open_due_rounds(self, now: float) -> None:
        """Open every round that is ripe, as far as the limit of rounds in flight allows."""
        state = self._state
        if state.stage is RunStage.FINISHING:
            self._open_final(now)
            return
        if state.stage is not RunStage.RUNNING:
            return
        if state.draining:
            self._open_for_draining(now)
        if state.paused:
            return
        for f in list(state.retrying.values()):
            if state.occupied_slots() >= state.flight_limit:
                return
            if self._is_due(f):
                self._open(now, f)
        while state.occupied_slots() < state.flight_limit:
            f_or_none = self._oldest_idle_fragment()
            if f_or_none is None or not self._is_due(f_or_none) or not self._open(now, f_or_none):
                return

    def _open_for_draining(self, now: float) -> None:
        """All at once, whatever is in flight: there is no later. Their turns stay what they were."""
        state = self._state
        for f in list(state.fragments.values()):
            if f.phase is RoundPhase.IDLE and self._draining.needs_round(f):
                self._open(now, f, is_scheduled=f.id in state.retrying)

    def _open_final(self, now: float) -> None:
        """At the end all fragments go at once: nobody needs the links for later rounds."""
        for f in self._state.fragments.values():
            if f.phase is RoundPhase.IDLE and not f.final:
                f.required_steps = 1
                if self._is_due(f) or self._draining.needs_round(f):
                    self._open(now, f, final=True)

    def _oldest_idle_fragment(self) -> Fragment | None:
        """The idle fragment that opened longest ago. Fragments in flight are few and passed over, and so are those
        whose shard is away: they are in front when it is back."""
        state = self._state
        for f in state.by_opening.values():
            if f.phase is RoundPhase.IDLE and f.id not in state.retrying and not f.unavailable:
                return f
        return None

    def _is_due(self, f: Fragment) -> bool:
        """K live learners have taken H steps since the last round of this fragment opened."""
        return not f.unavailable and self.count_ready_learners(f) >= self._state.config.quorum

    def count_ready_learners(self, f: Fragment) -> int:
        """Live learners with enough steps since the last opening. Reports that a link has held up arrive together and
        tell of steps from before it: nobody takes that many in less than half of their time."""
        state = self._state
        need = f.required_steps
        opened = f.baseline_steps
        since_s = state.now - f.scheduled_at
        return sum(
            1
            for m in state.live.values()
            if m.step - opened.get(m.id, m.first_step) >= need and m.min_step_s * need <= 2 * since_s
        )

    def pullable_learners(self, f: Fragment) -> list[Member]:
        """Live learners with at least one step on the fragment."""
        return [m for m in self._state.live.values() if self._has_new_steps(f, m)]

    def _has_new_steps(self, f: Fragment, member: Member) -> bool:
        """One that leaves takes no more steps, and says itself what it still has."""
        return f.id in member.unmerged if member.is_draining else member.step > self._state.baseline(f, member)

    def _open(self, now: float, f: Fragment, final: bool = False, is_scheduled: bool = True) -> bool:
        state = self._state
        members = self.pullable_learners(f)
        if len(members) < state.config.quorum:
            f.reason = Reason("round-quorum-missing", (len(members), state.config.quorum))
            return False
        state.transition_round(f, "opened")
        f.attempt += 1
        f.round = f.latest_round = RoundId(f.id, f.version, state.epoch, f.attempt)
        f.opened_at = now
        f.is_scheduled = is_scheduled
        if is_scheduled:
            self._reset_schedule(now, f)
        f.pulled = {m.id: now for m in members}
        f.contributions = {}
        f.pull_attempts = 1
        f.round_is_final = final
        f.merged = False
        f.save_attempts = 0
        f.reason = state.count_reason(Reason("round-opened", (f.version, len(members), state.config.quorum)))
        pull = Pull(f.round)
        for m in members:
            state.send(m, pull)
            if m.is_draining:
                m.drain_rounds[f.id] = m.drain_rounds.get(f.id, 0) + 1
        self._arm_pull(now, f)
        return True

    def _reset_schedule(self, now: float, f: Fragment) -> None:
        """Steps towards its next round count from here. Out of turn they go on: whoever is not in that merge would
        otherwise have to wait for another H."""
        state = self._state
        f.scheduled_at = now
        # A learner that did not report right now is in the middle of a step, which does not count as taken since.
        # One that is suspected now may be heard again, and must not count the steps before this opening then.
        f.baseline_steps = {
            m.id: m.step if m.reported_at == now else m.step + 1
            for m in state.members.values()
            if m.state in (MemberState.LIVE, MemberState.SUSPECT)
        }
        f.required_steps = state.config.every_steps
        state.retrying.pop(f.id, None)
        del state.by_opening[f.id]
        state.by_opening[f.id] = f

    def _arm_pull(self, now: float, f: Fragment) -> None:
        """As long as its K-th quickest may take, which makes the quorum. One that is slow, or says so, delays none."""
        state = self._state
        waits = sorted(state.pull_timeout(m) for m in self.waiting(f))
        missing = max(1, state.config.quorum - len(f.contributions))
        wait = waits[min(missing, len(waits)) - 1] if waits else state.limits.min_wait_s
        f.next_pull_at = now + wait * 2.0 ** (f.pull_attempts - 1)
        state.arm_timer(f.next_pull_at, "pull", f.id)

    def pull_late_learner(self, now: float, member: Member) -> None:
        """A learner whose first step on a fragment ends while its round still wants a quorum is asked at once."""
        state = self._state
        for f in state.pulling.values():
            if member.id not in f.pulled and self._has_new_steps(f, member):
                assert f.round is not None
                f.pulled[member.id] = now
                state.send(member, Pull(f.round))

    def waiting(self, f: Fragment) -> list[Member]:
        """Asked, still live, not answered."""
        live = self._state.live
        return [live[i] for i in f.pulled if i not in f.contributions and i in live]

    def on_pull_timer(self, now: float, fragment: FragmentId) -> None:
        state = self._state
        f = state.fragments[fragment]
        if f.phase is not RoundPhase.PULLING or now < f.next_pull_at:
            return
        if f.pull_attempts >= state.limits.max_pull_attempts:
            code, spent = "round-abandoned", now - f.opened_at
            for m in () if state.paused else self.waiting(f):
                # It takes at least as long as we have waited in vain. Without this sample a patience that was once
                # measured too short would abandon every round before its answer, and never be measured again.
                m.answer_time.add(spent)
            self.abandon(now, f, Reason(code, (spent, len(f.contributions), state.config.quorum)))
            return
        assert f.round is not None
        f.pull_attempts += 1
        state.transition_round(f, "pull-retried")
        waiting = self.waiting(f)
        args = (len(f.contributions), state.config.quorum, now - f.opened_at, len(waiting))
        f.reason = state.log("fragment", f.id, "round-pull-retried", *args)
        for m in waiting:
            state.send(m, Pull(f.round))
        self._arm_pull(now, f)
        if f.round_is_final or state.draining:
            self.check_round(now, f)  # asked for the last time: from here on a quorum is enough

    def abandon(self, now: float, f: Fragment, reason: Reason, what: str = "") -> None:
        """Nothing is merged, every learner keeps its progress, the fragment becomes ripe again.

        The steps it takes to be ripe again double with each attempt up to H: when learners are gone, asking the same
        ones at once would only fill their links.
        """
        state = self._state
        assert f.round is not None
        state.effects.append(DiscardRound(f.round, state.count_reason(reason)))
        state.transition_round(f, what or ("abandoned" if f.phase is RoundPhase.PULLING else "merge-failed"))
        f.reason = reason
        f.round = None
        f.pulled = {}
        f.contributions = {}
        if f.is_scheduled:
            f.required_steps = min(state.config.every_steps, 2 ** min(f.attempt - 1, 20))
            state.retrying[f.id] = f
        if state.lease_closing:
            self._leases.settle()
        if f.round_is_final:
            self._shutdown.on_final_failed(now, f, reason)
        self.open_due_rounds(now)

    # ---------------------------------------------------------------------------------------------------- contributing

    def on_contribution(
        self, now: float, member: Member, envelope: Envelope, body: Contribution
    ) -> LearnerFault | None:
        state = self._state
        f = state.fragments.get(body.round.fragment)
        if f is None:
            state.ignore("unknown-fragment")
            return None
        self._snapshots.record_in_flight(member, envelope, body)
        if body.round.is_newer_than(member.newest_rounds.get(f.id)):
            member.newest_rounds[f.id] = body.round
        self._correct_baseline(f, member, body)
        if self._is_duplicate(f, member, body):
            state.ignore("duplicate-contribution")
            return None
        asked_at = f.pulled.get(member.id, f.missed_last_merge.get(member.id))
        is_first = body.round == f.latest_round and f.pull_attempts == 1
        if asked_at is not None and is_first and not state.was_disconnected_since(member.id, asked_at):
            took_s = now - asked_at  # also of a late one: it is how long its way is
            member.min_answer_s = min(took_s, 1.25 * member.min_answer_s) if member.answer_time.count else took_s
            member.answer_time.add(took_s)
        refusal = self._refusal(f, member, body)
        if refusal is not None:
            state.send(member, RefuseContribution(body.round, state.count_reason(refusal)))
            is_fault = refusal.code in ("contribution-implausible", "contribution-invalid")
            return LearnerFault(member, refusal) if is_fault else None
        accepted = self._accepted(member, body)
        f.contributions[member.id] = accepted
        state.ledger.tell(member.id, body.trained)  # it may have overtaken the report of the same step
        state.effects.append(Accumulate(body.round, accepted))
        self.check_round(now, f)
        return None

    def _correct_baseline(self, f: Fragment, member: Member, body: Contribution) -> None:
        """The copy was made at the first boundary after the pull, so it tells how far the learner was at the opening
        even if its reports were late. Steps that it had taken by then do not count towards the next round."""
        if body.round == f.latest_round and f.is_scheduled and member.id in f.baseline_steps:
            f.baseline_steps[member.id] = max(f.baseline_steps[member.id], min(body.copied_at - 1, member.step))

    def _is_duplicate(self, f: Fragment, member: Member, body: Contribution) -> bool:
        return f.round == body.round and member.id in f.contributions

    def _accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
        weight = contribution_weight(body.tokens, body.steps)
        return AcceptedContribution(
            member.id,
            member.incarnation,
            body.copied_at,
            body.steps,
            body.tokens,
            body.trained,
            body.dropped,
            weight,
            body.consumed_samples,
        )

    def _refusal(self, f: Fragment, member: Member, body: Contribution) -> Reason | None:
        """Why this contribution cannot be merged; None if it can."""
        if f.round is None:
            return Reason("contribution-no-round", (f.id,))
        if body.round != f.round:
            return Reason("contribution-stale-round", (body.round.attempt, body.round.epoch, body.round.base))
        if f.phase not in (RoundPhase.PULLING, RoundPhase.GRACE):
            return Reason("contribution-late")
        if member.id not in f.pulled:
            return Reason("contribution-not-pulled", (member.id,))
        if body.problem is not None:
            return Reason("contribution-invalid", (body.problem,))
        if body.steps <= 0 or body.tokens <= 0:
            return Reason("contribution-no-steps")
        mark = f.merged_up_to.get(member.id)
        settled = mark.trained if mark is not None and mark.incarnation == member.incarnation else 0
        counted = body.steps <= body.copied_at and 0 <= body.dropped <= body.trained - body.tokens
        known = self._state.is_plausible(member, body.copied_at, body.trained) and settled + body.tokens <= body.trained
        known = known and self._leases.is_leased(member, body)
        if not counted or not known or not is_positive(contribution_weight(body.tokens, body.steps)):
            return Reason("contribution-implausible", (body.steps, body.tokens, body.copied_at))
        return None

    def check_round(self, now: float, f: Fragment) -> None:
        """Does the round have its quorum, is its grace over, is there anybody left to wait for?"""
        if f.phase is RoundPhase.PULLING:
            if self._has_quorum(f):
                self._enter_grace(now, f)
            elif not self.waiting(f):
                code, args = "round-quorum-lost", (len(f.contributions), self._state.config.quorum)
                self.abandon(now, f, Reason(code, args))
                return
        if f.phase is RoundPhase.GRACE:
            if not self.waiting(f):
                self._seal(now, f, Reason("sealed-all", (len(f.contributions),)))
            elif now >= f.grace_until:
                self._seal(now, f, Reason("sealed-grace-expired", (len(f.contributions), len(f.pulled))))

    def _has_quorum(self, f: Fragment) -> bool:
        """A last round wants everybody who was asked, as long as asking goes on: no later one takes up what it leaves,
        and nobody waits for it. So does any round want a learner that leaves."""
        state = self._state
        if f.pull_attempts < state.limits.max_pull_attempts:
            if f.round_is_final and self.waiting(f):
                return False
            if state.draining and self._draining.is_awaited(f):
                return False
        return len(f.contributions) >= state.config.quorum

    def _enter_grace(self, now: float, f: Fragment) -> None:
        state = self._state
        assert f.round is not None
        state.transition_round(f, "quorum-reached")
        f.quorum = state.config.quorum
        step_s = state.step_s()
        sync_time = state.sync_time()
        awaited_s = max((m.step_time.mean for m in self.waiting(f)), default=0.0)
        missed = [
            self._expected_answer_s(now, f, m)
            for m in self.waiting(f)
            if m.id in f.missed_last_merge and m.answer_time.count
        ]
        window_s, reason, late_s = compute_grace_window(
            state.config, len(f.contributions), step_s, awaited_s, missed, state.quorum_time, sync_time
        )
        terms = (step_s, max(step_s, awaited_s), state.quorum_time.mean, sync_time.mean, late_s)
        if not any(state.was_disconnected_since(i, f.opened_at) for i in f.contributions):
            state.quorum_time.add(now - f.opened_at)
        f.reason = state.count_reason(reason)
        f.grace_until = now + window_s
        state.effects.append(OpenGrace(f.round, window_s, *terms, reason))
        if window_s > 0:
            state.arm_timer(f.grace_until, "grace", f.id)

    def _expected_answer_s(self, now: float, f: Fragment, member: Member) -> float:
        """Until its contribution is here, if it is as quick as others of it were. One that took much longer, because
        the learner stood still meanwhile, says nothing about the next."""
        return member.min_answer_s - (now - f.pulled[member.id])

    def on_grace_timer(self, now: float, fragment: FragmentId) -> None:
        self.check_round(now, self._state.fragments[fragment])

    # ---------------------------------------------------------------------------------------------------- merging

    def _seal(self, now: float, f: Fragment, reason: Reason) -> None:
        state = self._state
        assert f.round is not None
        state.transition_round(f, "sealed")
        f.sealed_at = now
        f.missed_last_merge = {m.id: f.pulled[m.id] for m in self.waiting(f)}
        f.reason = state.count_reason(reason)
        contributions = tuple(f.contributions[i] for i in sorted(f.contributions))
        if state.download_times_known:
            self._choose_codec()
        state.effects.append(MergeRound(f.round, contributions, reason, state.codec))

    def _choose_codec(self) -> None:
        """Of this update and the next ones. Everybody holds the same bits, so everybody gets the same bytes."""
        state = self._state
        known = [member.download_s for member in state.live.values()]
        chosen = choose_update_codec(state.config, state.codec or CODECS[0], known, state.step_s())
        if chosen.reason is not None:
            state.codec = chosen.codec
            state.log("run", 0, chosen.reason.code, *chosen.reason.args)

    def on_download_time(self, now: float, member: Member, envelope: Envelope, body: DownloadTime) -> None:
        state = self._state
        if not is_positive(body.seconds):
            state.ignore("download-time-implausible")
            return
        member.download_s = body.seconds
        state.download_times_known = True

    def on_merge_done(self, now: float, event: MergeDone) -> None:
        f = self._merging(event.round)
        if f is not None:
            self._state.transition_round(f, "merged")
            f.merged = True
            f.reason = Reason("persisting", (f.version + 1,))
            self._save_version(f)

    def on_merge_failed(self, now: float, event: MergeFailed) -> None:
        f = self._merging(event.round)
        if f is not None:
            self.abandon(now, f, Reason("merge-failed", (event.cause,)))

    def _merging(self, round_id: RoundId) -> Fragment | None:
        f = self._reachable(round_id.fragment)
        asked = f is None or (f.round == round_id and f.phase is RoundPhase.MERGING)
        assert asked, f"merge of {round_id} was not asked for"
        return f

    def _reachable(self, fragment: FragmentId) -> Fragment | None:
        """Return the fragment, or None while its shard is away."""
        f = self._state.fragments[fragment]
        if f.unavailable:
            self._state.ignore("shard-unavailable")
            return None
        return f

    def _save_version(self, f: Fragment) -> None:
        state = self._state
        assert f.round is not None
        contributions = tuple(f.contributions[i] for i in sorted(f.contributions))
        marks = dict(f.merged_up_to)
        for a in contributions:
            marks[a.learner] = MergedUpTo(
                a.incarnation, f.version, a.copied_at, a.trained, a.dropped, a.consumed_samples
            )
        merged_tokens = state.ledger.merged(f.id) + sum(a.tokens for a in contributions)
        record = VersionRecord(f.id, f.version + 1, f.round, contributions, tuple(sorted(marks.items())), merged_tokens)
        state.effects.append(Persist(record))

    def on_persist_failed(self, now: float, event: PersistFailed) -> None:
        f = self._reachable(event.key.number)
        if f is not None:
            self._on_version_not_saved(now, f, event.cause)

    def _on_version_not_saved(self, now: float, f: Fragment, why: str) -> None:
        """A full or failing disk: say it, publish nothing, keep what is merged and try again."""
        state = self._state
        state.transition_round(f, "persist-failed")
        delay = backoff_s(f.save_attempts, f.id, state.limits)
        f.save_attempts += 1
        f.reason = state.log("fragment", f.id, "persist-failed", f.version + 1, why, delay)
        state.unsaved[f.id] = None
        state.arm_timer(now + delay, "save", f.id)

    def on_save_timer(self, now: float, fragment: FragmentId) -> None:
        state = self._state
        if fragment in state.unsaved:
            del state.unsaved[fragment]
            self._save_version(state.fragments[fragment])

    def save_unsaved(self) -> None:
        """The disk takes something again: nobody waits for the end of a delay that was meant for a full one."""
        state = self._state
        waiting, state.unsaved = state.unsaved, {}
        for fragment in waiting:
            self._save_version(state.fragments[fragment])

    def on_persisted(self, now: float, key: RecordKey) -> bool:
        """Publish a version that is durable. Return False if its shard is away: what that holds it says when it is
        back."""
        f = self._reachable(key.number)
        if f is None:
            return False
        assert f.phase is RoundPhase.MERGING and f.merged and key.version == f.version + 1, f"unasked {key}"
        self.on_version_saved(now, f)
        return True

    def on_version_saved(self, now: float, f: Fragment) -> None:
        state = self._state
        state.transition_round(f, "persisted")
        for a in f.contributions.values():
            f.merged_up_to[a.learner] = MergedUpTo(
                a.incarnation, f.version, a.copied_at, a.trained, a.dropped, a.consumed_samples
            )
            state.ledger.merge(f.id, a)
            if a.consumed_samples:
                state.leases.merge((a.learner, a.incarnation), a.consumed_samples)
        if state.draining:
            self._draining.on_version(f)
        f.last_contributors = tuple(sorted(f.contributions))
        f.version += 1
        f.attempt = 0
        f.merge_s = now - f.sealed_at
        f.published_at = now
        state.merges += 1
        f.reason = state.count_reason(Reason("published", (f.version, len(f.last_contributors))))
        f.round = None
        f.pulled = {}
        f.contributions = {}
        self._delivery.publish(now, f)
        state.transition_round(f, "publish-queued")
        if f.round_is_final:
            f.final = True
        if state.lease_closing:
            self._leases.settle()
        state.flight_limit = max_rounds_in_flight(state.config, state.step_s(), state.quorum_time, state.sync_time())
