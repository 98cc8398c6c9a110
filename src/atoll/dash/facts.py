"""What one tape says, entry by entry: the life of a learner's process, the reign of a syncer's.

Both are fed with entries in the order of their tape, as many and as often as there are, so that a tape may grow
meanwhile. Times are those of the run's clock. Nothing here judges.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.protocol import (
    Contribution,
    LearnerDisconnected,
    LinkClosed,
    MergeRound,
    MessageArrived,
    OpenGrace,
    Persist,
    Persisted,
    PersistFailed,
    RefuseContribution,
    Report,
    Say,
    Send,
    StartTraining,
    StepTaken,
    VersionRecord,
    Welcome,
)
from atoll.core.replay import core_of
from atoll.core.syncer import SyncerCore
from atoll.core.tape import Entry, Header

Span = tuple[float, float]


@dataclass(slots=True)
class Life:
    """One process of a learner. `alone` are the spans in which it had no link, `alone_since` the one that is open."""

    incarnation: int
    first: float  # entry on its tape
    last: float
    began: float | None = None  # it may train
    step_ends: array[float] = field(default_factory=lambda: array("d"))
    step_times_s: array[float] = field(default_factory=lambda: array("d"))
    stepped_s: array[float] = field(default_factory=lambda: array("d"))  # in steps, up to the end of each
    trained: array[float] = field(default_factory=lambda: array("d"))  # tokens after each step
    steps_taken: array[int] = field(default_factory=lambda: array("q"))  # after each entry of `step_ends`
    contributions: int = 0
    alone: list[Span] = field(default_factory=list)
    alone_since: float | None = None

    @property
    def tokens(self) -> int:
        return int(self.trained[-1]) if self.trained else 0

    def steps(self) -> Iterator[Span]:
        return ((end - took_s, end) for end, took_s in zip(self.step_ends, self.step_times_s, strict=True))

    def in_steps_s(self, begin: float, end: float) -> float:
        """Seconds of this span that were spent in steps."""
        return max(0.0, self._stepped_until(end) - self._stepped_until(begin))

    def _stepped_until(self, at: float) -> float:
        done = bisect_right(self.step_ends, at)
        whole = self.stepped_s[done - 1] if done else 0.0
        if done == len(self.step_ends):
            return whole
        return whole + max(0.0, at - (self.step_ends[done] - self.step_times_s[done]))

    def add_step(self, at: float, took_s: float, steps: int, tokens: int) -> None:
        self.stepped_s.append(took_s + (self.stepped_s[-1] if self.stepped_s else 0.0))
        self.trained.append(tokens + (self.trained[-1] if self.trained else 0))
        self.steps_taken.append(steps + (self.steps_taken[-1] if self.steps_taken else 0))
        self.step_ends.append(at)
        self.step_times_s.append(took_s)

    def all_alone(self) -> list[Span]:
        return self.alone if self.alone_since is None else [*self.alone, (self.alone_since, self.last)]

    def take(self, entry: Entry) -> None:
        self.last = entry.at
        event = entry.event
        if type(event) is StepTaken:
            if event.steps:
                self.add_step(entry.at, event.step_time_s * event.steps, event.steps, event.tokens)
        elif type(event) is LinkClosed:
            if self.alone_since is None:
                self.alone_since = entry.at
        elif type(event) is MessageArrived and self.alone_since is not None and type(event.envelope.body) is Welcome:
            self.alone.append((self.alone_since, entry.at))
            self.alone_since = None
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is Contribution:
                    self.contributions += 1
            elif type(effect) is StartTraining:
                self.began = entry.at


class Merge(NamedTuple):
    """One durable version. `alive` and `asked` are as they were when its round was sealed."""

    at: float
    epoch: int
    fragment: int
    version: int
    alive: int
    asked: int
    contributors: tuple[tuple[int, int], ...]  # learner and incarnation
    weights: tuple[float, ...]  # of each, as shares of the whole
    steps: float  # of a contributor, on average
    waited_s: float  # of the grace window
    slack_s: float | None  # that there was for it; None where none was opened


class Word(NamedTuple):
    """A sentence of the syncer that tells of a fault's effect."""

    at: float
    code: str
    subject: tuple[str, int]
    sentence: str


class Standing(NamedTuple):
    """What a learner became in the syncer's eyes."""

    at: float
    standing: str
    incarnation: int
    sentence: str


class Reports(NamedTuple):
    """What a learner has reported. `trained` are tokens of one incarnation; `turns` say where another one begins."""

    at: array[float]
    step: array[int]
    trained: array[float]
    step_time_s: array[float]
    turns: list[tuple[int, int]]  # incarnation, and its first place

    def trained_until(self, at: float) -> dict[int, float]:
        """By incarnation."""
        end = bisect_right(self.at, at)
        stops = [place for _, place in self.turns[1:]] + [len(self.at)]
        return {
            incarnation: self.trained[min(stop, end) - 1]
            for (incarnation, place), stop in zip(self.turns, stops, strict=True)
            if place < end
        }


TOLD = frozenset({"member-quarantined", "member-lost", "persist-failed", "admission-failed", "round-abandoned"})


class Reign:
    """One process of the syncer, or of a shard of it. Its core is told again what it was told."""

    def __init__(self, header: Header) -> None:
        core = core_of(header)
        assert isinstance(core, SyncerCore)
        self.core = core
        self.epoch = header.actor.start
        self.first: float | None = None
        self.last = 0.0
        self.merges: list[Merge] = []
        self.merged_at: dict[int, float] = {}  # by fragment: when its newest version became durable
        self.words: list[Word] = []
        self.refused: dict[str, int] = {}  # contributions, by reason
        self.unfit: list[str] = []  # what was wrong with values that arrived, whatever they were refused for
        self.failed_writes = 0
        self.pauses: list[list[float]] = []  # begin and end; an open one ends with the newest entry
        self.controls: list[Word] = []  # what operators asked for
        self.standings: dict[int, list[Standing]] = {}
        self.told: dict[int, Reports] = {}
        self._is_paused = False
        self._sealed: dict[int, tuple[int, int, float]] = {}  # by fragment: alive, asked, seconds of grace
        self._graces: dict[int, tuple[float, float]] = {}  # by fragment: when it was opened, and the slack
        self._waiting: dict[int, VersionRecord] = {}

    def take(self, entry: Entry) -> None:
        event = entry.event
        self.core.handle(entry.at, event)  # type: ignore[arg-type]  # a syncer's tape holds a syncer's events
        self.first, self.last = entry.at if self.first is None else self.first, entry.at
        if self.core.paused:
            if not self._is_paused:
                self.pauses.append([entry.at, entry.at])
            self.pauses[-1][1] = entry.at
        self._is_paused = self.core.paused
        if type(event) is MessageArrived:
            envelope = event.envelope
            self._note_standing(entry.at, envelope.learner)
            if type(envelope.body) is Report:
                self._report(entry.at, envelope.learner, envelope.incarnation, envelope.body)
            elif type(envelope.body) is Contribution and envelope.body.problem is not None:
                self.unfit.append(envelope.body.problem)
        elif type(event) is Persisted and event.key.kind == "version":
            self._merged(entry.at, self._waiting.pop(event.key.number))
        else:
            if type(event) is PersistFailed:
                self.failed_writes += 1
            for learner in (event.learner,) if type(event) is LearnerDisconnected else self.core.members:
                self._note_standing(entry.at, learner)
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is RefuseContribution:
                    why = effect.envelope.body.reason
                    self.refused[why.code] = self.refused.get(why.code, 0) + 1
            elif type(effect) is Say:
                if effect.reason.code in TOLD:
                    self.words.append(Word(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
                elif effect.reason.code.startswith("control-"):
                    self.controls.append(Word(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
            elif type(effect) is OpenGrace:
                slack_s = self.core.config.overlap_steps * effect.step_s - effect.quorum_s - effect.sync_s
                self._graces[effect.round.fragment] = entry.at, slack_s
            elif type(effect) is MergeRound:
                fragment = effect.round.fragment
                opened = self._graces.get(fragment)
                waited_s = entry.at - opened[0] if opened is not None else 0.0
                self._sealed[fragment] = len(self.core.live), len(self.core.fragments[fragment].asked), waited_s
            elif type(effect) is Persist and type(effect.record) is VersionRecord:
                self._waiting[effect.record.fragment] = effect.record

    def _merged(self, at: float, record: VersionRecord) -> None:
        alive, asked, waited_s = self._sealed.pop(record.fragment, (0, 0, 0.0))
        opened = self._graces.pop(record.fragment, None)
        them = record.contributions
        whole = sum(each.weight for each in them) or 1.0
        self.merged_at[record.fragment] = at
        self.merges.append(
            Merge(
                at,
                self.epoch,
                record.fragment,
                record.version,
                alive,
                asked,
                tuple((each.learner, each.incarnation) for each in them),
                tuple(each.weight / whole for each in them),
                sum(each.steps for each in them) / max(1, len(them)),
                waited_s,
                opened[1] if opened is not None else None,
            )
        )

    def _report(self, at: float, learner: int, incarnation: int, body: Report) -> None:
        told = self.told.get(learner)
        if told is None:
            told = self.told[learner] = Reports(array("d"), array("q"), array("d"), array("d"), [])
        if not told.turns or told.turns[-1][0] < incarnation:
            told.turns.append((incarnation, len(told.at)))
        elif told.turns[-1][0] > incarnation:
            return  # an old process that does not know of its successor
        told.at.append(at)
        told.step.append(body.step)
        told.trained.append(body.trained)
        told.step_time_s.append(body.step_time_s)

    def _note_standing(self, at: float, learner: int) -> None:
        member = self.core.members.get(learner)
        if member is None:
            return
        before = self.standings.setdefault(learner, [])
        standing = member.standing.value
        if not before or before[-1].standing != standing or before[-1].incarnation != member.incarnation:
            sentence = str(member.reason) if member.reason is not None else ""
            before.append(Standing(at, standing, member.incarnation, sentence))
