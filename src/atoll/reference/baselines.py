"""Baseline training methods, which use the same loop, data, model and report as decoupled training.

| method | learners exchange | learners wait for each other |
|---|---|---|
| `single` | nothing: there is one learner | never |
| `ddp` | gradients, at every step (torch DistributedDataParallel) | at every step |
| `diloco` | the delta of the whole model, every H steps, then the same outer step | every H steps |
| `streaming` | the delta of one fragment at a time, each every H steps, adopted tau steps later | if tau is too short |

All learners take the same number of steps, and all methods train on the same tokens. They communicate through gloo on
this machine. A baseline has no fault tolerance: if one process exits, the run fails.
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
"""Timeout of a collective operation. A process that waits longer exits, and the run fails."""


class Exchange:
    """Communication of a method between learners. This base class is that of `single`, which has none."""

    def __init__(self) -> None:
        self.fragments = 1  # exchanged separately
        self.rounds = 0  # completed exchanges
        self.sent_bytes = 0  # by this process
        self.waited_s = 0.0  # waiting for other processes

    def after_step(self, steps: int, step: InnerStep) -> None:
        """Exchange what is due after `steps` inner steps. `step` is the last of them."""

    def finish(self) -> None:
        """Merge the remaining work into the model when the token budget is used up."""


def ring_bytes(numel: int, processes: int) -> int:
    """Return the bytes that each process sends in a ring all-reduce of `numel` f32 values: 2 (N - 1) / N of them."""
    return 2 * (processes - 1) * 4 * numel // processes


class GradientExchange(Exchange):
    """Exchange of `ddp`.

    The waiting time of a step is estimated as the time of forward and backward minus their time without communication.
    """

    def __init__(self, loop: InnerLoop, processes: int) -> None:
        super().__init__()
        self._step_bytes = ring_bytes(parameter_count(loop.model), processes)
        wrapped = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)
        loop.module = wrapped
        with wrapped.no_sync():
            self._local_gradient_s = min(_time_gradient(loop) for _ in range(3))

    def after_step(self, steps: int, step: InnerStep) -> None:
        self.rounds += 1
        self.sent_bytes += self._step_bytes
        self.waited_s += max(0.0, step.gradient_s - self._local_gradient_s)


def _time_gradient(loop: InnerLoop) -> float:
    started_at = time.monotonic()
    loop.gradient(range(loop.settings.batch))
    return time.monotonic() - started_at


class _OpenRound(NamedTuple):
    """Round whose all-reduce is in progress."""

    due_step: int  # number of steps after which the result is adopted
    copy: Tensor
    total: Tensor  # sum of all deltas, complete when `work` is done
    work: Any


class DeltaExchange(Exchange):
    """Exchange of `diloco` and `streaming`. All learners have the same anchors and apply the same outer steps to them.

    `diloco` has one fragment and adopts it at once. A round of fragment p starts at each step for which
    step mod H = (p + 1) H / P.
    """

    def __init__(self, loop: InnerLoop, processes: int) -> None:
        super().__init__()
        settings = loop.settings
        streaming = settings.method == "streaming"
        self._processes = processes
        self._every_steps = settings.every_steps
        self._overlap_steps = settings.overlap_steps if streaming else 0
        self._adopt_mode = settings.adopt if streaming else "overwrite"
        self._alpha = settings.blend_alpha
        plan = make_plan(describe_tensors(loop.model), settings.fragments if streaming else 1, settings.numerics.plan)
        self.fragments = len(plan.fragments)
        self._view = ModelView(loop.model, plan)
        self._outer = []
        for p in range(len(plan.fragments)):
            anchor = self._view.buffer(p)
            self._view.read(p, anchor)
            self._outer.append(OuterOptimizer(plan, p, settings.numerics, anchor))
        self._offsets = [(p + 1) * self._every_steps // len(self._outer) for p in range(len(self._outer))]
        self._open: dict[int, _OpenRound] = {}
        self._steps = 0
        self._opened_at = [0] * len(self._outer)  # step at which the newest round of each fragment started

    def after_step(self, steps: int, step: InnerStep) -> None:
        self._steps = steps
        self._adopt_due()
        for p, offset in enumerate(self._offsets):
            if steps >= offset and (steps - offset) % self._every_steps == 0:
                self._start_round(p)
        self._adopt_due()  # without overlap, a round is due immediately

    def _start_round(self, p: int) -> None:
        copy = self._view.buffer(p)
        self._view.read(p, copy)
        total = self._outer[p].value - copy
        work = dist.all_reduce(total, async_op=True) if self._processes > 1 else None
        self._open[p] = _OpenRound(self._steps + self._overlap_steps, copy, total, work)
        self._opened_at[p] = self._steps
        self.sent_bytes += ring_bytes(total.numel(), self._processes)

    def _adopt_due(self) -> None:
        for p, round_ in [(p, each) for p, each in self._open.items() if each.due_step <= self._steps]:
            del self._open[p]
            self._adopt(p, round_, self._adopt_mode)

    def _adopt(self, p: int, round_: _OpenRound, mode: str) -> None:
        started_at = time.monotonic()
        if round_.work is not None:
            round_.work.wait()
        self.waited_s += time.monotonic() - started_at
        outer = self._outer[p]
        outer.step(round_.total.div_(self._processes))
        self._view.adopt(p, mode, outer.value, round_.copy, self._alpha)
        self.rounds += 1

    def finish(self) -> None:
        """Adopt the open rounds, then merge the steps that follow them in a last round without overlap."""
        for p in list(self._open):
            self._adopt(p, self._open.pop(p), self._adopt_mode)
        for p in range(len(self._outer)):
            if self._opened_at[p] < self._steps:
                self._start_round(p)
        for p in list(self._open):
            self._adopt(p, self._open.pop(p), "overwrite")
        for p, outer in enumerate(self._outer):
            self._view.write(p, outer.value)


def _init_process_group(run: Path, rank: int, processes: int) -> None:
    """Join the gloo process group, with a file in the run's directory as the rendezvous.

    The group is never destroyed. Its destructor holds the interpreter lock while it joins the gloo threads, and one of
    them may wait for that lock: a deadlock. The group ends with its process.
    """
    if processes == 1:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may resolve to an unreachable address
    dist.init_process_group(
        "gloo",
        init_method=f"file://{(run / RENDEZVOUS_FILE).absolute()}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )


def train_baseline(settings: JobSettings, learner: int, run: Path) -> None:
    """Run one process of a baseline.

    Each process ends its metrics file with a summary. Learner 1 also writes the final model.
    """
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
        started_at = time.time()
        useful_s = 0.0
        for steps in range(1, total + 1):
            step = loop.step(assigned_samples(steps - 1, learner, processes, settings.batch), steps / total)
            exchange.after_step(steps, step)
            metrics.record_step(step)
            useful_s += step.step_s
        exchange.finish()
        metrics.flush()
        if settings.method == "ddp":
            useful_s -= exchange.waited_s  # ddp waits inside its steps
        metrics.write(
            {
                "end": {
                    "began_at": started_at,
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
        dist.barrier()  # a process that exits closes its sockets, and others may still read from them
