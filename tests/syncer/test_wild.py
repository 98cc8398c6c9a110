"""Learners that send finite but oversized values are refused and quarantined, and do not affect other learners."""

from __future__ import annotations

import pytest
from torch import Tensor

from atoll.core.types import Limits
from atoll.tensors.settings import Numerics
from tests.learner.runs import Run, endless

PATIENT = Limits(initial_wait_s=5.0, min_wait_s=2.0, initial_backoff_s=0.05, max_backoff_s=0.5)
ROUNDS = 3 * 6  # the model has three fragments
FAR = 1_000_000


def largest(published: dict[str, Tensor]) -> float:
    return max(float(value.abs().max()) for value in published.values())


def test_oversized_contribution_is_refused_and_repeats_quarantined(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        learners = run.joined(1, 2, 3)
        run.go(*learners)
        run.until(run.merges(ROUNDS), "the usual norm is known")
        wild, *others = learners
        wild.expected_to_end = True
        wild.command("wild", FAR)
        shown = run.until(run.learner(1, standing="quarantined"), "learner 1 is quarantined")
        assert "times the typical norm" in shown["reason"]
        assert shown["strikes"] == 3
        assert "times the typical norm" in wild.expect("failed")[1]
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "the others continue")
        run.end()
        published = run.finish(*others)
        run.assert_same(published, 2, 3)
        assert largest(published) < 100
        run.verdict()


def test_without_norm_check_oversized_contribution_is_merged(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT), planted="no-outlier-check") as run:
        learners = run.joined(1, 2, 3)
        run.go(*learners)
        run.until(run.merges(ROUNDS), "the run trains")
        learners[0].command("wild", FAR)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 9), "every fragment is merged again")
        run.end()
        assert largest(run.finish(*learners)) > 1000


@pytest.mark.parametrize(
    "numerics",
    [Numerics(merge="trimmed"), pytest.param(Numerics(norm_clip=2.0), marks=pytest.mark.long)],
    ids=["trimmed", "norm-clip"],
)
def test_robust_merge_tolerates_accepted_outliers(tmp_path, numerics):
    """One of four learners sends outliers, and the norm check is off: only the robust merge limits them."""
    with Run(tmp_path, endless(quorum=4, limits=PATIENT), numerics, planted="no-outlier-check") as run:
        learners = run.joined(1, 2, 3, 4)
        run.go(*learners)
        run.until(run.merges(ROUNDS), "the usual norm is known")
        learners[0].command("wild", FAR)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 9), "every fragment is merged again")
        run.syncer.kill()  # the norm statistics survive the restart
        run.start_syncer()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "the run continues")
        run.end()
        assert largest(run.finish(*learners)) < 100
