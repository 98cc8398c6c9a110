"""Evaluations of the published model during the run, on a store that the test writes."""

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
from tests.reference.small_jobs import corpus_of, small_settings, small_text
from tests.store.store_samples import make_version

FRAGMENTS = 2


class StoredRun:
    """A run of which the test publishes every version."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "run"
        (self.directory / METRICS_FOLDER).mkdir(parents=True)
        self.settings: JobSettings = small_settings(small_text(root / "text", documents=8))
        self.corpus = corpus_of(self.settings)
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


def test_evaluation_is_stamped_with_the_moment_and_the_versions_that_were_read(run):
    """Versions are published while the evaluation waits for run.json, a FIFO, before it can read the model."""
    founded = run.directory / "store" / "run.json"
    regular = founded.rename(run.directory / "run.json")
    os.mkfifo(founded)
    run.evaluations.look(0.5)
    with open(founded, "wb") as pipe:  # returns when the evaluation has opened the other end
        run.publish(2)
        published_at = time.time()
        content = regular.read_bytes()
        regular.replace(founded)
        pipe.write(content)
    run.evaluations.end()
    (point,) = run.points()
    assert point["loss"] == run.loss()
    assert point["at"] >= published_at, "a later model is shown at an earlier moment"
    assert point["versions"] == [2, 2]


def test_evaluations_are_made_once_for_every_tenth_of_the_run(run):
    """Tenths that passed between two looks are left out."""
    for number, progress in enumerate((0.05, 0.12, 0.15, 0.48, 0.49, 1.0), start=2):
        run.publish(number)
        run.evaluations.look(progress)
        run.evaluations.end()
    assert [point["versions"] for point in run.points()] == [[3, 3], [5, 5]]


def test_model_of_a_finished_run_is_no_point_on_the_way(run):
    run.store.write(ManifestRecord((1, 1), 2, 100))
    run.evaluations.look(0.5)
    run.evaluations.end()
    assert run.points() == []


def test_evaluation_without_a_store_is_left_out(run):
    shutil.rmtree(run.directory / "store")
    run.evaluations.look(0.9)
    run.evaluations.end()
    assert run.points() == []
