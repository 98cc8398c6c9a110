"""Fragments that other processes hold: a shard that is away stops its own fragments and no others.

A shard carries out what this core decides for its fragments: it receives, merges, makes durable and serves. Whatever of
it was not durable is lost with it. So a round of its fragments ends when it goes, unless the merge was done: then only
the shard knows whether the version is durable, and says so when it is back.
"""

from __future__ import annotations

from atoll.core.protocol import ShardBack, ShardLost
from atoll.core.reasons import Reason
from atoll.core.syncer_controls import Controls
from atoll.core.syncer_state import Fragment, Owed
from atoll.core.tables import Phase
from atoll.core.types import Version


class Shards(Controls):
    def _on_shard_lost(self, now: float, event: ShardLost) -> None:
        for p in event.fragments:
            f = self.fragments[p]
            if f.away:
                continue
            f.away = True
            self.unsaved.pop(p, None)
            if f.phase in (Phase.PULLING, Phase.GRACE) or (f.phase is Phase.MERGING and not f.merged):
                self._abandon(now, f, Reason("shard-lost", (event.why,)), "lost")
            f.reason = self._say("fragment", p, "shard-lost", event.why)
        self._open_ripe(now)  # others may go in the place of those that were open

    def _on_shard_back(self, now: float, event: ShardBack) -> None:
        for p, version in event.held:
            f = self.fragments[p]
            if f.away:
                self._take_back(now, f, version)
        self._maybe_cut(now)
        self._open_ripe(now)
        self._check_end(now)

    def _take_back(self, now: float, f: Fragment, version: Version) -> None:
        """It holds this version. Any but the newest, or the one that it was saving, is of another time or run."""
        saved = f.phase is Phase.MERGING and version == f.version + 1
        if not saved and version != f.version:
            f.reason = self._say("fragment", f.id, "shard-wrong", version, f.version)
            return
        f.away = False
        self._say("fragment", f.id, "shard-back", version)
        if saved:
            self._version_saved(now, f)
            return
        if f.phase is Phase.MERGING:
            self._abandon(now, f, Reason("shard-forgot", (f.version + 1,)), "lost")
        for member in self.members.values():
            if f.id in member.owed:
                member.owed[f.id] = Owed(f.version, now, 1)
                self._send_version(member, f, base=None)
                self._watch_delivery(now, member)
