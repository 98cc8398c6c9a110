"""Tape files: round trip, tolerance of an incomplete last line, and errors with a location for all other damage."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from atoll.core.protocol import StepTaken
from atoll.core.types import RunConfig
from atoll.tape.files import MAX_LINE_BYTES, RunTapes, TapeReader, TapeTail, TapeWriter, new_header, tape_path
from atoll.tape.format import FORMAT_VERSION, Actor, Entry, TapeError, encode_entry, encode_header
from tests.tiny_run import TinyRun, eventful_run

ACTOR = Actor(3, 2)
HEADER = new_header(ACTOR, RunConfig(), seed=7)
ENTRIES = [Entry(tick / 8, ACTOR, tick, StepTaken(1, 100 + tick, 0.125), ()) for tick in range(1, 7)]
LINES = [encode_header(HEADER), *map(encode_entry, ENTRIES)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learner-3-i2.tape"


def with_checksum(payload: object) -> bytes:
    text = json.dumps(payload, separators=(",", ":")).encode()
    return b'["%08x",%b]\n' % (zlib.crc32(text), text)


# --------------------------------------------------------------------------------------------------------------------
# Writing


def test_written_entries_are_read(path):
    with TapeWriter(path, HEADER) as writer:
        for entry in ENTRIES:
            writer.write(entry)
    assert path.read_bytes() == b"".join(LINES)
    reader = TapeReader(path)
    assert reader.header == HEADER
    assert list(reader) == ENTRIES
    assert list(reader) == ENTRIES  # each iteration starts from the beginning
    assert not reader.is_truncated


def test_a_tape_is_never_overwritten(path):
    TapeWriter(path, HEADER).close()
    before = path.read_bytes()
    with pytest.raises(TapeError, match=r"learner-3-i2\.tape: the file exists, and a tape is never overwritten"):
        TapeWriter(path, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("flush_bytes", "lines_on_disk"), [(0, 7), (2 * len(LINES[1]), 7), (10**6, 1)])
def test_flush_bytes_controls_file_writes(path, flush_bytes, lines_on_disk):
    writer = TapeWriter(path, HEADER, flush_bytes)
    assert path.read_bytes() == LINES[0]  # the header is written immediately
    for entry in ENTRIES:
        writer.write(entry)
    assert len(path.read_bytes().splitlines()) == lines_on_disk
    writer.flush()
    assert path.read_bytes() == b"".join(LINES)
    writer.close()
    writer.close()


def test_close_flushes_after_exception(path):
    def fail_after_one_entry() -> None:
        with TapeWriter(path, HEADER) as writer:
            writer.write(ENTRIES[0])
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        fail_after_one_entry()
    assert list(TapeReader(path)) == ENTRIES[:1]


def test_writer_checks_actor_and_tick(path):
    with TapeWriter(path, HEADER) as writer:
        with pytest.raises(AssertionError, match="entry of learner 4 incarnation 1 on the tape of learner 3"):
            writer.write(ENTRIES[0]._replace(actor=Actor(4, 1)))
        with pytest.raises(AssertionError, match="tick 2 after 0"):
            writer.write(ENTRIES[1])


class FullDisk:
    """File that accepts a limited number of bytes, like a full disk."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room, self.closed = file, room, False

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written: int = self.file.write(bytes(data[: self.room]))
        self.room -= written
        return written

    def close(self) -> None:
        self.closed = True
        self.file.close()


@pytest.mark.parametrize("room", [1, 30, 100, 200])
def test_full_disk_does_not_damage_tape(path, room):
    writer = TapeWriter(path, HEADER, flush_bytes=0)
    disk = FullDisk(writer._file, room)
    writer._file = disk  # type: ignore[assignment]
    failures = []
    for entry in ENTRIES:
        try:
            writer.write(entry)
        except OSError as error:
            failures.append(error.filename)
    assert set(failures) == {str(path)}
    assert [*TapeReader(path)] == ENTRIES[: len(path.read_bytes().split(b"\n")) - 2]
    disk.room = 10**6
    writer.close()
    assert path.read_bytes() == b"".join(LINES)


# --------------------------------------------------------------------------------------------------------------------
# Damage


def test_incomplete_last_line_is_tolerated(path):
    whole = b"".join(LINES)
    before = len(whole) - len(LINES[-1])
    for end in range(before, len(whole)):
        path.write_bytes(whole[:end])
        reader = TapeReader(path)
        assert list(reader) == ENTRIES[:-1], f"{end - before} bytes of the last line"
        assert reader.is_truncated is (end > before)


def test_flipped_bit_is_detected(path):
    start = len(LINES[0]) + len(LINES[1])
    whole = b"".join(LINES)
    for location in range(start, start + len(LINES[2])):
        path.write_bytes(whole[:location] + bytes([whole[location] ^ 1]) + whole[location + 1 :])
        with pytest.raises(TapeError) as caught:
            list(TapeReader(path))
        assert caught.value.location == f"{path}:3", f"byte {location - start}"


def second_header_at(location: int) -> list[bytes]:
    return [*LINES[:location], LINES[0], *LINES[location:]]


def newer_header() -> bytes:
    _, (name, fields, shapes) = json.loads(LINES[0])
    return with_checksum([name, fields | {"format_version": FORMAT_VERSION + 1, "atoll_version": "9.9"}, shapes])


DAMAGE: dict[str, tuple[list[bytes], int, str]] = {
    # name: (lines, number of the damaged line, message)
    "invalid JSON": (
        [*LINES[:2], b'["%08x",{]\n' % zlib.crc32(b"{"), *LINES[3:]],
        3,
        "invalid JSON: Expecting property name",
    ),
    "another text": ([*LINES[:2], b"hello\n", *LINES[2:]], 3, "not a line of a tape: b'hello'"),
    "empty line": ([*LINES[:2], b"\n", *LINES[2:]], 3, "not a line of a tape: b''"),
    "zeros": ([*LINES[:2], bytes(80) + b"\n", *LINES[2:]], 3, "not a line of a tape"),
    "half a line in the middle": ([*LINES[:2], LINES[2][:40], *LINES[3:]], 3, "checksum mismatch"),
    "changed digit": ([*LINES[:2], LINES[2].replace(b"102", b"902"), *LINES[3:]], 3, "checksum mismatch"),
    "missing line": ([*LINES[:3], *LINES[4:]], 4, "tick 4 instead of 3: lines are missing"),
    "doubled line": ([*LINES[:3], *LINES[2:]], 4, "tick 2 instead of 3: lines are repeated"),
    "swapped lines": ([*LINES[:2], LINES[3], LINES[2], *LINES[4:]], 3, "tick 3 instead of 2: lines are missing"),
    "first entry missing": ([LINES[0], *LINES[2:]], 2, "tick 2 instead of 1"),
    "no header": (LINES[1:], 1, "no header: the first line must be the header of the tape"),
    "second header": (second_header_at(3), 4, "a second header: two tapes were written into one file"),
    "newer format": (
        [newer_header(), *LINES[1:]],
        1,
        f"written by a newer Atoll: format {FORMAT_VERSION + 1} of Atoll 9.9",
    ),
    "unknown type": (
        [*LINES[:2], with_checksum([0.0, 2, ["Sail"], []]), *LINES[3:]],
        3,
        "tick 2: Invalid value 'Sail'",
    ),
    "wrong arity": (
        [*LINES[:2], with_checksum([0.0, 2, ["StepTaken", 1], []])],
        3,
        "tick 2: Expected `array` of at least",
    ),
    "nothing at all": ([], 1, "no header: the process ended before it wrote one"),
    "half a header": ([LINES[0][:50]], 1, "no header: the process ended before it wrote one"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_with_location(path, name):
    lines, number, message = DAMAGE[name]
    path.write_bytes(b"".join(lines))
    with pytest.raises(TapeError) as caught:
        list(TapeReader(path))
    assert caught.value.location == f"{path}:{number}"
    assert str(caught.value).startswith(f"{path}:{number}: {message}")


def test_entries_before_damage_are_read(path):
    path.write_bytes(b"".join([*LINES[:4], b"hello\n", *LINES[4:]]))
    read: list[Entry] = []
    with pytest.raises(TapeError, match=":5: not a line of a tape"):
        read.extend(TapeReader(path))
    assert read == ENTRIES[:3]


def test_line_length_is_limited(path):
    with open(path, "wb") as file:
        file.write(LINES[0])
        file.truncate(MAX_LINE_BYTES + 10**6)
    with pytest.raises(TapeError, match=r":2: a line of more than \d+ bytes: the file is not a tape"):
        list(TapeReader(path, chunk_bytes=2**20))


def test_decreasing_time_is_no_damage(path):
    """A clock may jump; the tape has the time of the driver."""
    jumped = [ENTRIES[0], ENTRIES[1]._replace(at=-5.0)]
    path.write_bytes(b"".join([LINES[0], *map(encode_entry, jumped)]))
    assert list(TapeReader(path)) == jumped


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10**6])
def test_chunk_size_does_not_change_entries(path, chunk_bytes):
    path.write_bytes(b"".join(LINES))
    assert list(TapeReader(path, chunk_bytes=chunk_bytes)) == ENTRIES


# --------------------------------------------------------------------------------------------------------------------
# Reading while it is written


def test_tail_reads_growing_tape(path):
    """Read after every byte that the process writes."""
    whole = b"".join(LINES)
    path.write_bytes(b"")
    tail, seen = TapeTail(TapeReader(path)), []
    for written in range(1, len(whole) + 1):
        with open(path, "ab") as file:
            file.write(whole[written - 1 : written])
        for entry in tail.read_new_entries():
            seen.append(entry)
            # An entry is returned as soon as its line is complete.
            assert written == sum(map(len, LINES[: entry.tick + 1]))
    assert seen == ENTRIES


def test_shrinking_file_raises(path):
    path.write_bytes(b"".join(LINES))
    tail = TapeTail(TapeReader(path))
    assert list(tail.read_new_entries()) == ENTRIES
    path.write_bytes(b"")
    with pytest.raises(TapeError, match="the file became shorter while it was read: 0 bytes after"):
        list(tail.read_new_entries())


# --------------------------------------------------------------------------------------------------------------------
# The tapes of a run


def test_run_tapes_merge_in_causal_order(tmp_path):
    run = eventful_run()
    tapes = RunTapes(run.save(tmp_path))
    names = ["syncer-e1", "syncer-e2", "learner-1-i1", "learner-2-i1", "learner-2-i2", "learner-3-i1"]
    assert [reader.path.name for reader in tapes.readers.values()] == [f"{name}.tape" for name in names]
    assert tapes.config == run.config
    assert tapes.learners() == [1, 2, 3]
    assert tapes.readers[Actor(0, 2)].header == run.headers[Actor(0, 2)]
    order = list(tapes.merged_entries())
    assert sorted(order, key=lambda e: (e.actor, e.tick)) == sorted(run.entries, key=lambda e: (e.actor, e.tick))
    assert tapes.bytes_read() == tapes.size_bytes()


def test_headerless_tape_is_skipped(tmp_path):
    TinyRun().run_until(3.0).save(tmp_path)
    tape_path(tmp_path, Actor(3, 2)).write_bytes(b"")
    tape_path(tmp_path, Actor(3, 3)).write_bytes(LINES[0][:99])
    with open(tape_path(tmp_path, Actor(1, 1)), "ab") as file:
        file.write(b'["0123')
    tapes = RunTapes(tmp_path)
    assert [path.name for path in tapes.headerless] == ["learner-3-i2.tape", "learner-3-i3.tape"]
    assert len(list(tapes.merged_entries())) > 0
    assert [path.name for path in tapes.truncated_files()] == ["learner-1-i1.tape"]


def test_merge_needs_few_open_files(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for learner in range(1, 200):
        actor = Actor(learner, 1)
        header = new_header(actor, RunConfig())
        with TapeWriter(tape_path(tmp_path, actor), header) as writer:
            writer.write(ENTRIES[0]._replace(actor=actor))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert sum(1 for _ in RunTapes(tmp_path).merged_entries()) == 199
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_directory(run: Path) -> Path:
    return run / "gone"


def no_folder(run: Path) -> Path:
    return run


def no_tapes(run: Path) -> Path:
    (run / "tapes").mkdir()
    return run


def only_headerless(run: Path) -> Path:
    no_tapes(run)
    (run / "tapes/syncer-e1.tape").touch()
    return run


def invalid_name(run: Path) -> Path:
    TinyRun().run_until(1.0).save(run)
    (run / "tapes/learner-three.tape").touch()
    return run


def swapped_names(run: Path) -> Path:
    TinyRun().run_until(1.0).save(run)
    (run / "tapes/learner-1-i1.tape").rename(run / "tapes/learner-9-i1.tape")
    return run


def two_runs(run: Path) -> Path:
    TinyRun(learners=1, run_id="red").run_until(1.0).save(run)
    blue = TinyRun(learners=2, run_id="blue").run_until(1.0)
    header = blue.headers[Actor(2, 1)]
    TapeWriter(tape_path(run, header.actor), header).close()
    return run


@pytest.mark.parametrize(
    ("make", "location", "message"),
    [
        (no_directory, "gone", "no such run directory"),
        (no_folder, "", "not a run directory: it has no folder 'tapes'"),
        (no_tapes, "tapes", "the folder has no tapes"),
        (only_headerless, "tapes", "the folder has no tapes"),
        (invalid_name, "tapes/learner-three.tape", "the file name must be such as"),
        (swapped_names, "tapes/learner-9-i1.tape:1", "the header is of learner 1 incarnation 1, but the file name is"),
        (
            two_runs,
            "tapes/learner-2-i1.tape:1",
            "tapes of different runs: run id is 'red' in syncer-e1.tape, 'blue' here",
        ),
    ],
)
def test_invalid_run_directory_raises_with_location(tmp_path, make, location, message):
    with pytest.raises(TapeError) as caught:
        RunTapes(make(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / location}: {message}")
