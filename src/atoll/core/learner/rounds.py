"""A learner's part in rounds and snapshots: copy, contribute, adopt, and save before adopting what is newer."""

from __future__ import annotations

from atoll.core.learner.data_leases import LearnerLeases
from atoll.core.learner.state import Copy
from atoll.core.messages import NO_RUN_DIRECTORY
from atoll.core.policy import CODEC_SAMPLES, CODECS, codec_for, fragment_s
from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    CopyFragment,
    Envelope,
    FetchTime,
    LinkMeasured,
    Marker,
    Pull,
    RefuseContribution,
    SaveSnapshot,
    SnapshotPart,
    SnapshotSaved,
    SnapshotSaveFailed,
    StreamsChanged,
)
from atoll.core.states import Link, Mode
from atoll.core.types import FragmentId, RoundId


class LearnerRounds(LearnerLeases):
    def _on_pull(self, now: float, envelope: Envelope, body: Pull) -> None:
        p = body.round.fragment
        if self.mode is not Mode.TRAINING or p not in self.versions:
            return
        copy = self.copies.get(p)
        if copy is not None and copy.round == body.round:
            self._send_copy(copy)  # the answer was lost; the same copy again, or nobody could tell which was merged
            return
        # A pull that was delayed or doubled on its way must not replace a newer one: (1) attempt 2 is answered and
        # merged, (2) an old pull of attempt 1 arrives and its answer takes the place of the copy, (3) the published
        # mark names a copy that is gone, and merged work is taken for lost.
        newest = max((r for r in (self.pulls.get(p), copy.round if copy is not None else None) if r), default=None)
        if newest is None or newest < body.round:
            self.pulls[p] = body.round

    def _on_refused_contribution(self, now: float, envelope: Envelope, body: RefuseContribution) -> None:
        """Nothing to undo: the copy is kept until the next adoption says whether it is in (a syncer that was restarted
        refuses what its predecessor had made durable)."""
        self._note(body.reason)

    def _answer_pulls(self) -> None:
        for p, round_id in list(self.pulls.items()):
            if self.versions[p] > round_id.base:
                del self.pulls[p]  # the round is history
            elif self.versions[p] == round_id.base and self.step > self.base_step[p]:
                del self.pulls[p]
                self._contribute(p, round_id)
            # Otherwise the version that it builds on is still on its way; it is answered after that is adopted.

    def _contribute(self, p: FragmentId, round_id: RoundId) -> None:
        copy = Copy(
            round_id,
            self.step,
            self.trained,
            self.step - self.base_step[p],
            self.trained - self.settled[p],
            self.dropped[p],
            self.taken,
        )
        self.copies[p] = copy
        self._out.append(CopyFragment(round_id, self.step, self.codec))
        self._send_copy(copy)

    def _send_copy(self, copy: Copy) -> None:
        counters = (copy.step, copy.steps, copy.tokens, copy.trained, copy.dropped)
        self._send(Contribution(copy.round, *counters, None, copy.taken))

    def _adopt_arrived(self) -> None:
        for p in list(self.arrivals):
            self._adopt(p)
        self.arrivals.clear()

    def _adopt(self, p: FragmentId) -> None:
        """Counters keep exactly the steps that are not yet merged (carry), or start anew (overwrite, blend)."""
        copy = self.copies.pop(p, None)
        merged = self._was_merged(p, copy)
        merged_tokens = dropped_tokens = 0
        if copy is not None and merged:
            merged_tokens = copy.trained - self.settled[p]
            self.settled[p] = copy.trained
            self.base_step[p] = copy.step
        if self.config.adopt != "carry":
            dropped_tokens = self.trained - self.settled[p]
            self.dropped[p] += dropped_tokens
            self.settled[p] = self.trained
            self.base_step[p] = self.step
        self.versions[p] = self.received[p]
        pending = self.trained - self.settled[p]
        how = self.config.adopt if self.step else "overwrite"  # nothing of our own to keep before the first step
        self._out.append(AdoptFragment(p, self.versions[p], how, merged, merged_tokens, dropped_tokens, pending))

    def _was_merged(self, p: FragmentId, copy: Copy | None) -> bool:
        """Is our copy in the version that arrived, or in one before it that we missed?"""
        mark = self.marks[p]
        return (
            mark is not None
            and copy is not None
            and mark.incarnation == self.incarnation
            and mark.base == self.versions[p]
            and mark.copied_at == copy.step
        )

    # ---------------------------------------------------------------------------------------------------- choices

    def _on_link_measured(self, now: float, event: LinkMeasured) -> None:
        """Up, the next copies travel in what is chosen here; one that is made stays as it is: bytes of it are there.
        Down, the syncer chooses, for all."""
        if self.mode is not Mode.TRAINING or not (event.moved_bytes > 0 and event.seconds > 0):
            return
        rate = event.moved_bytes / event.seconds
        if event.way == "down":
            self.down_rates = (*self.down_rates, rate)[-CODEC_SAMPLES:]
            fetch_s = fragment_s(self.down_rates, event.values)
            if fetch_s and self.link is Link.UP:
                self._send(FetchTime(fetch_s))
            return
        self.up_rates = (*self.up_rates, rate)[-CODEC_SAMPLES:]
        chosen = codec_for(self.config, self.codec or CODECS[0], self.up_rates, event.values, self.step_time.mean)
        if chosen.reason is not None:
            self.codec = chosen.codec
            self.up_rates = ()  # what comes next is another load
            self._say(chosen.reason.code, *chosen.reason.args)

    def _on_streams_changed(self, now: float, event: StreamsChanged) -> None:
        code = "streams-more" if event.now > event.before else "streams-fewer"
        self._say(code, event.way, event.before, event.now, event.carried_before / 1e6, event.carried / 1e6)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _see_marker(self, envelope: Envelope) -> None:
        """Where a new syncer begins to count is no snapshot, and one that it began before we came is without us."""
        marker = envelope.marker
        self.seen_marker = marker
        if self.mode is Mode.TRAINING and envelope.epoch == self.epoch:
            self.cut_due = marker
        else:
            self.marker = marker  # nothing of ours to save
            self.cut_due = 0

    def _save_part(self) -> None:
        versions = tuple(self.versions.values())
        # A copy for a syncer that is gone is not on its way to anybody.
        outstanding = tuple(
            c.round for p, c in self.copies.items() if c.round.base == self.versions[p] and c.round.epoch == self.epoch
        )
        self.part = SnapshotPart(self.cut_due, self.step, self.trained, versions, outstanding)
        self.part_saved = False
        self._out.append(SaveSnapshot(self.cut_due, self.step))
        self.marker = self.cut_due
        self.cut_due = 0

    def _on_snapshot_saved(self, now: float, event: SnapshotSaved) -> None:
        self._part_done(event.snapshot, None)

    def _on_snapshot_save_failed(self, now: float, event: SnapshotSaveFailed) -> None:
        if event.why != NO_RUN_DIRECTORY:  # the driver has logged that once
            self._say("snapshot-failed", event.why)
        self._part_done(event.snapshot, event.why)

    def _part_done(self, snapshot: int, problem: str | None) -> None:
        if self.part is not None and self.part.snapshot == snapshot:
            self.part = self.part._replace(problem=problem)
            self.part_saved = True
            if self.link is Link.UP:
                self._send(self.part)

    def _on_marker(self, now: float, envelope: Envelope, body: Marker) -> None:
        """The envelope has said it; here a part that was lost on the way is sent again."""
        if self.part is not None and self.part.snapshot == body.snapshot and self.part_saved:
            self._send(self.part)
