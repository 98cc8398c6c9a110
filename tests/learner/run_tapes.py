"""Content of the tapes of a run, for tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.tape.files import RunTapes
from atoll.tape.format import Entry
from tests.learner.runs import Run


def entries(run: Run, learner: int, incarnation: int = 1) -> Iterator[Entry]:
    for actor, reader in RunTapes(run.directory).readers.items():
        if (actor.learner, actor.generation) == (learner, incarnation):
            yield from reader


def events(run: Run, learner: int, kind: type) -> list[Any]:
    return [entry.event for entry in entries(run, learner) if type(entry.event) is kind]


def received_messages(run: Run, actor: int, kind: type, until: float, learner: int | None = None) -> list[Any]:
    """Return the messages of a kind that an actor has received until this time, optionally only from one learner."""
    found = []
    for entry in entries(run, actor):
        envelope = getattr(entry.event, "envelope", None)
        if entry.at <= until and type(getattr(envelope, "body", None)) is kind:
            assert envelope is not None
            if learner in (None, envelope.learner):
                found.append(envelope.body)
    return found


def sent_together(run: Run, learner: int, kind: type) -> list[list[Any]]:
    """Return the messages that a learner has sent, grouped by the event that caused them."""
    found = []
    for entry in entries(run, learner):
        bodies = [getattr(getattr(effect, "envelope", None), "body", None) for effect in entry.effects]
        found.append([body for body in bodies if type(body) is kind])
    return [bodies for bodies in found if bodies]
