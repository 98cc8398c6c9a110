"""Held-out loss of a model: once for the report, and periodically for the published model during a run.

`metrics/eval.jsonl` has one line per evaluation, by default at every tenth of the run. A thread of the supervisor reads
the model and evaluates it at low priority on few tokens, because the learners need the cores. If an evaluation takes
longer than a tenth of the run, points are skipped. Each line has the time at which its versions were published.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from atoll.checkpoint.published_model import is_run_finished, read_plan, read_published_versions
from atoll.reference.data import Corpus
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import METRICS_FOLDER
from atoll.reference.models import GPT
from atoll.reference.saved_models import published_model

_BATCH = 32

EVAL_FILE = "eval.jsonl"
MAX_EVAL_TOKENS = 8192
MAX_READ_ATTEMPTS = 5
"""Attempts to read a model whose versions are being replaced. After these the point is skipped."""

EVAL_NICENESS = 15


class Evaluation(NamedTuple):
    loss: float  # mean per token, in nats
    tokens: int


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, context: int, tokens: int) -> Evaluation:
    """Return the mean loss on about `tokens` held-out tokens: whole windows, evenly spaced.

    The windows depend only on the corpus, `context` and `tokens`, so that losses of two models are comparable.
    """
    was_training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        for x, y in corpus.held_out_batches(context, _BATCH, max(1, tokens // context)):
            total += float(model(x, y)) * y.numel()
            count += y.numel()
    finally:
        model.train(was_training)
    return Evaluation(total / count, count)


class PublishedModel(NamedTuple):
    """Published model at one moment."""

    at: float  # Unix time
    versions: tuple[int, ...]
    model: GPT


class PeriodicEvaluation:
    """Evaluation of the published model at regular shares of a run, in a background thread."""

    def __init__(self, settings: JobSettings, run: Path, corpus: Corpus) -> None:
        self._settings, self._run, self._corpus = settings, run, corpus
        self._thread: threading.Thread | None = None
        self._next = 1

    def start_if_due(self, progress: float) -> None:
        """Start an evaluation if one is due and none is running."""
        count = self._settings.evaluations
        if count == 0 or progress < self._next / count or progress >= 1.0:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._next = int(progress * count) + 1
        self._thread = threading.Thread(target=self._evaluate, name="evaluation", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _evaluate(self) -> None:
        torch.set_num_threads(1)
        try:
            point = self._read()  # at normal priority: on busy cores the versions would be replaced before the read
            # on Linux this affects only this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), EVAL_NICENESS)
        except (OSError, ValueError):
            return  # a fragment has no version yet, or the priority cannot be lowered
        if point is None:
            return
        at, versions, model = point
        found = held_out_loss(
            model, self._corpus, model.config.context, min(MAX_EVAL_TOKENS, self._settings.eval_tokens)
        )
        line = {"at": at, "loss": found.loss, "tokens": found.tokens, "versions": versions}
        try:
            with open(self._run / METRICS_FOLDER / EVAL_FILE, "ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError:
            return  # a metric that cannot be written must not stop the run

    def _read(self) -> PublishedModel | None:
        """Return the published model and its time. None if the run is finished or the versions change too quickly.

        Versions are listed twice. If both lists are equal, these versions were the published ones at a time in between.
        """
        plan = read_plan(self._run)
        for _ in range(MAX_READ_ATTEMPTS):
            versions = tuple(read_published_versions(self._run, plan))
            at = time.time()
            if is_run_finished(self._run):
                return None  # the report evaluates the final model
            if tuple(read_published_versions(self._run, plan)) != versions:
                continue
            try:
                return PublishedModel(at, versions, published_model(self._run, self._settings, versions))
            except (OSError, ValueError):
                continue  # a version was removed before it was read
        return None
