"""A checker of shards: what is lost with one is in no version, and nothing is asked of one that is away."""

from __future__ import annotations

from atoll.core.protocol import (
    Accumulate,
    DiscardRound,
    Envelope,
    MergeRound,
    Persist,
    Published,
    Pull,
    ShardBack,
    ShardLost,
    VersionRecord,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, FragmentId, RoundId, RunConfig
from atoll.sim.checkers import Checker
from atoll.tape.format import Actor, Entry


class Shards(Checker):
    name = "shards"
    sentence = "what was lost with a shard is in no version, and nothing is asked of a shard that is away"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.events = {ShardLost: self._on_lost, ShardBack: self._on_back}
        self.effects = {
            Accumulate: self._on_work,
            MergeRound: self._on_work,
            DiscardRound: self._on_discard,
            Persist: self._on_persist,
        }
        self.sent = {Pull: self._on_pull, Published: self._on_published}
        self._open: dict[FragmentId, RoundId] = {}  # rounds with contributions that are in no record yet
        self._lost: dict[FragmentId, tuple[RoundId, int]] = {}  # the newest that was lost with its shard, at this tick
        self._away: dict[FragmentId, int] = {}  # since this tick

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if actor.learner == SYNCER:
            self._open.clear()
            self._lost.clear()
            self._away.clear()

    def _on_lost(self, entry: Entry, event: ShardLost) -> None:
        if not self.is_current(entry):
            return
        for p in event.fragments:
            self._away.setdefault(p, entry.tick)
            if p in self._open:
                self._lost[p] = self._open.pop(p), entry.tick

    def _on_back(self, entry: Entry, event: ShardBack) -> None:
        if self.is_current(entry):
            for p, _ in event.held:
                self._away.pop(p, None)

    def _on_work(self, entry: Entry, effect: Accumulate | MergeRound) -> None:
        if self.is_current(entry):
            self._asked(entry, effect.round.fragment, f"{type(effect).__name__} of {effect.round}")
            self._not_lost(entry, effect.round)
            self._open[effect.round.fragment] = effect.round

    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        if self.is_current(entry) and self._open.get(effect.round.fragment) == effect.round:
            del self._open[effect.round.fragment]

    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        record = effect.record
        if isinstance(record, VersionRecord) and self.is_current(entry):
            self._asked(entry, record.fragment, f"writing version {record.version}")
            self._not_lost(entry, record.round)
            self._open.pop(record.fragment, None)

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Pull)
        if self.is_current(entry):
            self._asked(entry, body.round.fragment, f"a contribution to {body.round}")

    def _on_published(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Published)
        if self.is_current(entry):
            self._asked(entry, body.fragment, f"sending version {body.version} to learner {envelope.learner}")

    def _asked(self, entry: Entry, fragment: FragmentId, what: str) -> None:
        """Timers that were due before the loss were handled before it, in the same entry; here and below."""
        if entry.tick > self._away.get(fragment, entry.tick):
            self.fail(entry, ("fragment", fragment), f"{what} was asked of a shard that is away")

    def _not_lost(self, entry: Entry, round_id: RoundId) -> None:
        lost, tick = self._lost.get(round_id.fragment, (None, entry.tick))
        if lost == round_id and entry.tick > tick:
            self.fail(entry, ("fragment", round_id.fragment), f"{round_id} was lost with its shard, and goes on")


SHARD_CHECKERS: tuple[type[Checker], ...] = (Shards,)
