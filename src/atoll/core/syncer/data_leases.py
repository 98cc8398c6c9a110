"""Leases at the syncer: durable before they are sent, and back into the pool when their holder is gone for good.

An incarnation's leases are settled when its end is durable and no open round holds a contribution of it: only then is
it known which of its samples are merged. Until then its successor gets no lease:

1. Incarnation 1 has a contribution in the open round of fragment 0, with samples that are in no version yet.
2. Incarnation 2 is admitted, trains on a lease, and is merged into fragment 0 after that round.
3. Its mark takes the place of incarnation 1's, which said that those samples are merged.
4. A syncer that starts now would return them, and somebody would train them a second time.
"""

from __future__ import annotations

from abc import abstractmethod

from atoll.core.data_leases import MOST_AT_ONCE, Holder, Key
from atoll.core.policy import backoff_s
from atoll.core.protocol import Contribution, Envelope, Lease, LeaseRequest, Persist
from atoll.core.reasons import Reason
from atoll.core.states import Stage, Standing
from atoll.core.syncer.leaving import Leavers
from atoll.core.syncer.state import Member
from atoll.core.types import LearnerId


class Leasing(Leavers):
    def _on_lease_request(self, now: float, member: Member, envelope: Envelope, body: LeaseRequest) -> None:
        if not self.config.lease_samples or self.stage not in (Stage.RUNNING, Stage.FINISHING):
            self._ignore("no leases now")
            return
        key = (member.id, member.incarnation)
        holder = self.leases.holder(key)
        if not (0 <= body.leases <= holder.durable and 0 <= body.taken <= holder.total):
            self._strike(now, member, self._note(Reason("lease-wild", (body.leases, body.taken))))
            return
        if body.leases < holder.first:
            self._ignore("a request that was answered long ago")  # its answer is merged: this one comes a second time
            return
        self._send_leases(member, holder, body.leases, min(holder.durable, body.leases + MOST_AT_ONCE))
        self.lease_wants[key] = body.taken
        self._grant_leases()

    def _send_leases(self, member: Member, holder: Holder, begin: int, end: int) -> None:
        for number in range(begin, end):
            self._send(member, Lease(number, *holder.intervals[number - holder.first]))

    def _grant_leases(self) -> None:
        """To all who have asked and may have them now."""
        samples = self.config.lease_samples
        given = 0
        for key, taken in list(self.lease_wants.items()):
            if self._has_unsettled_predecessor(key[0]):
                continue
            del self.lease_wants[key]
            member = self.members.get(key[0])
            if member is None or member.incarnation != key[1]:
                continue
            wanted = taken + (1 + self.config.leases_ahead) * samples
            given += self.leases.grant(self.leases.holder(key), wanted, samples)
        if given:
            self._save_leases()

    def _has_unsettled_predecessor(self, learner: LearnerId) -> bool:
        return any(key[0] == learner for key in self.lease_closing)

    # ---------------------------------------------------------------------------------------------------- the disk

    def _save_leases(self) -> None:
        """One record at a time; what is leased meanwhile is in the next one."""
        if self.leases_saving is not None:
            self.leases_dirty = True
            return
        self.leases_dirty = False
        self.leases_serial += 1
        self.leases_saving = self.leases.record(self.leases_serial)
        self._out.append(Persist(self.leases_saving))

    def _leases_saved(self, now: float) -> None:
        record = self.leases_saving
        assert record is not None, "leases were saved that nobody asked for"
        self.leases_saving = None
        self.leases_tries = 0
        for holding in record.holdings:
            holder = self.leases.holders.get((holding.learner, holding.incarnation))
            if holder is None:
                continue
            sent, holder.durable = holder.durable, holding.first + len(holding.intervals)
            member = self.members.get(holding.learner)
            if sent < holder.durable and member is not None and self._may_lease(member, holding.incarnation):
                self._send_leases(member, holder, max(sent, holder.first), holder.durable)
        if self.leases_dirty:
            self._save_leases()

    def _may_lease(self, member: Member, incarnation: int) -> bool:
        connected = member.standing in (Standing.JOINING, Standing.LIVE, Standing.SUSPECT)
        return connected and member.incarnation == incarnation

    def _leases_not_saved(self, now: float, why: str) -> None:
        self.leases_saving = None
        delay = backoff_s(self.leases_tries, 0, self.limits)
        self.leases_tries += 1
        self._say("run", 0, "leases-not-durable", why, delay)
        self._arm(now + delay, "leases")

    def _on_leases_timer(self, now: float, key: int) -> None:
        if self.leases_saving is None:
            self._save_leases()

    # ---------------------------------------------------------------------------------------------------- returning

    def _close_leases(self, member: Member, serial: int) -> None:
        """This incarnation is out, once the members record with this serial is durable: until then a syncer that is
        started again would take it for current, and what it goes on to contribute for the first of its kind."""
        key = (member.id, member.incarnation)
        self.lease_wants.pop(key, None)
        if key in self.leases.holders:
            self.lease_closing[key] = serial

    def _settle_leases(self) -> None:
        settled = False
        for key, serial in list(self.lease_closing.items()):
            if serial <= self.members_durable and not self._is_contributing(key):
                del self.lease_closing[key]
                self._return_leases(key)
                settled = True
        if settled:
            self._grant_leases()

    def _return_leases(self, key: Key) -> None:
        self._say("learner", key[0], "leases-returned", self.leases.close(key), key[1])

    def _is_contributing(self, key: Key) -> bool:
        """An open round holds something of it."""
        for f in self.fragments.values():
            accepted = f.contributions.get(key[0])
            if accepted is not None and accepted.incarnation == key[1]:
                return True
        return False

    def _is_leased(self, member: Member, body: Contribution) -> bool:
        """Does it hold what it says that it has trained on?"""
        if not self.config.lease_samples:
            return True
        holder = self.leases.holders.get((member.id, member.incarnation))
        return holder is not None and 0 <= body.taken <= holder.total

    @abstractmethod
    def _strike(self, now: float, member: Member, reason: Reason) -> None: ...
