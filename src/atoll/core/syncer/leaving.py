"""Learners that have to go soon: what they trained is merged out of turn, before they are gone.

A leaver takes no more steps, so its fragments would be ripe only by the steps of others, and in a run of its own never.
A round is opened at once for every fragment of which it names something, as at the end of a run, with everybody who has
anything to give; the quorum is what it always is, and the round waits for the leaver as long as asking goes on.
"""

from __future__ import annotations

from atoll.core.protocol import Envelope, Leaving
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Standing
from atoll.core.syncer.rounds import Rounds
from atoll.core.syncer.state import Fragment, Member

MOST_PUSHES = 8
"""Rounds of one fragment that are opened out of turn for one leaver, and wait for it. Two are enough where nothing is
lost: the copy that was on its way, and what came after it. One that names fragments and gives nothing holds up nobody
for longer."""


class Leavers(Rounds):
    def _on_leaving(self, now: float, member: Member, envelope: Envelope, body: Leaving) -> None:
        """Its newest word counts: one that was delayed or doubled must not bring back what is merged. Neither must one
        that was said before it heard of a version that holds the rest."""
        if envelope.tick <= member.leaving_tick:
            self._ignore("an older word of one who leaves")
            return
        steps = body.step - member.step
        if steps > self.limits.most_steps_per_report or not self._is_plausible(member, body.step, body.trained):
            self._strike(now, member, self._note(Reason("report-wild", (steps, body.trained, 0.0))))
            return
        member.leaving_tick = envelope.tick
        member.step = max(member.step, body.step)
        self.ledger.tell(member.id, body.trained)
        if member.standing is Standing.JOINING:
            self._trains(now, member, self._note(Reason("moments-kept")))  # its word that it is ready was lost
        named = (self.fragments[p] for p in body.unmerged if p in self.fragments)
        member.unmerged = {f.id: None for f in named if not self._holds(f, member)}
        if not member.leaving:
            member.leaving = True
            self._say("learner", member.id, "member-leaving", len(member.unmerged))
        if member.unmerged:
            self.leavers[member.id] = member
        else:
            self.leavers.pop(member.id, None)
        self._ask_too(now, member)
        for f in list(self.pulling.values()):
            if member.id in f.asked:
                self._check_round(now, f)  # it waits no longer for what is not named any more
        self._open_ripe(now)

    def _holds(self, f: Fragment, member: Member) -> bool:
        """A durable version has all that it ever told of."""
        mark, account = f.marks.get(member.id), self.ledger.accounts[member.id]
        return mark is not None and mark.incarnation == member.incarnation and mark.trained >= account.trained

    def _open_for_leavers(self, now: float) -> None:
        """All at once, whatever is in flight: there is no later. Their turns stay what they were."""
        for f in list(self.fragments.values()):
            if f.phase is Phase.IDLE and self._is_pushed(f):
                self._open(now, f, in_turn=f.id in self.retrying)

    def _is_pushed(self, f: Fragment) -> bool:
        return not f.away and any(self._pushes(f, m) < MOST_PUSHES for m in self._leavers_of(f))

    def _awaits_leaver(self, f: Fragment) -> bool:
        return any(
            m.id in f.asked and m.id not in f.contributions and self._pushes(f, m) <= MOST_PUSHES
            for m in self._leavers_of(f)
        )

    def _leavers_of(self, f: Fragment) -> list[Member]:
        return [m for m in self.leavers.values() if f.id in m.unmerged and m.standing is Standing.LIVE]

    def _pushes(self, f: Fragment, member: Member) -> int:
        return member.pushes.get(f.id, 0)

    def _pushed(self, f: Fragment) -> None:
        """A version of it is durable. What a leaver had trained after its copy is still to be merged."""
        for member in list(self.leavers.values()):
            if f.id in member.unmerged and self._holds(f, member):
                del member.unmerged[f.id]
                if not member.unmerged:
                    del self.leavers[member.id]
