"""Inner state between islands in files: the same bits as in memory, and neither end holds all of it."""

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
"""Two moments of every layer: 54 MiB, of which each of two ranks holds half."""

SLACK_BYTES = 6 * LAYER_BYTES


def trained(model: str = "mixed") -> Any:
    job = work(model, 1)
    for number in range(3):
        job.step(number)
    return job


def test_what_is_packed_in_a_file_is_what_is_packed_in_memory(tmp_path):
    job = trained()
    taken = optimizer_state.copy_state(job.optimizer, job.model)
    file = pack_to_file(taken, tmp_path)
    assert file._handle is not None, "it has a file"
    assert [*tmp_path.iterdir()] == [], "it has no name that somebody would have to remove"
    ours, theirs = optimizer_state.read(file.view), optimizer_state.read(optimizer_state.pack_copy(taken))
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    about, lazily = file.read()
    assert (about, {*lazily}, len(lazily)) == (theirs[0], {*theirs[1]}, len(theirs[1]))
    for number, tensor in theirs[1].items():
        assert torch.equal(ours[1][number], tensor)
        assert torch.equal(lazily[number], tensor)
    with pytest.raises(KeyError):
        lazily["no such"]


def test_without_room_on_disk_it_is_held_in_memory(tmp_path):
    job = trained()
    file = pack_to_file(optimizer_state.copy_state(job.optimizer, job.model), tmp_path / "is not there")
    assert file._handle is None, "it has no file"
    assert file.read()[0]["optimizer"] == "AdamW"


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"cut short", (40).to_bytes(8, "little") + b"{" * 40])
def test_a_file_of_a_hostile_peer_is_a_value_error(tmp_path, data):
    file = StateFile(len(data), tmp_path)
    file.view[:] = data
    with pytest.raises(ValueError, match="the optimizer state"):
        file.read()


def test_a_file_whose_header_says_more_than_there_is_a_value_error(tmp_path):
    job = trained()
    whole = optimizer_state.pack_copy(optimizer_state.copy_state(job.optimizer, job.model))
    file = StateFile(len(whole) - 100, tmp_path)
    file.view[:] = whole[:-100]
    with pytest.raises(ValueError, match="no safetensors file of ours"):
        file.read()


# --------------------------------------------------------------------------------------------------------------------
# Memory


def island_child(directory: Path, rank: int, log: Path, pipe: Connection) -> None:
    """An island that gives its inner state and takes it again. Its leader may hold its own half, and little more."""
    _begin(log)
    try:
        meeting = f"file://{directory}/meeting"
        dist.init_process_group("gloo", meeting, timedelta(seconds=LIMIT_S), rank=rank, world_size=2)
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
            pipe.send(("told", _lead(leader, model, optimizer, directory)))
        else:
            unused = SimpleNamespace()  # no rank sends or fetches rows of its own here
            follower = Follower(ranks, model, optimizer, LearnerStatus(), unused, lambda: 0, logging.getLogger())
            follower._plan, follower._generation = make_plan(describe_tensors(model), 2, "balanced"), 1
            for _ in range(4):
                follower._on_copy_state()
            follower._thread.start()
            tensors = receive_tensors(ranks.control[0])
            moments = [tensor for tensor in tensors.values() if tensor.dim()]
            assert {tuple(tensor.shape) for tensor in moments} == {(SIDE // 2, SIDE)}
            pipe.send(("told", len(moments)))
        pipe.recv()  # until it is killed: the other rank may need it
    except BaseException as wrong:
        traceback.print_exc()
        pipe.send(("failed", type(wrong).__name__, str(wrong)))


def _lead(leader: Leader, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> dict[str, int]:
    """How many bytes it held more, at most, while it did what."""
    boundary = leader.make_boundary(model, optimizer, [], 0.0)
    more = {}
    leader.staged_count = 1
    pack_to_file(
        boundary.take_optimizer_state(), directory
    )  # a rehearsal: libraries take memory for themselves when first called

    leader.staged_count = 2
    taken = boundary.take_optimizer_state()  # as all below kept to the end: what is free again would be used unseen
    with Peak() as peak:
        given = pack_to_file(taken, directory)
    more["gives from a file"] = peak.more

    with Peak() as peak:
        about, tensors = given.read()
        prepared = optimizer_state.prepare(about, tensors, optimizer, model)
        send_tensors(leader.ranks.control[0], cut_for_rank(leader.ranks, 1, about, tensors))
    more["takes from a file"] = peak.more
    for parameter, held in prepared.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[key].to_local(), optimizer.state[parameter][key].to_local())

    leader.staged_count = 3
    saved = boundary.take_optimizer_state()
    with Peak() as peak:
        assert saved.write_shards is not None
        notes = saved.write_shards(saved, directory)
    more["saves"] = peak.more
    assert notes is not None
    assert all(sum(file["bytes"] for file in note["files"].values()) > STATE_BYTES // 2 for note in notes)

    leader.staged_count = 4
    again = boundary.take_optimizer_state()
    with Peak() as peak:
        data = optimizer_state.pack_copy(again)
    more["gives from memory"] = peak.more
    with Peak() as peak:
        in_memory = optimizer_state.read(memoryview(data))
        also = optimizer_state.prepare(*in_memory, optimizer, model)
    more["takes from memory"] = peak.more
    assert taken.tensors
    assert also.state
    return more


class Peak:
    """Memory of this process that is no file's, looked at again and again."""

    def __enter__(self) -> Peak:
        self._before = self._most = _anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ends.wait(0.001):
            self._most = max(self._most, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._most = max(self._most, _anonymous_bytes())

    @property
    def more(self) -> int:
        return self._most - self._before


def _anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_no_rank_holds_the_inner_state_of_its_island_when_it_is_given_taken_or_saved(tmp_path):
    """A leader needs no more than a few tensors, and its own half of what it takes. The ways by memory show that the
    measure sees what is held."""
    ranks = [Child(f"rank {rank}", tmp_path / f"{rank}.log", island_child, (tmp_path, rank)) for rank in (0, 1)]
    try:
        more = ranks[0].expect("told", 2 * LIMIT_S)
        assert ranks[1].expect("told", 2 * LIMIT_S) == 2 * LAYERS
        assert more["gives from a file"] < SLACK_BYTES, more
        assert more["saves"] < SLACK_BYTES, more
        assert more["takes from a file"] < STATE_BYTES // 2 + SLACK_BYTES, more
        assert more["gives from memory"] > STATE_BYTES, more
        assert more["takes from memory"] > STATE_BYTES, more
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
