"""End of the run after the last merges: a durable manifest, sent to every learner. A dead learner never blocks it."""

from __future__ import annotations

from atoll.core.policy import backoff_s
from atoll.core.protocol import Envelope, Finish, FinishAck, Halt, ManifestRecord, Persist
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RunStage
from atoll.core.syncer.state import CONNECTED, Fragment, Member, SyncerState
from atoll.core.types import LearnerId


class Shutdown:
    """Seal the run with a manifest and send it to every learner."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def on_final_failed(self, now: float, f: Fragment, reason: Reason) -> None:
        f.final_attempts += 1
        if not f.final and f.final_attempts >= self._state.limits.max_final_attempts:
            self.skip_final(f, str(reason))
            self.check_end(now)

    def skip_final(self, f: Fragment, cause: str) -> None:
        f.final = True
        f.reason = self._state.log("fragment", f.id, "final-skipped", f.id, cause)

    def check_end(self, now: float) -> None:
        """Save the manifest once all fragments are final. Do not wait for versions at unavailable shards."""
        state = self._state
        if (
            state.stage is RunStage.FINISHING
            and not state.occupied_slots()
            and all(f.final for f in state.fragments.values())
        ):
            state.transition_run("all-final")
            state.log("run", 0, "finish-manifest")
            self._save_manifest()
        elif state.stage is RunStage.FINISHED:
            self.check_acks()

    def _save_manifest(self) -> None:
        state = self._state
        state.manifest = ManifestRecord(state.versions(), state.merges, state.ledger.trained)
        state.effects.append(Persist(state.manifest))

    def on_saved(self, now: float) -> None:
        self._state.transition_run("manifest-persisted")
        self._send_all(now)

    def on_not_saved(self, now: float, cause: str) -> None:
        state = self._state
        delay = backoff_s(state.manifest_attempts, 0, state.limits)
        state.manifest_attempts += 1
        state.log("run", 0, "finish-manifest-failed", cause, delay)
        state.arm_timer(now + delay, "manifest")

    def on_save_timer(self, now: float, key: int) -> None:
        if self._state.stage is RunStage.SEALING:
            self._save_manifest()

    def unacknowledged(self) -> list[Member]:
        """Return the connected learners that have not acknowledged the end."""
        return [m for m in self._state.members.values() if m.state in CONNECTED and not m.finish_acked]

    def _send_all(self, now: float) -> None:
        state = self._state
        members = self.unacknowledged()
        state.log("run", 0, "finish-published", state.merges, len(members))
        for member in members:
            self.send_finish(now, member)
        self.check_acks()

    def send_finish(self, now: float, member: Member) -> None:
        state = self._state
        assert state.manifest is not None
        wait = state.ack_timeout(member) * 2.0**member.finish_attempts
        member.finish_attempts += 1
        member.finish_resend_at = now + min(wait, state.limits.max_wait_s)
        state.send(member, Finish(state.manifest.versions, state.manifest.merges))
        state.arm_timer(member.finish_resend_at, "finish")

    def resend_finish(self, member: Member) -> None:
        """Send the final versions to a learner that reconnects after the end."""
        state = self._state
        if state.stage is RunStage.FINISHED:
            self.send_finish(state.now, member)

    def on_finish_ack(self, now: float, member: Member, envelope: Envelope, body: FinishAck) -> None:
        state = self._state
        if state.stage is not RunStage.FINISHED:
            state.ignore("ack-of-unpublished-finish")
            return
        member.finish_acked = True
        if member.state in CONNECTED:
            state.transition_member(member, "left")  # its silence no longer matters
            member.unacked.clear()
        self.check_acks()

    def learners_without_finish(self) -> list[LearnerId]:
        """Return the learners that may reconnect and have not acknowledged the end.

        Lost and quarantined learners are not listed: they are refused when they return.
        """
        ended = (MemberState.LEFT, MemberState.LOST, MemberState.QUARANTINED)
        return sorted(m.id for m in self._state.members.values() if m.state not in ended and not m.finish_acked)

    def check_acks(self) -> None:
        state = self._state
        if state.stage is RunStage.FINISHED and not state.halted and not self.unacknowledged():
            state.halted = True
            acked = sum(1 for m in state.members.values() if m.finish_acked)
            state.effects.append(Halt(state.count_reason(Reason("finish-done", (acked, len(state.members))))))
