"""What an operator asks of a run that trains: pause, resume, another quorum, another grace margin, one learner less,
the end; and the budget, which ends the run by itself.

A learner is told with `Hold` and `Drain` until it has answered, and of the pause again after every welcome. What has no
answer after `publish_tries` sendings costs the learner its link, as with a version that it does not acknowledge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.core.policy import budget_reason, control_problem
from atoll.core.protocol import Body, ControlRequested, Drain, Envelope, FinishRequested, Held, Hold
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage, Standing
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import CONNECTED, LearnerFault, Member, SyncerState
from atoll.core.types import LearnerId

OUT = (Standing.LEFT, Standing.LOST, Standing.QUARANTINED)


class Controls:
    """Carry out what an operator requests."""

    def __init__(self, state: SyncerState, rounds: Rounds) -> None:
        self._state = state
        self._rounds = rounds

    def on_control(self, now: float, event: ControlRequested) -> None:
        state = self._state
        problem = control_problem(event.what, event.value, state.limits)
        assert problem is None, problem
        if event.what in ("pause", "resume"):
            self._pause(now, event.what == "pause", event.who)
            return
        assert event.value is not None
        if event.what == "drain":
            self._drain(now, int(event.value), event.who)
        elif event.what == "quorum":
            self._change_quorum(now, int(event.value), event.who)
        else:
            before = state.config.grace_margin
            state.config = replace(state.config, grace_margin=event.value)
            state.say("run", 0, "control-grace", event.value, before, event.who)

    # ---------------------------------------------------------------------------------------------------- the run

    def _pause(self, now: float, paused: bool, who: str) -> None:
        """Rounds that are open end as they would: whoever stands still answers, at the boundary where it stands."""
        state = self._state
        if state.stage is not Stage.RUNNING or (state.paused is paused and state.pause_serial):
            state.ignore("paused or resumed already, or at the end")
            return
        state.say("run", 0, "control-paused" if paused else "control-resumed", who)
        self._send_pause(now, paused)
        self._rounds.open_ripe(now)

    def _send_pause(self, now: float, paused: bool) -> None:
        state = self._state
        state.paused = paused
        state.pause_serial += 1
        for member in state.members.values():
            if member.standing in CONNECTED:
                member.control_tries = 0
                self._send_request(now, member)

    def end_pause(self, now: float) -> None:
        """The last merges want steps: a run that ends is not paused any more."""
        state = self._state
        if state.paused:
            state.say("run", 0, "control-pause-over")
            self._send_pause(now, False)

    def _change_quorum(self, now: float, quorum: int, who: str) -> None:
        """A round whose quorum is in has had it; one that still waits for its quorum waits for the new one."""
        state = self._state
        before = state.config.quorum
        state.config = replace(state.config, quorum=quorum)
        state.say("run", 0, "control-quorum", quorum, before, who)
        for f in list(state.pulling.values()):
            self._rounds.check_round(now, f)
        self._rounds.open_ripe(now)

    # ---------------------------------------------------------------------------------------------------- learners

    def _drain(self, now: float, learner: LearnerId, who: str) -> None:
        """The wish is about the learner, whichever process of it comes to hear of it, until one has left."""
        state = self._state
        member = state.members.get(learner)
        if member is None or member.standing in OUT or state.stage not in (Stage.RUNNING, Stage.FINISHING):
            state.ignore("asked to leave, and is no member")
            return
        member.drained_by = who
        state.say("learner", member.id, "control-drain", who)
        if member.standing in CONNECTED:
            member.control_tries = 0
            self._send_request(now, member)

    def _pending_request(self, member: Member) -> Body | None:
        """Return the request that the learner has not answered; None if it has answered all."""
        state = self._state
        if member.drained_by and state.stage in (Stage.RUNNING, Stage.FINISHING):
            return Drain(f"drained by {member.drained_by}")
        if member.held != state.pause_serial:
            return Hold(state.pause_serial, state.paused)
        return None

    def _send_request(self, now: float, member: Member) -> None:
        state = self._state
        request = self._pending_request(member)
        if request is None:
            return
        wait = state.ack_patience(member) * 2.0**member.control_tries
        member.control_tries += 1
        member.control_due = now + min(wait, state.limits.most_wait_s)
        state.send(member, request)
        state.arm(member.control_due, "control", member.id)

    def send_request_anew(self, now: float, member: Member) -> None:
        """On a new link nobody knows what it has heard on the old one."""
        member.held = 0
        member.control_tries = 0
        self._send_request(now, member)

    def on_timer(self, now: float, learner: LearnerId) -> LearnerFault | None:
        state = self._state
        member = state.members.get(learner)
        if member is None or member.standing not in CONNECTED or now < member.control_due:
            return None
        request = self._pending_request(member)
        if request is None:
            return None
        if member.control_tries >= state.limits.publish_tries:
            args = (type(request).__name__, member.control_tries)
            return LearnerFault(member, Reason("member-control-unanswered", args), drops_link=True)
        self._send_request(now, member)
        return None

    def on_held(self, now: float, member: Member, envelope: Envelope, body: Held) -> None:
        """It may answer an older word; the newest is said again when its time is over."""
        state = self._state
        if not member.held < body.serial <= state.pause_serial:
            state.ignore("heard of a pause already, or of one that there never was")
            return
        member.held = body.serial
        if member.held == state.pause_serial:
            member.control_tries = 0


@dataclass(eq=False)
class Finishing:
    """Begin the end of the run and bound its last merges."""

    _state: SyncerState
    _rounds: Rounds
    _controls: Controls
    _snapshots: Snapshots
    _shutdown: Shutdown

    def check_budget(self, now: float) -> None:
        state = self._state
        reason = budget_reason(state.config, state.merges, state.ledger.trained)
        if reason is not None:
            self._begin_finish(now, reason)

    def after_versions(self, now: float) -> None:
        """Do what is due after versions have become durable."""
        if self._state.stage is Stage.RUNNING:
            self.check_budget(now)
        self._snapshots.cut_if_due(now)
        self._rounds.open_ripe(now)
        self._shutdown.check_end(now)

    def on_requested(self, now: float, event: FinishRequested) -> None:
        if self._state.stage is Stage.RUNNING:
            self._begin_finish(now, Reason("finish-asked"))

    def _begin_finish(self, now: float, reason: Reason) -> None:
        state = self._state
        state.advance("budget")
        state.say("run", 0, reason.code, *reason.args)
        if state.cut is not None and not state.cut.saving:
            state.say("run", 0, "snapshot-abandoned", state.cut.id, "the run ends")
            state.cut = None
        self._controls.end_pause(now)
        self._give_up_by(now)
        self._rounds.open_ripe(now)
        self._shutdown.check_end(now)

    def _give_up_by(self, now: float) -> None:
        """Without a quorum the last merges are given up after the time that a whole round may take."""
        state = self._state
        waits = [state.pull_patience(m) for m in state.members.values()]
        tries = state.limits.pull_tries
        wait = max(waits, default=state.limits.least_wait_s) * 2.0**tries * state.limits.final_tries
        state.finish_by = now + min(wait, state.limits.most_wait_s)
        state.arm(state.finish_by, "finals")

    def on_finals_timer(self, now: float, key: int) -> None:
        state = self._state
        if state.stage is not Stage.FINISHING or now < state.finish_by:
            return
        for f in state.fragments.values():
            if f.away and not f.final:
                self._shutdown.skip_final(f, str(f.reason))
            elif f.phase is Phase.IDLE and not f.final:
                live, quorum = len(self._rounds.askable(f)), state.config.quorum
                self._shutdown.skip_final(f, str(state.note(Reason("round-too-few", (live, quorum)))))
        if any(not f.final for f in state.fragments.values()):
            self._give_up_by(now)  # rounds are still open; they end by themselves
        self._shutdown.check_end(now)
