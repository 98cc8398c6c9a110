"""Records and values for tests of the store, and store classes with injected bugs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.protocol import LeaseRecord, ManifestRecord, MembersRecord, SnapshotRecord, VersionRecord
from atoll.core.types import AcceptedContribution, LeaseHoldings, MergedUpTo, RoundId
from atoll.store.version_store import Store

FRAGMENTS = 2


def make_version(fragment: int, number: int, epoch: int = 1) -> VersionRecord:
    accepted = AcceptedContribution(3, 1, 24 * number, 24, 1000, 1000 * number, 0, 1000 * 1000 / 24)
    mark = MergedUpTo(1, number - 1, 24 * number, 1000 * number, 0)
    return VersionRecord(fragment, number, RoundId(fragment, number - 1, epoch, 1), (accepted,), ((3, mark),), 7)


def make_tensors(number: int, numel: int = 8) -> dict[str, Tensor]:
    """Return the values of a version, which follow from its number. Each version has different values."""
    values = torch.arange(numel, dtype=torch.float32) + number / 16
    return {"value": values, "momentum": values * -2, "step": torch.tensor(number)}


def has_sample_tensors(tensors: dict[str, Tensor], number: int, numel: int = 8) -> bool:
    expected = make_tensors(number, numel)
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def make_members(serial: int) -> MembersRecord:
    return MembersRecord(serial, ((1, serial), (3, 1)), (), 0)


def make_leases(serial: int) -> LeaseRecord:
    return LeaseRecord(serial, 40, ((8, 10),), (LeaseHoldings(1, serial, 1, 8, ((10, 20), (20, 40))),), 0)


def make_snapshot(number: int, *versions: int) -> SnapshotRecord:
    return SnapshotRecord(number, versions, (), (), ())


MANIFEST = ManifestRecord((2, 1), 3, 123_456)


def create_store(directory: Path, versions: int = 0, numel: int = 8, kind: type[Store] = Store, keep: int = 3) -> Store:
    """Create the store of a run with initial values, and write this many versions of each fragment."""
    store = kind.open(directory, keep)
    for fragment in range(FRAGMENTS):
        store.write_initial(fragment, make_tensors(0, numel))
    store.write_settings({"run": "sample", "lr": 0.4})
    store.write(make_members(1))
    for number in range(1, versions + 1):
        for fragment in range(FRAGMENTS):
            store.write(make_version(fragment, number), make_tensors(number, numel))
    return store


class InPlaceStore(Store):
    """Bug: writes in place, so that a file with the final name may be incomplete."""

    def _put(self, path: Path, pieces: list[Any], replace: bool = True) -> None:
        self.check_epoch()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for piece in pieces:
            os.write(file, memoryview(piece)[: 2**20])
            os.write(file, memoryview(piece)[2**20 :])
        os.fsync(file)
        os.close(file)


class NameFirstStore(Store):
    """Bug: renames the file before it is durable. After a power failure, the name may exist without the contents."""

    def _put(self, path: Path, pieces: list[Any], replace: bool = True) -> None:
        self.check_epoch()
        unfinished = path.with_name(f".{path.name}.unfinished")
        with open(unfinished, "wb", buffering=0) as file:
            for piece in pieces:
                os.write(file.fileno(), piece)
            os.replace(unfinished, path)
            os.fsync(file.fileno())


class NoClaimsStore(Store):
    """Bug: two syncers that start at the same moment take the same epoch, and neither fences the other."""

    def _claim(self, epoch: int) -> int:
        return epoch

    def _check_stored_epoch_is_lower(self) -> None:
        pass
