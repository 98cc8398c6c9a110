"""Rank 0 of an island of several ranks. Only it runs the protocol with the syncer; the other ranks execute its
commands.

At a step boundary all ranks send a request, and the leader replies with its actions. If every rank has whole rows, each
transfers its own rows when the leader requests it (`row_transfer`). Otherwise the leader gathers the rows of a fragment
in the background, and scatters the rows of a version that has arrived. In both cases its core learns of a version only
when every rank has its rows in host memory, so that no rank waits at the boundary where the version is adopted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from atoll.core.protocol import StartTraining
from atoll.core.types import FragmentId, Version
from atoll.errors import AtollError, IslandBrokenError
from atoll.island.boundary import (
    Action,
    AdoptAction,
    CopyAction,
    CopyStateAction,
    IslandInitialState,
    SavedState,
    SavePartAction,
    SingleRankIsland,
    StartAction,
    StepBoundary,
    StopAction,
    summarize_error,
)
from atoll.island.fragments import CopyUnavailableError, FragmentTensors
from atoll.island.optimizer_state_io import cut_for_rank, load_shards, preload_parts, send_tensors, write_shards
from atoll.island.rank_connection import (
    REQUEST_VERBS,
    RNG_ONLY,
    BoundaryStatus,
    RankCommand,
    RankConnection,
    RankReply,
    RankRequest,
    encode_failure,
    tensor_bytes,
)
from atoll.island.rank_rpc import RankRpcClient
from atoll.island.topology import Ranks, fsdp_modules, reshard
from atoll.store.learner_parts import LearnerPart
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import Codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.row_sharding import FragmentSharding, is_sharded_by_rows, shard_fragment
from atoll.tensors.sharding import Box, ShardWindow, assign_owners, shard_windows

PIECE_VALUES = 2**18
"""Values of other ranks that the leader forwards at a time: 1 MiB."""

MIN_ROW_TRANSFER_VALUES = 2**18
"""Smallest mean fragment for which every rank transfers its own rows. A request costs about a millisecond of CPU time
whatever its size, and a rank has enough memory for a whole smaller fragment."""


class LeaderBackground(Protocol):
    """Interface of the background thread of the leader's process."""

    @property
    def syncer_address(self) -> str:
        """Address of the syncer."""
        ...

    @property
    def has_token(self) -> bool: ...

    def start_row_transfer(self, leader: Leader, rank_rpc: RankRpcClient, ranks: int) -> None: ...


class Leader(SingleRankIsland):
    transfer_mode = "leader"

    def __init__(self, ranks: Ranks, model: nn.Module, background: LeaderBackground, log: logging.Logger) -> None:
        self.ranks = ranks
        self.shares: list[FragmentSharding] = []  # by fragment, if ranks transfer their own rows
        self._background = background
        self.fsdp = fsdp_modules(model)
        self.staged_count = 0  # staged copies of state or of a snapshot's part, counted in the same way by all ranks
        self.generation = 0  # number of the incarnation; messages of earlier ones are ignored
        self.waited_s = 0.0  # seconds of waiting for the other ranks at step boundaries
        self._log = log
        self._lock = threading.Lock()  # one command at a time
        self._values_by_rank: list[int] = []  # values of the newest requests
        self._windows: list[list[list[ShardWindow]]] = []  # by follower and fragment, its shards
        self._owned_windows: list[list[list[ShardWindow]]] = []  # the same without replicas, to be gathered
        self._boundary_started_at = 0.0

    # -------------------------------------------------------------------------------------------- at a step boundary

    def gather_requests(self, kind: RankRequest, value: int = 0) -> int:
        self._boundary_started_at = time.monotonic()
        self._values_by_rank = [value]
        for connection in self.ranks.control:
            rank_kind, rank_value = connection.receive_request()
            if rank_kind is not kind:
                raise IslandBrokenError(
                    f"rank {connection.rank} of this island {REQUEST_VERBS[rank_kind]} where rank 0"
                    f" {REQUEST_VERBS[kind]}: all ranks of an island must do the same at the same step"
                )
            self._values_by_rank.append(rank_value)
            self.preemption_level = max(self.preemption_level, connection.preemption_level)
        return sum(
            rank_value
            for rank_value, counts in zip(self._values_by_rank, self.ranks.counts_tokens, strict=True)
            if counts
        )

    def broadcast_actions(self, actions: list[Action], status: BoundaryStatus) -> list[Action]:
        reply = _encode_commands([_encode_action(action) for action in actions]) if actions else b""
        initial_state = next((action.initial for action in actions if type(action) is StartAction), None)
        for connection in self.ranks.control:
            connection.send_reply(status, reply)
            if initial_state is not None:
                self._send_state(connection, initial_state)
        self.waited_s += time.monotonic() - self._boundary_started_at
        return actions

    def pause_ranks(self) -> None:
        for connection in self.ranks.control:
            connection.send_reply(BoundaryStatus(is_paused=True), b"")

    def broadcast(self, commands: list[Any]) -> None:
        self.gather_requests(RankRequest.JOIN)
        for connection in self.ranks.control:
            connection.send_reply(BoundaryStatus(), _encode_commands(commands) if commands else b"")

    def scatter_samples(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Split the samples of one step by rank. Ranks that train on the same data get the same samples."""
        starts, begin = {}, 0
        for offset, counts, slot in zip(
            self._values_by_rank, self.ranks.counts_tokens, self.ranks.data_slots, strict=True
        ):
            if counts:
                starts[slot] = (begin, begin + offset)
                begin += offset
        for connection in self.ranks.control:
            first, last = starts[self.ranks.data_slots[connection.rank]]
            connection.send_reply(BoundaryStatus(), _encode_commands([["samples", numbers[first:last]]]))
        first, last = starts[self.ranks.data_slots[0]]
        return numbers[first:last]

    def _send_state(self, connection: RankConnection, initial_state: IslandInitialState) -> None:
        """Send a rank its shards of the initial optimizer state, tensor by tensor."""
        dealt = (
            cut_for_rank(self.ranks, connection.rank, *initial_state.state) if initial_state.state is not None else ()
        )
        own = initial_state.part.rng_states(connection.rank) if initial_state.part is not None else {}
        send_tensors(connection, chain(dealt, own.items()))

    # ----------------------------------------------------------------------------------------------------- construction

    def make_view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        owners = assign_owners(self.ranks.boxes, plan.tensors)
        fragments = range(len(plan.fragments))
        others = range(1, self.ranks.size)
        self._windows = [[shard_windows(plan, p, self.ranks.boxes[rank]) for p in fragments] for rank in others]
        self._owned_windows = [
            [shard_windows(plan, p, self.ranks.boxes[rank], owners[rank]) for p in fragments] for rank in others
        ]
        view = IslandView(self, model, plan)  # all ranks make one now: building it may involve collective calls
        if self._negotiate_row_transfer(plan):
            self.transfer_mode = "rows"
            self.shares = [shard_fragment(plan, p, self.ranks.boxes) for p in fragments]
            self._background.start_row_transfer(self, RankRpcClient(self.ranks.rows), self.ranks.size)
            view.packed = True
        return view

    def _negotiate_row_transfer(self, plan: FragmentPlan) -> bool:
        """Return whether all ranks transfer their own rows.

        For that they need whole rows, fragments that are worth a request of each rank, and a route to the syncer.
        """
        cause = ""
        if not is_sharded_by_rows(self.ranks.boxes, plan.tensors):
            cause = "they do not have whole rows"
        elif plan.total_numel < MIN_ROW_TRANSFER_VALUES * len(plan.fragments):
            cause = f"fragments have fewer than {MIN_ROW_TRANSFER_VALUES:,} values"
        if cause:
            self._log.info("rank 0 transfers the rows of all ranks of this island: %s", cause)
            self.broadcast([["transfer_mode", ""]])
            return False
        self.broadcast([["reach", self._background.syncer_address, self._background.has_token]])
        self.gather_requests(RankRequest.JOIN)
        unreachable = [rank for rank, reaches in enumerate(self._values_by_rank) if rank and not reaches]
        for connection in self.ranks.control:
            connection.send_reply(
                BoundaryStatus(), _encode_commands([["transfer_mode", "" if unreachable else "rows"]])
            )
        if unreachable:
            message = "rank 0 transfers the rows of all ranks of this island: rank %s cannot reach the syncer"
            self._log.warning(message, ", ".join(map(str, unreachable)))
        else:
            self._log.info("every rank of this island transfers its own rows")
        return not unreachable

    def make_fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return FragmentTensors(view, p, up, self, self.shares[p] if self.shares else None)

    def make_boundary(self, *args: Any) -> StepBoundary:
        self.generation += 1
        self.staged_count = 0
        return LeaderBoundary(self, *args)

    # ------------------------------------------------------------------------------------------------ in the background

    def gather_rows(self, command: RankCommand, p: FragmentId, key: int, whole: Tensor) -> None:
        """Gather the rows of the other ranks into a full fragment, which already has the leader's rows."""
        requested = [
            (connection, parts)
            for connection, fragments in zip(self.ranks.bulk, self._owned_windows, strict=True)
            if (parts := [window for window in fragments[p] if window.packed_begin < window.packed_end])
        ]
        problem = ""
        with self._lock:
            for connection, _ in requested:
                connection.send_command(command, p, key, self.generation)
            for connection, parts in requested:
                status, text = connection.receive_result()
                if status is RankReply.OK:
                    for window in parts:
                        connection.receive_tensor(window.view(whole))
                else:
                    problem = text or f"rank {connection.rank} has dropped it"
        if problem:
            raise CopyUnavailableError(problem)

    def scatter_version(self, p: FragmentId, version: Version, whole: Tensor) -> None:
        with self._lock:
            for connection, fragments in zip(self.ranks.bulk, self._windows, strict=True):
                connection.send_command(RankCommand.VERSION, p, version, self.generation)
                for window in fragments[p]:
                    connection.send_tensor(window.view(whole))
            for connection in self.ranks.bulk:
                connection.receive_result()

    def exchange_edges(self, p: FragmentId, serial: int, given: Tensor, by: Codec) -> Tensor:
        """Exchange the values of blocks that span several ranks, so that each block is at the rank that encodes it.

        Return the values for this rank. If one rank has dropped the copy, no rank encodes it.
        """
        share, problem = self.shares[p], ""
        outgoing_by_rank: dict[int, Tensor] = {0: given}
        with self._lock:
            for connection in self.ranks.bulk:
                connection.send_command(RankCommand.EDGES, p, serial, self.generation)
            for connection in self.ranks.bulk:
                status, text = connection.receive_result()
                if status is RankReply.OK:
                    outgoing_by_rank[connection.rank] = torch.empty(
                        sum(move.numel for move in share.sends_from(connection.rank))
                    )
                    connection.receive_tensor(outgoing_by_rank[connection.rank])
                else:
                    problem = text or f"rank {connection.rank} has dropped it"
            incoming = _redistribute(share, outgoing_by_rank) if not problem else {}
            for connection in self.ranks.bulk:
                if connection.rank not in outgoing_by_rank:
                    continue
                connection.send_result(RankReply.MISSING if problem else RankReply.OK, by.name)
                if not problem:
                    connection.send_tensor(incoming[connection.rank])
        if problem:
            raise CopyUnavailableError(problem)
        return incoming[0]

    def relay_version(self, p: FragmentId, version: Version, own: Tensor, digest: str) -> bool:
        """Stream the fetched rows of a version from all ranks through this rank, in the order of the fragment.

        Each piece goes into the digest of the whole value, and to the ranks that replicate its rows. Return whether the
        digest is that of the published value.
        """
        hasher = xxh3_128()
        connections = {connection.rank: connection for connection in self.ranks.bulk}

        def take(piece: Tensor, others: list[int]) -> None:
            hasher.update(tensor_bytes(piece))
            for rank in others:
                connections[rank].send_tensor(piece)

        with self._lock:
            for connection in connections.values():
                connection.send_command(RankCommand.RELAY, p, version, self.generation)
            missing = [
                rank for rank, connection in connections.items() if connection.receive_result()[0] is not RankReply.OK
            ]
            for connection in connections.values():
                connection.send_result(RankReply.MISSING if missing else RankReply.OK)
            if missing:
                return False
            self._stream_in_order(p, own, take)
            is_valid = hasher.hexdigest() == digest
            for connection in connections.values():
                connection.send_result(RankReply.OK if is_valid else RankReply.ERROR)
            for connection in connections.values():
                connection.receive_result()
        return is_valid

    def stream_rows(self, p: FragmentId, own: Tensor, take: Callable[[Tensor], None]) -> None:
        """Stream the current fragment from all ranks. Only before training begins."""
        with self._lock:
            for connection in self.ranks.bulk:
                connection.send_command(RankCommand.READ, p, 0, self.generation)
            for connection in self.ranks.bulk:
                connection.receive_result()
            self._stream_in_order(p, own, lambda piece, _: take(piece))

    def _stream_in_order(self, p: FragmentId, own: Tensor, take: Callable[[Tensor, list[int]], None]) -> None:
        connections = {connection.rank: connection for connection in self.ranks.bulk}
        theirs = [row_range.end - row_range.begin for row_range in self.shares[p].row_ranges if row_range.rank]
        buffer = torch.empty(min(PIECE_VALUES, max(theirs, default=0)))
        for row_range in self.shares[p].row_ranges:
            others = [rank for rank, _ in row_range.replicas]
            count = row_range.end - row_range.begin
            for begin in range(0, count, PIECE_VALUES):
                size = min(PIECE_VALUES, count - begin)
                if row_range.rank:
                    piece = buffer[:size]
                    connections[row_range.rank].receive_tensor(piece)
                else:
                    piece = own[row_range.packed_begin + begin : row_range.packed_begin + begin + size]
                take(piece, others)

    def gather_optimizer_state(
        self, key: int, state_copy: optimizer_state.OptimizerStateCopy, buffers: optimizer_state.TensorBuffers
    ) -> optimizer_state.OptimizerStateCopy:
        """Return optimizer state with full tensors: sharded ones gathered from all ranks, the others from this rank.

        Gathered tensors are received into `buffers`, which may be memory-mapped files.
        """
        whole = dict(state_copy.tensors)
        for number, part in state_copy.parts.items():
            own = whole[number]
            whole[number] = buffers[number] if number in buffers else torch.empty(part.sizes, dtype=own.dtype)
            whole[number][part.box.slices] = own.cpu()
        rng_tensors: dict[str, Tensor] = {}
        problem = ""
        with self._lock:
            for connection in self.ranks.bulk:
                connection.send_command(RankCommand.STATE, 0 if state_copy.parts else RNG_ONLY, key, self.generation)
                status, text = connection.receive_result()
                if status is not RankReply.OK:
                    problem = text or f"rank {connection.rank} has dropped it"
                    continue
                for number, offset, shape, dtype in connection.receive_json():
                    kind = getattr(torch, dtype)
                    is_known = offset is not None and number in state_copy.parts and whole[number].dtype == kind
                    rows = whole[number][Box(tuple(offset), tuple(shape)).slices] if is_known else None
                    try:
                        target = rows if rows is not None and rows.is_contiguous() else torch.empty(shape, dtype=kind)
                    except (RuntimeError, MemoryError) as error:
                        # Otherwise the next reply would be read from the middle of this tensor.
                        connection.skip(math.prod(shape) * kind.itemsize)
                        problem = summarize_error(error)
                        continue
                    connection.receive_tensor(target)
                    if rows is not None:
                        if target is not rows:
                            rows.copy_(target)
                    elif offset is None:
                        rng_tensors[number] = target
                    else:
                        problem = f"rank {connection.rank} has optimizer state that rank 0 does not have"
        if problem:
            raise ValueError(problem)
        return state_copy._replace(tensors=whole, events=[], parts={}, other_ranks_tensors=rng_tensors, gather=None)

    def write_shards(self, key: int, state_copy: optimizer_state.OptimizerStateCopy, folder: Path) -> list[Any] | None:
        try:
            return write_shards(self.ranks, self._lock, self.generation, key, state_copy, folder)
        except AtollError:  # the island is broken
            raise
        except Exception:
            with contextlib.suppress(ValueError):  # let the other ranks drop their staged copies
                self.gather_optimizer_state(key, state_copy._replace(tensors={}, parts={}), {})
            raise

    def load_shards(self, part: LearnerPart) -> bool:
        return load_shards(self.ranks, self._lock, self.generation, part)

    # -------------------------------------------------------------------------------------------------- ending

    def fail(self, error: BaseException | type[BaseException]) -> None:
        """Send the error to the other ranks, as far as possible, and wake the threads that wait for them."""
        text = encode_failure(error, 0)
        for connection in self.ranks.control:
            try:
                connection.send_failure(text)
            except AtollError:
                continue
            connection.shut_down_writes()
        self.ranks.shut_down()

    def close(self) -> None:
        """Reply to the requests of all ranks to close, and close the connections."""
        for connection in self.ranks.control:
            connection.send_reply(BoundaryStatus(), b"")
        self.ranks.close()


class IslandView(ModelView):
    def __init__(self, leader: Leader, model: nn.Module, plan: FragmentPlan) -> None:
        super().__init__(model, plan)
        self._leader = leader

    def read(self, fragment: int, out: Tensor) -> None:
        """Read the current fragment from all ranks, or this rank's rows if packed. Only before training begins."""
        super().read(fragment, out)
        if not self.packed:
            self._leader.gather_rows(RankCommand.READ, fragment, 0, out)

    def stream_fragment(self, fragment: int, take: Callable[[Tensor], None]) -> None:
        """Stream the current fragment piece by piece, without the memory for all of it, when ranks have only rows."""
        own = self.buffer(fragment)
        self.read(fragment, own)
        self._leader.stream_rows(fragment, own, take)


class LeaderBoundary(StepBoundary):
    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader
        self._loaded: LearnerPart | None = None  # part of which every rank has loaded its shards
        preload_parts(leader.ranks)

    def prepare_actions(self) -> None:
        reshard(self._leader.fsdp)

    def copy_state(self, action: CopyStateAction) -> None:
        self._leader.staged_count += 1
        super().copy_state(action)

    def save_part(self, action: SavePartAction) -> None:
        self._leader.staged_count += 1
        super().save_part(action)

    def take_optimizer_state(self) -> optimizer_state.OptimizerStateCopy:
        state, key = super().take_optimizer_state(), self._leader.staged_count
        return state._replace(
            gather=partial(self._leader.gather_optimizer_state, key),
            write_shards=partial(self._leader.write_shards, key),
        )

    def load_on_other_ranks(self, part: LearnerPart) -> None:
        self._loaded = part if part.shards is not None and self._leader.load_shards(part) else None

    def make_initial_state(
        self, effect: StartTraining, received: Any, saved: SavedState | None, *args: Any
    ) -> IslandInitialState:
        initial = super().make_initial_state(effect, received, saved, *args)
        if saved is not None and saved.part is self._loaded and initial.prepared is saved.prepared:
            return initial._replace(state=None, is_loaded=True)
        return initial


def _redistribute(share: FragmentSharding, outgoing: dict[int, Tensor]) -> dict[int, Tensor]:
    """Redistribute values: return those that each rank receives, from those that each rank has sent."""
    incoming: dict[int, list[Tensor]] = {rank: [] for rank in outgoing}
    first = dict.fromkeys(outgoing, 0)
    for move in share.transfers:
        if move.source_rank != move.target_rank:
            incoming[move.target_rank].append(
                outgoing[move.source_rank][first[move.source_rank] : first[move.source_rank] + move.numel]
            )
            first[move.source_rank] += move.numel
    return {rank: torch.cat(parts) if parts else torch.empty(0) for rank, parts in incoming.items()}


def _encode_action(action: Action) -> list[Any]:
    """Return the command that makes the other ranks execute their part of an action."""
    match action:
        case CopyAction():
            return ["copy", action.copied.round.fragment, action.copied.serial]
        case AdoptAction():
            effect = action.effect
            return ["adopt", effect.fragment, effect.version, effect.mode, effect.merged_copy]
        case CopyStateAction():
            return ["copy_state"]
        case SavePartAction():
            return ["save_part"]
        case StartAction():
            assert action.initial is not None, "the initial state of an island is not set"
            metadata = action.initial.state[0] if action.initial.state is not None else None
            return ["start", action.initial.warmup_steps, metadata, action.initial.restored, action.initial.is_loaded]
        case StopAction():
            return ["end", action.effect.reason.code, str(action.effect.reason)]


def _encode_commands(commands: list[Any]) -> bytes:
    return json.dumps(commands, separators=(",", ":")).encode()
