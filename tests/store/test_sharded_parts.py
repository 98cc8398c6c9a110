"""Parts of islands of several ranks: each rank writes and reads its own, and any shape of island starts from them."""

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
from tests.syncer.test_snapshots import taken as snapshot_of

UNHURRIED = Limits(initial_wait_s=60.0, min_wait_s=30.0, initial_backoff_s=0.05, max_backoff_s=0.5)
"""Who waits for a peer's state on a busy machine waits for it, and does not start without."""


def under_way(run: Run, island: RankedIsland) -> None:
    island.joined()
    island.command("go")
    run.until(run.merges(3), "it trains")


def saved(run: Run, island: RankedIsland) -> int:
    """A snapshot while the optimizer stands still: what `inner` of the island says is what was saved."""
    island.command("still")
    island.expect("still")
    told = snapshot_of(run)
    assert (told["state"], told["left_out"]) == ("durable", [])
    number: int = told["snapshot"]
    return number


def again(run: Run, spec: IslandSpec) -> RankedIsland:
    island = RankedIsland(run, spec)
    island.joined()
    return island


def said(run: Run, island: RankedIsland, words: str) -> list[str]:
    return run.log_lines(island.ranks[0], words)


def shard_file(directory: Path, number: int, rank: int) -> Path:
    return shards_path(part_path(directory, 1, number)) / f"__{rank}_0.distcp"


@pytest.mark.long
def test_an_island_of_any_shape_starts_with_the_very_bits_that_another_shape_has_saved(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        under_way(run, island)
        number = saved(run, island)
        before = island.inner(tmp_path)
        assert {float(value) for name, value in before.items() if name.endswith("step")} != {0.0}
        island.kill_all()

        path = part_path(tmp_path, 1, number)
        part = read_part(path)
        assert part.shards is not None
        assert not {*part.local_optimizer_tensors()} & {*part.shards.note["tensors"]}, (
            "what ranks have written is there twice"
        )
        assert all(shard_file(tmp_path, number, rank).stat().st_size for rank in (0, 1))
        written = sum(file["bytes"] for file in part.shards.note["files"].values())
        assert (part_bytes(path) or 0) > path.stat().st_size + written, "with the metadata"
        assert_other_tools_read_it(part.shards)

        for spec in (
            IslandSpec(1, "replicas", ranks=1),
            IslandSpec(1, "ddp"),
            IslandSpec(1, "fsdp"),
            IslandSpec(1, "tp"),
            IslandSpec(1, "fsdp", planted="blind-rank", planted_ranks=(1,)),
        ):
            island = again(run, spec)
            assert same(island.inner(tmp_path), before), spec
            island.kill_all()
        assert fault_marker(tmp_path, "blind").exists(), "its leader has dealt out what it did not see"

        island = again(run, IslandSpec(1, "fsdp", planted="other-rows", planted_ranks=(1,)))
        assert fault_marker(tmp_path, "rows").exists()
        assert not same(island.inner(tmp_path), before), "a bug that this test has to find"
        island.kill_all()

        damage(shard_file(tmp_path, number, 1))
        island = again(run, IslandSpec(1, "fsdp"))
        (line,) = said(run, island, "trying an older one")
        assert "rank 1: the digest of __1_0.distcp is wrong: it was damaged or changed" in line
        assert island.inner(tmp_path) == {}
        assert said(run, island, "training starts: fresh optimizer state")
        island.kill_all()


def assert_other_tools_read_it(shards: ShardedTensors) -> None:
    """As it is, with torch's own reader and planner."""
    mine = shards.load(dict.fromkeys(shards.note["tensors"]))
    theirs = {number: torch.zeros_like(tensor) for number, tensor in mine.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(theirs, storage_reader=FileSystemReader(shards.folder), no_dist=True)
    assert same(mine, theirs)
    assert any(tensor.any() for tensor in theirs.values())


@pytest.mark.long
def test_what_a_mesh_of_two_dimensions_has_saved_is_read_by_others(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=UNHURRIED)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp+tp", ranks=4))
        under_way(run, island)
        number = saved(run, island)
        before = island.inner(tmp_path)
        peer = again(run, IslandSpec(2, "fsdp", ranks=3))
        assert same(peer.inner(tmp_path), before)
        peer.kill_all()
        island.kill_all()
        run.until(lambda status: status["alive"] == 0, "nobody is left to ask")
        assert shard_file(tmp_path, number, 3).exists()
        for spec in (IslandSpec(1, "replicas", ranks=1), IslandSpec(1, "fsdp+tp", ranks=4)):
            island = again(run, spec)
            assert same(island.inner(tmp_path), before), spec
            island.kill_all()


@pytest.mark.long
def test_a_peer_gives_the_very_bits_whatever_the_shapes(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=UNHURRIED)) as run:
        first = RankedIsland(run, IslandSpec(1, "fsdp"))
        under_way(run, first)
        first.command("still")
        first.expect("still")
        before = first.inner(tmp_path)
        for spec in (IslandSpec(2, "fsdp", ranks=3), IslandSpec(3, "replicas", ranks=1)):
            other = again(run, spec)
            assert said(run, other, "training starts: optimizer state from learner 1")
            assert same(other.inner(tmp_path), before), spec
            other.kill_all()
            run.until(lambda status: status["alive"] == 1, "nobody else is asked for inner state")
        first.kill_all()


@pytest.mark.long
def test_a_rank_that_dies_while_it_writes_leaves_the_part_before_and_the_next_one_clears_up(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", planted="deadly-shard", planted_ranks=(1,)))
        under_way(run, island)
        first = saved(run, island)
        before = island.inner(tmp_path)
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
        half = tmp_path / "parts/learner-1" / ".000000009.1.unfinished"  # as of a leader that was killed as well
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")

        island = again(run, IslandSpec(1, "fsdp", ranks=3))
        assert same(island.inner(tmp_path), before)
        second = saved(run, island)
        assert list_parts(tmp_path) == {1: [first, second]}
        names = {path.name for path in (tmp_path / "parts/learner-1").iterdir()}
        assert names == {f"{number:09d}.{kind}" for number in (first, second) for kind in ("dcp", "safetensors")}
        island.kill_all()


def test_a_full_disk_of_one_rank_costs_the_part_and_what_is_missing_or_cut_short_is_said(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", model="tall"))
        under_way(run, island)
        first = saved(run, island)
        before = island.inner(tmp_path)
        second = saved(run, island)
        island.command("small files")
        assert snapshot_of(run)["state"] == "abandoned"
        (line,) = said(run, island, "could not save its part")
        assert "rank 1: " in line
        assert "File too large" in line
        assert not [*tmp_path.glob("parts/learner-1/.*")], "half a part is left"
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "it goes on")
        island.kill_all()
        assert list_parts(tmp_path) == {1: [first, second]}

        os.truncate(shard_file(tmp_path, second, 0), 1000)
        island = again(run, IslandSpec(1, "fsdp", model="tall"))
        (line,) = said(run, island, "trying an older one")
        assert f"{second:09d}.dcp/__0_0.distcp has 1000 of " in line
        assert same(island.inner(tmp_path), before)
        island.kill_all()
        shard_file(tmp_path, first, 1).unlink()
        island = again(run, IslandSpec(1, "replicas", ranks=1, model="tall"))
        _, line = said(run, island, "trying an older one")
        assert f"{first:09d}.dcp/__1_0.distcp, a shard file of one of its ranks, is missing" in line
        assert island.inner(tmp_path) == {}
        island.kill_all()


def test_a_rank_that_does_not_see_the_folder_gives_its_rows_to_its_leader(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", planted="blind-rank", planted_ranks=(1,)))
        under_way(run, island)
        number = saved(run, island)
        before = island.inner(tmp_path)
        island.kill_all()
        assert fault_marker(tmp_path, "blind").exists()
        part = read_part(part_path(tmp_path, 1, number))
        assert part.shards is None
        assert part.note["format"] == 1, "which every version of Atoll reads"
        assert [path.name for path in (tmp_path / "parts/learner-1").iterdir()] == [f"{number:09d}.safetensors"]
        island = again(run, IslandSpec(1, "fsdp"))
        assert same(island.inner(tmp_path), before)
        island.kill_all()


def test_a_part_of_ranks_is_restored_into_a_new_run_and_its_beginning(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    with Run(old, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        under_way(run, island)
        first, second = saved(run, island), saved(run, island)
        island.kill_all()
    (info,) = [info for info in list_snapshots(old) if info.number == second]
    assert info.to_json(old)["parts"][0]["bytes"] == part_bytes(part_path(old, 1, second))
    damage(shard_file(old, second, 1))
    words: list[str] = []
    source: Any = SimpleNamespace(run=old, info=info)
    assert restore._write_parts(source, new, "another", words.append) == [1]
    assert f"{second:09d}.safetensors: the digest of __1_0.distcp is wrong" in words[0]
    before = read_part(part_path(old, 1, first))
    for place in (new, new / restore.INITIAL_FOLDER):
        assert list_parts(place) == {1: [first]}
        assert {path.name for path in (place / "parts/learner-1").iterdir()} == {
            f"{first:09d}.dcp",
            f"{first:09d}.safetensors",
        }
        part = read_part(part_path(place, 1, first))
        assert part.note["run"] == "another"
        assert same(dict(part.optimizer_tensors()), dict(before.optimizer_tensors()))
