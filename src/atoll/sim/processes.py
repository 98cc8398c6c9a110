"""What a world is made of: processes with clocks of their own, links between them, and what survives a syncer."""

from __future__ import annotations

from typing import Any

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    ControlRequested,
    LeaseRecord,
    ManifestRecord,
    MembersRecord,
    Record,
    VersionRecord,
)
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import Restored
from atoll.core.types import FragmentId, Version
from atoll.tape.format import Actor


class Process:
    """A running core with its own clock."""

    __slots__ = (
        "actor",
        "alive",
        "clock_s",
        "conn",
        "core",
        "is_noticed",
        "paused_until",
        "sessions",
        "slow",
        "stands",
        "stepping_since",
        "timer_at",
    )

    def __init__(self, actor: Actor, core: SyncerCore | LearnerCore) -> None:
        self.actor = actor
        self.core: Any = core
        self.alive = True
        self.clock_s = 0.0  # added to virtual time; jumps are faults
        self.paused_until = 0.0
        self.timer_at: float | None = None  # virtual time of the scheduled timer
        self.sessions = 0
        self.conn: Conn | None = None
        self.stepping_since = 0.0
        self.slow = 1.0
        self.stands = False  # at a step boundary, because the run is paused, or because it leaves
        self.is_noticed = False  # its machine is taken away soon


class Conn:
    """One link between one learner process and one syncer process."""

    __slots__ = ("last", "learner", "open", "session", "syncer")

    def __init__(self, learner: Process, syncer: Process, session: int) -> None:
        self.learner = learner
        self.syncer = syncer
        self.session = session
        self.open = True
        self.last: dict[tuple[bool, bool], float] = {}  # newest arrival per direction and lane: each lane is in order


class Disk:
    """What survives the syncer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.versions: dict[FragmentId, VersionRecord] = {}
        self.members: MembersRecord | None = None
        self.manifest: ManifestRecord | None = None
        self.leases: LeaseRecord | None = None
        self.wishes: dict[str, ControlRequested] = {}  # of operators, by what they are about
        self._before: dict[FragmentId, VersionRecord | None] = {}  # of each fragment, the version before the newest

    def write(self, record: Record) -> None:
        if isinstance(record, VersionRecord):
            self._before[record.fragment] = self.versions.get(record.fragment)
            self.versions[record.fragment] = record
        elif isinstance(record, MembersRecord):
            self.members = record
        elif isinstance(record, ManifestRecord):
            self.manifest = record
        elif isinstance(record, LeaseRecord):
            self.leases = record

    def version(self, fragment: FragmentId) -> Version:
        return self.versions[fragment].version if fragment in self.versions else 0

    def go_back(self, manifest: ManifestRecord, ids: tuple[FragmentId, ...]) -> None:
        """A version that no manifest names is of no run: nobody had heard that it was durable when the run ended."""
        for p, final in zip(ids, manifest.versions, strict=True):
            if self.version(p) > final:
                before = self._before.get(p)
                assert (before.version if before is not None else 0) == final, f"fragment {p} cannot go back to {final}"
                if before is None:
                    del self.versions[p]
                else:
                    self.versions[p] = before

    def restored(self, ids: tuple[FragmentId, ...]) -> Restored:
        if self.manifest is not None:
            self.go_back(self.manifest, ids)
        return Restored(dict(self.versions), self.members, self.manifest, self.leases)
