"""Inner training loop of one learner: model, optimizer, data, schedule, pace and metrics. No communication.

All methods use this loop, so that they differ only in how learners communicate.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atoll.dashboard.run_files import JsonTail, read_tail
from atoll.reference.data import Corpus, Sampler
from atoll.reference.job_settings import JobSettings
from atoll.reference.models import (
    GPT,
    SIZES,
    GPTConfig,
    build_model,
    clip_gradients,
    inner_optimizer,
    lr_factor,
    set_lr,
)

METRICS_FOLDER = "metrics"

_WRITE_INTERVAL_S = 1.0
_MAX_LINE_STEPS = 50


def model_config(settings: JobSettings) -> GPTConfig:
    """Return the configuration of the job's model."""
    config = SIZES.get(settings.model)
    if config is None:
        raise ValueError(f"there is no model {settings.model!r}; give one of {', '.join(SIZES)}")
    config = replace(config, vocabulary=settings.vocabulary)
    if settings.experts:
        config = replace(config, experts=settings.experts, experts_per_token=min(2, settings.experts))
    return config if settings.context is None else replace(config, context=settings.context)


class InnerStep(NamedTuple):
    """Loss and timing of one inner step."""

    loss: float
    tokens: int
    gradient_s: float  # forward and backward
    work_s: float  # `gradient_s` and the optimizer
    step_s: float  # `work_s`, and the wait to the pace of the step
    waited_s: float = 0.0  # time to read the batch, a part of `gradient_s`


class InnerLoop:
    """Model, optimizer and data of one learner. `module` computes the loss: it is the model or a wrapper of it."""

    def __init__(self, settings: JobSettings, corpus: Corpus | None = None) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.config = model_config(settings)
        self.model: GPT = build_model(self.config, settings.seed)
        self.module: nn.Module = self.model
        self.optimizer = inner_optimizer(self.model, settings.inner, settings.lr, settings.beta2, settings.weight_decay)
        self.corpus = Corpus.load(settings.data) if corpus is None else corpus
        self.tokens_per_step = settings.tokens_per_step(self.config.context)
        self.sampler = Sampler(self.corpus, settings.seed, self.config.context)
        self._min_step_s = 0.0
        self._waited_s = 0.0

    def set_pace(self, learner: int) -> None:
        """Set the pace of this learner, if steps are paced.

        This is not done in the constructor: a learner may receive its number from the syncer after it has its model.
        """
        self._min_step_s = self.settings.min_step_s(learner)

    def gradient(self, samples: Sequence[int]) -> float:
        """Compute the gradients for these samples and return the loss. The parameters do not change."""
        started_at = time.monotonic()
        x, y = self.sampler.batch(samples)
        self._waited_s = time.monotonic() - started_at
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.module(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, samples: Sequence[int], progress: float, lr_scale: float = 1.0) -> InnerStep:
        """Take one inner step on these samples.

        Args:
            progress: progress of the run, 0..1, which determines the learning rate.
            lr_scale: factor on the learning rate, below 1 while a learner with fresh optimizer state warms up.
        """
        settings = self.settings
        started_at = time.monotonic()
        set_lr(self.optimizer, settings.lr * lr_factor(progress, settings.warmup) * lr_scale)
        loss = self.gradient(samples)
        gradient_s = time.monotonic() - started_at
        if settings.clip:
            clip_gradients(self.model.parameters(), settings.clip)
        self.optimizer.step()
        work_s = time.monotonic() - started_at
        if work_s < self._min_step_s:
            time.sleep(self._min_step_s - work_s)
        return InnerStep(loss, self.tokens_per_step, gradient_s, work_s, time.monotonic() - started_at, self._waited_s)


class LearnerMetricsWriter:
    """Writer of `metrics/learner-3.jsonl`: a line after the first step, then about one per second.

    Each line is one unbuffered write. In a file that grows, or whose writer was killed, only the last line can be
    incomplete.
    """

    def __init__(self, run: Path, learner: int, start: int, extra: Callable[[], dict[str, Any]] | None = None) -> None:
        path = metrics_path(run, learner)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._extra = extra
        self._fixed = {"learner": learner, "start": start}
        self._has_partial_line = False  # the file ends with an incomplete line
        self.steps = 0
        self.tokens = 0
        self.waited_s = 0.0
        self._line_at = time.monotonic()
        self._line_steps: list[InnerStep] = []

    def record_step(self, step: InnerStep, paused_s: float = 0.0) -> None:
        """Record a step. `paused_s` is the time since the previous step in which the operator had paused the run."""
        self.steps += 1
        self._line_at += paused_s
        self.tokens += step.tokens
        self.waited_s += step.waited_s
        self._line_steps.append(step)
        is_due = len(self._line_steps) >= _MAX_LINE_STEPS or time.monotonic() - self._line_at >= _WRITE_INTERVAL_S
        if self.steps == 1 or is_due:
            self.flush()

    def flush(self) -> None:
        """Write a line for the steps since the previous line, if there are any."""
        steps = self._line_steps
        if not steps:
            return
        now = time.monotonic()
        self.write(
            {
                "step": self.steps,
                "tokens": self.tokens,
                "loss": sum(s.loss for s in steps) / len(steps),
                "step_s": sum(s.step_s for s in steps) / len(steps),
                "work_s": sum(s.work_s for s in steps) / len(steps),
                "tokens_per_s": sum(s.tokens for s in steps) / max(now - self._line_at, 1e-9),
                "waited_s": self.waited_s,
            }
        )
        self._line_at = now
        self._line_steps = []

    def write(self, fields: dict[str, Any]) -> None:
        """Write one line. On a full disk the line is lost and training continues."""
        line = {"at": time.time(), **self._fixed, **fields, **(self._extra() if self._extra is not None else {})}
        data = json.dumps(line).encode() + b"\n"
        try:
            if self._has_partial_line:
                data = b"\n" + data
            written = self._file.write(data)
            self._has_partial_line = written < len(data)  # the disk became full in the middle of the line
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
                raise

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> LearnerMetricsWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def metrics_path(run: Path, learner: int) -> Path:
    return run / METRICS_FOLDER / f"learner-{learner}.jsonl"


def read_metrics(run: Path, learner: int) -> list[dict[str, Any]]:
    """Return all complete lines, without those that a full disk has cut. Empty if the learner wrote none."""
    return list(JsonTail(metrics_path(run, learner)).new_lines())


def newest_metrics(run: Path, learner: int) -> dict[str, Any] | None:
    """Return the last complete line. Only the end of the file is read."""
    lines = read_tail(metrics_path(run, learner), 4096).split(b"\n")[:-1]
    return next((json.loads(line) for line in reversed(lines) if line.endswith(b"}")), None)
