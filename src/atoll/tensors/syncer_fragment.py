"""One fragment at the syncer: running sums, outer optimizer, and the versions that learners download.

The syncer's process and the replay of a tape use the same class, so both compute the same bits. Nothing here locks. The
process calls `accumulate`, `merge` and `discard` in its merge thread, `stored_state` in its disk thread, and everything
else in the event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

import torch
from torch import Tensor

from atoll.core.codec import Number, Value
from atoll.core.types import NOTHING, Accepted, FragmentId, RoundId, Version
from atoll.tensors.codecs import codec
from atoll.tensors.outer import OuterStep, PublishedValue
from atoll.tensors.plan import FragmentPlan, digest_of
from atoll.tensors.robust_merge import NormTracker, RunningSums, sums_of
from atoll.tensors.settings import Numerics

MAX_OLD_VERSIONS = 4
"""Versions of a fragment beside the newest that are kept for slow learners."""


class ServedVersion(NamedTuple):
    """One durable version of one fragment, as learners download it."""

    version: Version
    value: Tensor  # f32, the same bits at every learner
    value_digest: str
    base: Version  # version that the update is added to; NOTHING if there is no update, as after a restart
    update: Tensor | None
    codec: str = "f32"  # of the update


class MergeStats(Value, frozen=True):
    """Statistics of one merge. Norms are of whole fragments, and of contributions before clipping."""

    contributions: tuple[Accepted, ...]
    norms: tuple[Number, ...]
    scales: tuple[Number, ...]  # below 1 for a clipped contribution
    merged_norm: Number
    cosine: Number | None  # mean over pairs of contributions
    momentum_norm: Number | None
    step_norm: Number  # of the published update
    left_out: Number  # share of the update that its codec rounded away
    merge_s: Number = 0.0  # duration of `merge`, measured by the process


class SyncerFragment:
    """Two buffers for the published value alternate: one is served, the next version is computed into the other.

    A version that a learner was notified of stays unchanged until that learner has it. On a slow link that may take
    longer than the next merge, and a learner that is too late each time would never get any version. A held version
    keeps its buffer, and the next merge allocates another one.
    """

    def __init__(self, plan: FragmentPlan, p: FragmentId, numerics: Numerics, version: Version, value: Tensor) -> None:
        self.id = p
        self._plan = plan
        self._numerics = numerics
        self._how = numerics.merge
        self._clip = numerics.norm_clip
        self.usual = NormTracker(plan.holds_buffers(p))
        self.outer = OuterStep(plan, p, numerics, value.clone())
        self.served = ServedVersion(version, value, digest_of(value), NOTHING, None)
        self.next: ServedVersion | None = None  # merged, and not yet durable
        self.stats: MergeStats | None = None  # of the newest merge
        self.frame_heads: dict[tuple[Version, Version | None, int, int], bytes] = {}  # by version, base, begin, end
        self._spare: Tensor | None = None
        self._holds: Counter[Version] = Counter()  # learners that were notified of a version, and transfers of it
        self._old: dict[Version, ServedVersion] = {}  # held versions before the newest
        self._sums: RunningSums | None = None
        self._sizes: list[float] = []  # of the contributions to the round
        self._added: list[tuple[Accepted, float]] = []  # the same contributions with their clipping factors
        self._round: RoundId | None = None

    def accumulate(
        self, round_id: RoundId, accepted: Accepted, data: Tensor, up: str, norm: float | None = None
    ) -> None:
        """Add a contribution to the sums of a round. `norm`: result of `NormTracker.examine`, if it was called."""
        if self._sums is None:
            self._sums = sums_of(self._plan, self.id, self._how)
        if self._round != round_id:
            self._sums.reset()
            self._sizes = []
            self._added = []
            self._round = round_id
        coder = codec(up)
        if norm is None:
            norm = self.usual.examine(coder, data, self._plan.numel(self.id))[1]
        size = self.usual.size_of(norm, accepted.steps)
        scale = self.usual.scale(size, self._clip)
        self._sums.add_encoded(coder, data, accepted.weight, scale, norm if coder.tells_norm else None)
        self._sizes.append(size)
        self._added.append((accepted, scale))

    def discard(self, round_id: RoundId) -> None:
        """Drop the sums of a round that is not merged."""
        if self._round == round_id and self._sums is not None:
            self._sums.reset()
            self._round = None

    def merge(self, round_id: RoundId, contributions: int, down: str | None = None) -> None:
        """Take the outer step and compute the next published value, which is served after `now_durable`. `down`: codec
        of the update; None for that of the run."""
        assert self._round == round_id and self._sums is not None, f"nothing of {round_id} was accumulated"
        assert self._sums.count == contributions, f"{self._sums.count} sums where {contributions} were sealed"
        rates = {accepted.learner: accepted.tokens / accepted.steps for accepted, _ in self._added}
        self.outer.step(self._sums.result(), rates)
        sums, norms = self._sums, tuple(self._sums.norms)
        self._sums.reset()
        self._round = None
        self.usual.note(self._sizes)
        value = self._spare if self._spare is not None else torch.empty_like(self.served.value)
        self._spare = None
        value.copy_(self.served.value)
        down = down if down is not None else self._numerics.downs[0]
        assert down in self._numerics.downs, f"updates of this run do not travel in {down}"
        by = codec(*self._plan.codecs(self.id, (down,)))
        published = PublishedValue(by, value)
        update = published.advance(self.outer.value)
        self.next = ServedVersion(round_id.base + 1, value, digest_of(value), round_id.base, update, by.name)
        self.stats = MergeStats(
            tuple(accepted for accepted, _ in self._added),
            norms,
            tuple(scale for _, scale in self._added),
            sums.merged_norm,
            sums.cosine,
            self.outer.momentum_norm(),
            published.step_norm,
            published.left_out,
        )

    def stored_state(self, version: Version) -> dict[str, Tensor]:
        """Return the tensors that the store keeps of this version: the one just merged, or the served one if no merge
        came after it. They do not change before `now_durable`."""
        found = self.next if self.next is not None else self.served
        assert found.version == version, f"fragment {self.id}: version {version} was not merged"
        state = {"published": found.value, "precise": self.outer.value, "usual": self.usual.state()}
        return state | {f"outer.{name}": tensor for name, tensor in self.outer.state().items()}

    def now_durable(self) -> None:
        """Serve the version that was merged: the store has it."""
        assert self.next is not None, f"fragment {self.id}: durable before it was merged"
        old = self.served
        self._spare = old.value
        if self._holds[old.version]:
            self._spare = None
            self._old[old.version] = old
            if len(self._old) > MAX_OLD_VERSIONS:
                del self._old[min(self._old)]  # a running transfer continues; a later request gets the newest
        self.served = self.next
        self.next = None
        for key in list(self.frame_heads):
            if key[0] not in self._old:
                del self.frame_heads[key]

    def hold(self, version: Version) -> ServedVersion | None:
        """Keep this version until `release`. Return None if it is gone."""
        served = self.served if version == self.served.version else self._old.get(version)
        if served is not None:
            self._holds[version] += 1
        return served

    @property
    def is_being_sent(self) -> bool:
        return bool(self._holds)

    def release(self, version: Version) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]
            self._old.pop(version, None)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the outer optimizer from `stored_state`. An initial version has none."""
        if "precise" in state:
            self.outer.value.copy_(state["precise"])
            self.usual.load(state["usual"])
            self.outer.load({name.removeprefix("outer."): t for name, t in state.items() if name.startswith("outer.")})

    def restored(self, version: Version, state: dict[str, Tensor]) -> Self:
        """Return another fragment with this version and its outer optimizer, as stored."""
        fresh = type(self)(self._plan, self.id, self._numerics, version, state["published"])
        fresh.restore(state)
        return fresh
