"""Figures over seeds: a mean and, from two seeds on, its 95 % confidence interval.

>>> over_seeds([0.87, 0.88, 0.89]).mean
0.88
>>> over_seeds([0.88]).low is None
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from atoll.sim.goodput import mean_ci


@dataclass(frozen=True, slots=True)
class Figure:
    """One seed has a mean and no interval."""

    mean: float
    low: float | None
    high: float | None

    def interval(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]

    def times(self, factor: float) -> Figure:
        """The same in another unit."""
        if self.low is None or self.high is None:
            return Figure(self.mean * factor, None, None)
        return Figure(self.mean * factor, self.low * factor, self.high * factor)


def over_seeds(values: Iterable[float], least: float = -math.inf, most: float = math.inf) -> Figure:
    """The figure of a quantity that lies in `least` to `most`: an interval does not reach beyond what is possible."""
    sample = list(values)
    if len(sample) < 2:
        return Figure(fmean(sample), None, None)
    mean, low, high = mean_ci(sample)
    return Figure(mean, min(max(low, least), mean), max(min(high, most), mean))
