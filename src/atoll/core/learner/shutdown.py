"""The end of the run at a learner: it stops once it has adopted the final versions."""

from __future__ import annotations

from atoll.core.learner.rounds import LearnerRounds
from atoll.core.learner.state import LearnerState
from atoll.core.protocol import Envelope, Finish, FinishAck, Stop
from atoll.core.reasons import Reason
from atoll.core.states import Mode


class LearnerShutdown:
    """Stop once the final versions are here."""

    def __init__(self, state: LearnerState, rounds: LearnerRounds) -> None:
        self._state = state
        self._rounds = rounds

    def has_final_versions(self) -> bool:
        state = self._state
        return all(state.received[p] >= v for p, v in zip(state.fragments, state.final, strict=True))

    def on_finish(self, now: float, envelope: Envelope, body: Finish) -> None:
        state = self._state
        if state.mode is Mode.STOPPED:
            state.send(FinishAck(body.merges))
            return
        if state.mode is not Mode.FINISHING:
            state.move_mode("finish")
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
            state.move_mode("stopped")
            state.send(FinishAck(state.final_merges))
            state.reason = state.note(Reason("learner-finished"))
            state.effects.append(Stop(state.reason))
