"""State of a syncer, and helpers that its components share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.codec import Scalar
from atoll.core.ledger import HolderKey, LeaseLedger, SyncerLedger
from atoll.core.policy import Estimate, budget_progress, lower_median, max_rounds_in_flight, retry_timeout
from atoll.core.protocol import (
    Body,
    Envelope,
    Hello,
    LeaseRecord,
    LogReason,
    ManifestRecord,
    MembersRecord,
    Send,
    SnapshotPart,
    SyncerEffect,
    VersionRecord,
)
from atoll.core.reasons import Reason
from atoll.core.states import (
    MEMBER_TABLE,
    ROUND_TABLE,
    RUN_TABLE,
    CoreState,
    MemberState,
    RoundPhase,
    RunStage,
    transition,
)
from atoll.core.types import (
    MAX_TOKENS,
    MAX_TOKENS_PER_STEP,
    NO_VERSION,
    AcceptedContribution,
    FragmentId,
    Incarnation,
    Interval,
    LearnerId,
    MergedUpTo,
    RoundId,
    RunConfig,
    Version,
)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """Durable records that a restarted syncer finds in its directory."""

    versions: Mapping[FragmentId, VersionRecord] = field(default_factory=dict)  # the newest durable one of each
    members: MembersRecord | None = None
    manifest: ManifestRecord | None = None
    leases: LeaseRecord | None = None


CONNECTED = (MemberState.JOINING, MemberState.LIVE, MemberState.SUSPECT)
"""States of a member that has a connection."""


class UnackedPublish(NamedTuple):
    """A version that was sent to a learner and not yet acknowledged."""

    version: Version
    sent_at: float
    tries: int  # transmissions; 0: not sent, because its shard is unavailable


@dataclass(slots=True, eq=False)
class Fragment:
    """State of one fragment at the syncer."""

    id: FragmentId
    required_steps: (
        int  # steps after which the next round is due: first the offset, then H, fewer after an abandoned round
    )
    version: Version = 0  # newest durable version
    phase: RoundPhase = RoundPhase.IDLE
    unavailable: bool = False  # its shard is disconnected
    round: RoundId | None = None  # the open round; None exactly while IDLE
    latest_round: RoundId | None = None  # last round of this epoch, open or not
    attempt: int = 0  # rounds opened on this version in this epoch
    opened_at: float = 0.0
    scheduled_at: float = -math.inf  # opening of the last scheduled round: the step count starts there
    is_scheduled: bool = True  # the last opened round was scheduled; a round for a draining learner is not
    # Local step of each live or suspected learner at the last opening.
    baseline_steps: dict[LearnerId, int] = field(default_factory=dict)
    pulled: dict[LearnerId, float] = field(default_factory=dict)  # learners of the open round, and when first pulled
    contributions: dict[LearnerId, AcceptedContribution] = field(default_factory=dict)  # accepted in the open round
    # Pulled learners without a contribution in the last merge, with the time of their first pull.
    missed_last_merge: dict[LearnerId, float] = field(default_factory=dict)
    pull_attempts: int = 0
    next_pull_at: float = 0.0
    grace_until: float = 0.0
    quorum: int = 0  # K when the open round reached its quorum; an operator may change it later
    sealed_at: float = 0.0  # time at which the open round was sealed
    merge_s: float = 0.0  # time from the seal of the newest version to its publication
    published_at: float = -1.0  # time at which this epoch published the newest version
    save_attempts: int = 0
    merged: bool = False  # the outer step of the open round is done
    merged_up_to: dict[LearnerId, MergedUpTo] = field(default_factory=dict)  # last merged contribution of every learner
    last_contributors: tuple[LearnerId, ...] = ()
    final: bool = False  # the last merge of the fragment is done or skipped
    round_is_final: bool = False  # the open round was opened after the budget was reached
    final_attempts: int = 0
    reason: Reason | None = None


@dataclass(slots=True, eq=False)
class Member:
    """State of one learner at the syncer."""

    id: LearnerId
    incarnation: Incarnation
    session: int
    state: MemberState = MemberState.UNKNOWN
    step: int = 0  # newest reported local step
    first_step: int = 0  # local step when it joined: baseline for fragments that were not opened since
    was_welcomed: bool = False  # welcomed in this epoch
    disconnected_at: float = 0.0  # last loss of its connection
    absent_since: float = 0.0  # the same, plus the time for which the syncer itself has stalled since then
    reconnected_at: float = 0.0  # last welcome, or first message after a silence
    reported_at: float = -1.0  # time of the newest report
    min_step_s: float = 0.0  # low estimate of its step time: one long step hardly raises it
    training: bool = False  # it has reported that it trains
    download_s: float = 0.0  # reported time to download the largest fragment in bf16; 0: unknown
    last_seen_at: float = 0.0
    received: dict[FragmentId, Version] = field(default_factory=dict)  # newest version that it has acknowledged
    # Versions that were sent but not acknowledged.
    unacked: dict[FragmentId, UnackedPublish] = field(default_factory=dict)
    # Round of the newest contribution, accepted or not.
    newest_rounds: dict[FragmentId, RoundId] = field(default_factory=dict)
    hello: Hello | None = None  # hello that waits for a durable admission
    members_record_serial: int = 0  # serial of the members record with its admission or its loss
    message_gap: Estimate = field(default_factory=Estimate)  # time between two messages of the learner
    step_time: Estimate = field(default_factory=Estimate)
    answer_time: Estimate = field(default_factory=Estimate)  # time from a pull to the contribution
    min_answer_s: float = 0.0  # low estimate of the answer time
    ack_time: Estimate = field(default_factory=Estimate)  # time from sending a version to its acknowledgement
    # Time from the seal of a round to the learner's acknowledgement of the version.
    sync_time: Estimate = field(default_factory=Estimate)
    strikes: int = 0
    reason: Reason | None = None  # why it is disconnected, out or in quarantine
    finish_acked: bool = False
    finish_attempts: int = 0  # transmissions of `Finish` on this connection
    finish_resend_at: float = 0.0  # time at which `Finish` is sent again
    acked_pause_serial: int = 0  # newest `SetPaused` that it acknowledged on this connection
    drained_by: str = ""  # operator who requested its drain
    control_attempts: int = 0  # transmissions of the unacknowledged control request
    control_resend_at: float = 0.0  # time at which the control request is sent again
    is_draining: bool = False  # it takes no more steps and leaves when all its work is merged
    drain_tick: int = 0  # tick of its newest drain request
    unmerged: dict[FragmentId, None] = field(default_factory=dict)  # fragments with unmerged work while it drains
    drain_rounds: dict[FragmentId, int] = field(default_factory=dict)  # number of rounds opened for that work
    seen_tick: int = 0  # newest tick received from it
    silence_check_at: float | None = None  # time of the next silence check
    publish_timer_armed: bool = False
    absence_timer_armed: bool = False


class LearnerFault(NamedTuple):
    """Fault of a learner. The component that detects it returns it, and `Membership` handles it."""

    member: Member
    reason: Reason
    closes_connection: bool = False  # close the connection; otherwise the fault counts as a strike


@dataclass(slots=True, eq=False)
class SnapshotInProgress:
    """Snapshot in progress. Versions and samples are those at the syncer's cut."""

    id: int
    versions: tuple[Version, ...]  # version of every owned fragment
    next_sample: int
    unmerged: tuple[Interval, ...]
    pending: set[LearnerId]  # learners whose part is not complete
    deadline: float
    parts: dict[LearnerId, SnapshotPart] = field(default_factory=dict)
    # contributions that arrived after the syncer's cut and were sent before the learner's
    in_flight: dict[tuple[LearnerId, RoundId], None] = field(default_factory=dict)
    left_out: list[LearnerId] = field(default_factory=list)
    is_saving: bool = False


class SyncerState(CoreState):
    """State that all components of a syncer share. It changes only inside `SyncerCore.handle`."""

    def __init__(self, config: RunConfig, epoch: int, restored: RestoredState | None = None) -> None:
        super().__init__(config)
        self.epoch = epoch
        self.stage = RunStage.RUNNING
        ids = config.fragment_ids()
        self.fragments: dict[FragmentId, Fragment] = {p: Fragment(p, config.offset_steps(p)) for p in ids}
        # Fragments by their last opening. Step counts only rise, so the one that opened longest ago is due first:
        # checking the front is enough.
        self.by_opening: dict[FragmentId, Fragment] = dict(self.fragments)
        # Fragments whose round was abandoned; due again after a few steps.
        self.retrying: dict[FragmentId, Fragment] = {}
        self.in_flight = 0  # fragments that are not IDLE
        self.unsaved: dict[FragmentId, None] = {}  # merged fragments whose failed write will be retried
        self.durability_unknown: dict[FragmentId, None] = {}  # merged fragments whose shard was lost while it saved
        self.pulling: dict[FragmentId, Fragment] = {}  # fragments in flight that are PULLING
        self.members: dict[LearnerId, Member] = {}
        self.live: dict[LearnerId, Member] = {}  # members in state LIVE, sorted by id
        self.draining: dict[LearnerId, Member] = {}  # draining members with unmerged work
        self.ledger = SyncerLedger(ids)
        self.quorum_time = Estimate()  # xi_quorum
        self.flight_limit = max_rounds_in_flight(config, 0.0, self.quorum_time, Estimate())
        self.codec: str | None = None  # chosen for updates; None: the first of `CODECS`
        self.download_times_known = False  # at least one learner has reported a download time
        self.merges = 0  # sum of all versions
        self.marker = epoch * 1_000_000  # newest snapshot; rises across restarts because the epoch does
        self.snapshot: SnapshotInProgress | None = None
        self.merges_at_snapshot = 0
        self.paused = False  # an operator has paused the run
        self.pause_serial = 0  # serial of the newest `SetPaused`; 0: the run was never paused
        self.leases = LeaseLedger()
        self.lease_requests: dict[HolderKey, int] = {}  # pending requests, with the samples consumed
        self.lease_closing: dict[HolderKey, int] = {}  # ended, unsettled incarnations and their members record
        self.leases_saving: LeaseRecord | None = None
        self.leases_dirty = False
        self.leases_serial = 0
        self.leases_attempts = 0
        self.members_serial = 0
        self.members_durable = 0  # newest serial that is durable
        self.members_saving = False
        self.members_dirty = False
        self.members_attempts = 0
        self.finish_by = 0.0
        self.manifest: ManifestRecord | None = None
        self.manifest_attempts = 0
        self.halted = False
        self._progress_tick = -1
        self._progress_now = 0.0
        self.effects: list[SyncerEffect] = []  # effects of the event that is being handled
        if restored is not None:
            self._restore(restored)

    def _restore(self, restored: RestoredState) -> None:
        if restored.members is not None:
            self.members_serial = self.members_durable = restored.members.serial
            for learner, incarnation in restored.members.incarnations:
                member = Member(learner, incarnation, session=-1)
                self.members[learner] = member
                if learner in restored.members.lost:
                    self.transition_member(member, "restored-lost")
                elif learner in restored.members.left:
                    self.transition_member(member, "restored-left")
                else:
                    self.ledger.open(learner, incarnation)
                    self.transition_member(member, "restored")
        for p, record in restored.versions.items():
            f = self.fragments[p]
            f.version = record.version
            f.merged_up_to = dict(record.merged_up_to)
            f.last_contributors = tuple(a.learner for a in record.contributions)
            self.merges += record.version
        self.ledger.restore(
            restored.members.retired_tokens if restored.members is not None else 0,
            {p: restored.versions[p].merged_tokens if p in restored.versions else 0 for p in self.fragments},
            {p: f.merged_up_to for p, f in self.fragments.items()},
        )
        if restored.leases is not None:
            self._restore_leases(restored.leases)
        # The fragment with the oldest version goes first: otherwise a syncer that restarts more often than every H
        # steps would never merge the last fragments.
        behind = sorted(self.fragments.values(), key=lambda f: (f.version, f.id))
        for position, f in enumerate(behind):
            f.required_steps = 1 + position * self.config.every_steps // len(behind)
        self.by_opening = {f.id: f for f in behind}
        self.merges_at_snapshot = self.merges
        if restored.manifest is not None:
            self.manifest = restored.manifest
            self.stage = RunStage.FINISHED

    def _restore_leases(self, record: LeaseRecord) -> None:
        """Restore leases. Merged samples follow from `merged_up_to`; open rounds ended with the previous process."""
        self.leases_serial = record.serial
        self.leases.restore(record)
        for f in self.fragments.values():
            for learner, last in f.merged_up_to.items():
                self.leases.merge((learner, last.incarnation), last.consumed_samples)
        for key in list(self.leases.holders):
            account = self.ledger.accounts.get(key[0])
            if account is None or account.incarnation != key[1]:
                self.leases.close(key)

    # ---------------------------------------------------------------------------------------------------- messages

    def send(self, member: Member, body: Body) -> None:
        envelope = Envelope(
            member.id, member.incarnation, member.session, self.epoch, self.tick, member.seen_tick, self.marker, body
        )
        self.effects.append(Send(envelope))

    def log(self, kind: str, number: int, code: str, *args: Scalar) -> Reason:
        reason = self.count_reason(Reason(code, args))
        self.effects.append(LogReason((kind, number), reason))
        return reason

    # ---------------------------------------------------------------------------------------------------- transitions

    def transition_round(self, f: Fragment, trigger: str) -> None:
        was_idle = f.phase is RoundPhase.IDLE
        f.phase = transition(ROUND_TABLE, f.phase, trigger, self.transition_counts)
        if f.phase is RoundPhase.PULLING:
            self.pulling[f.id] = f
        else:
            self.pulling.pop(f.id, None)
        if was_idle is not (f.phase is RoundPhase.IDLE):
            self.in_flight += 1 if was_idle else -1

    def transition_member(self, member: Member, trigger: str) -> None:
        was_live = member.state is MemberState.LIVE
        member.state = transition(MEMBER_TABLE, member.state, trigger, self.transition_counts)
        if was_live is not (member.state is MemberState.LIVE):
            if was_live:
                del self.live[member.id]
            else:
                self.live[member.id] = member
                self.live = dict(sorted(self.live.items()))  # a fixed order, independent of who joined first

    def transition_run(self, trigger: str) -> None:
        self.stage = transition(RUN_TABLE, self.stage, trigger, self.transition_counts)

    # ---------------------------------------------------------------------------------------------------- reading

    def occupied_slots(self) -> int:
        """Return the rounds that count towards the flight limit. Rounds that wait for an unavailable shard do not."""
        return self.in_flight - len(self.durability_unknown)

    def progress(self) -> float:
        """Return the used share of the budget, equal in all messages of one event."""
        if self._progress_tick != self.tick:
            self._progress_tick = self.tick
            self._progress_now = budget_progress(self.config, self.merges, self.ledger.trained)
        return self._progress_now

    def step_s(self) -> float:
        """Return xi_step: the median of the live learners' averages, so that one stalled learner does not change it."""
        return lower_median([m.step_time.mean for m in self.live.values() if m.step_time.count])

    def sync_time(self) -> Estimate:
        """Return xi_sync: the estimate of the median live learner, so that one slow or broken link does not end the
        grace of the others."""
        known = sorted((m.sync_time for m in self.live.values() if m.sync_time.count), key=lambda each: each.mean)
        return known[(len(known) - 1) // 2] if known else Estimate()

    def versions(self) -> tuple[Version, ...]:
        return tuple(f.version for f in self.fragments.values())

    def received_version(self, member: Member, fragment: FragmentId) -> Version:
        return member.received.get(fragment, NO_VERSION)

    def may_be_paused(self, member: Member) -> bool:
        """Return whether the member is paused or may be. Its message gaps are then not those of a training learner."""
        return self.paused or member.is_draining or member.acked_pause_serial != self.pause_serial

    def baseline(self, f: Fragment, member: Member) -> int:
        """Return the local step from which a learner's steps count towards the next round of this fragment."""
        return f.baseline_steps.get(member.id, member.first_step)

    def is_plausible(self, member: Member, step: int, trained: int) -> bool:
        """Return whether the learner can have trained so many tokens by this step, given its last report."""
        new_tokens = trained - self.ledger.accounts[member.id].trained
        return 0 <= trained <= MAX_TOKENS and new_tokens <= max(1, step - member.step) * MAX_TOKENS_PER_STEP

    def pull_timeout(self, member: Member) -> float:
        """Return the timeout of a pull: at least a few steps, because it is answered at a step boundary."""
        steps_s = retry_timeout(member.step_time, 4, self.limits) if member.step_time.count else 0.0
        if member.answer_time.count == 0 and steps_s:
            return min(2 * steps_s, self.limits.max_wait_s)
        return max(retry_timeout(member.answer_time, 2, self.limits), steps_s)

    def ack_timeout(self, member: Member) -> float:
        return retry_timeout(member.ack_time, 2, self.limits)

    def was_disconnected_since(self, learner: LearnerId, since: float) -> bool:
        """Return whether the learner was disconnected or silent since then, which makes a measurement unusable."""
        return self.members[learner].reconnected_at > since
