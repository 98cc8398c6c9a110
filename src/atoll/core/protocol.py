"""What is said and done: message bodies and their envelope, events and effects, and the records behind them.

Bodies travel between learner and syncer. A core is told events (past tense) and asks its driver for effects
(imperative). All are values (`codec.Value`): immutable, and equal only if type and fields are equal.

Ordering contract, for every driver:

- `Persist(record)` is answered by exactly one `Persisted`, `PersistFailed` or `StoreFenced`; the core sends nothing
  that depends on the record before `Persisted`. So a version is durable BEFORE it is published, an admission BEFORE
  the welcome, a lease BEFORE it is sent.
- In the same way `MergeRound` by `MergeDone` or `MergeFailed`, `Dial` by `LinkOpened` or `DialFailed`, `SaveSnapshot`
  by `SnapshotSaved` or `SnapshotSaveFailed`.
- Fragments may be held by shards, which are other processes. Between `ShardLost` and `ShardBack` the driver tells
  nothing of a shard, drops what it is asked to do there, and what the shard had said before and was not told yet is
  told before `ShardLost` or never: so questions that were open at `ShardLost` have no answer but `ShardBack`. By then
  the shard has given up every round that it was in, whatever it was writing has ended, and it says what is durable.
- Effects of one call are carried out in their order: `CopyFragment`, `AdoptFragment`, `SaveSnapshot` and the copy
  behind `Send(InnerState)` at the step boundary at which they were returned, everything else in the background.
"""

from __future__ import annotations

from atoll.core.codec import Number, Value
from atoll.core.reasons import Reason
from atoll.core.types import (
    AcceptedContribution,
    AdoptMode,
    ControlKind,
    FragmentId,
    Incarnation,
    LearnerId,
    LeaseHoldings,
    MergedUpTo,
    RoundId,
    Version,
)

# --------------------------------------------------------------------------------------------------------------------
# Bodies: learner to syncer


class Hello(Value, frozen=True):
    """First message on every link: who I am, which model I hold, how far I am."""

    run_id: str
    fingerprint: tuple[str, ...]
    received: tuple[Version, ...]  # per owned fragment, in the order of the plan; NOTHING where not held
    step: int
    trained: int
    training: bool  # False: still joining, wants every fragment and a peer's inner state


class Report(Value, frozen=True):
    """After every inner step, without tensors. Cumulative, so a lost one is made good by the next."""

    step: int
    trained: int  # tokens of this incarnation
    step_time_s: Number
    consumed_samples: int = 0  # samples of its leases


class Contribution(Value, frozen=True):
    """The answer to a pull; the delta A_p - theta_p travels beside it. `problem`: unfit, says the receiving driver."""

    round: RoundId
    copied_at: int
    steps: int
    tokens: int
    trained: int
    dropped: int
    problem: str | None = None
    consumed_samples: int = 0  # samples of its leases, at the copy


class PublishAck(Value, frozen=True):
    """A published version has arrived (it is adopted at the next step boundary)."""

    fragment: FragmentId
    version: Version


class Resync(Value, frozen=True):
    """An update arrived whose base is not what I hold: send the whole value."""

    fragment: FragmentId
    received_version: Version


NO_RUN_DIRECTORY = "no run directory"
"""`problem` of a part that the learner's settings do not keep. This learner takes part in the cut all the same."""


class SnapshotPart(Value, frozen=True):
    """My part of a snapshot is saved. `outstanding`: contributions sent before the cut and not yet settled."""

    snapshot: int
    step: int
    trained: int
    versions: tuple[Version, ...]
    outstanding: tuple[RoundId, ...]
    problem: str | None = None


class StateRequest(Value, frozen=True):
    """A joining learner asks for the inner state of a peer that is not in `tried`."""

    tried_peers: tuple[LearnerId, ...]


class OptimizerState(Value, frozen=True):
    """A peer's inner optimizer state for a joining learner. The syncer passes it on."""

    source: LearnerId
    target: LearnerId
    target_incarnation: Incarnation
    step: int
    versions: tuple[Version, ...]


class Ready(Value, frozen=True):
    """The learner has begun to train."""

    state_source: Reason


class Left(Value, frozen=True):
    cause: str


class DrainRequest(Value, frozen=True):
    """I have to go soon and take no more steps. Of these fragments I have trained something that is in no version yet,
    as far as I know: merge it out of turn. Said again while I wait; the newest word counts."""

    step: int
    trained: int  # tokens of this incarnation: there will be no more
    unmerged: tuple[FragmentId, ...]


class LeaseRequest(Value, frozen=True):
    """My leases run low: I hold so many, of which I have had so many samples."""

    received_leases: int
    consumed_samples: int


class PausedAck(Value, frozen=True):
    """The newest word about a pause that I have heard, and whether I go by it: at the end of a run nobody does."""

    serial: int
    paused: bool


class DownloadTime(Value, frozen=True):
    """By what my link carries down, the largest fragment takes so long in bf16. Only where the run lets the syncer
    choose what updates travel in."""

    seconds: Number


class FinishAck(Value, frozen=True):
    merges: int


class Ping(Value, frozen=True):
    serial: int


# --------------------------------------------------------------------------------------------------------------------
# Bodies: syncer to learner


class Welcome(Value, frozen=True):
    """You are in. `versions` is what is published now; everything newer than what you hold follows."""

    versions: tuple[Version, ...]
    progress: Number  # of the budget, 0..1
    step_time_s: Number  # the run's mean step time, 0 where unknown: a joining learner's first timeouts follow from it


class Refuse(Value, frozen=True):
    """You are not in. `current`: the incarnation that is; a process that was never welcomed may take a higher one."""

    reason: Reason
    current_incarnation: Incarnation
    final: bool


class Pull(Value, frozen=True):
    round: RoundId


class RefuseContribution(Value, frozen=True):
    round: RoundId
    reason: Reason


class Published(Value, frozen=True):
    """Fragment at a version. `base` None: the whole value; otherwise an update to be added to that version."""

    fragment: FragmentId
    version: Version
    base: Version | None
    merged_up_to: MergedUpTo | None
    progress: Number


class Marker(Value, frozen=True):
    """Carries the envelope's marker to a learner that might get no other message."""

    snapshot: int


class ProvideState(Value, frozen=True):
    """Give your inner state to a joining learner once you have adopted at least these versions."""

    target: LearnerId
    target_incarnation: Incarnation
    versions: tuple[Version, ...]


class PeerChosen(Value, frozen=True):
    """This learner was asked for its inner state; if nothing comes of it, ask again without it."""

    peer: LearnerId


class NoPeer(Value, frozen=True):
    reason: Reason
    new_run: bool


class Lease(Value, frozen=True):
    """Samples from `begin` to before `end` are yours."""

    number: int  # counts from 0 within the incarnation
    begin: int
    end: int


class SetPaused(Value, frozen=True):
    """The run is paused: stand still at your next step boundary. Or it is not any more: go on."""

    serial: int  # rises with every such word of a syncer; one that is said again keeps its own
    paused: bool


class Drain(Value, frozen=True):
    """Leave the run, as if your program had ended; the others go on."""

    cause: str


class Finish(Value, frozen=True):
    """The run is over; these versions are final."""

    versions: tuple[Version, ...]
    merges: int


class Pong(Value, frozen=True):
    serial: int


LearnerBody = (
    Hello
    | Report
    | Contribution
    | PublishAck
    | Resync
    | SnapshotPart
    | StateRequest
    | OptimizerState
    | Ready
    | Left
    | DrainRequest
    | LeaseRequest
    | PausedAck
    | DownloadTime
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
    | ProvideState
    | OptimizerState
    | PeerChosen
    | NoPeer
    | Lease
    | SetPaused
    | Drain
    | Finish
    | Pong
)
Body = LearnerBody | SyncerBody


class Envelope(Value, frozen=True):
    """What every message carries.

    `learner` is the learner's end of the link in both directions and `incarnation`, `session` name its process and its
    link: a message of an older process or link is dropped. `epoch` names the syncer's process in the same way.

    `tick` and `seen` are the vector clock of a star. A learner hears of others only through the syncer, so whatever it
    knows of them the syncer knew before: its own tick and the last syncer tick that it saw are the whole clock. The
    full vector can be derived from the tapes. A tick is the number of the entry on the sender's tape.

    `marker` is the newest snapshot whose cut the sender has passed.
    """

    learner: LearnerId
    incarnation: Incarnation
    session: int
    epoch: int
    tick: int
    seen_tick: int
    marker: int
    body: Body


# --------------------------------------------------------------------------------------------------------------------
# Records that are made durable


class RecordKey(Value, frozen=True):
    kind: str  # "version", "members", "leases", "snapshot" or "manifest"
    number: int  # fragment, serial or snapshot
    version: Version


class VersionRecord(Value, frozen=True):
    """One version of one fragment: value and momentum (with the driver), who is in it, and everybody's last mark."""

    fragment: FragmentId
    version: Version
    round: RoundId
    contributions: tuple[AcceptedContribution, ...]
    merged_up_to: tuple[tuple[LearnerId, MergedUpTo], ...]
    merged_tokens: int  # ever, in this fragment

    def key(self) -> RecordKey:
        return RecordKey("version", self.fragment, self.version)


class MembersRecord(Value, frozen=True):
    """The newest incarnation of every learner, those that are out (of them the lost), and the tokens of all who are."""

    serial: int
    incarnations: tuple[tuple[LearnerId, Incarnation], ...]
    left: tuple[LearnerId, ...]
    retired_tokens: int
    lost: tuple[LearnerId, ...] = ()

    def key(self) -> RecordKey:
        return RecordKey("members", self.serial, 0)


class LeaseRecord(Value, frozen=True):
    """Where every sample is that was ever leased. Written before a lease is sent."""

    serial: int
    next_sample: int  # the first sample that was never leased
    pool: tuple[tuple[int, int], ...]  # returned by incarnations that are gone; leased again first
    holdings: tuple[LeaseHoldings, ...]
    closed_merged: int  # samples of incarnations that are gone, merged

    def key(self) -> RecordKey:
        return RecordKey("leases", self.serial, 0)


class SnapshotRecord(Value, frozen=True):
    snapshot: int
    versions: tuple[Version, ...]
    parts: tuple[tuple[LearnerId, SnapshotPart], ...]
    in_flight: tuple[tuple[LearnerId, RoundId], ...]
    left_out: tuple[LearnerId, ...]
    next_sample: int = 0  # the first that was never leased
    unmerged: tuple[tuple[int, int], ...] = ()  # samples before it that these versions do not hold

    def key(self) -> RecordKey:
        return RecordKey("snapshot", self.snapshot, 0)


class ManifestRecord(Value, frozen=True):
    versions: tuple[Version, ...]
    merges: int
    trained: int

    def key(self) -> RecordKey:
        return RecordKey("manifest", 0, 0)


Record = VersionRecord | MembersRecord | LeaseRecord | SnapshotRecord | ManifestRecord

# --------------------------------------------------------------------------------------------------------------------
# Events


class MessageArrived(Value, frozen=True):
    envelope: Envelope


class TimerFired(Value, frozen=True):
    """The core's `next_deadline()` has passed."""


class LearnerDisconnected(Value, frozen=True):
    """A link closed. It may be noticed late, when a newer process of the learner has a link with the same number."""

    learner: LearnerId
    incarnation: Incarnation
    session: int
    cause: str


class MergeDone(Value, frozen=True):
    round: RoundId


class MergeFailed(Value, frozen=True):
    round: RoundId
    cause: str


class Persisted(Value, frozen=True):
    key: RecordKey


class PersistFailed(Value, frozen=True):
    key: RecordKey
    cause: str


class StoreFenced(Value, frozen=True):
    """The store refused a write because a syncer of a later epoch owns it."""

    epoch: int


class SnapshotRequested(Value, frozen=True):
    requested_by: str = ""  # the operator who asked for it


class FinishRequested(Value, frozen=True):
    pass


class ControlRequested(Value, frozen=True):
    """An operator wants the run to go on otherwise. `controls.problem_of` has found nothing wrong with it, and what is
    to survive this process (a pause, a quorum, a grace margin) is durable; a syncer that starts again is told again."""

    kind: ControlKind
    value: Number | None  # quorum: K; grace: gamma; drain: the learner
    requested_by: str


class ShardLost(Value, frozen=True):
    """The process that holds these fragments is away. What it had received and not made durable is gone."""

    fragments: tuple[FragmentId, ...]
    cause: str


class ShardReconnected(Value, frozen=True):
    """It is back, with the newest durable version of each of its fragments; once there is a manifest, with those that
    it names. The version that it was making durable when it was lost is durable if it is here."""

    versions: tuple[tuple[FragmentId, Version], ...]

    def records(self) -> tuple[RecordKey, ...]:
        """The keys of what it says is durable."""
        return tuple(RecordKey("version", fragment, version) for fragment, version in self.versions)


class Started(Value, frozen=True):
    """First event of every process: the core may now act."""


class ConnectionOpened(Value, frozen=True):
    session: int


class ConnectionClosed(Value, frozen=True):
    session: int
    cause: str


class DialFailed(Value, frozen=True):
    cause: str


class StepTaken(Value, frozen=True):
    """Inner steps ended. Usually one; a driver may tell of several at once when nothing was due between them, and of
    none when it stands at the same boundary once more: what arrived meanwhile is answered and adopted there."""

    steps: int
    tokens: int
    step_time_s: Number
    new_samples: int = 0  # of its leases, had for the first time in these steps


class FragmentDamaged(Value, frozen=True):
    """A published fragment arrived with a wrong digest, or as an update to a value that the driver does not hold."""

    fragment: FragmentId
    version: Version
    cause: str


class LinkMeasured(Value, frozen=True):
    """The link has carried so many bytes of values one way, of all transfers that were on their way, in so long.

    A driver tells of it where the run does not name the codec of that way, and of nothing that is too small to say
    something about a link. `values`: numbers in the largest fragment.
    """

    direction: str  # "up" or "down"
    transferred_bytes: int
    seconds: Number
    fragment_values: int


class SnapshotSaved(Value, frozen=True):
    snapshot: int


class SnapshotSaveFailed(Value, frozen=True):
    snapshot: int
    cause: str


class SavedStateFound(Value, frozen=True):
    """While it joins: the driver holds inner state that `learner` saved for `snapshot`, if no peer gives any."""

    learner: LearnerId
    snapshot: int


class StateRejected(Value, frozen=True):
    """While it joins: `giver` answered that it cannot give its inner state, or the driver cannot use what it sent."""

    source: LearnerId
    cause: str


class LeaveRequested(Value, frozen=True):
    """At once; or, with `push`, when all that it has trained is merged. A driver whose time is over says it again,
    without."""

    cause: str
    drain: bool = False


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
    | ControlRequested
    | ShardLost
    | ShardReconnected
)
LearnerEvent = (
    Started
    | MessageArrived
    | TimerFired
    | ConnectionOpened
    | ConnectionClosed
    | DialFailed
    | StepTaken
    | FragmentDamaged
    | LinkMeasured
    | SnapshotSaved
    | SnapshotSaveFailed
    | SavedStateFound
    | StateRejected
    | LeaveRequested
)
Event = SyncerEvent | LearnerEvent

# --------------------------------------------------------------------------------------------------------------------
# Effects


class Send(Value, frozen=True):
    envelope: Envelope


class LogReason(Value, frozen=True):
    """One sentence for log, dashboard and story. `subject` is ("learner", 3), ("fragment", 7) or ("run", 0)."""

    subject: tuple[str, int]
    reason: Reason


class CloseConnection(Value, frozen=True):
    learner: LearnerId
    incarnation: Incarnation
    session: int
    reason: Reason


class Accumulate(Value, frozen=True):
    """Add this contribution to the round's running sums. Memory does not grow with the number of learners."""

    round: RoundId
    contribution: AcceptedContribution


class OpenGrace(Value, frozen=True):
    """The quorum is in; wait `window_s` for more. The terms are written down so that anyone can check the bound."""

    round: RoundId
    window_s: Number
    step_s: Number
    awaited_s: Number  # the longest step of those who are awaited, not less than step_s
    quorum_s: Number
    sync_s: Number
    late_s: Number  # what one still needs who was awaited in vain the last time; 0: the window is not for such a one
    reason: Reason


class MergeRound(Value, frozen=True):
    """`codec`: what the update to the next version travels in, to everybody; None: what the settings of the run say."""

    round: RoundId
    contributions: tuple[AcceptedContribution, ...]
    reason: Reason
    codec: str | None = None


class DiscardRound(Value, frozen=True):
    """Forget the running sums of this round; nothing of it is merged. If its outer step was done, on a shard that came
    back without its record, that step is undone: the fragment stands at its newest durable version."""

    round: RoundId
    reason: Reason

    def key(self) -> RecordKey:
        """Of the record that it might have become."""
        return RecordKey("version", self.round.fragment, self.round.base + 1)


class Persist(Value, frozen=True):
    record: Record


class RecordInFlight(Value, frozen=True):
    """This contribution was sent before its learner's cut and arrived after the syncer's: keep it with the snapshot."""

    snapshot: int
    learner: LearnerId
    round: RoundId


class Halt(Value, frozen=True):
    """The process has nothing more to do (a finished run goes on answering until its driver ends it)."""

    reason: Reason


class Dial(Value, frozen=True):
    delay_s: Number
    attempt: int


class CopyFragment(Value, frozen=True):
    """Copy the fragment as it stands at this step boundary and keep the copy until the next one or its adoption.

    `codec`: what its contribution travels in, however often it is sent; None: what the settings of the run say.
    """

    round: RoundId
    copied_at: int
    codec: str | None = None


class AdoptFragment(Value, frozen=True):
    """Take over a published version. `merged_copy`: the kept copy is part of it (`carry` then adds theta - copy, else
    theta - anchor). The token counts are the ledger's entries of this adoption."""

    fragment: FragmentId
    version: Version
    mode: AdoptMode
    merged_copy: bool
    merged_tokens: int
    dropped_tokens: int
    pending_tokens: int


class SaveSnapshot(Value, frozen=True):
    snapshot: int
    step: int


class StartTraining(Value, frozen=True):
    state_source: Reason
    warmup_steps: int


class Stop(Value, frozen=True):
    """Training ends for good in this process."""

    reason: Reason


SyncerEffect = (
    Send
    | LogReason
    | CloseConnection
    | Accumulate
    | OpenGrace
    | MergeRound
    | DiscardRound
    | Persist
    | RecordInFlight
    | Halt
)
LearnerEffect = (
    Send | LogReason | CloseConnection | Dial | CopyFragment | AdoptFragment | SaveSnapshot | StartTraining | Stop
)
Effect = SyncerEffect | LearnerEffect


__all__ = [  # what is imported from here and defined in `messages`
    "Body",
    "Contribution",
    "PublishAck",
    "Drain",
    "Envelope",
    "DownloadTime",
    "Finish",
    "FinishAck",
    "PausedAck",
    "Hello",
    "SetPaused",
    "OptimizerState",
    "LearnerBody",
    "Lease",
    "LeaseRequest",
    "Left",
    "DrainRequest",
    "Marker",
    "NoPeer",
    "PeerChosen",
    "Ping",
    "Pong",
    "Published",
    "Pull",
    "Ready",
    "Refuse",
    "RefuseContribution",
    "Report",
    "Resync",
    "SnapshotPart",
    "StateRequest",
    "ProvideState",
    "SyncerBody",
    "Welcome",
]
