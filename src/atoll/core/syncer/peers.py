"""Inner state for a joining learner: the syncer chooses a peer and forwards what the peer gives."""

from __future__ import annotations

from atoll.core.protocol import Envelope, InnerState, NoPeer, PeerChosen, StateRequest, StateWanted
from atoll.core.reasons import Reason
from atoll.core.states import Standing
from atoll.core.syncer.state import Member, SyncerState
from atoll.core.types import NOTHING, LearnerId


class Peers:
    """Choose a peer for a joining learner and forward its inner state."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def on_state_request(self, now: float, member: Member, envelope: Envelope, body: StateRequest) -> None:
        state = self._state
        peer = self._choose_peer(member, body.tried)
        if peer is None:
            new_run = state.merges == 0 and not body.tried
            reason = Reason("peer-new-run") if new_run else Reason("peer-none")
            state.send(member, NoPeer(state.note(reason), new_run))
            return
        state.say("learner", member.id, "peer-chosen", peer.id, member.id)
        state.send(member, PeerChosen(peer.id))
        state.send(peer, StateWanted(member.id, member.incarnation, state.versions()))

    def _choose_peer(self, member: Member, tried: tuple[LearnerId, ...]) -> Member | None:
        """A live learner that trains, and rather one that stays; of those the one that lags least behind what is
        published, then the lowest id."""
        candidates = [m for m in self._state.live.values() if m.id != member.id and m.id not in tried and m.step > 0]
        return min(candidates, key=self._lag, default=None)

    def _lag(self, member: Member) -> tuple[bool, int, LearnerId]:
        behind = sum(1 for p, f in self._state.fragments.items() if member.received.get(p, NOTHING) < f.version)
        return member.leaving, behind, member.id

    def on_inner_state(self, now: float, member: Member, envelope: Envelope, body: InnerState) -> None:
        state = self._state
        to = state.members.get(body.to)
        if to is None or to.incarnation != body.to_incarnation or to.standing is not Standing.JOINING:
            state.ignore("inner state for nobody")
            return
        state.send(to, body)
