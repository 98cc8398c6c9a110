"""Operator requests: pause, resume, change the quorum or the grace margin, drain a learner, finish. Also the budget.

`SetPaused` and `Drain` are sent until the learner answers, and `SetPaused` again after every welcome. After
`max_publish_attempts` transmissions without an answer the connection is closed, as for an unacknowledged version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.core.policy import budget_reason, find_control_problem
from atoll.core.protocol import Body, ControlRequested, Drain, Envelope, FinishRequested, PausedAck, SetPaused
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RoundPhase, RunStage
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import CONNECTED, LearnerFault, Member, SyncerState
from atoll.core.types import LearnerId

GONE_STATES = (MemberState.LEFT, MemberState.LOST, MemberState.QUARANTINED)


class Controls:
    """Execute operator requests."""

    def __init__(self, state: SyncerState, rounds: Rounds) -> None:
        self._state = state
        self._rounds = rounds

    def on_control(self, now: float, event: ControlRequested) -> None:
        state = self._state
        problem = find_control_problem(event.kind, event.value, state.limits)
        assert problem is None, problem
        if event.kind in ("pause", "resume"):
            self._pause(now, event.kind == "pause", event.requested_by)
            return
        assert event.value is not None
        if event.kind == "drain":
            self._drain(now, int(event.value), event.requested_by)
        elif event.kind == "quorum":
            self._change_quorum(now, int(event.value), event.requested_by)
        else:
            before = state.config.grace_margin
            state.config = replace(state.config, grace_margin=event.value)
            state.log("run", 0, "control-grace-changed", event.value, before, event.requested_by)

    # ---------------------------------------------------------------------------------------------------- the run

    def _pause(self, now: float, paused: bool, requested_by: str) -> None:
        """Pause or resume. Open rounds continue: paused learners answer pulls at their step boundary."""
        state = self._state
        if state.stage is not RunStage.RUNNING or (state.paused is paused and state.pause_serial):
            state.ignore("pause-without-effect")
            return
        state.log("run", 0, "control-paused" if paused else "control-resumed", requested_by)
        self._send_pause(now, paused)
        self._rounds.open_due_rounds(now)

    def _send_pause(self, now: float, paused: bool) -> None:
        state = self._state
        state.paused = paused
        state.pause_serial += 1
        for member in state.members.values():
            if member.state in CONNECTED:
                member.control_attempts = 0
                self._send_request(now, member)

    def end_pause(self, now: float) -> None:
        """Resume a run that is about to end, because the last merges need steps."""
        state = self._state
        if state.paused:
            state.log("run", 0, "control-pause-ended")
            self._send_pause(now, False)

    def _change_quorum(self, now: float, quorum: int, requested_by: str) -> None:
        """Change the quorum, also of open rounds that have not reached their quorum."""
        state = self._state
        before = state.config.quorum
        state.config = replace(state.config, quorum=quorum)
        state.log("run", 0, "control-quorum-changed", quorum, before, requested_by)
        for f in list(state.pulling.values()):
            self._rounds.check_round(now, f)
        self._rounds.open_due_rounds(now)

    # ---------------------------------------------------------------------------------------------------- learners

    def _drain(self, now: float, learner: LearnerId, requested_by: str) -> None:
        """Drain a learner: the request applies to every process of it, until one has left."""
        state = self._state
        member = state.members.get(learner)
        if member is None or member.state in GONE_STATES or state.stage not in (RunStage.RUNNING, RunStage.FINISHING):
            state.ignore("drain-of-non-member")
            return
        member.drained_by = requested_by
        state.log("learner", member.id, "control-drain-requested", requested_by)
        if member.state in CONNECTED:
            member.control_attempts = 0
            self._send_request(now, member)

    def _pending_request(self, member: Member) -> Body | None:
        """Return the request that the learner has not answered, or None."""
        state = self._state
        if member.drained_by and state.stage in (RunStage.RUNNING, RunStage.FINISHING):
            return Drain(f"drained by {member.drained_by}")
        if member.acked_pause_serial != state.pause_serial:
            return SetPaused(state.pause_serial, state.paused)
        return None

    def _send_request(self, now: float, member: Member) -> None:
        state = self._state
        request = self._pending_request(member)
        if request is None:
            return
        wait = state.ack_timeout(member) * 2.0**member.control_attempts
        member.control_attempts += 1
        member.control_resend_at = now + min(wait, state.limits.max_wait_s)
        state.send(member, request)
        state.arm_timer(member.control_resend_at, "control", member.id)

    def resend_request(self, now: float, member: Member) -> None:
        """Send unanswered requests again on a new connection, because the old one may have lost them."""
        member.acked_pause_serial = 0
        member.control_attempts = 0
        self._send_request(now, member)

    def on_timer(self, now: float, learner: LearnerId) -> LearnerFault | None:
        state = self._state
        member = state.members.get(learner)
        if member is None or member.state not in CONNECTED or now < member.control_resend_at:
            return None
        request = self._pending_request(member)
        if request is None:
            return None
        if member.control_attempts >= state.limits.max_publish_attempts:
            args = (type(request).__name__, member.control_attempts)
            return LearnerFault(member, Reason("member-control-unacked", args), closes_connection=True)
        self._send_request(now, member)
        return None

    def on_paused_ack(self, now: float, member: Member, envelope: Envelope, body: PausedAck) -> None:
        """Record an acknowledgement. If it is for an older request, the timer sends the newest one again."""
        state = self._state
        if not member.acked_pause_serial < body.serial <= state.pause_serial:
            state.ignore("stale-paused-ack")
            return
        member.acked_pause_serial = body.serial
        if member.acked_pause_serial == state.pause_serial:
            member.control_attempts = 0


@dataclass(eq=False)
class Finishing:
    """Start the end of the run and limit the time of its last merges."""

    _state: SyncerState
    _rounds: Rounds
    _controls: Controls
    _snapshots: Snapshots
    _shutdown: Shutdown

    def check_budget(self, now: float) -> None:
        state = self._state
        reason = budget_reason(state.config, state.merges, state.ledger.trained)
        if reason is not None:
            self._start_finish(now, reason)

    def after_versions(self, now: float) -> None:
        """Do what is due after versions have become durable."""
        if self._state.stage is RunStage.RUNNING:
            self.check_budget(now)
        self._snapshots.start_if_due(now)
        self._rounds.open_due_rounds(now)
        self._shutdown.check_end(now)

    def on_requested(self, now: float, event: FinishRequested) -> None:
        if self._state.stage is RunStage.RUNNING:
            self._start_finish(now, Reason("finish-requested"))

    def _start_finish(self, now: float, reason: Reason) -> None:
        state = self._state
        state.transition_run("finish-started")
        state.log("run", 0, reason.code, *reason.args)
        if state.snapshot is not None and not state.snapshot.is_saving:
            state.log("run", 0, "snapshot-abandoned", state.snapshot.id, "the run ends")
            state.snapshot = None
        self._controls.end_pause(now)
        self._arm_finals_timer(now)
        self._rounds.open_due_rounds(now)
        self._shutdown.check_end(now)

    def _arm_finals_timer(self, now: float) -> None:
        """Limit the time of the last merges to that of a whole round, in case the quorum is never reached."""
        state = self._state
        waits = [state.pull_timeout(m) for m in state.members.values()]
        tries = state.limits.max_pull_attempts
        wait = max(waits, default=state.limits.min_wait_s) * 2.0**tries * state.limits.max_final_attempts
        state.finish_by = now + min(wait, state.limits.max_wait_s)
        state.arm_timer(state.finish_by, "finals")

    def on_finals_timer(self, now: float, key: int) -> None:
        state = self._state
        if state.stage is not RunStage.FINISHING or now < state.finish_by:
            return
        for f in state.fragments.values():
            if f.unavailable and not f.final:
                self._shutdown.skip_final(f, str(f.reason))
            elif f.phase is RoundPhase.IDLE and not f.final:
                live, quorum = len(self._rounds.pullable_learners(f)), state.config.quorum
                self._shutdown.skip_final(f, str(state.count_reason(Reason("round-quorum-missing", (live, quorum)))))
        if any(not f.final for f in state.fragments.values()):
            self._arm_finals_timer(now)  # rounds are still open and have their own timeouts
        self._shutdown.check_end(now)
