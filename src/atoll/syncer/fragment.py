"""The syncer's tensors: running sums, outer optimizers, and the published values that learners fetch.

Everything that computes runs in one merge thread, in the order in which the core asked for it. What is served is
swapped in the thread of the event loop, at the moment a version is known to be durable.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.codec import Number, Value
from atoll.core.protocol import VersionRecord
from atoll.core.types import NOTHING, Accepted, FragmentId, RoundId, Version
from atoll.tensors.codecs import codec
from atoll.tensors.outer import OuterStep, Published
from atoll.tensors.plan import FragmentPlan, digest_of
from atoll.tensors.robust_merge import Sums, UsualSize, sums_of
from atoll.tensors.settings import Numerics

MOST_OLD = 4
"""Versions of a fragment beside the newest that are kept for those who are slow."""


class Served(NamedTuple):
    """One durable version of one fragment, as learners fetch it."""

    version: Version
    value: Tensor  # f32, exactly what every learner holds
    value_digest: str
    base: Version  # the update leads from here; NOTHING where there is none, as after a restart
    update: Tensor | None
    codec: str = "f32"  # of the update


class Measured(Value, frozen=True):
    """What one merge was like. Norms are of whole fragments, and of contributions as they came."""

    contributions: tuple[Accepted, ...]
    norms: tuple[Number, ...]
    scales: tuple[Number, ...]  # below 1 where one was clipped
    merged_norm: Number
    cosine: Number | None  # mean over pairs of contributions
    momentum_norm: Number | None
    step_norm: Number  # of the update as it is published
    left_out: Number  # of the update, by its codec, as a share
    merge_s: Number  # in the merge thread, from the last contribution to the next published value


class HeldFragment:
    """Two buffers for the published value take turns: one is served, the next version is computed into the other.

    A version that a learner was told of stays as it is until that learner has it: on a long or thin link that may take
    longer than the next version, and who comes too late each time would never get any. Then other buffers are taken.
    """

    def __init__(self, plan: FragmentPlan, p: FragmentId, numerics: Numerics, version: Version, value: Tensor) -> None:
        self.id = p
        self._plan = plan
        self._numerics = numerics
        self._how = numerics.merge
        self._clip = numerics.norm_clip
        self.usual = UsualSize(plan.holds_buffers(p))
        self.outer = OuterStep(plan, p, numerics, value.clone())
        self.served = Served(version, value, digest_of(value), NOTHING, None)
        self.next: Served | None = None  # merged, and not yet durable
        self.starts: dict[tuple[Version, Version | None, int, int], bytes] = {}  # of frames: version, base, begin, end
        self._spare: Tensor | None = None
        self._holds: Counter[Version] = Counter()  # learners that were told of a version, and transfers of it
        self._old: dict[Version, Served] = {}  # of those, the versions that are not the newest any more
        self._sums: Sums | None = None
        self.measured: Measured | None = None  # of the newest merge
        self._sizes: list[float] = []  # of the contributions to the round
        self._added: list[tuple[Accepted, float]] = []  # the same contributions, with what they were scaled by
        self._round: RoundId | None = None

    # ------------------------------------------------------------------------------------------- in the merge thread

    def accumulate(
        self, round_id: RoundId, accepted: Accepted, data: Tensor, up: str, norm: float | None = None
    ) -> None:
        """`norm`: as `UsualSize.examine` has found it, if it was called."""
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
        if self._round == round_id and self._sums is not None:
            self._sums.reset()
            self._round = None

    def merge(self, round_id: RoundId, contributions: int, down: str | None = None) -> None:
        """The outer step, and the next published value. It is served once it is durable. `down`: the codec of the
        update, if it was chosen."""
        assert self._round == round_id and self._sums is not None, f"nothing of {round_id} was accumulated"
        assert self._sums.count == contributions, f"{self._sums.count} sums where {contributions} were sealed"
        began = time.monotonic()
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
        published = Published(by, value)
        update = published.advance(self.outer.value)
        self.next = Served(round_id.base + 1, value, digest_of(value), round_id.base, update, by.name)
        self.measured = Measured(
            tuple(accepted for accepted, _ in self._added),
            norms,
            tuple(scale for _, scale in self._added),
            sums.merged_norm,
            sums.cosine,
            self.outer.momentum_norm(),
            published.step_norm,
            published.left_out,
            time.monotonic() - began,
        )

    # ------------------------------------------------------------------------------------------- in the disk thread

    def to_keep(self, record: VersionRecord) -> dict[str, Tensor]:
        """What must be durable with this version. Nothing of it changes before the core has heard that it is."""
        assert self.next is not None and self.next.version == record.version, f"{record.key()} was not merged"
        kept = {"published": self.next.value, "precise": self.outer.value, "usual": self.usual.state()}
        return kept | {f"outer.{name}": tensor for name, tensor in self.outer.state().items()}

    # ------------------------------------------------------------------------------------------- in the loop's thread

    def now_durable(self) -> None:
        assert self.next is not None, f"fragment {self.id}: durable before it was merged"
        old = self.served
        self._spare = old.value
        if self._holds[old.version]:
            self._spare = None
            self._old[old.version] = old
            if len(self._old) > MOST_OLD:
                del self._old[min(self._old)]  # a transfer that has begun goes on; who comes later asks anew
        self.served = self.next
        self.next = None
        for key in list(self.starts):
            if key[0] not in self._old:
                del self.starts[key]

    def hold(self, version: Version) -> Served | None:
        """Keep this version until `release`; None if it is not here any more."""
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

    def restore(self, kept: dict[str, Tensor]) -> None:
        """The outer optimizer as it was when this version was made durable."""
        if "precise" in kept:
            self.outer.value.copy_(kept["precise"])
            self.usual.load(kept["usual"])
            self.outer.load({name.removeprefix("outer."): t for name, t in kept.items() if name.startswith("outer.")})

    def as_kept(self, version: Version, kept: dict[str, Tensor]) -> HeldFragment:
        """Another one, with the version that is durable and its outer optimizer as it was then."""
        fresh = HeldFragment(self._plan, self.id, self._numerics, version, kept["published"])
        fresh.restore(kept)
        return fresh
