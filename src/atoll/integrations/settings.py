"""What a callback may be told beside what the trainer knows: the settings of `atoll.Learner`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from atoll.learner.api import Learner

TRAINER_ARGUMENTS = {"model", "optimizer"}


def check_settings(names: Iterable[str]) -> None:
    """ValueError for one that there is not. When training begins it would be late: the data may have taken hours."""
    known = set(inspect.signature(Learner).parameters) - TRAINER_ARGUMENTS
    for name in names:
        if name not in known:
            raise ValueError(f"atoll.Learner has no setting {name!r}; there are {', '.join(sorted(known))}")
