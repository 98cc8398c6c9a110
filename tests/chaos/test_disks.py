"""Disks: full and read-only for real, as the kernel says it, and everything as it was afterwards."""

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
            wrote = file.write(bytes(100_000))
        print("wrote", wrote, flush=True)
    except OSError as wrong:
        print(wrong.errno, flush=True)
"""


class Writer:
    """A process that writes 100 kB into a file whenever it is told to."""

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
    made = Writer()
    yield made
    made.close()


@pytest.fixture
def mounted(tmp_path):
    disk = Disk(tmp_path / "disk")
    assert disk.full_method == "a tmpfs that is full"
    yield disk
    disk.close()
    assert [where for _, where in disks.list_mounts() if where.startswith(str(tmp_path))] == []


def test_a_full_disk_takes_no_byte_more(mounted, writer):
    file = mounted.folder / "file"
    assert writer.write(file) == "wrote 100000"
    assert mounted.fill(writer.pid)
    assert writer.write(mounted.folder / "other") == str(errno.ENOSPC)
    file.unlink()  # what is freed is taken up again
    assert mounted.fill(writer.pid)
    assert writer.write(mounted.folder / "other") == str(errno.ENOSPC)
    mounted.free()
    assert writer.write(mounted.folder / "other") == "wrote 100000"


def test_a_read_only_disk_can_be_read_and_is_written_again_later(mounted, writer):
    file = mounted.folder / "file"
    assert writer.write(file) == "wrote 100000"
    with open(file, "ab", buffering=0) as held:  # was open before, as a tape is
        assert mounted.make_read_only()
        assert writer.write(file) == str(errno.EROFS)
        assert len(file.read_bytes()) == 100_000
        held.write(b"x")
        mounted.make_writable()
    assert writer.write(file) == "wrote 100000"
    assert file.stat().st_size == 200_001


def test_what_was_written_stays_when_the_disk_goes(tmp_path, writer):
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


def test_without_root_a_limit_on_the_process_stands_for_a_full_disk(tmp_path, writer):
    disk = Disk(tmp_path / "disk", try_mount=False)
    assert "limit" in disk.full_method
    file = disk.folder / "file"
    assert disk.fill(writer.pid)
    assert writer.write(file) == f"wrote {disks.FILE_SIZE_LIMIT_BYTES}"
    assert writer.write(file) == str(errno.EFBIG)
    (tmp_path / "other").write_bytes(bytes(100_000))  # nobody else is limited
    disk.free()
    assert writer.write(file) == "wrote 100000"
    disk.fill(writer.pid)
    disk.close()
    assert writer.write(file) == "wrote 100000"
    assert not disk.fill(None)  # nobody to limit
    assert not disk.fill(2**22 + 1)


def test_without_root_folders_lose_the_right_to_write(tmp_path):
    disk = Disk(tmp_path / "disk", try_mount=False)
    (disk.folder / "deep").mkdir()
    if os.geteuid() == 0:
        assert not disk.make_read_only()  # root may write everywhere: it says that nothing happened
        return
    assert disk.make_read_only()
    with pytest.raises(PermissionError):
        (disk.folder / "deep/file").write_text("x")
    disk.make_writable()
    (disk.folder / "deep/file").write_text("x")


def test_what_a_killed_tool_has_left_is_swept_away(tmp_path, mounted):
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
    assert os.path.ismount(mounted.folder)  # that of a living process stays
