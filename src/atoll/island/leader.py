"""Rank 0 of an island of many: it alone speaks to the syncer, and the other ranks do as it says.

At a step boundary all ranks ask and it answers with its list. Where every rank holds whole rows, each sends and fetches
its own, and this one says when (`row_transfer`). Elsewhere it orders rows of one fragment from the others in
the background, puts them together, and hands out those of a version that has arrived. Either way its core hears of a
version when every rank has its rows in host memory, so that nobody waits for any at the boundary where it is adopted.
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
    InitialState,
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
"""Values of other ranks that pass through here at a time: 1 MiB."""

MIN_ROW_TRANSFER_VALUES = 2**18
"""Of the mean fragment, where every rank sends and fetches its own rows of it. A request costs a millisecond of a
processor whatever it carries, and of a smaller fragment a rank may well hold the whole for a moment."""


class LeaderBackground(Protocol):
    """What the leader needs of the background thread of its process."""

    @property
    def syncer_address(self) -> str:
        """The syncer's."""
        ...

    @property
    def has_token(self) -> bool: ...

    def start_row_transfer(self, leader: Leader, rank_rpc: RankRpcClient, ranks: int) -> None: ...


class Leader(SingleRankIsland):
    transfer_mode = "leader"

    def __init__(self, ranks: Ranks, model: nn.Module, background: LeaderBackground, log: logging.Logger) -> None:
        self.ranks = ranks
        self.shares: list[FragmentSharding] = []  # by fragment, where ranks send and fetch their own rows
        self._background = background
        self.fsdp = fsdp_modules(model)
        self.staged_count = 0  # of inner state or of a snapshot's part, counted by all ranks alike
        self.generation = 0  # of incarnations, so that nothing of one is taken for the next
        self.waited_s = 0.0  # for the others at step boundaries
        self._log = log
        self._lock = threading.Lock()  # one order at a time
        self._values_by_rank: list[int] = []  # what each rank gave last
        self._windows: list[list[list[ShardWindow]]] = []  # by follower and fragment, what it holds
        self._owned_windows: list[list[list[ShardWindow]]] = []  # and what of it is asked of it, and of nobody else
        self._boundary_started_at = 0.0

    # -------------------------------------------------------------------------------------------- at a step boundary

    def gather_requests(self, kind: RankRequest, value: int = 0) -> int:
        self._boundary_started_at = time.monotonic()
        self._values_by_rank = [value]
        for line in self.ranks.control:
            theirs, given = line.receive_request()
            if theirs is not kind:
                raise IslandBrokenError(
                    f"rank {line.rank} of this island {REQUEST_VERBS[theirs]} where rank 0 {REQUEST_VERBS[kind]}: all ranks of an "
                    "island do the same at the same step"
                )
            self._values_by_rank.append(given)
            self.preemption_level = max(self.preemption_level, line.preemption_level)
        return sum(
            given for given, counts in zip(self._values_by_rank, self.ranks.counts_tokens, strict=True) if counts
        )

    def broadcast_actions(self, actions: list[Action], status: BoundaryStatus) -> list[Action]:
        words = _encode_commands([_encode_action(action) for action in actions]) if actions else b""
        starting = next((action.initial for action in actions if type(action) is StartAction), None)
        for line in self.ranks.control:
            line.send_reply(status, words)
            if starting is not None:
                self._send_state(line, starting)
        self.waited_s += time.monotonic() - self._boundary_started_at
        return actions

    def pause_ranks(self) -> None:
        for line in self.ranks.control:
            line.send_reply(BoundaryStatus(is_paused=True), b"")

    def broadcast(self, commands: list[Any]) -> None:
        self.gather_requests(RankRequest.JOIN)
        for line in self.ranks.control:
            line.send_reply(BoundaryStatus(), _encode_commands(commands) if commands else b"")

    def scatter_samples(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Samples by rank, those of one step in a row. Ranks that train on the same data get the same."""
        starts, begin = {}, 0
        for given, counts, slot in zip(
            self._values_by_rank, self.ranks.counts_tokens, self.ranks.data_slots, strict=True
        ):
            if counts:
                starts[slot] = (begin, begin + given)
                begin += given
        for line in self.ranks.control:
            first, last = starts[self.ranks.data_slots[line.rank]]
            line.send_reply(BoundaryStatus(), _encode_commands([["samples", numbers[first:last]]]))
        first, last = starts[self.ranks.data_slots[0]]
        return numbers[first:last]

    def _send_state(self, line: RankConnection, starting: InitialState) -> None:
        """The part of this rank of everything that its optimizer starts with, tensor by tensor."""
        dealt = cut_for_rank(self.ranks, line.rank, *starting.state) if starting.state is not None else ()
        own = starting.part.rng_states(line.rank) if starting.part is not None else {}
        send_tensors(line, chain(dealt, own.items()))

    # ----------------------------------------------------------------------------------------------- what it is made of

    def make_view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        mine = assign_owners(self.ranks.boxes, plan.tensors)
        fragments = range(len(plan.fragments))
        others = range(1, self.ranks.size)
        self._windows = [[shard_windows(plan, p, self.ranks.boxes[rank]) for p in fragments] for rank in others]
        self._owned_windows = [
            [shard_windows(plan, p, self.ranks.boxes[rank], mine[rank]) for p in fragments] for rank in others
        ]
        view = IslandView(self, model, plan)  # all ranks make one at this moment: it may be theirs together to look at
        if self._negotiate_row_transfer(plan):
            self.transfer_mode = "rows"
            self.shares = [shard_fragment(plan, p, self.ranks.boxes) for p in fragments]
            self._background.start_row_transfer(self, RankRpcClient(self.ranks.rows), self.ranks.size)
            view.packed = True
        return view

    def _negotiate_row_transfer(self, plan: FragmentPlan) -> bool:
        """Do all ranks send and fetch their own rows? For that they hold whole ones, of fragments that are worth a
        request of each rank, and reach the syncer."""
        unfit = ""
        if not is_sharded_by_rows(self.ranks.boxes, plan.tensors):
            unfit = "they do not hold whole rows"
        elif plan.total_numel < MIN_ROW_TRANSFER_VALUES * len(plan.fragments):
            unfit = f"fragments of less than {MIN_ROW_TRANSFER_VALUES:,} values are not worth requests of each"
        if unfit:
            self._log.info("rank 0 sends and fetches for all ranks of this island: %s", unfit)
            self.broadcast([["transfer_mode", ""]])
            return False
        self.broadcast([["reach", self._background.syncer_address, self._background.has_token]])
        self.gather_requests(RankRequest.JOIN)
        away = [rank for rank, reaches in enumerate(self._values_by_rank) if rank and not reaches]
        for line in self.ranks.control:
            line.send_reply(BoundaryStatus(), _encode_commands([["transfer_mode", "" if away else "rows"]]))
        if away:
            said = "rank 0 sends and fetches for all ranks of this island: rank %s cannot speak to the syncer"
            self._log.warning(said, ", ".join(map(str, away)))
        else:
            self._log.info("every rank of this island sends and fetches its own rows")
        return not away

    def make_fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return FragmentTensors(view, p, up, self, self.shares[p] if self.shares else None)

    def make_boundary(self, *args: Any) -> StepBoundary:
        self.generation += 1
        self.staged_count = 0
        return LeaderBoundary(self, *args)

    # ------------------------------------------------------------------------------------------------ in the background

    def gather_rows(self, order: RankCommand, p: FragmentId, key: int, whole: Tensor) -> None:
        """The rows of the other ranks into a whole flat fragment, which has the leader's own."""
        asked = [
            (line, parts)
            for line, fragments in zip(self.ranks.bulk, self._owned_windows, strict=True)
            if (parts := [window for window in fragments[p] if window.packed_begin < window.packed_end])
        ]
        gone = ""
        with self._lock:
            for line, _ in asked:
                line.send_command(order, p, key, self.generation)
            for line, parts in asked:
                status, why = line.receive_result()
                if status is RankReply.OK:
                    for window in parts:
                        line.receive_tensor(window.view(whole))
                else:
                    gone = why or f"rank {line.rank} does not have it any more"
        if gone:
            raise CopyUnavailableError(gone)

    def scatter_version(self, p: FragmentId, version: Version, whole: Tensor) -> None:
        with self._lock:
            for line, fragments in zip(self.ranks.bulk, self._windows, strict=True):
                line.send_command(RankCommand.VERSION, p, version, self.generation)
                for window in fragments[p]:
                    line.send_tensor(window.view(whole))
            for line in self.ranks.bulk:
                line.receive_result()

    def exchange_edges(self, p: FragmentId, serial: int, given: Tensor, by: Codec) -> Tensor:
        """The values of blocks that reach over the rows of one rank, to the rank that encodes them; ours are returned.
        All ranks have copied, or none encodes."""
        share, gone = self.shares[p], ""
        theirs: dict[int, Tensor] = {0: given}
        with self._lock:
            for line in self.ranks.bulk:
                line.send_command(RankCommand.EDGES, p, serial, self.generation)
            for line in self.ranks.bulk:
                status, why = line.receive_result()
                if status is RankReply.OK:
                    theirs[line.rank] = torch.empty(sum(move.numel for move in share.sends_from(line.rank)))
                    line.receive_tensor(theirs[line.rank])
                else:
                    gone = why or f"rank {line.rank} does not have it any more"
            taken = _redistribute(share, theirs) if not gone else {}
            for line in self.ranks.bulk:
                if line.rank not in theirs:
                    continue
                line.send_result(RankReply.MISSING if gone else RankReply.OK, by.name)
                if not gone:
                    line.send_tensor(taken[line.rank])
        if gone:
            raise CopyUnavailableError(gone)
        return taken[0]

    def relay_version(self, p: FragmentId, version: Version, own: Tensor, digest: str) -> bool:
        """What every rank has fetched of a version goes by here in the order of the fragment, a little at a time: into
        the digest of the whole, and on to those who hold the same rows. Is it what was published?"""
        hashed = xxh3_128()
        lines = {line.rank: line for line in self.ranks.bulk}

        def take(piece: Tensor, others: list[int]) -> None:
            hashed.update(tensor_bytes(piece))
            for rank in others:
                lines[rank].send_tensor(piece)

        with self._lock:
            for line in lines.values():
                line.send_command(RankCommand.RELAY, p, version, self.generation)
            away = [rank for rank, line in lines.items() if line.receive_result()[0] is not RankReply.OK]
            for line in lines.values():
                line.send_result(RankReply.MISSING if away else RankReply.OK)
            if away:
                return False
            self._stream_in_order(p, own, take)
            is_right = hashed.hexdigest() == digest
            for line in lines.values():
                line.send_result(RankReply.OK if is_right else RankReply.ERROR)
            for line in lines.values():
                line.receive_result()
        return is_right

    def stream_rows(self, p: FragmentId, own: Tensor, take: Callable[[Tensor], None]) -> None:
        """The fragment as it stands, from all ranks. Only before training begins."""
        with self._lock:
            for line in self.ranks.bulk:
                line.send_command(RankCommand.READ, p, 0, self.generation)
            for line in self.ranks.bulk:
                line.receive_result()
            self._stream_in_order(p, own, lambda piece, _: take(piece))

    def _stream_in_order(self, p: FragmentId, own: Tensor, take: Callable[[Tensor, list[int]], None]) -> None:
        lines = {line.rank: line for line in self.ranks.bulk}
        theirs = [stretch.end - stretch.begin for stretch in self.shares[p].row_ranges if stretch.rank]
        room = torch.empty(min(PIECE_VALUES, max(theirs, default=0)))
        for stretch in self.shares[p].row_ranges:
            others = [rank for rank, _ in stretch.replicas]
            count = stretch.end - stretch.begin
            for begin in range(0, count, PIECE_VALUES):
                size = min(PIECE_VALUES, count - begin)
                if stretch.rank:
                    piece = room[:size]
                    lines[stretch.rank].receive_tensor(piece)
                else:
                    piece = own[stretch.packed_begin + begin : stretch.packed_begin + begin + size]
                take(piece, others)

    def gather_optimizer_state(
        self, key: int, taken: optimizer_state.OptimizerStateCopy, rooms: optimizer_state.TensorBuffers
    ) -> optimizer_state.OptimizerStateCopy:
        """Inner state with whole tensors: those that are sharded come row by row from all ranks, the others are ours.
        They come into their places in `rooms`, which may be those of a file."""
        whole = dict(taken.tensors)
        for number, part in taken.parts.items():
            own = whole[number]
            whole[number] = rooms[number] if number in rooms else torch.empty(part.sizes, dtype=own.dtype)
            whole[number][part.box.slices] = own.cpu()
        beside: dict[str, Tensor] = {}
        wrong = ""
        with self._lock:
            for line in self.ranks.bulk:
                line.send_command(RankCommand.STATE, 0 if taken.parts else RNG_ONLY, key, self.generation)
                status, why = line.receive_result()
                if status is not RankReply.OK:
                    wrong = why or f"rank {line.rank} does not have it any more"
                    continue
                for number, offset, shape, dtype in line.receive_json():
                    kind = getattr(torch, dtype)
                    is_known = offset is not None and number in taken.parts and whole[number].dtype == kind
                    rows = whole[number][Box(tuple(offset), tuple(shape)).slices] if is_known else None
                    try:
                        came = rows if rows is not None and rows.is_contiguous() else torch.empty(shape, dtype=kind)
                    except (RuntimeError, MemoryError) as error:
                        line.skip(math.prod(shape) * kind.itemsize)  # or the next answer would be read from its middle
                        wrong = summarize_error(error)
                        continue
                    line.receive_tensor(came)
                    if rows is not None:
                        if came is not rows:
                            rows.copy_(came)
                    elif offset is None:
                        beside[number] = came
                    else:
                        wrong = f"rank {line.rank} has inner state that rank 0 does not have"
        if wrong:
            raise ValueError(wrong)
        return taken._replace(tensors=whole, events=[], parts={}, other_ranks_tensors=beside, gather=None)

    def write_shards(self, key: int, taken: optimizer_state.OptimizerStateCopy, folder: Path) -> list[Any] | None:
        try:
            return write_shards(self.ranks, self._lock, self.generation, key, taken, folder)
        except AtollError:  # the island is broken
            raise
        except Exception:
            with contextlib.suppress(ValueError):  # nobody comes for their copies any more
                self.gather_optimizer_state(key, taken._replace(tensors={}, parts={}), {})
            raise

    def load_shards(self, part: LearnerPart) -> bool:
        return load_shards(self.ranks, self._lock, self.generation, part)

    # -------------------------------------------------------------------------------------------------- ending

    def fail(self, error: BaseException | type[BaseException]) -> None:
        """The others are told why, as far as they can be; whatever waits for them here waits no longer."""
        text = encode_failure(error, 0)
        for line in self.ranks.control:
            try:
                line.send_failure(text)
            except AtollError:
                continue
            line.shut_down_writes()
        self.ranks.shut_down()

    def close(self) -> None:
        """All ranks have asked for it."""
        for line in self.ranks.control:
            line.send_reply(BoundaryStatus(), b"")
        self.ranks.close()


class IslandView(ModelView):
    def __init__(self, leader: Leader, model: nn.Module, plan: FragmentPlan) -> None:
        super().__init__(model, plan)
        self._leader = leader

    def read(self, fragment: int, out: Tensor) -> None:
        """The fragment as it stands, from all ranks, or packed. Only before training begins."""
        super().read(fragment, out)
        if not self.packed:
            self._leader.gather_rows(RankCommand.READ, fragment, 0, out)

    def stream_fragment(self, fragment: int, take: Callable[[Tensor], None]) -> None:
        """The same piece by piece, where the leader has its own rows only: the whole flows by, and is nowhere."""
        own = self.buffer(fragment)
        self.read(fragment, own)
        self._leader.stream_rows(fragment, own, take)


class LeaderBoundary(StepBoundary):
    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader
        self._loaded: LearnerPart | None = None  # of which every rank holds its own
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
        taken, key = super().take_optimizer_state(), self._leader.staged_count
        return taken._replace(
            gather=partial(self._leader.gather_optimizer_state, key),
            write_shards=partial(self._leader.write_shards, key),
        )

    def load_on_other_ranks(self, part: LearnerPart) -> None:
        self._loaded = part if part.shards is not None and self._leader.load_shards(part) else None

    def make_initial_state(
        self, effect: StartTraining, given: Any, saved: SavedState | None, *args: Any
    ) -> InitialState:
        starting = super().make_initial_state(effect, given, saved, *args)
        if saved is not None and saved.part is self._loaded and starting.prepared is saved.prepared:
            return starting._replace(state=None, is_loaded=True)
        return starting


def _redistribute(share: FragmentSharding, given: dict[int, Tensor]) -> dict[int, Tensor]:
    """What each rank gave to others, as those take it."""
    taken: dict[int, list[Tensor]] = {rank: [] for rank in given}
    first = dict.fromkeys(given, 0)
    for move in share.transfers:
        if move.source_rank != move.target_rank:
            taken[move.target_rank].append(
                given[move.source_rank][first[move.source_rank] : first[move.source_rank] + move.numel]
            )
            first[move.source_rank] += move.numel
    return {rank: torch.cat(parts) if parts else torch.empty(0) for rank, parts in taken.items()}


def _encode_action(action: Action) -> list[Any]:
    """What the other ranks have to know of an action."""
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
            assert action.initial is not None, "an island starts before it is known with what"
            about = action.initial.state[0] if action.initial.state is not None else None
            return ["start", action.initial.warmup_steps, about, action.initial.restored, action.initial.is_loaded]
        case StopAction():
            return ["end", action.effect.reason.code, str(action.effect.reason)]


def _encode_commands(words: list[Any]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode()
