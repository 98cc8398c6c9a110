"""Settings of `atoll.Learner` that a callback accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from atoll.learner.api import Learner

TRAINER_ARGUMENTS = {"model", "optimizer"}


def check_settings(names: Iterable[str]) -> None:
    """Raise ValueError for unknown settings. This is called early, because preparing the data may take hours."""
    known = set(inspect.signature(Learner).parameters) - TRAINER_ARGUMENTS
    for name in names:
        if name not in known:
            raise ValueError(f"atoll.Learner has no setting {name!r}; use one of {', '.join(sorted(known))}")
