"""Islands whose ranks transfer their own rows, so that no rank has a whole fragment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from atoll.island import leader
from atoll.tensors.settings import Numerics
from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.fault_injection import fault_marker
from tests.learner.runs import LearnerSpec, Run, config, endless
from tests.transport.key_rings import KeyRing

TOTAL = 8 * 4000 + 4000 + 4 * 4000 + 4
"""Parameters of the model `tall`."""


def largest_tensors(directory: Path, island: RankedIsland) -> list[int]:
    """Return the bytes of the largest tensor that Atoll has allocated in each rank."""
    return [int((directory / f"largest-{rank.pid}").read_text()) for rank in island.ranks]


def has_whole_fragment(stats: dict[str, Any], largest_bytes: int) -> bool:
    """Return whether a rank has allocated more than its own rows and a few blocks. The run has one fragment."""
    assert stats["parameters"] + 4 * 256 < TOTAL / 2
    return largest_bytes > 4 * (stats["parameters"] + 4 * 256) or bool(stats["host_bytes"] > 32 * stats["parameters"])


def test_no_rank_has_a_whole_fragment_and_a_planted_one_is_found(tmp_path):
    """The run has a shard, and the first island uploads the initial model.

    Every merge needs both islands: otherwise the faster one can complete all merges before the other contributes.
    """
    measured = IslandSpec(
        1, ranks=3, model="tall", planted="measured-memory", planted_ranks=(0, 1, 2), has_run_directory=False
    )
    collecting = IslandSpec(
        2, ranks=3, model="tall", planted="measured-memory leader-transfers-rows", has_run_directory=False
    )
    with Run(tmp_path, config(budget_merges=6, fragments=1, quorum=2), shards=1) as run:
        rows = RankedIsland(run, measured)
        rows.joined()
        planted = RankedIsland(run, collecting)
        planted.joined()
        rows.command("go")
        planted.command("go")
        report = {1: rows.expect("ended"), 2: planted.expect("ended")}
        assert [each["stats"]["transfer_mode"] for each in report[1] + report[2]] == ["rows"] * 3 + ["leader"] * 3
        for each, size in zip(report[1], largest_tensors(tmp_path, rows), strict=True):
            assert not has_whole_fragment(each["stats"], size), (each, size)
            assert each["stats"]["contributed"] > 0
        leader = report[2][0]["stats"]
        (size,) = (int((tmp_path / f"largest-{planted.ranks[0].pid}").read_text()),)
        assert has_whole_fragment(leader, size)
        assert size >= 4 * TOTAL
        assert run.log_lines(rows.ranks[0], "every rank of this island transfers its own rows")
        assert run.log_lines(planted.ranks[0], "rank 0 transfers the rows of all ranks")


@pytest.mark.long
def test_coarse_codecs_in_slices_over_tls_and_values_that_differ_from_the_published_ones(tmp_path):
    """Blocks span rows of several ranks. Every third update leads to another value, which the leader detects."""
    ring = KeyRing(tmp_path / "keys")
    numerics = Numerics(up="int4", down="int8")
    with Run(tmp_path, endless(quorum=1), numerics, planted="wrong-update", keys=ring.syncer) as run:
        spec = IslandSpec(1, ranks=3, model="tall", planted="small-slices", planted_ranks=(0, 1, 2), keys=ring["one"])
        island = RankedIsland(run, spec)
        island.joined()
        alone = run.start(LearnerSpec(2, "tall", keys=ring["two"]))
        alone.expect("joined")
        island.command("go")
        difference = "differs from the published one"
        run.until(lambda _: run.log_lines(island.ranks[0], difference), "the leader detects a wrong value")
        run.go(alone)
        ring.authority.renew("one")
        renewal = "the key files have changed; connecting with the new keys"
        run.until(lambda _: run.log_lines(island.ranks[1], renewal), "a rank without a link uses its new key too")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "and goes on")
        run.end()
        island.finished(tmp_path)
        published = run.finish(alone)
        run.assert_same(published, 1, 2)
        run.assert_clean()
        assert fault_marker(tmp_path, "update").exists()
        assert run.log_lines(island.ranks[0], "every rank of this island transfers its own rows")


@pytest.mark.long
def test_leader_that_skips_the_digest_check_is_found(tmp_path):
    with Run(tmp_path, config(budget_merges=12), Numerics(up="int4", down="int8"), planted="wrong-update") as run:
        island = RankedIsland(run, IslandSpec(1, planted="no-leader-digest-check"))
        island.joined()
        island.command("go")
        island.expect("ended")
        assert run.syncer.expect("ended") is True
        assert fault_marker(tmp_path, "update").exists()
        with pytest.raises(AssertionError, match="is not the published one"):
            run.assert_same(load_file(tmp_path / "published.safetensors"), 1)


@pytest.mark.long
def test_a_rank_that_dies_while_it_sends_ends_its_island_and_no_other(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        (alone,) = run.joined(LearnerSpec(1, "tall"))
        spec = IslandSpec(2, model="tall", planted="kill-during-slice", planted_ranks=(1,))
        island = RankedIsland(run, spec)
        island.joined()
        run.go(alone)
        island.command("go")
        run.until(lambda _: run.log_lines(island.ranks[0], "training starts"), "the island trains")
        for rank in island.ranks:
            rank.expected_to_end = True
        (tmp_path / "die").touch()
        kind, message, threads = island.ranks[0].expect("failed")
        assert fault_marker(tmp_path, "slice").exists()
        assert kind in ("IslandBrokenError", "RuntimeError", "DistBackendError"), message
        assert threads == []
        island.ranks[1].ended()
        (tmp_path / "die").unlink()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other one goes on")
        restarted = RankedIsland(run, IslandSpec(2, ranks=3, model="tall"))
        assert restarted.joined()[1]["incarnation"] == 2
        restarted.command("go")
        run.end()
        restarted.finished(tmp_path)
        run.finish(alone)
        run.verdict()


def test_damaged_slice_of_any_rank_is_uploaded_again(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, model="tall", planted="damaged-slice", planted_ranks=(1,)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        assert fault_marker(tmp_path, "slice").exists()
        assert run.log_lines(island.ranks[0], "syncer refused contribution") == [], (
            "or it would wait for the next request"
        )
        run.end()
        island.finished(tmp_path)
        run.verdict()


@pytest.mark.long
def test_rank_that_loses_its_connection_to_the_syncer_ends_the_island(tmp_path):
    """Otherwise the rank would train on and contribute nothing. After a restart rank 0 can transfer for all ranks."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, model="tall", planted="unreachable-syncer", planted_ranks=(0, 1)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        for rank in island.ranks:
            rank.expected_to_end = True
        (tmp_path / "cut").touch()
        kind, message, threads = island.ranks[0].expect("failed")
        assert kind == "IslandBrokenError"
        assert "rank 1: no route to host; it has not reached the syncer for 1 s" in message
        assert threads == []


@pytest.mark.long
def test_syncer_restarts_while_ranks_upload(tmp_path):
    """Two times two ranks: one of the ranks with the same rows sends them. The restart loses a partial upload."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "hsdp", 4, "tall", planted="blocked-slices", planted_ranks=(1,)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        os.mkfifo(tmp_path / "hold")
        run.until(lambda _: fault_marker(tmp_path, "slice").exists(), "a rank is uploading a slice")
        run.syncer.kill()
        run.start_syncer()
        pipe = os.open(tmp_path / "hold", os.O_WRONLY)
        (tmp_path / "hold").unlink()
        os.close(pipe)
        before = run.status()["merges"]
        run.until(run.merges(before + 4), "it goes on")
        run.end()
        ended = island.finished(tmp_path)
        assert run.syncer.expect("ended") is True
        assert ended
        run.verdict()


def test_rank_0_transfers_for_all_if_a_rank_cannot_reach_the_syncer(tmp_path):
    with Run(tmp_path, endless(quorum=1), token="secret-of-the-run") as run:
        island = RankedIsland(run, IslandSpec(1, token="secret-of-the-run", ranks_without_token=(1,)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        island.command("hold")
        assert {report["stats"]["transfer_mode"] for report in island.expect("held")} == {"leader"}
        assert run.log_lines(island.ranks[0], "rank 1 cannot reach the syncer"), run.logs()
        assert run.log_lines(island.ranks[1], "rank 1 cannot reach the syncer")
        island.command("break")
        island.left()


def test_rank_0_transfers_for_all_if_fragments_are_small(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, min_row_transfer_values=leader.MIN_ROW_TRANSFER_VALUES))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        island.command("hold")
        assert {report["stats"]["transfer_mode"] for report in island.expect("held")} == {"leader"}
        assert run.log_lines(island.ranks[0], "fragments have fewer than"), run.logs()
        run.end()
        island.command("go")
        island.finished(tmp_path)
        run.verdict()
