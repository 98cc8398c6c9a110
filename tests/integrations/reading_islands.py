"""Learner processes that record the samples they read, for tests of resumed data."""

from __future__ import annotations

import itertools
import json
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from atoll.integrations.data import epochs, leased_batches, loader_position, restore_position
from atoll.learner.api import Learner
from atoll.store.learner_parts import list_parts
from tests.learner.runs import LIMIT_S, Child, Run, _begin

ROWS, BATCH, SEED = 60, 4, 5


class Rows(Dataset[Tensor]):
    """Dataset whose row n is the number n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class CountingRows(IterableDataset[Tensor]):
    """Endless dataset of 0, 1, 2 and so on, so that every position is different."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(float(n)) for n in itertools.count())


class RecordingLearner:
    """Learner that records the numbers it takes. `planted`: a bug that ignores the leases and reads rows in order."""

    def __init__(self, learner: Learner, planted: bool) -> None:
        self.learner = learner
        self.planted = planted
        self.numbers: tuple[int, ...] = ()
        self.read = 0
        self.is_repeated = False  # no lease was left, so some of these numbers were taken before

    def take(self, count: int) -> tuple[int, ...]:
        before = self.learner.stats().repeated_steps
        numbers = self.learner.take(count)
        self.is_repeated = self.learner.stats().repeated_steps > before
        if self.planted and numbers:
            numbers = tuple(range(self.read, self.read + count))
        self.read += len(numbers)
        self.numbers = numbers
        return numbers


def loader_of(kind: str) -> Any:
    """Return a loader of this kind.

    - stateful: a loader of torchdata over a map-style dataset
    - datasets: a loader of torchdata over an iterable dataset of `datasets`
    - bare: the iterable dataset of `datasets` without a loader
    - plain: a loader of torch, which cannot save its position
    """
    torch.manual_seed(SEED)
    if kind == "plain":
        return DataLoader(CountingRows(), batch_size=BATCH)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

        return StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True)
    import datasets  # type: ignore[import-untyped]

    rows = datasets.Dataset.from_dict({"n": [float(n) for n in range(ROWS)]}).to_iterable_dataset(num_shards=3)
    rows = rows.with_format("torch")
    if kind == "bare":
        return rows.batch(BATCH)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows, batch_size=BATCH)


def reading_child(directory: Path, address: str, number: int, kind: str, log: Path, pipe: Connection) -> None:
    """Train until the run ends or the process is killed. Send the number of steps of the restored part at the start."""
    warnings.simplefilter("ignore")
    _begin(log)
    torch.manual_seed(number)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    has_leases = kind in ("leases", "planted")
    loader = None if has_leases else loader_of(kind)
    steps = 0

    def extra_state() -> dict[str, Any]:
        return {
            "steps": steps,
            "position": loader_position(loader) if kind not in ("plain", "leases", "planted") else None,
        }

    try:
        settings: dict[str, Any] = {"learner": number, "run_directory": directory, "join_timeout_s": LIMIT_S}
        with Learner(model, optimizer, address, extra_state=extra_state, **settings) as learner:
            restored = learner.restored_state
            if restored is not None and restored["position"] is not None:
                restore_position(loader, restored["position"])
            pipe.send(("joined", restored["steps"] if restored is not None else None))
            recording = RecordingLearner(learner, kind == "planted")
            batches = iter(leased_batches(Rows(), recording, BATCH, SEED)) if has_leases else epochs(loader)
            with open(read_file(directory, number, learner.incarnation), "w", buffering=1) as file:
                for batch in batches:
                    rows = (batch["n"] if isinstance(batch, dict) else batch).float()
                    file.write(
                        json.dumps([recording.numbers, [int(row) for row in rows], recording.is_repeated]) + "\n"
                    )
                    loss = model(rows[:, None] / ROWS).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    steps += 1
                    learner.step(tokens=len(rows), loss=loss)
                    pipe.poll(0.002)  # the duration of a step
                    if learner.finished:
                        break
        pipe.send(("ended", learner.stats().repeated_steps))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", type(error).__name__, str(error)))


def start(run: Run, number: int, kind: str) -> Child:
    log = run.directory / "logs" / f"reads-{number}-{len(run.children)}.log"
    child = Child(f"island {number}", log, reading_child, (run.directory, run.address, number, kind))
    run.children.append(child)
    return child


class PartRequest:
    """Condition: learner 1 has a part of a snapshot.

    It requests a snapshot, and another one after some time, because snapshots can be abandoned on a busy machine.
    """

    CALLS_BETWEEN_REQUESTS, MAX_CALLS = 1000, 100_000

    def __init__(self, run: Run) -> None:
        self.run = run
        self.calls = 0

    def __call__(self, *_: object) -> bool:
        if list_parts(self.run.directory).get(1):
            return True
        if self.calls % self.CALLS_BETWEEN_REQUESTS == 0:
            assert self.run.request("POST", "/v1/snapshot")[0] == 202
        self.calls += 1
        assert self.calls < self.MAX_CALLS, self.run.logs()
        return False


def read_file(directory: Path, number: int, incarnation: int) -> Path:
    return directory / f"read-{number}-{incarnation}.jsonl"


class Step(NamedTuple):
    numbers: list[int]
    rows: list[int]
    is_repeated: bool


def lines_of(path: Path) -> list[Step]:
    """Return the recorded steps. Ignore an incomplete last line, which a killed process can leave."""
    complete = path.read_text().rpartition("\n")[0].splitlines()
    return [Step(*json.loads(line)) for line in complete]


def numbers_read(directory: Path) -> dict[tuple[int, int], Counter[int]]:
    """Return by learner and incarnation how often each number was read. A repeated number counts once."""
    found = {}
    for path in sorted(directory.glob("read-*-*.jsonl")):
        _, number, incarnation = path.stem.split("-")
        steps = lines_of(path)
        once = Counter(n for step in steps if not step.is_repeated for n in step.numbers)
        repeated = {n for step in steps if step.is_repeated for n in step.numbers}
        found[int(number), int(incarnation)] = once + Counter(repeated - once.keys())
    return found


__all__ = ["BATCH", "PartRequest", "ROWS", "Rows", "SEED", "lines_of", "loader_of", "numbers_read", "start"]
