"""Base of the invariant checkers, which read nothing but tape entries.

The same checkers run over a swarm in memory and over the tapes of a real run (`atoll check`). A checker stores the few
facts that it needs and trusts neither core: it compares the claims of a learner with the events and effects of that
learner, and with the durable records of the syncer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

from atoll.core.protocol import (
    ControlRequested,
    DiscardRound,
    MembersRecord,
    MessageArrived,
    Persist,
    Persisted,
    Record,
    RecordKey,
    Send,
    ShardReconnected,
    VersionRecord,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, FragmentId, RunConfig, Version
from atoll.tape.format import Actor, Entry

Subject = tuple[str, int]
Handler = Callable[..., None]
EntryPart = Literal["every", "events", "arrived", "effects", "sent"]


class InvariantViolationError(Exception):
    """Violation of an invariant. `subject` selects the story that explains it."""

    def __init__(self, checker: str, sentence: str, entry: Entry | None, subject: Subject | None) -> None:
        super().__init__(f"{checker}: {sentence}")
        self.checker = checker
        self.message = sentence
        self.entry = entry
        self.subject = subject


class Subscription(NamedTuple):
    """Types and table of entry parts for which a handler is called, optionally of the newest syncer only."""

    table: EntryPart
    kinds: tuple[type, ...]
    newest_syncer_only: bool


F = TypeVar("F", bound=Callable[..., None])


def on(table: EntryPart, *kinds: type, current: bool = False) -> Callable[[F], F]:
    """Mark a method of a checker as a handler.

    A handler of `every` receives the entry. A handler of `events` or `effects` receives the entry and the event or
    effect. A handler of `arrived` or `sent` receives the entry, the envelope and its body.

    Args:
        table: part of an entry that the handler receives.
        kinds: types for which the handler is called; none for all types.
        current: call the handler for entries of the newest syncer only.
    """

    def mark(method: F) -> F:
        method.__dict__["subscription"] = Subscription(table, kinds or (object,), current)
        return method

    return mark


class Checker:
    """Base class of checkers. `on` marks handlers; components such as `DurableRecords` add theirs with `subscribe`."""

    name = ""
    invariant = ""
    needs_leases = False  # no handlers in a run without leases

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.handlers: list[tuple[Subscription, Handler]] = []
        self.start_handlers: list[Callable[[Actor, RestoredState | None], None]] = []
        self.syncer: Actor | None = (
            None  # the newest; an older one may still run, disconnected and fenced from the store
        )
        if config.lease_samples or not self.needs_leases:
            methods = [getattr(self, name) for name in dir(type(self))]
            self.handlers += [(method.subscription, method) for method in methods if hasattr(method, "subscription")]
        self.setup()

    def setup(self) -> None:
        """Initialize the state of the checker."""

    def subscribe(self, table: EntryPart, kind: type, handler: Handler) -> None:
        self.handlers.append((Subscription(table, (kind,), False), handler))

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        """Handle the start of a process. `restored` is what a syncer loaded from its directory."""
        if actor.learner == SYNCER:
            self.syncer = actor
        for on_start in self.start_handlers:
            on_start(actor, restored)
        if actor.learner == SYNCER:
            self.on_syncer_started(restored)

    def on_syncer_started(self, restored: RestoredState | None) -> None:
        """Handle the start of a syncer, which is `self.syncer` now."""

    def is_current(self, entry: Entry) -> bool:
        return entry.actor == self.syncer

    def finish(self) -> None:
        """Run the final checks, after the run has ended and all faults are healed."""

    def fail(self, entry: Entry | None, subject: Subject | None, message: str) -> None:
        raise InvariantViolationError(self.name, f"{message} (invariant: {self.invariant})", entry, subject)


def ignore_record(entry: Entry | None, record: Record) -> None:
    """Ignore a record."""


class DurableRecords:
    """Durable versions and pending writes, for a checker that needs them.

    Args:
        on_save: receives each record that the current syncer requests to write.
        on_durable: receives each record that has become durable.
        on_late: receives each record whose write was acknowledged to a syncer that no longer owns the store.
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
        checker.subscribe("effects", Persist, self._on_persist)
        checker.subscribe("effects", DiscardRound, self._on_discard)
        checker.subscribe("events", Persisted, self._on_persisted)
        checker.subscribe("events", ShardReconnected, self._on_shard_back)
        checker.start_handlers.append(self._on_start)

    def _on_start(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner != SYNCER:
            return
        pending = list(self._saving.values())
        for p, record in (restored.versions if restored is not None else {}).items():
            if record.version > self.versions[p]:
                # Durable, but the process died before it received the acknowledgment.
                self.versions[p] = record.version
                self._on_durable(None, record)
        if restored is not None and restored.members is not None:
            for record_ in pending:
                if isinstance(record_, MembersRecord) and record_.serial <= restored.members.serial:
                    self._on_durable(None, record_)

    def _on_persist(self, entry: Entry, effect: Persist) -> None:
        self._saving[(entry.actor, effect.record.key())] = effect.record
        if self._checker.is_current(entry):
            self._on_save(entry, effect.record)

    def _on_persisted(self, entry: Entry, event: Persisted) -> None:
        record = self._saving.pop((entry.actor, event.key), None)
        if record is None:
            self._checker.fail(entry, ("run", 0), f"{event.key} became durable without a write request")
            return
        self._mark_durable(entry, record)

    def _on_shard_back(self, entry: Entry, event: ShardReconnected) -> None:
        """Mark the pending writes that the shard reports as durable. The other reported records were durable before."""
        for key in event.records():
            record = self._saving.pop((entry.actor, key), None)
            if record is not None:
                self._mark_durable(entry, record)

    def _on_discard(self, entry: Entry, effect: DiscardRound) -> None:
        self._saving.pop((entry.actor, effect.key()), None)

    def _mark_durable(self, entry: Entry, record: Record) -> None:
        if not self._checker.is_current(entry):
            self._on_late(entry, record)
            return
        if isinstance(record, VersionRecord):
            self.versions[record.fragment] = record.version
        self._on_durable(entry, record)


class EffectiveSettings:
    """Effective settings of each syncer, with the changes by operators, for a checker that needs them."""

    def __init__(self, checker: Checker) -> None:
        self._config = checker.config
        self._changed: dict[Actor, RunConfig] = {}
        checker.subscribe("events", ControlRequested, self._on_control)

    def effective_config(self, entry: Entry) -> RunConfig:
        return self._changed.get(entry.actor, self._config)

    def _on_control(self, entry: Entry, event: ControlRequested) -> None:
        if event.kind == "quorum" and event.value is not None:
            self._changed[entry.actor] = replace(self.effective_config(entry), quorum=int(event.value))
        elif event.kind == "grace" and event.value is not None:
            self._changed[entry.actor] = replace(self.effective_config(entry), grace_margin=event.value)


class CheckerDispatcher:
    """Dispatcher of entries to the handlers of all checkers, with one lookup per event and effect."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.checkers = list(checkers)
        self._syncer: Actor | None = None
        self._handlers: dict[EntryPart, dict[type, list[tuple[bool, Handler]]]] = {
            table: {} for table in ("every", "events", "arrived", "effects", "sent")
        }
        for checker in self.checkers:
            for subscription, handler in checker.handlers:
                for kind in subscription.kinds:
                    handlers = self._handlers[subscription.table].setdefault(kind, [])
                    handlers.append((subscription.newest_syncer_only, handler))

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        if actor.learner == SYNCER:
            self._syncer = actor
        for checker in self.checkers:
            checker.on_process_started(actor, restored)

    def observe(self, entry: Entry) -> None:
        self._dispatch(entry, "every", object)
        event = entry.event
        if type(event) is MessageArrived:
            body = event.envelope.body
            self._dispatch(entry, "arrived", type(body), event.envelope, body)
        else:
            self._dispatch(entry, "events", type(event), event)
        for effect in entry.effects:
            if type(effect) is Send:
                body = effect.envelope.body
                self._dispatch(entry, "sent", type(body), effect.envelope, body)
            else:
                self._dispatch(entry, "effects", type(effect), effect)

    def _dispatch(self, entry: Entry, table: EntryPart, kind: type, *arguments: object) -> None:
        for current, handler in self._handlers[table].get(kind, ()):
            if not current or entry.actor == self._syncer:
                handler(entry, *arguments)

    def finish(self) -> None:
        for checker in self.checkers:
            checker.finish()


def create_checkers(config: RunConfig) -> list[Checker]:
    """Create one checker of each kind, in the order of docs/protocol.md."""
    from atoll.sim.learner_checkers import LEARNER_CHECKERS, LEASE_CHECKERS
    from atoll.sim.round_checkers import ROUND_CHECKERS, SYNCER_CHECKERS
    from atoll.sim.run_checkers import RUN_CHECKERS

    kinds = (*ROUND_CHECKERS, *LEARNER_CHECKERS, *RUN_CHECKERS, *LEASE_CHECKERS, *SYNCER_CHECKERS)
    return [kind(config) for kind in kinds]
