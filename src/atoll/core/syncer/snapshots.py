"""A consistent snapshot of the whole run while training goes on (Chandy and Lamport, coloured by a marker).

The syncer's cut is the moment it raises `marker`; a learner's cut is the first step boundary after it saw the marker
and before it adopts anything that carries it. A contribution that was sent before its learner's cut and arrives after
the syncer's is in flight at the cut, and is kept with the snapshot. Bulk data may overtake control messages or be
overtaken by them, so nothing relies on order between two messages: the colour is on each of them, and a learner's part
names the contributions that were outstanding at its cut.
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
"""Contributions of one learner to one fragment that a snapshot keeps as in flight, on average."""


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
            self._cut(now, event.requested_by)

    def start_if_due(self, now: float) -> None:
        state = self._state
        every = state.config.snapshot_every_merges
        if (
            every
            and state.snapshot is None
            and state.stage is RunStage.RUNNING
            and state.merges - state.merges_at_snapshot >= every
        ):
            self._cut(now)

    def _cut(self, now: float, who: str = "") -> None:
        state = self._state
        state.merges_at_snapshot = state.merges
        state.marker += 1
        wanted = {m.id for m in state.live.values()}
        deadline = now + max((self._part_timeout(m) for m in state.live.values()), default=0.0)
        leases = state.leases
        state.snapshot = SnapshotInProgress(
            state.marker, state.versions(), leases.next, leases.unmerged(), wanted, deadline
        )
        if who:
            state.log("run", 0, "snapshot-requested", state.marker, len(wanted), who)
        else:
            state.log("run", 0, "snapshot-started", state.marker, len(wanted))
        for member in state.live.values():
            state.send(member, Marker(state.marker))
        state.arm_timer((now + deadline) / 2, "snapshot", state.marker)
        state.arm_timer(deadline, "snapshot", state.marker)
        self.check_progress(now)

    def _part_timeout(self, member: Member) -> float:
        """A learner saves at its next step boundary; saving a model takes longer than acknowledging a fragment."""
        state = self._state
        return min(16 * retry_timeout(member.message_gap, 4, state.limits), state.limits.max_wait_s)

    def record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.saving or envelope.marker >= cut.id or member.id in cut.left_out:
            return
        entry = (member.id, body.round)
        if body.round.epoch != state.epoch or entry in cut.in_flight or self._floods(cut, member):
            return
        if member.id in cut.wanted or member.id in cut.parts:
            cut.in_flight[entry] = None
            state.effects.append(RecordInFlight(cut.id, member.id, body.round))

    def _floods(self, cut: SnapshotInProgress, member: Member) -> bool:
        """Nobody honest has more under way than a few attempts at every fragment."""
        state = self._state
        if len(cut.in_flight) < MAX_IN_FLIGHT_PER_FRAGMENT * len(state.fragments):
            return False
        return sum(1 for learner, _ in cut.in_flight if learner == member.id) >= MAX_IN_FLIGHT_PER_FRAGMENT * len(
            state.fragments
        )

    def on_part(self, now: float, member: Member, envelope: Envelope, body: SnapshotPart) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.saving or body.snapshot != cut.id or member.id not in cut.wanted:
            state.ignore("snapshot-part-unexpected")
            return
        if body.problem is not None and body.problem != NO_RUN_DIRECTORY:
            self.leave_out(now, member.id, Reason("snapshot-part-failed", (body.problem,)))
            return
        cut.parts[member.id] = body
        self.check_progress(now)

    def _is_complete(self, member: Member, part: SnapshotPart) -> bool:
        """Every contribution that was outstanding at the learner's cut has arrived, before our cut or since; or a later
        one of the same fragment has, and it was lost; or its shard is away, and it was lost with that."""
        heard = member.newest_rounds
        away = {f.id for f in self._state.fragments.values() if f.unavailable}
        return all(r.fragment in away or not r.is_newer_than(heard.get(r.fragment)) for r in part.outstanding)

    def check_progress(self, now: float) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.saving:
            return
        for learner in sorted(cut.wanted):
            part = cut.parts.get(learner)
            if part is not None and self._is_complete(state.members[learner], part):
                cut.wanted.discard(learner)
        if cut.wanted:
            return
        if not cut.parts:
            state.log("run", 0, "snapshot-abandoned", cut.id, "no learner has saved its part")
            state.snapshot = None
            return
        cut.saving = True
        parts = tuple(sorted(cut.parts.items()))
        in_flight = tuple(sorted(cut.in_flight, key=lambda each: (each[0], astuple(each[1]))))
        left_out = tuple(sorted(cut.left_out))
        record = SnapshotRecord(cut.id, cut.versions, parts, in_flight, left_out, cut.next_sample, cut.unmerged)
        state.effects.append(Persist(record))

    def leave_out(self, now: float, learner: LearnerId, reason: Reason = GONE) -> None:
        """A lost learner is left out of the snapshot and comes back by joining."""
        state = self._state
        cut = state.snapshot
        if cut is None or cut.saving or learner not in cut.wanted:
            return
        cut.wanted.discard(learner)
        cut.parts.pop(learner, None)
        cut.in_flight = {entry: None for entry in cut.in_flight if entry[0] != learner}
        cut.left_out.append(learner)
        state.log("run", 0, "snapshot-left-out", learner, cut.id, str(state.count_reason(reason)))
        self.check_progress(now)

    def on_timer(self, now: float, snapshot: int) -> None:
        state = self._state
        cut = state.snapshot
        if cut is None or cut.id != snapshot or cut.saving:
            return
        for learner in sorted(cut.wanted):
            if now >= cut.deadline:
                self.leave_out(now, learner, Reason("snapshot-part-timeout"))
            elif learner not in cut.parts:
                state.send(state.members[learner], Marker(cut.id))  # the marker or the part may have been lost

    def on_saved(self, now: float) -> None:
        state = self._state
        cut = state.snapshot
        assert cut is not None
        state.log("run", 0, "snapshot-durable", cut.id, len(cut.parts), len(cut.in_flight))
        state.snapshot = None

    def on_not_saved(self, now: float, why: str) -> None:
        """The next one will do: an old snapshot is worth more than a late one."""
        state = self._state
        cut = state.snapshot
        assert cut is not None
        state.log("run", 0, "snapshot-abandoned", cut.id, why)
        state.snapshot = None
