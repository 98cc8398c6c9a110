"""Environment variables that set the arguments of `atoll.Learner`, so that one script runs under every launcher.

Imports no torch: the commands that start learners read the names from here.
"""

from __future__ import annotations

import os

SYNCER = "ATOLL_SYNCER"
TOKEN = "ATOLL_TOKEN"
KEYS = "ATOLL_KEYS"
LEARNER = "ATOLL_LEARNER"
RUN_DIRECTORY = "ATOLL_RUN_DIRECTORY"
NOTICE_S = "ATOLL_NOTICE_S"
JOIN_TIMEOUT_S = "ATOLL_JOIN_TIMEOUT_S"


def env(variable: str) -> str | None:
    """Return an environment variable. An empty one counts as not set."""
    return os.environ.get(variable) or None


def syncer_from_env() -> str:
    if (syncer := env(SYNCER)) is None:
        raise ValueError(f'no syncer address: pass syncer="host:port", or set {SYNCER}, as a launcher does')
    return syncer


def learner_from_env() -> int | None:
    if (number := env(LEARNER)) is None:
        return None
    if not number.isdecimal() or not int(number):
        raise ValueError(f"{LEARNER} is the number of this learner, from 1; got {number!r}")
    return int(number)
