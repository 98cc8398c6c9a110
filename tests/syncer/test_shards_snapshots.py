"""Snapshots of a run whose fragments are in separate processes: complete, or none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from atoll.store.snapshots import read_snapshot_info, snapshot_version_path
from atoll.store.tensor_file import read_tensors
from tests.learner.fault_injection import fault_marker
from tests.learner.runs import LearnerSpec, Run, endless
from tests.syncer.test_shards import versions


def request_snapshot(run: Run) -> int:
    code, body = run.request("POST", "/v1/snapshot")
    assert code == 202, body
    return int(json.loads(body)["snapshot"])


def state(run: Run, number: int) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(run.request("GET", f"/v1/snapshot/{number}")[1])
    return reply


def durable(run: Run, number: int) -> dict[str, Any]:
    run.until(lambda _: state(run, number)["state"] != "being taken", "it comes to its end")
    reply = state(run, number)
    assert reply["state"] == "durable", reply
    return reply


def assert_complete(directory: Path, number: int) -> None:
    """Check that each shard stores its fragments at the versions of the record."""
    info = read_snapshot_info(directory, number)
    assert info is not None
    assert info.record is not None
    for p, version in enumerate(info.record.versions):
        path = snapshot_version_path(directory, number, p)
        assert path.parts[-5] == str(p % 2), "at its shard"
        note, tensors = read_tensors(path)
        assert json.loads(note)[2] == version if version else not note
        assert "published" in tensors
    assert not (directory / "store" / "snapshots" / f"{number:09d}" / "000.safetensors").exists()


def test_snapshot_versions_are_stored_at_shards(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        number = request_snapshot(run)
        reply = durable(run, number)
        assert sorted(part["learner"] for part in reply["parts"]) == [1, 2]
        assert reply["bytes"] > 1000
        assert_complete(tmp_path, number)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_slow_snapshot_parts_keep_versions_at_shards(tmp_path):
    """The part of a learner is blocked at a pipe while more versions are merged than a store keeps."""
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(LearnerSpec(1, planted="blocked-parts"), LearnerSpec(2))
        run.go(*learners)
        run.until(run.merges(12), "merges")
        os.mkfifo(tmp_path / "hold")
        number = request_snapshot(run)
        before = versions(run)
        run.until(lambda _: fault_marker(tmp_path, "part").exists(), "the part is being written")
        run.until(lambda _: min(versions(run)) > max(before) + 4, "merges go on")
        assert state(run, number)["state"] == "being taken"
        (tmp_path / "hold").write_bytes(b"")
        (tmp_path / "hold").unlink()
        durable(run, number)
        assert_complete(tmp_path, number)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_killed_shard_aborts_snapshot_and_next_is_complete(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.shards[1].kill()
        run.shards[1] = run.start_shard(1, planted="kill-before-snapshot-record")
        run.go(*learners)
        run.until(lambda _: min(versions(run)) > 0, "shard 1 is connected: without it there is no snapshot")
        run.shards[1].expected_to_end = True
        (tmp_path / "shards" / "1" / "die").touch()
        number = request_snapshot(run)
        run.shards[1].ended()
        run.until(lambda _: state(run, number)["state"] == "abandoned", "the snapshot fails")
        assert "shard 1 disconnected" in state(run, number)["said"]
        assert read_snapshot_info(tmp_path, number) is None
        (tmp_path / "shards" / "1" / "die").unlink()
        run.shards[1] = run.start_shard(1)
        run.until(
            lambda status: not any(each["unavailable"] for each in status["fragments"]), "shard 1 has reconnected"
        )
        assert list((tmp_path / "shards" / "1" / "store" / "snapshots").iterdir()) == []
        number = request_snapshot(run)
        durable(run, number)
        assert_complete(tmp_path, number)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_snapshot_without_shard_fails_with_reason(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        run.shards[1].kill()
        run.until(lambda status: status["fragments"][1]["unavailable"], "the shard is unavailable")
        number = request_snapshot(run)
        run.until(lambda _: state(run, number)["state"] == "abandoned", "the snapshot fails")
        assert "shard 1 of 2 is unavailable" in state(run, number)["said"]
        run.start_shard(1)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
