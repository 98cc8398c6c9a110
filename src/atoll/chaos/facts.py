"""What the tapes say about a run under fault: who was in what state when, every step, every merge, the books.

Times are those of the run's clock, as on the tapes. Nothing here judges; `judge` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll.core.ledger import Line
from atoll.core.types import SYNCER
from atoll.dash.accounting import overlap_s
from atoll.dash.facts import Life, Merge, Reign, Span, Word
from atoll.tape_files import RunTapes


class SyncerLife(NamedTuple):
    epoch: int
    first: float
    last: float


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
            reign = Reign(reader.header)
            for entry in reader:
                reign.take(entry)
            _add(reign, facts)
        else:
            life: Life | None = None
            for entry in reader:
                life = life or Life(actor.start, entry.at, entry.at)
                life.take(entry)
            if life is not None:
                facts.lives.setdefault(actor.learner, []).append(life)
    facts.merges.sort(key=lambda merge: merge.at)
    return facts


def _add(reign: Reign, facts: Facts) -> None:
    facts.merges += reign.merges
    facts.words += reign.words
    facts.unfit += reign.unfit
    facts.failed_writes += reign.failed_writes
    for code, count in reign.refused.items():
        facts.refused[code] = facts.refused.get(code, 0) + count
    if reign.first is not None:
        facts.syncers.append(SyncerLife(reign.epoch, reign.first, reign.last))
    facts.ledger = [reign.core.ledger.line(p) for p in reign.core.fragments]


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
