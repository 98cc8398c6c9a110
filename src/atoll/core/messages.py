"""What learner and syncer say to each other: message bodies, and the envelope around them.

Events and effects, which stay in one process, are in `protocol`, from which all of these can be imported too.
"""

from __future__ import annotations

from atoll.core.codec import Number, Value
from atoll.core.reasons import Reason
from atoll.core.types import FragmentId, Incarnation, LearnerId, Mark, RoundId, Version

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
    taken: int = 0  # samples of its leases


class Contribution(Value, frozen=True):
    """The answer to a pull; the delta A_p - theta_p travels beside it. `problem`: unfit, says the receiving driver."""

    round: RoundId
    copied_at: int
    steps: int
    tokens: int
    trained: int
    dropped: int
    problem: str | None = None
    taken: int = 0  # samples of its leases, at the copy


class Delivered(Value, frozen=True):
    """A published version has arrived (it is adopted at the next step boundary)."""

    fragment: FragmentId
    version: Version


class Resync(Value, frozen=True):
    """An update arrived whose base is not what I hold: send the whole value."""

    fragment: FragmentId
    have: Version


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

    tried: tuple[LearnerId, ...]


class InnerState(Value, frozen=True):
    """A peer's inner optimizer state for a joining learner. The syncer passes it on."""

    giver: LearnerId
    to: LearnerId
    to_incarnation: Incarnation
    step: int
    versions: tuple[Version, ...]


class Ready(Value, frozen=True):
    """The learner has begun to train."""

    moments: Reason


class Leave(Value, frozen=True):
    why: str


class Leaving(Value, frozen=True):
    """I have to go soon and take no more steps. Of these fragments I have trained something that is in no version yet,
    as far as I know: merge it out of turn. Said again while I wait; the newest word counts."""

    step: int
    trained: int  # tokens of this incarnation: there will be no more
    unmerged: tuple[FragmentId, ...]


class LeaseRequest(Value, frozen=True):
    """My leases run low: I hold so many, of which I have had so many samples."""

    leases: int
    taken: int


class Held(Value, frozen=True):
    """The newest word about a pause that I have heard, and whether I go by it: at the end of a run nobody does."""

    serial: int
    paused: bool


class FetchTime(Value, frozen=True):
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
    current: Incarnation
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
    mark: Mark | None
    progress: Number


class Marker(Value, frozen=True):
    """Carries the envelope's marker to a learner that might get no other message."""

    snapshot: int


class StateWanted(Value, frozen=True):
    """Give your inner state to a joining learner once you have adopted at least these versions."""

    to: LearnerId
    to_incarnation: Incarnation
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


class Hold(Value, frozen=True):
    """The run is paused: stand still at your next step boundary. Or it is not any more: go on."""

    serial: int  # rises with every such word of a syncer; one that is said again keeps its own
    paused: bool


class Drain(Value, frozen=True):
    """Leave the run, as if your program had ended; the others go on."""

    why: str


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
    | Delivered
    | Resync
    | SnapshotPart
    | StateRequest
    | InnerState
    | Ready
    | Leave
    | Leaving
    | LeaseRequest
    | Held
    | FetchTime
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
    | Hold
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
    seen: int
    marker: int
    body: Body
