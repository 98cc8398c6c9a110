"""The invariants, each watched by an observer that reads nothing but tape entries.

The same observers run over a swarm in memory and over the tapes of a real run (`atoll check`). A checker keeps the few
facts that it needs and trusts neither core: what a learner claims is compared with what the learner was told and did,
and with what the syncer made durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.core.protocol import Body, Effect, Event, MessageArrived, Send
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, RunConfig
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
        self.syncer: Actor | None = None  # the newest; an older one may live on, cut off and fenced from the store

    def started(self, actor: Actor, restored: Restored | None) -> None:
        """A process has begun; `restored` is what a syncer found in its directory."""
        if actor.learner == SYNCER:
            self.syncer = actor

    def is_current(self, entry: Entry) -> bool:
        return entry.actor == self.syncer

    def observe(self, entry: Entry) -> None:
        Watch([self]).observe(entry)

    def finish(self) -> None:
        """The run is over and everything is healed."""

    def fail(self, entry: Entry | None, subject: Subject | None, what: str) -> None:
        raise Violation(self.name, f"{what} (invariant: {self.sentence})", entry, subject)


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
    from atoll.sim.checkers_of_controls import CONTROL_CHECKERS
    from atoll.sim.checkers_of_learners import LEARNER_CHECKERS
    from atoll.sim.checkers_of_leases import LEASE_CHECKERS
    from atoll.sim.checkers_of_rounds import ROUND_CHECKERS
    from atoll.sim.checkers_of_shards import SHARD_CHECKERS
    from atoll.sim.checkers_of_the_run import RUN_CHECKERS

    of_runs: Iterable[type[Checker]] = (*ROUND_CHECKERS, *LEARNER_CHECKERS, *RUN_CHECKERS)
    kinds: Iterable[type[Checker]] = (*of_runs, *LEASE_CHECKERS, *CONTROL_CHECKERS, *SHARD_CHECKERS)
    return [kind(config) for kind in kinds]


def is_syncer(entry: Entry) -> bool:
    return entry.actor.learner == SYNCER
