"""Script for torchrun: one rank of an island, which takes all settings from its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import atoll
from tests.learner.small_models import BATCH, work


def main(report: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = work("plain", 1)
    model = DistributedDataParallel(job.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with atoll.Learner(model, optimizer) as learner:
        (report / f"{rank}.pid").write_text(str(os.getpid()))
        while not learner.finished:
            optimizer.zero_grad()
            loss = model(torch.randn(BATCH, 8)).square().mean()
            loss.backward()
            optimizer.step()
            learner.step(tokens=BATCH, loss=loss)
    (report / f"{rank}.left").write_text(f"{learner.finished} {learner.drained}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
