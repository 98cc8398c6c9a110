"""Parts of islands of several ranks: each rank writes its shard, and an island of any shape can load them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from atoll.checkpoint import restore
from atoll.core.types import Limits
from atoll.store.learner_parts import list_parts, part_bytes, part_path, read_part, shards_path
from atoll.store.sharded_parts import ShardedTensors
from atoll.store.snapshots import list_snapshots
from tests.island.rank_runs import IslandSpec, RankedIsland, same
from tests.learner.fault_injection import fault_marker
from tests.learner.runs import Run, endless
from tests.syncer.test_snapshots import PATIENT, damage
from tests.syncer.test_snapshots import take_snapshot as snapshot_of

LONG_WAITS = Limits(initial_wait_s=60.0, min_wait_s=30.0, initial_backoff_s=0.05, max_backoff_s=0.5)
"""Long waits: on a busy machine, a learner must not give up waiting for a peer's state."""


def start_training(run: Run, island: RankedIsland) -> None:
    island.joined()
    island.command("go")
    run.until(run.merges(3), "the island trains")


def save_snapshot(run: Run, island: RankedIsland) -> int:
    """Save a snapshot while the optimizer is paused, so that it has the state that `island.inner` returns."""
    island.command("still")
    island.expect("still")
    snapshot = snapshot_of(run)
    assert (snapshot["state"], snapshot["left_out"]) == ("durable", [])
    number: int = snapshot["snapshot"]
    return number


def rejoin(run: Run, spec: IslandSpec) -> RankedIsland:
    island = RankedIsland(run, spec)
    island.joined()
    return island


def log_lines(run: Run, island: RankedIsland, text: str) -> list[str]:
    return run.log_lines(island.ranks[0], text)


def shard_file(directory: Path, number: int, rank: int) -> Path:
    return shards_path(part_path(directory, 1, number)) / f"__{rank}_0.distcp"


@pytest.mark.long
def test_island_of_any_shape_restores_the_bits_that_another_shape_saved(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        start_training(run, island)
        number = save_snapshot(run, island)
        before = island.optimizer_state(tmp_path)
        assert {float(value) for name, value in before.items() if name.endswith("step")} != {0.0}
        island.kill_all()

        path = part_path(tmp_path, 1, number)
        part = read_part(path)
        assert part.shards is not None
        assert not {*part.local_optimizer_tensors()} & {*part.shards.index["tensors"]}, (
            "tensors in shard files must not be in the part as well"
        )
        assert all(shard_file(tmp_path, number, rank).stat().st_size for rank in (0, 1))
        written = sum(file["bytes"] for file in part.shards.index["files"].values())
        assert (part_bytes(path) or 0) > path.stat().st_size + written, "the size must include the metadata"
        assert_torch_can_load(part.shards)

        for spec in (
            IslandSpec(1, "replicas", ranks=1),
            IslandSpec(1, "ddp"),
            IslandSpec(1, "fsdp"),
            IslandSpec(1, "tp"),
            IslandSpec(1, "fsdp", planted="no-shared-directory", planted_ranks=(1,)),
        ):
            island = rejoin(run, spec)
            assert same(island.optimizer_state(tmp_path), before), spec
            island.kill_all()
        assert fault_marker(tmp_path, "blind").exists(), "the leader must send the blind rank its shard"

        island = rejoin(run, IslandSpec(1, "fsdp", planted="misplaced-rows", planted_ranks=(1,)))
        assert fault_marker(tmp_path, "rows").exists()
        assert not same(island.optimizer_state(tmp_path), before), "this test must find the injected bug"
        island.kill_all()

        damage(shard_file(tmp_path, number, 1))
        island = rejoin(run, IslandSpec(1, "fsdp"))
        (line,) = log_lines(run, island, "trying an older one")
        assert "rank 1: the digest of __1_0.distcp does not match: it was damaged or changed" in line
        assert island.optimizer_state(tmp_path) == {}
        assert log_lines(run, island, "training starts: fresh optimizer state")
        island.kill_all()


def assert_torch_can_load(shards: ShardedTensors) -> None:
    """Load the shard files with torch's own reader and planner."""
    ours = shards.load(dict.fromkeys(shards.index["tensors"]))
    theirs = {number: torch.zeros_like(tensor) for number, tensor in ours.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(theirs, storage_reader=FileSystemReader(shards.folder), no_dist=True)
    assert same(ours, theirs)
    assert any(tensor.any() for tensor in theirs.values())


@pytest.mark.long
def test_part_of_a_two_dimensional_mesh_is_restored_by_other_shapes(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=LONG_WAITS)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp+tp", ranks=4))
        start_training(run, island)
        number = save_snapshot(run, island)
        before = island.optimizer_state(tmp_path)
        peer = rejoin(run, IslandSpec(2, "fsdp", ranks=3))
        assert same(peer.optimizer_state(tmp_path), before)
        peer.kill_all()
        island.kill_all()
        run.until(lambda status: status["alive"] == 0, "no peer is left")
        assert shard_file(tmp_path, number, 3).exists()
        for spec in (IslandSpec(1, "replicas", ranks=1), IslandSpec(1, "fsdp+tp", ranks=4)):
            island = rejoin(run, spec)
            assert same(island.optimizer_state(tmp_path), before), spec
            island.kill_all()


@pytest.mark.long
def test_peer_sends_the_same_bits_to_islands_of_any_shape(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=LONG_WAITS)) as run:
        first = RankedIsland(run, IslandSpec(1, "fsdp"))
        start_training(run, first)
        first.command("still")
        first.expect("still")
        before = first.optimizer_state(tmp_path)
        for spec in (IslandSpec(2, "fsdp", ranks=3), IslandSpec(3, "replicas", ranks=1)):
            other = rejoin(run, spec)
            assert log_lines(run, other, "training starts: optimizer state from learner 1")
            assert same(other.optimizer_state(tmp_path), before), spec
            other.kill_all()
            run.until(lambda status: status["alive"] == 1, "no other peer can send optimizer state")
        first.kill_all()


@pytest.mark.long
def test_rank_killed_during_write_leaves_the_previous_part_and_its_files_are_removed(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", planted="kill-during-rank-file", planted_ranks=(1,)))
        start_training(run, island)
        first = save_snapshot(run, island)
        before = island.optimizer_state(tmp_path)
        for rank in island.ranks:
            rank.expected_to_end = True
        (tmp_path / "die").touch()
        island.command("go")
        assert snapshot_of(run)["state"] == "abandoned"
        assert island.ranks[1].ended() == -signal.SIGKILL
        assert fault_marker(tmp_path, "shard").exists()
        island.ranks[0].expect("failed")
        (tmp_path / "die").unlink()
        assert list_parts(tmp_path) == {1: [first]}
        half = tmp_path / "parts/learner-1" / ".000000009.1.unfinished"  # as from a leader that was killed, too
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")

        island = rejoin(run, IslandSpec(1, "fsdp", ranks=3))
        assert same(island.optimizer_state(tmp_path), before)
        second = save_snapshot(run, island)
        assert list_parts(tmp_path) == {1: [first, second]}
        names = {path.name for path in (tmp_path / "parts/learner-1").iterdir()}
        assert names == {f"{number:09d}.{kind}" for number in (first, second) for kind in ("dcp", "safetensors")}
        island.kill_all()


def test_full_disk_of_one_rank_abandons_the_part_and_damaged_shards_are_logged(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", model="tall"))
        start_training(run, island)
        first = save_snapshot(run, island)
        before = island.optimizer_state(tmp_path)
        second = save_snapshot(run, island)
        island.command("small files")
        assert snapshot_of(run)["state"] == "abandoned"
        (line,) = log_lines(run, island, "could not save its part")
        assert "rank 1: " in line
        assert "File too large" in line
        assert not [*tmp_path.glob("parts/learner-1/.*")], "no unfinished file must be left"
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "training continues")
        island.kill_all()
        assert list_parts(tmp_path) == {1: [first, second]}

        os.truncate(shard_file(tmp_path, second, 0), 1000)
        island = rejoin(run, IslandSpec(1, "fsdp", model="tall"))
        (line,) = log_lines(run, island, "trying an older one")
        assert f"{second:09d}.dcp/__0_0.distcp has 1000 of " in line
        assert same(island.optimizer_state(tmp_path), before)
        island.kill_all()
        shard_file(tmp_path, first, 1).unlink()
        island = rejoin(run, IslandSpec(1, "replicas", ranks=1, model="tall"))
        _, line = log_lines(run, island, "trying an older one")
        assert f"{first:09d}.dcp/__1_0.distcp, a shard file of one of its ranks, is missing" in line
        assert island.optimizer_state(tmp_path) == {}
        island.kill_all()


def test_rank_without_access_to_the_folder_sends_its_rows_to_the_leader(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", planted="no-shared-directory", planted_ranks=(1,)))
        start_training(run, island)
        number = save_snapshot(run, island)
        before = island.optimizer_state(tmp_path)
        island.kill_all()
        assert fault_marker(tmp_path, "blind").exists()
        part = read_part(part_path(tmp_path, 1, number))
        assert part.shards is None
        assert part.metadata["format"] == 1, "every version of Atoll reads format 1"
        assert [path.name for path in (tmp_path / "parts/learner-1").iterdir()] == [f"{number:09d}.safetensors"]
        island = rejoin(run, IslandSpec(1, "fsdp"))
        assert same(island.optimizer_state(tmp_path), before)
        island.kill_all()


def test_sharded_part_is_restored_into_a_new_run(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    with Run(old, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        start_training(run, island)
        first, second = save_snapshot(run, island), save_snapshot(run, island)
        island.kill_all()
    (info,) = [info for info in list_snapshots(old) if info.number == second]
    assert info.to_json(old)["parts"][0]["bytes"] == part_bytes(part_path(old, 1, second))
    damage(shard_file(old, second, 1))
    messages: list[str] = []
    source: Any = SimpleNamespace(run=old, info=info)
    assert restore._write_parts(source, new, "another", messages.append) == [1]
    assert f"{second:09d}.safetensors: the digest of __1_0.distcp does not match" in messages[0]
    before = read_part(part_path(old, 1, first))
    for directory in (new, new / restore.INITIAL_FOLDER):
        assert list_parts(directory) == {1: [first]}
        assert {path.name for path in (directory / "parts/learner-1").iterdir()} == {
            f"{first:09d}.dcp",
            f"{first:09d}.safetensors",
        }
        part = read_part(part_path(directory, 1, first))
        assert part.metadata["run"] == "another"
        assert same(dict(part.optimizer_tensors()), dict(before.optimizer_tensors()))
