"""A learner's tensors at the step boundary: anchors, copies and arrivals, one set per fragment.

The training thread copies and adopts, in between two steps; one background thread encodes and decodes. Neither waits
for the other: a buffer that is still in use is left alone, and another one taken.

A rank of an island holds whole fragments or its own rows of them (`RowFragment`). Where every rank sends and fetches
its own rows, no rank of the island has more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from atoll.core.types import NOTHING, AdoptHow, FragmentId, RoundId, Version
from atoll.island.rank_connection import Order
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import CODECS, Codec
from atoll.tensors.learner_fragment import LearnerFragment
from atoll.tensors.model_view import ModelView
from atoll.tensors.outer import Applying
from atoll.tensors.plan import FragmentPlan, settled_plan, tensors_of
from atoll.tensors.row_sharding import ByteLayout, EncodeRange, RowShare, StripCoder, apply_rows
from atoll.tensors.sharding import windows
from atoll.transport.buffers import ByteSink
from atoll.transport.wire import CODEC_NUMBERS, as_bytes

if TYPE_CHECKING:
    from atoll.island.leader import Leader

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

    def release(self, *buffers: Buffer | None) -> None:
        with self._lock:
            for buffer in buffers:
                if buffer is None:
                    continue
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


class Strips(NamedTuple):
    """What this rank sends of a contribution."""

    laid: ByteLayout
    data: Tensor


class PreparedCopy(NamedTuple):
    """A copy that is ready to be encoded but for what other ranks have of its last blocks."""

    serial: int
    values: Tensor  # of all strips
    given: Tensor  # what other ranks encode


class FetchedRows(NamedTuple):
    """This rank's rows of a version, until all ranks have theirs and the whole was found to be what was published."""

    value: Buffer
    digest: str  # of the whole value, as the syncer told it


class RowFragment:
    """What one rank sends and fetches of a fragment: its strips of a contribution, its rows of a version."""

    def __init__(self, tensors: LearnerFragment, buffers: Buffers, share: RowShare, rank: int) -> None:
        self.p = tensors.id
        self.tensors = tensors
        self.buffers = buffers
        self.dealt = share
        self.rank = rank
        self.stretches = share.own(rank)
        self._coder = StripCoder(tensors.up, share.numel, share.strips[rank])
        self._lock = threading.Lock()
        self._strips: tuple[int, Future[Strips]] | None = None  # of the newest copy that was asked for
        self._is_merged: bool | None = None  # what became of it, where the coder has not been told
        self._fetched: dict[Version, FetchedRows] = {}

    @property
    def host_bytes(self) -> int:
        with self._lock:
            made = self._strips[1] if self._strips is not None else None
        sent = made.result().data.nbytes if made is not None and made.done() and not made.exception() else 0
        return self._coder.host_bytes + sent

    # ------------------------------------------------------------------------------------------------------------- up

    def is_encoded(self, serial: int) -> bool:
        with self._lock:
            return self._strips is not None and self._strips[0] == serial

    def prepare(self, copied: Copied) -> PreparedCopy:
        """When the copy is in host memory: the delta, or the values of buffers, and of it what goes to others."""
        strips: Future[Strips] = Future()
        strips.set_running_or_notify_cancel()  # who waits for it and is cancelled does not cancel it
        with self._lock:
            self._strips = copied.serial, strips
        copied.taken.result()()
        anchor = copied.anchor.tensor
        held = None
        if not self.tensors.is_exact and not self.tensors.holds_buffers:
            held = self.buffers.take()
            self.tensors.view.as_held(self.p, anchor, held.tensor)
            anchor = held.tensor
        share, copy = self.dealt, copied.buffer.tensor

        def part(first: int, size: int) -> Tensor:
            rows = slice(first, first + size)
            return copy[rows].clone() if self.tensors.holds_buffers else anchor[rows] - copy[rows]

        values = torch.empty(share.strip_numel(self.rank))
        for move in share.kept(self.rank):
            values[move.at : move.at + move.size] = part(move.first, move.size)
        parts = [part(move.first, move.size) for move in share.given(self.rank)]
        self.buffers.release(held)
        return PreparedCopy(copied.serial, values, torch.cat(parts) if parts else torch.empty(0))

    def encode_strips(self, prepared: PreparedCopy, taken: Tensor, by: Codec) -> None:
        """`taken`: the values of other ranks that end its blocks."""
        first = 0
        for move in self.dealt.taken(self.rank):
            prepared.values[move.at : move.at + move.size] = taken[first : first + move.size]
            first += move.size
        with self._lock:
            made = self._strips
            is_merged, self._is_merged = self._is_merged, None
        if is_merged is not None:
            self._coder.settle(is_merged)
        assert made is not None and made[0] == prepared.serial, f"copy {prepared.serial} is not the newest"
        made[1].set_result(Strips(*self._coder.encode(prepared.values, by)))

    def give_up(self, serial: int, wrong: BaseException) -> None:
        """What was prepared is not encoded; it may be asked for again."""
        with self._lock:
            if self._strips is None or self._strips[0] != serial or self._strips[1].done():
                return
            made, self._strips = self._strips[1], None
        made.set_exception(wrong)

    def strips(self, serial: int) -> Future[Strips]:
        with self._lock:
            if self._strips is None or self._strips[0] != serial:
                raise CopyGone(f"this rank does not have copy {serial} of fragment {self.p}")
            return self._strips[1]

    def settle(self, merged: bool) -> None:
        """From the thread that adopts, which does not wait for one that encodes: the coder is told before it encodes
        again. A version without a copy of ours changes nothing of what became of the last one."""
        with self._lock:
            self._is_merged = merged or bool(self._is_merged)
            if self._strips is not None and self._strips[1].done():
                self._strips = None

    # ----------------------------------------------------------------------------------------------------------- down

    def decode(
        self,
        by: int,
        strips: list[EncodeRange],
        laid: ByteLayout,
        data: Tensor,
        base: Buffer | None,
        version: Version,
        digest: str,
    ) -> None:
        """In the computing thread: its rows of a version."""
        value = self.buffers.take()
        old = base.tensor if base is not None else None
        apply_rows(CODECS[by], strips, laid, data, self.stretches, old, value.tensor)
        with self._lock:
            older, self._fetched = self._fetched, {version: FetchedRows(value, digest)}
        self.buffers.release(*(each.value for each in older.values()))

    def fetched_digest(self, version: Version) -> str | None:
        with self._lock:
            found = self._fetched.get(version)
        return found.digest if found is not None else None

    def take_fetched(self, version: Version) -> Buffer | None:
        """It is whoever's asks now. A rank that gives no rows of this fragment has nothing to fetch."""
        with self._lock:
            found = self._fetched.pop(version, None)
        if found is None:
            return None if self.stretches else self.buffers.take()
        return found.value


class FragmentTensors:
    """One fragment at one rank of a learner. `anchor`: the published value that was last adopted; `newest`: that
    arrived. `adopted` is the anchor as the training thread knows it: the core may have decided on the next one already.

    `rows`: this rank's part of the fragment, where every rank sends and fetches its own; then all tensors hold those
    rows only. `leader`: of an island, at rank 0.
    """

    def __init__(
        self,
        view: ModelView,
        p: FragmentId,
        up: Codec,
        leader: Leader | None = None,
        share: RowShare | None = None,
        rank: int = 0,
    ) -> None:
        self.p = p
        self.numel = view.numel(p)  # of its flat tensors here
        self.whole_numel = view.plan.numel(p)
        self.device_bytes = view.device_bytes(p)  # while it is copied and adopted
        self.parameters = view.local_numel  # of the whole model, what this rank holds
        self.tensors = LearnerFragment(view, p, up.name)
        self.buffers = Buffers(view, p)
        self.rows = RowFragment(self.tensors, self.buffers, share, rank) if share is not None else None
        self._view = view
        self._leader = leader
        self._asked: Future[Callable[[], None]] | None = None  # of the newest copy, made or not
        self._copies = 0
        self.anchor: Buffer | None = None
        self.newest: Buffer | None = None
        self.newest_version: Version = NOTHING
        self.copied: Copied | None = None
        self.adopted: Buffer | None = None

    # ---------------------------------------------------------------------------------------- in the training thread

    def copy(self, copied: Copied) -> None:
        """At the step boundary. Its buffer was taken when the core asked, so that the background may wait for it."""
        try:
            copied.taken.set_result(self._begin_copy(copied))
        except BaseException as wrong:
            copied.taken.set_exception(wrong)
            raise
        finally:
            self.release(copied.buffer, copied.anchor)

    def _begin_copy(self, copied: Copied) -> Callable[[], None]:
        own = self._view.begin_read(self.p, copied.buffer.tensor)
        if self._leader is None or self.rows is not None:
            return own
        return self._with_others(own, self._leader, Order.COPY, copied.serial, copied.buffer)

    def _with_others(
        self, own: Callable[[], None], leader: Leader, order: Order, key: int, buffer: Buffer
    ) -> Callable[[], None]:
        def wait() -> None:
            own()
            leader.gather(order, self.p, key, buffer.tensor)

        return wait

    @property
    def tensor_names(self) -> list[str]:
        """Those of the model of which it has something; one that is cut by rows is in several fragments."""
        return [piece.tensor for piece, _, _ in self._view.plan.spans(self.p)]

    @property
    def host_bytes(self) -> int:
        """Of all buffers of this fragment in the memory of this rank's host."""
        rows = self.rows.host_bytes if self.rows is not None else 0
        return 4 * self.buffers.made * self.numel + self.tensors.host_bytes + rows

    def copy_for_part(self) -> tuple[Buffer, Callable[[], None]]:
        """The fragment as it stands, in a buffer that holds it once the function has run. It is to be released."""
        buffer = self.buffers.take()
        own = self._view.begin_read(self.p, buffer.tensor)
        leader = self._leader
        if leader is None:
            return buffer, own
        key = leader.parcel
        if self.rows is None:
            return buffer, self._with_others(own, leader, Order.PART, key, buffer)
        # A part holds whole fragments. This one exists only while it is written. It has one holder too many, so that
        # it never becomes one of the buffers, which have another size.
        whole = Buffer(torch.empty(0))
        whole.holders = 2

        def wait() -> None:
            own()
            whole.tensor = torch.empty(self.whole_numel)
            for window in windows(self._view.plan, self.p, self._view.boxes):
                window.of(whole.tensor).copy_(window.of_packed(buffer.tensor))
            self.release(buffer)
            leader.gather(Order.PART, self.p, key, whole.tensor)

        return whole, wait

    def adopt(self, how: AdoptHow, value: Buffer, reference: Buffer | None, alpha: float) -> None:
        before, self.adopted = self.adopted, self.buffers.hold(value)
        self.buffers.release(before)
        scratch = self.buffers.take() if how == "carry" and not self.tensors.is_exact else None
        base, spare = (each.tensor if each is not None else None for each in (reference, scratch))
        self.tensors.adopt(how, value.tensor, base, alpha, spare)
        self.buffers.release(scratch)

    # ------------------------------------------------------------------------------------- with the learner's lock held

    def will_copy(self, round_id: RoundId, up: str | None = None) -> Copied:
        """What `copy` is to fill, and what it will travel in (None: what the run says). It holds its buffers until
        then: a version that is adopted at the same boundary makes the copy forgotten before it was made, and its buffer
        must not become somebody else's meanwhile."""
        assert self.anchor is not None, f"fragment {self.p} is pulled before it was ever adopted"
        self._forget_copy()
        anchor = self.buffers.hold(self.anchor)
        by = self.tensors.codec_for(up)
        self._copies += 1
        self.copied = Copied(round_id, by, self.buffers.take(), anchor, Future(), self._copies)
        self._asked = self.copied.taken
        self.buffers.hold(self.copied.buffer)
        self.buffers.hold(anchor)
        return self.copied

    def will_adopt(self, merged_copy: bool) -> tuple[Buffer, Buffer | None]:
        """The new value, and what the steps since are measured against. Both are to be released afterwards."""
        assert self.newest is not None, f"fragment {self.p} is adopted before it arrived"
        value, old = self.newest, self.anchor
        reference = self.copied.buffer if merged_copy and self.copied is not None else old
        if reference is not None:
            self.buffers.hold(reference)
        self.anchor = self.buffers.hold(value)
        self.buffers.release(old)
        self._forget_copy()
        return self.buffers.hold(value), reference

    def _forget_copy(self) -> None:
        if self.copied is not None:
            self.buffers.release(self.copied.buffer)
            self.buffers.release(self.copied.anchor)
            self.copied = None

    def arrived(self, version: Version, value: Buffer) -> None:
        self.buffers.release(self.newest)
        self.newest = value
        self.newest_version = version

    def release(self, *buffers: Buffer | None) -> None:
        self.buffers.release(*buffers)

    def hold_copy(self) -> Copied | None:
        """For the background, which gives both buffers back with `release`."""
        if self.copied is not None:
            self.buffers.hold(self.copied.buffer)
            self.buffers.hold(self.copied.anchor)
        return self.copied

    def abandon(self) -> None:
        """The training thread is gone: whoever waits for a copy that it has not made waits in vain."""
        if self._asked is not None:
            self._asked.cancel()

    def hold_newest(self, base: Version) -> Buffer | None:
        """The value that an update to `base` is added to, if it is here."""
        return self.buffers.hold(self.newest) if self.newest is not None and self.newest_version == base else None

    # ---------------------------------------------------------------------------------------- in the background thread

    def encode(self, copied: Copied, growing: ByteSink) -> None:
        """Encode the delta A_p - theta_p, or the values of buffers. Bytes are announced as they are written; they are
        the same again for the same round."""
        encoded = self.tensors.encoded(copied.round)
        if encoded is not None:
            growing.begins(encoded)
            growing.written([(0, growing.size)])
            return
        copied.taken.result()()
        delta, by = self.buffers.take(), copied.codec
        data = by.room(self.numel, None)
        growing.begins(data)
        told = 0

        def tell(begin: int, end: int) -> None:
            nonlocal told
            if end == self.numel or end - told >= TOLD_VALUES:
                growing.written(by.places(self.numel, told, end))
                told = end

        values = copied.anchor.tensor, copied.buffer.tensor, delta.tensor
        self.tensors.encode(copied.round, by, *values, data, tell)
        self.buffers.release(delta)

    def settle(self, merged: bool) -> None:
        """What was sent is in the published value, or never will be."""
        (self.rows if self.rows is not None else self.tensors).settle(merged)

    def begin_value(self, base: Buffer | None, data: Tensor, down: int) -> ValueInWork:
        """`data`: the bytes of an update to `base`, or of the whole value, which may still come in. `down`: the number
        of their codec."""
        value = self.buffers.take()
        return ValueInWork(value, Applying(CODECS[down], base.tensor if base is not None else None, data, value.tensor))

    def decode_whole(self, data: Tensor) -> ValueInWork:
        work = self.begin_value(None, data, CODEC_NUMBERS["f32"])
        work.go_on(data.numel())
        return work

    def share(self, version: Version, value: Buffer) -> None:
        """Every rank of the island has its rows of the value when this returns."""
        if self._leader is not None:
            self._leader.share(self.p, version, value.tensor)


def plan_of(model: nn.Module, settings: RunSettings) -> FragmentPlan:
    """Return the plan of this model by the settings of a run."""
    tensors = tensors_of(model, settings.numerics.embeddings)
    return settled_plan(tensors, settings.config.fragments, settings.numerics.plan)
