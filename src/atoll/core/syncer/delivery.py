"""Delivery: every connected learner receives the newest version of every fragment, or loses its link."""

from __future__ import annotations

from atoll.core.protocol import Delivered, Envelope, Published, Resync
from atoll.core.reasons import Reason
from atoll.core.syncer.state import CONNECTED, Fragment, LearnerFault, Member, Owed, SyncerState
from atoll.core.types import LearnerId


class Delivery:
    """Send the newest version of each fragment until the learner acknowledges it."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def publish(self, now: float, f: Fragment) -> None:
        for m in self._state.members.values():
            if m.standing in CONNECTED:
                self.owe(now, m, f)

    def owe(self, now: float, member: Member, f: Fragment) -> None:
        """Send the newest version of a fragment to a learner that does not hold it.

        A newer version replaces an older one that is still owed, so what is owed to a learner is bounded by P.
        """
        held = self._state.received_version(member, f.id)
        if held >= f.version:
            return
        owed = member.owed.get(f.id)
        if f.away:
            member.owed[f.id] = Owed(f.version, now, 0)
            return
        tries = max(1, owed.tries) if owed is not None and owed.version != f.version else 1
        member.owed[f.id] = Owed(f.version, now, tries)
        self._send_version(member, f, base=held if held == f.version - 1 and held >= 0 and owed is None else None)
        self._watch_delivery(now, member)

    def _watch_delivery(self, now: float, member: Member) -> None:
        state = self._state
        if not member.publish_timer:
            member.publish_timer = True
            state.arm(now + state.ack_patience(member), "publish", member.id)

    def _send_version(self, member: Member, f: Fragment, base: int | None) -> None:
        state = self._state
        state.send(member, Published(f.id, f.version, base, f.marks.get(member.id), state.progress()))

    def on_timer(self, now: float, learner: LearnerId) -> LearnerFault | None:
        state = self._state
        member = state.members.get(learner)
        if member is None or not member.publish_timer:
            return None
        member.publish_timer = False
        wait = state.ack_patience(member)
        for p, owed in list(member.owed.items()):
            if state.fragments[p].away or now < owed.sent_at + wait * 2.0 ** (owed.tries - 1):
                continue
            if owed.tries >= state.limits.publish_tries:
                member.ack.add(now - owed.sent_at)  # at least: see the same in `Rounds.on_pull_timer`
                reason = Reason("member-publish-unanswered", (owed.version, p, owed.tries))
                return LearnerFault(member, reason, drops_link=True)
            member.owed[p] = Owed(owed.version, now, owed.tries + 1)
            self._send_version(member, state.fragments[p], base=None)
        sent = [owed for p, owed in member.owed.items() if not state.fragments[p].away]
        if sent:
            member.publish_timer = True
            due = min(o.sent_at + wait * 2.0 ** (o.tries - 1) for o in sent)
            state.arm(max(due, now + state.limits.least_wait_s), "publish", member.id)
        return None

    def on_delivered(self, now: float, member: Member, envelope: Envelope, body: Delivered) -> None:
        state = self._state
        f = state.fragments.get(body.fragment)
        if f is None or body.version > f.version:
            state.ignore("acknowledged what was never published")
            return
        news = body.version > state.received_version(member, f.id)
        if news:
            member.received[f.id] = body.version
        owed = member.owed.get(f.id)
        if owed is None or owed.version > body.version:
            return
        del member.owed[f.id]
        if news and owed.tries == 1:
            # A version that was sent twice says nothing about the time of either sending.
            member.ack.add(now - owed.sent_at)
            newest = body.version == f.version and owed.sent_at == f.published_at
            if newest and not state.was_cut_off(member.id, f.published_at):
                member.sync.add(now - f.published_at + f.merge_s)

    def on_resync(self, now: float, member: Member, envelope: Envelope, body: Resync) -> LearnerFault | None:
        state = self._state
        f = state.fragments.get(body.fragment)
        if f is None or body.have >= f.version or state.received_version(member, f.id) >= f.version:
            state.ignore("resync of nothing")
            return None
        owed = member.owed.get(f.id)
        tries = 2 if owed is None else owed.tries + 1
        if f.away:
            member.owed.setdefault(f.id, Owed(f.version, now, 1))  # sent again when its shard is back
            return None
        if tries > state.limits.publish_tries:
            reason = Reason("member-publish-unanswered", (f.version, f.id, tries - 1))
            return LearnerFault(member, reason, drops_link=True)
        member.owed[f.id] = Owed(f.version, now, tries)
        self._send_version(member, f, base=None)
        self._watch_delivery(now, member)
        return None

    def send_owed(self, now: float, f: Fragment) -> None:
        """Send a fragment whose shard is back to every learner that waits for it."""
        for member in self._state.members.values():
            owed = member.owed.get(f.id)
            if owed is not None:
                # One that was sent before counts as sent twice: its acknowledgement may be of either.
                member.owed[f.id] = Owed(f.version, now, 2 if owed.tries else 1)
                self._send_version(member, f, base=None)
                self._watch_delivery(now, member)
