"""Actions that a learner executes between two steps.

The rank that runs the protocol makes the list. An island of one rank executes it directly. In an island of several
ranks the leader broadcasts it, and each rank executes its part at the same step.
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
    """Copy the optimizer state for a learner that joins."""

    envelope: Envelope
    state: Future[optimizer_state.OptimizerStateCopy]


def state_key(envelope: Envelope) -> tuple[int, int]:
    """Return the key of a copied state. One boundary may copy for several learners, and a learner may request it
    again later."""
    assert isinstance(envelope.body, OptimizerState)
    return envelope.tick, envelope.body.target


class SavePartAction(NamedTuple):
    """Copy this learner's part of a snapshot."""

    effect: SaveSnapshot
    part: Future[PartCopy]


class SavedState(NamedTuple):
    """Part that was found on disk, with its optimizer state prepared for this optimizer."""

    part: LearnerPart
    prepared: optimizer_state.PreparedState


class ReceivedState(NamedTuple):
    """Optimizer state from a peer: metadata and full tensors, and what this rank installs of it."""

    state: tuple[Mapping[str, Any], Mapping[str, Tensor]]
    prepared: optimizer_state.PreparedState


class IslandInitialState(NamedTuple):
    """State from which an island starts. `state`: metadata and full tensors of optimizer state, for the other ranks."""

    warmup_steps: int
    prepared: optimizer_state.PreparedState | None
    state: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None
    part: LearnerPart | None  # this learner's own part, from which it resumes
    is_loaded: bool = False  # the other ranks have loaded their shards of the state

    @property
    def restored(self) -> Any:
        return self.part.extra if self.part is not None else None


class StartAction(NamedTuple):
    effect: StartTraining
    initial: IslandInitialState | None = None  # set before the action is executed


class StopAction(NamedTuple):
    effect: Stop


DRAINED_REASONS = frozenset({"learner-left-on-request", "learner-drained", "learner-left-early"})
"""Reasons with which a drained learner leaves."""

Action: TypeAlias = CopyAction | AdoptAction | CopyStateAction | SavePartAction | StartAction | StopAction


class SingleRankIsland:
    """Island of one rank, and base class of `Leader`. All ranks execute the same actions at the same boundary."""

    generation = 0
    waited_s = 0.0
    transfer_mode = "alone"
    preemption_level = 0  # highest level of the other ranks, see `Preemption.level`

    def gather_requests(self, kind: RankRequest, value: int = 0) -> int:
        """Wait for the same request from all ranks. Return the sum of the values of the ranks that count."""
        return value

    def broadcast_actions(self, actions: list[Action], status: BoundaryStatus) -> list[Action]:
        """Send the actions to all ranks, which wait since `gather_requests`."""
        return actions

    def broadcast(self, commands: list[Any]) -> None:
        """Send commands to all ranks during the join. An empty list is a heartbeat."""

    def pause_ranks(self) -> None:
        """Let all ranks pause with this one before they leave."""

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
    """Set the result of `compute`, or its error as text. Never raises.

    An exception object would keep the frames of its traceback alive, and with them copies of tensors for which there
    was no memory.
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
    """Copy this learner's part of a snapshot, in the training thread. Raise ValueError if it cannot be saved."""
    extra = "null"
    if extra_state is not None:
        try:
            extra = json.dumps(extra_state(), allow_nan=False)
        except Exception as error:  # the user's code must not end the training
            raise ValueError(f"extra_state failed: {type(error).__name__}: {error}") from error
    state = take_state()
    copies = []
    for fragment in fragments:
        buffer, wait = fragment.copy_for_part()
        copies.append(FragmentCopy(fragment.p, buffer.tensor, wait, partial(fragment.release, buffer)))
    return PartCopy(copies, state, get_rng_states(), extra)


def summarize_error(error: Exception) -> str:
    """Return an error in one line, with its file if it has one, and with its type unless it is a ValueError."""
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
        """Copy the optimizer state. On failure the joining learner receives the cause, and training continues."""
        resolve_future(action.state, self._take_state_for_peer)

    def save_part(self, action: SavePartAction) -> None:
        """Copy a part of a snapshot. A failure is reported to the syncer, and training continues."""
        resolve_future(action.part, lambda: copy_part(self.fragments, self.take_optimizer_state, self._extra_state))

    def _take_state_for_peer(self) -> optimizer_state.OptimizerStateCopy:
        state = self.take_optimizer_state()
        optimizer_state.check_has_state(self._optimizers, state)
        return state

    def take_optimizer_state(self) -> optimizer_state.OptimizerStateCopy:
        return optimizer_state.copy_state(self._optimizers, self._model)

    def prepare_actions(self) -> None:
        """Prepare the model before the actions of a boundary."""

    def find_saved_state(
        self, run: Path, config: RunConfig, learner: LearnerId, log: Callable[[str], None]
    ) -> SavedState | None:
        """Return optimizer state from a part in this run directory, while the training thread waits to start."""
        found = find_optimizer_state(run, config, learner, self._optimizers, self._model, log, self.load_on_other_ranks)
        return SavedState(*found) if found is not None else None

    def load_on_other_ranks(self, part: LearnerPart) -> None:
        """Let each other rank load its shards of a part that fits. Raise ValueError if one cannot."""

    def prepare_received_state(self, file: StateFile) -> ReceivedState:
        """Check a peer's optimizer state while the training thread waits. Raise ValueError if it does not fit."""
        state = file.read()
        return ReceivedState(state, optimizer_state.prepare(*state, self._optimizers, self._model))

    def make_initial_state(
        self,
        effect: StartTraining,
        received: ReceivedState | None,
        saved: SavedState | None,
        learner: LearnerId,
        log: logging.Logger,
    ) -> IslandInitialState:
        """Return the initial state for the training."""
        if effect.state_source.code == "state-from-snapshot":
            assert saved is not None, f"{effect.state_source}, but no part was found"
            # Only the learner's own part restores the random generators: two learners that draw the same numbers would
            # train on the same noise.
            own = saved.part if saved.part.learner == learner else None
            state = (saved.part.metadata["inner"], saved.part.optimizer_tensors())
            warmup_steps = effect.warmup_steps
            try:
                optimizer_state.check_has_state(self._optimizers, saved.prepared)
            except ValueError as error:
                warmup_steps = max(warmup_steps, self.fresh_warmup_steps)
                log.warning("%s has no optimizer state, warmup of %d steps: %s", saved.part.path, warmup_steps, error)
            return IslandInitialState(warmup_steps, saved.prepared, state, own)
        if effect.state_source.code == "state-from-peer":
            assert received is not None, f"{effect.state_source}, but none has arrived"
            return IslandInitialState(effect.warmup_steps, received.prepared, received.state, None)
        return IslandInitialState(effect.warmup_steps, None, None, None)

    def write_anchors(self) -> None:
        """Load the published values into the model. Steps that were too late for the last merge are lost."""
        for fragment in self.fragments:
            if fragment.anchor is not None:
                fragment.adopt("overwrite", fragment.anchor, None, 0.0)
