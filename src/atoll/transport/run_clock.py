"""The clock of a real run: seconds since the run was founded, the same on every host as far as their clocks agree."""

from __future__ import annotations

import time


class RunClock:
    """Wall time decides where the clock starts, the monotonic clock how it goes on: it never goes back."""

    def __init__(self, founded_at: float) -> None:
        self._offset = time.time() - founded_at - time.monotonic()

    def now(self) -> float:
        return self.at(time.monotonic())

    def at(self, monotonic_s: float) -> float:
        """A moment of the monotonic clock on the run's clock."""
        return monotonic_s + self._offset
