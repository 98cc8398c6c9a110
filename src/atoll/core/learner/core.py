"""The learner: trains without ever waiting, answers pulls and adopts at step boundaries, and redials by itself."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from atoll.core.dispatch import Table, handlers
from atoll.core.learner.joining import MOST_GIVING
from atoll.core.learner.leaving import Parting
from atoll.core.ledger import Line
from atoll.core.protocol import (
    Delivered,
    DialFailed,
    Drain,
    Envelope,
    Finish,
    FinishAck,
    FragmentDamaged,
    Held,
    Hold,
    InnerState,
    LearnerEffect,
    LearnerEvent,
    Lease,
    LeaveWanted,
    LinkClosed,
    LinkMeasured,
    LinkOpened,
    Marker,
    MessageArrived,
    MomentsFound,
    NoPeer,
    PeerChosen,
    Pong,
    Published,
    Pull,
    Refuse,
    RefuseContribution,
    Report,
    Resync,
    SnapshotSaved,
    SnapshotSaveFailed,
    Started,
    StateRejected,
    StateWanted,
    StepTaken,
    Stop,
    StreamsChanged,
    TimerFired,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import Link, Mode
from atoll.core.types import NOTHING, FragmentId, Incarnation, LearnerId, RunConfig


class LearnerView(NamedTuple):
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
    ledger: tuple[Line, ...]
    reason: str


class LearnerCore(Parting):
    """One incarnation of one learner.

    >>> core = LearnerCore(RunConfig(fragments=2, every_steps=2), learner=1, incarnation=1)
    >>> core.handle(0.0, Started())
    [Dial(after_s=0.0, attempt=1)]
    """

    def __init__(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> None:
        super().__init__(config, learner, incarnation)
        self._events = handlers(type(self), _EVENTS)
        self._bodies = handlers(type(self), _BODIES)
        self._timer_handlers = handlers(type(self), _TIMERS)

    # ---------------------------------------------------------------------------------------------------- the door

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        self.tick += 1
        out: list[LearnerEffect] = []
        self._out = out
        if now < self.now:
            now = self.now  # a clock that went back
        self.now = now
        timers = self._timers
        while timers and timers[0][0] <= now:
            _, _, kind, key = heapq.heappop(timers)
            self._timer_handlers[kind](self, now, key)
        self._events[type(event)](self, now, event)
        return out

    def next_deadline(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    @property
    def training(self) -> bool:
        """The driver takes inner steps exactly while this holds, and begins none while it `rests`: that wait somebody
        has asked for. Nothing else that the network does may keep it from a step."""
        return self.mode is Mode.TRAINING or (self.mode is Mode.FINISHING and self.step > 0 and not self._final_here())

    def _on_step(self, now: float, event: StepTaken) -> None:
        """The step boundary, in the order of the published algorithm: count, report, answer pulls, adopt.

        A due cut comes before everything that changes or shows the state: what was adopted or sent after the marker was
        seen must not be in the saved part.
        """
        assert self.mode is Mode.TRAINING or self.mode is Mode.FINISHING, f"a step while {self.mode.value}"
        self.step += event.steps
        self.trained += event.tokens
        if event.steps:
            self.step_time.add(event.step_time_s)
        if self.lease_samples:
            self._count_samples(now, event)
        if self.cut_due:
            self._save_part()
        if self.link is Link.UP and event.steps:
            self._send(Report(self.step, self.trained, event.step_time_s, self.taken))
        if self.pulls and self.link is Link.UP:
            self._answer_pulls()  # without a link a copy would be kept that nobody ever sees
        adopts = bool(self.arrivals)
        if adopts:
            self._adopt_arrived()
        if self.giving:
            self._give_state(now)
        if adopts and self.leaving:
            self._check_pushed()
            self._say_leaving(now)  # what is left of it

    def _on_message(self, now: float, event: MessageArrived) -> None:
        envelope = event.envelope
        if not self._is_for_us(envelope):
            self._ignore("stale link, incarnation or epoch")
            return
        if envelope.tick > self.seen:
            self.seen = envelope.tick
        if not self.rests:
            self.gap.add(now - self.last_heard)
        self.last_heard = now
        self.pings = 0
        if envelope.marker > self.seen_marker:
            self._see_marker(envelope)
        if self.link is Link.GREETING and type(envelope.body) not in (Welcome, Refuse):
            self._ignore("before the welcome")  # which was lost; a later hello gets another, and everything again
            return
        handler = self._bodies.get(type(envelope.body))
        if handler is None:
            self._ignore("a message that syncers do not send")
            return
        handler(self, now, envelope, envelope.body)

    def _is_for_us(self, envelope: Envelope) -> bool:
        if envelope.incarnation != self.incarnation or envelope.session != self.session:
            return False
        if self.link is Link.UP:
            return envelope.epoch == self.epoch
        if self.link is not Link.GREETING:
            return False  # what is still on its way on a link that is closed
        return envelope.epoch >= self.epoch  # greeting: the answer may come from a newer syncer, never from an older

    def hears(self, envelope: Envelope) -> bool:
        """Would this message be taken in now? A driver keeps no values that its core does not know of."""
        return self.link is Link.UP and self._is_for_us(envelope)

    def _on_published(self, now: float, envelope: Envelope, body: Published) -> None:
        p = body.fragment
        if p not in self.received:
            self._ignore("unknown fragment")
            return
        if body.version > self.received[p]:
            if body.base is not None and body.base != self.received[p]:
                self._want_whole(p)
                return
            self.received[p] = body.version
            self.marks[p] = body.mark
            self.arrivals[p] = None
            self.progress = max(self.progress, body.progress)
        if self.link is Link.UP:
            self._send(Delivered(p, self.received[p]))
        if self.mode is Mode.JOINING:
            self._check_ready(now)
        elif self.mode is Mode.FINISHING:
            self._check_final()

    def _on_damaged(self, now: float, event: FragmentDamaged) -> None:
        self._say("fragment-damaged", event.version, event.fragment, event.why)
        if event.version > self.received.get(event.fragment, event.version):
            self._want_whole(event.fragment)

    def _want_whole(self, p: FragmentId) -> None:
        if self.link is Link.UP:
            self._send(Resync(p, self.received[p]))

    def _on_timer(self, now: float, event: TimerFired) -> None:
        """Due timers were handled at the door."""

    # ---------------------------------------------------------------------------------------------------- pausing

    @property
    def has_boundary_work(self) -> bool:
        """Something has come that is answered, adopted, given or saved at a step boundary. A driver that stands still
        is at one: it tells of no steps, once for each time that something came."""
        return bool(self.pulls or self.arrivals or self.cut_due or self.giving)

    def _on_hold(self, now: float, envelope: Envelope, body: Hold) -> None:
        """A word that was delayed or doubled on its way must not undo a newer one."""
        if body.serial > self.hold_serial:
            self.hold_serial = body.serial
            if body.paused is not self.paused and self.mode in (Mode.JOINING, Mode.TRAINING):
                self.paused = body.paused
                self.reason = self._say("learner-paused" if body.paused else "learner-resumed")
                self._watch_quiet(now + self._quiet_limit())
        self._send(Held(self.hold_serial, self.paused))

    # ---------------------------------------------------------------------------------------------------- ending

    def _final_here(self) -> bool:
        return all(self.received[p] >= v for p, v in zip(self.fragments, self.final, strict=True))

    def _on_finish(self, now: float, envelope: Envelope, body: Finish) -> None:
        if self.mode is Mode.STOPPED:
            self._send(FinishAck(body.merges))
            return
        if self.mode is not Mode.FINISHING:
            self._turn("finish")
            self.paused = False
            self.final = body.versions
            self.final_merges = body.merges
            self.pulls.clear()
            self.progress = 1.0
        self._check_final()

    def _check_final(self) -> None:
        if self._final_here():
            self._adopt_arrived()
            self._turn("stopped")
            self._send(FinishAck(self.final_merges))
            self.reason = self._note(Reason("learner-finished"))
            self._out.append(Stop(self.reason))

    def _on_refuse(self, now: float, envelope: Envelope, body: Refuse) -> None:
        if self.mode is Mode.STOPPED:
            return
        self._note(body.reason)
        if not body.final:
            self._hang_up(now, body.reason)
            return
        if body.reason.code in ("refused-incarnation", "refused-lost"):
            self.refused_for = body.current
        self._turn("stopped")
        self.reason = self._note(Reason("learner-refused", (str(body.reason),)))
        self._out.append(Stop(self.reason))

    # ---------------------------------------------------------------------------------------------------- showing

    def line(self, p: FragmentId) -> Line:
        dropped = {"adopted over": self.dropped[p]} if self.dropped[p] else {}
        return Line(self.trained, self.settled[p] - self.dropped[p], self.trained - self.settled[p], dropped)

    def view(self) -> LearnerView:
        return LearnerView(
            self.id,
            self.incarnation,
            self.mode.value,
            self.link.value,
            self.session,
            self.epoch,
            self.step,
            self.trained,
            self.progress,
            tuple(self.versions.values()),
            tuple(self.received.values()),
            tuple(self.pulls),
            tuple(self.copies),
            tuple(self.line(p) for p in self.fragments),
            str(self.reason),
        )

    def check_invariants(self) -> None:
        for p in self.fragments:
            assert self.received[p] >= self.versions[p] >= NOTHING, f"fragment {p}: adopted before it arrived"
            assert (p in self.arrivals) == (self.received[p] > self.versions[p]), f"fragment {p}: arrivals are wrong"
            assert self.line(p).balanced(), f"fragment {p}: ledger out of balance, {self.line(p)}"
            assert self.base_step[p] <= self.step
            copy = self.copies.get(p)
            if copy is not None:
                assert copy.round.base <= self.versions[p] or self.mode is not Mode.TRAINING
                assert copy.trained >= self.settled[p], f"fragment {p}: a copy of settled work is kept"
        assert len(self.giving) <= MOST_GIVING
        assert set(self.pulls) <= set(self.fragments)
        assert 0 <= self.taken <= self.held, f"{self.taken} samples taken of {self.held}"
        assert list(self.leases) == list(range(self.lease_first, self.lease_count))


_EVENTS: Table = (
    (Started, "_on_started"),
    (MessageArrived, "_on_message"),
    (TimerFired, "_on_timer"),
    (LinkOpened, "_on_link_opened"),
    (LinkClosed, "_on_link_closed"),
    (DialFailed, "_on_dial_failed"),
    (StepTaken, "_on_step"),
    (FragmentDamaged, "_on_damaged"),
    (LinkMeasured, "_on_link_measured"),
    (StreamsChanged, "_on_streams_changed"),
    (SnapshotSaved, "_on_snapshot_saved"),
    (SnapshotSaveFailed, "_on_snapshot_save_failed"),
    (MomentsFound, "_on_moments_found"),
    (StateRejected, "_on_state_rejected"),
    (LeaveWanted, "_on_leave_wanted"),
)
_BODIES: Table = (
    (Welcome, "_on_welcome"),
    (Refuse, "_on_refuse"),
    (Pull, "_on_pull"),
    (RefuseContribution, "_on_refused_contribution"),
    (Published, "_on_published"),
    (Marker, "_on_marker"),
    (StateWanted, "_on_state_wanted"),
    (InnerState, "_on_inner_state"),
    (PeerChosen, "_on_peer_chosen"),
    (NoPeer, "_on_no_peer"),
    (Lease, "_on_lease"),
    (Hold, "_on_hold"),
    (Drain, "_on_drain"),
    (Finish, "_on_finish"),
    (Pong, "_on_pong"),
)
_TIMERS: Table = (
    ("hello", "_on_hello_timer"),
    ("quiet", "_on_quiet_timer"),
    ("state", "_on_state_timer"),
    ("lease", "_on_lease_timer"),
    ("leaving", "_on_leaving_timer"),
)
