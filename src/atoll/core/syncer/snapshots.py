"""Consistent snapshots of the whole run during training (Chandy and Lamport).

The syncer's cut is the moment at which it increments `marker`. A learner's cut is the first step boundary after it
received the marker, before it adopts anything that carries it. A contribution that was sent before its learner's cut
and arrives after the syncer's is in flight, and is stored with the snapshot. Bulk data and control messages may
overtake each other, so nothing depends on their order: every message carries the marker, and a learner's part lists the
contributions that were outstanding at its cut.
"""

from __future__ import annotations

from msgspec.structs import astuple

from atoll.core.policy import retry_timeout
from atoll.core.protocol import (
    NO_RUN_DIRECTORY,
    Contribution,
    Envelope,
    Marker,
    Persist,
    RecordInFlight,
    SnapshotPart,
    SnapshotRecord,
    SnapshotRequested,
)
from atoll.core.reasons import Reason
from atoll.core.states import RunStage
from atoll.core.syncer.state import Member, SnapshotInProgress, SyncerState
from atoll.core.types import LearnerId

MAX_IN_FLIGHT_PER_FRAGMENT = 8
"""Contributions of one learner per fragment that a snapshot stores as in flight, on average."""


GONE = Reason("snapshot-learner-disconnected")


class Snapshots:
    """Take one snapshot at a time."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def on_requested(self, now: float, event: SnapshotRequested) -> None:
        state = self._state
        if state.snapshot is not None:
            state.log("run", 0, "snapshot-in-progress")
        elif state.stage is RunStage.RUNNING:
            self._start(now, event.requested_by)

    def start_if_due(self, now: float) -> None:
        state = self._state
        every = state.config.snapshot_every_merges
        if (
            every
            and state.snapshot is None
            and state.stage is RunStage.RUNNING
            and state.merges - state.merges_at_snapshot >= every
        ):
            self._start(now)

    def _start(self, now: float, requested_by: str = "") -> None:
        state = self._state
        state.merges_at_snapshot = state.merges
        state.marker += 1
        pending = {m.id for m in state.live.values()}
        deadline = now + max((self._part_timeout(m) for m in state.live.values()), default=0.0)
        leases = state.leases
        state.snapshot = SnapshotInProgress(
            state.marker, state.versions(), leases.next, leases.unmerged(), pending, deadline
        )
        if requested_by:
            state.log("run", 0, "snapshot-requested", state.marker, len(pending), requested_by)
        else:
            state.log("run", 0, "snapshot-started", state.marker, len(pending))
        for member in state.live.values():
            state.send(member, Marker(state.marker))
        state.arm_timer((now + deadline) / 2, "snapshot", state.marker)
        state.arm_timer(deadline, "snapshot", state.marker)
        self.check_progress(now)

    def _part_timeout(self, member: Member) -> float:
        """Return the timeout of a part. It is long, because saving a model takes longer than sending a message."""
        state = self._state
        return min(16 * retry_timeout(member.message_gap, 4, state.limits), state.limits.max_wait_s)

    def record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.is_saving or envelope.marker >= cut.id or member.id in cut.left_out:
            return
        entry = (member.id, body.round)
        if body.round.epoch != state.epoch or entry in cut.in_flight or self._exceeds_in_flight_limit(cut, member):
            return
        if member.id in cut.pending or member.id in cut.parts:
            cut.in_flight[entry] = None
            state.effects.append(RecordInFlight(cut.id, member.id, body.round))

    def _exceeds_in_flight_limit(self, cut: SnapshotInProgress, member: Member) -> bool:
        """Return whether the learner has sent more contributions than a correct learner can have in flight."""
        state = self._state
        if len(cut.in_flight) < MAX_IN_FLIGHT_PER_FRAGMENT * len(state.fragments):
            return False
        return sum(1 for learner, _ in cut.in_flight if learner == member.id) >= MAX_IN_FLIGHT_PER_FRAGMENT * len(
            state.fragments
        )

    def on_part(self, now: float, member: Member, envelope: Envelope, body: SnapshotPart) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.is_saving or body.snapshot != cut.id or member.id not in cut.pending:
            state.ignore("snapshot-part-unexpected")
            return
        if body.problem is not None and body.problem != NO_RUN_DIRECTORY:
            self.exclude(now, member.id, Reason("snapshot-part-failed", (body.problem,)))
            return
        cut.parts[member.id] = body
        self.check_progress(now)

    def _is_complete(self, member: Member, part: SnapshotPart) -> bool:
        """Return whether all contributions that were outstanding at the learner's cut have arrived or are lost.

        A contribution is lost if a later one to the same fragment has arrived, or if its shard is unavailable.
        """
        newest = member.newest_rounds
        unavailable = {f.id for f in self._state.fragments.values() if f.unavailable}
        return all(r.fragment in unavailable or not r.is_newer_than(newest.get(r.fragment)) for r in part.outstanding)

    def check_progress(self, now: float) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.is_saving:
            return
        for learner in sorted(cut.pending):
            part = cut.parts.get(learner)
            if part is not None and self._is_complete(state.members[learner], part):
                cut.pending.discard(learner)
        if cut.pending:
            return
        if not cut.parts:
            state.log("run", 0, "snapshot-abandoned", cut.id, "no learner has saved its part")
            state.snapshot = None
            return
        cut.is_saving = True
        parts = tuple(sorted(cut.parts.items()))
        in_flight = tuple(sorted(cut.in_flight, key=lambda each: (each[0], astuple(each[1]))))
        left_out = tuple(sorted(cut.left_out))
        record = SnapshotRecord(cut.id, cut.versions, parts, in_flight, left_out, cut.next_sample, cut.unmerged)
        state.effects.append(Persist(record))

    def exclude(self, now: float, learner: LearnerId, reason: Reason = GONE) -> None:
        """Exclude a learner from the snapshot. After a restore it joins again."""
        state = self._state
        cut = state.snapshot
        if cut is None or cut.is_saving or learner not in cut.pending:
            return
        cut.pending.discard(learner)
        cut.parts.pop(learner, None)
        cut.in_flight = {entry: None for entry in cut.in_flight if entry[0] != learner}
        cut.left_out.append(learner)
        state.log("run", 0, "snapshot-left-out", learner, cut.id, str(state.count_reason(reason)))
        self.check_progress(now)

    def on_timer(self, now: float, snapshot: int) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.id != snapshot or cut.is_saving:
            return
        for learner in sorted(cut.pending):
            if now >= cut.deadline:
                self.exclude(now, learner, Reason("snapshot-part-timeout"))
            elif learner not in cut.parts:
                state.send(state.members[learner], Marker(cut.id))  # the marker or the part may have been lost

    def on_saved(self, now: float) -> None:
        state = self._state
        cut = state.snapshot
        assert cut is not None
        state.log("run", 0, "snapshot-durable", cut.id, len(cut.parts), len(cut.in_flight))
        state.snapshot = None

    def on_not_saved(self, now: float, cause: str) -> None:
        """Abandon the snapshot without a retry: the next one replaces it."""
        state = self._state
        cut = state.snapshot
        assert cut is not None
        state.log("run", 0, "snapshot-abandoned", cut.id, cause)
        state.snapshot = None
