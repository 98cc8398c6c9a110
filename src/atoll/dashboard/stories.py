"""The newest sentences of one island, one fragment or the run before a moment, without reading whole tapes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from atoll.core.types import SYNCER
from atoll.dashboard.picture import RunPicture
from atoll.tape.format import Entry
from atoll.tape.story import Line, Subject, story

FIRST_SPAN_S = 30.0
MOST_ENTRIES = 10_000
"""Read for one answer; about half a second. Whoever wants more of a quiet subject has `atoll story`."""


class Story(NamedTuple):
    lines: list[Line]  # newest last
    more: bool  # there are older ones


def story_until(picture: RunPicture, subject: Subject, until: float | None, limit: int) -> Story:
    """Looks back as far as it takes, twice as far each time."""
    end = picture.to if until is None else min(until, picture.to)
    span_s = FIRST_SPAN_S
    while True:
        begin = end - span_s
        entries = _entries(picture, subject, begin, end)
        lines = deque(story(entries, subject, picture.config), maxlen=limit + 1)
        if len(lines) > limit or begin <= picture.begin or len(entries) > MOST_ENTRIES:
            return Story(list(lines)[-limit:], begin > picture.begin or len(lines) > limit)
        span_s *= 2


def _entries(picture: RunPicture, subject: Subject, begin: float, end: float) -> list[Entry]:
    """In the order of their times, which is that of causes but for clocks that differ."""
    kind, number = subject
    of_learners = {"learner": [number], "fragment": picture.learners(), "run": []}[kind]
    actors = [actor for actor in picture.actors() if actor.learner == SYNCER or actor.learner in of_learners]
    entries = [entry for actor in actors for entry in picture.entries(actor, begin, end)]
    entries.sort(key=lambda entry: (entry.at, entry.actor, entry.tick))
    return entries
