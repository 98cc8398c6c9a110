"""Inner state of an island of many ranks on its way to disk and back: every rank writes and reads its own.

The leader orders it over the lines in the background, and holds them only for as long as it speaks: a rank writes in a
thread of its own and is asked from time to time whether it has, so that fragments go on meanwhile.

1. WRITE_SHARD, with a folder. A rank that does not see it says so, and then everything is put together at rank 0 as if
   nobody had been asked. The others begin.
2. WRITE_STATUS, until nobody is busy. Each answers with the note of its file, or with what went wrong.
3. The leader makes folder and part durable under their names. A rank that dies on the way leaves the part before.

LOAD_SHARD is for a part that was found, while everybody waits to start: each rank checks the files that it needs, reads its
own and keeps them until training starts. What one rank cannot read is taken by nobody.
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
    """Load what the first part needs before training begins, where anything is dealt out: it takes a second."""
    if any(ranks.boxes):
        import atoll.store.sharded_parts  # noqa: F401


def owned_parameters(ranks: Ranks, about: Mapping[str, Any]) -> frozenset[str]:
    """The parameters whose state this rank writes: of ranks that hold the same part, the first one does."""
    mine = set()
    for name, told in about["parameters"].items():
        sizes = tuple(told["shape"])
        boxes = [each.get(name) or Box((0,) * len(sizes), sizes) for each in ranks.boxes]
        own = boxes[ranks.rank]
        if own.numel and boxes.index(own) == ranks.rank:
            mine.add(name)
    return frozenset(mine)


# ---------------------------------------------------------------------------------------------------------- the leader


def write_shards(
    ranks: Ranks,
    lock: threading.Lock,
    generation: int,
    key: int,
    taken: optimizer_state.OptimizerStateCopy,
    folder: Path,
) -> list[Any] | None:
    """What each rank has written into the folder. None: not all of them see it. Raises only when nobody writes any
    more."""
    from atoll.store.sharded_parts import write_rank_file

    with lock:
        for line in ranks.bulk:
            line.send_command(RankCommand.WRITE_SHARD, 0, key, generation)
            line.send_json(str(folder))
        said = [(line, *line.receive_result()) for line in ranks.bulk]
    busy = [line for line, status, _ in said if status is RankReply.OK]
    is_seen = all(status is not RankReply.MISSING for _, status, _ in said)
    wrong = [f"rank {line.rank}: {why}" for line, status, why in said if status is RankReply.ERROR]
    notes: list[Any] = []
    failed: Exception | None = None
    if is_seen and not wrong:
        try:
            notes.append(write_rank_file(folder, ranks.rank, taken, owned_parameters(ranks, taken.metadata)))
        except Exception as error:
            failed = error  # raised when the others are done
    while busy:
        for line in list(busy):
            with lock:
                line.send_command(RankCommand.WRITE_STATUS, 0, key, generation)
                status, why = line.receive_result()
                note = line.receive_json() if status is RankReply.OK else None
            if status is RankReply.BUSY:
                continue
            busy.remove(line)
            if note is None:
                wrong.append(f"rank {line.rank}: {why}")
            else:
                notes.append(note)
        if busy:
            time.sleep(WRITE_POLL_INTERVAL_S)
    if failed is not None:
        raise failed
    if wrong:
        raise ValueError("; ".join(wrong))
    return notes if is_seen else None


def load_shards(ranks: Ranks, lock: threading.Lock, generation: int, part: LearnerPart) -> bool:
    """Whether every rank holds its own of this part. False: not all of them see its files, and the leader deals them
    out. Raises ValueError with what they found."""
    assert part.shards is not None
    about, here = part.note["inner"], part.local_optimizer_tensors()
    with lock:
        for line in ranks.bulk:
            line.send_command(RankCommand.LOAD_SHARD, 0, 0, generation)
            line.send_json([str(part.shards.folder), part.shards.note, about])
            send_tensors(line, cut_for_rank(ranks, line.rank, about, here))
        said = [(line, *line.receive_result()) for line in ranks.bulk]
    wrong = [f"rank {line.rank}: {why}" for line, status, why in said if status is RankReply.ERROR]
    if wrong:
        raise ValueError("; ".join(wrong))
    if all(status is RankReply.OK for _, status, _ in said):
        return True
    part.shards.verify_digests()  # now, while an older one could be taken
    return False


def cut_for_rank(
    ranks: Ranks, rank: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """What a rank needs of these whole tensors, one after the other."""
    for number, (name, is_complex) in optimizer_state.tensor_owners(about).items():
        if number in tensors:
            sizes = tuple(about["parameters"][name]["shape"])
            yield number, optimizer_state.extract_part(tensors[number], is_complex, sizes, ranks.boxes[rank].get(name))


def send_tensors(line: RankConnection, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        line.send_json([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        line.send_tensor(tensor)
    line.send_json(None)


def receive_tensors(line: RankConnection) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    while (told := line.receive_json()) is not None:
        name, dtype, shape = told
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        line.receive_tensor(tensors[name])
    return tensors


# -------------------------------------------------------------------------------------------------------- a follower


class PartShardWorker:
    """Obeys in the background thread of its rank."""

    def __init__(self, follower: Follower, ranks: Ranks, model: nn.Module, optimizers: Optimizers) -> None:
        self._follower = follower
        self._ranks = ranks
        self._model = model
        self._optimizers = optimizers
        self._line = ranks.bulk[0]
        preload_parts(ranks)
        self._writing: tuple[int, threading.Thread] | None = None  # for which parcel
        self._written: tuple[Any, str] = (None, "")  # the note, or what went wrong
        self._loaded: optimizer_state.PreparedState | None = None

    def handle(self, command: RankCommand, key: int, generation: int) -> None:
        if command is RankCommand.WRITE_SHARD:
            self._begin_write(key, generation, Path(self._line.receive_json()))
        elif command is RankCommand.WRITE_STATUS:
            self._report_write(key)
        else:
            self._load(generation)

    def take_loaded(self) -> optimizer_state.PreparedState:
        """When training starts from it."""
        assert self._loaded is not None, "the leader says that this rank has loaded a part"
        loaded, self._loaded = self._loaded, None
        return loaded

    def forget(self) -> None:
        self._loaded = None

    def close(self) -> None:
        if self._writing is not None:
            self._writing[1].join(THREAD_JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------------------

    def _begin_write(self, key: int, generation: int, folder: Path) -> None:
        inner, wrong = self._follower.staged_state(key, generation)
        if inner is None:
            self._line.send_result(RankReply.ERROR, wrong or "does not have it any more")
        elif not folder.is_dir():
            self._line.send_result(RankReply.MISSING)
        else:
            self.close()  # of the part before: its leader has given it up
            self._written = (None, "")
            thread = threading.Thread(target=self._write, args=(folder, inner), name="atoll-rank-part", daemon=True)
            self._writing = (key, thread)
            thread.start()
            self._line.send_result(RankReply.OK)

    def _write(self, folder: Path, inner: optimizer_state.OptimizerStateCopy) -> None:
        from atoll.store.sharded_parts import write_rank_file

        try:
            mine = owned_parameters(self._ranks, inner.metadata)
            self._written = (write_rank_file(folder, self._ranks.rank, inner, mine), "")
        except Exception as error:  # the leader is told, and training goes on
            self._written = (None, summarize_error(error))

    def _report_write(self, key: int) -> None:
        if self._writing is None or self._writing[0] != key:
            self._line.send_result(RankReply.ERROR, "was not asked to write it")
        elif self._writing[1].is_alive():
            self._line.send_result(RankReply.BUSY)
        else:
            self._writing = None
            note, wrong = self._written
            self._line.send_result(RankReply.OK if note is not None else RankReply.ERROR, wrong)
            if note is not None:
                self._line.send_json(note)

    def _load(self, generation: int) -> None:
        """The training thread waits for the leader, so the optimizer stands still."""
        folder, note, about = self._line.receive_json()
        here = receive_tensors(self._line)
        self._loaded = None
        if not self._follower.is_current(generation):
            self._line.send_result(RankReply.ERROR, "has begun anew")
        elif not Path(folder).is_dir():
            self._line.send_result(RankReply.MISSING)
        else:
            from atoll.store.sharded_parts import ShardedTensors, load_for_rank

            try:
                tensors = load_for_rank(about, here, ShardedTensors(Path(folder), note), local_boxes(self._model))
                self._loaded = optimizer_state.prepare(
                    about, tensors, self._optimizers, self._model, is_local_part=True
                )
            except Exception as error:  # the leader gets the cause
                self._line.send_result(RankReply.ERROR, str(error))
            else:
                self._line.send_result(RankReply.OK)
