"""The disk is full, the directory may not be written, the process is killed, another syncer takes over meanwhile.

Each fault is a real one, and each test asserts that it happened.
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


def unfinished(directory: Path) -> list[Path]:
    return [*directory.rglob(f".*{TEMPORARY_SUFFIX}")]


# --------------------------------------------------------------------------------------------------------------------
# No room


@contextmanager
def small_files_only() -> Iterator[None]:
    """No file of this process grows beyond 64 KiB; beyond that a write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))  # Python ignores the signal and gets the error
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_the_old_version_and_can_be_repeated(tmp_path):
    with create_store(tmp_path, 1, LARGE) as store:
        before = files(tmp_path)
        with small_files_only(), pytest.raises(OSError, match=r"000000002\.safetensors") as caught:
            store.write(make_version(0, 2), make_tensors(2, LARGE))
        assert caught.value.errno == errno.EFBIG
        assert files(tmp_path) == before
        assert store.read_newest(0)[0] == 1
        with small_files_only():
            store.write(make_members(2))  # what is small still fits
        store.write(make_version(0, 2), make_tensors(2, LARGE))
        assert has_sample_tensors(store.read_newest(0)[2], 2, LARGE)
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], timeout=300, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=300, check=True)


def test_a_full_disk_is_said_and_goes_on_when_there_is_room(small_disk):
    with create_store(small_disk, 1, 2**15) as store:
        filling = small_disk / "filling"
        with open(filling, "wb", buffering=0) as file:  # others fill the disk up
            while file.write(bytes(2**20)) == 2**20:
                pass
        for _ in range(3):
            with pytest.raises(OSError, match=r"000000002\.safetensors") as caught:
                store.write(make_version(0, 2), make_tensors(2, 2**19))
            assert caught.value.errno == errno.ENOSPC
            assert unfinished(small_disk) == []
            assert store.read_newest(0)[:2] == (1, make_version(0, 1))
        filling.unlink()
        store.write(make_version(0, 2), make_tensors(2, 2**19))
        assert has_sample_tensors(store.read_newest(0)[2], 2, 2**19)


def test_a_disk_that_turns_read_only_is_said(small_disk):
    with create_store(small_disk, 1):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=300, check=True)
    with pytest.raises(OSError, match="lock") as caught:
        Store.open(small_disk)
    assert caught.value.errno == errno.EROFS


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere; nobody may not."""
    ours = os.geteuid()
    if ours == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if ours == 0:
            os.seteuid(0)


def test_a_directory_that_may_not_be_written_is_said():
    # Below pytest's own folder nobody may even look, and that would be another fault.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        with create_store(directory, 1) as store:
            folders = [path for path in directory.rglob("*") if path.is_dir()]
            for folder in [directory, *folders]:
                folder.chmod(0o555)
            before = files(directory)
            with as_nobody():
                for write, where in (
                    (lambda: store.write(make_version(0, 2), make_tensors(2)), "000000002.safetensors"),
                    (lambda: store.write(make_members(2)), "members.json"),
                    (lambda: store.write(make_snapshot(1, 1, 1)), "snapshots/000000001"),
                    (lambda: Store.open(directory / "new"), "new"),
                ):
                    with pytest.raises(PermissionError, match=where):
                        write()
            assert files(directory) == before
            for folder in [directory, *folders]:
                folder.chmod(0o755)
            store.write(make_version(0, 2), make_tensors(2))
            assert store.read_newest(0)[0] == 2


def test_a_directory_that_vanishes_is_said(tmp_path):
    with create_store(tmp_path / "store", 1) as store:
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(FileNotFoundError, match="store/epoch"):
            store.write(make_members(2))


# --------------------------------------------------------------------------------------------------------------------
# Killed


def kills(*arguments: str) -> list[dict[str, Any]]:
    # What a process has written survives its death on any disk, and hundreds of deaths are quicker in memory.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "tests.store.store_kills", *arguments, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


EITHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda row: row["versions"],
    "members": lambda row: row["members"],
    "snapshot": lambda row: row["snapshots"],
    "open": lambda row: row["epoch"],
}
BEFORE_AND_AFTER = {
    "version": ([2, 2], [2, 3]),
    "members": (1, 2),
    "snapshot": ([], [[2, 2]]),
    "open": (2, 3),  # of the process that looks
}


# The files of the others are written by the same function; test_kill_points.py kills at their operations.
@pytest.mark.parametrize("kind", ["version", *(pytest.param(kind, marks=LONG) for kind in [*EITHER][1:])])
def test_killed_at_any_line_the_old_or_the_new_is_found_and_nothing_else(kind):
    rows = kills("lines", kind, "Store")
    *killed, through = rows
    assert [row["killed"] for row in rows] == [True] * len(killed) + [False]
    assert len(killed) > 40
    seen = [EITHER[kind](row) for row in rows]
    before, after = BEFORE_AND_AFTER[kind]
    turn = seen.index(after)
    assert seen == [before] * turn + [after] * (len(seen) - turn)
    assert turn > 10
    unchanged = {"versions", "members", "snapshots", "settings", "left over"} - {kind, f"{kind}s"}
    for row in rows:
        assert row["left over"] == []
        assert {name: row[name] for name in unchanged} == {name: through[name] for name in unchanged}


def test_killed_anywhere_the_last_version_that_was_told_is_found():
    rows = kills("anywhere", "20", "Store")
    assert len(rows) == 20
    for row in rows:
        assert row["killed"]
        assert row["versions"][0] in (row["told"], row["told"] + 1)
        assert row["left over"] == []
    assert sum(row["unfinished"] for row in rows) >= 1  # at least once it was in the middle of a write


@pytest.mark.parametrize(
    ("kind", "file"),
    [pytest.param("version", "fragments/001/000000003.safetensors", marks=LONG), ("members", "members.json")],
)
def test_a_store_that_writes_in_place_is_caught(kind, file):
    rows = kills("lines", kind, "InPlaceStore")
    assert {row["damaged"] for row in rows if "damaged" in row} == {file}
    assert rows[-1]["killed"] is False
    assert "damaged" not in rows[-1]


# --------------------------------------------------------------------------------------------------------------------
# In which order the system is asked. A kill does not lose what the system has taken over, a power cut does.


@contextmanager
def calls_of_the_system(seen: list[str], at: dict[str, Callable[[], None]] | None = None) -> Iterator[None]:
    """Notes the calls of `os`; `at` does something just before the first call of a name."""
    names = {"write", "fsync", "link", "replace", "rename", "unlink"}
    to_do = dict(at or {})

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__module__ == "posix" and arg.__name__ in names:
            seen.append(arg.__name__)
            action = to_do.pop(arg.__name__, None)
            if action is not None:
                sys.setprofile(None)
                action()
                sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not to_do, f"never called: {[*to_do]}"


def careless(calls: list[str]) -> str | None:
    """What is wrong with this order of calls, if something is."""
    naming = [place for place, name in enumerate(calls) if name in ("link", "replace", "rename")]
    if not naming:
        return "no file got a name"
    for place in naming:
        if [name for name in calls[:place] if name in ("write", "fsync")][-1:] != ["fsync"]:
            return "a name before the contents are durable"
    if "fsync" not in calls[naming[-1] :]:
        return "the name is not durable"
    return None


def write_version(store: Store) -> None:
    store.write(make_version(0, 2), make_tensors(2))


@pytest.mark.parametrize("kind", [Store, NameFirstStore, InPlaceStore])
@pytest.mark.parametrize(
    "write", [write_version, lambda store: store.write(make_members(2))], ids=["version", "members"]
)
def test_a_file_is_durable_before_it_has_its_name_and_the_name_before_it_is_told(tmp_path, kind, write):
    create_store(tmp_path, 1).close()
    with kind.open(tmp_path) as store:
        seen: list[str] = []
        with calls_of_the_system(seen):
            write(store)
    wrong = {
        Store: None,
        NameFirstStore: "a name before the contents are durable",
        InPlaceStore: "no file got a name",
    }
    assert careless(seen) == wrong[kind], seen


# --------------------------------------------------------------------------------------------------------------------
# Another syncer takes over in the middle of a write


@pytest.mark.parametrize("moment", ["write", "fsync", "link"])
def test_who_is_overtaken_in_the_middle_of_a_write_does_not_call_it_durable(tmp_path, moment):
    with create_store(tmp_path, 1) as store:
        with (
            calls_of_the_system([], {moment: lambda: raise_epoch(tmp_path)}),
            pytest.raises(FencedError, match="epoch 9"),
        ):
            write_version(store)
        assert store.read_newest(0)[0] == 1
        assert unfinished(tmp_path) == []
        named = (tmp_path / "fragments/000/000000002.safetensors").exists()
        assert named == (moment == "link")  # whole, and never told to anybody


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_who_is_overtaken_while_it_replaces_a_file_does_not_call_it_durable(tmp_path, moment):
    with create_store(tmp_path, 1) as store:
        with calls_of_the_system([], {moment: lambda: raise_epoch(tmp_path)}), pytest.raises(FencedError):
            store.write(make_members(2))
        assert unfinished(tmp_path) == []


def test_the_version_of_a_later_syncer_is_never_replaced(tmp_path):
    """1. We look at the epoch for the last time; it is ours. 2. A later syncer takes over, merges and publishes version
    2. 3. We give our own version 2 its name."""
    path = tmp_path / "fragments/000/000000002.safetensors"

    def take_over() -> None:
        raise_epoch(tmp_path)
        path.write_bytes(b"".join(encode_tensor_file("", make_tensors(77))))

    with create_store(tmp_path, 1) as store:
        with calls_of_the_system([], {"link": take_over}), pytest.raises(FencedError):
            write_version(store)
        assert has_sample_tensors(read_tensors(path)[1], 77)
        assert unfinished(tmp_path) == []


def test_a_version_of_our_own_that_got_its_name_and_failed_is_written_again(tmp_path):
    """As when the folder could not be made durable: the file is there, and nobody was told."""
    with create_store(tmp_path, 1) as store:
        path = tmp_path / "fragments/000/000000002.safetensors"
        path.write_bytes(b"of an earlier try")
        write_version(store)
        assert has_sample_tensors(store.read_newest(0)[2], 2)


def test_leftovers_are_removed_and_strangers_are_not(tmp_path):
    create_store(tmp_path, 1).close()
    left = [
        tmp_path / f".members.json{TEMPORARY_SUFFIX}",
        tmp_path / f"fragments/000/.000000002.safetensors{TEMPORARY_SUFFIX}",
    ]
    strangers = [tmp_path / "notes.txt", tmp_path / "fragments/000/mine.safetensors", tmp_path / "fragments/readme"]
    for path in [*left, *strangers]:
        path.write_text("half")
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 1
        assert [path.exists() for path in left] == [False, False]
        assert [path.exists() for path in strangers] == [True, True, True]


def test_an_unfinished_file_that_is_a_second_name_of_a_finished_one_is_not_written_over(tmp_path):
    with create_store(tmp_path, 1) as store:
        path = tmp_path / "fragments/000/000000001.safetensors"
        os.link(path, path.with_name(f".000000002.safetensors{TEMPORARY_SUFFIX}"))  # left between name and removal
        write_version(store)
        assert has_sample_tensors(read_tensors(path)[1], 1)
