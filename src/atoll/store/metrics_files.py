"""`metrics/syncer.jsonl`: the syncer's measurements, in files whose total size grows with the log of a run's length.

    syncer.jsonl                   the current file, up to MAX_FILE_BYTES
    syncer-000003-000003.jsonl     the third file, full
    syncer-000001-000002.jsonl     the first two, merged: every second line of each subject

At most MAX_FILES_PER_SPAN full files of the same span are kept. If there is one more, the oldest two are merged. So the
newest lines are complete, and lines that are twice as old are half as dense. The subject of a line is its first two
fields: a kind, and a fragment or a learner.

Each line is written with one call. A reader finds an incomplete line only at the end, or where the disk was full.
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
"""After 4, 8, 16, ... 1024 full files about 4, 6, 8, ... 20 remain. 16 learners fill one in half an hour."""

_OLD = re.compile(r"syncer-(\d{6,})-(\d{6,})\.jsonl")


class RotatedFile(NamedTuple):
    """File that contains the files number `first` to `last`."""

    first: int
    last: int
    path: Path

    @property
    def span(self) -> int:
        return self.last - self.first + 1


def list_rotated_files(folder: Path) -> list[RotatedFile]:
    """Return the full files in the order of time, without files that a killed process had already merged."""
    files = []
    for path in folder.glob("syncer-*.jsonl"):
        name = _OLD.fullmatch(path.name)
        if name is not None:
            files.append(RotatedFile(int(name[1]), int(name[2]), path))
    files.sort(key=lambda file: (file.first, -file.last))
    return [file for file in files if not any(_is_within(file, other) for other in files)]


def _is_within(file: RotatedFile, other: RotatedFile) -> bool:
    return file != other and other.first <= file.first and file.last <= other.last


class MetricsWriter:
    """Append lines. If the disk is full or unavailable, drop the lines and log a warning."""

    def __init__(self, run: Path, log: logging.Logger, file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = run / METRICS_FOLDER
        self._log = log
        self._file_bytes = file_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._has_partial_line = False  # the last line in the file is incomplete
        self._has_logged_failure = False
        self._compaction: threading.Thread | None = None

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write one line. The first two fields are its kind and its subject."""
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
                self._log.warning("metrics are written again; measurements in between are lost")
                self._has_logged_failure = False

    def _log_failure(self, error: OSError) -> None:
        if not self._has_logged_failure:
            self._log.warning("cannot write metrics (%s); the run continues without them", error)
            self._has_logged_failure = True

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._folder / NEWEST_FILE, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            assert self._file is not None
            self._size = self._file.tell()
            # An earlier process may have been killed in the middle of a line.
            self._has_partial_line = _ends_mid_line(self._folder / NEWEST_FILE)
        return self._file

    def _rotate(self) -> None:
        """Rename the full file, and merge old files in a thread."""
        self._close_file()
        old = list_rotated_files(self._folder)
        number = max((file.last for file in old), default=0) + 1
        os.rename(self._folder / NEWEST_FILE, self._folder / f"syncer-{number:06}-{number:06}.jsonl")
        if self._compaction is None or not self._compaction.is_alive():
            self._compaction = threading.Thread(target=self._compact, name="atoll-metrics", daemon=True)
            self._compaction.start()

    def _compact(self) -> None:
        try:
            compact_rotated_files(self._folder)
        except OSError as error:
            self._log.warning("cannot merge old metrics files: %s", error)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def wait_for_compaction(self) -> None:
        """Wait until a running merge of old files is complete."""
        if self._compaction is not None:
            self._compaction.join()

    def close(self) -> None:
        self.wait_for_compaction()
        with contextlib.suppress(OSError):
            self._close_file()


def compact_rotated_files(folder: Path) -> None:
    """Merge files until each span has at most MAX_FILES_PER_SPAN. It may be killed at any time and repeated."""
    for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    while True:
        files = list_rotated_files(folder)
        for path in folder.glob("syncer-*.jsonl"):  # these files were already merged into another one
            if _OLD.fullmatch(path.name) and path not in {file.path for file in files}:
                path.unlink()
        counts = Counter(file.span for file in files)
        alike = next((count for count in sorted(counts) if counts[count] > MAX_FILES_PER_SPAN), None)
        if alike is None:
            return
        one, other = [file for file in files if file.span == alike][:2]
        _compact(folder, one, other)


def _compact(folder: Path, one: RotatedFile, other: RotatedFile) -> None:
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
    """Read all lines of a run in the order of time, and then new ones, each once.

    Keeps the newest file open. If the file is renamed because it is full, it is read to its end first.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / METRICS_FOLDER
        self._is_started = False
        self._file: BinaryIO | None = None
        self._partial_line = b""

    def read_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that were not read before. Call again for later lines."""
        if not self._is_started:
            self._is_started = True
            self._open()  # before listing full files: it may become one of them at any time
            for file in list_rotated_files(self._folder):
                with contextlib.suppress(FileNotFoundError):  # merged in the meantime
                    for line in _read_complete_lines(file.path) if not self._is_open_file(file.path) else ():
                        yield from _parse_line(line)
        while self._file is not None or self._open():
            yield from self._read_more()
            if self._is_open_file(self._folder / NEWEST_FILE):
                return
            yield from self._read_more()  # lines written between the last read and the rename
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
        """Return whether this path is the open file, under any name."""
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
        self.close()  # callers that follow a run rarely know their last call


def _parse_line(line: bytes) -> Iterator[dict[str, Any]]:
    """Yield the parsed line; nothing if it is incomplete, as after a full disk."""
    if line.startswith(b"{") and line.endswith(b"}"):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
