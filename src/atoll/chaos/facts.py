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
from atoll.tape.learner_processes import Life
from atoll.tape.merges import Merge
from atoll.tape.steps import Span
from atoll.tape.syncer_tenures import Reign, Word
from atoll.tape.time_shares import overlap_s
from atoll.tape.timeline import Books, read_books


class SyncerLife(NamedTuple):
    epoch: int
    first: float
    last: float


@dataclass(slots=True)
class Facts:
    """Of one run."""

    books: Books
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
        return self.books.trains_since() or 0.0

    @property
    def ended(self) -> float:
        """The last step of anybody, or the newest entry of a run that has not come to its end."""
        return max(self.began, self.books.ended())

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
    return Facts(Books(), {}, [], [], [], [], {}, [], 0)


def read_facts(run: Path) -> Facts:
    """From all tapes of a run, none of it thinned out; they may be cut short."""
    facts = nothing()
    facts.books = books = read_books(run, keep=None)
    facts.lives = books.lives
    for reign in books.reigns:
        _add(reign, facts)
    facts.merges.sort(key=lambda merge: merge.at)
    if books.reign is not None:
        facts.ledger = books.reign.lines()
    return facts


def _add(reign: Reign, facts: Facts) -> None:
    facts.merges += reign.merges.rows
    facts.words += reign.words
    facts.unfit += reign.unfit
    facts.failed_writes += reign.failed_writes
    for code, count in reign.refused.items():
        facts.refused[code] = facts.refused.get(code, 0) + count
    if reign.first is not None:
        facts.syncers.append(SyncerLife(reign.epoch, reign.first, reign.last))


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
