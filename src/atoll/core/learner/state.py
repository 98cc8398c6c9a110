"""The state of a learner, and the helpers that its components share."""

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
    """A fragment as it stood at the step boundary at which it was pulled."""

    round: RoundId
    step: int
    trained: int
    steps: int
    tokens: int
    dropped: int
    consumed_samples: int = 0


class StateTransfer(NamedTuple):
    wanted: ProvideState
    due: float  # whoever wanted it waits no longer


class LearnerState(CoreState):
    """The state that all components of a learner share. It changes only inside `LearnerCore.handle`."""

    # long: all that it remembers, a line each
    def __init__(self, config: RunConfig, learner: LearnerId, incarnation: Incarnation) -> None:
        super().__init__(config)
        self.id = learner
        self.incarnation = incarnation
        self.seen_tick = 0  # newest tick of the syncer that reached us
        self.epoch = 0  # newest syncer that welcomed us
        self.session = 0
        self.marker = 0  # newest snapshot whose cut we have passed: the colour of what we send
        self.seen_marker = 0  # newest snapshot that we know of
        self.mode = LearnerMode.NEW
        self.link = ConnectionState.DOWN
        self.reason = Reason("connection-dialing", (0.0, 1))
        self.step = 0
        self.trained = 0
        self.progress = 0.0
        ids = config.fragment_ids()
        self.fragments = ids
        self.versions: dict[FragmentId, Version] = dict.fromkeys(ids, NO_VERSION)  # adopted: the anchor's version
        self.received: dict[FragmentId, Version] = dict.fromkeys(ids, NO_VERSION)  # arrived, adopted or not
        self.merged_up_to: dict[FragmentId, MergedUpTo | None] = dict.fromkeys(ids, None)  # with the newest arrival
        self.arrivals: dict[FragmentId, None] = {}  # arrived and not adopted, in order of arrival
        self.base_step: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # steps up to here are settled
        self.settled: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # tokens merged or dropped
        self.dropped: dict[FragmentId, int] = dict.fromkeys(ids, 0)  # of those, dropped
        self.pulls: dict[FragmentId, RoundId] = {}  # asked for and not answered yet
        self.copies: dict[FragmentId, ContributionCopy] = {}  # answered, and not known to be merged or refused for good
        self.codec: str | None = None  # that was chosen for contributions; None: the one that they begin with
        self.upload_rates: tuple[float, ...] = ()  # bytes per second, since it was chosen; the newest few
        self.download_rates: tuple[float, ...] = ()  # the same of the way down; the newest few
        self.step_time = Estimate()
        self.snapshot_due = 0  # snapshot to save at the next step boundary
        self.part: SnapshotPart | None = None  # saved or being saved
        self.part_saved = False  # the driver has answered for it
        self.state_transfers: dict[LearnerId, StateTransfer] = {}  # joining learners that wait for our inner state
        self.wanted: tuple[Version, ...] = ()  # while joining: what must arrive before training starts
        self.state_source: Reason | None = None  # while joining: where inner state comes from, once known
        self.saved_state_source: Reason | None = None  # while joining: what the driver holds in case no peer gives any
        self.warmup_steps = 0
        self.tried_peers: tuple[LearnerId, ...] = ()  # peers that did not deliver
        self.peer: LearnerId = 0  # the peer that was asked last; 0 while unknown
        self.requested_peers = 0
        self.state_due = 0.0  # while joining: when the next peer is asked
        self.state_wait_s = 0.0
        self.lease_samples = config.lease_samples
        self.lease_low = config.leases_ahead * config.lease_samples  # with fewer samples ahead it asks for more
        self.leases: dict[int, Interval] = {}  # by number: those that are not used up, and at least the last
        self.lease_count = 0  # leases that have arrived
        self.lease_first = 0  # number of the first that is kept
        self.passed_samples = 0  # samples of those before it
        self.leased_samples = 0  # samples of all leases that have arrived
        self.consumed_samples = 0  # of those, samples that it has had
        self.repeated = 0  # steps on samples that it had had before
        self.is_exhausted = False  # its last steps were such
        self.lease_attempts = 0  # requests since leases ran low; 0: nothing is asked for
        self.lease_requested_at = 0.0
        self.lease_due = 0.0  # when it asks again
        self.lease_time = Estimate()  # from a request to a lease
        self.paused = False  # the run is paused, as far as we were told: stand still at a step boundary
        self.pause_serial = 0  # of the newest word about that from this syncer
        self.leaving = False  # it has taken its last step, and leaves when all of it is merged
        self.leave_why = ""
        self.drain_resend_at = 0.0  # when it says so again
        self.final: tuple[Version, ...] = ()
        self.final_merges = 0
        self.refused_incarnation: Incarnation | None = None  # the newest incarnation, if we were refused for our number
        self.dials = 0
        self.hellos = 0
        self.pings = 0
        self.ping_serial = 0
        self.ping_sent_at = 0.0
        self.last_seen_at = 0.0
        self.idle_check_at = 0.0  # when the syncer's silence is looked at next
        self.message_gap = Estimate()
        self.round_trip = Estimate()
        self.effects: list[LearnerEffect] = []  # of the event that is being handled

    @property
    def is_standing_by(self) -> bool:
        """A driver begins no step while this holds: the run is paused, or this learner has taken its last one."""
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
