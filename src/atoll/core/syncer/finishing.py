"""The beginning of the end: the budget is global, and every fragment is merged once more."""

from __future__ import annotations

from atoll.core.policy import budget_reason
from atoll.core.protocol import FinishRequested
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage
from atoll.core.syncer.controls import Controls
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import SyncerState


class Finishing:
    """Begin the end of the run and bound its last merges."""

    def __init__(
        self, state: SyncerState, rounds: Rounds, controls: Controls, snapshots: Snapshots, shutdown: Shutdown
    ) -> None:
        self._state = state
        self._rounds = rounds
        self._controls = controls
        self._snapshots = snapshots
        self._shutdown = shutdown

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
