"""Connection to the syncer: dial, send a hello, detect a silent syncer and reconnect. Training never waits for it."""

from __future__ import annotations

from atoll.core.learner.state import LearnerState
from atoll.core.policy import backoff_s, retry_timeout
from atoll.core.protocol import (
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    Dial,
    DialFailed,
    Envelope,
    Hello,
    PausedAck,
    Ping,
    Pong,
    Refuse,
    SetPaused,
    Started,
    Stop,
)
from atoll.core.reasons import Reason
from atoll.core.states import ConnectionState, LearnerMode


class Connection:
    """Keep a connection to the syncer."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def on_started(self, now: float, event: Started) -> None:
        self._dial(0.0)

    def _dial(self, after_s: float) -> None:
        state = self._state
        state.transition_connection("dial")
        state.dials += 1
        if state.mode is not LearnerMode.TRAINING:
            state.reason = Reason("connection-dialing", (after_s, state.dials))
        state.count_reason(Reason("connection-dialing", (after_s, state.dials)))
        state.effects.append(Dial(after_s, state.dials))

    def _redial(self) -> None:
        state = self._state
        if state.mode is not LearnerMode.STOPPED:
            self._dial(backoff_s(state.dials, state.id, state.limits))

    def on_opened(self, now: float, event: ConnectionOpened) -> None:
        state = self._state
        if state.mode is LearnerMode.STOPPED:
            return
        assert event.session > state.session, f"link {event.session} after {state.session}"
        state.transition_connection("opened")
        state.session = event.session
        state.last_seen_at = now
        state.hellos = 0
        state.pings = 0
        state.count_reason(Reason("connection-handshake", (state.session,)))
        self._send_hello(now)

    def _send_hello(self, now: float) -> None:
        state = self._state
        state.hellos += 1
        received = tuple(state.received.values())
        training = state.mode in (LearnerMode.TRAINING, LearnerMode.FINISHING)
        run, prints = state.config.run_id, state.config.fingerprint
        state.send(Hello(run, prints, received, state.step, state.trained, training))
        wait = retry_timeout(state.round_trip, 4, state.limits) * 2.0 ** (state.hellos - 1)
        state.arm_timer(now + min(wait, state.limits.max_wait_s), "hello", state.session)

    def on_hello_timer(self, now: float, session: int) -> None:
        state = self._state
        if state.link is not ConnectionState.HANDSHAKE or session != state.session or state.mode is LearnerMode.STOPPED:
            return
        if state.hellos >= state.limits.max_hello_attempts:
            state.round_trip.add(now - state.last_seen_at)  # lower bound, so that the next timeout is longer
            self._close_link(now, Reason("hello-unanswered", (state.hellos,)))
        else:
            self._send_hello(now)

    def on_refuse(self, now: float, envelope: Envelope, body: Refuse) -> None:
        state = self._state
        if state.mode is LearnerMode.STOPPED:
            return
        state.count_reason(body.reason)
        if not body.final:
            self._close_link(now, body.reason)
            return
        if body.reason.code in ("refused-incarnation", "refused-lost"):
            state.refused_incarnation = body.current_incarnation
        state.transition_mode("stopped")
        state.reason = state.count_reason(Reason("learner-refused", (str(body.reason),)))
        state.effects.append(Stop(state.reason))

    def is_current(self, envelope: Envelope) -> bool:
        """Return whether a message is for this incarnation, on its current connection, from the current syncer."""
        state = self._state
        if envelope.incarnation != state.incarnation or envelope.session != state.session:
            return False
        if state.link is ConnectionState.UP:
            return envelope.epoch == state.epoch
        if state.link is not ConnectionState.HANDSHAKE:
            return False  # late message of a closed connection
        return envelope.epoch >= state.epoch  # the reply to a hello may come from a newer syncer, never from an older

    def on_set_paused(self, now: float, envelope: Envelope, body: SetPaused) -> None:
        """Pause or resume. A delayed or duplicate request must not undo a newer one."""
        state = self._state
        if body.serial > state.pause_serial:
            state.pause_serial = body.serial
            if body.paused is not state.paused and state.mode in (LearnerMode.JOINING, LearnerMode.TRAINING):
                state.paused = body.paused
                state.reason = state.log("learner-paused" if body.paused else "learner-resumed")
                self.watch_idle(now)
        state.send(PausedAck(state.pause_serial, state.paused))

    def _idle_limit(self) -> float:
        """Return how long the syncer may be silent before a ping.

        In a paused run there are no other messages, and the syncer allows `initial_wait_s` of silence, so the learner
        pings more often than that. A leaving learner has little time and pings as often.
        """
        state = self._state
        usual = (
            retry_timeout(state.message_gap, 4, state.limits)
            if state.message_gap.count >= 4
            else state.limits.initial_wait_s
        )
        return min(usual, state.limits.initial_wait_s / 4) if state.paused or state.leaving else usual

    def watch_idle(self, now: float) -> None:
        """Start to watch the syncer for silence."""
        self._arm_idle_timer(now + self._idle_limit())

    def _arm_idle_timer(self, at: float) -> None:
        state = self._state
        state.idle_check_at = at
        state.arm_timer(at, "quiet", state.session)

    def on_idle_timer(self, now: float, session: int) -> None:
        """Ping a silent syncer. Close the connection if it does not answer."""
        state = self._state
        if (
            state.link is not ConnectionState.UP
            or session != state.session
            or state.mode is LearnerMode.STOPPED
            or now < state.idle_check_at
        ):
            return
        quiet_s = now - state.last_seen_at
        limit = self._idle_limit()
        if quiet_s < limit:
            # Never immediately: a sum that rounds down to `now` would fire forever.
            self._arm_idle_timer(max(state.last_seen_at + limit, now + state.limits.min_wait_s))
        elif state.pings >= state.limits.max_ping_attempts:
            state.round_trip.add(now - state.ping_sent_at)
            self._close_link(now, Reason("ping-unanswered", (state.pings,)))
        else:
            state.pings += 1
            state.ping_sent_at = now
            state.ping_serial += 1
            state.send(Ping(state.ping_serial))
            wait = retry_timeout(state.round_trip, 4, state.limits) * 2.0 ** (state.pings - 1)
            self._arm_idle_timer(now + min(wait, state.limits.max_wait_s))

    def on_pong(self, now: float, envelope: Envelope, body: Pong) -> None:
        state = self._state
        if body.serial == state.ping_serial:
            state.round_trip.add(now - state.ping_sent_at)

    def _close_link(self, now: float, reason: Reason) -> None:
        state = self._state
        state.reason = state.log(reason.code, *reason.args)
        state.effects.append(CloseConnection(state.id, state.incarnation, state.session, reason))
        state.transition_connection("closed")
        self._redial()

    def on_closed(self, now: float, event: ConnectionClosed) -> None:
        state = self._state
        if event.session != state.session or state.link not in (ConnectionState.HANDSHAKE, ConnectionState.UP):
            state.ignore("stale-connection")
            return
        state.transition_connection("closed")
        state.reason = state.log("connection-closed", event.cause)
        self._redial()

    def on_dial_failed(self, now: float, event: DialFailed) -> None:
        self._state.transition_connection("failed")
        self._redial()
