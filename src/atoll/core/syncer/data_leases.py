"""Leases at the syncer: durable before they are sent, and returned to the pool when their incarnation has ended.

The leases of an incarnation are settled when its end is durable and no open round has a contribution of it. Only then
is it known which of its samples are merged. Until then its successor gets no lease:

1. Incarnation 1 has a contribution in the open round of fragment 0, with samples that are in no version yet.
2. Incarnation 2 is admitted, trains on a lease, and is merged into fragment 0 after that round.
3. Its `MergedUpTo` replaces that of incarnation 1, which recorded those samples as merged.
4. A syncer that restarts now would return them to the pool, and they would be trained twice.
"""

from __future__ import annotations

from atoll.core.ledger import MAX_LEASES_PER_REPLY, HolderKey, LeaseHolder
from atoll.core.policy import backoff_s
from atoll.core.protocol import Contribution, Envelope, Lease, LeaseRequest, Persist
from atoll.core.reasons import Reason
from atoll.core.states import RunStage
from atoll.core.syncer.state import CONNECTED, LearnerFault, Member, SyncerState
from atoll.core.types import LearnerId


class DataLeases:
    """Grant leases, save them, and return those of ended incarnations."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def on_request(self, now: float, member: Member, envelope: Envelope, body: LeaseRequest) -> LearnerFault | None:
        state = self._state
        if not state.config.lease_samples or state.stage not in (RunStage.RUNNING, RunStage.FINISHING):
            state.ignore("leases-unavailable")
            return None
        key = (member.id, member.incarnation)
        holder = state.leases.holder(key)
        if not (0 <= body.received_leases <= holder.durable and 0 <= body.consumed_samples <= holder.total):
            return LearnerFault(
                member,
                state.count_reason(Reason("lease-request-implausible", (body.received_leases, body.consumed_samples))),
            )
        if body.received_leases < holder.first:
            state.ignore("stale-lease-request")  # a delayed duplicate: leases after those are merged already
            return None
        self._send_leases(
            member, holder, body.received_leases, min(holder.durable, body.received_leases + MAX_LEASES_PER_REPLY)
        )
        state.lease_requests[key] = body.consumed_samples
        self._grant()
        return None

    def _send_leases(self, member: Member, holder: LeaseHolder, begin: int, end: int) -> None:
        for number in range(begin, end):
            self._state.send(member, Lease(number, *holder.intervals[number - holder.first]))

    def _grant(self) -> None:
        """Grant all pending requests, except of learners with an unsettled predecessor."""
        state = self._state
        samples = state.config.lease_samples
        granted = 0
        for key, consumed in list(state.lease_requests.items()):
            if self._has_unsettled_predecessor(key[0]):
                continue
            del state.lease_requests[key]
            member = state.members.get(key[0])
            if member is None or member.incarnation != key[1]:
                continue
            target = consumed + (1 + state.config.leases_ahead) * samples
            granted += state.leases.grant(state.leases.holder(key), target, samples)
        if granted:
            self._save()

    def _has_unsettled_predecessor(self, learner: LearnerId) -> bool:
        return any(key[0] == learner for key in self._state.lease_closing)

    # ---------------------------------------------------------------------------------------------------- records

    def _save(self) -> None:
        """Save the leases, one record at a time. Changes during a write go into the next record."""
        state = self._state
        if state.leases_saving is not None:
            state.leases_dirty = True
            return
        state.leases_dirty = False
        state.leases_serial += 1
        state.leases_saving = state.leases.record(state.leases_serial)
        state.effects.append(Persist(state.leases_saving))

    def on_saved(self, now: float) -> None:
        state = self._state
        record = state.leases_saving
        assert record is not None, "unexpected leases record"
        state.leases_saving = None
        state.leases_attempts = 0
        for holding in record.holdings:
            holder = state.leases.holders.get((holding.learner, holding.incarnation))
            if holder is None:
                continue
            sent, holder.durable = holder.durable, holding.first_lease + len(holding.intervals)
            member = state.members.get(holding.learner)
            if sent < holder.durable and member is not None and self._may_lease(member, holding.incarnation):
                self._send_leases(member, holder, max(sent, holder.first), holder.durable)
        if state.leases_dirty:
            self._save()

    def _may_lease(self, member: Member, incarnation: int) -> bool:
        return member.state in CONNECTED and member.incarnation == incarnation

    def on_not_saved(self, now: float, cause: str) -> None:
        state = self._state
        state.leases_saving = None
        delay = backoff_s(state.leases_attempts, 0, state.limits)
        state.leases_attempts += 1
        state.log("run", 0, "leases-not-durable", cause, delay)
        state.arm_timer(now + delay, "leases")

    def on_timer(self, now: float, key: int) -> None:
        if self._state.leases_saving is None:
            self._save()

    # ---------------------------------------------------------------------------------------------------- returning

    def close(self, member: Member, serial: int) -> None:
        """Close the leases of an ended incarnation, once the members record with this serial is durable.

        Until then a restarted syncer would treat the incarnation as current and accept its contributions.
        """
        state = self._state
        key = (member.id, member.incarnation)
        state.lease_requests.pop(key, None)
        if key in state.leases.holders:
            state.lease_closing[key] = serial

    def settle(self) -> None:
        state = self._state
        settled = False
        for key, serial in list(state.lease_closing.items()):
            if serial <= state.members_durable and not self._is_contributing(key):
                del state.lease_closing[key]
                self._return_leases(key)
                settled = True
        if settled:
            self._grant()

    def _return_leases(self, key: HolderKey) -> None:
        state = self._state
        state.log("learner", key[0], "leases-returned", state.leases.close(key), key[1])

    def _is_contributing(self, key: HolderKey) -> bool:
        """Return whether an open round has a contribution of this incarnation."""
        for f in self._state.fragments.values():
            accepted = f.contributions.get(key[0])
            if accepted is not None and accepted.incarnation == key[1]:
                return True
        return False

    def is_leased(self, member: Member, body: Contribution) -> bool:
        """Return whether the samples of a contribution are leased to its learner."""
        state = self._state
        if not state.config.lease_samples:
            return True
        holder = state.leases.holders.get((member.id, member.incarnation))
        return holder is not None and 0 <= body.consumed_samples <= holder.total
