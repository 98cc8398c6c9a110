"""Core of the syncer: `handle(now, event) -> effects`, without sockets, files, clock or tensors."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.core.ledger import LeaseTotals, LedgerLine
from atoll.core.policy import budget_progress
from atoll.core.protocol import (
    Contribution,
    ControlRequested,
    DownloadTime,
    DrainRequest,
    Envelope,
    FinishAck,
    FinishRequested,
    Hello,
    LearnerDisconnected,
    LeaseRequest,
    Left,
    MergeDone,
    MergeFailed,
    MessageArrived,
    OptimizerState,
    PausedAck,
    Persisted,
    PersistFailed,
    Ping,
    PublishAck,
    Ready,
    Report,
    Resync,
    ShardLost,
    ShardReconnected,
    SnapshotPart,
    SnapshotRequested,
    Started,
    StateRequest,
    StoreFenced,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
)
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RoundPhase, RunStage
from atoll.core.syncer.controls import Controls, Finishing
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.membership import Membership
from atoll.core.syncer.rounds import Delivery, DrainingLearners, Rounds
from atoll.core.syncer.shards import SyncerShards
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import Fragment, LearnerFault, Member, RestoredState, SyncerState
from atoll.core.types import RunConfig


class FragmentView(NamedTuple):
    fragment: int
    version: int
    phase: str
    attempt: int
    pulled: int
    contributions: int
    waiting_for: tuple[int, ...]
    last_contributors: tuple[int, ...]
    reason: str
    unavailable: bool  # its shard is unavailable: nothing is merged, in any phase


class MemberView(NamedTuple):
    learner: int
    incarnation: int
    state: str
    step: int
    unacked: int
    strikes: int
    reason: str


class SyncerView(NamedTuple):
    """Read-only view of the syncer's state, for display. `alive`, `pulled` and `merged` are three different counts."""

    epoch: int
    stage: str
    paused: bool
    quorum: int  # K and gamma as an operator last set them
    grace_margin: float
    merges: int
    trained: int
    progress: float
    rounds_in_flight: int
    flight_limit: int
    alive: int
    pulled: int
    merged: int
    step_s: float
    quorum_s: float
    sync_s: float
    fragments: tuple[FragmentView, ...]
    members: tuple[MemberView, ...]
    ledger: tuple[LedgerLine, ...]
    leases: LeaseTotals
    ignored: dict[str, int]


@dataclass(frozen=True, slots=True)
class SyncerComponents:
    """The classes of which a syncer core is composed. A test that plants a bug replaces one of them."""

    state: type[SyncerState] = SyncerState
    delivery: type[Delivery] = Delivery
    data_leases: type[DataLeases] = DataLeases
    snapshots: type[Snapshots] = Snapshots
    draining: type[DrainingLearners] = DrainingLearners
    shutdown: type[Shutdown] = Shutdown
    rounds: type[Rounds] = Rounds
    controls: type[Controls] = Controls
    finishing: type[Finishing] = Finishing
    membership: type[Membership] = Membership
    shards: type[SyncerShards] = SyncerShards


DEFAULT_COMPONENTS = SyncerComponents()


class SyncerCore:
    """State machine of one syncer process.

    Components share `state` and call only components that were built before them. A component that detects a fault of
    a learner returns it, and `Membership` acts on it.

    >>> core = SyncerCore(RunConfig(fragments=2, every_steps=2), epoch=1)
    >>> core.handle(0.0, Started())
    []
    >>> core.view().stage
    'running'
    """

    def __init__(
        self,
        config: RunConfig,
        epoch: int,
        restored: RestoredState | None = None,
        parts: SyncerComponents = DEFAULT_COMPONENTS,
    ) -> None:
        self.state = state = parts.state(config, epoch, restored)
        self.delivery = delivery = parts.delivery(state)
        self.data_leases = leases = parts.data_leases(state)
        self.snapshots = snapshots = parts.snapshots(state)
        self.draining = draining = parts.draining(state)
        self.shutdown = shutdown = parts.shutdown(state)
        self.rounds = rounds = parts.rounds(state, delivery, leases, snapshots, draining, shutdown)
        self.controls = controls = parts.controls(state, rounds)
        self.finishing = finishing = parts.finishing(state, rounds, controls, snapshots, shutdown)
        self.membership = parts.membership(
            state, rounds, delivery, leases, snapshots, draining, controls, finishing, shutdown
        )
        self.shards = parts.shards(state, rounds, delivery, snapshots, finishing, shutdown)
        self._event_handlers: dict[type[SyncerEvent], Callable[[float, Any], None]] = {
            Started: self._on_started,
            MessageArrived: self._on_message,
            TimerFired: self._on_timer,
            LearnerDisconnected: self.membership.on_disconnected,
            MergeDone: rounds.on_merge_done,
            MergeFailed: rounds.on_merge_failed,
            Persisted: self._on_persisted,
            PersistFailed: self._on_persist_failed,
            StoreFenced: self.membership.on_fenced,
            SnapshotRequested: snapshots.on_requested,
            FinishRequested: finishing.on_requested,
            ControlRequested: controls.on_control,
            ShardLost: self.shards.on_lost,
            ShardReconnected: self.shards.on_back,
        }
        self._message_handlers: dict[type, Callable[[float, Member, Envelope, Any], LearnerFault | None]] = {
            Report: self.membership.on_report,
            Contribution: rounds.on_contribution,
            PublishAck: delivery.on_publish_ack,
            Resync: delivery.on_resync,
            SnapshotPart: snapshots.on_part,
            StateRequest: self.membership.on_state_request,
            OptimizerState: self.membership.on_optimizer_state,
            Ready: self.membership.on_ready,
            Left: self.membership.on_leave,
            DrainRequest: self.membership.on_leaving,
            LeaseRequest: leases.on_request,
            PausedAck: controls.on_paused_ack,
            DownloadTime: rounds.on_download_time,
            FinishAck: shutdown.on_finish_ack,
            Ping: self.membership.on_ping,
        }
        self._timer_handlers: dict[str, Callable[[float, int], LearnerFault | None]] = {
            "pull": rounds.on_pull_timer,
            "grace": rounds.on_grace_timer,
            "save": rounds.on_save_timer,
            "publish": delivery.on_timer,
            "silence": self.membership.on_silence_timer,
            "gone": self.membership.on_absence_timer,
            "members": self.membership.on_save_timer,
            "leases": leases.on_timer,
            "snapshot": snapshots.on_timer,
            "control": controls.on_timer,
            "finals": finishing.on_finals_timer,
            "manifest": shutdown.on_save_timer,
            "finish": self._on_finish_timer,
        }

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        """Handle an event and return the effects in order.

        Timers that are due are handled first, so that a late event never meets an expired deadline.
        """
        state = self.state
        state.tick += 1
        effects: list[SyncerEffect] = []
        state.effects = effects
        before = state.now
        if now < before:
            now = before  # the clock went back
        state.now = now
        timers = state.timers
        if timers and timers[0][0] <= now:
            if now - timers[0][0] > state.limits.stall_threshold_s:
                self.membership.excuse_silence(now - before)  # the stall may have begun right after the last event
            self._fire(now)
        if state.stage is not RunStage.SUPERSEDED:
            self._event_handlers[type(event)](now, event)
        return effects

    def next_deadline(self) -> float | None:
        """Return when the driver must send `TimerFired`, or None."""
        timers = self.state.timers
        return timers[0][0] if timers else None

    def _fire(self, now: float) -> None:
        state = self.state
        timers = state.timers
        while timers and timers[0][0] <= now:
            _, _, kind, key = heapq.heappop(timers)
            if state.stage is not RunStage.SUPERSEDED:
                fault = self._timer_handlers[kind](now, key)
                if fault is not None:
                    self.membership.handle_fault(now, fault)

    def _on_started(self, now: float, event: Started) -> None:
        self.membership.watch_absences(now)
        if self.state.stage is RunStage.RUNNING:
            self.finishing.check_budget(now)
        elif self.state.stage is RunStage.FINISHED:
            # Restarted after the end: learners that missed it may reconnect.
            self.state.arm_timer(now + self.state.limits.initial_wait_s, "finish")

    def _on_timer(self, now: float, event: TimerFired) -> None:
        """Do nothing: `handle` has already fired the timers that are due."""

    def _on_message(self, now: float, event: MessageArrived) -> None:
        envelope = event.envelope
        body = envelope.body
        membership = self.membership
        if type(body) is Hello:
            membership.on_hello(now, envelope, body)
            return
        member = membership.find_sender(envelope)
        if member is None:
            return
        membership.record_message(now, member, envelope)
        handler = self._message_handlers.get(type(body))
        if handler is None:
            self.state.ignore("unexpected-message")
            return
        fault = handler(now, member, envelope, body)
        if fault is not None:
            membership.handle_fault(now, fault)
        if self.state.snapshot is not None:
            self.snapshots.check_progress(now)

    def _on_persisted(self, now: float, event: Persisted) -> None:
        key = event.key
        if self.state.unsaved:
            self.rounds.save_unsaved()
        if key.kind == "version":
            if self.rounds.on_persisted(now, key):
                self.finishing.after_versions(now)
        elif key.kind == "members":
            self.membership.on_saved(now, key.number)
        elif key.kind == "leases":
            self.data_leases.on_saved(now)
        elif key.kind == "snapshot":
            self.snapshots.on_saved(now)
        else:
            self.shutdown.on_saved(now)

    def _on_persist_failed(self, now: float, event: PersistFailed) -> None:
        key = event.key
        if key.kind == "version":
            self.rounds.on_persist_failed(now, event)
        elif key.kind == "members":
            self.membership.on_not_saved(now, event.cause)
        elif key.kind == "leases":
            self.data_leases.on_not_saved(now, event.cause)
        elif key.kind == "snapshot":
            self.snapshots.on_not_saved(now, event.cause)
        else:
            self.shutdown.on_not_saved(now, event.cause)

    def _on_finish_timer(self, now: float, key: int) -> None:
        if self.state.stage is not RunStage.FINISHED:
            return
        for member in self.shutdown.unacknowledged():
            if now < member.finish_resend_at:
                continue
            if member.finish_attempts >= self.state.limits.max_finish_attempts:
                reason = Reason("finish-unacked", (member.id,))
                self.membership.handle_fault(now, LearnerFault(member, reason, closes_connection=True))
            else:
                self.shutdown.send_finish(now, member)
        self.shutdown.check_acks()

    # ---------------------------------------------------------------------------------------------------- display

    def view(self) -> SyncerView:
        state = self.state
        open_rounds = [f for f in state.fragments.values() if f.phase is not RoundPhase.IDLE]
        return SyncerView(
            epoch=state.epoch,
            stage=state.stage.value,
            paused=state.paused,
            quorum=state.config.quorum,
            grace_margin=state.config.grace_margin,
            merges=state.merges,
            trained=state.ledger.trained,
            progress=budget_progress(state.config, state.merges, state.ledger.trained),
            rounds_in_flight=state.in_flight,
            flight_limit=state.flight_limit,
            alive=len(state.live),
            pulled=max((len(f.pulled) for f in open_rounds), default=0),
            merged=max((len(f.last_contributors) for f in state.fragments.values()), default=0),
            step_s=state.step_s(),
            quorum_s=state.quorum_time.mean,
            sync_s=state.sync_time().mean,
            fragments=tuple(self._view_fragment(f) for f in state.fragments.values()),
            members=tuple(self._view_member(m) for _, m in sorted(state.members.items())),
            ledger=tuple(state.ledger.fragment_totals(p) for p in state.fragments),
            leases=state.leases.sums(),
            ignored=dict(sorted(state.ignored.items())),
        )

    def _view_fragment(self, f: Fragment) -> FragmentView:
        waiting = (
            tuple(m.id for m in self.rounds.waiting(f)) if f.phase in (RoundPhase.PULLING, RoundPhase.GRACE) else ()
        )
        return FragmentView(
            f.id,
            f.version,
            f.phase.value,
            f.attempt,
            len(f.pulled),
            len(f.contributions),
            waiting,
            f.last_contributors,
            str(self.explain(f)),
            f.unavailable,
        )

    def explain(self, f: Fragment) -> Reason:
        """Return why the fragment is in its phase."""
        state = self.state
        quorum = state.config.quorum
        if f.unavailable:
            assert f.reason is not None
            return f.reason
        if f.phase is RoundPhase.IDLE and state.paused:
            return Reason("round-paused")
        if f.phase is RoundPhase.IDLE:
            ready = self.rounds.count_ready_learners(f)
            if ready < quorum:
                return Reason("round-not-due", (ready, quorum, f.required_steps))
            if state.occupied_slots() >= state.flight_limit:
                return Reason("round-no-slot", (state.occupied_slots(), state.flight_limit))
            return Reason("round-quorum-missing", (len(self.rounds.pullable_learners(f)), quorum))
        if f.phase is RoundPhase.PULLING:
            return Reason("round-waiting", (len(f.contributions), quorum, f.pull_attempts))
        if f.phase is RoundPhase.MERGING and not f.merged:
            return Reason("merging", (len(f.contributions),))
        assert f.reason is not None
        return f.reason

    def _view_member(self, m: Member) -> MemberView:
        state = self.state
        reason = Reason("member-live") if m.state is MemberState.LIVE else Reason("member-joining", (m.incarnation,))
        if m.state is MemberState.LIVE and state.paused and m.acked_pause_serial == state.pause_serial:
            reason = Reason("member-paused")
        elif m.state is MemberState.LIVE and m.is_draining:
            reason = Reason("member-draining", (len(m.unmerged),))
        elif m.state is MemberState.SUSPECT:
            reason = Reason("member-suspected", (state.now - m.last_seen_at, self.membership.silence_limit(m)))
        elif m.state is MemberState.ADMITTING:
            reason = Reason("member-admitting", (m.incarnation,))
        text = str(reason)
        if m.state in (MemberState.DISCONNECTED, MemberState.LEFT, MemberState.LOST, MemberState.QUARANTINED):
            default = "has left" if m.state is MemberState.LEFT else "known from before a restart"
            text = str(m.reason) if m.reason is not None else default
        return MemberView(m.id, m.incarnation, m.state.value, m.step, len(m.unacked), m.strikes, text)

    # ---------------------------------------------------------------------------------------------------- checking

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant that holds between two events is violated."""
        state = self.state
        not_idle = sum(1 for f in state.fragments.values() if f.phase is not RoundPhase.IDLE)
        assert state.in_flight == not_idle, f"{state.in_flight} rounds counted, {not_idle} open"
        assert state.live == {i: m for i, m in state.members.items() if m.state is MemberState.LIVE}
        assert list(state.live) == sorted(state.live)
        assert set(state.by_opening) == set(state.fragments)
        assert state.merges == sum(f.version for f in state.fragments.values())
        assert len(state.members) <= state.limits.max_learners
        for f in state.fragments.values():
            assert (f.round is None) == (f.phase is RoundPhase.IDLE), f"fragment {f.id}: {f.phase} with round {f.round}"
            assert set(f.contributions) <= set(f.pulled), f"fragment {f.id}: contributions without a pull"
            if f.phase in (RoundPhase.GRACE, RoundPhase.MERGING):
                assert len(f.contributions) >= f.quorum, f"fragment {f.id}: {f.phase} below quorum"
            durability_unknown = f.unavailable and f.phase is RoundPhase.MERGING
            assert (f.id in state.durability_unknown) == durability_unknown, (
                f"fragment {f.id}: {f.phase} while its durability is unknown"
            )
            assert not f.unavailable or f.phase is RoundPhase.IDLE or f.merged, (
                f"fragment {f.id}: {f.phase} without its shard"
            )
            assert not f.unavailable or f.id not in state.unsaved, f"fragment {f.id}: unsaved without its shard"
            if f.round is not None:
                assert f.round.base == f.version, f"fragment {f.id}: round on {f.round.base}, version {f.version}"
            totals = state.ledger.fragment_totals(f.id)
            assert totals.is_balanced(), f"fragment {f.id}: ledger out of balance, {totals}"
        for m in state.members.values():
            assert set(m.unacked) <= set(state.fragments)
            assert m.state in (MemberState.JOINING, MemberState.LIVE, MemberState.SUSPECT) or not m.unacked
        for learner, m in state.draining.items():
            assert state.members.get(learner) is m and m.is_draining and m.unmerged, f"learner {learner} does not drain"
        state.leases.check()
        assert set(state.lease_closing) <= set(state.leases.holders)
