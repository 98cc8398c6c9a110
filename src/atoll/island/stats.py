"""What a rank of a learner counts, and what it knows of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll.store.run_settings import RunSettings


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
    repeated_steps: int  # steps on samples that it had had before, because no lease was left
    paused_s: float = 0.0  # it stood still because the run was paused; part of `training_s`
    rank_wait_s: float = (
        0.0  # of `boundary_s`, for the ranks of this island to come to the same list, slower ones included
    )
    host_bytes: int = 0  # in this rank's host memory: anchors, copies, arrivals and what rounding left out
    device_bytes: int = 0  # beside the model on its device, at most: a snapshot and a staged value of one fragment
    parameters: int = 0  # numbers that travel, of those what this rank holds
    transfer_mode: str = (
        "alone"  # in an island of several ranks "rows": each sends and fetches its own; "leader": rank 0 for all
    )
    unmerged_tokens: int = 0  # tokens that some fragment has not merged yet, as far as the leader knows; of rank 0 only


@dataclass(slots=True)
class LearnerStatus:
    """What a rank knows of its run, as of the last step boundary. The properties of `atoll.Learner` show it."""

    settings: RunSettings = field(default_factory=RunSettings)
    identity: tuple[int, int] | None = None  # of the learner and its incarnation
    finished: bool = False
    drained: bool = False
    progress: float = 0.0
    paused_s: float = 0.0
    warmup_steps: int = 0
    restored_state: Any = None
