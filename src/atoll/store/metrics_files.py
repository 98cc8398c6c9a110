"""`metrics/syncer.jsonl`: what the syncer measures, in files that stay bounded however long a run is.

    syncer.jsonl                   what is written now, up to FILE_BYTES
    syncer-000003-000003.jsonl     the third file, full
    syncer-000001-000002.jsonl     the first two, joined: of every subject each second line is left

Of full files that stand for as many files each, at most MAX_FILES_PER_SPAN are kept: of one more, the oldest two are
joined. So what is kept grows with the logarithm of a run's length, the newest lines are all there, and what is twice as old is
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

from atoll.files import TEMPORARY_SUFFIX, atomic_write

METRICS_FOLDER = "metrics"
NEWEST_FILE = "syncer.jsonl"
MAX_FILE_BYTES = 8 * 2**20
MAX_FILES_PER_SPAN = 2
"""After 4, 8, 16, ... 1024 full files some 4, 6, 8, ... 20 are left; 16 learners fill one in half an hour."""

_OLD = re.compile(r"syncer-(\d{6,})-(\d{6,})\.jsonl")


class RotatedFile(NamedTuple):
    """Files number `first` to `last`, joined into one."""

    first: int
    last: int
    path: Path

    @property
    def span(self) -> int:
        return self.last - self.first + 1


def list_rotated_files(folder: Path) -> list[RotatedFile]:
    """In the order of time, without those that are in another one: whoever joined them was killed just then."""
    found = []
    for path in folder.glob("syncer-*.jsonl"):
        name = _OLD.fullmatch(path.name)
        if name is not None:
            found.append(RotatedFile(int(name[1]), int(name[2]), path))
    found.sort(key=lambda file: (file.first, -file.last))
    return [file for file in found if not any(_is_within(file, other) for other in found)]


def _is_within(file: RotatedFile, other: RotatedFile) -> bool:
    return file != other and other.first <= file.first and file.last <= other.last


class MetricsWriter:
    """Appends lines. A disk that is full or gone costs the lines, and a sentence in the log; nothing else."""

    def __init__(self, run: Path, log: logging.Logger, file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = run / METRICS_FOLDER
        self._log = log
        self._file_bytes = file_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._has_partial_line = False  # of the newest line only a part is in the file
        self._has_logged_failure = False
        self._compaction: threading.Thread | None = None

    def write(self, fields: Mapping[str, Any]) -> None:
        """One line. The first two fields name its kind and its subject."""
        data = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            file = self._open_file()
            if self._has_partial_line:
                data = b"\n" + data
            written = file.write(data)
            self._size += written
            self._has_partial_line = written < len(data)  # the disk was full in the middle of the line
            if self._size >= self._file_bytes:
                self._rotate()
        except OSError as error:
            self._log_failure(error)
        else:
            if self._has_logged_failure and not self._has_partial_line:
                self._log.warning("metrics are written again; what was measured meanwhile is not in them")
                self._has_logged_failure = False

    def _log_failure(self, error: OSError) -> None:
        if not self._has_logged_failure:
            self._log.warning("metrics cannot be written (%s); the run goes on without them", error)
            self._has_logged_failure = True

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._folder / NEWEST_FILE, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            assert self._file is not None
            self._size = self._file.tell()
            self._has_partial_line = _ends_mid_line(
                self._folder / NEWEST_FILE
            )  # whoever wrote before was killed in the middle of it
        return self._file

    def _rotate(self) -> None:
        """The newest file is full: it becomes an old one, and old ones are joined, not in the thread of the loop."""
        self._close_file()
        old = list_rotated_files(self._folder)
        number = max((file.last for file in old), default=0) + 1
        os.rename(self._folder / NEWEST_FILE, self._folder / f"syncer-{number:06}-{number:06}.jsonl")
        if self._compaction is None or not self._compaction.is_alive():
            self._compaction = threading.Thread(target=self._join, name="atoll-metrics", daemon=True)
            self._compaction.start()

    def _join(self) -> None:
        try:
            compact_rotated_files(self._folder)
        except OSError as error:
            self._log.warning("old metrics cannot be thinned out: %s", error)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def wait_for_compaction(self) -> None:
        """Until old files are joined, should that be under way."""
        if self._compaction is not None:
            self._compaction.join()

    def close(self) -> None:
        self.wait_for_compaction()
        with contextlib.suppress(OSError):
            self._close_file()


def compact_rotated_files(folder: Path) -> None:
    """Until there are at most MAX_FILES_PER_SPAN of a kind. May be killed at any moment, and done again."""
    for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    while True:
        files = list_rotated_files(folder)
        for path in folder.glob("syncer-*.jsonl"):  # those that are in another one
            if _OLD.fullmatch(path.name) and path not in {file.path for file in files}:
                path.unlink()
        counts = Counter(file.span for file in files)
        alike = next((count for count in sorted(counts) if counts[count] > MAX_FILES_PER_SPAN), None)
        if alike is None:
            return
        one, other = [file for file in files if file.span == alike][:2]
        _join(folder, one, other)


def _join(folder: Path, one: RotatedFile, other: RotatedFile) -> None:
    seen: Counter[bytes] = Counter()
    with atomic_write(folder / f"syncer-{one.first:06}-{other.last:06}.jsonl", durable=False) as out:
        for file in (one, other):
            for line in _read_complete_lines(file.path):
                subject = b",".join(line.split(b",", 2)[:2])
                if seen[subject] % 2 == 0:
                    out.write(line + b"\n")
                seen[subject] += 1


def _read_complete_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"}\n"):
                yield line[:-1]


def _ends_mid_line(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class MetricsReader:
    """All lines of a run in the order of time, and those that are added, each once.

    Holds the newest file open: when that one is full and gets another name, it is read to its end first.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / METRICS_FOLDER
        self._is_started = False
        self._file: BinaryIO | None = None
        self._partial_line = b""

    def read_lines(self) -> Iterator[dict[str, Any]]:
        """What was not read before. Call again for more."""
        if not self._is_started:
            self._is_started = True
            self._open()  # before the old ones are listed: it may become one of them at any moment
            for file in list_rotated_files(self._folder):
                with contextlib.suppress(FileNotFoundError):  # joined with another one this moment
                    for line in _read_complete_lines(file.path) if not self._is_open_file(file.path) else ():
                        yield from _parse_line(line)
        while self._file is not None or self._open():
            yield from self._read_more()
            if self._is_open_file(self._folder / NEWEST_FILE):
                return
            yield from self._read_more()  # what was written between the last look and its new name
            self.close()
            self._partial_line = b""

    def _open(self) -> bool:
        try:
            self._file = open(self._folder / NEWEST_FILE, "rb")  # noqa: SIM115 - closed by close()
        except FileNotFoundError:
            return False
        return True

    def _read_more(self) -> Iterator[dict[str, Any]]:
        assert self._file is not None
        while piece := self._file.read(1 << 20):
            *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
            for line in lines:
                yield from _parse_line(line)

    def _is_open_file(self, path: Path) -> bool:
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


def _parse_line(line: bytes) -> Iterator[dict[str, Any]]:
    """Nothing where a full disk has cut the line."""
    if line.startswith(b"{") and line.endswith(b"}"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
