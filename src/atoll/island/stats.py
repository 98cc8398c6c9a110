"""Counters of a rank of a learner, and its view of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll.store.run_settings import RunSettings


class LearnerStats(NamedTuple):
    """Counters of a learner. `boundary_s`: seconds between steps spent in Atoll, as a part of `training_s`."""

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
    samples: int  # leased samples that were trained on
    repeated_steps: int  # steps on repeated samples, because no lease was left
    paused_s: float = 0.0  # seconds of pause of the run, as a part of `training_s`
    rank_wait_s: float = 0.0  # seconds of waiting for other ranks at boundaries, as a part of `boundary_s`
    host_bytes: int = 0  # host memory of this rank: anchors, copies, arrivals and quantization residuals
    device_bytes: int = 0  # peak of Atoll's device memory, besides the model: a copy and a value of one fragment
    parameters: int = 0  # parameter values at this rank that are merged
    transfer_mode: str = (
        "alone"  # several ranks: "rows" if each transfers its own rows, "leader" if rank 0 does for all
    )
    unmerged_tokens: int = 0  # tokens that some fragment has not merged yet, as far as rank 0 knows; 0 at other ranks


@dataclass(slots=True)
class LearnerStatus:
    """A rank's view of its run, as of the last step boundary. The properties of `atoll.Learner` show it."""

    settings: RunSettings = field(default_factory=RunSettings)
    identity: tuple[int, int] | None = None  # numbers of the learner and of its incarnation
    finished: bool = False
    drained: bool = False
    progress: float = 0.0
    paused_s: float = 0.0
    warmup_steps: int = 0
    restored_state: Any = None
