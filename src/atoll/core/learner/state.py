"""State of a learner, and helpers that its components share."""

from __future__ import annotations

from typing import NamedTuple

from atoll.core.codec import Scalar
from atoll.core.policy import Estimate
from atoll.core.protocol import Body, Envelope, LearnerEffect, LogReason, ProvideState, Send, SnapshotPart
from atoll.core.reasons import Reason
from atoll.core.states import CONNECTION_TABLE, LEARNER_TABLE, ConnectionState, CoreState, LearnerMode, transition
from atoll.core.types import (
    NO_VERSION,
    FragmentId,
    Incarnation,
    Interval,
    LearnerId,
    MergedUpTo,
    RoundId,
    RunConfig,
    Version,
)


class ContributionCopy(NamedTuple):
    """Counters of the copy of a fragment, made at the step boundary that answered a pull."""

    round: RoundId
    step: int
    trained: int
    steps: int
    tokens: int
    dropped: int
    consumed_samples: int = 0


class StateTransfer(NamedTuple):
    request: ProvideState
    due: float  # time at which the joining learner stops waiting


class LearnerState(CoreState):
    """State that all components of a learner share. It changes only inside `LearnerCore.handle`."""

    # long: one line per attribute
    def __init__(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> None:
        super().__init__(config)
        self.id = learner
        self.incarnation = incarnation
        self.seen_tick = 0  # newest tick received from the syncer
        self.epoch = 0  # newest syncer that sent a welcome
        self.session = 0
        self.marker = 0  # newest snapshot whose cut this learner has passed; part of every message
        self.seen_marker = 0  # newest marker received
        self.mode = LearnerMode.NEW
        self.link = ConnectionState.DOWN
        self.reason = Reason("connection-dialing", (0.0, 1))
        self.step = 0
        self.trained = 0
        self.progress = 0.0
        ids = config.fragment_ids()
        self.fragments = ids
        # Adopted version of each fragment, which is its anchor.
        self.versions: dict[FragmentId, Version] = dict.fromkeys(ids, NO_VERSION)
        # Newest version that has arrived, adopted or not.
        self.received: dict[FragmentId, Version] = dict.fromkeys(ids, NO_VERSION)
        # Last merged contribution of this learner, according to the newest version that has arrived.
        self.merged_up_to: dict[FragmentId, MergedUpTo | None] = dict.fromkeys(ids, None)
        # Versions that have arrived but are not adopted, in order of arrival.
        self.arrivals: dict[FragmentId, None] = {}
        self.base_step: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # local step up to which all steps are settled
        self.settled: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # tokens that are merged or dropped
        self.dropped: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # dropped tokens of those
        self.pulls: dict[FragmentId, RoundId] = {}  # unanswered pulls
        self.copies: dict[FragmentId, ContributionCopy] = {}  # sent contributions, until the next adoption
        self.codec: str | None = None  # chosen for contributions; None: the first of `CODECS`
        self.upload_rates: tuple[float, ...] = ()  # newest measurements since the last choice, in bytes per second
        self.download_rates: tuple[float, ...] = ()  # newest measurements, in bytes per second
        self.step_time = Estimate()
        self.snapshot_due = 0  # snapshot to save at the next step boundary
        self.part: SnapshotPart | None = None  # part that is saved or being saved
        self.part_saved = False  # the driver has finished saving
        self.state_transfers: dict[LearnerId, StateTransfer] = {}  # joining learners that wait for optimizer state
        self.required: tuple[Version, ...] = ()  # while joining: versions that must arrive before training starts
        self.state_source: Reason | None = None  # while joining: source of the optimizer state, once known
        self.saved_state_source: Reason | None = None  # while joining: saved state, used if no peer sends any
        self.warmup_steps = 0
        self.tried_peers: tuple[LearnerId, ...] = ()  # peers that did not send optimizer state
        self.peer: LearnerId = 0  # peer of the current request; 0: unknown
        self.requested_peers = 0
        self.state_due = 0.0  # while joining: when the next peer is tried
        self.state_wait_s = 0.0
        self.lease_samples = config.lease_samples
        self.lease_low = config.leases_ahead * config.lease_samples  # unconsumed samples below which it requests leases
        self.leases: dict[int, Interval] = {}  # by number: leases that are not used up, and at least the last
        self.lease_count = 0  # received leases
        self.lease_first = 0  # number of the first lease in `leases`
        self.passed_samples = 0  # samples of earlier leases
        self.leased_samples = 0  # samples of all received leases
        self.consumed_samples = 0  # samples that were consumed of those
        self.repeated = 0  # steps on repeated samples
        self.is_exhausted = False  # the last steps used repeated samples
        self.lease_attempts = 0  # requests since leases ran low; 0: no request is pending
        self.lease_requested_at = 0.0
        self.lease_due = 0.0  # time at which the lease request is repeated
        self.lease_time = Estimate()  # time from a lease request to the lease
        self.paused = False  # the newest `SetPaused` of the syncer
        self.pause_serial = 0  # serial of that request
        self.leaving = False  # draining: no more steps, leaves when everything is merged
        self.leave_cause = ""
        self.drain_resend_at = 0.0  # time at which the drain request is repeated
        self.final: tuple[Version, ...] = ()
        self.final_merges = 0
        self.refused_incarnation: Incarnation | None = None  # newest incarnation, if ours was refused as outdated
        self.dials = 0
        self.hellos = 0
        self.pings = 0
        self.ping_serial = 0
        self.ping_sent_at = 0.0
        self.last_seen_at = 0.0
        self.idle_check_at = 0.0  # time of the next check for a silent syncer
        self.message_gap = Estimate()
        self.round_trip = Estimate()
        self.effects: list[LearnerEffect] = []  # effects of the event that is being handled

    @property
    def is_standing_by(self) -> bool:
        """Return whether the driver must not start a step: the run is paused, or this learner is draining."""
        return self.paused or self.leaving

    def send(self, body: Body) -> None:
        envelope = Envelope(
            self.id, self.incarnation, self.session, self.epoch, self.tick, self.seen_tick, self.marker, body
        )
        self.effects.append(Send(envelope))

    def log(self, code: str, *args: Scalar) -> Reason:
        reason = self.count_reason(Reason(code, args))
        self.effects.append(LogReason(("learner", self.id), reason))
        return reason

    def transition_mode(self, trigger: str) -> None:
        self.mode = transition(LEARNER_TABLE, self.mode, trigger, self.transition_counts)

    def transition_connection(self, trigger: str) -> None:
        self.link = transition(CONNECTION_TABLE, self.link, trigger, self.transition_counts)
