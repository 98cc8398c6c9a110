"""A learner's tensors at the step boundary: anchors, copies and arrivals, one set per fragment.

The training thread copies and adopts, in between two steps; one background thread encodes and decodes. Neither waits
for the other: a buffer that is still in use is left alone, and another one taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from atoll.core.types import NOTHING, AdoptHow, FragmentId, RoundId, Version
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import CODECS, Codec, Feedback, codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.outer import Applying
from atoll.tensors.plan import FragmentPlan, settled_plan, tensors_of
from atoll.transport.buffers import ByteSink
from atoll.transport.wire import CODEC_NUMBERS, as_bytes

TOLD_VALUES = 2**20
"""Encoded between two words about it, so that words are few and slices wait for little."""


class Buffer:
    """A flat fragment in host memory, and how many hold it."""

    __slots__ = ("holders", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.holders = 0


class Buffers:
    """Buffers of one fragment, used again: a fresh one costs a page fault every 4 KiB, at a step boundary."""

    def __init__(self, view: ModelView, p: FragmentId) -> None:
        self._view = view
        self._p = p
        self._free: list[Buffer] = []
        self._lock = threading.Lock()
        self.made = 0

    def take(self) -> Buffer:
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = Buffer(self._view.buffer(self._p))
            self.made += 1
        buffer.holders = 1
        return buffer

    def hold(self, buffer: Buffer) -> Buffer:
        with self._lock:
            buffer.holders += 1
        return buffer

    def release(self, buffer: Buffer | None) -> None:
        if buffer is None:
            return
        with self._lock:
            buffer.holders -= 1
            if buffer.holders == 0:
                self._free.append(buffer)


class Copied(NamedTuple):
    """The fragment as it stood when it was pulled. The result of `taken` waits until it is all in host memory."""

    round: RoundId
    codec: Codec
    buffer: Buffer
    anchor: Buffer
    taken: Future[Callable[[], None]]
    serial: int  # of the copies of this fragment, the same on all ranks of an island


class ValueInWork:
    """A published value that is put together while its bytes come in."""

    def __init__(self, buffer: Buffer, applying: Applying) -> None:
        self.buffer = buffer
        self._applying = applying
        self._hashed = xxh3_128()

    def go_on(self, first_bytes: int) -> None:
        """So many of its bytes are here."""
        begin, end = self._applying.go_on(first_bytes)
        self._hashed.update(as_bytes(self.buffer.tensor[begin:end].view(torch.uint8)))

    def digest(self) -> str:
        """Of the value, once it is whole: that of `digest_of`."""
        assert self._applying.done == self.buffer.tensor.numel(), "not all of it is here"
        return self._hashed.hexdigest()


class CopyGone(RuntimeError):  # noqa: N818 - as a rule nobody wants that copy any more
    """Another rank of the island has a newer copy, or none, because the core has forgotten this one meanwhile."""


class FragmentTensors:
    """One fragment at one learner. `anchor`: the published value that was last adopted; `newest`: that arrived.

    `adopted` is the anchor as the training thread knows it: the core may have decided on the next one already.
    """

    def __init__(self, view: ModelView, p: FragmentId, up: Codec) -> None:
        self.p = p
        self.holds_buffers = view.plan.holds_buffers(p)
        self.numel = view.numel(p)  # of its flat tensors here
        self.whole_numel = view.plan.numel(p)
        self.device_bytes = view.device_bytes(p)  # while it is copied and adopted
        self.parameters = view.local_numel  # of the whole model, what this rank holds
        self._view = view
        self._up = codec(*self.codecs((up.name,)))
        self._buffers = Buffers(view, p)
        self._exact = view.is_exact(p)
        self._feedback = Feedback(self._up, view.numel(p))
        self._encoded: tuple[RoundId, Tensor] | None = None
        self._asked: Future[Callable[[], None]] | None = None  # of the newest copy, made or not
        self._copies = 0
        self.anchor: Buffer | None = None
        self.newest: Buffer | None = None
        self.newest_version: Version = NOTHING
        self.copied: Copied | None = None
        self.adopted: Buffer | None = None

    def codecs(self, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the codecs that it may travel in, of those that the run has chosen."""
        return self._view.plan.codecs(self.p, chosen)

    # ---------------------------------------------------------------------------------------- in the training thread

    def copy(self, copied: Copied) -> None:
        """At the step boundary. Its buffer was taken when the core asked, so that the background may wait for it."""
        try:
            copied.taken.set_result(self.begin_copy(copied))
        except BaseException as wrong:
            copied.taken.set_exception(wrong)
            raise
        finally:
            self.release(copied.buffer, copied.anchor)

    def begin_copy(self, copied: Copied) -> Callable[[], None]:
        return self._view.begin_read(self.p, copied.buffer.tensor)

    @property
    def tensors(self) -> list[str]:
        """Those of the model of which it has something; one that is cut by rows is in several fragments."""
        return [piece.tensor for piece, _, _ in self._view.plan.spans(self.p)]

    @property
    def host_bytes(self) -> int:
        """Of all buffers of this fragment in the memory of this rank's host."""
        encoded = self._encoded[1].nbytes if self._encoded is not None else 0
        return 4 * (self._buffers.made * self.numel + 2 * self._feedback.residual.numel()) + encoded

    def copy_for_part(self) -> tuple[Buffer, Callable[[], None]]:
        """The fragment as it stands, in a buffer that holds it once the function has run. It is to be released."""
        buffer = self._buffers.take()
        return buffer, self._view.begin_read(self.p, buffer.tensor)

    def adopt(self, how: AdoptHow, value: Buffer, reference: Buffer | None, alpha: float) -> None:
        before, self.adopted = self.adopted, self._buffers.hold(value)
        self._buffers.release(before)
        if how == "carry" and reference is not None and not self._exact:
            held = self._buffers.take()
            self._view.as_held(self.p, reference.tensor, held.tensor)
            self._view.adopt(self.p, how, value.tensor, held.tensor, alpha)
            self._buffers.release(held)
        else:
            self._view.adopt(self.p, how, value.tensor, reference.tensor if reference is not None else None, alpha)

    # ------------------------------------------------------------------------------------- with the learner's lock held

    def will_copy(self, round_id: RoundId, up: str | None = None) -> Copied:
        """What `copy` is to fill, and what it will travel in (None: what the run says). It holds its buffers until
        then: a version that is adopted at the same boundary makes the copy forgotten before it was made, and its buffer
        must not become somebody else's meanwhile."""
        assert self.anchor is not None, f"fragment {self.p} is pulled before it was ever adopted"
        self._forget_copy()
        anchor = self._buffers.hold(self.anchor)
        by = codec(*self.codecs((up,))) if up is not None else self._up
        self._copies += 1
        self.copied = Copied(round_id, by, self._buffers.take(), anchor, Future(), self._copies)
        self._asked = self.copied.taken
        self._buffers.hold(self.copied.buffer)
        self._buffers.hold(anchor)
        return self.copied

    def will_adopt(self, merged_copy: bool) -> tuple[Buffer, Buffer | None]:
        """The new value, and what the steps since are measured against. Both are to be released afterwards."""
        assert self.newest is not None, f"fragment {self.p} is adopted before it arrived"
        value, old = self.newest, self.anchor
        reference = self.copied.buffer if merged_copy and self.copied is not None else old
        if reference is not None:
            self._buffers.hold(reference)
        self.anchor = self._buffers.hold(value)
        self._buffers.release(old)
        self._forget_copy()
        return self._buffers.hold(value), reference

    def _forget_copy(self) -> None:
        if self.copied is not None:
            self._buffers.release(self.copied.buffer)
            self._buffers.release(self.copied.anchor)
            self.copied = None

    def arrived(self, version: Version, value: Buffer) -> None:
        self._buffers.release(self.newest)
        self.newest = value
        self.newest_version = version

    def hold(self, buffer: Buffer) -> Buffer:
        return self._buffers.hold(buffer)

    def release(self, *buffers: Buffer | None) -> None:
        for buffer in buffers:
            self._buffers.release(buffer)

    def hold_copy(self) -> Copied | None:
        """For the background, which gives both buffers back with `release`."""
        if self.copied is not None:
            self._buffers.hold(self.copied.buffer)
            self._buffers.hold(self.copied.anchor)
        return self.copied

    def abandon(self) -> None:
        """The training thread is gone: whoever waits for a copy that it has not made waits in vain."""
        if self._asked is not None:
            self._asked.cancel()

    def hold_newest(self, base: Version) -> Buffer | None:
        """The value that an update to `base` is added to, if it is here."""
        return self._buffers.hold(self.newest) if self.newest is not None and self.newest_version == base else None

    # ---------------------------------------------------------------------------------------- in the background thread

    def encode(self, copied: Copied, growing: ByteSink) -> None:
        """Encode the delta A_p - theta_p, or the values of buffers. Bytes are announced as they are written; they are
        the same again for the same round."""
        if self._encoded is not None and self._encoded[0] == copied.round:
            growing.begins(self._encoded[1])
            growing.written([(0, growing.size)])
            return
        copied.taken.result()()
        delta = self._buffers.take()
        if self.holds_buffers:
            delta.tensor.copy_(copied.buffer.tensor)
        elif self._exact:
            torch.sub(copied.anchor.tensor, copied.buffer.tensor, out=delta.tensor)
        else:
            self._view.as_held(self.p, copied.anchor.tensor, delta.tensor)
            delta.tensor.sub_(copied.buffer.tensor)
        by = copied.codec
        data = by.room(self.numel, None)
        growing.begins(data)
        told = 0

        def tell(begin: int, end: int) -> None:
            nonlocal told
            if end == self.numel or end - told >= TOLD_VALUES:
                growing.written(by.places(self.numel, told, end))
                told = end

        self._feedback.encode(delta.tensor, data, by, tell)
        self._buffers.release(delta)
        self._encoded = (copied.round, data)

    def settle(self, merged: bool) -> None:
        """What was sent is in the published value, or never will be."""
        self._feedback.settle(merged)
        self._encoded = None

    def begin_value(self, base: Buffer | None, data: Tensor, down: int) -> ValueInWork:
        """`data`: the bytes of an update to `base`, or of the whole value, which may still come in. `down`: the number
        of their codec."""
        value = self._buffers.take()
        return ValueInWork(value, Applying(CODECS[down], base.tensor if base is not None else None, data, value.tensor))

    def decode_whole(self, data: Tensor) -> ValueInWork:
        work = self.begin_value(None, data, CODEC_NUMBERS["f32"])
        work.go_on(data.numel())
        return work

    def share(self, version: Version, value: Buffer) -> None:
        """Every rank of the island has its rows of the value when this returns."""


def plan_of(model: nn.Module, settings: RunSettings) -> FragmentPlan:
    """Return the plan of this model by the settings of a run."""
    tensors = tensors_of(model, settings.numerics.embeddings)
    return settled_plan(tensors, settings.config.fragments, settings.numerics.plan)
