"""Stop a learner: at once, after a drain, or with the final versions of the run.

A draining learner takes no further step. It waits at its step boundary as in a paused run, sends the fragments that
have unmerged work, answers the pulls that follow, and leaves when it has adopted versions with all of its work. The
driver limits the time: `LeaveRequested` without `drain` stops the learner at once.
"""

from __future__ import annotations

from atoll.core.learner.rounds import LearnerRounds
from atoll.core.learner.state import LearnerState
from atoll.core.policy import retry_timeout
from atoll.core.protocol import Drain, DrainRequest, Envelope, Finish, FinishAck, LeaveRequested, Left, Stop
from atoll.core.reasons import Reason
from atoll.core.states import ConnectionState, LearnerMode
from atoll.core.types import FragmentId


class Departure:
    """Leave immediately, or after all trained work is merged."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def can_answer(self) -> bool:
        """Return whether a draining learner can answer a pull, now that the base version of the pull has arrived."""
        state = self._state
        return (state.leaving and state.link is ConnectionState.UP) and any(
            state.versions[p] > pull.base or (state.versions[p] == pull.base and state.step > state.base_step[p])
            for p, pull in state.pulls.items()
        )

    def unmerged(self) -> tuple[FragmentId, ...]:
        """Return the fragments with unmerged work, as far as the learner knows."""
        state = self._state
        return tuple(p for p in state.fragments if state.trained > state.settled[p])

    def unmerged_tokens(self) -> int:
        """Return the tokens that at least one fragment would lose if the learner left now."""
        state = self._state
        return state.trained - min(state.settled.values())

    def on_leave_requested(self, now: float, event: LeaveRequested) -> None:
        state = self._state
        if state.mode is LearnerMode.STOPPED or (event.drain and state.leaving):
            return
        if not event.drain or state.mode in (
            LearnerMode.NEW,
            LearnerMode.JOINING,
        ):  # a joining learner has no work yet
            if state.leaving:
                self._leave("learner-left-early", event.cause, self.unmerged_tokens())
            else:
                self._leave("learner-left", event.cause)
            return
        state.leaving = True
        state.leave_cause = event.cause
        state.log("learner-draining", self.unmerged_tokens(), event.cause)
        self.announce(now)
        self.check_drained()

    def announce(self, now: float) -> None:
        """Send the drain request, and repeat it: it may be lost, and it shows the syncer that the learner is alive."""
        state = self._state
        if not state.leaving or state.mode is not LearnerMode.TRAINING or state.link is not ConnectionState.UP:
            return
        state.send(DrainRequest(state.step, state.trained, self.unmerged()))
        wait = retry_timeout(state.round_trip, 4, state.limits) if state.round_trip.count else 0.0
        state.drain_resend_at = now + min(max(wait, 4 * state.limits.min_wait_s), state.limits.initial_wait_s / 4)
        state.arm_timer(state.drain_resend_at, "leaving")

    def on_timer(self, now: float, key: int) -> None:
        if now >= self._state.drain_resend_at:
            self.announce(now)

    def check_drained(self) -> None:
        state = self._state
        if state.mode is LearnerMode.TRAINING and not self.unmerged():
            self._leave("learner-drained", state.leave_cause)

    def on_drain(self, now: float, envelope: Envelope, body: Drain) -> None:
        state = self._state
        if state.mode in (LearnerMode.JOINING, LearnerMode.TRAINING):
            self._leave("learner-left-on-request", body.cause)
        elif state.reason.code == "learner-left-on-request":
            state.send(Left(body.cause))  # the first one was lost

    def _leave(self, code: str, cause: str, *lost_tokens: int) -> None:
        state = self._state
        if state.link is ConnectionState.UP:
            state.send(Left(cause))
        state.transition_mode("stopped")
        state.reason = state.count_reason(Reason(code, (cause, *lost_tokens)))
        state.effects.append(Stop(state.reason))


class LearnerShutdown:
    """Stop once the final versions have arrived."""

    def __init__(self, state: LearnerState, rounds: LearnerRounds) -> None:
        self._state = state
        self._rounds = rounds

    def has_final_versions(self) -> bool:
        state = self._state
        return all(state.received[p] >= v for p, v in zip(state.fragments, state.final, strict=True))

    def on_finish(self, now: float, envelope: Envelope, body: Finish) -> None:
        state = self._state
        if state.mode is LearnerMode.STOPPED:
            state.send(FinishAck(body.merges))
            return
        if state.mode is not LearnerMode.FINISHING:
            state.transition_mode("finish")
            state.paused = False
            state.final = body.versions
            state.final_merges = body.merges
            state.pulls.clear()
            state.progress = 1.0
        self.check_final()

    def check_final(self) -> None:
        state = self._state
        if self.has_final_versions():
            self._rounds.adopt_arrived()
            state.transition_mode("stopped")
            state.send(FinishAck(state.final_merges))
            state.reason = state.count_reason(Reason("learner-finished"))
            state.effects.append(Stop(state.reason))
