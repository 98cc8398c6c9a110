"""Disks: the kernel refuses writes during a fault and accepts them afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.chaos import disks
from atoll.chaos.disks import Disk

WRITER = """
import os, sys
for line in sys.stdin:
    try:
        with open(line.strip(), "ab", buffering=0) as file:
            size = file.write(bytes(100_000))
        print("wrote", size, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


class Writer:
    """A process that appends 100 kB to a file on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def write(self, path: Path) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def writer():
    process = Writer()
    yield process
    process.close()


@pytest.fixture
def mounted(tmp_path):
    disk = Disk(tmp_path / "disk")
    assert disk.full_method == "a tmpfs that is full"
    yield disk
    disk.close()
    assert [path for _, path in disks.list_mounts() if path.startswith(str(tmp_path))] == []


def test_full_disk_refuses_writes_until_freed(mounted, writer):
    file = mounted.folder / "file"
    assert writer.write(file) == "wrote 100000"
    assert mounted.fill(writer.pid)
    assert writer.write(mounted.folder / "other") == str(errno.ENOSPC)
    file.unlink()  # the next call fills the freed space
    assert mounted.fill(writer.pid)
    assert writer.write(mounted.folder / "other") == str(errno.ENOSPC)
    mounted.free()
    assert writer.write(mounted.folder / "other") == "wrote 100000"


def test_read_only_disk_can_be_read_and_becomes_writable_again(mounted, writer):
    file = mounted.folder / "file"
    assert writer.write(file) == "wrote 100000"
    with open(file, "ab", buffering=0) as tape:  # was open before the fault
        assert mounted.make_read_only()
        assert writer.write(file) == str(errno.EROFS)
        assert len(file.read_bytes()) == 100_000
        tape.write(b"x")
        mounted.make_writable()
    assert writer.write(file) == "wrote 100000"
    assert file.stat().st_size == 200_001


def test_closed_disk_leaves_its_files_in_place(tmp_path, writer):
    disk = Disk(tmp_path / "disk")
    (disk.folder / "deep").mkdir()
    writer.write(disk.folder / "deep" / "file")
    disk.fill(writer.pid)
    disk.make_read_only()
    disk.close()
    disk.close()
    assert (tmp_path / "disk/deep/file").stat().st_size == 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["deep"]
    assert writer.write(tmp_path / "disk/deep/file") == "wrote 100000"
    assert not os.path.ismount(tmp_path / "disk")


def test_full_disk_without_root_limits_file_size_of_process(tmp_path, writer):
    disk = Disk(tmp_path / "disk", try_mount=False)
    assert "limit" in disk.full_method
    file = disk.folder / "file"
    assert disk.fill(writer.pid)
    assert writer.write(file) == f"wrote {disks.FILE_SIZE_LIMIT_BYTES}"
    assert writer.write(file) == str(errno.EFBIG)
    (tmp_path / "other").write_bytes(bytes(100_000))  # only that process is limited
    disk.free()
    assert writer.write(file) == "wrote 100000"
    disk.fill(writer.pid)
    disk.close()
    assert writer.write(file) == "wrote 100000"
    assert not disk.fill(None)  # no process to limit
    assert not disk.fill(2**22 + 1)


def test_read_only_disk_without_root_removes_write_permission(tmp_path):
    disk = Disk(tmp_path / "disk", try_mount=False)
    (disk.folder / "deep").mkdir()
    if os.geteuid() == 0:
        assert not disk.make_read_only()  # root ignores permissions, so it reports failure
        return
    assert disk.make_read_only()
    with pytest.raises(PermissionError):
        (disk.folder / "deep/file").write_text("x")
    disk.make_writable()
    (disk.folder / "deep/file").write_text("x")


def test_disks_of_killed_process_are_removed(tmp_path, mounted):
    text = (
        "import sys; from pathlib import Path; from atoll.chaos.disks import Disk; d = Disk(Path(sys.argv[1]));"
        " d.make_read_only(); print(d.full_method, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "left")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "a tmpfs that is full\n"
        tool.kill()
    assert str(tmp_path / "left") in disks.remove_stale()
    assert not os.path.ismount(tmp_path / "left")
    assert os.path.ismount(mounted.folder)  # the disk of a running process stays
