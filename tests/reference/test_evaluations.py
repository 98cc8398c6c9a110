"""Tests of the periodic evaluation of the published model, on a store that the test writes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.protocol import ManifestRecord
from atoll.reference.evaluation import PeriodicEvaluation, held_out_loss
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import METRICS_FOLDER, model_config
from atoll.reference.models import build_model
from atoll.reference.saved_models import published_model
from atoll.store.run_settings import RunSettings
from atoll.store.version_store import Store
from atoll.tensors.plan import describe_tensors, make_plan
from tests.reference.small_jobs import load_corpus, small_settings, small_text
from tests.store.store_samples import make_version

FRAGMENTS = 2


class StoredRun:
    """Run whose versions are published by the test."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "run"
        (self.directory / METRICS_FOLDER).mkdir(parents=True)
        self.settings: JobSettings = small_settings(small_text(root / "text", documents=8))
        self.corpus = load_corpus(self.settings)
        self.evaluations = PeriodicEvaluation(self.settings, self.directory, self.corpus)
        self._plan = make_plan(describe_tensors(build_model(model_config(self.settings), 1)), FRAGMENTS, "balanced")
        self.store = Store.open(self.directory / "store")
        self.store.write_settings(RunSettings(plan=self._plan).to_json())
        for p in range(FRAGMENTS):
            self.store.write_initial(p, self._values(p, 0))
        self.publish(1)

    def publish(self, number: int) -> None:
        for p in range(FRAGMENTS):
            self.store.write(make_version(p, number), self._values(p, number))

    def _values(self, p: int, number: int) -> dict[str, torch.Tensor]:
        return {"published": 0.1 * torch.randn(self._plan.numel(p), generator=torch.Generator().manual_seed(number))}

    def loss(self) -> float:
        model = published_model(self.directory, self.settings)
        return held_out_loss(model, self.corpus, model.config.context, self.settings.eval_tokens).loss

    def points(self) -> list[dict[str, Any]]:
        path = self.directory / METRICS_FOLDER / "eval.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def run(tmp_path):
    stored = StoredRun(tmp_path)
    yield stored
    stored.evaluations.join()
    stored.store.close()


def test_evaluation_has_time_and_versions_of_the_model_that_was_read(run):
    """Versions are published while the evaluation waits for run.json, a FIFO, before it can read the model."""
    settings = run.directory / "store" / "run.json"
    regular = settings.rename(run.directory / "run.json")
    os.mkfifo(settings)
    run.evaluations.start_if_due(0.5)
    with open(settings, "wb") as pipe:  # returns when the evaluation has opened the other end
        run.publish(2)
        published_at = time.time()
        content = regular.read_bytes()
        regular.replace(settings)
        pipe.write(content)
    run.evaluations.join()
    (point,) = run.points()
    assert point["loss"] == run.loss()
    assert point["at"] >= published_at, "the time of the evaluation is before the model was published"
    assert point["versions"] == [2, 2]


def test_evaluation_runs_once_per_tenth_of_the_run(run):
    """Tenths that passed between two polls are skipped."""
    for number, progress in enumerate((0.05, 0.12, 0.15, 0.48, 0.49, 1.0), start=2):
        run.publish(number)
        run.evaluations.start_if_due(progress)
        run.evaluations.join()
    assert [point["versions"] for point in run.points()] == [[3, 3], [5, 5]]


def test_final_model_is_not_a_point_of_the_periodic_evaluation(run):
    run.store.write(ManifestRecord((1, 1), 2, 100))
    run.evaluations.start_if_due(0.5)
    run.evaluations.join()
    assert run.points() == []


def test_evaluation_without_a_store_is_skipped(run):
    shutil.rmtree(run.directory / "store")
    run.evaluations.start_if_due(0.9)
    run.evaluations.join()
    assert run.points() == []
