"""The loss of a model on held-out text: once for a report, and of the published model while a run goes on.

`metrics/eval.jsonl`: a line per evaluation, at every tenth of the run by default. A thread of the supervisor reads the
model and evaluates it at a low priority and on few tokens, because the learners need the cores. If an evaluation takes
longer than a tenth of the run, points are left out. Each line has the moment at which its versions were published.
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
"""Attempts to read a model whose versions are replaced meanwhile; the point is left out after these."""

EVAL_NICENESS = 15


class Evaluation(NamedTuple):
    loss: float  # mean per token, in nats
    tokens: int


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, context: int, tokens: int) -> Evaluation:
    """Mean loss on about `tokens` held-out tokens: whole windows, spread evenly over all that is held out.

    The windows depend on the corpus, `context` and `tokens` alone, so two models are asked the very same questions.
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
    """A model that was the published one at this moment, in seconds of the Unix epoch."""

    at: float
    versions: tuple[int, ...]
    model: GPT


class PeriodicEvaluation:
    def __init__(self, settings: JobSettings, run: Path, corpus: Corpus) -> None:
        self._settings, self._run, self._corpus = settings, run, corpus
        self._thread: threading.Thread | None = None
        self._next = 1

    def start_if_due(self, progress: float) -> None:
        """Begin one if it is due and none is under way."""
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
            point = self._read()  # before the priority falls: on busy cores the versions would be gone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), EVAL_NICENESS)  # on Linux: of this thread alone
        except (OSError, ValueError):
            return  # no version of some fragment yet, or an evaluation would compete with the learners
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
            return  # the record is worth less than the run

    def _read(self) -> PublishedModel | None:
        """Read the published model and the moment at which it was that; None if there is no such point on the way.

        Versions are listed twice. If nothing was replaced in between, they were the published ones between the lists.
        """
        plan = read_plan(self._run)
        for _ in range(MAX_READ_ATTEMPTS):
            versions = tuple(read_published_versions(self._run, plan))
            at = time.time()
            if is_run_finished(self._run):
                return None  # the report has this point
            if tuple(read_published_versions(self._run, plan)) != versions:
                continue
            try:
                return PublishedModel(at, versions, published_model(self._run, self._settings, versions))
            except (OSError, ValueError):
                continue  # a version was removed before it was read
        return None
