"""Rounds, snapshots and leases at a learner: copy, contribute and adopt fragments, save parts, request leases."""

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
            self.send_copy(copy)  # the contribution was lost; send the same copy, so that it is clear what was merged
            return
        # A delayed or duplicate pull must not replace a newer one: (1) attempt 2 is answered and merged, (2) an old
        # pull of attempt 1 arrives and its answer replaces the copy, (3) `merged_up_to` names a copy that no longer
        # exists, and merged work is treated as unmerged.
        known = (state.pulls.get(p), copy.round if copy is not None else None)
        if all(body.round.is_newer_than(each) for each in known):
            state.pulls[p] = body.round

    def on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        """Count the refusal and keep the copy. The next version shows whether it was merged: a restarted syncer refuses
        contributions that its predecessor had made durable."""
        self._state.count_reason(body.reason)

    def answer_pulls(self) -> None:
        state = self._state
        for p, round_id in list(state.pulls.items()):
            if state.versions[p] > round_id.base:
                del state.pulls[p]  # the round is over
            elif state.versions[p] == round_id.base and state.step > state.base_step[p]:
                del state.pulls[p]
                self._contribute(p, round_id)
            # Otherwise the base version has not arrived; the pull is answered after its adoption.

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
        """Record and acknowledge a published version. Return False if it cannot be used."""
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
        """Adopt a version. The counters keep the unmerged steps (carry) or restart at 0 (overwrite, blend)."""
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
        mode = state.config.adopt if state.step else "overwrite"  # there is no own work before the first step
        state.effects.append(AdoptFragment(p, state.versions[p], mode, merged, merged_tokens, dropped_tokens, pending))

    def _was_merged(self, p: FragmentId, copy: ContributionCopy | None) -> bool:
        """Return whether the version that arrived, or an earlier one that we missed, includes our copy."""
        state = self._state
        last = state.merged_up_to[p]
        return (
            last is not None
            and copy is not None
            and last.incarnation == state.incarnation
            and last.base == state.versions[p]
            and last.copied_at == copy.step
        )

    # ---------------------------------------------------------------------------------------------------- codecs

    def on_link_measured(self, now: float, event: LinkMeasured) -> None:
        """Choose the codec of uploads, or report the download time to the syncer, which chooses for all learners.

        An existing copy keeps its codec: the syncer may already have some of its bytes.
        """
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
            state.upload_rates = ()  # rates measured with another codec are not comparable
            state.log(chosen.reason.code, *chosen.reason.args)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def on_new_marker(self, envelope: Envelope) -> None:
        """Schedule a part for a new snapshot.

        The first marker of a new syncer is not a snapshot, and a joining learner is not part of one.
        """
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
        # A copy for an earlier syncer is not in flight.
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
        """Send the notice of a saved part again: the first may be lost. The envelope has announced the snapshot."""
        state = self._state
        if state.part is not None and state.part.snapshot == body.snapshot and state.part_saved:
            state.send(state.part)


class LearnerLeases:
    """Request leases before they run out and count the samples that were taken from them."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def add(self, now: float, body: Lease) -> bool:
        """Add a lease. Return False if it is a duplicate or not the next one."""
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
        """Count the new samples of steps, and request leases if few are left.

        Training never waits for a lease: steps without new samples repeat earlier ones. A learner that never takes a
        leased sample uses its own data.
        """
        state = self._state
        samples = event.new_samples
        assert 0 <= samples <= state.leased_samples - state.consumed_samples, (
            f"consumed {samples} samples, but only {state.leased_samples - state.consumed_samples} are leased"
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
        """Repeat a request on a new connection: the earlier one may be lost."""
        self._state.lease_attempts = 0
        if self._are_low():
            self._send_request(now)

    def on_timer(self, now: float, key: int) -> None:
        state = self._state
        if not state.lease_attempts or now < state.lease_due:
            return
        if state.link is not ConnectionState.UP:
            state.lease_attempts = 0  # requested again after the next welcome
            return
        self._send_request(now)
