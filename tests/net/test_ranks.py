"""Islands of several ranks, as real processes on gloo, in runs with islands of other shapes."""

from __future__ import annotations

import pytest
import torch

from tests.net.rank_runs import IslandSpec, RankedIsland
from tests.net.runs import LearnerSpec, Run, config, endless


@pytest.mark.slow
def test_islands_of_different_shapes_hold_the_same_published_model(tmp_path):
    """One rank beside two with FSDP2 beside two with DDP."""
    with Run(tmp_path, config(budget_merges=9)) as run:
        alone = run.start(LearnerSpec(1))
        sharded, replicas = RankedIsland(run, IslandSpec(2, "fsdp")), RankedIsland(run, IslandSpec(3, "ddp"))
        alone.hear("joined")
        for island in (sharded, replicas):
            assert {told["learner"] for told in island.joined()} == {island.spec.number}
        run.go(alone)
        sharded.order("go")
        replicas.order("go")
        for island in (sharded, replicas):
            island.finished(tmp_path)
        published = run.finish(alone)
        run.assert_same(published, 1, 2, 3)
        run.assert_clean()
