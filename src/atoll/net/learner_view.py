"""What a learner shows of itself, on whichever rank of its island."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.core.learner import LearnerCore
from atoll.net.background import Background
from atoll.net.learner_stats import LearnerStats, Untold
from atoll.net.run_settings import RunSettings
from atoll.net.step_boundary import Solo, StepBoundary

if TYPE_CHECKING:
    from atoll.net.island_follower import Follower


class Shown:
    """The properties of a learner; `Learner` and the follower of its rank change what is behind them."""

    _background: Background
    _boundary: StepBoundary | None
    _core: LearnerCore | None
    _follower: Follower | None
    _island: Solo
    _settings: RunSettings
    _number: tuple[int, int] | None
    _untold: Untold
    _finished: bool
    _drained: bool
    _progress: float
    _paused_s: float
    _warmup_steps: int
    _restored_state: Any
    _began: float
    _boundary_s: float
    _lock_wait_s: float
    _adopted: int
    _contributed: int
    _repeated: int

    @property
    def id(self) -> int:
        assert self._number is not None, "the learner has not joined yet"
        return self._number[0]

    @property
    def incarnation(self) -> int:
        assert self._number is not None, "the learner has not joined yet"
        return self._number[1]

    @property
    def progress(self) -> float:
        """Of the run's budget, 0..1, as heard by the last step boundary, for learning-rate schedules.

        Not as heard by now: what a step depends on would then not be on the tape, and nobody could take it again.
        """
        return 1.0 if self._finished and not self._drained else self._progress

    @property
    def finished(self) -> bool:
        """There is nothing more to do here: the run is over, or this learner was asked to leave (`drained`)."""
        return self._finished

    @property
    def drained(self) -> bool:
        """An operator has asked this learner to leave: the others go on, and the model is as its last step left it."""
        return self._drained

    @property
    def paused_s(self) -> float:
        """How long it has stood still in all because the run was paused."""
        return self._paused_s

    @property
    def lr_scale(self) -> float:
        """Below 1 during the first steps of a learner that found no peer to take inner state from."""
        step = self._core.step + self._untold.steps if self._core is not None else 0
        if self._follower is not None:
            step = self._follower.steps
        if step >= self._warmup_steps:
            return 1.0
        return (step + 1) / (self._warmup_steps + 1)

    @property
    def restored_state(self) -> Any:
        """What `extra_state` had returned for the part that this learner has started from; None where it did not."""
        return self._restored_state

    @property
    def extra(self) -> dict[str, Any]:
        """What the syncer was given for all learners."""
        return dict(self._settings.extra)

    def stats(self) -> LearnerStats:
        """In an island of several ranks: what the leader has counted; times and memory are those of this rank."""
        if self._follower is not None:
            return self._follower.stats()
        fragments = self._boundary.fragments if self._boundary is not None else []
        core, link = self._core, self._background
        return LearnerStats(
            steps=core.step + self._untold.steps if core is not None else 0,
            tokens=core.trained + self._untold.tokens if core is not None else 0,
            bytes_up=link.bytes_up,
            bytes_down=link.bytes_down,
            boundary_s=self._boundary_s,
            lock_wait_s=self._lock_wait_s,
            training_s=time.monotonic() - self._began if self._began else 0.0,
            adopted=self._adopted,
            contributed=self._contributed,
            link=core.link.value if core is not None else "down",
            samples=core.taken + self._untold.samples if core is not None else 0,
            repeated=self._repeated,
            paused_s=self._paused_s,
            island_s=self._island.waited_s,
            host_bytes=sum(fragment.host_bytes for fragment in fragments),
            device_bytes=max((fragment.device_bytes for fragment in fragments), default=0),
            parameters=fragments[0].parameters if fragments else 0,
        )
