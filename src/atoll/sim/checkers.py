"""The invariants, each watched by an observer that reads nothing but tape entries.

The same observers run over a swarm in memory and over the tapes of a real run (`atoll check`). A checker keeps the few
facts that it needs and trusts neither core: what a learner claims is compared with what the learner was told and did,
and with what the syncer made durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from atoll.core.protocol import (
    Body,
    ControlRequested,
    DiscardRound,
    Effect,
    Event,
    MembersRecord,
    MessageArrived,
    Persist,
    Persisted,
    Record,
    RecordKey,
    Send,
    ShardBack,
    VersionRecord,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, FragmentId, RunConfig, Version
from atoll.tape.format import Actor, Entry

Subject = tuple[str, int]
Handler = Callable[[Entry, Any], None]


class Violation(Exception):  # noqa: N818 - it is a finding, not an error of the program
    """An invariant does not hold. `subject` names whose story explains it."""

    def __init__(self, checker: str, sentence: str, entry: Entry | None, subject: Subject | None) -> None:
        super().__init__(f"{checker}: {sentence}")
        self.checker = checker
        self.sentence = sentence
        self.entry = entry
        self.subject = subject


class Checker:
    """An observer. The tables say which events, arrived bodies, effects and sent bodies it wants to see."""

    name = ""
    sentence = ""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.events: dict[type, Handler] = {}
        self.arrived: dict[type, Handler] = {}
        self.effects: dict[type, Handler] = {}
        self.sent: dict[type, Handler] = {}
        self.every: Callable[[Entry], None] | None = None
        self.every_of_syncers: Callable[[Entry], None] | None = None
        self.starts: list[Callable[[Actor, Restored | None], None]] = []
        self.syncer: Actor | None = None  # the newest; an older one may live on, cut off and fenced from the store

    def started(self, actor: Actor, restored: Restored | None) -> None:
        """A process has begun; `restored` is what a syncer found in its directory."""
        if actor.learner == SYNCER:
            self.syncer = actor
        for on_start in self.starts:
            on_start(actor, restored)

    def is_current(self, entry: Entry) -> bool:
        return entry.actor == self.syncer

    def finish(self) -> None:
        """The run is over and everything is healed."""

    def fail(self, entry: Entry | None, subject: Subject | None, what: str) -> None:
        raise Violation(self.name, f"{what} (invariant: {self.sentence})", entry, subject)


def ignore_record(entry: Entry | None, record: Record) -> None:
    """Do nothing about a record."""


class DurableRecords:
    """Durable versions and pending writes, for a checker that needs them.

    `on_save` gets what the syncer that owns the store wants written, `on_durable` what the store has, and `on_late`
    what an old syncer is told of after the store changed hands.
    """

    def __init__(
        self,
        checker: Checker,
        *,
        on_save: Callable[[Entry, Record], None] = ignore_record,
        on_durable: Callable[[Entry | None, Record], None] = ignore_record,
        on_late: Callable[[Entry, Record], None] = ignore_record,
    ) -> None:
        self.versions: dict[FragmentId, Version] = dict.fromkeys(checker.config.fragment_ids(), 0)
        self._checker = checker
        self._on_save = on_save
        self._on_durable = on_durable
        self._on_late = on_late
        self._saving: dict[tuple[Actor, RecordKey], Record] = {}
        checker.effects[Persist] = self._on_persist
        checker.effects[DiscardRound] = self._on_discard
        checker.events[Persisted] = self._on_persisted
        checker.events[ShardBack] = self._on_shard_back
        checker.starts.append(self._on_start)

    def _on_start(self, actor: Actor, restored: Restored | None) -> None:
        if actor.learner != SYNCER:
            return
        written = list(self._saving.values())
        for p, record in (restored.versions if restored is not None else {}).items():
            if record.version > self.versions[p]:
                # Durable, but the process died before it heard of it.
                self.versions[p] = record.version
                self._on_durable(None, record)
        if restored is not None and restored.members is not None:
            for record_ in written:
                if isinstance(record_, MembersRecord) and record_.serial <= restored.members.serial:
                    self._on_durable(None, record_)

    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        self._saving[(entry.actor, effect.record.key())] = effect.record
        if self._checker.is_current(entry):
            self._on_save(entry, effect.record)

    def _on_persisted(self, entry: Entry, event: Persisted) -> None:
        record = self._saving.pop((entry.actor, event.key), None)
        if record is None:
            self._checker.fail(entry, ("run", 0), f"{event.key} became durable without being asked for")
            return
        self._found_durable(entry, record)

    def _on_shard_back(self, entry: Entry, event: ShardBack) -> None:
        """What it was writing when it was lost is durable if it says so. All else it says was durable before."""
        for key in event.records():
            record = self._saving.pop((entry.actor, key), None)
            if record is not None:
                self._found_durable(entry, record)

    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        self._saving.pop((entry.actor, effect.key()), None)

    def _found_durable(self, entry: Entry, record: Record) -> None:
        if not self._checker.is_current(entry):
            self._on_late(entry, record)
            return
        if isinstance(record, VersionRecord):
            self.versions[record.fragment] = record.version
        self._on_durable(entry, record)


class SettingsInForce:
    """The settings that each syncer goes by, as operators have changed them, for a checker that needs them."""

    def __init__(self, checker: Checker) -> None:
        self._config = checker.config
        self._changed: dict[Actor, RunConfig] = {}
        checker.events[ControlRequested] = self._on_control

    def of(self, entry: Entry) -> RunConfig:
        return self._changed.get(entry.actor, self._config)

    def _on_control(self, entry: Entry, event: ControlRequested) -> None:
        if event.what == "quorum" and event.value is not None:
            self._changed[entry.actor] = replace(self.of(entry), quorum=int(event.value))
        elif event.what == "grace" and event.value is not None:
            self._changed[entry.actor] = replace(self.of(entry), grace_margin=event.value)


class Watch:
    """Shows every entry to every checker that wants it, with one look-up per event and effect."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.checkers = list(checkers)
        self._events: dict[type, list[Handler]] = {}
        self._arrived: dict[type, list[Handler]] = {}
        self._effects: dict[type, list[Handler]] = {}
        self._sent: dict[type, list[Handler]] = {}
        self._every: list[Callable[[Entry], None]] = []
        self._every_of_syncers: list[Callable[[Entry], None]] = []
        for checker in self.checkers:
            if checker.every is not None:
                self._every.append(checker.every)
            if checker.every_of_syncers is not None:
                self._every_of_syncers.append(checker.every_of_syncers)
            for ours, theirs in (
                (self._events, checker.events),
                (self._arrived, checker.arrived),
                (self._effects, checker.effects),
                (self._sent, checker.sent),
            ):
                for kind, handler in theirs.items():
                    ours.setdefault(kind, []).append(handler)

    def started(self, actor: Actor, restored: Restored | None) -> None:
        for checker in self.checkers:
            checker.started(actor, restored)

    def observe(self, entry: Entry) -> None:
        event: Event = entry.event
        for every in self._every:
            every(entry)
        if entry.actor.learner == SYNCER:
            for every in self._every_of_syncers:
                every(entry)
        if type(event) is MessageArrived:
            for handler in self._arrived.get(type(event.envelope.body), ()):
                handler(entry, event.envelope)
        else:
            for handler in self._events.get(type(event), ()):
                handler(entry, event)
        effect: Effect
        for effect in entry.effects:
            if type(effect) is Send:
                body: Body = effect.envelope.body
                for handler in self._sent.get(type(body), ()):
                    handler(entry, effect.envelope)
            else:
                for handler in self._effects.get(type(effect), ()):
                    handler(entry, effect)

    def finish(self) -> None:
        for checker in self.checkers:
            checker.finish()


def all_checkers(config: RunConfig) -> list[Checker]:
    """One of each, in the order of docs/protocol.md."""
    from atoll.sim.checkers_of_learners import LEARNER_CHECKERS, LEASE_CHECKERS
    from atoll.sim.checkers_of_rounds import ROUND_CHECKERS, SYNCER_CHECKERS
    from atoll.sim.checkers_of_the_run import RUN_CHECKERS

    kinds = (*ROUND_CHECKERS, *LEARNER_CHECKERS, *RUN_CHECKERS, *LEASE_CHECKERS, *SYNCER_CHECKERS)
    return [kind(config) for kind in kinds]


def is_syncer(entry: Entry) -> bool:
    return entry.actor.learner == SYNCER
