"""Islands of several ranks as real processes on gloo, in runs with islands of other shapes."""

from __future__ import annotations

import pytest

from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.runs import LearnerSpec, Run, config


def test_islands_of_different_shapes_end_with_the_same_published_model(tmp_path):
    """The run has one learner of one process, one of two ranks with FSDP2 and one of two ranks with DDP."""
    with Run(tmp_path, config(budget_merges=9)) as run:
        alone = run.start(LearnerSpec(1))
        sharded, replicas = RankedIsland(run, IslandSpec(2, "fsdp")), RankedIsland(run, IslandSpec(3, "ddp"))
        alone.expect("joined")
        for island in (sharded, replicas):
            assert {report["learner"] for report in island.joined()} == {island.spec.number}
        run.go(alone)
        sharded.command("go")
        replicas.command("go")
        for island in (sharded, replicas):
            island.finished(tmp_path)
        published = run.finish(alone)
        run.assert_same(published, 1, 2, 3)
        run.assert_clean()


@pytest.mark.parametrize(
    "spec",
    [
        IslandSpec(1, "tp"),
        IslandSpec(1, "fsdp", ranks=3, dtype="bfloat16"),
        IslandSpec(1, "fsdp", model="mixed"),
        IslandSpec(1, "ddp", model="mixed"),
        IslandSpec(1, "replicas"),
        IslandSpec(1, "fsdp+tp", ranks=4),
    ],
    ids=lambda spec: f"{spec.shape}-{spec.model}-{spec.dtype}",
)
def test_island_of_any_shape_uploads_the_model_and_ends_with_the_published_one(tmp_path, spec):
    """The models have tied, frozen and bf16 parameters, buffers, and sizes that the ranks do not divide."""
    with Run(tmp_path, config(budget_merges=6)) as run:
        island = RankedIsland(run, spec)
        island.joined()  # it uploads the initial model
        alone = run.start(LearnerSpec(2, spec.model, spec.dtype))
        alone.expect("joined")
        run.go(alone)
        island.command("go")
        ended = island.finished(tmp_path)
        published = run.finish(alone)
        run.assert_same(published, 1, 2)
        run.assert_clean()
        assert set(published) <= set(ended)
