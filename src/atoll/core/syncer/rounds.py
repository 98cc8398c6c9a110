"""Rounds and delivery.

A round takes a fragment from version v to v + 1, or changes nothing. Then every connected learner receives the newest
version, or its connection is closed.
"""

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
                self.deliver(now, m, f)

    def deliver(self, now: float, member: Member, f: Fragment) -> None:
        """Send the newest version of a fragment to a learner that does not have it.

        A newer version replaces an unacknowledged older one, so a learner has at most P unacknowledged versions.
        """
        received = self._state.received_version(member, f.id)
        if received >= f.version:
            return
        unacked = member.unacked.get(f.id)
        if f.unavailable:
            member.unacked[f.id] = UnackedPublish(f.version, now, 0)
            return
        tries = max(1, unacked.tries) if unacked is not None and unacked.version != f.version else 1
        member.unacked[f.id] = UnackedPublish(f.version, now, tries)
        is_update = received == f.version - 1 and received >= 0 and unacked is None
        self._send_version(member, f, base=received if is_update else None)
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
        for p, unacked in list(member.unacked.items()):
            if state.fragments[p].unavailable or now < unacked.sent_at + wait * 2.0 ** (unacked.tries - 1):
                continue
            if unacked.tries >= state.limits.max_publish_attempts:
                member.ack_time.add(now - unacked.sent_at)  # lower bound: see `Rounds.on_pull_timer`
                reason = Reason("member-publish-unacked", (unacked.version, p, unacked.tries))
                return LearnerFault(member, reason, closes_connection=True)
            member.unacked[p] = UnackedPublish(unacked.version, now, unacked.tries + 1)
            self._send_version(member, state.fragments[p], base=None)
        sent = [unacked for p, unacked in member.unacked.items() if not state.fragments[p].unavailable]
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
        is_new = body.version > state.received_version(member, f.id)
        if is_new:
            member.received[f.id] = body.version
        unacked = member.unacked.get(f.id)
        if unacked is None or unacked.version > body.version:
            return
        del member.unacked[f.id]
        if is_new and unacked.tries == 1:
            # After a retry it is unknown which transmission was acknowledged.
            member.ack_time.add(now - unacked.sent_at)
            newest = body.version == f.version and unacked.sent_at == f.published_at
            if newest and not state.was_disconnected_since(member.id, f.published_at):
                member.sync_time.add(now - f.published_at + f.merge_s)

    def on_resync(self, now: float, member: Member, envelope: Envelope, body: Resync) -> LearnerFault | None:
        state = self._state
        f = state.fragments.get(body.fragment)
        if f is None or body.received_version >= f.version or state.received_version(member, f.id) >= f.version:
            state.ignore("resync-not-needed")
            return None
        unacked = member.unacked.get(f.id)
        tries = 2 if unacked is None else unacked.tries + 1
        if f.unavailable:
            member.unacked.setdefault(f.id, UnackedPublish(f.version, now, 1))  # sent again when its shard reconnects
            return None
        if tries > state.limits.max_publish_attempts:
            reason = Reason("member-publish-unacked", (f.version, f.id, tries - 1))
            return LearnerFault(member, reason, closes_connection=True)
        member.unacked[f.id] = UnackedPublish(f.version, now, tries)
        self._send_version(member, f, base=None)
        self._watch_delivery(now, member)
        return None

    def send_unacked(self, now: float, f: Fragment) -> None:
        """Send a fragment whose shard has reconnected to every learner that waits for it."""
        for member in self._state.members.values():
            unacked = member.unacked.get(f.id)
            if unacked is not None:
                # An earlier transmission counts: an acknowledgement may be for either.
                member.unacked[f.id] = UnackedPublish(f.version, now, 2 if unacked.tries else 1)
                self._send_version(member, f, base=None)
                self._watch_delivery(now, member)


MAX_DRAIN_ROUNDS = 8
"""Unscheduled rounds of one fragment that are opened for one draining learner and wait for it.

Two are enough if no message is lost: one for the copy in flight and one for the work after it. The limit stops a
learner that requests rounds and contributes nothing from delaying the others.
"""


class DrainingLearners:
    """Track the unmerged work of draining learners.

    A draining learner takes no more steps, so its fragments would become due only by the steps of others, and without
    others never. A round opens immediately for every fragment that it lists, with all learners that have new steps. The
    quorum is the usual one, and the round waits for the draining learner until the last pull attempt.
    """

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def record(self, member: Member, named: tuple[FragmentId, ...]) -> None:
        """Record the fragments that a draining learner reports, except those that are already merged."""
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
        """Return whether a durable version contains all tokens that the learner has reported."""
        last, account = f.merged_up_to.get(member.id), self._state.ledger.accounts[member.id]
        return last is not None and last.incarnation == member.incarnation and last.trained >= account.trained

    def needs_round(self, f: Fragment) -> bool:
        """Return whether to open a round for a draining learner with unmerged work in this fragment."""
        return not f.unavailable and any(self._rounds_of(f, m) < MAX_DRAIN_ROUNDS for m in self._draining_with(f))

    def is_awaited(self, f: Fragment) -> bool:
        """Return whether the open round still waits for a draining learner."""
        return any(
            m.id in f.pulled and m.id not in f.contributions and self._rounds_of(f, m) <= MAX_DRAIN_ROUNDS
            for m in self._draining_with(f)
        )

    def _draining_with(self, f: Fragment) -> list[Member]:
        return [m for m in self._state.draining.values() if f.id in m.unmerged and m.state is MemberState.LIVE]

    def _rounds_of(self, f: Fragment, member: Member) -> int:
        return member.drain_rounds.get(f.id, 0)

    def on_version(self, f: Fragment) -> None:
        """Update the draining learners after a durable version. Work after their copy is still unmerged."""
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
        """Open every round that is due, up to the limit of rounds in flight."""
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
        """Open all rounds for draining learners, without the limit: they cannot wait. The schedule does not change."""
        state = self._state
        for f in list(state.fragments.values()):
            if f.phase is RoundPhase.IDLE and self._draining.needs_round(f):
                self._open(now, f, is_scheduled=f.id in state.retrying)

    def _open_final(self, now: float) -> None:
        """Open the last rounds of all fragments at the same time, because no later rounds need the bandwidth."""
        for f in self._state.fragments.values():
            if f.phase is RoundPhase.IDLE and not f.final:
                f.required_steps = 1
                if self._is_due(f) or self._draining.needs_round(f):
                    self._open(now, f, final=True)

    def _oldest_idle_fragment(self) -> Fragment | None:
        """Return the idle fragment whose last round opened longest ago, unless its shard is unavailable."""
        state = self._state
        for f in state.by_opening.values():
            if f.phase is RoundPhase.IDLE and f.id not in state.retrying and not f.unavailable:
                return f
        return None

    def _is_due(self, f: Fragment) -> bool:
        """Return whether K live learners have taken H steps since the last round of this fragment opened."""
        return not f.unavailable and self.count_ready_learners(f) >= self._state.config.quorum

    def count_ready_learners(self, f: Fragment) -> int:
        """Count the live learners with enough steps since the last opening.

        Delayed reports arrive in a burst and include steps from before the opening. So steps that would have taken more
        than twice the time since the opening do not count.
        """
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
        """Return the live learners with at least one unmerged step on the fragment."""
        return [m for m in self._state.live.values() if self._has_new_steps(f, m)]

    def _has_new_steps(self, f: Fragment, member: Member) -> bool:
        """Return whether the learner has unmerged steps. A draining learner reports its fragments."""
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
        """Reset the step count for the next scheduled round.

        An unscheduled round, opened for a draining learner, does not reset it: learners outside that merge would wait
        up to H extra steps.
        """
        state = self._state
        f.scheduled_at = now
        # A learner that did not report at this moment is within a step, which does not count as taken since.
        # A suspected learner may recover, and its steps before this opening must not count then.
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
        """Arm the pull timeout of the learner that completes the quorum. Slower learners do not delay it."""
        state = self._state
        waits = sorted(state.pull_timeout(m) for m in self.waiting(f))
        missing = max(1, state.config.quorum - len(f.contributions))
        wait = waits[min(missing, len(waits)) - 1] if waits else state.limits.min_wait_s
        f.next_pull_at = now + wait * 2.0 ** (f.pull_attempts - 1)
        state.arm_timer(f.next_pull_at, "pull", f.id)

    def pull_late_learner(self, now: float, member: Member) -> None:
        """Pull a learner whose first step on a fragment ends while the round still waits for its quorum."""
        state = self._state
        for f in state.pulling.values():
            if member.id not in f.pulled and self._has_new_steps(f, member):
                assert f.round is not None
                f.pulled[member.id] = now
                state.send(member, Pull(f.round))

    def waiting(self, f: Fragment) -> list[Member]:
        """Return the pulled learners that are live and have not contributed."""
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
                # The wait is a lower bound of the answer time. Without this sample, a timeout that is too short would
                # abandon every round before its contributions arrive, and would never be corrected.
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
            self.check_round(now, f)  # after the last pull attempt, the round stops waiting for more than a quorum

    def abandon(self, now: float, f: Fragment, reason: Reason, trigger: str = "") -> None:
        """Abandon a round. Nothing is merged, and every learner keeps its progress.

        The steps until the fragment is due again double with each attempt, up to H: pulling unreachable learners again
        immediately would only fill their links.
        """
        state = self._state
        assert f.round is not None
        state.effects.append(DiscardRound(f.round, state.count_reason(reason)))
        state.transition_round(f, trigger or ("abandoned" if f.phase is RoundPhase.PULLING else "merge-failed"))
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
        pulled_at = f.pulled.get(member.id, f.missed_last_merge.get(member.id))
        is_first = body.round == f.latest_round and f.pull_attempts == 1
        if pulled_at is not None and is_first and not state.was_disconnected_since(member.id, pulled_at):
            took_s = now - pulled_at  # late contributions too: they measure the link
            member.min_answer_s = min(took_s, 1.25 * member.min_answer_s) if member.answer_time.count else took_s
            member.answer_time.add(took_s)
        refusal = self._refusal(f, member, body)
        if refusal is not None:
            state.send(member, RefuseContribution(body.round, state.count_reason(refusal)))
            is_fault = refusal.code in ("contribution-implausible", "contribution-invalid")
            return LearnerFault(member, refusal) if is_fault else None
        accepted = self._to_accepted(member, body)
        f.contributions[member.id] = accepted
        state.ledger.record_trained(member.id, body.trained)  # the report of the same step may arrive later
        state.effects.append(Accumulate(body.round, accepted))
        self.check_round(now, f)
        return None

    def _correct_baseline(self, f: Fragment, member: Member, body: Contribution) -> None:
        """Raise the baseline to the step of the copy.

        The copy was made at the first boundary after the pull, so it shows how many steps the learner had taken at the
        opening, even if its reports were late. Those steps do not count towards the next round.
        """
        if body.round == f.latest_round and f.is_scheduled and member.id in f.baseline_steps:
            f.baseline_steps[member.id] = max(f.baseline_steps[member.id], min(body.copied_at - 1, member.step))

    def _is_duplicate(self, f: Fragment, member: Member, body: Contribution) -> bool:
        return f.round == body.round and member.id in f.contributions

    def _to_accepted(self, member: Member, body: Contribution) -> AcceptedContribution:
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
        """Return why this contribution cannot be merged, or None if it can."""
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
        last = f.merged_up_to.get(member.id)
        settled = last.trained if last is not None and last.incarnation == member.incarnation else 0
        is_consistent = body.steps <= body.copied_at and 0 <= body.dropped <= body.trained - body.tokens
        is_possible = (
            self._state.is_plausible(member, body.copied_at, body.trained)
            and settled + body.tokens <= body.trained
            and self._leases.is_leased(member, body)
        )
        if not is_consistent or not is_possible or not is_positive(contribution_weight(body.tokens, body.steps)):
            return Reason("contribution-implausible", (body.steps, body.tokens, body.copied_at))
        return None

    def check_round(self, now: float, f: Fragment) -> None:
        """Advance the round if it has its quorum, if its grace window is over, or if no learner is left to wait for."""
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
        """Return whether the round may enter its grace window.

        Until the last pull attempt, the final round of a fragment waits for all pulled learners, because no later round
        takes their work. In the same way every round waits for draining learners.
        """
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
        """Return the expected time until a contribution arrives, from the fastest recent one of the learner: a slow one
        may be due to a pause."""
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
        """Choose the codec of updates. All learners receive the same bytes and hold the same bits."""
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
        assert f is None or (f.round == round_id and f.phase is RoundPhase.MERGING), f"unexpected merge of {round_id}"
        return f

    def _reachable(self, fragment: FragmentId) -> Fragment | None:
        """Return the fragment, or None while its shard is unavailable."""
        f = self._state.fragments[fragment]
        if f.unavailable:
            self._state.ignore("shard-unavailable")
            return None
        return f

    def _save_version(self, f: Fragment) -> None:
        state = self._state
        assert f.round is not None
        contributions = tuple(f.contributions[i] for i in sorted(f.contributions))
        merged_up_to = dict(f.merged_up_to)
        for a in contributions:
            merged_up_to[a.learner] = MergedUpTo(
                a.incarnation, f.version, a.copied_at, a.trained, a.dropped, a.consumed_samples
            )
        merged_tokens = state.ledger.merged(f.id) + sum(a.tokens for a in contributions)
        last = tuple(sorted(merged_up_to.items()))
        record = VersionRecord(f.id, f.version + 1, f.round, contributions, last, merged_tokens)
        state.effects.append(Persist(record))

    def on_persist_failed(self, now: float, event: PersistFailed) -> None:
        f = self._reachable(event.key.number)
        if f is not None:
            self._on_version_not_saved(now, f, event.cause)

    def _on_version_not_saved(self, now: float, f: Fragment, cause: str) -> None:
        """Log a full or failing disk and retry. The merged version is kept and not published."""
        state = self._state
        state.transition_round(f, "persist-failed")
        delay = backoff_s(f.save_attempts, f.id, state.limits)
        f.save_attempts += 1
        f.reason = state.log("fragment", f.id, "persist-failed", f.version + 1, cause, delay)
        state.unsaved[f.id] = None
        state.arm_timer(now + delay, "save", f.id)

    def on_save_timer(self, now: float, fragment: FragmentId) -> None:
        state = self._state
        if fragment in state.unsaved:
            del state.unsaved[fragment]
            self._save_version(state.fragments[fragment])

    def save_unsaved(self) -> None:
        """Retry all failed writes now that a write has succeeded."""
        state = self._state
        waiting, state.unsaved = state.unsaved, {}
        for fragment in waiting:
            self._save_version(state.fragments[fragment])

    def on_persisted(self, now: float, key: RecordKey) -> bool:
        """Publish a durable version. Return False if its shard is unavailable: it reports its versions when it
        reconnects."""
        f = self._reachable(key.number)
        if f is None:
            return False
        assert f.phase is RoundPhase.MERGING and f.merged and key.version == f.version + 1, f"unexpected {key}"
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
