"""torchtitan's Trainer on an island: a class before it, and nothing of torchtitan is imported here.

    class IslandTrainer(AtollTrainerMixin, torchtitan.trainer.Trainer):
        atoll_schedule = staticmethod(cosine(warmup=0.01))

It looks at the trainer's `model_parts`, `optimizers`, `dataloader` and, where there are, `validator` and
`parallel_dims`, and puts itself around `train`, `batch_generator`, `forward_backward_step`, `train_step` and
`should_continue_training` (docs/torchtitan.md).
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
        """What of torchtitan's is used."""

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
    """Put it before torchtitan's Trainer. Two attributes may be set, in the class or before `train`.

    `atoll_settings`: arguments of `atoll.Learner`; what is not there is taken from the environment (ATOLL_SYNCER, ...).
    `atoll_schedule`: a rate by the progress of the run in place of torchtitan's schedule, which goes by own steps.
    """

    atoll_settings: Mapping[str, Any] = MappingProxyType({})
    atoll_schedule: RateCurve | None = None

    learner: Learner | None = None
    _schedule: ProgressSchedule | None = None
    _tokens: TokenCounter | None = None  # of the batches since the last step
    _losses: Tensor | None = None  # sum over them
    _is_sum = False  # of tokens, and not a mean
    _is_joined = False

    def train(self) -> None:
        try:
            super().train()
        except BaseException as wrong:
            self._leave(wrong)
            raise
        self._leave(None)

    def batch_generator(self, data_iterable: Any) -> Batches:
        """Joins: the trainer asks for its batches once, when its checkpoint is loaded and before the first of them."""
        self._join(data_iterable)
        self._tokens = TokenCounter()
        return self._counting(super().batch_generator(data_iterable), self._tokens)

    def _counting(self, batches: Batches, counted: TokenCounter) -> Batches:
        # Ranks of context parallelism read the same sequences, and all of them are asked.
        shared = getattr(getattr(self, "parallel_dims", None), "cp", 1)
        for inputs, labels in batches:
            counted.add({"labels": labels}, shared)
            yield inputs, labels

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().forward_backward_step(*args, **kwargs)
        # Newer trainers give the share of this batch in the mean over all ranks: here the sum is wanted.
        part = loss.detach() * kwargs.get("global_valid_tokens", 1)
        self._losses = part if self._losses is None else self._losses + part
        self._is_sum = "global_valid_tokens" in kwargs
        return loss

    def train_step(self, data_iterator: Any) -> Any:
        found = super().train_step(data_iterator)
        if self.learner is not None and self._is_joined:
            assert self._tokens is not None, "it has joined where it asks for batches"
            tokens, losses = self._tokens.pop_total(), self._losses
            self._losses = None
            if losses is not None and self._is_sum:
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

    def _leave(self, wrong: BaseException | None) -> None:
        if self.learner is not None and self._is_joined:
            self._is_joined = False
            self.learner.__exit__(None, wrong, None)


def _unbound_curve(shape: RateCurve) -> RateCurve:
    """A function in the body of a class becomes a method. One of progress alone was not meant to be one."""
    if isinstance(shape, MethodType) and len(inspect.signature(shape.__func__).parameters) == 1:
        found: RateCurve = shape.__func__
        return found
    return shape


def _single_model_and_optimizer(parts: list[torch.nn.Module], optimizers: Any) -> tuple[torch.nn.Module, Optimizer]:
    """torchtitan's container has an optimizer for each part of the model, and is one itself, without any state."""
    held = list(getattr(optimizers, "optimizers", [optimizers]))
    if len(parts) != 1:
        raise ValueError(
            f"this rank has {len(parts)} parts of the model: stages of a pipeline cannot be an island yet; use FSDP and"
            " tensor parallelism, with pipeline_parallel_degree = 1"
        )
    if len(held) != 1:
        raise ValueError(
            f"the model has {len(held)} optimizers, and this trainer takes one: leave early_step_in_backward off, and"
            " use one optimizer with parameter groups"
        )
    return parts[0], held[0]


def _validate_published_values(validator: Any, learner: Learner) -> None:
    own = validator.validate

    def validate(*args: Any, **kwargs: Any) -> Any:
        with learner.published():
            return own(*args, **kwargs)

    validator.validate = validate


__all__ = ["AtollTrainerMixin"]
