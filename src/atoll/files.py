"""Atomic file writes and file locks.

After a crash or on a full disk, a path holds its old content or the new one, never a part.

The content goes to a temporary file next to the path, is made durable, and then gets its name in one step. `durable` is
False only where losing the file to a power cut is harmless: nothing is fsynced then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".unfinished"
"""Suffix of a temporary file. One that is found was left by a killed process."""

_PROCESS_TAG = os.urandom(4).hex()
"""Part of the name of every temporary file of this process: no other process may rename or overwrite them."""

_CHUNK_BYTES = 2**20


@contextlib.contextmanager
def atomic_write(
    path: Path,
    *,
    durable: bool = True,
    replace: bool = True,
    mode: int = 0o644,
    before_rename: Callable[[], None] | None = None,
) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends, or is removed if the block raises.

    Without `replace` an existing file stays, and the error is `FileExistsError`. `before_rename` is called when only
    the name is missing, and may still raise. `name` of the yielded file is its path: a library that opens files itself
    may write there. Two threads must not write the same path at the same time.
    """
    temporary = _temporary(path)
    try:
        # Remove an old one instead of truncating it: it may be a second name of a finished file.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        if replace:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename, error.filename2 = str(path), None  # ENOSPC from a write has no file name
        raise
    if durable:
        sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid():x}-{_PROCESS_TAG}{TEMPORARY_SUFFIX}")


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder that replaces `path` when the block ends, or is removed if the block raises.

    The files in it are made durable by the block.
    """
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def write_file(
    path: Path,
    chunks: Iterable[memoryview | bytes | bytearray],
    *,
    durable: bool = True,
    replace: bool = True,
    mode: int = 0o644,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """Write a file atomically; the arguments are those of `atomic_write`."""
    with atomic_write(path, durable=durable, replace=replace, mode=mode, before_rename=before_rename) as file:
        for piece in chunks:
            view = memoryview(piece)
            while view.nbytes:
                written = os.write(file.fileno(), view[:_CHUNK_BYTES])
                view = view[written:]


def write_text(path: Path, text: str, *, durable: bool = True, mode: int = 0o644) -> None:
    """Write or replace a UTF-8 file atomically."""
    write_file(path, [text.encode("utf-8")], durable=durable, mode=mode)


def _link(temporary: Path, path: Path) -> None:
    """Name the file unless the name is taken: a rename would replace the other file."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(temporary, path)  # a file system without links
        return
    os.unlink(temporary)


def link_or_copy(path: Path, name: Path) -> None:
    """Give a file a second name, so that it stays when the first is removed; a copy where there are no links."""
    try:
        os.link(path, name)
    except FileNotFoundError:
        raise
    except OSError:
        write_file(name, [path.read_bytes()])


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        error.filename = str(folder)
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


# --------------------------------------------------------------------------------------------------------------------
# Locks


class LockHeldError(Exception):
    """Another process holds the lock. `owner` is what that process wrote into the file; it may be empty."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is locked by {owner or 'another process'}")
        self.owner = owner


def acquire_lock(path: Path, owner: str) -> int:
    """Lock a file, write its owner into it, and return it open. The lock ends when no process has the file open."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeldError(path, os.pread(lock, 4096, 0).decode("utf-8", "replace").strip()) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, owner.encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process on this machine holds the lock."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
