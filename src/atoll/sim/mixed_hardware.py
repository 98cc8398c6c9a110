"""The published comparison of quorum and grace on two generations of hardware (arXiv 2604.21428).

Eight learners, four of each generation, the slower one 18 % behind, steps with 10 % jitter, no failures.

How goodput was defined for that table is not published. Here it is the share of chip time spent stepping, once over
all chips and once over those of the fast generation, which are the ones that wait. A decoupled learner never waits,
whatever the quorum: a loss at K = 8 means that learners waited for the round, so that row is run in lockstep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from atoll.sim.decoupled import DecoupledConfig, DecoupledRun
from atoll.sim.fleet import FleetConfig
from atoll.sim.published import PUBLISHED_MIXED_HARDWARE_GOODPUT

LEARNERS = 8
FAST_LEARNERS = 4
"""The first learners are of the fast generation."""

LEARNER_SPEEDS = (1.0,) * FAST_LEARNERS + (0.82,) * (LEARNERS - FAST_LEARNERS)
JITTER = 0.1
CHIPS = 8 * 1024
"""Without failures their number changes nothing."""


@dataclass(frozen=True, slots=True)
class MixedRow:
    """One column of the published table."""

    quorum: int
    grace: bool
    lockstep: bool

    @property
    def label(self) -> str:
        return f"K = {self.quorum}, grace {'on' if self.grace else 'off'}"

    @property
    def published_percent(self) -> float:
        return PUBLISHED_MIXED_HARDWARE_GOODPUT[(self.quorum, self.grace)]


MIXED_ROWS = (
    MixedRow(quorum=8, grace=False, lockstep=True),
    MixedRow(quorum=1, grace=False, lockstep=False),
    MixedRow(quorum=1, grace=True, lockstep=False),
)


@dataclass(frozen=True, slots=True)
class MixedResult:
    """One run of one row. Shares are fractions."""

    goodput: float
    goodput_fast: float
    goodput_slow: float
    contributions_per_merge: float
    effective_h: float
    staleness_steps: float


def run_mixed(
    row: MixedRow,
    protocol: DecoupledConfig,
    hours: float,
    seed: int,
    *,
    step_time_s: float = 1.0,
    on_progress: Callable[[float], None] | None = None,
) -> MixedResult:
    """One row on one seed, with every fragment and every step. `protocol` gives all but quorum, grace and jitter."""
    chosen = replace(
        protocol,
        quorum=row.quorum,
        grace_margin=(protocol.grace_margin or 0.5) if row.grace else 0.0,
        lockstep=row.lockstep,
        jitter=JITTER,
    )
    fleet = FleetConfig(mtbi_s=math.inf, step_time_s=step_time_s)
    result = DecoupledRun(fleet, chosen, LEARNERS, CHIPS, hours / 24.0, seed, speeds=LEARNER_SPEEDS).run(on_progress)
    return MixedResult(
        goodput=result.goodput,
        goodput_fast=fmean(result.goodput_by_learner[:FAST_LEARNERS]),
        goodput_slow=fmean(result.goodput_by_learner[FAST_LEARNERS:]),
        contributions_per_merge=result.contributions_per_merge,
        effective_h=result.effective_h,
        staleness_steps=result.staleness_steps,
    )
