"""Fragments that other processes hold: a shard that is away stops its own fragments and no others.

A shard carries out what this core decides for its fragments: it receives, merges, makes durable and serves. Whatever of
it was not durable is lost with it. So a round of its fragments ends when it goes, unless the merge was done: then only
the shard knows whether the version is durable, and says so when it is back. Until then

- the version is in nobody's books, and leases that its contributions hold are neither merged nor returned;
- the round takes nobody's place, and the end of the run does not wait for it.

What a shard has said before it was lost and what comes after it is back could not be told apart: the record of a
version that is merged a second time has the same key as the first. So the driver tells nothing of a shard between
`ShardLost` and `ShardBack`, and what was on its way then it never tells. What comes in between all the same is ignored.
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
    """Stop the fragments of a lost shard and resume them when it is back."""

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
            f.unavailable = True  # all before the first round ends, or that one's place would go to the next of them
            state.unsaved.pop(f.id, None)
            if f.phase is RoundPhase.MERGING and f.merged:
                state.durability_unknown[f.id] = None
        for f in lost:
            if f.phase is not RoundPhase.IDLE and f.id not in state.durability_unknown:
                args = (len(f.contributions), len(f.pulled))
                self._rounds.abandon(now, f, Reason("shard-round-lost", args), "shard-lost")
            f.reason = state.log("fragment", f.id, "shard-lost", event.cause)
        self._snapshots.check_progress(now)  # what was on its way to it does not arrive
        self._rounds.open_due_rounds(now)  # others may go in the place of those that were open
        self._shutdown.check_end(now)

    def on_back(self, now: float, event: ShardReconnected) -> None:
        state = self._state
        for p, version in event.versions:
            if state.fragments[p].unavailable:
                self._take_back(now, state.fragments[p], version)
            else:
                state.ignore("shard-was-available")
        self._finishing.after_versions(now)

    def _take_back(self, now: float, f: Fragment, version: Version) -> None:
        """It holds this version. Any but the newest, or the one that it was saving, is of another time or run."""
        state = self._state
        sealed = state.stage in (RunStage.SEALING, RunStage.FINISHED)  # what the manifest does not name is of no run
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
            f.published_at = -1.0  # how long it took says nothing about any link
            return
        if durability_unknown:
            self._rounds.abandon(now, f, Reason("shard-version-lost", (f.version + 1,)), "shard-lost")
        self._delivery.send_unacked(now, f)
