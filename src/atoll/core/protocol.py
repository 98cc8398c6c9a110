"""Messages, events, effects and durable records of the protocol.

Learner and syncer exchange message bodies in envelopes. A driver passes events (past tense) to a core, and the core
returns effects (imperative) for its driver to carry out. All of them are immutable values (`codec.Value`), which are
equal only if type and fields are equal.

Ordering contract, for every driver:

- The driver answers each `Persist(record)` with exactly one `Persisted`, `PersistFailed` or `StoreFenced`. The core
  sends nothing that depends on the record before `Persisted`. So a version is durable BEFORE it is published, an
  admission BEFORE the welcome, a lease BEFORE it is sent.
- In the same way it answers `MergeRound` with `MergeDone` or `MergeFailed`, `Dial` with `ConnectionOpened` or
  `DialFailed`, `SaveSnapshot` with `SnapshotSaved` or `SnapshotSaveFailed`.
- Other processes, the shards, may hold fragments. Between `ShardLost` and `ShardReconnected` the driver delivers no
  event of that shard and drops effects for it. Events that the shard caused earlier are delivered before `ShardLost`
  or never. So effects that are unanswered at `ShardLost` have no answer but `ShardReconnected`. By then the shard has
  discarded its open rounds and finished its writes, and it reports what is durable.
- The driver carries out the effects of one call in order. `CopyFragment`, `AdoptFragment`, `SaveSnapshot` and the copy
  for `Send(OptimizerState)` happen at the step boundary at which they were returned, everything else in the background.
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
    """First message on every connection: the learner's model and its progress."""

    run_id: str
    fingerprint: tuple[str, ...]
    received: tuple[Version, ...]  # by fragment, in the order of the plan; NO_VERSION: not received
    step: int
    trained: int
    training: bool  # False: joining; needs every fragment and a peer's optimizer state


class Report(Value, frozen=True):
    """Progress after every inner step, without tensors. Counters are cumulative: a later report replaces a lost one."""

    step: int
    trained: int  # tokens of this incarnation
    step_time_s: Number
    consumed_samples: int = 0  # samples consumed from its leases


class Contribution(Value, frozen=True):
    """Reply to a pull. The delta A_p - theta_p is transferred alongside it.

    The receiving driver sets `problem` if the delta is invalid.
    """

    round: RoundId
    copied_at: int
    steps: int
    tokens: int
    trained: int
    dropped: int
    problem: str | None = None
    consumed_samples: int = 0  # samples consumed from its leases at the copy


class PublishAck(Value, frozen=True):
    """Acknowledgement of a published version. The learner adopts it at its next step boundary."""

    fragment: FragmentId
    version: Version


class Resync(Value, frozen=True):
    """Request for the whole value of a fragment: the learner lacks the base version of an update that arrived."""

    fragment: FragmentId
    received_version: Version


NO_RUN_DIRECTORY = "no run directory"
"""`problem` of a part that is not saved because the learner has no run directory. The learner still counts as part of
the snapshot."""


class SnapshotPart(Value, frozen=True):
    """Notice that the learner has saved its part of a snapshot.

    `outstanding` lists contributions that were sent before the cut and are not settled.
    """

    snapshot: int
    step: int
    trained: int
    versions: tuple[Version, ...]
    outstanding: tuple[RoundId, ...]
    problem: str | None = None


class StateRequest(Value, frozen=True):
    """Request of a joining learner for the optimizer state of a peer that is not in `tried_peers`."""

    tried_peers: tuple[LearnerId, ...]


class OptimizerState(Value, frozen=True):
    """Optimizer state of a peer for a joining learner. The syncer forwards it."""

    source: LearnerId
    target: LearnerId
    target_incarnation: Incarnation
    step: int
    versions: tuple[Version, ...]


class Ready(Value, frozen=True):
    """Notice that the learner has started to train."""

    state_source: Reason


class Left(Value, frozen=True):
    cause: str


class DrainRequest(Value, frozen=True):
    """Request to merge the last work of a learner that leaves soon and takes no more steps.

    The learner repeats it while it waits. The newest request replaces older ones.
    """

    step: int
    trained: int  # final token count of this incarnation
    unmerged: tuple[FragmentId, ...]  # fragments with work that is not yet merged, as far as the learner knows


class LeaseRequest(Value, frozen=True):
    """Request for more leases, with the number of leases received and of samples consumed so far."""

    received_leases: int
    consumed_samples: int


class PausedAck(Value, frozen=True):
    """Acknowledgement of the newest `SetPaused`, with the state of the learner. Learners do not pause at the end of a
    run."""

    serial: int
    paused: bool


class DownloadTime(Value, frozen=True):
    """Estimated time to download the largest fragment in bf16. Sent only if the run lets the syncer choose the codec of
    updates."""

    seconds: Number


class FinishAck(Value, frozen=True):
    merges: int


class Ping(Value, frozen=True):
    serial: int


# --------------------------------------------------------------------------------------------------------------------
# Bodies: syncer to learner


class Welcome(Value, frozen=True):
    """Admission to the run, with the published versions. All versions that the learner does not have follow."""

    versions: tuple[Version, ...]
    progress: Number  # used share of the budget, 0..1
    step_time_s: Number  # step time of the run, for the first timeouts of a joining learner; 0: unknown


class Refuse(Value, frozen=True):
    """Refusal of a hello. A process that was never welcomed may retry with a higher incarnation than this one."""

    reason: Reason
    current_incarnation: Incarnation
    final: bool


class Pull(Value, frozen=True):
    round: RoundId


class RefuseContribution(Value, frozen=True):
    round: RoundId
    reason: Reason


class Published(Value, frozen=True):
    """Newest version of a fragment: the whole value if `base` is None, otherwise an update to add to version `base`."""

    fragment: FragmentId
    version: Version
    base: Version | None
    merged_up_to: MergedUpTo | None
    progress: Number


class Marker(Value, frozen=True):
    """Message that carries a new marker to learners which might receive no other message."""

    snapshot: int


class ProvideState(Value, frozen=True):
    """Request to send the optimizer state to a joining learner once at least these versions are adopted."""

    target: LearnerId
    target_incarnation: Incarnation
    versions: tuple[Version, ...]


class PeerChosen(Value, frozen=True):
    """Notice which learner was requested to send its optimizer state."""

    peer: LearnerId


class NoPeer(Value, frozen=True):
    reason: Reason
    new_run: bool


class Lease(Value, frozen=True):
    """Grant of the samples from `begin` up to, but not including, `end`."""

    number: int  # counts from 0 within the incarnation
    begin: int
    end: int


class SetPaused(Value, frozen=True):
    """Request to pause at the next step boundary, or to resume."""

    serial: int  # increases with every change; a retry has the same serial
    paused: bool


class Drain(Value, frozen=True):
    """Request to leave the run. The other learners continue."""

    cause: str


class Finish(Value, frozen=True):
    """Notice that the run is over, with its final versions."""

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
    """Header and body of every message.

    `learner` is the learner of the connection, in both directions. `incarnation` and `session` identify its process and
    its connection: messages of an older process or connection are dropped. `epoch` identifies the syncer process in the
    same way.

    `tick` and `seen_tick` are the vector clock of a star topology. A learner receives information about others only
    through the syncer, so its own tick and the last syncer tick that it received are the whole clock. The full vector
    can be derived from the tapes. A tick is the number of the entry on the sender's tape.

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
    """Version of one fragment: its contributions and the last merged contribution of every learner.

    The driver stores the value and the momentum with it.
    """

    fragment: FragmentId
    version: Version
    round: RoundId
    contributions: tuple[AcceptedContribution, ...]
    merged_up_to: tuple[tuple[LearnerId, MergedUpTo], ...]
    merged_tokens: int  # tokens merged into this fragment, over all versions

    def key(self) -> RecordKey:
        return RecordKey("version", self.fragment, self.version)


class MembersRecord(Value, frozen=True):
    """Newest incarnation of every learner."""

    serial: int
    incarnations: tuple[tuple[LearnerId, Incarnation], ...]
    left: tuple[LearnerId, ...]  # learners that have left or are lost
    retired_tokens: int  # tokens of all incarnations that are no longer current
    lost: tuple[LearnerId, ...] = ()

    def key(self) -> RecordKey:
        return RecordKey("members", self.serial, 0)


class LeaseRecord(Value, frozen=True):
    """State of all leases. It is durable before a lease is sent."""

    serial: int
    next_sample: int  # first sample that was never leased
    pool: tuple[tuple[int, int], ...]  # returned by ended incarnations; leased again first
    holdings: tuple[LeaseHoldings, ...]
    closed_merged: int  # merged samples of ended incarnations

    def key(self) -> RecordKey:
        return RecordKey("leases", self.serial, 0)


class SnapshotRecord(Value, frozen=True):
    snapshot: int
    versions: tuple[Version, ...]
    parts: tuple[tuple[LearnerId, SnapshotPart], ...]
    in_flight: tuple[tuple[LearnerId, RoundId], ...]
    left_out: tuple[LearnerId, ...]
    next_sample: int = 0  # first sample that was never leased
    unmerged: tuple[tuple[int, int], ...] = ()  # earlier samples that these versions do not contain

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
    """Notice that the core's `next_deadline()` has passed."""


class LearnerDisconnected(Value, frozen=True):
    """Loss of a connection. It may arrive late, when a newer process of the learner uses the same session number."""

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
    """Refusal of a write because a syncer of a later epoch owns the store."""

    epoch: int


class SnapshotRequested(Value, frozen=True):
    requested_by: str = ""  # name of the operator


class FinishRequested(Value, frozen=True):
    pass


class ControlRequested(Value, frozen=True):
    """Operator request to change the run.

    The driver has validated it with `policy.find_control_problem`. A pause, quorum or grace margin is already durable,
    and a restarted syncer receives it again.
    """

    kind: ControlKind
    value: Number | None  # quorum: K; grace: gamma; drain: the learner
    requested_by: str


class ShardLost(Value, frozen=True):
    """Loss of the process that holds these fragments, and of all its data that was not durable."""

    fragments: tuple[FragmentId, ...]
    cause: str


class ShardReconnected(Value, frozen=True):
    """Return of a shard, with the newest durable version of each of its fragments.

    Once there is a manifest, these are the versions of the manifest. A version that the shard was writing when it was
    lost is durable if it is listed here.
    """

    versions: tuple[tuple[FragmentId, Version], ...]

    def records(self) -> tuple[RecordKey, ...]:
        """Return the keys of the records that are durable at the shard."""
        return tuple(RecordKey("version", fragment, version) for fragment, version in self.versions)


class Started(Value, frozen=True):
    """First event of every process."""


class ConnectionOpened(Value, frozen=True):
    session: int


class ConnectionClosed(Value, frozen=True):
    session: int
    cause: str


class DialFailed(Value, frozen=True):
    cause: str


class StepTaken(Value, frozen=True):
    """End of one inner step, or of several.

    A driver may report several steps at once if nothing was due between them. It reports none to process what arrived
    while it waits at a boundary.
    """

    steps: int
    tokens: int
    step_time_s: Number
    new_samples: int = 0  # leased samples that these steps used for the first time


class FragmentDamaged(Value, frozen=True):
    """Arrival of a published fragment with an incorrect digest, or as an update to a value that the driver lacks."""

    fragment: FragmentId
    version: Version
    cause: str


class LinkMeasured(Value, frozen=True):
    """Throughput of the link in one direction, over all concurrent transfers.

    A driver reports it only if the run does not fix the codec of that direction, and only for transfers that are large
    enough to measure a link.
    """

    direction: str  # "up" or "down"
    transferred_bytes: int
    seconds: Number
    fragment_values: int  # numbers in the largest fragment


class SnapshotSaved(Value, frozen=True):
    snapshot: int


class SnapshotSaveFailed(Value, frozen=True):
    snapshot: int
    cause: str


class SavedStateFound(Value, frozen=True):
    """Notice to a joining core that the driver has optimizer state which `learner` saved for `snapshot`.

    The core uses it if no peer sends any.
    """

    learner: LearnerId
    snapshot: int


class StateRejected(Value, frozen=True):
    """Notice to a joining core that `source` cannot send its optimizer state, or that the driver cannot use it."""

    source: LearnerId
    cause: str


class LeaveRequested(Value, frozen=True):
    """Request of the driver to leave, immediately or, with `drain`, when all work is merged.

    A driver that runs out of time sends it again without `drain`.
    """

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
    """Log a reason. `subject` is ("learner", 3), ("fragment", 7) or ("run", 0)."""

    subject: tuple[str, int]
    reason: Reason


class CloseConnection(Value, frozen=True):
    learner: LearnerId
    incarnation: Incarnation
    session: int
    reason: Reason


class Accumulate(Value, frozen=True):
    """Add a contribution to the running sums of its round. Memory does not grow with the number of learners."""

    round: RoundId
    contribution: AcceptedContribution


class OpenGrace(Value, frozen=True):
    """Record that the quorum is reached and that the round waits up to `window_s` for more contributions.

    The other fields are the terms of the formula, so that the bound can be checked.
    """

    round: RoundId
    window_s: Number
    step_s: Number
    awaited_s: Number  # longest step of the awaited learners, at least step_s
    quorum_s: Number
    sync_s: Number
    late_s: Number  # expected wait for a learner that missed the last merge; 0: no extension
    reason: Reason


class MergeRound(Value, frozen=True):
    """Merge the contributions of a round. `codec` encodes the update to learners; None: the codec of the settings."""

    round: RoundId
    contributions: tuple[AcceptedContribution, ...]
    reason: Reason
    codec: str | None = None


class DiscardRound(Value, frozen=True):
    """Delete the running sums of a round without a merge.

    A shard may have done the outer step before it was lost, without a durable record. Then undo that step: return to
    the newest durable version.
    """

    round: RoundId
    reason: Reason

    def key(self) -> RecordKey:
        """Return the key of the version record that the round would have produced."""
        return RecordKey("version", self.round.fragment, self.round.base + 1)


class Persist(Value, frozen=True):
    record: Record


class RecordInFlight(Value, frozen=True):
    """Store a contribution with the snapshot: it was sent before its learner's cut and arrived after the syncer's."""

    snapshot: int
    learner: LearnerId
    round: RoundId


class Halt(Value, frozen=True):
    """Report that the run no longer needs this process. The core continues to answer until its driver stops it."""

    reason: Reason


class Dial(Value, frozen=True):
    delay_s: Number
    attempt: int


class CopyFragment(Value, frozen=True):
    """Copy a fragment at this step boundary and store the copy until the next copy or the next adoption.

    `codec` encodes the contribution in every transmission; None: the codec of the settings.
    """

    round: RoundId
    copied_at: int
    codec: str | None = None


class AdoptFragment(Value, frozen=True):
    """Adopt a published version.

    `merged_copy`: the version includes the stored copy. Then `carry` adds theta - copy, otherwise theta - anchor. The
    token counts are the ledger entries of this adoption.
    """

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
    """End training in this process permanently."""

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


__all__ = [
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
