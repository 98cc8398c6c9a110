"""The other ways to train on several islands, through the same loop, data, model and report.

| method | islands exchange | and wait for each other |
|---|---|---|
| `single` | nothing: there is one | never |
| `ddp` | gradients, at every step (torch DistributedDataParallel) | at every step |
| `diloco` | the whole model's delta, every H steps, then a common outer step | every H steps |
| `streaming` | one fragment's delta at a time, each every H steps, adopted tau steps later | where tau is too short |

All take the same number of steps on the same tokens, by gloo on this machine. A process that dies ends the run: there
is no other answer, and that is what they are compared for.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from atoll.checkpoint.model_file import MODEL_FILE, write_tensors
from atoll.reference.data import assigned_samples
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerLoop, InnerStep, LearnerMetricsWriter
from atoll.reference.models import parameter_count
from atoll.tensors.model_view import ModelView
from atoll.tensors.outer_optimizer import OuterOptimizer
from atoll.tensors.plan import describe_tensors, make_plan, named_tensors

RENDEZVOUS_FILE = "rendezvous"
GLOO_TIMEOUT_S = 300.0
"""A process that waits longer for the others ends, and with it the run."""


class Exchange:
    """What a method does beside the inner steps. `single` does nothing: one island has no other to exchange with."""

    def __init__(self) -> None:
        self.fragments = 1  # that are exchanged one by one
        self.rounds = 0  # exchanges so far
        self.sent_bytes = 0  # by this process
        self.waited_s = 0.0  # for others

    def after_step(self, steps: int, step: InnerStep) -> None:
        """`steps` inner steps are done; the last of them was `step`."""

    def finish(self) -> None:
        """The budget is used up: the model becomes what the method has trained."""


def ring_bytes(numel: int, processes: int) -> int:
    """What each process sends to sum so many f32 numbers over all: 2 (N - 1) / N of them."""
    return 2 * (processes - 1) * 4 * numel // processes


class GradientExchange(Exchange):
    """`ddp`. How long a step waits for others shows in backward, which takes longer than it takes alone."""

    def __init__(self, loop: InnerLoop, processes: int) -> None:
        super().__init__()
        self._step_bytes = ring_bytes(parameter_count(loop.model), processes)
        wrapped = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)
        loop.module = wrapped
        with wrapped.no_sync():
            self._alone_s = min(_time_gradient(loop) for _ in range(3))

    def after_step(self, steps: int, step: InnerStep) -> None:
        self.rounds += 1
        self.sent_bytes += self._step_bytes
        self.waited_s += max(0.0, step.gradient_s - self._alone_s)


def _time_gradient(loop: InnerLoop) -> float:
    began = time.monotonic()
    loop.gradient(range(loop.settings.batch))
    return time.monotonic() - began


class _OpenRound(NamedTuple):
    """A round that is under way: the copy that was taken, and the sum of all deltas when `work` is done."""

    due: int  # adopted after so many steps
    copy: Tensor
    total: Tensor
    work: Any


class DeltaExchange(Exchange):
    """`diloco` and `streaming`. Every island holds the same anchors and makes the same outer steps on them.

    `diloco` is one fragment, adopted at once. Fragment p starts its rounds at the steps that leave (p + 1) H / P when
    they are divided by H.
    """

    def __init__(self, loop: InnerLoop, processes: int) -> None:
        super().__init__()
        settings = loop.settings
        streaming = settings.method == "streaming"
        self._processes = processes
        self._every = settings.every_steps
        self._tau = settings.overlap_steps if streaming else 0
        self._how = settings.adopt if streaming else "overwrite"
        self._alpha = settings.blend_alpha
        plan = make_plan(describe_tensors(loop.model), settings.fragments if streaming else 1, settings.numerics.plan)
        self.fragments = len(plan.fragments)
        self._view = ModelView(loop.model, plan)
        self._outer = []
        for p in range(len(plan.fragments)):
            anchor = self._view.buffer(p)
            self._view.read(p, anchor)
            self._outer.append(OuterOptimizer(plan, p, settings.numerics, anchor))
        self._offsets = [(p + 1) * self._every // len(self._outer) for p in range(len(self._outer))]
        self._open: dict[int, _OpenRound] = {}
        self._steps = 0
        self._opened_at = [0] * len(self._outer)  # steps, when the newest round of the fragment began

    def after_step(self, steps: int, step: InnerStep) -> None:
        self._steps = steps
        self._adopt_due()
        for p, offset in enumerate(self._offsets):
            if steps >= offset and (steps - offset) % self._every == 0:
                self._begin(p)
        self._adopt_due()  # without overlap at once

    def _begin(self, p: int) -> None:
        copy = self._view.buffer(p)
        self._view.read(p, copy)
        total = self._outer[p].value - copy
        work = dist.all_reduce(total, async_op=True) if self._processes > 1 else None
        self._open[p] = _OpenRound(self._steps + self._tau, copy, total, work)
        self._opened_at[p] = self._steps
        self.sent_bytes += ring_bytes(total.numel(), self._processes)

    def _adopt_due(self) -> None:
        for p, round_ in [(p, each) for p, each in self._open.items() if each.due <= self._steps]:
            del self._open[p]
            self._adopt(p, round_, self._how)

    def _adopt(self, p: int, round_: _OpenRound, how: str) -> None:
        began = time.monotonic()
        if round_.work is not None:
            round_.work.wait()
        self.waited_s += time.monotonic() - began
        outer = self._outer[p]
        outer.step(round_.total.div_(self._processes))
        self._view.adopt(p, how, outer.value, round_.copy, self._alpha)
        self.rounds += 1

    def finish(self) -> None:
        """What is under way is adopted, then what was trained since is merged once more, without overlap."""
        for p in list(self._open):
            self._adopt(p, self._open.pop(p), self._how)
        for p in range(len(self._outer)):
            if self._opened_at[p] < self._steps:
                self._begin(p)
        for p in list(self._open):
            self._adopt(p, self._open.pop(p), "overwrite")
        for p, outer in enumerate(self._outer):
            self._view.write(p, outer.value)


def _init_process_group(run: Path, rank: int, processes: int) -> None:
    """Processes find each other through a file in the run's directory.

    The group is never destroyed, it goes with its process: its destructor waits for threads of gloo while it holds the
    interpreter's lock, and one of them may be waiting for that.
    """
    if processes == 1:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
    dist.init_process_group(
        "gloo",
        init_method=f"file://{(run / RENDEZVOUS_FILE).absolute()}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )


def train_baseline(settings: JobSettings, learner: int, run: Path) -> None:
    """What one process of a baseline does. The first one writes the model; each ends its metrics with a summary."""
    loop = InnerLoop(settings)
    loop.set_pace(learner)
    processes = settings.learners
    total = settings.lockstep_steps(loop.config.context)
    _init_process_group(run, learner - 1, processes)
    with LearnerMetricsWriter(run, learner, start=1) as metrics:
        exchange: Exchange
        if settings.method == "ddp":
            exchange = GradientExchange(loop, processes)
        elif settings.method == "single":
            exchange = Exchange()
        else:
            exchange = DeltaExchange(loop, processes)
        began = time.time()
        useful_s = 0.0
        for steps in range(1, total + 1):
            step = loop.step(assigned_samples(steps - 1, learner, processes, settings.batch), steps / total)
            exchange.after_step(steps, step)
            metrics.record_step(step)
            useful_s += step.step_s
        exchange.finish()
        metrics.flush()
        if settings.method == "ddp":
            useful_s -= exchange.waited_s  # it waits inside its steps
        metrics.write(
            {
                "end": {
                    "began_at": began,
                    "ended_at": time.time(),
                    "useful_s": useful_s,
                    "waited_s": exchange.waited_s,
                    "steps": total,
                    "tokens": total * loop.tokens_per_step,
                    "fragments": exchange.fragments,
                    "rounds": exchange.rounds,
                    "sent_bytes": exchange.sent_bytes,
                }
            }
        )
        if learner == 1:
            write_tensors(named_tensors(loop.model), run / MODEL_FILE)
    if processes > 1:
        dist.barrier()  # whoever goes takes its sockets along, which others may still read from
