"""Simulation of the published comparison of quorum and grace on two generations of hardware (arXiv 2604.21428).

The fleet has eight learners, four of each generation. The slower generation is 18 % slower. Step times have 10 %
jitter, and there are no failures.

The definition of goodput for that table is not published. Here it is the share of chip time spent in steps, once for
all chips and once for those of the fast generation, which wait for the others. A decoupled learner never waits, for any
quorum. A loss at K = 8 therefore means that learners waited for the round, so that row runs in lockstep.
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
"""Number of learners of the fast generation. They have the lowest ids."""

LEARNER_SPEEDS = (1.0,) * FAST_LEARNERS + (0.82,) * (LEARNERS - FAST_LEARNERS)
JITTER = 0.1
CHIPS = 8 * 1024
"""Number of chips, which does not matter without failures."""


@dataclass(frozen=True, slots=True)
class MixedRow:
    """Column of the published table."""

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
    """Result of one row on one seed. Shares are fractions."""

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
    """Simulate one row on one seed, with every fragment and every step.

    Args:
        row: quorum, grace and lockstep of the run.
        protocol: all other settings except jitter.
        hours: simulated time.
    """
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
