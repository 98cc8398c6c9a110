"""A learner that stands still at a step boundary: its run is paused, or it has taken its last step and leaves."""

from __future__ import annotations

import time

from atoll.core.protocol import StepTaken
from atoll.island.rank_connection import Ask, Told
from atoll.learner.driver import CoreDriver
from atoll.learner.stats import NOTHING_UNTOLD, Untold


class Resting(CoreDriver):
    _paused_s: float
    _untold: Untold

    def _told(self, is_paused: bool) -> Told:
        """What the other ranks of this island are told at every boundary."""
        core, link = self._core, self._background
        assert core is not None
        sent = (link.bytes_up, link.bytes_down, self._adopted, self._contributed, core.taken)
        return Told(is_paused, self._progress, core.step, core.trained, *sent)

    def _rest(self) -> None:
        """Stand still at this boundary until the run is resumed or ends, or this learner may leave: the one wait that
        somebody has asked for.

        What comes meanwhile is answered, adopted and saved here, as at any boundary.
        """
        assert self._core is not None
        core, began, is_paused = self._core, time.monotonic(), True
        try:
            while is_paused and not self._finished:
                with self._news:
                    if core.rests and not self._came and not core.can_answer:
                        self._background.check()
                        self._background.check_away()
                        self._news.wait(0.2)
                    came, self._came = self._came, False
                    actions = list(self._actions)
                    self._actions.clear()
                    due = (came and core.has_boundary_work) or core.can_answer
                    if core.training and (due or not core.rests):
                        self._last_end = time.monotonic()  # the next step begins here
                        actions += self._handle(StepTaken(0, 0, 0.0), at=self._last_end)
                    actions += self._heed_notice()
                    is_paused = core.rests
                self._island.hear(Ask.REST)
                try:
                    self._carry_out(self._island.agree(actions, self._told(is_paused)))
                finally:
                    self._background.kick()
        finally:
            self._paused_s += time.monotonic() - began

    def _has_to_push(self) -> bool:
        """A loop that has heard of the notice by itself may have ended before its learner came to a boundary."""
        came = self._notice.came or self._island.noticed
        return bool(came and self._core is not None and self._core.training and self._began and not self._finished)

    def _push_after_the_loop(self) -> None:
        with self._news:
            now, (steps, tokens, samples) = time.monotonic(), self._untold
            self._untold = NOTHING_UNTOLD
            if steps:
                took_s = max(0.0, now - self._last_end) / steps
                self._actions += self._handle(StepTaken(steps, tokens, took_s, samples), at=now)
            self._actions += self._heed_notice()
        self._rest()
