"""Inner state on its way from one learner to another: files, because nobody knows when the taker comes for it."""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

from atoll.core.types import Incarnation, LearnerId
from atoll.transport.wire import HEAD_BYTES, Kind, frame_head

Key = tuple[LearnerId, Incarnation]

MOST_FILES = 16
"""That wait at once. The oldest makes room: its taker has given up, or will ask another peer."""


class SpoolFile:
    """A whole frame in a file. Its payload is memory of the file, so nothing is held twice."""

    def __init__(self, spool: Spool, key: Key, header: bytes, payload_bytes: int) -> None:
        self._spool = spool
        self._key = key
        self._header = header
        # Two peers may give to the same learner at once. One file for both would be cut under the memory of the first.
        self.path = spool.folder / f"learner-{key[0]}-i{key[1]}-{next(spool.serial)}.part"
        size = HEAD_BYTES + len(header) + payload_bytes
        self._file = open(self.path, "w+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)  # a full disk says so here, and not by a signal later
        except OSError:
            self.close()
            raise
        self._memory = mmap.mmap(self._file.fileno(), size)
        self.payload = memoryview(self._memory)[HEAD_BYTES + len(header) :]

    def fill_in(self) -> None:
        """All of it has arrived: write what stands before it. Reads all of it once more, so not for the loop."""
        head = frame_head(Kind.INNER_STATE, 0, self._header, self.payload)
        self._memory[: HEAD_BYTES + len(self._header)] = head + self._header

    def keep(self) -> None:
        final = self.path.with_suffix(".state")
        self.path.rename(final)
        self._spool.kept(self._key, final)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)  # where it was kept it has another name
        self._file.close()


class Spool:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()  # of a syncer that is gone: nobody comes for it
        self.serial = itertools.count(1)
        self._files: dict[Key, Path] = {}

    def file(self, key: Key, header: bytes, payload_bytes: int) -> SpoolFile:
        return SpoolFile(self, key, header, payload_bytes)

    def kept(self, key: Key, path: Path) -> None:
        old = self._files.pop(key, None)
        if old is not None:
            old.unlink(missing_ok=True)
        self._files[key] = path
        while len(self._files) > MOST_FILES:
            oldest = next(iter(self._files))
            self._files.pop(oldest).unlink(missing_ok=True)

    def path(self, key: Key) -> Path | None:
        return self._files.get(key)

    def clear(self) -> None:
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()
