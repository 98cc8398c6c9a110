"""The syncer's metrics: bounded, appended to by a successor, and never a reason to stop."""

from __future__ import annotations

import logging
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atoll.files import TEMPORARY_SUFFIX
from atoll.store.metrics_files import MetricsReader, MetricsWriter, compact_rotated_files, list_rotated_files

LOG = logging.getLogger("atoll.test")
SMALL = 2_000


def line(kind: str, number: int, at: int) -> dict[str, Any]:
    return {"kind": kind, "fragment" if kind == "merge" else "learner": number, "at": at}


class KeepsAll(MetricsWriter):
    def _compact(self) -> None:
        pass


def write(run: Path, times: range, joined: bool = True) -> MetricsWriter:
    """At each time two fragments and a learner; only the learner of even times."""
    writer = MetricsWriter(run, LOG, SMALL) if joined else KeepsAll(run, LOG, SMALL)
    for at in times:
        writer.write(line("merge", 0, at))
        writer.write(line("merge", 1, at))
        if at % 2 == 0:
            writer.write(line("learner", 1, at))
        writer.wait_for_compaction()  # a file takes much longer to fill than others to be joined
    writer.close()
    return writer


def read(run: Path) -> list[dict[str, Any]]:
    reader = MetricsReader(run)
    found = list(reader.read_lines())
    reader.close()
    return found


def size(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "metrics").iterdir())


def test_a_successor_appends_and_begins_a_new_line_after_one_that_was_cut(tmp_path):
    write(tmp_path, range(2))
    newest = tmp_path / "metrics/syncer.jsonl"
    newest.write_bytes(newest.read_bytes()[:-5])
    before = read(tmp_path)
    assert len(before) == 4
    write(tmp_path, range(2, 3))
    assert read(tmp_path) == [*before, line("merge", 0, 2), line("merge", 1, 2), line("learner", 1, 2)]


@pytest.mark.parametrize("times", [100, 1_000, 5_000])
def test_however_long_the_run_little_is_kept_and_of_all_of_it(tmp_path, times):
    """What is n lines old has neighbours that are at most a share of n away."""
    write(tmp_path, range(times))
    written = 3 * 40 * times
    files = max(1, written // SMALL)
    assert size(tmp_path) <= (2 * files.bit_length() + 2) * (SMALL + 100)
    for kind, number in (("merge", 0), ("merge", 1), ("learner", 1)):
        kept = [int(found["at"]) for found in read(tmp_path) if list(found.values())[:2] == [kind, number]]
        assert kept == sorted(kept)
        assert kept[0] == 0
        for one, later in pairwise(kept):
            assert later - one <= max(4, (times - one) / 4), f"{kind} {number}: nothing between {one} and {later}"
        assert kept[-1] == times - 1 - (kind == "learner")
    newest = [found["at"] for found in read(tmp_path) if found["kind"] == "merge"][-10:]
    assert newest == [at for at in range(times - 5, times) for _ in range(2)], "the newest lines are all there"


def test_joining_that_was_killed_is_done_again(tmp_path):
    """1. two files are joined. 2. the process is killed before it removes them. 3. nothing is read twice."""
    write(tmp_path, range(200), joined=False)
    folder = tmp_path / "metrics"
    whole = read(tmp_path)
    assert len(list_rotated_files(folder)) >= 4
    kept = {file.path.name: file.path.read_bytes() for file in list_rotated_files(folder)}
    compact_rotated_files(folder)
    joined, names = read(tmp_path), {path.name for path in folder.iterdir()}
    assert len(joined) < len(whole)
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    (folder / f".syncer-000001-000002.jsonl.1{TEMPORARY_SUFFIX}").write_bytes(b"half of")
    assert read(tmp_path) == joined
    compact_rotated_files(folder)
    assert read(tmp_path) == joined
    assert {path.name for path in folder.iterdir()} == names


def test_a_reader_misses_nothing_while_files_change_their_names(tmp_path):
    writer = KeepsAll(tmp_path, LOG, SMALL)
    reader = MetricsReader(tmp_path)
    assert list(reader.read_lines()) == []
    found = []
    for at in range(500):
        writer.write(line("merge", 0, at))
        if at % 7 == 0:
            found += list(reader.read_lines())
    found += list(reader.read_lines())
    assert [each["at"] for each in found] == list(range(500))
    assert len(list_rotated_files(tmp_path / "metrics")) > 3
    assert [each["at"] for each in read(tmp_path)] == list(range(500)), "so does one that comes later"
    reader.close()
    writer.close()


def test_a_full_disk_is_said_once_and_costs_the_lines_alone(tmp_path, caplog):
    """A limit on the size of files stands for the full disk: the line that meets it is cut, the next ones fail."""
    writer = MetricsWriter(tmp_path, LOG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        for at in range(50):
            writer.write(line("merge", 0, at))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "metrics/syncer.jsonl").stat().st_size == 1_000
    before = read(tmp_path)
    writer.write(line("merge", 0, 50))
    assert read(tmp_path) == [*before, line("merge", 0, 50)]
    writer.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "cannot write metrics" in said[0]
    assert "metrics are written again" in said[1]


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(tmp_path, caplog):
    (tmp_path / "metrics").write_text("a file where the folder should be")
    writer = MetricsWriter(tmp_path, LOG)
    for at in range(3):
        writer.write(line("merge", 0, at))
    writer.close()
    assert len(caplog.records) == 1
