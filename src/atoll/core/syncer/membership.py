"""The learners of a run: admission, links, silence, loss and return; what they report of their training; and a peer's
inner state for one that joins."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.policy import Estimate, backoff_s, patience
from atoll.core.protocol import (
    Envelope,
    Halt,
    Hangup,
    Hello,
    InnerState,
    LearnerDisconnected,
    Leave,
    Leaving,
    MembersRecord,
    NoPeer,
    PeerChosen,
    Persist,
    Ping,
    Pong,
    Pull,
    Ready,
    Refuse,
    Report,
    StateRequest,
    StateWanted,
    StoreFenced,
    Welcome,
)
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage, Standing
from atoll.core.syncer.controls import Controls, Finishing
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.rounds import Delivery, Leavers, Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import CONNECTED, LearnerFault, Member, SyncerState
from atoll.core.types import MOST_SECONDS, MOST_TOKENS, MOST_TOKENS_PER_STEP, NOTHING, LearnerId, first_difference

STRANGERS = ("refused-id", "refused-run", "refused-fingerprint")
MEASURED_GAPS = 4
"""Between messages of a learner, before its silence is judged by them."""


@dataclass(eq=False)
class Membership:
    """Admit learners, record what they report, notice when they are gone, and let them return."""

    _state: SyncerState
    _rounds: Rounds
    _delivery: Delivery
    _leases: DataLeases
    _snapshots: Snapshots
    _leavers: Leavers
    _controls: Controls
    _finishing: Finishing
    _shutdown: Shutdown

    # ---------------------------------------------------------------------------------------------------- hello

    def on_hello(self, now: float, envelope: Envelope, body: Hello) -> None:
        state = self._state
        member = state.members.get(envelope.learner)
        refusal = self._hello_refusal(envelope, body, member)
        if envelope.epoch > state.epoch and (refusal is None or refusal.code not in STRANGERS):
            self._superseded(envelope.epoch)  # the epochs of another run say nothing about this one
            return
        if refusal is not None:
            current = member.incarnation if member is not None else 0
            stranger = Member(envelope.learner, envelope.incarnation, envelope.session)
            stranger.seen = envelope.tick
            final = refusal.code != "refused-full"
            state.send(stranger, Refuse(state.note(refusal), current, final))
            return
        if member is not None and member.incarnation == envelope.incarnation:
            self._greet_again(now, member, envelope, body)
            return
        self._admit(now, member, envelope, body)

    def _hello_refusal(self, envelope: Envelope, body: Hello, member: Member | None) -> Reason | None:
        state = self._state
        if envelope.learner < 1:
            return Reason("refused-id", (envelope.learner,))
        if not (body.step >= 0 and 0 <= body.trained <= min(MOST_TOKENS, body.step * MOST_TOKENS_PER_STEP)):
            return Reason("refused-wild", (body.step, body.trained))
        if body.run_id != state.config.run_id:
            return Reason("refused-run", (state.config.run_id, body.run_id))
        if body.fingerprint != state.config.fingerprint or len(body.received) != len(state.fragments):
            return Reason("refused-fingerprint", (self._first_difference(body),))
        if member is not None and envelope.incarnation < member.incarnation:
            return Reason("refused-incarnation", (envelope.incarnation, member.incarnation))
        known = member is not None and member.incarnation == envelope.incarnation
        if known and member is not None and member.standing is Standing.QUARANTINED:
            return Reason("refused-quarantined", (str(member.reason),))
        if known and member is not None and member.standing is Standing.LOST and self._is_durably_lost(member):
            return Reason("refused-lost", (member.incarnation,))
        if not known and state.stage is not Stage.RUNNING:
            return Reason("refused-finished")
        if member is None and len(state.members) >= state.limits.most_learners:
            return Reason("refused-full", (state.limits.most_learners,))
        return None

    def _first_difference(self, body: Hello) -> str:
        state = self._state
        if body.fingerprint != state.config.fingerprint:
            return first_difference(state.config.fingerprint, body.fingerprint)
        return f"{len(body.received)} fragments where the run has {len(state.fragments)}"

    def _admit(self, now: float, old: Member | None, envelope: Envelope, body: Hello) -> None:
        """A new incarnation. Its predecessor is out from this moment; it is in once that is durable.

        Without durability: (1) incarnation 2 is welcomed, (2) the syncer is killed, (3) incarnation 1, cut off until
        now, says hello to the restarted syncer and is taken for current, (4) both train as one learner.
        """
        state = self._state
        member = Member(envelope.learner, envelope.incarnation, envelope.session)
        member.seen = envelope.tick
        member.last_heard = now
        member.hello = body
        if old is not None:
            state.say("learner", old.id, "member-superseded", old.incarnation, envelope.incarnation)
            state.move_member(old, "superseded")
            member.standing = old.standing
            # Timers belong to the id: those that are armed go on for the new process, or each start would add one.
            member.silence_at = old.silence_at
            member.publish_timer = old.publish_timer
            member.gone_timer = old.gone_timer
            member.drained_by = old.drained_by
            self._retire(now, old, "replaced by a new incarnation")
        else:
            state.move_member(member, "hello")
        state.members[member.id] = member
        state.ledger.open(member.id, member.incarnation)
        state.say("learner", member.id, "member-admitting", member.incarnation)
        for f in state.fragments.values():
            f.open_steps.pop(member.id, None)  # they count the steps of another process
        self._save(now)
        member.admitted_by = self._next_serial()
        if old is not None:
            self._leases.close(old, member.admitted_by)

    def _retire(self, now: float, member: Member, why: str) -> None:
        """Close the books of an incarnation that is no longer live and forget it in everything that is under way."""
        state = self._state
        if member.id in state.ledger.accounts:
            state.ledger.close(member.id, why)
        self._forget(now, member)

    def _forget(self, now: float, member: Member) -> None:
        """What it has contributed stays in its round: at the time it was current, and sums cannot be undone."""
        state = self._state
        member.owed.clear()
        state.leavers.pop(member.id, None)
        self._snapshots.leave_out(now, member.id)
        for f in list(state.fragments.values()):
            if member.id in f.asked and f.phase in (Phase.PULLING, Phase.GRACE):
                if member.id not in f.contributions:
                    del f.asked[member.id]
                self._rounds.check_round(now, f)

    def _save(self, now: float) -> None:
        """One record at a time; whoever comes meanwhile is in the next one."""
        state = self._state
        if state.members_saving:
            state.members_dirty = True
            return
        state.members_saving = True
        state.members_dirty = False
        state.members_serial += 1
        members = [m for _, m in sorted(state.members.items())]
        incarnations = tuple((m.id, m.incarnation) for m in members)
        left = tuple(m.id for m in members if m.id not in state.ledger.accounts)
        lost = tuple(m.id for m in members if m.standing is Standing.LOST)
        retired = state.ledger.closed_trained
        state.effects.append(Persist(MembersRecord(state.members_serial, incarnations, left, retired, lost)))

    def _next_serial(self) -> int:
        """Of the record that will hold what is known now."""
        state = self._state
        return state.members_serial + (1 if state.members_dirty else 0)

    def on_saved(self, now: float, serial: int) -> None:
        state = self._state
        state.members_saving = False
        state.members_tries = 0
        state.members_durable = serial
        if state.lease_closing:
            self._leases.settle()
        for member in list(state.members.values()):
            # Whoever said hello after the record was written waits for the next one.
            if member.standing is not Standing.ADMITTING or member.admitted_by > serial:
                continue
            if member.hello is None:
                state.move_member(member, "gone")  # its link broke meanwhile
                self._watch_absence(now, member)
            else:
                state.move_member(member, "admitted training" if member.hello.training else "admitted")
                self._welcome(now, member, member.hello)
        if state.members_dirty:
            self._save(now)

    def on_not_saved(self, now: float, why: str) -> None:
        state = self._state
        state.members_saving = False
        delay = backoff_s(state.members_tries, 0, state.limits)
        state.members_tries += 1
        state.say("run", 0, "admission-failed", why, delay)
        state.arm(now + delay, "members")

    def on_save_timer(self, now: float, key: int) -> None:
        if not self._state.members_saving:
            self._save(now)

    def _greet_again(self, now: float, member: Member, envelope: Envelope, body: Hello) -> None:
        """The same process on a new link, or its hello once more because the welcome was lost."""
        state = self._state
        if envelope.session < member.session:
            state.ignore("stale session")
            return
        member.seen = max(member.seen, envelope.tick)
        fresh_link = envelope.session > member.session
        if member.standing is Standing.LEFT:
            state.ignore("hello after leaving")
            return
        if member.standing is Standing.LOST:
            state.ignore("hello of one whose loss is not durable yet")  # it says it again, and is refused then
            return
        if member.standing is Standing.ADMITTING:
            member.session = envelope.session
            member.hello = body
            return
        if fresh_link and member.standing is not Standing.AWAY:
            # It noticed the broken link before we did.
            self._gone(now, member, Reason("member-disconnected", ("a newer link took its place",)))
        if not fresh_link and member.standing is Standing.AWAY:
            state.ignore("hello on a dropped link")
            return
        member.session = envelope.session
        if member.standing is Standing.AWAY:
            state.move_member(member, "resumed" if body.training else "resumed joining")
            state.say("learner", member.id, "member-resumed", member.incarnation)
        self._welcome(now, member, body)

    def _welcome(self, now: float, member: Member, body: Hello) -> None:
        state = self._state
        member.hello = None
        member.last_heard = member.back_at = now
        member.step = max(member.step, body.step)
        self._count_from_here(member)
        member.training = body.training
        member.finish_tries = 0
        state.ledger.tell(member.id, body.trained)
        member.received = {p: v for p, v in zip(state.fragments, body.received, strict=True) if v != NOTHING}
        member.owed.clear()
        state.send(member, Welcome(state.versions(), state.progress(), state.step_s()))
        self._controls.send_request_anew(now, member)
        if member.standing is Standing.JOINING:
            state.say("learner", member.id, "member-joining", member.incarnation)
        for f in state.fragments.values():
            self._delivery.owe(now, member, f)
            # A round that opened before the link broke still wants its answer.
            if f.phase in (Phase.PULLING, Phase.GRACE) and member in self._rounds.waiting(f):
                assert f.round is not None
                state.send(member, Pull(f.round))
        self._shutdown.resend_finish(member)
        self._watch_silence(now + self.silence_limit(member), member)

    def _count_from_here(self, member: Member) -> None:
        """Steps that it took while it was away are not counted for fragments that were opened meanwhile: nobody knows
        which of them came after the opening. For all others its count goes on; if each new link began it anew, links
        that break more often than every H steps would keep the last fragments from ever being ripe."""
        if not member.counted:
            member.counted = True
            member.first_step = member.step
            return
        for f in self._state.fragments.values():
            if f.turned_at >= member.gone_at:
                f.open_steps[member.id] = member.step

    # ---------------------------------------------------------------------------------------------------- hearing

    def sender_of(self, envelope: Envelope) -> Member | None:
        """The member that this message speaks for; None if it comes from another process, link or time."""
        state = self._state
        if envelope.epoch > state.epoch:
            self._superseded(envelope.epoch)
            return None
        member = state.members.get(envelope.learner)
        if member is None or not self._is_current(member, envelope):
            state.ignore("stale incarnation or session")
            return None
        if member.standing not in CONNECTED:
            state.ignore("not a member now")
            return None
        return member

    def _is_current(self, member: Member, envelope: Envelope) -> bool:
        return (
            envelope.incarnation == member.incarnation
            and envelope.session == member.session
            and envelope.epoch == self._state.epoch
        )

    def on_heard(self, now: float, member: Member, envelope: Envelope) -> None:
        state = self._state
        if envelope.tick > member.seen:
            member.seen = envelope.tick
        silent_s = now - member.last_heard
        if not state.is_resting(member):
            member.gap.add(silent_s)
        member.last_heard = now
        if member.gap.count == MEASURED_GAPS:
            self._watch_silence(now + self.silence_limit(member), member)  # until now its limit was a guess
        if member.standing is Standing.SUSPECT:
            member.back_at = now
            state.move_member(member, "heard")
            state.say("learner", member.id, "member-heard", silent_s)

    def on_ping(self, now: float, member: Member, envelope: Envelope, body: Ping) -> None:
        self._state.send(member, Pong(body.serial))

    # ---------------------------------------------------------------------------------------------------- silence

    def silence_limit(self, member: Member) -> float:
        """Four times the high value of the gaps between its messages: a stutter is no silence.

        Never below four of its steps: messages that were held up come in one burst and make the gaps look short. And
        never below four of the shortest waits: a busy machine holds up a learner of quick steps for longer than these.
        And never below four of its answers: on a long and lossy link a message is sent again after more than a round
        trip, and once more after twice as long; who needs a second for an answer is not gone after a second.
        """
        state = self._state
        if member.gap.count < MEASURED_GAPS:
            return state.limits.first_wait_s
        least = 4 * max(member.pace.mean, member.answer.mean, state.limits.least_wait_s)
        least = min(least, state.limits.most_wait_s)
        limit = max(patience(member.gap, 4, state.limits), least)
        return max(limit, state.limits.first_wait_s) if state.is_resting(member) else limit

    def _watch_silence(self, at: float, member: Member) -> None:
        """Look at its silence then, or earlier if that is due anyway. A later look that was due becomes stale."""
        if member.silence_at is None or at < member.silence_at:
            member.silence_at = at
            self._state.arm(at, "silence", member.id)

    def on_silence_timer(self, now: float, learner: LearnerId) -> None:
        state = self._state
        member = state.members.get(learner)
        if member is None or member.silence_at is None or now < member.silence_at:
            return
        member.silence_at = None
        if member.standing not in CONNECTED:
            return
        limit = self.silence_limit(member)
        # A joining learner fetches a whole model and says little; its link, not its silence, tells of its end.
        if member.standing is Standing.JOINING:
            limit = state.limits.most_wait_s
        silent_s = now - member.last_heard
        if silent_s >= limit:
            if member.standing is Standing.LIVE:
                state.move_member(member, "silent")
                state.say("learner", member.id, "member-suspected", silent_s, limit)
                self._unwait(now, member)
            if silent_s >= 8 * limit or member.standing is Standing.JOINING:
                self._drop_link(now, member, Reason("member-lost", (silent_s,)))
                return
        due = member.last_heard + limit if silent_s < limit else now + limit
        if member.standing is Standing.JOINING:
            due = min(due, now + state.limits.first_wait_s)  # it may train at any moment, and then has another limit
        self._watch_silence(max(due, now + state.limits.least_wait_s), member)

    def _unwait(self, now: float, member: Member) -> None:
        """Nobody waits for a learner that is not live; it stays asked, in case it is heard again in time."""
        for f in list(self._state.fragments.values()):
            if member.id in f.asked and f.phase in (Phase.PULLING, Phase.GRACE):
                self._rounds.check_round(now, f)

    def excuse_silence(self, stood_s: float) -> None:
        """This process stood still, so it heard nobody: no learner's silence is counted against it."""
        state = self._state
        state.say("run", 0, "member-stalled", stood_s)
        for member in state.members.values():
            member.last_heard += stood_s
            member.away_since += stood_s

    # ---------------------------------------------------------------------------------------------------- going

    def on_disconnected(self, now: float, event: LearnerDisconnected) -> None:
        state = self._state
        member = state.members.get(event.learner)
        if member is None or (member.incarnation, member.session) != (event.incarnation, event.session):
            state.ignore("stale session")
            return
        if member.standing is Standing.ADMITTING:
            member.hello = None  # its admission goes on; it will dial again
        elif member.standing in CONNECTED:
            self._gone(now, member, Reason("member-disconnected", (event.why,)))

    def handle_fault(self, now: float, fault: LearnerFault) -> None:
        if fault.drops_link:
            self._drop_link(now, fault.member, fault.reason)
        else:
            self._strike(now, fault.member, fault.reason)

    def _drop_link(self, now: float, member: Member, reason: Reason) -> None:
        """We give the link up; the learner dials again, as the same incarnation, when it can."""
        self._state.effects.append(Hangup(member.id, member.incarnation, member.session, reason))
        self._gone(now, member, reason)

    def _gone(self, now: float, member: Member, reason: Reason) -> None:
        state = self._state
        member.reason = state.say("learner", member.id, reason.code, *reason.args)
        state.move_member(member, "gone")
        member.gone_at = now
        self._watch_absence(now, member)
        member.owed.clear()
        self._snapshots.leave_out(now, member.id)
        self._unwait(now, member)
        self._shutdown.check_end(now)

    def on_leave(self, now: float, member: Member, envelope: Envelope, body: Leave) -> None:
        state = self._state
        member.reason = state.say("learner", member.id, "member-left", body.why)
        member.drained_by = ""
        state.move_member(member, "left")
        self._retire(now, member, "left")
        self._save(now)
        self._leases.close(member, self._next_serial())
        self._shutdown.check_end(now)

    def _strike(self, now: float, member: Member, reason: Reason) -> None:
        state = self._state
        member.strikes += 1
        if member.strikes >= state.limits.strikes and member.standing is Standing.LIVE:
            member.reason = state.say("learner", member.id, "member-quarantined", member.strikes, str(reason))
            state.move_member(member, "quarantined")
            self._forget(now, member)
            self._watch_absence(now, member)
            # It hears why when it dials again.
            state.effects.append(Hangup(member.id, member.incarnation, member.session, reason))

    def _watch_absence(self, now: float, member: Member) -> None:
        """From now on it is away. One timer per id, however often it comes and goes."""
        state = self._state
        member.away_since = now
        if not member.gone_timer:
            member.gone_timer = True
            state.arm(now + state.limits.gone_after_s, "gone", member.id)

    def watch_absences(self, now: float) -> None:
        """A syncer that starts again does not know for how long they have been away: it counts from here."""
        for member in self._state.members.values():
            if member.standing is Standing.AWAY:
                self._watch_absence(now, member)

    def on_absence_timer(self, now: float, learner: LearnerId) -> None:
        state = self._state
        member = state.members.get(learner)
        if member is None or not member.gone_timer:
            return
        member.gone_timer = False
        # At the end nothing is leased any more, and whoever returns is told that the run is over.
        if member.standing not in (Standing.AWAY, Standing.QUARANTINED) or state.stage is not Stage.RUNNING:
            return
        due = member.away_since + state.limits.gone_after_s
        if now < due:
            member.gone_timer = True
            state.arm(due, "gone", member.id)
            return
        self._give_up(now, member, now - member.away_since)

    def _give_up(self, now: float, member: Member, away_s: float) -> None:
        """Dead without a word, most likely. Its books are closed, and what it had not merged is leased again once the
        record that says so is durable; so it must not come back as what it was:

        1. Learner 1 was frozen; its samples are leased to learner 2, which is merged with them.
        2. Learner 1 wakes and goes on as the same incarnation.
        3. Its next contribution holds the same samples: they are merged twice.
        """
        state = self._state
        member.drained_by = ""
        args = (away_s, state.limits.gone_after_s, member.incarnation)
        member.reason = state.say("learner", member.id, "member-given-up", *args)
        state.move_member(member, "given up")
        self._retire(now, member, "lost")
        self._save(now)
        member.admitted_by = self._next_serial()
        self._leases.close(member, member.admitted_by)

    def _is_durably_lost(self, member: Member) -> bool:
        return member.admitted_by <= self._state.members_durable

    def _superseded(self, epoch: int) -> None:
        """A learner has met a syncer of a later epoch: this process is the past and must not write another version."""
        state = self._state
        if state.stage is not Stage.SUPERSEDED:
            state.advance("superseded")
            state.halted = True
            reason = state.note(Reason("superseded-epoch", (epoch, state.epoch)))
            for member in state.members.values():
                if member.standing in CONNECTED:
                    state.effects.append(Hangup(member.id, member.incarnation, member.session, reason))
            state.effects.append(Halt(reason))

    def on_fenced(self, now: float, event: StoreFenced) -> None:
        self._superseded(event.epoch)

    # ---------------------------------------------------------------------------------------------------- training

    def on_report(self, now: float, member: Member, envelope: Envelope, body: Report) -> LearnerFault | None:
        state = self._state
        steps = body.step - member.step
        if steps <= 0:
            return None
        plausible = state.is_plausible(member, body.step, body.trained) and 0 <= body.step_time_s < MOST_SECONDS
        if steps > state.limits.most_steps_per_report or not plausible:
            return LearnerFault(member, state.note(Reason("report-wild", (steps, body.trained, body.step_time_s))))
        if member.standing is Standing.JOINING:
            self._start_training(member, state.note(Reason("moments-kept")))  # its word that it is ready was lost
        member.step = body.step
        member.reported_at = now
        member.quick_s = min(body.step_time_s, 1.1 * member.quick_s) if member.pace.count else body.step_time_s
        state.ledger.tell(member.id, body.trained)
        member.pace.add(body.step_time_s)
        if member.standing is Standing.LIVE:
            if state.stage is Stage.RUNNING:
                self._finishing.check_budget(now)
            self._rounds.pull_late_learner(now, member)
            self._rounds.open_ripe(now)
        return None

    def on_ready(self, now: float, member: Member, envelope: Envelope, body: Ready) -> None:
        if member.standing is not Standing.JOINING:
            self._state.ignore("ready twice")
            return
        self._start_training(member, body.moments)
        self._rounds.open_ripe(now)

    def on_leaving(self, now: float, member: Member, envelope: Envelope, body: Leaving) -> LearnerFault | None:
        """Its newest word counts: one that was delayed or doubled must not bring back what is merged. Neither must one
        that was said before it heard of a version that holds the rest."""
        state = self._state
        if envelope.tick <= member.leaving_tick:
            state.ignore("an older word of one who leaves")
            return None
        steps = body.step - member.step
        if steps > state.limits.most_steps_per_report or not state.is_plausible(member, body.step, body.trained):
            return LearnerFault(member, state.note(Reason("report-wild", (steps, body.trained, 0.0))))
        member.leaving_tick = envelope.tick
        member.step = max(member.step, body.step)
        state.ledger.tell(member.id, body.trained)
        if member.standing is Standing.JOINING:
            self._start_training(member, state.note(Reason("moments-kept")))  # its word that it is ready was lost
        self._leavers.record(member, body.unmerged)
        self._rounds.pull_late_learner(now, member)
        for f in list(state.pulling.values()):
            if member.id in f.asked:
                self._rounds.check_round(now, f)  # it waits no longer for what is not named any more
        self._rounds.open_ripe(now)
        return None

    def _start_training(self, member: Member, moments: Reason) -> None:
        state = self._state
        state.move_member(member, "ready")
        member.training = True
        member.gap = Estimate()  # the pace of joining says nothing about the pace of training
        state.say("learner", member.id, "member-ready", member.incarnation, str(moments))

    # ---------------------------------------------------------------------------------------------------- inner state

    def on_state_request(self, now: float, member: Member, envelope: Envelope, body: StateRequest) -> None:
        state = self._state
        peer = self._choose_peer(member, body.tried)
        if peer is None:
            new_run = state.merges == 0 and not body.tried
            reason = Reason("peer-new-run") if new_run else Reason("peer-none")
            state.send(member, NoPeer(state.note(reason), new_run))
            return
        state.say("learner", member.id, "peer-chosen", peer.id, member.id)
        state.send(member, PeerChosen(peer.id))
        state.send(peer, StateWanted(member.id, member.incarnation, state.versions()))

    def _choose_peer(self, member: Member, tried: tuple[LearnerId, ...]) -> Member | None:
        """A live learner that trains, and rather one that stays; of those the one that lags least behind what is
        published, then the lowest id."""
        candidates = [m for m in self._state.live.values() if m.id != member.id and m.id not in tried and m.step > 0]
        return min(candidates, key=self._lag, default=None)

    def _lag(self, member: Member) -> tuple[bool, int, LearnerId]:
        behind = sum(1 for p, f in self._state.fragments.items() if member.received.get(p, NOTHING) < f.version)
        return member.leaving, behind, member.id

    def on_inner_state(self, now: float, member: Member, envelope: Envelope, body: InnerState) -> None:
        state = self._state
        to = state.members.get(body.to)
        if to is None or to.incarnation != body.to_incarnation or to.standing is not Standing.JOINING:
            state.ignore("inner state for nobody")
            return
        state.send(to, body)
