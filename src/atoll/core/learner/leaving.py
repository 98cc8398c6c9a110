"""Leaving: at once, or after a last push, in which everything that this learner has trained reaches a version.

A learner that pushes takes no further step. It stands at its boundary as in a paused run, names the fragments of which
something is in no version yet, answers the pulls that follow, and leaves when it has adopted versions that hold all of
it. How long it may take is its driver's business: a second wish to leave, without a push, ends it at once.
"""

from __future__ import annotations

from atoll.core.learner.joining import Joining
from atoll.core.policy import patience
from atoll.core.protocol import Drain, Envelope, Leave, LeaveWanted, Leaving, Stop
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode
from atoll.core.types import FragmentId


class Parting(Joining):
    @property
    def rests(self) -> bool:
        """A driver begins no step while this holds: the run is paused, or this learner has taken its last one."""
        return self.paused or self.leaving

    @property
    def can_answer(self) -> bool:
        """While it leaves: a pull that had to wait for the version that it builds on has to wait no longer."""
        return (self.leaving and self.link is Link.UP) and any(
            self.versions[p] > asked.base or (self.versions[p] == asked.base and self.step > self.base_step[p])
            for p, asked in self.pulls.items()
        )

    def unmerged(self) -> tuple[FragmentId, ...]:
        """Fragments of which it has trained something that is in no version, as far as it knows."""
        return tuple(p for p in self.fragments if self.trained > self.settled[p])

    def unmerged_tokens(self) -> int:
        """Tokens that at least one fragment would lose if it left now."""
        return self.trained - min(self.settled.values())

    def _on_leave_wanted(self, now: float, event: LeaveWanted) -> None:
        if self.mode is Mode.STOPPED or (event.push and self.leaving):
            return
        if not event.push or self.mode in (Mode.NEW, Mode.JOINING):  # who joins has trained nothing
            if self.leaving:
                self._leave("learner-hurried", event.why, self.unmerged_tokens())
            else:
                self._leave("learner-left", event.why)
            return
        self.leaving = True
        self.leave_why = event.why
        self._say("learner-leaving", self.unmerged_tokens(), event.why)
        self._say_leaving(now)
        self._check_pushed()

    def _say_leaving(self, now: float) -> None:
        """Again and again: what was said may be lost, and the syncer is to know that it is still here."""
        if not self.leaving or self.mode is not Mode.TRAINING or self.link is not Link.UP:
            return
        self._send(Leaving(self.step, self.trained, self.unmerged()))
        wait = patience(self.round_trip, 4, self.limits) if self.round_trip.count else 0.0
        self.leaving_due = now + min(max(wait, 4 * self.limits.least_wait_s), self.limits.first_wait_s / 4)
        self._arm(self.leaving_due, "leaving")

    def _on_leaving_timer(self, now: float, key: int) -> None:
        if now >= self.leaving_due:
            self._say_leaving(now)

    def _check_pushed(self) -> None:
        if self.mode is Mode.TRAINING and not self.unmerged():
            self._leave("learner-pushed", self.leave_why)

    def _on_drain(self, now: float, envelope: Envelope, body: Drain) -> None:
        if self.mode in (Mode.JOINING, Mode.TRAINING):
            self._leave("learner-drained", body.why)
        elif self.reason.code == "learner-drained":
            self._send(Leave(body.why))  # what it said was lost

    def _leave(self, code: str, why: str, *lost: int) -> None:
        if self.link is Link.UP:
            self._send(Leave(why))
        self._turn("stopped")
        self.reason = self._note(Reason(code, (why, *lost)))
        self._out.append(Stop(self.reason))
