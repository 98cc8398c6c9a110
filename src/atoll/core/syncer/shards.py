"""Shards: other processes that hold fragments. The loss of a shard stops its fragments and no others.

A shard carries out the decisions of this core for its fragments: it receives, merges, makes durable and serves. What
was not durable is lost with it. So the open rounds of its fragments end when it is lost, unless the merge was done.
Then only the shard knows whether the version is durable, and reports it when it reconnects. Until then

- the version is in no ledger, and the leases of its contributions are neither merged nor returned;
- the round does not count towards the flight limit, and the end of the run does not wait for it.

Events from before a loss and from after a reconnection could not be distinguished: when a version is merged again, its
record has the same key. So the driver delivers no event of a shard between `ShardLost` and `ShardReconnected`, and
drops events that were in flight. The core ignores an event that arrives in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.protocol import ShardLost, ShardReconnected
from atoll.core.reasons import Reason
from atoll.core.states import RoundPhase, RunStage
from atoll.core.syncer.controls import Finishing
from atoll.core.syncer.rounds import Delivery, Rounds
from atoll.core.syncer.shutdown import Shutdown
from atoll.core.syncer.snapshots import Snapshots
from atoll.core.syncer.state import Fragment, SyncerState
from atoll.core.types import Version


@dataclass(eq=False)
class SyncerShards:
    """Stop the fragments of a lost shard and resume them when it reconnects."""

    _state: SyncerState
    _rounds: Rounds
    _delivery: Delivery
    _snapshots: Snapshots
    _finishing: Finishing
    _shutdown: Shutdown

    def on_lost(self, now: float, event: ShardLost) -> None:
        state = self._state
        lost = [state.fragments[p] for p in event.fragments if not state.fragments[p].unavailable]
        for f in lost:
            f.unavailable = True  # for all fragments first: abandoning a round may open the next due round
            state.unsaved.pop(f.id, None)
            if f.phase is RoundPhase.MERGING and f.merged:
                state.durability_unknown[f.id] = None
        for f in lost:
            if f.phase is not RoundPhase.IDLE and f.id not in state.durability_unknown:
                args = (len(f.contributions), len(f.pulled))
                self._rounds.abandon(now, f, Reason("shard-round-lost", args), "shard-lost")
            f.reason = state.log("fragment", f.id, "shard-lost", event.cause)
        self._snapshots.check_progress(now)  # contributions in flight to it do not arrive
        self._rounds.open_due_rounds(now)  # the abandoned rounds no longer count towards the limit
        self._shutdown.check_end(now)

    def on_back(self, now: float, event: ShardReconnected) -> None:
        state = self._state
        for p, version in event.versions:
            if state.fragments[p].unavailable:
                self._reconnect(now, state.fragments[p], version)
            else:
                state.ignore("shard-was-available")
        self._finishing.after_versions(now)

    def _reconnect(self, now: float, f: Fragment, version: Version) -> None:
        """Resume a fragment whose shard has this version: the newest one, or the one that it was saving."""
        state = self._state
        sealed = state.stage in (RunStage.SEALING, RunStage.FINISHED)  # then only versions of the manifest count
        saved = f.id in state.durability_unknown and version == f.version + 1 and not sealed
        if not saved and version != f.version:
            f.reason = state.log("fragment", f.id, "shard-version-mismatch", version, f.version)
            return
        f.unavailable = False
        durability_unknown = f.id in state.durability_unknown
        state.durability_unknown.pop(f.id, None)
        state.log("fragment", f.id, "shard-recovered" if saved else "shard-reconnected", version)
        if saved:
            self._rounds.on_version_saved(now, f)
            f.published_at = -1.0  # exclude this version from the measurement of sync times
            return
        if durability_unknown:
            self._rounds.abandon(now, f, Reason("shard-version-lost", (f.version + 1,)), "shard-lost")
        self._delivery.send_unacked(now, f)
