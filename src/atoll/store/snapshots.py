"""The complete snapshots of a run, as whoever may read its directory finds them; nothing is locked or changed.

A snapshot is valid with its record (`store`). What learners saved for it is in their own directories (`parts`), which
may be the same directory or on other machines; so may be the directories of shards, with the versions that they hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.protocol import SnapshotRecord
from atoll.core.types import FragmentId
from atoll.store.learner_parts import part_bytes, part_path
from atoll.store.version_store import RECORD, StoreDamaged, complete_snapshots, snapshot_folder, snapshot_record

STORE = "store"
SHARDS = "shards"
"""Directories of the shards that `atoll train` has started, by their numbers."""


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
    found = [snapshot_info(run, number) for number in complete_snapshots(run / STORE)]
    return [info for info in found if info is not None]


def stores_of(run: Path) -> list[Path]:
    """The syncer's, and those of shards that are here."""
    return [run / STORE, *sorted((run / SHARDS).glob(f"*/{STORE}"))]


def version_of_snapshot(run: Path, number: int, p: FragmentId) -> Path:
    """Where the version of a fragment is that belongs to a snapshot; where it should be, if it is nowhere."""
    names = [snapshot_folder(store, number) / f"{p:03d}.safetensors" for store in stores_of(run)]
    return next((name for name in names if name.exists()), names[0])


def snapshot_info(run: Path, number: int) -> SnapshotInfo | None:
    """None: there is no such snapshot, or it is not complete."""
    record, problem = None, ""
    try:
        saved_at = (snapshot_folder(run / STORE, number) / RECORD).stat().st_mtime
        size = sum(file.stat().st_size for store in stores_of(run) for file in snapshot_folder(store, number).glob("*"))
        record = snapshot_record(run / STORE, number)
    except FileNotFoundError:
        return None
    except StoreDamaged as error:
        problem = f"{error.path}: {error.what}"
    return SnapshotInfo(number, saved_at, size, record, problem) if record or problem else None
