"""What an engine tells an island by its environment, so that one script runs unchanged wherever it is put."""

from __future__ import annotations

import math
import os
import sys

SYNCER = "ATOLL_SYNCER"
TOKEN = "ATOLL_TOKEN"
KEYS = "ATOLL_KEYS"
LEARNER = "ATOLL_LEARNER"
RUN_DIRECTORY = "ATOLL_RUN_DIRECTORY"
NOTICE_S = "ATOLL_NOTICE_S"
JOIN_TIMEOUT_S = "ATOLL_JOIN_TIMEOUT_S"
AWAY_TIMEOUT_S = "ATOLL_AWAY_TIMEOUT_S"


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


def notice_told() -> float | None:
    """From SIGTERM to SIGKILL, as the engine gives it."""
    return _seconds_told(NOTICE_S, "the time from SIGTERM to the end")


def join_timeout_told() -> float | None:
    return _seconds_told(JOIN_TIMEOUT_S, "how long to wait for the run")


def away_timeout_told() -> float | None:
    return _seconds_told(AWAY_TIMEOUT_S, "how long to train without a syncer, inf for ever", math.inf)


def _seconds_told(variable: str, what: str, most: float = sys.float_info.max) -> float | None:
    if (seconds := told(variable)) is None:
        return None
    try:
        found = float(seconds)
    except ValueError:
        found = math.nan
    if not 0 < found <= most:
        raise ValueError(f"{variable} is {what}, a number of seconds; it says {seconds!r}")
    return found


__all__ = [
    "AWAY_TIMEOUT_S",
    "JOIN_TIMEOUT_S",
    "KEYS",
    "LEARNER",
    "NOTICE_S",
    "RUN_DIRECTORY",
    "SYNCER",
    "TOKEN",
    "away_timeout_told",
    "join_timeout_told",
    "learner_told",
    "notice_told",
    "syncer_told",
    "told",
]
