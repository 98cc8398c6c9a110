"""What a learner does between two steps, as a list of actions.

The list is made by whoever speaks to the syncer. An island of one rank carries it out as it is; in an island of many
ranks the leader's list goes to all of them, and each does its part at the same step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from atoll.core.protocol import AdoptFragment, CopyFragment, Envelope, InnerState, SaveSnapshot, StartTraining, Stop
from atoll.core.types import FragmentId, LearnerId, RunConfig
from atoll.island.fragments import Buffer, Copied, FragmentTensors
from atoll.island.rank_connection import BoundaryStatus, RankRequest
from atoll.store.learner_parts import FragmentCopy, Part, TakenPart, find_inner_state, take_rng
from atoll.store.optimizer_state_files import StateFile
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import Codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.plan import FragmentPlan


class CopyAction(NamedTuple):
    """Copy the fragment for a contribution."""

    effect: CopyFragment
    copied: Copied


class Adopt(NamedTuple):
    """Take over a published version."""

    effect: AdoptFragment
    value: Buffer
    reference: Buffer | None


class Give(NamedTuple):
    """Take a copy of the inner optimizer's state for a learner that joins."""

    envelope: Envelope
    taken: Future[optimizer_state.Taken]


def state_key(envelope: Envelope) -> tuple[int, int]:
    """One boundary may give to several learners, and the same learner may ask again at a later one."""
    assert isinstance(envelope.body, InnerState)
    return envelope.tick, envelope.body.to


class Save(NamedTuple):
    """Copy everything that this learner's part of a snapshot holds."""

    effect: SaveSnapshot
    taken: Future[TakenPart]


class Saved(NamedTuple):
    """A part that was found on disk, and its inner state as this optimizer takes it."""

    part: Part
    inner: optimizer_state.Prepared


class Given(NamedTuple):
    """Inner state that a peer has sent: metadata and whole tensors, and what of it this rank installs."""

    state: tuple[Mapping[str, Any], Mapping[str, Tensor]]
    prepared: optimizer_state.Prepared


class Starting(NamedTuple):
    """What an island starts with. `state`: metadata and whole tensors of inner state, for the other ranks of it."""

    warmup_steps: int
    prepared: optimizer_state.Prepared | None
    state: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None
    part: Part | None  # this learner's own, which it goes on from
    is_loaded: bool = False  # the other ranks have read their own already

    @property
    def restored(self) -> Any:
        return self.part.extra if self.part is not None else None


class Start(NamedTuple):
    effect: StartTraining
    inner: Starting | None = None  # known when it is carried out


class End(NamedTuple):
    effect: Stop


LEFT = frozenset({"learner-drained", "learner-pushed", "learner-hurried"})
"""Reasons with which a learner leaves that was asked to."""

Action: TypeAlias = CopyAction | Adopt | Give | Save | Start | End


class SingleRankIsland:
    """An island of one rank, and the base of one of many: all ranks carry out the same actions at the same boundary."""

    generation = 0
    waited_s = 0.0
    way = "alone"
    noticed = 0  # the most that another rank has got, see `Notice.level`

    def hear(self, kind: RankRequest, value: int = 0) -> int:
        """Wait until all ranks are here for the same thing. Return the sum of their values, over those that count."""
        return value

    def agree(self, actions: list[Action], told: BoundaryStatus) -> list[Action]:
        """Send the actions to all ranks, which wait for them since `hear`."""
        return actions

    def say(self, words: list[Any]) -> None:
        """While it joins: with no words, the other ranks know that this one is still there."""

    def stay(self) -> None:
        """All ranks want to leave, and rest with this one before they do."""

    def deal(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return numbers

    def view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        return ModelView(model, plan)

    def fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return FragmentTensors(view, p, up)

    def boundary(self, *args: Any) -> StepBoundary:
        return StepBoundary(*args)

    def fail(self, wrong: BaseException | type[BaseException]) -> None: ...

    def close(self) -> None: ...


T = TypeVar("T")


def settle(promised: Future[T], take: Callable[[], T]) -> None:
    """Keep the promise with what is taken, or with the cause why it cannot be. Raises nothing.

    The cause goes on as text: an exception would keep the frames of its traceback alive, and with them copies of
    tensors for which there was no memory.
    """
    try:
        taken = take()
    except Exception as error:
        problem = cause_of(error)
    else:
        promised.set_result(taken)
        return
    promised.set_exception(ValueError(problem))


def take_part(
    fragments: Sequence[FragmentTensors],
    take_inner: Callable[[], optimizer_state.Taken],
    extra_state: Callable[[], Any] | None,
) -> TakenPart:
    """Copy this learner's part of a snapshot, in the training thread. Raises ValueError for what cannot be saved."""
    extra = "null"
    if extra_state is not None:
        try:
            extra = json.dumps(extra_state(), allow_nan=False)
        except Exception as error:  # the user's code; training is worth more than its part
            raise ValueError(f"extra_state failed: {type(error).__name__}: {error}") from error
    inner = take_inner()
    copies = []
    for fragment in fragments:
        buffer, wait = fragment.copy_for_part()
        copies.append(FragmentCopy(fragment.p, buffer.tensor, wait, partial(fragment.release, buffer)))
    return TakenPart(copies, inner, take_rng(), extra)


def cause_of(error: Exception) -> str:
    """Return what went wrong in one line: with the file, or with the type unless it is a sentence of ours."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


class StepBoundary:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        fragments: list[FragmentTensors],
        blend_alpha: float,
        extra_state: Callable[[], Any] | None = None,
        fresh_warmup_steps: int = 0,
    ) -> None:
        self.fragments = fragments
        self._model = model
        self._optimizers = optimizers
        self._blend_alpha = blend_alpha
        self._extra_state = extra_state
        self.fresh_warmup_steps = fresh_warmup_steps

    def adopt(self, action: Adopt) -> None:
        fragment = self.fragments[action.effect.fragment]
        fragment.adopt(action.effect.how, action.value, action.reference, self._blend_alpha)
        fragment.release(action.value, action.reference)

    def give(self, action: Give) -> None:
        """Copy the inner state. Whatever fails is the joining learner's loss: the background answers with the cause,
        and training goes on."""
        settle(action.taken, self._take_to_give)

    def save(self, action: Save) -> None:
        """Copy a part of a snapshot. Whatever fails is reported to the syncer, and training goes on."""
        settle(action.taken, lambda: take_part(self.fragments, self.take_inner, self._extra_state))

    def _take_to_give(self) -> optimizer_state.Taken:
        taken = self.take_inner()
        optimizer_state.check_holds_state(self._optimizers, taken)
        return taken

    def take_inner(self) -> optimizer_state.Taken:
        return optimizer_state.take(self._optimizers, self._model)

    def before(self) -> None:
        """Called when something is to be done at this boundary."""

    def find_saved(self, run: Path, config: RunConfig, learner: LearnerId, say: Callable[[str], None]) -> Saved | None:
        """While the training thread waits for the first step: inner state from a part in this run's directory."""
        found = find_inner_state(run, config, learner, self._optimizers, self._model, say, self.others_load)
        return Saved(*found) if found is not None else None

    def others_load(self, part: Part) -> None:
        """The other ranks, if there are any, read their own of a part that fits here. Raises ValueError where they
        cannot."""

    def prepare_given(self, file: StateFile) -> Given:
        """While the training thread waits for the first step: check a peer's inner state. Raises ValueError where it
        does not fit."""
        state = file.read()
        return Given(state, optimizer_state.prepare(*state, self._optimizers, self._model))

    def starting(
        self,
        effect: StartTraining,
        given: Given | None,
        saved: Saved | None,
        learner: LearnerId,
        log: logging.Logger,
    ) -> Starting:
        """Return what training starts with."""
        if effect.moments.code == "moments-saved":
            assert saved is not None, f"{effect.moments}, which nobody holds"
            # Two learners that draw the same numbers would learn the same: only its own part says what is drawn next.
            own = saved.part if saved.part.learner == learner else None
            state = (saved.part.note["inner"], saved.part.inner_tensors())
            warmup_steps = effect.warmup_steps
            try:
                optimizer_state.check_holds_state(self._optimizers, saved.inner)
            except ValueError as error:
                warmup_steps = max(warmup_steps, self.fresh_warmup_steps)
                log.warning("%s has no inner state, warming up for %d steps: %s", saved.part.path, warmup_steps, error)
            return Starting(warmup_steps, saved.inner, state, own)
        if effect.moments.code == "moments-peer":
            assert given is not None, f"{effect.moments}, which never arrived"
            return Starting(effect.warmup_steps, given.prepared, given.state, None)
        return Starting(effect.warmup_steps, None, None, None)

    def write_anchors(self) -> None:
        """The model as it was published, without the steps that came too late for the last merge."""
        for fragment in self.fragments:
            if fragment.anchor is not None:
                fragment.adopt("overwrite", fragment.anchor, None, 0.0)
