"""The nouns of the protocol: ids, the settings of a run and its limits.

Everything here is immutable. What is made often is a `Value` (cheap to make, truly frozen); settings are frozen
dataclasses that refuse nonsense with a sentence that says the fix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from atoll.core.codec import Number, Value
from atoll.core.settings import check_settings, setting

LearnerId = int
FragmentId = int
Version = int
Incarnation = int

Interval = tuple[int, int]
"""Samples from the first number up to, and without, the second."""

SYNCER: LearnerId = 0
"""The syncer's place in clocks and envelopes. Learners are numbered from 1."""

NO_VERSION: Version = -1
"""The version of a fragment that a learner does not hold at all. Version 0 is the initial model."""

MAX_TOKENS = 2**62
"""Of one incarnation. Counters beyond it are nonsense, and their squares are beyond every float."""

MAX_TOKENS_PER_STEP = 2**32
"""Of one learner. No report can use up a budget by itself."""

MAX_STEP_SECONDS = 1e9
"""Of one step: thirty years."""

ControlKind = Literal["pause", "resume", "drain", "quorum", "grace"]
AdoptMode = Literal["carry", "overwrite", "blend"]


class RoundId(Value, frozen=True):
    """One attempt at taking `fragment` from version `base` to `base + 1`.

    `attempt` counts the openings on this base within one epoch of the syncer. An answer to an older attempt is refused:
    a learner keeps one copy per fragment, and must be able to tell which copy was merged.
    """

    fragment: FragmentId
    base: Version
    epoch: int
    attempt: int

    def is_newer_than(self, other: RoundId | None) -> bool:
        """Compare rounds of one fragment in the order in which they were opened."""
        return other is None or (self.base, self.epoch, self.attempt) > (other.base, other.epoch, other.attempt)


class MergedUpTo(Value, frozen=True):
    """The last contribution of one learner that was merged into one fragment.

    It travels with every published version. A learner that missed the version into which it was merged still learns,
    from any later one, which of its steps are in.
    """

    incarnation: Incarnation
    base: Version
    copied_at: int  # the learner's local step at the copy
    trained: int  # the learner's tokens at the copy, of this incarnation
    dropped: int  # of those, tokens thrown away for this fragment (overwrite, blend)
    consumed_samples: int = 0  # samples of its leases at the copy


class AcceptedContribution(Value, frozen=True):
    """A contribution as the syncer counts it. `weight` is tokens * tokens / steps."""

    learner: LearnerId
    incarnation: Incarnation
    copied_at: int
    steps: int
    tokens: int
    trained: int
    dropped: int
    weight: Number
    consumed_samples: int = 0


class LeaseHoldings(Value, frozen=True):
    """The leases of one incarnation, as they are made durable. Those before number `first` are merged and no longer
    listed; they had `before` samples."""

    learner: LearnerId
    incarnation: Incarnation
    first_lease: int
    samples_before: int
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, not knobs. Timeouts follow from measured times; these only keep a measurement from being absurd."""

    initial_wait_s: float = 30.0  # a timeout before anything was measured
    min_wait_s: float = 0.25  # no derived timeout is shorter
    max_wait_s: float = 600.0  # and none is longer
    stall_threshold_s: float = 2.0  # a timer this late means that this process itself stood still
    max_pull_attempts: int = 3  # askings in one round before it is abandoned
    max_publish_attempts: int = 5  # sendings of one version to one learner before its link is dropped
    max_hello_attempts: int = 4  # greetings on one link before it is dropped
    max_ping_attempts: int = 3  # unanswered pings before the link is dropped
    max_state_peers: int = 3  # peers asked for inner state before a learner starts with fresh moments
    max_final_attempts: int = 2  # attempts at the last round of a fragment
    max_finish_attempts: int = 5  # sendings of the final manifest before a learner is left behind
    max_strikes: int = 3  # bad messages before a learner is quarantined
    lost_after_s: float = 21600.0  # away for so long, an incarnation is lost: its samples go to others
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_learners: int = 1024
    max_steps_per_report: int = 1_000_000

    def __post_init__(self) -> None:
        if not 0 < self.min_wait_s <= self.initial_wait_s <= self.max_wait_s:
            raise ValueError("limits need 0 < min_wait_s <= initial_wait_s <= max_wait_s")
        if not self.lost_after_s > 0:
            raise ValueError("limits.lost_after_s must be above 0: nobody could ever come back")
        for name in (
            "max_pull_attempts",
            "max_publish_attempts",
            "max_hello_attempts",
            "max_ping_attempts",
            "max_final_attempts",
            "max_finish_attempts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1: nothing is ever sent with 0 tries")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The settings of a run, the same for the syncer and every learner (symbols as in docs/protocol.md)."""

    run_id: str = "run"
    fragments: int = setting(24, "Fragments of the model.", metavar="P", min=1)
    every_steps: int = setting(24, "Steps between two rounds of the same fragment.", metavar="H", flag="every", min=1)
    overlap_steps: int = setting(2, "Steps that overlap with one exchange.", metavar="TAU", flag="tau", min=1)
    quorum: int = setting(1, "Contributions that a merge needs.", metavar="K", min=1)
    grace_margin: float = setting(
        0.5,
        "Share of the slack to wait for more contributions; 0: off.",
        metavar="GAMMA",
        flag="grace",
        min=0,
        below=1,
        advice="0 turns the grace window off",
    )
    adopt: AdoptMode = setting(
        "carry", "carry keeps steps that are not merged; overwrite and blend do not.", metavar="HOW"
    )
    blend_alpha: float = setting(0.5, min=0, max=1)
    budget_tokens: int | None = setting(None, min=1)
    budget_merges: int | None = setting(None, min=1)
    snapshot_every_merges: int = 0  # 0: only on request
    warmup_steps: int = 100  # for a learner that found no peer to take inner state from
    rounds_in_flight: int | None = setting(None, min=1)  # None: tau, more where the measured latency asks for it
    owned_fragments: tuple[FragmentId, ...] | None = None  # the fragments of this syncer; None: all
    lease_samples: int = setting(0, min=0)  # length of one lease; 0: learners bring their own data
    leases_ahead: int = setting(4, min=1)  # leases that a learner holds beyond the one it is in
    fingerprint: tuple[str, ...] = ()  # one line per tensor: name, shape, dtype
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.quorum > self.limits.max_learners:
            raise ValueError(f"quorum {self.quorum} exceeds the most learners of a run, {self.limits.max_learners}")
        if self.owned_fragments is not None:
            if not self.owned_fragments or len(set(self.owned_fragments)) != len(self.owned_fragments):
                raise ValueError("owned_fragments must name at least one fragment, each once")
            if min(self.owned_fragments) < 0 or max(self.owned_fragments) >= self.fragments:
                raise ValueError(f"owned_fragments names a fragment outside 0..{self.fragments - 1}")

    def fragment_ids(self) -> tuple[FragmentId, ...]:
        """In the order of the plan, which is the order of their offsets."""
        return tuple(sorted(self.owned_fragments)) if self.owned_fragments is not None else tuple(range(self.fragments))

    def offset_steps(self, fragment: FragmentId) -> int:
        """Steps before the first round of a fragment: offsets are spread evenly over H."""
        return 1 + fragment * self.every_steps // self.fragments


def describe_first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Name the first tensor in which the fingerprint of a learner (`theirs`) differs from that of the run (`ours`).

    >>> first_difference(("head 512x128 float32 weight",), ("head 512x64 float32 weight",))
    "'head', 512x64 at the learner and 512x128 in the run"
    """
    there, here = (dict(line.partition(" ")[::2] for line in lines) for lines in (ours, theirs))
    differing = {name for name in there.keys() | here.keys() if there.get(name) != here.get(name)}
    # Other tensors make another fragment plan: "plan balanced 3" is the first difference only where it is the only one.
    tensors = sorted(differing - {"plan"})
    if not tensors:
        return f"the fragment plan, {here.get('plan')!r} at the learner and {there.get('plan')!r} in the run"
    count = f"; {len(tensors)} tensors differ" if len(tensors) > 1 else ""
    return f"{tensors[0]!r}{_difference(here.get(tensors[0]), there.get(tensors[0]))}{count}"


def _difference(here: str | None, there: str | None) -> str:
    """Between two descriptions of a tensor: shape, dtype and kind, and the digest of a frozen one."""
    if there is None:
        return f" ({here}), which the run does not have"
    if here is None:
        return f" ({there}), which only the run has"
    words = [pair for pair in zip(here.split(" ")[:3], there.split(" ")[:3], strict=False) if pair[0] != pair[1]]
    if not words:
        return ", which is frozen with other values than in the run"
    at_learner, in_run = (" ".join(side) for side in zip(*words, strict=True))
    return f", {at_learner} at the learner and {in_run} in the run"


def contribution_weight(tokens: int, steps: int) -> float:
    """w = c_tokens * (c_tokens / c_steps): quantity times quality.

    >>> weight_of(tokens=1024, steps=2)
    524288.0
    """
    return tokens * tokens / steps


def is_positive(weight: float) -> bool:
    return math.isfinite(weight) and weight > 0
