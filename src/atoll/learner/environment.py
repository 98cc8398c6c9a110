"""Environment variables that give `atoll.Learner` its arguments, so that one script runs unchanged on every engine.

Imports no torch: the commands that start islands read the names from here.
"""

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


def env(variable: str) -> str | None:
    """Return an environment variable. An empty one counts as not set."""
    return os.environ.get(variable) or None


def syncer_from_env() -> str:
    if (syncer := env(SYNCER)) is None:
        raise ValueError(f'which syncer? Give syncer="host:port", or set {SYNCER}, as an engine does')
    return syncer


def learner_from_env() -> int | None:
    if (number := env(LEARNER)) is None:
        return None
    if not number.isdecimal():
        raise ValueError(f"{LEARNER} is the number of this island, from 1; it says {number!r}")
    return int(number)


def notice_from_env() -> float | None:
    """From SIGTERM to SIGKILL, as the engine gives it."""
    return _seconds_from_env(NOTICE_S, "the time from SIGTERM to the end")


def join_timeout_from_env() -> float | None:
    return _seconds_from_env(JOIN_TIMEOUT_S, "how long to wait for the run")


def away_timeout_from_env() -> float | None:
    return _seconds_from_env(AWAY_TIMEOUT_S, "how long to train without a syncer, inf for ever", math.inf)


def _seconds_from_env(variable: str, what: str, most: float = sys.float_info.max) -> float | None:
    if (seconds := env(variable)) is None:
        return None
    try:
        found = float(seconds)
    except ValueError:
        found = math.nan
    if not 0 < found <= most:
        raise ValueError(f"{variable} is {what}, a number of seconds; it says {seconds!r}")
    return found
