"""States of rounds, members, runs, learners and connections, with the tables of their transitions.

Diagrams in docs/protocol.md are generated from these tables. The swarm counts which rows were taken. A transition that
is not in a table is a bug in Atoll and stops the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from atoll.core.reasons import Reason
from atoll.core.types import RunConfig


class RoundPhase(StrEnum):
    """Phase of a fragment at the syncer."""

    IDLE = "idle"
    PULLING = "pulling"
    GRACE = "grace"
    MERGING = "merging"
    PUBLISHED = "published"


class MemberState(StrEnum):
    """State of a learner at the syncer."""

    UNKNOWN = "unknown"
    ADMITTING = "admitting"
    JOINING = "joining"
    LIVE = "live"
    SUSPECT = "suspect"
    DISCONNECTED = "disconnected"
    QUARANTINED = "quarantined"
    LEFT = "left"
    LOST = "lost"


class RunStage(StrEnum):
    """Stage of the run at the syncer."""

    RUNNING = "running"
    FINISHING = "finishing"
    SEALING = "sealing"
    FINISHED = "finished"
    SUPERSEDED = "superseded"


class LearnerMode(StrEnum):
    """Mode of a learner, in its own process."""

    NEW = "new"
    JOINING = "joining"
    TRAINING = "training"
    FINISHING = "finishing"
    STOPPED = "stopped"


class ConnectionState(StrEnum):
    """State of a learner's connection to the syncer. Training does not depend on it."""

    DOWN = "down"
    DIALING = "dialing"
    HANDSHAKE = "handshake"
    UP = "up"


ROUND_TABLE: dict[tuple[RoundPhase, str], RoundPhase] = {
    (RoundPhase.IDLE, "opened"): RoundPhase.PULLING,
    (RoundPhase.PULLING, "pull-retried"): RoundPhase.PULLING,
    (RoundPhase.PULLING, "abandoned"): RoundPhase.IDLE,
    (RoundPhase.PULLING, "quorum-reached"): RoundPhase.GRACE,
    (RoundPhase.GRACE, "sealed"): RoundPhase.MERGING,
    (RoundPhase.MERGING, "merged"): RoundPhase.MERGING,
    (RoundPhase.MERGING, "merge-failed"): RoundPhase.IDLE,
    (RoundPhase.PULLING, "shard-lost"): RoundPhase.IDLE,
    (RoundPhase.GRACE, "shard-lost"): RoundPhase.IDLE,
    (RoundPhase.MERGING, "shard-lost"): RoundPhase.IDLE,
    (RoundPhase.MERGING, "persist-failed"): RoundPhase.MERGING,
    (RoundPhase.MERGING, "persisted"): RoundPhase.PUBLISHED,
    (RoundPhase.PUBLISHED, "publish-queued"): RoundPhase.IDLE,
}

MEMBER_TABLE: dict[tuple[MemberState, str], MemberState] = {
    (MemberState.UNKNOWN, "hello"): MemberState.ADMITTING,
    (MemberState.UNKNOWN, "restored"): MemberState.DISCONNECTED,
    (MemberState.UNKNOWN, "restored-left"): MemberState.LEFT,
    (MemberState.UNKNOWN, "restored-lost"): MemberState.LOST,
    (MemberState.ADMITTING, "admitted"): MemberState.JOINING,
    (MemberState.ADMITTING, "admitted-training"): MemberState.LIVE,
    (MemberState.ADMITTING, "superseded"): MemberState.ADMITTING,
    (MemberState.ADMITTING, "disconnected"): MemberState.DISCONNECTED,
    (MemberState.JOINING, "ready"): MemberState.LIVE,
    (MemberState.JOINING, "disconnected"): MemberState.DISCONNECTED,
    (MemberState.JOINING, "left"): MemberState.LEFT,
    (MemberState.JOINING, "superseded"): MemberState.ADMITTING,
    (MemberState.LIVE, "silent"): MemberState.SUSPECT,
    (MemberState.LIVE, "disconnected"): MemberState.DISCONNECTED,
    (MemberState.LIVE, "left"): MemberState.LEFT,
    (MemberState.LIVE, "quarantined"): MemberState.QUARANTINED,
    (MemberState.LIVE, "superseded"): MemberState.ADMITTING,
    (MemberState.SUSPECT, "recovered"): MemberState.LIVE,
    (MemberState.SUSPECT, "disconnected"): MemberState.DISCONNECTED,
    (MemberState.SUSPECT, "superseded"): MemberState.ADMITTING,
    (MemberState.DISCONNECTED, "resumed"): MemberState.LIVE,
    (MemberState.DISCONNECTED, "resumed-joining"): MemberState.JOINING,
    (MemberState.DISCONNECTED, "superseded"): MemberState.ADMITTING,
    (MemberState.DISCONNECTED, "expired"): MemberState.LOST,
    (MemberState.QUARANTINED, "superseded"): MemberState.ADMITTING,
    (MemberState.QUARANTINED, "expired"): MemberState.LOST,
    (MemberState.LEFT, "superseded"): MemberState.ADMITTING,
    (MemberState.LOST, "superseded"): MemberState.ADMITTING,
}

RUN_TABLE: dict[tuple[RunStage, str], RunStage] = {
    (RunStage.RUNNING, "finish-started"): RunStage.FINISHING,
    (RunStage.FINISHING, "all-final"): RunStage.SEALING,
    (RunStage.SEALING, "manifest-persisted"): RunStage.FINISHED,
    (RunStage.RUNNING, "superseded"): RunStage.SUPERSEDED,
    (RunStage.FINISHING, "superseded"): RunStage.SUPERSEDED,
    (RunStage.SEALING, "superseded"): RunStage.SUPERSEDED,
    (RunStage.FINISHED, "superseded"): RunStage.SUPERSEDED,
}

LEARNER_TABLE: dict[tuple[LearnerMode, str], LearnerMode] = {
    (LearnerMode.NEW, "welcomed"): LearnerMode.JOINING,
    (LearnerMode.NEW, "stopped"): LearnerMode.STOPPED,
    (LearnerMode.JOINING, "ready"): LearnerMode.TRAINING,
    (LearnerMode.JOINING, "finish"): LearnerMode.FINISHING,
    (LearnerMode.JOINING, "stopped"): LearnerMode.STOPPED,
    (LearnerMode.TRAINING, "finish"): LearnerMode.FINISHING,
    (LearnerMode.TRAINING, "stopped"): LearnerMode.STOPPED,
    (LearnerMode.FINISHING, "stopped"): LearnerMode.STOPPED,
}

CONNECTION_TABLE: dict[tuple[ConnectionState, str], ConnectionState] = {
    (ConnectionState.DOWN, "dial"): ConnectionState.DIALING,
    (ConnectionState.DIALING, "opened"): ConnectionState.HANDSHAKE,
    (ConnectionState.DIALING, "failed"): ConnectionState.DOWN,
    (ConnectionState.HANDSHAKE, "welcomed"): ConnectionState.UP,
    (ConnectionState.HANDSHAKE, "closed"): ConnectionState.DOWN,
    (ConnectionState.UP, "closed"): ConnectionState.DOWN,
}

TRANSITION_TABLES: dict[str, Mapping[tuple[Any, str], StrEnum]] = {
    "round": ROUND_TABLE,
    "member": MEMBER_TABLE,
    "run": RUN_TABLE,
    "learner": LEARNER_TABLE,
    "connection": CONNECTION_TABLE,
}

S = TypeVar("S", bound=StrEnum)


class CoreState:
    """State that both cores share: the time, the timers and event counters."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.limits = config.limits
        self.now = 0.0
        self.tick = 0
        self.ignored: dict[str, int] = {}  # dropped messages and events, by cause
        self.transition_counts: dict[tuple[StrEnum, str], int] = {}  # taken rows of the transition tables
        self.reason_counts: dict[str, int] = {}  # reasons that occurred, by code
        self.timers: list[tuple[float, int, str, int]] = []  # a heap
        self._timer_serial = 0

    def count_reason(self, reason: Reason) -> Reason:
        """Count a reason that is part of another effect or message, and return it."""
        self.reason_counts[reason.code] = self.reason_counts.get(reason.code, 0) + 1
        return reason

    def ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1

    def arm_timer(self, at: float, kind: str, key: int = 0) -> None:
        """Add a timer. Timers are never cancelled: when one fires, its handler checks whether it is still relevant."""
        self._timer_serial += 1
        heapq.heappush(self.timers, (at, self._timer_serial, kind, key))


def transition(table: dict[tuple[S, str], S], state: S, trigger: str, counts: dict[tuple[StrEnum, str], int]) -> S:
    """Return the state after `trigger`, and count the row in `counts`."""
    key = (state, trigger)
    assert key in table, f"no transition {trigger!r} from {state.value!r}"
    counts[key] = counts.get(key, 0) + 1
    return table[key]
