"""Joining: every fragment from the syncer, inner state from a peer; and giving inner state to others who join."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.learner.connection import Connection
from atoll.core.learner.leaving import Departure
from atoll.core.learner.rounds import LearnerLeases, LearnerRounds
from atoll.core.learner.state import Giving, LearnerState
from atoll.core.policy import state_wait_s
from atoll.core.protocol import (
    Envelope,
    InnerState,
    MomentsFound,
    NoPeer,
    PeerChosen,
    Ready,
    StartTraining,
    StateRejected,
    StateRequest,
    StateWanted,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode

MOST_GIVING = 16
"""Joining learners that one peer serves at a time; the next one replaces the oldest, which asks another peer."""


@dataclass(eq=False)
class Joining:
    """Join the run, and give inner state to learners that join later."""

    _state: LearnerState
    _connection: Connection
    _leases: LearnerLeases
    _rounds: LearnerRounds
    _leaving: Departure

    def on_welcome(self, now: float, envelope: Envelope, body: Welcome) -> None:
        state = self._state
        if state.link is not Link.GREETING:
            state.ignore("welcome twice")
            return
        state.move_link("welcomed")
        state.reason = state.say("link-up")
        state.dials = 0
        state.progress = max(state.progress, body.progress)
        if envelope.epoch > state.epoch:
            state.epoch = envelope.epoch
            state.seen = envelope.tick  # another process, another count
            state.hold_serial = 0
            state.pulls.clear()  # its rounds ended with the syncer that opened them
        self._connection.watch_quiet(now)
        if state.mode is Mode.NEW:
            state.move_mode("welcomed")
            state.wanted = body.versions
            state.state_wait_s = state_wait_s(state.config, body.step_time_s)
        if state.mode is Mode.JOINING and state.moments is None:
            self._ask_state_again(now)
        if state.lease_samples:
            self._leases.renew_request(now)
        if state.mode is Mode.JOINING:
            self.check_ready(now)
        self._leaving.announce(now)

    def _ask_state_again(self, now: float) -> None:
        """On a new link the request may have been lost, but the wait goes on: links that break often must not keep a
        learner from ever starting."""
        state = self._state
        if state.state_due == 0.0:
            self._ask_state(now)
        elif now >= state.state_due:
            self.on_state_timer(now, 0)
        else:
            state.send(StateRequest(state.tried))

    def _ask_state(self, now: float) -> None:
        state = self._state
        state.peer = 0
        state.state_due = now + state.state_wait_s
        state.send(StateRequest(state.tried))
        state.arm(state.state_due, "state")

    def on_state_timer(self, now: float, key: int) -> None:
        state = self._state
        if state.mode is not Mode.JOINING or state.moments is not None or now < state.state_due:
            return
        if state.link is not Link.UP:
            return  # asked again with the next welcome
        state.say("state-late", f"learner {state.peer}" if state.peer else "any peer", state.state_wait_s)
        if state.peer:
            state.tried = (*state.tried, state.peer)
        self._ask_next_peer(now)

    def on_state_rejected(self, now: float, event: StateRejected) -> None:
        """Ask the next peer at once. An answer of a peer that was too late does not end the wait for the next one."""
        state = self._state
        if state.mode is not Mode.JOINING or state.moments is not None or event.giver in state.tried:
            return
        state.say("state-rejected", event.giver, event.why)
        state.tried = (*state.tried, event.giver)
        self._ask_next_peer(now)

    def _ask_next_peer(self, now: float) -> None:
        state = self._state
        state.asked_peers += 1
        if state.asked_peers >= state.limits.state_peers:
            self._start_fresh(now, state.note(Reason("state-tries-over", (state.asked_peers,))))
        elif state.link is Link.UP:
            self._ask_state(now)
        else:
            state.state_due = 0.0  # asked with the next welcome

    def on_peer_chosen(self, now: float, envelope: Envelope, body: PeerChosen) -> None:
        self._state.peer = body.peer

    def on_no_peer(self, now: float, envelope: Envelope, body: NoPeer) -> None:
        state = self._state
        if state.mode is Mode.JOINING and state.moments is None:
            if body.new_run and state.saved_moments is None:
                state.moments = body.reason
                self.check_ready(now)
            else:
                self._start_fresh(now, body.reason)

    def on_moments_found(self, now: float, event: MomentsFound) -> None:
        self._state.saved_moments = Reason("moments-saved", (event.learner, event.snapshot))

    def _start_fresh(self, now: float, why: Reason) -> None:
        """Nobody gives any: what was saved, and only then fresh ones."""
        state = self._state
        state.moments = state.saved_moments
        if state.moments is None:
            state.warmup_steps = state.config.warmup_steps
            state.moments = Reason("moments-fresh", (state.warmup_steps, str(why)))
        self.check_ready(now)

    def on_inner_state(self, now: float, envelope: Envelope, body: InnerState) -> None:
        state = self._state
        if state.mode is Mode.JOINING and state.moments is None and body.to_incarnation == state.incarnation:
            state.moments = Reason("moments-peer", (body.giver,))
            self.check_ready(now)

    def check_ready(self, now: float) -> None:
        """Training starts when every fragment is here, it is known where inner state comes from, and there is a lease.

        Versions that arrived meanwhile were buffered, one per fragment; they are replayed now.
        """
        state = self._state
        if state.lease_samples and not state.lease_count:
            return
        if state.moments is None or any(
            state.received[p] < v for p, v in zip(state.fragments, state.wanted, strict=True)
        ):
            return
        state.move_mode("ready")
        self._rounds.adopt_arrived()
        state.reason = state.note(state.moments)
        state.effects.append(StartTraining(state.moments, state.warmup_steps))
        if state.link is Link.UP:
            state.send(Ready(state.moments))

    def on_state_wanted(self, now: float, envelope: Envelope, body: StateWanted) -> None:
        state = self._state
        if state.mode is not Mode.TRAINING:
            return
        state.giving.pop(body.to, None)
        if len(state.giving) >= MOST_GIVING:
            del state.giving[next(iter(state.giving))]
            state.ignore("too many joining learners to serve")
        # As long as the other one waits, and not for so many steps: versions come at the pace of the link.
        state.giving[body.to] = Giving(body, now + state_wait_s(state.config, state.step_time.mean))

    def give_state(self, now: float) -> None:
        """Copied at a step boundary once we have adopted all that the joining learner will start from."""
        state = self._state
        for to, giving in list(state.giving.items()):
            versions = tuple(state.versions.values())
            if all(have >= want for have, want in zip(versions, giving.wanted.versions, strict=True)):
                del state.giving[to]
                if state.link is Link.UP:
                    state.send(InnerState(state.id, to, giving.wanted.to_incarnation, state.step, versions))
            elif now > giving.due:
                del state.giving[to]
