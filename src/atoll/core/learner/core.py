"""Core of a learner: `handle(now, event) -> effects`. It answers pulls and adopts at step boundaries."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.core.learner.connection import Connection
from atoll.core.learner.joining import MAX_STATE_TRANSFERS, Joining
from atoll.core.learner.leaving import Departure, LearnerShutdown
from atoll.core.learner.rounds import LearnerLeases, LearnerRounds
from atoll.core.learner.state import LearnerState
from atoll.core.ledger import LedgerLine
from atoll.core.protocol import (
    ConnectionClosed,
    ConnectionOpened,
    DialFailed,
    Drain,
    Envelope,
    Finish,
    FragmentDamaged,
    LearnerEffect,
    LearnerEvent,
    Lease,
    LeaveRequested,
    LinkMeasured,
    Marker,
    MessageArrived,
    NoPeer,
    OptimizerState,
    PeerChosen,
    Pong,
    ProvideState,
    Published,
    Pull,
    Refuse,
    RefuseContribution,
    Report,
    SavedStateFound,
    SetPaused,
    SnapshotSaved,
    SnapshotSaveFailed,
    Started,
    StateRejected,
    StepTaken,
    TimerFired,
    Welcome,
)
from atoll.core.states import ConnectionState, LearnerMode
from atoll.core.types import NO_VERSION, FragmentId, Incarnation, LearnerId, RunConfig


class LearnerView(NamedTuple):
    """Read-only view of a learner core, for checkers and tests."""

    learner: int
    incarnation: int
    mode: str
    link: str
    session: int
    epoch: int
    step: int
    trained: int
    progress: float
    versions: tuple[int, ...]
    received: tuple[int, ...]
    pulls: tuple[int, ...]
    copies: tuple[int, ...]
    ledger: tuple[LedgerLine, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LearnerComponents:
    """The classes of which a learner core is composed. A test that plants a bug replaces one of them."""

    state: type[LearnerState] = LearnerState
    connection: type[Connection] = Connection
    data_leases: type[LearnerLeases] = LearnerLeases
    rounds: type[LearnerRounds] = LearnerRounds
    leaving: type[Departure] = Departure
    joining: type[Joining] = Joining
    shutdown: type[LearnerShutdown] = LearnerShutdown


DEFAULT_COMPONENTS = LearnerComponents()


class LearnerCore:
    """Incarnation of one learner. Components share `state` and call only components that were built before them.

    >>> core = LearnerCore(RunConfig(fragments=2, every_steps=2), learner=1, incarnation=1)
    >>> core.handle(0.0, Started())
    [Dial(delay_s=0.0, attempt=1)]
    """

    def __init__(
        self,
        config: RunConfig,
        learner: LearnerId,
        incarnation: Incarnation,
        parts: LearnerComponents = DEFAULT_COMPONENTS,
    ) -> None:
        self.state = state = parts.state(config, learner, incarnation)
        self.connection = connection = parts.connection(state)
        self.data_leases = leases = parts.data_leases(state)
        self.rounds = rounds = parts.rounds(state)
        self.leaving = leaving = parts.leaving(state)
        self.joining = joining = parts.joining(state, connection, leases, rounds, leaving)
        self.shutdown = parts.shutdown(state, rounds)
        self._event_handlers: dict[type[LearnerEvent], Callable[[float, Any], None]] = {
            Started: connection.on_started,
            MessageArrived: self._on_message,
            TimerFired: self._on_timer,
            ConnectionOpened: connection.on_opened,
            ConnectionClosed: connection.on_closed,
            DialFailed: connection.on_dial_failed,
            StepTaken: self._on_step,
            FragmentDamaged: rounds.on_damaged,
            LinkMeasured: rounds.on_link_measured,
            SnapshotSaved: rounds.on_snapshot_saved,
            SnapshotSaveFailed: rounds.on_snapshot_save_failed,
            SavedStateFound: joining.on_saved_state_found,
            StateRejected: joining.on_state_rejected,
            LeaveRequested: leaving.on_leave_requested,
        }
        self._message_handlers: dict[type, Callable[[float, Envelope, Any], None]] = {
            Welcome: joining.on_welcome,
            Refuse: connection.on_refuse,
            Pull: rounds.on_pull,
            RefuseContribution: rounds.on_refused_contribution,
            Published: self._on_published,
            Marker: rounds.on_marker,
            ProvideState: joining.on_provide_state,
            OptimizerState: joining.on_optimizer_state,
            PeerChosen: joining.on_peer_chosen,
            NoPeer: joining.on_no_peer,
            Lease: self._on_lease,
            SetPaused: connection.on_set_paused,
            Drain: leaving.on_drain,
            Finish: self.shutdown.on_finish,
            Pong: connection.on_pong,
        }
        self._timer_handlers: dict[str, Callable[[float, int], None]] = {
            "hello": connection.on_hello_timer,
            "quiet": connection.on_idle_timer,
            "state": joining.on_state_timer,
            "lease": leases.on_timer,
            "leaving": leaving.on_timer,
        }

    # ---------------------------------------------------------------------------------------------------- events

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        """Handle an event, after all timers that are due, and return the effects in order."""
        state = self.state
        state.tick += 1
        effects: list[LearnerEffect] = []
        state.effects = effects
        if now < state.now:
            now = state.now  # the clock went back
        state.now = now
        timers = state.timers
        while timers and timers[0][0] <= now:
            _, _, kind, key = heapq.heappop(timers)
            self._timer_handlers[kind](now, key)
        self._event_handlers[type(event)](now, event)
        return effects

    def next_deadline(self) -> float | None:
        """Return when the driver must send `TimerFired`, or None."""
        timers = self.state.timers
        return timers[0][0] if timers else None

    def _on_step(self, now: float, event: StepTaken) -> None:
        """Handle a step boundary in the order of the published algorithm: count, report, answer pulls, adopt.

        A due snapshot comes before everything that changes or sends state: the saved part must not contain anything
        that was adopted or sent after the marker arrived.
        """
        state = self.state
        assert state.mode is LearnerMode.TRAINING or state.mode is LearnerMode.FINISHING, (
            f"a step while {state.mode.value}"
        )
        state.step += event.steps
        state.trained += event.tokens
        if event.steps:
            state.step_time.add(event.step_time_s)
        if state.lease_samples:
            self.data_leases.count_samples(now, event)
        if state.snapshot_due:
            self.rounds.save_part()
        if state.link is ConnectionState.UP and event.steps:
            state.send(Report(state.step, state.trained, event.step_time_s, state.consumed_samples))
        if state.pulls and state.link is ConnectionState.UP:
            self.rounds.answer_pulls()  # without a connection the copy would never be received
        adopts = bool(state.arrivals)
        if adopts:
            self.rounds.adopt_arrived()
        if state.state_transfers:
            self.joining.send_state(now)
        if adopts and state.leaving:
            self.leaving.check_drained()
            self.leaving.announce(now)  # with the fragments that are still unmerged

    def _on_message(self, now: float, event: MessageArrived) -> None:
        state = self.state
        envelope = event.envelope
        if not self.connection.is_current(envelope):
            state.ignore("stale-sender")
            return
        if envelope.tick > state.seen_tick:
            state.seen_tick = envelope.tick
        if not state.is_standing_by:
            state.message_gap.add(now - state.last_seen_at)
        state.last_seen_at = now
        state.pings = 0
        if envelope.marker > state.seen_marker:
            self.rounds.on_new_marker(envelope)
        if state.link is ConnectionState.HANDSHAKE and type(envelope.body) not in (Welcome, Refuse):
            state.ignore("before-welcome")  # the welcome was lost; the next hello gets everything again
            return
        handler = self._message_handlers.get(type(envelope.body))
        if handler is None:
            state.ignore("unexpected-message")
            return
        handler(now, envelope, envelope.body)

    def _on_published(self, now: float, envelope: Envelope, body: Published) -> None:
        if not self.rounds.record_arrival(body):
            return
        if self.state.mode is LearnerMode.JOINING:
            self.joining.check_ready(now)
        elif self.state.mode is LearnerMode.FINISHING:
            self.shutdown.check_final()

    def _on_lease(self, now: float, envelope: Envelope, body: Lease) -> None:
        if self.data_leases.add(now, body) and self.state.mode is LearnerMode.JOINING:
            self.joining.check_ready(now)

    def _on_timer(self, now: float, event: TimerFired) -> None:
        """Do nothing: `handle` has already fired the timers that are due."""

    # ---------------------------------------------------------------------------------------------------- reading

    @property
    def training(self) -> bool:
        """Return whether the driver takes inner steps. It starts none while `is_standing_by`."""
        state = self.state
        return state.mode is LearnerMode.TRAINING or (
            state.mode is LearnerMode.FINISHING and state.step > 0 and not self.shutdown.has_final_versions()
        )

    @property
    def has_boundary_work(self) -> bool:
        """Return whether there are pulls, versions, snapshots or state transfers to handle at a step boundary.

        A paused driver is at a step boundary: it reports zero steps whenever this becomes true.
        """
        state = self.state
        return bool(state.pulls or state.arrivals or state.snapshot_due or state.state_transfers)

    def is_current(self, envelope: Envelope) -> bool:
        """Return whether the core would accept this message now. The driver drops the values of other messages."""
        return self.state.link is ConnectionState.UP and self.connection.is_current(envelope)

    # ---------------------------------------------------------------------------------------------------- showing

    def fragment_totals(self, p: FragmentId) -> LedgerLine:
        """Return the token totals of one fragment."""
        state = self.state
        dropped = {"overwritten-on-adopt": state.dropped[p]} if state.dropped[p] else {}
        return LedgerLine(state.trained, state.settled[p] - state.dropped[p], state.trained - state.settled[p], dropped)

    def view(self) -> LearnerView:
        state = self.state
        return LearnerView(
            state.id,
            state.incarnation,
            state.mode.value,
            state.link.value,
            state.session,
            state.epoch,
            state.step,
            state.trained,
            state.progress,
            tuple(state.versions.values()),
            tuple(state.received.values()),
            tuple(state.pulls),
            tuple(state.copies),
            tuple(self.fragment_totals(p) for p in state.fragments),
            str(state.reason),
        )

    def check_invariants(self) -> None:
        state = self.state
        for p in state.fragments:
            assert state.received[p] >= state.versions[p] >= NO_VERSION, f"fragment {p}: adopted before it arrived"
            assert (p in state.arrivals) == (state.received[p] > state.versions[p]), (
                f"fragment {p}: arrivals do not match"
            )
            totals = self.fragment_totals(p)
            assert totals.is_balanced(), f"fragment {p}: ledger out of balance, {totals}"
            assert state.base_step[p] <= state.step
            copy = state.copies.get(p)
            if copy is not None:
                assert copy.round.base <= state.versions[p] or state.mode is not LearnerMode.TRAINING
                assert copy.trained >= state.settled[p], f"fragment {p}: the copy has only settled work"
        assert len(state.state_transfers) <= MAX_STATE_TRANSFERS
        assert set(state.pulls) <= set(state.fragments)
        assert 0 <= state.consumed_samples <= state.leased_samples, (
            f"{state.consumed_samples} samples consumed of {state.leased_samples}"
        )
        assert list(state.leases) == list(range(state.lease_first, state.lease_count))
