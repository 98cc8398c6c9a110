"""Joining: every fragment from the syncer, inner state from a peer; and giving inner state to others who join."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.learner.connection import Connection
from atoll.core.learner.leaving import Departure
from atoll.core.learner.rounds import LearnerLeases, LearnerRounds
from atoll.core.learner.state import LearnerState, StateTransfer
from atoll.core.policy import state_timeout_s
from atoll.core.protocol import (
    Envelope,
    NoPeer,
    OptimizerState,
    PeerChosen,
    ProvideState,
    Ready,
    SavedStateFound,
    StartTraining,
    StateRejected,
    StateRequest,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import ConnectionState, LearnerMode

MAX_STATE_TRANSFERS = 16
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
        if state.link is not ConnectionState.HANDSHAKE:
            state.ignore("duplicate-welcome")
            return
        state.transition_connection("welcomed")
        state.reason = state.log("connection-up")
        state.dials = 0
        state.progress = max(state.progress, body.progress)
        if envelope.epoch > state.epoch:
            state.epoch = envelope.epoch
            state.seen_tick = envelope.tick  # another process, another count
            state.pause_serial = 0
            state.pulls.clear()  # its rounds ended with the syncer that opened them
        self._connection.watch_idle(now)
        if state.mode is LearnerMode.NEW:
            state.transition_mode("welcomed")
            state.wanted = body.versions
            state.state_wait_s = state_timeout_s(state.config, body.step_time_s)
        if state.mode is LearnerMode.JOINING and state.state_source is None:
            self._resume_state_request(now)
        if state.lease_samples:
            self._leases.renew_request(now)
        if state.mode is LearnerMode.JOINING:
            self.check_ready(now)
        self._leaving.announce(now)

    def _resume_state_request(self, now: float) -> None:
        """On a new link the request may have been lost, but the wait goes on: links that break often must not keep a
        learner from ever starting."""
        state = self._state
        if state.state_due == 0.0:
            self._ask_state(now)
        elif now >= state.state_due:
            self.on_state_timer(now, 0)
        else:
            state.send(StateRequest(state.tried_peers))

    def _ask_state(self, now: float) -> None:
        state = self._state
        state.peer = 0
        state.state_due = now + state.state_wait_s
        state.send(StateRequest(state.tried_peers))
        state.arm_timer(state.state_due, "state")

    def on_state_timer(self, now: float, key: int) -> None:
        state = self._state
        if state.mode is not LearnerMode.JOINING or state.state_source is not None or now < state.state_due:
            return
        if state.link is not ConnectionState.UP:
            return  # asked again with the next welcome
        state.log("state-timeout", f"learner {state.peer}" if state.peer else "any peer", state.state_wait_s)
        if state.peer:
            state.tried_peers = (*state.tried_peers, state.peer)
        self._request_from_next_peer(now)

    def on_state_rejected(self, now: float, event: StateRejected) -> None:
        """Ask the next peer at once. An answer of a peer that was too late does not end the wait for the next one."""
        state = self._state
        if state.mode is not LearnerMode.JOINING or state.state_source is not None or event.source in state.tried_peers:
            return
        state.log("state-rejected", event.source, event.cause)
        state.tried_peers = (*state.tried_peers, event.source)
        self._request_from_next_peer(now)

    def _request_from_next_peer(self, now: float) -> None:
        state = self._state
        state.requested_peers += 1
        if state.requested_peers >= state.limits.max_state_peers:
            self._start_fresh(now, state.count_reason(Reason("state-peers-exhausted", (state.requested_peers,))))
        elif state.link is ConnectionState.UP:
            self._ask_state(now)
        else:
            state.state_due = 0.0  # asked with the next welcome

    def on_peer_chosen(self, now: float, envelope: Envelope, body: PeerChosen) -> None:
        self._state.peer = body.peer

    def on_no_peer(self, now: float, envelope: Envelope, body: NoPeer) -> None:
        state = self._state
        if state.mode is LearnerMode.JOINING and state.state_source is None:
            if body.new_run and state.saved_state_source is None:
                state.state_source = body.reason
                self.check_ready(now)
            else:
                self._start_fresh(now, body.reason)

    def on_saved_state_found(self, now: float, event: SavedStateFound) -> None:
        self._state.saved_state_source = Reason("state-from-snapshot", (event.learner, event.snapshot))

    def _start_fresh(self, now: float, why: Reason) -> None:
        """Nobody gives any: what was saved, and only then fresh ones."""
        state = self._state
        state.state_source = state.saved_state_source
        if state.state_source is None:
            state.warmup_steps = state.config.warmup_steps
            state.state_source = Reason("state-fresh", (state.warmup_steps, str(why)))
        self.check_ready(now)

    def on_optimizer_state(self, now: float, envelope: Envelope, body: OptimizerState) -> None:
        state = self._state
        if (
            state.mode is LearnerMode.JOINING
            and state.state_source is None
            and body.target_incarnation == state.incarnation
        ):
            state.state_source = Reason("state-from-peer", (body.source,))
            self.check_ready(now)

    def check_ready(self, now: float) -> None:
        """Training starts when every fragment is here, it is known where inner state comes from, and there is a lease.

        Versions that arrived meanwhile were buffered, one per fragment; they are replayed now.
        """
        state = self._state
        if state.lease_samples and not state.lease_count:
            return
        if state.state_source is None or any(
            state.received[p] < v for p, v in zip(state.fragments, state.wanted, strict=True)
        ):
            return
        state.transition_mode("ready")
        self._rounds.adopt_arrived()
        state.reason = state.count_reason(state.state_source)
        state.effects.append(StartTraining(state.state_source, state.warmup_steps))
        if state.link is ConnectionState.UP:
            state.send(Ready(state.state_source))

    def on_provide_state(self, now: float, envelope: Envelope, body: ProvideState) -> None:
        state = self._state
        if state.mode is not LearnerMode.TRAINING:
            return
        state.state_transfers.pop(body.target, None)
        if len(state.state_transfers) >= MAX_STATE_TRANSFERS:
            del state.state_transfers[next(iter(state.state_transfers))]
            state.ignore("too-many-state-transfers")
        # As long as the other one waits, and not for so many steps: versions come at the pace of the link.
        state.state_transfers[body.target] = StateTransfer(
            body, now + state_timeout_s(state.config, state.step_time.mean)
        )

    def send_state(self, now: float) -> None:
        """Copied at a step boundary once we have adopted all that the joining learner will start from."""
        state = self._state
        for to, giving in list(state.state_transfers.items()):
            versions = tuple(state.versions.values())
            if all(have >= want for have, want in zip(versions, giving.wanted.versions, strict=True)):
                del state.state_transfers[to]
                if state.link is ConnectionState.UP:
                    state.send(OptimizerState(state.id, to, giving.wanted.target_incarnation, state.step, versions))
            elif now > giving.due:
                del state.state_transfers[to]
