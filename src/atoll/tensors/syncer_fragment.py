"""One fragment at the syncer: running sums, outer optimizer, and the versions that learners download.

The syncer's process and the replay of a tape use the same class, so both compute the same bits. It takes no locks. The
process calls `accumulate`, `merge` and `discard` in its merge thread, `stored_state` in its disk thread, and everything
else in the event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

import torch
from torch import Tensor

from atoll.core.codec import Number, Value
from atoll.core.types import NO_VERSION, AcceptedContribution, FragmentId, RoundId, Version
from atoll.tensors.codecs import get_codec
from atoll.tensors.outer_optimizer import OuterOptimizer, PublishedValue
from atoll.tensors.plan import FragmentPlan, tensor_digest
from atoll.tensors.robust_merge import NormTracker, RunningSums, make_running_sums
from atoll.tensors.settings import Numerics

MAX_PINNED_VERSIONS = 4
"""Older versions of a fragment that are kept for slow learners."""


class ServedVersion(NamedTuple):
    """Durable version of one fragment, as learners download it."""

    version: Version
    value: Tensor  # f32, the same bits at every learner
    value_digest: str
    base: Version  # version that the update is added to; NO_VERSION if there is no update, as after a restart
    update: Tensor | None
    codec: str = "f32"  # codec of the update


class MergeStats(Value, frozen=True):
    """Statistics of one merge. Norms are of whole fragments, and of contributions before clipping."""

    contributions: tuple[AcceptedContribution, ...]
    norms: tuple[Number, ...]
    clip_factors: tuple[Number, ...]  # below 1 for a clipped contribution
    merged_norm: Number
    cosine: Number | None  # mean over pairs of contributions
    momentum_norm: Number | None
    step_norm: Number  # norm of the published update
    quantization_error: Number  # share of the update that its codec rounded away
    merge_s: Number = 0.0  # duration of `merge`, measured by the process


class SyncerFragment:
    """State of one fragment at the syncer.

    Two buffers for the published value alternate: one is served, the next version is computed into the other. A version
    that a learner was notified of is pinned until that learner has downloaded it. On a slow link a download may take
    longer than the next merge, and without a pin the learner would never complete one. A pinned version keeps its
    buffer, and the next merge allocates another one.
    """

    def __init__(self, plan: FragmentPlan, p: FragmentId, numerics: Numerics, version: Version, value: Tensor) -> None:
        self.id = p
        self._plan = plan
        self._numerics = numerics
        self._merge_method = numerics.merge
        self._norm_clip = numerics.norm_clip
        self.norm_tracker = NormTracker(plan.holds_buffers(p))
        self.outer_optimizer = OuterOptimizer(plan, p, numerics, value.clone())
        self.served = ServedVersion(version, value, tensor_digest(value), NO_VERSION, None)
        self.merged: ServedVersion | None = None  # version that is merged but not yet durable
        self.stats: MergeStats | None = None  # statistics of the newest merge
        # Frame headers by version, base, begin, end.
        self.frame_headers: dict[tuple[Version, Version | None, int, int], bytes] = {}
        self._spare_buffer: Tensor | None = None
        self._pins: Counter[Version] = Counter()  # per version: notified learners plus active transfers
        self._pinned_versions: dict[Version, ServedVersion] = {}  # pinned versions before the newest
        self._sums: RunningSums | None = None
        self._sizes: list[float] = []  # sizes of the contributions to the round
        self._accumulated: list[tuple[AcceptedContribution, float]] = []  # contributions with their clipping factors
        self._round: RoundId | None = None

    def accumulate(
        self,
        round_id: RoundId,
        accepted: AcceptedContribution,
        data: Tensor,
        codec_name: str,
        norm: float | None = None,
    ) -> None:
        """Add a contribution to the sums of a round. `norm`: result of `NormTracker.examine`, if it was called."""
        if self._sums is None:
            self._sums = make_running_sums(self._plan, self.id, self._merge_method)
        if self._round != round_id:
            self._sums.reset()
            self._sizes = []
            self._accumulated = []
            self._round = round_id
        codec = get_codec(codec_name)
        if norm is None:
            norm = self.norm_tracker.examine(codec, data, self._plan.numel(self.id))[1]
        size = self.norm_tracker.normalized_norm(norm, accepted.steps)
        scale = self.norm_tracker.clip_factor(size, self._norm_clip)
        self._sums.add_encoded(codec, data, accepted.weight, scale, norm if codec.has_exact_norm else None)
        self._sizes.append(size)
        self._accumulated.append((accepted, scale))

    def discard(self, round_id: RoundId) -> None:
        """Drop the sums of a round that is not merged."""
        if self._round == round_id and self._sums is not None:
            self._sums.reset()
            self._round = None

    def merge(self, round_id: RoundId, contributions: int, codec_name: str | None = None) -> None:
        """Take the outer step and compute the next published value, which is served after `mark_durable`.

        Args:
            contributions: Expected number of contributions.
            codec_name: Codec of the update; None for that of the run.
        """
        assert self._round == round_id and self._sums is not None, f"nothing of {round_id} was accumulated"
        assert self._sums.count == contributions, f"{self._sums.count} sums where {contributions} were sealed"
        rates = {accepted.learner: accepted.tokens / accepted.steps for accepted, _ in self._accumulated}
        self.outer_optimizer.step(self._sums.result(), rates)
        sums, norms = self._sums, tuple(self._sums.norms)
        self._sums.reset()
        self._round = None
        self.norm_tracker.record_round(self._sizes)
        value = self._spare_buffer if self._spare_buffer is not None else torch.empty_like(self.served.value)
        self._spare_buffer = None
        value.copy_(self.served.value)
        codec_name = codec_name if codec_name is not None else self._numerics.download_codecs[0]
        assert codec_name in self._numerics.download_codecs, f"updates of this run are not encoded in {codec_name}"
        codec = get_codec(*self._plan.allowed_codecs(self.id, (codec_name,)))
        published = PublishedValue(codec, value)
        update = published.advance(self.outer_optimizer.value)
        self.merged = ServedVersion(round_id.base + 1, value, tensor_digest(value), round_id.base, update, codec.name)
        self.stats = MergeStats(
            tuple(accepted for accepted, _ in self._accumulated),
            norms,
            tuple(scale for _, scale in self._accumulated),
            sums.merged_norm,
            sums.cosine,
            self.outer_optimizer.momentum_norm(),
            published.step_norm,
            published.quantization_error,
        )

    def stored_state(self, version: Version) -> dict[str, Tensor]:
        """Return the tensors to store for this version: the merged one, or the served one if no newer merge exists.

        They do not change before `mark_durable`.
        """
        version_state = self.merged if self.merged is not None else self.served
        assert version_state.version == version, f"fragment {self.id}: version {version} was not merged"
        state = {
            "published": version_state.value,
            "precise": self.outer_optimizer.value,
            "usual": self.norm_tracker.state_tensor(),
        }
        return state | {f"outer.{name}": tensor for name, tensor in self.outer_optimizer.state_dict().items()}

    def mark_durable(self) -> None:
        """Serve the merged version, which is now durable."""
        assert self.merged is not None, f"fragment {self.id}: durable before it was merged"
        old = self.served
        self._spare_buffer = old.value
        if self._pins[old.version]:
            self._spare_buffer = None
            self._pinned_versions[old.version] = old
            if len(self._pinned_versions) > MAX_PINNED_VERSIONS:
                # A running transfer continues; a later request gets the newest version.
                del self._pinned_versions[min(self._pinned_versions)]
        self.served = self.merged
        self.merged = None
        for key in list(self.frame_headers):
            if key[0] not in self._pinned_versions:
                del self.frame_headers[key]

    def pin(self, version: Version) -> ServedVersion | None:
        """Keep this version until `unpin`. Return None if it was already deleted."""
        served = self.served if version == self.served.version else self._pinned_versions.get(version)
        if served is not None:
            self._pins[version] += 1
        return served

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    def unpin(self, version: Version) -> None:
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
            self._pinned_versions.pop(version, None)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the outer optimizer from `stored_state`. An initial version has no optimizer state."""
        if "precise" in state:
            self.outer_optimizer.value.copy_(state["precise"])
            self.norm_tracker.load_state_tensor(state["usual"])
            self.outer_optimizer.load_state_dict(
                {name.removeprefix("outer."): t for name, t in state.items() if name.startswith("outer.")}
            )

    def restore_copy(self, version: Version, state: dict[str, Tensor]) -> Self:
        """Return another fragment with this version and its outer optimizer, as stored."""
        fresh = type(self)(self._plan, self.id, self._numerics, version, state["published"])
        fresh.restore(state)
        return fresh
