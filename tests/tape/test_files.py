"""Files: what was written is read, a cut last line is tolerated, and all other damage is reported with its place."""

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


def sealed(payload: object) -> bytes:
    text = json.dumps(payload, separators=(",", ":")).encode()
    return b'["%08x",%b]\n' % (zlib.crc32(text), text)


# --------------------------------------------------------------------------------------------------------------------
# Writing


def test_what_was_written_is_read(path):
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
    with pytest.raises(TapeError, match=r"learner-3-i2\.tape: a tape is never overwritten"):
        TapeWriter(path, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("flush_bytes", "lines_on_disk"), [(0, 7), (2 * len(LINES[1]), 7), (10**6, 1)])
def test_lines_reach_the_file_by_the_flush_policy(path, flush_bytes, lines_on_disk):
    writer = TapeWriter(path, HEADER, flush_bytes)
    assert path.read_bytes() == LINES[0]  # the header at once: whoever looks sees whose tape it is
    for entry in ENTRIES:
        writer.write(entry)
    assert len(path.read_bytes().splitlines()) == lines_on_disk
    writer.flush()
    assert path.read_bytes() == b"".join(LINES)
    writer.close()
    writer.close()


def test_closing_writes_the_rest_also_after_an_error(path):
    def fail_after_one_entry() -> None:
        with TapeWriter(path, HEADER) as writer:
            writer.write(ENTRIES[0])
            raise RuntimeError("the run went wrong")

    with pytest.raises(RuntimeError, match="the run went wrong"):
        fail_after_one_entry()
    assert list(TapeReader(path)) == ENTRIES[:1]


def test_a_process_writes_its_own_entries_and_each_once(path):
    with TapeWriter(path, HEADER) as writer:
        with pytest.raises(AssertionError, match="writes on the tape of learner 3"):
            writer.write(ENTRIES[0]._replace(actor=Actor(4, 1)))
        with pytest.raises(AssertionError, match="tick 2 after 0"):
            writer.write(ENTRIES[1])


class FullDisk:
    """A file that takes some bytes and then no more, until there is room."""

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
def test_a_full_disk_damages_nothing(path, room):
    writer = TapeWriter(path, HEADER, flush_bytes=0)
    disk = FullDisk(writer._file, room)
    writer._file = disk  # type: ignore[assignment]
    failures = []
    for entry in ENTRIES:
        try:
            writer.write(entry)
        except OSError as wrong:
            failures.append(wrong.filename)
    assert set(failures) == {str(path)}
    assert [*TapeReader(path)] == ENTRIES[: len(path.read_bytes().split(b"\n")) - 2]
    disk.room = 10**6
    writer.close()
    assert path.read_bytes() == b"".join(LINES)


# --------------------------------------------------------------------------------------------------------------------
# Damage


def test_half_a_last_line_is_tolerated_at_every_byte(path):
    whole = b"".join(LINES)
    before = len(whole) - len(LINES[-1])
    for end in range(before, len(whole)):
        path.write_bytes(whole[:end])
        reader = TapeReader(path)
        assert list(reader) == ENTRIES[:-1], f"{end - before} bytes of the last line"
        assert reader.is_truncated is (end > before)


def test_a_flipped_bit_is_found_at_every_byte_of_a_line(path):
    start = len(LINES[0]) + len(LINES[1])
    whole = b"".join(LINES)
    for place in range(start, start + len(LINES[2])):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(TapeError) as caught:
            list(TapeReader(path))
        assert caught.value.location == f"{path}:3", f"byte {place - start}"


def second_header_at(place: int) -> list[bytes]:
    return [*LINES[:place], LINES[0], *LINES[place:]]


def newer_header() -> bytes:
    _, (name, fields, shapes) = json.loads(LINES[0])
    return sealed([name, fields | {"format_version": FORMAT_VERSION + 1, "atoll_version": "9.9"}, shapes])


DAMAGE: dict[str, tuple[list[bytes], int, str]] = {
    # name: (lines, number of the line that is wrong, what is said)
    "bad JSON": ([*LINES[:2], b'["%08x",{]\n' % zlib.crc32(b"{"), *LINES[3:]], 3, "bad JSON: Expecting property name"),
    "another text": ([*LINES[:2], b"hello\n", *LINES[2:]], 3, "not a line of a tape: b'hello'"),
    "empty line": ([*LINES[:2], b"\n", *LINES[2:]], 3, "not a line of a tape: b''"),
    "zeros": ([*LINES[:2], bytes(80) + b"\n", *LINES[2:]], 3, "not a line of a tape"),
    "half a line in the middle": ([*LINES[:2], LINES[2][:40], *LINES[3:]], 3, "the checksum is wrong"),
    "changed digit": ([*LINES[:2], LINES[2].replace(b"102", b"902"), *LINES[3:]], 3, "the checksum is wrong"),
    "missing line": ([*LINES[:3], *LINES[4:]], 4, "tick 4 where 3 was due: lines are missing"),
    "doubled line": ([*LINES[:3], *LINES[2:]], 4, "tick 2 where 3 was due: lines are repeated"),
    "swapped lines": ([*LINES[:2], LINES[3], LINES[2], *LINES[4:]], 3, "tick 3 where 2 was due: lines are missing"),
    "first entry missing": ([LINES[0], *LINES[2:]], 2, "tick 2 where 1 was due"),
    "no header": (LINES[1:], 1, "no header: the first line of a tape says whose it is"),
    "second header": (second_header_at(3), 4, "a second header: two tapes were written into one file"),
    "newer format": ([newer_header(), *LINES[1:]], 1, "written by a newer Atoll: format 2 of Atoll 9.9"),
    "unknown type": (
        [*LINES[:2], sealed([0.0, 2, ["Sail"], []]), *LINES[3:]],
        3,
        "tick 2: Invalid value 'Sail'",
    ),
    "wrong arity": (
        [*LINES[:2], sealed([0.0, 2, ["StepTaken", 1], []])],
        3,
        "tick 2: Expected `array` of at least",
    ),
    "nothing at all": ([], 1, "no header: the process ended before it wrote one"),
    "half a header": ([LINES[0][:50]], 1, "no header: the process ended before it wrote one"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_with_its_place(path, name):
    lines, number, complaint = DAMAGE[name]
    path.write_bytes(b"".join(lines))
    with pytest.raises(TapeError) as caught:
        list(TapeReader(path))
    assert caught.value.location == f"{path}:{number}"
    assert str(caught.value).startswith(f"{path}:{number}: {complaint}")


def test_entries_before_the_damage_are_read(path):
    path.write_bytes(b"".join([*LINES[:4], b"hello\n", *LINES[4:]]))
    read: list[Entry] = []
    with pytest.raises(TapeError, match=":5: not a line of a tape"):
        read.extend(TapeReader(path))
    assert read == ENTRIES[:3]


def test_a_line_without_end_is_not_read_into_memory(path):
    with open(path, "wb") as file:
        file.write(LINES[0])
        file.truncate(MAX_LINE_BYTES + 10**6)
    with pytest.raises(TapeError, match=r":2: a line of more than \d+ bytes: this is no tape"):
        list(TapeReader(path, chunk_bytes=2**20))


def test_a_time_that_goes_back_is_no_damage(path):
    """A clock may jump; the tape has the driver's own time."""
    jumped = [ENTRIES[0], ENTRIES[1]._replace(at=-5.0)]
    path.write_bytes(b"".join([LINES[0], *map(encode_entry, jumped)]))
    assert list(TapeReader(path)) == jumped


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 10**6])
def test_the_size_of_pieces_does_not_matter(path, piece_bytes):
    path.write_bytes(b"".join(LINES))
    assert list(TapeReader(path, chunk_bytes=piece_bytes)) == ENTRIES


# --------------------------------------------------------------------------------------------------------------------
# Reading while it is written


def test_a_tape_is_readable_while_it_is_written(path):
    """The reader looks after every byte that the process writes."""
    whole = b"".join(LINES)
    path.write_bytes(b"")
    tail, seen = TapeTail(TapeReader(path)), []
    for written in range(1, len(whole) + 1):
        with open(path, "ab") as file:
            file.write(whole[written - 1 : written])
        for entry in tail.read_new_entries():
            seen.append(entry)
            # An entry comes out when the end of its line is there, and not later.
            assert written == sum(map(len, LINES[: entry.tick + 1]))
    assert seen == ENTRIES


def test_a_file_that_becomes_shorter_is_reported(path):
    path.write_bytes(b"".join(LINES))
    tail = TapeTail(TapeReader(path))
    assert list(tail.read_new_entries()) == ENTRIES
    path.write_bytes(b"")
    with pytest.raises(TapeError, match="the file became shorter while it was read: 0 bytes after"):
        list(tail.read_new_entries())


# --------------------------------------------------------------------------------------------------------------------
# The tapes of a run


def test_the_tapes_of_a_run_are_found_and_come_in_a_causal_order(tmp_path):
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


def test_a_process_that_died_at_once_does_not_spoil_the_run(tmp_path):
    TinyRun().run_until(3.0).save(tmp_path)
    tape_path(tmp_path, Actor(3, 2)).write_bytes(b"")
    tape_path(tmp_path, Actor(3, 3)).write_bytes(LINES[0][:99])
    with open(tape_path(tmp_path, Actor(1, 1)), "ab") as file:
        file.write(b'["0123')
    tapes = RunTapes(tmp_path)
    assert [path.name for path in tapes.headerless] == ["learner-3-i2.tape", "learner-3-i3.tape"]
    assert len(list(tapes.merged_entries())) > 0
    assert [path.name for path in tapes.truncated_files()] == ["learner-1-i1.tape"]


def test_more_tapes_than_a_process_may_have_open_files(tmp_path):
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


def only_unstarted(run: Path) -> Path:
    no_tapes(run)
    (run / "tapes/syncer-e1.tape").touch()
    return run


def wrong_name(run: Path) -> Path:
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
    ("make", "place", "complaint"),
    [
        (no_directory, "gone", "no such run directory"),
        (no_folder, "", "not a run directory: it has no folder 'tapes'"),
        (no_tapes, "tapes", "there are no tapes here"),
        (only_unstarted, "tapes", "there are no tapes here"),
        (wrong_name, "tapes/learner-three.tape", "its name does not say whose tape it is"),
        (swapped_names, "tapes/learner-9-i1.tape:1", "the header says learner 1 incarnation 1, the name of the file"),
        (
            two_runs,
            "tapes/learner-2-i1.tape:1",
            "tapes of different runs: run id is 'red' in syncer-e1.tape, 'blue' here",
        ),
    ],
)
def test_a_directory_that_is_no_run_says_why(tmp_path, make, place, complaint):
    with pytest.raises(TapeError) as caught:
        RunTapes(make(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / place}: {complaint}")
