"""Read the complete snapshots of a run. Needs read access only, and takes no locks.

A snapshot is complete when its record exists (`version_store`). The parts of learners are in their own run directories
(`learner_parts`), and the versions of shards in the directories of the shards. All of these may be this directory or
on other machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.protocol import SnapshotRecord
from atoll.core.types import FragmentId
from atoll.store.learner_parts import part_bytes, part_path
from atoll.store.run_settings import check_run_format
from atoll.store.version_store import (
    RECORD_FILE,
    SETTINGS_FILE,
    StoreDamagedError,
    list_complete_snapshots,
    read_snapshot_record,
    read_value,
    snapshot_folder,
)

STORE_FOLDER = "store"
SHARDS_FOLDER = "shards"
"""Folder with the run directories of the shards that `atoll train` starts, by shard number."""


class SnapshotInfo(NamedTuple):
    number: int
    saved_at: float  # Unix time
    bytes: int  # size of the files in this directory, without parts; most of them are also named as current versions
    record: SnapshotRecord | None
    problem: str  # reason why `record` is None

    def to_json(self, run: Path) -> dict[str, Any]:
        fields: dict[str, Any] = {"snapshot": self.number, "saved_at": self.saved_at, "bytes": self.bytes}
        if self.record is None:
            return fields | {"problem": self.problem}
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
        return fields | {
            "versions": list(self.record.versions),
            "merges": sum(self.record.versions),
            "parts": parts,
            "in_flight": len(self.record.in_flight),
            "left_out": list(self.record.left_out),
        }


def list_snapshots(run: Path) -> list[SnapshotInfo]:
    """Return the snapshots of a run, oldest first. A snapshot with a damaged record is listed with its problem.

    Raise RunFormatError for a run directory of another version of Atoll.
    """
    check_run_format(read_value(run / STORE_FOLDER / SETTINGS_FILE) or {}, run)
    infos = [read_snapshot_info(run, number) for number in list_complete_snapshots(run / STORE_FOLDER)]
    return [info for info in infos if info is not None]


def list_stores(run: Path) -> list[Path]:
    """Return the store of the syncer and those of the shards in this run directory."""
    return [run / STORE_FOLDER, *sorted((run / SHARDS_FOLDER).glob(f"*/{STORE_FOLDER}"))]


def snapshot_version_path(run: Path, number: int, p: FragmentId) -> Path:
    """Return the path of a fragment's version in a snapshot; its expected path if the file is missing."""
    names = [snapshot_folder(store, number) / f"{p:03d}.safetensors" for store in list_stores(run)]
    return next((name for name in names if name.exists()), names[0])


def read_snapshot_info(run: Path, number: int) -> SnapshotInfo | None:
    """Return a snapshot; None if it does not exist or is not complete."""
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
