"""Disks that are full or may not be written, for one process at a time.

With root a process that is to suffer has a small disk of its own from the start, a tmpfs: full is then ENOSPC from the
kernel, and read-only a second, read-only mount of the same disk over it (EROFS for everything that is opened from then
on; the file of a tape, which is open already, is written on). Without root full is a limit on the size of files that is
set on the running process from outside (EFBIG), and read-only takes the right to write away from its folders (EACCES).
A slow disk is made in the process itself: see `in_process`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import stat
from pathlib import Path

from atoll.chaos.netns import command_succeeds

DISK_BYTES = 256 * 2**20
FILL_FILE = ".filling"
FILE_SIZE_LIMIT_BYTES = 4096
"""Without root: no file of the process grows beyond so much. Notes of one line still fit, versions and tapes do not."""

_SOURCE = re.compile(r"atoll-disk-(\d+)")


class Disk:
    """A folder that can be made to fail, by means that `how_full` and `how_protected` say in words."""

    def __init__(self, folder: Path, try_mount: bool = True) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._is_mounted = False
        self._is_read_only_mount = False
        self._is_full = False
        self._limited_pid: int | None = None  # process whose files may not grow
        self._modes: dict[Path, int] = {}
        if try_mount and os.geteuid() == 0:
            source = f"atoll-disk-{os.getpid()}"
            size = f"size={DISK_BYTES}"
            self._is_mounted = command_succeeds("mount", "-t", "tmpfs", "-o", size, source, str(self.folder))

    @property
    def full_method(self) -> str:
        return "a tmpfs that is full" if self._is_mounted else "a limit on the size of its files"

    @property
    def read_only_method(self) -> str:
        return "a read-only mount" if self._is_mounted else "folders without the right to write"

    # ------------------------------------------------------------------------------------------ full

    def fill(self, pid: int | None) -> bool:
        """No byte more fits. Called again while the fault lasts: what the process removes is taken up too."""
        self._is_full = True
        if self._is_mounted:
            return self._fill_up()
        if pid is None:
            return False
        if self._limited_pid is not None and self._limited_pid != pid:
            self._limited_pid = None  # it was started again: the limit went with the old process
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT_BYTES, hard))
        except (OSError, ValueError):
            return False
        self._limited_pid = pid
        return True

    def _fill_up(self) -> bool:
        """True when the kernel has said that nothing fits any more."""
        piece = bytes(2**20)
        file = os.open(self.folder / FILL_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    os.write(file, piece)
                except OSError as wrong:
                    if wrong.errno != errno.ENOSPC:
                        raise
                    if len(piece) == 1:
                        return True
                    piece = piece[: len(piece) // 2]
        finally:
            os.close(file)

    def free(self) -> None:
        self._is_full = False
        if self._is_mounted:
            (self.folder / FILL_FILE).unlink(missing_ok=True)
        elif self._limited_pid is not None:
            with contextlib.suppress(OSError, ValueError):  # it is gone, and its limit with it
                _, hard = resource.prlimit(self._limited_pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self._limited_pid, resource.RLIMIT_FSIZE, (hard, hard))
            self._limited_pid = None

    # ------------------------------------------------------------------------------------------ read-only

    def make_read_only(self) -> bool:
        """Nothing that is opened from now on can be written."""
        if self._is_mounted:
            self._is_read_only_mount = command_succeeds(
                "mount", "--bind", "-o", "ro", str(self.folder), str(self.folder)
            )
            return self._is_read_only_mount
        if os.geteuid() == 0:
            return False  # root may write everywhere, and there is no mount to say no
        for folder in [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]:
            self._modes[folder] = stat.S_IMODE(folder.stat().st_mode)
            folder.chmod(self._modes[folder] & ~0o222)
        return True

    def make_writable(self) -> None:
        if self._is_read_only_mount:
            self._is_read_only_mount = not command_succeeds("umount", "-l", str(self.folder))
        for folder, mode in self._modes.items():
            with contextlib.suppress(FileNotFoundError):
                folder.chmod(mode)
        self._modes.clear()

    # ------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Everything is whole again, and what is on the disk stays in the folder, on the disk of the run."""
        self.make_writable()
        self.free()
        if not self._is_mounted:
            return
        kept = self.folder.with_name(f".{self.folder.name}.kept")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder, kept, symlinks=True)
        if not command_succeeds("umount", str(self.folder)):
            command_succeeds("umount", "-l", str(self.folder))
        self._is_mounted = False
        shutil.rmtree(self.folder)
        kept.rename(self.folder)


def list_mounts() -> list[tuple[int, str]]:
    """Disks of runs of this tool: the process that made each, and where it is."""
    found = []
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            source, where = line.split()[:2]
            maker = _SOURCE.fullmatch(source)
            if maker is not None:
                found.append((int(maker[1]), where.replace("\\040", " ")))
    return found


def remove_stale() -> list[str]:
    """Unmount what was left by processes that are gone."""
    swept = []
    for maker, where in reversed(list_mounts()):
        if not Path(f"/proc/{maker}").exists():
            command_succeeds("umount", "-l", where)
            swept.append(where)
    return swept
