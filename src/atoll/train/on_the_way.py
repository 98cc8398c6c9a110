"""The published model judged on held-out text while the run goes, for the curve; nobody waits for it.

`metrics/eval.jsonl`: a line per evaluation, at every tenth of the run by default. It is done by a thread of the process
that watches the others, at a low priority and on few tokens: islands have the cores.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import torch

from atoll.train.data import Text
from atoll.train.evaluation import held_out_loss
from atoll.train.job_settings import JobSettings
from atoll.train.loop import METRICS
from atoll.train.published import published_model

NAME = "eval.jsonl"
MOST_TOKENS = 8192
NICE = 15


class Evaluations:
    def __init__(self, settings: JobSettings, run: Path, corpus: Text) -> None:
        self._settings, self._run, self._corpus = settings, run, corpus
        self._thread: threading.Thread | None = None
        self._next = 1

    def look(self, progress: float) -> None:
        """Begin one if it is due and none is under way."""
        count = self._settings.evaluations
        if count == 0 or progress < self._next / count or progress >= 1.0:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._next = int(progress * count) + 1
        self._thread = threading.Thread(target=self._evaluate, args=(progress,), name="evaluation", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _evaluate(self, progress: float) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux: of this thread alone
        except OSError:
            return  # it would compete with the islands
        torch.set_num_threads(1)
        at = time.time()
        try:
            model = published_model(self._run, self._settings)
        except (OSError, ValueError):
            return  # no version of some fragment yet, or it was replaced under our hands: the next one will do
        tokens = min(MOST_TOKENS, self._settings.eval_tokens)
        found = held_out_loss(model, self._corpus, model.config.context, tokens)
        line = {"at": at, "loss": found.loss, "tokens": found.tokens, "progress": progress}
        try:
            with open(self._run / METRICS / NAME, "ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError:
            return  # the record is worth less than the run
