"""The syncer's own view, kept at evenly spaced moments, so that one can travel in time.

At most `MOST` of them: when there are more, every other one is dropped and the spacing doubles. A slider has no finer
steps than that anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from atoll.core.ledger import Line
from atoll.core.syncer.core import FragmentView, MemberView, SyncerView
from atoll.tape.syncer_tenures import Reign, mean_line

MOST = 2048
FIRST_SPACING_S = 0.5


class Sample(NamedTuple):
    at: float
    epoch: int
    view: SyncerView
    merged_at: dict[int, float]  # by fragment: when its newest version became durable
    merged_with: dict[int, float]  # by learner: when the newest merge that has it became durable
    quorum: int
    grace_margin: float

    @property
    def fragments(self) -> tuple[FragmentView, ...]:
        return self.view.fragments

    @property
    def members(self) -> dict[int, MemberView]:
        return {each.learner: each for each in self.view.members}

    @property
    def books(self) -> Line:
        """Of all fragments, as means: a token settles in each of them."""
        return mean_line(self.view.ledger)

    @property
    def is_balanced(self) -> bool:
        return all(line.balanced() for line in self.view.ledger)


def sample_of(reign: Reign, at: float) -> Sample:
    config = reign.core.config
    return Sample(
        at,
        reign.epoch,
        reign.core.view(),
        dict(reign.merged_at),
        dict(reign.merged_with),
        config.quorum,
        config.grace_margin,
    )


class Samples:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: list[Sample] = []
        self._spacing_s = FIRST_SPACING_S
        self._due = float("-inf")

    def __len__(self) -> int:
        return len(self._kept)

    def is_due(self, at: float) -> bool:
        return at >= self._due

    def add(self, sample: Sample) -> None:
        self._kept.append(sample)
        if len(self._kept) >= self._most:
            self._kept = self._kept[::2]
            self._spacing_s *= 2
        self._due = self._kept[-1].at + self._spacing_s

    def before(self, at: float) -> Sample | None:
        """The newest that is not after this moment."""
        index = bisect_right(self._kept, at, key=lambda each: each.at)
        return self._kept[index - 1] if index else None

    def all(self) -> list[Sample]:
        return self._kept
