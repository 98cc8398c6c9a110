"""The syncer's own view, kept at evenly spaced moments, so that one can travel in time.

At most `MOST` of them: when there are more, every other one is dropped and the spacing doubles. A slider has no finer
steps than that anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from atoll.core.ledger import Line
from atoll.core.syncer import FragmentView, MemberView, SyncerView
from atoll.dash.facts import Reign

MOST = 2048
FIRST_SPACING_S = 0.5


class Sample(NamedTuple):
    at: float
    epoch: int
    view: SyncerView
    merged_at: dict[int, float]  # by fragment: when its newest version became durable
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
        lines = self.view.ledger
        count = max(1, len(lines))
        dropped: dict[str, int] = {}
        for line in lines:
            for why, tokens in line.dropped.items():
                dropped[why] = dropped.get(why, 0) + tokens
        trained = max((line.trained for line in lines), default=0)
        merged = sum(line.merged for line in lines) // count
        dropped = {why: tokens // count for why, tokens in dropped.items()}
        return Line(trained, merged, trained - merged - sum(dropped.values()), dropped)  # what is rounded is pending

    @property
    def is_balanced(self) -> bool:
        return all(line.balanced() for line in self.view.ledger)


def sample_of(reign: Reign, at: float) -> Sample:
    config = reign.core.config
    return Sample(at, reign.epoch, reign.core.view(), dict(reign.merged_at), config.quorum, config.grace_margin)


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
