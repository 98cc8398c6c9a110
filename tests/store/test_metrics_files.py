"""The syncer's metrics files: bounded in size, continued after a restart, and never a reason to stop."""

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


def make_line(kind: str, number: int, at: int) -> dict[str, Any]:
    return {"kind": kind, "fragment" if kind == "merge" else "learner": number, "at": at}


class UncompactedWriter(MetricsWriter):
    def _compact(self) -> None:
        pass


def write(run: Path, times: range, is_compacted: bool = True) -> MetricsWriter:
    """Write lines of two fragments at each time, and of a learner at even times."""
    writer = MetricsWriter(run, LOG, SMALL) if is_compacted else UncompactedWriter(run, LOG, SMALL)
    for at in times:
        writer.write(make_line("merge", 0, at))
        writer.write(make_line("merge", 1, at))
        if at % 2 == 0:
            writer.write(make_line("learner", 1, at))
        writer.wait_for_compaction()  # in a real run, a file fills much more slowly than others are compacted
    writer.close()
    return writer


def read(run: Path) -> list[dict[str, Any]]:
    reader = MetricsReader(run)
    lines = list(reader.read_lines())
    reader.close()
    return lines


def size(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "metrics").iterdir())


def test_restarted_writer_appends_after_an_incomplete_line(tmp_path):
    write(tmp_path, range(2))
    newest = tmp_path / "metrics/syncer.jsonl"
    newest.write_bytes(newest.read_bytes()[:-5])
    before = read(tmp_path)
    assert len(before) == 4
    write(tmp_path, range(2, 3))
    assert read(tmp_path) == [*before, make_line("merge", 0, 2), make_line("merge", 1, 2), make_line("learner", 1, 2)]


@pytest.mark.parametrize("times", [100, 1_000, 5_000])
def test_size_is_bounded_and_lines_of_the_whole_run_remain(tmp_path, times):
    """The gap between lines that are n lines old is at most a fixed share of n."""
    write(tmp_path, range(times))
    written = 3 * 40 * times
    files = max(1, written // SMALL)
    assert size(tmp_path) <= (2 * files.bit_length() + 2) * (SMALL + 100)
    for kind, number in (("merge", 0), ("merge", 1), ("learner", 1)):
        remaining = [int(line["at"]) for line in read(tmp_path) if list(line.values())[:2] == [kind, number]]
        assert remaining == sorted(remaining)
        assert remaining[0] == 0
        for at, later in pairwise(remaining):
            assert later - at <= max(4, (times - at) / 4), f"{kind} {number}: no line between {at} and {later}"
        assert remaining[-1] == times - 1 - (kind == "learner")
    newest = [line["at"] for line in read(tmp_path) if line["kind"] == "merge"][-10:]
    assert newest == [at for at in range(times - 5, times) for _ in range(2)], "the newest lines are complete"


def test_killed_compaction_is_repeated(tmp_path):
    """1. Two files are merged. 2. The process is killed before it removes them. 3. No line is read twice."""
    write(tmp_path, range(200), is_compacted=False)
    folder = tmp_path / "metrics"
    all_lines = read(tmp_path)
    assert len(list_rotated_files(folder)) >= 4
    original = {file.path.name: file.path.read_bytes() for file in list_rotated_files(folder)}
    compact_rotated_files(folder)
    compacted, names = read(tmp_path), {path.name for path in folder.iterdir()}
    assert len(compacted) < len(all_lines)
    for name, data in original.items():
        (folder / name).write_bytes(data)
    (folder / f".syncer-000001-000002.jsonl.1{TEMPORARY_SUFFIX}").write_bytes(b"half of")
    assert read(tmp_path) == compacted
    compact_rotated_files(folder)
    assert read(tmp_path) == compacted
    assert {path.name for path in folder.iterdir()} == names


def test_reader_misses_no_line_while_files_are_rotated(tmp_path):
    writer = UncompactedWriter(tmp_path, LOG, SMALL)
    reader = MetricsReader(tmp_path)
    assert list(reader.read_lines()) == []
    lines = []
    for at in range(500):
        writer.write(make_line("merge", 0, at))
        if at % 7 == 0:
            lines += list(reader.read_lines())
    lines += list(reader.read_lines())
    assert [line["at"] for line in lines] == list(range(500))
    assert len(list_rotated_files(tmp_path / "metrics")) > 3
    assert [line["at"] for line in read(tmp_path)] == list(range(500)), "a later reader reads all lines, too"
    reader.close()
    writer.close()


def test_full_disk_is_logged_once_and_loses_only_lines(tmp_path, caplog):
    """A limit on file sizes simulates the full disk: the line at the limit is incomplete, later writes fail."""
    writer = MetricsWriter(tmp_path, LOG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        for at in range(50):
            writer.write(make_line("merge", 0, at))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "metrics/syncer.jsonl").stat().st_size == 1_000
    before = read(tmp_path)
    writer.write(make_line("merge", 0, 50))
    assert read(tmp_path) == [*before, make_line("merge", 0, 50)]
    writer.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert "cannot write metrics" in messages[0]
    assert "metrics are written again" in messages[1]


def test_missing_folder_does_not_stop_the_syncer(tmp_path, caplog):
    (tmp_path / "metrics").write_text("a file where the folder should be")
    writer = MetricsWriter(tmp_path, LOG)
    for at in range(3):
        writer.write(make_line("merge", 0, at))
    writer.close()
    assert len(caplog.records) == 1
