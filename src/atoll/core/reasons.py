"""Every sentence that the protocol says, by code.

Log, dashboard, story and tests show the same words, and the swarm counts which of them were ever said. A reason is made
on hot paths, so it is formatted only when somebody reads it.
"""

from __future__ import annotations

from atoll.core.codec import Scalar, Value

REASONS: dict[str, str] = {
    # rounds
    "round-not-due": "{0} of {1} learners have taken {2} steps since the last round",
    "round-no-slot": "ripe; {0} rounds in flight, the limit is {1}",
    "round-quorum-missing": "ripe; {0} learners can be asked, the quorum is {1}",
    "round-opened": "opened on version {0}: {1} learners asked, quorum {2}",
    "round-waiting": "{0} of {1} contributions for the quorum; asked {2} times",
    "round-pull-retried": "{0} of {1} contributions after {2:.3g} s; asking {3} learners again",
    "round-abandoned": "abandoned after {0:.3g} s: {1} of {2} contributions; every learner keeps its progress",
    "round-quorum-lost": "abandoned: {0} of {1} contributions are in and nobody is left to answer",
    "grace-waiting": "quorum {0} of {1}; waiting {2:.3g} s more, slack {3:.3g} s",
    "grace-unmeasured": "quorum {0}; no grace until step, quorum and sync times are measured",
    "grace-off": "quorum {0}; the grace window is off",
    "grace-extended": "quorum {0} of {1}; waiting up to {2:.3g} s for who missed the last merge, by a slow link",
    "grace-no-slack": "quorum {0}; no slack to wait in ({1:.3g} s)",
    "sealed-all": "sealed: all {0} who were asked have answered",
    "sealed-grace-expired": "sealed: the grace window is over with {0} of {1} contributions",
    "merging": "merging {0} contributions",
    "merge-failed": "the merge failed ({0}); every learner keeps its progress",
    "persisting": "merged; waiting for version {0} to be durable",
    "persist-failed": "version {0} could not be made durable ({1}); trying again in {2:.3g} s, learners train on",
    "published": "version {0} published with {1} contributions",
    # contributions
    "contribution-late": "round is sealed; the progress stays with the learner",
    "contribution-stale-round": "answers attempt {0} of epoch {1} on version {2}, not the open round",
    "contribution-no-round": "no round is open on fragment {0}",
    "contribution-not-pulled": "learner {0} was not asked in this round",
    "contribution-no-steps": "no steps or no tokens: nothing to merge",
    "contribution-implausible": "impossible counters: {0} steps, {1} tokens at local step {2}",
    "report-implausible": "impossible report: {0} steps more, {1} tokens in all, {2:.3g} s per step",
    "contribution-invalid": "bad values: {0}",
    "fragment-damaged": "version {0} of fragment {1} arrived damaged ({2}); asking for the whole value",
    # members
    "member-admitting": "incarnation {0} said hello; making its admission durable",
    "member-joining": "incarnation {0} is fetching fragments and inner state",
    "member-ready": "incarnation {0} trains, inner moments: {1}",
    "member-live": "training",
    "member-suspected": "silent for {0:.3g} s, the limit is {1:.3g} s",
    "member-recovered": "heard again after {0:.3g} s",
    "member-timed-out": "silent for {0:.3g} s: taken for lost",
    "member-disconnected": "the link closed: {0}",
    "member-resumed": "incarnation {0} is back on a new link",
    "member-superseded": "incarnation {0} is replaced by {1}",
    "member-left": "left: {0}",
    "member-expired": "away for {0:.3g} s, the limit is {1:.3g} s: incarnation {2} is lost for good",
    "member-quarantined": "quarantined after {0} bad messages, the last: {1}",
    "member-publish-unacked": "version {0} of fragment {1} sent {2} times without an answer",
    "syncer-stalled": "the syncer itself stood still for {0:.3g} s; no learner's silence is counted",
    "refused-fingerprint": "another model: the first difference is {0}",
    "refused-run": "another run: this is {0!r}, the learner belongs to {1!r}",
    "refused-incarnation": "another process has this learner's number: incarnation {0} was replaced by {1}",
    "refused-lost": "incarnation {0} was away for so long that it was given up: restart the learner to come back",
    "refused-full": "the run has its most learners, {0}",
    "refused-finished": "the run is finished",
    "refused-quarantined": "{0}; correct the cause, then restart the learner to come back",
    "refused-implausible": "impossible counters: {1} tokens at local step {0}",
    "refused-id": "learner ids are whole numbers from 1, got {0}",
    "admission-failed": "the admission could not be made durable ({0}); trying again in {1:.3g} s",
    # leases
    "leases-exhausted": "no lease is left after {0} samples; training goes on with samples that it has had already",
    "leases-returned": "{0} samples of incarnation {1} are in no version: they are leased again, before any new ones",
    "leases-not-durable": "leases could not be made durable ({0}); trying again in {1:.3g} s",
    "lease-request-implausible": "impossible request for leases: {0} held, {1} samples taken",
    # recovery
    "peer-chosen": "learner {0} gives its inner state to learner {1}",
    "peer-none": "no healthy peer has inner state to give",
    "peer-new-run": "the run is new: nobody has inner state yet",
    "state-from-peer": "inner state from learner {0}",
    "state-from-snapshot": "inner state from the part that learner {0} saved in snapshot {1}",
    "state-fresh": "fresh inner moments, {0} warm-up steps: {1}",
    "state-kept": "inner state kept",
    "state-timeout": "no inner state from {0} after {1:.3g} s; asking the next peer",
    "state-rejected": "no inner state from learner {0}: {1}",
    "state-peers-exhausted": "{0} peers were asked for inner state, none delivered",
    # links
    "connection-dialing": "dialing in {0:.3g} s, attempt {1}",
    "connection-handshake": "link {0} is open; saying hello",
    "connection-up": "connected",
    "connection-closed": "the link closed: {0}",
    "hello-unanswered": "hello said {0} times without a welcome",
    "ping-unanswered": "the syncer did not answer {0} pings",
    "contribution-codec-coarser": "contributions go in {0} from here on, not in {1}: at {2:.3g} MB/s"
    " a fragment takes {3:.3g} s in {1}, and has {4:.3g} s",
    "contribution-codec-finer": "contributions go in {0} from here on, not in {1}: at {2:.3g} MB/s"
    " a fragment takes {3:.3g} s in {0}, and has {4:.3g} s",
    "update-codec-coarser": "updates go in {0} from here on, not in {1}: to the learner in the middle a fragment takes"
    " {2:.3g} s in {1}, and has {3:.3g} s",
    "update-codec-finer": "updates go in {0} from here on, not in {1}: to the learner in the middle a fragment takes"
    " {2:.3g} s in {0}, and has {3:.3g} s",
    "superseded-epoch": "a syncer of epoch {0} has taken over; this one, epoch {1}, stops",
    # shards
    "shard-lost": "its shard is away: {0}",
    "shard-round-lost": "abandoned: {0} of {1} contributions are lost with its shard; every learner keeps its progress",
    "shard-reconnected": "its shard is back, with version {0}",
    "shard-recovered": "its shard is back, with version {0}, which was merged when it was lost and is durable",
    "shard-version-lost": "its shard came back without version {0}, which was merged and not durable",
    "shard-version-mismatch": "its shard came back with version {0}, the newest is {1}:"
    " a directory of another time or run",
    # snapshots
    "snapshot-started": "snapshot {0} of {1} learners",
    "snapshot-requested": "snapshot {0} of {1} learners, asked for by {2}",
    "snapshot-durable": "snapshot {0} is durable: {1} learners, {2} in-flight contributions",
    "snapshot-left-out": "learner {0} is left out of snapshot {1}: {2}",
    "snapshot-abandoned": "snapshot {0} is abandoned: {1}",
    "snapshot-part-failed": "the learner could not save its part: {0}",
    "snapshot-in-progress": "a snapshot is being taken already",
    "snapshot-part-timeout": "its part did not arrive in time",
    "snapshot-learner-disconnected": "it went away",
    # controls
    "control-paused": "paused by {0}: no round is opened, and learners stand still at their next step boundary",
    "control-resumed": "resumed by {0}",
    "control-pause-ended": "the pause is over: the run ends",
    "control-quorum-changed": "the quorum is {0} from here on, it was {1}; asked for by {2}",
    "control-grace-changed": "the grace margin is {0:g} from here on, it was {1:g}; asked for by {2}",
    "control-drain-requested": "asked to leave by {0}",
    "round-paused": "the run is paused",
    "member-paused": "stands still: the run is paused",
    "member-control-unacked": "{0} sent {1} times without an answer",
    "learner-paused": "stands still from the next step boundary on: the run is paused",
    "learner-resumed": "goes on: the run is not paused",
    "learner-left-on-request": "left as it was asked to: {0}",
    # leaving with a notice
    "member-draining": "leaves soon, with something in {0} fragments that no version holds: merging that out of turn",
    "learner-draining": "takes no more steps, and leaves when the {0} tokens that are in no version yet"
    " are merged: {1}",
    "learner-drained": "left, with everything merged: {0}",
    "learner-left-early": "left with {1} tokens that some fragment has not merged, because there was no more time: {0}",
    # the end
    "finish-budget": "the budget is reached ({0}); one last merge of every fragment",
    "finish-requested": "asked to finish; one last merge of every fragment",
    "final-skipped": "no last merge of fragment {0}: {1}",
    "finish-manifest": "all fragments are final; making the manifest durable",
    "finish-manifest-failed": "the manifest could not be made durable ({0}); trying again in {1:.3g} s",
    "finish-published": "finished at {0} merges; {1} learners to tell",
    "finish-unacked": "learner {0} did not acknowledge the end and is left behind",
    "finish-done": "finished: {0} of {1} learners acknowledged",
    "learner-finished": "the run is finished and every final version is adopted",
    "learner-refused": "the syncer refused: {0}",
    "learner-left": "left: {0}",
}


IGNORED: dict[str, str] = {
    # at the syncer
    "ack-of-unpublished-finish": "acknowledged the end of a run that has not ended",
    "ack-of-unpublished-version": "acknowledged a version that was never published",
    "download-time-implausible": "reported a download time that is not a positive number",
    "drain-of-non-member": "asked to drain a learner that is no member, or at the end of the run",
    "duplicate-contribution": "this contribution is already part of the round",
    "duplicate-ready": "said that it is ready while it already trains",
    "hello-after-left": "hello of an incarnation that has left",
    "hello-before-loss-durable": "hello of a lost incarnation; it is refused once its loss is durable",
    "hello-on-closed-connection": "hello on a connection that the syncer has closed",
    "leases-unavailable": "requested leases in a run without leases, or at its end",
    "not-a-member": "message of a learner that is not connected as a member",
    "optimizer-state-without-target": "optimizer state for a learner that does not join now",
    "pause-without-effect": "paused or resumed already, or at the end of the run",
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
    "lease-out-of-order": "lease that comes again, or before the one that precedes it",
    "stale-connection": "a connection closed that is not the current one",
    "stale-sender": "message of another connection, incarnation or epoch",
    "too-many-state-transfers": "more joining learners request optimizer state than this learner serves at a time",
    # at both
    "unexpected-message": "message that this kind of process never sends",
    "unknown-fragment": "fragment that this syncer does not own",
}
"""Messages and events that a core drops, by code: label of `atoll_ignored_total` and key of `ignored` in the status."""


class Reason(Value, frozen=True):
    """A sentence, not yet formatted."""

    code: str
    args: tuple[Scalar, ...] = ()

    def __str__(self) -> str:
        """Never fails: a reason may come from a peer that knows other sentences than we do."""
        sentence = REASONS.get(self.code)
        try:
            return sentence.format(*self.args) if sentence is not None else _unknown(self)
        except (IndexError, ValueError, TypeError):
            return _unknown(self)


def _unknown(reason: Reason) -> str:
    return " ".join(str(part) for part in (reason.code, *reason.args))


def because(code: str, *args: Scalar) -> Reason:
    return Reason(code, args)
