"""Learners that have to go soon: what they trained is merged out of turn, before they are gone.

A leaver takes no more steps, so its fragments would be ripe only by the steps of others, and in a run of its own never.
A round is opened at once for every fragment of which it names something, as at the end of a run, with everybody who has
anything to give; the quorum is what it always is, and the round waits for the leaver as long as asking goes on.
"""

from __future__ import annotations

from atoll.core.states import Standing
from atoll.core.syncer.state import Fragment, Member, SyncerState
from atoll.core.types import FragmentId

MOST_PUSHES = 8
"""Rounds of one fragment that are opened out of turn for one leaver, and wait for it. Two are enough where nothing is
lost: the copy that was on its way, and what came after it. One that names fragments and gives nothing holds up nobody
for longer."""


class Leavers:
    """Track which work of leaving learners is in no version yet."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def record(self, member: Member, named: tuple[FragmentId, ...]) -> None:
        """Record the fragments of which a leaving learner names unmerged work, except those that are merged already."""
        state = self._state
        fragments = (state.fragments[p] for p in named if p in state.fragments)
        member.unmerged = {f.id: None for f in fragments if not self._holds(f, member)}
        if not member.leaving:
            member.leaving = True
            state.say("learner", member.id, "member-leaving", len(member.unmerged))
        if member.unmerged:
            state.leavers[member.id] = member
        else:
            state.leavers.pop(member.id, None)

    def _holds(self, f: Fragment, member: Member) -> bool:
        """A durable version has all that it ever told of."""
        mark, account = f.marks.get(member.id), self._state.ledger.accounts[member.id]
        return mark is not None and mark.incarnation == member.incarnation and mark.trained >= account.trained

    def is_pushed(self, f: Fragment) -> bool:
        """A round has to be opened for a leaver that has unmerged work of this fragment."""
        return not f.away and any(self._pushes(f, m) < MOST_PUSHES for m in self._leavers_of(f))

    def is_awaited(self, f: Fragment) -> bool:
        """The open round still waits for a leaver."""
        return any(
            m.id in f.asked and m.id not in f.contributions and self._pushes(f, m) <= MOST_PUSHES
            for m in self._leavers_of(f)
        )

    def _leavers_of(self, f: Fragment) -> list[Member]:
        return [m for m in self._state.leavers.values() if f.id in m.unmerged and m.standing is Standing.LIVE]

    def _pushes(self, f: Fragment, member: Member) -> int:
        return member.pushes.get(f.id, 0)

    def on_version(self, f: Fragment) -> None:
        """A version of it is durable. What a leaver had trained after its copy is still to be merged."""
        state = self._state
        for member in list(state.leavers.values()):
            if f.id in member.unmerged and self._holds(f, member):
                del member.unmerged[f.id]
                if not member.unmerged:
                    del state.leavers[member.id]
