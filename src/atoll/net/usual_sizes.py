"""Contributions that are finite and yet cannot come from training: far larger than any of their fragment before.

One of them is enough to ruin the model, and averaging does not help: a millionth of a millionfold value is still as
large as everything else together. What counts is the norm per inner step, as a learner that was cut off brings the work
of many steps at once. This is a guard against broken memory and broken optimizers, not against somebody who knows it,
and it has to learn what is usual first: a syncer that was just started lets everything finite through for a few rounds.
"""

from __future__ import annotations

from collections import deque

MOST_TIMES = 1000.0
"""As large as the largest of the last ones. Schedules and restarts change sizes by tens, and slowly."""

SEEN_FIRST = 8
KEPT = 64


class UsualSizes:
    """Of the contributions to each fragment, since this syncer started."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[float]] = {}

    def problem(self, fragment: int, norm: float, steps: int) -> str | None:
        """Why a contribution of this norm must not be merged, as a sentence, or None; then it is remembered.

        >>> sizes = UsualSizes()
        >>> [sizes.problem(0, 1.0, 2) for _ in range(8)] == [None] * 8
        True
        >>> sizes.problem(0, 1e6, 2)
        'wild: 1e+06 times as large as the largest of the last 8'
        """
        kept = self._kept.setdefault(fragment, deque(maxlen=KEPT))
        size = norm / max(1, steps)
        largest = max(kept, default=0.0)
        if len(kept) >= SEEN_FIRST and largest > 0.0 and size > MOST_TIMES * largest:
            return f"wild: {size / largest:.3g} times as large as the largest of the last {len(kept)}"
        kept.append(size)
        return None
