"""Optimizer state in files: the same bits as in memory, and no process has all of it in memory."""

from __future__ import annotations

import logging
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from atoll.island.follower import Follower
from atoll.island.leader import Leader
from atoll.island.optimizer_state_io import cut_for_rank, receive_tensors, send_tensors
from atoll.island.stats import LearnerStatus
from atoll.island.topology import rendezvous
from atoll.store.optimizer_state_files import StateFile, pack_to_file
from atoll.tensors import optimizer_state
from atoll.tensors.plan import describe_tensors, make_plan
from tests.learner.runs import LIMIT_S, Child, _begin
from tests.learner.small_models import work

LAYERS, SIDE = 12, 768
LAYER_BYTES = SIDE * SIDE * 4
STATE_BYTES = 2 * LAYERS * LAYER_BYTES
"""Two moments of each layer: 54 MiB, half of it at each of two ranks."""

SLACK_BYTES = 6 * LAYER_BYTES


def trained(model: str = "mixed") -> Any:
    job = work(model, 1)
    for number in range(3):
        job.step(number)
    return job


def test_state_packed_to_a_file_equals_state_packed_in_memory(tmp_path):
    job = trained()
    copied = optimizer_state.copy_state(job.optimizer, job.model)
    file = pack_to_file(copied, tmp_path)
    assert file._handle is not None, "the state must be in a file"
    assert [*tmp_path.iterdir()] == [], "the file has no name, so it need not be removed"
    from_file, from_memory = (optimizer_state.read(data) for data in (file.view, optimizer_state.pack_copy(copied)))
    assert from_file[0] == from_memory[0]
    assert from_file[1].keys() == from_memory[1].keys()
    metadata, lazy = file.read()
    assert (metadata, {*lazy}, len(lazy)) == (from_memory[0], {*from_memory[1]}, len(from_memory[1]))
    for number, tensor in from_memory[1].items():
        assert torch.equal(from_file[1][number], tensor)
        assert torch.equal(lazy[number], tensor)
    with pytest.raises(KeyError):
        lazy["missing"]


def test_state_is_packed_in_memory_if_the_folder_is_missing(tmp_path):
    job = trained()
    file = pack_to_file(optimizer_state.copy_state(job.optimizer, job.model), tmp_path / "missing")
    assert file._handle is None, "the state must be in memory"
    assert file.read()[0]["optimizer"] == "AdamW"


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"cut short", (40).to_bytes(8, "little") + b"{" * 40])
def test_invalid_file_of_a_peer_raises_value_error(tmp_path, data):
    file = StateFile(len(data), tmp_path)
    file.view[:] = data
    with pytest.raises(ValueError, match="the optimizer state"):
        file.read()


def test_truncated_file_raises_value_error(tmp_path):
    job = trained()
    packed = optimizer_state.pack_copy(optimizer_state.copy_state(job.optimizer, job.model))
    file = StateFile(len(packed) - 100, tmp_path)
    file.view[:] = packed[:-100]
    with pytest.raises(ValueError, match="not a safetensors file written by Atoll"):
        file.read()


# --------------------------------------------------------------------------------------------------------------------
# Memory


def island_child(directory: Path, rank: int, log: Path, pipe: Connection) -> None:
    """Run one rank of an island that sends, saves and loads its optimizer state. The leader measures its memory."""
    _begin(log)
    try:
        init_method = f"file://{directory}/rendezvous"
        dist.init_process_group("gloo", init_method, timedelta(seconds=LIMIT_S), rank=rank, world_size=2)
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ranks = rendezvous(model)
        assert ranks is not None
        if rank == 0:
            leader = Leader(ranks, model, SimpleNamespace(), logging.getLogger())
            pipe.send(("result", _measure_peaks(leader, model, optimizer, directory)))
        else:
            unused = SimpleNamespace()  # ranks do not upload or download rows here
            follower = Follower(ranks, model, optimizer, LearnerStatus(), unused, lambda: 0, logging.getLogger())
            follower._plan, follower._generation = make_plan(describe_tensors(model), 2, "balanced"), 1
            for _ in range(4):
                follower._on_copy_state()
            follower._thread.start()
            tensors = receive_tensors(ranks.control[0])
            moments = [tensor for tensor in tensors.values() if tensor.dim()]
            assert {tuple(tensor.shape) for tensor in moments} == {(SIDE // 2, SIDE)}
            pipe.send(("result", len(moments)))
        pipe.recv()  # until it is killed: the other rank may still need this process
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", type(error).__name__, str(error)))


def _measure_peaks(
    leader: Leader, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> dict[str, int]:
    """Return the peak of additional memory during each operation of the leader, in bytes."""
    boundary = leader.make_boundary(model, optimizer, [], 0.0)
    peaks = {}
    leader.staged_count = 1
    pack_to_file(boundary.take_optimizer_state(), directory)  # warm-up: libraries allocate memory at their first call

    leader.staged_count = 2
    # Results stay referenced to the end: reuse of freed memory would not be measured.
    copied = boundary.take_optimizer_state()
    with PeakMemory() as peak:
        file = pack_to_file(copied, directory)
    peaks["send from file"] = peak.added_bytes

    with PeakMemory() as peak:
        metadata, tensors = file.read()
        prepared = optimizer_state.prepare(metadata, tensors, optimizer, model)
        send_tensors(leader.ranks.control[0], cut_for_rank(leader.ranks, 1, metadata, tensors))
    peaks["load from file"] = peak.added_bytes
    for parameter, state in prepared.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key].to_local(), optimizer.state[parameter][key].to_local())

    leader.staged_count = 3
    saved = boundary.take_optimizer_state()
    with PeakMemory() as peak:
        assert saved.write_shards is not None
        notes = saved.write_shards(saved, directory)
    peaks["save"] = peak.added_bytes
    assert notes is not None
    assert all(sum(file["bytes"] for file in note["files"].values()) > STATE_BYTES // 2 for note in notes)

    leader.staged_count = 4
    second_copy = boundary.take_optimizer_state()
    with PeakMemory() as peak:
        data = optimizer_state.pack_copy(second_copy)
    peaks["send from memory"] = peak.added_bytes
    with PeakMemory() as peak:
        in_memory = optimizer_state.read(memoryview(data))
        second_prepared = optimizer_state.prepare(*in_memory, optimizer, model)
    peaks["load from memory"] = peak.added_bytes
    assert copied.tensors
    assert second_prepared.state
    return peaks


class PeakMemory:
    """Samples the anonymous memory of this process and records the peak."""

    def __enter__(self) -> PeakMemory:
        self._before = self._max = _anonymous_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stopped.wait(0.001):
            self._max = max(self._max, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._max = max(self._max, _anonymous_bytes())

    @property
    def added_bytes(self) -> int:
        return self._max - self._before


def _anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_leader_never_has_the_whole_optimizer_state_in_memory(tmp_path):
    """Send and save need memory for a few tensors, load also for the leader's own half.

    Sending and loading in memory must exceed the limits, otherwise the measurement misses memory.
    """
    ranks = [Child(f"rank {rank}", tmp_path / f"{rank}.log", island_child, (tmp_path, rank)) for rank in (0, 1)]
    try:
        peaks = ranks[0].expect("result", 2 * LIMIT_S)
        assert ranks[1].expect("result", 2 * LIMIT_S) == 2 * LAYERS
        assert peaks["send from file"] < SLACK_BYTES, peaks
        assert peaks["save"] < SLACK_BYTES, peaks
        assert peaks["load from file"] < STATE_BYTES // 2 + SLACK_BYTES, peaks
        assert peaks["send from memory"] > STATE_BYTES, peaks
        assert peaks["load from memory"] > STATE_BYTES, peaks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
