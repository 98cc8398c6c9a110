"""The learner: trains without ever waiting, answers pulls and adopts at step boundaries, and redials by itself."""

from __future__ import annotations

import heapq
from enum import Enum
from typing import NamedTuple

from atoll.core.dispatch import Table, handlers
from atoll.core.ledger import Line
from atoll.core.policy import Estimate, backoff_s, patience
from atoll.core.protocol import (
    AdoptFragment,
    Body,
    Contribution,
    CopyFragment,
    Delivered,
    Dial,
    DialFailed,
    Envelope,
    Finish,
    FinishAck,
    Hangup,
    Hello,
    InnerState,
    LearnerEffect,
    LearnerEvent,
    Leave,
    LeaveWanted,
    LinkClosed,
    LinkOpened,
    Marker,
    MessageArrived,
    NoPeer,
    PeerChosen,
    Ping,
    Pong,
    Published,
    Pull,
    Ready,
    Refuse,
    RefuseContribution,
    Report,
    Resync,
    SaveSnapshot,
    Say,
    Send,
    SnapshotPart,
    SnapshotSaved,
    SnapshotSaveFailed,
    Started,
    StartTraining,
    StateRequest,
    StateWanted,
    StepTaken,
    Stop,
    TimerFired,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.tables import LEARNER_TABLE, LINK_TABLE, Link, Mode, moved
from atoll.core.types import NOTHING, FragmentId, Incarnation, LearnerId, Mark, RoundId, RunConfig, Version

MOST_GIVING = 16
"""Joining learners that one peer serves at a time; the next one replaces the oldest, which asks another peer."""


class Copy(NamedTuple):
    """A fragment as it stood at the step boundary at which it was pulled."""

    round: RoundId
    step: int
    trained: int
    steps: int
    tokens: int
    dropped: int


class Giving(NamedTuple):
    wanted: StateWanted
    until_step: int


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


class LearnerCore:
    """One incarnation of one learner.

    >>> core = LearnerCore(RunConfig(fragments=2, every_steps=2), learner=1, incarnation=1)
    >>> core.handle(0.0, Started())
    [Dial(after_s=0.0, attempt=1)]
    """

    def __init__(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> None:
        self.config = config
        self.limits = config.limits
        self.id = learner
        self.incarnation = incarnation
        self.now = 0.0
        self.tick = 0
        self.seen = 0  # newest tick of the syncer that reached us
        self.epoch = 0  # newest syncer that welcomed us
        self.session = 0
        self.marker = 0  # newest snapshot whose cut we have passed: the colour of what we send
        self.seen_marker = 0  # newest snapshot that we know of
        self.mode = Mode.NEW
        self.link = Link.DOWN
        self.reason = Reason("link-dialing", (0.0, 1))
        self.step = 0
        self.trained = 0
        self.progress = 0.0
        ids = config.fragment_ids()
        self.fragments = ids
        self.versions: dict[FragmentId, Version] = dict.fromkeys(ids, NOTHING)  # adopted: the anchor's version
        self.received: dict[FragmentId, Version] = dict.fromkeys(ids, NOTHING)  # arrived, adopted or not
        self.marks: dict[FragmentId, Mark | None] = dict.fromkeys(ids, None)  # with the newest arrival
        self.arrivals: dict[FragmentId, None] = {}  # arrived and not adopted, in order of arrival
        self.base_step: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # steps up to here are settled
        self.settled: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # tokens merged or dropped
        self.dropped: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # of those, dropped
        self.pulls: dict[FragmentId, RoundId] = {}  # asked for and not answered yet
        self.copies: dict[FragmentId, Copy] = {}  # answered, and not known to be merged or refused for good
        self.cut_due = 0  # snapshot to save at the next step boundary
        self.part: SnapshotPart | None = None  # saved or being saved
        self.giving: dict[LearnerId, Giving] = {}  # joining learners that wait for our inner state
        self.wanted: tuple[Version, ...] = ()  # while joining: what must arrive before training starts
        self.moments: Reason | None = None  # while joining: where inner state comes from, once known
        self.warmup_steps = 0
        self.tried: tuple[LearnerId, ...] = ()  # peers that did not deliver
        self.peer: LearnerId = 0  # the peer that was asked last; 0 while unknown
        self.asked_peers = 0
        self.state_due = 0.0  # while joining: when the next peer is asked
        self.state_wait_s = 0.0
        self.final: tuple[Version, ...] = ()
        self.final_merges = 0
        self.refused_for: Incarnation | None = None  # the newer incarnation, if that is why we were refused
        self.dials = 0
        self.hellos = 0
        self.pings = 0
        self.ping_sent_at = 0.0
        self.last_heard = 0.0
        self.gap = Estimate()
        self.round_trip = Estimate()
        self.ignored: dict[str, int] = {}
        self.fired: dict[tuple[Enum, str], int] = {}
        self.said: dict[str, int] = {}
        self._timers: list[tuple[float, int, str, int]] = []
        self._timer_serial = 0
        self._out: list[LearnerEffect] = []
        self._events = handlers(type(self), _EVENTS)
        self._bodies = handlers(type(self), _BODIES)
        self._timer_handlers = handlers(type(self), _TIMERS)

    # ---------------------------------------------------------------------------------------------------- the door

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        self.tick += 1
        self._out = out = []
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
        """The driver takes inner steps exactly while this holds. Nothing that the network does may change it."""
        return self.mode is Mode.TRAINING or (self.mode is Mode.FINISHING and self.step > 0 and not self._final_here())

    # ---------------------------------------------------------------------------------------------------- helpers

    def _send(self, body: Body) -> None:
        self._out.append(
            Send(Envelope(self.id, self.incarnation, self.session, self.epoch, self.tick, self.seen, self.marker, body))
        )

    def _say(self, code: str, *args: object) -> Reason:
        reason = self._note(Reason(code, args))
        self._out.append(Say(("learner", self.id), reason))
        return reason

    def _note(self, reason: Reason) -> Reason:
        self.said[reason.code] = self.said.get(reason.code, 0) + 1
        return reason

    def _ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1

    def _arm(self, at: float, kind: str, key: int = 0) -> None:
        self._timer_serial += 1
        heapq.heappush(self._timers, (at, self._timer_serial, kind, key))

    def _turn(self, trigger: str) -> None:
        self.mode = moved(LEARNER_TABLE, self.mode, trigger, self.fired)

    def _relink(self, trigger: str) -> None:
        self.link = moved(LINK_TABLE, self.link, trigger, self.fired)

    # ---------------------------------------------------------------------------------------------------- training

    def _on_step(self, now: float, event: StepTaken) -> None:
        """The step boundary, in the order of the published algorithm: count, report, answer pulls, adopt.

        A due cut comes before everything that changes or shows the state: what was adopted or sent after the marker was
        seen must not be in the saved part.
        """
        assert self.mode is Mode.TRAINING or self.mode is Mode.FINISHING, f"a step while {self.mode.value}"
        self.step += event.steps
        self.trained += event.tokens
        if self.cut_due:
            self._save_part()
        if self.link is Link.UP:
            self._send(Report(self.step, self.trained, event.step_time_s))
        if self.pulls and self.link is Link.UP:
            self._answer_pulls()  # without a link a copy would be kept that nobody ever sees
        if self.arrivals:
            self._adopt_arrived()
        if self.giving:
            self._give_state()

    def _answer_pulls(self) -> None:
        for p, round_id in list(self.pulls.items()):
            if self.versions[p] > round_id.base:
                del self.pulls[p]  # the round is history
            elif self.versions[p] == round_id.base and self.step > self.base_step[p]:
                del self.pulls[p]
                self._contribute(p, round_id)
            # Otherwise the version that it builds on is still on its way; it is answered after that is adopted.

    def _contribute(self, p: FragmentId, round_id: RoundId) -> None:
        copy = Copy(
            round_id,
            self.step,
            self.trained,
            self.step - self.base_step[p],
            self.trained - self.settled[p],
            self.dropped[p],
        )
        self.copies[p] = copy
        self._out.append(CopyFragment(round_id, self.step))
        self._send_copy(copy)

    def _send_copy(self, copy: Copy) -> None:
        self._send(Contribution(copy.round, copy.step, copy.steps, copy.tokens, copy.trained, copy.dropped))

    def _adopt_arrived(self) -> None:
        for p in list(self.arrivals):
            self._adopt(p)
        self.arrivals.clear()

    def _adopt(self, p: FragmentId) -> None:
        """Counters keep exactly the steps that are not yet merged (carry), or start anew (overwrite, blend)."""
        copy = self.copies.pop(p, None)
        merged = self._was_merged(p, copy)
        merged_tokens = dropped_tokens = 0
        if copy is not None and merged:
            merged_tokens = copy.trained - self.settled[p]
            self.settled[p] = copy.trained
            self.base_step[p] = copy.step
        if self.config.adopt != "carry":
            dropped_tokens = self.trained - self.settled[p]
            self.dropped[p] += dropped_tokens
            self.settled[p] = self.trained
            self.base_step[p] = self.step
        self.versions[p] = self.received[p]
        pending = self.trained - self.settled[p]
        how = self.config.adopt if self.step else "overwrite"  # nothing of our own to keep before the first step
        self._out.append(AdoptFragment(p, self.versions[p], how, merged, merged_tokens, dropped_tokens, pending))

    def _was_merged(self, p: FragmentId, copy: Copy | None) -> bool:
        """Is our copy in the version that arrived, or in one before it that we missed?"""
        mark = self.marks[p]
        return (
            mark is not None
            and copy is not None
            and mark.incarnation == self.incarnation
            and mark.base == self.versions[p]
            and mark.copied_at == copy.step
        )

    # ---------------------------------------------------------------------------------------------------- messages

    def _on_message(self, now: float, event: MessageArrived) -> None:
        envelope = event.envelope
        if not self._is_for_us(envelope):
            self._ignore("stale link, incarnation or epoch")
            return
        self.seen = max(self.seen, envelope.tick)
        self.gap.add(now - self.last_heard)
        self.last_heard = now
        self.pings = 0
        if envelope.marker > self.seen_marker:
            self._see_marker(envelope.marker)
        if self.link is Link.GREETING and type(envelope.body) not in (Welcome, Refuse):
            self._ignore("before the welcome")  # which was lost; a later hello gets another, and everything again
            return
        self._bodies[type(envelope.body)](self, now, envelope, envelope.body)

    def _is_for_us(self, envelope: Envelope) -> bool:
        if envelope.incarnation != self.incarnation or envelope.session != self.session or self.link is Link.DOWN:
            return False
        if self.link is Link.UP:
            return envelope.epoch == self.epoch
        return envelope.epoch >= self.epoch  # greeting: the answer may come from a newer syncer, never from an older

    def _on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        p = body.round.fragment
        copy = self.copies.get(p)
        if copy is not None and copy.round == body.round:
            self._send_copy(copy)  # the answer was lost; the same copy again, or nobody could tell which was merged
            return
        # A pull that was delayed or doubled on its way must not replace a newer one: (1) attempt 2 is answered and
        # merged, (2) an old pull of attempt 1 arrives and its answer takes the place of the copy, (3) the published
        # mark names a copy that is gone, and merged work is taken for lost.
        newest = max((r for r in (self.pulls.get(p), copy.round if copy is not None else None) if r), default=None)
        if p in self.versions and self.mode is Mode.TRAINING and (newest is None or newest < body.round):
            self.pulls[p] = body.round

    def _on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        """Nothing to undo: the copy is kept until the next adoption says whether it is in (a syncer that was restarted
        refuses what its predecessor had made durable)."""
        self._note(body.reason)

    def _on_published(self, now: float, envelope: Envelope, body: Published) -> None:
        p = body.fragment
        if p not in self.received:
            self._ignore("unknown fragment")
            return
        if body.version > self.received[p]:
            if body.base is not None and body.base != self.received[p]:
                self._send(Resync(p, self.received[p]))
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

    def _on_marker(self, now: float, envelope: Envelope, body: Marker) -> None:
        """The envelope has said it; here a part that was lost on the way is sent again."""
        if self.part is not None and self.part.snapshot == body.snapshot and not self.cut_due:
            self._send(self.part)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _see_marker(self, marker: int) -> None:
        self.seen_marker = marker
        if self.mode is Mode.TRAINING:
            self.cut_due = marker
        else:
            self.marker = marker  # nothing of ours to save

    def _save_part(self) -> None:
        versions = tuple(self.versions.values())
        outstanding = tuple(c.round for p, c in self.copies.items() if c.round.base == self.versions[p])
        self.part = SnapshotPart(self.cut_due, self.step, self.trained, versions, outstanding)
        self._out.append(SaveSnapshot(self.cut_due, self.step))
        self.marker = self.cut_due
        self.cut_due = 0

    def _on_snapshot_saved(self, now: float, event: SnapshotSaved) -> None:
        if self.part is not None and self.part.snapshot == event.snapshot and self.link is Link.UP:
            self._send(self.part)

    def _on_snapshot_save_failed(self, now: float, event: SnapshotSaveFailed) -> None:
        if self.part is not None and self.part.snapshot == event.snapshot:
            self._say("snapshot-failed", event.why)
            self.part = self.part._replace(problem=event.why)
            if self.link is Link.UP:
                self._send(self.part)

    # ---------------------------------------------------------------------------------------------------- joining

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
            self.pulls.clear()  # its rounds ended with the syncer that opened them
        self._arm(now + self._quiet_limit(), "quiet", self.session)
        if self.mode is Mode.NEW:
            self._turn("welcomed")
            self.wanted = body.versions
            bound = self.config.every_steps * body.step_time_s
            self.state_wait_s = min(max(bound, self.limits.least_wait_s), self.limits.most_wait_s)
            if body.step_time_s == 0:
                self.state_wait_s = self.limits.first_wait_s
        if self.mode is Mode.JOINING and self.moments is None:
            self._ask_state(now)
        if self.mode is Mode.JOINING:
            self._check_ready(now)

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
        self.asked_peers += 1
        if self.peer:
            self.tried = (*self.tried, self.peer)
        if self.asked_peers >= self.limits.state_peers:
            self._start_fresh(now, self._note(Reason("state-tries-over", (self.asked_peers,))))
        else:
            self._ask_state(now)

    def _on_peer_chosen(self, now: float, envelope: Envelope, body: PeerChosen) -> None:
        self.peer = body.peer

    def _on_no_peer(self, now: float, envelope: Envelope, body: NoPeer) -> None:
        if self.mode is Mode.JOINING and self.moments is None:
            if body.new_run:
                self.moments = body.reason
                self._check_ready(now)
            else:
                self._start_fresh(now, body.reason)

    def _start_fresh(self, now: float, why: Reason) -> None:
        self.warmup_steps = self.config.warmup_steps
        self.moments = Reason("moments-fresh", (self.warmup_steps, str(why)))
        self._check_ready(now)

    def _on_inner_state(self, now: float, envelope: Envelope, body: InnerState) -> None:
        if self.mode is Mode.JOINING and self.moments is None and body.to_incarnation == self.incarnation:
            self.moments = Reason("moments-peer", (body.giver,))
            self._check_ready(now)

    def _check_ready(self, now: float) -> None:
        """Training starts when every fragment is here and it is known where inner state comes from.

        Versions that arrived meanwhile were buffered, one per fragment; they are replayed now.
        """
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
        self.giving[body.to] = Giving(body, self.step + self.config.every_steps)

    def _give_state(self) -> None:
        """Copied at a step boundary once we have adopted all that the joining learner will start from."""
        for to, giving in list(self.giving.items()):
            versions = tuple(self.versions.values())
            if all(have >= want for have, want in zip(versions, giving.wanted.versions, strict=True)):
                del self.giving[to]
                if self.link is Link.UP:
                    self._send(InnerState(self.id, to, giving.wanted.to_incarnation, self.step, versions))
            elif self.step > giving.until_step:
                del self.giving[to]

    # ---------------------------------------------------------------------------------------------------- ending

    def _final_here(self) -> bool:
        return all(self.received[p] >= v for p, v in zip(self.fragments, self.final, strict=True))

    def _on_finish(self, now: float, envelope: Envelope, body: Finish) -> None:
        if self.mode is Mode.STOPPED:
            self._send(FinishAck(body.merges))
            return
        if self.mode is not Mode.FINISHING:
            self._turn("finish")
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

    def _on_leave_wanted(self, now: float, event: LeaveWanted) -> None:
        if self.mode is Mode.STOPPED:
            return
        if self.link is Link.UP:
            self._send(Leave(event.why))
        self._turn("stopped")
        self.reason = self._note(Reason("learner-left", (event.why,)))
        self._out.append(Stop(self.reason))

    def _on_refuse(self, now: float, envelope: Envelope, body: Refuse) -> None:
        if self.mode is Mode.STOPPED:
            return
        self._note(body.reason)
        if not body.final:
            self._hang_up(now, body.reason)
            return
        if body.reason.code == "refused-incarnation":
            self.refused_for = body.current
        self._turn("stopped")
        self.reason = self._note(Reason("learner-refused", (str(body.reason),)))
        self._out.append(Stop(self.reason))

    # ---------------------------------------------------------------------------------------------------- the link

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
        if self.gap.count < 4:
            return self.limits.first_wait_s
        return patience(self.gap, 4, self.limits)

    def _on_quiet_timer(self, now: float, session: int) -> None:
        """Nothing was heard for long: ask whether the syncer is there, and give the link up when it does not say."""
        if self.link is not Link.UP or session != self.session or self.mode is Mode.STOPPED:
            return
        quiet_s = now - self.last_heard
        limit = self._quiet_limit()
        if quiet_s < limit:
            # Never at once: a sum that rounds down to now would fire for ever.
            self._arm(max(self.last_heard + limit, now + self.limits.least_wait_s), "quiet", session)
        elif self.pings >= self.limits.ping_tries:
            self.round_trip.add(now - self.ping_sent_at)
            self._hang_up(now, Reason("ping-unanswered", (self.pings,)))
        else:
            self.pings += 1
            self.ping_sent_at = now
            self._send(Ping(self.pings))
            wait = patience(self.round_trip, 4, self.limits) * 2.0 ** (self.pings - 1)
            self._arm(now + min(wait, self.limits.most_wait_s), "quiet", session)

    def _on_pong(self, now: float, envelope: Envelope, body: Pong) -> None:
        self.round_trip.add(now - self.ping_sent_at)

    def _hang_up(self, now: float, reason: Reason) -> None:
        self._say(reason.code, *reason.args)
        self._out.append(Hangup(self.id, self.session, reason))
        self._relink("closed")
        self._redial()

    def _on_link_closed(self, now: float, event: LinkClosed) -> None:
        if event.session != self.session or self.link not in (Link.GREETING, Link.UP):
            self._ignore("stale link")
            return
        self._relink("closed")
        self._say("link-closed", event.why)
        self._redial()

    def _on_dial_failed(self, now: float, event: DialFailed) -> None:
        self._relink("failed")
        self._redial()

    def _on_timer(self, now: float, event: TimerFired) -> None:
        """Due timers were handled at the door."""

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


_EVENTS: Table = (
    (Started, "_on_started"),
    (MessageArrived, "_on_message"),
    (TimerFired, "_on_timer"),
    (LinkOpened, "_on_link_opened"),
    (LinkClosed, "_on_link_closed"),
    (DialFailed, "_on_dial_failed"),
    (StepTaken, "_on_step"),
    (SnapshotSaved, "_on_snapshot_saved"),
    (SnapshotSaveFailed, "_on_snapshot_save_failed"),
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
    (Finish, "_on_finish"),
    (Pong, "_on_pong"),
)
_TIMERS: Table = (
    ("hello", "_on_hello_timer"),
    ("quiet", "_on_quiet_timer"),
    ("state", "_on_state_timer"),
)
