"""A learner's leases: it asks for more before they run out, and counts what it has had of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from atoll.core.learner.connection import LinkKeeper
from atoll.core.policy import patience
from atoll.core.protocol import Envelope, Lease, LeaseRequest, StepTaken
from atoll.core.states import Link, Mode


class LearnerLeases(LinkKeeper, ABC):
    def _on_lease(self, now: float, envelope: Envelope, body: Lease) -> None:
        """Leases count from 0 within the incarnation: one that comes again, or before another, changes nothing."""
        if body.number != self.lease_count or not self.lease_samples or not 0 <= body.begin < body.end:
            self._ignore("lease out of turn")
            return
        self.leases[body.number] = (body.begin, body.end)
        self.lease_count += 1
        self.held += body.end - body.begin
        if self.lease_tries == 1:
            self.lease_time.add(now - self.lease_asked_at)
        if not self._leases_are_low():
            self.lease_tries = 0
        if self.mode is Mode.JOINING:
            self._check_ready(now)

    def _count_samples(self, now: float, event: StepTaken) -> None:
        """Steps on samples that it has had already are told with none: training never waits for a lease. Whoever never
        takes any brings data of its own."""
        samples = event.samples
        assert 0 <= samples <= self.held - self.taken, f"took {samples} samples of {self.held - self.taken} that it has"
        if samples:
            self.taken += samples
            self.is_dry = False
            while self.lease_passed + self._first_length() <= self.taken and self.lease_first + 1 < self.lease_count:
                self.lease_passed += self._first_length()
                del self.leases[self.lease_first]
                self.lease_first += 1
        elif event.steps and self.taken:
            self.repeated += event.steps
            if not self.is_dry:
                self.is_dry = True
                self._say("leases-dry", self.taken)
        if not self.lease_tries and self._leases_are_low():
            self._ask_leases(now)

    def _first_length(self) -> int:
        begin, end = self.leases[self.lease_first]
        return end - begin

    def _leases_are_low(self) -> bool:
        return self.held - self.taken <= self.lease_low

    def _ask_leases(self, now: float) -> None:
        if self.link is not Link.UP or self.mode not in (Mode.JOINING, Mode.TRAINING):
            return
        self.lease_tries += 1
        self.lease_asked_at = now
        self._send(LeaseRequest(self.lease_count, self.taken))
        wait = patience(self.lease_time, 4, self.limits) * 2.0 ** min(self.lease_tries - 1, 20)
        self.lease_due = now + min(wait, self.limits.most_wait_s)
        self._arm(self.lease_due, "lease")

    def _ask_leases_anew(self, now: float) -> None:
        """On a new link: what was asked for on the old one may be lost."""
        self.lease_tries = 0
        if self._leases_are_low():
            self._ask_leases(now)

    def _on_lease_timer(self, now: float, key: int) -> None:
        if not self.lease_tries or now < self.lease_due:
            return
        if self.link is not Link.UP:
            self.lease_tries = 0  # asked again with the next welcome
            return
        self._ask_leases(now)

    @abstractmethod
    def _check_ready(self, now: float) -> None: ...
