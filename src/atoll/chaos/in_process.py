"""Entry points of the processes of a run under fault, around the functions that `atoll train` starts.

Most faults come from outside: signals, links, mounts. Two kinds cannot: corrupt values in a contribution, and a slow
disk. For these, a process reads its orders before each contribution and each fsync. The orders are a small file that
`atoll chaos` writes. The process logs every order that it carries out.
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
    """Faults that one process injects into itself. `process` is a name such as learner-3 or syncer."""

    run: Path
    process: str

    @property
    def path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.orders.json"

    @property
    def done_path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.done.jsonl"

    # ------------------------------------------------------------------------------------------ called by atoll chaos

    def write(self, **orders: dict[str, Any] | None) -> None:
        """Change some of the orders; None removes an order. The file is replaced atomically."""
        pending = {**self.read(), **orders}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: order for name, order in pending.items() if order is not None})
        write_text(self.path, text, durable=False)

    def count_done(self, fault: int) -> int:
        """Return how often the process has injected this fault."""
        try:
            lines = self.done_path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return 0
        return sum(json.loads(line)["fault"] == fault for line in lines)

    # ------------------------------------------------------------------------------------------ called by the process

    def read(self) -> dict[str, Any]:
        try:
            orders: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return orders
        except FileNotFoundError:
            return {}

    def record_done(self, fault: int, operation: str) -> None:
        line = json.dumps({"at": time.time(), "fault": fault, "what": operation}) + "\n"
        with open(self.done_path, "ab", buffering=0) as file:
            file.write(line.encode())


def run_faulty_learner(
    orders: FaultOrders, namespace: Path | None, settings: JobSettings, learner: int, syncer: str, token: str, run: Path
) -> None:
    """Train one learner, in its own network namespace if it has one."""
    if namespace is not None:
        enter_namespace(namespace)
    slow_down_fsync(orders)
    poison_contributions(orders)
    train_learner(settings, learner, f"http://{syncer}", token, run)  # plain HTTP: no byte leaves this machine


def run_faulty_syncer(
    orders: FaultOrders, host: str, settings: JobSettings, run_id: str, run: Path, port: int, token: str
) -> None:
    slow_down_fsync(orders)
    serve_job(settings, run_id, run, port, token, host)


# --------------------------------------------------------------------------------------------------------------------
# A slow disk


def slow_down_fsync(orders: FaultOrders) -> None:
    """Delay every fsync of this process while there is an order to."""
    fsync = os.fsync

    def slow_fsync(file: Any) -> None:
        order = orders.read().get("slow")
        if order is not None:
            time.sleep(order["wait_s"])
            orders.record_done(order["fault"], "fsync")
        fsync(file)

    os.fsync = slow_fsync  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------------
# Poison


def poison_contributions(orders: FaultOrders) -> None:
    """Corrupt encoded contributions while there is an order to, as failing memory would. The weights stay valid."""
    encode = LearnerFragment.encode

    def poisoned_encode(
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
        original = codec.decode(data, copy.numel())
        data.copy_(codec.encode(poison_values(original, order["kind"], order.get("factor", 1.0))))
        if on_progress is not None:
            on_progress(0, copy.numel())
        orders.record_done(order["fault"], f"fragment {self.id}")
        return data

    LearnerFragment.encode = poisoned_encode  # type: ignore[method-assign]


def poison_values(values: Tensor, kind: str, factor: float) -> Tensor:
    """Return the values with a fault of this kind: "nan", "infinity" or "wild".

    >>> poison_values(torch.ones(4), "nan", 1.0)
    tensor([nan, 1., 1., nan])
    """
    if kind == "wild":
        return values * factor
    values = values.clone()
    values[::3] = torch.nan if kind == "nan" else torch.inf
    return values
