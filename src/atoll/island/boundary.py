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

from atoll.core.protocol import AdoptFragment, CopyFragment, Envelope, OptimizerState, SaveSnapshot, StartTraining, Stop
from atoll.core.types import FragmentId, LearnerId, RunConfig
from atoll.island.fragments import Buffer, FragmentTensors, PulledCopy
from atoll.island.rank_connection import BoundaryStatus, RankRequest
from atoll.store.learner_parts import FragmentCopy, LearnerPart, PartCopy, find_optimizer_state, get_rng_states
from atoll.store.optimizer_state_files import StateFile
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import Codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.plan import FragmentPlan


class CopyAction(NamedTuple):
    """Copy the fragment for a contribution."""

    effect: CopyFragment
    copied: PulledCopy


class AdoptAction(NamedTuple):
    """Take over a published version."""

    effect: AdoptFragment
    value: Buffer
    reference: Buffer | None


class CopyStateAction(NamedTuple):
    """Take a copy of the inner optimizer's state for a learner that joins."""

    envelope: Envelope
    state: Future[optimizer_state.OptimizerStateCopy]


def state_key(envelope: Envelope) -> tuple[int, int]:
    """One boundary may give to several learners, and the same learner may ask again at a later one."""
    assert isinstance(envelope.body, OptimizerState)
    return envelope.tick, envelope.body.target


class SavePartAction(NamedTuple):
    """Copy everything that this learner's part of a snapshot holds."""

    effect: SaveSnapshot
    part: Future[PartCopy]


class SavedState(NamedTuple):
    """A part that was found on disk, and its inner state as this optimizer takes it."""

    part: LearnerPart
    prepared: optimizer_state.PreparedState


class ReceivedState(NamedTuple):
    """Inner state that a peer has sent: metadata and whole tensors, and what of it this rank installs."""

    state: tuple[Mapping[str, Any], Mapping[str, Tensor]]
    prepared: optimizer_state.PreparedState


class InitialState(NamedTuple):
    """What an island starts with. `state`: metadata and whole tensors of inner state, for the other ranks of it."""

    warmup_steps: int
    prepared: optimizer_state.PreparedState | None
    state: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None
    part: LearnerPart | None  # this learner's own, which it goes on from
    is_loaded: bool = False  # the other ranks have read their own already

    @property
    def restored(self) -> Any:
        return self.part.extra if self.part is not None else None


class StartAction(NamedTuple):
    effect: StartTraining
    initial: InitialState | None = None  # known when it is carried out


class StopAction(NamedTuple):
    effect: Stop


DRAINED_REASONS = frozenset({"learner-left-on-request", "learner-drained", "learner-left-early"})
"""Reasons with which a learner leaves that was asked to."""

Action: TypeAlias = CopyAction | AdoptAction | CopyStateAction | SavePartAction | StartAction | StopAction


class SingleRankIsland:
    """An island of one rank, and the base of one of many: all ranks carry out the same actions at the same boundary."""

    generation = 0
    waited_s = 0.0
    transfer_mode = "alone"
    preemption_level = 0  # the most that another rank has got, see `Preemption.level`

    def gather_requests(self, kind: RankRequest, value: int = 0) -> int:
        """Wait until all ranks are here for the same thing. Return the sum of their values, over those that count."""
        return value

    def broadcast_actions(self, actions: list[Action], status: BoundaryStatus) -> list[Action]:
        """Send the actions to all ranks, which wait for them since `gather_requests`."""
        return actions

    def broadcast(self, commands: list[Any]) -> None:
        """While it joins: with no words, the other ranks know that this one is still there."""

    def pause_ranks(self) -> None:
        """All ranks want to leave, and rest with this one before they do."""

    def scatter_samples(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return numbers

    def make_view(self, model: nn.Module, plan: FragmentPlan) -> ModelView:
        return ModelView(model, plan)

    def make_fragment(self, view: ModelView, p: FragmentId, up: Codec) -> FragmentTensors:
        return FragmentTensors(view, p, up)

    def make_boundary(self, *args: Any) -> StepBoundary:
        return StepBoundary(*args)

    def fail(self, error: BaseException | type[BaseException]) -> None: ...

    def close(self) -> None: ...


T = TypeVar("T")


def resolve_future(future: Future[T], compute: Callable[[], T]) -> None:
    """Keep the promise with what is taken, or with the cause why it cannot be. Raises nothing.

    The cause goes on as text: an exception would keep the frames of its traceback alive, and with them copies of
    tensors for which there was no memory.
    """
    try:
        result = compute()
    except Exception as error:
        problem = summarize_error(error)
    else:
        future.set_result(result)
        return
    future.set_exception(ValueError(problem))


def copy_part(
    fragments: Sequence[FragmentTensors],
    take_state: Callable[[], optimizer_state.OptimizerStateCopy],
    extra_state: Callable[[], Any] | None,
) -> PartCopy:
    """Copy this learner's part of a snapshot, in the training thread. Raises ValueError for what cannot be saved."""
    extra = "null"
    if extra_state is not None:
        try:
            extra = json.dumps(extra_state(), allow_nan=False)
        except Exception as error:  # the user's code; training is worth more than its part
            raise ValueError(f"extra_state failed: {type(error).__name__}: {error}") from error
    inner = take_state()
    copies = []
    for fragment in fragments:
        buffer, wait = fragment.copy_for_part()
        copies.append(FragmentCopy(fragment.p, buffer.tensor, wait, partial(fragment.release, buffer)))
    return PartCopy(copies, inner, get_rng_states(), extra)


def summarize_error(error: Exception) -> str:
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

    def adopt(self, action: AdoptAction) -> None:
        fragment = self.fragments[action.effect.fragment]
        fragment.adopt(action.effect.mode, action.value, action.reference, self._blend_alpha)
        fragment.release(action.value, action.reference)

    def copy_state(self, action: CopyStateAction) -> None:
        """Copy the inner state. Whatever fails is the joining learner's loss: the background answers with the cause,
        and training goes on."""
        resolve_future(action.state, self._take_state_for_peer)

    def save_part(self, action: SavePartAction) -> None:
        """Copy a part of a snapshot. Whatever fails is reported to the syncer, and training goes on."""
        resolve_future(action.part, lambda: copy_part(self.fragments, self.take_optimizer_state, self._extra_state))

    def _take_state_for_peer(self) -> optimizer_state.OptimizerStateCopy:
        taken = self.take_optimizer_state()
        optimizer_state.check_has_state(self._optimizers, taken)
        return taken

    def take_optimizer_state(self) -> optimizer_state.OptimizerStateCopy:
        return optimizer_state.copy_state(self._optimizers, self._model)

    def prepare_actions(self) -> None:
        """Called when something is to be done at this boundary."""

    def find_saved_state(
        self, run: Path, config: RunConfig, learner: LearnerId, say: Callable[[str], None]
    ) -> SavedState | None:
        """While the training thread waits for the first step: inner state from a part in this run's directory."""
        found = find_optimizer_state(run, config, learner, self._optimizers, self._model, say, self.load_on_other_ranks)
        return SavedState(*found) if found is not None else None

    def load_on_other_ranks(self, part: LearnerPart) -> None:
        """The other ranks, if there are any, read their own of a part that fits here. Raises ValueError where they
        cannot."""

    def prepare_received_state(self, file: StateFile) -> ReceivedState:
        """While the training thread waits for the first step: check a peer's inner state. Raises ValueError where it
        does not fit."""
        state = file.read()
        return ReceivedState(state, optimizer_state.prepare(*state, self._optimizers, self._model))

    def make_initial_state(
        self,
        effect: StartTraining,
        given: ReceivedState | None,
        saved: SavedState | None,
        learner: LearnerId,
        log: logging.Logger,
    ) -> InitialState:
        """Return what training starts with."""
        if effect.state_source.code == "state-from-snapshot":
            assert saved is not None, f"{effect.state_source}, which nobody holds"
            # Two learners that draw the same numbers would learn the same: only its own part says what is drawn next.
            own = saved.part if saved.part.learner == learner else None
            state = (saved.part.note["inner"], saved.part.optimizer_tensors())
            warmup_steps = effect.warmup_steps
            try:
                optimizer_state.check_has_state(self._optimizers, saved.prepared)
            except ValueError as error:
                warmup_steps = max(warmup_steps, self.fresh_warmup_steps)
                log.warning("%s has no inner state, warming up for %d steps: %s", saved.part.path, warmup_steps, error)
            return InitialState(warmup_steps, saved.prepared, state, own)
        if effect.state_source.code == "state-from-peer":
            assert given is not None, f"{effect.state_source}, which never arrived"
            return InitialState(effect.warmup_steps, given.prepared, given.state, None)
        return InitialState(effect.warmup_steps, None, None, None)

    def write_anchors(self) -> None:
        """The model as it was published, without the steps that came too late for the last merge."""
        for fragment in self.fragments:
            if fragment.anchor is not None:
                fragment.adopt("overwrite", fragment.anchor, None, 0.0)
