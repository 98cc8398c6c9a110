"""Metrics file of a real syncer: merges and learners."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.types import AcceptedContribution, RoundId
from atoll.store.metrics_files import MetricsReader
from atoll.syncer.status import SyncerMetrics
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import SyncerFragment
from tests.learner.runs import Run, endless, versions_by_epoch
from tests.tensors.tensor_samples import make_single_fragment_plan, random_tensor

MERGE = {
    *("kind", "fragment", "at", "wall", "version", "epoch", "contributions", "weights", "norms"),
    *("delta_norm", "cosine", "momentum_norm", "step_norm", "quantisation_error", "merge_s"),
}


def lines(directory: Path, kind: str) -> list[dict[str, Any]]:
    reader = MetricsReader(directory)
    found = [line for line in reader.read_lines() if line["kind"] == kind]
    reader.close()
    return found


def have_metrics(directory: Path, learners: set[int]) -> bool:
    return learners <= {line["learner"] for line in lines(directory, "learner")}


def test_every_durable_version_has_one_metrics_line_after_kill(tmp_path):
    numerics = Numerics(merge="radial", outer_momentum=0.9, outer_lr=0.5, down="int8")
    with Run(tmp_path, endless(quorum=2), numerics) as run:
        learners = run.joined(1, 2, 3)
        run.go(*learners)
        run.until(run.merges(9), "merges")
        run.syncer.kill()
        run.start_syncer()
        run.until(run.merges(15), "the run continues")
        run.until(lambda status: have_metrics(tmp_path, {1, 2, 3}), "every learner has sent metrics")
        run.end()
        run.finish(*learners)
    merges = lines(tmp_path, "merge")
    assert all(set(line) == MERGE for line in merges), merges[0]
    versions = [(line["fragment"], line["version"]) for line in merges]
    assert len(set(versions)) == len(versions)
    assert {line["epoch"] for line in merges} == {1, 2}
    (_, before), (_, since) = sorted(versions_by_epoch(tmp_path))
    assert before == {}
    for fragment, version in since.items():
        new = {line["version"] for line in merges if line["fragment"] == fragment and line["epoch"] == 2}
        assert min(new) == version + 1
    for line in merges:
        assert 2 <= line["contributions"] == len(line["norms"]) <= 3
        assert line["weights"].keys() == line["norms"].keys() <= {"1", "2", "3"}
        assert sum(line["weights"].values()) == pytest.approx(1.0, abs=1e-4)
        assert min(line["norms"].values()) > 0 < line["delta_norm"] <= max(line["norms"].values()) * 1.0001
        assert -1 <= line["cosine"] <= 1
        assert 0 < line["quantisation_error"] < 0.1
        assert line["momentum_norm"] > 0 < line["step_norm"]
        assert abs(line["wall"] - time.time()) < 300
    learner_lines = lines(tmp_path, "learner")
    for number in (1, 2, 3):
        own_lines = [line for line in learner_lines if line["learner"] == number]
        assert {"incarnation", "step", "tokens", "tokens_per_s", "bytes_up", "bytes_down", "loss"} <= set(own_lines[-1])
        assert own_lines[-1]["step"] > 0 < own_lines[-1]["tokens"]


def test_merge_line_matches_merge(tmp_path):
    numel = 400
    plan = make_single_fragment_plan(("weight", numel))
    fragment = SyncerFragment(plan, 0, Numerics(up="int8", down="int4", norm_clip=0.0), 0, torch.zeros(numel))
    metrics = SyncerMetrics(tmp_path, logging.getLogger("atoll.test"))
    coder, round_id = get_codec("int8"), RoundId(0, 0, 1, 1)
    deltas = [random_tensor(seed, numel) for seed in range(3)]
    for index, delta in enumerate(deltas):
        accepted = AcceptedContribution(index + 1, 1, 10, 5, 100, 100, 0, weight=1.0 + index)
        fragment.accumulate(round_id, accepted, coder.encode(delta), "int8")
    fragment.merge(round_id, 3)
    fragment.mark_durable()
    assert fragment.stats is not None
    metrics.record_merge(2.0, 1, fragment.id, fragment.served.version, fragment.stats)
    metrics.close()
    (found,) = lines(tmp_path, "merge")
    assert (found["fragment"], found["version"], found["epoch"], found["at"]) == (0, 1, 1, 2.0)
    assert found["weights"] == pytest.approx({"1": 1 / 6, "2": 2 / 6, "3": 3 / 6}, rel=1e-5)
    assert found["norms"] == pytest.approx({str(n + 1): float(d.norm()) for n, d in enumerate(deltas)}, rel=1e-2)
    mean = (deltas[0] + 2 * deltas[1] + 3 * deltas[2]) / 6
    assert found["delta_norm"] == pytest.approx(float(mean.norm()), rel=1e-2)
    assert found["step_norm"] == pytest.approx(float(fragment.served.value.norm()), rel=1e-4)
    error = float((fragment.outer_optimizer.value - fragment.served.value).norm() / fragment.served.value.norm())
    assert found["quantisation_error"] == pytest.approx(error, rel=1e-4)
    assert found["momentum_norm"] is None


def test_metrics_of_frequent_sender_are_written_once_per_second(tmp_path):
    metrics = SyncerMetrics(tmp_path, logging.getLogger("atoll.test"))
    for tenth in range(35):
        metrics.record_learner(tenth / 10, 4, 1, {"loss": float(tenth)})
    metrics.close()
    assert metrics.learner_metrics(4) == {"loss": 34.0}
    assert [line["loss"] for line in lines(tmp_path, "learner")] == [0.0, 9.0, 18.0, 27.0]


def test_status_shows_step_of_core(tmp_path):
    with Run(tmp_path, endless()) as run:
        (learner,) = run.joined(1)
        learner.command("train", 40)
        learner.expect("trained")
        shown = run.until(run.learner(1, standing="live"), "the learner trains")
        assert isinstance(shown["step"], int)
        run.until(lambda status: have_metrics(tmp_path, {1}), "the learner has sent metrics")
        assert run.status()["learners"][0]["tokens"] > 0
