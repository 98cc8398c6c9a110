"""The end: the budget is global; every fragment is merged once more; a dead learner never blocks it."""

from __future__ import annotations

from atoll.core.policy import backoff_s, budget_reason
from atoll.core.protocol import Envelope, Finish, FinishAck, FinishRequested, Halt, ManifestRecord, Persist
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage, Standing
from atoll.core.syncer.membership import CONNECTED
from atoll.core.syncer.shards import Shards
from atoll.core.syncer.state import Fragment, Member
from atoll.core.types import LearnerId


class Ending(Shards):
    def _check_budget(self, now: float) -> None:
        reason = budget_reason(self.config, self.merges, self.ledger.trained)
        if reason is not None:
            self._begin_finish(now, reason)

    def _after_versions(self, now: float) -> None:
        """Versions may have become durable: what that makes due."""
        if self.stage is Stage.RUNNING:
            self._check_budget(now)
        self._maybe_cut(now)
        self._open_ripe(now)
        self._check_end(now)

    def _on_finish_requested(self, now: float, event: FinishRequested) -> None:
        if self.stage is Stage.RUNNING:
            self._begin_finish(now, Reason("finish-asked"))

    def _begin_finish(self, now: float, reason: Reason) -> None:
        self._advance("budget")
        self._say("run", 0, reason.code, *reason.args)
        if self.cut is not None and not self.cut.saving:
            self._say("run", 0, "snapshot-abandoned", self.cut.id, "the run ends")
            self.cut = None
        self._end_pause(now)
        self._give_up_by(now)
        self._open_ripe(now)
        self._check_end(now)

    def _give_up_by(self, now: float) -> None:
        """Without a quorum the last merges are given up after the time that a whole round may take."""
        waits = [self._pull_patience(m) for m in self.members.values()]
        tries = self.limits.pull_tries
        wait = max(waits, default=self.limits.least_wait_s) * 2.0**tries * self.limits.final_tries
        self.finish_by = now + min(wait, self.limits.most_wait_s)
        self._arm(self.finish_by, "finals")

    def _open_final(self, now: float) -> None:
        """At the end all fragments go at once: nobody needs the links for later rounds."""
        for f in self.fragments.values():
            if f.phase is Phase.IDLE and not f.final:
                f.need_steps = 1
                if self._is_ripe(f) or self._is_pushed(f):
                    self._open(now, f, final=True)

    def _final_failed(self, now: float, f: Fragment, reason: Reason) -> None:
        f.final_tries += 1
        if not f.final and f.final_tries >= self.limits.final_tries:
            self._skip_final(f, str(reason))
            self._check_end(now)

    def _skip_final(self, f: Fragment, why: str) -> None:
        f.final = True
        f.reason = self._say("fragment", f.id, "final-skipped", f.id, why)

    def _on_finals_timer(self, now: float, key: int) -> None:
        if self.stage is not Stage.FINISHING or now < self.finish_by:
            return
        for f in self.fragments.values():
            if f.away and not f.final:
                self._skip_final(f, str(f.reason))
            elif f.phase is Phase.IDLE and not f.final:
                live, quorum = len(self._askable(f)), self.config.quorum
                self._skip_final(f, str(self._note(Reason("round-too-few", (live, quorum)))))
        if any(not f.final for f in self.fragments.values()):
            self._give_up_by(now)  # rounds are still open; they end by themselves
        self._check_end(now)

    def _check_end(self, now: float) -> None:
        """A version that only a shard that is away knows of keeps nobody waiting: the run ends without it."""
        if self.stage is Stage.FINISHING and not self._places_taken() and all(f.final for f in self.fragments.values()):
            self._advance("all final")
            self._say("run", 0, "finish-manifest")
            self._save_manifest()
        elif self.stage is Stage.FINISHED:
            self._check_acks()

    def _save_manifest(self) -> None:
        self.manifest = ManifestRecord(self._versions(), self.merges, self.ledger.trained)
        self._out.append(Persist(self.manifest))

    def _manifest_saved(self, now: float) -> None:
        self._advance("manifest durable")
        self._tell_all(now)

    def _manifest_not_saved(self, now: float, why: str) -> None:
        delay = backoff_s(self.manifest_tries, 0, self.limits)
        self.manifest_tries += 1
        self._say("run", 0, "finish-manifest-failed", why, delay)
        self._arm(now + delay, "manifest")

    def _on_manifest_timer(self, now: float, key: int) -> None:
        if self.stage is Stage.SEALING:
            self._save_manifest()

    def _to_tell(self) -> list[Member]:
        return [m for m in self.members.values() if m.standing in CONNECTED and not m.finish_acked]

    def _tell_all(self, now: float) -> None:
        members = self._to_tell()
        self._say("run", 0, "finish-published", self.merges, len(members))
        for member in members:
            self._tell(now, member)
        self._check_acks()

    def _tell(self, now: float, member: Member) -> None:
        assert self.manifest is not None
        wait = self._ack_patience(member) * 2.0**member.finish_tries
        member.finish_tries += 1
        member.finish_due = now + min(wait, self.limits.most_wait_s)
        self._send(member, Finish(self.manifest.versions, self.manifest.merges))
        self._arm(member.finish_due, "finish")

    def _on_finish_timer(self, now: float, key: int) -> None:
        if self.stage is not Stage.FINISHED:
            return
        for member in self._to_tell():
            if now < member.finish_due:
                continue
            if member.finish_tries >= self.limits.finish_tries:
                self._drop_link(now, member, Reason("finish-left-behind", (member.id,)))
            else:
                self._tell(now, member)
        self._check_acks()

    def _resend_finish(self, member: Member) -> None:
        """A learner that comes back after the end gets the final versions like everybody else."""
        if self.stage is Stage.FINISHED:
            self._tell(self.now, member)

    def _on_finish_ack(self, now: float, member: Member, envelope: Envelope, body: FinishAck) -> None:
        if self.stage is not Stage.FINISHED:
            self._ignore("acknowledged an end that is not there")
            return
        member.finish_acked = True
        if member.standing in CONNECTED:
            self._stand(member, "left")  # its silence from here on means nothing
            member.owed.clear()
        self._check_acks()

    def missing_end(self) -> list[LearnerId]:
        """Return the learners that may come back and have not acknowledged the end.

        A learner that is lost or in quarantine is refused when it returns, and ends with that.
        """
        ended = (Standing.LEFT, Standing.LOST, Standing.QUARANTINED)
        return sorted(m.id for m in self.members.values() if m.standing not in ended and not m.finish_acked)

    def _check_acks(self) -> None:
        if self.stage is Stage.FINISHED and not self.halted and not self._to_tell():
            self.halted = True
            acked = sum(1 for m in self.members.values() if m.finish_acked)
            self._out.append(Halt(self._note(Reason("finish-done", (acked, len(self.members))))))
