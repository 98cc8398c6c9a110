"""The link: dial, greet, notice that nobody answers, dial again. Training does not depend on any of it."""

from __future__ import annotations

from atoll.core.learner.state import LearnerState
from atoll.core.policy import backoff_s, patience
from atoll.core.protocol import (
    Dial,
    DialFailed,
    Envelope,
    Hangup,
    Held,
    Hello,
    Hold,
    LinkClosed,
    LinkOpened,
    Ping,
    Pong,
    Refuse,
    Started,
    Stop,
)
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode


class Connection:
    """Keep a link to the syncer."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def on_started(self, now: float, event: Started) -> None:
        self._dial(0.0)

    def _dial(self, after_s: float) -> None:
        state = self._state
        state.move_link("dial")
        state.dials += 1
        if state.mode is not Mode.TRAINING:
            state.reason = Reason("link-dialing", (after_s, state.dials))
        state.note(Reason("link-dialing", (after_s, state.dials)))
        state.effects.append(Dial(after_s, state.dials))

    def _redial(self) -> None:
        state = self._state
        if state.mode is not Mode.STOPPED:
            self._dial(backoff_s(state.dials, state.id, state.limits))

    def on_opened(self, now: float, event: LinkOpened) -> None:
        state = self._state
        if state.mode is Mode.STOPPED:
            return
        assert event.session > state.session, f"link {event.session} after {state.session}"
        state.move_link("opened")
        state.session = event.session
        state.last_heard = now
        state.hellos = 0
        state.pings = 0
        state.note(Reason("link-greeting", (state.session,)))
        self._greet(now)

    def _greet(self, now: float) -> None:
        state = self._state
        state.hellos += 1
        received = tuple(state.received.values())
        training = state.mode in (Mode.TRAINING, Mode.FINISHING)
        run, prints = state.config.run_id, state.config.fingerprint
        state.send(Hello(run, prints, received, state.step, state.trained, training))
        wait = patience(state.round_trip, 4, state.limits) * 2.0 ** (state.hellos - 1)
        state.arm(now + min(wait, state.limits.most_wait_s), "hello", state.session)

    def on_hello_timer(self, now: float, session: int) -> None:
        state = self._state
        if state.link is not Link.GREETING or session != state.session or state.mode is Mode.STOPPED:
            return
        if state.hellos >= state.limits.hello_tries:
            state.round_trip.add(now - state.last_heard)  # it takes at least as long as we have waited in vain
            self._hang_up(now, Reason("hello-unanswered", (state.hellos,)))
        else:
            self._greet(now)

    def on_refuse(self, now: float, envelope: Envelope, body: Refuse) -> None:
        state = self._state
        if state.mode is Mode.STOPPED:
            return
        state.note(body.reason)
        if not body.final:
            self._hang_up(now, body.reason)
            return
        if body.reason.code in ("refused-incarnation", "refused-lost"):
            state.refused_for = body.current
        state.move_mode("stopped")
        state.reason = state.note(Reason("learner-refused", (str(body.reason),)))
        state.effects.append(Stop(state.reason))

    def is_current(self, envelope: Envelope) -> bool:
        """Is this a message to this incarnation, on its current link, from the current syncer?"""
        state = self._state
        if envelope.incarnation != state.incarnation or envelope.session != state.session:
            return False
        if state.link is Link.UP:
            return envelope.epoch == state.epoch
        if state.link is not Link.GREETING:
            return False  # what is still on its way on a link that is closed
        return envelope.epoch >= state.epoch  # greeting: the answer may come from a newer syncer, never from an older

    def on_hold(self, now: float, envelope: Envelope, body: Hold) -> None:
        """A word that was delayed or doubled on its way must not undo a newer one."""
        state = self._state
        if body.serial > state.hold_serial:
            state.hold_serial = body.serial
            if body.paused is not state.paused and state.mode in (Mode.JOINING, Mode.TRAINING):
                state.paused = body.paused
                state.reason = state.say("learner-paused" if body.paused else "learner-resumed")
                self.watch_quiet(now)
        state.send(Held(state.hold_serial, state.paused))

    def _quiet_limit(self) -> float:
        """While everybody stands still nothing is said, and a ping now and then tells both sides that the link is
        there: often enough for the syncer, which does not count a silence below `first_wait_s` then. Who leaves has
        little time, and wants to know as soon."""
        state = self._state
        usual = patience(state.gap, 4, state.limits) if state.gap.count >= 4 else state.limits.first_wait_s
        return min(usual, state.limits.first_wait_s / 4) if state.paused or state.leaving else usual

    def watch_quiet(self, now: float) -> None:
        """Check for silence of the syncer after the time that is usual for it."""
        self._watch_quiet_at(now + self._quiet_limit())

    def _watch_quiet_at(self, at: float) -> None:
        state = self._state
        state.quiet_at = at
        state.arm(at, "quiet", state.session)

    def on_quiet_timer(self, now: float, session: int) -> None:
        """Nothing was heard for long: ask whether the syncer is there, and give the link up when it does not say."""
        state = self._state
        if state.link is not Link.UP or session != state.session or state.mode is Mode.STOPPED or now < state.quiet_at:
            return
        quiet_s = now - state.last_heard
        limit = self._quiet_limit()
        if quiet_s < limit:
            # Never at once: a sum that rounds down to now would fire for ever.
            self._watch_quiet_at(max(state.last_heard + limit, now + state.limits.least_wait_s))
        elif state.pings >= state.limits.ping_tries:
            state.round_trip.add(now - state.ping_sent_at)
            self._hang_up(now, Reason("ping-unanswered", (state.pings,)))
        else:
            state.pings += 1
            state.ping_sent_at = now
            state.ping_serial += 1
            state.send(Ping(state.ping_serial))
            wait = patience(state.round_trip, 4, state.limits) * 2.0 ** (state.pings - 1)
            self._watch_quiet_at(now + min(wait, state.limits.most_wait_s))

    def on_pong(self, now: float, envelope: Envelope, body: Pong) -> None:
        state = self._state
        if body.serial == state.ping_serial:
            state.round_trip.add(now - state.ping_sent_at)

    def _hang_up(self, now: float, reason: Reason) -> None:
        state = self._state
        state.reason = state.say(reason.code, *reason.args)
        state.effects.append(Hangup(state.id, state.incarnation, state.session, reason))
        state.move_link("closed")
        self._redial()

    def on_closed(self, now: float, event: LinkClosed) -> None:
        state = self._state
        if event.session != state.session or state.link not in (Link.GREETING, Link.UP):
            state.ignore("stale link")
            return
        state.move_link("closed")
        state.reason = state.say("link-closed", event.why)
        self._redial()

    def on_dial_failed(self, now: float, event: DialFailed) -> None:
        self._state.move_link("failed")
        self._redial()
