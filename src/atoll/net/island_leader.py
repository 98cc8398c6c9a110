"""Rank 0 of an island of many: it alone speaks to the syncer, and the other ranks do as it says.

At a step boundary all ranks ask and it answers with its list. In the background it orders rows of one fragment from the
others and puts them together, and hands out those of a version that has arrived; its core hears of a version when every
rank has its rows in host memory, so that nobody waits for any at the boundary at which it is adopted.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.types import FragmentId, Version
from atoll.ml import inner_state
from atoll.ml.codecs import Codec
from atoll.ml.model import ModelView
from atoll.ml.plan import FragmentPlan
from atoll.ml.shares import Window, owned, windows
from atoll.net.island_tensors import Buffer, Copied, CopyGone, FragmentTensors
from atoll.net.learner_errors import AtollError, IslandBroken
from atoll.net.rank_lines import CALLS, Ask, Line, Order, Status, Told, failure_text
from atoll.net.ranks import Ranks, fsdp_modules, reshard
from atoll.net.step_boundary import Action, Adopt, Copy, End, Give, Save, Solo, Start, Starting, StepBoundary


class Leader(Solo):
    def __init__(self, ranks: Ranks, model: nn.Module, log: logging.Logger) -> None:
        self.ranks = ranks
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

    def hear(self, kind: Ask, value: int = 0) -> int:
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
        return sum(given for given, counts in zip(self._given, self.ranks.counts, strict=True) if counts)

    def agree(self, actions: list[Action], told: Told) -> list[Action]:
        words = _encoded([_words_of(action) for action in actions]) if actions else b""
        starting = next((action.inner for action in actions if type(action) is Start), None)
        for line in self.ranks.control:
            line.answer(told, words)
            if starting is not None:
                self._send_state(line, starting)
        self.waited_s += time.monotonic() - self._began
        return actions

    def pulse(self) -> None:
        """While it joins: the others know that it is still there."""
        self.say([])

    def say(self, words: list[Any]) -> None:
        self.hear(Ask.JOIN)
        for line in self.ranks.control:
            line.answer(Told(), _encoded(words) if words else b"")

    def deal(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Samples by rank, those of one step in a row. Ranks that train on the same data get the same."""
        starts, begin = {}, 0
        for given, counts, slot in zip(self._given, self.ranks.counts, self.ranks.slots, strict=True):
            if counts:
                starts[slot] = (begin, begin + given)
                begin += given
        for line in self.ranks.control:
            first, last = starts[self.ranks.slots[line.rank]]
            line.answer(Told(), _encoded([["samples", numbers[first:last]]]))
        first, last = starts[self.ranks.slots[0]]
        return numbers[first:last]

    def _send_state(self, line: Line, starting: Starting) -> None:
        """The part of this rank of everything that its optimizer starts with, tensor by tensor."""
        tensors: dict[str, Tensor] = {}
        if starting.state is not None:
            about, state = starting.state
            boxes = self.ranks.boxes[line.rank]
            for number, (name, is_complex) in inner_state.named_numbers(about).items():
                sizes = tuple(about["parameters"][name]["shape"])
                tensors[number] = inner_state.part_for(state[number], is_complex, sizes, boxes.get(name))
        if starting.part is not None:
            tensors |= starting.part.rng_of(line.rank)
        line.send_json([[name, _dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()])
        for tensor in tensors.values():
            line.send_tensor(tensor)

    # ----------------------------------------------------------------------------------------------- what it is made of

    def view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        mine = owned(self.ranks.boxes, plan.tensors)
        fragments = range(len(plan.fragments))
        others = range(1, self.ranks.size)
        self._theirs = [[windows(plan, p, self.ranks.boxes[rank]) for p in fragments] for rank in others]
        self._owned = [[windows(plan, p, self.ranks.boxes[rank], mine[rank]) for p in fragments] for rank in others]
        return IslandView(self, model, plan)

    def fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return LeaderFragment(self, view, p, up)

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
                if status is Status.HERE:
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

    def gather_inner(self, key: int, taken: inner_state.Taken) -> inner_state.Taken:
        """Inner state with whole tensors: those that are sharded come row by row from all ranks, the others are ours.
        One tensor after the other, so that no rank but this one ever holds a whole one."""
        whole = {
            number: torch.empty(taken.parts[number].sizes, dtype=tensor.dtype) if number in taken.parts else tensor
            for number, tensor in taken.tensors.items()
        }
        for number, part in taken.parts.items():
            whole[number][part.box.where] = taken.tensors[number].cpu()
        beside: dict[str, Tensor] = {}
        wrong = ""
        with self._lock:
            for line in self.ranks.bulk:
                line.order(Order.INNER, 0, key, self.generation)
                status, why = line.said()
                if status is not Status.HERE:
                    wrong = why or f"rank {line.rank} does not have it any more"
                    continue
                for number, offset, shape, dtype in line.receive_json():
                    came = torch.empty(shape, dtype=getattr(torch, dtype))
                    line.receive_tensor(came)
                    if offset is None:
                        beside[number] = came
                    elif number in taken.parts:
                        where = tuple(slice(b, b + s) for b, s in zip(offset, shape, strict=True))
                        whole[number][where] = came
                    else:
                        wrong = f"rank {line.rank} has inner state that rank 0 does not have"
        if wrong:
            raise ValueError(wrong)
        return taken._replace(tensors=whole, events=[], parts={}, beside=beside, gather=None)

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
            line.answer(Told(), b"")
        self.ranks.close()


class IslandView(ModelView):
    def __init__(self, leader: Leader, model: nn.Module, plan: FragmentPlan) -> None:
        super().__init__(model, plan)
        self._leader = leader

    def read(self, fragment: int, out: Tensor) -> None:
        """The fragment as it stands, from all ranks. Only before training begins."""
        super().read(fragment, out)
        self._leader.gather(Order.READ, fragment, 0, out)


class LeaderFragment(FragmentTensors):
    def __init__(self, leader: Leader, view: ModelView, p: FragmentId, up: Codec) -> None:
        super().__init__(view, p, up)
        self._leader = leader

    def begin_copy(self, copied: Copied) -> Callable[[], None]:
        return self._and_theirs(super().begin_copy(copied), Order.COPY, copied.serial, copied.buffer)

    def copy_for_part(self) -> tuple[Buffer, Callable[[], None]]:
        buffer, own = super().copy_for_part()
        return buffer, self._and_theirs(own, Order.PART, self._leader.parcel, buffer)

    def _and_theirs(self, own: Callable[[], None], order: Order, key: int, buffer: Buffer) -> Callable[[], None]:
        def wait() -> None:
            own()
            self._leader.gather(order, self.p, key, buffer.tensor)

        return wait

    def share(self, version: Version, value: Buffer) -> None:
        self._leader.share(self.p, version, value.tensor)


class LeaderBoundary(StepBoundary):
    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader

    def before(self) -> None:
        reshard(self._leader.fsdp)

    def give(self, action: Give) -> None:
        self._leader.parcel += 1
        super().give(action)

    def save(self, action: Save) -> None:
        self._leader.parcel += 1
        super().save(action)

    def take_inner(self) -> inner_state.Taken:
        taken = super().take_inner()
        return taken._replace(gather=partial(self._leader.gather_inner, self._leader.parcel))


def _words_of(action: Action) -> list[Any]:
    """What the other ranks have to know of an action."""
    match action:
        case Copy():
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
            return ["start", action.inner.warmup_steps, about, action.inner.restored]
        case End():
            return ["end", action.effect.reason.code, str(action.effect.reason)]


def _encoded(words: list[Any]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
