"""Tape files: `TapeWriter` writes one, `TapeReader` reads one, `RunTapes` finds the tapes of a run.

A run directory has a folder `tapes` with one file per process: `syncer-e1.tape`, `learner-3-i2.tape`. A killed process
may leave an incomplete last line, which readers tolerate. All other damage is an error. A simulated run
also has `simulated.json`, see `SimulationRecord`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from atoll import __version__
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, RunConfig
from atoll.tape.format import (
    FORMAT_VERSION,
    Actor,
    Entry,
    Header,
    TapeError,
    decode_entry,
    decode_header,
    encode_entry,
    encode_header,
)
from atoll.tape.ordering import MissingCause, merge_tapes

TAPE_FOLDER = "tapes"
TAPE_SUFFIX = ".tape"
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Maximum line length. A file with a longer line is not a tape."""

MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Limit on buffered lines while the disk is full. At the limit the tape ends, and training continues."""

SIMULATION_FILE = "simulated.json"
SIMULATED_NOTE = "simulated"
"""Note in the header of a tape of `atoll simulate`."""

SIMULATION_FORMAT = 1

StrPath: TypeAlias = str | PathLike[str]

_NAME = re.compile(r"(?:syncer-e([1-9]\d*)|learner-([1-9]\d*)-i([1-9]\d*))\.tape")


def tape_path(run: StrPath, actor: Actor) -> Path:
    """Return the path of the tape of a process."""
    if actor.learner == SYNCER:
        return Path(run, TAPE_FOLDER, f"syncer-e{actor.generation}{TAPE_SUFFIX}")
    return Path(run, TAPE_FOLDER, f"learner-{actor.learner}-i{actor.generation}{TAPE_SUFFIX}")


def new_header(
    actor: Actor, config: RunConfig, seed: int | None = None, restored: RestoredState | None = None, note: str = ""
) -> Header:
    """Create the header of a new tape."""
    return Header(FORMAT_VERSION, __version__, actor, config, seed, restored, note)


class TapeWriter:
    """Writer of entries to a new file.

    The writer passes its buffer to the operating system at `flush_bytes` (0: after each entry), on `flush` and on
    `close`. A killed process loses its buffer. If the disk is full, `write` and `flush` raise `OSError`, and the buffer
    is kept: a later flush continues in the middle of the line.
    """

    def __init__(self, path: StrPath, header: Header, flush_bytes: int = 64 * 1024) -> None:
        self.path = Path(path)
        self.header = header
        self.tick = 0
        self._flush_bytes = flush_bytes
        self._buffer = bytearray(encode_header(header))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        except FileExistsError:
            raise TapeError(
                "the file exists, and a tape is never overwritten; choose another run directory", str(self.path)
            ) from None
        self.flush()

    def write(self, entry: Entry) -> None:
        assert entry.actor == self.header.actor, f"entry of {entry.actor} on the tape of {self.header.actor}"
        assert entry.tick == self.tick + 1, f"{entry.actor}: tick {entry.tick} after {self.tick}"
        self._buffer += encode_entry(entry)
        self.tick = entry.tick
        if len(self._buffer) >= self._flush_bytes:
            self.flush()

    def flush(self) -> None:
        try:
            while self._buffer:
                written = self._file.write(self._buffer)
                del self._buffer[: written or 0]
        except OSError as error:
            error.filename = str(self.path)  # otherwise the error has no file name
            raise

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were not yet passed to the operating system."""
        return len(self._buffer)

    def close(self) -> None:
        """Flush and close the file. A second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TapeSink:
    """Tape writer of a running process. A write error, such as a full disk, does not stop the process.

    Every entry is passed to the operating system before its messages are sent. So the tape has the cause of every
    message that another process received, even if this process is killed immediately afterwards.
    """

    def __init__(self, run: Path | None, header: Header, log: logging.Logger) -> None:
        self._log = log
        self._writer = TapeWriter(tape_path(run, header.actor), header, flush_bytes=0) if run is not None else None
        self._is_failing = False

    def write(self, entry: Entry) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(entry)
        except OSError as error:
            self._on_write_error(error)
        else:
            if self._is_failing:
                self._log.warning("writing to the tape again; no entry was lost")
                self._is_failing = False

    def _on_write_error(self, error: OSError) -> None:
        """Log an error. The writer keeps the line and continues when the disk has space."""
        if not self._is_failing:
            self._log.warning("cannot write the tape (%s); the run continues, retrying at the next entry", error)
            self._is_failing = True
        assert self._writer is not None
        if self._writer.buffered_bytes > MAX_BUFFERED_BYTES:
            self._log.error("tape closed: %d bytes are buffered and the disk is full", self._writer.buffered_bytes)
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._log.warning("cannot write the end of the tape: %s", error)


class TapeReader:
    """Reader of the entries of one file. Each iteration starts at the beginning; `TapeTail` reads a growing file.

    The file is open only while a chunk is read, so a run may have more tapes than the limit on open files.
    """

    def __init__(self, path: StrPath, chunk_bytes: int = 64 * 1024) -> None:
        self.path = Path(path)
        self.is_truncated = False  # the newest iteration found an incomplete last line
        self.bytes_read = 0  # bytes that the newest iteration has read
        self._chunk_bytes = chunk_bytes
        self._header: Header | None = None

    @property
    def header(self) -> Header:
        if self._header is None:
            line = self._first_line()
            if line is None:
                raise self.error_at(1, "no header: the process ended before it wrote one")
            return self.read_header(line)
        return self._header

    def has_header(self) -> bool:
        """Return whether the first line is complete."""
        return self._first_line() is not None

    def _first_line(self) -> bytes | None:
        data = b""
        while chunk := self.read_chunk(len(data), 1):
            data += chunk
            lines, _ = self.split_lines(data, 0)
            if lines:
                return lines[0]
        return None

    def __iter__(self) -> Iterator[Entry]:
        tail = TapeTail(self)
        self.is_truncated = False
        for entry in tail.read_new_entries():
            self.bytes_read = tail.offset
            yield entry
        self.bytes_read, self.is_truncated = tail.offset, tail.has_partial_line
        if self._header is None:
            raise self.error_at(1, "no header: the process ended before it wrote one")

    def read_header(self, line: bytes) -> Header:
        try:
            self._header = decode_header(line)
        except TapeError as error:
            raise self.error_at(1, error.problem) from None
        return self._header

    def error_at(self, number: int, problem: str) -> TapeError:
        return TapeError(problem, f"{self.path}:{number}")

    def split_lines(self, data: bytes, number: int) -> tuple[list[bytes], bytes]:
        """Return the complete lines and the rest. `number` is the number of lines before them."""
        *lines, rest = data.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            number += len(lines) + 1
            raise self.error_at(number, f"a line of more than {MAX_LINE_BYTES} bytes: the file is not a tape")
        return lines, rest

    def read_chunk(self, offset: int, number: int) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            end = file.seek(0, 2)
            if end < offset:
                raise self.error_at(number, f"the file became shorter while it was read: {end} bytes after {offset}")
            file.seek(offset)
            return file.read(self._chunk_bytes)


class TapePosition(NamedTuple):
    """Position between two lines of a tape."""

    offset: int  # offset of the next line
    tick: int  # tick of the entry before it


class TapeTail:
    """Reader of a growing file. Each read continues where the last one ended; the first one starts at `begin`."""

    def __init__(self, reader: TapeReader, begin: TapePosition | None = None) -> None:
        self.reader = reader
        self.offset = begin.offset if begin is not None else 0
        self._consumed_bytes = self.offset  # bytes of the returned lines
        self._number = begin.tick + 1 if begin is not None else 0
        self._partial_line = b""
        self._pending_lines: list[bytes] = []  # complete lines of the newest chunk, the next one last
        self._actor = reader.header.actor if begin is not None else None  # None: the header is not read yet
        self._tick = begin.tick if begin is not None else 0

    @property
    def has_partial_line(self) -> bool:
        return bool(self._partial_line)

    def position(self) -> TapePosition:
        return TapePosition(self._consumed_bytes, self._tick)

    def read_new_entries(self) -> Iterator[Entry]:
        """Yield the new entries. A caller may stop early: the next call continues after the last entry."""
        pending = self._pending_lines
        while True:
            while pending:
                self._number += 1
                line = pending.pop()
                entry = self._decode_line(line)
                self._consumed_bytes += len(line) + 1
                if entry is not None:
                    yield entry
            chunk = self.reader.read_chunk(self.offset, self._number + 1)
            if not chunk:
                return
            self.offset += len(chunk)
            lines, self._partial_line = self.reader.split_lines(self._partial_line + chunk, self._number)
            pending.extend(reversed(lines))

    def _decode_line(self, line: bytes) -> Entry | None:
        """Return the entry of a line; None for the header."""
        if self._actor is None:
            self._actor = self.reader.read_header(line).actor
            return None
        self._tick += 1
        try:
            entry = decode_entry(line, self._actor)
        except TapeError as error:
            raise self.reader.error_at(self._number, error.problem) from None
        if entry.tick != self._tick:
            gap = "lines are missing" if entry.tick > self._tick else "lines are repeated or out of order"
            raise self.reader.error_at(self._number, f"tick {entry.tick} instead of {self._tick}: {gap}")
        return entry


class RunTapes:
    """Tapes of one run, by actor. `headerless` are files of processes that ended before they wrote a header."""

    def __init__(self, run: StrPath) -> None:
        self.run = Path(run)
        self.readers: dict[Actor, TapeReader] = {}
        self.headerless: list[Path] = []
        for actor, path in sorted(_list_named(_tape_folder(self.run))):
            reader = TapeReader(path)
            if not reader.has_header():
                self.headerless.append(path)
                continue
            if reader.header.actor != actor:
                raise TapeError(f"the header is of {reader.header.actor}, but the file name is of {actor}", f"{path}:1")
            self.readers[actor] = reader
        if not self.readers:
            raise TapeError("the folder has no tapes", str(_tape_folder(self.run)))
        self._check_same_run()

    def _check_same_run(self) -> None:
        """Compare all settings: two runs of the same command have the same run id."""
        identities = {reader: _run_identity(reader.header) for reader in self.readers.values()}
        for name in next(iter(identities.values())):
            counts = Counter(each[name] for each in identities.values())
            if len(counts) == 1:
                continue
            usual = counts.most_common(1)[0][0]
            odd = next(reader for reader, each in identities.items() if each[name] != usual)
            other = next(reader for reader, each in identities.items() if each[name] == usual)
            difference = f"{name} is {usual} in {other.path.name}, {identities[odd][name]} here"
            raise TapeError(f"tapes of different runs: {difference}", f"{odd.path}:1")

    @property
    def config(self) -> RunConfig:
        return next(iter(self.readers.values())).header.config

    @property
    def is_simulated(self) -> bool:
        """Return whether `atoll simulate` wrote the tapes, without training a model."""
        return next(iter(self.readers.values())).header.note == SIMULATED_NOTE

    def learners(self) -> list[int]:
        """Return the ids of the learners that have a tape."""
        return sorted({actor.learner for actor in self.readers if actor.learner != SYNCER})

    def size_bytes(self) -> int:
        return sum(reader.path.stat().st_size for reader in self.readers.values())

    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self.readers.values())

    def merged_entries(self, report: Callable[[MissingCause], None] | None = None) -> Iterator[Entry]:
        """Yield all entries of the run in causal order, see `ordering.merge_tapes`."""
        return merge_tapes([(reader.header, reader) for reader in self.readers.values()], report)

    def truncated_files(self) -> list[Path]:
        """Return the files whose last line is incomplete."""
        return [reader.path for reader in self.readers.values() if _has_partial_line(reader.path)]

    def missing_actors(self) -> list[Actor]:
        """Return the processes without a file whose later epoch or incarnation has one."""
        newest: dict[int, int] = {SYNCER: 1}  # every run has a syncer
        for actor in self.readers:
            newest[actor.learner] = max(newest.get(actor.learner, 1), actor.generation)
        known = {*self.readers, *(actor for actor, _ in _list_named(_tape_folder(self.run)))}
        every = (Actor(learner, start) for learner, last in newest.items() for start in range(1, last + 1))
        return sorted(actor for actor in every if actor not in known)

    def describe_gaps(self) -> list[str]:
        """Return sentences about missing and incomplete tapes. A full read may reveal more gaps."""
        return [
            *(f"{path.name} ends with an incomplete line" for path in self.truncated_files()),
            *(f"{path.name} has no header: its process ended before it wrote one" for path in self.headerless),
            *(f"there is no tape of {actor}" for actor in self.missing_actors()),
        ]


class SimulationRecord(NamedTuple):
    """Results of `atoll simulate` that its tapes do not contain, such as the tokens of a step with all chips."""

    full_step_tokens: dict[int, int]  # tokens of a step with all slices of the island, by learner
    outcome: Mapping[str, Any]  # JSON output of the command

    def save(self, run: StrPath) -> None:
        full = {str(learner): tokens for learner, tokens in self.full_step_tokens.items()}
        record = {"format": SIMULATION_FORMAT, "full_step_tokens": full, "outcome": self.outcome}
        Path(run, SIMULATION_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, run: StrPath) -> SimulationRecord:
        path = Path(run, SIMULATION_FILE)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != SIMULATION_FORMAT:
                raise ValueError(f"format {record['format']!r}, this Atoll reads {SIMULATION_FORMAT}")
            full = {int(learner): int(tokens) for learner, tokens in record["full_step_tokens"].items()}
            if min(full.values(), default=1) < 1:
                raise ValueError("a full step without tokens")
            return cls(full, record["outcome"])
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: the simulation did not finish, or an older Atoll wrote it; simulate again"
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cannot read {path} ({error}); simulate again") from None


def _run_identity(header: Header) -> dict[str, str]:
    """Return the header fields that all tapes of a run share, as text, because NaN is not equal to itself."""
    config = {f"setting {each.name}": repr(getattr(header.config, each.name)) for each in fields(header.config)}
    return {"run id": config.pop("setting run_id"), "seed": repr(header.seed), **config}


def _has_partial_line(path: Path) -> bool:
    with open(path, "rb", buffering=0) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        return file.read(1) not in (b"", b"\n")


def list_tapes(run: StrPath) -> list[tuple[Actor, Path]]:
    """Return all tapes of a run by actor, also those without a header. Raise TapeError for another directory."""
    return list(_list_named(_tape_folder(Path(run))))


def _tape_folder(run: Path) -> Path:
    if not run.is_dir():
        raise TapeError("no such run directory", str(run))
    folder = run / TAPE_FOLDER
    if not folder.is_dir():
        raise TapeError(f"not a run directory: it has no folder {TAPE_FOLDER!r}", str(run))
    return folder


def _list_named(folder: Path) -> Iterator[tuple[Actor, Path]]:
    for path in sorted(folder.glob(f"*{TAPE_SUFFIX}")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise TapeError("the file name must be such as syncer-e1.tape or learner-3-i2.tape", str(path))
        epoch, learner, incarnation = match.groups(default="0")
        yield Actor(int(learner), int(epoch) or int(incarnation)), path


class TapeTotals(NamedTuple):
    """Size and contents of the tapes of a simulated run."""

    directory: str
    tapes: int
    entries: int
    size_bytes: int
    finished: bool  # the run ended in an orderly way after the simulated time
    merges: int  # up to that end


class SimulatedTapeWriter:
    """Writer of one tape per simulated process, and context manager that closes them."""

    def __init__(self, directory: Path, config: RunConfig, seed: int, note: str = SIMULATED_NOTE) -> None:
        self._directory = directory
        self._config = config
        self._seed = seed
        self._note = note
        self._writers: dict[Actor, TapeWriter] = {}
        self.finished = False
        self.merges = 0

    def start_tape(self, actor: Actor, restored: RestoredState | None) -> None:
        before = self._writers.get(Actor(actor.learner, actor.generation - 1))
        if before is not None and actor.learner != SYNCER:
            before.close()  # an incarnation ends before the next one starts; a superseded syncer may continue
        header = new_header(actor, self._config, self._seed, restored, self._note)
        self._writers[actor] = TapeWriter(tape_path(self._directory, actor), header)

    def write(self, entry: Entry) -> None:
        self._writers[entry.actor].write(entry)

    def __enter__(self) -> SimulatedTapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def totals(self) -> TapeTotals:
        writers = self._writers.values()
        return TapeTotals(
            str(self._directory),
            len(writers),
            sum(writer.tick for writer in writers),
            sum(writer.path.stat().st_size for writer in writers),
            self.finished,
            self.merges,
        )


def require_empty_directory(directory: Path) -> None:
    """Raise ValueError unless a directory is new or empty, because a tape is never overwritten."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give --tape a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty, and a tape is never overwritten; remove it or choose another")
