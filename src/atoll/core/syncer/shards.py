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

from atoll.core.protocol import ShardBack, ShardLost
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage
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
        lost = [state.fragments[p] for p in event.fragments if not state.fragments[p].away]
        for f in lost:
            f.away = True  # all before the first round ends, or that one's place would go to the next of them
            state.unsaved.pop(f.id, None)
            if f.phase is Phase.MERGING and f.merged:
                state.unheard[f.id] = None
        for f in lost:
            if f.phase is not Phase.IDLE and f.id not in state.unheard:
                args = (len(f.contributions), len(f.asked))
                self._rounds.abandon(now, f, Reason("shard-round-lost", args), "lost")
            f.reason = state.say("fragment", f.id, "shard-lost", event.why)
        self._snapshots.check_cut(now)  # what was on its way to it does not arrive
        self._rounds.open_ripe(now)  # others may go in the place of those that were open
        self._shutdown.check_end(now)

    def on_back(self, now: float, event: ShardBack) -> None:
        state = self._state
        for p, version in event.held:
            if state.fragments[p].away:
                self._take_back(now, state.fragments[p], version)
            else:
                state.ignore("back, and was never away")
        self._finishing.after_versions(now)

    def _take_back(self, now: float, f: Fragment, version: Version) -> None:
        """It holds this version. Any but the newest, or the one that it was saving, is of another time or run."""
        state = self._state
        sealed = state.stage in (Stage.SEALING, Stage.FINISHED)  # what the manifest does not name is of no run
        saved = f.id in state.unheard and version == f.version + 1 and not sealed
        if not saved and version != f.version:
            f.reason = state.say("fragment", f.id, "shard-wrong", version, f.version)
            return
        f.away = False
        unheard = f.id in state.unheard
        state.unheard.pop(f.id, None)
        state.say("fragment", f.id, "shard-kept" if saved else "shard-back", version)
        if saved:
            self._rounds.on_version_saved(now, f)
            f.published_at = -1.0  # how long it took says nothing about any link
            return
        if unheard:
            self._rounds.abandon(now, f, Reason("shard-forgot", (f.version + 1,)), "lost")
        self._delivery.send_owed(now, f)
