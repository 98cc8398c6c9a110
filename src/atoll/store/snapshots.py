"""The complete snapshots of a run, as whoever may read its directory finds them; nothing is locked or changed.

A snapshot is valid with its record (`store`). What learners saved for it is in their own directories (`parts`), which
may be the same directory or on other machines; so may be the directories of shards, with the versions that they hold.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.protocol import SnapshotRecord
from atoll.core.types import FragmentId
from atoll.store.learner_parts import part_bytes, part_path
from atoll.store.version_store import StoreDamaged, read_record

SNAPSHOTS = "snapshots"
RECORD = "record.json"
STORE = "store"
SHARDS = "shards"
"""Directories of the shards that `atoll train` has started, by their numbers."""

_NUMBER = re.compile(r"\d{9,18}")


class SnapshotInfo(NamedTuple):
    number: int
    saved_at: float  # seconds of the Unix epoch
    bytes: int  # of the files that are here, without parts; most would be kept anyway, under another name
    record: SnapshotRecord | None
    problem: str  # why there is no record

    def to_json(self, run: Path) -> dict[str, Any]:
        told: dict[str, Any] = {"snapshot": self.number, "saved_at": self.saved_at, "bytes": self.bytes}
        if self.record is None:
            return told | {"problem": self.problem}
        parts = [
            {
                "learner": learner,
                "step": part.step,
                "trained": part.trained,
                "versions": list(part.versions),
                "bytes": part_bytes(part_path(run, learner, self.number)),
                "problem": part.problem,
            }
            for learner, part in self.record.parts
        ]
        return told | {
            "versions": list(self.record.versions),
            "merges": sum(self.record.versions),
            "parts": parts,
            "in_flight": len(self.record.in_flight),
            "left_out": list(self.record.left_out),
        }


def list_snapshots(run: Path) -> list[SnapshotInfo]:
    """Oldest first. One whose record is damaged is listed with what is wrong."""
    folder = run / STORE / SNAPSHOTS
    try:
        names = sorted(name for name in os.listdir(folder) if _NUMBER.fullmatch(name))
    except FileNotFoundError:
        return []
    found = [snapshot_info(run, int(name)) for name in names]
    return [info for info in found if info is not None]


def stores_of(run: Path) -> list[Path]:
    """The syncer's, and those of shards that are here."""
    return [run / STORE, *sorted((run / SHARDS).glob(f"*/{STORE}"))]


def version_of_snapshot(run: Path, number: int, p: FragmentId) -> Path:
    """Where the version of a fragment is that belongs to a snapshot; where it should be, if it is nowhere."""
    names = [store / SNAPSHOTS / f"{number:09d}" / f"{p:03d}.safetensors" for store in stores_of(run)]
    return next((name for name in names if name.exists()), names[0])


def snapshot_info(run: Path, number: int) -> SnapshotInfo | None:
    """None: there is no such snapshot, or it is not complete."""
    folder = run / STORE / SNAPSHOTS / f"{number:09d}"
    try:
        saved_at = (folder / RECORD).stat().st_mtime
        names = [name for store in stores_of(run) for name in (store / SNAPSHOTS / f"{number:09d}").glob("*")]
        size = sum(_size(name) or 0 for name in names)
    except FileNotFoundError:
        return None
    try:
        record = read_record(folder / RECORD, SnapshotRecord)
    except StoreDamaged as error:
        return SnapshotInfo(number, saved_at, size, None, f"{folder / RECORD}: {error.what}")
    if record is None:
        return None
    if record.snapshot != number:
        problem = f"{folder / RECORD}: holds {record!r:.100}, another record than its name says"
        return SnapshotInfo(number, saved_at, size, None, problem)
    return SnapshotInfo(number, saved_at, size, record, "")


def _size(path: Path) -> int | None:
    """None: it is not here."""
    try:
        return path.stat().st_size
    except OSError:
        return None
