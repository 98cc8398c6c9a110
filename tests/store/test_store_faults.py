"""Faults of the store: full disk, read-only directory, killed process, takeover by another syncer during a write.

The faults are real, and each test checks that its fault happened.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from atoll.files import TEMPORARY_SUFFIX
from atoll.store.tensor_file import encode_tensor_file, read_tensors
from atoll.store.version_store import FencedError, Store
from tests.store.store_samples import (
    InPlaceStore,
    NameFirstStore,
    create_store,
    has_sample_tensors,
    make_members,
    make_snapshot,
    make_tensors,
    make_version,
)
from tests.store.test_version_store import ROOT, files, raise_epoch

LARGE = 2**20  # 4 MiB per tensor
LONG = pytest.mark.long


def unfinished_files(directory: Path) -> list[Path]:
    return [*directory.rglob(f".*{TEMPORARY_SUFFIX}")]


# --------------------------------------------------------------------------------------------------------------------
# Full disk and missing permissions


@contextmanager
def limited_file_size() -> Iterator[None]:
    """Limit files of this process to 64 KiB. A longer write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))  # Python ignores the signal and gets the error
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_write_keeps_the_old_version_and_can_be_repeated(tmp_path):
    with create_store(tmp_path, 1, LARGE) as store:
        before = files(tmp_path)
        with limited_file_size(), pytest.raises(OSError, match=r"000000002\.safetensors") as caught:
            store.write(make_version(0, 2), make_tensors(2, LARGE))
        assert caught.value.errno == errno.EFBIG
        assert files(tmp_path) == before
        assert store.read_newest(0)[0] == 1
        with limited_file_size():
            store.write(make_members(2))  # a small file is below the limit
        store.write(make_version(0, 2), make_tensors(2, LARGE))
        assert has_sample_tensors(store.read_newest(0)[2], 2, LARGE)
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], timeout=300, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=300, check=True)


def test_full_disk_is_an_error_until_there_is_space(small_disk):
    with create_store(small_disk, 1, 2**15) as store:
        filler = small_disk / "filler"
        with open(filler, "wb", buffering=0) as file:  # fill the disk
            while file.write(bytes(2**20)) == 2**20:
                pass
        for _ in range(3):
            with pytest.raises(OSError, match=r"000000002\.safetensors") as caught:
                store.write(make_version(0, 2), make_tensors(2, 2**19))
            assert caught.value.errno == errno.ENOSPC
            assert unfinished_files(small_disk) == []
            assert store.read_newest(0)[:2] == (1, make_version(0, 1))
        filler.unlink()
        store.write(make_version(0, 2), make_tensors(2, 2**19))
        assert has_sample_tensors(store.read_newest(0)[2], 2, 2**19)


def test_read_only_disk_is_an_error(small_disk):
    with create_store(small_disk, 1):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=300, check=True)
    with pytest.raises(OSError, match="lock") as caught:
        Store.open(small_disk)
    assert caught.value.errno == errno.EROFS


@contextmanager
def unprivileged_user() -> Iterator[None]:
    """Drop the privileges of root, which may write everywhere."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if uid == 0:
            os.seteuid(0)


def test_directory_without_write_permission_is_an_error():
    # Unprivileged users cannot read pytest's own folder, which would be a different fault.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        with create_store(directory, 1) as store:
            folders = [path for path in directory.rglob("*") if path.is_dir()]
            for folder in [directory, *folders]:
                folder.chmod(0o555)
            before = files(directory)
            with unprivileged_user():
                for write, name_in_error in (
                    (lambda: store.write(make_version(0, 2), make_tensors(2)), "000000002.safetensors"),
                    (lambda: store.write(make_members(2)), "members.json"),
                    (lambda: store.write(make_snapshot(1, 1, 1)), "snapshots/000000001"),
                    (lambda: Store.open(directory / "new"), "new"),
                ):
                    with pytest.raises(PermissionError, match=name_in_error):
                        write()
            assert files(directory) == before
            for folder in [directory, *folders]:
                folder.chmod(0o755)
            store.write(make_version(0, 2), make_tensors(2))
            assert store.read_newest(0)[0] == 2


def test_deleted_directory_is_an_error(tmp_path):
    with create_store(tmp_path / "store", 1) as store:
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(FileNotFoundError, match="store/epoch"):
            store.write(make_members(2))


# --------------------------------------------------------------------------------------------------------------------
# Killed processes


def run_kills(*arguments: str) -> list[dict[str, Any]]:
    # Files of a killed process survive on any disk. A disk in memory is faster for hundreds of kills.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "tests.store.store_kills", *arguments, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


OBSERVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda row: row["versions"],
    "members": lambda row: row["members"],
    "snapshot": lambda row: row["snapshots"],
    "open": lambda row: row["epoch"],
}
BEFORE_AND_AFTER = {
    "version": ([2, 2], [2, 3]),
    "members": (1, 2),
    "snapshot": ([], [[2, 2]]),
    "open": (2, 3),  # of the process that reopens the store
}


# Other files are written by the same function. test_kill_points.py tests their operations.
@pytest.mark.parametrize("kind", ["version", *(pytest.param(kind, marks=LONG) for kind in [*OBSERVED][1:])])
def test_kill_at_any_line_leaves_the_old_or_the_new_state(kind):
    rows = run_kills("lines", kind, "Store")
    *killed, completed = rows
    assert [row["killed"] for row in rows] == [True] * len(killed) + [False]
    assert len(killed) > 40
    observed = [OBSERVED[kind](row) for row in rows]
    before, after = BEFORE_AND_AFTER[kind]
    first_after = observed.index(after)
    assert observed == [before] * first_after + [after] * (len(observed) - first_after)
    assert first_after > 10
    unchanged = {"versions", "members", "snapshots", "settings", "leftovers"} - {kind, f"{kind}s"}
    for row in rows:
        assert row["leftovers"] == []
        assert {name: row[name] for name in unchanged} == {name: completed[name] for name in unchanged}


def test_kill_at_any_moment_keeps_the_last_durable_version():
    rows = run_kills("anywhere", "20", "Store")
    assert len(rows) == 20
    for row in rows:
        assert row["killed"]
        assert row["versions"][0] in (row["durable"], row["durable"] + 1)
        assert row["leftovers"] == []
    assert sum(row["unfinished"] for row in rows) >= 1  # at least one kill was during a write


@pytest.mark.parametrize(
    ("kind", "file"),
    [pytest.param("version", "fragments/001/000000003.safetensors", marks=LONG), ("members", "members.json")],
)
def test_kills_find_a_store_that_writes_in_place(kind, file):
    rows = run_kills("lines", kind, "InPlaceStore")
    assert {row["damaged"] for row in rows if "damaged" in row} == {file}
    assert rows[-1]["killed"] is False
    assert "damaged" not in rows[-1]


# --------------------------------------------------------------------------------------------------------------------
# Order of system calls. A kill does not lose data in the page cache, a power failure does.


@contextmanager
def recorded_system_calls(calls: list[str], before: dict[str, Callable[[], None]] | None = None) -> Iterator[None]:
    """Record the names of system calls in `calls`. `before` has actions to run just before the first call of a name."""
    names = {"write", "fsync", "link", "replace", "rename", "unlink"}
    pending = dict(before or {})

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__module__ == "posix" and arg.__name__ in names:
            calls.append(arg.__name__)
            action = pending.pop(arg.__name__, None)
            if action is not None:
                sys.setprofile(None)
                action()
                sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not pending, f"never called: {[*pending]}"


def find_order_error(calls: list[str]) -> str | None:
    """Return the error in the order of these system calls; None if it is safe."""
    naming = [index for index, name in enumerate(calls) if name in ("link", "replace", "rename")]
    if not naming:
        return "no file was named"
    for index in naming:
        if [name for name in calls[:index] if name in ("write", "fsync")][-1:] != ["fsync"]:
            return "named before the contents are durable"
    if "fsync" not in calls[naming[-1] :]:
        return "the name is not durable"
    return None


def write_version(store: Store) -> None:
    store.write(make_version(0, 2), make_tensors(2))


@pytest.mark.parametrize("kind", [Store, NameFirstStore, InPlaceStore])
@pytest.mark.parametrize(
    "write", [write_version, lambda store: store.write(make_members(2))], ids=["version", "members"]
)
def test_file_is_durable_before_it_is_named_and_the_name_before_write_returns(tmp_path, kind, write):
    create_store(tmp_path, 1).close()
    with kind.open(tmp_path) as store:
        calls: list[str] = []
        with recorded_system_calls(calls):
            write(store)
    expected = {
        Store: None,
        NameFirstStore: "named before the contents are durable",
        InPlaceStore: "no file was named",
    }
    assert find_order_error(calls) == expected[kind], calls


# --------------------------------------------------------------------------------------------------------------------
# Takeover by another syncer during a write


@pytest.mark.parametrize("moment", ["write", "fsync", "link"])
def test_version_written_during_a_takeover_is_not_durable(tmp_path, moment):
    with create_store(tmp_path, 1) as store:
        with (
            recorded_system_calls([], {moment: lambda: raise_epoch(tmp_path)}),
            pytest.raises(FencedError, match="epoch 9"),
        ):
            write_version(store)
        assert store.read_newest(0)[0] == 1
        assert unfinished_files(tmp_path) == []
        named = (tmp_path / "fragments/000/000000002.safetensors").exists()
        assert named == (moment == "link")  # complete, but never published


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_file_replaced_during_a_takeover_is_not_durable(tmp_path, moment):
    with create_store(tmp_path, 1) as store:
        with recorded_system_calls([], {moment: lambda: raise_epoch(tmp_path)}), pytest.raises(FencedError):
            store.write(make_members(2))
        assert unfinished_files(tmp_path) == []


def test_version_of_a_later_syncer_is_never_replaced(tmp_path):
    """1. The old syncer reads the epoch for the last time: it is its own. 2. A later syncer takes over, merges and
    publishes version 2. 3. The old syncer names its own version 2.
    """
    path = tmp_path / "fragments/000/000000002.safetensors"

    def take_over() -> None:
        raise_epoch(tmp_path)
        path.write_bytes(b"".join(encode_tensor_file("", make_tensors(77))))

    with create_store(tmp_path, 1) as store:
        with recorded_system_calls([], {"link": take_over}), pytest.raises(FencedError):
            write_version(store)
        assert has_sample_tensors(read_tensors(path)[1], 77)
        assert unfinished_files(tmp_path) == []


def test_named_version_of_a_failed_write_is_written_again(tmp_path):
    """For example, the folder could not be made durable: the file exists, but was never published."""
    with create_store(tmp_path, 1) as store:
        path = tmp_path / "fragments/000/000000002.safetensors"
        path.write_bytes(b"of an earlier attempt")
        write_version(store)
        assert has_sample_tensors(store.read_newest(0)[2], 2)


def test_leftovers_are_removed_and_unknown_files_are_not(tmp_path):
    create_store(tmp_path, 1).close()
    leftovers = [
        tmp_path / f".members.json{TEMPORARY_SUFFIX}",
        tmp_path / f"fragments/000/.000000002.safetensors{TEMPORARY_SUFFIX}",
    ]
    unknown = [tmp_path / "notes.txt", tmp_path / "fragments/000/mine.safetensors", tmp_path / "fragments/readme"]
    for path in [*leftovers, *unknown]:
        path.write_text("half")
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 1
        assert [path.exists() for path in leftovers] == [False, False]
        assert [path.exists() for path in unknown] == [True, True, True]


def test_unfinished_file_linked_to_a_finished_one_is_not_overwritten(tmp_path):
    with create_store(tmp_path, 1) as store:
        path = tmp_path / "fragments/000/000000001.safetensors"
        os.link(path, path.with_name(f".000000002.safetensors{TEMPORARY_SUFFIX}"))  # killed between link and unlink
        write_version(store)
        assert has_sample_tensors(read_tensors(path)[1], 1)
