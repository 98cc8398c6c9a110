"""What an operator asks of a run that trains: pause, resume, another quorum, another grace margin, one learner less.

A learner is told with `Hold` and `Drain` until it has answered, and of the pause again after every welcome. What has no
answer after `publish_tries` sendings costs the learner its link, as with a version that it does not acknowledge.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.core.policy import control_problem
from atoll.core.protocol import Body, ControlRequested, Drain, Envelope, Held, Hold
from atoll.core.reasons import Reason
from atoll.core.states import Stage, Standing
from atoll.core.syncer.membership import CONNECTED
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import Member
from atoll.core.types import LearnerId

OUT = (Standing.LEFT, Standing.LOST, Standing.QUARANTINED)


class Controls(Snapshots):
    def _on_control(self, now: float, event: ControlRequested) -> None:
        problem = control_problem(event.what, event.value, self.limits)
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
            before = self.config.grace_margin
            self.config = replace(self.config, grace_margin=event.value)
            self._say("run", 0, "control-grace", event.value, before, event.who)

    # ---------------------------------------------------------------------------------------------------- the run

    def _pause(self, now: float, paused: bool, who: str) -> None:
        """Rounds that are open end as they would: whoever stands still answers, at the boundary where it stands."""
        if self.stage is not Stage.RUNNING or (self.paused is paused and self.pause_serial):
            self._ignore("paused or resumed already, or at the end")
            return
        self._say("run", 0, "control-paused" if paused else "control-resumed", who)
        self._tell_pause(now, paused)
        self._open_ripe(now)

    def _tell_pause(self, now: float, paused: bool) -> None:
        self.paused = paused
        self.pause_serial += 1
        for member in self.members.values():
            if member.standing in CONNECTED:
                member.control_tries = 0
                self._tell_wish(now, member)

    def _end_pause(self, now: float) -> None:
        """The last merges want steps: a run that ends is not paused any more."""
        if self.paused:
            self._say("run", 0, "control-pause-over")
            self._tell_pause(now, False)

    def _change_quorum(self, now: float, quorum: int, who: str) -> None:
        """A round whose quorum is in has had it; one that still waits for its quorum waits for the new one."""
        before = self.config.quorum
        self.config = replace(self.config, quorum=quorum)
        self._say("run", 0, "control-quorum", quorum, before, who)
        for f in list(self.pulling.values()):
            self._check_round(now, f)
        self._open_ripe(now)

    # ---------------------------------------------------------------------------------------------------- learners

    def _drain(self, now: float, learner: LearnerId, who: str) -> None:
        """The wish is about the learner, whichever process of it comes to hear of it, until one has left."""
        member = self.members.get(learner)
        if member is None or member.standing in OUT or self.stage not in (Stage.RUNNING, Stage.FINISHING):
            self._ignore("asked to leave, and is no member")
            return
        member.drained_by = who
        self._say("learner", member.id, "control-drain", who)
        if member.standing in CONNECTED:
            member.control_tries = 0
            self._tell_wish(now, member)

    def _wish_for(self, member: Member) -> Body | None:
        """What it has to be told and has not answered."""
        if member.drained_by and self.stage in (Stage.RUNNING, Stage.FINISHING):
            return Drain(f"drained by {member.drained_by}")
        if member.held != self.pause_serial:
            return Hold(self.pause_serial, self.paused)
        return None

    def _tell_wish(self, now: float, member: Member) -> None:
        wish = self._wish_for(member)
        if wish is None:
            return
        wait = self._ack_patience(member) * 2.0**member.control_tries
        member.control_tries += 1
        member.control_due = now + min(wait, self.limits.most_wait_s)
        self._send(member, wish)
        self._arm(member.control_due, "control", member.id)

    def _tell_wish_anew(self, now: float, member: Member) -> None:
        """On a new link nobody knows what it has heard on the old one."""
        member.held = 0
        member.control_tries = 0
        self._tell_wish(now, member)

    def _on_control_timer(self, now: float, learner: LearnerId) -> None:
        member = self.members.get(learner)
        if member is None or member.standing not in CONNECTED or now < member.control_due:
            return
        wish = self._wish_for(member)
        if wish is None:
            return
        if member.control_tries >= self.limits.publish_tries:
            args = (type(wish).__name__, member.control_tries)
            self._drop_link(now, member, Reason("member-control-unanswered", args))
        else:
            self._tell_wish(now, member)

    def _on_held(self, now: float, member: Member, envelope: Envelope, body: Held) -> None:
        """It may answer an older word; the newest is said again when its time is over."""
        if not member.held < body.serial <= self.pause_serial:
            self._ignore("heard of a pause already, or of one that there never was")
            return
        member.held = body.serial
        if member.held == self.pause_serial:
            member.control_tries = 0
