"""A learner's part in rounds and snapshots: copy, contribute, adopt, and save before adopting what is newer; and the
leases of samples that it trains on."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.learner.state import ContributionCopy, LearnerState
from atoll.core.policy import CODEC_RATE_SAMPLES, CODECS, choose_contribution_codec, fragment_transfer_s, retry_timeout
from atoll.core.protocol import (
    NO_RUN_DIRECTORY,
    AdoptFragment,
    Contribution,
    CopyFragment,
    DownloadTime,
    Envelope,
    FragmentDamaged,
    Lease,
    LeaseRequest,
    LinkMeasured,
    Marker,
    PublishAck,
    Published,
    Pull,
    RefuseContribution,
    Resync,
    SaveSnapshot,
    SnapshotPart,
    SnapshotSaved,
    SnapshotSaveFailed,
    StepTaken,
)
from atoll.core.states import ConnectionState, LearnerMode
from atoll.core.types import FragmentId, RoundId


class LearnerRounds:
    """Copy and contribute fragments, adopt published versions, and save parts of snapshots."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        state = self._state
        p = body.round.fragment
        if state.mode is not LearnerMode.TRAINING or p not in state.versions:
            return
        copy = state.copies.get(p)
        if copy is not None and copy.round == body.round:
            self.send_copy(copy)  # the answer was lost; the same copy again, or nobody could tell which was merged
            return
        # A pull that was delayed or doubled on its way must not replace a newer one: (1) attempt 2 is answered and
        # merged, (2) an old pull of attempt 1 arrives and its answer takes the place of the copy, (3) the published
        # mark names a copy that is gone, and merged work is taken for lost.
        known = (state.pulls.get(p), copy.round if copy is not None else None)
        if all(body.round.is_newer_than(each) for each in known):
            state.pulls[p] = body.round

    def on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        """Nothing to undo: the copy is kept until the next adoption says whether it is in (a syncer that was restarted
        refuses what its predecessor had made durable)."""
        self._state.count_reason(body.reason)

    def answer_pulls(self) -> None:
        state = self._state
        for p, round_id in list(state.pulls.items()):
            if state.versions[p] > round_id.base:
                del state.pulls[p]  # the round is history
            elif state.versions[p] == round_id.base and state.step > state.base_step[p]:
                del state.pulls[p]
                self._contribute(p, round_id)
            # Otherwise the version that it builds on is still on its way; it is answered after that is adopted.

    def _contribute(self, p: FragmentId, round_id: RoundId) -> None:
        state = self._state
        copy = ContributionCopy(
            round_id,
            state.step,
            state.trained,
            state.step - state.base_step[p],
            state.trained - state.settled[p],
            state.dropped[p],
            state.consumed_samples,
        )
        state.copies[p] = copy
        state.effects.append(CopyFragment(round_id, state.step, state.codec))
        self.send_copy(copy)

    def send_copy(self, copy: ContributionCopy) -> None:
        counters = (copy.step, copy.steps, copy.tokens, copy.trained, copy.dropped)
        self._state.send(Contribution(copy.round, *counters, None, copy.consumed_samples))

    def record_arrival(self, body: Published) -> bool:
        """Record and acknowledge a published version. Return False if it is of no use here."""
        state = self._state
        p = body.fragment
        if p not in state.received:
            state.ignore("unknown-fragment")
            return False
        if body.version > state.received[p]:
            if body.base is not None and body.base != state.received[p]:
                self._request_full_value(p)
                return False
            state.received[p] = body.version
            state.merged_up_to[p] = body.merged_up_to
            state.arrivals[p] = None
            state.progress = max(state.progress, body.progress)
        if state.link is ConnectionState.UP:
            state.send(PublishAck(p, state.received[p]))
        return True

    def on_damaged(self, now: float, event: FragmentDamaged) -> None:
        state = self._state
        state.log("fragment-damaged", event.version, event.fragment, event.cause)
        if event.version > state.received.get(event.fragment, event.version):
            self._request_full_value(event.fragment)

    def _request_full_value(self, p: FragmentId) -> None:
        state = self._state
        if state.link is ConnectionState.UP:
            state.send(Resync(p, state.received[p]))

    def adopt_arrived(self) -> None:
        state = self._state
        for p in list(state.arrivals):
            self._adopt(p)
        state.arrivals.clear()

    def _adopt(self, p: FragmentId) -> None:
        """Counters keep exactly the steps that are not yet merged (carry), or start anew (overwrite, blend)."""
        state = self._state
        copy = state.copies.pop(p, None)
        merged = self._was_merged(p, copy)
        merged_tokens = dropped_tokens = 0
        if copy is not None and merged:
            merged_tokens = copy.trained - state.settled[p]
            state.settled[p] = copy.trained
            state.base_step[p] = copy.step
        if state.config.adopt != "carry":
            dropped_tokens = state.trained - state.settled[p]
            state.dropped[p] += dropped_tokens
            state.settled[p] = state.trained
            state.base_step[p] = state.step
        state.versions[p] = state.received[p]
        pending = state.trained - state.settled[p]
        how = state.config.adopt if state.step else "overwrite"  # nothing of our own to keep before the first step
        state.effects.append(AdoptFragment(p, state.versions[p], how, merged, merged_tokens, dropped_tokens, pending))

    def _was_merged(self, p: FragmentId, copy: ContributionCopy | None) -> bool:
        """Is our copy in the version that arrived, or in one before it that we missed?"""
        state = self._state
        mark = state.merged_up_to[p]
        return (
            mark is not None
            and copy is not None
            and mark.incarnation == state.incarnation
            and mark.base == state.versions[p]
            and mark.copied_at == copy.step
        )

    # ---------------------------------------------------------------------------------------------------- choices

    def on_link_measured(self, now: float, event: LinkMeasured) -> None:
        """Up, the next copies travel in what is chosen here; one that is made stays as it is: bytes of it are there.
        Down, the syncer chooses, for all."""
        state = self._state
        if state.mode is not LearnerMode.TRAINING or not (event.transferred_bytes > 0 and event.seconds > 0):
            return
        rate = event.transferred_bytes / event.seconds
        if event.direction == "down":
            state.download_rates = (*state.download_rates, rate)[-CODEC_RATE_SAMPLES:]
            download_s = fragment_transfer_s(state.download_rates, event.fragment_values)
            if download_s and state.link is ConnectionState.UP:
                state.send(DownloadTime(download_s))
            return
        state.upload_rates = (*state.upload_rates, rate)[-CODEC_RATE_SAMPLES:]
        chosen = choose_contribution_codec(
            state.config, state.codec or CODECS[0], state.upload_rates, event.fragment_values, state.step_time.mean
        )
        if chosen.reason is not None:
            state.codec = chosen.codec
            state.upload_rates = ()  # what comes next is another load
            state.log(chosen.reason.code, *chosen.reason.args)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def on_new_marker(self, envelope: Envelope) -> None:
        """Where a new syncer begins to count is no snapshot, and one that it began before we came is without us."""
        state = self._state
        marker = envelope.marker
        state.seen_marker = marker
        if state.mode is LearnerMode.TRAINING and envelope.epoch == state.epoch:
            state.snapshot_due = marker
        else:
            state.marker = marker  # nothing of ours to save
            state.snapshot_due = 0

    def save_part(self) -> None:
        state = self._state
        versions = tuple(state.versions.values())
        # A copy for a syncer that is gone is not on its way to anybody.
        outstanding = tuple(
            c.round
            for p, c in state.copies.items()
            if c.round.base == state.versions[p] and c.round.epoch == state.epoch
        )
        state.part = SnapshotPart(state.snapshot_due, state.step, state.trained, versions, outstanding)
        state.part_saved = False
        state.effects.append(SaveSnapshot(state.snapshot_due, state.step))
        state.marker = state.snapshot_due
        state.snapshot_due = 0

    def on_snapshot_saved(self, now: float, event: SnapshotSaved) -> None:
        self._finish_part(event.snapshot, None)

    def on_snapshot_save_failed(self, now: float, event: SnapshotSaveFailed) -> None:
        if event.cause != NO_RUN_DIRECTORY:  # the driver has logged that once
            self._state.log("snapshot-part-failed", event.cause)
        self._finish_part(event.snapshot, event.cause)

    def _finish_part(self, snapshot: int, problem: str | None) -> None:
        state = self._state
        if state.part is not None and state.part.snapshot == snapshot:
            state.part = replace(state.part, problem=problem)
            state.part_saved = True
            if state.link is ConnectionState.UP:
                state.send(state.part)

    def on_marker(self, now: float, envelope: Envelope, body: Marker) -> None:
        """The envelope has said it; here a part that was lost on the way is sent again."""
        state = self._state
        if state.part is not None and state.part.snapshot == body.snapshot and state.part_saved:
            state.send(state.part)


class LearnerLeases:
    """Request leases before they run out and count the samples that were taken from them."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def add(self, now: float, body: Lease) -> bool:
        """Add a lease. Return False for one that comes again, or before another: leases count from 0 within the
        incarnation."""
        state = self._state
        if body.number != state.lease_count or not state.lease_samples or not 0 <= body.begin < body.end:
            state.ignore("lease-out-of-order")
            return False
        state.leases[body.number] = (body.begin, body.end)
        state.lease_count += 1
        state.leased_samples += body.end - body.begin
        if state.lease_attempts == 1:
            state.lease_time.add(now - state.lease_requested_at)
        if not self._are_low():
            state.lease_attempts = 0
        return True

    def count_samples(self, now: float, event: StepTaken) -> None:
        """Steps on samples that it has had already are told with none: training never waits for a lease. Whoever never
        takes any brings data of its own."""
        state = self._state
        samples = event.new_samples
        assert 0 <= samples <= state.leased_samples - state.consumed_samples, (
            f"took {samples} samples of {state.leased_samples - state.consumed_samples} that it has"
        )
        if samples:
            state.consumed_samples += samples
            state.is_exhausted = False
            while (
                state.passed_samples + self._first_length() <= state.consumed_samples
                and state.lease_first + 1 < state.lease_count
            ):
                state.passed_samples += self._first_length()
                del state.leases[state.lease_first]
                state.lease_first += 1
        elif event.steps and state.consumed_samples:
            state.repeated += event.steps
            if not state.is_exhausted:
                state.is_exhausted = True
                state.log("leases-exhausted", state.consumed_samples)
        if not state.lease_attempts and self._are_low():
            self._send_request(now)

    def _first_length(self) -> int:
        state = self._state
        begin, end = state.leases[state.lease_first]
        return end - begin

    def _are_low(self) -> bool:
        state = self._state
        return state.leased_samples - state.consumed_samples <= state.lease_low

    def _send_request(self, now: float) -> None:
        state = self._state
        if state.link is not ConnectionState.UP or state.mode not in (LearnerMode.JOINING, LearnerMode.TRAINING):
            return
        state.lease_attempts += 1
        state.lease_requested_at = now
        state.send(LeaseRequest(state.lease_count, state.consumed_samples))
        wait = retry_timeout(state.lease_time, 4, state.limits) * 2.0 ** min(state.lease_attempts - 1, 20)
        state.lease_due = now + min(wait, state.limits.max_wait_s)
        state.arm_timer(state.lease_due, "lease")

    def renew_request(self, now: float) -> None:
        """On a new link: what was asked for on the old one may be lost."""
        self._state.lease_attempts = 0
        if self._are_low():
            self._send_request(now)

    def on_timer(self, now: float, key: int) -> None:
        state = self._state
        if not state.lease_attempts or now < state.lease_due:
            return
        if state.link is not ConnectionState.UP:
            state.lease_attempts = 0  # asked again with the next welcome
            return
        self._send_request(now)
