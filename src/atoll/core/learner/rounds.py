"""A learner's part in rounds and snapshots: copy, contribute, adopt, and save before adopting what is newer; and the
leases of samples that it trains on."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.learner.state import Copy, LearnerState
from atoll.core.policy import CODEC_SAMPLES, CODECS, codec_for, fragment_s, patience
from atoll.core.protocol import (
    NO_RUN_DIRECTORY,
    AdoptFragment,
    Contribution,
    CopyFragment,
    Delivered,
    Envelope,
    FetchTime,
    FragmentDamaged,
    Lease,
    LeaseRequest,
    LinkMeasured,
    Marker,
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
from atoll.core.states import Link, Mode
from atoll.core.types import FragmentId, RoundId


class LearnerRounds:
    """Copy and contribute fragments, adopt published versions, and save parts of snapshots."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        state = self._state
        p = body.round.fragment
        if state.mode is not Mode.TRAINING or p not in state.versions:
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
        self._state.note(body.reason)

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
        copy = Copy(
            round_id,
            state.step,
            state.trained,
            state.step - state.base_step[p],
            state.trained - state.settled[p],
            state.dropped[p],
            state.taken,
        )
        state.copies[p] = copy
        state.effects.append(CopyFragment(round_id, state.step, state.codec))
        self.send_copy(copy)

    def send_copy(self, copy: Copy) -> None:
        counters = (copy.step, copy.steps, copy.tokens, copy.trained, copy.dropped)
        self._state.send(Contribution(copy.round, *counters, None, copy.taken))

    def record_arrival(self, body: Published) -> bool:
        """Record and acknowledge a published version. Return False if it is of no use here."""
        state = self._state
        p = body.fragment
        if p not in state.received:
            state.ignore("unknown fragment")
            return False
        if body.version > state.received[p]:
            if body.base is not None and body.base != state.received[p]:
                self._want_whole(p)
                return False
            state.received[p] = body.version
            state.marks[p] = body.mark
            state.arrivals[p] = None
            state.progress = max(state.progress, body.progress)
        if state.link is Link.UP:
            state.send(Delivered(p, state.received[p]))
        return True

    def on_damaged(self, now: float, event: FragmentDamaged) -> None:
        state = self._state
        state.say("fragment-damaged", event.version, event.fragment, event.why)
        if event.version > state.received.get(event.fragment, event.version):
            self._want_whole(event.fragment)

    def _want_whole(self, p: FragmentId) -> None:
        state = self._state
        if state.link is Link.UP:
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

    def _was_merged(self, p: FragmentId, copy: Copy | None) -> bool:
        """Is our copy in the version that arrived, or in one before it that we missed?"""
        state = self._state
        mark = state.marks[p]
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
        if state.mode is not Mode.TRAINING or not (event.moved_bytes > 0 and event.seconds > 0):
            return
        rate = event.moved_bytes / event.seconds
        if event.way == "down":
            state.down_rates = (*state.down_rates, rate)[-CODEC_SAMPLES:]
            fetch_s = fragment_s(state.down_rates, event.values)
            if fetch_s and state.link is Link.UP:
                state.send(FetchTime(fetch_s))
            return
        state.up_rates = (*state.up_rates, rate)[-CODEC_SAMPLES:]
        chosen = codec_for(state.config, state.codec or CODECS[0], state.up_rates, event.values, state.step_time.mean)
        if chosen.reason is not None:
            state.codec = chosen.codec
            state.up_rates = ()  # what comes next is another load
            state.say(chosen.reason.code, *chosen.reason.args)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def on_new_marker(self, envelope: Envelope) -> None:
        """Where a new syncer begins to count is no snapshot, and one that it began before we came is without us."""
        state = self._state
        marker = envelope.marker
        state.seen_marker = marker
        if state.mode is Mode.TRAINING and envelope.epoch == state.epoch:
            state.cut_due = marker
        else:
            state.marker = marker  # nothing of ours to save
            state.cut_due = 0

    def save_part(self) -> None:
        state = self._state
        versions = tuple(state.versions.values())
        # A copy for a syncer that is gone is not on its way to anybody.
        outstanding = tuple(
            c.round
            for p, c in state.copies.items()
            if c.round.base == state.versions[p] and c.round.epoch == state.epoch
        )
        state.part = SnapshotPart(state.cut_due, state.step, state.trained, versions, outstanding)
        state.part_saved = False
        state.effects.append(SaveSnapshot(state.cut_due, state.step))
        state.marker = state.cut_due
        state.cut_due = 0

    def on_snapshot_saved(self, now: float, event: SnapshotSaved) -> None:
        self._part_done(event.snapshot, None)

    def on_snapshot_save_failed(self, now: float, event: SnapshotSaveFailed) -> None:
        if event.why != NO_RUN_DIRECTORY:  # the driver has logged that once
            self._state.say("snapshot-failed", event.why)
        self._part_done(event.snapshot, event.why)

    def _part_done(self, snapshot: int, problem: str | None) -> None:
        state = self._state
        if state.part is not None and state.part.snapshot == snapshot:
            state.part = replace(state.part, problem=problem)
            state.part_saved = True
            if state.link is Link.UP:
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
            state.ignore("lease out of turn")
            return False
        state.leases[body.number] = (body.begin, body.end)
        state.lease_count += 1
        state.held += body.end - body.begin
        if state.lease_tries == 1:
            state.lease_time.add(now - state.lease_asked_at)
        if not self._are_low():
            state.lease_tries = 0
        return True

    def count_samples(self, now: float, event: StepTaken) -> None:
        """Steps on samples that it has had already are told with none: training never waits for a lease. Whoever never
        takes any brings data of its own."""
        state = self._state
        samples = event.samples
        assert 0 <= samples <= state.held - state.taken, (
            f"took {samples} samples of {state.held - state.taken} that it has"
        )
        if samples:
            state.taken += samples
            state.is_dry = False
            while (
                state.lease_passed + self._first_length() <= state.taken and state.lease_first + 1 < state.lease_count
            ):
                state.lease_passed += self._first_length()
                del state.leases[state.lease_first]
                state.lease_first += 1
        elif event.steps and state.taken:
            state.repeated += event.steps
            if not state.is_dry:
                state.is_dry = True
                state.say("leases-dry", state.taken)
        if not state.lease_tries and self._are_low():
            self._send_request(now)

    def _first_length(self) -> int:
        state = self._state
        begin, end = state.leases[state.lease_first]
        return end - begin

    def _are_low(self) -> bool:
        state = self._state
        return state.held - state.taken <= state.lease_low

    def _send_request(self, now: float) -> None:
        state = self._state
        if state.link is not Link.UP or state.mode not in (Mode.JOINING, Mode.TRAINING):
            return
        state.lease_tries += 1
        state.lease_asked_at = now
        state.send(LeaseRequest(state.lease_count, state.taken))
        wait = patience(state.lease_time, 4, state.limits) * 2.0 ** min(state.lease_tries - 1, 20)
        state.lease_due = now + min(wait, state.limits.most_wait_s)
        state.arm(state.lease_due, "lease")

    def renew_request(self, now: float) -> None:
        """On a new link: what was asked for on the old one may be lost."""
        self._state.lease_tries = 0
        if self._are_low():
            self._send_request(now)

    def on_timer(self, now: float, key: int) -> None:
        state = self._state
        if not state.lease_tries or now < state.lease_due:
            return
        if state.link is not Link.UP:
            state.lease_tries = 0  # asked again with the next welcome
            return
        self._send_request(now)
