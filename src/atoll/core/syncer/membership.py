"""Members of a run: admission, connections, silence, loss and return, reports, and the choice of peers that send
optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.policy import Estimate, backoff_s, retry_timeout
from atoll.core.protocol import (
    CloseConnection,
    DrainRequest,
    Envelope,
    Halt,
    Hello,
    LearnerDisconnected,
    Left,
    MembersRecord,
    NoPeer,
    OptimizerState,
    PeerChosen,
    Persist,
    Ping,
    Pong,
    ProvideState,
    Pull,
    Ready,
    Refuse,
    Report,
    StateRequest,
    StoreFenced,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RoundPhase, RunStage
from atoll.core.syncer.controls import Controls, Finishing
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.rounds import Delivery, DrainingLearners, Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import CONNECTED, LearnerFault, Member, SyncerState
from atoll.core.types import (
    MAX_STEP_SECONDS,
    MAX_TOKENS,
    MAX_TOKENS_PER_STEP,
    NO_VERSION,
    LearnerId,
    describe_first_difference,
)

FOREIGN_RUN_CODES = ("refused-id", "refused-run", "refused-fingerprint")
MIN_GAP_SAMPLES = 4
"""Measured gaps between messages of a learner before its silence limit is derived from them."""


@dataclass(eq=False)
class Membership:
    """Admit learners, record their reports, detect their loss, and let them return."""

    _state: SyncerState
    _rounds: Rounds
    _delivery: Delivery
    _leases: DataLeases
    _snapshots: Snapshots
    _draining: DrainingLearners
    _controls: Controls
    _finishing: Finishing
    _shutdown: Shutdown

    # ---------------------------------------------------------------------------------------------------- hello

    def on_hello(self, now: float, envelope: Envelope, body: Hello) -> None:
        state = self._state
        member = state.members.get(envelope.learner)
        refusal = self._find_hello_refusal(envelope, body, member)
        if envelope.epoch > state.epoch and (refusal is None or refusal.code not in FOREIGN_RUN_CODES):
            self._on_superseded(envelope.epoch)  # epochs of other runs are ignored
            return
        if refusal is not None:
            current = member.incarnation if member is not None else 0
            sender = Member(envelope.learner, envelope.incarnation, envelope.session)
            sender.seen_tick = envelope.tick
            final = refusal.code != "refused-full"
            state.send(sender, Refuse(state.count_reason(refusal), current, final))
            return
        if member is not None and member.incarnation == envelope.incarnation:
            self._welcome_back(now, member, envelope, body)
            return
        self._admit(now, member, envelope, body)

    def _find_hello_refusal(self, envelope: Envelope, body: Hello, member: Member | None) -> Reason | None:
        state = self._state
        if envelope.learner < 1:
            return Reason("refused-id", (envelope.learner,))
        if not (body.step >= 0 and 0 <= body.trained <= min(MAX_TOKENS, body.step * MAX_TOKENS_PER_STEP)):
            return Reason("refused-implausible", (body.step, body.trained))
        if body.run_id != state.config.run_id:
            return Reason("refused-run", (state.config.run_id, body.run_id))
        if body.fingerprint != state.config.fingerprint or len(body.received) != len(state.fragments):
            return Reason("refused-fingerprint", (self._first_difference(body),))
        if member is not None and envelope.incarnation < member.incarnation:
            return Reason("refused-incarnation", (envelope.incarnation, member.incarnation))
        known = member is not None and member.incarnation == envelope.incarnation
        if known and member is not None and member.state is MemberState.QUARANTINED:
            return Reason("refused-quarantined", (str(member.reason),))
        if known and member is not None and member.state is MemberState.LOST and self._is_durably_lost(member):
            return Reason("refused-lost", (member.incarnation,))
        if not known and state.stage is not RunStage.RUNNING:
            return Reason("refused-finished")
        if member is None and len(state.members) >= state.limits.max_learners:
            return Reason("refused-full", (state.limits.max_learners,))
        return None

    def _first_difference(self, body: Hello) -> str:
        state = self._state
        if body.fingerprint != state.config.fingerprint:
            return describe_first_difference(state.config.fingerprint, body.fingerprint)
        return f"{len(body.received)} fragments where the run has {len(state.fragments)}"

    def _admit(self, now: float, old: Member | None, envelope: Envelope, body: Hello) -> None:
        """Admit a new incarnation once the record is durable. Its predecessor is removed immediately.

        Without durability: (1) incarnation 2 is welcomed, (2) the syncer is killed, (3) incarnation 1, which was
        disconnected, sends a hello to the restarted syncer and counts as current, (4) both train as one learner.
        """
        state = self._state
        member = Member(envelope.learner, envelope.incarnation, envelope.session)
        member.seen_tick = envelope.tick
        member.last_seen_at = now
        member.hello = body
        if old is not None:
            state.log("learner", old.id, "member-superseded", old.incarnation, envelope.incarnation)
            state.transition_member(old, "superseded")
            member.state = old.state
            # Armed timers belong to the id and continue for the new process. Otherwise each restart would add timers.
            member.silence_check_at = old.silence_check_at
            member.publish_timer_armed = old.publish_timer_armed
            member.absence_timer_armed = old.absence_timer_armed
            member.drained_by = old.drained_by
            self._retire(now, old, "superseded")
        else:
            state.transition_member(member, "hello")
        state.members[member.id] = member
        state.ledger.open(member.id, member.incarnation)
        state.log("learner", member.id, "member-admitting", member.incarnation)
        for f in state.fragments.values():
            f.baseline_steps.pop(member.id, None)  # they refer to steps of another process
        self._save(now)
        member.members_record_serial = self._next_serial()
        if old is not None:
            self._leases.close(old, member.members_record_serial)

    def _retire(self, now: float, member: Member, cause: str) -> None:
        """Close the ledger account of an ended incarnation and remove it from everything in progress."""
        state = self._state
        if member.id in state.ledger.accounts:
            state.ledger.close(member.id, cause)
        self._forget(now, member)

    def _forget(self, now: float, member: Member) -> None:
        """Remove an incarnation from everything in progress, except accepted contributions: sums cannot be undone."""
        state = self._state
        member.unacked.clear()
        state.draining.pop(member.id, None)
        self._snapshots.exclude(now, member.id)
        for f in list(state.fragments.values()):
            if member.id in f.pulled and f.phase in (RoundPhase.PULLING, RoundPhase.GRACE):
                if member.id not in f.contributions:
                    del f.pulled[member.id]
                self._rounds.check_round(now, f)

    def _save(self, now: float) -> None:
        """Save the members, one record at a time. Changes during a write go into the next record."""
        state = self._state
        if state.members_saving:
            state.members_dirty = True
            return
        state.members_saving = True
        state.members_dirty = False
        state.members_serial += 1
        members = [m for _, m in sorted(state.members.items())]
        incarnations = tuple((m.id, m.incarnation) for m in members)
        left = tuple(m.id for m in members if m.id not in state.ledger.accounts)
        lost = tuple(m.id for m in members if m.state is MemberState.LOST)
        retired = state.ledger.closed_trained
        state.effects.append(Persist(MembersRecord(state.members_serial, incarnations, left, retired, lost)))

    def _next_serial(self) -> int:
        """Return the serial of the record that will contain the current members."""
        state = self._state
        return state.members_serial + (1 if state.members_dirty else 0)

    def on_saved(self, now: float, serial: int) -> None:
        state = self._state
        state.members_saving = False
        state.members_attempts = 0
        state.members_durable = serial
        if state.lease_closing:
            self._leases.settle()
        for member in list(state.members.values()):
            # A member whose hello arrived after the record was written waits for the next record.
            if member.state is not MemberState.ADMITTING or member.members_record_serial > serial:
                continue
            if member.hello is None:
                state.transition_member(member, "disconnected")  # its connection closed meanwhile
                self._watch_absence(now, member)
            else:
                state.transition_member(member, "admitted-training" if member.hello.training else "admitted")
                self._welcome(now, member, member.hello)
        if state.members_dirty:
            self._save(now)

    def on_not_saved(self, now: float, cause: str) -> None:
        state = self._state
        state.members_saving = False
        delay = backoff_s(state.members_attempts, 0, state.limits)
        state.members_attempts += 1
        state.log("run", 0, "admission-failed", cause, delay)
        state.arm_timer(now + delay, "members")

    def on_save_timer(self, now: float, key: int) -> None:
        if not self._state.members_saving:
            self._save(now)

    def _welcome_back(self, now: float, member: Member, envelope: Envelope, body: Hello) -> None:
        """Welcome the same process on a new connection, or again because the first welcome was lost."""
        state = self._state
        if envelope.session < member.session:
            state.ignore("stale-session")
            return
        member.seen_tick = max(member.seen_tick, envelope.tick)
        fresh_link = envelope.session > member.session
        if member.state is MemberState.LEFT:
            state.ignore("hello-after-left")
            return
        if member.state is MemberState.LOST:
            state.ignore("hello-before-loss-durable")  # its next hello is refused
            return
        if member.state is MemberState.ADMITTING:
            member.session = envelope.session
            member.hello = body
            return
        if fresh_link and member.state is not MemberState.DISCONNECTED:
            # The learner detected the broken connection before the syncer did.
            self._disconnect(now, member, Reason("member-disconnected", ("replaced by a newer connection",)))
        if not fresh_link and member.state is MemberState.DISCONNECTED:
            state.ignore("hello-on-closed-connection")
            return
        member.session = envelope.session
        if member.state is MemberState.DISCONNECTED:
            state.transition_member(member, "resumed" if body.training else "resumed-joining")
            state.log("learner", member.id, "member-resumed", member.incarnation)
        self._welcome(now, member, body)

    def _welcome(self, now: float, member: Member, body: Hello) -> None:
        state = self._state
        member.hello = None
        member.last_seen_at = member.reconnected_at = now
        member.step = max(member.step, body.step)
        self._reset_step_counts(member)
        member.training = body.training
        member.finish_attempts = 0
        state.ledger.record_trained(member.id, body.trained)
        member.received = {p: v for p, v in zip(state.fragments, body.received, strict=True) if v != NO_VERSION}
        member.unacked.clear()
        state.send(member, Welcome(state.versions(), state.progress(), state.step_s()))
        self._controls.resend_request(now, member)
        if member.state is MemberState.JOINING:
            state.log("learner", member.id, "member-joining", member.incarnation)
        for f in state.fragments.values():
            self._delivery.deliver(now, member, f)
            # A round that opened before the connection broke still waits for a contribution.
            if f.phase in (RoundPhase.PULLING, RoundPhase.GRACE) and member in self._rounds.waiting(f):
                assert f.round is not None
                state.send(member, Pull(f.round))
        self._shutdown.resend_finish(member)
        self._watch_silence(now + self.silence_limit(member), member)

    def _reset_step_counts(self, member: Member) -> None:
        """Reset the step counts for fragments that were opened while the learner was disconnected.

        It is unknown which of its steps came after those openings. For all other fragments the count continues:
        otherwise, on a link that breaks more often than every H steps, the last fragments would never be due.
        """
        if not member.was_welcomed:
            member.was_welcomed = True
            member.first_step = member.step
            return
        for f in self._state.fragments.values():
            if f.scheduled_at >= member.disconnected_at:
                f.baseline_steps[member.id] = member.step

    # ---------------------------------------------------------------------------------------------------- messages

    def find_sender(self, envelope: Envelope) -> Member | None:
        """Return the member that sent this message, or None if it belongs to another process, connection or epoch."""
        state = self._state
        if envelope.epoch > state.epoch:
            self._on_superseded(envelope.epoch)
            return None
        member = state.members.get(envelope.learner)
        if member is None or not self._is_current(member, envelope):
            state.ignore("stale-incarnation")
            return None
        if member.state not in CONNECTED:
            state.ignore("not-a-member")
            return None
        return member

    def _is_current(self, member: Member, envelope: Envelope) -> bool:
        return (
            envelope.incarnation == member.incarnation
            and envelope.session == member.session
            and envelope.epoch == self._state.epoch
        )

    def record_message(self, now: float, member: Member, envelope: Envelope) -> None:
        state = self._state
        if envelope.tick > member.seen_tick:
            member.seen_tick = envelope.tick
        silent_s = now - member.last_seen_at
        if not state.may_be_paused(member):
            member.message_gap.add(silent_s)
        member.last_seen_at = now
        if member.message_gap.count == MIN_GAP_SAMPLES:
            self._watch_silence(now + self.silence_limit(member), member)  # until now its limit was the initial one
        if member.state is MemberState.SUSPECT:
            member.reconnected_at = now
            state.transition_member(member, "recovered")
            state.log("learner", member.id, "member-recovered", silent_s)

    def on_ping(self, now: float, member: Member, envelope: Envelope, body: Ping) -> None:
        self._state.send(member, Pong(body.serial))

    # ---------------------------------------------------------------------------------------------------- silence

    def silence_limit(self, member: Member) -> float:
        """Return the silence after which a member is suspected: four times the high value of its message gaps.

        It is at least four times each of these:

        - its step time: delayed messages arrive in a burst, which makes the gaps look short;
        - `min_wait_s`: a busy machine can delay a learner with short steps for longer than its steps;
        - its answer time: on a long and lossy link a message is retransmitted after more than a round trip, and again
          after twice as long.
        """
        state = self._state
        if member.message_gap.count < MIN_GAP_SAMPLES:
            return state.limits.initial_wait_s
        lower_bound = 4 * max(member.step_time.mean, member.answer_time.mean, state.limits.min_wait_s)
        lower_bound = min(lower_bound, state.limits.max_wait_s)
        limit = max(retry_timeout(member.message_gap, 4, state.limits), lower_bound)
        return max(limit, state.limits.initial_wait_s) if state.may_be_paused(member) else limit

    def _watch_silence(self, at: float, member: Member) -> None:
        """Schedule a silence check of a member, unless an earlier one is scheduled. Ignore a later one."""
        if member.silence_check_at is None or at < member.silence_check_at:
            member.silence_check_at = at
            self._state.arm_timer(at, "silence", member.id)

    def on_silence_timer(self, now: float, learner: LearnerId) -> None:
        state = self._state
        member = state.members.get(learner)
        if member is None or member.silence_check_at is None or now < member.silence_check_at:
            return
        member.silence_check_at = None
        if member.state not in CONNECTED:
            return
        limit = self.silence_limit(member)
        # A joining learner downloads a whole model and sends few messages, so only a very long silence counts.
        if member.state is MemberState.JOINING:
            limit = state.limits.max_wait_s
        silent_s = now - member.last_seen_at
        if silent_s >= limit:
            if member.state is MemberState.LIVE:
                state.transition_member(member, "silent")
                state.log("learner", member.id, "member-suspected", silent_s, limit)
                self._stop_waiting_for(now, member)
            if silent_s >= 8 * limit or member.state is MemberState.JOINING:
                self._close_connection(now, member, Reason("member-timed-out", (silent_s,)))
                return
        due = member.last_seen_at + limit if silent_s < limit else now + limit
        if member.state is MemberState.JOINING:
            due = min(due, now + state.limits.initial_wait_s)  # when it starts to train, a shorter limit applies
        self._watch_silence(max(due, now + state.limits.min_wait_s), member)

    def _stop_waiting_for(self, now: float, member: Member) -> None:
        """Stop rounds from waiting for a learner that is not live. Its contribution counts if it arrives in time."""
        for f in list(self._state.fragments.values()):
            if member.id in f.pulled and f.phase in (RoundPhase.PULLING, RoundPhase.GRACE):
                self._rounds.check_round(now, f)

    def excuse_silence(self, stalled_s: float) -> None:
        """Exclude a stall of the syncer process from the silence of all learners."""
        state = self._state
        state.log("run", 0, "syncer-stalled", stalled_s)
        for member in state.members.values():
            member.last_seen_at += stalled_s
            member.absent_since += stalled_s

    # ---------------------------------------------------------------------------------------------------- loss

    def on_disconnected(self, now: float, event: LearnerDisconnected) -> None:
        state = self._state
        member = state.members.get(event.learner)
        if member is None or (member.incarnation, member.session) != (event.incarnation, event.session):
            state.ignore("stale-session")
            return
        if member.state is MemberState.ADMITTING:
            member.hello = None  # its admission continues; it will reconnect
        elif member.state in CONNECTED:
            self._disconnect(now, member, Reason("member-disconnected", (event.cause,)))

    def handle_fault(self, now: float, fault: LearnerFault) -> None:
        if fault.closes_connection:
            self._close_connection(now, fault.member, fault.reason)
        else:
            self._strike(now, fault.member, fault.reason)

    def _close_connection(self, now: float, member: Member, reason: Reason) -> None:
        """Close a connection. The learner reconnects as the same incarnation when it can."""
        self._state.effects.append(CloseConnection(member.id, member.incarnation, member.session, reason))
        self._disconnect(now, member, reason)

    def _disconnect(self, now: float, member: Member, reason: Reason) -> None:
        state = self._state
        member.reason = state.log("learner", member.id, reason.code, *reason.args)
        state.transition_member(member, "disconnected")
        member.disconnected_at = now
        self._watch_absence(now, member)
        member.unacked.clear()
        self._snapshots.exclude(now, member.id)
        self._stop_waiting_for(now, member)
        self._shutdown.check_end(now)

    def on_leave(self, now: float, member: Member, envelope: Envelope, body: Left) -> None:
        state = self._state
        member.reason = state.log("learner", member.id, "member-left", body.cause)
        member.drained_by = ""
        state.transition_member(member, "left")
        self._retire(now, member, "left")
        self._save(now)
        self._leases.close(member, self._next_serial())
        self._shutdown.check_end(now)

    def _strike(self, now: float, member: Member, reason: Reason) -> None:
        state = self._state
        member.strikes += 1
        if member.strikes >= state.limits.max_strikes and member.state is MemberState.LIVE:
            member.reason = state.log("learner", member.id, "member-quarantined", member.strikes, str(reason))
            state.transition_member(member, "quarantined")
            self._forget(now, member)
            self._watch_absence(now, member)
            # It receives the reason when it reconnects.
            state.effects.append(CloseConnection(member.id, member.incarnation, member.session, reason))

    def _watch_absence(self, now: float, member: Member) -> None:
        """Arm a timer that detects how long a member is disconnected. There is one timer per learner id."""
        state = self._state
        member.absent_since = now
        if not member.absence_timer_armed:
            member.absence_timer_armed = True
            state.arm_timer(now + state.limits.lost_after_s, "gone", member.id)

    def watch_absences(self, now: float) -> None:
        """Watch all disconnected members from now on: a restarted syncer does not know when they disconnected."""
        for member in self._state.members.values():
            if member.state is MemberState.DISCONNECTED:
                self._watch_absence(now, member)

    def on_absence_timer(self, now: float, learner: LearnerId) -> None:
        state = self._state
        member = state.members.get(learner)
        if member is None or not member.absence_timer_armed:
            return
        member.absence_timer_armed = False
        # At the end of a run nothing is leased any more, and a returning learner receives `Finish`.
        if (
            member.state not in (MemberState.DISCONNECTED, MemberState.QUARANTINED)
            or state.stage is not RunStage.RUNNING
        ):
            return
        due = member.absent_since + state.limits.lost_after_s
        if now < due:
            member.absence_timer_armed = True
            state.arm_timer(due, "gone", member.id)
            return
        self._expire(now, member, now - member.absent_since)

    def _expire(self, now: float, member: Member, disconnected_s: float) -> None:
        """Mark an incarnation as lost, close its account, and return its leases once the record is durable.

        The incarnation must not rejoin:

        1. Learner 1 is frozen. Its samples are leased to learner 2 and merged.
        2. Learner 1 wakes up and continues as the same incarnation.
        3. Its next contribution contains the same samples, which are merged twice.
        """
        state = self._state
        member.drained_by = ""
        args = (disconnected_s, state.limits.lost_after_s, member.incarnation)
        member.reason = state.log("learner", member.id, "member-expired", *args)
        state.transition_member(member, "expired")
        self._retire(now, member, "lost")
        self._save(now)
        member.members_record_serial = self._next_serial()
        self._leases.close(member, member.members_record_serial)

    def _is_durably_lost(self, member: Member) -> bool:
        return member.members_record_serial <= self._state.members_durable

    def _on_superseded(self, epoch: int) -> None:
        """Stop this process: a syncer of a later epoch has taken over, so it must not write another version."""
        state = self._state
        if state.stage is not RunStage.SUPERSEDED:
            state.transition_run("superseded")
            state.halted = True
            reason = state.count_reason(Reason("superseded-epoch", (epoch, state.epoch)))
            for member in state.members.values():
                if member.state in CONNECTED:
                    state.effects.append(CloseConnection(member.id, member.incarnation, member.session, reason))
            state.effects.append(Halt(reason))

    def on_fenced(self, now: float, event: StoreFenced) -> None:
        self._on_superseded(event.epoch)

    # ---------------------------------------------------------------------------------------------------- training

    def on_report(self, now: float, member: Member, envelope: Envelope, body: Report) -> LearnerFault | None:
        state = self._state
        steps = body.step - member.step
        if steps <= 0:
            return None
        plausible = state.is_plausible(member, body.step, body.trained) and 0 <= body.step_time_s < MAX_STEP_SECONDS
        if steps > state.limits.max_steps_per_report or not plausible:
            return LearnerFault(
                member, state.count_reason(Reason("report-implausible", (steps, body.trained, body.step_time_s)))
            )
        if member.state is MemberState.JOINING:
            self._start_training(member, state.count_reason(Reason("state-kept")))  # its `Ready` was lost
        member.step = body.step
        member.reported_at = now
        member.min_step_s = (
            min(body.step_time_s, 1.1 * member.min_step_s) if member.step_time.count else body.step_time_s
        )
        state.ledger.record_trained(member.id, body.trained)
        member.step_time.add(body.step_time_s)
        if member.state is MemberState.LIVE:
            if state.stage is RunStage.RUNNING:
                self._finishing.check_budget(now)
            self._rounds.pull_late_learner(now, member)
            self._rounds.open_due_rounds(now)
        return None

    def on_ready(self, now: float, member: Member, envelope: Envelope, body: Ready) -> None:
        if member.state is not MemberState.JOINING:
            self._state.ignore("duplicate-ready")
            return
        self._start_training(member, body.state_source)
        self._rounds.open_due_rounds(now)

    def on_leaving(self, now: float, member: Member, envelope: Envelope, body: DrainRequest) -> LearnerFault | None:
        """Handle a drain request. A delayed or duplicate request must not list merged work again, and neither must one
        that was sent before the newest version arrived."""
        state = self._state
        if envelope.tick <= member.drain_tick:
            state.ignore("stale-drain-request")
            return None
        steps = body.step - member.step
        if steps > state.limits.max_steps_per_report or not state.is_plausible(member, body.step, body.trained):
            return LearnerFault(member, state.count_reason(Reason("report-implausible", (steps, body.trained, 0.0))))
        member.drain_tick = envelope.tick
        member.step = max(member.step, body.step)
        state.ledger.record_trained(member.id, body.trained)
        if member.state is MemberState.JOINING:
            self._start_training(member, state.count_reason(Reason("state-kept")))  # its `Ready` was lost
        self._draining.record(member, body.unmerged)
        self._rounds.pull_late_learner(now, member)
        for f in list(state.pulling.values()):
            if member.id in f.pulled:
                self._rounds.check_round(now, f)  # it need not wait for a fragment that is no longer listed
        self._rounds.open_due_rounds(now)
        return None

    def _start_training(self, member: Member, state_source: Reason) -> None:
        state = self._state
        state.transition_member(member, "ready")
        member.training = True
        member.message_gap = Estimate()  # gaps while joining do not predict gaps while training
        state.log("learner", member.id, "member-ready", member.incarnation, str(state_source))

    # ---------------------------------------------------------------------------------------------------- peers

    def on_state_request(self, now: float, member: Member, envelope: Envelope, body: StateRequest) -> None:
        state = self._state
        peer = self._choose_peer(member, body.tried_peers)
        if peer is None:
            new_run = state.merges == 0 and not body.tried_peers
            reason = Reason("peer-new-run") if new_run else Reason("peer-none")
            state.send(member, NoPeer(state.count_reason(reason), new_run))
            return
        state.log("learner", member.id, "peer-chosen", peer.id, member.id)
        state.send(member, PeerChosen(peer.id))
        state.send(peer, ProvideState(member.id, member.incarnation, state.versions()))

    def _choose_peer(self, member: Member, tried: tuple[LearnerId, ...]) -> Member | None:
        """Choose a live learner that is training: preferably one that is not draining, then with the fewest outdated
        fragments, then with the lowest id."""
        candidates = [m for m in self._state.live.values() if m.id != member.id and m.id not in tried and m.step > 0]
        return min(candidates, key=self._lag, default=None)

    def _lag(self, member: Member) -> tuple[bool, int, LearnerId]:
        behind = sum(1 for p, f in self._state.fragments.items() if member.received.get(p, NO_VERSION) < f.version)
        return member.is_draining, behind, member.id

    def on_optimizer_state(self, now: float, member: Member, envelope: Envelope, body: OptimizerState) -> None:
        state = self._state
        target = state.members.get(body.target)
        if target is None or target.incarnation != body.target_incarnation or target.state is not MemberState.JOINING:
            state.ignore("optimizer-state-without-target")
            return
        state.send(target, body)
