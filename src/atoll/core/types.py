"""Ids, small values, the settings of a run and its limits.

Everything here is immutable. Types with many instances are a `Value`, which is cheap to create. Settings are frozen
dataclasses that validate themselves.
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
"""Sample numbers from the first up to, but not including, the second."""

SYNCER: LearnerId = 0
"""Id of the syncer in clocks and envelopes. Learners are numbered from 1."""

NO_VERSION: Version = -1
"""Version of a fragment that a learner has not received. Version 0 is the initial model."""

MAX_TOKENS = 2**62
"""Largest token counter of one incarnation. The square of a larger counter overflows a float."""

MAX_TOKENS_PER_STEP = 2**32
"""Largest number of tokens in one step of one learner, so that a single report cannot use up the budget."""

MAX_STEP_SECONDS = 1e9
"""Longest plausible step: thirty years."""

ControlKind = Literal["pause", "resume", "drain", "quorum", "grace"]
AdoptMode = Literal["carry", "overwrite", "blend"]


class RoundId(Value, frozen=True):
    """Attempt to merge `fragment` from version `base` to `base + 1`.

    `attempt` counts the openings on this base within one epoch of the syncer. A contribution to an older attempt is
    refused: a learner stores one copy per fragment and must know which copy was merged.
    """

    fragment: FragmentId
    base: Version
    epoch: int
    attempt: int

    def is_newer_than(self, other: RoundId | None) -> bool:
        """Compare rounds of one fragment in the order in which they were opened."""
        return other is None or (self.base, self.epoch, self.attempt) > (other.base, other.epoch, other.attempt)


class MergedUpTo(Value, frozen=True):
    """Last contribution of one learner that was merged into one fragment.

    Every published version carries it. A learner that missed the version with its contribution learns from any later
    version which of its steps are merged.
    """

    incarnation: Incarnation
    base: Version
    copied_at: int  # the learner's local step at the copy
    trained: int  # tokens of this incarnation at the copy
    dropped: int  # tokens of those that were dropped from this fragment (overwrite, blend)
    consumed_samples: int = 0  # samples consumed from its leases at the copy


class AcceptedContribution(Value, frozen=True):
    """Counters of an accepted contribution. `weight` is tokens * tokens / steps."""

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
    """Leases of one incarnation, as stored in a `LeaseRecord`.

    Leases before number `first_lease` are merged and not listed. They had `samples_before` samples in total.
    """

    learner: LearnerId
    incarnation: Incarnation
    first_lease: int
    samples_before: int
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Safety bounds. Timeouts are derived from measured times; these bounds protect against absurd measurements."""

    initial_wait_s: float = 30.0  # timeout before the first measurement
    min_wait_s: float = 0.25  # shortest derived timeout
    max_wait_s: float = 600.0  # longest derived timeout
    stall_threshold_s: float = 2.0  # a timer that is later than this means that this process stalled
    max_pull_attempts: int = 3  # pulls of one learner in one round before the round is abandoned
    max_publish_attempts: int = 5  # transmissions of one version to one learner before its connection is closed
    max_hello_attempts: int = 4  # hellos on one connection before it is closed
    max_ping_attempts: int = 3  # unanswered pings before the connection is closed
    max_state_peers: int = 3  # requests for optimizer state before a learner starts with a fresh one
    max_final_attempts: int = 2  # attempts at the last round of a fragment
    max_finish_attempts: int = 5  # transmissions of the final manifest before its learner is disconnected
    max_strikes: int = 3  # invalid messages before a learner is quarantined
    lost_after_s: float = 21600.0  # time without a connection after which an incarnation is lost and its leases return
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_learners: int = 1024
    max_steps_per_report: int = 1_000_000

    def __post_init__(self) -> None:
        if not 0 < self.min_wait_s <= self.initial_wait_s <= self.max_wait_s:
            raise ValueError("limits need 0 < min_wait_s <= initial_wait_s <= max_wait_s")
        if not self.lost_after_s > 0:
            raise ValueError("limits.lost_after_s must be above 0: no learner could ever reconnect")
        for name in (
            "max_pull_attempts",
            "max_publish_attempts",
            "max_hello_attempts",
            "max_ping_attempts",
            "max_final_attempts",
            "max_finish_attempts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1: with 0 attempts nothing is ever sent")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of a run, equal for the syncer and every learner. docs/protocol.md explains the symbols."""

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
    warmup_steps: int = 100  # learning rate warm-up of a learner that found no peer with optimizer state
    rounds_in_flight: int | None = setting(None, min=1)  # None: tau, or more if the measured latency requires it
    owned_fragments: tuple[FragmentId, ...] | None = None  # the fragments of this syncer; None: all
    lease_samples: int = setting(0, min=0)  # length of one lease; 0: learners bring their own data
    leases_ahead: int = setting(4, min=1)  # leases that a learner holds beyond the one it is in
    fingerprint: tuple[str, ...] = ()  # one line per tensor: name, shape, dtype
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.quorum > self.limits.max_learners:
            raise ValueError(
                f"quorum {self.quorum} is above limits.max_learners, {self.limits.max_learners}; use a smaller quorum"
            )
        if self.owned_fragments is not None:
            if not self.owned_fragments or len(set(self.owned_fragments)) != len(self.owned_fragments):
                raise ValueError("owned_fragments must name at least one fragment, each once")
            if min(self.owned_fragments) < 0 or max(self.owned_fragments) >= self.fragments:
                raise ValueError(f"owned_fragments names a fragment outside 0..{self.fragments - 1}")

    def fragment_ids(self) -> tuple[FragmentId, ...]:
        """Return the fragments of this syncer in the order of the plan, which is the order of their offsets."""
        return tuple(sorted(self.owned_fragments)) if self.owned_fragments is not None else tuple(range(self.fragments))

    def offset_steps(self, fragment: FragmentId) -> int:
        """Return the steps before the first round of a fragment. Offsets are spread evenly over H."""
        return 1 + fragment * self.every_steps // self.fragments


def describe_first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Name the first tensor in which the fingerprint of a learner (`theirs`) differs from that of the run (`ours`).

    >>> describe_first_difference(("head 512x128 float32 weight",), ("head 512x64 float32 weight",))
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
    """Describe how two descriptions of a tensor differ in shape, dtype, kind or, if frozen, in values."""
    if there is None:
        return f" ({here}), which the run does not have"
    if here is None:
        return f" ({there}), which only the run has"
    pairs = [pair for pair in zip(here.split(" ")[:3], there.split(" ")[:3], strict=False) if pair[0] != pair[1]]
    if not pairs:
        return ", which is frozen with other values than in the run"
    at_learner, in_run = (" ".join(side) for side in zip(*pairs, strict=True))
    return f", {at_learner} at the learner and {in_run} in the run"


def contribution_weight(tokens: int, steps: int) -> float:
    """Return w = c_tokens * (c_tokens / c_steps): quantity times quality.

    >>> contribution_weight(tokens=1024, steps=2)
    524288.0
    """
    return tokens * tokens / steps


def is_positive(weight: float) -> bool:
    return math.isfinite(weight) and weight > 0
