"""What the tapes of a run say about its time and its tokens. Nothing is counted twice or elsewhere.

The books (trained = merged + pending + dropped) are the syncer's own: its core is told every event of its tape again,
and asked at the end. Steps and their durations are what each learner's core was told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll.core.protocol import Contribution, Persist, Persisted, Send, StartTraining, StepTaken, VersionRecord
from atoll.core.replay import core_of
from atoll.core.syncer import SyncerCore
from atoll.core.types import SYNCER, RunConfig
from atoll.tape_files import RunTapes, TapeReader

Span = tuple[float, float]


class Life(NamedTuple):
    """One process of a learner: from the moment at which it might train to its last step. Times are the run's."""

    incarnation: int
    began: float
    ended: float
    steps: int
    tokens: int
    moments: str  # where its inner state came from, in words


@dataclass(slots=True)
class Island:
    """One learner through all its incarnations."""

    learner: int
    lives: list[Life] = field(default_factory=list)
    step_ends: array[float] = field(default_factory=lambda: array("d"))
    step_times_s: array[float] = field(default_factory=lambda: array("d"))
    contributions: int = 0

    @property
    def steps(self) -> int:
        return sum(life.steps for life in self.lives)

    @property
    def tokens(self) -> int:
        return sum(life.tokens for life in self.lives)

    @property
    def useful_s(self) -> float:
        return sum(self.step_times_s)

    def present_s(self) -> float:
        return sum(life.ended - life.began for life in self.lives)

    def median_step_s(self, within: Span = (float("-inf"), float("inf"))) -> float | None:
        """Of the steps that lie wholly in a span of time."""
        begin, end = within
        times = [
            took_s
            for ended, took_s in zip(self.step_ends, self.step_times_s, strict=True)
            if begin <= ended - took_s and ended <= end
        ]
        return median(times) if times else None

    def return_after(self, at: float) -> tuple[Life, Life] | None:
        """The life that ended around this moment, and the one that followed."""
        for before, after in zip(self.lives, self.lives[1:], strict=False):
            if before.began <= at <= after.began:
                return before, after
        return None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Tokens of the run, the mean over its fragments: each settles in every fragment at another time."""

    trained: int
    merged: int
    pending: int
    dropped: int
    dropped_by_reason: dict[str, int]


@dataclass(frozen=True, slots=True)
class TapeFigures:
    config: RunConfig
    islands: tuple[Island, ...]
    ledger: Ledger
    merges: int
    contributions: int  # in all merges
    began: float  # the first learner may train
    wall_s: float  # from then on, without the time in which no process of the run was there
    stepping_s: float  # of that, somebody was in a step
    finished: bool

    def goodput(self, learners: int) -> float:
        """Share of the learners' time that was spent in steps."""
        return min(1.0, sum(island.useful_s for island in self.islands) / max(learners * self.wall_s, 1e-9))

    def effective_h(self) -> float | None:
        """Steps that a learner takes between two merges of a fragment, if it is there all the time."""
        present_s = sum(island.present_s() for island in self.islands)
        if not self.merges or not present_s:
            return None
        steps = sum(island.steps for island in self.islands) * self.wall_s / present_s
        return steps * len(self.config.fragment_ids()) / self.merges


def read_figures(run: Path) -> TapeFigures:
    """Everything above, from the tapes of a run; they may be cut short, or still grow."""
    tapes = RunTapes(run)
    islands: dict[int, Island] = {}
    spans: list[Span] = []  # in which a process was there
    core: SyncerCore | None = None
    merges = contributions = 0
    for actor, reader in tapes.readers.items():  # by learner, then by start
        if actor.learner == SYNCER:
            core, (made, joined), span = _read_syncer(reader)
            merges, contributions = merges + made, contributions + joined
        else:
            span = _read_learner(reader, islands.setdefault(actor.learner, Island(actor.learner)), actor.start)
        if span is not None:
            spans.append(span)
    began = min((island.lives[0].began for island in islands.values() if island.lives), default=0.0)
    steps = [
        (max(began, ended - took_s), ended)
        for island in islands.values()
        for ended, took_s in zip(island.step_ends, island.step_times_s, strict=True)
    ]
    last = max((ended for _, ended in steps), default=began)
    present = [(max(begin, began), min(end, last)) for begin, end in spans]
    return TapeFigures(
        config=tapes.config,
        islands=tuple(island for _, island in sorted(islands.items())),
        ledger=_books(core),
        merges=merges,
        contributions=contributions,
        began=began,
        wall_s=covered_s(present),
        stepping_s=covered_s(steps),
        finished=core is not None and core.manifest is not None,
    )


def _read_syncer(reader: TapeReader) -> tuple[SyncerCore, tuple[int, int], Span | None]:
    core = core_of(reader.header)
    assert isinstance(core, SyncerCore)
    waiting: dict[int, VersionRecord] = {}  # by fragment: asked to be durable, not yet known to be
    merges = contributions = 0
    first = last = None
    for entry in reader:
        core.handle(entry.at, entry.event)  # type: ignore[arg-type]  # a syncer's tape holds a syncer's events
        first, last = entry.at if first is None else first, entry.at
        if type(entry.event) is Persisted and entry.event.key.kind == "version":
            merges += 1
            contributions += len(waiting.pop(entry.event.key.number).contributions)
        for effect in entry.effects:
            if type(effect) is Persist and type(effect.record) is VersionRecord:
                waiting[effect.record.fragment] = effect.record
    return core, (merges, contributions), None if first is None or last is None else (first, last)


def _read_learner(reader: TapeReader, island: Island, incarnation: int) -> Span | None:
    began: float | None = None
    first = last = None
    ended, moments = 0.0, ""
    steps = tokens = 0
    for entry in reader:
        first, last = entry.at if first is None else first, entry.at
        if type(entry.event) is StepTaken and entry.event.steps:
            steps += entry.event.steps
            tokens += entry.event.tokens
            ended = entry.at
            island.step_ends.append(entry.at)
            island.step_times_s.append(entry.event.step_time_s * entry.event.steps)
        for effect in entry.effects:
            if type(effect) is StartTraining:
                began, ended, moments = entry.at, entry.at, str(effect.moments)
            elif type(effect) is Send and type(effect.envelope.body) is Contribution:
                island.contributions += 1
    if began is not None:
        island.lives.append(Life(incarnation, began, ended, steps, tokens, moments))
    return None if first is None or last is None else (first, last)


def _books(core: SyncerCore | None) -> Ledger:
    lines = [core.ledger.line(p) for p in core.fragments] if core is not None else []
    if not lines:
        return Ledger(0, 0, 0, 0, {})
    count = len(lines)
    dropped: dict[str, int] = {}
    for line in lines:
        for why, lost in line.dropped.items():
            dropped[why] = dropped.get(why, 0) + lost
    by_reason = {why: lost // count for why, lost in sorted(dropped.items()) if lost >= count}
    trained, merged, lost = lines[0].trained, sum(line.merged for line in lines) // count, sum(by_reason.values())
    return Ledger(trained, merged, trained - merged - lost, lost, by_reason)  # what rounding leaves is pending


def covered_s(spans: Iterable[Span]) -> float:
    """Length of the union of spans.

    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > max(begin, reached):
            total += end - max(begin, reached)
            reached = end
    return total
