"""Reason codes and their sentences.

Log, dashboard, story and tests show the same sentences. The swarm counts which codes occurred. Reasons are created on
hot paths, so they are formatted only when they are displayed.
"""

from __future__ import annotations

from atoll.core.codec import Scalar, Value

REASONS: dict[str, str] = {
    # rounds
    "round-not-due": "{0} of {1} learners have taken {2} steps since the last round",
    "round-no-slot": "due; {0} rounds in flight, the limit is {1}",
    "round-quorum-missing": "due; {0} learners can be pulled, the quorum is {1}",
    "round-opened": "opened on version {0}: {1} learners pulled, quorum {2}",
    "round-waiting": "{0} of {1} contributions for the quorum; {2} pull attempts",
    "round-pull-retried": "{0} of {1} contributions after {2:.3g} s; pulling {3} learners again",
    "round-abandoned": "abandoned after {0:.3g} s: {1} of {2} contributions; every learner keeps its progress",
    "round-quorum-lost": "abandoned: {0} of {1} contributions have arrived and no pulled learner is left to send one",
    "grace-waiting": "quorum {0} of {1}; waiting {2:.3g} s more, slack {3:.3g} s",
    "grace-unmeasured": "quorum {0}; no grace until step, quorum and sync times are measured",
    "grace-off": "quorum {0}; the grace window is off",
    "grace-extended": "quorum {0} of {1}; waiting up to {2:.3g} s for learners with a slow link that missed the"
    " last merge",
    "grace-no-slack": "quorum {0}; no slack for a grace window ({1:.3g} s)",
    "sealed-all": "sealed: all {0} pulled learners have contributed",
    "sealed-grace-expired": "sealed: the grace window has expired with {0} of {1} contributions",
    "merging": "merging {0} contributions",
    "merge-failed": "the merge failed ({0}); every learner keeps its progress",
    "persisting": "merged; making version {0} durable",
    "persist-failed": "version {0} could not be made durable ({1}); retrying in {2:.3g} s, training continues",
    "published": "version {0} published with {1} contributions",
    # contributions
    "contribution-late": "the round is sealed; the learner keeps its progress",
    "contribution-stale-round": "contribution is for attempt {0} of epoch {1} on version {2}, not for the open round",
    "contribution-no-round": "no round is open on fragment {0}",
    "contribution-not-pulled": "learner {0} was not pulled in this round",
    "contribution-no-steps": "no steps or no tokens: nothing to merge",
    "contribution-implausible": "impossible counters: {0} steps, {1} tokens at local step {2}",
    "report-implausible": "impossible report: {0} more steps, {1} tokens in total, {2:.3g} s per step",
    "contribution-invalid": "invalid values: {0}",
    "fragment-damaged": "version {0} of fragment {1} arrived damaged ({2}); requesting the whole value",
    # members
    "member-admitting": "incarnation {0} sent a hello; making its admission durable",
    "member-joining": "incarnation {0} is downloading fragments and optimizer state",
    "member-ready": "incarnation {0} trains; optimizer state: {1}",
    "member-live": "training",
    "member-suspected": "no message for {0:.3g} s, the limit is {1:.3g} s",
    "member-recovered": "message received again after {0:.3g} s",
    "member-timed-out": "no message for {0:.3g} s; marked as lost",
    "member-disconnected": "connection closed: {0}",
    "member-resumed": "incarnation {0} has reconnected",
    "member-superseded": "incarnation {0} is replaced by {1}",
    "member-left": "left: {0}",
    "member-expired": "disconnected for {0:.3g} s, the limit is {1:.3g} s; incarnation {2} is lost for good",
    "member-quarantined": "quarantined after {0} invalid messages, the last: {1}",
    "member-publish-unacked": "version {0} of fragment {1} was sent {2} times without an acknowledgement",
    "syncer-stalled": "the syncer process stalled for {0:.3g} s; no learner is suspected for that time",
    "refused-fingerprint": "different model: the first difference is {0}; start the learner with the model of the run",
    "refused-run": "different run: this syncer serves {0!r}, the learner was started for {1!r}",
    "refused-incarnation": "another process uses this learner's number: incarnation {0} was replaced by {1}",
    "refused-lost": "incarnation {0} was disconnected for too long and is lost; restart the learner to join again",
    "refused-full": "the run has reached its maximum of {0} learners",
    "refused-finished": "the run is finished",
    "refused-quarantined": "{0}; correct the cause, then restart the learner to join again",
    "refused-implausible": "impossible counters: {1} tokens at local step {0}",
    "refused-id": "learner ids are whole numbers from 1, got {0}",
    "admission-failed": "the admission could not be made durable ({0}); retrying in {1:.3g} s",
    # leases
    "leases-exhausted": "no lease is left after {0} samples; training continues with samples that were used before",
    "leases-returned": "{0} samples of incarnation {1} are in no version; they are leased again before new samples",
    "leases-not-durable": "leases could not be made durable ({0}); retrying in {1:.3g} s",
    "lease-request-implausible": "impossible lease request: {0} leases received, {1} samples consumed",
    # recovery
    "peer-chosen": "learner {0} sends its optimizer state to learner {1}",
    "peer-none": "no healthy learner can send optimizer state",
    "peer-new-run": "the run is new: no learner has optimizer state yet",
    "state-from-peer": "optimizer state from learner {0}",
    "state-from-snapshot": "optimizer state that learner {0} saved in snapshot {1}",
    "state-fresh": "fresh optimizer state, {0} warm-up steps: {1}",
    "state-kept": "optimizer state unchanged",
    "state-timeout": "no optimizer state from {0} after {1:.3g} s; trying the next learner",
    "state-rejected": "no optimizer state from learner {0}: {1}",
    "state-peers-exhausted": "requested optimizer state from {0} learners, received none",
    # links
    "connection-dialing": "connecting in {0:.3g} s, attempt {1}",
    "connection-handshake": "connection {0} is open; sending a hello",
    "connection-up": "connected",
    "connection-closed": "connection closed: {0}",
    "hello-unanswered": "sent {0} hellos without a welcome",
    "ping-unanswered": "the syncer did not answer {0} pings",
    "contribution-codec-coarser": "contributions are now sent in {0}, not in {1}: at {2:.3g} MB/s a fragment"
    " takes {3:.3g} s in {1}; available: {4:.3g} s",
    "contribution-codec-finer": "contributions are now sent in {0}, not in {1}: at {2:.3g} MB/s a fragment takes"
    " {3:.3g} s in {0}; available: {4:.3g} s",
    "update-codec-coarser": "updates are now sent in {0}, not in {1}: for the median learner a fragment takes"
    " {2:.3g} s in {1}; available: {3:.3g} s",
    "update-codec-finer": "updates are now sent in {0}, not in {1}: for the median learner a fragment takes"
    " {2:.3g} s in {0}; available: {3:.3g} s",
    "superseded-epoch": "a syncer of epoch {0} has taken over; this one, of epoch {1}, stops",
    # shards
    "shard-lost": "its shard is unavailable: {0}",
    "shard-round-lost": "abandoned: {0} of {1} contributions are lost with its shard; every learner keeps its progress",
    "shard-reconnected": "its shard has reconnected with version {0}",
    "shard-recovered": "its shard has reconnected with version {0}, which was already merged when the shard was lost",
    "shard-version-lost": "its shard has reconnected without version {0}, which was merged but not durable",
    "shard-version-mismatch": "its shard has reconnected with version {0}, the newest is {1}; check that its"
    " directory belongs to this run",
    # snapshots
    "snapshot-started": "snapshot {0} of {1} learners",
    "snapshot-requested": "snapshot {0} of {1} learners, requested by {2}",
    "snapshot-durable": "snapshot {0} is durable: {1} learners, {2} in-flight contributions",
    "snapshot-left-out": "learner {0} is not part of snapshot {1}: {2}",
    "snapshot-abandoned": "snapshot {0} is abandoned: {1}",
    "snapshot-part-failed": "the learner could not save its part: {0}",
    "snapshot-in-progress": "another snapshot is in progress",
    "snapshot-part-timeout": "its part did not arrive in time",
    "snapshot-learner-disconnected": "it disconnected",
    # controls
    "control-paused": "paused by {0}: no round opens, and every learner pauses at its next step boundary",
    "control-resumed": "resumed by {0}",
    "control-pause-ended": "no longer paused: the run ends",
    "control-quorum-changed": "quorum changed from {1} to {0} by {2}",
    "control-grace-changed": "grace margin changed from {1:g} to {0:g} by {2}",
    "control-drain-requested": "drain requested by {0}",
    "round-paused": "the run is paused",
    "member-paused": "paused with the run",
    "member-control-unacked": "{0} was sent {1} times without an acknowledgement",
    "learner-paused": "the run is paused; pausing at the next step boundary",
    "learner-resumed": "the run is no longer paused; resuming",
    "learner-left-on-request": "left on request: {0}",
    # leaving with a notice
    "member-draining": "leaving; {0} fragments have unmerged work, opening unscheduled rounds",
    "learner-draining": "leaving ({1}); no more steps, waiting until the last {0} tokens are merged",
    "learner-drained": "left with everything merged: {0}",
    "learner-left-early": "left with {1} unmerged tokens because the time was over: {0}",
    # the end
    "finish-budget": "the budget is used up ({0}); merging every fragment once more",
    "finish-requested": "the end of the run was requested; merging every fragment once more",
    "final-skipped": "no last merge of fragment {0}: {1}",
    "finish-manifest": "all fragments are final; making the manifest durable",
    "finish-manifest-failed": "the manifest could not be made durable ({0}); retrying in {1:.3g} s",
    "finish-published": "finished at {0} merges; notifying {1} learners",
    "finish-unacked": "learner {0} did not acknowledge the end of the run",
    "finish-done": "finished: {0} of {1} learners acknowledged",
    "learner-finished": "the run is finished; every final version is adopted",
    "learner-refused": "the syncer refused this learner: {0}",
    "learner-left": "left: {0}",
}


IGNORED: dict[str, str] = {
    # at the syncer
    "ack-of-unpublished-finish": "acknowledged the end of a run that has not ended",
    "ack-of-unpublished-version": "acknowledged a version that was never published",
    "download-time-implausible": "reported a download time that is not a positive number",
    "drain-of-non-member": "requested to drain a learner that is not a member, or at the end of the run",
    "duplicate-contribution": "this contribution is already part of the round",
    "duplicate-ready": "reported ready while it already trains",
    "hello-after-left": "hello of an incarnation that has left",
    "hello-before-loss-durable": "hello of a lost incarnation; it is refused once its loss is durable",
    "hello-on-closed-connection": "hello on a connection that the syncer has closed",
    "leases-unavailable": "requested leases in a run without leases, or at its end",
    "not-a-member": "message of a learner that is not connected as a member",
    "optimizer-state-without-target": "optimizer state for a learner that does not join now",
    "pause-without-effect": "already paused or resumed, or at the end of the run",
    "resync-not-needed": "requested a version that it has, or that does not exist",
    "shard-unavailable": "report of a shard while that shard is unavailable",
    "shard-was-available": "a shard reconnected that was not lost",
    "snapshot-part-unexpected": "part of a snapshot that is not in progress, or that is complete without it",
    "stale-drain-request": "drain request that is older than one already handled",
    "stale-incarnation": "message of an older incarnation, session or epoch",
    "stale-lease-request": "lease request that was answered, and whose leases are merged",
    "stale-paused-ack": "acknowledged a pause that is older than the last one acknowledged, or unknown",
    "stale-session": "message or disconnection of an older session",
    # at a learner
    "before-welcome": "message before the welcome; the next hello makes the syncer send everything again",
    "duplicate-welcome": "second welcome on the same connection",
    "lease-out-of-order": "duplicate lease, or lease that arrived before its predecessor",
    "stale-connection": "a connection closed that is not the current one",
    "stale-sender": "message of another connection, incarnation or epoch",
    "too-many-state-transfers": "more joining learners request optimizer state than this learner serves at a time",
    # at both
    "unexpected-message": "message that this kind of process never sends",
    "unknown-fragment": "fragment that this syncer does not own",
}
"""Messages and events that a core drops, by code: label of `atoll_ignored_total` and key of `ignored` in the status."""


class Reason(Value, frozen=True):
    """A reason code and the values for its sentence."""

    code: str
    args: tuple[Scalar, ...] = ()

    def __str__(self) -> str:
        """Return the sentence. Never fail: a peer of another version may send a code or values that we do not know."""
        sentence = REASONS.get(self.code)
        try:
            return sentence.format(*self.args) if sentence is not None else _unknown(self)
        except (IndexError, ValueError, TypeError):
            return _unknown(self)


def _unknown(reason: Reason) -> str:
    return " ".join(str(part) for part in (reason.code, *reason.args))


def because(code: str, *args: Scalar) -> Reason:
    return Reason(code, args)
