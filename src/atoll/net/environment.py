"""What an engine tells an island by its environment, so that one script runs unchanged wherever it is put."""

from __future__ import annotations

import os

SYNCER = "ATOLL_SYNCER"
TOKEN = "ATOLL_TOKEN"
KEYS = "ATOLL_KEYS"
LEARNER = "ATOLL_LEARNER"
RUN_DIRECTORY = "ATOLL_RUN_DIRECTORY"


def told(variable: str) -> str | None:
    """An empty variable says nothing."""
    return os.environ.get(variable) or None


def syncer_told() -> str:
    if (syncer := told(SYNCER)) is None:
        raise ValueError(f'which syncer? Give syncer="host:port", or set {SYNCER}, as an engine does')
    return syncer


def learner_told() -> int | None:
    if (number := told(LEARNER)) is None:
        return None
    if not number.isdecimal():
        raise ValueError(f"{LEARNER} is the number of this island, from 1; it says {number!r}")
    return int(number)


__all__ = ["KEYS", "LEARNER", "RUN_DIRECTORY", "SYNCER", "TOKEN", "learner_told", "syncer_told", "told"]
