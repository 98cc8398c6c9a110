"""A small run of real cores on a virtual clock, for tests that need real entries.

One syncer and a few learners over links with a fixed delay; processes can be killed and started again, and their clocks
can be wrong. Nothing is random and nothing fails by itself.
"""

from __future__ import annotations

import heapq
from pathlib import Path

from msgspec import structs

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    ControlRequested,
    Dial,
    DialFailed,
    Event,
    FinishRequested,
    Hangup,
    LearnerDisconnected,
    LeaseRecord,
    LinkClosed,
    LinkOpened,
    ManifestRecord,
    MembersRecord,
    MergeDone,
    MergeRound,
    MessageArrived,
    Persist,
    Persisted,
    Record,
    SaveSnapshot,
    Send,
    ShardBack,
    ShardLost,
    SnapshotSaved,
    Started,
    StartTraining,
    StepTaken,
    TimerFired,
    VersionRecord,
)
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, ControlWhat, RunConfig
from atoll.tape.files import TapeWriter, new_header, tape_path
from atoll.tape.format import Actor, Entry, Header

DELAY_S, WORK_S, STEP_S, TOKENS = 0.05, 0.01, 1.0, 100
SAMPLES = 4  # of one step, in a run with leases


class TinyRun:
    """Run it with `until`; between two calls processes may be killed and started.

    `clocks_s` is what a process adds to the true time, by learner id.
    """

    def __init__(self, learners: int = 3, clocks_s: dict[int, float] | None = None, **settings: object) -> None:
        self.config = RunConfig(**({"fragments": 3, "every_steps": 3, "quorum": 2} | settings))  # type: ignore[arg-type]
        self.clocks_s = clocks_s or {}
        self.now = 0.0
        self.entries: list[Entry] = []  # in true order
        self.headers: dict[Actor, Header] = {}
        self.cores: dict[int, SyncerCore | LearnerCore] = {}  # of the processes that run
        self.actors: dict[int, Actor] = {}  # newest of each
        self.disk: dict[tuple[type, int], Record] = {}
        self._sessions = 0
        self._links: dict[int, tuple[int, Actor, Actor]] = {}  # by learner: session, both ends
        self._heap: list[tuple[float, int, Actor, Event]] = []
        self._timers: dict[Actor, float] = {}  # when the next one is due, in true time
        self._stopped: dict[Actor, float] = {}  # until when a process stands still
        self._serial = 0
        for who in range(learners + 1):
            self.start(who)

    # ---------------------------------------------------------------------------------------------------- processes

    def start(self, who: int) -> None:
        actor = Actor(who, self.actors[who].start + 1 if who in self.actors else 1)
        restored = self._restored() if who == SYNCER and actor.start > 1 else None
        self.actors[who] = actor
        self.headers[actor] = new_header(actor, self.config, seed=7, restored=restored, note="tiny")
        if who == SYNCER:
            self.cores[who] = SyncerCore(self.config, actor.start, restored)
        else:
            self.cores[who] = LearnerCore(self.config, who, actor.start)
        self._push(self.now, actor, Started())

    def kill(self, who: int) -> None:
        del self.cores[who]
        for learner in [who] if who else list(self._links):
            self._cut(learner, "the other end died")

    def stop(self, who: int, for_s: float) -> None:
        """As SIGSTOP and SIGCONT do: what it was doing takes longer, and what comes meanwhile waits."""
        actor = self.actors[who]
        self._stopped[actor] = self.now + for_s
        for place, (when, serial, whose, event) in enumerate(self._heap):
            if whose == actor and isinstance(event, StepTaken):
                longer = structs.replace(event, step_time_s=event.step_time_s + for_s)
                self._heap[place] = when + for_s, serial, whose, longer
        heapq.heapify(self._heap)

    def finish(self) -> None:
        self._push(self.now, self.actors[SYNCER], FinishRequested())

    def ask(self, what: ControlWhat, value: float | None, who: str) -> None:
        """As an operator."""
        self._push(self.now, self.actors[SYNCER], ControlRequested(what, value, who))

    def lose_shard(self, *fragments: int) -> None:
        self._push(self.now, self.actors[SYNCER], ShardLost(fragments, "connection reset by peer"))

    def find_shard(self, *fragments: int) -> None:
        """With what is durable of these."""
        versions = [self.disk.get((VersionRecord, p)) for p in fragments]
        held = [each.version if isinstance(each, VersionRecord) else 0 for each in versions]
        self._push(self.now, self.actors[SYNCER], ShardBack(tuple(zip(fragments, held, strict=True))))

    def until(self, end: float) -> TinyRun:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, actor, event = heapq.heappop(self._heap)
            if self.now < self._stopped.get(actor, self.now):
                self._push(self._stopped[actor], actor, event)
                if isinstance(event, TimerFired):
                    self._timers[actor] = self._stopped[actor]
                continue
            if isinstance(event, TimerFired) and self._timers.get(actor) != self.now:
                continue  # another deadline has taken its place
            if actor == self.actors[actor.learner] and actor.learner in self.cores:
                self._handle(actor, self.cores[actor.learner], event)
        self.now = end
        return self

    # ---------------------------------------------------------------------------------------------------- the driver

    def _push(self, when: float, actor: Actor, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, actor, event))

    def _handle(self, actor: Actor, core: SyncerCore | LearnerCore, event: Event) -> None:
        if isinstance(event, StepTaken) and not core.training:  # type: ignore[union-attr]
            return
        if isinstance(event, StepTaken) and core.state.held - core.taken >= SAMPLES:  # type: ignore[union-attr]
            event = structs.replace(event, samples=SAMPLES)
        at = self.now + self.clocks_s.get(actor.learner, 0.0)
        effects = core.handle(at, event)  # type: ignore[arg-type]
        self.entries.append(Entry(at, actor, core.tick, event, tuple(effects)))
        for effect in effects:
            self._carry_out(actor, effect)
        if isinstance(event, StepTaken) or any(isinstance(effect, StartTraining) for effect in effects):
            self._push(self.now + STEP_S, actor, StepTaken(1, TOKENS, STEP_S))
        deadline = core.next_deadline()
        if deadline is not None:
            due = max(deadline - self.clocks_s.get(actor.learner, 0.0), self.now + WORK_S)
            if self._timers.get(actor) != due:
                self._timers[actor] = due
                self._push(due, actor, TimerFired())

    def _carry_out(self, actor: Actor, effect: object) -> None:
        match effect:
            case Send(envelope):
                session, learner, syncer = self._links.get(envelope.learner, (0, actor, actor))
                if session == envelope.session:
                    self._push(self.now + DELAY_S, learner if actor == syncer else syncer, MessageArrived(envelope))
            case Dial(after_s, _):
                self._dial(actor, self.now + after_s)
            case Hangup(learner, _, _, _):
                self._cut(learner, "hung up")
            case MergeRound(round_id, _, _):
                self._push(self.now + WORK_S, actor, MergeDone(round_id))
            case Persist(record):
                self.disk[type(record), getattr(record, "fragment", 0)] = record
                self._push(self.now + WORK_S, actor, Persisted(record.key()))
            case SaveSnapshot(snapshot, _):
                self._push(self.now + WORK_S, actor, SnapshotSaved(snapshot))

    def _dial(self, learner: Actor, when: float) -> None:
        if SYNCER not in self.cores:
            self._push(when + DELAY_S, learner, DialFailed("nobody is there"))
            return
        self._sessions += 1
        self._links[learner.learner] = (self._sessions, learner, self.actors[SYNCER])
        self._push(when, learner, LinkOpened(self._sessions))

    def _cut(self, learner: int, why: str) -> None:
        session, ours, theirs = self._links.pop(learner, (0, None, None))
        if ours is not None and theirs is not None:
            self._push(self.now + DELAY_S, ours, LinkClosed(session, why))
            self._push(self.now + DELAY_S, theirs, LearnerDisconnected(*ours, session, why))

    def _restored(self) -> Restored:
        versions = {r.fragment: r for r in self.disk.values() if isinstance(r, VersionRecord)}
        members = self.disk.get((MembersRecord, 0))
        manifest = self.disk.get((ManifestRecord, 0))
        assert members is None or isinstance(members, MembersRecord)
        assert manifest is None or isinstance(manifest, ManifestRecord)
        leases = self.disk.get((LeaseRecord, 0))
        assert leases is None or isinstance(leases, LeaseRecord)
        return Restored(versions, members, manifest, leases)

    # ---------------------------------------------------------------------------------------------------- the tapes

    def tapes(self) -> list[tuple[Header, list[Entry]]]:
        return [(self.headers[a], [e for e in self.entries if e.actor == a]) for a in sorted(self.headers)]

    def save(self, run: Path) -> Path:
        for header, entries in self.tapes():
            with TapeWriter(tape_path(run, header.actor), header) as writer:
                for entry in entries:
                    writer.write(entry)
        return run


def eventful_run(**settings: object) -> TinyRun:
    """Rounds, a killed learner that comes back, a killed syncer that comes back, and an orderly end."""
    run = TinyRun(**settings)  # type: ignore[arg-type]
    run.until(12.0)
    run.kill(2)
    run.until(14.0)
    run.start(2)
    run.until(20.0)
    run.kill(SYNCER)
    run.until(22.0)
    run.start(SYNCER)
    run.until(60.0)
    run.finish()
    return run.until(120.0)
