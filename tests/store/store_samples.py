"""Records and values for tests of the store, and stores that are wrong on purpose."""

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
    """Every version has other values, and they can be told from its number alone."""
    values = torch.arange(numel, dtype=torch.float32) + number / 16
    return {"value": values, "momentum": values * -2, "step": torch.tensor(number)}


def has_sample_tensors(found: dict[str, Tensor], number: int, numel: int = 8) -> bool:
    wanted = make_tensors(number, numel)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def make_members(serial: int) -> MembersRecord:
    return MembersRecord(serial, ((1, serial), (3, 1)), (), 0)


def make_leases(serial: int) -> LeaseRecord:
    return LeaseRecord(serial, 40, ((8, 10),), (LeaseHoldings(1, serial, 1, 8, ((10, 20), (20, 40))),), 0)


def make_snapshot(number: int, *versions: int) -> SnapshotRecord:
    return SnapshotRecord(number, versions, (), (), ())


MANIFEST = ManifestRecord((2, 1), 3, 123_456)


def create_store(directory: Path, versions: int = 0, numel: int = 8, kind: type[Store] = Store, keep: int = 3) -> Store:
    """A store of a founded run whose fragments all have this version."""
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
    """Wrong: writes into the file that has the name already, or takes the name before the values are there."""

    def _put(self, path: Path, pieces: list[Any], replace: bool = True) -> None:
        self.check_epoch()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for piece in pieces:
            os.write(file, memoryview(piece)[: 2**20])
            os.write(file, memoryview(piece)[2**20 :])
        os.fsync(file)
        os.close(file)


class NameFirstStore(Store):
    """Wrong: the file has its name before it is durable. A machine that loses its power may keep the name alone."""

    def _put(self, path: Path, pieces: list[Any], replace: bool = True) -> None:
        self.check_epoch()
        unfinished = path.with_name(f".{path.name}.unfinished")
        with open(unfinished, "wb", buffering=0) as file:
            for piece in pieces:
                os.write(file.fileno(), piece)
            os.replace(unfinished, path)
            os.fsync(file.fileno())


class NoClaimsStore(Store):
    """Wrong: two who start at the same moment take the same epoch, and neither fences the other."""

    def _claim(self, epoch: int) -> int:
        return epoch

    def _is_still_higher(self) -> None:
        pass
