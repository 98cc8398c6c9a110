"""Islands of several ranks as real processes on gloo: DDP, FSDP2 and tensor parallelism.

Rank 0 of an island receives the commands of the test, and all its ranks execute them at the same step. The ranks
rendezvous by a file.
"""

from __future__ import annotations

import resource
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from atoll.island import leader
from atoll.learner.api import Learner
from tests.learner import fault_injection
from tests.learner.runs import LIMIT_S, Child, Run, _begin, model_file
from tests.learner.small_models import BATCH, WORDS, Mixed, values, work

COMMANDS = ("nothing", "go", "hold", "break", "raise", "still", "small files", "show")
SMALL_FILE_BYTES = 100_000


@dataclass(frozen=True)
class IslandSpec:
    """Settings of an island.

    `number` is also the seed. `shape` is ddp, replicas, fsdp or tp, or, for two times two ranks, fsdp+tp or hsdp.
    """

    number: int
    shape: str = "fsdp"
    ranks: int = 2
    model: str = "plain"
    dtype: str = "float32"
    leases: int = 0  # samples per step and rank
    pace_s: float = 0.002
    notice_s: float | None = None
    misstep: str = ""  # invalid call of rank 1: "takes", "leaves"
    planted: str = ""  # injected bugs and faults of `planted_ranks`
    planted_ranks: tuple[int, ...] = (0,)
    token: str | None = None
    ranks_without_token: tuple[int, ...] = ()
    keys: Path | None = None
    has_run_directory: bool = True
    min_row_transfer_values: int = 1  # of a mean fragment; low, because these models are small


class IslandWork:
    """Model of the requested kind with its training steps, as in a user script."""

    def __init__(self, spec: IslandSpec, rank: int) -> None:
        job = work(spec.model, spec.number, spec.dtype)
        self.spec, self.rank, self.plain = spec, rank, job.model
        self.model: nn.Module = job.model
        self.is_mixed = isinstance(job.model, Mixed)
        if spec.shape == "ddp":
            self.model = DistributedDataParallel(job.model)
        elif spec.shape in ("fsdp", "hsdp"):
            sizes = (spec.ranks,) if spec.shape == "fsdp" else (2, spec.ranks // 2)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "rows")[-len(sizes) :])
            for child in job.model.children():
                if not isinstance(child, nn.BatchNorm1d) and not self.is_mixed:
                    fully_shard(child, mesh=mesh)
            fully_shard(job.model, mesh=mesh)
        elif spec.shape in ("tp", "fsdp+tp"):
            sizes = (spec.ranks // 2, 2) if spec.shape == "fsdp+tp" else (1, spec.ranks)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model"))
            parallelize_module(job.model, mesh["model"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
            if spec.shape == "fsdp+tp":
                fully_shard(job.model, mesh=mesh["data"])
        trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.data = {"tp": 0, "fsdp+tp": rank // 2}.get(spec.shape, rank)

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.spec.number * 64 + self.data) * 1_000_003 + number)
        if self.is_mixed:
            x = torch.randint(WORDS, (BATCH,), generator=generator)
            loss = functional.cross_entropy(self.model(x).float(), (x + 1) % WORDS)
        else:
            x = torch.randn(BATCH, 8, generator=generator).to(next(self.plain.parameters()).dtype)
            loss = (self.model(x) - x[:, :4].sin()).float().square().mean()
        return loss

    def step(self, number: int) -> Tensor:
        loss = self.loss(number)
        self.optimizer.zero_grad()
        loss.backward()
        if self.spec.shape == "replicas":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.spec.ranks
        self.optimizer.step()
        return loss.detach()

    def full_model(self) -> dict[str, Tensor]:
        """Return the unsharded model. This is a collective call."""
        found = {}
        for name, tensor in values(self.plain).items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = full.detach().clone().contiguous()
        return found

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the unsharded optimizer state by parameter and key. This is a collective call."""
        names = {id(parameter): name for name, parameter in self.plain.named_parameters()}
        found = {}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{names[id(parameter)]} {key}"] = full.detach().clone().contiguous()
        return found


def rank_child(directory: Path, address: str, spec: IslandSpec, rank: int, log: Path, pipe: Connection) -> None:
    _begin(log)
    leader.MIN_ROW_TRANSFER_VALUES = spec.min_row_transfer_values
    if rank in spec.planted_ranks:
        fault_injection.inject(spec.planted, directory)
    try:
        rendezvous = f"file://{log.parent / log.name.rpartition('-rank')[0]}.rendezvous"
        dist.init_process_group("gloo", rendezvous, timedelta(seconds=LIMIT_S), rank=rank, world_size=spec.ranks)
        job = IslandWork(spec, rank)
        random_numbers: list[float] = []
        with Learner(
            job.model,
            job.optimizer,
            address,
            spec.token if rank not in spec.ranks_without_token else None,
            keys=spec.keys,
            learner=spec.number,
            run_directory=directory if spec.has_run_directory else None,
            join_timeout_s=LIMIT_S,
            notice_s=spec.notice_s,
            extra_state=lambda: {"drawn": random_numbers[-1:]},
        ) as learner:
            steps = [float(state["step"]) for state in job.optimizer.state.values()]
            report = {"learner": learner.id, "incarnation": learner.incarnation, "moments": max(steps, default=0.0)}
            report |= {"finished": learner.finished, "lr_scale": learner.lr_scale, "restored": learner.restored_state}
            save_file(job.optimizer_state(), optimizer_state_file(directory, spec.number, rank))
            pipe.send(("joined", report | {"next_drawn": _next_drawn()}))
            _train(learner, job, pipe, random_numbers, directory)
        own = {name: tensor.clone() for name, tensor in job.full_model().items()}
        save_file(own, model_file(directory, learner.id) if rank == 0 else rank_file(directory, learner.id, rank))
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll")]
        pipe.send(("ended", _status(learner) | {"threads": threads}))
        dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll")]
        pipe.send(("failed", type(error).__name__, str(error), threads))


def _status(learner: Learner) -> dict[str, Any]:
    status = {"finished": learner.finished, "drained": learner.drained, "progress": learner.progress}
    return status | {"stats": learner.stats()._asdict(), "paused_s": learner.paused_s}


def _next_drawn() -> float:
    same = torch.Generator()
    same.set_state(torch.get_rng_state())
    return float(torch.rand(1, generator=same))


def _train(learner: Learner, job: IslandWork, pipe: Connection, random_numbers: list[float], directory: Path) -> None:
    number, is_training, is_still = 0, False, False
    taken: list[int] = []
    deadline = time.monotonic() + LIMIT_S
    while not learner.finished:
        command = _broadcast_command(job, pipe)
        if command == "break":
            break
        if command == "hold":
            pipe.send(("held", _status(learner) | {"steps": number, "taken": taken}))
        if command == "still":  # the optimizer state stays the same at the next boundaries
            save_file(job.optimizer_state(), optimizer_state_file(directory, job.spec.number, job.rank))
            pipe.send(("still", number))
        is_still = command == "still" or (is_still and command not in ("go", "hold"))
        if command == "small files" and job.rank == job.spec.ranks - 1:  # as on a full disk
            hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard_limit))
        if command == "show":
            pipe.send(("shown", _show(learner, job, directory)))
        is_training = command in ("go", "raise", "still") or (is_training and command not in ("hold", "show"))
        if not is_training:
            assert time.monotonic() < deadline, "no command from the test"
            continue
        deadline = time.monotonic() + LIMIT_S
        if job.spec.leases:
            taken += learner.take(job.spec.leases)
        loss = job.step(number) if not is_still else torch.zeros(())
        random_numbers.append(float(torch.rand(1)))
        if command == "raise" and job.rank == job.spec.ranks - 1:
            raise ArithmeticError("an error in the user's loop")
        if job.spec.misstep == "takes" and job.rank == 1 and number == 3:
            learner.take(4)
        if job.spec.misstep == "leaves" and job.rank == 1 and number == 3:
            break
        learner.step(tokens=BATCH, loss=loss)
        number += 1


def _show(learner: Learner, job: IslandWork, directory: Path) -> dict[str, Any]:
    """Write this rank's published model to its file, and check that its own model is restored afterwards."""
    own = job.full_model()
    with learner.published():
        job.loss(0)  # FSDP stores gathered copies after a forward pass
        published = job.full_model()
        path = model_file(directory, learner.id) if job.rank == 0 else rank_file(directory, learner.id, job.rank)
        save_file(published, path)
        job.loss(0)
    restored = job.full_model()
    is_ahead = any(not torch.equal(own[name], published[name]) for name in own)
    return {"restored": is_ahead and all(torch.equal(own[name], restored[name]) for name in own)}


def _broadcast_command(job: IslandWork, pipe: Connection) -> str:
    """Return the command of the test, which rank 0 broadcasts over the process group of the training."""
    index = torch.zeros(1, dtype=torch.int64)
    if job.rank == 0 and pipe.poll(job.spec.pace_s):
        index[0] = COMMANDS.index(pipe.recv()[0])
    dist.broadcast(index, 0)
    return COMMANDS[int(index)]


def optimizer_state_file(directory: Path, learner: int, rank: int) -> Path:
    return directory / f"optimizer-state-{learner}-rank{rank}.safetensors"


def rank_file(directory: Path, learner: int, rank: int) -> Path:
    return directory / f"learner-{learner}-rank{rank}.safetensors"


# --------------------------------------------------------------------------------------------------------------------
# Control by the test


class RankedIsland:
    """All ranks of an island. Its leader receives the commands."""

    def __init__(self, run: Run, spec: IslandSpec) -> None:
        self.spec = spec
        base = f"island-{spec.number}-{len(run.children)}"
        self.ranks = []
        for rank in range(spec.ranks):
            log = run.directory / "logs" / f"{base}-rank{rank}.log"
            child = Child(f"{base} rank {rank}", log, rank_child, (run.directory, run.address, spec, rank))
            run.children.append(child)
            self.ranks.append(child)

    def expect(self, kind: str, limit_s: float = LIMIT_S) -> list[Any]:
        return [rank.expect(kind, limit_s) for rank in self.ranks]

    def joined(self) -> list[Any]:
        return self.expect("joined")

    def command(self, command: str) -> None:
        self.ranks[0].command(command)

    def optimizer_state(self, directory: Path) -> dict[str, Tensor]:
        """Return the optimizer state at the join, or after the command "still": the same on all ranks."""
        first, *others = [
            load_file(optimizer_state_file(directory, self.spec.number, rank)) for rank in range(self.spec.ranks)
        ]
        for other in others:
            assert same(first, other), "the ranks of this island have different state"
        return first

    def finished(self, directory: Path) -> dict[str, Tensor]:
        """Wait until all ranks have reached the end of the run with the same model. Return this model."""
        for report in self.expect("ended"):
            assert report["finished"], report
            assert report["threads"] == [], report
        for rank in self.ranks:
            assert rank.ended() == 0
        first = load_file(model_file(directory, self.spec.number))
        for rank_index in range(1, self.spec.ranks):
            other = load_file(rank_file(directory, self.spec.number, rank_index))
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first), f"rank {rank_index} has another model"
        return first

    def left(self) -> list[Any]:
        """Wait until all ranks have left the run and ended. Return their reports."""
        for rank in self.ranks:
            rank.expected_to_end = True
        report = self.expect("ended")
        for rank in self.ranks:
            assert rank.ended() == 0
        return report

    def kill(self, rank: int) -> None:
        """Kill one rank. The others may end in any way."""
        for other in self.ranks:
            other.expected_to_end = True
        self.ranks[rank].kill()

    def kill_all(self) -> None:
        for rank in self.ranks:
            rank.expected_to_end = True
            rank.process.kill()
        for rank in self.ranks:
            rank.ended()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


__all__ = ["IslandSpec", "RankedIsland", "same"]
