"""Make the disk of one process full or read-only.

With root, a process with a planned disk fault gets its own small disk, a tmpfs, before it starts. A full disk is then
ENOSPC from the kernel. A read-only disk is a second, read-only mount of the same disk over it: opening a file for
writing fails with EROFS, and files that are already open, such as a tape, stay writable.

Without root, a full disk is a file size limit that is set on the running process (EFBIG), and a read-only disk removes
the write permission from its folders (EACCES). A slow disk is made inside the process: see `in_process`.
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
"""File size limit that stands for a full disk without root. Files of one line fit, versions and tapes do not."""

_SOURCE = re.compile(r"atoll-disk-(\d+)")


class Disk:
    """A folder whose writes can be made to fail. `full_method` and `read_only_method` describe how."""

    def __init__(self, folder: Path, try_mount: bool = True) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._is_mounted = False
        self._is_read_only_mount = False
        self._is_full = False
        self._limited_pid: int | None = None  # process with the file size limit
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
        """Fill the disk. Return whether it is full.

        Called again while the fault lasts, to fill the space of files that the process has removed.
        """
        self._is_full = True
        if self._is_mounted:
            return self._fill_up()
        if pid is None:
            return False
        if self._limited_pid is not None and self._limited_pid != pid:
            self._limited_pid = None  # restarted: the limit ended with the old process
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT_BYTES, hard))
        except (OSError, ValueError):
            return False
        self._limited_pid = pid
        return True

    def _fill_up(self) -> bool:
        """Write until the kernel refuses a single byte."""
        piece = bytes(2**20)
        file = os.open(self.folder / FILL_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    os.write(file, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
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
            with contextlib.suppress(OSError, ValueError):  # the process has exited, and its limit with it
                _, hard = resource.prlimit(self._limited_pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self._limited_pid, resource.RLIMIT_FSIZE, (hard, hard))
            self._limited_pid = None

    # ------------------------------------------------------------------------------------------ read-only

    def make_read_only(self) -> bool:
        """Make the disk read-only: opening a file for writing fails. Return whether it does. Open files stay
        writable."""
        if self._is_mounted:
            self._is_read_only_mount = command_succeeds(
                "mount", "--bind", "-o", "ro", str(self.folder), str(self.folder)
            )
            return self._is_read_only_mount
        if os.geteuid() == 0:
            return False  # root ignores permissions, and there is no mount to refuse writes
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

    # ------------------------------------------------------------------------------------------ cleanup

    def close(self) -> None:
        """End all faults and move the content of the disk to the disk of the run, under the same path."""
        self.make_writable()
        self.free()
        if not self._is_mounted:
            return
        copy = self.folder.with_name(f".{self.folder.name}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy, symlinks=True)
        if not command_succeeds("umount", str(self.folder)):
            command_succeeds("umount", "-l", str(self.folder))
        self._is_mounted = False
        shutil.rmtree(self.folder)
        copy.rename(self.folder)


def list_mounts() -> list[tuple[int, str]]:
    """Return the mounted disks of `atoll chaos`: pid of the process that mounted each, and its path."""
    found = []
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            source, path = line.split()[:2]
            match = _SOURCE.fullmatch(source)
            if match is not None:
                found.append((int(match[1]), path.replace("\\040", " ")))
    return found


def remove_stale() -> list[str]:
    """Unmount the disks of processes that have exited. Return their paths."""
    removed = []
    for owner, path in reversed(list_mounts()):
        if not Path(f"/proc/{owner}").exists():
            command_succeeds("umount", "-l", path)
            removed.append(path)
    return removed
