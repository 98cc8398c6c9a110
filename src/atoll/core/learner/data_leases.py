"""A learner's leases: it asks for more before they run out, and counts what it has had of them."""

from __future__ import annotations

from atoll.core.learner.state import LearnerState
from atoll.core.policy import patience
from atoll.core.protocol import Lease, LeaseRequest, StepTaken
from atoll.core.states import Link, Mode


class LearnerLeases:
    """Request leases before they run out and count the samples that were taken from them."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def add(self, now: float, body: Lease) -> bool:
        """Add a lease. Return False for one that comes again, or before another: leases count from 0 within the
        incarnation."""
        state = self._state
        if body.number != state.lease_count or not state.lease_samples or not 0 <= body.begin < body.end:
            state.ignore("lease out of turn")
            return False
        state.leases[body.number] = (body.begin, body.end)
        state.lease_count += 1
        state.held += body.end - body.begin
        if state.lease_tries == 1:
            state.lease_time.add(now - state.lease_asked_at)
        if not self._are_low():
            state.lease_tries = 0
        return True

    def count_samples(self, now: float, event: StepTaken) -> None:
        """Steps on samples that it has had already are told with none: training never waits for a lease. Whoever never
        takes any brings data of its own."""
        state = self._state
        samples = event.samples
        assert 0 <= samples <= state.held - state.taken, (
            f"took {samples} samples of {state.held - state.taken} that it has"
        )
        if samples:
            state.taken += samples
            state.is_dry = False
            while (
                state.lease_passed + self._first_length() <= state.taken and state.lease_first + 1 < state.lease_count
            ):
                state.lease_passed += self._first_length()
                del state.leases[state.lease_first]
                state.lease_first += 1
        elif event.steps and state.taken:
            state.repeated += event.steps
            if not state.is_dry:
                state.is_dry = True
                state.say("leases-dry", state.taken)
        if not state.lease_tries and self._are_low():
            self._send_request(now)

    def _first_length(self) -> int:
        state = self._state
        begin, end = state.leases[state.lease_first]
        return end - begin

    def _are_low(self) -> bool:
        state = self._state
        return state.held - state.taken <= state.lease_low

    def _send_request(self, now: float) -> None:
        state = self._state
        if state.link is not Link.UP or state.mode not in (Mode.JOINING, Mode.TRAINING):
            return
        state.lease_tries += 1
        state.lease_asked_at = now
        state.send(LeaseRequest(state.lease_count, state.taken))
        wait = patience(state.lease_time, 4, state.limits) * 2.0 ** min(state.lease_tries - 1, 20)
        state.lease_due = now + min(wait, state.limits.most_wait_s)
        state.arm(state.lease_due, "lease")

    def renew_request(self, now: float) -> None:
        """On a new link: what was asked for on the old one may be lost."""
        self._state.lease_tries = 0
        if self._are_low():
            self._send_request(now)

    def on_timer(self, now: float, key: int) -> None:
        state = self._state
        if not state.lease_tries or now < state.lease_due:
            return
        if state.link is not Link.UP:
            state.lease_tries = 0  # asked again with the next welcome
            return
        self._send_request(now)
