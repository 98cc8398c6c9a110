"""A mixin that makes torchtitan's Trainer a learner. Nothing of torchtitan is imported here.

    class IslandTrainer(AtollTrainerMixin, torchtitan.trainer.Trainer):
        atoll_schedule = staticmethod(cosine(warmup=0.01))

It reads the trainer's `model_parts`, `optimizers`, `dataloader` and, if they exist, `validator` and `parallel_dims`. It
overrides `train`, `batch_generator`, `forward_backward_step`, `train_step` and `should_continue_training`
(docs/torchtitan.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.integrations.batches import TokenCounter
from atoll.integrations.data import loader_position, restore_position
from atoll.integrations.schedules import ProgressSchedule, RateCurve
from atoll.learner.api import Learner

Batches: TypeAlias = Iterator[tuple[dict[str, Tensor], Tensor]]

if TYPE_CHECKING:

    class _Trainer:
        """Interface of torchtitan's trainer that the mixin uses."""

        model_parts: list[torch.nn.Module]
        optimizers: Any
        dataloader: Any

        def train(self) -> None: ...

        def batch_generator(self, data_iterable: Any) -> Batches: ...

        def forward_backward_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

        def train_step(self, data_iterator: Any) -> Any: ...

        def should_continue_training(self) -> bool: ...
else:
    _Trainer = object


class AtollTrainerMixin(_Trainer):
    """Mixin that precedes torchtitan's Trainer in the list of base classes. Its two attributes are optional.

    `atoll_settings`: arguments of `atoll.Learner`; missing ones are read from the environment (ATOLL_SYNCER, ...).
    `atoll_schedule`: a rate curve over the run's progress. It replaces torchtitan's schedule, which counts local steps.
    """

    atoll_settings: Mapping[str, Any] = MappingProxyType({})
    atoll_schedule: RateCurve | None = None

    learner: Learner | None = None
    _schedule: ProgressSchedule | None = None
    _tokens: TokenCounter | None = None  # tokens of the batches since the last step
    _losses: Tensor | None = None  # sum over these batches
    _losses_are_sums = False  # losses are sums over tokens, and not means
    _is_joined = False

    def train(self) -> None:
        try:
            super().train()
        except BaseException as error:
            self._leave(error)
            raise
        self._leave(None)

    def batch_generator(self, data_iterable: Any) -> Batches:
        """Join. The trainer calls this once, after its checkpoint is loaded and before the first batch."""
        self._join(data_iterable)
        self._tokens = TokenCounter()
        return self._counting(super().batch_generator(data_iterable), self._tokens)

    def _counting(self, batches: Batches, counter: TokenCounter) -> Batches:
        # Ranks of context parallelism read the same sequences, and each of them counts its share.
        shared = getattr(getattr(self, "parallel_dims", None), "cp", 1)
        for inputs, labels in batches:
            counter.add({"labels": labels}, shared)
            yield inputs, labels

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().forward_backward_step(*args, **kwargs)
        # Newer trainers return this batch's share of the mean over all ranks. The sum is needed here.
        part = loss.detach() * kwargs.get("global_valid_tokens", 1)
        self._losses = part if self._losses is None else self._losses + part
        self._losses_are_sums = "global_valid_tokens" in kwargs
        return loss

    def train_step(self, data_iterator: Any) -> Any:
        found = super().train_step(data_iterator)
        if self.learner is not None and self._is_joined:
            assert self._tokens is not None, "the learner has joined before the batches were counted"
            tokens, losses = self._tokens.pop_total(), self._losses
            self._losses = None
            if losses is not None and self._losses_are_sums:
                losses = losses / tokens
            self.learner.step(tokens=tokens, loss=losses)
            if self._schedule is not None:
                self._schedule.update_rates()
        return found

    def should_continue_training(self) -> bool:
        return not (self.learner is not None and self.learner.finished) and super().should_continue_training()

    # --------------------------------------------------------------------------------------------- joining, leaving

    def _join(self, loader: Any) -> None:
        model, optimizer = _single_model_and_optimizer(self.model_parts, self.optimizers)
        settings = {"extra_state": lambda: loader_position(loader)} if hasattr(loader, "load_state_dict") else {}
        self.learner = learner = Learner(model, optimizer, **(settings | dict(self.atoll_settings)))
        learner.__enter__()
        self._is_joined = True
        if learner.restored_state is not None and "extra_state" not in self.atoll_settings and settings:
            restore_position(loader, learner.restored_state)
        if self.atoll_schedule is not None:
            self._schedule = ProgressSchedule(optimizer, _unbound_curve(self.atoll_schedule), learner)
        validator = getattr(self, "validator", None)
        if validator is not None:
            _validate_published_values(validator, learner)

    def _leave(self, error: BaseException | None) -> None:
        if self.learner is not None and self._is_joined:
            self._is_joined = False
            self.learner.__exit__(None, error, None)


def _unbound_curve(shape: RateCurve) -> RateCurve:
    """Return the plain function of a schedule. As an attribute of a class it would be bound like a method."""
    if isinstance(shape, MethodType) and len(inspect.signature(shape.__func__).parameters) == 1:
        curve: RateCurve = shape.__func__
        return curve
    return shape


def _single_model_and_optimizer(parts: list[torch.nn.Module], optimizers: Any) -> tuple[torch.nn.Module, Optimizer]:
    """Return the only model and optimizer. torchtitan's container is an optimizer itself, but has no state."""
    found = list(getattr(optimizers, "optimizers", [optimizers]))
    if len(parts) != 1:
        raise ValueError(
            f"this rank has {len(parts)} parts of the model: pipeline stages are not supported yet; use FSDP and"
            " tensor parallelism, with pipeline_parallel_degree = 1"
        )
    if len(found) != 1:
        raise ValueError(
            f"the model has {len(found)} optimizers, but the learner takes one here: leave early_step_in_backward off,"
            " and use one optimizer with parameter groups"
        )
    return parts[0], found[0]


def _validate_published_values(validator: Any, learner: Learner) -> None:
    own = validator.validate

    def validate(*args: Any, **kwargs: Any) -> Any:
        with learner.published():
            return own(*args, **kwargs)

    validator.validate = validate


__all__ = ["AtollTrainerMixin"]
