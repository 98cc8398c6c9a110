"""`metrics/syncer.jsonl`: what the syncer measures, in files that stay bounded however long a run is.

    syncer.jsonl                   what is written now, up to FILE_BYTES
    syncer-000003-000003.jsonl     the third file, full
    syncer-000001-000002.jsonl     the first two, joined: of every subject each second line is left

Of full files that stand for as many files each, at most MOST_ALIKE are kept: of one more, the oldest two are joined. So
what is kept grows with the logarithm of a run's length, the newest lines are all there, and what is twice as old is
half as dense. A subject is what the first two fields of a line name: a kind, and a fragment or a learner.

A line is written at once and whole. A reader finds at most the last one incomplete, or one that a full disk has cut.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from atoll.files import UNFINISHED, atomic_write

FOLDER = "metrics"
NEWEST = "syncer.jsonl"
FILE_BYTES = 8 * 2**20
MOST_ALIKE = 2
"""After 4, 8, 16, ... 1024 full files some 4, 6, 8, ... 20 are left; 16 learners fill one in half an hour."""

_OLD = re.compile(r"syncer-(\d{6,})-(\d{6,})\.jsonl")


class OldFile(NamedTuple):
    """Files number `first` to `last`, joined into one."""

    first: int
    last: int
    path: Path

    @property
    def files(self) -> int:
        return self.last - self.first + 1


def old_files(folder: Path) -> list[OldFile]:
    """In the order of time, without those that are in another one: whoever joined them was killed just then."""
    found = []
    for path in folder.glob("syncer-*.jsonl"):
        name = _OLD.fullmatch(path.name)
        if name is not None:
            found.append(OldFile(int(name[1]), int(name[2]), path))
    found.sort(key=lambda file: (file.first, -file.last))
    return [file for file in found if not any(_within(file, other) for other in found)]


def _within(file: OldFile, other: OldFile) -> bool:
    return file != other and other.first <= file.first and file.last <= other.last


class MetricsWriter:
    """Appends lines. A disk that is full or gone costs the lines, and a sentence in the log; nothing else."""

    def __init__(self, run: Path, log: logging.Logger, file_bytes: int = FILE_BYTES) -> None:
        self._folder = run / FOLDER
        self._log = log
        self._file_bytes = file_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._lacks_end = False  # of the newest line only a part is in the file
        self._complained = False
        self._joining: threading.Thread | None = None

    def write(self, fields: Mapping[str, Any]) -> None:
        """One line. The first two fields name its kind and its subject."""
        data = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            file = self._opened()
            if self._lacks_end:
                data = b"\n" + data
            written = file.write(data)
            self._size += written
            self._lacks_end = written < len(data)  # the disk was full in the middle of the line
            if self._size >= self._file_bytes:
                self._turn()
        except OSError as error:
            self._refused(error)
        else:
            if self._complained and not self._lacks_end:
                self._log.warning("metrics are written again; what was measured meanwhile is not in them")
                self._complained = False

    def _refused(self, error: OSError) -> None:
        if not self._complained:
            self._log.warning("metrics cannot be written (%s); the run goes on without them", error)
            self._complained = True

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._folder / NEWEST, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            assert self._file is not None
            self._size = self._file.tell()
            self._lacks_end = _is_cut(self._folder / NEWEST)  # whoever wrote before was killed in the middle of it
        return self._file

    def _turn(self) -> None:
        """The newest file is full: it becomes an old one, and old ones are joined, not in the thread of the loop."""
        self._close_file()
        old = old_files(self._folder)
        number = max((file.last for file in old), default=0) + 1
        os.rename(self._folder / NEWEST, self._folder / f"syncer-{number:06}-{number:06}.jsonl")
        if self._joining is None or not self._joining.is_alive():
            self._joining = threading.Thread(target=self._join, name="atoll-metrics", daemon=True)
            self._joining.start()

    def _join(self) -> None:
        try:
            join_old(self._folder)
        except OSError as error:
            self._log.warning("old metrics cannot be thinned out: %s", error)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def wait(self) -> None:
        """Until old files are joined, should that be under way."""
        if self._joining is not None:
            self._joining.join()

    def close(self) -> None:
        self.wait()
        with contextlib.suppress(OSError):
            self._close_file()


def join_old(folder: Path) -> None:
    """Until there are at most MOST_ALIKE of a kind. May be killed at any moment, and done again."""
    for leftover in folder.glob(f".*{UNFINISHED}"):
        leftover.unlink(missing_ok=True)
    while True:
        files = old_files(folder)
        for path in folder.glob("syncer-*.jsonl"):  # those that are in another one
            if _OLD.fullmatch(path.name) and path not in {file.path for file in files}:
                path.unlink()
        counts = Counter(file.files for file in files)
        alike = next((count for count in sorted(counts) if counts[count] > MOST_ALIKE), None)
        if alike is None:
            return
        one, other = [file for file in files if file.files == alike][:2]
        _join(folder, one, other)


def _join(folder: Path, one: OldFile, other: OldFile) -> None:
    seen: Counter[bytes] = Counter()
    with atomic_write(folder / f"syncer-{one.first:06}-{other.last:06}.jsonl", durable=False) as out:
        for file in (one, other):
            for line in _lines_of(file.path):
                subject = b",".join(line.split(b",", 2)[:2])
                if seen[subject] % 2 == 0:
                    out.write(line + b"\n")
                seen[subject] += 1


def _lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"}\n"):
                yield line[:-1]


def _is_cut(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class MetricsReader:
    """All lines of a run in the order of time, and those that are added, each once.

    Holds the newest file open: when that one is full and gets another name, it is read to its end first.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._begun = False
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was not read before. Call again for more."""
        if not self._begun:
            self._begun = True
            self._open()  # before the old ones are listed: it may become one of them at any moment
            for file in old_files(self._folder):
                with contextlib.suppress(FileNotFoundError):  # joined with another one this moment
                    for line in _lines_of(file.path) if not self._holds(file.path) else ():
                        yield from _parsed(line)
        while self._file is not None or self._open():
            yield from self._more()
            if self._holds(self._folder / NEWEST):
                return
            yield from self._more()  # what was written between the last look and its new name
            self.close()
            self._rest = b""

    def _open(self) -> bool:
        try:
            self._file = open(self._folder / NEWEST, "rb")  # noqa: SIM115 - closed by close()
        except FileNotFoundError:
            return False
        return True

    def _more(self) -> Iterator[dict[str, Any]]:
        assert self._file is not None
        while piece := self._file.read(1 << 20):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                yield from _parsed(line)

    def _holds(self, path: Path) -> bool:
        """This file is the one that is held open, whatever it was called then."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()  # whoever looks at a run seldom knows when it was the last time


def _parsed(line: bytes) -> Iterator[dict[str, Any]]:
    """Nothing where a full disk has cut the line."""
    if line.startswith(b"{") and line.endswith(b"}"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
