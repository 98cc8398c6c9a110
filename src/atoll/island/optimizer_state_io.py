"""Optimizer state of an island of several ranks on its way to disk and back. Every rank writes and reads its own
shards.

The leader sends commands over the bulk connections, and locks them only during an exchange. A rank writes in its thread
and is polled, so that fragment transfers continue meanwhile.

1. WRITE_SHARD, with a folder. Each rank begins to write, or replies that it cannot access the folder. In that case rank
   0 gathers and writes everything.
2. WRITE_STATUS, until no rank is busy. Each rank replies with the description of its file, or with an error.
3. The leader makes folder and part durable under their names. If a rank dies before, the earlier part remains.

LOAD_SHARD is for a part that was found, while all ranks wait to start. Each rank checks the files that it needs, reads
its own shards and stores them until training starts. If one rank cannot read its shards, no rank uses the part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.island.boundary import summarize_error
from atoll.island.rank_connection import RankCommand, RankConnection, RankReply
from atoll.island.topology import Ranks
from atoll.store.learner_parts import LearnerPart
from atoll.tensors import optimizer_state
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.sharding import Box, local_boxes

if TYPE_CHECKING:
    from atoll.island.follower import Follower

WRITE_POLL_INTERVAL_S = 0.02
THREAD_JOIN_TIMEOUT_S = 5.0

PART_COMMANDS = (RankCommand.WRITE_SHARD, RankCommand.WRITE_STATUS, RankCommand.LOAD_SHARD)


def preload_parts(ranks: Ranks) -> None:
    """Import the modules for parts before training begins, if the model is sharded: the import takes a second."""
    if any(ranks.boxes):
        import atoll.store.sharded_parts  # noqa: F401


def owned_parameters(ranks: Ranks, metadata: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters whose state this rank writes: of ranks with the same shard, the first one writes it."""
    owned = set()
    for name, described in metadata["parameters"].items():
        sizes = tuple(described["shape"])
        boxes = [each.get(name) or Box((0,) * len(sizes), sizes) for each in ranks.boxes]
        own = boxes[ranks.rank]
        if own.numel and boxes.index(own) == ranks.rank:
            owned.add(name)
    return frozenset(owned)


# ---------------------------------------------------------------------------------------------------------- the leader


def write_shards(
    ranks: Ranks,
    lock: threading.Lock,
    generation: int,
    key: int,
    state_copy: optimizer_state.OptimizerStateCopy,
    folder: Path,
) -> list[Any] | None:
    """Return the descriptions of the files of all ranks, or None if one of them cannot access the folder.

    Raise an error only when no rank writes any more.
    """
    from atoll.store.sharded_parts import write_rank_file

    with lock:
        for connection in ranks.bulk:
            connection.send_command(RankCommand.WRITE_SHARD, 0, key, generation)
            connection.send_json(str(folder))
        replies = [(connection, *connection.receive_result()) for connection in ranks.bulk]
    busy = [connection for connection, status, _ in replies if status is RankReply.OK]
    is_seen = all(status is not RankReply.MISSING for _, status, _ in replies)
    errors = [f"rank {connection.rank}: {text}" for connection, status, text in replies if status is RankReply.ERROR]
    indexes: list[Any] = []
    own_error: Exception | None = None
    if is_seen and not errors:
        try:
            indexes.append(
                write_rank_file(folder, ranks.rank, state_copy, owned_parameters(ranks, state_copy.metadata))
            )
        except Exception as error:
            own_error = error  # raised when the other ranks have ended
    while busy:
        for connection in list(busy):
            with lock:
                connection.send_command(RankCommand.WRITE_STATUS, 0, key, generation)
                status, text = connection.receive_result()
                index = connection.receive_json() if status is RankReply.OK else None
            if status is RankReply.BUSY:
                continue
            busy.remove(connection)
            if index is None:
                errors.append(f"rank {connection.rank}: {text}")
            else:
                indexes.append(index)
        if busy:
            time.sleep(WRITE_POLL_INTERVAL_S)
    if own_error is not None:
        raise own_error
    if errors:
        raise ValueError("; ".join(errors))
    return indexes if is_seen else None


def load_shards(ranks: Ranks, lock: threading.Lock, generation: int, part: LearnerPart) -> bool:
    """Return whether every rank has loaded its shards of this part. False: one rank cannot access the files.

    Then the leader sends each rank its shards. Raise ValueError with the errors of the ranks.
    """
    assert part.shards is not None
    metadata, local = part.metadata["inner"], part.local_optimizer_tensors()
    with lock:
        for connection in ranks.bulk:
            connection.send_command(RankCommand.LOAD_SHARD, 0, 0, generation)
            connection.send_json([str(part.shards.folder), part.shards.index, metadata])
            send_tensors(connection, cut_for_rank(ranks, connection.rank, metadata, local))
        replies = [(connection, *connection.receive_result()) for connection in ranks.bulk]
    errors = [f"rank {connection.rank}: {text}" for connection, status, text in replies if status is RankReply.ERROR]
    if errors:
        raise ValueError("; ".join(errors))
    if all(status is RankReply.OK for _, status, _ in replies):
        return True
    part.shards.verify_digests()  # now, while an older part can still be chosen
    return False


def cut_for_rank(
    ranks: Ranks, rank: int, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of these full tensors that a rank needs."""
    for number, (name, is_complex) in optimizer_state.tensor_owners(metadata).items():
        if number in tensors:
            sizes = tuple(metadata["parameters"][name]["shape"])
            yield number, optimizer_state.extract_part(tensors[number], is_complex, sizes, ranks.boxes[rank].get(name))


def send_tensors(connection: RankConnection, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        connection.send_json([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        connection.send_tensor(tensor)
    connection.send_json(None)


def receive_tensors(connection: RankConnection) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    while (header := connection.receive_json()) is not None:
        name, dtype, shape = header
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        connection.receive_tensor(tensors[name])
    return tensors


# -------------------------------------------------------------------------------------------------------- a follower


class PartShardWorker:
    """Writer and reader of this rank's shards, in its background thread."""

    def __init__(self, follower: Follower, ranks: Ranks, model: nn.Module, optimizers: Optimizers) -> None:
        self._follower = follower
        self._ranks = ranks
        self._model = model
        self._optimizers = optimizers
        self._line = ranks.bulk[0]
        preload_parts(ranks)
        self._writing: tuple[int, threading.Thread] | None = None  # key of the staged state, and its thread
        self._written: tuple[Any, str] = (None, "")  # the description of its file, or the error
        self._loaded: optimizer_state.PreparedState | None = None

    def handle(self, command: RankCommand, key: int, generation: int) -> None:
        if command is RankCommand.WRITE_SHARD:
            self._begin_write(key, generation, Path(self._line.receive_json()))
        elif command is RankCommand.WRITE_STATUS:
            self._report_write(key)
        else:
            self._load(generation)

    def take_loaded(self) -> optimizer_state.PreparedState:
        """Return the loaded state, when training starts from it."""
        assert self._loaded is not None, "the leader assumes that this rank has loaded a part"
        loaded, self._loaded = self._loaded, None
        return loaded

    def forget(self) -> None:
        self._loaded = None

    def close(self) -> None:
        if self._writing is not None:
            self._writing[1].join(THREAD_JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------------------

    def _begin_write(self, key: int, generation: int, folder: Path) -> None:
        state, error = self._follower.staged_state(key, generation)
        if state is None:
            self._line.send_result(RankReply.ERROR, error or "does not have it any more")
        elif not folder.is_dir():
            self._line.send_result(RankReply.MISSING)
        else:
            self.close()  # of an earlier part, which the leader has abandoned
            self._written = (None, "")
            thread = threading.Thread(target=self._write, args=(folder, state), name="atoll-rank-part", daemon=True)
            self._writing = (key, thread)
            thread.start()
            self._line.send_result(RankReply.OK)

    def _write(self, folder: Path, state: optimizer_state.OptimizerStateCopy) -> None:
        from atoll.store.sharded_parts import write_rank_file

        try:
            owned = owned_parameters(self._ranks, state.metadata)
            self._written = (write_rank_file(folder, self._ranks.rank, state, owned), "")
        except Exception as error:  # sent to the leader; training continues
            self._written = (None, summarize_error(error))

    def _report_write(self, key: int) -> None:
        if self._writing is None or self._writing[0] != key:
            self._line.send_result(RankReply.ERROR, "received no command to write it")
        elif self._writing[1].is_alive():
            self._line.send_result(RankReply.BUSY)
        else:
            self._writing = None
            index, error = self._written
            self._line.send_result(RankReply.OK if index is not None else RankReply.ERROR, error)
            if index is not None:
                self._line.send_json(index)

    def _load(self, generation: int) -> None:
        """Load this rank's shards. The training thread waits for the leader, so the optimizer does not change."""
        folder, index, metadata = self._line.receive_json()
        local = receive_tensors(self._line)
        self._loaded = None
        if not self._follower.is_current(generation):
            self._line.send_result(RankReply.ERROR, "has begun a new incarnation")
        elif not Path(folder).is_dir():
            self._line.send_result(RankReply.MISSING)
        else:
            from atoll.store.sharded_parts import ShardedTensors, load_for_rank

            try:
                tensors = load_for_rank(metadata, local, ShardedTensors(Path(folder), index), local_boxes(self._model))
                self._loaded = optimizer_state.prepare(
                    metadata, tensors, self._optimizers, self._model, is_local_part=True
                )
            except Exception as error:  # sent to the leader
                self._line.send_result(RankReply.ERROR, str(error))
            else:
                self._line.send_result(RankReply.OK)
