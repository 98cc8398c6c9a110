"""One worker of elastic data-parallel training, as torchrun starts it: `elastic_worker.py DIR PID`.

Trains the job in DIR from its last checkpoint to its end. It exits when process PID, the benchmark, has exited.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

CHECKPOINT_INTERVAL_S = 5.0
"""Of paced steps between two checkpoints."""

CHECKPOINT = "checkpoint.pt"
GLOO_TIMEOUT_S = 60.0


def steps_path(folder: Path, rank: int) -> Path:
    return folder / f"steps-{rank}.jsonl"


def pid_path(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.pid"


def train(folder: Path, owner: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from atoll.checkpoint.model_file import MODEL_FILE, write_tensors
    from atoll.files import atomic_write
    from atoll.reference.data import assigned_samples
    from atoll.reference.job_settings import JobSettings
    from atoll.reference.loop import InnerLoop
    from atoll.store.run_settings import CONFIG_FILE
    from atoll.tensors.plan import named_tensors

    settings = JobSettings.load(folder / CONFIG_FILE)
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pid_path(folder, rank).write_text(str(os.getpid()))
    # Not torchrun's own store: its entries from an earlier start lead gloo to processes that have exited.
    meeting = f"file://{(folder / f'rendezvous-{restart}').absolute()}"
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", meeting, timedelta(seconds=GLOO_TIMEOUT_S), rank=rank, world_size=size)
    loop = InnerLoop(settings)
    loop.set_pace(rank + 1)
    done = 0
    if (folder / CHECKPOINT).exists():
        stored = torch.load(folder / CHECKPOINT, weights_only=True)
        loop.model.load_state_dict(stored["model"])
        loop.optimizer.load_state_dict(stored["optimizer"])
        done = stored["steps"]
    loop.module = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)
    total = settings.lockstep_steps(loop.config.context)
    every = max(1, round(CHECKPOINT_INTERVAL_S / settings.step_time_s))
    with open(steps_path(folder, rank), "ab", buffering=0) as file:
        for step in range(done + 1, total + 1):
            if not os.path.exists(f"/proc/{owner}"):
                return  # the tool was killed
            began = time.monotonic()
            loop.step(assigned_samples(step - 1, rank + 1, size, settings.batch), step / total)
            line = {"at": time.time(), "step": step, "took_s": time.monotonic() - began}
            file.write(json.dumps({**line, "restart": restart, "pid": os.getpid()}).encode() + b"\n")
            if rank == 0 and step % every == 0:
                model, optimizer = loop.model.state_dict(), loop.optimizer.state_dict()
                with atomic_write(folder / CHECKPOINT, durable=False) as checkpoint:
                    torch.save({"model": model, "optimizer": optimizer, "steps": step}, checkpoint)
    if rank == 0:
        write_tensors(named_tensors(loop.model), folder / MODEL_FILE)
    dist.barrier()  # an exiting process closes its sockets, which others may still read from
    os._exit(0)  # without the destructors: see `baselines`


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("owner", metavar="PID", type=int)
    options = parser.parse_args()
    train(options.folder, options.owner)
