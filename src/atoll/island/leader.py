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
from atoll.errors import AtollError, IslandBroken
from atoll.island.boundary import (
    Action,
    Adopt,
    CopyAction,
    End,
    Give,
    Save,
    Saved,
    SingleRankIsland,
    Start,
    Starting,
    StepBoundary,
    cause_of,
)
from atoll.island.fragments import CopyGone, FragmentTensors
from atoll.island.optimizer_state_io import cut_for, get_ready, load_by_all, send_tensors, write_by_all
from atoll.island.rank_connection import (
    CALLS,
    ONLY_BESIDE,
    BoundaryStatus,
    Order,
    RankConnection,
    RankReply,
    RankRequest,
    bytes_of,
    failure_text,
)
from atoll.island.rank_rpc import RankRpcClient
from atoll.island.topology import Ranks, fsdp_modules, reshard
from atoll.store.learner_parts import Part
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import Codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.row_sharding import RowShare, lie_in_rows, share_out
from atoll.tensors.sharding import Box, Window, owned, windows

PIECE = 2**18
"""Values of other ranks that pass through here at a time: 1 MiB."""

LEAST_OWN_VALUES = 2**18
"""Of the mean fragment, where every rank sends and fetches its own rows of it. A request costs a millisecond of a
processor whatever it carries, and of a smaller fragment a rank may well hold the whole for a moment."""


class LeaderBackground(Protocol):
    """What the leader needs of the background thread of its process."""

    @property
    def address(self) -> str:
        """The syncer's."""
        ...

    @property
    def has_token(self) -> bool: ...

    def lead(self, leader: Leader, hands: RankRpcClient, ranks: int) -> None: ...


class Leader(SingleRankIsland):
    way = "leader"

    def __init__(self, ranks: Ranks, model: nn.Module, background: LeaderBackground, log: logging.Logger) -> None:
        self.ranks = ranks
        self.shares: list[RowShare] = []  # by fragment, where ranks send and fetch their own rows
        self._background = background
        self.fsdp = fsdp_modules(model)
        self.parcel = 0  # of inner state or of a snapshot's part, counted by all ranks alike
        self.generation = 0  # of incarnations, so that nothing of one is taken for the next
        self.waited_s = 0.0  # for the others at step boundaries
        self._log = log
        self._lock = threading.Lock()  # one order at a time
        self._given: list[int] = []  # what each rank gave last
        self._theirs: list[list[list[Window]]] = []  # by follower and fragment, what it holds
        self._owned: list[list[list[Window]]] = []  # and what of it is asked of it, and of nobody else
        self._began = 0.0

    # -------------------------------------------------------------------------------------------- at a step boundary

    def hear(self, kind: RankRequest, value: int = 0) -> int:
        self._began = time.monotonic()
        self._given = [value]
        for line in self.ranks.control:
            theirs, given = line.hear()
            if theirs is not kind:
                raise IslandBroken(
                    f"rank {line.rank} of this island {CALLS[theirs]} where rank 0 {CALLS[kind]}: all ranks of an "
                    "island do the same at the same step"
                )
            self._given.append(given)
            self.noticed = max(self.noticed, line.noticed)
        return sum(given for given, counts in zip(self._given, self.ranks.counts, strict=True) if counts)

    def agree(self, actions: list[Action], told: BoundaryStatus) -> list[Action]:
        words = _encoded([_words_of(action) for action in actions]) if actions else b""
        starting = next((action.inner for action in actions if type(action) is Start), None)
        for line in self.ranks.control:
            line.answer(told, words)
            if starting is not None:
                self._send_state(line, starting)
        self.waited_s += time.monotonic() - self._began
        return actions

    def stay(self) -> None:
        for line in self.ranks.control:
            line.answer(BoundaryStatus(paused=True), b"")

    def say(self, words: list[Any]) -> None:
        self.hear(RankRequest.JOIN)
        for line in self.ranks.control:
            line.answer(BoundaryStatus(), _encoded(words) if words else b"")

    def deal(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Samples by rank, those of one step in a row. Ranks that train on the same data get the same."""
        starts, begin = {}, 0
        for given, counts, slot in zip(self._given, self.ranks.counts, self.ranks.slots, strict=True):
            if counts:
                starts[slot] = (begin, begin + given)
                begin += given
        for line in self.ranks.control:
            first, last = starts[self.ranks.slots[line.rank]]
            line.answer(BoundaryStatus(), _encoded([["samples", numbers[first:last]]]))
        first, last = starts[self.ranks.slots[0]]
        return numbers[first:last]

    def _send_state(self, line: RankConnection, starting: Starting) -> None:
        """The part of this rank of everything that its optimizer starts with, tensor by tensor."""
        dealt = cut_for(self.ranks, line.rank, *starting.state) if starting.state is not None else ()
        own = starting.part.rng_of(line.rank) if starting.part is not None else {}
        send_tensors(line, chain(dealt, own.items()))

    # ----------------------------------------------------------------------------------------------- what it is made of

    def view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        mine = owned(self.ranks.boxes, plan.tensors)
        fragments = range(len(plan.fragments))
        others = range(1, self.ranks.size)
        self._theirs = [[windows(plan, p, self.ranks.boxes[rank]) for p in fragments] for rank in others]
        self._owned = [[windows(plan, p, self.ranks.boxes[rank], mine[rank]) for p in fragments] for rank in others]
        view = IslandView(self, model, plan)  # all ranks make one at this moment: it may be theirs together to look at
        if self._agree_on_rows(plan):
            self.way = "rows"
            self.shares = [share_out(plan, p, self.ranks.boxes) for p in fragments]
            self._background.lead(self, RankRpcClient(self.ranks.rows), self.ranks.size)
            view.packed = True
        return view

    def _agree_on_rows(self, plan: FragmentPlan) -> bool:
        """Do all ranks send and fetch their own rows? For that they hold whole ones, of fragments that are worth a
        request of each rank, and reach the syncer."""
        unfit = ""
        if not lie_in_rows(self.ranks.boxes, plan.tensors):
            unfit = "they do not hold whole rows"
        elif plan.total_numel < LEAST_OWN_VALUES * len(plan.fragments):
            unfit = f"fragments of less than {LEAST_OWN_VALUES:,} values are not worth requests of each"
        if unfit:
            self._log.info("rank 0 sends and fetches for all ranks of this island: %s", unfit)
            self.say([["way", ""]])
            return False
        self.say([["reach", self._background.address, self._background.has_token]])
        self.hear(RankRequest.JOIN)
        away = [rank for rank, reaches in enumerate(self._given) if rank and not reaches]
        for line in self.ranks.control:
            line.answer(BoundaryStatus(), _encoded([["way", "" if away else "rows"]]))
        if away:
            said = "rank 0 sends and fetches for all ranks of this island: rank %s cannot speak to the syncer"
            self._log.warning(said, ", ".join(map(str, away)))
        else:
            self._log.info("every rank of this island sends and fetches its own rows")
        return not away

    def fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return FragmentTensors(view, p, up, self, self.shares[p] if self.shares else None)

    def boundary(self, *args: Any) -> StepBoundary:
        self.generation += 1
        self.parcel = 0
        return LeaderBoundary(self, *args)

    # ------------------------------------------------------------------------------------------------ in the background

    def gather(self, order: Order, p: FragmentId, key: int, whole: Tensor) -> None:
        """The rows of the other ranks into a whole flat fragment, which has the leader's own."""
        asked = [
            (line, parts)
            for line, fragments in zip(self.ranks.bulk, self._owned, strict=True)
            if (parts := [window for window in fragments[p] if window.first < window.last])
        ]
        gone = ""
        with self._lock:
            for line, _ in asked:
                line.order(order, p, key, self.generation)
            for line, parts in asked:
                status, why = line.said()
                if status is RankReply.HERE:
                    for window in parts:
                        line.receive_tensor(window.of(whole))
                else:
                    gone = why or f"rank {line.rank} does not have it any more"
        if gone:
            raise CopyGone(gone)

    def share(self, p: FragmentId, version: Version, whole: Tensor) -> None:
        with self._lock:
            for line, fragments in zip(self.ranks.bulk, self._theirs, strict=True):
                line.order(Order.SHARE, p, version, self.generation)
                for window in fragments[p]:
                    line.send_tensor(window.of(whole))
            for line in self.ranks.bulk:
                line.said()

    def exchange(self, p: FragmentId, serial: int, given: Tensor, by: Codec) -> Tensor:
        """The values of blocks that reach over the rows of one rank, to the rank that encodes them; ours are returned.
        All ranks have copied, or none encodes."""
        share, gone = self.shares[p], ""
        theirs: dict[int, Tensor] = {0: given}
        with self._lock:
            for line in self.ranks.bulk:
                line.order(Order.EDGES, p, serial, self.generation)
            for line in self.ranks.bulk:
                status, why = line.said()
                if status is RankReply.HERE:
                    theirs[line.rank] = torch.empty(sum(move.size for move in share.given(line.rank)))
                    line.receive_tensor(theirs[line.rank])
                else:
                    gone = why or f"rank {line.rank} does not have it any more"
            taken = _dealt_again(share, theirs) if not gone else {}
            for line in self.ranks.bulk:
                if line.rank not in theirs:
                    continue
                line.say(RankReply.GONE if gone else RankReply.HERE, by.name)
                if not gone:
                    line.send_tensor(taken[line.rank])
        if gone:
            raise CopyGone(gone)
        return taken[0]

    def pass_on(self, p: FragmentId, version: Version, own: Tensor, digest: str) -> bool:
        """What every rank has fetched of a version goes by here in the order of the fragment, a little at a time: into
        the digest of the whole, and on to those who hold the same rows. Is it what was published?"""
        hashed = xxh3_128()
        lines = {line.rank: line for line in self.ranks.bulk}

        def take(piece: Tensor, others: list[int]) -> None:
            hashed.update(bytes_of(piece))
            for rank in others:
                lines[rank].send_tensor(piece)

        with self._lock:
            for line in lines.values():
                line.order(Order.PASS, p, version, self.generation)
            away = [rank for rank, line in lines.items() if line.said()[0] is not RankReply.HERE]
            for line in lines.values():
                line.say(RankReply.GONE if away else RankReply.HERE)
            if away:
                return False
            self._in_order(p, own, take)
            is_right = hashed.hexdigest() == digest
            for line in lines.values():
                line.say(RankReply.HERE if is_right else RankReply.WRONG)
            for line in lines.values():
                line.said()
        return is_right

    def read_in_order(self, p: FragmentId, own: Tensor, take: Callable[[Tensor], None]) -> None:
        """The fragment as it stands, from all ranks. Only before training begins."""
        with self._lock:
            for line in self.ranks.bulk:
                line.order(Order.READ, p, 0, self.generation)
            for line in self.ranks.bulk:
                line.said()
            self._in_order(p, own, lambda piece, _: take(piece))

    def _in_order(self, p: FragmentId, own: Tensor, take: Callable[[Tensor, list[int]], None]) -> None:
        lines = {line.rank: line for line in self.ranks.bulk}
        theirs = [stretch.end - stretch.begin for stretch in self.shares[p].stretches if stretch.rank]
        room = torch.empty(min(PIECE, max(theirs, default=0)))
        for stretch in self.shares[p].stretches:
            others = [rank for rank, _ in stretch.others]
            count = stretch.end - stretch.begin
            for begin in range(0, count, PIECE):
                size = min(PIECE, count - begin)
                if stretch.rank:
                    piece = room[:size]
                    lines[stretch.rank].receive_tensor(piece)
                else:
                    piece = own[stretch.first + begin : stretch.first + begin + size]
                take(piece, others)

    def gather_inner(
        self, key: int, taken: optimizer_state.Taken, rooms: optimizer_state.Rooms
    ) -> optimizer_state.Taken:
        """Inner state with whole tensors: those that are sharded come row by row from all ranks, the others are ours.
        They come into their places in `rooms`, which may be those of a file."""
        whole = dict(taken.tensors)
        for number, part in taken.parts.items():
            own = whole[number]
            whole[number] = rooms[number] if number in rooms else torch.empty(part.sizes, dtype=own.dtype)
            whole[number][part.box.where] = own.cpu()
        beside: dict[str, Tensor] = {}
        wrong = ""
        with self._lock:
            for line in self.ranks.bulk:
                line.order(Order.INNER, 0 if taken.parts else ONLY_BESIDE, key, self.generation)
                status, why = line.said()
                if status is not RankReply.HERE:
                    wrong = why or f"rank {line.rank} does not have it any more"
                    continue
                for number, offset, shape, dtype in line.receive_json():
                    kind = getattr(torch, dtype)
                    is_known = offset is not None and number in taken.parts and whole[number].dtype == kind
                    rows = whole[number][Box(tuple(offset), tuple(shape)).where] if is_known else None
                    try:
                        came = rows if rows is not None and rows.is_contiguous() else torch.empty(shape, dtype=kind)
                    except (RuntimeError, MemoryError) as error:
                        line.skip(math.prod(shape) * kind.itemsize)  # or the next answer would be read from its middle
                        wrong = cause_of(error)
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
        return taken._replace(tensors=whole, events=[], parts={}, beside=beside, gather=None)

    def write_by_all(self, key: int, taken: optimizer_state.Taken, folder: Path) -> list[Any] | None:
        try:
            return write_by_all(self.ranks, self._lock, self.generation, key, taken, folder)
        except AtollError:  # the island is broken
            raise
        except Exception:
            with contextlib.suppress(ValueError):  # nobody comes for their copies any more
                self.gather_inner(key, taken._replace(tensors={}, parts={}), {})
            raise

    def load_by_all(self, part: Part) -> bool:
        return load_by_all(self.ranks, self._lock, self.generation, part)

    # -------------------------------------------------------------------------------------------------- ending

    def fail(self, wrong: BaseException | type[BaseException]) -> None:
        """The others are told why, as far as they can be; whatever waits for them here waits no longer."""
        text = failure_text(wrong, 0)
        for line in self.ranks.control:
            try:
                line.fail(text)
            except AtollError:
                continue
            line.shut_after_last_words()
        self.ranks.shut()

    def close(self) -> None:
        """All ranks have asked for it."""
        for line in self.ranks.control:
            line.answer(BoundaryStatus(), b"")
        self.ranks.close()


class IslandView(ModelView):
    def __init__(self, leader: Leader, model: nn.Module, plan: FragmentPlan) -> None:
        super().__init__(model, plan)
        self._leader = leader

    def read(self, fragment: int, out: Tensor) -> None:
        """The fragment as it stands, from all ranks, or packed. Only before training begins."""
        super().read(fragment, out)
        if not self.packed:
            self._leader.gather(Order.READ, fragment, 0, out)

    def flow(self, fragment: int, take: Callable[[Tensor], None]) -> None:
        """The same piece by piece, where the leader has its own rows only: the whole flows by, and is nowhere."""
        own = self.buffer(fragment)
        self.read(fragment, own)
        self._leader.read_in_order(fragment, own, take)


class LeaderBoundary(StepBoundary):
    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader
        self._loaded: Part | None = None  # of which every rank holds its own
        get_ready(leader.ranks)

    def before(self) -> None:
        reshard(self._leader.fsdp)

    def give(self, action: Give) -> None:
        self._leader.parcel += 1
        super().give(action)

    def save(self, action: Save) -> None:
        self._leader.parcel += 1
        super().save(action)

    def take_inner(self) -> optimizer_state.Taken:
        taken, key = super().take_inner(), self._leader.parcel
        return taken._replace(
            gather=partial(self._leader.gather_inner, key), spread=partial(self._leader.write_by_all, key)
        )

    def others_load(self, part: Part) -> None:
        self._loaded = part if part.shards is not None and self._leader.load_by_all(part) else None

    def starting(self, effect: StartTraining, given: Any, saved: Saved | None, *args: Any) -> Starting:
        starting = super().starting(effect, given, saved, *args)
        if saved is not None and saved.part is self._loaded and starting.prepared is saved.inner:
            return starting._replace(state=None, is_loaded=True)
        return starting


def _dealt_again(share: RowShare, given: dict[int, Tensor]) -> dict[int, Tensor]:
    """What each rank gave to others, as those take it."""
    taken: dict[int, list[Tensor]] = {rank: [] for rank in given}
    first = dict.fromkeys(given, 0)
    for move in share.moves:
        if move.giver != move.taker:
            taken[move.taker].append(given[move.giver][first[move.giver] : first[move.giver] + move.size])
            first[move.giver] += move.size
    return {rank: torch.cat(parts) if parts else torch.empty(0) for rank, parts in taken.items()}


def _words_of(action: Action) -> list[Any]:
    """What the other ranks have to know of an action."""
    match action:
        case CopyAction():
            return ["copy", action.copied.round.fragment, action.copied.serial]
        case Adopt():
            effect = action.effect
            return ["adopt", effect.fragment, effect.version, effect.how, effect.merged_copy]
        case Give():
            return ["give"]
        case Save():
            return ["save"]
        case Start():
            assert action.inner is not None, "an island starts before it is known with what"
            about = action.inner.state[0] if action.inner.state is not None else None
            return ["start", action.inner.warmup_steps, about, action.inner.restored, action.inner.is_loaded]
        case End():
            return ["end", action.effect.reason.code, str(action.effect.reason)]


def _encoded(words: list[Any]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode()
