"""The syncer's directory. Each version is durable before it is published, and the next process restores it.

    lock                                 locked by the running syncer; contains its process id
    alive                                its heartbeat, for a standby (`fencing`)
    epoch                                the number of the newest syncer that started here
    claims/000000005                     epoch 5 is claimed: no two syncers get the same number
    run.json                             settings of the run, written when it is created
    controls.json                        requests of operators that are in force (`controls`)
    head.json                            shards only: the newest syncer epoch that it has served
    members.json, leases.json            the newest record of each, and
    manifest.json                        the manifest once the run is over
    end_received.json                    learners that have acknowledged the end, written when a syncer stops after it
    fragments/007/000000012.safetensors  version 12 of fragment 7: value, outer state, contributions; the newest few
    snapshots/000000004/                 a snapshot: record.json and the version of every fragment that belongs to it

`tensor_file` has the file formats. A damaged file is an error that names it. There is no fallback to an older version,
because learners already have the newer one.

Two syncers on one directory: on one machine the lock refuses the second one. Locks do not help on some network file
systems, after a machine was wrongly declared dead, and when a standby takes over from a hung process. There the epoch
fences the older syncer: if it reads a higher epoch than its own, it raises `FencedError`. It checks before it writes,
before it renames a file and afterwards. A version that has its name is never replaced by a syncer of another epoch.
There is no gap: a takeover (1) raises the epoch, (2) removes every unfinished file, (3) reads. A write whose last
check was before (1) has either renamed its file before (2), so that it is read, or fails because its file is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from atoll.core.protocol import LeaseRecord, ManifestRecord, MembersRecord, Record, SnapshotRecord, VersionRecord
from atoll.core.syncer.state import RestoredState
from atoll.core.types import FragmentId, Version
from atoll.files import (
    TEMPORARY_SUFFIX,
    LockHeldError,
    acquire_lock,
    link_or_copy,
    make_folder,
    sync_folder,
    write_file,
)
from atoll.store.fencing import LOCK_FILE, find_remote_syncer, remove_heartbeat, write_heartbeat
from atoll.store.run_settings import check_run_format
from atoll.store.tensor_file import (
    DamageError,
    StoreDamagedError,
    decode_small_file,
    encode_small_file,
    encode_tensor_file,
    error_reason,
    read_tensors,
)
from atoll.tape import format

__all__ = ["FencedError", "StoreInUseError", "Store", "StoreDamagedError"]

LOST_EPOCH_MARGIN = 1000
"""Added to the newest version's epoch if the epoch file is lost. More than the number of restarts without a merge."""

SETTINGS_FILE = "run.json"
CONTROLS_FILE = "controls.json"
LAST_SYNCER_FILE = "head.json"
END_RECEIVED_FILE = "end_received.json"
RECORD_FILE = "record.json"

_FRAGMENT = re.compile(r"\d{3,}")
_VERSION = re.compile(r"(\d{9,})\.safetensors")
_SNAPSHOT = re.compile(r"\d{9,}")
_RESTORE_ADVICE = "restore it from a backup"

R = TypeVar("R", MembersRecord, LeaseRecord, ManifestRecord, SnapshotRecord)

_RECORD_FILES: Mapping[type, str] = {
    MembersRecord: "members.json",
    LeaseRecord: "leases.json",
    ManifestRecord: "manifest.json",
}


class FencedError(Exception):
    """A syncer of a later epoch owns the store: this one must no longer write."""

    def __init__(self, directory: Path, epoch: int, own_epoch: int) -> None:
        super().__init__(f"{directory} belongs to a syncer of epoch {epoch}; this one, epoch {own_epoch}, has to stop")
        self.epoch = epoch


class StoreInUseError(ValueError):
    """Another syncer uses the directory."""


class Store:
    """The directory of one syncer, locked. Create it with `Store.open`. Only one thread may call the write methods."""

    def __init__(self, directory: Path, keep: int, lock: int) -> None:
        self.directory = directory
        self.epoch = 0
        self._keep = keep
        self._lock: int | None = lock
        self._heartbeats = 0
        self._versions: dict[FragmentId, list[Version]] = {}  # versions on disk, oldest first

    @classmethod
    def open(cls, directory: str | os.PathLike[str], keep_versions: int = 3, is_takeover: bool = False) -> Store:
        """Lock the directory, and create it if it does not exist.

        Raise `StoreInUseError` if another process uses it, and `RunFormatError` if another version of Atoll made it.

        Args:
            keep_versions: Number of versions of a fragment, and of snapshots, that are kept.
            is_takeover: Open the directory although another process uses it. That process is fenced from then on.
        """
        if keep_versions < 1:
            raise ValueError(
                f"keep_versions is {keep_versions}, it must be at least 1: the newest version is always kept"
            )
        path = Path(directory).absolute()
        check_run_format(read_value(path / SETTINGS_FILE) or {}, path.parent)
        make_folder(path)
        store = cls(path, keep_versions, _lock_directory(path / LOCK_FILE, is_takeover))
        try:
            if not is_takeover and (heartbeat := find_remote_syncer(path)) is not None:
                raise StoreInUseError(
                    f"{path} is in use by process {heartbeat.pid} on {heartbeat.host}: stop that syncer, or wait"
                    " for its end with --standby"
                )
            store.begin_epoch()
        except BaseException:
            store.close()
            raise
        return store

    def begin_epoch(self) -> None:
        """Fence every earlier syncer, and find its files. Called once, by `open`."""
        for folder in ("fragments", "snapshots", "claims"):
            make_folder(self.directory / folder)
        self._raise_epoch()  # first: from here on, an earlier syncer writes nothing
        self._remove_unfinished()
        self._restore_overwritten_epoch()
        self.send_heartbeat()

    def close(self) -> None:
        """Release the lock of the directory. A second call does nothing."""
        if self._lock is not None:
            remove_heartbeat(self.directory, self.epoch)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- writing

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        self._put(
            self.directory / SETTINGS_FILE, encode_small_file(json.dumps(dict(settings), indent=1, allow_nan=False))
        )

    def write_controls(self, controls: Mapping[str, Any]) -> None:
        self._put(
            self.directory / CONTROLS_FILE, encode_small_file(json.dumps(dict(controls), indent=1, allow_nan=False))
        )

    def write_end_received(self, learners: Collection[int]) -> None:
        self._put(self.directory / END_RECEIVED_FILE, encode_small_file(json.dumps({"learners": sorted(learners)})))

    def write_last_syncer(self, head: Mapping[str, Any]) -> None:
        self._put(self.directory / LAST_SYNCER_FILE, encode_small_file(json.dumps(dict(head))))

    def write_initial(self, fragment: FragmentId, tensors: Mapping[str, Tensor]) -> None:
        """Write version 0 of a fragment. May be repeated until version 1 exists, because creating a run may fail."""
        if self._newest(fragment) not in (None, 0):
            raise ValueError(
                f"fragment {fragment} has version {self._newest(fragment)}: an initial version cannot follow it"
            )
        self._write_version(fragment, 0, "", tensors)

    def delete_initial(self, fragment: FragmentId) -> None:
        """Delete the initial version of a fragment, after creating the run has failed."""
        assert self._versions[fragment] == [0], f"fragment {fragment} has versions {self._versions[fragment]}"
        self.check_epoch()
        self.version_path(fragment, 0).unlink()
        del self._versions[fragment]

    def write(self, record: Record, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make a record durable, a version together with its tensors.

        Raise `OSError` with the file's name on failure, after which the record may be written again, and `FencedError`.
        """
        if isinstance(record, VersionRecord):
            newest = self._newest(record.fragment)
            assert tensors is not None, "a version is written together with its tensors"
            assert newest is not None, f"fragment {record.fragment} has no initial version"
            assert record.version == newest + 1, f"fragment {record.fragment}: {record.version} written after {newest}"
            self._write_version(record.fragment, record.version, format.encode(record), tensors)
        elif isinstance(record, SnapshotRecord):
            self._write_snapshot(record)
        else:
            self._put(self.directory / _RECORD_FILES[type(record)], encode_small_file(format.encode(record)))

    def _write_version(
        self, fragment: FragmentId, version: Version, record: str, tensors: Mapping[str, Tensor]
    ) -> None:
        path = self.version_path(fragment, version)
        self.check_epoch()
        make_folder(path.parent)
        pieces = encode_tensor_file(record, tensors)
        try:
            self._put(path, pieces, replace=False)
        except FileExistsError:
            # An earlier attempt failed after the rename. We are not fenced, so the file is not another syncer's.
            self._put(path, pieces)
        versions = self._versions.setdefault(fragment, [])
        if version not in versions:
            versions.append(version)
        while len(versions) > self._keep:
            # Ignore errors: the next start removes the file, and the new version is durable.
            with contextlib.suppress(OSError):
                self.version_path(fragment, versions[0]).unlink(missing_ok=True)
            versions.pop(0)

    def roll_back(self, fragment: FragmentId, version: Version) -> tuple[VersionRecord | None, dict[str, Tensor]]:
        """Delete the newest version, which was never published, and return `version`, the one before it."""
        previous = self._read(fragment, version)  # before the newest one is deleted
        versions = self._versions[fragment]
        assert versions[-2:] == [version, version + 1], f"fragment {fragment} cannot go back to {version}: {versions}"
        self.check_epoch()
        path = self.version_path(fragment, version + 1)
        path.unlink()
        sync_folder(path.parent)
        versions.pop()
        return previous

    def pin_snapshot(self, snapshot: int, versions: tuple[Version, ...]) -> None:
        """Keep the versions of a snapshot that is not complete yet, for any number of later merges.

        Each file gets a second name. If no record follows, the next process removes these names.

        Args:
            versions: Versions of all fragments of the run. A shard has only some of the fragments.
        """
        folder = snapshot_folder(self.directory, snapshot)
        fragments = self.fragments()
        assert not fragments or fragments[-1] < len(versions), f"a snapshot of {len(versions)} fragments: {fragments}"
        self.check_epoch()
        make_folder(folder)
        for fragment in fragments:
            name = folder / f"{fragment:03d}.safetensors"
            if not name.exists():  # an existing file is the same version, from an earlier call for this snapshot
                try:
                    link_or_copy(self.version_path(fragment, versions[fragment]), name)
                except FileNotFoundError as error:
                    error.strerror = "a version of the snapshot is already deleted: keep more versions"
                    raise

    def discard_snapshot(self, snapshot: int) -> None:
        """Unpin the versions of a snapshot that failed."""
        folder = snapshot_folder(self.directory, snapshot)
        if not (folder / RECORD_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def _write_snapshot(self, record: SnapshotRecord) -> None:
        """Complete a snapshot: its values are hard links to existing files, and the record is written last."""
        folder = snapshot_folder(self.directory, record.snapshot)
        self.pin_snapshot(record.snapshot, record.versions)
        sync_folder(folder)
        self._put(folder / RECORD_FILE, encode_small_file(format.encode(record)))
        for old in list_complete_snapshots(self.directory)[: -self._keep]:
            shutil.rmtree(snapshot_folder(self.directory, old), ignore_errors=True)

    def _put(self, path: Path, pieces: list[Any], replace: bool = True) -> None:
        assert self._lock is not None, "the store is closed"
        self.check_epoch()
        try:
            write_file(path, pieces, replace=replace, before_rename=self.check_epoch)
        except OSError:
            self.check_epoch()  # a takeover removes our unfinished file
            raise
        self.check_epoch()

    # ---------------------------------------------------------------------------------------------------- reading

    def read_settings(self) -> dict[str, Any] | None:
        """Return the settings from `write_settings`; None if the run was never created."""
        return read_value(self.directory / SETTINGS_FILE)

    def read_controls(self) -> dict[str, Any] | None:
        """Return the controls from `write_controls`; None if no request was ever stored."""
        return read_value(self.directory / CONTROLS_FILE, "remove it; then no operator request is in effect")

    def read_end_received(self) -> set[int]:
        """Return the learners that have acknowledged the end of the run to earlier syncers."""
        stored = read_value(self.directory / END_RECEIVED_FILE, "remove it: the end is served to all learners again")
        return set(stored["learners"]) if stored is not None else set()

    def read_last_syncer(self) -> dict[str, Any] | None:
        """Return the value from `write_last_syncer`; None if there is none."""
        return read_value(self.directory / LAST_SYNCER_FILE)

    def read_restored(self) -> RestoredState:
        """Return the state that a syncer core starts from. Reads and checks every newest version."""
        versions = {}
        for fragment in self.fragments():
            _, record, _ = self.read_newest(fragment)
            if record is not None:
                versions[fragment] = record
        members = read_record(self.directory / _RECORD_FILES[MembersRecord], MembersRecord)
        leases = read_record(self.directory / _RECORD_FILES[LeaseRecord], LeaseRecord)
        return RestoredState(versions, members, self.read_manifest(), leases)

    def read_manifest(self) -> ManifestRecord | None:
        return read_record(self.directory / _RECORD_FILES[ManifestRecord], ManifestRecord)

    def read_newest(self, fragment: FragmentId) -> tuple[Version, VersionRecord | None, dict[str, Tensor]]:
        """Return the newest version of a fragment, its record (None for version 0) and its tensors."""
        version = self._newest(fragment)
        if version is None:
            raise ValueError(f"fragment {fragment} has no version in {self.directory}: the run was not created")
        return version, *self._read(fragment, version)

    def _read(self, fragment: FragmentId, version: Version) -> tuple[VersionRecord | None, dict[str, Tensor]]:
        path = self.version_path(fragment, version)
        try:
            text, tensors = read_tensors(path)
            record = format.decode(text) if text else None
        except (OSError, ValueError) as error:
            raise StoreDamagedError(path, error_reason(error), _damage_advice(self._versions[fragment])) from None
        if record is None and version == 0:
            return None, tensors
        if not isinstance(record, VersionRecord) or (record.fragment, record.version) != (fragment, version):
            raise StoreDamagedError(path, f"contains {record!r:.200}, which does not match its name", _RESTORE_ADVICE)
        return record, tensors

    def fragments(self) -> tuple[FragmentId, ...]:
        """Return the fragments that have a version in this directory."""
        return tuple(sorted(fragment for fragment, versions in self._versions.items() if versions))

    def check_epoch(self) -> None:
        """Raise `FencedError` if a syncer of a later epoch owns the directory."""
        path = self.directory / "epoch"
        stored = _read_epoch(path, path.read_bytes())
        if stored > self.epoch:
            raise FencedError(self.directory, stored, self.epoch)
        if stored < self.epoch:
            raise StoreDamagedError(
                path, f"contains epoch {stored}, but this syncer has epoch {self.epoch}", _RESTORE_ADVICE
            )

    def send_heartbeat(self) -> None:
        """Write a heartbeat. Raise `FencedError` like `check_epoch`. Another thread may call this at the same time."""
        self.check_epoch()
        self._heartbeats += 1
        write_heartbeat(self.directory, self.epoch, self._heartbeats)

    # ---------------------------------------------------------------------------------------------------- internal

    def _newest(self, fragment: FragmentId) -> Version | None:
        versions = self._versions.get(fragment)
        return versions[-1] if versions else None

    def version_path(self, fragment: FragmentId, version: Version) -> Path:
        return fragment_folder(self.directory, fragment) / f"{version:09d}.safetensors"

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files of a killed process, and list the versions."""
        for left in self.directory.rglob(f".*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)
        for name in sorted(os.listdir(self.directory / "snapshots")):
            folder = self.directory / "snapshots" / name
            if _SNAPSHOT.fullmatch(name) and not (folder / RECORD_FILE).exists():
                shutil.rmtree(folder)
        self._scan_versions()
        for fragment, versions in self._versions.items():
            for old in versions[: -self._keep]:
                self.version_path(fragment, old).unlink(missing_ok=True)
            self._versions[fragment] = versions[-self._keep :]

    def _scan_versions(self) -> None:
        for name in sorted(os.listdir(self.directory / "fragments")):
            folder = self.directory / "fragments" / name
            if _FRAGMENT.fullmatch(name) and folder.is_dir():
                self._versions[int(name)] = list_versions(folder)

    def _raise_epoch(self) -> None:
        stored = self._stored_epoch()
        self.epoch = self._claim(stored + 1)
        self._write_epoch()
        for name in os.listdir(self.directory / "claims"):
            if name.isdigit() and int(name) < self.epoch:
                (self.directory / "claims" / name).unlink(missing_ok=True)

    def _stored_epoch(self) -> int:
        path = self.directory / "epoch"
        try:
            return _read_epoch(path, path.read_bytes())
        except FileNotFoundError:
            return self._recover_lost_epoch()
        except OSError as error:
            raise StoreDamagedError(path, error_reason(error), _RESTORE_ADVICE) from None

    def _claim(self, epoch: int) -> int:
        """Claim the first free epoch from this one on. If two syncers start at once, one gets the higher epoch."""
        while True:
            try:
                os.close(os.open(self.directory / "claims" / f"{epoch:09d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                epoch += 1
            else:
                sync_folder(self.directory / "claims")
                return epoch

    def _restore_overwritten_epoch(self) -> None:
        """Write our epoch again if a syncer with a lower epoch, which started at the same time, has overwritten it.

        The other syncer cannot overwrite it again, because we have removed its unfinished file.
        """
        if self._stored_epoch() < self.epoch:
            self._write_epoch()

    def _write_epoch(self) -> None:
        path = self.directory / "epoch"
        try:
            write_file(path, encode_small_file(str(self.epoch)), before_rename=self._check_stored_epoch_is_lower)
        except FileNotFoundError:  # another syncer started at the same time and removed our unfinished file
            raise FencedError(self.directory, self._stored_epoch(), self.epoch) from None

    def _check_stored_epoch_is_lower(self) -> None:
        stored = self._stored_epoch()
        if stored >= self.epoch:
            raise FencedError(self.directory, stored, self.epoch)

    def _recover_lost_epoch(self) -> int:
        """Return an epoch for a directory whose epoch file is missing; 0 for a new directory.

        The result is far above the epochs of all versions: learners may have seen a higher epoch than these, and would
        refuse a syncer with a lower one.
        """
        self._scan_versions()
        if not self.fragments():
            return 0
        records = [self.read_newest(fragment)[1] for fragment in self.fragments()]
        return max([record.round.epoch for record in records if record is not None], default=0) + LOST_EPOCH_MARGIN


# --------------------------------------------------------------------------------------------------------------------
# Files of the store


def fragment_folder(store: Path, fragment: FragmentId) -> Path:
    return store / "fragments" / f"{fragment:03d}"


def list_versions(folder: Path) -> list[Version]:
    """Return the versions in the folder of a fragment, oldest first."""
    return sorted(int(match[1]) for match in map(_VERSION.fullmatch, os.listdir(folder)) if match)


def snapshot_folder(store: Path, number: int) -> Path:
    return store / "snapshots" / f"{number:09d}"


def list_complete_snapshots(store: Path) -> tuple[int, ...]:
    """Return the numbers of the snapshots that have a record, oldest first."""
    names = (path.parent.name for path in store.glob(f"snapshots/*/{RECORD_FILE}"))
    return tuple(sorted(int(name) for name in names if _SNAPSHOT.fullmatch(name)))


def read_snapshot_record(store: Path, number: int) -> SnapshotRecord | None:
    """Return the record of a snapshot; None if there is none. Raise `StoreDamagedError`."""
    path = snapshot_folder(store, number) / RECORD_FILE
    record = read_record(path, SnapshotRecord)
    if record is not None and record.snapshot != number:
        raise StoreDamagedError(path, f"contains {record!r:.100}, which does not match its name", _RESTORE_ADVICE)
    return record


def _lock_directory(path: Path, take_over: bool) -> int:
    """Lock the file and return its descriptor. With `take_over`, replace the lock file if a hung process locks it."""
    try:
        return acquire_lock(path, f"{os.getpid()}\n")
    except LockHeldError as error:
        if not take_over:
            owner = error.owner or "unknown"
            raise StoreInUseError(
                f"{path.parent} is in use by process {owner}: stop that syncer, or choose another directory"
            ) from None
    path.unlink(missing_ok=True)
    return _lock_directory(path, take_over=False)


def read_value(
    path: Path, advice: str = _RESTORE_ADVICE, decode: Callable[[str], Any] = json.loads
) -> dict[str, Any] | None:
    """Return the value in a small file; None if there is no file. Raise `StoreDamagedError`."""
    try:
        value: dict[str, Any] = decode(decode_small_file(path.read_bytes()))
        return value
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreDamagedError(path, error_reason(error), advice) from None


def read_record(path: Path, kind: type[R]) -> R | None:
    """Return the record in a small file; None if there is no file. Raise `StoreDamagedError`."""
    record: Any = read_value(path, decode=format.decode)
    if record is None or type(record) is kind:
        result: R | None = record
        return result
    raise StoreDamagedError(path, f"contains {type(record).__name__}, expected {kind.__name__}", _RESTORE_ADVICE)


def _read_epoch(path: Path, data: bytes) -> int:
    try:
        epoch = json.loads(decode_small_file(data))
        if type(epoch) is not int or epoch < 1:
            raise DamageError(f"contains {epoch!r:.60}, which is not an epoch")
    except ValueError as error:
        raise StoreDamagedError(
            path, str(error), "remove it while no syncer runs here: the next one starts with a much higher epoch"
        ) from None
    return epoch


def _damage_advice(versions: list[Version]) -> str:
    if len(versions) < 2:
        return _RESTORE_ADVICE
    back = f"or move it away to go back to version {versions[-2]}, although learners may have a later one"
    return f"{_RESTORE_ADVICE}, {back}"
