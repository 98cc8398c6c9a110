"""What the tapes say about a run under fault: who was in what state when, every step, every merge, the books.

Times are those of the run's clock, as on the tapes. Nothing here judges; `judge` does.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from atoll.core.ledger import Line
from atoll.core.protocol import (
    Contribution,
    LinkClosed,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    PersistFailed,
    RefuseContribution,
    Say,
    Send,
    StartTraining,
    StepTaken,
    VersionRecord,
    Welcome,
)
from atoll.core.replay import core_of
from atoll.core.syncer import SyncerCore
from atoll.core.types import SYNCER
from atoll.tape_files import RunTapes, TapeReader

Span = tuple[float, float]
State = Literal["training", "alone", "stopped", "joining", "away", "gone"]


@dataclass(slots=True)
class Life:
    """One process of a learner. `alone` are the spans in which it had no link."""

    incarnation: int
    first: float  # entry on its tape
    last: float
    began: float | None = None  # it may train
    step_ends: array[float] = field(default_factory=lambda: array("d"))
    step_times_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    contributions: int = 0
    alone: list[Span] = field(default_factory=list)

    def steps(self) -> list[Span]:
        return [(end - took_s, end) for end, took_s in zip(self.step_ends, self.step_times_s, strict=True)]


class Merge(NamedTuple):
    """One durable version. `alive` and `asked` are as they were when its round was sealed."""

    at: float
    epoch: int
    fragment: int
    version: int
    alive: int
    asked: int
    contributors: tuple[tuple[int, int], ...]  # learner and incarnation


class SyncerLife(NamedTuple):
    epoch: int
    first: float
    last: float


class Word(NamedTuple):
    """A sentence of the syncer that tells of a fault's effect."""

    at: float
    code: str
    subject: tuple[str, int]
    sentence: str


TOLD = frozenset({"member-quarantined", "member-lost", "persist-failed", "admission-failed", "round-abandoned"})


@dataclass(slots=True)
class Facts:
    """Of one run."""

    lives: dict[int, list[Life]]  # by learner, in the order of their processes
    syncers: list[SyncerLife]
    merges: list[Merge]
    ledger: list[Line]  # one per fragment, of the newest syncer
    words: list[Word]
    refused: dict[str, int]  # contributions that the syncer refused, by reason
    unfit: list[str]  # what was wrong with values that arrived, whatever they were refused for
    failed_writes: int

    @property
    def began(self) -> float:
        """The first learner may train."""
        began = [life.began for lives in self.lives.values() for life in lives if life.began is not None]
        return min(began, default=0.0)

    @property
    def ended(self) -> float:
        """The last step of anybody."""
        ends = [life.step_ends[-1] for lives in self.lives.values() for life in lives if life.step_ends]
        return max(ends, default=self.began)

    @property
    def tokens(self) -> int:
        """That learners say they have trained."""
        return sum(life.tokens for lives in self.lives.values() for life in lives)

    def usual_step_s(self, learner: int) -> float | None:
        times = [took_s for life in self.lives.get(learner, ()) for took_s in life.step_times_s]
        return median(times) if times else None

    def next_life(self, learner: int, at: float) -> Life | None:
        """The first process of a learner that began to train after this moment."""
        lives = self.lives.get(learner, ())
        return next((life for life in lives if life.began is not None and life.first > at), None)

    def first_merged(self, learner: int, incarnation: int) -> float | None:
        return next((m.at for m in self.merges if (learner, incarnation) in m.contributors), None)

    def merged_of_alive(self) -> float | None:
        shares = [len(m.contributors) / m.alive for m in self.merges if m.alive]
        return sum(shares) / len(shares) if shares else None


def nothing() -> Facts:
    """Of a run that never began."""
    return Facts({}, [], [], [], [], {}, [], 0)


def read_facts(run: Path) -> Facts:
    """From all tapes of a run; they may be cut short."""
    tapes = RunTapes(run)
    facts = nothing()
    for actor, reader in tapes.readers.items():  # by learner, then by start
        if actor.learner == SYNCER:
            _read_syncer(reader, facts)
        else:
            life = _read_learner(reader, actor.start)
            if life is not None:
                facts.lives.setdefault(actor.learner, []).append(life)
    facts.merges.sort(key=lambda merge: merge.at)
    return facts


def _read_learner(reader: TapeReader, incarnation: int) -> Life | None:
    life: Life | None = None
    lost_at: float | None = None
    for entry in reader:
        if life is None:
            life = Life(incarnation, entry.at, entry.at)
        life.last = entry.at
        event = entry.event
        if type(event) is StepTaken and event.steps:
            life.step_ends.append(entry.at)
            life.step_times_s.append(event.step_time_s * event.steps)
            life.tokens += event.tokens
        elif type(event) is LinkClosed and lost_at is None:
            lost_at = entry.at
        elif type(event) is MessageArrived and type(event.envelope.body) is Welcome and lost_at is not None:
            life.alone.append((lost_at, entry.at))
            lost_at = None
        for effect in entry.effects:
            if type(effect) is StartTraining:
                life.began = entry.at
            elif type(effect) is Send and type(effect.envelope.body) is Contribution:
                life.contributions += 1
    if life is not None and lost_at is not None:
        life.alone.append((lost_at, life.last))
    return life


def _read_syncer(reader: TapeReader, facts: Facts) -> None:
    core = core_of(reader.header)
    assert isinstance(core, SyncerCore)
    sealed: dict[int, tuple[int, int]] = {}  # by fragment: alive and asked
    waiting: dict[int, VersionRecord] = {}
    first = last = None
    for entry in reader:
        core.handle(entry.at, entry.event)  # type: ignore[arg-type]  # a syncer's tape holds a syncer's events
        first, last = entry.at if first is None else first, entry.at
        if type(entry.event) is Persisted and entry.event.key.kind == "version":
            record = waiting.pop(entry.event.key.number)
            alive, asked = sealed.get(record.fragment, (0, 0))
            who = tuple((each.learner, each.incarnation) for each in record.contributions)
            facts.merges.append(Merge(entry.at, core.epoch, record.fragment, record.version, alive, asked, who))
        elif type(entry.event) is PersistFailed:
            facts.failed_writes += 1
        elif type(entry.event) is MessageArrived and type(entry.event.envelope.body) is Contribution:
            problem = entry.event.envelope.body.problem
            if problem is not None:
                facts.unfit.append(problem)
        for effect in entry.effects:
            if type(effect) is MergeRound:
                fragment = effect.round.fragment
                sealed[fragment] = (len(core.live), len(core.fragments[fragment].asked))
            elif type(effect) is Persist and type(effect.record) is VersionRecord:
                waiting[effect.record.fragment] = effect.record
            elif type(effect) is Send and type(effect.envelope.body) is RefuseContribution:
                why = effect.envelope.body.reason
                facts.refused[why.code] = facts.refused.get(why.code, 0) + 1
            elif type(effect) is Say and effect.reason.code in TOLD:
                facts.words.append(Word(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
    if first is not None and last is not None:
        facts.syncers.append(SyncerLife(core.epoch, first, last))
    facts.ledger = [core.ledger.line(p) for p in core.fragments]


# --------------------------------------------------------------------------------------------------------------------
# Time of one learner


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of one island went, in seconds; the parts add up to `allocated_s`."""

    learner: int
    allocated_s: float
    stepping_s: float
    stopped_s: float  # of SIGSTOP
    away_s: float  # no process, or one that is only starting
    joining_s: float  # fetching the model and a peer's inner state
    between_s: float  # the rest: copying, adopting, waiting for a core

    @property
    def goodput(self) -> float:
        return self.stepping_s / self.allocated_s if self.allocated_s > 0.0 else 0.0

    @property
    def up_s(self) -> float:
        """There was a process that could do something."""
        return self.allocated_s - self.away_s - self.stopped_s


def shares_of(learner: int, lives: Sequence[Life], span: Span, stops: Sequence[Span]) -> Shares:
    """`span`: in which the learner should have trained. `stops`: in which its process stood by SIGSTOP."""
    allocated_s = max(0.0, span[1] - span[0])
    stood = [clipped for clipped in (clip(stop, span) for stop in stops) if clipped is not None]
    stepping_s = stopped_in_steps = joining_s = present_s = 0.0
    for life in lives:
        present_s += overlap_s((life.first, max(life.last, life.first)), span)
        began = life.began if life.began is not None else life.last
        joining_s += overlap_s((life.first, began), span)
        for step in life.steps():
            stepping_s += overlap_s(step, span)
            stopped_in_steps += sum(overlap_s(step, each) for each in stood)
    stopped_s = sum(end - begin for begin, end in stood)
    stepping_s = max(0.0, stepping_s - stopped_in_steps)
    away_s = max(0.0, allocated_s - present_s)
    between_s = max(0.0, allocated_s - stepping_s - stopped_s - away_s - joining_s)
    return Shares(learner, allocated_s, stepping_s, stopped_s, away_s, joining_s, between_s)


def states_of(
    lives: Sequence[Life], span: Span, stops: Sequence[Span], left_at: float | None
) -> list[tuple[Span, State]]:
    """The band of one island: what it did when, without gaps."""
    bands: list[tuple[Span, State]] = []

    def add(begin: float, end: float, state: State) -> None:
        found = clip((begin, end), span)
        if found is not None:
            bands.append((found, state))

    at = span[0]
    for life in lives:
        add(at, life.first, "away")
        began = life.began if life.began is not None else life.last
        add(life.first, began, "joining")
        add(began, life.last, "training")
        at = max(at, life.last)
    if left_at is not None:
        add(at, span[1], "gone")
    else:
        add(at, span[1], "away")
    covers = [(stop, "stopped") for stop in stops] + [(alone, "alone") for life in lives for alone in life.alone]
    return _covered(bands, covers)


def _covered(bands: list[tuple[Span, State]], covers: Sequence[tuple[Span, str]]) -> list[tuple[Span, State]]:
    """Training gives way to what lies over it."""
    for cover, state in covers:
        cut: list[tuple[Span, State]] = []
        for band, was in bands:
            over = clip(cover, band) if was == "training" else None
            if over is None:
                cut.append((band, was))
                continue
            if band[0] < over[0]:
                cut.append(((band[0], over[0]), was))
            cut.append((over, "stopped" if state == "stopped" else "alone"))
            if over[1] < band[1]:
                cut.append(((over[1], band[1]), was))
        bands = cut
    return bands


class Pause(NamedTuple):
    """The time between the ends of two steps in a row of one process."""

    learner: int
    at: float  # where it began
    gap_s: float
    usual_s: float


def worst_pause(facts: Facts, excused: Mapping[int, Sequence[Span]]) -> Pause | None:
    """Of all learners; gaps that touch a span in which the learner itself was struck do not count."""
    worst: Pause | None = None
    for learner, lives in facts.lives.items():
        usual_s = facts.usual_step_s(learner)
        spans = excused.get(learner, ())
        for life in lives:
            for before, after in zip(life.step_ends, life.step_ends[1:], strict=False):
                if worst is not None and after - before <= worst.gap_s:
                    continue
                if any(overlap_s((before, after), span) > 0.0 for span in spans):
                    continue
                assert usual_s is not None
                worst = Pause(learner, before, after - before, usual_s)
    return worst


def stepping_union_s(facts: Facts, span: Span) -> float:
    """Seconds in which somebody was in a step."""
    steps = sorted(step for lives in facts.lives.values() for life in lives for step in life.steps())
    total, reached = 0.0, span[0]
    for begin, end in steps:
        begin, end = max(begin, reached), min(end, span[1])
        if end > begin:
            total += end - begin
            reached = end
    return total


def overlap_s(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def clip(span: Span, within: Span) -> Span | None:
    begin, end = max(span[0], within[0]), min(span[1], within[1])
    return (begin, end) if end > begin else None
