"""Published goodput and bandwidth figures (arXiv 2604.21428). Label them as "published" in every output.

Goodput is in percent, rounded to whole points. The decoupled method with one learner is the elastic job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["decoupled", "data-parallel", "elastic", "diloco", "streaming"]
Metric = Literal["goodput", "uptime"]


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """Cell of the published table of goodput under simulated failures."""

    method: Method
    learners: int
    chips: int
    metric: Metric
    percent: float

    @property
    def label(self) -> str:
        names = {"data-parallel": "one job, not elastic", "elastic": "one job, elastic"}
        return names.get(self.method, f"M = {self.learners}")


PUBLISHED_CHIPS = (150_000, 600_000, 1_200_000)
PUBLISHED_ROWS: tuple[tuple[Method, int], ...] = (
    ("data-parallel", 1),
    ("elastic", 1),
    ("decoupled", 4),
    ("decoupled", 8),
)

_GOODPUT = ((72, 38, 27), (88, 69, 58), (96, 89, 82), (98, 94, 88))
_UPTIME_AT_1200K = (27, 59, 99, 100)

PUBLISHED_CELLS: tuple[PublishedCell, ...] = tuple(
    PublishedCell(method, learners, chips, "goodput", float(percent))
    for (method, learners), row in zip(PUBLISHED_ROWS, _GOODPUT, strict=True)
    for chips, percent in zip(PUBLISHED_CHIPS, row, strict=True)
) + tuple(
    PublishedCell(method, learners, PUBLISHED_CHIPS[-1], "uptime", float(percent))
    for (method, learners), percent in zip(PUBLISHED_ROWS, _UPTIME_AT_1200K, strict=True)
)

# Goodput with two hardware generations of four learners each, one 18 % slower, 10 % jitter, by (quorum, grace).
PUBLISHED_MIXED_HARDWARE_GOODPUT: dict[tuple[int, bool], float] = {
    (8, False): 84.0,
    (1, False): 100.0,
    (1, True): 100.0,
}


def published_percent(method: Method, learners: int, chips: int, metric: Metric = "goodput") -> float | None:
    """Return a published value in percent, or None if the table has no such cell."""
    for cell in PUBLISHED_CELLS:
        if (cell.method, cell.learners, cell.chips, cell.metric) == (method, learners, chips, metric):
            return cell.percent
    return None


# Bandwidth for a given compute utilisation (Table 13): 5B parameters, steps of 1 s, Gbit/s, by sites and method.
PUBLISHED_RATE_PARAMS = 5e9
PUBLISHED_RATE_STEP_S = 1.0
PUBLISHED_RATES_GBIT_S: dict[tuple[int, str], dict[float, float]] = {
    (2, "data-parallel"): {0.5: 49.0, 0.9: 104.0, 0.95: 113.0},
    (2, "decoupled-bf16"): {0.5: 0.58, 0.9: 1.7, 0.95: 1.9},
    (2, "decoupled-int4"): {0.5: 0.15, 0.9: 0.43, 0.95: 0.49},
    (8, "data-parallel"): {0.5: 85.0, 0.9: 183.0, 0.95: 198.0},
    (8, "decoupled-bf16"): {0.5: 1.0, 0.9: 3.0, 0.95: 3.3},
    (8, "decoupled-int4"): {0.5: 0.26, 0.9: 0.75, 0.95: 0.84},
}
