"""Join the run: download all fragments from the syncer and the optimizer state from a peer, or send it as a peer."""

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
"""Joining learners that one peer serves at a time. The next one replaces the oldest, which then tries another peer."""


@dataclass(eq=False)
class Joining:
    """Join the run, and send optimizer state to learners that join later."""

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
            state.seen_tick = envelope.tick  # ticks of the new syncer process start again at 1
            state.pause_serial = 0
            state.pulls.clear()  # open rounds end with the syncer that opened them
        self._connection.watch_idle(now)
        if state.mode is LearnerMode.NEW:
            state.transition_mode("welcomed")
            state.required = body.versions
            state.state_wait_s = state_timeout_s(state.config, body.step_time_s)
        if state.mode is LearnerMode.JOINING and state.state_source is None:
            self._resume_state_request(now)
        if state.lease_samples:
            self._leases.renew_request(now)
        if state.mode is LearnerMode.JOINING:
            self.check_ready(now)
        self._leaving.announce(now)

    def _resume_state_request(self, now: float) -> None:
        """Repeat a request that may be lost, without a new timeout.

        If the timeout restarted, a learner on a link that breaks often would never start to train.
        """
        state = self._state
        if state.state_due == 0.0:
            self._request_state(now)
        elif now >= state.state_due:
            self.on_state_timer(now, 0)
        else:
            state.send(StateRequest(state.tried_peers))

    def _request_state(self, now: float) -> None:
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
            return  # requested again after the next welcome
        state.log("state-timeout", f"learner {state.peer}" if state.peer else "any peer", state.state_wait_s)
        if state.peer:
            state.tried_peers = (*state.tried_peers, state.peer)
        self._request_from_next_peer(now)

    def on_state_rejected(self, now: float, event: StateRejected) -> None:
        """Try the next peer immediately. A late rejection of an earlier peer does not end the current wait."""
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
            self._request_state(now)
        else:
            state.state_due = 0.0  # requested after the next welcome

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

    def _start_fresh(self, now: float, cause: Reason) -> None:
        """Use the saved optimizer state, or a fresh one if none was saved."""
        state = self._state
        state.state_source = state.saved_state_source
        if state.state_source is None:
            state.warmup_steps = state.config.warmup_steps
            state.state_source = Reason("state-fresh", (state.warmup_steps, str(cause)))
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
        """Start training once all fragments, the source of the optimizer state and a lease are known.

        Versions that arrived meanwhile are buffered, one per fragment, and adopted now.
        """
        state = self._state
        if state.lease_samples and not state.lease_count:
            return
        if state.state_source is None or any(
            state.received[p] < v for p, v in zip(state.fragments, state.required, strict=True)
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
        # The joining learner's timeout, not a number of steps: versions arrive at the pace of the link.
        state.state_transfers[body.target] = StateTransfer(
            body, now + state_timeout_s(state.config, state.step_time.mean)
        )

    def send_state(self, now: float) -> None:
        """Send optimizer state at a step boundary, once the versions that the joining learner needs are adopted."""
        state = self._state
        for target, transfer in list(state.state_transfers.items()):
            request = transfer.request
            versions = tuple(state.versions.values())
            if all(own >= required for own, required in zip(versions, request.versions, strict=True)):
                del state.state_transfers[target]
                if state.link is ConnectionState.UP:
                    state.send(OptimizerState(state.id, target, request.target_incarnation, state.step, versions))
            elif now > transfer.due:
                del state.state_transfers[target]
