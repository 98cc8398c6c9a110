"""Islands whose ranks send and fetch their own rows: nobody has a whole fragment, and nobody else sees a difference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from atoll.island import leader
from atoll.tensors.settings import Numerics
from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.fault_injection import struck
from tests.learner.runs import LearnerSpec, Run, config, endless
from tests.transport.key_rings import KeyRing

TOTAL = 8 * 4000 + 4000 + 4 * 4000 + 4
"""Numbers of the model `tall`."""


def largest(directory: Path, island: RankedIsland) -> list[int]:
    """Bytes of the largest tensor that each rank has made for Atoll."""
    return [int((directory / f"largest-{rank.pid}").read_text()) for rank in island.ranks]


def has_whole_fragment(stats: dict[str, Any], largest_bytes: int) -> bool:
    """A fragment of the run below has all numbers. A rank with some of them holds so many in each buffer, and a few
    blocks more."""
    assert stats["parameters"] + 4 * 256 < TOTAL / 2
    return largest_bytes > 4 * (stats["parameters"] + 4 * 256) or bool(stats["host_bytes"] > 32 * stats["parameters"])


def test_no_rank_holds_a_whole_fragment_and_one_that_collects_them_is_found(tmp_path):
    """In a run with shards. The first island founds it, so its ranks have shown the model as well. Every merge needs
    both islands: otherwise the faster one can complete all merges before the other has contributed."""
    measured = IslandSpec(1, ranks=3, model="tall", planted="measured-memory", planted_ranks=(0, 1, 2), keeps=False)
    collects = IslandSpec(2, ranks=3, model="tall", planted="measured-memory collecting", keeps=False)
    with Run(tmp_path, config(budget_merges=6, fragments=1, quorum=2), shards=1) as run:
        rows = RankedIsland(run, measured)
        rows.joined()
        planted = RankedIsland(run, collects)
        planted.joined()
        rows.order("go")
        planted.order("go")
        told = {1: rows.hear("ended"), 2: planted.hear("ended")}
        assert [each["stats"]["transfer_mode"] for each in told[1] + told[2]] == ["rows"] * 3 + ["leader"] * 3
        for each, size in zip(told[1], largest(tmp_path, rows), strict=True):
            assert not has_whole_fragment(each["stats"], size), (each, size)
            assert each["stats"]["contributed"] > 0
        leader = told[2][0]["stats"]
        (size,) = (int((tmp_path / f"largest-{planted.ranks[0].pid}").read_text()),)
        assert has_whole_fragment(leader, size)
        assert size >= 4 * TOTAL
        assert run.log_lines(rows.ranks[0], "every rank of this island sends and fetches its own rows")
        assert run.log_lines(planted.ranks[0], "rank 0 sends and fetches for all ranks")


@pytest.mark.long
def test_coarse_codecs_in_slices_over_tls_and_values_that_are_not_those_published(tmp_path):
    """Blocks reach over the rows of ranks. Every third update leads to another value, which is found at the leader."""
    ring = KeyRing(tmp_path / "keys")
    numerics = Numerics(up="int4", down="int8")
    with Run(tmp_path, endless(quorum=1), numerics, planted="wrong-update", keys=ring.syncer) as run:
        spec = IslandSpec(1, ranks=3, model="tall", planted="small-slices", planted_ranks=(0, 1, 2), keys=ring["one"])
        island = RankedIsland(run, spec)
        island.joined()
        alone = run.start(LearnerSpec(2, "tall", keys=ring["two"]))
        alone.hear("joined")
        island.order("go")
        words = "is not the one that was published"
        run.until(lambda _: run.log_lines(island.ranks[0], words), "the leader finds a wrong one")
        run.go(alone)
        ring.authority.renew("one")
        words = "the keys have changed: dialling with the new ones"
        run.until(lambda _: run.log_lines(island.ranks[1], words), "a rank without a link uses its new key too")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "and goes on")
        run.end()
        island.finished(tmp_path)
        published = run.finish(alone)
        run.assert_same(published, 1, 2)
        run.assert_clean()
        assert struck(tmp_path, "update").exists()
        assert run.log_lines(island.ranks[0], "every rank of this island sends and fetches its own rows")


@pytest.mark.long
def test_a_leader_that_believes_everything_is_found(tmp_path):
    with Run(tmp_path, config(budget_merges=12), Numerics(up="int4", down="int8"), planted="wrong-update") as run:
        island = RankedIsland(run, IslandSpec(1, planted="believing"))
        island.joined()
        island.order("go")
        island.hear("ended")
        assert run.syncer.hear("ended") is True
        assert struck(tmp_path, "update").exists()
        with pytest.raises(AssertionError, match="is not the published one"):
            run.assert_same(load_file(tmp_path / "published.safetensors"), 1)


@pytest.mark.long
def test_a_rank_that_dies_while_it_sends_ends_its_island_and_no_other(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        (alone,) = run.joined(LearnerSpec(1, "tall"))
        spec = IslandSpec(2, model="tall", planted="deadly-slice", planted_ranks=(1,))
        island = RankedIsland(run, spec)
        island.joined()
        run.go(alone)
        island.order("go")
        run.until(lambda _: run.log_lines(island.ranks[0], "training starts"), "the island trains")
        for rank in island.ranks:
            rank.expected_to_end = True
        (tmp_path / "die").touch()
        kind, words, threads = island.ranks[0].hear("failed")
        assert struck(tmp_path, "slice").exists()
        assert kind in ("IslandBrokenError", "RuntimeError", "DistBackendError"), words
        assert threads == []
        island.ranks[1].ended()
        (tmp_path / "die").unlink()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other one goes on")
        again = RankedIsland(run, IslandSpec(2, ranks=3, model="tall"))
        assert again.joined()[1]["incarnation"] == 2
        again.order("go")
        run.end()
        again.finished(tmp_path)
        run.finish(alone)
        run.verdict()


def test_a_slice_of_any_rank_that_was_damaged_is_brought_again(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, model="tall", planted="damaged-slice", planted_ranks=(1,)))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        assert struck(tmp_path, "slice").exists()
        assert run.log_lines(island.ranks[0], "was not taken") == [], "or it would wait until it is asked again"
        run.end()
        island.finished(tmp_path)
        run.verdict()


@pytest.mark.long
def test_a_rank_that_loses_its_own_way_to_the_syncer_ends_the_island(tmp_path):
    """It would train on, and take part in nothing. When it comes back rank 0 can do it for all."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, model="tall", planted="lost-way", planted_ranks=(0, 1)))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        for rank in island.ranks:
            rank.expected_to_end = True
        (tmp_path / "cut").touch()
        kind, words, threads = island.ranks[0].hear("failed")
        assert kind == "IslandBrokenError"
        assert "rank 1: no route to host; it has not reached the syncer for 1 s" in words
        assert threads == []


@pytest.mark.long
def test_a_syncer_starts_again_while_ranks_send(tmp_path):
    """Two times two ranks: of those that hold the same rows one sends. What had arrived of a contribution is gone."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "hsdp", 4, "tall", planted="held-slice", planted_ranks=(1,)))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        os.mkfifo(tmp_path / "hold")
        run.until(lambda _: struck(tmp_path, "slice").exists(), "a rank is in the middle of it")
        run.syncer.kill()
        run.start_syncer()
        waiting = os.open(tmp_path / "hold", os.O_WRONLY)
        (tmp_path / "hold").unlink()
        os.close(waiting)
        before = run.status()["merges"]
        run.until(run.merges(before + 4), "it goes on")
        run.end()
        ended = island.finished(tmp_path)
        assert run.syncer.hear("ended") is True
        assert ended
        run.verdict()


def test_where_a_rank_may_not_speak_to_the_syncer_rank_0_does_it_for_all(tmp_path):
    with Run(tmp_path, endless(quorum=1), token="secret-of-the-run") as run:
        island = RankedIsland(run, IslandSpec(1, token="secret-of-the-run", mute_ranks=(1,)))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        island.order("hold")
        assert {told["stats"]["transfer_mode"] for told in island.hear("held")} == {"leader"}
        assert run.log_lines(island.ranks[0], "rank 1 cannot speak to the syncer"), run.logs()
        assert run.log_lines(island.ranks[1], "rank 1 cannot speak to the syncer")
        island.order("break")
        island.left()


def test_where_fragments_are_small_rank_0_does_it_for_all(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, min_row_transfer_values=leader.MIN_ROW_TRANSFER_VALUES))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        island.order("hold")
        assert {told["stats"]["transfer_mode"] for told in island.hear("held")} == {"leader"}
        assert run.log_lines(island.ranks[0], "are not worth requests of each"), run.logs()
        run.end()
        island.order("go")
        island.finished(tmp_path)
        run.verdict()
