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

from atoll.chaos.netns import enter
from atoll.core.types import RoundId
from atoll.files import write_text
from atoll.reference.island import train_island
from atoll.reference.job_settings import JobSettings
from atoll.reference.supervisor import serve_job
from atoll.tensors.codecs import Codec
from atoll.tensors.learner_fragment import LearnerFragment

FOLDER = "chaos"


@dataclass(frozen=True, slots=True)
class Orders:
    """What one process is told to do wrong. `run` is the run's directory, `who` such as learner-3 or syncer."""

    run: Path
    who: str

    @property
    def path(self) -> Path:
        return self.run / FOLDER / f"{self.who}.orders.json"

    @property
    def notes(self) -> Path:
        return self.run / FOLDER / f"{self.who}.done.jsonl"

    # ------------------------------------------------------------------------------------------ by the tool

    def give(self, **orders: dict[str, Any] | None) -> None:
        """Change some of the orders. A reader finds the old file or the new one."""
        told = {**self.read(), **orders}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: order for name, order in told.items() if order is not None})
        write_text(self.path, text, durable=False)

    def done(self, fault: int) -> int:
        """How often a process has carried out this fault."""
        try:
            lines = self.notes.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return 0
        return sum(json.loads(line)["fault"] == fault for line in lines)

    # ------------------------------------------------------------------------------------------ in the process

    def read(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return told
        except FileNotFoundError:
            return {}

    def note(self, fault: int, what: str) -> None:
        line = json.dumps({"at": time.time(), "fault": fault, "what": what}) + "\n"
        with open(self.notes, "ab", buffering=0) as file:
            file.write(line.encode())


def learn_under_faults(
    orders: Orders, namespace: Path | None, settings: JobSettings, learner: int, syncer: str, token: str, run: Path
) -> None:
    """A learner, in its own network where it has one."""
    if namespace is not None:
        enter(namespace)
    make_disk_slow(orders)
    poison_contributions(orders)
    train_island(settings, learner, f"http://{syncer}", token, run)  # nothing of it leaves this machine


def serve_under_faults(
    orders: Orders, host: str, settings: JobSettings, run_id: str, run: Path, port: int, token: str
) -> None:
    make_disk_slow(orders)
    serve_job(settings, run_id, run, port, token, host)


# --------------------------------------------------------------------------------------------------------------------
# A slow disk


def make_disk_slow(orders: Orders) -> None:
    """Every fsync takes longer while the orders say so."""
    fsync = os.fsync

    def slowly(file: Any) -> None:
        order = orders.read().get("slow")
        if order is not None:
            time.sleep(order["wait_s"])
            orders.note(order["fault"], "fsync")
        fsync(file)

    os.fsync = slowly  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------------
# Poison


def poison_contributions(orders: Orders) -> None:
    """What is sent is wrong; the learner's own weights are not, as with memory that fails on the way out."""
    encode = LearnerFragment.encode

    def poisoned(
        self: LearnerFragment,
        round_id: RoundId,
        by: Codec,
        anchor: Tensor,
        copy: Tensor,
        scratch: Tensor,
        out: Tensor | None = None,
        told: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        values = anchor, copy, scratch
        order = orders.read().get("poison")
        if order is None or orders.done(order["fault"]) >= order["count"]:
            return encode(self, round_id, by, *values, out, told)
        data = encode(self, round_id, by, *values, out)
        honest = by.decode(data, copy.numel())
        data.copy_(by.encode(spoiled(honest, order["how"], order.get("factor", 1.0))))
        if told is not None:
            told(0, copy.numel())
        orders.note(order["fault"], f"fragment {self.id}")
        return data

    LearnerFragment.encode = poisoned  # type: ignore[method-assign]


def spoiled(values: Tensor, how: str, factor: float) -> Tensor:
    """
    >>> spoiled(torch.ones(4), "nan", 1.0)
    tensor([nan, 1., 1., nan])
    """
    if how == "wild":
        return values * factor
    values = values.clone()
    values[::3] = torch.nan if how == "nan" else torch.inf
    return values
