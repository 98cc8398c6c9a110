"""The states of everything that has states, and the only moves between them.

Diagrams in docs/protocol.md are generated from these tables; the swarm counts which rows were ever taken. A move that
is not in a table is a bug of ours and stops the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from atoll.core.reasons import Reason
from atoll.core.types import RunConfig


class Phase(StrEnum):
    """Of a fragment at the syncer."""

    IDLE = "idle"
    PULLING = "pulling"
    GRACE = "grace"
    MERGING = "merging"
    PUBLISHED = "published"


class Standing(StrEnum):
    """Of a learner in the syncer's eyes."""

    UNKNOWN = "unknown"
    ADMITTING = "admitting"
    JOINING = "joining"
    LIVE = "live"
    SUSPECT = "suspect"
    AWAY = "away"
    QUARANTINED = "quarantined"
    LEFT = "left"
    LOST = "lost"


class Stage(StrEnum):
    """Of the run at the syncer."""

    RUNNING = "running"
    FINISHING = "finishing"
    SEALING = "sealing"
    FINISHED = "finished"
    SUPERSEDED = "superseded"


class Mode(StrEnum):
    """Of a learner in its own eyes."""

    NEW = "new"
    JOINING = "joining"
    TRAINING = "training"
    FINISHING = "finishing"
    STOPPED = "stopped"


class Link(StrEnum):
    """Of a learner's link to the syncer. Training does not depend on it."""

    DOWN = "down"
    DIALING = "dialing"
    GREETING = "greeting"
    UP = "up"


ROUND_TABLE: dict[tuple[Phase, str], Phase] = {
    (Phase.IDLE, "opened"): Phase.PULLING,
    (Phase.PULLING, "asked again"): Phase.PULLING,
    (Phase.PULLING, "abandoned"): Phase.IDLE,
    (Phase.PULLING, "quorum"): Phase.GRACE,
    (Phase.GRACE, "sealed"): Phase.MERGING,
    (Phase.MERGING, "merged"): Phase.MERGING,
    (Phase.MERGING, "merge failed"): Phase.IDLE,
    (Phase.PULLING, "lost"): Phase.IDLE,
    (Phase.GRACE, "lost"): Phase.IDLE,
    (Phase.MERGING, "lost"): Phase.IDLE,
    (Phase.MERGING, "not durable"): Phase.MERGING,
    (Phase.MERGING, "durable"): Phase.PUBLISHED,
    (Phase.PUBLISHED, "queued"): Phase.IDLE,
}

MEMBER_TABLE: dict[tuple[Standing, str], Standing] = {
    (Standing.UNKNOWN, "hello"): Standing.ADMITTING,
    (Standing.UNKNOWN, "known"): Standing.AWAY,
    (Standing.UNKNOWN, "known to have left"): Standing.LEFT,
    (Standing.UNKNOWN, "known to be lost"): Standing.LOST,
    (Standing.ADMITTING, "admitted"): Standing.JOINING,
    (Standing.ADMITTING, "admitted training"): Standing.LIVE,
    (Standing.ADMITTING, "superseded"): Standing.ADMITTING,
    (Standing.ADMITTING, "gone"): Standing.AWAY,
    (Standing.JOINING, "ready"): Standing.LIVE,
    (Standing.JOINING, "gone"): Standing.AWAY,
    (Standing.JOINING, "left"): Standing.LEFT,
    (Standing.JOINING, "superseded"): Standing.ADMITTING,
    (Standing.LIVE, "silent"): Standing.SUSPECT,
    (Standing.LIVE, "gone"): Standing.AWAY,
    (Standing.LIVE, "left"): Standing.LEFT,
    (Standing.LIVE, "quarantined"): Standing.QUARANTINED,
    (Standing.LIVE, "superseded"): Standing.ADMITTING,
    (Standing.SUSPECT, "heard"): Standing.LIVE,
    (Standing.SUSPECT, "gone"): Standing.AWAY,
    (Standing.SUSPECT, "superseded"): Standing.ADMITTING,
    (Standing.AWAY, "resumed"): Standing.LIVE,
    (Standing.AWAY, "resumed joining"): Standing.JOINING,
    (Standing.AWAY, "superseded"): Standing.ADMITTING,
    (Standing.AWAY, "given up"): Standing.LOST,
    (Standing.QUARANTINED, "superseded"): Standing.ADMITTING,
    (Standing.QUARANTINED, "given up"): Standing.LOST,
    (Standing.LEFT, "superseded"): Standing.ADMITTING,
    (Standing.LOST, "superseded"): Standing.ADMITTING,
}

RUN_TABLE: dict[tuple[Stage, str], Stage] = {
    (Stage.RUNNING, "budget"): Stage.FINISHING,
    (Stage.FINISHING, "all final"): Stage.SEALING,
    (Stage.SEALING, "manifest durable"): Stage.FINISHED,
    (Stage.RUNNING, "superseded"): Stage.SUPERSEDED,
    (Stage.FINISHING, "superseded"): Stage.SUPERSEDED,
    (Stage.SEALING, "superseded"): Stage.SUPERSEDED,
    (Stage.FINISHED, "superseded"): Stage.SUPERSEDED,
}

LEARNER_TABLE: dict[tuple[Mode, str], Mode] = {
    (Mode.NEW, "welcomed"): Mode.JOINING,
    (Mode.NEW, "stopped"): Mode.STOPPED,
    (Mode.JOINING, "ready"): Mode.TRAINING,
    (Mode.JOINING, "finish"): Mode.FINISHING,
    (Mode.JOINING, "stopped"): Mode.STOPPED,
    (Mode.TRAINING, "finish"): Mode.FINISHING,
    (Mode.TRAINING, "stopped"): Mode.STOPPED,
    (Mode.FINISHING, "stopped"): Mode.STOPPED,
}

LINK_TABLE: dict[tuple[Link, str], Link] = {
    (Link.DOWN, "dial"): Link.DIALING,
    (Link.DIALING, "opened"): Link.GREETING,
    (Link.DIALING, "failed"): Link.DOWN,
    (Link.GREETING, "welcomed"): Link.UP,
    (Link.GREETING, "closed"): Link.DOWN,
    (Link.UP, "closed"): Link.DOWN,
}

TABLES: dict[str, Mapping[tuple[Any, str], StrEnum]] = {
    "round": ROUND_TABLE,
    "member": MEMBER_TABLE,
    "run": RUN_TABLE,
    "learner": LEARNER_TABLE,
    "link": LINK_TABLE,
}

S = TypeVar("S", bound=StrEnum)


class CoreState:
    """What both cores keep: the time, the timers, and counts of what was said, ignored and moved."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.limits = config.limits
        self.now = 0.0
        self.tick = 0
        self.ignored: dict[str, int] = {}  # messages that were dropped, by cause
        self.fired: dict[tuple[StrEnum, str], int] = {}  # rows of the transition tables that were taken
        self.said: dict[str, int] = {}  # reason codes that were said
        self.timers: list[tuple[float, int, str, int]] = []  # a heap
        self._timer_serial = 0

    def note(self, reason: Reason) -> Reason:
        """Count a sentence that travels inside another effect or message."""
        self.said[reason.code] = self.said.get(reason.code, 0) + 1
        return reason

    def ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1

    def arm(self, at: float, kind: str, key: int = 0) -> None:
        """A timer is not cancelled: when it fires, its handler looks whether it still means something."""
        self._timer_serial += 1
        heapq.heappush(self.timers, (at, self._timer_serial, kind, key))


def moved(table: dict[tuple[S, str], S], state: S, trigger: str, fired: dict[tuple[StrEnum, str], int]) -> S:
    """The state after `trigger`, counted in `fired` so that a swarm knows which rows it never took."""
    key = (state, trigger)
    assert key in table, f"no move {trigger!r} from {state.value!r}"
    fired[key] = fired.get(key, 0) + 1
    return table[key]
