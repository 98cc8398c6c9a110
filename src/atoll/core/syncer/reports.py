"""What learners report of their training: that it starts, how far it is, and that it ends soon."""

from __future__ import annotations

from atoll.core.policy import Estimate
from atoll.core.protocol import Envelope, Leaving, Ready, Report
from atoll.core.reasons import Reason
from atoll.core.states import Stage, Standing
from atoll.core.syncer.finishing import Finishing
from atoll.core.syncer.leaving import Leavers
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.state import LearnerFault, Member, SyncerState
from atoll.core.types import MOST_SECONDS


class Reports:
    """Record the progress of learners and open the rounds that it makes ripe."""

    def __init__(self, state: SyncerState, rounds: Rounds, leavers: Leavers, finishing: Finishing) -> None:
        self._state = state
        self._rounds = rounds
        self._leavers = leavers
        self._finishing = finishing

    def on_report(self, now: float, member: Member, envelope: Envelope, body: Report) -> LearnerFault | None:
        state = self._state
        steps = body.step - member.step
        if steps <= 0:
            return None
        plausible = state.is_plausible(member, body.step, body.trained) and 0 <= body.step_time_s < MOST_SECONDS
        if steps > state.limits.most_steps_per_report or not plausible:
            return LearnerFault(member, state.note(Reason("report-wild", (steps, body.trained, body.step_time_s))))
        if member.standing is Standing.JOINING:
            self._start_training(member, state.note(Reason("moments-kept")))  # its word that it is ready was lost
        member.step = body.step
        member.reported_at = now
        member.quick_s = min(body.step_time_s, 1.1 * member.quick_s) if member.pace.count else body.step_time_s
        state.ledger.tell(member.id, body.trained)
        member.pace.add(body.step_time_s)
        if member.standing is Standing.LIVE:
            if state.stage is Stage.RUNNING:
                self._finishing.check_budget(now)
            self._rounds.pull_late_learner(now, member)
            self._rounds.open_ripe(now)
        return None

    def on_ready(self, now: float, member: Member, envelope: Envelope, body: Ready) -> None:
        if member.standing is not Standing.JOINING:
            self._state.ignore("ready twice")
            return
        self._start_training(member, body.moments)
        self._rounds.open_ripe(now)

    def on_leaving(self, now: float, member: Member, envelope: Envelope, body: Leaving) -> LearnerFault | None:
        """Its newest word counts: one that was delayed or doubled must not bring back what is merged. Neither must one
        that was said before it heard of a version that holds the rest."""
        state = self._state
        if envelope.tick <= member.leaving_tick:
            state.ignore("an older word of one who leaves")
            return None
        steps = body.step - member.step
        if steps > state.limits.most_steps_per_report or not state.is_plausible(member, body.step, body.trained):
            return LearnerFault(member, state.note(Reason("report-wild", (steps, body.trained, 0.0))))
        member.leaving_tick = envelope.tick
        member.step = max(member.step, body.step)
        state.ledger.tell(member.id, body.trained)
        if member.standing is Standing.JOINING:
            self._start_training(member, state.note(Reason("moments-kept")))  # its word that it is ready was lost
        self._leavers.record(member, body.unmerged)
        self._rounds.pull_late_learner(now, member)
        for f in list(state.pulling.values()):
            if member.id in f.asked:
                self._rounds.check_round(now, f)  # it waits no longer for what is not named any more
        self._rounds.open_ripe(now)
        return None

    def _start_training(self, member: Member, moments: Reason) -> None:
        state = self._state
        state.move_member(member, "ready")
        member.training = True
        member.gap = Estimate()  # the pace of joining says nothing about the pace of training
        state.say("learner", member.id, "member-ready", member.incarnation, str(moments))
