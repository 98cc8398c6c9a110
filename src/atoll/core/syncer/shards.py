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

from abc import abstractmethod

from atoll.core.protocol import ShardBack, ShardLost
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage
from atoll.core.syncer.controls import Controls
from atoll.core.syncer.state import Fragment, Owed
from atoll.core.types import Version


class Shards(Controls):
    def _on_shard_lost(self, now: float, event: ShardLost) -> None:
        lost = [self.fragments[p] for p in event.fragments if not self.fragments[p].away]
        for f in lost:
            f.away = True  # all before the first round ends, or that one's place would go to the next of them
            self.unsaved.pop(f.id, None)
            if f.phase is Phase.MERGING and f.merged:
                self.unheard[f.id] = None
        for f in lost:
            if f.phase is not Phase.IDLE and f.id not in self.unheard:
                args = (len(f.contributions), len(f.asked))
                self._abandon(now, f, Reason("shard-round-lost", args), "lost")
            f.reason = self._say("fragment", f.id, "shard-lost", event.why)
        self._check_cut(now)  # what was on its way to it does not arrive
        self._open_ripe(now)  # others may go in the place of those that were open
        self._check_end(now)

    def _on_shard_back(self, now: float, event: ShardBack) -> None:
        for p, version in event.held:
            if self.fragments[p].away:
                self._take_back(now, self.fragments[p], version)
            else:
                self._ignore("back, and was never away")
        self._after_versions(now)

    def _take_back(self, now: float, f: Fragment, version: Version) -> None:
        """It holds this version. Any but the newest, or the one that it was saving, is of another time or run."""
        sealed = self.stage in (Stage.SEALING, Stage.FINISHED)  # what the manifest does not name is of no run
        saved = f.id in self.unheard and version == f.version + 1 and not sealed
        if not saved and version != f.version:
            f.reason = self._say("fragment", f.id, "shard-wrong", version, f.version)
            return
        f.away = False
        unheard = f.id in self.unheard
        self.unheard.pop(f.id, None)
        self._say("fragment", f.id, "shard-kept" if saved else "shard-back", version)
        if saved:
            self._version_saved(now, f)
            f.published_at = -1.0  # how long it took says nothing about any link
            return
        if unheard:
            self._abandon(now, f, Reason("shard-forgot", (f.version + 1,)), "lost")
        for member in self.members.values():
            owed = member.owed.get(f.id)
            if owed is not None:
                # One that was sent before counts as sent twice: its acknowledgement may be of either.
                member.owed[f.id] = Owed(f.version, now, 2 if owed.tries else 1)
                self._send_version(member, f, base=None)
                self._watch_delivery(now, member)

    # ------------------------------------------------------------------------------------ what other parts provide

    @abstractmethod
    def _after_versions(self, now: float) -> None: ...
