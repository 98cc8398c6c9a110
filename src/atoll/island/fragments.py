"""Tensors of a learner at the step boundary: anchors, copies and arrivals, one set per fragment.

The training thread copies and adopts between two steps. A background thread encodes and decodes. Neither waits for the
other: instead of a buffer that is in use, they use another one.

A rank of an island has whole fragments or only its rows of them (`RowFragment`). If every rank transfers its own rows,
no rank of the island has more than those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from atoll.core.types import NO_VERSION, AdoptMode, FragmentId, RoundId, Version
from atoll.island.rank_connection import RankCommand
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import CODECS, Codec
from atoll.tensors.learner_fragment import LearnerFragment
from atoll.tensors.model_view import ModelView
from atoll.tensors.outer_optimizer import UpdateApplier
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_stable_plan
from atoll.tensors.row_sharding import ByteLayout, EncodeRange, FragmentSharding, ShardEncoder, apply_rows
from atoll.tensors.sharding import shard_windows
from atoll.transport.buffers import ByteSink
from atoll.transport.wire import CODEC_NUMBERS, as_bytes

if TYPE_CHECKING:
    from atoll.island.leader import Leader

PROGRESS_INTERVAL_VALUES = 2**20
"""Values encoded between two progress calls. It keeps the calls rare and the wait of a slice short."""


class Buffer:
    """Reference-counted flat fragment in host memory."""

    __slots__ = ("ref_count", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.ref_count = 0


class FragmentBufferPool:
    """Free list of the buffers of one fragment.

    Allocating a new buffer at a step boundary would cost one page fault per 4 KiB.
    """

    def __init__(self, view: ModelView, p: FragmentId) -> None:
        self._view = view
        self._p = p
        self._free: list[Buffer] = []
        self._lock = threading.Lock()
        self.allocated = 0

    def acquire(self) -> Buffer:
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = Buffer(self._view.buffer(self._p))
            self.allocated += 1
        buffer.ref_count = 1
        return buffer

    def retain(self, buffer: Buffer) -> Buffer:
        with self._lock:
            buffer.ref_count += 1
        return buffer

    def release(self, *buffers: Buffer | None) -> None:
        with self._lock:
            for buffer in buffers:
                if buffer is None:
                    continue
                buffer.ref_count -= 1
                if buffer.ref_count == 0:
                    self._free.append(buffer)


class PulledCopy(NamedTuple):
    """Fragment as of the boundary at which it was pulled. The result of `ready` waits until it is in host memory."""

    round: RoundId
    codec: Codec
    buffer: Buffer
    anchor: Buffer
    ready: Future[Callable[[], None]]
    serial: int  # number of the copy of this fragment, the same on all ranks of an island


class IncomingValue:
    """Published value that is decoded while its bytes arrive."""

    def __init__(self, buffer: Buffer, applying: UpdateApplier) -> None:
        self.buffer = buffer
        self._applying = applying
        self._hashed = xxh3_128()

    def advance(self, available_bytes: int) -> None:
        """Decode the bytes that have arrived."""
        begin, end = self._applying.advance(available_bytes)
        self._hashed.update(as_bytes(self.buffer.tensor[begin:end].view(torch.uint8)))

    def digest(self) -> str:
        """Return the digest of the complete value, as `digest_of` does."""
        assert self._applying.applied == self.buffer.tensor.numel(), "the value is not complete"
        return self._hashed.hexdigest()


class CopyUnavailableError(RuntimeError):
    """A rank of the island has dropped this copy, because of a newer one or because the core has dropped it."""


class EncodedStrips(NamedTuple):
    """Part of a contribution that this rank sends."""

    layout: ByteLayout
    data: Tensor


class PreparedCopy(NamedTuple):
    """Copy that is ready to be encoded, except for values of other ranks in its last blocks."""

    serial: int
    values: Tensor  # values of all strips
    outgoing: Tensor  # values that other ranks encode


class FetchedRows(NamedTuple):
    """This rank's rows of a version, until all ranks have theirs and the digest of the whole value is verified."""

    value: Buffer
    digest: str  # digest of the whole value, from the syncer


class RowFragment:
    """Transfers of one fragment at one rank: its strips of a contribution, its rows of a version."""

    def __init__(
        self, tensors: LearnerFragment, buffers: FragmentBufferPool, share: FragmentSharding, rank: int
    ) -> None:
        self.p = tensors.id
        self.tensors = tensors
        self.buffers = buffers
        self.share = share
        self.rank = rank
        self.ranges = share.owned_ranges(rank)
        self._coder = ShardEncoder(tensors.upload_codec, share.numel, share.encode_ranges[rank])
        self._lock = threading.Lock()
        self._strips: tuple[int, Future[EncodedStrips]] | None = None  # of the newest requested copy
        self._is_merged: bool | None = None  # outcome of that copy, until it is passed to the coder
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

    def prepare_copy(self, copied: PulledCopy) -> PreparedCopy:
        """Compute the delta, or the values of buffers, once the copy is in host memory. Split off other ranks'
        values."""
        strips: Future[EncodedStrips] = Future()
        strips.set_running_or_notify_cancel()  # the cancellation of one waiter must not cancel the copy
        with self._lock:
            self._strips = copied.serial, strips
        copied.ready.result()()
        anchor = copied.anchor.tensor
        rounded = None
        if not self.tensors.is_f32_exact and not self.tensors.holds_buffers:
            rounded = self.buffers.acquire()
            self.tensors.view.round_to_dtype(self.p, anchor, rounded.tensor)
            anchor = rounded.tensor
        share, copy = self.share, copied.buffer.tensor

        def part(first: int, size: int) -> Tensor:
            rows = slice(first, first + size)
            return copy[rows].clone() if self.tensors.holds_buffers else anchor[rows] - copy[rows]

        values = torch.empty(share.encode_numel(self.rank))
        for move in share.local_transfers(self.rank):
            values[move.buffer_begin : move.buffer_begin + move.numel] = part(move.packed_begin, move.numel)
        parts = [part(move.packed_begin, move.numel) for move in share.sends_from(self.rank)]
        self.buffers.release(rounded)
        return PreparedCopy(copied.serial, values, torch.cat(parts) if parts else torch.empty(0))

    def encode_strips(self, prepared: PreparedCopy, incoming: Tensor, by: Codec) -> None:
        """Encode this rank's strips. `incoming`: values of other ranks at the ends of its blocks."""
        first = 0
        for move in self.share.receives_at(self.rank):
            prepared.values[move.buffer_begin : move.buffer_begin + move.numel] = incoming[first : first + move.numel]
            first += move.numel
        with self._lock:
            made = self._strips
            is_merged, self._is_merged = self._is_merged, None
        if is_merged is not None:
            self._coder.settle(is_merged)
        assert made is not None and made[0] == prepared.serial, f"copy {prepared.serial} is not the newest"
        made[1].set_result(EncodedStrips(*self._coder.encode(prepared.values, by)))

    def abort_encoding(self, serial: int, error: BaseException) -> None:
        """Drop a prepared copy that is not encoded. It may be requested again."""
        with self._lock:
            if self._strips is None or self._strips[0] != serial or self._strips[1].done():
                return
            made, self._strips = self._strips[1], None
        made.set_exception(error)

    def strips(self, serial: int) -> Future[EncodedStrips]:
        with self._lock:
            if self._strips is None or self._strips[0] != serial:
                raise CopyUnavailableError(f"this rank does not have copy {serial} of fragment {self.p}")
            return self._strips[1]

    def settle(self, merged: bool) -> None:
        """Record whether the last copy was merged. The coder receives the outcome before it encodes again.

        The thread that adopts calls this and must not wait for encoding. A version without a copy of this learner does
        not change the outcome of the last copy.
        """
        with self._lock:
            self._is_merged = merged or bool(self._is_merged)
            if self._strips is not None and self._strips[1].done():
                self._strips = None

    # ----------------------------------------------------------------------------------------------------------- down

    def decode(
        self,
        by: int,
        strips: list[EncodeRange],
        layout: ByteLayout,
        data: Tensor,
        base: Buffer | None,
        version: Version,
        digest: str,
    ) -> None:
        """Decode this rank's rows of a version, in the codec thread."""
        value = self.buffers.acquire()
        old = base.tensor if base is not None else None
        apply_rows(CODECS[by], strips, layout, data, self.ranges, old, value.tensor)
        with self._lock:
            older, self._fetched = self._fetched, {version: FetchedRows(value, digest)}
        self.buffers.release(*(each.value for each in older.values()))

    def fetched_digest(self, version: Version) -> str | None:
        with self._lock:
            found = self._fetched.get(version)
        return found.digest if found is not None else None

    def pop_fetched(self, version: Version) -> Buffer | None:
        """Return the fetched rows. The caller releases them. A rank without rows has nothing to fetch."""
        with self._lock:
            found = self._fetched.pop(version, None)
        if found is None:
            return None if self.ranges else self.buffers.acquire()
        return found.value


class FragmentTensors:
    """Tensors of one fragment at one rank of a learner.

    `anchor` is the published value that the core has adopted last, and `newest` the one that has arrived last.
    `adopted` is the anchor that the training thread has adopted; the core may have decided on the next one already.

    `rows` is this rank's part of the fragment if every rank transfers its own rows; then all tensors have those rows
    only. `leader` is set at rank 0 of an island of several ranks.
    """

    def __init__(
        self,
        view: ModelView,
        p: FragmentId,
        up: Codec,
        leader: Leader | None = None,
        share: FragmentSharding | None = None,
        rank: int = 0,
    ) -> None:
        self.p = p
        self.numel = view.numel(p)  # size of the flat tensors at this rank
        self.whole_numel = view.plan.numel(p)
        self.device_bytes = view.device_bytes(p)  # device memory during a copy or an adopt
        self.parameters = view.local_numel  # values of the whole model at this rank
        self.tensors = LearnerFragment(view, p, up.name)
        self.buffers = FragmentBufferPool(view, p)
        self.rows = RowFragment(self.tensors, self.buffers, share, rank) if share is not None else None
        self._view = view
        self._leader = leader
        self._newest_copy_ready: Future[Callable[[], None]] | None = None  # of the newest copy, made or not
        self._copies = 0
        self.anchor: Buffer | None = None
        self.newest: Buffer | None = None
        self.newest_version: Version = NO_VERSION
        self.pulled_copy: PulledCopy | None = None
        self.adopted: Buffer | None = None

    # ---------------------------------------------------------------------------------------- in the training thread

    def copy(self, copied: PulledCopy) -> None:
        """Copy at the step boundary. The buffer was taken before, so that the background thread can wait for it."""
        try:
            copied.ready.set_result(self._begin_copy(copied))
        except BaseException as error:
            copied.ready.set_exception(error)
            raise
        finally:
            self.release(copied.buffer, copied.anchor)

    def _begin_copy(self, copied: PulledCopy) -> Callable[[], None]:
        own = self._view.begin_read(self.p, copied.buffer.tensor)
        if self._leader is None or self.rows is not None:
            return own
        return self._gather_from_ranks(own, self._leader, RankCommand.COPY, copied.serial, copied.buffer)

    def _gather_from_ranks(
        self, own: Callable[[], None], leader: Leader, command: RankCommand, key: int, buffer: Buffer
    ) -> Callable[[], None]:
        def wait() -> None:
            own()
            leader.gather_rows(command, self.p, key, buffer.tensor)

        return wait

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors of this fragment. A tensor that is split by rows is in several fragments."""
        return [piece.tensor for piece, _, _ in self._view.plan.spans(self.p)]

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers of this fragment in this rank's host memory."""
        rows = self.rows.host_bytes if self.rows is not None else 0
        return 4 * self.buffers.allocated * self.numel + self.tensors.host_bytes + rows

    def copy_for_part(self) -> tuple[Buffer, Callable[[], None]]:
        """Return a buffer to release, and a function that waits until it contains the current fragment."""
        buffer = self.buffers.acquire()
        own = self._view.begin_read(self.p, buffer.tensor)
        leader = self._leader
        if leader is None:
            return buffer, own
        key = leader.staged_count
        if self.rows is None:
            return buffer, self._gather_from_ranks(own, leader, RankCommand.PART, key, buffer)
        # A part contains whole fragments. This buffer exists only while the part is written. Its reference count is one
        # too high, so that it is never reused for the rows, which have another size.
        whole = Buffer(torch.empty(0))
        whole.ref_count = 2

        def wait() -> None:
            own()
            whole.tensor = torch.empty(self.whole_numel)
            for window in shard_windows(self._view.plan, self.p, self._view.boxes):
                window.view(whole.tensor).copy_(window.view_packed(buffer.tensor))
            self.release(buffer)
            leader.gather_rows(RankCommand.PART, self.p, key, whole.tensor)

        return whole, wait

    def adopt(self, mode: AdoptMode, value: Buffer, reference: Buffer | None, alpha: float) -> None:
        before, self.adopted = self.adopted, self.buffers.retain(value)
        self.buffers.release(before)
        scratch = self.buffers.acquire() if mode == "carry" and not self.tensors.is_f32_exact else None
        base, spare = (each.tensor if each is not None else None for each in (reference, scratch))
        self.tensors.adopt(mode, value.tensor, base, alpha, spare)
        self.buffers.release(scratch)

    # ------------------------------------------------------------------------------------- with the learner's lock held

    def prepare_copy(self, round_id: RoundId, up: str | None = None) -> PulledCopy:
        """Return the copy that `copy` fills. `up` is its codec, or None for the run's.

        The copy has its own references to its buffers. Without them: (1) a copy is prepared, (2) a version that is
        adopted at the same boundary drops it, (3) its buffer is reused before `copy` writes to it.
        """
        assert self.anchor is not None, f"fragment {self.p} is pulled before it was ever adopted"
        self._drop_copy()
        anchor = self.buffers.retain(self.anchor)
        by = self.tensors.select_codec(up)
        self._copies += 1
        self.pulled_copy = PulledCopy(round_id, by, self.buffers.acquire(), anchor, Future(), self._copies)
        self._newest_copy_ready = self.pulled_copy.ready
        self.buffers.retain(self.pulled_copy.buffer)
        self.buffers.retain(anchor)
        return self.pulled_copy

    def prepare_adoption(self, merged_copy: bool) -> tuple[Buffer, Buffer | None]:
        """Return the new value, and the reference for the steps since. The caller releases both."""
        assert self.newest is not None, f"fragment {self.p} is adopted before it arrived"
        value, old = self.newest, self.anchor
        reference = self.pulled_copy.buffer if merged_copy and self.pulled_copy is not None else old
        if reference is not None:
            self.buffers.retain(reference)
        self.anchor = self.buffers.retain(value)
        self.buffers.release(old)
        self._drop_copy()
        return self.buffers.retain(value), reference

    def _drop_copy(self) -> None:
        if self.pulled_copy is not None:
            self.buffers.release(self.pulled_copy.buffer)
            self.buffers.release(self.pulled_copy.anchor)
            self.pulled_copy = None

    def set_newest(self, version: Version, value: Buffer) -> None:
        self.buffers.release(self.newest)
        self.newest = value
        self.newest_version = version

    def release(self, *buffers: Buffer | None) -> None:
        self.buffers.release(*buffers)

    def retain_copy(self) -> PulledCopy | None:
        """Return the copy for the background thread, which releases both buffers."""
        if self.pulled_copy is not None:
            self.buffers.retain(self.pulled_copy.buffer)
            self.buffers.retain(self.pulled_copy.anchor)
        return self.pulled_copy

    def cancel_copy(self) -> None:
        """Cancel the newest copy if it was not made: the training thread has ended."""
        if self._newest_copy_ready is not None:
            self._newest_copy_ready.cancel()

    def retain_newest(self, base: Version) -> Buffer | None:
        """Return the newest value if it is version `base`, to which an update is added."""
        return self.buffers.retain(self.newest) if self.newest is not None and self.newest_version == base else None

    # ---------------------------------------------------------------------------------------- in the background thread

    def encode(self, copied: PulledCopy, sink: ByteSink) -> None:
        """Encode the delta A_p - theta_p, or the values of buffers. Report bytes as they are written. The same round
        gives the same bytes."""
        encoded = self.tensors.encoded_contribution(copied.round)
        if encoded is not None:
            sink.set_buffer(encoded)
            sink.mark_written([(0, sink.size)])
            return
        copied.ready.result()()
        delta, by = self.buffers.acquire(), copied.codec
        data = by.allocate(self.numel, None)
        sink.set_buffer(data)
        reported = 0

        def report(begin: int, end: int) -> None:
            nonlocal reported
            if end == self.numel or end - reported >= PROGRESS_INTERVAL_VALUES:
                sink.mark_written(by.byte_ranges(self.numel, reported, end))
                reported = end

        values = copied.anchor.tensor, copied.buffer.tensor, delta.tensor
        self.tensors.encode(copied.round, by, *values, data, report)
        self.buffers.release(delta)

    def settle(self, merged: bool) -> None:
        """Record whether the contribution was merged: it is in the published value, or never will be."""
        (self.rows if self.rows is not None else self.tensors).settle(merged)

    def begin_value(self, base: Buffer | None, data: Tensor, down: int) -> IncomingValue:
        """Begin to decode an update to `base`, or a full value. `data` are its bytes, which may still arrive, and
        `down` is the number of their codec."""
        value = self.buffers.acquire()
        return IncomingValue(
            value, UpdateApplier(CODECS[down], base.tensor if base is not None else None, data, value.tensor)
        )

    def decode_whole(self, data: Tensor) -> IncomingValue:
        incoming = self.begin_value(None, data, CODEC_NUMBERS["f32"])
        incoming.advance(data.numel())
        return incoming

    def scatter_version(self, version: Version, value: Buffer) -> None:
        """Send every rank of the island its rows of the value."""
        if self._leader is not None:
            self._leader.scatter_version(self.p, version, value.tensor)


def plan_for_run(model: nn.Module, settings: RunSettings) -> FragmentPlan:
    """Return the fragment plan of this model for the settings of a run."""
    tensors = describe_tensors(model, settings.numerics.embeddings)
    return make_stable_plan(tensors, settings.config.fragments, settings.numerics.plan)
