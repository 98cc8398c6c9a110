"""Rules that every supervisor of a unit follows: the delay before a restart, and whether a unit has ended well."""

from __future__ import annotations

import contextlib
from pathlib import Path

HEALTHY_S = 120.0
"""A command that ran this long failed for a new reason: its failures are counted from one again."""

LEFT_EARLY = "it left, and its run goes on"
"""Why exit code 0 is a failure of a unit that ends with its syncer: something other than its supervisor stopped it."""

_ENDED = '"standing": "ended"'
LAST_WORDS = (("keeper.json", _ENDED), ("ray.json", _ENDED), ("slurm/state", "standing=ended\n"))
"""Where each engine writes how a unit is, in the directory of that unit."""


class Backoff:
    """Delays before restarts, doubled with each failure in a row up to a maximum.

    >>> backoff = Backoff(1.0, 60.0)
    >>> [backoff.failed(ran_s=0.0) for _ in range(7)], backoff.failed(ran_s=HEALTHY_S)
    ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0], 1.0)
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._failures = 0  # in a row

    def failed(self, ran_s: float) -> float:
        """Count a failure of a command that ran for `ran_s`, and return the delay before the next start."""
        self._failures = 1 if ran_s >= HEALTHY_S else self._failures + 1
        return float(min(self._first_s * 2.0 ** min(self._failures - 1, 10), self._max_s))


def has_ended(directory: Path) -> bool:
    """Return whether the unit of this directory has ended well, whichever engine ran it.

    A learner and its syncer may run on different engines.
    """
    for name, words in LAST_WORDS:
        with contextlib.suppress(OSError):
            if words in (directory / name).read_text(encoding="utf-8", errors="replace"):
                return True
    return False


__all__ = ["HEALTHY_S", "LEFT_EARLY", "Backoff", "has_ended"]
