"""What is said and done: message bodies, the envelope around them, events and effects.

Bodies travel between learner and syncer. A core is told events (past tense) and asks its driver for effects
(imperative). Named tuples with equal fields compare equal whatever their type; `tape.canonical` tells them apart.

Ordering contract, for every driver:

- `Persist(record)` is answered by exactly one `Persisted`, `PersistFailed` or `StoreFenced`; the core sends nothing
  that depends on the record before `Persisted`. So a version is durable BEFORE it is published, an admission BEFORE
  the welcome, a lease BEFORE it is sent.
- In the same way `MergeRound` by `MergeDone` or `MergeFailed`, `Dial` by `LinkOpened` or `DialFailed`, `SaveSnapshot`
  by `SnapshotSaved` or `SnapshotSaveFailed`.
- Effects of one call are carried out in their order: `CopyFragment`, `AdoptFragment`, `SaveSnapshot` and the copy
  behind `Send(InnerState)` at the step boundary at which they were returned, everything else in the background.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.core.reasons import Reason
from atoll.core.types import Accepted, AdoptHow, FragmentId, Holding, Incarnation, LearnerId, Mark, RoundId, Version

# --------------------------------------------------------------------------------------------------------------------
# Bodies: learner to syncer


class Hello(NamedTuple):
    """First message on every link: who I am, which model I hold, how far I am."""

    run_id: str
    fingerprint: tuple[str, ...]
    received: tuple[Version, ...]  # per owned fragment, in the order of the plan; NOTHING where not held
    step: int
    trained: int
    training: bool  # False: still joining, wants every fragment and a peer's inner state


class Report(NamedTuple):
    """After every inner step, without tensors. Cumulative, so a lost one is made good by the next."""

    step: int
    trained: int  # tokens of this incarnation
    step_time_s: float
    taken: int = 0  # samples of its leases


class Contribution(NamedTuple):
    """The answer to a pull; the delta A_p - theta_p travels beside it. `problem`: unfit, says the receiving driver."""

    round: RoundId
    copied_at: int
    steps: int
    tokens: int
    trained: int
    dropped: int
    problem: str | None = None
    taken: int = 0  # samples of its leases, at the copy


class Delivered(NamedTuple):
    """A published version has arrived (it is adopted at the next step boundary)."""

    fragment: FragmentId
    version: Version


class Resync(NamedTuple):
    """An update arrived whose base is not what I hold: send the whole value."""

    fragment: FragmentId
    have: Version


class SnapshotPart(NamedTuple):
    """My part of a snapshot is saved. `outstanding`: contributions sent before the cut and not yet settled."""

    snapshot: int
    step: int
    trained: int
    versions: tuple[Version, ...]
    outstanding: tuple[RoundId, ...]
    problem: str | None = None


class StateRequest(NamedTuple):
    """A joining learner asks for the inner state of a peer that is not in `tried`."""

    tried: tuple[LearnerId, ...]


class InnerState(NamedTuple):
    """A peer's inner optimizer state for a joining learner. The syncer passes it on."""

    giver: LearnerId
    to: LearnerId
    to_incarnation: Incarnation
    step: int
    versions: tuple[Version, ...]


class Ready(NamedTuple):
    """The learner has begun to train."""

    moments: Reason


class Leave(NamedTuple):
    why: str


class LeaseRequest(NamedTuple):
    """My leases run low: I hold so many, of which I have had so many samples."""

    leases: int
    taken: int


class FinishAck(NamedTuple):
    merges: int


class Ping(NamedTuple):
    serial: int


# --------------------------------------------------------------------------------------------------------------------
# Bodies: syncer to learner


class Welcome(NamedTuple):
    """You are in. `versions` is what is published now; everything newer than what you hold follows."""

    versions: tuple[Version, ...]
    progress: float  # of the budget, 0..1
    step_time_s: float  # the run's mean step time, 0 where unknown: a joining learner's first timeouts follow from it


class Refuse(NamedTuple):
    """You are not in. `current`: the incarnation that is; a process that was never welcomed may take a higher one."""

    reason: Reason
    current: Incarnation
    final: bool


class Pull(NamedTuple):
    round: RoundId


class RefuseContribution(NamedTuple):
    round: RoundId
    reason: Reason


class Published(NamedTuple):
    """Fragment at a version. `base` None: the whole value; otherwise an update to be added to that version."""

    fragment: FragmentId
    version: Version
    base: Version | None
    mark: Mark | None
    progress: float


class Marker(NamedTuple):
    """Carries the envelope's marker to a learner that might get no other message."""

    snapshot: int


class StateWanted(NamedTuple):
    """Give your inner state to a joining learner once you have adopted at least these versions."""

    to: LearnerId
    to_incarnation: Incarnation
    versions: tuple[Version, ...]


class PeerChosen(NamedTuple):
    """This learner was asked for its inner state; if nothing comes of it, ask again without it."""

    peer: LearnerId


class NoPeer(NamedTuple):
    reason: Reason
    new_run: bool


class Lease(NamedTuple):
    """Samples from `begin` to before `end` are yours."""

    number: int  # counts from 0 within the incarnation
    begin: int
    end: int


class Finish(NamedTuple):
    """The run is over; these versions are final."""

    versions: tuple[Version, ...]
    merges: int


class Pong(NamedTuple):
    serial: int


LearnerBody = (
    Hello
    | Report
    | Contribution
    | Delivered
    | Resync
    | SnapshotPart
    | StateRequest
    | InnerState
    | Ready
    | Leave
    | LeaseRequest
    | FinishAck
    | Ping
)
SyncerBody = (
    Welcome
    | Refuse
    | Pull
    | RefuseContribution
    | Published
    | Marker
    | StateWanted
    | InnerState
    | PeerChosen
    | NoPeer
    | Lease
    | Finish
    | Pong
)
Body = LearnerBody | SyncerBody


class Envelope(NamedTuple):
    """What every message carries.

    `learner` is the learner's end of the link in both directions and `incarnation`, `session` name its process and its
    link: a message of an older process or link is dropped. `epoch` names the syncer's process in the same way.

    `tick` and `seen` are the vector clock of a star. A learner hears of others only through the syncer, so whatever it
    knows of them the syncer knew before: its own tick and the last syncer tick that it saw are the whole clock, and the
    full vector is derived from the tapes (`causality.vector_clocks`). A tick is the number of the entry on the sender's
    tape.

    `marker` is the newest snapshot whose cut the sender has passed.
    """

    learner: LearnerId
    incarnation: Incarnation
    session: int
    epoch: int
    tick: int
    seen: int
    marker: int
    body: Body


# --------------------------------------------------------------------------------------------------------------------
# Records that are made durable


class RecordKey(NamedTuple):
    kind: str  # "version", "members", "leases", "snapshot" or "manifest"
    number: int  # fragment, serial or snapshot
    version: Version


class VersionRecord(NamedTuple):
    """One version of one fragment: value and momentum (with the driver), who is in it, and everybody's last mark."""

    fragment: FragmentId
    version: Version
    round: RoundId
    contributions: tuple[Accepted, ...]
    marks: tuple[tuple[LearnerId, Mark], ...]
    merged_tokens: int  # ever, in this fragment

    def key(self) -> RecordKey:
        return RecordKey("version", self.fragment, self.version)


class MembersRecord(NamedTuple):
    """The newest incarnation of every learner, those that are out (of them the lost), and the tokens of all who are."""

    serial: int
    incarnations: tuple[tuple[LearnerId, Incarnation], ...]
    left: tuple[LearnerId, ...]
    retired_tokens: int
    lost: tuple[LearnerId, ...] = ()

    def key(self) -> RecordKey:
        return RecordKey("members", self.serial, 0)


class LeaseRecord(NamedTuple):
    """Where every sample is that was ever leased. Written before a lease is sent."""

    serial: int
    next: int  # the first sample that was never leased
    pool: tuple[tuple[int, int], ...]  # returned by incarnations that are gone; leased again first
    holdings: tuple[Holding, ...]
    merged: int  # samples of incarnations that are gone, merged

    def key(self) -> RecordKey:
        return RecordKey("leases", self.serial, 0)


class SnapshotRecord(NamedTuple):
    snapshot: int
    versions: tuple[Version, ...]
    parts: tuple[tuple[LearnerId, SnapshotPart], ...]
    in_flight: tuple[tuple[LearnerId, RoundId], ...]
    left_out: tuple[LearnerId, ...]
    next_sample: int = 0  # the first that was never leased
    unmerged: tuple[tuple[int, int], ...] = ()  # samples before it that these versions do not hold

    def key(self) -> RecordKey:
        return RecordKey("snapshot", self.snapshot, 0)


class ManifestRecord(NamedTuple):
    versions: tuple[Version, ...]
    merges: int
    trained: int

    def key(self) -> RecordKey:
        return RecordKey("manifest", 0, 0)


Record = VersionRecord | MembersRecord | LeaseRecord | SnapshotRecord | ManifestRecord

# --------------------------------------------------------------------------------------------------------------------
# Events


class MessageArrived(NamedTuple):
    envelope: Envelope


class TimerFired(NamedTuple):
    """The core's `next_deadline()` has passed."""


class LearnerDisconnected(NamedTuple):
    """A link closed. It may be noticed late, when a newer process of the learner has a link with the same number."""

    learner: LearnerId
    incarnation: Incarnation
    session: int
    why: str


class MergeDone(NamedTuple):
    round: RoundId


class MergeFailed(NamedTuple):
    round: RoundId
    why: str


class Persisted(NamedTuple):
    key: RecordKey


class PersistFailed(NamedTuple):
    key: RecordKey
    why: str


class StoreFenced(NamedTuple):
    """The store refused a write because a syncer of a later epoch owns it."""

    epoch: int


class SnapshotRequested(NamedTuple):
    pass


class FinishRequested(NamedTuple):
    pass


class Started(NamedTuple):
    """First event of every process: the core may now act."""


class LinkOpened(NamedTuple):
    session: int


class LinkClosed(NamedTuple):
    session: int
    why: str


class DialFailed(NamedTuple):
    why: str


class StepTaken(NamedTuple):
    """Inner steps ended. Usually one; a driver may tell of several at once when nothing was due between them, and of
    none when it stands at the same boundary once more: what arrived meanwhile is answered and adopted there."""

    steps: int
    tokens: int
    step_time_s: float
    samples: int = 0  # of its leases, had for the first time in these steps


class FragmentDamaged(NamedTuple):
    """A published fragment arrived with a wrong digest, or as an update to a value that the driver does not hold."""

    fragment: FragmentId
    version: Version
    why: str


class SnapshotSaved(NamedTuple):
    snapshot: int


class SnapshotSaveFailed(NamedTuple):
    snapshot: int
    why: str


class MomentsFound(NamedTuple):
    """While it joins: the driver holds inner state that `learner` saved for `snapshot`, if no peer gives any."""

    learner: LearnerId
    snapshot: int


class LeaveWanted(NamedTuple):
    why: str


SyncerEvent = (
    Started
    | MessageArrived
    | TimerFired
    | LearnerDisconnected
    | MergeDone
    | MergeFailed
    | Persisted
    | PersistFailed
    | StoreFenced
    | SnapshotRequested
    | FinishRequested
)
LearnerEvent = (
    Started
    | MessageArrived
    | TimerFired
    | LinkOpened
    | LinkClosed
    | DialFailed
    | StepTaken
    | FragmentDamaged
    | SnapshotSaved
    | SnapshotSaveFailed
    | MomentsFound
    | LeaveWanted
)
Event = SyncerEvent | LearnerEvent

# --------------------------------------------------------------------------------------------------------------------
# Effects


class Send(NamedTuple):
    envelope: Envelope


def send(envelope: tuple[LearnerId, Incarnation, int, int, int, int, int, Body]) -> Send:
    """`Send(Envelope(*envelope))`, without the two calls: every message of a run is made here."""
    return tuple.__new__(Send, (tuple.__new__(Envelope, envelope),))


class Say(NamedTuple):
    """One sentence for log, dashboard and story. `subject` is ("learner", 3), ("fragment", 7) or ("run", 0)."""

    subject: tuple[str, int]
    reason: Reason


class Hangup(NamedTuple):
    learner: LearnerId
    incarnation: Incarnation
    session: int
    reason: Reason


class Accumulate(NamedTuple):
    """Add this contribution to the round's running sums. Memory does not grow with the number of learners."""

    round: RoundId
    accepted: Accepted


class OpenGrace(NamedTuple):
    """The quorum is in; wait `window_s` for more. The terms are written down so that anyone can check the bound."""

    round: RoundId
    window_s: float
    step_s: float
    awaited_s: float  # the longest step of those who are awaited, not less than step_s
    quorum_s: float
    sync_s: float
    reason: Reason


class MergeRound(NamedTuple):
    round: RoundId
    contributions: tuple[Accepted, ...]
    reason: Reason


class DiscardRound(NamedTuple):
    """Forget the running sums of this round; nothing of it is merged."""

    round: RoundId
    reason: Reason


class Persist(NamedTuple):
    record: Record


class RecordInFlight(NamedTuple):
    """This contribution was sent before its learner's cut and arrived after the syncer's: keep it with the snapshot."""

    snapshot: int
    learner: LearnerId
    round: RoundId


class Halt(NamedTuple):
    """The process has nothing more to do (a finished run goes on answering until its driver ends it)."""

    reason: Reason


class Dial(NamedTuple):
    after_s: float
    attempt: int


class CopyFragment(NamedTuple):
    """Copy the fragment as it stands at this step boundary and keep the copy until the next one or its adoption."""

    round: RoundId
    copied_at: int


class AdoptFragment(NamedTuple):
    """Take over a published version. `merged_copy`: the kept copy is part of it (`carry` then adds theta - copy, else
    theta - anchor). The token counts are the ledger's entries of this adoption."""

    fragment: FragmentId
    version: Version
    how: AdoptHow
    merged_copy: bool
    merged_tokens: int
    dropped_tokens: int
    pending_tokens: int


class SaveSnapshot(NamedTuple):
    snapshot: int
    step: int


class StartTraining(NamedTuple):
    moments: Reason
    warmup_steps: int


class Stop(NamedTuple):
    """Training ends for good in this process."""

    reason: Reason


SyncerEffect = (
    Send | Say | Hangup | Accumulate | OpenGrace | MergeRound | DiscardRound | Persist | RecordInFlight | Halt
)
LearnerEffect = Send | Say | Hangup | Dial | CopyFragment | AdoptFragment | SaveSnapshot | StartTraining | Stop
Effect = SyncerEffect | LearnerEffect
