"""What a learner does between two steps, as a list of actions.

The list is made by whoever speaks to the syncer. An island of one rank carries it out as it is; in an island of many
ranks the leader's list goes to all of them, and each does its part at the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import nn
from torch.optim import Optimizer

from atoll.core.protocol import AdoptFragment, CopyFragment, Envelope, SaveSnapshot, StartTraining, Stop
from atoll.core.types import LearnerId, RunConfig
from atoll.ml import inner_state
from atoll.net.island_tensors import Buffer, Copied, FragmentTensors
from atoll.net.parts import Part, TakenPart, find_inner_state, take_part


class Copy(NamedTuple):
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
    taken: Future[inner_state.Taken]


class Save(NamedTuple):
    """Copy everything that this learner's part of a snapshot holds."""

    effect: SaveSnapshot
    taken: Future[TakenPart]


class Saved(NamedTuple):
    """A part that was found on disk, and its inner state as this optimizer takes it."""

    part: Part
    inner: inner_state.Prepared


class Start(NamedTuple):
    effect: StartTraining


class End(NamedTuple):
    effect: Stop


Action: TypeAlias = Copy | Adopt | Give | Save | Start | End


class Island(Protocol):
    """Where the ranks of one island come to the same list."""

    def agree(self, actions: list[Action]) -> list[Action]: ...


class Solo:
    """An island of one rank."""

    def agree(self, actions: list[Action]) -> list[Action]:
        return actions


class StepBoundary:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        fragments: list[FragmentTensors],
        blend_alpha: float,
        extra_state: Callable[[], Any] | None = None,
    ) -> None:
        self.fragments = fragments
        self._model = model
        self._optimizer = optimizer
        self._blend_alpha = blend_alpha
        self._extra_state = extra_state

    def copy(self, action: Copy) -> None:
        self.fragments[action.effect.round.fragment].copy(action.copied)

    def adopt(self, action: Adopt) -> None:
        fragment = self.fragments[action.effect.fragment]
        fragment.adopt(action.effect.how, action.value, action.reference, self._blend_alpha)
        fragment.release(action.value, action.reference)

    def give(self, action: Give) -> None:
        """A state that cannot travel is no reason to stop training: whoever sends it says so."""
        try:
            action.taken.set_result(inner_state.take(self._optimizer, self._model))
        except ValueError as wrong:
            action.taken.set_exception(wrong)

    def save(self, action: Save) -> None:
        """What cannot be saved is no reason to stop training either."""
        try:
            action.taken.set_result(take_part(self.fragments, self._optimizer, self._model, self._extra_state))
        except (ValueError, RuntimeError, MemoryError) as wrong:  # torch's way to say that there is no memory
            action.taken.set_exception(wrong)

    def find_saved(self, run: Path, config: RunConfig, learner: LearnerId, say: Callable[[str], None]) -> Saved | None:
        """While the training thread waits for the first step: inner state from a part in this run's directory."""
        found = find_inner_state(run, config, learner, self._optimizer, self._model, say)
        return Saved(*found) if found is not None else None

    def start(self, state: bytes | None, log: logging.Logger) -> bool:
        """The optimizer takes a peer's state. False: it did not fit, and training starts with fresh moments."""
        if state is None:
            return True
        try:
            inner_state.unpack(state, self._optimizer, self._model)
        except ValueError as wrong:
            log.warning("the peer's inner state is of no use here, moments are fresh: %s", wrong)
            return False
        return True

    def write_anchors(self) -> None:
        """The model as it was published, without the steps that came too late for the last merge."""
        for fragment in self.fragments:
            if fragment.anchor is not None:
                fragment.adopt("overwrite", fragment.anchor, None, 0.0)
