"""Entry points of the processes of a run under fault. They wrap the functions that `atoll train` starts.

Most faults are injected from outside: signals, links, mounts. Two kinds cannot: corrupt values in a contribution, and a
slow disk. For these, a process reads its commands before each contribution and each fsync. The commands are in a small
file that `atoll chaos` writes. The process logs every command that it executes.
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
class FaultCommands:
    """Faults that one process injects into itself. `process` is a name such as learner-3 or syncer."""

    run: Path
    process: str

    @property
    def path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.commands.json"

    @property
    def done_path(self) -> Path:
        return self.run / CHAOS_FOLDER / f"{self.process}.done.jsonl"

    # ------------------------------------------------------------------------------------------ called by atoll chaos

    def write(self, **commands: dict[str, Any] | None) -> None:
        """Change some of the commands; None removes a command. The file is replaced atomically."""
        pending = {**self.read(), **commands}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: command for name, command in pending.items() if command is not None})
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
            commands: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return commands
        except FileNotFoundError:
            return {}

    def record_done(self, fault: int, operation: str) -> None:
        line = json.dumps({"at": time.time(), "fault": fault, "what": operation}) + "\n"
        with open(self.done_path, "ab", buffering=0) as file:
            file.write(line.encode())


def run_faulty_learner(
    commands: FaultCommands,
    namespace: Path | None,
    settings: JobSettings,
    learner: int,
    syncer: str,
    token: str,
    run: Path,
) -> None:
    """Train one learner, in its own network namespace if it has one."""
    if namespace is not None:
        enter_namespace(namespace)
    slow_down_fsync(commands)
    poison_contributions(commands)
    train_learner(settings, learner, f"http://{syncer}", token, run)  # plain HTTP: no byte leaves this machine


def run_faulty_syncer(
    commands: FaultCommands, host: str, settings: JobSettings, run_id: str, run: Path, port: int, token: str
) -> None:
    slow_down_fsync(commands)
    serve_job(settings, run_id, run, port, token, host)


# --------------------------------------------------------------------------------------------------------------------
# A slow disk


def slow_down_fsync(commands: FaultCommands) -> None:
    """Delay every fsync of this process while there is a command for that."""
    fsync = os.fsync

    def slow_fsync(file: Any) -> None:
        command = commands.read().get("slow")
        if command is not None:
            time.sleep(command["wait_s"])
            commands.record_done(command["fault"], "fsync")
        fsync(file)

    os.fsync = slow_fsync  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------------
# Poison


def poison_contributions(commands: FaultCommands) -> None:
    """Corrupt encoded contributions while there is a command for that, as failing memory does. Weights stay valid."""
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
        command = commands.read().get("poison")
        if command is None or commands.count_done(command["fault"]) >= command["count"]:
            return encode(self, round_id, codec, *values, out, on_progress)
        data = encode(self, round_id, codec, *values, out)
        original = codec.decode(data, copy.numel())
        data.copy_(codec.encode(poison_values(original, command["kind"], command.get("factor", 1.0))))
        if on_progress is not None:
            on_progress(0, copy.numel())
        commands.record_done(command["fault"], f"fragment {self.id}")
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
