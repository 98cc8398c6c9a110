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
from atoll.store.version_store import (
    RECORD_FILE,
    StoreDamagedError,
    list_complete_snapshots,
    read_snapshot_record,
    snapshot_folder,
)

STORE_FOLDER = "store"
SHARDS_FOLDER = "shards"
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
    found = [read_snapshot_info(run, number) for number in list_complete_snapshots(run / STORE_FOLDER)]
    return [info for info in found if info is not None]


def list_stores(run: Path) -> list[Path]:
    """The syncer's, and those of shards that are here."""
    return [run / STORE_FOLDER, *sorted((run / SHARDS_FOLDER).glob(f"*/{STORE_FOLDER}"))]


def snapshot_version_path(run: Path, number: int, p: FragmentId) -> Path:
    """Where the version of a fragment is that belongs to a snapshot; where it should be, if it is nowhere."""
    names = [snapshot_folder(store, number) / f"{p:03d}.safetensors" for store in list_stores(run)]
    return next((name for name in names if name.exists()), names[0])


def read_snapshot_info(run: Path, number: int) -> SnapshotInfo | None:
    """None: there is no such snapshot, or it is not complete."""
    record, problem = None, ""
    try:
        saved_at = (snapshot_folder(run / STORE_FOLDER, number) / RECORD_FILE).stat().st_mtime
        size = sum(
            file.stat().st_size for store in list_stores(run) for file in snapshot_folder(store, number).glob("*")
        )
        record = read_snapshot_record(run / STORE_FOLDER, number)
    except FileNotFoundError:
        return None
    except StoreDamagedError as error:
        problem = f"{error.path}: {error.problem}"
    return SnapshotInfo(number, saved_at, size, record, problem) if record or problem else None
