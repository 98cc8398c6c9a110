"""The fragments of a rank that does not lead: its own rows of them. Versions arrive before it is said to adopt them."""

from __future__ import annotations

from atoll.core.types import AdoptHow, FragmentId, Version
from atoll.errors import IslandBroken
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.island.row_fragment import RowFragment
from atoll.tensors.codecs import Codec, codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.row_sharding import RowShare

MOST_ARRIVALS = 16


class _Arrivals(FragmentTensors):
    """Versions that are here and not adopted."""

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


__all__ = ["OwnRows", "Rows"]
