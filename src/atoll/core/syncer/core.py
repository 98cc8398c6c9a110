"""The syncer: `handle(now, event) -> effects`, without sockets, files, clock or tensors."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from atoll.core.data_leases import LeaseSums
from atoll.core.dispatch import Table, handlers
from atoll.core.ledger import Line
from atoll.core.policy import budget_progress
from atoll.core.protocol import (
    Contribution,
    ControlRequested,
    Delivered,
    FetchTime,
    FinishAck,
    FinishRequested,
    Held,
    Hello,
    InnerState,
    LearnerDisconnected,
    LeaseRequest,
    Leave,
    Leaving,
    MergeDone,
    MergeFailed,
    MessageArrived,
    Persisted,
    PersistFailed,
    Ping,
    Ready,
    Report,
    Resync,
    ShardBack,
    ShardLost,
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
from atoll.core.states import Phase, Stage, Standing
from atoll.core.syncer.shutdown import Ending
from atoll.core.syncer.state import Fragment, Member, Restored
from atoll.core.types import RunConfig


class FragmentView(NamedTuple):
    fragment: int
    version: int
    phase: str
    attempt: int
    asked: int
    contributions: int
    waiting_for: tuple[int, ...]
    last_contributors: tuple[int, ...]
    reason: str
    away: bool  # the shard that holds it cannot be reached: nothing is merged, whatever the phase


class MemberView(NamedTuple):
    learner: int
    incarnation: int
    standing: str
    step: int
    owed: int
    strikes: int
    reason: str


class SyncerView(NamedTuple):
    """What the syncer shows of itself. `alive`, `asked` and `merged` are three different counts."""

    epoch: int
    stage: str
    paused: bool
    quorum: int  # K and gamma as they are in force
    grace_margin: float
    merges: int
    trained: int
    progress: float
    rounds_in_flight: int
    flight_limit: int
    alive: int
    asked: int
    merged: int
    step_s: float
    quorum_s: float
    sync_s: float
    fragments: tuple[FragmentView, ...]
    members: tuple[MemberView, ...]
    ledger: tuple[Line, ...]
    leases: LeaseSums
    ignored: dict[str, int]


class SyncerCore(Ending):
    """One syncer process.

    >>> core = SyncerCore(RunConfig(fragments=2, every_steps=2), epoch=1)
    >>> core.handle(0.0, Started())
    []
    >>> core.view().stage
    'running'
    """

    def __init__(self, config: RunConfig, epoch: int, restored: Restored | None = None) -> None:
        super().__init__(config, epoch, restored)
        self._events = handlers(type(self), _EVENTS)
        self._bodies = handlers(type(self), _BODIES)
        self._timer_handlers = handlers(type(self), _TIMERS)

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        """The one door. Timers that are due are handled first, so a late event never finds an expired deadline open."""
        self.tick += 1
        out: list[SyncerEffect] = []
        self._out = out
        before = self.now
        if now < before:
            now = before  # a clock that went back
        self.now = now
        timers = self._timers
        if timers and timers[0][0] <= now:
            if now - timers[0][0] > self.limits.stall_s:
                self._excuse_silence(now - before)  # since when, nobody knows: perhaps since the event before
            self._fire(now)
        if self.stage is not Stage.SUPERSEDED:
            self._events[type(event)](self, now, event)
        return out

    def _fire(self, now: float) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now:
            _, _, kind, key = heapq.heappop(timers)
            if self.stage is not Stage.SUPERSEDED:
                self._timer_handlers[kind](self, now, key)

    def _on_started(self, now: float, event: Started) -> None:
        self._watch_absences(now)
        if self.stage is Stage.RUNNING:
            self._check_budget(now)
        elif self.stage is Stage.FINISHED:
            # Restarted after the end: learners that missed it may come back; if none does, there is nothing to do.
            self._arm(now + self.limits.first_wait_s, "finish")

    def _on_timer(self, now: float, event: TimerFired) -> None:
        """Due timers were handled at the door."""

    def _on_message(self, now: float, event: MessageArrived) -> None:
        envelope = event.envelope
        body = envelope.body
        if type(body) is Hello:
            self._on_hello(now, envelope, body)
            return
        member = self._current_member(envelope)
        if member is None:
            return
        self._heard(now, member, envelope)
        handler = self._bodies.get(type(body))
        if handler is None:
            self._ignore("a message that learners do not send")
            return
        handler(self, now, member, envelope, body)
        if self.cut is not None:
            self._check_cut(now)

    def _on_persisted(self, now: float, event: Persisted) -> None:
        key = event.key
        if self.unsaved:
            self._save_unsaved()
        if key.kind == "version":
            f = self.fragments[key.number]
            if f.away:
                self._ignore("the word of a shard that is away")  # what it holds it says when it is back
                return
            assert f.phase is Phase.MERGING and f.merged and key.version == f.version + 1, f"unasked {key}"
            self._version_saved(now, f)
            self._after_versions(now)
        elif key.kind == "members":
            self._members_saved(now, key.number)
        elif key.kind == "leases":
            self._leases_saved(now)
        elif key.kind == "snapshot":
            self._snapshot_saved(now)
        else:
            self._manifest_saved(now)

    def _on_persist_failed(self, now: float, event: PersistFailed) -> None:
        key = event.key
        if key.kind == "version":
            if self.fragments[key.number].away:
                self._ignore("the word of a shard that is away")
                return
            self._version_not_saved(now, self.fragments[key.number], event.why)
        elif key.kind == "members":
            self._members_not_saved(now, event.why)
        elif key.kind == "leases":
            self._leases_not_saved(now, event.why)
        elif key.kind == "snapshot":
            self._snapshot_not_saved(now, event.why)
        else:
            self._manifest_not_saved(now, event.why)

    # ---------------------------------------------------------------------------------------------------- showing

    def view(self) -> SyncerView:
        open_rounds = [f for f in self.fragments.values() if f.phase is not Phase.IDLE]
        return SyncerView(
            epoch=self.epoch,
            stage=self.stage.value,
            paused=self.paused,
            quorum=self.config.quorum,
            grace_margin=self.config.grace_margin,
            merges=self.merges,
            trained=self.ledger.trained,
            progress=budget_progress(self.config, self.merges, self.ledger.trained),
            rounds_in_flight=self.in_flight,
            flight_limit=self.flight_limit,
            alive=len(self.live),
            asked=max((len(f.asked) for f in open_rounds), default=0),
            merged=max((len(f.last_contributors) for f in self.fragments.values()), default=0),
            step_s=self._step_s(),
            quorum_s=self.quorum_time.mean,
            sync_s=self._sync_time().mean,
            fragments=tuple(self._view_fragment(f) for f in self.fragments.values()),
            members=tuple(self._view_member(m) for _, m in sorted(self.members.items())),
            ledger=tuple(self.ledger.line(p) for p in self.fragments),
            leases=self.leases.sums(),
            ignored=dict(sorted(self.ignored.items())),
        )

    def _view_fragment(self, f: Fragment) -> FragmentView:
        waiting = tuple(m.id for m in self._waiting(f)) if f.phase in (Phase.PULLING, Phase.GRACE) else ()
        return FragmentView(
            f.id,
            f.version,
            f.phase.value,
            f.attempt,
            len(f.asked),
            len(f.contributions),
            waiting,
            f.last_contributors,
            str(self.explain(f)),
            f.away,
        )

    def explain(self, f: Fragment) -> Reason:
        """Why the fragment is where it is, for people."""
        quorum = self.config.quorum
        if f.away:
            assert f.reason is not None
            return f.reason
        if f.phase is Phase.IDLE and self.paused:
            return Reason("round-paused")
        if f.phase is Phase.IDLE:
            ready = self._steps_ready(f)
            if ready < quorum:
                return Reason("round-not-ripe", (ready, quorum, f.need_steps))
            if self._places_taken() >= self.flight_limit:
                return Reason("round-no-slot", (self._places_taken(), self.flight_limit))
            return Reason("round-too-few", (len(self._askable(f)), quorum))
        if f.phase is Phase.PULLING:
            return Reason("round-waiting", (len(f.contributions), quorum, f.pull_tries))
        if f.phase is Phase.MERGING and not f.merged:
            return Reason("merging", (len(f.contributions),))
        assert f.reason is not None
        return f.reason

    def _view_member(self, m: Member) -> MemberView:
        reason = Reason("member-live") if m.standing is Standing.LIVE else Reason("member-joining", (m.incarnation,))
        if m.standing is Standing.LIVE and self.paused and m.held == self.pause_serial:
            reason = Reason("member-paused")
        elif m.standing is Standing.LIVE and m.leaving:
            reason = Reason("member-leaving", (len(m.unmerged),))
        elif m.standing is Standing.SUSPECT:
            reason = Reason("member-suspected", (self.now - m.last_heard, self._silence_limit(m)))
        elif m.standing is Standing.ADMITTING:
            reason = Reason("member-admitting", (m.incarnation,))
        text = str(reason)
        if m.standing in (Standing.AWAY, Standing.LEFT, Standing.LOST, Standing.QUARANTINED):
            unsaid = "has left" if m.standing is Standing.LEFT else "known from before a restart"
            text = str(m.reason) if m.reason is not None else unsaid
        return MemberView(m.id, m.incarnation, m.standing.value, m.step, len(m.owed), m.strikes, text)

    # ---------------------------------------------------------------------------------------------------- checking

    def check_invariants(self) -> None:
        """Everything that must hold between two events; raises AssertionError with what does not."""
        not_idle = sum(1 for f in self.fragments.values() if f.phase is not Phase.IDLE)
        assert self.in_flight == not_idle, f"{self.in_flight} rounds counted, {not_idle} open"
        assert self.live == {i: m for i, m in self.members.items() if m.standing is Standing.LIVE}
        assert list(self.live) == sorted(self.live)
        assert set(self.by_opening) == set(self.fragments)
        assert self.merges == sum(f.version for f in self.fragments.values())
        assert len(self.members) <= self.limits.most_learners
        for f in self.fragments.values():
            assert (f.round is None) == (f.phase is Phase.IDLE), f"fragment {f.id}: {f.phase} with round {f.round}"
            assert set(f.contributions) <= set(f.asked), f"fragment {f.id}: contributions of learners not asked"
            if f.phase in (Phase.GRACE, Phase.MERGING):
                assert len(f.contributions) >= f.quorum, f"fragment {f.id}: {f.phase} below quorum"
            unheard = f.away and f.phase is Phase.MERGING
            assert (f.id in self.unheard) == unheard, f"fragment {f.id}: {f.phase}, and its shard's word is awaited"
            assert not f.away or f.phase is Phase.IDLE or f.merged, f"fragment {f.id}: {f.phase} without its shard"
            assert not f.away or f.id not in self.unsaved, f"fragment {f.id}: to be saved without its shard"
            if f.round is not None:
                assert f.round.base == f.version, f"fragment {f.id}: round on {f.round.base}, version {f.version}"
            line = self.ledger.line(f.id)
            assert line.balanced(), f"fragment {f.id}: ledger out of balance, {line}"
        for m in self.members.values():
            assert set(m.owed) <= set(self.fragments)
            assert m.standing in (Standing.JOINING, Standing.LIVE, Standing.SUSPECT) or not m.owed
        for learner, m in self.leavers.items():
            assert self.members.get(learner) is m and m.leaving and m.unmerged, f"learner {learner} does not leave"
        self.leases.check()
        assert set(self.lease_closing) <= set(self.leases.holders)


_EVENTS: Table = (
    (Started, "_on_started"),
    (MessageArrived, "_on_message"),
    (TimerFired, "_on_timer"),
    (LearnerDisconnected, "_on_disconnected"),
    (MergeDone, "_on_merge_done"),
    (MergeFailed, "_on_merge_failed"),
    (Persisted, "_on_persisted"),
    (PersistFailed, "_on_persist_failed"),
    (StoreFenced, "_on_fenced"),
    (SnapshotRequested, "_on_snapshot_requested"),
    (FinishRequested, "_on_finish_requested"),
    (ControlRequested, "_on_control"),
    (ShardLost, "_on_shard_lost"),
    (ShardBack, "_on_shard_back"),
)
_BODIES: Table = (
    (Report, "_on_report"),
    (Contribution, "_on_contribution"),
    (Delivered, "_on_delivered"),
    (Resync, "_on_resync"),
    (SnapshotPart, "_on_part"),
    (StateRequest, "_on_state_request"),
    (InnerState, "_on_inner_state"),
    (Ready, "_on_ready"),
    (Leave, "_on_leave"),
    (Leaving, "_on_leaving"),
    (LeaseRequest, "_on_lease_request"),
    (Held, "_on_held"),
    (FetchTime, "_on_fetch_time"),
    (FinishAck, "_on_finish_ack"),
    (Ping, "_on_ping"),
)
_TIMERS: Table = (
    ("pull", "_on_pull_timer"),
    ("grace", "_on_grace_timer"),
    ("save", "_on_save_timer"),
    ("publish", "_on_publish_timer"),
    ("silence", "_on_silence_timer"),
    ("gone", "_on_gone_timer"),
    ("members", "_on_members_timer"),
    ("leases", "_on_leases_timer"),
    ("snapshot", "_on_snapshot_timer"),
    ("control", "_on_control_timer"),
    ("finals", "_on_finals_timer"),
    ("manifest", "_on_manifest_timer"),
    ("finish", "_on_finish_timer"),
)
