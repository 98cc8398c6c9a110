"""One fragment at a rank that holds its own rows of it: anchor, copies, arrivals and what rounding left out are of
those rows only. Where every rank sends and fetches its own, no rank of the island has more."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.types import AdoptHow, FragmentId, Version
from atoll.errors import IslandBroken
from atoll.island.fragments import Buffer, Copied, CopyGone, FragmentTensors
from atoll.tensors.codecs import CODECS, Codec, codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.row_sharding import Laid, RowShare, Strip, StripCoder, apply_rows

MOST_ARRIVALS = 16


class Strips(NamedTuple):
    """What this rank sends of a contribution."""

    laid: Laid
    data: Tensor


class Prepared(NamedTuple):
    """A copy that is ready to be encoded but for what other ranks have of its last blocks."""

    serial: int
    values: Tensor  # of all strips
    given: Tensor  # what other ranks encode


class Fetched(NamedTuple):
    """This rank's rows of a version, until all ranks have theirs and the whole was found to be what was published."""

    value: Buffer
    digest: str  # of the whole value, as the syncer told it


class RowFragment(FragmentTensors):
    def __init__(self, view: ModelView, p: FragmentId, up: Codec, share: RowShare, rank: int) -> None:
        super().__init__(view, p, codec("f32"))
        self.dealt = share
        self.rank = rank
        self.stretches = share.own(rank)
        self._up = codec(*self.codecs((up.name,)))
        self._coder = StripCoder(self._up, share.numel, share.strips[rank])
        self._lock = threading.Lock()
        self._strips: tuple[int, Future[Strips]] | None = None  # of the newest copy that was asked for
        self._is_merged: bool | None = None  # what became of it, where the coder has not been told
        self._fetched: dict[Version, Fetched] = {}

    @property
    def generation(self) -> int:
        """At the leader: of incarnations."""
        return 0

    @property
    def host_bytes(self) -> int:
        with self._lock:
            made = self._strips[1] if self._strips is not None else None
        sent = made.result().data.nbytes if made is not None and made.done() and not made.exception() else 0
        return super().host_bytes + self._coder.host_bytes + sent

    # ------------------------------------------------------------------------------------------------------------- up

    def is_encoded(self, serial: int) -> bool:
        with self._lock:
            return self._strips is not None and self._strips[0] == serial

    def prepare(self, copied: Copied) -> Prepared:
        """When the copy is in host memory: the delta, or the values of buffers, and of it what goes to others."""
        strips: Future[Strips] = Future()
        strips.set_running_or_notify_cancel()  # who waits for it and is cancelled does not cancel it
        with self._lock:
            self._strips = copied.serial, strips
        copied.taken.result()()
        anchor = copied.anchor.tensor
        held = None
        if not self._exact and not self.holds_buffers:
            held = self._buffers.take()
            self._view.as_held(self.p, anchor, held.tensor)
            anchor = held.tensor
        share, copy = self.dealt, copied.buffer.tensor

        def part(first: int, size: int) -> Tensor:
            rows = slice(first, first + size)
            return copy[rows].clone() if self.holds_buffers else anchor[rows] - copy[rows]

        values = torch.empty(share.strip_numel(self.rank))
        for move in share.kept(self.rank):
            values[move.at : move.at + move.size] = part(move.first, move.size)
        parts = [part(move.first, move.size) for move in share.given(self.rank)]
        self.release(held)
        return Prepared(copied.serial, values, torch.cat(parts) if parts else torch.empty(0))

    def encode_strips(self, prepared: Prepared, taken: Tensor, by: Codec) -> None:
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
        self, by: int, strips: list[Strip], laid: Laid, data: Tensor, base: Buffer | None, version: Version, digest: str
    ) -> None:
        """In the computing thread: its rows of a version."""
        value = self._buffers.take()
        old = base.tensor if base is not None else None
        apply_rows(CODECS[by], strips, laid, data, self.stretches, old, value.tensor)
        with self._lock:
            older, self._fetched = self._fetched, {version: Fetched(value, digest)}
        for each in older.values():
            self.release(each.value)

    def fetched_digest(self, version: Version) -> str | None:
        with self._lock:
            found = self._fetched.get(version)
        return found.digest if found is not None else None

    def take_fetched(self, version: Version) -> Buffer | None:
        """It is whoever's asks now. A rank that gives no rows of this fragment has nothing to fetch."""
        with self._lock:
            found = self._fetched.pop(version, None)
        if found is None:
            return None if self.stretches else self._buffers.take()
        return found.value


class LedRows(RowFragment, ABC):
    """At the leader: what it does with its own rows is done by all ranks with theirs."""

    @abstractmethod
    def encode_rows(self, copied: Copied) -> None: ...

    @abstractmethod
    def pass_on(self, version: Version, digest: str) -> Buffer | None:
        """Every rank has its rows of the version when this returns, or none of them has (None)."""


class _Arrivals(FragmentTensors):
    """At a rank that does not lead: versions that are here and not adopted. They arrive before it is told to adopt
    them."""

    _arrivals: dict[Version, Buffer]
    copies: int  # made so far

    def buffer(self) -> Buffer:
        return self._buffers.take()

    def came(self, version: Version, value: Buffer) -> None:
        """The leader may have decided to adopt an earlier one that is still to be adopted here."""
        self.release(self._arrivals.pop(version, None))
        self._arrivals[version] = value
        while len(self._arrivals) > MOST_ARRIVALS:
            self.release(self._arrivals.pop(min(self._arrivals)))

    def adopt_version(self, version: Version, how: AdoptHow, merged_copy: bool, alpha: float) -> None:
        value = self._arrivals.pop(version, None)
        if value is None:
            raise IslandBroken(f"version {version} of fragment {self.p} is adopted, and has not arrived at this rank")
        for older in [each for each in self._arrivals if each < version]:
            self.release(self._arrivals.pop(older))
        self.arrived(version, value)
        new, reference = self.will_adopt(merged_copy)
        self.adopt(how, new, reference, alpha)
        self.release(new, reference)


class Rows(_Arrivals):
    """The leader sends and fetches them."""

    def __init__(self, view: ModelView, p: FragmentId) -> None:
        super().__init__(view, p, codec("f32"))
        self._arrivals = {}
        self.copies = 0


class OwnRows(RowFragment, _Arrivals):
    """This rank sends and fetches them itself."""

    def __init__(self, view: ModelView, p: FragmentId, up: Codec, share: RowShare, rank: int) -> None:
        super().__init__(view, p, up, share, rank)
        self._arrivals = {}
        self.copies = 0

    def adopt_version(self, version: Version, how: AdoptHow, merged_copy: bool, alpha: float) -> None:
        super().adopt_version(version, how, merged_copy, alpha)
        self.settle(merged_copy)

    def hold_version(self, version: Version) -> Buffer | None:
        """One that is here, adopted or not."""
        found = self._arrivals.get(version)
        return self._buffers.hold(found) if found is not None else self.hold_newest(version)


__all__ = ["LedRows", "OwnRows", "Prepared", "RowFragment", "Rows", "Strips"]
