"""What a learner counts."""

from __future__ import annotations

from typing import NamedTuple


class LearnerStats(NamedTuple):
    """What a learner has done so far. `boundary_s`: time spent between steps for Atoll, of `training_s` in all."""

    steps: int
    tokens: int
    bytes_up: int
    bytes_down: int
    boundary_s: float
    lock_wait_s: float
    training_s: float
    adopted: int
    contributed: int
    link: str
    samples: int  # of its leases, had once
    repeated: int  # steps on samples that it had had before, because no lease was left
    paused_s: float = 0.0  # it stood still because the run was paused; part of `training_s`


class Untold(NamedTuple):
    """Steps that the core has not been told of yet."""

    steps: int
    tokens: int
    samples: int


NOTHING_UNTOLD = Untold(0, 0, 0)
