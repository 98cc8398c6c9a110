"""What runs inside the processes of a run under fault, around the very functions that `atoll train` starts.

Most faults come from outside: signals, links, mounts. Two cannot: values that go wrong on their way out of a learner,
and a disk that is slow. For these a process looks at its orders, a small file that the tool writes, whenever it is
about to send a contribution or to wait for its disk, and it notes down what it did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.chaos.netns import enter_namespace
from atoll.core.types import RoundId
from atoll.files import write_text
from atoll.reference.job_settings import JobSettings
from atoll.reference.learner_main import train_learner
from atoll.reference.supervisor import serve_job
from atoll.tensors.codecs import Codec
from atoll.tensors.learner_fragment import LearnerFragment

CHAOS_FOLDER = "chaos"


@dataclass(frozen=True, slots=True)
class FaultOrders:
    """What one process is told to do wrong. `run` is the run's directory, `who` such as learner-3 or syncer."""

    run: Path
    process: str

    @property
    def path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.orders.json"

    @property
    def done_path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.done.jsonl"

    # ------------------------------------------------------------------------------------------ by the tool

    def write(self, **orders: dict[str, Any] | None) -> None:
        """Change some of the orders. A reader finds the old file or the new one."""
        pending = {**self.read(), **orders}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: order for name, order in pending.items() if order is not None})
        write_text(self.path, text, durable=False)

    def count_done(self, fault: int) -> int:
        """How often a process has carried out this fault."""
        try:
            lines = self.done_path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return 0
        return sum(json.loads(line)["fault"] == fault for line in lines)

    # ------------------------------------------------------------------------------------------ in the process

    def read(self) -> dict[str, Any]:
        try:
            orders: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return orders
        except FileNotFoundError:
            return {}

    def record_done(self, fault: int, what: str) -> None:
        line = json.dumps({"at": time.time(), "fault": fault, "what": what}) + "\n"
        with open(self.done_path, "ab", buffering=0) as file:
            file.write(line.encode())


def run_faulty_learner(
    orders: FaultOrders, namespace: Path | None, settings: JobSettings, learner: int, syncer: str, token: str, run: Path
) -> None:
    """A learner, in its own network where it has one."""
    if namespace is not None:
        enter_namespace(namespace)
    slow_down_fsync(orders)
    poison_contributions(orders)
    train_learner(settings, learner, f"http://{syncer}", token, run)  # nothing of it leaves this machine


def run_faulty_syncer(
    orders: FaultOrders, host: str, settings: JobSettings, run_id: str, run: Path, port: int, token: str
) -> None:
    slow_down_fsync(orders)
    serve_job(settings, run_id, run, port, token, host)


# --------------------------------------------------------------------------------------------------------------------
# A slow disk


def slow_down_fsync(orders: FaultOrders) -> None:
    """Every fsync takes longer while the orders say so."""
    fsync = os.fsync

    def slowly(file: Any) -> None:
        order = orders.read().get("slow")
        if order is not None:
            time.sleep(order["wait_s"])
            orders.record_done(order["fault"], "fsync")
        fsync(file)

    os.fsync = slowly  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------------
# Poison


def poison_contributions(orders: FaultOrders) -> None:
    """What is sent is wrong; the learner's own weights are not, as with memory that fails on the way out."""
    encode = LearnerFragment.encode

    def poisoned(
        self: LearnerFragment,
        round_id: RoundId,
        codec: Codec,
        anchor: Tensor,
        copy: Tensor,
        scratch: Tensor,
        out: Tensor | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        values = anchor, copy, scratch
        order = orders.read().get("poison")
        if order is None or orders.count_done(order["fault"]) >= order["count"]:
            return encode(self, round_id, codec, *values, out, on_progress)
        data = encode(self, round_id, codec, *values, out)
        honest = codec.decode(data, copy.numel())
        data.copy_(codec.encode(poison_values(honest, order["kind"], order.get("factor", 1.0))))
        if on_progress is not None:
            on_progress(0, copy.numel())
        orders.record_done(order["fault"], f"fragment {self.id}")
        return data

    LearnerFragment.encode = poisoned  # type: ignore[method-assign]


def poison_values(values: Tensor, kind: str, factor: float) -> Tensor:
    """
    >>> poison_values(torch.ones(4), "nan", 1.0)
    tensor([nan, 1., 1., nan])
    """
    if kind == "wild":
        return values * factor
    values = values.clone()
    values[::3] = torch.nan if kind == "nan" else torch.inf
    return values
