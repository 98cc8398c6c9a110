"""Joining: every fragment from the syncer, inner state from a peer; and giving inner state to others who join."""

from __future__ import annotations

from abc import abstractmethod

from atoll.core.learner.rounds import LearnerRounds
from atoll.core.learner.state import Giving
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


class Joining(LearnerRounds):
    def _on_welcome(self, now: float, envelope: Envelope, body: Welcome) -> None:
        if self.link is not Link.GREETING:
            self._ignore("welcome twice")
            return
        self._relink("welcomed")
        self.reason = self._say("link-up")
        self.dials = 0
        self.progress = max(self.progress, body.progress)
        if envelope.epoch > self.epoch:
            self.epoch = envelope.epoch
            self.seen = envelope.tick  # another process, another count
            self.hold_serial = 0
            self.pulls.clear()  # its rounds ended with the syncer that opened them
        self._watch_quiet(now + self._quiet_limit())
        if self.mode is Mode.NEW:
            self._turn("welcomed")
            self.wanted = body.versions
            self.state_wait_s = state_wait_s(self.config, body.step_time_s)
        if self.mode is Mode.JOINING and self.moments is None:
            self._ask_state_again(now)
        if self.lease_samples:
            self._ask_leases_anew(now)
        if self.mode is Mode.JOINING:
            self._check_ready(now)
        self._say_leaving(now)

    @abstractmethod
    def _say_leaving(self, now: float) -> None: ...

    def _ask_state_again(self, now: float) -> None:
        """On a new link the request may have been lost, but the wait goes on: links that break often must not keep a
        learner from ever starting."""
        if self.state_due == 0.0:
            self._ask_state(now)
        elif now >= self.state_due:
            self._on_state_timer(now, 0)
        else:
            self._send(StateRequest(self.tried))

    def _ask_state(self, now: float) -> None:
        self.peer = 0
        self.state_due = now + self.state_wait_s
        self._send(StateRequest(self.tried))
        self._arm(self.state_due, "state")

    def _on_state_timer(self, now: float, key: int) -> None:
        if self.mode is not Mode.JOINING or self.moments is not None or now < self.state_due:
            return
        if self.link is not Link.UP:
            return  # asked again with the next welcome
        self._say("state-late", f"learner {self.peer}" if self.peer else "any peer", self.state_wait_s)
        if self.peer:
            self.tried = (*self.tried, self.peer)
        self._ask_next_peer(now)

    def _on_state_rejected(self, now: float, event: StateRejected) -> None:
        """Ask the next peer at once. An answer of a peer that was too late does not end the wait for the next one."""
        if self.mode is not Mode.JOINING or self.moments is not None or event.giver in self.tried:
            return
        self._say("state-rejected", event.giver, event.why)
        self.tried = (*self.tried, event.giver)
        self._ask_next_peer(now)

    def _ask_next_peer(self, now: float) -> None:
        self.asked_peers += 1
        if self.asked_peers >= self.limits.state_peers:
            self._start_fresh(now, self._note(Reason("state-tries-over", (self.asked_peers,))))
        elif self.link is Link.UP:
            self._ask_state(now)
        else:
            self.state_due = 0.0  # asked with the next welcome

    def _on_peer_chosen(self, now: float, envelope: Envelope, body: PeerChosen) -> None:
        self.peer = body.peer

    def _on_no_peer(self, now: float, envelope: Envelope, body: NoPeer) -> None:
        if self.mode is Mode.JOINING and self.moments is None:
            if body.new_run and self.saved_moments is None:
                self.moments = body.reason
                self._check_ready(now)
            else:
                self._start_fresh(now, body.reason)

    def _on_moments_found(self, now: float, event: MomentsFound) -> None:
        self.saved_moments = Reason("moments-saved", (event.learner, event.snapshot))

    def _start_fresh(self, now: float, why: Reason) -> None:
        """Nobody gives any: what was saved, and only then fresh ones."""
        self.moments = self.saved_moments
        if self.moments is None:
            self.warmup_steps = self.config.warmup_steps
            self.moments = Reason("moments-fresh", (self.warmup_steps, str(why)))
        self._check_ready(now)

    def _on_inner_state(self, now: float, envelope: Envelope, body: InnerState) -> None:
        if self.mode is Mode.JOINING and self.moments is None and body.to_incarnation == self.incarnation:
            self.moments = Reason("moments-peer", (body.giver,))
            self._check_ready(now)

    def _check_ready(self, now: float) -> None:
        """Training starts when every fragment is here, it is known where inner state comes from, and there is a lease.

        Versions that arrived meanwhile were buffered, one per fragment; they are replayed now.
        """
        if self.lease_samples and not self.lease_count:
            return
        if self.moments is None or any(self.received[p] < v for p, v in zip(self.fragments, self.wanted, strict=True)):
            return
        self._turn("ready")
        self._adopt_arrived()
        self.reason = self._note(self.moments)
        self._out.append(StartTraining(self.moments, self.warmup_steps))
        if self.link is Link.UP:
            self._send(Ready(self.moments))

    def _on_state_wanted(self, now: float, envelope: Envelope, body: StateWanted) -> None:
        if self.mode is not Mode.TRAINING:
            return
        self.giving.pop(body.to, None)
        if len(self.giving) >= MOST_GIVING:
            del self.giving[next(iter(self.giving))]
            self._ignore("too many joining learners to serve")
        # As long as the other one waits, and not for so many steps: versions come at the pace of the link.
        self.giving[body.to] = Giving(body, now + state_wait_s(self.config, self.step_time.mean))

    def _give_state(self, now: float) -> None:
        """Copied at a step boundary once we have adopted all that the joining learner will start from."""
        for to, giving in list(self.giving.items()):
            versions = tuple(self.versions.values())
            if all(have >= want for have, want in zip(versions, giving.wanted.versions, strict=True)):
                del self.giving[to]
                if self.link is Link.UP:
                    self._send(InnerState(self.id, to, giving.wanted.to_incarnation, self.step, versions))
            elif now > giving.due:
                del self.giving[to]
