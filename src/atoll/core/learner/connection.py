"""The link: dial, greet, notice that nobody answers, dial again. Training does not depend on any of it."""

from __future__ import annotations

from atoll.core.learner.state import LearnerState
from atoll.core.policy import backoff_s, patience
from atoll.core.protocol import Dial, DialFailed, Envelope, Hangup, Hello, LinkClosed, LinkOpened, Ping, Pong, Started
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode


class LinkKeeper(LearnerState):
    def _on_started(self, now: float, event: Started) -> None:
        self._dial(0.0)

    def _dial(self, after_s: float) -> None:
        self._relink("dial")
        self.dials += 1
        if self.mode is not Mode.TRAINING:
            self.reason = Reason("link-dialing", (after_s, self.dials))
        self._note(Reason("link-dialing", (after_s, self.dials)))
        self._out.append(Dial(after_s, self.dials))

    def _redial(self) -> None:
        if self.mode is not Mode.STOPPED:
            self._dial(backoff_s(self.dials, self.id, self.limits))

    def _on_link_opened(self, now: float, event: LinkOpened) -> None:
        if self.mode is Mode.STOPPED:
            return
        assert event.session > self.session, f"link {event.session} after {self.session}"
        self._relink("opened")
        self.session = event.session
        self.last_heard = now
        self.hellos = 0
        self.pings = 0
        self._note(Reason("link-greeting", (self.session,)))
        self._greet(now)

    def _greet(self, now: float) -> None:
        self.hellos += 1
        received = tuple(self.received.values())
        training = self.mode in (Mode.TRAINING, Mode.FINISHING)
        run, prints = self.config.run_id, self.config.fingerprint
        self._send(Hello(run, prints, received, self.step, self.trained, training))
        wait = patience(self.round_trip, 4, self.limits) * 2.0 ** (self.hellos - 1)
        self._arm(now + min(wait, self.limits.most_wait_s), "hello", self.session)

    def _on_hello_timer(self, now: float, session: int) -> None:
        if self.link is not Link.GREETING or session != self.session or self.mode is Mode.STOPPED:
            return
        if self.hellos >= self.limits.hello_tries:
            self.round_trip.add(now - self.last_heard)  # it takes at least as long as we have waited in vain
            self._hang_up(now, Reason("hello-unanswered", (self.hellos,)))
        else:
            self._greet(now)

    def _quiet_limit(self) -> float:
        """While everybody stands still nothing is said, and a ping now and then tells both sides that the link is
        there: often enough for the syncer, which does not count a silence below `first_wait_s` then. Who leaves has
        little time, and wants to know as soon."""
        usual = patience(self.gap, 4, self.limits) if self.gap.count >= 4 else self.limits.first_wait_s
        return min(usual, self.limits.first_wait_s / 4) if self.paused or self.leaving else usual

    def _watch_quiet(self, at: float) -> None:
        self.quiet_at = at
        self._arm(at, "quiet", self.session)

    def _on_quiet_timer(self, now: float, session: int) -> None:
        """Nothing was heard for long: ask whether the syncer is there, and give the link up when it does not say."""
        if self.link is not Link.UP or session != self.session or self.mode is Mode.STOPPED or now < self.quiet_at:
            return
        quiet_s = now - self.last_heard
        limit = self._quiet_limit()
        if quiet_s < limit:
            # Never at once: a sum that rounds down to now would fire for ever.
            self._watch_quiet(max(self.last_heard + limit, now + self.limits.least_wait_s))
        elif self.pings >= self.limits.ping_tries:
            self.round_trip.add(now - self.ping_sent_at)
            self._hang_up(now, Reason("ping-unanswered", (self.pings,)))
        else:
            self.pings += 1
            self.ping_sent_at = now
            self.ping_serial += 1
            self._send(Ping(self.ping_serial))
            wait = patience(self.round_trip, 4, self.limits) * 2.0 ** (self.pings - 1)
            self._watch_quiet(now + min(wait, self.limits.most_wait_s))

    def _on_pong(self, now: float, envelope: Envelope, body: Pong) -> None:
        if body.serial == self.ping_serial:
            self.round_trip.add(now - self.ping_sent_at)

    def _hang_up(self, now: float, reason: Reason) -> None:
        self.reason = self._say(reason.code, *reason.args)
        self._out.append(Hangup(self.id, self.incarnation, self.session, reason))
        self._relink("closed")
        self._redial()

    def _on_link_closed(self, now: float, event: LinkClosed) -> None:
        if event.session != self.session or self.link not in (Link.GREETING, Link.UP):
            self._ignore("stale link")
            return
        self._relink("closed")
        self.reason = self._say("link-closed", event.why)
        self._redial()

    def _on_dial_failed(self, now: float, event: DialFailed) -> None:
        self._relink("failed")
        self._redial()
